//! The sources and the mux together: files and URLs in, operations out.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "test code fails by panicking"
)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::State as Shared;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use holdfast::config::{
    self, FileSettings, HttpSettings, PodConfig, Reading, Seed, SourceError, SourceSettings,
    Surroundings, conflicts_of,
};
use holdfast::core::state::{
    EpochReason, EpochRecord, FactRecord, META_KEY, MetaRecord, SourceRecord, Transaction,
};
use holdfast::core::supported;
use holdfast::store::Store;
use holdfast::types::events::MemoryRecorder;
use holdfast::types::{
    BootId, BootIdentity, Clock, Event, PodExt, PodOp, PodSource, PodUpdate, SystemClock,
};
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

const PATIENCE: Duration = Duration::from_secs(20);
/// So rare that it never happens within a test.
const RARELY: Duration = Duration::from_secs(3600);
const OFTEN: Duration = Duration::from_millis(50);

struct Agent {
    config: PodConfig,
    updates: mpsc::Receiver<PodUpdate>,
    store: Store,
    recorder: MemoryRecorder,
    cancel: CancellationToken,
    /// What the sync loop would have recorded.
    seeds: Vec<Seed>,
}

fn in_dir(path: &Path, check_frequency: Duration) -> SourceSettings {
    SourceSettings {
        node_name: "node-1".into(),
        file: Some(FileSettings {
            path: path.to_owned(),
            check_frequency,
            mount: None,
        }),
        http: None,
        api: None,
        running: Vec::new(),
    }
}

fn at_url(url: &str) -> SourceSettings {
    SourceSettings {
        node_name: "node-1".into(),
        file: None,
        http: Some(HttpSettings {
            url: url.to_owned(),
            headers: vec![("X-Token".into(), "secret".into())],
            check_frequency: OFTEN,
            timeout: Duration::from_millis(500),
        }),
        api: None,
        running: Vec::new(),
    }
}

fn memory_store() -> Store {
    Store::in_memory(Arc::new(SystemClock::new(BootId(1))))
}

/// As a store that begins an epoch now has it.
async fn begin_epoch(store: &Store, reason: EpochReason) {
    let now = SystemClock::new(BootId(1)).now();
    let meta = MetaRecord {
        schema: 1,
        node_name: "node-1".to_owned(),
        machine_id: String::new(),
        boot: BootIdentity {
            kernel_boot_id: String::new(),
            pid1_start: 1,
            runtime_state: String::new(),
        },
        generation: 1,
        clean_shutdown: false,
        heartbeat: now,
        epoch: EpochRecord {
            number: 2,
            since: now,
            reason,
        },
    };
    let transaction = Transaction::new().put(META_KEY, meta);
    store.commit(transaction).await.unwrap();
}

impl Agent {
    fn start(settings: SourceSettings) -> Self {
        Self::resume(settings, Vec::new(), memory_store())
    }

    fn resume(settings: SourceSettings, seeds: Vec<Seed>, store: Store) -> Self {
        let recorder = MemoryRecorder::default();
        let cancel = CancellationToken::new();
        let surroundings = Surroundings {
            store: store.clone(),
            recorder: Arc::new(recorder.clone()),
            clock: Arc::new(SystemClock::new(BootId(1))),
        };
        let (config, updates) =
            PodConfig::start(settings, seeds.clone(), &surroundings, &cancel).unwrap();
        Self {
            config,
            updates,
            store,
            recorder,
            cancel,
            seeds,
        }
    }

    /// Ends this agent and starts one that knows what this one knew.
    async fn restart(self, settings: SourceSettings) -> Self {
        self.cancel.cancel();
        timeout(PATIENCE, self.config.join())
            .await
            .unwrap()
            .unwrap();
        Self::resume(settings, self.seeds, self.store)
    }

    /// The next update, handled as the sync loop does.
    async fn next(&mut self) -> (PodOp, Vec<String>) {
        let update = timeout(PATIENCE, self.updates.recv())
            .await
            .expect("no update in time")
            .expect("updates ended");
        for pod in &update.pods {
            self.seeds.retain(|s| s.pod.uid() != pod.uid());
            if update.op != PodOp::Remove {
                self.seeds.push(Seed {
                    source: update.source,
                    origin: self.config.origins().get(&pod.uid()).expect("origin"),
                    pod: Arc::clone(pod),
                });
            }
        }
        self.config.ready().mark_handled(update.source);
        let names = update.pods.iter().map(|p| p.name().to_owned());
        (update.op, names.collect())
    }

    #[track_caller]
    fn expect_nothing(&mut self) {
        assert!(self.updates.try_recv().is_err(), "unexpected update");
    }

