//! Pods that are created: mirror pods. Upstream: `ValidatePodCreate`, the part of it that a static pod can meet.

use std::collections::BTreeSet;

use serde_json::Value;

use super::container::{self, Kind};
use super::formats::{
    dns_label, dns_subdomain, ip, is_set, items, label_value, qualified_name, text,
};
use super::metadata;
use super::violation::Violations;

/// A pod that is created.
pub(super) fn create(pod: &Value, found: &mut Violations) {
    metadata::create(pod, true, dns_subdomain, found);
    let spec = &pod["spec"];
    let volumes = volumes(&spec["volumes"], found);
    containers(spec, &volumes, found);
    enums(spec, found);
    names(spec, found);
    numbers(spec, found);
    namespaces(spec, found);
    system(spec, found);
    if is_set(&spec["ephemeralContainers"]) {
        found.forbidden("spec.ephemeralContainers", "cannot be set on create");
    }
    if is_set(&spec["nodeName"]) && is_set(&spec["schedulingGates"]) {
        let why = "cannot be set until all schedulingGates have been cleared";
        found.forbidden("spec.nodeName", why);
    }
}

fn containers(spec: &Value, volumes: &BTreeSet<&str>, found: &mut Violations) {
    let regular = items(&spec["containers"]);
    if regular.is_empty() {
        found.required("spec.containers", "");
    }
    let mut names = BTreeSet::new();
    let mut ports = BTreeSet::new();
    for (index, one) in regular.iter().enumerate() {
        let field = format!("spec.containers[{index}]");
        container::check(&field, one, Kind::Regular, volumes, found);
        if !names.insert(text(&one["name"])) {
            found.duplicate(format!("{field}.name"), &one["name"]);
        }
        container::host_ports(&field, one, &mut ports, found);
    }
    for (index, one) in items(&spec["initContainers"]).iter().enumerate() {
        let field = format!("spec.initContainers[{index}]");
        container::check(&field, one, Kind::Init, volumes, found);
        if !names.insert(text(&one["name"])) {
            found.duplicate(format!("{field}.name"), &one["name"]);
        }
        // They run one after the other.
        container::host_ports(&field, one, &mut BTreeSet::new(), found);
    }
    if spec["hostNetwork"] == true {
        for list in ["containers", "initContainers"] {
            for (index, one) in items(&spec[list]).iter().enumerate() {
                for (port, given) in items(&one["ports"]).iter().enumerate() {
                    if given["hostPort"] != given["containerPort"] {
                        let field = format!("spec.{list}[{index}].ports[{port}].containerPort");
                        let why = "must match `hostPort` when `hostNetwork` is true";
                        found.invalid(field, &given["containerPort"], why);
                    }
                }
            }
        }
    }
}

/// Checks volumes. Returns their names.
fn volumes<'v>(volumes: &'v Value, found: &mut Violations) -> BTreeSet<&'v str> {
    let mut names = BTreeSet::new();
    for (index, volume) in items(volumes).iter().enumerate() {
        let field = format!("spec.volumes[{index}]");
        let name = text(&volume["name"]);
        if name.is_empty() {
            found.required(format!("{field}.name"), "");
        } else {
            found.format(&format!("{field}.name"), &volume["name"], dns_label(name));
        }
        if !names.insert(name) {
            found.duplicate(format!("{field}.name"), &volume["name"]);
        }
        match volume
            .as_object()
            .map_or(0, |fields| fields.len().saturating_sub(1))
        {
            0 => found.required(&field, "must specify a volume type"),
            1 => {}
            _ => found.forbidden(&field, "may not specify more than 1 volume type"),
        }
        host_path(&field, &volume["hostPath"], found);
        let source = &volume["image"];
        if source.is_object() && !is_set(&source["reference"]) {
            found.required(format!("{field}.image.reference"), "");
        }
    }
    names
}

