//! exec, attach, port-forward and run through the agent's routes, on a real containerd and on a server that answers
//! badly.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "a test fails by panicking"
)]

#[path = "streaming/client.rs"]
mod client;
#[path = "streaming/exec.rs"]
mod exec;
#[path = "streaming/forward.rs"]
mod forward;
#[path = "streaming/refusals.rs"]
mod refusals;
#[path = "cri_contract/world.rs"]
#[allow(dead_code, reason = "shared with the contract of the runtime client")]
mod runtime;
#[path = "streaming/stopped.rs"]
mod stopped;
#[path = "streaming/world.rs"]
mod world;
