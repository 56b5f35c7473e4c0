//! Tables over (records × runtime), one pod each, and what concerns the store as a whole.

use super::super::state::{
    BackoffRecord, EpochReason, IntentRecord, Mutation, ProbeRecord, Table, TerminationCause,
};
use super::super::testkit::{
    at, created, ended, exited, pod, running, runtime, started, with_backoff,
};
use serde_json::json;

use super::*;
use crate::types::{BootId, ContainerId, Json};

fn in_boot(boot: u64, s: i64) -> Stamp {
    Stamp {
        boot: BootId(boot),
        boottime_ms: s * 1000,
        wall_ms: s * 1000,
    }
}

fn boot(number: u64) -> BootIdentity {
    BootIdentity {
        kernel_boot_id: format!("boot {number}"),
        pid1_start: 1,
        runtime_state: String::new(),
    }
}

/// Input of a start; `u1` is a pod with one container, `a`.
struct Start {
    state: State,
    runtime: BTreeMap<PodUid, RuntimePodStatus>,
    meta: MetaRecord,
    boot: BootIdentity,
    offline: OfflineStart,
    doubted: bool,
    now: Stamp,
}

impl Start {
    /// An agent of the same boot was alive at 99 s; it is 100 s now.
    fn new() -> Self {
        Self {
            state: State::default(),
            runtime: BTreeMap::new(),
            meta: MetaRecord {
                schema: 1,
                node_name: "n".to_owned(),
                machine_id: String::new(),
                boot: boot(1),
                generation: 4,
                clean_shutdown: false,
                heartbeat: at(99),
                epoch: EpochRecord {
                    number: 3,
                    since: at(0),
                    reason: EpochReason::Fresh,
                },
            },
            boot: boot(1),
            offline: OfflineStart::Safe,
            doubted: false,
            now: at(100),
        }
    }

    /// Stores the pod in `phase`, started and reported.
    fn with_pod(policy: &str, phase: WorkerPhase) -> Self {
        Self::new()
            .put(
                "u1",
                PodRecord {
                    source: PodSource::File,
                    origin: "/m/web.yaml".to_owned(),
                    pod: Json(Arc::new(pod(policy, &["a"]))),
                    first_seen: at(10),
                    confirmed_epoch: 3,
                },
            )
            .put(
                "u1",
                WorkerRecord {
                    full_name: "web_ns".to_owned(),
                    queued: at(10),
                    started: Some(at(11)),
                    phase,
                    deleted: false,
                    restart_requested: false,
                    runtime_only: false,
                },
            )
            .put(
                "u1",
                StatusRecord {
                    name: "web".to_owned(),
                    namespace: "ns".to_owned(),
                    status: Json(Arc::default()),
                    version: 1,
                    acknowledged: 0,
                    at: at(20),
                    finished: false,
                },
            )
    }

    fn put<R: super::super::state::Record>(mut self, key: &str, record: R) -> Self {
        for mutation in &Transaction::new().put(key, record).mutations {
            self.state.apply(mutation, 1);
        }
        self
    }

    fn delete<R: super::super::state::Record>(mut self, key: &str) -> Self {
        for mutation in &Transaction::new().delete::<R>(key).mutations {
            self.state.apply(mutation, 1);
        }
        self
    }

    /// The runtime shows this; the records say so too if `known`.
    fn showing(mut self, status: RuntimePodStatus, known: bool) -> Self {
        self.runtime.insert(PodUid::new("u1"), status.clone());
        if known {
            self = self.put("u1", PlegRecord { status });
        }
        self
    }

    fn plan(&self) -> RestorePlan {
        plan_restore(&RestoreInput {
            state: &self.state,
            runtime: &self.runtime,
            listed_at: self.now,
            meta: &self.meta,
            boot: &self.boot,
            backoff_max: Duration::from_secs(300),
            offline_start: self.offline,
            cluster_doubted: self.doubted,
            now: self.now,
        })
    }

    fn pod(&self) -> RestoredPod {
        let plan = self.plan();
        assert_eq!(plan.pods.len(), 1);
        plan.pods[0].clone()
    }
}

