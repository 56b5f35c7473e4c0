//! The locks that keep two agents out of one state directory and away from one container runtime.
//!
//! `<state-dir>/LOCK` is held by `flock` for as long as [`StateLock`] lives, and
//! `/run/holdfast/runtime-<hash of the socket's path>.lock` for as long as [`RuntimeLock`] does; the kernel
//! lets go of them when the process ends, however it ends, so a lock is never stale. A file's text only tells
//! who holds it: `pid start-time`, where the start time is field 22 of `/proc/<pid>/stat`, so that a reused
//! pid is not blamed.
//!
//! Invariant: whoever has a [`StateLock`] is the only writer below its directory.
//!
//! Invariant: whoever has a [`RuntimeLock`] is the only agent that starts and stops pods on that socket. Each
//! agent stops what runs and is wanted by none of its own sources, so two would stop each other's pods.

use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tracing::warn;

use crate::core::volumes::keys::hex;

/// Name of the lock file below the state directory.
pub const LOCK_FILE: &str = "LOCK";
/// Directory of the locks of container runtimes. It is empty after a boot, as is the list of who runs.
pub const RUN_DIR: &str = "/run/holdfast";

/// Reason why this process does not own the state directory or the container runtime.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process holds the lock.
    #[error("{holder} uses {}; stop it or choose another --state-dir", state_dir.display())]
    Held {
        /// The directory.
        state_dir: PathBuf,
        /// Process that holds it.
        holder: Holder,
    },
    /// Another process holds the lock of the container runtime.
    #[error(
        "{holder} looks after the pods of the container runtime at {}, and two agents would stop each other's pods; \
         stop it or choose another --container-runtime-endpoint",
        socket.display()
    )]
    RuntimeHeld {
        /// The runtime's socket.
        socket: PathBuf,
        /// Process that holds it.
        holder: Holder,
    },
    /// The path exists and is not a directory.
    #[error("use {} as state directory: it is not a directory; choose another --state-dir", .0.display())]
    NotADirectory(PathBuf),
    /// The directory cannot be made, checked or secured.
    #[error("{action} state directory {}; check its owner and permissions or choose another --state-dir", state_dir.display())]
    Directory {
        /// Verb of the failed operation.
        action: &'static str,
        /// The directory.
        state_dir: PathBuf,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// The lock file cannot be opened, locked or written.
    #[error("{action} {}", path.display())]
    File {
        /// Verb of the failed operation.
        action: &'static str,
        /// The lock file.
        path: PathBuf,
        /// Cause.
        #[source]
        source: io::Error,
    },
}

/// Holder of a lock, as far as it can be identified.
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
        match lock_file(&state_dir.join(LOCK_FILE))? {
            Ok(file) => Ok(Self {
                state_dir: state_dir.to_owned(),
                _file: file,
            }),
            Err(holder) => Err(LockError::Held {
                state_dir: state_dir.to_owned(),
                holder,
            }),
        }
    }

    /// The directory that is locked.
    pub fn state_dir(&self) -> &Path {
        &self.state_dir
    }
}

/// The held lock of a container runtime. Dropping it, or the end of the process, lets it go.
#[derive(Debug)]
pub struct RuntimeLock {
    // Closing the file releases the lock.
    _file: Option<File>,
}

impl RuntimeLock {
    /// Locks the runtime behind `socket`, whether it is there yet or not, by a file in `run_dir` ([`RUN_DIR`]),
    /// which is made if it is absent (0700). Links that lead to one socket are one lock. Does not wait. Blocking
    /// I/O; call it before the runtime is busy.
    ///
    /// An agent that may not write there, one without root's rights, goes on without the lock and logs a warning.
    ///
    /// # Errors
    /// [`LockError::RuntimeHeld`] names the process that holds the lock.
    pub fn acquire(socket: &Path, run_dir: &Path) -> Result<Self, LockError> {
        let name = hex(&Sha256::digest(
            without_links(socket).as_os_str().as_bytes(),
        ));
        let path = run_dir.join(format!("runtime-{name}.lock"));
        let locked = DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(run_dir)
            .map_err(|source| LockError::File {
                action: "make the directory of the lock file",
                path: path.clone(),
                source,
            })
            .and_then(|()| lock_file(&path));
        match locked {
            Ok(Ok(file)) => Ok(Self { _file: Some(file) }),
            Ok(Err(holder)) => Err(LockError::RuntimeHeld {
                socket: socket.to_owned(),
                holder,
            }),
            Err(LockError::File { source, .. })
                if source.kind() == io::ErrorKind::PermissionDenied =>
            {
                warn!(
                    path = %path.display(),
                    error = %source,
                    "cannot lock the container runtime, another agent may use it at the same time"
                );
                Ok(Self { _file: None })
            }
            Err(error) => Err(error),
        }
    }
}

/// The path without links, as far as it exists.
fn without_links(path: &Path) -> PathBuf {
    let resolved = path.ancestors().find_map(|known| {
        let rest = path.strip_prefix(known).ok()?;
        // Joining nothing would add a slash.
        let real = known.canonicalize().ok()?;
        Some(real.components().chain(rest.components()).collect())
    });
    resolved.unwrap_or_else(|| path.to_owned())
}

/// Opens a lock file and locks it. The inner error says who holds it.
fn lock_file(path: &Path) -> Result<Result<File, Holder>, LockError> {
    let failed = |action| {
        move |source| LockError::File {
            action,
            path: path.to_owned(),
            source,
        }
    };
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(failed("open lock file"))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(Err(read_holder(&mut file))),
        Err(TryLockError::Error(source)) => return Err(failed("lock")(source)),
    }
    write_holder(&mut file).map_err(failed("write lock file"))?;
    Ok(Ok(file))
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

/// Returns the start time of the process, in clock ticks since boot.
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

    #[test]
    fn runtime_is_refused_to_a_second_agent_by_whatever_path_it_comes() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        let run_dir = at("run");
        fs::create_dir(at("containerd")).unwrap();
        fs::write(at("containerd/cri.sock"), "").unwrap();
        std::os::unix::fs::symlink("containerd", at("by-directory")).unwrap();
        std::os::unix::fs::symlink("containerd/cri.sock", at("by-file.sock")).unwrap();
        let acquire = |socket: &str| RuntimeLock::acquire(&at(socket), &run_dir);

        let lock = acquire("containerd/cri.sock").unwrap();
        for path in [
            "containerd/cri.sock",
            "by-directory/cri.sock",
            "by-file.sock",
        ] {
            let error = acquire(path).unwrap_err();
            assert!(matches!(error, LockError::RuntimeHeld { .. }), "{error}");
            let text = error.to_string();
            let pid = format!("another holdfast (pid {}: ", std::process::id());
            assert!(text.starts_with(&pid), "{text}");
            assert!(text.contains(&at(path).display().to_string()), "{text}");
            assert!(text.contains("--container-runtime-endpoint"), "{text}");
        }
        let other = acquire("other/cri.sock").unwrap();
        assert!(
            acquire("other/cri.sock").is_err(),
            "its socket is not there"
        );

        drop((lock, other));
        acquire("by-file.sock").unwrap();
        acquire("other/cri.sock").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode(&run_dir), 0o700);
        for file in fs::read_dir(&run_dir).unwrap() {
            assert_eq!(mode(&file.unwrap().path()), 0o600);
        }
    }

    // Invariant STORE-7.
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
