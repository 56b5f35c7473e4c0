use serde_json::json;

use super::*;
use crate::core::state::FactRecord;
use crate::types::BootId;

fn at(boot: u64, s: i64) -> Stamp {
    Stamp {
        boot: BootId(boot),
        boottime_ms: s * 1000,
        wall_ms: s * 1000,
    }
}

fn pod(priority: Option<i32>, grace: Option<i64>) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "p", "namespace": "ns", "uid": "u"},
        "spec": {"priority": priority, "terminationGracePeriodSeconds": grace, "containers": [{"name": "c"}]},
    }))
    .unwrap()
}

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn by_priority(groups: &[(i32, i64)]) -> Vec<PriorityPeriod> {
    let group = |(priority, seconds): &(i32, i64)| PriorityPeriod {
        priority: *priority,
        seconds: *seconds,
    };
    groups.iter().map(group).collect()
}

#[test]
fn the_period_is_split_between_regular_and_critical_pods() {
    for (total, critical, groups) in [
        (30, 10, Some(vec![(0, 20), (CRITICAL, 10)])),
        (30, 0, Some(vec![(0, 30), (CRITICAL, 0)])),
        (30, 30, Some(vec![(0, 0), (CRITICAL, 30)])),
        (0, 0, None),
        // What validation refuses stops nobody.
        (10, 20, None),
    ] {
        let periods = Periods::new(seconds(total), seconds(critical), &[]);
        let wanted = groups.map(|groups| Periods(by_priority(&groups)));
        assert_eq!(periods, wanted, "{total} {critical}");
    }
    let periods = Periods::new(
        Duration::from_millis(30_900),
        Duration::from_millis(900),
        &[],
    );
    assert_eq!(
        periods.unwrap().total(),
        seconds(30),
        "whole seconds count, each part for itself"
    );
}

#[test]
fn a_pod_is_in_the_highest_group_that_its_priority_reaches() {
    let periods = by_priority(&[(1000, 20), (-5, 7), (100_000, 10)]);
    let periods = Periods::new(Duration::ZERO, Duration::ZERO, &periods).unwrap();
    assert_eq!((periods.len(), periods.total()), (3, seconds(37)));
    for (priority, group) in [
        (Some(i32::MIN), 0),
        (Some(-5), 0),
        (None, 0),
        (Some(999), 0),
        (Some(1000), 1),
        (Some(99_999), 1),
        (Some(100_000), 2),
        (Some(i32::MAX), 2),
    ] {
        assert_eq!(
            periods.group_of(&pod(priority, None)),
            group,
            "{priority:?}"
        );
    }
}

#[test]
fn a_grace_period_is_the_pods_own_and_at_most_its_groups() {
    let periods = Periods::new(seconds(30), seconds(10), &[]).unwrap();
    for (priority, own, grace) in [
        (0, Some(5), 5),
        (0, Some(60), 20),
        (0, None, 20),
        (CRITICAL, Some(30), 10),
        (CRITICAL, Some(0), 0),
    ] {
        assert_eq!(periods.grace(&pod(Some(priority), own)), grace, "{own:?}");
    }
}

#[test]
fn a_group_gets_what_is_left_of_the_shutdown() {
    let periods = Periods::new(seconds(30), seconds(10), &[]).unwrap();
    let record = ShutdownRecord::begin(&periods, at(1, 100));
    for (group, now, time) in [
        (0, 100, 20),
        (1, 105, 10),
        (0, 115, 15),
        (1, 126, 4),
        (1, 131, 0),
        (7, 100, 0),
    ] {
        assert_eq!(
            periods.time_for(group, &record, at(1, now)),
            seconds(time),
            "group {group} at {now}"
        );
    }
}

#[test]
fn only_an_end_that_cuts_work_short_is_marked() {
    use crate::core::container_history::{NODE_SHUTDOWN, judged_code};
    use crate::core::testkit::{exited, pod, running, runtime};

    for (policy, wanted) in [
        ("Never", NODE_SHUTDOWN),
        ("OnFailure", NODE_SHUTDOWN),
        ("Always", ""),
    ] {
        let mut status = runtime(vec![
            exited("a", 1, 0),
            exited("b", 0, 7),
            exited("c", 0, 0),
            running("d", 0),
        ]);
        let stopped = ["a-1", "b-0", "d-0"].map(Into::into);
        mark_stopped(&pod(policy, &["a", "b", "c", "d"]), &stopped, &mut status);
        let reason = |name: &str| status.container(name).unwrap().reason.clone();
        let reasons = ["a", "b", "c", "d"].map(reason);
        assert_eq!(reasons, [wanted, "", "", ""], "{policy}");
    }
    assert_eq!(judged_code(0, Some(NODE_SHUTDOWN)), 137);
    assert_eq!(judged_code(0, Some("Completed")), 0);
    assert_eq!(judged_code(7, Some(NODE_SHUTDOWN)), 7);
}

