//! The status of pods. Upstream: `ValidatePodStatusUpdate`.
//!
//! Not here: what dynamic resource allocation says of extended and node-allocatable resources, which no node agent writes.

use serde_json::Value;

use super::formats::{
    dns_subdomain, entries, ip, is_dual_stack, is_set, items, qualified_name, quantity, text,
};
use super::metadata;
use super::violation::Violations;

/// The lists of containers with the lists of their statuses.
const CONTAINERS: [(&str, &str); 3] = [
    ("containers", "containerStatuses"),
    ("initContainers", "initContainerStatuses"),
    ("ephemeralContainers", "ephemeralContainerStatuses"),
];

/// A status that is written over another one.
pub(super) fn update(old: &Value, new: &Value, found: &mut Violations) {
    metadata::update(old, new, found);
    let (had, has) = (&old["status"], &new["status"]);
    conditions(&has["conditions"], found);
    nominated(old, new, found);
    not_negative(
        "status.observedGeneration",
        &has["observedGeneration"],
        found,
    );
    // A server gives every pod its class.
    if is_set(&had["qosClass"]) {
        found.immutable("status.qosClass", &had["qosClass"], &has["qosClass"]);
    }
    for (list, statuses) in CONTAINERS {
        ends(old, new, list, statuses, found);
    }
    claims(&new["spec"]["resourceClaims"], has, found);
    addresses("podIPs", had, has, found);
    host_ips(had, has, found);
    for (list, statuses) in CONTAINERS {
        for (index, status) in items(&has[statuses]).iter().enumerate() {
            let field = format!("status.{statuses}[{index}]");
            if new["spec"]["os"]["name"] != "windows" {
                user(&field, &status["user"]["linux"], found);
            }
            let health = &status["allocatedResourcesStatus"];
            if list == "ephemeralContainers" {
                if is_set(health) {
                    let why = "must not be specified in container status";
                    found.forbidden(format!("{field}.allocatedResourcesStatus"), why);
                }
            } else {
                let mut containers = items(&new["spec"][list]).iter();
                let container = containers.find(|c| c["name"] == status["name"]);
                devices(&field, health, container, found);
            }
            for part in [
                &status["allocatedResources"],
                &status["resources"]["limits"],
                &status["resources"]["requests"],
            ] {
                quantities(&format!("{field}.resources"), part, found);
            }
        }
    }
}

fn not_negative(field: &str, value: &Value, found: &mut Violations) {
    if value.as_i64().is_some_and(|number| number < 0) {
        found.invalid(field, value, "must be a non-negative integer");
    }
}

/// `validatePodConditions`.
fn conditions(conditions: &Value, found: &mut Violations) {
    for (index, condition) in items(conditions).iter().enumerate() {
        let field = format!("status.conditions[{index}]");
        not_negative(
            &format!("{field}.observedGeneration"),
            &condition["observedGeneration"],
            found,
        );
        let says = qualified_name(text(&condition["type"]));
        found.format(&format!("{field}.Type"), &condition["type"], says);
    }
}

/// `status.nominatedNodeName` is the scheduler's, and over when the pod has a node.
fn nominated(old: &Value, new: &Value, found: &mut Violations) {
    const FIELD: &str = "status.nominatedNodeName";
    let name = &new["status"]["nominatedNodeName"];
    if !is_set(name) || *name == old["status"]["nominatedNodeName"] {
        return;
    }
    found.format(FIELD, name, dns_subdomain(text(name)));
    if is_set(&old["spec"]["nodeName"]) {
        let why = "may not be set on pods that are already bound to a node";
        found.forbidden(FIELD, why);
    }
}

/// `ValidateContainerStateTransition` and its like for init and ephemeral containers: an end that the restart policy makes
/// final stays.
fn ends(old: &Value, new: &Value, list: &str, statuses: &str, found: &mut Violations) {
    let spec = &old["spec"];
    let is_ephemeral = list == "ephemeralContainers";
    if !is_ephemeral && all_could_restart(spec) {
        return;
    }
    for (index, before) in items(&old["status"][statuses]).iter().enumerate() {
        let Some(exit_code) = before["state"]["terminated"]["exitCode"].as_i64() else {
            continue;
        };
        let mut now = items(&new["status"][statuses]).iter();
        let taken_back =
            now.any(|now| now["name"] == before["name"] && now["state"]["terminated"].is_null());
        let container = items(&spec[list])
            .iter()
            .find(|c| c["name"] == before["name"]);
        let restarts = !is_ephemeral && container.is_some_and(|c| restarts(c, spec, exit_code));
        if taken_back && !restarts {
            found.forbidden(
                format!("status.{statuses}[{index}].state"),
                "may not be transitioned to non-terminated state",
            );
        }
    }
}

/// `AllContainersCouldRestart`.
fn all_could_restart(spec: &Value) -> bool {
    let containers = ["initContainers", "containers"].map(|list| items(&spec[list]));
    let mut rules =
        (containers.into_iter().flatten()).flat_map(|c| items(&c["restartPolicyRules"]));
    rules.any(|rule| rule["action"] == "RestartAllContainers")
}

