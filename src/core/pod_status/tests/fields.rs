//! Addresses, resources, volume mounts, messages, order: what a status says beside states.

use super::super::*;
use super::support::*;

#[test]
fn address_table() {
    let v4 = || vec!["192.0.2.1".to_owned()];
    let v6 = || vec!["2001:db8::1".to_owned()];
    let both = || [v4(), v6()].concat();
    let both6 = || [v6(), v4()].concat();
    let none: [&str; 0] = [];
    for (name, host, network, ips, told, want) in [
        (
            "one",
            v4(),
            false,
            vec!["10.0.0.1"],
            vec![],
            vec!["10.0.0.1"],
        ),
        (
            "as the node: IPv4 first",
            both(),
            false,
            vec!["fd00::1", "10.0.0.1"],
            vec![],
            vec!["10.0.0.1", "fd00::1"],
        ),
        (
            "as the node: IPv6 first",
            both6(),
            false,
            vec!["10.0.0.1", "fd00::1"],
            vec![],
            vec!["fd00::1", "10.0.0.1"],
        ),
        (
            "one of each family",
            v4(),
            false,
            vec!["10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2"],
            vec![],
            vec!["10.0.0.1", "fd00::1"],
        ),
        (
            "the only family there is",
            v4(),
            false,
            vec!["fd00::1"],
            vec![],
            vec!["fd00::1"],
        ),
        (
            "no node address yet",
            vec![],
            false,
            vec!["fd00::1", "10.0.0.1"],
            vec![],
            vec!["10.0.0.1", "fd00::1"],
        ),
        (
            "in one spelling",
            v6(),
            false,
            vec!["FD00:0:0::1"],
            vec![],
            vec!["fd00::1"],
        ),
        ("not an address", v4(), false, vec!["x"], vec![], vec![]),
        (
            "told before",
            v4(),
            false,
            vec![],
            vec!["10.0.0.9"],
            vec!["10.0.0.9"],
        ),
        (
            "newer than told",
            v4(),
            false,
            vec!["10.0.0.1"],
            vec!["10.0.0.9"],
            vec!["10.0.0.1"],
        ),
        (
            "the node's",
            both(),
            true,
            vec![],
            vec![],
            vec!["192.0.2.1", "2001:db8::1"],
        ),
        (
            "the node's, kept",
            vec!["192.0.2.7".into()],
            true,
            vec![],
            vec!["192.0.2.1"],
            vec!["192.0.2.1"],
        ),
        (
            "the node's, second added",
            both(),
            true,
            vec![],
            vec!["192.0.2.1"],
            vec!["192.0.2.1", "2001:db8::1"],
        ),
    ] {
        let mut setup = Setup::of(pod("Always", &["a"]), runtime(vec![]));
        setup.pod.spec.as_mut().unwrap().host_network = Some(network);
        setup.status.ips = ips.iter().map(|ip| (*ip).to_owned()).collect();
        setup.host_ips = host;
        let ips = told
            .into_iter()
            .map(|ip: &str| api::PodIP { ip: ip.into() });
        setup.previous = Some(api::PodStatus {
            pod_ips: Some(ips.collect()),
            ..api::PodStatus::default()
        });
        let status = setup.generate();
        let got: Vec<_> = status
            .pod_ips
            .iter()
            .flatten()
            .map(|ip| ip.ip.as_str())
            .collect();
        assert_eq!(got, want, "{name}");
        assert_eq!(status.pod_ip.as_deref(), want.first().copied(), "{name}");
    }
    let mut setup = Setup::of(pod("Always", &["a"]), runtime(vec![]));
    setup.host_ips = vec![];
    let status = setup.generate();
    let got: Vec<_> = status
        .host_ips
        .iter()
        .flatten()
        .map(|ip| ip.ip.as_str())
        .collect();
    assert_eq!((got.as_slice(), status.host_ip), (none.as_slice(), None));
}

#[test]
fn main_and_ephemeral_statuses_are_sorted_by_name_init_ones_as_in_the_spec() {
    let named = |names: [&str; 3]| names.map(|n| serde_json::json!({"name": n, "image": "img:1"}));
    let pod = pod_of(serde_json::json!({
        "initContainers": named(["z", "x", "y"]),
        "containers": named(["c", "a", "b"]),
        "ephemeralContainers": named(["f", "d", "e"]),
    }));
    let status = Setup::of(pod, wiped()).generate();
    let names: String = all_statuses(&status).map(|s| s.name.as_str()).collect();
    assert_eq!(names, "zxyabcdef");
}

#[test]
fn messages_share_the_limit_of_the_pod_over_all_kinds() {
    let long = |name: &str, code| {
        let mut c = exited(name, 0, code);
        c.message = "x".repeat(9000);
        c
    };
    let length = |status: &api::PodStatus| -> Vec<usize> {
        let ends = all_statuses(status).filter_map(|s| s.state.as_ref()?.terminated.as_ref());
        ends.map(|t| t.message.as_ref().unwrap().len()).collect()
    };
    let all = vec![long("i", 0), long("s", 0), long("m", 1)];
    let mut setup = Setup::all_kinds("Never", all);
    assert_eq!(length(&setup.generate()), [4096, 4096, 4096]);
    let debug = serde_json::json!([{"name": "e", "image": "img:1"}]);
    setup.pod.spec.as_mut().unwrap().ephemeral_containers = serde_json::from_value(debug).ok();
    setup.status.containers.push(long("e", 0));
    assert_eq!(length(&setup.generate()), [3072, 3072, 3072, 3072]);
}

