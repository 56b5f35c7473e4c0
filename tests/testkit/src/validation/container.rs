//! Containers of pods that are created. Upstream: `validateContainers`, `validateInitContainers`.

use std::collections::BTreeSet;

use serde_json::Value;

use super::formats::{dns_label, entries, is_set, items, qualified_name, quantity, text};
use super::violation::Violations;

/// What kind of container it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Of `containers`.
    Regular,
    /// Of `initContainers`.
    Init,
}

const PROBES: [&str; 3] = ["livenessProbe", "readinessProbe", "startupProbe"];

/// Checks one container. `volumes` are the names of the pod's volumes.
pub(super) fn check(
    field: &str,
    container: &Value,
    kind: Kind,
    volumes: &BTreeSet<&str>,
    found: &mut Violations,
) {
    let name = &container["name"];
    match text(name) {
        "" => found.required(format!("{field}.name"), ""),
        own => found.format(&format!("{field}.name"), name, dns_label(own)),
    }
    let image = text(&container["image"]);
    if image.is_empty() {
        found.required(format!("{field}.image"), "");
    } else if image != image.trim() {
        let why = "must not have leading or trailing whitespace";
        found.invalid(format!("{field}.image"), &container["image"], why);
    }
    for (name, supported) in [
        (
            "terminationMessagePolicy",
            ["File", "FallbackToLogsOnError", ""],
        ),
        ("imagePullPolicy", ["Always", "IfNotPresent", "Never"]),
    ] {
        let (field, value) = (format!("{field}.{name}"), &container[name]);
        if !is_set(value) {
            found.required(field, "");
        } else if !supported.contains(&text(value)) {
            found.not_supported(field, value, &supported);
        }
    }
    ports(field, &container["ports"], found);
    env(field, &container["env"], found);
    mounts(field, container, volumes, found);
    resources(field, &container["resources"], found);
    restart_policy(field, container, found);
    let lives = kind == Kind::Regular || container["restartPolicy"] == "Always";
    if lives {
        for name in PROBES {
            probe(&format!("{field}.{name}"), name, &container[name], found);
        }
    } else {
        let never = PROBES.iter().chain(&["lifecycle"]);
        for name in never.filter(|name| !container[**name].is_null()) {
            let why = "may not be set for init containers without restartPolicy=Always";
            found.forbidden(format!("{field}.{name}"), why);
        }
    }
    security(field, &container["securityContext"], found);
}

/// Finds host ports that are used twice.
pub(super) fn host_ports<'p>(
    field: &str,
    container: &'p Value,
    known: &mut BTreeSet<(&'p str, &'p str, i64)>,
    found: &mut Violations,
) {
    for (index, port) in items(&container["ports"]).iter().enumerate() {
        let Some(number) = port["hostPort"].as_i64().filter(|number| *number != 0) else {
            continue;
        };
        let (protocol, address) = (text(&port["protocol"]), text(&port["hostIP"]));
        if !known.insert((protocol, address, number)) {
            let field = format!("{field}.ports[{index}].hostPort");
            found.duplicate(field, &port["hostPort"]);
        }
    }
}

/// `IsValidUserID`, `IsValidGroupID`.
pub(super) fn id(field: &str, value: &Value, found: &mut Violations) {
    if value
        .as_i64()
        .is_some_and(|id| !(0..=i64::from(i32::MAX)).contains(&id))
    {
        found.invalid(field, value, "must be between 0 and 2147483647, inclusive");
    }
}

fn ports(field: &str, ports: &Value, found: &mut Violations) {
    let mut names = BTreeSet::new();
    for (index, port) in items(ports).iter().enumerate() {
        let field = format!("{field}.ports[{index}]");
        let name = text(&port["name"]);
        if !name.is_empty() {
            let is_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            let is_name = name.len() <= 15
                && name.chars().all(is_word)
                && name.contains(|c: char| c.is_ascii_lowercase())
                && !name.contains("--")
                && !name.starts_with('-')
                && !name.ends_with('-');
            if !is_name {
                let why = "must be at most 15 lower case alphanumeric characters and single hyphens, with a letter";
                found.invalid(format!("{field}.name"), &port["name"], why);
            } else if !names.insert(name) {
                found.duplicate(format!("{field}.name"), &port["name"]);
            }
        }
        for name in ["containerPort", "hostPort"] {
            let number = port[name].as_i64().unwrap_or(0);
            if number == 0 && name == "containerPort" {
                found.required(format!("{field}.containerPort"), "");
            } else if number != 0 && !(1..=65535).contains(&number) {
                let why = "must be between 1 and 65535, inclusive";
                found.invalid(format!("{field}.{name}"), &port[name], why);
            }
        }
        const PROTOCOLS: [&str; 3] = ["SCTP", "TCP", "UDP"];
        match text(&port["protocol"]) {
            "" => found.required(format!("{field}.protocol"), ""),
            known if PROTOCOLS.contains(&known) => {}
            _ => found.not_supported(format!("{field}.protocol"), &port["protocol"], &PROTOCOLS),
        }
    }
}

