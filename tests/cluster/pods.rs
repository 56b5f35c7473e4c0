//! Pods from the API: started, reported, deleted, refused, supplied with configMaps, secrets and tokens.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{ConfigMap, Secret, Service};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::agent_process::eventually;
use crate::setup::{Cluster, FOREVER, condition, container, script};

#[test]
fn a_pod_is_started_reported_and_deleted_with_its_grace() {
    let cluster = Cluster::new();
    let _agent = cluster.join();
    cluster.create_pod("web", script("Always", FOREVER));
    let pod = cluster.wait_running("web");
    let status = &pod["status"];
    assert!(
        status["podIP"]
            .as_str()
            .is_some_and(|ip| ip.starts_with("10.")),
        "{status}"
    );
    assert!(status["hostIP"].as_str().is_some(), "{status}");
    assert!(status["startTime"].as_str().is_some());
    assert_eq!(status["qosClass"], "BestEffort");
    let main = &status["containerStatuses"][0];
    assert!(
        main["containerID"]
            .as_str()
            .unwrap()
            .starts_with("containerd://")
    );
    assert_eq!(main["restartCount"], 0);
    assert_eq!(condition(&pod, "Initialized")["status"], "True");
    for reason in ["Created", "Started"] {
        cluster.wait_event("web", reason, "main");
    }
    let start = Instant::now();
    cluster.delete_pod("web", 30);
    cluster.wait_gone("web", Duration::from_secs(20));
    println!("a deleted pod was gone after {:?}", start.elapsed());
    eventually("nothing of it is left", || {
        match cluster.containers().as_slice() {
            [] => Ok(()),
            some => Err(format!("{some:?}")),
        }
    });
}

#[test]
fn a_pod_that_does_not_listen_is_killed_after_its_grace() {
    let cluster = Cluster::new();
    let _agent = cluster.join();
    cluster.create_pod(
        "deaf",
        script("Always", "trap '' TERM; while :; do sleep 1; done"),
    );
    cluster.wait_running("deaf");
    let start = Instant::now();
    cluster.delete_pod("deaf", 4);
    cluster.wait_gone("deaf", Duration::from_secs(30));
    assert!(
        start.elapsed() >= Duration::from_millis(3500),
        "{:?}",
        start.elapsed()
    );
}

#[test]
fn exit_codes_and_restarts_arrive() {
    let cluster = Cluster::new();
    let _agent = cluster.join();
    cluster.create_pod("fails", script("Never", "exit 3"));
    cluster.create_pod("once", script("OnFailure", "exit 0"));
    cluster.create_pod("loops", script("Always", "sleep 1; exit 7"));
    let failed = cluster.wait_pod_phase("fails", "Failed");
    assert_eq!(
        failed["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"],
        3
    );
    cluster.wait_pod_phase("once", "Succeeded");
    cluster.wait_pod("loops", "waits in its back-off", |pod| {
        let main = &pod["status"]["containerStatuses"][0];
        main["state"]["waiting"]["reason"] == "CrashLoopBackOff"
            && main["restartCount"].as_u64() >= Some(1)
            && main["lastState"]["terminated"]["exitCode"] == 7
    });
    cluster.wait_event("loops", "BackOff", "main");
}

