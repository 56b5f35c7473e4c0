//! What kube-apiserver 1.36 refuses of what a node agent writes.
//!
//! In: the object as it would be stored. Out: the field and the reason of the first violation. What an agent cannot get
//! wrong is not checked.

use serde_json::Value;

/// The field, and what is wrong with it.
pub(super) type Violation = (String, String);

/// `ValidateNode`: at creation and at each write of the main resource, not of the status.
pub(super) fn node(node: &Value) -> Option<Violation> {
    let capacity = node["status"]["nodeInfo"]["swap"]["capacity"].as_i64()?;
    (capacity <= 0).then(|| {
        (
            "metadata.nodeSwapStatus.capacity".to_owned(),
            format!("Invalid value: {capacity}: must be greater than zero"),
        )
    })
}

/// `ValidatePodStatusUpdate`: the addresses of the host, and containers that ended for good.
pub(super) fn pod_status(old: &Value, new: &Value) -> Option<Violation> {
    host_ips(&new["status"])
        .or_else(|| ends(old, new, "containers", "containerStatuses"))
        .or_else(|| ends(old, new, "initContainers", "initContainerStatuses"))
        .or_else(|| {
            ends(
                old,
                new,
                "ephemeralContainers",
                "ephemeralContainerStatuses",
            )
        })
}

/// `ValidateHostIPs`.
fn host_ips(status: &Value) -> Option<Violation> {
    let first = &status["hostIPs"].as_array()?.first()?["ip"];
    (*first != status["hostIP"]).then(|| {
        (
            "status.hostIPs[0].ip".to_owned(),
            format!("Invalid value: {first}: must be equal to `hostIP`"),
        )
    })
}

/// `ValidateContainerStateTransition` and its like for init and ephemeral containers.
fn ends(old: &Value, new: &Value, list: &str, statuses: &str) -> Option<Violation> {
    let all = |pod: &Value| {
        pod["status"][statuses]
            .as_array()
            .cloned()
            .unwrap_or_default()
    };
    let new = all(new);
    for (index, before) in all(old).iter().enumerate() {
        let Some(exit_code) = before["state"]["terminated"]["exitCode"].as_i64() else {
            continue;
        };
        let taken_back = (new.iter())
            .any(|now| now["name"] == before["name"] && now["state"]["terminated"].is_null());
        let containers = old["spec"][list].as_array();
        let container = containers.and_then(|all| all.iter().find(|c| c["name"] == before["name"]));
        let restarts = list != "ephemeralContainers"
            && container.is_some_and(|c| should_restart(c, &old["spec"], exit_code));
        if taken_back && !restarts {
            return Some((
                format!("status.{statuses}[{index}].state"),
                "Forbidden: may not be transitioned to non-terminated state".to_owned(),
            ));
        }
    }
    None
}

/// `ContainerShouldRestart`.
fn should_restart(container: &Value, spec: &Value, exit_code: i64) -> bool {
    let own = container["restartPolicy"].as_str();
    if own.is_some() {
        let rules = container["restartPolicyRules"].as_array();
        let met = rules.into_iter().flatten().find(|rule| {
            let values = rule["exitCodes"]["values"].as_array();
            let listed = values.is_some_and(|all| all.iter().any(|v| *v == exit_code));
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
