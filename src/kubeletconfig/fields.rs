//! Every field of upstream's `KubeletConfiguration` (v1beta1 at Kubernetes 1.36): its name, its type and
//! what this version does with it.

/// What becomes of a field that is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Support {
    /// The agent acts on it.
    Supported,
    /// Its value is checked, but nothing acts on it yet: setting it gives a warning.
    NotYet,
}

/// The type of a field's value.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// `true` or `false`.
    Bool,
    /// A whole number.
    Int,
    /// Any number.
    Number,
    /// A string.
    String,
    /// A string holding a Go duration.
    Duration,
    /// A list of strings.
    Strings,
    /// A map from strings to strings.
    StringMap,
    /// A map from strings to lists of strings.
    StringsMap,
    /// A map from strings to booleans.
    BoolMap,
    /// A list of objects that is not looked into.
    Objects,
    /// A map that is not looked into.
    AnyMap,
    /// An object with these fields.
    Object(&'static [Field]),
}

/// One field.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Its name in the file.
    pub name: &'static str,
    /// The type of its value.
    pub kind: Kind,
    /// What becomes of it. For an object, that of its fields decides.
    pub support: Support,
}

const fn yes(name: &'static str, kind: Kind) -> Field {
    Field {
        name,
        kind,
        support: Support::Supported,
    }
}

const fn later(name: &'static str, kind: Kind) -> Field {
    Field {
        name,
        kind,
        support: Support::NotYet,
    }
}

/// The fields of the document, `apiVersion` and `kind` apart, in upstream's order.
pub const FIELDS: &[Field] = &[
    later("enableServer", Kind::Bool),
    yes("staticPodPath", Kind::String),
    yes("podLogsDir", Kind::String),
    yes("syncFrequency", Kind::Duration),
    yes("fileCheckFrequency", Kind::Duration),
    yes("httpCheckFrequency", Kind::Duration),
    yes("staticPodURL", Kind::String),
    yes("staticPodURLHeader", Kind::StringsMap),
    later("address", Kind::String),
    later("port", Kind::Int),
    later("readOnlyPort", Kind::Int),
    later("tlsCertFile", Kind::String),
    later("tlsPrivateKeyFile", Kind::String),
    later("tlsCipherSuites", Kind::Strings),
    later("tlsCurvePreferences", Kind::Strings),
    later("tlsMinVersion", Kind::String),
    later("rotateCertificates", Kind::Bool),
    later("serverTLSBootstrap", Kind::Bool),
    later("authentication", Kind::Object(AUTHENTICATION)),
    later("authorization", Kind::Object(AUTHORIZATION)),
    later("registryPullQPS", Kind::Int),
    later("registryBurst", Kind::Int),
    later("imagePullCredentialsVerificationPolicy", Kind::String),
    later("preloadedImagesVerificationAllowlist", Kind::Strings),
    yes("eventRecordQPS", Kind::Int),
    yes("eventBurst", Kind::Int),
    later("enableDebuggingHandlers", Kind::Bool),
    later("enableContentionProfiling", Kind::Bool),
    yes("healthzPort", Kind::Int),
    yes("healthzBindAddress", Kind::String),
    later("oomScoreAdj", Kind::Int),
    yes("clusterDomain", Kind::String),
    yes("clusterDNS", Kind::Strings),
    later("streamingConnectionIdleTimeout", Kind::Duration),
    later("nodeStatusUpdateFrequency", Kind::Duration),
    later("nodeStatusReportFrequency", Kind::Duration),
    later("nodeLeaseDurationSeconds", Kind::Int),
    later("imageMinimumGCAge", Kind::Duration),
    later("imageMaximumGCAge", Kind::Duration),
    later("imageGCHighThresholdPercent", Kind::Int),
    later("imageGCLowThresholdPercent", Kind::Int),
    later("volumeStatsAggPeriod", Kind::Duration),
    later("kubeletCgroups", Kind::String),
    later("systemCgroups", Kind::String),
    yes("cgroupRoot", Kind::String),
    yes("cgroupsPerQOS", Kind::Bool),
    yes("cgroupDriver", Kind::String),
    later("cpuManagerPolicy", Kind::String),
    later("singleProcessOOMKill", Kind::Bool),
    later("cpuManagerPolicyOptions", Kind::StringMap),
    later("cpuManagerReconcilePeriod", Kind::Duration),
    later("memoryManagerPolicy", Kind::String),
    later("topologyManagerPolicy", Kind::String),
    later("topologyManagerScope", Kind::String),
    later("topologyManagerPolicyOptions", Kind::StringMap),
    later("qosReserved", Kind::StringMap),
    yes("runtimeRequestTimeout", Kind::Duration),
    later("hairpinMode", Kind::String),
    yes("maxPods", Kind::Int),
    later("podCIDR", Kind::String),
    yes("podPidsLimit", Kind::Int),
    yes("resolvConf", Kind::String),
    later("runOnce", Kind::Bool),
    yes("cpuCFSQuota", Kind::Bool),
    yes("cpuCFSQuotaPeriod", Kind::Duration),
    later("nodeStatusMaxImages", Kind::Int),
    later("maxOpenFiles", Kind::Int),
    later("contentType", Kind::String),
    later("kubeAPIQPS", Kind::Int),
    later("kubeAPIBurst", Kind::Int),
    yes("serializeImagePulls", Kind::Bool),
    yes("maxParallelImagePulls", Kind::Int),
    later("evictionHard", Kind::StringMap),
    later("evictionSoft", Kind::StringMap),
    later("evictionSoftGracePeriod", Kind::StringMap),
    later("evictionPressureTransitionPeriod", Kind::Duration),
    later("evictionMaxPodGracePeriod", Kind::Int),
    later("evictionMinimumReclaim", Kind::StringMap),
    later("mergeDefaultEvictionSettings", Kind::Bool),
    later("podsPerCore", Kind::Int),
    later("enableControllerAttachDetach", Kind::Bool),
    later("protectKernelDefaults", Kind::Bool),
    later("makeIPTablesUtilChains", Kind::Bool),
    later("iptablesMasqueradeBit", Kind::Int),
    later("iptablesDropBit", Kind::Int),
    later("featureGates", Kind::BoolMap),
    later("failSwapOn", Kind::Bool),
    later(
        "memorySwap",
        Kind::Object(&[later("swapBehavior", Kind::String)]),
    ),
    later("containerLogMaxSize", Kind::String),
    later("containerLogMaxFiles", Kind::Int),
    later("containerLogMaxWorkers", Kind::Int),
    later("containerLogMonitorInterval", Kind::Duration),
    later("configMapAndSecretChangeDetectionStrategy", Kind::String),
    later("systemReserved", Kind::StringMap),
    later("kubeReserved", Kind::StringMap),
    later("reservedSystemCPUs", Kind::String),
    later("showHiddenMetricsForVersion", Kind::String),
    later("systemReservedCgroup", Kind::String),
    later("kubeReservedCgroup", Kind::String),
    later("enforceNodeAllocatable", Kind::Strings),
    later("allowedUnsafeSysctls", Kind::Strings),
    later("volumePluginDir", Kind::String),
    later("providerID", Kind::String),
    later("kernelMemcgNotification", Kind::Bool),
    yes("logging", Kind::Object(LOGGING)),
    later("enableSystemLogHandler", Kind::Bool),
    later("enableSystemLogQuery", Kind::Bool),
    later("shutdownGracePeriod", Kind::Duration),
    later("shutdownGracePeriodCriticalPods", Kind::Duration),
    later("shutdownGracePeriodByPodPriority", Kind::Objects),
    yes("crashLoopBackOff", Kind::Object(CRASH_LOOP_BACK_OFF)),
    later("reservedMemory", Kind::Objects),
    later("enableProfilingHandler", Kind::Bool),
    later("enableDebugFlagsHandler", Kind::Bool),
    later("seccompDefault", Kind::Bool),
    later("memoryThrottlingFactor", Kind::Number),
    later("memoryReservationPolicy", Kind::String),
    later("registerWithTaints", Kind::Objects),
    later("registerNode", Kind::Bool),
    later("tracing", Kind::Object(TRACING)),
    later("localStorageCapacityIsolation", Kind::Bool),
    yes("containerRuntimeEndpoint", Kind::String),
    yes("imageServiceEndpoint", Kind::String),
    yes("failCgroupV1", Kind::Bool),
    later(
        "userNamespaces",
        Kind::Object(&[later("idsPerPod", Kind::Int)]),
    ),
];

