//! Rules of single main containers; the other kinds are in the submodules.

mod conditions;
mod ends;
mod fields;
mod golden;
mod history;
mod phases;
mod restart_all;
mod support;

use super::states::{shorten, time_of_ns};
use super::*;
use crate::core::container_history::{NODE_SHUTDOWN, STATUS_UNKNOWN, observe_exits};
use crate::core::state::State;
use crate::core::testkit::*;
use crate::types::runtime::{ContainerStatus, LinuxUser, SandboxState};

struct Setup {
    pod: Pod,
    status: PodStatus,
    owned: Owned,
    previous: Option<api::PodStatus>,
    reasons: BTreeMap<String, (String, String)>,
    probes: BTreeMap<String, ProbeView>,
    resize: ResizeView,
    stage: Stage,
    evicted: Option<(&'static str, &'static str)>,
    deadline_exceeded: bool,
    now: i64,
}

impl Setup {
    fn new(policy: &str, names: &[&str], status: PodStatus) -> Self {
        Self {
            pod: pod(policy, names),
            status,
            owned: Owned::new(),
            previous: None,
            reasons: BTreeMap::new(),
            probes: BTreeMap::new(),
            resize: ResizeView::default(),
            stage: Stage::Syncing,
            evicted: None,
            deadline_exceeded: false,
            now: 70,
        }
    }

    fn generate(&self) -> api::PodStatus {
        generate(&StatusInput {
            pod: &self.pod,
            status: &self.status,
            records: &borrowed(&self.owned),
            previous: self.previous.as_ref(),
            reasons: &self.reasons,
            probes: &self.probes,
            resize: &self.resize,
            recursive_read_only: Some(false),
            volume_images: &BTreeMap::new(),
            host_ips: &["192.0.2.1".to_owned()],
            runtime_name: "containerd",
            stage: self.stage,
            evicted: self.evicted,
            deadline_exceeded: self.deadline_exceeded,
            listed_at: at(self.now),
            now: at(self.now),
            backoff_max: Duration::from_secs(300),
        })
    }
}

/// A state in a word: `running`, `137`, `CrashLoopBackOff`.
fn word(state: Option<&api::ContainerState>) -> String {
    match state {
        Some(api::ContainerState {
            running: Some(_), ..
        }) => "running".into(),
        Some(api::ContainerState {
            terminated: Some(t),
            ..
        }) => t.exit_code.to_string(),
        Some(api::ContainerState {
            waiting: Some(w), ..
        }) => w.reason.clone().unwrap_or_default(),
        _ => "-".into(),
    }
}

/// Phase, then per container `state/last state/restart count`.
fn brief(status: &api::PodStatus) -> String {
    let mut out = status.phase.clone().unwrap();
    for c in status.container_statuses.iter().flatten() {
        let (now, last) = (word(c.state.as_ref()), word(c.last_state.as_ref()));
        out.push_str(&format!(" {now}/{last}/{}", c.restart_count));
    }
    out
}

fn wiped() -> PodStatus {
    PodStatus::empty("u1".into())
}

