//! Admission of a pod to this node; upstream's admit handlers, as far as they concern this node alone.
//!
//! The input is the pod, the pods that already take part of the node, and facts of the node. The output is a decision
//! that is recorded once per UID, and the pods that have to make room for a critical one. Pure.
//!
//! **Invariant:** the caller passes in `others` the admitted pods alone that their sources still want, without the pod
//! that is decided on: it never competes with itself.

mod apparmor;
mod matching;
mod node_info;
mod preemption;
pub(crate) mod resources;
mod sysctls;

pub use matching::selects;
pub use node_info::NodeInfo;
use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ContainerPort, Node, Pod};

use super::eviction::EVICTED;
use super::node_status::Pressure;
use super::pinning;
use super::pod_status::{QosClass, qos_class};
use super::shutdown;
use super::state::AdmissionDecision;
use crate::types::{PodExt, PodUid};
use resources::Insufficient;

/// Priority from which on a pod is critical; upstream's `scheduling.SystemCriticalPriority`.
const SYSTEM_CRITICAL_PRIORITY: i32 = 2_000_000_000;
/// Priority of a pod that says none and is static: upstream's file source gives it this one.
const NODE_CRITICAL_PRIORITY: i32 = SYSTEM_CRITICAL_PRIORITY + 1000;

/// Key of the taint of a node that is short of memory.
const MEMORY_PRESSURE_TAINT: &str = "node.kubernetes.io/memory-pressure";

/// Message about a pod whose policy of groups the runtime does not have.
pub const NO_STRICT_GROUPS: &str = "SupplementalGroupsPolicy=Strict is not supported in this node";

/// Input of a decision besides pods.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionContext<'a> {
    /// Name of the node.
    pub node_name: &'a str,
    /// `maxPods`.
    pub max_pods: usize,
    /// Requests of the pod that this agent does not support, one message per field.
    pub refusals: &'a [String],
    /// Node as the API server shows it, or as recorded. A node without allocatable resources has unknown resources:
    /// nothing is refused for lack of them.
    pub node: &'a Node,
    /// `allowedUnsafeSysctls`: names, or prefixes ending in `*`.
    pub unsafe_sysctls: &'a [String],
    /// AppArmor is enabled on the host.
    pub apparmor: bool,
    /// The runtime supports `supplementalGroupsPolicy: Strict`; `None` before it has answered.
    pub strict_groups: Option<bool>,
    /// Resources that the node is short of.
    pub pressure: Pressure,
    /// Reason why the pod gets no exclusive CPUs or memory; `None` if it does, or needs none.
    pub unplaced: Option<&'a pinning::Refusal>,
}

/// Result of an admission.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// Decision: admitted or rejected.
    pub decision: AdmissionDecision,
    /// Pods that are to be evicted for it, in this order. Empty unless the pod is critical and admitted.
    pub preempt: Vec<PodUid>,
    /// First resource that it lacked without preemption; empty when it lacked nothing.
    pub lacking: String,
}

/// The pods that end for a critical one, with the record of its admission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preemption {
    /// Their UIDs.
    pub victims: Vec<PodUid>,
    /// The first resource that the critical pod lacked without them.
    pub lacking: String,
}

impl Verdict {
    /// Returns the decision, and the pods that end with it if there are any.
    pub fn into_parts(self) -> (AdmissionDecision, Option<Preemption>) {
        let preemption = Preemption {
            victims: self.preempt,
            lacking: self.lacking,
        };
        let preempts = !preemption.victims.is_empty();
        (self.decision, preempts.then_some(preemption))
    }
}

/// Returns the decision on a pod that takes nothing of the node: one that is over or being deleted, and every one while the
/// node shuts down.
pub fn admit_without_room(pod: &Pod, is_shutting_down: bool) -> Option<AdmissionDecision> {
    if pod.phase_is_terminal() || pod.is_deleting() {
        // It will not run: there is nothing to decide, and nothing to tell.
        return Some(AdmissionDecision::Admitted);
    }
    is_shutting_down.then(|| AdmissionDecision::Rejected {
        reason: shutdown::NOT_ADMITTED.to_owned(),
        message: shutdown::NOT_ADMITTED_MESSAGE.to_owned(),
    })
}

