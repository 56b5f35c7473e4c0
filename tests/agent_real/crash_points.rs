//! SIGKILL exactly between two steps of a container start.

use std::fs;

use holdfast_testkit::containerd::Version;
use serde_json::Value;

use crate::agent_process::eventually;
use crate::phases;
use crate::world::{FOREVER, Seen, World};

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

/// Where a start is cut off, in its order.
const STEPS: [&str; 3] = ["after_create", "after_intent", "after_start"];

/// Runs an agent that stops at a fail point, waits until it stands there, and kills it.
fn cut_off(world: &World, point: &str, reached: impl Fn() -> Result<(), String>) {
    let fail_points = format!("pod_workers::{point}=pause");
    let agent = world.spawn_with(&[], &[("FAILPOINTS", &fail_points)]);
    eventually(&format!("the agent reaches {point}"), || {
        reached().map_err(|why| format!("{why}\n{}", agent.log()))
    });
    agent.kill9();
}

/// R12: one life, cut off in every step of every start, and in its hook.
#[test]
fn restart_keeps_a_life_that_is_cut_off_at_every_step_single() {
    const POD: &str = "cut-up";
    let world = World::new(Version::Installed);
    world.add(&phases::life(&world, "undisturbed", false));
    let agent = world.start();
    let reference = world.wait_phase("undisturbed", "Succeeded");
    agent.kill9();

    // The main container ends once it was ready: not before its hook has run again.
    let not_ready = world.starts().join(format!("{POD}.hold-ready"));
    fs::write(&not_ready, "").expect("hold it back");
    world.add(&phases::life(&world, POD, false));
    let of_pod = |name: &str| -> Vec<Seen> {
        let all = world.containers().into_iter();
        all.filter(|c| c.pod == POD && c.container == name)
            .collect()
    };
    let record = |name: &str| -> Result<Value, String> {
        let dump = world.try_dump(&["containers"])?;
        let rows = dump["tables"]["containers"].as_array().ok_or("no table")?;
        let mut rows = rows
            .iter()
            .filter(|row| row["name"].to_string().contains(POD) && row["container"] == name);
        rows.next().cloned().ok_or_else(|| dump.to_string())
    };
    let marked = |file: &str, mark: &str| {
        let lines = world.lines(file);
        let left = lines.iter().any(|line| line == mark);
        left.then_some(()).ok_or_else(|| format!("{lines:?}"))
    };
    cut_off(&world, "sandbox::after_run", || {
        let sandboxes = world.sandboxes();
        let made = sandboxes.iter().any(|(pod, _, _)| pod == POD);
        made.then_some(()).ok_or_else(|| format!("{sandboxes:?}"))
    });
    let mut kills = 1;
    for name in ["one", "side", "two", "three", "main"] {
        for step in STEPS {
            cut_off(&world, &format!("start::{step}"), || {
                let seen = of_pod(name);
                let [only] = &seen[..] else {
                    return Err(format!("{name}: {seen:?}"));
                };
                match step {
                    "after_create" => Ok(()),
                    "after_intent" => {
                        let row = record(name)?;
                        let told = row["intent"]["containerId"] == only.id.as_str();
                        told.then_some(()).ok_or_else(|| row.to_string())
                    }
                    _ => marked(POD, &format!("{name}-begin")),
                }
            });
            kills += 1;
        }
    }
    cut_off(&world, "hook::after_post_start", || {
        marked(&format!("{POD}.hooks"), "post-start-end")
    });
    let ends = |hook: &str| {
        let hooks = world.lines(&format!("{POD}.hooks"));
        let is_end = |line: &&String| **line == format!("{hook}-end");
        hooks.iter().filter(is_end).count()
    };
    cut_off(&world, "terminating::after_kill", || {
        if not_ready.exists() {
            match ends("post-start") {
                2 => fs::remove_file(&not_ready).map_err(|e| e.to_string())?,
                some => return Err(format!("its hook ended {some} times")),
            }
        }
        let row = world.row("workers", POD)?;
        let stopping = row["phase"] == "Terminating" && marked(POD, "side-end").is_ok();
        stopping.then_some(()).ok_or_else(|| row.to_string())
    });
    cut_off(&world, "terminated::before_cleanup", || {
        let row = world.row("workers", POD)?;
        let stopped = row["phase"] == "Terminated";
        stopped.then_some(()).ok_or_else(|| row.to_string())
    });
    kills += 3;

    let _agent = world.start();
    let ended = world.wait_phase(POD, "Succeeded");
    assert_eq!(phases::outcome(&ended), phases::outcome(&reference));
    assert_eq!(world.lines(POD), phases::LIFE, "after {kills} kills");
    for name in ["one", "side", "two", "three", "main"] {
        let seen = of_pod(name);
        let attempts: Vec<u32> = seen.iter().map(|c| c.attempt).collect();
        assert_eq!(attempts, [0], "{name}: {seen:?}");
    }
    // One run was not recorded any more.
    assert_eq!(ends("post-start"), 2);
    assert_eq!(ends("side-pre-stop"), 1);
    let sandboxes = world.sandboxes();
    let of_pod = sandboxes.iter().filter(|(pod, _, _)| pod == POD);
    assert_eq!(of_pod.count(), 1, "{sandboxes:?}");
}
