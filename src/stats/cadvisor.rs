//! `/metrics/cadvisor`: cgroups by cAdvisor's names and labels, as far as they have figures.
//!
//! Of a pod there are three kinds of series: its cgroup (`container` and `name` empty), its sandbox, which has the network
//! (`container` empty), and its containers. The machine is `id="/"`.

mod disks;

use super::exposition::{Exposition, Kind};
use super::model::{Interface, PodUsage, Psi, Snapshot, Traffic, Usage};
use super::resource::{number, seconds_of_ms, seconds_of_ns};
use super::storage::{ContainerStorage, Storage};
use crate::nodestatus;

/// Facts that stay the same while the machine runs.
#[derive(Clone, Debug, Default)]
pub struct MachineFacts {
    /// `/proc/sys/kernel/random/boot_id`.
    pub boot_id: String,
    /// `/etc/machine-id`.
    pub machine_id: String,
    /// The firmware's.
    pub system_uuid: String,
    /// Release of the kernel.
    pub kernel_version: String,
    /// Name of the operating system.
    pub os_version: String,
}

impl MachineFacts {
    /// Those of this machine. Blocking, for some small files.
    pub fn read() -> Self {
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        let identity = nodestatus::identity();
        Self {
            boot_id: boot_id.unwrap_or_default().trim().to_owned(),
            machine_id: identity.machine_id,
            system_uuid: identity.system_uuid,
            kernel_version: identity.kernel_version,
            os_version: identity.os_image,
        }
    }
}

/// One cgroup with its labels.
struct Series<'a> {
    labels: [(&'static str, &'a str); 6],
    usage: &'a Usage,
    start_ms: i64,
    storage: Option<&'a ContainerStorage>,
    /// A container, which has limits of its own.
    is_container: bool,
}

/// The families, in OpenMetrics. Samples of cgroups have the time at which they were read.
pub fn encode(snapshot: &Snapshot, machine: &MachineFacts) -> String {
    let storage = snapshot.storage.as_deref();
    let series = all_series(snapshot, storage);
    let mut text = Exposition::default();
    text.family(
        "cadvisor_version_info",
        Kind::Gauge,
        "A metric with a constant '1' value labeled by kernel version, OS version, docker version, cadvisor version & cadvisor revision.",
    )
    .sample(
        &[
            ("cadvisorRevision", ""),
            ("cadvisorVersion", ""),
            ("dockerVersion", ""),
            ("kernelVersion", &machine.kernel_version),
            ("osVersion", &machine.os_version),
        ],
        1.0,
    );
    figures(&mut text, &series);
    cpu_total(&mut text, &series);
    failures(&mut text, &series);
    tasks(&mut text, &series);
    disks::space(&mut text, &series, storage);
    disks::traffic(&mut text, &series, &snapshot.devices);
    network(&mut text, snapshot);
    text.family(
        "container_scrape_error",
        Kind::Gauge,
        "1 if there was an error while getting container metrics, 0 otherwise",
    )
    .sample(&[], if snapshot.failed { 1.0 } else { 0.0 });
    of_machine(&mut text, snapshot, machine);
    text.finish()
}

fn labels<'a>(
    container: &'a str,
    id: &'a str,
    image: &'a str,
    name: &'a str,
    namespace: &'a str,
    pod: &'a str,
) -> [(&'static str, &'a str); 6] {
    [
        ("container", container),
        ("id", id),
        ("image", image),
        ("name", name),
        ("namespace", namespace),
        ("pod", pod),
    ]
}

fn all_series<'a>(snapshot: &'a Snapshot, storage: Option<&'a Storage>) -> Vec<Series<'a>> {
    let node = &snapshot.node;
    let mut series = vec![Series {
        labels: labels("", "/", "", "", "", ""),
        usage: &node.usage,
        start_ms: node.boot_ms,
        storage: None,
        is_container: false,
    }];
    for part in node.system.iter().filter(|part| !part.cgroup.is_empty()) {
        series.push(Series {
            labels: labels("", &part.cgroup, "", "", "", ""),
            usage: &part.usage,
            start_ms: part.start_ms,
            storage: None,
            is_container: false,
        });
    }
    for pod in &snapshot.pods {
        if !pod.cgroup.is_empty() {
            series.push(Series {
                labels: labels("", &pod.cgroup, "", "", &pod.namespace, &pod.name),
                usage: &pod.usage,
                start_ms: pod.start_ms,
                storage: None,
                is_container: false,
            });
        }
        for container in &pod.containers {
            let id = match container.cgroup.as_str() {
                "" => container.id.as_str(),
                cgroup => cgroup,
            };
            series.push(Series {
                labels: labels(
                    &container.name,
                    id,
                    &container.image,
                    container.id.as_str(),
                    &pod.namespace,
                    &pod.name,
                ),
                usage: &container.usage,
                start_ms: container.start_ms,
                storage: storage.and_then(|s| s.containers.get(&container.id)),
                is_container: true,
            });
        }
    }
    series
}

