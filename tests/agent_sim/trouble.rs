//! A full disk, clocks that jump, reboots, sources that cannot be read, decisions that cross.

use std::time::Duration;

use holdfast::core::state::{TerminationCause, Transaction, WorkerPhase, WorkerRecord};
use holdfast::kubeletconfig::BackOffEarlyEnd;
use holdfast::store::StoreHealth;
use holdfast::types::{Clock, PodExt};
use holdfast_testkit::fake_cri::{Behaviour, Fault};
use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;
use tonic::Code;

use crate::node::{Crash, When};
use crate::restart::{assert_nothing_wrong, evict, exits, make_unreadable, node};
use crate::schedule::Schedule;
use crate::world::{IMAGE, World, spec};

// ----------------------------------------------------------------------------------------------- R21

// Invariant CORE-2.
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

// Invariant CORE-3.
#[tokio::test(start_paused = true)]
async fn a_pod_whose_update_hangs_on_the_disk_is_stopped_when_it_is_deleted() {
    let mut w = World::with_api();
    w.behave(|_, _| Behaviour::RunForever);
    let schedule = Schedule::new(0);
    schedule.calm();
    w.schedule = Some(schedule.clone());
    w.start().await;
    w.joined().await;
    w.create("goes", &spec("Always", ""));
    w.until("it runs", 30, |w| w.running("goes").len() == 1)
        .await;
    w.pass(5).await;
    schedule.hang_disk(true);
    w.api().modify::<Pod>("default", "goes", |pod| {
        let changed = ("changed".to_owned(), "yes".to_owned());
        pod.metadata.annotations = Some([changed].into());
    });
    // Its worker waits for the record of the update.
    w.pass(5).await;
    assert!(w.api().delete::<Pod>("default", "goes", None));
    w.until("the stop goes ahead of its record", 60, |w| {
        w.running("goes").is_empty()
    })
    .await;
    schedule.hang_disk(false);
    w.until("nothing is left of it", 120, |w| !w.has_record("goes"))
        .await;
    assert_eq!(w.starts("goes").len(), 1);
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_pod_whose_update_hangs_on_the_disk_is_stopped_at_its_active_deadline() {
    let mut w = World::with_api();
    w.behave(|_, _| Behaviour::RunForever);
    let schedule = Schedule::new(0);
    schedule.calm();
    w.schedule = Some(schedule.clone());
    w.start().await;
    w.joined().await;
    w.create("goes", &spec("Always", r#","activeDeadlineSeconds":40"#));
    w.until("it runs", 30, |w| w.running("goes").len() == 1)
        .await;
    w.pass(5).await;
    schedule.hang_disk(true);
    w.api().modify::<Pod>("default", "goes", |pod| {
        let changed = ("changed".to_owned(), "yes".to_owned());
        pod.metadata.annotations = Some([changed].into());
    });
    // Its worker waits for the record of the update.
    w.pass(5).await;
    assert_eq!(w.running("goes").len(), 1, "not before its time");
    w.until("the stop goes ahead of its record", 90, |w| {
        w.running("goes").is_empty()
    })
    .await;
    schedule.hang_disk(false);
    w.until("its end is recorded", 120, |w| w.phase("goes") == "Failed")
        .await;
    assert_eq!(w.starts("goes").len(), 1);
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_pod_is_stopped_at_its_active_deadline_while_the_disk_is_full() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    w.manifest("goes", &spec("Always", r#","activeDeadlineSeconds":40"#));
    w.start().await;
    w.until("it runs", 30, |w| w.running("goes").len() == 1)
        .await;
    w.faults.set_out_of_space(true);
    // Something durable: now the store knows.
    w.manifest("new", &spec("Always", ""));
    w.until("it is stopped", 90, |w| w.running("goes").is_empty())
        .await;
    w.faults.set_out_of_space(false);
    w.until("its end is recorded", 120, |w| w.phase("goes") == "Failed")
        .await;
    assert_eq!(w.starts("goes").len(), 1);
    assert_nothing_wrong(&w);
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
        w.config.back_off_early_end = BackOffEarlyEnd::Disabled;
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

// Invariant POD-9.
/// A step of the clock may be what a crashing container waits for: it is tried once, whatever restarts, and the next
/// back-off is the next longer one.
#[tokio::test(start_paused = true)]
async fn a_step_of_the_clock_ends_a_crash_back_off_once() {
    const HOUR: i64 = 3_600_000;
    let mut w = node(|_, _| exits(3, 1)).await;
    w.manifest("crash", &spec("Always", ""));
    w.start().await;
    w.until("80 s of back-off", 600, |w| {
        w.waiting("crash") == "CrashLoopBackOff"
            && w.container("crash").backoff.unwrap().duration_ms == 80_000
    })
    .await;
    let before = w.starts("crash").len();
    w.clock.jump_wall(HOUR);
    w.until("it is tried", 15, |w| w.starts("crash").len() == before + 1)
        .await;
    assert_eq!(w.container("crash").backoff.unwrap().duration_ms, 160_000);
    let told = |w: &World| {
        let state = w.state();
        let count = |what: &str| {
            let lines = state.journal.values();
            lines.filter(|line| line.record.what == what).count()
        };
        (count("back-off ended"), count("event BackOffEnded"))
    };
    assert_eq!(told(&w), (1, 1));
    w.until("it waits again", 15, |w| {
        w.waiting("crash") == "CrashLoopBackOff"
    })
    .await;
    // A second step is held off, and a restart knows of the first.
    w.clock.jump_wall(-HOUR);
    w.pass(10).await;
    w.restart().await;
    w.pass(60).await;
    assert_eq!(w.starts("crash").len(), before + 1, "{}", w.describe());
    assert_eq!(told(&w), (1, 1));
    assert_nothing_wrong(&w);
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
async fn an_agent_that_dies_before_the_runtime_answers_charges_no_time_that_the_machine_was_off() {
    let mut w = node(|_, _| exits(3, 1)).await;
    w.manifest("crash", &spec("Always", ""));
    w.start().await;
    w.until("160 s of back-off", 900, |w| {
        w.waiting("crash") == "CrashLoopBackOff"
            && w.container("crash").backoff.unwrap().duration_ms == 160_000
    })
    .await;
    let before = w.starts("crash").len();
    w.pass(60).await;
    w.reboot().await;
    // Off for longer than the whole back-off, then for a minute without a runtime.
    w.pass(1000).await;
    w.fail_once("version", Fault::Hang);
    let minute = Duration::from_secs(60);
    let started = tokio::time::timeout(minute, w.start_until(Crash::Never)).await;
    assert!(started.is_err(), "it waits for the runtime");
    w.crash().await;
    w.start().await;
    let up = Instant::now();
    w.pass(80).await;
    assert_eq!(w.starts("crash").len(), before, "{}", w.describe());
    w.until("the next start", 60, |w| w.starts("crash").len() > before)
        .await;
    let took = up.elapsed().as_secs();
    assert!((90..=125).contains(&took), "started after {took} s");
    assert_nothing_wrong(&w);
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

fn with_init(restart: &str, init: &str) -> String {
    let init = format!(
        r#","initContainers":[{{"name":"init","image":"{IMAGE}","command":["sh"]{init}}}]"#
    );
    spec(restart, &init)
}

/// containerd writes what it knows of a container without a sync: after a loss of power it may show one as created
/// that has done its work.
#[tokio::test(start_paused = true)]
async fn after_a_power_cut_a_start_that_the_runtime_forgot_counts_as_one() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    let sidecar = r#","restartPolicy":"Always""#;
    for (pod, spec) in [
        ("once", spec("Never", "")),
        ("failure", spec("OnFailure", "")),
        ("always", spec("Always", "")),
        ("init-once", with_init("Never", "")),
        ("init-always", with_init("Always", "")),
        ("side", with_init("Never", sidecar)),
    ] {
        w.manifest(pod, &spec);
    }
    w.start().await;
    w.until("all run", 60, |w| {
        let one = |pod: &&str| w.running(pod).len() == 1;
        let single = ["once", "failure", "always", "init-once", "init-always"];
        single.iter().all(one) && w.running("side").len() == 2
    })
    .await;
    // What is told of it is on the disk.
    w.pass(30).await;
    let before: Vec<_> = w.fake.containers().into_iter().map(|c| c.id).collect();
    w.cut_power(|pod, container| pod != "side" || container == "init")
        .await;
    // Nor does it matter how often the agent begins to look at that.
    w.start_until(Crash::Write(2, When::After)).await;
    w.until("it dies", 60, |w| w.life.is_over()).await;
    w.crash().await;
    w.start().await;

    w.until("those that may run again do", 120, |w| {
        let one = |pod: &&str| w.running(pod).len() == 1;
        ["failure", "always", "init-always"].iter().all(one)
    })
    .await;
    w.until("the others failed", 120, |w| {
        w.phase("once") == "Failed" && w.phase("init-once") == "Failed"
    })
    .await;
    w.pass(120).await;
    let attempts = |pod: &str, container: &str| -> Vec<u32> {
        let starts = w.starts(pod).into_iter();
        let starts = starts.filter(|start| start.container == container);
        starts.map(|start| start.attempt).collect()
    };
    for (pod, container, want) in [
        ("once", "main", vec![0]),
        ("failure", "main", vec![0, 1]),
        ("always", "main", vec![0, 1]),
        ("init-once", "init", vec![0]),
        ("init-once", "main", vec![]),
        ("init-always", "init", vec![0, 1]),
    ] {
        assert_eq!(attempts(pod, container), want, "{pod} {container}");
    }
    assert!(attempts("side", "init").len() <= 2, "{}", w.describe());
    assert_eq!(w.restarts("always"), 1);
    for pod in ["failure", "always", "init-always"] {
        let now = w.running(pod);
        assert!(now.iter().all(|id| !before.contains(id)), "{pod}: {now:?}");
    }
    let status = w.status("once").unwrap().status;
    let statuses = status.container_statuses.clone().unwrap();
    let end = statuses[0].state.clone().unwrap().terminated.unwrap();
    assert_eq!(
        (end.exit_code, end.reason.as_deref()),
        (137, Some("ContainerStatusUnknown"))
    );
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_start_that_was_decided_and_not_made_in_this_boot_is_made_by_the_next_agent() {
    for policy in ["Never", "OnFailure", "Always"] {
        let mut w = node(|_, _| Behaviour::RunForever).await;
        w.manifest("pod", &spec(policy, ""));
        // Sandbox, container, start.
        w.start_until(Crash::Call(3, When::Before)).await;
        w.until("it dies before the start", 60, |w| w.life.is_over())
            .await;
        w.crash().await;
        let created = w.of_pod("pod");
        assert_eq!(created.len(), 1);
        assert_eq!(w.container("pod").intent.unwrap().attempt, 0, "{policy}");
        w.start().await;
        w.until("it runs", 60, |w| w.running("pod").len() == 1)
            .await;
        assert_eq!(w.running("pod")[0], created[0].id, "{policy}");
        assert_eq!(w.starts("pod").len(), 1, "{policy}");
        assert_nothing_wrong(&w);
    }
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
async fn a_static_pod_that_is_put_back_waits_for_nothing_that_the_runtime_does_not_remove() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    w.manifest("etcd", &spec("Always", ""));
    w.start().await;
    w.until("it runs", 30, |w| w.phase("etcd") == "Running")
        .await;
    let before = w.running("etcd");
    let refused = Fault::Error(
        tonic::Code::Unknown,
        "container is already in removing state".to_owned(),
    );
    w.fail_always("remove_container", refused);
    w.remove_manifest("etcd");
    w.until("it has ended", 60, |w| w.running("etcd").is_empty())
        .await;
    w.pass(30).await;
    w.manifest("etcd", &spec("Always", ""));
    w.until("it runs again", 60, |w| w.running("etcd").len() == 1)
        .await;
    assert_ne!(w.running("etcd"), before);
}

#[tokio::test(start_paused = true)]
async fn a_pod_gets_a_new_sandbox_although_the_runtime_does_not_remove_its_init_container() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    let init = format!(r#","initContainers":[{{"name":"init","image":"{IMAGE}"}}]"#);
    w.behave_each(|_, container, _| match container {
        "init" => Behaviour::Exit {
            code: 0,
            after: Duration::from_millis(100),
        },
        _ => Behaviour::RunForever,
    });
    w.manifest("web", &spec("Always", &init));
    w.start().await;
    w.until("it runs", 60, |w| w.phase("web") == "Running")
        .await;
    let refused = Fault::Error(
        tonic::Code::Unknown,
        "cannot delete running task: failed precondition".to_owned(),
    );
    w.fail_always("remove_container", refused);
    let before = w.running("web");
    w.reboot().await;
    w.start().await;
    w.until("it runs again", 90, |w| {
        let now = w.running("web");
        now.len() == 1 && now != before
    })
    .await;
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

// ------------------------------------------------------------------------------- a look that fails

#[tokio::test(start_paused = true)]
async fn a_death_is_noticed_though_the_look_at_it_failed_and_the_runtime_tells_once() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    w.manifest("dies", &spec("Always", ""));
    w.start().await;
    w.until("it runs", 30, |w| w.phase("dies") == "Running")
        .await;
    // The first full looks are over; the next one, and the next sync of the pod, are far away.
    w.pass(20).await;
    let broken = Fault::Error(tonic::Code::Internal, "broken".to_owned());
    w.fail_once("container_status", broken);
    let dying = w.running("dies")[0].clone();
    assert!(w.fake.exit(&dying, 1));
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(w.starts("dies").len(), 1, "the look failed");
    w.until("it runs again", 3, |w| w.starts("dies").len() == 2)
        .await;
    assert_nothing_wrong(&w);
}

/// A runtime that did not list a pod while it was stopped lists it again. What is on record of the pod stays.
#[tokio::test(start_paused = true)]
async fn what_runs_of_a_finished_pod_is_stopped() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    w.manifest("web", &spec("Always", ""));
    w.start().await;
    w.until("it runs", 30, |w| w.phase("web") == "Running")
        .await;
    w.pass(5).await;
    let finished = WorkerRecord {
        phase: WorkerPhase::Finished {
            since: w.clock.now(),
            cause: TerminationCause::Completed,
        },
        ..w.worker("web")
    };
    let transaction = Transaction::new().put(w.uid("web").as_str(), finished.clone());
    w.agent().store().commit(transaction).await.unwrap();
    w.restart().await;
    w.until("it is stopped", 60, |w| w.running("web").is_empty())
        .await;
    w.pass(120).await;
    assert_eq!(w.worker("web"), finished);
    assert_eq!(w.starts("web").len(), 1, "{}", w.describe());
    assert_nothing_wrong(&w);
}

// ------------------------------------------------------------------------------- a look that hangs

#[tokio::test(start_paused = true)]
async fn a_sandbox_whose_inspection_hangs_holds_up_its_own_pod_only() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    for pod in ["hangs", "other"] {
        w.manifest(pod, &spec("Always", ""));
    }
    w.start().await;
    w.until("both run", 30, |w| {
        ["hangs", "other"].iter().all(|p| w.phase(p) == "Running")
    })
    .await;
    w.pass(20).await;
    let sandbox = w.of_pod("hangs")[0].pod_sandbox_id.clone();
    w.hang("podsandbox_status", &sandbox);
    assert!(w.fake.exit(&w.running("hangs")[0], 1));
    w.pass(1).await;
    assert!(w.fake.exit(&w.running("other")[0], 1));
    w.until("the other one runs again", 5, |w| {
        w.starts("other").len() == 2
    })
    .await;

    // Its own is told of once the call is given up, with the pod's next sync.
    let told = |w: &World| {
        let state = w.state();
        state.journal.values().any(|line| {
            line.record.what == "event FailedSync"
                && line.record.pod.as_ref() == Some(&w.uid("hangs"))
        })
    };
    w.until("the one that hangs is told of", 300, told).await;
    assert_eq!(w.starts("hangs").len(), 1);
    w.hang_nothing();
    w.until("it runs again", 180, |w| w.starts("hangs").len() == 2)
        .await;
    assert_nothing_wrong(&w);
}

// --------------------------------------------------------------------------------- a step that fails

#[tokio::test(start_paused = true)]
async fn a_step_that_fails_before_anything_runs_is_told_with_its_cause_and_what_to_do() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    let broken = Fault::Error(tonic::Code::Unknown, "input/output error".to_owned());
    w.fail_always("podsandbox_status", broken);
    w.manifest("web", &spec("Always", ""));
    w.start().await;
    let told = |w: &World| -> Vec<String> {
        let state = w.state();
        let events = state.journal.values();
        let events = events.filter(|line| line.record.what == "event FailedSync");
        let texts = events.map(|line| line.record.why.clone());
        texts
            .filter(|text| text.contains("error syncing pod"))
            .collect()
    };
    w.until("it is told of", 60, |w| !told(w).is_empty()).await;
    let text = &told(&w)[0];
    assert!(text.contains("input/output error"), "{text}");
    assert!(text.contains("check the container runtime"), "{text}");
    w.pass(50).await;
    assert_eq!(told(&w).len(), 1, "a retry is no news");
    w.clear_faults();
    w.until("it runs", 300, |w| w.phase("web") == "Running")
        .await;
    assert_nothing_wrong(&w);
}

// ------------------------------------------------------------------------------- a stop that hangs

// Invariant CORE-3.
#[tokio::test(start_paused = true)]
async fn a_stop_that_hangs_is_told_by_the_name_of_its_container_and_holds_up_its_own_pod_only() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    let grace = r#","terminationGracePeriodSeconds":5"#;
    for pod in ["hangs", "other"] {
        w.manifest(pod, &spec("Always", grace));
    }
    w.start().await;
    w.until("both run", 30, |w| {
        ["hangs", "other"].iter().all(|p| w.phase(p) == "Running")
    })
    .await;
    w.hang("stop_container", &w.running("hangs")[0].clone());
    let uid = w.uid("hangs");
    let said = move |w: &World| -> Vec<String> {
        let state = w.state();
        let lines = state.journal.values().filter(|line| {
            line.record.what == "event FailedKillPod" && line.record.pod.as_ref() == Some(&uid)
        });
        lines.map(|line| line.record.why.clone()).collect()
    };
    for pod in ["hangs", "other"] {
        w.remove_manifest(pod);
    }
    w.until("the other one is gone", 12, |w| {
        w.running("other").is_empty()
    })
    .await;
    assert!(said(&w).is_empty(), "{:?}", said(&w));
    w.until("the one that hangs is told of", 16, |w| !said(w).is_empty())
        .await;
    let first = said(&w).remove(0);
    assert!(first.contains("has not stopped: no answer"), "{first}");
    // Five minutes, in which the call is given up and made again.
    w.pass(300).await;
    let lines = said(&w);
    assert!((2..=6).contains(&lines.len()), "{lines:?}");
    w.hang_nothing();
    w.until("it has stopped", 300, |w| w.running("hangs").is_empty())
        .await;
    w.pass(60).await;
    assert_nothing_wrong(&w);
}

// -------------------------------------------------------------------------- lists that are too large

#[tokio::test(start_paused = true)]
async fn pods_are_resumed_and_followed_when_the_runtime_cannot_list_them_in_one_answer() {
    const PODS: usize = 30;
    let mut w = node(|_, _| Behaviour::RunForever).await;
    // Without events, so that the lists are all there is.
    w.fake.offer_events(false);
    let names: Vec<String> = (0..PODS).map(|n| format!("p{n:02}")).collect();
    for name in &names {
        w.manifest(name, &spec("Always", ""));
    }
    w.start().await;
    let all_run = |w: &World| names.iter().all(|name| w.phase(name) == "Running");
    w.until("all run", 60, all_run).await;

    // Enough for a pod, not for all of them.
    w.fake.limit_lists(4096);
    let dying = w.running("p07")[0].clone();
    assert!(w.fake.exit(&dying, 1));
    w.until("its end is seen", 15, |w| w.starts("p07").len() == 2)
        .await;

    let ids = |w: &World| names.iter().map(|name| w.running(name)).collect::<Vec<_>>();
    let running = ids(&w);
    w.restart().await;
    w.pass(120).await;
    assert_eq!(ids(&w), running, "{}", w.describe());
    assert_eq!(w.starts("p").len(), PODS + 1, "{}", w.describe());
    w.remove_manifest("p03");
    w.until("one that goes is stopped", 60, |w| {
        w.of_pod("p03").is_empty()
    })
    .await;
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_list_that_fails_at_the_start_is_made_again() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    w.manifest("web", &spec("Always", ""));
    w.start().await;
    w.until("it runs", 30, |w| w.phase("web") == "Running")
        .await;
    w.crash().await;
    for operation in ["list_podsandbox", "list_containers"] {
        w.fail_once(operation, Fault::Error(Code::Unknown, "busy".to_owned()));
    }
    w.start().await;
    w.pass(30).await;
    assert_eq!(w.starts("web").len(), 1, "{}", w.describe());
    assert_nothing_wrong(&w);
}
