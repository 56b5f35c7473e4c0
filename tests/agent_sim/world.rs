//! A node in one process: an agent, a runtime that runs nothing, a disk in memory, a clock of its own.
//!
//! Everything is on paused tokio time.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast::agent::{Embedded, Parts};
use holdfast::core::pinning::machine::Machine;
use holdfast::core::state::{
    ContainerRecord, MetaRecord, State, StatusRecord, Table, WorkerRecord,
};
use holdfast::kubeletconfig::flags::KubeletFlags;
use holdfast::kubeletconfig::{AgentConfig, resolve};
use holdfast::kuberuntime::cri::{CriClient, CriTimeouts, v1};
use holdfast::nodeshutdown::Link;
use holdfast::store::backend::{Backend, Faults, FaultyBackend, Op, SledOptions};
use holdfast::store::codec::Loaded;
use holdfast::store::open::{self, OpenOptions, OpenReport};
use holdfast::store::recover::{Identity, Integrity, next_meta};
use holdfast::store::{Store, StoreOptions, codec};
use holdfast::types::host_addresses::HostAddresses;
use holdfast::types::metrics::Metrics;
use holdfast::types::{Clock, PodExt, PodUid};
use holdfast_testkit::fake_api::FakeApi;
use holdfast_testkit::fake_cri::{Behaviour, Call, FakeCri, Fault, Restart};
use tokio::time::Instant;

use crate::images::SimImageDisk;
use crate::node::*;
use crate::pressure::SimFigures;
use crate::schedule::{LifePace, Schedule};
use crate::watch::*;

/// Of each call. On a paused clock nothing takes time by itself, and "newer than" would mean nothing.
const LATENCY: Duration = Duration::from_millis(1);

pub const IMAGE: &str = "holdfast.local/busybox:1";

/// Operations that change something.
pub const EFFECTS: [&str; 11] = [
    "run_podsandbox",
    "stop_podsandbox",
    "remove_podsandbox",
    "create_container",
    "start_container",
    "stop_container",
    "remove_container",
    "pull_image",
    "remove_image",
    "update_container",
    "update_podsandbox_resources",
];

/// Says what becomes of a call.
pub type OnCall = Arc<dyn Fn(&Call) -> Option<Fault> + Send + Sync>;

