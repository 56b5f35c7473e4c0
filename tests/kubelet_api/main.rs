//! The kubelet's API over real sockets: who is let in, with which certificate, and what clients that mean harm get.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    unreachable_pub,
    reason = "tests fail by panicking"
)]

mod abuse;
mod certificates;
mod real;
mod reviews;
mod routes;
mod world;
