//! Init containers, sidecars, ephemeral containers.

use super::*;
use serde_json::json;

/// Main containers `a`; init containers by name, those that begin with `s` are sidecars; ephemeral `e`
/// when asked for.
fn spec(policy: &str, init: &[&str], ephemeral: bool) -> Pod {
    let mut pod = pod(policy, &["a"]);
    let spec = pod.spec.as_mut().unwrap();
    let init = init.iter().map(|name| {
        let mut c = json!({"name": name, "image": "img:1"});
        if name.starts_with('s') {
            c["restartPolicy"] = json!("Always");
        }
        serde_json::from_value(c).unwrap()
    });
    spec.init_containers = Some(init.collect());
    if ephemeral {
        let e = json!([{"name": "e", "image": "img:1"}]);
        spec.ephemeral_containers = serde_json::from_value(e).unwrap();
    }
    pod
}

fn two(policy: &str) -> Pod {
    spec(policy, &["i", "j"], false)
}

fn side(policy: &str) -> Pod {
    spec(policy, &["s", "j"], false)
}

fn forgotten(mut record: ContainerRecord) -> ContainerRecord {
    record.intent = None;
    record
}

fn oom(mut container: ContainerStatus) -> ContainerStatus {
    container.reason = "OOMKilled".into();
    container
}

fn deleting(mut pod: Pod) -> Pod {
    pod.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
        jiff::Timestamp::UNIX_EPOCH,
    ));
    pod
}

fn done(name: &str) -> ContainerStatus {
    exited(name, 0, 0)
}

fn failed(name: &str) -> ContainerStatus {
    exited(name, 0, 1)
}

type Row<'a> = (&'a str, Pod, Vec<ContainerStatus>, Owned, &'a str);

fn check_ready(table: Vec<Row<'_>>) {
    let rows = table.into_iter();
    check(
        rows.map(|(n, p, c, o, w)| (n, p, runtime(c), o, w))
            .collect(),
    );
}

