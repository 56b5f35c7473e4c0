//! Tables of how the node defends itself: what it is short of and who went for it, which images it keeps, and its shutdowns.

use std::collections::HashMap;
use std::time::Duration;

use serde_json::{Value, json};

use super::{PodIndex, Row, rows};
use crate::core::image_gc::report::{self, Judged};
use crate::core::pressure::report::{Report, ThresholdReport, condition_names};
use crate::core::shutdown::{self, Inhibitor, ManagerRecord, ShutdownRecord};
use crate::core::state::{
    AdmissionDecision, AdmissionRecord, ImageRecord, PodRecord, SignalRecord, State, WorkerPhase,
    WorkerRecord,
};
use crate::images::qualified;
use crate::types::{PodUid, Stamp};

/// Fields of [`pressure`], beside the key.
const PRESSURE_FIELDS: [&str; 19] = [
    "type",
    "status",
    "signal",
    "threshold",
    "graceSeconds",
    "minimumReclaim",
    "quantity",
    "available",
    "capacity",
    "observed",
    "since",
    "last",
    "ended",
    "pod",
    "candidates",
    "used",
    "request",
    "priority",
    "why",
];

fn row(key: &str, fields: Value, all: &[&str]) -> Row {
    let mut row = Row::new();
    row.insert("key".to_owned(), json!(key));
    for field in all {
        let value = fields.get(field).cloned().unwrap_or(Value::Null);
        row.insert((*field).to_owned(), value);
    }
    row
}

fn optional(at: Option<Stamp>) -> Value {
    at.map_or(Value::Null, rows::time)
}

/// The thresholds with what was observed, the conditions, the last removal of garbage and the last pod that was chosen.
pub(super) fn pressure(state: &State) -> Vec<Row> {
    let report = Report::of(state);
    let mut rows: Vec<Row> = report
        .thresholds
        .iter()
        .map(|threshold| of_threshold(state, &report, threshold))
        .collect();
    for condition in condition_names() {
        let record = state.record::<SignalRecord>(condition);
        let fields = json!({
            "type": "Condition",
            "status": if record.is_some() { "True" } else { "False" },
            "since": optional(record.map(|record| record.first)),
            "last": optional(record.map(|record| record.last)),
        });
        rows.push(row(condition, fields, &PRESSURE_FIELDS));
    }
    if let Some(reclaim) = &report.last_reclaim {
        let status = match (reclaim.ended, reclaim.removed) {
            (None, _) => "UnderWay",
            (Some(_), Some(true)) => "Done",
            (Some(_), _) => "Failed",
        };
        let fields = json!({
            "type": "Reclaim",
            "status": status,
            "threshold": reclaim.threshold,
            "since": rows::time(reclaim.began),
            "ended": optional(reclaim.ended),
        });
        rows.push(row("lastReclaim", fields, &PRESSURE_FIELDS));
    }
    if let Some(victim) = &report.last_victim {
        let worker = state.record::<WorkerRecord>(victim.uid.as_str());
        let status = worker.map_or("Gone", |worker| rows::phase_name(&worker.phase));
        let fields = json!({
            "type": "Victim",
            "status": status,
            "threshold": victim.threshold,
            "graceSeconds": victim.grace_seconds,
            "since": rows::time(victim.at),
            "pod": {"uid": victim.uid, "namespace": victim.namespace, "name": victim.name},
            "candidates": victim.candidates,
            "used": victim.used,
            "request": victim.request,
            "priority": victim.priority,
            "why": victim.why,
        });
        rows.push(row("lastVictim", fields, &PRESSURE_FIELDS));
    }
    rows
}

fn of_threshold(state: &State, report: &Report, threshold: &ThresholdReport) -> Row {
    let figure = report.observed.get(&threshold.signal);
    let record = state.record::<SignalRecord>(&threshold.key);
    let grace = Duration::from_secs(threshold.grace_seconds.unwrap_or(0));
    let status = match (record, figure) {
        (Some(record), _) if record.last.since(record.first) < grace => "InGracePeriod",
        (Some(_), _) => "Met",
        (None, Some(_)) => "NotMet",
        (None, None) => "Unknown",
    };
    let observed = figure.and(report.observed_at);
    let fields = json!({
        "type": "Threshold",
        "status": status,
        "signal": threshold.signal,
        "threshold": threshold.value,
        "graceSeconds": threshold.grace_seconds,
        "minimumReclaim": threshold.minimum_reclaim,
        "quantity": threshold.quantity,
        "available": figure.map(|figure| figure.available),
        "capacity": figure.map(|figure| figure.capacity),
        "observed": optional(observed),
        "since": optional(record.map(|record| record.first)),
        "last": optional(record.map(|record| record.last)),
    });
    row(&threshold.key, fields, &PRESSURE_FIELDS)
}

/// Key of the object from which rows of images are completed.
pub(super) const JUDGEMENT: &str = report::KEY;