#[test]
fn phase_and_container_state_table() {
    let creating = CONTAINER_CREATING;
    let dead_sandbox = |containers| {
        let mut status = runtime(containers);
        status.sandboxes[0].state = SandboxState::NotReady;
        status
    };
    let none = Owned::new;
    for (name, policy, status, owned, want) in [
        (
            "nothing yet",
            "Always",
            wiped(),
            none(),
            format!("Pending {creating}/-/0"),
        ),
        (
            "created",
            "Always",
            runtime(vec![created("a", 0)]),
            none(),
            format!("Pending {creating}/-/0"),
        ),
        (
            "created, intent",
            "Never",
            runtime(vec![created("a", 0)]),
            [("a", started("a", 0))].into(),
            format!("Pending {creating}/-/0"),
        ),
        (
            "running",
            "Always",
            runtime(vec![running("a", 0)]),
            none(),
            "Running running/-/0".into(),
        ),
        (
            "running, restarted",
            "Always",
            runtime(vec![running("a", 2), exited("a", 1, 3)]),
            none(),
            "Running running/3/2".into(),
        ),
        (
            "running, end before on record only",
            "Always",
            runtime(vec![running("a", 2)]),
            [("a", ended("a", 1, 3))].into(),
            "Running running/3/2".into(),
        ),
        (
            "count on record wins",
            "Always",
            runtime(vec![running("a", 0)]),
            [("a", ended("a", 7, 3))].into(),
            "Running running/3/7".into(),
        ),
        (
            "Always: ended, to be restarted",
            "Always",
            runtime(vec![exited("a", 0, 1)]),
            none(),
            "Running 1/-/0".into(),
        ),
        (
            "Always: ended with 0",
            "Always",
            runtime(vec![exited("a", 0, 0)]),
            none(),
            "Running 0/-/0".into(),
        ),
        (
            "OnFailure: failed",
            "OnFailure",
            runtime(vec![exited("a", 0, 1)]),
            none(),
            "Running 1/-/0".into(),
        ),
        (
            "OnFailure: succeeded",
            "OnFailure",
            runtime(vec![exited("a", 0, 0)]),
            none(),
            "Succeeded 0/-/0".into(),
        ),
        (
            "Never: failed",
            "Never",
            runtime(vec![exited("a", 0, 1)]),
            none(),
            "Failed 1/-/0".into(),
        ),
        (
            "Never: succeeded",
            "Never",
            runtime(vec![exited("a", 0, 0)]),
            none(),
            "Succeeded 0/-/0".into(),
        ),
        (
            "Never: end on record, all gone",
            "Never",
            wiped(),
            [("a", ended("a", 0, 0))].into(),
            "Succeeded 0/-/0".into(),
        ),
        (
            "Never: exit 3 on record, all gone",
            "Never",
            wiped(),
            [("a", ended("a", 0, 3))].into(),
            "Failed 3/-/0".into(),
        ),
        (
            "Never: vanished",
            "Never",
            wiped(),
            [("a", started("a", 0))].into(),
            "Failed 137/-/0".into(),
        ),
        (
            "Always: vanished",
            "Always",
            wiped(),
            [("a", started("a", 4))].into(),
            "Running 137/-/4".into(),
        ),
        (
            "unknown state is not an end",
            "Never",
            runtime(vec![unknown("a", 0)]),
            none(),
            format!("Running {STATUS_UNKNOWN}/-/0"),
        ),
        (
            "two ends in the runtime",
            "Always",
            runtime(vec![exited("a", 1, 2), exited("a", 0, 1)]),
            none(),
            "Running 2/1/1".into(),
        ),
        (
            "back-off",
            "Always",
            runtime(vec![exited("a", 1, 2)]),
            [("a", with_backoff(ended("a", 1, 2), 40))].into(),
            "Running CrashLoopBackOff/2/1".into(),
        ),
        (
            "back-off, runtime wiped",
            "Always",
            wiped(),
            [("a", with_backoff(ended("a", 7, 2), 300))].into(),
            "Running CrashLoopBackOff/2/7".into(),
        ),
        (
            "back-off over",
            "Always",
            runtime(vec![exited("a", 1, 2)]),
            [("a", with_backoff(ended("a", 1, 2), 10))].into(),
            "Running 2/-/1".into(),
        ),
        (
            "created for the next attempt",
            "Always",
            runtime(vec![created("a", 1), exited("a", 0, 1)]),
            none(),
            "Running 1/-/0".into(),
        ),
        (
            "dead sandbox, still running",
            "Always",
            dead_sandbox(vec![running("a", 0)]),
            none(),
            "Running running/-/0".into(),
        ),
    ] {
        let mut setup = Setup::new(policy, &["a"], status);
        setup.owned = owned;
        assert_eq!(brief(&setup.generate()), want, "{name}");
    }
}

#[test]
fn phase_of_several_containers() {
    let one = |c| runtime(vec![c]);
    for (name, policy, status, owned, want) in [
        (
            "one runs, one waits",
            "Always",
            one(running("a", 0)),
            Owned::new(),
            "Pending running/-/0 ContainerCreating/-/0",
        ),
        (
            "one runs, one failed",
            "Never",
            runtime(vec![running("a", 0), exited("b", 0, 1)]),
            Owned::new(),
            "Running running/-/0 1/-/0",
        ),
        (
            "one failed, one succeeded",
            "Never",
            runtime(vec![exited("a", 0, 0), exited("b", 0, 1)]),
            Owned::new(),
            "Failed 0/-/0 1/-/0",
        ),
        (
            "one ended, one not yet started",
            "Never",
            one(exited("a", 0, 0)),
            Owned::new(),
            "Pending 0/-/0 ContainerCreating/-/0",
        ),
        (
            "the sandbox is lost, the second will never run",
            "Never",
            wiped(),
            [("a", ended("a", 0, 0))].into(),
            "Failed 0/-/0 137/-/0",
        ),
        (
            "the sandbox is lost, OnFailure runs the second",
            "OnFailure",
            wiped(),
            [("a", ended("a", 0, 0))].into(),
            "Pending 0/-/0 ContainerCreating/-/0",
        ),
    ] {
        let mut setup = Setup::new(policy, &["a", "b"], status);
        setup.owned = owned;
        assert_eq!(brief(&setup.generate()), want, "{name}");
    }
}

