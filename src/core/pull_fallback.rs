//! Decides whether a container starts from the image of its previous attempt, because the registry does not answer.
//!
//! **Invariant:** whatever the registry says is an answer, also that it refuses. An error that is not known counts as
//! an answer.

use std::time::Duration;

use super::container_history::Records;
use crate::types::runtime::{ContainerState, ContainerStatus, PodStatus};

/// Time limit for the answer of a registry.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Texts of a registry that has answered, of containerd and CRI-O. They win: the error of several tries names all of
/// them, and a connection that breaks within an image broke after the registry had answered.
const ANSWERS: &[&str] = &[
    "401 Unauthorized",
    "403 Forbidden",
    "404 Not Found",
    "429 Too Many Requests",
    ": not found",
    "authorization failed",
    "insufficient_scope",
    "unauthorized: ",
    "toomanyrequests",
    "manifest unknown",
    "name unknown",
    "is denied",
    "failed to copy",
    "reading blob",
    "writing blob",
];

/// Texts of a registry that has not.
const SILENCE: &[&str] = &[
    "RegistryUnavailable",
    "dial tcp",
    "no such host",
    "i/o timeout",
    "connection refused",
    "connection reset by peer",
    "TLS handshake timeout",
    "network is unreachable",
    "no route to host",
    "context deadline exceeded",
    "Client.Timeout exceeded",
    "timeout awaiting response headers",
    "502 Bad Gateway",
    "503 Service Unavailable",
    "504 Gateway Time",
    "\": EOF",
];

/// Returns whether the error of a pull means that the registry has not answered.
pub fn is_unanswered(error: &str) -> bool {
    let has = |texts: &[&str]| texts.iter().any(|text| error.contains(text));
    has(SILENCE) && !has(ANSWERS)
}

/// Step after a pull that the registry has not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Start from the image that is there.
    FallBack,
    /// Ask again after this long.
    AskAgain(Duration),
}

/// The decision after an unanswered pull. `silent` = how long the registry has not answered.
pub fn after_silence(silent: Duration) -> Next {
    match PATIENCE.checked_sub(silent) {
        None | Some(Duration::ZERO) => Next::FallBack,
        Some(left) => Next::AskAgain(left),
    }
}

