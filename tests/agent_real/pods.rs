//! Manifests become containers, as users know them.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use holdfast_testkit::containerd::{BUSYBOX, Version};
use serde_json::{Value, json};

use crate::agent_process::{NODE, cgroup_dirs, eventually};
use crate::world::{FOREVER, World, ids};

#[test]
fn pods_run_and_are_shown_as_users_know_them() {
    let world = World::new(Version::Installed);
    world.add(&everything(&world));
    let mut failing = world.pod(
        "failing",
        "Never",
        &[("only", "echo 'out of order' > /dev/termination-log; exit 7")],
    );
    failing["metadata"]["namespace"] = json!("tools");
    world.add(&failing);
    let mut agent = world.start();

    let main = world.wait_running("everything", "main");
    let other = world.wait_running("everything", "other");
    assert_eq!(
        main.sandbox, other.sandbox,
        "containers of a pod share its sandbox"
    );
    world.wait_phase("everything", "Running");
    environment_and_volumes(&world, &main.id, &other.id);
    shown_by_the_runtime(&world, &main.id);
    logs_are_found(&world, &main.id);
    resources_are_in_force(&world);
    status_tells(&world);
    crictl_shows(&world);

    let failed = world.wait_phase("failing", "Failed");
    let ended = &failed["containerStatuses"][0]["state"]["terminated"];
    assert_eq!(ended["exitCode"], 7, "{failed}");
    assert_eq!(
        ended["message"].as_str().map(str::trim),
        Some("out of order"),
        "{failed}"
    );
    assert_eq!(world.lines("failing.only"), ["0"]);

    // The same is told by the live agent and by the store it leaves.
    eventually("the failed pod is done with", || {
        match world.row("workers", "failing")?["phase"].as_str() {
            Some("Finished" | "Terminated") => Ok(()),
            phase => Err(format!("{phase:?}")),
        }
    });
    let live = world.dump(&[]);
    let (status, _) = agent.terminate();
    assert!(status.success(), "{status}");
    let dead = world.dump(&[]);
    assert_eq!(live["node"], NODE);
    for (table, rows) in live["tables"].as_object().expect("tables") {
        let (mut live, mut dead) = (rows.clone(), dead["tables"][table].clone());
        match table.as_str() {
            "meta" => {
                for row in [&mut live, &mut dead] {
                    let row = row[0].as_object_mut().expect("one row");
                    row.remove("cleanShutdown");
                    row.remove("heartbeat");
                }
            }
            // The end is told as well.
            "journal" => {
                let length = live.as_array().expect("rows").len();
                let dead = dead.as_array_mut().expect("rows");
                assert_eq!(dead.last().unwrap()["what"], "agent stopped");
                dead.truncate(length);
            }
            _ => {}
        }
        assert_eq!(
            live, dead,
            "table {table} of the live agent and of the store it left"
        );
    }
}