/// `ContainerShouldRestart`.
fn restarts(container: &Value, spec: &Value, exit_code: i64) -> bool {
    let own = container["restartPolicy"].as_str();
    if own.is_some() {
        let met = items(&container["restartPolicyRules"]).iter().find(|rule| {
            let listed = items(&rule["exitCodes"]["values"])
                .iter()
                .any(|v| *v == exit_code);
            match rule["exitCodes"]["operator"].as_str() {
                Some("In") => listed,
                Some("NotIn") => !listed,
                _ => false,
            }
        });
        if met.is_some_and(|rule| rule["action"] == "Restart") {
            return true;
        }
    }
    match own.or_else(|| spec["restartPolicy"].as_str()) {
        Some("Never") => false,
        Some("OnFailure") => exit_code != 0,
        _ => true,
    }
}

/// `validatePodResourceClaimStatuses`.
fn claims(claims: &Value, status: &Value, found: &mut Violations) {
    let all = items(&status["resourceClaimStatuses"]);
    for (index, claim) in all.iter().enumerate() {
        let (name, field) = (
            &claim["name"],
            format!("status.resourceClaimStatuses[{index}]"),
        );
        if items(claims).iter().all(|claim| claim["name"] != *name) {
            let why = "must match the name of an entry in `spec.resourceClaims`";
            found.invalid(format!("{field}.name"), name, why);
        }
        if all[..index].iter().any(|before| before["name"] == *name) {
            found.duplicate(format!("{field}.name"), name);
        }
        let of = &claim["resourceClaimName"];
        if !of.is_null() {
            let says = dns_subdomain(text(of));
            found.format(&format!("{field}.resourceClaimName"), of, says);
        }
    }
}

/// Addresses are valid, or were there before, and at most one of each family.
fn addresses(list: &str, had: &Value, has: &Value, found: &mut Violations) {
    let field = format!("status.{list}");
    let known = items(&had[list]);
    let all = items(&has[list]);
    for (index, address) in all.iter().enumerate() {
        let value = &address["ip"];
        if known.iter().all(|known| known["ip"] != *value) {
            found.format(&format!("{field}[{index}]"), value, ip(text(value)));
        }
    }
    if !is_dual_stack(all.iter().map(|address| text(&address["ip"]))) {
        let why = "may specify no more than one IP for each IP family";
        found.invalid(field, &has[list], why);
    }
}

/// `validateHostIPs`.
fn host_ips(had: &Value, has: &Value, found: &mut Violations) {
    let Some(first) = items(&has["hostIPs"]).first() else {
        return;
    };
    if text(&first["ip"]) != text(&has["hostIP"]) {
        let why = "must be equal to `hostIP`";
        found.invalid("status.hostIPs[0].ip", &first["ip"], why);
    }
    addresses("hostIPs", had, has, found);
}

/// `validateLinuxContainerUser`.
fn user(field: &str, user: &Value, found: &mut Violations) {
    let mut id = |field: String, value: &Value| {
        if value
            .as_i64()
            .is_some_and(|id| !(0..=i64::from(i32::MAX)).contains(&id))
        {
            found.invalid(field, value, "must be between 0 and 2147483647, inclusive");
        }
    };
    id(format!("{field}.user.linux.uid"), &user["uid"]);
    id(format!("{field}.user.linux.gid"), &user["gid"]);
    for (index, group) in items(&user["supplementalGroups"]).iter().enumerate() {
        id(
            format!("{field}.user.linux.supplementalGroups[{index}]"),
            group,
        );
    }
}

/// `validateContainerStatusAllocatedResourcesStatus`: what is said of the health of devices.
fn devices(field: &str, health: &Value, container: Option<&Value>, found: &mut Violations) {
    const HEALTH: [&str; 3] = ["Healthy", "Unhealthy", "Unknown"];
    const MESSAGE: usize = 1024;
    for (index, resource) in items(health).iter().enumerate() {
        let field = format!("{field}.allocatedResourcesStatus[{index}]");
        let name = text(&resource["name"]);
        if let Some(container) = container {
            let is_asked = match name.strip_prefix("claim:") {
                Some(claim) => items(&container["resources"]["claims"])
                    .iter()
                    .any(|asked| {
                        let of = text(&asked["name"]);
                        match text(&asked["request"]) {
                            "" => claim == of,
                            request => claim == format!("{of}/{request}"),
                        }
                    }),
                None => !container["resources"]["requests"][name].is_null(),
            };
            if !is_asked {
                let why = "must match one of the container's resource requests or claims";
                found.invalid(format!("{field}.name"), &resource["name"], why);
            }
        }
        let units = items(&resource["resources"]);
        for (index, unit) in units.iter().enumerate() {
            let field = format!("{field}.resources[{index}]");
            if !HEALTH.contains(&text(&unit["health"])) {
                found.not_supported(format!("{field}.health"), &unit["health"], &HEALTH);
            }
            match unit["message"].as_str() {
                Some("") => {
                    found.required(format!("{field}.message"), "must be non-empty if specified");
                }
                Some(message) if message.len() > MESSAGE => {
                    found.too_long(format!("{field}.message"), MESSAGE);
                }
                _ => {}
            }
            let is_known = |before: &Value| before["resourceID"] == unit["resourceID"];
            if units[..index].iter().any(is_known) {
                found.duplicate(format!("{field}.resourceID"), &unit["resourceID"]);
            }
        }
    }
}

/// What is no quantity cannot be decoded.
fn quantities(field: &str, list: &Value, found: &mut Violations) {
    for (name, value) in entries(list) {
        if quantity(text(value)).is_none() {
            let why = "quantities must match the regular expression";
            found.invalid(format!("{field}[{name}]"), value, why);
        }
    }
}
