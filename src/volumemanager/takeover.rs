//! Taking over what is mounted for pods and is not on record: after the store was lost, with an old one, and of the
//! kubelet that was here before.
//!
//! In: traces on disk, and what a pod's volumes lead to. Out: the records that mounting would have left. Nothing is
//! mounted and no driver is called: what is there is compared with the mount table and taken as it is.
//!
//! **Invariant:** only what the mount table or the driver's data shows at the very place of a volume is recorded, as
//! the only one who works on it; whoever mounts records first, so what is mounted and not on record is a former life's.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tracing::{info, warn};

use super::error::{VolumeError, io_error};
use super::known::{is_whole, undescribed};
use super::operations::Taken;
use super::{HOST_PATH, OWN, VolumeManager, check_name, dirs_in, identity, mounts, run_blocking};
use crate::core::state::{State, Transaction, VolumePhase, VolumeRecord, child_key};
use crate::core::volumes::keys::Mark;
use crate::core::volumes::{CSI, Remote, Source, VolumeMode, records};
use crate::types::{PodUid, causes};

/// How long what another operation works on is waited for.
const PATIENCE: Duration = Duration::from_secs(10);

/// Something on disk of a pod's volume whose storage is elsewhere, without a record that could be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// Name of the plugin, as its directory says.
    pub plugin: String,
    /// The volume's directory: the name of the persistent volume, or of the pod's volume.
    pub name: String,
    /// Where containers get it from.
    pub path: PathBuf,
    /// Files or a device.
    pub mode: VolumeMode,
}

impl VolumeManager {
    /// Returns the leftovers of unrecorded volumes on disk, by pod. Looks at the agent's own directories and the mount
    /// table only.
    ///
    /// # Errors
    /// When these cannot be read.
    pub async fn traces(&self) -> Result<BTreeMap<PodUid, Vec<Trace>>, VolumeError> {
        let mut found = BTreeMap::new();
        for uid in self.pods_on_disk()? {
            let traces = self.traces_of(&uid).await?;
            if !traces.is_empty() {
                found.insert(uid, traces);
            }
        }
        Ok(found)
    }

    /// The same of one pod.
    pub(super) async fn traces_of(&self, uid: &PodUid) -> Result<Vec<Trace>, VolumeError> {
        check_name(uid, uid.as_str())?;
        let (dir, source, of) = (self.pod_dir(uid), self.mounts.clone(), uid.clone());
        let found = run_blocking(move || {
            look(&dir, &source).map_err(io_error("list volumes in", &of, &dir))
        });
        let mut found = found.await?;
        if found.is_empty() {
            return Ok(found);
        }
        // After the disk was read: a record is made before anything on disk is.
        let seen = self.store.snapshot();
        let prefix = child_key(uid, "");
        for (key, record) in seen.with_prefix::<VolumeRecord>(&prefix) {
            if is_whole(&seen, key, record) {
                found.retain(|trace| trace.path != Path::new(&record.path));
            }
        }
        Ok(found)
    }

    /// Records the volume `volume` of a pod, which is `remote`, and its device, if it is there and not on record.
    /// Returns whether it is on record now.
    ///
    /// # Errors
    /// When the mount table cannot be read or a record not committed, or another operation on the volume or its device
    /// takes long.
    pub async fn take_over(
        &self,
        uid: &PodUid,
        volume: &str,
        remote: &Remote,
    ) -> Result<bool, VolumeError> {
        check_name(uid, volume)?;
        check_name(uid, &remote.name)?;
        if let Source::Csi(csi) = &remote.source {
            check_name(uid, &csi.source.driver)?;
        }
        let (key, path) = (child_key(uid, volume), self.target(uid, remote));
        let device = remote.device_key();
        let text = path.to_string_lossy().into_owned();
        let on = [Some(key.as_str()), Some(text.as_str()), device.as_deref()];
        let on: Vec<&str> = on.into_iter().flatten().collect();
        let taken = self.taken(&on);
        let Ok(taken) = tokio::time::timeout(PATIENCE, taken).await else {
            // Whether it will be on record is for the other operation to say.
            return Err(VolumeError::Slow {
                pod: uid.clone(),
                volumes: volume.to_owned(),
                seconds: PATIENCE.as_secs(),
            });
        };
        let (manager, pod, remote, at) = (self.clone(), uid.clone(), remote.clone(), path.clone());
        let found = run_blocking(move || manager.taking(&pod, &key, &remote, &at));
        let recorded = match found.await? {
            Found::Recorded => true,
            Found::Nothing => false,
            Found::There(transaction) => {
                self.commit(uid, volume, *transaction).await?;
                info!(pod = %uid, volume, at = %path.display(), "took over a volume that was not on record");
                true
            }
        };
        drop(taken);
        if self.plugins.is_empty() {
            self.tell_in_use();
        }
        Ok(recorded)
    }