fn terminating(cause: TerminationCause) -> WorkerPhase {
    WorkerPhase::Terminating {
        since: at(90),
        grace_seconds: 30,
        deadline: at(120),
        cause,
    }
}

fn finished() -> WorkerPhase {
    WorkerPhase::Finished {
        since: at(90),
        cause: TerminationCause::Completed,
    }
}

/// A running pod on which records and runtime agree.
fn settled() -> Start {
    Start::with_pod("Always", WorkerPhase::Sync)
        .put("u1/a", started("a", 0))
        .showing(runtime(vec![running("a", 0)]), true)
}

#[test]
fn each_pod_is_brought_back_as_its_records_and_the_runtime_say() {
    use Outcome::{Ending, Finished, Repaired, Resumed};
    let sync = |policy| Start::with_pod(policy, WorkerPhase::Sync);
    let cases = [
        ("nothing changed", settled(), Resumed),
        (
            "the container ended unseen",
            sync("Always")
                .put("u1/a", started("a", 0))
                .showing(runtime(vec![running("a", 0)]), true)
                .showing(runtime(vec![exited("a", 0, 1)]), false),
            Repaired,
        ),
        (
            "everything of it is gone",
            sync("Always").put("u1/a", started("a", 0)),
            Repaired,
        ),
        (
            "the runtime was never looked at",
            sync("Always")
                .put("u1/a", started("a", 0))
                .showing(runtime(vec![running("a", 0)]), false),
            Repaired,
        ),
        (
            "an end that was seen but not recorded",
            sync("Never")
                .put("u1/a", started("a", 0))
                .showing(runtime(vec![exited("a", 0, 0)]), true),
            Repaired,
        ),
        (
            "in back-off",
            sync("Always")
                .put("u1/a", with_backoff(ended("a", 1, 1), 80))
                .showing(runtime(vec![exited("a", 1, 1)]), true),
            Resumed,
        ),
        (
            "its status is not recorded",
            settled().delete::<StatusRecord>("u1"),
            Repaired,
        ),
        (
            "it was never handed to a worker",
            settled().delete::<WorkerRecord>("u1"),
            Repaired,
        ),
        (
            "it was rejected",
            settled().put(
                "u1",
                AdmissionRecord {
                    decision: AdmissionDecision::Rejected {
                        reason: "r".to_owned(),
                        message: "m".to_owned(),
                    },
                    allocated: BTreeMap::new(),
                    at: at(10),
                },
            ),
            Repaired,
        ),
        (
            "it was being stopped",
            Start::with_pod("Always", terminating(TerminationCause::Deleted))
                .showing(runtime(vec![running("a", 0)]), true),
            Ending,
        ),
        (
            "it was being stopped and is gone",
            Start::with_pod("Always", terminating(TerminationCause::Deleted)),
            Ending,
        ),
        (
            "it was being cleaned up after",
            Start::with_pod(
                "Always",
                WorkerPhase::Terminated {
                    since: at(90),
                    cause: TerminationCause::Deleted,
                },
            ),
            Ending,
        ),
        ("it is over", Start::with_pod("Never", finished()), Finished),
        (
            "it is over and its status was lost",
            Start::with_pod("Never", finished()).delete::<StatusRecord>("u1"),
            Ending,
        ),
    ];
    for (what, start, outcome) in cases {
        let restored = start.pod();
        assert_eq!(restored.outcome, outcome, "{what}");
        assert_eq!(
            restored.due.is_some(),
            outcome == Resumed,
            "{what}: only what is resumed has a due time"
        );
    }
}

// Invariant START-2.
#[test]
fn a_resumed_pod_keeps_its_due_time_but_waits_no_longer_than_a_pause() {
    let queued = |due| QueueRecord {
        due: at(due),
        why: String::new(),
    };
    assert_eq!(settled().pod().due, Some(at(190)), "none on record");
    for (due, expected) in [(130, 130), (95, 95), (1000, 190)] {
        let restored = settled().put("u1", queued(due)).pod();
        assert_eq!(restored.due, Some(at(expected)), "{due}");
    }
    // The end of a back-off comes before a later due time: it ended at 60 s, plus 80 s.
    let restored = Start::with_pod("Always", WorkerPhase::Sync)
        .put("u1/a", with_backoff(ended("a", 1, 1), 80))
        .put("u1", queued(180))
        .showing(runtime(vec![exited("a", 1, 1)]), true)
        .pod();
    assert_eq!(restored.due, Some(at(140)));
}

