//! Table tests of thresholds, conditions, ranks and texts.

use k8s_openapi::api::core::v1::Pod;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::core::testkit::at;
use crate::types::PodExt;

const MI: u64 = 1 << 20;

fn rules(thresholds: Vec<Threshold>) -> Rules {
    Rules {
        thresholds,
        transition: Duration::from_secs(300),
        max_pod_grace: 0,
    }
}

fn hard(signal: Signal, value: u64) -> Threshold {
    Threshold {
        signal,
        value: EvictionThreshold::Quantity(value),
        grace: None,
        minimum_reclaim: None,
    }
}

fn soft(signal: Signal, value: u64, grace: u64) -> Threshold {
    Threshold {
        grace: Some(Duration::from_secs(grace)),
        ..hard(signal, value)
    }
}

fn observed(figures: &[(Signal, u64)]) -> Observations {
    let figure = |available: &u64| Figure {
        available: *available,
        capacity: 1000,
    };
    let figures = figures.iter().map(|(s, available)| (*s, figure(available)));
    Observations {
        figures: figures.collect(),
        disks: Disks::One,
    }
}

/// Observes these amounts of memory at these seconds. Returns at which ones the threshold was acted on, and at which the
/// node was under pressure.
fn lives(rules: &Rules, looks: &[(i64, Option<u64>)]) -> (Vec<i64>, Vec<i64>) {
    let (mut signals, mut acted, mut pressed) = (Signals::new(), Vec::new(), Vec::new());
    for (second, available) in looks {
        let figures: Vec<_> = available.iter().map(|a| (Signal::Memory, *a)).collect();
        let assessment = assess(rules, &signals, &observed(&figures), at(*second));
        signals = assessment.signals;
        if !assessment.acting.is_empty() {
            acted.push(*second);
        }
        if assessment.pressure.memory {
            pressed.push(*second);
        }
    }
    (acted, pressed)
}

#[test]
fn a_threshold_is_met_below_its_value() {
    let looks = [(0, Some(100)), (10, Some(99)), (20, None)];
    let (acted, pressed) = lives(&rules(vec![hard(Signal::Memory, 100)]), &looks);
    assert_eq!(acted, [10], "what is not known is not acted on");
    assert_eq!(pressed, [10, 20]);
    let percent = Threshold {
        value: EvictionThreshold::Fraction(0.1),
        ..hard(Signal::Memory, 0)
    };
    let (acted, _) = lives(&rules(vec![percent]), &[(0, Some(100)), (10, Some(99))]);
    assert_eq!(acted, [10]);
}

#[test]
fn a_soft_threshold_waits_for_its_grace_period_and_the_condition_does_not() {
    let rules = rules(vec![soft(Signal::Memory, 100, 30)]);
    let low = |second| (second, Some(50));
    let (acted, pressed) = lives(&rules, &[low(0), low(10), low(20), low(30), low(40)]);
    assert_eq!(acted, [30, 40]);
    assert_eq!(pressed, [0, 10, 20, 30, 40]);
    let (acted, _) = lives(
        &rules,
        &[low(0), low(20), (25, Some(100)), low(30), low(50)],
    );
    assert_eq!(acted, [0; 0], "it was not met in between");
    let (acted, _) = lives(&rules, &[low(0), low(61), low(80), low(91)]);
    assert_eq!(acted, [91], "nobody looked for longer than a minute");
}

#[test]
fn a_minimum_reclaim_counts_once_the_threshold_was_acted_on() {
    let with_reclaim = |threshold| {
        rules(vec![Threshold {
            minimum_reclaim: Some(EvictionThreshold::Quantity(50)),
            ..threshold
        }])
    };
    let looks = [
        (0, Some(120)),
        (10, Some(90)),
        (20, Some(149)),
        (30, Some(150)),
        (40, Some(120)),
    ];
    assert_eq!(
        lives(&with_reclaim(hard(Signal::Memory, 100)), &looks).0,
        [10, 20]
    );
    let looks = [(0, Some(90)), (10, Some(120))];
    let soft = with_reclaim(soft(Signal::Memory, 100, 20));
    assert_eq!(lives(&soft, &looks).1, [0, 10], "the transition period");
    assert_eq!(
        assess(
            &soft,
            &Signals::new(),
            &observed(&[(Signal::Memory, 120)]),
            at(0)
        )
        .signals
        .len(),
        0
    );
}