#[test]
fn init_container_table() {
    let one = |policy| spec(policy, &["i"], false);
    check_ready(vec![
        ("the first one", two("Always"), vec![], none(), "start i#0"),
        (
            "runs",
            two("Always"),
            vec![running("i", 0)],
            none(),
            "keep i",
        ),
        (
            "completed: the next",
            two("Always"),
            vec![done("i")],
            none(),
            "start j#0",
        ),
        (
            "the next, Never",
            two("Never"),
            vec![done("i")],
            none(),
            "start j#0",
        ),
        (
            "second runs",
            two("Always"),
            vec![done("i"), running("j", 0)],
            none(),
            "keep j",
        ),
        (
            "all completed: main",
            two("Always"),
            vec![done("i"), done("j")],
            none(),
            "start a#0",
        ),
        (
            "only the last is known",
            two("Always"),
            vec![done("j")],
            none(),
            "start a#0",
        ),
        (
            "only the last is known, it runs",
            two("Always"),
            vec![running("j", 0)],
            none(),
            "keep j",
        ),
        (
            "failed: again",
            two("Always"),
            vec![failed("i")],
            none(),
            "start i#1",
        ),
        (
            "failed, OnFailure",
            two("OnFailure"),
            vec![failed("i")],
            none(),
            "start i#1",
        ),
        (
            "failed, Never",
            two("Never"),
            vec![failed("i")],
            none(),
            "kill-pod",
        ),
        (
            "second failed, Never",
            two("Never"),
            vec![done("i"), failed("j")],
            none(),
            "kill-pod",
        ),
        (
            "second failed",
            two("Always"),
            vec![done("i"), failed("j")],
            none(),
            "start j#1",
        ),
        (
            "killed for memory counts as failed",
            two("Always"),
            vec![oom(done("i"))],
            none(),
            "start i#1",
        ),
        (
            "killed for memory, Never",
            two("Never"),
            vec![oom(done("i"))],
            none(),
            "kill-pod",
        ),
        (
            "unknown",
            two("Always"),
            vec![unknown("i", 0)],
            none(),
            "kill i-0, start i#1",
        ),
        (
            "unknown, Never",
            two("Never"),
            vec![unknown("i", 0)],
            none(),
            "kill-pod",
        ),
        (
            "created",
            two("Always"),
            vec![created("i", 0)],
            none(),
            "adopt i-0#0",
        ),
        (
            "second created",
            two("Never"),
            vec![done("i"), created("j", 0)],
            none(),
            "adopt j-0#0",
        ),
        (
            "created, other hash",
            two("Always"),
            vec![other_hash(created("i", 0))],
            none(),
            "remove i-0, start i#0",
        ),
        (
            "created after a failure",
            one("Always"),
            vec![failed("i"), created("i", 1)],
            none(),
            "adopt i-1#1",
        ),
        (
            "created beside a running one",
            one("Always"),
            vec![running("i", 0), created("i", 1)],
            none(),
            "remove i-1, keep i",
        ),
        (
            "changed while it runs",
            one("Always"),
            vec![other_hash(running("i", 0))],
            none(),
            "kill i-0, start i#1",
        ),
        (
            "changed after it completed",
            one("Always"),
            vec![other_hash(done("i"))],
            none(),
            "start a#0",
        ),
        (
            "in back-off",
            two("Always"),
            vec![exited("i", 1, 1)],
            [("i", with_backoff(ended("i", 1, 1), 40))].into(),
            "wait i 30",
        ),
        (
            "back-off over",
            two("Always"),
            vec![exited("i", 1, 1)],
            [("i", with_backoff(ended("i", 1, 1), 10))].into(),
            "start i#2",
        ),
        (
            "main runs: nothing to do",
            two("Always"),
            vec![running("a", 0)],
            none(),
            "keep a",
        ),
        (
            "main runs, an init failed once",
            two("Never"),
            vec![running("a", 0), failed("i")],
            none(),
            "keep a",
        ),
        (
            "main created",
            two("Always"),
            vec![created("a", 0)],
            none(),
            "adopt a-0#0",
        ),
        (
            "main ended, inits known",
            two("Always"),
            vec![done("a"), done("j")],
            none(),
            "start a#1",
        ),
        (
            "main ended, inits not known: from the start",
            two("Always"),
            vec![done("a")],
            none(),
            "start i#0",
        ),
        (
            "all done, Never",
            two("Never"),
            vec![done("i"), done("j"), done("a")],
            none(),
            "kill-pod",
        ),
        (
            "end on record, forgotten by the runtime",
            two("Always"),
            vec![],
            [("i", ended("i", 0, 0))].into(),
            "start j#0",
        ),
        (
            "last end on record",
            two("Always"),
            vec![],
            [("i", ended("i", 0, 0)), ("j", ended("j", 0, 0))].into(),
            "start a#0",
        ),
        (
            "failed end on record, Never",
            two("Never"),
            vec![],
            [("i", ended("i", 0, 1))].into(),
            "kill-pod",
        ),
        (
            "vanished: failed",
            two("Always"),
            vec![],
            [("i", started("i", 0))].into(),
            "start i#1",
        ),
        (
            "vanished, Never",
            two("Never"),
            vec![],
            [("i", started("i", 0))].into(),
            "kill-pod",
        ),
        (
            "end of a former sandbox",
            two("Always"),
            vec![],
            [
                ("i", forgotten(ended("i", 0, 0))),
                ("j", forgotten(ended("j", 0, 0))),
            ]
            .into(),
            "start i#1",
        ),
        (
            "remains of a former sandbox",
            two("Always"),
            vec![in_sandbox(done("i"), "s9"), in_sandbox(done("j"), "s9")],
            none(),
            "start i#1",
        ),
        (
            "runs in a former sandbox",
            one("Always"),
            vec![in_sandbox(running("i", 0), "s9")],
            none(),
            "kill i-0, start i#1",
        ),
        (
            "created in a former sandbox",
            one("Always"),
            vec![in_sandbox(created("i", 0), "s9")],
            none(),
            "remove i-0, start i#0",
        ),
        (
            "two run",
            one("Always"),
            vec![running("i", 1), running("i", 0)],
            none(),
            "kill i-0, keep i",
        ),
        (
            "a main that may not start yet",
            one("Always"),
            vec![running("i", 0), in_sandbox(created("a", 0), "s9")],
            none(),
            "remove a-0, keep i",
        ),
        (
            "deleting: none starts",
            deleting(two("Always")),
            vec![done("i")],
            none(),
            "kill-pod",
        ),
        (
            "deleting: a running one is left alone",
            deleting(two("Always")),
            vec![running("i", 0)],
            none(),
            "keep i",
        ),
    ]);
}

