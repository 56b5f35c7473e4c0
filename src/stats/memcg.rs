//! Notifications of cgroup v1 when memory use crosses an eviction threshold, for `kernelMemcgNotification`. Upstream:
//! `memoryThresholdNotifier` with `linuxCgroupNotifier`.
//!
//! In: thresholds of memory, what is available of it, the memory cgroups of version 1. Out: the end of
//! [`MemoryNotifier::crossed`]. Cgroup v2 has no such notifications; there and here stalls are reported as well (`pressure`).
//!
//! **Invariant:** a file that is missing, or a threshold that the kernel refuses, costs the notification of that threshold and
//! nothing else: the node is observed on its schedule.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::select_all;
use rustix::event::{EventfdFlags, eventfd};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::collect::Sources;
use crate::cm::CgroupManager;
use crate::core::pressure::{Figure, Signal, Threshold};
use crate::types::{blocking, causes};

/// Least time between two changes of what the kernel notifies of. Upstream has 10 s (`notifierRefreshInterval`).
const REARM: Duration = Duration::from_secs(5);
/// Memory that a cgroup and those below it use, in bytes.
const USAGE: &str = "memory.usage_in_bytes";
/// Takes an eventfd, a file of the cgroup and a threshold.
const CONTROL: &str = "cgroup.event_control";

