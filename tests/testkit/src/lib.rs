//! What holdfast is tested against. Runtimes: [`fake_cri::FakeCri`], a CRI v1 server with an in-memory model and
//! fault injection, and [`containerd::PrivateContainerd`], a real containerd of one's own. API servers:
//! [`fake_api::FakeApi`], a kube-apiserver with an in-memory model and fault injection, [`envtest::EnvTest`], a real
//! one of one's own, and [`fault_proxy::FaultProxy`], which stands before any API server, fails as it is told and
//! counts the requests. [`validation`] has the rules of a current API server. Storage: [`csi::CsiDriver`], a CSI driver
//! that mounts for real. Devices: [`device_plugin::DevicePlugin`]. Claims: [`dra_driver::DraDriver`].
//! Certificates of pods: [`pod_signer::PodSigner`].
//!
//! What several tests need and is slow to make is made once: [`fixture::once`]. Tests that try every point at which something may
//! fail ask [`exploration`] how many of them.
//!
//! Independent of the agent: what is tested here speaks CRI and the Kubernetes API, and nothing else.

pub mod containerd;
pub mod csi;
pub mod device_plugin;
pub mod dra_driver;
pub mod envtest;
pub mod exploration;
pub mod fake_api;
pub mod fake_cri;
pub mod fault_proxy;
pub mod fixture;
pub mod fixture_process;
pub mod machine;
pub mod pod_signer;
pub mod ports;
pub mod programs;
pub mod validation;
