//! Phase and container states with containers of all kinds.

use super::super::*;
use super::support::*;

fn out_of_memory(mut container: ContainerStatus) -> ContainerStatus {
    container.reason = "OOMKilled".to_owned();
    container
}

#[test]
fn init_and_sidecar_table() {
    let none = Owned::new;
    let is = |c: Vec<ContainerStatus>| runtime(c);
    for (name, policy, status, owned, want) in [
        (
            "nothing yet",
            "Always",
            wiped(),
            none(),
            "Pending i=init/-/0 s=init/-/0 m=init/-/0",
        ),
        (
            "sandbox only",
            "Always",
            is(vec![]),
            none(),
            "Pending i=init/-/0 s=init/-/0 m=init/-/0",
        ),
        (
            "init created",
            "Always",
            is(vec![created("i", 0)]),
            none(),
            "Pending i=init/-/0 s=init/-/0 m=init/-/0",
        ),
        (
            "init runs",
            "Always",
            is(vec![running("i", 0)]),
            none(),
            "Pending i=running/-/0* s=init/-/0 m=init/-/0",
        ),
        (
            "init runs again",
            "Always",
            is(vec![running("i", 1), exited("i", 0, 1)]),
            none(),
            "Pending i=running/1/1* s=init/-/0 m=init/-/0",
        ),
        (
            "init failed, Always",
            "Always",
            is(vec![exited("i", 0, 1)]),
            none(),
            "Pending i=1/-/0 s=init/-/0 m=init/-/0",
        ),
        (
            "init failed, OnFailure",
            "OnFailure",
            is(vec![exited("i", 0, 1)]),
            none(),
            "Pending i=1/-/0 s=init/-/0 m=init/-/0",
        ),
        (
            "init failed, Never",
            "Never",
            is(vec![exited("i", 0, 1)]),
            none(),
            "Failed i=1/-/0 s=init/-/0 m=init/-/0",
        ),
        (
            "init killed for lack of memory whatever its code, Never",
            "Never",
            is(vec![out_of_memory(exited("i", 0, 0))]),
            none(),
            "Failed i=0/-/0+ s=init/-/0 m=init/-/0",
        ),
        (
            "init killed for lack of memory whatever its code",
            "OnFailure",
            is(vec![out_of_memory(exited("i", 0, 0))]),
            none(),
            "Pending i=0/-/0+ s=init/-/0 m=init/-/0",
        ),
        (
            "init crash loop",
            "Always",
            is(vec![exited("i", 1, 2)]),
            [("i", with_backoff(ended("i", 1, 2), 40))].into(),
            "Pending i=CrashLoopBackOff/2/1 s=init/-/0 m=init/-/0",
        ),
        (
            "init done",
            "Always",
            is(vec![exited("i", 0, 0)]),
            none(),
            "Pending i=0/-/0+ s=init/-/0 m=init/-/0",
        ),
        (
            "init done, Never",
            "Never",
            is(vec![exited("i", 0, 0)]),
            none(),
            "Pending i=0/-/0+ s=init/-/0 m=init/-/0",
        ),
        (
            "init done, back-off is no matter",
            "Always",
            is(vec![exited("i", 1, 0)]),
            [("i", with_backoff(ended("i", 1, 0), 40))].into(),
            "Pending i=0/-/1+ s=init/-/0 m=init/-/0",
        ),
        (
            "sidecar runs",
            "Always",
            is(vec![exited("i", 0, 0), running("s", 0)]),
            none(),
            "Pending i=0/-/0+ s=running/-/0*+ m=init/-/0",
        ),
        (
            "all run",
            "Always",
            is(vec![exited("i", 0, 0), running("s", 0), running("m", 0)]),
            none(),
            "Running i=0/-/0+ s=running/-/0*+ m=running/-/0*+",
        ),
        (
            "sidecar ended",
            "Always",
            is(vec![exited("i", 0, 0), exited("s", 0, 1), running("m", 0)]),
            none(),
            "Running i=0/-/0+ s=1/-/0 m=running/-/0*+",
        ),
        (
            "sidecar crash loop, Never",
            "Never",
            is(vec![exited("i", 0, 0), exited("s", 1, 1), running("m", 0)]),
            [("s", with_backoff(ended("s", 1, 1), 40))].into(),
            "Running i=0/-/0+ s=CrashLoopBackOff/1/1 m=running/-/0*+",
        ),
        (
            "sidecar runs, main succeeded",
            "Never",
            is(vec![exited("i", 0, 0), running("s", 0), exited("m", 0, 0)]),
            none(),
            "Running i=0/-/0+ s=running/-/0*+ m=0/-/0",
        ),
        (
            "sidecar failed, main succeeded",
            "Never",
            is(vec![
                exited("i", 0, 0),
                exited("s", 0, 137),
                exited("m", 0, 0),
            ]),
            none(),
            "Succeeded i=0/-/0+ s=137/-/0 m=0/-/0",
        ),
        (
            "sidecar well, main failed",
            "Never",
            is(vec![
                exited("i", 0, 0),
                exited("s", 0, 0),
                exited("m", 0, 3),
            ]),
            none(),
            "Failed i=0/-/0+ s=0/-/0 m=3/-/0",
        ),
        (
            "main succeeded, OnFailure",
            "OnFailure",
            is(vec![
                exited("i", 0, 0),
                exited("s", 0, 0),
                exited("m", 0, 0),
            ]),
            none(),
            "Succeeded i=0/-/0+ s=0/-/0 m=0/-/0",
        ),
        (
            "main ended, Always",
            "Always",
            is(vec![exited("i", 0, 0), running("s", 0), exited("m", 0, 0)]),
            none(),
            "Running i=0/-/0+ s=running/-/0*+ m=0/-/0",
        ),
        (
            "main crash loop",
            "Always",
            is(vec![exited("i", 0, 0), running("s", 0), exited("m", 1, 3)]),
            [("m", with_backoff(ended("m", 1, 3), 40))].into(),
            "Running i=0/-/0+ s=running/-/0*+ m=CrashLoopBackOff/3/1",
        ),
        (
            "init in an unknown state",
            "Always",
            is(vec![unknown("i", 0)]),
            none(),
            "Pending i=ContainerStatusUnknown/-/0 s=init/-/0 m=init/-/0",
        ),
        (
            "sidecar in an unknown state",
            "Always",
            is(vec![exited("i", 0, 0), unknown("s", 0), running("m", 0)]),
            none(),
            "Running i=0/-/0+ s=ContainerStatusUnknown/-/0 m=running/-/0*+",
        ),
        (
            "init gone from the runtime while main runs",
            "Always",
            is(vec![running("s", 0), running("m", 0)]),
            none(),
            "Running i=0/-/0+ s=running/-/0*+ m=running/-/0*+",
        ),
        (
            "init gone, main created",
            "Always",
            is(vec![running("s", 0), created("m", 0)]),
            none(),
            "Pending i=0/-/0+ s=running/-/0*+ m=init/-/0",
        ),
        (
            "init vanished unseen, main runs",
            "Always",
            is(vec![running("s", 0), running("m", 0)]),
            [("i", started("i", 0))].into(),
            "Running i=0/-/0+ s=running/-/0*+ m=running/-/0*+",
        ),
        (
            "init gone, its end on record",
            "Always",
            is(vec![running("s", 0), running("m", 0)]),
            [("i", ended("i", 2, 0))].into(),
            "Running i=0/-/2+ s=running/-/0*+ m=running/-/0*+",
        ),
        (
            "init vanished before any main",
            "Always",
            is(vec![]),
            [("i", started("i", 0))].into(),
            "Pending i=137/-/0 s=init/-/0 m=init/-/0",
        ),
        (
            "init vanished before any main, Never",
            "Never",
            is(vec![]),
            [("i", started("i", 0))].into(),
            "Failed i=137/-/0 s=init/-/0 m=init/-/0",
        ),
        (
            "sidecar vanished",
            "Always",
            is(vec![exited("i", 0, 0), running("m", 0)]),
            [("s", started("s", 3))].into(),
            "Running i=0/-/0+ s=137/-/3 m=running/-/0*+",
        ),
        (
            "sidecar never seen, main runs",
            "Always",
            is(vec![exited("i", 0, 0), running("m", 0)]),
            none(),
            "Pending i=0/-/0+ s=init/-/0 m=running/-/0*+",
        ),
        (
            "new sandbox: inits are to run again",
            "Always",
            no_sandbox(vec![exited("m", 0, 255)]),
            [("i", forgotten("i", 0))].into(),
            "Pending i=init/0/0 s=init/-/0 m=255/-/0",
        ),
        (
            "new sandbox, sidecar ended",
            "Always",
            no_sandbox(vec![exited("s", 0, 255), exited("m", 0, 255)]),
            [("i", forgotten("i", 0))].into(),
            "Running i=init/0/0 s=255/-/0 m=255/-/0",
        ),
        (
            "new sandbox, init runs again",
            "Always",
            is(vec![
                running("i", 1),
                exited("s", 0, 255),
                exited("m", 0, 255),
            ]),
            [("i", started("i", 1))].into(),
            "Pending i=running/-/1* s=255/-/0 m=255/-/0",
        ),
        (
            "forgotten, but main runs",
            "Always",
            is(vec![running("s", 0), running("m", 0)]),
            [("i", forgotten("i", 0))].into(),
            "Running i=0/-/0+ s=running/-/0*+ m=running/-/0*+",
        ),
        (
            "sandbox lost, Never, main had run",
            "Never",
            wiped(),
            [("m", ended("m", 0, 0))].into(),
            "Succeeded i=0/-/0+ s=137/-/0 m=0/-/0",
        ),
        (
            "sandbox lost, Never, init had run",
            "Never",
            wiped(),
            [("i", ended("i", 0, 0))].into(),
            "Failed i=0/-/0+ s=137/-/0 m=137/-/0",
        ),
        (
            "sandbox lost, Never, init had failed: the others never had their turn",
            "Never",
            wiped(),
            [("i", ended("i", 0, 1))].into(),
            "Failed i=1/-/0 s=init/-/0 m=init/-/0",
        ),
        (
            "sandbox stopped, Never, init had failed",
            "Never",
            no_sandbox(vec![exited("i", 0, 1)]),
            none(),
            "Failed i=1/-/0 s=init/-/0 m=init/-/0",
        ),
        (
            "sandbox lost, OnFailure, init had run",
            "OnFailure",
            wiped(),
            [("i", ended("i", 0, 0))].into(),
            "Pending i=0/-/0+ s=init/-/0 m=init/-/0",
        ),
        (
            "records alone: exit code 3",
            "Never",
            wiped(),
            [
                ("i", ended("i", 0, 0)),
                ("s", ended("s", 0, 0)),
                ("m", ended("m", 0, 3)),
            ]
            .into(),
            "Failed i=0/-/0+ s=0/-/0 m=3/-/0",
        ),
    ] {
        let setup = Setup::of(all_kinds(policy), status).with(owned);
        assert_eq!(words(&setup.generate()), want, "{name}");
    }
}

