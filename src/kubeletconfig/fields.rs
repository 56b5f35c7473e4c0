//! Every field of upstream's `KubeletConfiguration` (v1beta1 at Kubernetes 1.36): its name, its type and
//! what this version does with it.

/// The Kubernetes release whose fields these are.
pub const RELEASE: &str = "1.36";

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
    /// A whole number of 32 bits.
    Int32,
    /// A whole number of 32 bits that is not negative.
    Uint32,
    /// A whole number of 64 bits.
    Int64,
    /// Any number.
    Number,
    /// A string.
    String,
    /// A string holding a Go duration.
    Duration,
    /// A string holding a Go duration, or a whole number of nanoseconds.
    DurationOrNanos,
    /// A quantity like `10Mi`: a string or a number.
    Quantity,
    /// A list of strings.
    Strings,
    /// A list of whole numbers of 32 bits.
    Ints,
    /// A map from strings to strings.
    StringMap,
    /// A map from strings to lists of strings.
    StringsMap,
    /// A map from strings to booleans.
    BoolMap,
    /// A map from strings to quantities.
    QuantityMap,
    /// A list of objects with these fields.
    Objects(&'static [Field]),
    /// An object with these fields.
    Object(&'static [Field]),
}

impl Kind {
    /// The type in words, as the documentation names it.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Bool => "boolean",
            Self::Int32 | Self::Uint32 | Self::Int64 => "integer",
            Self::Number => "number",
            Self::String => "string",
            Self::Duration => "duration",
            Self::DurationOrNanos => "duration or nanoseconds",
            Self::Quantity => "quantity",
            Self::Strings => "list of strings",
            Self::Ints => "list of integers",
            Self::StringMap => "map of strings",
            Self::StringsMap => "map of lists of strings",
            Self::BoolMap => "map of booleans",
            Self::QuantityMap => "map of quantities",
            Self::Objects(_) => "list of objects",
            Self::Object(_) => "object",
        }
    }
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
    /// For a field without effect: the values that say what it is without being set, upstream's default first.
    /// An empty list or map always does.
    pub unset: &'static [&'static str],
}

const fn yes(name: &'static str, kind: Kind) -> Field {
    Field {
        name,
        kind,
        support: Support::Supported,
        unset: &[],
    }
}

