//! What a restart keeps of pods with init containers, a sidecar and probes: what is told of them, what is counted,
//! what has to wait. How they end is in `rows_ends`, a death at every step in `rows_steps`.

use std::time::Duration;

use holdfast_testkit::fake_cri::{Behaviour, Pull, Restart};
use tokio::time::Instant;

use crate::api_restart::no_writes;
use crate::cluster::is_point;
use crate::restart::assert_nothing_wrong;
use crate::rich::*;
use crate::world::World;

fn no_effects(w: &World) {
    assert_eq!(w.effects(), Vec::<String>::new(), "{}", w.describe());
}

fn versions(w: &World) -> Vec<(String, u64)> {
    let state = w.state();
    let statuses = state.statuses.iter();
    statuses
        .map(|(key, v)| (key.to_string(), v.record.version))
        .collect()
}

/// Seconds between moments.
#[track_caller]
fn assert_every(times: &[Instant], seconds: u64) {
    for pair in times.windows(2) {
        let apart = (pair[1] - pair[0]).as_millis();
        let want = u128::from(seconds * 1000);
        assert!(
            apart.abs_diff(want) <= 100,
            "{apart} ms apart instead of {want}"
        );
    }
}

// ------------------------------------------------------------------------------------------------ R1

/// R1: nothing of a Ready pod changes, in the API server, in the runtime or on record, and no probe is run at
/// another time than it would have been.
#[tokio::test(start_paused = true)]
async fn restart_keeps_a_pod_with_a_sidecar_and_probes_ready_and_probed_in_phase() {
    let (mut w, answers) = usual_world(true);
    w.start().await;
    w.create("web", &rich("Always").to_string());
    w.until("the API server shows it up", 60, |w| {
        w.shown_summary("web") == UP
    })
    .await;
    w.pass(60).await;
    assert_eq!(w.started("web"), ["i1", "side", "i2", "main"]);
    let (shown, ids, told) = (w.shown("web"), w.running_ids("web"), versions(&w));
    answers.clear();
    for orderly in [false, false, true] {
        w.api().take_requests();
        w.fake.clear_calls();
        if orderly {
            w.stop().await;
        } else {
            w.crash().await;
        }
        w.pass(3).await;
        w.start().await;
        w.pass(42).await;
        assert_eq!(w.shown("web"), shown);
        no_writes(&w, is_point);
        no_effects(&w);
        assert_eq!(w.running_ids("web"), ids);
        assert_eq!(versions(&w), told, "orderly: {orderly}");
    }
    // 135 s, of which the agent was away for nine.
    for name in ["side-ready", "side-alive", "main-ready", "main-alive"] {
        let times = answers.times(&format!("web/{name}"));
        assert!((12..=14).contains(&times.len()), "{name}: {}", times.len());
        for pair in times.windows(2) {
            let apart = (pair[1] - pair[0]).as_secs_f64();
            let periods = (apart / 10.0).round();
            assert!(
                (apart - periods * 10.0).abs() < 0.1 && (1.0..=2.0).contains(&periods),
                "{name}: {apart} s apart"
            );
        }
    }
    assert_eq!(answers.count("web/side-up"), 0, "it has started");
    assert_eq!(answers.count("web/main-up"), 0, "it has started");
    assert_nothing_wrong(&w);
}

/// R1: what had not become Ready does not become it by a restart, nor does the pod lose what is not its own.
#[tokio::test(start_paused = true)]
async fn restart_keeps_a_pod_not_ready_when_only_its_sidecar_is_not() {
    let (mut w, answers) = usual_world(true);
    answers.fail("web/side-ready", true);
    w.start().await;
    w.create("web", &rich("Always").to_string());
    let want = [
        "Running Initialized",
        "i1 ended 0 Completed x0 ready",
        "side running x0 started",
        "i2 ended 0 Completed x0 ready",
        "main running x0 ready started",
    ];
    w.until("main is ready", 60, |w| w.shown_summary("web") == want)
        .await;
    w.pass(40).await;
    w.api().take_requests();
    let shown = w.shown("web");
    for _ in 0..2 {
        w.restart().await;
        w.pass(35).await;
        assert_eq!(w.shown("web"), shown);
    }
    no_writes(&w, is_point);
    answers.fail("web/side-ready", false);
    w.until("the pod is Ready", 11, |w| w.shown_summary("web") == UP)
        .await;
    assert_nothing_wrong(&w);
}

