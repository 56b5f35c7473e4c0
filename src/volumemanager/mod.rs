//! Layer 4: volumes of pods, emptyDir, hostPath, and those whose files the agent writes (configMap, secret,
//! downwardAPI, projected); upstream's volume manager for what needs no other node.
//!
//! Comes in: a pod, and the objects it refers to as they were found. Goes out: a host path per volume that
//! a container mounts. Pod directories are `<root>/pods/<uid>/{volumes,plugins}` (0750), volumes
//! `volumes/<plugin>/<name>`.
//!
//! **Invariant:** the phase of a volume is on disk before each mount and unmount, so a restart knows what
//! may be half done. What is recorded as mounted and still is, is not touched.
//!
//! **Invariant:** removal goes by records alone, never through a mount, a link, or onto another file system;
//! what a hostPath leads to is never removed.

mod atomic_writer;
mod content;
mod error;
mod host_path;
mod mounts;
mod ownership;
mod payload;
mod plan;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::{EmptyDirVolumeSource, Pod, Volume};

use tokio::time::Instant;

pub use content::TOKEN_EXPIRED;
pub use error::VolumeError;
pub use host_path::HostPathError;
pub use payload::PayloadError;

use crate::core::state::{Transaction, VolumePhase, VolumeRecord, child_key};
use crate::kuberuntime::security;
use crate::kuberuntime::sources::{Sources, is_content_volume, mounted_volumes};
use crate::store::Store;
use crate::types::events::EventRecorder;
use crate::types::metrics::{Metrics, StorageLabel};
use crate::types::{Clock, PodExt, PodUid, blocking};
use error::io_error;
use ownership::{Access, ChangePolicy};
use plan::{Medium, Plan, make_dir, memory_size, set_up, tear_down};

const EMPTY_DIR: &str = "kubernetes.io/empty-dir";
const HOST_PATH: &str = "kubernetes.io/host-path";
const CONFIG_MAP: &str = "kubernetes.io/configmap";
const SECRET: &str = "kubernetes.io/secret";
const DOWNWARD_API: &str = "kubernetes.io/downward-api";
const PROJECTED: &str = "kubernetes.io/projected";
/// Plugins whose volumes lie in the pod's directory.
const OWN: [&str; 5] = [EMPTY_DIR, CONFIG_MAP, SECRET, DOWNWARD_API, PROJECTED];

/// Names of the plugins, as in records and metrics.
pub const PLUGINS: [&str; 6] = [
    EMPTY_DIR,
    HOST_PATH,
    CONFIG_MAP,
    SECRET,
    DOWNWARD_API,
    PROJECTED,
];

/// The plugin of a volume; `None` for one that the runtime mounts.
pub fn plugin_of(volume: &Volume) -> Option<&'static str> {
    match volume {
        Volume {
            empty_dir: Some(_), ..
        } => Some(EMPTY_DIR),
        Volume {
            host_path: Some(_), ..
        } => Some(HOST_PATH),
        other => content_plugin(other),
    }
}

/// Mounts and unmounts. Cheap to clone. One caller per pod at a time: the pod's worker.
#[derive(Clone)]
pub struct VolumeManager {
    root: PathBuf,
    memory: Option<u64>,
    store: Store,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
    /// By `<uid>/<volume>`; gone with the volume.
    written: Arc<Mutex<HashMap<String, content::Written>>>,
}

impl VolumeManager {
    /// A manager for the pods below `<root>/pods`. `memory` is what pods may use of the machine's memory
    /// in bytes; no tmpfs gets more.
    pub fn new(
        root: impl Into<PathBuf>,
        memory: Option<u64>,
        store: Store,
        clock: Arc<dyn Clock>,
    ) -> Self {
        Self {
            root: root.into(),
            memory,
            store,
            clock,
            metrics: Metrics::default(),
            written: Arc::default(),
        }
    }

    /// Counts in `metrics`.
    #[must_use]
    pub fn measured(mut self, metrics: Metrics) -> Self {
        self.metrics = metrics;
        self
    }

