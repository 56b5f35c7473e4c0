//! Usage and size of remote volumes, by their drivers or else by their file systems; upstream's `volumeStatCalculator`
//! for those, and its collector of `kubelet_volume_stats_*`.
//!
//! The input is the mounted volumes, and the drivers that can report on them. The output is the newest usage of each.
//!
//! **Invariant:** no caller waits longer than [`PATIENCE`] for a volume, and that only once: one that hangs (a dead
//! server) is not asked again before it has answered, and holds one thread at most.

use std::collections::HashMap;
use std::io::{self, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;
use tracing::debug;

use super::exposition::{Exposition, Kind};
use super::model::Fs;
use super::resource::number;
use super::storage::{VolumeUsage, space_of};
use crate::core::state::VolumePhase;
use crate::core::volumes::{Source, VolumeMode};
use crate::types::{Clock, PodUid};
use crate::volumemanager::remote::{RemoteError, Usage};
use crate::volumemanager::{RemoteVolume, VolumeManager};

/// Largest age of a usage; upstream's `volumeStatsAggPeriod`.
const MAX_AGE: Duration = Duration::from_secs(60);
/// Time for which a caller waits for new ones.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time limit of a driver.
const DEADLINE: Duration = Duration::from_secs(30);

/// The manager of volumes, once there is one.
pub type VolumesSlot = Arc<OnceLock<VolumeManager>>;

/// Source of the remote volumes.
pub trait RemoteVolumes: Send + Sync + 'static {
    /// Returns the mounted volumes that have figures. Reads no volume.
    fn mounted(&self) -> Vec<RemoteVolume>;

    /// Returns the usage that the volume's driver reports; `Ok(None)` when only the file system can report it.
    fn usage(
        &self,
        volume: &RemoteVolume,
    ) -> BoxFuture<'static, Result<Option<Usage>, RemoteError>>;
}

impl RemoteVolumes for OnceLock<VolumeManager> {
    fn mounted(&self) -> Vec<RemoteVolume> {
        let mut all = self
            .get()
            .map(VolumeManager::remote_volumes)
            .unwrap_or_default();
        // What a path of the node is on, is the node's.
        all.retain(|volume| {
            volume.phase == VolumePhase::Mounted
                && !matches!(volume.remote.source, Source::HostPath { .. })
        });
        all
    }

    fn usage(
        &self,
        volume: &RemoteVolume,
    ) -> BoxFuture<'static, Result<Option<Usage>, RemoteError>> {
        match self.get() {
            Some(manager) => manager.usage(volume),
            None => Box::pin(async { Ok(None) }),
        }
    }
}

/// A volume's figures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteUsage {
    /// Its pod.
    pub pod: PodUid,
    /// The figures.
    pub volume: VolumeUsage,
}

/// Asks, at most once at a time per volume.
#[derive(Clone)]
pub(super) struct RemoteFigures {
    volumes: Arc<dyn RemoteVolumes>,
    clock: Arc<dyn Clock>,
    known: Arc<Mutex<HashMap<(PodUid, String), Entry>>>,
    answered: watch::Sender<()>,
}

#[derive(Default)]
struct Entry {
    path: PathBuf,
    /// Time of the last request.
    asked: Option<Instant>,
    busy: bool,
    figures: Option<(Fs, Option<bool>)>,
}

impl RemoteFigures {
    pub(super) fn new(volumes: Arc<dyn RemoteVolumes>, clock: Arc<dyn Clock>) -> Self {
        Self {
            volumes,
            clock,
            known: Arc::default(),
            answered: watch::Sender::new(()),
        }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<(PodUid, String), Entry>> {
        // Entries are changed field by field, each on its own.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Figures of the last minute, or new ones of those that answer soon, or else the last ones. Cancel-safe.
    pub(super) async fn get(&self) -> Vec<RemoteUsage> {
        let mounted = self.volumes.mounted();
        let mut answered = self.answered.subscribe();
        for volume in &mounted {
            self.ask(volume);
        }
        let keys: Vec<_> = mounted.iter().map(key).collect();
        self.known()
            .retain(|key, entry| entry.busy || keys.contains(key));
        while let Some(until) = self.waits_until(&keys) {
            let changed = tokio::time::timeout_at(until, answered.changed()).await;
            if changed.is_err() {
                debug!("volumes are slow to report their usage");
            }
        }
        let known = self.known();
        let figures = |volume: &RemoteVolume| {
            let entry = known.get(&key(volume))?;
            let (fs, abnormal) = entry.figures.clone()?;
            let claim = volume.claim.as_deref();
            Some(RemoteUsage {
                pod: volume.pod.clone(),
                volume: VolumeUsage {
                    name: volume.volume.clone(),
                    memory: false,
                    fs,
                    claim: claim.and_then(|claim| {
                        let (namespace, name) = claim.split_once('/')?;
                        Some((namespace.to_owned(), name.to_owned()))
                    }),
                    abnormal,
                },
            })
        };
        mounted.iter().filter_map(figures).collect()
    }

    /// Returns the end of the wait for the volumes that were asked a moment ago; `None` if there are none.
    fn waits_until(&self, keys: &[(PodUid, String)]) -> Option<Instant> {
        let (known, now) = (self.known(), Instant::now());
        let until = keys.iter().filter_map(|key| {
            let entry = known.get(key).filter(|entry| entry.busy)?;
            Some(entry.asked? + PATIENCE)
        });
        until.filter(|until| *until > now).max()
    }

    /// Asks about a volume, unless that was done a moment ago or goes on.
    fn ask(&self, volume: &RemoteVolume) {
        {
            let mut known = self.known();
            let entry = known.entry(key(volume)).or_default();
            if entry.path != volume.path {
                entry.path.clone_from(&volume.path);
                entry.figures = None;
                entry.asked = None;
            }
            let fresh = entry.asked.is_some_and(|at| at.elapsed() < MAX_AGE);
            if entry.busy || fresh {
                return;
            }
            entry.busy = true;
            entry.asked = Some(Instant::now());
        }
        let (this, volume) = (self.clone(), volume.clone());
        tokio::spawn(async move {
            let busy = Busy(&this, &volume);
            let figures = this.measure(&volume).await;
            if let Some(entry) = this.known().get_mut(&key(&volume))
                && let Some(figures) = figures
                && entry.path == volume.path
            {
                entry.figures = Some(figures);
            }
            drop(busy);
        });
    }

    async fn measure(&self, volume: &RemoteVolume) -> Option<(Fs, Option<bool>)> {
        let told = tokio::time::timeout(DEADLINE, self.volumes.usage(volume)).await;
        let at_ms = self.clock.now().wall_ms;
        match told {
            Ok(Ok(Some(usage))) => Some((of_driver(usage, at_ms), Some(usage.abnormal))),
            Ok(Ok(None)) => look(volume, at_ms).await.map(|fs| (fs, None)),
            Ok(Err(error)) => {
                debug!(pod = %volume.pod, volume = volume.volume, %error, "the driver does not report the usage of a volume");
                None
            }
            Err(_) => {
                debug!(pod = %volume.pod, volume = volume.volume, "the driver does not report the usage of a volume in time");
                None
            }
        }
    }
}

/// It can be asked about again.
struct Busy<'a>(&'a RemoteFigures, &'a RemoteVolume);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        if let Some(entry) = self.0.known().get_mut(&key(self.1)) {
            entry.busy = false;
        }
        self.0.answered.send_replace(());
    }
}

