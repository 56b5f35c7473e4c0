//! Runs the system's own tools: `mount`, `umount`, `iscsiadm`, `blkid`, `fsck`, `mkfs.*`, `losetup`, `systemctl`.
//!
//! No shell, no search through `$PATH`, an environment of two variables, no input. A tool that does not end in
//! time is killed with all it has started; one that cannot be killed (it waits for a dead server in the kernel)
//! is left to itself, and whoever waits for it goes on. The same is not begun again beside it: a dead server
//! gathers no processes.
//!
//! **Invariant:** what users write is never an option: it is refused where it begins with `-`, or holds what no
//! argument may hold. Secrets are in no error.

use std::collections::{HashMap, VecDeque};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Directories that are searched for tools, in this order.
const DIRS: [&str; 4] = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"];
/// Deadline of a tool, unless the call sets another one.
const PATIENCE: Duration = Duration::from_secs(120);
/// Time that a killed tool has to exit.
const DYING: Duration = Duration::from_secs(1);
/// Time for which output is read after the tool has ended, while a daemon that it started holds the pipe open.
const AFTERWARDS: Duration = Duration::from_millis(200);
/// Bytes kept of each of a tool's outputs: the last ones.
const OUTPUT: usize = 64 << 10;
/// Bytes shown of them in errors.
const SHOWN: usize = 1024;

/// Reason why a tool failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// It is not there.
    #[error(
        "{tool} is not installed (looked in {dirs}); install it, on Debian by the package {package}"
    )]
    Missing {
        /// The tool.
        tool: String,
        /// Directories that were searched.
        dirs: String,
        /// Package that contains it.
        package: &'static str,
    },
    /// An argument that must not reach it.
    #[error("{tool} cannot be given {value:?} as {what}: {why}")]
    Argument {
        /// The tool.
        tool: String,
        /// Meaning of the argument.
        what: &'static str,
        /// As written.
        value: String,
        /// Reason for the refusal.
        why: &'static str,
    },
    /// It could not be started.
    #[error("start {tool}: {why}")]
    Start {
        /// The tool.
        tool: String,
        /// Why.
        why: String,
    },
    /// It failed.
    #[error("{command} failed ({status}): {output}")]
    Failed {
        /// Command line.
        command: String,
        /// `exit status 32` or the signal that ended it.
        status: String,
        /// Its exit code.
        code: Option<i32>,
        /// End of its output.
        output: String,
    },
    /// It was not started, as it would only wait beside one that did not end in time before.
    #[error(
        "{command}: the same was begun before and still has not ended; no other is added to it"
    )]
    StillRuns {
        /// Command line.
        command: String,
    },
    /// It did not end in time.
    #[error("{command} did not end within {} s: {fate}", after.as_secs())]
    Late {
        /// Command line.
        command: String,
        /// Its deadline.
        after: Duration,
        /// State of the tool afterwards.
        fate: &'static str,
    },
}

impl CommandError {
    /// Nothing was started.
    pub fn took_no_effect(&self) -> bool {
        matches!(
            self,
            Self::Missing { .. } | Self::Argument { .. } | Self::Start { .. }
        )
    }
}

/// Result of a tool that has ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Output {
    /// Exit code; `None` when a signal ended it.
    pub code: Option<i32>,
    /// The end of its output.
    pub stdout: String,
    /// The end of its complaints.
    pub stderr: String,
    status: String,
}

/// The tools of this machine. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Tools {
    dirs: Arc<[PathBuf]>,
    patience: Duration,
    /// Those left to themselves, by what was run.
    left: Arc<Mutex<HashMap<String, Child>>>,
}

impl Default for Tools {
    fn default() -> Self {
        let dirs = DIRS.map(PathBuf::from);
        // For tests: a directory with stand-ins for tools that the machine does not have.
        #[cfg(feature = "failpoints")]
        if let Some(first) = std::env::var_os("HOLDFAST_TOOLS") {
            return Self::in_dirs(std::iter::once(PathBuf::from(first)).chain(dirs));
        }
        Self::in_dirs(dirs)
    }
}

