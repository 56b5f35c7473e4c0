//! The file source: a directory of manifests, or one of them.
//!
//! The whole path is listed again every `check_frequency`, when the watcher hints at a change, and on
//! reload; a file whose inode, size and times are unchanged is not read again. Only regular files (or
//! symlinks to them) whose names do not begin with a dot are manifests. Upstream's `sourceFile`.
//!
//! **Invariant:** what there is, the listing says; events of the watcher are hints to list. They say one thing more: that a
//! file was deleted or moved away, although it is back when the path is listed. Its pods were gone for a moment, so a
//! set without them is sent first, as upstream does. A file that another one is renamed onto was never away.
//!
//! **Invariant:** a path whose file system is not mounted is not read: its pods stay as they are.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{Metadata, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use notify::event::{AccessKind, AccessMode, ModifyKind, RenameMode};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use sha2::{Digest, Sha256};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::adoption::Adoptions;
use super::manifest::{self, MAX_MANIFEST_BYTES, ManifestError, StaticOrigin};
use super::{FileSettings, Reading, Seed, SourceError, SourceSet, SourcedPod};
use crate::core::pod_update::same_desired_state;
use crate::store::mounts::Mount;
use crate::types::{Clock, FullName, PodExt, PodSource, PodUid, blocking, text};

/// Capacity of the channel from the watcher.
const HINTS_CAPACITY: usize = 10;
/// First and longest pause between attempts to watch a path.
const REWATCH: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(20));
/// A burst of hints ends when none came for this long …
const QUIET: Duration = Duration::from_millis(50);
/// … or after this long.
const BURST: Duration = Duration::from_millis(500);
/// Time before a reading: a file that changed within it may change again without a change of its times.
const RACY_MS: i64 = 1_000;

pub(super) struct FileSource {
    path: PathBuf,
    mount: Option<Arc<Mount>>,
    check_frequency: Duration,
    node_name: String,
    clock: Arc<dyn Clock>,
    recorded: Arc<Recorded>,
    adoptions: Arc<Adoptions>,
    cache: Cache,
    /// Pipes, sockets and devices among the manifests, which were reported.
    special: BTreeSet<PathBuf>,
}

type Cache = BTreeMap<PathBuf, Cached>;

/// The pods of the store: a manifest that says the same as before becomes the pod that is in memory
/// already.
type Recorded = BTreeMap<PodUid, Weak<Pod>>;

/// Content of a file, or the reason for which it cannot be a manifest.
pub type FileContent = Result<Vec<u8>, ManifestError>;

/// Content of a file when it was last read.
#[derive(Clone)]
struct Cached {
    stamp: FileStamp,
    /// True if the file may have changed without a change of its stamp.
    racy: bool,
    digest: [u8; 32],
    result: Result<Arc<Pod>, String>,
}

/// Changes whenever the file does, give or take the clock's tick.
#[derive(Clone, Copy, PartialEq, Eq)]
struct FileStamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileStamp {
    fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    fn changed_ms(&self) -> i64 {
        let (seconds, nanos) = self.changed;
        seconds
            .saturating_mul(1000)
            .saturating_add(nanos / 1_000_000)
    }
}