#[test]
fn stage_table() {
    let on_record = || Owned::from([("a", with_backoff(ended("a", 1, 2), 40))]);
    for (name, policy, status, owned, stage, want) in [
        (
            "terminating: no back-off is shown",
            "Always",
            runtime(vec![exited("a", 1, 2)]),
            on_record(),
            Stage::Terminating,
            "Running 2/-/1",
        ),
        (
            "terminating, runs",
            "Always",
            runtime(vec![running("a", 0)]),
            Owned::new(),
            Stage::Terminating,
            "Running running/-/0",
        ),
        (
            "terminated with 0",
            "Always",
            runtime(vec![exited("a", 0, 0)]),
            Owned::new(),
            Stage::Terminated,
            "Succeeded 0/-/0",
        ),
        (
            "terminated with 143",
            "Always",
            runtime(vec![exited("a", 0, 143)]),
            Owned::new(),
            Stage::Terminated,
            "Failed 143/-/0",
        ),
        (
            "terminated before it ran",
            "Always",
            wiped(),
            Owned::new(),
            Stage::Terminated,
            "Failed 137/-/0",
        ),
    ] {
        let mut setup = Setup::new(policy, &["a"], status);
        (setup.owned, setup.stage) = (owned, stage);
        assert_eq!(brief(&setup.generate()), want, "{name}");
    }
}

#[test]
fn reason_cache_fills_waiting_and_moves_the_end_to_last_state() {
    for (policy, status, want) in [
        ("Always", wiped(), "Pending ErrImagePull/-/0"),
        (
            "Always",
            runtime(vec![exited("a", 0, 1)]),
            "Running ErrImagePull/1/0",
        ),
        (
            "Always",
            runtime(vec![running("a", 0)]),
            "Running running/-/0",
        ),
        ("Never", runtime(vec![exited("a", 0, 1)]), "Failed 1/-/0"),
    ] {
        let mut setup = Setup::new(policy, &["a"], status);
        setup
            .reasons
            .insert("a".into(), ("ErrImagePull".into(), "no such host".into()));
        assert_eq!(brief(&setup.generate()), want);
    }
}

#[test]
fn a_terminal_phase_with_its_reason_never_changes() {
    let mut setup = Setup::new("Always", &["a"], runtime(vec![running("a", 0)]));
    setup.previous = Some(api::PodStatus {
        phase: Some("Failed".into()),
        reason: Some("Evicted".into()),
        message: Some("low on memory".into()),
        ..api::PodStatus::default()
    });
    let status = setup.generate();
    assert_eq!(status.phase.as_deref(), Some("Failed"));
    assert_eq!(status.reason.as_deref(), Some("Evicted"));
    setup.pod.status = setup.previous.take();
    assert_eq!(
        setup.generate().phase.as_deref(),
        Some("Failed"),
        "told by the API"
    );
}

#[test]
fn an_eviction_shows_failed_only_once_nothing_runs() {
    let mut setup = Setup::new("Always", &["a"], runtime(vec![running("a", 0)]));
    setup.evicted = Some(("Evicted", "The node was low on resource: memory."));
    setup.stage = Stage::Terminating;
    let status = setup.generate();
    assert_eq!(
        (status.phase.as_deref(), status.reason.as_deref()),
        (Some("Running"), Some("Evicted"))
    );
    setup.status = runtime(vec![exited("a", 0, 0)]);
    setup.previous = Some(status);
    setup.stage = Stage::Terminated;
    let status = setup.generate();
    assert_eq!(
        (status.phase.as_deref(), status.reason.as_deref()),
        (Some("Failed"), Some("Evicted"))
    );
    assert_eq!(
        condition(&status, "DisruptionTarget").reason.as_deref(),
        Some("TerminationByKubelet")
    );
    setup.evicted = None;
    setup.previous = Some(status);
    let later = setup.generate();
    assert_eq!(later.reason.as_deref(), Some("Evicted"), "kept");
    assert_eq!(condition(&later, "DisruptionTarget").status, "True");
}

#[test]
fn a_container_that_a_shutdown_of_the_machine_cut_short_has_not_completed() {
    for (policy, reason, want) in [
        ("Never", NODE_SHUTDOWN, "Failed 0/-/0"),
        ("Never", "Completed", "Succeeded 0/-/0"),
        ("OnFailure", NODE_SHUTDOWN, "Running ContainerCreating/0/0"),
        ("OnFailure", "Completed", "Succeeded 0/-/0"),
    ] {
        let ended = ContainerStatus {
            reason: reason.to_owned(),
            ..exited("a", 0, 0)
        };
        let status = Setup::new(policy, &["a"], runtime(vec![ended])).generate();
        assert_eq!(brief(&status), want, "{policy} {reason}");
        let is_failed = want.starts_with("Failed");
        assert_eq!(
            status.reason.as_deref(),
            is_failed.then_some("Terminated"),
            "{policy} {reason}"
        );
    }
}

