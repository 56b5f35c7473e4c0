//! One container: name, image, ports, environment, mounts.

use std::collections::BTreeSet;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Container, VolumeMount};

use super::super::Problems;
use super::names::{LABEL, is_label, is_port_name, one_of};
use crate::core::volume_mounts::recursive_read_only;

pub(super) fn fields(container: &Container, path: &str, problems: &mut Problems<'_>) {
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

pub(super) type HostPort = (i32, String, String);

pub(super) fn ports(
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

pub(super) fn environment(container: &Container, path: &str, problems: &mut Problems<'_>) {
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
        if let Some(from) = &variable.value_from {
            let sources = match serde_json::to_value(from) {
                Ok(serde_json::Value::Object(fields)) => fields.len(),
                _ => 0,
            };
            if sources != 1 {
                problems.add(
                    format!("{path}.valueFrom"),
                    format!("has {sources} sources; a value comes from exactly one"),
                );
            }
        }
    }
}

pub(super) fn mounts(
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
        if target.is_empty() || target.contains(':') {
            problems.add(
                format!("{path}.mountPath"),
                format!("{target:?} has to be a path without ':'"),
            );
        }
        // A relative one begins at the container's root.
        if !paths.insert(target.strip_prefix('/').unwrap_or(target)) {
            problems.add(
                format!("{path}.mountPath"),
                format!("{target:?} is used twice in this container"),
            );
        }
        parts(mount, &path, problems);
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

/// Checks the part of its volume that a mount shows, and how far it is read-only.
fn parts(mount: &VolumeMount, path: &str, problems: &mut Problems<'_>) {
    let has = |text: &Option<String>| text.as_ref().is_some_and(|t| !t.is_empty());
    if has(&mount.sub_path) && has(&mount.sub_path_expr) {
        problems.add(format!("{path}.subPathExpr"), "cannot stand beside subPath");
    }
    for (field, value) in [
        ("subPath", &mount.sub_path),
        ("subPathExpr", &mount.sub_path_expr),
    ] {
        let value = value.as_deref().unwrap_or_default();
        if value.starts_with('/') || value.split('/').any(|item| item == "..") {
            problems.add(
                format!("{path}.{field}"),
                format!("{value:?} has to be a relative path without '..'"),
            );
        }
    }
    let modes = ["Disabled", "IfPossible", "Enabled"];
    let Some(mode) = mount.recursive_read_only.as_deref() else {
        return;
    };
    one_of(
        &format!("{path}.recursiveReadOnly"),
        Some(mode),
        &modes,
        problems,
    );
    if modes[1..].contains(&mode)
        && let Err(why) = recursive_read_only(mount, true)
    {
        problems.add(format!("{path}.recursiveReadOnly"), why);
    }
}

/// Restart policy and rules of a container of its own.
pub(super) fn restarts(container: &Container, path: &str, problems: &mut Problems<'_>) {
    if container.restart_policy.is_some() {
        one_of(
            &format!("{path}.restartPolicy"),
            container.restart_policy.as_deref(),
            &["Always", "OnFailure", "Never"],
            problems,
        );
    }
    let rules = container
        .restart_policy_rules
        .as_deref()
        .unwrap_or_default();
    let path = format!("{path}.restartPolicyRules");
    if !rules.is_empty() && container.restart_policy.is_none() {
        problems.add(
            &path,
            "need a restartPolicy of the container beside them, for what no rule is about",
        );
    }
    if rules.len() > 20 {
        problems.add(&path, "has more than 20 entries");
    }
    for (index, rule) in rules.iter().enumerate() {
        let path = format!("{path}[{index}]");
        one_of(
            &format!("{path}.action"),
            Some(&rule.action),
            &["Restart", "RestartAllContainers"],
            problems,
        );
        let Some(codes) = &rule.exit_codes else {
            problems.add(
                format!("{path}.exitCodes"),
                "is missing; say which exit codes the rule is about",
            );
            continue;
        };
        one_of(
            &format!("{path}.exitCodes.operator"),
            Some(&codes.operator),
            &["In", "NotIn"],
            problems,
        );
        let values = codes.values.as_deref().unwrap_or_default();
        if values.is_empty() || values.len() > 255 {
            problems.add(
                format!("{path}.exitCodes.values"),
                format!("has {} entries; it needs 1 to 255", values.len()),
            );
        }
        if let Some(code) = values.iter().find(|code| !(0..=255).contains(*code)) {
            problems.add(
                format!("{path}.exitCodes.values"),
                format!("{code} is not an exit code; they are between 0 and 255"),
            );
        }
    }
}
