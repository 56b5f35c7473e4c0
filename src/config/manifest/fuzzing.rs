//! Fuzz target of manifests.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a fuzz target fails by panicking"
)]

use super::*;

const SEEN: &str = "2026-01-02T03:04:05Z";

/// Reads a manifest. The first byte says whether it comes from a file or a URL.
///
/// Asserts that every pod that is accepted has an identity, is the same after it was recorded, and that every problem
/// has its place and its message.
pub(crate) fn manifest(data: &[u8]) {
    let Some((mode, text)) = data.split_first() else {
        return;
    };
    let source = match mode % 2 {
        0 => PodSource::File,
        _ => PodSource::Http,
    };
    let origin = StaticOrigin {
        source,
        location: "/etc/kubernetes/manifests/pod.yaml",
        node_name: "node",
    };
    match read(text, &origin, SEEN) {
        Ok(pods) => {
            assert!(pods.len() == 1 || source == PodSource::Http);
            for pod in pods {
                assert!(pod.metadata.uid.as_ref().is_some_and(|uid| !uid.is_empty()));
                assert!(
                    pod.metadata
                        .name
                        .as_ref()
                        .is_some_and(|name| name.ends_with("-node"))
                );
                assert!(pod.metadata.namespace.is_some() && pod.spec.is_some());
                let recorded = serde_json::to_vec(&pod).unwrap();
                assert_eq!(serde_json::from_slice::<Pod>(&recorded).unwrap(), pod);
            }
        }
        Err(ManifestError::Invalid(problems)) => {
            assert!(!problems.is_empty());
            assert!(problems.iter().all(|problem| !problem.message.is_empty()));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
