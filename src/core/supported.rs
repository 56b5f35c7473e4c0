//! What a pod may ask for in this version.
//!
//! In: a pod. Out: every field that asks for something the agent does not do. The pod's JSON is walked
//! against a list of what is supported, so a field that nobody has thought of is refused, never ignored.

use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;

/// Phase reason and event reason of a pod with unsupported fields.
pub const UNSUPPORTED_FIELD: &str = "UnsupportedField";

/// A field that is not supported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Its path, like `spec.containers[0].livenessProbe`.
    pub field: String,
    /// What is supported instead.
    pub why: String,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.field, self.why)
    }
}

/// All unsupported fields of a pod, in the order of its JSON; empty when the pod can run.
pub fn refused(pod: &Pod) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    match serde_json::to_value(pod) {
        Ok(value) => {
            walk(&value, "", "", &mut refusals);
            disk_limits(pod, &mut refusals);
        }
        Err(error) => refusals.push(Refusal {
            field: "spec".to_owned(),
            why: format!("cannot be examined: {error}"),
        }),
    }
    refusals
}

/// A limit on an emptyDir on disk is enforced by eviction, which is not there yet.
fn disk_limits(pod: &Pod, refusals: &mut Vec<Refusal>) {
    let volumes = pod.spec.iter().flat_map(|s| s.volumes.iter().flatten());
    for (index, volume) in volumes.enumerate() {
        let on_disk = volume.empty_dir.as_ref().is_some_and(|e| {
            e.size_limit.is_some() && e.medium.as_deref().unwrap_or_default().is_empty()
        });
        if on_disk {
            refusals.push(Refusal {
                field: format!("spec.volumes[{index}].emptyDir.sizeLimit"),
                why: "is supported with medium Memory only".to_owned(),
            });
        }
    }
}

/// One line for the pod's message and its event.
pub fn summary(refusals: &[Refusal]) -> String {
    let list: Vec<String> = refusals.iter().map(Refusal::to_string).collect();
    format!("not supported by this version: {}", list.join("; "))
}

/// What may stand at a path.
#[derive(Clone, Copy)]
enum Rule {
    /// Anything.
    Any,
    /// A mapping or list whose members have rules of their own.
    Inside,
    /// One of these strings.
    Text(&'static [&'static str]),
    /// This boolean, which asks for nothing.
    Flag(bool),
}

use Rule::{Any, Flag, Inside, Text};

