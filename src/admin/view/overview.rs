//! One line per pod, as `kubectl get pods -A` would show it, with what only the agent knows.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1 as api;
use serde_json::{Value, json};

use super::rows::{about, time};
use super::{PodIndex, Row};
use crate::core::state::{AdmissionDecision, ContainerRecord, State, WorkerPhase};
use crate::types::{PodExt, PodUid};

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
    let ready = containers.map_or(0, |c| c.iter().filter(|c| c.ready).count());
    let total = pod.map_or_else(
        || containers.map_or(0, Vec::len),
        |pod| pod.pod.containers().len(),
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
            status,
            worker.map(|w| &w.phase),
            admission,
            pod.is_some()
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

/// kubectl's STATUS column.
fn shown_status(
    status: Option<&api::PodStatus>,
    worker: Option<&WorkerPhase>,
    admission: Option<&AdmissionDecision>,
    wanted: bool,
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
            return match &terminated.reason {
                Some(reason) => reason.clone(),
                None => format!("ExitCode:{}", terminated.exit_code),
            };
        }
    }
    match phase {
        Some(phase) => phase.to_owned(),
        None if wanted => "Pending".to_owned(),
        None => "Unknown".to_owned(),
    }
}
