//! The sockets below `plugins_registry`: which come and go, and when each is tried again.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use rand::Rng;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinError, JoinSet};
use tokio::time::Instant;

use super::registry::{Drivers, Refusal};
use crate::types::blocking;

/// Interval at which everything is listed, regardless of the kernel's notifications.
const RESCAN: Duration = Duration::from_secs(10);
/// Pauses before a plugin is tried again: the first and the longest; upstream's.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(122));
/// Directories below the first that are looked into.
const DEPTH: usize = 8;

/// Identity of a socket: file system, inode, and its creation time.
type Identity = (u64, u64, i64, i64);
/// File system and inode of a directory.
type DirIdentity = (u64, u64);
/// Result of an attempt to register the plugin behind a socket.
type Attempt = (PathBuf, Identity, Result<String, Refusal>);

/// See the module.
pub(super) struct Watch {
    drivers: Drivers,
    dir: PathBuf,
    sockets: BTreeMap<PathBuf, Known>,
    /// Tasks of their own: one may hold the registry's turn while [`Self::look`] waits for it.
    attempts: JoinSet<Attempt>,
    watcher: Option<(RecommendedWatcher, DirIdentity)>,
    hint: mpsc::Sender<()>,
    hints: mpsc::Receiver<()>,
    /// Set once an error of reading or watching the directory was logged.
    told: bool,
}

struct Known {
    identity: Identity,
    /// The driver that registered by it.
    name: Option<String>,
    state: State,
    pause: Duration,
    /// The newest failure that was told.
    said: String,
}

enum State {
    Trying(AbortHandle),
    Due(Instant),
    Settled,
}

impl Watch {
    pub(super) fn new(drivers: Drivers, dir: PathBuf) -> Self {
        let (hint, hints) = mpsc::channel(1);
        Self {
            drivers,
            dir,
            sockets: BTreeMap::new(),
            attempts: JoinSet::new(),
            watcher: None,
            hint,
            hints,
            told: false,
        }
    }

    /// For ever.
    pub(super) async fn run(mut self) {
        let mut rescan = tokio::time::interval(RESCAN);
        rescan.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let due = self.next_due();
            let wake = async {
                match due {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = rescan.tick() => {
                    self.watch().await;
                    self.look().await;
                }
                Some(()) = self.hints.recv() => self.look().await,
                Some(done) = self.attempts.join_next() => self.ended(done),
                () = wake => {}
            }
            self.try_due();
        }
    }

    /// Watches the directory that is there now.
    async fn watch(&mut self) {
        let (dir, hint) = (self.dir.clone(), self.hint.clone());
        let of = self.watcher.as_ref().map(|(_, of)| *of);
        let renewed = blocking::run(move || renewed(&dir, of, hint)).await;
        match renewed.unwrap_or_else(|error| Err(io::Error::other(error))) {
            Ok(None) => {}
            Ok(watching) => {
                self.watcher = watching;
                self.told = false;
            }
            Err(error) => {
                self.watcher = None;
                self.tell(
                    "cannot watch for plugins, looking for them periodically",
                    &error,
                );
            }
        }
    }

    fn tell(&mut self, what: &'static str, error: &io::Error) {
        if !self.told {
            tracing::warn!(path = %self.dir.display(), %error, what);
        }
        self.told = true;
    }

    /// Compares what is there with what is known.
    async fn look(&mut self) {
        let dir = self.dir.clone();
        let found = match blocking::run(move || sockets_in(&dir)).await {
            Ok(Ok(found)) => found,
            Ok(Err(error)) => return self.tell("cannot look for plugins", &error),
            Err(error) => return self.tell("cannot look for plugins", &io::Error::other(error)),
        };
        let known: Vec<PathBuf> = self.sockets.keys().cloned().collect();
        for path in known {
            let same = found.get(&path) == self.sockets.get(&path).map(|s| &s.identity);
            if same {
                continue;
            }
            if let Some(Known {
                state: State::Trying(attempt),
                ..
            }) = self.sockets.remove(&path)
            {
                attempt.abort();
            }
        }
        let there: BTreeSet<PathBuf> = found.keys().cloned().collect();
        for name in self.drivers.keep_only(&there).await {
            // Another one of that name may have its turn.
            self.again(|socket| {
                socket.name.as_deref() == Some(name.as_str()) || !socket.said.is_empty()
            });
        }
        for (path, identity) in found {
            self.sockets.entry(path).or_insert(Known {
                identity,
                name: None,
                state: State::Due(Instant::now()),
                pause: PAUSES.0,
                said: String::new(),
            });
        }
    }

