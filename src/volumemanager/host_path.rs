//! What a hostPath volume asks of its path; upstream's `hostPathTypeChecker`.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Component, Path};

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
        /// What it should be.
        wanted: &'static str,
    },
    /// It could not be made or looked at.
    #[error("{verb} hostPath {path}")]
    Io {
        /// What was tried.
        verb: &'static str,
        /// The path.
        path: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Whether a path may be used at all.
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

fn make_dir(path: &str) -> io::Result<()> {
    fs::create_dir_all(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
}

fn make_file(path: &str) -> io::Result<()> {
    // Another pod may make it at the same moment; what it wrote stays.
    let file = fs::OpenOptions::new()
        .append(true)
        .create(true)
        .open(path)?;
    file.set_permissions(fs::Permissions::from_mode(0o644))
}

#[cfg(test)]
mod tests {
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
    fn paths_that_climb_are_refused() {
        for path in ["relative", "/a/../b", "", "/.."] {
            assert!(prepare(path, "").is_err(), "{path}");
        }
    }
}
