//! Twenty ordinary pods on a node, and what they are served like: how late their probes come, how long their like take
//! to start and to go, and how much memory the agent has for that.
//!
//! None of it is asked of the agent. The probes of the ordinary pods call this process, which notes when. Starts and
//! deletions are what a watch of the API server shows. Memory is what the kernel counts.
//!
//! Beside each stands the same without the agent: a thread that calls as often as the probes do, and pods that are
//! started and removed straight over CRI. It tells what the machine and the runtime add.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::StreamExt;
use holdfast_testkit::envtest::{self, DAY};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, ListParams, PostParams, WatchEvent, WatchParams};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::agent_process::{Agent, PATIENCE, eventually};
use crate::bare;
use crate::direct::{Direct, User};
use crate::setup::{Cluster, condition, script};
use crate::world::{FOREVER, ids};

/// Ordinary pods.
const COUNT: usize = 20;
/// Those of them that are probed by a command, the others by HTTP.
const BY_EXEC: usize = 2;
/// Calls that are made without the agent.
const BESIDE: usize = 20;
/// Between two probes of a pod.
const PERIOD: Duration = Duration::from_secs(1);
/// For how long nothing but probes goes on.
const STILL: Duration = Duration::from_secs(15);
/// For how long pods start and go after that, so many at a time.
const CHURN: Duration = Duration::from_secs(60);
const LANES: usize = 2;
/// Between the start of such a pod and its deletion.
const PAUSE: Duration = Duration::from_millis(500);
/// Between two writes to the disk.
const WRITE: Duration = Duration::from_millis(200);
/// Pods that the runtime starts and removes without the agent.
const ALONE: usize = 9;
/// How often monitoring asks the agent.
const SCRAPE: Duration = Duration::from_secs(10);
/// After a restart of the agent or the end of a tenant.
const SETTLE: Duration = Duration::from_secs(10);

/// Answers HTTP probes on a port of the host, in a thread of its own, and notes when each came.
pub struct Pages {
    pub port: u16,
    seen: Arc<Mutex<BTreeMap<String, Vec<Instant>>>>,
}

impl Pages {
    fn serve() -> Self {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("listen");
        listener.set_nonblocking(true).expect("listen");
        let port = listener.local_addr().expect("an address").port();
        let seen = Arc::new(Mutex::new(BTreeMap::new()));
        let noted = Arc::clone(&seen);
        // Not among the test's other tasks, which would make probes look late. Ends with the process.
        std::thread::spawn(move || {
            let rt = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime for the pages");
            rt.block_on(async {
                let listener = TcpListener::from_std(listener).expect("listen");
                loop {
                    let (stream, _) = listener.accept().await.expect("accept a probe");
                    let at = Instant::now();
                    tokio::spawn(answer(stream, at, Arc::clone(&noted)));
                }
            });
        });
        let pages = Self { port, seen };
        pages.call_beside();
        pages
    }

    /// Calls as often as the probes of the ordinary pods do, from a thread of its own.
    fn call_beside(&self) {
        let port = self.port;
        std::thread::spawn(move || {
            let rt = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime for the calls");
            let call = async |n: usize| {
                // Spread over the period, as probes are.
                let share = Duration::from_millis(n as u64 * 1000 / BESIDE as u64);
                let begin = tokio::time::Instant::now() + share;
                let mut due = tokio::time::interval_at(begin, PERIOD);
                loop {
                    due.tick().await;
                    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await;
                    let mut stream = stream.expect("call a page");
                    let request = format!("GET /{} HTTP/1.1\r\n\r\n", beside(n));
                    let sent = stream.write_all(request.as_bytes()).await;
                    sent.expect("call a page");
                    let answer = stream.read_to_end(&mut Vec::new()).await;
                    answer.expect("read a page");
                }
            };
            rt.block_on(futures::future::join_all((0..BESIDE).map(call)));
        });
    }

