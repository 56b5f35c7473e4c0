use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

fn all(turns: &mut Turns<u8, u32>) -> Vec<u32> {
    std::iter::from_fn(|| turns.next_turn()).collect()
}

#[test]
fn pods_have_turns_one_after_the_other_however_much_of_each_waits() {
    let mut turns = Turns::new(4, 2);
    for id in 0..20 {
        turns.wait(1, id);
    }
    for (pod, id) in [(2, 100), (3, 101), (2, 102)] {
        turns.wait(pod, id);
    }
    assert_eq!(all(&mut turns), [0, 100, 101, 1]);
    turns.end(0, true);
    turns.end(100, true);
    assert_eq!(all(&mut turns), [102, 2]);
}

#[test]
fn what_is_slow_goes_on_in_the_share_of_its_pod_and_waits_for_it_the_next_time() {
    let mut turns = Turns::new(2, 1);
    for id in 0..4 {
        turns.wait(1, id);
    }
    assert_eq!(all(&mut turns), [0, 1]);
    assert!(turns.overstay(0), "there is room in the share");
    assert!(turns.overstay(0), "twice");
    assert_eq!(all(&mut turns), [2]);
    assert!(!turns.overstay(1), "the share is taken");
    assert!(all(&mut turns).is_empty(), "its turn is not free yet");
    turns.end(1, false);
    turns.wait(1, 1);
    assert_eq!(all(&mut turns), [3]);

    // Another pod does not notice.
    turns.end(2, true);
    turns.wait(2, 50);
    assert_eq!(all(&mut turns), [50]);
    turns.end(0, false);
    assert_eq!(all(&mut turns), [1], "room in the share, none in common");

    // What was quick has a common turn again.
    turns.end(1, true);
    turns.wait(1, 1);
    assert!(all(&mut turns).is_empty(), "none is free");
    turns.end(3, true);
    assert_eq!(all(&mut turns), [1]);
}

#[test]
fn what_is_withdrawn_has_no_turn_and_is_not_remembered() {
    let mut turns = Turns::new(1, 1);
    for id in 0..3 {
        turns.wait(1, id);
    }
    turns.wait(2, 100);
    assert_eq!(all(&mut turns), [0]);
    assert!(turns.overstay(0));
    assert_eq!(all(&mut turns), [100]);
    for id in [1, 2] {
        turns.withdraw(&1, id);
    }
    turns.withdraw(&2, 100);
    turns.end(100, true);
    assert!(all(&mut turns).is_empty());

    // One that waits for its share.
    turns.wait(1, 1);
    assert_eq!(all(&mut turns), [1]);
    assert!(!turns.overstay(1));
    turns.end(1, false);
    turns.wait(1, 1);
    turns.withdraw(&1, 1);
    turns.end(0, false);
    turns.withdraw(&1, 0);
    assert!(all(&mut turns).is_empty());
    assert!(turns.pods.is_empty() && turns.round.is_empty() && turns.slow.is_empty());
    turns.wait(1, 1);
    assert_eq!(
        all(&mut turns),
        [1],
        "in common: it is forgotten that it was slow"
    );
}

#[derive(Clone, Debug)]
enum Step {
    Wait(u8, u32),
    Overstay(usize),
    End(usize, bool),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0u8..6, 0u32..12).prop_map(|(pod, nth)| Step::Wait(pod, u32::from(pod) * 100 + nth)),
        2 => (0usize..32).prop_map(Step::Overstay),
        3 => (0usize..32, any::<bool>()).prop_map(|(nth, quick)| Step::End(nth, quick)),
    ]
}

proptest! {
    /// However pods behave: the bounds hold, each that waits for a common turn has it after at most one of every other
    /// pod, nothing is lost, nothing has two turns.
    #[test]
    fn no_pod_starves(
        common in 1usize..4,
        share in 1usize..3,
        steps in prop::collection::vec(step(), 1..200),
    ) {
        let mut turns: Turns<u8, u32> = Turns::new(common, share);
        let pod_of = |id: u32| u8::try_from(id / 100).unwrap();
        let mut waiting: BTreeSet<u32> = BTreeSet::new();
        // What is under way, and whether in the share.
        let mut running: BTreeMap<u32, bool> = BTreeMap::new();
        let mut called_off: BTreeSet<u32> = BTreeSet::new();
        let mut slow: BTreeSet<u32> = BTreeSet::new();
        // Of a pod that waits for a common turn: whom it saw having one since its own last.
        let mut passed: BTreeMap<u8, BTreeMap<u8, usize>> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Wait(pod, id) => {
                    if !waiting.contains(&id) && !running.contains_key(&id) {
                        waiting.insert(id);
                        turns.wait(pod, id);
                        if !slow.contains(&id) {
                            passed.entry(pod).or_default();
                        }
                    }
                }
                Step::Overstay(nth) => {
                    if let Some(id) = running.keys().nth(nth).copied() {
                        slow.insert(id);
                        let room = running
                            .iter()
                            .filter(|(other, in_share)| **in_share && pod_of(**other) == pod_of(id))
                            .count() < share;
                        let goes_on = turns.overstay(id);
                        prop_assert_eq!(goes_on, running[&id] || room);
                        if goes_on {
                            running.insert(id, true);
                        } else {
                            called_off.insert(id);
                        }
                    }
                }
                Step::End(nth, quick) => {
                    if let Some(id) = running.keys().nth(nth).copied() {
                        running.remove(&id);
                        let off = called_off.remove(&id);
                        if quick && !off {
                            slow.remove(&id);
                        }
                        turns.end(id, quick && !off);
                        if off {
                            waiting.insert(id);
                            turns.wait(pod_of(id), id);
                        }
                    }
                }
            }
            while let Some(id) = turns.next_turn() {
                prop_assert!(waiting.remove(&id), "{id} did not wait");
                let in_share = slow.contains(&id);
                running.insert(id, in_share);
                if !in_share {
                    let pod = pod_of(id);
                    for (other, saw) in &mut passed {
                        let times = saw.entry(pod).or_default();
                        *times += 1;
                        prop_assert!(*other == pod || *times <= 1, "{other} was passed over by {pod}");
                    }
                    passed.remove(&pod);
                    if waiting.iter().any(|w| pod_of(*w) == pod && !slow.contains(w)) {
                        passed.insert(pod, BTreeMap::new());
                    }
                }
            }
            let in_common = running.values().filter(|in_share| !**in_share).count();
            prop_assert!(in_common <= common);
            for pod in 0..6 {
                let of_pod = |id: &u32| pod_of(*id) == pod;
                let held = running.iter().filter(|(id, s)| of_pod(id) && **s).count();
                prop_assert!(held <= share);
                // Nobody waits for what is free.
                let waits = |is_slow: bool| {
                    waiting.iter().any(|id| of_pod(id) && slow.contains(id) == is_slow)
                };
                prop_assert!(!waits(true) || held == share);
                prop_assert!(!waits(false) || in_common == common);
            }
        }
        for id in running.into_keys() {
            turns.end(id, true);
            while let Some(next) = turns.next_turn() {
                prop_assert!(waiting.remove(&next));
                turns.end(next, true);
            }
        }
        prop_assert!(waiting.is_empty());
        prop_assert!(turns.pods.is_empty() && turns.under_way.is_empty() && turns.round.is_empty());
    }
}
