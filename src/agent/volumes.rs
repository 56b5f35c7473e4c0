//! Builds the parts for volumes: the manager, the plugins for remote volumes, and the registry of the node's CSI
//! drivers.

use std::sync::Arc;

use arc_swap::ArcSwap;
use k8s_openapi::api::core::v1::Node;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::base::{Base, Parts};
use super::{Tasks, api, devices, dra};
use crate::core::volumes::{CSI, ISCSI};
use crate::kubeletconfig::AgentConfig;
use crate::kuberuntime::node_context::SharedFacts;
use crate::kuberuntime::resources::value;
use crate::pod_manager::PodManager;
use crate::types::causes;
use crate::types::metrics::Count;
use crate::volumemanager::attached::Attached;
use crate::volumemanager::command::Tools;
use crate::volumemanager::csi::CsiPlugin;
use crate::volumemanager::csi::registry::{Drivers, DriversOptions};
use crate::volumemanager::in_use::Reported;
use crate::volumemanager::iscsi::IscsiPlugin;
use crate::volumemanager::remote::RemotePlugin;
use crate::volumemanager::{self, MemoryForPods, VolumeManager};

/// The most a tmpfs may hold, in bytes: what the node has for pods (`status.allocatable`), or all of its memory
/// where nothing is left for them or nothing is known.
fn memory_for_pods(node: &Node, capacity: Option<u64>) -> Option<u64> {
    let status = node.status.as_ref();
    let allocatable = status.and_then(|s| s.allocatable.as_ref()?.get("memory"));
    let bytes = allocatable.and_then(|quantity| value(quantity).ok());
    let bytes = bytes.and_then(|bytes| u64::try_from(bytes).ok());
    bytes.into_iter().chain(capacity).find(|bytes| *bytes > 0)
}

/// Returns what asks for [`memory_for_pods`] of the machine as it is then.
pub(super) fn following(node: &Arc<ArcSwap<Node>>, machine: &SharedFacts) -> MemoryForPods {
    let (node, machine) = (Arc::clone(node), machine.clone());
    Arc::new(move || memory_for_pods(&node.load(), machine.get().memory()))
}

/// Builds the volume manager, starts the tasks of CSI drivers, and compares the records of volumes with what is mounted. Returns the
/// manager with the registry of drivers, which serves device plugins and DRA drivers too.
pub(super) async fn build(
    config: &AgentConfig,
    base: &Base,
    memory: MemoryForPods,
    tasks: &mut Tasks,
    token: &CancellationToken,
) -> (VolumeManager, Drivers) {
    let drivers = csi_drivers(config, base);
    devices::take_from(&drivers, base.devices.clone());
    dra::take_from(&drivers, base, tasks, token);
    tasks.add("csi drivers", drivers.clone().run(token.clone()));
    let volumes = volume_manager(config, base, drivers.clone(), memory);
    if let Err(error) = volumes.reconcile().await {
        warn!(
            error = causes(&error),
            "volumes differ from their records, their pods wait"
        );
    }
    tasks.add(
        "volumes in use",
        api::tell_volumes_in_use(volumes.clone(), base.volumes_in_use.clone(), token.clone()),
    );
    // Nobody else sets it.
    drop(base.volumes.set(volumes.clone()));
    (volumes, drivers)
}

/// The volume manager with what mounts storage from elsewhere.
fn volume_manager(
    config: &AgentConfig,
    base: &Base,
    drivers: Drivers,
    memory: MemoryForPods,
) -> VolumeManager {
    let (root, clock) = (config.root_dir.clone(), Arc::clone(&base.clock));
    let csi = CsiPlugin::new(drivers, &config.root_dir, &config.node_name);
    let known = Attached::new(base.store.clone(), Arc::clone(&clock));
    let iscsi = IscsiPlugin::new(Tools::default(), known);
    VolumeManager::new(root, None, base.store.clone(), clock)
        .following_memory(memory)
        .taking_over()
        .measured(base.metrics.clone())
        .telling(Arc::clone(&base.recorder) as _)
        .with_system_tools(Tools::default())
        .with_plugin(CSI, attached(base, Arc::new(csi)))
        .with_plugin(ISCSI, attached(base, Arc::new(iscsi)))
}

/// A plugin for what is attached: with an API server it mounts only what that knows to be in use.
fn attached(base: &Base, plugin: Arc<dyn RemotePlugin>) -> Arc<dyn RemotePlugin> {
    match base.api {
        Some(_) => Arc::new(Reported::new(plugin, base.node.clone())),
        None => plugin,
    }
}

/// The CSI drivers of this node: the recorded ones at once.
fn csi_drivers(config: &AgentConfig, base: &Base) -> Drivers {
    Drivers::new(DriversOptions {
        root_dir: config.root_dir.clone(),
        node_name: config.node_name.clone(),
        store: base.store.clone(),
        clock: Arc::clone(&base.clock),
        api: base.api.clone(),
        node: base.node.clone(),
        metrics: base.metrics.clone(),
    })
}

/// Volumes are counted when somebody looks, not all the time.
pub(super) fn counting(parts: &Parts, pods: PodManager) -> Arc<Count> {
    let (store, metrics) = (parts.store.clone(), parts.metrics.clone());
    let count: Arc<Count> =
        Arc::new(move || volumemanager::count(&store.snapshot(), &pods.all(), &metrics));
    parts.metrics.counting(&count);
    count
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn no_tmpfs_holds_more_than_pods_may_have_of_the_node() {
        let node = |status: serde_json::Value| -> Node {
            serde_json::from_value(json!({"metadata": {}, "status": status})).unwrap()
        };
        for (status, bytes) in [
            (
                json!({"capacity": {"memory": "4Gi"}, "allocatable": {"memory": "3Gi"}}),
                Some(3 << 30),
            ),
            (json!({"allocatable": {"memory": "0"}}), Some(8)),
            (json!({}), Some(8)),
        ] {
            assert_eq!(memory_for_pods(&node(status), Some(8)), bytes);
        }
        assert_eq!(memory_for_pods(&node(json!({})), None), None);
    }
}
