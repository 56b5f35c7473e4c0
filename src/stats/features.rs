//! `kubernetes_feature_enabled`: feature gates of Kubernetes, and whether this agent does what they stand for.
//!
//! There are no gates here: what a version has is on. Named are those gates of a kubelet about whose features this agent
//! has decided, on or off.

use super::exposition::{Exposition, Kind};
use super::resource::number;

const ALPHA: &str = "ALPHA";
const BETA: &str = "BETA";
/// Upstream's word for a stable feature is none.
const GA: &str = "";

/// Gates by name, their stage in the level of Kubernetes that the agent follows, and whether the agent has the feature.
const FEATURES: &[(&str, &str, bool)] = &[
    ("ClusterTrustBundleProjection", BETA, true),
    ("ComponentFlagz", BETA, true),
    ("ComponentStatusz", BETA, true),
    ("ContainerCheckpoint", BETA, true),
    ("ContainerRestartRules", BETA, true),
    ("ContainerStopSignals", ALPHA, true),
    ("DynamicResourceAllocation", GA, false),
    ("EnvFiles", BETA, true),
    ("EventedPLEG", ALPHA, true),
    ("ExecProbeTimeout", GA, true),
    ("GracefulNodeShutdown", BETA, true),
    ("GracefulNodeShutdownBasedOnPodPriority", BETA, true),
    ("HostnameOverride", BETA, true),
    ("ImageMaximumGCAge", GA, false),
    ("ImageVolume", GA, true),
    ("InPlacePodLevelResourcesVerticalScaling", BETA, true),
    ("InPlacePodVerticalScaling", GA, true),
    ("InPlacePodVerticalScalingInitContainers", GA, true),
    ("KubeletAllocatedPodsEndpoint", ALPHA, true),
    ("KubeletCgroupDriverFromCRI", GA, true),
    ("KubeletCrashLoopBackOffMax", BETA, true),
    ("KubeletEnsureSecretPulledImages", BETA, true),
    ("KubeletFineGrainedAuthz", GA, true),
    ("KubeletPSI", GA, true),
    ("KubeletPodResourcesGet", GA, true),
    (
        "KubeletServiceAccountTokenForCredentialProviders",
        BETA,
        false,
    ),
    ("KubeletTracing", GA, true),
    ("MemoryManager", GA, true),
    ("NodeDeclaredFeatures", BETA, true),
    ("NodeLogQuery", GA, true),
    ("NodeSwap", GA, false),
    ("PodLevelResources", BETA, true),
    ("PodLifecycleSleepAction", GA, true),
    ("PodLifecycleSleepActionAllowZero", GA, true),
    ("PodObservedGenerationTracking", GA, true),
    ("PodReadyToStartContainersCondition", BETA, true),
    ("PodsAPI", BETA, true),
    ("ProcMountType", GA, true),
    ("ReloadKubeletClientCAFile", BETA, true),
    ("ReloadKubeletServerCertificateFile", BETA, true),
    ("RestartAllContainersOnContainerExits", BETA, true),
    ("RotateKubeletServerCertificate", BETA, true),
    ("SupplementalGroupsPolicy", GA, true),
    ("SystemdWatchdog", GA, true),
    ("UserNamespacesSupport", GA, true),
];

pub(super) fn encode(text: &mut Exposition) {
    let mut family = text.family(
        "kubernetes_feature_enabled",
        Kind::Gauge,
        "Whether the agent does what a feature gate of Kubernetes stands for, by the gate's stage",
    );
    for (name, stage, enabled) in FEATURES {
        let labels = [("name", *name), ("stage", *stage)];
        family.sample(&labels, number(u64::from(*enabled)));
    }
}
