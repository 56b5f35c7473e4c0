//! Checks of a Pod as an API server does them; the part of upstream's `ValidatePodCreate` that concerns the fields this
//! version supports. Fields that `core::supported` refuses are not checked.

mod container;
mod names;
mod probes;
mod resources;
mod security;

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Pod, PodSpec, Volume};

use super::Problems;
use super::static_pod::{StaticOrigin, name_on_node};
use crate::types::containers::{ContainerKind, ContainerSpec, containers_of};
use container::HostPort;
use names::{
    LABEL, SUBDOMAIN, is_ip, is_label, is_label_value, is_qualified_name, is_subdomain, is_uid,
    one_of,
};

/// Most bytes of all annotations together.
const ANNOTATIONS: usize = 256 * 1024;
/// Bytes that the annotations have which the agent adds to a static pod and to its mirror pod.
const OWN_ANNOTATIONS: usize = 512;

/// Checks names, labels and annotations, before the node's name is appended.
pub(super) fn metadata(pod: &Pod, origin: &StaticOrigin<'_>, problems: &mut Problems<'_>) {
    let metadata = &pod.metadata;
    let name = metadata.name.as_deref().unwrap_or_default();
    let full = name_on_node(name, origin.node_name);
    if name.is_empty() {
        problems.add("metadata.name", "is missing; a static pod needs a name");
    } else if !is_subdomain(name) {
        problems.add("metadata.name", format!("{name:?} {SUBDOMAIN}"));
    } else if full.len() > 253 {
        problems.add(
            "metadata.name",
            format!(
                "with the node's name appended has {} characters, at most 253 are allowed",
                full.len()
            ),
        );
    }
    if let Some(namespace) = metadata.namespace.as_deref()
        && !namespace.is_empty()
        && !is_label(namespace)
    {
        problems.add("metadata.namespace", format!("{namespace:?} {LABEL}"));
    }
    if let Some(uid) = metadata.uid.as_deref()
        && !uid.is_empty()
        && !is_uid(uid)
    {
        problems.add(
            "metadata.uid",
            format!("{uid:?} has to be letters, digits and '-', at most 63; or leave it out"),
        );
    }
    for (key, value) in metadata.labels.iter().flatten() {
        let field = format!("metadata.labels[{key}]");
        if !is_qualified_name(key) {
            problems.add(&field, "is not a valid label key");
        }
        if !is_label_value(value) {
            problems.add(&field, format!("{value:?} is not a valid label value: at most 63 letters, digits, '-', '_', '.', beginning and ending with a letter or digit"));
        }
    }
    for key in metadata.annotations.iter().flatten().map(|(k, _)| k) {
        if !is_qualified_name(&key.to_lowercase()) {
            problems.add(
                format!("metadata.annotations[{key}]"),
                "is not a valid annotation key",
            );
        }
    }
    let size: usize = metadata
        .annotations
        .iter()
        .flatten()
        .map(|(k, v)| k.len() + v.len())
        .sum();
    if size > ANNOTATIONS - OWN_ANNOTATIONS {
        problems.add(
            "metadata.annotations",
            format!(
                "have {size} bytes together, at most {} are possible beside those that are added",
                ANNOTATIONS - OWN_ANNOTATIONS
            ),
        );
    }
}

/// Checks the spec, after the defaults were applied.
pub(super) fn spec(pod: &Pod, problems: &mut Problems<'_>) {
    let Some(spec) = &pod.spec else {
        problems.add("spec", "is missing; a Pod needs a spec with containers");
        return;
    };
    pod_fields(spec, problems);
    let volumes = volumes(spec, problems);
    if spec.containers.is_empty() {
        problems.add(
            "spec.containers",
            "is empty; a Pod needs at least one container",
        );
    }
    if spec
        .ephemeral_containers
        .as_ref()
        .is_some_and(|e| !e.is_empty())
    {
        problems.add(
            "spec.ephemeralContainers",
            "are added to running pods through an API server only; remove them from the manifest",
        );
    }
    security::pod(spec, problems);
    resources::pod(spec, problems);
    let mut names = BTreeSet::new();
    let mut host_ports = BTreeSet::new();
    let kinds = containers_of(pod).filter(|c| c.kind != ContainerKind::Ephemeral);
    for member in kinds {
        container(spec, &member, &volumes, &mut host_ports, problems);
        if !names.insert(member.container.name.clone()) {
            problems.add(
                format!("{}.name", path_of(&member)),
                format!(
                    "{:?} is used twice; names of containers and init containers are unique in a pod",
                    member.container.name
                ),
            );
        }
    }
}

fn path_of(member: &ContainerSpec<'_>) -> String {
    let list = if member.kind.is_init() {
        "initContainers"
    } else {
        "containers"
    };
    format!("spec.{list}[{}]", member.index)
}

