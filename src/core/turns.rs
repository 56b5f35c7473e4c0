//! Fair slots: a fixed number of slots shared between pods, so that no pod keeps them from the others.
//!
//! The input is the waiting items with their pods, the items that have held their slot for long, and the finished ones.
//! The output is the items that may begin, and those to cancel.
//!
//! There is a fixed number of *common* turns, which the waiting pods get one after the other, however many items of
//! each wait. An item that holds its turn for long continues in its pod's own *share* and gives the common turn back;
//! when the share is taken, it is cancelled and waits for it. An item that was slow the last time waits for the share
//! from the beginning, so that it costs the others their turns once.
//!
//! **Invariants:** at most `common` turns are held in common and at most `share` by one pod besides, so at most
//! `common` + `share` × pods in all. Between two common turns that become free for a waiting pod every other pod gets
//! one at most. No more is remembered than one entry for everything that waits, is under way or was slow.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The turns of one kind of work: `P` names pods, `I` what they have to do.
#[derive(Clone, Debug)]
pub struct Turns<P, I> {
    common: usize,
    share: usize,
    /// Common turns that are held.
    held: usize,
    pods: BTreeMap<P, Queues<I>>,
    /// Pods with something that waits for a common turn, the next one first; each once.
    round: VecDeque<P>,
    /// Pods with something that waits for their share and may have room in it.
    roomy: BTreeSet<P>,
    under_way: BTreeMap<I, Turn<P>>,
    slow: BTreeSet<I>,
}

#[derive(Clone, Debug)]
struct Queues<I> {
    for_common: VecDeque<I>,
    for_share: VecDeque<I>,
    /// Turns of the share that are held.
    held: usize,
}

#[derive(Clone, Debug)]
struct Turn<P> {
    pod: P,
    in_share: bool,
}

impl<I> Default for Queues<I> {
    fn default() -> Self {
        Self {
            for_common: VecDeque::new(),
            for_share: VecDeque::new(),
            held: 0,
        }
    }
}

impl<P: Ord + Clone, I: Ord + Copy> Turns<P, I> {
    /// `common` turns for all, and `share` for each pod besides.
    pub fn new(common: usize, share: usize) -> Self {
        Self {
            common,
            share,
            held: 0,
            pods: BTreeMap::new(),
            round: VecDeque::new(),
            roomy: BTreeSet::new(),
            under_way: BTreeMap::new(),
            slow: BTreeSet::new(),
        }
    }

    /// Has `id` wait for a turn. It must neither wait nor be under way.
    pub fn wait(&mut self, pod: P, id: I) {
        let queues = self.pods.entry(pod.clone()).or_default();
        if self.slow.contains(&id) {
            queues.for_share.push_back(id);
            self.roomy.insert(pod);
        } else {
            if queues.for_common.is_empty() {
                self.round.push_back(pod);
            }
            queues.for_common.push_back(id);
        }
    }

    /// Gives out a slot, to the returned item. `None` when no item may have one.
    pub fn next_turn(&mut self) -> Option<I> {
        self.next_in_share().or_else(|| self.next_in_common())
    }

    fn next_in_share(&mut self) -> Option<I> {
        while let Some(pod) = self.roomy.first().cloned() {
            let queues = self.pods.get_mut(&pod);
            let free = queues.filter(|queues| queues.held < self.share);
            let Some((queues, id)) = free.and_then(|queues| {
                let id = queues.for_share.pop_front()?;
                Some((queues, id))
            }) else {
                self.roomy.remove(&pod);
                continue;
            };
            queues.held += 1;
            let turn = Turn {
                pod,
                in_share: true,
            };
            self.under_way.insert(id, turn);
            return Some(id);
        }
        None
    }

    fn next_in_common(&mut self) -> Option<I> {
        if self.held >= self.common {
            return None;
        }
        let pod = self.round.pop_front()?;
        let queues = self.pods.get_mut(&pod)?;
        let id = queues.for_common.pop_front()?;
        if !queues.for_common.is_empty() {
            self.round.push_back(pod.clone());
        }
        self.held += 1;
        let turn = Turn {
            pod,
            in_share: false,
        };
        self.under_way.insert(id, turn);
        Some(id)
    }

    /// Says that `id` has held its turn for long. Returns whether it goes on, in its pod's share. If not, it has to be
    /// called off and keeps its common turn until [`Self::end`]; it waits for the share from then on.
    pub fn overstay(&mut self, id: I) -> bool {
        let Some(turn) = self.under_way.get_mut(&id) else {
            return true;
        };
        self.slow.insert(id);
        if turn.in_share {
            return true;
        }
        let queues = self.pods.entry(turn.pod.clone()).or_default();
        if queues.held >= self.share {
            return false;
        }
        queues.held += 1;
        self.held -= 1;
        turn.in_share = true;
        true
    }

    /// Takes the turn of `id` back. Whether it was slow is remembered for its next turn: `quick` says that it was not.
    pub fn end(&mut self, id: I, quick: bool) {
        let Some(turn) = self.under_way.remove(&id) else {
            return;
        };
        if quick {
            self.slow.remove(&id);
        }
        if !turn.in_share {
            self.held -= 1;
        } else if let Some(queues) = self.pods.get_mut(&turn.pod) {
            queues.held -= 1;
            if !queues.for_share.is_empty() {
                self.roomy.insert(turn.pod.clone());
            }
        }
        self.drop_idle(&turn.pod);
    }

    /// Forgets that `id` was slow.
    pub fn forget(&mut self, id: I) {
        self.slow.remove(&id);
    }

    /// Ends the waiting of `id`, if it waits, and forgets that it was slow. What is under way stays so.
    pub fn withdraw(&mut self, pod: &P, id: I) {
        self.forget(id);
        let Some(queues) = self.pods.get_mut(pod) else {
            return;
        };
        let waited = !queues.for_common.is_empty();
        queues.for_common.retain(|waiting| *waiting != id);
        queues.for_share.retain(|waiting| *waiting != id);
        if waited && queues.for_common.is_empty() {
            self.round.retain(|waiting| waiting != pod);
        }
        self.drop_idle(pod);
    }

    fn drop_idle(&mut self, pod: &P) {
        let is_idle = |queues: &Queues<I>| {
            queues.held == 0 && queues.for_common.is_empty() && queues.for_share.is_empty()
        };
        // With something in common turns alone nothing is kept of a pod.
        if self.pods.get(pod).is_some_and(is_idle) {
            self.pods.remove(pod);
            self.roomy.remove(pod);
        }
    }
}

#[cfg(test)]
mod tests;
