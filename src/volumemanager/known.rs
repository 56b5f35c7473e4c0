//! What is known of the volumes that there are: which records cannot be read, which devices are in use whatever the
//! records say, and what a record that is left tells of one that is lost.
//!
//! A volume has two records, made and deleted as one: the phase, and the description. Where one of them cannot be read any
//! more, the other one is made whole again if it can be; until then the volume counts as one that may use any device.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use tracing::{info, warn};

use super::error::{VolumeError, io_error};
use super::{HOST_PATH, OWN, VolumeManager, identity, mounts};
use crate::core::state::{State, Transaction, VolumePhase, VolumeRecord};
use crate::core::volumes::Source;
use crate::core::volumes::keys::{self, Mark};
use crate::core::volumes::known::Known;
use crate::core::volumes::planner::Recorded;
use crate::core::volumes::records::{self, Description};
use crate::types::PodUid;

/// Records that lack what tells what they are about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Damaged {
    /// Of a volume: any device may be its own.
    pub(super) volumes: bool,
    /// Of a device: it is not unstaged, and its name is not known.
    pub(super) devices: bool,
}

impl Damaged {
    /// Those of a state.
    pub(super) fn of(seen: &State) -> Self {
        let mut damaged = Self::default();
        for (key, record) in seen.with_prefix::<VolumeRecord>("") {
            if is_whole(seen, key, record) {
                continue;
            }
            match keys::split(key) {
                Some(_) => damaged.volumes = true,
                None => damaged.devices = true,
            }
        }
        for found in records::volumes(seen) {
            damaged.volumes |= seen.record::<VolumeRecord>(&found.key).is_none();
        }
        damaged
    }
}

impl VolumeManager {
    /// Tells how much is known of the volumes of the pods that live. What waited for that is begun.
    pub fn know(&self, known: Known) {
        {
            let mut desk = self.desk();
            if desk.known == known {
                return;
            }
            match &known {
                Known::Nothing => {}
                Known::Living(pods) => {
                    info!(
                        pods = pods.len(),
                        "volumes of pods are not on record yet; nothing is detached meanwhile"
                    );
                }
                Known::All { strays } => info!(strays, "the volumes of all pods are on record"),
            }
            desk.known = known;
        }
        if self.plugins.is_empty() {
            self.tell_in_use();
        } else {
            self.drive();
        }
    }

    /// Devices that no volume on record uses and that are mounted for a pod all the same; all that no volume uses when
    /// nobody knows what is mounted.
    pub(super) fn shown_in_use(
        &self,
        view: Option<&mounts::View>,
        volumes: &BTreeMap<String, Recorded>,
        devices: &BTreeMap<String, Recorded>,
    ) -> BTreeSet<String> {
        let used: BTreeSet<&str> = volumes
            .values()
            .filter_map(|v| v.device.as_deref())
            .collect();
        let idle = devices.iter().filter(|(key, _)| !used.contains(&***key));
        let idle: Vec<(&String, &Recorded)> = idle.collect();
        if idle.is_empty() {
            return BTreeSet::new();
        }
        let for_pods = self.mounted_for_pods();
        let is_used = |device: &Recorded| {
            view.is_none_or(|view| view.is_shown_below(Path::new(&device.path), &for_pods))
        };
        let shown = idle.into_iter().filter(|(_, device)| is_used(device));
        shown.map(|(key, _)| key.clone()).collect()
    }

    /// Returns the directories where pods have mounts of staged volumes: their own directories, and the one where
    /// drivers publish devices.
    fn mounted_for_pods(&self) -> [PathBuf; 2] {
        [
            self.root.join("pods"),
            self.root
                .join("plugins/kubernetes.io/csi/volumeDevices/publish"),
        ]
    }

