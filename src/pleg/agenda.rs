//! Next requests of the PLEG to the runtime, as data.
//!
//! The input is requested pods, pods that a list showed changed, and the calls that have begun and ended. The output is
//! the next step. At most one inspection of a pod is under way; a request during it leads to another inspection
//! afterwards. A fixed number of slots limits the inspections. One that takes long gives its slot back, and the pod's
//! next ones wait in another lane with slots of its own, so that slow inspections delay no others.
//!
//! **Invariant:** a requested pod is inspected or listed by a call that begins later. **Invariant:** many pods cost one
//! list of all, not a list each: the cost of a list depends on the number of all containers, not on the requested pods.

use std::collections::{BTreeSet, HashMap, VecDeque};

use tokio::time::Instant;

use crate::types::PodUid;
use crate::types::runtime::PodStatus;

/// Inspections at once, without slow ones.
const TURNS: usize = 4;
/// Inspections at once of pods whose last one was slow.
const SLOW_TURNS: usize = 2;
/// More pods than these are listed together.
const MANY: usize = 8;

/// Source of the data for an inspection.
#[derive(Debug, PartialEq)]
pub(super) enum Look {
    /// By what a list that began at that moment showed of it; not listed again.
    At(PodStatus, Instant),
    /// By its UID.
    Now,
}

/// The next step.
#[derive(Debug, PartialEq)]
pub(super) enum Step {
    /// List everything.
    List,
    /// Inspect one pod.
    Look(PodUid, Look, Lane),
}

/// Queue in which an inspection waits for its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    Swift,
    /// The pod's last inspection was slow.
    Slow,
}

#[derive(Debug, Default)]
pub(super) struct Agenda {
    swift: Queue,
    slow: Queue,
    /// Pods whose last inspection was slow.
    take_long: BTreeSet<PodUid>,
    /// Inspections by pod; a pod in `todo` of a queue without an entry here is left out.
    looks: HashMap<PodUid, Look>,
    under_way: HashMap<PodUid, UnderWay>,
    listing: Option<Listing>,
}

/// Waiting pods of a lane, and its inspections under way.
#[derive(Debug, Default)]
struct Queue {
    /// Requested pods, listed together when they are many.
    asked: Fifo,
    /// To be inspected, in any case.
    todo: VecDeque<PodUid>,
    turns: usize,
}

#[derive(Debug)]
struct UnderWay {
    as_of: Instant,
    /// True if it was requested again.
    again: bool,
}

#[derive(Debug)]
struct Listing {
    /// Pods requested before it began.
    asked: Vec<PodUid>,
    slow: bool,
}

impl Agenda {
    /// Requests an inspection of a pod.
    pub(super) fn ask(&mut self, uid: PodUid) {
        match self.under_way.get_mut(&uid) {
            Some(look) => look.again = true,
            None => self.queue_of(&uid).asked.push(uid),
        }
    }

    /// A list showed that a pod is not as it was.
    pub(super) fn changed(&mut self, uid: PodUid, listed: PodStatus, as_of: Instant) {
        match self.under_way.get_mut(&uid) {
            Some(look) => look.again = true,
            None => self.add(uid, Look::At(listed, as_of)),
        }
    }

    /// Records that a list that began at `as_of` showed nothing of a pod: inspections that began earlier do not count
    /// any more.
    pub(super) fn gone(&mut self, uid: &PodUid, as_of: Instant) {
        self.looks.remove(uid);
        self.take_long.remove(uid);
        let earlier = self.under_way.get(uid).is_some_and(|l| l.as_of <= as_of);
        if earlier && self.under_way.remove(uid).is_some_and(|look| look.again) {
            // Perhaps after the list began.
            self.swift.asked.push(uid.clone());
        }
    }