const AUTHENTICATION: &[Field] = &[
    later("x509", Kind::Object(&[later("clientCAFile", Kind::String)])),
    later(
        "webhook",
        Kind::Object(&[
            later("enabled", Kind::Bool),
            later("cacheTTL", Kind::Duration),
        ]),
    ),
    later("anonymous", Kind::Object(&[later("enabled", Kind::Bool)])),
];

const AUTHORIZATION: &[Field] = &[
    later("mode", Kind::String),
    later(
        "webhook",
        Kind::Object(&[
            later("cacheAuthorizedTTL", Kind::Duration),
            later("cacheUnauthorizedTTL", Kind::Duration),
        ]),
    ),
];

const LOGGING: &[Field] = &[
    yes("format", Kind::String),
    // Upstream also takes whole nanoseconds here; a duration is what everybody writes.
    later("flushFrequency", Kind::Duration),
    yes("verbosity", Kind::Int),
    later("vmodule", Kind::Objects),
    later(
        "options",
        Kind::Object(&[later("text", Kind::AnyMap), later("json", Kind::AnyMap)]),
    ),
];

const CRASH_LOOP_BACK_OFF: &[Field] = &[yes("maxContainerRestartPeriod", Kind::Duration)];

const TRACING: &[Field] = &[
    later("endpoint", Kind::String),
    later("samplingRatePerMillion", Kind::Int),
];

/// The known name closest to `given`, if one is close enough to be what was meant. Case does not count.
pub(super) fn closest<'a>(
    given: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let wanted = given.to_ascii_lowercase();
    let limit = (wanted.chars().count() / 3).clamp(1, 3);
    known
        .into_iter()
        .map(|name| {
            let distance = strsim::damerau_levenshtein(&wanted, &name.to_ascii_lowercase());
            (distance, name)
        })
        .filter(|(distance, _)| *distance <= limit)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}
