//! What assertions look at.

use std::fs;
use std::time::Duration;

use crate::agent_process::eventually;
use crate::setup::Cluster;

/// Lines a container wrote, of all its runs that are kept.
pub fn logs(cluster: &Cluster, pod: &str, container: &str) -> Vec<String> {
    let prefix = format!("{}_{pod}_", cluster.namespace);
    let dirs = fs::read_dir(cluster.pod_logs()).into_iter().flatten();
    let mut files = Vec::new();
    for dir in dirs.flatten() {
        if dir.file_name().to_string_lossy().starts_with(&prefix) {
            let runs = fs::read_dir(dir.path().join(container));
            files.extend(runs.into_iter().flatten().flatten().map(|f| f.path()));
        }
    }
    files.sort();
    let texts = files.iter().map(fs::read_to_string);
    let texts: Vec<String> = texts.map(Result::unwrap_or_default).collect();
    let lines = texts.iter().flat_map(|text| text.lines());
    lines
        .map(|line| line.splitn(4, ' ').nth(3).unwrap_or_default().to_owned())
        .collect()
}

/// Waits until the log of a container has all of these, each within a line.
#[track_caller]
pub fn said(cluster: &Cluster, pod: &str, container: &str, parts: &[&str]) {
    eventually(&format!("{container} of {pod} says {parts:?}"), || {
        let lines = logs(cluster, pod, container);
        let has = |part: &&str| lines.iter().any(|line| line.contains(part));
        let missing: Vec<_> = parts.iter().filter(|part| !has(part)).collect();
        if missing.is_empty() {
            Ok(())
        } else {
            Err(format!("{missing:?} not in {lines:#?}"))
        }
    });
}

/// Deletes a pod and waits until it is gone.
#[track_caller]
pub fn deleted(cluster: &Cluster, pod: &str) {
    cluster.delete_pod(pod, 1);
    cluster.wait_gone(pod, Duration::from_secs(60));
}
