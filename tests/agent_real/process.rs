//! The agent as a process: signals, its lock, `--runonce`, and a runtime that is away, hangs or restarts.

use std::fs;
use std::time::Duration;

use holdfast_testkit::containerd::Version;
use nix::sys::signal::Signal;
use serde_json::json;

use crate::agent_process::{PATIENCE, eventually, within};
use crate::world::{FOREVER, World, ids};

#[test]
fn signals_end_and_refresh_the_agent_and_never_touch_pods() {
    let world = World::new(Version::Installed);
    // Listing is left to SIGHUP; file notifications do not reach a directory that is replaced.
    world.configure("fileCheckFrequency: 10m\n");
    world.add(&world.pod("first", "Always", &[("only", FOREVER)]));
    let mut agent = world.start();
    world.wait_running("first", "only");
    world.wait_phase("first", "Running");

    // Another agent on the same state directory.
    let mut second = world.spawn(&[]);
    let status = second.wait_exit(Duration::from_secs(30));
    assert_eq!(status.code(), Some(1));
    let said = second.log();
    let pid = format!("pid {}", agent.pid());
    assert!(
        said.contains(&pid) && said.contains("--state-dir"),
        "{said}"
    );

    // SIGHUP. The link's new target is seen by nobody before it.
    let elsewhere = world.dir().join("elsewhere.json");
    fs::write(
        &elsewhere,
        world
            .pod("linked", "Always", &[("only", FOREVER)])
            .to_string(),
    )
    .unwrap();
    std::os::unix::fs::symlink(&elsewhere, world.manifests().join("linked.json")).unwrap();
    world.wait_running("linked", "only");
    let old = world.row("pods", "linked").unwrap()["uid"].clone();
    let mut changed = world.pod("linked", "Always", &[("only", FOREVER)]);
    changed["metadata"]["labels"] = json!({"changed": "yes"});
    fs::write(&elsewhere, changed.to_string()).unwrap();
    agent.signal(Signal::SIGHUP);
    eventually("the changed manifest is read", || {
        let row = world.row("pods", "linked")?;
        if row["uid"] == old {
            Err("the old one".to_owned())
        } else {
            Ok(())
        }
    });
    world.wait_running("linked", "only");
    world.wait_phase("linked", "Running");

    let before = world.running();
    let (status, took) = agent.terminate();
    assert!(status.success(), "{status}: {}", agent.log());
    assert!(took < Duration::from_secs(8), "SIGTERM took {took:?}");
    assert_eq!(world.running(), before, "pods go on running");
    let meta = world.dump(&["meta"]);
    assert_eq!(meta["tables"]["meta"][0]["cleanShutdown"], true);

    // A pod that is being stopped does not hold up the end, and is stopped by the next agent.
    let agent = world.start();
    let mut stubborn = world.pod(
        "stubborn",
        "Always",
        &[("only", "trap '' TERM; while :; do sleep 1; done")],
    );
    stubborn["spec"]["terminationGracePeriodSeconds"] = json!(20);
    world.add(&stubborn);
    world.wait_running("stubborn", "only");
    world.delete("stubborn");
    eventually("it is being stopped", || {
        let row = world.row("workers", "stubborn")?;
        if row["phase"] == "Terminating" {
            Ok(())
        } else {
            Err(row.to_string())
        }
    });
    let mut agent = agent;
    let (status, took) = agent.terminate();
    assert!(status.success(), "{status}: {}", agent.log());
    assert!(
        took < Duration::from_secs(12),
        "SIGTERM while a pod is being stopped took {took:?}"
    );
    let _agent = world.start();
    eventually("it is stopped", || {
        match world.try_one("stubborn", "only") {
            Ok(seen) => Err(format!("{seen:?}")),
            Err(_) => Ok(()),
        }
    });
    assert_eq!(world.running(), before, "other pods go on running");
}

