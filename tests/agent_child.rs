//! The real binary on a fake runtime, killed with SIGKILL at its fail points and started again.
//!
//! It has the fail points by the package feature `failpoints`, which only crash tests turn on; that way what
//! is killed is the program that is shipped, main thread, store thread and sockets included.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    unreachable_pub,
    reason = "a test fails by panicking"
)]
#![allow(
    clippy::disallowed_methods,
    reason = "child processes live in real time"
)]

#[path = "support/agent_process.rs"]
mod agent_process;
#[path = "agent_child/claim_kills.rs"]
mod claim_kills;
#[path = "agent_child/claims.rs"]
mod claims;
#[path = "agent_child/device_kills.rs"]
mod device_kills;
#[path = "agent_child/devices.rs"]
mod devices;
#[path = "agent_child/full_disk.rs"]
mod full_disk;
#[path = "agent_child/hostile.rs"]
mod hostile;
#[path = "support/hostile_node.rs"]
mod hostile_node;
#[path = "agent_child/late_disk.rs"]
mod late_disk;
#[path = "agent_child/node_settings.rs"]
mod node_settings;
#[path = "agent_child/odd_node.rs"]
mod odd_node;
#[path = "support/rich_pod.rs"]
mod rich_pod;
#[path = "agent_child/rows.rs"]
mod rows;
#[path = "agent_child/running.rs"]
mod running;
#[path = "agent_child/sub_paths.rs"]
mod sub_paths;
#[path = "agent_child/wall_clock.rs"]
mod wall_clock;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::{Duration, Instant};

use agent_process::{Agent, PATIENCE, Site, eventually};
use holdfast::kuberuntime::cri::v1;
use holdfast_testkit::fake_cri::{Behaviour, Call, FakeCri, Pull, Restart};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;
use serde_json::Value;
use tonic::Code;

holdfast_testkit::device_plugin_process!();
holdfast_testkit::dra_driver_process!();

const IMAGE: &str = "holdfast.local/busybox:1";

/// A fake runtime on a socket, served by a tokio runtime of its own.
struct Node {
    site: Site,
    fake: FakeCri,
    runtime: tokio::runtime::Runtime,
}

impl Node {
    /// Containers do what is said of their attempt.
    fn new(behaviour: impl Fn(u32) -> Behaviour + Send + Sync + 'static) -> Self {
        Self::with(move |config| behaviour(config.metadata.as_ref().map_or(0, |m| m.attempt)))
    }

    fn with(behaviour: impl Fn(&v1::ContainerConfig) -> Behaviour + Send + Sync + 'static) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let guard = runtime.enter();
        let fake = FakeCri::new();
        fake.add_image(IMAGE);
        // Listed each second instead: that is what a test can wait for.
        fake.offer_events(false);
        fake.on_start(behaviour);
        drop(guard);
        // The socket has to be outside: the site's directory is made with the site.
        let socket = tempfile::Builder::new()
            .prefix("hf-child-")
            .tempdir()
            .unwrap()
            .keep()
            .join("cri.sock");
        let site = Site::new(&format!("unix://{}", socket.display()));
        site.configure("cgroupsPerQOS: false\n");
        let guard = runtime.enter();
        fake.serve(&socket).unwrap();
        drop(guard);
        Self {
            site,
            fake,
            runtime,
        }
    }

    fn manifest(&self, pod: &str, policy: &str) {
        self.site
            .write_manifest(&format!("{pod}.json"), &Self::manifest_text(pod, policy));
    }

    fn manifest_text(pod: &str, policy: &str) -> String {
        format!(
            r#"{{"apiVersion":"v1","kind":"Pod","metadata":{{"name":"{pod}"}},"spec":{{"restartPolicy":"{policy}","containers":[{{"name":"main","image":"{IMAGE}"}}]}}}}"#
        )
    }

    /// Starts an agent that kills itself at a fail point, and waits for that.
    fn die_at(&self, point: &str) {
        let mut agent = self.site.spawn_with(&[], &[("HOLDFAST_DIE_AT", point)]);
        let status = agent.wait_exit(PATIENCE);
        assert_eq!(status.signal(), Some(9), "{point}: {}", agent.log());
    }

