//! Layer 1: decisions. Pure functions over values: no async, no clock, no I/O; time is an argument.

pub mod admission;
pub mod backoff;
pub mod claims;
pub mod cluster;
pub mod container_history;
pub mod credentials;
pub mod deadline;
pub mod devices;
pub mod env_file;
pub mod eviction;
pub mod image_gc;
pub mod images;
pub mod mounts;
pub mod node_root;
pub mod node_status;
pub mod offline;
pub mod oom;
pub mod orphans;
pub mod overdue_stop;
pub mod pinning;
pub mod pleg_diff;
pub mod pod_actions;
pub mod pod_certificates;
pub mod pod_status;
pub mod pod_update;
pub mod pod_worker;
pub mod pressure;
pub mod probe_result;
pub mod pull_fallback;
pub mod resize;
pub mod resources;
pub mod restart_all;
pub mod restore;
pub mod shutdown;
pub mod state;
pub mod status_patch;
pub mod supported;
pub mod trust;
pub mod turns;
pub mod volume_mounts;
pub mod volumes;

#[cfg(test)]
mod testkit;
