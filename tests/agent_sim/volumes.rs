//! Volumes over restarts: what is mounted is not mounted again, what is written is not written again.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast::core::state::{VolumePhase, VolumeRecord};
use holdfast_testkit::fake_cri::Behaviour;
use serde_json::{Value, json};

use crate::api_restart::cluster;
use crate::restart::{assert_nothing_wrong, exits, node};
use crate::world::{IMAGE, World};

const PODS: usize = 50;
const VOLUMES: usize = 4;

fn spec(host: &Path) -> String {
    let mounts: Vec<String> = ["disk", "memory", "labels", "host"]
        .iter()
        .map(|name| format!(r#"{{"name":"{name}","mountPath":"/{name}"}}"#))
        .collect();
    format!(
        r#"{{"restartPolicy":"Always","volumes":[
            {{"name":"disk","emptyDir":{{}}}},
            {{"name":"memory","emptyDir":{{"medium":"Memory","sizeLimit":"1Mi"}}}},
            {{"name":"labels","downwardAPI":{{"items":[{{"path":"name","fieldRef":{{"fieldPath":"metadata.name"}}}}]}}}},
            {{"name":"host","hostPath":{{"path":"{}","type":"Directory"}}}}
        ],"containers":[{{"name":"main","image":"{IMAGE}","command":["sh"],"volumeMounts":[{}]}}]}}"#,
        host.display(),
        mounts.join(",")
    )
}

/// Mount IDs by mount point, of what is mounted in the world's directory.
fn mounts(world: &World) -> BTreeMap<PathBuf, u64> {
    let dir = world.dir.path().canonicalize().unwrap();
    let table =
        String::from_utf8_lossy(&std::fs::read("/proc/self/mountinfo").unwrap()).into_owned();
    let of_line = |line: &str| {
        let fields: Vec<&str> = line.split(' ').collect();
        (PathBuf::from(fields[4]), fields[0].parse().unwrap())
    };
    let all = table.lines().map(of_line);
    all.filter(|(point, _)| point.starts_with(&dir)).collect()
}

/// Inode, size and times of everything in the pods' volumes.
fn files(world: &World) -> BTreeMap<PathBuf, (u64, u64, i64, i64)> {
    fn walk(dir: &Path, found: &mut BTreeMap<PathBuf, (u64, u64, i64, i64)>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let seen = std::fs::symlink_metadata(&path).unwrap();
            let about = (
                seen.ino(),
                seen.size(),
                seen.mtime_nsec(),
                seen.ctime_nsec(),
            );
            found.insert(path.clone(), about);
            if seen.is_dir() {
                walk(&path, found);
            }
        }
    }
    let mut found = BTreeMap::new();
    walk(&world.dir.path().join("root/pods"), &mut found);
    found
}

/// A record that was written again tells another time.
fn records(world: &World) -> BTreeMap<String, VolumeRecord> {
    let state = world.state();
    let all = state.with_prefix::<VolumeRecord>("");
    all.map(|(key, record)| (key.to_string(), record.clone()))
        .collect()
}

fn count(world: &World, phase: VolumePhase) -> usize {
    let state = world.state();
    let all = state.with_prefix::<VolumeRecord>("");
    all.filter(|(_, r)| r.phase == phase).count()
}

async fn running() -> Option<World> {
    if !nix::unistd::geteuid().is_root() {
        return None;
    }
    let mut w = node(|_, _| Behaviour::RunForever).await;
    let host = w.dir.path().join("host");
    std::fs::create_dir(&host).unwrap();
    std::fs::write(host.join("precious"), "x").unwrap();
    for n in 0..PODS {
        w.manifest(&format!("v{n:02}"), &spec(&host));
    }
    w.start().await;
    w.until("all pods run", 120, |w| w.running("v").len() == PODS)
        .await;
    w.pass(100).await;
    assert_eq!(count(&w, VolumePhase::Mounted), PODS * VOLUMES);
    for n in 0..PODS {
        let uid = w.uid(&format!("v{n:02}"));
        let volumes = w.dir.path().join(format!("root/pods/{uid}/volumes"));
        for volume in ["disk", "memory"] {
            let dir = volumes.join("kubernetes.io~empty-dir").join(volume);
            std::fs::write(dir.join("data"), volume).unwrap();
        }
    }
    Some(w)
}

