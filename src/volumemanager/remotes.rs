//! Volumes whose storage is elsewhere: what pods wait for, what there is, and what is begun next.
//!
//! The desk holds what only this process knows; everything else is read from the store and the mount table.
//! [`VolumeManager::drive`] has the planner decide, and begins each step as a task that drives on when it has
//! ended. It is called whenever something changes, and when a back-off ends; nobody polls.
//!
//! **Invariant:** secrets of a volume are held as long as somebody waits for it, and no longer.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::Pod;
use sha2::{Digest, Sha256};
use tracing::warn;

use super::csi::CsiPlugin;
use super::error::{RemoteFailure, VolumeError};
use super::operations::Failure;
use super::{HOST_PATH, VolumeManager, check_name};
use crate::core::state::{ObjectRecord, State, Version, VolumePhase, VolumeRecord, child_key};
use crate::core::volumes::keys::{self, Mark};
use crate::core::volumes::known::Known;
use crate::core::volumes::planner::{self, Facts, Recorded, Wanted, undo_key};
use crate::core::volumes::{Remote, Source, VolumeMode};
use crate::kuberuntime::sources::Resolved;
use crate::types::{PodExt, PodUid, Stamp};

/// What a pod waits for.
#[derive(Clone)]
pub(super) struct Order {
    pub(super) pod: Arc<Pod>,
    /// As the pod names it.
    pub(super) volume: String,
    pub(super) resolved: Arc<Resolved>,
    /// Where it is to appear.
    pub(super) path: PathBuf,
    /// Publish it even if it is there.
    pub(super) again: bool,
    serial: u64,
}

/// What only this process knows.
pub(super) struct Desk {
    orders: BTreeMap<String, Order>,
    /// Pods that have ended, with the number of those who wait for that.
    leaving: BTreeMap<PodUid, usize>,
    /// Objects that were read, by key and version.
    read: HashMap<Arc<str>, (Version, Option<Arc<Remote>>)>,
    /// When [`VolumeManager::drive`] is called by itself.
    alarm: Option<Stamp>,
    serial: u64,
    /// Which volumes of pods are on record.
    pub(super) known: Known,
}

impl Default for Desk {
    fn default() -> Self {
        Self {
            orders: BTreeMap::new(),
            leaving: BTreeMap::new(),
            read: HashMap::new(),
            alarm: None,
            serial: 0,
            known: Known::All { strays: false },
        }
    }
}

impl Desk {
    /// The order of a volume.
    pub(super) fn order(&self, key: &str) -> Option<Order> {
        self.orders.get(key).cloned()
    }

    /// What an object says; `None`, told once, when it cannot be read.
    pub(super) fn remote(&mut self, seen: &State, key: &str) -> Option<Arc<Remote>> {
        let found = seen.get::<ObjectRecord>(key)?;
        if let Some((version, remote)) = self.read.get(key)
            && *version == found.version
        {
            return remote.clone();
        }
        let remote = match Remote::of(&found.record) {
            Ok(remote) => Some(Arc::new(remote)),
            Err(error) => {
                warn!(%error, key, "the description of a volume on record cannot be read");
                None
            }
        };
        self.read
            .insert(Arc::from(key), (found.version, remote.clone()));
        remote
    }

    /// Gives up descriptions that are not on record any more.
    fn forget(&mut self, seen: &State) {
        if self.read.len() > 2 * seen.volumes.len() + 16 {
            self.read
                .retain(|key, _| seen.record::<ObjectRecord>(key).is_some());
        }
    }
}

/// Somebody waits for a volume.
struct Ordered<'a> {
    manager: &'a VolumeManager,
    key: String,
    serial: u64,
}

impl Drop for Ordered<'_> {
    fn drop(&mut self) {
        let mut desk = self.manager.desk();
        if desk.orders.get(&self.key).map(|o| o.serial) == Some(self.serial) {
            desk.orders.remove(&self.key);
        }
    }
}

/// Somebody waits for a pod's volumes to be gone.
struct Leaving<'a> {
    manager: &'a VolumeManager,
    uid: PodUid,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let mut desk = self.manager.desk();
        if let Some(count) = desk.leaving.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                desk.leaving.remove(&self.uid);
            }
        }
    }
}