#[test]
fn a_condition_outlives_its_last_observation_by_the_transition_period() {
    let rules = rules(vec![hard(Signal::Memory, 100)]);
    let looks = [
        (0, Some(50)),
        (10, Some(500)),
        (299, Some(500)),
        (300, Some(500)),
    ];
    assert_eq!(lives(&rules, &looks).1, [0, 10, 299]);
    // What is on record holds until somebody has looked.
    let old = [(
        "DiskPressure".to_owned(),
        SignalRecord {
            first: at(0),
            last: at(0),
        },
    )];
    let old: Signals = old.into();
    assert!(pressure_of(&old).disk);
    assert!(!assess(&rules, &old, &observed(&[]), at(900)).pressure.disk);
}

#[test]
fn memory_goes_before_others_and_hard_thresholds_before_soft_ones() {
    let all = vec![
        hard(Signal::Pid, 100),
        soft(Signal::NodeFs, 100, 0),
        hard(Signal::NodeFs, 100),
        hard(Signal::ImageFs, 100),
        soft(Signal::Memory, 100, 0),
        hard(Signal::Memory, 100),
        hard(Signal::AllocatableMemory, 100),
    ];
    let low = Signal::ALL.map(|signal| (signal, 1));
    let acting = assess(&rules(all.clone()), &Signals::new(), &observed(&low), at(0)).acting;
    let order = [6, 5, 4, 3, 2, 0, 1].map(|i| all[i]);
    assert_eq!(acting, order);
}

#[test]
fn thresholds_come_from_the_configuration() {
    let mut kubelet = KubeletConfiguration::default();
    let keys =
        |rules: &Rules| -> Vec<String> { rules.thresholds.iter().map(Threshold::key).collect() };
    let defaults = Rules::of(&kubelet);
    assert_eq!(
        keys(&defaults),
        [
            "imagefs.available<15%",
            "imagefs.inodesFree<5%",
            "memory.available<100Mi",
            "nodefs.available<10%",
            "nodefs.inodesFree<5%",
            "allocatableMemory.available<100Mi",
        ]
    );
    assert_eq!(defaults.transition, Duration::from_secs(300));
    kubelet.enforce_node_allocatable.clear();
    kubelet.eviction_hard = [("pid.available".to_owned(), EvictionThreshold::Quantity(0))].into();
    let value = EvictionThreshold::Quantity(7);
    for signal in ["pid.available", "nodefs.available"] {
        kubelet.eviction_soft.insert(signal.to_owned(), value);
    }
    let grace = Duration::from_secs(90);
    kubelet
        .eviction_soft_grace_period
        .insert("pid.available".to_owned(), grace);
    kubelet
        .eviction_minimum_reclaim
        .insert("pid.available".to_owned(), value);
    let found = Rules::of(&kubelet);
    assert_eq!(
        keys(&found),
        ["pid.available<7 for 90s"],
        "0 is none, and a soft one needs a grace"
    );
    assert_eq!(found.thresholds[0].minimum_reclaim, Some(value));
}

#[test]
fn only_soft_evictions_give_pods_more_than_a_second() {
    let (hard, soft) = (hard(Signal::Memory, 1), soft(Signal::Memory, 1, 0));
    for (threshold, max, own, want) in [
        (hard, 60, Some(30), 1),
        (soft, 60, Some(30), 30),
        (soft, 20, Some(30), 20),
        (soft, 20, None, 20),
        (soft, 0, Some(30), 1),
        (soft, -1, Some(30), 1),
        (soft, 60, Some(0), 1),
    ] {
        assert_eq!(
            threshold.pod_grace(max, own),
            want,
            "{threshold:?} {max} {own:?}"
        );
    }
}

fn pod(uid: &str, priority: i32, requests: &Value) -> Pod {
    let container = json!({"name": "c", "resources": {"requests": requests}});
    let pod = json!({
        "metadata": {"uid": uid, "name": uid, "namespace": "n"},
        "spec": {"priority": priority, "containers": [container]},
    });
    serde_json::from_value(pod).unwrap()
}

fn usage(memory: u64, processes: u64, [rootfs, logs, volumes]: [u64; 3]) -> PodUse {
    let space = |bytes: u64| Space {
        bytes: bytes * MI,
        inodes: bytes,
    };
    let container = ContainerUse {
        memory: Some(memory * MI),
        rootfs: Some(space(rootfs)),
        logs: Some(space(logs)),
    };
    PodUse {
        memory: Some(memory * MI),
        processes: Some(processes),
        containers: [("c".to_owned(), container)].into(),
        volumes: space(volumes),
    }
}