/// Paths with `[]` for list members.
const RULES: &[(&str, Rule)] = &[
    ("apiVersion", Any),
    ("kind", Any),
    ("metadata", Inside),
    ("metadata.annotations", Any),
    ("metadata.creationTimestamp", Any),
    ("metadata.deletionGracePeriodSeconds", Any),
    ("metadata.deletionTimestamp", Any),
    ("metadata.finalizers", Any),
    ("metadata.generateName", Any),
    ("metadata.generation", Any),
    ("metadata.labels", Any),
    ("metadata.managedFields", Any),
    ("metadata.name", Any),
    ("metadata.namespace", Any),
    ("metadata.ownerReferences", Any),
    ("metadata.resourceVersion", Any),
    ("metadata.selfLink", Any),
    ("metadata.uid", Any),
    // Reported, not asked for.
    ("status", Any),
    ("spec", Inside),
    // The scheduler's and admission's business.
    ("spec.affinity", Any),
    // The API server has made a volume of it.
    ("spec.automountServiceAccountToken", Any),
    ("spec.containers", Inside),
    ("spec.containers[]", Inside),
    ("spec.containers[].args", Any),
    ("spec.containers[].command", Any),
    ("spec.containers[].env", Inside),
    ("spec.containers[].env[]", Inside),
    ("spec.containers[].env[].name", Any),
    ("spec.containers[].env[].value", Any),
    ("spec.containers[].env[].valueFrom", Inside),
    ("spec.containers[].env[].valueFrom.configMapKeyRef", Any),
    ("spec.containers[].env[].valueFrom.fieldRef", Any),
    ("spec.containers[].env[].valueFrom.resourceFieldRef", Any),
    ("spec.containers[].env[].valueFrom.secretKeyRef", Any),
    ("spec.containers[].envFrom", Any),
    ("spec.containers[].image", Any),
    (
        "spec.containers[].imagePullPolicy",
        Text(&["Always", "IfNotPresent", "Never"]),
    ),
    ("spec.containers[].livenessProbe", Any),
    ("spec.containers[].readinessProbe", Any),
    ("spec.containers[].startupProbe", Any),
    ("spec.containers[].name", Any),
    ("spec.containers[].ports", Inside),
    ("spec.containers[].ports[]", Inside),
    ("spec.containers[].ports[].containerPort", Any),
    ("spec.containers[].ports[].hostIP", Any),
    ("spec.containers[].ports[].hostPort", Any),
    ("spec.containers[].ports[].name", Any),
    (
        "spec.containers[].ports[].protocol",
        Text(&["TCP", "UDP", "SCTP"]),
    ),
    ("spec.containers[].resources", Inside),
    ("spec.containers[].resources.limits", Inside),
    ("spec.containers[].resources.limits.cpu", Any),
    ("spec.containers[].resources.limits.memory", Any),
    ("spec.containers[].resources.requests", Inside),
    ("spec.containers[].resources.requests.cpu", Any),
    ("spec.containers[].resources.requests.memory", Any),
    ("spec.containers[].securityContext", Inside),
    (
        "spec.containers[].securityContext.allowPrivilegeEscalation",
        Flag(true),
    ),
    ("spec.containers[].securityContext.privileged", Any),
    (
        "spec.containers[].securityContext.procMount",
        Text(&["Default"]),
    ),
    (
        "spec.containers[].securityContext.readOnlyRootFilesystem",
        Flag(false),
    ),
    (
        "spec.containers[].securityContext.runAsNonRoot",
        Flag(false),
    ),
    ("spec.containers[].stdin", Any),
    ("spec.containers[].stdinOnce", Any),
    ("spec.containers[].terminationMessagePath", Any),
    (
        "spec.containers[].terminationMessagePolicy",
        Text(&["File", "FallbackToLogsOnError"]),
    ),
    ("spec.containers[].tty", Any),
    ("spec.containers[].volumeMounts", Inside),
    ("spec.containers[].volumeMounts[]", Inside),
    ("spec.containers[].volumeMounts[].mountPath", Any),
    (
        "spec.containers[].volumeMounts[].mountPropagation",
        Text(&["None", "HostToContainer", "Bidirectional"]),
    ),
    ("spec.containers[].volumeMounts[].name", Any),
    ("spec.containers[].volumeMounts[].readOnly", Any),
    (
        "spec.containers[].volumeMounts[].recursiveReadOnly",
        Text(&["Disabled"]),
    ),
    ("spec.containers[].workingDir", Any),
    ("spec.dnsConfig", Inside),
    ("spec.dnsConfig.nameservers", Any),
    ("spec.dnsConfig.options", Inside),
    ("spec.dnsConfig.options[]", Inside),
    ("spec.dnsConfig.options[].name", Any),
    ("spec.dnsConfig.options[].value", Any),
    ("spec.dnsConfig.searches", Any),
    (
        "spec.dnsPolicy",
        Text(&["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"]),
    ),
    ("spec.enableServiceLinks", Any),
    ("spec.hostIPC", Any),
    ("spec.hostNetwork", Any),
    ("spec.hostPID", Any),
    ("spec.hostUsers", Flag(true)),
    ("spec.hostname", Any),
    ("spec.imagePullSecrets", Any),
    ("spec.nodeName", Any),
    // Admission looks at it.
    ("spec.nodeSelector", Any),
    ("spec.os", Inside),
    ("spec.os.name", Text(&["linux"])),
    // Given by the RuntimeClass.
    ("spec.overhead", Any),
    // The scheduler's business; the node never acts on it.
    (
        "spec.preemptionPolicy",
        Text(&["PreemptLowerPriority", "Never"]),
    ),
    ("spec.priority", Any),
    ("spec.priorityClassName", Any),
    (
        "spec.restartPolicy",
        Text(&["Always", "OnFailure", "Never"]),
    ),
    ("spec.runtimeClassName", Any),
    ("spec.schedulerName", Any),
    // A pod with gates is not bound to a node.
    ("spec.schedulingGates", Any),
    ("spec.securityContext", Inside),
    ("spec.securityContext.runAsNonRoot", Flag(false)),
    ("spec.securityContext.sysctls", Any),
    // The same as serviceAccountName, by its former name.
    ("spec.serviceAccount", Any),
    ("spec.serviceAccountName", Any),
    ("spec.setHostnameAsFQDN", Flag(false)),
    ("spec.shareProcessNamespace", Flag(false)),
    ("spec.terminationGracePeriodSeconds", Any),
    ("spec.tolerations", Inside),
    ("spec.tolerations[]", Inside),
    ("spec.tolerations[].effect", Any),
    ("spec.tolerations[].key", Any),
    ("spec.tolerations[].operator", Text(&["Equal", "Exists"])),
    ("spec.tolerations[].tolerationSeconds", Any),
    ("spec.tolerations[].value", Any),
    // The scheduler's business; the node never acts on it.
    ("spec.topologySpreadConstraints", Any),
    ("spec.volumes", Inside),
    ("spec.volumes[]", Inside),
    ("spec.volumes[].configMap", Any),
    ("spec.volumes[].downwardAPI", Any),
    ("spec.volumes[].emptyDir", Inside),
    ("spec.volumes[].emptyDir.medium", Text(&["Memory"])),
    ("spec.volumes[].emptyDir.sizeLimit", Any),
    ("spec.volumes[].hostPath", Inside),
    ("spec.volumes[].hostPath.path", Any),
    ("spec.volumes[].hostPath.type", Any),
    ("spec.volumes[].name", Any),
    ("spec.volumes[].projected", Inside),
    ("spec.volumes[].projected.defaultMode", Any),
    ("spec.volumes[].projected.sources", Inside),
    ("spec.volumes[].projected.sources[]", Inside),
    ("spec.volumes[].projected.sources[].configMap", Any),
    ("spec.volumes[].projected.sources[].downwardAPI", Any),
    ("spec.volumes[].projected.sources[].secret", Any),
    (
        "spec.volumes[].projected.sources[].serviceAccountToken",
        Any,
    ),
    ("spec.volumes[].secret", Any),
];

