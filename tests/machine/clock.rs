//! Machines without a clock of their own, and clocks that are set while pods run.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::node::{Node, SLEEP, pod, rows};

const YEAR: i64 = 365 * 86_400;

/// IDs of all containers with the states of their tasks, sandboxes included.
fn tasks(node: &mut Node) -> String {
    node.sh("ctr -n k8s.io tasks list | sort")
}

fn restarts(node: &mut Node) -> Vec<(String, u64)> {
    let rows = rows(&mut node.machine, "containers").unwrap();
    let mut all: Vec<(String, u64)> = rows
        .iter()
        .map(|row| {
            let name = row["name"].as_str().unwrap().to_owned();
            (name, row["restartCount"].as_u64().unwrap())
        })
        .collect();
    all.sort();
    all
}

fn start_pods(node: &mut Node) {
    for (name, policy, script) in [
        ("always", "Always", SLEEP),
        ("never", "Never", SLEEP),
        ("ended", "Never", "exit 3"),
    ] {
        node.manifest(&pod(name, policy, script));
    }
    node.wait_running("always");
    node.wait_running("never");
    node.eventually(
        "the pod has ended",
        "holdfast dump containers -o json | grep -q '\"exitCode\": *3'",
    );
}

/// Nothing was restarted, and a new pod starts.
fn is_calm(node: &mut Node, before: &(String, Vec<(String, u64)>), what: &str, new: &str) {
    node.manifest(&pod(new, "Always", SLEEP));
    node.wait_running(new);
    node.remove_manifest(new);
    node.wait_gone(new);
    assert_eq!(tasks(node), before.0, "{what}");
    assert_eq!(restarts(node), before.1, "{what}");
    let told = node.sh("journalctl -u holdfast -o cat | grep -c 'name .* is reserved' || true");
    assert_eq!(told, "0", "{what}");
}

#[test]
fn steps_of_the_clock_restart_nothing_and_let_nothing_expire() {
    let mut node = Node::started();
    start_pods(&mut node);
    let before = (tasks(&mut node), restarts(&mut node));
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs() as i64;
    for (n, step) in [40, -40, YEAR, -YEAR, -YEAR, YEAR].into_iter().enumerate() {
        node.sh(&format!("date -s @$(($(date +%s) + {step})) >/dev/null"));
        is_calm(
            &mut node,
            &before,
            &format!("a step of {step} s"),
            &format!("step{n}"),
        );
    }
    // Ten suspends of an hour each: the machine stands still, and its clock has gone on.
    for hour in 1..=10 {
        node.machine.stop().unwrap();
        node.machine.cont().unwrap();
        let at = UNIX_EPOCH + Duration::from_secs(now as u64 + hour * 3600);
        node.machine.set_clock(at).unwrap();
    }
    is_calm(&mut node, &before, "ten suspends", "late");
}

#[test]
fn a_machine_that_boots_in_1970_goes_on_when_its_clock_is_set() {
    let mut node = Node::started();
    start_pods(&mut node);
    let counts = restarts(&mut node);
    // systemd would set the clock to the time it was built; the step to 1970 comes before the agent.
    node.sh(
        "mkdir -p /etc/systemd/system/holdfast.service.d && \
         printf '[Service]\\nExecStartPre=+/bin/sh -c \"test -e /run/stepped || { date -s @600; touch /run/stepped; }\"\\n' \
         >/etc/systemd/system/holdfast.service.d/clock.conf && systemctl daemon-reload",
    );
    node.machine.send("sync; reboot -f").unwrap();
    node.machine.rebooted().unwrap();
    node.wait_running("always");
    let year = node.sh("date +%Y");
    assert_eq!(year, "1970");
    let before = (tasks(&mut node), restarts(&mut node));
    for ((name, was), (_, is)) in counts.iter().zip(&before.1) {
        let wanted = if name.starts_with("always") {
            was + 1
        } else {
            *was
        };
        assert_eq!(*is, wanted, "{name}");
    }
    node.machine.set_clock(SystemTime::now()).unwrap();
    is_calm(&mut node, &before, "the step to today", "late");
    node.sh("systemctl restart holdfast");
    is_calm(&mut node, &before, "a restart after it", "later");
}
