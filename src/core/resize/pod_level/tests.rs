//! Resizes of pods as a whole: what is decided, what follows in their containers, what a status says.

use k8s_openapi::api::core::v1::Node;
use serde_json::{Value, json};

use super::*;
use crate::core::admission;
use crate::core::resize::{
    Cause, Change, Decision, ERROR, ResizeRecord, changes, decide, is_wanted, of_pinned, view,
    with_allocation,
};
use crate::core::state::{State, Transaction};

fn pod(resources: Value, containers: Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "p", "namespace": "ns", "uid": "u"},
        "spec": {"resources": resources, "containers": containers},
    }))
    .unwrap()
}

/// A pod whose only container has nothing of its own.
fn whole(resources: Value) -> Pod {
    pod(resources, json!([{"name": "c"}]))
}

fn both(cpu: &str, memory: &str) -> Value {
    json!({"requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": "8", "memory": "8Gi"}})
}

fn node() -> Node {
    serde_json::from_value(json!({"status": {"allocatable": {
        "cpu": "4", "memory": "4Gi", "hugepages-2Mi": "64Mi", "pods": "9",
    }}}))
    .unwrap()
}

#[test]
fn a_pod_as_a_whole_is_resized_by_the_rules_of_its_containers() {
    let of = |cpu: &str, memory: &str| whole(both(cpu, memory));
    let guaranteed = |cpu: &str| {
        let all = json!({"cpu": cpu, "memory": "1Gi"});
        whole(json!({"requests": all, "limits": all}))
    };
    let limited =
        |memory: &str| whole(json!({"requests": {"memory": "1Gi"}, "limits": {"memory": memory}}));
    let allocate = |pod: &Pod| Decision::Allocate(admission::allocated(pod));
    let infeasible = |cause, why: &str| Decision::Infeasible(cause, why.to_owned());
    let class = infeasible(
        Cause::QosClass,
        "Pod QOS Class may not change as a result of resizing",
    );
    let full = "Node didn't have enough resource: cpu, requested: 3000, used: 2000, capacity: 4000";
    let full = Decision::Deferred(full.to_owned());
    let never = infeasible(
        Cause::Capacity,
        "Node didn't have enough capacity: cpu, requested: 5000, capacity: 4000",
    );
    let small = || of("1", "1Gi");
    let empty = || whole(json!({}));
    let none = || whole(json!(null));
    let cases = [
        (
            "the same",
            small(),
            of("1000m", "1024Mi"),
            Decision::Unchanged,
        ),
        (
            "more CPU",
            small(),
            of("2", "1Gi"),
            allocate(&of("2", "1Gi")),
        ),
        ("less memory", of("1", "2Gi"), small(), allocate(&small())),
        ("what others have", small(), of("3", "1Gi"), full),
        ("more than there is", small(), of("5", "1Gi"), never),
        (
            "a limit alone",
            limited("1Gi"),
            limited("2Gi"),
            allocate(&limited("2Gi")),
        ),
        (
            "guaranteed stays so",
            guaranteed("1"),
            guaranteed("2"),
            allocate(&guaranteed("2")),
        ),
        (
            "guaranteed to burstable",
            guaranteed("1"),
            small(),
            class.clone(),
        ),
        ("nothing to something", empty(), small(), class.clone()),
        ("something to nothing", small(), none(), class),
        (
            "an empty entry is nothing",
            empty(),
            none(),
            Decision::Unchanged,
        ),
    ];
    let other = whole(both("2", "1Gi"));
    for (what, had, wants, decision) in cases {
        let record = admission::allocated(&had);
        let differs = decision != Decision::Unchanged;
        assert_eq!(is_wanted(&wants, &record), differs, "{what}");
        let got = decide(&wants, &record, &[&other], &node());
        assert_eq!(got, decision, "{what}");
        if let Decision::Allocate(record) = got {
            let again = decide(&wants, &record, &[&other], &node());
            assert_eq!(again, Decision::Unchanged, "{what}");
        }
    }
}

