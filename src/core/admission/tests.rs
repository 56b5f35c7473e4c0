//! Table tests of admission.

use std::sync::Arc;

use super::*;
use crate::core::resources::SUMS;
use serde_json::json;

fn pod(uid: &str, spec: serde_json::Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": format!("p-{uid}"), "namespace": "ns", "uid": uid}, "spec": spec,
    }))
    .unwrap()
}

fn with_port(uid: &str, port: serde_json::Value, host_network: bool) -> Pod {
    pod(
        uid,
        json!({"hostNetwork": host_network, "containers": [{"name": "c", "ports": [port]}]}),
    )
}

fn context<'a>(
    node: &'a Node,
    max_pods: usize,
    refusals: &'a [String],
    unsafe_sysctls: &'a [String],
) -> AdmissionContext<'a> {
    AdmissionContext {
        node_name: "n1",
        max_pods,
        refusals,
        node,
        unsafe_sysctls,
        apparmor: false,
        strict_groups: None,
        pressure: Pressure::default(),
        unplaced: None,
    }
}

fn admit(pod: &Pod, others: &[&Pod], ctx: &AdmissionContext<'_>) -> Verdict {
    let mut others = NodeInfo::of(others.iter().map(|other| Arc::new((*other).clone())));
    others.remove(&pod.uid());
    super::admit(pod, &others, ctx)
}

fn outcome(verdict: Verdict) -> (String, String) {
    match verdict.decision {
        AdmissionDecision::Admitted => ("Admitted".to_owned(), String::new()),
        AdmissionDecision::Rejected { reason, message } => {
            assert!(!message.is_empty());
            (reason, message)
        }
    }
}

fn reason(pod: &Pod, others: &[&Pod], max_pods: usize, refusals: &[String]) -> String {
    let node = Node::default();
    outcome(admit(pod, others, &context(&node, max_pods, refusals, &[]))).0
}

fn node(value: serde_json::Value) -> Node {
    serde_json::from_value(value).unwrap()
}

/// Two CPUs, 4 GiB.
fn small_node() -> Node {
    node(
        json!({"metadata": {"name": "n1"}, "status": {"allocatable": {
            "cpu": "2", "memory": "4Gi", "ephemeral-storage": "10Gi", "pods": "110", "example.com/gpu": "1",
        }}}),
    )
}

fn asking(uid: &str, requests: serde_json::Value) -> Pod {
    pod(
        uid,
        json!({"containers": [{"name": "c", "resources": {"requests": requests}}]}),
    )
}

fn on(node: &Node, pod: &Pod, others: &[&Pod]) -> (String, String) {
    outcome(admit(pod, others, &context(node, 110, &[], &[])))
}

#[test]
fn resources_are_compared_with_what_the_others_leave() {
    let one = asking(
        "1",
        json!({"cpu": "1500m", "memory": "1Gi", "example.com/gpu": "1"}),
    );
    for (requests, want, message) in [
        (json!({"cpu": "500m"}), "Admitted", ""),
        (
            json!({"cpu": "501m"}),
            "OutOfcpu",
            "Node didn't have enough resource: cpu, requested: 501, used: 1500, capacity: 2000",
        ),
        (json!({"memory": "3Gi"}), "Admitted", ""),
        (
            json!({"memory": "3073Mi"}),
            "OutOfmemory",
            "Node didn't have enough resource: memory, requested: 3222274048, used: 1073741824, capacity: 4294967296",
        ),
        (
            json!({"ephemeral-storage": "11Gi"}),
            "OutOfephemeral-storage",
            "capacity: 10737418240",
        ),
        (
            json!({"hugepages-2Mi": "2Mi"}),
            "OutOfhugepages-2Mi",
            "capacity: 0",
        ),
        (
            json!({"example.com/gpu": "1"}),
            "OutOfexample.com/gpu",
            "used: 1, capacity: 1",
        ),
        (json!({"example.com/none": "1"}), "Admitted", ""),
        // The first in upstream's order is told.
        (json!({"memory": "5Gi", "cpu": "3"}), "OutOfcpu", "cpu"),
    ] {
        let (reason, told) = on(&small_node(), &asking("2", requests.clone()), &[&one]);
        assert_eq!(reason, want, "{requests}");
        assert!(told.contains(message), "{told}");
    }
}

