//! Checks the path of a hostPath volume against its type; upstream's `hostPathTypeChecker`.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::{Mode, fchmod, mkdirat};

use super::{POD_WAIT, VolumeError, VolumeManager, mounts};
use crate::types::{PodUid, blocking};

/// A path that is not what the volume says.
#[derive(Debug, thiserror::Error)]
pub enum HostPathError {
    /// Not absolute, or with `..`.
    #[error("hostPath {path:?} must be absolute and may not hold \"..\"")]
    Path {
        /// As written.
        path: String,
    },
    /// The type is none.
    #[error(
        "unknown hostPath type {type_:?}; use DirectoryOrCreate, Directory, FileOrCreate, File, Socket, CharDevice or BlockDevice"
    )]
    Type {
        /// As written.
        type_: String,
    },
    /// Something else is there, or nothing.
    #[error("hostPath type check failed: {path} is not a {wanted}")]
    Check {
        /// The path.
        path: String,
        /// Required type.
        wanted: &'static str,
    },
    /// It could not be made or looked at.
    #[error("{verb} hostPath {path}")]
    Io {
        /// Verb of the failed operation.
        verb: &'static str,
        /// The path.
        path: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl VolumeManager {
    /// Returns the volumes among these, with their paths, whose files have no SELinux labels that could be set.
    ///
    /// # Errors
    /// When the table of mounts cannot be read.
    pub async fn without_labels(
        &self,
        volumes: BTreeMap<String, PathBuf>,
    ) -> io::Result<BTreeSet<String>> {
        if volumes.is_empty() {
            return Ok(BTreeSet::new());
        }
        let looked = blocking::run(move || mounts::without_labels(&volumes)).await;
        looked.map_err(|ended| io::Error::other(ended.to_string()))?
    }

    /// Looks again at a hostPath with a type before another container gets it: a runtime makes a directory of what is missing,
    /// in the place of a socket, a device or a file. Makes what the type says to make. Upstream looks once.
    ///
    /// # Errors
    /// When the path is not what the type says, or does not answer in time.
    pub async fn look_at_host_path(
        &self,
        uid: &PodUid,
        volume: &str,
        path: &str,
        type_: &str,
    ) -> Result<(), VolumeError> {
        if type_.is_empty() {
            return Ok(());
        }
        let (at, wanted) = (path.to_owned(), type_.to_owned());
        let work = async move { blocking::run(move || prepare(&at, &wanted)).await };
        let key = format!("host_path/{uid}/{volume}");
        let looked = self.operations.run(&key, "host_path_check", work);
        let failed =
            |kind: io::ErrorKind, why: String| error("look at", path)(io::Error::new(kind, why));
        let source = match tokio::time::timeout(POD_WAIT, looked).await {
            Ok(Ok(Ok(Ok(())))) => return Ok(()),
            Ok(Ok(Ok(Err(source)))) => source,
            Ok(Ok(Err(ended))) => failed(io::ErrorKind::Other, ended.to_string()),
            Ok(Err(ended)) => failed(io::ErrorKind::Other, ended.to_string()),
            Err(_) => {
                let why = format!(
                    "it takes more than {} s, as with storage that does not answer",
                    POD_WAIT.as_secs()
                );
                failed(io::ErrorKind::TimedOut, why)
            }
        };
        Err(VolumeError::HostPath {
            pod: uid.clone(),
            volume: volume.to_owned(),
            source,
        })
    }
}

/// Checks that a path is absolute and stays below the root.
pub(super) fn validate(path: &str) -> Result<(), HostPathError> {
    let climbs = Path::new(path)
        .components()
        .any(|c| c == Component::ParentDir);
    if !path.starts_with('/') || climbs || path.contains('\0') {
        return Err(HostPathError::Path {
            path: path.to_owned(),
        });
    }
    Ok(())
}

/// Makes what may be made and checks what is there. Links are followed, as the runtime will.
pub(super) fn prepare(path: &str, type_: &str) -> Result<(), HostPathError> {
    validate(path)?;
    match type_ {
        "" => Ok(()),
        "DirectoryOrCreate" => {
            if !exists(path)? {
                make_dir(path).map_err(error("create directory for", path))?;
            }
            check(path, "directory", fs::FileType::is_dir)
        }
        "FileOrCreate" => {
            if !exists(path)? {
                make_file(path).map_err(error("create file for", path))?;
            }
            check(path, "file", fs::FileType::is_file)
        }
        "Directory" => check(path, "directory", fs::FileType::is_dir),
        "File" => check(path, "file", fs::FileType::is_file),
        "Socket" => check(path, "socket file", FileTypeExt::is_socket),
        "CharDevice" => check(path, "character device", FileTypeExt::is_char_device),
        "BlockDevice" => check(path, "block device", FileTypeExt::is_block_device),
        other => Err(HostPathError::Type {
            type_: other.to_owned(),
        }),
    }
}

fn error(verb: &'static str, path: &str) -> impl FnOnce(io::Error) -> HostPathError {
    let path = path.to_owned();
    move |source| HostPathError::Io { verb, path, source }
}

fn exists(path: &str) -> Result<bool, HostPathError> {
    fs::exists(path).map_err(error("look at", path))
}

fn check(
    path: &str,
    wanted: &'static str,
    is: impl FnOnce(&fs::FileType) -> bool,
) -> Result<(), HostPathError> {
    let fits = match fs::metadata(path) {
        Ok(metadata) => is(&metadata.file_type()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => false,
        Err(e) => return Err(error("look at", path)(e)),
    };
    if fits {
        Ok(())
    } else {
        Err(HostPathError::Check {
            path: path.to_owned(),
            wanted,
        })
    }
}

/// Makes a directory and those it lies in. What is there is followed, links too; what is missing is made by its name in
/// the opened directory it belongs in. So nothing is made through a link that leads nowhere, nor through one that takes
/// the place of a directory meanwhile, and modes are given to what was made and nothing else.
fn make_dir(path: &str) -> io::Result<()> {
    let names = names(path);
    let (mut at, there) = deepest(&names)?;
    for name in &names[there..] {
        let made = match mkdirat(&at, *name, Mode::from_bits_truncate(0o755)) {
            Ok(()) => true,
            // Another pod makes it at the same moment, or it is a link.
            Err(Errno::EEXIST) => false,
            Err(error) => return Err(error.into()),
        };
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        at = match openat(&at, *name, flags, Mode::empty()) {
            Err(Errno::ELOOP | Errno::ENOTDIR) => return Err(in_its_place(name)),
            other => other?,
        };
        if made {
            // Whatever the umask is.
            fchmod(&at, Mode::from_bits_truncate(0o755))?;
        }
    }
    Ok(())
}

/// Makes an empty file in a directory that is there; as [`make_dir`]. What another pod has made at the same moment stays.
fn make_file(path: &str) -> io::Result<()> {
    let names = names(path);
    let Some((name, dirs)) = names.split_last() else {
        return Ok(());
    };
    let (at, there) = deepest(dirs)?;
    if there < dirs.len() {
        return Err(Errno::ENOENT.into());
    }
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
    let mode = Mode::from_bits_truncate(0o644);
    match openat(&at, *name, flags, mode) {
        Ok(file) => Ok(fchmod(&file, mode)?),
        Err(Errno::EEXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn names(path: &str) -> Vec<&OsStr> {
    let all = Path::new(path).components();
    all.filter_map(|c| match c {
        Component::Normal(name) => Some(name),
        _ => None,
    })
    .collect()
}

/// The deepest directory of a path that is there, and how many names lead to it.
fn deepest(names: &[&OsStr]) -> io::Result<(OwnedFd, usize)> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let mut at = open("/", flags, Mode::empty())?;
    for (index, name) in names.iter().enumerate() {
        at = match openat(&at, *name, flags, Mode::empty()) {
            Err(Errno::ENOENT) => return Ok((at, index)),
            other => other?,
        };
    }
    Ok((at, names.len()))
}

fn in_its_place(name: &OsStr) -> io::Error {
    let text = format!(
        "{} is a link that leads nowhere, or no directory",
        Path::new(name).display()
    );
    io::Error::new(io::ErrorKind::NotADirectory, text)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn each_type_accepts_its_kind_alone() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
        fs::create_dir(at("dir")).unwrap();
        fs::write(at("file"), "keep").unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        let fits = |path: &str, type_: &str| prepare(path, type_).is_ok();
        for (path, ok) in [
            (
                at("dir"),
                &["", "Directory", "DirectoryOrCreate"] as &[&str],
            ),
            (at("file"), &["", "File", "FileOrCreate"]),
            (at("socket"), &["", "Socket"]),
            ("/dev/null".to_owned(), &["", "CharDevice"]),
            (at("none"), &[""]),
        ] {
            for type_ in [
                "",
                "Directory",
                "File",
                "Socket",
                "CharDevice",
                "BlockDevice",
            ] {
                assert_eq!(
                    fits(&path, type_),
                    ok.contains(&type_),
                    "{path} as {type_:?}"
                );
            }
        }
        assert!(!fits(&at("file"), "DirectoryOrCreate"));
        assert!(!fits(&at("dir"), "FileOrCreate"));
        assert!(!fits(&at("dir"), "Folder"));
        assert_eq!(fs::read_to_string(at("file")).unwrap(), "keep");
    }

    #[test]
    fn what_may_be_made_is_made_with_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
        prepare(&at("a/b"), "DirectoryOrCreate").unwrap();
        prepare(&at("f"), "FileOrCreate").unwrap();
        let mode = |p: &str| fs::metadata(at(p)).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode("a/b"), mode("f")), (0o755, 0o644));
        let error = prepare(&at("no/such/dir/f"), "FileOrCreate").unwrap_err();
        assert!(error.to_string().contains("create file"), "{error}");
    }

    #[test]
    fn links_that_are_there_are_followed_and_nothing_is_made_through_one_that_leads_nowhere() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
        fs::create_dir(at("real")).unwrap();
        symlink("real", at("link")).unwrap();
        prepare(&at("link/new/dir"), "DirectoryOrCreate").unwrap();
        prepare(&at("link/file"), "FileOrCreate").unwrap();
        assert!(Path::new(&at("real/new/dir")).is_dir() && Path::new(&at("real/file")).is_file());
        prepare(&at("link"), "DirectoryOrCreate").unwrap();

        symlink(at("outside"), at("dangling")).unwrap();
        for (path, type_) in [
            ("dangling", "FileOrCreate"),
            ("dangling", "DirectoryOrCreate"),
            ("dangling/x", "FileOrCreate"),
            ("dangling/x", "DirectoryOrCreate"),
        ] {
            prepare(&at(path), type_).unwrap_err();
            assert!(!Path::new(&at("outside")).exists(), "{path} {type_}");
        }
    }

    /// A thread exchanges a directory and a link that leads nowhere, or to what is not to be touched, as fast as it can.
    #[test]
    fn what_is_made_is_never_made_through_a_link_that_takes_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::set_permissions(&outside, fs::Permissions::from_mode(0o700)).unwrap();
        let place = dir.path().join("place");
        let stop = Arc::new(AtomicBool::new(false));
        let swapper = {
            let (place, outside, stop) = (place.clone(), outside.clone(), Arc::clone(&stop));
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    // Whatever of it succeeds.
                    drop(fs::remove_dir(&place));
                    drop(fs::remove_file(&place));
                    drop(symlink(outside.join("none"), &place));
                    drop(fs::remove_file(&place));
                }
            })
        };
        let path = place.to_string_lossy().into_owned();
        let mut made = 0;
        for round in 0..4000 {
            let type_ = ["DirectoryOrCreate", "FileOrCreate"][round % 2];
            made += usize::from(prepare(&path, type_).is_ok());
        }
        stop.store(true, Ordering::Relaxed);
        swapper.join().unwrap();
        println!("{made} made");
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    }

    #[test]
    fn paths_that_climb_are_refused() {
        for path in ["relative", "/a/../b", "", "/.."] {
            assert!(prepare(path, "").is_err(), "{path}");
        }
    }
}
