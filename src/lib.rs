//! holdfast: a Kubernetes node agent whose memory is on disk.
//!
//! See ARCHITECTURE.md for the map. Layers import downward only; `tests/layers.rs` enforces it.

// Pods as an API server fills them in are long literals.
#![cfg_attr(test, recursion_limit = "256")]

pub mod admin;
pub mod agent;
pub mod apiserver;
pub mod cli;
pub mod cm;
pub mod config;
pub mod container_logs;
pub mod core;
pub mod devicemanager;
pub mod dra;
pub mod events;
pub mod eviction;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod images;
pub mod kubeletconfig;
pub mod kuberuntime;
pub mod node_object;
pub mod nodeshutdown;
pub mod nodestatus;
pub mod objects;
pub mod oom_watcher;
pub mod pleg;
pub mod pod_manager;
pub mod pod_workers;
pub mod podresources;
pub mod podsapi;
pub mod prober;
pub mod runtime_state;
pub mod server;
pub mod stats;
pub mod status;
pub mod store;
pub mod sync_loop;
pub mod types;
pub mod volumemanager;