fn key(volume: &RemoteVolume) -> (PodUid, String) {
    (volume.pod.clone(), volume.volume.clone())
}

fn of_driver(usage: Usage, at_ms: i64) -> Fs {
    Fs {
        at_ms,
        device: String::new(),
        available: usage.available,
        capacity: usage.capacity,
        used: usage.used,
        inodes_free: usage.inodes_free,
        inodes: usage.inodes,
        inodes_used: usage.inodes_used,
    }
}

/// Asks the file system, or the device for its size, in a thread of its own: it may never end, and the agent does not
/// wait for it when it does.
async fn look(volume: &RemoteVolume, at_ms: i64) -> Option<Fs> {
    let (path, mode) = (volume.path.clone(), volume.remote.mode);
    let (answer, answered) = oneshot::channel();
    let thread = std::thread::Builder::new().name("volume-figures".to_owned());
    let started = thread.spawn(move || {
        let found = match mode {
            VolumeMode::Filesystem => space_of(&path, at_ms),
            VolumeMode::Block => size_of_device(&path).ok().map(|capacity| Fs {
                at_ms,
                capacity: Some(capacity),
                ..Fs::default()
            }),
        };
        // Nobody waits any more when the agent ends.
        drop(answer.send(found));
    });
    if let Err(error) = started {
        debug!(%error, "cannot measure a volume");
        return None;
    }
    answered.await.ok().flatten()
}

fn size_of_device(path: &Path) -> io::Result<u64> {
    std::fs::File::open(path)?.seek(SeekFrom::End(0))
}

/// Name of a figure, its help text, and its value.
type Figure = (&'static str, &'static str, fn(&VolumeUsage) -> Option<u64>);

const FIGURES: [Figure; 7] = [
    (
        "kubelet_volume_stats_available_bytes",
        "Number of available bytes in the volume",
        |v| v.fs.available,
    ),
    (
        "kubelet_volume_stats_capacity_bytes",
        "Capacity in bytes of the volume",
        |v| v.fs.capacity,
    ),
    (
        "kubelet_volume_stats_health_status_abnormal",
        "Abnormal volume health status. The count is either 1 or 0. 1 indicates the volume is unhealthy, 0 indicates volume is healthy",
        |v| v.abnormal.map(u64::from),
    ),
    (
        "kubelet_volume_stats_inodes",
        "Maximum number of inodes in the volume",
        |v| v.fs.inodes,
    ),
    (
        "kubelet_volume_stats_inodes_free",
        "Number of free inodes in the volume",
        |v| v.fs.inodes_free,
    ),
    (
        "kubelet_volume_stats_inodes_used",
        "Number of used inodes in the volume",
        |v| v.fs.inodes_used,
    ),
    (
        "kubelet_volume_stats_used_bytes",
        "Number of used bytes in the volume",
        |v| v.fs.used,
    ),
];

/// Writes the families of volumes that have claims; a claim of several pods once.
pub(super) fn encode(text: &mut Exposition, volumes: &[RemoteUsage]) {
    let mut claims: Vec<(&(String, String), &VolumeUsage)> = volumes
        .iter()
        .filter_map(|v| Some((v.volume.claim.as_ref()?, &v.volume)))
        .collect();
    claims.sort_by_key(|(claim, _)| *claim);
    claims.dedup_by_key(|(claim, _)| *claim);
    for (name, help, figure) in FIGURES {
        let mut family = text.family(name, Kind::Gauge, help);
        for ((namespace, claim), volume) in &claims {
            if let Some(value) = figure(volume) {
                let labels = [
                    ("namespace", namespace.as_str()),
                    ("persistentvolumeclaim", claim.as_str()),
                ];
                family.sample(&labels, number(value));
            }
        }
    }
}

#[cfg(test)]
#[path = "claims_tests.rs"]
mod tests;
