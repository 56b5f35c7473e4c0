//! `/metrics/resource`: CPU, memory and swap, as metrics-server reads them; upstream's `resourceMetricsCollector`.

use super::exposition::{Exposition, Kind};
use super::model::{ContainerUsage, PodUsage, Snapshot, Usage};

/// The families, in OpenMetrics. Each sample has the time at which it was read.
pub fn encode(snapshot: &Snapshot) -> String {
    let mut text = Exposition::default();
    containers(&mut text, snapshot);
    pods(&mut text, snapshot);
    node(&mut text, snapshot);
    let failed = if snapshot.failed { 1.0 } else { 0.0 };
    text.family(
        "resource_scrape_error",
        Kind::Gauge,
        "1 if there was an error while getting container metrics, 0 otherwise",
    )
    .sample(&[], failed);
    text.finish()
}

/// Name of a figure, its kind, its help text, and its value.
type Figure = (&'static str, Kind, &'static str, fn(&Usage) -> Option<f64>);

const CPU: &str = "cpu_usage_seconds";
const MEMORY: &str = "memory_working_set_bytes";
const SWAP: &str = "swap_usage_bytes";

fn cpu(usage: &Usage) -> Option<f64> {
    usage.cpu.as_ref().map(|cpu| seconds_of_ns(cpu.total_ns))
}

fn memory(usage: &Usage) -> Option<f64> {
    usage.memory.as_ref()?.working_set.map(number)
}

fn swap(usage: &Usage) -> Option<f64> {
    usage.swap.map(|swap| number(swap.usage))
}

/// Seconds of nanoseconds.
pub(super) fn seconds_of_ns(ns: u64) -> f64 {
    number(ns) / 1e9
}

/// As metrics have numbers.
#[expect(
    clippy::cast_precision_loss,
    reason = "metrics are floating-point numbers"
)]
pub(super) fn number(n: u64) -> f64 {
    n as f64
}

/// Seconds of milliseconds since the Unix epoch.
#[expect(
    clippy::cast_precision_loss,
    reason = "metrics are floating-point numbers"
)]
pub(super) fn seconds_of_ms(ms: i64) -> f64 {
    ms as f64 / 1e3
}

fn all_containers(snapshot: &Snapshot) -> impl Iterator<Item = (&PodUsage, &ContainerUsage)> {
    snapshot
        .pods
        .iter()
        .flat_map(|pod| pod.containers.iter().map(move |c| (pod, c)))
}

fn containers(text: &mut Exposition, snapshot: &Snapshot) {
    const FIGURES: [Figure; 3] = [
        (
            CPU,
            Kind::Counter,
            "Cumulative cpu time consumed by the container in core-seconds",
            cpu,
        ),
        (
            MEMORY,
            Kind::Gauge,
            "Current working set of the container in bytes",
            memory,
        ),
        (
            SWAP,
            Kind::Gauge,
            "Current amount of the container swap usage in bytes. Reported only on non-windows systems",
            swap,
        ),
    ];
    for (name, kind, help, figure) in FIGURES {
        let name = format!("container_{name}");
        let mut family = text.family(&name, kind, help);
        for (pod, container) in all_containers(snapshot) {
            if let Some(value) = figure(&container.usage) {
                family.sample_at(&labels(pod, container), value, Some(container.usage.at_ms));
            }
        }
    }
    let mut family = text.family(
        "container_swap_limit_bytes",
        Kind::Gauge,
        "Current amount of the container swap limit in bytes. Reported only on non-windows systems",
    );
    for (pod, container) in all_containers(snapshot) {
        if let Some(limit) = container.usage.swap.and_then(|swap| swap.limit) {
            let at = Some(container.usage.at_ms);
            family.sample_at(&labels(pod, container), number(limit), at);
        }
    }
    let mut family = text.family(
        "container_start_time_seconds",
        Kind::Gauge,
        "Start time of the container since unix epoch in seconds",
    );
    for (pod, container) in all_containers(snapshot) {
        let started = seconds_of_ms(container.start_ms);
        family.sample_at(
            &labels(pod, container),
            started,
            Some(container.usage.at_ms),
        );
    }
}

fn labels<'a>(pod: &'a PodUsage, container: &'a ContainerUsage) -> [(&'static str, &'a str); 3] {
    [
        ("container", &container.name),
        ("namespace", &pod.namespace),
        ("pod", &pod.name),
    ]
}

fn pods(text: &mut Exposition, snapshot: &Snapshot) {
    const FIGURES: [Figure; 3] = [
        (
            CPU,
            Kind::Counter,
            "Cumulative cpu time consumed by the pod in core-seconds",
            cpu,
        ),
        (
            MEMORY,
            Kind::Gauge,
            "Current working set of the pod in bytes",
            memory,
        ),
        (
            SWAP,
            Kind::Gauge,
            "Current amount of the pod swap usage in bytes. Reported only on non-windows systems",
            swap,
        ),
    ];
    for (name, kind, help, figure) in FIGURES {
        let name = format!("pod_{name}");
        let mut family = text.family(&name, kind, help);
        for pod in &snapshot.pods {
            if let Some(value) = figure(&pod.usage) {
                let labels = [("namespace", &*pod.namespace), ("pod", &pod.name)];
                family.sample_at(&labels, value, Some(pod.usage.at_ms));
            }
        }
    }
}

fn node(text: &mut Exposition, snapshot: &Snapshot) {
    const FIGURES: [Figure; 3] = [
        (
            CPU,
            Kind::Counter,
            "Cumulative cpu time consumed by the node in core-seconds",
            cpu,
        ),
        (
            MEMORY,
            Kind::Gauge,
            "Current working set of the node in bytes",
            memory,
        ),
        (
            SWAP,
            Kind::Gauge,
            "Current swap usage of the node in bytes. Reported only on non-windows systems",
            swap,
        ),
    ];
    let usage = &snapshot.node.usage;
    for (name, kind, help, figure) in FIGURES {
        let name = format!("node_{name}");
        let mut family = text.family(&name, kind, help);
        if let Some(value) = figure(usage) {
            family.sample_at(&[], value, Some(usage.at_ms));
        }
    }
}
