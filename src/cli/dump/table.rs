//! Columns of each table for humans, and the format of cells.

use serde_json::Value;

use self::Show::{Age, Count, Fields, Ready, Running, Text, Time, Until};
use super::super::output::printable;
use crate::admin::view::{Row, View};
use crate::core::state::Table;
use crate::types::{BootId, Clock, SystemClock};

/// Format of a value in a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Show {
    /// As it is.
    Text,
    /// Time since a stamp, by the wall clock.
    Age,
    /// Time until a stamp, by the wall clock.
    Until,
    /// A stamp, as RFC 3339.
    Time,
    /// Number of elements.
    Count,
    /// The fields of an object, each with its value.
    Fields,
    /// `running/all` of the runtime's containers.
    Running,
    /// `ready/containers` of an overview row.
    Ready,
}

/// One column.
#[derive(Clone, Copy, Debug)]
pub(super) struct Column {
    header: &'static str,
    /// Fields from the outside in, joined by dots.
    path: &'static str,
    show: Show,
    wide: bool,
}

const fn column(header: &'static str, path: &'static str, show: Show) -> Column {
    Column {
        header,
        path,
        show,
        wide: false,
    }
}

const fn wide(header: &'static str, path: &'static str, show: Show) -> Column {
    Column {
        wide: true,
        ..column(header, path, show)
    }
}

const NAMESPACE: Column = column("NAMESPACE", "namespace", Text);
const NAME: Column = column("NAME", "name", Text);
const POD: Column = column("POD", "name", Text);
const UID: Column = wide("UID", "uid", Text);

const OVERVIEW: &[Column] = &[
    NAMESPACE,
    NAME,
    column("READY", "", Ready),
    column("STATUS", "status", Text),
    column("RESTARTS", "restarts", Text),
    column("AGE", "firstSeen", Age),
    column("IP", "ip", Text),
    column("SOURCE", "source", Text),
    column("WORKER", "worker", Text),
    column("NEXT-SYNC", "nextSync", Until),
    wide("PHASE", "phase", Text),
    wide("ADMISSION", "admission", Text),
    UID,
];

const NODE: &[Column] = &[
    NAME,
    column("RESOURCE-VERSION", "resourceVersion", Text),
    column("AGE", "at", Age),
    column("CONFIRMED-BY", "confirmedBy", Text),
    wide("LABELS", "object.metadata.labels", Fields),
    wide("CAPACITY", "object.status.capacity", Fields),
];

const EVENTS: &[Column] = &[
    NAMESPACE,
    POD,
    column("LAST-SEEN", "at", Age),
    column("TYPE", "type", Text),
    column("REASON", "reason", Text),
    column("API-SERVER", "apiServer.state", Text),
    column("MESSAGE", "message", Text),
    wide("CONTAINER", "container", Text),
    wide("COUNT", "count", Text),
    wide("OBJECT", "apiServer.name", Text),
    UID,
];

const DEVICES: &[Column] = &[
    NAMESPACE,
    NAME,
    column("CONTAINER", "container", Text),
    column("RESOURCE", "resource", Text),
    column("DEVICES", "ids", Text),
    column("STATE", "state", Text),
    wide("SOCKET", "socket", Text),
    UID,
];

const CLAIMS: &[Column] = &[
    NAMESPACE,
    column("CLAIM", "claim", Text),
    column("POD", "name", Text),
    column("DRIVER", "driver", Text),
    column("DEVICES", "devices", Text),
    column("STATE", "state", Text),
    wide("CDI", "cdi", Text),
    UID,
];

const PRESSURE: &[Column] = &[
    column("TYPE", "type", Text),
    column("NAME", "key", Text),
    column("STATUS", "status", Text),
    column("AVAILABLE", "available", Text),
    column("NEEDED", "quantity", Text),
    column("SINCE", "since", Age),
    column("WHY", "why", Text),
    wide("CAPACITY", "capacity", Text),
    wide("OBSERVED", "observed", Age),
    wide("MINIMUM-RECLAIM", "minimumReclaim", Text),
    wide("THRESHOLD", "threshold", Text),
    wide("NAMESPACE", "pod.namespace", Text),
    wide("POD", "pod.name", Text),
];

const SHUTDOWN: &[Column] = &[
    column("STATE", "state", Text),
    column("BY", "by", Text),
    column("BEGUN", "begun", Age),
    column("DEADLINE", "deadline", Until),
    column("ENDED", "ended", Age),
    column("CANCELLED", "cancelled", Age),
    column("INHIBITOR", "inhibitor", Text),
    column("PODS-LEFT", "podsLeft", Count),
    column("UNREPORTED", "unreported", Count),
    column("PROBLEM", "problem", Text),
    wide("PERIODS", "periods", Text),
];

