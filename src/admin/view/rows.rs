//! Records as rows: explicit, so that the documented fields do not change when a record's layout does.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::pods::PodNames;
use super::{PodIndex, Row, protection};
use crate::core::images::{self, FilesState};
use crate::core::state::{
    AdmissionDecision, AdmissionRecord, AnyRecord, BackoffRecord, ContainerRecord, EpochReason,
    FactRecord, ImageRecord, JournalRecord, MemoryBlock, MetaRecord, MirrorRecord, ObjectRecord,
    PlegRecord, PodRecord, ProbeRecord, SignalRecord, SourceRecord, State, StatusRecord, Table,
    TerminationCause, Version, VolumePhase, VolumeRecord, WorkerPhase, WorkerRecord, kinds,
};
use crate::core::volumes::keys as volume_keys;
use crate::images::{archive_of, qualified, refusals, shown_access};
use crate::types::runtime::{ContainerState, PodStatus, SandboxState};
use crate::types::{PodExt, PodSource, Stamp};

/// Every row of one table, in key order.
pub(super) fn all(state: &State, index: &PodIndex, table: Table) -> Vec<Row> {
    let keys = keys(state, table);
    let mut rows: Vec<Row> = keys
        .iter()
        .filter_map(|key| one(state, index, table, key))
        .collect();
    complete(state, table, &mut rows);
    rows
}

/// Adds what is not recorded by row.
fn complete(state: &State, table: Table, rows: &mut [Row]) {
    if table == Table::Images {
        protection::judge(state, rows);
    }
}

/// The rows of one table that are not the same in both states.
pub(super) fn changed(
    before: &State,
    old_index: &PodIndex,
    after: &State,
    new_index: &PodIndex,
    table: Table,
) -> (Vec<Row>, Vec<Row>) {
    let is_judged_anew = table == Table::Images && {
        let key = protection::JUDGEMENT;
        version_of(before, Table::Objects, key) != version_of(after, Table::Objects, key)
    };
    let stays = |state: &State, other: &State, key: &str| {
        !is_judged_anew && version_of(state, table, key) == version_of(other, table, key)
    };
    let mut old: Vec<Row> = keys(before, table)
        .iter()
        .filter(|key| !stays(before, after, key))
        .filter_map(|key| one(before, old_index, table, key))
        .collect();
    let mut new: Vec<Row> = keys(after, table)
        .iter()
        .filter(|key| !stays(before, after, key))
        .filter_map(|key| one(after, new_index, table, key))
        .collect();
    complete(before, table, &mut old);
    complete(after, table, &mut new);
    (old, new)
}

/// Version of a record that is shown in `table`: the agent's own state is shown with the objects.
fn version_of(state: &State, table: Table, key: &str) -> Option<Version> {
    let own = || (table == Table::Objects).then(|| state.version_of(Table::Facts, key));
    state.version_of(table, key).or_else(|| own().flatten())
}

fn keys(state: &State, table: Table) -> Vec<String> {
    if table == Table::Objects {
        let all: BTreeSet<_> = state.objects.keys().chain(state.facts.keys()).collect();
        return all.into_iter().map(|key| key.to_string()).collect();
    }
    macro_rules! keys {
        ($($variant:ident => $field:ident),+ $(,)?) => {
            match table {
                $( Table::$variant => state.$field.keys().map(|k| k.to_string()).collect(), )+
            }
        };
    }
    keys! {
        Meta => meta, Pods => pods, Mirrors => mirrors, Admissions => admissions, Workers => workers,
        Queue => queue, Containers => containers, Pleg => pleg, Statuses => statuses, Probes => probes,
        Volumes => volumes, Images => images, Objects => objects, Signals => signals, Journal => journal,
        Sources => sources, Cpus => cpus, Memory => memory, Cpusets => cpusets, Facts => facts,
    }
}

