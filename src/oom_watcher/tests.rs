//! Events from a kernel's log, also after a restart of the agent.

use serde_json::json;

use super::*;
use crate::core::state::{IntentRecord, Table};
use crate::types::events::MemoryRecorder;
use crate::types::{BootId, Stamp};

const ID: &str = "c0ffee";
const CONTAINER: &str = "/kubepods/podu1/cri-containerd-c0ffee.scope";
const NOW: Stamp = Stamp {
    boot: BootId(1),
    boottime_ms: 1,
    wall_ms: 1,
};

struct Still;

impl Clock for Still {
    fn now(&self) -> Stamp {
        NOW
    }
}

struct Tree;

impl Cgroups for Tree {
    fn pod_at(&self, path: &str) -> Option<PodUid> {
        let entry = path.strip_prefix("/kubepods/pod")?.split('/').next()?;
        Some(PodUid::from(entry))
    }

    fn memory_limit_at(&self, path: &str) -> Option<u64> {
        (path == "/kubepods/podu1").then_some(3 << 20)
    }
}

struct World {
    store: Store,
    recorder: MemoryRecorder,
    metrics: Metrics,
}

impl World {
    /// A node with pod `web`, whose container `main` is recorded.
    async fn new() -> Self {
        let store = Store::in_memory(Arc::new(Still));
        let started = ContainerRecord {
            intent: Some(IntentRecord {
                container_id: ID.into(),
                attempt: 0,
                hash: String::new(),
                at: NOW,
            }),
            ..ContainerRecord::new()
        };
        let known = Transaction::new().put("u1/main", started);
        store.commit(known).await.unwrap();
        Self {
            store,
            recorder: MemoryRecorder::default(),
            metrics: Metrics::default(),
        }
    }

    fn agent(&self, boot: &str) -> OomWatcher {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "ns", "uid": "u1"},
            "spec": {"containers": [{"name": "main"}]},
        }))
        .unwrap();
        let pods = PodManager::default();
        pods.update(Arc::new(pod));
        OomWatcher::new(OomWatcherParts {
            store: self.store.clone(),
            clock: Arc::new(Still),
            recorder: Arc::new(self.recorder.clone()),
            metrics: self.metrics.clone(),
            pods,
            cgroups: Arc::new(Tree),
            kernel_boot_id: boot.to_owned(),
        })
    }

    /// Waits until all that was submitted is in the store.
    async fn settle(&self) {
        self.store.commit(Transaction::new()).await.unwrap();
    }

    /// Container, reason and message of the events there were.
    fn events(&self) -> Vec<(Option<String>, String, String)> {
        let events = self.recorder.events().into_iter();
        events.map(|e| (e.container, e.reason, e.message)).collect()
    }
}

/// The log of kills, one after the other: scope and cgroup of each, whose process ID is its place.
fn log(kills: &[(&str, &str)]) -> Vec<String> {
    let texts = kills.iter().enumerate().flat_map(|(pid, (scope, cgroup))| {
        let begin = if *scope == "global_oom" {
            "Out of memory"
        } else {
            "Memory cgroup out of memory"
        };
        [
            format!("oom-kill:constraint=X,{scope},task_memcg={cgroup},task=dd,pid={pid},uid=0"),
            format!("{begin}: Killed process {pid} (dd) total-vm:9kB, anon-rss:64kB, file-rss:0kB"),
        ]
    });
    let records = texts.enumerate();
    records
        .map(|(n, text)| format!("6,{n},1,-;{text}\n"))
        .collect()
}

/// Has `agent` read the log, as one that has read it before when it is to tell of all.
fn read(agent: &mut OomWatcher, log: &[String]) {
    log.iter().for_each(|record| agent.take(record.as_bytes()));
    agent.drained();
}

