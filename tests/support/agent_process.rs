//! The agent as a child process: the real binary with directories, cgroups and a health port of its own.
//!
//! A [`Site`] is what outlives the agent: configuration, manifests, state, logs. [`Site::spawn`] starts an
//! [`Agent`] on it, which is killed when dropped. A dropped site takes its cgroups and directories along.
#![allow(dead_code, reason = "each test uses another part of it")]

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Read, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use std::time::{Duration, Instant};

pub use holdfast_testkit::ports::free_port;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// Name of the node of every agent here.
pub const NODE: &str = "node1";
/// How long anything may take that is not under test itself: the machine may be busy.
pub const PATIENCE: Duration = Duration::from_secs(180);
/// How long what was killed may take to end.
const PARTING: Duration = Duration::from_secs(10);
/// Prefix of directories in the temporary directory, and of cgroups.
const PREFIX: &str = "hf-test-";

/// Asks until there is an answer. Panics with the last refusal after `patience`.
#[track_caller]
pub fn within<T>(patience: Duration, what: &str, mut ask: impl FnMut() -> Result<T, String>) -> T {
    let start = Instant::now();
    // Most questions start a process: who waits for long asks less often.
    let mut pause = Duration::from_millis(50);
    loop {
        match ask() {
            Ok(answer) => return answer,
            Err(refusal) if start.elapsed() > patience => {
                panic!("{what}: not within {patience:?}: {refusal}")
            }
            Err(_) => std::thread::sleep(pause),
        }
        pause = (pause * 5 / 4).min(Duration::from_millis(400));
    }
}

/// As [`within`] with [`PATIENCE`].
#[track_caller]
pub fn eventually<T>(what: &str, ask: impl FnMut() -> Result<T, String>) -> T {
    within(PATIENCE, what, ask)
}

/// Where an agent lives.
#[derive(Debug)]
pub struct Site {
    dir: PathBuf,
    cgroup: String,
    endpoint: String,
    generation: AtomicU32,
    api_port: AtomicU16,
}

impl Site {
    /// Makes the directories and the configuration file.
    pub fn new(runtime_endpoint: &str) -> Self {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        sweep();
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{serial}", std::process::id());
        // In a test run the temporary directory is this test's, and sockets need short paths.
        let of_run = std::env::var_os("HOLDFAST_TEST_RUN").is_some();
        let dir = if of_run {
            format!("s{serial}")
        } else {
            name.clone()
        };
        let site = Self {
            dir: std::env::temp_dir().join(dir),
            cgroup: format!("/{name}"),
            endpoint: runtime_endpoint.to_owned(),
            generation: AtomicU32::new(0),
            api_port: AtomicU16::new(0),
        };
        for dir in [site.manifests(), site.starts()] {
            fs::create_dir_all(dir).expect("make a test directory");
        }
        site.configure("");
        site
    }

    /// Lets agents from now on serve the kubelet's API, on a port.
    pub fn serve_api(&self, port: u16) {
        self.api_port.store(port, Ordering::Relaxed);
    }

