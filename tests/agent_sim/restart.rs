//! What a restart of the agent keeps, row by row.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use holdfast::core::pod_worker::KillRequest;
use holdfast::core::state::{TerminationCause, WorkerPhase};
use holdfast::pod_workers::UpdateOptions;
use holdfast::store::recover::Integrity;
use holdfast::types::PodSyncType;
use holdfast_testkit::fake_cri::{Behaviour, Fault, Pull, Restart};
use tokio::time::Instant;
use tonic::Code;

use crate::node::{Crash, Disk, When};
use crate::world::{IMAGE, World, spec};

pub fn exits(code: i32, after: u64) -> Behaviour {
    Behaviour::Exit {
        code,
        after: Duration::from_secs(after),
    }
}

pub async fn node(behaviour: impl Fn(&str, u32) -> Behaviour + Send + Sync + 'static) -> World {
    let world = World::new();
    world.behave(behaviour);
    world
}

pub fn assert_nothing_wrong(world: &World) {
    assert_eq!(world.wrongs(), Vec::<String>::new(), "{}", world.describe());
}

/// The manifest directory cannot be read: a symbolic link to itself.
pub fn make_unreadable(world: &World) {
    let dir = world.dir.path();
    std::fs::rename(dir.join("manifests"), dir.join("aside")).unwrap();
    std::os::unix::fs::symlink("manifests", dir.join("manifests")).unwrap();
}

pub fn make_readable(world: &World) {
    let dir = world.dir.path();
    std::fs::remove_file(dir.join("manifests")).unwrap();
    std::fs::rename(dir.join("aside"), dir.join("manifests")).unwrap();
}

pub fn evict(world: &World, pod: &str) {
    let uid = world.uid(pod);
    let record = world.state();
    let record = &record.pods[uid.as_str()].record;
    let mut options = UpdateOptions::new(std::sync::Arc::clone(&record.pod.0), PodSyncType::Kill);
    options.kill = Some(KillRequest {
        cause: TerminationCause::Evicted {
            reason: "Evicted".to_owned(),
            message: "The node was low on resource: memory.".to_owned(),
        },
        grace_override: Some(1),
    });
    world.agent().workers().update(options);
}

/// A pod whose container is being started when the agent dies, for `takes` longer.
async fn dies_while_the_runtime_starts(takes: u64, undone: bool) -> World {
    let mut w = World::new();
    let first = AtomicBool::new(true);
    w.behave(move |_, _| match first.swap(false, Ordering::Relaxed) {
        true => Behaviour::SlowStart {
            takes: Duration::from_secs(1 + takes),
            undone,
        },
        false => Behaviour::RunForever,
    });
    w.manifest("a", &spec("Always", ""));
    w.start().await;
    w.until("it is being started", 10, |w| w.starts("a").len() == 1)
        .await;
    w.pass(1).await;
    w.crash().await;
    w.start().await;
    w
}

// ------------------------------------------------------------------------------------------------ R1

#[tokio::test(start_paused = true)]
async fn restart_keeps_the_start_of_a_container_that_is_under_way() {
    let w = dies_while_the_runtime_starts(3, false).await;
    w.until("it runs", 5, |w| w.phase("a") == "Running").await;
    assert_eq!(w.of_pod("a").len(), 1, "{}", w.describe());
    assert_eq!(w.restarts("a"), 0);
}

#[tokio::test(start_paused = true)]
async fn restart_keeps_no_pod_waiting_for_a_start_that_is_undone() {
    let w = dies_while_the_runtime_starts(3, true).await;
    w.until("it runs", 5, |w| w.phase("a") == "Running").await;
    assert_eq!(w.restarts("a"), 0, "it has not run before");
}

// ------------------------------------------------------------------------------------------------ R2

// Invariant START-2.
#[tokio::test(start_paused = true)]
async fn restart_keeps_running_pods_without_a_single_call_or_status_change() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    for n in 0..100 {
        w.manifest(&format!("p{n:03}"), &spec("Always", ""));
    }
    w.start().await;
    w.until("100 pods run", 60, |w| w.running("p").len() == 100)
        .await;
    w.until("100 pods are reported Running", 60, |w| {
        let state = w.state();
        let mut statuses = state.statuses.values();
        state.statuses.len() == 100
            && statuses.all(|v| v.record.status.phase.as_deref() == Some("Running"))
    })
    .await;
    w.pass(100).await;
    let versions = |w: &World| -> Vec<(String, u64)> {
        let state = w.state();
        let statuses = state.statuses.iter();
        statuses
            .map(|(k, v)| (k.to_string(), v.record.version))
            .collect()
    };
    let before = versions(&w);
    for orderly in [false, true] {
        w.fake.clear_calls();
        if orderly {
            w.stop().await;
            w.start().await;
        } else {
            w.restart().await;
        }
        w.pass(200).await;
        assert_eq!(w.effects(), Vec::<String>::new(), "orderly: {orderly}");
        assert_eq!(versions(&w), before, "orderly: {orderly}");
    }
    assert_nothing_wrong(&w);
}

