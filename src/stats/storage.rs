//! Measurement of space, which takes long: the space of logs, volumes, writable layers and images. It runs on request
//! if the last measurement is older than a minute, beside its callers: they wait a moment for it, then continue with
//! the previous one. Pods are measured one beside the other: one that hangs has no figures, and the others have theirs.
//! During a long measurement, its finished parts are published, with the last figures of the rest.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use k8s_cri::v1;
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::debug;

use super::model::Fs;
use crate::eviction::{DiskUsage, Stop, Walks, measure};
use crate::kuberuntime::cri::{CriClient, CriError};
use crate::types::{ContainerId, PodExt, PodUid, mountinfo};
use crate::volumemanager;

/// Largest age of a measurement; upstream's `volumeStatsAggPeriod`.
const MAX_AGE: Duration = Duration::from_secs(60);
/// Time for which a caller waits for a new one.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time limit of the runtime for that.
const RUNTIME_PATIENCE: Duration = Duration::from_secs(10);
/// After this long a measurement serves evictions although it is not complete. One that hangs is given up before.
const LONG: Duration = Duration::from_secs(150);
/// The place of images among what is measured; no pod has this UID.
const IMAGES: &str = "images";

/// One measurement.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Storage {
    /// Images; the space they take, on their file system.
    pub images: Option<Fs>,
    /// Writable layers, where the runtime keeps them apart from images.
    pub containers_fs: Option<Fs>,
    /// By container.
    pub containers: BTreeMap<ContainerId, ContainerStorage>,
    /// By pod.
    pub volumes: BTreeMap<PodUid, Vec<VolumeUsage>>,
    /// True if the runtime reported the sizes of writable layers.
    pub has_layers: bool,
    /// Smallest known disk usage of the measured pods.
    pub walked: BTreeMap<PodUid, Walked>,
}

/// Smallest known disk usage of a pod, also where not all of it could be measured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Walked {
    /// Logs by container.
    pub logs: BTreeMap<ContainerId, DiskUsage>,
    /// Its volumes on the node's disk together.
    pub volumes: DiskUsage,
}

/// A container's part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContainerStorage {
    /// Its writable layer, bytes and inodes.
    pub rootfs: Option<(u64, Option<u64>)>,
    /// Its logs.
    pub logs: Option<(u64, u64)>,
}

/// A volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeUsage {
    /// Its name in the pod.
    pub name: String,
    /// It is kept in memory.
    pub memory: bool,
    /// Its part of its file system.
    pub fs: Fs,
    /// Namespace and name of its claim.
    pub claim: Option<(String, String)>,
    /// True if something is wrong with it; `None` if its driver does not report that.
    pub abnormal: Option<bool>,
}

/// A pod to be measured.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) uid: PodUid,
    pub(super) pod: Option<Arc<Pod>>,
    pub(super) logs: PathBuf,
    pub(super) volumes: PathBuf,
    /// Names and IDs.
    pub(super) containers: Vec<(String, ContainerId)>,
}

/// Measures, at most once at a time.
#[derive(Clone)]
pub(super) struct StorageCache {
    known: watch::Sender<Option<Known>>,
    busy: Arc<AtomicBool>,
    walks: Walks,
    cri: CriClient,
}

/// The last measurement, or as much of it as there is.
#[derive(Clone)]
struct Known {
    begun: Instant,
    /// `None` while a part of it is still measured.
    ended: Option<Instant>,
    storage: Arc<Storage>,
}

impl Known {
    /// Returns whether the measurement is complete and of the last minute.
    fn is_new(&self) -> bool {
        self.ended.is_some_and(|at| at.elapsed() < MAX_AGE)
    }

    /// Returns whether the measurement began after `after`, and no caller has to wait for more of it.
    fn serves(&self, after: Option<Instant>) -> bool {
        let is_long = || self.ended.is_none() && self.begun.elapsed() >= LONG;
        after.is_none_or(|after| self.begun >= after) && (self.is_new() || is_long())
    }
}

