use std::sync::Mutex;

use proptest::prelude::*;
use serde_json::json;
use tokio::time::Instant;

use super::*;
use crate::core::pressure::{Figure, Space};
use crate::core::state::{SignalRecord, Transaction};
use crate::kubeletconfig::EvictionThreshold;
use crate::store::StoreOptions;
use crate::store::backend::{Faults, FaultyBackend, MemoryBackend};
use crate::store::codec::Loaded;
use crate::types::BootId;
use crate::types::events::MemoryRecorder;

struct TokioClock(Instant);

impl Clock for TokioClock {
    fn now(&self) -> Stamp {
        let ms = i64::try_from(self.0.elapsed().as_millis()).unwrap();
        Stamp {
            boot: BootId(1),
            boottime_ms: ms,
            wall_ms: ms,
        }
    }
}

/// A node that has as much of everything as is said, and pods that end when they are stopped.
#[derive(Default)]
struct Node {
    available: Mutex<u64>,
    running: Mutex<Vec<Arc<Pod>>>,
    evicting: Mutex<Vec<Evicting>>,
    /// Names and grace periods.
    evicted: Mutex<Vec<(String, i64)>>,
    /// Signals for which pods cannot be measured.
    unmeasured: Mutex<Vec<Signal>>,
    /// Pods that are being stopped for another reason.
    stopping: Mutex<Vec<Stopping>>,
    /// Maximum age that each request for the usage of disks allowed.
    max_ages: Mutex<Vec<Duration>>,
    disks: Mutex<Disks>,
    /// Recording an eviction takes long.
    is_slow: Mutex<bool>,
    /// Pods may be wanted that are not known.
    knows_no_pods: Mutex<bool>,
    removal_hangs: Mutex<bool>,
    removals: Mutex<u32>,
    removed: Mutex<Vec<Waste>>,
    /// Available amount after the removal of garbage.
    after_removal: Mutex<Option<u64>>,
}

impl ActivePods for Node {
    fn running(&self) -> Vec<Arc<Pod>> {
        self.running.lock().unwrap().clone()
    }

    fn evict(&self, pod: &Arc<Pod>, eviction: Eviction) {
        assert!(eviction.annotations.contains_key("starved_resource"));
        if !*self.is_slow.lock().unwrap() {
            let mut running = self.running.lock().unwrap();
            running.retain(|p| p.uid() != pod.uid());
        }
        let mut evicted = self.evicted.lock().unwrap();
        evicted.push((pod.name().to_owned(), eviction.grace_seconds));
    }

    fn stopping(&self) -> Vec<Stopping> {
        self.stopping.lock().unwrap().clone()
    }

    fn evicting(&self) -> Vec<Evicting> {
        self.evicting.lock().unwrap().clone()
    }
}

impl Figures for Node {
    fn observe(&self) -> BoxFuture<'_, Observations> {
        let figure = Figure {
            available: *self.available.lock().unwrap(),
            capacity: 1000,
        };
        let figures =
            [Signal::Memory, Signal::NodeFs, Signal::ImageFs].map(|signal| (signal, figure));
        let disks = *self.disks.lock().unwrap();
        Box::pin(async move {
            Observations {
                figures: figures.into(),
                disks,
            }
        })
    }

    fn usage(&self, query: UsageQuery) -> BoxFuture<'_, Option<BTreeMap<PodUid, PodUse>>> {
        self.max_ages.lock().unwrap().push(query.max_age);
        let stopping = self.stopping().into_iter().map(|s| s.pod);
        let pods = self.running().into_iter().chain(stopping).map(|pod| {
            let used = PodUse {
                memory: pod
                    .name()
                    .strip_prefix('p')
                    .map(|used| used.parse().unwrap()),
                volumes: Space::default(),
                ..PodUse::default()
            };
            (pod.uid(), used)
        });
        let is_measured = !self.unmeasured.lock().unwrap().contains(&query.signal);
        let usage = is_measured.then(|| pods.collect());
        Box::pin(async { usage })
    }

    fn alarm(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::pending())
    }
}

