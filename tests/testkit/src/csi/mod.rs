//! A CSI driver of one's own: a process that serves Identity, Node and plugin registration on unix sockets, mounts for
//! real, fails as it is told, and watches whether its caller keeps the contract.
//!
//! [`CsiDriver::start`] runs it. Its volumes are directories (or files behind loop devices) in its own state
//! directory; what it has staged and published is remembered there as well, so that a driver that was killed goes on
//! with what it did. Volumes come to be when they are first used, but for handles that begin with `missing`.
//!
//! The process is the test binary itself, so that nothing has to be built: each test file that uses it has
//! `holdfast_testkit::csi_driver_process!();` somewhere. By hand: `cargo run -p holdfast-testkit --bin csi-driver`.
//!
//! Needs root.

mod contract;
mod faults;
mod mounts;
mod node;
#[path = "../../../../src/volumemanager/csi/proto.rs"]
#[allow(dead_code, unreachable_pub, reason = "shared with the agent")]
mod proto;
mod server;
mod state;

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use tokio::time::Instant;

use nix::sys::signal::Signal;
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use crate::programs;

pub use faults::Fault;
pub use state::{Published, Staged, Truth};

/// Tells the process what it is to serve.
const OPTIONS: &str = "HOLDFAST_CSI_DRIVER";
const TEST: &str = "csi_driver_process";
/// File in the driver's directory with what it answers instead of [`CsiOptions::max_volumes`].
const MAX_VOLUMES: &str = "max_volumes";
const START: Duration = Duration::from_secs(60);

/// Makes the test binary able to be the driver's process.
#[macro_export]
macro_rules! csi_driver_process {
    () => {
        /// The process of a CSI driver, when it is asked to be one; see `holdfast_testkit::csi`.
        #[test]
        fn csi_driver_process() {
            $crate::csi::process();
        }
    };
}

/// What the node service can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// `STAGE_UNSTAGE_VOLUME`.
    pub stage: bool,
    /// `GET_VOLUME_STATS`.
    pub stats: bool,
    /// `EXPAND_VOLUME`.
    pub expand: bool,
    /// `VOLUME_CONDITION`.
    pub condition: bool,
    /// `SINGLE_NODE_MULTI_WRITER`.
    pub single_node_multi_writer: bool,
    /// `VOLUME_MOUNT_GROUP`.
    pub mount_group: bool,
}

impl Default for Capabilities {
    /// Staging, stats and expansion.
    fn default() -> Self {
        Self {
            stage: true,
            stats: true,
            expand: true,
            condition: false,
            single_node_multi_writer: false,
            mount_group: false,
        }
    }
}

/// What a driver is like.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CsiOptions {
    /// Its name.
    pub name: String,
    /// The kubelet's root directory: sockets are made below it, and all paths of calls must be there.
    pub root: PathBuf,
    /// Its own directory.
    pub state: PathBuf,
    /// What it calls the node.
    pub node_id: String,
    /// `max_volumes_per_node`.
    pub max_volumes: i64,
    /// `accessible_topology`.
    pub topology: BTreeMap<String, String>,
    /// Versions it registers with.
    pub versions: Vec<String>,
    /// Type it registers with.
    pub plugin_type: String,
    /// What it can do.
    pub capabilities: Capabilities,
    /// Whether volumes are a tmpfs that is made by staging (or publishing), instead of a directory that stays.
    pub tmpfs: bool,
    /// Whether staging and publishing take secrets.
    pub needs_secrets: bool,
    /// Size of volumes in bytes, until they are expanded.
    pub size: u64,
    /// Whether it says that its volumes are in a bad condition.
    pub abnormal: bool,
    /// Socket of its services.
    pub endpoint: PathBuf,
    /// Socket to register by.
    pub registration: PathBuf,
}

impl CsiOptions {
    /// A driver that stages by bind mounts, in the usual places below the kubelet's root directory.
    pub fn new(name: &str, root: impl Into<PathBuf>, state: impl Into<PathBuf>) -> Self {
        let root = root.into();
        Self {
            name: name.to_owned(),
            endpoint: root.join("plugins").join(name).join("csi.sock"),
            registration: root
                .join("plugins_registry")
                .join(format!("{name}-reg.sock")),
            root,
            state: state.into(),
            node_id: "csi-node".to_owned(),
            max_volumes: 0,
            topology: BTreeMap::new(),
            versions: vec!["1.0.0".to_owned()],
            plugin_type: "CSIPlugin".to_owned(),
            capabilities: Capabilities::default(),
            tmpfs: false,
            needs_secrets: false,
            size: 64 << 20,
            abnormal: false,
        }
    }
}

