//! The files of one log: their names, their order, and how they are opened.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use jiff::civil::DateTime;
use nix::fcntl::OFlag;

/// Suffix of a compressed file.
pub(super) const COMPRESSED: &str = ".gz";
/// Suffix of a compressed file that is being written.
pub(super) const TEMPORARY: &str = ".tmp";

/// Format of times in the names of rotated files.
pub(super) const STAMP: &str = "%Y%m%d-%H%M%S";

/// Directory and file name of a log.
#[derive(Clone, Debug)]
pub(super) struct LogPath {
    pub(super) dir: PathBuf,
    pub(super) name: String,
}

/// A rotated file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RotatedFile {
    /// `YYYYMMDD-hhmmss`; later ones are greater.
    pub(super) stamp: String,
    pub(super) compressed: bool,
}

impl LogPath {
    /// # Errors
    /// When the path names no file.
    pub(super) fn new(path: &Path) -> io::Result<Self> {
        let name = path.file_name().and_then(|name| name.to_str());
        match (path.parent(), name) {
            (Some(dir), Some(name)) => Ok(Self {
                dir: dir.to_owned(),
                name: name.to_owned(),
            }),
            _ => Err(io::Error::from(io::ErrorKind::InvalidFilename)),
        }
    }

    /// The file the runtime writes.
    pub(super) fn base(&self) -> PathBuf {
        self.dir.join(&self.name)
    }

    /// A rotated file.
    pub(super) fn rotated(&self, stamp: &str, compressed: bool) -> PathBuf {
        let suffix = if compressed { COMPRESSED } else { "" };
        self.dir.join(format!("{}.{stamp}{suffix}", self.name))
    }

    /// Rotated files, oldest first. Of one that is there twice the plain one: the other may be unfinished.
    ///
    /// # Errors
    /// When the directory cannot be listed; one that is not there has no files.
    pub(super) fn list(&self) -> io::Result<Vec<RotatedFile>> {
        let entries = match fs::read_dir(&self.dir) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        let mut files = Vec::new();
        for entry in entries {
            let name = entry?.file_name();
            files.extend(name.to_str().and_then(|name| self.parse(name)));
        }
        files.sort_by(|a, b| (&a.stamp, a.compressed).cmp(&(&b.stamp, b.compressed)));
        files.dedup_by(|later, first| later.stamp == first.stamp);
        Ok(files)
    }

    fn parse(&self, file: &str) -> Option<RotatedFile> {
        let rest = file.strip_prefix(&self.name)?.strip_prefix('.')?;
        let (stamp, compressed) = match rest.strip_suffix(COMPRESSED) {
            Some(stamp) => (stamp, true),
            None => (rest, false),
        };
        is_stamp(stamp).then(|| RotatedFile {
            stamp: stamp.to_owned(),
            compressed,
        })
    }

    /// Opens a rotated file by either name; `None` when it is gone.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub(super) fn open_rotated(&self, stamp: &str) -> io::Result<Option<(File, bool)>> {
        // Compressing makes the other name before it removes the first; a second look finds what the first missed.
        for compressed in [false, true, false] {
            if let Some(file) = open(&self.rotated(stamp, compressed))? {
                return Ok(Some((file, compressed)));
            }
        }
        Ok(None)
    }

    /// The device and inode behind the name the runtime writes to.
    ///
    /// # Errors
    /// When it cannot be read; `None` when there is none.
    pub(super) fn base_identity(&self) -> io::Result<Option<(u64, u64)>> {
        match fs::symlink_metadata(self.base()) {
            Ok(metadata) => Ok(Some(identity(&metadata))),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }
}

pub(super) fn identity(metadata: &fs::Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// Returns whether this has the form `YYYYMMDD-hhmmss` and is a valid time.
pub(super) fn is_stamp(text: &str) -> bool {
    let shape = text.len() == 15
        && text.bytes().enumerate().all(|(i, b)| match i {
            8 => b == b'-',
            _ => b.is_ascii_digit(),
        });
    shape && DateTime::strptime(STAMP, text).is_ok()
}

/// Opens a regular file for reading, without following a link in its last part and without waiting for a writer of a pipe;
/// `None` when there is none.
///
/// # Errors
/// When it cannot be opened or is something else.
pub(super) fn open(path: &Path) -> io::Result<Option<File>> {
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits())
        .open(path);
    let file = match file {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    if !file.metadata()?.is_file() {
        let text = format!("{} is not a regular file", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(Some(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotated_files_are_found_oldest_first_and_once() {
        let dir = tempfile::tempdir().unwrap();
        for name in [
            "0.log",
            "0.log.20260103-000000",
            "0.log.20260102-000000.gz",
            "0.log.20260102-000000",
            "0.log.20260101-000000.gz",
            "0.log.20260101-000000.gz.tmp",
            "0.log.20260104-000000.tmp",
            "0.log.old",
            "10.log.20260101-000000",
        ] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        let log = LogPath::new(&dir.path().join("0.log")).unwrap();
        let found: Vec<_> = log
            .list()
            .unwrap()
            .into_iter()
            .map(|f| (f.stamp, f.compressed))
            .collect();
        let want = [
            ("20260101-000000", true),
            ("20260102-000000", false),
            ("20260103-000000", false),
        ];
        assert_eq!(found, want.map(|(s, c)| (s.to_owned(), c)));
    }

    #[test]
    fn the_directories_of_logs_may_be_links() {
        let dir = tempfile::tempdir().unwrap();
        let elsewhere = dir.path().join("data/pods/web");
        fs::create_dir_all(&elsewhere).unwrap();
        std::os::unix::fs::symlink(dir.path().join("data/pods"), dir.path().join("pods")).unwrap();
        for name in ["0.log", "0.log.20260102-000000"] {
            fs::write(elsewhere.join(name), "").unwrap();
        }
        let base = dir.path().join("pods/web/0.log");
        assert!(open(&base).unwrap().is_some());
        let log = LogPath::new(&base).unwrap();
        assert_eq!(log.list().unwrap().len(), 1);
    }

    #[test]
    fn only_regular_files_are_opened() {
        let dir = tempfile::tempdir().unwrap();
        let secret = dir.path().join("secret");
        fs::write(&secret, "x").unwrap();
        let link = dir.path().join("0.log");
        std::os::unix::fs::symlink(&secret, &link).unwrap();
        assert!(open(&link).is_err());
        let pipe = dir.path().join("1.log");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(open(&pipe).is_err());
        assert!(open(dir.path()).is_err());
        assert!(open(&dir.path().join("2.log")).unwrap().is_none());
        assert!(open(&secret).unwrap().is_some());
    }
}
