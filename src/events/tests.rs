//! Events end up in the journal, repetitions and floods do not.

use super::*;
use crate::types::{BootId, PodRef, Stamp};

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

fn recorder() -> (JournalRecorder, Store, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock(Mutex::new(0)));
    let store = Store::in_memory(Arc::clone(&clock) as Arc<dyn Clock>);
    let recorder = JournalRecorder::new(
        store.clone(),
        Arc::clone(&clock) as Arc<dyn Clock>,
        Metrics::default(),
    );
    (recorder, store, clock)
}

fn event(message: &str) -> Event {
    Event {
        pod: Some(PodRef {
            uid: "u1".into(),
            name: "web".into(),
            namespace: "default".into(),
        }),
        container: Some("main".into()),
        kind: EventType::Warning,
        reason: "BackOff".into(),
        message: message.into(),
        annotations: Default::default(),
    }
}

async fn journal(store: &Store) -> Vec<(String, String)> {
    // Commits are answered in order: this one is behind all that were submitted.
    store.commit(Transaction::new()).await.unwrap();
    let state = store.snapshot();
    let records = state.journal.values().map(|v| &v.record);
    records.map(|r| (r.what.clone(), r.why.clone())).collect()
}

#[tokio::test]
async fn an_event_is_journalled_with_type_container_and_pod() {
    let (recorder, store, _clock) = recorder();
    recorder.record(event("restarting failed container"));
    assert_eq!(
        journal(&store).await,
        [(
            "event BackOff".to_owned(),
            "Warning main: restarting failed container".to_owned()
        )]
    );
    let state = store.snapshot();
    let first = state.journal.values().next().unwrap();
    assert_eq!(first.record.pod.as_ref().unwrap().as_str(), "u1");
}

#[tokio::test]
async fn repetitions_are_told_at_powers_of_two_until_the_window_has_passed() {
    let (recorder, store, clock) = recorder();
    for _ in 0..9 {
        recorder.record(event("again"));
    }
    let whys: Vec<_> = journal(&store)
        .await
        .into_iter()
        .map(|(_, why)| why)
        .collect();
    assert_eq!(
        whys,
        [
            "Warning main: again",
            "Warning main: again (x2)",
            "Warning main: again (x4)",
            "Warning main: again (x8)"
        ]
    );
    *clock.0.lock().unwrap() += 600_001;
    recorder.record(event("again"));
    assert_eq!(
        journal(&store).await.last().unwrap().1,
        "Warning main: again"
    );
    assert_eq!(recorder.dropped(), 0);
}

#[tokio::test]
async fn a_flood_is_cut_at_the_burst_and_refills_with_time() {
    let (recorder, store, clock) = recorder();
    for n in 0..150 {
        recorder.record(event(&format!("number {n}")));
    }
    assert_eq!(journal(&store).await.len(), 100);
    assert_eq!(recorder.dropped(), 50);
    let metrics = recorder.metrics.encode().unwrap();
    assert!(
        metrics.contains("\nholdfast_events_discarded_total 50\n"),
        "{metrics}"
    );
    *clock.0.lock().unwrap() += 100;
    for n in 150..160 {
        recorder.record(event(&format!("number {n}")));
    }
    assert_eq!(journal(&store).await.len(), 105, "50 per second");
}

#[tokio::test]
async fn the_rate_is_the_configured_one_and_zero_is_no_limit() {
    for (qps, burst, at_once, after_a_second) in [
        (2, 3, 3, 2),
        (10, 4, 4, 4), // never more than the burst
        (5, 0, 1, 1),
        (0, 3, 20, 20),
    ] {
        let (recorder, store, clock) = recorder();
        recorder.limit(EventRate { qps, burst });
        let flood = |round: &str| {
            for n in 0..20 {
                recorder.record(event(&format!("{round} {n}")));
            }
        };
        flood("first");
        assert_eq!(journal(&store).await.len(), at_once, "{qps} {burst}");
        *clock.0.lock().unwrap() += 1_000;
        flood("second");
        let told = journal(&store).await.len() - at_once;
        assert_eq!(told, after_a_second, "{qps} {burst}");
        let dropped = 40 - at_once - after_a_second;
        assert_eq!(recorder.dropped(), u64::try_from(dropped).unwrap());
    }
}

#[test]
fn memory_is_bounded() {
    let mut aggregator = Aggregator::default();
    let now = ManualClock(Mutex::new(0)).now();
    for n in 0..10_000 {
        aggregator.take(&event(&n.to_string()), now);
    }
    assert_eq!(aggregator.remembered(), 4096);
    // The newest is remembered, the oldest is not.
    assert_eq!(
        aggregator.take(&event("9999"), now),
        aggregate::Verdict::TooMany
    );
    assert_eq!(
        aggregator.take(&event("9999"), now),
        aggregate::Verdict::Repeated
    );
}

#[tokio::test]
async fn a_long_message_is_cut_at_a_character() {
    let (recorder, store, _clock) = recorder();
    recorder.record(event(&"ä".repeat(100_000)));
    let (_, why) = journal(&store).await.remove(0);
    assert!(
        why.len() <= 1100 && why.ends_with("ä..."),
        "{} bytes",
        why.len()
    );
}