#[test]
fn pods_are_ranked_by_what_they_use_beyond_their_requests() {
    let ask = |memory: &str| json!({"memory": memory, "ephemeral-storage": memory});
    let pods = [
        (pod("within", -5, &ask("90Mi")), usage(80, 9, [1, 2, 3])),
        (pod("over", 0, &ask("10Mi")), usage(40, 5, [20, 0, 1])),
        (pod("most", 0, &ask("0")), usage(70, 1, [0, 40, 0])),
        (pod("dear", 7, &ask("0")), usage(90, 5, [9, 0, 20])),
    ];
    for (signal, disks, want) in [
        (
            Signal::Memory,
            Disks::One,
            ["most", "over", "dear", "within"],
        ),
        (
            Signal::AllocatableMemory,
            Disks::One,
            ["most", "over", "dear", "within"],
        ),
        (Signal::Pid, Disks::One, ["within", "over", "most", "dear"]),
        (
            Signal::NodeFs,
            Disks::One,
            ["most", "over", "dear", "within"],
        ),
        (
            Signal::ImageFs,
            Disks::Dedicated,
            ["over", "dear", "within", "most"],
        ),
        (
            Signal::NodeFsInodes,
            Disks::Dedicated,
            ["within", "most", "over", "dear"],
        ),
        (
            Signal::NodeFs,
            Disks::Split,
            ["most", "over", "dear", "within"],
        ),
        // Nothing of a pod lies there: by priority, and nobody is over a request.
        (
            Signal::ImageFs,
            Disks::Split,
            ["within", "most", "over", "dear"],
        ),
    ] {
        let ranked = ranked(signal, disks, pods.iter().map(candidate));
        assert_eq!(names(&ranked), want, "{signal:?}");
    }
}

/// After a reboot nothing may run of it yet.
#[test]
fn a_pod_without_figures_is_not_chosen() {
    let (idle, busy) = (
        pod("idle", -5, &json!({})),
        pod("busy", 9, &json!({"memory": "1Gi"})),
    );
    let (nothing, little) = (PodUse::default(), usage(1, 1, [1, 1, 1]));
    for signal in [Signal::Memory, Signal::AllocatableMemory, Signal::Pid] {
        let all = [(&idle, &nothing), (&busy, &little)];
        let all = all.map(|(pod, usage)| Candidate { pod, usage });
        assert_eq!(victim(signal, Disks::One, all).unwrap().pod.name(), "busy");
        assert!(victim(signal, Disks::One, [all[0]]).is_none());
    }
}

#[test]
fn garbage_is_removed_where_it_lies() {
    let freed = |disks| {
        let all = Signal::ALL.into_iter();
        let freed = all.filter_map(move |signal| {
            let Waste { containers, images } = signal.garbage(disks)?;
            assert_eq!(signal.has_layers(disks), containers);
            Some((signal.name(), containers, images))
        });
        freed.collect::<Vec<_>>()
    };
    let images = |containers, images| {
        [
            ("imagefs.available", containers, images),
            ("imagefs.inodesFree", containers, images),
        ]
    };
    let node = |containers, images| {
        [
            ("nodefs.available", containers, images),
            ("nodefs.inodesFree", containers, images),
        ]
    };
    assert_eq!(
        freed(Disks::One),
        [images(true, true), node(true, true)].concat()
    );
    assert_eq!(freed(Disks::Dedicated), images(true, true));
    assert_eq!(
        freed(Disks::Split),
        [images(false, true), node(true, false)].concat()
    );
    let all = Waste {
        containers: true,
        images: true,
    };
    let dead = Waste {
        images: false,
        ..all
    };
    assert!(all.covers(dead) && dead.covers(dead) && !dead.covers(all));
}

#[test]
fn the_layout_of_disks_is_that_of_their_devices() {
    for (root, images, layers, disks) in [
        (1, 1, Some(1), Disks::One),
        (1, 1, None, Disks::One),
        (1, 2, Some(2), Disks::Dedicated),
        (1, 2, None, Disks::Dedicated),
        (1, 2, Some(1), Disks::Split),
        // Layers on a third one, or without the images: as if they were not named.
        (1, 2, Some(3), Disks::Dedicated),
        (1, 1, Some(2), Disks::One),
    ] {
        assert_eq!(
            Disks::of(root, images, layers),
            disks,
            "{root} {images} {layers:?}"
        );
    }
}