// ------------------------------------------------------------------------------------------------ R5

#[tokio::test(start_paused = true)]
async fn restart_keeps_a_recorded_success_when_the_container_is_gone() {
    let mut w = node(|_, _| exits(0, 3)).await;
    w.manifest("job", &spec("Never", ""));
    w.start().await;
    w.until("the exit is recorded", 30, |w| {
        w.has_record("job") && !w.starts("job").is_empty() && w.container("job").last_exit.is_some()
    })
    .await;
    w.crash().await;
    for container in w.of_pod("job") {
        w.fake.remove(&container.id);
    }
    w.start().await;
    w.until("Succeeded", 30, |w| w.phase("job") == "Succeeded")
        .await;
    w.pass(120).await;
    assert_eq!(w.phase("job"), "Succeeded");
    assert_eq!(w.starts("job").len(), 1, "ran again");
    assert_eq!(w.container("job").last_exit.unwrap().exit_code, 0);
}

#[tokio::test(start_paused = true)]
async fn restart_keeps_a_container_that_vanished_unseen_from_running_again() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    w.manifest("job", &spec("Never", ""));
    w.start().await;
    w.until("it runs", 30, |w| w.running("job").len() == 1)
        .await;
    w.crash().await;
    for container in w.of_pod("job") {
        w.fake.exit(&container.id, 0);
        w.fake.remove(&container.id);
    }
    w.start().await;
    w.until("Failed", 30, |w| w.phase("job") == "Failed").await;
    w.pass(120).await;
    assert_eq!(w.starts("job").len(), 1, "ran again");
    let status = w.status("job").unwrap();
    let statuses = status.status.container_statuses.clone().unwrap();
    let state = statuses[0].state.clone().unwrap();
    let terminated = state.terminated.expect("terminated");
    assert_eq!(terminated.exit_code, 137);
    assert_eq!(terminated.reason.as_deref(), Some("ContainerStatusUnknown"));
}

// ------------------------------------------------------------------------------------------------ R7

#[tokio::test(start_paused = true)]
async fn restart_keeps_a_crash_back_off_of_five_minutes() {
    let mut w = node(|_, _| exits(3, 1)).await;
    w.manifest("crash", &spec("Always", ""));
    w.start().await;
    w.until("five minutes of back-off", 1200, |w| {
        w.waiting("crash") == "CrashLoopBackOff"
            && w.container("crash").backoff.unwrap().duration_ms == 300_000
    })
    .await;
    let before = w.starts("crash").len();
    let finished = Instant::now();
    w.pass(30).await;
    w.restart().await;
    while Instant::now() < finished + Duration::from_secs(297) {
        assert_eq!(w.waiting("crash"), "CrashLoopBackOff", "{}", w.describe());
        assert_eq!(w.starts("crash").len(), before, "{}", w.describe());
        w.pass(1).await;
    }
    w.until("the next start", 15, |w| w.starts("crash").len() > before)
        .await;
    let starts = w.starts("crash");
    let (last, next) = (&starts[before - 1], &starts[before]);
    assert_eq!(next.attempt, last.attempt + 1, "restartCount continues");
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_crash_back_off_is_told_once_however_often_the_pod_is_looked_at() {
    let mut w = node(|_, _| exits(3, 1)).await;
    w.manifest("crash", &spec("Always", ""));
    w.start().await;
    // 10, 20, 40, 80, 160 and 300 s; the pod is looked at every minute at the latest.
    w.until("five minutes of back-off", 1200, |w| {
        w.waiting("crash") == "CrashLoopBackOff"
            && w.container("crash").backoff.unwrap().duration_ms == 300_000
    })
    .await;
    w.pass(100).await;
    w.restart().await;
    w.pass(180).await;
    assert_eq!(w.starts("crash").len(), 7, "{}", w.describe());
    let uid = w.uid("crash");
    let text = format!(
        "Warning main: Back-off restarting failed container main in pod crash-sim_default({uid})"
    );
    let state = w.state();
    let lines = state.journal.values().map(|line| &line.record);
    let told: Vec<_> = lines
        .filter(|line| line.what == "event BackOff")
        .map(|line| line.why.clone())
        .collect();
    // The recorder tells the 1st, 2nd, 4th and 8th of the same: there were six, none of them twice.
    let times = ["", " (x2)", " (x4)"];
    assert_eq!(told, times.map(|times| format!("{text}{times}")));
}

// ------------------------------------------------------------------------------------------------ R8

#[tokio::test(start_paused = true)]
async fn restart_keeps_an_image_pull_back_off() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    let image = "holdfast.local/absent:1";
    w.fake.pull(
        image,
        Pull::Fails(tonic::Code::NotFound, "no such image".to_owned()),
    );
    w.manifest("pull", &spec("Always", "").replace(IMAGE, image));
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
    w.pass(40).await;
    w.restart().await;
    while Instant::now() < failed + Duration::from_secs(157) {
        assert_eq!(w.fake.count("pull_image"), pulls, "{}", w.describe());
        w.pass(1).await;
    }
    w.fake.pull(image, Pull::Succeeds);
    w.until("it runs", 80, |w| w.running("pull").len() == 1)
        .await;
    assert_eq!(w.fake.count("pull_image"), pulls + 1);
}