    /// Waits until nobody else works on any of these; their end drives on.
    async fn taken(&self, on: &[&str]) -> Taken {
        let taken = self.operations.taken(on, "take_over").await;
        let manager = self.clone();
        // What is taken over may be what others wait for.
        taken.then(move || manager.drive())
    }

    /// Looks for a volume at its place. Blocking.
    fn taking(
        &self,
        uid: &PodUid,
        key: &str,
        remote: &Remote,
        path: &Path,
    ) -> Result<Found, VolumeError> {
        let table = self.mounts.read();
        let table = table.map_err(io_error("read the mounts below", uid, &self.root))?;
        let seen = self.store.snapshot();
        if let Some(known) = whole_record(&seen, key) {
            return Ok(match Path::new(&known.path) == path {
                true => Found::Recorded,
                false => Found::Nothing,
            });
        }
        let mounted = table.at(path);
        let mounted = mounted
            .map_err(io_error("look at volume", uid, path))?
            .is_some();
        let data = match &remote.source {
            Source::Csi(_) => identity::data_of(&self.root, path, &remote.name, remote.mode),
            _ => None,
        };
        if let (Source::Csi(csi), Some(data)) = (&remote.source, &data)
            && (&data.driver_name, &data.volume_handle)
                != (&csi.source.driver, &csi.source.volume_handle)
        {
            return Ok(Found::Nothing);
        }
        let linked = remote.mode == VolumeMode::Block
            && fs::symlink_metadata(path).is_ok_and(|m| !m.is_dir());
        let (phase, mark) = match (mounted, linked) {
            (true, _) => (VolumePhase::Mounted, Mark::Mount),
            (_, true) => (VolumePhase::Mounted, Mark::Plain),
            // A driver may have been called for it.
            _ if data.is_some() => (VolumePhase::Mounting, Mark::Begun),
            _ => return Ok(Found::Nothing),
        };
        let mut transaction =
            Transaction::new().journal(Some(uid), "volume taken over", path.display().to_string());
        transaction = self.add(transaction, uid, key, remote, (path, phase, mark))?;
        if let (Some(device), Some(at)) = (remote.device_key(), self.staging(remote))
            && whole_record(&seen, &device).is_none()
        {
            let staged = table.at(&at);
            let staged = staged
                .map_err(io_error("look at volume", uid, &at))?
                .is_some();
            let mark = match (staged, &remote.source) {
                (true, _) => Some(Mark::Mount),
                // Not all drivers stage.
                (false, Source::Csi(_)) => identity::has_data(&at).then_some(Mark::Plain),
                // Wherever else it is mounted, that is not this agent's to undo.
                (false, _) => None,
            };
            if let Some(mark) = mark {
                let found = (at.as_path(), VolumePhase::Mounted, mark);
                transaction = self.add(transaction, uid, &device, remote, found)?;
            }
        }
        Ok(Found::There(Box::new(transaction)))
    }

    fn add(
        &self,
        transaction: Transaction,
        uid: &PodUid,
        key: &str,
        remote: &Remote,
        found: (&Path, VolumePhase, Mark),
    ) -> Result<Transaction, VolumeError> {
        let put = records::put(transaction, key, remote, found, self.clock.now());
        put.map_err(|error| undescribed(uid, &remote.name, &error))
    }

    /// Records what is on disk of a pod's volumes as far as the layout alone tells what it is: of a pod that is gone or
    /// ends, or whose spec does not name it. Returns what stays unknown.
    ///
    /// # Errors
    /// When directories or the mount table cannot be read or a record not committed.
    pub async fn take_over_by_layout(&self, uid: &PodUid) -> Result<Vec<Trace>, VolumeError> {
        let traces = self.traces_of(uid).await?;
        let mut left = Vec::new();
        for trace in traces {
            let (manager, of, at) = (self.clone(), uid.clone(), trace.clone());
            let remote = run_blocking(move || {
                let table = manager.mounts.read();
                let table = table.map_err(io_error("read the mounts below", &of, &manager.root))?;
                Ok(identity::of(&manager.root, &at, &table))
            });
            let known = match remote.await? {
                Some(remote) if self.target(uid, &remote) == trace.path => {
                    let volume = self.name_for(uid, &trace);
                    self.take_over(uid, &volume, &remote).await?
                }
                _ => false,
            };
            if !known {
                left.push(trace);
            }
        }
        Ok(left)
    }