    fn observe(&self, operation: &str, plugin: &str, begun: Instant, ok: bool) {
        let label = StorageLabel {
            migrated: "false".to_owned(),
            operation_name: operation.to_owned(),
            status: if ok { "success" } else { "fail-unknown" }.to_owned(),
            volume_plugin: plugin.to_owned(),
        };
        self.metrics
            .storage_operation_duration
            .get_or_create(&label)
            .observe(begun.elapsed().as_secs_f64());
    }

    fn written(&self) -> MutexGuard<'_, HashMap<String, content::Written>> {
        // Entries are replaced whole.
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes sure that every volume a container mounts is there and holds what it should, and gives their
    /// paths on the host; upstream's `WaitForAttachAndMount`. A failure is told by an event as well.
    /// When dropped, a step that has begun is on record and is taken up by the next call.
    ///
    /// # Errors
    /// The first volume that cannot be mounted.
    pub async fn mount(
        &self,
        pod: &Pod,
        sources: &Sources,
        recorder: &dyn EventRecorder,
    ) -> Result<BTreeMap<String, PathBuf>, VolumeError> {
        let uid = pod.uid();
        self.make_pod_dirs(&uid)?;
        let used = mounted_volumes(pod);
        let mut paths = BTreeMap::new();
        for volume in pod.spec_ref().volumes.iter().flatten() {
            // Images are mounted by the runtime.
            if volume.image.is_some() || !used.contains(volume.name.as_str()) {
                continue;
            }
            match self.mount_any(pod, volume, sources, recorder).await {
                Ok(path) => {
                    paths.insert(volume.name.clone(), path);
                }
                Err(error) => {
                    recorder.record(error.event(pod, &volume.name));
                    return Err(error);
                }
            }
        }
        Ok(paths)
    }

    async fn mount_any(
        &self,
        pod: &Pod,
        volume: &Volume,
        sources: &Sources,
        recorder: &dyn EventRecorder,
    ) -> Result<PathBuf, VolumeError> {
        if !is_content_volume(volume) {
            return self.mount_one(pod, volume).await;
        }
        let payload = content::collect(pod, volume, sources)?;
        let stale = payload.stale_token;
        let path = self.mount_content(pod, volume, payload).await?;
        self.tell_stale(pod, volume, stale, recorder);
        Ok(path)
    }

    async fn mount_one(&self, pod: &Pod, volume: &Volume) -> Result<PathBuf, VolumeError> {
        let uid = pod.uid();
        let plan = self.plan(pod, volume)?;
        let path = plan.path();
        let key = child_key(&uid, &volume.name);
        let known = self.store.snapshot().record::<VolumeRecord>(&key).cloned();
        if let Some(known) = &known {
            if known.plugin != plan.plugin() || Path::new(&known.path) != path {
                self.unmount_one(&uid, &volume.name, known).await?;
            } else if known.phase == VolumePhase::Mounted
                && plan
                    .is_set_up()
                    .map_err(io_error("look at volume", &uid, &path))?
            {
                return Ok(path);
            }
        }
        self.record(
            &uid,
            &volume.name,
            plan.plugin(),
            &path,
            VolumePhase::Mounting,
        )
        .await?;
        let plugin = plan.plugin();
        let (of, name) = (uid.clone(), volume.name.clone());
        // What a hostPath leads to belongs to the node.
        let group = security::fs_group(pod).filter(|_| plugin != HOST_PATH);
        let policy = ChangePolicy::of(pod);
        let at = path.clone();
        let begun = Instant::now();
        let done = run_blocking(move || {
            set_up(&plan, &of, &name)?;
            match group {
                Some(group) => ownership::give(&at, group, Access::ReadWrite, policy)
                    .map_err(io_error("give fsGroup volume", &of, &at)),
                None => Ok(()),
            }
        })
        .await;
        self.observe("volume_mount", plugin, begun, done.is_ok());
        done?;
        tracing::info!(pod = %uid, volume = %volume.name, plugin, "mounted volume");
        self.record(&uid, &volume.name, plugin, &path, VolumePhase::Mounted)
            .await?;
        Ok(path)
    }

