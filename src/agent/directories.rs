//! Directories that the agent makes, and sockets in them. What cannot be made at the start is made once it can be: a link may lead
//! to a disk that comes later. Only what needs it waits.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::base::Base;
use super::opening::backup_dir;
use super::{AgentError, Tasks};
use crate::kubeletconfig::AgentConfig;
use crate::types::file_label::label_for_containers;
use crate::types::pace::Pace;
use crate::types::{Clock, blocking, causes};

/// Time between two attempts.
const AGAIN: Duration = Duration::from_secs(10);
/// Advice about a directory that cannot be made.
const REMEDY: &str =
    "make the target of its links, or remove what is in its place; retrying every 10 s";

/// A directory with its mode.
type Wanted = (PathBuf, u32);

/// Makes the directories of the agent, and starts a task for those that cannot be made yet. Blocking.
///
/// # Errors
/// When there is no root directory.
pub(super) fn keep(
    config: &AgentConfig,
    base: &Base,
    tasks: &mut Tasks,
    token: &CancellationToken,
) -> Result<(), AgentError> {
    let late = make(config)?;
    if !late.is_empty() {
        let clock = Arc::clone(&base.clock);
        tasks.add("late directories", make_late(late, clock, token.clone()));
    }
    Ok(())
}

/// Makes the directories of the agent: 0750 for what pods use, as upstream. Returns those that cannot be made yet. Blocking.
///
/// # Errors
/// When there is no root directory.
fn make(config: &AgentConfig) -> Result<Vec<Wanted>, AgentError> {
    let root = &config.root_dir;
    make_one(root, 0o750).map_err(|source| AgentError::Directory {
        path: root.clone(),
        source,
    })?;
    let below = ["pods", "plugins", "plugins_registry", "pod-resources"];
    let mut wanted: Vec<Wanted> = below.map(|name| (root.join(name), 0o750)).into();
    wanted.push((config.container_logs_dir.clone(), 0o755));
    wanted.push((config.pod_logs_dir().to_owned(), 0o755));
    wanted.push((backup_dir(config), 0o700));
    Ok(not_made(&wanted).into_iter().map(|(one, _)| one).collect())
}

/// Makes the directories that can be made, and returns the others with the reason.
fn not_made(wanted: &[Wanted]) -> Vec<(Wanted, io::Error)> {
    let mut failed = Vec::new();
    for one in wanted {
        let (path, mode) = one;
        match make_one(path, *mode) {
            Ok(()) if is_for_plugins(path) => label_for_containers(path),
            Ok(()) => {}
            Err(error) => failed.push((one.clone(), error)),
        }
    }
    failed
}

/// Returns whether plugins in containers make their sockets in the directory. Upstream: `setupDataDirs`.
fn is_for_plugins(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| ["plugins", "plugins_registry"].contains(&name))
}

fn make_one(path: &Path, mode: u32) -> io::Result<()> {
    let made = std::fs::DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(path);
    made.map_err(|error| match std::fs::read_link(path) {
        Ok(target) => io::Error::new(
            error.kind(),
            format!(
                "it is a link to {}, which is no directory",
                target.display()
            ),
        ),
        Err(_) => error,
    })
}

/// Makes `late` directories, one after the other as that becomes possible. Pods that need one wait with events of their own.
async fn make_late(mut late: Vec<Wanted>, clock: Arc<dyn Clock>, token: CancellationToken) {
    let pace = Pace::default();
    let work = async {
        while !late.is_empty() {
            let wanted = late.clone();
            // Only a runtime that is shutting down cancels blocking work.
            let Ok(failed) = blocking::run(move || not_made(&wanted)).await else {
                return;
            };
            for (path, _) in &late {
                if !failed.iter().any(|((other, _), _)| other == path) {
                    info!(path = %path.display(), "the directory exists now");
                }
            }
            for ((path, _), error) in &failed {
                let (name, error) = (path.display().to_string(), causes(error));
                if pace.is_due(&name, &error, clock.now()) {
                    warn!(
                        path = name,
                        error, "cannot make a directory, its users wait: {REMEDY}"
                    );
                }
            }
            late = failed.into_iter().map(|(one, _)| one).collect();
            if !late.is_empty() {
                tokio::time::sleep(AGAIN).await;
            }
        }
    };
    let _ended: Option<()> = token.run_until_cancelled(work).await;
    token.cancelled().await;
}

