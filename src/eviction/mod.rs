//! Layer 4: upstream's eviction manager. `pressure` evicts pods while the node is short of something; this file those that
//! use more local storage than they may (`localStorageEviction`).
//!
//! In: the active pods, asked for every ten seconds, the disk usage of their emptyDir volumes, logs, hosts files and
//! termination messages, the runtime's figures of writable layers. Out: evictions, through [`ActivePods::evict`].
//!
//! **Invariant:** a pod without limits is not looked at, and without pods that have any nothing is measured
//! and the runtime is not asked. One pod that takes long to measure delays no other one.
//!
//! **Invariant:** what was measured is a lower bound: a pod is evicted when that is too much already, or when through its own doing
//! it could not be measured several times in a row. A runtime, a device or a server in trouble evicts nobody.

mod pressure;
mod usage;
mod walks;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use k8s_cri::v1;
use k8s_openapi::api::core::v1::Pod;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::core::eviction::{self, ContainerUsage, StorageUsage, Wanted};
use crate::kuberuntime::cri::CriClient;
use crate::kuberuntime::node_context::{NodeContext, is_path_component};
use crate::types::containers::containers_of;
use crate::types::metrics::{EvictionLabel, Metrics};
use crate::types::{PodExt, PodUid, Stamp};
pub use pressure::{Figures, Garbage, NodePressure, PressureOptions, Remedies, UsageQuery};
pub use usage::{DiskUsage, Measured, Missed, Stop, measure};
pub use walks::{WalkError, Walks};

/// Poll interval of usage.
const PERIOD: Duration = Duration::from_secs(10);
/// Rest of a pod, in times of its last measurement.
const REST: u32 = 10;
/// Longest rest of a pod, whatever its measurement takes.
const LONGEST_REST: Duration = Duration::from_secs(60);
/// Grace of a pod over a limit of local storage, in seconds; upstream's `immediateEvictionGracePeriodSeconds`.
const GRACE: i64 = 1;
/// Label by which the runtime knows a container's pod, and the one for its name.
const POD_UID: &str = "io.kubernetes.pod.uid";
const CONTAINER_NAME: &str = "io.kubernetes.container.name";

/// Source of the pods to watch, which can also stop them.
pub trait ActivePods: Send + Sync {
    /// Returns the pods that run or are to run, without those that are being stopped.
    fn running(&self) -> Vec<Arc<Pod>>;
    /// Returns the pods that are being stopped, for whatever reason.
    fn stopping(&self) -> Vec<Stopping>;
    /// Stops a pod for good, with the reason `Evicted`; one that is being stopped for another reason gets the shorter grace
    /// period, from its beginning on, and keeps its reason. Does not wait; may be repeated.
    fn evict(&self, pod: &Arc<Pod>, eviction: Eviction);
    /// Returns the pods that were evicted and have not ended, before a restart of the agent too.
    fn evicting(&self) -> Vec<Evicting>;
}

/// A pod that is being stopped.
#[derive(Clone, Debug)]
pub struct Stopping {
    /// The pod as its worker knows it.
    pub pod: Arc<Pod>,
    /// The end of its grace period.
    pub deadline: Stamp,
}

/// Parameters of a pod's eviction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Eviction {
    /// Message of the pod and of its event.
    pub message: String,
    /// Annotations of the event.
    pub annotations: BTreeMap<String, String>,
    /// Grace period.
    pub grace_seconds: i64,
}

/// A pod that was evicted and has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evicting {
    /// Start of its stop; once its containers have ended, the time of their end.
    pub since: Stamp,
    /// Its grace period; 0 once its containers have ended.
    pub grace_seconds: i64,
}

/// Watches the local storage of pods.
pub struct LocalStorage {
    pods: Arc<dyn ActivePods>,
    cri: CriClient,
    node: NodeContext,
    metrics: Metrics,
    walks: Walks,
}

/// State of the measurements of pods.
#[derive(Default)]
struct Watched {
    /// Those that are measured at the time.
    under_way: HashSet<PodUid>,
    /// Number of consecutive measurements that a pod itself made incomplete.
    missed: HashMap<PodUid, u32>,
    /// When a pod whose measurement took long is to be measured again.
    rests: HashMap<PodUid, Instant>,
}

impl Watched {
    /// Ends the measurement of a pod. One that takes long takes most of the time of nobody: the pod then rests
    /// [`REST`] times as long.
    fn measured(&mut self, uid: &PodUid, took: Duration, now: Instant) {
        self.under_way.remove(uid);
        let rest = took.saturating_mul(REST).min(LONGEST_REST);
        if rest > PERIOD {
            self.rests.insert(uid.clone(), now + rest);
        } else {
            self.rests.remove(uid);
        }
    }

    /// Begins a measurement, unless one is under way or the pod rests.
    fn begin(&mut self, uid: &PodUid, now: Instant) -> bool {
        let rests = self.rests.get(uid).is_some_and(|until| now < *until);
        !rests && self.under_way.insert(uid.clone())
    }
}

