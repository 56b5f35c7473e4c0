//! Restart policies of containers, probes, hooks.

use super::*;
use crate::types::containers::container_of;
use serde_json::json;

/// Case, pod, what the runtime shows, probes, whether started before, actions, next look in seconds.
type ProbeRow = (
    &'static str,
    Pod,
    Vec<ContainerStatus>,
    Vec<(&'static str, ProbeFailure)>,
    Option<bool>,
    &'static str,
    Option<u64>,
);
/// Case, pod, what the runtime shows, records, probe of `a`, actions.
type HookRow = (
    &'static str,
    Pod,
    Vec<ContainerStatus>,
    Owned,
    Option<ProbeFailure>,
    &'static str,
);

/// A pod with one container `a` in that list, with these fields.
fn one(pod_policy: &str, list: &str, fields: serde_json::Value) -> Pod {
    let mut container = json!({"name": "a", "image": "img:1"});
    for (key, value) in fields.as_object().unwrap() {
        container[key] = value.clone();
    }
    let mut spec =
        json!({"restartPolicy": pod_policy, "containers": [{"name": "m", "image": "img:1"}]});
    spec[list] = json!([container]);
    serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "ns", "uid": "u1"}, "spec": spec,
    }))
    .unwrap()
}

fn rule(operator: &str, values: &[i32], action: &str) -> serde_json::Value {
    json!({"action": action, "exitCodes": {"operator": operator, "values": values}})
}

#[test]
fn the_containers_own_policy_and_rules_come_before_the_pods() {
    let rules =
        |policy, rules: Vec<_>| json!({"restartPolicy": policy, "restartPolicyRules": rules});
    let own = |policy| json!({"restartPolicy": policy});
    let main = "containers";
    let init = "initContainers";
    let table = [
        ("Always", main, json!({}), vec![0, 1, 137]),
        ("OnFailure", main, json!({}), vec![1, 137]),
        ("Never", main, json!({}), vec![]),
        ("Never", main, own("Always"), vec![0, 1, 137]),
        ("Never", main, own("OnFailure"), vec![1, 137]),
        ("Always", main, own("Never"), vec![]),
        ("Always", main, own("OnFailure"), vec![1, 137]),
        ("Always", main, own("Sometimes"), vec![0, 1, 137]),
        (
            "Never",
            main,
            rules("Never", vec![rule("In", &[1, 2], "Restart")]),
            vec![1],
        ),
        (
            "Never",
            main,
            rules("Never", vec![rule("NotIn", &[1], "Restart")]),
            vec![0, 137],
        ),
        (
            "Never",
            main,
            rules("OnFailure", vec![rule("In", &[0], "Restart")]),
            vec![0, 1, 137],
        ),
        (
            "Never",
            main,
            rules("Never", vec![rule("In", &[1], "Explode")]),
            vec![],
        ),
        (
            "Always",
            main,
            rules("Always", vec![rule("In", &[1], "Explode")]),
            vec![0, 1, 137],
        ),
        (
            "Never",
            main,
            rules(
                "Never",
                vec![rule("In", &[1], "Explode"), rule("NotIn", &[0], "Restart")],
            ),
            vec![137],
        ),
        (
            "Never",
            main,
            rules("Never", vec![rule("Near", &[1], "Restart")]),
            vec![],
        ),
        (
            "Never",
            main,
            rules("Never", vec![rule("In", &[0], "RestartAllContainers")]),
            vec![0],
        ),
        (
            "Never",
            main,
            rules(
                "Never",
                vec![
                    rule("In", &[1], "Explode"),
                    rule("NotIn", &[0], "RestartAllContainers"),
                ],
            ),
            vec![137],
        ),
        (
            "Never",
            init,
            rules("Never", vec![rule("In", &[0, 1], "RestartAllContainers")]),
            vec![0, 1],
        ),
        (
            "Never",
            main,
            rules("Never", vec![json!({"action": "Restart"})]),
            vec![],
        ),
        (
            "Never",
            main,
            json!({"restartPolicyRules": [rule("In", &[1], "Restart")]}),
            vec![],
        ),
        ("Always", init, json!({}), vec![1, 137]),
        ("OnFailure", init, json!({}), vec![1, 137]),
        ("Never", init, json!({}), vec![]),
        ("Never", init, own("OnFailure"), vec![1, 137]),
        ("Never", init, own("Always"), vec![0, 1, 137]),
        ("Always", init, own("Never"), vec![]),
        (
            "Always",
            init,
            rules("Never", vec![rule("In", &[0, 1], "Restart")]),
            vec![1],
        ),
        ("Always", "ephemeralContainers", json!({}), vec![]),
    ];
    for (policy, list, fields, want) in table {
        let mut pod = one(policy, list, fields.clone());
        let restarting = |pod: &Pod| -> Vec<i32> {
            let spec = container_of(pod, "a").unwrap();
            [0, 1, 137]
                .into_iter()
                .filter(|code| restarts(pod, &spec, *code))
                .collect()
        };
        assert_eq!(restarting(&pod), want, "{policy} {list} {fields}");
        pod.metadata.deletion_timestamp = Some(
            k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH),
        );
        assert_eq!(
            restarting(&pod),
            [0; 0],
            "deleting: {policy} {list} {fields}"
        );
    }
}

