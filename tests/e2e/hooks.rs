//! Lifecycle hooks and the way a container ends.

use std::time::Instant;

use crate::seen::{ENDLESS, Feature, container, deleted, event, marks, phase, soon, status};
use crate::world::World;

pub const FEATURES: &[Feature] = &[
    ("post-start", post_start),
    ("post-start-fails", post_start_fails),
    ("pre-stop", pre_stop),
    ("pre-stop-sleep", pre_stop_sleep),
    ("grace", grace),
    ("stop-signal", stop_signal),
];

/// A runtime that would ignore the signal does not get the container.
fn stop_signal(world: &World) {
    let seen = status(world, "stop-signal", "runs or is refused", |s| {
        let state = &container(s, "main")["state"];
        state["running"].is_object() || state["waiting"]["reason"] == "CreateContainerConfigError"
    });
    let main = &container(&seen, "main")["state"];
    if main["running"].is_object() {
        marks(world, "stop-signal", &["begin"]);
        deleted(world, "stop-signal");
        marks(world, "stop-signal", &["begin", "usr1"]);
        return;
    }
    let why = main["waiting"]["message"].to_string();
    for part in ["SIGUSR1", "ignores it", "or later"] {
        assert!(why.contains(part), "{seen}");
    }
}

fn post_start(world: &World) {
    marks(world, "post-start", &["hook"]);
    status(world, "post-start", "is ready after its hook", |s| {
        container(s, "main")["ready"] == true
    });
}

fn post_start_fails(world: &World) {
    event(world, "post-start-fails", "FailedPostStartHook", "");
    let ended = phase(world, "post-start-fails", "Failed");
    let end = &container(&ended, "main")["state"]["terminated"];
    assert_eq!(end["exitCode"], 4, "{ended}");
}

fn pre_stop(world: &World) {
    marks(world, "pre-stop", &["up"]);
    deleted(world, "pre-stop");
    marks(world, "pre-stop", &["up", "hook", "hooked", "term"]);
}

fn pre_stop_sleep(world: &World) {
    marks(world, "pre-stop-sleep", &["up"]);
    let before = jiff::Timestamp::now().as_second();
    deleted(world, "pre-stop-sleep");
    let lines = world.lines("pre-stop-sleep");
    let term: i64 = lines.last().and_then(|l| l.parse().ok()).expect("a time");
    let took = u64::try_from(term - before).expect("a time after the deletion");
    assert!((3..ENDLESS).contains(&took), "{before}, {lines:?}");
}

fn grace(world: &World) {
    marks(world, "grace", &["up"]);
    let seen = soon("the container runs", || world.try_one("grace", "main"));
    let begin = Instant::now();
    deleted(world, "grace");
    let took = begin.elapsed().as_secs();
    assert!((2..ENDLESS).contains(&took), "{took} s, {seen:?}");
    assert_eq!(world.lines("grace"), ["up", "term"]);
}