impl VolumeManager {
    pub(super) fn desk(&self) -> MutexGuard<'_, Desk> {
        // Entries are put and removed whole.
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where a volume appears.
    pub(super) fn target(&self, uid: &PodUid, remote: &Remote) -> PathBuf {
        let plugin = remote.plugin().replace('/', "~");
        let kind = match remote.mode {
            VolumeMode::Filesystem => "volumes",
            VolumeMode::Block => "volumeDevices",
        };
        let path = self.pod_dir(uid).join(kind).join(plugin).join(&remote.name);
        match (&remote.source, remote.mode) {
            (Source::Csi(_), VolumeMode::Filesystem) => path.join("mount"),
            _ => path,
        }
    }

    /// Where the storage of a volume is staged; `None` for what is not. What is on record stays where it is.
    pub(super) fn staging(&self, remote: &Remote) -> Option<PathBuf> {
        let device = remote.device()?;
        let seen = self.store.snapshot();
        if let Some(record) = seen.record::<VolumeRecord>(&remote.device_key()?) {
            return Some(PathBuf::from(&record.path));
        }
        let plugins = self.root.join("plugins").join(remote.plugin());
        let hash = |text: &str| keys::hex(&Sha256::digest(text));
        Some(match &remote.source {
            Source::Csi(_) if remote.mode == VolumeMode::Block => {
                CsiPlugin::device_staging_path(&self.root, &remote.name)
            }
            Source::Csi(csi) => plugins
                .join(&csi.source.driver)
                .join(hash(&csi.source.volume_handle))
                .join("globalmount"),
            _ => plugins.join("mounts").join(hash(&device)),
        })
    }

    /// Mounts one volume and waits for it. What was begun goes on when this is dropped.
    pub(super) async fn mount_remote(
        &self,
        pod: &Arc<Pod>,
        volume: &str,
        resolved: Arc<Resolved>,
        again: bool,
    ) -> Result<PathBuf, VolumeError> {
        let uid = pod.uid();
        check_name(&uid, volume)?;
        check_name(&uid, &resolved.remote.name)?;
        if let Source::Csi(csi) = &resolved.remote.source {
            check_name(&uid, &csi.source.driver)?;
        }
        let path = self.target(&uid, &resolved.remote);
        let key = child_key(&uid, volume);
        let device = resolved.remote.device_key();
        let remote = resolved.remote.clone();
        let _ordered = self.order(Order {
            pod: Arc::clone(pod),
            volume: volume.to_owned(),
            resolved,
            path: path.clone(),
            again,
            serial: 0,
        });
        let since = self.operations.serial();
        let mut ends = self.operations.ends();
        loop {
            ends.mark_unchanged();
            let facts = self.drive();
            let again = self.desk().orders.get(&key).is_some_and(|o| o.again);
            let there = (facts.volumes.get(&key))
                .is_some_and(|v| v.path == path.to_string_lossy() && v.is_there(&facts.mounted));
            if there && !again {
                return Ok(path);
            }
            let on = [Some(key.as_str()), device.as_deref()];
            let on = on.into_iter().flatten();
            let busy = (on.clone().chain(path.to_str())).any(|k| self.operations.is_busy(k));
            if !busy && let Some((on, failure)) = self.held(on, facts.now) {
                let failure = RemoteFailure {
                    pod: uid,
                    volume: volume.to_owned(),
                    name: remote.name.clone(),
                    mode: remote.mode,
                    staging: device.as_deref() == Some(on),
                    fresh: failure.serial > since,
                    backoff: failure.backoff,
                    source: failure.error,
                };
                return Err(VolumeError::Remote(Box::new(failure)));
            }
            // The sender lives as long as `self`.
            drop(ends.changed().await);
        }
    }

