//! Reachability of the API server: shared state that every request writes and any waiter reads.

use std::sync::Arc;

use tokio::sync::watch;

/// Outcome of the newest request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reachability {
    /// Nothing was tried yet.
    Untried,
    /// It answered.
    Up,
    /// It did not, with the error of the first request that failed.
    Down(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    now: Reachability,
    /// It answered at least once in this run of the agent.
    ever: bool,
}

/// Shared handle. A change is logged once, however many requests fail.
#[derive(Clone, Debug)]
pub struct Connection {
    seen: Arc<watch::Sender<Seen>>,
    set_back: Arc<watch::Sender<u64>>,
}

impl Default for Connection {
    fn default() -> Self {
        Self {
            seen: Arc::new(watch::Sender::new(Seen {
                now: Reachability::Untried,
                ever: false,
            })),
            set_back: Arc::default(),
        }
    }
}

impl Connection {
    /// The server answered a request, whatever it said.
    pub fn answered(&self) {
        let changed = self.seen.send_if_modified(|seen| {
            let changed = seen.now != Reachability::Up;
            seen.now = Reachability::Up;
            seen.ever = true;
            changed
        });
        if changed {
            tracing::info!("the API server answers");
        }
    }

    /// A request got no answer.
    pub fn failed(&self, error: &str) {
        let changed = self.seen.send_if_modified(|seen| {
            let changed = !matches!(seen.now, Reachability::Down(_));
            if changed {
                seen.now = Reachability::Down(error.to_owned());
            }
            changed
        });
        if changed {
            tracing::warn!(
                error,
                "the API server does not answer, continuing without it"
            );
        }
    }

    /// Returns the current state.
    pub fn now(&self) -> Reachability {
        self.seen.borrow().now.clone()
    }

    /// Returns whether the server answered at least once in this run of the agent.
    pub fn ever_answered(&self) -> bool {
        self.seen.borrow().ever
    }

    /// The server is known to have been restored to an older state, as from a backup of etcd.
    pub fn was_set_back(&self) {
        self.set_back.send_modify(|times| *times += 1);
    }

    /// Returns what changes when the server was set back. A watch that goes on says nothing then until the server has
    /// reached the version that the watch began with, so everything must be read anew.
    pub fn set_back(&self) -> watch::Receiver<u64> {
        self.set_back.subscribe()
    }

    /// Waits until it answers; at once when it does. Cancel-safe.
    pub async fn up(&self) {
        let mut seen = self.seen.subscribe();
        // The sender lives as long as `self`.
        drop(seen.wait_for(|seen| seen.now == Reachability::Up).await);
    }

    /// Waits for the next change of [`Connection::now`] after this call. Cancel-safe.
    pub async fn changed(&self) {
        let mut seen = self.seen.subscribe();
        drop(seen.changed().await);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_first_error_of_an_outage_is_kept_and_an_answer_ends_it() {
        let connection = Connection::default();
        assert_eq!(connection.now(), Reachability::Untried);
        connection.failed("refused");
        connection.failed("timed out");
        assert_eq!(connection.now(), Reachability::Down("refused".to_owned()));
        assert!(!connection.ever_answered());
        let waiting = tokio::spawn({
            let connection = connection.clone();
            async move { connection.up().await }
        });
        connection.answered();
        waiting.await.unwrap();
        connection.failed("refused again");
        assert!(connection.ever_answered());
    }
}
