//! Records of events: their content, their cost, and their use by a later agent.

use std::sync::Mutex;

use k8s_openapi::api::core::v1 as core;
use serde_json::Value;
use tokio::task::JoinHandle;

use super::*;
use crate::apiserver::testkit::FakeApi;
use crate::core::state::FactRecord;
use crate::events::testkit::{event, pass};
use crate::events::{ApiEvents, EventRate, api_events, forget_waiting, kept_events};
use crate::store::StoreOptions;
use crate::store::backend::MemoryBackend;
use crate::store::codec::Loaded;
use crate::types::metrics::{Metrics, ReasonLabel};
use crate::types::{BootId, Clock, Stamp};

const START: i64 = 1_700_000_000_000;

/// Follows tokio's clock.
struct TestClock {
    began: Instant,
    more: Mutex<i64>,
}

impl Clock for TestClock {
    fn now(&self) -> Stamp {
        let passed = i64::try_from(self.began.elapsed().as_millis()).unwrap();
        let ms = START + passed + *self.more.lock().unwrap();
        Stamp {
            boot: BootId(1),
            boottime_ms: ms,
            wall_ms: ms,
        }
    }
}

/// An agent's events over a store that outlives it.
struct Rig {
    api: FakeApi,
    store: Store,
    clock: Arc<TestClock>,
    store_metrics: Metrics,
    metrics: Metrics,
    events: ApiEvents,
    task: JoinHandle<()>,
    token: CancellationToken,
}

fn begin(
    api: &FakeApi,
    store: &Store,
    clock: &Arc<TestClock>,
    metrics: &Metrics,
) -> (ApiEvents, JoinHandle<()>, CancellationToken) {
    let (events, sink) = api_events(
        api.client.clone(),
        "n1",
        EventRate { qps: 0, burst: 0 },
        store.clone(),
        Arc::clone(clock) as Arc<dyn Clock>,
        metrics.clone(),
    );
    let token = CancellationToken::new();
    let task = tokio::spawn(sink.run(token.clone()));
    (events, task, token)
}

impl Rig {
    fn new() -> Self {
        let clock = Arc::new(TestClock {
            began: Instant::now(),
            more: Mutex::new(0),
        });
        let store_metrics = Metrics::default();
        let options = StoreOptions {
            inline: true,
            ..StoreOptions::default()
        };
        let store = Store::start(
            Box::new(MemoryBackend::new()),
            Loaded::default(),
            options,
            Arc::clone(&clock) as Arc<dyn Clock>,
            store_metrics.clone(),
        )
        .unwrap();
        let (api, metrics) = (FakeApi::new(), Metrics::default());
        let (events, task, token) = begin(&api, &store, &clock, &metrics);
        Self {
            api,
            store,
            clock,
            store_metrics,
            metrics,
            events,
            task,
            token,
        }
    }

    /// The agent is killed, and started again.
    async fn restart(&mut self) {
        self.task.abort();
        drop((&mut self.task).await);
        self.start();
    }

    fn start(&mut self) {
        let begun = begin(&self.api, &self.store, &self.clock, &self.metrics);
        (self.events, self.task, self.token) = begun;
    }

    fn commits(&self) -> u64 {
        self.store_metrics.store_commits.get()
    }

    fn records(&self, prefix: &str) -> Vec<Value> {
        let state = self.store.snapshot();
        let records = state.with_prefix::<FactRecord>(prefix);
        records
            .map(|(_, record)| serde_json::from_slice(&record.data).unwrap())
            .collect()
    }

    fn objects(&self) -> Vec<core::Event> {
        let values = self
            .api
            .with(|m| m.objects.values().cloned().collect::<Vec<_>>());
        let objects = values.into_iter().map(serde_json::from_value);
        objects.map(Result::unwrap).collect()
    }

    /// The messages of the requests so far that made an object.
    fn told(&self) -> Vec<String> {
        self.api.with(|m| {
            let requests = m.log.iter().zip(&m.bodies);
            requests
                .filter(|(line, _)| line.starts_with("POST"))
                .map(|(_, body)| body["message"].as_str().unwrap().to_owned())
                .collect()
        })
    }

    fn unsent(&self, reason: &str) -> u64 {
        let reason = reason.to_owned();
        let label = ReasonLabel { reason };
        self.metrics.events_unsent.get_or_create(&label).get()
    }
}

