//! The promises of a restart, with pods from a real API server.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use serde_json::{Value, json};

use crate::agent_process::{eventually, within};
use crate::setup::{Cluster, FOREVER, condition, script};
use crate::world::{Seen, ids};

/// Status of each pod as the API server has it.
fn statuses(cluster: &Cluster) -> BTreeMap<String, Value> {
    let pods = cluster.pods().into_iter();
    pods.map(|pod| (pod["metadata"]["name"].to_string(), pod["status"].clone()))
        .collect()
}

fn ids_of(cluster: &Cluster) -> BTreeMap<(String, String), String> {
    ids(&cluster.containers())
}

// Invariant API-3.
/// R1, R2: a restart among running pods writes no status and touches no container.
#[test]
fn restart_keeps_ready_pods_and_writes_no_status() {
    const PODS: usize = 20;
    let cluster = Cluster::new();
    let agent = cluster.join();
    for n in 0..PODS {
        cluster.create_pod(&format!("r-{n}"), script("Always", FOREVER));
    }
    cluster.create_pod("done", script("Never", "exit 0"));
    for n in 0..PODS {
        cluster.wait_running(&format!("r-{n}"));
    }
    cluster.wait_pod_phase("done", "Succeeded");
    let acknowledged = || {
        let dump = cluster.dump(&["statuses"]);
        let rows = dump["tables"]["statuses"].as_array().unwrap().clone();
        match rows.iter().find(|r| r["version"] != r["acknowledged"]) {
            None => Ok(()),
            Some(row) => Err(row.to_string()),
        }
    };
    eventually("everything is told", acknowledged);
    cluster.site.recorded();
    let (before, containers) = (statuses(&cluster), ids_of(&cluster));
    agent.kill9();
    cluster.proxy.reset();
    let _agent = cluster.start();
    std::thread::sleep(Duration::from_secs(20));
    let counts = cluster.proxy.counts();
    println!("requests in the first 20 s after a restart with {PODS} pods: {counts:?}");
    assert_eq!(cluster.proxy.count("PATCH", "pods/status"), 0, "{counts:?}");
    assert_eq!(cluster.proxy.count("GET", "pods"), 0, "{counts:?}");
    assert_eq!(statuses(&cluster), before);
    assert_eq!(ids_of(&cluster), containers);
}

// Invariant API-8.
/// R3: what was admitted stays, whatever the node looks like now; what was never started does not.
#[test]
fn restart_keeps_admitted_pod_when_label_changes() {
    let cluster = Cluster::new();
    let agent = cluster.join();
    cluster.patch_node(json!({"metadata": {"labels": {"disk": "ssd"}}}));
    let mut spec = script("Always", FOREVER);
    spec["nodeSelector"] = json!({"disk": "ssd"});
    spec["containers"][0]["resources"] = json!({"requests": {"cpu": "10m"}});
    eventually("the agent has seen the label", || {
        let dump = cluster.dump(&["node"]);
        match &dump["tables"]["node"][0]["object"]["metadata"]["labels"]["disk"] {
            label if label == "ssd" => Ok(()),
            other => Err(other.to_string()),
        }
    });
    cluster.create_pod("picky", spec.clone());
    cluster.wait_running("picky");
    let before = ids_of(&cluster);
    agent.kill9();
    cluster.patch_node(json!({"metadata": {"labels": {"disk": null}}}));
    cluster.site.configure("systemReserved: {cpu: 1995m}\n");
    let _agent = cluster.start();
    // A second one like it is refused, which shows that the node has changed for the agent.
    cluster.create_pod("late", spec);
    cluster.wait_pod_phase("late", "Failed");
    assert_eq!(cluster.pod("picky")["status"]["phase"], "Running");
    assert_eq!(ids_of(&cluster), before);
}