impl FileSource {
    pub(super) fn new(
        settings: FileSettings,
        node_name: &str,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, SourceError> {
        let path = std::path::absolute(&settings.path).map_err(|error| SourceError::Path {
            path: settings.path,
            error,
        })?;
        // Without a trailing slash, so that the origins below it can be told from others.
        let path = path.components().collect();
        Ok(Self {
            path,
            mount: settings.mount,
            check_frequency: settings.check_frequency.max(Duration::from_millis(10)),
            node_name: node_name.to_owned(),
            clock,
            recorded: Arc::default(),
            adoptions: Arc::default(),
            cache: Cache::new(),
            special: BTreeSet::new(),
        })
    }

    /// Shares the pods of the store, where a manifest says the same, and the UIDs of what runs.
    pub(super) fn sharing(mut self, seeds: &[Seed], adoptions: Arc<Adoptions>) -> Self {
        self.adoptions = adoptions;
        let pods = seeds
            .iter()
            .map(|seed| (seed.pod.uid(), Arc::downgrade(&seed.pod)));
        self.recorded = Arc::new(pods.collect());
        self
    }

    /// Sends the full set at once and after each change, until cancelled or until there is no receiver.
    pub(super) async fn run(
        mut self,
        sets: mpsc::Sender<SourceSet>,
        mut reload: watch::Receiver<u64>,
        cancel: CancellationToken,
    ) {
        let mut watch = Watch::new(&self.path);
        let mut sent: Option<SourceSet> = None;
        loop {
            // Dropping these half-way loses what is cached, which matters to nobody after cancellation.
            let (removed, set) = tokio::select! {
                () = cancel.cancelled() => return,
                (renewed, removed, set) = async {
                    let watch = watch.renewed().await;
                    // What is removed from now on is left for the next listing, which its hint asks for.
                    let removed = watch.take_removed();
                    (watch, removed, self.read().await)
                } => {
                    watch = renewed;
                    (removed, set)
                }
            };
            let before = before_return(&set, &removed, sent.as_ref());
            for set in before.into_iter().chain([set]) {
                if sent.as_ref() == Some(&set) {
                    continue;
                }
                debug!(path = %self.path.display(), pods = set.pods.len(), "manifests changed");
                sent = Some(set.clone());
                tokio::select! {
                    () = cancel.cancelled() => return,
                    answer = sets.send(set) => if answer.is_err() { return },
                }
            }
            let relist = Instant::now() + self.check_frequency;
            let next = watch.retry_at().map_or(relist, |at| at.min(relist));
            // All four may be dropped half-way: a hint that is lost with its burst was for this listing.
            tokio::select! {
                () = cancel.cancelled() => return,
                () = tokio::time::sleep_until(next) => {}
                () = watch.burst() => {}
                changed = reload.changed() => {
                    if changed.is_err() {
                        // Nobody can ask for a reload any more; the other triggers stay.
                        tokio::select! {
                            () = cancel.cancelled() => return,
                            () = tokio::time::sleep_until(next) => {}
                            () = watch.burst() => {}
                        }
                    }
                }
            }
        }
    }

    /// Reads everything there is now.
    pub(super) async fn read(&mut self) -> SourceSet {
        let scan = Scan {
            path: self.path.clone(),
            mount: self.mount.clone(),
            node_name: self.node_name.clone(),
            now_ms: self.clock.now().wall_ms,
            seen: self.clock.now().rfc3339(),
            recorded: Arc::clone(&self.recorded),
            adoptions: Arc::clone(&self.adoptions),
            before: std::mem::take(&mut self.cache),
        };
        let location = text::of_name(&self.path);
        let (reading, found) = match blocking::spawn(move || scan.run()).await {
            Ok(read) => read,
            Err(error) => (
                Reading::Unreadable(format!("reading it failed: {error}")),
                Found::default(),
            ),
        };
        self.cache = found.files;
        for path in found.special.difference(&self.special) {
            warn!(path = %path.display(), "ignoring a manifest that is neither a file nor a directory");
        }
        self.special = found.special;
        let mut set = SourceSet {
            source: PodSource::File,
            location,
            reading,
            broken: BTreeMap::new(),
            pods: Vec::new(),
            set_back: false,
        };
        for (path, cached) in &self.cache {
            let origin = text::of_name(path);
            match &cached.result {
                Ok(pod) => set.pods.push(SourcedPod {
                    origin,
                    pod: Arc::clone(pod),
                }),
                Err(error) => {
                    set.broken.insert(origin, error.clone());
                }
            }
        }
        set
    }
}

/// The set of a moment ago, without the files that were removed and are back; `None` when there are none, or what was
/// sent last lacked them already. The path itself is no such file: pods of a path that vanishes stay.
fn before_return(
    set: &SourceSet,
    removed: &BTreeSet<String>,
    sent: Option<&SourceSet>,
) -> Option<SourceSet> {
    let had = |sent: &SourceSet, origin: &String| {
        sent.broken.contains_key(origin) || sent.pods.iter().any(|p| p.origin == *origin)
    };
    let is_back = |origin: &String| {
        removed.contains(origin)
            && *origin != set.location
            && sent.is_none_or(|sent| had(sent, origin))
    };
    // One that is back but cannot be read yet still has the pod that it had.
    let broken = sent.into_iter().flat_map(|sent| &sent.pods);
    let broken = broken.filter(|sourced| set.broken.contains_key(&sourced.origin));
    let back = set.pods.iter().chain(broken);
    let back = back.filter(|sourced| is_back(&sourced.origin));
    let names: BTreeSet<FullName> = back.map(|sourced| sourced.pod.full_name()).collect();
    let mut without = set.clone();
    // Nor a copy that an editor has left of such a file: it would take the pod's place.
    without
        .pods
        .retain(|sourced| !names.contains(&sourced.pod.full_name()));
    without.broken.retain(|origin, _| !is_back(origin));
    (without != *set).then_some(without)
}

/// Result of a listing.
#[derive(Default)]
struct Found {
    files: Cache,
    special: BTreeSet<PathBuf>,
}

/// One listing of the path, on a blocking thread.
struct Scan {
    path: PathBuf,
    mount: Option<Arc<Mount>>,
    node_name: String,
    now_ms: i64,
    seen: String,
    recorded: Arc<Recorded>,
    adoptions: Arc<Adoptions>,
    before: Cache,
}

impl Scan {
    fn run(mut self) -> (Reading, Found) {
        let mut found = Found::default();
        // Before and after: what is listed in between was mounted all the time.
        let before = self.missing();
        let listed = match before.is_some() {
            true => Ok(()),
            false => self.list(&mut found),
        };
        if let Some(why) = before.or_else(|| self.missing()) {
            return (Reading::Unreadable(why), Found::default());
        }
        match listed {
            Ok(()) => (Reading::Complete, found),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                (Reading::Absent, Found::default())
            }
            Err(error) => (
                Reading::Unreadable(format!("cannot be read: {error}")),
                Found::default(),
            ),
        }
    }