    fn running(&self) -> Vec<String> {
        let mut ids: Vec<String> = self
            .fake
            .containers()
            .into_iter()
            .filter(|c| c.state() == v1::ContainerState::ContainerRunning)
            .map(|c| c.id)
            .collect();
        ids.sort();
        ids
    }

    fn wait_running(&self, count: usize) -> Vec<String> {
        eventually("containers run", || {
            let running = self.running();
            if running.len() == count {
                Ok(running)
            } else {
                Err(format!("{} run", running.len()))
            }
        })
    }

    /// Containers whose start was asked for since the last `clear_calls`.
    fn starts(&self) -> Vec<String> {
        let calls = self.fake.calls();
        let starts = calls.iter().filter(|c| c.operation == "start_container");
        starts.map(|c| c.object.clone()).collect()
    }

    /// The agent looks again and again without changing anything.
    fn assert_quiet(&self, agent: &Agent) {
        self.fake.clear_calls();
        wait_relists(agent, 2.0);
        assert_eq!(self.effects(), []);
    }

    /// Calls since the last `clear_calls` that change something.
    fn effects(&self) -> Vec<Call> {
        let mut calls = self.fake.calls();
        calls.retain(|c| {
            ["run_", "stop_", "remove_", "create_", "start_", "pull_"]
                .iter()
                .any(|p| c.operation.starts_with(p))
        });
        calls
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(dir) = self
            .fake
            .socket()
            .as_deref()
            .and_then(std::path::Path::parent)
        {
            // Leftovers in the temporary directory fail no test.
            drop(fs::remove_dir_all(dir));
        }
        let _guard = self.runtime.enter();
        self.fake.stop();
    }
}

/// As the watchdog of systemd ends an agent that hangs.
#[test]
fn an_agent_that_is_aborted_leaves_no_core_file() {
    // Its limit would be this one, and whoever raises it again gets no core file either.
    let (_, most) = getrlimit(Resource::RLIMIT_CORE).unwrap();
    setrlimit(Resource::RLIMIT_CORE, most, most).unwrap();
    let node = Node::new(|_| Behaviour::RunForever);
    let mut agent = node.site.start();
    let limits = fs::read_to_string(format!("/proc/{}/limits", agent.pid())).unwrap();
    // As far as this machine's root may: without CAP_SYS_RESOURCE the limit stays.
    let raised = Command::new("prlimit")
        .args(["--core=unlimited", "--pid", &agent.pid().to_string()])
        .output();
    drop(raised.unwrap());
    agent.signal(Signal::SIGABRT);
    let status = agent.wait_exit(PATIENCE);
    assert_eq!(status.signal(), Some(6), "{}", agent.log());
    assert!(!status.core_dumped());
    // What it starts inherits the limit.
    let limit = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max core file size"))
        .unwrap();
    let bytes: Vec<&str> = limit.split_whitespace().take(2).collect();
    assert_eq!(bytes, ["0", "0"]);
}

#[test]
fn restart_keeps_a_container_from_being_started_twice_wherever_its_start_is_cut_off() {
    for point in [
        "pod_workers::start::after_create",
        "pod_workers::start::after_intent",
        "pod_workers::start::after_start",
        "store::commit::before_write:3",
        "store::flush::before_publish:2",
        "store::flush::before_publish:3",
        "store::commit::after_publish:4",
    ] {
        let node = Node::new(|_| Behaviour::RunForever);
        node.manifest("once", "Never");
        node.die_at(point);
        let _agent = node.site.start();
        node.wait_running(1);
        node.site.wait_phase("once", "Running");
        let starts = node.starts();
        let distinct: BTreeSet<_> = starts.iter().collect();
        assert_eq!(
            (starts.len(), distinct.len()),
            (1, 1),
            "{point}: {starts:?}"
        );
        assert_eq!(node.fake.containers().len(), 1, "{point}");
        assert_eq!(node.fake.sandboxes().len(), 1, "{point}");
    }
}

