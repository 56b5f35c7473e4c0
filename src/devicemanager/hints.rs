//! Topology hints of devices. Upstream: `devicemanager/topology_hints.go`.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, Pod};

use super::DeviceManager;
use crate::core::devices::{
    self, PodDevices, Request, Wanted, reusable, taken, topology_hints, wanted, wanted_by_pod,
};
use crate::core::pinning::hints::{Hint, Hints};
use crate::core::state::State;

impl DeviceManager {
    /// Returns the NUMA nodes whose devices can meet a container's request, by resource; with `None` the request of the whole
    /// pod. Devices that containers of the pod have already are the first choice. Upstream: `GetTopologyHints`,
    /// `GetPodTopologyHints`.
    ///
    /// A pod that is not admitted yet has nothing on record, so the hints of one container do not reckon with what another
    /// container of the pod will get. The allocation asks again, container by container.
    pub fn hints(&self, pod: &Pod, container: Option<&Container>) -> Hints {
        if !devices::may_want(pod) {
            return Hints::new();
        }
        let wanted = wanted(pod, |resource| self.knows(resource));
        let counts = match container {
            Some(container) => {
                let of = wanted.iter().find(|w| w.container == container.name);
                of.map(|w| w.counts.clone()).unwrap_or_default()
            }
            None => wanted_by_pod(&wanted),
        };
        let state = self.store().snapshot();
        let held = PodDevices::of(&state, pod).ok().flatten();
        let asked = Asked {
            state: &state,
            held: &held.unwrap_or_default(),
            wanted: &wanted,
            container: container.map(|c| c.name.as_str()),
        };
        let of_resource = |(resource, count): (&String, &usize)| {
            let hints = self.hints_of_resource(&asked, resource, *count);
            (resource.clone(), hints)
        };
        counts.iter().map(of_resource).collect()
    }

    /// Returns the hints for one resource: `None` without a preference, an empty list where the request cannot be met.
    fn hints_of_resource(
        &self,
        asked: &Asked<'_>,
        resource: &str,
        count: usize,
    ) -> Option<Vec<Hint>> {
        let shared = self.shared();
        let Ok(devices) = shared.inventory.usable(resource) else {
            return Some(Vec::new());
        };
        let Ok(mut taken) = taken(asked.state, resource) else {
            return Some(Vec::new());
        };
        let own = asked.own(resource);
        let is_complete = own.len() == count && asked.container.is_some();
        let reusable = if is_complete {
            // It has all of them: no other device counts.
            taken.extend(devices.keys().cloned());
            own
        } else {
            let mut reusable = own;
            if let Some(container) = asked.container {
                reusable.extend(reusable_by(asked, container, resource));
            }
            reusable
        };
        let request = Request {
            devices,
            taken: &taken,
            reusable: &reusable,
            count,
            affinity: None,
        };
        let hints = topology_hints(&request)?;
        let hint = |found: devices::TopologyHint| {
            let nodes = found.nodes.into_iter();
            Hint {
                nodes: Some(nodes.filter_map(|node| u32::try_from(node).ok()).collect()),
                preferred: found.preferred,
            }
        };
        Some(hints.into_iter().map(hint).collect())
    }
}

/// A question for hints.
struct Asked<'a> {
    state: &'a State,
    held: &'a PodDevices,
    wanted: &'a [Wanted],
    /// `None` for the whole pod.
    container: Option<&'a str>,
}

impl Asked<'_> {
    /// Returns the devices that the container, or any container of the pod, has.
    fn own(&self, resource: &str) -> BTreeSet<String> {
        let containers = self.held.containers.keys();
        let meant = containers.filter(|name| self.container.is_none_or(|c| c == name.as_str()));
        meant
            .flat_map(|name| self.held.ids(name, resource).cloned())
            .collect()
    }
}

fn reusable_by(asked: &Asked<'_>, container: &str, resource: &str) -> BTreeSet<String> {
    reusable(asked.wanted, asked.held, container, resource)
}
