//! Rows of the restart scenarios with init containers, sidecars, probes and hooks in play.

use std::fs;
use std::time::{Duration, Instant};

use holdfast_testkit::containerd::Version;
use serde_json::{Value, json};

use crate::agent_process::{Agent, NODE, eventually, within};
use crate::restarts::{EFFECTS, boottime_ms, settled};
use crate::world::{FOREVER, World, ids};

/// Adds an init container to a pod, a sidecar when `sidecar`; both leave marks as containers do.
fn add_init(world: &World, pod: &mut Value, name: &str, script: &str, sidecar: bool) {
    let of = pod["metadata"]["name"].as_str().expect("a name");
    let mut other = world.pod(of, "Always", &[(name, script)]);
    let mut container = other["spec"]["containers"][0].take();
    if sidecar {
        container["restartPolicy"] = json!("Always");
    }
    let list = &mut pod["spec"]["initContainers"];
    match list.as_array_mut() {
        Some(list) => list.push(container),
        None => *list = json!([container]),
    }
}

/// A pod with an init container that ends at once, a sidecar `side`, and a main container `only`.
fn full(world: &World, name: &str, policy: &str, script: &str) -> Value {
    let mut pod = world.pod(name, policy, &[("only", script)]);
    add_init(world, &mut pod, "init", "exit 0", false);
    add_init(world, &mut pod, "side", FOREVER, true);
    pod
}

fn exec(script: &str) -> Value {
    json!({"command": ["sh", "-c", script]})
}

/// The status of a container of whatever kind.
fn container(world: &World, pod: &str, name: &str) -> Result<Value, String> {
    let status = world.status(pod)?;
    let lists = ["containerStatuses", "initContainerStatuses"];
    let mut all = lists.iter().filter_map(|list| status[list].as_array());
    let found = all.find_map(|list| list.iter().find(|c| c["name"] == name).cloned());
    found.ok_or_else(|| format!("no status of {name} in {status}"))
}

/// Waits until the status of a container is as wanted.
#[track_caller]
fn wait_container(
    world: &World,
    pod: &str,
    name: &str,
    what: &str,
    is: impl Fn(&Value) -> bool,
) -> Value {
    eventually(&format!("{name} of {pod} {what}"), || {
        let status = container(world, pod, name)?;
        if is(&status) {
            Ok(status)
        } else {
            Err(format!("{status}\n{:?}", world.journal(pod)))
        }
    })
}

#[track_caller]
fn started_nothing(agent: &Agent) {
    for operation in ["run_podsandbox", "create_container", "start_container"] {
        assert_eq!(
            agent.operations(operation),
            0.0,
            "{operation} after a restart"
        );
    }
}

#[track_caller]
fn gone(world: &World, pod: &str) {
    eventually(&format!("{pod} is forgotten"), || {
        let left: Vec<_> = world
            .running()
            .into_iter()
            .filter(|c| c.pod == pod)
            .collect();
        match world.row("pods", pod) {
            Err(_) if left.is_empty() => Ok(()),
            row => Err(format!("{row:?} {left:?}")),
        }
    });
}

