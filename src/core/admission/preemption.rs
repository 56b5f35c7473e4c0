//! Choice of the pods that make room for a critical one; upstream's `getPodsToPreempt`.
//!
//! Guaranteed pods go only if all others are not enough, then Burstable ones; within a class the pod goes
//! first that comes closest to what is missing.

use k8s_openapi::api::core::v1::Pod;

use super::resources::{Amounts, Insufficient, PODS, shown};
use super::{NodeInfo, is_critical, priority};
use crate::core::pod_status::{QosClass, qos_class};
use crate::types::{PodExt, PodUid};

const NANOS: i128 = 1_000_000_000;

#[derive(Clone)]
struct Candidate<'a> {
    pod: &'a Pod,
    requests: Amounts,
}

impl Candidate<'_> {
    fn of(&self, resource: &str) -> i128 {
        self.requests.get(resource).copied().unwrap_or(0)
    }

    /// Returns whether this pod asks for less than another; upstream's `smallerResourceRequest`.
    fn smaller_than(&self, other: &Self) -> bool {
        ["memory", "cpu"]
            .into_iter()
            .map(|resource| self.of(resource).cmp(&other.of(resource)))
            .find(|order| order.is_ne())
            .is_none_or(std::cmp::Ordering::is_lt)
    }
}

/// Missing amounts, in billionths by resource.
#[derive(Clone)]
struct Missing(Vec<(String, i128)>);

impl Missing {
    fn without<'a>(&self, pods: impl IntoIterator<Item = &'a Candidate<'a>> + Clone) -> Self {
        let left = self.0.iter().filter_map(|(resource, amount)| {
            let freed: i128 = pods.clone().into_iter().map(|p| p.of(resource)).sum();
            (*amount > freed).then(|| (resource.clone(), amount - freed))
        });
        Self(left.collect())
    }

    /// Returns the distance of a pod from providing all missing amounts: 0 when it does, at most 1 per resource.
    #[expect(
        clippy::cast_precision_loss,
        reason = "a ratio that pods are ranked by"
    )]
    fn distance(&self, pod: &Candidate<'_>) -> f64 {
        self.0
            .iter()
            .map(|(resource, amount)| {
                let lacking = (*amount - pod.of(resource)).max(0) as f64 / *amount as f64;
                lacking * lacking
            })
            .sum()
    }

    fn error(&self) -> String {
        let shown: Vec<String> = self
            .0
            .iter()
            .map(|(resource, amount)| format!("(res: {resource}, q: {})", shown(resource, *amount)))
            .collect();
        format!(
            "preemption: error finding a set of pods to preempt: no set of running pods found to reclaim resources: [{}]",
            shown.join(", ")
        )
    }
}

/// The pods to be evicted, or why there are none.
pub(super) fn victims(
    pod: &Pod,
    others: &NodeInfo,
    lacking: &[Insufficient],
) -> Result<Vec<PodUid>, String> {
    let missing = Missing(
        lacking
            .iter()
            .map(|l| (l.resource.clone(), l.missing()))
            .collect(),
    );
    let of_class = |class: QosClass| -> Vec<Candidate<'_>> {
        others
            .occupants()
            .filter(|other| preemptable(pod, &other.pod) && qos_class(&other.pod) == class)
            .map(|other| {
                let mut requests = other.requests.clone();
                requests.insert(PODS.to_owned(), NANOS);
                Candidate {
                    pod: &other.pod,
                    requests,
                }
            })
            .collect()
    };
    let best_effort = of_class(QosClass::BestEffort);
    let burstable = of_class(QosClass::Burstable);
    let guaranteed = of_class(QosClass::Guaranteed);
    let short = missing.without(best_effort.iter().chain(&burstable).chain(&guaranteed));
    if !short.0.is_empty() {
        return Err(short.error());
    }
    let guaranteed = nearest(
        guaranteed,
        missing.without(burstable.iter().chain(&best_effort)),
    )?;
    let burstable = nearest(
        burstable,
        missing.without(best_effort.iter().chain(&guaranteed)),
    )?;
    let best_effort = nearest(
        best_effort,
        missing.without(burstable.iter().chain(&guaranteed)),
    )?;
    let all = best_effort.iter().chain(&burstable).chain(&guaranteed);
    Ok(all.map(|candidate| candidate.pod.uid()).collect())
}

/// Upstream's `Preemptable`.
fn preemptable(preemptor: &Pod, other: &Pod) -> bool {
    (is_critical(preemptor) && !is_critical(other)) || priority(preemptor) > priority(other)
}

/// Takes the nearest pod until nothing is missing. Upstream: `getPodsToPreemptByDistance`.
fn nearest<'a>(
    mut pods: Vec<Candidate<'a>>,
    mut missing: Missing,
) -> Result<Vec<Candidate<'a>>, String> {
    let mut taken = Vec::new();
    while !missing.0.is_empty() {
        let best = pods
            .iter()
            .enumerate()
            .reduce(|best, candidate| {
                let (a, b) = (missing.distance(best.1), missing.distance(candidate.1));
                let closer = b < a || (b == a && candidate.1.smaller_than(best.1));
                if closer { candidate } else { best }
            })
            .map(|(index, _)| index);
        let Some(best) = best else {
            return Err(missing.error());
        };
        let pod = pods.swap_remove(best);
        missing = missing.without([&pod]);
        taken.push(pod);
    }
    Ok(taken)
}