pub(super) fn one(state: &State, index: &PodIndex, table: Table, key: &str) -> Option<Row> {
    let own = || (table == Table::Objects).then(|| state.get_any(Table::Facts, key));
    let record = state.get_any(table, key).or_else(|| own().flatten())?;
    let by = confirmed_by(state, key, &record);
    let mut row = match record {
        AnyRecord::Meta(r) => meta(key, &r),
        AnyRecord::Pods(r) => pod(index, key, &r),
        AnyRecord::Mirrors(r) => mirror(state, key, &r),
        AnyRecord::Admissions(r) => admission(index, key, &r),
        AnyRecord::Workers(r) => worker(index, key, &r),
        AnyRecord::Queue(r) => {
            let mut row = about(index, key, key);
            put(&mut row, "due", time(r.due));
            put(&mut row, "why", json!(r.why));
            row
        }
        AnyRecord::Containers(r) => container(index, key, &r),
        AnyRecord::Pleg(r) => pleg(index, key, &r.status),
        AnyRecord::Statuses(r) => status(index, key, &r),
        AnyRecord::Probes(r) => probe(index, key, &r),
        AnyRecord::Volumes(r) => volume(index, key, &r),
        AnyRecord::Images(r) => image(state, index, key, &r),
        AnyRecord::Objects(r) => object(key, &r),
        AnyRecord::Facts(r) => fact(key, r),
        AnyRecord::Signals(r) => signal(key, &r),
        AnyRecord::Journal(r) => journal(index, key, &r),
        AnyRecord::Sources(r) => source(state, key, &r),
        AnyRecord::Cpus(r) => {
            let mut row = about(index, key, key);
            let containers = r.containers.iter();
            let containers: BTreeMap<_, _> = containers
                .map(|(name, cpus)| (name, cpus.to_string()))
                .collect();
            put(&mut row, "containers", json!(containers));
            row
        }
        AnyRecord::Memory(r) => {
            let mut row = about(index, key, key);
            let blocks = |blocks: &Vec<MemoryBlock>| -> Vec<Value> {
                let block = |b: &MemoryBlock| json!({"resource": b.resource, "nodes": b.nodes, "bytes": b.bytes});
                blocks.iter().map(block).collect()
            };
            let containers = r.containers.iter();
            let containers: BTreeMap<_, _> =
                containers.map(|(name, of)| (name, blocks(of))).collect();
            put(&mut row, "containers", json!(containers));
            row
        }
        AnyRecord::Cpusets(r) => {
            let (uid, container) = key.split_once('/').unwrap_or((key, ""));
            let mut row = about(index, key, uid);
            put(&mut row, "container", json!(container));
            put(&mut row, "containerId", json!(r.container_id));
            put(&mut row, "cpus", json!(r.cpus.to_string()));
            put(&mut row, "nodes", json!(r.nodes.to_string()));
            row
        }
    };
    if let Some(by) = by {
        put(&mut row, "confirmedBy", json!(by));
    }
    Some(row)
}

/// Returns whether the key belongs to an object that the API server sent. All other kinds are the agent's own.
fn is_of_api(key: &str) -> bool {
    kinds::of_key(key).is_some_and(|kind| kind.is_of_api())
}

/// Names the authority that has confirmed a record's content, according to the records: the runtime, the API server, or
/// none since it was written. `None` for records that no other party could confirm.
fn confirmed_by(state: &State, key: &str, record: &AnyRecord) -> Option<&'static str> {
    const CHECKPOINT: &str = "checkpoint";
    let api_answers = || {
        let source = state.record::<SourceRecord>(PodSource::Api.as_str());
        source.is_some_and(|source| source.error.is_empty())
    };
    let confirmed = |by, confirmed: bool| if confirmed { by } else { CHECKPOINT };
    Some(match record {
        AnyRecord::Pods(r) if r.source == PodSource::Api => confirmed("apiserver", api_answers()),
        AnyRecord::Mirrors(_) => confirmed("apiserver", api_answers()),
        AnyRecord::Objects(_) => confirmed("apiserver", is_of_api(key) && api_answers()),
        AnyRecord::Facts(_) => CHECKPOINT,
        AnyRecord::Statuses(r) => confirmed("apiserver", r.acknowledged == r.version),
        AnyRecord::Pleg(_) => "runtime",
        AnyRecord::Containers(r) => {
            let uid = key.split('/').next().unwrap_or(key);
            let shown = state.record::<PlegRecord>(uid);
            let newest = r.intent.as_ref().map(|intent| &intent.container_id);
            let seen = shown.is_some_and(|pleg| {
                let mut containers = pleg.status.containers.iter();
                containers.any(|c| Some(&c.id) == newest)
            });
            confirmed("runtime", seen)
        }
        AnyRecord::Pods(_)
        | AnyRecord::Admissions(_)
        | AnyRecord::Workers(_)
        | AnyRecord::Queue(_)
        | AnyRecord::Probes(_)
        | AnyRecord::Cpus(_)
        | AnyRecord::Memory(_)
        | AnyRecord::Cpusets(_)
        | AnyRecord::Volumes(_) => CHECKPOINT,
        AnyRecord::Meta(_)
        | AnyRecord::Images(_)
        | AnyRecord::Signals(_)
        | AnyRecord::Journal(_)
        | AnyRecord::Sources(_) => return None,
    })
}

