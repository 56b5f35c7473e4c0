//! Figures for evictions under pressure of the node, from the places that statistics come from.
//!
//! **Invariant:** an observation asks the runtime for nothing but, once, where images are. Pods are measured only when
//! one of them has to be evicted.
//!
//! **Invariant:** a runtime or a file system that hangs costs its own figures, and an observation a moment.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use k8s_cri::v1;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tracing::debug;

use super::StatsProvider;
use super::collect::Sources;
use super::memcg::MemoryNotifier;
use super::model::{Depth, Fs, PodUsage};
use super::storage::{Storage, space_of, told};
use crate::core::pressure::{
    ContainerUse, Disks, Figure, Observations, PodUse, Signal, Space, Threshold,
};
use crate::eviction::{DiskUsage, Figures, UsageQuery};
use crate::types::file_system::device_of;
use crate::types::{PodUid, blocking};

/// Time for which an observation waits for a file system or the runtime; their signals are absent after that.
const PATIENCE: Duration = Duration::from_secs(1);
/// Time limit of the runtime for naming the place of images.
const RUNTIME_PATIENCE: Duration = Duration::from_secs(10);
/// A trigger for 100 ms of stalls within a second.
const TRIGGER: &[u8] = b"some 100000 1000000\0";
const MEMORY_STALLS: &str = "/proc/pressure/memory";

/// Figures of this machine.
pub struct NodeFigures {
    stats: StatsProvider,
    /// Directories on the file systems of images and of writable layers, once the runtime has named them.
    places: watch::Sender<Option<Places>>,
    /// True if the runtime was asked for it and has not answered.
    asking: Arc<AtomicBool>,
    /// Reads of the file systems of the root directory, of images and of writable layers that have not returned.
    hangs: [Arc<AtomicBool>; 3],
    /// The layout of file systems when all were seen last.
    disks: Mutex<Disks>,
    trigger: OnceLock<Option<AsyncFd<File>>>,
    /// Notifications of cgroup v1, if they are configured.
    notifier: Option<MemoryNotifier>,
}

impl NodeFigures {
    /// Makes it from a provider that no other caller waits for.
    pub fn new(stats: StatsProvider) -> Self {
        Self {
            stats,
            places: watch::Sender::new(None),
            asking: Arc::default(),
            hangs: Default::default(),
            disks: Mutex::default(),
            trigger: OnceLock::new(),
            notifier: None,
        }
    }

    /// Has cgroup v1 notify of those of `thresholds` that are about memory: `kernelMemcgNotification`.
    #[must_use]
    pub fn with_notifications(mut self, thresholds: &[Threshold]) -> Self {
        self.notifier = Some(MemoryNotifier::new(thresholds));
        self
    }

    async fn node(&self) -> BTreeMap<Signal, Figure> {
        let sources = {
            let mut state = self.stats.0.state.lock().await;
            self.stats.sources(&mut state).await
        };
        let from = Arc::clone(&sources);
        let read = blocking::spawn(move || memory_and_processes(&from));
        let figures = read.await.unwrap_or_else(|error| {
            debug!(%error, "cannot observe the memory of the node");
            BTreeMap::new()
        });
        if let Some(notifier) = &self.notifier {
            notifier.arm(sources, &figures).await;
        }
        figures
    }

    /// Waits until processes stall for memory; for ever if the kernel does not report that.
    async fn stalled(&self) {
        let Some(trigger) = self.trigger.get_or_init(trigger) else {
            return std::future::pending().await;
        };
        match trigger.ready(Interest::PRIORITY).await {
            Ok(mut guard) if !guard.ready().is_error() => guard.clear_ready(),
            _ => std::future::pending().await,
        }
    }

    async fn disks(&self) -> Observations {
        let root = self.stats.0.options.root_dir.clone();
        let of_runtime = async {
            let places = self.places_of_runtime().await?;
            let images = look_at(&self.hangs[1], places.images);
            let layers = async {
                let path = places.layers?;
                Some(look_at(&self.hangs[2], path).await)
            };
            Some(tokio::join!(images, layers))
        };
        let (root, found) = tokio::join!(look_at(&self.hangs[0], root), of_runtime);
        let (images, layers) = found.unwrap_or((Look::Hangs, None));
        if matches!(images, Look::Absent) {
            // They may lie somewhere else when they are back.
            self.places.send_replace(None);
        }
        let mut observed = Observations::default();
        root.add(&mut observed, [Signal::NodeFs, Signal::NodeFsInodes]);
        images.add(&mut observed, [Signal::ImageFs, Signal::ImageFsInodes]);
        let mut known = self.disks.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(disks) = layout(&root, &images, layers.as_ref()) {
            *known = disks;
        }
        observed.disks = *known;
        observed
    }

