//! The end of a pod's volumes beside what belongs to users, with the agent killed at each step of it.

use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_testkit::csi::CsiDriver;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use serde_json::{Value, json};

use crate::agent_process::{Agent, eventually, within};
use crate::controllers::Controllers;
use crate::features::{left, mounts_below};
use crate::planted::Planted;
use crate::setup::{Cluster, FOREVER, script};
use crate::torture::{claim, csi_claim, driver};

/// Steps of the end of a volume and of a pod, each with how often it comes for the pod of these tests, or more.
const STEPS: &[(&str, usize)] = &[
    ("pod_workers::terminating::after_kill", 1),
    ("pod_workers::terminated::before_cleanup", 1),
    ("volumemanager::tear_down::begun", 9),
    ("volumemanager::tear_down::unmounted", 5),
    ("volumemanager::tear_down::removed", 9),
    ("volumemanager::unpublish::recorded", 2),
    ("volumemanager::unpublish::done", 2),
    ("volumemanager::unstage::recorded", 2),
    ("volumemanager::unstage::done", 2),
    ("volumemanager::remove_pod_dirs::begun", 1),
];
/// Writes of the store are steps as well: those of a start come first.
const WRITES: [&str; 3] = [
    "store::commit::before_write",
    "store::flush::before_publish",
    "store::commit::after_publish",
];

const POD: &str = "rich";

/// A node with a CSI driver, and claims on a volume of it and on a local one, whose files are users'.
struct Storage {
    _controllers: Controllers,
    driver: CsiDriver,
}

fn storage(cluster: &Cluster, planted: &mut Planted) -> Storage {
    let controllers = Controllers::start(cluster);
    let name = format!("{}.holdfast.io", cluster.namespace);
    let driver = driver(cluster, &name, json!({"attachRequired": false}));
    let handle = csi_claim(cluster, "csi", &name);
    planted.file(driver.volume_dir(&handle).join("file"));
    planted.file(driver.volume_dir(&handle).join("deep/er/file"));
    let node = json!([{"matchExpressions": [
        {"key": "kubernetes.io/hostname", "operator": "In", "values": [cluster.node]},
    ]}]);
    let local = planted.tree("local");
    let source = json!({
        "local": {"path": local},
        "nodeAffinity": {"required": {"nodeSelectorTerms": node}},
    });
    claim(cluster, "local", source);
    Storage {
        _controllers: controllers,
        driver,
    }
}