    /// The first of the keys that is left alone after a failure.
    fn held<'k>(
        &self,
        keys: impl Iterator<Item = &'k str>,
        now: Stamp,
    ) -> Option<(&'k str, Failure)> {
        keys.filter_map(|key| Some((key, self.operations.failure(key)?)))
            .find(|(_, failure)| !failure.backoff.until.reached(now))
    }

    fn order(&self, mut order: Order) -> Ordered<'_> {
        let key = child_key(&order.pod.uid(), &order.volume);
        let mut desk = self.desk();
        desk.serial += 1;
        order.serial = desk.serial;
        let ordered = Ordered {
            manager: self,
            key: key.clone(),
            serial: order.serial,
        };
        desk.orders.insert(key, order);
        ordered
    }

    /// A volume was published as its order wanted it.
    pub(super) fn published(&self, key: &str, order: &Order) {
        if let Some(now) = self.desk().orders.get_mut(key)
            && now.serial == order.serial
        {
            now.again = false;
        }
    }

    /// Undoes what a pod has of remote volumes, and waits for it.
    pub(super) async fn leave(&self, uid: &PodUid) -> Result<(), VolumeError> {
        let _leaving = {
            *self.desk().leaving.entry(uid.clone()).or_default() += 1;
            Leaving {
                manager: self,
                uid: uid.clone(),
            }
        };
        let prefix = child_key(uid, "");
        let since = self.operations.serial();
        let mut ends = self.operations.ends();
        loop {
            ends.mark_unchanged();
            let facts = self.drive();
            let left: Vec<(&String, &Recorded)> = facts
                .volumes
                .range(prefix.clone()..)
                .take_while(|(key, _)| key.starts_with(&prefix))
                .collect();
            if left.is_empty() {
                return Ok(());
            }
            let held = left.iter().map(|(key, recorded)| {
                let keys = [key.as_str(), &recorded.path];
                let mut on = keys.into_iter().chain(recorded.device.as_deref());
                if on.any(|k| self.operations.is_busy(k)) {
                    return None;
                }
                let (_, failure) = self.held(std::iter::once(&*undo_key(key)), facts.now)?;
                Some((&key[prefix.len()..], failure))
            });
            // Nothing is left that could go on by itself.
            if let Some(held) = held.collect::<Option<Vec<_>>>()
                && let Some(error) = unpublish_error(uid, since, held, facts.now)
            {
                return Err(error);
            }
            // The sender lives as long as `self`.
            drop(ends.changed().await);
        }
    }

    /// Begins whatever can be begun now, and gives what was found. Never waits.
    pub(super) fn drive(&self) -> Facts {
        let mut desk = self.desk();
        let facts = self.facts(&mut desk);
        let plan = planner::plan(&facts);
        for step in plan.steps {
            self.begin(&mut desk, step, &facts);
        }
        if let Some(due) = plan.due {
            self.wake_at(&mut desk, due, facts.now);
        }
        drop(desk);
        self.tell_in_use();
        facts
    }

    fn wake_at(&self, desk: &mut Desk, due: Stamp, now: Stamp) {
        if desk
            .alarm
            .is_some_and(|alarm| alarm.until(now) <= due.until(now) && !alarm.reached(now))
        {
            return;
        }
        desk.alarm = Some(due);
        let manager = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(due.until(now)).await;
            manager.ring(due);
        });
    }

    fn ring(&self, due: Stamp) {
        let mut desk = self.desk();
        // Another one may have been set for an earlier time, and has rung.
        if desk.alarm == Some(due) {
            desk.alarm = None;
        }
        drop(desk);
        self.operations.wake();
        self.drive();
    }

    fn facts(&self, desk: &mut Desk) -> Facts {
        let seen = self.store.snapshot();
        desk.forget(&seen);
        let now = self.clock.now();
        let mut volumes = BTreeMap::new();
        for (key, _) in seen.with_prefix::<ObjectRecord>(keys::VOLUMES) {
            let record = &key[keys::VOLUMES.len()..];
            if let Some(recorded) = recorded(desk, &seen, record, now) {
                volumes.insert(record.to_owned(), recorded);
            }
        }
        let mut devices = BTreeMap::new();
        for (key, _) in seen.with_prefix::<VolumeRecord>(keys::DEVICE) {
            if let Some(recorded) = recorded(desk, &seen, key, now) {
                devices.insert((**key).to_owned(), recorded);
            }
        }
        let orders = desk.orders.iter();
        let wanted: BTreeMap<String, Wanted> = orders
            .map(|(key, order)| {
                let wanted = Wanted {
                    path: order.path.to_string_lossy().into_owned(),
                    device: order.resolved.remote.device_key(),
                    again: order.again,
                };
                (key.clone(), wanted)
            })
            .collect();
        let leaving = (volumes.keys())
            .filter(|key| {
                keys::split(key)
                    .is_some_and(|(uid, _)| desk.leaving.contains_key(&PodUid::new(uid)))
            })
            .cloned()
            .collect();
        let mounted = self.mounted(&wanted, &volumes, &devices);
        let in_use = self.shown_in_use(&volumes, &devices);
        let unreadable = !desk.known.is_settled() || self.damaged(desk, &seen).volumes;
        Facts {
            wanted,
            leaving,
            volumes,
            devices,
            unreadable,
            in_use,
            mounted,
            busy: self.operations.busy(),
            held: self.operations.held(),
            now,
        }
    }

    /// Which of the mounts are there that a wanted volume relies on.
    fn mounted(
        &self,
        wanted: &BTreeMap<String, Wanted>,
        volumes: &BTreeMap<String, Recorded>,
        devices: &BTreeMap<String, Recorded>,
    ) -> BTreeSet<String> {
        let mut asked: BTreeSet<&str> = BTreeSet::new();
        let relies = |r: &&Recorded| r.phase == VolumePhase::Mounted && r.is_mount && r.this_boot;
        for (key, wanted) in wanted {
            let device = wanted.device.as_ref().and_then(|d| devices.get(d));
            let found = volumes.get(key).into_iter().chain(device).filter(relies);
            asked.extend(found.map(|r| &*r.path));
            // Another volume of the pod may lead there.
            asked.insert(&wanted.path);
        }
        if asked.is_empty() {
            return BTreeSet::new();
        }
        let table = match self.mounts.read() {
            Ok(table) => table,
            Err(error) => {
                warn!(%error, "the mount table cannot be read, volumes count as not mounted");
                return BTreeSet::new();
            }
        };
        let is_mount = |path: &&str| matches!(table.at(Path::new(path)), Ok(Some(_)));
        (asked.into_iter().filter(is_mount))
            .map(str::to_owned)
            .collect()
    }
}