#[test]
fn a_pod_as_a_whole_gets_resources_of_its_own_later() {
    let requests = json!({"cpu": "1", "memory": "1Gi"});
    let containers = json!([{"name": "c", "resources": {"requests": requests}}]);
    let had = pod(json!(null), containers.clone());
    let wants = pod(both("2", "2Gi"), containers);
    let record = admission::allocated(&had);
    let before = with_allocation(&wants, &allocated(&wants, &record)).unwrap();
    assert_eq!(before.spec, had.spec);
    let Decision::Allocate(record) = decide(&wants, &record, &[], &node()) else {
        panic!("there is room");
    };
    assert_eq!(record, admission::allocated(&wants));
    let again = decide(&had, &record, &[], &node());
    assert!(matches!(again, Decision::Allocate(_)), "none: {again:?}");
}

#[test]
fn what_cannot_be_resized_stays_as_it_is_wanted() {
    let with = |cpu: &str| {
        let pages = json!({"cpu": cpu, "hugepages-2Mi": "4Mi"});
        whole(json!({"requests": pages, "limits": pages}))
    };
    let record = admission::allocated(&with("1"));
    let wants = with("2");
    let given = with_allocation(&wants, &allocated(&wants, &record)).unwrap();
    assert_eq!(given.spec, with("1").spec);
}

#[test]
fn an_admission_of_an_earlier_version_has_what_is_wanted() {
    let pod = whole(both("1", "1Gi"));
    let mut record = admission::allocated(&pod);
    assert!(is_complete(&record));
    record.remove(POD);
    assert!(!is_complete(&record));
    assert_eq!(decide(&pod, &record, &[], &node()), Decision::Unchanged);
    let none = admission::allocated(&whole(json!(null)));
    assert!(is_complete(&none), "a pod without resources of its own");
    assert!(none[POD].is_empty());
}

#[test]
fn cpus_of_a_guaranteed_pod_are_not_resized_where_they_are_pinned() {
    let with = |cpu: &str, memory: &str| {
        let all = json!({"cpu": cpu, "memory": memory});
        whole(json!({"requests": all, "limits": all}))
    };
    let record = admission::allocated(&with("1", "1Gi"));
    for (wants, cpus, memory, refused) in [
        (with("2", "1Gi"), true, false, true),
        (with("2", "1Gi"), false, true, false),
        (with("1", "2Gi"), true, false, false),
        (with("1", "2Gi"), true, true, true),
        (with("1", "1Gi"), true, true, false),
    ] {
        let why = of_pinned(&wants, &record, cpus, memory).map(|(_, why)| why);
        assert_eq!(why.is_some(), refused, "{:?} {why:?}", wants.spec);
    }
}

/// A container that has the limits of its pod, one that has its own, and one that has its own of CPU alone.
fn three(cpu: &str, memory: &str, policy: &str) -> Pod {
    let policy = json!([{"resourceName": "memory", "restartPolicy": policy}]);
    let own = json!({"limits": {"cpu": "1", "memory": "1Gi"}});
    pod(
        json!({"requests": {"cpu": "1"}, "limits": {"cpu": cpu, "memory": memory}}),
        json!([
            {"name": "none", "resizePolicy": policy},
            {"name": "own", "resizePolicy": policy, "resources": own},
            {"name": "half", "resizePolicy": policy, "resources": {"limits": {"cpu": "1"}}},
        ]),
    )
}

const RUNNING: [&str; 3] = ["none", "own", "half"];

#[test]
fn containers_without_a_limit_follow_their_pod() {
    let never = "NotRequired";
    let had = three("2", "2Gi", never);
    let told = before(&had, &admission::allocated(&had));
    let of = |wants: &Pod| -> Vec<(String, bool)> {
        let found = changes(wants, &told, &RUNNING).into_iter();
        found.map(|c| (c.name, c.restart)).collect()
    };
    let named = |names: &[&str], restart: bool| -> Vec<(String, bool)> {
        let names = names.iter();
        names.map(|name| ((*name).to_owned(), restart)).collect()
    };
    assert_eq!(of(&had), []);
    assert_eq!(of(&three("3", "2Gi", never)), named(&["none"], false));
    let more = three("2", "3Gi", never);
    assert_eq!(of(&more), named(&["none", "half"], false));
    let restarted = three("2", "3Gi", "RestartContainer");
    assert_eq!(of(&restarted), named(&["none", "half"], true));
    let free = pod(json!({"limits": {"cpu": "2"}}), json!([{"name": "none"}]));
    let free = changes(&free, &told, &RUNNING);
    assert_eq!(free[0].lifted(), (false, true));
    let less = changes(&three("2", "1Gi", never), &told, &RUNNING);
    assert_eq!(less[0].memory_shrinks_to(), Some(1 << 30));
    assert!(!pod_changes(&had, &told));
    // A request of the pod is no matter of its containers.
    let mut requests = had.clone();
    let resources = requests.spec.as_mut().unwrap().resources.as_mut().unwrap();
    resources.requests = serde_json::from_value(json!({"cpu": "2"})).unwrap();
    assert_eq!(of(&requests), []);
    assert!(pod_changes(&requests, &told));
}

