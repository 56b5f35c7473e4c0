//! One suite for every backend, then what only injected faults can show, then a model.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    unreachable_pub,
    reason = "tests"
)]

#[path = "store_contract/faults.rs"]
mod faults;
#[path = "store_contract/model.rs"]
mod model;
#[path = "store_contract/paced.rs"]
mod paced;
#[path = "store_contract/redb.rs"]
mod redb;
#[path = "store_contract/suite.rs"]
mod suite;
#[path = "store_contract/world.rs"]
mod world;
