//! What a restart of the agent costs: nothing. Each test is a row of the restart scenarios.

use std::fs;
use std::time::{Duration, Instant};

use holdfast_testkit::containerd::Version;
use serde_json::json;

use crate::agent_process::{Agent, NODE, eventually, within};
use crate::world::{FOREVER, World, ids};

/// Calls that start or stop something.
pub const EFFECTS: [&str; 7] = [
    "run_podsandbox",
    "create_container",
    "start_container",
    "stop_container",
    "stop_podsandbox",
    "remove_container",
    "remove_podsandbox",
];

/// The agent has had a full look at runtime and sources, and a bit of time to do something stupid.
#[track_caller]
pub fn settled(agent: &Agent) {
    // One that is told of events lists rarely.
    let enough = match Version::Installed.resolved() {
        Ok(Version::Installed) => 3.0,
        _ => 1.0,
    };
    eventually("the agent has looked around", || {
        let relists = agent.relists();
        if relists >= enough {
            Ok(())
        } else {
            Err(format!("{relists} relists"))
        }
    });
}

/// Restart count as the agent tells it.
fn restart_count(world: &World, pod: &str) -> Result<u64, String> {
    let status = world.container_status(pod, "only")?;
    status["restartCount"]
        .as_u64()
        .ok_or_else(|| status.to_string())
}

#[test]
fn restart_keeps_running_pods_untouched() {
    // A hundred are in `agent_child`, on a runtime that costs nothing.
    const PODS: usize = 30;
    let world = World::new(Version::Installed);
    let names: Vec<String> = (0..PODS).map(|n| format!("pod-{n}")).collect();
    for name in &names {
        world.add(&world.pod(name, "Always", &[("only", FOREVER)]));
    }
    let agent = world.start();
    for name in &names {
        world.wait_running(name, "only");
        world.wait_phase(name, "Running");
    }
    let before = (world.containers(), world.sandboxes());
    let versions = |world: &World| {
        let dump = world.dump(&["statuses"]);
        let rows = dump["tables"]["statuses"].as_array().unwrap().clone();
        rows.iter()
            .map(|r| (r["uid"].clone(), r["version"].clone()))
            .collect::<Vec<_>>()
    };
    let statuses = versions(&world);
    world.site.recorded();

    agent.kill9();
    let mut agent = world.start();
    settled(&agent);
    // The sources have spoken, and every pod was looked at once more.
    agent.signal(nix::sys::signal::Signal::SIGHUP);
    settled(&agent);
    for operation in EFFECTS {
        assert_eq!(
            agent.operations(operation),
            0.0,
            "{operation} after a restart"
        );
    }
    let resumed = agent.metric("holdfast_restore_pods{outcome=\"resumed\"}");
    assert_eq!(resumed, PODS as f64, "pods resumed:\n{}", agent.log());
    assert_eq!((world.containers(), world.sandboxes()), before);
    assert_eq!(versions(&world), statuses, "no status changed");
    for name in &names {
        assert_eq!(
            world.lines(&format!("{name}.only")),
            ["0"],
            "{name} was started once"
        );
    }

    // The same after an orderly end.
    assert!(agent.terminate().0.success());
    let agent = world.start();
    settled(&agent);
    for operation in EFFECTS {
        assert_eq!(
            agent.operations(operation),
            0.0,
            "{operation} after a restart"
        );
    }
    assert_eq!((world.containers(), world.sandboxes()), before);
}