#[test]
fn a_node_needs_no_devices_for_what_comes_by_a_claim() {
    let gone = node(json!({"status": {"allocatable": {"cpu": "2", "example.com/gpu": "0"}}}));
    let mut pod = asking("1", json!({"example.com/gpu": "1"}));
    assert_eq!(on(&gone, &pod, &[]).0, "OutOfexample.com/gpu");
    let status = json!({"extendedResourceClaimStatus": {"resourceClaimName": "c", "requestMappings": [
        {"containerName": "c", "resourceName": "example.com/gpu", "requestName": "r0"},
    ]}});
    pod.status = Some(serde_json::from_value(status).unwrap());
    assert_eq!(on(&gone, &pod, &[]).0, "Admitted");
}

#[test]
fn nobody_is_refused_for_memory_of_a_node_whose_size_is_not_known() {
    let unknown =
        node(json!({"status": {"allocatable": {"cpu": "2", "ephemeral-storage": "1Gi"}}}));
    for (requests, wanted) in [
        (json!({"memory": "64Gi"}), "Admitted"),
        (json!({"memory": "64Gi", "cpu": "3"}), "OutOfcpu"),
        (json!({"hugepages-2Mi": "2Mi"}), "OutOfhugepages-2Mi"),
    ] {
        let (reason, _) = on(&unknown, &asking("1", requests.clone()), &[]);
        assert_eq!(reason, wanted, "{requests}");
    }
}

#[test]
fn a_node_that_says_nothing_of_its_resources_refuses_nothing_for_them() {
    let large = asking("1", json!({"cpu": "1000"}));
    assert_eq!(on(&Node::default(), &large, &[]).0, "Admitted");
}

#[test]
fn requests_of_a_pod_are_those_of_its_dearest_moment() {
    let cpu = |cpu: &str| json!({"requests": {"cpu": cpu}});
    for (spec, want) in [
        (
            json!({"containers": [{"name": "a", "resources": cpu("1")}, {"name": "b", "resources": cpu("500m")}]}),
            1500,
        ),
        (
            json!({"containers": [{"name": "a", "resources": cpu("1")}],
                   "initContainers": [{"name": "i", "resources": cpu("3")}]}),
            3000,
        ),
        // The sidecar runs beside the later init container and beside the mains.
        (
            json!({"containers": [{"name": "a", "resources": cpu("1")}], "initContainers": [
                {"name": "early", "resources": cpu("1100m")},
                {"name": "side", "restartPolicy": "Always", "resources": cpu("200m")},
                {"name": "late", "resources": cpu("1100m")}]}),
            1300,
        ),
        (
            json!({"overhead": {"cpu": "250m"}, "containers": [{"name": "a", "resources": {"limits": {"cpu": "1"}}}]}),
            1250,
        ),
        (
            json!({"resources": cpu("2"), "containers": [{"name": "a", "resources": cpu("1")}]}),
            2000,
        ),
    ] {
        let requests = resources::pod_requests(&pod("1", spec.clone()));
        assert_eq!(resources::shown("cpu", requests["cpu"]), want, "{spec}");
    }
}