/// A pod that asks for about everything a manifest may ask for.
fn everything(world: &World) -> Value {
    let mut pod = world.pod(
        "everything",
        "Always",
        &[
            ("main", &format!("echo said-by-main; {FOREVER}")),
            ("other", FOREVER),
        ],
    );
    let spec = &mut pod["spec"];
    spec["hostNetwork"] = json!(false);
    spec["volumes"].as_array_mut().unwrap().extend([
        json!({"name": "shared", "emptyDir": {}}),
        json!({"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}),
    ]);
    let main = &mut spec["containers"][0];
    main["env"] = json!([
        {"name": "WHO", "value": "holdfast"},
        {"name": "GREETING", "value": "hello $(WHO), $$(WHO), $(NOBODY)"},
    ]);
    main["args"] = json!(["unused", "$(WHO)"]);
    main["workingDir"] = json!("/tmp");
    main["ports"] = json!([{"name": "http", "containerPort": 8080}]);
    main["resources"] = json!({
        "requests": {"cpu": "100m", "memory": "16Mi"},
        "limits": {"cpu": "200m", "memory": "32Mi"},
    });
    for (container, path) in [(0, "/data"), (1, "/seen")] {
        spec["containers"][container]["volumeMounts"]
            .as_array_mut()
            .unwrap()
            .push(json!({"name": "shared", "mountPath": path, "readOnly": container == 1}));
    }
    spec["containers"][0]["volumeMounts"]
        .as_array_mut()
        .unwrap()
        .push(json!({"name": "memory", "mountPath": "/memory"}));
    pod["metadata"]["labels"] = json!({"app": "everything"});
    pod
}

fn environment_and_volumes(world: &World, main: &str, other: &str) {
    let said = |id: &str, script: &str| {
        let (code, text) = world.exec(id, &["sh", "-c", script]);
        assert_eq!(code, 0, "{script}: {text}");
        text.trim().to_owned()
    };
    assert_eq!(
        said(main, "echo \"$GREETING\""),
        "hello holdfast, $(WHO), $(NOBODY)"
    );
    assert_eq!(
        said(main, "tr '\\0' '\\n' < /proc/1/cmdline | tail -1"),
        "holdfast"
    );
    assert_eq!(said(main, "readlink /proc/1/cwd"), "/tmp");
    assert_eq!(said(main, "hostname"), format!("everything-{NODE}"));
    said(main, "echo shared > /data/file");
    assert_eq!(said(other, "cat /seen/file"), "shared");
    assert_ne!(
        world.exec(other, &["touch", "/seen/mine"]).0,
        0,
        "a read-only mount is read-only"
    );
    assert!(
        said(main, "mount").contains("tmpfs on /memory "),
        "emptyDir in memory"
    );
    assert!(said(main, "cat /etc/hosts").contains(&format!("everything-{NODE}")));
}

fn shown_by_the_runtime(world: &World, main: &str) {
    let container = world.inspect(main);
    let labels = &container.labels;
    let uid = world.row("pods", "everything").unwrap()["uid"]
        .as_str()
        .unwrap()
        .to_owned();
    assert_eq!(
        labels["io.kubernetes.pod.name"],
        format!("everything-{NODE}")
    );
    assert_eq!(labels["io.kubernetes.pod.namespace"], "default");
    assert_eq!(labels["io.kubernetes.pod.uid"], uid);
    assert_eq!(labels["io.kubernetes.container.name"], "main");
    let annotations = &container.annotations;
    assert_eq!(annotations["io.kubernetes.container.restartCount"], "0");
    assert_eq!(
        annotations["io.kubernetes.container.terminationMessagePath"],
        "/dev/termination-log"
    );
    for annotation in [
        "io.kubernetes.container.hash",
        "io.kubernetes.container.terminationMessagePolicy",
        "io.kubernetes.container.ports",
        "io.kubernetes.pod.terminationGracePeriod",
    ] {
        assert!(
            annotations.contains_key(annotation),
            "{annotation} in {annotations:?}"
        );
    }
    let (_, id, _) = world
        .sandboxes()
        .into_iter()
        .find(|(pod, _, _)| pod == "everything")
        .unwrap();
    let sandbox = world.sandbox(&id);
    let metadata = sandbox.metadata.unwrap();
    assert_eq!(metadata.name, format!("everything-{NODE}"));
    assert_eq!(
        (metadata.namespace.as_str(), metadata.uid.as_str()),
        ("default", uid.as_str())
    );
    assert_eq!(sandbox.labels["app"], "everything");
    assert_eq!(sandbox.annotations["kubernetes.io/config.source"], "file");
    let listed = world.runtime.ctr(&["containers", "ls"]).unwrap();
    assert!(listed.contains(main) && listed.contains(&id), "{listed}");
}

fn logs_are_found(world: &World, main: &str) {
    let row = world.row("pods", "everything").unwrap();
    let uid = row["uid"].as_str().unwrap();
    let log = world
        .pod_logs()
        .join(format!("default_everything-{NODE}_{uid}/main/0.log"));
    let text = eventually("the log has its line", || {
        let text = fs::read_to_string(&log).map_err(|e| format!("{}: {e}", log.display()))?;
        if text.contains("stdout F said-by-main") {
            Ok(text)
        } else {
            Err(text)
        }
    });
    let link = world
        .container_logs()
        .join(format!("everything-{NODE}_default_main-{main}.log"));
    let linked = fs::read_to_string(&link).unwrap_or_else(|e| panic!("{}: {e}", link.display()));
    assert_eq!(linked, text);
}

fn resources_are_in_force(world: &World) {
    let row = world.row("pods", "everything").unwrap();
    let pod = format!("kubepods/burstable/pod{}", row["uid"].as_str().unwrap());
    let dirs = cgroup_dirs(&format!("{}/{pod}", world.cgroup()));
    assert!(!dirs.is_empty(), "the pod has a cgroup");
    // The container's cgroup is below the pod's; the limit of the container is in one of them.
    let mut files: Vec<PathBuf> = Vec::new();
    for dir in &dirs {
        for entry in fs::read_dir(dir).unwrap().flatten() {
            if entry.file_type().unwrap().is_dir() {
                files.push(entry.path().join("memory.limit_in_bytes"));
                files.push(entry.path().join("memory.max"));
                files.push(entry.path().join("cpu.cfs_quota_us"));
                files.push(entry.path().join("cpu.max"));
            }
        }
    }
    let values: Vec<String> = files
        .iter()
        .filter_map(|file| fs::read_to_string(file).ok())
        .map(|text| text.trim().to_owned())
        .collect();
    assert!(
        values.iter().any(|v| v == "33554432"),
        "memory limit: {values:?}"
    );
    assert!(
        values.iter().any(|v| v == "20000" || v == "20000 100000"),
        "CPU limit: {values:?}"
    );
}

#[test]
fn pods_get_no_more_processes_than_the_limit_allows_also_when_it_changes() {
    let world = World::new(Version::Installed);
    let greedy = "( for i in $(seq 40); do sleep 1000 & done ) 2> /starts/refused; exec sleep 1000";
    world.add(&world.pod("greedy", "Always", &[("only", greedy)]));
    world.site.configure("podPidsLimit: 16\n");
    let mut agent = world.start();
    world.wait_running("greedy", "only");
    let uid = world.row("pods", "greedy").unwrap()["uid"].clone();
    let pod = format!("kubepods/besteffort/pod{}", uid.as_str().unwrap());
    let read = |file: &str| {
        let dirs = cgroup_dirs(&format!("{}/{pod}", world.cgroup()));
        let texts = dirs.iter().map(|dir| fs::read_to_string(dir.join(file)));
        let text = texts.flatten().next().unwrap_or_default();
        text.trim().to_owned()
    };
    eventually("a process is refused", || {
        let refused = world.lines("refused").concat();
        let found = refused.contains("fork");
        found.then_some(()).ok_or(refused)
    });
    assert_eq!(read("pids.max"), "16");
    let current: u32 = read("pids.current").parse().unwrap();
    assert!((10..=16).contains(&current), "{current} processes");
    let before = world.containers();

    // A pod that runs on is brought to another limit without touching its containers.
    for (config, max) in [("podPidsLimit: 20\n", "20"), ("", "max")] {
        assert!(agent.terminate().0.success());
        world.site.configure(config);
        agent = world.start();
        eventually("the new limit is in force", || {
            let seen = read("pids.max");
            (seen == max).then_some(()).ok_or(seen)
        });
    }
    assert_eq!(world.containers(), before);
}

fn status_tells(world: &World) {
    let status = world.status("everything").unwrap();
    let ip = status["podIP"]
        .as_str()
        .unwrap_or_else(|| panic!("no IP in {status}"));
    assert!(ip.starts_with("10."), "{ip}");
    assert_eq!(status["qosClass"], "Burstable");
    for container in status["containerStatuses"].as_array().unwrap() {
        assert_eq!(container["ready"], true, "{container}");
        assert_eq!(container["restartCount"], 0, "{container}");
        assert_eq!(container["image"], BUSYBOX, "{container}");
        assert!(
            container["containerID"]
                .as_str()
                .unwrap()
                .starts_with("containerd://")
        );
    }
    let ready = status["conditions"]
        .as_array()
        .unwrap()
        .iter()
        .any(|c| c["type"] == "Ready" && c["status"] == "True");
    assert!(ready, "{status}");
}

fn crictl_shows(world: &World) {
    let crictl = |arguments: &[&str]| {
        Command::new("crictl")
            .args(["--runtime-endpoint", &world.runtime.endpoint()])
            .args(arguments)
            .output()
    };
    match crictl(&["pods"]) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("SKIPPED: crictl is not installed; what it shows was not looked at");
        }
        Err(error) => panic!("run crictl: {error}"),
        Ok(output) => {
            let pods = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(pods.contains(&format!("everything-{NODE}")), "{pods}");
            assert!(pods.contains("default"), "{pods}");
            let output = crictl(&["ps"]).expect("run crictl");
            let ps = String::from_utf8_lossy(&output.stdout).into_owned();
            for word in ["main", "other", "Running"] {
                assert!(ps.contains(word), "{ps}");
            }
        }
    }
}

