//! Pods with init containers, a sidecar and probes, whose agent is killed.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};

use holdfast_testkit::fake_api::{FakeApi, Served};
use holdfast_testkit::fake_cri::ExecResult;
use k8s_openapi::api::core::v1::PodStatus;
use serde_json::json;

use super::agent_process::NODE;
use super::rich_pod::*;
use super::*;

/// Commands that were run in containers, and how they end.
#[derive(Clone, Default)]
struct Commands {
    /// (exit code, duration in milliseconds) by command; else 0 at once.
    set: Arc<Mutex<BTreeMap<String, (i32, u64)>>>,
    /// When a command was run.
    runs: Arc<Mutex<Vec<(String, Instant)>>>,
}

impl Commands {
    fn of(node: &Node) -> Self {
        let commands = Self::default();
        let inner = commands.clone();
        node.fake.on_exec(move |_, command| {
            let name = command[0].clone();
            let set = inner.set.lock().unwrap().get(&name).copied();
            inner.runs.lock().unwrap().push((name, Instant::now()));
            let (code, takes) = set.unwrap_or_default();
            ExecResult {
                code,
                takes: Duration::from_millis(takes),
                ..ExecResult::default()
            }
        });
        commands
    }

    fn set(&self, command: &str, code: i32, takes_ms: u64) {
        let mut set = self.set.lock().unwrap();
        set.insert(command.to_owned(), (code, takes_ms));
    }

    fn times(&self, command: &str) -> Vec<Instant> {
        let runs = self.runs.lock().unwrap();
        let of_command = runs.iter().filter(|(ran, _)| ran == command);
        of_command.map(|(_, at)| *at).collect()
    }

    fn count(&self, command: &str) -> usize {
        self.times(command).len()
    }

    fn wait_count(&self, command: &str, count: usize) {
        eventually(&format!("{command} runs"), || {
            let found = self.count(command);
            (found >= count)
                .then_some(())
                .ok_or_else(|| format!("{found} times"))
        });
    }

    fn clear(&self) {
        self.runs.lock().unwrap().clear();
    }
}

fn name_of(config: &v1::ContainerConfig) -> (&str, u32) {
    let meta = config.metadata.as_ref();
    meta.map_or(("", 0), |m| (m.name.as_str(), m.attempt))
}

fn ends(code: i32) -> Behaviour {
    Behaviour::Exit {
        code,
        after: Duration::from_millis(100),
    }
}

/// Init containers end well, all others run on.
fn usual(config: &v1::ContainerConfig) -> Behaviour {
    if name_of(config).0.starts_with('i') {
        ends(0)
    } else {
        Behaviour::RunForever
    }
}

impl Node {
    fn pod(&self, name: &str, spec: &Value) {
        let pod =
            json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec});
        self.site
            .write_manifest(&format!("{name}.json"), &pod.to_string());
    }

    fn summary(&self, pod: &str) -> Result<Vec<String>, String> {
        let status: PodStatus =
            serde_json::from_value(self.site.status(pod)?).map_err(|e| e.to_string())?;
        Ok(summary(&status))
    }

    #[track_caller]
    fn wait_summary(&self, pod: &str, want: &[&str]) {
        eventually(&format!("{pod} is {want:#?}"), || {
            let found = self.summary(pod)?;
            (found == want)
                .then_some(())
                .ok_or_else(|| format!("{found:#?}"))
        });
    }

    /// Names of the containers whose start was asked for since the last `clear_calls`.
    fn started(&self) -> Vec<String> {
        let ids = self.starts();
        ids.iter()
            .map(|id| match self.fake.config(id) {
                Some(config) => name_of(&config).0.to_owned(),
                None => format!("{id}, which is gone"),
            })
            .collect()
    }

    /// The ID of the running container of that name.
    fn running_one(&self, pod: &str, container: &str) -> Option<String> {
        let mut found = self.fake.running(&format!("{pod}-{NODE}"), container);
        found.pop().map(|c| c.id)
    }
}

// ------------------------------------------------------------------------------------------------ R1

#[test]
fn restart_keeps_a_pod_with_a_sidecar_and_probes_ready() {
    let node = Node::with(usual);
    let commands = Commands::of(&node);
    node.pod("web", &rich_every("Always", 1));
    let agent = node.site.start();
    node.wait_summary("web", &UP);
    let running = node.running();
    assert_eq!(node.started(), ["i1", "side", "i2", "main"]);
    wait_relists(&agent, 2.0);
    let told = node.site.row("statuses", "web").unwrap();
    node.site.recorded();
    agent.kill9();
    for _ in 0..2 {
        node.fake.clear_calls();
        commands.clear();
        let agent = node.site.start();
        for probe in ["side-ready", "side-alive", "main-ready", "main-alive"] {
            commands.wait_count(probe, 2);
        }
        agent.kill9();
        assert_eq!(node.effects(), []);
        assert_eq!(node.running(), running);
        assert_eq!(node.site.row("statuses", "web").unwrap(), told);
        assert_eq!(commands.count("side-up") + commands.count("main-up"), 0);
    }
}

