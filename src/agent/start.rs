//! Start-up, from the open store (`opening`) to open sources. [`start`] lists its stages. Each part is built in its own file.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::base::Base;
use super::images::collection;
use super::node_parts::NodeParts;
use super::pod_cidr::PodCidrs;
use super::pod_parts::PodParts;
use super::pod_sockets::{pod_resources, pods_api};
use super::resume::{restore, resume, tell_what_was_restored};
use super::started::Started;
use super::sync_loop::container_policy;
use super::{
    AgentError, Tasks, api, devices, directories, dra, early_ends, eviction, logs, pod_cidr,
    shutdown, sources, sync_loop, tasks, workers,
};
use crate::config::{PodConfig, RunningStatic};
use crate::core::pleg_diff::PodLifecycleEvent;
use crate::images::ImageManager;
use crate::kubeletconfig::AgentConfig;
use crate::kuberuntime::cri::{CriClient, CriTimeouts};
use crate::pod_workers::PodWorkers;
use crate::pod_workers::pinning::reconcile;
use crate::pod_workers::take_over::take_over;
use crate::prober::Prober;
use crate::sync_loop::{Inputs, Janitor, SyncLoop};
use crate::types::PodUpdate;
use crate::types::probe::ProbeReceivers;

/// Returns the client of the configured runtime.
pub(super) fn runtime_client(config: &AgentConfig, base: &Base) -> Result<CriClient, AgentError> {
    Ok(CriClient::new(
        &config.runtime_endpoint.to_string(),
        Some(&config.image_endpoint.to_string()),
        CriTimeouts::from_request(config.kubelet.runtime_request_timeout),
        base.metrics.clone(),
    )?)
}

/// Restores and starts everything that needs the runtime.
///
/// # Errors
/// See [`AgentError`].
pub(super) async fn start(
    config: &AgentConfig,
    base: &Base,
    cri: CriClient,
    tasks: &mut Tasks,
    token: &CancellationToken,
) -> Result<Started, AgentError> {
    directories::keep(config, base, tasks, token)?;
    devices::serve(config, base, tasks, token);
    let node = NodeParts::build(config, base, cri, tasks, token).await?;
    let restored = restore(config, base, &node.cri, token).await?;
    let pods = PodParts::build(config, base, &node, &restored, tasks, token).await?;

    let workers = workers::build(config, base, &node, &pods, &restored, token);
    early_ends::watch(config, base, &workers, pods.signals, tasks, token);
    let plan = &restored.plan;
    let seeds = resume(plan, &workers, &base.pods, &pods.queue, &node.objects);
    tell_what_was_restored(base, plan);

    let unrecorded: Arc<[RunningStatic]> = restored.statics.clone().into();
    let statics = restored.statics;
    let (sources, updates) = sources::open(config, base, statics, seeds, tasks, token)?;
    let agent = Assembly {
        config,
        base,
        token,
        node,
        workers,
        sources,
    };
    agent.follow_changes(tasks);
    shutdown::watch(config, base, &agent.workers, tasks, token);
    let (sync_loop, janitor) = agent.sync_loop(unrecorded);
    #[cfg(feature = "failpoints")]
    agent.drill(tasks);
    agent.keep_room(&pods.images, tasks);
    tasks.add("pleg", pods.pleg.run(token.clone()));
    agent.keep_images(pods.images, tasks);
    let loops = Loops {
        sync_loop,
        janitor,
        prober: pods.prober,
        updates,
        lifecycle: pods.pleg_events,
        probe_results: pods.probe_results,
    };
    agent.run_loops(loops, tasks);
    pod_resources(config, base, &agent.workers, tasks, token);
    pods_api(config, base, tasks, token);
    Ok(agent.into_started())
}

/// Returns where the addresses of pods come from. Upstream heeds `podCIDR` without an API server only.
fn pod_cidrs(config: &AgentConfig, base: &Base) -> Option<PodCidrs> {
    if config.kubeconfig.is_some() {
        return Some(PodCidrs::OfNode(base.node.clone()));
    }
    config.kubelet.pod_cidr.clone().map(PodCidrs::Configured)
}

/// Loops that look after pods, with what they receive.
struct Loops {
    sync_loop: SyncLoop,
    janitor: Janitor,
    prober: Prober,
    updates: mpsc::Receiver<PodUpdate>,
    lifecycle: mpsc::Receiver<PodLifecycleEvent>,
    probe_results: ProbeReceivers,
}

/// Agent with workers and open sources, whose tasks are being started.
struct Assembly<'a> {
    config: &'a AgentConfig,
    base: &'a Base,
    token: &'a CancellationToken,
    node: NodeParts,
    workers: PodWorkers,
    sources: PodConfig,
}

