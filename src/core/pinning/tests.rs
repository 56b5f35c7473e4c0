//! Upstream's documented cases of the CPU, memory and topology managers, and what must hold of any.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::assign::{Strategy as Taking, take};
use super::hints::masks;
use super::machine::testkit::machine;
use super::*;
use crate::core::resize::{Allocations, allocation_of, of_pinned};
use crate::core::state::{
    AdmissionDecision, AdmissionRecord, CpusetRecord, MemoryBlock, Mutation, PlegRecord, PodRecord,
    Transaction, WorkerPhase, WorkerRecord, child_key,
};
use crate::core::testkit::at;
use crate::kubeletconfig::CpuOptions;
use crate::kubeletconfig::TopologyPolicy::{BestEffort, Restricted, SingleNumaNode};
use crate::types::runtime::PodStatus;
use crate::types::{ContainerId, Json, PodSource};

fn cpus(text: &str) -> CpuSet {
    text.parse().unwrap()
}

fn mask(nodes: &[u32]) -> NodeMask {
    nodes.iter().copied().collect()
}

/// One socket, one node, four cores of two threads: 0-3 and their siblings 4-7.
fn small() -> Machine {
    machine(1, 1, 4, 2, 4)
}

/// Two sockets and nodes of three cores of two threads: 0-2,6-8 and 3-5,9-11.
fn dual() -> Machine {
    machine(2, 1, 3, 2, 3)
}

fn pod(containers: &Value) -> Pod {
    let resources = |of: &Value| {
        let amounts =
            json!({"cpu": of["cpu"], "memory": of.get("memory").unwrap_or(&json!("1Gi"))});
        json!({
            "name": of["name"], "image": "i", "restartPolicy": of.get("always").map(|_| "Always"),
            "resources": {"limits": amounts, "requests": amounts},
        })
    };
    let (init, main): (Vec<&Value>, Vec<&Value>) = containers
        .as_array()
        .unwrap()
        .iter()
        .partition(|c| c.get("init").is_some());
    let all = |of: Vec<&Value>| -> Vec<Value> { of.into_iter().map(resources).collect() };
    serde_json::from_value(json!({
        "metadata": {"name": "p", "namespace": "ns", "uid": "u"},
        "spec": {"initContainers": all(init), "containers": all(main)},
    }))
    .unwrap()
}

fn one(cpu: &str) -> Pod {
    pod(&json!([{"name": "a", "cpu": cpu}]))
}

fn static_cpus(machine: Machine, reserved: &str, options: CpuOptions) -> Settings {
    Settings {
        machine,
        cpus: Some(StaticCpus {
            options,
            reserved: cpus(reserved),
        }),
        ..Settings::default()
    }
}

fn placed(pod: &Pod, settings: &Settings, taken: &Assigned) -> Result<Placement, Refusal> {
    place(pod, settings, taken, &|_| Vec::new())
}

fn assigned(uid: &str, of: &str) -> Assigned {
    let mut assigned = Assigned::default();
    let record = CpusRecord {
        containers: [("x".to_owned(), cpus(of))].into(),
    };
    assigned.cpus.insert(PodUid::new(uid), record);
    assigned
}

#[test]
fn cpus_are_taken_by_whole_units_first() {
    let quad = machine(4, 1, 2, 2, 2);
    for (what, on, free, count, wanted) in [
        ("a whole core", small(), "0-7", 2, "0,4"),
        ("a core and a thread", small(), "0-7", 3, "0-1,4"),
        ("a core that is in use", small(), "1-7", 1, "4"),
        ("all", small(), "0-7", 8, "0-7"),
        ("one socket", dual(), "0-11", 6, "0,1,2,6,7,8"),
        ("the socket with less left", dual(), "1-5,7-11", 2, "1,7"),
        (
            "whole cores over single threads",
            dual(),
            "0-5,8,10",
            4,
            "2,4,8,10",
        ),
        ("sockets and a core", quad, "0-15", 6, "0,1,2,8,9,10"),
    ] {
        let taken = take(&on, &cpus(free), count, Taking::default());
        assert_eq!(taken, Some(cpus(wanted)), "{what}");
    }
    assert_eq!(take(&small(), &cpus("0-1"), 3, Taking::default()), None);
}