/// Result of one measurement of a pod.
struct Found {
    /// At least that.
    usage: StorageUsage,
    whole: Whole,
}

/// Completeness of a measurement.
enum Whole {
    Yes,
    /// Not for a reason that the pod cannot bring about.
    Unknown,
    /// Incomplete because of the pod; the part that was not measured, and the reason.
    No(String),
}

impl LocalStorage {
    /// A watch that has not begun.
    pub fn new(
        pods: Arc<dyn ActivePods>,
        cri: CriClient,
        node: NodeContext,
        metrics: Metrics,
    ) -> Self {
        Self {
            pods,
            cri,
            node,
            metrics,
            walks: Walks::default(),
        }
    }

    /// Looks every ten seconds, at each pod beside the others, at one whose measurement takes long up to a minute apart, until `token` is cancelled. Dropping it in between loses nothing
    /// but the number of looks that failed.
    pub async fn run(self, token: CancellationToken) {
        let mut ticks = tokio::time::interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut looks = FuturesUnordered::new();
        let mut watched = Watched::default();
        loop {
            // All of them may be dropped: what a look has found is taken from the stream with the look itself.
            tokio::select! {
                () = token.cancelled() => return,
                _ = ticks.tick() => {
                    let due = self.due(&mut watched);
                    looks.extend(due.into_iter().map(|(pod, wanted)| self.look(pod, wanted)));
                }
                Some((pod, found, took)) = looks.next() => {
                    watched.measured(&pod.uid(), took, Instant::now());
                    if let Some(found) = found {
                        self.judge(&pod, &found, &mut watched.missed);
                    }
                }
            }
        }
    }

    /// Pods to be measured now, which are under way from then on. What is known of others is forgotten.
    fn due(&self, watched: &mut Watched) -> Vec<(Arc<Pod>, Wanted)> {
        let running = self.pods.running();
        let uids: HashSet<PodUid> = running.iter().map(|pod| pod.uid()).collect();
        watched.missed.retain(|uid, _| uids.contains(uid));
        watched.rests.retain(|uid, _| uids.contains(uid));
        let now = Instant::now();
        let mut due = Vec::new();
        for pod in running {
            let wanted = eviction::wanted(&pod);
            if wanted.is_empty() || pod.is_deleting() {
                continue;
            }
            if watched.begin(&pod.uid(), now) {
                due.push((pod, wanted));
            }
        }
        due
    }

    fn judge(&self, pod: &Arc<Pod>, found: &Found, missed: &mut HashMap<PodUid, u32>) {
        let uid = pod.uid();
        let over = eviction::over_limit_by(pod, &found.usage).or_else(|| match &found.whole {
            Whole::Yes => {
                missed.remove(&uid);
                None
            }
            Whole::Unknown => None,
            Whole::No(what) => {
                let times = missed.entry(uid.clone()).or_default();
                *times = times.saturating_add(1);
                info!(pod = %uid, name = pod.name(), what, times, "cannot measure all of the pod's local storage");
                eviction::unmeasured(pod, *times, what)
            }
        });
        let Some((signal, message)) = over else {
            return;
        };
        // Measuring may have taken long.
        let running = self.pods.running();
        if !running.iter().any(|p| p.uid() == uid && !p.is_deleting()) {
            return;
        }
        let label = EvictionLabel {
            eviction_signal: signal.to_owned(),
        };
        self.metrics.evictions.get_or_create(&label).inc();
        info!(pod = %uid, name = pod.name(), message, "evicting pod");
        let eviction = Eviction {
            message,
            annotations: BTreeMap::new(),
            grace_seconds: GRACE,
        };
        self.pods.evict(pod, eviction);
    }

    async fn look(&self, pod: Arc<Pod>, wanted: Wanted) -> (Arc<Pod>, Option<Found>, Duration) {
        let (found, took) = self.measure(&pod, wanted).await.unzip();
        (pod, found, took.unwrap_or_default())
    }

    /// Measures a pod. The second part is how long its files took, without the wait for a turn.
    async fn measure(&self, pod: &Arc<Pod>, wanted: Wanted) -> Option<(Found, Duration)> {
        let uid = pod.uid();
        let containers = match wanted.containers {
            true => self.layers(&uid).await?,
            false => BTreeMap::new(),
        };
        let places = self.places(pod, wanted, containers.keys());
        let walked = self.walks.run(&uid, move |stop| {
            let begun = Instant::now();
            (walk(&places, stop), begun.elapsed())
        });
        match walked.await {
            Ok((mut found, took)) => {
                for (name, layer) in containers {
                    container(&mut found.usage, &name).rootfs = layer;
                }
                Some((found, took))
            }
            Err(error @ WalkError::Busy) => {
                debug!(pod = %uid, %error, "cannot measure the pod's local storage");
                None
            }
            Err(error) => {
                warn!(pod = %uid, name = pod.name(), %error, "cannot measure the pod's local storage");
                None
            }
        }
    }

