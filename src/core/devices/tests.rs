use serde_json::json;

use super::*;
use crate::core::state::TerminationCause;
use crate::core::state::{FactRecord, State, Transaction, WorkerPhase, WorkerRecord};
use crate::core::testkit::at;
use crate::types::PodUid;

const GPU: &str = "example.com/gpu";

fn set(ids: &[&str]) -> BTreeSet<String> {
    ids.iter().map(ToString::to_string).collect()
}

/// `ids` are healthy, those that begin with `-` are not; `a@1` is near to NUMA node 1.
fn devices(ids: &[&str]) -> Devices {
    let device = |id: &&str| {
        let healthy = !id.starts_with('-');
        let (id, node) = id.split_once('@').unwrap_or((id, ""));
        let numa = node.parse().ok().into_iter().collect();
        let id = id.trim_start_matches('-').to_owned();
        (id, Device { healthy, numa })
    };
    ids.iter().map(device).collect()
}

fn held(containers: &[(&str, &[&str])]) -> PodDevices {
    let mut held = PodDevices::default();
    for (container, ids) in containers {
        let allocation = Allocation {
            ids: ids
                .iter()
                .map(|id| ((*id).to_owned(), Vec::new()))
                .collect(),
            granted: None,
            outdated: None,
        };
        held = held.with(container, GPU, allocation);
    }
    held
}

#[test]
fn extended_resources_have_a_domain_that_is_not_kubernetes() {
    for good in [GPU, "a.b-c/d_e.f", "x/y"] {
        assert!(is_extended(good), "{good}");
    }
    for bad in [
        "cpu",
        "hugepages-2Mi",
        "kubernetes.io/batch",
        "a.kubernetes.io/x",
        "requests.example.com/x",
        "example.com/",
        "/x",
        "a/b/c",
        "a b/c",
    ] {
        assert!(!is_extended(bad), "{bad}");
    }
}

#[test]
fn devices_are_chosen_in_order_from_reused_preferred_and_free_ones() {
    // Devices, taken, reusable, count, affinity, preferred, chosen.
    type Case<'a> = (
        &'a [&'a str],
        &'a [&'a str],
        &'a [&'a str],
        usize,
        Option<&'a [i64]>,
        &'a [&'a str],
        Result<&'a [&'a str], (usize, usize)>,
    );
    let cases: [Case<'_>; 9] = [
        (&["c", "a", "b"], &[], &[], 2, None, &[], Ok(&["a", "b"])),
        (&["a", "-b", "c"], &[], &[], 2, None, &[], Ok(&["a", "c"])),
        (&["a", "b", "c"], &["a"], &[], 1, None, &[], Ok(&["b"])),
        (
            &["a", "b", "c"],
            &["c"],
            &["c"],
            2,
            None,
            &[],
            Ok(&["a", "c"]),
        ),
        (&["a", "b", "c"], &[], &[], 1, None, &["c", "x"], Ok(&["c"])),
        (&["a", "b"], &["b"], &[], 2, None, &["b"], Err((2, 1))),
        (&["a", "-b"], &["b"], &["b"], 2, None, &[], Err((2, 1))),
        (
            &["a@0", "b@1", "c@1", "d"],
            &[],
            &[],
            1,
            Some(&[1]),
            &["a", "c"],
            Ok(&["c"]),
        ),
        (
            &["a@0", "b@1", "d"],
            &[],
            &[],
            2,
            Some(&[1]),
            &["d"],
            Ok(&["b", "d"]),
        ),
    ];
    for (number, (listed, taken, reusable, count, affinity, preferred, want)) in
        cases.into_iter().enumerate()
    {
        let affinity = affinity.map(|nodes| nodes.iter().copied().collect());
        let request = Request {
            devices: &devices(listed),
            taken: &set(taken),
            reusable: &set(reusable),
            count,
            affinity: affinity.as_ref(),
        };
        let want = want.map(set).map_err(|(requested, available)| Shortage {
            requested,
            available,
        });
        assert_eq!(choose(&request, &set(preferred)), want, "case {number}");
    }
}

#[test]
fn plugins_are_asked_about_aligned_devices_when_these_suffice() {
    let listed = devices(&["a@0", "b@1", "c@1", "d@1", "e"]);
    let (taken, reusable, affinity) = (set(&["d"]), set(&["d"]), BTreeSet::from([1]));
    let hint = |count| {
        hint_of(&Request {
            devices: &listed,
            taken: &taken,
            reusable: &reusable,
            count,
            affinity: Some(&affinity),
        })
    };
    assert_eq!(hint(1), None, "what is taken over suffices");
    let two = hint(2).unwrap();
    assert_eq!(two.available, set(&["b", "c", "d"]));
    assert_eq!((two.must_include, two.size), (set(&["d"]), 2));
    assert_eq!(hint(3).unwrap().available, set(&["a", "b", "c", "d", "e"]));
    assert_eq!(hint(6), None, "there are too few");
}

