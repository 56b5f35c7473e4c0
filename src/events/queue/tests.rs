//! Waiting objects: their order, and those that have to go.

use super::*;
use crate::events::testkit::{at, event};
use crate::types::BootId;

fn queue() -> Queue {
    Queue::new(Correlator::new("n1", 0))
}

/// Pods of everything that waits, in order; it waits no more.
fn drain(queue: &mut Queue, now: Stamp) -> Vec<String> {
    let mut pods = Vec::new();
    loop {
        match queue.next(now) {
            Next::Nothing | Next::Held(_) => return pods,
            Next::TooOld => pods.push("too old".to_owned()),
            Next::Object(key) => {
                pods.push(key.pod.clone().unwrap().name);
                queue.begin(&key).unwrap();
                queue.sent();
            }
        }
    }
}

/// Returns the records that are worth keeping.
fn kept(queue: &Queue, now: Stamp) -> Kept {
    let all = queue.changed.iter();
    Kept {
        told: all
            .filter_map(|key| queue.correlator.record(key, now))
            .collect(),
        ..Kept::default()
    }
}

#[test]
fn what_waits_keeps_its_order_across_restarts() {
    let mut before = queue();
    for pod in ["c", "a", "b"] {
        before.take(event(pod, "x"), at(1));
    }
    // A repetition takes no other place.
    before.take(event("c", "x"), at(2));
    let mut later = queue();
    let restored = later.restore(kept(&before, at(3)), at(3));
    assert_eq!((restored.waiting, restored.too_old), (3, 0));
    later.take(event("d", "x"), at(4));
    let mut last = queue();
    last.restore(kept(&later, at(5)), at(5));
    assert_eq!(drain(&mut last, at(6)), ["c", "a", "b", "d"]);
    assert_eq!(last.waiting(), (0, 0));
}

#[test]
fn what_fails_stays_first_and_what_changed_meanwhile_is_told_again() {
    let mut queue = queue();
    queue.take(event("a", "x"), at(1));
    queue.take(event("b", "x"), at(1));
    let Next::Object(a) = queue.next(at(1)) else {
        panic!("something waits")
    };
    assert_eq!(queue.begin(&a).unwrap().count, 1);
    queue.take(event("a", "x"), at(2));
    queue.failed();
    assert_eq!(queue.begin(&a).unwrap().count, 2);
    queue.take(event("a", "x"), at(3));
    queue.sent();
    assert_eq!(drain(&mut queue, at(3)), ["b", "a"]);
}

#[test]
fn what_the_server_fails_on_is_left_alone_for_a_while_and_keeps_its_place() {
    let mut queue = queue();
    for pod in ["a", "b"] {
        queue.take(event(pod, "x"), at(1));
    }
    let waiting = queue.waiting();
    let hold =
        |from: Stamp| move |failures: u32| from.plus(Duration::from_secs(10 * u64::from(failures)));
    let next = |queue: &mut Queue, now| match queue.next(now) {
        Next::Object(key) => key,
        _ => panic!("something waits"),
    };
    let a = next(&mut queue, at(1));
    queue.begin(&a).unwrap();
    queue.take(event("a", "x"), at(2));
    queue.postponed(hold(at(2)));
    assert_eq!(queue.waiting(), waiting);
    let b = next(&mut queue, at(2));
    assert_ne!(a, b);
    queue.begin(&b).unwrap();
    queue.postponed(hold(at(4)));
    let Next::Held(wait) = queue.next(at(5)) else {
        panic!("both are left alone")
    };
    assert_eq!(wait, Duration::from_secs(7));
    // The second time it takes twice as long; what is on record knows nothing of it.
    assert_eq!(next(&mut queue, at(12)), a);
    assert_eq!(queue.begin(&a).unwrap().count, 2);
    queue.postponed(hold(at(12)));
    assert!(matches!(queue.next(at(13)), Next::Held(wait) if wait == Duration::from_secs(1)));
    queue.take(event("c", "x"), at(13));
    assert!(
        matches!(queue.next(at(13)), Next::Object(_)),
        "another one is told at once"
    );
    let mut later = self::queue();
    later.restore(kept(&queue, at(13)), at(13));
    assert_eq!(drain(&mut later, at(13)), ["a", "b", "c"]);
    assert_eq!(
        drain(&mut queue, at(32)),
        ["c", "b", "a"],
        "the fewest failures first"
    );
    assert_eq!(queue.waiting(), (0, 0));
}

