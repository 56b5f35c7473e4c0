//! What others ask the manager: which volumes are in use, where they are, how many there are.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;

use super::known::Damaged;
use super::remote::RemoteError;
use super::{PLUGINS, VolumeManager};
use crate::core::state::{State, VolumePhase, VolumeRecord, child_key};
use crate::core::volumes::known::InUse;
use crate::core::volumes::records::{self, Description};
use crate::core::volumes::{Remote, keys};
use crate::kuberuntime::sources::{Resolved, mounted_volumes};
use crate::store::CommitError;
use crate::types::metrics::{Metrics, VolumeStateLabel};
use crate::types::{PodExt, PodUid};

/// A volume of a pod whose storage is elsewhere, as it is on record.
#[derive(Clone, Debug)]
pub struct RemoteVolume {
    /// UID of the pod.
    pub pod: PodUid,
    /// As the pod names it.
    pub volume: String,
    /// Name of the plugin.
    pub plugin: &'static str,
    /// `namespace/name` of the claim, if it has one.
    pub claim: Option<String>,
    /// What containers get.
    pub path: PathBuf,
    /// Where it is staged, if it is.
    pub staged: Option<PathBuf>,
    /// Phase.
    pub phase: VolumePhase,
    /// What it is.
    pub remote: Arc<Remote>,
}

impl VolumeManager {
    /// Names that are in use on this node (`status.volumesInUse`), from before the first step of a mount until after
    /// the last one of its undoing. Whoever detaches must not touch them. The list is not whole while volumes of pods
    /// that live are not known ([`VolumeManager::know`]), or a record of one cannot be read.
    pub fn volumes_in_use(&self) -> watch::Receiver<InUse> {
        self.tell_in_use();
        self.in_use.subscribe()
    }

    pub(super) fn tell_in_use(&self) {
        let mut names = BTreeSet::new();
        // Under the lock of the desk, so that an older state never follows a newer one.
        let desk = self.desk();
        let seen = self.store.snapshot();
        for found in records::volumes(&seen).chain(records::devices(&seen)) {
            let content = found.content.ok();
            names.extend(content.and_then(|content| content.remote.unique_name.clone()));
        }
        let damaged = Damaged::of(&seen);
        let now = InUse {
            names,
            whole: desk.known.is_whole() && damaged == Damaged::default(),
        };
        self.in_use.send_if_modified(|told| {
            let differs = *told != now;
            *told = now;
            differs
        });
    }

    /// All volumes of pods whose storage is elsewhere, mounted or about to be, or about to go.
    pub fn remote_volumes(&self) -> Vec<RemoteVolume> {
        let seen = self.store.snapshot();
        self.listed(&seen, records::volumes(&seen))
    }

    /// Those of one pod.
    pub fn remote_volumes_of(&self, uid: &PodUid) -> Vec<RemoteVolume> {
        let seen = self.store.snapshot();
        self.listed(&seen, records::volumes_of(&seen, uid))
    }

