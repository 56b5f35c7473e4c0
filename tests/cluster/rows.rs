//! The promises of a restart for pods with init containers, sidecars, probes and hooks, as the API server shows them.
//!
//! What an old server cannot keep (sidecars) comes as static pods and is seen through mirror pods.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Event, Pod};
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::agent_process::{Agent, eventually, within};
use crate::probes_cost::Health;
use crate::setup::{Cluster, FOREVER, condition, container, container_status, script, seconds};
use crate::world::ids;

/// How long the agent may take to do what it must not do.
const CALM: Duration = Duration::from_secs(8);

/// An init container, then a server with a probe of each kind; `probes` are the three handlers.
fn probed(cluster: &Cluster, pod: &str, probes: [&Value; 3]) -> Value {
    let init = container("init", &format!("echo init >> /starts/{pod}"));
    let serve = format!(
        "echo main >> /starts/{pod}; mkdir -p /www; echo ok > /www/index.html; exec httpd -f -p 8080 -h /www"
    );
    let mut main = container("main", &serve);
    let kinds = [
        ("startupProbe", 1, 30),
        ("livenessProbe", 2, 3),
        ("readinessProbe", 1, 3),
    ];
    for ((kind, period, failures), handler) in kinds.into_iter().zip(probes) {
        main[kind] = handler.clone();
        main[kind]["periodSeconds"] = json!(period);
        main[kind]["timeoutSeconds"] = json!(5);
        main[kind]["failureThreshold"] = json!(failures);
    }
    cluster.marked(json!({
        "terminationGracePeriodSeconds": 1, "initContainers": [init], "containers": [main],
    }))
}

/// A sidecar, then an init container, then a container; the sidecar is probed when `probe` says so.
fn with_sidecar(cluster: &Cluster, pod: &str, probe: Option<&Value>) -> Value {
    let mark =
        |name: &str, then: &str| container(name, &format!("echo {name} >> /starts/{pod}; {then}"));
    let mut sidecar = mark("sidecar", FOREVER);
    sidecar["restartPolicy"] = json!("Always");
    if let Some(probe) = probe {
        for kind in ["startupProbe", "readinessProbe"] {
            sidecar[kind] = probe.clone();
            sidecar[kind]["periodSeconds"] = json!(1);
            sidecar[kind]["timeoutSeconds"] = json!(5);
        }
    }
    cluster.marked(json!({
        "terminationGracePeriodSeconds": 1,
        "initContainers": [sidecar, mark("init", "exit 0")],
        "containers": [mark("main", FOREVER)],
    }))
}

fn exec(script: &str) -> Value {
    json!({"exec": {"command": ["sh", "-c", script]}})
}

/// Versions of statuses on record, by pod.
fn versions(cluster: &Cluster) -> BTreeMap<String, Value> {
    let dump = cluster.dump(&["statuses"]);
    let rows = dump["tables"]["statuses"].as_array().expect("statuses");
    rows.iter()
        .map(|row| (row["name"].to_string(), row["version"].clone()))
        .collect()
}