#[test]
fn resources_are_those_in_force_while_it_runs_and_those_allocated_else() {
    let requests = |cpu: &str| serde_json::json!({"requests": {"cpu": cpu}});
    let mut setup = Setup::of(pod("Never", &["a"]), wiped());
    setup.pod.spec.as_mut().unwrap().containers[0].resources =
        serde_json::from_value(requests("1")).ok();
    let told = |setup: &Setup| {
        let status = serde_json::to_value(setup.generate()).unwrap();
        let container = &status["containerStatuses"][0];
        (
            container["resources"].clone(),
            container["allocatedResources"].clone(),
        )
    };
    let nothing = serde_json::Value::Null;
    assert_eq!(
        told(&setup),
        (nothing.clone(), nothing.clone()),
        "there is no container yet"
    );
    setup.status = runtime(vec![running("a", 0)]);
    assert_eq!(
        told(&setup),
        (requests("1"), requests("1")["requests"].clone())
    );
    let view = crate::core::resize::ResourceView {
        allocated: serde_json::from_value(serde_json::json!({"cpu": "2"})).ok(),
        actual: serde_json::from_value(requests("1500m")).ok(),
    };
    setup.resize.containers.insert("a".into(), view);
    assert_eq!(
        told(&setup),
        (requests("1500m"), requests("2")["requests"].clone())
    );
    setup.status = runtime(vec![exited("a", 0, 0)]);
    assert_eq!(
        told(&setup),
        (requests("2"), requests("2")["requests"].clone())
    );
    setup.resize = ResizeView::default();
    setup.pod.spec.as_mut().unwrap().containers[0].resources = None;
    assert_eq!(told(&setup), (serde_json::json!({}), nothing), "none");
}

#[test]
fn volume_mounts_are_told_from_the_start_and_the_stop_signal_with_the_container() {
    let spec = serde_json::json!({"containers": [{
        "name": "a", "image": "img:1",
        "lifecycle": {"stopSignal": "SIGUSR1"},
        "volumeMounts": [
            {"name": "v", "mountPath": "/v"},
            {"name": "r", "mountPath": "/r", "readOnly": true},
            {"name": "p", "mountPath": "/p", "readOnly": true, "recursiveReadOnly": "IfPossible"},
        ],
    }]});
    let mut setup = Setup::of(pod_of(spec), wiped());
    let told = |setup: &Setup| {
        serde_json::to_value(setup.generate()).unwrap()["containerStatuses"][0].clone()
    };
    let want = serde_json::json!([
        {"name": "v", "mountPath": "/v"},
        {"name": "r", "mountPath": "/r", "readOnly": true, "recursiveReadOnly": "Disabled"},
        {"name": "p", "mountPath": "/p", "readOnly": true, "recursiveReadOnly": "Disabled"},
    ]);
    let before = told(&setup);
    assert_eq!(before["volumeMounts"], want);
    assert!(before.get("stopSignal").is_none());
    setup.status = runtime(vec![running("a", 0)]);
    let running = told(&setup);
    assert_eq!(running["volumeMounts"], want);
    assert_eq!(running["stopSignal"], "SIGUSR1");
}

#[test]
fn what_a_mount_came_to_is_told_and_kept_while_nobody_can_say() {
    let spec = serde_json::json!({"containers": [{
        "name": "a", "image": "img:1",
        "volumeMounts": [
            {"name": "r", "mountPath": "/r", "readOnly": true},
            {"name": "r", "mountPath": "/p", "readOnly": true, "recursiveReadOnly": "IfPossible"},
            {"name": "i", "mountPath": "/i"},
        ],
    }]});
    let mut setup = Setup::of(pod_of(spec), wiped());
    setup.recursive_read_only = Some(true);
    setup.volume_images = BTreeMap::from([("i".to_owned(), "sha256:1".to_owned())]);
    let mounts = |status: &api::PodStatus| {
        let containers = serde_json::to_value(&status.container_statuses).unwrap();
        containers[0]["volumeMounts"].clone()
    };
    let told = setup.generate();
    assert_eq!(
        mounts(&told),
        serde_json::json!([
            {"name": "r", "mountPath": "/r", "readOnly": true, "recursiveReadOnly": "Disabled"},
            {"name": "r", "mountPath": "/p", "readOnly": true, "recursiveReadOnly": "Enabled"},
            {"name": "i", "mountPath": "/i", "volumeStatus": {"image": {"imageRef": "sha256:1"}}},
        ])
    );
    // As after a restart of the agent.
    setup.previous = Some(told.clone());
    setup.recursive_read_only = None;
    setup.volume_images.clear();
    assert_eq!(mounts(&setup.generate()), mounts(&told));
    setup.recursive_read_only = Some(false);
    assert_eq!(
        mounts(&setup.generate())[1]["recursiveReadOnly"],
        "Disabled"
    );
}

#[test]
fn what_others_own_is_carried_over() {
    let theirs: api::PodStatus = serde_json::from_value(serde_json::json!({
        "nominatedNodeName": "n2",
        "resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "gpu-1"}],
        "extendedResourceClaimStatus": {"resourceClaimName": "extended-1", "requestMappings": []},
    }))
    .unwrap();
    let of_others = |status: &api::PodStatus| {
        (
            status.nominated_node_name.clone(),
            status.resource_claim_statuses.clone(),
            status.extended_resource_claim_status.clone(),
        )
    };
    let mut setup = Setup::of(pod("Always", &["a"]), runtime(vec![]));
    setup.previous = Some(theirs.clone());
    assert_eq!(
        of_others(&setup.generate()),
        of_others(&theirs),
        "as it was told"
    );
    setup.pod.status = Some(api::PodStatus::default());
    assert_eq!(
        of_others(&setup.generate()),
        (None, None, None),
        "the API server has the say"
    );
}
