//! Init containers and sidecars.

use crate::seen::{Feature, condition, container, marks, phase, restarts, status};
use crate::world::World;

pub const FEATURES: &[Feature] = &[
    ("init-order", order),
    ("init-again", again),
    ("init-fails", fails),
    ("sidecars", sidecars),
    ("sidecar-startup", sidecar_startup),
];

fn order(world: &World) {
    let ended = phase(world, "init-order", "Succeeded");
    let marks_of = [
        "one-begin",
        "one-end",
        "two-begin",
        "two-end",
        "three-begin",
        "three-end",
        "main",
    ];
    marks(world, "init-order", &marks_of);
    assert_eq!(condition(&ended, "Initialized"), "True", "{ended}");
    let times = |name: &str| {
        let end = &container(&ended, name)["state"]["terminated"];
        assert_eq!(end["reason"], "Completed", "{name}: {ended}");
        let time = |field: &str| end[field].as_str().unwrap_or_default().to_owned();
        (time("startedAt"), time("finishedAt"))
    };
    for (before, after) in [("one", "two"), ("two", "three"), ("three", "main")] {
        assert!(
            times(before).1 <= times(after).0,
            "{before} before {after}: {ended}"
        );
        assert_eq!(restarts(&ended, before), 0, "{ended}");
    }
}

fn again(world: &World) {
    let ended = phase(world, "init-again", "Succeeded");
    assert_eq!(restarts(&ended, "first"), 1, "{ended}");
    marks(world, "init-again", &["first", "first", "main"]);
}

fn fails(world: &World) {
    let ended = phase(world, "init-fails", "Failed");
    assert_eq!(
        container(&ended, "first")["state"]["terminated"]["exitCode"],
        9,
        "{ended}"
    );
    let main = &container(&ended, "main")["state"];
    assert!(main["running"].is_null(), "{ended}");
    marks(world, "init-fails", &["first"]);
}

fn sidecars(world: &World) {
    let ended = phase(world, "sidecars", "Succeeded");
    let want = [
        "a-begin",
        "b-begin",
        "main-begin",
        "main-end",
        "b-end",
        "a-end",
    ];
    marks(world, "sidecars", &want);
    assert_eq!(restarts(&ended, "a") + restarts(&ended, "b"), 0, "{ended}");
}

fn sidecar_startup(world: &World) {
    status(world, "sidecar-startup", "runs", |s| {
        container(s, "main")["state"]["terminated"]["exitCode"] == 0
    });
    marks(world, "sidecar-startup", &["side", "up", "main"]);
}