/// A threshold that the kernel does not notify of.
#[derive(Debug, thiserror::Error)]
pub(super) enum ArmError {
    /// The memory controller has no hierarchy, or the agent makes no cgroups.
    #[error("find the memory cgroup for {0}: cgroups cannot be read")]
    NoCgroup(String),
    /// A file is missing or refuses.
    #[error("{action} {}: {source}", path.display())]
    File {
        /// The attempt.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The kernel has no event left.
    #[error("create an eventfd: {0}")]
    Event(#[source] io::Error),
}

/// Has the kernel notify of memory thresholds.
pub(super) struct MemoryNotifier {
    thresholds: Vec<Threshold>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By the keys of thresholds.
    armed: BTreeMap<String, Armed>,
    /// Failures that were logged, by the keys of thresholds.
    failures: BTreeMap<String, String>,
    /// Time of the last attempt to arm.
    tried: Option<Instant>,
}

/// A threshold that the kernel notifies of.
struct Armed {
    level: u64,
    /// Readable once the usage has crossed the level. The kernel forgets the level when it is closed.
    event: Arc<AsyncFd<OwnedFd>>,
}

/// A level that was given to the kernel; `None` if it has that level already.
type Arming = Result<Option<(u64, OwnedFd)>, ArmError>;

impl MemoryNotifier {
    /// A notifier of those of `thresholds` that are about memory.
    pub(super) fn new(thresholds: &[Threshold]) -> Self {
        let is_of_memory =
            |t: &&Threshold| matches!(t.signal, Signal::Memory | Signal::AllocatableMemory);
        Self {
            thresholds: thresholds.iter().filter(is_of_memory).copied().collect(),
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the kernel notify of the usage at which each threshold is met, as `figures` show it now. Does nothing within
    /// [`REARM`] of the last time. Upstream: `UpdateThreshold`.
    pub(super) async fn arm(&self, sources: Arc<Sources>, figures: &BTreeMap<Signal, Figure>) {
        let known: BTreeMap<String, u64> = {
            let mut state = self.state();
            let is_early = state.tried.is_some_and(|tried| tried.elapsed() < REARM);
            // Version 2 has no such notifications.
            if is_early || sources.hierarchies.v2 {
                return;
            }
            state.tried = Some(Instant::now());
            let armed = state.armed.iter();
            armed
                .map(|(key, armed)| (key.clone(), armed.level))
                .collect()
        };
        let due = self.thresholds.iter();
        let due: Vec<(Threshold, Figure)> = due
            .filter_map(|threshold| Some((*threshold, *figures.get(&threshold.signal)?)))
            .collect();
        let arming = blocking::spawn(move || {
            let armed = due.into_iter().map(|(threshold, figure)| {
                let key = threshold.key();
                let armed = arm(&sources, &threshold, figure, known.get(&key).copied());
                (key, armed)
            });
            armed.collect::<Vec<_>>()
        });
        match arming.await {
            Ok(arming) => {
                for (key, of_threshold) in arming {
                    self.took(key, of_threshold);
                }
            }
            Err(error) => debug!(%error, "cannot arm notifications of memory thresholds"),
        }
    }

    /// Keeps what the kernel was given. A failure is logged when it begins or changes.
    fn took(&self, key: String, arming: Arming) {
        let armed = match arming {
            Ok(None) => Ok(None),
            Ok(Some((level, event))) => registered(event).map(|event| Some((level, event))),
            Err(error) => Err(error),
        };
        let mut state = self.state();
        match armed {
            Ok(new) => {
                if state.failures.remove(&key).is_some() || !state.armed.contains_key(&key) {
                    info!(threshold = key, "the kernel notifies of a memory threshold");
                }
                if let Some((level, event)) = new {
                    debug!(threshold = key, level, "armed a memory threshold");
                    let event = Arc::new(event);
                    state.armed.insert(key, Armed { level, event });
                }
            }
            Err(error) => {
                let error = causes(&error);
                state.armed.remove(&key);
                if state.failures.get(&key) != Some(&error) {
                    warn!(
                        threshold = key,
                        error,
                        "the kernel does not notify of a memory threshold (kernelMemcgNotification); observing the \
                         node every 10 s instead"
                    );
                    state.failures.insert(key, error);
                }
            }
        }
    }

    /// Waits until the usage has crossed a level that the kernel was given, in either direction; for ever if there is none.
    pub(super) async fn crossed(&self) {
        let events: Vec<_> = {
            let state = self.state();
            let events = state.armed.values().map(|armed| Arc::clone(&armed.event));
            events.map(|event| Box::pin(signalled(event))).collect()
        };
        if events.is_empty() {
            return std::future::pending().await;
        }
        select_all(events).await;
    }

    /// Returns the failures that were logged.
    #[cfg(test)]
    fn failures(&self) -> Vec<String> {
        self.state().failures.values().cloned().collect()
    }

    /// Returns the levels that the kernel was given.
    #[cfg(test)]
    fn levels(&self) -> Vec<u64> {
        self.state().armed.values().map(|of| of.level).collect()
    }
}

/// Gives the kernel the level at which a threshold is met, unless it has it: `known`. Blocking, for some system calls.
fn arm(sources: &Sources, threshold: &Threshold, figure: Figure, known: Option<u64>) -> Arming {
    let cgroup = match threshold.signal {
        Signal::Memory => Some("/".to_owned()),
        _ => sources.manager.as_ref().map(CgroupManager::pods_path),
    };
    let dir = cgroup.and_then(|cgroup| sources.hierarchies.dir("memory", &cgroup));
    let dir = dir.ok_or_else(|| ArmError::NoCgroup(threshold.key()))?;
    let level = level(threshold, figure, usage(&dir)?);
    if known == Some(level) {
        return Ok(None);
    }
    let event = register(&dir, level)?;
    // The kernel reports no crossing before it knows the level.
    if figure.available > threshold.value.of(figure.capacity) && usage(&dir)? >= level {
        rustix::io::write(&event, &1_u64.to_ne_bytes()).map_err(|e| ArmError::Event(e.into()))?;
    }
    Ok(Some((level, event)))
}

/// Returns the usage at which less than the threshold is available: capacity − threshold + inactive_file, where inactive_file
/// is what is used beyond the working set.
fn level(threshold: &Threshold, figure: Figure, usage: u64) -> u64 {
    let working_set = figure.capacity.saturating_sub(figure.available);
    let sum = i128::from(figure.capacity) - i128::from(threshold.value.of(figure.capacity))
        + (i128::from(usage) - i128::from(working_set));
    u64::try_from(sum.max(0)).unwrap_or(u64::MAX)
}

fn usage(dir: &Path) -> Result<u64, ArmError> {
    let path = dir.join(USAGE);
    let read = fs::read_to_string(&path).and_then(|text| {
        let number = text.trim().parse::<u64>();
        number.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    });
    read.map_err(failed("read", path))
}

/// Registers a level of a cgroup's usage. Upstream: `NewCgroupNotifier`.
fn register(dir: &Path, level: u64) -> Result<OwnedFd, ArmError> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    let event = eventfd(0, flags).map_err(|error| ArmError::Event(error.into()))?;
    let path = dir.join(USAGE);
    let watched = File::open(&path).map_err(failed("open", path))?;
    let path = dir.join(CONTROL);
    let line = format!("{} {} {level}", event.as_raw_fd(), watched.as_raw_fd());
    let control = OpenOptions::new().write(true).open(&path);
    let written = control.and_then(|mut control| control.write_all(line.as_bytes()));
    written.map_err(failed("write to", path))?;
    Ok(event)
}

fn failed(action: &'static str, path: PathBuf) -> impl FnOnce(io::Error) -> ArmError {
    move |source| ArmError::File {
        action,
        path,
        source,
    }
}

#[expect(
    deprecated,
    reason = "its successor is unsafe to call; the event that it is given owns its descriptor"
)]
fn registered(event: OwnedFd) -> Result<AsyncFd<OwnedFd>, ArmError> {
    AsyncFd::with_interest(event, Interest::READABLE).map_err(ArmError::Event)
}

/// Waits until the event is signalled, and clears it; for ever if it cannot be read.
async fn signalled(event: Arc<AsyncFd<OwnedFd>>) {
    loop {
        let Ok(mut guard) = event.readable().await else {
            return std::future::pending().await;
        };
        let mut count = [0_u8; 8];
        let read = guard.try_io(|event| Ok(rustix::io::read(event.get_ref(), &mut count)?));
        match read {
            Ok(Ok(_)) => return,
            Ok(Err(error)) => {
                debug!(%error, "cannot read the notification of a memory threshold");
                return std::future::pending().await;
            }
            // Somebody else has read it.
            Err(_) => {}
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]
mod tests;