#[test]
fn node_selector_and_required_affinity() {
    let here = node(json!({"metadata": {"name": "n1", "labels": {"disk": "ssd", "gen": "7"}}}));
    let terms = |terms: serde_json::Value| {
        json!({"containers": [], "affinity": {"nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}})
    };
    let expression = |key: &str, operator: &str, values: serde_json::Value| {
        terms(json!([{"matchExpressions": [{"key": key, "operator": operator, "values": values}]}]))
    };
    for (spec, fits) in [
        (
            json!({"containers": [], "nodeSelector": {"disk": "ssd"}}),
            true,
        ),
        (
            json!({"containers": [], "nodeSelector": {"disk": "hdd"}}),
            false,
        ),
        (
            json!({"containers": [], "nodeSelector": {"zone": "a"}}),
            false,
        ),
        (expression("disk", "In", json!(["hdd", "ssd"])), true),
        (expression("disk", "In", json!(["hdd"])), false),
        (expression("zone", "In", json!(["a"])), false),
        (expression("disk", "NotIn", json!(["hdd"])), true),
        (expression("disk", "NotIn", json!(["ssd"])), false),
        (expression("zone", "NotIn", json!(["a"])), true),
        (expression("disk", "Exists", json!([])), true),
        (expression("zone", "Exists", json!([])), false),
        (expression("zone", "DoesNotExist", json!([])), true),
        (expression("disk", "DoesNotExist", json!([])), false),
        (expression("gen", "Gt", json!(["6"])), true),
        (expression("gen", "Gt", json!(["7"])), false),
        (expression("gen", "Lt", json!(["8"])), true),
        (expression("disk", "Lt", json!(["8"])), false),
        (expression("disk", "Like", json!(["s"])), false),
        (terms(json!([])), false),
        (terms(json!([{}])), false),
        (
            terms(
                json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]),
            ),
            true,
        ),
        (
            terms(
                json!([{"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n1"]}]}]),
            ),
            false,
        ),
        (
            terms(
                json!([{"matchFields": [{"key": "metadata.uid", "operator": "In", "values": ["n1"]}]}]),
            ),
            false,
        ),
        // Terms are alternatives, the requirements of one belong together.
        (
            terms(json!([
                {"matchExpressions": [{"key": "disk", "operator": "In", "values": ["hdd"]}]},
                {"matchExpressions": [{"key": "gen", "operator": "Exists"}]}])),
            true,
        ),
        (
            terms(json!([{"matchExpressions": [
                {"key": "gen", "operator": "Exists"}, {"key": "zone", "operator": "Exists"}]}])),
            false,
        ),
    ] {
        let (reason, message) = on(&here, &pod("1", spec.clone()), &[]);
        assert_eq!(reason == "Admitted", fits, "{spec}");
        if !fits {
            assert_eq!(reason, "NodeAffinity");
            assert_eq!(
                message,
                "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector"
            );
        }
    }
}

#[test]
fn taints_that_evict_refuse_pods_that_do_not_tolerate_them() {
    let tainted = |effect: &str| {
        node(json!({"metadata": {"name": "n1"}, "spec": {"taints": [
            {"key": "k", "value": "v", "effect": effect}]}}))
    };
    let tolerating = |tolerations: serde_json::Value| {
        pod("1", json!({"containers": [], "tolerations": tolerations}))
    };
    for (tolerations, want) in [
        (json!([]), "TaintToleration"),
        (json!([{"key": "k", "value": "v"}]), "Admitted"),
        (
            json!([{"key": "k", "operator": "Equal", "value": "w"}]),
            "TaintToleration",
        ),
        (json!([{"key": "k", "operator": "Exists"}]), "Admitted"),
        (json!([{"operator": "Exists"}]), "Admitted"),
        (
            json!([{"operator": "Exists", "effect": "NoSchedule"}]),
            "TaintToleration",
        ),
        (json!([{"value": "v"}]), "TaintToleration"),
        (json!([{"key": "other", "value": "v"}]), "TaintToleration"),
        (
            json!([{"key": "other", "operator": "Exists"}]),
            "TaintToleration",
        ),
        (
            json!([{"key": "k", "operator": "Lt", "value": "v"}]),
            "TaintToleration",
        ),
    ] {
        let (reason, _) = on(&tainted("NoExecute"), &tolerating(tolerations.clone()), &[]);
        assert_eq!(reason, want, "{tolerations}");
    }
    let intolerant = tolerating(json!([]));
    assert_eq!(on(&tainted("NoSchedule"), &intolerant, &[]).0, "Admitted");
    assert_eq!(
        on(&tainted("NoExecute"), &as_static(intolerant), &[]).0,
        "Admitted"
    );
}

