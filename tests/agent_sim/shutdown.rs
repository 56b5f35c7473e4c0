//! The machine shuts down: what is announced, refused, stopped, on record and told, with deaths of the agent in between.

use std::time::Duration;

use holdfast::core::shutdown::ShutdownRecord;
use holdfast::core::state::WorkerPhase;
use holdfast::nodeshutdown::{Announced, Announcer, link};
use holdfast_testkit::exploration::{every_point, is_whole};
use holdfast_testkit::fake_cri::Behaviour;
use serde_json::Value;

use crate::cluster::NODE;
use crate::node::{Crash, When};
use crate::restart::assert_nothing_wrong;
use crate::world::{World, spec};

const CRITICAL: &str = r#","priority":2000000000"#;

/// A node that gives its pods 30 s, of which 10 s are for critical ones.
fn node(behaviour: impl Fn(&str, u32) -> Behaviour + Send + Sync + 'static) -> (World, Announcer) {
    let mut w = World::with_api();
    w.behave(behaviour);
    w.config.kubelet.shutdown_grace_period = Duration::from_secs(30);
    w.config.kubelet.shutdown_grace_period_critical_pods = Duration::from_secs(10);
    let announcer = announcer(&mut w);
    (w, announcer)
}

/// What the next life hears from.
fn announcer(w: &mut World) -> Announcer {
    let (announcer, link) = link();
    w.shutdown = Some(link);
    announcer
}

fn is_released(announcer: &Announcer) -> bool {
    *announcer.released.borrow()
}

fn ready(w: &World) -> Value {
    let node = w.api().get_json("nodes", "", NODE).unwrap_or_default();
    let conditions = node["status"]["conditions"].as_array();
    let ready = conditions.and_then(|all| all.iter().find(|c| c["type"] == "Ready"));
    ready.cloned().unwrap_or_default()
}

fn exit_code(pod: &Value) -> Option<i64> {
    pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"].as_i64()
}