/// Decides. The order is: pressure of the node, operating system, unsupported fields, sysctls, policy of groups, name, CPUs and memory of its own,
/// then upstream's predicates:
/// resources, node selector and affinity, node name, host ports, taints; then AppArmor. A critical pod that lacks nothing
/// but resources gets those of pods that may be preempted. Upstream: `predicateAdmitHandler.Admit` and
/// `CriticalPodAdmissionHandler`.
pub fn admit(pod: &Pod, others: &NodeInfo, ctx: &AdmissionContext<'_>) -> Verdict {
    let refused = under_pressure(pod, ctx.pressure)
        .or_else(|| refused_by_itself(pod, ctx.refusals, ctx.unsafe_sysctls))
        .or_else(|| strict_groups(pod, ctx))
        .or_else(|| duplicate(pod, others))
        .or_else(|| {
            let refusal = ctx.unplaced?;
            Some((refusal.reason.to_owned(), refusal.message.clone()))
        });
    if let Some(refusal) = refused {
        return rejected(refusal);
    }
    let lacking = resources::insufficient(pod, others.taken(), ctx.node, ctx.max_pods);
    let unfit = unfit(pod, ctx)
        .or_else(|| port_conflict(pod, others))
        .or_else(|| matching::untolerated(pod, ctx.node))
        .or_else(|| apparmor::unenforceable(pod, ctx.apparmor));
    match (lacking.first(), unfit) {
        (None, None) => admitted(Vec::new()),
        (None, Some(unfit)) => rejected(unfit),
        (Some(_), Some(unfit)) if is_critical(pod) => rejected(unfit),
        (Some(_), None) if is_critical(pod) => make_room(pod, others, &lacking),
        (Some(first), _) => rejected((first.reason(), first.to_string())),
    }
}

/// Returns why the pod is refused whatever the node has and runs, as reason and message: operating system, unsupported
/// fields, sysctls. Arguments as in [`AdmissionContext`].
pub fn refused_by_itself(
    pod: &Pod,
    refusals: &[String],
    unsafe_sysctls: &[String],
) -> Option<(String, String)> {
    matching::wrong_os(pod)
        .or_else(|| unsupported(refusals))
        .or_else(|| sysctls::forbidden(pod, unsafe_sysctls))
}

/// Returns why a pod may not start on a node under pressure. Critical pods may; while memory alone is short, so may pods
/// that request something and pods that tolerate the taint. Upstream: `managerImpl.Admit`.
fn under_pressure(pod: &Pod, pressure: Pressure) -> Option<Refusal> {
    let conditions = pressure.conditions();
    if conditions.is_empty() || is_critical(pod) {
        return None;
    }
    let is_memory_alone = pressure.memory && conditions.len() == 1;
    let is_spared = || {
        qos_class(pod) != QosClass::BestEffort
            || matching::tolerates_no_schedule(pod, MEMORY_PRESSURE_TAINT)
    };
    if is_memory_alone && is_spared() {
        return None;
    }
    let message = format!("The node had condition: [{}]. ", conditions.join(" "));
    Some((EVICTED.to_owned(), message))
}

/// Decides whether a pod that was admitted, and of which nothing was started yet, may still start here: parts of the
/// node that it asks for may have changed while the agent was down. Resources allocated to it stay its own.
pub fn still_fits(pod: &Pod, ctx: &AdmissionContext<'_>) -> AdmissionDecision {
    match unfit(pod, ctx).or_else(|| matching::untolerated(pod, ctx.node)) {
        None => AdmissionDecision::Admitted,
        Some(refusal) => rejected(refusal).decision,
    }
}

/// Returns whether a pod is critical; upstream's `kubetypes.IsCriticalPod`.
pub fn is_critical(pod: &Pod) -> bool {
    pod.is_static()
        || pod.is_mirror()
        || pod
            .spec_ref()
            .priority
            .is_some_and(|p| p >= SYSTEM_CRITICAL_PRIORITY)
}

/// The pod's priority, as the resolved PriorityClass says.
pub fn priority(pod: &Pod) -> i32 {
    pod.spec_ref().priority.unwrap_or(if pod.is_static() {
        NODE_CRITICAL_PRIORITY
    } else {
        0
    })
}

/// Returns the resources to allocate to the pod. Per container: each requested resource, a limit where there is no
/// request, and the limits that can be resized. The same for the pod as a whole; see [`super::resize`].
pub fn allocated(pod: &Pod) -> BTreeMap<String, BTreeMap<String, String>> {
    let containers = pod.init_containers().iter().chain(pod.containers());
    let containers = containers.map(|c| (c.name.clone(), super::resize::allocation_of(c)));
    let whole = super::resize::allocation_of_pod(pod);
    containers
        .chain([(super::resize::POD.to_owned(), whole)])
        .collect()
}

/// A CamelCase reason and a message for a human.
type Refusal = (String, String);

fn admitted(preempt: Vec<PodUid>) -> Verdict {
    Verdict {
        decision: AdmissionDecision::Admitted,
        preempt,
        lacking: String::new(),
    }
}

fn rejected((reason, message): Refusal) -> Verdict {
    Verdict {
        decision: AdmissionDecision::Rejected { reason, message },
        preempt: Vec::new(),
        lacking: String::new(),
    }
}

fn make_room(pod: &Pod, others: &NodeInfo, lacking: &[Insufficient]) -> Verdict {
    match preemption::victims(pod, others, lacking) {
        Ok(victims) => Verdict {
            lacking: (lacking.first()).map_or_else(String::new, |l| l.resource.clone()),
            ..admitted(victims)
        },
        Err(error) => rejected((
            "UnexpectedAdmissionError".to_owned(),
            format!("Unexpected error while attempting to recover from admission failure: {error}"),
        )),
    }
}