fn as_static(mut pod: Pod) -> Pod {
    let annotations = [("kubernetes.io/config.source".to_owned(), "file".to_owned())];
    pod.metadata.annotations = Some(annotations.into());
    pod
}

#[test]
fn a_policy_of_groups_needs_a_runtime_that_has_it() {
    let strict = pod(
        "a",
        json!({"containers": [], "securityContext": {"supplementalGroupsPolicy": "Strict"}}),
    );
    let plain = pod("b", json!({"containers": []}));
    let node = Node::default();
    for (has, pod, want) in [
        (Some(false), &strict, "SupplementalGroupsPolicyNotSupported"),
        (Some(true), &strict, "Admitted"),
        (None, &strict, "Admitted"),
        (Some(false), &plain, "Admitted"),
    ] {
        let ctx = AdmissionContext {
            strict_groups: has,
            ..context(&node, 110, &[], &[])
        };
        assert_eq!(outcome(admit(pod, &[], &ctx)).0, want, "{has:?}");
    }
}

#[test]
fn sysctls_are_safe_or_allowed() {
    let allowed = ["kernel.msg*".to_owned(), "net.core.somaxconn".to_owned()];
    let here = Node::default();
    for (name, spec, why) in [
        ("net.ipv4.tcp_rmem", json!({}), ""),
        ("net/ipv4/tcp_rmem", json!({}), ""),
        ("net.ipv4.tcp_slow_start_after_idle", json!({}), ""),
        ("net.ipv4.tcp_notsent_lowat", json!({}), ""),
        ("net.core.somaxconn", json!({}), ""),
        ("kernel.msgmax", json!({}), ""),
        (
            "kernel.sem",
            json!({}),
            "forbidden sysctl: \"kernel.sem\" not allowlisted",
        ),
        (
            "net.ipv4.tcp_rmem",
            json!({"hostNetwork": true}),
            "not allowed with host net enabled",
        ),
        (
            "kernel.msgmax",
            json!({"hostIPC": true}),
            "not allowed with host ipc enabled",
        ),
    ] {
        let mut spec = spec;
        spec["containers"] = json!([]);
        spec["securityContext"] = json!({"sysctls": [{"name": name, "value": "1"}]});
        let verdict = admit(&pod("1", spec), &[], &context(&here, 10, &[], &allowed));
        let (reason, message) = outcome(verdict);
        assert_eq!(
            reason,
            if why.is_empty() {
                "Admitted"
            } else {
                "SysctlForbidden"
            },
            "{name}"
        );
        assert!(message.contains(why), "{message}");
    }
}

#[test]
fn pods_for_another_operating_system_are_refused() {
    let windows = pod("1", json!({"containers": [], "os": {"name": "windows"}}));
    assert_eq!(on(&Node::default(), &windows, &[]).0, "PodOSNotSupported");
    // Whatever else it asks for that this node does not do.
    let refusals = ["spec.volumes[0].flexVolume: is not supported".to_owned()];
    assert_eq!(reason(&windows, &[], 110, &refusals), "PodOSNotSupported");
    let mut labelled = pod("1", json!({"containers": []}));
    labelled.metadata.labels = Some([("kubernetes.io/os".to_owned(), "windows".to_owned())].into());
    assert_eq!(
        on(&Node::default(), &labelled, &[]).0,
        "PodOSSelectorNodeLabelDoesNotMatch"
    );
}

fn critical(mut pod: Pod) -> Pod {
    pod.spec.as_mut().unwrap().priority = Some(2_000_000_000);
    pod
}

