//! Layer 4: volumes of pods. emptyDir, hostPath, those whose files the agent writes (configMap, secret, downwardAPI,
//! projected), and those whose storage is elsewhere ([`remote`]); upstream's volume manager.
//!
//! Comes in: a pod, and the objects it refers to as they were found. Goes out: a host path per volume that
//! a container mounts. Pod directories are `<root>/pods/<uid>/{volumes,plugins}` (0750), volumes
//! `volumes/<plugin>/<name>`.
//!
//! What each step is, is decided by [`crate::core::volumes::planner`], for which one task looks at what there is (`driver`);
//! a step is a task of its own (`operations`) that ends whether or not somebody waits for it.
//!
//! **Invariant:** the phase of a volume is on disk before each mount and unmount, so a restart knows what
//! may be half done. What is recorded as mounted and still is, is not touched.
//!
//! **Invariant:** removal goes by records alone, never through a mount, a link, or onto another file system;
//! what a hostPath leads to is never removed.
//!
//! **Invariant:** no path is looked at that may lead to a server that is gone; what hangs holds up its own pod
//! only.

mod accounts;
mod alone;
mod atomic_writer;
pub mod attached;
mod block;
pub mod command;
mod content;
pub mod csi;
mod dirs;
mod disk;
mod driver;
mod env_files;
mod error;
mod fs_group;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod host_path;
mod huge_pages;
mod identity;
pub mod in_use;
pub mod iscsi;
mod known;
pub mod local;
mod mount;
mod mounts;
pub mod nfs;
mod operations;
mod ownership;
mod payload;
mod plan;
mod reconcile;
pub mod remote;
mod remotes;
mod safety;
mod shown_files;
#[cfg(test)]
mod stand_in;
mod steps;
pub mod subpath;
mod takeover;
mod turns;
mod unmount;
mod usage;

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::Volume;
use tokio::sync::watch;
use tokio::time::Instant;

pub use accounts::{RemoteVolume, count};
pub use content::TOKEN_EXPIRED;
pub use error::{RemoteFailure, VolumeError};
pub use fs_group::{CHANGE_IN_PROGRESS, CHANGE_REFUSED};
pub use host_path::HostPathError;
pub use huge_pages::HugePagesError;
pub use payload::PayloadError;
pub use reconcile::Reconciled;
pub use takeover::Trace;

use crate::core::volumes::known::{InUse, Known};
use crate::core::volumes::{CSI, ISCSI, LOCAL, NFS};
use crate::store::Store;
use crate::types::events::EventRecorder;
use crate::types::metrics::{Metrics, StorageLabel};
use crate::types::{Clock, Pace, PodUid, blocking};
use attached::Attached;
use operations::Operations;
use remote::RemotePlugin;

const EMPTY_DIR: &str = "kubernetes.io/empty-dir";
const HOST_PATH: &str = crate::core::volumes::HOST_PATH;
const CONFIG_MAP: &str = "kubernetes.io/configmap";
const SECRET: &str = "kubernetes.io/secret";
const DOWNWARD_API: &str = "kubernetes.io/downward-api";
const PROJECTED: &str = "kubernetes.io/projected";
/// Plugins whose volumes lie in the pod's directory.
const OWN: [&str; 5] = [EMPTY_DIR, CONFIG_MAP, SECRET, DOWNWARD_API, PROJECTED];
/// How long a pod waits for its volumes at a time; upstream's `podAttachAndMountTimeout`.
const POD_WAIT: Duration = Duration::from_secs(123);

/// Names of the plugins, as in records and metrics.
pub const PLUGINS: [&str; 10] = [
    EMPTY_DIR,
    HOST_PATH,
    CONFIG_MAP,
    SECRET,
    DOWNWARD_API,
    PROJECTED,
    CSI,
    NFS,
    ISCSI,
    LOCAL,
];

/// The plugin of a volume by what the pod says of it; `None` for one that the runtime mounts, and for a claim.
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

/// Bytes of the machine's memory that pods may use.
pub type MemoryForPods = Arc<dyn Fn() -> Option<u64> + Send + Sync>;

