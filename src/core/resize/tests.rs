//! Decisions on resizes, changes of running containers, views.

use serde_json::{Value, json};

use super::*;
use crate::core::admission;

fn pod(containers: Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "p", "namespace": "ns", "uid": "u"},
        "spec": {"containers": containers},
    }))
    .unwrap()
}

fn one(requests: Value, limits: Value) -> Pod {
    pod(json!([{"name": "c", "resources": {"requests": requests, "limits": limits}}]))
}

fn other(cpu: &str) -> Pod {
    let mut pod = one(json!({"cpu": cpu}), json!({}));
    pod.metadata.uid = Some("other".to_owned());
    pod
}

fn node() -> Node {
    serde_json::from_value(
        json!({"status": {"allocatable": {"cpu": "4", "memory": "4Gi", "pods": "1"}}}),
    )
    .unwrap()
}

#[test]
fn a_resize_waits_for_a_size_of_the_node_that_is_not_known() {
    let unknown: Node =
        serde_json::from_value(json!({"status": {"allocatable": {"cpu": "4"}}})).unwrap();
    let memory = |gib: &str| one(json!({"cpu": "1", "memory": gib}), json!({}));
    let decide = |after: &Pod, before: &Pod| {
        let record = admission::allocated(before);
        decide(after, &record, &[], &unknown)
    };
    let waits = Decision::Deferred("Node's capacity of memory is not known".to_owned());
    assert_eq!(decide(&memory("2Gi"), &memory("1Gi")), waits);
    let cpu = |request: &str| one(json!({"cpu": request}), json!({}));
    let allocated = Decision::Allocate(admission::allocated(&cpu("2")));
    assert_eq!(decide(&cpu("2"), &cpu("1")), allocated);
}

