//! Fuzz target of the relay in front of the gRPC server.
pub(crate) use super::authority::fuzzing::hpack_authority;