    /// Returns the next call to begin, if any; an inspection with its lane.
    pub(super) fn next(&mut self) -> Option<Step> {
        let many = self.swift.asked.len() + self.slow.asked.len() > MANY;
        let waits = match &self.listing {
            None if many => return Some(Step::List),
            // The next list takes them; one that hangs is not waited for.
            Some(listing) => many && !listing.slow,
            None => false,
        };
        self.next_in(Lane::Swift, waits)
            .or_else(|| self.next_in(Lane::Slow, waits))
    }

    /// Returns the next call in a lane. A requested pod waits if `waits`.
    fn next_in(&mut self, lane: Lane, waits: bool) -> Option<Step> {
        let (queue, turns) = match lane {
            Lane::Swift => (&mut self.swift, TURNS),
            Lane::Slow => (&mut self.slow, SLOW_TURNS),
        };
        if queue.turns >= turns {
            return None;
        }
        while let Some(uid) = queue.todo.pop_front() {
            if let Some(look) = self.looks.remove(&uid) {
                return Some(Step::Look(uid, look, lane));
            }
        }
        if waits {
            return None;
        }
        while let Some(uid) = queue.asked.pop() {
            match self.under_way.get_mut(&uid) {
                Some(look) => look.again = true,
                None => return Some(Step::Look(uid, Look::Now, lane)),
            }
        }
        None
    }

    /// Records that a list of everything begins. It covers all requested pods.
    pub(super) fn list_began(&mut self) {
        let mut asked = self.swift.asked.take();
        asked.extend(self.slow.asked.take());
        self.listing = Some(Listing { asked, slow: false });
    }

    pub(super) fn is_listing(&self) -> bool {
        self.listing.is_some()
    }

    /// The list takes long.
    pub(super) fn list_is_slow(&mut self) {
        if let Some(listing) = &mut self.listing {
            listing.slow = true;
        }
    }

    /// The list has ended. If it failed, what it was to cover is inspected pod by pod.
    pub(super) fn list_ended(&mut self, ok: bool) {
        let covered = self.listing.take().map(|l| l.asked).unwrap_or_default();
        if ok {
            return;
        }
        for uid in covered {
            match self.under_way.get_mut(&uid) {
                Some(look) => look.again = true,
                None => self.add(uid, Look::Now),
            }
        }
    }

    /// Records that an inspection begins, which takes a slot.
    pub(super) fn look_began(&mut self, uid: PodUid, as_of: Instant, lane: Lane) {
        let again = false;
        self.under_way.insert(uid, UnderWay { as_of, again });
        self.queue(lane).turns += 1;
    }

    /// Gives back the slot of an inspection that is slow, or that has ended without having been slow.
    pub(super) fn give_turn_back(&mut self, uid: &PodUid, lane: Lane, takes_long: bool) {
        let queue = self.queue(lane);
        queue.turns = queue.turns.saturating_sub(1);
        if !takes_long {
            self.take_long.remove(uid);
        } else if self.under_way.contains_key(uid) {
            self.take_long.insert(uid.clone());
        }
    }

    /// Records the end of an inspection. Returns whether it counts: a later list may have shown that the pod is gone.
    pub(super) fn look_ended(&mut self, uid: &PodUid, as_of: Instant) -> bool {
        if self.under_way.get(uid).is_none_or(|l| l.as_of != as_of) {
            return false;
        }
        if self.under_way.remove(uid).is_some_and(|look| look.again) {
            self.queue_of(uid).asked.push(uid.clone());
        }
        true
    }

    /// Returns whether an inspection of the pod is under way or planned.
    pub(super) fn has(&self, uid: &PodUid) -> bool {
        self.under_way.contains_key(uid)
            || self.looks.contains_key(uid)
            || self.swift.asked.members.contains(uid)
            || self.slow.asked.members.contains(uid)
    }

    /// Returns whether nothing waits for a slot.
    pub(super) fn is_idle(&self) -> bool {
        self.looks.is_empty() && self.swift.asked.len() + self.slow.asked.len() == 0
    }

    fn add(&mut self, uid: PodUid, look: Look) {
        if self.looks.insert(uid.clone(), look).is_none() {
            self.queue_of(&uid).todo.push_back(uid);
        }
    }

