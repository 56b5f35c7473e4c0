//! Keeps the logs of running containers within `containerLogMaxSize` and `containerLogMaxFiles`. Upstream:
//! `containerLogManager`.
//!
//! The store knows the running containers; each costs one `stat` every `containerLogMonitorInterval`. If the log of a
//! running container does not exist, an agent renamed it and then crashed: the runtime is asked to reopen it.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::TURNS;
use super::rotate::{RotateError, Rotated, clean_up, rename_away, rename_back};
use crate::core::state::PlegRecord;
use crate::kuberuntime::cri::{CriClient, CriError};
use crate::kuberuntime::logs::file_of;
use crate::store::Store;
use crate::types::runtime::ContainerState;
use crate::types::{Clock, ContainerId, blocking, causes};

/// Delay before the first poll of logs. By then the runtime has reported which containers still run.
const FIRST: Duration = Duration::from_secs(3);

/// Limits that trigger a rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RotationPolicy {
    /// Size in bytes from which a log is rotated; `None` for never.
    pub max_size: Option<u64>,
    /// Files of a container, the one that is written included; at least 2.
    pub max_files: u32,
    /// Rotations that run at once; at least 1.
    pub workers: usize,
    /// Poll interval of sizes.
    pub interval: Duration,
}

/// Rotates logs; see [`LogRotator::run`].
pub struct LogRotator {
    store: Store,
    cri: CriClient,
    clock: Arc<dyn Clock>,
    policy: RotationPolicy,
    pod_logs_dir: PathBuf,
    /// Containers whose leftovers were removed.
    cleaned: HashSet<ContainerId>,
    tried: Mutex<Tried>,
}

#[derive(Default)]
struct Tried {
    /// Last message about each log that cannot be rotated.
    said: HashMap<ContainerId, String>,
    /// Missing logs that the runtime has opened anew. One that is still missing then is written nowhere, or elsewhere.
    reopened: HashSet<ContainerId>,
}

#[derive(Clone, Debug)]
struct Log {
    id: ContainerId,
    path: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    Rotate,
    Reopen,
}

#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Disk(#[from] RotateError),
    #[error(transparent)]
    Runtime(#[from] CriError),
    #[error("make log directory {}: {source}", path.display())]
    Directory { path: PathBuf, source: io::Error },
    #[error("the agent stops")]
    Stopping,
}

impl LogRotator {
    /// `pod_logs_dir`: directory of the logs whose path the runtime does not report.
    pub fn new(
        store: Store,
        cri: CriClient,
        clock: Arc<dyn Clock>,
        policy: RotationPolicy,
        pod_logs_dir: PathBuf,
    ) -> Self {
        Self {
            store,
            cri,
            clock,
            policy,
            pod_logs_dir,
            cleaned: HashSet::new(),
            tried: Mutex::default(),
        }
    }

    /// Works until `token` is cancelled; rotations that were begun are finished.
    pub async fn run(mut self, token: CancellationToken) {
        let mut wait = self.policy.interval.min(FIRST);
        loop {
            tokio::select! {
                () = token.cancelled() => return,
                () = tokio::time::sleep(wait) => {}
            }
            self.tick(&token).await;
            wait = self.policy.interval;
        }
    }

