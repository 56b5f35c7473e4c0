//! CSI drivers: calls to a real driver process, its registration, and what the API server is told of it.
//!
//! The driver is `holdfast_testkit::csi`: it mounts for real, so that these tests need root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    unreachable_pub,
    reason = "tests may panic"
)]

mod api;
mod client;
mod fixture;
mod registration;
mod world;

holdfast_testkit::csi_driver_process!();