#[test]
fn options_change_which_cpus_are_taken() {
    let spread = Taking {
        across_cores: true,
        ..Taking::default()
    };
    let found = take(&small(), &cpus("0-7"), 4, spread);
    assert_eq!(found, Some(cpus("0-3")), "one of each core");
    let nodes = Taking {
        across_nodes_by: Some(1),
        ..Taking::default()
    };
    // More than one node has, in equal shares.
    assert_eq!(
        take(&dual(), &cpus("0-11"), 8, nodes),
        Some(cpus("0-1,3-4,6-7,9-10"))
    );
    let found = take(&dual(), &cpus("0-11"), 4, nodes);
    assert_eq!(found, Some(cpus("0-1,6-7")), "one suffices");
    let cached = Taking {
        align_by_cache: true,
        ..Taking::default()
    };
    // Two caches of two cores; the first one has a core left, the second one both.
    let caches = machine(1, 1, 4, 2, 2);
    assert_eq!(
        take(&caches, &cpus("1-3,5-7"), 4, cached),
        Some(cpus("2-3,6-7"))
    );
    assert_eq!(
        take(&caches, &cpus("1-3,5-7"), 4, Taking::default()),
        Some(cpus("1-2,5-6"))
    );
}

#[test]
fn whole_cpus_of_guaranteed_pods_are_their_own() {
    let settings = static_cpus(small(), "0", CpuOptions::default());
    let none = Assigned::default();
    let got = |pod: &Pod| placed(pod, &settings, &none).unwrap().cpus.containers;
    assert_eq!(got(&one("2"))["a"], cpus("1,5"));
    assert!(got(&one("1500m")).is_empty(), "a fraction");
    let mut burstable = one("2");
    burstable.spec.as_mut().unwrap().containers[0]
        .resources
        .as_mut()
        .unwrap()
        .limits = None;
    assert!(got(&burstable).is_empty());
    let refusal = placed(&one("8"), &settings, &none).unwrap_err();
    assert_eq!(refusal.reason, "UnexpectedAdmissionError");
    let refusal = placed(&one("2"), &settings, &assigned("o", "1-6")).unwrap_err();
    assert!(refusal.message.contains("not enough cpus"), "{refusal:?}");

    let init = json!([{"name": "i", "init": true, "cpu": "4"},
        {"name": "s", "init": true, "always": true, "cpu": "1"},
        {"name": "a", "cpu": "2"}, {"name": "b", "cpu": "2"}]);
    let of = got(&pod(&init));
    let main = of["a"].union(&of["b"]);
    assert!(main.without(&of["i"]).is_empty(), "reused: {of:?}");
    let running = [&of["s"], &of["a"], &of["b"]];
    let all: CpuSet = running.iter().flat_map(|set| set.iter()).collect();
    assert_eq!(all.len(), 5, "{of:?}");
}

#[test]
fn full_cores_alone_are_given_where_they_are_asked_for() {
    let options = CpuOptions {
        full_cores: true,
        ..CpuOptions::default()
    };
    let settings = static_cpus(small(), "0", options);
    let none = Assigned::default();
    let refusal = placed(&one("3"), &settings, &none).unwrap_err();
    assert_eq!(refusal.reason, "SMTAlignmentError");
    assert!(refusal.message.contains("requested 3 cpus not multiple"));
    // The sibling of a reserved CPU is no full core.
    let refusal = placed(&one("8"), &settings, &none).unwrap_err();
    assert!(refusal.message.contains("available physical CPUs = 6"));
    let got = placed(&one("6"), &settings, &none).unwrap();
    assert_eq!(got.cpus.containers["a"], cpus("1-3,5-7"));
}

#[test]
fn strict_reservation_keeps_shared_containers_off_reserved_cpus() {
    let mut policy = StaticCpus {
        options: CpuOptions::default(),
        reserved: cpus("0"),
    };
    let shared = |policy: &StaticCpus, exclusive| policy.shared(&small(), &cpus(exclusive));
    assert_eq!(shared(&policy, "1,5"), cpus("0,2-4,6-7"));
    policy.options.strict_reservation = true;
    assert_eq!(shared(&policy, "1,5"), cpus("2-4,6-7"));
    assert_eq!(shared(&policy, "1-7"), cpus("0"), "rather than none");
    assert_eq!(cpus::reserved(&small(), &cpus(""), 2), cpus("0,4"));
    assert_eq!(cpus::reserved(&small(), &cpus("6,99"), 2), cpus("6"));
    assert_eq!(cpus::reserved(&small(), &cpus("99"), 1), cpus("0"));
}

fn hint(nodes: &[u32], preferred: bool) -> Hint {
    Hint {
        nodes: Some(mask(nodes)),
        preferred,
    }
}