#[test]
fn what_cannot_run_says_why() {
    let world = World::new(Version::Installed);
    let with = |name: &str, change: &dyn Fn(&mut Value)| {
        let mut pod = world.pod(name, "Always", &[("only", FOREVER)]);
        change(&mut pod["spec"]);
        world.add(&pod);
    };
    with("never-pulled", &|spec| {
        spec["containers"][0]["image"] = json!("holdfast.invalid/absent:1");
        spec["containers"][0]["imagePullPolicy"] = json!("Never");
    });
    with("unknown-image", &|spec| {
        spec["containers"][0]["image"] = json!("holdfast.invalid/absent:1");
    });
    with("no-command", &|spec| {
        spec["containers"][0]["command"] = json!(["/no/such/program"]);
    });
    with("unsupported", &|spec| {
        let volumes = spec["volumes"].as_array_mut().unwrap();
        volumes.insert(0, json!({"name": "v", "flexVolume": {"driver": "d"}}));
    });
    // A pod that is well among those that are not.
    with("well", &|_| {});
    world.write_manifest(
        "broken.yaml",
        "apiVersion: v1\nkind: Pod\nspec: {containers: [\n",
    );
    world.write_manifest(
        "deployment.yaml",
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: d}\n",
    );
    world.write_manifest("empty.yaml", "");
    let agent = world.start();

    let waits = |pod: &str, reasons: &[&str], word: &str| {
        eventually(&format!("{pod} waits with {reasons:?}"), || {
            let status = world.container_status(pod, "only")?;
            let waiting = &status["state"]["waiting"];
            let reason = waiting["reason"].as_str().unwrap_or_default();
            let message = waiting["message"].as_str().unwrap_or_default();
            if reasons.contains(&reason) && message.contains(word) {
                Ok(())
            } else {
                Err(status.to_string())
            }
        });
    };
    waits(
        "never-pulled",
        &["ErrImageNeverPull"],
        "holdfast.invalid/absent:1",
    );
    waits("unknown-image", &["ErrImagePull"], "holdfast.invalid");
    waits(
        "unknown-image",
        &["ImagePullBackOff"],
        "holdfast.invalid/absent:1",
    );
    let backoffs = eventually("the pull's back-off is recorded", || {
        let dump = world.dump(&["images"]);
        let rows = dump["tables"]["images"].as_array().unwrap().clone();
        rows.into_iter()
            .flat_map(|row| row["backoffs"].as_array().cloned().unwrap_or_default())
            .find(|b| b["name"] == format!("unknown-image-{NODE}"))
            .ok_or_else(|| dump.to_string())
    });
    assert!(
        backoffs["backoff"]["durationMs"].as_i64() >= Some(10_000),
        "{backoffs}"
    );

    eventually("the missing program is named", || {
        let status = world.container_status("no-command", "only")?;
        let text = status.to_string();
        let known = ["RunContainerError", "StartError", "CrashLoopBackOff"];
        if known.iter().any(|r| text.contains(r)) && text.contains("/no/such/program") {
            Ok(())
        } else {
            Err(text)
        }
    });

    let failed = world.wait_phase("unsupported", "Failed");
    assert_eq!(failed["reason"], "UnsupportedField", "{failed}");
    let field = "spec.volumes[0].flexVolume";
    assert!(
        failed["message"].as_str().unwrap().contains(field),
        "{failed}"
    );
    let journal = world.journal("unsupported");
    assert!(
        journal
            .iter()
            .any(|(what, why)| what == "event UnsupportedField" && why.contains(field)),
        "{journal:?}"
    );

    let dump = world.dump(&["sources"]);
    let broken = &dump["tables"]["sources"][0]["broken"];
    for file in ["broken.yaml", "deployment.yaml", "empty.yaml"] {
        assert!(broken.to_string().contains(file), "{file} in {broken}");
    }
    world.wait_running("well", "only");
    world.wait_phase("well", "Running");
    assert_eq!(agent.get("/healthz").unwrap().0, 200);
    assert_eq!(
        world
            .running()
            .iter()
            .map(|c| c.pod.as_str())
            .collect::<Vec<_>>(),
        ["well"],
        "nothing else runs"
    );
}

