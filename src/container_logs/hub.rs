//! Tells followers that their log changed, and that their container has ended.
//!
//! One inotify instance and one task serve all followers; both are there only while somebody follows. After it told of
//! changes the task looks away for 20 ms, in which the kernel merges what a busy writer does: the cost does not
//! grow with what is written. Where a directory cannot be watched, its followers look each second.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;
use tracing::{debug, warn};

/// Time for which changes are collected.
const LOOK_AWAY: Duration = Duration::from_millis(20);
/// Interval at which unwatched logs are polled, and containers are checked for their end.
const PERIOD: Duration = Duration::from_secs(1);
/// Reads of the event queue at a time; what is left is read next time.
const READS: usize = 64;

/// Returns whether the container that writes a log has ended. Called about once a second; must not block.
pub type Ended = Box<dyn Fn() -> bool + Send + Sync>;

/// Shared handle.
#[derive(Clone, Default)]
pub struct LogHub(Arc<Mutex<Hub>>);

#[derive(Default)]
struct Hub {
    subscribers: HashMap<u64, Subscriber>,
    directories: HashMap<PathBuf, Directory>,
    by_watch: HashMap<WatchDescriptor, PathBuf>,
    next: u64,
    /// There while the task runs; `None` in it when the kernel gives no inotify instance.
    running: Option<Option<Arc<AsyncFd<Watcher>>>>,
}

struct Subscriber {
    directory: PathBuf,
    /// Name of the log; rotated ones begin with it.
    name: String,
    seen: watch::Sender<Seen>,
    ended: Arc<Ended>,
}

#[derive(Default)]
struct Directory {
    watch: Option<WatchDescriptor>,
    subscribers: usize,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Seen {
    changes: u64,
    ended: bool,
}

struct Watcher(Inotify);

impl AsRawFd for Watcher {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// One follower's; dropping it ends it.
pub struct Subscription {
    hub: LogHub,
    id: u64,
    seen: watch::Receiver<Seen>,
}

impl Subscription {
    /// Marks what there is as seen, to be called before reading; whether the container has ended.
    pub fn look(&mut self) -> bool {
        self.seen.borrow_and_update().ended
    }

    /// Waits for a change after the last [`look`](Self::look). Cancel-safe.
    pub async fn changed(&mut self) {
        if self.seen.changed().await.is_err() {
            // The hub is gone with its runtime.
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.hub.with(|hub| hub.remove(self.id));
    }
}

impl LogHub {
    /// Followers at present.
    pub fn followers(&self) -> usize {
        self.with(|hub| hub.subscribers.len())
    }

    /// Follows the log at `path`. Must be called within a tokio runtime.
    pub fn subscribe(&self, path: &Path, ended: Ended) -> Subscription {
        let directory = path.parent().unwrap_or(Path::new("/")).to_owned();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let has_ended = ended();
        let (seen, receiver) = watch::channel(Seen {
            changes: 0,
            ended: has_ended,
        });
        let id = self.with(|hub| {
            if hub.running.is_none() {
                let watcher = watcher();
                hub.running = Some(watcher.clone());
                tokio::spawn(run(self.clone(), watcher));
            }
            hub.add(Subscriber {
                directory,
                name: name.into_owned(),
                seen,
                ended: Arc::new(ended),
            })
        });
        Subscription {
            hub: self.clone(),
            id,
            seen: receiver,
        }
    }

    fn with<T>(&self, f: impl FnOnce(&mut Hub) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[expect(
    deprecated,
    reason = "its successor is unsafe to call; what it is given here owns its descriptor and never changes it"
)]
fn watcher() -> Option<Arc<AsyncFd<Watcher>>> {
    let made = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)
        .map_err(std::io::Error::from)
        .and_then(|inotify| AsyncFd::with_interest(Watcher(inotify), Interest::READABLE));
    match made {
        Ok(watcher) => Some(Arc::new(watcher)),
        Err(error) => {
            warn!(%error, "cannot watch logs, polling them every second; see fs.inotify.max_user_instances");
            None
        }
    }
}

impl Hub {
    fn add(&mut self, subscriber: Subscriber) -> u64 {
        self.next += 1;
        let path = subscriber.directory.clone();
        self.subscribers.insert(self.next, subscriber);
        let directory = self.directories.entry(path.clone()).or_default();
        directory.subscribers += 1;
        if directory.watch.is_none()
            && let Some(Some(watcher)) = &self.running
        {
            let mask = AddWatchFlags::IN_MODIFY
                | AddWatchFlags::IN_CREATE
                | AddWatchFlags::IN_MOVED_TO
                | AddWatchFlags::IN_DELETE_SELF
                | AddWatchFlags::IN_ONLYDIR;
            match watcher.get_ref().0.add_watch(&path, mask) {
                Ok(watch) => {
                    directory.watch = Some(watch);
                    self.by_watch.insert(watch, path);
                }
                Err(error) => {
                    debug!(%error, path = %path.display(), "cannot watch a log directory, polling it every second");
                }
            }
        }
        self.next
    }