    /// Waits until the record of a source is as wanted.
    async fn recorded(
        &self,
        source: PodSource,
        wanted: impl Fn(&SourceRecord) -> bool,
    ) -> SourceRecord {
        let mut published = self.store.published();
        timeout(PATIENCE, async {
            loop {
                let snapshot = self.store.snapshot();
                if let Some(record) = snapshot.record::<SourceRecord>(source.as_str())
                    && wanted(record)
                {
                    return record.clone();
                }
                published.changed().await.unwrap();
            }
        })
        .await
        .expect("source was not recorded as wanted")
    }

    async fn broken(&self, path: &Path) -> String {
        let key = path.to_str().unwrap();
        let record = self
            .recorded(PodSource::File, |r| r.broken.contains_key(key))
            .await;
        record.broken[key].clone()
    }

    /// Waits until so many files are on record whose pods are not taken.
    async fn conflicts(&self, count: usize) {
        let mut published = self.store.published();
        let wait = async {
            while conflicts_of(&self.store.snapshot(), "file").len() != count {
                published.changed().await.unwrap();
            }
        };
        timeout(PATIENCE, wait).await.expect("no such conflicts");
    }

    fn events(&self, reason: &str) -> Vec<Event> {
        let events = self.recorder.events().into_iter();
        events.filter(|e| e.reason == reason).collect()
    }
}

fn pod(name: &str, argument: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\nspec:\n  containers:\n  - name: c\n    image: i:1\n    args: [\"{argument}\"]\n"
    )
}

fn directory() -> (TempDir, PathBuf) {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("manifests");
    fs::create_dir(&path).unwrap();
    (parent, path)
}

/// Writes as careful tools do: whole or not at all.
fn put(path: &Path, text: &str) {
    let new = path.with_file_name(format!(
        ".{}.new",
        path.file_name().unwrap().to_str().unwrap()
    ));
    fs::write(&new, text).unwrap();
    fs::rename(new, path).unwrap();
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|n| format!("{n}-node-1")).collect()
}

#[tokio::test]
async fn directory_becomes_pods_and_hidden_files_and_subdirectories_do_not() {
    let (_parent, dir) = directory();
    put(&dir.join("b.yaml"), &pod("b", "1"));
    put(
        &dir.join("a.json"),
        r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"a"},"spec":{"containers":[{"name":"c","image":"i"}]}}"#,
    );
    put(&dir.join(".hidden.yaml"), &pod("hidden", "1"));
    fs::create_dir(dir.join("below")).unwrap();
    put(&dir.join("below/c.yaml"), &pod("c", "1"));
    nix::unistd::mkfifo(&dir.join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();

    let mut agent = Agent::start(in_dir(&dir, RARELY));
    assert!(!agent.config.ready().all_ready());
    assert_eq!(agent.next().await, (PodOp::Add, names(&["a", "b"])));
    assert!(agent.config.ready().all_ready() && agent.config.ready().complete());
    let origin = agent.config.origins().get(&agent.seeds[0].pod.uid());
    assert_eq!(origin.as_deref(), dir.join("a.json").to_str());
    assert_eq!(agent.seeds[0].pod.source(), PodSource::File);
}

#[tokio::test]
async fn watcher_notices_new_changed_and_deleted_files() {
    let (_parent, dir) = directory();
    let mut agent = Agent::start(in_dir(&dir, RARELY));
    assert_eq!(agent.next().await, (PodOp::Add, vec![]));
    put(&dir.join("a.yaml"), &pod("a", "1"));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["a"])));
    let before = agent.seeds[0].pod.uid();
    put(&dir.join("a.yaml"), &pod("a", "2"));
    assert_eq!(agent.next().await, (PodOp::Remove, names(&["a"])));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["a"])));
    assert_ne!(agent.seeds[0].pod.uid(), before);
    fs::remove_file(dir.join("a.yaml")).unwrap();
    assert_eq!(agent.next().await, (PodOp::Remove, names(&["a"])));
    assert_eq!(agent.config.origins().get(&before), None);
}