    /// Writes the configuration file: the directories, and `more` lines of YAML.
    pub fn configure(&self, more: &str) {
        let mut config =
            "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n".to_owned();
        writeln!(config, "podLogsDir: {}", self.pod_logs().display()).unwrap();
        writeln!(config, "cgroupRoot: {}", self.cgroup).unwrap();
        // However full the disk of this machine is.
        if !more.contains("imageGCHighThresholdPercent") {
            config.push_str("imageGCHighThresholdPercent: 100\n");
        }
        if !more.contains("evictionHard") {
            // How full the disks of the machine are is no matter of these tests.
            config.push_str("evictionHard: {memory.available: 100Mi}\n");
        }
        config.push_str(more);
        fs::write(self.dir.join("config.yaml"), config).expect("write the configuration");
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Manifests of static pods.
    pub fn manifests(&self) -> PathBuf {
        self.dir.join("manifests")
    }

    /// Where containers leave their mark; mounted as `/starts`.
    pub fn starts(&self) -> PathBuf {
        self.dir.join("starts")
    }

    pub fn state_dir(&self) -> PathBuf {
        self.dir.join("state")
    }

    pub fn root_dir(&self) -> PathBuf {
        self.dir.join("kubelet")
    }

    pub fn pod_logs(&self) -> PathBuf {
        self.dir.join("podlogs")
    }

    pub fn container_logs(&self) -> PathBuf {
        self.dir.join("clogs")
    }

    /// The parent of everything the agent puts into cgroups, as in `/proc/self/cgroup`.
    pub fn cgroup(&self) -> &str {
        &self.cgroup
    }

    /// Puts a manifest into the directory at once, as a careful editor does.
    pub fn write_manifest(&self, name: &str, text: &str) {
        let hidden = self.manifests().join(format!(".{name}"));
        fs::write(&hidden, text).expect("write a manifest");
        fs::rename(&hidden, self.manifests().join(name)).expect("rename a manifest");
    }

    pub fn remove_manifest(&self, name: &str) {
        fs::remove_file(self.manifests().join(name)).expect("remove a manifest");
    }

    /// Lines that containers wrote into a file of [`Self::starts`].
    pub fn lines(&self, name: &str) -> Vec<String> {
        match fs::read_to_string(self.starts().join(name)) {
            Ok(text) => text.lines().map(str::to_owned).collect(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => panic!("read the marks of {name}: {error}"),
        }
    }

    /// The command that starts an agent here.
    pub fn command(&self, port: u16) -> Command {
        // Another binary than the one under test here: the release build, whose figures count.
        let binary = std::env::var_os("HOLDFAST_BIN");
        let mut command =
            Command::new(binary.unwrap_or_else(|| env!("CARGO_BIN_EXE_holdfast").into()));
        command
            .arg("run")
            .arg("--root-dir")
            .arg(self.root_dir())
            .arg("--state-dir")
            .arg(self.state_dir())
            .arg("--config")
            .arg(self.dir.join("config.yaml"))
            .arg("--pod-manifest-path")
            .arg(self.manifests())
            .arg("--container-runtime-endpoint")
            .arg(&self.endpoint)
            .arg("--container-logs-dir")
            .arg(self.container_logs())
            .args(["--hostname-override", NODE, "--v", "3"])
            .args(["--healthz-port", &port.to_string()])
            // The machine is not the test's: neither its rules nor the settings of its kernel.
            .arg("--make-iptables-util-chains=false")
            .env("HOLDFAST_KERNEL", "leave")
            .stdin(Stdio::null());
        // Agents run side by side, and by default all would serve the kubelet's API on the same port.
        match self.api_port.load(Ordering::Relaxed) {
            0 => command.arg("--enable-server=false"),
            port => command.args(["--enable-server=true", "--port", &port.to_string()]),
        };
        command
    }

    /// Starts an agent and returns at once.
    pub fn spawn(&self, more: &[&str]) -> Agent {
        self.spawn_with(more, &[])
    }

    /// As [`Self::spawn`] with more environment variables.
    pub fn spawn_with(&self, more: &[&str], environment: &[(&str, &str)]) -> Agent {
        let variables = environment
            .iter()
            .map(|(name, value)| (name.into(), value.into()));
        self.spawn_in(more, &variables.collect::<Vec<_>>())
    }

    /// As [`Self::spawn`] with variables that need not be text.
    pub fn spawn_odd(&self, environment: &[(OsString, OsString)]) -> Agent {
        self.spawn_in(&[], environment)
    }

    fn spawn_in(&self, more: &[&str], environment: &[(OsString, OsString)]) -> Agent {
        let port = free_port();
        let generation = self.generation.fetch_add(1, Ordering::Relaxed) + 1;
        let log = self.dir.join(format!("agent-{generation}.log"));
        let file = fs::File::create(&log).expect("make the agent's log");
        let copy = file.try_clone().expect("share the agent's log");
        let child = self
            .command(port)
            .args(more)
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdout(file)
            .stderr(copy)
            .spawn()
            .expect("start the agent");
        Agent { child, port, log }
    }

    /// Starts an agent and waits until it is ready.
    pub fn start(&self) -> Agent {
        self.start_with(&[])
    }

    /// As [`Self::start`] with more flags.
    pub fn start_with(&self, more: &[&str]) -> Agent {
        let mut agent = self.spawn(more);
        agent.wait_ready();
        agent
    }

    /// `holdfast dump TABLES -o json`, of the live agent or the store it left.
    pub fn dump(&self, tables: &[&str]) -> Value {
        self.try_dump(tables).expect("dump the store")
    }

    pub fn try_dump(&self, tables: &[&str]) -> Result<Value, String> {
        let output = Command::new(env!("CARGO_BIN_EXE_holdfast"))
            .arg("dump")
            .args(tables)
            .args(["-q", "-o", "json", "--state-dir"])
            .arg(self.state_dir())
            .output()
            .expect("run holdfast dump");
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        serde_json::from_slice(&output.stdout).map_err(|e| format!("dump is no JSON: {e}"))
    }

    /// Waits until all that the live agent shows is on the disk. What is relaxed (probes, statuses that are not final,
    /// objects, journal) would be there within 100 ms by itself; a kill before that loses it, as it may.
    #[track_caller]
    pub fn recorded(&self) {
        // Such a backup is preceded by a sync.
        let output = Command::new(env!("CARGO_BIN_EXE_holdfast"))
            .args(["backup", "--in-state-dir", "--state-dir"])
            .arg(self.state_dir())
            .output()
            .expect("run holdfast backup");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "have all recorded: {output:?}");
        // No recovery is to find it.
        fs::remove_file(said.trim()).expect("remove the backup");
    }

    /// The only row of a table about a pod, by the name in its manifest.
    pub fn row(&self, table: &str, pod: &str) -> Result<Value, String> {
        let dump = self.try_dump(&[table])?;
        let name = format!("{pod}-{NODE}");
        let mut rows = dump["tables"][table]
            .as_array()
            .ok_or("no such table")?
            .iter()
            .filter(|row| row["name"] == name.as_str());
        match (rows.next(), rows.next()) {
            (Some(row), None) => Ok(row.clone()),
            (None, _) => Err(format!("{table} has no row of {name}")),
            (Some(_), Some(_)) => Err(format!("{table} has several rows of {name}")),
        }
    }

    /// The recorded API status of a pod.
    pub fn status(&self, pod: &str) -> Result<Value, String> {
        Ok(self.row("statuses", pod)?["status"].clone())
    }

    /// The status of one container of a pod.
    pub fn container_status(&self, pod: &str, container: &str) -> Result<Value, String> {
        let status = self.status(pod)?;
        status["containerStatuses"]
            .as_array()
            .into_iter()
            .flatten()
            .find(|c| c["name"] == container)
            .cloned()
            .ok_or_else(|| format!("no status of container {container} in {status}"))
    }

    /// Waits for a phase.
    #[track_caller]
    pub fn wait_phase(&self, pod: &str, phase: &str) -> Value {
        eventually(&format!("{pod} is {phase}"), || {
            let status = self.status(pod)?;
            if status["phase"] == phase {
                Ok(status)
            } else {
                Err(status.to_string())
            }
        })
    }

    /// Journal lines of a pod (by the name in its manifest), oldest first: what, why.
    pub fn journal(&self, pod: &str) -> Vec<(String, String)> {
        let name = format!("{pod}-{NODE}");
        let dump = self.dump(&["journal"]);
        let rows = dump["tables"]["journal"].as_array().expect("a journal");
        rows.iter()
            .filter(|row| row["name"] == name.as_str())
            .map(|row| {
                let text = |field: &str| row[field].as_str().unwrap_or_default().to_owned();
                (text("what"), text("why"))
            })
            .collect()
    }

    /// What all agents here logged.
    pub fn logs(&self) -> String {
        let mut all = String::new();
        for generation in 1..=self.generation.load(Ordering::Relaxed) {
            let path = self.dir.join(format!("agent-{generation}.log"));
            let text = fs::read_to_string(path).unwrap_or_default();
            writeln!(all, "--- agent {generation}\n{text}").unwrap();
        }
        all
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // A test run has a place that outlives the test's own directory.
            let keep = std::env::var_os("HOLDFAST_TEST_KEEP").map_or_else(
                || std::env::temp_dir().join("hf-test-failed"),
                PathBuf::from,
            );
            let copy = keep.join(self.dir.file_name().unwrap_or_default());
            drop(fs::create_dir_all(&copy));
            drop(fs::write(copy.join("agent.log"), self.logs()));
            if let Ok(dump) = self.try_dump(&[]) {
                drop(fs::write(copy.join("dump.json"), format!("{dump:#}")));
            }
            eprintln!("logs and dump are kept in {}", copy.display());
        }
        remove_cgroups(&self.cgroup);
        remove_tree(&self.dir);
    }
}

