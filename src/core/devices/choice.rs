//! Choice of a container's devices. Upstream: `devicesToAllocate`, `filterByAffinity`, `generateDeviceTopologyHints`.

use std::collections::BTreeSet;

use super::Devices;

/// Most NUMA nodes that topology hints are made for; upstream's default of `max-allowable-numa-nodes`.
const MAX_NUMA_NODES: usize = 8;

/// Input of a choice.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The plugin's devices.
    pub devices: &'a Devices,
    /// Those that containers have, also other containers of the pod.
    pub taken: &'a BTreeSet<String>,
    /// Those of them that the container takes over first.
    pub reusable: &'a BTreeSet<String>,
    /// Number of devices that it needs.
    pub count: usize,
    /// The NUMA nodes that a topology manager has chosen; `None` without one.
    pub affinity: Option<&'a BTreeSet<i64>>,
}

/// There are too few devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// Number needed beside those that are taken over.
    pub requested: usize,
    /// Number of free and healthy devices.
    pub available: usize,
}

/// The question of `GetPreferredAllocation`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hint {
    /// The devices to choose from.
    pub available: BTreeSet<String>,
    /// Those of them that the container gets in any case.
    pub must_include: BTreeSet<String>,
    /// Total number of devices that it gets.
    pub size: usize,
}

/// Free, healthy devices by how near they are to the affinity.
struct Free {
    aligned: BTreeSet<String>,
    unaligned: BTreeSet<String>,
    without_topology: BTreeSet<String>,
}

impl Request<'_> {
    fn is_healthy(&self, id: &str) -> bool {
        self.devices.get(id).is_some_and(|device| device.healthy)
    }

    /// The devices that the container takes over.
    fn taken_over(&self) -> BTreeSet<String> {
        let usable = self.reusable.iter().filter(|id| self.is_healthy(id));
        usable.take(self.count).cloned().collect()
    }

    fn free(&self) -> Free {
        let mut free = Free {
            aligned: BTreeSet::new(),
            unaligned: BTreeSet::new(),
            without_topology: BTreeSet::new(),
        };
        let usable = |(id, device): &(&String, &super::Device)| {
            device.healthy && !self.taken.contains(*id) && !self.reusable.contains(*id)
        };
        for (id, device) in self.devices.iter().filter(usable) {
            let group = match self.affinity {
                Some(nodes) if device.numa.iter().any(|node| nodes.contains(node)) => {
                    &mut free.aligned
                }
                Some(_) if !device.numa.is_empty() => &mut free.unaligned,
                _ => &mut free.without_topology,
            };
            group.insert(id.clone());
        }
        free
    }
}

impl Free {
    fn len(&self) -> usize {
        self.aligned.len() + self.unaligned.len() + self.without_topology.len()
    }

    fn all(self) -> BTreeSet<String> {
        let mut all = self.aligned;
        all.extend(self.unaligned);
        all.extend(self.without_topology);
        all
    }
}

/// Chooses the devices of a container: those it takes over, then those that the plugin prefers and that are free, then the
/// other free ones: aligned, unaligned, without topology, each in the order of their IDs.
///
/// # Errors
/// When too few are free.
pub fn choose(
    request: &Request<'_>,
    preferred: &BTreeSet<String>,
) -> Result<BTreeSet<String>, Shortage> {
    let mut chosen = request.taken_over();
    let needed = request.count - chosen.len();
    let free = request.free();
    if free.len() < needed {
        return Err(Shortage {
            requested: needed,
            available: free.len(),
        });
    }
    let groups = [&free.aligned, &free.unaligned, &free.without_topology];
    let none = BTreeSet::new();
    // Aligned ones that suffice are the only ones to choose from; else all of them are needed.
    let (first, choice) = if needed < free.aligned.len() {
        (&none, &groups[..1])
    } else {
        (&free.aligned, &groups[..])
    };
    let liked = choice
        .iter()
        .flat_map(|group| group.intersection(preferred));
    let rest = groups.iter().flat_map(|group| group.iter());
    for id in first.iter().chain(liked).chain(rest) {
        if chosen.len() >= request.count {
            break;
        }
        chosen.insert(id.clone());
    }
    Ok(chosen)
}

/// Returns the devices that a plugin is asked about for its preference: the aligned devices when these suffice, else
/// all free ones. `None` when there is nothing to choose.
pub fn hint_of(request: &Request<'_>) -> Option<Hint> {
    let must_include = request.taken_over();
    let needed = request.count - must_include.len();
    let free = request.free();
    if needed == 0 || free.len() < needed {
        return None;
    }
    let mut available = if needed < free.aligned.len() {
        free.aligned
    } else {
        free.all()
    };
    available.extend(must_include.iter().cloned());
    Some(Hint {
        available,
        must_include,
        size: request.count,
    })
}

/// NUMA nodes on which a request can be met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopologyHint {
    /// The nodes.
    pub nodes: BTreeSet<i64>,
    /// No smaller set of nodes could meet it on an empty machine.
    pub preferred: bool,
}

/// Returns the sets of NUMA nodes whose devices can meet a request, smaller sets first. `None`: no device has a topology, so
/// there is no preference. Empty: no set of nodes can. Upstream: `GetTopologyHints`.
pub fn topology_hints(request: &Request<'_>) -> Option<Vec<TopologyHint>> {
    let nodes: BTreeSet<i64> = request
        .devices
        .values()
        .flat_map(|device| device.numa.iter().copied())
        .collect();
    if nodes.is_empty() || nodes.len() > MAX_NUMA_NODES {
        return None;
    }
    let nodes: Vec<i64> = nodes.into_iter().collect();
    let mut smallest = usize::MAX;
    let mut hints = Vec::new();
    for mask in 1..(1_u32 << nodes.len()) {
        let set: BTreeSet<i64> = (0..nodes.len())
            .filter(|bit| mask & (1 << bit) != 0)
            .map(|bit| nodes[bit])
            .collect();
        let is_in = |device: &super::Device| device.numa.iter().any(|node| set.contains(node));
        let in_set = request.devices.iter().filter(|(_, device)| is_in(device));
        if in_set.clone().count() >= request.count {
            smallest = smallest.min(set.len());
        }
        let is_usable = |id: &str| request.is_healthy(id) && !request.taken.contains(id);
        let usable = in_set.filter(|(id, _)| is_usable(id) || request.reusable.contains(*id));
        if usable.count() >= request.count {
            hints.push(TopologyHint {
                nodes: set,
                preferred: false,
            });
        }
    }
    for hint in &mut hints {
        hint.preferred = hint.nodes.len() == smallest;
    }
    hints.sort_by_key(|hint| hint.nodes.len());
    Some(hints)
}
