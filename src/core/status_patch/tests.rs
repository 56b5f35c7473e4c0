//! Patches: their content, the fields left alone, and the cases without a patch.

use super::*;

fn status(value: Value) -> api::PodStatus {
    serde_json::from_value(value).unwrap()
}

fn ready(value: &str) -> Value {
    json!({"type": "Ready", "status": value, "lastTransitionTime": "2026-01-01T00:00:00Z"})
}

fn running() -> Value {
    json!({
        "phase": "Running",
        "startTime": "2026-01-01T00:00:00Z",
        "hostIP": "10.0.0.1", "hostIPs": [{"ip": "10.0.0.1"}],
        "podIP": "10.1.0.1", "podIPs": [{"ip": "10.1.0.1"}],
        "qosClass": "BestEffort",
        "observedGeneration": 3,
        "conditions": [ready("True")],
        "containerStatuses": [{
            "name": "main", "image": "i", "imageID": "id", "ready": true, "restartCount": 1, "started": true,
            "containerID": "containerd://a", "state": {"running": {"startedAt": "2026-01-01T00:00:01Z"}},
        }],
    })
}

fn patch_of(shown: Option<Value>, ours: Value) -> Option<Value> {
    patch_for(&Pod::default(), shown, ours)
}

fn patch_for(pod: &Pod, shown: Option<Value>, ours: Value) -> Option<Value> {
    let (shown, ours) = (shown.map(status), status(ours));
    status_patch(&PatchInput {
        uid: "u1",
        pod,
        shown: shown.as_ref(),
        ours: &ours,
        has_ephemeral: false,
        may_run: false,
    })
}

fn with(mut base: Value, field: &str, value: Value) -> Value {
    base[field] = value;
    base
}

fn without(mut base: Value, fields: &[&str]) -> Value {
    for field in fields {
        base.as_object_mut().unwrap().remove(*field);
    }
    base
}

#[test]
fn nothing_is_told_when_the_server_shows_what_it_has_to() {
    assert_eq!(patch_of(Some(running()), running()), None);
    let decorated = with(running(), "resourceClaimStatuses", json!([{"name": "x"}]));
    assert_eq!(patch_of(Some(decorated), running()), None);
}

#[test]
fn a_first_status_is_told_whole_with_the_uid() {
    let patch = patch_of(
        Some(json!({"phase": "Pending", "qosClass": "BestEffort"})),
        running(),
    )
    .unwrap();
    assert_eq!(patch["metadata"], json!({"uid": "u1"}));
    let told = &patch["status"];
    assert_eq!(told["phase"], "Running");
    assert_eq!(told["podIPs"], json!([{"ip": "10.1.0.1"}]));
    assert_eq!(told["hostIPs"], json!([{"ip": "10.0.0.1"}]));
    assert_eq!(told["conditions"], json!([ready("True")]));
    assert!(told.get("qosClass").is_none(), "it cannot be changed");
}

#[test]
fn only_what_differs_is_told() {
    let ours = with(running(), "conditions", json!([ready("False")]));
    let patch = patch_of(Some(running()), ours).unwrap();
    assert_eq!(patch["status"], json!({"conditions": [ready("False")]}));
}

#[test]
fn conditions_and_fields_of_others_are_left_alone() {
    let gate = json!({"type": "example.com/gate", "status": "True"});
    let shown = with(running(), "conditions", json!([gate, ready("True")]));
    let shown = with(shown, "nominatedNodeName", json!("n"));
    let stale_gate = json!({"type": "example.com/gate", "status": "False"});
    let ours = with(running(), "conditions", json!([stale_gate, ready("False")]));
    let patch = patch_of(Some(shown), ours).unwrap();
    assert_eq!(patch["status"], json!({"conditions": [ready("False")]}));
}

#[test]
fn what_we_do_not_say_any_more_is_removed() {
    let mut shown = with(running(), "reason", json!("Old"));
    shown["conditions"] = json!([
        {"type": "Ready", "status": "True", "reason": "Why", "lastTransitionTime": "2026-01-01T00:00:00Z"},
        {"type": "PodResizePending", "status": "True"},
        {"type": "PodScheduled", "status": "True"},
    ]);
    let patch = patch_of(Some(shown), running()).unwrap();
    assert_eq!(patch["status"]["reason"], Value::Null);
    let mut told_ready = ready("True");
    told_ready["reason"] = Value::Null;
    assert_eq!(
        patch["status"]["conditions"],
        json!([told_ready, {"$patch": "delete", "type": "PodResizePending"}])
    );
}