    /// Makes records whole again whose other half is lost, and drops those of which nothing is there.
    pub(super) fn mend(
        &self,
        seen: &State,
        mut transaction: Transaction,
    ) -> Result<(Transaction, usize), VolumeError> {
        let mut count = 0;
        let table = self.mounts.read();
        let none = PodUid::new("");
        let table = table.map_err(io_error("read the mounts below", &none, &self.root))?;
        for found in records::volumes(seen).chain(records::devices(seen)) {
            if let Err(error) = &found.content {
                warn!(%error, volume = %found.key, "the description of a volume on record cannot be read");
            }
            if seen.record::<VolumeRecord>(&found.key).is_some() {
                continue;
            }
            let Some(record) = self.record_from(&found) else {
                continue;
            };
            info!(
                volume = %found.key,
                "the lost record of a volume is made from its description"
            );
            transaction = transaction.put(&found.key, record);
            count += 1;
        }
        for (key, record) in seen.with_prefix::<VolumeRecord>("") {
            if is_whole(seen, key, record) {
                continue;
            }
            let at = Path::new(&record.path);
            if keys::split(key).is_some() {
                if is_nothing(&table, at).unwrap_or(false) {
                    info!(volume = %key, "a volume whose description is lost is not there; its record goes");
                    transaction = records::forget(transaction, seen, key);
                    count += 1;
                }
                continue;
            }
            let of_volume = records::volumes(seen)
                .filter_map(|found| found.content.ok())
                .find(|content| content.device.as_deref() == Some(key))
                .map(|content| (*content.remote).clone());
            let Some(remote) = of_volume.or_else(|| identity::device_at(&self.root, at)) else {
                warn!(device = %key, path = record.path, "what is staged there is not on record any more; it stays");
                continue;
            };
            if remote.device_key().as_deref() != Some(key) {
                continue;
            }
            let mark = match table.at(at) {
                Ok(Some(_)) => Mark::Mount,
                _ => Mark::Begun,
            };
            info!(device = %key, "the lost description of a device is made anew");
            let described = records::describe(transaction, key, &remote, mark, record.at);
            transaction = described.map_err(|error| undescribed(&none, key, &error))?;
            count += 1;
        }
        Ok((transaction, count))
    }

    /// The record that a description was made with. The phase is as far as its mark tells.
    fn record_from(&self, found: &Description<'_>) -> Option<VolumeRecord> {
        let remote = &*found.content.as_ref().ok()?.remote;
        let path = match (keys::split(&found.key), &remote.source) {
            (Some(_), Source::HostPath { path, .. }) => PathBuf::from(path),
            (Some((uid, _)), _) => self.target(&PodUid::new(uid), remote),
            (None, _) => self.staging(remote)?,
        };
        let phase = match found.mark {
            Mark::Claimed | Mark::Begun => VolumePhase::Mounting,
            Mark::Mount | Mark::Plain => VolumePhase::Mounted,
        };
        Some(VolumeRecord {
            plugin: remote.plugin().to_owned(),
            path: path.to_string_lossy().into_owned(),
            phase,
            at: found.at,
        })
    }
}

/// Returns whether a record belongs to a volume that has a description.
fn is_elsewhere(record: &VolumeRecord) -> bool {
    record.plugin != HOST_PATH && !OWN.contains(&record.plugin.as_str())
}

/// Returns whether the description of a record can be read, if it takes one.
pub(super) fn is_whole(seen: &State, key: &str, record: &VolumeRecord) -> bool {
    !is_elsewhere(record) || records::remote(seen, key).is_some()
}

/// The error of a description that cannot be written.
pub(super) fn undescribed(uid: &PodUid, volume: &str, error: &serde_json::Error) -> VolumeError {
    VolumeError::Unresolved {
        pod: uid.clone(),
        volume: volume.to_owned(),
        why: format!("describe the volume: {error}"),
    }
}

/// Returns whether no trace of a volume exists at its path.
fn is_nothing(table: &mounts::Table, at: &Path) -> std::io::Result<bool> {
    if table.below(at)?.next().is_some() || identity::has_data(at) {
        return Ok(false);
    }
    match std::fs::symlink_metadata(at) {
        Ok(found) => Ok(found.is_dir()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(error),
    }
}
