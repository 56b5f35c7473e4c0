//! Events that may end back-offs early, and the pods that wait for them. `core::backoff::early` decides.
//!
//! In: events of the node (API server, network, clock, CSI drivers), of devices, images, configMaps, secrets and pods.
//! Out: those that a pod's next step has to look at, and which pods to wake. Kept in memory: what ended a back-off is
//! recorded, and an event of an earlier run of the agent ended what it could.
//!
//! Only pods in back-off are registered, so idle pods cost nothing.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;

use super::execute::StepError;
use super::{Job, PodWorkers, WorkerContext};
use crate::core::backoff::SyncOutcome;
use crate::core::backoff::early::{self, Cause, Subject};
use crate::core::pod_actions::PodActions;
use crate::core::state::{BackoffRecord, State};
use crate::images::{normalize, qualified};
use crate::objects::ObjectChange;
use crate::types::containers::{container_of, containers_of};
use crate::types::{Event, EventType, PodExt, PodUid, Stamp};
use crate::volumemanager::{RemoteFailure, VolumeError};

/// Time for which an event counts: longer than the longest back-off, since it may come while the attempt that fails still runs.
const REMEMBERED: Duration = Duration::from_secs(900);
/// Events that are kept of one pod.
const MOST: usize = 8;

#[derive(Debug, Default)]
struct Ledger {
    /// Newest event of the node per subject, of CSI drivers per driver.
    node: Vec<Cause>,
    pods: HashMap<PodUid, Vec<Cause>>,
    /// Pods in back-off, with the device files that they use.
    waiting: HashMap<PodUid, BTreeSet<PathBuf>>,
}

/// Events and the pods that wait for them.
#[derive(Debug)]
pub struct Causes {
    is_enabled: bool,
    ledger: Mutex<Ledger>,
}

impl Causes {
    /// Nothing happened yet. Unless enabled, nothing is remembered and no back-off ends early.
    pub fn new(is_enabled: bool) -> Self {
        Self {
            is_enabled,
            ledger: Mutex::default(),
        }
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers an event of the node. Returns the pods that may wait for it.
    fn happened(&self, cause: Cause) -> Vec<PodUid> {
        if !self.is_enabled {
            return Vec::new();
        }
        let mut ledger = self.ledger();
        ledger.node.retain(|old| !cause.replaces(old));
        ledger.node.push(cause);
        ledger.waiting.keys().cloned().collect()
    }

    /// Remembers an event of one pod.
    pub(super) fn happened_to(&self, pod: &PodUid, cause: Cause) {
        if !self.is_enabled {
            return;
        }
        let mut ledger = self.ledger();
        let causes = ledger.pods.entry(pod.clone()).or_default();
        causes.retain(|old| old.id != cause.id);
        causes.push(cause);
        let excess = causes.len().saturating_sub(MOST);
        causes.drain(..excess);
    }

    /// Events that a pod's back-offs may end for, oldest first.
    fn of(&self, pod: &PodUid, now: Stamp) -> Vec<Cause> {
        let is_recent = |cause: &Cause| now.since(cause.at) < REMEMBERED;
        let mut ledger = self.ledger();
        ledger.node.retain(is_recent);
        let mut causes = ledger.node.clone();
        if let Some(own) = ledger.pods.get_mut(pod) {
            own.retain(is_recent);
            causes.extend(own.iter().cloned());
            if own.is_empty() {
                ledger.pods.remove(pod);
            }
        }
        causes.sort_by_key(|cause| cause.at.boottime_ms);
        causes
    }

    fn is_waiting(&self, pod: &PodUid) -> bool {
        self.ledger().waiting.contains_key(pod)
    }

    /// Notes how a step of a pod went: whether it waits for a back-off, and for a device file beside those of its spec.
    pub(super) fn note(&self, pod: &Pod, outcome: SyncOutcome, device: Option<&Path>) {
        if !self.is_enabled {
            return;
        }
        let is_backing_off = matches!(
            outcome,
            SyncOutcome::Error {
                earliest_backoff: Some(_)
            }
        );
        let mut ledger = self.ledger();
        if is_backing_off {
            let mut devices = devices_of(pod);
            devices.extend(device.map(Path::to_owned));
            ledger.waiting.insert(pod.uid(), devices);
        } else {
            ledger.waiting.remove(&pod.uid());
        }
    }

    /// Forgets a pod.
    pub(super) fn forget(&self, pod: &PodUid) {
        let mut ledger = self.ledger();
        ledger.waiting.remove(pod);
        ledger.pods.remove(pod);
    }

    /// Device files of the pods in back-off, with these pods.
    pub fn devices(&self) -> BTreeMap<PathBuf, Vec<PodUid>> {
        let mut devices: BTreeMap<PathBuf, Vec<PodUid>> = BTreeMap::new();
        for (pod, used) in &self.ledger().waiting {
            for path in used {
                devices.entry(path.clone()).or_default().push(pod.clone());
            }
        }
        devices
    }
}

/// Files below `/dev` that a pod mounts. No other path is looked at: it may lead to a server that is gone.
fn devices_of(pod: &Pod) -> BTreeSet<PathBuf> {
    let volumes = pod.spec_ref().volumes.iter().flatten();
    let paths = volumes.filter_map(|volume| Some(Path::new(&volume.host_path.as_ref()?.path)));
    let is_device = |path: &&Path| {
        path.starts_with("/dev")
            && path.components().count() > 2
            && path.components().all(|part| part != Component::ParentDir)
    };
    paths.filter(is_device).map(Path::to_owned).collect()
}

/// The event that the containers of a pod were changed by its source, if they were.
fn change_of(before: &Pod, after: &Pod, now: Stamp) -> Option<Cause> {
    let containers = |pod: &Pod| {
        let spec = pod.spec_ref();
        (spec.containers.clone(), spec.init_containers.clone())
    };
    if containers(before) == containers(after) {
        return None;
    }
    let metadata = &after.metadata;
    let version = metadata.resource_version.as_deref().unwrap_or_default();
    Some(Cause {
        subject: Subject::Configuration,
        id: format!("pod resourceVersion {version}"),
        text: "the pod was changed".to_owned(),
        at: now,
    })
}

impl PodWorkers {
    /// Wakes the pods in back-off for an event of the node. Never waits.
    pub fn happened(&self, cause: Cause) {
        for uid in self.context().schedule.causes.happened(cause) {
            self.sync(&uid);
        }
    }

