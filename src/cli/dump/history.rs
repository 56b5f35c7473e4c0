//! The text of `holdfast dump --history`.

use serde_json::Value;

use super::super::output::{Grid, printable};
use super::table;
use crate::admin::view::{History, HistoryItem, Row};

/// The journal with a line at each restart of the agent, then a line per container.
pub(super) fn lines(history: &History, wide: bool) -> String {
    let columns = table::history_columns(wide || history.pods.len() > 1);
    let now = table::now();
    let mut cells = vec![table::headers(&columns)];
    cells.extend(history.items.iter().filter_map(|item| match item {
        HistoryItem::Entry { entry } => Some(table::cells(&columns, entry, now)),
        HistoryItem::Restart { .. } => None,
    }));
    let grid = Grid::default().lines(&cells);
    let mut entries = grid.lines();
    let mut text = String::new();
    let mut push = |line: &str| {
        text.push_str(line);
        text.push('\n');
    };
    push(entries.next().unwrap_or_default());
    for item in &history.items {
        match item {
            HistoryItem::Entry { .. } => push(entries.next().unwrap_or_default()),
            HistoryItem::Restart {
                from_generation,
                to_generation,
                at,
                rebooted,
            } => {
                let boot = if *rebooted { ", machine rebooted" } else { "" };
                push(&format!(
                    "---- agent restarted: generation {from_generation} -> {to_generation} at {}{boot} ----",
                    table::wall_time(at)
                ));
            }
        }
    }
    if !history.containers.is_empty() {
        text.push('\n');
    }
    for row in &history.containers {
        text.push_str(&summary(row, history.pods.len() > 1));
        text.push('\n');
    }
    text
}

/// Restarts, newest start, newest end and back-off of a container.
fn summary(row: &Row, with_uid: bool) -> String {
    let text = |value: Option<&Value>| value.and_then(Value::as_str).unwrap_or_default().to_owned();
    let mut line = format!("container {}", text(row.get("container")));
    if with_uid {
        line.push_str(&format!(" of {}", text(row.get("uid"))));
    }
    let count = row.get("restartCount").and_then(Value::as_u64).unwrap_or(0);
    let unit = if count == 1 { "restart" } else { "restarts" };
    line.push_str(&format!(": {count} {unit}"));
    if let Some(at) = row.get("intent").and_then(|i| i.get("at")) {
        line.push_str(&format!(", newest start {}", table::wall_time(at)));
    }
    match row.get("lastExit").filter(|e| e.is_object()) {
        Some(exit) => line.push_str(&last_exit(exit)),
        None => line.push_str(", never ended"),
    }
    if let Some(until) = row.get("backoff").and_then(|b| b.get("until")) {
        line.push_str(&format!(", back-off until {}", table::wall_time(until)));
    }
    printable(&line)
}

fn last_exit(exit: &Value) -> String {
    let text = |field: &str| exit.get(field).and_then(Value::as_str).unwrap_or_default();
    let at = exit.get("finished").map(table::wall_time);
    let mut told = format!(
        ", last exit {} with code {}",
        at.unwrap_or_default(),
        exit.get("exitCode").unwrap_or(&Value::Null)
    );
    for part in [text("reason"), text("message").trim()] {
        if !part.is_empty() {
            told.push_str(&format!(", {part}"));
        }
    }
    if exit.get("inferred") == Some(&Value::Bool(true)) {
        told.push_str(" (concluded, not observed)");
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row(value: Value) -> Row {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn a_container_is_summed_up_in_a_line() {
        let time = |minute: u32| json!({"time": format!("2026-01-01T00:{minute:02}:00.000Z")});
        let restarted = row(json!({
            "uid": "u", "container": "main", "restartCount": 2, "intent": {"at": time(3)},
            "lastExit": {"finished": time(2), "exitCode": 137, "reason": "OOMKilled", "message": "out of\nmemory\n", "inferred": false},
            "backoff": {"until": time(4)},
        }));
        assert_eq!(
            summary(&restarted, false),
            "container main: 2 restarts, newest start 2026-01-01T00:03:00.000Z, last exit 2026-01-01T00:02:00.000Z \
             with code 137, OOMKilled, out of\\nmemory, back-off until 2026-01-01T00:04:00.000Z"
        );
        let fresh = row(json!({
            "uid": "u", "container": "main", "restartCount": 1, "intent": null, "lastExit": null, "backoff": null,
        }));
        assert_eq!(
            summary(&fresh, true),
            "container main of u: 1 restart, never ended"
        );
        let lost = row(json!({
            "container": "main", "restartCount": 1,
            "lastExit": {"finished": time(2), "exitCode": 255, "reason": "ContainerStatusUnknown", "inferred": true},
        }));
        let told = summary(&lost, false);
        assert!(
            told.ends_with("code 255, ContainerStatusUnknown (concluded, not observed)"),
            "{told}"
        );
    }
}
