//! Tables of the arithmetic of resources.

use super::*;
use crate::kuberuntime::node_context::MemorySize;
use serde_json::json;

fn q(text: &str) -> Quantity {
    Quantity(text.to_owned())
}

fn pod(containers: serde_json::Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "p", "uid": "u"},
        "spec": {"containers": containers},
    }))
    .unwrap()
}

#[test]
fn parts_of_a_unit_round_away_from_zero() {
    for (text, whole) in [("0.1", 1), ("-0.1", -1), ("1500m", 2), ("-1500m", -2)] {
        assert_eq!(value(&Quantity(text.to_owned())), Ok(whole), "{text}");
    }
}

#[test]
fn quantities_parse_like_the_api_servers() {
    for (text, milli) in [
        ("1", 1_000),
        ("100m", 100),
        ("0.5", 500),
        (".5", 500),
        ("1.", 1_000),
        ("1e3", 1_000_000),
        ("2E2", 200_000),
        ("1k", 1_000_000),
        ("1Ki", 1_024_000),
        ("1.5Gi", 1_610_612_736_000),
        ("100n", 1),
        ("-1", -1_000),
        ("12E", i64::MAX),
    ] {
        assert_eq!(milli_value(&q(text)), Ok(milli), "{text}");
    }
    assert_eq!(value(&q("100m")), Ok(1));
    assert_eq!(value(&q("64Mi")), Ok(67_108_864));
    for text in [
        "",
        "m",
        "1.2.3",
        "1x",
        "1e99",
        "0x10",
        "1 Gi",
        "999999999999999999999",
    ] {
        assert!(milli_value(&q(text)).is_err(), "{text} is accepted");
    }
}

#[test]
fn shares_and_quota_stay_in_their_ranges() {
    assert_eq!(milli_cpu_to_shares(0), 2);
    assert_eq!(milli_cpu_to_shares(1), 2);
    assert_eq!(milli_cpu_to_shares(500), 512);
    assert_eq!(milli_cpu_to_shares(1_000_000_000), 262_144);
    assert_eq!(milli_cpu_to_quota(0, 100_000), 0);
    assert_eq!(milli_cpu_to_quota(1, 100_000), 1_000);
    assert_eq!(milli_cpu_to_quota(250, 100_000), 25_000);
    assert_eq!(
        milli_cpu_to_quota((10 << 30) * 1000, 100_000),
        (1 << 44) - 1
    );
    assert_eq!(shares_to_weight(2), 1);
    assert_eq!(shares_to_weight(1024), 39);
    assert_eq!(shares_to_weight(262_144), 10_000);
}

#[test]
fn qos_class_follows_cpu_and_memory_of_every_container() {
    let full = json!({"limits": {"cpu": "1", "memory": "1Gi"}});
    let same = json!({"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1000m", "memory": "1024Mi"}});
    let less = json!({"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m"}});
    let other = json!({"limits": {"example.com/gpu": "1"}});
    let zero = json!({"requests": {"cpu": "0"}});
    let c = |name: &str, r: &serde_json::Value| json!({"name": name, "image": "i", "resources": r});
    for (containers, class) in [
        (json!([{"name": "a"}]), QosClass::BestEffort),
        (json!([c("a", &full)]), QosClass::Guaranteed),
        (json!([c("a", &full), c("b", &same)]), QosClass::Guaranteed),
        (json!([c("a", &full), {"name": "b"}]), QosClass::Burstable),
        (json!([c("a", &less)]), QosClass::Burstable),
        (json!([c("a", &other)]), QosClass::BestEffort),
        (json!([c("a", &zero)]), QosClass::BestEffort),
    ] {
        assert_eq!(qos_class(&pod(containers.clone())), class, "{containers}");
        // An entry of the pod as a whole that says nothing decides nothing.
        for entry in [json!({}), json!({"limits": {}, "requests": {}})] {
            let mut with_entry = pod(containers.clone());
            with_entry.spec.as_mut().unwrap().resources = serde_json::from_value(entry).unwrap();
            assert_eq!(qos_class(&with_entry), class, "{containers}");
        }
    }
}