#[test]
fn restart_keeps_the_outcome_of_pods_that_run_once() {
    let world = World::new(Version::Installed);
    world.add(&world.pod("done", "Never", &[("only", "exit 0")]));
    world.add(&world.pod(
        "unseen",
        "Never",
        &[(
            "only",
            "while [ ! -e /starts/go ]; do sleep 0.1; done; exit 0",
        )],
    ));
    let agent = world.start();
    world.wait_phase("done", "Succeeded");
    world.wait_running("unseen", "only");
    world.wait_phase("unseen", "Running");
    agent.kill9();

    // One end was recorded; nobody sees the other.
    fs::write(world.starts().join("go"), "").unwrap();
    eventually("it ends unseen", || {
        if world.running().is_empty() {
            Ok(())
        } else {
            Err("it runs".to_owned())
        }
    });
    world.wipe_runtime();
    let agent = world.start();
    let unseen = world.wait_phase("unseen", "Failed");
    let ended = &unseen["containerStatuses"][0]["state"]["terminated"];
    assert_eq!(ended["exitCode"], 137, "{unseen}");
    assert_eq!(ended["reason"], "ContainerStatusUnknown", "{unseen}");
    settled(&agent);
    assert_eq!(world.status("done").unwrap()["phase"], "Succeeded");
    for operation in ["run_podsandbox", "create_container", "start_container"] {
        assert_eq!(agent.operations(operation), 0.0, "{operation}");
    }
    assert_eq!(world.lines("done.only"), ["0"]);
    assert_eq!(world.lines("unseen.only"), ["0"]);

    agent.kill9();
    let agent = world.start();
    settled(&agent);
    assert_eq!(world.status("done").unwrap()["phase"], "Succeeded");
    assert_eq!(world.status("unseen").unwrap()["phase"], "Failed");
    assert_eq!(agent.operations("run_podsandbox"), 0.0);
    assert_eq!(world.lines("unseen.only"), ["0"]);
}

#[test]
fn restart_keeps_the_crash_back_off() {
    let world = World::new(Version::Installed);
    world.add(&world.pod("crash", "Always", &[("only", "exit 3")]));
    let mut agent = world.start();
    // The first restart is at once; then it waits 10 s, then 20 s.
    for (count, wait) in [(1, 10), (2, 20)] {
        let finished = eventually(&format!("restart {count} crashes"), || {
            let status = world.container_status("crash", "only")?;
            let waits = status["state"]["waiting"]["reason"] == "CrashLoopBackOff";
            if status["restartCount"] == count && waits {
                let seen = world.containers().into_iter().max_by_key(|c| c.attempt);
                let seen = seen.ok_or("no container")?;
                assert_eq!(u64::from(seen.attempt), count, "attempt in the runtime");
                Ok(world.inspect(&seen.id).finished_at)
            } else {
                Err(status.to_string())
            }
        });
        std::thread::sleep(Duration::from_secs(2));
        agent.kill9();
        agent = world.start();
        let next = within(Duration::from_secs(60), "the next start", || {
            let status = world.container_status("crash", "only")?;
            let starts = world.lines("crash.only").len() as u64;
            if starts <= count + 1 {
                // It may start between the two looks; then the count tells.
                let waits = status["state"]["waiting"]["reason"] == "CrashLoopBackOff";
                assert!(
                    waits
                        || world.lines("crash.only").len() as u64 > count + 1
                        || status["state"]["running"].is_object(),
                    "waits with another state: {status}"
                );
                assert!(status["restartCount"].as_u64() >= Some(count), "{status}");
                return Err(status.to_string());
            }
            let seen = world.containers().into_iter().max_by_key(|c| c.attempt);
            Ok(world.inspect(&seen.ok_or("no container")?.id))
        });
        let waited = Duration::from_nanos((next.started_at - finished).unsigned_abs());
        assert!(next.started_at > finished, "starts follow ends");
        assert!(
            waited >= Duration::from_secs(wait),
            "waited {waited:?} instead of {wait} s"
        );
        assert!(
            waited < Duration::from_secs(wait + 15),
            "waited {waited:?} instead of {wait} s"
        );
    }
    let marks = world.lines("crash.only");
    assert_eq!(
        marks,
        ["0", "1", "2", "3"],
        "every start has a number of its own"
    );
    eventually("the count goes on", || {
        match restart_count(&world, "crash")? {
            3 => Ok(()),
            other => Err(other.to_string()),
        }
    });
}