#[tokio::test]
async fn a_manifest_that_is_put_back_at_once_is_removed_and_added() {
    let (parent, dir) = directory();
    let (path, aside) = (dir.join("a.yaml"), parent.path().join("a.yaml"));
    put(&path, &pod("a", "1"));
    put(&dir.join("b.yaml"), &pod("b", "1"));
    let mut agent = Agent::start(in_dir(&dir, RARELY));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["a", "b"])));
    let uid = agent.seeds[0].pod.uid();
    let moved_away_and_back = || {
        fs::rename(&path, &aside).unwrap();
        fs::rename(&aside, &path).unwrap();
    };
    let deleted_and_written = || {
        fs::remove_file(&path).unwrap();
        fs::write(&path, pod("a", "1")).unwrap();
    };
    for put_back in [&moved_away_and_back as &dyn Fn(), &deleted_and_written] {
        put_back();
        assert_eq!(agent.next().await, (PodOp::Remove, names(&["a"])));
        assert_eq!(agent.next().await, (PodOp::Add, names(&["a"])));
        assert!(agent.seeds.iter().any(|seed| seed.pod.uid() == uid));
    }
    // As careful editors do: the file is never away. What comes next shows that this said nothing.
    put(&path, &pod("a", "1"));
    put(&dir.join("c.yaml"), &pod("c", "1"));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["c"])));
    agent.expect_nothing();
}

#[tokio::test]
async fn a_single_manifest_that_is_put_back_keeps_its_pod() {
    let (parent, dir) = directory();
    let (path, aside) = (dir.join("a.yaml"), parent.path().join("a.yaml"));
    put(&path, &pod("a", "1"));
    let mut agent = Agent::start(in_dir(&path, OFTEN));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["a"])));
    fs::rename(&path, &aside).unwrap();
    fs::rename(&aside, &path).unwrap();
    put(&path, &pod("b", "1"));
    assert_eq!(agent.next().await, (PodOp::Remove, names(&["a"])));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["b"])));
    agent.expect_nothing();
}

#[tokio::test]
async fn pod_with_its_own_uid_is_updated_in_place() {
    let (_parent, dir) = directory();
    let with_uid = |argument| pod("a", argument).replace("name: a\n", "name: a\n  uid: abc\n");
    put(&dir.join("a.yaml"), &with_uid("1"));
    let mut agent = Agent::start(in_dir(&dir, RARELY));
    assert_eq!(agent.next().await.0, PodOp::Add);
    let seen = agent.seeds[0]
        .pod
        .annotation("kubernetes.io/config.seen")
        .map(str::to_owned);
    put(&dir.join("a.yaml"), &with_uid("2"));
    assert_eq!(agent.next().await, (PodOp::Update, names(&["a"])));
    assert_eq!(
        agent.seeds[0].pod.annotation("kubernetes.io/config.seen"),
        seen.as_deref()
    );
}

#[tokio::test]
async fn periodic_listing_notices_what_the_watcher_cannot_see() {
    let (parent, dir) = directory();
    let target = parent.path().join("elsewhere.yaml");
    put(&target, &pod("a", "1"));
    symlink(&target, dir.join("a.yaml")).unwrap();
    let mut agent = Agent::start(in_dir(&dir, OFTEN));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["a"])));
    put(&target, &pod("a", "2"));
    assert_eq!(agent.next().await, (PodOp::Remove, names(&["a"])));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["a"])));
}

#[tokio::test]
async fn reload_looks_again_at_once() {
    let (parent, dir) = directory();
    let target = parent.path().join("elsewhere.yaml");
    put(&target, &pod("a", "1"));
    symlink(&target, dir.join("a.yaml")).unwrap();
    let mut agent = Agent::start(in_dir(&dir, RARELY));
    agent.next().await;
    put(&target, &pod("b", "1"));
    agent.config.reload();
    assert_eq!(agent.next().await, (PodOp::Remove, names(&["a"])));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["b"])));
}

#[tokio::test]
async fn broken_manifest_keeps_the_last_good_version_and_is_told_once() {
    let (_parent, dir) = directory();
    let path = dir.join("a.yaml");
    put(&path, &pod("a", "1"));
    let mut agent = Agent::start(in_dir(&dir, OFTEN));
    agent.next().await;

    put(&path, &pod("a", "1").replace("image:", "imgae:"));
    let error = agent.broken(&path).await;
    assert!(
        error.contains("line 8, column 5: spec.containers[0].imgae"),
        "{error}"
    );
    assert!(error.contains("did you mean \"image\""), "{error}");
    agent.expect_nothing();
    assert!(agent.config.ready().all_ready() && !agent.config.ready().complete());

    // Many listings and a reload later there is still one event, about the pod that keeps running.
    put(&dir.join("b.yaml"), &pod("b", "1"));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["b"])));
    let events = agent.events("FailedValidation");
    assert_eq!(events.len(), 1, "{events:?}");
    assert!(events[0].message.starts_with(path.to_str().unwrap()));
    assert_eq!(events[0].pod.as_ref().unwrap().name, "a-node-1");

    put(&path, &pod("a", "2"));
    assert_eq!(agent.next().await, (PodOp::Remove, names(&["a"])));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["a"])));
    agent
        .recorded(PodSource::File, |r| r.broken.is_empty())
        .await;
    assert!(agent.config.ready().complete());

    put(&path, "broken again");
    agent.broken(&path).await;
    fs::remove_file(&path).unwrap();
    assert_eq!(agent.next().await, (PodOp::Remove, names(&["a"])));
}

