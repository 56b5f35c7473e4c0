//! Layer 4: sources of pods and the mux that merges them.
//!
//! Owns what the sources want: one task per source reads manifests ([`manifest`]) and sends its full set
//! on every change, another one follows the API server; the mux task computes the difference (`core::pod_update::merge`) and sends operations
//! into the updates channel. In: files, URLs, and at start the pods recorded in the store. Out:
//! [`PodUpdate`]s, [`SourcesReady`], [`Origins`], the `sources` table, events about what is wrong.
//!
//! **Invariants.** An unreadable source keeps its own pods as they are, and affects no others, also across a
//! restart. A pod that the store knows never comes out as an addition. Upstream's `config.PodConfig`,
//! `sourceFile` and `sourceURL`.

mod adoption;
mod api;
mod conflicts;
mod file;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod http;
mod left;
pub mod manifest;
mod mux;
mod ready;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinError, JoinHandle};
use tokio_util::sync::CancellationToken;

pub use crate::core::pod_update::{Reading, SourceSet, SourcedPod};
use adoption::Adoptions;
pub use adoption::RunningStatic;
pub use api::{ApiSettings, STALE_CONFIRMATION, VERSION_KEY};
pub use conflicts::conflicts_of;
pub use file::{FileContent, candidates, cannot_be_read, content, content_of, location};
pub use ready::{Origins, SourcesReady};

use crate::core::state::State;
use crate::store::Store;
use crate::store::mounts::Mount;
use crate::types::{Clock, EventRecorder, PodSource, PodUpdate};

/// Capacity of the updates channel.
pub const UPDATES_CAPACITY: usize = 50;
/// Capacity of the channel from the sources to the mux.
const SETS_CAPACITY: usize = 10;
/// Event reason for manifests that are used and doubtful.
pub const MANIFEST_WARNING: &str = "ManifestWarning";
/// Event reason for manifests that are wrong and pods that are defined twice.
pub const FAILED_VALIDATION: &str = "FailedValidation";
/// Event reason for a path or URL that cannot be read.
pub const SOURCE_UNREADABLE: &str = "SourceUnreadable";

/// Settings of the sources.
#[derive(Clone, Debug)]
pub struct SourceSettings {
    /// Name of this node.
    pub node_name: String,
    /// `staticPodPath`.
    pub file: Option<FileSettings>,
    /// `staticPodURL`.
    pub http: Option<HttpSettings>,
    /// `--kubeconfig`.
    pub api: Option<ApiSettings>,
    /// Static pods that run and are not recorded.
    pub running: Vec<RunningStatic>,
}

/// The file source.
#[derive(Clone, Debug)]
pub struct FileSettings {
    /// A directory, of which one level is read, or a single file.
    pub path: PathBuf,
    /// Time between full relists; upstream's default is 20 s.
    pub check_frequency: Duration,
    /// Check for a missing file system; `None` where an empty directory always counts.
    pub mount: Option<Arc<Mount>>,
}

/// The http source.
#[derive(Clone, Debug)]
pub struct HttpSettings {
    /// URL to GET.
    pub url: String,
    /// Headers to send with it.
    pub headers: Vec<(String, String)>,
    /// Time between requests; upstream's default is 20 s.
    pub check_frequency: Duration,
    /// Limit of one request; upstream's is 10 s.
    pub timeout: Duration,
}

/// Reason for which the sources cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The working directory is needed for a relative path and cannot be read.
    #[error("resolve manifest path {path}: give an absolute path")]
    Path {
        /// The path.
        path: PathBuf,
        /// Cause of the failure.
        #[source]
        error: std::io::Error,
    },
    /// Not an http or https URL.
    #[error("use manifest URL {url:?}: {why}; write http://… or https://…")]
    Url {
        /// The URL.
        url: String,
        /// Description of the problem.
        why: String,
    },
    /// Not an HTTP header.
    #[error("use manifest URL header {name:?}: {why}")]
    Header {
        /// Its name.
        name: String,
        /// Description of the problem.
        why: String,
    },
    /// The HTTP client cannot be made.
    #[error("set up the manifest URL client")]
    Client(#[source] reqwest::Error),
}

/// A pod the store knows, from which the mux starts.
#[derive(Clone, Debug)]
pub struct Seed {
    /// Its source.
    pub source: PodSource,
    /// File path or URL; empty for the API server.
    pub origin: String,
    /// The pod as recorded.
    pub pod: Arc<Pod>,
}

/// The seeds that a state holds: its table of pods.
pub fn seeds(state: &State) -> Vec<Seed> {
    state
        .pods
        .values()
        .map(|versioned| Seed {
            source: versioned.record.source,
            origin: versioned.record.origin.clone(),
            pod: Arc::clone(&versioned.record.pod.0),
        })
        .collect()
}

/// Dependencies of the mux and the sources.
#[derive(Clone)]
pub struct Surroundings {
    /// Store with the `sources` table.
    pub store: Store,
    /// Takes events about broken manifests.
    pub recorder: Arc<dyn EventRecorder>,
    /// Source of the time.
    pub clock: Arc<dyn Clock>,
}