// ------------------------------------------------------------------------------------------------ R7

/// What a pod whose `crashing` ends with code 3 shows while it waits five minutes.
fn crash_looping(crashing: &str, restarts: usize) -> Vec<String> {
    let waits = format!("{crashing} waits CrashLoopBackOff x{restarts}, before: ended 3 Error");
    let lines = match crashing {
        "i1" => [
            "Pending",
            &waits,
            "side waits PodInitializing x0",
            "i2 waits PodInitializing x0",
            "main waits PodInitializing x0",
        ],
        "side" => [
            "Pending",
            "i1 ended 0 Completed x0 ready",
            &waits,
            "i2 waits PodInitializing x0",
            "main waits PodInitializing x0",
        ],
        _ => [
            "Running Initialized",
            "i1 ended 0 Completed x0 ready",
            "side running x0 ready started",
            "i2 ended 0 Completed x0 ready",
            &waits,
        ],
    };
    lines.map(str::to_owned).to_vec()
}

/// R7: an init container, the sidecar or the main container is in its back-off of five minutes; wherever in it the
/// agent is restarted, and with the container gone from the runtime too, the next start is when it would have been.
#[tokio::test(start_paused = true)]
async fn restart_keeps_a_crash_back_off_of_five_minutes_of_every_kind_of_container() {
    for crashing in ["i1", "side", "main"] {
        for (wait, gone) in [(30, false), (290, false), (100, true)] {
            let at = format!("{crashing}, restart after {wait} s, container gone: {gone}");
            let (mut w, answers) = usual_world(false);
            // It ends before it has started.
            answers.fail("crash/side-up", crashing == "side");
            w.behave_each(move |_, container, _| {
                if container == crashing {
                    Behaviour::Exit {
                        code: 3,
                        after: Duration::from_secs(1),
                    }
                } else {
                    usual(container)
                }
            });
            w.manifest("crash", &rich("Always").to_string());
            w.start().await;
            w.until("five minutes of back-off", 1200, |w| {
                let record = w.container_of("crash", crashing);
                let last = record.last_exit.map(|e| e.container_id);
                record.backoff.is_some_and(|b| b.duration_ms == 300_000)
                    && last == record.intent.map(|i| i.container_id)
            })
            .await;
            let starts = w.starts_of("crash", crashing);
            // 0, then 10, 20, 40, 80, 160 and 300 s after the ends.
            assert_eq!(starts.len(), 7, "{at}\n{}", w.describe());
            let finished = starts[6].at + Duration::from_secs(1);
            let others = w.starts("crash").len() - starts.len();
            let want = crash_looping(crashing, 6);
            w.until("it is told", 5, |w| w.summary("crash") == want)
                .await;
            tokio::time::sleep_until(finished + Duration::from_secs(wait)).await;
            w.crash().await;
            if gone {
                for container in w.of_pod("crash") {
                    if container.metadata.unwrap_or_default().name == crashing {
                        w.fake.remove(&container.id);
                    }
                }
            }
            w.start().await;
            while Instant::now() < finished + Duration::from_secs(299) {
                assert_eq!(w.summary("crash"), want, "{at}\n{}", w.describe());
                assert_eq!(w.starts_of("crash", crashing).len(), 7, "{at}");
                w.pass(1).await;
            }
            w.until("the next start", 4, |w| {
                w.starts_of("crash", crashing).len() == 8
            })
            .await;
            let next = w.starts_of("crash", crashing)[7].clone();
            let waited = (next.at - finished).as_millis();
            assert!((300_000..=302_500).contains(&waited), "{at}: {waited} ms");
            assert_eq!(next.attempt, 7, "{at}");
            let now = w.starts("crash").len() - 8;
            assert_eq!(now, others, "{at}: others were started\n{}", w.describe());
            assert_nothing_wrong(&w);
        }
    }
}