/// Returns a status that reports this of container `a`.
fn told(id: Option<&str>, state: &serde_json::Value) -> StatusRecord {
    let container = json!({
        "name": "a", "image": "i", "imageID": "", "ready": false, "restartCount": 0,
        "containerID": id, "state": state,
    });
    let status = serde_json::from_value(json!({"containerStatuses": [container]}));
    StatusRecord {
        name: "web".to_owned(),
        namespace: "ns".to_owned(),
        status: Json(Arc::new(status.unwrap())),
        version: 1,
        acknowledged: 0,
        at: at(20),
        finished: false,
    }
}

#[test]
fn a_pod_whose_status_lacks_an_end_that_is_on_record_is_looked_at_at_once() {
    let ended_so = json!({"terminated": {"exitCode": 0}});
    for (id, state, expected) in [
        (Some("c://a-0"), json!({"running": {}}), Outcome::Repaired),
        (None, json!({"waiting": {}}), Outcome::Repaired),
        (Some("c://a-0"), ended_so, Outcome::Resumed),
    ] {
        let mut start = Start::with_pod("Never", WorkerPhase::Sync)
            .put("u1/a", ended("a", 0, 0))
            .put("u1", told(id, &state));
        start.boot = boot(2);
        start.now = in_boot(2, 1_000);
        assert_eq!(start.pod().outcome, expected, "{state}");
    }
}

#[test]
fn a_pod_whose_status_lacks_the_start_of_a_container_that_runs_is_looked_at_at_once() {
    let runs = json!({"running": {}});
    for (id, state, expected) in [
        (None, json!({"waiting": {}}), Outcome::Repaired),
        (Some("c://a-9"), runs.clone(), Outcome::Repaired),
        (Some("c://a-0"), runs, Outcome::Resumed),
    ] {
        let start = Start::with_pod("Always", WorkerPhase::Sync)
            .put("u1/a", started("a", 0))
            .put("u1", told(id, &state))
            .showing(runtime(vec![running("a", 0)]), true);
        assert_eq!(start.pod().outcome, expected, "{state}");
    }
}

#[test]
fn a_resumed_pod_is_due_when_its_active_deadline_is_whatever_the_queue_says() {
    let limited = |seconds| {
        let mut start = settled();
        let mut record = start.state.record::<PodRecord>("u1").cloned().unwrap();
        let mut pod = (*record.pod.0).clone();
        pod.spec.get_or_insert_default().active_deadline_seconds = Some(seconds);
        record.pod = Json(Arc::new(pod));
        start = start.put("u1", record);
        start.pod()
    };
    // Started at 11 s.
    assert_eq!(limited(120).due, Some(at(131)));
    assert_eq!(limited(60).due, Some(at(71)), "it is over already");
    assert_eq!(limited(3600).due, Some(at(190)));
}

#[test]
fn a_pod_whose_resize_was_cut_off_is_synced_at_once() {
    let of = |cpu: &str| {
        let all = [("cpu", cpu), ("limits.cpu", "0"), ("limits.memory", "0")];
        let all = all.map(|(key, value)| (key.to_owned(), value.to_owned()));
        BTreeMap::from([("a".to_owned(), BTreeMap::from(all))])
    };
    for (what, told, started, outcome) in [
        ("it is in force", "200m", false, Outcome::Resumed),
        ("the runtime was not told", "100m", false, Outcome::Repaired),
        ("its end is not on record", "200m", true, Outcome::Repaired),
    ] {
        let mut start = settled().put(
            "u1",
            AdmissionRecord {
                decision: AdmissionDecision::Admitted,
                allocated: of("200m"),
                at: at(10),
            },
        );
        let record = ResizeRecord {
            actuated: of(told),
            error: None,
            started,
        };
        let key = resize::resize_key(&pod("Always", &["a"]));
        let put = Transaction::new().put_object(&key, &record, at(20));
        for mutation in &put.mutations {
            start.state.apply(mutation, 1);
        }
        let restored = start.pod();
        assert_eq!(restored.outcome, outcome, "{what}");
        let is_resumed = outcome == Outcome::Resumed;
        assert_eq!(restored.due.is_some(), is_resumed, "{what}");
    }
}

