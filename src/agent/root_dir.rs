//! The marker by which the root directory and the store know each other, see [`core::node_root`](crate::core::node_root).
//!
//! On disk: `<root-dir>/.holdfast` has the identity, as text; `<state-dir>/root-dir` has the same identity and the path
//! of the root directory, as JSON. [`store::mounts`](crate::store::mounts) has the file systems of both.
//!
//! **Invariant:** the marker is on the disk before the record that expects it, and the record of a root directory that
//! is gone goes before another marker comes. So no crash makes a root directory look wiped.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tracing::{info, warn};

use crate::core::mounts::{Presence, waits_for_store};
use crate::core::node_root::{Recorded, Verdict, judge};
use crate::store::former;
use crate::store::layout::Layout;
use crate::store::mounts::{Directory, Look, Mount};
use crate::types::Stamp;

/// The marker, below the root directory.
const MARKER: &str = ".holdfast";
/// The record, below the state directory.
const RECORD: &str = "root-dir";

/// Sets the store aside if it was kept for a root directory that is gone, and claims the root directory for the store
/// that is opened next. Returns where the previous store is, if there was one. Blocking; the caller holds the lock of
/// the state directory.
///
/// Errors of reading and writing are logged. The store then stays in use, and the next start tries again.
pub(super) fn claim(root_dir: &Path, state_dir: &Path, now: Stamp) -> Option<PathBuf> {
    let mut former = None;
    if let Err(error) = try_claim(root_dir, state_dir, now, &mut former) {
        warn!(
            root_dir = %root_dir.display(),
            state_dir = %state_dir.display(),
            %error,
            "cannot check whether the store belongs to the root directory"
        );
    }
    former
}

fn try_claim(
    root_dir: &Path,
    state_dir: &Path,
    now: Stamp,
    former: &mut Option<PathBuf>,
) -> io::Result<()> {
    let record = state_dir.join(RECORD);
    let mount = Mount::new(Directory::Root, root_dir, state_dir);
    let Found {
        marker,
        look,
        verdict,
    } = find(root_dir, state_dir, &mount)?;
    let path = root_dir.to_string_lossy();
    let identity = match verdict {
        Verdict::Same => return record_mounts(root_dir, state_dir, &mount, look),
        Verdict::Wait => return Err(io::Error::other(mount.explain(&look?))),
        Verdict::Claim(identity) => identity,
        Verdict::Replaced(identity) => {
            *former = former::set_aside(state_dir, now)?;
            info!(
                root_dir = %path,
                former = former.as_deref().map(|path| path.display().to_string()),
                "the root directory was wiped or replaced: moved the store to quarantine, beginning with an empty one"
            );
            fs::remove_file(&record)?;
            File::open(state_dir)?.sync_all()?;
            identity
        }
    };
    let identity = identity.unwrap_or_else(|| uuid::Uuid::new_v4().to_string());
    if marker.as_ref() != Some(&identity) {
        fs::create_dir_all(root_dir)?;
        write(root_dir, MARKER, &format!("{identity}\n"))?;
    }
    let text = json!({"identity": identity, "path": path});
    write(state_dir, RECORD, &format!("{text}\n"))?;
    record_mounts(root_dir, state_dir, &mount, look)
}

/// Facts about the root directory.
struct Found {
    /// The identity in its marker.
    marker: Option<String>,
    /// Its file system, or why that cannot be found out.
    look: io::Result<Look>,
    /// The decision about the directory as it was found.
    verdict: Verdict,
}

fn find(root_dir: &Path, state_dir: &Path, mount: &Mount) -> io::Result<Found> {
    let look = match mount.look() {
        Err(error) if Mount::recorded_path(Directory::Root, state_dir)?.is_some() => {
            return Err(error);
        }
        // Where the kernel never shows it, as in a chroot, the marker alone counts.
        look => look,
    };
    let presence = look.as_ref().map_or(Presence::Same, |look| look.presence);
    let recorded = read(&state_dir.join(RECORD))?.and_then(|text| parse(&text));
    let marker = read(&root_dir.join(MARKER))?;
    let marker = marker.as_deref().map(str::trim).filter(|m| !m.is_empty());
    let verdict = judge(
        recorded.as_ref(),
        marker,
        &root_dir.to_string_lossy(),
        has_pods(root_dir)?,
        presence,
    );
    Ok(Found {
        marker: marker.map(str::to_owned),
        look,
        verdict,
    })
}