    /// Unmounts and removes every volume on record of a pod; upstream's `WaitForUnmount`. Its containers
    /// must have ended. Once it succeeds there is no record left.
    ///
    /// # Errors
    /// The first volume that cannot be unmounted; the others were tried.
    pub async fn unmount(&self, uid: &PodUid) -> Result<(), VolumeError> {
        let prefix = child_key(uid, "");
        let records: Vec<(String, VolumeRecord)> = self
            .store
            .snapshot()
            .with_prefix::<VolumeRecord>(&prefix)
            .map(|(key, record)| (key[prefix.len()..].to_owned(), record.clone()))
            .collect();
        let mut result = Ok(());
        for (name, record) in records {
            let one = self.unmount_one(uid, &name, &record).await;
            result = result.and(one);
        }
        result
    }

    /// Whether a pod has volumes on record.
    pub fn has_volumes(&self, uid: &PodUid) -> bool {
        let seen = self.store.snapshot();
        seen.with_prefix::<VolumeRecord>(&child_key(uid, ""))
            .next()
            .is_some()
    }

    async fn unmount_one(
        &self,
        uid: &PodUid,
        name: &str,
        record: &VolumeRecord,
    ) -> Result<(), VolumeError> {
        let path = PathBuf::from(&record.path);
        if record.phase != VolumePhase::Unmounting {
            self.record(uid, name, &record.plugin, &path, VolumePhase::Unmounting)
                .await?;
        }
        match record.plugin.as_str() {
            HOST_PATH => {}
            plugin
                if OWN.contains(&plugin) && path.starts_with(self.pod_dir(uid).join("volumes")) =>
            {
                let uid = uid.clone();
                let begun = Instant::now();
                let done = run_blocking(move || tear_down(&path, &uid)).await;
                self.observe("volume_unmount", plugin, begun, done.is_ok());
                done?;
            }
            other => {
                return Err(VolumeError::Unsupported {
                    pod: uid.clone(),
                    volume: name.to_owned(),
                    what: format!("removing {} at {} (on record)", other, record.path),
                });
            }
        }
        let key = child_key(uid, name);
        self.written().remove(&key);
        let why = format!("{name} ({})", record.plugin);
        let transaction = Transaction::new().delete::<VolumeRecord>(&key).journal(
            Some(uid),
            "volume unmounted",
            why,
        );
        self.commit(uid, name, transaction).await
    }

    /// Takes over volumes that are on disk but not on record, after the store was lost: they are recorded
    /// as mounted, so that their pods' end removes them. Returns how many. Changes no volume.
    ///
    /// # Errors
    /// When a directory cannot be read or a record not committed.
    pub async fn reconcile(&self) -> Result<usize, VolumeError> {
        let mut adopted = 0;
        for uid in self.pods_on_disk()? {
            for plugin in OWN {
                adopted += self.adopt(&uid, plugin).await?;
            }
        }
        Ok(adopted)
    }

    async fn adopt(&self, uid: &PodUid, plugin: &str) -> Result<usize, VolumeError> {
        let dir = self.plugin_dir(uid, plugin);
        let mut adopted = 0;
        for name in dirs_in(&dir).map_err(io_error("list volumes in", uid, &dir))? {
            let key = child_key(uid, &name);
            if self.store.snapshot().record::<VolumeRecord>(&key).is_some() {
                continue;
            }
            let path = dir.join(&name);
            self.record(uid, &name, plugin, &path, VolumePhase::Mounted)
                .await?;
            adopted += 1;
        }
        Ok(adopted)
    }