// ------------------------------------------------------------------------------------------------ R9

/// Two of three failures of the sidecar's liveness probe are counted, the main container is not ready; after the
/// restart a third failure, and no more, replaces the sidecar.
#[test]
fn restart_keeps_what_was_counted_of_probes() {
    const PERIOD: u64 = 5;
    let node = Node::with(usual);
    let commands = Commands::of(&node);
    node.pod("web", &rich_every("Always", PERIOD));
    let agent = node.site.start();
    node.wait_summary("web", &UP);
    let side = node.running_one("web", "side").unwrap();
    let main = node.running_one("web", "main").unwrap();
    commands.clear();
    commands.set("side-alive", 1, 0);
    commands.wait_count("side-alive", 2);
    eventually("two failures are counted", || {
        let dump = node.site.try_dump(&["probes"])?;
        let rows = dump["tables"]["probes"].as_array().ok_or("no table")?;
        let found = rows
            .iter()
            .any(|r| r["last"] == "Failure" && r["consecutive"] == 2);
        found.then_some(()).ok_or_else(|| dump.to_string())
    });
    node.site.recorded();
    agent.kill9();
    let before = commands.count("side-alive");
    let _agent = node.site.start();
    assert_eq!(node.summary("web").unwrap(), UP);
    eventually("the sidecar is another one", || {
        let now = node.running_one("web", "side");
        now.filter(|id| *id != side)
            .map(drop)
            .ok_or_else(|| "it is not".to_owned())
    });
    commands.set("side-alive", 0, 0);
    let times = commands.times("side-alive");
    assert_eq!(before, 2);
    assert!(times.len() >= 3, "{}", times.len());
    let apart = (times[2] - times[1]).as_secs_f64();
    assert!(
        (apart / PERIOD as f64).fract() < 0.4 || (apart / PERIOD as f64).fract() > 0.9,
        "out of phase: {apart} s"
    );
    node.wait_summary(
        "web",
        &[
            UP[0],
            UP[1],
            "side running x1 ready started, before: ended 0 Completed",
            UP[3],
            UP[4],
        ],
    );
    assert_eq!(node.running_one("web", "main"), Some(main));
}

/// Not ready, and not started yet: no restart makes either of it, and the pod gets no further.
#[test]
fn restart_keeps_a_pod_not_ready_and_a_sidecar_in_its_startup() {
    let node = Node::with(usual);
    let commands = Commands::of(&node);
    commands.set("side-up", 1, 0);
    node.pod("web", &rich_every("Always", 1));
    let agent = node.site.start();
    let starting = [
        "Pending",
        UP[1],
        "side running x0",
        "i2 waits PodInitializing x0",
        "main waits PodInitializing x0",
    ];
    node.wait_summary("web", &starting);
    node.site.recorded();
    agent.kill9();
    node.fake.clear_calls();
    commands.clear();
    let agent = node.site.start();
    commands.wait_count("side-up", 2);
    assert_eq!(node.summary("web").unwrap(), starting);
    assert_eq!(node.effects(), []);
    commands.set("main-ready", 1, 0);
    commands.set("side-up", 0, 0);
    let not_ready = [
        "Running Initialized",
        UP[1],
        UP[2],
        UP[3],
        "main running x0 started",
    ];
    node.wait_summary("web", &not_ready);
    node.site.recorded();
    agent.kill9();
    node.fake.clear_calls();
    commands.clear();
    let _agent = node.site.start();
    commands.wait_count("main-ready", 2);
    assert_eq!(node.summary("web").unwrap(), not_ready);
    assert_eq!(node.effects(), []);
    commands.set("main-ready", 0, 0);
    node.wait_summary("web", &UP);
}

// ------------------------------------------------------------------------------------------------ R5