#[tokio::test]
async fn a_part_of_a_byte_is_told_once_per_change_and_the_pod_is_taken() {
    let (_parent, dir) = directory();
    let doubtful = |argument| {
        pod("a", argument).replace("image:", "resources: {limits: {memory: 128m}}\n    image:")
    };
    put(&dir.join("a.yaml"), &doubtful("1"));
    let mut agent = Agent::start(in_dir(&dir, OFTEN));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["a"])));
    put(&dir.join("b.yaml"), &pod("b", "1"));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["b"])));
    let events = agent.events("ManifestWarning");
    assert_eq!(events.len(), 1, "{events:?}");
    let message = &events[0].message;
    let expected = "spec.containers[0].resources.limits[memory]: fractional byte value \"128m\"";
    assert!(message.starts_with(expected), "{message}");
}

#[tokio::test]
async fn every_bad_manifest_is_explained_and_disturbs_no_other() {
    let (_parent, dir) = directory();
    let bomb = (1..12).fold(
        "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned(),
        |text, n| {
            text + &format!(
                "a{n}: &a{n} [{}]\n",
                vec![format!("*a{}", n - 1); 10].join(", ")
            )
        },
    );
    let cases = [
        ("empty", String::new(), "empty"),
        (
            "large",
            pod("large", "1") + &"# 34567890\n".repeat(1_050_000),
            "10 MB cap",
        ),
        ("bomb", bomb, "expands beyond"),
        (
            "twice",
            pod("x", "1").replace("  name: x\n", "  name: x\n  name: y\n"),
            "duplicate",
        ),
        (
            "deployment",
            pod("x", "1").replace("kind: Pod", "kind: Deployment"),
            "kind Deployment is not a Pod",
        ),
        ("name", pod("Not_A_Name", "1"), "metadata.name"),
        ("half", pod("x", "1")[..60].to_owned(), "line "),
    ];
    for (name, text, _) in &cases {
        put(&dir.join(format!("{name}.yaml")), text);
    }
    symlink("/does/not/exist", dir.join("dangling.yaml")).unwrap();
    put(&dir.join("good.yaml"), &pod("good", "1"));
    let mut agent = Agent::start(in_dir(&dir, RARELY));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["good"])));
    for (name, _, part) in &cases {
        let error = agent.broken(&dir.join(format!("{name}.yaml"))).await;
        assert!(error.contains(part), "{name}: {error}");
    }
    let error = agent.broken(&dir.join("dangling.yaml")).await;
    assert!(error.contains("symlink"), "{error}");
    assert_eq!(agent.events("FailedValidation").len(), cases.len() + 1);
    agent.expect_nothing();
}

#[tokio::test]
async fn second_file_with_the_same_pod_waits_for_the_first_to_go() {
    let (_parent, dir) = directory();
    put(&dir.join("1.yaml"), &pod("a", "first"));
    put(&dir.join("2.yaml"), &pod("a", "second"));
    let mut agent = Agent::start(in_dir(&dir, OFTEN));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["a"])));
    assert_eq!(agent.seeds[0].origin, dir.join("1.yaml").to_str().unwrap());
    let kept = agent.seeds[0].pod.uid();
    agent.conflicts(1).await;
    fs::remove_file(dir.join("1.yaml")).unwrap();
    assert_eq!(agent.next().await, (PodOp::Remove, names(&["a"])));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["a"])));
    assert_eq!(agent.seeds[0].origin, dir.join("2.yaml").to_str().unwrap());
    let events = agent.events("FailedValidation");
    assert_eq!(events.len(), 1);
    assert!(
        events[0].message.contains("already defined by")
            && events[0].message.contains("1.yaml")
            && events[0].message.contains("2.yaml")
    );
    assert_eq!(events[0].pod.as_ref().map(|pod| &pod.uid), Some(&kept));
    agent.conflicts(0).await;
}