/// R4: a pod deleted while the agent is away ends with its grace period and is removed.
#[test]
fn restart_keeps_deletions_of_the_time_it_was_away() {
    let cluster = Cluster::new();
    let agent = cluster.join();
    let mut slow = script(
        "Always",
        "trap 'sleep 3; exit 0' TERM; while :; do sleep 0.2; done",
    );
    slow["terminationGracePeriodSeconds"] = json!(20);
    cluster.create_pod("slow", slow);
    cluster.create_pod("forced", script("Always", FOREVER));
    cluster.create_pod("stays", script("Always", FOREVER));
    for pod in ["slow", "forced", "stays"] {
        cluster.wait_running(pod);
    }
    let stays = cluster.try_one("stays", "main").unwrap();
    agent.kill9();
    cluster.delete_pod("slow", 20);
    cluster.delete_pod("forced", 0);
    cluster.create_pod("new", script("Always", FOREVER));
    let start = Instant::now();
    let _agent = cluster.start();
    cluster.wait_gone("slow", Duration::from_secs(30));
    println!(
        "a pod deleted meanwhile (3 s to end) was gone after {:?}",
        start.elapsed()
    );
    cluster.wait_running("new");
    eventually("what was forced away has ended", || {
        match cluster.try_one("forced", "main") {
            Ok(seen) => Err(format!("{seen:?}")),
            Err(_) => Ok(()),
        }
    });
    assert_eq!(cluster.try_one("stays", "main").unwrap(), stays);
}

/// R18: deleted, or replaced by one of the same name, while the node was cut off.
#[test]
fn restart_keeps_out_what_was_deleted_or_replaced_offline() {
    let cluster = Cluster::new();
    let agent = cluster.join();
    for pod in ["deleted", "replaced", "stays"] {
        cluster.create_pod(pod, script("Always", FOREVER));
    }
    for pod in ["deleted", "replaced", "stays"] {
        cluster.wait_running(pod);
    }
    let before = ids_of(&cluster);
    cluster.proxy.cut();
    cluster.delete_pod("deleted", 0);
    cluster.delete_pod("replaced", 0);
    let uid = cluster.create_pod("replaced", script("Always", FOREVER));
    // The outage changes nothing, nor does a restart in it.
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(ids_of(&cluster), before);
    agent.kill9();
    let _agent = cluster.start();
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(ids_of(&cluster), before);
    cluster.proxy.heal();
    let start = Instant::now();
    cluster.wait_pod("replaced", "runs", |pod| {
        pod["metadata"]["uid"] == uid.as_str() && pod["status"]["phase"] == "Running"
    });
    eventually("the deleted one has ended", || {
        match cluster.try_one("deleted", "main") {
            Ok(seen) => Err(format!("{seen:?}")),
            Err(_) => Ok(()),
        }
    });
    println!(
        "after {:?} in touch again everything was as wanted",
        start.elapsed()
    );
    let key = |pod: &str| (pod.to_owned(), "main".to_owned());
    // A pod of another UID waits for nobody: the replaced one may still be ending.
    let former = &before[&key("replaced")];
    eventually("the replaced one has ended", || {
        match cluster.running().iter().find(|seen| seen.id == *former) {
            Some(seen) => Err(format!("{seen:?}")),
            None => Ok(()),
        }
    });
    let now = ids(&cluster.running());
    assert_eq!(now.get(&key("stays")), before.get(&key("stays")));
    assert!(now.contains_key(&key("replaced")), "{now:?}");
}

