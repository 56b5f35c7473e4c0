//! Time of the last data on a stream.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// Shared by the two directions of a stream.
#[derive(Debug)]
pub(super) struct Activity {
    start: Instant,
    /// Milliseconds after `start`.
    last: AtomicU64,
    limit: Duration,
}

impl Activity {
    /// Counts from now. A limit of zero is none.
    pub(super) fn new(limit: Duration) -> Self {
        Self {
            start: Instant::now(),
            last: AtomicU64::new(0),
            limit,
        }
    }

    /// Something was carried.
    pub(super) fn touch(&self) {
        let now = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(now, Ordering::Relaxed);
    }

    /// Returns once nothing was carried for the limit. Cancel-safe.
    pub(super) async fn expired(&self) {
        if self.limit.is_zero() {
            std::future::pending::<()>().await;
        }
        loop {
            let last = Duration::from_millis(self.last.load(Ordering::Relaxed));
            let Some(idle) = self.start.elapsed().checked_sub(last) else {
                continue;
            };
            match self.limit.checked_sub(idle) {
                None | Some(Duration::ZERO) => return,
                Some(left) => tokio::time::sleep(left).await,
            }
        }
    }
}