#[test]
fn a_shutdown_is_in_force_in_its_boot_until_it_is_cancelled() {
    let periods = Periods::new(seconds(30), seconds(10), &[]).unwrap();
    let mut record = ShutdownRecord::begin(&periods, at(1, 100));
    assert!(record.is_in_force(at(1, 101)));
    assert!(record.is_in_force(at(1, 900)), "the machine is still up");
    assert!(!record.is_in_force(at(2, 101)));
    record.ended = Some(at(1, 110));
    assert!(record.is_in_force(at(1, 111)));
    record.cancelled = Some(at(1, 112));
    assert!(!record.is_in_force(at(1, 113)));
}

#[test]
fn the_record_reads_back_and_the_journal_says_how_far_it_is() {
    let periods = Periods::new(seconds(30), seconds(10), &[]).unwrap();
    let mut record = ShutdownRecord::begin(&periods, at(1, 100));
    for what in ["shutdown began", "shutdown ended", "shutdown cancelled"] {
        match what {
            "shutdown ended" => record.ended = Some(at(1, 110)),
            "shutdown cancelled" => record.cancelled = Some(at(1, 120)),
            _ => {}
        }
        let transaction = record.transaction("why", at(1, 120));
        assert_eq!(transaction.journal[0].what, what);
        let mut state = State::default();
        for (version, mutation) in (1..).zip(&transaction.mutations) {
            state.apply(mutation, version);
        }
        assert_eq!(ShutdownRecord::of(&state), Some(record), "{what}");
    }
    let damaged = FactRecord {
        mark: String::new(),
        layout: 1,
        data: b"{".to_vec(),
        at: at(1, 1),
    };
    let transaction = Transaction::new().put(ShutdownRecord::key(), damaged);
    let mut state = State::default();
    state.apply(&transaction.mutations[0], 1);
    assert_eq!(ShutdownRecord::of(&state), None);
    assert_eq!(ShutdownRecord::of(&State::default()), None);
}

fn worker(phase: WorkerPhase) -> WorkerRecord {
    WorkerRecord {
        full_name: "p_ns".to_owned(),
        queued: at(1, 1),
        started: Some(at(1, 1)),
        phase,
        deleted: false,
        restart_requested: false,
        runtime_only: false,
    }
}

fn finished(cause: TerminationCause) -> WorkerRecord {
    worker(WorkerPhase::Finished {
        since: at(1, 50),
        cause,
    })
}

fn rejected(reason: &str) -> AdmissionRecord {
    AdmissionRecord {
        decision: AdmissionDecision::Rejected {
            reason: reason.to_owned(),
            message: String::new(),
        },
        allocated: Default::default(),
        at: at(1, 1),
    }
}