    /// Makes a pod's directories; upstream's `makePodDataDirs`.
    ///
    /// # Errors
    /// When one cannot be made.
    pub fn make_pod_dirs(&self, uid: &PodUid) -> Result<(), VolumeError> {
        check_name(uid, uid.as_str())?;
        let pod = self.pod_dir(uid);
        for dir in [pod.clone(), pod.join("volumes"), pod.join("plugins")] {
            if dir.is_dir() {
                continue;
            }
            make_dir(&dir, 0o750).map_err(io_error("create directory", uid, &dir))?;
        }
        Ok(())
    }

    /// Whether a pod has a directory.
    pub fn pod_dirs_exist(&self, uid: &PodUid) -> bool {
        is_component(uid.as_str()) && self.pod_dir(uid).is_dir()
    }

    /// Removes a pod's directory. Its volumes must be unmounted.
    ///
    /// # Errors
    /// `InUse` when volumes are on record or on disk, or something is mounted there.
    pub async fn remove_pod_dirs(&self, uid: &PodUid) -> Result<(), VolumeError> {
        check_name(uid, uid.as_str())?;
        let path = self.pod_dir(uid);
        let in_use = |what: String| VolumeError::InUse {
            pod: uid.clone(),
            path: path.clone(),
            what,
        };
        if self.has_volumes(uid) {
            return Err(in_use("it has volumes that are mounted".to_owned()));
        }
        let volumes = path.join("volumes");
        for plugin in dirs_in(&volumes).map_err(io_error("list volumes in", uid, &volumes))? {
            let dir = volumes.join(&plugin);
            let left = dirs_in(&dir).map_err(io_error("list volumes in", uid, &dir))?;
            if let Some(volume) = left.first() {
                return Err(in_use(format!(
                    "volume {plugin}/{volume} is there but not on record"
                )));
            }
        }
        let (dir, of) = (path.clone(), uid.clone());
        run_blocking(move || {
            mounts::remove_tree(&dir).map_err(io_error("remove directory", &of, &dir))
        })
        .await
    }

    /// Unmounts the volumes and removes the directories of pods that are not `known`; upstream's
    /// `cleanupOrphanedPodDirs`. Only to be called once every source has spoken. Returns what stayed.
    pub async fn cleanup_orphan_dirs(&self, known: &BTreeSet<PodUid>) -> Vec<VolumeError> {
        let mut orphans: BTreeSet<PodUid> = match self.pods_on_disk() {
            Ok(pods) => pods,
            Err(error) => return vec![error],
        };
        let seen = self.store.snapshot();
        orphans.extend(
            seen.with_prefix::<VolumeRecord>("")
                .filter_map(|(key, _)| key.split_once('/'))
                .map(|(uid, _)| PodUid::new(uid)),
        );
        let mut errors = Vec::new();
        for uid in orphans.difference(known) {
            let removed = match self.unmount(uid).await {
                Ok(()) => self.remove_pod_dirs(uid).await,
                Err(error) => Err(error),
            };
            match removed {
                Ok(()) => tracing::info!(pod = %uid, "removed the directory of a pod that is gone"),
                Err(error) => errors.push(error),
            }
        }
        errors
    }

    fn pod_dir(&self, uid: &PodUid) -> PathBuf {
        self.root.join("pods").join(uid.as_str())
    }

    fn plugin_dir(&self, uid: &PodUid, plugin: &str) -> PathBuf {
        let dir = plugin.replace('/', "~");
        self.pod_dir(uid).join("volumes").join(dir)
    }

    fn pods_on_disk(&self) -> Result<BTreeSet<PodUid>, VolumeError> {
        let pods = self.root.join("pods");
        let none = PodUid::new("");
        let names = dirs_in(&pods).map_err(io_error("list pod directories in", &none, &pods))?;
        Ok(names.into_iter().map(PodUid::from).collect())
    }

