//! Conversion of a manifest's pod into a static pod: identity, annotations, node, and the rule that it may not refer to
//! API objects, since it has to run without an API server. Upstream's `applyDefaults` and
//! `podutil.HasAPIObjectReference`.

use k8s_openapi::api::core::v1::{Pod, PodStatus, Toleration};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::Problems;
use crate::types::PodSource;
use crate::types::pod::{
    CONFIG_HASH, CONFIG_MIRROR, CONFIG_SEEN, CONFIG_SOURCE, MANIFEST_HASH, MIRROR_DIGEST,
};

/// Origin of a static pod; part of its identity.
#[derive(Clone, Copy, Debug)]
pub struct StaticOrigin<'a> {
    /// File or http.
    pub source: PodSource,
    /// Absolute path of the file, or the URL.
    pub location: &'a str,
    /// Name of this node.
    pub node_name: &'a str,
}

/// The UID the manifest sets, or a hash of node, location and manifest: 32 hex digits that change with
/// any of the three, but not with comments, the order of keys, or the version of holdfast.
pub(super) fn uid(pod: &Pod, origin: &StaticOrigin<'_>) -> String {
    if let Some(uid) = pod.metadata.uid.as_deref().filter(|u| !u.is_empty()) {
        return uid.to_owned();
    }
    let mut manifest = serde_json::to_value(pod).unwrap_or_default();
    if let Value::Object(fields) = &mut manifest {
        fields.shift_remove("status");
    }
    sort_keys(&mut manifest);
    let mut hasher = Sha256::new();
    for part in [
        "static pod 1",
        origin.node_name,
        origin.source.as_str(),
        origin.location,
        &manifest.to_string(),
    ] {
        hasher.update(part.as_bytes());
        hasher.update([0]);
    }
    hasher
        .finalize()
        .iter()
        .take(16)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Gives a valid pod its static identity. `status` is replaced: what a manifest says there is not a wish.
pub(super) fn convert(pod: &mut Pod, uid: String, origin: &StaticOrigin<'_>, seen: &str) {
    let metadata = &mut pod.metadata;
    let name = metadata.name.take().unwrap_or_default();
    metadata.name = Some(name_on_node(&name, origin.node_name));
    if metadata.namespace.as_deref().is_none_or(str::is_empty) {
        metadata.namespace = Some("default".to_owned());
    }
    let annotations = metadata.annotations.get_or_insert_default();
    annotations.remove(MIRROR_DIGEST);
    for (key, value) in [
        (CONFIG_HASH, uid.as_str()),
        (MANIFEST_HASH, uid.as_str()),
        (CONFIG_SOURCE, origin.source.as_str()),
        (CONFIG_SEEN, seen),
    ] {
        annotations.insert(key.to_owned(), value.to_owned());
    }
    metadata.uid = Some(uid);
    pod.status = Some(PodStatus {
        phase: Some("Pending".to_owned()),
        ..PodStatus::default()
    });
    let spec = pod.spec.get_or_insert_default();
    spec.node_name = Some(origin.node_name.to_owned());
    if origin.source == PodSource::File {
        tolerate_no_execute(spec.tolerations.get_or_insert_default());
    }
}

/// `<name>-<node>`, the name a static pod has everywhere.
pub(super) fn name_on_node(name: &str, node_name: &str) -> String {
    format!("{name}-{}", node_name.to_lowercase())
}

/// Static pods of files stay where they are when the node is tainted NoExecute.
fn tolerate_no_execute(tolerations: &mut Vec<Toleration>) {
    let all = Toleration {
        operator: Some("Exists".to_owned()),
        effect: Some("NoExecute".to_owned()),
        ..Toleration::default()
    };
    if !tolerations.contains(&all) {
        tolerations.push(all);
    }
}

/// Finds what a static pod may not say.
pub(super) fn check(pod: &Pod, origin: &StaticOrigin<'_>, problems: &mut Problems<'_>) {
    let metadata = &pod.metadata;
    let server_owned = [
        (
            "metadata.deletionTimestamp",
            metadata.deletion_timestamp.is_some(),
        ),
        (
            "metadata.deletionGracePeriodSeconds",
            metadata.deletion_grace_period_seconds.is_some(),
        ),
    ];
    for (field, _) in server_owned.iter().filter(|(_, set)| *set) {
        problems.add(
            field,
            "is set by API servers only; remove it (to stop a static pod, delete its manifest)",
        );
    }
    let owned = [
        (
            "metadata.finalizers",
            metadata.finalizers.as_ref().is_some_and(|f| !f.is_empty()),
        ),
        (
            "metadata.ownerReferences",
            metadata
                .owner_references
                .as_ref()
                .is_some_and(|o| !o.is_empty()),
        ),
    ];
    for (field, _) in owned.iter().filter(|(_, set)| *set) {
        problems.add(field, "has no meaning for a static pod; remove it");
    }
    if let Some(annotations) = &metadata.annotations
        && annotations.contains_key(CONFIG_MIRROR)
    {
        problems.add(
            format!("metadata.annotations[{CONFIG_MIRROR}]"),
            "marks the API server's copy of a static pod; remove it to make this the static pod",
        );
    }
    let Some(spec) = &pod.spec else { return };
    if let Some(node) = spec.node_name.as_deref()
        && !node.is_empty()
        && node != origin.node_name
    {
        problems.add(
            "spec.nodeName",
            format!(
                "is {node:?}, but this node is {:?}; remove the field",
                origin.node_name
            ),
        );
    }
    if let Some(class) = spec.priority_class_name.as_deref()
        && !["", "system-node-critical", "system-cluster-critical"].contains(&class)
    {
        problems.add(
            "spec.priorityClassName",
            format!(
                "refers to PriorityClass {class:?}, and static pods cannot refer to API objects; \
                 use system-node-critical, system-cluster-critical or spec.priority"
            ),
        );
    }
    if let Ok(spec) = serde_json::to_value(spec) {
        references(&spec, "spec", problems);
    }
}

/// Fields that hold or are a reference to an API object, with the kind of object.
const REFERENCES: &[(&str, &str)] = &[
    ("clusterTrustBundle", "ClusterTrustBundle"),
    ("configMap", "ConfigMap"),
    ("configMapKeyRef", "ConfigMap"),
    ("configMapRef", "ConfigMap"),
    // Its driver is one, and the API server takes no mirror pod that names it.
    ("csi", "CSIDriver"),
    ("ephemeral", "PersistentVolumeClaim"),
    ("imagePullSecrets", "Secret"),
    ("nodePublishSecretRef", "Secret"),
    ("persistentVolumeClaim", "PersistentVolumeClaim"),
    ("podCertificate", "PodCertificateRequest"),
    ("resourceClaims", "ResourceClaim"),
    ("secret", "Secret"),
    ("secretKeyRef", "Secret"),
    ("secretName", "Secret"),
    ("secretRef", "Secret"),
    ("serviceAccount", "ServiceAccount"),
    ("serviceAccountName", "ServiceAccount"),
    ("serviceAccountToken", "ServiceAccount"),
];

/// Mappings whose keys the user chooses.
const USER_MAPS: &[&str] = &[
    "limits",
    "matchLabels",
    "nodeSelector",
    "options",
    "overhead",
    "requests",
    "volumeAttributes",
];

fn references(value: &Value, path: &str, problems: &mut Problems<'_>) {
    match value {
        Value::Object(fields) => {
            for (key, child) in fields {
                let path = format!("{path}.{key}");
                let kind = REFERENCES.iter().find(|(k, _)| k == key).map(|(_, k)| k);
                match kind {
                    Some(kind) if !is_blank(child) => problems.add(
                        &path,
                        format!(
                            "refers to a {kind}, and static pods cannot refer to API objects; \
                             use plain values, emptyDir or hostPath"
                        ),
                    ),
                    _ if USER_MAPS.contains(&key.as_str()) => {}
                    _ => references(child, &path, problems),
                }
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                references(item, &format!("{path}[{index}]"), problems);
            }
        }
        _ => {}
    }
}

fn is_blank(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    }
}

fn sort_keys(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            let mut entries: Vec<(String, Value)> = std::mem::take(fields).into_iter().collect();
            entries.sort_by(|a, b| a.0.cmp(&b.0));
            for (_, child) in &mut entries {
                sort_keys(child);
            }
            *fields = Map::from_iter(entries);
        }
        Value::Array(items) => items.iter_mut().for_each(sort_keys),
        _ => {}
    }
}
