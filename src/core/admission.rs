//! Whether a pod may run here; upstream's admit handlers, as far as they concern this node alone.
//!
//! Comes in: the pod, the pods that are admitted and not finished, facts of the node. Goes out: a decision
//! that is recorded once per UID and never revised. Pure.
//!
//! **Invariant:** the caller passes admitted pods alone in `others`; a pod never competes with itself.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ContainerPort, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::state::AdmissionDecision;
use crate::types::PodExt;

/// What a decision depends on besides pods.
#[derive(Clone, Debug)]
pub struct AdmissionContext<'a> {
    /// Name of the node.
    pub node_name: &'a str,
    /// `maxPods`.
    pub max_pods: usize,
    /// What the pod asks for and this agent does not do, one message per field.
    pub refusals: &'a [String],
}

/// Decides. The order is: unsupported fields, name, node, number of pods, host ports.
pub fn admit(pod: &Pod, others: &[&Pod], ctx: &AdmissionContext<'_>) -> AdmissionDecision {
    let others: Vec<&Pod> = others
        .iter()
        .copied()
        .filter(|other| other.uid() != pod.uid())
        .collect();
    let refused = unsupported(ctx)
        .or_else(|| duplicate(pod, &others))
        .or_else(|| wrong_node(pod, ctx))
        .or_else(|| too_many(&others, ctx))
        .or_else(|| port_conflict(pod, &others));
    match refused {
        None => AdmissionDecision::Admitted,
        Some((reason, message)) => AdmissionDecision::Rejected {
            reason: reason.to_owned(),
            message,
        },
    }
}

/// What is set aside for the pod: per container, each requested resource, a limit where no request is given.
pub fn allocated(pod: &Pod) -> BTreeMap<String, BTreeMap<String, String>> {
    pod.containers()
        .iter()
        .map(|container| {
            let resources = container.resources.as_ref();
            let limits = resources.and_then(|r| r.limits.as_ref());
            let requests = resources.and_then(|r| r.requests.as_ref());
            let of = limits
                .into_iter()
                .flatten()
                .chain(requests.into_iter().flatten())
                .map(|(name, Quantity(amount))| (name.clone(), amount.clone()))
                .collect();
            (container.name.clone(), of)
        })
        .collect()
}