#[test]
fn hints_are_merged_as_upstream_does() {
    let on = machine(2, 1, 2, 2, 2);
    let list = |hints: &[Hint]| -> Hints { [("r".to_owned(), Some(hints.to_vec()))].into() };
    let both = [0, 1];
    let merged = |policy, providers: &[Hints]| {
        let merging = Merging {
            policy,
            closest: false,
            machine: &on,
        };
        merge(providers, merging)
    };
    let single = [hint(&[0], true), hint(&[1], true), hint(&both, false)];
    let second = [hint(&[1], true), hint(&both, false)];
    for policy in [BestEffort, Restricted, SingleNumaNode] {
        let (best, admitted) = merged(policy, &[list(&single), list(&second)]);
        assert_eq!((best, admitted), (hint(&[1], true), true), "{policy}");
    }
    // Providers that want different nodes.
    let apart = [list(&[hint(&[0], true)]), list(&[hint(&[1], true)])];
    assert_eq!(merged(BestEffort, &apart), (hint(&both, false), true));
    assert!(!merged(Restricted, &apart).1);
    // Masks that are preferred and not equal.
    let unequal = [list(&[hint(&[0], true)]), list(&[hint(&both, true)])];
    assert_eq!(merged(BestEffort, &unequal), (hint(&[0], false), true));
    assert!(!merged(Restricted, &unequal).1);
    // No preference, and nothing that would do.
    let any: Hints = [("r".to_owned(), None)].into();
    let (best, admitted) = merged(SingleNumaNode, &[any, Hints::new()]);
    assert_eq!((best.nodes, admitted), (None, true));
    assert!(!merged(Restricted, &[list(&[])]).1);
    assert!(merged(BestEffort, &[list(&[])]).1);
    // Both nodes are needed, which is no single node.
    assert!(merged(Restricted, &[list(&[hint(&both, true)])]).1);
    assert!(!merged(SingleNumaNode, &[list(&[hint(&both, true)])]).1);
}

#[test]
fn unpreferred_hints_are_no_wider_than_needed_and_near_nodes_win_by_option() {
    let on = machine(2, 2, 2, 1, 2);
    let list: Hints = [(
        "r".to_owned(),
        Some(vec![
            hint(&[0, 2], true),
            hint(&[0, 1], true),
            hint(&[2, 3], true),
        ]),
    )]
    .into();
    let merged = |providers: &[Hints], closest| {
        let merging = Merging {
            policy: TopologyPolicy::BestEffort,
            closest,
            machine: &on,
        };
        merge(providers, merging).0.nodes
    };
    assert_eq!(
        merged(std::slice::from_ref(&list), false),
        Some(mask(&[0, 1]))
    );
    let far: Hints = [(
        "r".to_owned(),
        Some(vec![hint(&[0, 2], true), hint(&[2, 3], true)]),
    )]
    .into();
    assert_eq!(
        merged(std::slice::from_ref(&far), false),
        Some(mask(&[0, 2]))
    );
    assert_eq!(merged(&[far], true), Some(mask(&[2, 3])), "nearer");
    // One resource needs two nodes at least: of unpreferred ones those of two win over one.
    let wide: Hints = [(
        "a".to_owned(),
        Some(vec![hint(&[0, 1], false), hint(&[0, 1, 2, 3], false)]),
    )]
    .into();
    let narrow: Hints = [(
        "b".to_owned(),
        Some(vec![hint(&[0], false), hint(&[0, 1, 2], false)]),
    )]
    .into();
    assert_eq!(merged(&[wide, narrow], false), Some(mask(&[0, 1])));
    let counts: Vec<usize> = masks(&[0, 1, 2]).into_iter().map(NodeMask::count).collect();
    assert_eq!(counts, [1, 1, 1, 2, 2, 2, 3]);
}