#[tokio::test]
async fn a_kill_names_container_process_memory_and_the_limit_that_was_hit() {
    let world = World::new().await;
    let mut agent = world.agent("b");
    agent.drained();
    let in_container = format!("oom_memcg={CONTAINER}");
    let runtimes_own = "/system.slice/c0ffee";
    read(
        &mut agent,
        &log(&[
            ("global_oom", "/system.slice/sshd"),
            (&in_container, CONTAINER),
            ("oom_memcg=/kubepods/podu1", "/kubepods/podu1/pause"),
            ("oom_memcg=/kubepods", CONTAINER),
            ("global_oom", CONTAINER),
            ("oom_memcg=/kubepods/podother", "/kubepods/podother"),
            ("oom_memcg=/system.slice/c0ffee", runtimes_own),
        ]),
    );
    let main = Some("main".to_owned());
    let used = "which used 64Ki of anonymous memory";
    let of_pod = |container: &Option<String>, message: String| {
        (container.clone(), "OOMKilled".to_owned(), message)
    };
    let of_node = |pid: u32| {
        let text = format!("System OOM encountered, victim process: dd, pid: {pid}");
        (None, "SystemOOM".to_owned(), text)
    };
    let of_main = |place: &str, pid: u32| {
        let text = format!("{place}: killed process dd (pid {pid}) of container main, {used}");
        of_pod(&main, text)
    };
    let pause =
        format!("The pod reached its memory limit of 3Mi: killed process dd (pid 2), {used}");
    let wanted = [
        of_node(0),
        of_main("Container main reached its memory limit", 1),
        of_pod(&None, pause),
        of_main("Cgroup /kubepods reached its memory limit", 3),
        of_node(4),
        of_main("The node ran out of memory", 4),
        of_main("Container main reached its memory limit", 6),
    ];
    assert_eq!(world.events(), wanted);
    let counted = world.metrics.encode().unwrap();
    for (scope, times) in [("node", 2), ("pod", 4), ("other", 1)] {
        let line = format!("holdfast_oom_kills_total{{scope=\"{scope}\"}} {times}\n");
        assert!(counted.contains(&line), "{line}{counted}");
    }
}

#[tokio::test]
async fn each_kill_is_told_once_whatever_becomes_of_the_agent() {
    let world = World::new().await;
    let all = log(&[("global_oom", "/a"); 4]);
    let told = |world: &World| world.events().len();
    read(&mut world.agent("b"), &all[..2]);
    assert_eq!(told(&world), 0, "before the first agent of this boot");
    world.settle().await;
    let mut second = world.agent("b");
    read(&mut second, &all[..4]);
    assert_eq!(told(&world), 1, "while no agent ran");
    // The log is opened again.
    read(&mut second, &all[..4]);
    // Ends within the report of another kill.
    read(&mut second, &all[..5]);
    world.settle().await;
    let version = world
        .store
        .snapshot()
        .version_of(Table::Facts, &Position::key());
    assert!(version.is_some());
    let mut third = world.agent("b");
    read(&mut third, &all[..4]);
    world.settle().await;
    assert_eq!(told(&world), 1);
    let written = world
        .store
        .snapshot()
        .version_of(Table::Facts, &Position::key());
    assert_eq!(written, version, "nothing new, nothing written");
    read(&mut third, &all);
    assert_eq!(told(&world), 3);
    world.settle().await;
    read(&mut world.agent("next"), &all);
    assert_eq!(told(&world), 3, "numbers of another boot");
}

#[tokio::test(start_paused = true)]
async fn a_log_that_cannot_be_read_is_no_end() {
    let world = World::new().await;
    let token = CancellationToken::new();
    let device = tempfile::tempdir().unwrap().path().join("none");
    let mut run = std::pin::pin!(world.agent("b").run(device, token.clone()));
    let ended = tokio::time::timeout(AGAIN * 3, &mut run).await;
    assert!(ended.is_err(), "goes on trying");
    token.cancel();
    run.await;
}

#[test]
fn names_are_shown_without_control_characters() {
    assert_eq!(shown(b"a\x1b[2J\n\xe9"), "a\\u{1b}[2J\\n\\xe9");
}
