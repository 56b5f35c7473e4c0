//! The real binary against a live admin server in this process, and against stores on disk.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "tests fail by panicking"
)]

mod check;
mod dump;
mod help;
mod keys;
mod protection;
mod stores;
mod world;