/// A socket that pods do not need, and its server.
pub(super) struct Served<B, S> {
    /// Name of the task.
    pub(super) name: &'static str,
    /// Consequence of a missing socket, for the log.
    pub(super) without: &'static str,
    /// Makes the socket. Blocking, shortly.
    pub(super) bind: B,
    /// Serves the bound socket until the agent ends.
    pub(super) serve: S,
}

impl<B, S> Served<B, S> {
    /// Serves the socket as soon as it can be made: now, or with one of the attempts that follow.
    pub(super) fn start<E, F>(
        self,
        clock: Arc<dyn Clock>,
        tasks: &mut Tasks,
        token: &CancellationToken,
    ) where
        B: Fn() -> Result<UnixListener, E> + Clone + Send + Sync + 'static,
        E: std::error::Error + Send + 'static,
        S: FnOnce(UnixListener) -> F + Send + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let Self {
            name,
            without,
            bind,
            serve,
        } = self;
        let error = match bind() {
            Ok(socket) => return tasks.add(name, serve(socket)),
            Err(error) => causes(&error),
        };
        let token = token.clone();
        tasks.add(name, async move {
            let bound = bound_later(error, bind, without, &*clock);
            if let Some(Some(socket)) = token.run_until_cancelled(bound).await {
                info!(name, "the socket is served now");
                serve(socket).await;
            }
        });
    }
}

/// Makes the socket that could not be made because of `error`; `None` when the async runtime is shutting down.
async fn bound_later<B, E>(
    mut error: String,
    bind: B,
    without: &'static str,
    clock: &dyn Clock,
) -> Option<UnixListener>
where
    B: Fn() -> Result<UnixListener, E> + Clone + Send + 'static,
    E: std::error::Error + Send + 'static,
{
    let pace = Pace::default();
    loop {
        if pace.is_due(without, &error, clock.now()) {
            warn!(error, "{without}: {REMEDY}");
        }
        tokio::time::sleep(AGAIN).await;
        let bind = bind.clone();
        match blocking::run(bind).await.ok()? {
            Ok(socket) => return Some(socket),
            Err(failed) => error = causes(&failed),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::podresources;
    use crate::types::{BootId, SystemClock};

    #[tokio::test(start_paused = true)]
    async fn a_directory_that_cannot_be_made_is_made_once_it_can_be() {
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("disk");
        let [link, file, good] =
            ["pods", "plugins", "plugins_registry"].map(|n| dir.path().join(n));
        symlink(&disk, &link).unwrap();
        fs::write(&file, "").unwrap();
        let wanted = [&link, &file, &good].map(|path| (path.clone(), 0o750));
        let failed = not_made(&wanted);
        let late: Vec<_> = failed.iter().map(|(one, _)| one.clone()).collect();
        assert_eq!(late, [(link.clone(), 0o750), (file.clone(), 0o750)]);
        let why = failed[0].1.to_string();
        assert!(why.contains(disk.to_str().unwrap()), "{why}");
        assert!(good.is_dir());

        let (token, clock) = (CancellationToken::new(), SystemClock::new(BootId(1)));
        let made = tokio::spawn(make_late(late, Arc::new(clock), token.clone()));
        tokio::time::sleep(3 * AGAIN).await;
        assert!(!link.is_dir() && !file.is_dir());
        fs::create_dir(&disk).unwrap();
        tokio::time::sleep(2 * AGAIN).await;
        assert!(link.is_dir() && !file.is_dir());
        fs::remove_file(&file).unwrap();
        tokio::time::sleep(2 * AGAIN).await;
        assert!(file.is_dir());
        assert!(!made.is_finished(), "a task that ends makes the agent end");
        token.cancel();
        made.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_socket_whose_directory_cannot_be_made_is_served_later() {
        let dir = tempfile::tempdir().unwrap();
        let (root, disk) = (dir.path().to_owned(), dir.path().join("disk"));
        symlink(&disk, root.join("pod-resources")).unwrap();
        let (token, clock) = (CancellationToken::new(), SystemClock::new(BootId(1)));
        let mut tasks = Tasks::default();
        let stop = token.clone();
        let served = Served {
            name: "pod resources",
            without: "nobody can ask",
            bind: move || podresources::bind(&root),
            serve: move |socket: UnixListener| async move {
                stop.cancelled().await;
                drop(socket);
            },
        };
        served.start(Arc::new(clock), &mut tasks, &token);
        tokio::time::sleep(2 * AGAIN).await;
        fs::create_dir(&disk).unwrap();
        tokio::time::sleep(2 * AGAIN).await;
        assert!(disk.join("kubelet.sock").exists());
        token.cancel();
        tasks.end().await;
    }
}
