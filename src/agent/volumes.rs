//! What volumes take: the manager with what mounts storage from elsewhere, and the CSI drivers of this node.

use std::sync::Arc;

use super::start::{Base, Parts};
use crate::core::volumes::CSI;
use crate::kubeletconfig::AgentConfig;
use crate::pod_manager::PodManager;
use crate::types::metrics::Count;
use crate::volumemanager::command::Tools;
use crate::volumemanager::csi::CsiPlugin;
use crate::volumemanager::csi::registry::{Drivers, DriversOptions};
use crate::volumemanager::in_use::Reported;
use crate::volumemanager::remote::RemotePlugin;
use crate::volumemanager::{self, VolumeManager};

/// The volume manager with what mounts storage from elsewhere.
pub(super) fn volume_manager(
    config: &AgentConfig,
    base: &Base,
    drivers: Drivers,
    memory: Option<u64>,
) -> VolumeManager {
    let (root, clock) = (config.root_dir.clone(), Arc::clone(&base.clock));
    VolumeManager::new(root, memory, base.store.clone(), clock)
        .taking_over()
        .measured(base.metrics.clone())
        .telling(Arc::clone(&base.recorder) as _)
        .with_plugin(CSI, csi_plugin(config, base, drivers))
        .with_system_tools(Tools::default())
}

/// Mounts volumes of CSI drivers; with an API server only what it knows to be in use.
fn csi_plugin(config: &AgentConfig, base: &Base, drivers: Drivers) -> Arc<dyn RemotePlugin> {
    let plugin = Arc::new(CsiPlugin::new(drivers, &config.root_dir, &config.node_name));
    match base.api {
        Some(_) => Arc::new(Reported::new(plugin, base.node.clone())),
        None => plugin,
    }
}

/// The CSI drivers of this node: those on record at once.
pub(super) fn csi_drivers(config: &AgentConfig, base: &Base) -> Drivers {
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
