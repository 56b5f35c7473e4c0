//! Layer 3: the container runtime over CRI v1.

pub mod attempt_files;
pub mod container_config;
pub mod container_mounts;
pub mod cri;
pub mod devices;
pub mod dns;
pub mod downward;
pub mod env;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
pub mod gc;
pub mod hooks;
pub mod kill;
pub mod labels;
pub mod logs;
pub mod node_context;
mod node_file;
pub mod open_streams;
pub mod pod_http;
pub mod resources;
pub mod sandbox_config;
pub mod security;
pub mod selinux;
pub mod service_env;
pub mod sources;
pub mod termination;
pub mod userns;