/// Records the file systems of both directories.
fn record_mounts(
    root_dir: &Path,
    state_dir: &Path,
    mount: &Mount,
    look: io::Result<Look>,
) -> io::Result<()> {
    mount.record(look?)?;
    let mount = Mount::of_state_dir(state_dir, root_dir);
    mount.record(mount.look()?)
}

/// Returns what the root directory and the state directory have to be waited for, and what can be done about it. Blocking;
/// needs no lock, and writes nothing.
///
/// # Errors
/// When one of them cannot be read, and the other need not be waited for.
pub(super) fn waits_for(root_dir: &Path, state_dir: &Path) -> io::Result<Vec<String>> {
    let checks = [
        (state_dir, state_dir_waits(root_dir, state_dir)),
        (root_dir, root_dir_waits(root_dir, state_dir)),
    ];
    let (mut missing, mut failed) = (Vec::new(), Vec::new());
    for (directory, waits) in checks {
        match waits {
            Ok(why) => missing.extend(why),
            Err(error) => failed.push((directory, error)),
        }
    }
    if missing.is_empty() {
        return failed.pop().map_or(Ok(missing), |(_, error)| Err(error));
    }
    // A directory that cannot be read does not end the wait for the other.
    missing.extend(failed.into_iter().map(|(directory, error)| {
        let directory = directory.display();
        format!("cannot check whether the file system of {directory} is mounted: {error}")
    }));
    Ok(missing)
}

fn state_dir_waits(root_dir: &Path, state_dir: &Path) -> io::Result<Option<String>> {
    let mount = Mount::of_state_dir(state_dir, root_dir);
    let look = mount.look()?;
    let has_store = Layout::new(state_dir).db().exists();
    Ok(waits_for_store(look.presence, has_store).then(|| mount.explain(&look)))
}

fn root_dir_waits(root_dir: &Path, state_dir: &Path) -> io::Result<Option<String>> {
    let mount = Mount::new(Directory::Root, root_dir, state_dir);
    let Found { look, verdict, .. } = find(root_dir, state_dir, &mount)?;
    match verdict {
        Verdict::Wait => Ok(Some(mount.explain(&look?))),
        _ => Ok(None),
    }
}

