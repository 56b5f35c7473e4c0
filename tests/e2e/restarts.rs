//! Ends, and what follows from them.

use crate::seen::{Feature, condition, container, event, marks, phase, restarts, status};
use crate::world::World;

pub const FEATURES: &[Feature] = &[
    ("never", never),
    ("on-failure", on_failure),
    ("always", always),
    ("own-policy", own_policy),
    ("restart-all", restart_all),
    ("oom", oom),
    ("no-command", no_command),
    ("no-image", no_image),
    ("deadline", deadline),
];

fn never(world: &World) {
    let ended = phase(world, "never", "Failed");
    assert_eq!(
        container(&ended, "main")["state"]["terminated"]["exitCode"],
        5,
        "{ended}"
    );
    assert_eq!(restarts(&ended, "main"), 0, "{ended}");
    marks(world, "never", &["run"]);
}

fn on_failure(world: &World) {
    let ended = phase(world, "on-failure", "Succeeded");
    assert_eq!(restarts(&ended, "main"), 1, "{ended}");
    marks(world, "on-failure", &["run", "run"]);
}

fn always(world: &World) {
    let again = status(world, "always", "runs again", |s| {
        restarts(s, "main") == 1 && container(s, "main")["state"]["running"].is_object()
    });
    let last = &container(&again, "main")["lastState"]["terminated"];
    assert_eq!(
        (&last["exitCode"], &last["reason"]),
        (&0.into(), &"Completed".into()),
        "{again}"
    );
    marks(world, "always", &["run", "run"]);
}

fn own_policy(world: &World) {
    let ended = phase(world, "own-policy", "Succeeded");
    assert_eq!(restarts(&ended, "main"), 1, "{ended}");
    marks(world, "own-policy", &["run", "run"]);
}

fn restart_all(world: &World) {
    let again = status(world, "restart-all", "runs again", |s| {
        let main = &container(s, "main")["state"]["terminated"];
        main["exitCode"] == 0 && container(s, "bystander")["state"]["running"].is_object()
    });
    for name in ["first", "bystander", "main"] {
        assert_eq!(restarts(&again, name), 1, "{name}: {again}");
    }
    let last = &container(&again, "main")["lastState"]["terminated"];
    assert_eq!(last["exitCode"], 88, "{again}");
    assert_eq!(condition(&again, "AllContainersRestarting"), "False");
    marks(world, "restart-all", &["first", "main", "first", "main"]);
    let journal = world.journal("restart-all");
    let sandboxes = journal.iter().filter(|(what, _)| what == "sandbox created");
    assert_eq!(sandboxes.count(), 1, "{journal:?}");
}

fn oom(world: &World) {
    let ended = status(world, "oom", "has ended", |s| {
        container(s, "main")["state"]["terminated"].is_object()
    });
    let end = &container(&ended, "main")["state"]["terminated"];
    // The shell may outlive the process that was killed.
    assert_ne!(end["exitCode"], 0, "{ended}");
    assert_eq!(end["reason"], "OOMKilled", "{ended}");
}

fn no_command(world: &World) {
    let ended = phase(world, "no-command", "Failed");
    let end = &container(&ended, "main")["state"]["terminated"];
    assert_eq!(end["reason"], "StartError", "{ended}");
    assert!(
        end["message"].to_string().contains("/no/such/command"),
        "{ended}"
    );
    event(world, "no-command", "Failed", "/no/such/command");
}

fn no_image(world: &World) {
    let waiting = status(world, "no-image", "waits for its image", |s| {
        container(s, "main")["state"]["waiting"]["reason"] == "ErrImageNeverPull"
    });
    assert_eq!(waiting["phase"], "Pending", "{waiting}");
    event(
        world,
        "no-image",
        "ErrImageNeverPull",
        "holdfast.local/nowhere:1",
    );
}

fn deadline(world: &World) {
    let ended = phase(world, "deadline", "Failed");
    assert_eq!(ended["reason"], "DeadlineExceeded", "{ended}");
    event(world, "deadline", "DeadlineExceeded", "active");
}