impl Garbage for Node {
    fn remove(&self, waste: Waste) -> BoxFuture<'_, bool> {
        self.removed.lock().unwrap().push(waste);
        if *self.knows_no_pods.lock().unwrap() {
            return Box::pin(async { false });
        }
        *self.removals.lock().unwrap() += 1;
        if *self.removal_hangs.lock().unwrap() {
            return Box::pin(std::future::pending());
        }
        if let Some(available) = *self.after_removal.lock().unwrap() {
            *self.available.lock().unwrap() = available;
        }
        Box::pin(async { true })
    }
}

fn threshold(signal: Signal, grace: Option<u64>) -> Threshold {
    Threshold {
        signal,
        value: EvictionThreshold::Quantity(100),
        grace: grace.map(Duration::from_secs),
        minimum_reclaim: None,
    }
}

struct World {
    node: Arc<Node>,
    store: Store,
    clock: Arc<dyn Clock>,
    recorder: MemoryRecorder,
    pressure: watch::Sender<Pressure>,
    rules: Rules,
    /// The pods are known.
    is_started: bool,
}

impl World {
    /// With a threshold of 100, and pods that are called after the memory they use.
    fn new(signal: Signal, grace: Option<u64>) -> Self {
        let clock: Arc<dyn Clock> = Arc::new(TokioClock(Instant::now()));
        let pod = |name: &str| {
            let pod = json!({"metadata": {"name": name, "namespace": "n", "uid": name}, "spec": {"containers": []}});
            Arc::new(serde_json::from_value(pod).unwrap())
        };
        let node = Node {
            available: Mutex::new(500),
            running: Mutex::new(["p1", "p3", "p2"].map(pod).into()),
            ..Node::default()
        };
        Self {
            node: Arc::new(node),
            store: Store::in_memory(Arc::clone(&clock)),
            clock,
            recorder: MemoryRecorder::default(),
            pressure: watch::Sender::default(),
            rules: Rules {
                thresholds: vec![threshold(signal, grace)],
                transition: Duration::from_secs(300),
                max_pod_grace: 0,
            },
            is_started: true,
        }
    }

    fn set(&self, available: u64) {
        *self.node.available.lock().unwrap() = available;
    }

    /// An agent for so many seconds, and half of one.
    async fn live(&self, seconds: u64) {
        let remedies = self.is_started.then(|| Remedies {
            pods: Arc::<Node>::clone(&self.node),
            garbage: Arc::<Node>::clone(&self.node),
        });
        let manager = NodePressure::new(PressureOptions {
            remedies: Arc::new(remedies.map_or_else(OnceLock::new, OnceLock::from)),
            figures: Arc::<Node>::clone(&self.node),
            rules: self.rules.clone(),
            signals: pressure::on_record(&self.store.snapshot()),
            store: self.store.clone(),
            clock: Arc::clone(&self.clock),
            recorder: Arc::new(self.recorder.clone()),
            metrics: Metrics::default(),
            pressure: self.pressure.clone(),
        });
        let life = Duration::from_secs(seconds) + Duration::from_millis(500);
        drop(tokio::time::timeout(life, manager.run(CancellationToken::new())).await);
    }

    fn evicted(&self) -> Vec<String> {
        let evicted = self.node.evicted.lock().unwrap();
        evicted.iter().map(|(name, _)| name.clone()).collect()
    }
}

