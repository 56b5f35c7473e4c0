//! Trying again: which failures pass by themselves, and how long to wait for that.

use std::time::Duration;

use rand::Rng;

/// How often and how long apart an operation is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Longest wait before the second try; doubled for each one after it.
    pub first: Duration,
    /// Longest wait between two tries.
    pub longest: Duration,
    /// How many tries there are; `None` for no end.
    pub tries: Option<u32>,
}

impl Default for RetryPolicy {
    /// Five tries within a few seconds.
    fn default() -> Self {
        Self {
            first: Duration::from_millis(100),
            longest: Duration::from_secs(5),
            tries: Some(5),
        }
    }
}

impl RetryPolicy {
    /// The wait after `failures` failures in a row: any time up to a bound that doubles (full jitter).
    pub fn wait(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(30);
        let bound = self.first.saturating_mul(1 << doublings).min(self.longest);
        bound.mul_f64(rand::rng().random_range(0.0..=1.0))
    }
}

/// Whether `error` may be gone the next time: no answer, or one that says the server is busy or not ready.
/// A conflict, a missing object, a lack of rights and a refused object stay what they are.
pub fn is_transient(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => matches!(status.code, 429 | 500 | 502 | 503 | 504),
        kube::Error::HyperError(_) | kube::Error::Service(_) | kube::Error::ReadEvents(_) => true,
        _ => false,
    }
}

/// What the server asks for in `Retry-After`.
pub fn retry_after(error: &kube::Error) -> Option<Duration> {
    match error {
        kube::Error::Api(status) if matches!(status.code, 429 | 503) => {
            let seconds = status.details.as_ref()?.retry_after_seconds;
            (seconds > 0).then(|| Duration::from_secs(u64::from(seconds)))
        }
        _ => None,
    }
}

/// Runs `op` until it succeeds, fails for good or the tries are used up. Only for operations that may be done
/// twice. Cancel-safe between tries.
///
/// # Errors
/// The last error of `op`.
pub async fn retry<T, F>(policy: &RetryPolicy, mut op: impl FnMut() -> F) -> Result<T, kube::Error>
where
    F: Future<Output = Result<T, kube::Error>>,
{
    let mut failures = 0;
    loop {
        let error = match op().await {
            Ok(value) => return Ok(value),
            Err(error) => error,
        };
        failures += 1;
        if !is_transient(&error) || policy.tries.is_some_and(|tries| failures >= tries) {
            return Err(error);
        }
        let asked = retry_after(&error).unwrap_or_default();
        tokio::time::sleep(policy.wait(failures).max(asked)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::core::Status;
    use kube::core::response::StatusDetails;

    fn api(code: u16, after: u32) -> kube::Error {
        let mut status = Status::failure("x", "y").with_code(code);
        if after > 0 {
            status = status.with_details(StatusDetails {
                name: String::new(),
                group: String::new(),
                kind: String::new(),
                uid: String::new(),
                causes: Vec::new(),
                retry_after_seconds: after,
            });
        }
        kube::Error::Api(Box::new(status))
    }

    #[tokio::test(start_paused = true)]
    async fn transient_failures_are_tried_again_and_the_servers_wish_is_kept() {
        for (code, tries) in [(429, 3), (500, 3), (503, 3), (404, 1), (403, 1), (409, 1)] {
            let policy = RetryPolicy {
                tries: Some(3),
                ..RetryPolicy::default()
            };
            let mut seen = 0;
            let result: Result<(), _> = retry(&policy, || {
                seen += 1;
                async move { Err(api(code, 0)) }
            })
            .await;
            assert!(result.is_err());
            assert_eq!(seen, tries, "{code}");
        }
        let start = tokio::time::Instant::now();
        let mut seen = 0;
        let value = retry(&RetryPolicy::default(), || {
            seen += 1;
            let first = seen == 1;
            async move { if first { Err(api(429, 7)) } else { Ok(5) } }
        })
        .await
        .unwrap();
        assert_eq!((value, start.elapsed().as_secs()), (5, 7));
    }

    #[test]
    fn waits_grow_to_their_bound() {
        let policy = RetryPolicy::default();
        for failures in [1_u32, 2, 5, 40, u32::MAX] {
            let bound = Duration::from_millis(100 << failures.saturating_sub(1).min(10));
            assert!(
                policy.wait(failures) <= bound.min(policy.longest),
                "{failures}"
            );
        }
    }
}