    fn plan(&self, pod: &Pod, volume: &Volume) -> Result<Plan, VolumeError> {
        let uid = pod.uid();
        check_name(&uid, &volume.name)?;
        let unsupported = |what: String| VolumeError::Unsupported {
            pod: uid.clone(),
            volume: volume.name.clone(),
            what,
        };
        if let Some(host) = &volume.host_path {
            host_path::validate(&host.path).map_err(|source| VolumeError::HostPath {
                pod: uid.clone(),
                volume: volume.name.clone(),
                source,
            })?;
            return Ok(Plan::Host {
                path: host.path.clone(),
                type_: host.type_.clone().unwrap_or_default(),
            });
        }
        let path = |plugin| self.plugin_dir(&uid, plugin).join(&volume.name);
        let quantity = |source| VolumeError::Quantity {
            pod: uid.clone(),
            volume: volume.name.clone(),
            source,
        };
        if let Some(plugin) = content_plugin(volume) {
            let medium = if plugin == CONFIG_MAP {
                Medium::Disk
            } else {
                let no_limit = EmptyDirVolumeSource::default();
                Medium::Memory(memory_size(pod, &no_limit, self.memory).map_err(quantity)?)
            };
            return Ok(Plan::Content {
                plugin,
                path: path(plugin),
                medium,
            });
        }
        let Some(empty) = &volume.empty_dir else {
            return Err(unsupported("its kind".to_owned()));
        };
        let path = path(EMPTY_DIR);
        match empty.medium.as_deref().unwrap_or_default() {
            "" => Ok(Plan::Disk { path }),
            "Memory" => {
                let size = memory_size(pod, empty, self.memory).map_err(quantity)?;
                Ok(Plan::Memory { path, size })
            }
            other => Err(unsupported(format!("emptyDir medium {other:?}"))),
        }
    }

    async fn record(
        &self,
        uid: &PodUid,
        name: &str,
        plugin: &str,
        path: &Path,
        phase: VolumePhase,
    ) -> Result<(), VolumeError> {
        let record = VolumeRecord {
            plugin: plugin.to_owned(),
            path: path.to_string_lossy().into_owned(),
            phase,
            at: self.clock.now(),
        };
        let transaction = Transaction::new().put(child_key(uid, name), record);
        self.commit(uid, name, transaction).await
    }

    async fn commit(
        &self,
        uid: &PodUid,
        name: &str,
        transaction: Transaction,
    ) -> Result<(), VolumeError> {
        match self.store.commit(transaction).await {
            Ok(_) => Ok(()),
            Err(source) => Err(VolumeError::Commit {
                pod: uid.clone(),
                volume: name.to_owned(),
                source,
            }),
        }
    }
}

/// The plugin of a volume whose files the agent writes.
fn content_plugin(volume: &Volume) -> Option<&'static str> {
    [
        (volume.config_map.is_some(), CONFIG_MAP),
        (volume.secret.is_some(), SECRET),
        (volume.downward_api.is_some(), DOWNWARD_API),
        (volume.projected.is_some(), PROJECTED),
    ]
    .into_iter()
    .find_map(|(is, plugin)| is.then_some(plugin))
}

/// Names of the directories in `dir`; none when it is not there.
fn dirs_in(dir: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir()
            && let Some(name) = entry.file_name().to_str()
        {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

fn is_component(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\0'])
}

fn check_name(uid: &PodUid, name: &str) -> Result<(), VolumeError> {
    if is_component(name) && is_component(uid.as_str()) {
        return Ok(());
    }
    Err(VolumeError::Name {
        pod: uid.clone(),
        name: name.to_owned(),
    })
}

/// An error with its causes, for events.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.ends_with(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

/// Runs file system work beside the runtime's threads. It goes on when the future is dropped.
async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, VolumeError> + Send + 'static,
) -> Result<T, VolumeError> {
    match blocking::run(work).await {
        Ok(result) => result,
        Err(error) => Err(VolumeError::Io {
            verb: "finish work on volumes",
            pod: PodUid::new(""),
            path: PathBuf::new(),
            source: io::Error::other(error),
        }),
    }
}

#[cfg(test)]
mod tests;