/// The main container of a pod that runs once has ended while the agent was away, and is gone.
#[test]
fn restart_keeps_a_vanished_container_beside_a_sidecar_from_running_again() {
    let node = Node::with(usual);
    let _commands = Commands::of(&node);
    node.pod("once", &rich_every("Never", 1));
    let agent = node.site.start();
    node.wait_summary("once", &UP);
    agent.kill9();
    let id = node.running_one("once", "main").unwrap();
    node.fake.exit(&id, 0);
    node.fake.remove(&id);
    node.fake.clear_calls();
    let _agent = node.site.start();
    node.wait_summary(
        "once",
        &[
            "Failed Initialized",
            UP[1],
            "side ended 0 Completed x0",
            UP[3],
            "main ended 137 ContainerStatusUnknown x0",
        ],
    );
    assert_eq!(node.started(), Vec::<String>::new());
    assert_eq!(node.running(), Vec::<String>::new());
}

// ------------------------------------------------------------------------------------------------ R6

/// A node of a cluster whose API server comes and goes.
pub struct Cluster {
    pub node: Node,
    pub api: FakeApi,
    _served: Served,
    pub kubeconfig: String,
}

impl Cluster {
    pub fn new() -> Self {
        let node = Node::with(usual);
        let guard = node.runtime.enter();
        let api = FakeApi::new();
        drop(guard);
        for object in [
            json!({"apiVersion": "v1", "kind": "Service",
                "metadata": {"name": "kubernetes", "namespace": "default"},
                "spec": {"clusterIP": "10.0.0.1", "ports": [{"port": 443}]}}),
            json!({"apiVersion": "v1", "kind": "ServiceAccount",
                "metadata": {"name": "default", "namespace": "default"}}),
        ] {
            api.create_json(object);
        }
        let any = (Ipv4Addr::LOCALHOST, 0).into();
        let served = node.runtime.block_on(api.serve(any)).unwrap();
        let path = node.site.dir().join("kubeconfig");
        let text = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": served.url()}}],
            "users": [{"name": "c", "user": {"token": format!("node:{NODE}")}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
        });
        fs::write(&path, text.to_string()).unwrap();
        Self {
            node,
            api,
            _served: served,
            kubeconfig: path.to_string_lossy().into_owned(),
        }
    }

    pub fn start(&self) -> Agent {
        self.node
            .site
            .start_with(&["--kubeconfig", &self.kubeconfig])
    }

    pub fn create(&self, name: &str, mut spec: Value) {
        spec["nodeName"] = NODE.into();
        spec["serviceAccountName"] = "default".into();
        self.api.create_json(json!({
            "apiVersion": "v1", "kind": "Pod", "spec": spec,
            "metadata": {"name": name, "namespace": "default"},
        }));
    }

    fn shown(&self, name: &str) -> Vec<String> {
        let pod = self.api.get_json("pods", "default", name);
        let status = pod.map(|p| p["status"].clone()).unwrap_or_default();
        summary(&serde_json::from_value(status).unwrap_or_default())
    }

    #[track_caller]
    fn wait_shown(&self, name: &str, want: &[&str]) {
        eventually(&format!("{name} is shown as {want:#?}"), || {
            let found = self.shown(name);
            (found == want)
                .then_some(())
                .ok_or_else(|| format!("{found:#?}"))
        });
    }

    /// Rows of a table that are about a pod of the API server.
    fn phase(&self, name: &str) -> Result<String, String> {
        let dump = self.node.site.try_dump(&["statuses"])?;
        let rows = dump["tables"]["statuses"].as_array().ok_or("no table")?;
        let row = rows.iter().find(|r| r["name"] == name);
        let phase = row.and_then(|r| r["status"]["phase"].as_str());
        Ok(phase.unwrap_or("nothing").to_owned())
    }

    /// Puts more into the pod's volume than it may hold.
    fn fill_volume(&self, name: &str) {
        let pod = self.api.get_json("pods", "default", name).unwrap();
        fill_volume(&self.node.site, pod["metadata"]["uid"].as_str().unwrap());
    }
}

/// With a volume that holds one mebibyte.
fn limited(mut spec: Value) -> Value {
    spec["volumes"] = json!([{"name": "scratch", "emptyDir": {"sizeLimit": "1Mi"}}]);
    let mount = json!([{"name": "scratch", "mountPath": "/scratch"}]);
    member(&mut spec, "main")["volumeMounts"] = mount;
    spec
}

fn fill_volume(site: &Site, uid: &str) {
    let volume = format!("pods/{uid}/volumes/kubernetes.io~empty-dir/scratch/data");
    fs::write(site.root_dir().join(volume), vec![7; 3 << 20]).unwrap();
}

const EVICTED: [&str; 5] = [
    "Failed Evicted Initialized",
    UP[1],
    "side ended 0 Completed x0",
    UP[3],
    "main ended 0 Completed x0",
];