#[test]
fn oom_score_of_a_burstable_container_shrinks_with_its_request() {
    let gib = 1_u64 << 30;
    let with =
        |memory: &str| pod(json!([{"name": "a", "resources": {"requests": {"memory": memory}}}]));
    for (memory, adj) in [("1Gi", 900), ("1", 999), ("10Gi", 3), ("5Gi", 500)] {
        let pod = with(memory);
        assert_eq!(
            oom_score_adj(&pod, &pod.containers()[0], Some(10 * gib)),
            Ok(adj),
            "{memory}"
        );
    }
    let none = pod(json!([{"name": "a"}]));
    assert_eq!(
        oom_score_adj(&none, &none.containers()[0], Some(gib)),
        Ok(1_000)
    );
    let mut critical = none.clone();
    if let Some(spec) = critical.spec.as_mut() {
        spec.priority_class_name = Some("system-node-critical".to_owned());
        spec.priority = Some(2_000_001_000);
    }
    assert_eq!(
        oom_score_adj(&critical, &critical.containers()[0], Some(gib)),
        Ok(-997)
    );
}

#[test]
fn pod_limits_count_only_when_every_container_has_one() {
    let p = pod(json!([
        {"name": "a", "resources": {"limits": {"cpu": "1", "memory": "1Mi"}}},
        {"name": "b", "resources": {"limits": {"memory": "2Mi"}, "requests": {"cpu": "100m"}}},
    ]));
    assert_eq!(
        pod_resources(&p),
        Ok(CpuMemory {
            cpu_request: Some(1_100),
            cpu_limit: None,
            memory_request: Some(3 << 20),
            memory_limit: Some(3 << 20),
        })
    );
}

#[test]
fn overhead_adds_to_requests_and_to_limits_that_are_there() {
    let mut p = pod(json!([{"name": "a", "resources": {"limits": {"memory": "1Mi"}}}]));
    if let Some(spec) = p.spec.as_mut() {
        spec.overhead = serde_json::from_value(json!({"cpu": "100m", "memory": "1Mi"})).unwrap();
    }
    assert_eq!(
        pod_resources_with_overhead(&p),
        Ok(CpuMemory {
            cpu_request: Some(100),
            cpu_limit: None,
            memory_request: Some(2 << 20),
            memory_limit: Some(2 << 20),
        })
    );
    assert_eq!(pod_resources(&p).map(|r| r.memory_limit), Ok(Some(1 << 20)));
}

#[test]
fn container_resources_become_a_cri_message() {
    let p = pod(json!([{"name": "a", "resources": {"limits": {"cpu": "250m", "memory": "64Mi"}}}]));
    let mut ctx = NodeContext::new("n", "/r");
    ctx.swap_controller = true;
    let r = container_linux_resources(&p, &p.containers()[0], &ctx).unwrap();
    assert_eq!(
        (r.cpu_shares, r.cpu_quota, r.cpu_period),
        (256, 25_000, 100_000)
    );
    assert_eq!(
        (r.memory_limit_in_bytes, r.memory_swap_limit_in_bytes),
        (64 << 20, 64 << 20)
    );
    assert_eq!(r.oom_score_adj, -997);
    assert!(r.unified.is_empty());
    ctx.cgroup_v2 = true;
    ctx.cpu_cfs_quota = false;
    let r = container_linux_resources(&p, &p.containers()[0], &ctx).unwrap();
    assert_eq!(
        (r.cpu_quota, r.cpu_period, r.memory_swap_limit_in_bytes),
        (0, 0, 0)
    );
    assert_eq!(
        r.unified.get("memory.oom.group").map(String::as_str),
        Some("1")
    );
    assert_eq!(
        r.unified.get("memory.swap.max").map(String::as_str),
        Some("0")
    );
}

fn spec(spec: serde_json::Value) -> Pod {
    serde_json::from_value(json!({"metadata": {"name": "p", "uid": "u"}, "spec": spec})).unwrap()
}