// Invariant START-1.
#[tokio::test]
async fn restart_keeps_unchanged_pods_without_adding_them_again() {
    let (_parent, dir) = directory();
    put(&dir.join("a.yaml"), &pod("a", "1"));
    put(&dir.join("b.yaml"), &pod("b", "1"));
    let mut agent = Agent::start(in_dir(&dir, RARELY));
    agent.next().await;
    fs::remove_file(dir.join("b.yaml")).unwrap();
    let mut agent = agent.restart(in_dir(&dir, RARELY)).await;
    assert!(!agent.config.ready().all_ready());
    assert_eq!(agent.next().await, (PodOp::Remove, names(&["b"])));
    assert!(agent.config.ready().all_ready());
    let mut agent = agent.restart(in_dir(&dir, RARELY)).await;
    assert_eq!(agent.next().await, (PodOp::Add, vec![]));
    assert!(agent.config.ready().all_ready());
    assert_eq!(agent.seeds.len(), 1);
}

#[tokio::test]
async fn restart_keeps_a_manifest_that_was_moved_aside_as_the_source_of_its_pod() {
    let (_parent, dir) = directory();
    let (web, copy) = (dir.join("web.yaml"), dir.join("web-old.yaml"));
    put(&web, &pod("a", "first"));
    let mut agent = Agent::start(in_dir(&dir, OFTEN));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["a"])));
    put(&copy, &pod("a", "copy"));
    agent.conflicts(1).await;
    fs::remove_file(&web).unwrap();
    assert_eq!(agent.next().await, (PodOp::Remove, names(&["a"])));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["a"])));
    assert_eq!(agent.seeds[0].origin, copy.to_str().unwrap());
    let mut published = agent.store.published();
    let recorded = async {
        let key = "leftmanifests//file";
        while agent.store.snapshot().record::<FactRecord>(key).is_none() {
            published.changed().await.unwrap();
        }
    };
    timeout(PATIENCE, recorded).await.expect("no such record");

    let mut agent = agent.restart(in_dir(&dir, OFTEN)).await;
    assert_eq!(agent.next().await, (PodOp::Add, vec![]));
    put(&web, &pod("a", "second"));
    assert_eq!(agent.next().await, (PodOp::Remove, names(&["a"])));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["a"])));
    assert_eq!(agent.seeds[0].origin, web.to_str().unwrap());
}

#[tokio::test]
async fn restart_keeps_pods_of_a_manifest_that_broke_meanwhile() {
    let (_parent, dir) = directory();
    let path = dir.join("a.yaml");
    put(&path, &pod("a", "1"));
    put(&dir.join("b.yaml"), &pod("b", "1"));
    let mut agent = Agent::start(in_dir(&dir, RARELY));
    agent.next().await;
    put(&path, "kind: [");
    fs::remove_file(dir.join("b.yaml")).unwrap();
    let mut agent = agent.restart(in_dir(&dir, RARELY)).await;
    assert_eq!(agent.next().await, (PodOp::Remove, names(&["b"])));
    assert!(agent.config.ready().all_ready() && !agent.config.ready().complete());
    agent.broken(&path).await;

    // Still broken after another restart: told in the log, not in another event.
    let mut agent = agent.restart(in_dir(&dir, RARELY)).await;
    assert_eq!(agent.next().await, (PodOp::Add, vec![]));
    assert_eq!(agent.events("FailedValidation"), []);
    put(&path, &pod("a", "1"));
    agent
        .recorded(PodSource::File, |r| r.broken.is_empty())
        .await;
    agent.expect_nothing();
}

#[tokio::test]
async fn vanished_directory_freezes_its_pods_also_across_a_restart_until_it_returns() {
    let (parent, dir) = directory();
    put(&dir.join("a.yaml"), &pod("a", "1"));
    put(&dir.join("b.yaml"), &pod("b", "1"));
    let mut agent = Agent::start(in_dir(&dir, OFTEN));
    agent.next().await;
    let aside = parent.path().join("aside");
    fs::rename(&dir, &aside).unwrap();
    let record = agent
        .recorded(PodSource::File, |r| !r.error.is_empty())
        .await;
    assert!(record.error.contains("vanished"), "{}", record.error);
    agent.expect_nothing();
    assert_eq!(agent.events("SourceUnreadable").len(), 1);

    let mut agent = agent.restart(in_dir(&dir, OFTEN)).await;
    assert_eq!(agent.next().await, (PodOp::Add, vec![]));
    assert!(agent.config.ready().all_ready() && !agent.config.ready().complete());

    fs::remove_file(aside.join("b.yaml")).unwrap();
    fs::rename(&aside, &dir).unwrap();
    assert_eq!(agent.next().await, (PodOp::Remove, names(&["b"])));
    agent
        .recorded(PodSource::File, |r| r.error.is_empty())
        .await;
    assert!(agent.config.ready().complete());
    put(&dir.join("c.yaml"), &pod("c", "1"));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["c"])));
}

