//! Storage of CSI drivers: the wire protocol, the drivers that registered, what the API server is told of them, and
//! volumes ([`CsiPlugin`]).

mod allocatable;
pub mod client;
mod driver;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod node_info;
pub mod proto;
pub mod registry;
mod rpc;
mod volume;
mod watch;

pub use volume::CsiPlugin;
