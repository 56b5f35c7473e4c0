//! Labels and annotations on sandboxes and containers, by the names upstream uses, so that `crictl`
//! shows pods the way users know and another agent recognises what this one made.

/// Label: `metadata.name` of the pod.
pub const POD_NAME: &str = "io.kubernetes.pod.name";
/// Label: `metadata.namespace` of the pod.
pub const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
/// Label: `metadata.uid` of the pod. What carries no such label is none of the agent's business.
pub const POD_UID: &str = "io.kubernetes.pod.uid";
/// Label: name of the container in the pod spec.
pub const CONTAINER_NAME: &str = "io.kubernetes.container.name";

/// Annotation: hash of the container spec the container was made from.
pub const CONTAINER_HASH: &str = "io.kubernetes.container.hash";
/// Annotation: restart count at creation, equal to the CRI metadata attempt.
pub const CONTAINER_RESTART_COUNT: &str = "io.kubernetes.container.restartCount";
/// Annotation: `terminationMessagePath` of the container spec.
pub const CONTAINER_TERMINATION_MESSAGE_PATH: &str =
    "io.kubernetes.container.terminationMessagePath";
/// Annotation: `terminationMessagePolicy` of the container spec.
pub const CONTAINER_TERMINATION_MESSAGE_POLICY: &str =
    "io.kubernetes.container.terminationMessagePolicy";
/// Annotation: the preStop hook as JSON.
pub const CONTAINER_PRE_STOP_HANDLER: &str = "io.kubernetes.container.preStopHandler";
/// Annotation: the container ports as JSON.
pub const CONTAINER_PORTS: &str = "io.kubernetes.container.ports";
/// Annotation: `metadata.deletionGracePeriodSeconds` of the pod, in seconds.
pub const POD_DELETION_GRACE_PERIOD: &str = "io.kubernetes.pod.deletionGracePeriod";
/// Annotation: `spec.terminationGracePeriodSeconds` of the pod, in seconds.
pub const POD_TERMINATION_GRACE_PERIOD: &str = "io.kubernetes.pod.terminationGracePeriod";
/// Annotation of a sandbox: the boot in which it was made, [`BootId`](crate::types::BootId) as a number.
pub const SANDBOX_BOOT: &str = "holdfast.io/boot";
