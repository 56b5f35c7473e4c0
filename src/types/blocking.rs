//! Work that blocks a thread, in bounded bursts.
//!
//! After a mass start hundreds of pods have directories to make and cgroups to write at once. Every thread
//! that is started for them costs memory long after it has ended, and none of them makes the kernel faster.
//!
//! **Invariant:** the bound is a matter of politeness, never of progress: who has waited two seconds
//! goes ahead, so that work that hangs (a dead NFS server) does not hold up the rest of the node.

use std::cell::Cell;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::{JoinError, JoinHandle};

/// Number of such tasks that run at once, as long as they make progress.
const AT_ONCE: usize = 8;
/// Time after which waiting work starts regardless of the limit.
const PATIENCE: Duration = Duration::from_secs(2);

static TURNS: Semaphore = Semaphore::const_new(AT_ONCE);

thread_local! {
    static IN_PLACE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work` on a thread where it may block, a few at a time. Once started it runs to its end, even if
/// the future is dropped.
///
/// # Errors
/// When `work` panicked, or the async runtime is shutting down.
pub async fn run<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    start(&TURNS, work).await.await
}

/// As [`run`], with turns of the caller's own: for work that must not take the place of what pods wait for.
///
/// # Errors
/// As [`run`].
pub async fn run_in<T: Send + 'static>(
    turns: &'static Semaphore,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    start(turns, work).await.await
}

async fn start<T: Send + 'static>(
    turns: &'static Semaphore,
    work: impl FnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    let turn = tokio::time::timeout(PATIENCE, turns.acquire()).await;
    spawn(move || {
        // Given back when the work ends; absent when patience ended first.
        let _turn = turn;
        work()
    })
}

/// Starts `work` at once on a thread where it may block.
pub fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    if IN_PLACE.get() {
        return tokio::spawn(async move { work() });
    }
    tokio::task::spawn_blocking(work)
}

/// Makes work that is asked for on this thread run on it, between other tasks: for simulations, where a second thread would make the order
/// of events differ from run to run.
pub fn run_in_place_on_this_thread() {
    IN_PLACE.set(true);
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::sync::mpsc;

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn only_so_much_runs_at_once() {
        static RUNNING: AtomicUsize = AtomicUsize::new(0);
        static MOST: AtomicUsize = AtomicUsize::new(0);
        let jobs: Vec<_> = (0..40)
            .map(|_| {
                tokio::spawn(run(|| {
                    MOST.fetch_max(RUNNING.fetch_add(1, SeqCst) + 1, SeqCst);
                    std::thread::yield_now();
                    RUNNING.fetch_sub(1, SeqCst);
                }))
            })
            .collect();
        for job in jobs {
            job.await.unwrap().unwrap();
        }
        assert!((1..=AT_ONCE).contains(&MOST.load(SeqCst)));
    }

    #[tokio::test]
    async fn work_that_hangs_does_not_hold_up_the_rest() {
        static OWN: Semaphore = Semaphore::const_new(1);
        let (end, hangs) = mpsc::channel::<()>();
        let hung = start(&OWN, move || hangs.recv()).await;
        let other = start(&OWN, || 7).await;
        assert_eq!(other.await.unwrap(), 7);
        drop(end);
        assert!(hung.await.unwrap().is_err());
    }

    #[tokio::test]
    async fn a_panic_is_told() {
        #[allow(clippy::panic, reason = "what is tested")]
        let result = run(|| panic!("of the work")).await;
        assert!(result.unwrap_err().is_panic());
    }
}