/// R7: a container that its liveness probe has killed again and again waits as one that ended by itself; its
/// sidecar is not touched.
#[tokio::test(start_paused = true)]
async fn restart_keeps_the_back_off_of_a_container_that_its_liveness_probe_kills() {
    let (mut w, answers) = usual_world(false);
    answers.fail("crash/main-alive", true);
    w.manifest("crash", &rich("Always").to_string());
    w.start().await;
    w.until("80 s of back-off", 1200, |w| {
        let record = w.container_of("crash", "main");
        let last = record.last_exit.map(|e| e.container_id);
        record.backoff.is_some_and(|b| b.duration_ms == 80_000)
            && last == record.intent.map(|i| i.container_id)
    })
    .await;
    let ended = Instant::now();
    let before = w.starts_of("crash", "main");
    // The pause after an end counts from it, and by then the next container has run for 20 s.
    assert_eq!(before.len(), 6, "{}", w.describe());
    let side = w.id("crash", "side");
    w.pass(20).await;
    answers.fail("crash/main-alive", false);
    w.restart().await;
    w.pass(55).await;
    w.assert_summary(
        "crash",
        &[
            "Running Initialized",
            "i1 ended 0 Completed x0 ready",
            "side running x0 ready started",
            "i2 ended 0 Completed x0 ready",
            "main waits CrashLoopBackOff x5, before: ended 0 Completed",
        ],
    );
    w.until("the next start", 12, |w| {
        w.starts_of("crash", "main").len() == 7
    })
    .await;
    let next = w.starts_of("crash", "main")[6].clone();
    let waited = (next.at - ended).as_secs();
    assert!((79..=82).contains(&waited), "{waited} s");
    w.until("it is up again", 30, |w| {
        w.summary("crash")[4] == "main running x6 ready started, before: ended 0 Completed"
    })
    .await;
    assert_eq!(w.id("crash", "side"), side);
    assert_nothing_wrong(&w);
}

// ------------------------------------------------------------------------------------------------ R8

/// R8: the image of an init container, of the sidecar or of the main container cannot be pulled; the wait for the
/// next attempt is what it was, and nothing else of the pod starts or stops.
#[tokio::test(start_paused = true)]
async fn restart_keeps_an_image_pull_back_off_of_every_kind_of_container() {
    let image = "holdfast.local/absent:1";
    for waiting in ["i1", "side", "main"] {
        let (mut w, _) = usual_world(false);
        let error = "no such image".to_owned();
        w.fake
            .pull(image, Pull::Fails(tonic::Code::NotFound, error));
        let mut spec = rich("Always");
        member(&mut spec, waiting)["image"] = image.into();
        w.manifest("pull", &spec.to_string());
        w.start().await;
        let backoff = |w: &World| {
            let state = w.state();
            let record = state.images.get(image).map(|v| v.record.clone());
            record.and_then(|r| r.backoffs.values().next().copied())
        };
        w.until("more than two minutes of back-off", 600, |w| {
            backoff(w).is_some_and(|b| b.duration_ms == 160_000)
        })
        .await;
        let failed = Instant::now();
        let pulls = w.fake.count("pull_image");
        assert_eq!(pulls, 5, "at once, then after 10, 20, 40 and 80 s");
        let mut want = crash_looping(waiting, 0);
        for line in &mut want {
            if line.contains("CrashLoopBackOff") {
                *line = format!("{waiting} waits ImagePullBackOff x0");
            }
        }
        // A main container that never ran leaves the pod Pending.
        want[0] = want[0].replace("Running", "Pending");
        w.pass(40).await;
        assert_eq!(w.summary("pull"), want, "{}", w.describe());
        let started = w.started("pull");
        w.restart().await;
        while Instant::now() < failed + Duration::from_secs(158) {
            assert_eq!(w.fake.count("pull_image"), pulls, "{}", w.describe());
            assert_eq!(w.summary("pull"), want, "{waiting}\n{}", w.describe());
            w.pass(1).await;
        }
        assert_eq!(w.started("pull"), started, "{waiting}");
        w.fake.pull(image, Pull::Succeeds);
        w.until("the next pull", 6, |w| {
            w.fake.count("pull_image") == pulls + 1
        })
        .await;
        w.up("pull").await;
        assert_eq!(w.fake.count("pull_image"), pulls + 1);
        assert_eq!(w.started("pull"), ["i1", "side", "i2", "main"]);
        assert_nothing_wrong(&w);
    }
}

