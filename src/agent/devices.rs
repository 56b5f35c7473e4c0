//! Setup of device plugins: the manager, the registration socket, and syncs of pods whose devices change.

use std::sync::Arc;

use futures::FutureExt;
use tokio_util::sync::CancellationToken;

use super::Tasks;
use super::directories::Served;
use super::start::{Base, Parts};
use crate::devicemanager::{DEVICE_PLUGIN, DeviceManager, DeviceManagerOptions};
use crate::kubeletconfig::AgentConfig;
use crate::pod_workers::PodWorkers;
use crate::server::device_plugins;
use crate::types::runtime::{ContainerState, PodStatus};
use crate::volumemanager::csi::registry::{Drivers, Plugin};

/// The manager, with the resources on record.
pub(super) fn manager(config: &AgentConfig, parts: &Parts) -> DeviceManager {
    DeviceManager::new(DeviceManagerOptions {
        store: parts.store.clone(),
        clock: Arc::clone(&parts.clock),
        metrics: parts.metrics.clone(),
        readiness: config.device_readiness,
    })
}

/// Serves the socket of registrations. Pods without devices do not need it.
pub(super) fn serve(
    config: &AgentConfig,
    base: &Base,
    tasks: &mut Tasks,
    token: &CancellationToken,
) {
    let devices = base.devices.clone();
    tasks.add("devices", devices.clone().run(token.clone()));
    let (root_dir, dir, stop) = (
        config.root_dir.clone(),
        config.root_dir.clone(),
        token.clone(),
    );
    let served = Served {
        name: "device plugins",
        without: "device plugins can register by plugins_registry only",
        bind: move || device_plugins::bind(&dir),
        serve: move |socket| device_plugins::serve(socket, root_dir, devices, stop),
    };
    served.start(Arc::clone(&base.clock), tasks, token);
}

/// Containers that run when the agent starts keep their devices.
pub(super) fn resume(devices: &DeviceManager, shown: &[Arc<PodStatus>]) {
    devices.resume(|uid, container| {
        let statuses = shown.iter().filter(|status| status.uid == *uid);
        let mut named = statuses.flat_map(|status| status.containers_named(container));
        named.any(|c| c.state == ContainerState::Running)
    });
}

/// Has device plugins taken that register by `plugins_registry`.
pub(super) fn take_from(drivers: &Drivers, devices: DeviceManager) {
    drivers.hand_on(
        DEVICE_PLUGIN,
        Arc::new(move |plugin: Plugin| {
            let devices = devices.clone();
            let register = async move {
                let versions = &plugin.versions;
                devices
                    .register(&plugin.name, &plugin.endpoint, versions)
                    .await
            };
            register.boxed()
        }),
    );
}

/// Syncs the pods whose devices change, or are back, until `token` is cancelled.
pub(super) async fn follow(devices: DeviceManager, workers: PodWorkers, token: CancellationToken) {
    while let Some(pods) = token.run_until_cancelled(devices.changed()).await {
        for uid in &pods {
            workers.sync(uid);
        }
    }
}
