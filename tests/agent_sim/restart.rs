//! What a restart of the agent keeps, row by row.

use std::time::Duration;

use holdfast::core::pod_worker::KillRequest;
use holdfast::core::state::{TerminationCause, WorkerPhase};
use holdfast::pod_workers::UpdateOptions;
use holdfast::store::StoreHealth;
use holdfast::store::recover::Integrity;
use holdfast::types::{PodExt, PodSyncType};
use holdfast_testkit::fake_cri::{Behaviour, Fault, Pull, Restart};
use tokio::time::Instant;

use crate::world::{Crash, Disk, IMAGE, When, World, spec};

fn exits(code: i32, after: u64) -> Behaviour {
    Behaviour::Exit {
        code,
        after: Duration::from_secs(after),
    }
}

async fn node(behaviour: impl Fn(&str, u32) -> Behaviour + Send + Sync + 'static) -> World {
    let world = World::new();
    world.behave(behaviour);
    world
}

fn assert_nothing_wrong(world: &World) {
    assert_eq!(world.wrongs(), Vec::<String>::new(), "{}", world.describe());
}

/// The manifest directory cannot be read: a symbolic link to itself.
fn make_unreadable(world: &World) {
    let dir = world.dir.path();
    std::fs::rename(dir.join("manifests"), dir.join("aside")).unwrap();
    std::os::unix::fs::symlink("manifests", dir.join("manifests")).unwrap();
}

fn make_readable(world: &World) {
    let dir = world.dir.path();
    std::fs::remove_file(dir.join("manifests")).unwrap();
    std::fs::rename(dir.join("aside"), dir.join("manifests")).unwrap();
}