#[test]
fn restart_keeps_counts_and_decisions_when_the_runtime_lost_everything() {
    let world = World::new(Version::Installed);
    world.add(&world.pod("counted", "Always", &[("only", FOREVER)]));
    world.add(&world.pod("once", "OnFailure", &[("only", "exit 0")]));
    world.add(&world.pod("never", "Never", &[("only", FOREVER)]));
    let agent = world.start();
    world.wait_phase("once", "Succeeded");
    world.wait_running("never", "only");
    let seen = world.wait_running("counted", "only");
    world.kill(&seen.id);
    eventually("it is started again", || {
        let seen = world.try_one("counted", "only")?;
        if seen.attempt == 1 {
            Ok(())
        } else {
            Err(format!("{seen:?}"))
        }
    });
    eventually("the count is told", || {
        match restart_count(&world, "counted")? {
            1 => Ok(()),
            other => Err(other.to_string()),
        }
    });

    // Containers and logs are gone, the machine is the same.
    agent.kill9();
    world.wipe_pod("counted");
    fs::remove_dir_all(world.pod_logs()).unwrap();
    let agent = world.start();
    let seen = world.wait_running("counted", "only");
    assert_eq!(seen.attempt, 2, "the next start carries the next number");
    eventually("the count is told", || {
        match restart_count(&world, "counted")? {
            2 => Ok(()),
            other => Err(other.to_string()),
        }
    });
    world.wait_running("never", "only");

    // The machine is started anew.
    agent.kill9();
    world.wipe_runtime();
    let start = Instant::now();
    let agent = world.start_with(&["--boot-id", "11111111-2222-3333-4444-555555555555"]);
    let seen = world.wait_running("counted", "only");
    assert!(
        start.elapsed() < Duration::from_secs(60),
        "took {:?}",
        start.elapsed()
    );
    assert_eq!(seen.attempt, 3);
    assert_eq!(world.lines("counted.only"), ["0", "1", "2", "3"]);
    let never = world.wait_phase("never", "Failed");
    assert_eq!(
        never["containerStatuses"][0]["state"]["terminated"]["exitCode"], 137,
        "{never}"
    );
    assert_eq!(world.status("once").unwrap()["phase"], "Succeeded");
    settled(&agent);
    assert_eq!(world.lines("once.only"), ["0"]);
    assert_eq!(world.lines("never.only"), ["0"]);
    assert!(
        agent.log().contains("rebooted=true") || agent.log().contains("\"rebooted\":true"),
        "{}",
        agent.log()
    );

    // Nothing is left to be done after the next start.
    agent.kill9();
    let agent = world.start_with(&["--boot-id", "11111111-2222-3333-4444-555555555555"]);
    settled(&agent);
    for operation in EFFECTS {
        assert_eq!(agent.operations(operation), 0.0, "{operation}");
    }
    assert_eq!(world.wait_running("counted", "only"), seen);
}