#[test]
fn restart_keeps_a_finished_pod_finished_when_killed_while_it_is_recorded() {
    // From the second start on, a write at a time: one of them is that of the end.
    for nth in 1..=4 {
        let node = Node::new(|_| Behaviour::RunForever);
        node.manifest("once", "Never");
        let agent = node.site.start();
        let id = node.wait_running(1).remove(0);
        node.site.wait_phase("once", "Running");
        agent.kill9();
        node.fake.exit(&id, 0);
        node.die_at(&format!("store::flush::before_publish:{nth}"));
        let _agent = node.site.start();
        node.site.wait_phase("once", "Succeeded");
        assert_eq!(node.starts().len(), 1, "nth {nth}");
        assert_eq!(node.running(), Vec::<String>::new());
    }
}

#[test]
fn restart_keeps_a_vanished_container_from_running_again() {
    let node = Node::new(|_| Behaviour::RunForever);
    node.manifest("once", "Never");
    let agent = node.site.start();
    let id = node.wait_running(1).remove(0);
    node.site.wait_phase("once", "Running");
    agent.kill9();
    node.fake.exit(&id, 0);
    node.fake.remove(&id);
    let _agent = node.site.start();
    node.site.wait_phase("once", "Failed");
    assert_eq!(node.starts().len(), 1);
    let status = node.site.container_status("once", "main").unwrap();
    assert_eq!(status["state"]["terminated"]["exitCode"], 137, "{status}");
}

#[test]
fn restart_keeps_restart_count_and_crash_back_off() {
    let node = Node::new(|_| Behaviour::Exit {
        code: 3,
        after: Duration::ZERO,
    });
    node.manifest("crash", "Always");
    let agent = node.site.start();
    eventually("two starts and a back-off", || {
        (node.starts().len() == 2)
            .then_some(())
            .ok_or_else(|| format!("{} starts", node.starts().len()))
    });
    let second = Instant::now();
    agent.kill9();
    let guard = node.runtime.enter();
    node.fake.restart(Restart::Wipe).unwrap();
    drop(guard);
    let _agent = node.site.start();
    eventually("the third start", || {
        (node.starts().len() == 3)
            .then_some(())
            .ok_or_else(|| format!("{} starts", node.starts().len()))
    });
    let waited = second.elapsed();
    assert!(waited >= Duration::from_millis(9_500), "only {waited:?}");
    eventually("the count goes on", || {
        let status = node.site.container_status("crash", "main")?;
        (status["restartCount"] == 2)
            .then_some(())
            .ok_or_else(|| status.to_string())
    });
}

#[test]
fn restart_keeps_an_image_pull_back_off() {
    let node = Node::new(|_| Behaviour::RunForever);
    node.fake.pull(
        "holdfast.local/absent:1",
        Pull::Fails(Code::NotFound, "no such image".to_owned()),
    );
    let manifest = Node::manifest_text("pull", "Always");
    node.site.write_manifest(
        "pull.json",
        &manifest.replace(IMAGE, "holdfast.local/absent:1"),
    );
    let agent = node.site.start();
    let pulls = || node.fake.count("pull_image");
    let wait_pulls = |n| {
        eventually("a pull", || {
            (pulls() == n)
                .then_some(())
                .ok_or_else(|| pulls().to_string())
        });
    };
    wait_pulls(1);
    let failed = Instant::now();
    eventually("the back-off is on record", || {
        let images = node.site.try_dump(&["images"])?.to_string();
        images.contains("10000").then_some(()).ok_or(images)
    });
    agent.kill9();
    let _agent = node.site.start();
    wait_pulls(2);
    let waited = failed.elapsed();
    assert!(waited >= Duration::from_millis(9_500), "only {waited:?}");
}

/// A node on which the pods a, b and c run, its agent, and their containers.
fn three_running() -> (Node, Agent, Vec<String>) {
    let node = Node::new(|_| Behaviour::RunForever);
    for pod in ["a", "b", "c"] {
        node.manifest(pod, "Always");
    }
    let agent = node.site.start();
    let running = node.wait_running(3);
    for pod in ["a", "b", "c"] {
        node.site.wait_phase(pod, "Running");
    }
    (node, agent, running)
}

