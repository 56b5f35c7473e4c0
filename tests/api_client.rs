//! The API client on the wire: whom it trusts, what it says when it is not trusted, how it gets through proxies,
//! how many connections it opens, and where it has its credentials from.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "a test fails by panicking"
)]

#[path = "api_client/plugins.rs"]
mod plugins;
#[path = "api_client/proxies.rs"]
mod proxies;
#[path = "api_client/proxy.rs"]
mod proxy;
#[path = "api_client/server.rs"]
mod server;
#[path = "api_client/trust.rs"]
mod trust;
