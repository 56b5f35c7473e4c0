//! Layer 4: usage of node, pods and containers; upstream's stats providers and the parts of cAdvisor that they use.
//!
//! The input is the wanted pods, the recorded sandboxes and containers, cgroups, `/proc`, and the runtime for figures
//! that those do not have (writable layers, images, containers in machines of their own). The output is a [`Snapshot`],
//! which [`summary`], [`resource`] and [`cadvisor`] put into the shape of their endpoints; [`own`] has the agent's own
//! figures.
//!
//! **Invariant:** nothing is read without a request. A request within [`MAX_AGE`] of another gets the same result, and
//! of many requests at once one collects. Disks are measured at most once a minute (`storage`).
//!
//! **Invariant:** the runtime is not asked for figures of cgroups: a collection of CPU and memory costs no call.

pub mod cadvisor;
mod cgroup;
mod claims;
mod collect;
mod descriptors;
pub mod exposition;
mod features;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod memcg;
pub mod model;
pub mod own;
mod pressure;
mod proc;
pub mod resource;
mod storage;
pub mod summary;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use k8s_cri::v1;
use tokio::sync::Mutex;
use tokio::time::Instant;
use tracing::{debug, warn};

pub use self::cgroup::Hierarchies;
pub use self::claims::{RemoteUsage, RemoteVolumes, VolumesSlot};
pub use self::model::{Depth, Snapshot};
pub use self::pressure::NodeFigures;
pub use self::proc::Proc;
pub use self::storage::{ContainerStorage, Storage, VolumeUsage, Walked};

use self::claims::RemoteFigures;
use self::collect::{Sources, Subject};
use self::descriptors::Counts;
use self::model::{ContainerUsage, Cpu, Interface, Memory, Swap, Traffic, Usage};
use self::storage::{StorageCache, told};
use crate::cm::{CgroupConfig, CgroupDriver, CgroupManager, CgroupVersion};
use crate::core::state::PlegRecord;
use crate::kubeletconfig::{self, AgentConfig};
use crate::kuberuntime::cri::{CriClient, CriErrorKind};
use crate::pod_manager::PodManager;
use crate::store::Store;
use crate::types::runtime::ContainerState;
use crate::types::{Clock, ContainerId, PodUid, blocking};

/// Largest age of a collection that is returned again.
pub const MAX_AGE: Duration = Duration::from_secs(1);
/// Time limit of the runtime for figures that cgroups do not have; scrapes have 10 s as a rule.
const PATIENCE: Duration = Duration::from_secs(3);
/// Between two samples of which a rate is made.
const MIN_RATE_INTERVAL: Duration = Duration::from_millis(100);

/// Sources of the usage, and settings.
#[derive(Clone, Debug)]
pub struct StatsOptions {
    /// Name of the node.
    pub node_name: String,
    /// `--root-dir`.
    pub root_dir: PathBuf,
    /// Directory of the pods' logs.
    pub pod_logs_dir: PathBuf,
    /// The runtime's socket, whose other end is the runtime's process.
    pub runtime_socket: PathBuf,
    /// Configuration of cgroups.
    pub cgroups: CgroupConfig,
    /// `/proc`.
    pub proc: Proc,
    /// Mount points of cgroups; `None` finds them.
    pub hierarchies: Option<Hierarchies>,
}

impl StatsOptions {
    /// Those of an agent.
    pub fn of(config: &AgentConfig) -> Self {
        let kubelet = &config.kubelet;
        Self {
            node_name: config.node_name.clone(),
            root_dir: config.root_dir.clone(),
            pod_logs_dir: config.pod_logs_dir().to_path_buf(),
            runtime_socket: config.runtime_endpoint.path().to_path_buf(),
            cgroups: CgroupConfig {
                driver: match kubelet.cgroup_driver {
                    kubeletconfig::CgroupDriver::Cgroupfs => CgroupDriver::Cgroupfs,
                    kubeletconfig::CgroupDriver::Systemd => CgroupDriver::Systemd,
                },
                root: kubelet.cgroup_root.clone(),
                per_qos: kubelet.cgroups_per_qos,
                ..CgroupConfig::default()
            },
            proc: Proc::default(),
            hierarchies: None,
        }
    }
}

