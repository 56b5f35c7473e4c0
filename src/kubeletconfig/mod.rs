//! Layer 0: flags and the KubeletConfiguration file.
//!
//! Owns the agent's settings: the command line ([`flags::KubeletFlags`]), the configuration file and
//! its drop-ins ([`load::load`]), upstream's defaults ([`KubeletConfiguration::default`]) and the rules
//! values must obey. In comes text written by people; out comes one [`AgentConfig`], in which every
//! duration, path, address and endpoint is typed and checked, plus [`Warning`]s.
//!
//! Invariants:
//! - Precedence is flag > drop-in > file > default, and a flag counts only when it was given.
//! - Nothing is ignored silently: a misspelt field and an unknown flag are errors. A field that is newer
//!   than this version, or that upstream knows and this version does not act on, is a warning that names it.
//! - All problems are reported at once, each with the file, line and column or the flag it came from.

mod cluster;
mod codec;
mod decode;
mod duration;
mod encode;
mod eviction;
pub mod fields;
pub mod flags;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod given;
pub mod load;
mod pinning;
mod problem;
mod quantity;
mod reserves;
mod resolve;
mod server;
mod shutdown;
mod table;
pub mod tables;
mod types;
pub mod unsupported;
mod validate;
mod yaml;

pub use duration::{format_duration, parse_duration};
pub use encode::encode;
pub use pinning::{
    CpuManagerPolicy, CpuOptions, MemoryManagerPolicy, ReservedMemory, TopologyOptions,
    TopologyPolicy, TopologyScope,
};
pub use problem::{ConfigError, Origin, Problem, Warning};
pub use reserves::{MemoryReservation, Reserves, SwapBehavior};
pub use resolve::{AgentConfig, ContainerGcPolicy, Endpoint, resolve, resolve_content};
pub use server::{
    Authentication, Authorization, AuthorizationMode, CIPHER_SUITES, CURVES, TlsVersion,
};
pub use types::{
    BackOffEarlyEnd, CgroupDriver, DeviceReadiness, EvictionThreshold, ImageVerification,
    KubeletConfiguration, LogFormat, Logging, NEVER_ROTATE, OfflineStart, PriorityPeriod,
    PullFallback, Taint, Tracing,
};

/// The only API version that is read.
pub const API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";
/// The only kind that is read.
pub const KIND: &str = "KubeletConfiguration";

#[cfg(test)]
mod tests;
