//! Topology hints: which NUMA nodes a provider of a resource would use, and what they come to together. Pure.
//! Upstream: `pkg/kubelet/cm/topologymanager`.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use super::machine::Machine;
use crate::kubeletconfig::TopologyPolicy;

/// A set of NUMA nodes; node numbers are below 64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeMask(u64);

impl NodeMask {
    /// Returns the nodes in both masks.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns how many nodes the mask has.
    pub fn count(self) -> usize {
        usize::try_from(self.0.count_ones()).unwrap_or(64)
    }

    /// Returns whether the mask has this node.
    pub fn contains(self, node: u32) -> bool {
        node < 64 && self.0 & (1 << node) != 0
    }

    /// Returns whether the mask has every node of `other`.
    pub fn includes(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the node numbers, sorted.
    pub fn nodes(self) -> Vec<u32> {
        (0..64).filter(|node| self.contains(*node)).collect()
    }

    /// Returns whether it has fewer nodes than `other`, or as many with lower numbers. Upstream: `IsNarrowerThan`.
    pub fn is_narrower_than(self, other: Self) -> bool {
        (self.count(), self.0) < (other.count(), other.0)
    }
}

impl FromIterator<u32> for NodeMask {
    fn from_iter<T: IntoIterator<Item = u32>>(nodes: T) -> Self {
        let bits = nodes.into_iter().filter(|node| *node < 64);
        Self(bits.fold(0, |mask, node| mask | 1 << node))
    }
}

/// Most combinations that are tried: all of those of 16 nodes. Of 64 nodes there are more than could ever be gone through.
const MOST_MASKS: usize = 1 << 16;

/// The non-empty combinations of these nodes, fewest first, then by number. Upstream: `IterateBitMasks`. Where all of them are
/// too many, these are all of few nodes, and of more nodes those with successive numbers, which mostly are neighbours.
pub fn masks(nodes: &[u32]) -> Vec<NodeMask> {
    let bits: Vec<u64> = (nodes.iter().filter(|node| **node < 64))
        .map(|node| 1_u64 << node)
        .collect();
    let mut masks = Vec::new();
    // Combinations of one size, each with the first node that may be added to it.
    let mut level = vec![(0, 0)];
    let mut size = 0;
    while size < bits.len() {
        let next = level
            .iter()
            .map(|(_, from)| bits.len() - from)
            .sum::<usize>();
        if masks.len() + next > MOST_MASKS {
            break;
        }
        let with = |(mask, from): (u64, usize)| {
            let rest = bits.iter().enumerate().skip(from);
            rest.map(move |(index, bit)| (mask | bit, index + 1))
        };
        level = level.into_iter().flat_map(with).collect();
        masks.extend(level.iter().map(|(mask, _)| NodeMask(*mask)));
        size += 1;
    }
    for size in size + 1..=bits.len() {
        let runs = bits.windows(size);
        masks.extend(runs.map(|run| NodeMask(run.iter().fold(0, |mask, bit| mask | bit))));
    }
    masks.sort_by_key(|mask| (mask.count(), *mask));
    masks
}

/// One way to provide a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hint {
    /// The nodes; `None` for any.
    pub nodes: Option<NodeMask>,
    /// Uses as few nodes as the empty machine would allow.
    pub preferred: bool,
}

/// Hints of a provider by resource: no preference (`None`), or the possible ways; an empty list means that none exists.
/// CPUs and memory are providers.
pub type Hints = BTreeMap<String, Option<Vec<Hint>>>;

/// Rule by which hints are merged.
#[derive(Clone, Copy, Debug)]
pub struct Merging<'a> {
    /// The policy.
    pub policy: TopologyPolicy,
    /// Of masks of one size the one with the closest nodes wins: `prefer-closest-numa-nodes`.
    pub closest: bool,
    /// The machine.
    pub machine: &'a Machine,
}

/// Merges the hints of all providers. The second result says whether the policy admits it. Upstream: `Policy.Merge`.
pub fn merge(providers: &[Hints], merging: Merging<'_>) -> (Hint, bool) {
    let any = Hint {
        nodes: None,
        preferred: true,
    };
    if merging.policy == TopologyPolicy::None {
        let none = Hint {
            preferred: false,
            ..any
        };
        return (none, true);
    }
    let mut lists: Vec<Vec<Hint>> = Vec::new();
    for hints in providers {
        if hints.is_empty() {
            lists.push(vec![any]);
        }
        lists.extend(hints.values().map(|list| match list {
            None => vec![any],
            Some(list) if list.is_empty() => vec![Hint {
                preferred: false,
                ..any
            }],
            Some(list) => list.clone(),
        }));
    }
    if merging.policy == TopologyPolicy::SingleNumaNode {
        for list in &mut lists {
            list.retain(|hint| hint.preferred && hint.nodes.is_none_or(|n| n.count() == 1));
        }
    }
    let mut best = best(&lists, merging);
    match merging.policy {
        TopologyPolicy::SingleNumaNode => {
            let default = merging.machine.node_ids().into_iter().collect();
            if best.nodes == Some(default) {
                best.nodes = None;
            }
            (best, best.preferred)
        }
        TopologyPolicy::Restricted => (best, best.preferred),
        TopologyPolicy::None | TopologyPolicy::BestEffort => (best, true),
    }
}

