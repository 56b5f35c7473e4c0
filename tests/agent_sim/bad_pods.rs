//! Pods that ask for trouble: containers that are over before anybody looks, probes and graces that make no sense,
//! hooks that never return. Each gets a clear answer, and no worker is stuck.

use std::time::Duration;

use holdfast_testkit::fake_cri::Behaviour;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::restart::{assert_nothing_wrong, exits};
use crate::rich::*;
use crate::world::World;

fn journal(w: &World) -> Vec<String> {
    let state = w.state();
    let lines = state.journal.values();
    lines
        .map(|v| format!("{}: {}", v.record.what, v.record.why))
        .collect()
}

// ---------------------------------------------------------------------------------------- too fast to be seen

/// Every container ends the moment it is started: the runtime shows none of them running, ever.
fn momentary(code: i32) -> impl Fn(&str, &str, u32) -> Behaviour {
    move |_, container, _| match container {
        "side" => Behaviour::RunForever,
        "main" => exits(code, 0),
        _ => exits(0, 0),
    }
}

#[tokio::test(start_paused = true)]
async fn containers_that_end_before_they_are_seen_count_as_run_once() {
    for events in [true, false] {
        for (policy, code, end, first) in [
            (
                "Never",
                0,
                "main ended 0 Completed x0",
                "Succeeded Initialized",
            ),
            ("Never", 5, "main ended 5 Error x0", "Failed Initialized"),
            (
                "OnFailure",
                0,
                "main ended 0 Completed x0",
                "Succeeded Initialized",
            ),
        ] {
            let (mut w, _) = usual_world(false);
            w.fake.offer_events(events);
            w.behave_each(momentary(code));
            w.manifest("quick", &rich(policy).to_string());
            w.start().await;
            let want = [first, UP[1], "side ended 0 Completed x0", UP[3], end];
            w.until("it is over", 60, |w| w.summary("quick") == want)
                .await;
            assert_eq!(w.started("quick"), ["i1", "side", "i2", "main"]);
            w.restart().await;
            w.pass(100).await;
            assert_eq!(w.summary("quick"), want, "events: {events}");
            assert_eq!(w.started("quick").len(), 4, "{}", w.describe());
            assert_nothing_wrong(&w);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn containers_that_always_end_before_they_are_seen_back_off_as_others_do() {
    let (mut w, _) = usual_world(false);
    w.behave_each(momentary(0));
    w.manifest("quick", &rich("Always").to_string());
    w.start().await;
    w.until("four starts", 120, |w| {
        w.starts_of("quick", "main").len() == 4
    })
    .await;
    let at: Vec<Instant> = w.starts_of("quick", "main").iter().map(|s| s.at).collect();
    let apart: Vec<u64> = at.windows(2).map(|p| (p[1] - p[0]).as_secs()).collect();
    assert!(apart[0] <= 2, "{apart:?}");
    assert!((10..=12).contains(&apart[1]), "{apart:?}");
    assert!((20..=22).contains(&apart[2]), "{apart:?}");
    w.until("it waits", 5, |w| {
        w.summary("quick")[4] == "main waits CrashLoopBackOff x3, before: ended 0 Completed"
    })
    .await;
    assert_eq!(w.starts_of("quick", "side").len(), 1);
    assert_nothing_wrong(&w);
}

/// And somebody removes it before the runtime is asked at all.
#[tokio::test(start_paused = true)]
async fn a_container_that_is_gone_before_it_is_seen_has_ended_unknown() {
    for (policy, end) in [
        ("Never", "main ended 137 ContainerStatusUnknown x0"),
        (
            "OnFailure",
            "main running x1 ready started, before: ended 137 ContainerStatusUnknown",
        ),
    ] {
        let (mut w, _) = usual_world(false);
        w.fake.offer_events(false);
        w.manifest("quick", &rich(policy).to_string());
        w.start().await;
        w.until("main was started", 60, |w| {
            let gone = w.is_running("quick", "main");
            if gone {
                w.fake.remove(&w.id("quick", "main"));
            }
            gone
        })
        .await;
        w.until("it is told", 60, |w| w.summary("quick")[4] == end)
            .await;
        w.pass(60).await;
        assert_eq!(w.summary("quick")[4], end, "{}", w.describe());
        assert_nothing_wrong(&w);
    }
}

// ------------------------------------------------------------------------------------------- refused as they are

/// Manifests that make no sense, each with what has to be said about it.
fn nonsense() -> Vec<(&'static str, Value, &'static str)> {
    let with = |change: &dyn Fn(&mut Value)| {
        let mut spec = rich("Always");
        change(&mut spec);
        spec
    };
    vec![
        (
            "two-handlers",
            with(&|s| {
                member(s, "main")["livenessProbe"]["tcpSocket"] = json!({"port": 80});
            }),
            "spec.containers[0].livenessProbe: has 2 handlers; keep one of exec, grpc, httpGet, tcpSocket",
        ),
        (
            "no-handler",
            with(&|s| {
                let probe = member(s, "side")["startupProbe"].as_object_mut().unwrap();
                probe.remove("exec");
            }),
            "spec.initContainers[1].startupProbe: does nothing; give it one of exec, grpc, httpGet, tcpSocket",
        ),
        (
            "liveness-twice",
            with(&|s| member(s, "main")["livenessProbe"]["successThreshold"] = 2.into()),
            "spec.containers[0].livenessProbe.successThreshold: is 2; a livenessProbe takes 1 only, more is for readiness probes",
        ),
        (
            "readiness-grace",
            with(&|s| {
                member(s, "main")["readinessProbe"]["terminationGracePeriodSeconds"] = 3.into();
            }),
            "spec.containers[0].readinessProbe.terminationGracePeriodSeconds: has no meaning here, since a readiness probe kills nothing; remove it",
        ),
        (
            "probe-grace",
            with(&|s| {
                member(s, "side")["livenessProbe"]["terminationGracePeriodSeconds"] = 0.into();
            }),
            "spec.initContainers[1].livenessProbe.terminationGracePeriodSeconds: is 0; it has to be 1 or more",
        ),
        (
            "pod-grace",
            with(&|s| s["terminationGracePeriodSeconds"] = (-1).into()),
            "spec.terminationGracePeriodSeconds: is negative; it has to be 0 or more",
        ),
        (
            "period",
            with(&|s| member(s, "main")["startupProbe"]["periodSeconds"] = (-5).into()),
            "spec.containers[0].startupProbe.periodSeconds: -5 is negative; leave it out for the default",
        ),
        (
            "init-probe",
            with(&|s| {
                let probe = member(s, "side")["livenessProbe"].clone();
                member(s, "i1")["livenessProbe"] = probe;
            }),
            "spec.initContainers[0].livenessProbe: is not for init containers that run to their end; remove it, or make a sidecar of the container with restartPolicy: Always",
        ),
        (
            "long-hook",
            with(&|s| {
                member(s, "main")["lifecycle"] = json!({"preStop": {"sleep": {"seconds": 60}}});
            }),
            "spec.containers[0].lifecycle.preStop.sleep.seconds: is 60; it has to be between 0 and the pod's terminationGracePeriodSeconds, 5",
        ),
        (
            "deadline",
            with(&|s| s["activeDeadlineSeconds"] = 0.into()),
            "spec.activeDeadlineSeconds: is 0; it has to be between 1 and 2147483647, or left out",
        ),
    ]
}

#[tokio::test(start_paused = true)]
async fn probes_and_graces_that_make_no_sense_are_refused_with_the_way_out() {
    let (mut w, _) = usual_world(false);
    w.manifest("good", &rich("Always").to_string());
    for (name, spec, _) in nonsense() {
        w.manifest(name, &spec.to_string());
    }
    w.start().await;
    w.up("good").await;
    w.pass(30).await;
    let told = journal(&w);
    for (name, _, why) in nonsense() {
        assert!(!w.has_record(name), "{name} was taken on");
        assert_eq!(w.of_pod(name).len(), 0, "{name}");
        let lines: Vec<_> = told.iter().filter(|line| line.contains(why)).collect();
        assert_eq!(lines.len(), 1, "{name}: {told:#?}");
    }
    // Corrected, each runs; made worse again, it goes on running as it was.
    let (name, bad, _) = nonsense().remove(0);
    w.manifest(name, &rich("Always").to_string());
    w.up(name).await;
    let ids = w.running_ids(name);
    w.manifest(name, &bad.to_string());
    w.pass(60).await;
    assert_eq!(w.running_ids(name), ids);
    w.restart().await;
    w.pass(60).await;
    assert_eq!(w.running_ids(name), ids, "after a restart too");
    assert_nothing_wrong(&w);
}

// ---------------------------------------------------------------------------------------- hooks that never return

/// The sidecar's postStart hook never returns: what comes after it waits, and the pod can be deleted.
#[tokio::test(start_paused = true)]
async fn a_hook_of_a_sidecar_that_never_returns_holds_up_its_pod_and_nothing_else() {
    let (mut w, answers) = usual_world(false);
    answers.take("stuck/hang", 360_000);
    let mut spec = rich("Always");
    member(&mut spec, "side")["lifecycle"] = json!({"postStart": {"exec": {"command": ["hang"]}}});
    w.manifest("stuck", &spec.to_string());
    w.manifest("good", &rich("Always").to_string());
    w.start().await;
    w.up("good").await;
    w.pass(600).await;
    assert_eq!(w.started("stuck"), ["i1", "side"]);
    assert_eq!(answers.count("stuck/hang"), 1);
    assert_eq!(w.summary("stuck")[0], "Pending");
    w.restart().await;
    w.until("the hook runs again", 30, |_| {
        answers.count("stuck/hang") == 2
    })
    .await;
    assert_eq!(w.started("stuck"), ["i1", "side"], "{}", w.describe());
    let uid = w.uid("stuck").to_string();
    w.remove_manifest("stuck");
    w.until("nothing is left", 40, |w| {
        w.left_of("stuck", &uid).is_empty()
    })
    .await;
    assert_eq!(w.summary("good"), UP);
    assert_nothing_wrong(&w);
}

/// Neither preStop hook returns: each has the grace period, and no more.
#[tokio::test(start_paused = true)]
async fn stop_hooks_that_never_return_have_the_grace_period_and_no_more() {
    let (mut w, answers) = usual_world(false);
    answers.take("stuck/hang", 360_000);
    let mut spec = rich("Always");
    spec["terminationGracePeriodSeconds"] = 15.into();
    for name in ["side", "main"] {
        member(&mut spec, name)["lifecycle"] = json!({"preStop": {"exec": {"command": ["hang"]}}});
    }
    w.manifest("stuck", &spec.to_string());
    w.start().await;
    w.up("stuck").await;
    let uid = w.uid("stuck").to_string();
    w.remove_manifest("stuck");
    w.until("both hooks run", 10, |_| answers.count("stuck/hang") == 2)
        .await;
    let asked = Instant::now();
    w.until("both are stopped", 25, |w| w.running("stuck").is_empty())
        .await;
    let took = asked.elapsed();
    let within = Duration::from_millis(14_800)..=Duration::from_secs(20);
    assert!(within.contains(&took), "{took:?}");
    assert_eq!(answers.count("stuck/hang"), 2);
    w.until("nothing is left", 30, |w| {
        w.left_of("stuck", &uid).is_empty()
    })
    .await;
    assert_nothing_wrong(&w);
}
