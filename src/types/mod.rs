//! Layer 0: the vocabulary every other module speaks.
//!
//! Owns names (`PodUid`, `ContainerId`, `FullName`), time (`Stamp`, `Clock`), what sources send
//! (`PodUpdate`), what the runtime reports (`runtime::PodStatus`), and the traits through which lower
//! layers report upward without importing upward (`EventRecorder`). Nothing here does I/O except
//! `SystemClock` and `boot::identify`, which read the kernel's clocks and identity, `beneath`, which opens directories,
//! and `file_system`, which reads the mount table;
//! `blocking` lends the others threads.

pub mod beneath;
pub mod blocking;
pub mod boot;
pub mod causes;
pub mod certificates;
pub mod containers;
pub mod cpu_set;
pub mod events;
pub mod file_label;
pub mod file_system;
mod hardware;
pub mod host_addresses;
mod interfaces;
pub mod json;
pub mod metrics;
pub mod mount_root;
pub mod mountinfo;
pub mod names;
pub mod pace;
pub mod pod;
pub mod probe;
pub mod quantity;
pub mod runtime;
pub mod text;
pub mod time;
pub mod update;

pub use boot::{BootId, BootIdentity};
pub use causes::causes;
pub use containers::{ContainerKind, ContainerSpec};
pub use events::{Event, EventRecorder, EventType, PodRef};
pub use json::Json;
pub use names::{ContainerId, FullName, PodUid};
pub use pace::Pace;
pub use pod::PodExt;
pub use probe::{ProbeFailure, ProbeKind, ProbeSenders, ProbeUpdate, ProbeView};
pub use time::{Clock, Moment, Stamp, SystemClock};
pub use update::{PodOp, PodSource, PodSyncType, PodUpdate};