    /// Writable layers of the containers that run, as the runtime knows them; `None` when it does not say. Upstream:
    /// `removeTerminatedContainers`.
    async fn layers(&self, uid: &PodUid) -> Option<BTreeMap<String, u64>> {
        let filter = v1::ContainerStatsFilter {
            label_selector: [(POD_UID.to_owned(), uid.to_string())].into(),
            ..Default::default()
        };
        let stats = match self.cri.list_container_stats(Some(filter)).await {
            Ok(stats) => stats,
            Err(error) => {
                debug!(pod = %uid, %error, "cannot read the pod's container stats");
                return None;
            }
        };
        let filter = v1::ContainerFilter {
            label_selector: [(POD_UID.to_owned(), uid.to_string())].into(),
            state: Some(v1::ContainerStateValue {
                state: v1::ContainerState::ContainerRunning.into(),
            }),
            ..Default::default()
        };
        let running: HashSet<String> = match self.cri.list_containers(Some(filter)).await {
            Ok(running) => running.into_iter().map(|c| c.id).collect(),
            Err(error) => {
                debug!(pod = %uid, %error, "cannot list the pod's containers");
                return None;
            }
        };
        Some(layers_of(stats, &running))
    }

    fn places<'a>(
        &self,
        pod: &Pod,
        wanted: Wanted,
        containers: impl Iterator<Item = &'a String>,
    ) -> Vec<(Place, PathBuf)> {
        let uid = pod.uid();
        let dir = self.node.pod_dir(&uid);
        let volumes = dir.join("volumes/kubernetes.io~empty-dir");
        let logs = self.node.pod_log_dir(pod.namespace(), pod.name(), &uid);
        let mut places = Vec::new();
        if wanted.containers {
            places.push((Place::Hosts, self.node.hosts_file(&uid)));
            // Of those that have ended, too: what they wrote there stays.
            for name in containers_of(pod).map(|spec| spec.container.name.clone()) {
                if is_path_component(&name) {
                    let dir = self.node.container_dir(&uid, &name);
                    places.push((Place::Messages(name), dir));
                }
            }
        }
        places.extend(containers.map(|name| (Place::Logs(name.clone()), logs.join(name))));
        for name in wanted.empty_dirs {
            let dir = volumes.join(&name);
            places.push((Place::Volume(name), dir));
        }
        places
    }
}

/// Part of a pod's local storage.
enum Place {
    Hosts,
    Messages(String),
    Logs(String),
    Volume(String),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Hosts => write!(f, "the hosts file"),
            Self::Messages(name) => write!(f, "termination messages of container {name:?}"),
            Self::Logs(name) => write!(f, "logs of container {name:?}"),
            Self::Volume(name) => write!(f, "EmptyDir volume {name:?}"),
        }
    }
}

fn walk(places: &[(Place, PathBuf)], stop: &Stop) -> Found {
    let mut usage = StorageUsage::default();
    let mut whole = Whole::Yes;
    for (place, path) in places {
        let Measured {
            usage: used,
            missed,
        } = measure(path, stop);
        let bytes = used.bytes;
        match place {
            Place::Hosts => usage.hosts = bytes,
            Place::Messages(name) => container(&mut usage, name).messages = bytes,
            Place::Logs(name) => container(&mut usage, name).logs = bytes,
            Place::Volume(name) => {
                usage.empty_dirs.insert(name.clone(), bytes);
            }
        }
        let Some(missed) = missed else { continue };
        debug!(?missed, path = %path.display(), "cannot measure a directory");
        whole = match whole {
            Whole::No(what) => Whole::No(what),
            _ if missed.is_of_the_pod() => Whole::No(format!("{place}: {missed}")),
            _ => Whole::Unknown,
        };
    }
    Found { usage, whole }
}

fn container<'a>(usage: &'a mut StorageUsage, name: &str) -> &'a mut ContainerUsage {
    usage.containers.entry(name.to_owned()).or_default()
}

/// Writable layers by container, of those that run.
fn layers_of(stats: Vec<v1::ContainerStats>, running: &HashSet<String>) -> BTreeMap<String, u64> {
    let mut layers: BTreeMap<String, u64> = BTreeMap::new();
    for of in stats {
        let Some(attributes) = of.attributes.filter(|a| running.contains(&a.id)) else {
            continue;
        };
        let Some(name) = attributes.labels.get(CONTAINER_NAME) else {
            continue;
        };
        let layer = of.writable_layer.and_then(|l| l.used_bytes);
        let entry = layers.entry(name.clone()).or_default();
        *entry = entry.saturating_add(layer.map_or(0, |b| b.value));
    }
    layers
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]
mod tests;