fn unsupported(refusals: &[String]) -> Option<Refusal> {
    (!refusals.is_empty()).then(|| ("UnsupportedField".to_owned(), refusals.join("; ")))
}

/// Upstream's text for a predicate that failed.
fn predicate(name: &str, why: impl std::fmt::Display) -> Refusal {
    (name.to_owned(), format!("Predicate {name} failed: {why}"))
}

/// Returns whether a pod would be refused for the labels or taints of the node, which may have been changed for it a moment ago.
pub fn is_unfit(pod: &Pod, node: &Node, node_name: &str) -> bool {
    matching::mismatched(pod, node, node_name).is_some()
        || matching::untolerated(pod, node).is_some()
}

/// Node selector and affinity, then the node's name.
fn unfit(pod: &Pod, ctx: &AdmissionContext<'_>) -> Option<Refusal> {
    matching::mismatched(pod, ctx.node, ctx.node_name).or_else(|| wrong_node(pod, ctx))
}

/// A policy of groups that the runtime does not support. Upstream: `podFeaturesAdmitHandler`.
fn strict_groups(pod: &Pod, ctx: &AdmissionContext<'_>) -> Option<Refusal> {
    let context = pod.spec_ref().security_context.as_ref()?;
    let is_strict = context.supplemental_groups_policy.as_deref() == Some("Strict");
    (is_strict && ctx.strict_groups == Some(false)).then(|| {
        (
            "SupplementalGroupsPolicyNotSupported".to_owned(),
            NO_STRICT_GROUPS.to_owned(),
        )
    })
}

fn duplicate(pod: &Pod, others: &NodeInfo) -> Option<Refusal> {
    let other = others.named(pod).find(|other| !other.is_deleting())?;
    // Static pods of one name take turns in the workers; two of one source at a time are a mistake only
    // when both are wanted.
    (!pod.is_static()).then(|| {
        (
            "DuplicateName".to_owned(),
            format!(
                "pod {}/{} (UID {}) has the name of a pod that is active on this node (UID {}); delete that one first",
                pod.namespace(),
                pod.name(),
                pod.uid(),
                other.uid()
            ),
        )
    })
}

fn wrong_node(pod: &Pod, ctx: &AdmissionContext<'_>) -> Option<Refusal> {
    let wanted = pod.spec_ref().node_name.as_deref()?;
    (!wanted.is_empty() && wanted != ctx.node_name).then(|| {
        predicate(
            "NodeName",
            format_args!(
                "node(s) didn't match the requested node name: the pod is for node {wanted}, this is {}; correct or remove spec.nodeName",
                ctx.node_name
            ),
        )
    })
}

/// A port on the node: protocol, address, number.
#[derive(Clone, Debug, PartialEq, Eq)]
struct HostPort {
    protocol: String,
    ip: String,
    port: i32,
}

impl HostPort {
    /// Returns whether the same port number on this address and on `ip` is the same port.
    fn is_met_by(&self, ip: &str) -> bool {
        let any = |ip: &str| ip == "0.0.0.0";
        self.ip == ip || any(&self.ip) || any(ip)
    }
}

/// The ports a pod takes on the node. On the host network every container port is one.
fn host_ports(pod: &Pod) -> Vec<HostPort> {
    let number = |port: &ContainerPort| match port.host_port {
        Some(port) if port > 0 => Some(port),
        _ if pod.host_network() => Some(port.container_port),
        _ => None,
    };
    let non_empty = |value: &Option<String>, default: &str| {
        value
            .clone()
            .filter(|v| !v.is_empty())
            .unwrap_or_else(|| default.to_owned())
    };
    let sidecars = pod
        .spec_ref()
        .init_containers
        .iter()
        .flatten()
        .filter(|c| c.restart_policy.as_deref() == Some("Always"));
    pod.containers()
        .iter()
        .chain(sidecars)
        .flat_map(|c| c.ports.iter().flatten())
        .filter_map(|port| {
            Some(HostPort {
                protocol: non_empty(&port.protocol, "TCP"),
                ip: non_empty(&port.host_ip, "0.0.0.0"),
                port: number(port)?,
            })
        })
        .collect()
}

fn port_conflict(pod: &Pod, others: &NodeInfo) -> Option<Refusal> {
    host_ports(pod).into_iter().find_map(|port| {
        let other = others.taker_of(&port)?;
        Some(predicate(
            "NodePorts",
            format_args!(
                "node(s) didn't have free ports for the requested pod ports: {} {}:{} is taken by pod {}/{}",
                port.protocol,
                port.ip,
                port.port,
                other.namespace(),
                other.name()
            ),
        ))
    })
}

#[cfg(test)]
mod tests;
