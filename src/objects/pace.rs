//! Poll intervals of objects that may not be watched. A node with many idle volumes causes almost no load on the API
//! server.
//!
//! An object with an expected change is polled soon. A claim whose volume is being expanded is polled now and then, an
//! idle claim less often the more claims there are, every other object hourly. A caller that cannot wait requests a new
//! read ([`super::Objects::doubt`], [`super::Objects::refresh`]).

use std::hash::{DefaultHasher, Hasher as _};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;

use super::context::Context;
use super::refs::Kind;

/// The first pause, and after a doubt.
const FIRST: Duration = Duration::from_millis(500);
/// Longest pause while something is expected of an object: attached, bound.
const SOON: Duration = Duration::from_secs(10);
/// Longest pause while a volume is expected to grow.
const GROWING: Duration = Duration::from_secs(120);
/// Pause for a claim at rest, for each claim there is; within limits.
const PER_CLAIM: Duration = Duration::from_secs(40);
const CLAIM_MIN: Duration = Duration::from_secs(180);
const CLAIM_MAX: Duration = Duration::from_secs(900);
/// Pause for everything else at rest: its claim shows all that matters.
const SELDOM: Duration = Duration::from_secs(3600);
/// Age from which an object is read again for a caller that wants a fresh one.
pub(super) const FRESH: Duration = Duration::from_secs(10);

/// Expected change of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expected {
    /// A change that somebody waits for.
    Soon,
    /// The expansion of a volume. Nothing waits for it.
    Growth,
    /// Nothing.
    Nothing,
}

/// The pauses between questions for one object.
#[derive(Debug)]
pub(super) struct Pauses {
    next: Duration,
}

impl Default for Pauses {
    fn default() -> Self {
        Self { next: FIRST }
    }
}

impl Pauses {
    /// The pause after an answer. `claims` is how many claims there are, `random` in `[0, 1)`.
    pub(super) fn after(
        &mut self,
        expected: Expected,
        kind: Kind,
        claims: usize,
        random: f64,
    ) -> Duration {
        let longest = match (expected, kind) {
            (Expected::Soon, _) => SOON,
            (Expected::Growth, _) => GROWING,
            (Expected::Nothing, kind) => {
                *self = Self::default();
                let claims = u32::try_from(claims).unwrap_or(u32::MAX);
                let of_claims = PER_CLAIM.saturating_mul(claims);
                let rest = match kind {
                    Kind::Claim => of_claims.clamp(CLAIM_MIN, CLAIM_MAX),
                    _ => SELDOM,
                };
                return rest.mul_f64(1.0 + 0.3 * random);
            }
        };
        let pause = self.next.min(longest);
        self.next = pause.mul_f64(1.5);
        pause.mul_f64(0.8 + 0.4 * random)
    }

    /// Begins anew with short ones.
    pub(super) fn hurry(&mut self) {
        *self = Self::default();
    }
}

/// One of the claims that are asked for, for as long as this lives.
pub(super) struct Counted(Arc<Context>);

impl Counted {
    pub(super) fn new(ctx: &Arc<Context>) -> Self {
        ctx.claims.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(ctx))
    }

    /// Returns their number.
    pub(super) fn all(claims: &AtomicUsize) -> usize {
        claims.load(Ordering::Relaxed)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.claims.fetch_sub(1, Ordering::Relaxed);
    }
}

struct Hashed(DefaultHasher);

impl io::Write for Hashed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns a hash of the parts of a pod that users write: labels, annotations and spec, without the status.
pub(super) fn version_of(pod: &Pod) -> u64 {
    let mut hashed = Hashed(DefaultHasher::new());
    let metadata = &pod.metadata;
    let said = (&metadata.labels, &metadata.annotations, &pod.spec);
    if serde_json::to_writer(&mut hashed, &said).is_err() {
        // It was parsed once, so it can be written; else it counts as never changed.
        return 0;
    }
    hashed.0.finish()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_node_at_rest_asks_seldom() {
        let rest = |kind, claims, random| {
            let mut pauses = Pauses::default();
            let pause = pauses.after(Expected::Nothing, kind, claims, random);
            pause.as_secs()
        };
        assert_eq!(rest(Kind::Claim, 1, 0.0), 180);
        assert_eq!(rest(Kind::Claim, 1, 0.99), 233);
        assert_eq!(rest(Kind::Claim, 10, 0.0), 400);
        assert_eq!(rest(Kind::Claim, 1000, 0.0), 900);
        assert_eq!(rest(Kind::PersistentVolume, 1, 0.0), 3600);
        assert_eq!(rest(Kind::VolumeAttachment, 1, 0.0), 3600);
    }

    #[test]
    fn what_is_expected_is_asked_for_with_growing_pauses() {
        for (expected, longest) in [(Expected::Soon, 10), (Expected::Growth, 120)] {
            let mut pauses = Pauses::default();
            let mut pause = || pauses.after(expected, Kind::Claim, 1, 0.5).as_millis();
            assert_eq!((pause(), pause()), (500, 750));
            let last = (0..20).map(|_| pause()).last();
            assert_eq!(last, Some(longest * 1000));
            pauses.hurry();
            let again = pauses.after(expected, Kind::Claim, 1, 0.5);
            assert_eq!(again.as_millis(), 500);
        }
    }

    #[test]
    fn a_status_changes_nothing_that_users_said() {
        let pod = |label: &str, phase: &str| {
            let pod = json!({"metadata": {"name": "p", "labels": {"a": label}, "resourceVersion": phase},
                "spec": {"containers": []}, "status": {"phase": phase}});
            version_of(&serde_json::from_value(pod).unwrap())
        };
        assert_eq!(pod("b", "Pending"), pod("b", "Running"));
        assert_ne!(pod("b", "Pending"), pod("c", "Pending"));
    }
}