impl StorageCache {
    pub(super) fn new(cri: CriClient) -> Self {
        Self {
            known: watch::Sender::new(None),
            busy: Arc::default(),
            walks: Walks::default(),
            cri,
        }
    }

    /// A measurement of the last minute, or else a new one if it is done soon, or else the last one. Cancel-safe.
    pub(super) async fn get(
        &self,
        at_ms: i64,
        pods: impl FnOnce() -> Vec<Wanted>,
    ) -> Option<Arc<Storage>> {
        // Late is not wrong: what there was is told then.
        self.await_one(at_ms, pods, Known::is_new).await;
        let known = self.known.borrow();
        known.as_ref().map(|known| Arc::clone(&known.storage))
    }

    /// A measurement that is complete and began at most `max_age` ago; `None` if it is not done soon, in which case it
    /// goes on. Cancel-safe.
    pub(super) async fn fresh(
        &self,
        at_ms: i64,
        max_age: Duration,
        pods: impl FnOnce() -> Vec<Wanted>,
    ) -> Option<Arc<Storage>> {
        let after = Instant::now().checked_sub(max_age);
        let serves = |known: &Known| known.serves(after);
        self.await_one(at_ms, pods, serves).await;
        let known = self.known.borrow();
        let known = known.as_ref().filter(|known| serves(known))?;
        Some(Arc::clone(&known.storage))
    }

    /// Waits a moment for a measurement that will do, and starts one if there is none.
    async fn await_one(
        &self,
        at_ms: i64,
        pods: impl FnOnce() -> Vec<Wanted>,
        will_do: impl Fn(&Known) -> bool,
    ) {
        let mut known = self.known.subscribe();
        let is_there = |known: &Option<Known>| known.as_ref().is_some_and(&will_do);
        if is_there(&known.borrow()) {
            return;
        }
        if !self.busy.swap(true, Ordering::SeqCst) {
            let (this, pods) = (self.clone(), pods());
            tokio::spawn(async move {
                let _idle = Idle(Arc::clone(&this.busy));
                this.measure(at_ms, pods).await;
            });
        }
        let waited = tokio::time::timeout(PATIENCE, known.wait_for(is_there)).await;
        if waited.is_err() {
            debug!("measuring the disks takes long");
        }
    }

    async fn measure(&self, at_ms: i64, pods: Vec<Wanted>) {
        let begun = Instant::now();
        let before = self.known.borrow().as_ref().map(|k| Arc::clone(&k.storage));
        let before = before.unwrap_or_default();
        let (layers, images) = tokio::join!(
            told(RUNTIME_PATIENCE, self.cri.list_container_stats(None)),
            told(RUNTIME_PATIENCE, self.cri.image_fs_info()),
        );
        let mut storage = of_layers(layers);
        let mut waiting: BTreeMap<PodUid, Vec<ContainerId>> = BTreeMap::new();
        let mut parts: FuturesUnordered<BoxFuture<'_, Part>> = FuturesUnordered::new();
        parts.push(self.measure_images(at_ms, images).boxed());
        for pod in pods {
            let containers = pod.containers.iter().map(|(_, id)| id.clone());
            waiting.insert(pod.uid.clone(), containers.collect());
            parts.push(self.measure_pod(at_ms, pod).boxed());
        }
        let mut interim = tokio::time::interval_at(Instant::now() + PATIENCE, PATIENCE);
        loop {
            tokio::select! {
                part = parts.next() => match part {
                    None => break,
                    Some(Part::Pod(uid, found)) => {
                        waiting.remove(&uid);
                        if let Some(found) = found {
                            add_pod(&mut storage, found);
                        }
                    }
                    Some(Part::Images(images, containers_fs)) => {
                        (storage.images, storage.containers_fs) = (images, containers_fs);
                    }
                },
                _ = interim.tick() => {
                    let so_far = with_last_figures(&storage, &before, &waiting);
                    self.publish(begun, None, so_far);
                }
            }
        }
        self.publish(begun, Some(Instant::now()), storage);
    }

