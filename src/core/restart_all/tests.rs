use serde_json::json;

use super::*;
use crate::core::state::{Durability, FactRecord};
use crate::core::testkit::*;
use crate::types::runtime::ContainerStatus;

/// All of the pod's containers at the newest attempt 0, `b` with this one.
fn with_b(b: ContainerStatus) -> Vec<ContainerStatus> {
    vec![exited("i", 0, 0), running("s", 0), running("a", 0), b]
}

fn all_ended() -> Vec<ContainerStatus> {
    let (i, s) = (exited("i", 0, 0), exited("s", 0, 137));
    vec![i, s, exited("a", 0, 137), exited("b", 0, 88)]
}

const ALL: &[(&str, u32)] = &[("a", 0), ("b", 0), ("i", 0), ("s", 0)];

/// The restart that is recorded after the next step, if there is one.
fn step(pod: &Pod, containers: Vec<ContainerStatus>, restart: Option<Restart>) -> Option<Restart> {
    let mut state = State::default();
    let status = runtime(containers);
    let records = Records::default().with_restart(restart);
    let seen = Seen {
        pod,
        status: &status,
        records: &records,
        listed_at: at(70),
        now: at(70),
    };
    let step = advance(&state, &seen)?;
    for mutation in &step.mutations {
        state.apply(mutation, 1);
    }
    let on_record = Restart::of(&state, &pod.uid());
    assert!(on_record.is_some(), "a step is on record");
    on_record
}

#[test]
fn an_exit_restarts_all_containers_once_and_when_all_of_them_have_ended() {
    let never = pod_that_restarts("Never");
    let stopping = || Some(restart_by_b(0, None));
    let ended = || Some(restart_by_b(0, Some(ALL)));
    let mut deleting = never.clone();
    deleting.metadata.deletion_timestamp = Some(
        k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH),
    );
    let mut left = all_ended();
    left.push(created("i", 1));
    let mut unclear = all_ended();
    unclear[2] = unknown("a", 0);
    let mut twice = all_ended();
    twice.push(running("a", 1));
    let table = [
        ("b runs", &never, with_b(running("b", 0)), None, None),
        (
            "another code",
            &never,
            with_b(exited("b", 0, 1)),
            None,
            None,
        ),
        (
            "the code of the rule",
            &never,
            with_b(exited("b", 0, 88)),
            None,
            stopping(),
        ),
        (
            "whatever the pod's policy",
            &pod_that_restarts("Always"),
            with_b(exited("b", 0, 88)),
            None,
            stopping(),
        ),
        (
            "the pod is being deleted",
            &deleting,
            with_b(exited("b", 0, 88)),
            None,
            None,
        ),
        (
            "others have to be stopped first",
            &never,
            with_b(exited("b", 0, 88)),
            stopping(),
            None,
        ),
        ("all have ended", &never, all_ended(), stopping(), ended()),
        (
            "a created one has to be removed first",
            &never,
            left,
            stopping(),
            None,
        ),
        (
            "one whose state is unknown was stopped",
            &never,
            unclear,
            stopping(),
            ended(),
        ),
        ("a newer one runs", &never, twice, stopping(), None),
        ("once", &never, all_ended(), ended(), None),
        (
            "the next end is another one",
            &never,
            vec![exited("b", 1, 88), running("a", 1)],
            ended(),
            Some(restart_by_b(1, None)),
        ),
        (
            "a record that is older than what runs",
            &never,
            with_b(running("b", 3)),
            stopping(),
            None,
        ),
        (
            "and one that is older than the newest end",
            &never,
            with_b(exited("b", 3, 88)),
            stopping(),
            Some(restart_by_b(3, None)),
        ),
    ];
    for (what, pod, containers, before, after) in table {
        assert_eq!(step(pod, containers, before), after, "{what}");
    }
}

#[test]
fn init_containers_and_sidecars_cause_a_restart_too_and_ephemeral_ones_do_not_matter() {
    let rule =
        json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [0]}}]);
    for own in ["Never", "Always"] {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "ns", "uid": "u1"},
            "spec": {
                "initContainers": [{"name": "x", "image": "img:1", "restartPolicy": own, "restartPolicyRules": rule}],
                "containers": [{"name": "m", "image": "img:1"}],
                "ephemeralContainers": [{"name": "e", "image": "img:1"}],
            },
        }))
        .unwrap();
        let ended = vec![exited("x", 0, 0), running("e", 0)];
        let stopping = step(&pod, ended.clone(), None).unwrap();
        assert_eq!(
            (stopping.trigger.as_str(), stopping.ended.as_ref()),
            ("x", None)
        );
        let done = step(&pod, ended, Some(stopping)).unwrap();
        let attempts: Vec<_> = done.ended.unwrap().into_iter().collect();
        assert_eq!(attempts, [("x".to_owned(), 0)], "{own}");
    }
}

#[test]
fn a_step_is_durable_and_committed_against_what_it_was_decided_on() {
    let pod = pod_that_restarts("Never");
    let key = child_key(&pod.uid(), "b");
    let mut state = State::default();
    for mutation in &Transaction::new().put(&key, ended("b", 0, 88)).mutations {
        state.apply(mutation, 1);
    }
    let status = runtime(with_b(exited("b", 0, 88)));
    let uid = pod.uid();
    let records = Records::of(&state, &uid);
    let seen = Seen {
        pod: &pod,
        status: &status,
        records: &records,
        listed_at: at(70),
        now: at(70),
    };
    let step = advance(&state, &seen).unwrap();
    assert_eq!(step.mutations.len(), 1);
    assert_eq!(kinds::RESTARTS.class, Durability::Durable);
    assert_eq!(step.expectations.len(), 2);
    assert_eq!(step.stale_on(&state), None);
    let mut newer = state.clone();
    for mutation in &step.mutations {
        newer.apply(mutation, 2);
    }
    assert!(step.stale_on(&newer).is_some());
    for mutation in &kinds::forget_pod(&newer, "default", &uid).mutations {
        newer.apply(mutation, 3);
    }
    assert_eq!(Restart::of(&newer, &uid), None);
}

#[test]
fn a_record_that_cannot_be_read_counts_as_none() {
    let pod = pod_that_restarts("Never");
    let mut state = State::default();
    let broken = FactRecord::of(&"not a restart", at(1));
    for mutation in &Transaction::new()
        .put(kinds::RESTARTS.key(pod.uid().as_str(), NAME), broken)
        .mutations
    {
        state.apply(mutation, 1);
    }
    assert_eq!(Restart::of(&state, &pod.uid()), None);
}