#[test]
fn a_pod_is_confirmed_in_the_epoch_its_source_confirmed_it_in_and_later_ones_are_not() {
    for (epoch, confirmed) in [(3, true), (2, true), (4, false)] {
        let mut start = settled();
        start.meta.epoch.number = epoch;
        assert_eq!(start.pod().confirmed, confirmed, "epoch {epoch}");
        assert_eq!(start.plan().epoch.number, epoch);
    }
}

#[test]
fn a_pod_that_is_gone_from_its_source_is_not_desired_unless_it_came_back() {
    for (deleted, came_back, desired) in [
        (false, false, true),
        (true, false, false),
        (true, true, true),
    ] {
        let start = Start::with_pod("Always", terminating(TerminationCause::Deleted));
        let record = start.state.record::<WorkerRecord>("u1").unwrap().clone();
        let record = WorkerRecord {
            deleted,
            restart_requested: came_back,
            ..record
        };
        assert_eq!(start.put("u1", record).pod().desired, desired);
    }
}

#[test]
fn the_cache_starts_with_what_is_known_to_be_current_empty_ones_included() {
    let current = |start: &Start| start.plan().current;
    let seen = current(&settled());
    assert_eq!(seen.len(), 1);
    assert_eq!(seen[0].containers.len(), 1);

    let changed = settled().showing(runtime(vec![exited("a", 0, 1)]), false);
    assert_eq!(current(&changed), [], "changed: to be inspected");

    let mut gone = settled();
    gone.runtime.clear();
    let seen = current(&gone);
    assert_eq!(seen.len(), 1);
    assert!(seen[0].containers.is_empty() && seen[0].sandboxes.is_empty());
}

#[test]
fn what_runs_and_is_not_on_record_is_left_for_the_sources_to_adopt() {
    let start = Start::new().showing(runtime(vec![running("a", 0)]), true);
    let plan = start.plan();
    assert_eq!(plan.unrecorded, BTreeSet::from([PodUid::new("u1")]));
    assert!(plan.pods.is_empty());
    assert_eq!(plan.current.len(), 1, "its look is still current");

    // The look at a pod that nobody knows any more is dropped.
    let mut start = start;
    start.runtime.clear();
    let dropped = Mutation::Delete {
        table: Table::Pleg,
        key: "u1".into(),
    };
    assert!(start.plan().transaction.mutations.contains(&dropped));
}

#[test]
fn workers_of_pods_known_from_the_runtime_only_are_forgotten() {
    let start =
        Start::with_pod("Always", terminating(TerminationCause::Orphan)).delete::<PodRecord>("u1");
    let record = start.state.record::<WorkerRecord>("u1").unwrap().clone();
    let plan = start
        .put(
            "u1",
            WorkerRecord {
                runtime_only: true,
                ..record
            },
        )
        .plan();
    let dropped = Mutation::Delete {
        table: Table::Workers,
        key: "u1".into(),
    };
    assert!(plan.transaction.mutations.contains(&dropped));
    assert!(plan.pods.is_empty());
}

#[test]
fn after_a_reboot_a_deadline_keeps_the_time_it_had_at_the_last_heartbeat() {
    let mut start = Start::with_pod("Always", terminating(TerminationCause::Deleted));
    start.boot = boot(2);
    // A young boot, and a wall clock that went back to 1970.
    start.now = in_boot(2, 5);
    let plan = start.plan();
    assert!(plan.rebooted);
    let WorkerPhase::Terminating { deadline, .. } = plan.pods[0].record.phase else {
        panic!("terminating: {:?}", plan.pods[0].record.phase);
    };
    // 120 s, seen from the heartbeat at 99 s.
    assert_eq!(deadline.until(start.now), Duration::from_secs(21));
    assert_eq!(plan.pods[0].outcome, Outcome::Ending);
}