const META: &[Column] = &[
    column("NODE", "nodeName", Text),
    column("SCHEMA", "schema", Text),
    column("GENERATION", "generation", Text),
    column("EPOCH", "epoch.number", Text),
    column("EPOCH-REASON", "epoch.reason", Text),
    column("CLEAN-SHUTDOWN", "cleanShutdown", Text),
    column("HEARTBEAT", "heartbeat", Age),
    wide("MACHINE-ID", "machineId", Text),
    wide("KERNEL-BOOT-ID", "boot.kernelBootId", Text),
];

const PODS: &[Column] = &[
    NAMESPACE,
    NAME,
    column("SOURCE", "source", Text),
    column("CONTAINERS", "pod.spec.containers", Count),
    column("AGE", "firstSeen", Age),
    column("UID", "uid", Text),
    wide("ORIGIN", "origin", Text),
    wide("CONFIRMED-EPOCH", "confirmedEpoch", Text),
    wide("CONFIRMED-BY", "confirmedBy", Text),
];

const MIRRORS: &[Column] = &[
    NAMESPACE,
    NAME,
    column("MIRROR-UID", "mirrorUid", Text),
    column("HASH", "hash", Text),
    UID,
    wide("CONFIRMED-BY", "confirmedBy", Text),
];

const ADMISSIONS: &[Column] = &[
    NAMESPACE,
    NAME,
    column("DECISION", "decision", Text),
    column("AGE", "at", Age),
    column("REASON", "reason", Text),
    UID,
    wide("MESSAGE", "message", Text),
];

const WORKERS: &[Column] = &[
    NAMESPACE,
    NAME,
    column("PHASE", "phase", Text),
    column("SINCE", "since", Age),
    column("CAUSE", "cause", Text),
    column("DEADLINE", "deadline", Until),
    column("STARTED", "started", Age),
    wide("QUEUED", "queued", Age),
    wide("DELETED", "deleted", Text),
    wide("RESTART-REQUESTED", "restartRequested", Text),
    wide("RUNTIME-ONLY", "runtimeOnly", Text),
    UID,
];

const QUEUE: &[Column] = &[
    NAMESPACE,
    NAME,
    column("DUE", "due", Until),
    column("WHY", "why", Text),
    UID,
];

const CONTAINERS: &[Column] = &[
    NAMESPACE,
    POD,
    column("CONTAINER", "container", Text),
    column("RESTARTS", "restartCount", Text),
    column("STARTED", "intent.at", Age),
    column("EXITED", "lastExit.finished", Age),
    column("EXIT-CODE", "lastExit.exitCode", Text),
    column("REASON", "lastExit.reason", Text),
    column("BACK-OFF", "backoff.until", Until),
    wide("CONTAINER-ID", "intent.containerId", Text),
    UID,
    wide("CONFIRMED-BY", "confirmedBy", Text),
];

const PLEG: &[Column] = &[
    NAMESPACE,
    NAME,
    column("SANDBOXES", "sandboxes", Count),
    column("RUNNING", "containers", Running),
    column("IP", "ips.0", Text),
    UID,
];

const STATUSES: &[Column] = &[
    NAMESPACE,
    NAME,
    column("PHASE", "status.phase", Text),
    column("REASON", "status.reason", Text),
    column("VERSION", "version", Text),
    column("ACKNOWLEDGED", "acknowledged", Text),
    column("AGE", "at", Age),
    column("FINISHED", "finished", Text),
    wide("IP", "status.podIP", Text),
    UID,
    wide("MESSAGE", "status.message", Text),
    wide("CONFIRMED-BY", "confirmedBy", Text),
];

const PROBES: &[Column] = &[
    NAMESPACE,
    POD,
    column("CONTAINER", "container", Text),
    column("PROBE", "probe", Text),
    column("RESULT", "result", Text),
    column("LAST", "last", Text),
    column("CONSECUTIVE", "consecutive", Text),
    column("AGE", "at", Age),
    wide("CONTAINER-ID", "containerId", Text),
    UID,
];

const VOLUMES: &[Column] = &[
    NAMESPACE,
    POD,
    column("VOLUME", "volume", Text),
    column("PLUGIN", "plugin", Text),
    column("PHASE", "phase", Text),
    column("AGE", "at", Age),
    UID,
    wide("PATH", "path", Text),
];

