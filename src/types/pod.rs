//! Reading a `Pod` without unwrapping an `Option` at every step.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, EphemeralContainer, Pod, PodSpec};

use super::names::{FullName, PodUid};
use super::update::PodSource;

/// `kubernetes.io/config.source`: file, http or api.
pub const CONFIG_SOURCE: &str = "kubernetes.io/config.source";
/// `kubernetes.io/config.seen`: RFC 3339 time at which the source first saw the pod.
pub const CONFIG_SEEN: &str = "kubernetes.io/config.seen";
/// `kubernetes.io/config.mirror`: on mirror pods, the hash of the static pod.
pub const CONFIG_MIRROR: &str = "kubernetes.io/config.mirror";
/// `kubernetes.io/config.hash`: on static pods, their UID as the source computed it.
pub const CONFIG_HASH: &str = "kubernetes.io/config.hash";
/// `holdfast.io/manifest-hash`: on static pods, the hash of the manifest. The same as their UID, unless the
/// pod was taken over from another agent.
pub const MANIFEST_HASH: &str = "holdfast.io/manifest-hash";
/// `holdfast.io/mirror-digest`: on the mirror pod of a static pod whose manifest has a UID of its own, a digest of the static pod. The
/// UID does not say whether they are the same.
pub const MIRROR_DIGEST: &str = "holdfast.io/mirror-digest";
/// `holdfast.io/unknown-fields`: on pods of the API server, the fields of `spec` that this version does not know. The agent sets it;
/// what others set is dropped.
pub const UNKNOWN_FIELDS: &str = "holdfast.io/unknown-fields";

/// `spec.restartPolicy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RestartPolicy {
    /// Default.
    Always,
    /// Only after a failure.
    OnFailure,
    /// Not at all.
    Never,
}

/// Accessors with the API server's defaults.
pub trait PodExt {
    /// `metadata.uid`; empty when unset.
    fn uid(&self) -> PodUid;
    /// `metadata.name`; empty when unset.
    fn name(&self) -> &str;
    /// `metadata.namespace`; `default` when unset.
    fn namespace(&self) -> &str;
    /// `<name>_<namespace>`.
    fn full_name(&self) -> FullName;
    /// One annotation.
    fn annotation(&self, key: &str) -> Option<&str>;
    /// Labels, possibly empty.
    fn labels(&self) -> &BTreeMap<String, String>;
    /// Annotations, possibly empty.
    fn annotations(&self) -> &BTreeMap<String, String>;
    /// Source by annotation; a pod without it comes from the API server.
    fn source(&self) -> PodSource;
    /// Returns whether the pod comes from a file or URL.
    fn is_static(&self) -> bool;
    /// Returns whether the pod represents a static pod in the API server.
    fn is_mirror(&self) -> bool;
    /// `metadata.deletionTimestamp` is set.
    fn is_deleting(&self) -> bool;
    /// `spec`, or an empty one.
    fn spec_ref(&self) -> &PodSpec;
    /// Main containers.
    fn containers(&self) -> &[Container];
    /// Init containers, sidecars among them.
    fn init_containers(&self) -> &[Container];
    /// Ephemeral containers.
    fn ephemeral_containers(&self) -> &[EphemeralContainer];
    /// One main container.
    fn container(&self, name: &str) -> Option<&Container>;
    /// `spec.restartPolicy`, default Always.
    fn restart_policy(&self) -> RestartPolicy;
    /// `spec.hostNetwork`, default false.
    fn host_network(&self) -> bool;
    /// `spec.terminationGracePeriodSeconds`, default 30 s.
    fn termination_grace(&self) -> Duration;
    /// The API phase recorded in the object's status is Succeeded or Failed.
    fn phase_is_terminal(&self) -> bool;
}

static NO_STRINGS: BTreeMap<String, String> = BTreeMap::new();
static NO_SPEC: std::sync::LazyLock<PodSpec> = std::sync::LazyLock::new(PodSpec::default);

impl PodExt for Pod {
    fn uid(&self) -> PodUid {
        PodUid::new(self.metadata.uid.as_deref().unwrap_or_default())
    }

    fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    fn namespace(&self) -> &str {
        self.metadata.namespace.as_deref().unwrap_or("default")
    }

    fn full_name(&self) -> FullName {
        FullName::of(self.name(), self.namespace())
    }

    fn annotation(&self, key: &str) -> Option<&str> {
        self.annotations().get(key).map(String::as_str)
    }

    fn labels(&self) -> &BTreeMap<String, String> {
        self.metadata.labels.as_ref().unwrap_or(&NO_STRINGS)
    }

    fn annotations(&self) -> &BTreeMap<String, String> {
        self.metadata.annotations.as_ref().unwrap_or(&NO_STRINGS)
    }

    fn source(&self) -> PodSource {
        match self.annotation(CONFIG_SOURCE) {
            Some("file") => PodSource::File,
            Some("http") => PodSource::Http,
            _ => PodSource::Api,
        }
    }

    fn is_static(&self) -> bool {
        self.source().is_static()
    }

    fn is_mirror(&self) -> bool {
        self.annotation(CONFIG_MIRROR).is_some()
    }

    fn is_deleting(&self) -> bool {
        self.metadata.deletion_timestamp.is_some()
    }

    fn spec_ref(&self) -> &PodSpec {
        self.spec.as_ref().unwrap_or(&NO_SPEC)
    }

    fn containers(&self) -> &[Container] {
        self.spec_ref().containers.as_slice()
    }

    fn init_containers(&self) -> &[Container] {
        self.spec_ref()
            .init_containers
            .as_deref()
            .unwrap_or_default()
    }

    fn ephemeral_containers(&self) -> &[EphemeralContainer] {
        self.spec_ref()
            .ephemeral_containers
            .as_deref()
            .unwrap_or_default()
    }

    fn container(&self, name: &str) -> Option<&Container> {
        self.containers().iter().find(|c| c.name == name)
    }

    fn restart_policy(&self) -> RestartPolicy {
        match self.spec_ref().restart_policy.as_deref() {
            Some("Never") => RestartPolicy::Never,
            Some("OnFailure") => RestartPolicy::OnFailure,
            _ => RestartPolicy::Always,
        }
    }

    fn host_network(&self) -> bool {
        self.spec_ref().host_network.unwrap_or(false)
    }

    fn termination_grace(&self) -> Duration {
        let seconds = self
            .spec_ref()
            .termination_grace_period_seconds
            .unwrap_or(30);
        Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
    }

    fn phase_is_terminal(&self) -> bool {
        self.status
            .as_ref()
            .and_then(|s| s.phase.as_deref())
            .is_some_and(|p| p == "Succeeded" || p == "Failed")
    }
}