#[test]
fn a_pod_gets_its_config_maps_secrets_token_and_services() {
    let cluster = Cluster::new();
    let _agent = cluster.join();
    cluster.create::<ConfigMap>(json!({
        "metadata": {"name": "settings"}, "data": {"color": "blue", "size": "9"},
    }));
    cluster.create::<Secret>(json!({
        "metadata": {"name": "keys"}, "stringData": {"password": "swordfish"},
    }));
    cluster.create::<Service>(json!({
        "metadata": {"name": "db-main"},
        "spec": {"selector": {"app": "db"}, "ports": [{"port": 5432, "name": "sql"}]},
    }));
    let mut spec = script(
        "Never",
        "env | sort; cat /config/color /secret/password; echo; \
         cat /var/run/secrets/kubernetes.io/serviceaccount/namespace; echo; \
         head -c 20 /var/run/secrets/kubernetes.io/serviceaccount/token; echo; \
         head -c 27 /var/run/secrets/kubernetes.io/serviceaccount/ca.crt; echo; cat /info/labels",
    );
    spec["containers"][0]["env"] = json!([
        {"name": "COLOR", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "color"}}},
        {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "password"}}},
        {"name": "MAYBE", "valueFrom": {"secretKeyRef": {"name": "none", "key": "x", "optional": true}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
    ]);
    spec["containers"][0]["envFrom"] =
        json!([{"prefix": "S_", "configMapRef": {"name": "settings"}}]);
    spec["containers"][0]["volumeMounts"] = json!([
        {"name": "config", "mountPath": "/config"},
        {"name": "secret", "mountPath": "/secret"},
        {"name": "info", "mountPath": "/info"},
        {"name": "access", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": true},
    ]);
    spec["volumes"] = json!([
        {"name": "config", "configMap": {"name": "settings"}},
        {"name": "secret", "secret": {"secretName": "keys", "defaultMode": 0o400}},
        {"name": "info", "downwardAPI": {"items": [
            {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}},
        ]}},
        {"name": "access", "projected": {"sources": [
            {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
            {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
            {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
        ]}},
    ]);
    cluster.create_pod_with("reader", json!({"labels": {"app": "reader"}}), spec);
    cluster.wait_pod_phase("reader", "Succeeded");
    let said = log_of(&cluster, "reader");
    let namespace = cluster.namespace.as_str();
    for line in [
        "COLOR=blue",
        "PASSWORD=swordfish",
        "S_size=9",
        "DB_MAIN_SERVICE_PORT_SQL=5432",
        "KUBERNETES_SERVICE_PORT=443",
        "blueswordfish",
        namespace,
        "-----BEGIN CERTIFICATE-----",
        "app=\"reader\"",
    ] {
        assert!(
            said.lines().any(|l| l == line),
            "{line:?} is not in:\n{said}"
        );
    }
    assert!(
        said.contains("\nIP=10.") && said.contains("\nCPU=") && said.contains("\neyJ"),
        "{said}"
    );
    assert!(!said.contains("MAYBE="), "{said}");
    let store = cluster.dump(&["objects"]).to_string();
    assert!(!store.contains("swordfish"), "secrets are not shown");
    assert!(!grep_store(&cluster, b"swordfish"), "nor on disk");
}

fn log_of(cluster: &Cluster, pod: &str) -> String {
    let uid = cluster.pod(pod)["metadata"]["uid"]
        .as_str()
        .unwrap()
        .to_owned();
    let dir = cluster
        .pod_logs()
        .join(format!("{}_{pod}_{uid}", cluster.namespace));
    let log = std::fs::read_to_string(dir.join("main/0.log")).unwrap();
    log.lines()
        .map(|line| line.splitn(4, ' ').nth(3).unwrap_or_default().to_owned() + "\n")
        .collect()
}

fn grep_store(cluster: &Cluster, needle: &[u8]) -> bool {
    fn grep(dir: &std::path::Path, needle: &[u8]) -> bool {
        std::fs::read_dir(dir).unwrap().flatten().any(|entry| {
            let path = entry.path();
            if path.is_dir() {
                return grep(&path, needle);
            }
            std::fs::read(&path).is_ok_and(|bytes| bytes.windows(needle.len()).any(|w| w == needle))
        })
    }
    grep(&cluster.state_dir(), needle)
}

#[test]
fn a_changed_config_map_reaches_the_file_of_a_running_pod() {
    let cluster = Cluster::new();
    let _agent = cluster.join();
    cluster.create::<ConfigMap>(json!({"metadata": {"name": "live"}, "data": {"word": "one"}}));
    let mut spec = script("Always", FOREVER);
    spec["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    spec["volumes"] = json!([{"name": "v", "configMap": {"name": "live"}}]);
    cluster.create_pod("follower", spec);
    cluster.wait_running("follower");
    let id = cluster.running()[0].id.clone();
    assert_eq!(cluster.exec(&id, &["cat", "/v/word"]).1, "one");
    let maps = cluster.api::<ConfigMap>();
    let patch = Patch::Merge(json!({"data": {"word": "two"}}));
    cluster
        .run(maps.patch("live", &PatchParams::default(), &patch))
        .unwrap();
    let start = Instant::now();
    eventually("the file follows", || {
        match cluster.exec(&id, &["cat", "/v/word"]).1.as_str() {
            "two" => Ok(()),
            other => Err(other.to_owned()),
        }
    });
    println!(
        "a changed configMap reached the file after {:?}",
        start.elapsed()
    );
    assert!(start.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_pod_waits_for_a_secret_that_does_not_exist_and_says_so() {
    let cluster = Cluster::new();
    let _agent = cluster.join();
    let mut spec = script("Always", FOREVER);
    spec["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    spec["volumes"] = json!([{"name": "v", "secret": {"secretName": "late"}}]);
    cluster.create_pod("patient", spec);
    let mut spec = script("Always", FOREVER);
    spec["containers"][0]["env"] =
        json!([{"name": "X", "valueFrom": {"secretKeyRef": {"name": "late", "key": "k"}}}]);
    cluster.create_pod("env", spec);
    cluster.wait_event("patient", "FailedMount", "late");
    cluster.wait_pod("env", "says what it waits for", |pod| {
        let waiting = &pod["status"]["containerStatuses"][0]["state"]["waiting"];
        waiting["reason"] == "CreateContainerConfigError"
            && waiting["message"]
                .as_str()
                .is_some_and(|m| m.contains("late"))
    });
    cluster.create::<Secret>(json!({"metadata": {"name": "late"}, "stringData": {"k": "v"}}));
    cluster.wait_running("patient");
    cluster.wait_running("env");
}

#[test]
fn a_config_map_of_900_kilobytes_arrives_whole() {
    let cluster = Cluster::new();
    let _agent = cluster.join();
    let text = "0123456789abcdef".repeat(900 * 1024 / 16);
    cluster.create::<ConfigMap>(json!({"metadata": {"name": "big"}, "data": {"text": text}}));
    let mut spec = script("Never", "wc -c </v/text");
    spec["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    spec["volumes"] = json!([{"name": "v", "configMap": {"name": "big"}}]);
    cluster.create_pod("heavy", spec);
    cluster.wait_pod_phase("heavy", "Succeeded");
    assert_eq!(log_of(&cluster, "heavy").trim(), text.len().to_string());
}

#[test]
fn a_pod_that_cannot_run_here_is_refused_with_a_reason() {
    let cluster = Cluster::new();
    let _agent = cluster.join();
    cluster.patch_node(json!({"metadata": {"labels": {"disk": "ssd"}}}));
    let with = |field: &str, value: Value| {
        let mut spec = script("Always", FOREVER);
        spec[field] = value;
        spec
    };
    let resources = |cpu: &str| {
        let mut spec = script("Always", FOREVER);
        spec["containers"][0]["resources"] = json!({"requests": {"cpu": cpu}});
        spec
    };
    let port = |_: &str| {
        let mut spec = script("Always", FOREVER);
        spec["containers"][0]["ports"] = json!([{"containerPort": 80, "hostPort": 18_080}]);
        spec
    };
    let mut disk = script("Always", FOREVER);
    disk["volumes"] = json!([{"name": "d", "awsElasticBlockStore": {"volumeID": "vol-1"}}]);
    cluster.create_pod("first", port(""));
    cluster.wait_running("first");
    for (name, spec, reason, words) in [
        ("greedy", resources("1000"), "OutOfcpu", "cpu"),
        (
            "elsewhere",
            with("nodeSelector", json!({"disk": "tape"})),
            "NodeAffinity",
            "selector",
        ),
        ("second", port(""), "NodePorts", "18080"),
        (
            "sysctl",
            with(
                "securityContext",
                json!({"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}),
            ),
            "SysctlForbidden",
            "kernel.msgmax",
        ),
        ("disk", disk, "UnsupportedField", "awsElasticBlockStore"),
    ] {
        cluster.create_pod(name, spec);
        let pod = cluster.wait_pod_phase(name, "Failed");
        assert_eq!(pod["status"]["reason"], reason, "{name}: {}", pod["status"]);
        assert!(
            pod["status"]["message"].as_str().unwrap().contains(words),
            "{}",
            pod["status"]
        );
        cluster.wait_event(name, reason, words);
    }
    cluster.create_pod("fits", with("nodeSelector", json!({"disk": "ssd"})));
    cluster.wait_running("fits");
}

#[test]
fn a_static_pod_is_seen_through_its_mirror_pod() {
    let cluster = Cluster::new();
    let _agent = cluster.join();
    let mut pod = cluster
        .world
        .pod("static", "Always", &[("main", crate::world::FOREVER)]);
    pod["metadata"]["namespace"] = json!(cluster.namespace);
    cluster.add(&pod);
    let name = format!("static-{}", cluster.node);
    let mirror = cluster.wait_running(&name);
    let annotations = &mirror["metadata"]["annotations"];
    assert!(
        annotations["kubernetes.io/config.mirror"]
            .as_str()
            .is_some(),
        "{annotations}"
    );
    assert_eq!(mirror["metadata"]["ownerReferences"][0]["kind"], "Node");
    let container = cluster.running()[0].id.clone();
    let uid = mirror["metadata"]["uid"].clone();
    // A deleted mirror comes back, and the pod runs on.
    cluster.kubectl(&["delete", "pod", &name, "--wait=false"]);
    cluster.wait_pod(&name, "is back", |pod| {
        pod["metadata"]["uid"] != uid && pod["status"]["phase"] == "Running"
    });
    assert_eq!(cluster.running()[0].id, container);
    cluster.world.delete("static");
    cluster.wait_gone(&name, Duration::from_secs(30));
    eventually("its container is gone", || {
        match cluster.running().as_slice() {
            [] => Ok(()),
            some => Err(format!("{some:?}")),
        }
    });
}

#[test]
fn several_containers_share_their_pod() {
    let cluster = Cluster::new();
    let _agent = cluster.join();
    let spec = json!({
        "terminationGracePeriodSeconds": 1,
        "volumes": [{"name": "shared", "emptyDir": {}}],
        "containers": [
            container("writer", "while :; do date > /shared/now; sleep 1; done"),
            container("reader", "until test -s /shared/now; do sleep 0.1; done; sleep 10000"),
        ],
    });
    let mut spec = spec;
    for n in 0..2 {
        spec["containers"][n]["volumeMounts"] = json!([{"name": "shared", "mountPath": "/shared"}]);
    }
    cluster.create_pod("pair", spec);
    let pod = cluster.wait_running("pair");
    assert_eq!(
        pod["status"]["containerStatuses"].as_array().unwrap().len(),
        2
    );
}