/// A call that the driver got.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Call {
    /// `NodeStageVolume`, `GetInfo`, ….
    pub rpc: String,
    /// The volume's handle.
    pub volume: String,
    /// Staging path.
    pub staging: String,
    /// Target path, or the path that stats and expansion are about.
    pub target: String,
    /// `readonly`.
    pub readonly: bool,
    /// `block`, or the file system that was asked for.
    pub fs_type: String,
    /// Mount options.
    pub mount_flags: Vec<String>,
    /// `volume_mount_group`.
    pub mount_group: String,
    /// Number of the access mode.
    pub access_mode: i32,
    /// `required_bytes`.
    pub bytes: i64,
    /// Secrets.
    pub secrets: BTreeMap<String, String>,
    /// `publish_context`.
    pub publish_context: BTreeMap<String, String>,
    /// `volume_context`.
    pub volume_context: BTreeMap<String, String>,
    /// `OK`, a code's name, or the fault.
    pub outcome: String,
    /// What was said with it; of `NotifyRegistrationStatus`: the error that was told.
    pub message: String,
    /// The driver's process.
    pub pid: u32,
}

/// A running driver. Dropped, it is killed, and what it mounted is unmounted.
#[derive(Debug)]
pub struct CsiDriver {
    options: CsiOptions,
    child: Option<(Child, ChildStdin)>,
}

impl CsiDriver {
    /// Starts it, and waits until it listens.
    ///
    /// # Errors
    /// When it does not begin to listen, with what it says.
    pub fn start(options: CsiOptions) -> io::Result<Self> {
        fs::create_dir_all(&options.state)?;
        let mut driver = Self {
            options,
            child: None,
        };
        driver.spawn()?;
        Ok(driver)
    }

    /// What it was started with. Changes count from [`Self::restart`] on.
    pub fn options_mut(&mut self) -> &mut CsiOptions {
        &mut self.options
    }

    /// What it was started with.
    pub fn options(&self) -> &CsiOptions {
        &self.options
    }

    /// From now on it says so when it is asked, also while it runs.
    ///
    /// # Errors
    /// Of its directory.
    pub fn set_max_volumes(&self, count: i64) -> io::Result<()> {
        fs::write(self.options.state.join(MAX_VOLUMES), count.to_string())
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.options.name
    }

