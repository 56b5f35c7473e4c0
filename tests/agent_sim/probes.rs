//! What a restart of the agent keeps of probes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast_testkit::fake_cri::{Behaviour, ExecResult, Pull};
use tokio::time::Instant;

use crate::restart::{assert_nothing_wrong, node};
use crate::world::{IMAGE, World};

/// What exec probes answer, by their command's first word, and when they were run.
#[derive(Clone, Default)]
struct Probes {
    failing: Arc<Mutex<BTreeMap<String, bool>>>,
    runs: Arc<Mutex<Vec<(String, Instant)>>>,
}

impl Probes {
    fn of(world: &World) -> Self {
        let probes = Self::default();
        let answers = probes.clone();
        world.fake.on_exec(move |_, command| {
            let name = command[0].clone();
            let fails = answers.failing.lock().unwrap().get(&name) == Some(&true);
            answers.runs.lock().unwrap().push((name, Instant::now()));
            ExecResult {
                code: i32::from(fails),
                ..ExecResult::default()
            }
        });
        probes
    }

    fn fail(&self, name: &str, fails: bool) {
        self.failing.lock().unwrap().insert(name.to_owned(), fails);
    }

    fn count(&self, name: &str) -> usize {
        let runs = self.runs.lock().unwrap();
        runs.iter().filter(|(ran, _)| ran == name).count()
    }

    /// Most probes within half a second.
    fn busiest(&self) -> usize {
        let runs = self.runs.lock().unwrap();
        let within = |start: Instant| {
            let end = start + Duration::from_millis(500);
            runs.iter()
                .filter(|(_, at)| (start..end).contains(at))
                .count()
        };
        runs.iter().map(|(_, at)| within(*at)).max().unwrap_or(0)
    }

    fn clear(&self) {
        self.runs.lock().unwrap().clear();
    }
}

/// A pod whose container has these probes, each as `<kind>Probe` with its command.
fn probed(world: &World, pod: &str, probes: &[(&str, &str)]) {
    let probes: String = probes
        .iter()
        .map(|(kind, command)| {
            let failures = if *kind == "startup" { 30 } else { 3 };
            format!(
                r#","{kind}Probe":{{"exec":{{"command":["{command}"]}},"periodSeconds":10,"failureThreshold":{failures}}}"#
            )
        })
        .collect();
    let spec = format!(
        r#"{{"restartPolicy":"Always","terminationGracePeriodSeconds":1,"containers":[{{"name":"main","image":"{IMAGE}","command":["sh"]{probes}}}]}}"#
    );
    world.manifest(pod, &spec);
}

/// Ready and started of the pod's container, as told.
fn told(world: &World, pod: &str) -> (bool, bool) {
    let Some(record) = world.status(pod) else {
        return (false, false);
    };
    let statuses = record.status.container_statuses.clone().unwrap_or_default();
    statuses
        .first()
        .map_or((false, false), |c| (c.ready, c.started == Some(true)))
}

