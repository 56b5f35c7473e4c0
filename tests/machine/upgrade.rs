//! Upgrades and downgrades, over and over, with pods that run: no container is touched and the kubelet's port stays open.

use holdfast_testkit::exploration::is_whole;

use super::node::{Node, PACKAGE, PACKAGE_NEWER, SLEEP, pod, rows};
use super::reboot::Cluster;

/// Longest time in milliseconds in which nobody may be let in on port 10250.
const GAP: u64 = 300;

/// The versions of the two packages.
const OLDER: &str = "0.1.0-1";
const NEWER: &str = "0.2.0-1";

/// Prints the containers and sandboxes that run, with their processes.
const RUNNING: &str = "ctr -n k8s.io tasks list | awk '$3 == \"RUNNING\" { print $1, $2 }' | sort";

/// Connects to the port every 20 ms until it is told to end, and prints the longest time in milliseconds between two
/// connections that were made.
const WATCH: &str = r#"use Socket; use Time::HiRes qw(time sleep);
my ($last, $longest) = (time, 0);
until (-e "/root/watched") {
    socket(my $s, PF_INET, SOCK_STREAM, 0) or die;
    if (connect($s, pack_sockaddr_in(10250, inet_aton("127.0.0.1")))) {
        my $now = time;
        $longest = $now - $last if $now - $last > $longest;
        $last = $now;
    }
    close $s;
    sleep 0.02;
}
$longest = time - $last if time - $last > $longest;
open(my $out, ">", "/root/longest") or die;
printf $out "%d\n", $longest * 1000;
close $out;
"#;

fn let_systemd_hold_the_port(node: &mut Node) {
    node.sh(
        "set -e\ninstall -m 0644 /usr/share/doc/holdfast/examples/systemd/holdfast.socket /etc/systemd/system/holdfast.socket\n\
         systemctl daemon-reload\nsystemctl stop holdfast\nsystemctl enable --now holdfast.socket\nsystemctl start holdfast",
    );
}

fn watch_the_port(node: &mut Node) {
    node.sh(&format!(
        "cat >/root/watch.pl <<'END_OF_FILE'\n{WATCH}END_OF_FILE\n\
         systemd-run --quiet --unit watch perl /root/watch.pl"
    ));
}

fn main_process(node: &mut Node) -> String {
    node.sh("systemctl show -P MainPID holdfast")
        .trim()
        .to_owned()
}

/// Waits until `version` is installed and ready, as another process than `former`.
fn wait_for_version(node: &mut Node, version: &str, former: &str) {
    node.eventually(
        "the other version is ready",
        &format!(
            "test \"$(dpkg-query -W -f '${{Version}}' holdfast)\" = {version} || exit 1\n\
             test \"$(systemctl show -P MainPID holdfast)\" != {former} || exit 1\n\
             systemctl is-active --quiet holdfast"
        ),
    );
}

/// Ends the watch. Milliseconds.
fn longest_gap(node: &mut Node) -> u64 {
    let longest = node.eventually(
        "the watch has ended",
        "touch /root/watched; test -s /root/longest || exit 1; cat /root/longest",
    );
    longest.trim().parse().unwrap()
}

#[test]
fn upgrades_and_downgrades_touch_no_container_and_leave_the_port_open() {
    let mut cluster = Cluster::join();
    let node = &mut cluster.node;
    let_systemd_hold_the_port(node);
    for name in ["one", "two"] {
        node.manifest(&pod(name, "Always", SLEEP));
    }
    for name in ["one", "two"] {
        node.wait_running(name);
    }
    let before = node.sh(RUNNING);
    assert!(before.lines().count() >= 4, "{before}");
    watch_the_port(node);
    let times = if is_whole() { 100 } else { 4 };
    for n in 0..times {
        let (package, version) = if n % 2 == 0 {
            ("newer.deb", NEWER)
        } else {
            ("holdfast.deb", OLDER)
        };
        let process = main_process(node);
        node.sh(&format!(
            "dpkg --force-downgrade -i /root/payload/{package} >/dev/null 2>&1"
        ));
        wait_for_version(node, version, &process);
        assert_eq!(node.sh(RUNNING), before, "after {} changes", n + 1);
    }
    let longest = longest_gap(node);
    println!("{times} changes of the version, longest gap {longest} ms");
    assert!(longest <= GAP, "nobody was let in for {longest} ms");
    for row in rows(&mut node.machine, "containers").unwrap() {
        assert_eq!(row["restartCount"], 0, "{row}");
    }
}

/// Files that hold a start back until the package has put its binary in place.
const HELD_BACK: &str = "ls /run/holdfast.package-converting \
    /run/systemd/system/holdfast.service.d/package-converting.conf 2>/dev/null || true";

