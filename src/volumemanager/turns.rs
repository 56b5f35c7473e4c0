//! Work on one thing, a disk or a target, one at a time and to its end, whoever still waits for it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::remote::RemoteError;

/// Locks by name. Cheap to clone; clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Turns(Arc<Mutex<HashMap<String, Weak<tokio::sync::Mutex<()>>>>>);

impl Turns {
    fn of(&self, name: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = all.get(name).and_then(Weak::upgrade) {
            return found;
        }
        all.retain(|_, lock| lock.strong_count() > 0);
        let new = Arc::default();
        all.insert(name.to_owned(), Arc::downgrade(&new));
        new
    }

    /// Does `work` when it is its turn. Once begun it goes on when the future is dropped, and who comes next waits
    /// for it: half a file system, or half a login, is of no use to anybody.
    pub(super) async fn take<T, F>(&self, name: &str, work: F) -> Result<T, RemoteError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, RemoteError>> + Send + 'static,
    {
        let turn = self.of(name).lock_owned().await;
        let done = tokio::spawn(async move {
            let _turn = turn;
            work.await
        });
        match done.await {
            Ok(result) => result,
            Err(error) => Err(RemoteError::Uncertain(format!(
                "finish work on a volume: {error}"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn work_goes_on_without_who_waits_and_holds_up_the_next() {
        let turns = Turns::default();
        let (begun, has_begun) = oneshot::channel();
        let (go, may_go) = oneshot::channel::<()>();
        let work = async move {
            begun.send(()).unwrap();
            may_go.await.unwrap();
            Ok(1)
        };
        let first = tokio::spawn({
            let turns = turns.clone();
            async move { turns.take("disk", work).await }
        });
        has_begun.await.unwrap();
        first.abort();
        assert!(first.await.unwrap_err().is_cancelled());
        let mut next = Box::pin(turns.take("disk", async { Ok(2) }));
        assert!(
            futures::poll!(&mut next).is_pending(),
            "the disk is still worked on"
        );
        assert_eq!(turns.take("other", async { Ok(3) }).await, Ok(3));
        go.send(()).unwrap();
        assert_eq!(next.await, Ok(2));
    }
}