#[tokio::test(start_paused = true)]
async fn restart_keeps_readiness_without_a_call_or_a_status_change() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    let probes = Probes::of(&w);
    for n in 0..40 {
        probed(
            &w,
            &format!("p{n:02}"),
            &[("readiness", "ok"), ("startup", "ok")],
        );
    }
    w.start().await;
    let all = |w: &World| (0..40).all(|n| told(w, &format!("p{n:02}")) == (true, true));
    w.until("40 pods are ready", 60, all).await;
    w.pass(60).await;
    probes.clear();
    w.pass(11).await;
    let busiest = probes.busiest();
    let versions = |w: &World| -> Vec<(String, u64)> {
        let state = w.state();
        let statuses = state.statuses.iter();
        statuses
            .map(|(k, v)| (k.to_string(), v.record.version))
            .collect()
    };
    let before = versions(&w);
    for _ in 0..3 {
        w.fake.clear_calls();
        w.crash().await;
        probes.clear();
        w.start().await;
        w.pass(11).await;
        assert_eq!(versions(&w), before, "no status changes");
        assert_eq!(w.effects(), Vec::<String>::new());
        let runs = probes.runs.lock().unwrap().len();
        assert!((40..=80).contains(&runs), "{runs} in 11 s");
        // In the phase that each had: a restart makes no burst.
        assert!(
            probes.busiest() <= busiest + 2,
            "{} > {busiest}",
            probes.busiest()
        );
        w.pass(60).await;
        assert_eq!(versions(&w), before);
    }
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn restart_keeps_results_and_counts_and_one_more_failure_restarts_the_container() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    let probes = Probes::of(&w);
    probed(&w, "ready", &[("readiness", "ok")]);
    probed(&w, "notready", &[("readiness", "no")]);
    probed(&w, "starting", &[("startup", "later"), ("readiness", "ok")]);
    probed(&w, "live", &[("liveness", "alive")]);
    probes.fail("no", true);
    probes.fail("later", true);
    w.start().await;
    w.until("the pod is ready", 60, |w| told(w, "ready") == (true, true))
        .await;
    w.until("the pod runs", 60, |w| told(w, "live").0).await;
    probes.fail("alive", true);
    probes.clear();
    w.until("two failures", 60, |_| probes.count("alive") == 2)
        .await;
    probes.fail("later", false);
    let answers =
        |w: &World| ["ready", "notready", "live"].map(|pod| (told(w, pod), w.running(pod)));
    let before = answers(&w);
    assert_eq!(before[0].0, (true, true));
    assert_eq!(before[1].0, (false, true));
    w.restart().await;
    w.pass(1).await;
    assert_eq!(answers(&w), before, "as before");
    assert_eq!(w.restarts("live"), 0);
    assert_eq!(probes.count("alive"), 2);
    w.until("one more failure", 11, |_| probes.count("alive") >= 3)
        .await;
    w.until("a restart", 30, |w| {
        w.restarts("live") == 1 && w.running("live").len() == 1
    })
    .await;
    assert_ne!(w.running("live"), before[2].1);
    // What was counted of the former container does not count: three failures again.
    probes.clear();
    w.restart().await;
    w.until("the next restart", 200, |w| w.restarts("live") == 2)
        .await;
    let runs = probes.count("alive");
    assert!((2..=3).contains(&runs), "{runs}");
    assert_eq!(told(&w, "ready"), (true, true));
    assert_eq!(told(&w, "notready"), (false, true));
    w.until("the pod has started", 30, |w| {
        told(w, "starting") == (true, true)
    })
    .await;
    assert_eq!(w.restarts("starting"), 0);
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_failure_that_was_decided_before_the_crash_restarts_the_container_after_it() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    let probes = Probes::of(&w);
    probed(&w, "live", &[("liveness", "alive")]);
    w.start().await;
    w.until("the pod runs", 60, |w| told(w, "live").0).await;
    probes.fail("alive", true);
    let container = w.running("live");
    // The runtime stops nothing while this agent lives.
    let hang = holdfast_testkit::fake_cri::Fault::Hang;
    w.fail_once("stop_container", hang);
    w.until("the failure is recorded", 60, |w| {
        let state = w.state();
        let failed = |v: &str| v == "Failure";
        state.probes.values().any(|v| failed(&v.record.result))
    })
    .await;
    w.pass(1).await;
    assert_eq!(w.running("live"), container);
    w.crash().await;
    probes.fail("alive", false);
    probes.clear();
    w.start().await;
    w.until("the restart", 30, |w| {
        w.running("live").len() == 1 && w.running("live") != container
    })
    .await;
    w.pass(60).await;
    assert_eq!(w.restarts("live"), 1);
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_liveness_kill_goes_ahead_while_the_disk_is_full() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    let probes = Probes::of(&w);
    probed(&w, "web", &[("liveness", "alive"), ("readiness", "ready")]);
    w.start().await;
    w.until("the pod is ready", 60, |w| told(w, "web").0).await;
    w.faults.set_out_of_space(true);
    // Something durable: now the store knows.
    w.manifest("new", &crate::world::spec("Always", ""));
    w.pass(5).await;
    probes.fail("ready", true);
    probes.fail("alive", true);
    w.until("the container is stopped", 90, |w| {
        w.running("web").is_empty()
    })
    .await;
    assert_eq!(w.starts("web").len(), 1, "no start without its intent");
    probes.fail("ready", false);
    probes.fail("alive", false);
    w.faults.set_out_of_space(false);
    w.until("the container runs again", 120, |w| {
        w.starts("web").len() == 2 && w.running("web").len() == 1
    })
    .await;
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_liveness_kill_waits_for_no_step_that_hangs() {
    let image = "holdfast.local/large:1";
    let mut w = World::new();
    w.behave_each(|_, container, _| match container {
        "other" => Behaviour::Exit {
            code: 1,
            after: Duration::from_secs(30),
        },
        _ => Behaviour::RunForever,
    });
    let probes = Probes::of(&w);
    let spec = format!(
        r#"{{"restartPolicy":"Always","terminationGracePeriodSeconds":1,"containers":[
            {{"name":"main","image":"{IMAGE}","command":["sh"],"livenessProbe":{{
                "exec":{{"command":["alive"]}},"periodSeconds":5,"failureThreshold":1}}}},
            {{"name":"other","image":"{image}","imagePullPolicy":"Always","command":["sh"]}}]}}"#
    );
    w.manifest("web", &spec);
    w.start().await;
    w.until("both run", 30, |w| w.running("web").len() == 2)
        .await;
    // The other container ends, and the step that restarts it waits for its image.
    w.fake.pull(image, Pull::Hangs);
    w.until("the other one has ended", 60, |w| {
        w.running("web").len() == 1
    })
    .await;
    w.pass(60).await;
    let main = w.running("web");
    assert_eq!(main.len(), 1);
    let pulls = w.fake.count("pull_image");
    probes.fail("alive", true);
    w.until("it is stopped", 15, |w| w.running("web") != main)
        .await;
    probes.fail("alive", false);
    w.until("it runs again", 30, |w| w.running("web").len() == 1)
        .await;
    w.pass(30).await;
    assert_eq!(w.fake.count("pull_image"), pulls, "the pull has begun anew");
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_liveness_kill_is_not_held_up_by_what_ended_while_the_disk_is_full() {
    let mut w = World::new();
    w.behave_each(|_, container, _| match container {
        "other" => Behaviour::Exit {
            code: 1,
            after: Duration::from_secs(60),
        },
        _ => Behaviour::RunForever,
    });
    let probes = Probes::of(&w);
    let spec = format!(
        r#"{{"restartPolicy":"Always","terminationGracePeriodSeconds":1,"containers":[
        {{"name":"main","image":"{IMAGE}","command":["sh"],"livenessProbe":{{"exec":{{"command":["alive"]}},"periodSeconds":10,"failureThreshold":3}}}},
        {{"name":"other","image":"{IMAGE}","command":["sh"]}}]}}"#
    );
    w.manifest("two", &spec);
    w.start().await;
    w.until("both run", 60, |w| w.running("two").len() == 2)
        .await;
    w.faults.set_out_of_space(true);
    // Something durable: now the store knows.
    w.manifest("new", &crate::world::spec("Always", ""));
    w.until("the other has ended", 120, |w| w.running("two").len() == 1)
        .await;
    probes.fail("alive", true);
    w.until("the container is stopped", 120, |w| {
        w.running("two").is_empty()
    })
    .await;
    assert_eq!(w.starts("two").len(), 2, "no start without its intent");
    probes.fail("alive", false);
    w.faults.set_out_of_space(false);
    w.until("both run again", 240, |w| {
        w.running("two").len() == 2 && w.starts("two").len() == 4
    })
    .await;
    assert_nothing_wrong(&w);
}