impl Tools {
    /// Tools of these directories alone, absolute paths, the first that has one wins.
    pub fn in_dirs(dirs: impl IntoIterator<Item = PathBuf>) -> Self {
        Self {
            dirs: dirs.into_iter().collect(),
            patience: PATIENCE,
            left: Arc::default(),
        }
    }

    /// Gives a tool so long before it is killed, unless the call says otherwise.
    #[must_use]
    pub fn patient(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// The path of a tool; `None` when there is none that can be run.
    pub fn find(&self, tool: &str) -> Option<PathBuf> {
        use std::os::unix::fs::PermissionsExt;
        if tool.is_empty() || tool.contains(['/', '\0']) {
            return None;
        }
        let paths = self.dirs.iter().map(|dir| dir.join(tool));
        let runs = |path: &PathBuf| {
            std::fs::metadata(path)
                .is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
        };
        paths.into_iter().find(runs)
    }

    /// The error for a tool that is not there.
    ///
    /// # Errors
    /// When it is not.
    pub fn require(&self, tool: &str) -> Result<PathBuf, CommandError> {
        self.find(tool).ok_or_else(|| {
            let dirs: Vec<_> = self.dirs.iter().map(|d| d.display().to_string()).collect();
            CommandError::Missing {
                tool: tool.to_owned(),
                dirs: dirs.join(", "),
                package: package_of(tool),
            }
        })
    }

    /// Runs a tool to its end, whatever it ends with. When the future is dropped the tool is killed, unless the
    /// call is [`Call::never_killed`].
    ///
    /// # Errors
    /// When it cannot be started or does not end.
    pub async fn run(&self, call: Call) -> Result<Output, CommandError> {
        let path = self.require(&call.tool)?;
        let shown = call.to_string();
        let args = call.args?;
        if self.still_runs(&shown) {
            return Err(CommandError::StillRuns { command: shown });
        }
        let mut child = Command::new(path)
            .args(args.iter().map(|a| &a.value))
            .env_clear()
            .env("PATH", DIRS.join(":"))
            .env("LANG", "C")
            .env("LC_ALL", "C")
            .current_dir("/")
            .stdin(Stdio::null())
            // Nobody may be there any more to read from one that is spared.
            .stdout(if call.never_killed {
                Stdio::null()
            } else {
                Stdio::piped()
            })
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(|error| CommandError::Start {
                tool: call.tool.clone(),
                why: error.to_string(),
            })?;
        let mut group = Group::of(&child, call.never_killed);
        let stdout = Tail::read(child.stdout.take());
        let stderr = Tail::read(child.stderr.take());
        let patience = call.patience.unwrap_or(self.patience);
        let ended = match timeout(patience, child.wait()).await {
            Ok(ended) => ended.map_err(|error| CommandError::Start {
                tool: call.tool.clone(),
                why: format!("wait for it: {error}"),
            })?,
            Err(_) => {
                let fate = group.end(&mut child).await;
                if group.leader.is_some() {
                    self.left().insert(shown.clone(), child);
                }
                return Err(CommandError::Late {
                    command: shown,
                    after: patience,
                    fate,
                });
            }
        };
        group.disarm();
        let secrets: Vec<&str> = args.iter().filter_map(Arg::secret).collect();
        let (stdout, stderr) = tokio::join!(stdout.finish(&secrets), stderr.finish(&secrets));
        Ok(Output {
            code: ended.code(),
            status: ended.to_string(),
            stdout,
            stderr,
        })
    }

    fn left(&self) -> MutexGuard<'_, HashMap<String, Child>> {
        // Entries are put and removed whole.
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the same command, which was left running before, has not ended yet. Reaps those that have.
    fn still_runs(&self, command: &str) -> bool {
        let mut left = self.left();
        left.retain(|_, child| matches!(child.try_wait(), Ok(None)));
        left.contains_key(command)
    }

    /// As [`Tools::run`]; ending with anything but 0 is an error that tells what the tool said.
    ///
    /// # Errors
    /// When it cannot be started, does not end, or fails.
    pub async fn succeed(&self, call: Call) -> Result<Output, CommandError> {
        let shown = call.to_string();
        let output = self.run(call).await?;
        match output.code {
            Some(0) => Ok(output),
            _ => Err(output.failed(shown)),
        }
    }
}

impl Output {
    /// The error of a call that ended like this.
    pub fn failed(self, command: String) -> CommandError {
        let said = [self.stderr.trim(), self.stdout.trim()]
            .into_iter()
            .find(|s| !s.is_empty())
            .unwrap_or("it said nothing");
        let mut begin = said.len().saturating_sub(SHOWN);
        while !said.is_char_boundary(begin) {
            begin += 1;
        }
        CommandError::Failed {
            command,
            status: self.status,
            code: self.code,
            output: said[begin..].replace('\n', "; "),
        }
    }
}

/// The Debian package of a tool.
fn package_of(tool: &str) -> &'static str {
    match tool {
        "mount" | "umount" | "losetup" => "mount",
        "mount.nfs" | "mount.nfs4" => "nfs-common",
        "iscsiadm" => "open-iscsi",
        "multipath" => "multipath-tools",
        "mkfs.ext2" | "mkfs.ext3" | "mkfs.ext4" | "resize2fs" => "e2fsprogs",
        "mkfs.xfs" | "xfs_growfs" => "xfsprogs",
        "mkfs.btrfs" | "btrfs" => "btrfs-progs",
        "systemctl" => "systemd",
        _ => "util-linux",
    }
}