fn memory(request: &str) -> serde_json::Value {
    json!({"requests": {"memory": request}})
}

#[test]
fn oom_scores_by_kind_of_container() {
    // 100 Mi of memory: a Mi is ten points.
    let capacity = 100 << 20;
    let c = |name: &str, r: serde_json::Value| json!({"name": name, "resources": r});
    let sidecar = |name: &str, r: serde_json::Value| json!({"name": name, "resources": r, "restartPolicy": "Always"});
    let two = |init: serde_json::Value, a: serde_json::Value, b: serde_json::Value| {
        spec(json!({"initContainers": [init], "containers": [c("a", a), c("b", b)]}))
    };
    for (what, pod, name, want) in [
        (
            "a main container",
            two(c("i", json!({})), memory("50Mi"), memory("10Mi")),
            "a",
            500,
        ),
        (
            "a smaller one",
            two(c("i", json!({})), memory("50Mi"), memory("10Mi")),
            "b",
            900,
        ),
        (
            "one that asks for nothing",
            two(c("i", json!({})), memory("50Mi"), json!({})),
            "b",
            999,
        ),
        (
            "an init container",
            two(c("i", memory("20Mi")), memory("50Mi"), memory("10Mi")),
            "i",
            800,
        ),
        (
            "an init container is not held to the main ones",
            two(c("i", json!({})), memory("50Mi"), memory("40Mi")),
            "i",
            999,
        ),
        (
            "a sidecar that asks for less goes with the smallest main",
            two(sidecar("i", memory("1Mi")), memory("50Mi"), memory("10Mi")),
            "i",
            900,
        ),
        (
            "a sidecar that asks for more keeps its own",
            two(sidecar("i", memory("30Mi")), memory("50Mi"), memory("10Mi")),
            "i",
            700,
        ),
        (
            "a sidecar beside a main that asks for nothing",
            two(sidecar("i", memory("30Mi")), memory("50Mi"), json!({})),
            "i",
            700,
        ),
        (
            "a limit stands in for the request",
            two(
                c("i", json!({})),
                json!({"limits": {"memory": "50Mi"}}),
                json!({}),
            ),
            "a",
            500,
        ),
        (
            "more than the machine",
            two(c("i", json!({})), memory("500Mi"), json!({})),
            "a",
            3,
        ),
    ] {
        let container = crate::types::containers::container_of(&pod, name).unwrap();
        assert_eq!(
            oom_score_adj(&pod, &container.container, Some(capacity)),
            Ok(want),
            "{what}"
        );
    }
    // 40 Mi for the pod, 10 of them its containers': each of two gets 15 more.
    let whole = spec(json!({
        "resources": {"requests": {"memory": "40Mi"}, "limits": {"memory": "80Mi"}},
        "initContainers": [{"name": "s", "restartPolicy": "Always"}],
        "containers": [{"name": "a", "resources": {"requests": {"memory": "10Mi"}}}],
    }));
    for (name, want) in [("a", 750), ("s", 750)] {
        let container = crate::types::containers::container_of(&whole, name).unwrap();
        assert_eq!(
            oom_score_adj(&whole, &container.container, Some(capacity)),
            Ok(want),
            "{name}"
        );
    }
}