/// Upstream's result for a preempted pod after its containers have ended: `Failed` was a matter of the kill alone.
#[test]
fn a_preempted_pod_succeeds_when_all_containers_end_well_and_fails_else() {
    for (code, phase, reason) in [(0, "Succeeded", None), (143, "Failed", Some("Preempting"))] {
        let mut setup = Setup::new("Always", &["a"], runtime(vec![running("a", 0)]));
        setup.evicted = Some(("Preempting", "Preempted in order to admit critical pod"));
        setup.stage = Stage::Terminating;
        let before = setup.generate();
        setup.previous = Some(before.clone());
        setup.status = runtime(vec![exited("a", 0, code)]);
        let stopped = setup.generate();
        for status in [&before, &stopped] {
            assert_eq!(
                (status.phase.as_deref(), status.reason.as_deref()),
                (Some("Running"), None),
                "not over before all of it is"
            );
        }
        setup.stage = Stage::Terminated;
        for _ in 0..2 {
            let status = setup.generate();
            assert_eq!(
                (status.phase.as_deref(), status.reason.as_deref()),
                (Some(phase), reason)
            );
            assert_eq!(status.message.is_some(), reason.is_some());
            let disruption = condition(&status, "DisruptionTarget");
            assert_eq!(
                (disruption.status.as_str(), disruption.message.as_deref()),
                (
                    "True",
                    Some("Pod was preempted by Kubelet to accommodate a critical pod.")
                )
            );
            setup.previous = Some(status);
        }
    }
}

#[test]
fn a_sandbox_that_becomes_ready_changes_its_condition_and_the_addresses_and_nothing_else() {
    let setup = Setup::new("Always", &["a"], wiped());
    let told = setup.generate();
    let ready_to_start = "PodReadyToStartContainers";
    assert_eq!(condition(&told, ready_to_start).status, "False");
    let ips = ["10.0.0.7".to_owned()];
    let ready = |told: &api::PodStatus, now| {
        sandbox_became_ready(&setup.pod, told, &ips, &["192.0.2.1".to_owned()], at(now))
    };
    let status = ready(&told, 80).unwrap();
    let now = condition(&status, ready_to_start).clone();
    assert_eq!(now.status, "True");
    assert_eq!(now.last_transition_time, Some(time(at(80))));
    let mut expected = told.clone();
    let mut conditions = expected.conditions.iter_mut().flatten();
    *conditions.find(|c| c.type_ == ready_to_start).unwrap() = now;
    expected.pod_ip = Some(ips[0].clone());
    expected.pod_ips = Some(vec![api::PodIP { ip: ips[0].clone() }]);
    assert_eq!(status, expected);
    assert_eq!(ready(&status, 90), None);

    let bare = ready(&api::PodStatus::default(), 80).unwrap();
    assert_eq!(bare.conditions.unwrap().len(), 1);
}

fn condition<'a>(status: &'a api::PodStatus, type_: &str) -> &'a api::PodCondition {
    let mut all = status.conditions.iter().flatten();
    all.find(|c| c.type_ == type_).unwrap()
}

#[test]
fn condition_table() {
    for (name, policy, status, want) in [
        (
            "running",
            "Always",
            runtime(vec![running("a", 0)]),
            ["True", "True", "True", "True"],
        ),
        (
            "no sandbox",
            "Always",
            wiped(),
            ["False", "True", "False", "False"],
        ),
        (
            "sandbox only",
            "Always",
            runtime(vec![]),
            ["True", "True", "False", "False"],
        ),
        (
            "crashed",
            "Always",
            runtime(vec![exited("a", 0, 1)]),
            ["True", "True", "False", "False"],
        ),
        (
            "succeeded",
            "Never",
            runtime(vec![exited("a", 0, 0)]),
            ["True", "True", "False", "False"],
        ),
    ] {
        let status = Setup::new(policy, &["a"], status).generate();
        let got = [
            "PodReadyToStartContainers",
            "Initialized",
            "Ready",
            "ContainersReady",
        ]
        .map(|type_| condition(&status, type_).status.as_str());
        assert_eq!(got, want, "{name}");
        assert_eq!(condition(&status, "PodScheduled").status, "True");
    }
    let succeeded = Setup::new("Never", &["a"], runtime(vec![exited("a", 0, 0)])).generate();
    assert_eq!(
        condition(&succeeded, "Ready").reason.as_deref(),
        Some("PodCompleted")
    );
    let failed = Setup::new("Never", &["a"], runtime(vec![exited("a", 0, 1)])).generate();
    assert_eq!(
        condition(&failed, "Ready").reason.as_deref(),
        Some("PodFailed")
    );
    let unready = Setup::new("Always", &["a", "b"], runtime(vec![running("a", 0)])).generate();
    assert_eq!(
        condition(&unready, "Ready").message.as_deref(),
        Some("containers with unready status: [b]")
    );
}

