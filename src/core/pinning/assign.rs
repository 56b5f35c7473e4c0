//! Choice of a container's CPUs among the free ones. Pure and deterministic.
//!
//! Whole large units come first, so that little is split: sockets and NUMA nodes, groups of CPUs that share a last-level
//! cache, cores, then single CPUs. Of equal units the one with the fewest free CPUs is taken first, then the lowest number.
//! Upstream: `takeByTopologyNUMAPacked` and `takeByTopologyNUMADistributed`.

use std::collections::BTreeMap;

use super::machine::{Cpu, Machine};
use crate::types::cpu_set::CpuSet;

/// Rule by which CPUs are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Strategy {
    /// CPUs are given in units of so many and spread over as few NUMA nodes as will do, in equal shares.
    pub across_nodes_by: Option<usize>,
    /// Single CPUs are taken from different cores.
    pub across_cores: bool,
    /// Groups that share a last-level cache are kept together where one suffices.
    pub align_by_cache: bool,
}

/// Chooses `count` CPUs of `free`; `None` when there are not so many.
pub(super) fn take(
    machine: &Machine,
    free: &CpuSet,
    count: usize,
    strategy: Strategy,
) -> Option<CpuSet> {
    let spread = strategy.across_nodes_by.and_then(|unit| {
        let unit = unit.max(1);
        let divides = count.is_multiple_of(unit);
        divides.then(|| take_distributed(machine, free, count, (unit, strategy)))?
    });
    spread.or_else(|| take_packed(machine, free, count, strategy))
}

fn take_packed(
    machine: &Machine,
    free: &CpuSet,
    count: usize,
    strategy: Strategy,
) -> Option<CpuSet> {
    if count > free.len() {
        return None;
    }
    let mut taking = Taking {
        machine,
        free: free.clone(),
        needed: count,
        taken: CpuSet::new(),
    };
    let [first, second] = taking.outer_levels();
    taking.whole(first, &[]);
    taking.whole(second, &[first]);
    if strategy.align_by_cache {
        taking.caches();
    }
    if strategy.across_cores {
        taking.spread();
    } else {
        taking.whole(Level::Core, &[first, second]);
        taking.rest();
    }
    (taking.needed == 0).then_some(taking.taken)
}

/// A part of the machine that CPUs share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Socket,
    Node,
    Cache,
    Core,
}

impl Level {
    fn of(self) -> fn(&Cpu) -> u32 {
        match self {
            Self::Socket => |cpu| cpu.socket,
            Self::Node => |cpu| cpu.node,
            Self::Cache => |cpu| cpu.cache,
            Self::Core => |cpu| cpu.core,
        }
    }
}

struct Taking<'a> {
    machine: &'a Machine,
    free: CpuSet,
    needed: usize,
    taken: CpuSet,
}

impl Taking<'_> {
    /// The level that holds the other one first. Upstream: `numaOrSocketsFirst`.
    fn outer_levels(&self) -> [Level; 2] {
        let nodes = self.numbers(&self.machine.online(), Level::Node).len();
        if self.machine.sockets() >= nodes {
            [Level::Node, Level::Socket]
        } else {
            [Level::Socket, Level::Node]
        }
    }

    fn numbers(&self, cpus: &CpuSet, level: Level) -> Vec<u32> {
        self.machine.numbers(cpus, level.of())
    }

    fn of(&self, level: Level, number: u32) -> CpuSet {
        self.machine.cpus_with(&self.free, level.of(), number)
    }

    fn is_free(&self, level: Level, number: u32) -> bool {
        let online = self.machine.online();
        self.of(level, number) == self.machine.cpus_with(&online, level.of(), number)
    }

    fn take(&mut self, cpus: &CpuSet) {
        self.needed = self.needed.saturating_sub(cpus.len());
        self.free = self.free.without(cpus);
        self.taken = self.taken.union(cpus);
    }

    /// Numbers of `level` among the free CPUs, in the order of the levels `around` it; at each level those with the
    /// fewest free CPUs first.
    fn ordered(&self, level: Level, around: &[Level]) -> Vec<u32> {
        let mut found = Vec::new();
        self.collect(&self.free, around, level, &mut found);
        found
    }

    fn collect(&self, cpus: &CpuSet, around: &[Level], level: Level, found: &mut Vec<u32>) {
        let (here, inner) = match around.split_first() {
            Some((outer, inner)) => (*outer, Some(inner)),
            None => (level, None),
        };
        let mut numbers = self.numbers(cpus, here);
        numbers.sort_by_key(|number| (self.of(here, *number).len(), *number));
        for number in numbers {
            match inner {
                Some(inner) => {
                    let within = self.machine.cpus_with(cpus, here.of(), number);
                    self.collect(&within, inner, level, found);
                }
                None if found.contains(&number) => {}
                None => found.push(number),
            }
        }
    }

    /// Takes the free units of a level that are needed whole.
    fn whole(&mut self, level: Level, around: &[Level]) {
        for number in self.ordered(level, around) {
            let cpus = self.of(level, number);
            if !cpus.is_empty() && self.needed >= cpus.len() && self.is_free(level, number) {
                self.take(&cpus);
            }
        }
    }

    /// Takes CPUs one by one in the order of `cpus`.
    fn singly(&mut self, cpus: &CpuSet) {
        for cpu in cpus.iter().take(self.needed) {
            self.take(&CpuSet::from_iter([cpu]));
        }
    }

    /// Single CPUs; those of cores that are in use first.
    fn rest(&mut self) {
        for core in self.ordered(Level::Core, &self.outer_levels()) {
            self.singly(&self.of(Level::Core, core));
        }
    }

    /// Single CPUs in their order, which is that of the first threads of all cores on x86. Upstream: `sortAvailableCPUsSpread`.
    fn spread(&mut self) {
        let [first, _] = self.outer_levels();
        let around = [first];
        let around: &[Level] = if first == Level::Socket { &[] } else { &around };
        for socket in self.ordered(Level::Socket, around) {
            self.singly(&self.of(Level::Socket, socket));
        }
    }

    /// Groups that share a cache: whole ones, then one that has all that is left to take. Upstream: `takeUncoreCache`.
    fn caches(&mut self) {
        let around = self.outer_levels();
        for cache in self.ordered(Level::Cache, &around) {
            if self.needed >= self.machine.cpus_per_cache() {
                self.whole(Level::Cache, &around);
            }
            if self.needed == 0 {
                return;
            }
            self.part_of_cache(cache);
            if self.needed == 0 {
                return;
            }
        }
    }

    /// Takes all that is needed from the cores of one cache, if they have it.
    fn part_of_cache(&mut self, cache: u32) {
        let within = self.of(Level::Cache, cache);
        let wanted = self.needed.div_ceil(self.machine.threads_per_core());
        let mut chosen: Vec<u32> = Vec::new();
        for core in self.numbers(&within, Level::Core).into_iter().take(wanted) {
            chosen.extend(
                self.machine
                    .cpus_with(&within, Level::Core.of(), core)
                    .iter(),
            );
        }
        if chosen.len() > self.needed && self.machine.threads_per_core() > 1 {
            // An odd number leaves one thread of the last core.
            chosen.truncate(self.needed);
        }
        if chosen.len() == self.needed {
            self.take(&chosen.into_iter().collect());
        }
    }
}