    fn publish(&self, begun: Instant, ended: Option<Instant>, storage: Storage) {
        self.known.send_replace(Some(Known {
            begun,
            ended,
            storage: Arc::new(storage),
        }));
    }

    /// Measures the file systems of images and layers. One that hangs is not tried again before it answers.
    async fn measure_images(&self, at_ms: i64, told: Option<v1::ImageFsInfoResponse>) -> Part {
        let images = PodUid::new(IMAGES);
        let walk = self
            .walks
            .run(&images, move |_| told.map(|told| of_images(at_ms, &told)));
        let found = walk.await.unwrap_or_else(|error| {
            debug!(%error, "cannot measure the file system of images");
            None
        });
        let (images, containers_fs) = found.unwrap_or_default();
        Part::Images(images, containers_fs)
    }

    async fn measure_pod(&self, at_ms: i64, wanted: Wanted) -> Part {
        let uid = wanted.uid.clone();
        let walk = self
            .walks
            .run(&uid, move |stop| of_pod(at_ms, wanted, stop));
        let found = match walk.await {
            Ok(found) => Some(found),
            Err(error) => {
                debug!(pod = %uid, %error, "cannot measure a pod's disk usage");
                None
            }
        };
        Part::Pod(uid, found)
    }
}

/// Another measurement may begin.
struct Idle(Arc<AtomicBool>);

