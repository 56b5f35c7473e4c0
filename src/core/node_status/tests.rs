use serde_json::json;

use super::*;
use crate::core::devices::Amount;
use crate::core::testkit::at;

fn settings() -> NodeSettings {
    NodeSettings::new("n1")
}

fn facts() -> Facts {
    Facts {
        machine: Machine {
            cpus: 4,
            memory: Some(8 << 30),
            swap: Some(0),
            hugepages: BTreeMap::from([(2 << 20, 64 << 20)]),
            ephemeral_storage: Some(100 << 30),
            machine_id: "m1".into(),
            system_uuid: "s1".into(),
            boot_id: "b1".into(),
            kernel_version: "6.1".into(),
            os_image: "Debian".into(),
        },
        runtime: Some(RuntimeFacts {
            version: "containerd://1.6.20".into(),
            ..RuntimeFacts::default()
        }),
        images: Some(Arc::new(vec![ContainerImage {
            names: Some(vec!["img:1".into()]),
            size_bytes: Some(5),
        }])),
        addresses: vec!["10.0.0.1".parse().unwrap()],
        volumes_in_use: None,
        devices: Default::default(),
    }
}

fn not_ready(error: &str, starting: bool) -> Readiness {
    Readiness {
        errors: vec![error.to_owned()],
        starting,
    }
}

fn run(base: &Node, readiness: &Readiness, memory: &Memory, seconds: i64) -> Computed {
    compute(
        base,
        &settings(),
        &facts(),
        Pressure::default(),
        readiness,
        memory,
        at(seconds),
    )
}

/// A node that is registered and Ready since second 0.
fn ready_node() -> Node {
    let first = run(
        &initial_node(&settings()),
        &Readiness::default(),
        &Memory::default(),
        0,
    );
    first.node
}

fn status(node: &Node) -> &k8s_openapi::api::core::v1::NodeStatus {
    node.status.as_ref().unwrap()
}

fn condition<'a>(node: &'a Node, type_: &str) -> &'a NodeCondition {
    let mut all = status(node).conditions.as_ref().unwrap().iter();
    all.find(|c| c.type_ == type_).unwrap()
}

fn reasons(computed: &Computed) -> Vec<&str> {
    computed.events.iter().map(|e| e.reason.as_str()).collect()
}

#[test]
fn the_version_is_a_semantic_version_of_the_release_it_behaves_like() {
    let (release, own) = KUBELET_VERSION.split_once('-').unwrap();
    assert_eq!(release, "v1.36.0");
    let parts: Vec<_> = own.split('.').collect();
    assert_eq!(parts[0], "holdfast");
    for number in &parts[1..] {
        let parsed: u32 = number.parse().unwrap();
        assert_eq!(parsed.to_string(), *number);
    }
}

#[test]
fn a_node_is_registered_with_labels_taints_and_annotation() {
    let mut settings = settings();
    settings.labels.insert("disk".into(), "ssd".into());
    settings.schedulable = false;
    settings.external_cloud_provider = true;
    settings.provider_id = Some("cloud://1".into());
    let node = serde_json::to_value(initial_node(&settings)).unwrap();
    let arch = architecture();
    assert_eq!(
        node,
        json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {
                "name": "n1",
                "labels": {
                    "disk": "ssd", "kubernetes.io/arch": arch, "kubernetes.io/hostname": "n1",
                    "kubernetes.io/os": "linux",
                },
                "annotations": {"volumes.kubernetes.io/controller-managed-attach-detach": "true"},
            },
            "spec": {
                "providerID": "cloud://1", "unschedulable": true,
                "taints": [
                    {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"},
                    {"key": "node.cloudprovider.kubernetes.io/uninitialized", "value": "true", "effect": "NoSchedule"},
                ],
            },
        })
    );
}

#[test]
fn a_host_name_that_fits_into_no_label_keeps_nobody_from_the_node() {
    for (length, label) in [(63, true), (64, false)] {
        let name = "n".repeat(length);
        let settings = NodeSettings::new(name.clone());
        let made = initial_node(&settings);
        let labels = made.metadata.labels.clone().unwrap();
        let wanted = label.then_some(&name);
        assert_eq!(labels.get("kubernetes.io/hostname"), wanted, "{length}");
        // Nor is it put there later.
        assert_eq!(reconcile(&settings, &made).metadata.labels, Some(labels));
        assert_eq!(correct_labels(&settings, &mut made.clone()), []);
    }
}

