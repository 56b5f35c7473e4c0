//! The manager over pods that end when the test says so.

use std::sync::Mutex;

use serde_json::json;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::*;
use crate::core::state::{
    AdmissionDecision, AdmissionRecord, PodRecord, StatusRecord, TerminationCause, Transaction,
};
use crate::kubeletconfig::PriorityPeriod;
use crate::store::StoreOptions;
use crate::store::backend::{Faults, FaultyBackend, MemoryBackend};
use crate::store::codec::Loaded;
use crate::types::events::MemoryRecorder;
use crate::types::{BootId, Json, PodSource};

const CRITICAL: i32 = 2_000_000_000;

struct TestClock {
    began: Instant,
    boot: Mutex<u64>,
}

impl Clock for TestClock {
    fn now(&self) -> Stamp {
        let ms = 1_000 + i64::try_from(self.began.elapsed().as_millis()).unwrap();
        Stamp {
            boot: BootId(*self.boot.lock().unwrap()),
            boottime_ms: ms,
            wall_ms: ms,
        }
    }
}

/// Pods by name, and what was ordered.
struct Pods {
    began: Instant,
    store: Store,
    state: RuntimeState,
    all: Mutex<Vec<Arc<Pod>>>,
    /// Second, name and grace.
    ordered: Mutex<Vec<(u64, String, i64)>>,
    more: watch::Sender<usize>,
}

impl NodePods for Pods {
    fn unfinished(&self) -> Vec<Arc<Pod>> {
        let state = self.store.snapshot();
        let mut all = self.all.lock().unwrap().clone();
        all.retain(|pod| {
            let worker = state.record::<WorkerRecord>(pod.uid().as_str());
            worker.is_none_or(|w| !matches!(w.phase, WorkerPhase::Finished { .. }))
        });
        all
    }

    fn has_worker(&self, uid: &PodUid) -> bool {
        self.all.lock().unwrap().iter().any(|pod| pod.uid() == *uid)
    }

    fn terminate(&self, pod: &Arc<Pod>, grace_seconds: i64) {
        let record = ShutdownRecord::of(&self.store.snapshot());
        assert!(record.is_some(), "a pod is stopped before its record");
        assert!(self.state.is_shutting_down());
        let at = self.began.elapsed().as_secs();
        let mut ordered = self.ordered.lock().unwrap();
        ordered.push((at, pod.metadata.name.clone().unwrap(), grace_seconds));
        self.more.send_modify(|n| *n += 1);
    }
}

struct World {
    clock: Arc<TestClock>,
    store: Store,
    state: RuntimeState,
    recorder: MemoryRecorder,
    metrics: Metrics,
    connection: Connection,
    announcer: Announcer,
    link: Link,
    local: LocalDrain,
    /// Seconds for the pods that are not critical, and for those that are.
    configured: Option<(i64, i64)>,
    pods: Arc<Pods>,
    life: Option<JoinHandle<()>>,
}

impl World {
    fn new(pods: &[(&str, i32, i64)]) -> Self {
        Self::over(pods, Store::in_memory)
    }

    fn over(pods: &[(&str, i32, i64)], store: impl FnOnce(Arc<dyn Clock>) -> Store) -> Self {
        let began = Instant::now();
        let clock = Arc::new(TestClock {
            began,
            boot: Mutex::new(1),
        });
        let store = store(Arc::clone(&clock) as _);
        let state = RuntimeState::default();
        let (announcer, link) = link();
        let pods = pods.iter().map(|(name, priority, grace)| {
            let pod = serde_json::from_value(json!({
                "metadata": {"name": name, "namespace": "ns", "uid": name},
                "spec": {"priority": priority, "terminationGracePeriodSeconds": grace, "containers": [{"name": "c"}]},
            }));
            Arc::new(pod.unwrap())
        });
        Self {
            pods: Arc::new(Pods {
                began,
                store: store.clone(),
                state: state.clone(),
                all: Mutex::new(pods.collect()),
                ordered: Mutex::default(),
                more: watch::Sender::default(),
            }),
            clock,
            store,
            state,
            recorder: MemoryRecorder::default(),
            metrics: Metrics::default(),
            connection: Connection::default(),
            announcer,
            link,
            local: LocalDrain::default(),
            configured: Some((20, 10)),
            life: None,
        }
    }

