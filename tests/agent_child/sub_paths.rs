//! Parts of volumes, and an agent that is killed while it makes them ready or takes them away.

use std::path::PathBuf;

use super::*;

/// Where something is mounted below the agent's root directory.
fn mounted(node: &Node) -> Vec<PathBuf> {
    let root = fs::canonicalize(node.site.root_dir()).unwrap_or_else(|_| node.site.root_dir());
    let table = String::from_utf8_lossy(&fs::read("/proc/self/mountinfo").unwrap()).into_owned();
    let points = table.lines().filter_map(|line| line.split(' ').nth(4));
    let points = points.map(PathBuf::from);
    points.filter(|point| point.starts_with(&root)).collect()
}

/// A pod that mounts two parts of a directory of the node.
fn add(node: &Node) -> PathBuf {
    let data = node.site.dir().join("data");
    fs::create_dir_all(data.join("there")).unwrap();
    fs::write(data.join("there/user"), "keep").unwrap();
    let manifest = serde_json::json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "parts"},
        "spec": {
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "main", "image": IMAGE, "volumeMounts": [
                {"name": "data", "mountPath": "/whole"},
                {"name": "data", "mountPath": "/there", "subPath": "there"},
                {"name": "data", "mountPath": "/user", "subPath": "there/user"},
                {"name": "scratch", "mountPath": "/made", "subPathExpr": "$(A)/made"},
            ], "env": [{"name": "A", "value": "a"}]}],
            "volumes": [
                {"name": "data", "hostPath": {"path": data}},
                {"name": "scratch", "emptyDir": {}},
            ],
        },
    });
    node.site
        .write_manifest("parts.json", &manifest.to_string());
    data
}

fn gone(node: &Node) {
    node.site.remove_manifest("parts.json");
    all_gone(node);
}

fn all_gone(node: &Node) {
    eventually("the pod is gone with its mounts and directories", || {
        let left = mounted(node);
        let pods = fs::read_dir(node.site.root_dir().join("pods"));
        let pods = pods.map_or(0, Iterator::count);
        (left.is_empty() && pods == 0)
            .then_some(())
            .ok_or_else(|| format!("{pods} pods, {left:?}"))
    });
}

fn left_records(node: &Node) -> Vec<String> {
    let dump = node.site.dump(&["objects"]);
    let rows = dump["tables"]["objects"].as_array().unwrap();
    let keys = rows.iter().filter_map(|row| row["key"].as_str());
    let keys = keys.filter(|key| key.starts_with("subpaths/"));
    keys.map(str::to_owned).collect()
}

#[test]
fn restart_keeps_parts_of_volumes_and_leaves_none_behind_wherever_the_agent_is_killed() {
    for point in [
        "volumemanager::subpath::after_record",
        "volumemanager::subpath::after_record:3",
        "volumemanager::subpath::after_mount",
        "volumemanager::subpath::after_mount:3",
        "pod_workers::start::after_create",
    ] {
        let node = Node::new(|_| Behaviour::RunForever);
        let data = add(&node);
        node.die_at(point);
        let _agent = node.site.start();
        let id = node.wait_running(1).remove(0);
        let mounts = node.fake.config(&id).unwrap().mounts;
        let parts: Vec<_> = mounts
            .iter()
            .filter(|m| m.host_path.contains("/volume-subpaths/"))
            .map(|m| PathBuf::from(&m.host_path))
            .collect();
        assert_eq!(parts.len(), 3, "{point}: {mounts:?}");
        let seen = mounted(&node);
        assert_eq!(seen.len(), 3, "{point}: each is mounted once: {seen:?}");
        assert_eq!(fs::read_to_string(parts[0].join("user")).unwrap(), "keep");
        assert_eq!(fs::read_to_string(&parts[1]).unwrap(), "keep");
        assert!(parts[2].is_dir());
        gone(&node);
        assert_eq!(left_records(&node), Vec::<String>::new(), "{point}");
        assert_eq!(fs::read_to_string(data.join("there/user")).unwrap(), "keep");
    }
}

#[test]
fn restart_keeps_what_users_have_when_killed_while_parts_of_volumes_are_taken_away() {
    for point in [
        "pod_workers::terminated::before_cleanup",
        "volumemanager::subpath::after_clean",
    ] {
        let node = Node::new(|_| Behaviour::RunForever);
        let data = add(&node);
        let agent = node.site.start();
        node.wait_running(1);
        node.site.wait_phase("parts", "Running");
        assert_eq!(mounted(&node).len(), 3);
        agent.kill9();
        fs::rename(
            node.site.manifests().join("parts.json"),
            node.site.dir().join("parts.json"),
        )
        .unwrap();
        node.die_at(point);
        assert_eq!(fs::read_to_string(data.join("there/user")).unwrap(), "keep");
        let _agent = node.site.start();
        all_gone(&node);
        assert_eq!(left_records(&node), Vec::<String>::new(), "{point}");
        assert_eq!(fs::read_to_string(data.join("there/user")).unwrap(), "keep");
    }
}
