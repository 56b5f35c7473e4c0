//! Fuzz target of the query for a container's log.

use super::query::parse;
use crate::container_logs::Streams;
use crate::types::{BootId, Stamp};

/// Reads a query. The first eight bytes are the time of the request in milliseconds, little endian.
///
/// Asserts that a query that is accepted keeps upstream's rules.
pub(crate) fn pod_log_query(data: &[u8]) {
    let Some((now, query)) = data.split_first_chunk() else {
        return;
    };
    let Ok(query) = std::str::from_utf8(query) else {
        return;
    };
    let wall_ms = i64::from_le_bytes(*now);
    let now = Stamp {
        boot: BootId(1),
        boottime_ms: wall_ms,
        wall_ms,
    };
    if let Ok(query) = parse(query, now) {
        let options = query.options;
        assert!(options.limit != Some(0));
        assert!(options.tail.is_none() || options.streams == Streams::All);
    }
}