/// The fields every row about a pod begins with.
pub(super) fn about(index: &PodIndex, key: &str, uid: &str) -> Row {
    let names = index.get(uid);
    let mut row = keyed(key);
    put(&mut row, "uid", json!(uid));
    names_of(&mut row, names);
    row
}

fn names_of(row: &mut Row, names: Option<&PodNames>) {
    let known = names.filter(|n| !n.name.is_empty());
    put(row, "namespace", json!(known.map(|n| &n.namespace)));
    put(row, "name", json!(known.map(|n| &n.name)));
}

fn keyed(key: &str) -> Row {
    let mut row = Row::new();
    put(&mut row, "key", json!(key));
    row
}

fn put(row: &mut Row, field: &str, value: Value) {
    row.insert(field.to_owned(), value);
}

/// A stamp: RFC 3339 by the wall clock, and the boot with its clock.
pub(super) fn time(stamp: Stamp) -> Value {
    let wall = jiff::Timestamp::from_millisecond(stamp.wall_ms)
        .map_or_else(|_| Value::Null, |at| json!(format!("{at:.3}")));
    json!({
        "time": wall,
        "boot": format!("{:016x}", stamp.boot.0),
        "bootTimeMs": stamp.boottime_ms,
    })
}

/// The runtime's nanoseconds; 0 stands for never.
fn nanos(ns: i64) -> Value {
    if ns == 0 {
        return Value::Null;
    }
    jiff::Timestamp::from_nanosecond(i128::from(ns)).map_or(Value::Null, |at| json!(at.to_string()))
}

fn optional<T>(value: Option<T>, show: impl FnOnce(T) -> Value) -> Value {
    value.map_or(Value::Null, show)
}

fn meta(key: &str, r: &MetaRecord) -> Row {
    let mut row = keyed(key);
    put(&mut row, "schema", json!(r.schema));
    put(&mut row, "nodeName", json!(r.node_name));
    put(&mut row, "machineId", json!(r.machine_id));
    put(
        &mut row,
        "boot",
        json!({
            "id": format!("{:016x}", r.boot.id().0),
            "kernelBootId": r.boot.kernel_boot_id,
            "pid1Start": r.boot.pid1_start,
            "runtimeState": r.boot.runtime_state,
        }),
    );
    put(&mut row, "generation", json!(r.generation));
    put(&mut row, "cleanShutdown", json!(r.clean_shutdown));
    put(&mut row, "heartbeat", time(r.heartbeat));
    let reason = match r.epoch.reason {
        EpochReason::Fresh => "Fresh",
        EpochReason::Rebuilt => "Rebuilt",
        EpochReason::Restored => "Restored",
        EpochReason::OtherMachine => "OtherMachine",
    };
    put(
        &mut row,
        "epoch",
        json!({"number": r.epoch.number, "since": time(r.epoch.since), "reason": reason}),
    );
    row
}

fn pod(index: &PodIndex, key: &str, r: &PodRecord) -> Row {
    let mut row = about(index, key, key);
    put(&mut row, "source", json!(r.source.as_str()));
    put(&mut row, "origin", json!(r.origin));
    put(&mut row, "firstSeen", time(r.first_seen));
    put(&mut row, "confirmedEpoch", json!(r.confirmed_epoch));
    put(&mut row, "pod", json!(*r.pod));
    row
}

fn mirror(state: &State, key: &str, r: &MirrorRecord) -> Row {
    let (name, namespace) = key.split_once('_').unwrap_or((key, ""));
    let uid = state.pods.iter().find(|(_, v)| {
        let pod = &v.record.pod;
        v.record.source.is_static() && pod.name() == name && pod.namespace() == namespace
    });
    let mut row = keyed(key);
    put(&mut row, "uid", json!(uid.map(|(uid, _)| &**uid)));
    put(&mut row, "namespace", json!(namespace));
    put(&mut row, "name", json!(name));
    put(&mut row, "mirrorUid", json!(r.uid));
    put(&mut row, "hash", json!(r.hash));
    row
}