/// Spreads CPUs over as few NUMA nodes as will do, in equal shares of units; of equal combinations the one that leaves the
/// most balanced node. `None` when no combination takes equal shares.
fn take_distributed(
    machine: &Machine,
    free: &CpuSet,
    count: usize,
    (unit, strategy): (usize, Strategy),
) -> Option<CpuSet> {
    if count == 0 || count > free.len() {
        return None;
    }
    let mut nodes = machine.numbers(free, Level::Node.of());
    let of = |node: u32| machine.cpus_with(free, Level::Node.of(), node);
    nodes.sort_by_key(|node| (of(*node).len(), *node));
    let sizes: BTreeMap<u32, usize> = nodes.iter().map(|n| (*n, of(*n).len())).collect();
    let most = nodes.len().min(count / unit);
    for width in 1..=most {
        let mut best: Option<(f64, Vec<(u32, usize)>)> = None;
        for combination in combinations(&nodes, width) {
            let Some((balance, shares)) = shares_of(&sizes, &combination, count, unit) else {
                continue;
            };
            if best.as_ref().is_none_or(|(known, _)| balance < *known) {
                best = Some((balance, shares));
            }
        }
        let Some((_, shares)) = best else {
            continue;
        };
        let packed = Strategy {
            across_nodes_by: None,
            ..strategy
        };
        let mut taken = CpuSet::new();
        for (node, share) in shares {
            taken = taken.union(&take_packed(machine, &of(node), share, packed)?);
        }
        return Some(taken);
    }
    None
}

/// Returns the CPUs that each node of a combination gives, and how uneven the free CPUs are afterwards. `None` if one
/// has too few.
fn shares_of(
    sizes: &BTreeMap<u32, usize>,
    combination: &[u32],
    count: usize,
    unit: usize,
) -> Option<(f64, Vec<(u32, usize)>)> {
    let share = count / combination.len() / unit * unit;
    let left_over = (count - share * combination.len()) / unit;
    let size = |node: &u32| sizes.get(node).copied().unwrap_or(0);
    if share == 0 || combination.iter().any(|node| size(node) < share) {
        return None;
    }
    let roomy: Vec<u32> = combination
        .iter()
        .copied()
        .filter(|node| size(node) >= share + unit)
        .collect();
    let mut best: Option<(f64, Vec<(u32, usize)>)> = None;
    for more in combinations(&roomy, left_over) {
        let shares: Vec<(u32, usize)> = combination
            .iter()
            .map(|node| (*node, share + if more.contains(node) { unit } else { 0 }))
            .collect();
        let mut left = sizes.clone();
        for (node, share) in &shares {
            if let Some(size) = left.get_mut(node) {
                *size = size.saturating_sub(*share);
            }
        }
        let balance = deviation(left.values().copied());
        if best.as_ref().is_none_or(|(known, _)| balance < *known) {
            best = Some((balance, shares));
        }
    }
    best
}

/// Standard deviation, rounded to thousandths so that equal combinations are equal. Upstream: `standardDeviation`.
fn deviation(sizes: impl Iterator<Item = usize>) -> f64 {
    let sizes: Vec<f64> = sizes
        .map(|size| f64::from(u32::try_from(size).unwrap_or(u32::MAX)))
        .collect();
    let number = f64::from(u32::try_from(sizes.len()).unwrap_or(u32::MAX)).max(1.0);
    let mean = sizes.iter().sum::<f64>() / number;
    let variance = sizes.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / number;
    (variance.sqrt() * 1000.0).round() / 1000.0
}

/// Every combination of `width` of the numbers, in their order; one empty one for width 0.
fn combinations(numbers: &[u32], width: usize) -> Vec<Vec<u32>> {
    if width == 0 {
        return vec![Vec::new()];
    }
    if numbers.len() < width {
        return Vec::new();
    }
    let mut found = Vec::new();
    for (at, first) in numbers.iter().enumerate() {
        for mut rest in combinations(numbers.get(at + 1..).unwrap_or_default(), width - 1) {
            rest.insert(0, *first);
            found.push(rest);
        }
    }
    found
}