/// R1 and R9.
#[test]
fn restart_keeps_probe_results_and_counters() {
    const PERIOD: u64 = 8;
    let world = World::new(Version::Installed);
    let readiness =
        |script: &str| json!({"exec": exec(script), "periodSeconds": 2, "timeoutSeconds": 10});
    let mut ready = full(&world, "ready", "Always", FOREVER);
    ready["spec"]["containers"][0]["readinessProbe"] = readiness("true");
    ready["spec"]["containers"][0]["livenessProbe"] = readiness("true");
    let side = &mut ready["spec"]["initContainers"][1];
    side["startupProbe"] = readiness("true");
    side["readinessProbe"] = readiness("true");
    let mut closed = full(&world, "closed", "Always", FOREVER);
    closed["spec"]["containers"][0]["readinessProbe"] = readiness("test -e /starts/closed.open");
    let mut starting = full(&world, "starting", "Always", FOREVER);
    let main = &mut starting["spec"]["containers"][0];
    main["startupProbe"] = json!({
        "exec": exec("test -e /starts/starting.up"), "periodSeconds": 2, "timeoutSeconds": 10,
        "failureThreshold": 1000,
    });
    main["readinessProbe"] = readiness("true");
    let mut failing = full(
        &world,
        "failing",
        "Always",
        &format!("echo $((0x$attempt)) > /tmp/attempt\n{FOREVER}"),
    );
    failing["spec"]["containers"][0]["livenessProbe"] = json!({
        "exec": exec("cat /tmp/attempt >> /starts/failing.probes; false"),
        "periodSeconds": PERIOD, "failureThreshold": 3, "timeoutSeconds": 5,
    });
    for pod in [&ready, &closed, &starting, &failing] {
        world.add(pod);
    }
    let agent = world.start();
    let at_rest = ["ready", "closed", "starting"];
    wait_container(&world, "ready", "only", "is ready", |c| c["ready"] == true);
    wait_container(&world, "ready", "side", "is ready", |c| c["ready"] == true);
    for pod in ["closed", "starting"] {
        wait_container(&world, pod, "only", "runs", |c| {
            c["state"]["running"].is_object()
        });
    }
    let failures = || -> Result<u64, String> {
        let dump = world.try_dump(&["probes"])?;
        let rows = dump["tables"]["probes"]
            .as_array()
            .ok_or("no table")?
            .clone();
        let row = rows
            .iter()
            .find(|row| row["name"].to_string().contains("failing") && row["last"] == "Failure");
        let row = row.ok_or_else(|| dump.to_string())?;
        row["consecutive"].as_u64().ok_or_else(|| row.to_string())
    };
    eventually("liveness has failed twice", || match failures()? {
        2 => Ok(()),
        n => Err(format!("{n} failures")),
    });
    let rows = |world: &World| at_rest.map(|pod| world.row("statuses", pod).unwrap());
    let (statuses, before) = (rows(&world), ids(&world.running()));
    // The next probe is seconds away.
    world.site.recorded();
    agent.kill9();
    let mut agent = world.start();
    settled(&agent);

    // One more failure restarts the container: three of the first one in all.
    wait_container(&world, "failing", "only", "is restarted", |c| {
        c["restartCount"] == 1 && c["state"]["running"].is_object()
    });
    let probes = world.lines("failing.probes");
    let of_first = probes.iter().filter(|attempt| *attempt == "0").count();
    assert_eq!(of_first, 3, "failures before the restart: {probes:?}");
    // What is at rest was probed again, several times, and nothing of it changed.
    for (before, after) in statuses.iter().zip(rows(&world)) {
        assert_eq!(
            (&after["version"], &after["status"]),
            (&before["version"], &before["status"]),
            "no status is written"
        );
    }
    let mut after = ids(&world.running());
    let mut wanted = before;
    for ids in [&mut after, &mut wanted] {
        ids.remove(&("failing".to_owned(), "only".to_owned()));
    }
    assert_eq!(after, wanted, "no other container is touched");
    assert_eq!(agent.operations("start_container"), 1.0, "the one restart");

    // Probes go on where they were.
    fs::write(world.starts().join("closed.open"), "").unwrap();
    fs::write(world.starts().join("starting.up"), "").unwrap();
    for pod in ["closed", "starting"] {
        wait_container(&world, pod, "only", "gets ready", |c| c["ready"] == true);
    }
    assert!(agent.terminate().0.success());
}