/// A running agent.
#[derive(Debug)]
pub struct Agent {
    child: Child,
    port: u16,
    log: PathBuf,
}

impl Agent {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// What it has logged so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).expect("a pid");
        kill(Pid::from_raw(pid), signal).expect("signal the agent");
    }

    /// SIGKILL, and waits for the process to be gone.
    #[track_caller]
    pub fn kill9(mut self) {
        assert_eq!(
            self.exited(),
            None,
            "the agent ended by itself: {}",
            self.log()
        );
        self.child.kill().expect("kill the agent");
        let status = self.child.wait().expect("wait for the agent");
        assert_eq!(
            status.signal(),
            Some(9),
            "the agent ended before it was killed: {}",
            self.log()
        );
    }

    /// SIGTERM; returns how it ended and how long that took.
    #[track_caller]
    pub fn terminate(&mut self) -> (ExitStatus, Duration) {
        let start = Instant::now();
        self.signal(Signal::SIGTERM);
        let status = self.wait_exit(PATIENCE);
        (status, start.elapsed())
    }

    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("look at the agent")
    }

    #[track_caller]
    pub fn wait_exit(&mut self, patience: Duration) -> ExitStatus {
        within(patience, "the agent ends", || {
            self.child
                .try_wait()
                .expect("look at the agent")
                .ok_or_else(|| "it runs".to_owned())
        })
    }

    /// Waits for `/readyz`; panics with the log when the agent ends instead.
    #[track_caller]
    pub fn wait_ready(&mut self) {
        let start = Instant::now();
        loop {
            if let Some(status) = self.exited() {
                panic!(
                    "the agent ended ({status}) instead of getting ready:\n{}",
                    self.log()
                );
            }
            let answer = self.get("/readyz");
            if matches!(answer, Ok((200, _))) {
                return;
            }
            assert!(
                start.elapsed() < PATIENCE,
                "the agent is not ready: {answer:?}\n{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// GET from the health server: status and body.
    pub fn get(&self, path: &str) -> io::Result<(u16, String)> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
        let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        let answer = String::from_utf8_lossy(&answer);
        let (head, body) = answer
            .split_once("\r\n\r\n")
            .ok_or_else(|| io::Error::other("no HTTP answer"))?;
        let status = head
            .split_whitespace()
            .nth(1)
            .and_then(|code| code.parse().ok())
            .ok_or_else(|| io::Error::other("no HTTP status"))?;
        Ok((status, body.to_owned()))
    }

    /// A line of `/metrics` by its beginning, as in `kubelet_runtime_operations_total{operation_type="x"}`;
    /// 0 when there is none.
    pub fn metric(&self, series: &str) -> f64 {
        let (_, text) = self.get("/metrics").expect("read the metrics");
        text.lines()
            .filter_map(|line| line.strip_prefix(series)?.strip_prefix(' '))
            .find_map(|value| value.trim().parse().ok())
            .unwrap_or(0.0)
    }

    /// How often a CRI call was made.
    pub fn operations(&self, operation: &str) -> f64 {
        self.metric(&format!(
            "kubelet_runtime_operations_total{{operation_type=\"{operation}\"}}"
        ))
    }

    /// Full relists so far.
    pub fn relists(&self) -> f64 {
        self.metric("kubelet_pleg_relist_duration_seconds_count")
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            drop(self.child.kill());
            drop(self.child.wait());
        }
    }
}

