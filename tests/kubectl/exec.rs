//! `kubectl exec`.

use serde_json::json;

use crate::client::{noise, sha256};
use crate::node::{Node, shared};
use crate::setup::{FOREVER, container, script};

#[test]
fn exit_codes_and_both_outputs_come_back() {
    codes_and_outputs(&shared());
}

pub fn codes_and_outputs(node: &Node) {
    let mut spec = script("Always", FOREVER);
    spec["containers"]
        .as_array_mut()
        .unwrap()
        .push(container("other", FOREVER));
    node.create_pod("codes", spec);
    node.wait_running("codes");
    for (command, code) in [
        ("echo out; echo err >&2", 0),
        ("echo out; echo err >&2; exit 7", 7),
        ("echo out; echo err >&2; kill -9 $$", 137),
    ] {
        let arguments = ["exec", "codes", "-c", "main", "--", "sh", "-c", command];
        let outcome = node.run_kubectl(&arguments);
        assert_eq!(outcome.code, Some(code), "{command}: {outcome:?}");
        assert_eq!(outcome.stdout(), "out\n", "{command}");
        let said = match code {
            0 => "err\n".to_owned(),
            code => format!("err\ncommand terminated with exit code {code}\n"),
        };
        assert_eq!(outcome.stderr(), said, "{command}");
    }
    // The container that is meant.
    let arguments = ["exec", "codes", "-c", "other", "--", "touch", "/tmp/seen"];
    assert_eq!(node.run_kubectl(&arguments).code, Some(0));
    for (container, code) in [("main", 1), ("other", 0)] {
        let arguments = ["exec", "codes", "-c", container, "--", "ls", "/tmp/seen"];
        assert_eq!(node.run_kubectl(&arguments).code, Some(code), "{container}");
    }
}

#[test]
fn what_cannot_be_run_is_told() {
    cannot_be_run(&shared());
}

pub fn cannot_be_run(node: &Node) {
    node.create_pod("lacks", script("Always", FOREVER));
    node.wait_running("lacks");
    let outcome = node.run_kubectl(&["exec", "lacks", "--", "/no/such/program"]);
    assert_ne!(outcome.code, Some(0), "{outcome:?}");
    assert!(
        outcome.stderr().contains("no such file or directory"),
        "{outcome:?}"
    );
    let outcome = node.run_kubectl(&["exec", "lacks", "-c", "nobody", "--", "true"]);
    assert_ne!(outcome.code, Some(0), "{outcome:?}");
    assert!(
        outcome.stderr().contains("container nobody is not valid"),
        "{outcome:?}"
    );
    // It is there and does not run yet.
    let mut spec = script("Always", FOREVER);
    spec["initContainers"] = json!([container("before", FOREVER)]);
    node.create_pod("waits", spec);
    node.wait_pod("waits", "has begun", |pod| {
        pod["status"]["initContainerStatuses"][0]["state"]["running"].is_object()
    });
    let outcome = node.run_kubectl(&["exec", "waits", "-c", "main", "--", "true"]);
    assert_ne!(outcome.code, Some(0), "{outcome:?}");
    assert!(
        outcome.stderr().contains("container not found (\"main\")"),
        "{outcome:?}"
    );
}

#[test]
fn a_hundred_mebibytes_go_through_unharmed_both_ways() {
    const SIZE: usize = 100 * 1024 * 1024;
    let node = shared();
    node.create_pod("pipe", script("Always", FOREVER));
    node.wait_running("pipe");
    let data = noise(7, SIZE);
    let expected = sha256(&data);
    let begin = std::time::Instant::now();
    // What arrives there is counted there; what comes back is counted here.
    let outcome = node.run_kubectl_with(
        &[
            "exec",
            "-i",
            "pipe",
            "--",
            "sh",
            "-c",
            "tee /tmp/copy; sha256sum /tmp/copy >&2; rm /tmp/copy",
        ],
        data,
    );
    let took = begin.elapsed();
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    assert_eq!(outcome.out.len(), SIZE);
    assert_eq!(sha256(&outcome.out), expected, "what came back");
    assert!(
        outcome.stderr().starts_with(&expected),
        "what arrived: {outcome:?}"
    );
    println!("exec: 100 MiB there and back in {took:.1?}");
}

#[test]
fn a_shell_in_a_terminal_knows_its_size_and_ends_with_its_code() {
    shell(&shared());
}

pub fn shell(node: &Node) {
    node.create_pod("shell", script("Always", FOREVER));
    node.wait_running("shell");
    let mut terminal = node.start_in_terminal(&["exec", "-it", "shell", "--", "sh"], 30, 90);
    terminal.type_until("stty size\n", "30 90");
    terminal.resize(41, 123);
    terminal.type_until("stty size\n", "41 123");
    // A terminal has one output, an interrupt key, and lines are ended as on a screen.
    terminal.write("tty; echo $((40 + 2)) >&2\n");
    terminal.wait_screen("/dev/pts/");
    terminal.wait_screen("42\r\n");
    terminal.write("sleep 1000\n");
    terminal.wait_screen("sleep 1000\r\n");
    terminal.type_until("\x03echo inter''rupted\n", "interrupted\r\n");
    terminal.write("exit 5\n");
    let (code, screen) = terminal.wait();
    assert_eq!(code, Some(5), "{screen}");
}

#[test]
fn many_at_once_do_not_mix() {
    many(&shared());
}

pub fn many(node: &Node) {
    node.create_pod("crowd", script("Always", FOREVER));
    node.wait_running("crowd");
    std::thread::scope(|scope| {
        for n in 0..8 {
            scope.spawn(move || {
                let data = noise(n + 100, 300_000);
                let arguments = ["exec", "-i", "crowd", "--", "cat"];
                let outcome = node.run_kubectl_with(&arguments, data.clone());
                assert_eq!(outcome.code, Some(0), "{outcome:?}");
                assert!(outcome.out == data, "{n} got something else");
            });
        }
    });
}