    /// Wakes these pods for an event that concerns them. Never waits.
    pub fn happened_to(&self, pods: &[PodUid], cause: &Cause) {
        for uid in pods {
            self.context()
                .schedule
                .causes
                .happened_to(uid, cause.clone());
            self.sync(uid);
        }
    }

    /// Wakes the pods in back-off that use an image which was pulled, imported or repaired. Never waits.
    pub fn image_changed(&self, image: &str) {
        let causes = &self.context().schedule.causes;
        let waiting: Vec<PodUid> = causes.ledger().waiting.keys().cloned().collect();
        let wanted = qualified(image);
        let uses = |uid: &PodUid| {
            let pod = self.pod_of(uid);
            pod.is_some_and(|pod| uses_image(&pod, &wanted))
        };
        let pods: Vec<PodUid> = waiting.into_iter().filter(uses).collect();
        let text = format!("image \"{image}\" was pulled or repaired");
        let now = self.context().clock.now();
        self.happened_to(&pods, &Cause::at(Subject::Image, image, text, now));
    }

    /// Remembers that a pod in back-off was changed by its source.
    pub(super) fn pod_changed(&self, before: &Pod, after: &Pod, now: Stamp) {
        let (causes, uid) = (&self.context().schedule.causes, after.uid());
        if causes.is_waiting(&uid)
            && let Some(cause) = change_of(before, after, now)
        {
            causes.happened_to(&uid, cause);
        }
    }