fn env(field: &str, env: &Value, found: &mut Violations) {
    for (index, variable) in items(env).iter().enumerate() {
        let field = format!("{field}.env[{index}]");
        let name = text(&variable["name"]);
        if name.is_empty() {
            found.required(format!("{field}.name"), "");
        } else if !name
            .bytes()
            .all(|c| (b' '..=b'~').contains(&c) && c != b'=')
        {
            let why = "a valid environment variable name must consist only of printable ASCII characters other than '='";
            found.invalid(format!("{field}.name"), &variable["name"], why);
        }
        let from = &variable["valueFrom"];
        if from.is_null() {
            continue;
        }
        let field = format!("{field}.valueFrom");
        if is_set(&variable["value"]) {
            let why = "may not be specified when `value` is not empty";
            found.invalid(&field, &Value::String(String::new()), why);
        }
        match from.as_object().map_or(0, serde_json::Map::len) {
            0 => {
                let why = "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef` or `secretKeyRef`";
                found.invalid(field, &Value::String(String::new()), why);
            }
            1 => {}
            _ => {
                let why = "may not have more than one field specified at a time";
                found.invalid(field, &Value::String(String::new()), why);
            }
        }
    }
}

fn mounts(field: &str, container: &Value, volumes: &BTreeSet<&str>, found: &mut Violations) {
    let mut paths = BTreeSet::new();
    for (index, mount) in items(&container["volumeMounts"]).iter().enumerate() {
        let field = format!("{field}.volumeMounts[{index}]");
        let (name, path) = (text(&mount["name"]), text(&mount["mountPath"]));
        if name.is_empty() {
            found.required(format!("{field}.name"), "");
        } else if !volumes.contains(name) {
            // Upstream: `field.NotFound`.
            found.invalid(format!("{field}.name"), &mount["name"], "not found");
        }
        if path.is_empty() {
            found.required(format!("{field}.mountPath"), "");
        }
        if !paths.insert(path) {
            let why = "must be unique";
            found.invalid(format!("{field}.mountPath"), &mount["mountPath"], why);
        }
        let sub = |name: &str| text(&mount[name]);
        if !sub("subPath").is_empty() && !sub("subPathExpr").is_empty() {
            let why = "subPathExpr and subPath are mutually exclusive";
            found.invalid(format!("{field}.subPathExpr"), &mount["subPathExpr"], why);
        }
        for name in ["subPath", "subPathExpr"] {
            if sub(name).starts_with('/') || sub(name).split('/').any(|step| step == "..") {
                let why = "must be a relative path without '..'";
                found.invalid(format!("{field}.{name}"), &mount[name], why);
            }
        }
    }
}

fn resources(field: &str, resources: &Value, found: &mut Violations) {
    let read = |list: &str, name: &str| quantity(text(&resources[list][name]));
    for list in ["limits", "requests"] {
        for (name, value) in entries(&resources[list]) {
            let field = format!("{field}.resources.{list}[{name}]");
            let shown = Value::String(name.clone());
            found.format(&field, &shown, qualified_name(name));
            match quantity(text(value)) {
                None => {
                    found.invalid(field, value, "quantities must match the regular expression");
                }
                Some(amount) if amount < 0 => {
                    found.invalid(field, value, "must be greater than or equal to 0");
                }
                Some(_) => {}
            }
        }
    }
    for (name, value) in entries(&resources["requests"]) {
        let limit = read("limits", name);
        let field = format!("{field}.resources.requests");
        let overcommits = (!name.contains('/') || name.contains("kubernetes.io/"))
            && !name.starts_with("hugepages-");
        match (read("requests", name), limit) {
            (Some(asked), Some(limit)) if overcommits && asked > limit => {
                let why = format!("must be less than or equal to {name} limit");
                found.invalid(field, value, why);
            }
            (Some(asked), Some(limit)) if !overcommits && asked != limit => {
                let why = format!("must be equal to {name} limit");
                found.invalid(field, value, why);
            }
            (Some(_), None) if !overcommits => {
                let field = field.replace("requests", "limits");
                found.required(field, "Limit must be set for non overcommitable resources");
            }
            _ => {}
        }
    }
}