#[test]
fn readiness_waits_for_probes_and_gates() {
    let mut setup = Setup::new("Always", &["a"], runtime(vec![running("a", 0)]));
    let spec = setup.pod.spec.as_mut().unwrap();
    spec.containers[0].readiness_probe = Some(api::Probe::default());
    let ready = |setup: &Setup| setup.generate().container_statuses.unwrap()[0].ready;
    assert!(!ready(&setup), "no result yet");
    setup.probes.insert(
        "a".into(),
        ProbeView {
            ready: Some(true),
            started: None,
        },
    );
    assert!(ready(&setup));
    setup.pod.spec.as_mut().unwrap().containers[0].startup_probe = Some(api::Probe::default());
    assert!(!ready(&setup), "not started yet");
    setup.probes.insert(
        "a".into(),
        ProbeView {
            ready: Some(true),
            started: Some(true),
        },
    );
    assert!(ready(&setup));

    setup.pod.spec.as_mut().unwrap().readiness_gates = Some(vec![api::PodReadinessGate {
        condition_type: "lb".into(),
    }]);
    let closed = setup.generate();
    assert_eq!(condition(&closed, "ContainersReady").status, "True");
    assert_eq!(
        condition(&closed, "Ready").reason.as_deref(),
        Some("ReadinessGatesNotReady")
    );
    setup.pod.status = Some(api::PodStatus {
        conditions: Some(vec![api::PodCondition {
            type_: "lb".into(),
            status: "True".into(),
            ..api::PodCondition::default()
        }]),
        ..api::PodStatus::default()
    });
    let open = setup.generate();
    assert_eq!(condition(&open, "Ready").status, "True");
    assert_eq!(
        condition(&open, "lb").status,
        "True",
        "conditions of others are kept"
    );
}

#[test]
fn transition_times_start_time_and_ips_are_kept() {
    let mut setup = Setup::new("Always", &["a"], runtime(vec![running("a", 0)]));
    let first = setup.generate();
    assert_eq!(first.start_time, Some(time(at(70))));
    assert_eq!(first.pod_ip.as_deref(), Some("10.0.0.1"));
    assert_eq!(first.host_ip.as_deref(), Some("192.0.2.1"));
    setup.previous = Some(first.clone());
    setup.now = 500;
    assert_eq!(setup.generate(), first, "nothing changed");
    setup.status = runtime(vec![exited("a", 0, 1)]);
    setup.status.ips.clear();
    let second = setup.generate();
    assert_eq!(second.start_time, first.start_time);
    assert_eq!(second.pod_ip, first.pod_ip);
    assert_eq!(
        condition(&second, "Ready").last_transition_time,
        Some(time(at(500)))
    );
    assert_eq!(
        condition(&second, "PodScheduled").last_transition_time,
        Some(time(at(70)))
    );
}

#[test]
fn addresses_are_shown_in_the_form_that_servers_take() {
    let mut setup = Setup::new("Always", &["a"], runtime(vec![running("a", 0)]));
    for (ips, shown) in [
        (&["::ffff:10.0.0.7"][..], &["10.0.0.7"][..]),
        (&["::ffff:10.0.0.7", "10.0.0.8"], &["10.0.0.7"]),
        (&["FD00:0::1", "::ffff:10.0.0.7"], &["10.0.0.7", "fd00::1"]),
    ] {
        setup.status.ips = ips.iter().map(|ip| (*ip).to_owned()).collect();
        let found = setup.generate().pod_ips.unwrap();
        let found: Vec<_> = found.iter().map(|ip| ip.ip.as_str()).collect();
        assert_eq!(found, shown, "{ips:?}");
    }
}

#[test]
fn host_network_pods_have_the_nodes_address() {
    let mut setup = Setup::new("Always", &["a"], wiped());
    setup.pod.spec.as_mut().unwrap().host_network = Some(true);
    assert_eq!(setup.generate().pod_ip.as_deref(), Some("192.0.2.1"));
}