#[test]
fn topology_policies_admit_by_nodes() {
    let settings = |topology, scope| Settings {
        topology,
        scope,
        ..static_cpus(dual(), "0", CpuOptions::default())
    };
    let none = Assigned::default();
    let aligned = settings(Restricted, TopologyScope::Container);
    let got = placed(&one("6"), &aligned, &none).unwrap();
    assert_eq!(
        got.cpus.containers["a"],
        cpus("3-5,9-11"),
        "the node that has six"
    );
    // Eight lie on two nodes, which is as few as can be.
    assert!(placed(&one("8"), &aligned, &none).is_ok());
    let single = settings(SingleNumaNode, TopologyScope::Container);
    let refusal = placed(&one("8"), &single, &none).unwrap_err();
    assert_eq!(refusal.reason, "TopologyAffinityError");
    assert!(
        placed(
            &one("8"),
            &settings(BestEffort, TopologyScope::Container),
            &none
        )
        .is_ok()
    );
    // Six are left, three on each node, where one could have six.
    let halves = assigned("o", "1-2,6,4-5,9");
    assert!(placed(&one("4"), &aligned, &halves).is_err());
    let two = pod(&json!([{"name": "a", "cpu": "4"}, {"name": "b", "cpu": "4"}]));
    assert!(placed(&two, &single, &none).is_ok(), "each by itself");
    let whole = settings(SingleNumaNode, TopologyScope::Pod);
    assert!(placed(&two, &whole, &none).is_err(), "not both");
    let both = pod(&json!([{"name": "a", "cpu": "4"}, {"name": "b", "cpu": "2"}]));
    let got = placed(&both, &whole, &none).unwrap().cpus.containers;
    assert_eq!(got["a"].union(&got["b"]), cpus("3-5,9-11"));
    // Another provider's hint decides.
    let elsewhere = |_: Option<&Container>| {
        vec![Hints::from([(
            "dev".to_owned(),
            Some(vec![hint(&[0], true)]),
        )])]
    };
    let got = place(&one("2"), &aligned, &none, &elsewhere).unwrap();
    assert_eq!(got.cpus.containers["a"], cpus("1,7"));
    assert_eq!(got.nodes["a"], Some(mask(&[0])));
}

fn static_memory(machine: Machine) -> Settings {
    let reserved = [(0, Bytes::from([("memory".to_owned(), 1 << 30)]))];
    Settings {
        machine,
        memory: Some(StaticMemory {
            reserved: reserved.into(),
        }),
        ..Settings::default()
    }
}

fn memory_pod(memory: &str) -> Pod {
    pod(&json!([{"name": "a", "cpu": "500m", "memory": memory}]))
}

#[test]
fn memory_is_on_as_few_nodes_as_will_do_and_groups_do_not_overlap() {
    let settings = static_memory(machine(2, 1, 2, 1, 2));
    let mut taken = Assigned::default();
    let mut put = |uid: &str, memory: &str| -> Result<Vec<u32>, Refusal> {
        let got = placed(&memory_pod(memory), &settings, &taken)?;
        taken.add(&PodUid::new(uid), &got);
        Ok(got.memory.containers["a"][0].nodes.clone())
    };
    assert_eq!(put("one", "8Gi"), Ok(vec![0]));
    assert_eq!(put("two", "2Gi"), Ok(vec![1]), "one GiB is left on node 0");
    // Both nodes are used alone: they cannot be grouped.
    let refusal = put("three", "12Gi").unwrap_err();
    assert_eq!(refusal.reason, "UnexpectedAdmissionError");
    let empty = Assigned::default();
    let got = placed(&memory_pod("12Gi"), &settings, &empty).unwrap();
    assert_eq!(got.memory.containers["a"][0].nodes, [0, 1]);
    let mut grouped = Assigned::default();
    grouped.add(&PodUid::new("g"), &got);
    let got = placed(&memory_pod("1Gi"), &settings, &grouped).unwrap();
    assert_eq!(
        got.memory.containers["a"][0].nodes,
        [0, 1],
        "neither node is to be had alone"
    );
    let restricted = Settings {
        topology: TopologyPolicy::Restricted,
        ..settings
    };
    let refusal = placed(&memory_pod("1Gi"), &restricted, &grouped).unwrap_err();
    assert_eq!(refusal.reason, "TopologyAffinityError");
}

#[test]
fn memory_of_init_containers_is_used_again() {
    let settings = static_memory(machine(1, 1, 2, 1, 2));
    let both = pod(
        &json!([{"name": "i", "init": true, "cpu": "500m", "memory": "6Gi"},
        {"name": "a", "cpu": "500m", "memory": "8Gi"}]),
    );
    let got = placed(&both, &settings, &Assigned::default()).unwrap();
    let bytes = |name: &str| got.memory.containers[name][0].bytes >> 30;
    assert_eq!(
        (bytes("i"), bytes("a")),
        (0, 8),
        "together what the pod has"
    );
    let table = settings.memory.as_ref().unwrap();
    let table = table.table(&settings.machine, [&got.memory]);
    let wanted = |gib: u64| Bytes::from([("memory".to_owned(), gib << 30)]);
    assert!(table.hints(&wanted(2), &Reusable::new()).is_empty());
    assert!(!table.hints(&wanted(1), &Reusable::new()).is_empty());
    assert_eq!(
        memory::memory_resource("hugepages-2048Ki").as_deref(),
        Some("hugepages-2Mi")
    );
    assert_eq!(memory::memory_resource("cpu"), None);
}

fn applied(state: &State, version: u64, transaction: &Transaction) -> State {
    let mut next = state.clone();
    for mutation in &transaction.mutations {
        next.apply(mutation, version);
    }
    next
}