fn host_path(field: &str, source: &Value, found: &mut Violations) {
    if !source.is_object() {
        return;
    }
    let path = text(&source["path"]);
    if path.is_empty() {
        found.required(format!("{field}.hostPath.path"), "");
    }
    if path.split('/').any(|step| step == "..") {
        let field = format!("{field}.hostPath.path");
        found.invalid(field, &source["path"], "must not contain '..'");
    }
    const TYPES: [&str; 8] = [
        "",
        "BlockDevice",
        "CharDevice",
        "Directory",
        "DirectoryOrCreate",
        "File",
        "FileOrCreate",
        "Socket",
    ];
    if !TYPES.contains(&text(&source["type"])) {
        found.not_supported(format!("{field}.hostPath.type"), &source["type"], &TYPES);
    }
}

fn enums(spec: &Value, found: &mut Violations) {
    for (name, supported) in [
        ("restartPolicy", &["Always", "OnFailure", "Never"][..]),
        (
            "dnsPolicy",
            &["ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"],
        ),
    ] {
        let field = format!("spec.{name}");
        if !is_set(&spec[name]) {
            found.required(field, "");
        } else if !supported.contains(&text(&spec[name])) {
            found.not_supported(field, &spec[name], supported);
        }
    }
    let os = &spec["os"];
    const SYSTEMS: [&str; 2] = ["linux", "windows"];
    if os.is_object() && !SYSTEMS.contains(&text(&os["name"])) {
        found.not_supported("spec.os.name", &os["name"], &SYSTEMS);
    }
}

fn names(spec: &Value, found: &mut Violations) {
    for name in ["hostname", "subdomain"] {
        if is_set(&spec[name]) {
            let says = dns_label(text(&spec[name]));
            found.format(&format!("spec.{name}"), &spec[name], says);
        }
    }
    for name in [
        "nodeName",
        "priorityClassName",
        "runtimeClassName",
        "serviceAccountName",
    ] {
        if is_set(&spec[name]) {
            let says = dns_subdomain(text(&spec[name]));
            found.format(&format!("spec.{name}"), &spec[name], says);
        }
    }
    metadata::labels("spec.nodeSelector", &spec["nodeSelector"], found);
    for (index, gate) in items(&spec["readinessGates"]).iter().enumerate() {
        let kind = &gate["conditionType"];
        let field = format!("spec.readinessGates[{index}].conditionType");
        found.format(&field, kind, qualified_name(text(kind)));
    }
    for (index, alias) in items(&spec["hostAliases"]).iter().enumerate() {
        let field = format!("spec.hostAliases[{index}]");
        found.format(&format!("{field}.ip"), &alias["ip"], ip(text(&alias["ip"])));
        for (index, name) in items(&alias["hostnames"]).iter().enumerate() {
            let says = dns_subdomain(text(name));
            found.format(&format!("{field}.hostnames[{index}]"), name, says);
        }
    }
    for (index, toleration) in items(&spec["tolerations"]).iter().enumerate() {
        tolerates(&format!("spec.tolerations[{index}]"), toleration, found);
    }
    dns(spec, found);
}

fn dns(spec: &Value, found: &mut Violations) {
    let config = &spec["dnsConfig"];
    let servers = items(&config["nameservers"]);
    if spec["dnsPolicy"] == "None" && servers.is_empty() {
        let why = "must provide at least one DNS nameserver when `dnsPolicy` is None";
        found.required("spec.dnsConfig.nameservers", why);
    }
    if servers.len() > 3 {
        let why = "must not have more than 3 nameservers";
        found.invalid("spec.dnsConfig.nameservers", &config["nameservers"], why);
    }
    for (index, server) in servers.iter().enumerate() {
        let field = format!("spec.dnsConfig.nameservers[{index}]");
        found.format(&field, server, ip(text(server)));
    }
    if items(&config["searches"]).len() > 32 {
        let why = "must not have more than 32 search paths";
        found.invalid("spec.dnsConfig.searches", &config["searches"], why);
    }
    for (index, search) in items(&config["searches"]).iter().enumerate() {
        let name = text(search);
        // Underscores are no DNS names, but they are resolved.
        let plain = name.strip_suffix('.').unwrap_or(name).replace('_', "a");
        if name != "." {
            let field = format!("spec.dnsConfig.searches[{index}]");
            found.format(&field, search, dns_subdomain(&plain));
        }
    }
    for (index, option) in items(&config["options"]).iter().enumerate() {
        if !is_set(&option["name"]) {
            let field = format!("spec.dnsConfig.options[{index}]");
            found.required(field, "must not be empty");
        }
    }
}