#[test]
fn ids_images_and_times_come_from_the_runtime() {
    let status = Setup::new(
        "Always",
        &["a"],
        runtime(vec![running("a", 1), exited("a", 0, 3)]),
    )
    .generate();
    let container = &status.container_statuses.unwrap()[0];
    assert_eq!(container.container_id.as_deref(), Some("containerd://a-1"));
    assert_eq!(
        (container.image.as_str(), container.image_id.as_str()),
        ("img:1", "sha256:1")
    );
    assert_eq!(container.started, Some(true));
    let end = container
        .last_state
        .as_ref()
        .unwrap()
        .terminated
        .as_ref()
        .unwrap();
    assert_eq!(end.container_id.as_deref(), Some("containerd://a-0"));
    assert_eq!(end.reason.as_deref(), Some("Error"));
    assert_eq!(end.finished_at, time_of_ns((EPOCH + 60) * 1_000_000_000));
}

#[test]
fn the_user_is_the_one_that_the_runtime_reports_and_stays_when_the_container_is_removed() {
    let mut current = running("a", 1);
    current.user = Some(LinuxUser {
        uid: 1000,
        gid: 3000,
        supplemental_groups: vec![3000, 4000],
    });
    let mut setup = Setup::new(
        "Never",
        &["a", "b"],
        runtime(vec![current, running("b", 0)]),
    );
    let users = |status: &api::PodStatus| -> Vec<_> {
        let all = status.container_statuses.iter().flatten();
        all.map(|c| serde_json::to_value(&c.user).unwrap())
            .collect()
    };
    let status = setup.generate();
    let user = serde_json::json!({"linux": {"uid": 1000, "gid": 3000, "supplementalGroups": [3000, 4000]}});
    assert_eq!(users(&status), [user.clone(), serde_json::Value::Null]);
    setup.owned = Owned::from([("a", ended("a", 1, 0))]);
    setup.status = runtime(vec![running("b", 0)]);
    setup.previous = Some(status);
    assert_eq!(users(&setup.generate())[0], user);
}

#[test]
fn messages_are_capped_per_container_and_per_pod() {
    let long = |name: &str| {
        let mut c = exited(name, 0, 1);
        c.message = "ä".repeat(5000);
        c
    };
    let one = Setup::new("Never", &["a"], runtime(vec![long("a")])).generate();
    let four = Setup::new(
        "Never",
        &["a", "b", "c", "d"],
        runtime(vec![long("a"), long("b"), long("c"), long("d")]),
    )
    .generate();
    let length = |status: &api::PodStatus| {
        let state = status.container_statuses.as_ref().unwrap()[0]
            .state
            .clone()
            .unwrap();
        state.terminated.unwrap().message.unwrap().len()
    };
    assert_eq!((length(&one), length(&four)), (4096, 3072));
    let mut text = "aä".to_owned();
    shorten(&mut text, 2);
    assert_eq!(text, "a", "characters stay whole");
}

#[test]
fn without_records_the_status_told_before_still_counts() {
    // The store was rebuilt and the runtime has forgotten the container.
    for (policy, want) in [
        ("Always", "Running ContainerCreating/137/1"),
        ("Never", "Failed 137/-/0"),
    ] {
        let mut setup = Setup::new(policy, &["a"], runtime(vec![running("a", 0)]));
        setup.previous = Some(setup.generate());
        setup.status = wiped();
        let next = setup.generate();
        assert_eq!(brief(&next), want);
        setup.previous = Some(next);
        assert_eq!(brief(&setup.generate()), want, "the same again");
    }
    let mut setup = Setup::new("Never", &["a"], runtime(vec![exited("a", 0, 0)]));
    setup.previous = Some(setup.generate());
    setup.status = wiped();
    assert_eq!(brief(&setup.generate()), "Succeeded 0/-/0");
}

#[test]
fn last_state_survives_when_runtime_and_record_know_one_end_only() {
    let mut setup = Setup::new(
        "Always",
        &["a"],
        runtime(vec![running("a", 1), exited("a", 0, 3)]),
    );
    setup.previous = Some(setup.generate());
    setup.status = runtime(vec![exited("a", 1, 4)]);
    assert_eq!(brief(&setup.generate()), "Running 4/3/1");
    setup.status = runtime(vec![running("a", 1)]);
    assert_eq!(brief(&setup.generate()), "Running running/3/1");
}

#[test]
fn the_message_of_an_earlier_end_stays_although_its_file_is_of_a_later_attempt() {
    let mut first = exited("a", 0, 3);
    first.message = "first words".to_owned();
    let mut setup = Setup::new("Always", &["a"], runtime(vec![running("a", 1), first]));
    setup.previous = Some(setup.generate());
    // The runtime still has both, and the end on record is that of the newer one.
    setup.status = runtime(vec![exited("a", 1, 4), exited("a", 0, 3)]);
    let next = setup.generate();
    let last = next.container_statuses.unwrap()[0].last_state.clone();
    let end = last.unwrap().terminated.unwrap();
    assert_eq!(end.exit_code, 3);
    assert_eq!(end.message.as_deref(), Some("first words"));
}