// ------------------------------------------------------------------------------------------------ R9

/// R9: without the API server, one pod Ready, one NotReady, one whose sidecar is still in startup, one whose sidecar
/// has failed its liveness probe twice of three times: all unchanged, and the third failure restarts that sidecar.
#[tokio::test(start_paused = true)]
async fn restart_keeps_results_and_counts_of_sidecars_and_main_containers_without_the_api() {
    let (mut w, answers) = usual_world(true);
    w.start().await;
    for pod in ["ready", "notready", "starting", "dying"] {
        w.create(pod, &rich("Always").to_string());
    }
    answers.fail("notready/main-ready", true);
    answers.fail("starting/side-up", true);
    let not_ready = [
        "Running Initialized",
        UP[1],
        UP[2],
        UP[3],
        "main running x0 started",
    ];
    let starting = [
        "Pending",
        UP[1],
        "side running x0",
        "i2 waits PodInitializing x0",
        "main waits PodInitializing x0",
    ];
    w.up("ready").await;
    w.up("dying").await;
    w.until("the others are where they stay", 60, |w| {
        w.summary("notready") == not_ready && w.summary("starting") == starting
    })
    .await;
    w.pass(20).await;
    w.set_api(false);
    let alive = answers.count("dying/side-alive");
    answers.fail("dying/side-alive", true);
    w.until("two failures", 30, |_| {
        answers.count("dying/side-alive") == alive + 2
    })
    .await;
    let ids = ["ready", "notready", "starting", "dying"].map(|pod| w.running_ids(pod));
    w.fake.clear_calls();
    let startups = answers.count("starting/side-up");
    w.restart().await;
    for _ in 0..8 {
        w.pass(1).await;
        assert_eq!(w.summary("ready"), UP);
        assert_eq!(w.summary("notready"), not_ready);
        assert_eq!(w.summary("starting"), starting);
        assert_eq!(w.summary("dying"), UP);
        no_effects(&w);
    }
    assert_eq!(answers.count("dying/side-alive"), alive + 2);
    w.until("the sidecar is another one", 4, |w| {
        w.starts_of("dying", "side").len() == 2
    })
    .await;
    answers.fail("dying/side-alive", false);
    let mut times = answers.times("dying/side-alive");
    times.retain(|at| *at < w.starts_of("dying", "side")[1].at);
    assert_eq!(times.len(), alive + 3, "{}", w.describe());
    assert_every(&times, PERIOD);
    w.until("it is up again", 30, |w| {
        w.summary("dying")
            == [
                UP[0],
                UP[1],
                "side running x1 ready started, before: ended 0 Completed",
                UP[3],
                UP[4],
            ]
    })
    .await;
    assert_eq!(w.id("dying", "main"), ids[3]["main"], "it runs on");
    assert_eq!(w.starts_of("dying", "side").len(), 2);
    // 30 failures make it fail: what was counted before the restart counts.
    assert!(startups > 2, "some before the restart");
    w.until("a fresh sidecar", 300, |w| {
        w.starts_of("starting", "side").len() == 2
    })
    .await;
    let mut times = answers.times("starting/side-up");
    times.retain(|at| *at < w.starts_of("starting", "side")[1].at);
    assert_eq!(times.len(), 30);
    assert_every(&times, PERIOD);
    assert_eq!(w.started("starting"), ["i1", "side", "side"]);
    assert_eq!(w.running_ids("ready"), ids[0]);
    assert_eq!(w.running_ids("notready"), ids[1]);
    w.set_api(true);
    w.until("the API server knows", 60, |w| {
        w.shown_summary("dying")[2].starts_with("side running x1 ready")
    })
    .await;
    assert_nothing_wrong(&w);
}