#[test]
fn what_dies_is_started_again_as_its_policy_says() {
    let world = World::new(Version::Installed);
    let two = [("a", FOREVER), ("b", FOREVER)];
    world.add(&world.pod("sandbox", "Always", &two));
    world.add(&world.pod("container", "Always", &two));
    world.add(&world.pod("never", "Never", &two));
    let _agent = world.start();
    for pod in ["sandbox", "container", "never"] {
        for (container, _) in two {
            world.wait_running(pod, container);
        }
    }
    let before = ids(&world.running());
    let id = |pod: &str, container: &str| before[&(pod.to_owned(), container.to_owned())].clone();
    let (_, sandbox, _) = world
        .sandboxes()
        .into_iter()
        .find(|(pod, _, _)| pod == "sandbox")
        .unwrap();
    world.kill(&sandbox);
    world.kill(&id("container", "a"));
    world.kill(&id("never", "a"));

    let restarted = |pod: &str, container: &str| {
        eventually(&format!("{container} of {pod} is started again"), || {
            let seen = world.try_one(pod, container)?;
            match seen.attempt {
                1 => Ok(seen),
                _ => Err(format!("{seen:?}")),
            }
        })
    };
    // Without its sandbox a pod is started anew as a whole.
    let (a, b) = (restarted("sandbox", "a"), restarted("sandbox", "b"));
    assert_eq!(a.sandbox, b.sandbox);
    assert_ne!(a.sandbox, sandbox);
    assert_eq!(world.sandbox(&a.sandbox).metadata.unwrap().attempt, 1);
    restarted("container", "a");
    assert_eq!(
        world.try_one("container", "b").unwrap().id,
        id("container", "b")
    );
    eventually("the dead one is told", || {
        let status = world.container_status("never", "a")?;
        if status["state"]["terminated"]["exitCode"] == 137 {
            Ok(())
        } else {
            Err(status.to_string())
        }
    });
    assert_eq!(world.try_one("never", "b").unwrap().id, id("never", "b"));
    assert_eq!(world.lines("never.a"), ["0"]);
    for (pod, container, count) in [
        ("sandbox", "a", 1),
        ("sandbox", "b", 1),
        ("container", "a", 1),
        ("container", "b", 0),
    ] {
        eventually(&format!("{pod}.{container} counts {count}"), || {
            let status = world.container_status(pod, container)?;
            if status["restartCount"] == count && status["state"]["running"].is_object() {
                Ok(())
            } else {
                Err(status.to_string())
            }
        });
    }
    // Of the dead, the newest of each name is kept, with its sandbox.
    let mut dead = BTreeMap::new();
    for c in world.containers().into_iter().filter(|c| !c.running) {
        *dead.entry((c.pod, c.container)).or_insert(0) += 1;
    }
    assert!(dead.values().all(|&n| n == 1), "{dead:?}");
}