/// R6: an eviction and an exit code of an outage arrive, though their containers are gone.
#[test]
fn restart_keeps_an_eviction_and_an_exit_code_of_an_outage() {
    let cluster = Cluster::new();
    let agent = cluster.join();
    let mut exits = script(
        "Never",
        "until test -e /starts/go; do sleep 0.1; done; exit 3",
    );
    exits["containers"][0]["volumeMounts"] = json!([{"name": "starts", "mountPath": "/starts"}]);
    exits["volumes"] = json!([{"name": "starts", "hostPath": {"path": cluster.starts()}}]);
    cluster.create_pod("exits", exits);
    cluster.create_pod("victim", script("Always", FOREVER));
    for pod in ["exits", "victim"] {
        cluster.wait_running(pod);
    }
    cluster.proxy.cut();
    cluster.evict("victim");
    std::fs::write(cluster.starts().join("go"), "").unwrap();
    eventually("both are on record", || {
        let dump = cluster.dump(&["statuses"]);
        let rows = dump["tables"]["statuses"].as_array().unwrap();
        match rows
            .iter()
            .find(|r| r["status"]["phase"] != "Failed" || r["finished"] != true)
        {
            None => Ok(()),
            Some(row) => Err(row.to_string()),
        }
    });
    agent.kill9();
    cluster.wipe_runtime();
    let agent = cluster.start();
    std::thread::sleep(Duration::from_secs(3));
    agent.kill9();
    let _agent = cluster.start();
    cluster.proxy.heal();
    let exits = cluster.wait_pod_phase("exits", "Failed");
    assert_eq!(
        exits["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"],
        3
    );
    let victim = cluster.wait_pod_phase("victim", "Failed");
    assert_eq!(victim["status"]["reason"], "Evicted", "{victim}");
    assert_eq!(cluster.containers(), [], "neither runs again");
}

/// R19: what happened during an outage, restarts included, arrives as it was.
#[test]
fn restart_keeps_what_an_outage_could_not_tell() {
    let cluster = Cluster::new();
    let agent = cluster.join();
    let wait_for = |file: &str, then: &str| {
        format!("until test -e /starts/{file}; do sleep 0.1; done; {then}")
    };
    for (name, policy, text) in [
        ("exits", "Never", wait_for("go", "exit 3")),
        ("succeeds", "OnFailure", wait_for("go", "exit 0")),
        ("restarts", "Always", "test -e /starts/again || { until test -e /starts/go; do sleep 0.1; done; touch /starts/again; exit 9; }; sleep 10000".to_owned()),
    ] {
        let mut spec = script(policy, &text);
        spec["containers"][0]["volumeMounts"] = json!([{"name": "starts", "mountPath": "/starts"}]);
        spec["volumes"] = json!([{"name": "starts", "hostPath": {"path": cluster.starts()}}]);
        cluster.create_pod(name, spec);
        cluster.wait_running(name);
    }
    cluster.proxy.cut();
    std::fs::write(cluster.starts().join("go"), "").unwrap();
    eventually("all of it is on record", || {
        let dump = cluster.dump(&["statuses"]);
        let phase = |pod: &str| {
            let rows = dump["tables"]["statuses"].as_array().unwrap();
            let row = rows.iter().find(|r| r["name"] == pod).unwrap();
            (
                row["status"]["phase"].to_string(),
                row["status"]["containerStatuses"][0]["restartCount"].clone(),
            )
        };
        let now = (phase("exits").0, phase("succeeds").0, phase("restarts").1);
        if now == ("\"Failed\"".into(), "\"Succeeded\"".into(), json!(1)) {
            Ok(())
        } else {
            Err(format!("{now:?}"))
        }
    });
    agent.kill9();
    // The runtime forgets what ended.
    for container in cluster.containers().into_iter().filter(|c| !c.running) {
        cluster
            .runtime
            .ctr(&["containers", "rm", &container.id])
            .unwrap();
    }
    let _agent = cluster.start();
    assert_eq!(
        cluster.pod("exits")["status"]["phase"],
        "Running",
        "not told yet"
    );
    cluster.proxy.heal();
    let exits = cluster.wait_pod_phase("exits", "Failed");
    assert_eq!(
        exits["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"],
        3
    );
    cluster.wait_pod_phase("succeeds", "Succeeded");
    let restarts = cluster.wait_pod("restarts", "was restarted", |pod| {
        pod["status"]["containerStatuses"][0]["restartCount"] == 1
    });
    let last = &restarts["status"]["containerStatuses"][0]["lastState"]["terminated"];
    assert_eq!(last["exitCode"], 9);
}