/// R9: what was counted of a container says nothing of the one that took its place while the agent was away.
#[tokio::test(start_paused = true)]
async fn restart_keeps_no_count_of_a_container_that_was_replaced() {
    for dying in ["side", "main"] {
        let (mut w, answers) = usual_world(false);
        w.manifest("web", &rich("Always").to_string());
        w.start().await;
        w.up("web").await;
        w.pass(20).await;
        let alive = format!("web/{dying}-alive");
        answers.fail(&alive, true);
        answers.clear();
        w.until("two failures", 30, |_| answers.count(&alive) == 2)
            .await;
        w.crash().await;
        w.fake.exit(&w.id("web", dying), 4);
        answers.clear();
        w.start().await;
        w.until("the next container is replaced", 60, |w| {
            w.starts_of("web", dying).len() == 3
        })
        .await;
        answers.fail(&alive, false);
        let starts = w.starts_of("web", dying);
        let mut times = answers.times(&alive);
        times.retain(|at| (starts[1].at..starts[2].at).contains(at));
        assert_eq!(times.len(), 3, "{}", w.describe());
        assert_every(&times, PERIOD);
        let ended = format!("{dying} running x2 ready started, before: ended 0 Completed");
        w.until("it was killed", 60, |w| w.summary("web").contains(&ended))
            .await;
        let other = if dying == "side" { "main" } else { "side" };
        assert_eq!(w.starts_of("web", other).len(), 1);
        assert_nothing_wrong(&w);
    }
}

/// R9: a count that could not be continued for two periods starts over; what is in force does not.
#[tokio::test(start_paused = true)]
async fn restart_keeps_results_but_no_counts_older_than_two_periods() {
    for (away, more) in [(6, 1), (25, 3)] {
        let (mut w, answers) = usual_world(false);
        w.manifest("web", &rich("Always").to_string());
        w.start().await;
        w.up("web").await;
        w.pass(20).await;
        answers.fail("web/side-alive", true);
        answers.fail("web/main-ready", true);
        answers.clear();
        w.until("two failures", 30, |_| answers.count("web/side-alive") == 2)
            .await;
        w.until("two failures", 30, |_| answers.count("web/main-ready") == 2)
            .await;
        w.pass(1).await;
        assert_eq!(w.summary("web"), UP, "two of three");
        let side = w.id("web", "side");
        w.crash().await;
        w.pass(away).await;
        let before = ["web/side-alive", "web/main-ready"].map(|probe| answers.count(probe));
        w.start().await;
        w.pass(1).await;
        assert_eq!(
            w.summary("web")[4],
            UP[4],
            "Ready is in force, away {away} s"
        );
        w.until("the sidecar is another one", 50, |w| {
            w.starts_of("web", "side").len() == 2
        })
        .await;
        let mut times = answers.times("web/side-alive");
        times.retain(|at| *at < w.starts_of("web", "side")[1].at);
        assert_eq!(times.len() - before[0], more, "away {away} s");
        assert_ne!(w.id("web", "side"), side);
        w.until("main is not ready", 50, |w| {
            w.summary("web")[4] == "main running x0 started"
        })
        .await;
        let runs = answers.count("web/main-ready") - before[1];
        assert_eq!(runs, more, "away {away} s");
        assert_nothing_wrong(&w);
    }
}

// ----------------------------------------------------------------------------------------------- R11

