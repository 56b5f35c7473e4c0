//! The whole agent as a node of a real cluster: kube-apiserver and etcd (`make envtest`), containerd, kubectl.
//!
//! Between agent and API server stands a proxy that counts requests and makes trouble. Restarts are counted from the
//! runtime's container IDs, never from the agent's own numbers. Needs root and containerd (`hack/deps.sh runtime`).
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

#[path = "cluster/addresses.rs"]
mod addresses;
#[path = "support/agent_process.rs"]
mod agent_process;
#[path = "cluster/bare.rs"]
mod bare;
#[path = "kubectl/direct.rs"]
mod direct;
#[path = "cluster/events.rs"]
mod events;
#[path = "cluster/fairness.rs"]
mod fairness;
#[path = "cluster/figures.rs"]
mod figures;
#[path = "cluster/kubectl.rs"]
mod kubectl;
#[path = "cluster/neighbours.rs"]
mod neighbours;
#[path = "cluster/node.rs"]
mod node;
#[path = "cluster/pods.rs"]
mod pods;
#[path = "cluster/probes_cost.rs"]
mod probes_cost;
#[path = "cluster/restarts.rs"]
mod restarts;
#[path = "cluster/rows.rs"]
mod rows;
#[path = "cluster/setup.rs"]
mod setup;
#[path = "cluster/tenants.rs"]
mod tenants;
#[path = "cluster/trouble.rs"]
mod trouble;
#[path = "agent_real/world.rs"]
mod world;
