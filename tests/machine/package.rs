//! The package on a booted system, with pods that run: nothing that dpkg does touches one of them.

use holdfast_testkit::exploration::is_whole;

use super::node::{Node, PACKAGE, PACKAGE_NEWER, SLEEP, pod};

/// Containers with the process that each runs as, sandboxes included.
fn tasks(node: &mut Node) -> String {
    node.sh("ctr -n k8s.io tasks list | sort")
}

/// The agent runs, is of that version, and is well.
#[track_caller]
fn is_installed(node: &mut Node, version: &str) {
    assert_eq!(
        node.sh("dpkg-query -W -f '${Version} ${Status}' holdfast"),
        format!("{version} install ok installed")
    );
    node.eventually(
        "the agent of the installed package runs",
        "systemctl is-active --quiet holdfast && \
         test \"$(stat -L -c %i /proc/$(systemctl show -P MainPID holdfast)/exe)\" = \"$(stat -L -c %i /usr/bin/holdfast)\"",
    );
    node.is_healthy();
}

#[test]
fn pods_outlive_install_upgrade_downgrade_removal_and_purge_of_the_package() {
    let mut node = Node::started();
    let first = node.sh("dpkg-query -W -f '${Version}' holdfast");
    node.manifest(&pod("always", "Always", SLEEP));
    node.manifest(&pod("never", "Never", SLEEP));
    node.wait_running("always");
    node.wait_running("never");
    let before = tasks(&mut node);

    for round in 0..if is_whole() { 3 } else { 1 } {
        node.sh(&format!("dpkg -i {PACKAGE_NEWER}"));
        is_installed(&mut node, "0.2.0-1");
        assert_eq!(tasks(&mut node), before, "after upgrade {round}");
        node.sh(&format!("dpkg -i {PACKAGE}"));
        is_installed(&mut node, &first);
        assert_eq!(tasks(&mut node), before, "after downgrade {round}");
    }

    // Removed: pods go on, and come under the agent's care again with the next installation.
    node.sh("dpkg --remove holdfast");
    node.sh("! systemctl is-active --quiet holdfast && ! test -e /usr/bin/holdfast");
    assert_eq!(tasks(&mut node), before, "after the removal");
    node.sh(&format!("dpkg -i {PACKAGE}"));
    is_installed(&mut node, &first);
    node.wait_running("always");
    node.wait_running("never");
    assert_eq!(tasks(&mut node), before, "after the installation");

    // Purged, and told to delete the state: not while pods run.
    let purge = "export DEBIAN_FRONTEND=noninteractive; echo holdfast holdfast/purge-state boolean true | debconf-set-selections && dpkg --purge holdfast 2>&1";
    let said = node.sh(purge);
    assert!(said.contains("pods are running"), "{said}");
    node.sh("test -d /var/lib/holdfast/db");
    assert_eq!(tasks(&mut node), before, "after the purge");
    node.sh(&format!("dpkg -i {PACKAGE}"));
    is_installed(&mut node, &first);
    node.wait_running("always");
    assert_eq!(tasks(&mut node), before, "after the last installation");

    // Nothing runs any more: now the state goes.
    for pod in ["always", "never"] {
        node.remove_manifest(pod);
        node.wait_gone(pod);
    }
    assert_eq!(node.sh("ctr -n k8s.io tasks list -q"), "");
    let said = node.sh(purge);
    assert!(!said.contains("kept"), "{said}");
    node.sh("! test -e /var/lib/holdfast && test -e /etc/holdfast/config.yaml");
}