#[test]
fn a_critical_pod_takes_the_place_of_the_least() {
    let guaranteed = |uid: &str, cpu: &str| {
        let resources = json!({"cpu": cpu, "memory": "64Mi"});
        pod(
            uid,
            json!({"containers": [{"name": "c", "resources": {"requests": resources, "limits": resources}}]}),
        )
    };
    let burstable = |uid: &str, cpu: &str| asking(uid, json!({"cpu": cpu}));
    let best_effort = || pod("be", json!({"containers": [{"name": "c"}]}));
    let verdict = |wanted: &str, others: &[Pod]| {
        let others: Vec<&Pod> = others.iter().collect();
        let pod = critical(asking("x", json!({"cpu": wanted})));
        admit(&pod, &others, &context(&small_node(), 110, &[], &[]))
    };
    let uids = |uids: &[&str]| -> Vec<PodUid> { uids.iter().map(|u| PodUid::new(*u)).collect() };

    let others = [
        guaranteed("g", "1"),
        burstable("b1", "400m"),
        burstable("b2", "500m"),
        best_effort(),
    ];
    let some = verdict("500m", &others);
    assert_eq!(some.decision, AdmissionDecision::Admitted);
    assert_eq!(
        some.preempt,
        uids(&["b1"]),
        "the smallest Burstable pod that is enough"
    );
    assert_eq!(verdict("100m", &others).preempt, uids(&[]), "there is room");
    assert_eq!(verdict("900m", &others).preempt, uids(&["b2", "b1"]));
    assert_eq!(
        verdict("1500m", &others).preempt,
        uids(&["b1", "g"]),
        "the Guaranteed one is needed, and then the smallest that is enough"
    );

    let protected = [critical(burstable("c", "1500m"))];
    let none = verdict("1", &protected);
    assert!(none.preempt.is_empty());
    let (reason, message) = outcome(none);
    assert_eq!(reason, "UnexpectedAdmissionError");
    assert!(
        message.ends_with("[(res: cpu, q: 500), ]") || message.ends_with("[(res: cpu, q: 500)]"),
        "{message}"
    );
}

#[test]
fn a_critical_pod_takes_the_place_of_what_lacks_least_in_proportion() {
    let others = [
        asking("cpu", json!({"cpu": "1", "memory": "1900Mi"})),
        asking("memory", json!({"cpu": "500m", "memory": "1996Mi"})),
        asking("rest", json!({"cpu": "500m", "memory": "200Mi"})),
    ];
    let others: Vec<&Pod> = others.iter().collect();
    // The node is full. The first pod lacks 200 MiB of what is missing, the second 104 MiB and half a CPU.
    let pod = critical(asking("x", json!({"cpu": "1", "memory": "2100Mi"})));
    let verdict = admit(&pod, &others, &context(&small_node(), 110, &[], &[]));
    assert_eq!(verdict.decision, AdmissionDecision::Admitted);
    assert_eq!(
        verdict.preempt,
        [PodUid::new("cpu"), PodUid::new("rest")],
        "a tenth of the memory is less than half of the CPU"
    );
}

/// The squares of the proportions count: a little of two things is nearer than all of one.
#[test]
fn a_critical_pod_takes_the_place_of_what_lacks_a_little_of_each() {
    let others = [
        asking("half", json!({"cpu": "1", "memory": "1Gi"})),
        asking("one", json!({"cpu": "200m", "memory": "2Gi"})),
        asking("rest", json!({"cpu": "800m", "memory": "1Gi"})),
    ];
    let others: Vec<&Pod> = others.iter().collect();
    let pod = critical(asking("x", json!({"cpu": "2", "memory": "2Gi"})));
    let verdict = admit(&pod, &others, &context(&small_node(), 110, &[], &[]));
    // One half of each lacks with the first, 0.9 and nothing with the second: 0.5 against 0.81.
    assert_eq!(verdict.lacking, "cpu", "what the event is told with");
    assert_eq!(verdict.preempt[0], PodUid::new("half"));
}

#[test]
fn a_static_pod_without_a_priority_ranks_as_node_critical() {
    let mut pod = pod("1", json!({"containers": []}));
    assert_eq!(priority(&pod), 0);
    let source = ("kubernetes.io/config.source".to_owned(), "file".to_owned());
    pod.metadata.annotations = Some([source].into());
    assert_eq!(priority(&pod), 2_000_001_000, "system-node-critical");
    assert_eq!(priority(&critical(pod)), 2_000_000_000);
}