#[test]
fn recording_the_ends_does_not_change_the_status() {
    let status = runtime(vec![exited("a", 0, 1), running("b", 1), exited("b", 0, 2)]);
    let mut state = State::default();
    let before = Setup::new("Always", &["a", "b"], status.clone()).generate();
    for mutation in observe_exits(&state, &"u1".into(), &status, at(70), at(70)).mutations {
        state.apply(&mutation, 1);
    }
    let mut setup = Setup::new("Always", &["a", "b"], status);
    for name in ["a", "b"] {
        let record = state.record(&format!("u1/{name}")).cloned();
        setup.owned.extend(record.map(|r| (name, r)));
    }
    assert_eq!(setup.owned.len(), 2);
    assert_eq!(setup.generate(), before);
}

#[test]
fn merge_table() {
    let status = |containers| Setup::new("Never", &["a"], runtime(containers)).generate();
    let ran = status(vec![running("a", 0)]);
    let ended = status(vec![exited("a", 0, 1)]);
    let never = pod("Never", &["a"]);
    assert_eq!(merge_for_update(&never, Some(&ran), ran.clone()), Ok(None));
    assert_eq!(
        merge_for_update(&never, None, ran.clone()),
        Ok(Some(ran.clone()))
    );
    let changed = merge_for_update(&never, Some(&ran), ended.clone())
        .unwrap()
        .unwrap();
    assert_eq!(changed.phase.as_deref(), Some("Failed"));
    assert_eq!(
        merge_for_update(&never, Some(&ended), ran.clone()),
        Err(IllegalTransition {
            container: "a".into(),
            exit_code: 1
        })
    );
    // OnFailure may restart after 1, not after 0; Always after both.
    for (policy, code, allowed) in [
        ("OnFailure", 1, true),
        ("OnFailure", 0, false),
        ("Always", 0, true),
    ] {
        let old = Setup::new("Always", &["a"], runtime(vec![exited("a", 0, code)])).generate();
        let merged = merge_for_update(&pod(policy, &["a"]), Some(&old), ran.clone());
        assert_eq!(merged.is_ok(), allowed, "{policy} {code}");
    }
}

#[test]
fn merge_ignores_what_makes_no_difference_and_keeps_what_must_not_go_back() {
    let always = pod("Always", &["a"]);
    let old = Setup::new("Always", &["a"], runtime(vec![running("a", 3)])).generate();
    let mut new = old.clone();
    new.conditions.as_mut().unwrap().reverse();
    for condition in new.conditions.as_mut().unwrap() {
        condition.last_transition_time = Some(time(at(999)));
    }
    new.start_time = None;
    new.reason = Some(String::new());
    new.init_container_statuses = Some(Vec::new());
    new.container_statuses.as_mut().unwrap()[0].restart_count = 1;
    assert_eq!(merge_for_update(&always, Some(&old), new.clone()), Ok(None));
    new.pod_ip = Some("10.0.0.2".into());
    let merged = merge_for_update(&always, Some(&old), new).unwrap().unwrap();
    assert_eq!(merged.start_time, old.start_time);
    assert_eq!(merged.container_statuses.unwrap()[0].restart_count, 3);
}

#[test]
fn a_rejected_pod_is_failed_with_the_reason() {
    let status = rejected(&pod("Always", &["a"]), None, "OutOfcpu", "no cpu", at(5));
    assert_eq!(status.phase.as_deref(), Some("Failed"));
    assert_eq!(status.reason.as_deref(), Some("OutOfcpu"));
    assert_eq!(status.message.as_deref(), Some("Pod was rejected: no cpu"));
    assert_eq!(status.start_time, Some(time(at(5))));
    assert_eq!(status.qos_class.as_deref(), Some("BestEffort"));
    assert!(is_terminal(&status));

    let mut told = pod("Always", &["a"]);
    told.metadata.generation = Some(3);
    let scheduled = serde_json::json!({
        "startTime": "2026-01-01T00:00:00Z", "conditions": [{"type": "PodScheduled", "status": "True"}],
    });
    told.status = Some(serde_json::from_value(scheduled).unwrap());
    let status = rejected(&told, None, "OutOfcpu", "no cpu", at(5));
    let before = told.status.as_ref().unwrap();
    assert_eq!(status.conditions, before.conditions);
    assert_eq!(status.start_time, before.start_time);
    assert_eq!(status.observed_generation, Some(3));
}