#[test]
fn a_taint_that_was_given_is_not_added_twice_and_others_do_not_count_for_it() {
    let taint = |key: &str, effect: &str| Taint {
        key: key.to_owned(),
        effect: effect.to_owned(),
        ..Taint::default()
    };
    let unschedulable = "node.kubernetes.io/unschedulable";
    let mut settings = settings();
    settings.schedulable = false;
    for (given, total) in [
        (vec![taint("dedicated", "NoSchedule")], 2),
        (vec![taint(unschedulable, "NoExecute")], 2),
        (vec![taint(unschedulable, "NoSchedule")], 1),
    ] {
        settings.taints.clone_from(&given);
        let taints = initial_node(&settings).spec.unwrap().taints.unwrap();
        assert_eq!(taints.len(), total, "{given:?}");
        assert_eq!(taints[0], given[0]);
        let last = taints.last().unwrap();
        assert_eq!((&*last.key, &*last.effect), (unschedulable, "NoSchedule"));
    }
}

#[test]
fn an_existing_node_keeps_what_users_set() {
    let mut existing = ready_node();
    let labels = existing.metadata.labels.as_mut().unwrap();
    labels.insert("user".into(), "own".into());
    labels.insert("kubernetes.io/hostname".into(), "old".into());
    existing.metadata.annotations = None;
    let mut settings = settings();
    settings.labels.insert("disk".into(), "ssd".into());
    settings.schedulable = false;
    let node = reconcile(&settings, &existing);
    let labels = node.metadata.labels.unwrap();
    assert_eq!(labels["user"], "own");
    assert_eq!(labels["kubernetes.io/hostname"], "n1");
    assert!(!labels.contains_key("disk"));
    assert_eq!(node.metadata.annotations.unwrap()[ATTACH_DETACH], "true");
    assert_eq!(node.spec, existing.spec);
}

#[test]
fn allocatable_is_what_reservations_and_eviction_leave() {
    let mut settings = settings();
    let reserve = |cpu_milli: i128, memory: i128| {
        BTreeMap::from([
            ("cpu".to_owned(), cpu_milli * 1_000_000),
            ("memory".to_owned(), memory * 1_000_000_000),
        ])
    };
    settings.system_reserved = reserve(100, 1 << 30);
    settings.kube_reserved = reserve(150, 0);
    let capacity = resources::capacity(None, &settings, &facts().machine);
    let left = resources::allocatable(&capacity, &settings, &facts().machine);
    let text = |list: &resources::ResourceList, name: &str| list[name].0.clone();
    assert_eq!(text(&capacity, "cpu"), "4");
    assert_eq!(text(&capacity, "memory"), "8Gi");
    assert_eq!(text(&capacity, "hugepages-2Mi"), "64Mi");
    assert_eq!(text(&capacity, "ephemeral-storage"), "100Gi");
    assert_eq!(text(&capacity, "pods"), "110");
    assert_eq!(text(&left, "cpu"), "3750m");
    // 8 GiB − 1 GiB reserved − 100 MiB eviction − 64 MiB huge pages
    assert_eq!(text(&left, "memory"), "7004Mi");
    assert_eq!(text(&left, "hugepages-2Mi"), "64Mi");
    let storage = crate::types::quantity::nanos(&text(&left, "ephemeral-storage")).unwrap();
    let part = storage as f64 / 1e9 / f64::from(100 << 20) / 1024.0;
    assert!((part - 0.9).abs() < 1e-6, "{part}");
}

#[test]
fn memory_that_cannot_be_read_stays_as_the_node_shows_it() {
    let mut settings = settings();
    settings.eviction_memory = EvictionThreshold::Fraction(0.25);
    let mut machine = facts().machine;
    machine.memory = None;
    machine.hugepages.clear();
    let none = resources::capacity(None, &settings, &machine);
    assert!(!none.contains_key("memory"), "{none:?}");
    assert!(!resources::allocatable(&none, &settings, &machine).contains_key("memory"));
    let known = BTreeMap::from([("memory".to_owned(), quantity("4Gi"))]);
    let capacity = resources::capacity(Some(&known), &settings, &machine);
    assert_eq!(capacity["memory"].0, "4Gi");
    let left = resources::allocatable(&capacity, &settings, &machine);
    assert_eq!(left["memory"].0, "3Gi");
}