/// The best combination of one hint of each list. Upstream: `HintMerger.Merge`.
fn best(lists: &[Vec<Hint>], merging: Merging<'_>) -> Hint {
    let default: NodeMask = merging.machine.node_ids().into_iter().collect();
    // The largest of the sizes that each resource needs at least.
    let least = lists.iter().filter_map(|list| {
        let sizes = list.iter().filter_map(|hint| Some(hint.nodes?.count()));
        sizes.min()
    });
    let aim = least.max().unwrap_or(0);
    let mut found: Vec<Partial> = vec![Partial {
        nodes: default,
        first: None,
        preferred: true,
    }];
    for list in lists {
        found = combined(&found, list);
    }
    let candidates = found
        .into_iter()
        .filter(|partial| partial.nodes.count() > 0);
    let chosen = candidates.reduce(|current, candidate| {
        if is_better(candidate, current, aim, merging) {
            candidate
        } else {
            current
        }
    });
    match chosen {
        Some(partial) => Hint {
            nodes: Some(partial.nodes),
            preferred: partial.preferred,
        },
        None => Hint {
            nodes: Some(default),
            preferred: false,
        },
    }
}

/// Every combination of `found` with a hint of `list`, each once: what is equal so far stays equal. There are few of
/// each mask of nodes.
fn combined(found: &[Partial], list: &[Hint]) -> Vec<Partial> {
    let mut seen = BTreeSet::new();
    let pairs = (found.iter()).flat_map(|partial| list.iter().map(move |hint| partial.with(*hint)));
    pairs.filter(|more| seen.insert(*more)).collect()
}

/// A combination of hints of some of the lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Partial {
    nodes: NodeMask,
    /// The mask of the first hint that has one: a preferred combination has no other. `None` in one that is not preferred,
    /// where it decides nothing.
    first: Option<NodeMask>,
    preferred: bool,
}

impl Partial {
    fn with(self, hint: Hint) -> Self {
        let first = self.first.or(hint.nodes);
        let is_same = hint.nodes.is_none_or(|nodes| first == Some(nodes));
        let preferred = self.preferred && hint.preferred && is_same;
        Self {
            nodes: hint.nodes.map_or(self.nodes, |nodes| self.nodes.and(nodes)),
            first: first.filter(|_| preferred),
            preferred,
        }
    }
}

/// Returns whether a candidate replaces the best combination so far. Upstream: `HintMerger.compare`.
fn is_better(candidate: Partial, current: Partial, aim: usize, merging: Merging<'_>) -> bool {
    match (candidate.preferred, current.preferred) {
        (true, false) => return true,
        (false, true) => return false,
        (true, true) => return is_tighter(candidate.nodes, current.nodes, merging),
        (false, false) => {}
    }
    let (new, old) = (candidate.nodes.count(), current.nodes.count());
    match (old.cmp(&aim), new.cmp(&aim)) {
        (Ordering::Greater, _) => is_tighter(candidate.nodes, current.nodes, merging),
        (Ordering::Equal, Ordering::Equal) => is_tighter(candidate.nodes, current.nodes, merging),
        (Ordering::Equal, _) | (Ordering::Less, Ordering::Greater) => false,
        (Ordering::Less, Ordering::Equal) => true,
        (Ordering::Less, Ordering::Less) => match new.cmp(&old) {
            Ordering::Greater => true,
            Ordering::Less => false,
            Ordering::Equal => is_tighter(candidate.nodes, current.nodes, merging),
        },
    }
}

fn is_tighter(candidate: NodeMask, current: NodeMask, merging: Merging<'_>) -> bool {
    if merging.closest && candidate.count() == current.count() {
        let (new, old) = (
            distance(merging.machine, candidate),
            distance(merging.machine, current),
        );
        if new != old {
            return new < old;
        }
    }
    candidate.is_narrower_than(current)
}

/// Sum of the distances between the nodes of a mask; masks of one size compare as their averages do.
fn distance(machine: &Machine, mask: NodeMask) -> u64 {
    let nodes = mask.nodes();
    let of = |from: &u32, to: &u32| {
        let node = machine.nodes.get(from);
        node.and_then(|n| n.distances.get(to)).copied().unwrap_or(0)
    };
    let pairs = nodes
        .iter()
        .flat_map(|from| nodes.iter().map(move |to| (from, to)));
    pairs.map(|(from, to)| of(from, to)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn combinations_stay_few_on_machines_of_many_nodes() {
        for (nodes, count) in [(1, 1), (3, 7), (8, 255), (16, (1 << 16) - 1)] {
            let ids: Vec<u32> = (0..nodes).collect();
            let all: std::collections::BTreeSet<_> = masks(&ids).into_iter().collect();
            assert_eq!(all.len(), count, "{nodes}");
        }
        let ids: Vec<u32> = (0..64).collect();
        let all = masks(&ids);
        assert!(all.len() <= MOST_MASKS + 64 * 64, "{}", all.len());
        for some in [vec![63], vec![0, 63], (8..40).collect(), ids] {
            let some: NodeMask = some.into_iter().collect();
            assert!(all.contains(&some), "{some:?}");
        }
        let is_sorted = all.is_sorted_by_key(|mask| (mask.count(), *mask));
        assert!(is_sorted);
    }

    #[test]
    fn combinations_of_eight_nodes_stay_few() {
        let nodes: Vec<u32> = (0..8).collect();
        let all = masks(&nodes);
        let hint = |mask: &NodeMask| Hint {
            nodes: Some(*mask),
            preferred: true,
        };
        let list: Vec<Hint> = all.iter().map(hint).collect();
        let none = Partial {
            nodes: nodes.into_iter().collect(),
            first: None,
            preferred: true,
        };
        let mut found = vec![none];
        for _ in 0..4 {
            found = combined(&found, &list);
            assert!(found.len() <= 2 * (all.len() + 1), "{}", found.len());
        }
    }
}