#[test]
fn topology_hints_prefer_the_smallest_sets_of_nodes() {
    let listed = devices(&["a@0", "b@0", "c@1"]);
    let none = BTreeSet::new();
    let hints = |taken: &BTreeSet<String>, count| {
        let request = Request {
            devices: &listed,
            taken,
            reusable: &none,
            count,
            affinity: None,
        };
        let hints = topology_hints(&request).unwrap().into_iter();
        hints
            .map(|h| (h.nodes.into_iter().collect::<Vec<_>>(), h.preferred))
            .collect::<Vec<_>>()
    };
    assert_eq!(hints(&none, 2), [(vec![0], true), (vec![0, 1], false)]);
    assert_eq!(hints(&set(&["a"]), 2), [(vec![0, 1], false)]);
    assert!(hints(&set(&["a"]), 3).is_empty());
    let plain = devices(&["x"]);
    let request = Request {
        devices: &plain,
        taken: &none,
        reusable: &none,
        count: 1,
        affinity: None,
    };
    assert_eq!(topology_hints(&request), None);
}

#[test]
fn plain_init_containers_give_their_devices_on_and_others_keep_theirs() {
    let pod: Pod = serde_json::from_value(json!({"spec": {
        "initContainers": [
            {"name": "init", "resources": {"limits": {GPU: "2", "cpu": "1", "other.com/x": "1"}}},
            {"name": "side", "restartPolicy": "Always", "resources": {"limits": {GPU: "1"}}},
        ],
        "containers": [
            {"name": "main", "resources": {"limits": {GPU: "1"}}},
            {"name": "none", "resources": {"limits": {GPU: "0"}}},
        ],
    }}))
    .unwrap();
    let wanted = wanted(&pod, |resource| resource == GPU);
    let counts: Vec<_> = wanted
        .iter()
        .map(|w| (w.container.as_str(), w.counts[GPU]))
        .collect();
    assert_eq!(counts, [("init", 2), ("side", 1), ("main", 1)]);
    assert!(wanted.iter().all(|w| w.counts.len() == 1));
    let held = held(&[("init", &["a", "b"]), ("side", &["a"])]);
    let reused = |container| reusable(&wanted, &held, container, GPU);
    assert_eq!(reused("init"), set(&[]));
    assert_eq!(reused("side"), set(&["a", "b"]));
    assert_eq!(reused("main"), set(&["b"]));
}

#[test]
fn what_comes_by_a_claim_is_no_device_of_a_plugin() {
    let container = |name| json!({"name": name, "resources": {"limits": {GPU: "1"}}});
    let pod: Pod = serde_json::from_value(json!({
        "spec": {"containers": [container("claim"), container("plugin")]},
        "status": {"extendedResourceClaimStatus": {"resourceClaimName": "c", "requestMappings": [
            {"containerName": "claim", "resourceName": GPU, "requestName": "r0"},
            {"containerName": "plugin", "resourceName": "example.com/nic", "requestName": "r1"},
        ]}},
    }))
    .unwrap();
    let wanted = wanted(&pod, |_| true);
    let names: Vec<_> = wanted.iter().map(|w| w.container.as_str()).collect();
    assert_eq!(names, ["plugin"]);
}

#[test]
fn a_device_that_returns_again_while_its_plugin_is_asked_is_asked_about_again() {
    let mut inventory = Inventory::default();
    inventory.connect(GPU, 1, PluginOptions::default());
    let is_asked = |inventory: &Inventory| inventory.returned().next().is_some();
    inventory.add_returned(GPU, set(&["a"]));
    let asked_at = inventory.returns(GPU);
    inventory.add_returned(GPU, set(&["a"]));
    inventory.settle_returned(GPU, &set(&["a"]), asked_at);
    assert!(is_asked(&inventory));
    inventory.add_returned(GPU, set(&[]));
    inventory.settle_returned(GPU, &set(&["a"]), asked_at + 1);
    assert!(!is_asked(&inventory));
}