/// Collects. Cheap to clone; clones share what was collected.
#[derive(Clone)]
pub struct StatsProvider(Arc<Inner>);

struct Inner {
    options: StatsOptions,
    store: Store,
    pods: PodManager,
    cri: CriClient,
    clock: Arc<dyn Clock>,
    storage: StorageCache,
    remotes: OnceLock<RemoteFigures>,
    /// The runtime has no statistics of sandboxes.
    no_sandbox_stats: AtomicBool,
    state: Mutex<State>,
}

/// Held while one collects and the others wait.
#[derive(Default)]
struct State {
    sources: Option<Arc<Sources>>,
    last: Option<(Instant, Depth, Arc<Snapshot>)>,
    rates: Rates,
}

impl StatsProvider {
    /// A provider that has read nothing yet.
    pub fn new(
        options: StatsOptions,
        store: Store,
        pods: PodManager,
        cri: CriClient,
        clock: Arc<dyn Clock>,
    ) -> Self {
        Self(Arc::new(Inner {
            options,
            store,
            pods,
            storage: StorageCache::new(cri.clone()),
            remotes: OnceLock::new(),
            cri,
            clock,
            no_sandbox_stats: AtomicBool::new(false),
            state: Mutex::default(),
        }))
    }

    /// With the usage of remote volumes.
    #[must_use]
    pub fn with_volumes(self, volumes: Arc<dyn RemoteVolumes>) -> Self {
        let figures = RemoteFigures::new(volumes, Arc::clone(&self.0.clock));
        // The first ones stay.
        drop(self.0.remotes.set(figures));
        self
    }

    /// Returns the usage of remote volumes, as of the last minute. A volume that does not answer soon has its last
    /// usage. Cancel-safe.
    pub async fn remote_volumes(&self) -> Vec<RemoteUsage> {
        match self.0.remotes.get() {
            Some(figures) => figures.get().await,
            None => Vec::new(),
        }
    }

    /// Returns the usage now, or of up to [`MAX_AGE`] ago. Unreadable parts are left out and counted in
    /// [`Snapshot::failed`]. When the future is dropped, the next waiting caller collects.
    pub async fn snapshot(&self, depth: Depth) -> Arc<Snapshot> {
        let mut state = self.0.state.lock().await;
        if let Some((at, known, snapshot)) = &state.last
            && *known >= depth
            && at.elapsed() < MAX_AGE
        {
            return Arc::clone(snapshot);
        }
        let snapshot = Arc::new(self.collect(&mut state, depth).await);
        state.last = Some((Instant::now(), depth, Arc::clone(&snapshot)));
        snapshot
    }

    async fn collect(&self, state: &mut State, depth: Depth) -> Snapshot {
        let this = &self.0;
        let sources = self.sources(state).await;
        let subjects = self.subjects();
        let clock = Arc::clone(&this.clock);
        // When it is its turn: rates are made of these times, here and by who scrapes.
        let read = blocking::run(move || {
            let (at_ms, at) = (clock.now().wall_ms, Instant::now());
            (sources.read(subjects, at_ms, depth), at_ms, at)
        });
        let (mut snapshot, at_ms, at) = read.await.unwrap_or_else(|error| {
            warn!(%error, "cannot read usage of the node");
            let failed = Snapshot {
                failed: true,
                ..Snapshot::default()
            };
            (failed, this.clock.now().wall_ms, Instant::now())
        });
        snapshot.at_ms = at_ms;
        self.ask_runtime(&mut snapshot, depth).await;
        state.rates.apply(&mut snapshot, at);
        if depth == Depth::Full {
            let wanted = || self.disks_of(&snapshot);
            (snapshot.storage, snapshot.remotes) =
                tokio::join!(this.storage.get(at_ms, wanted), self.remote_volumes());
        }
        snapshot
    }