    fn start(&mut self) {
        let group = |priority, seconds| PriorityPeriod { priority, seconds };
        let manager = NodeShutdown::new(NodeShutdownOptions {
            periods: self.configured.and_then(|(others, critical)| {
                let groups = [group(0, others), group(CRITICAL, critical)];
                Periods::new(Duration::ZERO, Duration::ZERO, &groups)
            }),
            link: self.link.clone(),
            local: self.local.clone(),
            pods: Arc::clone(&self.pods) as _,
            store: self.store.clone(),
            clock: Arc::clone(&self.clock) as _,
            runtime_state: self.state.clone(),
            recorder: Arc::new(self.recorder.clone()),
            metrics: self.metrics.clone(),
            connection: Some(self.connection.clone()),
        });
        self.life = Some(tokio::spawn(manager.run(CancellationToken::new())));
    }

    /// The agent dies; the next one is told nothing that is not recorded.
    async fn crash(&mut self) {
        let life = self.life.take().unwrap();
        life.abort();
        drop(life.await);
        self.state.set_shutting_down(false);
        (self.announcer, self.link) = link();
        self.local = LocalDrain::default();
    }

    fn announce(&self, announced: Announced) {
        self.announcer.announced.send_replace(announced);
    }

    /// Waits until so many pods were ordered to stop in all.
    async fn ordered(&self, count: usize) -> Vec<(u64, String, i64)> {
        let mut more = self.pods.more.subscribe();
        more.wait_for(|n| *n >= count).await.unwrap();
        self.pods.ordered.lock().unwrap().clone()
    }

    async fn released(&mut self) -> u64 {
        self.announcer.released.wait_for(|is| *is).await.unwrap();
        self.clock.began.elapsed().as_secs()
    }

    async fn put(&self, transaction: Transaction) {
        self.store.commit_or_hold(transaction).await.unwrap();
    }

    async fn ends(&self, pod: &str) {
        let now = self.clock.now();
        let record = WorkerRecord {
            full_name: format!("{pod}_ns"),
            queued: now,
            started: Some(now),
            phase: WorkerPhase::Finished {
                since: now,
                cause: shutdown::cause(),
            },
            deleted: false,
            restart_requested: false,
            runtime_only: false,
        };
        self.put(Transaction::new().put(pod, record)).await;
    }

    fn record(&self) -> ShutdownRecord {
        ShutdownRecord::of(&self.store.snapshot()).unwrap()
    }

    fn events(&self) -> Vec<String> {
        let events = self.recorder.events().into_iter();
        events
            .map(|event| {
                assert_eq!(event.reason, "Shutdown");
                event.message
            })
            .collect()
    }

    /// Returns start and end of the last shutdown from the metrics, in whole seconds.
    fn shown(&self) -> (f64, f64) {
        let metrics = &self.metrics;
        (
            metrics.graceful_shutdown_start_time.get().floor(),
            metrics.graceful_shutdown_end_time.get().floor(),
        )
    }
}

fn order(at: u64, pod: &str, grace: i64) -> (u64, String, i64) {
    (at, pod.to_owned(), grace)
}