    /// How much later than a period after the one before each call of some names came in a span of time, also what
    /// is overdue at its end.
    fn lateness(
        &self,
        names: impl IntoIterator<Item = String>,
        from: Instant,
        to: Instant,
    ) -> Vec<Duration> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = Vec::new();
        for name in names {
            let times = seen.get(&name).map(Vec::as_slice).unwrap_or_default();
            let before = times.iter().rfind(|at| **at < from);
            let mut last = before.copied().unwrap_or(from);
            for at in times.iter().filter(|at| (from..to).contains(*at)) {
                all.push((*at - last).saturating_sub(PERIOD));
                last = *at;
            }
            let overdue = (to - last).saturating_sub(PERIOD);
            if !overdue.is_zero() {
                all.push(overdue);
            }
        }
        all
    }
}

/// `GET /hang` is read and never answered; any other path is a pod that is well.
async fn answer(
    mut stream: TcpStream,
    at: Instant,
    noted: Arc<Mutex<BTreeMap<String, Vec<Instant>>>>,
) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_buf(&mut head).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let path = head.split(' ').nth(1).unwrap_or_default();
    if path == "/hang" {
        while matches!(stream.read_buf(&mut Vec::new()).await, Ok(1..)) {}
        return;
    }
    let pod = path.trim_start_matches('/').to_owned();
    {
        let mut seen = noted.lock().unwrap_or_else(PoisonError::into_inner);
        seen.entry(pod).or_default().push(at);
    }
    let well = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    // Whoever has gone needs no answer.
    drop(stream.write_all(well).await);
}

fn name(n: usize) -> String {
    format!("ordinary-{n}")
}

fn beside(n: usize) -> String {
    format!("beside-{n}")
}

/// A pod as most are: it runs, wants little, and ends when it is told to.
fn ordinary() -> Value {
    let mut spec = script("Always", FOREVER);
    spec["containers"][0]["resources"] = json!({"requests": {"cpu": "10m", "memory": "16Mi"}});
    spec
}

/// How long something took, and how long it takes without the agent.
#[derive(Clone, Debug, Default)]
pub struct Times {
    pub with: Vec<Duration>,
    pub without: Vec<Duration>,
}

/// What is measured of the ordinary pods in one phase.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// Of probes by HTTP.
    pub lateness: Times,
    /// Of probes by a command.
    pub commands: Times,
    pub starts: Times,
    pub deletions: Times,
    /// How long 4 KiB take until they are on the disk.
    pub disk: Vec<Duration>,
    /// The agent's resident memory at its highest, in KiB.
    pub memory: u64,
    /// The share of a core that the agent took while nothing but probes went on.
    pub share: f64,
}

/// A node with the ordinary pods, whose agent is started anew now and then.
pub struct Node {
    agent: Option<Agent>,
    pub direct: Direct,
    pub pages: Pages,
    pub cluster: Cluster,
    monitoring: tokio::task::JoinHandle<()>,
    lives: AtomicU64,
}

impl Node {
    pub fn new() -> Self {
        let cluster = Cluster::new();
        let port = envtest::free_port();
        let authority = cluster.env.dir().join("ca.crt");
        cluster.site.serve_api(port);
        // A back-off of a second: with that of five minutes nothing restarts often for long.
        cluster.site.configure(&format!(
            "maxPods: 250\nclusterDNS: [10.96.0.10]\nclusterDomain: cluster.local\n\
             crashLoopBackOff: {{maxContainerRestartPeriod: 1s}}\n\
             authentication:\n  \
               anonymous: {{enabled: false}}\n  \
               webhook: {{enabled: true}}\n  \
               x509: {{clientCAFile: {}}}\n\
             authorization: {{mode: Webhook}}\n",
            authority.display()
        ));
        let agent = cluster.join();
        let shown = cluster.get_node().expect("a node");
        let addresses = shown["status"]["addresses"].as_array();
        let mut addresses = addresses.into_iter().flatten();
        let internal = addresses.find(|a| a["type"] == "InternalIP");
        let address = internal.and_then(|a| a["address"].as_str());
        let address = format!("{}:{port}", address.expect("an InternalIP"));
        let identity = cluster.env.authority();
        let identity = identity.client("admin", "system:masters", DAY);
        let direct = Direct::to(address, User::Certificate(identity));
        let scraped = direct.clone();
        let monitoring = cluster.spawn(async move {
            loop {
                tokio::time::sleep(SCRAPE).await;
                for path in ["/metrics/resource", "/stats/summary"] {
                    // The agent may be between two lives.
                    drop(scraped.ask("GET", path).await);
                }
            }
        });
        let node = Self {
            agent: Some(agent),
            direct,
            pages: Pages::serve(),
            cluster,
            monitoring,
            lives: AtomicU64::new(0),
        };
        node.start_ordinary_pods();
        node
    }