#[test]
fn allocatable_is_never_negative_and_foreign_resources_stay() {
    let mut settings = settings();
    settings.system_reserved = BTreeMap::from([("memory".to_owned(), i128::from(u64::MAX))]);
    settings.eviction_memory = EvictionThreshold::Fraction(1.0);
    settings.pods_per_core = 10;
    for (max, of_one, cpus, want) in [
        (110, 0, 2, 110),
        (110, 10, 2, 20),
        (110, 10, 64, 110),
        (u32::MAX, u32::MAX, u64::MAX, u64::from(u32::MAX)),
    ] {
        assert_eq!(pod_capacity(max, of_one, cpus), want);
    }
    let known = BTreeMap::from([
        ("example.com/gpu".to_owned(), quantity("2")),
        ("hugepages-1Gi".to_owned(), quantity("1Gi")),
    ]);
    let capacity = resources::capacity(Some(&known), &settings, &facts().machine);
    let left = resources::allocatable(&capacity, &settings, &facts().machine);
    assert_eq!(left["memory"].0, "0");
    assert_eq!(left["example.com/gpu"].0, "2");
    assert_eq!(left["pods"].0, "40");
    assert!(!capacity.contains_key("hugepages-1Gi"));
    let amount = Amount {
        capacity: 3,
        allocatable: 1,
    };
    let devices = Amounts::from([("example.com/gpu".to_owned(), amount)]);
    let (capacity, left) = resources::with_devices(capacity, left, &devices);
    assert_eq!(capacity["example.com/gpu"].0, "3");
    assert_eq!(left["example.com/gpu"].0, "1");
    let mut node = initial_node(&settings);
    assert!(devices_differ(&node, &devices));
    let status = node.status.get_or_insert_default();
    (status.capacity, status.allocatable) = (Some(capacity), Some(left));
    assert!(!devices_differ(&node, &devices));
}

fn quantity(text: &str) -> k8s_openapi::apimachinery::pkg::api::resource::Quantity {
    k8s_openapi::apimachinery::pkg::api::resource::Quantity(text.to_owned())
}

#[test]
fn a_new_node_has_four_conditions_and_ready_is_last() {
    let first = run(
        &initial_node(&settings()),
        &not_ready("no runtime", true),
        &Memory::default(),
        0,
    );
    let conditions = status(&first.node).conditions.as_ref().unwrap();
    let types: Vec<_> = conditions.iter().map(|c| c.type_.as_str()).collect();
    assert_eq!(
        types,
        ["MemoryPressure", "DiskPressure", "PIDPressure", "Ready"]
    );
    let ready = condition(&first.node, "Ready");
    assert_eq!(ready.status, "False");
    assert_eq!(ready.reason.as_deref(), Some("KubeletNotReady"));
    assert_eq!(ready.message.as_deref(), Some("no runtime"));
    assert_eq!(
        reasons(&first),
        [
            "NodeHasSufficientMemory",
            "NodeHasNoDiskPressure",
            "NodeHasSufficientPID"
        ]
    );
}

#[test]
fn a_start_concludes_nothing_but_readiness() {
    let base = ready_node();
    for status in ["True", "Unknown"] {
        let mut base = base.clone();
        let conditions = base.status.as_mut().unwrap().conditions.as_mut().unwrap();
        conditions[3].status = status.to_owned();
        let starting = run(&base, &not_ready("not yet", true), &Memory::default(), 5);
        assert!(starting.events.is_empty());
        assert!(change(&base, &starting.node).substance.is_null());
        let later = run(&base, &not_ready("not yet", false), &Memory::default(), 31);
        assert_eq!(reasons(&later), ["NodeNotReady"]);
        assert_eq!(condition(&later.node, "Ready").status, "False");
    }
}

#[test]
fn a_transition_has_one_time_and_one_event_until_it_is_heard_of() {
    let base = ready_node();
    let down = |memory: &Memory, s| run(&base, &not_ready("down", false), memory, s);
    let first = down(&Memory::default(), 100);
    assert_eq!(reasons(&first), ["NodeNotReady"]);
    let second = down(&first.memory, 110);
    assert!(second.events.is_empty());
    let (a, b) = (
        condition(&first.node, "Ready"),
        condition(&second.node, "Ready"),
    );
    assert_eq!(a.last_transition_time, b.last_transition_time);
    assert_ne!(a.last_heartbeat_time, b.last_heartbeat_time);
    // It is over before anybody heard of it: the old condition goes on.
    let back = run(&base, &Readiness::default(), &second.memory, 120);
    assert_eq!(reasons(&back), ["NodeReady"]);
    assert!(back.memory.pending.is_empty());
    assert!(change(&base, &back.node).substance.is_null());
}