#[tokio::test(start_paused = true)]
async fn critical_pods_are_stopped_after_all_others_and_then_the_machine_may_go_down() {
    let mut w = World::new(&[("a", 0, 30), ("critical", CRITICAL, 5), ("b", 100, 3)]);
    w.start();
    w.announce(Announced::Up);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(!w.state.is_shutting_down() && w.events().is_empty());
    w.announce(Announced::GoesDown);
    assert_eq!(w.ordered(2).await, [order(2, "a", 20), order(2, "b", 3)]);
    assert!(w.state.is_shutting_down());
    assert_eq!(w.events(), [shutdown::BEGUN_MESSAGE]);
    assert_eq!(w.shown(), (3.0, 0.0));
    w.ends("a").await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(w.pods.ordered.lock().unwrap().len(), 2, "b still ends");
    w.ends("b").await;
    assert_eq!(w.ordered(3).await[2], order(5, "critical", 5));
    assert!(!*w.announcer.released.borrow());
    w.ends("critical").await;
    assert_eq!(w.released().await, 5, "nobody is waited for in vain");
    let record = w.record();
    assert!(record.ended.is_some());
    assert_eq!(record.deadline, record.begun.plus(Duration::from_secs(30)));
    assert_eq!(w.shown(), (3.0, 6.0));
    // The same once more is no second shutdown.
    w.announce(Announced::GoesDown);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(w.record(), record);
    assert_eq!(w.pods.ordered.lock().unwrap().len(), 3);
    assert_eq!(w.events().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn groups_are_shortened_together_where_the_machine_waits_less_than_configured() {
    let mut world = World::new(&[("web", 0, 30), ("system", CRITICAL, 30)]);
    world
        .announcer
        .delay
        .send_replace(Some(Duration::from_secs(17)));
    world.start();
    world.announce(Announced::GoesDown);
    // Of the 30 s that are configured, 15 s are left.
    assert_eq!(
        world.ordered(3).await,
        [
            order(0, "web", 10),
            order(10, "web", 10),
            order(10, "system", 5)
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn pods_that_do_not_end_hold_the_machine_as_long_as_configured() {
    let mut w = World::new(&[("a", 0, 30), ("critical", CRITICAL, 30)]);
    w.start();
    w.announce(Announced::GoesDown);
    let ordered = w.ordered(2).await;
    assert_eq!(ordered[0], order(0, "a", 20));
    // Who is left of the first group is told again, and waited for.
    let mut later = w.ordered(3).await[1..].to_vec();
    later.sort();
    assert_eq!(later, [order(20, "a", 20), order(20, "critical", 10)]);
    assert_eq!(
        w.released().await,
        32,
        "the groups, and two seconds for records"
    );
}

// Invariant POD-5.
#[tokio::test(start_paused = true)]
async fn the_machine_is_let_go_once_the_ends_are_on_the_disk_or_the_time_is_over() {
    for (recovers, expected) in [(true, 10..=16), (false, 30..=31)] {
        let faults = Faults::new();
        let backend = FaultyBackend::new(MemoryBackend::new(), faults.clone());
        let mut w = World::over(&[("a", 0, 30)], |clock| {
            let options = StoreOptions {
                inline: true,
                ..StoreOptions::default()
            };
            let (loaded, metrics) = (Loaded::default(), Metrics::default());
            Store::start(Box::new(backend), loaded, options, clock, metrics).unwrap()
        });
        w.start();
        w.announce(Announced::GoesDown);
        w.ordered(1).await;
        faults.set_broken(true);
        w.ends("a").await;
        tokio::time::sleep(Duration::from_secs(10)).await;
        let ended = w.record().ended;
        assert!(ended.is_none(), "nobody is told before it is on the disk");
        assert!(!*w.announcer.released.borrow());
        faults.set_broken(!recovers);
        let released = w.released().await;
        assert!(expected.contains(&released), "{released}");
        assert!(w.record().ended.is_some());
    }
}

#[tokio::test(start_paused = true)]
async fn an_end_whose_commit_has_no_known_outcome_is_on_record_once() {
    // One of these syncs is that of the end.
    for sync in 1..=6 {
        let faults = Faults::new();
        let backend = FaultyBackend::new(MemoryBackend::new(), faults.clone());
        let mut w = World::over(&[("a", 0, 30)], |clock| {
            let options = StoreOptions {
                inline: true,
                ..StoreOptions::default()
            };
            let (loaded, metrics) = (Loaded::default(), Metrics::default());
            Store::start(Box::new(backend), loaded, options, clock, metrics).unwrap()
        });
        w.start();
        w.announce(Announced::GoesDown);
        w.ordered(1).await;
        faults.fail_sync(sync);
        w.ends("a").await;
        w.released().await;
        let state = w.store.snapshot();
        let lines = state.journal.values().map(|line| line.record.what.as_str());
        let ends = lines.filter(|what| *what == "shutdown ended").count();
        assert_eq!(ends, 1, "sync {sync} failed");
        assert!(w.record().ended.is_some());
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_was_forgotten_is_not_waited_for() {
    let mut w = World::new(&[("deleted", 0, 30)]);
    w.start();
    w.announce(Announced::GoesDown);
    w.ordered(1).await;
    let now = w.clock.now();
    let ending = WorkerRecord {
        full_name: "deleted_ns".to_owned(),
        queued: now,
        started: Some(now),
        phase: WorkerPhase::Terminated {
            since: now,
            cause: TerminationCause::Deleted,
        },
        deleted: true,
        restart_requested: false,
        runtime_only: false,
    };
    w.put(Transaction::new().put("deleted", ending)).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    w.put(Transaction::new().delete::<WorkerRecord>("deleted"))
        .await;
    assert_eq!(w.released().await, 1);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_shutdown_spares_who_was_not_told_yet_and_the_next_one_stops_all() {
    let mut w = World::new(&[("a", 0, 30), ("critical", CRITICAL, 30)]);
    w.start();
    w.announce(Announced::GoesDown);
    w.ordered(1).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    w.announce(Announced::Up);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(w.pods.ordered.lock().unwrap().len(), 1);
    assert!(!w.state.is_shutting_down() && !*w.announcer.released.borrow());
    assert!(w.record().cancelled.is_some());
    assert_eq!(
        w.events(),
        [shutdown::BEGUN_MESSAGE, shutdown::CANCELLED_MESSAGE]
    );
    w.ends("a").await;
    w.announce(Announced::GoesDown);
    assert_eq!(w.ordered(2).await[1], order(61, "critical", 10));
    w.ends("critical").await;
    w.released().await;
    assert_eq!(w.record().cancelled, None);
    // Cancelled after its end: the machine is held back anew.
    w.announce(Announced::Up);
    w.announcer.released.wait_for(|is| !*is).await.unwrap();
    assert!(!w.state.is_shutting_down());
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_dies_during_a_shutdown_goes_on_with_the_time_that_was_left() {
    let mut w = World::new(&[("a", 0, 30), ("critical", CRITICAL, 30)]);
    w.start();
    w.announce(Announced::GoesDown);
    w.ordered(1).await;
    let record = w.record();
    tokio::time::sleep(Duration::from_secs(15)).await;
    w.crash().await;
    w.start();
    assert!(w.state.is_shutting_down(), "before anything is announced");
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(
        w.pods.ordered.lock().unwrap().len(),
        1,
        "it may be cancelled"
    );
    w.announce(Announced::GoesDown);
    assert_eq!(w.ordered(2).await[1], order(17, "a", 20));
    assert_eq!(w.record(), record, "the same shutdown");
    assert_eq!(w.events().len(), 1, "told once");
    assert_eq!(w.released().await, 32);
}

#[tokio::test(start_paused = true)]
async fn without_an_answer_a_shutdown_on_record_goes_on_and_with_one_it_may_be_over() {
    let mut w = World::new(&[("a", 0, 30)]);
    w.start();
    w.announce(Announced::GoesDown);
    w.ordered(1).await;
    w.crash().await;
    w.start();
    assert_eq!(w.ordered(2).await[1].0, ANSWER.as_secs());
    w.crash().await;
    w.start();
    w.announce(Announced::Up);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(w.pods.ordered.lock().unwrap().len(), 2);
    assert!(!w.state.is_shutting_down());
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_of_an_earlier_boot_is_over_and_its_times_are_shown() {
    let mut w = World::new(&[("a", 0, 30)]);
    w.start();
    w.announce(Announced::GoesDown);
    w.ordered(1).await;
    w.ends("a").await;
    w.released().await;
    w.crash().await;
    *w.clock.boot.lock().unwrap() = 2;
    w.metrics = Metrics::default();
    w.start();
    assert!(!w.state.is_shutting_down());
    assert_eq!(w.shown(), (1.0, 1.0));
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(w.pods.ordered.lock().unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn statuses_are_waited_for_while_the_api_server_answers() {
    for (up, told, at) in [(true, true, 1), (true, false, 2), (false, false, 0)] {
        let mut w = World::new(&[("a", 0, 30)]);
        if up {
            w.connection.answered();
        } else {
            w.connection.failed("refused");
        }
        let pod = w.pods.all.lock().unwrap()[0].clone();
        let status = |acknowledged| StatusRecord {
            name: "a".to_owned(),
            namespace: "ns".to_owned(),
            status: Json::new(Default::default()),
            version: 2,
            acknowledged,
            at: w.clock.now(),
            finished: true,
        };
        let admission = AdmissionRecord {
            decision: AdmissionDecision::Admitted,
            allocated: Default::default(),
            at: w.clock.now(),
        };
        let of_api = PodRecord {
            source: PodSource::Api,
            origin: String::new(),
            pod: Json(pod),
            first_seen: w.clock.now(),
            confirmed_epoch: 1,
        };
        let known = Transaction::new().put("a", of_api).put("a", admission);
        w.put(known.put("a", status(1))).await;
        let acknowledged = status(2);
        w.start();
        w.announce(Announced::GoesDown);
        w.ordered(1).await;
        w.ends("a").await;
        if told {
            tokio::time::sleep(Duration::from_secs(1)).await;
            w.put(Transaction::new().put("a", acknowledged)).await;
        }
        assert_eq!(w.released().await, at, "up: {up}, told: {told}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_drain_stops_pods_as_configured_and_a_short_one_gives_each_group_its_part() {
    for (timeout, critical_at, graces) in [
        (None, 20, (20, 10)),
        (Some(600), 20, (20, 10)),
        (Some(18), 10, (10, 5)),
    ] {
        let mut w = World::new(&[("a", 0, 30), ("critical", CRITICAL, 30)]);
        w.start();
        w.local.drain(timeout.map(Duration::from_secs));
        assert_eq!(w.ordered(1).await, [order(0, "a", graces.0)], "{timeout:?}");
        assert!(w.state.is_shutting_down() && w.record().local);
        let mut later = w.ordered(3).await[1..].to_vec();
        later.sort();
        let wanted = [
            order(critical_at, "a", graces.0),
            order(critical_at, "critical", graces.1),
        ];
        assert_eq!(later, wanted, "{timeout:?}");
        w.ends("a").await;
        w.ends("critical").await;
        w.released().await;
        assert!(w.record().ended.is_some());
        assert_eq!(w.events(), [shutdown::BEGUN_MESSAGE]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_drain_without_configured_periods_ends_within_its_time() {
    for (timeout, ends) in [(None, 29), (Some(30), 29), (Some(12), 11), (Some(0), 3)] {
        let mut w = World::new(&[("a", 0, 300)]);
        w.configured = None;
        w.start();
        w.local.drain(timeout.map(Duration::from_secs));
        assert_eq!(w.released().await, ends, "{timeout:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn only_an_order_of_the_machine_ends_a_drain_and_an_agent_that_dies_goes_on_with_it() {
    let mut w = World::new(&[("a", 0, 30), ("critical", CRITICAL, 30)]);
    w.start();
    w.local.drain(None);
    w.ordered(1).await;
    w.announce(Announced::Up);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let record = w.record();
    assert_eq!(record.cancelled, None);
    w.crash().await;
    w.start();
    w.announce(Announced::Up);
    assert_eq!(w.ordered(2).await[1], order(1, "a", 20), "at once");
    assert_eq!(w.record(), record);

    w.local.cancel();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(w.pods.ordered.lock().unwrap().len(), 2);
    assert!(w.record().cancelled.is_some() && !w.state.is_shutting_down());
    w.local.drain(None);
    w.ordered(3).await;
    assert_eq!(w.record().cancelled, None, "another one");
}

#[tokio::test(start_paused = true)]
async fn a_drain_upholds_a_shutdown_that_logind_takes_back_and_cannot_cancel_one() {
    let mut w = World::new(&[("a", 0, 30)]);
    w.start();
    w.announce(Announced::GoesDown);
    w.ordered(1).await;
    w.local.cancel();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(w.record().cancelled, None, "the machine goes down");
    w.local.drain(None);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(w.record().local);
    w.local.cancel();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let record = w.record();
    assert!(!record.local && record.cancelled.is_none(), "{record:?}");
    assert!(w.state.is_shutting_down(), "the machine still goes down");
    w.local.drain(None);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(w.record().local);
    w.announce(Announced::Up);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(w.record().cancelled, None);
    w.ends("a").await;
    w.released().await;
}

#[tokio::test(start_paused = true)]
async fn without_periods_the_end_of_the_machine_is_over_when_the_agent_runs_again_in_its_boot() {
    for (configured, is_stopped) in [(None, false), (Some((20, 10)), true)] {
        let mut w = World::new(&[("a", 0, 30)]);
        w.configured = configured;
        let now = w.clock.now();
        let record = ShutdownRecord {
            begun: now,
            deadline: now.plus(Duration::from_secs(20)),
            ended: None,
            cancelled: None,
            local: false,
        };
        w.put(record.transaction("systemd takes the machine down", now))
            .await;
        w.start();
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(w.state.is_shutting_down(), is_stopped);
        assert_eq!(w.pods.ordered.lock().unwrap().is_empty(), !is_stopped);
        assert_eq!(w.record().cancelled.is_some(), !is_stopped);
    }
}

#[tokio::test(start_paused = true)]
async fn the_groups_and_the_lock_are_on_record() {
    let mut w = World::new(&[]);
    w.start();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let groups = vec![(0, 20), (CRITICAL, 10)];
    let on_record = |w: &World| ManagerRecord::of(&w.store.snapshot()).unwrap().0;
    let wanted = ManagerRecord {
        groups,
        lock: Lock::default(),
    };
    assert_eq!(on_record(&w), wanted);
    let lock = Lock {
        state: shutdown::Inhibitor::Held,
        problem: Some("too short".to_owned()),
    };
    w.announcer.lock.send_replace(lock.clone());
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(on_record(&w), ManagerRecord { lock, ..wanted });
}

#[test]
fn a_pod_says_that_the_shutdown_stopped_it() {
    let TerminationCause::Evicted { reason, message } = shutdown::cause() else {
        panic!("another cause")
    };
    assert_eq!(reason, "Terminated");
    assert!(message.starts_with("Pod was terminated in response to"));
}