#[test]
fn decisions() {
    let cpu = |request: &str| one(json!({"cpu": request}), json!({}));
    let both = |cpu: &str, memory: &str| one(json!({}), json!({"cpu": cpu, "memory": memory}));
    let more = "Node didn't have enough resource: cpu, requested: 3000, used: 2000, capacity: 4000";
    let never = "Node didn't have enough capacity: cpu, requested: 5000, capacity: 4000";
    let memory =
        "Node didn't have enough capacity: memory, requested: 5368709120, capacity: 4294967296";
    let qos = "Pod QOS Class may not change as a result of resizing";
    let deferred = |m: &str| Decision::Deferred(m.to_owned());
    let infeasible = |cause, m: &str| Decision::Infeasible(cause, m.to_owned());
    let allocate = |pod: &Pod| Decision::Allocate(admission::allocated(pod));
    for (what, before, after, used, want) in [
        (
            "nothing changed",
            cpu("1"),
            cpu("1"),
            "0",
            Decision::Unchanged,
        ),
        (
            "written another way",
            cpu("1"),
            cpu("1000m"),
            "0",
            Decision::Unchanged,
        ),
        (
            "more, and there is room",
            cpu("1"),
            cpu("2"),
            "2",
            allocate(&cpu("2")),
        ),
        ("less", cpu("2"), cpu("1"), "2", allocate(&cpu("1"))),
        (
            "less on a node that has too little",
            cpu("3"),
            cpu("2"),
            "3",
            allocate(&cpu("2")),
        ),
        (
            "more, and others have it",
            cpu("1"),
            cpu("3"),
            "2",
            deferred(more),
        ),
        (
            "more than the node has",
            cpu("1"),
            cpu("5"),
            "0",
            infeasible(Cause::Capacity, never),
        ),
        (
            "as much as the node has",
            cpu("1"),
            cpu("4"),
            "0",
            allocate(&cpu("4")),
        ),
        (
            "memory beyond the node",
            both("1", "1Gi"),
            both("1", "5Gi"),
            "0",
            infeasible(Cause::Capacity, memory),
        ),
        (
            "guaranteed stays so",
            both("1", "1Gi"),
            both("2", "1Gi"),
            "0",
            allocate(&both("2", "1Gi")),
        ),
        (
            "a limit alone",
            one(json!({"cpu": "1"}), json!({"cpu": "2"})),
            one(json!({"cpu": "1"}), json!({"cpu": "3"})),
            "0",
            allocate(&one(json!({"cpu": "1"}), json!({"cpu": "3"}))),
        ),
        (
            "a limit is taken away",
            one(json!({"cpu": "1"}), json!({"cpu": "2"})),
            cpu("1"),
            "0",
            allocate(&cpu("1")),
        ),
        (
            "burstable to guaranteed",
            one(
                json!({"cpu": "1", "memory": "1Gi"}),
                json!({"cpu": "2", "memory": "1Gi"}),
            ),
            one(
                json!({"cpu": "2", "memory": "1Gi"}),
                json!({"cpu": "2", "memory": "1Gi"}),
            ),
            "0",
            infeasible(Cause::QosClass, qos),
        ),
        (
            "guaranteed to burstable",
            both("1", "1Gi"),
            one(json!({"cpu": "1"}), json!({"cpu": "2", "memory": "1Gi"})),
            "0",
            infeasible(Cause::QosClass, qos),
        ),
        (
            "best effort to burstable",
            pod(json!([{"name": "c"}])),
            cpu("1"),
            "0",
            infeasible(Cause::QosClass, qos),
        ),
    ] {
        let record = admission::allocated(&before);
        let other = other(used);
        let got = decide(&after, &record, &[&other], &node());
        assert_eq!(got, want, "{what}");
        assert_eq!(
            is_wanted(&after, &record),
            want != Decision::Unchanged,
            "{what}"
        );
        if let Decision::Allocate(record) = got {
            assert_eq!(
                decide(&after, &record, &[&other], &node()),
                Decision::Unchanged,
                "{what}"
            );
        }
    }
    let mut fixed = cpu("2");
    fixed.metadata.annotations =
        Some([("kubernetes.io/config.source".to_owned(), "file".to_owned())].into());
    let got = decide(&fixed, &admission::allocated(&cpu("1")), &[], &node());
    assert_eq!(
        got,
        infeasible(
            Cause::StaticPod,
            "In-place resize of static-pods is not supported"
        )
    );
    let nowhere = decide(
        &cpu("9"),
        &admission::allocated(&cpu("1")),
        &[],
        &Node::default(),
    );
    assert_eq!(
        nowhere,
        allocate(&cpu("9")),
        "a node that says nothing of itself refuses nothing"
    );
}

#[test]
fn records_without_limits_have_those_that_are_wanted() {
    let old: Allocations = [("c".to_owned(), [("cpu".to_owned(), "1".to_owned())].into())].into();
    let same = one(json!({"cpu": "1"}), json!({"cpu": "2", "memory": "1Gi"}));
    let same = decide(&same, &old, &[], &node());
    assert!(
        matches!(same, Decision::Allocate(_)),
        "the memory request was not there: {same:?}"
    );
    let same = one(json!({"cpu": "1"}), json!({"cpu": "2"}));
    assert_eq!(decide(&same, &old, &[], &node()), Decision::Unchanged);
    let more = one(json!({"cpu": "2"}), json!({"cpu": "2"}));
    assert!(matches!(
        decide(&more, &old, &[], &node()),
        Decision::Allocate(_)
    ));
    let unknown = one(json!({"cpu": "2"}), json!({"cpu": "2"}));
    assert_eq!(
        decide(&unknown, &Allocations::new(), &[], &node()),
        Decision::Unchanged
    );
}

