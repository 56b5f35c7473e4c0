//! Looks for what may end back-offs early: the network, the API server, the clock, devices, CSI drivers, images.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use super::Tasks;
use super::base::Base;
use crate::apiserver::{Connection, Reachability};
use crate::core::backoff::early::{Facts, Watch};
use crate::images::ImageChanged;
use crate::kubeletconfig::{AgentConfig, BackOffEarlyEnd};
use crate::pod_workers::{Causes, PodWorkers};
use crate::types::host_addresses::HostAddresses;
use crate::types::{Clock, blocking};
use crate::volumemanager::csi::registry::Drivers;

/// Poll interval of the node; the API server's answers are noticed at once.
const PERIOD: Duration = Duration::from_secs(5);
/// Images that changed and were not reported yet. What does not fit in costs a back-off its early end.
const IMAGES: usize = 64;

/// Creates the workers' memory of such events.
pub(super) fn causes(config: &AgentConfig) -> Causes {
    Causes::new(is_enabled(config))
}

fn is_enabled(config: &AgentConfig) -> bool {
    config.back_off_early_end == BackOffEarlyEnd::Enabled
}

/// Returns a callback for images that changed, and the receiver of their names.
pub(super) fn image_changes() -> (ImageChanged, mpsc::Receiver<String>) {
    let (sender, receiver) = mpsc::channel(IMAGES);
    let tell = move |image: &str| {
        if let Err(error) = sender.try_send(image.to_owned()) {
            debug!(image, %error, "cannot end back-offs for an image that changed");
        }
    };
    (Arc::new(tell), receiver)
}

/// Sources of changes.
pub(super) struct Signals {
    /// Names of images that changed.
    pub(super) images: mpsc::Receiver<String>,
    /// Registry of CSI drivers; a driver that registers may end back-offs.
    pub(super) drivers: Drivers,
}

/// Starts the look-out, unless it is disabled.
pub(super) fn watch(
    config: &AgentConfig,
    base: &Base,
    workers: &PodWorkers,
    signals: Signals,
    tasks: &mut Tasks,
    token: &CancellationToken,
) {
    if !is_enabled(config) {
        return;
    }
    let lookout = Lookout {
        workers: workers.clone(),
        clock: Arc::clone(&base.clock),
        addresses: base.addresses.clone(),
        connection: base.api.as_ref().map(|api| api.connection().clone()),
        drivers: signals.drivers,
        watch: Watch::default(),
    };
    let run = lookout.run(signals.images, token.clone());
    tasks.add("causes of back-offs", run);
}

struct Lookout {
    workers: PodWorkers,
    clock: Arc<dyn Clock>,
    addresses: HostAddresses,
    connection: Option<Connection>,
    drivers: Drivers,
    watch: Watch,
}

impl Lookout {
    async fn run(mut self, mut images: mpsc::Receiver<String>, token: CancellationToken) {
        let mut drivers = self.drivers.changes();
        loop {
            drivers.mark_unchanged();
            self.look().await;
            let due = tokio::time::sleep(PERIOD);
            tokio::select! {
                () = token.cancelled() => return,
                () = due => {}
                () = changed(self.connection.as_ref()) => {}
                // The sender is kept here.
                Ok(()) = drivers.changed() => {}
                Some(image) = images.recv() => self.workers.image_changed(&image),
            }
        }
    }

    async fn look(&mut self) {
        let waiting = self.workers.context().schedule.causes.devices();
        let facts = Facts {
            has_network: self.addresses.has_network(),
            has_api_server: self.connection.as_ref().and_then(answers),
            devices: inodes(waiting.keys().cloned().collect()).await,
            drivers: self
                .drivers
                .registered()
                .into_iter()
                .map(|driver| driver.name)
                .collect(),
        };
        let found = self.watch.look(facts, self.clock.now());
        for cause in found.node {
            info!(what = cause.text, "back-offs may end early");
            self.workers.happened(cause);
        }
        for (path, cause) in found.devices {
            info!(what = cause.text, "back-offs may end early");
            let pods = waiting.get(&path).map(Vec::as_slice).unwrap_or_default();
            self.workers.happened_to(pods, &cause);
        }
    }
}

fn answers(connection: &Connection) -> Option<bool> {
    match connection.now() {
        Reachability::Untried => None,
        Reachability::Up => Some(true),
        Reachability::Down(_) => Some(false),
    }
}

async fn changed(connection: Option<&Connection>) {
    match connection {
        Some(connection) => connection.changed().await,
        None => std::future::pending().await,
    }
}

/// The inode behind each path; links are followed, as udev makes some.
async fn inodes(paths: Vec<PathBuf>) -> BTreeMap<PathBuf, Option<u64>> {
    if paths.is_empty() {
        return BTreeMap::new();
    }
    let read = blocking::run(move || {
        let inode = |path: &PathBuf| std::fs::metadata(path).ok().map(|found| found.ino());
        let found = paths.into_iter().map(|path| (inode(&path), path));
        found.map(|(inode, path)| (path, inode)).collect()
    });
    // Only a runtime that is shutting down cancels blocking work.
    read.await.unwrap_or_default()
}