/// The image reference that the previous attempt of a container ran with; `None` if there was none, or it ran another
/// image than `hash` (of name and image in the spec) asks for.
pub fn ran_with(
    name: &str,
    hash: &str,
    status: &PodStatus,
    records: &Records<'_>,
) -> Option<String> {
    let ran = |c: &&ContainerStatus| c.name == name && c.state != ContainerState::Created;
    let shown = status.containers.iter().filter(ran);
    let shown = shown.max_by_key(|c| (c.attempt, c.created_at_ns));
    let shown = shown.map(|c| (c.attempt, c.hash.as_str(), c.image_ref.as_str()));
    let record = records.get(name);
    let ended = record.and_then(|record| {
        let (exit, intent) = (record.last_exit.as_ref()?, record.intent.as_ref()?);
        // The end does not say which image was asked for; the start does.
        let is_of = intent.container_id == exit.container_id;
        is_of.then_some((exit.attempt, intent.hash.as_str(), exit.image_ref.as_str()))
    });
    let newest = match (shown, ended) {
        (Some(shown), Some(ended)) if ended.0 > shown.0 => ended,
        (Some(shown), _) => shown,
        (None, ended) => ended?,
    };
    let (_, ran_hash, image_ref) = newest;
    (ran_hash == hash && !image_ref.is_empty()).then(|| image_ref.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::state::{ContainerRecord, ExitRecord, IntentRecord};
    use crate::core::testkit::at;
    use crate::types::PodUid;

    #[test]
    fn answers_are_told_from_silence_in_texts_of_containerd_and_cri_o() {
        let pull = "failed to pull and unpack image \"r.example/a:1\": failed to resolve reference \"r.example/a:1\": ";
        let request = "failed to do request: Head \"https://r.example/v2/a/manifests/1\": ";
        let ping = "initializing source docker://r.example/a:1: pinging container registry r.example: Get \"https://r.example/v2/\": ";
        for silent in [
            format!("{pull}{request}dial tcp 10.0.0.1:443: connect: connection refused"),
            format!("{pull}{request}dial tcp: lookup r.example on 10.0.0.2:53: no such host"),
            format!("{pull}{request}dial tcp 10.0.0.1:443: i/o timeout"),
            format!("{pull}{request}net/http: TLS handshake timeout"),
            format!("{pull}{request}EOF"),
            format!("{pull}unexpected status code https://r.example/v2/a/manifests/1: 503 Service Unavailable"),
            format!("{pull}unexpected status from HEAD request to https://r.example/v2/a/manifests/1: 502 Bad Gateway"),
            format!("{ping}dial tcp 10.0.0.1:443: connect: network is unreachable"),
            format!("{ping}read tcp 10.0.0.3:4->10.0.0.1:443: read: connection reset by peer"),
            "reading manifest 1 in r.example/a: received unexpected HTTP status: 504 Gateway Timeout".to_owned(),
            "RegistryUnavailable".to_owned(),
        ] {
            assert!(is_unanswered(&silent), "{silent}");
        }
        for answer in [
            format!("{pull}r.example/a:1: not found"),
            format!("{pull}unexpected status code https://r.example/v2/a/manifests/1: 401 Unauthorized"),
            format!("{pull}pull access denied, repository does not exist or may require authorization: server message: insufficient_scope: authorization failed"),
            format!("{pull}unexpected status from HEAD request to https://r.example/v2/a/manifests/1: 403 Forbidden"),
            format!("[{pull}{request}dial tcp 10.0.0.1:443: i/o timeout, {pull}unexpected status code x: 401 Unauthorized]"),
            "failed to pull and unpack image \"r.example/a:1\": failed to copy: read tcp 10.0.0.3:4->10.0.0.1:443: read: connection reset by peer".to_owned(),
            "reading manifest 1 in r.example/a: manifest unknown".to_owned(),
            "reading manifest 1 in r.example/a: unauthorized: authentication required".to_owned(),
            "reading manifest 1 in r.example/a: requested access to the resource is denied".to_owned(),
            "copying system image from manifest list: reading blob sha256:1: Get \"https://r.example\": dial tcp: i/o timeout".to_owned(),
            "something new".to_owned(),
        ] {
            assert!(!is_unanswered(&answer), "{answer}");
        }
    }

    #[test]
    fn a_silent_registry_has_ten_seconds() {
        let after = |ms| after_silence(Duration::from_millis(ms));
        assert_eq!(after(0), Next::AskAgain(PATIENCE));
        assert_eq!(after(9_999), Next::AskAgain(Duration::from_millis(1)));
        assert_eq!(after(10_000), Next::FallBack);
        assert_eq!(after(60_000), Next::FallBack);
    }

    fn container(attempt: u32, hash: &str, state: ContainerState) -> ContainerStatus {
        ContainerStatus {
            id: format!("c{attempt}").as_str().into(),
            name: "a".to_owned(),
            attempt,
            sandbox_id: "s0".into(),
            state,
            created_at_ns: i64::from(attempt),
            image: String::new(),
            image_ref: format!("ref-{attempt}"),
            hash: hash.to_owned(),
            started_at_ns: 0,
            finished_at_ns: 0,
            exit_code: 0,
            reason: String::new(),
            message: String::new(),
            log_path: String::new(),
            user: None,
        }
    }

    fn record(attempt: u32, hash: &str, intended: &str) -> ContainerRecord {
        ContainerRecord {
            intent: Some(IntentRecord {
                container_id: intended.into(),
                attempt,
                hash: hash.to_owned(),
                at: at(0),
            }),
            last_exit: Some(ExitRecord {
                container_id: format!("c{attempt}").as_str().into(),
                attempt,
                image: String::new(),
                image_ref: format!("ref-{attempt}"),
                started_at_ns: 0,
                finished_at_ns: 0,
                finished: at(0),
                exit_code: 0,
                reason: String::new(),
                message: String::new(),
                inferred: false,
            }),
            ..ContainerRecord::new()
        }
    }

    #[test]
    fn the_image_is_that_of_the_previous_attempt_at_the_same_spec() {
        use ContainerState::{Created, Exited};
        let find = |containers: &[ContainerStatus], record: Option<&ContainerRecord>| {
            let mut status = PodStatus::empty(PodUid::new("u1"));
            status.containers = containers.to_vec();
            let records: Records<'_> = record.map(|record| ("a", record)).into_iter().collect();
            ran_with("a", "h", &status, &records)
        };
        let is = |attempt: u32| Some(format!("ref-{attempt}"));
        assert_eq!(find(&[], None), None, "it has never run");
        let (first, second) = (container(0, "h", Exited), container(1, "h", Exited));
        assert_eq!(find(&[first.clone(), second], None), is(1));
        let created = container(1, "h", Created);
        assert_eq!(find(&[first.clone(), created], None), is(0), "never ran");
        let other = container(1, "other", Exited);
        assert_eq!(find(&[first.clone(), other], None), None, "another image");
        // The runtime has forgotten it.
        let ended = record(2, "h", "c2");
        assert_eq!(find(&[], Some(&ended)), is(2));
        assert_eq!(find(std::slice::from_ref(&first), Some(&ended)), is(2));
        assert_eq!(find(&[first], Some(&record(2, "other", "c2"))), None);
        let unknown = record(2, "h", "c3");
        assert_eq!(find(&[], Some(&unknown)), None, "asked for by nobody knows");
    }
}