#[test]
fn within_a_boot_nothing_is_rebased_and_only_the_meta_record_changes() {
    let plan = settled().plan();
    assert!(!plan.rebooted);
    let [Mutation::Put { key, record }] = plan.transaction.mutations.as_slice() else {
        panic!("{:?}", plan.transaction.mutations);
    };
    assert_eq!((&**key, record.table()), (META_KEY, Table::Meta));
}

#[test]
fn each_start_is_a_generation_and_says_why_it_is_one() {
    let said = |change: &dyn Fn(&mut Start)| {
        let mut start = Start::new();
        change(&mut start);
        let plan = start.plan();
        (plan.rebooted, plan.transaction.journal[0].why.clone())
    };
    let (rebooted, why) = said(&|_| ());
    assert!(!rebooted && why.starts_with("generation 5") && why.contains("did not end in order"));
    let (rebooted, why) = said(&|s| s.meta.clean_shutdown = true);
    assert!(!rebooted && why.contains("orderly"));
    let (rebooted, why) = said(&|s| s.boot = boot(2));
    assert!(rebooted && why.contains("started anew"));
    let (rebooted, why) = said(&|s| {
        s.meta.generation = 0;
        s.boot = boot(2);
    });
    assert!(!rebooted && why.contains("first start"), "{why}");
}

#[test]
fn after_a_reboot_back_offs_and_pulls_go_on_where_they_stood() {
    let mut start = Start::with_pod("Always", WorkerPhase::Sync)
        .put("u1/a", with_backoff(ended("a", 1, 1), 80))
        .put(
            "img:1",
            ImageRecord {
                pulled_ref: None,
                backoffs: BTreeMap::from([(
                    PodUid::new("u1"),
                    BackoffRecord {
                        duration_ms: 160_000,
                        since: at(79),
                    },
                )]),
                first_seen: at(0),
                last_used: at(0),
            },
        );
    start.boot = boot(2);
    start.now = in_boot(2, 1_000_000);
    let mut state = start.state.clone();
    let plan = start.plan();
    for mutation in &plan.transaction.mutations {
        state.apply(mutation, 2);
    }
    // It ended at 60 s and the pull failed at 79 s; the last sign of life was at 99 s.
    let container = state.record::<ContainerRecord>("u1/a").unwrap();
    let finished = container.last_exit.as_ref().unwrap().finished;
    assert_eq!(start.now.since(finished), Duration::from_secs(39));
    let failed = state.record::<ImageRecord>("img:1").unwrap().backoffs[&PodUid::new("u1")].since;
    assert_eq!(start.now.since(failed), Duration::from_secs(20));
}

#[test]
fn after_a_reboot_a_probe_is_as_old_as_it_was_at_the_last_heartbeat() {
    let probe = ProbeRecord {
        container_id: ContainerId::new("a-0"),
        result: "Success".to_owned(),
        last: "Failure".to_owned(),
        consecutive: 2,
        at: at(94),
    };
    let mut start = Start::with_pod("Always", WorkerPhase::Sync).put("u1/a/Liveness", probe);
    start.boot = boot(2);
    start.now = in_boot(2, 1_000);
    let mut state = start.state.clone();
    for mutation in &start.plan().transaction.mutations {
        state.apply(mutation, 2);
    }
    let moved = state.record::<ProbeRecord>("u1/a/Liveness").unwrap();
    assert_eq!(moved.at.boot, BootId(2));
    assert_eq!(start.now.since(moved.at), Duration::from_secs(5));
    assert_eq!((moved.consecutive, moved.last.as_str()), (2, "Failure"));
}

#[test]
fn a_start_after_the_last_heartbeat_of_another_boot_comes_before_the_listing_of_this_one() {
    let (heartbeat, intended) = (in_boot(1, 100), in_boot(1, 107));
    let (listed_at, now) = (in_boot(2, 5), in_boot(2, 6));
    let record = ContainerRecord {
        intent: Some(IntentRecord {
            container_id: ContainerId::new("c"),
            attempt: 0,
            hash: "h".to_owned(),
            at: intended,
        }),
        ..ContainerRecord::new()
    };
    let mut state = State::default();
    for mutation in &Transaction::new().put("u/c", record).mutations {
        state.apply(mutation, 1);
    }
    let moved = |state: &State| {
        let record = state.record::<ContainerRecord>("u/c").unwrap();
        record.intent.as_ref().unwrap().at
    };

    let (rebased, transaction) = rebase(&state, &BTreeMap::new(), heartbeat, listed_at, now);
    assert!(moved(&rebased).boottime_ms < listed_at.boottime_ms);
    assert_eq!(moved(&rebased).boot, now.boot);
    assert!(!transaction.is_empty(), "the moved stamp is committed");

    // Within one boot nothing is moved.
    let (rebased, transaction) = rebase(
        &state,
        &BTreeMap::new(),
        heartbeat,
        in_boot(1, 110),
        in_boot(1, 111),
    );
    assert_eq!(moved(&rebased), intended);
    assert!(transaction.is_empty());
}