#[test]
fn restart_keeps_pods_running_when_the_store_is_gone_or_damaged() {
    let (node, mut agent, running) = three_running();
    let db = node.site.state_dir().join("db");
    let damages: [(&str, &str, &dyn Fn()); 6] = [
        ("all gone", "StoreRebuilt", &|| {
            fs::remove_dir_all(node.site.state_dir()).unwrap()
        }),
        ("gone", "StoreRebuilt", &|| fs::remove_dir_all(&db).unwrap()),
        ("truncated", "StoreSalvaged", &|| {
            // Right in the middle of a pod.
            let at = find(&fs::read(db.join("db")).unwrap(), IMAGE).expect("a pod on disk");
            let file = fs::OpenOptions::new().write(true).open(db.join("db"));
            file.unwrap().set_len(at as u64).unwrap();
        }),
        ("overwritten", "StoreSalvaged", &|| {
            let length = fs::metadata(db.join("db")).unwrap().len();
            fs::write(db.join("db"), vec![0xA5; usize::try_from(length).unwrap()]).unwrap();
        }),
        ("unconfigured", "StoreSalvaged", &|| {
            fs::write(db.join("conf"), "nonsense").unwrap()
        }),
        ("of another root directory", "StoreSetAside", &|| {
            fs::remove_dir_all(node.site.root_dir()).unwrap()
        }),
    ];
    for (what, told, damage) in damages {
        agent.kill9();
        damage();
        node.fake.clear_calls();
        agent = node.site.start();
        for pod in ["a", "b", "c"] {
            node.site.wait_phase(pod, "Running");
        }
        assert_eq!(node.running(), running, "{what}: {}", agent.log());
        node.assert_quiet(&agent);
        assert_eq!(node.starts(), Vec::<String>::new(), "{what}");
        let meta = node.site.dump(&["meta"]);
        let epoch = &meta["tables"]["meta"][0]["epoch"];
        assert_eq!(epoch["reason"], "Rebuilt", "{what}: {meta}");
        // Of a configuration that sled can do without nothing is told: the event is that of before.
        let events = store_events(&node.site, 0);
        let newest = events.last().map(|(event, _)| event.as_str());
        assert_eq!(newest, Some(told), "{what}: {events:?}\n{}", agent.log());
    }
    agent.kill9();
}

/// A certificate authority, in PEM.
fn authority() -> String {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    params.self_signed(&key).unwrap().pem()
}

// Invariant STORE-6.
#[test]
fn restart_keeps_pods_running_when_the_node_is_given_to_another_cluster() {
    let node = Node::new(|_| Behaviour::RunForever);
    for pod in ["a", "b"] {
        node.manifest(pod, "Always");
    }
    let kubeconfig = node.site.dir().join("kubeconfig");
    // Nobody answers there.
    let write = |port: u16, authorities: &str| {
        let text = serde_json::json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{"name": "c", "cluster": {
                "server": format!("https://127.0.0.1:{port}"),
                "certificate-authority": "ca.crt",
            }}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        });
        fs::write(node.site.dir().join("ca.crt"), authorities).unwrap();
        fs::write(&kubeconfig, text.to_string()).unwrap();
    };
    let flags = [
        format!("--kubeconfig={}", kubeconfig.display()),
        "--enable-server=false".to_owned(),
    ];
    let flags = flags.each_ref().map(String::as_str);
    let (first, second, third) = (authority(), authority(), authority());
    write(1, &first);
    let mut agent = node.site.start_with(&flags);
    let running = node.wait_running(2);
    for pod in ["a", "b"] {
        node.site.wait_phase(pod, "Running");
    }
    let mut epoch = epoch_of(&node.site).0;
    for (what, port, authorities, is_other) in [
        ("nothing", 1, first.clone(), false),
        ("a rotation of the CA", 1, format!("{first}{second}"), false),
        (
            "its end, and the server has moved",
            2,
            second.clone(),
            false,
        ),
        ("in doubt", 2, third.clone(), false),
        ("another cluster", 3, third, true),
    ] {
        agent.kill9();
        write(port, &authorities);
        node.fake.clear_calls();
        agent = node.site.start_with(&flags);
        for pod in ["a", "b"] {
            node.site.wait_phase(pod, "Running");
        }
        assert_eq!(node.running(), running, "{what}: {}", agent.log());
        node.assert_quiet(&agent);
        let (number, reason) = epoch_of(&node.site);
        assert_eq!(number - epoch, u64::from(is_other), "{what}");
        epoch = number;
        let events = store_events(&node.site, 0);
        let set_aside = events
            .iter()
            .any(|(event, why)| event == "StoreSetAside" && why.contains("another cluster"));
        assert_eq!(set_aside, is_other, "{what}: {events:?}\n{}", agent.log());
        if is_other {
            assert_eq!(reason, "Rebuilt");
        }
    }
    agent.kill9();
}