    /// Returns directories on the file systems of the runtime. Asks the runtime as long as it has named none.
    async fn places_of_runtime(&self) -> Option<Places> {
        let mut known = self.places.subscribe();
        let place = known.borrow_and_update().clone();
        if place.is_some() || self.asking.swap(true, Ordering::SeqCst) {
            return place;
        }
        let (cri, places) = (self.stats.0.cri.clone(), self.places.clone());
        let asking = Asking(Arc::clone(&self.asking));
        tokio::spawn(async move {
            let _asking = asking;
            let answer = told(RUNTIME_PATIENCE, cri.image_fs_info()).await;
            places.send_replace(answer.and_then(Places::of));
        });
        if tokio::time::timeout(PATIENCE, known.changed())
            .await
            .is_err()
        {
            debug!("the runtime is slow to report its image directories");
        }
        known.borrow().clone()
    }

    async fn usage_of_disks(&self, query: UsageQuery) -> Option<BTreeMap<PodUid, PodUse>> {
        let snapshot = self.stats.snapshot(Depth::CpuAndMemory).await;
        let pods = || self.stats.disks_of(&snapshot);
        let cache = &self.stats.0.storage;
        let storage = cache.fresh(snapshot.at_ms, query.max_age, pods).await?;
        let is_known = storage.has_layers || !query.signal.has_layers(query.disks);
        is_known.then(|| on_disk(&snapshot.pods, &storage))
    }

    async fn usage_of_others(&self, depth: Depth) -> Option<BTreeMap<PodUid, PodUse>> {
        let snapshot = self.stats.snapshot(depth).await;
        let pods = snapshot.pods.iter();
        let found: BTreeMap<PodUid, PodUse> = pods
            .map(|pod| (pod.uid.clone(), use_of(pod, None)))
            .collect();
        // What failed may be about one pod, or about none.
        let is_known = |of: &PodUse| of.memory.is_some() || of.processes.is_some();
        (!snapshot.failed || found.values().any(is_known)).then_some(found)
    }
}

/// Directories on the file systems that the runtime names.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Places {
    images: PathBuf,
    /// `None` where the runtime names the same for images, or none.
    layers: Option<PathBuf>,
}

impl Places {
    /// Reads an answer; `None` if it names no place of images.
    fn of(answer: v1::ImageFsInfoResponse) -> Option<Self> {
        let first = |all: Vec<v1::FilesystemUsage>| {
            let of = all.into_iter().next()?;
            let place = PathBuf::from(of.fs_id?.mountpoint);
            (!place.as_os_str().is_empty()).then_some(place)
        };
        let images = first(answer.image_filesystems)?;
        let layers = first(answer.container_filesystems).filter(|layers| *layers != images);
        Some(Self { images, layers })
    }
}

/// Returns the layout of the file systems; `None` if one of them could not be read.
fn layout(root: &Look, images: &Look, layers: Option<&Look>) -> Option<Disks> {
    let (Look::Found(root), Look::Found(images)) = (root, images) else {
        return None;
    };
    let layers = match layers {
        None => None,
        Some(Look::Found(layers)) => Some(layers.device),
        Some(_) => return None,
    };
    Some(Disks::of(root.device, images.device, layers))
}

/// The runtime may be asked again.
struct Asking(Arc<AtomicBool>);

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

impl Figures for NodeFigures {
    fn observe(&self) -> BoxFuture<'_, Observations> {
        Box::pin(async {
            let (node, mut observed) = tokio::join!(self.node(), self.disks());
            observed.figures.extend(node);
            observed
        })
    }

    fn usage(&self, query: UsageQuery) -> BoxFuture<'_, Option<BTreeMap<PodUid, PodUse>>> {
        Box::pin(async move {
            match query.signal {
                Signal::Memory | Signal::AllocatableMemory => {
                    self.usage_of_others(Depth::CpuAndMemory).await
                }
                Signal::Pid => self.usage_of_others(Depth::Cgroups).await,
                _ => self.usage_of_disks(query).await,
            }
        })
    }

    fn alarm(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            let Some(notifier) = &self.notifier else {
                return self.stalled().await;
            };
            // Both are cancel-safe.
            tokio::select! {
                () = self.stalled() => {}
                () = notifier.crossed() => {}
            }
        })
    }
}