/// Returns the record of a pod that is to run.
fn recorded(uid: &str, mut pod: Pod) -> Transaction {
    pod.metadata.uid = Some(uid.to_owned());
    let worker = WorkerRecord {
        full_name: format!("{uid}_ns"),
        queued: at(1),
        started: Some(at(1)),
        phase: WorkerPhase::Sync,
        deleted: false,
        restart_requested: false,
        runtime_only: false,
    };
    let admission = AdmissionRecord {
        decision: AdmissionDecision::Admitted,
        allocated: Default::default(),
        at: at(1),
    };
    let record = PodRecord {
        source: PodSource::Api,
        origin: String::new(),
        pod: Json(Arc::new(pod)),
        first_seen: at(1),
        confirmed_epoch: 1,
    };
    Transaction::new()
        .put(uid, worker)
        .put(uid, admission)
        .put(uid, record)
}

fn own(of: &str) -> CpusRecord {
    CpusRecord {
        containers: [("a".to_owned(), cpus(of))].into(),
    }
}

#[test]
fn a_start_keeps_what_fits_and_mends_the_rest() {
    let state = State::default();
    let setup = recorded("keeps", one("2"))
        .put("keeps", own("1,5"))
        .and(recorded("shrinks", one("4")))
        .put("shrinks", own("6-9"))
        .and(recorded("twice", one("2")))
        .put("twice", own("5,7"))
        .and(recorded("new", one("1")))
        .put("gone", own("2"));
    let state = applied(&state, 1, &setup);
    let settings = static_cpus(small(), "0", CpuOptions::default());
    let (transaction, mended) = mend(&state, &settings);
    let after = applied(&state, 2, &transaction);
    let has = |uid: &str| {
        after
            .record::<CpusRecord>(uid)
            .map(|r| r.containers["a"].to_string())
    };
    assert_eq!(has("keeps").as_deref(), Some("1,5"));
    assert_eq!(has("shrinks").as_deref(), Some("6-7"), "8 and 9 are gone");
    assert_eq!(has("gone"), None, "no pod has it");
    // What was on record twice is the first one's, and 7 is taken as well.
    assert_ne!(has("twice").as_deref(), Some("5,7"));
    assert!(has("new").is_some(), "a pod that is to run gets some");
    let all: Vec<u32> = Assigned::of(&after)
        .cpus
        .values()
        .flat_map(|r| r.containers.values())
        .flat_map(|set| set.iter().collect::<Vec<_>>())
        .collect();
    let distinct: CpuSet = all.iter().copied().collect();
    assert_eq!(all.len(), distinct.len(), "{all:?}");
    let told: Vec<&str> = mended.iter().map(|m| m.pod.as_str()).collect();
    assert_eq!(told, ["new", "shrinks", "twice"]);
    let (again, told) = mend(&after, &settings);
    assert!(again.is_empty() && told.is_empty(), "{again:?}");
    // Another policy frees all.
    let (none, _) = mend(&after, &Settings::default());
    assert!(applied(&after, 3, &none).cpus.is_empty());
}

#[test]
fn static_pods_of_one_name_take_turns_with_their_cpus() {
    let fixed = |uid: &str| {
        let mut pod = one("2");
        let source = [("kubernetes.io/config.source".to_owned(), "file".to_owned())];
        pod.metadata.annotations = Some(source.into());
        pod.metadata.uid = Some(uid.to_owned());
        let record = PodRecord {
            source: PodSource::File,
            origin: String::new(),
            pod: Json(Arc::new(pod.clone())),
            first_seen: at(1),
            confirmed_epoch: 1,
        };
        (recorded(uid, pod.clone()).put(uid, record), pod)
    };
    let (old, _) = fixed("old");
    let (new, next) = fixed("new");
    let state = applied(&State::default(), 1, &old.put("old", own("1-7")));
    let settings = static_cpus(small(), "0", CpuOptions::default());
    let mut taken = Assigned::of(&state);
    assert!(placed(&next, &settings, &taken).is_err());
    taken.leave_out_predecessors(&state, &one("2"));
    assert!(!taken.cpus.is_empty(), "it is no static pod");
    taken.leave_out_predecessors(&state, &next);
    let got = placed(&next, &settings, &taken).unwrap();
    // Both are on record while the former one ends.
    let state = applied(&state, 2, &new.put("new", got.cpus));
    let (transaction, mended) = mend(&state, &settings);
    assert!(transaction.is_empty() && mended.is_empty(), "{mended:?}");
    // One that has nothing gets what its predecessor has, which ends before it starts.
    let lost = applied(&state, 3, &Transaction::new().delete::<CpusRecord>("new"));
    let (transaction, _) = mend(&lost, &settings);
    let again = applied(&lost, 4, &transaction);
    assert_eq!(
        again.record::<CpusRecord>("new"),
        state.record::<CpusRecord>("new")
    );
}

