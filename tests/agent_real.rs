//! The whole agent, as a process of its own, on real containerd: what users see, what restarts cost, and
//! what happens when agent, runtime and containers are killed at bad moments.
//!
//! Restarts are counted from the runtime's container IDs and from a file that each container appends to
//! when it starts, never from the agent's own numbers. Needs root and containerd (`hack/deps.sh runtime`).
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    missing_docs,
    unreachable_pub,
    reason = "a test fails by panicking"
)]

#[path = "support/agent_process.rs"]
mod agent_process;
#[path = "agent_real/attempt_files.rs"]
mod attempt_files;
#[path = "agent_real/containerd_2.rs"]
mod containerd_2;
#[cfg(feature = "failpoints")]
#[path = "agent_real/crash_points.rs"]
mod crash_points;
#[path = "agent_real/devices.rs"]
mod devices;
#[path = "agent_real/image_collection.rs"]
mod image_collection;
#[path = "agent_real/kill_storm.rs"]
mod kill_storm;
#[path = "agent_real/phases.rs"]
mod phases;
#[path = "agent_real/pictures.rs"]
mod pictures;
#[path = "agent_real/pods.rs"]
mod pods;
#[path = "agent_real/process.rs"]
mod process;
#[path = "agent_real/pulls.rs"]
mod pulls;
#[path = "support/registry.rs"]
mod registry;
#[cfg(feature = "failpoints")]
#[path = "agent_real/resize.rs"]
mod resize;
#[path = "agent_real/restarts.rs"]
mod restarts;
#[path = "agent_real/rows.rs"]
mod rows;
#[path = "agent_real/runtime_restarts.rs"]
mod runtime_restarts;
#[path = "agent_real/tutorial.rs"]
mod tutorial;
#[path = "agent_real/world.rs"]
mod world;