/// R1: pods with readiness, liveness and startup probes of all kinds, Ready before the restart.
#[test]
fn restart_keeps_readiness_with_probes_of_every_kind() {
    let cluster = Cluster::new();
    let agent = cluster.join();
    let http = json!({"httpGet": {"path": "/index.html", "port": 8080}});
    let tcp = json!({"tcpSocket": {"port": 8080}});
    let told = exec("echo probed >> /starts/probes");
    let pods = ["by-exec", "by-http", "by-tcp"];
    for (name, probes) in pods.into_iter().zip([
        [&tcp, &http, &told],
        [&told, &tcp, &http],
        [&http, &told, &tcp],
    ]) {
        cluster.create_pod(name, probed(&cluster, name, probes));
    }
    cluster.add_static(
        "sidecar",
        with_sidecar(
            &cluster,
            "sidecar",
            Some(&exec("echo probed >> /starts/sidecar-probes")),
        ),
    );
    // Nor do old servers know this kind.
    let health = Health::default();
    let port = health.serve(&cluster);
    let mut main = container("main", FOREVER);
    for (kind, period) in [
        ("startupProbe", 1),
        ("livenessProbe", 2),
        ("readinessProbe", 1),
    ] {
        main[kind] = json!({"grpc": {"port": port}, "periodSeconds": period, "timeoutSeconds": 5});
    }
    cluster.add_static(
        "by-grpc",
        json!({"hostNetwork": true, "terminationGracePeriodSeconds": 1, "containers": [main]}),
    );
    for pod in pods {
        let pod = cluster.wait_running(pod);
        let main = container_status(&pod, "main");
        assert_eq!(
            (&main["started"], &main["ready"]),
            (&json!(true), &json!(true))
        );
    }
    for pod in ["sidecar", "by-grpc"] {
        eventually("the static pod is Ready", || {
            let row = cluster.row("statuses", &cluster.mirror(pod))?;
            match condition(&row, "Ready")["status"].as_str() {
                Some("True") => Ok(()),
                _ => Err(row.to_string()),
            }
        });
    }
    cluster.wait_told(&pods);
    let before = (ids(&cluster.containers()), versions(&cluster));
    agent.kill9();
    cluster.proxy.reset();
    let followed = cluster.follow();
    let probes = |file: &str| cluster.lines(file).len();
    let (probed, of_sidecar) = (probes("probes"), probes("sidecar-probes"));
    let asked = health.asked();
    let start = Instant::now();
    let _agent = cluster.start();
    eventually("probes go on", || {
        // One runs each second and one every other, the sidecar's each second.
        let now = (
            probes("probes") - probed,
            probes("sidecar-probes") - of_sidecar,
            health.asked() - asked,
        );
        if now.0 >= 9 && now.1 >= 6 && now.2 >= 9 {
            Ok(())
        } else {
            Err(format!("{now:?}"))
        }
    });
    std::thread::sleep(CALM.saturating_sub(start.elapsed()));
    let burst = (probes("sidecar-probes") - of_sidecar) as u64;
    assert!(
        burst <= start.elapsed().as_secs() + 2,
        "{burst} probes in {:?}, one a second was asked for",
        start.elapsed()
    );
    for pod in pods {
        followed.assert_steady(pod);
        assert_eq!(cluster.lines(pod), ["init", "main"]);
    }
    assert_eq!(cluster.lines("sidecar"), ["sidecar", "init", "main"]);
    assert_eq!(
        cluster.proxy.count("PATCH", "pods/status"),
        0,
        "{:?}",
        cluster.proxy.counts()
    );
    assert_eq!((ids(&cluster.containers()), versions(&cluster)), before);
}

