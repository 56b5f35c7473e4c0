//! Runtimes to test holdfast against: [`fake_cri::FakeCri`], a CRI v1 server with an in-memory model and
//! fault injection, and [`containerd::PrivateContainerd`], a real containerd of one's own.
//!
//! Independent of the agent: what is tested here speaks CRI and nothing else.

pub mod containerd;
pub mod fake_cri;