#[test]
fn qos_counts_init_containers_and_the_pod_as_a_whole() {
    let full = json!({"limits": {"cpu": "1", "memory": "1Gi"}});
    let c = |r: &serde_json::Value| json!({"name": "c", "resources": r});
    for (what, pod, class) in [
        (
            "all the same",
            json!({"initContainers": [c(&full)], "containers": [c(&full)]}),
            QosClass::Guaranteed,
        ),
        (
            "an init container without",
            json!({"initContainers": [c(&json!({}))], "containers": [c(&full)]}),
            QosClass::Burstable,
        ),
        (
            "an init container alone",
            json!({"initContainers": [c(&full)], "containers": [c(&json!({}))]}),
            QosClass::Burstable,
        ),
        (
            "the pod's limits",
            json!({"resources": full, "containers": [c(&json!({}))]}),
            QosClass::Guaranteed,
        ),
        (
            "the pod's limits over a container's request",
            json!({"resources": full, "containers": [c(&memory("1Mi"))]}),
            QosClass::Burstable,
        ),
        (
            "the pod's requests",
            json!({"resources": {"requests": {"cpu": "1"}}, "containers": [c(&json!({}))]}),
            QosClass::Burstable,
        ),
        (
            "nothing said of the pod",
            json!({"resources": {}, "containers": [c(&full)]}),
            QosClass::Guaranteed,
        ),
        (
            "huge pages alone of the pod, whose requests are then its containers' together",
            json!({"resources": {"limits": {"hugepages-2Mi": "2Mi"}}, "containers": [c(&full)]}),
            QosClass::Burstable,
        ),
    ] {
        assert_eq!(qos_class(&spec(pod)), class, "{what}");
    }
}

#[test]
fn pods_ask_for_what_their_containers_need_at_the_worst_moment() {
    let cpu = |request: &str| json!({"requests": {"cpu": request}, "limits": {"cpu": request}});
    let c = |r: serde_json::Value| json!({"name": "c", "resources": r});
    let s = |r: serde_json::Value| json!({"name": "s", "resources": r, "restartPolicy": "Always"});
    for (what, pod, request, limit) in [
        (
            "main containers add up",
            json!({"containers": [c(cpu("1")), c(cpu("2"))]}),
            Some(3_000),
            Some(3_000),
        ),
        (
            "a larger init container counts alone",
            json!({"initContainers": [c(cpu("5"))], "containers": [c(cpu("1"))]}),
            Some(5_000),
            Some(5_000),
        ),
        (
            "a smaller one does not",
            json!({"initContainers": [c(cpu("1"))], "containers": [c(cpu("2"))]}),
            Some(2_000),
            Some(2_000),
        ),
        (
            "a sidecar adds",
            json!({"initContainers": [s(cpu("1"))], "containers": [c(cpu("2"))]}),
            Some(3_000),
            Some(3_000),
        ),
        (
            "an init container after a sidecar",
            json!({"initContainers": [s(cpu("1")), c(cpu("4"))], "containers": [c(cpu("2"))]}),
            Some(5_000),
            Some(5_000),
        ),
        (
            "an init container before a sidecar",
            json!({"initContainers": [c(cpu("4")), s(cpu("1"))], "containers": [c(cpu("2"))]}),
            Some(4_000),
            Some(4_000),
        ),
        (
            "sidecars together at start",
            json!({"initContainers": [s(cpu("1")), s(cpu("2")), c(cpu("4"))], "containers": [c(cpu("1"))]}),
            Some(7_000),
            Some(7_000),
        ),
        (
            "overhead",
            json!({"overhead": {"cpu": "250m"}, "containers": [c(cpu("1"))]}),
            Some(1_250),
            Some(1_250),
        ),
        (
            "overhead of an unlimited pod",
            json!({"overhead": {"cpu": "250m"}, "containers": [c(json!({}))]}),
            Some(250),
            None,
        ),
        (
            "one container without a limit",
            json!({"containers": [c(cpu("1")), c(json!({"requests": {"cpu": "1"}}))]}),
            Some(2_000),
            None,
        ),
        (
            "an init container without a limit",
            json!({"initContainers": [c(json!({}))], "containers": [c(cpu("1"))]}),
            Some(1_000),
            None,
        ),
        (
            "the pod as a whole",
            json!({"resources": {"requests": {"cpu": "3"}, "limits": {"cpu": "4"}}, "containers": [c(cpu("1"))]}),
            Some(3_000),
            Some(4_000),
        ),
        (
            "the pod's limit alone",
            json!({"resources": {"limits": {"cpu": "4"}}, "containers": [c(json!({}))]}),
            Some(4_000),
            Some(4_000),
        ),
        (
            "the pod's limit over requests",
            json!({"resources": {"limits": {"cpu": "4"}}, "containers": [c(cpu("1"))]}),
            Some(1_000),
            Some(4_000),
        ),
        (
            "the pod as a whole and overhead",
            json!({"resources": {"limits": {"cpu": "4"}}, "overhead": {"cpu": "1"}, "containers": [c(json!({}))]}),
            Some(5_000),
            Some(5_000),
        ),
    ] {
        let got = pod_resources_with_overhead(&spec(pod)).unwrap();
        assert_eq!((got.cpu_request, got.cpu_limit), (request, limit), "{what}");
    }
}

