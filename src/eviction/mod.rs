//! Layer 4: evicts pods that use more local storage than they may; upstream's eviction manager as far as
//! `localStorageEviction`.
//!
//! In: the active pods, asked for every ten seconds, the disk usage of their emptyDir volumes and logs, the
//! runtime's figures of writable layers. Out: evictions, through [`ActivePods::evict`].
//!
//! **Invariant:** a pod without limits is not looked at, and without pods that have any nothing is measured
//! and the runtime is not asked. A pod whose usage cannot be told completely is not evicted.

mod usage;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_cri::v1;
use k8s_openapi::api::core::v1::Pod;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use crate::core::eviction::{self, ContainerUsage, StorageUsage, Wanted};
use crate::kuberuntime::cri::CriClient;
use crate::kuberuntime::node_context::NodeContext;
use crate::types::metrics::{EvictionLabel, Metrics};
use crate::types::{PodExt, blocking};
pub use usage::{DiskUsage, disk_usage, measure};

/// How often usage is looked at.
const PERIOD: Duration = Duration::from_secs(10);
/// Label by which the runtime knows a container's pod, and the one for its name.
const POD_UID: &str = "io.kubernetes.pod.uid";
const CONTAINER_NAME: &str = "io.kubernetes.container.name";

/// Whose pods are watched, and who stops them.
pub trait ActivePods: Send + Sync {
    /// Returns the pods that run or are to run, without those that are being stopped.
    fn running(&self) -> Vec<Arc<Pod>>;
    /// Stops a pod for good, soon: its grace period is a second. Does not wait; may be repeated.
    fn evict(&self, pod: &Arc<Pod>, reason: &str, message: &str);
}

/// Watches the local storage of pods.
pub struct LocalStorage {
    pods: Arc<dyn ActivePods>,
    cri: CriClient,
    node: NodeContext,
    metrics: Metrics,
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
        }
    }

    /// Looks every ten seconds until `token` is cancelled. Dropping it in between loses nothing.
    pub async fn run(self, token: CancellationToken) {
        let mut ticks = tokio::time::interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = token.cancelled() => return,
                _ = ticks.tick() => {}
            }
            tokio::select! {
                () = token.cancelled() => return,
                () = self.look() => {}
            }
        }
    }

    /// One look at all pods; several may be evicted.
    pub async fn look(&self) {
        for pod in self.pods.running() {
            let wanted = eviction::wanted(&pod);
            if wanted.is_empty() || pod.is_deleting() {
                continue;
            }
            let Some(usage) = self.measure(&pod, wanted).await else {
                continue;
            };
            if let Some((signal, message)) = eviction::over_limit_by(&pod, &usage) {
                let label = EvictionLabel {
                    eviction_signal: signal.to_owned(),
                };
                self.metrics.evictions.get_or_create(&label).inc();
                info!(pod = %pod.uid(), name = pod.name(), message, "evicting pod");
                self.pods.evict(&pod, eviction::EVICTED, &message);
            }
        }
    }

    async fn measure(&self, pod: &Arc<Pod>, wanted: Wanted) -> Option<StorageUsage> {
        let uid = pod.uid();
        let mut usage = StorageUsage::default();
        let logs = self.node.pod_log_dir(pod.namespace(), pod.name(), &uid);
        if wanted.containers {
            let filter = v1::ContainerStatsFilter {
                label_selector: [(POD_UID.to_owned(), uid.to_string())].into(),
                ..Default::default()
            };
            let stats = match self.cri.list_container_stats(Some(filter)).await {
                Ok(stats) => stats,
                Err(error) => {
                    debug!(pod = %uid, %error, "cannot tell the pod's use of local storage");
                    return None;
                }
            };
            for of in stats {
                let Some(name) = of
                    .attributes
                    .and_then(|mut a| a.labels.remove(CONTAINER_NAME))
                else {
                    continue;
                };
                let layer = of.writable_layer.and_then(|l| l.used_bytes);
                let entry: &mut ContainerUsage = usage.containers.entry(name).or_default();
                entry.rootfs = entry.rootfs.saturating_add(layer.map_or(0, |b| b.value));
            }
        }
        let volumes = self
            .node
            .pod_dir(&uid)
            .join("volumes/kubernetes.io~empty-dir");
        let names: Vec<String> = usage.containers.keys().cloned().collect();
        let walk = blocking::run(move || {
            let of = |dir: PathBuf| usage::disk_usage(&dir);
            let dirs = wanted.empty_dirs.into_iter();
            let dirs: std::io::Result<Vec<_>> = dirs
                .map(|name| of(volumes.join(&name)).map(|used| (name, used)))
                .collect();
            let logs: std::io::Result<Vec<_>> = names
                .into_iter()
                .map(|name| of(logs.join(&name)).map(|used| (name, used)))
                .collect();
            Ok::<_, std::io::Error>((dirs?, logs?))
        });
        let (dirs, logs) = match walk.await {
            Ok(Ok(found)) => found,
            Ok(Err(error)) => {
                debug!(pod = %uid, %error, "cannot measure the pod's volumes");
                return None;
            }
            Err(error) => {
                debug!(pod = %uid, %error, "measuring the pod's volumes was cut off");
                return None;
            }
        };
        usage.empty_dirs = dirs.into_iter().collect();
        for (name, used) in logs {
            usage.containers.entry(name).or_default().logs = used;
        }
        Some(usage)
    }
}