impl Drop for Idle {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// Returns the answer of the runtime, if it came in time.
pub(super) async fn told<T>(
    patience: Duration,
    call: impl Future<Output = Result<T, CriError>>,
) -> Option<T> {
    match tokio::time::timeout(patience, call).await {
        Ok(Ok(answer)) => Some(answer),
        Ok(Err(error)) => {
            debug!(%error, "the runtime does not report its usage");
            None
        }
        Err(_) => {
            debug!("the runtime does not report its usage in time");
            None
        }
    }
}

/// A part of a measurement.
enum Part {
    Images(Option<Fs>, Option<Fs>),
    Pod(PodUid, Option<OfPod>),
}

/// Disk usage of a pod.
struct OfPod {
    uid: PodUid,
    logs: Vec<(ContainerId, Option<(u64, u64)>)>,
    volumes: Vec<VolumeUsage>,
    walked: Walked,
}

/// Returns what was measured so far, with the figures from `before` of the pods that are yet to be measured. Those pods do not
/// count as walked.
fn with_last_figures(
    measured: &Storage,
    before: &Storage,
    waiting: &BTreeMap<PodUid, Vec<ContainerId>>,
) -> Storage {
    let mut storage = measured.clone();
    for (uid, containers) in waiting {
        for id in containers {
            if let Some(old) = before.containers.get(id) {
                storage.containers.entry(id.clone()).or_default().logs = old.logs;
            }
        }
        if let Some(old) = before.volumes.get(uid) {
            storage.volumes.insert(uid.clone(), old.clone());
        }
    }
    if storage.images.is_none() {
        storage.images.clone_from(&before.images);
        storage.containers_fs.clone_from(&before.containers_fs);
    }
    storage
}

fn of_layers(layers: Option<Vec<v1::ContainerStats>>) -> Storage {
    let mut storage = Storage {
        has_layers: layers.is_some(),
        ..Storage::default()
    };
    for stats in layers.into_iter().flatten() {
        let Some(id) = stats.attributes.map(|a| ContainerId::from(a.id)) else {
            continue;
        };
        let layer = stats.writable_layer.and_then(|layer| {
            let inodes = layer.inodes_used.map(|n| n.value);
            Some((layer.used_bytes?.value, inodes))
        });
        storage.containers.entry(id).or_default().rootfs = layer;
    }
    storage
}

fn add_pod(storage: &mut Storage, pod: OfPod) {
    for (id, logs) in pod.logs {
        storage.containers.entry(id).or_default().logs = logs;
    }
    storage.walked.insert(pod.uid.clone(), pod.walked);
    if !pod.volumes.is_empty() {
        storage.volumes.insert(pod.uid, pod.volumes);
    }
}

fn of_pod(at_ms: i64, wanted: Wanted, stop: &Stop) -> OfPod {
    let mut walked = Walked::default();
    let mut logs = Vec::new();
    for (name, id) in &wanted.containers {
        let (used, least) = du(&wanted.logs.join(name), stop);
        walked.logs.insert(id.clone(), least);
        logs.push((id.clone(), used.map(|used| (used.bytes, used.inodes))));
    }
    OfPod {
        logs,
        volumes: volumes(at_ms, &wanted, stop, &mut walked.volumes),
        walked,
        uid: wanted.uid,
    }
}

/// The file systems of images and of writable layers.
fn of_images(at_ms: i64, told: &v1::ImageFsInfoResponse) -> (Option<Fs>, Option<Fs>) {
    let first = |all: &[v1::FilesystemUsage]| all.first().map(|f| of_runtime(at_ms, f));
    (
        first(&told.image_filesystems),
        first(&told.container_filesystems),
    )
}

/// Measures the volumes of a pod. Adds what they take of the node's disk at least to `on_disk`.
fn volumes(at_ms: i64, wanted: &Wanted, stop: &Stop, on_disk: &mut DiskUsage) -> Vec<VolumeUsage> {
    let Some(pod) = &wanted.pod else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for volume in pod.spec_ref().volumes.iter().flatten() {
        // What a hostPath leads to is the node's.
        let plugin = volumemanager::plugin_of(volume).filter(|_| volume.host_path.is_none());
        let Some(plugin) = plugin else { continue };
        let dir = wanted
            .volumes
            .join(plugin.replace('/', "~"))
            .join(&volume.name);
        let memory = match &volume.empty_dir {
            Some(empty) => empty.medium.as_deref().is_some_and(|m| !m.is_empty()),
            // The others are secret, or may hold what is.
            None => volume.config_map.is_none(),
        };
        let Some(mut fs) = space_of(&dir, at_ms) else {
            continue;
        };
        let (used, least) = du(&dir, stop);
        if !memory {
            on_disk.bytes = on_disk.bytes.saturating_add(least.bytes);
            on_disk.inodes = on_disk.inodes.saturating_add(least.inodes);
        }
        let Some(used) = used else { continue };
        fs.used = Some(used.bytes);
        fs.inodes_used = Some(used.inodes);
        found.push(VolumeUsage {
            name: volume.name.clone(),
            memory,
            fs,
            ..VolumeUsage::default()
        });
    }
    found
}

/// Returns what a directory takes if all of it could be measured, and what it takes at least.
fn du(dir: &Path, stop: &Stop) -> (Option<DiskUsage>, DiskUsage) {
    let measured = measure(dir, stop);
    let least = measured.usage;
    if let Some(missed) = measured.missed {
        debug!(?missed, dir = %dir.display(), "cannot measure a directory");
        return (None, least);
    }
    ((least != DiskUsage::default()).then_some(least), least)
}

fn of_runtime(at_ms: i64, told: &v1::FilesystemUsage) -> Fs {
    let mount = told.fs_id.as_ref().map(|id| PathBuf::from(&id.mountpoint));
    let mut fs = mount.and_then(|m| fs_of(&m, at_ms)).unwrap_or(Fs {
        at_ms,
        ..Fs::default()
    });
    fs.used = told.used_bytes.map(|n| n.value);
    fs.inodes_used = told.inodes_used.map(|n| n.value);
    fs
}

/// The file system that `path` is on; `None` when there is no such path. Blocking.
pub(super) fn fs_of(path: &Path, at_ms: i64) -> Option<Fs> {
    let mut fs = space_of(path, at_ms)?;
    fs.device = device_of(path).unwrap_or_default();
    Some(fs)
}

/// As [`fs_of`], without the device, which needs a read of all mounts.
pub(super) fn space_of(path: &Path, at_ms: i64) -> Option<Fs> {
    let stat = nix::sys::statvfs::statvfs(path).ok()?;
    let bytes = |blocks: u64| blocks.saturating_mul(stat.fragment_size());
    let (capacity, free) = (bytes(stat.blocks()), bytes(stat.blocks_free()));
    Some(Fs {
        at_ms,
        device: String::new(),
        available: Some(bytes(stat.blocks_available())),
        capacity: Some(capacity),
        used: Some(capacity.saturating_sub(free)),
        inodes_free: Some(stat.files_free()),
        inodes: Some(stat.files()),
        inodes_used: Some(stat.files().saturating_sub(stat.files_free())),
    })
}

/// Returns the device that is mounted at `path`.
fn device_of(path: &Path) -> Option<String> {
    let table = std::fs::read(mountinfo::TABLE).ok()?;
    let path = path.canonicalize().ok()?;
    mounted_at(&table, &path)
}

fn mounted_at(table: &[u8], path: &Path) -> Option<String> {
    let mounts = mountinfo::lines(table)
        .map(|line| (mountinfo::path(line.point), mountinfo::text(line.source)));
    let around = mounts.filter(|(point, _)| path.starts_with(point));
    // Of several at one place the last one is on top.
    let nearest = around.max_by_key(|(point, _)| point.components().count());
    nearest.map(|(_, device)| device)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;

    use super::*;

    #[test]
    fn the_device_is_that_of_the_nearest_mount() {
        let table = b"1 0 8:1 / / rw - ext4 /dev/vda1 rw\n\
                     2 1 8:2 / /var/lib rw shared:1 - xfs /dev/vdb rw\n\
                     3 1 0:5 / /var/library rw - tmpfs tmpfs rw\n\
                     4 1 8:3 / /mnt/caf\xe9\\040x rw - ext4 /dev/vdc rw\n";
        for (path, device) in [
            ("/etc", "/dev/vda1"),
            ("/var/lib/kubelet", "/dev/vdb"),
            ("/var/library", "tmpfs"),
        ] {
            assert_eq!(mounted_at(table, Path::new(path)).as_deref(), Some(device));
        }
        let bytes = Path::new(OsStr::from_bytes(b"/mnt/caf\xe9 x/dir"));
        assert_eq!(mounted_at(table, bytes).as_deref(), Some("/dev/vdc"));
    }

    #[test]
    fn volumes_and_logs_are_measured_by_pod_and_container() {
        let dir = tempfile::tempdir().unwrap();
        let volumes = dir.path().join("volumes");
        let empty = volumes.join("kubernetes.io~empty-dir/scratch");
        let logs = dir.path().join("logs");
        std::fs::create_dir_all(&empty).unwrap();
        std::fs::create_dir_all(logs.join("main")).unwrap();
        std::fs::write(empty.join("big"), vec![7_u8; 200_000]).unwrap();
        std::fs::write(logs.join("main/0.log"), vec![7_u8; 50_000]).unwrap();
        let pod: Pod = serde_json::from_value(serde_json::json!({
            "metadata": {"uid": "u1", "name": "p", "namespace": "n"},
            "spec": {"containers": [], "volumes": [
                {"name": "scratch", "emptyDir": {}},
                {"name": "host", "hostPath": {"path": "/"}},
                {"name": "absent", "emptyDir": {}},
            ]},
        }))
        .unwrap();
        let wanted = Wanted {
            uid: PodUid::new("u1"),
            pod: Some(Arc::new(pod)),
            logs,
            volumes,
            containers: vec![("main".to_owned(), ContainerId::new("c1"))],
        };
        let layer = v1::ContainerStats {
            attributes: Some(v1::ContainerAttributes {
                id: "c1".to_owned(),
                ..Default::default()
            }),
            writable_layer: Some(v1::FilesystemUsage {
                used_bytes: Some(v1::UInt64Value { value: 4096 }),
                inodes_used: Some(v1::UInt64Value { value: 3 }),
                ..Default::default()
            }),
            ..Default::default()
        };
        let mut storage = of_layers(Some(vec![layer]));
        add_pod(&mut storage, of_pod(5, wanted, &Stop::default()));
        let of_container = storage.containers[&ContainerId::new("c1")];
        assert_eq!(of_container.rootfs, Some((4096, Some(3))));
        let (bytes, inodes) = of_container.logs.unwrap();
        assert!((50_000..80_000).contains(&bytes), "{bytes}");
        assert_eq!(inodes, 2);
        let volumes = &storage.volumes[&PodUid::new("u1")];
        assert_eq!(volumes.len(), 1, "{volumes:?}");
        assert_eq!(
            (volumes[0].name.as_str(), volumes[0].memory),
            ("scratch", false)
        );
        let used = volumes[0].fs.used.unwrap();
        assert!((200_000..260_000).contains(&used), "{used}");
        assert!(volumes[0].fs.capacity.unwrap() > used);
        let walked = &storage.walked[&PodUid::new("u1")];
        let of_logs = walked.logs[&ContainerId::new("c1")].bytes;
        assert_eq!((of_logs, walked.volumes.bytes), (bytes, used));
        assert!(storage.has_layers && !of_layers(None).has_layers);
    }

    #[test]
    fn a_pod_whose_walk_was_stopped_counts_as_walked_with_what_was_counted() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("logs/main")).unwrap();
        let wanted = Wanted {
            uid: PodUid::new("u1"),
            pod: None,
            logs: dir.path().join("logs"),
            volumes: dir.path().join("volumes"),
            containers: vec![("main".to_owned(), ContainerId::new("c1"))],
        };
        let stop = Stop::default();
        stop.set();
        let mut storage = Storage::default();
        add_pod(&mut storage, of_pod(5, wanted, &stop));
        assert_eq!(storage.containers[&ContainerId::new("c1")].logs, None);
        assert!(storage.walked.contains_key(&PodUid::new("u1")));
    }

    #[test]
    fn pods_that_are_yet_to_be_measured_keep_their_figures_and_are_not_walked() {
        let (uid, id) = (PodUid::new("u1"), ContainerId::new("c1"));
        let mut before = Storage::default();
        let old = ContainerStorage {
            rootfs: Some((1, None)),
            logs: Some((7, 1)),
        };
        before.containers.insert(id.clone(), old);
        before.walked.insert(uid.clone(), Walked::default());
        let waiting = [(uid, vec![id.clone()])].into();
        let so_far = with_last_figures(&Storage::default(), &before, &waiting);
        let container = so_far.containers[&id];
        assert_eq!((container.rootfs, container.logs), (None, Some((7, 1))));
        assert!(so_far.walked.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_measurement_serves_if_it_began_in_time_and_is_complete_or_takes_too_long() {
        let known = |begun, ended| Known {
            begun,
            ended,
            storage: Arc::default(),
        };
        let start = Instant::now();
        tokio::time::advance(Duration::from_secs(10)).await;
        let now = Instant::now();
        assert!(known(start, Some(now)).serves(None));
        assert!(known(start, Some(now)).serves(Some(start)));
        assert!(
            !known(start, Some(now)).serves(Some(now)),
            "it began before"
        );
        assert!(
            !known(start, None).serves(None),
            "pods are yet to be measured"
        );
        tokio::time::advance(LONG).await;
        assert!(known(start, None).serves(None));
        assert!(!known(start, Some(now)).serves(None), "it is old");
    }
}