type Figure = (
    &'static str,
    Kind,
    &'static str,
    fn(&Series<'_>) -> Option<f64>,
);

/// Families with one sample per cgroup and no labels of their own.
const FIGURES: &[Figure] = &[
    (
        "container_cpu_user_seconds",
        Kind::Counter,
        "Cumulative user cpu time consumed in seconds.",
        |s| s.usage.cpu.as_ref()?.user_ns.map(seconds_of_ns),
    ),
    (
        "container_cpu_system_seconds",
        Kind::Counter,
        "Cumulative system cpu time consumed in seconds.",
        |s| s.usage.cpu.as_ref()?.system_ns.map(seconds_of_ns),
    ),
    (
        "container_cpu_cfs_periods",
        Kind::Counter,
        "Number of elapsed enforcement period intervals.",
        |s| Some(number(s.usage.cpu.as_ref()?.throttling?.periods)),
    ),
    (
        "container_cpu_cfs_throttled_periods",
        Kind::Counter,
        "Number of throttled period intervals.",
        |s| Some(number(s.usage.cpu.as_ref()?.throttling?.throttled)),
    ),
    (
        "container_cpu_cfs_throttled_seconds",
        Kind::Counter,
        "Total time duration the container has been throttled.",
        |s| {
            Some(seconds_of_ns(
                s.usage.cpu.as_ref()?.throttling?.throttled_ns,
            ))
        },
    ),
    (
        "container_memory_usage_bytes",
        Kind::Gauge,
        "Current memory usage in bytes, including all memory regardless of when it was accessed",
        |s| s.usage.memory.as_ref()?.usage.map(number),
    ),
    (
        "container_memory_working_set_bytes",
        Kind::Gauge,
        "Current working set in bytes.",
        |s| s.usage.memory.as_ref()?.working_set.map(number),
    ),
    (
        "container_memory_rss",
        Kind::Gauge,
        "Size of RSS in bytes.",
        |s| s.usage.memory.as_ref()?.rss.map(number),
    ),
    (
        "container_memory_cache",
        Kind::Gauge,
        "Number of bytes of page cache memory.",
        |s| s.usage.memory.as_ref()?.cache.map(number),
    ),
    (
        "container_memory_mapped_file",
        Kind::Gauge,
        "Size of memory mapped files in bytes.",
        |s| s.usage.memory.as_ref()?.mapped_file.map(number),
    ),
    (
        "container_memory_kernel_usage",
        Kind::Gauge,
        "Size of kernel memory allocated in bytes.",
        |s| s.usage.memory.as_ref()?.kernel.map(number),
    ),
    (
        "container_memory_max_usage_bytes",
        Kind::Gauge,
        "Maximum memory usage recorded in bytes",
        |s| s.usage.memory.as_ref()?.max_usage.map(number),
    ),
    (
        "container_memory_swap",
        Kind::Gauge,
        "Container swap usage in bytes.",
        |s| s.usage.swap.map(|swap| number(swap.usage)),
    ),
    (
        "container_memory_failcnt",
        Kind::Unknown,
        "Number of memory usage hits limits",
        |s| s.usage.memory.as_ref()?.failcnt.map(number),
    ),
    (
        "container_oom_events",
        Kind::Counter,
        "Count of out of memory events observed for the container",
        |s| s.usage.memory.as_ref()?.oom_kills.map(number),
    ),
    (
        "container_processes",
        Kind::Gauge,
        "Number of processes running inside the container.",
        |s| s.usage.processes.map(number),
    ),
    (
        "container_file_descriptors",
        Kind::Gauge,
        "Files that processes of the container hold open",
        |s| Some(number(s.usage.descriptors?.open)),
    ),
    (
        "container_sockets",
        Kind::Gauge,
        "Sockets that processes of the container hold open",
        |s| s.usage.descriptors?.sockets.map(number),
    ),
    (
        "container_threads",
        Kind::Gauge,
        "Number of threads running inside the container",
        |s| s.usage.threads.map(number),
    ),
    (
        "container_threads_max",
        Kind::Gauge,
        "Maximum number of threads allowed inside the container, infinity if value is zero",
        |s| {
            s.usage.threads?;
            Some(number(s.usage.threads_max.unwrap_or(0)))
        },
    ),
    (
        "container_spec_cpu_period",
        Kind::Gauge,
        "CPU period of the container.",
        |s| s.usage.limits.cpu_period_us.map(number),
    ),
    (
        "container_spec_cpu_quota",
        Kind::Gauge,
        "CPU quota of the container.",
        |s| s.usage.limits.cpu_quota_us.map(number),
    ),
    (
        "container_spec_cpu_shares",
        Kind::Gauge,
        "CPU share of the container.",
        |s| s.usage.limits.cpu_shares.map(number),
    ),
    (
        "container_spec_memory_limit_bytes",
        Kind::Gauge,
        "Memory limit for the container.",
        |s| {
            s.usage.memory.as_ref()?;
            Some(number(s.usage.limits.memory.unwrap_or(0)))
        },
    ),
    (
        "container_spec_memory_swap_limit_bytes",
        Kind::Gauge,
        "Memory swap limit for the container.",
        |s| Some(number(s.usage.swap?.limit.unwrap_or(0))),
    ),
    (
        "container_start_time_seconds",
        Kind::Gauge,
        "Start time of the container since unix epoch in seconds.",
        |s| Some(seconds_of_ms(s.start_ms)),
    ),
    (
        "container_last_seen",
        Kind::Gauge,
        "Last time a container was seen by the exporter",
        |s| Some(seconds_of_ms(s.usage.at_ms).floor()),
    ),
    (
        "container_pressure_cpu_waiting_seconds",
        Kind::Counter,
        "Total time duration tasks in the container have waited due to CPU congestion.",
        |s| waiting(s.usage.pressure.cpu),
    ),
    (
        "container_pressure_cpu_stalled_seconds",
        Kind::Counter,
        "Total time duration no tasks in the container could make progress due to CPU congestion.",
        |s| stalled(s.usage.pressure.cpu),
    ),
    (
        "container_pressure_memory_waiting_seconds",
        Kind::Counter,
        "Total time duration tasks in the container have waited due to memory congestion.",
        |s| waiting(s.usage.pressure.memory),
    ),
    (
        "container_pressure_memory_stalled_seconds",
        Kind::Counter,
        "Total time duration no tasks in the container could make progress due to memory congestion.",
        |s| stalled(s.usage.pressure.memory),
    ),
    (
        "container_pressure_io_waiting_seconds",
        Kind::Counter,
        "Total time duration tasks in the container have waited due to IO congestion.",
        |s| waiting(s.usage.pressure.io),
    ),
    (
        "container_pressure_io_stalled_seconds",
        Kind::Counter,
        "Total time duration no tasks in the container could make progress due to IO congestion.",
        |s| stalled(s.usage.pressure.io),
    ),
];

fn waiting(psi: Option<Psi>) -> Option<f64> {
    Some(number(psi?.some.total_us) / 1e6)
}

fn stalled(psi: Option<Psi>) -> Option<f64> {
    Some(number(psi?.full.total_us) / 1e6)
}

fn figures(text: &mut Exposition, series: &[Series<'_>]) {
    for (name, kind, help, figure) in FIGURES {
        let mut family = text.family(name, *kind, help);
        for of in series {
            if let Some(value) = figure(of) {
                family.sample_at(&of.labels, value, Some(of.usage.at_ms));
            }
        }
    }
}

/// The labels of `series` and more, in the order of their names.
fn with<'a>(
    series: &[(&'static str, &'a str)],
    more: &[(&'static str, &'a str)],
) -> Vec<(&'static str, &'a str)> {
    let mut all: Vec<_> = series.iter().chain(more).copied().collect();
    all.sort_unstable();
    all
}

fn cpu_total(text: &mut Exposition, series: &[Series<'_>]) {
    let mut family = text.family(
        "container_cpu_usage_seconds",
        Kind::Counter,
        "Cumulative cpu time consumed in seconds.",
    );
    for of in series {
        if let Some(cpu) = &of.usage.cpu {
            let labels = with(&of.labels, &[("cpu", "total")]);
            family.sample_at(&labels, seconds_of_ns(cpu.total_ns), Some(of.usage.at_ms));
        }
    }
}

fn failures(text: &mut Exposition, series: &[Series<'_>]) {
    let mut family = text.family(
        "container_memory_failures",
        Kind::Counter,
        "Cumulative count of memory allocation failures.",
    );
    for of in series {
        let Some(memory) = &of.usage.memory else {
            continue;
        };
        for (kind, count) in [
            ("pgfault", memory.page_faults),
            ("pgmajfault", memory.major_page_faults),
        ] {
            let Some(count) = count else { continue };
            let more = [("failure_type", kind), ("scope", "hierarchy")];
            family.sample_at(
                &with(&of.labels, &more),
                number(count),
                Some(of.usage.at_ms),
            );
        }
    }
}

/// Zeros, as in every kubelet: cAdvisor counts tasks by state with its load reader only, which kubelets leave off.
fn tasks(text: &mut Exposition, series: &[Series<'_>]) {
    const STATES: [&str; 5] = [
        "sleeping",
        "running",
        "stopped",
        "uninterruptible",
        "iowaiting",
    ];
    let help = "Tasks by state; always 0, since a kubelet does not count them";
    let mut family = text.family("container_tasks_state", Kind::Gauge, help);
    for of in series.iter().filter(|of| of.is_container) {
        for state in STATES {
            let labels = with(&of.labels, &[("state", state)]);
            family.sample_at(&labels, 0.0, Some(of.usage.at_ms));
        }
    }
}

/// Interfaces of one network namespace.
struct Namespace<'a> {
    labels: [(&'static str, &'a str); 6],
    interfaces: &'a [Interface],
    at_ms: i64,
}

fn network(text: &mut Exposition, snapshot: &Snapshot) {
    let sandbox_of = |pod: &'_ PodUsage| pod.sandbox.as_ref().map(ToString::to_string);
    let sandboxes: Vec<String> = (snapshot.pods.iter())
        .map(|pod| sandbox_of(pod).unwrap_or_default())
        .collect();
    let ids: Vec<String> = (snapshot.pods.iter().zip(&sandboxes))
        .map(|(pod, sandbox)| match pod.cgroup.as_str() {
            "" => sandbox.clone(),
            cgroup => format!("{cgroup}/{sandbox}"),
        })
        .collect();
    let node = &snapshot.node;
    let mut all = vec![Namespace {
        labels: labels("", "/", "", "", "", ""),
        interfaces: &node.network,
        at_ms: node.usage.at_ms,
    }];
    for ((pod, id), sandbox) in snapshot.pods.iter().zip(&ids).zip(&sandboxes) {
        all.push(Namespace {
            labels: labels("", id, "", sandbox, &pod.namespace, &pod.name),
            interfaces: &pod.network,
            at_ms: pod.usage.at_ms,
        });
    }
    type Read = (&'static str, &'static str, fn(&Traffic) -> u64);
    const READS: [Read; 4] = [
        ("bytes", "Cumulative count of bytes", |t| t.bytes),
        ("packets", "Cumulative count of packets", |t| t.packets),
        (
            "errors",
            "Cumulative count of errors while packets were",
            |t| t.errors,
        ),
        (
            "packets_dropped",
            "Cumulative count of packets dropped while being",
            |t| t.dropped,
        ),
    ];
    type Way = (&'static str, &'static str, fn(&Interface) -> &Traffic);
    const WAYS: [Way; 2] = [
        ("receive", "received", |i| &i.rx),
        ("transmit", "transmitted", |i| &i.tx),
    ];
    for (way, done, traffic) in WAYS {
        for (what, help, read) in READS {
            let name = format!("container_network_{way}_{what}");
            let help = format!("{help} {done}");
            let mut family = text.family(&name, Kind::Counter, &help);
            for of in &all {
                for interface in of.interfaces {
                    let labels = with(&of.labels, &[("interface", &interface.name)]);
                    let value = number(read(traffic(interface)));
                    family.sample_at(&labels, value, Some(of.at_ms));
                }
            }
        }
    }
}

fn of_machine(text: &mut Exposition, snapshot: &Snapshot, machine: &MachineFacts) {
    let node = &snapshot.node;
    let labels = [
        ("boot_id", machine.boot_id.as_str()),
        ("machine_id", &machine.machine_id),
        ("system_uuid", &machine.system_uuid),
    ];
    for (name, help, value) in [
        (
            "machine_cpu_cores",
            "Number of logical CPU cores.",
            node.cpus,
        ),
        (
            "machine_memory_bytes",
            "Amount of memory installed on the machine.",
            node.memory_capacity,
        ),
        (
            "machine_swap_bytes",
            "Amount of swap memory available on the machine.",
            node.swap_capacity,
        ),
    ] {
        text.family(name, Kind::Gauge, help)
            .sample(&labels, number(value));
    }
}