fn admission(index: &PodIndex, key: &str, r: &AdmissionRecord) -> Row {
    let mut row = about(index, key, key);
    let (decision, reason, message) = match &r.decision {
        AdmissionDecision::Admitted => ("Admitted", None, None),
        AdmissionDecision::Rejected { reason, message } => {
            ("Rejected", Some(reason), Some(message))
        }
    };
    put(&mut row, "decision", json!(decision));
    put(&mut row, "reason", json!(reason));
    put(&mut row, "message", json!(message));
    put(&mut row, "allocated", json!(r.allocated));
    put(&mut row, "at", time(r.at));
    row
}

/// Name of a worker phase.
pub(super) fn phase_name(phase: &WorkerPhase) -> &'static str {
    match phase {
        WorkerPhase::Sync => "Sync",
        WorkerPhase::Terminating { .. } => "Terminating",
        WorkerPhase::Terminated { .. } => "Terminated",
        WorkerPhase::Finished { .. } => "Finished",
    }
}

fn worker(index: &PodIndex, key: &str, r: &WorkerRecord) -> Row {
    let mut row = about(index, key, key);
    put(&mut row, "phase", json!(phase_name(&r.phase)));
    let (since, grace, deadline, cause) = match &r.phase {
        WorkerPhase::Sync => (None, None, None, None),
        WorkerPhase::Terminating {
            since,
            grace_seconds,
            deadline,
            cause,
        } => (
            Some(*since),
            Some(*grace_seconds),
            Some(*deadline),
            Some(cause),
        ),
        WorkerPhase::Terminated { since, cause } | WorkerPhase::Finished { since, cause } => {
            (Some(*since), None, None, Some(cause))
        }
    };
    put(&mut row, "since", optional(since, time));
    put(&mut row, "graceSeconds", json!(grace));
    put(&mut row, "deadline", optional(deadline, time));
    let (cause, reason, message) = match cause {
        None => (None, None, None),
        Some(TerminationCause::Deleted) => (Some("Deleted"), None, None),
        Some(TerminationCause::Completed) => (Some("Completed"), None, None),
        Some(TerminationCause::Orphan) => (Some("Orphan"), None, None),
        Some(TerminationCause::Evicted { reason, message }) => {
            (Some("Evicted"), Some(reason), Some(message))
        }
    };
    put(&mut row, "cause", json!(cause));
    put(&mut row, "reason", json!(reason));
    put(&mut row, "message", json!(message));
    put(&mut row, "queued", time(r.queued));
    put(&mut row, "started", optional(r.started, time));
    put(&mut row, "deleted", json!(r.deleted));
    put(&mut row, "restartRequested", json!(r.restart_requested));
    put(&mut row, "runtimeOnly", json!(r.runtime_only));
    row
}

fn backoff(r: BackoffRecord) -> Value {
    json!({
        "durationMs": r.duration_ms,
        "since": time(r.since),
        "until": time(r.since.plus(std::time::Duration::from_millis(r.duration_ms))),
    })
}

fn container(index: &PodIndex, key: &str, r: &ContainerRecord) -> Row {
    let (uid, name) = key.split_once('/').unwrap_or((key, ""));
    let mut row = about(index, key, uid);
    put(&mut row, "container", json!(name));
    put(&mut row, "restartCount", json!(r.restart_count));
    let intent = optional(r.intent.as_ref(), |i| {
        json!({
            "containerId": i.container_id,
            "attempt": i.attempt,
            "hash": i.hash,
            "at": time(i.at),
        })
    });
    put(&mut row, "intent", intent);
    let exit = optional(r.last_exit.as_ref(), |e| {
        json!({
            "containerId": e.container_id,
            "attempt": e.attempt,
            "image": e.image,
            "imageRef": e.image_ref,
            "startedAt": nanos(e.started_at_ns),
            "finishedAt": nanos(e.finished_at_ns),
            "finished": time(e.finished),
            "exitCode": e.exit_code,
            "reason": e.reason,
            "message": e.message,
            "inferred": e.inferred,
        })
    });
    put(&mut row, "lastExit", exit);
    put(&mut row, "backoff", optional(r.backoff, backoff));
    put(&mut row, "hooksDone", json!(r.hooks_done));
    row
}

