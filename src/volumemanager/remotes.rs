//! Volumes whose storage is elsewhere: what pods wait for, and the waiting.
//!
//! The desk holds what only this process knows; everything else is read from the store and the mount table. Who wants a
//! volume, or its end, puts that on the desk, has the driver look ([`VolumeManager::drive`]), and is answered by it.
//!
//! **Invariant:** secrets of a volume are held as long as somebody waits for it, and no longer.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::Pod;
use sha2::{Digest, Sha256};
use tokio::sync::oneshot;

use super::csi::CsiPlugin;
use super::driver::{Answer, Gone};
use super::error::{RemoteFailure, VolumeError};
use super::operations::Failure;
use super::{VolumeManager, check_name};
use crate::core::state::{VolumeRecord, child_key};
use crate::core::volumes::keys;
use crate::core::volumes::known::Known;
use crate::core::volumes::planner::Wanted;
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
    /// Key of its device, for what is staged.
    device: Option<String>,
    /// Where it is to appear.
    pub(super) path: PathBuf,
    /// Publish it even if it is there.
    pub(super) again: bool,
    serial: u64,
}

/// Those who wait for the same thing, by number.
type Waiters<T> = Vec<(u64, oneshot::Sender<T>)>;

/// An order with those who wait for it.
struct Placed {
    order: Order,
    waiters: Waiters<Answer>,
}

/// What only this process knows.
pub(super) struct Desk {
    orders: BTreeMap<String, Placed>,
    /// Pods that have ended, with those who wait for the end of their volumes.
    pub(super) leaving: BTreeMap<PodUid, Waiters<Gone>>,
    /// When [`VolumeManager::drive`] is called by itself.
    alarm: Option<Stamp>,
    serial: u64,
    /// How often [`VolumeManager::drive`] was called.
    pub(super) asked: u64,
    /// The driver is there.
    pub(super) driving: bool,
    /// How often it has looked.
    pub(super) rounds: u64,
    /// Which volumes of pods are on record.
    pub(super) known: Known,
}

impl Default for Desk {
    fn default() -> Self {
        Self {
            orders: BTreeMap::new(),
            leaving: BTreeMap::new(),
            alarm: None,
            serial: 0,
            asked: 0,
            driving: false,
            rounds: 0,
            known: Known::All { strays: false },
        }
    }
}

impl Desk {
    /// The order of a volume.
    pub(super) fn order(&self, key: &str) -> Option<Order> {
        self.orders.get(key).map(|placed| placed.order.clone())
    }

    /// Returns the volumes that pods wait for.
    pub(super) fn wanted(&self) -> BTreeMap<String, Wanted> {
        let orders = self.orders.iter();
        orders
            .map(|(key, Placed { order, .. })| {
                let wanted = Wanted {
                    path: order.path.to_string_lossy().into_owned(),
                    device: order.device.clone(),
                    again: order.again,
                };
                (key.clone(), wanted)
            })
            .collect()
    }

    /// Returns whether a pod waits for a volume, so that the mount table is needed.
    pub(super) fn waits_for_mounts(&self) -> bool {
        !self.orders.is_empty()
    }

    /// Returns whether a pod waits for something that depends on a volume or staged volume.
    pub(super) fn waits_for(&self, key: &str) -> bool {
        self.orders.contains_key(key)
            || keys::split(key).is_some_and(|(uid, _)| self.leaving.contains_key(&PodUid::new(uid)))
    }

    /// Tells those who wait for a volume, whose order is done.
    pub(super) fn answer(&mut self, key: &str, answer: &Answer) {
        let waiters = self.orders.remove(key).map(|placed| placed.waiters);
        for (_, waiter) in waiters.into_iter().flatten() {
            // Who does not wait any more need not know.
            drop(waiter.send(answer.clone()));
        }
    }

    /// Sets the alarm to a time. Returns whether a new timer is needed, since no earlier one is set.
    pub(super) fn set_alarm(&mut self, due: Stamp, now: Stamp) -> bool {
        let sooner = |alarm: Stamp| alarm.until(now) <= due.until(now) && !alarm.reached(now);
        if self.alarm.is_some_and(sooner) {
            return false;
        }
        self.alarm = Some(due);
        true
    }