    /// Returns the name for the volume of a leftover mount: the recorded one if only the description is lost, else that
    /// of its directory. No volume of a pod has a `~` in its name.
    fn name_for(&self, uid: &PodUid, trace: &Trace) -> String {
        let seen = self.store.snapshot();
        let prefix = child_key(uid, "");
        let mut records = seen.with_prefix::<VolumeRecord>(&prefix);
        let on_record = records.find(|(_, r)| Path::new(&r.path) == trace.path);
        if let Some((key, _)) = on_record {
            return key[prefix.len()..].to_owned();
        }
        match seen.record::<VolumeRecord>(&child_key(uid, &trace.name)) {
            None => trace.name.clone(),
            Some(_) => format!("{}~found", trace.name),
        }
    }

    /// Records what a pod that ends has left, as far as it can be told. Returns the rest, which stays.
    pub(super) async fn take_over_what_is_left(&self, uid: &PodUid) -> Vec<Trace> {
        match self.take_over_by_layout(uid).await {
            Ok(left) => left,
            Err(error) => {
                // Nothing is removed that holds something.
                warn!(pod = %uid, error = causes(&error), "cannot look for volumes that are not on record");
                Vec::new()
            }
        }
    }

    /// Adds what CSI drivers have staged and is not on record: the volumes of its pods may be gone.
    pub(super) fn add_staged(
        &self,
        seen: &State,
        mut transaction: Transaction,
    ) -> Result<(Transaction, usize), VolumeError> {
        let (none, dir) = (PodUid::new(""), self.root.join("plugins").join(CSI));
        let table = self.mounts.read();
        let table = table.map_err(io_error("read the mounts below", &none, &self.root))?;
        let mut count = 0;
        let listed = |dir: &Path| dirs_in(dir).map_err(io_error("list", &none, dir));
        for driver in listed(&dir)? {
            for hash in listed(&dir.join(&driver))? {
                let at = dir.join(&driver).join(hash).join("globalmount");
                let mounted = table.at(&at);
                if mounted.map_err(io_error("look at", &none, &at))?.is_none() {
                    continue;
                }
                let found = identity::device_at(&self.root, &at);
                let Some((key, remote)) = found.and_then(|r| Some((r.device_key()?, r))) else {
                    continue;
                };
                if seen.record::<VolumeRecord>(&key).is_some()
                    || records::description(seen, &key).is_some()
                {
                    continue;
                }
                info!(at = %at.display(), "a device is staged that was not on record");
                let found = (at.as_path(), VolumePhase::Mounted, Mark::Mount);
                transaction = self.add(transaction, &none, &key, &remote, found)?;
                count += 1;
            }
        }
        Ok((transaction, count))
    }
}

/// The record of a volume or device, if its description can be read too.
fn whole_record<'s>(seen: &'s State, key: &str) -> Option<&'s VolumeRecord> {
    let record = seen.record::<VolumeRecord>(key)?;
    is_whole(seen, key, record).then_some(record)
}

/// What was found at the place of a volume.
enum Found {
    /// It is on record.
    Recorded,
    /// Nothing, or something else.
    Nothing,
    /// What is to be recorded.
    There(Box<Transaction>),
}

/// Traces in a pod's directory, on record or not.
fn look(pod: &Path, source: &mounts::Source) -> io::Result<Vec<Trace>> {
    let mut found = Vec::new();
    let mut table = None;
    for (kind, mode) in [
        ("volumes", VolumeMode::Filesystem),
        ("volumeDevices", VolumeMode::Block),
    ] {
        let dir = pod.join(kind);
        for of_plugin in names_in(&dir)? {
            let plugin = of_plugin.replace('~', "/");
            if plugin == HOST_PATH || OWN.contains(&plugin.as_str()) {
                continue;
            }
            for name in names_in(&dir.join(&of_plugin))? {
                let place = dir.join(&of_plugin).join(&name);
                let path = match (plugin.as_str(), mode) {
                    (CSI, VolumeMode::Filesystem) => place.join("mount"),
                    _ => place.clone(),
                };
                let is_trace = match mode {
                    VolumeMode::Block => true,
                    VolumeMode::Filesystem => {
                        if table.is_none() {
                            table = Some(source.read()?);
                        }
                        let mounted = match &table {
                            Some(table) => table.below(&place)?.next().is_some(),
                            None => false,
                        };
                        mounted || (plugin == CSI && identity::has_data(&path))
                    }
                };
                if is_trace {
                    found.push(Trace {
                        plugin: plugin.clone(),
                        name,
                        path,
                        mode,
                    });
                }
            }
        }
    }
    Ok(found)
}

/// Names in a directory of the agent's own, which are not looked at; none when it is not there.
fn names_in(dir: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => return Ok(Vec::new()),
        other => other?,
    };
    let mut names = Vec::new();
    for entry in entries {
        names.extend(entry?.file_name().into_string().ok());
    }
    Ok(names)
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests"
)]
#[path = "takeover_tests.rs"]
mod tests;