fn pleg(index: &PodIndex, key: &str, r: &PodStatus) -> Row {
    let sandboxes: Vec<Value> = r
        .sandboxes
        .iter()
        .map(|s| {
            json!({
                "id": s.id,
                "attempt": s.attempt,
                "state": match s.state {
                    SandboxState::Ready => "Ready",
                    SandboxState::NotReady => "NotReady",
                },
                "createdAt": nanos(s.created_at_ns),
                "ips": s.ips,
                "hostNetwork": s.host_network,
                "runtimeHandler": s.runtime_handler,
            })
        })
        .collect();
    let containers: Vec<Value> = r
        .containers
        .iter()
        .map(|c| {
            json!({
                "id": c.id,
                "container": c.name,
                "attempt": c.attempt,
                "sandboxId": c.sandbox_id,
                "state": match c.state {
                    ContainerState::Created => "Created",
                    ContainerState::Running => "Running",
                    ContainerState::Exited => "Exited",
                    ContainerState::Unknown => "Unknown",
                },
                "createdAt": nanos(c.created_at_ns),
                "image": c.image,
                "imageRef": c.image_ref,
                "hash": c.hash,
                "startedAt": nanos(c.started_at_ns),
                "finishedAt": nanos(c.finished_at_ns),
                "exitCode": (c.state == ContainerState::Exited).then_some(c.exit_code),
                "reason": c.reason,
                "message": c.message,
                "logPath": c.log_path,
            })
        })
        .collect();
    let mut row = about(index, key, key);
    put(&mut row, "ips", json!(r.ips));
    put(&mut row, "sandboxes", json!(sandboxes));
    put(&mut row, "containers", json!(containers));
    row
}

fn status(index: &PodIndex, key: &str, r: &StatusRecord) -> Row {
    let mut row = about(index, key, key);
    put(&mut row, "version", json!(r.version));
    put(&mut row, "acknowledged", json!(r.acknowledged));
    put(&mut row, "at", time(r.at));
    put(&mut row, "finished", json!(r.finished));
    put(&mut row, "status", json!(*r.status));
    row
}

fn probe(index: &PodIndex, key: &str, r: &ProbeRecord) -> Row {
    let mut parts = key.splitn(3, '/');
    let mut next = || parts.next().unwrap_or_default();
    let (uid, container, kind) = (next(), next(), next());
    let mut row = about(index, key, uid);
    put(&mut row, "container", json!(container));
    put(&mut row, "probe", json!(kind));
    put(&mut row, "containerId", json!(r.container_id));
    put(&mut row, "result", json!(r.result));
    put(&mut row, "last", json!(r.last));
    put(&mut row, "consecutive", json!(r.consecutive));
    put(&mut row, "at", time(r.at));
    row
}

fn volume(index: &PodIndex, key: &str, r: &VolumeRecord) -> Row {
    let mut row = match volume_keys::split(key) {
        Some((uid, name)) => {
            let mut row = about(index, key, uid);
            put(&mut row, "volume", json!(name));
            row
        }
        // Storage that is staged for all pods.
        None => keyed(key),
    };
    put(&mut row, "plugin", json!(r.plugin));
    put(&mut row, "path", json!(r.path));
    let phase = match r.phase {
        VolumePhase::Mounting => "Mounting",
        VolumePhase::Mounted => "Mounted",
        VolumePhase::Unmounting => "Unmounting",
    };
    put(&mut row, "phase", json!(phase));
    put(&mut row, "at", time(r.at));
    row
}

/// The pods that do not get an image, with why.
fn refused(state: &State, index: &PodIndex, image: &str) -> Value {
    let pods = refusals(state, image).into_iter().map(|(uid, message)| {
        let mut one = Row::new();
        put(&mut one, "uid", json!(uid.as_str()));
        names_of(&mut one, index.get(uid.as_str()));
        put(&mut one, "message", json!(message));
        Value::Object(one)
    });
    Value::Array(pods.collect())
}