    /// Returns the sources to read from; found once, and again as long as there are no cgroups.
    async fn sources(&self, state: &mut State) -> Arc<Sources> {
        if let Some(sources) = &state.sources {
            return Arc::clone(sources);
        }
        let options = self.0.options.clone();
        let found = blocking::run(move || {
            let manager = CgroupManager::detect(options.cgroups.clone());
            if let Err(error) = &manager {
                debug!(%error, "there are no cgroups to read");
            }
            let manager = manager.ok();
            let known = options.hierarchies.clone();
            Sources {
                hierarchies: known.unwrap_or_else(|| hierarchies(manager.as_ref())),
                manager,
                options,
                descriptors: Counts::default(),
            }
        });
        let found = found.await.map(Arc::new);
        match found {
            Ok(found) => {
                if found.manager.is_some() {
                    state.sources = Some(Arc::clone(&found));
                }
                found
            }
            Err(_) => Arc::new(Sources {
                hierarchies: Hierarchies::default(),
                manager: None,
                options: self.0.options.clone(),
                descriptors: Counts::default(),
            }),
        }
    }

    /// Returns the pods of which something runs, as the last list of the runtime shows them.
    fn subjects(&self) -> Vec<Subject> {
        let state = self.0.store.snapshot();
        let mut subjects = Vec::new();
        for (_, record) in state.with_prefix::<PlegRecord>("") {
            let status = &record.status;
            let running: Vec<_> = (status.containers.iter())
                .filter(|c| c.state == ContainerState::Running)
                .cloned()
                .collect();
            let sandbox = status.ready_sandbox().cloned();
            if running.is_empty() && sandbox.is_none() {
                continue;
            }
            subjects.push(Subject {
                pod: self.0.pods.get(&status.uid),
                uid: status.uid.clone(),
                name: status.name.clone(),
                namespace: status.namespace.clone(),
                sandbox,
                running,
            });
        }
        subjects
            .sort_by(|a, b| (&a.namespace, &a.name, &a.uid).cmp(&(&b.namespace, &b.name, &b.uid)));
        subjects
    }

    fn disks_of(&self, snapshot: &Snapshot) -> Vec<storage::Wanted> {
        let options = &self.0.options;
        let wanted = |pod: &model::PodUsage| {
            let logs = format!("{}_{}_{}", pod.namespace, pod.name, pod.uid);
            let containers = pod.containers.iter();
            storage::Wanted {
                uid: pod.uid.clone(),
                pod: pod.pod.clone(),
                logs: options.pod_logs_dir.join(logs),
                volumes: (options.root_dir.join("pods"))
                    .join(pod.uid.as_str())
                    .join("volumes"),
                containers: containers.map(|c| (c.name.clone(), c.id.clone())).collect(),
            }
        };
        snapshot.pods.iter().map(wanted).collect()
    }