impl std::fmt::Debug for Surroundings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Surroundings")
    }
}

/// The running sources and their mux; upstream's `config.PodConfig`.
#[derive(Debug)]
pub struct PodConfig {
    ready: SourcesReady,
    origins: Origins,
    reload: watch::Sender<u64>,
    sets: mpsc::Sender<SourceSet>,
    tasks: Vec<JoinHandle<()>>,
}

impl PodConfig {
    /// Starts one task per configured source and the mux, and returns the updates channel. `seeds` are the
    /// pods the store knows ([`seeds`]). Static pods of a source that is no longer configured come out as
    /// removals; pods of the API server stay until that source speaks. Everything ends when `cancel` is
    /// cancelled or the receiver is dropped.
    ///
    /// # Errors
    /// A setting that cannot work; see [`SourceError`].
    pub fn start(
        settings: SourceSettings,
        seeds: Vec<Seed>,
        surroundings: &Surroundings,
        cancel: &CancellationToken,
    ) -> Result<(Self, mpsc::Receiver<PodUpdate>), SourceError> {
        let (reload, reloads) = watch::channel(0);
        let (sets, incoming) = mpsc::channel(SETS_CAPACITY);
        let (updates, outgoing) = mpsc::channel(UPDATES_CAPACITY);

        let adoptions = Arc::new(Adoptions::new(&seeds, settings.running));
        let file = settings
            .file
            .map(|f| file::FileSource::new(f, &settings.node_name, Arc::clone(&surroundings.clock)))
            .transpose()?
            .map(|source| source.sharing(&seeds, Arc::clone(&adoptions)));
        let http = settings
            .http
            .map(|h| http::HttpSource::new(h, &settings.node_name, Arc::clone(&surroundings.clock)))
            .transpose()?
            .map(|source| source.adopting(Arc::clone(&adoptions)));
        let api = settings
            .api
            .map(|a| api::ApiSource::new(a, &settings.node_name, surroundings.clone(), &seeds));

        let mut configured = Vec::new();
        configured.extend(file.as_ref().map(|_| PodSource::File));
        configured.extend(http.as_ref().map(|_| PodSource::Http));
        configured.extend(api.as_ref().map(|_| PodSource::Api));
        let ready = SourcesReady::new(configured.iter().copied());
        let origins = Origins::default();

        let mux = mux::Mux::new(
            seeds,
            &configured,
            ready.clone(),
            origins.clone(),
            updates,
            surroundings.clone(),
        );
        let mut tasks = vec![tokio::spawn(mux.run(incoming, cancel.clone()))];
        if let Some(source) = file {
            tasks.push(tokio::spawn(source.run(
                sets.clone(),
                reloads.clone(),
                cancel.clone(),
            )));
        }
        if let Some(source) = http {
            tasks.push(tokio::spawn(source.run(
                sets.clone(),
                reloads.clone(),
                cancel.clone(),
            )));
        }
        if let Some(source) = api {
            tasks.push(tokio::spawn(source.run(
                sets.clone(),
                reloads,
                cancel.clone(),
            )));
        }
        let config = Self {
            ready,
            origins,
            reload,
            sets,
            tasks,
        };
        Ok((config, outgoing))
    }

    /// Returns the handle that reports which sources have synced.
    pub fn ready(&self) -> SourcesReady {
        self.ready.clone()
    }

    /// Returns the origins of the pods, for the record of a pod.
    pub fn origins(&self) -> Origins {
        self.origins.clone()
    }

    /// Makes every source read again at once (SIGHUP). Never waits.
    pub fn reload(&self) {
        self.reload.send_modify(|count| *count += 1);
    }

    /// Returns the channel on which a further source sends its full sets. The source has to be announced with
    /// [`SourcesReady::configure`] first.
    pub fn sets(&self) -> mpsc::Sender<SourceSet> {
        self.sets.clone()
    }

    /// Waits for the tasks to end, which they do after cancellation only.
    ///
    /// # Errors
    /// When a task panicked.
    pub async fn join(self) -> Result<(), JoinError> {
        drop(self.sets);
        futures::future::try_join_all(self.tasks).await.map(|_| ())
    }
}

/// Reads each configured source of static pods once, for `--runonce`. Nothing is recorded.
///
/// # Errors
/// A setting that cannot work; what cannot be read is in the sets.
pub async fn read_once(
    settings: SourceSettings,
    clock: Arc<dyn Clock>,
) -> Result<Vec<SourceSet>, SourceError> {
    let mut sets = Vec::new();
    if let Some(file) = settings.file {
        let mut source = file::FileSource::new(file, &settings.node_name, Arc::clone(&clock))?;
        sets.push(source.read().await);
    }
    if let Some(http) = settings.http {
        let mut source = http::HttpSource::new(http, &settings.node_name, clock)?;
        sets.push(source.read().await);
    }
    Ok(sets)
}