impl Assembly<'_> {
    /// Starts the tasks that pass changes of statuses, devices, claims, volumes and objects to the workers.
    fn follow_changes(&self, tasks: &mut Tasks) {
        let (base, node, token) = (self.base, &self.node, self.token);
        let workers = || self.workers.clone();
        let ready = self.sources.ready();
        api::statuses(base, &node.statuses, ready.clone(), tasks, token);
        tasks.add(
            "changed devices",
            devices::follow(base.devices.clone(), workers(), token.clone()),
        );
        tasks.add(
            "outdated statuses",
            tasks::compute_outdated(node.statuses.clone(), workers(), token.clone()),
        );
        tasks.add(
            "changed claims",
            dra::follow(base.dra.clone(), workers(), token.clone()),
        );
        tasks.add(
            "resource claims",
            dra::reconcile(
                base.dra.clone(),
                workers(),
                base.pods.clone(),
                ready.clone(),
                token.clone(),
            ),
        );
        tasks.add(
            "volumes without a record",
            take_over(workers(), ready.clone(), token.clone()),
        );
        tasks.add(
            "objects",
            api::follow_objects(node.objects.clone(), workers(), ready, token.clone()),
        );
        tasks.add("object records", node.objects.clone().run(token.clone()));
        if let Some(cidrs) = pod_cidrs(self.config, base) {
            tasks.add(
                "addresses of pods",
                pod_cidr::follow(cidrs, node.cri.clone(), token.clone()),
            );
        }
    }

    /// Builds the sync loop and its janitor. `unrecorded` are the static pods that run without a record.
    fn sync_loop(&self, unrecorded: Arc<[RunningStatic]>) -> (SyncLoop, Janitor) {
        sync_loop::build(
            self.config,
            self.base,
            &self.node,
            &self.workers,
            &self.sources,
            unrecorded,
        )
    }

    /// Starts the evictions of crash tests.
    #[cfg(feature = "failpoints")]
    fn drill(&self, tasks: &mut Tasks) {
        let (workers, pods) = (self.workers.clone(), self.base.pods.clone());
        tasks.add(
            "drill",
            super::drill::evictions(workers, pods, self.token.clone()),
        );
    }

    /// Starts the tasks that keep logs and local storage of pods within their limits, and gives the manager of evictions its
    /// remedies.
    fn keep_room(&self, images: &Arc<ImageManager>, tasks: &mut Tasks) {
        let (config, base, cri) = (self.config, self.base, &self.node.cri);
        let rotator = logs::build(config, base, cri.clone());
        tasks.add("log rotation", rotator.run(self.token.clone()));
        if config.kubelet.local_storage_capacity_isolation {
            let storage = eviction::local_storage(base, cri.clone(), &self.workers);
            tasks.add("local storage", storage.run(self.token.clone()));
        }
        let garbage = eviction::NodeGarbage {
            workers: self.workers.clone(),
            policy: container_policy(config),
            images: Arc::clone(images),
            collection: collection(config, base, self.sources.ready()),
            cri: cri.clone(),
        };
        // Nobody else sets it.
        drop(self.node.remedies.set(eviction::remedies(garbage)));
    }

    /// Starts the tasks that remove unused images and repair damaged ones.
    fn keep_images(&self, images: Arc<ImageManager>, tasks: &mut Tasks) {
        let (base, cri, token) = (self.base, &self.node.cri, self.token);
        tasks.add(
            "image garbage collection",
            Arc::clone(&images).run_collection(
                collection(self.config, base, self.sources.ready()),
                cri.clone(),
                token.clone(),
            ),
        );
        tasks.add(
            "images",
            images.run(
                cri.clone(),
                base.store.clone(),
                Arc::clone(&base.recorder) as _,
                token.clone(),
            ),
        );
    }

    /// Starts the loops that look after pods.
    fn run_loops(&self, loops: Loops, tasks: &mut Tasks) {
        let (base, token) = (self.base, self.token);
        tasks.add("janitor", loops.janitor.run(token.clone()));
        tasks.add(
            "runtime health",
            tasks::runtime_up(
                self.node.cri.clone(),
                base.runtime_state.clone(),
                Arc::clone(&base.clock),
                token.clone(),
            ),
        );
        let inputs = Inputs::new(
            loops.updates,
            loops.lifecycle,
            loops.probe_results,
            self.workers.forgot(),
        );
        tasks.add("sync loop", loops.sync_loop.run(inputs, token.clone()));
        tasks.add("prober", loops.prober.run(token.clone()));
        let period = self.config.kubelet.cpu_manager_reconcile_period;
        tasks.add(
            "CPU manager",
            reconcile(self.workers.clone(), period, token.clone()),
        );
    }

    /// Returns the handles for the tasks that follow the start.
    fn into_started(self) -> Started {
        Started {
            ready: self.sources.ready(),
            config: self.sources,
            workers: self.workers,
            pods: self.base.pods.clone(),
            local_node: self.node.local,
        }
    }
}