/// R10.
#[test]
fn restart_keeps_hooks_and_grace_of_a_pod_that_is_stopped() {
    const GRACE: u64 = 20;
    let world = World::new(Version::Installed);
    let pre_stop = |script: &str| json!({"preStop": {"exec": exec(script)}});
    let mut hooked = full(
        &world,
        "hooked",
        "Always",
        "trap 'echo term >> /starts/hooked' TERM; while :; do sleep 0.2; done",
    );
    hooked["spec"]["terminationGracePeriodSeconds"] = json!(GRACE);
    hooked["spec"]["containers"][0]["lifecycle"] =
        pre_stop("echo begin >> /starts/hooked; sleep 0.5; echo end >> /starts/hooked");
    hooked["spec"]["initContainers"][1]["lifecycle"] =
        pre_stop("echo side >> /starts/hooked.side-hook");
    let mut cut_off = full(
        &world,
        "cut-off",
        "Always",
        "trap 'echo term >> /starts/cut-off; exit 0' TERM; sleep 100000 & wait",
    );
    cut_off["spec"]["terminationGracePeriodSeconds"] = json!(GRACE);
    cut_off["spec"]["containers"][0]["lifecycle"] =
        pre_stop("echo begin >> /starts/cut-off; sleep 100000");
    let pods = ["hooked", "cut-off"];
    world.add(&hooked);
    world.add(&cut_off);
    let agent = world.start();
    for pod in pods {
        world.wait_running(pod, "only");
        world.wait_phase(pod, "Running");
    }
    for pod in pods {
        world.delete(pod);
    }
    let asked = Instant::now();
    eventually("hooks are done", || {
        let journal = world.journal("hooked");
        let done = |what: &str| {
            let why = format!("{what}: preStop");
            journal.iter().any(|(w, y)| w == "hook done" && *y == why)
        };
        if done("only") && done("side") && !world.lines("cut-off").is_empty() {
            Ok(())
        } else {
            Err(format!("{journal:?}"))
        }
    });
    eventually("it is asked to end", || match world.lines("hooked") {
        marks if marks == ["begin", "end", "term"] => Ok(()),
        marks => Err(format!("{marks:?}")),
    });
    std::thread::sleep(Duration::from_secs(GRACE / 2).saturating_sub(asked.elapsed()));
    for pod in pods {
        world.try_one(pod, "only").unwrap();
    }
    agent.kill9();
    let _agent = world.start();
    let mut took = Vec::new();
    let mut left = pods.to_vec();
    within(Duration::from_secs(60), "they are stopped", || {
        left.retain(|pod| {
            let runs = world.try_one(pod, "only").is_ok();
            if !runs {
                took.push(((*pod).to_owned(), asked.elapsed()));
            }
            runs
        });
        left.is_empty()
            .then_some(())
            .ok_or_else(|| format!("{left:?}"))
    });
    for (pod, took) in took {
        let range = Duration::from_secs(GRACE - 2)..Duration::from_secs(GRACE + 8);
        assert!(range.contains(&took), "{pod} was stopped after {took:?}");
    }
    for pod in pods {
        gone(&world, pod);
    }
    assert_eq!(world.lines("hooked"), ["begin", "end", "term"]);
    assert_eq!(world.lines("hooked.side-hook"), ["side"]);
    assert_eq!(
        world.lines("cut-off"),
        ["begin", "begin", "term"],
        "a hook that was cut off runs again in what is left"
    );
    for mark in ["hooked.only", "hooked.init", "hooked.side", "cut-off.only"] {
        assert_eq!(world.lines(mark), ["0"], "{mark}");
    }
}

/// R5 and R11.
#[test]
fn restart_keeps_ends_and_counts_of_all_kinds_of_containers() {
    let world = World::new(Version::Installed);
    world.add(&full(&world, "done", "Never", "exit 0"));
    world.add(&full(
        &world,
        "unseen",
        "Never",
        "while [ ! -e /starts/go ]; do sleep 0.1; done; exit 0",
    ));
    let mut counted = world.pod("counted", "Always", &[("only", FOREVER)]);
    add_init(
        &world,
        &mut counted,
        "init",
        "test $((0x$attempt)) -ge 1",
        false,
    );
    add_init(&world, &mut counted, "side", FOREVER, true);
    world.add(&counted);
    let agent = world.start();
    world.wait_phase("done", "Succeeded");
    world.wait_running("unseen", "only");
    world.wait_phase("unseen", "Running");
    world.wait_running("counted", "only");
    let side = world.wait_running("counted", "side");
    world.kill(&side.id);
    for name in ["init", "side"] {
        wait_container(&world, "counted", name, "counts 1", |c| {
            c["restartCount"] == 1 && (name == "init" || c["state"]["running"].is_object())
        });
    }
    let done = world.status("done").unwrap();
    agent.kill9();

    // One ends while nobody looks, then the runtime loses everything.
    fs::write(world.starts().join("go"), "").unwrap();
    eventually("it ends unseen", || match world.try_one("unseen", "only") {
        Ok(seen) => Err(format!("{seen:?}")),
        Err(_) => Ok(()),
    });
    world.wipe_runtime();
    fs::remove_dir_all(world.pod_logs()).unwrap();
    let agent = world.start();
    let unseen = world.wait_phase("unseen", "Failed");
    let ended = &unseen["containerStatuses"][0]["state"]["terminated"];
    assert_eq!(
        (&ended["exitCode"], &ended["reason"]),
        (&json!(137), &json!("ContainerStatusUnknown")),
        "{unseen}"
    );
    let only = world.wait_running("counted", "only");
    let side = world.wait_running("counted", "side");
    for (name, count) in [("init", 2), ("side", 2), ("only", 1)] {
        wait_container(&world, "counted", name, "counts on", |c| {
            c["restartCount"] == count
        });
    }
    assert_eq!((only.attempt, side.attempt), (1, 2));
    settled(&agent);
    let marks = |pod: &str| ["init", "side", "only"].map(|c| world.lines(&format!("{pod}.{c}")));
    assert_eq!(
        marks("counted"),
        [vec!["0", "1", "2"], vec!["0", "1", "2"], vec!["0", "1"]]
    );
    for pod in ["done", "unseen"] {
        assert_eq!(marks(pod), [["0"], ["0"], ["0"]], "{pod} runs once");
    }
    assert_eq!(world.status("done").unwrap(), done, "nothing to tell");

    agent.kill9();
    let agent = world.start();
    settled(&agent);
    started_nothing(&agent);
    assert_eq!(world.status("unseen").unwrap(), unseen);
}