/// Has the kernel report stalls; `None` if it does not.
#[expect(
    deprecated,
    reason = "its successor is unsafe to call; the file that it is given owns its descriptor"
)]
fn trigger() -> Option<AsyncFd<File>> {
    let open = || -> std::io::Result<AsyncFd<File>> {
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        options.custom_flags(nix::libc::O_NONBLOCK);
        let mut file = options.open(MEMORY_STALLS)?;
        file.write_all(TRIGGER)?;
        AsyncFd::with_interest(file, Interest::PRIORITY)
    };
    open()
        .inspect_err(|error| debug!(%error, "the kernel reports no stalls for memory"))
        .ok()
}

fn memory_and_processes(sources: &Sources) -> BTreeMap<Signal, Figure> {
    let mut figures = BTreeMap::new();
    let proc = &sources.options.proc;
    let machine = proc.machine(0, false).unwrap_or_default();
    let used = machine.usage.memory.and_then(|memory| memory.working_set);
    if let Some(used) = used.filter(|_| machine.memory_capacity > 0) {
        let figure = left(machine.memory_capacity, used);
        figures.insert(Signal::Memory, figure);
    }
    let manager = sources.manager.as_ref();
    let pods = manager.and_then(|m| sources.hierarchies.read(&m.pods_path(), 0, false));
    if let Some(pods) = pods
        && let Some(limit) = pods.limits.memory
        && let Some(used) = pods.memory.and_then(|memory| memory.working_set)
    {
        figures.insert(Signal::AllocatableMemory, left(limit, used));
    }
    if let Some((most, now)) = proc.processes() {
        figures.insert(Signal::Pid, left(most, now));
    }
    figures
}

fn left(capacity: u64, used: u64) -> Figure {
    Figure {
        available: capacity.saturating_sub(used),
        capacity,
    }
}

/// Result of reading a file system.
#[derive(Debug, PartialEq, Eq)]
enum Look {
    /// It has not returned.
    Hangs,
    /// There is no such directory.
    Absent,
    Found(Disk),
}

#[derive(Debug, PartialEq, Eq)]
struct Disk {
    fs: Fs,
    device: u64,
}

impl Look {
    /// Adds the figures of bytes and inodes. Some file systems have no sizes, and some no count of inodes.
    fn add(&self, observed: &mut Observations, [bytes, inodes]: [Signal; 2]) {
        let Self::Found(Disk { fs, .. }) = self else {
            return;
        };
        for (signal, available, capacity) in [
            (bytes, fs.available, fs.capacity),
            (inodes, fs.inodes_free, fs.inodes),
        ] {
            if let (Some(available), Some(capacity)) = (available, capacity.filter(|c| *c > 0)) {
                let figure = Figure {
                    available,
                    capacity,
                };
                observed.figures.insert(signal, figure);
            }
        }
    }
}

/// Reads a file system on a thread of its own, unless the last read still `hangs`.
async fn look_at(hangs: &Arc<AtomicBool>, path: PathBuf) -> Look {
    if hangs.swap(true, Ordering::SeqCst) {
        return Look::Hangs;
    }
    let of = Arc::clone(hangs);
    let read = blocking::spawn(move || {
        let found = disk_at(&path);
        of.store(false, Ordering::SeqCst);
        found
    });
    match tokio::time::timeout(PATIENCE, read).await {
        Ok(Ok(found)) => found.map_or(Look::Absent, Look::Found),
        Ok(Err(error)) => {
            debug!(%error, "cannot observe a file system of the node");
            Look::Hangs
        }
        Err(_) => {
            debug!("a file system of the node hangs");
            Look::Hangs
        }
    }
}

/// Reads the file system that `path` is on; `None` when there is no such path. Blocking.
fn disk_at(path: &Path) -> Option<Disk> {
    let device = device_of(path).ok()?;
    let fs = space_of(path, 0)?;
    Some(Disk { fs, device })
}