#[test]
fn critical_pods_are_never_chosen() {
    let nothing = json!({});
    let mut fixed = pod("static", 0, &nothing);
    let annotations = fixed.metadata.annotations.get_or_insert_default();
    annotations.insert("kubernetes.io/config.source".to_owned(), "file".to_owned());
    let (critical, dear) = (
        pod("critical", 2_000_000_000, &nothing),
        pod("dear", 1_999_999_999, &nothing),
    );
    let much = usage(900, 900, [900, 900, 900]);
    let candidate = |pod| Candidate { pod, usage: &much };
    for signal in Signal::ALL {
        let all = [&fixed, &critical, &dear].map(candidate);
        assert_eq!(victim(signal, Disks::One, all).unwrap().pod.name(), "dear");
        assert!(victim(signal, Disks::One, [&fixed, &critical].map(candidate)).is_none());
    }
}

#[test]
fn messages_are_upstreams() {
    let pod = pod("p", 0, &json!({"memory": "10Mi"}));
    let used = usage(20, 3, [1, 2, 3]);
    let candidate = Candidate {
        pod: &pod,
        usage: &used,
    };
    let figure = Figure {
        available: 5000,
        capacity: 10 * 1024 * MI,
    };
    let text = |signal, value| message(&hard(signal, value), figure, &candidate);
    assert_eq!(
        text(Signal::Memory, 100 * MI),
        "The node was low on resource: memory. Threshold quantity: 100Mi, available: 5000. \
         Container c was using 20Mi, request is 10Mi, has larger consumption of memory. "
    );
    assert_eq!(
        text(Signal::NodeFs, 5 * MI),
        "The node was low on resource: ephemeral-storage. Threshold quantity: 5Mi, available: 5000. \
         Container c was using 3Mi, request is 0, has larger consumption of ephemeral-storage. "
    );
    assert_eq!(
        text(Signal::Pid, 10_000),
        "The node was low on resource: pids. Threshold quantity: 10k, available: 5k. "
    );
    let annotations = annotations(Signal::Memory, &candidate);
    let values: Vec<_> = annotations
        .iter()
        .map(|(k, v)| (k.as_str(), v.as_str()))
        .collect();
    let expected = [
        ("offending_containers", "c"),
        ("offending_containers_usage", "20Mi"),
        ("starved_resource", "memory"),
    ];
    assert_eq!(values, expected);
    let written = |signal, value| {
        let threshold = Threshold {
            value,
            ..hard(signal, 0)
        };
        let text = message(&threshold, figure, &candidate);
        let (_, quantity) = text.split_once("quantity: ").unwrap();
        quantity.split_once(',').unwrap().0.to_owned()
    };
    let (amount, part) = (EvictionThreshold::Quantity, EvictionThreshold::Fraction);
    assert_eq!(written(Signal::NodeFs, amount(2_000_000_000)), "2G");
    assert_eq!(written(Signal::NodeFs, part(0.5)), "5Gi");
    assert_eq!(written(Signal::NodeFsInodes, part(0.25)), "2560Mi");
    assert_eq!(
        attempting(Signal::NodeFsInodes),
        "Attempting to reclaim inodes"
    );
}

fn apply(state: &mut State, changes: &Transaction) -> usize {
    for mutation in &changes.mutations {
        state.apply(mutation, 1);
    }
    changes.mutations.len()
}

#[test]
fn the_last_observation_is_written_once_a_period_and_when_it_matters() {
    let record = |first, last| SignalRecord {
        first: at(first),
        last: at(last),
    };
    let soft = soft(Signal::Memory, 100, 5);
    let rules = rules(vec![soft]);
    let one = |key: &str, r: SignalRecord| Signals::from([(key.to_owned(), r)]);
    let (condition, threshold) = ("PIDPressure", soft.key());
    let mut state = State::default();
    for (signals, now, writes) in [
        (one(condition, record(0, 0)), 0, 1),
        (one(condition, record(0, 9)), 9, 0),
        (one(condition, record(0, 9)), 11, 1), // seen for the last time
        (one(condition, record(0, 9)), 19, 0),
        (one(condition, record(0, 20)), 20, 1),
        (one(condition, record(21, 21)), 21, 1),
        (Signals::new(), 22, 1),
        (Signals::new(), 23, 0),
        (one(&threshold, record(24, 24)), 24, 1),
        (one(&threshold, record(24, 28)), 28, 0),
        (one(&threshold, record(24, 29)), 29, 1), // its grace period has ended
        (one(&threshold, record(24, 31)), 31, 0),
        (Signals::new(), 32, 1),
    ] {
        let changes = changes(&rules, &state, &signals, at(now));
        assert_eq!(apply(&mut state, &changes), writes, "{now}: {signals:?}");
    }
    assert!(on_record(&state).is_empty());
}

