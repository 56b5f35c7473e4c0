//! Hooks, graces and deadlines across restarts of the agent.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use holdfast_testkit::exploration::stride;
use holdfast_testkit::fake_cri::{Behaviour, ExecResult, Fault};
use tokio::time::Instant;

use crate::node::{Crash, When};
use crate::restart::{assert_nothing_wrong, exits, node};
use crate::world::{IMAGE, World};

/// A pod spec with a container `main` that has these hooks.
fn hooked(more: &str, lifecycle: &str) -> String {
    format!(
        r#"{{"restartPolicy":"Always"{more},"containers":[{{"name":"main","image":"{IMAGE}","command":["sh"],"lifecycle":{lifecycle}}}]}}"#
    )
}

fn exec(hook: &str) -> String {
    format!(r#"{{"{hook}":{{"exec":{{"command":["{hook}"]}}}}}}"#)
}

/// What commands take, in seconds.
fn hooks_take(w: &World, seconds: u64) -> Arc<AtomicU64> {
    let takes = Arc::new(AtomicU64::new(seconds));
    let told = Arc::clone(&takes);
    w.fake.on_exec(move |_, _| ExecResult {
        takes: Duration::from_secs(told.load(Ordering::Relaxed)),
        ..Default::default()
    });
    takes
}

fn journal(w: &World) -> Vec<String> {
    let state = w.state();
    let lines = state.journal.values();
    lines
        .map(|v| format!("{}: {}", v.record.what, v.record.why))
        .collect()
}

pub fn told(w: &World, what: &str) -> bool {
    journal(w).iter().any(|line| line.contains(what))
}

// ----------------------------------------------------------------------------------------------- R10

// Invariant POD-6.
#[tokio::test(start_paused = true)]
async fn restart_keeps_the_grace_period_and_a_completed_pre_stop_hook() {
    let mut w = node(|_, _| Behaviour::IgnoreTerm).await;
    hooks_take(&w, 5);
    let grace = r#","terminationGracePeriodSeconds":60"#;
    w.manifest("slow", &hooked(grace, &exec("preStop")));
    w.start().await;
    w.until("the pod runs", 30, |w| w.running("slow").len() == 1)
        .await;
    w.pass(5).await;
    w.remove_manifest("slow");
    w.until("the hook is done", 30, |w| {
        w.container("slow").hooks_done.len() == 1
    })
    .await;
    let begun = Instant::now() - Duration::from_secs(5);
    w.pass(25).await;
    w.restart().await;
    w.until("the pod is killed", 60, |w| w.running("slow").is_empty())
        .await;
    let took = begun.elapsed().as_secs();
    assert!((58..=64).contains(&took), "killed after {took} s");
    assert_eq!(w.fake.count("exec_sync"), 1, "{:#?}", journal(&w));
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_pre_stop_hook_that_sleeps_ends_with_its_container() {
    let mut w = node(|_, _| exits(0, 20)).await;
    let grace = r#","terminationGracePeriodSeconds":600"#;
    w.manifest(
        "slow",
        &hooked(grace, r#"{"preStop":{"sleep":{"seconds":500}}}"#),
    );
    w.start().await;
    w.until("the pod runs", 30, |w| w.running("slow").len() == 1)
        .await;
    let begun = Instant::now();
    w.pass(5).await;
    w.remove_manifest("slow");
    w.until("the pod is gone", 60, |w| {
        w.running("slow").is_empty() && w.of_pod("slow").is_empty()
    })
    .await;
    let took = begun.elapsed().as_secs();
    assert!((15..=40).contains(&took), "gone after {took} s");
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn restart_keeps_the_rest_of_the_grace_period_for_a_pre_stop_hook_that_was_cut_off() {
    let mut w = node(|_, _| Behaviour::IgnoreTerm).await;
    hooks_take(&w, 3_600);
    let grace = r#","terminationGracePeriodSeconds":20"#;
    w.manifest("slow", &hooked(grace, &exec("preStop")));
    w.start().await;
    w.until("the pod runs", 30, |w| w.running("slow").len() == 1)
        .await;
    w.pass(5).await;
    w.remove_manifest("slow");
    w.until("the hook runs", 30, |w| w.fake.count("exec_sync") == 1)
        .await;
    let begun = Instant::now();
    w.pass(10).await;
    w.restart().await;
    w.until("the hook runs again", 10, |w| {
        w.fake.count("exec_sync") == 2
    })
    .await;
    w.until("the pod is killed", 60, |w| w.running("slow").is_empty())
        .await;
    // The hook has the grace period, the container the two seconds that every one gets.
    let took = begun.elapsed().as_secs();
    assert!((20..=25).contains(&took), "killed after {took} s");
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn restart_keeps_a_completed_post_start_hook() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    hooks_take(&w, 2);
    w.manifest("web", &hooked("", &exec("postStart")));
    w.start().await;
    w.until("the hook is done", 30, |w| {
        w.has_record("web") && told(w, "hook done: main: postStart")
    })
    .await;
    w.restart().await;
    w.pass(30).await;
    assert_eq!(w.fake.count("exec_sync"), 1);
    assert_eq!(w.starts("web").len(), 1);
    assert_nothing_wrong(&w);
}

// Invariant POD-6.
#[tokio::test(start_paused = true)]
async fn restart_keeps_a_post_start_hook_that_was_cut_off_to_be_run_again() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    let takes = hooks_take(&w, 3_600);
    w.manifest("web", &hooked("", &exec("postStart")));
    w.start().await;
    w.until("the hook runs", 30, |w| w.fake.count("exec_sync") == 1)
        .await;
    w.pass(5).await;
    takes.store(1, Ordering::Relaxed);
    w.restart().await;
    w.until("the hook is done", 30, |w| {
        told(w, "hook done: main: postStart")
    })
    .await;
    assert_eq!(w.fake.count("exec_sync"), 2);
    assert_eq!(w.starts("web").len(), 1, "the container goes on running");
    assert_nothing_wrong(&w);
}

// ------------------------------------------------------------------------------------------ bad hooks

#[tokio::test(start_paused = true)]
async fn a_post_start_hook_that_never_returns_does_not_keep_a_pod_from_being_deleted() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    hooks_take(&w, 3_600);
    w.manifest("web", &hooked("", &exec("postStart")));
    w.start().await;
    w.until("the hook runs", 30, |w| w.fake.count("exec_sync") == 1)
        .await;
    w.remove_manifest("web");
    w.until("the pod is stopped", 20, |w| w.running("web").is_empty())
        .await;
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_container_that_ends_during_its_post_start_hook_is_started_again() {
    let mut w = node(|_, attempt| match attempt {
        0 => Behaviour::Exit {
            code: 1,
            after: Duration::from_secs(5),
        },
        _ => Behaviour::RunForever,
    })
    .await;
    let hook = r#"{"postStart":{"sleep":{"seconds":3600}}}"#;
    let grace = r#","terminationGracePeriodSeconds":3600"#;
    w.manifest("web", &hooked(grace, hook));
    w.start().await;
    w.until("it is started again", 30, |w| {
        w.has_record("web") && w.starts("web").len() == 2
    })
    .await;
    assert_eq!(w.container("web").last_exit.unwrap().exit_code, 1);
    w.pass(120).await;
    assert_eq!(
        w.running("web").len(),
        1,
        "its hook goes on, and so does it"
    );
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_failed_post_start_hook_kills_its_container_and_is_told() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    w.fake.on_exec(|_, _| ExecResult {
        code: 4,
        ..Default::default()
    });
    w.manifest("web", &hooked("", &exec("postStart")));
    w.start().await;
    w.until("the container is killed", 30, |w| {
        w.has_record("web") && !w.starts("web").is_empty() && w.running("web").is_empty()
    })
    .await;
    w.until("it is told", 30, |w| {
        told(w, "PostStart hook failed") || told(w, "PostStartHook failed")
    })
    .await;
    assert!(told(
        &w,
        "hook failed: main: postStart: its command exited with 4"
    ));
    w.until("it backs off", 60, |w| {
        w.waiting("web") == "CrashLoopBackOff"
    })
    .await;
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_grace_period_that_is_shortened_cuts_a_hook_short() {
    let mut w = node(|_, _| Behaviour::IgnoreTerm).await;
    hooks_take(&w, 3_600);
    let grace = r#","terminationGracePeriodSeconds":600"#;
    w.manifest("slow", &hooked(grace, &exec("preStop")));
    w.start().await;
    w.until("the pod runs", 30, |w| w.running("slow").len() == 1)
        .await;
    w.pass(5).await;
    w.remove_manifest("slow");
    w.until("the hook runs", 30, |w| w.fake.count("exec_sync") == 1)
        .await;
    crate::restart::evict(&w, "slow");
    w.until("the pod is killed", 10, |w| w.running("slow").is_empty())
        .await;
    assert_nothing_wrong(&w);
}

// ------------------------------------------------------------------------------------------ deadlines

#[tokio::test(start_paused = true)]
async fn restart_keeps_the_active_deadline() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    w.manifest("job", &hooked(r#","activeDeadlineSeconds":40"#, "{}"));
    w.start().await;
    w.until("the pod runs", 30, |w| w.running("job").len() == 1)
        .await;
    let begun = Instant::now();
    w.pass(20).await;
    w.restart().await;
    w.pass(10).await;
    assert_eq!(w.running("job").len(), 1, "not before its time");
    w.until("the pod is stopped", 20, |w| w.running("job").is_empty())
        .await;
    let took = begun.elapsed().as_secs();
    assert!((36..=44).contains(&took), "stopped after {took} s");
    assert!(told(&w, "DeadlineExceeded"), "{:#?}", journal(&w));
    w.restart().await;
    w.pass(60).await;
    assert_eq!(w.starts("job").len(), 1, "it does not run again");
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_post_start_hook_that_never_returns_does_not_outlast_the_active_deadline() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    hooks_take(&w, 3_600);
    let deadline = r#","activeDeadlineSeconds":40"#;
    w.manifest("job", &hooked(deadline, &exec("postStart")));
    w.start().await;
    w.until("the hook runs", 30, |w| w.fake.count("exec_sync") == 1)
        .await;
    let begun = Instant::now();
    w.until("the pod is stopped", 50, |w| w.running("job").is_empty())
        .await;
    let took = begun.elapsed().as_secs();
    assert!((36..=44).contains(&took), "stopped after {took} s");
    w.until("it is told", 10, |w| w.phase("job") == "Failed")
        .await;
    let reason = w.status("job").unwrap().status.reason.clone();
    assert_eq!(reason.as_deref(), Some("DeadlineExceeded"));
    assert!(told(&w, "its activeDeadlineSeconds are over"));
    assert_nothing_wrong(&w);
}

// ----------------------------------------------------------------------------------------- sandboxes

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_dies_is_told_and_replaced() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    w.manifest("web", &hooked("", "{}"));
    w.start().await;
    w.until("the pod runs", 30, |w| w.running("web").len() == 1)
        .await;
    assert!(!told(&w, "SandboxChanged"), "the first one replaces none");
    let sandbox = w.fake.sandboxes()[0].id.clone();
    assert!(w.fake.kill_sandbox(&sandbox));
    w.until("the pod runs again", 60, |w| {
        w.starts("web").len() == 2 && w.running("web").len() == 1
    })
    .await;
    assert!(told(&w, "SandboxChanged"), "{:#?}", journal(&w));
    assert_nothing_wrong(&w);
}

// ----------------------------------------------------------------------------------------------- ends

#[tokio::test(start_paused = true)]
async fn the_last_status_has_the_exit_codes_however_slow_the_runtime_lists() {
    for delay_ms in [150, 400, 700, 1_100] {
        let mut w = node(|_, _| Behaviour::RunForever).await;
        w.fake.offer_events(false);
        w.manifest("web", &hooked("", "{}"));
        w.start().await;
        w.until("the pod runs", 30, |w| w.running("web").len() == 1)
            .await;
        w.pass(5).await;
        for _ in 0..12 {
            let delay = Duration::from_millis(delay_ms);
            w.fail_once("list_containers", Fault::Delay(delay));
        }
        crate::restart::evict(&w, "web");
        w.until("the pod is finished", 60, |w| {
            w.status("web").is_some_and(|s| s.finished)
        })
        .await;
        let status = w.status("web").unwrap().status;
        let containers = status.container_statuses.clone().unwrap();
        let end = containers[0].state.clone().unwrap().terminated.unwrap();
        assert_ne!(
            end.reason.as_deref(),
            Some("ContainerStatusUnknown"),
            "{delay_ms} ms"
        );
        assert_nothing_wrong(&w);
    }
}

// -------------------------------------------------------------------------------------------- big pods

#[tokio::test(start_paused = true)]
async fn a_pod_of_200_containers_starts_and_stops_with_few_calls_each() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    let containers: Vec<String> = (0..200)
        .map(|n| format!(r#"{{"name":"c{n:03}","image":"{IMAGE}","command":["sh"]}}"#))
        .collect();
    let spec = format!(
        r#"{{"terminationGracePeriodSeconds":5,"containers":[{}]}}"#,
        containers.join(",")
    );
    w.manifest("big", &spec);
    w.start().await;
    w.until("all run", 120, |w| w.running("big").len() == 200)
        .await;
    w.pass(5).await;
    assert_eq!(w.fake.count("start_container"), 200);
    w.remove_manifest("big");
    w.until("all are stopped", 60, |w| w.running("big").is_empty())
        .await;
    assert_eq!(w.fake.count("stop_container"), 200);
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn what_ends_in_many_pods_at_once_is_found_with_the_lists_of_each_second() {
    const PODS: usize = 50;
    let mut w = node(|_, _| Behaviour::RunForever).await;
    w.fake.offer_events(false);
    let names: Vec<String> = (0..PODS).map(|n| format!("p{n:02}")).collect();
    let container = |name: &str| format!(r#"{{"name":"{name}","image":"{IMAGE}"}}"#);
    let (ends, stays) = (container("ends"), container("stays"));
    let spec = format!(r#"{{"restartPolicy":"Never","containers":[{ends},{stays}]}}"#);
    for name in &names {
        w.manifest(name, &spec);
    }
    w.start().await;
    let each_runs = |w: &World, containers| {
        let mut names = names.iter();
        names.all(|name| w.running(name).len() == containers)
    };
    w.until("all run", 120, |w| each_runs(w, 2)).await;
    w.pass(5).await;
    // Who they are made for was told when they were looked for.
    assert_eq!(w.fake.count("image_status"), 2 * PODS);
    w.fake.clear_calls();
    for name in &names {
        let pod = w.of_pod(name);
        let ends = pod
            .iter()
            .find(|c| c.metadata.as_ref().unwrap().name == "ends");
        assert!(w.fake.exit(&ends.unwrap().id, 3));
    }
    w.pass(4).await;
    assert!(each_runs(&w, 1));
    for name in &names {
        let end = w.container_of(name, "ends").last_exit;
        assert_eq!(end.map(|end| end.exit_code), Some(3), "{name}");
    }
    for operation in ["list_podsandbox", "list_containers"] {
        let calls = w.fake.count(operation);
        assert!((3..=5).contains(&calls), "{calls} times {operation}");
    }
    assert_eq!(w.fake.count("podsandbox_status"), PODS);
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_megabyte_of_environment_arrives() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    let value = "x".repeat(1 << 20);
    w.manifest(
        "env",
        &format!(
            r#"{{"containers":[{{"name":"main","image":"{IMAGE}","command":["sh"],"env":[{{"name":"BIG","value":"{value}"}}]}}]}}"#
        ),
    );
    w.start().await;
    w.until("the pod runs", 60, |w| w.running("env").len() == 1)
        .await;
    let id = &w.running("env")[0];
    let config = w.fake.config(id).unwrap();
    let sent = config.envs.iter().find(|e| e.key == "BIG").unwrap();
    assert_eq!(sent.value.len(), 1 << 20);
    assert_nothing_wrong(&w);
}

// ----------------------------------------------------------------------------------------------- R12

/// Three init containers, a sidecar among them, a main container with hooks.
fn staged() -> String {
    let container = |name: &str, script: &str, more: &str| {
        format!(r#"{{"name":"{name}","image":"{IMAGE}","command":["sh","-c","{script}"]{more}}}"#)
    };
    let sidecar = r#","restartPolicy":"Always""#;
    let hooks = r#","lifecycle":{"postStart":{"exec":{"command":["true"]}},"preStop":{"exec":{"command":["true"]}}}"#;
    format!(
        r#"{{"restartPolicy":"Always","terminationGracePeriodSeconds":5,"initContainers":[{},{},{},{}],"containers":[{}]}}"#,
        container("i1", "sleep 1", ""),
        container("side", "sleep 9999", sidecar),
        container("i2", "sleep 1", ""),
        container("i3", "exit 0", ""),
        container("main", "sleep 9999", hooks),
    )
}

/// The pod comes up and is removed; the agent dies where `crash` says, and is started again. Returns how many
/// calls that change something the first life made.
async fn come_and_go(crash: Crash) -> usize {
    let mut w = World::new();
    w.behave_as_told();
    w.manifest("staged", &staged());
    let mut calls = None;
    let mut removed = None;
    let mut uid = String::new();
    loop {
        assert!(
            w.began.elapsed() < Duration::from_secs(180),
            "{crash:?}\n{}",
            w.describe()
        );
        let life = if calls.is_none() { crash } else { Crash::Never };
        let mut alive = w.start_until(life).await;
        while alive {
            alive = w.pass_alive(Duration::from_millis(500)).await;
            if alive && removed.is_none() && w.began.elapsed() > Duration::from_secs(30) {
                let names: Vec<_> = w
                    .starts("staged")
                    .into_iter()
                    .map(|s| s.container)
                    .collect();
                let want = ["i1", "side", "i2", "i3", "main"];
                assert_eq!(names, want, "{crash:?}\n{}", w.describe());
                assert_eq!(w.running("staged").len(), 2, "{crash:?}\n{}", w.describe());
                assert_eq!(w.fake.sandboxes().len(), 1, "{crash:?}");
                uid = w.uid("staged").to_string();
                w.remove_manifest("staged");
                removed = Some(w.began.elapsed());
            }
            if alive && removed.is_some() && w.left_of("staged", &uid).is_empty() {
                assert_eq!(w.wrongs(), Vec::<String>::new(), "{crash:?}");
                return calls.unwrap_or_else(|| w.life.calls());
            }
            assert!(
                w.began.elapsed() < Duration::from_secs(180),
                "{crash:?}\n{}",
                w.describe()
            );
        }
        calls.get_or_insert_with(|| w.life.calls());
        w.crash().await;
    }
}

fn alone(crash: Crash) -> usize {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(come_and_go(crash))
}

#[test]
fn restart_keeps_init_containers_in_order_and_each_runs_once_wherever_the_agent_dies() {
    let calls = alone(Crash::Never);
    assert!(calls >= 12, "{calls} calls");
    for call in (1..=calls).step_by(stride()) {
        for when in [When::Before, When::After] {
            alone(Crash::Call(call, when));
        }
    }
}