#[test]
fn a_pod_gets_the_resources_of_its_allocation_and_keeps_all_else() {
    let before = one(
        json!({"cpu": "1", "ephemeral-storage": "1Gi"}),
        json!({"memory": "1Gi"}),
    );
    let after = one(
        json!({"cpu": "2", "ephemeral-storage": "1Gi"}),
        json!({"cpu": "3", "memory": "1Gi"}),
    );
    let record = admission::allocated(&before);
    let made = with_allocation(&after, &allocated(&after, &record)).unwrap();
    let resources = made.containers()[0].resources.clone().unwrap();
    assert_eq!(
        resources.limits,
        before.containers()[0].resources.clone().unwrap().limits
    );
    let requests = resources.requests.unwrap();
    assert_eq!(requests["cpu"].0, "1");
    assert_eq!(requests["ephemeral-storage"].0, "1Gi");
    assert!(with_allocation(&made, &allocated(&made, &record)).is_none());
}

#[test]
fn changes_of_running_containers() {
    let policy = |resource: &str| json!([{"resourceName": resource, "restartPolicy": "RestartContainer"}, {"resourceName": "other", "restartPolicy": "NotRequired"}]);
    let with = |cpu: &str, memory: &str, policy: Value| {
        pod(
            json!([{"name": "c", "resizePolicy": policy, "resources": {"limits": {"cpu": cpu, "memory": memory}}}]),
        )
    };
    let none = json!([]);
    for (what, before, after, running, want) in [
        (
            "nothing",
            with("1", "1Gi", none.clone()),
            with("1", "1Gi", none.clone()),
            true,
            None,
        ),
        (
            "cpu",
            with("1", "1Gi", none.clone()),
            with("2", "1Gi", none.clone()),
            true,
            Some(false),
        ),
        (
            "cpu with a restart",
            with("1", "1Gi", none.clone()),
            with("2", "1Gi", policy("cpu")),
            true,
            Some(true),
        ),
        (
            "cpu where memory restarts",
            with("1", "1Gi", none.clone()),
            with("2", "1Gi", policy("memory")),
            true,
            Some(false),
        ),
        (
            "memory with a restart",
            with("1", "1Gi", none.clone()),
            with("1", "2Gi", policy("memory")),
            true,
            Some(true),
        ),
        (
            "both where cpu restarts",
            with("1", "1Gi", none.clone()),
            with("2", "2Gi", policy("cpu")),
            true,
            Some(true),
        ),
        (
            "of what does not run",
            with("1", "1Gi", none.clone()),
            with("2", "1Gi", none.clone()),
            false,
            None,
        ),
    ] {
        let actuated = allocated(&before, &admission::allocated(&before));
        let running: &[&str] = if running { &["c"] } else { &[] };
        let got = changes(&after, &actuated, running);
        assert_eq!(got.first().map(|c| c.restart), want, "{what}");
        assert!(got.len() <= 1, "{what}");
    }
    let after = with("2", "1Gi", none.clone());
    assert!(
        changes(&after, &Allocations::new(), &["c"]).is_empty(),
        "made with what it has"
    );
    let sidecar = |cpu: &str| -> Pod {
        serde_json::from_value(json!({"spec": {"containers": [], "initContainers": [
            {"name": "s", "restartPolicy": "Always", "resizePolicy": policy("cpu"), "resources": {"limits": {"cpu": cpu}}},
            {"name": "i", "resizePolicy": policy("cpu"), "resources": {"limits": {"cpu": cpu}}},
        ]}}))
        .unwrap()
    };
    let before = allocated(&sidecar("1"), &admission::allocated(&sidecar("1")));
    let got = changes(&sidecar("2"), &before, &["s", "i"]);
    let got: Vec<_> = got.iter().map(|c| (c.name.as_str(), c.restart)).collect();
    assert_eq!(got, [("s", true), ("i", false)]);
    let ended = changes(&sidecar("2"), &before, &["s"]);
    assert_eq!(ended.len(), 1, "an init container that has ended");
}

