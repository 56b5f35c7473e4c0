use std::sync::Mutex;

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
        let pods = self.running().into_iter().map(|pod| {
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