#[test]
fn qos_table() {
    let g = r#"{"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1000m", "memory": "1024Mi"}}"#;
    for (containers, want) in [
        (vec!["{}"], "BestEffort"),
        (vec![g], "Guaranteed"),
        (
            vec![r#"{"limits": {"cpu": "1", "memory": "1Gi"}}"#],
            "Guaranteed",
        ),
        (vec![r#"{"limits": {"cpu": "1"}}"#], "Burstable"),
        (vec![g, "{}"], "Burstable"),
        (vec![r#"{"requests": {"memory": "1e3"}}"#], "Burstable"),
        (
            vec![r#"{"limits": {"cpu": "2", "memory": "1Gi"}, "requests": {"cpu": "1.5"}}"#],
            "Burstable",
        ),
        (vec![r#"{"requests": {"cpu": "0"}}"#], "BestEffort"),
        (
            vec![r#"{"requests": {"example.com/gpu": "1"}}"#],
            "BestEffort",
        ),
    ] {
        let mut pod = pod("Always", &vec!["a"; containers.len()]);
        let spec = pod.spec.as_mut().unwrap();
        for (container, resources) in spec.containers.iter_mut().zip(&containers) {
            container.resources = Some(serde_json::from_str(resources).unwrap());
        }
        assert_eq!(qos_class(&pod).as_str(), want, "{containers:?}");
    }
}

#[test]
fn qos_of_what_the_pod_asks_for_as_a_whole() {
    for (resources, want) in [
        (r#"{"limits": {"cpu": "1", "memory": "1Gi"}}"#, "Guaranteed"),
        (
            r#"{"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m"}}"#,
            "Burstable",
        ),
        (r#"{"limits": {"cpu": "1"}}"#, "Burstable"),
        (r#"{"requests": {"memory": "1"}}"#, "Burstable"),
        (r#"{"requests": {"cpu": "0"}}"#, "BestEffort"),
        (r#"{"limits": {"cpu": "0", "memory": "0"}}"#, "BestEffort"),
    ] {
        let mut pod = pod("Always", &["a"]);
        pod.spec.as_mut().unwrap().resources = Some(serde_json::from_str(resources).unwrap());
        assert_eq!(qos_class(&pod).as_str(), want, "{resources}");
    }
}

#[test]
fn each_crash_back_off_is_new_once() {
    let setup = |attempt, previous: Option<&api::PodStatus>| {
        let mut setup = Setup::new("Always", &["a"], runtime(vec![exited("a", attempt, 1)]));
        setup.owned = [("a", with_backoff(ended("a", attempt, 1), 40))].into();
        setup.previous = previous.cloned();
        setup.generate()
    };
    let first = setup(1, None);
    assert_eq!(brief(&first), "Running CrashLoopBackOff/1/1");
    let no_one: [&str; 0] = [];
    assert_eq!(new_crash_loops(None, &first), ["a"]);
    assert_eq!(
        new_crash_loops(Some(&first), &setup(1, Some(&first))),
        no_one
    );
    assert_eq!(
        new_crash_loops(Some(&first), &setup(2, Some(&first))),
        ["a"]
    );
    let running = Setup::new("Always", &["a"], runtime(vec![running("a", 2)])).generate();
    assert_eq!(new_crash_loops(Some(&running), &first), ["a"]);
    assert_eq!(new_crash_loops(Some(&first), &running), no_one);
}

#[test]
fn a_crash_back_off_is_told_until_the_start_that_ends_it() {
    let setup = |containers, backoff, previous: Option<&api::PodStatus>| {
        let mut setup = Setup::new("Always", &["a"], runtime(containers));
        setup.owned = [("a", with_backoff(ended("a", 1, 1), backoff))].into();
        setup.previous = previous.cloned();
        setup.generate()
    };
    let waiting = setup(vec![exited("a", 1, 1)], 40, None);
    assert_eq!(brief(&waiting), "Running CrashLoopBackOff/1/1");
    // It is over, and this agent has not waited for it itself.
    let over = setup(vec![exited("a", 1, 1)], 0, Some(&waiting));
    assert_eq!(brief(&over), "Running CrashLoopBackOff/1/1");
    let again = vec![running("a", 2), exited("a", 1, 1)];
    let started = setup(again, 0, Some(&over));
    assert_eq!(brief(&started), "Running running/1/2");
    // Another end was never waited for.
    let other = setup(vec![exited("a", 2, 3)], 0, Some(&waiting));
    assert!(!brief(&other).contains("CrashLoopBackOff"), "{other:?}");
    let unknown = setup(vec![exited("a", 1, 1)], 0, None);
    assert!(!brief(&unknown).contains("CrashLoopBackOff"), "{unknown:?}");
}