    fn remove(&mut self, id: u64) {
        let Some(subscriber) = self.subscribers.remove(&id) else {
            return;
        };
        let Some(directory) = self.directories.get_mut(&subscriber.directory) else {
            return;
        };
        directory.subscribers -= 1;
        if directory.subscribers > 0 {
            return;
        }
        let watch = directory.watch;
        self.directories.remove(&subscriber.directory);
        if let Some(watch) = watch {
            self.by_watch.remove(&watch);
            if let Some(Some(watcher)) = &self.running {
                // It may have gone with its directory.
                watcher.get_ref().0.rm_watch(watch).ok();
            }
        }
    }

    /// Passes events on.
    fn tell(&mut self, events: &[InotifyEvent]) {
        // Busy logs are told of many times over.
        let mut changes: HashMap<(WatchDescriptor, Option<&OsStr>), AddWatchFlags> = HashMap::new();
        for event in events {
            let change = changes.entry((event.wd, event.name.as_deref()));
            *change.or_insert(AddWatchFlags::empty()) |= event.mask;
        }
        let mut wake: Vec<u64> = Vec::new();
        for ((watch, name), mask) in changes {
            if mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
                wake.extend(self.subscribers.keys());
                continue;
            }
            let Some(path) = self.by_watch.get(&watch) else {
                continue;
            };
            let name = name.map(OsStr::to_string_lossy);
            let about = |subscriber: &Subscriber| {
                subscriber.directory == *path
                    && name
                        .as_ref()
                        .is_none_or(|name| name.starts_with(&subscriber.name))
            };
            let told = self.subscribers.iter().filter(|(_, s)| about(s));
            wake.extend(told.map(|(id, _)| *id));
            if mask.contains(AddWatchFlags::IN_IGNORED)
                && let Some(path) = self.by_watch.remove(&watch)
                && let Some(directory) = self.directories.get_mut(&path)
            {
                directory.watch = None;
            }
        }
        wake.sort_unstable();
        wake.dedup();
        for id in wake {
            if let Some(subscriber) = self.subscribers.get(&id) {
                subscriber.change();
            }
        }
    }

    /// Followers of directories that are not watched look themselves.
    fn tick(&self) {
        for subscriber in self.subscribers.values() {
            let directory = self.directories.get(&subscriber.directory);
            if directory.is_none_or(|directory| directory.watch.is_none()) {
                subscriber.change();
            }
        }
    }
}

impl Subscriber {
    fn change(&self) {
        self.seen.send_modify(|seen| seen.changes += 1);
    }
}

/// Serves until nobody follows any more.
async fn run(hub: LogHub, watcher: Option<Arc<AsyncFd<Watcher>>>) {
    let mut tick = tokio::time::interval(PERIOD);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        // Cancel-safe: readiness and ticks are not lost.
        tokio::select! {
            events = events(watcher.as_deref()) => {
                if events.is_empty() {
                    continue;
                }
                hub.with(|hub| hub.tell(&events));
                tokio::time::sleep(LOOK_AWAY).await;
            }
            _ = tick.tick() => {
                if hub.with(|hub| {
                    hub.tick();
                    // Under the lock: who subscribes later starts a task anew.
                    hub.subscribers.is_empty() && hub.running.take().is_some()
                }) {
                    return;
                }
                tell_ended(&hub);
            }
        }
    }
}

/// Asks, without holding the lock, which containers have ended.
fn tell_ended(hub: &LogHub) {
    let asked: Vec<(u64, Arc<Ended>)> = hub.with(|hub| {
        let waiting = hub.subscribers.iter();
        let waiting = waiting.filter(|(_, s)| !s.seen.borrow().ended);
        waiting.map(|(id, s)| (*id, Arc::clone(&s.ended))).collect()
    });
    for (id, ended) in asked {
        if ended() {
            hub.with(|hub| {
                if let Some(subscriber) = hub.subscribers.get(&id) {
                    subscriber.seen.send_modify(|seen| seen.ended = true);
                }
            });
        }
    }
}

async fn events(watcher: Option<&AsyncFd<Watcher>>) -> Vec<InotifyEvent> {
    let Some(watcher) = watcher else {
        return std::future::pending().await;
    };
    let Ok(mut ready) = watcher.readable().await else {
        return std::future::pending().await;
    };
    let mut all = Vec::new();
    for _ in 0..READS {
        let read = ready.try_io(|watcher| Ok(watcher.get_ref().0.read_events()?));
        match read {
            Ok(Ok(events)) => all.extend(events),
            Ok(Err(error)) => {
                warn!(%error, "cannot read changes of logs");
                tokio::time::sleep(PERIOD).await;
                break;
            }
            Err(_would_block) => break,
        }
    }
    all
}
