//! `kubectl attach`.

use serde_json::{Value, json};

use crate::node::{Node, shared};
use crate::setup::{FOREVER, script};

/// Answers each line it reads.
fn answers(policy: &str) -> Value {
    let mut spec = script(
        policy,
        "while read x; do echo \"got $x\"; done; echo the end",
    );
    spec["containers"][0]["stdin"] = json!(true);
    spec
}

#[test]
fn one_may_come_go_and_come_again() {
    come_and_go(&shared());
}

pub fn come_and_go(node: &Node) {
    node.create_pod("answers", answers("Always"));
    node.wait_running("answers");
    for word in ["first", "second"] {
        let mut kubectl = node.start_kubectl(&["attach", "-i", "answers"]);
        kubectl.write(&format!("{word}\n"));
        kubectl.wait_stdout(&format!("got {word}\n"));
    }
    let pod = node.pod("answers");
    assert_eq!(
        pod["status"]["containerStatuses"][0]["restartCount"], 0,
        "{pod}"
    );
    assert_eq!(node.ok(&["logs", "answers"]), "got first\ngot second\n");
}

#[test]
fn the_end_of_input_given_once_ends_the_container_and_the_client() {
    given_once(&shared());
}

pub fn given_once(node: &Node) {
    let mut spec = answers("Never");
    spec["containers"][0]["stdinOnce"] = json!(true);
    node.create_pod("given-once", spec);
    node.wait_running("given-once");
    let outcome = node.run_kubectl_with(&["attach", "-i", "given-once"], b"only\n".to_vec());
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    assert!(
        outcome.stdout().ends_with("got only\nthe end\n"),
        "{outcome:?}"
    );
    node.wait_pod_phase("given-once", "Succeeded");
}

#[test]
fn output_is_seen_until_the_container_ends() {
    until_its_end(&shared());
}

pub fn until_its_end(node: &Node) {
    let ticks =
        "trap 'echo ended; exit 0' TERM; while :; do echo tick; echo tock >&2; sleep 0.5; done";
    node.create_pod("ticks", script("Never", ticks));
    node.wait_running("ticks");
    let mut kubectl = node.start_kubectl(&["attach", "ticks"]);
    kubectl.wait_stdout("tick\n");
    node.delete_pod("ticks", 5);
    let outcome = kubectl.wait();
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    assert!(outcome.stdout().ends_with("ended\n"), "{outcome:?}");
    assert!(outcome.stderr().contains("tock\n"), "{outcome:?}");
}

#[test]
fn a_container_with_a_terminal_is_used_like_one() {
    console(&shared());
}

pub fn console(node: &Node) {
    let mut spec = script("Always", "exec sh");
    spec["containers"][0]["stdin"] = json!(true);
    spec["containers"][0]["tty"] = json!(true);
    node.create_pod("console", spec);
    node.create_pod("no-console", script("Always", FOREVER));
    node.wait_running("console");
    let mut terminal = node.start_in_terminal(&["attach", "-it", "console"], 33, 77);
    terminal.type_until("stty size\n", "33 77");
    terminal.resize(22, 66);
    terminal.type_until("stty size\n", "22 66");
    drop(terminal);
    let mut again = node.start_in_terminal(&["attach", "-it", "console"], 24, 80);
    again.type_until("echo $((6 * 7))\n", "42");
    drop(again);
    let pod = node.pod("console");
    assert_eq!(
        pod["status"]["containerStatuses"][0]["restartCount"], 0,
        "{pod}"
    );
    // Who asks for a terminal where there is none is told, and served without.
    node.wait_running("no-console");
    let mut without = node.start_in_terminal(&["attach", "-it", "no-console"], 24, 80);
    without.wait_screen("Unable to use a TTY");
}