#[tokio::test]
async fn absent_path_is_an_empty_ready_source_until_it_appears() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("later");
    let mut agent = Agent::start(in_dir(&dir, RARELY));
    assert_eq!(agent.next().await, (PodOp::Add, vec![]));
    assert!(agent.config.ready().all_ready() && agent.config.ready().complete());
    // No listing is due for an hour: the attempts to watch find it.
    fs::create_dir(&dir).unwrap();
    put(&dir.join("a.yaml"), &pod("a", "1"));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["a"])));
}

// Invariant BOOT-1.
#[tokio::test]
async fn absent_path_after_a_lost_store_is_not_an_empty_source() {
    for reason in [EpochReason::Rebuilt, EpochReason::Restored] {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("mounted-later");
        let store = memory_store();
        begin_epoch(&store, reason).await;
        let agent = Agent::resume(in_dir(&dir, OFTEN), Vec::new(), store);
        let record = agent
            .recorded(PodSource::File, |r| !r.error.is_empty())
            .await;
        assert!(
            record.error.contains("does not exist") && record.error.contains("create it empty"),
            "{}",
            record.error
        );
        assert!(!agent.config.ready().ready(PodSource::File));
        assert_eq!(agent.events(config::SOURCE_UNREADABLE).len(), 1);

        // Nor at the next start, with the record of the failed reading.
        let mut agent = agent.restart(in_dir(&dir, OFTEN)).await;
        fs::create_dir(&dir).unwrap();
        assert_eq!(agent.next().await, (PodOp::Add, vec![]));
        agent
            .recorded(PodSource::File, |r| r.error.is_empty())
            .await;
        assert!(agent.config.ready().all_ready() && agent.config.ready().complete());

        // It has been seen in this epoch: what is recorded tells.
        fs::remove_dir(&dir).unwrap();
        let mut agent = agent.restart(in_dir(&dir, OFTEN)).await;
        assert_eq!(agent.next().await, (PodOp::Add, vec![]));
        assert!(agent.config.ready().all_ready());
    }
}

#[tokio::test]
async fn path_that_cannot_be_read_is_not_an_empty_source() {
    let parent = tempfile::tempdir().unwrap();
    let file = parent.path().join("file");
    fs::write(&file, pod("a", "1")).unwrap();
    let mut agent = Agent::start(in_dir(&file.join("below"), OFTEN));
    let record = agent
        .recorded(PodSource::File, |r| !r.error.is_empty())
        .await;
    assert!(record.error.contains("cannot be read"), "{}", record.error);
    agent.expect_nothing();
    assert!(!agent.config.ready().all_ready());
}

#[tokio::test]
async fn single_file_is_a_source_too() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("pod.yaml");
    put(&path, &pod("a", "1"));
    put(&parent.path().join("other.yaml"), &pod("other", "1"));
    let mut agent = Agent::start(in_dir(&path, RARELY));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["a"])));
    put(&path, &pod("b", "1"));
    assert_eq!(agent.next().await, (PodOp::Remove, names(&["a"])));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["b"])));
    fs::remove_file(&path).unwrap();
    let record = agent
        .recorded(PodSource::File, |r| !r.error.is_empty())
        .await;
    assert!(record.error.contains("vanished"));
    agent.expect_nothing();
    put(&path, &pod("c", "1"));
    assert_eq!(agent.next().await, (PodOp::Remove, names(&["b"])));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["c"])));
}

#[tokio::test]
async fn pods_of_a_source_that_is_not_configured_any_more_are_removed() {
    let (_parent, dir) = directory();
    put(&dir.join("a.yaml"), &pod("a", "1"));
    let mut agent = Agent::start(in_dir(&dir, RARELY));
    agent.next().await;
    let nothing = SourceSettings {
        node_name: "node-1".into(),
        file: None,
        http: None,
        api: None,
        running: Vec::new(),
    };
    let mut agent = agent.restart(nothing).await;
    assert_eq!(agent.next().await, (PodOp::Remove, names(&["a"])));
}

#[tokio::test]
async fn another_directory_replaces_the_pods_of_the_former_one() {
    let (parent, dir) = directory();
    put(&dir.join("a.yaml"), &pod("a", "1"));
    let mut agent = Agent::start(in_dir(&dir, RARELY));
    agent.next().await;
    let mut agent = agent
        .restart(in_dir(&parent.path().join("new"), RARELY))
        .await;
    assert_eq!(agent.next().await, (PodOp::Remove, names(&["a"])));
}

#[tokio::test]
async fn cancellation_ends_all_tasks() {
    let (_parent, dir) = directory();
    let server = Server::start().await;
    let mut settings = in_dir(&dir, RARELY);
    settings.http = at_url(&server.url).http;
    let agent = Agent::start(settings);
    agent.cancel.cancel();
    timeout(PATIENCE, agent.config.join())
        .await
        .unwrap()
        .unwrap();
}