/// Lists whose members are refused even when they are empty: an empty volume source is a wish.
const NO_EMPTY_MEMBERS: &[&str] = &[
    "spec.containers[].env[].valueFrom",
    "spec.volumes[]",
    "spec.volumes[].projected.sources[]",
];

fn rule(pattern: &str) -> Option<Rule> {
    RULES
        .iter()
        .find(|(path, _)| *path == pattern)
        .map(|(_, rule)| *rule)
}

fn walk(value: &Value, pattern: &str, field: &str, refusals: &mut Vec<Refusal>) {
    match value {
        Value::Object(members) => {
            for (key, member) in members {
                let pattern = join(pattern, key);
                visit(member, &pattern, &join(field, key), refusals);
            }
        }
        Value::Array(items) => {
            let pattern = format!("{pattern}[]");
            for (index, item) in items.iter().enumerate() {
                visit(item, &pattern, &format!("{field}[{index}]"), refusals);
            }
        }
        _ => {}
    }
}

fn visit(value: &Value, pattern: &str, field: &str, refusals: &mut Vec<Refusal>) {
    let parent_counts = pattern
        .rsplit_once('.')
        .is_some_and(|(parent, _)| NO_EMPTY_MEMBERS.contains(&parent));
    let asks = !asks_for_nothing(value);
    let why = match rule(pattern) {
        Some(Any) => return,
        Some(Inside) => return walk(value, pattern, field, refusals),
        Some(Text(allowed)) => match value.as_str() {
            Some("") | None if !asks => return,
            Some(text) if allowed.contains(&text) => return,
            _ => format!("{value} is not supported, only {}", allowed.join(", ")),
        },
        Some(Flag(allowed)) if !asks || *value == Value::Bool(allowed) => return,
        Some(Flag(allowed)) => format!("only {allowed} is supported"),
        None if !asks && !parent_counts => return,
        None => "is not supported".to_owned(),
    };
    refusals.push(Refusal {
        field: field.to_owned(),
        why,
    });
}

/// Null, empty strings, and lists and mappings of nothing else.
fn asks_for_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(members) => members.values().all(asks_for_nothing),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() {
        key.to_owned()
    } else {
        format!("{path}.{key}")
    }
}

#[cfg(test)]
mod tests;
