//! What users see of the kubelet's API: kubectl through a real kube-apiserver, and clients of our own straight on the
//! node's port. Needs root, containerd and `make envtest`.
//!
//! Most tests share one node, each with pods of its own. Those that stop the agent, load it or need another API server
//! have a node to themselves.
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
#[path = "kubectl/attach.rs"]
mod attach;
#[path = "kubectl/certificates.rs"]
mod certificates;
#[path = "kubectl/client.rs"]
mod client;
#[path = "kubectl/copy.rs"]
mod copy;
#[path = "kubectl/debug.rs"]
mod debug;
#[path = "kubectl/direct.rs"]
mod direct;
#[path = "kubectl/exec.rs"]
mod exec;
#[path = "kubectl/forward.rs"]
mod forward;
#[path = "kubectl/load.rs"]
mod load;
#[path = "kubectl/logs.rs"]
mod logs;
#[path = "metrics/tools.rs"]
mod metrics_tools;
#[path = "kubectl/newest.rs"]
mod newest;
#[path = "kubectl/node.rs"]
mod node;
#[path = "kubectl/raw.rs"]
mod raw;
#[path = "kubectl/restarts.rs"]
mod restarts;
#[path = "cluster/setup.rs"]
mod setup;
#[path = "kubectl/top.rs"]
mod top;
#[path = "kubectl/users.rs"]
mod users;
#[path = "kubectl/websocket.rs"]
mod websocket;
#[path = "agent_real/world.rs"]
mod world;