#[test]
fn restart_keeps_pods_running_without_a_store() {
    let world = World::new(Version::Installed);
    for name in ["first", "second"] {
        world.add(&world.pod(name, "Always", &[("only", FOREVER)]));
    }
    world.add(&world.pod("orphan", "Always", &[("only", FOREVER)]));
    let agent = world.start();
    for name in ["first", "second", "orphan"] {
        world.wait_running(name, "only");
        world.wait_phase(name, "Running");
    }
    let seen = world.try_one("first", "only").unwrap();
    world.kill(&seen.id);
    eventually("it is started again", || {
        let seen = world.try_one("first", "only")?;
        if seen.attempt == 1 {
            Ok(())
        } else {
            Err(format!("{seen:?}"))
        }
    });
    world.wait_running("first", "only");
    let before = ids(&world.running());
    agent.kill9();
    fs::remove_dir_all(world.state_dir()).unwrap();
    // Nor does the path of the manifests say anything while it is not there.
    world.delete("orphan");
    let aside = world.manifests().with_extension("aside");
    fs::rename(world.manifests(), &aside).unwrap();
    let agent = world.start();
    eventually("the absent directory is told", || {
        let dump = world.try_dump(&["sources"])?;
        let told = dump["tables"]["sources"][0]["error"].as_str();
        match told {
            Some(error) if error.contains("does not exist") => Ok(()),
            _ => Err(dump.to_string()),
        }
    });
    settled(&agent);
    assert_eq!(ids(&world.running()), before, "nothing is stopped");
    // Gone from the sources as well: killed, but only once they have spoken.
    fs::rename(&aside, world.manifests()).unwrap();
    for name in ["first", "second"] {
        world.wait_phase(name, "Running");
    }
    eventually("the orphan is stopped", || {
        match world.try_one("orphan", "only") {
            Ok(seen) => Err(format!("{seen:?}")),
            Err(_) => Ok(()),
        }
    });
    settled(&agent);
    let mut expected = before;
    expected.remove(&("orphan".to_owned(), "only".to_owned()));
    assert_eq!(
        ids(&world.running()),
        expected,
        "pods are adopted, not started again"
    );
    for operation in ["run_podsandbox", "create_container", "start_container"] {
        assert_eq!(agent.operations(operation), 0.0, "{operation}");
    }
    assert_eq!(
        restart_count(&world, "first").unwrap(),
        1,
        "the count is the runtime's"
    );
    let meta = world.dump(&["meta"]);
    let epoch = &meta["tables"]["meta"][0]["epoch"]["reason"];
    assert!(*epoch == "Fresh" || *epoch == "Rebuilt", "{meta}");
}

#[test]
fn restart_keeps_to_what_the_manifests_say() {
    let world = World::new(Version::Installed);
    let polite = |name: &str| {
        let script = format!(
            "trap 'sleep 1; echo end >> /starts/{name}.only; exit 0' TERM; sleep 100000 & wait"
        );
        world.pod(name, "Always", &[("only", &script)])
    };
    for name in ["removed", "replaced", "touched", "broken"] {
        world.add(&polite(name));
    }
    let mut agent = world.start();
    for name in ["removed", "replaced", "touched", "broken"] {
        world.wait_running(name, "only");
        world.wait_phase(name, "Running");
    }
    let before = ids(&world.running());
    let id = |name: &str| before[&(name.to_owned(), "only".to_owned())].clone();
    agent.kill9();

    // While the agent is away: one is removed, one changed, one removed and put back, one broken.
    world.delete("removed");
    let mut other = polite("replaced");
    other["metadata"]["labels"] = json!({"version": "2"});
    world.add(&other);
    world.delete("touched");
    world.add(&polite("touched"));
    world.write_manifest(
        "broken.json",
        "{\"apiVersion\": \"v1\", \"kind\": \"Pod\", ",
    );
    agent = world.start();

    eventually("the removed pod is stopped", || {
        match world.try_one("removed", "only") {
            Ok(seen) => Err(format!("{seen:?}")),
            Err(_) => Ok(()),
        }
    });
    assert_eq!(
        world.lines("removed.only"),
        ["0", "end"],
        "with its grace period"
    );
    eventually("the changed pod is another one", || {
        let seen = world.try_one("replaced", "only")?;
        if seen.id == id("replaced") {
            Err(format!("{seen:?}"))
        } else {
            Ok(())
        }
    });
    world.wait_running("replaced", "only");
    assert_eq!(
        world.lines("replaced.only"),
        ["0", "end", "0"],
        "one after the other"
    );
    assert_eq!(world.wait_running("touched", "only").id, id("touched"));
    assert_eq!(world.lines("touched.only"), ["0"]);
    assert_eq!(
        world.wait_running("broken", "only").id,
        id("broken"),
        "a broken manifest freezes its pod"
    );
    eventually("forgotten", || match world.row("pods", "removed") {
        Ok(row) => Err(row.to_string()),
        Err(_) => Ok(()),
    });
    let journal = world.try_dump(&["journal", "removed-node1"]).unwrap();
    let lines = journal["tables"]["journal"].as_array().unwrap();
    assert!(
        lines.len() > 1 && lines.iter().all(|l| l["namespace"] == "default"),
        "what was forgotten still has a history by its name: {journal}"
    );

    // The same manifest again: the pod runs again, as a new one.
    world.add(&polite("removed"));
    world.wait_running("removed", "only");
    assert_eq!(world.lines("removed.only"), ["0", "end", "0"]);

    // The directory vanishes while the agent is away.
    let before = ids(&world.running());
    agent.kill9();
    let aside = world.dir().join("aside");
    fs::rename(world.manifests(), &aside).unwrap();
    agent = world.start();
    settled(&agent);
    assert_eq!(ids(&world.running()), before, "its pods are frozen");
    agent.kill9();
    agent = world.start();
    settled(&agent);
    assert_eq!(ids(&world.running()), before, "and stay so");
    let sources = world.dump(&["sources"]);
    assert!(
        sources["tables"]["sources"][0]["error"].is_string(),
        "{sources}"
    );

    // It comes back with one manifest less.
    fs::remove_file(aside.join("touched.json")).unwrap();
    fs::rename(&aside, world.manifests()).unwrap();
    agent.signal(nix::sys::signal::Signal::SIGHUP);
    eventually("the removed pod is stopped", || {
        match world.try_one("touched", "only") {
            Ok(seen) => Err(format!("{seen:?}")),
            Err(_) => Ok(()),
        }
    });
    let mut expected = before;
    expected.remove(&("touched".to_owned(), "only".to_owned()));
    assert_eq!(ids(&world.running()), expected);
    assert_eq!(
        world.row("pods", "broken").unwrap()["name"],
        format!("broken-{NODE}")
    );
}

