//! The lock that keeps two agents out of one state directory.
//!
//! `<state-dir>/LOCK` is held by `flock` for as long as [`StateLock`] lives; the kernel lets go of it when
//! the process ends, however it ends, so a lock is never stale. The file's text only tells who holds it:
//! `pid start-time`, where the start time is field 22 of `/proc/<pid>/stat`, so that a reused pid is not
//! blamed.
//!
//! Invariant: whoever has a [`StateLock`] is the only writer below its directory.

use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tracing::warn;

/// Name of the lock file below the state directory.
pub const LOCK_FILE: &str = "LOCK";

/// Why the state directory is not ours.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process holds the lock.
    #[error("{holder} uses {}; stop it or choose another --state-dir", state_dir.display())]
    Held {
        /// The directory.
        state_dir: PathBuf,
        /// Who holds it.
        holder: Holder,
    },
    /// The path exists and is not a directory.
    #[error("use {} as state directory: it is not a directory; choose another --state-dir", .0.display())]
    NotADirectory(PathBuf),
    /// The directory cannot be made, checked or secured.
    #[error("{action} state directory {}; check its owner and permissions or choose another --state-dir", state_dir.display())]
    Directory {
        /// What was tried.
        action: &'static str,
        /// The directory.
        state_dir: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// The lock file cannot be opened, locked or written.
    #[error("{action} {}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// The lock file.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
}

/// Who holds a lock, as far as can be found out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its process ID; `None` when the lock file does not name a living process.
    pub pid: Option<i32>,
    /// Its command line.
    pub command: Option<String>,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.pid, &self.command) {
            (Some(pid), Some(command)) => write!(f, "another holdfast (pid {pid}: {command})"),
            (Some(pid), None) => write!(f, "another holdfast (pid {pid})"),
            (None, _) => f.write_str("another process"),
        }
    }
}

/// The held lock. Dropping it, or the end of the process, lets it go.
#[derive(Debug)]
pub struct StateLock {
    state_dir: PathBuf,
    // Closing the file releases the lock.
    _file: File,
}

impl StateLock {
    /// Makes `state_dir` if it is absent (0700), takes away what its group and others may do there, and
    /// locks it. Does not wait. Blocking I/O; call it before the runtime is busy.
    ///
    /// # Errors
    /// [`LockError::Held`] names the process that holds the lock.
    pub fn acquire(state_dir: &Path) -> Result<Self, LockError> {
        prepare(state_dir)?;
        let path = state_dir.join(LOCK_FILE);
        let failed = |action| {
            let path = path.clone();
            move |source| LockError::File {
                action,
                path,
                source,
            }
        };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(failed("open lock file"))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(LockError::Held {
                    state_dir: state_dir.to_owned(),
                    holder: read_holder(&mut file),
                });
            }
            Err(TryLockError::Error(source)) => return Err(failed("lock")(source)),
        }
        write_holder(&mut file).map_err(failed("write lock file"))?;
        Ok(Self {
            state_dir: state_dir.to_owned(),
            _file: file,
        })
    }

    /// The directory that is locked.
    pub fn state_dir(&self) -> &Path {
        &self.state_dir
    }
}

/// Makes the directory, or takes its group's and others' permissions away with a warning.
fn prepare(state_dir: &Path) -> Result<(), LockError> {
    let failed = |action| {
        move |source| LockError::Directory {
            action,
            state_dir: state_dir.to_owned(),
            source,
        }
    };
    let metadata = match fs::metadata(state_dir) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if let Some(parent) = state_dir.parent() {
                fs::create_dir_all(parent).map_err(failed("create parents of"))?;
            }
            return match DirBuilder::new().mode(0o700).create(state_dir) {
                // Another agent was faster: the lock decides who stays.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
                other => other.map_err(failed("create")),
            };
        }
        Err(error) => return Err(failed("look at")(error)),
    };
    if !metadata.is_dir() {
        return Err(LockError::NotADirectory(state_dir.to_owned()));
    }
    let mode = metadata.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        fs::set_permissions(state_dir, Permissions::from_mode(0o700))
            .map_err(failed("restrict the permissions of"))?;
        warn!(
            state_dir = %state_dir.display(),
            was = format!("{mode:04o}"),
            now = "0700",
            "state directory was accessible to others, restricted it"
        );
    }
    Ok(())
}

fn write_holder(file: &mut File) -> io::Result<()> {
    let pid = std::process::id();
    let start = i32::try_from(pid).ok().and_then(start_time).unwrap_or(0);
    file.set_len(0)?;
    file.rewind()?;
    // One write, so that a reader sees all of it or nothing.
    file.write_all(format!("{pid} {start}\n").as_bytes())
}