#[test]
fn a_reboot_is_no_crash_of_what_ran_and_shortens_no_back_off_of_what_had_ended() {
    let backoff = crate::core::state::BackoffRecord {
        duration_ms: 300_000,
        since: in_boot(1, 100),
    };
    let running = ContainerRecord {
        intent: Some(IntentRecord {
            container_id: ContainerId::new("c"),
            attempt: 7,
            hash: String::new(),
            at: in_boot(1, 100),
        }),
        backoff: Some(backoff),
        restart_count: 7,
        ..ContainerRecord::new()
    };
    let ended = ContainerRecord {
        last_exit: Some(crate::core::state::ExitRecord {
            container_id: ContainerId::new("c"),
            attempt: 7,
            image: String::new(),
            image_ref: String::new(),
            started_at_ns: 0,
            finished_at_ns: 0,
            finished: in_boot(1, 110),
            exit_code: 1,
            reason: String::new(),
            message: String::new(),
            inferred: false,
        }),
        ..running.clone()
    };
    let reboot = |s: Stamp| s.rebase(in_boot(1, 120), in_boot(2, 5));
    assert_eq!(rebase_container(&running, false, reboot).backoff, None);
    assert_eq!(rebase_container(&running, false, reboot).restart_count, 7);
    assert_eq!(
        rebase_container(&ended, false, reboot)
            .backoff
            .map(|b| b.duration_ms),
        Some(300_000)
    );
    let same_boot = |s: Stamp| s;
    assert_eq!(
        rebase_container(&running, false, same_boot).backoff,
        Some(backoff)
    );
}

#[test]
fn an_end_that_came_with_the_shutdown_of_the_machine_leaves_no_back_off() {
    let record = |finished| {
        let mut record = with_backoff(ended("a", 0, 0), 300);
        record.last_exit.as_mut().unwrap().finished = in_boot(1, finished);
        record
    };
    let shutdown = ShutdownRecord {
        begun: in_boot(1, 60),
        deadline: in_boot(1, 80),
        ended: None,
        cancelled: None,
        local: false,
    };
    let cancelled = ShutdownRecord {
        cancelled: Some(in_boot(1, 61)),
        ..shutdown
    };
    for (what, shutdown, finished, kept) in [
        ("before it", Some(shutdown), 58, true),
        ("with it", Some(shutdown), 60, false),
        ("by a clock that is slow", Some(shutdown), 59, false),
        ("cancelled", Some(cancelled), 70, true),
        ("none", None, 70, true),
    ] {
        let mut start = Start::with_pod("Always", WorkerPhase::Sync).put("u1/a", record(finished));
        if let Some(shutdown) = shutdown {
            let transaction = shutdown.transaction("why", in_boot(1, 60));
            start.state.apply(&transaction.mutations[0], 1);
        }
        start.boot = boot(2);
        start.now = in_boot(2, 1_000);
        let mut state = start.state.clone();
        for mutation in &start.plan().transaction.mutations {
            state.apply(mutation, 2);
        }
        let restored = state.record::<ContainerRecord>("u1/a").unwrap();
        assert_eq!(restored.backoff.is_some(), kept, "{what}");
    }
}