#[tokio::test(start_paused = true)]
async fn the_first_in_rank_goes_and_the_next_waits_for_its_end() {
    let world = World::new(Signal::Memory, None);
    world.live(30).await;
    assert_eq!(
        (world.evicted(), world.recorder.events().len()),
        (vec![], 0)
    );
    world.set(50);
    let since = world.clock.now();
    let being_evicted = Evicting {
        since,
        grace_seconds: 1,
    };
    world.node.evicting.lock().unwrap().push(being_evicted);
    world.live(35).await;
    assert!(world.pressure.borrow().memory, "it is told at once");
    assert_eq!(world.evicted(), [""; 0], "one is being evicted");
    world.live(8).await;
    assert_eq!(world.evicted()[..1], ["p3"], "that one is overdue");
    world.node.evicting.lock().unwrap().clear();
    world.set(500);
    let gone = world.evicted();
    world.live(400).await;
    assert_eq!(
        (world.evicted(), *world.pressure.borrow()),
        (gone, Pressure::default())
    );
    let events = world.recorder.events();
    assert_eq!(events[0].reason, "EvictionThresholdMet");
    assert_eq!(events[0].message, "Attempting to reclaim memory");
    assert!(events.len() <= 2, "{events:?}");
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_leaks_while_it_ends_slowly_goes_before_others() {
    for (left, wanted) in [(500, "p9"), (1, "p3"), (0, "p3")] {
        let world = World::new(Signal::Memory, None);
        let pod = json!({"metadata": {"name": "p9", "namespace": "n", "uid": "p9", "deletionTimestamp": "2026-01-01T00:00:00Z"}, "spec": {"containers": []}});
        let now = world.clock.now();
        world.node.stopping.lock().unwrap().push(Stopping {
            pod: Arc::new(serde_json::from_value(pod).unwrap()),
            deadline: now.plus(Duration::from_secs(left)),
        });
        world.set(50);
        world.live(5).await;
        assert_eq!(world.evicted()[0], wanted, "{left} s left");
    }
}

#[tokio::test(start_paused = true)]
async fn restarts_neither_reset_the_grace_period_nor_the_condition() {
    let world = World::new(Signal::Memory, Some(90));
    world.set(50);
    for _ in 0..4 {
        world.live(20).await;
        assert_eq!(world.evicted(), [""; 0]);
    }
    world.live(10).await;
    assert_eq!(world.evicted(), ["p3"]);
    world.set(500);
    for _ in 0..10 {
        world.live(20).await;
        assert!(world.pressure.borrow().memory);
    }
    assert_eq!(world.evicted(), ["p3"]);
    let records = pressure::on_record(&world.store.snapshot());
    let keys: Vec<_> = records.keys().collect();
    assert_eq!(keys, ["MemoryPressure"]);
}

#[tokio::test(start_paused = true)]
async fn garbage_is_removed_before_pods_for_a_full_disk() {
    let world = World::new(Signal::NodeFs, None);
    world.set(50);
    *world.node.after_removal.lock().unwrap() = Some(100);
    world.live(60).await;
    assert_eq!(
        (world.evicted(), *world.node.removals.lock().unwrap()),
        (vec![], 1)
    );
    assert!(world.pressure.borrow().disk);
    *world.node.after_removal.lock().unwrap() = None;
    world.set(50);
    world.live(1).await;
    assert_eq!(world.evicted().len(), 1);
    assert_eq!(*world.node.removals.lock().unwrap(), 2);
}

#[tokio::test(start_paused = true)]
async fn nobody_is_evicted_while_pods_cannot_be_measured() {
    let world = World::new(Signal::Memory, None);
    world.node.unmeasured.lock().unwrap().push(Signal::Memory);
    world.set(50);
    world.live(60).await;
    assert_eq!(world.evicted(), [""; 0]);
    let events = world.recorder.events().len();
    assert!((5..=7).contains(&events), "once in ten seconds: {events}");
}

#[tokio::test(start_paused = true)]
async fn a_record_of_another_threshold_starts_no_grace_period() {
    let world = World::new(Signal::Memory, Some(90));
    let now = world.clock.now();
    let record = SignalRecord {
        first: now.minus(Duration::from_secs(500)),
        last: now,
    };
    let write = crate::core::state::Transaction::new().put("memory.available<200 for 90s", record);
    world.store.commit(write).await.unwrap();
    world.set(50);
    world.live(60).await;
    assert_eq!(world.evicted(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_removal_that_hangs_holds_up_disks_alone() {
    let mut world = World::new(Signal::NodeFs, None);
    *world.node.removal_hangs.lock().unwrap() = true;
    world.set(50);
    world.live(120).await;
    assert_eq!(world.evicted(), [""; 0]);
    world
        .rules
        .thresholds
        .push(threshold(Signal::Memory, Some(90)));
    world.live(95).await;
    assert_eq!(world.evicted()[0], "p3", "the grace period ran on");
    assert_eq!(
        *world.node.removals.lock().unwrap(),
        2,
        "one for each agent"
    );
}

#[tokio::test(start_paused = true)]
async fn nobody_is_evicted_for_a_disk_before_it_is_known_what_garbage_is() {
    let world = World::new(Signal::NodeFs, None);
    *world.node.knows_no_pods.lock().unwrap() = true;
    world.set(50);
    world.live(60).await;
    assert_eq!(world.evicted(), [""; 0]);
    *world.node.knows_no_pods.lock().unwrap() = false;
    world.live(1).await;
    assert_eq!(world.evicted().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn garbage_on_another_disk_stays() {
    let world = World::new(Signal::NodeFs, None);
    *world.node.disks.lock().unwrap() = Disks::Dedicated;
    world.set(50);
    world.live(0).await;
    assert_eq!(world.evicted().len(), 1);
    assert_eq!(*world.node.removals.lock().unwrap(), 0);
}

#[tokio::test(start_paused = true)]
async fn each_of_two_disks_is_rid_of_what_lies_on_it_before_a_pod_goes() {
    let mut world = World::new(Signal::NodeFs, None);
    world
        .rules
        .thresholds
        .push(threshold(Signal::ImageFs, None));
    *world.node.disks.lock().unwrap() = Disks::Split;
    world
        .node
        .unmeasured
        .lock()
        .unwrap()
        .extend([Signal::ImageFs, Signal::NodeFs]);
    world.set(50);
    world.live(5).await;
    let (dead, images) = (
        Waste {
            containers: true,
            images: false,
        },
        Waste {
            containers: false,
            images: true,
        },
    );
    assert_eq!(*world.node.removed.lock().unwrap(), [images, dead]);
    assert_eq!(world.evicted(), [""; 0], "none can be measured");
}

#[tokio::test(start_paused = true)]
async fn a_hard_threshold_does_not_hurry_soft_ones() {
    let mut world = World::new(Signal::NodeFs, None);
    *world.node.removal_hangs.lock().unwrap() = true;
    world
        .rules
        .thresholds
        .push(threshold(Signal::Memory, Some(0)));
    let being_evicted = Evicting {
        since: world.clock.now(),
        grace_seconds: 600,
    };
    world.node.evicting.lock().unwrap().push(being_evicted);
    world.set(50);
    world.live(60).await;
    assert_eq!(world.evicted(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn an_attempt_in_vain_for_one_signal_holds_up_no_other() {
    let mut world = World::new(Signal::NodeFs, None);
    world.node.unmeasured.lock().unwrap().push(Signal::NodeFs);
    let least = EvictionThreshold::Quantity(60);
    world.rules.thresholds.push(Threshold {
        value: least,
        ..threshold(Signal::Memory, None)
    });
    world.set(90);
    let memory_is_short = async {
        tokio::time::sleep(Duration::from_millis(3200)).await;
        assert_eq!(world.evicted(), [""; 0]);
        world.set(50);
    };
    tokio::join!(world.live(5), memory_is_short);
    assert_eq!(world.evicted()[0], "p3");
}

#[tokio::test(start_paused = true)]
async fn disks_are_measured_after_the_last_eviction_has_ended() {
    let world = World::new(Signal::NodeFs, None);
    let being_evicted = Evicting {
        since: world.clock.now(),
        grace_seconds: 1,
    };
    world.node.evicting.lock().unwrap().push(being_evicted);
    world.set(50);
    let ends = async {
        tokio::time::sleep(Duration::from_millis(3200)).await;
        world.node.evicting.lock().unwrap().clear();
    };
    tokio::join!(world.live(5), ends);
    assert_eq!(world.evicted().len(), 1);
    let max_ages = world.node.max_ages.lock().unwrap().clone();
    assert_eq!(max_ages.len(), 1);
    assert!(max_ages[0] <= Duration::from_millis(1100), "{max_ages:?}");
}

#[tokio::test(start_paused = true)]
async fn the_node_is_observed_before_its_pods_are_known() {
    let mut world = World::new(Signal::Memory, None);
    world.is_started = false;
    world.set(50);
    world.live(30).await;
    assert!(world.pressure.borrow().memory);
    assert_eq!(world.evicted(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_pod_is_evicted_once_however_long_the_store_takes() {
    let world = World::new(Signal::Memory, None);
    *world.node.is_slow.lock().unwrap() = true;
    world.set(50);
    world.live(30).await;
    assert_eq!(world.evicted(), ["p3"]);
}

#[tokio::test(start_paused = true)]
async fn a_store_whose_disk_hangs_holds_up_no_observation() {
    let mut world = World::new(Signal::Memory, None);
    let faults = Faults::new();
    world.store = Store::start(
        Box::new(FaultyBackend::new(MemoryBackend::new(), faults.clone())),
        Loaded::default(),
        StoreOptions::default(),
        Arc::clone(&world.clock),
        Metrics::default(),
    )
    .unwrap();
    faults.set_hang(true);
    drop(
        world
            .store
            .submit(Transaction::new().journal(None, "written", "before")),
    );
    let store = world.store.clone();
    let synced = tokio::spawn(async move { store.sync().await });
    let hanging = faults.clone();
    tokio::task::spawn_blocking(move || hanging.wait_until_hanging())
        .await
        .unwrap();
    world.set(50);
    world.live(5).await;
    assert!(world.pressure.borrow().memory);
    assert_eq!(world.evicted()[..1], ["p3"]);
    faults.set_hang(false);
    synced.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn it_is_on_record_what_was_observed_reclaimed_and_who_was_chosen_why() {
    let world = World::new(Signal::NodeFs, None);
    world.live(5).await;
    let report = Report::of(&world.store.snapshot());
    assert_eq!(report.thresholds[0].key, "nodefs.available<100");
    assert_eq!(report.thresholds[0].quantity, Some(100));
    assert_eq!(report.observed["nodefs.available"].available, 500);
    assert_eq!((report.last_reclaim, report.last_victim), (None, None));

    world.set(50);
    world.live(5).await;
    let state = world.store.snapshot();
    let report = Report::of(&state);
    let reclaim = report.last_reclaim.unwrap();
    assert_eq!(reclaim.threshold, "nodefs.available<100");
    assert_eq!(reclaim.removed, Some(true));
    let victim = report.last_victim.unwrap();
    let gone = world.evicted();
    assert_eq!(victim.name, gone[gone.len() - 1]);
    let lines = state.journal.values().map(|line| &line.record);
    let mut chosen = lines.filter(|line| line.what == CHOSEN);
    let last = chosen.next_back().unwrap();
    assert_eq!(last.pod.as_ref(), Some(&victim.uid));
    assert_eq!(last.why, victim.why);
    assert!(
        last.why
            .contains("nodefs.available<100, available: 50; first in rank of")
    );
}

#[tokio::test(start_paused = true)]
async fn what_was_observed_is_written_once_a_minute_while_nothing_is_short() {
    let world = World::new(Signal::Memory, None);
    let writes = async {
        let mut published = world.store.published();
        let mut writes = 0;
        while published.changed().await.is_ok() {
            writes += 1;
            assert!(writes < 100);
            if writes == 6 {
                return;
            }
        }
    };
    let began = world.clock.now();
    tokio::select! {
        () = writes => {}
        () = world.live(3600) => panic!("too few"),
    }
    // The first of them comes at once, or after a minute.
    let took = world.clock.now().since(began);
    assert!((300..=360).contains(&took.as_secs()), "{took:?}");
}

/// One thing after another that the node shows, each for some seconds.
#[derive(Clone, Debug)]
struct Scene {
    seconds: u64,
    /// Amounts of memory, of the node's disk and of process IDs that are available; `None` if unreadable.
    available: [Option<u64>; 3],
    /// Pods can be measured.
    is_measured: bool,
    /// Time that an evicted pod takes to end.
    lag: u64,
    /// The agent is killed at its end.
    is_last: bool,
}

const WILD: [Signal; 3] = [Signal::Memory, Signal::NodeFs, Signal::Pid];

/// A node that shows scenes, and judges each eviction.
struct Wild {
    clock: Arc<dyn Clock>,
    scene: Mutex<Scene>,
    running: Mutex<Vec<Arc<Pod>>>,
    ending: Mutex<Vec<(Evicting, u64)>>,
    evicted: Mutex<Vec<PodUid>>,
    /// The last observation.
    shown: Mutex<BTreeMap<Signal, Figure>>,
}

impl Wild {
    fn scene(&self) -> Scene {
        self.scene.lock().unwrap().clone()
    }

    /// Names of pods that are left and may go.
    fn left(&self) -> usize {
        let running = self.running.lock().unwrap();
        let critical = running.iter().filter(|p| p.name().starts_with("critical"));
        running.len() - critical.count()
    }
}

impl ActivePods for Wild {
    fn running(&self) -> Vec<Arc<Pod>> {
        self.running.lock().unwrap().clone()
    }

    fn evict(&self, pod: &Arc<Pod>, eviction: Eviction) {
        let mut evicted = self.evicted.lock().unwrap();
        assert!(
            !evicted.contains(&pod.uid()),
            "{} is chosen twice",
            pod.name()
        );
        assert!(!pod.name().starts_with("critical"), "{} goes", pod.name());
        let shown = self.shown.lock().unwrap();
        let starved = &eviction.annotations["starved_resource"];
        let is_short = |(signal, figure): (&Signal, &Figure)| {
            // The soft threshold with what is to be reclaimed.
            let least = if *signal == Signal::NodeFs { 180 } else { 100 };
            signal.resource() == starved && figure.available < least
        };
        assert!(
            shown.iter().any(is_short),
            "{} goes for nothing: {shown:?}",
            pod.name()
        );
        evicted.push(pod.uid());
        self.running
            .lock()
            .unwrap()
            .retain(|p| p.uid() != pod.uid());
        let order = Evicting {
            since: self.clock.now(),
            grace_seconds: eviction.grace_seconds,
        };
        self.ending.lock().unwrap().push((order, self.scene().lag));
    }

    fn stopping(&self) -> Vec<Stopping> {
        Vec::new()
    }

    fn evicting(&self) -> Vec<Evicting> {
        let now = self.clock.now();
        let mut ending = self.ending.lock().unwrap();
        ending.retain(|(order, lag)| now.since(order.since) < Duration::from_secs(*lag));
        ending.iter().map(|(order, _)| *order).collect()
    }
}

impl Figures for Wild {
    fn observe(&self) -> BoxFuture<'_, Observations> {
        let shown = WILD.into_iter().zip(self.scene().available);
        let shown = shown.filter_map(|(signal, available)| {
            let figure = Figure {
                available: available?,
                capacity: 1000,
            };
            Some((signal, figure))
        });
        let figures: BTreeMap<Signal, Figure> = shown.collect();
        self.shown.lock().unwrap().clone_from(&figures);
        Box::pin(async move {
            Observations {
                figures,
                disks: Disks::One,
            }
        })
    }

    fn usage(&self, _: UsageQuery) -> BoxFuture<'_, Option<BTreeMap<PodUid, PodUse>>> {
        let used = |pod: Arc<Pod>| {
            let used = PodUse {
                memory: Some(u64::try_from(pod.name().len()).unwrap()),
                processes: Some(1),
                ..PodUse::default()
            };
            (pod.uid(), used)
        };
        let usage = self
            .scene()
            .is_measured
            .then(|| self.running().into_iter().map(used).collect());
        Box::pin(async { usage })
    }

    fn alarm(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::pending())
    }
}

impl Garbage for Wild {
    fn remove(&self, _: Waste) -> BoxFuture<'_, bool> {
        let is_tried = self.scene().is_measured;
        Box::pin(async move { is_tried })
    }
}

/// Shows the scenes, to one agent until one is the last of its life.
async fn show(wild: &Arc<Wild>, store: &Store, clock: &Arc<dyn Clock>, scenes: &[Scene]) {
    for life in scenes.split_inclusive(|scene| scene.is_last) {
        let remedies = Remedies {
            pods: Arc::clone(wild) as _,
            garbage: Arc::clone(wild) as _,
        };
        let hard = WILD.map(|signal| threshold(signal, None));
        let soft = Threshold {
            value: EvictionThreshold::Quantity(150),
            minimum_reclaim: Some(EvictionThreshold::Quantity(30)),
            ..threshold(Signal::NodeFs, Some(40))
        };
        let manager = NodePressure::new(PressureOptions {
            remedies: Arc::new(OnceLock::from(remedies)),
            figures: Arc::clone(wild) as _,
            rules: Rules {
                thresholds: [&hard[..], &[soft]].concat(),
                transition: Duration::from_secs(300),
                max_pod_grace: 5,
            },
            signals: pressure::on_record(&store.snapshot()),
            store: store.clone(),
            clock: Arc::clone(clock),
            recorder: Arc::new(MemoryRecorder::default()),
            metrics: Metrics::default(),
            pressure: watch::Sender::default(),
        });
        let shows = async {
            for scene in life {
                *wild.scene.lock().unwrap() = scene.clone();
                tokio::time::sleep(Duration::from_secs(scene.seconds)).await;
            }
        };
        tokio::select! {
            () = shows => {}
            () = manager.run(CancellationToken::new()) => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Whatever the node shows, and wherever the agent is killed: no pod is chosen twice, none without a signal, no critical one,
    /// and when nothing is short any more, nobody else goes. While everything stays short, all go that may, and then nobody.
    #[test]
    fn whatever_is_observed_no_pod_goes_twice_or_for_nothing_and_it_ends(
        scenes in prop::collection::vec(
            (1u64..25, prop::array::uniform3(prop::option::of(0u64..300)), any::<bool>(), 0u64..40, prop::bool::weighted(0.2))
                .prop_map(|(seconds, available, is_measured, lag, is_last)| Scene {
                    seconds, available, is_measured, lag, is_last,
                }),
            1..24,
        ),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(async {
            let clock: Arc<dyn Clock> = Arc::new(TokioClock(Instant::now()));
            let store = Store::in_memory(Arc::clone(&clock));
            let names = ["a", "bb", "ccc", "dddd", "critical", "critical-too"];
            let pod = |name: &str| -> Arc<Pod> {
                let priority = if name.starts_with("critical") { 2_000_000_000 } else { 0 };
                let pod = json!({
                    "metadata": {"name": name, "namespace": "n", "uid": name},
                    "spec": {"containers": [], "priority": priority},
                });
                Arc::new(serde_json::from_value(pod).unwrap())
            };
            let all_of = |available, seconds| Scene {
                seconds,
                available: [Some(available); 3],
                is_measured: true,
                lag: 2,
                is_last: true,
            };
            let wild = Arc::new(Wild {
                clock: Arc::clone(&clock),
                scene: Mutex::new(all_of(500, 1)),
                running: Mutex::new(names.map(pod).into()),
                ending: Mutex::default(),
                evicted: Mutex::default(),
                shown: Mutex::default(),
            });
            show(&wild, &store, &clock, &scenes).await;
            // The round under way may still act on what it has observed.
            show(&wild, &store, &clock, &[all_of(500, 30)]).await;
            let before = wild.left();
            show(&wild, &store, &clock, &[all_of(500, 600)]).await;
            assert_eq!(wild.left(), before, "nothing is short");
            show(&wild, &store, &clock, &[all_of(10, 600)]).await;
            assert_eq!(wild.left(), 0, "everything is short");
            show(&wild, &store, &clock, &[all_of(10, 600)]).await;
            assert_eq!(wild.evicted.lock().unwrap().len(), 4);
        });
    }
}

/// A node whose kernel reports stalls.
struct Alarming {
    node: Arc<Node>,
    stalls: tokio::sync::Notify,
}

impl Figures for Alarming {
    fn observe(&self) -> BoxFuture<'_, Observations> {
        self.node.observe()
    }

    fn usage(&self, query: UsageQuery) -> BoxFuture<'_, Option<BTreeMap<PodUid, PodUse>>> {
        self.node.usage(query)
    }

    fn alarm(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.stalls.notified())
    }
}

#[tokio::test(start_paused = true)]
async fn from_crossing_a_hard_threshold_to_the_eviction_it_takes_a_second_at_most_where_the_kernel_reports_it()
 {
    for after_ms in (0..12_000).step_by(250) {
        let world = World::new(Signal::Memory, None);
        let figures = Arc::new(Alarming {
            node: Arc::clone(&world.node),
            stalls: tokio::sync::Notify::new(),
        });
        let remedies = Remedies {
            pods: Arc::<Node>::clone(&world.node),
            garbage: Arc::<Node>::clone(&world.node),
        };
        let manager = NodePressure::new(PressureOptions {
            remedies: Arc::new(OnceLock::from(remedies)),
            figures: Arc::<Alarming>::clone(&figures),
            rules: world.rules.clone(),
            signals: Signals::new(),
            store: world.store.clone(),
            clock: Arc::clone(&world.clock),
            recorder: Arc::new(world.recorder.clone()),
            metrics: Metrics::default(),
            pressure: world.pressure.clone(),
        });
        let crosses = async {
            tokio::time::sleep(Duration::from_millis(after_ms)).await;
            world.set(50);
            figures.stalls.notify_one();
            let crossed = Instant::now();
            while world.evicted().is_empty() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            crossed.elapsed()
        };
        let took = tokio::select! {
            took = crosses => took,
            () = manager.run(CancellationToken::new()) => unreachable!(),
        };
        assert!(took <= Duration::from_millis(1020), "{after_ms}: {took:?}");
    }
}
