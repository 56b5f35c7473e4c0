//! What goes wrong between an agent and its API server: credentials, names, cuts, wrong answers.

use std::time::Duration;

use holdfast_testkit::envtest::{Authority, DAY};
use holdfast_testkit::fault_proxy::Fault;
use jiff::SignedDuration;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Event, Node, Secret};
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::agent_process::{Agent, eventually, within};
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

/// Past the proxy, which adds credentials of its own.
fn directly(cluster: &mut Cluster, expires_in: SignedDuration) {
    let (env, node) = (&cluster.env, &cluster.node);
    cluster.kubeconfig = env.node_kubeconfig_with(node, &env.url(), expires_in);
}

#[test]
fn an_expired_certificate_is_told_and_static_pods_run() {
    let mut cluster = Cluster::new();
    directly(&mut cluster, -DAY);
    let pod = cluster
        .world
        .pod("static", "Always", &[("main", crate::world::FOREVER)]);
    cluster.add(&pod);
    let _agent = cluster.start();
    let yesterday = (jiff::Timestamp::now() - DAY).to_string();
    wait_log(
        &cluster,
        &["certificate is not valid", "expired at", &yesterday[..10]],
    );
    let name = format!("static-{}", cluster.node);
    eventually("the static pod runs", || cluster.try_one(&name, "main"));
    wait_log(&cluster, &["401", "expired at", &yesterday[..10]]);
    assert_eq!(cluster.get_node(), None);
}

#[test]
fn a_certificate_that_expires_is_told_and_its_successor_used() {
    let mut cluster = Cluster::new();
    directly(&mut cluster, SignedDuration::from_secs(30));
    let _agent = cluster.join();
    wait_log(&cluster, &["401", "expired at"]);
    let successor = (cluster.env).node_kubeconfig_with(&cluster.node, &cluster.env.url(), DAY);
    std::fs::rename(successor, &cluster.kubeconfig).unwrap();
    cluster.create_pod("late", script("Always", FOREVER));
    cluster.wait_running("late");
}

#[test]
fn an_unknown_authority_is_told() {
    let mut cluster = Cluster::new();
    let text = std::fs::read_to_string(&cluster.kubeconfig).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    let stranger = cluster.dir().join("stranger.crt");
    std::fs::write(&stranger, Authority::new("stranger").pem()).unwrap();
    config["clusters"][0]["cluster"]["certificate-authority"] = json!(stranger);
    let path = cluster.dir().join("mixed.kubeconfig");
    std::fs::write(&path, config.to_string()).unwrap();
    cluster.kubeconfig = path;
    let _agent = cluster.start();
    wait_log(
        &cluster,
        &[
            "does not answer",
            "certificate-authority",
            "mixed.kubeconfig",
        ],
    );
}

#[test]
fn a_node_needs_no_rights_but_those_of_system_nodes() {
    let cluster = Cluster::new();
    let agent = cluster.join();
    let name = |name: &str| json!({ "metadata": { "name": name }, "data": {} });
    cluster.create::<ConfigMap>(name("settings"));
    cluster.create::<Secret>(name("password"));
    let mut spec = script("Always", FOREVER);
    spec["volumes"] = json!([
        { "name": "settings", "configMap": { "name": "settings" } },
        { "name": "password", "secret": { "secretName": "password" } },
    ]);
    spec["containers"][0]["volumeMounts"] = json!([
        { "name": "settings", "mountPath": "/settings" },
        { "name": "password", "mountPath": "/password" },
    ]);
    cluster.create_pod("full", spec.clone());
    cluster.wait_running("full");
    let pod = cluster
        .world
        .pod("static", "Always", &[("main", crate::world::FOREVER)]);
    cluster.add(&pod);
    cluster.wait_event("full", "Started", "");
    // A life that finds everything there already.
    let refused = refused(&agent);
    drop(agent);
    let agent = cluster.join();
    cluster.create_pod("more", spec);
    cluster.wait_running("more");
    cluster.delete_pod("full", 1);
    cluster.wait_gone("full", Duration::from_secs(60));
    cluster.delete("static");
    assert_eq!(refused, Vec::<String>::new());
    assert_eq!(self::refused(&agent), Vec::<String>::new());
}

