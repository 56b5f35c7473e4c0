//! The steps of one rotation on the disk. Upstream: `rotateLog`.
//!
//! In order: what a crash left is removed, then files beyond the number that is kept, then what is not compressed yet
//! is, then the log is renamed, and the runtime is asked to open a new one. After each step the names alone say how far
//! it came: a `….tmp` is unfinished, a plain file beside its `….gz` is done with, and a log that is not there was
//! renamed but not opened anew.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use tracing::warn;

use super::files::{COMPRESSED, LogPath, STAMP, TEMPORARY, open};

/// A step of a rotation failed.
#[derive(Debug, thiserror::Error)]
#[error("{verb} {}: {source}", path.display())]
pub struct RotateError {
    verb: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

fn error(verb: &'static str, path: &Path) -> impl FnOnce(io::Error) -> RotateError {
    let path = path.to_owned();
    move |source| RotateError { verb, path, source }
}

/// A log that was renamed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rotated {
    /// Path before the rotation.
    pub from: PathBuf,
    /// Path after the rotation.
    pub to: PathBuf,
}

/// Removes what a crash left of a log's rotation: unfinished copies, and files whose copy is finished. Upstream:
/// `cleanupUnusedLogs`. Blocking.
///
/// # Errors
/// When the directory cannot be listed or a file not removed.
pub fn clean_up(path: &Path) -> Result<(), RotateError> {
    let log = LogPath::new(path).map_err(error("name log", path))?;
    let list = error("list log directory", &log.dir);
    let entries = match fs::read_dir(&log.dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(list)?,
    };
    let prefix = format!("{}.", log.name);
    let names: Vec<String> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.starts_with(&prefix))
        .collect();
    for name in &names {
        let done = || names.contains(&format!("{name}{COMPRESSED}"));
        if name.ends_with(TEMPORARY) || (!name.ends_with(COMPRESSED) && done()) {
            remove(&log.dir.join(name))?;
        }
    }
    Ok(())
}

/// Everything before the request to the runtime: cleans up, leaves `max_files - 2` older files, compresses them, and
/// renames the log to `<path>.<now>`. A file that cannot be compressed stays as it is. Blocking.
///
/// # Errors
/// When a step fails; the log then has its name still.
pub fn rename_away(
    path: &Path,
    max_files: u32,
    now: jiff::Timestamp,
) -> Result<Rotated, RotateError> {
    clean_up(path)?;
    let log = LogPath::new(path).map_err(error("name log", path))?;
    let list = || log.list().map_err(error("list log directory", &log.dir));
    let older = list()?;
    // One that is written and the one that is about to be rotated count too.
    let keep = usize::try_from(max_files.saturating_sub(2)).unwrap_or(usize::MAX);
    let excess = older.len().saturating_sub(keep);
    for file in &older[..excess] {
        remove(&log.rotated(&file.stamp, file.compressed))?;
    }
    for file in older[excess..].iter().filter(|file| !file.compressed) {
        if let Err(problem) = compress(&log, &file.stamp) {
            warn!(error = %problem, "cannot compress a rotated log");
        }
    }
    let newest = older.last().map(|file| file.stamp.as_str());
    let stamp = next_stamp(newest, now).map_err(error("name rotated log of", path))?;
    let to = log.rotated(&stamp, false);
    rename(path, &to).map_err(error("rotate log", path))?;
    Ok(Rotated {
        from: path.to_owned(),
        to,
    })
}

/// Gives a log its name back after the runtime did not open a new one; whether it has it. If the runtime did after all,
/// both files stay. Blocking.
///
/// # Errors
/// When it cannot be renamed.
pub fn rename_back(rotated: &Rotated) -> Result<bool, RotateError> {
    match rename(&rotated.to, &rotated.from) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(e) => Err(error("rename back log", &rotated.to)(e)),
    }
}

/// The time, but later than the newest file's: files are read in the order of their names, also after the clock was
/// set back.
fn next_stamp(newest: Option<&str>, now: jiff::Timestamp) -> io::Result<String> {
    let stamp = now.strftime(STAMP).to_string();
    match newest {
        Some(newest) if newest >= stamp.as_str() => {
            let at = jiff::civil::DateTime::strptime(STAMP, newest).map_err(io::Error::other)?;
            let later = at
                .checked_add(jiff::Span::new().seconds(1))
                .map_err(io::Error::other)?;
            Ok(later.strftime(STAMP).to_string())
        }
        _ => Ok(stamp),
    }
}

/// Writes a compressed copy and removes the file. Upstream: `compressLog`.
fn compress(log: &LogPath, stamp: &str) -> Result<(), RotateError> {
    let plain = log.rotated(stamp, false);
    let Some(file) = open(&plain).map_err(error("open log", &plain))? else {
        return Ok(());
    };
    let temporary = log.dir.join(format!("{}.{stamp}{TEMPORARY}", log.name));
    let copied = copy(&file, &temporary).map_err(error("write", &temporary));
    let packed = log.rotated(stamp, true);
    let renamed = copied.and_then(|()| {
        fs::rename(&temporary, &packed).map_err(error("rename compressed log", &temporary))
    });
    if renamed.is_err() {
        // A full disk is not to be filled further; a failure here is found again by the next rotation.
        fs::remove_file(&temporary).ok();
        return renamed;
    }
    remove(&plain)
}