#[test]
fn a_sidecar_gates_the_phase_until_it_has_started_once() {
    let mut setup = Setup::all_kinds("Always", vec![exited("i", 0, 0), running("s", 0)]);
    let inits = setup.pod.spec.as_mut().unwrap().init_containers.as_mut();
    inits.unwrap()[1].startup_probe = Some(Default::default());
    let want = "Pending i=0/-/0+ s=running/-/0 m=init/-/0";
    assert_eq!(words(&setup.generate()), want, "startup has not succeeded");
    setup.status = runtime(vec![exited("i", 0, 0), running("s", 1), running("m", 0)]);
    let want = "Running i=0/-/0+ s=running/-/1 m=running/-/0*+";
    assert_eq!(
        words(&setup.generate()),
        want,
        "it restarts, the pod was initialised"
    );
    setup.status.containers.iter_mut().for_each(|c| {
        if c.name == "m" {
            c.sandbox_id = "older".into();
        }
    });
    let want = "Pending i=0/-/0+ s=running/-/1 m=running/-/0*+";
    assert_eq!(
        words(&setup.generate()),
        want,
        "main belongs to an older sandbox"
    );
    let started = ProbeView {
        ready: None,
        started: Some(true),
    };
    setup.probes.insert("s".into(), started);
    let want = "Running i=0/-/0+ s=running/-/1*+ m=running/-/0*+";
    assert_eq!(words(&setup.generate()), want);
}