type Refusal = (&'static str, String);

fn unsupported(ctx: &AdmissionContext<'_>) -> Option<Refusal> {
    (!ctx.refusals.is_empty()).then(|| ("UnsupportedField", ctx.refusals.join("; ")))
}

fn duplicate(pod: &Pod, others: &[&Pod]) -> Option<Refusal> {
    let full_name = pod.full_name();
    let other = others
        .iter()
        .find(|o| o.full_name() == full_name && o.source() == pod.source() && !o.is_deleting())?;
    // Static pods of one name take turns in the workers; two of one source at a time are a mistake only
    // when both are wanted.
    (!pod.is_static()).then(|| {
        (
            "DuplicateName",
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
        (
            "NodeName",
            format!(
                "Predicate NodeName failed: the pod is for node {wanted}, this is {}; correct or remove spec.nodeName",
                ctx.node_name
            ),
        )
    })
}

fn too_many(others: &[&Pod], ctx: &AdmissionContext<'_>) -> Option<Refusal> {
    (others.len() >= ctx.max_pods).then(|| {
        (
            "OutOfpods",
            format!(
                "Node didn't have enough resource: pods, requested: 1, used: {}, capacity: {}",
                others.len(),
                ctx.max_pods
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
    fn conflicts(&self, other: &Self) -> bool {
        let any = |ip: &str| ip == "0.0.0.0";
        self.port == other.port
            && self.protocol == other.protocol
            && (self.ip == other.ip || any(&self.ip) || any(&other.ip))
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
    pod.containers()
        .iter()
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

fn port_conflict(pod: &Pod, others: &[&Pod]) -> Option<Refusal> {
    let wanted = host_ports(pod);
    if wanted.is_empty() {
        return None;
    }
    others.iter().find_map(|other| {
        let taken = host_ports(other);
        let port = wanted.iter().find(|w| taken.iter().any(|t| w.conflicts(t)))?;
        Some((
            "NodePorts",
            format!(
                "Predicate NodePorts failed: node didn't have free ports for the requested pod ports: {} {}:{} is taken by pod {}/{}",
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
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(uid: &str, spec: serde_json::Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": format!("p-{uid}"), "namespace": "ns", "uid": uid}, "spec": spec,
        }))
        .unwrap()
    }

    fn with_port(uid: &str, port: serde_json::Value, host_network: bool) -> Pod {
        pod(
            uid,
            json!({"hostNetwork": host_network, "containers": [{"name": "c", "ports": [port]}]}),
        )
    }

    fn reason(pod: &Pod, others: &[&Pod], max_pods: usize, refusals: &[String]) -> String {
        let ctx = AdmissionContext {
            node_name: "n1",
            max_pods,
            refusals,
        };
        match admit(pod, others, &ctx) {
            AdmissionDecision::Admitted => "Admitted".to_owned(),
            AdmissionDecision::Rejected { reason, message } => {
                assert!(!message.is_empty());
                reason
            }
        }
    }

    #[test]
    fn host_ports_conflict_by_protocol_address_and_number() {
        let base = json!({"containerPort": 80, "hostPort": 80});
        for (first, second, host_network, want) in [
            (base.clone(), base.clone(), false, "NodePorts"),
            (
                base.clone(),
                json!({"containerPort": 80, "hostPort": 81}),
                false,
                "Admitted",
            ),
            (
                base.clone(),
                json!({"containerPort": 80, "hostPort": 80, "protocol": "UDP"}),
                false,
                "Admitted",
            ),
            (
                base.clone(),
                json!({"containerPort": 80, "hostPort": 80, "hostIP": "10.0.0.1"}),
                false,
                "NodePorts",
            ),
            (
                json!({"containerPort": 80, "hostPort": 80, "hostIP": "10.0.0.2"}),
                json!({"containerPort": 80, "hostPort": 80, "hostIP": "10.0.0.1"}),
                false,
                "Admitted",
            ),
            (
                base.clone(),
                json!({"containerPort": 80}),
                false,
                "Admitted",
            ),
            (
                base.clone(),
                json!({"containerPort": 80}),
                true,
                "NodePorts",
            ),
        ] {
            let one = with_port("1", first.clone(), false);
            let two = with_port("2", second.clone(), host_network);
            assert_eq!(reason(&two, &[&one], 10, &[]), want, "{first} {second}");
        }
    }

    #[test]
    fn a_pod_does_not_compete_with_itself() {
        let one = with_port("1", json!({"containerPort": 80, "hostPort": 80}), false);
        assert_eq!(reason(&one, &[&one], 1, &[]), "Admitted");
    }

    #[test]
    fn unsupported_fields_and_other_nodes_are_refused() {
        let one = pod("1", json!({"containers": []}));
        assert_eq!(
            reason(&one, &[], 1, &["spec.initContainers".to_owned()]),
            "UnsupportedField"
        );
        let elsewhere = pod("2", json!({"containers": [], "nodeName": "n2"}));
        assert_eq!(reason(&elsewhere, &[], 1, &[]), "NodeName");
        let here = pod("3", json!({"containers": [], "nodeName": "n1"}));
        assert_eq!(reason(&here, &[], 1, &[]), "Admitted");
    }

    #[test]
    fn a_full_node_and_a_taken_name_refuse() {
        let one = pod("1", json!({"containers": []}));
        let mut two = pod("2", json!({"containers": []}));
        assert_eq!(reason(&two, &[&one], 1, &[]), "OutOfpods");
        two.metadata.name = one.metadata.name.clone();
        assert_eq!(reason(&two, &[&one], 10, &[]), "DuplicateName");
        let mut leaving = one.clone();
        leaving.metadata.deletion_timestamp =
            Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
        assert_eq!(reason(&two, &[&leaving], 10, &[]), "Admitted");
    }

    #[test]
    fn allocation_is_requests_over_limits() {
        let one = pod(
            "1",
            json!({"containers": [
                {"name": "a", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "100m"}}},
                {"name": "b"},
            ]}),
        );
        let of = allocated(&one);
        assert_eq!(of["a"]["cpu"], "100m");
        assert_eq!(of["a"]["memory"], "1Gi");
        assert!(of["b"].is_empty());
    }
}
