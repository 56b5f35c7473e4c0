//! Part of the node that its pods take. Upstream: the scheduler's `NodeInfo`.
//!
//! Requests, host ports and names of a pod are collected when it is added, so that a decision costs what the pod that is
//! decided on asks for, however many others there are. Only the search for pods to preempt goes through all of them.
//!
//! **Invariant:** all sums are those of the pods that were added and not removed since.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

use super::resources::{Amounts, Taken, pod_requests};
use super::{HostPort, host_ports};
use crate::types::{FullName, PodExt, PodSource, PodUid};

/// A pod on the node.
#[derive(Clone, Debug)]
pub(super) struct Occupant {
    pub(super) pod: Arc<Pod>,
    pub(super) requests: Amounts,
}

/// The pods that take part of the node, with what they take.
#[derive(Clone, Debug, Default)]
pub struct NodeInfo {
    occupants: BTreeMap<PodUid, Occupant>,
    taken: Taken,
    /// By protocol and number: addresses, and who has them.
    ports: HashMap<(String, i32), Vec<(String, PodUid)>>,
    names: HashMap<(FullName, PodSource), Vec<PodUid>>,
}

impl NodeInfo {
    /// Returns what these pods take. Each must have the resources that are allocated to it.
    pub fn of(pods: impl IntoIterator<Item = Arc<Pod>>) -> Self {
        let mut info = Self::default();
        for pod in pods {
            info.insert(pod);
        }
        info
    }

    /// Adds a pod, in place of the one of its UID.
    pub fn insert(&mut self, pod: Arc<Pod>) {
        let uid = pod.uid();
        self.remove(&uid);
        let requests = pod_requests(&pod);
        self.taken.add(&requests);
        for port in host_ports(&pod) {
            let takers = self.ports.entry((port.protocol, port.port)).or_default();
            takers.push((port.ip, uid.clone()));
        }
        let named = self.names.entry((pod.full_name(), pod.source()));
        named.or_default().push(uid.clone());
        self.occupants.insert(uid, Occupant { pod, requests });
    }

    /// Removes a pod, if it is there.
    pub fn remove(&mut self, uid: &PodUid) {
        let Some(Occupant { pod, requests }) = self.occupants.remove(uid) else {
            return;
        };
        self.taken.subtract(&requests);
        for port in host_ports(&pod) {
            if let Some(takers) = self.ports.get_mut(&(port.protocol, port.port)) {
                takers.retain(|(_, taker)| taker != uid);
            }
        }
        if let Some(named) = self.names.get_mut(&(pod.full_name(), pod.source())) {
            named.retain(|other| other != uid);
        }
    }

    pub(super) fn taken(&self) -> &Taken {
        &self.taken
    }

    pub(super) fn occupants(&self) -> impl Iterator<Item = &Occupant> {
        self.occupants.values()
    }

    /// Returns the pod that has a port of the node, or one that conflicts with it.
    pub(super) fn taker_of(&self, wanted: &HostPort) -> Option<&Pod> {
        let takers = self.ports.get(&(wanted.protocol.clone(), wanted.port))?;
        let (_, uid) = takers.iter().find(|(ip, _)| wanted.is_met_by(ip))?;
        self.occupants.get(uid).map(|occupant| &*occupant.pod)
    }

    /// Returns the pods of a name and source.
    pub(super) fn named(&self, pod: &Pod) -> impl Iterator<Item = &Pod> {
        let named = self.names.get(&(pod.full_name(), pod.source()));
        let occupants = named.into_iter().flatten();
        occupants.filter_map(|uid| self.occupants.get(uid).map(|occupant| &*occupant.pod))
    }
}