#[test]
fn what_is_reserved_now_stays_with_the_container_that_has_it() {
    let setup = recorded("a", one("2")).put("a", own("0,4"));
    let state = applied(&State::default(), 1, &setup);
    let settings = static_cpus(small(), "0", CpuOptions::default());
    let (transaction, _) = mend(&state, &settings);
    assert!(transaction.is_empty());
    assert!(
        settings
            .cpus
            .as_ref()
            .unwrap()
            .shared(&small(), &cpus("0,4"))
            == cpus("1-3,5-7")
    );
}

#[test]
fn memory_on_nodes_that_are_gone_is_told() {
    let block = |nodes: &[u32]| MemoryBlock {
        resource: "memory".to_owned(),
        nodes: nodes.to_vec(),
        bytes: 1 << 30,
    };
    let record = MemoryRecord {
        containers: [("a".to_owned(), vec![block(&[0, 7])])].into(),
    };
    let setup = recorded("a", memory_pod("1Gi")).put("a", record);
    let state = applied(&State::default(), 1, &setup);
    let (transaction, mended) = mend(&state, &static_memory(machine(1, 1, 2, 1, 2)));
    let after = applied(&state, 2, &transaction);
    let kept = &after.record::<MemoryRecord>("a").unwrap().containers["a"];
    assert_eq!(kept, &[block(&[0])]);
    assert_eq!(mended.len(), 1);
}

fn running(uid: &str, containers: &[(&str, &str)]) -> Transaction {
    let mut status = PodStatus::empty(PodUid::new(uid));
    for (name, id) in containers {
        let container = crate::types::runtime::ContainerStatus {
            id: ContainerId::new(*id),
            name: (*name).to_owned(),
            attempt: 0,
            sandbox_id: ContainerId::new("s"),
            state: crate::types::runtime::ContainerState::Running,
            created_at_ns: 0,
            image: String::new(),
            image_ref: String::new(),
            hash: String::new(),
            started_at_ns: 0,
            finished_at_ns: 0,
            exit_code: 0,
            reason: String::new(),
            message: String::new(),
            log_path: String::new(),
            user: None,
        };
        status.containers.push(container);
    }
    Transaction::new().put(uid, PlegRecord { status })
}

fn told(uid: &str, id: &str, of: &str) -> Transaction {
    let record = CpusetRecord {
        container_id: ContainerId::new(id),
        cpus: cpus(of),
        nodes: CpuSet::new(),
    };
    Transaction::new().put(child_key(&PodUid::new(uid), "a"), record)
}

#[test]
fn containers_that_were_told_otherwise_are_told_anew_and_shrink_first() {
    let setup = running("own", &[("a", "c1")])
        .put("own", own("1,5"))
        .and(told("own", "c1", "1"))
        .and(running("same", &[("a", "c2")]))
        .and(told("same", "c2", "0,2-4,6-7"))
        .and(running("wide", &[("a", "c3")]))
        .and(told("wide", "c3", "0-7"))
        .and(running("former", &[("a", "c5")]));
    let state = applied(&State::default(), 1, &setup);
    let settings = static_cpus(small(), "0", CpuOptions::default());
    let assigned = Assigned::of(&state);
    let ids = |confirmed: &Confirmed| -> Vec<String> {
        let found = updates(&state, &settings, &assigned, confirmed);
        found
            .iter()
            .map(|u| format!("{}={} of {}", u.id, u.cpus, u.may_use))
            .collect()
    };
    let shared = cpus("0,2-4,6-7");
    let mut confirmed = Confirmed::from([
        (ContainerId::new("c2"), shared.clone()),
        (ContainerId::new("c1"), cpus("1")),
    ]);
    let (former, wide) = ("c5=0,2-4,6-7 of 0-7", "c3=0,2-4,6-7 of 0-7");
    assert_eq!(ids(&confirmed), [former, wide, "c1=1,5 of 1,5"]);
    // Each is told once after a start, and after an answer that was lost.
    confirmed.clear();
    let again = "c2=0,2-4,6-7 of 0,2-4,6-7";
    assert_eq!(ids(&confirmed), [former, wide, "c1=1,5 of 1,5", again]);
    // One that was told to leave CPUs has them until that is on record.
    confirmed.insert(ContainerId::new("c3"), shared);
    assert!(ids(&confirmed).contains(&wide.to_owned()));
    // Without a policy, what was narrowed is widened; of others nothing is known.
    let none = Settings {
        machine: small(),
        ..Settings::default()
    };
    let found = updates(&state, &none, &Assigned::default(), &Confirmed::new());
    let ids: Vec<&str> = found.iter().map(|u| u.id.as_str()).collect();
    assert_eq!(ids, ["c1", "c2", "c3"]);
    let (cpus, nodes) = allowed(&none, &assigned, &PodUid::new("own"), "a");
    assert!(cpus.is_empty() && nodes.is_empty());
}