#[test]
fn restart_keeps_pods_running_and_tells_it_when_a_part_of_the_store_is_damaged() {
    let (node, mut agent, running) = three_running();
    let db = node.site.state_dir().join("db/db");
    for round in 1..=2 {
        let epoch = epoch_of(&node.site).0;
        agent.kill9();
        let line = newest_line(&node.site);
        // In the record of a pod, which has the image in it; before and after it there is more.
        let mut bytes = fs::read(&db).unwrap();
        let at = find(&bytes, IMAGE).expect("a pod on disk");
        bytes[at] ^= 0xFF;
        fs::write(&db, bytes).unwrap();
        node.fake.clear_calls();
        agent = node.site.start();
        for pod in ["a", "b", "c"] {
            node.site.wait_phase(pod, "Running");
        }
        assert_eq!(node.running(), running, "{}", agent.log());
        node.assert_quiet(&agent);
        assert_eq!(node.starts(), Vec::<String>::new(), "round {round}");

        let (number, reason) = epoch_of(&node.site);
        assert_eq!((number, reason.as_str()), (epoch + 1, "Rebuilt"));
        let told = agent.metric("holdfast_store_epoch");
        assert!(
            told.total_cmp(&f64::from(u32::try_from(number).unwrap()))
                .is_eq(),
            "{told}"
        );
        let events = store_events(&node.site, line);
        let [(event, why)] = events.as_slice() else {
            panic!("one event about the store: {events:?}\n{}", agent.log());
        };
        assert_eq!(event, "StoreSalvaged");
        assert!(why.starts_with("Warning: Salvaged { kept: "), "{why}");
        let aside = node.site.state_dir().join("quarantine");
        let databases = fs::read_dir(aside).unwrap();
        let databases =
            databases.filter(|entry| entry.as_ref().unwrap().path().join("db").exists());
        assert_eq!(databases.count(), round, "{why}");
    }
}

/// Waits for further full looks at the runtime.
fn wait_relists(agent: &Agent, more: f64) {
    let enough = agent.relists() + more;
    eventually("the agent looks around", || {
        let relists = agent.relists();
        (relists >= enough)
            .then_some(())
            .ok_or_else(|| format!("{relists} relists"))
    });
}

/// Where a text is.
fn find(bytes: &[u8], text: &str) -> Option<usize> {
    let text = text.as_bytes();
    bytes.windows(text.len()).position(|found| found == text)
}

/// Number and reason of the epoch.
fn epoch_of(site: &Site) -> (u64, String) {
    let meta = site.dump(&["meta"]);
    let epoch = &meta["tables"]["meta"][0]["epoch"];
    (
        epoch["number"].as_u64().unwrap(),
        epoch["reason"].as_str().unwrap().to_owned(),
    )
}

/// The newest line of the journal.
fn newest_line(site: &Site) -> u64 {
    let dump = site.dump(&["journal"]);
    let rows = dump["tables"]["journal"].as_array().unwrap();
    rows.last().unwrap()["sequence"].as_u64().unwrap()
}

/// Events about the store after a line of the journal, and what they say.
fn store_events(site: &Site, after: u64) -> Vec<(String, String)> {
    let dump = site.dump(&["journal"]);
    let rows = dump["tables"]["journal"].as_array().unwrap();
    rows.iter()
        .filter(|row| row["sequence"].as_u64() > Some(after))
        .filter_map(|row| {
            let reason = row["what"].as_str()?.strip_prefix("event Store")?;
            Some((format!("Store{reason}"), row["why"].as_str()?.to_owned()))
        })
        .collect()
}