    /// Fills in the figures that cgroups and `/proc` do not have, as of containers in machines of their own.
    async fn ask_runtime(&self, snapshot: &mut Snapshot, depth: Depth) {
        let this = &self.0;
        let at_ms = snapshot.at_ms;
        let lacks = |c: &ContainerUsage| {
            c.usage.cpu.is_none() && c.usage.memory.is_none() || is_elsewhere(&c.usage)
        };
        if snapshot.pods.iter().flat_map(|p| &p.containers).any(lacks) {
            let stats = told(PATIENCE, this.cri.list_container_stats(None)).await;
            snapshot.failed |= stats.is_none();
            let stats = by_container(at_ms, stats.unwrap_or_default());
            for pod in &mut snapshot.pods {
                for container in pod.containers.iter_mut().filter(|c| lacks(c)) {
                    let told = stats.get(&container.id);
                    if let Some(usage) = told.filter(|u| u.cpu.is_some() || u.memory.is_some()) {
                        let limits = std::mem::take(&mut container.usage.limits);
                        container.usage = Usage {
                            limits,
                            ..usage.clone()
                        };
                    }
                }
            }
        }
        let silent = |p: &model::PodUsage| p.network.is_empty() && !p.host_network;
        if depth == Depth::Full
            && !this.no_sandbox_stats.load(Ordering::Relaxed)
            && snapshot.pods.iter().any(silent)
        {
            let call = async {
                let told = this.cri.list_pod_sandbox_stats(None).await;
                let never = matches!(&told, Err(e) if e.kind == CriErrorKind::Unimplemented);
                this.no_sandbox_stats.store(never, Ordering::Relaxed);
                told
            };
            let stats = by_pod(told(PATIENCE, call).await.unwrap_or_default());
            for pod in snapshot.pods.iter_mut().filter(|p| silent(p)) {
                pod.network = stats.get(&pod.uid).cloned().unwrap_or_default();
            }
        }
        for pod in &mut snapshot.pods {
            if pod.usage.cpu.is_none() && pod.usage.memory.is_none() {
                pod.usage = sum(at_ms, &pod.containers);
            }
        }
    }
}

/// Returns whether nothing has run in a container's cgroup: its processes are elsewhere, as with sandboxes that make a cgroup
/// for a container and run it inside of another one. Upstream: `isContainerTerminated`.
fn is_elsewhere(usage: &Usage) -> bool {
    let is_idle = usage.cpu.as_ref().is_some_and(|cpu| cpu.total_ns == 0);
    let rss = usage.memory.as_ref().map(|memory| memory.rss.unwrap_or(0));
    usage.processes.unwrap_or(0) == 0 && is_idle && rss.unwrap_or(0) == 0
}

fn hierarchies(manager: Option<&CgroupManager>) -> Hierarchies {
    let Some(manager) = manager else {
        return Hierarchies::default();
    };
    let mounts = manager.describe().into_iter();
    Hierarchies {
        v2: manager.version() == CgroupVersion::V2,
        mounts: mounts
            .map(|(path, controllers)| (path, controllers.into_iter().collect()))
            .collect(),
    }
}

/// A pod without a cgroup of its own uses what its containers do.
fn sum(at_ms: i64, containers: &[ContainerUsage]) -> Usage {
    let mut usage = Usage {
        at_ms,
        ..Usage::default()
    };
    let add = |to: &mut Option<u64>, more: Option<u64>| {
        if let Some(more) = more {
            *to = Some(to.unwrap_or(0).saturating_add(more));
        }
    };
    for of in containers.iter().map(|c| &c.usage) {
        if let Some(cpu) = &of.cpu {
            let sum = usage.cpu.get_or_insert_default();
            sum.total_ns = sum.total_ns.saturating_add(cpu.total_ns);
            add(&mut sum.nano_cores, cpu.nano_cores);
        }
        if let Some(memory) = &of.memory {
            let sum = usage.memory.get_or_insert_default();
            add(&mut sum.usage, memory.usage);
            add(&mut sum.working_set, memory.working_set);
            add(&mut sum.rss, memory.rss);
            add(&mut sum.page_faults, memory.page_faults);
            add(&mut sum.major_page_faults, memory.major_page_faults);
        }
        if let Some(swap) = &of.swap {
            let sum = usage.swap.get_or_insert_default();
            sum.usage = sum.usage.saturating_add(swap.usage);
        }
    }
    usage
}