/// R9: results and counters of probes, over a restart with the API server away.
#[test]
fn restart_keeps_probe_results_and_failure_counts_while_the_api_is_away() {
    let cluster = Cluster::new();
    let agent = cluster.join();
    let probe = |script: &str, period: u32, failures: u32| {
        let mut probe = exec(script);
        probe["periodSeconds"] = json!(period);
        probe["failureThreshold"] = json!(failures);
        probe["timeoutSeconds"] = json!(5);
        probe
    };
    let pod = |pod: &str, probes: &[(&str, Value)]| {
        let run = "while :; do sleep 0.1; done";
        let script = format!("trap 'echo ended >> /starts/{pod}; exit 5' TERM; {run}");
        let mut main = container("main", &script);
        for (kind, probe) in probes {
            main[*kind] = probe.clone();
        }
        cluster.marked(json!({"terminationGracePeriodSeconds": 5, "containers": [main]}))
    };
    // Each failure leaves a mark, so that an outsider counts them.
    let sick = |name: &str, period: u32, failures: u32| {
        let script = format!(
            "test ! -e /starts/{name}.sick || {{ echo failed >> /starts/{name}; exit 1; }}"
        );
        pod(name, &[("livenessProbe", probe(&script, period, failures))])
    };
    let (yes, no) = (probe("true", 1, 3), probe("false", 1, 1000));
    let unchanged = ["ready", "not-ready", "starting"];
    for (name, probes) in unchanged.into_iter().zip([
        vec![("readinessProbe", yes.clone())],
        vec![("readinessProbe", no.clone())],
        vec![("startupProbe", no), ("readinessProbe", yes)],
    ]) {
        cluster.create_pod(name, pod(name, &probes));
    }
    // The agent will be away for less than two periods of the one, and for more than two of the other.
    cluster.create_pod("counted", sick("counted", 8, 3));
    cluster.create_pod("forgiven", sick("forgiven", 1, 9));
    for pod in ["ready", "counted", "forgiven"] {
        cluster.wait_running(pod);
    }
    for pod in unchanged {
        cluster.wait_pod_phase(pod, "Running");
    }
    let wait_failures = |pod: &str, least: u64| {
        eventually("failures are counted", || {
            let row = cluster.row("probes", pod)?;
            match (row["last"].as_str(), row["consecutive"].as_u64()) {
                (Some("Failure"), Some(count)) if count >= least => Ok(()),
                _ => Err(row.to_string()),
            }
        });
    };
    let failed = |pod: &str| {
        cluster
            .lines(pod)
            .iter()
            .take_while(|l| *l == "failed")
            .count()
    };
    std::fs::write(cluster.starts().join("counted.sick"), "").unwrap();
    wait_failures("counted", 2);
    std::fs::write(cluster.starts().join("forgiven.sick"), "").unwrap();
    wait_failures("forgiven", 3);
    cluster.wait_told(&unchanged);
    let before = versions(&cluster);
    agent.kill9();
    cluster.proxy.cut();
    let followed = cluster.follow();
    let (counted, forgiven) = (failed("counted"), failed("forgiven"));
    assert_eq!(counted, 2);
    // Two periods of the one, and then some.
    std::thread::sleep(Duration::from_millis(2500));
    let _agent = cluster.start();
    let restarted = |pod: &str| {
        eventually(&format!("{pod} is restarted"), || {
            let row = cluster.row("statuses", pod)?;
            let main = container_status(&row, "main");
            if main["restartCount"] == 1 && main["ready"] == true {
                std::fs::remove_file(cluster.starts().join(format!("{pod}.sick"))).unwrap();
                Ok(())
            } else {
                Err(main.to_string())
            }
        });
    };
    restarted("counted");
    restarted("forgiven");
    assert_eq!(failed("counted"), 3, "one more failure was enough");
    let anew = failed("forgiven") - forgiven;
    assert!((9..=10).contains(&anew), "counted anew: {anew} more of 9");
    let now = versions(&cluster);
    for pod in unchanged {
        let name = json!(pod).to_string();
        assert_eq!(now[&name], before[&name], "{pod} has another status");
    }
    cluster.proxy.reset();
    cluster.proxy.heal();
    for pod in ["counted", "forgiven"] {
        let pod = cluster.wait_pod(pod, "was restarted", |pod| {
            let main = container_status(pod, "main");
            main["restartCount"] == 1 && main["ready"] == true
        });
        let main = container_status(&pod, "main");
        let last = &main["lastState"]["terminated"];
        assert_eq!(
            (&last["exitCode"], &last["reason"]),
            (&json!(5), &json!("Error"))
        );
        let (ended, began) = (&last["finishedAt"], &main["state"]["running"]["startedAt"]);
        assert!(seconds(began) >= seconds(ended), "{main}");
    }
    cluster.wait_event("counted", "Unhealthy", "Liveness probe failed");
    cluster.wait_event(
        "counted",
        "Killing",
        "failed liveness probe, will be restarted",
    );
    cluster.wait_told(&unchanged);
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(
        cluster.status_writes(&unchanged),
        0,
        "{:?}",
        cluster.proxy.counts()
    );
    for pod in unchanged {
        followed.assert_steady(pod);
    }
    let starting = container_status(&cluster.pod("starting"), "main");
    assert_eq!(
        (&starting["started"], &starting["ready"]),
        (&json!(false), &json!(false))
    );
    assert_eq!(
        condition(&cluster.pod("not-ready"), "Ready")["status"],
        "False"
    );
}

