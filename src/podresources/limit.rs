//! Limits the rate of requests: 100 a second with a burst of 10, as upstream's `LimiterUnaryServerInterceptor`.

use std::sync::{Arc, Mutex, PoisonError};

use crate::types::{Clock, Stamp};

const PER_SECOND: f64 = 100.0;
const BURST: f64 = 10.0;

/// A bucket that fills up again with time.
pub(crate) struct Limiter {
    clock: Arc<dyn Clock>,
    bucket: Mutex<Bucket>,
}

struct Bucket {
    tokens: f64,
    filled: Stamp,
}

impl Limiter {
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Self {
        let bucket = Bucket {
            tokens: BURST,
            filled: clock.now(),
        };
        Self {
            clock,
            bucket: Mutex::new(bucket),
        }
    }

    /// Returns whether one more request may be answered now.
    pub(crate) fn allow(&self) -> bool {
        let now = self.clock.now();
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        let passed = now.since(bucket.filled).as_secs_f64();
        bucket.tokens = (bucket.tokens + passed * PER_SECOND).min(BURST);
        bucket.filled = now;
        if bucket.tokens < 1.0 {
            return false;
        }
        bucket.tokens -= 1.0;
        true
    }
}