#[test]
fn an_agent_starts_with_records_of_its_boot_and_no_condition_that_is_over() {
    let key = soft(Signal::Memory, 100, 900).key();
    let mut state = State::default();
    for (name, last) in [
        ("DiskPressure", 700),
        ("MemoryPressure", 701),
        (key.as_str(), 700),
    ] {
        let record = SignalRecord {
            first: at(0),
            last: at(last),
        };
        apply(&mut state, &Transaction::new().put(name, record));
    }
    let transition = Duration::from_secs(300);
    let known = at_start(&state, transition, at(1000), at(1000));
    assert!(known.contains_key("MemoryPressure") && known.contains_key(&key));
    assert!(!known.contains_key("DiskPressure"), "it is over");
    // The machine was off for a day. That time counts for nothing.
    let later = Stamp {
        boot: crate::types::BootId(2),
        boottime_ms: 5_000,
        wall_ms: 90_000_000,
    };
    let known = at_start(&state, transition, at(710), later);
    assert_eq!(later.since(known[&key].last), Duration::from_secs(10));
    assert_eq!(later.since(known[&key].first), Duration::from_secs(710));
    assert!(pressure_of(&known).disk && pressure_of(&known).memory);
}

fn candidate((pod, usage): &(Pod, PodUse)) -> Candidate<'_> {
    Candidate { pod, usage }
}