#[test]
fn pressure_is_a_condition_with_its_event() {
    let base = ready_node();
    let pressure = Pressure {
        disk: true,
        ..Pressure::default()
    };
    let (ready, memory) = (Readiness::default(), Memory::default());
    let computed = compute(
        &base,
        &settings(),
        &facts(),
        pressure,
        &ready,
        &memory,
        at(9),
    );
    assert_eq!(reasons(&computed), ["NodeHasDiskPressure"]);
    let disk = condition(&computed.node, "DiskPressure");
    assert_eq!(disk.reason.as_deref(), Some("KubeletHasDiskPressure"));
    assert_eq!(disk.message.as_deref(), Some("kubelet has disk pressure"));
}

#[test]
fn several_errors_are_joined_once_each() {
    let readiness = Readiness {
        errors: vec!["a".into(), "b".into(), "a".into()],
        starting: false,
    };
    let computed = run(&ready_node(), &readiness, &Memory::default(), 50);
    let ready = condition(&computed.node, "Ready");
    assert_eq!(ready.message.as_deref(), Some("[a, b]"));
}

#[test]
fn a_reboot_is_told_once() {
    let base = ready_node();
    let mut facts = facts();
    facts.machine.boot_id = "b2".into();
    let again = |memory: &Memory| {
        let (pressure, ready) = (Pressure::default(), Readiness::default());
        compute(&base, &settings(), &facts, pressure, &ready, memory, at(60))
    };
    let first = again(&Memory::default());
    assert_eq!(reasons(&first), ["Rebooted"]);
    assert_eq!(
        first.events[0].message,
        "Node n1 has been rebooted, boot id: b2"
    );
    assert!(again(&first.memory).events.is_empty());
}

#[test]
fn a_cordon_and_its_end_are_told() {
    let mut base = ready_node();
    base.spec.get_or_insert_default().unschedulable = Some(true);
    let cordoned = run(&base, &Readiness::default(), &Memory::default(), 1);
    assert_eq!(reasons(&cordoned), ["NodeNotSchedulable"]);
    assert_eq!(
        cordoned.events[0].message,
        "Node n1 status is now: NodeNotSchedulable"
    );
    assert!(
        run(&base, &Readiness::default(), &cordoned.memory, 2)
            .events
            .is_empty()
    );
    let ended = run(&ready_node(), &Readiness::default(), &cordoned.memory, 3);
    assert_eq!(reasons(&ended), ["NodeSchedulable"]);
}

#[test]
fn what_is_not_known_stays_as_it_is() {
    let mut base = ready_node();
    base.status.as_mut().unwrap().volumes_in_use = Some(vec!["v".into()]);
    let facts = Facts {
        machine: facts().machine,
        ..Facts::default()
    };
    let (pressure, ready) = (Pressure::default(), Readiness::default());
    let computed = compute(
        &base,
        &settings(),
        &facts,
        pressure,
        &ready,
        &Memory::default(),
        at(7),
    );
    assert!(change(&base, &computed.node).substance.is_null());
}

#[test]
fn nothing_changed_means_no_patch_until_the_report_is_due() {
    let base = ready_node();
    let computed = run(&base, &Readiness::default(), &Memory::default(), 290);
    let change = change(&base, &computed.node);
    let due = |now| {
        needs_update(
            &change,
            &Value::Null,
            Some(at(0)),
            at(now),
            Duration::from_secs(300),
        )
    };
    assert_eq!(due(299), Due::Not);
    assert_eq!(due(300), Due::Report);
    assert_eq!(
        needs_update(&change, &Value::Null, None, at(0), Duration::from_secs(300)),
        Due::Report
    );
    let heartbeats = change.body["status"]["conditions"].as_array().unwrap();
    assert_eq!(heartbeats.len(), 4);
    assert!(
        heartbeats
            .iter()
            .all(|c| c["lastHeartbeatTime"].is_string())
    );
}

