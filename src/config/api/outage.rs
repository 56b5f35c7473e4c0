//! Behaviour of the API server's source during an outage: its pauses, and its log messages.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use tracing::{debug, info};

use super::super::{Reading, SourceSet};
use super::{ApiSource, Closed, send};
use crate::apiserver::Reachability;

/// First and longest pause between attempts, before jitter.
const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));
/// Length up to which an outage is not reported as one of this source.
pub(super) const TOLERATED: Duration = Duration::from_secs(10);
/// Time after which an outage that continues with another error is reported again.
const TOLD_AGAIN: Duration = Duration::from_secs(60);
pub(super) struct Outage {
    since: Instant,
    told: Option<(String, Instant)>,
}

#[derive(Default)]
pub(super) struct Retry(pub(super) u32);

impl Retry {
    /// The next pause, with jitter.
    fn next(&mut self) -> Duration {
        let pause = RETRY.0 * 2_u32.saturating_pow(self.0.min(10));
        self.0 = self.0.saturating_add(1);
        pause
            .min(RETRY.1)
            .mul_f64(0.5 + rand::random::<f64>() / 2.0)
    }
}

impl ApiSource {
    /// An attempt failed.
    pub(super) async fn failed(
        &mut self,
        error: String,
        sets: &mpsc::Sender<SourceSet>,
    ) -> Result<(), Closed> {
        debug!(%error, "cannot list or watch pods");
        let outage = self.outage.get_or_insert_with(|| Outage {
            since: Instant::now(),
            told: None,
        });
        let news = match &outage.told {
            None => !self.listed || outage.since.elapsed() >= TOLERATED,
            Some((told, at)) => *told != error && at.elapsed() >= TOLD_AGAIN,
        };
        if news {
            self.tell_outage(error, sets).await?;
        }
        Ok(())
    }

    pub(super) async fn tell_outage(
        &mut self,
        error: String,
        sets: &mpsc::Sender<SourceSet>,
    ) -> Result<(), Closed> {
        let now = Instant::now();
        let outage = self.outage.get_or_insert(Outage {
            since: now,
            told: None,
        });
        outage.told = Some((error.clone(), now));
        send(sets, self.set(Reading::Unreadable(error))).await
    }

    /// Waits before the next attempt; ends early when the API server answers another client meanwhile.
    pub(super) async fn pause(&mut self) {
        let whole = self.retry.next();
        let least = whole.min(RETRY.0);
        sleep(least).await;
        let connection = self.settings.client.connection();
        let answers = async {
            match connection.now() {
                Reachability::Down(_) => connection.up().await,
                Reachability::Up | Reachability::Untried => std::future::pending().await,
            }
        };
        tokio::select! {
            () = sleep(whole - least) => {}
            () = answers => info!("the API server is back, listing the pods"),
        }
    }
}
