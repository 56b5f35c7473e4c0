//! Match of node and pod: operating system, node selector, required node affinity, taints.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Pod, Taint, Toleration,
};

use super::{Refusal, predicate};
use crate::types::PodExt;

/// Label of the operating system.
const OS_LABEL: &str = "kubernetes.io/os";
/// The only one this agent runs on.
const OS: &str = "linux";

/// Upstream's `rejectPodAdmissionBasedOnOSSelector` and `…OSField`.
pub(super) fn wrong_os(pod: &Pod) -> Option<Refusal> {
    if pod.labels().get(OS_LABEL).is_some_and(|os| os != OS) {
        return Some((
            "PodOSSelectorNodeLabelDoesNotMatch".to_owned(),
            "Failed to admit pod as the `kubernetes.io/os` label doesn't match node label"
                .to_owned(),
        ));
    }
    let os = pod.spec_ref().os.as_ref()?;
    (os.name != OS).then(|| {
        (
            "PodOSNotSupported".to_owned(),
            "Failed to admit pod as the OS field doesn't match node OS".to_owned(),
        )
    })
}

/// Node selector and required node affinity; upstream's `nodeaffinity.GetRequiredNodeAffinity`.
pub(super) fn mismatched(pod: &Pod, node: &Node, node_name: &str) -> Option<Refusal> {
    let none = BTreeMap::new();
    let labels = node.metadata.labels.as_ref().unwrap_or(&none);
    let spec = pod.spec_ref();
    let selected = spec
        .node_selector
        .iter()
        .flatten()
        .all(|(key, value)| labels.get(key) == Some(value));
    let required = spec
        .affinity
        .as_ref()
        .and_then(|a| a.node_affinity.as_ref())
        .and_then(|a| {
            a.required_during_scheduling_ignored_during_execution
                .as_ref()
        });
    let related = required.is_none_or(|required| {
        required
            .node_selector_terms
            .iter()
            .any(|term| term_matches(term, labels, node_name))
    });
    (!selected || !related).then(|| {
        predicate(
            "NodeAffinity",
            "node(s) didn't match Pod's node affinity/selector",
        )
    })
}

/// Returns whether a node has one of the terms of a selector.
pub fn selects(
    selector: &NodeSelector,
    labels: &BTreeMap<String, String>,
    node_name: &str,
) -> bool {
    let mut terms = selector.node_selector_terms.iter();
    terms.any(|term| term_matches(term, labels, node_name))
}

/// A term without requirements matches nothing.
fn term_matches(
    term: &NodeSelectorTerm,
    labels: &BTreeMap<String, String>,
    node_name: &str,
) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    if expressions.is_empty() && fields.is_empty() {
        return false;
    }
    expressions
        .iter()
        .all(|r| requirement_matches(r, labels.get(&r.key).map(String::as_str)))
        && fields.iter().all(|r| {
            r.key == "metadata.name"
                && ["In", "NotIn"].contains(&r.operator.as_str())
                && requirement_matches(r, Some(node_name))
        })
}

fn requirement_matches(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let listed = |value: &str| values.iter().any(|v| v == value);
    let compared = |wanted: std::cmp::Ordering| {
        let ([bound], Some(value)) = (values, value) else {
            return false;
        };
        match (value.parse::<i64>(), bound.parse::<i64>()) {
            (Ok(value), Ok(bound)) => value.cmp(&bound) == wanted,
            _ => false,
        }
    };
    match requirement.operator.as_str() {
        "In" => value.is_some_and(listed),
        "NotIn" => !value.is_some_and(listed),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compared(std::cmp::Ordering::Greater),
        "Lt" => compared(std::cmp::Ordering::Less),
        _ => false,
    }
}

/// Taints with the effect NoExecute that the pod does not tolerate. Static pods run whatever the taints.
pub(super) fn untolerated(pod: &Pod, node: &Node) -> Option<Refusal> {
    if pod.is_static() {
        return None;
    }
    let taints = node.spec.as_ref().and_then(|s| s.taints.as_deref());
    let tolerations = pod.spec_ref().tolerations.as_deref().unwrap_or_default();
    taints
        .unwrap_or_default()
        .iter()
        .filter(|taint| taint.effect == "NoExecute")
        .any(|taint| !tolerations.iter().any(|t| tolerates(t, taint)))
        .then(|| {
            predicate(
                "TaintToleration",
                "node(s) had taints that the pod didn't tolerate",
            )
        })
}

/// Returns whether a pod tolerates a taint without value and of effect `NoSchedule`.
pub(super) fn tolerates_no_schedule(pod: &Pod, key: &str) -> bool {
    let taint = Taint {
        key: key.to_owned(),
        effect: "NoSchedule".to_owned(),
        ..Taint::default()
    };
    let tolerations = pod.spec_ref().tolerations.as_deref().unwrap_or_default();
    tolerations.iter().any(|t| tolerates(t, &taint))
}

/// Upstream's `Toleration.ToleratesTaint`.
fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let set = |value: &Option<String>| value.clone().filter(|v| !v.is_empty());
    if set(&toleration.effect).is_some_and(|effect| effect != taint.effect) {
        return false;
    }
    let exists = toleration.operator.as_deref() == Some("Exists");
    match set(&toleration.key) {
        Some(key) if key != taint.key => return false,
        None if !exists => return false,
        _ => {}
    }
    match toleration.operator.as_deref() {
        Some("Exists") => true,
        None | Some("" | "Equal") => {
            toleration.value.as_deref().unwrap_or_default()
                == taint.value.as_deref().unwrap_or_default()
        }
        Some(_) => false,
    }
}