#[test]
fn restart_keeps_the_grace_period_of_a_pod_that_is_stopped() {
    const GRACE: u64 = 15;
    let world = World::new(Version::Installed);
    let script = "trap 'echo asked >> /starts/asked' TERM; while :; do sleep 0.2; done";
    let mut pod = world.pod("stubborn", "Always", &[("only", script)]);
    pod["spec"]["terminationGracePeriodSeconds"] = json!(GRACE);
    world.add(&pod);
    let agent = world.start();
    world.wait_running("stubborn", "only");
    world.delete("stubborn");
    let asked = eventually("it is asked to end", || {
        if world.lines("asked").is_empty() {
            Err("not yet".to_owned())
        } else {
            Ok(Instant::now())
        }
    });
    std::thread::sleep(Duration::from_secs(GRACE / 2));
    world.try_one("stubborn", "only").unwrap();
    agent.kill9();
    let _agent = world.start();
    within(Duration::from_secs(60), "it is killed", || {
        match world.try_one("stubborn", "only") {
            Ok(seen) => Err(format!("{seen:?}")),
            Err(_) => Ok(()),
        }
    });
    let took = asked.elapsed();
    assert!(
        took > Duration::from_secs(GRACE - 2),
        "killed after {took:?}"
    );
    assert!(
        took < Duration::from_secs(GRACE + 6),
        "the grace period started over: killed after {took:?}"
    );
    eventually("forgotten", || match world.row("pods", "stubborn") {
        Ok(row) => Err(row.to_string()),
        Err(_) => Ok(()),
    });
}

