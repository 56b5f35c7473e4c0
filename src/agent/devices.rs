//! Setup of device plugins: the manager, the registration socket, and syncs of pods whose devices change.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

use futures::FutureExt;
use nix::fcntl::OFlag;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::Tasks;
use super::base::{Base, Parts};
use super::directories::Served;
use crate::devicemanager::{
    DEVICE_PLUGIN, DeviceManager, DeviceManagerOptions, KUBELET_CHECKPOINT, KubeletCheckpoint,
};
use crate::kubeletconfig::AgentConfig;
use crate::pod_workers::PodWorkers;
use crate::server::device_plugins;
use crate::store::CommitError;
use crate::types::runtime::{ContainerState, PodStatus};
use crate::types::{blocking, causes};
use crate::volumemanager::csi::registry::{Drivers, Plugin};

/// Longest checkpoint of a kubelet that is read, in bytes.
const MAX_CHECKPOINT: u64 = 64 << 20;

/// The manager, with the recorded resources.
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
        without: "cannot serve device plugins on their own socket, they can only register through plugins_registry",
        bind: move || device_plugins::bind(&dir),
        serve: move |socket| device_plugins::serve(socket, root_dir, devices, stop),
    };
    served.start(Arc::clone(&base.clock), tasks, token);
}

/// Lets containers that run when the agent starts keep their devices, also those of a kubelet that this agent replaces.
///
/// # Errors
/// When the store takes no commit.
pub(super) async fn resume(
    config: &AgentConfig,
    devices: &DeviceManager,
    shown: &[Arc<PodStatus>],
) -> Result<(), CommitError> {
    let path = config
        .root_dir
        .join("device-plugins")
        .join(KUBELET_CHECKPOINT);
    if let Some(checkpoint) = kubelet_checkpoint(&path).await {
        let is_running = |status: &&Arc<PodStatus>| {
            let mut containers = status.containers.iter();
            containers.any(|c| c.state == ContainerState::Running)
        };
        let running = shown.iter().filter(is_running);
        let running: Vec<_> = running
            .map(|status| (status.uid.clone(), status.namespace.clone()))
            .collect();
        for uid in devices.take_over(&checkpoint, &running).await? {
            info!(pod = %uid, "reconstructed the pod's devices from a kubelet's checkpoint");
        }
    }
    devices.resume(|uid, container| {
        let statuses = shown.iter().filter(|status| status.uid == *uid);
        let mut named = statuses.flat_map(|status| status.containers_named(container));
        named.any(|c| c.state == ContainerState::Running)
    });
    Ok(())
}

/// Reads the checkpoint of a kubelet, if there is one.
async fn kubelet_checkpoint(path: &Path) -> Option<KubeletCheckpoint> {
    let path = path.to_owned();
    let read = blocking::run(move || {
        // Plugins write to this directory: a pipe must not hold up the start.
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(OFlag::O_NONBLOCK.bits());
        let file = options.open(&path)?;
        let mut data = Vec::new();
        file.take(MAX_CHECKPOINT).read_to_end(&mut data)?;
        Ok::<_, std::io::Error>(data)
    });
    let why = match read.await {
        Ok(Ok(data)) => match KubeletCheckpoint::parse(&data) {
            Ok(checkpoint) => return Some(checkpoint),
            Err(error) => causes(&error),
        },
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::NotFound => return None,
        Ok(Err(error)) => causes(&error),
        Err(error) => causes(&error),
    };
    warn!(
        file = KUBELET_CHECKPOINT,
        error = why,
        "cannot read the devices that a kubelet has allocated to running pods, so other pods may get them too: \
         restart pods with devices"
    );
    None
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_pipe_in_place_of_a_checkpoint_does_not_hold_up_the_start() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(KUBELET_CHECKPOINT);
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let read = tokio::time::timeout(Duration::from_secs(10), kubelet_checkpoint(&path));
        let Ok(read) = read.await else {
            // Lets the reader go, which the end of the test would wait for.
            drop(OpenOptions::new().write(true).open(&path));
            panic!("the pipe is waited for");
        };
        assert!(read.is_none());
    }
}