#[test]
fn nobody_is_told_cpus_for_numa_nodes_alone() {
    let record = CpusetRecord {
        container_id: ContainerId::new("c"),
        cpus: CpuSet::new(),
        nodes: cpus("0"),
    };
    let setup = running("u", &[("a", "c")]).put("u/a", record);
    let state = applied(&State::default(), 1, &setup);
    let settings = static_memory(small());
    let none = Assigned::default();
    assert!(updates(&state, &settings, &none, &Confirmed::new()).is_empty());
    assert!(!is_telling(&state, &settings));
    let narrowed = applied(&state, 2, &told("v", "d", "0-1"));
    assert!(is_telling(&narrowed, &settings));
    let settings = static_cpus(small(), "0", CpuOptions::default());
    assert!(is_telling(&state, &settings));
    let assigned = assigned("o", "1,5");
    let found = updates(&state, &settings, &assigned, &Confirmed::new());
    assert_eq!(found[0].may_use, cpus("0-7"), "it had all");
}

#[test]
fn a_start_assigns_to_the_containers_of_a_pod_that_have_nothing() {
    let two = pod(&json!([{"name": "a", "cpu": "4"}, {"name": "b", "cpu": "2"}]));
    let had = CpusRecord {
        containers: [
            ("a".to_owned(), cpus("1-2,5-6")),
            ("b".to_owned(), cpus("8-9")),
        ]
        .into(),
    };
    let setup = recorded("u", two).put("u", had);
    let state = applied(&State::default(), 1, &setup);
    let settings = static_cpus(small(), "0", CpuOptions::default());
    let (transaction, mended) = mend(&state, &settings);
    let after = applied(&state, 2, &transaction);
    let has = &after.record::<CpusRecord>("u").unwrap().containers;
    assert_eq!(has["a"], cpus("1-2,5-6"), "is kept");
    assert_eq!(has["b"], cpus("3,7"));
    assert!(mended[0].message.ends_with("container b got CPUs 3,7"));
    // What it has on its own nodes is not in the way of the rest of it.
    let aligned = Settings {
        topology: SingleNumaNode,
        scope: TopologyScope::Pod,
        ..settings
    };
    let (transaction, _) = mend(&state, &aligned);
    let aligned = applied(&state, 2, &transaction);
    let got = aligned.record::<CpusRecord>("u").unwrap();
    assert_eq!(got.containers, *has);
}

/// An event of a node.
#[derive(Clone, Debug)]
enum Step {
    Admit(usize, bool),
    Leave(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (1_usize..7, any::<bool>()).prop_map(|(n, init)| Step::Admit(n, init)),
        2 => (0_usize..8).prop_map(Step::Leave),
    ];
    proptest::collection::vec(step, 1..24)
}

fn machines() -> impl Strategy<Value = Machine> {
    (1_u32..3, 1_u32..3, 1_u32..4, 1_u32..3, 1_u32..3)
        .prop_map(|(s, n, c, t, l)| machine(s, n, c, t, l))
}

fn options() -> impl Strategy<Value = CpuOptions> {
    (any::<[bool; 4]>(), 0_u8..4).prop_map(|([full, strict, socket, _], way)| CpuOptions {
        full_cores: full && way != 3,
        strict_reservation: strict,
        align_by_socket: socket,
        align_by_cache: way == 1,
        across_nodes: way == 2,
        across_cores: way == 3,
    })
}

