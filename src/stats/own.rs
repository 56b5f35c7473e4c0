//! `/metrics`: what the agent counts, and the figures of its process.

use std::fmt;

use super::claims::{self, RemoteUsage};
use super::exposition::{Exposition, Kind};
use super::features;
use super::proc::Proc;
use super::resource::{number, seconds_of_ms, seconds_of_ns};
use crate::types::Stamp;
use crate::types::metrics::Metrics;

/// The level of Kubernetes that the agent's behaviour follows.
const KUBERNETES: (&str, &str) = ("1", "36");

/// The agent's metrics, in OpenMetrics. Reads some files of `/proc`.
///
/// # Errors
/// Only when formatting into a string fails.
pub fn encode(metrics: &Metrics, now: Stamp) -> Result<String, fmt::Error> {
    encode_with(metrics, now, &[])
}

/// As [`encode`], with what volumes use that have claims.
///
/// # Errors
/// As [`encode`].
pub fn encode_with(
    metrics: &Metrics,
    now: Stamp,
    volumes: &[RemoteUsage],
) -> Result<String, fmt::Error> {
    let mut text = Exposition::default();
    text.append(&metrics.encode()?);
    build(&mut text);
    features::encode(&mut text);
    certificate(&mut text, metrics, now);
    process(&mut text, &Proc::default());
    claims::encode(&mut text, volumes);
    Ok(text.finish())
}

fn build(text: &mut Exposition) {
    let (major, minor) = KUBERNETES;
    let version = format!("v{major}.{minor}.0+holdfast-{}", env!("CARGO_PKG_VERSION"));
    let platform = format!("linux/{}", std::env::consts::ARCH);
    text.family(
        "kubernetes_build_info",
        Kind::Gauge,
        "A metric with a constant '1' value labeled by major, minor, git version, git commit, git tree state, build date, Go version, and compiler from which Kubernetes was built, and platform on which it is running",
    )
    .sample(
        &[
            ("build_date", ""),
            ("compiler", "rustc"),
            ("git_commit", ""),
            ("git_tree_state", ""),
            ("git_version", &version),
            ("go_version", ""),
            ("major", major),
            ("minor", minor),
            ("platform", &platform),
        ],
        1.0,
    );
}

fn certificate(text: &mut Exposition, metrics: &Metrics, now: Stamp) {
    let until = metrics.client_certificate_expiry.get();
    // Upstream's mark of a node without a certificate.
    let left = match until {
        0 => f64::INFINITY,
        until => seconds_of_ms(until.saturating_mul(1000).saturating_sub(now.wall_ms)),
    };
    text.family(
        "kubelet_certificate_manager_client_ttl_seconds",
        Kind::Gauge,
        "Gauge of the TTL (time-to-live) of the Kubelet's client certificate. The value is in seconds until certificate expiry (negative if already expired). If client certificate is invalid or unused, the value will be +INF.",
    )
    .sample(&[], left);
}

fn process(text: &mut Exposition, proc: &Proc) {
    let Some(process) = proc.process(std::process::id()) else {
        return;
    };
    let (user, system) = process.cpu_ns;
    text.family(
        "process_cpu_seconds",
        Kind::Counter,
        "Total user and system CPU time spent in seconds.",
    )
    .sample(&[], seconds_of_ns(user.saturating_add(system)));
    let descriptors = proc.own_descriptors();
    let gauges = [
        (
            "process_resident_memory_bytes",
            "Resident memory size in bytes.",
            Some(number(process.resident)),
        ),
        (
            "process_virtual_memory_bytes",
            "Virtual memory size in bytes.",
            Some(number(process.virtual_memory)),
        ),
        (
            "process_start_time_seconds",
            "Start time of the process since unix epoch in seconds.",
            Some(seconds_of_ms(process.start_ms)),
        ),
        (
            "process_open_fds",
            "Number of open file descriptors.",
            descriptors.map(|(open, _)| number(open)),
        ),
        (
            "process_max_fds",
            "Maximum number of open file descriptors.",
            descriptors.and_then(|(_, most)| most).map(number),
        ),
    ];
    for (name, help, value) in gauges {
        if let Some(value) = value {
            text.family(name, Kind::Gauge, help).sample(&[], value);
        }
    }
}