const fn later(name: &'static str, kind: Kind, unset: &'static [&'static str]) -> Field {
    Field {
        name,
        kind,
        support: Support::NotYet,
        unset,
    }
}

/// The fields of the document, `apiVersion` and `kind` apart, in upstream's order.
pub const FIELDS: &[Field] = &[
    yes("enableServer", Kind::Bool),
    yes("staticPodPath", Kind::String),
    yes("podLogsDir", Kind::String),
    yes("syncFrequency", Kind::Duration),
    yes("fileCheckFrequency", Kind::Duration),
    yes("httpCheckFrequency", Kind::Duration),
    yes("staticPodURL", Kind::String),
    yes("staticPodURLHeader", Kind::StringsMap),
    yes("address", Kind::String),
    yes("port", Kind::Int32),
    yes("readOnlyPort", Kind::Int32),
    yes("tlsCertFile", Kind::String),
    yes("tlsPrivateKeyFile", Kind::String),
    yes("tlsCipherSuites", Kind::Strings),
    yes("tlsCurvePreferences", Kind::Ints),
    yes("tlsMinVersion", Kind::String),
    yes("rotateCertificates", Kind::Bool),
    yes("serverTLSBootstrap", Kind::Bool),
    yes("authentication", Kind::Object(AUTHENTICATION)),
    yes("authorization", Kind::Object(AUTHORIZATION)),
    later("registryPullQPS", Kind::Int32, &["5"]),
    later("registryBurst", Kind::Int32, &["10", "0"]),
    yes("imagePullCredentialsVerificationPolicy", Kind::String),
    yes("preloadedImagesVerificationAllowlist", Kind::Strings),
    yes("eventRecordQPS", Kind::Int32),
    yes("eventBurst", Kind::Int32),
    yes("enableDebuggingHandlers", Kind::Bool),
    later("enableContentionProfiling", Kind::Bool, &["false"]),
    yes("healthzPort", Kind::Int32),
    yes("healthzBindAddress", Kind::String),
    yes("oomScoreAdj", Kind::Int32),
    yes("clusterDomain", Kind::String),
    yes("clusterDNS", Kind::Strings),
    yes("streamingConnectionIdleTimeout", Kind::Duration),
    yes("nodeStatusUpdateFrequency", Kind::Duration),
    yes("nodeStatusReportFrequency", Kind::Duration),
    yes("nodeLeaseDurationSeconds", Kind::Int32),
    yes("imageMinimumGCAge", Kind::Duration),
    yes("imageMaximumGCAge", Kind::Duration),
    yes("imageGCHighThresholdPercent", Kind::Int32),
    yes("imageGCLowThresholdPercent", Kind::Int32),
    later("volumeStatsAggPeriod", Kind::Duration, &["1m", "0s"]),
    yes("kubeletCgroups", Kind::String),
    yes("systemCgroups", Kind::String),
    yes("cgroupRoot", Kind::String),
    yes("cgroupsPerQOS", Kind::Bool),
    yes("cgroupDriver", Kind::String),
    yes("cpuManagerPolicy", Kind::String),
    yes("singleProcessOOMKill", Kind::Bool),
    yes("cpuManagerPolicyOptions", Kind::StringMap),
    yes("cpuManagerReconcilePeriod", Kind::Duration),
    yes("memoryManagerPolicy", Kind::String),
    yes("topologyManagerPolicy", Kind::String),
    yes("topologyManagerScope", Kind::String),
    yes("topologyManagerPolicyOptions", Kind::StringMap),
    yes("qosReserved", Kind::StringMap),
    yes("runtimeRequestTimeout", Kind::Duration),
    later("hairpinMode", Kind::String, &["promiscuous-bridge", ""]),
    yes("maxPods", Kind::Int32),
    later("podCIDR", Kind::String, &[""]),
    yes("podPidsLimit", Kind::Int64),
    yes("resolvConf", Kind::String),
    later("runOnce", Kind::Bool, &["false"]),
    yes("cpuCFSQuota", Kind::Bool),
    yes("cpuCFSQuotaPeriod", Kind::Duration),
    yes("nodeStatusMaxImages", Kind::Int32),
    later("maxOpenFiles", Kind::Int64, &["1000000", "0"]),
    yes("contentType", Kind::String),
    yes("kubeAPIQPS", Kind::Int32),
    yes("kubeAPIBurst", Kind::Int32),
    yes("serializeImagePulls", Kind::Bool),
    yes("maxParallelImagePulls", Kind::Int32),
    yes("evictionHard", Kind::StringMap),
    yes("evictionSoft", Kind::StringMap),
    yes("evictionSoftGracePeriod", Kind::StringMap),
    yes("evictionPressureTransitionPeriod", Kind::Duration),
    yes("evictionMaxPodGracePeriod", Kind::Int32),
    yes("evictionMinimumReclaim", Kind::StringMap),
    yes("mergeDefaultEvictionSettings", Kind::Bool),
    yes("podsPerCore", Kind::Int32),
    yes("enableControllerAttachDetach", Kind::Bool),
    yes("protectKernelDefaults", Kind::Bool),
    yes("makeIPTablesUtilChains", Kind::Bool),
    later("iptablesMasqueradeBit", Kind::Int32, &["14"]),
    later("iptablesDropBit", Kind::Int32, &["15"]),
    later("featureGates", Kind::BoolMap, &[]),
    yes("failSwapOn", Kind::Bool),
    yes(
        "memorySwap",
        Kind::Object(&[yes("swapBehavior", Kind::String)]),
    ),
    yes("containerLogMaxSize", Kind::String),
    yes("containerLogMaxFiles", Kind::Int32),
    yes("containerLogMaxWorkers", Kind::Int32),
    yes("containerLogMonitorInterval", Kind::Duration),
    yes("configMapAndSecretChangeDetectionStrategy", Kind::String),
    yes("systemReserved", Kind::StringMap),
    yes("kubeReserved", Kind::StringMap),
    yes("reservedSystemCPUs", Kind::String),
    later("showHiddenMetricsForVersion", Kind::String, &[""]),
    yes("systemReservedCgroup", Kind::String),
    yes("kubeReservedCgroup", Kind::String),
    yes("enforceNodeAllocatable", Kind::Strings),
    yes("allowedUnsafeSysctls", Kind::Strings),
    later(
        "volumePluginDir",
        Kind::String,
        &["/usr/libexec/kubernetes/kubelet-plugins/volume/exec/", ""],
    ),
    yes("providerID", Kind::String),
    later("kernelMemcgNotification", Kind::Bool, &["false"]),
    yes("logging", Kind::Object(LOGGING)),
    yes("enableSystemLogHandler", Kind::Bool),
    yes("enableSystemLogQuery", Kind::Bool),
    yes("shutdownGracePeriod", Kind::Duration),
    yes("shutdownGracePeriodCriticalPods", Kind::Duration),
    yes(
        "shutdownGracePeriodByPodPriority",
        Kind::Objects(PRIORITY_PERIOD),
    ),
    yes("crashLoopBackOff", Kind::Object(CRASH_LOOP_BACK_OFF)),
    yes("reservedMemory", Kind::Objects(RESERVED_MEMORY)),
    yes("enableProfilingHandler", Kind::Bool),
    yes("enableDebugFlagsHandler", Kind::Bool),
    yes("seccompDefault", Kind::Bool),
    yes("memoryThrottlingFactor", Kind::Number),
    yes("memoryReservationPolicy", Kind::String),
    yes("registerWithTaints", Kind::Objects(TAINT)),
    yes("registerNode", Kind::Bool),
    yes("tracing", Kind::Object(TRACING)),
    later("localStorageCapacityIsolation", Kind::Bool, &["true"]),
    yes("containerRuntimeEndpoint", Kind::String),
    yes("imageServiceEndpoint", Kind::String),
    yes("failCgroupV1", Kind::Bool),
    later(
        "userNamespaces",
        Kind::Object(&[later("idsPerPod", Kind::Int64, &["65536"])]),
        &[],
    ),
];

const AUTHENTICATION: &[Field] = &[
    yes("x509", Kind::Object(&[yes("clientCAFile", Kind::String)])),
    yes(
        "webhook",
        Kind::Object(&[yes("enabled", Kind::Bool), yes("cacheTTL", Kind::Duration)]),
    ),
    yes("anonymous", Kind::Object(&[yes("enabled", Kind::Bool)])),
];

const AUTHORIZATION: &[Field] = &[
    yes("mode", Kind::String),
    yes(
        "webhook",
        Kind::Object(&[
            yes("cacheAuthorizedTTL", Kind::Duration),
            yes("cacheUnauthorizedTTL", Kind::Duration),
        ]),
    ),
];

const LOGGING: &[Field] = &[
    yes("format", Kind::String),
    later("flushFrequency", Kind::DurationOrNanos, &["5s", "0s"]),
    yes("verbosity", Kind::Uint32),
    later(
        "vmodule",
        Kind::Objects(&[
            later("filePattern", Kind::String, &[]),
            later("verbosity", Kind::Uint32, &[]),
        ]),
        &[],
    ),
    later(
        "options",
        Kind::Object(&[
            later("text", Kind::Object(OUTPUT_ROUTING), &[]),
            later("json", Kind::Object(OUTPUT_ROUTING), &[]),
        ]),
        &[],
    ),
];

const OUTPUT_ROUTING: &[Field] = &[
    later("splitStream", Kind::Bool, &["false"]),
    later("infoBufferSize", Kind::Quantity, &["0"]),
];

const TAINT: &[Field] = &[
    yes("key", Kind::String),
    yes("value", Kind::String),
    yes("effect", Kind::String),
    yes("timeAdded", Kind::String),
];

const RESERVED_MEMORY: &[Field] = &[
    yes("numaNode", Kind::Int32),
    yes("limits", Kind::QuantityMap),
];

const PRIORITY_PERIOD: &[Field] = &[
    yes("priority", Kind::Int32),
    yes("shutdownGracePeriodSeconds", Kind::Int64),
];

const CRASH_LOOP_BACK_OFF: &[Field] = &[yes("maxContainerRestartPeriod", Kind::Duration)];

const TRACING: &[Field] = &[
    yes("endpoint", Kind::String),
    yes("samplingRatePerMillion", Kind::Int32),
];

/// Returns the known name that `given` is a misspelling of; the closest, if there are several. A name that is
/// like none is one that a newer release may have.
///
/// Letter case does not count. Further edits are counted as in a Damerau–Levenshtein distance: one anywhere
/// makes a misspelling, and up to three if the names have the same words and no word has more than one edit
/// for every four letters. So `imageMedianGCAge` is not taken for `imageMinimumGCAge`, of which it differs by
/// another word.
pub(super) fn misspelt<'a>(
    given: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let near = |name: &'a str| distance(given, name).map(|edits| (edits, name));
    let nearest = known.into_iter().filter_map(near).min_by_key(|near| near.0);
    nearest.map(|(_, name)| name)
}