#[test]
fn a_lost_plugin_leaves_nothing_allocatable_at_once_and_no_capacity_after_five_minutes() {
    let mut inventory = Inventory::default();
    let amount = |inventory: &Inventory, s| {
        let amount = inventory.amounts(at(s))[GPU];
        (amount.capacity, amount.allocatable)
    };
    inventory.connect(GPU, 1, PluginOptions::default());
    assert_eq!(amount(&inventory, 0), (0, 0));
    assert!(inventory.list(GPU, 1, devices(&["a", "b", "-c"])));
    assert!(
        !inventory.list(GPU, 1, devices(&["a", "b", "-c"])),
        "nothing new"
    );
    assert_eq!(amount(&inventory, 1), (3, 2));
    assert_eq!(inventory.next_change(at(1)), None);
    assert_eq!(inventory.health(GPU, "a"), Health::Healthy);
    assert_eq!(inventory.health(GPU, "c"), Health::Unhealthy);
    assert_eq!(inventory.health(GPU, "gone"), Health::Unknown);
    assert_eq!(inventory.health("other.com/x", "a"), Health::Unknown);

    // The end of a former instance is no loss.
    inventory.connect(GPU, 2, PluginOptions::default());
    assert!(!inventory.disconnect(GPU, 1, at(2)));
    assert!(!inventory.list(GPU, 1, devices(&["z"])));
    assert_eq!(amount(&inventory, 2), (3, 2), "the former list counts");
    assert_eq!(inventory.health(GPU, "a"), Health::Healthy);
    assert!(inventory.usable(GPU).is_ok());
    assert!(inventory.list(GPU, 2, devices(&["a"])));
    assert_eq!(amount(&inventory, 3), (1, 1));

    assert!(inventory.disconnect(GPU, 2, at(10)));
    assert_eq!(amount(&inventory, 10), (1, 0));
    assert_eq!(inventory.next_change(at(10)).unwrap().as_secs(), 300);
    assert_eq!(amount(&inventory, 309), (1, 0));
    assert_eq!(amount(&inventory, 310), (0, 0));
    assert_eq!(inventory.next_change(at(310)), None);
    inventory.connect(GPU, 3, PluginOptions::default());
    assert_eq!(
        amount(&inventory, 311),
        (1, 0),
        "the list of a lost plugin does not count"
    );
    assert!(inventory.disconnect(GPU, 3, at(311)));
    assert!(inventory.knows(GPU), "the resource stays");
    assert_eq!(inventory.health(GPU, "a"), Health::Unknown);
}

#[test]
fn a_plugin_of_an_earlier_run_is_lost_until_it_registers() {
    let mut inventory = Inventory::default();
    let lost = |inventory: &Inventory| inventory.record(GPU, String::new()).unwrap().lost;
    let record = PluginRecord {
        devices: devices(&["a"]),
        ..PluginRecord::default()
    };
    inventory.remember(GPU, &record, at(5));
    assert_eq!(lost(&inventory), Some(at(5)), "since the start");
    let record = PluginRecord {
        lost: Some(at(3)),
        ..record
    };
    inventory.remember(GPU, &record, at(5));
    assert_eq!(lost(&inventory), Some(at(3)), "the earlier run lost it");
    assert_eq!(inventory.next_change(at(5)), None);
    inventory.connect(GPU, 1, PluginOptions::default());
    assert_eq!(lost(&inventory), None);
}

#[test]
fn the_list_of_a_replaced_plugin_counts_for_a_while_only() {
    let mut inventory = Inventory::default();
    let amount = |inventory: &Inventory| {
        let amount = inventory.amounts(at(1))[GPU];
        (amount.capacity, amount.allocatable)
    };
    inventory.connect(GPU, 1, PluginOptions::default());
    assert!(!inventory.overdue(GPU, 1), "nothing was replaced");
    assert!(inventory.list(GPU, 1, devices(&["a", "b"])));
    assert!(!inventory.overdue(GPU, 1), "it has listed");
    inventory.connect(GPU, 2, PluginOptions::default());
    assert_eq!(amount(&inventory), (2, 2));
    assert!(!inventory.overdue(GPU, 1), "it was replaced");
    assert!(inventory.overdue(GPU, 2));
    assert!(!inventory.overdue(GPU, 2), "known");
    assert_eq!(amount(&inventory), (2, 0));
    assert!(inventory.usable(GPU).is_err());
    assert_eq!(inventory.health(GPU, "a"), Health::Unknown);
    assert!(
        inventory.list(GPU, 2, devices(&["b"])),
        "it lists after all"
    );
    assert_eq!(amount(&inventory), (1, 1));
}

#[test]
fn held_devices_have_to_be_there_and_healthy() {
    let mut inventory = Inventory::default();
    let ids = ["a".to_owned(), "b".to_owned()];
    let check = |inventory: &Inventory| {
        let checked = inventory.check_held(GPU, ids.iter());
        checked.map_err(|error| error.to_string())
    };
    let said = |text: &str| Err(format!("{text} {GPU}"));
    let unregistered = "cannot allocate unregistered device";
    assert_eq!(check(&inventory), said(unregistered));
    let none = "no healthy devices present; cannot allocate unhealthy devices";
    inventory.remember(GPU, &PluginRecord::default(), at(0));
    assert_eq!(inventory.amounts(at(0))[GPU], Amount::default());
    assert_eq!(check(&inventory), said(none));
    inventory.connect(GPU, 1, PluginOptions::default());
    inventory.list(GPU, 1, devices(&["a", "-b"]));
    let error = check(&inventory).unwrap_err();
    assert!(
        error.contains("no longer healthy") && error.ends_with("(b)"),
        "{error}"
    );
    inventory.list(GPU, 1, devices(&["a", "b"]));
    assert_eq!(check(&inventory), Ok(()));
}

