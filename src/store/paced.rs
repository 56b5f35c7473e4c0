//! The writer as a task that lets time pass before each of its steps, for simulations that explore schedules.
//!
//! The steps are those of the thread. Between two of them other tasks run: they read snapshots, queue further requests, give up.
//! What a simulation does with a step is its [`Pace`]: a delay is a slow disk, a future that never ends is a disk that hangs or a process that has
//! died there. Errors are the backend's.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::oneshot;

use super::request::Request;
use super::shared::Doing;
use super::writer::{Stage, Writer, until_close};

/// A step of the writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Take what is in the queue.
    Take,
    /// Write a batch to the database.
    Write,
    /// Sync what was written.
    Sync,
    /// Show the new state to readers.
    Publish,
    /// Answer those who wait for the commit.
    Answer,
    /// Open and read the database again after a failure.
    Reopen,
}

/// Decides when a step may be made.
pub trait Pace: Send + Sync {
    /// Ends when the step may be made.
    fn before(&self, step: Step) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}

impl Stage {
    fn step(&self) -> Step {
        match self {
            Self::Write(_) => Step::Write,
            Self::Sync(_) => Step::Sync,
            Self::Publish(_) => Step::Publish,
            Self::Answer(_) => Step::Answer,
        }
    }
}

impl Writer {
    /// The task's life: until the store is closed or the last handle is gone.
    pub(super) async fn run_paced(
        mut self,
        mut requests: UnboundedReceiver<Request>,
        pace: Arc<dyn Pace>,
    ) {
        loop {
            let first = match self.wakeup_in() {
                None => Some(requests.recv().await),
                Some(wait) => tokio::time::timeout(wait, requests.recv()).await.ok(),
            };
            let mut group = Vec::new();
            match first {
                Some(Some(request)) => group.push(request),
                Some(None) => {
                    let (answer, _) = oneshot::channel();
                    self.close(answer);
                    return;
                }
                None => {}
            }
            self.wait(&pace, Step::Take).await;
            while group.len() < self.options.max_group
                && let Ok(request) = requests.try_recv()
            {
                group.push(request);
            }
            if self.recovery_is_due() {
                self.wait(&pace, Step::Reopen).await;
                self.try_recover();
            }
            let (requests_now, closing) = until_close(group);
            let mut stage = self.begin(requests_now);
            while let Some(next) = stage {
                self.wait(&pace, next.step()).await;
                stage = self.advance(next);
            }
            self.shared.relieve();
            if let Some(answer) = closing {
                self.wait(&pace, Step::Sync).await;
                self.close(answer);
                return;
            }
            if self.relaxed_are_due() {
                self.wait(&pace, Step::Write).await;
                self.flush_relaxed();
            }
            self.keep_house();
        }
    }

    /// Waits for a step. While that is one of the disk, the writer counts as being in that call.
    fn wait(
        &mut self,
        pace: &Arc<dyn Pace>,
        step: Step,
    ) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let doing = match step {
            Step::Write => Some(Doing::Write),
            Step::Sync => Some(Doing::Sync),
            Step::Take | Step::Publish | Step::Answer | Step::Reopen => None,
        };
        if let Some(doing) = doing {
            self.shared.enter(doing);
        }
        pace.before(step)
    }
}