#[test]
fn restart_keeps_the_image_pull_back_off() {
    let world = World::new(Version::Installed);
    let mut pod = world.pod("pulls", "Always", &[("only", FOREVER)]);
    pod["spec"]["containers"][0]["image"] = json!("holdfast.invalid/absent:1");
    world.add(&pod);
    let agent = world.start();
    let backoff = || -> Result<(i64, i64), String> {
        let dump = world.try_dump(&["images"])?;
        let row = &dump["tables"]["images"][0]["backoffs"][0]["backoff"];
        match (
            row["durationMs"].as_i64(),
            row["until"]["bootTimeMs"].as_i64(),
        ) {
            (Some(duration), Some(until)) => Ok((duration, until)),
            _ => Err(dump.to_string()),
        }
    };
    let (duration, until) = eventually("the pull fails", backoff);
    assert_eq!(duration, 10_000);
    eventually("its status says so", || {
        let status = world.container_status("pulls", "only")?;
        match status["state"]["waiting"]["reason"].as_str() {
            Some("ErrImagePull" | "ImagePullBackOff") => Ok(()),
            _ => Err(status.to_string()),
        }
    });
    world.site.recorded();
    agent.kill9();
    let agent = world.start();
    let pulled_at = eventually("the pull is tried again", || {
        if agent.operations("pull_image") > 0.0 {
            return Ok(boottime_ms());
        }
        let status = world.container_status("pulls", "only")?;
        let reason = status["state"]["waiting"]["reason"].as_str();
        assert!(
            matches!(reason, Some("ErrImagePull" | "ImagePullBackOff")),
            "waits for another reason: {status}"
        );
        Err(format!("{status}"))
    });
    assert!(
        pulled_at >= until,
        "tried {} ms too early",
        until - pulled_at
    );
    let (duration, _) = eventually("it grows", || match backoff()? {
        (10_000, _) => Err("10 s".to_owned()),
        other => Ok(other),
    });
    assert_eq!(duration, 20_000);
}

/// CLOCK_BOOTTIME.
pub fn boottime_ms() -> i64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME).unwrap();
    now.tv_sec() * 1000 + now.tv_nsec() / 1_000_000
}

/// SIGKILL, restart, then a container is killed: it is started again, and its death recorded.
fn noticed(version: Version) {
    let world = World::new(version);
    world.add(&world.pod("watched", "Always", &[("only", FOREVER)]));
    let agent = world.start();
    world.wait_running("watched", "only");
    world.wait_phase("watched", "Running");
    agent.kill9();
    let agent = world.start();
    if version == Version::V1_7 {
        settled(&agent);
    }

    let seen = world.try_one("watched", "only").unwrap();
    world.kill(&seen.id);
    let killed = Instant::now();
    let next = within(Duration::from_secs(15), "the death is noticed", || {
        let next = world.try_one("watched", "only")?;
        if next.id == seen.id {
            Err("the runtime has not noticed".to_owned())
        } else {
            Ok(next)
        }
    });
    eprintln!(
        "{version:?}: container runs again after {:?}",
        killed.elapsed()
    );
    assert_eq!(next.attempt, 1);
    let status = eventually("the death is told", || {
        let status = world.container_status("watched", "only")?;
        if status["restartCount"] == 1 {
            Ok(status)
        } else {
            Err(status.to_string())
        }
    });
    assert_eq!(
        status["lastState"]["terminated"]["exitCode"], 137,
        "{status}"
    );

    if version == Version::V1_7 {
        // An idle node is looked at every 10 s, not every second.
        let (relists, start) = (agent.relists(), Instant::now());
        within(Duration::from_secs(60), "three relists", || {
            let more = agent.relists() - relists;
            if more >= 2.0 {
                Ok(())
            } else {
                Err(format!("{more}"))
            }
        });
        assert!(
            start.elapsed() > Duration::from_secs(9),
            "relists are rare: two in {:?}",
            start.elapsed()
        );
        assert_eq!(
            agent.metric("kubelet_evented_pleg_connection_error_count"),
            0.0
        );
    }
}

#[test]
fn killed_container_is_noticed_within_15_s_after_sigkill_and_restart() {
    noticed(Version::Installed);
}

#[test]
fn killed_container_is_noticed_within_15_s_after_sigkill_and_restart_by_events() {
    noticed(Version::V1_7);
}