/// What the server answers.
#[derive(Clone)]
enum Answer {
    Body(StatusCode, Vec<u8>),
    /// Elsewhere: an address.
    Redirect(String),
    Never,
}

#[derive(Clone)]
struct Server {
    url: String,
    answer: Arc<Mutex<Answer>>,
    seen: Arc<Mutex<Vec<HeaderMap>>>,
}

impl Server {
    async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = Self {
            url: format!("http://{}/pods", listener.local_addr().unwrap()),
            answer: Arc::new(Mutex::new(Answer::Body(
                StatusCode::OK,
                b"apiVersion: v1\nkind: PodList\nitems: []\n".to_vec(),
            ))),
            seen: Arc::default(),
        };
        let router = Router::new()
            .route("/pods", get(serve))
            .route("/moved", get(|| async { list(&["moved"]) }))
            .with_state(server.clone());
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        server
    }

    fn answer(&self, status: StatusCode, body: impl Into<Vec<u8>>) {
        *self.answer.lock().unwrap() = Answer::Body(status, body.into());
    }
}

async fn serve(Shared(server): Shared<Server>, headers: HeaderMap) -> Response {
    server.seen.lock().unwrap().push(headers);
    let answer = server.answer.lock().unwrap().clone();
    match answer {
        Answer::Body(status, body) => (status, body).into_response(),
        Answer::Redirect(to) => Redirect::temporary(&to).into_response(),
        Answer::Never => std::future::pending().await,
    }
}

fn list(names: &[&str]) -> String {
    let items = names.iter().map(|n| {
        serde_json::json!({"metadata": {"name": n}, "spec": {"containers": [{"name": "c", "image": "i"}]}})
    });
    let items: Vec<_> = items.collect();
    serde_json::json!({"apiVersion": "v1", "kind": "PodList", "items": items}).to_string()
}

#[tokio::test]
async fn url_serves_a_pod_or_a_list() {
    let server = Server::start().await;
    server.answer(StatusCode::OK, pod("a", "1"));
    let mut agent = Agent::start(at_url(&server.url));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["a"])));
    assert_eq!(agent.seeds[0].pod.source(), PodSource::Http);
    assert_eq!(agent.seeds[0].origin, server.url);
    server.answer(StatusCode::OK, list(&["b", "c"]));
    assert_eq!(agent.next().await, (PodOp::Remove, names(&["a"])));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["b", "c"])));
    assert_eq!(server.seen.lock().unwrap()[0]["x-token"], "secret");
    assert!(agent.config.ready().complete());
    server.answer(StatusCode::OK, list(&[]));
    assert_eq!(agent.next().await.0, PodOp::Remove);
}

#[tokio::test]
async fn url_that_answers_nonsense_freezes_its_pods_and_says_why() {
    let server = Server::start().await;
    server.answer(StatusCode::OK, list(&["a"]));
    let mut agent = Agent::start(at_url(&server.url));
    agent.next().await;
    let mut large = pod("large", "1").into_bytes();
    large.resize(11 * 1024 * 1024, b'\n');
    let unreadable = [
        (
            StatusCode::OK,
            b"<!DOCTYPE html><html><body>Log in</body></html>".to_vec(),
            "serves HTML",
        ),
        (
            StatusCode::SERVICE_UNAVAILABLE,
            list(&[]).into_bytes(),
            "503",
        ),
        (StatusCode::NOT_FOUND, Vec::new(), "404"),
        (StatusCode::OK, large, "10 MB cap"),
    ];
    for (status, body, part) in unreadable {
        server.answer(status, body);
        agent
            .recorded(PodSource::Http, |r| r.error.contains(part))
            .await;
        assert!(!agent.config.ready().complete());
    }
    *server.answer.lock().unwrap() = Answer::Never;
    agent
        .recorded(PodSource::Http, |r| {
            r.error.contains("did not answer within 500ms")
        })
        .await;
    let broken = [
        (
            Vec::new(),
            "the answer is empty; serve a v1 Pod or PodList, and a PodList without items",
        ),
        (b"# nothing\n".to_vec(), "the answer is empty"),
        (
            pod("x", "1")
                .replace("kind: Pod", "kind: Deployment")
                .into_bytes(),
            "kind Deployment",
        ),
    ];
    for (body, part) in broken {
        server.answer(StatusCode::OK, body);
        let has = |r: &SourceRecord| r.broken.get(&server.url).is_some_and(|e| e.contains(part));
        agent.recorded(PodSource::Http, has).await;
    }
    agent.expect_nothing();
    server.answer(StatusCode::OK, list(&["a", "b"]));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["b"])));
    agent
        .recorded(PodSource::Http, |r| {
            r.error.is_empty() && r.broken.is_empty()
        })
        .await;
}

