//! Fuzz target of the kernel's log.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a fuzz target fails by panicking"
)]

use super::{Parser, Scope, container_ids, record};

/// Reads each line as a record of the log.
///
/// Asserts that a kill is of the newest record, and that cgroups are absolute paths.
pub(crate) fn kernel_log(data: &[u8]) {
    let mut parser = Parser::default();
    for line in data.split(|byte| *byte == b'\n') {
        let Some(record) = record(line) else {
            continue;
        };
        let Some(kill) = parser.take(&record) else {
            continue;
        };
        assert_eq!(kill.sequence, record.sequence);
        assert!(record.of_kernel);
        let cgroup = kill.cgroup.unwrap_or_default();
        container_ids(&String::from_utf8_lossy(&cgroup)).count();
        if let Scope::Cgroup(Some(limited)) = kill.scope {
            assert!(limited.starts_with(b"/") && cgroup.starts_with(b"/"));
        }
    }
}
