//! Event objects against a model of the API server.

use std::collections::BTreeMap;

use super::*;
use crate::apiserver::testkit::FakeApi;
use crate::events::testkit::{event, pass};
use crate::types::{BootId, EventRecorder, EventType};

struct ManualClock(Mutex<i64>);

impl Clock for ManualClock {
    fn now(&self) -> Stamp {
        let ms = *self.0.lock().unwrap();
        Stamp {
            boot: BootId(1),
            boottime_ms: ms,
            wall_ms: ms,
        }
    }
}

struct Rig {
    api: FakeApi,
    events: ApiEvents,
    clock: Arc<ManualClock>,
    metrics: Metrics,
}

impl Rig {
    fn new(rate: EventRate) -> Self {
        let api = FakeApi::new();
        let clock = Arc::new(ManualClock(Mutex::new(1_700_000_000_000)));
        let metrics = Metrics::default();
        let (events, sink) = api_events(
            api.client.clone(),
            "n1",
            rate,
            Store::in_memory(Arc::clone(&clock) as Arc<dyn Clock>),
            Arc::clone(&clock) as Arc<dyn Clock>,
            metrics.clone(),
        );
        tokio::spawn(sink.run(CancellationToken::new()));
        Self {
            api,
            events,
            clock,
            metrics,
        }
    }

    /// Time passes for the clock and for those who sleep.
    async fn pass(&self, seconds: usize) {
        for _ in 0..seconds {
            pass(1_000).await;
            *self.clock.0.lock().unwrap() += 1_000;
        }
    }

    fn objects(&self) -> Vec<core::Event> {
        let values = self
            .api
            .with(|m| m.objects.values().cloned().collect::<Vec<_>>());
        values
            .into_iter()
            .map(|v| serde_json::from_value(v).unwrap())
            .collect()
    }

    fn unsent(&self, reason: &str) -> u64 {
        let reason = reason.to_owned();
        self.metrics
            .events_unsent
            .get_or_create(&ReasonLabel { reason })
            .get()
    }
}

#[tokio::test(start_paused = true)]
async fn what_happened_before_there_was_a_client_is_told_too() {
    let rig = Rig::new(EventRate::default());
    let clock = Arc::clone(&rig.clock) as Arc<dyn Clock>;
    let store = crate::store::Store::in_memory(Arc::clone(&clock));
    let recorder = crate::events::JournalRecorder::new(store, clock, rig.metrics.clone());
    for n in 10..30 {
        recorder.record(event(&format!("early-{n}"), "x"));
    }
    recorder.forward(rig.events.clone());
    recorder.record(event("late", "x"));
    pass(60_000).await;
    let objects = rig.objects().into_iter();
    let mut told: Vec<String> = objects.filter_map(|o| o.involved_object.name).collect();
    told.sort();
    // No more than the first few are kept for it.
    let mut expected: Vec<String> = (10..26).map(|n| format!("early-{n}")).collect();
    expected.push("late".to_owned());
    assert_eq!(told, expected);
}