/// The agent's requests for which it had no right; fails when it counts none at all.
fn refused(agent: &Agent) -> Vec<String> {
    let (_, metrics) = agent.get("/metrics").unwrap();
    let requests = metrics
        .lines()
        .filter(|line| line.starts_with("rest_client_requests_total{"));
    let (refused, granted): (Vec<_>, Vec<_>) = requests
        .map(str::to_owned)
        .partition(|line| line.contains("code=\"401\"") || line.contains("code=\"403\""));
    assert!(granted.len() > 3, "{granted:?}");
    refused
}

#[test]
fn a_node_name_of_another_machine_is_told_with_both() {
    let cluster = Cluster::new();
    let nodes: Api<Node> = Api::all(cluster.client());
    let leases: Api<Lease> = Api::namespaced(cluster.client(), "kube-node-lease");
    let node = json!({ "metadata": { "name": cluster.node } });
    let node = serde_json::from_value(node).unwrap();
    let lease = json!({
        "metadata": { "name": cluster.node },
        "spec": {
            "holderIdentity": cluster.node,
            "leaseDurationSeconds": 40,
            "renewTime": format!("{:.6}", jiff::Timestamp::now()),
        },
    });
    let lease = serde_json::from_value(lease).unwrap();
    let status = json!({ "status": { "nodeInfo": {
        "machineID": "0123feedbeef",
        "systemUUID": "4567feedbeef",
        "architecture": "amd64",
        "bootID": "",
        "containerRuntimeVersion": "",
        "kernelVersion": "",
        "kubeProxyVersion": "",
        "kubeletVersion": "",
        "operatingSystem": "linux",
        "osImage": "",
    } } });
    cluster.run(async {
        let made = PostParams::default();
        nodes.create(&made, &node).await.unwrap();
        leases.create(&made, &lease).await.unwrap();
        let patched = PatchParams::default();
        let patch = Patch::Merge(status);
        (nodes.patch_status(&cluster.node, &patched, &patch).await).unwrap();
    });
    let _agent = cluster.join();
    let own = cluster.get_node().unwrap()["status"]["nodeInfo"]["machineID"].clone();
    let own = own.as_str().unwrap();
    wait_log(
        &cluster,
        &[
            "NodeNameConflict",
            "0123feedbeef",
            own,
            "--hostname-override",
        ],
    );
    let events = Api::<Event>::default_namespaced(cluster.client());
    eventually("the cluster is told", || {
        let events = cluster.run(events.list(&ListParams::default())).unwrap();
        let found = events.iter().any(|event| {
            event.reason.as_deref() == Some("NodeNameConflict")
                && event.involved_object.name.as_ref() == Some(&cluster.node)
        });
        if found {
            Ok(())
        } else {
            Err("no event".to_owned())
        }
    });
}

#[test]
fn a_token_without_rights_is_told_once() {
    let mut cluster = Cluster::new();
    let proxy = cluster.env.fault_proxy_for_tokens();
    let token = cluster.env.token(&cluster.namespace, "default");
    cluster.kubeconfig = cluster.env.token_kubeconfig(&proxy.url(), &token);
    let _agent = cluster.start();
    wait_log(&cluster, &["403", "system:node:"]);
    std::thread::sleep(Duration::from_secs(10));
    let log = cluster.logs();
    let mut refusals: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("refuses this request"))
        .filter_map(|line| line.split("request=").nth(1))
        .collect();
    let all = refusals.len();
    refusals.sort_unstable();
    refusals.dedup();
    assert_eq!(refusals.len(), all, "each once: {log}");
    let told = log
        .lines()
        .filter(|l| l.contains("WARN") || l.contains("ERROR"))
        .count();
    assert!(told < 15, "{told} warnings in a few seconds: {log}");
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
fn a_server_that_stands_still_is_noticed() {
    let mut cluster = Cluster::alone();
    directly(&mut cluster, DAY);
    let _agent = cluster.join();
    cluster.env.pause();
    // A ping after 30 s of silence, and 15 s for its answer.
    within(Duration::from_secs(60), "the silence is noticed", || {
        let log = cluster.logs();
        if log.contains("the API server does not answer") {
            Ok(())
        } else {
            Err(log)
        }
    });
    cluster.env.resume();
    cluster.wait_node_ready();
    cluster.create_pod("after", script("Always", FOREVER));
    cluster.wait_running("after");
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
}
