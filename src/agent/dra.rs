//! Setup of dynamic resource allocation: the manager, registration of drivers, and the claims of pods that are gone.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use tokio_util::sync::CancellationToken;

use super::Tasks;
use super::base::{Base, Parts};
use crate::config::SourcesReady;
use crate::dra::{DRA_PLUGIN, DraManager, DraOptions};
use crate::kubeletconfig::AgentConfig;
use crate::node_object::NodeObject;
use crate::pod_manager::PodManager;
use crate::pod_workers::PodWorkers;
use crate::types::PodUid;
use crate::volumemanager::csi::registry::{Drivers, Plugin};

/// Pause between two looks for claims of pods that are gone; upstream's `defaultReconcilePeriod`.
const RECONCILE: Duration = Duration::from_secs(60);

/// The manager, with the recorded claims.
pub(super) fn manager(config: &AgentConfig, parts: &Parts, node: &NodeObject) -> DraManager {
    DraManager::new(DraOptions {
        store: parts.store.clone(),
        clock: Arc::clone(&parts.clock),
        metrics: parts.metrics.clone(),
        api: parts.api.clone(),
        node_name: config.node_name.clone(),
        node: node.clone(),
    })
}

/// Has DRA drivers taken that register by `plugins_registry`, until their sockets there are gone.
pub(super) fn take_from(
    drivers: &Drivers,
    base: &Base,
    tasks: &mut Tasks,
    token: &CancellationToken,
) {
    let dra = base.dra.clone();
    dra.begin_registration();
    let registering = dra.clone();
    drivers.hand_on(
        DRA_PLUGIN,
        Arc::new(move |plugin: Plugin| {
            let dra = registering.clone();
            let register = async move {
                let (endpoint, registration) = (&plugin.endpoint, &plugin.registration);
                dra.register(&plugin.name, endpoint, registration, &plugin.versions)
                    .await
            };
            register.boxed()
        }),
    );
    let watching = dra.clone();
    drivers.show_sockets(Arc::new(move |sockets| watching.keep_only(sockets)));
    tasks.add("dra drivers", dra.run(token.clone()));
}

/// Unprepares the claims of pods that no source wants, no worker knows and the runtime does not show, until `token` is
/// cancelled. Pods that end under a worker have their claims unprepared by it.
pub(super) async fn reconcile(
    dra: DraManager,
    workers: PodWorkers,
    pods: PodManager,
    ready: SourcesReady,
    token: CancellationToken,
) {
    loop {
        let pause = token.run_until_cancelled(tokio::time::sleep(RECONCILE));
        if pause.await.is_none() {
            return;
        }
        if !ready.complete() {
            continue;
        }
        let present = workers.context().pleg.cache().present();
        let is_gone = |uid: &PodUid| {
            pods.get(uid).is_none()
                && !workers.knows(uid)
                && present
                    .as_ref()
                    .is_some_and(|present| !present.contains(uid))
        };
        let reconciled = dra.reconcile(is_gone);
        if token.run_until_cancelled(reconciled).await.is_none() {
            return;
        }
    }
}

/// Syncs the pods with devices whose health has changed, and those whose driver is back, until `token` is cancelled.
pub(super) async fn follow(dra: DraManager, workers: PodWorkers, token: CancellationToken) {
    while let Some(pods) = token.run_until_cancelled(dra.changed()).await {
        for uid in &pods {
            workers.sync(uid);
        }
    }
}