// Invariant POD-4.
#[test]
fn a_static_pod_that_a_shutdown_stopped_goes_on_after_the_boot_with_its_records() {
    let stopped = WorkerPhase::Finished {
        since: at(90),
        cause: shutdown::cause(),
    };
    let shutdown = ShutdownRecord {
        begun: at(80),
        deadline: at(110),
        ended: Some(at(91)),
        cancelled: None,
        local: false,
    };
    let mut start = Start::with_pod("Always", stopped.clone()).put("u1/a", ended("a", 0, 0));
    let transaction = shutdown.transaction("why", at(91));
    start.state.apply(&transaction.mutations[0], 1);
    // The agent alone was started again: the machine is about to go down.
    assert_eq!(start.pod().outcome, Outcome::Finished);

    start.boot = boot(2);
    start.now = in_boot(2, 1_000);
    let restored = start.pod();
    assert_eq!(restored.outcome, Outcome::Repaired);
    assert_eq!(restored.record.phase, WorkerPhase::Sync);
    assert!(restored.desired && restored.confirmed);
    let mut state = start.state.clone();
    let plan = start.plan();
    for mutation in &plan.transaction.mutations {
        state.apply(mutation, 2);
    }
    let worker = state.record::<WorkerRecord>("u1").unwrap();
    assert_eq!(worker.phase, WorkerPhase::Sync);
    assert_eq!(state.record::<StatusRecord>("u1"), None, "Failed for good");
    let container = state.record::<ContainerRecord>("u1/a").unwrap();
    assert!(container.last_exit.is_some());

    // One of the API server stays as it ended.
    let mut of_api = start.state.record::<PodRecord>("u1").cloned().unwrap();
    of_api.source = PodSource::Api;
    let start = Start {
        state: start.put("u1", of_api).state,
        boot: boot(2),
        now: in_boot(2, 1_000),
        ..Start::new()
    };
    assert_eq!(start.pod().outcome, Outcome::Finished);
    assert_eq!(start.pod().record.phase, stopped);
}

#[test]
fn after_a_reboot_a_start_on_record_outweighs_a_runtime_that_shows_it_as_created() {
    let start = |record: ContainerRecord, shown: RuntimePodStatus| {
        let mut start = Start::with_pod("Never", WorkerPhase::Sync)
            .put("u1/a", record)
            .showing(shown, true);
        start.boot = boot(2);
        start.now = in_boot(2, 1_000);
        start
    };
    let end_of = |start: &Start| {
        let mut state = start.state.clone();
        let plan = start.plan();
        for mutation in &plan.transaction.mutations {
            state.apply(mutation, 2);
        }
        let record = state.record::<ContainerRecord>("u1/a").unwrap();
        let told = plan.transaction.journal.iter();
        let told = told.filter(|line| line.what == "container ended").count();
        let end = record.last_exit.as_ref();
        let end = end.map(|end| (end.container_id.to_string(), end.exit_code, end.inferred));
        (end, told, plan.pods[0].outcome)
    };
    let concluded = Some(("a-1".to_owned(), 137, true));

    let cut_off = start(
        with_backoff(started("a", 1), 80),
        runtime(vec![created("a", 1)]),
    );
    assert_eq!(end_of(&cut_off), (concluded, 1, Outcome::Repaired));

    // Nothing is concluded in the boot of the intent, nor of a container that is not the intended one, that is
    // shown as more than created, or whose end is on record.
    let mut same_boot = cut_off;
    same_boot.boot = boot(1);
    same_boot.now = at(100);
    assert_eq!(end_of(&same_boot).0, None);
    for (shown, record, want) in [
        (created("a", 2), started("a", 1), None),
        (exited("a", 1, 0), started("a", 1), None),
        (
            created("a", 1),
            ended("a", 1, 3),
            Some(("a-1".to_owned(), 3, false)),
        ),
    ] {
        let name = format!("{shown:?}");
        let (end, told, outcome) = end_of(&start(record, runtime(vec![shown])));
        assert_eq!((end, told), (want, 0), "{name}");
        assert_eq!(outcome, Outcome::Repaired, "{name}");
    }
}

