//! Wires the manager of evictions under pressure of the node.

use std::sync::{Arc, OnceLock};

use futures::future::BoxFuture;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::Tasks;
use super::base::Base;
use crate::core::pressure::{Rules, Waste};
use crate::eviction::{Figures, Garbage, LocalStorage, NodePressure, PressureOptions, Remedies};
use crate::images::{Collection, ImageManager};
use crate::kubeletconfig::AgentConfig;
use crate::kuberuntime::cri::CriClient;
use crate::kuberuntime::gc::GcPolicy;
use crate::pod_workers::PodWorkers;
use crate::stats::{NodeFigures, StatsOptions, StatsProvider};
use crate::sync_loop::collect_unused;
use crate::types::causes;

/// Garbage that is removed before a pod is evicted for a full disk.
pub(super) struct NodeGarbage {
    pub(super) workers: PodWorkers,
    pub(super) policy: GcPolicy,
    pub(super) images: Arc<ImageManager>,
    pub(super) collection: Collection,
    pub(super) cri: CriClient,
}

impl Garbage for NodeGarbage {
    fn remove(&self, waste: Waste) -> BoxFuture<'_, bool> {
        Box::pin(async move {
            if !(self.collection.knows_pods)() {
                debug!("not removing garbage before the wanted pods are known");
                return false;
            }
            if waste.containers {
                collect_unused(&self.workers, self.policy).await;
            }
            if !waste.images {
                return true;
            }
            let removed = self.images.remove_all_unused(&self.collection, &self.cri);
            match removed.await {
                Ok(removed) => debug!(removed, "removed images to free disk space"),
                Err(error) => {
                    let error = causes(&error);
                    warn!(error, "some unused images may not have been removed");
                }
            }
            true
        })
    }
}

/// Starts the manager. It observes the node at once, and evicts pods once the result is set.
pub(super) fn watch(
    config: &AgentConfig,
    base: &Base,
    cri: CriClient,
    tasks: &mut Tasks,
    token: &CancellationToken,
) -> Arc<OnceLock<Remedies>> {
    let rules = Rules::of(&config.kubelet);
    let figures: Arc<dyn Figures> = match &base.figures {
        Some(figures) => Arc::clone(figures),
        None => {
            let figures = NodeFigures::new(StatsProvider::new(
                StatsOptions::of(config),
                base.store.clone(),
                base.pods.clone(),
                cri,
                Arc::clone(&base.clock),
            ));
            if config.kubelet.kernel_memcg_notification {
                Arc::new(figures.with_notifications(&rules.thresholds))
            } else {
                Arc::new(figures)
            }
        }
    };
    let remedies: Arc<OnceLock<Remedies>> = Arc::default();
    let manager = NodePressure::new(PressureOptions {
        remedies: Arc::clone(&remedies),
        figures,
        rules,
        signals: base.signals(config),
        store: base.store.clone(),
        clock: Arc::clone(&base.clock),
        recorder: Arc::clone(&base.recorder) as _,
        metrics: base.metrics.clone(),
        pressure: base.pressure.clone(),
    });
    tasks.add("node pressure", manager.run(token.clone()));
    remedies
}

/// Builds the watch over the local storage of pods.
pub(super) fn local_storage(base: &Base, cri: CriClient, workers: &PodWorkers) -> LocalStorage {
    LocalStorage::new(
        Arc::new(workers.clone()),
        cri,
        workers.context().node.clone(),
        base.metrics.clone(),
    )
}

/// Returns the means of the eviction manager to free resources.
pub(super) fn remedies(garbage: NodeGarbage) -> Remedies {
    Remedies {
        pods: Arc::new(garbage.workers.clone()),
        garbage: Arc::new(garbage),
    }
}