/// Returns whether pods have run on this node: their directories are below the root directory.
///
/// # Errors
/// When that cannot be seen.
pub(super) fn has_pods(root_dir: &Path) -> io::Result<bool> {
    match fs::read_dir(root_dir.join("pods")) {
        Ok(mut entries) => Ok(entries.next().is_some()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn read(path: &Path) -> io::Result<Option<String>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads a record; one that is damaged says nothing.
fn parse(text: &str) -> Option<Recorded> {
    let value: Value = serde_json::from_str(text).ok()?;
    let field = |name: &str| value.get(name)?.as_str().map(str::to_owned);
    Some(Recorded {
        identity: field("identity")?,
        path: field("path")?,
    })
}

/// Writes a file that is there whole or not at all, even after a power loss.
pub(super) fn write(directory: &Path, name: &str, text: &str) -> io::Result<()> {
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    file.write_all(text.as_bytes())?;
    file.as_file().sync_all()?;
    file.persist(directory.join(name))
        .map_err(|error| error.error)?;
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::core::state::{EpochReason, EpochRecord, QueueRecord, Transaction};
    use crate::store::backend::SledOptions;
    use crate::store::mounts::testkit;
    use crate::store::open::{OpenOptions, Opened, open};
    use crate::store::recover::Identity;
    use crate::store::{Store, StoreOptions};
    use crate::types::metrics::Metrics;
    use crate::types::{BootId, BootIdentity, Clock};

    struct Still(Stamp);

    impl Clock for Still {
        fn now(&self) -> Stamp {
            self.0
        }
    }

    fn now() -> Stamp {
        Stamp {
            boot: BootId(1),
            boottime_ms: 1_000,
            wall_ms: 1_700_000_000_000,
        }
    }

    /// A node's directories, and what the agent does with them at a start.
    struct Node(tempfile::TempDir);

    impl Node {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir(dir.path().join("state")).unwrap();
            Self(dir)
        }

        fn root(&self) -> PathBuf {
            self.0.path().join("root")
        }

        fn state(&self) -> PathBuf {
            self.0.path().join("state")
        }

        fn open(&self) -> Opened {
            open(&OpenOptions {
                node_was_used: false,
                dir: self.state(),
                identity: Identity {
                    node_name: "n".to_owned(),
                    machine_id: "m".to_owned(),
                    boot: BootIdentity::read(Some("boot"), None),
                },
                sled: SledOptions::default(),
                now: now(),
            })
            .unwrap()
        }

        /// Starts, remembers something and ends. Returns where the previous store was put, whether what was remembered
        /// before is still known, and the epoch.
        async fn run(&self) -> (Option<PathBuf>, bool, EpochRecord) {
            let former = claim(&self.root(), &self.state(), now());
            let Opened {
                backend, loaded, ..
            } = self.open();
            let known = loaded.state.record::<QueueRecord>("u1").is_some();
            let epoch = loaded.state.meta().unwrap().epoch.clone();
            let clock: Arc<dyn Clock> = Arc::new(Still(now()));
            let options = StoreOptions::default();
            let store = Store::start(backend, loaded, options, clock, Metrics::default()).unwrap();
            let record = QueueRecord {
                due: now(),
                why: "a test".to_owned(),
            };
            let put = Transaction::new().put("u1", record);
            store.commit(put).await.unwrap();
            store.sync().await.unwrap();
            store.close().await.unwrap();
            (former, known, epoch)
        }

        fn wipe(&self) {
            fs::remove_dir_all(self.root()).unwrap();
            fs::create_dir(self.root()).unwrap();
        }
    }

    #[tokio::test]
    async fn a_wiped_root_directory_begins_another_store() {
        let node = Node::new();
        let (former, known, epoch) = node.run().await;
        assert_eq!((former, known, epoch.number), (None, false, 1));
        fs::create_dir_all(node.root().join("pods/u1")).unwrap();
        let (former, known, _) = node.run().await;
        assert_eq!((former, known), (None, true));

        // As `kubeadm reset` does it. A backup of the former node must not come back either.
        node.wipe();
        let backup = node.state().join("backups/backup-0001.holdfast");
        fs::write(&backup, "of the former node").unwrap();
        let (former, known, epoch) = node.run().await;
        let former = former.unwrap();
        assert!(!known);
        assert_eq!((epoch.number, epoch.reason), (2, EpochReason::Rebuilt));
        assert!(former.starts_with(node.state().join("quarantine")));
        assert!(former.join("db").exists() && !backup.exists());
        assert!(former.join("backups/backup-0001.holdfast").exists());

        // Once only.
        let (former, known, epoch) = node.run().await;
        assert_eq!((former, known, epoch.number), (None, true, 2));
    }

    #[tokio::test]
    async fn a_root_directory_that_is_not_wiped_keeps_its_store() {
        let node = Node::new();
        node.run().await;
        let (marker, record) = (node.root().join(MARKER), node.state().join(RECORD));
        // An agent that knew of no markers was here.
        fs::remove_file(&marker).unwrap();
        fs::remove_file(&record).unwrap();
        assert!(node.run().await.1);
        // The record is lost or damaged.
        fs::remove_file(&record).unwrap();
        assert!(node.run().await.1);
        fs::write(&record, "{").unwrap();
        assert!(node.run().await.1);
        // The marker is lost, and pods are there.
        fs::create_dir_all(node.root().join("pods/u1")).unwrap();
        fs::remove_file(&marker).unwrap();
        assert!(node.run().await.1);
        assert!(marker.exists());
        // It cannot be read: that says nothing.
        fs::remove_file(&marker).unwrap();
        fs::create_dir(&marker).unwrap();
        assert!(node.run().await.1);
        fs::remove_dir(&marker).unwrap();
        // Another --root-dir.
        node.run().await;
        fs::rename(node.root(), node.0.path().join("aside")).unwrap();
        let text = fs::read_to_string(&record).unwrap();
        fs::write(&record, text.replace("/root", "/elsewhere")).unwrap();
        assert!(node.run().await.1);
    }

    /// A disk that is late, at one boot or at two, is neither a wiped root directory nor a new one.
    #[tokio::test]
    async fn a_root_directory_that_is_not_mounted_is_waited_for() {
        let node = Node::new();
        node.run().await;
        let waits = || waits_for(&node.root(), &node.state()).unwrap();
        assert_eq!(waits(), Vec::<String>::new());
        let mount = Mount::new(Directory::Root, &node.root(), &node.state());
        let record = testkit::unmounted(&mount).unwrap();
        let disk = node.0.path().join("disk");
        fs::rename(node.root(), &disk).unwrap();
        for made in [false, true] {
            if made {
                fs::create_dir_all(node.root().join("pods/u2")).unwrap();
            }
            let why = waits();
            assert_eq!(why.len(), 1, "{why:?}");
            assert!(why[0].contains("new-disk root-dir"), "{why:?}");
            // Nor does an agent that comes to open the store all the same set it aside.
            let (former, known, epoch) = node.run().await;
            assert_eq!((former, known, epoch.number), (None, true, 1));
            assert!(!node.root().join(MARKER).exists());
        }
        fs::remove_dir_all(node.root()).unwrap();
        fs::rename(&disk, node.root()).unwrap();
        fs::write(node.state().join("mounts/root-dir"), &record).unwrap();
        assert_eq!(waits(), Vec::<String>::new());
        let (former, known, _) = node.run().await;
        assert_eq!((former, known), (None, true));

        // It is gone for good.
        testkit::unmounted(&mount);
        fs::remove_dir_all(node.root()).unwrap();
        assert_eq!(waits().len(), 1);
        mount.accept().unwrap();
        assert_eq!(waits(), Vec::<String>::new());
        let (former, known, _) = node.run().await;
        assert!(former.is_some() && !known);
        let now = fs::read(node.state().join("mounts/root-dir")).unwrap();
        assert_eq!(now, record, "the file system below is the right one now");
        assert_eq!(node.run().await.0, None);
    }

    #[tokio::test]
    async fn a_state_directory_that_is_not_mounted_is_waited_for() {
        let node = Node::new();
        node.run().await;
        let waits = || waits_for(&node.root(), &node.state()).unwrap();
        let mount = Mount::of_state_dir(&node.state(), &node.root());
        let record = testkit::unmounted(&mount).unwrap();
        let disk = node.0.path().join("disk");
        fs::rename(node.state(), &disk).unwrap();
        for made in [false, true] {
            if made {
                fs::create_dir(node.state()).unwrap();
            }
            let why = waits();
            assert!(why[0].contains("new-disk state-dir"), "{why:?}");
        }
        fs::remove_dir(node.state()).unwrap();
        fs::rename(&disk, node.state()).unwrap();
        fs::write(node.root().join(".holdfast-state-dir"), record).unwrap();
        assert_eq!(waits(), Vec::<String>::new());
        assert!(node.run().await.1);
    }

    #[tokio::test]
    async fn a_directory_that_cannot_be_read_does_not_end_the_wait_for_the_other() {
        let node = Node::new();
        node.run().await;
        let marker = node.root().join(MARKER);
        fs::remove_file(&marker).unwrap();
        fs::create_dir(&marker).unwrap();
        let waits = || waits_for(&node.root(), &node.state());
        assert!(waits().is_err(), "there is nothing to wait for");
        let mount = Mount::of_state_dir(&node.state(), &node.root());
        testkit::unmounted(&mount).unwrap();
        let why = waits().unwrap();
        let [state, root] = why.as_slice() else {
            panic!("{why:?}");
        };
        assert!(state.contains("new-disk state-dir"), "{state}");
        assert!(root.contains("cannot check"), "{root}");
    }

    /// Wherever a crash cuts the change of stores off, the next start completes it and loses nothing of the new one.
    #[tokio::test]
    async fn a_change_of_stores_that_was_cut_off_is_completed_once() {
        for cut in ["set aside", "forgotten", "marked"] {
            let node = Node::new();
            node.run().await;
            node.wipe();
            assert!(former::set_aside(&node.state(), now()).unwrap().is_some());
            if cut != "set aside" {
                fs::remove_file(node.state().join(RECORD)).unwrap();
            }
            if cut == "marked" {
                write(&node.root(), MARKER, "another\n").unwrap();
            }
            let (former, known, epoch) = node.run().await;
            assert_eq!((former, known, epoch.number), (None, false, 2), "{cut}");
            let (former, known, epoch) = node.run().await;
            assert_eq!((former, known, epoch.number), (None, true, 2), "{cut}");
        }
    }
}
