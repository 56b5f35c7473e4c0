//! What assertions look at: logs, status, events, marks.

use std::fs;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::agent_process::{NODE, within};
use crate::world::World;

/// Name of the manifest and of its pod, and what has to be seen of it.
pub type Feature = (&'static str, fn(&World));

/// How long all pods together may take to get where they should on their own: dozens start at once, which takes a minute
/// on a quiet machine and three beside other tests.
const PATIENCE: Duration = Duration::from_secs(8 * 60);
/// How long each assertion may wait after that, for what it did itself.
const AFTERWARDS: Duration = Duration::from_secs(4 * 60);
/// In seconds. What takes longer than this has not ended by itself.
pub const ENDLESS: u64 = 240;

/// As `agent_process::eventually`, with the patience of all assertions together.
#[track_caller]
pub fn soon<T>(what: &str, ask: impl FnMut() -> Result<T, String>) -> T {
    static BEGIN: OnceLock<Instant> = OnceLock::new();
    let passed = BEGIN.get_or_init(Instant::now).elapsed();
    within(PATIENCE.saturating_sub(passed).max(AFTERWARDS), what, ask)
}

/// Waits for a phase; returns the status.
#[track_caller]
pub fn phase(world: &World, pod: &str, phase: &str) -> Value {
    status(world, pod, &format!("is {phase}"), |s| s["phase"] == phase)
}

/// Waits until the status is as wanted; returns it.
#[track_caller]
pub fn status(world: &World, pod: &str, what: &str, is: impl Fn(&Value) -> bool) -> Value {
    soon(&format!("{pod} {what}"), || {
        let status = world.status(pod)?;
        if is(&status) {
            Ok(status)
        } else {
            Err(status.to_string())
        }
    })
}

/// The status of a container of whatever kind; null when there is none.
pub fn container<'s>(status: &'s Value, name: &str) -> &'s Value {
    ["containerStatuses", "initContainerStatuses"]
        .iter()
        .filter_map(|list| status[list].as_array())
        .flatten()
        .find(|c| c["name"] == name)
        .unwrap_or(&Value::Null)
}

/// The status of a condition, like `True`.
pub fn condition<'s>(status: &'s Value, kind: &str) -> &'s str {
    let conditions = status["conditions"].as_array();
    let found = conditions.into_iter().flatten().find(|c| c["type"] == kind);
    found.and_then(|c| c["status"].as_str()).unwrap_or("none")
}

/// How often it was restarted.
pub fn restarts(status: &Value, name: &str) -> u64 {
    container(status, name)["restartCount"]
        .as_u64()
        .unwrap_or(0)
}

/// Lines a container wrote, of all its runs.
pub fn logs(world: &World, pod: &str, container: &str) -> Vec<String> {
    let prefix = format!("default_{pod}-{NODE}_");
    let mut files = Vec::new();
    for entry in fs::read_dir(world.pod_logs())
        .into_iter()
        .flatten()
        .flatten()
    {
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            let dir = entry.path().join(container);
            files.extend(
                fs::read_dir(dir)
                    .into_iter()
                    .flatten()
                    .flatten()
                    .map(|f| f.path()),
            );
        }
    }
    files.sort();
    let texts = files
        .iter()
        .map(|file| fs::read_to_string(file).unwrap_or_default());
    let texts: Vec<String> = texts.collect();
    let lines = texts.iter().flat_map(|text| text.lines());
    lines
        .map(|line| line.splitn(4, ' ').nth(3).unwrap_or_default().to_owned())
        .collect()
}

/// Waits until the log of a container has all of these, each within a line.
#[track_caller]
pub fn said(world: &World, pod: &str, container: &str, parts: &[&str]) {
    soon(&format!("{container} of {pod} says {parts:?}"), || {
        let lines = logs(world, pod, container);
        let has = |part: &&str| lines.iter().any(|line| line.contains(part));
        if parts.iter().all(has) {
            Ok(())
        } else {
            Err(format!("{lines:?}"))
        }
    });
}

/// Waits until the pod's mark file has these lines.
#[track_caller]
pub fn marks(world: &World, pod: &str, wanted: &[&str]) {
    soon(&format!("{pod} leaves the marks {wanted:?}"), || {
        let lines = world.lines(pod);
        if lines == wanted {
            Ok(())
        } else {
            Err(format!("{lines:?}"))
        }
    });
}

/// Waits for an event of that reason whose message has this in it; returns the message.
#[track_caller]
pub fn event(world: &World, pod: &str, reason: &str, part: &str) -> String {
    let what = format!("event {reason}");
    soon(&format!("{pod} has {what}"), || {
        let journal = world.journal(pod);
        let found = journal
            .iter()
            .find(|(w, why)| *w == what && why.contains(part));
        found
            .map(|(_, why)| why.clone())
            .ok_or_else(|| format!("{journal:?}"))
    })
}

/// Deletes a manifest and waits until the pod is gone.
#[track_caller]
pub fn deleted(world: &World, pod: &str) {
    world.remove_manifest(&format!("{pod}.yaml"));
    soon(&format!("{pod} is gone"), || {
        let running = world.running();
        let here = running.iter().any(|c| c.pod == pod);
        let known = world.row("statuses", pod);
        match known {
            Err(_) if !here => Ok(()),
            known => Err(format!("{known:?}, runs: {here}")),
        }
    });
}
