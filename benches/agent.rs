//! The agent as a process, against a fake container runtime in a process of its own: how long after SIGKILL
//! and a new start all 110 pods are resumed, what the agent costs in memory, and what it costs to be idle.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "benchmarks"
)]

mod support;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, sleep};
use std::time::Duration;

use holdfast_testkit::fake_cri::FakeCri;
use support::{CONTAINERS, figure, images, manifest, spread, wanted};
use tokio::time::Instant;

const PODS: usize = 110;
const RESTARTS: usize = 12;
const SETTLE: Duration = Duration::from_secs(8);
const IDLE: Duration = Duration::from_secs(30);
const PATIENCE: Duration = Duration::from_secs(120);
/// Set in the process that plays the runtime: its socket.
const RUNTIME: &str = "HOLDFAST_BENCH_RUNTIME";

/// Plays the runtime. Lines of standard input say whether events are offered; at its end the process ends.
fn play_runtime(socket: &str) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let guard = runtime.enter();
    let fake = FakeCri::new();
    for image in images() {
        fake.add_image(&image);
    }
    fake.serve(socket).unwrap();
    println!("serving");
    for line in std::io::stdin().lines() {
        fake.offer_events(line.unwrap() == "events on");
        // The calls are of no interest and would pile up.
        fake.clear_calls();
        println!("created {}", fake.containers().len());
    }
    drop(guard);
}

struct FakeRuntime {
    child: Child,
    input: ChildStdin,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl FakeRuntime {
    fn start(socket: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(RUNTIME, socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "serving");
        Self {
            child,
            input,
            lines,
        }
    }

    /// Offers events or not and returns how many containers were ever created (none is removed here).
    fn offer_events(&mut self, offer: bool) -> usize {
        writeln!(self.input, "events {}", if offer { "on" } else { "off" }).unwrap();
        let answer = self.lines.next().unwrap().unwrap();
        answer.strip_prefix("created ").unwrap().parse().unwrap()
    }
}

impl Drop for FakeRuntime {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Where everything is.
struct Place {
    root: PathBuf,
    port: u16,
    cgroup: String,
}

impl Place {
    fn make(root: &Path) -> Self {
        for dir in ["manifests", "logs"] {
            fs::create_dir(root.join(dir)).unwrap();
        }
        for n in 0..PODS {
            let name = format!("shop-{n}");
            let text = manifest(&name).to_string();
            fs::write(root.join(format!("manifests/{name}.json")), text).unwrap();
        }
        let config = root.join("config.yaml");
        let text = format!(
            "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\npodLogsDir: {}\n\
             evictionHard: {{memory.available: 100Mi}}\nmakeIPTablesUtilChains: false\n",
            root.join("logs/pods").display()
        );
        fs::write(config, text).unwrap();
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        Self {
            root: root.to_owned(),
            port: free.local_addr().unwrap().port(),
            cgroup: format!("holdfast-bench-{}", std::process::id()),
        }
    }

    fn socket(&self) -> PathBuf {
        self.root.join("cri.sock")
    }
}

/// A running agent; killed when dropped.
struct Agent {
    child: Child,
    started: Instant,
    lines: Receiver<(Instant, String)>,
    port: u16,
}

impl Agent {
    fn start(place: &Place) -> Self {
        let root = &place.root;
        let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast"));
        command
            .args(["run", "--v", "2", "--hostname-override", "bench"])
            .arg("--root-dir")
            .arg(root.join("kubelet"))
            .arg("--state-dir")
            .arg(root.join("state"))
            .arg("--config")
            .arg(root.join("config.yaml"))
            .arg("--pod-manifest-path")
            .arg(root.join("manifests"))
            .arg("--container-runtime-endpoint")
            .arg(format!("unix://{}", place.socket().display()))
            .arg("--container-logs-dir")
            .arg(root.join("logs/containers"))
            .arg("--cgroup-root")
            .arg(format!("/{}", place.cgroup))
            .arg("--healthz-port")
            .arg(place.port.to_string())
            // The machine is not the benchmark's: neither its rules nor the settings of its kernel.
            .args([
                "--make-iptables-util-chains=false",
                "--protect-kernel-defaults",
            ])
            .env_remove("RUST_LOG")
            // As contrib/systemd/holdfast.service has it.
            .env("MALLOC_ARENA_MAX", "2")
            .env("MALLOC_TRIM_THRESHOLD_", "65536")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let started = Instant::now();
        let mut child = command.spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in stderr.lines() {
                let Ok(line) = line else { return };
                if std::env::var_os("HOLDFAST_BENCH_LOG").is_some() {
                    eprintln!("{:?} {line}", started.elapsed());
                }
                if sender.send((Instant::now(), line)).is_err() {
                    return;
                }
            }
        });
        Self {
            child,
            started,
            lines,
            port: place.port,
        }
    }

    /// Waits for the log line that contains `text`, and says how long after the start it came.
    fn wait_for_line(&self, text: &str) -> (Duration, String) {
        let mut seen = String::new();
        while let Ok((at, line)) = self.lines.recv_timeout(PATIENCE) {
            if line.contains(text) {
                return (at - self.started, line);
            }
            seen.push_str(&line);
            seen.push('\n');
        }
        panic!("the agent did not log {text:?}:\n{seen}");
    }