#[test]
fn ephemeral_containers_have_no_say() {
    for (name, containers, want) in [
        (
            "not started",
            vec![running("a", 0)],
            "Running a=running/-/0*+ e=creating/-/0",
        ),
        (
            "runs",
            vec![running("a", 0), running("e", 0)],
            "Running a=running/-/0*+ e=running/-/0",
        ),
        (
            "ended",
            vec![running("a", 0), exited("e", 0, 0)],
            "Running a=running/-/0*+ e=0/-/0",
        ),
        (
            "failed",
            vec![running("a", 0), exited("e", 0, 1)],
            "Running a=running/-/0*+ e=1/-/0",
        ),
        (
            "runs on",
            vec![exited("a", 0, 0), running("e", 0)],
            "Succeeded a=0/-/0 e=running/-/0",
        ),
    ] {
        let policy = if name == "runs on" { "Never" } else { "Always" };
        let mut setup = Setup::of(pod(policy, &["a"]), runtime(containers));
        let debug = serde_json::json!([{"name": "e", "image": "img:1"}]);
        setup.pod.spec.as_mut().unwrap().ephemeral_containers = serde_json::from_value(debug).ok();
        let status = setup.generate();
        assert_eq!(words(&status), want, "{name}");
        let told = &status.ephemeral_container_statuses.as_ref().unwrap()[0];
        assert_eq!((told.started, told.ready), (None, false), "{name}");
        assert_eq!(condition(&status, "Initialized").status, "True", "{name}");
    }
}

