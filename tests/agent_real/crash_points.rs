//! SIGKILL exactly between two steps of a container start.

use holdfast_testkit::containerd::Version;

use crate::agent_process::eventually;
use crate::world::{FOREVER, World};

/// Stops an agent at a fail point of the first container start, kills it there, and starts another: there is
/// one sandbox, one container, one start. `reached` tells that the agent stands at the point.
fn killed_at(world: &World, point: &str, pod: &str, reached: impl Fn() -> Result<(), String>) {
    world.add(&world.pod(pod, "Never", &[("only", FOREVER)]));
    let fail_points = format!("pod_workers::start::{point}=pause");
    let agent = world.spawn_with(&[], &[("FAILPOINTS", &fail_points)]);
    let of_pod = || -> Vec<_> {
        let all = world.containers();
        all.into_iter().filter(|c| c.pod == pod).collect()
    };
    eventually(&format!("the agent reaches {point}"), || {
        if of_pod().is_empty() {
            return Err(agent.log());
        }
        reached()
    });
    let before = of_pod();
    agent.kill9();

    let agent = world.start();
    let seen = world.wait_running(pod, "only");
    world.wait_phase(pod, "Running");
    eventually("the agent has looked around", || match agent.relists() {
        n if n >= 3.0 => Ok(()),
        n => Err(format!("{n} relists")),
    });
    let after = of_pod();
    assert_eq!(
        after.len(),
        1,
        "killed at {point}: {after:?}, before {before:?}"
    );
    assert_eq!(after[0], seen);
    assert_eq!(
        after[0].id, before[0].id,
        "killed at {point}: the container is found again"
    );
    assert_eq!(
        world.lines(&format!("{pod}.only")),
        ["0"],
        "killed at {point}: started once"
    );
    let sandboxes = world.sandboxes();
    let sandboxes: Vec<_> = sandboxes.iter().filter(|(p, _, _)| p == pod).collect();
    assert_eq!(sandboxes.len(), 1, "killed at {point}: {sandboxes:?}");
    let status = world.container_status(pod, "only").unwrap();
    assert_eq!(status["restartCount"], 0, "killed at {point}: {status}");
    agent.kill9();
}

#[test]
fn restart_keeps_a_start_cut_off_between_its_steps_single() {
    let world = World::new(Version::Installed);
    killed_at(&world, "after_create", "created", || Ok(()));
    killed_at(&world, "after_intent", "intended", || {
        let row = world.row("containers", "intended")?;
        if row["intent"].is_object() {
            Ok(())
        } else {
            Err(row.to_string())
        }
    });
    killed_at(&world, "after_start", "started", || {
        world.try_one("started", "only").map(drop)
    });
}