    fn get(&self, path: &str) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        .ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    }

    /// Waits until `path` answers with `text`, and says how long after the start that was.
    fn wait_for_answer(&self, path: &str, text: &str) -> Duration {
        loop {
            if self.get(path).is_some_and(|answer| answer.contains(text)) {
                return self.started.elapsed();
            }
            let waited = self.started.elapsed();
            assert!(
                waited < PATIENCE,
                "{path} does not answer {text:?}: {:?}",
                self.get(path)
            );
            sleep(Duration::from_millis(2));
        }
    }

    fn proc(&self, file: &str) -> String {
        fs::read_to_string(format!("/proc/{}/{file}", self.child.id())).unwrap()
    }

    /// A line of /proc/PID/status, as a number: KiB for memory.
    fn status(&self, name: &str) -> f64 {
        self.proc("status")
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
            .unwrap()
    }

    /// CPU time used so far, user and system, in seconds.
    fn cpu(&self) -> f64 {
        let stat = self.proc("stat");
        let (_, fields) = stat.rsplit_once(')').unwrap();
        let fields: Vec<&str> = fields.split_whitespace().collect();
        let ticks: f64 = fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap();
        ticks / procfs::ticks_per_second() as f64
    }

    fn memory(&self, when: &str) {
        let mib = |name| self.status(name) / 1024.0;
        let rss = mib("VmRSS");
        figure(
            &format!("resident memory with {PODS} pods, {when}"),
            rss,
            30.0,
            "MiB",
        );
        println!(
            "  anonymous {:.1} MiB, of files {:.1} MiB, peak {:.1} MiB, {} threads",
            mib("RssAnon"),
            mib("RssFile"),
            mib("VmHWM"),
            self.status("Threads")
        );
    }

    fn idle(&self, when: &str) {
        let (before, started) = (self.cpu(), Instant::now());
        sleep(IDLE);
        let used = (self.cpu() - before) / started.elapsed().as_secs_f64();
        figure(
            &format!("processor time when idle, {when}"),
            used * 100.0,
            1.0,
            "% of a core",
        );
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn main() {
    if let Some(socket) = std::env::var_os(RUNTIME) {
        return play_runtime(socket.to_str().unwrap());
    }
    if !wanted("agent") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let place = Place::make(directory.path());
    let mut runtime = FakeRuntime::start(&place.socket());
    measure(&place, &mut runtime);
    drop(runtime);
    remove_cgroups(&place.cgroup);
}

fn measure(place: &Place, runtime: &mut FakeRuntime) {
    let all = PODS * CONTAINERS.len();
    let running = format!("kubelet_running_containers{{container_state=\"running\"}} {all}\n");

    let agent = Agent::start(place);
    let took = agent.wait_for_answer("/metrics", &running);
    println!("agent: first start of {PODS} pods, {all} containers: all run after {took:.1?}");
    sleep(SETTLE);
    agent.memory("after it started them");
    agent.kill();

    let (mut resumed, mut ready) = (Vec::new(), Vec::new());
    let mut told = String::new();
    for _ in 0..RESTARTS {
        let agent = Agent::start(place);
        let (took, line) = agent.wait_for_line("pods resumed");
        assert!(
            line.contains(&format!("resumed={PODS} ")),
            "not all pods were resumed: {line}"
        );
        resumed.push(took);
        ready.push(agent.wait_for_answer("/readyz", "200 OK"));
        let metrics = agent.get("/metrics").unwrap();
        told = metrics
            .lines()
            .find(|l| l.starts_with("holdfast_restore_duration_seconds "))
            .unwrap_or("holdfast_restore_duration_seconds is missing")
            .to_owned();
        // Killed in the midst of what follows a start, as well as later.
        agent.kill();
    }
    let (least, middle, most) = spread(&mut resumed);
    figure(
        &format!("from process start to {PODS} pods resumed, after SIGKILL"),
        middle,
        300.0,
        "ms",
    );
    println!(
        "  p50 of {RESTARTS}; least {least:.0} ms, most {most:.0} ms; /readyz answers 200 after {:.0} ms (p50); {told}",
        spread(&mut ready).1
    );

    let agent = Agent::start(place);
    agent.wait_for_answer("/readyz", "200 OK");
    sleep(SETTLE);
    agent.memory("after a restart");
    agent.idle("the runtime offers events");
    agent.memory("after a restart, idle for a while");
    agent.kill();

    let created = runtime.offer_events(false);
    assert_eq!(created, all, "no container was started twice");
    let agent = Agent::start(place);
    agent.wait_for_answer("/readyz", "200 OK");
    sleep(SETTLE);
    agent.idle("listing each second, the runtime offers no events");
    agent.memory("after a restart, listing each second");
    agent.kill();
}

/// Removes the cgroups that the agent made below its root.
fn remove_cgroups(name: &str) {
    fn remove(dir: &Path) {
        let Ok(entries) = fs::read_dir(dir) else {
            return;
        };
        for entry in entries.flatten() {
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                remove(&entry.path());
            }
        }
        drop(fs::remove_dir(dir));
    }
    let base = Path::new("/sys/fs/cgroup");
    remove(&base.join(name));
    for hierarchy in fs::read_dir(base).into_iter().flatten().flatten() {
        remove(&hierarchy.path().join(name));
    }
}
