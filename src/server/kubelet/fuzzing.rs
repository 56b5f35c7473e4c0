//! Fuzz targets of the kubelet API: queries for logs, `Range` headers, and the streaming protocols.

pub(crate) use super::host_logs::fuzzing::{byte_range, node_log_query};
pub(crate) use super::logs::fuzzing::pod_log_query;
pub(crate) use super::streaming::fuzzing::{
    spdy, spdy_headers, stream_parameters, websocket, websocket_channels,
};