fn is_terminated(pod: &Value) -> bool {
    let status = &pod["status"];
    let conditions = status["conditions"].as_array().cloned();
    let is_target = |c: &Value| c["type"] == "DisruptionTarget" && c["status"] == "True";
    status["phase"] == "Failed"
        && status["reason"] == "Terminated"
        && status["message"] == "Pod was terminated in response to imminent node shutdown."
        && conditions.is_some_and(|all| all.iter().any(is_target))
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_stops_regular_pods_then_critical_ones_and_tells_how_they_ended() {
    let (mut w, announcer) = node(|pod, _| match pod {
        "slow" => Behaviour::SlowTerm(Duration::from_secs(4)),
        _ => Behaviour::RunForever,
    });
    w.start().await;
    announcer.announced.send_replace(Announced::Up);
    w.create("slow", &spec("Always", ""));
    w.create("critical", &spec("Always", CRITICAL));
    w.manifest("static", &spec("Always", ""));
    for pod in ["slow", "critical", "static"] {
        w.until(pod, 60, |w| w.running(pod).len() == 1).await;
    }
    w.until("the node is Ready", 60, |w| ready(w)["status"] == "True")
        .await;

    announcer.announced.send_replace(Announced::GoesDown);
    w.pass(2).await;
    assert_eq!(ready(&w)["status"], "False");
    assert_eq!(ready(&w)["reason"], "KubeletNotReady");
    let message = ready(&w)["message"].clone();
    assert!(
        message.as_str().unwrap().contains("node is shutting down"),
        "{message}"
    );
    assert_eq!(w.running("critical").len(), 1, "slow still ends");
    w.create("late", &spec("Always", ""));
    w.until("late is refused", 5, |w| w.shown_phase("late") == "Failed")
        .await;
    let late = w.shown("late");
    assert_eq!(late["status"]["reason"], "NodeShutdown");
    assert_eq!(
        late["status"]["message"],
        "Pod was rejected: Pod was rejected as the node is shutting down."
    );
    w.until("the machine may go down", 30, |_| is_released(&announcer))
        .await;
    for pod in ["slow", "critical"] {
        let shown = w.shown(pod);
        assert!(is_terminated(&shown), "{pod}: {shown}");
        assert_eq!(exit_code(&shown), Some(0), "{pod}");
    }
    assert!(w.starts("late").is_empty());

    // The next boot: pods of the API server stay as they ended, static ones come back.
    let former = w.restarts("static");
    w.stop().await;
    w.reboot().await;
    let announcer = self::announcer(&mut w);
    w.start().await;
    announcer.announced.send_replace(Announced::Up);
    w.until("static runs", 60, |w| {
        w.running("static").len() == 1 && w.phase("static") == "Running"
    })
    .await;
    assert_eq!(w.restarts("static"), former + 1, "counts go on");
    assert_eq!(w.container("static").last_exit.unwrap().exit_code, 0);
    w.until("the node is Ready", 60, |w| ready(w)["status"] == "True")
        .await;
    w.pass(60).await;
    for (pod, starts) in [("slow", 1), ("critical", 1), ("late", 0)] {
        assert_eq!(w.starts(pod).len(), starts, "{pod}");
        assert_eq!(w.shown_phase(pod), "Failed", "{pod}");
    }
    w.create("next", &spec("Always", ""));
    w.until("a new pod runs", 60, |w| w.running("next").len() == 1)
        .await;
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn ends_of_a_shutdown_without_the_api_server_are_told_after_the_boot() {
    let (mut w, announcer) = node(|_, _| Behaviour::RunForever);
    w.start().await;
    announcer.announced.send_replace(Announced::Up);
    w.create("a", &spec("Always", ""));
    w.create("b", &spec("OnFailure", CRITICAL));
    for pod in ["a", "b"] {
        w.until(pod, 60, |w| w.shown_phase(pod) == "Running").await;
    }
    w.set_api(false);
    // Until a request has found that out.
    w.pass(30).await;
    announcer.announced.send_replace(Announced::GoesDown);
    w.until("the machine may go down", 10, |_| is_released(&announcer))
        .await;
    w.lose_power().await;
    w.reboot().await;
    let announcer = self::announcer(&mut w);
    w.start().await;
    announcer.announced.send_replace(Announced::Up);
    w.pass(30).await;
    w.set_api(true);
    for pod in ["a", "b"] {
        w.until("it is told", 120, |w| is_terminated(&w.shown(pod)))
            .await;
        assert_eq!(exit_code(&w.shown(pod)), Some(0), "{pod}");
        assert_eq!(w.starts(pod).len(), 1, "{pod}");
    }
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_shutdown_lets_new_pods_in_and_an_agent_restart_brings_static_ones_back() {
    let (mut w, announcer) = node(|pod, _| match pod {
        "slow" => Behaviour::SlowTerm(Duration::from_secs(8)),
        _ => Behaviour::RunForever,
    });
    w.start().await;
    announcer.announced.send_replace(Announced::Up);
    w.create("slow", &spec("Always", ""));
    w.create("critical", &spec("Always", CRITICAL));
    w.manifest("static", &spec("Always", ""));
    for pod in ["slow", "critical", "static"] {
        w.until(pod, 60, |w| w.running(pod).len() == 1).await;
    }
    announcer.announced.send_replace(Announced::GoesDown);
    w.pass(3).await;
    announcer.announced.send_replace(Announced::Up);
    w.until("slow has ended", 30, |w| is_terminated(&w.shown("slow")))
        .await;
    w.create("next", &spec("Always", ""));
    w.until("a new pod runs", 60, |w| w.running("next").len() == 1)
        .await;
    assert_eq!(w.running("critical").len(), 1, "it was spared");
    assert!(w.running("static").is_empty(), "what is stopped stays so");
    let announcer = self::announcer(&mut w);
    w.restart().await;
    announcer.announced.send_replace(Announced::Up);
    w.until("static runs", 60, |w| w.running("static").len() == 1)
        .await;
    assert_eq!(w.starts("critical").len(), 1);
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_static_pod_that_was_refused_during_a_shutdown_starts_after_the_boot() {
    let (mut w, announcer) = node(|_, _| Behaviour::RunForever);
    w.start().await;
    announcer.announced.send_replace(Announced::GoesDown);
    w.until("nothing runs, so it is released", 10, |_| {
        is_released(&announcer)
    })
    .await;
    w.manifest("static", &spec("Always", ""));
    w.until("it is refused", 10, |w| w.phase("static") == "Failed")
        .await;
    w.pass(5).await;
    assert!(w.starts("static").is_empty());
    w.stop().await;
    w.reboot().await;
    let announcer = self::announcer(&mut w);
    w.start().await;
    announcer.announced.send_replace(Announced::Up);
    w.until("static runs", 60, |w| {
        w.running("static").len() == 1 && w.phase("static") == "Running"
    })
    .await;
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn without_a_period_the_ends_are_on_record_when_the_machine_goes_down() {
    let mut w = World::with_api();
    w.behave(|pod, attempt| match (pod, attempt) {
        ("deaf", _) => Behaviour::IgnoreTerm,
        ("crashed", 0) => Behaviour::Exit {
            code: 3,
            after: Duration::from_millis(500),
        },
        _ => Behaviour::RunForever,
    });
    w.start().await;
    w.joined().await;
    let grace = r#","terminationGracePeriodSeconds":90"#;
    w.create("always", &spec("Always", ""));
    w.create("never", &spec("Never", ""));
    w.create("job", &spec("OnFailure", ""));
    w.create("crashed", &spec("Always", ""));
    w.create("deaf", &spec("Always", grace));
    for pod in ["always", "never", "job", "crashed", "deaf"] {
        w.until(pod, 60, |w| w.shown_phase(pod) == "Running").await;
    }
    w.until("crashed runs again", 60, |w| w.starts("crashed").len() == 2)
        .await;
    w.pass(5).await;
    let before = tokio::time::Instant::now();
    w.power_off().await;
    assert!(before.elapsed() < Duration::from_secs(25), "bounded");
    for pod in ["always", "never", "job", "crashed"] {
        let end = w.container(pod).last_exit.unwrap();
        assert_eq!((end.exit_code, end.inferred), (0, false), "{pod}");
    }
    w.reboot().await;
    w.start().await;
    // Nobody waits out a back-off for the machine's sake.
    for pod in ["always", "job", "crashed"] {
        w.until(pod, 8, |w| w.running(pod).len() == 1).await;
    }
    // Its process ended well, and its work was not done.
    w.until("never is told", 60, |w| w.shown_phase("never") == "Failed")
        .await;
    let never = w.shown("never");
    assert_eq!(exit_code(&never), Some(0));
    assert_eq!(never["status"]["reason"], "Terminated");
    let end = &never["status"]["containerStatuses"][0]["state"]["terminated"];
    assert_eq!(end["reason"], "NodeShutdown");
    assert_eq!(w.starts("never").len(), 1);
    w.until("job is told", 60, |w| {
        let status = w.shown("job")["status"]["containerStatuses"][0].clone();
        status["restartCount"] == 1 && status["state"]["running"].is_object()
    })
    .await;
    w.until("always is told", 60, |w| {
        let status = w.shown("always")["status"]["containerStatuses"][0].clone();
        status["restartCount"] == 1 && status["lastState"]["terminated"]["exitCode"] == 0
    })
    .await;
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn ends_of_a_local_drain_without_the_api_server_are_told_after_the_next_start() {
    for is_booted in [false, true] {
        let mut w = World::with_api();
        w.behave(|pod, _| match pod {
            "slow" => Behaviour::SlowTerm(Duration::from_secs(4)),
            _ => Behaviour::RunForever,
        });
        w.start().await;
        w.joined().await;
        w.create("slow", &spec("Always", ""));
        w.create("never", &spec("Never", ""));
        w.create("critical", &spec("OnFailure", CRITICAL));
        w.manifest("static", &spec("Always", ""));
        let of_api = ["slow", "never", "critical"];
        for pod in of_api {
            w.until(pod, 60, |w| w.shown_phase(pod) == "Running").await;
        }
        w.until("static", 60, |w| w.phase("static") == "Running")
            .await;
        w.set_api(false);
        // Until a request has found that out.
        w.pass(30).await;
        let began = tokio::time::Instant::now();
        w.drain(Some(Duration::from_secs(25)));
        w.until("the drain has ended", 25, |w| {
            ShutdownRecord::of(&w.state()).is_some_and(|record| record.ended.is_some())
        })
        .await;
        assert!(
            began.elapsed() >= Duration::from_secs(4),
            "slow has its time"
        );
        // Whoever waits for that looks again after a moment.
        w.pass(1).await;
        let record = ShutdownRecord::of(&w.state()).unwrap();
        assert!(record.local && record.cancelled.is_none(), "{record:?}");
        for pod in ["slow", "never", "critical", "static"] {
            assert!(w.running(pod).is_empty(), "{pod}");
            assert_eq!(w.container(pod).last_exit.unwrap().exit_code, 0, "{pod}");
        }
        for pod in of_api {
            assert_eq!(w.phase(pod), "Failed", "{pod} is on record");
            assert_eq!(w.shown_phase(pod), "Running", "{pod} is not told yet");
        }

        if is_booted {
            w.lose_power().await;
            w.reboot().await;
        } else {
            w.stop().await;
        }
        w.start().await;
        w.pass(30).await;
        w.set_api(true);
        for pod in of_api {
            w.until("it is told", 120, |w| is_terminated(&w.shown(pod)))
                .await;
            assert_eq!(exit_code(&w.shown(pod)), Some(0), "{pod}");
            assert_eq!(w.starts(pod).len(), 1, "{pod}");
        }
        if is_booted {
            w.until("static runs", 60, |w| w.running("static").len() == 1)
                .await;
        } else {
            w.until("the node is not Ready", 60, |w| {
                ready(w)["status"] == "False"
            })
            .await;
            assert!(w.running("static").is_empty(), "the drain is in force");
        }
        assert_nothing_wrong(&w);
    }
}

struct Run {
    died: bool,
}

/// A shutdown during which the agent dies once, goes on, and a boot after it.
fn run(crash: Crash, power: bool) -> Run {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(Box::pin(lives(crash, power)))
}

async fn lives(crash: Crash, power: bool) -> Run {
    let (mut w, announcer) = node(|pod, _| match pod {
        "slow" => Behaviour::SlowTerm(Duration::from_secs(2)),
        _ => Behaviour::RunForever,
    });
    w.start().await;
    announcer.announced.send_replace(Announced::Up);
    w.create("slow", &spec("Always", ""));
    w.create("never", &spec("Never", ""));
    w.create("critical", &spec("Always", CRITICAL));
    w.manifest("static", &spec("Always", ""));
    for pod in ["slow", "never", "critical", "static"] {
        w.until(pod, 60, |w| w.phase(pod) == "Running").await;
    }
    w.pass(10).await;
    // The counts begin here.
    w.stop().await;
    let mut announcer = self::announcer(&mut w);
    let mut alive = w.start_until(crash).await;
    announcer.announced.send_replace(Announced::GoesDown);
    let mut died = false;
    let began = tokio::time::Instant::now();
    loop {
        if alive {
            alive = w.pass_alive(Duration::from_millis(250)).await;
        }
        if !alive {
            assert!(!died, "it died again\n{}", w.describe());
            died = true;
            w.crash().await;
            if power {
                w.lose_power().await;
                break;
            }
            announcer = self::announcer(&mut w);
            announcer.announced.send_replace(Announced::GoesDown);
            alive = w.start_until(Crash::Never).await;
        }
        if is_released(&announcer) {
            break;
        }
        assert!(
            began.elapsed() < Duration::from_secs(120),
            "{crash:?}: never released\n{}",
            w.describe()
        );
    }
    if !power {
        let record = ShutdownRecord::of(&w.state()).unwrap();
        assert!(record.ended.is_some(), "{crash:?}");
        for pod in ["slow", "never", "critical", "static"] {
            let phase = w.worker(pod).phase;
            let finished = matches!(phase, WorkerPhase::Finished { .. });
            assert!(finished, "{crash:?}: {pod} {phase:?}\n{}", w.describe());
            assert!(w.running(pod).is_empty(), "{crash:?}: {pod}");
        }
    }
    w.reboot().await;
    announcer = self::announcer(&mut w);
    assert!(w.start_until(Crash::Never).await);
    announcer.announced.send_replace(Announced::Up);
    w.until("static runs again", 120, |w| {
        w.running("static").len() == 1 && w.phase("static") == "Running"
    })
    .await;
    if !power {
        for pod in ["slow", "never", "critical"] {
            w.until("it is told", 120, |w| is_terminated(&w.shown(pod)))
                .await;
            assert_eq!(exit_code(&w.shown(pod)), Some(0), "{crash:?}: {pod}");
        }
    }
    w.pass(30).await;
    assert_eq!(w.starts("never").len(), 1, "{crash:?}\n{}", w.describe());
    let wrongs = w.wrongs();
    assert!(
        wrongs.is_empty(),
        "{crash:?}: {wrongs:#?}\n{}",
        w.describe()
    );
    Run { died }
}

#[test]
fn without_a_crash_a_shutdown_ends_all_pods() {
    assert!(!run(Crash::Never, false).died);
}

#[test]
fn a_crash_at_any_call_of_the_runtime_during_a_shutdown_loses_no_end() {
    let mut points = every_point(|n| run(Crash::Call(n, When::Before), false).died);
    points += every_point(|n| run(Crash::Call(n, When::After), false).died);
    assert!(!is_whole() || points > 10, "{points}");
}

// Invariant POD-5.
#[test]
fn a_crash_at_any_write_to_the_disk_during_a_shutdown_loses_no_end() {
    let mut points = every_point(|n| run(Crash::Write(n, When::Before), false).died);
    points += every_point(|n| run(Crash::Write(n, When::After), false).died);
    assert!(!is_whole() || points > 20, "{points}");
}

#[test]
fn a_loss_of_power_at_any_write_during_a_shutdown_runs_nothing_twice() {
    let points = every_point(|n| run(Crash::Write(n, When::Before), true).died);
    assert!(!is_whole() || points > 10, "{points}");
}