    /// The event that a configMap or secret changed; `None` for other objects.
    pub(super) fn configuration(&self, change: Option<&ObjectChange>) -> Option<Cause> {
        let change = change.filter(|change| matches!(change.kind, "ConfigMap" | "Secret"))?;
        let context = self.context();
        let object = format!("{} {}/{}", change.kind, change.namespace, change.name);
        let text = format!("{object} changed");
        let now = context.clock.now();
        Some(match context.content.objects.version_of(change) {
            Some(version) => Cause {
                subject: Subject::Configuration,
                id: format!("{object} resourceVersion {version}"),
                text,
                at: now,
            },
            None => Cause::at(Subject::Configuration, &object, text, now),
        })
    }
}

fn uses_image(pod: &Pod, wanted: &str) -> bool {
    let volumes = pod.spec_ref().volumes.iter().flatten();
    let of_volumes = volumes.filter_map(|v| v.image.as_ref()?.reference.clone());
    let of_containers = containers_of(pod).filter_map(|spec| spec.container.image.clone());
    let mut names = of_containers.chain(of_volumes);
    names.any(|name| normalize(&name).is_ok_and(|name| qualified(&name) == wanted))
}

/// Ends the back-offs of a pod whose causes are gone. Returns whether any ended, on record: the pod is to be looked at again.
/// A pod of which something is to be stopped is left for later.
pub(super) async fn end_back_offs(
    context: &WorkerContext,
    job: &Job,
    seen: &State,
    actions: &PodActions,
) -> Result<bool, StepError> {
    if actions.stops() || (actions.waiting.is_empty() && actions.start.is_empty()) {
        return Ok(false);
    }
    let now = context.clock.now();
    let causes = context.schedule.causes.of(&job.uid, now);
    if causes.is_empty() {
        return Ok(false);
    }
    let waiting: Vec<&str> = actions.waiting.iter().map(|w| w.name.as_str()).collect();
    let (transaction, ended) = early::end(seen, &job.uid, &waiting, &causes, now);
    if ended.is_empty() {
        return Ok(false);
    }
    context.store.commit(transaction).await?;
    for one in ended {
        let of = match (&one.container, &one.image) {
            (Some(container), _) => format!("restarting failed container {container}"),
            (None, image) => format!("pulling image \"{}\"", image.as_deref().unwrap_or_default()),
        };
        let text = format!("Back-off {of} ended early: {}", one.text);
        let event = Event::pod(EventType::Normal, &job.pod, "BackOffEnded", text);
        let named =
            (one.container.as_deref()).filter(|name| container_of(&job.pod, name).is_some());
        context.recorder.record(match named {
            Some(name) => event.container_of(&job.pod, name),
            None => event,
        });
    }
    Ok(true)
}

/// Ends the back-off of a mount whose cause is gone. Returns whether it ended, on record: the volume may be tried again.
pub(super) async fn end_mount_back_off(
    context: &WorkerContext,
    job: &Job,
    error: &VolumeError,
) -> Result<bool, StepError> {
    let VolumeError::Remote(failure) = error else {
        return Ok(false);
    };
    let RemoteFailure {
        volume, backoff, ..
    } = &**failure;
    let now = context.clock.now();
    let mut causes = context.schedule.causes.of(&job.uid, now);
    causes.retain(|cause| cause.helps_volume_of(failure.driver.as_deref()));
    // One that has just failed failed in spite of them.
    if failure.fresh || causes.is_empty() {
        return Ok(false);
    }
    let record = BackoffRecord {
        duration_ms: u64::try_from(backoff.wait.as_millis()).unwrap_or(u64::MAX),
        since: backoff.until.minus(backoff.wait),
    };
    let seen = context.store.snapshot();
    let ended = early::end_mount(&seen, &job.uid, volume, &record, &causes, now);
    let Some((cause, transaction)) = ended else {
        return Ok(false);
    };
    context.store.commit(transaction).await?;
    context.content.volumes.end_back_off(failure);
    let text = format!(
        "Back-off mounting volume \"{volume}\" ended early: {}",
        cause.text
    );
    let event = Event::pod(EventType::Normal, &job.pod, "BackOffEnded", text);
    context.recorder.record(event);
    Ok(true)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::types::BootId;

    fn at(seconds: i64) -> Stamp {
        Stamp {
            boot: BootId(1),
            boottime_ms: seconds * 1000,
            wall_ms: seconds * 1000,
        }
    }

    fn pod(uid: &str, image: &str) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": uid, "namespace": "ns", "uid": uid, "resourceVersion": "7"},
            "spec": {
                "containers": [{"name": "a", "image": image}],
                "volumes": [
                    {"name": "tty", "hostPath": {"path": "/dev/ttyUSB0"}},
                    {"name": "all", "hostPath": {"path": "/dev"}},
                    {"name": "nfs", "hostPath": {"path": "/dev/../mnt/nfs"}},
                    {"name": "data", "hostPath": {"path": "/srv"}},
                ],
            },
        }))
        .unwrap()
    }

    fn backing_off() -> SyncOutcome {
        SyncOutcome::Error {
            earliest_backoff: Some(at(9)),
        }
    }

    fn cause(subject: Subject, id: &str, seconds: i64) -> Cause {
        Cause {
            subject,
            id: id.to_owned(),
            text: String::new(),
            at: at(seconds),
        }
    }

    #[test]
    fn only_pods_in_back_off_are_woken_and_looked_at() {
        let causes = Causes::new(true);
        let (waits, idle) = (pod("u1", "i:1"), pod("u2", "i:1"));
        causes.note(&waits, backing_off(), None);
        causes.note(&idle, SyncOutcome::Success, None);
        let network = cause(Subject::Network, "1", 10);
        assert_eq!(causes.happened(network), [PodUid::new("u1")]);
        let devices: Vec<_> = causes.devices().into_iter().collect();
        let tty = PathBuf::from("/dev/ttyUSB0");
        assert_eq!(devices, [(tty, vec![PodUid::new("u1")])]);
        let disk = PathBuf::from("/dev/disk/by-id/one");
        causes.note(&waits, backing_off(), Some(&disk));
        assert!(causes.devices().contains_key(&disk));
        causes.note(&waits, SyncOutcome::Success, None);
        assert!(causes.devices().is_empty());
        assert_eq!(causes.happened(cause(Subject::WallClock, "2", 11)), []);
    }

    #[test]
    fn a_driver_that_registers_does_not_hide_that_another_one_has() {
        let causes = Causes::new(true);
        for (driver, second) in [("a at 1", 1), ("b at 2", 2), ("a at 3", 3)] {
            causes.happened(cause(Subject::Driver, driver, second));
        }
        let kept = causes.of(&PodUid::new("u1"), at(4));
        let kept: Vec<_> = kept.iter().map(|cause| cause.id.as_str()).collect();
        assert_eq!(kept, ["b at 2", "a at 3"]);
    }

    #[test]
    fn events_are_remembered_for_a_while_newest_last() {
        let causes = Causes::new(true);
        let uid = PodUid::new("u1");
        causes.happened_to(&uid, cause(Subject::Image, "own", 30));
        causes.happened(cause(Subject::Network, "old", 10));
        causes.happened(cause(Subject::Network, "new", 20));
        let ids = |now| {
            let all = causes.of(&uid, now);
            all.into_iter().map(|c| c.id).collect::<Vec<_>>()
        };
        assert_eq!(ids(at(31)), ["new", "own"]);
        assert_eq!(ids(at(20).plus(REMEMBERED)), ["own"]);
        causes.forget(&uid);
        assert!(ids(at(31)).is_empty());
        let disabled = Causes::new(false);
        disabled.note(&pod("u1", "i:1"), backing_off(), None);
        assert_eq!(disabled.happened(cause(Subject::Network, "1", 10)), []);
        assert!(disabled.of(&uid, at(11)).is_empty());
    }

    #[test]
    fn a_pod_changes_with_its_containers_and_uses_images_by_any_spelling() {
        let before = pod("u1", "busybox:1");
        let mut after = before.clone();
        after.metadata.labels = Some([("a".to_owned(), "b".to_owned())].into());
        assert_eq!(change_of(&before, &after, at(1)), None);
        let changed = change_of(&before, &pod("u1", "busybox:2"), at(1)).unwrap();
        assert_eq!(changed.id, "pod resourceVersion 7");
        let wanted = qualified("docker.io/library/busybox:1");
        assert!(uses_image(&before, &wanted));
        assert!(!uses_image(&pod("u1", "busybox:2"), &wanted));
    }
}