/// A mapping that merges keeps what is not named: limits that a resize took away.
#[test]
fn amounts_of_the_pod_as_a_whole_that_are_gone_are_named() {
    let with_both = |resources: Value, allocated: Value| {
        let status = with(running(), "resources", resources);
        with(status, "allocatedResources", allocated)
    };
    let both = json!({"cpu": "1", "memory": "1Gi"});
    let shown = with_both(json!({"limits": both, "requests": both}), both.clone());
    let ours = with_both(
        json!({"limits": {"cpu": "2"}, "requests": both}),
        json!({"cpu": "1"}),
    );
    let patch = patch_of(Some(shown.clone()), ours).unwrap();
    assert_eq!(
        patch["status"],
        json!({
            "resources": {"limits": {"cpu": "2", "memory": null}, "requests": both},
            "allocatedResources": {"cpu": "1", "memory": null},
        })
    );
    let none = patch_of(Some(shown), with(running(), "phase", json!("Failed"))).unwrap();
    assert_eq!(none["status"]["resources"], Value::Null);
    assert!(none["status"].get("resources").is_some(), "{none}");
    let first = patch_of(
        Some(running()),
        with_both(json!({"limits": both}), both.clone()),
    );
    assert_eq!(
        first, None,
        "a server that does not show them may drop them"
    );
}

#[test]
fn a_new_address_replaces_the_list() {
    let ours = with(running(), "podIPs", json!([{"ip": "10.1.0.2"}]));
    let patch = patch_of(Some(running()), with(ours, "podIP", json!("10.1.0.2"))).unwrap();
    assert_eq!(
        patch["status"],
        json!({"podIP": "10.1.0.2", "podIPs": [{"$patch": "replace"}, {"ip": "10.1.0.2"}]})
    );
}

#[test]
fn a_server_that_drops_new_fields_is_not_told_again() {
    let mut ours = running();
    ours["conditions"][0]["observedGeneration"] = json!(3);
    ours["containerStatuses"][0]["resources"] = json!({"requests": {"cpu": "1"}});
    let dropped = without(running(), &["hostIPs", "observedGeneration"]);
    assert_eq!(patch_of(Some(dropped.clone()), ours.clone()), None);
    // With a difference that counts they are told all the same.
    let patch = patch_of(Some(dropped), with(ours, "phase", json!("Failed"))).unwrap();
    assert_eq!(patch["status"]["hostIPs"], json!([{"ip": "10.0.0.1"}]));
    assert_eq!(patch["status"]["observedGeneration"], 3);
}

#[test]
fn a_new_field_counts_where_the_server_keeps_it() {
    let ours = with(running(), "observedGeneration", json!(4));
    let patch = patch_of(Some(running()), ours).unwrap();
    assert_eq!(patch["status"], json!({"observedGeneration": 4}));
}

#[test]
fn what_somebody_else_overwrote_is_told_again() {
    let table = [
        ("phase", json!("Pending")),
        ("podIP", json!("1.1.1.1")),
        ("message", json!("x")),
        ("conditions", json!([ready("False")])),
        ("containerStatuses", json!([])),
    ];
    for (field, value) in table {
        let shown = with(running(), field, value);
        let patch = patch_of(Some(shown), running()).unwrap_or_default();
        assert!(patch["status"].get(field).is_some(), "{field}: {patch}");
    }
}

#[test]
fn a_terminal_phase_is_held_back_while_containers_may_run() {
    let shown = status(running());
    let mut evicted = running();
    evicted["phase"] = json!("Failed");
    evicted["reason"] = json!("Evicted");
    evicted["conditions"] = json!([ready("False"), {"type": "DisruptionTarget", "status": "True"}]);
    let ours = status(evicted);
    let pod = Pod::default();
    let input = PatchInput {
        uid: "u1",
        pod: &pod,
        shown: Some(&shown),
        ours: &ours,
        has_ephemeral: false,
        may_run: true,
    };
    assert!(is_withheld(&input));
    let patch = status_patch(&input).unwrap();
    assert_eq!(patch["status"], json!({"conditions": [ready("False")]}));

    let input = PatchInput {
        may_run: false,
        ..input
    };
    assert!(!is_withheld(&input));
    let told = status_patch(&input).unwrap();
    assert_eq!(told["status"]["phase"], "Failed");
    assert_eq!(told["status"]["reason"], "Evicted");
    assert_eq!(told["status"]["conditions"][1]["type"], "DisruptionTarget");

    let failed = status(with(running(), "phase", json!("Failed")));
    let known = PatchInput {
        shown: Some(&failed),
        may_run: true,
        ..input
    };
    assert!(!is_withheld(&known), "the API server knows already");
}

