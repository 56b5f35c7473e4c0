//! Pods with everything in play, init containers, a sidecar, probes on it and on the main container, and what is told
//! of them, in lines that can be compared.
#![allow(dead_code, reason = "each test uses another part of it")]

use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, PodStatus};
use serde_json::{Value, json};

/// Image of every container.
pub const IMAGE: &str = "holdfast.local/busybox:1";

/// A container without anything.
pub fn plain(name: &str) -> Value {
    json!({"name": name, "image": IMAGE, "command": ["sh"]})
}

/// An exec probe: three failures make a failure, of a startup probe 30.
fn probe(command: &str, period: u64) -> Value {
    let failures = if command.ends_with("-up") { 30 } else { 3 };
    json!({"exec": {"command": [command]}, "periodSeconds": period, "failureThreshold": failures})
}

/// A container with a startup, a readiness and a liveness probe: `<name>-up`, `<name>-ready`, `<name>-alive`.
pub fn probed(name: &str, period: u64) -> Value {
    let mut container = plain(name);
    container["startupProbe"] = probe(&format!("{name}-up"), period);
    container["readinessProbe"] = probe(&format!("{name}-ready"), period);
    container["livenessProbe"] = probe(&format!("{name}-alive"), period);
    container
}

/// A sidecar with all probes.
pub fn sidecar(name: &str, period: u64) -> Value {
    let mut container = probed(name, period);
    container["restartPolicy"] = "Always".into();
    container
}

/// Init containers `i1` and `i2`, the sidecar `side` between them, `main`; both of the latter with all probes, every
/// `period` seconds.
pub fn rich_every(policy: &str, period: u64) -> Value {
    json!({
        "restartPolicy": policy,
        "terminationGracePeriodSeconds": 5,
        "initContainers": [plain("i1"), sidecar("side", period), plain("i2")],
        "containers": [probed("main", period)],
    })
}

/// A container of a spec.
pub fn member<'a>(spec: &'a mut Value, name: &str) -> &'a mut Value {
    let lists = ["initContainers", "containers"];
    let (list, at) = lists
        .iter()
        .find_map(|list| {
            let all = spec[*list].as_array()?;
            Some((*list, all.iter().position(|c| c["name"] == name)?))
        })
        .unwrap();
    &mut spec[list][at]
}

fn state(state: Option<&ContainerState>) -> String {
    let Some(state) = state else {
        return "nothing".to_owned();
    };
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    match (&state.running, &state.terminated, &state.waiting) {
        (Some(_), None, None) => "running".to_owned(),
        (None, Some(end), None) => format!("ended {} {}", end.exit_code, text(&end.reason)),
        (None, None, Some(wait)) => format!("waits {}", text(&wait.reason)),
        _ => format!("{state:?}"),
    }
}

/// One container status in a line: `main running x0 ready started, before: ended 3 Error`.
fn line(status: &ContainerStatus) -> String {
    let mut line = format!(
        "{} {} x{}",
        status.name,
        state(status.state.as_ref()),
        status.restart_count
    );
    if status.ready {
        line += " ready";
    }
    if status.started == Some(true) {
        line += " started";
    }
    let last = status.last_state.as_ref();
    if last.is_some_and(|s| *s != ContainerState::default()) {
        line += &format!(", before: {}", state(last));
    }
    line
}

/// Phase, conditions and all container statuses, without times and IDs.
pub fn summary(status: &PodStatus) -> Vec<String> {
    let condition = |name: &str| {
        let all = status.conditions.iter().flatten();
        let found = all.into_iter().find(|c| c.type_ == name);
        found.is_some_and(|c| c.status == "True")
    };
    let mut first = status.phase.clone().unwrap_or_default();
    if let Some(reason) = &status.reason {
        first += &format!(" {reason}");
    }
    for name in ["Initialized", "ContainersReady", "Ready"] {
        if condition(name) {
            first += &format!(" {name}");
        }
    }
    let init = status.init_container_statuses.iter().flatten();
    let main = status.container_statuses.iter().flatten();
    let mut lines = vec![first];
    lines.extend(init.chain(main).map(line));
    lines
}

/// Of a pod of [`rich_every`] that is up.
pub const UP: [&str; 5] = [
    "Running Initialized ContainersReady Ready",
    "i1 ended 0 Completed x0 ready",
    "side running x0 ready started",
    "i2 ended 0 Completed x0 ready",
    "main running x0 ready started",
];