#[tokio::test(start_paused = true)]
async fn an_event_is_made_once_and_counted_after() {
    let rig = Rig::new(EventRate::default());
    let annotations: BTreeMap<String, String> = [("a".to_owned(), "b".to_owned())].into();
    let annotated = || event("web", "x").annotated(annotations.clone());
    rig.events.take(annotated());
    pass(10).await;
    *rig.clock.0.lock().unwrap() += 60_000;
    rig.events.take(annotated());
    pass(10).await;
    let objects = rig.objects();
    assert_eq!(objects.len(), 1);
    let told = &objects[0];
    assert_eq!(told.metadata.annotations.as_ref(), Some(&annotations));
    assert_eq!(told.metadata.namespace.as_deref(), Some("shop"));
    assert!(
        told.metadata
            .name
            .as_ref()
            .unwrap()
            .starts_with("web.17979cfe36"),
        "{told:?}"
    );
    assert_eq!(told.count, Some(2));
    assert_eq!(told.involved_object.uid.as_deref(), Some("uid-web"));
    assert_eq!(
        told.involved_object.field_path.as_deref(),
        Some("spec.containers{main}")
    );
    assert_eq!(told.source.as_ref().unwrap().host.as_deref(), Some("n1"));
    assert_eq!(told.reporting_component.as_deref(), Some("kubelet"));
    assert_eq!(told.type_.as_deref(), Some("Warning"));
    assert!(told.first_timestamp < told.last_timestamp);
    assert_eq!((rig.api.count("POST"), rig.api.count("PATCH")), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn an_event_about_the_node_is_in_the_default_namespace() {
    let rig = Rig::new(EventRate::default());
    rig.events
        .take(Event::node(EventType::Normal, "Starting", "hello"));
    pass(10).await;
    let told = &rig.objects()[0];
    assert_eq!(told.metadata.namespace.as_deref(), Some("default"));
    let node = &told.involved_object;
    assert_eq!(
        (node.kind.as_deref(), node.uid.as_deref()),
        (Some("Node"), Some("n1"))
    );
}

#[tokio::test(start_paused = true)]
async fn an_object_that_expired_is_made_again() {
    let rig = Rig::new(EventRate::default());
    rig.events.take(event("web", "x"));
    pass(10).await;
    rig.api.with(|model| model.objects.clear());
    rig.events.take(event("web", "x"));
    pass(10).await;
    assert_eq!(rig.objects()[0].count, Some(2));
}

#[tokio::test(start_paused = true)]
async fn an_outage_keeps_the_newest_thousand_and_they_arrive() {
    let rig = Rig::new(EventRate { qps: 0, burst: 0 });
    rig.api.set_down(true);
    rig.events.take(event("first", "x"));
    pass(5_000).await;
    for n in 0..1200 {
        rig.events.take(event(&format!("p{n:04}"), "x"));
        rig.events.take(event(&format!("p{n:04}"), "x"));
    }
    pass(120_000).await;
    assert!(rig.unsent("queue_full") >= 200);
    rig.api.set_down(false);
    pass(60_000).await;
    let objects = rig.objects();
    assert!((999..=1000).contains(&objects.len()), "{}", objects.len());
    assert!(objects.iter().all(|o| o.count == Some(2)));
    assert!(
        objects
            .iter()
            .any(|o| o.involved_object.name.as_deref() == Some("p1199"))
    );
    assert_eq!(
        rig.api.count("PATCH"),
        0,
        "what repeats while it waits is one request"
    );
}

#[tokio::test(start_paused = true)]
async fn a_refused_event_is_dropped_and_the_next_goes_on() {
    let rig = Rig::new(EventRate::default());
    for code in [403, 404, 422] {
        rig.api.with(|model| model.fails = Some(code));
        rig.events.take(event(&format!("bad-{code}"), "x"));
        rig.pass(60).await;
    }
    assert_eq!(rig.api.count("POST"), 3);
    assert_eq!(rig.unsent("refused"), 3);
    rig.api.with(|model| model.fails = Some(500));
    rig.events.take(event("good", "x"));
    rig.pass(2).await;
    rig.api.with(|model| model.fails = None);
    rig.pass(60).await;
    assert_eq!(rig.objects().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn events_that_the_server_fails_on_hold_up_no_others() {
    const POISONS: usize = 20;
    let rig = Rig::new(EventRate { qps: 0, burst: 0 });
    let pass = |seconds| rig.pass(seconds);
    rig.api.with(|model| model.fails_on = Some("poison"));
    for n in 0..POISONS {
        rig.events.take(event(&format!("a{n}"), "poison"));
    }
    for n in 0..50 {
        rig.events.take(event(&format!("p{n}"), "x"));
    }
    // A second after each of those that fail.
    pass(POISONS + 1).await;
    assert_eq!(rig.objects().len(), 50);
    pass(1200).await;
    let tried = rig.api.count("POST") - 50;
    assert!((8 * POISONS..=16 * POISONS).contains(&tried), "{tried}");
    rig.events.take(event("late", "x"));
    pass(2).await;
    assert_eq!(rig.objects().len(), 51);
    rig.api.with(|model| model.fails_on = None);
    pass(301).await;
    assert_eq!(rig.objects().len(), 51 + POISONS, "nothing was left out");
    assert_eq!(rig.unsent("refused"), 0);
}

#[tokio::test(start_paused = true)]
async fn the_rate_of_requests_is_bounded() {
    let rig = Rig::new(EventRate { qps: 5, burst: 10 });
    for n in 0..100 {
        rig.events.take(event(&format!("p{n}"), "x"));
    }
    pass(10).await;
    assert_eq!(rig.api.count("POST"), 10);
    pass(10_000).await;
    let sent = rig.api.count("POST");
    assert!((58..=61).contains(&sent), "{sent}");
}
