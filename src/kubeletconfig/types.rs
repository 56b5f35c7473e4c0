//! The types of configuration fields.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

pub use super::table::KubeletConfiguration;

/// Owner of the cgroup tree. Must be the driver that the container runtime uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CgroupDriver {
    /// Directories are made in cgroupfs directly.
    #[default]
    Cgroupfs,
    /// Slices are asked of systemd.
    Systemd,
}

impl fmt::Display for CgroupDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cgroupfs => "cgroupfs",
            Self::Systemd => "systemd",
        })
    }
}

impl FromStr for CgroupDriver {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "cgroupfs" => Ok(Self::Cgroupfs),
            "systemd" => Ok(Self::Systemd),
            other => Err(format!("{other:?} is neither \"cgroupfs\" nor \"systemd\"")),
        }
    }
}

/// `imagePullCredentialsVerificationPolicy`: for which images on the node a pod must show that it may have them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ImageVerification {
    /// None.
    NeverVerify,
    /// Those that the agent pulled.
    #[default]
    NeverVerifyPreloadedImages,
    /// Those that are not on the allowlist.
    NeverVerifyAllowlistedImages,
    /// All.
    AlwaysVerify,
}

impl fmt::Display for ImageVerification {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NeverVerify => "NeverVerify",
            Self::NeverVerifyPreloadedImages => "NeverVerifyPreloadedImages",
            Self::NeverVerifyAllowlistedImages => "NeverVerifyAllowlistedImages",
            Self::AlwaysVerify => "AlwaysVerify",
        })
    }
}

impl FromStr for ImageVerification {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [
            Self::NeverVerify,
            Self::NeverVerifyPreloadedImages,
            Self::NeverVerifyAllowlistedImages,
            Self::AlwaysVerify,
        ]
        .into_iter()
        .find(|policy| policy.to_string() == text)
        .ok_or_else(|| {
            format!(
                "{text:?} is none of \"NeverVerify\", \"NeverVerifyPreloadedImages\", \
                 \"NeverVerifyAllowlistedImages\" and \"AlwaysVerify\""
            )
        })
    }
}

/// `containerLogMaxSize` of logs that are not rotated.
pub const NEVER_ROTATE: u64 = u64::MAX;

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

impl fmt::Display for LogFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Json => "json",
        })
    }
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            other => Err(format!("{other:?} is neither \"text\" nor \"json\"")),
        }
    }
}

/// Selects the pods of the API server that start after a reboot while the server is unreachable. A restart of the agent
/// without a reboot always resumes all pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OfflineStart {
    /// Every pod the store holds as admitted.
    All,
    /// Those that cannot do harm by running twice.
    #[default]
    Safe,
    /// None until the API server has answered.
    None,
}

impl FromStr for OfflineStart {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "All" => Ok(Self::All),
            "Safe" => Ok(Self::Safe),
            "None" => Ok(Self::None),
            other => Err(format!("{other:?} is none of \"All\", \"Safe\", \"None\"")),
        }
    }
}

/// Policy for containers of pull policy Always whose registry does not answer: wait, or start from the image of the
/// previous run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PullFallback {
    /// It waits for the registry, as upstream.
    #[default]
    Never,
    /// It may.
    Offline,
}

impl FromStr for PullFallback {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "Never" => Ok(Self::Never),
            "Offline" => Ok(Self::Offline),
            other => Err(format!("{other:?} is neither \"Never\" nor \"Offline\"")),
        }
    }
}

/// Policy for back-offs whose likely cause is gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackOffEarlyEnd {
    /// They end early.
    #[default]
    Enabled,
    /// They run their time, as upstream.
    Disabled,
}

impl FromStr for BackOffEarlyEnd {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "Enabled" => Ok(Self::Enabled),
            "Disabled" => Ok(Self::Disabled),
            other => Err(format!("{other:?} is neither \"Enabled\" nor \"Disabled\"")),
        }
    }
}

/// Reaction to a pod that has to start containers again after a start of the agent, while its devices are away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceReadiness {
    /// It fails, as upstream.
    #[default]
    Fail,
    /// It stays Pending until they are back.
    Wait,
}

impl FromStr for DeviceReadiness {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "Fail" => Ok(Self::Fail),
            "Wait" => Ok(Self::Wait),
            other => Err(format!("{other:?} is neither \"Fail\" nor \"Wait\"")),
        }
    }
}

/// A taint the node registers with, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taint {
    /// A qualified name.
    pub key: String,
    /// A label value, often empty.
    pub value: String,
    /// `NoSchedule`, `PreferNoSchedule` or `NoExecute`.
    pub effect: String,
}

/// Grace period for pods of a priority when the node shuts down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PriorityPeriod {
    /// The lowest priority of the group.
    pub priority: i32,
    /// Seconds for the whole group, not negative.
    pub seconds: i64,
}

/// Amount of a resource below which pods are evicted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum EvictionThreshold {
    /// An amount: bytes, inodes or processes.
    Quantity(u64),
    /// A part of the capacity, above 0 and below 1; single precision, as upstream keeps it.
    Fraction(f32),
}

// A fraction is never NaN: the parser refuses it.
impl Eq for EvictionThreshold {}

impl EvictionThreshold {
    /// The amount that must be left of `capacity`, as upstream's `GetThresholdQuantity`.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        reason = "the arithmetic is upstream's, so that allocatable comes out the same"
    )]
    pub fn of(self, capacity: u64) -> u64 {
        match self {
            Self::Quantity(amount) => amount,
            Self::Fraction(fraction) => (capacity as f64 * f64::from(fraction)) as u64,
        }
    }
}

/// Upstream's `evictionHard` when none is given.
pub(super) fn default_eviction_hard() -> BTreeMap<String, EvictionThreshold> {
    let percent = |percent: f32| EvictionThreshold::Fraction(percent / 100.0);
    [
        ("memory.available", EvictionThreshold::Quantity(100 << 20)),
        ("nodefs.available", percent(10.0)),
        ("nodefs.inodesFree", percent(5.0)),
        ("imagefs.available", percent(15.0)),
        ("imagefs.inodesFree", percent(5.0)),
    ]
    .into_iter()
    .map(|(signal, threshold)| (signal.to_owned(), threshold))
    .collect()
}

/// The `logging` section.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Logging {
    /// `format`.
    pub format: LogFormat,
    /// `verbosity`, as klog's `-v`.
    pub verbosity: u32,
}

/// The `tracing` section: where spans are sent to, and how many.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tracing {
    /// `endpoint`: the collector (OTLP over gRPC, without TLS), as `host:port` or `unix:///path`.
    pub endpoint: String,
    /// `samplingRatePerMillion`: of a million traces that begin here so many are sent; 0 for none.
    pub sampling_rate_per_million: u32,
}

impl Default for Tracing {
    fn default() -> Self {
        Self {
            endpoint: "localhost:4317".to_owned(),
            sampling_rate_per_million: 0,
        }
    }
}