#[tokio::test(start_paused = true)]
async fn a_restart_mounts_nothing_and_writes_nothing() {
    let Some(mut w) = running().await else { return };
    let (mounts_before, files_before) = (mounts(&w), files(&w));
    let records_before = records(&w);
    assert_eq!(
        mounts_before.len(),
        PODS * 2,
        "a tmpfs for memory and labels"
    );
    for orderly in [false, true] {
        w.fake.clear_calls();
        if orderly {
            w.stop().await;
            w.start().await;
        } else {
            w.restart().await;
        }
        w.pass(200).await;
        assert_eq!(w.effects(), Vec::<String>::new(), "orderly: {orderly}");
        assert_eq!(mounts(&w), mounts_before, "orderly: {orderly}");
        assert_eq!(files(&w), files_before, "orderly: {orderly}");
        assert_eq!(records(&w), records_before, "orderly: {orderly}");
    }
    // The end of the pods is the end of their volumes, and of nothing else.
    for n in 0..PODS {
        w.remove_manifest(&format!("v{n:02}"));
    }
    w.until("no volume is on record", 300, |w| {
        w.state().volumes.is_empty()
    })
    .await;
    w.until("no directory of a pod is left", 300, |w| {
        std::fs::read_dir(w.dir.path().join("root/pods"))
            .unwrap()
            .next()
            .is_none()
    })
    .await;
    assert_eq!(mounts(&w), BTreeMap::new());
    assert!(w.dir.path().join("host/precious").exists());
    assert_nothing_wrong(&w);
}

/// How often a container restarts: `HOLDFAST_TEST_RESTARTS`, or so often that it takes seconds.
fn restarts() -> u32 {
    let given = std::env::var("HOLDFAST_TEST_RESTARTS").ok();
    given.map_or(30, |n| n.parse().expect("a number of restarts"))
}