/// A container is recorded with the limit that it has from its pod, so that it is told once, wherever the agent dies.
#[test]
fn containers_that_follow_their_pod_are_told_once() {
    let had = three("2", "2Gi", "NotRequired");
    let wants = three("2", "3Gi", "NotRequired");
    let told = before(&had, &admission::allocated(&had));
    let mut record = ResizeRecord::default().and_before(told);
    for name in ["none", "half"] {
        let mut containers = wants.containers().iter();
        let made = made_with(&wants, containers.find(|c| c.name == name).unwrap());
        record = record.with(name, made);
    }
    assert_eq!(changes(&wants, &record.actuated, &RUNNING), []);
    assert!(pod_changes(&wants, &record.actuated), "recorded last");
    let mut earlier = record.actuated;
    earlier.remove(POD);
    for of in earlier.values_mut() {
        *of = only_resizable(of);
    }
    let found = changes(&wants, &earlier, &RUNNING);
    assert_eq!(found, [], "recorded by an earlier version");
}

/// An earlier version has resized a container of a pod with limits as a whole, and recorded no limit of the pod.
#[test]
fn a_record_of_an_earlier_version_restarts_nothing_and_shows_no_resize() {
    let had = three("2", "2Gi", "RestartContainer");
    let admitted = admission::allocated(&had);
    let mut actuated = before(&had, &admitted);
    actuated.remove(POD);
    for of in actuated.values_mut() {
        *of = only_resizable(of);
    }
    let earlier = ResizeRecord {
        actuated,
        ..ResizeRecord::default()
    };
    let none = had.containers().iter().find(|c| c.name == "none").unwrap();
    let restarted = earlier.clone().with("none", made_with(&had, none));
    for record in [earlier, restarted] {
        let shown = view(&had, &admitted, Some(&record), None, &RUNNING);
        assert_eq!(shown.in_progress, None, "{record:?}");
        let record = record.and_before(before(&had, &admitted));
        assert_eq!(record.clone().and_unconfirmed(&had), record);
        let more = three("3", "2Gi", "RestartContainer");
        let found = changes(&more, &record.actuated, &RUNNING);
        let found: Vec<_> = found.iter().map(|c| (c.name.as_str(), c.restart)).collect();
        assert_eq!(found, [("none", false)], "its memory stays");
    }
}

/// An agent has told the runtime of a resize and dies before it recorded that. Meanwhile the resize is withdrawn.
#[test]
fn a_resize_that_is_withdrawn_half_way_is_taken_back() {
    let (had, wanted) = (
        three("2", "2Gi", "RestartContainer"),
        three("2", "3Gi", "RestartContainer"),
    );
    let told = before(&had, &admission::allocated(&had));
    let record = ResizeRecord::default().and_before(told);
    assert_eq!(
        record.clone().and_unconfirmed(&had),
        record,
        "none is under way"
    );
    let mut record = record.and_unconfirmed(&wanted);
    let found = changes(&had, &record.actuated, &RUNNING);
    let names: Vec<_> = found.iter().map(|c| (c.name.as_str(), c.restart)).collect();
    assert_eq!(
        names,
        [("none", false), ("half", false)],
        "none restarts for it"
    );
    assert!(found.iter().all(Change::is_unconfirmed));
    assert_eq!(found[0].memory_shrinks_to(), Some(2 << 30));
    assert!(pod_changes(&had, &record.actuated) && is_pod_unconfirmed(&record.actuated));
    for change in found {
        record = record.with(&change.name, change.to);
    }
    record = record.with(POD, allocation_of_pod(&had));
    assert_eq!(changes(&had, &record.actuated, &RUNNING), []);
    assert!(!pod_changes(&had, &record.actuated));
    // Limits that may have come are taken away.
    let free = pod(json!({"requests": {"cpu": "1"}}), json!([{"name": "none"}]));
    let told = before(&free, &admission::allocated(&free));
    let record = ResizeRecord::default().and_before(told);
    let record = record.and_unconfirmed(&wanted);
    let found = changes(&free, &record.actuated, &RUNNING);
    assert_eq!(found[0].lifted(), (true, true));
}