#[test]
fn an_ephemeral_container_that_ended_is_never_about_to_start() {
    let mut setup = Setup::of(
        pod("Always", &["a"]),
        runtime(vec![running("a", 0), exited("e", 0, 1)]),
    );
    let debug = serde_json::json!([{"name": "e", "image": "img:1"}]);
    setup.pod.spec.as_mut().unwrap().ephemeral_containers = serde_json::from_value(debug).ok();
    let why = ("ErrImagePull".to_owned(), "no such host".to_owned());
    setup.reasons.insert("e".into(), why);
    assert_eq!(words(&setup.generate()), "Running a=running/-/0*+ e=1/-/0");
    setup.status = runtime(vec![running("a", 0)]);
    assert_eq!(
        words(&setup.generate()),
        "Running a=running/-/0*+ e=ErrImagePull/-/0"
    );
}

#[test]
fn the_policy_of_a_container_goes_before_that_of_its_pod() {
    let rule = |operator: &str| {
        serde_json::json!([
            {"action": "Restart", "exitCodes": {"operator": operator, "values": [42]}}
        ])
    };
    let none = || serde_json::Value::Null;
    for (pod_policy, own, rules, code, want) in [
        ("Never", Some("Always"), none(), 0, "Running"),
        ("Never", Some("Always"), none(), 1, "Running"),
        ("Never", Some("OnFailure"), none(), 0, "Succeeded"),
        ("Never", Some("OnFailure"), none(), 1, "Running"),
        ("Always", Some("Never"), none(), 0, "Succeeded"),
        ("Always", Some("Never"), none(), 1, "Failed"),
        ("Always", Some("OnFailure"), none(), 0, "Succeeded"),
        ("OnFailure", Some("Never"), none(), 1, "Failed"),
        ("Never", Some("Never"), rule("In"), 42, "Running"),
        ("Never", Some("Never"), rule("In"), 1, "Failed"),
        ("Never", Some("Never"), rule("NotIn"), 42, "Failed"),
        ("Never", Some("Never"), rule("NotIn"), 1, "Running"),
        ("Never", None, rule("In"), 42, "Failed"),
        ("Never", None, none(), 0, "Succeeded"),
    ] {
        let mut main = serde_json::json!({"name": "a", "image": "img:1"});
        if let Some(own) = own {
            main["restartPolicy"] = own.into();
        }
        if rules.is_array() {
            main["restartPolicyRules"] = rules.clone();
        }
        let spec = serde_json::json!({"restartPolicy": pod_policy, "containers": [main]});
        let setup = Setup::of(pod_of(spec), runtime(vec![exited("a", 0, code)]));
        let phase = setup.generate().phase.unwrap();
        assert_eq!(phase, want, "{pod_policy} {own:?} {rules} {code}");
    }
}

