//! Fuzz targets of the node's logs.

use super::files::{Asked, range};
use super::query::NodeLogQuery;

/// Reads a `Range` header. The first eight bytes are the length of the file, little endian.
///
/// Asserts that a part lies in the file and is not empty, and that the header of a part reads back as that part.
pub(crate) fn byte_range(data: &[u8]) {
    let Some((length, header)) = data.split_first_chunk() else {
        return;
    };
    let Ok(header) = std::str::from_utf8(header) else {
        return;
    };
    let length = u64::from_le_bytes(*length);
    if let Asked::Part(part) = range(header, length) {
        assert!(
            part.start < part.end && part.end <= length,
            "{part:?} of {length}"
        );
        let again = format!("bytes={}-{}", part.start, part.end - 1);
        assert_eq!(range(&again, length), Asked::Part(part));
    }
}

/// Reads a node log query.
///
/// Asserts that a query that is accepted names services or one file, keeps every limit, and passes to `journalctl`
/// no service that it would take for an option's value or a path.
pub(crate) fn node_log_query(data: &[u8]) {
    let Ok(query) = std::str::from_utf8(data) else {
        return;
    };
    let Ok(Some(parsed)) = NodeLogQuery::parse(query) else {
        return;
    };
    if let Err(problems) = parsed.validate() {
        assert!(!problems.to_string().is_empty());
        return;
    }
    assert_ne!(parsed.file().is_some(), !parsed.services.is_empty());
    for service in &parsed.services {
        assert!(service.len() <= 256 && !service.contains(['/', '\\', ' ', '\0', '\n']));
    }
    let options = &parsed.options;
    assert!(
        options
            .tail
            .is_none_or(|lines| (0..=100_000).contains(&lines))
    );
    assert!(options.boot.is_none_or(|boot| boot <= 0));
}
