//! Fuzz targets of the kernel's files.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a fuzz target fails by panicking"
)]

use std::fs;
use std::path::Path;

use super::cgroup::{Hierarchies, psi};
use super::model::Usage;
use super::proc::{Proc, net_dev};

/// Files of a cgroup, of either version.
const CGROUP: [&str; 28] = [
    "cgroup.procs",
    "cpu.stat",
    "cpu.max",
    "cpu.weight",
    "cpu.pressure",
    "memory.current",
    "memory.stat",
    "memory.max",
    "memory.peak",
    "memory.events",
    "memory.pressure",
    "memory.swap.current",
    "memory.swap.max",
    "io.pressure",
    "pids.current",
    "pids.max",
    "cpuacct.usage",
    "cpuacct.stat",
    "cpu.shares",
    "cpu.cfs_quota_us",
    "cpu.cfs_period_us",
    "memory.usage_in_bytes",
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    "memory.max_usage_in_bytes",
    "memory.failcnt",
    "memory.oom_control",
    "memory.use_hierarchy",
];
/// Files below `/proc`.
const PROC: [&str; 14] = [
    "meminfo",
    "stat",
    "vmstat",
    "loadavg",
    "sys/kernel/pid_max",
    "sys/kernel/threads-max",
    "pressure/cpu",
    "pressure/memory",
    "pressure/io",
    "7/stat",
    "7/cgroup",
    "7/net/dev",
    "7/net/route",
    "self/limits",
];

/// Reads the files of a cgroup. The input is a list of them: number, length (16 bits, little endian), content.
///
/// Asserts that the working set is no more than what is used, and that the figures can be printed.
pub(crate) fn cgroup_files(data: &[u8]) {
    let dir = directory(data, &CGROUP);
    for v2 in [true, false] {
        let all = ["cpu", "cpuacct", "memory", "pids"];
        let hierarchies = Hierarchies {
            v2,
            mounts: vec![(dir.path().to_owned(), all.map(str::to_owned).into())],
        };
        hierarchies.swap_of_root();
        assert!(hierarchies.processes("/").iter().all(|pid| *pid != 0));
        for full in [false, true] {
            if let Some(usage) = hierarchies.read("/", 1, full) {
                check(&usage);
            }
        }
    }
}

/// Reads files below `/proc`. The input is as that of [`cgroup_files`].
///
/// Asserts that the working set is no more than what is used.
pub(crate) fn proc_files(data: &[u8]) {
    let dir = directory(data, &PROC);
    let proc = Proc(dir.path().to_owned());
    if let Some(machine) = proc.machine(1, true) {
        check(&machine.usage);
    }
    if let Some(process) = proc.process(7) {
        check(&process.usage(1));
    }
    proc.network(7);
    proc.default_interface(7);
    for controller in [None, Some("memory")] {
        proc.cgroup(7, controller);
    }
    proc.own_descriptors();
    if let Ok(text) = std::str::from_utf8(data) {
        psi(text);
        net_dev(text);
    }
}

fn check(usage: &Usage) {
    if let Some(memory) = &usage.memory
        && let (Some(working_set), Some(all)) = (memory.working_set, memory.usage)
    {
        assert!(working_set <= all);
    }
}

fn directory(mut data: &[u8], names: &[&str]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    while let [number, a, b, rest @ ..] = data {
        let length = usize::from(u16::from_le_bytes([*a, *b]));
        let (content, rest) = rest.split_at(length.min(rest.len()));
        data = rest;
        let path = dir.path().join(names[usize::from(*number) % names.len()]);
        fs::create_dir_all(path.parent().unwrap_or(Path::new("/"))).unwrap();
        fs::write(path, content).unwrap();
    }
    dir
}