fn image(state: &State, index: &PodIndex, key: &str, r: &ImageRecord) -> Row {
    let files = images::files_of(state, &qualified(key));
    let archive = archive_of(state, key);
    let mut row = keyed(key);
    put(&mut row, "image", json!(key));
    let known = files.as_ref().map(|(files, _)| files);
    let id = known.map(|files| files.id.as_str());
    put(&mut row, "id", json!(id.filter(|id| !id.is_empty())));
    put(&mut row, "state", json!(images::shown_state(known)));
    let access = id.filter(|id| !id.is_empty());
    let access = access.map(|id| shown_access(state, key, id));
    put(&mut row, "access", json!(access));
    put(
        &mut row,
        "since",
        time(files.as_ref().map_or(r.first_seen, |(_, at)| *at)),
    );
    let why = known.and_then(|files| match &files.state {
        FilesState::Suspect { why } => Some(why.as_str()),
        FilesState::Removed => Some("it was removed, to be pulled or imported again"),
        _ => None,
    });
    put(&mut row, "why", json!(why));
    put(&mut row, "refused", refused(state, index, key));
    let pins: Vec<&str> = archive.is_some().then_some("archive").into_iter().collect();
    put(&mut row, "pins", json!(pins));
    put(&mut row, "archive", json!(archive));
    put(&mut row, "pulledRef", json!(r.pulled_ref));
    put(&mut row, "firstSeen", time(r.first_seen));
    put(&mut row, "lastUsed", time(r.last_used));
    let backoffs: Vec<Value> = r
        .backoffs
        .iter()
        .map(|(uid, b)| {
            let mut one = Row::new();
            put(&mut one, "uid", json!(uid));
            names_of(&mut one, index.get(uid.as_str()));
            put(&mut one, "backoff", backoff(*b));
            Value::Object(one)
        })
        .collect();
    put(&mut row, "backoffs", json!(backoffs));
    row
}

/// Kinds whose content is never shown, however it is stored.
fn is_secret_kind(kind: &str) -> bool {
    let kind = kind.to_ascii_lowercase();
    // Records of pulls hold hashes of the credentials that were used.
    let has_keys = ["imagepulls", "podcertificates"].contains(&kind.as_str());
    kind.contains("secret") || kind.contains("token") || has_keys
}

/// State of the agent's own, with the fields of an object.
fn fact(key: &str, r: FactRecord) -> Row {
    let object_of_it = ObjectRecord {
        resource_version: r.mark,
        encrypted: false,
        data: r.data,
        at: r.at,
    };
    object(key, &object_of_it)
}

fn object(key: &str, r: &ObjectRecord) -> Row {
    let mut parts = key.splitn(3, '/');
    let mut next = || parts.next().unwrap_or_default();
    let (kind, namespace, name) = (next(), next(), next());
    let mut row = keyed(key);
    put(&mut row, "objectKind", json!(kind));
    put(&mut row, "namespace", json!(namespace));
    put(&mut row, "name", json!(name));
    put(&mut row, "resourceVersion", json!(r.resource_version));
    put(&mut row, "encrypted", json!(r.encrypted));
    put(&mut row, "bytes", json!(r.data.len()));
    put(&mut row, "at", time(r.at));
    let shown = !r.encrypted && !is_secret_kind(kind);
    let content = shown.then(|| serde_json::from_slice::<Value>(&r.data).ok());
    // An object that names its own kind decides, whatever its key says.
    let content = content.flatten().filter(|object| {
        let own = object.get("kind").and_then(Value::as_str);
        !own.is_some_and(is_secret_kind)
    });
    put(&mut row, "object", content.unwrap_or(Value::Null));
    row
}

fn signal(key: &str, r: &SignalRecord) -> Row {
    let mut row = keyed(key);
    put(&mut row, "signal", json!(key));
    put(&mut row, "first", time(r.first));
    put(&mut row, "last", time(r.last));
    row
}

/// A row of the journal.
pub(super) fn journal(index: &PodIndex, key: &str, r: &JournalRecord) -> Row {
    let mut row = keyed(key);
    let uid = r.pod.as_ref();
    put(&mut row, "uid", json!(uid));
    names_of(&mut row, uid.and_then(|uid| index.get(uid.as_str())));
    put(
        &mut row,
        "sequence",
        json!(u64::from_str_radix(key, 16).ok()),
    );
    put(&mut row, "at", time(r.at));
    put(&mut row, "generation", json!(r.generation));
    put(&mut row, "what", json!(r.what));
    put(&mut row, "why", json!(r.why));
    row
}

fn source(state: &State, key: &str, r: &SourceRecord) -> Row {
    let mut row = keyed(key);
    put(&mut row, "source", json!(key));
    put(&mut row, "location", json!(r.location));
    put(&mut row, "read", time(r.read));
    put(
        &mut row,
        "error",
        json!((!r.error.is_empty()).then_some(&r.error)),
    );
    put(&mut row, "broken", json!(r.broken));
    let conflicts = crate::config::conflicts_of(state, key);
    put(&mut row, "conflicts", json!(conflicts));
    row
}
