//! The whole agent in one process, on simulated time: restarts at every moment that matters.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    unreachable_pub,
    reason = "a test fails by panicking"
)]

mod admission;
mod api_crash;
mod api_random;
mod api_restart;
mod bad_pods;
mod cluster;
mod content;
mod crash;
mod damage;
mod events;
mod images;
mod lifecycle;
mod neighbours;
mod node;
mod pinning;
mod pod_certificates;
mod pressure;
mod probes;
mod replace;
mod resize;
mod resize_whole;
mod restart;
mod restart_all;
mod rich;
#[path = "../support/rich_pod.rs"]
mod rich_pod;
mod rows;
mod rows_ends;
mod rows_steps;
mod runtime_features;
mod schedule;
mod schedules;
mod settings;
mod shutdown;
mod takeover;
mod trouble;
mod volumes;
mod watch;
mod world;