pub struct World {
    // Goes before the directory.
    mounts: Mounts,
    pub dir: tempfile::TempDir,
    pub fake: FakeCri,
    pub clock: SimClock,
    pub disk: Disk,
    pub faults: Faults,
    pub config: AgentConfig,
    pub life: Arc<Life>,
    pub began: Instant,
    /// What the next life is told of the records it finds.
    pub integrity: Integrity,
    /// The next agent does not know whether its store is that of the cluster.
    pub cluster_doubted: bool,
    /// Of the agent that was started last.
    metrics: Metrics,
    /// What opening the store on files came to, in worlds that have one, and the records it found.
    pub opened: Option<(OpenReport, State)>,
    /// The API server, in worlds that have one.
    pub api: Option<FakeApi>,
    /// What everything takes and what goes wrong, in worlds that explore schedules; otherwise a millisecond, and nothing.
    pub schedule: Option<Schedule>,
    /// What becomes of calls about the pods of one tenant; before everything else.
    pub tenant: Option<OnCall>,
    /// What announces shutdowns of the machine; none but `logind` for `None`.
    pub shutdown: Option<Link>,
    /// What agents see of their machine.
    pub figures: Arc<SimFigures>,
    pub image_disk: Arc<SimImageDisk>,
    /// What the next agent sees of the processors; this machine's for `None`.
    pub machine: Option<Machine>,
    engine: Option<Engine>,
    faulty: Arc<Mutex<Vec<(&'static str, Fault)>>>,
    always_faulty: Arc<Mutex<HashMap<&'static str, Fault>>>,
    /// Operations that hang, with what they are about.
    hanging: Arc<Mutex<Vec<(&'static str, String)>>>,
    agent: Option<Embedded>,
    watch: Arc<Mutex<Watch>>,
}

impl World {
    pub fn new() -> Self {
        if std::env::var_os("HOLDFAST_SIM_LOG").is_some() {
            // Set by the first world already.
            drop(
                tracing_subscriber::fmt()
                    .with_max_level(tracing::Level::DEBUG)
                    .with_test_writer()
                    .try_init(),
            );
        }
        let dir = tempfile::Builder::new()
            .prefix("holdfast-sim-")
            .tempdir()
            .unwrap();
        std::fs::create_dir(dir.path().join("manifests")).unwrap();
        let fake = FakeCri::new();
        fake.add_image(IMAGE);
        let config = config(dir.path().to_owned());
        let image_disk = Arc::new(SimImageDisk {
            fake: fake.clone(),
            is_idle: AtomicBool::default(),
        });
        Self {
            mounts: Mounts(dir.path().to_owned()),
            dir,
            fake,
            clock: SimClock::new(),
            disk: Disk::default(),
            faults: Faults::new(),
            config,
            life: Life::new(Crash::Never),
            began: Instant::now(),
            integrity: Integrity::New,
            cluster_doubted: false,
            metrics: Metrics::default(),
            opened: None,
            api: None,
            schedule: None,
            tenant: None,
            shutdown: None,
            figures: Arc::default(),
            image_disk,
            machine: None,
            engine: None,
            faulty: Arc::default(),
            always_faulty: Arc::default(),
            hanging: Arc::default(),
            agent: None,
            watch: Arc::default(),
        }
    }

    /// A node whose store is on files, opened as a process opens it. Their writes are no crash points.
    pub fn on_files() -> Self {
        Self {
            engine: Some(Engine::default()),
            ..Self::new()
        }
    }

    /// A node of a cluster.
    pub fn with_api() -> Self {
        let api = FakeApi::new();
        // What every cluster has.
        for object in [
            r#"{"kind":"Service","metadata":{"name":"kubernetes"},"spec":{"clusterIP":"10.0.0.1","ports":[{"port":443}]}}"#,
            r#"{"kind":"ServiceAccount","metadata":{"name":"default"}}"#,
        ] {
            let mut object: serde_json::Value = serde_json::from_str(object).unwrap();
            object["apiVersion"] = "v1".into();
            object["metadata"]["namespace"] = "default".into();
            api.create_json(object);
        }
        Self {
            api: Some(api),
            ..Self::new()
        }
    }

    /// What the agent that was started last shows on `/metrics`.
    pub fn metrics_text(&self) -> String {
        self.metrics.encode().unwrap()
    }

    /// Starts the agent. Returns whether it lived through its start.
    pub async fn start_until(&mut self, crash: Crash) -> bool {
        assert!(self.agent.is_none(), "one agent at a time");
        self.life = Life::new(crash);
        self.metrics = Metrics::default();
        self.disk.settle(false);
        let (store, meta) = match self.engine.clone() {
            Some(engine) => self.open_files(&engine),
            None => self.open(),
        };
        self.listen();
        let parts = Parts {
            store,
            meta,
            clock: Arc::new(self.clock.clone()),
            metrics: self.metrics.clone(),
            boot: self.clock.boot(),
            api: self.api.as_ref().map(|api| self.connect(api)),
            shutdown: self.shutdown.clone(),
            cluster_doubted: self.cluster_doubted,
            figures: Some(Arc::clone(&self.figures) as _),
            machine: self.machine.clone(),
            // A name server takes real time to answer, and simulated time waits for it.
            addresses: Some(HostAddresses::fixed(vec![Ipv4Addr::LOCALHOST.into()])),
            image_disk: Some(Arc::clone(&self.image_disk) as _),
        };
        let cri = CriClient::over(
            self.fake.channel(),
            "unix:///sim",
            CriTimeouts::default(),
            Metrics::default(),
        );
        let started = tokio::select! {
            biased;
            () = self.life.ended.notified() => None,
            started = Box::pin(Embedded::start(&self.config, parts, cri)) => Some(started),
        };
        match started {
            Some(Ok(agent)) => {
                self.agent = Some(agent);
                true
            }
            Some(Err(_)) if self.life.is_over() => false,
            Some(Err(error)) => panic!("the agent does not start: {error:?}"),
            None => false,
        }
    }

    pub async fn start(&mut self) {
        assert!(self.start_until(Crash::Never).await);
    }

    /// What `store::open` does with a backend that is there.
    fn open(&mut self) -> (Store, MetaRecord) {
        let mut loaded = codec::load(self.disk.synced.iter(), 1);
        let now = self.clock.now();
        let identity = self.identity();
        let integrity = match self.integrity {
            Integrity::New if loaded.state.meta().is_some() => Integrity::Intact,
            other => other,
        };
        let (meta, _) = next_meta(loaded.state.meta(), integrity, &identity, 0, 1, now);
        self.integrity = Integrity::Intact;
        let record = holdfast::core::state::Record::into_any(meta.clone());
        let key = holdfast::core::state::META_KEY;
        loaded.state.apply(
            &holdfast::core::state::Mutation::Put {
                key: key.into(),
                record: record.clone(),
            },
            1,
        );
        let ops: Vec<Op> = codec::encode(key, &record)
            .unwrap()
            .into_pairs(Table::Meta, key)
            .map(|(key, value)| Op::Put { key, value })
            .collect();
        self.disk.synced.apply(&ops).unwrap();
        let backend = LifeBackend {
            life: Arc::clone(&self.life),
            disk: self.disk.clone(),
            applied: Vec::new(),
            flushes: 0,
        };
        (self.store_on(backend, loaded), meta)
    }

    fn open_files(&mut self, engine: &Engine) -> (Store, MetaRecord) {
        let dir = self.config.state_dir.clone();
        let opened = open::open(&OpenOptions {
            node_was_used: dir.exists(),
            dir,
            identity: self.identity(),
            sled: SledOptions::default(),
            now: self.clock.now(),
        })
        .unwrap();
        let meta = opened.loaded.state.meta().cloned().unwrap();
        self.opened = Some((opened.report, opened.loaded.state.clone()));
        self.disk = Disk::default();
        let pairs = opened.backend.iter().map(Result::unwrap);
        let ops: Vec<Op> = pairs.map(|(key, value)| Op::Put { key, value }).collect();
        self.disk.synced.apply(&ops).unwrap();
        *engine.lock().unwrap() = Some(opened.backend);
        let backend = FileBackend {
            life: Arc::clone(&self.life),
            engine: Arc::clone(engine),
            disk: self.disk.clone(),
        };
        (self.store_on(backend, opened.loaded), meta)
    }

    fn identity(&self) -> Identity {
        Identity {
            node_name: self.config.node_name.clone(),
            machine_id: "sim".to_owned(),
            boot: self.clock.boot(),
        }
    }

    fn store_on(&self, backend: impl Backend, loaded: Loaded) -> Store {
        if let Some(schedule) = &self.schedule {
            let pace = LifePace {
                life: Arc::clone(&self.life),
                schedule: schedule.clone(),
            };
            return Store::start_paced(
                Box::new(FaultyBackend::new(backend, self.faults.clone())),
                loaded,
                StoreOptions::default(),
                Arc::new(self.clock.clone()),
                Metrics::default(),
                Arc::new(pace),
            );
        }
        let options = StoreOptions {
            inline: true,
            ..StoreOptions::default()
        };
        Store::start(
            Box::new(FaultyBackend::new(backend, self.faults.clone())),
            loaded,
            options,
            Arc::new(self.clock.clone()),
            Metrics::default(),
        )
        .unwrap()
    }

    /// Makes the runtime obey the life, and watches every start.
    fn listen(&self) {
        let (life, watch) = (Arc::clone(&self.life), Arc::clone(&self.watch));
        let (fake, disk) = (self.fake.clone(), self.disk.clone());
        // A fault of the test's own goes before the latency.
        let faulty = Arc::clone(&self.faulty);
        let always_faulty = Arc::clone(&self.always_faulty);
        let (schedule, tenant) = (self.schedule.clone(), self.tenant.clone());
        let slow = move |call: &Call| {
            if let Some(fault) = tenant.as_ref().and_then(|tenant| tenant(call)) {
                return Some(fault);
            }
            let mut faulty = faulty.lock().unwrap();
            if let Some(at) = faulty.iter().position(|(o, _)| *o == call.operation) {
                return Some(faulty.remove(at).1);
            }
            let always = always_faulty.lock().unwrap().get(call.operation).cloned();
            Some(always.unwrap_or_else(|| match &schedule {
                Some(schedule) => schedule.call(call),
                None => Fault::Delay(LATENCY),
            }))
        };
        let hanging = Arc::clone(&self.hanging);
        self.fake.on_call(move |call| {
            let mut hanging = hanging.lock().unwrap().clone().into_iter();
            if life.is_over() || hanging.any(|(o, of)| o == call.operation && of == call.object) {
                return Some(Fault::Hang);
            }
            if !EFFECTS.contains(&call.operation) {
                return slow(call);
            }
            let n = life.calls.fetch_add(1, Ordering::Relaxed) + 1;
            if life.crash == Crash::Call(n, When::Before) {
                life.end();
                return Some(Fault::Hang);
            }
            if call.operation == "start_container" {
                watch
                    .lock()
                    .unwrap()
                    .check_start(&fake, &disk, &call.object);
            }
            if life.crash == Crash::Call(n, When::After) {
                life.end();
                return Some(Fault::HangAfterEffect);
            }
            slow(call)
        });
    }

    /// What containers do, by the pod's name and the attempt.
    pub fn behave(&self, behaviour: impl Fn(&str, u32) -> Behaviour + Send + Sync + 'static) {
        let watch = Arc::clone(&self.watch);
        self.fake.on_start(move |config| {
            let start = start_of(config);
            let does = behaviour(&start.pod, start.attempt);
            watch.lock().unwrap().note_start(start);
            does
        });
    }

    /// What containers do, by the pod's name without the node's, the container's name and the attempt.
    pub fn behave_each(
        &self,
        behaviour: impl Fn(&str, &str, u32) -> Behaviour + Send + Sync + 'static,
    ) {
        let watch = Arc::clone(&self.watch);
        self.fake.on_start(move |config| {
            let start = start_of(config);
            let pod = start.pod.strip_suffix("-sim").unwrap_or(&start.pod);
            let does = behaviour(pod, &start.container, start.attempt);
            watch.lock().unwrap().note_start(start);
            does
        });
    }

    /// Containers do what their commands say.
    pub fn behave_as_told(&self) {
        let watch = Arc::clone(&self.watch);
        self.fake.on_start(move |config| {
            watch.lock().unwrap().note_start(start_of(config));
            Behaviour::of_config(config)
        });
    }

    /// One further call of `operation` goes wrong.
    pub fn fail_once(&self, operation: &'static str, fault: Fault) {
        self.faulty.lock().unwrap().push((operation, fault));
    }

    /// Every call of `operation` goes wrong from now on.
    pub fn fail_always(&self, operation: &'static str, fault: Fault) {
        self.always_faulty.lock().unwrap().insert(operation, fault);
    }

    /// No call goes wrong any more that has to go wrong always.
    pub fn clear_faults(&self) {
        self.always_faulty.lock().unwrap().clear();
    }

    /// Every call of `operation` about `object` hangs from now on.
    pub fn hang(&self, operation: &'static str, object: &str) {
        self.hanging
            .lock()
            .unwrap()
            .push((operation, object.to_owned()));
    }

    /// Nothing hangs any more but what hangs already.
    pub fn hang_nothing(&self) {
        self.hanging.lock().unwrap().clear();
    }

    /// The agent is gone, as after SIGKILL.
    pub async fn crash(&mut self) {
        self.life.end();
        if let Some(schedule) = &self.schedule {
            schedule.note_end();
        }
        if let Some(agent) = self.agent.take() {
            agent.crash();
        }
        // What was under way is dropped where it is; effects that had begun end.
        for _ in 0..50 {
            tokio::task::yield_now().await;
        }
        if let Some(engine) = &self.engine {
            // With the process go its locks.
            drop(engine.lock().unwrap().take());
        }
    }

    /// The agent is gone and so is what was not synced.
    pub async fn lose_power(&mut self) {
        self.crash().await;
        self.disk.settle(true);
    }

    pub async fn stop(&mut self) {
        let agent = self.agent.take().unwrap();
        agent.stop().await.unwrap();
        self.life.end();
    }

    /// Orders what `holdfast drain-local` orders.
    pub fn drain(&self, timeout: Option<Duration>) {
        self.agent.as_ref().unwrap().local_drain().drain(timeout);
    }

    /// The agent ends because the machine goes down, as after SIGTERM then. The machine is still up.
    pub async fn power_off(&mut self) {
        let agent = self.agent.take().unwrap();
        agent.power_off().await.unwrap();
        self.life.end();
    }

    pub async fn restart(&mut self) {
        self.crash().await;
        self.start().await;
    }

    /// The machine starts anew: nothing runs, the boot is another one. What was flushed had the time to get
    /// to the disk. The agent is not started.
    pub async fn reboot(&mut self) {
        self.crash().await;
        self.disk.settle(false);
        self.fake.restart(Restart::Wipe).unwrap();
        self.mounts.unmount();
        self.clock.reboot();
    }

    /// The power fails and comes back: the boot is another one, and the runtime has forgotten the starts of the
    /// containers that `forgets` names, by pod without the node's name and container. The agent is not started.
    pub async fn cut_power(&mut self, forgets: impl Fn(&str, &str) -> bool) {
        self.lose_power().await;
        let of_pod = |pod: &str, container: &str| {
            forgets(pod.strip_suffix("-sim").unwrap_or(pod), container)
        };
        self.fake.lose_power(of_pod).unwrap();
        self.mounts.unmount();
        self.clock.reboot();
    }

    /// What ran is gone from the runtime, and nothing else. The agent is not started.
    pub fn reboot_runtime(&self) {
        self.fake.restart(Restart::Wipe).unwrap();
    }

    pub fn agent(&self) -> &Embedded {
        self.agent.as_ref().unwrap()
    }

    /// Time passes, until the life is over at the latest. Returns whether it is not.
    pub async fn pass_alive(&self, time: Duration) -> bool {
        tokio::select! {
            biased;
            () = self.life.ended.notified() => false,
            () = tokio::time::sleep(time) => true,
        }
    }

    pub async fn pass(&self, seconds: u64) {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
    }

    /// Waits for something to become true.
    pub async fn until(&self, what: &str, seconds: u64, holds: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(seconds);
        while !holds(self) {
            assert!(
                Instant::now() < deadline,
                "not within {seconds} s: {what}\n{}",
                self.describe()
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    // ------------------------------------------------------------------------------------- manifests

    pub fn manifest(&self, pod: &str, spec: &str) {
        let text = format!(
            r#"{{"apiVersion":"v1","kind":"Pod","metadata":{{"name":"{pod}","namespace":"default"}},"spec":{spec}}}"#
        );
        let hidden = self.dir.path().join(format!("manifests/.{pod}"));
        std::fs::write(&hidden, text).unwrap();
        std::fs::rename(hidden, self.path_of(pod)).unwrap();
    }

    pub fn remove_manifest(&self, pod: &str) {
        std::fs::remove_file(self.path_of(pod)).unwrap();
    }

    fn path_of(&self, pod: &str) -> PathBuf {
        self.dir.path().join(format!("manifests/{pod}.json"))
    }

    // --------------------------------------------------------------------------------------- looking

    /// What the agent remembers, or what is on the disk when there is none.
    pub fn state(&self) -> Arc<State> {
        match &self.agent {
            Some(agent) => agent.store().snapshot(),
            None => Arc::new(self.disk.load()),
        }
    }

    /// The newest pod of that name on record.
    pub fn uid(&self, pod: &str) -> PodUid {
        let state = self.state();
        let found = state
            .pods
            .values()
            .filter(|v| v.record.pod.name().starts_with(pod))
            .max_by_key(|v| v.record.first_seen.boottime_ms)
            .map(|v| v.record.pod.uid());
        found.unwrap_or_else(|| panic!("no pod {pod} on record\n{}", self.describe()))
    }

    pub fn has_record(&self, pod: &str) -> bool {
        let state = self.state();
        state
            .pods
            .values()
            .any(|v| v.record.pod.name().starts_with(pod))
    }

    pub fn worker(&self, pod: &str) -> WorkerRecord {
        let uid = self.uid(pod);
        self.state().record(uid.as_str()).cloned().unwrap()
    }

    pub fn container(&self, pod: &str) -> ContainerRecord {
        let key = format!("{}/main", self.uid(pod));
        self.state()
            .record(&key)
            .cloned()
            .unwrap_or_else(|| panic!("no record of container {key}"))
    }

    /// What is on record of one container, whatever its kind; nothing at all of one that was never started.
    pub fn container_of(&self, pod: &str, container: &str) -> ContainerRecord {
        if !self.has_record(pod) {
            return ContainerRecord::default();
        }
        let key = format!("{}/{container}", self.uid(pod));
        self.state().record(&key).cloned().unwrap_or_default()
    }

    pub fn status(&self, pod: &str) -> Option<StatusRecord> {
        if !self.has_record(pod) {
            return None;
        }
        self.state().record(self.uid(pod).as_str()).cloned()
    }

    pub fn phase(&self, pod: &str) -> String {
        let status = self.status(pod);
        status
            .and_then(|s| s.status.phase.clone())
            .unwrap_or_default()
    }

    /// Reason of the Waiting state of the pod's container.
    pub fn waiting(&self, pod: &str) -> String {
        let Some(record) = self.status(pod) else {
            return String::new();
        };
        let statuses = record.status.container_statuses.clone();
        statuses
            .unwrap_or_default()
            .into_iter()
            .filter_map(|c| c.state?.waiting?.reason)
            .collect()
    }

    pub fn restarts(&self, pod: &str) -> i32 {
        let statuses = self.status(pod).unwrap().status.container_statuses.clone();
        statuses.unwrap_or_default()[0].restart_count
    }

    /// Ids of the pod's running containers.
    pub fn running(&self, pod: &str) -> Vec<String> {
        self.of_pod(pod)
            .into_iter()
            .filter(|c| c.state() == v1::ContainerState::ContainerRunning)
            .map(|c| c.id)
            .collect()
    }

    /// The pod's containers, whatever their state.
    pub fn of_pod(&self, pod: &str) -> Vec<v1::Container> {
        let mut all = self.fake.containers();
        all.retain(|c| label(&c.labels, "io.kubernetes.pod.name").starts_with(pod));
        all
    }

    pub fn starts(&self, pod: &str) -> Vec<Start> {
        let watch = self.watch.lock().unwrap();
        let starts = watch.starts.iter().filter(|s| s.pod.starts_with(pod));
        starts.cloned().collect()
    }

    /// The pod was removed: should it come back, its restart counts begin anew.
    pub fn begins_anew(&self, uid: &PodUid) {
        self.watch.lock().unwrap().forget(uid.as_str());
    }

    /// Calls since the last `clear_calls` that change something.
    pub fn effects(&self) -> Vec<String> {
        self.fake
            .calls()
            .into_iter()
            .filter(|c| EFFECTS.contains(&c.operation))
            .map(|c| format!("{} {}", c.operation, c.object))
            .collect()
    }

    /// What went wrong that must never happen.
    pub fn wrongs(&self) -> Vec<String> {
        self.watch.lock().unwrap().wrongs.clone()
    }

    /// Whether anything of a pod is left anywhere.
    pub fn left_of(&self, pod: &str, uid: &str) -> Vec<String> {
        let mut left = Vec::new();
        for c in self.fake.containers() {
            if label(&c.labels, "io.kubernetes.pod.uid") == uid {
                left.push(format!("container {} of {pod}", c.id));
            }
        }
        for s in self.fake.sandboxes() {
            if label(&s.labels, "io.kubernetes.pod.uid") == uid {
                left.push(format!("sandbox {} of {pod}", s.id));
            }
        }
        if self.dir.path().join("root/pods").join(uid).exists() {
            left.push(format!("directory of {pod}"));
        }
        let logs = std::fs::read_dir(self.dir.path().join("logs")).unwrap();
        for entry in logs {
            let name = entry.unwrap().file_name().to_string_lossy().into_owned();
            if name.ends_with(uid) {
                left.push(format!("logs of {pod}"));
            }
        }
        let state = self.state();
        let of_pod = [
            ("pods", state.pods.contains_key(uid)),
            ("admissions", state.admissions.contains_key(uid)),
            ("workers", state.workers.contains_key(uid)),
            ("queue", state.queue.contains_key(uid)),
            ("pleg", state.pleg.contains_key(uid)),
            ("statuses", state.statuses.contains_key(uid)),
            (
                "containers",
                state.containers.keys().any(|k| k.starts_with(uid)),
            ),
            ("volumes", state.volumes.keys().any(|k| k.starts_with(uid))),
            ("probes", state.probes.keys().any(|k| k.starts_with(uid))),
            ("objects", state.objects.keys().any(|k| k.contains(uid))),
            ("facts", state.facts.keys().any(|k| k.contains(uid))),
        ];
        for (table, _) in of_pod.iter().filter(|(_, there)| *there) {
            left.push(format!("record of {pod} in {table}"));
        }
        left
    }

    pub fn describe(&self) -> String {
        use std::fmt::Write as _;
        let mut text = format!("at {:?}\n", self.began.elapsed());
        text += &self.describe_api();
        let state = self.state();
        for (uid, v) in &state.pods {
            let worker = state.record::<WorkerRecord>(uid).map(|w| &w.phase);
            let status = state.record::<StatusRecord>(uid);
            writeln!(
                text,
                "pod {} {uid}: {worker:?} {:?}",
                v.record.pod.name(),
                status.and_then(|s| s.status.phase.clone())
            )
            .unwrap();
        }
        for c in self.fake.containers() {
            let meta = c.metadata.clone().unwrap_or_default();
            writeln!(
                text,
                "container {} of {}: attempt {} {:?} {}",
                meta.name,
                label(&c.labels, "io.kubernetes.pod.name"),
                meta.attempt,
                c.state(),
                &c.id[..8],
            )
            .unwrap();
        }
        for start in &self.watch.lock().unwrap().starts {
            writeln!(
                text,
                "start of {}/{} attempt {} at {:?}",
                start.pod,
                start.container,
                start.attempt,
                start.at - self.began
            )
            .unwrap();
        }
        for line in state.journal.values().rev().take(40) {
            writeln!(text, "journal: {} | {}", line.record.what, line.record.why).unwrap();
        }
        text
    }
}

/// File systems that the agent mounted under a directory, where it may.
struct Mounts(PathBuf);

impl Mounts {
    fn unmount(&self) {
        let mounts = std::fs::read("/proc/self/mounts").unwrap_or_default();
        let mounts = String::from_utf8_lossy(&mounts);
        for line in mounts.lines().rev() {
            let point = line.split(' ').nth(1).unwrap_or_default();
            if std::path::Path::new(point).starts_with(&self.0) {
                nix::mount::umount2(point, nix::mount::MntFlags::MNT_DETACH).unwrap();
            }
        }
    }
}

impl Drop for Mounts {
    fn drop(&mut self) {
        self.unmount();
    }
}

fn config(dir: PathBuf) -> AgentConfig {
    let file = dir.join("kubelet.yaml");
    std::fs::write(
        &file,
        format!(
            "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\npodLogsDir: {}\n\
             staticPodPath: {}\nfileCheckFrequency: 1s\ncgroupsPerQOS: false\nresolvConf: \"\"\n",
            dir.join("logs").display(),
            dir.join("manifests").display()
        ),
    )
    .unwrap();
    let flags = KubeletFlags {
        root_dir: Some(dir.join("root")),
        state_dir: Some(dir.join("state")),
        config: Some(file),
        hostname_override: Some("sim".to_owned()),
        container_logs_dir: Some(dir.join("links")),
        ..KubeletFlags::default()
    };
    resolve(&flags).unwrap().0
}

/// A pod spec with one container, `main`.
pub fn spec(restart: &str, more: &str) -> String {
    format!(
        r#"{{"restartPolicy":"{restart}"{more},"containers":[{{"name":"main","image":"{IMAGE}","command":["sh"]}}]}}"#
    )
}