    fn start_ordinary_pods(&self) {
        let port = self.pages.port;
        for n in 0..COUNT {
            let mut spec = ordinary();
            let mut probe = json!({"periodSeconds": PERIOD.as_secs(), "timeoutSeconds": 1, "failureThreshold": 3});
            if n < BY_EXEC {
                // From there the address of this process is its own.
                spec["hostNetwork"] = json!(true);
                let page = format!("http://127.0.0.1:{port}/{}", name(n));
                probe["exec"] = json!({"command": ["wget", "-q", "-O", "/dev/null", page]});
            } else {
                let path = format!("/{}", name(n));
                probe["httpGet"] = json!({"host": "127.0.0.1", "port": port, "path": path});
            }
            spec["containers"][0]["readinessProbe"] = probe;
            self.cluster.create_pod(&name(n), spec);
        }
        for n in 0..COUNT {
            self.cluster.wait_running(&name(n));
        }
    }

    /// The ordinary pods' containers.
    pub fn containers(&self) -> BTreeMap<(String, String), String> {
        let mut all = ids(&self.cluster.containers());
        all.retain(|(pod, _), _| pod.starts_with("ordinary-"));
        all
    }

    /// Replaces the agent by a new process, so that its memory is not what an earlier tenant made of it.
    pub fn renew(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            let (status, _) = agent.terminate();
            assert!(status.success(), "{status}: {}", agent.log());
        }
        self.agent = Some(self.cluster.start());
        nix::unistd::sync();
        std::thread::sleep(SETTLE);
    }

    pub fn agent(&self) -> &Agent {
        self.agent.as_ref().expect("an agent")
    }

    /// Measures the ordinary pods as they are now. `memory` has watched for as long as the caller wants.
    pub fn measure(&self, memory: Watched) -> Figures {
        let disk = Disk::watch(&self.cluster.dir().join("written"));
        let (from, busy) = (Instant::now(), crate::figures::cpu(self.agent()));
        std::thread::sleep(STILL);
        let share = (crate::figures::cpu(self.agent()) - busy) / from.elapsed().as_secs_f64();
        let (starts, deletions) = self.churn();
        let to = Instant::now();
        let disk = disk.end();
        let lateness = Times {
            with: self.pages.lateness((BY_EXEC..COUNT).map(name), from, to),
            without: self.pages.lateness((0..BESIDE).map(beside), from, to),
        };
        let commands = self.pages.lateness((0..BY_EXEC).map(name), from, to);
        let alone = (0..ALONE).map(|_| bare::one_pod(&self.cluster, FOREVER));
        let (bare_starts, bare_deletions): (Vec<_>, Vec<_>) = alone.unzip();
        Figures {
            lateness,
            commands: Times {
                with: commands,
                // A command is started by the runtime, as a pod is.
                without: bare_starts.clone(),
            },
            starts: Times {
                with: starts,
                without: bare_starts,
            },
            deletions: Times {
                with: deletions,
                without: bare_deletions,
            },
            disk,
            memory: memory.end(),
            share,
        }
    }

    /// Ordinary pods come and go: how long each took until it was Ready, and how long until it was gone.
    fn churn(&self) -> (Vec<Duration>, Vec<Duration>) {
        let begun = Instant::now();
        let lane = || async {
            let (mut starts, mut deletions) = (Vec::new(), Vec::new());
            while begun.elapsed() < CHURN {
                let (start, deletion) = self.life().await;
                starts.push(start);
                deletions.push(deletion);
            }
            (starts, deletions)
        };
        let lanes = futures::future::join_all((0..LANES).map(|_| lane()));
        let (starts, deletions): (Vec<_>, Vec<_>) = self.cluster.run(lanes).into_iter().unzip();
        (starts.concat(), deletions.concat())
    }

    /// One pod from its creation until it is gone.
    async fn life(&self) -> (Duration, Duration) {
        let pods: Api<Pod> = self.cluster.api();
        let n = self.lives.fetch_add(1, Ordering::Relaxed);
        let pod = format!("passing-{n}");
        let mut spec = ordinary();
        spec["nodeName"] = json!(self.cluster.node);
        let object = json!({"metadata": {"name": pod}, "spec": spec});
        let object: Pod = serde_json::from_value(object).expect("a pod");
        let begun = Instant::now();
        let created = pods.create(&PostParams::default(), &object).await;
        let created = created.expect("create a pod");
        let parameters = WatchParams::default()
            .fields(&format!("metadata.name={pod}"))
            .timeout(290);
        let version = created.metadata.resource_version.unwrap_or_default();
        let watch = pods.watch(&parameters, &version).await;
        let mut events = watch.expect("watch a pod").boxed();
        let mut next = async || {
            let event = tokio::time::timeout(PATIENCE, events.next()).await;
            let event = event.unwrap_or_else(|_| panic!("nothing happens to {pod}"));
            event.expect("the watch goes on").expect("watch a pod")
        };
        loop {
            if let WatchEvent::Modified(pod) = next().await {
                let pod = serde_json::to_value(pod).expect("JSON");
                if condition(&pod, "Ready")["status"] == "True" {
                    break;
                }
            }
        }
        let start = begun.elapsed();
        // Its shell may not have got to its trap, and the first process of a container is deaf without one.
        tokio::time::sleep(PAUSE).await;
        let begun = Instant::now();
        let deleted = pods.delete(&pod, &DeleteParams::default()).await;
        deleted.expect("delete a pod");
        while !matches!(next().await, WatchEvent::Deleted(_)) {}
        (start, begun.elapsed())
    }

    /// Deletes every pod of the tenant and waits until none is left.
    pub fn evict_tenant(&self) {
        let pods: Api<Pod> = self.cluster.api();
        let of = ListParams::default().labels("tenant=hostile");
        let grace = DeleteParams::default().grace_period(1);
        self.cluster
            .run(pods.delete_collection(&grace, &of))
            .expect("delete the tenant's pods");
        eventually("the tenant's pods are gone", || {
            let left = self.cluster.run(pods.list(&of)).expect("list pods");
            match left.items.len() {
                0 => Ok(()),
                count => Err(format!("{count} are left")),
            }
        });
    }

    /// Watches the agent's memory from now on.
    pub fn watch_memory(&self) -> Watched {
        let pid = i32::try_from(self.agent().pid()).expect("a pid");
        let (peak, stop) = (
            Arc::new(AtomicU64::new(0)),
            Arc::new(AtomicBool::new(false)),
        );
        let (highest, stopped) = (Arc::clone(&peak), Arc::clone(&stop));
        std::thread::spawn(move || {
            let process = procfs::process::Process::new(pid).expect("the agent runs");
            while !stopped.load(Ordering::Relaxed) {
                let status = process.status().expect("the agent runs");
                highest.fetch_max(status.vmrss.unwrap_or(0), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        Watched { peak, stop }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.monitoring.abort();
    }
}

/// Writes to the disk now and then, as the agent does, and measures how long it takes.
struct Disk {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Vec<Duration>>,
}

impl Disk {
    fn watch(path: &Path) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let mut file = std::fs::File::create(path).expect("make a file");
        let thread = std::thread::spawn(move || {
            let mut times = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                std::thread::sleep(WRITE);
                let begun = Instant::now();
                file.write_all(&[0; 4096]).expect("write to the disk");
                file.sync_data().expect("write to the disk");
                times.push(begun.elapsed());
            }
            times
        });
        Self { stop, thread }
    }

    fn end(self) -> Vec<Duration> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("write to the disk")
    }
}

/// See [`Node::watch_memory`].
pub struct Watched {
    peak: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
}

impl Watched {
    fn end(self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
