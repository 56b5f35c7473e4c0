//! Comparison of the resources that pods ask for with those that the node has left; upstream's `noderesources.Fits`.

use std::fmt;

use k8s_openapi::api::core::v1::{Node, Pod};

pub(super) use crate::core::resources::{Amounts, pod_requests};
use crate::core::resources::{NANOS, add, amount, is_by_claim, is_huge_page, subtract};

/// The resource that every pod asks one of.
pub(super) const PODS: &str = "pods";
/// Resources of every node, in the order in which a lack of them is reported.
const NATIVE: [&str; 3] = ["cpu", "memory", "ephemeral-storage"];

/// Resources that pods take of the node together.
#[derive(Clone, Debug, Default)]
pub(crate) struct Taken {
    pods: usize,
    amounts: Amounts,
}

impl Taken {
    /// Returns what these pods take.
    pub(crate) fn by(pods: &[&Pod]) -> Self {
        let mut taken = Self::default();
        for pod in pods {
            taken.add(&pod_requests(pod));
        }
        taken
    }

    /// Adds a pod by its requests.
    pub(super) fn add(&mut self, requests: &Amounts) {
        self.pods += 1;
        add(&mut self.amounts, requests);
    }

    /// Takes back what [`Self::add`] added of a pod.
    pub(super) fn subtract(&mut self, requests: &Amounts) {
        self.pods = self.pods.saturating_sub(1);
        subtract(&mut self.amounts, requests);
    }
}

/// A resource of which the node has too little left. Amounts are in billionths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Insufficient {
    pub(crate) resource: String,
    pub(crate) requested: i128,
    pub(crate) used: i128,
    pub(crate) capacity: i128,
}

impl Insufficient {
    pub(super) fn reason(&self) -> String {
        format!("OutOf{}", self.resource)
    }

    /// Returns the missing amount; upstream's `GetInsufficientAmount`.
    pub(super) fn missing(&self) -> i128 {
        self.requested - (self.capacity - self.used)
    }
}

impl fmt::Display for Insufficient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |amount| shown(&self.resource, amount);
        write!(
            f,
            "Node didn't have enough resource: {}, requested: {}, used: {}, capacity: {}",
            self.resource,
            shown(self.requested),
            shown(self.used),
            shown(self.capacity)
        )
    }
}

/// An amount as upstream's messages have it: CPU in thousandths, the rest in whole units, rounded up.
pub(crate) fn shown(resource: &str, amount: i128) -> i128 {
    let unit = if resource == "cpu" {
        NANOS / 1000
    } else {
        NANOS
    };
    amount.div_euclid(unit) + i128::from(amount.rem_euclid(unit) != 0)
}

/// Returns the resources that the node lacks for `pod` beside those that others have `taken`, the number of pods first.
/// Does not check an extended resource that the node does not have, nor one that the pod has by a ResourceClaim:
/// upstream's `removeMissingExtendedResources`. Nor does it check CPU and memory that the node does not show: every
/// node has an unknown amount of them.
pub(crate) fn insufficient(
    pod: &Pod,
    taken: &Taken,
    node: &Node,
    max_pods: usize,
) -> Vec<Insufficient> {
    let mut lacking = Vec::new();
    if taken.pods >= max_pods {
        let count = |n: usize| i128::try_from(n).unwrap_or(i128::MAX / NANOS) * NANOS;
        lacking.push(Insufficient {
            resource: PODS.to_owned(),
            requested: NANOS,
            used: count(taken.pods),
            capacity: count(max_pods),
        });
    }
    let Some(allocatable) = node
        .status
        .as_ref()
        .and_then(|s| s.allocatable.as_ref())
        .filter(|a| !a.is_empty())
    else {
        return lacking;
    };
    let requests = pod_requests(pod);
    let wanted: Vec<(&String, i128)> = in_order(&requests)
        .filter(|(name, amount)| *amount > 0 && name.as_str() != PODS)
        .filter(|(name, _)| allocatable.contains_key(*name) || may_be_lacking(name))
        .filter(|(name, _)| !is_by_claim(pod, None, name))
        .collect();
    for (name, requested) in wanted {
        let capacity = allocatable.get(name).map_or(0, amount);
        let used = taken.amounts.get(name).copied().unwrap_or(0);
        if requested > capacity - used {
            lacking.push(Insufficient {
                resource: name.clone(),
                requested,
                used,
                capacity,
            });
        }
    }
    lacking
}

/// Returns whether a node that does not show the resource has none of it.
fn may_be_lacking(name: &str) -> bool {
    name == "ephemeral-storage" || is_huge_page(name)
}

fn in_order(amounts: &Amounts) -> impl Iterator<Item = (&String, i128)> {
    let native = NATIVE.iter().filter_map(|n| amounts.get_key_value(*n));
    let rest = amounts
        .iter()
        .filter(|(name, _)| !NATIVE.contains(&name.as_str()));
    native.chain(rest).map(|(name, amount)| (name, *amount))
}