#[test]
fn memory_that_shrinks_and_limits_that_go() {
    let of = |limit: &str| -> Allocation {
        [
            ("limits.memory".to_owned(), limit.to_owned()),
            ("limits.cpu".to_owned(), "0".to_owned()),
        ]
        .into()
    };
    for (from, to, shrinks, lifted) in [
        ("1Gi", "2Gi", None, false),
        ("2Gi", "1Gi", Some(1 << 30), false),
        ("0", "1Gi", Some(1 << 30), false),
        ("1Gi", "0", None, true),
        ("1Gi", "1Gi", None, false),
    ] {
        let change = Change {
            name: "c".to_owned(),
            from: of(from),
            to: of(to),
            restart: false,
        };
        assert_eq!(change.memory_shrinks_to(), shrinks, "{from} {to}");
        assert_eq!(change.lifted(), (false, lifted), "{from} {to}");
    }
}

#[test]
fn what_a_status_says() {
    let before = one(json!({"cpu": "1"}), json!({"cpu": "2"}));
    let after = one(json!({"cpu": "3"}), json!({"cpu": "4"}));
    let (old, new) = (admission::allocated(&before), admission::allocated(&after));
    let told = |record: &Allocations, error: Option<&str>| ResizeRecord {
        actuated: allocated(&before, record),
        error: error.map(str::to_owned),
        started: true,
    };
    let pending = PendingRecord {
        reason: DEFERRED.to_owned(),
        message: "full".to_owned(),
    };
    let progress = |reason: &str, message: &str| Some((reason.to_owned(), message.to_owned()));
    for (what, admitted, record, waiting, running, is, has, state) in [
        ("never resized", &old, None, None, true, "1", "1", None),
        (
            "not given",
            &old,
            None,
            Some(&pending),
            true,
            "1",
            "1",
            None,
        ),
        (
            "under way",
            &new,
            Some(told(&old, None)),
            None,
            true,
            "3",
            "1",
            progress("", ""),
        ),
        (
            "refused by the kernel",
            &new,
            Some(told(&old, Some("no"))),
            None,
            true,
            "3",
            "1",
            progress(ERROR, "no"),
        ),
        (
            "done",
            &new,
            Some(told(&new, None)),
            None,
            true,
            "3",
            "3",
            None,
        ),
        (
            "not running",
            &new,
            Some(told(&old, None)),
            None,
            false,
            "3",
            "1",
            None,
        ),
    ] {
        let running: &[&str] = if running { &["c"] } else { &[] };
        let got = view(&after, admitted, record.as_ref(), waiting, running);
        let of = &got.containers["c"];
        assert_eq!(of.allocated.as_ref().unwrap()["cpu"].0, is, "{what}");
        assert_eq!(
            of.actual.as_ref().unwrap().requests.as_ref().unwrap()["cpu"].0,
            has,
            "{what}"
        );
        assert_eq!(got.in_progress, state, "{what}");
        assert_eq!(got.pending.is_some(), waiting.is_some(), "{what}");
    }
    let bare = pod(json!([{"name": "c"}]));
    let got = view(&bare, &admission::allocated(&bare), None, None, &["c"]);
    assert_eq!(got.containers["c"], ResourceView::default());
}

#[test]
fn changes_that_a_pod_asks_for_are_named_by_resource_requirement_and_direction() {
    let pod = |requests: Value, limits: Value| one(requests, limits);
    let before = pod(
        json!({"cpu": "1", "memory": "1Gi"}),
        json!({"memory": "1Gi"}),
    );
    let changes = |after: &Pod| requested_changes(&before, after);
    assert_eq!(changes(&before), []);
    let same = pod(
        json!({"cpu": "1000m", "memory": "1Gi"}),
        json!({"memory": "1024Mi"}),
    );
    assert_eq!(changes(&same), []);
    let after = pod(json!({"cpu": "2", "memory": "512Mi"}), json!({"cpu": "2"}));
    assert_eq!(
        changes(&after),
        [
            ("cpu", "requests", "increase"),
            ("cpu", "limits", "add"),
            ("memory", "requests", "decrease"),
            ("memory", "limits", "remove"),
        ]
    );
    let of_others = json!([{"name": "new", "resources": {"requests": {"cpu": "1"}}}]);
    assert_eq!(changes(&super::tests::pod(of_others)), []);
}
