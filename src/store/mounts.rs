//! Records of the file systems that the agent's directories are on, beside the database.
//!
//! On disk: `<state-dir>/mounts/<directory>` has the path and the file system of a directory, as JSON, and
//! `<directory>.accepted` the file system that an operator has declared to be the right one (`holdfast store new-disk`).
//! The record of the state directory itself is in the root directory. `core::mounts` decides what follows.
//!
//! **Invariant:** nothing is written to a directory that may be missing its file system, and nothing is recorded of it.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use super::layout::write_atomically;
use crate::core::mounts::{Place, Presence, presence};
use crate::types::file_system::FileSystem;
use crate::types::text;

/// Directory of the records, below the state directory.
const DIR: &str = "mounts";
/// Record of the state directory's file system, below the root directory.
const OF_STATE_DIR: &str = ".holdfast-state-dir";

/// A directory that the agent takes facts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Directory {
    /// `--root-dir`
    Root,
    /// `--state-dir`
    State,
    /// `staticPodPath`
    Manifests,
    /// Archives of images.
    Preload,
}

impl Directory {
    /// Its name, in files and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Root => "root-dir",
            Self::State => "state-dir",
            Self::Manifests => "manifests",
            Self::Preload => "preload",
        }
    }
}

/// A directory, and where the record of its file system is.
#[derive(Debug)]
pub struct Mount {
    directory: Directory,
    path: PathBuf,
    record: PathBuf,
    accepted: PathBuf,
    /// Device and inode of the directory when its file system was recorded.
    seen: Mutex<Option<(u64, u64)>>,
}

/// The file system of a directory, as found and as recorded.
#[derive(Clone, Debug)]
pub struct Look {
    /// State of the recorded file system.
    pub presence: Presence,
    found: FileSystem,
    recorded: Option<Place>,
}

impl Mount {
    /// `path` is the directory; the record is below the state directory `state_dir`.
    pub fn new(directory: Directory, path: &Path, state_dir: &Path) -> Self {
        let name = directory.as_str();
        let dir = state_dir.join(DIR);
        Self {
            directory,
            path: path.to_owned(),
            record: dir.join(name),
            accepted: dir.join(format!("{name}.accepted")),
            seen: Mutex::default(),
        }
    }

    /// The state directory, whose record is in the root directory.
    pub fn of_state_dir(state_dir: &Path, root_dir: &Path) -> Self {
        Self {
            record: root_dir.join(OF_STATE_DIR),
            ..Self::new(Directory::State, state_dir, state_dir)
        }
    }

    /// Returns the recorded path of a directory, if any. Blocking.
    ///
    /// # Errors
    /// When the record cannot be read.
    pub fn recorded_path(directory: Directory, state_dir: &Path) -> io::Result<Option<PathBuf>> {
        let mount = Self::new(directory, Path::new(""), state_dir);
        let place: Option<Place> = read(&mount.record)?;
        Ok(place.map(|place| PathBuf::from(place.path)))
    }

    /// Compares the present file system with the recorded one. Blocking.
    ///
    /// # Errors
    /// When one of them cannot be read.
    pub fn look(&self) -> io::Result<Look> {
        let recorded: Option<Place> = read(&self.record)?;
        let accepted: Option<FileSystem> = read(&self.accepted)?;
        let found = FileSystem::of(&self.path)?;
        let path = text::of_name(&self.path);
        Ok(Look {
            presence: presence(recorded.as_ref(), &path, &found, accepted.as_ref()),
            found,
            recorded,
        })
    }

    /// Records what was found as the directory's file system. What an operator has said about it is done then. Blocking.
    ///
    /// # Errors
    /// When that cannot be written.
    pub fn record(&self, look: Look) -> io::Result<()> {
        let mut place = Place {
            path: text::of_name(&self.path),
            file_system: look.found,
        };
        if let Some(recorded) = look.recorded {
            // A UUID that cannot be read now is still the file system's.
            let (known, now) = (&recorded.file_system, &mut place.file_system);
            if now.uuid.is_none() && (&known.point, &known.fstype) == (&now.point, &now.fstype) {
                now.uuid.clone_from(&known.uuid);
            }
            if recorded == place {
                return remove(&self.accepted);
            }
        }
        write(&self.record, &serde_json::to_string(&place)?)?;
        remove(&self.accepted)
    }

