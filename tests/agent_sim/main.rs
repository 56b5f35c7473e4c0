//! The whole agent in one process, on simulated time: restarts at every moment that matters.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    unreachable_pub,
    reason = "a test fails by panicking"
)]

mod api_crash;
mod api_random;
mod api_restart;
mod cluster;
mod crash;
mod damage;
mod events;
mod lifecycle;
mod node;
mod probes;
mod resize;
mod restart;
mod trouble;
mod watch;
mod world;
