//! Volumes through a real kube-apiserver: one manifest per type and semantic below `tests/e2e/volumes`, on real
//! containerd; teardown that is killed at every step beside what belongs to users; drivers that are killed.
//!
//! What controllers of a whole cluster would do (bind claims, attach volumes) the tests do themselves.
//! `HOLDFAST_E2E=name,name` runs only some manifests. Needs root, containerd (`hack/deps.sh runtime`) and `make envtest`.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    dead_code,
    missing_docs,
    unreachable_pub,
    reason = "a test fails by panicking; what it shares with others it does not use whole"
)]

#[path = "support/agent_process.rs"]
mod agent_process;
#[path = "volumes/claims.rs"]
mod claims;
#[path = "volumes/content.rs"]
mod content;
#[path = "volumes/controllers.rs"]
mod controllers;
#[path = "volumes/drivers.rs"]
mod drivers;
#[path = "volumes/features.rs"]
mod features;
#[path = "volumes/kinds.rs"]
mod kinds;
#[path = "volumes/node_local.rs"]
mod node_local;
#[path = "volumes/planted.rs"]
mod planted;
#[path = "volumes/refused.rs"]
mod refused;
#[path = "volumes/seen.rs"]
mod seen;
#[path = "cluster/setup.rs"]
mod setup;
#[path = "volumes/teardown.rs"]
mod teardown;
#[path = "volumes/torture.rs"]
mod torture;
#[path = "agent_real/world.rs"]
mod world;

holdfast_testkit::csi_driver_process!();