fn tolerates(field: &str, toleration: &Value, found: &mut Violations) {
    let (key, operator) = (text(&toleration["key"]), text(&toleration["operator"]));
    if !key.is_empty() {
        found.format(
            &format!("{field}.key"),
            &toleration["key"],
            qualified_name(key),
        );
    } else if operator != "Exists" {
        let why = "operator must be Exists when `key` is empty";
        found.invalid(format!("{field}.operator"), &toleration["operator"], why);
    }
    const EFFECTS: [&str; 3] = ["NoSchedule", "PreferNoSchedule", "NoExecute"];
    if toleration["tolerationSeconds"].is_i64() && toleration["effect"] != "NoExecute" {
        let why = "effect must be 'NoExecute' when `tolerationSeconds` is set";
        found.invalid(format!("{field}.effect"), &toleration["effect"], why);
    }
    let value = &toleration["value"];
    match operator {
        "" | "Equal" => {
            let says = label_value(text(value));
            found.format(&format!("{field}.operator"), value, says);
        }
        "Exists" if is_set(value) => {
            let why = "value must be empty when `operator` is 'Exists'";
            found.invalid(format!("{field}.operator"), value, why);
        }
        "Exists" => {}
        _ => {
            let operators = ["Equal", "Exists"];
            let field = format!("{field}.operator");
            found.not_supported(field, &toleration["operator"], &operators);
        }
    }
    let effect = &toleration["effect"];
    if is_set(effect) && !EFFECTS.contains(&text(effect)) {
        found.not_supported(format!("{field}.effect"), effect, &EFFECTS);
    }
}

fn numbers(spec: &Value, found: &mut Violations) {
    if spec["terminationGracePeriodSeconds"].is_null() {
        found.required("spec.terminationGracePeriodSeconds", "");
    }
    let deadline = &spec["activeDeadlineSeconds"];
    let may = 1..=i64::from(i32::MAX);
    if deadline
        .as_i64()
        .is_some_and(|seconds| !may.contains(&seconds))
    {
        let why = "must be between 1 and 2147483647, inclusive";
        found.invalid("spec.activeDeadlineSeconds", deadline, why);
    }
    for name in ["runAsUser", "runAsGroup", "fsGroup"] {
        let id = &spec["securityContext"][name];
        container::id(&format!("spec.securityContext.{name}"), id, found);
    }
    let groups = items(&spec["securityContext"]["supplementalGroups"]);
    for (index, group) in groups.iter().enumerate() {
        let field = format!("spec.securityContext.supplementalGroups[{index}]");
        container::id(&field, group, found);
    }
}

fn namespaces(spec: &Value, found: &mut Violations) {
    if spec["hostPID"] == true && spec["shareProcessNamespace"] == true {
        let why = "ShareProcessNamespace and HostPID cannot both be enabled";
        found.invalid("spec.shareProcessNamespace", &Value::Bool(true), why);
    }
    if spec["hostUsers"] == false {
        for (field, shown) in [("hostPID", "spec.HostPID"), ("hostIPC", "spec.HostIPC")] {
            if spec[field] == true {
                found.forbidden(shown, "when `hostUsers` is false");
            }
        }
    }
}

/// `validateLinux`: what only Windows has may not be asked of a pod that says it is for Linux.
fn system(spec: &Value, found: &mut Violations) {
    if spec["os"]["name"] != "linux" {
        return;
    }
    let why = "windows options cannot be set for a linux pod";
    if !spec["securityContext"]["windowsOptions"].is_null() {
        found.forbidden("spec.securityContext.windowsOptions", why);
    }
    for list in ["containers", "initContainers"] {
        for (index, one) in items(&spec[list]).iter().enumerate() {
            if !one["securityContext"]["windowsOptions"].is_null() {
                let field = format!("spec.{list}[{index}].securityContext.windowsOptions");
                found.forbidden(field, why);
            }
        }
    }
}