    /// Checks a directory that is only read. Returns the reason for which its content does not count while its file
    /// system is not mounted, and records its file system otherwise. Blocking.
    ///
    /// # Errors
    /// When that cannot be found out or written.
    pub fn missing(&self) -> io::Result<Option<String>> {
        let now = fs::metadata(&self.path).ok().map(|m| (m.dev(), m.ino()));
        if now.is_some() && *self.seen.lock().unwrap_or_else(PoisonError::into_inner) == now {
            return Ok(None);
        }
        let look = self.look()?;
        if look.presence == Presence::NotMounted {
            return Ok(Some(self.explain(&look)));
        }
        self.record(look)?;
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = now;
        Ok(None)
    }

    /// Declares that the file system which the directory is on now is the right one. Returns it. The agent, or its next
    /// start, takes that up. Blocking.
    ///
    /// # Errors
    /// When the file system cannot be found out or the declaration cannot be written.
    pub fn accept(&self) -> io::Result<FileSystem> {
        let found = FileSystem::of(&self.path)?;
        write(&self.accepted, &serde_json::to_string(&found)?)?;
        Ok(found)
    }

    /// Says what is waited for, and what can be done about it.
    pub fn explain(&self, look: &Look) -> String {
        let path = self.path.display();
        let name = self.directory.as_str();
        let was = match &look.recorded {
            Some(recorded) => recorded.file_system.to_string(),
            None => "another file system".to_owned(),
        };
        let now = match look.presence {
            Presence::NotMounted => format!("which is not mounted now ({})", look.found),
            Presence::Same | Presence::Other => format!("and is on {} now", look.found),
        };
        format!(
            "{path} ({name}) was on {was}, {now}: mount the former one, or run `holdfast store new-disk {name}` \
             if it is gone for good"
        )
    }
}

/// Reads a record; a damaged one counts as absent.
fn read<T: serde::de::DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    match fs::read(path) {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
        Err(error) if is_absent(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if is_absent(&error) => Ok(()),
        other => other,
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
    )
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)?;
    write_atomically(path, format!("{text}\n").as_bytes())
}

#[cfg(test)]
pub(crate) mod testkit {
    use super::*;

    /// Makes the record of a directory say that it was on a file system below its own, which is not mounted. Returns the
    /// record as it was.
    pub(crate) fn unmounted(mount: &Mount) -> Option<Vec<u8>> {
        let former = fs::read(&mount.record).ok();
        let place = Place {
            path: text::of_name(&mount.path),
            file_system: FileSystem {
                point: text::of_name(&mount.path),
                fstype: "ext4".to_owned(),
                source: "/dev/late".to_owned(),
                uuid: Some("late".to_owned()),
            },
        };
        write(&mount.record, &serde_json::to_string(&place).unwrap()).unwrap();
        former
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_not_believed_until_its_disk_is_back_or_declared_gone() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let path = dir.path().join("manifests");
        let mount = || Mount::new(Directory::Manifests, &path, &state);
        fs::create_dir(&path).unwrap();
        assert_eq!(mount().missing().unwrap(), None);
        let recorded = Mount::recorded_path(Directory::Manifests, &state);
        assert_eq!(recorded.unwrap(), Some(path.clone()));

        let former = testkit::unmounted(&mount()).unwrap();
        for absent in [false, true] {
            if absent {
                fs::remove_dir(&path).unwrap();
            }
            let why = mount().missing().unwrap().unwrap();
            for part in ["UUID late", "not mounted", "new-disk manifests"] {
                assert!(why.contains(part), "{why}");
            }
        }
        // It is there again.
        fs::create_dir(&path).unwrap();
        fs::write(state.join("mounts/manifests"), &former).unwrap();
        assert_eq!(mount().missing().unwrap(), None);

        // It is gone for good. That is said once, of this file system.
        testkit::unmounted(&mount());
        mount().accept().unwrap();
        assert_eq!(mount().missing().unwrap(), None);
        assert!(!state.join("mounts/manifests.accepted").exists());
        assert_eq!(mount().missing().unwrap(), None);
        testkit::unmounted(&mount());
        assert!(mount().missing().unwrap().is_some());
    }

    #[test]
    fn a_uuid_that_cannot_be_read_is_kept_on_record() {
        let dir = tempfile::tempdir().unwrap();
        let mount = Mount::new(Directory::Preload, dir.path(), dir.path());
        let mut look = mount.look().unwrap();
        look.found.uuid = Some("u".to_owned());
        mount.record(look).unwrap();
        let mut look = mount.look().unwrap();
        look.found.uuid = None;
        mount.record(look).unwrap();
        let place: Place = read(&mount.record).unwrap().unwrap();
        assert_eq!(place.file_system.uuid.as_deref(), Some("u"));
    }
}