/// R5: an end that was recorded and one that nobody saw. R20: a static pod that was evicted.
#[test]
fn restart_keeps_pods_that_ended_from_running_again() {
    let cluster = Cluster::new();
    let agent = cluster.join();
    let once = |pod: &str| {
        let mark = |name: &str| format!("echo {name} >> /starts/{pod}");
        let main = format!(
            "{}; until test -e /starts/{pod}.go; do sleep 0.1; done",
            mark("main")
        );
        cluster.marked(json!({
            "restartPolicy": "Never", "terminationGracePeriodSeconds": 1,
            "initContainers": [container("init", &mark("init"))], "containers": [container("main", &main)],
        }))
    };
    let finish =
        |pod: &str| std::fs::write(cluster.starts().join(format!("{pod}.go")), "").unwrap();
    for pod in ["recorded", "unseen"] {
        cluster.create_pod(pod, once(pod));
    }
    let evicted = cluster.add_static("evicted", with_sidecar(&cluster, "evicted", None));
    let all = ["recorded", "unseen", evicted.as_str()];
    let running: Vec<Value> = all.iter().map(|pod| cluster.wait_running(pod)).collect();
    cluster.wait_told(&all);

    cluster.proxy.cut();
    finish("recorded");
    cluster.evict(&evicted);
    for (pod, phase) in [("recorded", "Succeeded"), (evicted.as_str(), "Failed")] {
        eventually("the end is on record", || {
            let row = cluster.row("statuses", pod)?;
            if row["finished"] == true && row["status"]["phase"] == phase {
                Ok(())
            } else {
                Err(row.to_string())
            }
        });
    }
    agent.kill9();
    cluster.evict_no_more();
    finish("unseen");
    eventually("it ends unseen", || match cluster.running().as_slice() {
        [] => Ok(()),
        some => Err(format!("{some:?}")),
    });
    cluster.wipe_runtime();
    let agent = cluster.start();
    eventually("the loss is on record", || {
        match cluster.row("statuses", "unseen")? {
            row if row["status"]["phase"] == "Failed" => Ok(()),
            row => Err(row.to_string()),
        }
    });
    assert_eq!(
        cluster.pod("unseen")["status"]["phase"],
        "Running",
        "not told yet"
    );
    cluster.proxy.heal();

    let recorded = cluster.wait_pod_phase("recorded", "Succeeded");
    let was = container_status(&running[0], "main");
    let main = container_status(&recorded, "main");
    let end = &main["state"]["terminated"];
    assert_eq!(
        (&end["exitCode"], &end["reason"]),
        (&json!(0), &json!("Completed")),
        "{main}"
    );
    assert_eq!(end["startedAt"], was["state"]["running"]["startedAt"]);
    assert_eq!(end["containerID"], was["containerID"]);
    assert!(seconds(&end["finishedAt"]) >= seconds(&end["startedAt"]));
    let init = container_status(&recorded, "init");
    assert_eq!(
        init["state"],
        container_status(&running[0], "init")["state"],
        "{init}"
    );
    let unseen = cluster.wait_pod_phase("unseen", "Failed");
    let main = container_status(&unseen, "main");
    let end = &main["state"]["terminated"];
    assert_eq!(
        (&end["exitCode"], &end["reason"]),
        (&json!(137), &json!("ContainerStatusUnknown")),
        "{main}"
    );
    assert_eq!(
        container_status(&unseen, "init")["state"]["terminated"]["exitCode"],
        0
    );
    let mirror = cluster.wait_pod_phase(&evicted, "Failed");
    assert_eq!(
        mirror["status"]["reason"], "Evicted",
        "{}",
        mirror["status"]
    );
    assert_eq!(
        mirror["status"]["message"],
        "The node was low on resource: memory."
    );
    for (pod, was) in all.iter().zip(&running) {
        let pod = cluster.pod(pod);
        assert_eq!(container_status(&pod, "main")["restartCount"], 0);
        assert_eq!(pod["status"]["startTime"], was["status"]["startTime"]);
    }

    // Nor does a later life start any of them.
    cluster.wait_told(&all);
    agent.kill9();
    cluster.proxy.reset();
    let followed = cluster.follow();
    let _agent = cluster.start();
    std::thread::sleep(CALM);
    assert_eq!(
        cluster.status_writes(&all),
        0,
        "{:?}",
        cluster.proxy.counts()
    );
    for pod in all {
        followed.assert_steady(pod);
    }
    assert_eq!(cluster.containers(), [], "none of them runs again");
    for pod in ["recorded", "unseen"] {
        assert_eq!(cluster.lines(pod), ["init", "main"]);
    }
    assert_eq!(cluster.lines("evicted"), ["sidecar", "init", "main"]);

    // Another manifest is another pod.
    let mut again = with_sidecar(&cluster, "again", None);
    again["terminationGracePeriodSeconds"] = json!(2);
    cluster.add_static("evicted", again);
    cluster.wait_running(&evicted);
    assert_eq!(cluster.lines("again"), ["sidecar", "init", "main"]);
    assert_eq!(cluster.lines("evicted").len(), 3);
}