#[test]
fn sidecar_table() {
    let last = |policy| spec(policy, &["i", "s"], false);
    check_ready(vec![
        (
            "starts in its turn",
            side("Always"),
            vec![],
            none(),
            "start s#0",
        ),
        (
            "started: the next",
            side("Always"),
            vec![running("s", 0)],
            none(),
            "start j#0, keep s",
        ),
        (
            "the next runs",
            side("Always"),
            vec![running("s", 0), running("j", 0)],
            none(),
            "keep s, keep j",
        ),
        (
            "the next failed, Never",
            side("Never"),
            vec![running("s", 0), failed("j")],
            none(),
            "kill-pod",
        ),
        (
            "ended meanwhile: again",
            side("Always"),
            vec![done("s"), running("j", 0)],
            none(),
            "start s#1, keep j",
        ),
        (
            "ended meanwhile, Never",
            side("Never"),
            vec![done("s"), running("j", 0)],
            none(),
            "start s#1, keep j",
        ),
        (
            "ended before its turn is over",
            side("OnFailure"),
            vec![done("s")],
            none(),
            "start s#1",
        ),
        (
            "unknown",
            side("Never"),
            vec![unknown("s", 0)],
            none(),
            "kill s-0, start s#1",
        ),
        (
            "unknown beside a main",
            side("Never"),
            vec![unknown("s", 0), running("a", 0)],
            none(),
            "kill s-0, start s#1, keep a",
        ),
        (
            "last one started: main",
            last("Always"),
            vec![done("i"), running("s", 0)],
            none(),
            "start a#0, keep s",
        ),
        (
            "main runs, sidecar ended",
            last("Never"),
            vec![exited("s", 0, 1), running("a", 0)],
            none(),
            "start s#1, keep a",
        ),
        (
            "main runs, sidecar gone",
            last("Always"),
            vec![running("a", 0)],
            none(),
            "start s#0, keep a",
        ),
        (
            "main runs, sidecar vanished",
            last("Always"),
            vec![running("a", 0)],
            [("s", started("s", 2))].into(),
            "start s#3, keep a",
        ),
        (
            "main runs, sidecar in back-off",
            last("Always"),
            vec![running("a", 0), exited("s", 1, 1)],
            [("s", with_backoff(ended("s", 1, 1), 40))].into(),
            "keep a, wait s 30",
        ),
        (
            "main in back-off keeps the sidecar",
            last("Always"),
            vec![exited("a", 1, 1), running("s", 0)],
            [("a", with_backoff(ended("a", 1, 1), 40))].into(),
            "keep s, wait a 30",
        ),
        (
            "main is done: the sidecar is stopped",
            last("OnFailure"),
            vec![done("a"), running("s", 0)],
            none(),
            "kill-pod",
        ),
        (
            "main is done: the sidecar is not started",
            last("Never"),
            vec![done("a"), done("s"), done("i")],
            [("s", ended("s", 0, 0))].into(),
            "kill-pod",
        ),
        (
            "main is done, sidecar and inits not known",
            last("Never"),
            vec![done("a")],
            none(),
            "kill-pod",
        ),
        (
            "changed",
            last("Always"),
            vec![running("a", 0), other_hash(running("s", 0))],
            none(),
            "kill s-0, start s#1, keep a",
        ),
        (
            "created",
            side("Always"),
            vec![created("s", 0)],
            none(),
            "adopt s-0#0",
        ),
        (
            "of a former sandbox",
            side("Always"),
            vec![in_sandbox(done("s"), "s9")],
            none(),
            "start s#1",
        ),
        (
            "deleting: not started again",
            deleting(last("Always")),
            vec![done("s"), running("a", 0)],
            none(),
            "keep a",
        ),
    ]);
}