    /// An alarm has rung.
    pub(super) fn rang(&mut self, due: Stamp) {
        // Another one may have been set for an earlier time, and has rung.
        if self.alarm == Some(due) {
            self.alarm = None;
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
        if let Some(placed) = desk.orders.get_mut(&self.key) {
            placed.waiters.retain(|(serial, _)| *serial != self.serial);
            if placed.waiters.is_empty() {
                desk.orders.remove(&self.key);
            }
        }
    }
}

/// Somebody waits for a pod's volumes to be gone.
struct Leaving<'a> {
    manager: &'a VolumeManager,
    uid: PodUid,
    serial: u64,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let mut desk = self.manager.desk();
        if let Some(waiters) = desk.leaving.get_mut(&self.uid) {
            waiters.retain(|(serial, _)| *serial != self.serial);
            if waiters.is_empty() {
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

    /// Returns the path at which a volume is mounted for a pod.
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

    /// Returns the path at which a volume is staged; `None` for volumes without staging. A recorded path stays.
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
        let device = resolved.remote.device_key();
        let remote = resolved.remote.clone();
        let since = self.operations.serial();
        let (_ordered, answer) = self.order(Order {
            pod: Arc::clone(pod),
            volume: volume.to_owned(),
            resolved,
            device: device.clone(),
            path: path.clone(),
            again,
            serial: 0,
        });
        self.drive();
        match answer.await {
            Ok(Answer::There) => Ok(path),
            Ok(Answer::Held { on, failure }) => {
                let failure = RemoteFailure {
                    pod: uid,
                    volume: volume.to_owned(),
                    name: remote.name.clone(),
                    mode: remote.mode,
                    staging: device.as_deref() == Some(&*on),
                    fresh: failure.serial > since,
                    backoff: failure.backoff,
                    key: on,
                    device: device_file(&remote),
                    driver: driver_of(&remote),
                    source: failure.error,
                };
                Err(VolumeError::Remote(Box::new(failure)))
            }
            // Somebody wants it elsewhere now; here it does not come.
            Err(_) => std::future::pending().await,
        }
    }

    /// Ends the back-off of a mount before its time, if it is still in force.
    pub fn end_back_off(&self, failure: &RemoteFailure) {
        let now = self.clock.now();
        self.operations
            .end_early(&failure.key, failure.backoff, now);
    }

    fn order(&self, mut order: Order) -> (Ordered<'_>, oneshot::Receiver<Answer>) {
        let key = child_key(&order.pod.uid(), &order.volume);
        let (waiter, answer) = oneshot::channel();
        let mut desk = self.desk();
        desk.serial += 1;
        let serial = desk.serial;
        order.serial = serial;
        let mut waiters = Waiters::new();
        if let Some(former) = desk.orders.remove(&key)
            && former.order.path == order.path
        {
            order.again |= former.order.again;
            waiters = former.waiters;
        }
        waiters.push((serial, waiter));
        desk.orders.insert(key.clone(), Placed { order, waiters });
        drop(desk);
        let ordered = Ordered {
            manager: self,
            key,
            serial,
        };
        (ordered, answer)
    }

    /// A volume was published as its order wanted it.
    pub(super) fn published(&self, key: &str, order: &Order) {
        if let Some(Placed { order: now, .. }) = self.desk().orders.get_mut(key)
            && now.serial == order.serial
        {
            now.again = false;
        }
    }

    /// Undoes what a pod has of remote volumes, and waits for it.
    pub(super) async fn leave(&self, uid: &PodUid) -> Result<(), VolumeError> {
        let since = self.operations.serial();
        let (waiter, gone) = oneshot::channel();
        let _leaving = {
            let mut desk = self.desk();
            desk.serial += 1;
            let serial = desk.serial;
            let waiters = desk.leaving.entry(uid.clone()).or_default();
            waiters.push((serial, waiter));
            Leaving {
                manager: self,
                uid: uid.clone(),
                serial,
            }
        };
        self.drive();
        match gone.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(held)) => {
                let held = held
                    .iter()
                    .map(|(volume, failure)| (volume.as_str(), failure.clone()));
                let error = unpublish_error(uid, since, held.collect(), self.clock.now());
                error.map_or(Ok(()), Err)
            }
            // The sender goes with `_leaving`, or after it was used.
            Err(_) => std::future::pending().await,
        }
    }
}

/// The device file of this node that a volume is on. No other path is looked at: it may lead to a server that is gone.
fn device_file(remote: &Remote) -> Option<PathBuf> {
    let Source::Local(local) = &remote.source else {
        return None;
    };
    let path = Path::new(&local.path);
    let is_device =
        path.starts_with("/dev") && !path.components().any(|c| c == Component::ParentDir);
    is_device.then(|| path.to_owned())
}

/// The CSI driver that mounts a volume.
fn driver_of(remote: &Remote) -> Option<String> {
    let Source::Csi(csi) = &remote.source else {
        return None;
    };
    Some(csi.source.driver.clone())
}

/// Returns the error for volumes of a pod that stay mounted because each is in back-off after a failure. It has the
/// latest failure, and the earliest time of a retry.
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