const IMAGES: &[Column] = &[
    column("IMAGE", "image", Text),
    column("ID", "id", Text),
    column("STATE", "state", Text),
    column("SINCE", "since", Age),
    column("ACCESS", "access", Text),
    column("REFUSED", "refused", Count),
    column("PINS", "pins", Count),
    column("ARCHIVE", "archive", Text),
    wide("FIRST-SEEN", "firstSeen", Age),
    column("LAST-USED", "lastUsed", Age),
    column("KEPT", "kept", Text),
    column("ORDER", "order", Text),
    wide("MAY-GO", "mayGo", Until),
    wide("TOO-OLD", "tooOld", Until),
    wide("SIZE", "size", Text),
    column("BACK-OFFS", "backoffs", Count),
    wide("PULLED", "pulledRef", Text),
    wide("WHY", "why", Text),
];

const OBJECTS: &[Column] = &[
    column("KIND", "objectKind", Text),
    NAMESPACE,
    NAME,
    column("RESOURCE-VERSION", "resourceVersion", Text),
    column("ENCRYPTED", "encrypted", Text),
    column("BYTES", "bytes", Text),
    column("AGE", "at", Age),
    wide("CONFIRMED-BY", "confirmedBy", Text),
];

const SIGNALS: &[Column] = &[
    column("SIGNAL", "signal", Text),
    column("FIRST", "first", Age),
    column("LAST", "last", Age),
];

const JOURNAL: &[Column] = &[
    wide("SEQUENCE", "sequence", Text),
    column("TIME", "at", Time),
    column("GENERATION", "generation", Text),
    NAMESPACE,
    POD,
    UID,
    column("WHAT", "what", Text),
    column("WHY", "why", Text),
];

const ASSIGNMENTS: &[Column] = &[
    NAMESPACE,
    POD,
    column("CONTAINERS", "containers", Fields),
    UID,
];

const CPUSETS: &[Column] = &[
    NAMESPACE,
    POD,
    column("CONTAINER", "container", Text),
    column("CPUS", "cpus", Text),
    column("NODES", "nodes", Text),
    wide("CONTAINER-ID", "containerId", Text),
    UID,
];

const SOURCES: &[Column] = &[
    column("SOURCE", "source", Text),
    column("LOCATION", "location", Text),
    column("READ", "read", Age),
    column("BROKEN", "broken", Count),
    column("CONFLICTS", "conflicts", Count),
    column("ERROR", "error", Text),
    wide("BROKEN-FILES", "broken", Fields),
    wide("CONFLICTING-FILES", "conflicts", Fields),
];

/// The columns of a table.
pub(super) fn columns(view: View, with_wide: bool) -> Vec<Column> {
    let all = match view {
        View::Overview => OVERVIEW,
        View::Node => NODE,
        View::Events => EVENTS,
        View::Devices => DEVICES,
        View::Claims => CLAIMS,
        View::Pressure => PRESSURE,
        View::Shutdown => SHUTDOWN,
        View::Table(Table::Meta) => META,
        View::Table(Table::Pods) => PODS,
        View::Table(Table::Mirrors) => MIRRORS,
        View::Table(Table::Admissions) => ADMISSIONS,
        View::Table(Table::Workers) => WORKERS,
        View::Table(Table::Queue) => QUEUE,
        View::Table(Table::Containers) => CONTAINERS,
        View::Table(Table::Pleg) => PLEG,
        View::Table(Table::Statuses) => STATUSES,
        View::Table(Table::Probes) => PROBES,
        View::Table(Table::Volumes) => VOLUMES,
        View::Table(Table::Images) => IMAGES,
        View::Table(Table::Objects | Table::Facts) => OBJECTS,
        View::Table(Table::Signals) => SIGNALS,
        View::Table(Table::Journal) => JOURNAL,
        View::Table(Table::Cpus | Table::Memory) => ASSIGNMENTS,
        View::Table(Table::Cpusets) => CPUSETS,
        View::Table(Table::Sources) => SOURCES,
    };
    let kept = all.iter().filter(|c| with_wide || !c.wide);
    kept.copied().collect()
}

/// The columns of a history.
pub(super) fn history_columns(with_uid: bool) -> Vec<Column> {
    let mut columns = vec![
        column("TIME", "at", Time),
        column("GENERATION", "generation", Text),
    ];
    if with_uid {
        columns.push(column("UID", "uid", Text));
    }
    columns.push(column("WHAT", "what", Text));
    columns.push(column("WHY", "why", Text));
    columns
}

/// The first line.
pub(super) fn headers(columns: &[Column]) -> Vec<String> {
    columns.iter().map(|c| c.header.to_owned()).collect()
}

/// The wall clock, in milliseconds since the Unix epoch.
pub(super) fn now() -> i64 {
    SystemClock::new(BootId(0)).now().wall_ms
}

/// The cells of a row; what is absent is `<none>`.
pub(super) fn cells(columns: &[Column], row: &Row, now: i64) -> Vec<String> {
    columns.iter().map(|c| cell(c, row, now)).collect()
}