#[test]
fn a_terminal_pod_is_never_told_to_be_ready() {
    let patch = patch_of(
        Some(running()),
        with(running(), "phase", json!("Succeeded")),
    )
    .unwrap();
    let condition = &patch["status"]["conditions"][0];
    assert_eq!(condition["status"], "False");
    assert_eq!(condition["reason"], "PodCompleted");
}

fn listed(name: &str) -> Value {
    let mut list = running()["containerStatuses"].clone();
    list[0]["name"] = json!(name);
    list
}

#[test]
fn each_list_of_container_statuses_is_told_whole_and_removed_when_it_is_gone() {
    for field in ["initContainerStatuses", "containerStatuses"] {
        let mut two = listed("a");
        two.as_array_mut().unwrap().push(listed("b")[0].clone());
        let (one, two) = (
            with(running(), field, listed("a")),
            with(running(), field, two),
        );
        let none = without(running(), &[field]);
        let told = |shown: &Value, ours: &Value| {
            patch_of(Some(shown.clone()), ours.clone()).unwrap()["status"].clone()
        };
        assert_eq!(
            told(&none, &one),
            json!({field: one[field]}),
            "{field} added"
        );
        assert_eq!(
            told(&one, &two),
            json!({field: two[field]}),
            "{field} grows"
        );
        assert_eq!(
            told(&two, &one),
            json!({field: one[field]}),
            "{field} shrinks"
        );
        assert_eq!(told(&one, &none), json!({field: null}), "{field} removed");
        assert_eq!(patch_of(Some(two.clone()), two), None, "{field} as it is");
    }
}

#[test]
fn ephemeral_statuses_are_told_to_a_server_that_has_ephemeral_containers() {
    let field = "ephemeralContainerStatuses";
    let shown = status(running());
    let ours = status(with(running(), field, listed("debug")));
    let told = |has_ephemeral| {
        status_patch(&PatchInput {
            uid: "u1",
            pod: &Pod::default(),
            shown: Some(&shown),
            ours: &ours,
            has_ephemeral,
            may_run: false,
        })
    };
    assert_eq!(
        told(true).unwrap()["status"],
        json!({field: listed("debug")})
    );
    assert_eq!(told(false), None, "it would be dropped again and again");
}

#[test]
fn an_ephemeral_container_that_ended_is_never_shown_otherwise() {
    let field = "ephemeralContainerStatuses";
    let pod: Pod = serde_json::from_value(json!({"spec": {
        "restartPolicy": "Always", "containers": [{"name": "main", "image": "i"}],
        "ephemeralContainers": [{"name": "debug", "image": "i"}],
    }}))
    .unwrap();
    let of = |state: Value| {
        let mut list = listed("debug");
        list[0]["state"] = state;
        status(with(running(), field, list))
    };
    let shown = of(json!({"terminated": {"exitCode": 1, "containerID": "containerd://a"}}));
    for now in [
        json!({"waiting": {"reason": "ContainerCreating"}}),
        json!({"running": {}}),
    ] {
        let mut ours = of(now);
        // Something else there is to tell.
        ours.pod_ip = Some("10.1.0.9".to_owned());
        let patch = status_patch(&PatchInput {
            uid: "u1",
            pod: &pod,
            shown: Some(&shown),
            ours: &ours,
            has_ephemeral: true,
            may_run: false,
        });
        let patch = patch.unwrap();
        assert_eq!(patch["status"]["podIP"], "10.1.0.9");
        assert_eq!(patch["status"].get(field), None, "{patch}");
    }
}

/// Of an init container; the server shows that it ended with 0.
fn init(pod_policy: &str, own: Value, now: Value) -> (Pod, Value, Value) {
    let mut container = json!({"name": "init", "image": "i"});
    for (key, value) in own.as_object().unwrap() {
        container[key] = value.clone();
    }
    let main = json!({"name": "main", "image": "i", "restartPolicy": "Always"});
    let pod = serde_json::from_value(json!({"spec": {
        "restartPolicy": pod_policy, "initContainers": [container], "containers": [main],
    }}));
    let of = |state: Value| {
        let status = json!([{
            "name": "init", "image": "i", "imageID": "id", "ready": false, "restartCount": 0, "state": state,
        }]);
        with(running(), "initContainerStatuses", status)
    };
    let ended = json!({"terminated": {"exitCode": 0, "containerID": "containerd://a", "reason": "Completed"}});
    (pod.unwrap(), of(ended), of(now))
}