#[test]
fn what_was_in_force_is_added_to_a_record_and_never_changed() {
    let of = |cpu: &str| -> Allocation { [("cpu".to_owned(), cpu.to_owned())].into() };
    let record = ResizeRecord::default().with("a", of("1"));
    let before = [("a".to_owned(), of("2")), (POD.to_owned(), of("3"))].into();
    let record = record.and_before(before);
    let want = [("a".to_owned(), of("1")), (POD.to_owned(), of("3"))].into();
    assert_eq!(record.actuated, want);
    let pod = whole(json!({}));
    let mut state = State::default();
    let key = crate::core::resize::resize_key(&pod);
    let now = crate::core::testkit::at(1);
    let put = Transaction::new().put_object(&key, &record, now);
    for mutation in &put.mutations {
        state.apply(mutation, 1);
    }
    assert_eq!(ResizeRecord::of(&state, &pod), Some(record));
}

#[test]
fn a_status_says_what_the_pod_as_a_whole_has_and_gets() {
    let told = |view: &crate::core::resize::ResizeView| {
        let actual = view.pod.actual.clone().unwrap_or_default();
        json!([view.pod.allocated, actual.requests, actual.limits])
    };
    let (had, wants) = (whole(both("1", "1Gi")), whole(both("1500m", "2Gi")));
    let (old, new) = (admission::allocated(&had), admission::allocated(&wants));
    let limits = json!({"cpu": "8", "memory": "8Gi"});
    let small = json!({"cpu": "1", "memory": "1Gi"});
    let large = json!({"cpu": "1500m", "memory": "2Gi"});
    let record = |allocation: &Allocations, error: Option<&str>| ResizeRecord {
        actuated: before(&wants, allocation),
        error: error.map(str::to_owned),
        started: true,
    };
    let waits = Some((String::new(), String::new()));
    let failed = Some((ERROR.to_owned(), "no".to_owned()));
    let halfway = json!([large, small, limits]);
    for (what, admitted, record, want, in_progress) in [
        ("not given", &old, None, json!([small, small, limits]), None),
        (
            "under way",
            &new,
            Some(record(&old, None)),
            halfway.clone(),
            waits,
        ),
        (
            "refused",
            &new,
            Some(record(&old, Some("no"))),
            halfway,
            failed,
        ),
        (
            "done",
            &new,
            Some(record(&new, None)),
            json!([large, large, limits]),
            None,
        ),
    ] {
        let got = view(&wants, admitted, record.as_ref(), None, &["c"]);
        assert_eq!(told(&got), want, "{what}");
        assert_eq!(got.in_progress, in_progress, "{what}");
        let own = &got.containers["c"];
        assert_eq!(own.actual, None, "{what}: the limit is the pod's");
    }
}

#[test]
fn a_pod_without_resources_of_its_own_is_shown_with_those_of_its_containers() {
    let of = json!({"requests": {"cpu": "250m"}, "limits": {"cpu": "1", "memory": "1536Ki"}});
    let containers =
        json!([{"name": "a", "resources": of.clone()}, {"name": "b", "resources": of}]);
    let sum = pod(json!(null), containers);
    let got = view(&sum, &admission::allocated(&sum), None, None, &["a", "b"]);
    let requests = json!({"cpu": "500m", "memory": "3Mi"});
    let limits = json!({"cpu": "2", "memory": "3Mi"});
    assert_eq!(json!(got.pod.allocated), requests);
    let actual = json!(got.pod.actual);
    assert_eq!(actual, json!({"requests": requests, "limits": limits}));
    let nothing = whole(json!(null));
    let got = view(
        &nothing,
        &admission::allocated(&nothing),
        None,
        None,
        &["c"],
    );
    assert_eq!(got.pod, crate::core::resize::ResourceView::default());
}