/// R7: the back-off of a container that crashes. R8: the back-off of an image that cannot be pulled.
#[test]
fn restart_keeps_back_offs_and_what_is_shown_of_them() {
    const BACK_OFF: i64 = 20;
    let cluster = Cluster::new();
    let agent = cluster.join();
    let mut crash = script("Always", "echo main >> /starts/crash; exit 3");
    crash["initContainers"] = json!([container("init", "echo init >> /starts/crash")]);
    cluster.create_pod("crash", cluster.marked(crash));
    let mut pulls = script("Always", FOREVER);
    pulls["containers"][0]["image"] = json!("holdfast.invalid/absent:1");
    cluster.create_pod("pulls", pulls);
    // At once, after 10 s, after 20 s.
    let crashed = cluster.wait_pod("crash", "waits for its third restart", |pod| {
        let main = container_status(pod, "main");
        main["restartCount"] == 2 && main["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    });
    let pull_back_off = || -> Result<(i64, i64), String> {
        let dump = cluster.try_dump(&["images"])?;
        let row = &dump["tables"]["images"][0]["backoffs"][0]["backoff"];
        match (
            row["durationMs"].as_i64(),
            row["until"]["bootTimeMs"].as_i64(),
        ) {
            (Some(duration), Some(until)) if duration >= BACK_OFF * 1000 => Ok((duration, until)),
            _ => Err(dump.to_string()),
        }
    };
    let (duration, until) = eventually("the second pull fails", pull_back_off);
    assert_eq!(duration, BACK_OFF * 1000);
    cluster.wait_pod("pulls", "waits for its third pull", |pod| {
        container_status(pod, "main")["state"]["waiting"]["reason"] == "ImagePullBackOff"
    });
    cluster.wait_told(&["crash", "pulls"]);
    let last = container_status(&crashed, "main")["lastState"]["terminated"].clone();
    assert_eq!(last["exitCode"], 3);
    let ended = seconds(&last["finishedAt"]);
    assert!(
        jiff::Timestamp::now().as_second() < ended + BACK_OFF - 5,
        "there is time for a restart before the back-off ends"
    );
    agent.kill9();
    cluster.proxy.reset();
    let followed = cluster.follow();
    let agent = cluster.start();
    let pulled = within(Duration::from_secs(60), "the image is pulled again", || {
        let now = boottime_ms();
        if agent.operations("pull_image") > 0.0 {
            return Ok(now);
        }
        if now < until {
            let writes = cluster.status_writes(&["pulls"]);
            assert_eq!(writes, 0, "{:?}", followed.of("pulls"));
        }
        Err(format!("{} ms before its time", until - now))
    });
    assert!(pulled >= until, "pulled {} ms too early", until - pulled);
    for shown in followed.of("pulls") {
        let main = container_status(&shown, "main");
        let reason = main["state"]["waiting"]["reason"].as_str();
        assert!(
            matches!(reason, Some("ErrImagePull" | "ImagePullBackOff")),
            "{main}"
        );
    }
    let next = cluster.wait_pod("crash", "has crashed once more", |pod| {
        let main = container_status(pod, "main");
        main["restartCount"] == 3
            && main["lastState"]["terminated"]["startedAt"] != last["startedAt"]
    });
    let next = container_status(&next, "main")["lastState"]["terminated"].clone();
    let waited = seconds(&next["startedAt"]) - ended;
    println!("started {waited} s after its end, back-off {BACK_OFF} s");
    // Times in a status are whole seconds.
    assert!(
        (BACK_OFF - 1..BACK_OFF + 15).contains(&waited),
        "waited {waited} s"
    );
    for shown in followed.of("crash") {
        let main = container_status(&shown, "main");
        if main["restartCount"] == 2 {
            assert_eq!(
                main["state"]["waiting"]["reason"], "CrashLoopBackOff",
                "{main}"
            );
            assert_eq!(main["lastState"]["terminated"], last, "{main}");
        } else {
            assert_eq!(main["restartCount"], 3, "{main}");
        }
        let init = container_status(&shown, "init");
        assert_eq!(init["restartCount"], 0, "{init}");
        assert_eq!(init["state"]["terminated"]["reason"], "Completed", "{init}");
    }
    assert_eq!(
        cluster.lines("crash"),
        ["init", "main", "main", "main", "main"]
    );
}

/// CLOCK_BOOTTIME.
fn boottime_ms() -> i64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME).unwrap();
    now.tv_sec() * 1000 + now.tv_nsec() / 1_000_000
}

/// R10: deadlines of pods that are deleted, and hooks: a completed one is not run again, one that was cut off is.
#[test]
fn restart_keeps_grace_periods_and_hooks() {
    const GRACE: u32 = 14;
    let cluster = Cluster::new();
    let agent = cluster.join();
    let hooked = |pod: &str, hook: &str, script: &str| {
        let on_term = "trap \"echo asked >> /starts/$POD\" TERM; while :; do sleep 0.2; done";
        let mut main = container("main", &on_term.replace("$POD", pod));
        main["lifecycle"][hook] = exec(&script.replace("$POD", pod));
        cluster.marked(json!({"terminationGracePeriodSeconds": GRACE, "containers": [main]}))
    };
    let keep = json!({"finalizers": ["test.holdfast.io/look"]});
    cluster.create_pod_with(
        "completed",
        keep,
        hooked("completed", "preStop", "echo hook >> /starts/$POD"),
    );
    cluster.create_pod(
        "cut-off",
        hooked(
            "cut-off",
            "preStop",
            "echo hook >> /starts/$POD; sleep 1000",
        ),
    );
    for pod in ["completed", "cut-off"] {
        cluster.wait_running(pod);
    }
    cluster.create_pod(
        "begins",
        hooked(
            "begins",
            "postStart",
            "echo hook >> /starts/$POD; sleep 8; echo done >> /starts/$POD",
        ),
    );
    let deleted = Instant::now();
    for pod in ["completed", "cut-off"] {
        cluster.delete_pod(pod, GRACE);
    }
    // Asked now: with the last DELETE, a newer server moves the time of the deletion to that of the end.
    let metadata = cluster.pod("completed")["metadata"].clone();
    let grace = metadata["deletionGracePeriodSeconds"].as_i64().unwrap();
    let asked = seconds(&metadata["deletionTimestamp"]) - grace;
    let lines = |pod: &str, wanted: &[&str]| {
        eventually(&format!("{pod} is at {wanted:?}"), || {
            let lines = cluster.lines(pod);
            if lines == wanted {
                Ok(())
            } else {
                Err(format!("{lines:?}"))
            }
        });
    };
    lines("begins", &["hook"]);
    lines("cut-off", &["hook"]);
    lines("completed", &["hook", "asked"]);
    let begun = ids(&cluster.running());
    // A third of the grace period.
    std::thread::sleep(Duration::from_secs(4).saturating_sub(deleted.elapsed()));
    agent.kill9();
    assert!(
        !cluster.lines("begins").contains(&"done".to_owned()),
        "the hook was cut off"
    );
    let agent = cluster.start();
    println!("restarted {:?} after the deletion", deleted.elapsed());
    // Nothing is killed before its time.
    let mut ended = BTreeMap::new();
    while ended.len() < 2 {
        for pod in ["completed", "cut-off"] {
            if cluster.try_one(pod, "main").is_err() {
                ended.entry(pod).or_insert_with(|| deleted.elapsed());
            }
        }
        assert!(deleted.elapsed() < Duration::from_secs(60), "{ended:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
    println!("killed after {ended:?}, grace {GRACE} s");
    for (pod, took) in &ended {
        // A hook that takes all the time leaves the container two seconds more.
        let range = f64::from(GRACE) - 1.0..f64::from(GRACE) + 6.0;
        assert!(
            range.contains(&took.as_secs_f64()),
            "{pod} was killed after {took:?}"
        );
    }
    let completed = cluster.lines("completed");
    let hooks = |lines: &[String]| lines.iter().filter(|l| *l == "hook").count();
    assert_eq!(hooks(&completed), 1, "{completed:?}");
    let cut_off = cluster.lines("cut-off");
    assert_eq!(hooks(&cut_off), 2, "{cut_off:?}");
    cluster.wait_gone("cut-off", Duration::from_secs(30));
    let shown = cluster.wait_pod("completed", "was killed", |pod| {
        container_status(pod, "main")["state"]["terminated"].is_object()
    });
    let end = container_status(&shown, "main")["state"]["terminated"].clone();
    assert_eq!(
        (&end["exitCode"], &end["reason"]),
        (&json!(137), &json!("Error")),
        "{end}"
    );
    let took = seconds(&end["finishedAt"]) - asked;
    assert!(
        (i64::from(GRACE) - 2..i64::from(GRACE) + 6).contains(&took),
        "{took} s by the times shown"
    );

    // What was begun and not completed is completed, in the same container.
    cluster.wait_running("begins");
    assert_eq!(cluster.lines("begins"), ["hook", "hook", "done"]);
    let key = ("begins".to_owned(), "main".to_owned());
    assert_eq!(ids(&cluster.running()).get(&key), begun.get(&key));
    assert_eq!(
        container_status(&cluster.pod("begins"), "main")["restartCount"],
        0
    );
    // Nothing keeps a pod but who wanted to look.
    agent.kill9();
    let _agent = cluster.start();
    let release = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    let pods = cluster.api::<Pod>();
    cluster
        .run(pods.patch("completed", &PatchParams::default(), &release))
        .unwrap();
    cluster.wait_gone("completed", Duration::from_secs(30));
    assert_eq!(hooks(&cluster.lines("completed")), 1);
}

/// R11: the count of restarts, when containers and logs are gone. R17: a damaged store.
#[test]
fn restart_keeps_counts_when_the_runtime_or_the_store_lost_them() {
    const RESTARTS: u64 = 7;
    let cluster = Cluster::new();
    cluster
        .site
        .configure("crashLoopBackOff: {maxContainerRestartPeriod: 1s}\n");
    let agent = cluster.join();
    let main = format!(
        "echo main >> /starts/counted; test $(grep -c main /starts/counted) -gt {RESTARTS} || exit 4; {FOREVER}"
    );
    let mut counted = script("Always", &main);
    counted["initContainers"] = json!([container("init", "echo init >> /starts/counted")]);
    counted["containers"][0]["readinessProbe"] = exec("true");
    counted["containers"][0]["readinessProbe"]["periodSeconds"] = json!(1);
    cluster.create_pod("counted", cluster.marked(counted));
    cluster.create_pod("failed", script("Never", "exit 6"));
    let wait_count = |count: u64| {
        cluster.wait_pod("counted", &format!("runs after {count} restarts"), |pod| {
            container_status(pod, "main")["restartCount"] == count
                && condition(pod, "Ready")["status"] == "True"
        })
    };
    let pod = wait_count(RESTARTS);
    assert_eq!(
        container_status(&pod, "main")["lastState"]["terminated"]["exitCode"],
        4
    );
    cluster.wait_pod_phase("failed", "Failed");
    cluster.wait_told(&["counted", "failed"]);
    agent.kill9();
    cluster.wipe_runtime();
    std::fs::remove_dir_all(cluster.pod_logs()).unwrap();
    let agent = cluster.start();
    let pod = wait_count(RESTARTS + 1);
    let last = container_status(&pod, "main")["lastState"]["terminated"].clone();
    assert_eq!(
        (&last["exitCode"], &last["reason"]),
        (&json!(137), &json!("ContainerStatusUnknown")),
        "{last}"
    );
    let seen = cluster.try_one("counted", "main").unwrap();
    assert_eq!(u64::from(seen.attempt), RESTARTS + 1);
    let marks = cluster.lines("counted");
    let of = |name: &str| marks.iter().filter(|m| *m == name).count() as u64;
    assert_eq!((of("init"), of("main")), (2, RESTARTS + 2), "{marks:?}");
    let failed = container_status(&cluster.pod("failed"), "main");
    assert_eq!(failed["state"]["terminated"]["exitCode"], 6, "{failed}");
    cluster.wait_told(&["counted", "failed"]);

    // One end on a record that can be read again from the runtime: the newest container is killed.
    cluster.kill(&seen.id);
    let pod = wait_count(RESTARTS + 2);
    assert_eq!(
        container_status(&pod, "main")["lastState"]["terminated"]["exitCode"],
        137
    );
    cluster.wait_told(&["counted", "failed"]);
    let db = cluster.state_dir().join("db/db");
    let mut agent = agent;
    for damage in ["a byte", "half", "everything"] {
        // Backups aside: what they hold is as old as they are.
        agent = damaged(&cluster, agent, damage, || {
            let mut bytes = std::fs::read(&db).unwrap();
            let at = find(&bytes, b"/starts/counted").expect("the pod is on disk");
            match damage {
                "a byte" => bytes[at] ^= 0xFF,
                "half" => bytes.truncate(at),
                _ => bytes.fill(0xA5),
            }
            std::fs::write(&db, bytes).unwrap();
        });
    }
    // Each was told to the cluster.
    let events = Api::<Event>::default_namespaced(cluster.client());
    let of_node = ListParams::default().fields(&format!("involvedObject.name={}", cluster.node));
    eventually("each damage is told", || {
        let events = cluster.run(events.list(&of_node)).unwrap();
        let reasons = events.iter().filter_map(|event| event.reason.as_deref());
        let told: Vec<_> = reasons.filter(|r| r.starts_with("Store")).collect();
        if told.len() == 3 {
            Ok(())
        } else {
            Err(format!("{told:?}"))
        }
    });
    drop(agent);
}

/// Kills the agent, damages its store, starts another: pods are not touched, and nobody is told otherwise.
fn damaged(cluster: &Cluster, agent: Agent, what: &str, damage: impl FnOnce()) -> Agent {
    let before = ids(&cluster.containers());
    agent.kill9();
    damage();
    cluster.proxy.reset();
    let followed = cluster.follow();
    let agent = cluster.start();
    std::thread::sleep(CALM);
    let epoch = cluster.dump(&["meta"])["tables"]["meta"][0]["epoch"].clone();
    assert_eq!(epoch["reason"], "Rebuilt", "{what}: {}", agent.log());
    assert_ne!(agent.metric("holdfast_store_epoch"), 0.0);
    assert_eq!(ids(&cluster.containers()), before, "{what}");
    for pod in ["counted", "failed"] {
        eventually("the status is on record again", || {
            cluster.row("statuses", pod).map(drop)
        });
        followed.assert_steady(pod);
    }
    println!(
        "{what} of the store damaged: {} status writes",
        cluster.status_writes(&["counted", "failed"])
    );
    agent
}

/// Where something is.
fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|found| found == what)
}

/// R12: a crash at every step of the starts of init containers, sidecar and containers.
#[test]
fn restart_keeps_init_containers_in_order_wherever_their_starts_are_cut_off() {
    let cluster = Cluster::new();
    drop(cluster.join());
    let mark =
        |name: &str, then: &str| container(name, &format!("echo {name} >> /starts/inits; {then}"));
    let spec = json!({
        "restartPolicy": "Never", "terminationGracePeriodSeconds": 1,
        "initContainers": [mark("first", "exit 0"), mark("second", "sleep 1"), mark("third", "exit 0")],
        "containers": [mark("main", FOREVER)],
    });
    let inits = cluster.marked(spec);
    let of_sidecar = |name: &str, then: &str| {
        container(name, &format!("echo {name} >> /starts/sidecar; {then}"))
    };
    let mut beside = of_sidecar("beside", FOREVER);
    beside["restartPolicy"] = json!("Always");
    let spec = json!({
        "terminationGracePeriodSeconds": 1,
        "initContainers": [
            of_sidecar("first", "exit 0"), beside, of_sidecar("second", "exit 0"), of_sidecar("third", "exit 0"),
        ],
        "containers": [of_sidecar("main", FOREVER)],
    });
    let sidecar = cluster.add_static("sidecar", cluster.marked(spec));
    let pods = ["inits", sidecar.as_str()];
    let points = [
        "pod_workers::start::after_create",
        "pod_workers::start::after_intent",
        "pod_workers::start::after_start",
    ];
    let mut lives = 0;
    // One pod after the other: a start of another pod that a kill meets half-way is undone by the runtime.
    let mut live_through = |pod: &str| loop {
        let point = points[lives % points.len()];
        let mut agent = cluster.spawn_agent_with(&[], &[("HOLDFAST_DIE_AT", point)]);
        let died = eventually(
            &format!("life {lives} comes to {point} or to an end"),
            || {
                if agent.exited().is_some() {
                    return Ok(true);
                }
                // On record too: an agent that dies right after the last start has told nobody of it.
                let is_told = |row: Value| row["status"]["phase"] == "Running";
                if cluster.try_one(pod, "main").is_ok()
                    && cluster.row("statuses", pod).is_ok_and(is_told)
                {
                    return Ok(false);
                }
                Err(agent.log())
            },
        );
        if !died {
            break (agent, lives);
        }
        lives += 1;
        assert!(lives < 40, "it gets nowhere: {}", agent.log());
    };
    let (agent, _) = live_through(&sidecar);
    agent.kill9();
    let uid = cluster.create_pod("inits", inits);
    let (agent, lives) = live_through("inits");
    println!("{lives} crashes");
    for pod in pods {
        cluster.wait_running(pod);
    }
    let pod = cluster.pod("inits");
    for name in ["first", "second", "third"] {
        let init = container_status(&pod, name);
        let end = &init["state"]["terminated"];
        assert_eq!(
            (&end["exitCode"], &end["reason"]),
            (&json!(0), &json!("Completed")),
            "{init}"
        );
        assert_eq!(init["restartCount"], 0, "{init}");
    }
    for (pod, name) in [
        ("inits", "main"),
        (sidecar.as_str(), "main"),
        (sidecar.as_str(), "beside"),
    ] {
        let running = container_status(&cluster.pod(pod), name);
        assert_eq!(running["restartCount"], 0, "{running}");
        assert!(running["state"]["running"].is_object(), "{running}");
    }
    assert_eq!(cluster.lines("inits"), ["first", "second", "third", "main"]);
    assert_eq!(
        cluster.lines("sidecar"),
        ["first", "beside", "second", "third", "main"]
    );
    let attempts: Vec<_> = cluster
        .containers()
        .into_iter()
        .map(|c| (c.pod, c.container, c.attempt))
        .collect();
    let expected = |pod: &str, containers: &[&str]| {
        containers
            .iter()
            .map(|c| (pod.to_owned(), (*c).to_owned(), 0))
            .collect::<Vec<_>>()
    };
    let mut all = expected("inits", &["first", "main", "second", "third"]);
    all.extend(expected(
        &sidecar,
        &["beside", "first", "main", "second", "third"],
    ));
    assert_eq!(attempts, all, "one container each");
    let sandboxes: Vec<String> = cluster.sandboxes().into_iter().map(|s| s.0).collect();
    assert_eq!(sandboxes, pods, "one sandbox each");
    assert_eq!(cluster.pod("inits")["metadata"]["uid"], uid.as_str());
    drop(agent);
}