#[test]
fn after_a_reboot_pods_of_the_api_wait_as_the_policy_says_until_it_was_read() {
    let api_pod = |metadata: serde_json::Value| {
        let mut pod = pod("Always", &["a"]);
        let owners = metadata["owners"].clone();
        pod.metadata.owner_references = serde_json::from_value(owners).unwrap();
        PodRecord {
            source: PodSource::Api,
            origin: String::new(),
            pod: Json(Arc::new(pod)),
            first_seen: at(10),
            confirmed_epoch: 3,
        }
    };
    let plain = serde_json::json!({"owners": null});
    let stateful = serde_json::json!({"owners": [
        {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db", "uid": "s"},
    ]});
    let read = |boot: u64| SourceRecord {
        location: "https://api".to_owned(),
        read: in_boot(boot, 5),
        error: "refused".to_owned(),
        broken: BTreeMap::new(),
    };
    // (reboot, pod, policy, boot in which the API was read last, held)
    for (rebooted, metadata, policy, read_in, held) in [
        (true, &plain, OfflineStart::Safe, 1, false),
        (true, &stateful, OfflineStart::Safe, 1, true),
        (true, &stateful, OfflineStart::Safe, 2, false),
        (true, &stateful, OfflineStart::All, 1, false),
        (true, &plain, OfflineStart::None, 1, true),
        (false, &stateful, OfflineStart::Safe, 1, false),
        (false, &plain, OfflineStart::None, 1, false),
    ] {
        let mut start = Start::with_pod("Always", WorkerPhase::Sync)
            .put("u1", api_pod(metadata.clone()))
            .put(PodSource::Api.as_str(), read(read_in));
        start.offline = policy;
        if rebooted {
            start.boot = boot(2);
            start.now = in_boot(2, 20);
        }
        let plan = start.plan();
        let restored = &plan.pods[0];
        let what = format!("{rebooted} {metadata} {policy:?} {read_in}");
        assert_eq!(restored.held.is_some(), held, "{what}");
        assert_eq!(restored.confirmed, !held, "{what}");
        let told = plan.transaction.journal.iter().any(|l| l.what == "held");
        assert_eq!(told, held, "{what}");
    }
    // Nor does a static pod wait, whatever the policy.
    let mut start = Start::with_pod("Always", WorkerPhase::Sync);
    start.offline = OfflineStart::None;
    start.boot = boot(2);
    start.now = in_boot(2, 20);
    assert_eq!(start.plan().pods[0].held, None);
}

#[test]
fn pods_of_the_api_wait_for_it_while_the_cluster_is_in_doubt() {
    for (source, rebooted, held) in [
        (PodSource::Api, false, true),
        (PodSource::Api, true, true),
        (PodSource::File, false, false),
        (PodSource::File, true, false),
    ] {
        let mut start = Start::with_pod("Always", WorkerPhase::Sync);
        let known = start.state.record::<PodRecord>("u1").unwrap().clone();
        start = start.put("u1", PodRecord { source, ..known });
        start.offline = OfflineStart::All;
        start.doubted = true;
        if rebooted {
            start.boot = boot(2);
            start.now = in_boot(2, 20);
        }
        let pod = start.pod();
        assert_eq!(pod.held.is_some(), held, "{source:?} {rebooted}");
        start.doubted = false;
        assert_eq!(start.pod().held, None, "{source:?} {rebooted}");
    }
}

#[test]
fn the_boot_of_a_start_is_on_record_after_it() {
    let mut start = Start::new();
    start.boot = boot(2);
    start.meta.clean_shutdown = true;
    let plan = start.plan();
    let mut state = State::default();
    for mutation in &plan.transaction.mutations {
        state.apply(mutation, 1);
    }
    let meta = state.meta().unwrap();
    assert_eq!((&meta.boot, meta.generation), (&boot(2), 5));
    assert!(!meta.clean_shutdown);
    assert_eq!(meta.heartbeat, start.now);
}

#[test]
fn only_what_was_counted_in_another_boot_moves() {
    let backoff = |boot| crate::core::state::BackoffRecord {
        duration_ms: 300_000,
        since: in_boot(boot, 100),
    };
    let record = |boot| ContainerRecord {
        backoff: Some(backoff(boot)),
        ..ContainerRecord::new()
    };
    assert!(has_foreign_stamp(&record(1), in_boot(2, 5)));
    assert!(!has_foreign_stamp(&record(2), in_boot(2, 5)));
    assert!(!has_foreign_stamp(&ContainerRecord::new(), in_boot(2, 5)));
}