// Invariant API-11.
/// R13: after a reboot without the API server the pods run from checkpoints.
#[test]
fn restart_keeps_pods_running_after_a_reboot_without_the_api() {
    let cluster = Cluster::new();
    let agent = cluster.join();
    cluster
        .create::<ConfigMap>(json!({"metadata": {"name": "settings"}, "data": {"color": "blue"}}));
    cluster.create::<Secret>(
        json!({"metadata": {"name": "keys"}, "stringData": {"word": "swordfish"}}),
    );
    cluster.patch_node(json!({"metadata": {"labels": {"disk": "ssd"}}}));
    let mut spec = script("Always", FOREVER);
    spec["nodeSelector"] = json!({"disk": "ssd"});
    spec["containers"][0]["env"] = json!([
        {"name": "COLOR", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "color"}}},
    ]);
    spec["containers"][0]["volumeMounts"] = json!([
        {"name": "v", "mountPath": "/v"}, {"name": "access", "mountPath": "/access"},
    ]);
    spec["volumes"] = json!([
        {"name": "v", "projected": {"sources": [
            {"secret": {"name": "keys"}}, {"configMap": {"name": "settings"}},
        ]}},
        {"name": "access", "projected": {"sources": [
            {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}},
        ]}},
    ]);
    eventually("the agent has seen the label", || {
        let dump = cluster.dump(&["node"]);
        match &dump["tables"]["node"][0]["object"]["metadata"]["labels"]["disk"] {
            label if label == "ssd" => Ok(()),
            other => Err(other.to_string()),
        }
    });
    cluster.create_pod("edge", spec);
    let owner = json!([{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db", "uid": "1", "controller": true}]);
    cluster.create_pod_with(
        "db-0",
        json!({"ownerReferences": owner}),
        script("Always", FOREVER),
    );
    cluster.create_pod(
        "ending",
        script("Always", "trap '' TERM; while :; do sleep 1; done"),
    );
    cluster.create_pod("done", script("Never", "exit 0"));
    // No registry can be reached: the image that is there must not stand in for one that has to be asked for.
    let mut always = script("Always", FOREVER);
    always["containers"][0]["imagePullPolicy"] = json!("Always");
    cluster.create_pod("always", always);
    for pod in ["edge", "db-0", "ending"] {
        cluster.wait_running(pod);
    }
    cluster.wait_pod_phase("done", "Succeeded");
    cluster.delete_pod("ending", 120);
    eventually("the deletion is known", || {
        let dump = cluster.dump(&["workers"]);
        let rows = dump["tables"]["workers"].as_array().unwrap();
        match rows.iter().find(|r| r["name"] == "ending") {
            Some(row) if row["phase"] == "Terminating" => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
    let first = cluster.try_one("edge", "main").unwrap();
    let old_token = cluster.exec(&first.id, &["cat", "/access/token"]).1;
    agent.kill9();
    cluster.proxy.cut();
    cluster.wipe_runtime();
    cluster.unmount_all();
    let start = Instant::now();
    // Two hours later: the token has expired.
    let reboot = || {
        let later = [("HOLDFAST_WALL_OFFSET", "7200")];
        let mut agent = cluster.spawn_agent_with(&["--boot-id", "another-boot"], &later);
        agent.wait_ready();
        agent
    };
    let agent = reboot();
    let edge = within(
        Duration::from_secs(60),
        "the pod runs without the API",
        || cluster.try_one("edge", "main"),
    );
    println!(
        "a pod ran {:?} after a reboot without the API server",
        start.elapsed()
    );
    assert_eq!(
        cluster
            .exec(&edge.id, &["sh", "-c", "echo $COLOR; cat /v/word /v/color"])
            .1,
        "blue\nswordfishblue"
    );
    let token = cluster.exec(&edge.id, &["cat", "/access/token"]).1;
    assert_eq!(token, old_token, "the expired token is there");
    let journal = cluster.dump(&["journal"]).to_string();
    assert!(journal.contains("ServiceAccountTokenExpired"), "{journal}");
    std::thread::sleep(Duration::from_secs(5));
    for held in ["db-0", "ending", "done", "always"] {
        assert!(
            cluster.try_one(held, "main").is_err(),
            "{held} is not started"
        );
    }
    // A restart of the agent in the same boot holds back what was held back.
    agent.kill9();
    let _agent = reboot();
    std::thread::sleep(Duration::from_secs(5));
    assert!(cluster.try_one("db-0", "main").is_err());
    assert_eq!(cluster.try_one("edge", "main"), Ok(edge.clone()));
    cluster.proxy.heal();
    within(Duration::from_secs(60), "the API server wins", || {
        cluster.try_one("db-0", "main")
    });
    cluster.wait_gone("ending", Duration::from_secs(60));
    within(
        Duration::from_secs(90),
        "the token is replaced",
        || match cluster.exec(&edge.id, &["cat", "/access/token"]).1 {
            token if token.starts_with("eyJ") && token != old_token => Ok(()),
            _ => Err("the old one".to_owned()),
        },
    );
    assert_eq!(cluster.try_one("edge", "main"), Ok(edge));
    for never in ["done", "always"] {
        assert!(cluster.try_one(never, "main").is_err(), "{never}");
    }
}

/// A lost store: running pods are adopted, nothing starts twice, and the API server fills it again.
#[test]
fn restart_keeps_everything_when_the_store_is_lost() {
    let cluster = Cluster::new();
    let agent = cluster.join();
    cluster.create_pod("kept", script("Always", FOREVER));
    cluster.create_pod("done", script("Never", "exit 0"));
    cluster.wait_running("kept");
    cluster.wait_pod_phase("done", "Succeeded");
    let before = ids_of(&cluster);
    agent.kill9();
    std::fs::remove_dir_all(cluster.state_dir()).unwrap();
    cluster.proxy.cut();
    let _agent = cluster.start();
    std::thread::sleep(Duration::from_secs(10));
    let running: Vec<Seen> = cluster.running();
    assert_eq!(
        running.len(),
        1,
        "nothing is killed while the API server is away: {running:?}"
    );
    cluster.proxy.heal();
    cluster.wait_running("kept");
    cluster.wait_pod_phase("done", "Succeeded");
    std::thread::sleep(Duration::from_secs(5));
    let key = ("kept".to_owned(), "main".to_owned());
    assert_eq!(ids(&cluster.running()).get(&key), before.get(&key));
    assert_eq!(condition(&cluster.pod("kept"), "Ready")["status"], "True");
}

/// Takeover: what another agent left on the same root directory (labels, annotations, directories, no store of
/// ours) runs on, its restart counts and its data included.
#[test]
fn restart_keeps_pods_of_a_node_that_is_taken_over() {
    let cluster = Cluster::new();
    let agent = cluster.join();
    let mut spec = script(
        "Always",
        "test -e /data/first || { echo kept >/data/first; exit 5; }; trap 'exit 0' TERM; while :; do sleep 1; done",
    );
    spec["containers"][0]["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    spec["volumes"] = json!([{"name": "data", "emptyDir": {}}]);
    cluster.create_pod("restarted", spec);
    cluster.create_pod("plain", script("Always", FOREVER));
    cluster.wait_running("plain");
    cluster.wait_pod("restarted", "runs again", |pod| {
        let main = &pod["status"]["containerStatuses"][0];
        main["restartCount"] == 1 && main["ready"] == true
    });
    let before = ids(&cluster.running());
    agent.kill9();
    std::fs::remove_dir_all(cluster.state_dir()).unwrap();
    let _agent = cluster.join();
    cluster.create_pod("new", script("Always", FOREVER));
    cluster.wait_running("new");
    std::thread::sleep(Duration::from_secs(5));
    let mut now = ids(&cluster.running());
    now.remove(&("new".to_owned(), "main".to_owned()));
    assert_eq!(now, before);
    let restarted = cluster.pod("restarted");
    assert_eq!(
        restarted["status"]["containerStatuses"][0]["restartCount"], 1,
        "{restarted}"
    );
    let id = &before[&("restarted".to_owned(), "main".to_owned())];
    assert_eq!(cluster.exec(id, &["cat", "/data/first"]).1, "kept\n");
    // What was adopted ends as it should, with nothing left of it.
    cluster.delete_pod("restarted", 2);
    cluster.wait_gone("restarted", Duration::from_secs(30));
}