#[test]
fn container_policy_table() {
    let main = |pod, fields| one(pod, "containers", fields);
    let dead = |c| with(vec![sandbox(0, NotReady)], c);
    let by_rule = || {
        main(
            "Never",
            json!({"restartPolicy": "Never", "restartPolicyRules": [rule("In", &[42], "Restart")]}),
        )
    };
    let init = |pod, own: &str| one(pod, "initContainers", json!({"restartPolicy": own}));
    check(vec![
        (
            "rule met",
            by_rule(),
            runtime(vec![exited("a", 0, 42)]),
            none(),
            "start a#1",
        ),
        (
            "rule not met",
            by_rule(),
            runtime(vec![exited("a", 0, 1)]),
            none(),
            "kill-pod",
        ),
        (
            "rule met, in back-off",
            by_rule(),
            runtime(vec![exited("a", 1, 42)]),
            [("a", with_backoff(ended("a", 1, 42), 40))].into(),
            "wait a 30",
        ),
        (
            "rule met, sandbox gone",
            by_rule(),
            dead(vec![exited("a", 0, 42)]),
            none(),
            "kill-pod, sandbox 1, start a#1",
        ),
        (
            "rule not met, sandbox gone",
            by_rule(),
            dead(vec![exited("a", 0, 1)]),
            none(),
            "",
        ),
        (
            "runs, sandbox gone: the code decides later",
            by_rule(),
            dead(vec![running("a", 0)]),
            none(),
            "kill-pod",
        ),
        (
            "unknown: the code decides later",
            by_rule(),
            runtime(vec![unknown("a", 0)]),
            none(),
            "kill a-0",
        ),
        (
            "Always in a Never pod",
            main("Never", json!({"restartPolicy": "Always"})),
            runtime(vec![exited("a", 0, 0)]),
            none(),
            "start a#1",
        ),
        (
            "Never in an Always pod",
            main("Always", json!({"restartPolicy": "Never"})),
            runtime(vec![exited("a", 0, 1)]),
            none(),
            "kill-pod",
        ),
        (
            "Never in an Always pod, sandbox gone",
            main("Always", json!({"restartPolicy": "Never"})),
            dead(vec![running("a", 0)]),
            none(),
            "kill-pod",
        ),
        (
            "init: Never fails the pod",
            init("Always", "Never"),
            runtime(vec![exited("a", 0, 1)]),
            none(),
            "kill-pod",
        ),
        (
            "init: Never failed, sandbox gone",
            init("Always", "Never"),
            dead(vec![exited("a", 0, 1)]),
            none(),
            "",
        ),
        (
            "init: Never failed, wiped",
            init("Always", "Never"),
            with(vec![], vec![]),
            [("a", ended("a", 0, 1))].into(),
            "",
        ),
        (
            "init: Never completed, sandbox gone",
            init("Always", "Never"),
            dead(vec![exited("a", 0, 0)]),
            none(),
            "kill-pod, forget a, sandbox 1, start a#1",
        ),
        (
            "init: OnFailure in a Never pod",
            init("Never", "OnFailure"),
            runtime(vec![exited("a", 0, 1)]),
            none(),
            "start a#1",
        ),
    ]);
}