#[test]
fn the_patch_holds_what_changed_and_replaces_addresses() {
    let mut base = ready_node();
    let own = base.status.as_mut().unwrap();
    own.addresses.as_mut().unwrap()[0].address = "10.0.0.9".into();
    own.images = None;
    let capacity = own.capacity.as_mut().unwrap();
    capacity.insert("cpu".into(), quantity("2"));
    capacity.insert("hugepages-1Gi".into(), quantity("0"));
    // The same amount, written otherwise.
    capacity.insert("memory".into(), quantity("8192Mi"));
    own.conditions.as_mut().unwrap().insert(
        0,
        NodeCondition {
            type_: "NetworkUnavailable".into(),
            status: "False".into(),
            ..NodeCondition::default()
        },
    );
    let computed = run(&base, &Readiness::default(), &Memory::default(), 20);
    let change = change(&base, &computed.node);
    let mut body = change.body["status"].clone();
    assert_eq!(body["conditions"].as_array().unwrap().len(), 4);
    body.as_object_mut().unwrap().remove("conditions");
    assert_eq!(
        body,
        json!({
            "capacity": {"cpu": "4", "hugepages-1Gi": null},
            "images": [{"names": ["img:1"], "sizeBytes": 5}],
            "addresses": [
                {"type": "InternalIP", "address": "10.0.0.1"}, {"type": "Hostname", "address": "n1"},
                {"$patch": "replace"},
            ],
            "$setElementOrder/conditions": [
                {"type": "NetworkUnavailable"}, {"type": "MemoryPressure"}, {"type": "DiskPressure"},
                {"type": "PIDPressure"}, {"type": "Ready"},
            ],
        })
    );
}

#[test]
fn a_machine_without_swap_has_no_swap_status() {
    // Kubernetes 1.36 refuses a capacity of zero: `metadata.nodeSwapStatus.capacity: must be greater than zero`.
    for (machine, shown, wanted) in [
        (Some(0), None, None),
        (Some(0), Some(4096), None),
        (Some(4096), None, Some(4096)),
        (Some(4096), Some(0), Some(4096)),
        // What could not be read stays as it is, unless it could never be written.
        (None, Some(4096), Some(4096)),
        (None, Some(0), None),
        (Some(u64::MAX), Some(4096), None),
    ] {
        let mut base = ready_node();
        let info = base.status.as_mut().unwrap().node_info.as_mut().unwrap();
        info.swap = shown.map(|capacity| NodeSwapStatus {
            capacity: Some(capacity),
        });
        let mut facts = facts();
        facts.machine.swap = machine;
        let computed = compute(
            &base,
            &settings(),
            &facts,
            Pressure::default(),
            &Readiness::default(),
            &Memory::default(),
            at(5),
        );
        let info = status(&computed.node).node_info.as_ref().unwrap();
        let swap = info.swap.as_ref();
        assert_eq!(
            swap.map(|swap| swap.capacity.unwrap()),
            wanted,
            "{machine:?} {shown:?}"
        );
        let change = change(&base, &computed.node);
        let patch = &change.body["status"]["nodeInfo"];
        if wanted.is_none() && shown.is_some() {
            assert_eq!(*patch, json!({"swap": null}));
        }
    }
}

#[test]
fn declared_features_are_in_the_order_the_api_demands_and_replace_what_is_shown() {
    const ALL: [&str; 5] = [
        "ExtendWebSocketsToKubelet",
        "GuaranteedQoSPodCPUResize",
        "InPlacePodLevelResourcesVerticalScaling",
        "InPlacePodVerticalScalingInitContainers",
        "RestartAllContainersOnContainerExits",
    ];
    assert!(ALL.is_sorted_by(|a, b| a < b));
    let mut base = ready_node();
    assert_eq!(status(&base).declared_features.clone().unwrap(), ALL);
    let mut of_static = settings();
    of_static.static_cpus = true;
    let without: Vec<_> = ALL.into_iter().filter(|f| *f != ALL[1]).collect();
    assert_eq!(declared_features(&of_static), without);
    base.status.as_mut().unwrap().declared_features = Some(vec!["OfAKubelet".to_owned()]);
    let computed = run(&base, &Readiness::default(), &Memory::default(), 5);
    assert_eq!(
        change(&base, &computed.node).body["status"]["declaredFeatures"],
        json!(ALL)
    );
}

