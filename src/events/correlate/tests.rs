//! Events that become one Event object, and events that are left out.

use super::*;
use crate::events::testkit::{at, event};

fn correlator() -> Correlator {
    Correlator::new("n1", 0)
}

fn take(correlator: &mut Correlator, event: Event, now: Stamp) -> Option<Key> {
    correlator.take(event, now).key
}

#[test]
fn repetitions_are_counted_in_one_object() {
    let mut correlator = correlator();
    let first = take(&mut correlator, event("a", "x"), at(0)).unwrap();
    let again = take(&mut correlator, event("a", "x"), at(60)).unwrap();
    assert_eq!(first, again);
    let told = correlator.told(&first).unwrap();
    assert_eq!((told.count, told.first, told.last), (2, at(0), at(60)));
    let other = take(&mut correlator, event("b", "x"), at(60)).unwrap();
    assert_ne!(first, other);
    assert_eq!(correlator.told(&other).unwrap().count, 1);
}

#[test]
fn names_of_objects_are_as_long_as_servers_take_them() {
    let mut names = Names {
        node: "n1".to_owned(),
        sequence: 0,
    };
    let long = "a".repeat(253);
    let (first, second) = (
        names.next(&event(&long, "x"), at(0)),
        names.next(&event(&long, "x"), at(0)),
    );
    assert_eq!(first.len(), 253, "{first}");
    assert_ne!(first, second);
}

#[test]
fn after_a_quiet_time_an_event_is_a_new_object() {
    let mut correlator = correlator();
    let key = take(&mut correlator, event("a", "x"), at(0)).unwrap();
    let name = correlator.told(&key).unwrap().name.clone();
    correlator.told_mut(&key).unwrap().made = true;
    take(&mut correlator, event("a", "x"), at(601)).unwrap();
    let told = correlator.told(&key).unwrap();
    assert_eq!((told.count, told.first, told.made), (1, at(601), false));
    assert_ne!(told.name, name);
}

#[test]
fn the_tenth_message_of_a_kind_is_combined_with_those_that_follow() {
    let mut correlator = correlator();
    let keys: Vec<_> = (0..12)
        .map(|n| take(&mut correlator, event("a", &format!("m{n}")), at(n)).unwrap())
        .collect();
    let distinct: BTreeSet<_> = keys.iter().map(|k| k.message.clone()).collect();
    assert_eq!(distinct.len(), 10, "nine of their own and one combined");
    assert_eq!(keys[9], keys[11]);
    let told = correlator.told(&keys[11]).unwrap();
    assert_eq!(told.count, 3);
    assert_eq!(told.event.message, "(combined from similar events): m11");
    // Ten quiet minutes end it.
    let later = take(&mut correlator, event("a", "m12"), at(700)).unwrap();
    assert_eq!(later.message.as_deref(), Some("m12"));
}

#[test]
fn one_pod_cannot_flood_and_others_are_not_held_up() {
    let mut correlator = correlator();
    let taken = (0..100)
        .filter(|_| take(&mut correlator, event("a", "x"), at(0)).is_some())
        .count();
    assert_eq!(taken, 25);
    assert!(take(&mut correlator, event("b", "x"), at(0)).is_some());
    assert!(take(&mut correlator, event("a", "x"), at(299)).is_none());
    assert!(take(&mut correlator, event("a", "x"), at(301)).is_some());
    // Those that were left out are counted all the same.
    let key = take(&mut correlator, event("a", "x"), at(700)).unwrap();
    assert_eq!(correlator.told(&key).unwrap().count, 103);
}

#[test]
fn memory_is_bounded() {
    let mut correlator = correlator();
    for n in 0..6000 {
        take(&mut correlator, event(&format!("p{n}"), "x"), at(n));
    }
    assert_eq!(correlator.remembered(), [4096, 4096, 4096]);
}

#[test]
fn what_waits_is_counted_up_however_long() {
    let mut correlator = correlator();
    let key = take(&mut correlator, event("a", "x"), at(0)).unwrap();
    correlator.told_mut(&key).unwrap().place = Some(1);
    take(&mut correlator, event("a", "x"), at(2000)).unwrap();
    let told = correlator.told(&key).unwrap();
    assert_eq!((told.count, told.first, told.last), (2, at(0), at(2000)));
}