fn container(
    spec: &PodSpec,
    member: &ContainerSpec<'_>,
    volumes: &BTreeSet<&str>,
    host_ports: &mut BTreeSet<HostPort>,
    problems: &mut Problems<'_>,
) {
    let (path, container) = (path_of(member), member.container.as_ref());
    container::fields(container, &path, problems);
    container::restarts(container, &path, problems);
    // Init containers run one at a time, so that each may have the host ports of the others.
    let mut alone = BTreeSet::new();
    let taken = match member.kind {
        ContainerKind::Init => &mut alone,
        _ => host_ports,
    };
    let host_network = spec.host_network.unwrap_or(false);
    container::ports(container, &path, host_network, taken, problems);
    container::environment(container, &path, problems);
    container::mounts(container, &path, volumes, problems);
    probes::container(spec, member, &path, problems);
    security::container(spec, container, &path, problems);
    resources::container(container, &path, problems);
}

fn pod_fields(spec: &PodSpec, problems: &mut Problems<'_>) {
    one_of(
        "spec.restartPolicy",
        spec.restart_policy.as_deref(),
        &["Always", "OnFailure", "Never"],
        problems,
    );
    one_of(
        "spec.dnsPolicy",
        spec.dns_policy.as_deref(),
        &["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"],
        problems,
    );
    if spec.termination_grace_period_seconds.is_some_and(|s| s < 0) {
        problems.add(
            "spec.terminationGracePeriodSeconds",
            "is negative; it has to be 0 or more",
        );
    }
    if let Some(seconds) = spec.active_deadline_seconds
        && !(1..=i64::from(i32::MAX)).contains(&seconds)
    {
        problems.add(
            "spec.activeDeadlineSeconds",
            format!("is {seconds}; it has to be between 1 and 2147483647, or left out"),
        );
    }
    identity(spec, problems);
    for (index, gate) in spec.readiness_gates.iter().flatten().enumerate() {
        if !is_qualified_name(&gate.condition_type) {
            problems.add(
                format!("spec.readinessGates[{index}].conditionType"),
                format!(
                    "{:?} is not a condition; write one like example.com/ready",
                    gate.condition_type
                ),
            );
        }
    }
    let nameservers = spec
        .dns_config
        .as_ref()
        .and_then(|c| c.nameservers.as_ref());
    if spec.dns_policy.as_deref() == Some("None") && nameservers.is_none_or(Vec::is_empty) {
        problems.add(
            "spec.dnsConfig.nameservers",
            "is empty; dnsPolicy None needs at least one",
        );
    }
    for (index, server) in nameservers.into_iter().flatten().enumerate() {
        if !is_ip(server) {
            problems.add(
                format!("spec.dnsConfig.nameservers[{index}]"),
                format!("{server:?} is not an IP address in its own form"),
            );
        }
    }
    if nameservers.is_some_and(|n| n.len() > 3) {
        problems.add("spec.dnsConfig.nameservers", "has more than 3 entries");
    }
    let searches = spec.dns_config.as_ref().and_then(|c| c.searches.as_ref());
    if searches.is_some_and(|s| s.len() > 32) {
        problems.add("spec.dnsConfig.searches", "has more than 32 entries");
    }
    for (index, search) in searches.into_iter().flatten().enumerate() {
        // Underscores are no DNS names, but they are resolved.
        let plain = search.strip_suffix('.').unwrap_or(search).replace('_', "a");
        if search != "." && !is_subdomain(&plain) {
            problems.add(
                format!("spec.dnsConfig.searches[{index}]"),
                format!("{search:?} {SUBDOMAIN}"),
            );
        }
    }
    let options = spec.dns_config.as_ref().and_then(|c| c.options.as_ref());
    for (index, option) in options.into_iter().flatten().enumerate() {
        if option.name.as_deref().is_none_or(str::is_empty) {
            problems.add(
                format!("spec.dnsConfig.options[{index}].name"),
                "is missing",
            );
        }
    }
    placement(spec, problems);
}

/// Checks the fields that a scheduler uses.
fn placement(spec: &PodSpec, problems: &mut Problems<'_>) {
    for (key, value) in spec.node_selector.iter().flatten() {
        if !is_qualified_name(key) || !is_label_value(value) {
            problems.add(
                format!("spec.nodeSelector[{key}]"),
                format!("{key:?}: {value:?} is not a label that a node can have"),
            );
        }
    }
    if spec
        .scheduling_gates
        .as_ref()
        .is_some_and(|g| !g.is_empty())
    {
        problems.add(
            "spec.schedulingGates",
            "make no sense for a pod that has its node; remove them",
        );
    }
    for (index, toleration) in spec.tolerations.iter().flatten().enumerate() {
        let path = format!("spec.tolerations[{index}]");
        let key = toleration.key.as_deref().unwrap_or_default();
        if !key.is_empty() && !is_qualified_name(key) {
            problems.add(
                format!("{path}.key"),
                format!("{key:?} is not the key of a taint"),
            );
        }
        let value = toleration.value.as_deref().unwrap_or_default();
        if !is_label_value(value) {
            problems.add(
                format!("{path}.value"),
                format!("{value:?} is not the value of a taint"),
            );
        }
        if toleration.toleration_seconds.is_some()
            && toleration.effect.as_deref() != Some("NoExecute")
        {
            problems.add(
                format!("{path}.tolerationSeconds"),
                "is for effect NoExecute only",
            );
        }
        let operator = toleration.operator.as_deref().unwrap_or("Equal");
        let text = |field: &Option<String>| field.as_deref().is_some_and(|s| !s.is_empty());
        if text(&toleration.effect) {
            one_of(
                &format!("{path}.effect"),
                toleration.effect.as_deref(),
                &["NoSchedule", "PreferNoSchedule", "NoExecute"],
                problems,
            );
        }
        if !["", "Equal", "Exists", "Lt", "Gt"].contains(&operator) {
            problems.add(
                format!("{path}.operator"),
                format!("{operator:?} is neither Equal nor Exists"),
            );
        }
        if operator == "Exists" && text(&toleration.value) {
            problems.add(
                format!("{path}.value"),
                "has to be empty with operator Exists",
            );
        }
        if operator != "Exists" && !text(&toleration.key) {
            problems.add(
                format!("{path}.operator"),
                "has to be Exists when key is empty",
            );
        }
    }
}