/// Why volumes of a pod are still there when each of them is held back after a failure: told is what failed last, and
/// tried again when the first of them is due.
fn unpublish_error(
    uid: &PodUid,
    since: u64,
    held: Vec<(&str, Failure)>,
    now: Stamp,
) -> Option<VolumeError> {
    let due = held.iter().map(|(_, failure)| failure.backoff.until);
    let until = due.min_by_key(|due| due.until(now))?;
    let newest = held.into_iter().max_by_key(|(_, failure)| failure.serial);
    let (volume, failure) = newest?;
    Some(VolumeError::Unpublish {
        pod: uid.clone(),
        volume: volume.to_owned(),
        fresh: failure.serial > since,
        until,
        source: failure.error,
    })
}

/// A volume or device as it is on record; `None` for what has no storage elsewhere.
fn recorded(desk: &mut Desk, seen: &State, key: &str, now: Stamp) -> Option<Recorded> {
    let record = seen.record::<VolumeRecord>(key)?;
    if record.plugin == HOST_PATH {
        return None;
    }
    let object = keys::object_of(key);
    let mark = Mark::of(seen.record::<ObjectRecord>(&object)?);
    let remote = desk.remote(seen, &object)?;
    let is_device = key.starts_with(keys::DEVICE);
    Some(Recorded {
        phase: record.phase,
        path: record.path.clone(),
        device: (!is_device).then(|| remote.device_key()).flatten(),
        begun: mark != Mark::Claimed,
        this_boot: record.at.boot == now.boot,
        is_mount: mark != Mark::Plain,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::volumes::backoff::BackOff;
    use crate::types::BootId;
    use crate::volumemanager::remote::RemoteError;

    #[test]
    fn of_several_volumes_that_stay_the_newest_failure_is_told_and_the_first_due_is_tried() {
        let at = |ms| Stamp {
            boot: BootId(1),
            boottime_ms: ms,
            wall_ms: ms,
        };
        let failure = |serial: u64, until| Failure {
            error: RemoteError::Failed(serial.to_string()),
            backoff: BackOff {
                wait: std::time::Duration::from_secs(1),
                until: at(until),
            },
            serial,
        };
        let held = || vec![("a", failure(3, 700)), ("b", failure(5, 900))];
        for (since, is_fresh) in [(4, true), (5, false)] {
            let error = unpublish_error(&PodUid::new("u"), since, held(), at(0));
            let Some(VolumeError::Unpublish {
                volume,
                fresh,
                until,
                ..
            }) = error
            else {
                unreachable!("two volumes are held back");
            };
            assert_eq!((volume.as_str(), fresh, until), ("b", is_fresh, at(700)));
        }
        assert!(unpublish_error(&PodUid::new("u"), 0, Vec::new(), at(0)).is_none());
    }
}