/// Returns how many edits make `given` of `name`; `None` if they are too many for a misspelling.
fn distance(given: &str, name: &str) -> Option<usize> {
    let (given_lower, name_lower) = (given.to_ascii_lowercase(), name.to_ascii_lowercase());
    let edits = strsim::damerau_levenshtein(&given_lower, &name_lower);
    if edits <= 1 {
        // Two short names are soon one edit apart.
        return (edits == 0 || name.chars().count() >= 3).then_some(edits);
    }
    let (given, name) = (words(given), words(name));
    let slips = |(given, name): (&String, &String)| {
        let edits = strsim::damerau_levenshtein(given, name);
        edits <= (name.chars().count() / 4).max(1)
    };
    (edits <= 3 && given.len() == name.len() && given.iter().zip(&name).all(slips)).then_some(edits)
}

/// Returns the words of a name in camel case, in lower case. An acronym is one word.
fn words(name: &str) -> Vec<String> {
    let letters: Vec<char> = name.chars().collect();
    let mut words: Vec<String> = Vec::new();
    for (at, letter) in letters.iter().enumerate() {
        let upper = |at: usize| letters.get(at).is_some_and(|c| !c.is_lowercase());
        let begins =
            at == 0 || (upper(at) && (!upper(at - 1) || !upper(at + 1)) && at + 1 < letters.len());
        match words.last_mut().filter(|_| !begins) {
            Some(word) => word.push(letter.to_ascii_lowercase()),
            None => words.push(letter.to_ascii_lowercase().to_string()),
        }
    }
    words
}