#[test]
fn what_is_left_alone_is_too_old_one_day() {
    let mut queue = queue();
    queue.take(event("a", "x"), at(1));
    let Next::Object(a) = queue.next(at(1)) else {
        panic!("something waits")
    };
    queue.begin(&a).unwrap();
    queue.postponed(|_| at(100_000));
    assert!(matches!(queue.next(at(10_000)), Next::TooOld));
    assert!(matches!(queue.next(at(10_000)), Next::Nothing));
}

/// It had to go while it was being written, and happened again.
#[test]
fn what_had_to_go_and_comes_back_waits_again() {
    for postponed in [false, true] {
        let mut queue = queue();
        queue.take(event("a", "x"), at(1));
        let Next::Object(a) = queue.next(at(1)) else {
            panic!("something waits")
        };
        queue.begin(&a).unwrap();
        let place = queue.correlator.told(&a).unwrap().place.unwrap();
        queue.drop_at(place);
        queue.take(event("a", "x"), at(2));
        if postponed {
            queue.postponed(|_| at(2));
        } else {
            queue.failed();
        }
        assert_eq!(drain(&mut queue, at(3)), ["a"]);
    }
}

#[test]
fn the_oldest_go_first_by_number_and_by_size() {
    let mut queue = queue();
    let mut full = 0;
    for n in 0..PLACES + 3 {
        full += queue.take(event(&format!("p{n}"), "x"), at(1)).full;
    }
    assert_eq!(full, 3);
    assert_eq!(queue.waiting().0, PLACES);
    let long = "m".repeat(1024);
    for n in 0..PLACES {
        queue.take(event(&format!("q{n}"), &long), at(1));
    }
    let (waiting, bytes) = queue.waiting();
    assert!(bytes <= BYTES && waiting < PLACES, "{waiting} of {bytes}");
    assert!(bytes > BYTES - 2000, "no more than must go");
    let left = drain(&mut queue, at(1));
    assert_eq!(left.last().unwrap(), &format!("q{}", PLACES - 1));
    assert_eq!(left[0], format!("q{}", PLACES - left.len()));
    assert_eq!(queue.waiting(), (0, 0));
}

#[test]
fn what_is_being_written_is_not_dropped() {
    let mut queue = queue();
    queue.take(event("first", "x"), at(1));
    let Next::Object(first) = queue.next(at(1)) else {
        panic!("something waits")
    };
    queue.begin(&first).unwrap();
    for n in 0..PLACES {
        queue.take(event(&format!("p{n}"), "x"), at(1));
    }
    queue.failed();
    let left = drain(&mut queue, at(1));
    assert_eq!((left[0].as_str(), left[1].as_str()), ("first", "p1"));
}

#[test]
fn what_happened_too_long_ago_is_not_told() {
    let mut before = queue();
    before.take(event("old", "x"), at(0));
    before.take(event("new", "x"), at(1000));
    before.take(event("again", "x"), at(0));
    before.take(event("again", "x"), at(1000));
    let records = kept(&before, at(1000));
    assert_eq!(drain(&mut before, at(3601)), ["too old", "new", "again"]);
    let mut later = queue();
    let restored = later.restore(records, at(3601));
    assert_eq!((restored.waiting, restored.too_old), (2, 1));
    assert_eq!(drain(&mut later, at(3601)), ["new", "again"]);
    // After a reboot the wall clock decides.
    let rebooted = |wall: i64| Stamp {
        boot: BootId(2),
        boottime_ms: 5,
        wall_ms: wall * 1000,
    };
    let records = kept(&before, at(1000));
    assert!(records.told.iter().all(|record| !record.is_waiting()));
    let mut before = queue();
    before.take(event("a", "x"), at(0));
    for (wall, waiting) in [(3600, 1), (3601, 0), (-5, 1)] {
        let mut later = queue();
        let restored = later.restore(kept(&before, at(0)), rebooted(wall));
        assert_eq!(restored.waiting, waiting, "{wall}");
    }
}