    /// Returns why nothing at the path counts, if so.
    fn missing(&self) -> Option<String> {
        self.mount.as_ref()?.missing().unwrap_or_else(|error| {
            warn!(path = %self.path.display(), %error, "cannot check whether the file system of the manifests is mounted");
            None
        })
    }

    fn list(&mut self, found: &mut Found) -> std::io::Result<()> {
        let metadata = std::fs::metadata(&self.path)?;
        if !metadata.is_dir() {
            let path = self.path.clone();
            match self.examine(&path)? {
                Some(cached) => {
                    found.files.insert(path, cached);
                    return Ok(());
                }
                None => {
                    return Err(std::io::Error::other(
                        "it is neither a directory nor a regular file",
                    ));
                }
            }
        }
        for path in candidates(&self.path)? {
            match self.examine(&path) {
                Ok(Some(cached)) => {
                    found.files.insert(path, cached);
                }
                Ok(None) if path.is_dir() => {}
                Ok(None) => {
                    found.special.insert(path);
                }
                // Removed between listing and reading.
                Err(error)
                    if error.kind() == ErrorKind::NotFound
                        && std::fs::symlink_metadata(&path).is_err() => {}
                Err(error) => {
                    found.files.insert(path, unreadable(&error));
                }
            }
        }
        Ok(())
    }

    /// Reads one file, or what is known of it; `None` for what is not a regular file.
    fn examine(&mut self, path: &Path) -> std::io::Result<Option<Cached>> {
        let metadata = std::fs::metadata(path)?;
        if !metadata.is_file() {
            return Ok(None);
        }
        let stamp = FileStamp::of(&metadata);
        let before = self.before.remove(path);
        if let Some(known) = before.as_ref().filter(|b| b.stamp == stamp && !b.racy) {
            return Ok(Some(known.clone()));
        }
        let Some((stamp, content)) = regular(path)? else {
            return Ok(None);
        };
        let racy = stamp.changed_ms().saturating_add(RACY_MS) > self.now_ms;
        let digest = match &content {
            Ok(bytes) => Sha256::digest(bytes).into(),
            Err(_) => [0; 32],
        };
        let result = match (content, before) {
            (Ok(_), Some(before)) if before.digest == digest => before.result,
            (Ok(bytes), _) => self.parse(path, &bytes),
            (Err(error), _) => Err(error.to_string()),
        };
        Ok(Some(Cached {
            stamp,
            racy,
            digest,
            result,
        }))
    }