    fn again(&mut self, which: impl Fn(&Known) -> bool) {
        for socket in self.sockets.values_mut().filter(|socket| which(socket)) {
            if !matches!(socket.state, State::Trying(_)) {
                socket.state = State::Due(Instant::now());
                socket.pause = PAUSES.0;
            }
        }
    }

    fn next_due(&self) -> Option<Instant> {
        let due = self
            .sockets
            .values()
            .filter_map(|socket| match socket.state {
                State::Due(at) => Some(at),
                State::Trying(_) | State::Settled => None,
            });
        due.min()
    }

    fn try_due(&mut self) {
        let now = Instant::now();
        for (path, socket) in &mut self.sockets {
            if !matches!(socket.state, State::Due(at) if at <= now) {
                continue;
            }
            let (drivers, path, identity) = (self.drivers.clone(), path.clone(), socket.identity);
            let attempt = self.attempts.spawn(async move {
                let result = drivers.register(&path).await;
                (path, identity, result)
            });
            socket.state = State::Trying(attempt);
        }
    }

    fn ended(&mut self, done: Result<Attempt, JoinError>) {
        match done.map_err(JoinError::try_into_panic) {
            Ok((path, identity, result)) => self.settle(&path, identity, result),
            Err(Ok(panic)) => std::panic::resume_unwind(panic),
            // Called off, since its socket is gone or another one.
            Err(Err(_)) => {}
        }
    }

    fn settle(&mut self, path: &Path, identity: Identity, result: Result<String, Refusal>) {
        let Some(socket) = self
            .sockets
            .get_mut(path)
            .filter(|s| s.identity == identity)
        else {
            return;
        };
        let (why, again) = match result {
            Ok(name) => {
                socket.name = Some(name);
                socket.state = State::Settled;
                socket.pause = PAUSES.0;
                socket.said.clear();
                return;
            }
            Err(Refusal::Retry(why)) => (why, true),
            Err(Refusal::Final(why)) => (why, false),
        };
        if socket.said != why {
            tracing::warn!(socket = %path.display(), why, again, "a plugin is not registered");
            socket.said = why;
        }
        socket.state = if again {
            let pause = socket.pause.mul_f64(rand::rng().random_range(0.8..1.0));
            socket.pause = (socket.pause * 2).min(PAUSES.1);
            State::Due(Instant::now() + pause)
        } else {
            // Not to be tried again for another's sake either.
            socket.said.clear();
            State::Settled
        };
    }
}

/// Watches `dir`, unless what is there now is watched: that is `of`. Blocking.
fn renewed(
    dir: &Path,
    of: Option<DirIdentity>,
    hint: mpsc::Sender<()>,
) -> io::Result<Option<(RecommendedWatcher, DirIdentity)>> {
    let identity = || fs::metadata(dir).map(|m| (m.dev(), m.ino()));
    if of.is_some() && of == identity().ok() {
        return Ok(None);
    }
    fs::create_dir_all(dir)?;
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        let matters = event.map_or(true, |e| !matches!(e.kind, EventKind::Access(_)));
        // A full channel holds a hint already.
        if matters && hint.try_send(()).is_err() {
            tracing::trace!("hint about plugins is pending already");
        }
    })
    .map_err(io::Error::other)?;
    watcher
        .watch(dir, RecursiveMode::Recursive)
        .map_err(io::Error::other)?;
    Ok(Some((watcher, identity()?)))
}

/// The sockets in `dir` and below. Links are not followed; what cannot be read below is left out.
fn sockets_in(dir: &Path) -> io::Result<BTreeMap<PathBuf, Identity>> {
    let mut found = BTreeMap::new();
    let mut open = vec![(dir.to_owned(), 0)];
    while let Some((dir, depth)) = open.pop() {
        let entries = match fs::read_dir(&dir) {
            Ok(entries) => entries,
            Err(error) if depth == 0 && error.kind() != io::ErrorKind::NotFound => {
                return Err(error);
            }
            Err(error) => {
                tracing::debug!(path = %dir.display(), %error, "cannot look for plugins there");
                continue;
            }
        };
        for entry in entries.flatten() {
            let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
            let Ok(metadata) = entry.metadata() else {
                continue;
            };
            let kind = metadata.file_type();
            if hidden {
                continue;
            }
            if kind.is_dir() && depth < DEPTH {
                open.push((entry.path(), depth + 1));
            } else if kind.is_socket() {
                let made = (metadata.mtime(), metadata.mtime_nsec());
                let identity = (metadata.dev(), metadata.ino(), made.0, made.1);
                found.insert(entry.path(), identity);
            }
        }
    }
    Ok(found)
}