proptest! {
    // Invariant POD-10.
    #[test]
    fn no_cpu_is_shared_nothing_is_taken_away_and_all_comes_back(
        on in machines(), options in options(), steps in steps(), policy in 0_u8..3,
    ) {
        let reserved = cpus::reserved(&on, &CpuSet::new(), 1);
        let settings = Settings {
            topology: match policy {
                0 => TopologyPolicy::None,
                1 => TopologyPolicy::BestEffort,
                _ => TopologyPolicy::Restricted,
            },
            cpus: Some(StaticCpus { options, reserved: reserved.clone() }),
            machine: on.clone(),
            ..Settings::default()
        };
        let mut taken = Assigned::default();
        let mut next = 0;
        for step in steps {
            let before = taken.clone();
            match step {
                Step::Admit(count, init) => {
                    let mut containers = vec![json!({"name": "a", "cpu": count.to_string()})];
                    if init {
                        containers.insert(0, json!({"name": "i", "init": true, "cpu": "1"}));
                    }
                    let pod = pod(&json!(containers));
                    if let Ok(placement) = placed(&pod, &settings, &taken) {
                        let got = &placement.cpus.containers["a"];
                        prop_assert_eq!(got.len(), count);
                        let whole: CpuSet =
                            placement.cpus.containers.values().flat_map(CpuSet::iter).collect();
                        prop_assert!(!whole.overlaps(&before.exclusive()));
                        prop_assert!(!whole.overlaps(&reserved));
                        prop_assert!(whole.without(&on.online()).is_empty());
                        if options.full_cores {
                            prop_assert_eq!(got.len() % on.threads_per_core(), 0);
                        }
                        taken.add(&PodUid::new(format!("p{next}")), &placement);
                        next += 1;
                    }
                }
                Step::Leave(n) => {
                    let leaves = taken.cpus.keys().nth(n).cloned();
                    if let Some(uid) = leaves {
                        taken.cpus.remove(&uid);
                    }
                }
            }
            for (uid, record) in &taken.cpus {
                prop_assert!(before.cpus.get(uid).is_none_or(|had| had == record));
            }
            let shared = settings.cpus.as_ref().unwrap().shared(&on, &taken.exclusive());
            prop_assert!(!shared.is_empty());
            prop_assert!(!shared.overlaps(&taken.exclusive()));
        }
        taken.cpus.clear();
        let free = settings.cpus.as_ref().unwrap().free(&on, &taken.exclusive());
        prop_assert_eq!(free, on.online().without(&reserved));
    }

    #[test]
    fn memory_never_exceeds_what_nodes_have(sizes in proptest::collection::vec(1_u64..16, 1..12)) {
        let settings = static_memory(machine(2, 1, 2, 1, 2));
        let mut taken = Assigned::default();
        for (n, gib) in sizes.into_iter().enumerate() {
            if let Ok(got) = placed(&memory_pod(&format!("{gib}Gi")), &settings, &taken) {
                taken.add(&PodUid::new(format!("p{n}")), &got);
            }
        }
        let mut used = Bytes::new();
        for block in taken.memory.values().flat_map(|r| r.containers.values()).flatten() {
            let group = format!("{:?}", block.nodes);
            *used.entry(group).or_default() += block.bytes >> 30;
        }
        let on = |group: &str| used.get(group).copied().unwrap_or(0);
        prop_assert!(on("[0]") <= 9 && on("[1]") <= 10 && on("[0, 1]") <= 19);
        prop_assert!(on("[0, 1]") == 0 || (on("[0]") == 0 && on("[1]") == 0));
    }
}

#[test]
fn resized_pods_with_cpus_of_their_own_are_infeasible() {
    let before = one("2");
    let record: Allocations = [(
        "a".to_owned(),
        allocation_of(&before.spec.as_ref().unwrap().containers[0]),
    )]
    .into();
    let more_cpu = one("3");
    let says = |pod: &Pod, cpus, memory| of_pinned(pod, &record, cpus, memory).map(|(_, why)| why);
    assert_eq!(says(&before, true, true), None, "nothing is wanted");
    assert!(
        says(&more_cpu, true, false)
            .unwrap()
            .contains("CPU Manager")
    );
    assert_eq!(says(&more_cpu, false, true), None);
    let more_memory = pod(&json!([{"name": "a", "cpu": "2", "memory": "2Gi"}]));
    assert_eq!(says(&more_memory, true, false), None);
    assert!(
        says(&more_memory, true, true)
            .unwrap()
            .contains("Memory Manager")
    );
}

#[test]
fn mutations_of_a_mend_are_puts_and_deletes_of_assignments_alone() {
    let setup = recorded("a", one("2")).put("a", own("40-41"));
    let state = applied(&State::default(), 1, &setup);
    let (transaction, _) = mend(&state, &static_cpus(small(), "0", CpuOptions::default()));
    for mutation in &transaction.mutations {
        let table = match mutation {
            Mutation::Put { record, .. } => record.table(),
            Mutation::Delete { table, .. } => *table,
        };
        assert_eq!(table, crate::core::state::Table::Cpus);
    }
    assert_eq!(transaction.mutations.len(), 1, "assigned anew");
}