    fn spawn(&mut self) -> io::Result<()> {
        let options = serde_json::to_string(&self.options).map_err(io::Error::other)?;
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.options.state.join("driver.log"))?;
        let mut child = Command::new(std::env::current_exe()?)
            .args([TEST, "--exact", "--nocapture", "--test-threads=1"])
            .env(OPTIONS, options)
            // The process ends when this pipe does.
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let (Some(stdin), Some(stdout)) = (stdin, stdout) else {
            return Err(io::Error::other("the driver has no pipes"));
        };
        self.child = Some((child, stdin));
        let (send, lines) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    return;
                }
            }
        });
        let end = Instant::now() + START;
        let mut said = Vec::new();
        while let Ok(line) = lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
            if line.ends_with("csi driver is ready") {
                return Ok(());
            }
            said.push(line);
        }
        Err(io::Error::other(format!(
            "the CSI driver does not listen; does the test file have `holdfast_testkit::csi_driver_process!();`? It \
             says: {said:?}, and {}",
            fs::read_to_string(self.options.state.join("driver.log")).unwrap_or_default()
        )))
    }

    /// Kills it in the middle of whatever it does. Its sockets stay behind.
    pub fn kill9(&mut self) {
        if let Some((mut child, _)) = self.child.take() {
            child.kill().ok();
            child.wait().ok();
        }
    }

    /// Stops it in order: it removes its sockets first.
    pub fn stop(&mut self) {
        fs::remove_file(&self.options.registration).ok();
        fs::remove_file(&self.options.endpoint).ok();
        self.kill9();
    }

    /// Starts it again, after killing it if it runs. Its sockets are made anew.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn restart(&mut self) -> io::Result<()> {
        self.kill9();
        self.spawn()
    }

    /// Whether the process runs: a fault may have ended it.
    pub fn is_running(&mut self) -> bool {
        let ended = |child: &mut Child| !matches!(child.try_wait(), Ok(None));
        match &mut self.child {
            Some((child, _)) => !ended(child),
            None => false,
        }
    }

    /// Waits until a fault has ended the process. False when that takes longer than `patience`.
    pub fn wait_for_end(&mut self, patience: Duration) -> bool {
        let end = Instant::now() + patience;
        while self.is_running() {
            if Instant::now() > end {
                return false;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        self.child = None;
        true
    }

    /// Stops (SIGSTOP) or continues (SIGCONT) the process.
    ///
    /// # Errors
    /// When it does not run.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        let Some((child, _)) = &self.child else {
            return Err(io::Error::other("the driver does not run"));
        };
        let pid = i32::try_from(child.id()).map_err(io::Error::other)?;
        programs::signal(Pid::from_raw(pid), signal)
    }

    /// The next `times` calls of `rpc` go wrong so, also across restarts.
    ///
    /// # Errors
    /// When that cannot be written down.
    pub fn inject(&self, rpc: &str, times: usize, fault: &Fault) -> io::Result<()> {
        for _ in 0..times {
            faults::add(&self.options.state, rpc, fault, false)?;
        }
        Ok(())
    }

    /// All calls of `rpc` go wrong so, until [`Self::heal`].
    ///
    /// # Errors
    /// When that cannot be written down.
    pub fn inject_always(&self, rpc: &str, fault: &Fault) -> io::Result<()> {
        faults::add(&self.options.state, rpc, fault, true)
    }

    /// Nothing goes wrong any more. What hangs goes on hanging until its caller gives up.
    ///
    /// # Errors
    /// When the faults cannot be removed.
    pub fn heal(&self) -> io::Result<()> {
        faults::clear(&self.options.state)
    }

    /// Every call so far, of all its processes, in the order in which they ended (or were hit by a fault).
    pub fn calls(&self) -> Vec<Call> {
        let text = fs::read_to_string(self.options.state.join("calls.log")).unwrap_or_default();
        // The last line of a killed process may be cut short.
        text.lines()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect()
    }

    /// The calls of one method.
    pub fn calls_of(&self, rpc: &str) -> Vec<Call> {
        let mut calls = self.calls();
        calls.retain(|call| call.rpc == rpc);
        calls
    }

    /// What its caller did that the contract forbids.
    pub fn violations(&self) -> Vec<String> {
        let text = fs::read_to_string(self.options.state.join("violations.log"));
        text.unwrap_or_default()
            .lines()
            .map(str::to_owned)
            .collect()
    }

    /// What it has staged and published, as it remembers, and as the mount table has it.
    ///
    /// # Errors
    /// When either cannot be read.
    pub fn truth(&self) -> io::Result<Truth> {
        state::truth(&self.options)
    }

    /// Where the files of a volume are, for volumes that are no tmpfs.
    pub fn volume_dir(&self, volume: &str) -> PathBuf {
        state::volume_dir(&self.options.state, volume)
    }
}

impl Drop for CsiDriver {
    fn drop(&mut self) {
        self.kill9();
        state::clean_up(&self.options);
    }
}

/// Serves, when the environment says so, until standard input ends. Otherwise returns at once.
///
/// # Panics
/// When it cannot listen.
#[allow(clippy::panic, reason = "a process of a test")]
pub fn process() {
    let Ok(options) = std::env::var(OPTIONS) else {
        return;
    };
    let served = serde_json::from_str(&options)
        .map_err(io::Error::other)
        .and_then(serve);
    if let Err(error) = served {
        panic!("csi driver: {error}");
    }
}

/// Serves until standard input ends.
///
/// # Errors
/// When it cannot listen.
pub fn serve(options: CsiOptions) -> io::Result<()> {
    server::serve(options)
}

/// Whether something is mounted exactly at `path`, and how often.
///
/// # Errors
/// When the mount table cannot be read.
pub fn mounts_at(path: &Path) -> io::Result<usize> {
    Ok(mounts::table()?.iter().filter(|m| *m == path).count())
}

/// Everything that is mounted below `path`.
///
/// # Errors
/// When the mount table cannot be read.
pub fn mounts_below(path: &Path) -> io::Result<Vec<PathBuf>> {
    let mut below = mounts::table()?;
    below.retain(|m| m.starts_with(path));
    Ok(below)
}