fn look(
    pod: &Pod,
    status: &PodStatus,
    owned: &Owned,
    failures: &[(&str, ProbeFailure)],
    started: Option<bool>,
) -> PodActions {
    let failures = failures
        .iter()
        .map(|(n, f)| ((*n).to_owned(), *f))
        .collect();
    let view = ProbeView {
        ready: None,
        started,
    };
    compute(&PodActionInput {
        pod,
        status,
        records: &borrowed(owned),
        probe_failures: &failures,
        probes: &BTreeMap::from([("a".to_owned(), view)]),
        listed_at: at(70),
        now: at(70),
        backoff_max: crash::DEFAULT_MAX,
    })
}

#[test]
fn probe_table() {
    use ProbeFailure::{Liveness, Startup};
    let probe = |grace: i64| json!({"terminationGracePeriodSeconds": grace});
    let main = |own: serde_json::Value| one("Never", "containers", own);
    let sidecar = |extra: serde_json::Value| {
        let mut fields = json!({"restartPolicy": "Always"});
        for (k, v) in extra.as_object().unwrap() {
            fields[k] = v.clone();
        }
        one("Never", "initContainers", fields)
    };
    let probed = || sidecar(json!({"startupProbe": probe(7), "livenessProbe": probe(8)}));
    let rows: Vec<ProbeRow> = vec![
        (
            "a sidecar without probes has started",
            sidecar(json!({})),
            vec![running("a", 0)],
            vec![],
            None,
            "start m#0, keep a",
            None,
        ),
        (
            "no startup result yet",
            probed(),
            vec![running("a", 0)],
            vec![],
            None,
            "keep a",
            None,
        ),
        (
            "not started yet",
            probed(),
            vec![running("a", 0)],
            vec![],
            Some(false),
            "keep a",
            None,
        ),
        (
            "started",
            probed(),
            vec![running("a", 0)],
            vec![],
            Some(true),
            "start m#0, keep a",
            None,
        ),
        (
            "startup failed",
            probed(),
            vec![running("a", 0)],
            vec![("a", Startup)],
            Some(false),
            "kill a-0, start a#1",
            Some(7),
        ),
        (
            "liveness does not gate",
            probed(),
            vec![running("a", 0)],
            vec![("a", Liveness)],
            Some(true),
            "kill a-0, start a#1, start m#0",
            Some(8),
        ),
        (
            "beside a main",
            probed(),
            vec![running("a", 0), running("m", 0)],
            vec![("a", Liveness)],
            Some(true),
            "kill a-0, start a#1, keep m",
            Some(8),
        ),
        (
            "main, no grace of its own",
            main(json!({"restartPolicy": "Always", "livenessProbe": {}})),
            vec![running("a", 0)],
            vec![("a", Liveness)],
            None,
            "kill a-0, start a#1",
            None,
        ),
        (
            "main, with grace",
            main(json!({"restartPolicy": "OnFailure", "startupProbe": probe(3)})),
            vec![running("a", 0)],
            vec![("a", Startup)],
            None,
            "kill a-0, start a#1",
            Some(3),
        ),
        (
            "main with rules: the code decides",
            main(
                json!({"restartPolicy": "Never", "restartPolicyRules": [rule("In", &[143], "Restart")]}),
            ),
            vec![running("a", 0)],
            vec![("a", Liveness)],
            None,
            "kill a-0",
            None,
        ),
        (
            "a changed spec comes first",
            main(json!({"livenessProbe": probe(3)})),
            vec![other_hash(running("a", 0))],
            vec![("a", Liveness)],
            None,
            "kill a-0, start a#1",
            None,
        ),
    ];
    for (name, pod, containers, failures, started, want, grace) in rows {
        let actions = look(&pod, &runtime(containers), &none(), &failures, started);
        assert_eq!(brief(&actions, at(70)), want, "{name}");
        let seconds = actions
            .kill
            .first()
            .and_then(|k| k.grace)
            .map(|g| g.as_secs());
        assert_eq!(seconds, grace, "{name}");
    }
}

