//! One line per pod, as `kubectl get pods -A` would show it, with what only the agent knows.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1 as api;
use serde_json::{Value, json};

use super::rows::{about, time};
use super::{PodIndex, Row};
use crate::core::state::{AdmissionDecision, ContainerRecord, State, WorkerPhase};
use crate::types::containers::containers_of;
use crate::types::{ContainerKind, PodExt, PodUid};

/// Every pod that the sources want, that has a worker, or of which the runtime shows something.
pub(super) fn rows(state: &State, index: &PodIndex) -> Vec<Row> {
    let uids: BTreeSet<&str> = state
        .pods
        .keys()
        .chain(state.workers.keys())
        .chain(state.statuses.keys())
        .chain(state.pleg.keys())
        .map(|uid| &**uid)
        .collect();
    let mut rows: Vec<Row> = uids.into_iter().map(|uid| row(state, index, uid)).collect();
    let text = |row: &Row, field: &str| {
        row.get(field)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    rows.sort_by_cached_key(|row| (text(row, "namespace"), text(row, "name"), text(row, "uid")));
    rows
}

/// `status.phase`; without a status, `Pending` for a pod that is wanted and `Unknown` for another.
pub(super) fn phase<'a>(state: &'a State, uid: &PodUid) -> &'a str {
    let status = state.statuses.get(uid.as_str());
    match status.and_then(|v| v.record.status.phase.as_deref()) {
        Some(phase) => phase,
        None if state.pods.contains_key(uid.as_str()) => "Pending",
        None => "Unknown",
    }
}

fn row(state: &State, index: &PodIndex, uid: &str) -> Row {
    let pod = state.pods.get(uid).map(|v| &v.record);
    let status = state.statuses.get(uid).map(|v| &*v.record.status);
    let worker = state.workers.get(uid).map(|v| &v.record);
    let runtime = state.pleg.get(uid).map(|v| &v.record.status);
    let admission = state.admissions.get(uid).map(|v| &v.record.decision);

    let containers = status.and_then(|s| s.container_statuses.as_ref());
    let sidecars: BTreeSet<String> = pod.map_or_else(BTreeSet::new, |pod| {
        let all = containers_of(&pod.pod);
        let sidecars = all.filter(|c| c.kind == ContainerKind::Sidecar);
        sidecars.map(|c| c.container.name.clone()).collect()
    });
    let inits = status.and_then(|s| s.init_container_statuses.as_deref());
    let counted = inits.unwrap_or_default().iter();
    let counted = counted.filter(|c| sidecars.contains(&c.name));
    let ready = containers
        .into_iter()
        .flatten()
        .chain(counted)
        .filter(|c| c.ready)
        .count();
    let total = pod.map_or_else(
        || containers.map_or(0, Vec::len),
        |pod| pod.pod.containers().len() + sidecars.len(),
    );
    let prefix = format!("{uid}/");
    let restarts: u64 = state
        .with_prefix::<ContainerRecord>(&prefix)
        .map(|(_, record)| u64::from(record.restart_count))
        .sum();
    let ip = status
        .and_then(|s| s.pod_ip.clone())
        .or_else(|| runtime.and_then(|r| r.ips.first().cloned()));
    let seen = pod
        .map(|pod| pod.first_seen)
        .or_else(|| worker.map(|w| w.queued));

    let mut row = about(index, uid, uid);
    row.insert("ready".into(), json!(ready));
    row.insert("containers".into(), json!(total));
    row.insert("phase".into(), json!(phase(state, &PodUid::new(uid))));
    row.insert(
        "status".into(),
        json!(shown_status(
            pod.map(|pod| &*pod.pod),
            status,
            worker.map(|w| &w.phase),
            admission,
        )),
    );
    row.insert("restarts".into(), json!(restarts));
    row.insert("firstSeen".into(), seen.map_or(Value::Null, time));
    row.insert("ip".into(), json!(ip));
    row.insert(
        "source".into(),
        pod.map_or(Value::Null, |pod| json!(pod.source.as_str())),
    );
    row.insert(
        "worker".into(),
        worker.map_or(Value::Null, |w| json!(super::rows::phase_name(&w.phase))),
    );
    row.insert(
        "admission".into(),
        json!(admission.map(|decision| match decision {
            AdmissionDecision::Admitted => "Admitted",
            AdmissionDecision::Rejected { .. } => "Rejected",
        })),
    );
    // Nothing is done any more for a pod that is finished, whatever an earlier agent left queued.
    let finished = worker.is_some_and(|w| matches!(w.phase, WorkerPhase::Finished { .. }));
    let queued = state.queue.get(uid).filter(|_| !finished);
    let due = queued.map(|v| v.record.due);
    row.insert("nextSync".into(), due.map_or(Value::Null, time));
    row
}