// ----------------------------------------------------------------------------------------------- R10

// Invariant POD-4.
#[tokio::test(start_paused = true)]
async fn restart_keeps_what_is_left_of_a_grace_period() {
    let mut w = node(|_, _| Behaviour::IgnoreTerm).await;
    w.manifest(
        "slow",
        &spec("Always", r#","terminationGracePeriodSeconds":60"#),
    );
    w.start().await;
    w.until("it runs", 30, |w| w.running("slow").len() == 1)
        .await;
    w.remove_manifest("slow");
    w.until("it is being stopped", 10, |w| {
        matches!(w.worker("slow").phase, WorkerPhase::Terminating { .. })
    })
    .await;
    let asked = Instant::now();
    w.pass(30).await;
    w.restart().await;
    w.until("it is gone", 60, |w| w.running("slow").is_empty())
        .await;
    let took = asked.elapsed().as_secs();
    assert!((57..=63).contains(&took), "killed after {took} s");
}

// ----------------------------------------------------------------------------------------------- R11

#[tokio::test(start_paused = true)]
async fn restart_keeps_the_restart_count_when_the_runtime_forgot_everything() {
    let mut w = node(|_, attempt| {
        if attempt < 7 {
            exits(1, 1)
        } else {
            Behaviour::RunForever
        }
    })
    .await;
    w.manifest("count", &spec("Always", ""));
    w.start().await;
    w.until("it was restarted seven times", 2000, |w| {
        w.starts("count").len() == 8
    })
    .await;
    w.until("the count is reported", 10, |w| w.restarts("count") == 7)
        .await;
    w.crash().await;
    w.fake.restart(Restart::Wipe).unwrap();
    std::fs::remove_dir_all(w.dir.path().join("logs")).unwrap();
    w.start().await;
    w.until("it runs again", 700, |w| w.running("count").len() == 1)
        .await;
    assert_eq!(w.starts("count").last().unwrap().attempt, 8);
    w.until("the count is reported", 10, |w| w.restarts("count") == 8)
        .await;
    assert_nothing_wrong(&w);
}

// ----------------------------------------------------------------------------------------------- R12

#[tokio::test(start_paused = true)]
async fn restart_keeps_a_half_started_container_from_being_started_twice() {
    // Sandbox, create, start: before and after each.
    for n in 1..=3 {
        for when in [When::Before, When::After] {
            let mut w = node(|_, _| Behaviour::RunForever).await;
            w.manifest("half", &spec("Never", ""));
            w.start_until(Crash::Call(n, when)).await;
            assert!(!w.pass_alive(Duration::from_secs(30)).await, "call {n}");
            w.restart().await;
            w.until("it runs", 60, |w| w.running("half").len() == 1)
                .await;
            w.pass(90).await;
            let at = format!("{n} {when:?}: {}", w.describe());
            assert_eq!(w.starts("half").len(), 1, "{at}");
            assert_eq!(w.of_pod("half").len(), 1, "{at}");
            assert_eq!(w.fake.sandboxes().len(), 1, "{at}");
            assert_eq!(w.running("half").len(), 1, "{at}");
            assert_nothing_wrong(&w);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn restart_keeps_the_intent_of_a_container_whose_start_was_cut_off() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    w.manifest("half", &spec("Never", ""));
    w.start_until(Crash::Call(3, When::Before)).await;
    assert!(!w.pass_alive(Duration::from_secs(30)).await);
    w.lose_power().await;
    let created = w.of_pod("half")[0].id.clone();
    let intent = w.container("half").intent.expect("the intent is on disk");
    assert_eq!(intent.container_id.as_str(), created);
    w.start().await;
    w.until("it runs", 60, |w| w.running("half") == [created.as_str()])
        .await;
    assert_eq!(w.starts("half").len(), 1);
}

// ----------------------------------------------------------------------------------------------- R16

// Invariant BOOT-1.
#[tokio::test(start_paused = true)]
async fn restart_keeps_pods_when_the_store_is_lost_and_no_source_can_be_read() {
    for integrity in [Integrity::New, Integrity::Lost] {
        let mut w = node(|_, _| Behaviour::RunForever).await;
        w.manifest("a", &spec("Always", ""));
        w.manifest("b", &spec("Never", ""));
        w.start().await;
        w.until("both run", 30, |w| {
            w.running("a").len() + w.running("b").len() == 2
        })
        .await;
        let before = (w.running("a"), w.running("b"));
        w.crash().await;
        w.disk = Disk::default();
        w.integrity = integrity;
        make_unreadable(&w);
        w.fake.clear_calls();
        w.start().await;
        w.pass(600).await;
        assert_eq!(w.effects(), Vec::<String>::new(), "{integrity:?}");
        make_readable(&w);
        w.until("both are on record", 60, |w| {
            w.has_record("a") && w.has_record("b")
        })
        .await;
        w.pass(120).await;
        assert_eq!(w.effects(), Vec::<String>::new(), "{integrity:?}");
        assert_eq!((w.running("a"), w.running("b")), before);
        assert_eq!(
            (w.phase("a"), w.phase("b")),
            ("Running".into(), "Running".into())
        );
    }
}

/// Another agent had made the pod, under the UID that it makes of the manifest.
#[tokio::test(start_paused = true)]
async fn restart_keeps_static_pods_of_another_agent_under_their_uid() {
    const THEIRS: &str = "0123456789abcdef0123456789abcdef";
    let mut w = node(|_, _| Behaviour::RunForever).await;
    let with_uid = |uid: &str| {
        let meta = format!(r#"{{"name":"a","namespace":"default"{uid}}}"#);
        let spec = spec("Always", "");
        let text = format!(r#"{{"apiVersion":"v1","kind":"Pod","metadata":{meta},"spec":{spec}}}"#);
        std::fs::write(w.dir.path().join("manifests/a.json"), text).unwrap();
    };
    with_uid(&format!(r#","uid":"{THEIRS}""#));
    w.start().await;
    w.until("it runs", 30, |w| w.running("a").len() == 1).await;
    w.crash().await;
    let before = w.running("a");
    w.fake.forget_annotation("holdfast.io/manifest-hash");
    w.disk = Disk::default();
    w.manifest("a", &spec("Always", ""));
    w.fake.clear_calls();
    for life in ["first", "second"] {
        w.start().await;
        w.until("it is on record", 60, |w| w.has_record("a")).await;
        w.pass(120).await;
        assert_eq!(w.effects(), Vec::<String>::new(), "{life} life");
        assert_eq!(
            (w.uid("a").as_str(), w.running("a")),
            (THEIRS, before.clone())
        );
        w.crash().await;
    }
    w.manifest(
        "a",
        &spec("Always", r#","terminationGracePeriodSeconds":5"#),
    );
    w.start().await;
    w.until("the new manifest runs", 120, |w| {
        w.running("a").len() == 1 && w.running("a") != before
    })
    .await;
    assert_ne!(w.uid("a").as_str(), THEIRS);
    assert_nothing_wrong(&w);
}

// Invariant BOOT-2.
#[tokio::test(start_paused = true)]
async fn restart_keeps_a_restored_store_from_resurrecting_pods() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    for pod in ["kept", "gone", "dead"] {
        w.manifest(pod, &spec("Always", ""));
    }
    w.start().await;
    w.until("all run", 30, |w| {
        ["kept", "gone", "dead"]
            .iter()
            .all(|p| w.running(p).len() == 1 && w.phase(p) == "Running")
    })
    .await;
    let backup = w.disk.copy();
    let kept = w.running("kept");
    w.remove_manifest("gone");
    w.until("it is gone", 60, |w| w.of_pod("gone").is_empty())
        .await;
    w.crash().await;
    for container in w.of_pod("dead") {
        w.fake.exit(&container.id, 1);
    }
    w.disk = backup;
    w.integrity = Integrity::Restored;
    make_unreadable(&w);
    w.fake.clear_calls();
    w.start().await;
    w.pass(600).await;
    assert_eq!(w.running("kept"), kept, "what runs is adopted");
    let starts: Vec<_> = w.effects();
    assert!(
        !starts
            .iter()
            .any(|c| c.starts_with("start") || c.starts_with("create")),
        "nothing starts before its source has confirmed it: {starts:?}"
    );
    make_readable(&w);
    w.until("the confirmed one starts", 60, |w| {
        w.running("dead").len() == 1
    })
    .await;
    w.until("the other is forgotten", 60, |w| !w.has_record("gone"))
        .await;
    assert_eq!(w.starts("gone").len(), 1, "resurrected");
    assert_eq!(w.running("kept"), kept);
    assert_nothing_wrong(&w);
}

// ----------------------------------------------------------------------------------------------- R20

#[tokio::test(start_paused = true)]
async fn restart_keeps_an_evicted_pod_evicted_until_its_manifest_changes() {
    let mut w = node(|_, _| Behaviour::IgnoreTerm).await;
    w.manifest("victim", &spec("Always", ""));
    w.start().await;
    w.until("it runs", 30, |w| w.phase("victim") == "Running")
        .await;
    evict(&w, "victim");
    // The decision is on disk, its effects may or may not have begun.
    w.until("it is recorded", 30, |w| {
        matches!(w.worker("victim").phase, WorkerPhase::Terminating { .. })
    })
    .await;
    w.restart().await;
    w.until("it is finished", 60, |w| {
        matches!(w.worker("victim").phase, WorkerPhase::Finished { .. })
    })
    .await;
    let check = |w: &World| {
        assert_eq!(w.running("victim"), Vec::<String>::new());
        assert_eq!(w.starts("victim").len(), 1, "{}", w.describe());
        let status = w.status("victim").unwrap().status;
        assert_eq!(status.phase.as_deref(), Some("Failed"));
        assert_eq!(status.reason.as_deref(), Some("Evicted"));
    };
    for _ in 0..2 {
        w.restart().await;
        w.pass(300).await;
        check(&w);
    }
    w.reboot().await;
    w.start().await;
    w.pass(300).await;
    check(&w);
    w.manifest(
        "victim",
        &spec("Always", r#","terminationGracePeriodSeconds":5"#),
    );
    w.until("the new manifest runs", 60, |w| {
        w.running("victim").len() == 1
    })
    .await;
    assert_nothing_wrong(&w);
}

/// The listing that a start begins with is newer than all that was decided before it. A thread that is held up between two
/// looks at clocks may think otherwise, which must not cost the pod a minute.
#[tokio::test(start_paused = true)]
async fn restart_keeps_a_pod_that_started_just_before_a_reboot_from_waiting_on_a_busy_machine() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    w.start().await;
    // The last sign of life is older than the start.
    w.pass(13).await;
    w.manifest("late", &spec("Always", ""));
    w.until("it runs", 5, |w| w.running("late").len() == 1)
        .await;
    w.reboot().await;

    w.fail_once("list_podsandbox", Fault::Delay(Duration::from_secs(1)));
    let clock = w.clock.clone();
    let busy = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        clock.hold_up(Duration::from_millis(5));
    };
    tokio::join!(w.start(), busy);
    w.until("it runs again", 10, |w| w.running("late").len() == 1)
        .await;
    assert_eq!(w.starts("late").len(), 2, "{}", w.describe());
    assert_nothing_wrong(&w);
}

/// After a power cut, files of the network's plugins may be empty, and the runtime can never again stop a sandbox by them. Nothing
/// of it runs: neither its pod waits for it, nor the end of another one.
#[tokio::test(start_paused = true)]
async fn restart_starts_and_ends_pods_whose_former_sandboxes_cannot_be_stopped_after_a_reboot() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    w.start().await;
    for pod in ["stays", "goes"] {
        w.manifest(pod, &spec("Always", ""));
        w.until("it runs", 5, |w| w.running(pod).len() == 1).await;
    }
    w.reboot().await;
    let broken = Fault::Error(Code::Unknown, "unexpected end of JSON input".to_owned());
    w.fail_always("stop_podsandbox", broken);
    w.remove_manifest("goes");
    w.start().await;
    w.until("it runs again", 30, |w| w.running("stays").len() == 1)
        .await;
    w.until("it has ended", 60, |w| !w.has_record("goes")).await;
    assert_eq!(w.starts("stays").len(), 2, "{}", w.describe());
}
