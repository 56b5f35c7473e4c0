//! Start-up, from the open store (`opening`) to open sources: the runtime is reached and listed, the plan made and
//! committed, what was there goes on (`resume`), then the sources are opened.

use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::addresses::{follow_name, reported_addresses};
use super::base::Base;
use super::images::{image_collection, images};
use super::known_pods::known_pods;
use super::logs::rotation_policy;
use super::pod_sockets::{pod_resources, pods_api};
use super::resume::{plan, reported_reasons, resume, tell_what_was_restored};
use super::sources::source_settings;
use super::started::Started;
use super::sync_loop::{JANITOR_CAPACITY, container_policy, max_pods};
use super::workers::starts_at_once;
use super::{
    AgentError, Tasks, api, devices, directories, dra, early_ends, eviction, node, pinning,
    shutdown, tasks, volumes,
};
use crate::config::{PodConfig, RunningStatic, Surroundings};
use crate::container_logs::LogRotator;
use crate::events;
use crate::eviction::LocalStorage;
use crate::kubeletconfig::AgentConfig;
use crate::kuberuntime::cri::{CriClient, CriTimeouts};
use crate::nodestatus::cpus;
use crate::pleg::{Pleg, PlegOptions};
use crate::pod_workers::pinning::reconcile;
use crate::pod_workers::take_over::take_over;
use crate::pod_workers::{PodWorkers, StartGate, WorkQueue, WorkerContext};
use crate::prober::{Prober, ProberContext};
use crate::status::StatusManager;
use crate::sync_loop::{Inputs, Janitor, LoopContext, SyncLoop};
use crate::types::{EventRecorder, causes, probe};

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
pub(super) async fn start(
    config: &AgentConfig,
    base: &Base,
    cri: CriClient,
    tasks: &mut Tasks,
    token: &CancellationToken,
) -> Result<Started, AgentError> {
    let late = directories::make(config)?;
    if !late.is_empty() {
        let clock = Arc::clone(&base.clock);
        tasks.add(
            "late directories",
            directories::make_late(late, clock, token.clone()),
        );
    }
    devices::serve(config, base, tasks, token);
    let cri = cri.knowing_pods(known_pods(config, base.store.clone()));
    let node_object = base.node.clone();
    // The node lives on in the API server while the runtime is away.
    let node_status = base.api.clone().map(|api| {
        api::forward_events(config, base, api.clone(), tasks);
        api::node_status(
            config,
            base,
            api,
            cri.clone(),
            node_object.clone(),
            tasks,
            token,
        )
    });
    if let Some(known) = node_object.get() {
        base.addresses.remember(reported_addresses(&known));
    }
    follow_name(config, base, tasks, token);
    if let Err(error) = base.addresses.find() {
        warn!(
            error,
            "the node has no address yet; pods report the last one"
        );
    }
    if base.api.is_none()
        && let Err(error) = events::forget_waiting(&base.store).await
    {
        warn!(%error, "events of the time with an API server stay on record until the next start");
    }
    let (cgroups, limited) = node::cgroups(config, &base.metrics).await?;
    if let Err(error) = limited {
        let error = causes(&error);
        warn!(error, "pods may use what is reserved");
        base.recorder.record(node::not_enforced(&error));
    }
    let remedies = eviction::watch(config, base, cri.clone(), tasks, token);
    let node = node::context(config, &cgroups, base.addresses.clone())?;
    match node.dns.read_host() {
        Ok(host) => {
            for event in node.dns.check_limits(&host) {
                base.recorder.record(event);
            }
        }
        // It may come later. Sandboxes that need it wait until then.
        Err(error) => warn!(%error, "pods that use the node's resolver cannot start yet"),
    }
    let local_node = Arc::new(ArcSwap::new(api::local_node(config, base).await));
    let objects = api::objects(config, base).await;
    let status = StatusManager::new(base.store.clone(), Arc::clone(&base.clock));
    let Some(runtime_name) = tasks::wait_for_runtime(&cri, &base.runtime_state, token).await else {
        return Err(AgentError::Ended {
            part: "waiting for the container runtime".to_owned(),
        });
    };
    tokio::join!(
        tasks::update_runtime_up(&cri, &base.runtime_state, &*base.clock),
        tasks::check_cgroup_driver(&cri, config.kubelet.cgroup_driver, &*base.recorder),
    );

    let (plan, statics, as_of) = plan(config, base, &cri).await;
    // A degraded store holds this: a full disk must not keep pods from being looked after.
    base.store.commit_or_hold(plan.transaction.clone()).await?;

    devices::resume(config, &base.devices, &plan.current).await?;
    let memory = node.machine.get().memory();
    let pinning = pinning::managers(config, base, &cgroups, memory).await?;

    let (pleg, pleg_handle, pleg_events) = Pleg::new(
        PlegOptions {
            cri: cri.clone(),
            store: base.store.clone(),
            runtime_state: base.runtime_state.clone(),
            metrics: base.metrics.clone(),
            evented: true,
        },
        Arc::clone(&base.clock),
        plan.current.iter().cloned(),
        as_of,
    );
    let queue = WorkQueue::new(base.store.clone());
    let drivers = volumes::csi_drivers(config, base);
    devices::take_from(&drivers, base.devices.clone());
    dra::take_from(&drivers, base, tasks, token);
    tasks.add("csi drivers", drivers.clone().run(token.clone()));
    let memory = volumes::following(&local_node, &node.machine);
    let volumes = volumes::volume_manager(config, base, drivers.clone(), memory);
    if let Err(error) = volumes.reconcile().await {
        warn!(
            error = causes(&error),
            "volumes are not as recorded, their pods wait"
        );
    }
    tasks.add(
        "volumes in use",
        api::tell_volumes_in_use(volumes.clone(), base.volumes_in_use.clone(), token.clone()),
    );
    // Nobody else sets it.
    drop(base.volumes.set(volumes.clone()));
    let (results, probe_results) = probe::channels();
    let prober = Prober::new(ProberContext {
        store: base.store.clone(),
        clock: Arc::clone(&base.clock),
        cri: cri.clone(),
        recorder: Arc::clone(&base.recorder) as _,
        metrics: base.metrics.clone(),
        results,
        addresses: base.addresses.clone(),
    });
    let (image_changed, image_changes) = early_ends::image_changes();
    let images = images(config, base, &runtime_name, node_status).announcing(image_changed);
    let images = Arc::new(images);
    let workers = PodWorkers::new(
        WorkerContext {
            store: base.store.clone(),
            clock: Arc::clone(&base.clock),
            cri: cri.clone(),
            pleg: pleg_handle,
            status: status.clone(),
            images: Arc::clone(&images),
            volumes,
            devices: base.devices.clone(),
            claims: base.dra.clone(),
            objects: objects.clone(),
            node_object: node_object.clone(),
            cgroups: Arc::new(cgroups.with_pinning(pinning.clone())),
            pinning,
            node,
            recorder: Arc::clone(&base.recorder) as _,
            reasons: reported_reasons(&base.store.snapshot()),
            causes: early_ends::causes(config),
            volume_images: Default::default(),
            runtime_state: base.runtime_state.clone(),
            queue: queue.clone(),
            metrics: base.metrics.clone(),
            runtime_name,
            resync: config.kubelet.sync_frequency,
            backoff_max: config.kubelet.max_container_restart_period,
            starts: StartGate::new(starts_at_once(cpus())),
            prober: prober.clone(),
            epoch: plan.epoch.clone(),
        },
        token.child_token(),
    );
    let signals = early_ends::Signals {
        images: image_changes,
        drivers,
    };
    early_ends::watch(config, base, &workers, signals, tasks, token);
    let pods = base.pods.clone();
    let seeds = resume(&plan, &workers, &pods, &queue, &objects);
    tell_what_was_restored(base, &plan);

    let unrecorded: Arc<[RunningStatic]> = statics.clone().into();
    let mut settings = source_settings(config, statics);
    if let Some(api) = base.api.clone() {
        let server = api::server_name(config);
        settings.api = Some(api::source(api, server, node_object.clone(), tasks, token));
    }
    let (source, updates) = PodConfig::start(
        settings,
        seeds,
        &Surroundings {
            store: base.store.clone(),
            recorder: Arc::clone(&base.recorder) as _,
            clock: Arc::clone(&base.clock),
        },
        token,
    )?;
    api::statuses(
        base,
        &status,
        &pods,
        node_object.clone(),
        source.ready(),
        tasks,
        token,
    );
    tasks.add(
        "changed devices",
        devices::follow(base.devices.clone(), workers.clone(), token.clone()),
    );
    tasks.add(
        "outdated statuses",
        tasks::compute_outdated(status.clone(), workers.clone(), token.clone()),
    );
    tasks.add(
        "changed claims",
        dra::follow(base.dra.clone(), workers.clone(), token.clone()),
    );
    tasks.add(
        "resource claims",
        dra::reconcile(
            base.dra.clone(),
            workers.clone(),
            pods.clone(),
            source.ready(),
            token.clone(),
        ),
    );
    tasks.add(
        "volumes without a record",
        take_over(workers.clone(), source.ready(), token.clone()),
    );
    tasks.add(
        "objects",
        api::follow_objects(
            objects.clone(),
            workers.clone(),
            source.ready(),
            token.clone(),
        ),
    );
    tasks.add("object records", objects.run(token.clone()));
    shutdown::watch(config, base, &workers, tasks, token);
    let (janitor_tx, janitor_rx) = mpsc::channel(JANITOR_CAPACITY);
    let policy = container_policy(config);
    let janitor = Janitor::new(workers.clone(), policy, janitor_rx);
    let sync_loop = SyncLoop::new(
        LoopContext {
            pods: pods.clone(),
            workers: workers.clone(),
            ready: source.ready(),
            origins: source.origins(),
            unrecorded,
            store: base.store.clone(),
            runtime_state: base.runtime_state.clone(),
            clock: Arc::clone(&base.clock),
            recorder: Arc::clone(&base.recorder) as _,
            metrics: base.metrics.clone(),
            node_name: config.node_name.clone(),
            node: node_object,
            local_node: Arc::clone(&local_node),
            max_pods: max_pods(&config.kubelet, cpus),
            unsafe_sysctls: config.kubelet.allowed_unsafe_sysctls.clone().into(),
            pressure: base.pressure.subscribe(),
            observed: Arc::new(move |seen| status.observed(seen)),
            janitor: janitor_tx,
        },
        base.monitor.clone(),
    );
    #[cfg(feature = "failpoints")]
    tasks.add(
        "drill",
        super::drill::evictions(workers.clone(), pods.clone(), token.clone()),
    );
    let storage = LocalStorage::new(
        Arc::new(workers.clone()),
        cri.clone(),
        workers.context().node.clone(),
        base.metrics.clone(),
    );
    let rotator = LogRotator::new(
        base.store.clone(),
        cri.clone(),
        Arc::clone(&base.clock),
        rotation_policy(config),
        config.pod_logs_dir().to_owned(),
    );
    tasks.add("log rotation", rotator.run(token.clone()));
    tasks.add("local storage", storage.run(token.clone()));
    let garbage = eviction::NodeGarbage {
        workers: workers.clone(),
        policy,
        images: Arc::clone(&images),
        collection: image_collection(config, base, source.ready()),
        cri: cri.clone(),
    };
    // Nobody else sets it.
    drop(remedies.set(eviction::remedies(garbage)));
    tasks.add("pleg", pleg.run(token.clone()));
    tasks.add(
        "image garbage collection",
        Arc::clone(&images).run_collection(
            image_collection(config, base, source.ready()),
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
    tasks.add("janitor", janitor.run(token.clone()));
    tasks.add(
        "runtime health",
        tasks::runtime_up(
            cri,
            base.runtime_state.clone(),
            Arc::clone(&base.clock),
            token.clone(),
        ),
    );
    tasks.add(
        "sync loop",
        sync_loop.run(
            Inputs::new(updates, pleg_events, probe_results, workers.forgot()),
            token.clone(),
        ),
    );
    tasks.add("prober", prober.run(token.clone()));
    let period = config.kubelet.cpu_manager_reconcile_period;
    tasks.add(
        "CPU manager",
        reconcile(workers.clone(), period, token.clone()),
    );
    pod_resources(config, base, &workers, tasks, token);
    pods_api(config, base, tasks, token);
    Ok(Started {
        ready: source.ready(),
        config: source,
        workers,
        pods,
        local_node,
    })
}