/// Returns what the pods that were walked have on disk.
pub(super) fn on_disk(pods: &[PodUsage], storage: &Storage) -> BTreeMap<PodUid, PodUse> {
    let walked = pods
        .iter()
        .filter(|pod| storage.walked.contains_key(&pod.uid));
    walked
        .map(|pod| (pod.uid.clone(), use_of(pod, Some(storage))))
        .collect()
}

fn use_of(pod: &PodUsage, storage: Option<&Storage>) -> PodUse {
    let walked = storage.and_then(|s| s.walked.get(&pod.uid));
    let space = |of: DiskUsage| Space {
        bytes: of.bytes,
        inodes: of.inodes,
    };
    let containers = pod.containers.iter().map(|container| {
        let memory = container.usage.memory.as_ref().and_then(|m| m.working_set);
        let rootfs = storage.and_then(|s| s.containers.get(&container.id)?.rootfs);
        let of = ContainerUse {
            memory,
            rootfs: rootfs.map(|(bytes, inodes)| Space {
                bytes,
                inodes: inodes.unwrap_or(0),
            }),
            logs: walked.map(|of| space(of.logs.get(&container.id).copied().unwrap_or_default())),
        };
        (container.name.clone(), of)
    });
    PodUse {
        memory: pod.usage.memory.as_ref().and_then(|m| m.working_set),
        processes: pod.usage.threads,
        containers: containers.collect(),
        volumes: walked.map_or_else(Space::default, |of| space(of.volumes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn file_systems_without_a_size_have_no_figures() {
        let dir = tempfile::tempdir().unwrap();
        let free: Arc<AtomicBool> = Arc::default();
        let figures = async |path: &Path| {
            let mut observed = Observations::default();
            let look = look_at(&free, path.to_owned()).await;
            look.add(&mut observed, [Signal::NodeFs, Signal::NodeFsInodes]);
            (look, observed.figures)
        };
        let (_, found) = figures(dir.path()).await;
        assert!(found.contains_key(&Signal::NodeFs));
        let (look, found) = figures(Path::new("/proc")).await;
        assert!(matches!(look, Look::Found(_)) && !found.contains_key(&Signal::NodeFs));
        let (look, found) = figures(Path::new("/none")).await;
        assert!(look == Look::Absent && found.is_empty());
    }

    #[test]
    fn layers_on_the_disk_of_the_root_directory_split_the_disks() {
        let named = |place: &str| v1::FilesystemUsage {
            fs_id: Some(v1::FilesystemIdentifier {
                mountpoint: place.to_owned(),
            }),
            ..Default::default()
        };
        let answer = |images: &[&str], layers: &[&str]| v1::ImageFsInfoResponse {
            image_filesystems: images.iter().map(|place| named(place)).collect(),
            container_filesystems: layers.iter().map(|place| named(place)).collect(),
        };
        assert_eq!(Places::of(answer(&[], &["/run"])), None);
        assert_eq!(Places::of(answer(&[""], &[])), None);
        for (layers, wanted) in [
            (&[][..], None),
            (&["/images"], None),
            (&["/run"], Some("/run")),
        ] {
            let places = Places::of(answer(&["/images"], layers)).unwrap();
            assert_eq!(places.images, Path::new("/images"));
            assert_eq!(places.layers.as_deref(), wanted.map(Path::new));
        }

        let found = |device| {
            Look::Found(Disk {
                fs: Fs::default(),
                device,
            })
        };
        assert_eq!(layout(&found(1), &found(2), None), Some(Disks::Dedicated));
        assert_eq!(
            layout(&found(1), &found(2), Some(&found(1))),
            Some(Disks::Split)
        );
        assert_eq!(
            layout(&found(1), &found(2), Some(&Look::Hangs)),
            None,
            "as before"
        );
        assert_eq!(layout(&found(1), &Look::Absent, None), None);
    }

    #[tokio::test]
    async fn a_file_system_that_hangs_is_looked_at_by_one_thread() {
        let dir = tempfile::tempdir().unwrap();
        let hangs = Arc::new(AtomicBool::new(true));
        let look = look_at(&hangs, dir.path().to_owned()).await;
        assert_eq!(look, Look::Hangs);
        hangs.store(false, Ordering::SeqCst);
        let look = look_at(&hangs, dir.path().to_owned()).await;
        assert!(matches!(look, Look::Found(_)) && !hangs.load(Ordering::SeqCst));
    }
}
