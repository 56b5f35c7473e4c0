//! What an API server would refuse of a Pod; the part of upstream's `ValidatePodCreate` that concerns the
//! fields this version supports.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, ResourceRequirements, Volume};

use super::Problems;
use super::static_pod::{StaticOrigin, name_on_node};
use crate::types::quantity::nanos;

const LABEL: &str = "has to be a DNS-1123 label: lower-case letters, digits and '-', at most 63, beginning and ending with a letter or digit";
const SUBDOMAIN: &str = "has to be a DNS-1123 subdomain: lower-case letters, digits, '-' and '.', each part beginning and ending with a letter or digit";

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
        if !value.is_empty() && !is_name_part(value) {
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
    if size > 256 * 1024 {
        problems.add("metadata.annotations", "are larger than 256 KiB together");
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
    let mut names = BTreeSet::new();
    let mut host_ports = BTreeSet::new();
    for (index, container) in spec.containers.iter().enumerate() {
        let path = format!("spec.containers[{index}]");
        container_fields(container, &path, problems);
        if !names.insert(container.name.as_str()) {
            problems.add(
                format!("{path}.name"),
                format!(
                    "{:?} is used twice; container names are unique in a pod",
                    container.name
                ),
            );
        }
        ports(
            container,
            &path,
            spec.host_network.unwrap_or(false),
            &mut host_ports,
            problems,
        );
        environment(container, &path, problems);
        mounts(container, &path, &volumes, problems);
        if let Some(resources) = &container.resources {
            quantities(resources, &format!("{path}.resources"), problems);
        }
    }
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
    if let Some(hostname) = spec.hostname.as_deref()
        && !hostname.is_empty()
        && !is_label(hostname)
    {
        problems.add("spec.hostname", format!("{hostname:?} {LABEL}"));
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
        if server.parse::<IpAddr>().is_err() {
            problems.add(
                format!("spec.dnsConfig.nameservers[{index}]"),
                format!("{server:?} is not an IP address"),
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
    for (index, toleration) in spec.tolerations.iter().flatten().enumerate() {
        let path = format!("spec.tolerations[{index}]");
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
        quantity(&limit.0, &format!("{path}.emptyDir.sizeLimit"), problems);
    }
}

fn container_fields(container: &Container, path: &str, problems: &mut Problems<'_>) {
    let name = container.name.as_str();
    if name.is_empty() {
        problems.add(format!("{path}.name"), "is missing");
    } else if !is_label(name) {
        problems.add(format!("{path}.name"), format!("{name:?} {LABEL}"));
    }
    let image = container.image.as_deref().unwrap_or_default();
    if image.is_empty() {
        problems.add(format!("{path}.image"), "is missing");
    } else if image.trim() != image {
        problems.add(format!("{path}.image"), "has spaces around it");
    }
    one_of(
        &format!("{path}.imagePullPolicy"),
        container.image_pull_policy.as_deref(),
        &["Always", "IfNotPresent", "Never"],
        problems,
    );
    one_of(
        &format!("{path}.terminationMessagePolicy"),
        container.termination_message_policy.as_deref(),
        &["File", "FallbackToLogsOnError"],
        problems,
    );
}

type HostPort = (i32, String, String);

fn ports(
    container: &Container,
    path: &str,
    host_network: bool,
    taken: &mut BTreeSet<HostPort>,
    problems: &mut Problems<'_>,
) {
    let mut names = BTreeSet::new();
    for (index, port) in container.ports.iter().flatten().enumerate() {
        let path = format!("{path}.ports[{index}]");
        let protocol = port.protocol.as_deref().unwrap_or_default();
        one_of(
            &format!("{path}.protocol"),
            Some(protocol),
            &["TCP", "UDP", "SCTP"],
            problems,
        );
        if !(1..=65535).contains(&port.container_port) {
            problems.add(
                format!("{path}.containerPort"),
                "has to be between 1 and 65535",
            );
        }
        if let Some(name) = port.name.as_deref().filter(|n| !n.is_empty()) {
            if !is_port_name(name) {
                problems.add(
                    format!("{path}.name"),
                    format!("{name:?} has to be at most 15 lower-case letters, digits and '-', with at least one letter"),
                );
            }
            if !names.insert(name) {
                problems.add(
                    format!("{path}.name"),
                    format!("{name:?} is used twice in this container"),
                );
            }
        }
        let address = port.host_ip.as_deref().unwrap_or_default();
        if !address.is_empty() && address.parse::<IpAddr>().is_err() {
            problems.add(
                format!("{path}.hostIP"),
                format!("{address:?} is not an IP address"),
            );
        }
        let host_port = port.host_port.unwrap_or(0);
        if host_port == 0 {
            continue;
        }
        if !(1..=65535).contains(&host_port) {
            problems.add(format!("{path}.hostPort"), "has to be between 1 and 65535");
        }
        if host_network && host_port != port.container_port {
            problems.add(
                format!("{path}.hostPort"),
                "has to equal containerPort on the host's network",
            );
        }
        if !taken.insert((host_port, protocol.to_owned(), address.to_owned())) {
            problems.add(
                format!("{path}.hostPort"),
                format!("{host_port}/{protocol} is used twice in this pod"),
            );
        }
    }
}

fn environment(container: &Container, path: &str, problems: &mut Problems<'_>) {
    for (index, variable) in container.env.iter().flatten().enumerate() {
        let path = format!("{path}.env[{index}]");
        let name = variable.name.as_str();
        let printable = name.bytes().all(|b| (0x20..0x7f).contains(&b) && b != b'=');
        if name.is_empty() || !printable {
            problems.add(
                format!("{path}.name"),
                format!("{name:?} has to be printable ASCII without '=', and not empty"),
            );
        }
        if variable.value_from.is_some() && variable.value.as_deref().is_some_and(|v| !v.is_empty())
        {
            problems.add(format!("{path}.valueFrom"), "cannot stand beside value");
        }
    }
}

fn mounts(
    container: &Container,
    path: &str,
    volumes: &BTreeSet<&str>,
    problems: &mut Problems<'_>,
) {
    let mut paths = BTreeSet::new();
    for (index, mount) in container.volume_mounts.iter().flatten().enumerate() {
        let path = format!("{path}.volumeMounts[{index}]");
        if !volumes.contains(mount.name.as_str()) {
            problems.add(
                format!("{path}.name"),
                format!(
                    "{:?} is not a volume of this pod; add it to spec.volumes",
                    mount.name
                ),
            );
        }
        let target = mount.mount_path.as_str();
        if !target.starts_with('/') || target.contains(':') {
            problems.add(
                format!("{path}.mountPath"),
                format!("{target:?} has to be an absolute path without ':'"),
            );
        }
        if !paths.insert(target) {
            problems.add(
                format!("{path}.mountPath"),
                format!("{target:?} is used twice in this container"),
            );
        }
        if mount.mount_propagation.is_some() {
            one_of(
                &format!("{path}.mountPropagation"),
                mount.mount_propagation.as_deref(),
                &["None", "HostToContainer", "Bidirectional"],
                problems,
            );
        }
        let privileged = container
            .security_context
            .as_ref()
            .and_then(|s| s.privileged)
            .unwrap_or(false);
        if mount.mount_propagation.as_deref() == Some("Bidirectional") && !privileged {
            problems.add(
                format!("{path}.mountPropagation"),
                "Bidirectional is for privileged containers only",
            );
        }
    }
}

fn quantities(resources: &ResourceRequirements, path: &str, problems: &mut Problems<'_>) {
    let read = |set: &Option<BTreeMap<String, _>>, what: &str, problems: &mut Problems<'_>| {
        let mut amounts = BTreeMap::new();
        let set: &Option<
            BTreeMap<String, k8s_openapi::apimachinery::pkg::api::resource::Quantity>,
        > = set;
        for (name, amount) in set.iter().flatten() {
            if let Some(nanos) = quantity(&amount.0, &format!("{path}.{what}[{name}]"), problems) {
                amounts.insert(name.clone(), nanos);
            }
        }
        amounts
    };
    let limits = read(&resources.limits, "limits", problems);
    let requests = read(&resources.requests, "requests", problems);
    for (name, request) in &requests {
        if limits.get(name).is_some_and(|limit| request > limit) {
            problems.add(
                format!("{path}.requests[{name}]"),
                "is larger than the limit",
            );
        }
    }
}

fn quantity(text: &str, path: &str, problems: &mut Problems<'_>) -> Option<i128> {
    match nanos(text).ok() {
        Some(amount) if amount < 0 => {
            problems.add(path, format!("{text:?} is negative"));
            None
        }
        None => {
            problems.add(
                path,
                format!("{text:?} is not a quantity; write a number with an optional suffix, like 100m, 64Mi, 2G"),
            );
            None
        }
        amount => amount,
    }
}

fn one_of(field: &str, value: Option<&str>, allowed: &[&str], problems: &mut Problems<'_>) {
    let value = value.unwrap_or_default();
    if !allowed.contains(&value) {
        let names: Vec<&str> = allowed.iter().filter(|a| !a.is_empty()).copied().collect();
        problems.add(
            field,
            format!("{value:?} is not one of {}", names.join(", ")),
        );
    }
}

fn is_label(text: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    text.len() <= 63 && text.bytes().all(inner) && has_alphanumeric_ends(text)
}

fn is_subdomain(text: &str) -> bool {
    text.len() <= 253
        && text.split('.').all(|part| {
            part.bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
                && has_alphanumeric_ends(part)
        })
}

fn is_uid(text: &str) -> bool {
    text.len() <= 63
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
        && has_alphanumeric_ends(text)
}

/// `[prefix/]name`
fn is_qualified_name(text: &str) -> bool {
    match text.split_once('/') {
        Some((prefix, name)) => is_subdomain(prefix) && is_name_part(name),
        None => is_name_part(text),
    }
}

fn is_name_part(text: &str) -> bool {
    text.len() <= 63
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        && has_alphanumeric_ends(text)
}

fn is_port_name(text: &str) -> bool {
    is_label(text)
        && text.len() <= 15
        && text.bytes().any(|b| b.is_ascii_lowercase())
        && !text.contains("--")
}

fn has_alphanumeric_ends(text: &str) -> bool {
    let end = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
    end(text.as_bytes().first()) && end(text.as_bytes().last())
}