    fn parse(&self, path: &Path, bytes: &[u8]) -> Result<Arc<Pod>, String> {
        let location = text::of_name(path);
        let origin = StaticOrigin {
            source: PodSource::File,
            location: &location,
            node_name: &self.node_name,
        };
        let pods = manifest::read(bytes, &origin, &self.seen).map_err(|e| e.to_string())?;
        let pod = pods.into_iter().next();
        let mut pod = pod.ok_or_else(|| ManifestError::Empty.to_string())?;
        self.adoptions.apply(&mut pod);
        let recorded = self.recorded.get(&pod.uid()).and_then(Weak::upgrade);
        Ok(recorded
            .filter(|recorded| same_desired_state(recorded, &pod) && recorded.status == pod.status)
            .unwrap_or_else(|| Arc::new(pod)))
    }
}

/// The paths in a manifest directory that count: those whose names do not begin with a dot, in no order. Blocking.
///
/// # Errors
/// When the directory cannot be read.
pub fn candidates(directory: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name();
        if !name.is_some_and(|name| name.as_encoded_bytes().starts_with(b".")) {
            found.push(path);
        }
    }
    Ok(found)
}

/// Returns the content of the manifest at `path`; `None` if it is not a regular file. Blocking.
///
/// # Errors
/// When it cannot be read; [`cannot_be_read`] says so.
pub fn content_of(path: &Path) -> std::io::Result<Option<FileContent>> {
    if !std::fs::metadata(path)?.is_file() {
        return Ok(None);
    }
    Ok(regular(path)?.map(|(_, content)| content))
}

/// The place of the manifest at `path`, as part of its identity. Bytes that are no UTF-8 are written as escapes.
pub fn location(path: &Path) -> String {
    text::of_name(path)
}

/// Returns the reason for which an existing manifest gives no pod, and the next action.
pub fn cannot_be_read(error: &std::io::Error) -> String {
    let hint = match error.kind() {
        ErrorKind::NotFound => "it is a symlink to nothing; repair or remove it",
        ErrorKind::PermissionDenied => "make it readable for the agent",
        _ => "repair or remove it",
    };
    format!("cannot be read ({error}): {hint}")
}

/// Opens and reads a file.
fn regular(path: &Path) -> std::io::Result<Option<(FileStamp, FileContent)>> {
    // Not blocking, should it have become a pipe meanwhile.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(nix::fcntl::OFlag::O_NONBLOCK.bits())
        .open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Ok(None);
    }
    let stamp = FileStamp::of(&metadata);
    Ok(Some((stamp, content(file, stamp.size)?)))
}

fn unreadable(error: &std::io::Error) -> Cached {
    Cached {
        stamp: FileStamp {
            device: 0,
            inode: 0,
            size: 0,
            modified: (0, 0),
            changed: (0, 0),
        },
        racy: true,
        digest: [0; 32],
        result: Err(cannot_be_read(error)),
    }
}

/// Reads a manifest of `size` bytes, as far as that is known.
///
/// # Errors
/// When reading fails. One that is too large is an error of the manifest.
pub fn content(from: impl Read, size: u64) -> std::io::Result<Result<Vec<u8>, ManifestError>> {
    if size > MAX_MANIFEST_BYTES {
        return Ok(Err(ManifestError::TooLarge { size }));
    }
    let mut bytes = Vec::new();
    from.take(MAX_MANIFEST_BYTES + 1).read_to_end(&mut bytes)?;
    let size = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
    if size > MAX_MANIFEST_BYTES {
        return Ok(Err(ManifestError::TooLarge { size }));
    }
    Ok(Ok(bytes))
}

/// The watcher of the path, renewed when the path was replaced, retried with back-off while it is absent.
struct Watch {
    path: PathBuf,
    hints: mpsc::Receiver<()>,
    hint: mpsc::Sender<()>,
    /// Files that were deleted or moved away since [`Watch::take_removed`].
    removed: Arc<Mutex<BTreeSet<String>>>,
    watcher: Option<(RecommendedWatcher, PathBuf, (u64, u64))>,
    pause: Duration,
    retry_at: Option<Instant>,
}