    fn queue(&mut self, lane: Lane) -> &mut Queue {
        match lane {
            Lane::Swift => &mut self.swift,
            Lane::Slow => &mut self.slow,
        }
    }

    fn queue_of(&mut self, uid: &PodUid) -> &mut Queue {
        let takes_long = self.take_long.contains(uid);
        self.queue(if takes_long { Lane::Slow } else { Lane::Swift })
    }
}

/// First in, first out, each once.
#[derive(Debug, Default)]
struct Fifo {
    order: VecDeque<PodUid>,
    members: BTreeSet<PodUid>,
}

impl Fifo {
    fn push(&mut self, uid: PodUid) {
        if self.members.insert(uid.clone()) {
            self.order.push_back(uid);
        }
    }

    fn pop(&mut self) -> Option<PodUid> {
        let uid = self.order.pop_front()?;
        self.members.remove(&uid);
        Some(uid)
    }

    fn take(&mut self) -> Vec<PodUid> {
        self.members.clear();
        std::mem::take(&mut self.order).into()
    }

    fn len(&self) -> usize {
        self.order.len()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn uid(n: usize) -> PodUid {
        PodUid::from(format!("u{n}"))
    }

    fn listed(n: usize) -> PodStatus {
        PodStatus::empty(uid(n))
    }

    /// Begins all there is a turn for.
    fn begin(agenda: &mut Agenda, as_of: Instant) -> Vec<PodUid> {
        let mut begun = Vec::new();
        while let Some(Step::Look(uid, _, lane)) = agenda.next() {
            agenda.look_began(uid.clone(), as_of, lane);
            begun.push(uid);
        }
        begun
    }

    #[test]
    fn looks_take_turns_and_one_that_takes_long_gives_its_turn_back() {
        let (mut agenda, now) = (Agenda::default(), Instant::now());
        (0..6).for_each(|n| agenda.changed(uid(n), listed(n), now));
        assert_eq!(begin(&mut agenda, now), [uid(0), uid(1), uid(2), uid(3)]);
        assert!(begin(&mut agenda, now).is_empty());
        agenda.give_turn_back(&uid(0), Lane::Swift, true);
        assert_eq!(begin(&mut agenda, now), [uid(4)]);
        assert!(agenda.look_ended(&uid(1), now));
        agenda.give_turn_back(&uid(1), Lane::Swift, false);
        assert_eq!(begin(&mut agenda, now), [uid(5)]);
        assert!(agenda.is_idle());
    }

    #[test]
    fn pods_whose_looks_take_long_again_and_again_hold_up_each_other_only() {
        let (mut agenda, now) = (Agenda::default(), Instant::now());
        let look = |agenda: &mut Agenda, n: usize, lane, takes_long| {
            agenda.give_turn_back(&uid(n), lane, takes_long);
            assert!(agenda.look_ended(&uid(n), now));
        };
        for n in 0..4 {
            agenda.ask(uid(n));
            assert_eq!(begin(&mut agenda, now), [uid(n)]);
            look(&mut agenda, n, Lane::Swift, true);
        }
        (0..8).for_each(|n| agenda.ask(uid(n)));
        let begun = begin(&mut agenda, now);
        assert_eq!(begun, [4, 5, 6, 7, 0, 1].map(uid));
        look(&mut agenda, 0, Lane::Slow, true);
        assert_eq!(begin(&mut agenda, now), [uid(2)]);
        // A look that is as quick as others brings its pod back among them.
        look(&mut agenda, 1, Lane::Slow, false);
        assert_eq!(begin(&mut agenda, now), [uid(3)]);
        agenda.ask(uid(1));
        assert!(begin(&mut agenda, now).is_empty());
        look(&mut agenda, 4, Lane::Swift, false);
        assert_eq!(begin(&mut agenda, now), [uid(1)]);
        // One that is gone is forgotten.
        agenda.gone(&uid(2), now);
        agenda.give_turn_back(&uid(2), Lane::Slow, true);
        assert_eq!(agenda.take_long, BTreeSet::from([uid(0), uid(3)]));
    }

    #[test]
    fn what_is_asked_for_during_its_look_is_looked_at_again() {
        let (mut agenda, now) = (Agenda::default(), Instant::now());
        agenda.ask(uid(1));
        assert_eq!(begin(&mut agenda, now), [uid(1)]);
        agenda.ask(uid(1));
        agenda.ask(uid(1));
        assert!(begin(&mut agenda, now).is_empty());
        assert!(agenda.look_ended(&uid(1), now));
        assert_eq!(begin(&mut agenda, now), [uid(1)]);
        assert!(agenda.look_ended(&uid(1), now));
        assert!(begin(&mut agenda, now).is_empty());
    }

    #[test]
    fn a_pod_that_is_asked_for_and_listed_has_one_look_at_a_time() {
        let (mut agenda, now) = (Agenda::default(), Instant::now());
        agenda.ask(uid(1));
        agenda.changed(uid(1), listed(1), now);
        assert_eq!(begin(&mut agenda, now), [uid(1)]);
        assert!(agenda.look_ended(&uid(1), now));
        assert_eq!(begin(&mut agenda, now), [uid(1)]);
    }

    #[test]
    fn many_pods_are_listed_together() {
        let (mut agenda, now) = (Agenda::default(), Instant::now());
        (0..=MANY).for_each(|n| agenda.ask(uid(n)));
        assert_eq!(agenda.next(), Some(Step::List));
        agenda.list_began();
        assert_eq!(agenda.next(), None);
        // As many again wait for the next list.
        (0..=MANY).for_each(|n| agenda.ask(uid(n)));
        assert_eq!(agenda.next(), None);
        agenda.list_ended(true);
        assert_eq!(agenda.next(), Some(Step::List));
        agenda.list_began();
        agenda.list_ended(true);
        assert_eq!(agenda.next(), None);
        // Few are looked at one by one.
        agenda.ask(uid(1));
        assert_eq!(begin(&mut agenda, now), [uid(1)]);
    }

    #[test]
    fn a_list_that_fails_or_hangs_loses_nobody() {
        let (mut agenda, now) = (Agenda::default(), Instant::now());
        (0..=MANY).for_each(|n| agenda.ask(uid(n)));
        agenda.list_began();
        agenda.list_ended(false);
        let mut seen = BTreeSet::new();
        while let [uid, ..] = &begin(&mut agenda, now)[..] {
            seen.insert(uid.clone());
            for uid in agenda.under_way.keys().cloned().collect::<Vec<_>>() {
                agenda.give_turn_back(&uid, Lane::Swift, false);
                assert!(agenda.look_ended(&uid, now));
                seen.insert(uid);
            }
        }
        assert_eq!(seen.len(), MANY + 1);

        agenda.list_began();
        (0..=MANY).for_each(|n| agenda.ask(uid(n)));
        assert!(begin(&mut agenda, now).is_empty());
        agenda.list_is_slow();
        assert_eq!(begin(&mut agenda, now).len(), TURNS);
    }

    #[test]
    fn a_look_does_not_count_that_began_before_the_list_that_showed_nothing_of_the_pod() {
        let (mut agenda, before) = (Agenda::default(), Instant::now());
        let listed_at = before + Duration::from_secs(1);
        let after = before + Duration::from_secs(2);
        agenda.ask(uid(1));
        assert_eq!(begin(&mut agenda, before), [uid(1)]);
        agenda.gone(&uid(1), listed_at);
        agenda.ask(uid(1));
        assert_eq!(begin(&mut agenda, after), [uid(1)]);
        assert!(!agenda.look_ended(&uid(1), before));
        agenda.gone(&uid(1), listed_at);
        assert!(agenda.look_ended(&uid(1), after));
    }
}