/// Hostname, subdomain, and lines of /etc/hosts.
fn identity(spec: &PodSpec, problems: &mut Problems<'_>) {
    let labels = [
        ("spec.hostname", &spec.hostname),
        ("spec.subdomain", &spec.subdomain),
    ];
    for (field, value) in labels {
        if let Some(text) = value.as_deref().filter(|t| !t.is_empty())
            && !is_label(text)
        {
            problems.add(field, format!("{text:?} {LABEL}"));
        }
    }
    if let Some(name) = spec.hostname_override.as_deref() {
        let field = "spec.hostnameOverride";
        if !is_subdomain(name) {
            problems.add(field, format!("{name:?} {SUBDOMAIN}"));
        } else if name.len() > 64 {
            problems.add(
                field,
                "is longer than the 64 characters a hostname may have",
            );
        }
        if spec.host_network.unwrap_or(false) {
            problems.add(
                field,
                "cannot stand beside hostNetwork: true, where the host's name counts; remove one",
            );
        }
        if spec.set_hostname_as_fqdn.unwrap_or(false) {
            problems.add(
                field,
                "cannot stand beside setHostnameAsFQDN: true; remove one of the two",
            );
        }
    }
    for (index, alias) in spec.host_aliases.iter().flatten().enumerate() {
        let path = format!("spec.hostAliases[{index}]");
        if !is_ip(&alias.ip) {
            problems.add(
                format!("{path}.ip"),
                format!("{:?} is not an IP address in its own form", alias.ip),
            );
        }
        for (index, name) in alias.hostnames.iter().flatten().enumerate() {
            if !is_subdomain(name) {
                problems.add(
                    format!("{path}.hostnames[{index}]"),
                    format!("{name:?} {SUBDOMAIN}"),
                );
            }
        }
    }
}

fn volumes<'p>(spec: &'p PodSpec, problems: &mut Problems<'_>) -> BTreeSet<&'p str> {
    let mut names = BTreeSet::new();
    for (index, volume) in spec.volumes.iter().flatten().enumerate() {
        let path = format!("spec.volumes[{index}]");
        let name = volume.name.as_str();
        if !is_label(name) {
            problems.add(format!("{path}.name"), format!("{name:?} {LABEL}"));
        }
        if !names.insert(name) {
            problems.add(
                format!("{path}.name"),
                format!("{name:?} is used twice; volume names are unique in a pod"),
            );
        }
        volume_source(volume, &path, problems);
    }
    names
}

const HOST_PATH_TYPES: &[&str] = &[
    "",
    "DirectoryOrCreate",
    "Directory",
    "FileOrCreate",
    "File",
    "Socket",
    "CharDevice",
    "BlockDevice",
];

fn volume_source(volume: &Volume, path: &str, problems: &mut Problems<'_>) {
    let sources = match serde_json::to_value(volume) {
        Ok(serde_json::Value::Object(fields)) => fields.len().saturating_sub(1),
        _ => 0,
    };
    if sources > 1 {
        problems.add(
            path,
            format!("has {sources} sources; a volume has exactly one"),
        );
    }
    if let Some(host_path) = &volume.host_path {
        if !host_path.path.starts_with('/') || host_path.path.split('/').any(|p| p == "..") {
            problems.add(
                format!("{path}.hostPath.path"),
                format!(
                    "{:?} has to be an absolute path without `..`",
                    host_path.path
                ),
            );
        }
        one_of(
            &format!("{path}.hostPath.type"),
            host_path.type_.as_deref(),
            HOST_PATH_TYPES,
            problems,
        );
    }
    if let Some(limit) = volume
        .empty_dir
        .as_ref()
        .and_then(|e| e.size_limit.as_ref())
    {
        resources::quantity(&limit.0, &format!("{path}.emptyDir.sizeLimit"), problems);
    }
    if let Some(image) = &volume.image {
        if image.reference.as_deref().is_none_or(str::is_empty) {
            problems.add(
                format!("{path}.image.reference"),
                "is missing; name the image whose files the volume has",
            );
        }
        if image.pull_policy.is_some() {
            one_of(
                &format!("{path}.image.pullPolicy"),
                image.pull_policy.as_deref(),
                &["", "Always", "IfNotPresent", "Never"],
                problems,
            );
        }
    }
}