/// Cleans up after test processes that could not.
fn sweep() {
    let dead = |name: &str| {
        let owner = name
            .strip_prefix(PREFIX)?
            .split('-')
            .next()?
            .parse::<u32>()
            .ok()?;
        (!Path::new("/proc").join(owner.to_string()).exists()).then_some(())
    };
    for entry in fs::read_dir(std::env::temp_dir())
        .into_iter()
        .flatten()
        .flatten()
    {
        let name = entry.file_name();
        if let Some(name) = name.to_str()
            && dead(name).is_some()
        {
            remove_cgroups(&format!("/{name}"));
            remove_tree(&entry.path());
        }
    }
}

fn remove_tree(dir: &Path) {
    // A volume that is still mounted must not be emptied.
    let prefix = format!("{}/", dir.display());
    let mounts = fs::read("/proc/self/mounts").unwrap_or_default();
    let mounts = String::from_utf8_lossy(&mounts);
    let mut points: Vec<&str> = mounts
        .lines()
        .filter_map(|line| line.split(' ').nth(1))
        .filter(|point| point.starts_with(&prefix))
        .collect();
    points.reverse();
    for point in points {
        if let Err(error) = nix::mount::umount2(point, nix::mount::MntFlags::MNT_DETACH) {
            eprintln!("cannot unmount {point}: {error}");
        }
    }
    if let Err(error) = fs::remove_dir_all(dir)
        && error.kind() != io::ErrorKind::NotFound
    {
        eprintln!("cannot remove {}: {error}", dir.display());
    }
}

/// Removes a tree of cgroups from every hierarchy. What lives in it must have been killed already.
fn remove_cgroups(cgroup: &str) {
    fn remove(dir: &Path, begin: Instant) {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                remove(&entry.path(), begin);
            }
        }
        // A process that was killed is in its cgroup until it has ended.
        while let Err(error) = fs::remove_dir(dir) {
            let is_busy = error.kind() == io::ErrorKind::ResourceBusy;
            if !is_busy || begin.elapsed() > PARTING {
                if error.kind() != io::ErrorKind::NotFound {
                    eprintln!("cannot remove {}: {error}", dir.display());
                }
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    let begin = Instant::now();
    for dir in cgroup_dirs(cgroup) {
        remove(&dir, begin);
    }
}

/// The directories of a cgroup in all hierarchies.
pub fn cgroup_dirs(cgroup: &str) -> Vec<PathBuf> {
    let mount = Path::new("/sys/fs/cgroup");
    let relative = cgroup.trim_start_matches('/');
    let mut roots = vec![mount.to_owned()];
    for entry in fs::read_dir(mount).into_iter().flatten().flatten() {
        roots.push(entry.path());
    }
    roots
        .into_iter()
        .map(|root| root.join(relative))
        .filter(|dir| dir.is_dir())
        .collect()
}