fn read_holder(file: &mut File) -> Holder {
    let mut text = String::new();
    let holder = match file.take(64).read_to_string(&mut text) {
        Ok(_) => parse_holder(&text),
        Err(_) => None,
    };
    let pid = holder.filter(|(pid, start)| start_time(*pid) == Some(*start));
    let pid = pid.map(|(pid, _)| pid);
    Holder {
        pid,
        command: pid.and_then(command),
    }
}

fn parse_holder(text: &str) -> Option<(i32, u64)> {
    let (pid, start) = text.trim().split_once(' ')?;
    Some((pid.parse().ok()?, start.parse().ok()?))
}

/// When the process started, in clock ticks since boot.
fn start_time(pid: i32) -> Option<u64> {
    let process = procfs::process::Process::new(pid).ok()?;
    process.stat().ok().map(|stat| stat.starttime)
}

/// The command line of a process, shortened to one readable line.
fn command(pid: i32) -> Option<String> {
    let words = procfs::process::Process::new(pid).ok()?.cmdline().ok()?;
    let line: String = words
        .join(" ")
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(120)
        .collect();
    (!line.is_empty()).then_some(line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::BufRead;
    use std::process::{Command, Stdio};

    const CHILD_DIR: &str = "HOLDFAST_TEST_LOCK_DIR";

    #[test]
    fn second_open_in_the_same_process_is_refused_with_its_pid() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("state");
        let lock = StateLock::acquire(&dir).unwrap();
        let error = StateLock::acquire(&dir).unwrap_err();
        let LockError::Held { holder, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!(holder.pid, i32::try_from(std::process::id()).ok());
        let text = error.to_string();
        assert!(
            text.ends_with(&format!(
                " uses {}; stop it or choose another --state-dir",
                dir.display()
            )),
            "{text}"
        );
        drop(lock);
        StateLock::acquire(&dir).unwrap();
    }

    /// Runs itself a second time as the process that holds the lock.
    #[test]
    fn lock_of_another_process_names_its_pid_and_ends_with_its_death() {
        if let Some(dir) = std::env::var_os(CHILD_DIR) {
            let _lock = StateLock::acquire(Path::new(&dir)).unwrap();
            println!("\nlocked");
            io::stdout().flush().unwrap();
            // Held until the parent kills us or closes the pipe.
            io::stdin().read_line(&mut String::new()).unwrap();
            return;
        }
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("state");
        let name =
            "agent::lock::tests::lock_of_another_process_names_its_pid_and_ends_with_its_death";
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(CHILD_DIR, &dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = io::BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line == "locked"));

        let text = StateLock::acquire(&dir).unwrap_err().to_string();
        assert!(
            text.starts_with(&format!("another holdfast (pid {}: ", child.id())),
            "{text}"
        );
        assert!(text.contains("--exact"), "command line is shown: {text}");

        child.kill().unwrap();
        child.wait().unwrap();
        StateLock::acquire(&dir).unwrap();
    }

    #[test]
    fn holder_that_no_longer_lives_is_not_blamed() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("state");
        let _lock = StateLock::acquire(&dir).unwrap();
        // Our pid with another start time: a reused pid.
        fs::write(dir.join(LOCK_FILE), format!("{} 1\n", std::process::id())).unwrap();
        let text = StateLock::acquire(&dir).unwrap_err().to_string();
        assert!(text.starts_with("another process uses "), "{text}");
        fs::write(dir.join(LOCK_FILE), "garbage").unwrap();
        let text = StateLock::acquire(&dir).unwrap_err().to_string();
        assert!(text.starts_with("another process uses "), "{text}");
    }

    #[test]
    fn state_directory_is_made_private_and_is_made_private_again() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("a/b/state");
        let mode = || fs::metadata(&dir).unwrap().permissions().mode() & 0o7777;
        drop(StateLock::acquire(&dir).unwrap());
        assert_eq!(mode(), 0o700);
        fs::set_permissions(&dir, Permissions::from_mode(0o755)).unwrap();
        drop(StateLock::acquire(&dir).unwrap());
        assert_eq!(mode(), 0o700);
        let lock = fs::metadata(dir.join(LOCK_FILE)).unwrap();
        assert_eq!(lock.permissions().mode() & 0o7777, 0o600);
    }

    #[test]
    fn file_in_place_of_the_state_directory_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("state");
        fs::write(&path, "").unwrap();
        let text = StateLock::acquire(&path).unwrap_err().to_string();
        assert!(text.contains("is not a directory"), "{text}");
    }
}