fn names(ranked: &[Candidate<'_>]) -> Vec<String> {
    ranked.iter().map(|c| c.pod.name().to_owned()).collect()
}

proptest! {
    /// Whatever is observed, and wherever the agent is restarted: nothing is acted on that is not met, the records are all
    /// that counts, and the order of the pods does not depend on theirs.
    #[test]
    fn restarts_change_nothing(
        looks in prop::collection::vec((1i64..30, 0u64..300, any::<bool>()), 1..60),
        grace in 0u64..60,
    ) {
        let reclaiming = Threshold {
            minimum_reclaim: Some(EvictionThreshold::Quantity(70)),
            ..soft(Signal::Memory, 150, grace)
        };
        let rules = rules(vec![hard(Signal::Memory, 50), reclaiming]);
        let (mut signals, mut twin) = (Signals::new(), Signals::new());
        let (mut state, mut now) = (State::default(), 0);
        for (pause, available, restarts) in looks {
            now += pause;
            let figures = observed(&[(Signal::Memory, available)]);
            let assessment = assess(&rules, &signals, &figures, at(now));
            let without = assess(&rules, &twin, &figures, at(now));
            for threshold in &assessment.acting {
                prop_assert!(threshold.is_met(figures.figures[&Signal::Memory], true));
            }
            if available < 150 {
                prop_assert!(assessment.pressure.memory);
            }
            // One that was never restarted does the same. It may know ten seconds more of when a condition was last seen.
            prop_assert_eq!(&assessment.acting, &without.acting);
            let last = without.signals.get("MemoryPressure").map(|record| record.last);
            let is_nearly_over = last.is_some_and(|last| at(now).since(last).as_secs() >= 290);
            prop_assert!(is_nearly_over || assessment.pressure == without.pressure);
            let changes = changes(&rules, &state, &assessment.signals, at(now));
            apply(&mut state, &changes);
            (signals, twin) = (assessment.signals, without.signals);
            if restarts {
                let known = on_record(&state);
                prop_assert_eq!(pressure_of(&known), pressure_of(&signals));
                let firsts = |s: &Signals| s.iter().map(|(k, r)| (k.clone(), r.first)).collect::<Vec<_>>();
                prop_assert_eq!(firsts(&known), firsts(&signals));
                signals = known;
            }
        }
    }

    #[test]
    fn the_order_of_pods_is_stable(
        pods in prop::collection::vec((0i32..3, 0u64..4, any::<bool>()), 1..12),
        nth in 0usize..7,
    ) {
        let signal = Signal::ALL[nth];
        let made: Vec<_> = pods.iter().enumerate().map(|(n, (priority, used, is_measured))| {
            let priority = if *priority == 2 { 2_000_000_000 } else { *priority };
            let pod = pod(&format!("p{n:02}"), priority, &json!({"memory": "1Mi"}));
            let used = if *is_measured { usage(*used, *used, [*used, 0, 1]) } else { PodUse::default() };
            (pod, used)
        }).collect();
        let forth = names(&ranked(signal, Disks::One, made.iter().map(candidate)));
        let back = names(&ranked(signal, Disks::One, made.iter().rev().map(candidate)));
        prop_assert_eq!(&forth, &back);
        let mut once = forth.clone();
        once.dedup();
        let is_ranked = |is_measured| signal.is_of_disk() || is_measured;
        let ranked = pods.iter().filter(|(_, _, is_measured)| is_ranked(*is_measured));
        prop_assert_eq!(once.len(), ranked.clone().count());
        let chosen = victim(signal, Disks::One, made.iter().map(candidate));
        prop_assert_eq!(chosen.is_some(), ranked.clone().any(|(priority, ..)| *priority < 2));
        prop_assert!(chosen.is_none_or(|c| c.pod.spec_ref().priority < Some(2_000_000_000)));
    }
}

#[test]
fn one_line_says_why_a_pod_was_chosen() {
    let threshold = hard(Signal::Memory, 100 * MI);
    let figure = Figure {
        available: 50 * MI,
        capacity: 1000 * MI,
    };
    let pod = |name: &str, priority: i32, request: &str| -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": "n", "uid": name},
            "spec": {"priority": priority, "containers": [
                {"name": "c", "resources": {"requests": {"memory": request}}},
            ]},
        }))
        .unwrap()
    };
    let using = |mi: u64| PodUse {
        memory: Some(mi * MI),
        processes: Some(mi),
        ..PodUse::default()
    };
    let (over, under) = (pod("over", 7, "100Mi"), pod("under", 7, "400Mi"));
    let critical = pod("critical", 2_000_000_000, "1Mi");
    let (more, less, unknown) = (using(300), using(200), PodUse::default());
    let candidate = |pod, usage| Candidate { pod, usage };
    let pods = [
        candidate(&under, &more),
        candidate(&over, &less),
        candidate(&critical, &more),
        candidate(&under, &unknown),
    ];
    let told = |signal: Signal, threshold: &Threshold, figure: Figure| {
        let chosen = victim(signal, Disks::One, pods).unwrap();
        let standing = standing(signal, Disks::One, &chosen, pods).unwrap();
        why(threshold, figure, &standing)
    };
    assert_eq!(
        told(Signal::Memory, &threshold, figure),
        "memory.available<100Mi, available: 50Mi; first in rank of 2 pods that may be evicted: uses 200Mi, requests 100Mi, \
         is over its request, priority 7"
    );
    let figure = Figure {
        available: 999,
        capacity: 32_768,
    };
    assert_eq!(
        told(Signal::Pid, &hard(Signal::Pid, 1000), figure),
        "pid.available<1000, available: 999; first in rank of 2 pods that may be evicted: uses 300, priority 7"
    );
}

#[test]
fn a_report_is_written_when_more_than_the_figures_changed_or_they_are_old() {
    let rules = rules(vec![hard(Signal::Memory, 100), hard(Signal::Pid, 7)]);
    let mut report = report::Report::default();
    let mut state = State::default();
    let mut version = 0;
    let mut write = |report: &report::Report, is_urgent: bool, second: i64| {
        let changes = report.changes(&state, is_urgent, at(second));
        for mutation in &changes.mutations {
            version += 1;
            state.apply(mutation, version);
        }
        !changes.is_empty()
    };
    report.observe(&rules, &observed(&[(Signal::Memory, 500)]), at(0));
    assert_eq!(report.thresholds[0].quantity, Some(100));
    assert_eq!(report.thresholds[1].quantity, None, "not observed");
    assert!(write(&report, false, 0));
    report.observe(&rules, &observed(&[(Signal::Memory, 400)]), at(10));
    assert!(!write(&report, false, 10));
    assert!(write(&report, true, 10), "a threshold is met");
    report.observe(&rules, &observed(&[(Signal::Memory, 300)]), at(69));
    assert!(!write(&report, false, 69));
    report.observe(&rules, &observed(&[]), at(70));
    assert_eq!(report.thresholds[0].quantity, Some(100), "the last known");
    assert!(write(&report, false, 70));
    report.last_reclaim = Some(report::Reclaim {
        threshold: "memory.available<100".into(),
        began: at(71),
        ended: None,
        removed: None,
    });
    assert!(write(&report, false, 71));
    assert_eq!(report::Report::of(&state), report);
}
