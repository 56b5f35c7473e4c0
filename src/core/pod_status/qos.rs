//! Quality of service class; upstream's `qos.ComputePodQOS`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::core::resources::{self, Amounts};
use crate::types::PodExt;
use crate::types::quantity::nanos;

/// Resources that count.
const COMPUTE: [&str; 2] = ["cpu", "memory"];

/// Quality of service of a pod; upstream's `v1.PodQOSClass`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum QosClass {
    /// Limits equal requests for CPU and memory of every container.
    Guaranteed,
    /// Something is requested or limited.
    Burstable,
    /// Nothing is.
    BestEffort,
}

impl QosClass {
    /// The value of `status.qosClass`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Guaranteed => "Guaranteed",
            Self::Burstable => "Burstable",
            Self::BestEffort => "BestEffort",
        }
    }
}

/// The class of a pod. A class the API server has set stands; a request that is
/// missing beside a limit equals the limit.
pub fn qos_class(pod: &Pod) -> QosClass {
    let set = pod.status.as_ref().and_then(|s| s.qos_class.as_deref());
    for class in [
        QosClass::Guaranteed,
        QosClass::Burstable,
        QosClass::BestEffort,
    ] {
        if set == Some(class.as_str()) {
            return class;
        }
    }
    let spec = pod.spec_ref();
    if resources::has_pod_level(pod) {
        return classify_pod(
            &resources::pod_level_requests(pod),
            &resources::pod_level_limits(pod),
        );
    }
    let none = ResourceRequirements::default();
    let all: Vec<_> = spec
        .containers
        .iter()
        .chain(spec.init_containers.iter().flatten())
        .map(|c| c.resources.as_ref().unwrap_or(&none))
        .collect();
    classify(&all)
}

fn classify(all: &[&ResourceRequirements]) -> QosClass {
    let mut any = false;
    let mut guaranteed = true;
    for resources in all {
        for name in COMPUTE {
            let limit = positive(resources.limits.as_ref(), name);
            let request = positive(resources.requests.as_ref(), name).or(limit);
            any |= limit.is_some() || request.is_some();
            guaranteed &= limit.is_some() && limit == request;
        }
    }
    match (any, guaranteed) {
        (false, _) => QosClass::BestEffort,
        (true, true) => QosClass::Guaranteed,
        (true, false) => QosClass::Burstable,
    }
}

/// The class by the requests and limits of the pod as a whole.
fn classify_pod(requests: &Amounts, limits: &Amounts) -> QosClass {
    let of = |from: &Amounts, name| from.get(name).copied().filter(|n| *n > 0);
    let each = COMPUTE.map(|name| (of(requests, name), of(limits, name)));
    if each.iter().all(|(r, l)| r.is_none() && l.is_none()) {
        QosClass::BestEffort
    } else if each.iter().all(|(r, l)| l.is_some() && r == l) {
        QosClass::Guaranteed
    } else {
        QosClass::Burstable
    }
}

/// A quantity above zero, in billionths.
fn positive(list: Option<&BTreeMap<String, Quantity>>, name: &str) -> Option<i128> {
    nanos(&list?.get(name)?.0).ok().filter(|n| *n > 0)
}
