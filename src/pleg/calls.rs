//! Calls to the runtime that are under way beside the PLEG's loop.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt};
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::time::Instant;

use super::agenda::Lane;
use crate::kuberuntime::cri::CriError;
use crate::types::PodUid;
use crate::types::runtime::PodStatus;

/// A call that has not been answered for this long counts as slow: others no longer wait for it.
const SLOW: Duration = Duration::from_secs(5);
/// The same limit for an inspection of one pod, of which many may take long one after the other.
const SLOW_LOOK: Duration = Duration::from_secs(2);

/// Request to the runtime.
pub(super) enum Ask {
    List,
    /// One pod, whose inspection waited in that lane.
    Pod(PodUid, Lane),
    Version,
}

impl Ask {
    fn patience(&self) -> Duration {
        match self {
            Self::Pod(..) => SLOW_LOOK,
            Self::List | Self::Version => SLOW,
        }
    }
}

/// Answer of the runtime.
pub(super) enum Answer {
    List(Result<BTreeMap<PodUid, PodStatus>, CriError>),
    Pod(Box<Result<PodStatus, CriError>>),
    /// Period of listing beside its events.
    Version(Duration),
}

/// A call that was answered or takes long.
pub(super) struct Turn {
    pub(super) ask: Ask,
    /// Start of the call.
    pub(super) as_of: Instant,
    /// True if the delay was already reported.
    pub(super) late: bool,
    pub(super) progress: Progress,
}

pub(super) enum Progress {
    Answered(Answer),
    /// It goes on when it is handed to [`Calls::go_on`].
    Slow(BoxFuture<'static, Answer>),
}

#[derive(Default)]
pub(super) struct Calls(FuturesUnordered<BoxFuture<'static, Turn>>);

impl Calls {
    pub(super) fn begin(
        &mut self,
        ask: Ask,
        as_of: Instant,
        call: impl Future<Output = Answer> + Send + 'static,
    ) {
        let mut call = call.boxed();
        let turn = async move {
            let progress = match tokio::time::timeout(ask.patience(), &mut call).await {
                Ok(answer) => Progress::Answered(answer),
                Err(_) => Progress::Slow(call),
            };
            Turn {
                ask,
                as_of,
                late: false,
                progress,
            }
        };
        self.0.push(turn.boxed());
    }

    /// Goes on with a call that takes long.
    pub(super) fn go_on(&mut self, ask: Ask, as_of: Instant, call: BoxFuture<'static, Answer>) {
        let rest = call.map(move |answer| Turn {
            ask,
            as_of,
            late: true,
            progress: Progress::Answered(answer),
        });
        self.0.push(rest.boxed());
    }

    /// The next call that was answered or takes long; `None` when none is under way. Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<Turn> {
        self.0.next().await
    }
}
