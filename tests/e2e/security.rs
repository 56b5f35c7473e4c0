//! Security contexts, seen from inside.

use crate::seen::{Feature, container, event, logs, phase, said, status};
use crate::world::World;

pub const FEATURES: &[Feature] = &[
    ("user", user),
    ("capabilities", capabilities),
    ("read-only", read_only),
    ("non-root", non_root),
    ("seccomp", seccomp),
];

fn user(world: &World) {
    let parts = [
        "uid=1234 gid=2345",
        " 3456 ",
        " 4567 ",
        "owner=4567",
        "written",
    ];
    said(world, "user", "main", &parts);
}

fn capabilities(world: &World) {
    said(world, "capabilities", "none", &["0000000000000000"]);
    said(world, "capabilities", "one", &["0000000000000400"]);
}

fn read_only(world: &World) {
    phase(world, "read-only", "Succeeded");
    said(
        world,
        "read-only",
        "main",
        &["root is read-only", "volume is not", "NoNewPrivs:\t1"],
    );
}

fn non_root(world: &World) {
    let waiting = status(world, "non-root", "is not started", |s| {
        container(s, "main")["state"]["waiting"]["reason"] == "CreateContainerConfigError"
    });
    let message = &container(&waiting, "main")["state"]["waiting"]["message"];
    assert!(message.to_string().contains("runAsNonRoot"), "{waiting}");
    event(world, "non-root", "Failed", "runAsNonRoot");
    assert_eq!(logs(world, "non-root", "main"), Vec::<String>::new());
}

fn seccomp(world: &World) {
    said(world, "seccomp", "filtered", &["Seccomp:\t2"]);
    said(world, "seccomp", "free", &["Seccomp:\t0"]);
}
