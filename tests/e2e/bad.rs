//! Bad input: what it comes to is clear, and nothing gets stuck on it.

use std::time::Instant;

use crate::agent_process::NODE;
use crate::seen::{
    ENDLESS, Feature, container, deleted, event, logs, marks, phase, restarts, said, soon, status,
};
use crate::world::World;

pub const FEATURES: &[Feature] = &[
    ("bad-image", bad_image),
    ("gone-at-once", gone_at_once),
    ("pre-stop-hangs", pre_stop_hangs),
    ("post-start-hangs", post_start_hangs),
    ("big-env", big_env),
    ("big-variable", big_variable),
    ("bad-probes", bad_probes),
    ("bad-signal", bad_signal),
    ("bad-grace", bad_grace),
    ("many-containers", many_containers),
];

/// How many containers stand for `@MANY-CONTAINERS@`. The calls that 200 of them cost are counted in a simulation (`lifecycle`).
const MANY: usize = 60;

/// Fills in what is too long for a manifest that is read by people.
pub fn expand(text: &str) -> String {
    let containers: String = (0..MANY)
        .map(|n| {
            format!(
                "  - {{name: c{n}, image: \"holdfast.local/busybox:1\", command: [\"true\"]}}\n"
            )
        })
        .collect();
    text.replace("@100K@", &"x".repeat(100 * 1024))
        .replace("@1M@", &"x".repeat(1024 * 1024))
        .replace("@MANY-CONTAINERS@\n", &containers)
}

fn bad_image(world: &World) {
    let waiting = status(world, "bad-image", "waits for its image", |s| {
        container(s, "main")["state"]["waiting"]["reason"] == "InvalidImageName"
    });
    assert_eq!(waiting["phase"], "Pending", "{waiting}");
    let message = &container(&waiting, "main")["state"]["waiting"]["message"];
    assert!(message.to_string().contains("Not An Image!"), "{waiting}");
    event(world, "bad-image", "InspectFailed", "Not An Image!");
    deleted(world, "bad-image");
}

fn gone_at_once(world: &World) {
    let ended = phase(world, "gone-at-once", "Succeeded");
    let end = &container(&ended, "main")["state"]["terminated"];
    assert_eq!(
        (&end["exitCode"], &end["reason"]),
        (&0.into(), &"Completed".into()),
        "{ended}"
    );
    assert!(
        end["startedAt"].as_str() <= end["finishedAt"].as_str(),
        "{ended}"
    );
    assert_eq!(restarts(&ended, "main"), 0, "{ended}");
    event(world, "gone-at-once", "Started", "main");
}

fn pre_stop_hangs(world: &World) {
    marks(world, "pre-stop-hangs", &["up"]);
    let begin = Instant::now();
    deleted(world, "pre-stop-hangs");
    let took = begin.elapsed().as_secs();
    assert!((3..ENDLESS).contains(&took), "{took} s");
    assert_eq!(world.lines("pre-stop-hangs"), ["up", "hook", "term"]);
}

fn post_start_hangs(world: &World) {
    marks(world, "post-start-hangs", &["hook"]);
    let status = world.status("post-start-hangs").expect("a status");
    assert_eq!(status["phase"], "Pending", "{status}");
    let main = container(&status, "main");
    assert_eq!(main["ready"], false, "{status}");
    deleted(world, "post-start-hangs");
    assert_eq!(world.lines("post-start-hangs"), ["hook", "term"]);
}

fn big_env(world: &World) {
    said(world, "big-env", "main", &["total=1024000"]);
    phase(world, "big-env", "Succeeded");
}

fn big_variable(world: &World) {
    let ended = phase(world, "big-variable", "Failed");
    let end = &container(&ended, "main")["state"]["terminated"];
    assert_ne!(end["exitCode"], 0, "{ended}");
    let message = end["message"].as_str().unwrap_or_default();
    assert!(message.contains("rgument list too long"), "{ended}");
    let lines = logs(world, "big-variable", "main");
    assert!(!lines.iter().any(|line| line == "never"), "{lines:?}");
}

/// A manifest that is not taken: everything that is wrong with it is told at once, and there is no pod.
fn not_taken(world: &World, pod: &str, parts: &[&str]) {
    let file = format!("/{pod}.yaml");
    let has_all = |text: &str| parts.iter().all(|part| text.contains(part));
    soon(&format!("{file} is told to be broken"), || {
        let dump = world.try_dump(&["sources"])?;
        let sources = dump["tables"]["sources"].as_array().ok_or("no table")?;
        let broken = sources.iter().filter_map(|s| s["broken"].as_object());
        let mut of_file = broken
            .flatten()
            .filter(|(origin, _)| origin.ends_with(&file));
        match of_file.next() {
            Some((_, why)) if has_all(&why.to_string()) => Ok(()),
            _ => Err(dump.to_string()),
        }
    });
    soon(&format!("{file} has an event"), || {
        let dump = world.try_dump(&["journal"])?;
        let journal = dump["tables"]["journal"].as_array().ok_or("no table")?;
        let told = journal.iter().any(|line| {
            let why = line["why"].as_str().unwrap_or_default();
            line["what"] == "event FailedValidation" && why.contains(&file) && has_all(why)
        });
        told.then_some(()).ok_or_else(|| dump.to_string())
    });
    let known = world.row("pods", pod);
    assert!(known.is_err(), "{pod} on {NODE}: {known:?}");
}

fn bad_probes(world: &World) {
    let parts = [
        "livenessProbe",
        "has 2 handlers",
        "startupProbe.successThreshold",
        "readinessProbe.terminationGracePeriodSeconds",
    ];
    not_taken(world, "bad-probes", &parts);
}

fn bad_signal(world: &World) {
    let parts = ["lifecycle.stopSignal", "SIGNOSUCH", "is not a signal"];
    not_taken(world, "bad-signal", &parts);
}

fn bad_grace(world: &World) {
    let parts = [
        "spec.terminationGracePeriodSeconds",
        "is negative",
        "spec.activeDeadlineSeconds",
        "lifecycle.preStop.sleep.seconds",
    ];
    not_taken(world, "bad-grace", &parts);
}

fn many_containers(world: &World) {
    let ended = phase(world, "many-containers", "Succeeded");
    let all = ended["containerStatuses"].as_array().expect("statuses");
    assert_eq!(all.len(), MANY);
    for one in all {
        let end = &one["state"]["terminated"];
        assert_eq!(
            (&end["exitCode"], &one["restartCount"]),
            (&0.into(), &0.into()),
            "{one}"
        );
    }
}