#[test]
fn a_quantity_that_does_not_parse_is_named_wherever_it_stands() {
    for pod in [
        json!({"containers": [{"name": "c", "resources": {"limits": {"cpu": "1x"}}}]}),
        json!({"containers": [], "initContainers": [{"name": "c", "resources": {"requests": {"cpu": "1x"}}}]}),
        json!({"containers": [], "resources": {"requests": {"memory": "1x"}}}),
        json!({"containers": [], "overhead": {"cpu": "1x"}}),
    ] {
        let error = pod_resources_with_overhead(&spec(pod.clone())).unwrap_err();
        assert_eq!(error.value, "1x", "{pod}");
    }
}

#[test]
fn huge_pages_are_limited_by_size() {
    assert_eq!(
        [1 << 10, 64 << 10, 2 << 20, 512 << 20, 1 << 30, 16 << 30].map(huge_page_name),
        ["1KB", "64KB", "2MB", "512MB", "1GB", "16GB"]
    );
    let pages = json!({"limits": {"hugepages-2Mi": "4Mi", "memory": "1Gi"}});
    let p = spec(
        json!({"containers": [{"name": "a", "resources": pages}, {"name": "b", "resources": pages}]}),
    );
    assert_eq!(pod_huge_pages(&p), Ok(BTreeMap::from([(2 << 20, 8 << 20)])));
    let mut ctx = NodeContext::new("n", "/r");
    ctx.hugepage_sizes = vec![2 << 20, 1 << 30];
    let r = container_linux_resources(&p, &p.containers()[0], &ctx).unwrap();
    let limits: Vec<_> = r
        .hugepage_limits
        .iter()
        .map(|l| (l.page_size.as_str(), l.limit))
        .collect();
    assert_eq!(limits, [("2MB", 4 << 20), ("1GB", 0)]);
}

#[test]
fn a_container_without_limits_is_told_its_pods() {
    let p = spec(json!({
        "resources": {"limits": {"cpu": "2", "memory": "64Mi"}},
        "containers": [{"name": "a"}, {"name": "b", "resources": {"limits": {"cpu": "1", "memory": "8Mi"}}}],
    }));
    let ctx = NodeContext::new("n", "/r");
    let of = |index: usize| {
        let r = container_linux_resources(&p, &p.containers()[index], &ctx).unwrap();
        (r.cpu_shares, r.cpu_quota, r.memory_limit_in_bytes)
    };
    assert_eq!(of(0), (2048, 200_000, 64 << 20));
    assert_eq!(of(1), (1024, 100_000, 8 << 20));
}

#[test]
fn memory_is_protected_by_class_and_throttled_below_the_limit() {
    use QosClass::{BestEffort, Burstable, Guaranteed};
    let rules = MemoryRules {
        throttling: Some(900_000),
        tiered: true,
        for_pods: 10_000_000,
        page: 4096,
        swap: None,
    };
    let of = |class, request, limit, rules: MemoryRules| {
        let all = memory_qos(class, request, limit, &rules).into_iter();
        let all: Vec<_> = all.map(|(file, value)| format!("{file}={value}")).collect();
        all.join(" ")
    };
    let mega = 1_000_000;
    for (class, request, limit, wanted) in [
        (
            Burstable,
            mega,
            Some(2 * mega),
            "memory.high=1896448 memory.low=1000000",
        ),
        (
            Burstable,
            mega,
            None,
            "memory.high=9097216 memory.low=1000000",
        ),
        (Burstable, mega, Some(mega), "memory.low=1000000"),
        (Guaranteed, mega, Some(mega), "memory.min=1000000"),
        (BestEffort, 0, None, "memory.high=8998912"),
    ] {
        assert_eq!(of(class, request, limit, rules), wanted);
    }
    let unset = MemoryRules {
        throttling: None,
        tiered: false,
        ..rules
    };
    assert_eq!(of(Burstable, mega, Some(2 * mega), unset), "");
}