/// The runtime's figures of containers.
fn by_container(at_ms: i64, stats: Vec<v1::ContainerStats>) -> HashMap<ContainerId, Usage> {
    let value = |n: Option<v1::UInt64Value>| n.map(|n| n.value);
    let of = |stats: v1::ContainerStats| {
        let id = ContainerId::from(stats.attributes?.id);
        let cpu = stats.cpu.and_then(|cpu| {
            Some(Cpu {
                total_ns: value(cpu.usage_core_nano_seconds)?,
                nano_cores: value(cpu.usage_nano_cores),
                ..Cpu::default()
            })
        });
        let memory = stats.memory.map(|memory| Memory {
            usage: value(memory.usage_bytes),
            working_set: value(memory.working_set_bytes),
            rss: value(memory.rss_bytes),
            page_faults: value(memory.page_faults),
            major_page_faults: value(memory.major_page_faults),
            ..Memory::default()
        });
        let swap = stats.swap.and_then(|swap| {
            let usage = value(swap.swap_usage_bytes)?;
            let left = value(swap.swap_available_bytes);
            Some(Swap {
                usage,
                limit: left.map(|left| left.saturating_add(usage)),
            })
        });
        let usage = Usage {
            at_ms,
            cpu,
            memory,
            swap,
            ..Usage::default()
        };
        Some((id, usage))
    };
    stats.into_iter().filter_map(of).collect()
}

/// The runtime's figures of the traffic of pods.
fn by_pod(stats: Vec<v1::PodSandboxStats>) -> HashMap<PodUid, Vec<Interface>> {
    let value = |n: Option<v1::UInt64Value>| n.map_or(0, |n| n.value);
    let interface = |of: v1::NetworkInterfaceUsage| Interface {
        name: of.name,
        rx: Traffic {
            bytes: value(of.rx_bytes),
            errors: value(of.rx_errors),
            ..Traffic::default()
        },
        tx: Traffic {
            bytes: value(of.tx_bytes),
            errors: value(of.tx_errors),
            ..Traffic::default()
        },
    };
    let of = |stats: v1::PodSandboxStats| {
        let uid = PodUid::from(stats.attributes?.metadata?.uid);
        let network = stats.linux?.network?;
        let all = network
            .default_interface
            .into_iter()
            .chain(network.interfaces);
        let mut found: Vec<Interface> = all.map(interface).collect();
        // Some runtimes tell the default interface twice.
        found.sort_by(|a, b| a.name.cmp(&b.name));
        found.dedup_by(|a, b| a.name == b.name);
        Some((uid, found))
    };
    stats.into_iter().filter_map(of).collect()
}

/// Growth of processor time, by cgroup or container. An entry that was not seen in a collection is forgotten.
#[derive(Debug, Default)]
struct Rates(BTreeMap<String, Sample>);

#[derive(Clone, Copy, Debug)]
struct Sample {
    total_ns: u64,
    at: Instant,
    rate: Option<u64>,
}

impl Rates {
    fn apply(&mut self, snapshot: &mut Snapshot, now: Instant) {
        let mut old = std::mem::take(&mut self.0);
        let mut one = |key: String, usage: &mut Usage| {
            let Some(cpu) = &mut usage.cpu else { return };
            let next = match old.remove(&key) {
                // A smaller count is that of another process.
                Some(last) if last.total_ns <= cpu.total_ns => {
                    let passed = now.duration_since(last.at);
                    if passed < MIN_RATE_INTERVAL {
                        last
                    } else {
                        let used = u128::from(cpu.total_ns - last.total_ns);
                        let rate = used * 1_000_000_000 / passed.as_nanos().max(1);
                        Sample {
                            total_ns: cpu.total_ns,
                            at: now,
                            rate: u64::try_from(rate).ok(),
                        }
                    }
                }
                _ => Sample {
                    total_ns: cpu.total_ns,
                    at: now,
                    rate: None,
                },
            };
            cpu.nano_cores = cpu.nano_cores.or(next.rate);
            self.0.insert(key, next);
        };
        one("node".to_owned(), &mut snapshot.node.usage);
        for part in &mut snapshot.node.system {
            one(format!("system/{}", part.name), &mut part.usage);
        }
        for pod in &mut snapshot.pods {
            one(format!("pod/{}", pod.uid), &mut pod.usage);
            for container in &mut pod.containers {
                one(format!("container/{}", container.id), &mut container.usage);
            }
        }
    }
}

#[cfg(test)]
mod tests;