#[test]
fn restart_keeps_an_eviction_and_an_exit_code_for_the_api() {
    let cluster = Cluster::new();
    let node = &cluster.node;
    let _commands = Commands::of(node);
    let agent = cluster.start();
    cluster.create("victim", limited(rich_every("Always", 1)));
    cluster.create("job", rich_every("Never", 1));
    cluster.wait_shown("victim", &UP);
    cluster.wait_shown("job", &UP);
    cluster.api.set_down(Some("connection refused"));
    let main = node.fake.running("job", "main").remove(0).id;
    node.fake.exit(&main, 3);
    cluster.fill_volume("victim");
    for pod in ["victim", "job"] {
        eventually("its end is on record", || {
            let phase = cluster.phase(pod)?;
            (phase == "Failed").then_some(()).ok_or(phase)
        });
    }
    agent.kill9();
    assert_eq!(cluster.shown("victim"), UP, "it knows nothing yet");
    let guard = node.runtime.enter();
    node.fake.restart(Restart::Wipe).unwrap();
    drop(guard);
    node.fake.clear_calls();
    let agent = cluster.start();
    wait_relists(&agent, 2.0);
    cluster.api.set_down(None);
    cluster.wait_shown("victim", &EVICTED);
    cluster.wait_shown(
        "job",
        &[
            "Failed Initialized",
            UP[1],
            "side ended 0 Completed x0",
            UP[3],
            "main ended 3 Error x0",
        ],
    );
    assert_eq!(node.started(), Vec::<String>::new());
}

// ----------------------------------------------------------------------------------------------- R10

#[test]
fn restart_keeps_the_grace_and_the_hooks_of_a_pod_with_a_sidecar() {
    const GRACE: u64 = 8;
    let node = Node::with(|config| match usual(config) {
        Behaviour::RunForever => Behaviour::IgnoreTerm,
        other => other,
    });
    let commands = Commands::of(&node);
    let mut spec = rich_every("Always", 1);
    spec["terminationGracePeriodSeconds"] = GRACE.into();
    for name in ["side", "main"] {
        let command = format!("{name}-stop");
        member(&mut spec, name)["lifecycle"] = json!({"preStop": {"exec": {"command": [command]}}});
    }
    commands.set("main-stop", 0, 500);
    commands.set("side-stop", 0, 3_600_000);
    node.pod("slow", &spec);
    let agent = node.site.start();
    node.wait_summary("slow", &UP);
    node.site.remove_manifest("slow.json");
    commands.wait_count("main-stop", 1);
    commands.wait_count("side-stop", 1);
    let begun = commands.times("main-stop")[0];
    eventually("the main container's hook is on record", || {
        let row = node.site.try_dump(&["containers"])?.to_string();
        row.contains("/preStop").then_some(()).ok_or(row)
    });
    while begun.elapsed() < Duration::from_secs(GRACE / 2) {
        std::thread::sleep(Duration::from_millis(50));
    }
    agent.kill9();
    let _agent = node.site.start();
    commands.wait_count("side-stop", 2);
    eventually("main is killed", || {
        let running = node.running_one("slow", "main");
        running.map_or(Ok(()), Err)
    });
    let main = begun.elapsed().as_secs_f64();
    assert!(node.running_one("slow", "side").is_some(), "it goes last");
    eventually("the sidecar is killed", || {
        let running = node.running_one("slow", "side");
        running.map_or(Ok(()), Err)
    });
    let side = begun.elapsed().as_secs_f64();
    let grace = GRACE as f64;
    // Begun anew it would be half of it more.
    assert!((grace - 0.5..grace + 3.5).contains(&main), "{main} s");
    assert!((grace..grace + 5.0).contains(&side), "{side} s");
    assert_eq!(commands.count("main-stop"), 1, "it had completed");
    assert_eq!(commands.count("side-stop"), 2);
}

// ----------------------------------------------------------------------------------------------- R11

