//! Layer 4: emits events for the processes that the kernel kills for want of memory; upstream's `oomwatcher`.
//!
//! In: the kernel's log, read by `kmsg` and understood by [`core::oom`](crate::core::oom). Out: the node's event
//! `SystemOOM`, events `OOMKilled` of pods, a metric. Pods and containers are found by the victim's cgroup.
//!
//! **Invariant:** each kill gives its events once. How far events were emitted is recorded by boot and number, since a
//! new reader gets the whole log. Where nothing of this boot is recorded, what the log has at the first reading is
//! history. A kill within the last tenths of a second before the agent is killed itself may be reported twice.

mod kmsg;

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use self::kmsg::{Kmsg, Next};
use crate::core::oom::{self, OomKill, Scope};
use crate::core::state::kinds::{self, Declared, Key, Kind};
use crate::core::state::{ContainerRecord, State, Transaction};
use crate::pod_manager::PodManager;
use crate::store::Store;
use crate::types::metrics::{Metrics, ScopeLabel};
use crate::types::quantity::of_bytes;
use crate::types::text::of_name;
use crate::types::{Clock, Event, EventRecorder, EventType, PodUid};

/// The kernel's log.
pub const DEVICE: &str = "/dev/kmsg";
/// Interval of retries for a log that cannot be read.
const AGAIN: Duration = Duration::from_secs(60);

/// The cgroups of pods.
pub trait Cgroups: Send + Sync {
    /// Returns the pod whose cgroup the one at `path` is or is below.
    fn pod_at(&self, path: &str) -> Option<PodUid>;
    /// Returns the memory limit of the cgroup at `path` in bytes; `None` without one, or without the cgroup.
    fn memory_limit_at(&self, path: &str) -> Option<u64>;
}

/// Dependencies of the watcher.
pub struct OomWatcherParts {
    /// Stores the position in the log, and knows containers by their IDs.
    pub store: Store,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Takes the events.
    pub recorder: Arc<dyn EventRecorder>,
    /// Counts kills.
    pub metrics: Metrics,
    /// The pods that are wanted.
    pub pods: PodManager,
    /// Their cgroups.
    pub cgroups: Arc<dyn Cgroups>,
    /// The kernel's ID of this boot: the log begins with it.
    pub kernel_boot_id: String,
}

/// Follows the kernel's log.
pub struct OomWatcher {
    parts: OomWatcherParts,
    parser: oom::Parser,
    /// Number of the newest record that was reported; `None` until the log was read for the first time in this boot.
    position: Option<u64>,
    /// Number of the newest record that was read.
    read: Option<u64>,
    /// True if the stored position is older.
    moved: bool,
}

/// Position in the log up to which kills were reported.
#[derive(Serialize, Deserialize)]
struct Position {
    boot: String,
    sequence: u64,
}

impl Kind for Position {
    const DECLARED: Declared = kinds::KERNEL_LOG;
}

impl Position {
    fn key() -> Key<Self> {
        Key::new("", "position")
    }
}

impl OomWatcher {
    /// A watcher that has not begun, and continues from the recorded position.
    pub fn new(parts: OomWatcherParts) -> Self {
        let position = recorded(&parts.store.snapshot(), &parts.kernel_boot_id);
        Self {
            parts,
            parser: oom::Parser::default(),
            position,
            read: None,
            moved: false,
        }
    }

    /// Follows the log at `device` until `token` is cancelled. One that cannot be read is logged once, and tried again every
    /// minute; upstream does not start without.
    pub async fn run(mut self, device: PathBuf, token: CancellationToken) {
        // A drop in between loses nothing: records that were read are told before the next await.
        tokio::select! {
            () = token.cancelled() => {}
            () = self.watch(&device) => {}
        }
        self.keep();
    }

