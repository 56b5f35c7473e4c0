//! Status of the node's credentials: shared state that [`super::Credentials`] writes. Its readers report it, or wait
//! for other credentials.

use std::sync::Arc;

use tokio::sync::watch;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct State {
    trouble: Option<String>,
    /// Counts the credentials that were taken into use.
    taken: u64,
}

/// Shared handle.
#[derive(Clone, Debug)]
pub struct Standing(Arc<watch::Sender<State>>);

impl Default for Standing {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(State::default())))
    }
}

impl Standing {
    /// Returns what is wrong with the node's credentials and how to end it; `None` when nothing is that the agent does
    /// not correct itself.
    pub fn trouble(&self) -> Option<String> {
        self.0.borrow().trouble.clone()
    }

    /// Returns what waits until credentials are taken into use after this call. Cancel-safe.
    pub fn replaced(&self) -> impl Future<Output = ()> + use<> {
        let sender = Arc::clone(&self.0);
        let mut state = sender.subscribe();
        let before = state.borrow_and_update().taken;
        async move {
            // The sender lives as long as this.
            drop(state.wait_for(|state| state.taken != before).await);
            drop(sender);
        }
    }

    /// Shows what is wrong, or that nothing is.
    pub(crate) fn set_trouble(&self, trouble: Option<String>) {
        self.0.send_if_modified(|state| {
            let is_other = state.trouble != trouble;
            state.trouble = trouble;
            is_other
        });
    }

    /// Notes that other credentials are in use.
    pub(crate) fn taken(&self) {
        self.0.send_modify(|state| state.taken += 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn who_waits_for_other_credentials_is_woken_by_them_alone() {
        let standing = Standing::default();
        standing.taken();
        let waiting = tokio::spawn(standing.replaced());
        tokio::task::yield_now().await;
        standing.set_trouble(Some("expired".to_owned()));
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        assert_eq!(standing.trouble().as_deref(), Some("expired"));
        standing.taken();
        waiting.await.unwrap();
    }
}