#[test]
fn what_an_old_server_drops_is_not_sent_again_and_again() {
    let base = ready_node();
    let mut facts = facts();
    facts.runtime.as_mut().unwrap().features = Some(NodeFeatures {
        supplemental_groups_policy: Some(true),
    });
    let (pressure, ready) = (Pressure::default(), Readiness::default());
    let computed = compute(
        &base,
        &settings(),
        &facts,
        pressure,
        &ready,
        &Memory::default(),
        at(5),
    );
    let change_now = change(&base, &computed.node);
    let interval = Duration::from_secs(300);
    let due = |residue: &Value| needs_update(&change_now, residue, Some(at(0)), at(5), interval);
    assert_eq!(due(&Value::Null), Due::Changed);
    // The answer looks as before.
    assert_eq!(due(&change(&base, &computed.node).substance), Due::Not);
}

#[test]
fn a_cloud_providers_addresses_stay() {
    let mut settings = settings();
    settings.external_cloud_provider = true;
    settings.node_ips = vec!["10.0.0.1".parse().unwrap()];
    let mut base = ready_node();
    base.status.as_mut().unwrap().addresses = Some(vec![NodeAddress {
        type_: "ExternalIP".into(),
        address: "1.2.3.4".into(),
    }]);
    let (pressure, ready) = (Pressure::default(), Readiness::default());
    let memory = Memory::default();
    let computed = compute(&base, &settings, &facts(), pressure, &ready, &memory, at(5));
    assert_eq!(status(&computed.node).addresses, status(&base).addresses);
    assert_eq!(
        computed.node.metadata.annotations.unwrap()[PROVIDED_IP],
        "10.0.0.1"
    );
}

#[test]
fn a_cloud_provider_is_given_all_addresses_that_are_named_now() {
    let (pressure, ready) = (Pressure::default(), Readiness::default());
    let memory = Memory::default();
    for (external, given, want) in [
        (true, vec!["10.0.0.1", "fd00::1"], Some("10.0.0.1,fd00::1")),
        (true, vec!["::"], None),
        (true, vec![], None),
        (false, vec!["10.0.0.1"], None),
    ] {
        let mut settings = settings();
        settings.external_cloud_provider = external;
        settings.node_ips = given.iter().map(|ip| ip.parse().unwrap()).collect();
        let mut base = initial_node(&settings);
        let annotations = base.metadata.annotations.get_or_insert_default();
        annotations.insert(PROVIDED_IP.to_owned(), "192.0.2.7".to_owned());
        let computed = compute(&base, &settings, &facts(), pressure, &ready, &memory, at(5));
        let annotations = computed.node.metadata.annotations.unwrap();
        assert_eq!(
            annotations.get(PROVIDED_IP).map(String::as_str),
            want,
            "{given:?}"
        );
    }
}

#[test]
fn a_cloud_provider_gives_the_addresses_that_are_not_named() {
    let (pressure, ready) = (Pressure::default(), Readiness::default());
    let memory = Memory::default();
    for (given, internal) in [(None, false), (Some("10.0.0.1"), true), (Some("::"), true)] {
        let mut settings = settings();
        settings.external_cloud_provider = true;
        settings.node_ips = given.iter().map(|ip| ip.parse().unwrap()).collect();
        let base = initial_node(&settings);
        let computed = compute(&base, &settings, &facts(), pressure, &ready, &memory, at(5));
        let shown = status(&computed.node).addresses.clone().unwrap();
        let types: Vec<_> = shown.iter().map(|a| a.type_.as_str()).collect();
        assert_eq!(types.contains(&"InternalIP"), internal, "{given:?}");
        assert_eq!(types.last(), Some(&"Hostname"), "{given:?}");
    }
}

#[test]
fn the_largest_images_are_listed_with_at_most_five_names() {
    let image = |size, tags: &[&str]| Image {
        digests: vec![format!("d@{size}")],
        tags: tags.iter().map(|t| (*t).to_owned()).collect(),
        size,
    };
    let images = vec![
        image(1, &["small"]),
        image(9, &["a", "b", "c", "d", "e"]),
        image(5, &["middle"]),
    ];
    let listed = image_list(images.clone(), Some(2));
    assert_eq!(listed.len(), 2);
    assert_eq!(
        listed[0].names.as_deref().unwrap(),
        ["d@9", "a", "b", "c", "d"]
    );
    assert_eq!(listed[1].size_bytes, Some(5));
    assert_eq!(image_list(images, None).len(), 3);
}

#[test]
fn the_architecture_has_the_name_that_go_gives_it() {
    let want = if cfg!(target_arch = "x86_64") {
        "amd64"
    } else if cfg!(target_arch = "aarch64") {
        "arm64"
    } else {
        return assert!(!architecture().is_empty());
    };
    assert_eq!(architecture(), want);
}