#[test]
fn run_once_tells_by_its_exit_code_how_pods_fared() {
    let world = World::new(Version::Installed);
    world.add(&world.pod("job", "Never", &[("only", "exit 0")]));
    world.add(&world.pod("service", "Always", &[("only", FOREVER)]));
    let mut agent = world.spawn(&["--runonce"]);
    let status = agent.wait_exit(PATIENCE);
    assert_eq!(status.code(), Some(0), "{}", agent.log());
    assert_eq!(world.lines("job.only"), ["0"]);
    let before = world.wait_running("service", "only");

    // Refused at first sight, so that it never counts as running.
    let mut bad = world.pod("bad", "Never", &[("only", "exit 9")]);
    let volumes = bad["spec"]["volumes"].as_array_mut().unwrap();
    volumes.push(json!({"name": "v", "flexVolume": {"driver": "d"}}));
    world.add(&bad);
    let mut agent = world.spawn(&["--runonce"]);
    let status = agent.wait_exit(PATIENCE);
    assert_eq!(status.code(), Some(1), "{}", agent.log());
    assert!(
        agent.log().contains("pods failed: default/bad-"),
        "{}",
        agent.log()
    );
    assert_eq!(world.wait_running("service", "only"), before);
    assert_eq!(
        world.lines("job.only"),
        ["0"],
        "a job that is done is not done again"
    );
}

#[test]
fn a_runtime_that_is_away_hangs_or_restarts_is_waited_for() {
    let world = World::new(Version::Installed);
    world.add(&world.pod("first", "Always", &[("only", FOREVER)]));
    world.runtime.stop_daemon().unwrap();
    drop(fs::remove_file(world.runtime.socket()));

    // Away from the start.
    let agent = world.spawn(&[]);
    let (ready, said) = eventually("the health server answers", || {
        agent.get("/readyz?verbose").map_err(|e| e.to_string())
    });
    assert_eq!(ready, 500, "{said}");
    assert_eq!(agent.get("/healthz").unwrap().0, 200);
    let socket = world.runtime.socket().display().to_string();
    eventually("the log says what is missing", || {
        let log = agent.log();
        let said = log
            .lines()
            .any(|l| l.contains("waiting for the container runtime") && l.contains(&socket));
        if said { Ok(()) } else { Err(log) }
    });
    world.runtime.start_daemon().unwrap();
    let seen = world.wait_running("first", "only");
    let ready = || match agent.get("/readyz") {
        Ok((200, _)) => Ok(()),
        other => Err(format!("{other:?}")),
    };
    eventually("the agent is ready", ready);

    // Restarted under the agent.
    world.runtime.stop_daemon().unwrap();
    world.add(&world.pod("second", "Always", &[("only", FOREVER)]));
    eventually("the agent misses the runtime", || {
        let log = agent.log();
        if log.contains("cannot list pods of the runtime") {
            Ok(())
        } else {
            Err(log)
        }
    });
    assert_eq!(agent.get("/healthz").unwrap().0, 200);
    world.runtime.start_daemon().unwrap();
    world.wait_running("second", "only");
    assert_eq!(
        world.wait_running("first", "only"),
        seen,
        "the restart touched no pod"
    );

    // Hanging, and killed while it hangs.
    let before = ids(&world.running());
    world.runtime.signal_daemon(Signal::SIGSTOP).unwrap();
    world.add(&world.pod("third", "Always", &[("only", FOREVER)]));
    within(PATIENCE, "readiness is withdrawn", || {
        match agent.get("/readyz") {
            Ok((500, _)) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
    assert_eq!(
        agent.get("/healthz").unwrap().0,
        200,
        "the agent itself is well"
    );
    assert!(world.try_dump(&["pods"]).is_ok(), "it answers others");
    world.runtime.signal_daemon(Signal::SIGCONT).unwrap();
    world.wait_running("third", "only");
    eventually("the agent is ready again", ready);
    let after = ids(&world.running());
    for (container, id) in &before {
        assert_eq!(after.get(container), Some(id), "{container:?} was touched");
    }
    let names: Vec<_> = after.keys().map(|(pod, _)| pod.as_str()).collect();
    assert_eq!(names, ["first", "second", "third"]);
}