/// A pod that mounts every kind of volume that needs no driver with every propagation, and parts of two.
fn every_volume(host: &Path) -> String {
    let name = json!([{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]);
    let volumes = json!([
        {"name": "disk", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {"name": "labels", "downwardAPI": {"items": name}},
        {"name": "all", "projected": {"sources": [
            {"downwardAPI": {"items": name}}, {"configMap": {"name": "c"}}, {"secret": {"name": "s"}},
            {"serviceAccountToken": {"path": "token"}},
        ]}},
        {"name": "config", "configMap": {"name": "c"}},
        {"name": "secret", "secret": {"secretName": "s"}},
        {"name": "host", "hostPath": {"path": host, "type": "Directory"}},
    ]);
    let mut mounts: Vec<Value> = Vec::new();
    for volume in [
        "disk", "memory", "labels", "all", "config", "secret", "host",
    ] {
        for propagation in ["None", "HostToContainer", "Bidirectional"] {
            mounts.push(json!({
                "name": volume, "mountPath": format!("/{volume}/{propagation}"),
                "mountPropagation": propagation,
            }));
        }
    }
    mounts.push(json!({"name": "disk", "mountPath": "/part", "subPath": "part"}));
    mounts.push(json!({"name": "config", "mountPath": "/key", "subPath": "key"}));
    json!({
        "restartPolicy": "Always",
        "volumes": volumes,
        "containers": [{
            "name": "main", "image": IMAGE, "command": ["sh"],
            "securityContext": {"privileged": true}, "volumeMounts": mounts,
        }],
    })
    .to_string()
}

/// How much there is of everything that a restart could leave behind.
fn left(w: &World) -> BTreeMap<String, usize> {
    fn entries(dir: &Path) -> usize {
        let Ok(read) = std::fs::read_dir(dir) else {
            return 0;
        };
        let count = |path: PathBuf| 1 + if path.is_symlink() { 0 } else { entries(&path) };
        read.map(|entry| count(entry.unwrap().path())).sum()
    }
    let mut left = BTreeMap::new();
    for dir in ["root", "logs", "links"] {
        left.insert(
            format!("entries of {dir}"),
            entries(&w.dir.path().join(dir)),
        );
    }
    left.insert("mounts".to_owned(), mounts(w).len());
    left.insert("containers".to_owned(), w.fake.containers().len());
    left.insert("sandboxes".to_owned(), w.fake.sandboxes().len());
    let state = w.state();
    // Events are kept for a while, whoever they are about.
    let facts = state.facts.keys().filter(|key| !key.starts_with("event"));
    left.insert("facts".to_owned(), facts.count());
    let records = state.counts();
    let records = records.into_iter();
    let records = records.filter(|(table, _)| !["journal", "facts"].contains(table));
    left.extend(records.map(|(table, count)| (format!("records of {table}"), count)));
    left
}

#[tokio::test(start_paused = true)]
async fn restarts_of_a_container_leave_nothing_behind() {
    const FEW: u32 = 3;
    let many = restarts().max(FEW + 1);
    let mut w = cluster(move |_, attempt| match attempt {
        FEW => exits(1, 400),
        _ if attempt < many => exits(1, 1),
        _ => Behaviour::RunForever,
    })
    .await;
    w.config.kubelet.max_container_restart_period = Duration::from_secs(1);
    let host = w.dir.path().join("host");
    std::fs::create_dir_all(&host).unwrap();
    w.start().await;
    w.joined().await;
    for (kind, name, data) in [("ConfigMap", "c", "one"), ("Secret", "s", "b25l")] {
        w.api().create_json(json!({
            "apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": "default"},
            "data": {"key": data},
        }));
    }
    w.create("again", &every_volume(&host));
    let mut found = Vec::new();
    for attempt in [FEW, many] {
        let starts = usize::try_from(attempt).unwrap() + 1;
        w.until("it has restarted", 600 + 20 * u64::from(many), |w| {
            w.starts("again").len() == starts && w.running("again").len() == 1
        })
        .await;
        // What belongs to older attempts is removed each minute.
        w.pass(150).await;
        found.push(left(&w));
    }
    println!("after {many} restarts: {:?}", found[1]);
    assert_eq!(found[0], found[1], "after {FEW} and after {many} restarts");
    let uid = w.uid("again").to_string();
    w.delete("again", Some(1));
    w.until("nothing is left of it", 200, |w| {
        w.left_of("again", &uid).is_empty()
    })
    .await;
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_container_waits_for_a_file_of_the_node_that_is_gone() {
    let mut w = node(|_, attempt| match attempt {
        0 => exits(1, 60),
        _ => Behaviour::RunForever,
    })
    .await;
    let file = w.dir.path().join("token");
    std::fs::write(&file, "x").unwrap();
    let spec = json!({
        "restartPolicy": "Always",
        "volumes": [{"name": "token", "hostPath": {"path": file, "type": "File"}}],
        "containers": [{
            "name": "main", "image": IMAGE, "command": ["sh"],
            "volumeMounts": [{"name": "token", "mountPath": "/token"}],
        }],
    });
    w.manifest("token", &spec.to_string());
    w.start().await;
    w.until("it runs", 60, |w| w.running("token").len() == 1)
        .await;
    std::fs::remove_file(&file).unwrap();
    w.until("it has ended", 120, |w| w.running("token").is_empty())
        .await;
    w.pass(150).await;
    assert_eq!(
        w.starts("token").len(),
        1,
        "a runtime would make a directory"
    );
    std::fs::write(&file, "x").unwrap();
    w.until("it runs again", 400, |w| w.running("token").len() == 1)
        .await;
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_is_back_ends_the_back_off_of_a_mount() {
    let mut w = cluster(|_, _| Behaviour::RunForever).await;
    w.start().await;
    w.joined().await;
    // Its driver never registers, so that each attempt fails.
    w.api().create_json(json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": {"name": "d.example"},
        "spec": {"attachRequired": false},
    }));
    let claim = w.api().create_json(json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": "claim", "namespace": "default"},
        "spec": {"accessModes": ["ReadWriteOnce"], "volumeName": "pv-1",
            "resources": {"requests": {"storage": "1Gi"}}},
    }));
    w.api().create_json(json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "pv-1"},
        "spec": {"accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"},
            "claimRef": {"namespace": "default", "name": "claim", "uid": claim["metadata"]["uid"]},
            "csi": {"driver": "d.example", "volumeHandle": "h1"}},
    }));
    let mut bound = claim;
    bound["status"] = json!({"phase": "Bound", "capacity": {"storage": "1Gi"}});
    w.api().update_json(bound);
    let spec = format!(
        r#"{{"restartPolicy":"Always",
            "volumes":[{{"name":"data","persistentVolumeClaim":{{"claimName":"claim"}}}}],
            "containers":[{{"name":"main","image":"{IMAGE}","command":["sh"],
                "volumeMounts":[{{"name":"data","mountPath":"/data"}}]}}]}}"#
    );
    w.create("web", &spec);
    let lines = |w: &World, what: &str, why: &str| {
        let state = w.state();
        let lines = state.journal.values().map(|line| &line.record);
        lines
            .filter(|line| line.what == what && line.why.contains(why))
            .count()
    };
    w.until("the mount fails", 60, |w| {
        lines(w, "event FailedMount", "d.example") > 0
    })
    .await;
    // Long enough for a back-off of two minutes.
    w.pass(300).await;
    w.set_api(false);
    w.pass(30).await;
    assert_eq!(lines(&w, "back-off ended", ""), 0);
    w.set_api(true);
    w.until("the back-off ends", 40, |w| {
        lines(
            w,
            "back-off ended",
            "volume/data: the API server answers again",
        ) == 1
    })
    .await;
    assert_eq!(lines(&w, "event BackOffEnded", "mounting volume"), 1);
    // The same cause ends no second one.
    w.pass(120).await;
    assert_eq!(lines(&w, "back-off ended", "API server"), 1);
}
