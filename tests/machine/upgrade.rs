//! Upgrades and downgrades, over and over, with pods that run: no container is touched and the kubelet's port stays open.

use holdfast_testkit::exploration::is_whole;

use super::node::{SLEEP, pod, rows};
use super::reboot::Cluster;

/// Longest time in milliseconds in which nobody may be let in on port 10250.
const GAP: u64 = 300;

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

#[test]
fn upgrades_and_downgrades_touch_no_container_and_leave_the_port_open() {
    let mut cluster = Cluster::join();
    let node = &mut cluster.node;
    node.sh(
        "set -e\ninstall -m 0644 /usr/share/doc/holdfast/examples/systemd/holdfast.socket /etc/systemd/system/holdfast.socket\n\
         systemctl daemon-reload\nsystemctl stop holdfast\nsystemctl enable --now holdfast.socket\nsystemctl start holdfast",
    );
    for name in ["one", "two"] {
        node.manifest(&pod(name, "Always", SLEEP));
    }
    for name in ["one", "two"] {
        node.wait_running(name);
    }
    let running = "ctr -n k8s.io tasks list | awk '$3 == \"RUNNING\" { print $1, $2 }' | sort";
    let before = node.sh(running);
    assert!(before.lines().count() >= 4, "{before}");
    node.sh(&format!(
        "cat >/root/watch.pl <<'END_OF_FILE'\n{WATCH}END_OF_FILE\n\
         systemd-run --quiet --unit watch perl /root/watch.pl"
    ));
    let times = if is_whole() { 100 } else { 4 };
    for n in 0..times {
        let (package, version) = if n % 2 == 0 {
            ("newer.deb", "0.2.0-1")
        } else {
            ("holdfast.deb", "0.1.0-1")
        };
        let process = node.sh("systemctl show -P MainPID holdfast");
        node.sh(&format!(
            "dpkg --force-downgrade -i /root/payload/{package} >/dev/null 2>&1"
        ));
        node.eventually(
            "the other version is ready",
            &format!(
                "test \"$(dpkg-query -W -f '${{Version}}' holdfast)\" = {version} || exit 1\n\
                 test \"$(systemctl show -P MainPID holdfast)\" != {} || exit 1\n\
                 systemctl is-active --quiet holdfast",
                process.trim()
            ),
        );
        assert_eq!(node.sh(running), before, "after {} changes", n + 1);
    }
    let longest = node.eventually(
        "the watch has ended",
        "touch /root/watched; test -s /root/longest || exit 1; cat /root/longest",
    );
    let longest: u64 = longest.trim().parse().unwrap();
    println!("{times} changes of the version, longest gap {longest} ms");
    assert!(longest <= GAP, "nobody was let in for {longest} ms");
    for row in rows(&mut node.machine, "containers").unwrap() {
        assert_eq!(row["restartCount"], 0, "{row}");
    }
}