#[test]
fn post_start_table() {
    let hook = || json!({"lifecycle": {"postStart": {"exec": {"command": ["x"]}}}});
    let main = || one("Always", "containers", hook());
    let sidecar = || {
        let mut fields = hook();
        fields["restartPolicy"] = json!("Always");
        one("Always", "initContainers", fields)
    };
    let done = |id: &str| {
        let hooks_done = vec![post_start_key(&id.into())];
        Owned::from([(
            "a",
            ContainerRecord {
                hooks_done,
                ..started("a", 0)
            },
        )])
    };
    let rows: Vec<HookRow> = vec![
        (
            "its start is not on record",
            main(),
            vec![running("a", 0)],
            none(),
            None,
            "keep a",
        ),
        (
            "another start is on record",
            main(),
            vec![running("a", 1)],
            [("a", started("a", 0))].into(),
            None,
            "keep a",
        ),
        (
            "not done",
            main(),
            vec![running("a", 0)],
            [("a", started("a", 0))].into(),
            None,
            "hook a-0, keep a",
        ),
        (
            "done",
            main(),
            vec![running("a", 0)],
            done("a-0"),
            None,
            "keep a",
        ),
        (
            "done for another one",
            main(),
            vec![running("a", 0)],
            done("a-7"),
            None,
            "hook a-0, keep a",
        ),
        (
            "not of one that is killed",
            main(),
            vec![running("a", 0)],
            [("a", started("a", 0))].into(),
            Some(ProbeFailure::Liveness),
            "kill a-0, start a#1",
        ),
        (
            "not of an outdated one",
            main(),
            vec![other_hash(running("a", 0))],
            [("a", started("a", 0))].into(),
            None,
            "kill a-0, start a#1",
        ),
        (
            "not of one that ended",
            main(),
            vec![exited("a", 0, 1)],
            none(),
            None,
            "start a#1",
        ),
        (
            "not without a hook",
            one(
                "Always",
                "containers",
                json!({"lifecycle": {"preStop": {}}}),
            ),
            vec![running("a", 0)],
            none(),
            None,
            "keep a",
        ),
        (
            "gates after a sidecar",
            sidecar(),
            vec![running("a", 0)],
            [("a", started("a", 0))].into(),
            None,
            "hook a-0, keep a",
        ),
        (
            "sidecar, done",
            sidecar(),
            vec![running("a", 0)],
            done("a-0"),
            None,
            "start m#0, keep a",
        ),
        (
            "sidecar beside a main",
            sidecar(),
            vec![running("a", 0), running("m", 0)],
            [("a", started("a", 0))].into(),
            None,
            "hook a-0, keep a, keep m",
        ),
    ];
    for (name, pod, containers, owned, failure, want) in rows {
        let failures: Vec<_> = failure.map(|f| ("a", f)).into_iter().collect();
        let actions = look(&pod, &runtime(containers), &owned, &failures, None);
        assert_eq!(brief(&actions, at(70)), want, "{name}");
    }
}

#[test]
fn starts_say_what_kind_they_are_of() {
    let mut pod = one(
        "Always",
        "initContainers",
        json!({"restartPolicy": "Always"}),
    );
    let e = json!([{"name": "e", "image": "img:1"}]);
    pod.spec.as_mut().unwrap().ephemeral_containers = serde_json::from_value(e).unwrap();
    let kinds = |status| {
        let actions = look(&pod, &status, &none(), &[], None);
        actions.start.iter().map(|s| s.kind).collect::<Vec<_>>()
    };
    use ContainerKind::{Ephemeral, Main, Sidecar};
    assert_eq!(kinds(runtime(vec![])), [Ephemeral, Sidecar]);
    assert_eq!(kinds(runtime(vec![running("a", 0)])), [Ephemeral, Main]);
}

#[test]
fn a_deletion_starts_nothing_and_makes_no_end_final_that_was_not() {
    let mut pod = one("OnFailure", "containers", json!({}));
    let spec = |pod: &Pod| restarts_of(pod, "a", 1);
    assert_eq!(spec(&pod), (true, true));
    pod.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
        jiff::Timestamp::UNIX_EPOCH,
    ));
    assert_eq!(spec(&pod), (false, true));
}

/// Returns whether the container runs again, and whether its policy requires that.
fn restarts_of(pod: &Pod, name: &str, code: i32) -> (bool, bool) {
    let spec = crate::types::containers::container_of(pod, name).unwrap();
    (
        restarts(pod, &spec, code),
        policy_restarts(pod, &spec, code),
    )
}