/// Adds to the rows of images what garbage collection last made of them.
pub(super) fn judge(state: &State, rows: &mut [Row]) {
    let report = report::Report::of(state);
    let mut known: HashMap<&str, &Judged> = HashMap::new();
    for image in &report.images {
        known.insert(&image.id, image);
        known.extend(image.names.iter().map(|name| (name.as_str(), image)));
    }
    for row in rows {
        let key = row.get("key").and_then(Value::as_str).unwrap_or_default();
        let record = state.record::<ImageRecord>(key);
        let by_name = || known.get(qualified(key).as_str()).copied();
        let judged = known.get(key).copied().or_else(by_name);
        // When it may go, if nothing needs it until then.
        let unused = judged.filter(|image| image.kept.is_none()).and(record);
        let after = |at: Stamp, seconds: u64| rows::time(at.plus(Duration::from_secs(seconds)));
        let may_go = unused.map(|of| after(of.first_seen, report.minimum_age_seconds));
        let is_aging = report.maximum_age_seconds > 0;
        let too_old = unused
            .filter(|_| is_aging)
            .map(|of| after(of.last_used, report.maximum_age_seconds));
        let is_pinned = judged.is_some_and(|image| image.pinned);
        let fields = [
            ("size", json!(judged.map(|image| image.size))),
            (
                "kept",
                json!(judged.and_then(|image| image.kept.as_deref())),
            ),
            ("order", json!(judged.and_then(|image| image.order))),
            ("mayGo", may_go.unwrap_or(Value::Null)),
            ("tooOld", too_old.unwrap_or(Value::Null)),
        ];
        if is_pinned && let Some(Value::Array(pins)) = row.get_mut("pins") {
            pins.push(json!("runtime"));
        }
        for (field, value) in fields {
            row.insert(field.to_owned(), value);
        }
    }
}

/// Fields of [`shutdown()`], beside the key.
const SHUTDOWN_FIELDS: [&str; 12] = [
    "state",
    "by",
    "begun",
    "deadline",
    "ended",
    "cancelled",
    "inhibitor",
    "inhibitorSince",
    "problem",
    "periods",
    "podsLeft",
    "unreported",
];

/// One row: the shutdown of this boot, or the last one, the lock that delays it, the groups, and the pods that are left.
pub(super) fn shutdown(state: &State, index: &PodIndex) -> Vec<Row> {
    let Some(boot) = state.meta().map(|meta| meta.boot.id()) else {
        return Vec::new();
    };
    let record = ShutdownRecord::of(state);
    let in_force = record.filter(|record| record.begun.boot == boot && record.cancelled.is_none());
    let status = match in_force {
        None => "Up",
        Some(ShutdownRecord { ended: None, .. }) => "ShuttingDown",
        Some(_) => "Ended",
    };
    let by = |record: ShutdownRecord| match record.local {
        true => "drain-local",
        false => "machine",
    };
    let (manager, since) = match ManagerRecord::of(state) {
        Some((manager, since)) => (manager, Some(since)),
        None => (ManagerRecord::default(), None),
    };
    let left = pods_left(state, index);
    let inhibitor = match manager.lock.state {
        Inhibitor::Unused => "Unused",
        Inhibitor::Missing => "Missing",
        Inhibitor::Held => "Held",
        Inhibitor::Released => "Released",
    };
    let groups = manager.groups.iter();
    let periods =
        groups.map(|(priority, seconds)| json!({"priority": priority, "graceSeconds": seconds}));
    let unreported = unreported(state);
    let fields = json!({
        "state": status,
        "by": record.map(by),
        "begun": optional(record.map(|record| record.begun)),
        "deadline": optional(record.map(|record| record.deadline)),
        "ended": optional(record.and_then(|record| record.ended)),
        "cancelled": optional(record.and_then(|record| record.cancelled)),
        "inhibitor": inhibitor,
        "inhibitorSince": optional(since),
        "problem": manager.lock.problem,
        "periods": periods.collect::<Vec<_>>(),
        "podsLeft": left,
        "unreported": unreported.iter().map(|uid| named(index, uid)).collect::<Vec<_>>(),
    });
    vec![row("node", fields, &SHUTDOWN_FIELDS)]
}

/// A pod by its UID, with its recorded names.
fn named(index: &PodIndex, uid: &PodUid) -> Row {
    let mut pod = rows::about(index, uid.as_str(), uid.as_str());
    pod.remove("key");
    pod
}

/// The pods that were admitted and have not finished, with what a shutdown makes of them.
fn pods_left(state: &State, index: &PodIndex) -> Vec<Row> {
    let workers = state.with_prefix::<WorkerRecord>("");
    let left = workers.filter(|(uid, worker)| {
        let admission = state.record::<AdmissionRecord>(uid);
        let is_refused = admission
            .is_some_and(|record| matches!(record.decision, AdmissionDecision::Rejected { .. }));
        !worker.runtime_only && !is_refused && !matches!(worker.phase, WorkerPhase::Finished { .. })
    });
    left.map(|(uid, worker)| {
        let mut row = named(index, &PodUid::new(&**uid));
        let pod = state.record::<PodRecord>(uid);
        let priority = pod.map(|record| record.pod.spec.as_ref().and_then(|spec| spec.priority));
        let deadline = match &worker.phase {
            WorkerPhase::Terminating { deadline, .. } => rows::time(*deadline),
            _ => Value::Null,
        };
        row.insert(
            "priority".to_owned(),
            json!(priority.flatten().unwrap_or(0)),
        );
        row.insert("phase".to_owned(), json!(rows::phase_name(&worker.phase)));
        row.insert("deadline".to_owned(), deadline);
        row
    })
    .collect()
}

/// The finished pods of the API server whose last status it does not have.
fn unreported(state: &State) -> Vec<PodUid> {
    let finished = state
        .with_prefix::<WorkerRecord>("")
        .filter(|(_, worker)| matches!(worker.phase, WorkerPhase::Finished { .. }));
    let finished: Vec<PodUid> = finished.map(|(uid, _)| PodUid::new(&**uid)).collect();
    let untold = shutdown::untold(state, &finished);
    untold.into_iter().cloned().collect()
}