/// A tool with its arguments.
#[derive(Debug)]
pub struct Call {
    tool: String,
    args: Result<Vec<Arg>, CommandError>,
    patience: Option<Duration>,
    never_killed: bool,
}

#[derive(Debug)]
struct Arg {
    value: OsString,
    secret: bool,
}

impl Arg {
    fn secret(&self) -> Option<&str> {
        self.value.to_str().filter(|s| self.secret && !s.is_empty())
    }
}

impl Call {
    /// A call without arguments. The name is no path.
    pub fn new(tool: impl Into<String>) -> Self {
        Self {
            tool: tool.into(),
            args: Ok(Vec::new()),
            patience: None,
            never_killed: false,
        }
    }

    /// Arguments as the program knows them, options among them.
    #[must_use]
    pub fn flags<const N: usize>(mut self, flags: [&'static str; N]) -> Self {
        for flag in flags {
            self.push(flag, false);
        }
        self
    }

    /// An argument as the program knows it, like one of [`Call::flags`].
    #[must_use]
    pub fn option(mut self, option: &'static str) -> Self {
        self.push(option, false);
        self
    }

    /// An argument that users write. One that begins with `-`, is empty, or holds a line feed or NUL fails the call.
    #[must_use]
    pub fn data(mut self, what: &'static str, value: &str) -> Self {
        match refused(value) {
            Some(why) => self.refuse(what, value, why),
            None => self.push(value, false),
        }
        self
    }

    /// As [`Call::data`], but shown nowhere, and it may begin with `-`: only for the value of an option.
    #[must_use]
    pub fn secret(mut self, what: &'static str, value: &str) -> Self {
        if value.contains(['\0', '\n', '\r']) {
            self.refuse(what, "***", "it holds a line feed or NUL");
        } else {
            self.push(value, true);
        }
        self
    }

    /// An absolute path.
    #[must_use]
    pub fn path(mut self, path: &Path) -> Self {
        let text = path.to_string_lossy();
        if !path.is_absolute() {
            self.refuse("path", &text, "it is not absolute");
        } else if text.contains('\0') {
            self.refuse("path", &text, "it holds NUL");
        } else {
            self.push(path, false);
        }
        self
    }

    /// Gives it so long.
    #[must_use]
    pub fn patient(mut self, patience: Duration) -> Self {
        self.patience = Some(patience);
        self
    }

    /// It is never killed, as what it does half is worse than what it does late: making a file system. What it
    /// says is lost, what it complains about is not.
    #[must_use]
    pub fn never_killed(mut self) -> Self {
        self.never_killed = true;
        self
    }

    fn push(&mut self, value: impl Into<OsString>, secret: bool) {
        if let Ok(args) = &mut self.args {
            args.push(Arg {
                value: value.into(),
                secret,
            });
        }
    }

    fn refuse(&mut self, what: &'static str, value: &str, why: &'static str) {
        if self.args.is_ok() {
            self.args = Err(CommandError::Argument {
                tool: self.tool.clone(),
                what,
                value: value.to_owned(),
                why,
            });
        }
    }
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.tool)?;
        for arg in self.args.iter().flatten() {
            f.write_char(' ')?;
            if arg.secret {
                f.write_str("***")?;
            } else {
                f.write_str(&arg.value.to_string_lossy())?;
            }
        }
        Ok(())
    }
}

