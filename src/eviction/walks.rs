//! Measurements of pods beside the async threads.
//!
//! **Invariant:** a measurement that hangs, because a server or device is gone, holds one thread and keeps its own pod
//! unmeasured. It takes no turn of the others, and is not begun again before it has ended.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::JoinError;

use super::usage::Stop;
use crate::types::PodUid;

/// Number of pods that are measured at once.
const AT_ONCE: usize = 4;
/// Deadline of a measurement; after that it is stopped.
pub(super) const DEADLINE: Duration = Duration::from_secs(120);
/// Time that a stopped measurement has to end. One that does not end counts as hanging.
pub(super) const GRACE: Duration = Duration::from_secs(10);

/// Reason why a pod was not measured. Containers cannot cause it.
#[derive(Debug, thiserror::Error)]
pub enum WalkError {
    /// The one before has not ended.
    #[error("an earlier measurement still hangs")]
    Busy,
    /// It hangs.
    #[error("the measurement hangs: a device or server may be gone")]
    Hangs,
    /// It panicked, or the agent ends.
    #[error("the measurement was cut off: {0}")]
    CutOff(#[source] JoinError),
}

/// Measures pods, a few at a time and each once at a time. Clones share that.
#[derive(Clone, Debug)]
pub struct Walks {
    turns: Arc<Semaphore>,
    under_way: Arc<Mutex<HashSet<PodUid>>>,
}

impl Default for Walks {
    fn default() -> Self {
        Self {
            turns: Arc::new(Semaphore::new(AT_ONCE)),
            under_way: Arc::default(),
        }
    }
}

impl Walks {
    /// Runs `work`, which measures a pod, on a thread where it may block. After two minutes it is told by its [`Stop`] to
    /// end with what it has, and so it is when the future is dropped.
    ///
    /// # Errors
    /// See [`WalkError`].
    pub async fn run<T: Send + 'static>(
        &self,
        uid: &PodUid,
        work: impl FnOnce(&Stop) -> T + Send + 'static,
    ) -> Result<T, WalkError> {
        let busy = self.begin(uid).ok_or(WalkError::Busy)?;
        // Not given to the thread: one that hangs gives its turn back. Never closed.
        let _turn = self.turns.acquire().await;
        let stop = StopAtEnd(Arc::default());
        let seen = Arc::clone(&stop.0);
        let mut walk = tokio::task::spawn_blocking(move || {
            let _busy = busy;
            work(&seen)
        });
        if let Ok(done) = tokio::time::timeout(DEADLINE, &mut walk).await {
            return done.map_err(WalkError::CutOff);
        }
        stop.0.set();
        match tokio::time::timeout(GRACE, walk).await {
            Ok(done) => done.map_err(WalkError::CutOff),
            Err(_) => Err(WalkError::Hangs),
        }
    }

    fn begin(&self, uid: &PodUid) -> Option<Busy> {
        let is_new = self.under_way().insert(uid.clone());
        is_new.then(|| Busy {
            walks: self.clone(),
            uid: uid.clone(),
        })
    }

    fn under_way(&self) -> MutexGuard<'_, HashSet<PodUid>> {
        // Every change is a single call.
        let lock = self.under_way.lock();
        lock.unwrap_or_else(PoisonError::into_inner)
    }
}

/// A pod that is measured.
struct Busy {
    walks: Walks,
    uid: PodUid,
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.walks.under_way().remove(&self.uid);
    }
}

/// Nobody waits for the walk any more.
struct StopAtEnd(Arc<Stop>);

impl Drop for StopAtEnd {
    fn drop(&mut self) {
        self.0.set();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn uid(n: usize) -> PodUid {
        PodUid::new(format!("u{n}"))
    }

    /// Waits until no thread measures any more.
    async fn idle(walks: &Walks) {
        for _ in 0..30_000 {
            if walks.under_way().is_empty() {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
            tokio::task::yield_now().await;
        }
        panic!("a walk does not end");
    }

    /// Time stands still while threads work, unless it is moved.
    async fn pass(time: Duration) {
        tokio::task::yield_now().await;
        tokio::time::advance(time + Duration::from_secs(1)).await;
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_hangs_keeps_only_its_own_pod_from_being_measured() {
        let walks = Walks::default();
        let mut ends = Vec::new();
        let mut hung = Vec::new();
        for n in 0..AT_ONCE {
            let (end, hangs) = mpsc::channel::<()>();
            ends.push(end);
            let walks = walks.clone();
            hung.push(tokio::spawn(async move {
                walks.run(&uid(n), move |_| hangs.recv().is_ok()).await
            }));
        }
        pass(DEADLINE).await;
        pass(GRACE).await;
        for hung in hung {
            assert!(hung.is_finished());
            assert!(matches!(hung.await.unwrap(), Err(WalkError::Hangs)));
        }
        let again = walks.run(&uid(0), |_| 7).await;
        assert!(matches!(again, Err(WalkError::Busy)));
        assert_eq!(walks.run(&uid(AT_ONCE), |_| 7).await.unwrap(), 7);
        drop(ends);
        idle(&walks).await;
        assert_eq!(walks.run(&uid(0), |_| 7).await.unwrap(), 7);
    }

    #[tokio::test(start_paused = true)]
    async fn what_takes_too_long_ends_with_what_it_has() {
        let walks = Walks::default();
        let of = walks.clone();
        let until_told = |stop: &Stop| {
            while !stop.is_set() {
                std::thread::yield_now();
            }
            7
        };
        let long = tokio::spawn(async move { of.run(&uid(0), until_told).await });
        pass(DEADLINE).await;
        assert_eq!(long.await.unwrap().unwrap(), 7);
    }

    #[tokio::test]
    async fn a_walk_that_nobody_waits_for_ends() {
        let walks = Walks::default();
        let (told, begun) = tokio::sync::oneshot::channel();
        let of = walks.clone();
        let walk = tokio::spawn(async move {
            let work = move |stop: &Stop| {
                told.send(()).unwrap();
                while !stop.is_set() {
                    std::thread::yield_now();
                }
            };
            of.run(&uid(0), work).await
        });
        begun.await.unwrap();
        walk.abort();
        idle(&walks).await;
    }
}