/// Returns the state of a later agent that reads the records of this one, in the order in which they were made.
fn reborn(correlator: &Correlator, keys: &[Key], pods: &[&str], now: Stamp) -> Correlator {
    let mut later = self::correlator();
    for key in keys {
        if let Some(record) = correlator.record(key, now) {
            let (key, told) = record.into_told();
            later.restore(&key, told, now);
        }
    }
    for pod in pods {
        let pod = event(pod, "").pod;
        if let Some(room) = correlator.room(&pod, now) {
            later.restore_room(room);
        }
    }
    later
}

#[test]
fn a_restart_keeps_object_count_and_first_time() {
    let mut before = correlator();
    let key = take(&mut before, event("a", "x"), at(0)).unwrap();
    before.told_mut(&key).unwrap().made = true;
    take(&mut before, event("a", "x"), at(60)).unwrap();
    let name = before.told(&key).unwrap().name.clone();
    let mut after = reborn(&before, std::slice::from_ref(&key), &[], at(100));
    take(&mut after, event("a", "x"), at(120)).unwrap();
    let told = after.told(&key).unwrap();
    assert_eq!((told.count, told.first, told.made), (3, at(0), true));
    assert_eq!(told.name, name);
    // Nothing is kept of what nothing is counted in any more.
    assert_eq!(after.record(&key, at(721)), None);
    assert!(after.record(&key, at(720)).is_some());
}

#[test]
fn a_restart_gives_a_pod_that_floods_no_more_room() {
    let mut before = correlator();
    for n in 0..30 {
        take(&mut before, event("loud", "x"), at(n));
        if n < 5 {
            take(&mut before, event("quiet", "x"), at(n));
        }
    }
    let mut after = reborn(&before, &[], &["loud", "quiet"], at(30));
    assert!(take(&mut after, event("loud", "x"), at(290)).is_none());
    assert!(take(&mut after, event("loud", "x"), at(301)).is_some());
    assert!(take(&mut after, event("loud", "x"), at(302)).is_none());
    // A pod that starts costs no record.
    let room = |pod: &str, now| before.room(&event(pod, "").pod, now);
    assert_eq!(room("quiet", at(30)), None);
    assert!(room("loud", at(30)).is_some());
    // Nor does one that has not caused any for long.
    assert_eq!(room("loud", at(30 + 20 * 300)), None);
}

#[test]
fn a_restart_goes_on_combining() {
    let mut before = correlator();
    let mut keys = Vec::new();
    for n in 0..12 {
        let key = take(&mut before, event("a", &format!("m{n}")), at(n)).unwrap();
        before.told_mut(&key).unwrap().made = true;
        keys.push(key);
    }
    keys.dedup();
    let combined = keys.last().unwrap().clone();
    // Even when nothing but the object they are combined in is known.
    for known in [&keys[..], &keys[9..]] {
        let mut after = reborn(&before, known, &[], at(20));
        let next = take(&mut after, event("a", "m12"), at(30)).unwrap();
        assert_eq!(next, combined);
        assert_eq!(after.told(&combined).unwrap().count, 4);
    }
    // Seven of them, and the next two are told for themselves.
    let mut after = reborn(&before, &keys[..7], &[], at(20));
    for (n, alone) in [(20, true), (21, true), (22, false)] {
        let key = take(&mut after, event("a", &format!("m{n}")), at(30)).unwrap();
        assert_eq!(key.is_combined(), !alone, "{n}");
    }
}

#[test]
fn no_two_objects_have_the_same_name() {
    let mut correlator = correlator();
    let names: BTreeSet<_> = (0..9)
        .map(|n| {
            let key = take(&mut correlator, event("a", &format!("m{n}")), at(0)).unwrap();
            correlator.told(&key).unwrap().name.clone()
        })
        .collect();
    assert_eq!(names.len(), 9);
    assert!(names.iter().all(|name| name.starts_with("a.")));
    let node = Event::node(EventType::Normal, "Starting", "");
    let key = take(&mut correlator, node, at(0)).unwrap();
    assert!(correlator.told(&key).unwrap().name.starts_with("n1."));
}