/// `validateContainerRestartPolicy`, `validateInitContainerRestartPolicy`: policies and rules of a container's own.
fn restart_policy(field: &str, container: &Value, found: &mut Violations) {
    const POLICIES: [&str; 3] = ["Always", "Never", "OnFailure"];
    let (policy, rules) = (
        &container["restartPolicy"],
        &container["restartPolicyRules"],
    );
    if policy.is_null() {
        if is_set(rules) {
            let why = "must specify restartPolicy when restart rules are used";
            found.required(format!("{field}.restartPolicy"), why);
        }
        return;
    }
    if !POLICIES.contains(&text(policy)) {
        found.not_supported(format!("{field}.restartPolicy"), policy, &POLICIES);
    }
    if items(rules).len() > 20 {
        found.too_long(format!("{field}.restartPolicyRules"), 20);
    }
    for (index, rule) in items(rules).iter().enumerate() {
        let field = format!("{field}.restartPolicyRules[{index}]");
        const ACTIONS: [&str; 2] = ["Restart", "RestartAllContainers"];
        if !ACTIONS.contains(&text(&rule["action"])) {
            found.not_supported(format!("{field}.action"), &rule["action"], &ACTIONS);
        }
        if rule["exitCodes"].is_null() {
            found.required(format!("{field}.exitCodes"), "must be specified");
        } else if !["In", "NotIn"].contains(&text(&rule["exitCodes"]["operator"])) {
            let field = format!("{field}.exitCodes.operator");
            found.not_supported(field, &rule["exitCodes"]["operator"], &["In", "NotIn"]);
        }
    }
}

fn probe(field: &str, name: &str, probe: &Value, found: &mut Violations) {
    if probe.is_null() {
        return;
    }
    const HANDLERS: [&str; 4] = ["exec", "grpc", "httpGet", "tcpSocket"];
    match HANDLERS
        .iter()
        .filter(|handler| !probe[**handler].is_null())
        .count()
    {
        0 => found.required(field, "must specify a handler type"),
        1 => {}
        _ => found.forbidden(field, "may not specify more than 1 handler type"),
    }
    for name in [
        "initialDelaySeconds",
        "timeoutSeconds",
        "periodSeconds",
        "successThreshold",
        "failureThreshold",
    ] {
        if probe[name].as_i64().is_some_and(|number| number < 0) {
            let why = "must be greater than or equal to 0";
            found.invalid(format!("{field}.{name}"), &probe[name], why);
        }
    }
    let successes = &probe["successThreshold"];
    if name != "readinessProbe" && successes.as_i64().unwrap_or(1) != 1 {
        found.invalid(format!("{field}.successThreshold"), successes, "must be 1");
    }
    let grace = &probe["terminationGracePeriodSeconds"];
    if name == "readinessProbe" && !grace.is_null() {
        let why = "must not be set for readinessProbes";
        found.invalid(format!("{field}.terminationGracePeriodSeconds"), grace, why);
    } else if grace.as_i64().is_some_and(|seconds| seconds <= 0) {
        let why = "must be greater than 0";
        found.invalid(format!("{field}.terminationGracePeriodSeconds"), grace, why);
    }
}

fn security(field: &str, context: &Value, found: &mut Violations) {
    for name in ["runAsUser", "runAsGroup"] {
        id(
            &format!("{field}.securityContext.{name}"),
            &context[name],
            found,
        );
    }
    if context["allowPrivilegeEscalation"] == false {
        let field = format!("{field}.securityContext");
        if context["privileged"] == true {
            let why = "cannot set `allowPrivilegeEscalation` to false and `privileged` to true";
            found.invalid(&field, context, why);
        }
        if items(&context["capabilities"]["add"]).contains(&"SYS_ADMIN".into())
            || items(&context["capabilities"]["add"]).contains(&"CAP_SYS_ADMIN".into())
        {
            let why = "cannot set `allowPrivilegeEscalation` to false and `capabilities.Add` CAP_SYS_ADMIN";
            found.invalid(field, context, why);
        }
    }
}