#[test]
fn the_first_resource_wins_a_conflict() {
    let granted = |value: &str| Granted {
        envs: [
            ("A".to_owned(), value.to_owned()),
            (format!("OF_{value}"), String::new()),
        ]
        .into(),
        mounts: vec![GrantedMount {
            container_path: "/m".to_owned(),
            host_path: value.to_owned(),
            read_only: true,
        }],
        devices: vec![GrantedDevice {
            container_path: "/dev/x".to_owned(),
            host_path: value.to_owned(),
            permissions: "rw".to_owned(),
        }],
        annotations: [("a".to_owned(), value.to_owned())].into(),
        cdi: vec!["v/c=1".to_owned(), format!("v/c={value}")],
    };
    let of = |resource: &str, value| {
        let allocation = Allocation {
            ids: BTreeMap::new(),
            granted: Some(granted(value)),
            outdated: None,
        };
        (resource.to_owned(), allocation)
    };
    let merged = merge(&[of("b.com/x", "second"), of("a.com/x", "first")].into());
    assert_eq!(merged.envs["A"], "first");
    assert!(merged.envs.contains_key("OF_second"));
    assert_eq!(merged.annotations["a"], "first");
    let hosts = (&merged.mounts, &merged.devices);
    assert_eq!((hosts.0.len(), hosts.0[0].host_path.as_str()), (1, "first"));
    assert_eq!((hosts.1.len(), hosts.1[0].host_path.as_str()), (1, "first"));
    assert_eq!(merged.cdi, ["v/c=1", "v/c=first", "v/c=second"]);
}

// Invariant POD-13.
#[test]
fn devices_of_finished_pods_are_free() {
    let mut state = State::default();
    let mut put = Transaction::new();
    for (uid, id) in [("u1", "a"), ("u2", "b"), ("u3", "c")] {
        let held = held(&[("main", &[id])]);
        put = put.put(
            format!("deviceallocations/ns/{uid}"),
            FactRecord::of(&held, at(1)),
        );
    }
    let worker = |phase| WorkerRecord {
        full_name: "p_ns".to_owned(),
        queued: at(0),
        started: None,
        phase,
        deleted: false,
        restart_requested: false,
        runtime_only: false,
    };
    let cause = TerminationCause::Completed;
    let over = WorkerPhase::Finished {
        since: at(1),
        cause,
    };
    let put = put
        .put("u1", worker(WorkerPhase::Sync))
        .put("u2", worker(over));
    for mutation in &put.mutations {
        state.apply(mutation, 1);
    }
    assert_eq!(taken(&state, GPU), Ok(set(&["a", "c"])));
    assert_eq!(taken(&state, "other.com/x"), Ok(set(&[])));
    let uids: Vec<PodUid> = PodDevices::all(&state).map(|of| of.unwrap().0).collect();
    assert_eq!(uids, [PodUid::new("u1"), PodUid::new("u3")]);
}

/// Keys and JSON are on disk: what one release has written the next one finds.
#[test]
fn records_read_back() {
    assert_eq!(plugin_key(GPU), "deviceplugins/example.com/gpu");
    let record = PluginRecord {
        socket: "/s".to_owned(),
        options: PluginOptions {
            pre_start: true,
            preferred: false,
        },
        devices: devices(&["a@1", "-b"]),
        lost: Some(at(3)),
        returned: set(&["b"]),
    };
    let mut state = State::default();
    let put = Transaction::new().put(plugin_key(GPU), FactRecord::of(&record, at(1)));
    for mutation in &put.mutations {
        state.apply(mutation, 1);
    }
    let found: Vec<_> = PluginRecord::all(&state).collect();
    assert_eq!(found, [(GPU, record)]);
    let written = br#"{"containers":{"m":{"example.com/gpu":{"ids":{"a":[1]},"granted":{"envs":{"A":"1"}}}}}}"#;
    let object = FactRecord {
        data: written.to_vec(),
        ..FactRecord::of(&PluginRecord::default(), at(1))
    };
    let pod: Pod =
        serde_json::from_value(json!({"metadata": {"namespace": "ns", "uid": "u"}})).unwrap();
    assert_eq!(allocations_key(&pod), "deviceallocations/ns/u");
    let put = Transaction::new().put(allocations_key(&pod), object);
    for mutation in &put.mutations {
        state.apply(mutation, 1);
    }
    let held = PodDevices::of(&state, &pod).unwrap().unwrap();
    assert!(held.is_granted("m", GPU));
    assert_eq!(held.allocation("m", GPU).unwrap().ids["a"], [1]);
}