#[test]
fn an_init_container_that_ended_for_good_is_shown_so_while_it_runs_again() {
    let waiting = || json!({"waiting": {"reason": "PodInitializing"}});
    let again = || json!({"terminated": {"exitCode": 0, "containerID": "containerd://b"}});
    // The pod's policy, the container's own, and whether Kubernetes 1.36 lets it leave its end.
    for (policy, own, allowed) in [
        ("Always", json!({}), true),
        ("Always", json!({"restartPolicy": "OnFailure"}), false),
        ("Always", json!({"restartPolicy": "Never"}), false),
        ("OnFailure", json!({}), false),
        ("Never", json!({}), false),
        ("Never", json!({"restartPolicy": "Always"}), true),
        (
            "Always",
            json!({"restartPolicy": "Never", "restartPolicyRules": [
                {"action": "Restart", "exitCodes": {"operator": "In", "values": [0]}},
            ]}),
            true,
        ),
    ] {
        let state = |now: Value| {
            let (pod, shown, mut ours) = init(policy, own.clone(), now);
            // Something else there is to tell.
            ours["podIP"] = json!("10.1.0.9");
            let patch = patch_for(&pod, Some(shown), ours).unwrap();
            assert_eq!(patch["status"]["podIP"], "10.1.0.9");
            patch["status"]["initContainerStatuses"][0]["state"].clone()
        };
        let told = state(waiting());
        let expected = if allowed { waiting() } else { Value::Null };
        assert_eq!(told, expected, "{policy} {own}");
        // Its next end is told.
        assert_eq!(state(again()), again(), "{policy} {own}");
    }
    // An end that nobody was told of is told before what follows it.
    let looping = json!({"waiting": {"reason": "CrashLoopBackOff"}});
    let failed = json!({"terminated": {"exitCode": 1, "containerID": "containerd://b"}});
    let (pod, shown, mut ours) = init("OnFailure", json!({}), looping);
    ours["initContainerStatuses"][0]["lastState"] = failed.clone();
    let patch = patch_for(&pod, Some(shown), ours).unwrap();
    assert_eq!(patch["status"]["initContainerStatuses"][0]["state"], failed);
    // After a failure it may run again where the policy says so.
    let (pod, mut shown, ours) = init("OnFailure", json!({}), waiting());
    shown["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] = json!(1);
    let patch = patch_for(&pod, Some(shown), ours).unwrap();
    assert_eq!(
        patch["status"]["initContainerStatuses"][0]["state"],
        waiting()
    );
}

/// Servers before 1.35 drop a container's own policy from the mirror pod, and judge the status by the pod's.
#[test]
fn a_container_that_runs_again_by_a_policy_that_the_server_does_not_know_is_shown_as_ended() {
    let end = json!({"terminated": {"exitCode": 1, "containerID": "containerd://a"}});
    let mut shown = running();
    shown["containerStatuses"][0]["state"] = end.clone();
    let mut ours = running();
    ours["podIP"] = json!("10.1.0.9");
    for (own, told) in [
        (json!(null), end),
        (
            json!("Always"),
            running()["containerStatuses"][0]["state"].clone(),
        ),
    ] {
        let pod: Pod = serde_json::from_value(json!({"spec": {
            "restartPolicy": "Never", "containers": [{"name": "main", "restartPolicy": own}],
        }}))
        .unwrap();
        let patch = patch_for(&pod, Some(shown.clone()), ours.clone()).unwrap();
        let mut status = shown.clone();
        for (field, value) in patch["status"].as_object().unwrap() {
            status[field] = value.clone();
        }
        assert_eq!(status["containerStatuses"][0]["state"], told, "{own}");
        assert_eq!(status["podIP"], "10.1.0.9");
    }
}

#[test]
fn an_amount_that_the_server_writes_otherwise_is_not_told_again_and_again() {
    let sized = |cpu: &str, memory: &str| {
        let mut status = running();
        let container = &mut status["containerStatuses"][0];
        container["allocatedResources"] = json!({"cpu": cpu});
        container["resources"] =
            json!({"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": memory}});
        status
    };
    assert_eq!(
        patch_of(Some(sized("500m", "64Mi")), sized("0.5", "65536Ki")),
        None
    );
    assert_eq!(
        patch_of(Some(sized("1m", "64Mi")), sized("100u", "64Mi")),
        None
    );
    for other in [sized("0.6", "64Mi"), sized("0.5", "65Mi")] {
        assert!(patch_of(Some(sized("500m", "64Mi")), other).is_some());
    }
    let mut fewer = sized("500m", "64Mi");
    fewer["containerStatuses"][0]["resources"]["requests"] = json!({"cpu": "500m"});
    assert!(patch_of(Some(sized("500m", "64Mi")), fewer).is_some());
}