/// A pod with a volume of every kind.
fn rich(cluster: &Cluster, users: &Path) -> String {
    cluster.create::<ConfigMap>(json!({"metadata": {"name": "settings"}, "data": {"a": "1"}}));
    cluster.create::<Secret>(json!({"metadata": {"name": "keys"}, "stringData": {"b": "2"}}));
    let labels =
        json!({"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]});
    let volumes = json!([
        {"name": "disk", "emptyDir": {}},
        {"name": "over", "emptyDir": {}},
        {"name": "over-too", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {"name": "host", "hostPath": {"path": users.join("host"), "type": "Directory"}},
        {"name": "map", "configMap": {"name": "settings"}},
        {"name": "secret", "secret": {"secretName": "keys"}},
        {"name": "labels", "downwardAPI": labels},
        {"name": "all", "projected": {"sources": [
            {"configMap": {"name": "settings"}},
            {"serviceAccountToken": {"path": "token"}},
        ]}},
        {"name": "csi", "persistentVolumeClaim": {"claimName": "csi"}},
        {"name": "local", "persistentVolumeClaim": {"claimName": "local"}},
    ]);
    let mut spec = script("Always", FOREVER);
    spec["hostNetwork"] = json!(true);
    spec["terminationGracePeriodSeconds"] = json!(1);
    let names = volumes.as_array().expect("volumes").iter();
    let mounts: Vec<Value> = names
        .map(|v| json!({"name": v["name"], "mountPath": format!("/v/{}", v["name"].as_str().unwrap())}))
        .collect();
    spec["containers"][0]["volumeMounts"] = json!(mounts);
    spec["volumes"] = volumes;
    cluster.create_pod(POD, spec)
}

/// Where the volumes of the pod are.
fn volume(cluster: &Cluster, uid: &str, plugin: &str, name: &str) -> PathBuf {
    let dir = format!("pods/{uid}/volumes/kubernetes.io~{plugin}/{name}");
    let path = cluster.root_dir().join(dir);
    assert!(path.is_dir(), "{}", path.display());
    path
}

/// One life of an agent that is to be killed at a step. Returns whether it was, or came to where it waits for users.
fn live(cluster: &Cluster, point: &str, waits: impl Fn(&Agent) -> bool) -> bool {
    let mut agent = cluster.spawn_agent_with(&[], &[("HOLDFAST_DIE_AT", point)]);
    let ended = within(
        Duration::from_secs(120),
        &format!("{point} is reached"),
        || match agent.exited() {
            Some(status) => Ok(Some(status)),
            None if waits(&agent) => Ok(None),
            None => Err(agent.log()),
        },
    );
    match ended {
        Some(status) => assert_eq!(status.signal(), Some(9), "{point}: {}", agent.log()),
        None => agent.kill9(),
    }
    ended.is_some()
}

#[test]
fn teardown_killed_at_each_step_keeps_what_users_mounted_and_linked() {
    let cluster = Cluster::new();
    let mut planted = Planted::new(&cluster.dir().join("users"));
    let users = planted.tree("host").parent().unwrap().to_owned();
    let storage = storage(&cluster, &mut planted);
    let agent = cluster.join();
    let uid = rich(&cluster, &users);
    cluster.wait_running(POD);
    cluster.wait_told(&[POD]);

    let at = |plugin: &str, name: &str| volume(&cluster, &uid, plugin, name);
    let disk = at("empty-dir", "disk");
    planted.link("linked", &disk.join("link"));
    planted.bind("in-disk", &disk.join("bound"));
    planted.bind_file("one-file", &disk.join("file"));
    planted.tmpfs(&disk.join("tmpfs"));
    planted.bind("in-memory", &at("empty-dir", "memory").join("bound"));
    planted.bind("in-map", &at("configmap", "map").join("bound"));
    planted.bind("in-secret", &at("secret", "secret").join("bound"));
    planted.bind("in-labels", &at("downward-api", "labels").join("bound"));
    planted.bind("in-all", &at("projected", "all").join("bound"));
    let volume = |name: &str| format!("{}-{name}", cluster.namespace);
    let local = at("local-volume", &volume("local"));
    planted.set_apart(&local);
    planted.bind("in-local", &local.join("bound"));
    let csi = at("csi", &volume("csi")).join("mount");
    planted.bind("in-csi", &csi.join("bound"));
    planted.bind("over", &at("empty-dir", "over"));
    planted.tmpfs(&at("empty-dir", "over-too"));
    planted.tmpfs(&users.join("host/mounted"));
    let pod_dir = cluster.root_dir().join("pods").join(&uid);
    planted.bind("in-pod-dir", &pod_dir.join("mine"));
    planted.bind(
        "beside-volumes",
        &pod_dir.join("volumes/kubernetes.io~empty-dir/mine"),
    );
    planted.assert_untouched("at first");
    agent.kill9();
    cluster.delete_pod(POD, 1);

    // What keeps each of the pod's volumes, by the path that is told.
    let below = |m: &&PathBuf| m.starts_with(pod_dir.join("volumes"));
    let volumes: BTreeSet<String> = planted
        .mounts()
        .iter()
        .filter(below)
        .filter_map(|m| {
            let parts = m.strip_prefix(&pod_dir).ok()?.iter().take(3);
            let path = parts.collect::<PathBuf>().to_string_lossy().into_owned();
            let of_claim = ["csi", "local"]
                .into_iter()
                .find(|of| path.ends_with(&format!("-{of}")));
            Some(of_claim.map_or(path, |of| {
                format!("volume=\"{uid}/{of}\" step=\"volume_unmount\"")
            }))
        })
        .filter(|path| !path.ends_with("/mine"))
        .collect();
    let waits = |agent: &Agent| {
        let log = agent.log();
        volumes.iter().all(|path| log.contains(path.as_str()))
    };
    let mut killed = BTreeSet::new();
    for (step, times) in STEPS {
        for nth in 1..=*times {
            let point = format!("{step}:{nth}");
            let died = live(&cluster, &point, waits);
            planted.assert_untouched(&point);
            if !died {
                break;
            }
            killed.insert(*step);
        }
    }
    for write in WRITES {
        for nth in 3..=10 {
            let point = format!("{write}:{nth}");
            live(&cluster, &point, waits);
            planted.assert_untouched(&point);
        }
    }
    assert!(
        killed.contains("volumemanager::tear_down::begun"),
        "{killed:?}"
    );

    // With nobody killing it: the pod is kept, and it is told by what.
    let agent = cluster.start();
    eventually("what is in the way is told", || {
        waits(&agent).then_some(()).ok_or_else(|| agent.log())
    });
    assert!(cluster.try_pod(POD).is_some(), "the pod is kept");
    planted.assert_untouched("while the pod is kept");

    // The users take their mounts away: the pod ends by itself.
    planted.unmount();
    cluster.wait_gone(POD, Duration::from_secs(180));
    eventually("nothing of the agent's is left", || left(&cluster));
    planted.assert_untouched("after the pod's end");
    assert_eq!(storage.driver.violations(), Vec::<String>::new());
    agent.kill9();
}

#[test]
fn teardown_killed_at_each_step_leaves_nothing_of_its_own_and_all_of_users() {
    let cluster = Cluster::new();
    let mut planted = Planted::new(&cluster.dir().join("users"));
    let users = planted.tree("host").parent().unwrap().to_owned();
    let storage = storage(&cluster, &mut planted);
    planted.tmpfs(&users.join("host/mounted"));
    let mut killed = BTreeSet::new();
    let mut agent = cluster.join();
    // Each pod is ended by agents that die at the first, second, … time they come to the step.
    for (step, _) in STEPS {
        let uid = rich(&cluster, &users);
        cluster.wait_running(POD);
        cluster.wait_told(&[POD]);
        let disk = volume(&cluster, &uid, "empty-dir", "disk");
        let link = format!("linked-{}", step.replace(':', "-"));
        planted.link(&link, &disk.join("link"));
        std::fs::create_dir_all(disk.join("of/the/pod")).unwrap();
        agent.kill9();
        cluster.delete_pod(POD, 1);
        for nth in 1.. {
            let point = format!("{step}:{nth}");
            let gone = |_: &Agent| left(&cluster).is_ok();
            let died = live(&cluster, &point, gone);
            planted.assert_untouched(&point);
            if !died {
                break;
            }
            killed.insert(*step);
            assert!(nth < 40, "{step} is no end");
        }
        agent = cluster.start();
        eventually("nothing of the agent's is left", || left(&cluster));
        for kind in ["configmap/settings", "secret/keys"] {
            cluster.kubectl(&["delete", kind]);
        }
    }
    assert_eq!(
        killed.len(),
        STEPS.len(),
        "steps that were come to: {killed:?}"
    );
    planted.assert_untouched("at the end");
    assert_eq!(storage.driver.violations(), Vec::<String>::new());
    assert!(storage.driver.truth().unwrap().is_clean());
    let pods = mounts_below(&cluster.root_dir());
    assert_eq!(pods, Vec::<String>::new());
    agent.kill9();
}