/// A downgrade while the store cannot be converted: the newer version stays, and works on.
fn a_conversion_that_fails_changes_nothing(node: &mut Node) {
    // No agent, but a holder of the store's lock.
    node.sh("set -e\nsystemctl stop holdfast\n\
         systemd-run --quiet --unit holder flock /var/lib/holdfast/LOCK sleep 3600");
    node.eventually(
        "the lock is held",
        "! flock --nonblock /var/lib/holdfast/LOCK true",
    );
    let said = node.sh(&format!(
        "HOLDFAST_NEWER_SCHEMA=1 dpkg --force-downgrade -i {PACKAGE} 2>&1 && echo converted; true"
    ));
    assert!(said.contains("could not be converted"), "{said}");
    assert!(!said.contains("\nconverted"), "{said}");
    node.sh("systemctl stop holder");
    assert_eq!(node.sh(HELD_BACK).trim(), "");
    assert_eq!(node.sh("cat /var/lib/holdfast/schema").trim(), "3");
    node.sh("systemctl start holdfast");
    node.eventually(
        "the newer version works on",
        &format!(
            "test \"$(dpkg-query -W -f '${{Version}}' holdfast)\" = {NEWER} && systemctl is-active --quiet holdfast"
        ),
    );
}

#[test]
fn a_downgrade_to_an_older_schema_keeps_records_containers_and_the_port() {
    let mut node = Node::started();
    let schemas =
        node.sh("HOLDFAST_NEWER_SCHEMA=1 holdfast version -o json | sed -n 's/.*\"schema\": *//p'");
    if !schemas.starts_with('3') {
        eprintln!("NOTHING WAS TESTED: only a development build plays one with a newer schema");
        return;
    }
    node.sh(&format!("dpkg -i {PACKAGE_NEWER} >/dev/null 2>&1"));
    let_systemd_hold_the_port(&mut node);
    for name in ["one", "two"] {
        node.manifest(&pod(name, "Always", SLEEP));
    }
    node.manifest(&pod("ended", "Never", "exit 3"));
    for name in ["one", "two"] {
        node.wait_running(name);
    }
    node.eventually(
        "the pod has ended",
        "holdfast dump containers -o json | grep -q '\"exitCode\": *3'",
    );
    let before = node.sh(RUNNING);
    // The agent itself does not know the newer schema: it works in a stand-in until the package converts the store.
    node.sh("set -e\nsystemctl stop holdfast.socket holdfast\n\
         HOLDFAST_NEWER_SCHEMA=1 holdfast store migrate --to 2 >/dev/null\n\
         systemctl start holdfast.socket\nsystemctl start holdfast");
    assert_eq!(node.sh("cat /var/lib/holdfast/schema").trim(), "3");
    a_conversion_that_fails_changes_nothing(&mut node);
    assert_eq!(node.sh(RUNNING), before);
    watch_the_port(&mut node);
    // Somebody who connects all the time starts the agent as soon as it is stopped.
    let process = main_process(&mut node);
    node.sh(&format!(
        "HOLDFAST_NEWER_SCHEMA=1 dpkg --force-downgrade -i {PACKAGE} >/root/dpkg 2>&1 || {{ cat /root/dpkg; exit 1; }}"
    ));
    wait_for_version(&mut node, OLDER, &process);
    let longest = longest_gap(&mut node);
    // From the end of the old process to the readiness of the new one, in microseconds.
    let away = node.sh(
        "systemctl show -p ActiveExitTimestampMonotonic -p ActiveEnterTimestampMonotonic holdfast | \
         awk -F = '{ at[$1] = $2 } END { printf \"%.0f\", at[\"ActiveEnterTimestampMonotonic\"] - at[\"ActiveExitTimestampMonotonic\"] }'",
    );
    println!(
        "the agent was away for {} us, nobody was let in for {longest} ms",
        away.trim()
    );
    assert!(longest <= GAP, "nobody was let in for {longest} ms");
    assert_eq!(node.sh("cat /var/lib/holdfast/schema").trim(), "2");
    let said = node.sh("cat /root/dpkg");
    assert!(said.contains("from schema 3 to 2"), "{said}");
    assert_eq!(node.sh(HELD_BACK).trim(), "");
    assert_eq!(node.sh(RUNNING), before);
    let rows = rows(&mut node.machine, "containers").unwrap();
    assert_eq!(rows.len(), 3, "{rows:?}");
    for row in rows {
        assert_eq!(row["restartCount"], 0, "{row}");
        if row["name"] == "ended-vmnode" {
            assert_eq!(row["lastExit"]["exitCode"], 3, "{row}");
        }
    }
}