#[test]
fn an_ordinary_pod_preempts_nothing_and_a_critical_one_only_for_resources() {
    let other = asking("1", json!({"cpu": "2"}));
    let verdict = admit(
        &asking("2", json!({"cpu": "1"})),
        &[&other],
        &context(&small_node(), 110, &[], &[]),
    );
    assert!(verdict.preempt.is_empty());
    assert_eq!(outcome(verdict).0, "OutOfcpu");
    let mut elsewhere = critical(asking("3", json!({"cpu": "1"})));
    elsewhere.spec.as_mut().unwrap().node_selector =
        Some([("a".to_owned(), "b".to_owned())].into());
    let verdict = admit(
        &elsewhere,
        &[&other],
        &context(&small_node(), 110, &[], &[]),
    );
    assert!(verdict.preempt.is_empty());
    assert_eq!(outcome(verdict).0, "NodeAffinity");

    let mut ordinary = asking("4", json!({"cpu": "1"}));
    ordinary.spec.as_mut().unwrap().node_selector = Some([("a".to_owned(), "b".to_owned())].into());
    let (reason, _) = on(&small_node(), &ordinary, &[&other]);
    assert_eq!(reason, "OutOfcpu", "what it lacks comes first");
}

#[test]
fn an_unstarted_pod_is_asked_for_labels_and_taints_but_not_for_resources() {
    let selecting = pod("1", json!({"containers": [], "nodeSelector": {"a": "b"}}));
    let labelled = node(json!({"metadata": {"labels": {"a": "b"}}}));
    let fits = |node: &Node, pod: &Pod| still_fits(pod, &context(node, 0, &[], &[]));
    assert_eq!(fits(&labelled, &selecting), AdmissionDecision::Admitted);
    assert_ne!(
        fits(&Node::default(), &selecting),
        AdmissionDecision::Admitted
    );
    let large = asking("2", json!({"cpu": "100"}));
    assert_eq!(fits(&small_node(), &large), AdmissionDecision::Admitted);
}

#[test]
fn host_ports_conflict_by_protocol_address_and_number() {
    let base = json!({"containerPort": 80, "hostPort": 80});
    for (first, second, host_network, want) in [
        (base.clone(), base.clone(), false, "NodePorts"),
        (
            base.clone(),
            json!({"containerPort": 80, "hostPort": 81}),
            false,
            "Admitted",
        ),
        (
            base.clone(),
            json!({"containerPort": 80, "hostPort": 80, "protocol": "UDP"}),
            false,
            "Admitted",
        ),
        (
            base.clone(),
            json!({"containerPort": 80, "hostPort": 80, "hostIP": "10.0.0.1"}),
            false,
            "NodePorts",
        ),
        (
            json!({"containerPort": 80, "hostPort": 80, "hostIP": "10.0.0.2"}),
            json!({"containerPort": 80, "hostPort": 80, "hostIP": "10.0.0.1"}),
            false,
            "Admitted",
        ),
        (
            base.clone(),
            json!({"containerPort": 80}),
            false,
            "Admitted",
        ),
        (
            base.clone(),
            json!({"containerPort": 80}),
            true,
            "NodePorts",
        ),
    ] {
        let one = with_port("1", first.clone(), false);
        let two = with_port("2", second.clone(), host_network);
        assert_eq!(reason(&two, &[&one], 10, &[]), want, "{first} {second}");
    }
}

#[test]
fn a_pod_does_not_compete_with_itself() {
    let one = with_port("1", json!({"containerPort": 80, "hostPort": 80}), false);
    assert_eq!(reason(&one, &[&one], 1, &[]), "Admitted");
}