    fn listed<'s>(
        &self,
        seen: &'s State,
        described: impl Iterator<Item = Description<'s>>,
    ) -> Vec<RemoteVolume> {
        let mut all = Vec::new();
        for description in described {
            let (Some((uid, volume)), Some(found), Ok(content)) = (
                keys::split(&description.key),
                seen.record::<VolumeRecord>(&description.key),
                description.content,
            ) else {
                continue;
            };
            let remote = content.remote;
            all.push(RemoteVolume {
                pod: PodUid::new(uid),
                volume: volume.to_owned(),
                plugin: remote.plugin(),
                claim: remote.claim.clone(),
                path: PathBuf::from(&found.path),
                staged: self.staging(&remote),
                phase: found.phase,
                remote,
            });
        }
        all
    }

    /// Returns the size of a device on this node, in bytes; `None` when that is not on record. Each node that has shared storage mounted grows
    /// its own file system, while the claim tells of one of them.
    pub fn size_here(&self, remote: &Remote) -> Option<u64> {
        records::size(&self.store.snapshot(), &remote.device_key()?)
    }

    /// Records how many bytes a device has here; nothing of what is not staged.
    ///
    /// # Errors
    /// It is not on record.
    pub async fn note_size(&self, remote: &Remote, bytes: u64) -> Result<(), CommitError> {
        let seen = self.store.snapshot();
        let device = remote.device_key();
        let note = device.and_then(|d| records::note_size(&seen, &d, bytes, self.clock.now()));
        match note {
            Some(note) => self.store.commit(note).await.map(drop),
            None => Ok(()),
        }
    }

    /// Has a mounted volume grown to `bytes`; `None` when there was nothing to do. Nothing else is done to it in the
    /// meantime.
    /// When dropped, the step goes on to its end.
    ///
    /// # Errors
    /// When the volume is not mounted, or its plugin says so.
    pub async fn expand(
        &self,
        uid: &PodUid,
        volume: &str,
        resolved: Arc<Resolved>,
        bytes: u64,
    ) -> Result<Option<u64>, RemoteError> {
        let remote = &resolved.remote;
        let plugin = self.plugins.get(remote.plugin()).cloned();
        let plugin = plugin.ok_or_else(|| {
            RemoteError::Waiting(format!("this agent has no plugin for {}", remote.plugin()))
        })?;
        let device = remote.device_key();
        let (staged, path) = (self.staging(remote), self.target(uid, remote));
        let key = child_key(uid, volume);
        let seen = self.store.snapshot();
        let mounted = seen.record::<VolumeRecord>(&key);
        if mounted.is_none_or(|r| r.phase != VolumePhase::Mounted) {
            return Err(RemoteError::Waiting("it is not mounted".to_owned()));
        }
        let label = super::steps::label(remote);
        let manager = self.clone();
        let ended = |error: String| RemoteError::Uncertain(error);
        let work = async move {
            let work = plugin.expand(Arc::clone(&resolved), staged, path, bytes);
            let begun = tokio::time::Instant::now();
            // One at a time for all pods that use it.
            let done = match device {
                Some(device) => {
                    let freed = manager.clone();
                    let running = manager.operations.run_then(
                        &device,
                        "expand_volume",
                        work,
                        // Any pod's volume may wait for it.
                        move || freed.drive(),
                    );
                    running.await.unwrap_or_else(|e| Err(ended(e.to_string())))
                }
                None => work.await,
            };
            manager.observe("expand_volume", &label, begun, done.is_ok());
            done
        };
        let freed = self.clone();
        let after = move || freed.drive();
        let running = (self.operations).run_then(&key, "expand_volume", work, after);
        let done = running.await;
        done.unwrap_or_else(|e| Err(ended(e.to_string())))
    }
}

const ACTUAL: &str = "actual_state_of_world";
const DESIRED: &str = "desired_state_of_world";

/// Counts volumes by plugin, as they are on record and as pods want them. For whoever is about to show the metrics.
pub fn count(state: &State, pods: &[Arc<Pod>], metrics: &Metrics) {
    let mut counts: BTreeMap<(String, &'static str), i64> = BTreeMap::new();
    for plugin in PLUGINS {
        for world in [ACTUAL, DESIRED] {
            counts.insert((plugin.to_owned(), world), 0);
        }
    }
    for (key, record) in state.with_prefix::<VolumeRecord>("") {
        if record.phase == VolumePhase::Mounted && keys::split(key).is_some() {
            let plugin = label_of(state, key).unwrap_or_else(|| record.plugin.clone());
            *counts.entry((plugin, ACTUAL)).or_default() += 1;
        }
    }
    for pod in pods {
        let mounted = mounted_volumes(pod);
        for volume in pod.spec_ref().volumes.iter().flatten() {
            if !mounted.contains(volume.name.as_str()) {
                continue;
            }
            let own = super::plugin_of(volume).map(str::to_owned);
            // Which plugin a claim leads to is known once it was resolved.
            let plugin = own.or_else(|| label_of(state, &child_key(&pod.uid(), &volume.name)));
            if let Some(plugin) = plugin {
                *counts.entry((plugin, DESIRED)).or_default() += 1;
            }
        }
    }
    let family = &metrics.volume_manager_total_volumes;
    family.clear();
    for ((plugin_name, world), count) in counts {
        let label = VolumeStateLabel {
            plugin_name,
            state: world.to_owned(),
        };
        family.get_or_create(&label).set(count);
    }
}

/// The plugin of a volume whose storage is elsewhere, as metrics name it.
fn label_of(state: &State, key: &str) -> Option<String> {
    let remote = records::remote(state, key)?;
    Some(super::steps::label(&remote))
}