#[test]
fn a_container_is_scored_by_the_memory_that_the_machine_has_now() {
    let pod = pod(json!([{"name": "c", "resources": {"requests": {"memory": "1Gi"}}}]));
    let ctx = NodeContext::new("n", "/r");
    let score = || {
        let resources = container_linux_resources(&pod, &pod.containers()[0], &ctx).unwrap();
        resources.oom_score_adj
    };
    assert_eq!(score(), 999, "no request is a part of what is not known");
    for (gib, wanted) in [(2, 500), (4, 750)] {
        let memory = gib << 30;
        ctx.machine.set(MachineFacts {
            size: Some(MemorySize { memory, swap: 0 }),
            ..MachineFacts::default()
        });
        assert_eq!(score(), wanted, "{gib} GiB");
    }
}

#[test]
fn swap_follows_the_request_of_burstable_containers() {
    let swap_of = |resources: serde_json::Value, priority: i32, swap: Option<u64>| {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "ns", "uid": "u"},
            "spec": {"priority": priority, "containers": [{"name": "c", "resources": resources}]},
        }))
        .unwrap();
        let mut ctx = NodeContext::new("n", "/r");
        ctx.cgroup_v2 = true;
        ctx.swap_controller = true;
        let size = swap.unwrap_or(0);
        ctx.machine.set(MachineFacts {
            size: Some(MemorySize {
                memory: 1000,
                swap: size,
            }),
            rules: MemoryRules {
                swap,
                ..MemoryRules::default()
            },
            ..MachineFacts::default()
        });
        let resources = container_linux_resources(&pod, &pod.containers()[0], &ctx).unwrap();
        resources.unified["memory.swap.max"].clone()
    };
    let half = json!({"requests": {"memory": "500"}, "limits": {"memory": "600"}});
    let same = json!({"requests": {"memory": "500", "cpu": "1"}, "limits": {"memory": "500"}});
    for (resources, priority, swap, wanted) in [
        (half.clone(), 0, Some(301), "150"),
        (half.clone(), 0, None, "0"),
        (half, 2_000_000_000, Some(301), "0"),
        (same, 0, Some(301), "0"),
        (json!({}), 0, Some(301), "0"),
    ] {
        assert_eq!(
            swap_of(resources.clone(), priority, swap),
            wanted,
            "{resources}"
        );
    }
}

#[test]
fn the_quota_is_lifted_by_the_assignment_and_not_by_the_spec() {
    let amounts = json!({"cpu": "2", "memory": "1Gi"});
    let of = pod(json!([{"name": "a", "resources": {"limits": amounts, "requests": amounts}}]));
    let mut ctx = NodeContext::new("n", "/r");
    let linux = |ctx: &NodeContext| {
        let mut linux = container_linux_resources(&of, &of.containers()[0], ctx).unwrap();
        let before = linux.cpu_quota;
        lift_quota(&mut linux);
        (before, linux.cpu_quota)
    };
    assert_eq!(linux(&ctx), (200_000, -1));
    let dns = v1::DnsConfig::default();
    let sandbox = crate::kuberuntime::sandbox_config::build(&of, 0, "/p", dns, &ctx).unwrap();
    assert_eq!(sandbox.linux.unwrap().resources.unwrap().cpu_quota, 200_000);
    ctx.cpu_cfs_quota = false;
    assert_eq!(linux(&ctx), (0, 0));
}