/// R11: the runtime and the logs are gone, and each container's count goes on, of init containers and sidecars too.
#[tokio::test(start_paused = true)]
async fn restart_keeps_every_restart_count_when_the_runtime_forgot_everything() {
    // (restarts of i1, side, main)
    let counts = |name: &str| match name {
        "i1" => 2,
        "side" => 3,
        "main" => 7,
        _ => 0,
    };
    // What is gone: everything; the containers only.
    for everything in [true, false] {
        let (mut w, _) = usual_world(false);
        w.behave_each(move |_, container, attempt| {
            if attempt < counts(container) {
                Behaviour::Exit {
                    code: 4,
                    after: Duration::from_secs(1),
                }
            } else {
                usual(container)
            }
        });
        w.manifest("count", &rich("Always").to_string());
        w.start().await;
        let want = [
            UP[0],
            "i1 ended 0 Completed x2 ready, before: ended 4 Error",
            "side running x3 ready started, before: ended 4 Error",
            UP[3],
            "main running x7 ready started, before: ended 4 Error",
        ];
        w.until("it is up after all", 3000, |w| w.summary("count") == want)
            .await;
        w.crash().await;
        let before = w.starts("count").len();
        if everything {
            w.fake.restart(Restart::Wipe).unwrap();
        } else {
            for container in w.of_pod("count") {
                w.fake.remove(&container.id);
            }
        }
        std::fs::remove_dir_all(w.dir.path().join("logs")).unwrap();
        w.start().await;
        let unknown = "before: ended 137 ContainerStatusUnknown";
        let side = format!("side running x4 ready started, {unknown}");
        let main = format!("main running x8 ready started, {unknown}");
        // Init containers run again in a new sandbox only.
        let (init, again) = if everything {
            let i1 = "i1 ended 0 Completed x3 ready, before: ended 0 Completed";
            let i2 = "i2 ended 0 Completed x1 ready, before: ended 0 Completed";
            ([i1, i2], vec!["i1", "side", "i2", "main"])
        } else {
            ([want[1], want[3]], vec!["side", "main"])
        };
        let want = [UP[0], init[0], &side, init[1], &main];
        w.until("it is up again", 900, |w| w.summary("count") == want)
            .await;
        let mut started = w.started("count").split_off(before);
        if !everything {
            started.sort();
            started.reverse();
        }
        assert_eq!(started, again, "everything: {everything}");
        w.pass(60).await;
        assert_eq!(w.summary("count"), want);
        assert_nothing_wrong(&w);
    }
}

// ----------------------------------------------------------------------------------------------- R12

/// R12: a created init container, sidecar or main container that was not started is started, not made anew, after a
/// loss of power too.
#[tokio::test(start_paused = true)]
async fn restart_keeps_the_intent_of_every_container_whose_start_was_cut_off() {
    use crate::node::{Crash, When};
    // Sandbox, then create and start of i1, side, i2, main.
    for (start, name) in [(3, "i1"), (5, "side"), (7, "i2"), (9, "main")] {
        for power in [false, true] {
            let (mut w, _) = usual_world(false);
            w.manifest("half", &rich("Never").to_string());
            w.start_until(Crash::Call(start, When::Before)).await;
            assert!(!w.pass_alive(Duration::from_secs(60)).await, "{name}");
            if power {
                w.lose_power().await;
            } else {
                w.crash().await;
            }
            let all = w.of_pod("half");
            let created = all.last().unwrap();
            assert_eq!(created.metadata.clone().unwrap_or_default().name, name);
            let intent = w.container_of("half", name).intent;
            let intent = intent.unwrap_or_else(|| panic!("no intent of {name} on disk"));
            assert_eq!(intent.container_id.as_str(), created.id);
            w.start().await;
            w.up("half").await;
            assert_eq!(w.started("half"), ["i1", "side", "i2", "main"]);
            assert_eq!(w.of_pod("half").len(), 4, "{name}, power lost: {power}");
            assert!(w.of_pod("half").iter().any(|c| c.id == created.id));
            assert_eq!(w.fake.count("create_container"), 4);
            assert_nothing_wrong(&w);
        }
    }
}
