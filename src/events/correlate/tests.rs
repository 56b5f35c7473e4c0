//! What becomes one Event object, and what is left out.

use super::*;
use crate::types::BootId;

fn at(seconds: i64) -> Stamp {
    Stamp {
        boot: BootId(1),
        boottime_ms: seconds * 1000,
        wall_ms: seconds * 1000,
    }
}

fn event(pod: &str, message: &str) -> Event {
    Event {
        pod: Some(PodRef {
            uid: pod.into(),
            name: pod.into(),
            namespace: "default".into(),
        }),
        container: Some("main".into()),
        kind: EventType::Warning,
        reason: "BackOff".into(),
        message: message.into(),
    }
}

#[test]
fn repetitions_are_counted_in_one_object() {
    let mut correlator = Correlator::default();
    let first = correlator.take(event("a", "x"), at(0)).unwrap();
    let again = correlator.take(event("a", "x"), at(60)).unwrap();
    assert_eq!(first, again);
    let told = correlator.told(&first).unwrap();
    assert_eq!((told.count, told.first, told.last), (2, at(0), at(60)));
    let other = correlator.take(event("b", "x"), at(60)).unwrap();
    assert_ne!(first, other);
    assert_eq!(correlator.told(&other).unwrap().count, 1);
}

#[test]
fn after_a_quiet_time_an_event_is_a_new_object() {
    let mut correlator = Correlator::default();
    let key = correlator.take(event("a", "x"), at(0)).unwrap();
    correlator.named(&key, Some("a.1".into()));
    correlator.take(event("a", "x"), at(601)).unwrap();
    let told = correlator.told(&key).unwrap();
    assert_eq!((told.count, told.first, told.name), (1, at(601), None));
}

#[test]
fn the_tenth_message_of_a_kind_is_combined_with_those_that_follow() {
    let mut correlator = Correlator::default();
    let keys: Vec<_> = (0..12)
        .map(|n| {
            correlator
                .take(event("a", &format!("m{n}")), at(n))
                .unwrap()
        })
        .collect();
    let distinct: BTreeSet<_> = keys.iter().map(|k| k.message.clone()).collect();
    assert_eq!(distinct.len(), 10, "nine of their own and one combined");
    assert_eq!(keys[9], keys[11]);
    let told = correlator.told(&keys[11]).unwrap();
    assert_eq!(told.count, 3);
    assert_eq!(told.event.message, "(combined from similar events): m11");
    // Ten quiet minutes end it.
    let later = correlator.take(event("a", "m12"), at(700)).unwrap();
    assert_eq!(later.message.as_deref(), Some("m12"));
}

#[test]
fn one_pod_cannot_flood_and_others_are_not_held_up() {
    let mut correlator = Correlator::default();
    let taken = (0..100)
        .filter(|_| correlator.take(event("a", "x"), at(0)).is_some())
        .count();
    assert_eq!(taken, 25);
    assert!(correlator.take(event("b", "x"), at(0)).is_some());
    assert!(correlator.take(event("a", "x"), at(299)).is_none());
    assert!(correlator.take(event("a", "x"), at(301)).is_some());
    // Those that were left out are counted all the same.
    let key = correlator.take(event("a", "x"), at(700)).unwrap();
    assert_eq!(correlator.told(&key).unwrap().count, 103);
}

#[test]
fn memory_is_bounded() {
    let mut correlator = Correlator::default();
    for n in 0..6000 {
        correlator.take(event(&format!("p{n}"), "x"), at(n));
    }
    assert_eq!(correlator.remembered(), [4096, 4096, 4096]);
}
