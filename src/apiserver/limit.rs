//! Limits the requests per second: a token bucket that serves callers in the order of their arrival.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// As client-go's limiter: `burst` requests at once after a quiet time, `qps` a second from then on.
#[derive(Debug)]
pub(super) struct Limiter {
    interval: Duration,
    /// Time by which a request may precede its due time.
    ahead: Duration,
    /// Due time of the next request, without the allowance for requests ahead of it.
    due: Mutex<Instant>,
}

impl Limiter {
    /// `qps` and `burst` below 1 count as 1.
    pub(super) fn new(qps: u32, burst: u32) -> Self {
        let interval = Duration::from_secs(1) / qps.max(1);
        Self {
            interval,
            ahead: interval.saturating_mul(burst.max(1) - 1),
            due: Mutex::new(Instant::now()),
        }
    }

    /// Waits for the turn of the caller. A caller that gives up while it waits leaves its turn unused.
    pub(super) async fn turn(&self) {
        let at = {
            let mut due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            let mine = (*due).max(now);
            *due = mine + self.interval;
            mine.checked_sub(self.ahead).unwrap_or(now)
        };
        tokio::time::sleep_until(at).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_burst_goes_at_once_and_the_rest_in_order_at_the_rate() {
        let limiter = std::sync::Arc::new(Limiter::new(10, 3));
        let start = Instant::now();
        let (sender, mut order) = tokio::sync::mpsc::unbounded_channel();
        for index in 0..6_u32 {
            let (limiter, sender) = (limiter.clone(), sender.clone());
            tokio::spawn(async move {
                limiter.turn().await;
                sender.send((index, start.elapsed().as_millis())).unwrap();
            });
        }
        drop(sender);
        let mut seen = Vec::new();
        while let Some(one) = order.recv().await {
            seen.push(one);
        }
        let at: Vec<_> = seen.iter().map(|(_, at)| *at / 10 * 10).collect();
        assert_eq!(at, [0, 0, 0, 100, 200, 300]);
        assert!(
            seen.windows(2).all(|pair| pair[0].0 < pair[1].0),
            "{seen:?}"
        );
        tokio::time::sleep(Duration::from_secs(1)).await;
        let start = Instant::now();
        for _ in 0..3 {
            limiter.turn().await;
        }
        assert!(
            start.elapsed() < Duration::from_millis(50),
            "the burst is back"
        );
    }
}