impl Watch {
    fn new(path: &Path) -> Self {
        let (hint, hints) = mpsc::channel(HINTS_CAPACITY);
        Self {
            path: path.to_owned(),
            hints,
            hint,
            removed: Arc::default(),
            watcher: None,
            pause: REWATCH.0,
            retry_at: None,
        }
    }

    /// Returns the time of the next attempt to watch; `None` while a watch exists.
    fn retry_at(&self) -> Option<Instant> {
        self.retry_at
    }

    /// Returns the files that were deleted or moved away since the last call, whether or not they are back.
    fn take_removed(&self) -> BTreeSet<String> {
        let mut removed = self.removed.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut removed)
    }

    /// [`Watch::renew`] on a blocking thread, since the path may be on a file system that hangs.
    async fn renewed(mut self) -> Self {
        let path = self.path.clone();
        let renewed = blocking::spawn(move || {
            self.renew();
            self
        });
        match renewed.await {
            Ok(watch) => watch,
            Err(error) => {
                warn!(path = %path.display(), %error, "watching the manifests failed");
                Self::new(&path)
            }
        }
    }

    /// Watches what now is at the path, if that is not watched already.
    fn renew(&mut self) {
        let now = identity(&self.target());
        if let Some((_, target, watched)) = &self.watcher
            && Some(*watched) == now
            && *target == self.target()
        {
            return;
        }
        self.watcher = None;
        if self.retry_at.is_some_and(|at| at > Instant::now()) && now.is_none() {
            return;
        }
        match self.watch() {
            Ok(()) => {
                self.pause = REWATCH.0;
                self.retry_at = None;
            }
            Err(error) => {
                if self.retry_at.is_none() {
                    warn!(path = %self.path.display(), %error, "cannot watch the manifests, listing them periodically");
                }
                self.retry_at = Some(Instant::now() + self.pause);
                self.pause = (self.pause * 2).min(REWATCH.1);
            }
        }
    }

    /// The directory itself, or the one that holds the single file.
    fn target(&self) -> PathBuf {
        match (self.path.is_file(), self.path.parent()) {
            (true, Some(parent)) => parent.to_owned(),
            _ => self.path.clone(),
        }
    }

    fn watch(&mut self) -> notify::Result<()> {
        let target = self.target();
        let hint = self.hint.clone();
        let removed = Arc::clone(&self.removed);
        let mut watcher =
            notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
                // Before the hint, so that the listing it asks for knows.
                if let Ok(event) = event.as_ref()
                    && is_removal(event.kind)
                {
                    let paths = event.paths.iter();
                    let origins = paths.map(text::of_name);
                    let mut removed = removed.lock().unwrap_or_else(PoisonError::into_inner);
                    removed.extend(origins);
                }
                let matters = event.map_or(true, |e| match e.kind {
                    EventKind::Access(AccessKind::Close(AccessMode::Write)) => true,
                    EventKind::Access(_) => false,
                    _ => true,
                });
                // A full channel holds a hint already.
                if matters && hint.try_send(()).is_err() {
                    debug!("hint about manifests is pending already");
                }
            })?;
        watcher.watch(&target, RecursiveMode::NonRecursive)?;
        let identity = identity(&target)
            .ok_or_else(|| notify::Error::path_not_found().add_path(target.clone()))?;
        self.watcher = Some((watcher, target, identity));
        Ok(())
    }

    /// Waits for a hint and for the burst it begins to end.
    async fn burst(&mut self) {
        if self.hints.recv().await.is_none() {
            // Cannot be: a sender is kept here. Leave it to the periodic listing.
            return std::future::pending().await;
        }
        let end = Instant::now() + BURST;
        while Instant::now() < end {
            let quiet = tokio::time::timeout(QUIET, self.hints.recv()).await;
            if quiet.is_err() {
                return;
            }
        }
    }
}