#[test]
fn a_pod_that_is_removed_or_replaced_leaves_its_room() {
    let node = small_node();
    let context = context(&node, 2, &[], &[]);
    let port = json!([{"containerPort": 80, "hostPort": 80}]);
    let taking = |uid: &str, cpu: &str, ports: &serde_json::Value| {
        let container =
            json!({"name": "c", "ports": ports, "resources": {"requests": {"cpu": cpu}}});
        Arc::new(pod(uid, json!({"containers": [container]})))
    };
    let mut wanted = (*taking("3", "1", &port)).clone();
    wanted.metadata.name = Some("p-1".to_owned());
    let refusal = |others: &NodeInfo| outcome(super::admit(&wanted, others, &context)).0;

    let mut others = NodeInfo::of([taking("1", "2", &port), taking("2", "500m", &json!([]))]);
    assert_eq!(refusal(&others), "DuplicateName");
    others.remove(&PodUid::new("1"));
    assert_eq!(refusal(&others), "Admitted");
    others.insert(taking("2", "1500m", &json!([])));
    assert_eq!(refusal(&others), "OutOfcpu");
    others.insert(taking("2", "1", &port));
    assert_eq!(refusal(&others), "NodePorts");
    others.insert(taking("2", "1", &json!([])));
    assert_eq!(refusal(&others), "Admitted");
    others.insert(taking("4", "0", &json!([])));
    assert_eq!(refusal(&others), "OutOfpods");
    others.remove(&PodUid::new("5"));
    assert_eq!(refusal(&others), "OutOfpods", "it was not there");
}

#[test]
fn a_decision_costs_the_same_however_many_pods_are_there() {
    let large = node(json!({"status": {"allocatable": {"cpu": "1000", "memory": "4Gi"}}}));
    let context = context(&large, 1000, &[], &[]);
    let sums_for = |count: usize| {
        let before = SUMS.get();
        let mut others = NodeInfo::default();
        for n in 0..count {
            let pod = Arc::new(asking(&n.to_string(), json!({"cpu": "1"})));
            let verdict = super::admit(&pod, &others, &context);
            assert_eq!(outcome(verdict).0, "Admitted");
            others.insert(pod);
        }
        let last = super::admit(&asking("x", json!({"cpu": "1000"})), &others, &context);
        assert_eq!(outcome(last).0, "OutOfcpu", "all of them count");
        SUMS.get() - before
    };
    // Each is summed up when it is decided on, and when it is added.
    assert_eq!((sums_for(50), sums_for(500)), (101, 1001));
}

#[test]
fn unsupported_fields_and_other_nodes_are_refused() {
    let one = pod("1", json!({"containers": []}));
    assert_eq!(
        reason(&one, &[], 1, &["spec.initContainers".to_owned()]),
        "UnsupportedField"
    );
    let elsewhere = pod("2", json!({"containers": [], "nodeName": "n2"}));
    assert_eq!(reason(&elsewhere, &[], 1, &[]), "NodeName");
    let here = pod("3", json!({"containers": [], "nodeName": "n1"}));
    assert_eq!(reason(&here, &[], 1, &[]), "Admitted");
}

#[test]
fn a_host_without_apparmor_refuses_a_profile() {
    let mut pod = pod("u1", json!({"containers": [{"name": "c"}]}));
    let node = Node::default();
    let mut context = context(&node, 10, &[], &[]);
    assert_eq!(outcome(admit(&pod, &[], &context)).0, "Admitted");
    pod.spec.as_mut().unwrap().security_context = serde_json::from_value(json!({
        "appArmorProfile": {"type": "RuntimeDefault"},
    }))
    .unwrap();
    assert_eq!(
        outcome(admit(&pod, &[], &context)),
        (
            "AppArmor".to_owned(),
            "Cannot enforce AppArmor: AppArmor is not enabled on the host".to_owned()
        )
    );
    context.apparmor = true;
    assert_eq!(outcome(admit(&pod, &[], &context)).0, "Admitted");
}

#[test]
fn a_full_node_and_a_taken_name_refuse() {
    let one = pod("1", json!({"containers": []}));
    let mut two = pod("2", json!({"containers": []}));
    assert_eq!(reason(&two, &[&one], 1, &[]), "OutOfpods");
    let node = Node::default();
    let full = outcome(admit(&two, &[&one], &context(&node, 1, &[], &[]))).1;
    assert!(
        full.ends_with("pods, requested: 1, used: 1, capacity: 1"),
        "{full}"
    );
    two.metadata.name = one.metadata.name.clone();
    assert_eq!(reason(&two, &[&one], 10, &[]), "DuplicateName");
    let mut leaving = one.clone();
    leaving.metadata.deletion_timestamp =
        Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
    assert_eq!(reason(&two, &[&leaving], 10, &[]), "Admitted");
}