#[test]
fn ephemeral_container_table() {
    let bare = |policy| spec(policy, &[], true);
    let init = || spec("Always", &["i"], true);
    let dead = |c| with(vec![sandbox(0, NotReady)], c);
    check_ready(vec![
        (
            "beside a running main",
            bare("Always"),
            vec![running("a", 0)],
            none(),
            "start e#0, keep a",
        ),
        (
            "before the init containers",
            init(),
            vec![],
            none(),
            "start e#0, start i#0",
        ),
        (
            "runs",
            bare("Always"),
            vec![running("a", 0), running("e", 0)],
            none(),
            "keep e, keep a",
        ),
        (
            "ended: not again",
            bare("Always"),
            vec![running("a", 0), exited("e", 0, 1)],
            none(),
            "keep a",
        ),
        (
            "ended on record",
            bare("Always"),
            vec![running("a", 0)],
            [("e", ended("e", 0, 0))].into(),
            "keep a",
        ),
        (
            "vanished: not again",
            bare("Always"),
            vec![running("a", 0)],
            [("e", started("e", 0))].into(),
            "keep a",
        ),
        (
            "unknown: left",
            bare("Always"),
            vec![running("a", 0), unknown("e", 0)],
            none(),
            "keep a",
        ),
        (
            "created",
            bare("Never"),
            vec![running("a", 0), created("e", 0)],
            none(),
            "adopt e-0#0, keep a",
        ),
        (
            "does not keep the pod",
            bare("Never"),
            vec![done("a"), running("e", 0)],
            none(),
            "kill-pod",
        ),
        (
            "does not start in a finished pod",
            bare("Never"),
            vec![done("a")],
            none(),
            "kill-pod",
        ),
        (
            "created in a finished pod",
            bare("Never"),
            vec![done("a"), created("e", 0)],
            none(),
            "kill-pod, remove e-0",
        ),
    ]);
    check(vec![
        (
            "new sandbox",
            bare("Always"),
            dead(vec![]),
            none(),
            "kill-pod, sandbox 1, start e#0, start a#0",
        ),
        (
            "new sandbox, ran before",
            bare("Always"),
            dead(vec![done("e")]),
            none(),
            "kill-pod, sandbox 1, start a#0",
        ),
        (
            "new sandbox, with init",
            init(),
            dead(vec![]),
            none(),
            "kill-pod, sandbox 1, start e#0, start i#0",
        ),
    ]);
}

#[test]
fn a_new_sandbox_begins_with_the_first_init_container() {
    let dead = |c| with(vec![sandbox(0, NotReady)], c);
    let empty = || with(vec![], vec![]);
    check(
        vec![
            (
                "nothing yet",
                two("Never"),
                empty(),
                none(),
                "sandbox 0, start i#0",
            ),
            (
                "sidecar first",
                side("Always"),
                empty(),
                none(),
                "sandbox 0, start s#0",
            ),
            (
                "all ran",
                two("Always"),
                dead(vec![done("i"), done("j"), running("a", 0)]),
                none(),
                "kill-pod, forget i, forget j, sandbox 1, start i#1",
            ),
            (
                "running sidecar",
                side("Always"),
                dead(vec![running("s", 0)]),
                none(),
                "kill-pod, forget s, sandbox 1, start s#1",
            ),
            (
                "wiped",
                two("Always"),
                empty(),
                [("i", ended("i", 0, 0)), ("a", ended("a", 0, 1))].into(),
                "forget i, sandbox 0, start i#1",
            ),
            (
                "forgotten already",
                two("Always"),
                empty(),
                [("i", forgotten(ended("i", 0, 0)))].into(),
                "sandbox 0, start i#1",
            ),
            (
                "forgotten, remains in the runtime",
                two("Always"),
                dead(vec![done("i")]),
                [("i", forgotten(ended("i", 0, 0)))].into(),
                "kill-pod, forget i, sandbox 1, start i#1",
            ),
            (
                "created is removed, not forgotten",
                two("Always"),
                dead(vec![created("i", 0)]),
                [("i", started("i", 0))].into(),
                "kill-pod, remove i-0, sandbox 1, start i#0",
            ),
            (
                "completed does not back off",
                two("Always"),
                empty(),
                [("i", with_backoff(ended("i", 1, 0), 40))].into(),
                "forget i, sandbox 0, start i#2",
            ),
            (
                "failed backs off",
                two("Always"),
                empty(),
                [("i", with_backoff(ended("i", 1, 1), 40))].into(),
                "forget i, sandbox 0, wait i 30",
            ),
            (
                "Never, an init ran",
                two("Never"),
                dead(vec![done("i")]),
                none(),
                "kill-pod",
            ),
            (
                "OnFailure, main succeeded",
                two("OnFailure"),
                dead(vec![done("i"), done("j"), done("a")]),
                none(),
                "kill-pod",
            ),
            (
                "OnFailure, main failed",
                two("OnFailure"),
                dead(vec![failed("a")]),
                none(),
                "kill-pod, sandbox 1, start i#0",
            ),
            (
                "deleting",
                deleting(two("Always")),
                dead(vec![done("i")]),
                none(),
                "",
            ),
        ]
        .into_iter()
        .map(|(n, p, s, o, w)| {
            // What is stopped already needs no stop.
            let at_rest = w == "kill-pod" && !super::super::is_alive(&s);
            (n, p, s, o, if at_rest { "" } else { w })
        })
        .collect(),
    );
}