#[test]
fn restart_keeps_every_restart_count_when_the_runtime_forgot_everything() {
    let node = Node::with(|config| match name_of(config) {
        ("i1" | "side", 0) | ("main", 0..2) => ends(4),
        _ => usual(config),
    });
    node.site
        .configure("cgroupsPerQOS: false\ncrashLoopBackOff:\n  maxContainerRestartPeriod: 1s\n");
    let _commands = Commands::of(&node);
    node.pod("count", &rich_every("Always", 1));
    let agent = node.site.start();
    let want = [
        UP[0],
        "i1 ended 0 Completed x1 ready, before: ended 4 Error",
        "side running x1 ready started, before: ended 4 Error",
        UP[3],
        "main running x2 ready started, before: ended 4 Error",
    ];
    node.wait_summary("count", &want);
    agent.kill9();
    let guard = node.runtime.enter();
    node.fake.restart(Restart::Wipe).unwrap();
    drop(guard);
    fs::remove_dir_all(node.site.pod_logs()).unwrap();
    node.fake.clear_calls();
    let _agent = node.site.start();
    let unknown = "before: ended 137 ContainerStatusUnknown";
    let side = format!("side running x2 ready started, {unknown}");
    let main = format!("main running x3 ready started, {unknown}");
    node.wait_summary(
        "count",
        &[
            UP[0],
            "i1 ended 0 Completed x2 ready, before: ended 0 Completed",
            &side,
            "i2 ended 0 Completed x1 ready, before: ended 0 Completed",
            &main,
        ],
    );
    assert_eq!(node.started(), ["i1", "side", "i2", "main"]);
}

// ----------------------------------------------------------------------------------------------- R12

/// Dies at the n-th passage of a fail point, for each of the pod's containers, and finds everything as it was.
fn in_order_wherever_cut_off(point: &str, passages: usize) {
    for n in 1..=passages {
        let node = Node::with(usual);
        let commands = Commands::of(&node);
        let mut spec = rich_every("Never", 1);
        for name in ["side", "main"] {
            let command = format!("{name}-hook");
            member(&mut spec, name)["lifecycle"] =
                json!({"postStart": {"exec": {"command": [command]}}});
        }
        node.pod("once", &spec);
        node.die_at(&format!("{point}:{n}"));
        let _agent = node.site.start();
        node.wait_summary("once", &UP);
        assert_eq!(node.started(), ["i1", "side", "i2", "main"], "{point}:{n}");
        assert_eq!(node.fake.containers().len(), 4, "{point}:{n}");
        assert_eq!(node.fake.sandboxes().len(), 1, "{point}:{n}");
        for hook in ["side-hook", "main-hook"] {
            let runs = commands.count(hook);
            assert!((1..=2).contains(&runs), "{hook} {runs} {point}:{n}");
        }
    }
}

#[test]
fn restart_keeps_init_containers_in_order_when_killed_after_a_creation() {
    in_order_wherever_cut_off("pod_workers::start::after_create", 4);
}

#[test]
fn restart_keeps_init_containers_in_order_when_killed_after_an_intent() {
    in_order_wherever_cut_off("pod_workers::start::after_intent", 4);
}

#[test]
fn restart_keeps_init_containers_in_order_when_killed_after_a_start() {
    in_order_wherever_cut_off("pod_workers::start::after_start", 4);
}

#[test]
fn restart_keeps_init_containers_in_order_when_killed_at_a_hook() {
    in_order_wherever_cut_off("pod_workers::hook::before_post_start", 2);
    in_order_wherever_cut_off("pod_workers::hook::after_post_start", 2);
}

// ----------------------------------------------------------------------------------------------- R20

/// A static pod is evicted, which nothing but a drill does to one; the agent is killed, and the pod stays evicted
/// until its manifest is another one.
#[test]
fn restart_keeps_an_evicted_pod_evicted_until_its_manifest_changes() {
    let node = Node::with(usual);
    let _commands = Commands::of(&node);
    node.pod("victim", &rich_every("Always", 1));
    let evict = node.site.root_dir().with_file_name("evict");
    let drill = [("HOLDFAST_EVICT", &*evict.to_string_lossy())];
    let mut agent = node.site.spawn_with(&[], &drill);
    agent.wait_ready();
    node.wait_summary("victim", &UP);
    let victim = node.site.row("statuses", "victim").unwrap();
    fs::write(&evict, victim["name"].as_str().unwrap()).unwrap();
    node.wait_summary("victim", &EVICTED);
    agent.kill9();
    node.fake.clear_calls();
    for _ in 0..2 {
        let agent = node.site.start();
        wait_relists(&agent, 2.0);
        agent.kill9();
        assert_eq!(node.summary("victim").unwrap(), EVICTED);
        assert_eq!(node.started(), Vec::<String>::new());
        assert_eq!(node.running(), Vec::<String>::new());
    }
    let _agent = node.site.start();
    node.pod("victim", &rich_every("Always", 2));
    eventually("the new manifest runs", || {
        node.running_one("victim", "main")
            .map(drop)
            .ok_or_else(|| "it does not".to_owned())
    });
    assert_eq!(node.started(), ["i1", "side", "i2", "main"]);
}