#[test]
fn an_init_containers_own_policy_decides_whether_its_failure_is_final() {
    for (pod_policy, own, want) in [
        ("Always", "Never", "Failed"),
        ("Never", "OnFailure", "Pending"),
        ("OnFailure", "Never", "Failed"),
    ] {
        let spec = serde_json::json!({
            "restartPolicy": pod_policy,
            "initContainers": [{"name": "i", "image": "img:1", "restartPolicy": own}],
            "containers": [{"name": "a", "image": "img:1"}],
        });
        let setup = Setup::of(pod_of(spec), runtime(vec![exited("i", 0, 1)]));
        assert_eq!(
            setup.generate().phase.as_deref(),
            Some(want),
            "{pod_policy} {own}"
        );
    }
}

#[test]
fn reasons_are_shown_of_all_kinds() {
    let why = || ("ErrImagePull".to_owned(), "no such host".to_owned());
    for (name, containers, of, want) in [
        (
            "init",
            vec![],
            "i",
            "Pending i=ErrImagePull/-/0 s=init/-/0 m=init/-/0",
        ),
        (
            "init again",
            vec![exited("i", 0, 1)],
            "i",
            "Pending i=ErrImagePull/1/0 s=init/-/0 m=init/-/0",
        ),
        (
            "init done",
            vec![exited("i", 0, 0)],
            "i",
            "Pending i=0/-/0+ s=init/-/0 m=init/-/0",
        ),
        (
            "sidecar",
            vec![exited("i", 0, 0)],
            "s",
            "Pending i=0/-/0+ s=ErrImagePull/-/0 m=init/-/0",
        ),
        (
            "main",
            vec![exited("i", 0, 0), running("s", 0)],
            "m",
            "Pending i=0/-/0+ s=running/-/0*+ m=ErrImagePull/-/0",
        ),
    ] {
        let mut setup = Setup::all_kinds("Always", containers);
        setup.reasons.insert(of.into(), why());
        assert_eq!(words(&setup.generate()), want, "{name}");
    }
}