/// Returns whether a file was deleted or moved away. Upstream: `produceWatchEvent`.
fn is_removal(kind: EventKind) -> bool {
    matches!(
        kind,
        EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(RenameMode::From))
    )
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::ffi::OsStrExt as _;
    use std::sync::Mutex;

    use super::*;
    use crate::core::pod_update::{SourcePods, merge};
    use crate::store::mounts::{self, testkit};
    use crate::types::{BootId, SystemClock};

    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_copy_that_an_editor_leaves_does_not_take_the_place_of_the_pod() {
        let sourced = |origin: &str, uid: &str| SourcedPod {
            origin: origin.to_owned(),
            pod: Arc::new(
                serde_json::from_value(serde_json::json!({
                    "metadata": {"name": "web", "namespace": "ns", "uid": uid},
                }))
                .unwrap(),
            ),
        };
        let set = |pods| SourceSet {
            source: PodSource::File,
            location: "/m".to_owned(),
            reading: Reading::Complete,
            broken: BTreeMap::new(),
            pods,
            set_back: false,
        };
        let sent = set(vec![sourced("/m/web.yaml", "old")]);
        let now = set(vec![
            sourced("/m/web.yaml", "new"),
            sourced("/m/web.yaml~", "copy"),
        ]);
        let removed = BTreeSet::from(["/m/web.yaml".to_owned()]);
        let before = before_return(&now, &removed, Some(&sent)).unwrap();
        assert_eq!(before.pods, []);
        // Nor while the original is half-written.
        let mut half = set(vec![sourced("/m/web.yaml~", "copy")]);
        half.broken
            .insert("/m/web.yaml".to_owned(), "bad".to_owned());
        let before = before_return(&half, &removed, Some(&sent)).unwrap();
        assert_eq!((before.pods, before.broken.len()), (Vec::new(), 0));
    }

    /// The listings that the agent makes of a directory, and what it takes from them.
    struct Directory {
        dir: tempfile::TempDir,
        source: FileSource,
        clock: Arc<SystemClock>,
        sent: Option<SourceSet>,
        known: SourcePods,
    }

    impl Directory {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let settings = FileSettings {
                path: dir.path().to_owned(),
                check_frequency: Duration::from_secs(20),
                mount: None,
            };
            let clock = Arc::new(SystemClock::new(BootId(1)));
            let source =
                FileSource::new(settings, "node", Arc::<SystemClock>::clone(&clock)).unwrap();
            Self {
                dir,
                source,
                clock,
                sent: None,
                known: SourcePods::default(),
            }
        }

        fn path(&self, file: &str) -> PathBuf {
            self.dir.path().join(file)
        }

        fn write(&self, file: &str, image: &str) {
            let pod = format!(
                "apiVersion: v1\nkind: Pod\nmetadata: {{name: web}}\nspec: {{containers: [{{name: c, image: {image}}}]}}\n"
            );
            std::fs::write(self.path(file), pod).unwrap();
        }

        /// Lists once, after these files were removed or moved away. Returns file name and image of each pod.
        async fn list(&mut self, removed: &[&str]) -> Vec<(String, String)> {
            let removed = removed.iter().map(|file| text::of_name(self.path(file)));
            let (removed, set) = (removed.collect(), self.source.read().await);
            let before = before_return(&set, &removed, self.sent.as_ref());
            for set in before.into_iter().chain([set]) {
                self.known = merge(&self.known, &set, &|_| false, self.clock.now()).pods;
                self.sent = Some(set);
            }
            let of = |sourced: &SourcedPod| {
                let file = sourced.origin.rsplit('/').next().unwrap().to_owned();
                let image = sourced.pod.spec_ref().containers[0].image.clone().unwrap();
                (file, image)
            };
            self.known.iter().map(|(_, sourced)| of(sourced)).collect()
        }
    }

    #[tokio::test]
    async fn a_manifest_that_is_moved_aside_and_written_anew_stays_the_source_of_its_pod() {
        for is_half_seen in [false, true] {
            let mut manifests = Directory::new();
            manifests.write("web.yaml", "old");
            manifests.list(&[]).await;
            // mv web.yaml web-old.yaml && cp new.yaml web.yaml
            std::fs::rename(manifests.path("web.yaml"), manifests.path("web-old.yaml")).unwrap();
            let mut removed: &[&str] = &["web.yaml"];
            if is_half_seen {
                std::fs::write(manifests.path("web.yaml"), "").unwrap();
                assert!(manifests.list(removed).await.is_empty());
                removed = &[];
            }
            manifests.write("web.yaml", "new");
            let pods = manifests.list(removed).await;
            assert_eq!(
                pods,
                [("web.yaml".to_owned(), "new".to_owned())],
                "{is_half_seen}"
            );
            // Later edits count, too.
            manifests.write("web.yaml", "newer");
            let pods = manifests.list(&[]).await;
            assert_eq!(
                pods,
                [("web.yaml".to_owned(), "newer".to_owned())],
                "{is_half_seen}"
            );
        }
    }

    #[tokio::test]
    async fn a_pipe_among_the_manifests_is_named_once_and_never_waited_for() {
        let log = Log::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .finish();
        let _guard = tracing::subscriber::set_default(subscriber);
        let dir = tempfile::tempdir().unwrap();
        let mode = nix::sys::stat::Mode::S_IRWXU;
        nix::unistd::mkfifo(&dir.path().join("pipe.yaml"), mode).unwrap();
        std::fs::create_dir(dir.path().join("below")).unwrap();
        let settings = FileSettings {
            path: dir.path().to_owned(),
            check_frequency: Duration::from_secs(20),
            mount: None,
        };
        let clock = Arc::new(SystemClock::new(BootId(1)));
        let mut source = FileSource::new(settings, "node", clock).unwrap();
        for _ in 0..2 {
            let set = source.read().await;
            assert_eq!(set.reading, Reading::Complete);
            assert!(set.pods.is_empty() && set.broken.is_empty());
        }
        let lines = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        assert_eq!(lines.lines().count(), 1, "{lines}");
        assert!(lines.contains("pipe.yaml"), "{lines}");
    }

    #[tokio::test]
    async fn a_manifest_is_read_whatever_bytes_are_in_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let pod = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"web"},
            "spec":{"containers":[{"name":"c","image":"i"}]}}"#;
        let name = std::ffi::OsStr::from_bytes(b"caf\xe9.yaml");
        std::fs::write(dir.path().join(name), pod).unwrap();
        let settings = FileSettings {
            path: dir.path().to_owned(),
            check_frequency: Duration::from_secs(20),
            mount: None,
        };
        let clock = Arc::new(SystemClock::new(BootId(1)));
        let mut source = FileSource::new(settings, "node", clock).unwrap();
        let set = source.read().await;
        assert!(set.broken.is_empty(), "{:?}", set.broken);
        assert!(set.pods[0].origin.ends_with("/caf\\xe9.yaml"));
    }

    #[tokio::test]
    async fn a_directory_that_is_not_mounted_does_not_mean_that_there_are_no_manifests() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("manifests");
        let pod = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"web"},
            "spec":{"containers":[{"name":"c","image":"i"}]}}"#;
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("web.yaml"), pod).unwrap();
        let mount = || Mount::new(mounts::Directory::Manifests, &path, dir.path());
        let source = || {
            let settings = FileSettings {
                path: path.clone(),
                check_frequency: Duration::from_secs(20),
                mount: Some(Arc::new(mount())),
            };
            FileSource::new(settings, "node", Arc::new(SystemClock::new(BootId(1)))).unwrap()
        };
        assert_eq!(source().read().await.reading, Reading::Complete);
        let record = testkit::unmounted(&mount()).unwrap();
        std::fs::remove_file(path.join("web.yaml")).unwrap();
        // Empty or absent, as the mount point may be.
        for absent in [false, true] {
            if absent {
                std::fs::remove_dir(&path).unwrap();
            }
            let set = source().read().await;
            let Reading::Unreadable(why) = &set.reading else {
                panic!("{:?}", set.reading);
            };
            assert!(why.contains("new-disk manifests"), "{why}");
        }
        std::fs::create_dir(&path).unwrap();
        std::fs::write(dir.path().join("mounts/manifests"), record).unwrap();
        assert_eq!(source().read().await.reading, Reading::Complete);
    }
}