fn copy(from: &File, to: &Path) -> io::Result<()> {
    let target = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(from.metadata()?.mode() & 0o777)
        .open(to)?;
    let mut encoder = GzEncoder::new(target, Compression::default());
    let mut reader = BufReader::with_capacity(64 * 1024, from);
    io::copy(&mut reader, &mut encoder)?;
    // On the disk before the original goes.
    encoder.finish()?.sync_all()
}

fn remove(path: &Path) -> Result<(), RotateError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(error("remove log", path)),
    }
}

/// Renames without ever replacing a file.
fn rename(from: &Path, to: &Path) -> io::Result<()> {
    use nix::errno::Errno;
    match renameat2(AT_FDCWD, from, AT_FDCWD, to, RenameFlags::RENAME_NOREPLACE) {
        // The file system does not know the flag.
        Err(Errno::EINVAL | Errno::ENOSYS) => {
            if fs::symlink_metadata(to).is_ok() {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            fs::rename(from, to)
        }
        other => Ok(other?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;

    fn at(text: &str) -> jiff::Timestamp {
        text.parse().unwrap()
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let mut names: Vec<_> = entries
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn the_log_and_so_many_older_files_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        fs::write(dir.path().join("10.log"), "other").unwrap();
        for day in 1..=6 {
            fs::write(&path, format!("day {day}")).unwrap();
            let now = at(&format!("2026-01-0{day}T03:04:05Z"));
            let rotated = rename_away(&path, 4, now).unwrap();
            assert!(!path.exists());
            assert_eq!(
                fs::read(rotated.to).unwrap(),
                format!("day {day}").as_bytes()
            );
        }
        let kept = [
            "0.log.20260104-030405.gz",
            "0.log.20260105-030405.gz",
            "0.log.20260106-030405",
            "10.log",
        ];
        assert_eq!(names(dir.path()), kept);
        let mut text = String::new();
        let packed = File::open(dir.path().join(kept[0])).unwrap();
        flate2::read::GzDecoder::new(packed)
            .read_to_string(&mut text)
            .unwrap();
        assert_eq!(text, "day 4");
    }

    #[test]
    fn two_files_means_one_older_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        for day in 1..=3 {
            fs::write(&path, "x").unwrap();
            rename_away(&path, 2, at(&format!("2026-01-0{day}T00:00:00Z"))).unwrap();
        }
        assert_eq!(names(dir.path()), ["0.log.20260103-000000"]);
    }

    #[test]
    fn the_order_of_names_outlives_a_clock_that_is_set_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        for hour in [5, 5, 4] {
            fs::write(&path, "x").unwrap();
            rename_away(&path, 9, at(&format!("2026-01-01T0{hour}:59:59Z"))).unwrap();
        }
        assert_eq!(
            names(dir.path()),
            [
                "0.log.20260101-055959.gz",
                "0.log.20260101-060000.gz",
                "0.log.20260101-060001"
            ]
        );
    }

    #[test]
    fn a_name_that_is_no_time_does_not_keep_a_log_from_its_rotation() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        let other = "0.log.99999999-999999";
        for name in ["0.log", other] {
            fs::write(dir.path().join(name), name).unwrap();
        }
        rename_away(&path, 3, at("2026-01-01T00:00:00Z")).unwrap();
        assert_eq!(names(dir.path()), ["0.log.20260101-000000", other]);
    }

    #[test]
    fn what_a_crash_left_is_removed_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        for name in [
            "0.log",
            "0.log.20260101-000000",
            "0.log.20260101-000000.gz",
            "0.log.20260102-000000",
            "0.log.20260102-000000.tmp",
            "10.log.20260102-000000.tmp",
        ] {
            fs::write(dir.path().join(name), name).unwrap();
        }
        clean_up(&path).unwrap();
        assert_eq!(
            names(dir.path()),
            [
                "0.log",
                "0.log.20260101-000000.gz",
                "0.log.20260102-000000",
                "10.log.20260102-000000.tmp"
            ]
        );
    }

    #[test]
    fn a_log_gets_its_name_back_unless_there_is_a_new_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        fs::write(&path, "old").unwrap();
        let rotated = rename_away(&path, 5, at("2026-01-01T00:00:00Z")).unwrap();
        assert!(rename_back(&rotated).unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        let rotated = rename_away(&path, 5, at("2026-01-01T00:00:01Z")).unwrap();
        fs::write(&path, "new").unwrap();
        assert!(!rename_back(&rotated).unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::read(&rotated.to).unwrap(), b"old");
    }
}