fn evict(world: &World, pod: &str) {
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

// ------------------------------------------------------------------------------------------------ R2

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

// ----------------------------------------------------------------------------------------------- R21

#[tokio::test(start_paused = true)]
async fn a_full_disk_stops_new_work_only_and_recovers_without_a_restart() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    for pod in ["stays", "goes", "dies"] {
        w.manifest(pod, &spec("Always", ""));
    }
    w.start().await;
    w.until("all run", 30, |w| {
        ["stays", "goes", "dies"]
            .iter()
            .all(|p| w.phase(p) == "Running")
    })
    .await;
    let gone = w.uid("goes").to_string();
    let stays = w.running("stays");
    let health = w.agent().store().health();
    assert_eq!(*health.borrow(), StoreHealth::Ok);

    w.faults.set_out_of_space(true);
    w.manifest("new", &spec("Always", ""));
    w.remove_manifest("goes");
    let dying = w.running("dies")[0].clone();
    w.fake.exit(&dying, 1);
    w.until("the stop goes ahead of its record", 30, |w| {
        w.running("goes").is_empty()
    })
    .await;
    w.pass(120).await;
    assert!(
        matches!(
            &*health.borrow(),
            StoreHealth::Degraded {
                out_of_space: true,
                ..
            }
        ),
        "{:?}",
        health.borrow()
    );
    assert_eq!(w.starts("new").len(), 0, "nothing new starts");
    assert_eq!(w.starts("dies").len(), 1, "no restart without its intent");
    assert_eq!(w.running("stays"), stays);

    w.faults.set_out_of_space(false);
    w.until("health is back", 60, |_| {
        *health.borrow() == StoreHealth::Ok
    })
    .await;
    w.until("the new pod runs", 60, |w| w.running("new").len() == 1)
        .await;
    w.until("the one that died runs", 60, |w| {
        w.running("dies").len() == 1
    })
    .await;
    w.until("nothing is left of the removed one", 120, |w| {
        w.left_of("goes", &gone).is_empty()
    })
    .await;
    assert_eq!(w.running("stays"), stays);
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_stop_held_while_the_disk_is_full_is_written_when_space_returns() {
    let mut w = node(|_, _| Behaviour::IgnoreTerm).await;
    w.manifest(
        "goes",
        &spec("Always", r#","terminationGracePeriodSeconds":100"#),
    );
    w.start().await;
    w.until("it runs", 30, |w| w.phase("goes") == "Running")
        .await;
    w.faults.set_out_of_space(true);
    evict(&w, "goes");
    w.pass(20).await;
    let uid = w.uid("goes").to_string();
    let on_disk = |w: &World| {
        w.disk
            .load()
            .record::<holdfast::core::state::WorkerRecord>(&uid)
            .map(|r| r.phase.clone())
    };
    assert_eq!(on_disk(&w), Some(WorkerPhase::Sync));
    w.faults.set_out_of_space(false);
    w.until("the decision is on disk", 30, |w| {
        on_disk(w).is_some_and(|phase| phase != WorkerPhase::Sync)
    })
    .await;
    w.lose_power().await;
    w.start().await;
    w.pass(200).await;
    assert_eq!(w.starts("goes").len(), 1, "evicted stays evicted");
    assert!(w.running("goes").is_empty());
}

// ----------------------------------------------------------------------------------------------- R23

#[tokio::test(start_paused = true)]
async fn wall_clock_jumps_within_a_boot_neither_expire_nor_stretch_anything() {
    const HOURS: i64 = 5 * 3_600_000;
    for jump in [HOURS, -HOURS] {
        let mut w = node(|pod, _| match pod {
            "slow-sim" => Behaviour::IgnoreTerm,
            _ => exits(3, 1),
        })
        .await;
        w.manifest("crash", &spec("Always", ""));
        w.manifest(
            "slow",
            &spec("Always", r#","terminationGracePeriodSeconds":60"#),
        );
        w.start().await;
        w.until("80 s of back-off", 600, |w| {
            w.waiting("crash") == "CrashLoopBackOff"
                && w.container("crash").backoff.unwrap().duration_ms == 80_000
        })
        .await;
        let finished = Instant::now();
        let before = w.starts("crash").len();
        w.remove_manifest("slow");
        w.pass(10).await;
        w.clock.jump_wall(jump);
        w.pass(5).await;
        w.restart().await;
        w.pass(5).await;
        w.clock.jump_wall(-2 * jump);
        w.until("the grace period ends", 60, |w| {
            w.running("slow").is_empty()
        })
        .await;
        let took = finished.elapsed().as_secs();
        assert!(
            (57..=65).contains(&took),
            "jump {jump}: killed after {took} s"
        );
        w.until("the next start", 60, |w| w.starts("crash").len() > before)
            .await;
        let took = finished.elapsed().as_secs();
        assert!(
            (77..=90).contains(&took),
            "jump {jump}: started after {took} s"
        );
        assert_nothing_wrong(&w);
    }
}

#[tokio::test(start_paused = true)]
async fn wall_clock_jumps_across_a_reboot_expire_nothing() {
    const HOURS: i64 = 7 * 3_600_000;
    for jump in [HOURS, -HOURS] {
        let mut w = node(|_, _| exits(3, 1)).await;
        w.manifest("crash", &spec("Always", ""));
        w.start().await;
        w.until("160 s of back-off", 900, |w| {
            w.waiting("crash") == "CrashLoopBackOff"
                && w.container("crash").backoff.unwrap().duration_ms == 160_000
        })
        .await;
        let before = w.starts("crash").len();
        let attempt = w.starts("crash")[before - 1].attempt;
        w.pass(60).await;
        w.reboot().await;
        w.clock.jump_wall(jump);
        // Off for longer than the whole back-off: what was left at the last heartbeat is still left.
        w.pass(1000).await;
        w.start().await;
        let up = Instant::now();
        w.pass(80).await;
        assert_eq!(w.starts("crash").len(), before, "{jump} {}", w.describe());
        w.until("the next start", 60, |w| w.starts("crash").len() > before)
            .await;
        let took = up.elapsed().as_secs();
        assert!(
            (95..=125).contains(&took),
            "jump {jump}: started after {took} s"
        );
        assert_eq!(w.starts("crash")[before].attempt, attempt + 1);
        assert_nothing_wrong(&w);
    }
}

#[tokio::test(start_paused = true)]
async fn a_reboot_starts_every_pod_again_but_not_what_ran_once() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    for (pod, policy) in [
        ("always", "Always"),
        ("failure", "OnFailure"),
        ("never", "Never"),
    ] {
        w.manifest(pod, &spec(policy, ""));
    }
    w.start().await;
    w.until("all run", 30, |w| {
        ["always", "failure", "never"]
            .iter()
            .all(|p| w.phase(p) == "Running")
    })
    .await;
    w.reboot().await;
    w.start().await;
    w.until("they run again", 120, |w| {
        w.running("always").len() == 1 && w.running("failure").len() == 1
    })
    .await;
    w.until("the other one failed", 60, |w| w.phase("never") == "Failed")
        .await;
    assert_eq!(w.starts("never").len(), 1);
    assert_eq!(w.starts("always")[1].attempt, 1);
    assert_nothing_wrong(&w);
}

// ------------------------------------------------------------------------------------ other decisions

#[tokio::test(start_paused = true)]
async fn a_start_decided_before_an_eviction_does_not_happen_after_it() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    w.fail_once("create_container", Fault::Delay(Duration::from_secs(5)));
    w.manifest("late", &spec("Always", ""));
    w.start().await;
    w.until("it is being created", 30, |w| {
        w.fake.count("create_container") == 1
    })
    .await;
    evict(&w, "late");
    w.until("it is finished", 60, |w| {
        matches!(w.worker("late").phase, WorkerPhase::Finished { .. })
    })
    .await;
    w.pass(60).await;
    assert_eq!(w.starts("late").len(), 0);
    assert_eq!(w.phase("late"), "Failed");
}

#[tokio::test(start_paused = true)]
async fn what_is_left_of_a_removed_pod_goes_although_the_runtime_failed_once() {
    for operation in [
        "stop_container",
        "stop_podsandbox",
        "remove_container",
        "remove_podsandbox",
    ] {
        let mut w = node(|_, _| Behaviour::RunForever).await;
        w.manifest("goes", &spec("Always", ""));
        w.start().await;
        w.until("it runs", 30, |w| w.phase("goes") == "Running")
            .await;
        let uid = w.uid("goes").to_string();
        for _ in 0..3 {
            w.fail_once(
                operation,
                Fault::Error(tonic::Code::Unknown, "not now".to_owned()),
            );
        }
        w.remove_manifest("goes");
        w.pass(150).await;
        assert_eq!(
            w.left_of("goes", &uid),
            Vec::<String>::new(),
            "{operation} failed: {}",
            w.describe()
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_removed_while_the_agent_is_down_is_stopped_and_cleaned_up() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    w.manifest("goes", &spec("Always", ""));
    w.manifest("stays", &spec("Always", ""));
    w.start().await;
    w.until("both run", 30, |w| {
        w.phase("goes") == "Running" && w.phase("stays") == "Running"
    })
    .await;
    let uid = w.uid("goes").to_string();
    let stays = w.running("stays");
    w.crash().await;
    w.remove_manifest("goes");
    w.start().await;
    w.until("nothing is left", 90, |w| {
        w.left_of("goes", &uid).is_empty()
    })
    .await;
    assert_eq!(w.running("stays"), stays);
}

#[tokio::test(start_paused = true)]
async fn a_source_that_cannot_be_read_is_not_an_empty_source() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    w.manifest("a", &spec("Always", ""));
    w.start().await;
    w.until("it runs", 30, |w| w.phase("a") == "Running").await;
    let running = w.running("a");
    make_unreadable(&w);
    w.pass(60).await;
    w.restart().await;
    w.pass(300).await;
    assert_eq!(w.running("a"), running);
    // It is still looked after.
    w.fake.exit(&running[0], 1);
    w.until("it runs again", 30, |w| w.running("a").len() == 1)
        .await;
    assert_ne!(w.running("a"), running);
    assert_eq!(
        w.state().pods.values().next().unwrap().record.pod.name(),
        "a-sim"
    );
}