#[tokio::test(start_paused = true)]
async fn what_waits_is_told_by_a_later_agent_in_its_order_with_its_times() {
    let mut rig = Rig::new();
    rig.api.set_down(true);
    for n in [3, 1, 2] {
        rig.events.take(event(&format!("p{n}"), &format!("m{n}")));
        pass(1_000).await;
    }
    rig.events.take(event("p3", "m3"));
    pass(1_000).await;
    assert_eq!(rig.records(kinds::EVENTS.prefix).len(), 3);
    rig.restart().await;
    rig.events.take(event("p4", "m4"));
    pass(60_000).await;
    rig.restart().await;
    rig.api.set_down(false);
    pass(60_000).await;
    assert_eq!(rig.told(), ["m3", "m1", "m2", "m4"]);
    let objects = rig.objects();
    assert_eq!(objects.len(), 4);
    let third = objects.iter().find(|o| o.message.as_deref() == Some("m3"));
    let third = third.unwrap();
    let second = |time: &Option<k8s_openapi::apimachinery::pkg::apis::meta::v1::Time>| {
        time.as_ref().unwrap().0.as_second() - START / 1000
    };
    let times = (
        second(&third.first_timestamp),
        second(&third.last_timestamp),
    );
    assert_eq!((third.count, times), (Some(2), (0, 3)));
    assert_eq!(third.event_time, None);
    assert_eq!(rig.api.count("PATCH"), 0);
}