/// `holdfast store migrate --to SCHEMA` of a binary that is one schema ahead of the one under test.
fn migrate_with_newer_binary(site: &Site, to: u32) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_holdfast"))
        .args(["store", "migrate", "--to", &to.to_string(), "--state-dir"])
        .arg(site.state_dir())
        .env("HOLDFAST_NEWER_SCHEMA", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{output:?}");
    said
}

#[test]
fn restart_keeps_pods_and_records_through_an_upgrade_and_a_downgrade_of_the_schema() {
    let node = Node::new(|_| Behaviour::RunForever);
    node.manifest("a", "Always");
    node.manifest("once", "Never");
    let agent = node.site.start();
    node.wait_running(2);
    let once = eventually("the job runs", || {
        let status = node.site.container_status("once", "main")?;
        let id = status["containerID"].as_str().ok_or("no container yet")?;
        let (_, id) = id.split_once("://").ok_or("a container ID has a prefix")?;
        Ok(id.to_owned())
    });
    node.fake.exit(&once, 0);
    node.site.wait_phase("a", "Running");
    node.site.wait_phase("once", "Succeeded");
    // A phase is told before the sandbox is stopped.
    eventually("the job is over", || {
        let journal = node.site.journal("once");
        let over = journal.iter().any(|(what, _)| what == "worker terminated");
        over.then_some(()).ok_or_else(|| format!("{journal:?}"))
    });
    node.site.recorded();
    let running = node.running();
    agent.kill9();
    let tables = ["pods", "admissions", "workers", "containers", "statuses"];
    let records = || {
        let dump = node.site.dump(&tables);
        dump["tables"].clone()
    };
    let before = records();
    let meta = || node.site.dump(&["meta"])["tables"]["meta"][0].clone();
    let epoch = meta()["epoch"].clone();

    // Up: a backup first, then the older binary meets the newer store.
    let said = migrate_with_newer_binary(&node.site, 3);
    assert!(said.starts_with("schema 2 -> 3, "), "{said}");
    let backup = said
        .lines()
        .find_map(|line| line.strip_prefix("backup taken before: "))
        .unwrap_or_else(|| panic!("no backup: {said}"));
    assert!(fs::metadata(backup).unwrap().len() > 0, "{backup}");
    let db = || fs::read(node.site.state_dir().join("db/db")).unwrap();
    let newer = db();
    node.fake.clear_calls();
    let agent = node.site.start();
    node.site.wait_phase("a", "Running");
    assert_eq!(node.running(), running);
    assert!(agent.log().contains("StoreSchemaNewer"), "{}", agent.log());
    assert_eq!(node.starts(), Vec::<String>::new(), "{}", agent.log());
    assert_eq!(meta()["epoch"]["reason"], "Rebuilt");
    agent.kill9();
    assert!(db() == newer, "the newer store was touched");

    // Down, by the newer binary: everything is where it was.
    let said = migrate_with_newer_binary(&node.site, 2);
    assert!(said.starts_with("schema 3 -> 2, "), "{said}");
    assert_eq!(records(), before);
    node.fake.clear_calls();
    let agent = node.site.start();
    node.site.wait_phase("a", "Running");
    node.site.wait_phase("once", "Succeeded");
    assert_eq!(node.running(), running);
    assert_eq!(meta()["epoch"], epoch, "no pod has to be confirmed again");
    node.assert_quiet(&agent);
    assert_eq!(node.starts(), Vec::<String>::new());
}

#[test]
fn an_idle_agent_is_quiet_and_comes_back_quickly() {
    let node = Node::new(|_| Behaviour::RunForever);
    for n in 0..20 {
        node.manifest(&format!("p{n:02}"), "Always");
    }
    let agent = node.site.start();
    node.wait_running(20);
    node.site.wait_phase("p19", "Running");
    agent.kill9();
    let start = Instant::now();
    let agent = node.site.start();
    println!("ready with 20 pods after {:?}", start.elapsed());
    node.assert_quiet(&agent);
    let status = fs::read_to_string(format!("/proc/{}/status", agent.pid())).unwrap();
    for line in status
        .lines()
        .filter(|l| l.starts_with("VmRSS") || l.starts_with("Threads"))
    {
        println!("{line}");
    }
}