#[tokio::test]
async fn redirects_of_a_url_stay_with_its_server() {
    let server = Server::start().await;
    let other = Server::start().await;
    other.answer(StatusCode::OK, list(&["foreign"]));
    *server.answer.lock().unwrap() = Answer::Redirect("/moved".to_owned());
    let mut agent = Agent::start(at_url(&server.url));
    assert_eq!(agent.next().await, (PodOp::Add, names(&["moved"])));

    // Another port is another server: it gets no request, and so none of the headers.
    let secret = format!("{}?token=secret", other.url);
    *server.answer.lock().unwrap() = Answer::Redirect(secret);
    let record = agent
        .recorded(PodSource::Http, |r| r.error.contains("redirects to"))
        .await;
    let origin = other.url.trim_end_matches("/pods");
    assert!(record.error.contains(origin), "{}", record.error);
    assert!(!record.error.contains("secret"), "{}", record.error);
    agent.expect_nothing();
    assert!(other.seen.lock().unwrap().is_empty());

    // In a circle.
    *server.answer.lock().unwrap() = Answer::Redirect(server.url.clone());
    agent
        .recorded(PodSource::Http, |r| r.error.contains("10 times"))
        .await;
}

#[tokio::test]
async fn unreachable_url_freezes_its_pods_and_no_others_across_a_restart() {
    let (_parent, dir) = directory();
    put(&dir.join("f.yaml"), &pod("f", "1"));
    let server = Server::start().await;
    server.answer(StatusCode::OK, list(&["h"]));
    let mut both = in_dir(&dir, RARELY);
    both.http = at_url(&server.url).http;
    let mut agent = Agent::start(both.clone());
    let mut added = [agent.next().await.1, agent.next().await.1].concat();
    added.sort();
    assert_eq!(added, names(&["f", "h"]));

    *server.answer.lock().unwrap() = Answer::Never;
    fs::remove_file(dir.join("f.yaml")).unwrap();
    let mut agent = agent.restart(both).await;
    let mut handled = [agent.next().await, agent.next().await];
    handled.sort_by_key(|(_, names)| names.len());
    assert_eq!(
        handled,
        [(PodOp::Add, vec![]), (PodOp::Remove, names(&["f"]))]
    );
    assert!(agent.config.ready().all_ready() && !agent.config.ready().complete());
    assert_eq!(agent.seeds.len(), 1);
}

#[tokio::test]
async fn url_that_never_answered_is_not_ready() {
    // Nothing listens on this port once the listener is dropped.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    drop(listener);
    let mut agent = Agent::start(at_url(&url));
    let record = agent
        .recorded(PodSource::Http, |r| !r.error.is_empty())
        .await;
    assert!(record.error.contains("refused"), "{}", record.error);
    assert!(!agent.config.ready().all_ready());
    agent.expect_nothing();
}

#[tokio::test]
async fn settings_that_cannot_work_are_refused_at_start() {
    let surroundings = Surroundings {
        store: memory_store(),
        recorder: Arc::new(MemoryRecorder::default()),
        clock: Arc::new(SystemClock::new(BootId(1))),
    };
    let start = |settings| {
        PodConfig::start(
            settings,
            Vec::new(),
            &surroundings,
            &CancellationToken::new(),
        )
        .map(|_| ())
        .unwrap_err()
    };
    assert!(matches!(start(at_url("ftp://x/")), SourceError::Url { .. }));
    assert!(matches!(
        start(at_url("not a url")),
        SourceError::Url { .. }
    ));
    let mut settings = at_url("http://x/");
    settings.http.as_mut().unwrap().headers = vec![("bad name".into(), "x".into())];
    assert!(matches!(start(settings), SourceError::Header { .. }));
}

#[tokio::test]
async fn example_manifests_are_valid_and_supported() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/manifests");
    let clock = Arc::new(SystemClock::new(BootId(1)));
    let sets = config::read_once(in_dir(&dir, RARELY), clock)
        .await
        .unwrap();
    assert_eq!(sets[0].reading, Reading::Complete);
    assert_eq!(sets[0].broken, std::collections::BTreeMap::new());
    assert!(sets[0].pods.len() >= 4);
    for sourced in &sets[0].pods {
        assert_eq!(supported::refused(&sourced.pod), [], "{}", sourced.origin);
    }
}