#[tokio::test(start_paused = true)]
async fn what_was_told_just_before_a_kill_is_not_told_twice() {
    let mut rig = Rig::new();
    rig.api.set_down(true);
    rig.events.take(event("one", "x"));
    rig.events.take(event("two", "x"));
    rig.events.take(event("two", "x"));
    pass(1_000).await;
    // The answer comes, and the agent dies before it is on record.
    let waiting = rig.store.snapshot();
    let waiting: Vec<_> = waiting
        .with_prefix::<FactRecord>(kinds::EVENTS.prefix)
        .map(|(key, record)| (key.to_string(), record.clone()))
        .collect();
    rig.api.set_down(false);
    pass(60_000).await;
    rig.task.abort();
    drop((&mut rig.task).await);
    let as_before = waiting
        .into_iter()
        .fold(Transaction::new(), |t, (key, record)| t.put(key, record));
    rig.store.commit(as_before).await.unwrap();
    rig.start();
    pass(60_000).await;
    let objects = rig.objects();
    assert_eq!(objects.len(), 2);
    let mut counts: Vec<_> = objects.iter().filter_map(|o| o.count).collect();
    counts.sort_unstable();
    assert_eq!(counts, [1, 2]);
    assert!(
        kept_events(&rig.store.snapshot())
            .iter()
            .all(|k| !k.waiting)
    );
    rig.events.take(event("one", "x"));
    pass(1_000).await;
    assert_eq!(rig.objects().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_repetition_after_a_restart_is_counted_in_the_object_there_is() {
    let mut rig = Rig::new();
    rig.events.take(event("web", "x"));
    pass(60_000).await;
    rig.events.take(event("web", "x"));
    pass(60_000).await;
    rig.restart().await;
    rig.events.take(event("web", "x"));
    pass(1_000).await;
    let objects = rig.objects();
    assert_eq!((objects.len(), objects[0].count), (1, Some(3)));
    assert!(objects[0].first_timestamp < objects[0].last_timestamp);
    // Ten quiet minutes later it is another one, and nothing is left of the first.
    pass(700_000).await;
    assert_eq!(rig.records(kinds::EVENTS.prefix), Vec::<Value>::new());
    rig.restart().await;
    rig.events.take(event("web", "x"));
    pass(1_000).await;
    assert_eq!(rig.objects().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_restart_gives_a_pod_that_floods_no_more_room() {
    let mut rig = Rig::new();
    for _ in 0..100 {
        rig.events.take(event("loud", "x"));
    }
    pass(1_000).await;
    assert_eq!(rig.unsent("spam"), 75);
    assert_eq!(rig.records(kinds::EVENT_SOURCES.prefix).len(), 1);
    for _ in 0..3 {
        rig.restart().await;
        for _ in 0..10 {
            rig.events.take(event("loud", "x"));
        }
        pass(1_000).await;
    }
    assert_eq!(rig.unsent("spam"), 105);
    // As soon as it does not matter any more, it is forgotten.
    pass(21 * 300_000).await;
    assert_eq!(
        rig.records(kinds::EVENT_SOURCES.prefix),
        Vec::<Value>::new()
    );
    let state = rig.store.snapshot();
    assert_eq!(state.facts.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_burst_costs_few_commits_what_is_held_back_none_and_a_quiet_node_none() {
    let rig = Rig::new();
    pass(3_600_000).await;
    assert_eq!(rig.commits(), 0);
    for n in 0..1000 {
        rig.events.take(event(&format!("p{n}"), "x"));
    }
    pass(10_000).await;
    let burst = rig.commits();
    println!("1000 events: {burst} commits");
    assert_eq!(rig.told().len(), 1000);
    assert!((1..=10).contains(&burst), "{burst}");
    // What the API server counts in, no more than are worth it.
    let kept = rig.records(kinds::EVENTS.prefix).len();
    assert!((KEPT..=KEPT + SLACK).contains(&kept), "{kept}");
    pass(60_000).await;
    assert_eq!(rig.records(kinds::EVENTS.prefix).len(), KEPT);
    pass(640_000).await;
    let swept = rig.commits();
    assert!(swept <= burst + 5, "{swept}");
    assert_eq!(rig.records(kinds::EVENTS.prefix).len(), 0);
    for _ in 0..25 {
        rig.events.take(event("loud", "x"));
    }
    pass(1_000).await;
    let before = rig.commits();
    for _ in 0..1000 {
        rig.events.take(event("loud", "x"));
        pass(100).await;
    }
    assert_eq!(rig.unsent("spam"), 1000);
    assert_eq!(rig.commits(), before);
    pass(3 * 3_600_000).await;
    let forgotten = rig.commits();
    pass(24 * 3_600_000).await;
    assert_eq!(rig.commits(), forgotten);
    assert_eq!(rig.store.snapshot().objects.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn what_is_told_at_once_is_written_once() {
    let rig = Rig::new();
    rig.events.take(event("web", "x"));
    pass(1_000).await;
    assert_eq!(rig.commits(), 1);
    let kept = kept_events(&rig.store.snapshot());
    assert_eq!(kept.len(), 1);
    assert!(!kept[0].waiting);
    assert_eq!(rig.objects()[0].metadata.name.as_ref(), Some(&kept[0].name));
}

#[tokio::test(start_paused = true)]
async fn a_day_without_an_api_server_is_not_told_afterwards() {
    let mut rig = Rig::new();
    rig.api.set_down(true);
    for n in 0..1200 {
        rig.events.take(event(&format!("p{n:04}"), "old"));
    }
    pass(1_000).await;
    assert_eq!(rig.unsent("queue_full"), 200);
    assert_eq!(rig.metrics.events_discarded.get(), 200);
    assert_eq!(rig.records(kinds::EVENTS.prefix).len(), 1000);
    rig.task.abort();
    drop((&mut rig.task).await);
    *rig.clock.more.lock().unwrap() += 24 * 3_600_000;
    rig.api.set_down(false);
    rig.start();
    rig.events.take(event("web", "new"));
    pass(60_000).await;
    assert_eq!(rig.told(), ["new"]);
    assert_eq!(rig.unsent("too_old"), 1000);
    assert_eq!(rig.records(kinds::EVENTS.prefix).len(), 1);
}

#[tokio::test(start_paused = true)]
async fn damaged_records_are_left_out_and_go() {
    let mut rig = Rig::new();
    rig.api.set_down(true);
    rig.events.take(event("good", "x"));
    pass(1_000).await;
    let state = rig.store.snapshot();
    let (_, good) = state
        .with_prefix::<FactRecord>(kinds::EVENTS.prefix)
        .next()
        .unwrap();
    let damaged = FactRecord {
        data: b"{\"name\":".to_vec(),
        ..good.clone()
    };
    let with = Transaction::new()
        .put("events/shop/damaged", damaged.clone())
        .put("events/shop/of-another", good.clone())
        .put("eventsources/shop/damaged", damaged);
    rig.store.commit(with).await.unwrap();
    rig.restart().await;
    rig.api.set_down(false);
    pass(60_000).await;
    assert_eq!(rig.told(), ["x"]);
    assert_eq!(rig.store.snapshot().facts.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_ends_writes_what_waits() {
    let mut rig = Rig::new();
    rig.api.set_down(true);
    rig.events.take(event("web", "x"));
    pass(1).await;
    rig.token.cancel();
    (&mut rig.task).await.unwrap();
    assert_eq!(rig.records(kinds::EVENTS.prefix).len(), 1);
    // Without an API server nobody will ever be told.
    forget_waiting(&rig.store).await.unwrap();
    assert_eq!(rig.store.snapshot().objects.len(), 0);
}