#[test]
fn when_the_pod_is_terminated_what_is_not_known_to_have_ended_has_failed() {
    for (name, policy, containers, want) in [
        (
            "before anything",
            "Always",
            vec![],
            "Failed i=137/-/0 s=init/-/0 m=init/-/0",
        ),
        (
            "init failed",
            "Always",
            vec![exited("i", 0, 1)],
            "Failed i=1/-/0 s=init/-/0 m=init/-/0",
        ),
        (
            "init done",
            "Always",
            vec![exited("i", 0, 0)],
            "Failed i=0/-/0+ s=init/-/0 m=init/-/0",
        ),
        (
            "sidecar ended",
            "Always",
            vec![exited("i", 0, 0), exited("s", 0, 0)],
            "Failed i=0/-/0+ s=0/-/0 m=init/-/0",
        ),
        (
            "main lost",
            "Always",
            vec![exited("i", 0, 0), exited("s", 0, 0), unknown("m", 0)],
            "Failed i=0/-/0+ s=0/-/0 m=137/-/0",
        ),
        (
            "all well",
            "Always",
            vec![exited("i", 0, 0), exited("s", 0, 143), exited("m", 0, 0)],
            "Succeeded i=0/-/0+ s=143/-/0 m=0/-/0",
        ),
        (
            "main failed",
            "Always",
            vec![exited("i", 0, 0), exited("s", 0, 0), exited("m", 0, 143)],
            "Failed i=0/-/0+ s=0/-/0 m=143/-/0",
        ),
    ] {
        let mut setup = Setup::all_kinds(policy, containers);
        setup.stage = Stage::Terminated;
        assert_eq!(words(&setup.generate()), want, "{name}");
    }
}

#[test]
fn a_pod_whose_deadline_passed_fails_with_the_reason() {
    let mut setup = Setup::all_kinds(
        "Always",
        vec![exited("i", 0, 0), running("s", 0), running("m", 0)],
    );
    setup.previous = Some(setup.generate());
    setup.deadline_exceeded = true;
    let failed = setup.generate();
    let told = |s: &api::PodStatus| (s.phase.clone(), s.reason.clone(), s.message.clone());
    let want = (
        Some("Failed".to_owned()),
        Some("DeadlineExceeded".to_owned()),
        Some("Pod was active on the node longer than the specified deadline".to_owned()),
    );
    assert_eq!(told(&failed), want);
    assert_eq!(verdict(&failed, "Ready"), "False PodFailed");
    assert!(
        failed
            .conditions
            .iter()
            .flatten()
            .all(|c| c.type_ != "DisruptionTarget")
    );
    setup.previous = Some(failed);
    setup.status = runtime(vec![
        exited("i", 0, 0),
        exited("s", 0, 0),
        exited("m", 0, 0),
    ]);
    setup.stage = Stage::Terminated;
    assert_eq!(
        told(&setup.generate()),
        want,
        "what it ended with later does not matter"
    );
    setup.deadline_exceeded = false;
    assert_eq!(told(&setup.generate()), want, "kept");
}

#[test]
fn a_deadline_does_not_change_an_end() {
    let mut setup = Setup::all_kinds(
        "Never",
        vec![exited("i", 0, 0), exited("s", 0, 0), exited("m", 0, 0)],
    );
    setup.deadline_exceeded = true;
    let status = setup.generate();
    assert_eq!(
        (status.phase.as_deref(), status.reason),
        (Some("Succeeded"), None)
    );
}

#[test]
fn a_policy_of_its_own_that_is_never_does_not_keep_a_pod_waiting_for_what_never_starts() {
    // `a` ended, the sandbox is gone: nothing of the pod may start again, `b` included.
    let pod = |own: serde_json::Value| {
        let mut a = own;
        a["name"] = "a".into();
        a["image"] = "img:1".into();
        pod_of(serde_json::json!({
            "restartPolicy": "Never",
            "containers": [a, {"name": "b", "image": "img:1"}],
        }))
    };
    for (own, want) in [
        (serde_json::json!({}), "Failed a=0/-/0 b=137/-/0"),
        (
            serde_json::json!({"restartPolicy": "Never"}),
            "Failed a=0/-/0 b=137/-/0",
        ),
        (
            serde_json::json!({"restartPolicy": "OnFailure"}),
            "Pending a=0/-/0 b=creating/-/0",
        ),
    ] {
        let setup = Setup::of(pod(own.clone()), no_sandbox(vec![exited("a", 0, 0)]));
        assert_eq!(words(&setup.generate()), want, "{own}");
    }
}