/// R7 and R8.
#[test]
fn restart_keeps_back_offs_of_init_containers_and_sidecars() {
    const WAIT: Duration = Duration::from_secs(10);
    let world = World::new(Version::Installed);
    let mut init = world.pod("init", "Always", &[("only", FOREVER)]);
    add_init(&world, &mut init, "bad", "exit 3", false);
    let mut side = world.pod("side", "Always", &[("only", FOREVER)]);
    add_init(&world, &mut side, "bad", "sleep 1; exit 3", true);
    let mut pulls = world.pod("pulls", "Always", &[("only", FOREVER)]);
    add_init(&world, &mut pulls, "bad", "exit 0", false);
    pulls["spec"]["initContainers"][0]["image"] = json!("holdfast.invalid/absent:1");
    for pod in [&init, &side, &pulls] {
        world.add(pod);
    }
    let agent = world.start();
    let back_off = || -> Result<(i64, i64), String> {
        let dump = world.try_dump(&["images"])?;
        let rows = dump["tables"]["images"].as_array().ok_or("no table")?;
        let row = rows.iter().map(|row| &row["backoffs"][0]["backoff"]);
        let row = row.clone().find(|row| row.is_object());
        let row = row.ok_or_else(|| dump.to_string())?;
        match (
            row["durationMs"].as_i64(),
            row["until"]["bootTimeMs"].as_i64(),
        ) {
            (Some(duration), Some(until)) => Ok((duration, until)),
            _ => Err(dump.to_string()),
        }
    };
    let newest = |pod: &str| {
        let all = world.containers().into_iter();
        let all = all.filter(|c| c.pod == pod && c.container == "bad");
        all.max_by_key(|c| c.attempt)
    };
    let finished = ["init", "side"].map(|pod| {
        wait_container(&world, pod, "bad", "waits", |c| {
            c["restartCount"] == 1 && c["state"]["waiting"]["reason"] == "CrashLoopBackOff"
        });
        let seen = newest(pod).expect("a container");
        assert_eq!(seen.attempt, 1, "{pod}");
        world.inspect(&seen.id).finished_at
    });
    // The first wait of a pull may be over by now; the one that holds counts.
    let (duration, until) = eventually("the pull is backed off", || match back_off()? {
        (duration, until) if until > boottime_ms() + 3_000 => Ok((duration, until)),
        other => Err(format!("{other:?}")),
    });
    agent.kill9();
    let agent = world.start();

    let mut waiting = true;
    while waiting {
        waiting = false;
        for pod in ["init", "side"] {
            // In this order: what starts in between is seen.
            let status = container(&world, pod, "bad").unwrap();
            if newest(pod).expect("a container").attempt == 1 {
                waiting = true;
                let reason = &status["state"]["waiting"]["reason"];
                assert_eq!(reason, "CrashLoopBackOff", "{pod}: {status}");
                assert_eq!(status["restartCount"], 1, "{pod}: {status}");
            }
        }
        if agent.operations("pull_image") == 0.0 {
            waiting = true;
        } else {
            let early = until - boottime_ms();
            assert!(early <= 0, "pulled at least {early} ms too early");
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    for (pod, finished) in ["init", "side"].iter().zip(finished) {
        let next = eventually(&format!("{pod} starts"), || {
            let seen = newest(pod).ok_or("no container")?;
            let next = world.inspect(&seen.id);
            if next.started_at > 0 {
                Ok(next)
            } else {
                Err(format!("{next:?}"))
            }
        });
        let waited = Duration::from_nanos((next.started_at - finished).unsigned_abs());
        assert!(
            next.started_at > finished && waited >= WAIT && waited < WAIT * 3,
            "{pod} waited {waited:?}"
        );
        // The runtime says that it has started before its first command has run.
        eventually(&format!("{pod} has written"), || {
            match world.lines(&format!("{pod}.bad")) {
                lines if lines == ["0", "1", "2"] => Ok(()),
                lines => Err(format!("{lines:?}")),
            }
        });
    }
    let (grown, _) = eventually("the back-off grows", || match back_off()? {
        (same, _) if same == duration => Err(format!("{same}")),
        other => Ok(other),
    });
    assert_eq!(grown, duration * 2, "the pull's back-off goes on");
}

/// R20.
#[test]
fn restart_keeps_evicted_pods_stopped_until_their_manifests_change() {
    let world = World::new(Version::Installed);
    let mut late = full(&world, "late", "Always", FOREVER);
    late["spec"]["activeDeadlineSeconds"] = json!(5);
    world.add(&full(&world, "greedy", "Always", FOREVER));
    world.add(&late);
    // Nothing but a drill evicts a static pod.
    let evict = world.site.root_dir().with_file_name("evict");
    let drill = [("HOLDFAST_EVICT", &*evict.to_string_lossy())];
    let mut agent = world.site.spawn_with(&[], &drill);
    agent.wait_ready();
    world.wait_running("greedy", "only");
    std::fs::write(&evict, format!("greedy-{NODE}")).expect("say what is to be evicted");
    let reasons = [("greedy", "Evicted"), ("late", "DeadlineExceeded")];
    let stopped = |world: &World| {
        reasons.map(|(pod, reason)| {
            let status = world.wait_phase(pod, "Failed");
            assert_eq!(status["reason"], reason, "{status}");
            eventually(&format!("{pod} is finished"), || {
                let row = world.row("workers", pod)?;
                let finished = row["phase"] == "Finished";
                finished.then_some(()).ok_or_else(|| row.to_string())
            });
            world.row("statuses", pod).unwrap()
        })
    };
    let before = stopped(&world);
    assert_eq!(world.running(), [], "all of them are stopped");
    let marks = || {
        reasons.map(|(pod, _)| ["init", "side", "only"].map(|c| world.lines(&format!("{pod}.{c}"))))
    };
    let seen = marks();

    agent.kill9();
    for more in [
        &[][..],
        &["--boot-id", "11111111-2222-3333-4444-555555555555"][..],
    ] {
        let agent = world.start_with(more);
        settled(&agent);
        agent.signal(nix::sys::signal::Signal::SIGHUP);
        settled(&agent);
        for operation in &EFFECTS[..3] {
            assert_eq!(agent.operations(operation), 0.0, "{operation} {more:?}");
        }
        let after = stopped(&world);
        for (before, after) in before.iter().zip(after) {
            assert_eq!(after["status"], before["status"], "{more:?}");
        }
        assert_eq!(marks(), seen, "{more:?}");
        agent.kill9();
        world.wipe_runtime();
    }

    // Other manifests are other pods.
    let _agent = world.start();
    world.add(&full(&world, "greedy", "OnFailure", FOREVER));
    late["spec"]
        .as_object_mut()
        .unwrap()
        .remove("activeDeadlineSeconds");
    world.add(&late);
    for (pod, _) in reasons {
        world.wait_running(pod, "only");
        let status = world.wait_phase(pod, "Running");
        assert!(status["reason"].is_null(), "{status}");
    }
}