/// Returns the reason why user input cannot be an argument; `None` if it can.
pub(super) fn refused(value: &str) -> Option<&'static str> {
    if value.is_empty() {
        Some("it is empty")
    } else if value.starts_with('-') {
        Some("it begins with \"-\"")
    } else if value.contains(['\0', '\n', '\r']) {
        Some("it holds a line feed or NUL")
    } else {
        None
    }
}

/// Kills a tool and all that it has started when it is dropped.
struct Group {
    leader: Option<Pid>,
    spared: bool,
}

impl Group {
    fn of(child: &Child, spared: bool) -> Self {
        let id = child.id().and_then(|id| i32::try_from(id).ok());
        Self {
            leader: id.map(Pid::from_raw),
            spared,
        }
    }

    /// The leader has ended and been waited for: its number may be somebody else's.
    fn disarm(&mut self) {
        self.leader = None;
    }

    fn kill(&self) {
        let Some(leader) = self.leader.filter(|_| !self.spared) else {
            return;
        };
        match killpg(leader, Signal::SIGKILL) {
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(error) => tracing::debug!(pid = leader.as_raw(), %error, "cannot kill a tool"),
        }
    }

    /// Kills, and tells what came of it.
    async fn end(&mut self, child: &mut Child) -> &'static str {
        if self.spared {
            return "it goes on";
        }
        self.kill();
        match timeout(DYING, child.wait()).await {
            Ok(Ok(_)) => {
                self.disarm();
                "it was killed"
            }
            _ => "it cannot be killed now and was left to itself",
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The end of an output, read beside the tool so that it never waits for its reader.
struct Tail {
    kept: Arc<Mutex<VecDeque<u8>>>,
    task: Option<JoinHandle<()>>,
}

impl Tail {
    fn read<R: AsyncRead + Unpin + Send + 'static>(from: Option<R>) -> Self {
        let kept = Arc::new(Mutex::new(VecDeque::new()));
        let into = Arc::clone(&kept);
        let task = from.map(|from| tokio::spawn(copy(from, into)));
        Self { kept, task }
    }

    async fn finish(mut self, secrets: &[&str]) -> String {
        if let Some(task) = &mut self.task
            && timeout(AFTERWARDS, task).await.is_err()
        {
            tracing::debug!("a tool has left somebody behind who may still speak");
        }
        let kept = {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            kept.make_contiguous().to_vec()
        };
        let mut text = String::from_utf8_lossy(&kept).into_owned();
        for secret in secrets {
            text = text.replace(secret, "***");
        }
        text
    }
}

impl Drop for Tail {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

async fn copy<R: AsyncRead + Unpin>(mut from: R, into: Arc<Mutex<VecDeque<u8>>>) {
    let mut buffer = [0_u8; 4096];
    loop {
        match from.read(&mut buffer).await {
            Ok(0) => return,
            Ok(n) => {
                let mut kept = into.lock().unwrap_or_else(PoisonError::into_inner);
                kept.extend(&buffer[..n]);
                let excess = kept.len().saturating_sub(OUTPUT);
                kept.drain(..excess);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

#[cfg(test)]
#[path = "command_tests.rs"]
mod tests;
