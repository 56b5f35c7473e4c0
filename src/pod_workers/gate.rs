//! Limits how many pods start at a time. Starts are let through in the order of their requests.
//!
//! A runtime that is asked for a hundred sandboxes at once takes longer for all of them than for four at a time,
//! and nobody's pod runs before almost all do.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

/// A start that takes longer than this waits for something else than the runtime's turn (an image that is
/// pulled, a network that hangs): it goes on, and the next one begins.
const SLOW: Duration = Duration::from_secs(3);

/// Shared handle.
#[derive(Clone, Debug)]
pub struct StartGate(Arc<Semaphore>);

impl StartGate {
    /// At most `at_once` starts that are not slow.
    pub fn new(at_once: usize) -> Self {
        Self(Arc::new(Semaphore::new(at_once.max(1))))
    }

    /// Does `work` when it is its turn; the turns go in the order of the calls. Cancel-safe: a dropped call gives
    /// its turn back.
    pub async fn pass<T>(&self, work: impl Future<Output = T>) -> T {
        // Nobody closes the semaphore; if somebody did, nothing would be bounded, and nothing stopped.
        let turn = self.0.acquire().await;
        let mut work = std::pin::pin!(work);
        match tokio::time::timeout(SLOW, &mut work).await {
            Ok(done) => done,
            Err(_) => {
                drop(turn);
                work.await
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn starts_go_in_order_and_a_slow_one_makes_room() {
        let gate = StartGate::new(2);
        let done = Arc::new(Mutex::new(Vec::new()));
        let start = tokio::time::Instant::now();
        let mut tasks = Vec::new();
        for (name, seconds) in [("slow", 20), ("a", 1), ("b", 1), ("c", 1), ("d", 1)] {
            let (gate, done) = (gate.clone(), Arc::clone(&done));
            tasks.push(tokio::spawn(async move {
                gate.pass(async { tokio::time::sleep(Duration::from_secs(seconds)).await })
                    .await;
                done.lock().unwrap().push((name, start.elapsed().as_secs()));
            }));
            tokio::task::yield_now().await;
        }
        for task in tasks {
            task.await.unwrap();
        }
        // One at a time beside the slow one, until that has lost its turn after 3 s.
        let done = done.lock().unwrap();
        assert_eq!(
            *done,
            [("a", 1), ("b", 2), ("c", 3), ("d", 4), ("slow", 20)]
        );
    }
}