    /// Looks at all logs once and rotates those that are too long.
    pub async fn tick(&mut self, token: &CancellationToken) {
        let running = self.running();
        let ids: HashSet<_> = running.iter().map(|log| log.id.clone()).collect();
        self.cleaned.retain(|id| ids.contains(id));
        self.tried(|tried| tried.said.retain(|id, _| ids.contains(id)));
        let new: Vec<Log> = running
            .iter()
            .filter(|log| self.cleaned.insert(log.id.clone()))
            .cloned()
            .collect();
        let max_size = self.policy.max_size;
        let due = blocking::run_in(&TURNS, move || {
            for log in new {
                if let Err(error) = clean_up(&log.path) {
                    debug!(container = %log.id, %error, "cannot remove leftovers of a rotation");
                }
            }
            let need = |log: Log| need(&log.path, max_size).map(|need| (log, need));
            running.into_iter().filter_map(need).collect::<Vec<_>>()
        });
        let mut due = due.await.unwrap_or_default();
        self.tried(|tried| {
            let missing: HashSet<_> = due
                .iter()
                .filter(|(_, need)| *need == Need::Reopen)
                .map(|(log, _)| log.id.clone())
                .collect();
            tried.reopened.retain(|id| missing.contains(id));
            due.retain(|(log, _)| !tried.reopened.contains(&log.id));
        });
        let this = &*self;
        futures::stream::iter(due)
            .for_each_concurrent(this.policy.workers.max(1), |(log, need)| async move {
                if !token.is_cancelled() {
                    this.work(log, need).await;
                }
            })
            .await;
    }

    /// The logs of the containers that run.
    fn running(&self) -> Vec<Log> {
        let state = self.store.snapshot();
        let pods = state.with_prefix::<PlegRecord>("");
        pods.flat_map(|(_, record)| {
            let containers = record.status.containers.iter();
            let running = containers.filter(|c| c.state == ContainerState::Running);
            running.map(|container| Log {
                id: container.id.clone(),
                path: file_of(&self.pod_logs_dir, &record.status, container),
            })
        })
        .collect()
    }

    /// Does what is needed, and logs failures once until they change.
    async fn work(&self, log: Log, need: Need) {
        let result = match need {
            Need::Rotate => self.rotate(&log).await,
            Need::Reopen => self.reopen(&log).await,
        };
        self.tried(|tried| match result {
            Ok(()) => {
                tried.said.remove(&log.id);
                if need == Need::Reopen {
                    tried.reopened.insert(log.id);
                }
            }
            Err(error) => {
                let text = causes(&error);
                if tried.said.get(&log.id) != Some(&text) {
                    warn!(container = %log.id, path = %log.path.display(), error = text, "cannot rotate a log, retrying");
                    tried.said.insert(log.id, text);
                }
            }
        });
    }

    fn tried<T>(&self, f: impl FnOnce(&mut Tried) -> T) -> T {
        f(&mut self.tried.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Upstream: `rotateLog`.
    async fn rotate(&self, log: &Log) -> Result<(), Failure> {
        let wall = jiff::Timestamp::from_millisecond(self.clock.now().wall_ms);
        let (path, max_files) = (log.path.clone(), self.policy.max_files);
        let now = wall.unwrap_or_default();
        let rotated: Rotated = blocking::run_in(&TURNS, move || rename_away(&path, max_files, now))
            .await
            .map_err(|_| Failure::Stopping)??;
        match self.cri.reopen_container_log(&log.id).await {
            Ok(()) => {
                debug!(container = %log.id, to = %rotated.to.display(), "rotated a log");
                Ok(())
            }
            Err(error) => {
                // The next tick tries again; until then the runtime goes on writing the same file.
                blocking::run_in(&TURNS, move || rename_back(&rotated))
                    .await
                    .map_err(|_| Failure::Stopping)??;
                Err(error.into())
            }
        }
    }

    async fn reopen(&self, log: &Log) -> Result<(), Failure> {
        if let Some(dir) = log
            .path
            .parent()
            .filter(|d| d.starts_with(&self.pod_logs_dir))
        {
            fs::create_dir_all(dir).map_err(|source| Failure::Directory {
                path: dir.to_owned(),
                source,
            })?;
        }
        self.cri.reopen_container_log(&log.id).await?;
        info!(container = %log.id, path = %log.path.display(), "log was missing, reopened it");
        Ok(())
    }
}

fn need(path: &Path, max_size: Option<u64>) -> Option<Need> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_file() => {
            let too_long = max_size.is_some_and(|max| metadata.len() >= max);
            too_long.then_some(Need::Rotate)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Some(Need::Reopen),
        _ => None,
    }
}
