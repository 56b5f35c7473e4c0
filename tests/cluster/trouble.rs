//! What goes wrong between an agent and its API server: credentials, names, cuts, wrong answers.

use std::time::Duration;

use holdfast_testkit::envtest::DAY;
use holdfast_testkit::fault_proxy::Fault;
use jiff::SignedDuration;
use serde_json::json;

use crate::agent_process::eventually;
use crate::setup::{Cluster, FOREVER, script};

fn wait_log(cluster: &Cluster, words: &[&str]) {
    eventually(&format!("the log says {words:?}"), || {
        let log = cluster.logs();
        let found = log
            .lines()
            .any(|line| words.iter().all(|word| line.contains(word)));
        if found { Ok(()) } else { Err(log) }
    });
}

#[test]
fn an_expired_certificate_is_told_and_static_pods_run() {
    let mut cluster = Cluster::new();
    cluster.kubeconfig =
        cluster
            .env
            .node_kubeconfig_with(&cluster.node, &cluster.proxy.url(), -DAY);
    let pod = cluster
        .world
        .pod("static", "Always", &[("main", crate::world::FOREVER)]);
    cluster.add(&pod);
    let _agent = cluster.start();
    wait_log(&cluster, &["certificate", "expired"]);
    cluster.world.wait_running("static", "main");
}

#[test]
fn an_unknown_authority_is_told() {
    let mut cluster = Cluster::new();
    let text = std::fs::read_to_string(&cluster.kubeconfig).unwrap();
    let other = Cluster::alone();
    let stranger = std::fs::read_to_string(&other.kubeconfig).unwrap();
    let ca = |text: &str| {
        let line = text
            .lines()
            .find(|l| l.contains("certificate-authority"))
            .unwrap();
        line.trim().to_owned()
    };
    let mixed = text.replace(&ca(&text), &ca(&stranger));
    assert_ne!(mixed, text);
    let path = cluster.dir().join("mixed.kubeconfig");
    std::fs::write(&path, mixed).unwrap();
    cluster.kubeconfig = path;
    let _agent = cluster.start();
    wait_log(&cluster, &["API server", "certificate"]);
}

#[test]
fn a_token_without_rights_is_told_once() {
    let mut cluster = Cluster::new();
    let proxy = cluster.env.fault_proxy_for_tokens();
    let token = cluster.env.token(&cluster.namespace, "default");
    cluster.kubeconfig = cluster.env.token_kubeconfig(&proxy.url(), &token);
    let _agent = cluster.start();
    wait_log(&cluster, &["403"]);
    std::thread::sleep(Duration::from_secs(10));
    let told = cluster
        .logs()
        .lines()
        .filter(|l| l.contains("WARN") || l.contains("ERROR"))
        .count();
    assert!(
        told < 30,
        "{told} warnings in a few seconds: {}",
        cluster.logs()
    );
}

#[test]
fn a_missing_kubeconfig_is_named() {
    let mut cluster = Cluster::new();
    cluster.kubeconfig = cluster.dir().join("nowhere.kubeconfig");
    let mut agent = cluster.spawn_agent(&[]);
    let status = agent.wait_exit(Duration::from_secs(30));
    assert!(!status.success());
    assert!(
        agent.log().contains("nowhere.kubeconfig"),
        "{}",
        agent.log()
    );
}

#[test]
fn a_node_joins_by_bootstrap_and_rotates_its_certificate() {
    let mut cluster = Cluster::alone();
    let signer = cluster.env.csr_signer(SignedDuration::from_secs(40));
    let bootstrap = cluster.env.bootstrap_kubeconfig(&cluster.env.url());
    cluster.kubeconfig = cluster.dir().join("made.kubeconfig");
    let bootstrap = bootstrap.to_string_lossy().into_owned();
    let _agent = cluster.spawn_agent(&[
        "--bootstrap-kubeconfig",
        &bootstrap,
        "--rotate-certificates",
    ]);
    cluster.wait_node_ready();
    let current = cluster.root_dir().join("pki/kubelet-client-current.pem");
    let first = std::fs::read_link(&current).unwrap();
    eventually("the certificate is rotated", || {
        let now = std::fs::read_link(&current).map_err(|e| e.to_string())?;
        if now == first {
            Err(format!("{now:?}"))
        } else {
            Ok(())
        }
    });
    // Beyond the end of the first certificate.
    std::thread::sleep(Duration::from_secs(45));
    cluster.create_pod("late", script("Always", FOREVER));
    cluster.wait_running("late");
    drop(signer);
}

#[test]
fn conflicts_and_server_errors_are_tried_again() {
    let cluster = Cluster::new();
    let _agent = cluster.join();
    for (code, verb, resource) in [
        (500, "PATCH", "pods/status"),
        (409, "PATCH", "pods/status"),
        (429, "PATCH", "pods/status"),
        (503, "DELETE", "pods"),
        (500, "POST", "events"),
        (409, "PUT", "leases"),
        (410, "WATCH", "pods"),
    ] {
        cluster
            .proxy
            .inject_on(2, Fault::status(code), verb, resource);
    }
    cluster.create_pod("stubborn", script("Always", FOREVER));
    cluster.wait_running("stubborn");
    cluster.delete_pod("stubborn", 1);
    cluster.wait_gone("stubborn", Duration::from_secs(60));
}

#[test]
fn a_watch_that_hangs_is_noticed() {
    let cluster = Cluster::new();
    let _agent = cluster.join();
    cluster.proxy.stall_all();
    cluster.create_pod("unheard", script("Always", FOREVER));
    std::thread::sleep(Duration::from_secs(3));
    assert!(cluster.try_one("unheard", "main").is_err());
    cluster.proxy.heal();
    // What was open stays silent; only new connections work.
    cluster.wait_running("unheard");
}

#[test]
fn a_server_that_was_turned_back_kills_nothing_that_it_still_has() {
    let cluster = Cluster::alone();
    let _agent = cluster.join();
    cluster.create_pod("old", script("Always", FOREVER));
    cluster.wait_running("old");
    let snapshot = cluster.env.snapshot_etcd();
    cluster.create_pod("young", script("Always", FOREVER));
    cluster.wait_running("young");
    let old = cluster.try_one("old", "main").unwrap();
    cluster.env.restore_etcd(&snapshot);
    // The newer pod does not exist any more for anybody.
    eventually("the forgotten pod has ended", || {
        match cluster.try_one("young", "main") {
            Ok(seen) => Err(format!("{seen:?}")),
            Err(_) => Ok(()),
        }
    });
    assert_eq!(cluster.try_one("old", "main"), Ok(old));
    cluster.create_pod("again", script("Always", FOREVER));
    cluster.wait_running("again");
    assert_eq!(cluster.pod("old")["status"]["phase"], "Running");
    drop(json!({}));
}