/// Returns kubectl's status text of a pod with pending init containers. It describes the first one that is not
/// complete.
fn initializing(status: &api::PodStatus, pod: Option<&api::Pod>) -> Option<String> {
    let all = status.init_container_statuses.as_deref()?;
    for (done, container) in all.iter().enumerate() {
        let state = container.state.clone().unwrap_or_default();
        if state.terminated.as_ref().is_some_and(|t| t.exit_code == 0) {
            continue;
        }
        let is_sidecar = pod.is_some_and(|pod| {
            let mut inits = containers_of(pod);
            inits.any(|c| c.kind == ContainerKind::Sidecar && c.container.name == container.name)
        });
        if is_sidecar && container.started == Some(true) {
            continue;
        }
        if let Some(end) = &state.terminated {
            return Some(format!("Init:{}", reason_of(end)));
        }
        let reason = state.waiting.and_then(|w| w.reason);
        return Some(match reason {
            Some(reason) if reason != "PodInitializing" => format!("Init:{reason}"),
            _ => format!("Init:{done}/{}", all.len()),
        });
    }
    None
}

fn reason_of(end: &api::ContainerStateTerminated) -> String {
    match &end.reason {
        Some(reason) => reason.clone(),
        None => format!("ExitCode:{}", end.exit_code),
    }
}

/// kubectl's STATUS column.
fn shown_status(
    pod: Option<&api::Pod>,
    status: Option<&api::PodStatus>,
    worker: Option<&WorkerPhase>,
    admission: Option<&AdmissionDecision>,
) -> String {
    if let Some(AdmissionDecision::Rejected { reason, .. }) = admission {
        return reason.clone();
    }
    let phase = status.and_then(|s| s.phase.as_deref());
    let ended = matches!(phase, Some("Succeeded" | "Failed"));
    if let Some(WorkerPhase::Terminating { .. } | WorkerPhase::Terminated { .. }) = worker
        && !ended
    {
        return "Terminating".to_owned();
    }
    if let Some(reason) = status.and_then(|s| s.reason.clone()) {
        return reason;
    }
    if let Some(initializing) = status.and_then(|s| initializing(s, pod)) {
        return initializing;
    }
    let containers = status.and_then(|s| s.container_statuses.as_deref());
    for container in containers.unwrap_or_default() {
        let Some(state) = &container.state else {
            continue;
        };
        if let Some(waiting) = &state.waiting
            && let Some(reason) = &waiting.reason
        {
            return reason.clone();
        }
        if let Some(terminated) = &state.terminated {
            return reason_of(terminated);
        }
    }
    match phase {
        Some(phase) => phase.to_owned(),
        None if pod.is_some() => "Pending".to_owned(),
        None => "Unknown".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_status_is_that_of_kubectl() {
        let pod: api::Pod = serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "ns", "uid": "u1"},
            "spec": {
                "initContainers": [{"name": "a"}, {"name": "side", "restartPolicy": "Always"}, {"name": "b"}],
                "containers": [{"name": "main"}],
            },
        }))
        .unwrap();
        let container = |name: &str, started: bool, state: Value| {
            json!({"name": name, "image": "i", "imageID": "", "ready": false, "restartCount": 0,
                "started": started, "state": state})
        };
        let end =
            |code: i32, reason: &str| json!({"terminated": {"exitCode": code, "reason": reason}});
        let waiting = |reason: &str| json!({"waiting": {"reason": reason}});
        let running = || json!({"running": {}});
        let a = || container("a", false, end(0, "Completed"));
        let side = |started| container("side", started, running());
        let initializing = || container("b", false, waiting("PodInitializing"));
        for (inits, main, want) in [
            (
                vec![container("a", false, waiting("PodInitializing"))],
                waiting("PodInitializing"),
                "Init:0/1",
            ),
            (
                vec![container("a", false, running()), initializing()],
                waiting("PodInitializing"),
                "Init:0/2",
            ),
            (
                vec![a(), side(false), initializing()],
                waiting("PodInitializing"),
                "Init:1/3",
            ),
            (
                vec![a(), side(true), initializing()],
                waiting("PodInitializing"),
                "Init:2/3",
            ),
            (
                vec![container("a", false, waiting("CrashLoopBackOff"))],
                waiting("PodInitializing"),
                "Init:CrashLoopBackOff",
            ),
            (
                vec![container("a", false, end(3, "Error"))],
                waiting("PodInitializing"),
                "Init:Error",
            ),
            (
                vec![a(), side(true), container("b", false, end(0, "Completed"))],
                waiting("ContainerCreating"),
                "ContainerCreating",
            ),
            (vec![a(), side(true)], running(), "Pending"),
        ] {
            let status = serde_json::from_value(json!({
                "phase": "Pending", "initContainerStatuses": inits,
                "containerStatuses": [container("main", false, main)],
            }))
            .unwrap();
            assert_eq!(shown_status(Some(&pod), Some(&status), None, None), want);
        }
        assert_eq!(shown_status(Some(&pod), None, None, None), "Pending");
        assert_eq!(shown_status(None, None, None, None), "Unknown");
    }
}