/// Mounts and unmounts. Cheap to clone. One caller per pod at a time: the pod's worker.
#[derive(Clone)]
pub struct VolumeManager {
    root: PathBuf,
    memory: MemoryForPods,
    store: Store,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
    recorder: Option<Arc<dyn EventRecorder>>,
    mounts: mounts::Source,
    plugins: Arc<BTreeMap<&'static str, Arc<dyn RemotePlugin>>>,
    operations: Operations,
    desk: Arc<Mutex<remotes::Desk>>,
    in_use: watch::Sender<InUse>,
    /// Since when pods wait for their volumes.
    waiting: Arc<Mutex<HashMap<PodUid, mount::Waiting>>>,
    /// Since when pods ask for volumes that are not mounted yet, by volume.
    requested: Arc<Mutex<HashMap<PodUid, HashMap<String, Instant>>>>,
    /// By `<uid>/<volume>`; gone with the volume.
    written: Arc<Mutex<HashMap<String, content::Written>>>,
    pace: Pace,
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
        let root = root.into();
        Self {
            mounts: mounts::Source::new(&root),
            root,
            memory: Arc::new(move || memory),
            store,
            clock,
            metrics: Metrics::default(),
            recorder: None,
            plugins: Arc::default(),
            operations: Operations::default(),
            desk: Arc::default(),
            in_use: watch::Sender::new(InUse::default()),
            waiting: Arc::default(),
            requested: Arc::default(),
            written: Arc::default(),
            pace: Pace::default(),
        }
    }

    /// For a node on which pods may run already: nothing is unstaged, and the list of what is in use not whole, until it
    /// is told that the volumes of all pods are known ([`VolumeManager::know`]).
    #[must_use]
    pub fn taking_over(self) -> Self {
        self.desk().known = Known::Nothing;
        self
    }

    /// Asks how much memory pods may use with each volume that is mounted: the machine's size may change.
    #[must_use]
    pub fn following_memory(mut self, memory: MemoryForPods) -> Self {
        self.memory = memory;
        self
    }

    /// Counts in `metrics`.
    #[must_use]
    pub fn measured(mut self, metrics: Metrics) -> Self {
        self.metrics = metrics;
        self
    }

    /// Mounts volumes of the plugin `name` (see [`crate::core::volumes::Remote::plugin`]) with `plugin`.
    #[must_use]
    pub fn with_plugin(mut self, name: &'static str, plugin: Arc<dyn RemotePlugin>) -> Self {
        Arc::make_mut(&mut self.plugins).insert(name, plugin);
        self
    }

    /// Mounts NFS exports, iSCSI disks and disks and directories of this node with these tools.
    #[must_use]
    pub fn with_system_tools(self, tools: command::Tools) -> Self {
        let attached = Attached::new(self.store.clone(), Arc::clone(&self.clock));
        let iscsi = iscsi::IscsiPlugin::new(tools.clone(), attached.clone());
        self.with_plugin(NFS, Arc::new(nfs::NfsPlugin::new(tools.clone())))
            .with_plugin(ISCSI, Arc::new(iscsi))
            .with_plugin(LOCAL, Arc::new(local::LocalPlugin::new(tools, attached)))
    }

    /// Tells of unmounts that fail; of mounts those are told who wait for them.
    #[must_use]
    pub fn telling(mut self, recorder: Arc<dyn EventRecorder>) -> Self {
        self.recorder = Some(recorder);
        self
    }

    /// Returns the log back-off of stuck terminations.
    pub fn pace(&self) -> &Pace {
        &self.pace
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

    fn waiting(&self) -> MutexGuard<'_, HashMap<PodUid, mount::Waiting>> {
        // Entries are replaced whole.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn requested(&self) -> MutexGuard<'_, HashMap<PodUid, HashMap<String, Instant>>> {
        // Entries are put in and taken out.
        self.requested
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn written(&self) -> MutexGuard<'_, HashMap<String, content::Written>> {
        // Entries are replaced whole.
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
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

/// Names of the directories in `dir` that can be the agent's own; none when it is not there.
fn dirs_in(dir: &Path) -> io::Result<Vec<String>> {
    let all = all_dirs_in(dir)?.into_iter();
    Ok(all.filter_map(|name| name.into_string().ok()).collect())
}

/// Names of the directories in `dir`, whoever has made them; none when it is not there.
fn all_dirs_in(dir: &Path) -> io::Result<Vec<OsString>> {
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            names.push(entry.file_name());
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
#[allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]
mod driver_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]
mod model_tests;
#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests"
)]
mod remote_tests;
#[cfg(test)]
mod tests;