fn cell(column: &Column, row: &Row, now: i64) -> String {
    let value = field(row, column.path);
    let shown = match column.show {
        Ready => {
            let number = |name: &str| row.get(name).and_then(Value::as_u64).unwrap_or(0);
            Some(format!("{}/{}", number("ready"), number("containers")))
        }
        Text => value.and_then(text),
        Count => value.map(|v| match v {
            Value::Array(items) => items.len().to_string(),
            Value::Object(fields) => fields.len().to_string(),
            _ => "0".to_owned(),
        }),
        Fields => value.and_then(Value::as_object).and_then(|fields| {
            let fields = fields.iter();
            let told = fields.map(|(key, v)| format!("{key}: {}", text(v).unwrap_or_default()));
            let told = told.collect::<Vec<_>>().join("; ");
            (!told.is_empty()).then_some(told)
        }),
        Running => value.and_then(Value::as_array).map(|containers| {
            let running = |c: &&Value| c.get("state").and_then(Value::as_str) == Some("Running");
            let count = containers.iter().filter(running).count();
            format!("{count}/{}", containers.len())
        }),
        Time => value.map(wall_time),
        Age => value.and_then(wall_ms).map(|at| duration(now - at)),
        Until => value.and_then(wall_ms).map(|at| match at - now {
            left if left > 0 => duration(left),
            _ => "now".to_owned(),
        }),
    };
    shown.map_or_else(|| "<none>".to_owned(), |text| printable(&text))
}

fn field<'a>(row: &'a Row, path: &str) -> Option<&'a Value> {
    let mut parts = path.split('.');
    let mut value = row.get(parts.next()?)?;
    for part in parts {
        value = match (value, part.parse::<usize>()) {
            (Value::Array(items), Ok(n)) => items.get(n)?,
            _ => value.get(part)?,
        };
    }
    (!value.is_null()).then_some(value)
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) if text.is_empty() => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}

/// The time of a stamp in a row.
pub(super) fn wall_time(stamp: &Value) -> String {
    let time = stamp.get("time").and_then(Value::as_str);
    time.unwrap_or("<unknown>").to_owned()
}

fn wall_ms(stamp: &Value) -> Option<i64> {
    let time: jiff::Timestamp = stamp.get("time")?.as_str()?.parse().ok()?;
    Some(time.as_millisecond())
}

/// A length of time with two units at most, as kubectl shows ages.
fn duration(ms: i64) -> String {
    let seconds = ms / 1000;
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match seconds {
        s if s < 0 => "0s".to_owned(),
        s if s < 120 => format!("{s}s"),
        s if minutes < 10 && s % 60 != 0 => format!("{minutes}m{}s", s % 60),
        _ if minutes < 180 => format!("{minutes}m"),
        _ if hours < 8 && minutes % 60 != 0 => format!("{hours}h{}m", minutes % 60),
        _ if hours < 48 => format!("{hours}h"),
        _ if days < 8 && hours % 24 != 0 => format!("{days}d{}h", hours % 24),
        _ => format!("{days}d"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_read_as_in_kubectl() {
        let shown = [
            (-5, "0s"),
            (119, "119s"),
            (120, "2m"),
            (200, "3m20s"),
            (601, "10m"),
            (10_799, "179m"),
            (11_100, "3h5m"),
            (172_799, "47h"),
            (180_000, "2d2h"),
            (8 * 86_400, "8d"),
        ];
        for (seconds, expected) in shown {
            assert_eq!(duration(seconds * 1000), expected, "{seconds} s");
        }
    }

    #[test]
    fn broken_and_conflicting_manifests_are_shown_by_wide() {
        let row: Row = serde_json::from_value(serde_json::json!({
            "source": "file", "location": "/m", "error": null,
            "broken": {"/m/a.yaml": "line 3, column 5: bad", "/m/b.yaml": "empty"},
            "conflicts": {"/m/web-old.yaml": "already defined by /m/web.yaml"},
        }))
        .unwrap();
        let columns = columns(View::Table(Table::Sources), true);
        let cells = cells(&columns, &row, 0);
        let told = "/m/a.yaml: line 3, column 5: bad; /m/b.yaml: empty";
        assert_eq!(cells[6], told);
        assert_eq!(cells[7], "/m/web-old.yaml: already defined by /m/web.yaml");
        assert_eq!((cells[3].as_str(), cells[4].as_str()), ("2", "1"));
    }

    #[test]
    fn every_table_has_columns_and_a_key_free_cell_is_none() {
        for view in View::all().into_iter().chain([View::Overview]) {
            let columns = columns(view, true);
            assert!(columns.len() > 2, "{view}");
            let cells = cells(&columns, &Row::new(), 0);
            assert!(cells.iter().all(|c| c == "<none>" || c == "0/0"), "{view}");
        }
    }
}