/// A power loss turned the runtime's state back to before the recorded start, whose end is concluded.
#[test]
fn what_may_have_run_before_a_power_cut_is_started_as_another_attempt_or_not_at_all() {
    let cut_off = |name: &'static str| {
        let mut record = ended(name, 0, 137);
        let exit = record.last_exit.as_mut().unwrap();
        (exit.inferred, exit.reason) = (true, "ContainerStatusUnknown".into());
        Owned::from([(name, record)])
    };
    let init = |policy| spec(policy, &["i"], false);
    let dead = |name| with(vec![sandbox(0, NotReady)], vec![created(name, 0)]);
    let there = |name| runtime(vec![created(name, 0)]);
    let rows = [
        ("Never", dead("a"), pod("Never", &["a"]), "a", "remove a-0"),
        (
            "Never",
            there("a"),
            pod("Never", &["a"]),
            "a",
            "kill-pod, remove a-0",
        ),
        (
            "Always",
            dead("a"),
            pod("Always", &["a"]),
            "a",
            "kill-pod, remove a-0, sandbox 1, start a#1",
        ),
        (
            "Always",
            there("a"),
            pod("Always", &["a"]),
            "a",
            "remove a-0, start a#1",
        ),
        (
            "OnFailure",
            dead("a"),
            pod("OnFailure", &["a"]),
            "a",
            "kill-pod, remove a-0, sandbox 1, start a#1",
        ),
        (
            "OnFailure",
            there("a"),
            pod("OnFailure", &["a"]),
            "a",
            "remove a-0, start a#1",
        ),
        ("init, Never", dead("i"), init("Never"), "i", "remove i-0"),
        (
            "init, Never",
            there("i"),
            init("Never"),
            "i",
            "kill-pod, remove i-0",
        ),
        (
            "init, Always",
            dead("i"),
            init("Always"),
            "i",
            "kill-pod, remove i-0, forget i, sandbox 1, start i#1",
        ),
        (
            "init, Always",
            there("i"),
            init("Always"),
            "i",
            "remove i-0, start i#1",
        ),
        (
            "sidecar",
            dead("s"),
            side("Always"),
            "s",
            "kill-pod, remove s-0, forget s, sandbox 1, start s#1",
        ),
        (
            "sidecar",
            there("s"),
            side("Never"),
            "s",
            "remove s-0, start s#1",
        ),
        (
            "ephemeral",
            there("e"),
            spec("Always", &[], true),
            "e",
            "remove e-0, start a#0",
        ),
    ];
    for (name, status, pod, container, want) in rows {
        let actions = decide(&pod, &status, &cut_off(container), 70);
        assert_eq!(brief(&actions, at(70)), want, "{name} {status:?}");
    }
    // A start that is on record and has no end is made up for under its own number.
    for policy in ["Always", "OnFailure", "Never"] {
        let owned = Owned::from([("a", started("a", 0))]);
        let actions = decide(&pod(policy, &["a"]), &there("a"), &owned, 70);
        assert_eq!(brief(&actions, at(70)), "adopt a-0#0", "{policy}");
    }
}