    async fn watch(&mut self, device: &Path) {
        let mut logged = false;
        loop {
            let error = match Kmsg::open(device) {
                Ok(kmsg) => {
                    logged = false;
                    self.follow(kmsg).await
                }
                Err(error) => error,
            };
            if !logged {
                warn!(%error, device = %device.display(), "cannot read the kernel's log, OOM kills give no events; retrying every minute");
                logged = true;
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Reads until that fails.
    async fn follow(&mut self, mut kmsg: Kmsg) -> io::Error {
        self.parser.reset();
        loop {
            match kmsg.next() {
                Ok(Next::Record(bytes)) => self.take(bytes),
                Ok(Next::Overrun) => {
                    debug!("the kernel overwrote records of its log before they were read");
                    self.parser.reset();
                }
                Ok(Next::Drained) => {
                    self.drained();
                    if let Err(error) = kmsg.more().await {
                        return error;
                    }
                }
                Err(error) => {
                    self.keep();
                    return error;
                }
            }
            tokio::task::consume_budget().await;
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        let Some(record) = oom::record(bytes) else {
            return;
        };
        self.read = Some(record.sequence);
        let Some(kill) = self.parser.take(&record) else {
            return;
        };
        if self.position.is_none_or(|told| kill.sequence <= told) {
            return;
        }
        self.tell(&kill);
        self.position = Some(kill.sequence);
        self.moved = true;
    }

    /// All that the log has was read.
    fn drained(&mut self) {
        if self.position.is_none() {
            self.position = Some(self.read.unwrap_or_default());
            self.moved = true;
        }
        self.keep();
    }

    /// Records the position, once for all that came at once. A store that fails reports that through its health.
    fn keep(&mut self) {
        let Some(sequence) = self.position.filter(|_| self.moved) else {
            return;
        };
        self.moved = false;
        let parts = &self.parts;
        let position = Position {
            boot: parts.kernel_boot_id.clone(),
            sequence,
        };
        let now = parts.clock.now();
        let transaction = Transaction::new().put_object(&Position::key(), &position, now);
        drop(parts.store.submit(transaction));
    }

    fn tell(&self, kill: &OomKill) {
        let parts = &self.parts;
        let victim = self.victim(kill);
        let (process, pid) = (shown(&kill.name), kill.pid);
        let limited = match &kill.scope {
            Scope::Cgroup(path) => path.as_deref().map(shown),
            Scope::Node => None,
        };
        let in_pod = (limited.as_deref()).is_some_and(|path| self.uid_at(path).is_some());
        let scope = match kill.scope {
            Scope::Node => "node",
            Scope::Cgroup(_) if in_pod => "pod",
            Scope::Cgroup(_) => "other",
        };
        let label = ScopeLabel {
            scope: scope.to_owned(),
        };
        parts.metrics.oom_kills.get_or_create(&label).inc();
        info!(process, pid, scope, cgroup = limited, anon_rss = ?kill.anon_rss, "the kernel killed a process because memory ran out");
        if kill.scope == Scope::Node {
            let text = format!("System OOM encountered, victim process: {process}, pid: {pid}");
            let event = Event::node(EventType::Warning, "SystemOOM", text);
            parts.recorder.record(event);
        }
        let Some(victim) = victim else {
            return;
        };
        let container = victim.container.as_deref();
        let place = match (&limited, container) {
            (None, _) => "The node ran out of memory".to_owned(),
            (Some(path), _) if !in_pod => self.reached(kill, path, &format!("Cgroup {path}")),
            (Some(path), Some(name)) if victim.is_in(path) => {
                self.reached(kill, path, &format!("Container {name}"))
            }
            (Some(path), _) => self.reached(kill, path, "The pod"),
        };
        let of = container.map_or_else(String::new, |name| format!(" of container {name}"));
        let used = (kill.anon_rss).map_or_else(String::new, |rss| {
            format!(", which used {} of anonymous memory", of_bytes(rss))
        });
        let text = format!("{place}: killed process {process} (pid {pid}){of}{used}");
        let mut event = Event::pod(EventType::Warning, &victim.pod, "OOMKilled", text);
        if let Some(name) = container {
            event = event.container_of(&victim.pod, name);
        }
        parts.recorder.record(event);
    }

    /// Returns the text that the cgroup at `path` reached its limit: the limit from the kernel's message, or else the
    /// current one.
    fn reached(&self, kill: &OomKill, path: &str, who: &str) -> String {
        let limit = kill
            .limit
            .or_else(|| self.parts.cgroups.memory_limit_at(path));
        match limit {
            Some(limit) => format!("{who} reached its memory limit of {}", of_bytes(limit)),
            None => format!("{who} reached its memory limit"),
        }
    }

    /// The pod of a cgroup: by its name, else by a recorded container.
    fn uid_at(&self, path: &str) -> Option<PodUid> {
        let by_name = self.parts.cgroups.pod_at(path);
        by_name.or_else(|| Some(container_at(&self.parts.store.snapshot(), "", path)?.uid))
    }

    fn victim(&self, kill: &OomKill) -> Option<Victim> {
        let path = shown(kill.cgroup.as_deref()?);
        let uid = self.uid_at(&path)?;
        let pod = self.parts.pods.get(&uid)?;
        let state = self.parts.store.snapshot();
        let found = container_at(&state, &format!("{uid}/"), &path);
        let (container, id) = found.map(|found| (found.name, found.id)).unzip();
        Some(Victim { pod, container, id })
    }
}

/// Owner of the killed process.
struct Victim {
    pod: Arc<Pod>,
    /// Name and ID of the container.
    container: Option<String>,
    id: Option<String>,
}

impl Victim {
    /// Returns whether the cgroup at `path` belongs to the container.
    fn is_in(&self, path: &str) -> bool {
        oom::container_ids(path).any(|id| Some(id) == self.id.as_deref())
    }
}

/// A recorded container.
struct Found {
    uid: PodUid,
    name: String,
    id: String,
}

/// The container that the cgroup at `path` is of, among those whose keys begin with `prefix`.
fn container_at(state: &State, prefix: &str, path: &str) -> Option<Found> {
    let ids: Vec<&str> = oom::container_ids(path).collect();
    state
        .with_prefix::<ContainerRecord>(prefix)
        .find_map(|(key, record)| {
            let (uid, name) = key.split_once('/')?;
            let started = record.intent.as_ref().map(|intent| &intent.container_id);
            let ended = record.last_exit.as_ref().map(|exit| &exit.container_id);
            let mut own = started.into_iter().chain(ended);
            let id = own.find(|id| ids.contains(&id.as_str()))?;
            Some(Found {
                uid: PodUid::from(uid),
                name: name.to_owned(),
                id: id.as_str().to_owned(),
            })
        })
}

/// Returns the stored position in the log of this boot.
fn recorded(state: &State, kernel_boot_id: &str) -> Option<u64> {
    match state.stored(&Position::key())?.read() {
        Ok(position) => (position.boot == kernel_boot_id).then_some(position.sequence),
        Err(error) => {
            let error = error.source;
            warn!(%error, "cannot read the stored position in the kernel's log, continuing from its end");
            None
        }
    }
}

/// Returns the text of a name that a user chose, without control characters.
fn shown(name: &[u8]) -> String {
    let mut text = String::new();
    for c in of_name(OsStr::from_bytes(name)).chars() {
        match c.is_control() {
            true => text.extend(c.escape_default()),
            false => text.push(c),
        }
    }
    text
}

#[cfg(test)]
mod tests;