#[test]
fn allocation_is_requests_over_limits_and_limits_beside_them() {
    let one = pod(
        "1",
        json!({"containers": [
            {"name": "a", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "100m"}}},
            {"name": "b"},
        ]}),
    );
    let of = allocated(&one);
    assert_eq!(of["a"]["cpu"], "100m");
    assert_eq!(of["a"]["memory"], "1Gi");
    assert_eq!(of["a"]["limits.cpu"], "1");
    assert_eq!(of["a"]["limits.memory"], "1Gi");
    assert_eq!(of["b"].len(), 2);
    assert!(of["b"].values().all(|limit| limit == "0"), "none is 0");
}

#[test]
fn who_asks_for_nothing_has_room_on_a_node_that_has_shrunk() {
    let other = asking("1", json!({"cpu": "3"}));
    assert_eq!(
        on(&small_node(), &asking("2", json!({"cpu": "1m"})), &[&other]).0,
        "OutOfcpu"
    );
    for nothing in [json!({"cpu": "0"}), json!({})] {
        assert_eq!(
            on(&small_node(), &asking("2", nothing), &[&other]).0,
            "Admitted"
        );
    }
}

#[test]
fn pods_are_refused_under_pressure_as_upstream_does() {
    let pressure = |memory, disk, pid| Pressure { memory, disk, pid };
    let tolerating = json!({
        "containers": [{"name": "c"}],
        "tolerations": [{"key": "node.kubernetes.io/memory-pressure", "operator": "Exists", "effect": "NoSchedule"}],
    });
    let best_effort = pod("1", json!({"containers": [{"name": "c"}]}));
    let burstable = asking("2", json!({"cpu": "1m"}));
    let tolerant = pod("3", tolerating);
    let critical = pod(
        "4",
        json!({"priority": 2_000_000_000, "containers": [{"name": "c"}]}),
    );
    let node = small_node();
    let mut context = context(&node, 110, &[], &[]);
    for (pressure, conditions, refused) in [
        (pressure(false, false, false), "", [false, false, false]),
        (
            pressure(true, false, false),
            "MemoryPressure",
            [true, false, false],
        ),
        (
            pressure(false, true, false),
            "DiskPressure",
            [true, true, true],
        ),
        (
            pressure(true, false, true),
            "MemoryPressure PIDPressure",
            [true, true, true],
        ),
    ] {
        context.pressure = pressure;
        for (pod, is_refused) in [&best_effort, &burstable, &tolerant]
            .into_iter()
            .zip(refused)
        {
            let (reason, message) = outcome(admit(pod, &[], &context));
            assert_eq!(reason == "Evicted", is_refused, "{conditions} {reason}");
            let says = format!("The node had condition: [{conditions}]. ");
            assert!(!is_refused || message == says, "{message}");
        }
        assert_eq!(outcome(admit(&critical, &[], &context)).0, "Admitted");
    }
}

#[test]
fn a_pod_that_gets_no_cpus_of_its_own_is_refused_before_resources_are_looked_at() {
    let node = Node::default();
    let refusal = crate::core::pinning::Refusal {
        reason: "SMTAlignmentError",
        message: "SMT Alignment Error: requested 3".to_owned(),
    };
    let unplaced = AdmissionContext {
        unplaced: Some(&refusal),
        ..context(&node, 0, &[], &[])
    };
    let pod = crate::core::testkit::pod("Always", &["a"]);
    let (reason, message) = outcome(admit(&pod, &[], &unplaced));
    assert_eq!(
        (reason.as_str(), message),
        (refusal.reason, refusal.message.clone()),
        "not for the number of pods"
    );
}
