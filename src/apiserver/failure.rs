//! Classifies failed requests for their callers, and computes the pause before the next try.

use std::time::Duration;

/// Kind of failure, as far as it determines the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// 404: the object, or the namespace it is to be in, does not exist.
    NotFound,
    /// 409: it exists already, or it is not the object that was meant.
    Conflict,
    /// The server will not do it, now or later, unless something else changes.
    Refused,
    /// No answer, too many requests, credentials that are being replaced, or trouble of the server's own:
    /// the same request may succeed later.
    Transient,
}

impl Failure {
    /// Classifies an error of `kube`.
    pub fn of(error: &kube::Error) -> Self {
        let kube::Error::Api(status) = error else {
            return Self::Transient;
        };
        match status.code {
            404 => Self::NotFound,
            409 => Self::Conflict,
            401 | 408 | 429 => Self::Transient,
            400..500 => Self::Refused,
            _ => Self::Transient,
        }
    }
}

/// Returns the pause that the server requests with `Retry-After`.
pub fn retry_after(error: &kube::Error) -> Option<Duration> {
    match error {
        kube::Error::Api(status) if matches!(status.code, 429 | 503) => {
            let seconds = status.details.as_ref()?.retry_after_seconds;
            (seconds > 0).then(|| Duration::from_secs(u64::from(seconds)))
        }
        _ => None,
    }
}

/// The pause after the failure number `failures` (1 = the first): doubles from `first` up to `longest`, and is
/// shortened by up to a third by chance, so that what failed together does not come back together.
pub fn pause(failures: u32, first: Duration, longest: Duration) -> Duration {
    let doubled = first.saturating_mul(1 << failures.saturating_sub(1).min(16));
    doubled
        .min(longest)
        .mul_f64(rand::random_range(0.667..=1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::core::Status;
    use kube::core::response::StatusDetails;

    #[test]
    fn each_code_has_its_meaning() {
        let table = [
            (404, Failure::NotFound),
            (409, Failure::Conflict),
            (400, Failure::Refused),
            (403, Failure::Refused),
            (422, Failure::Refused),
            (401, Failure::Transient),
            (429, Failure::Transient),
            (500, Failure::Transient),
            (503, Failure::Transient),
        ];
        for (code, expected) in table {
            let status = Status {
                code,
                ..Status::default()
            };
            let error = kube::Error::Api(status.boxed());
            assert_eq!(Failure::of(&error), expected, "{code}");
        }
    }

    #[test]
    fn the_servers_wish_is_heard_where_it_is_busy() {
        for (code, seconds, expected) in [
            (429, 7, Some(7)),
            (503, 1, Some(1)),
            (429, 0, None),
            (500, 7, None),
        ] {
            let details = StatusDetails {
                name: String::new(),
                group: String::new(),
                kind: String::new(),
                uid: String::new(),
                causes: Vec::new(),
                retry_after_seconds: seconds,
            };
            let status = Status::failure("x", "y")
                .with_code(code)
                .with_details(details);
            let asked = retry_after(&kube::Error::Api(Box::new(status)));
            assert_eq!(asked, expected.map(Duration::from_secs), "{code} {seconds}");
        }
    }

    #[test]
    fn pauses_double_up_to_the_longest() {
        let pause = |n| pause(n, Duration::from_secs(1), Duration::from_secs(10));
        assert!(pause(1) <= Duration::from_secs(1));
        assert!(pause(3) >= Duration::from_secs(2) && pause(3) <= Duration::from_secs(4));
        for failures in [5, 17, 40, u32::MAX] {
            let long = pause(failures);
            assert!(long >= Duration::from_secs(6) && long <= Duration::from_secs(10));
        }
    }
}
