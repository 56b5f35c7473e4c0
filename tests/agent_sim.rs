//! The whole agent in one process, on simulated time: restarts at every moment that matters.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    unreachable_pub,
    reason = "a test fails by panicking"
)]

#[path = "agent_sim/crash.rs"]
mod crash;
#[path = "agent_sim/events.rs"]
mod events;
#[path = "agent_sim/restart.rs"]
mod restart;
#[path = "agent_sim/world.rs"]
mod world;
