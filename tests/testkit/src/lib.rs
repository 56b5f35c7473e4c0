//! What holdfast is tested against: [`fake_cri::FakeCri`], a CRI v1 server with an in-memory model and
//! fault injection, [`containerd::PrivateContainerd`], a real containerd of one's own, and
//! [`fake_api::FakeApi`], a kube-apiserver with an in-memory model and fault injection.
//!
//! Independent of the agent: what is tested here speaks CRI or the Kubernetes API and nothing else.

pub mod containerd;
pub mod fake_api;
pub mod fake_cri;
