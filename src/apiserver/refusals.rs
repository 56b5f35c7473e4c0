//! Decides which refusals (403) of the API server are logged as an error, and after which time.
//!
//! The node authorizer permits a node to read what its pods refer to. It learns of nodes, pods and objects by watching.
//! A node that has just joined, or that has just got a pod, may send requests before the authorizer has seen that. It
//! is refused for a moment, which is harmless. Rights that follow from the node's name alone exist from the beginning.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use hyper::http::Uri;

use crate::types::time::Stamp;

/// Time for which a request that may be ahead of the authorizer is refused before that counts as an error.
const PATIENCE: Duration = Duration::from_secs(10);
/// A request that was not refused for so long begins anew. Longer than the pauses between retries.
const FORGET: Duration = Duration::from_secs(300);
/// Most requests that are distinguished, those that are errors and those that are not yet.
const MAX_REFUSALS: usize = 64;

/// Log level of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Report {
    /// As what passes by itself.
    Early,
    /// As an error.
    Error,
    /// Not at all: it was before, or it is too early to say.
    Nothing,
}

/// A request as far as it decides whether it is refused.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Asked {
    method: String,
    /// The path, and the selector that names one object of it.
    target: String,
}

impl Asked {
    pub(super) fn new(method: &str, uri: &Uri) -> Self {
        let selector = uri.query().unwrap_or_default().split('&');
        let selector = selector.filter(|part| part.starts_with("fieldSelector="));
        Self {
            method: method.to_owned(),
            target: std::iter::once(uri.path())
                .chain(selector)
                .collect::<Vec<_>>()
                .join("?"),
        }
    }
}

/// The refusals that go on.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    /// Those that were logged as errors, by method and resource.
    errors: BTreeSet<String>,
    /// Since when, and when last, a request was refused that may be ahead of the authorizer.
    early: BTreeMap<Asked, (Stamp, Stamp)>,
}

impl Refusals {
    /// Says how to log that `asked` was refused at `now`. `request`: its method and resource, such as
    /// `GET configmaps`; each is an error once.
    pub(super) fn refused(&mut self, request: &str, asked: Asked, now: Stamp) -> Report {
        if self.errors.contains(request) {
            return Report::Nothing;
        }
        if follows_from_pods(request) {
            let goes_on = |(_, last): &&mut (Stamp, Stamp)| now.since(*last) <= FORGET;
            match self.early.get_mut(&asked).filter(goes_on) {
                Some((since, last)) => {
                    *last = now;
                    if now.since(*since) < PATIENCE {
                        return Report::Nothing;
                    }
                }
                None => {
                    self.make_room(now);
                    self.early.insert(asked, (now, now));
                    return Report::Early;
                }
            }
        }
        if self.errors.len() >= MAX_REFUSALS {
            return Report::Nothing;
        }
        self.errors.insert(request.to_owned());
        Report::Error
    }

    /// Notes that `asked` was answered with something else than a refusal.
    pub(super) fn answered(&mut self, asked: &Asked) {
        self.early.remove(asked);
    }

    /// Forgets all: somebody else asks.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Makes room for one more; the one that was not refused for longest goes.
    fn make_room(&mut self, now: Stamp) {
        if self.early.len() < MAX_REFUSALS {
            return;
        }
        let oldest = self
            .early
            .iter()
            .max_by_key(|(_, (_, last))| now.since(*last));
        if let Some(oldest) = oldest.map(|(asked, _)| asked.clone()) {
            self.early.remove(&oldest);
        }
    }
}

/// Returns whether the right to `request` depends on the nodes and pods that the server has seen. Upstream's
/// `NodeAuthorizer.Authorize`, and of the admission plugin NodeRestriction the check of a mirror pod's owner.
fn follows_from_pods(request: &str) -> bool {
    matches!(
        request,
        "GET configmaps"
            | "GET secrets"
            | "GET persistentvolumeclaims"
            | "PATCH persistentvolumeclaims/status"
            | "GET persistentvolumes"
            | "GET volumeattachments"
            | "GET resourceclaims"
            | "GET serviceaccounts"
            | "POST podcertificaterequests"
            | "POST serviceaccounts/token"
            | "POST pods"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::boot::BootId;

    fn at(seconds: i64) -> Stamp {
        Stamp {
            boot: BootId(1),
            boottime_ms: seconds * 1000,
            wall_ms: 0,
        }
    }

    fn asked(uri: &str) -> Asked {
        Asked::new("GET", &uri.parse().unwrap())
    }

    #[test]
    fn what_follows_from_pods_is_an_error_when_it_has_lasted() {
        let mut refusals = Refusals::default();
        let a =
            || asked("/api/v1/namespaces/n/configmaps?fieldSelector=metadata.name%3Da&limit=500");
        let b =
            || asked("/api/v1/namespaces/n/configmaps?fieldSelector=metadata.name%3Db&limit=500");
        let mut refuse = |asked, seconds| refusals.refused("GET configmaps", asked, at(seconds));
        assert_eq!(refuse(a(), 0), Report::Early);
        assert_eq!(refuse(a(), 1), Report::Nothing);
        assert_eq!(refuse(b(), 9), Report::Early, "of each object");
        assert_eq!(refuse(a(), 10), Report::Error);
        assert_eq!(refuse(b(), 30), Report::Nothing, "once for the resource");
    }

    #[test]
    fn an_answer_and_a_long_silence_end_a_refusal() {
        let mut refusals = Refusals::default();
        let secret = || asked("/api/v1/namespaces/n/secrets/s");
        assert_eq!(
            refusals.refused("GET secrets", secret(), at(0)),
            Report::Early
        );
        refusals.answered(&secret());
        assert_eq!(
            refusals.refused("GET secrets", secret(), at(60)),
            Report::Early
        );
        assert_eq!(
            refusals.refused("GET secrets", secret(), at(361)),
            Report::Early
        );
        // As far apart as retries are.
        assert_eq!(
            refusals.refused("GET secrets", secret(), at(600)),
            Report::Error
        );
    }

    #[test]
    fn what_follows_from_the_name_alone_is_an_error_at_once() {
        let mut refusals = Refusals::default();
        for request in [
            "GET nodes",
            "PATCH nodes/status",
            "GET pods",
            "GET leases",
            "PUT configmaps",
        ] {
            let asked = || asked("/x");
            assert_eq!(
                refusals.refused(request, asked(), at(0)),
                Report::Error,
                "{request}"
            );
            assert_eq!(
                refusals.refused(request, asked(), at(99)),
                Report::Nothing,
                "{request}"
            );
        }
        refusals.clear();
        assert_eq!(
            refusals.refused("GET nodes", asked("/x"), at(0)),
            Report::Error
        );
    }

    #[test]
    fn however_many_are_refused_few_are_kept() {
        let mut refusals = Refusals::default();
        for number in 0..1000 {
            let uri = format!("/api/v1/namespaces/n/secrets/{number}");
            assert_eq!(
                refusals.refused("GET secrets", asked(&uri), at(number / 100)),
                Report::Early
            );
        }
        assert_eq!(refusals.early.len(), MAX_REFUSALS);
    }
}