#[test]
fn static_pods_come_back_after_a_shutdown_and_others_stay_as_they_ended() {
    use AfterShutdown::{AdmitAgain, Resume};
    use PodSource::{Api, File, Http};
    let periods = Periods::new(seconds(30), seconds(10), &[]).unwrap();
    let record = ShutdownRecord::begin(&periods, at(1, 40));
    let cancelled = ShutdownRecord {
        cancelled: Some(at(1, 60)),
        ..record
    };
    let evicted = TerminationCause::Evicted {
        reason: "Evicted".to_owned(),
        message: TERMINATED_MESSAGE.to_owned(),
    };
    let gone = WorkerRecord {
        deleted: true,
        ..finished(cause())
    };
    let stopping = worker(WorkerPhase::Terminating {
        since: at(1, 50),
        grace_seconds: 5,
        deadline: at(1, 55),
        cause: cause(),
    });
    let terminated = worker(WorkerPhase::Terminated {
        since: at(1, 50),
        cause: cause(),
    });
    let runs = worker(WorkerPhase::Sync);
    let done = finished(TerminationCause::Completed);
    for (what, source, worker, refused, now, shutdown, wanted) in [
        (
            "the next boot",
            File,
            &finished(cause()),
            None,
            at(2, 1),
            Some(&record),
            Some(Resume),
        ),
        (
            "from a URL",
            Http,
            &finished(cause()),
            None,
            at(2, 1),
            Some(&record),
            Some(Resume),
        ),
        (
            "cut off while it stopped",
            File,
            &stopping,
            None,
            at(2, 1),
            Some(&record),
            Some(Resume),
        ),
        (
            "cut off while it was cleaned up",
            File,
            &terminated,
            None,
            at(2, 1),
            Some(&record),
            Some(Resume),
        ),
        (
            "cancelled",
            File,
            &finished(cause()),
            None,
            at(1, 70),
            Some(&cancelled),
            Some(Resume),
        ),
        (
            "the record was lost",
            File,
            &finished(cause()),
            None,
            at(1, 70),
            None,
            Some(Resume),
        ),
        (
            "still in force",
            File,
            &finished(cause()),
            None,
            at(1, 70),
            Some(&record),
            None,
        ),
        (
            "of the API server",
            Api,
            &finished(cause()),
            None,
            at(2, 1),
            Some(&record),
            None,
        ),
        (
            "evicted for another reason",
            File,
            &finished(evicted),
            None,
            at(2, 1),
            Some(&record),
            None,
        ),
        (
            "completed",
            File,
            &done,
            None,
            at(2, 1),
            Some(&record),
            None,
        ),
        (
            "not stopped",
            File,
            &runs,
            None,
            at(2, 1),
            Some(&record),
            None,
        ),
        (
            "its manifest is gone",
            File,
            &gone,
            None,
            at(2, 1),
            Some(&record),
            None,
        ),
        (
            "refused",
            File,
            &done,
            Some(NOT_ADMITTED),
            at(2, 1),
            Some(&record),
            Some(AdmitAgain),
        ),
        (
            "refused, still in force",
            File,
            &done,
            Some(NOT_ADMITTED),
            at(1, 70),
            Some(&record),
            None,
        ),
        (
            "refused for another reason",
            File,
            &done,
            Some("OutOfcpu"),
            at(2, 1),
            Some(&record),
            None,
        ),
        (
            "of the API server, refused",
            Api,
            &done,
            Some(NOT_ADMITTED),
            at(2, 1),
            Some(&record),
            None,
        ),
    ] {
        let admission = refused.map(rejected);
        let found = after_shutdown(source, worker, admission.as_ref(), shutdown, now);
        assert_eq!(found, wanted, "{what}");
    }
}

#[test]
fn the_status_of_a_pod_of_the_api_server_is_untold_until_it_is_acknowledged() {
    let uids = ["of the server", "of a file", "gone"].map(PodUid::new);
    let mut state = State::default();
    let mut version = 0;
    let mut put = |transaction: Transaction| {
        for mutation in &transaction.mutations {
            version += 1;
            state.apply(mutation, version);
        }
    };
    let told = |acknowledged| StatusRecord {
        name: "p".to_owned(),
        namespace: "ns".to_owned(),
        status: crate::types::Json::new(Default::default()),
        version: 3,
        acknowledged,
        at: at(1, 50),
        finished: true,
    };
    let of = |source| PodRecord {
        source,
        origin: String::new(),
        pod: crate::types::Json::new(pod(None, None)),
        first_seen: at(1, 1),
        confirmed_epoch: 1,
    };
    put(Transaction::new()
        .put("of the server", of(PodSource::Api))
        .put("of the server", told(2))
        .put("of a file", of(PodSource::File))
        .put("of a file", told(2)));
    assert_eq!(untold(&state, &uids), [&uids[0]]);
    let told = Transaction::new().put("of the server", told(3));
    state.apply(&told.mutations[0], 100);
    assert_eq!(untold(&state, &uids), [] as [&PodUid; 0]);
}

#[test]
fn logind_is_asked_for_a_longer_delay_only_when_its_own_is_too_short() {
    let periods = Periods::new(seconds(30), seconds(10), &[]).unwrap();
    assert_eq!(delay_to_ask_for(&periods, seconds(5)), Some(seconds(32)));
    assert_eq!(delay_to_ask_for(&periods, seconds(31)), Some(seconds(32)));
    assert_eq!(delay_to_ask_for(&periods, seconds(32)), None);
    let text = delay_drop_in(seconds(32));
    assert!(text.ends_with("[Login]\nInhibitDelayMaxSec=32\n"), "{text}");
}

#[test]
fn the_machine_goes_down_when_systemd_says_so() {
    for (state, down) in [
        ("stopping", true),
        ("running", false),
        ("degraded", false),
        ("maintenance", false),
        ("", false),
    ] {
        assert_eq!(is_going_down(state), down, "{state}");
    }
}
