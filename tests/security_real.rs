//! Security contexts on real containerd: what a container is and may do, as it sees it itself.
//!
//! Needs root and containerd (`hack/deps.sh runtime`).
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    missing_docs,
    unreachable_pub,
    dead_code,
    reason = "a test fails by panicking; the world is shared with other tests"
)]

#[path = "support/agent_process.rs"]
mod agent_process;
#[path = "agent_real/world.rs"]
mod world;

use std::fs;

use agent_process::{NODE, eventually};
use holdfast_testkit::containerd::{BUSYBOX, Version};
use serde_json::{Value, json};
use world::World;

const REPORT: &str = "echo user $(id -u) $(id -g) groups $(id -G)
grep -E '^(Seccomp|NoNewPrivs|CapEff|CapBnd):' /proc/self/status
touch /written 2>/dev/null && echo root writable || echo root read-only
";

/// A pod whose containers run a script once.
fn pod(name: &str, containers: Value, more: Value) -> Value {
    let mut spec = json!({
        "restartPolicy": "Never", "hostNetwork": true, "terminationGracePeriodSeconds": 1,
        "containers": containers,
    });
    for (key, value) in more.as_object().unwrap() {
        spec[key] = value.clone();
    }
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
}

fn container(name: &str, script: &str, context: Value) -> Value {
    json!({
        "name": name, "image": BUSYBOX, "command": ["sh", "-c", script], "securityContext": context,
    })
}

/// What a container wrote, without the log's own fields.
fn output(world: &World, pod: &str, container: &str) -> String {
    let begin = format!("default_{pod}-{NODE}_");
    let dirs = fs::read_dir(world.pod_logs()).expect("list the logs");
    let dir = dirs
        .map(|e| e.unwrap().path())
        .find(|p| p.file_name().unwrap().to_string_lossy().starts_with(&begin))
        .unwrap_or_else(|| panic!("{pod} has no logs"));
    let text = fs::read_to_string(dir.join(container).join("0.log")).unwrap_or_default();
    let line = |line: &str| line.splitn(4, ' ').nth(3).unwrap_or_default().to_owned();
    text.lines().map(|l| line(l) + "\n").collect()
}

#[track_caller]
fn says(output: &str, wanted: &[&str]) {
    let lines: Vec<String> = output
        .lines()
        .map(|l| l.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    for line in wanted {
        assert!(
            lines.iter().any(|l| l == line),
            "no line {line:?} in\n{output}"
        );
    }
}

#[test]
fn containers_are_isolated_as_their_pods_say() {
    let world = World::new(Version::Installed);
    world.add(&pod(
        "plain",
        json!([container("c", REPORT, json!({}))]),
        json!({}),
    ));
    let volume = "echo x > /v/f; stat -c 'dir %g %a' /v; stat -c 'file %u %g' /v/f";
    let mut confined = container(
        "c",
        &format!("{REPORT}\n{volume}\ncat /proc/sys/kernel/shm_rmid_forced"),
        json!({
            "runAsUser": 1000, "runAsGroup": 1001, "readOnlyRootFilesystem": true,
            "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }),
    );
    confined["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    world.add(&pod(
        "confined",
        json!([confined]),
        json!({
            "volumes": [{"name": "v", "emptyDir": {}}],
            "securityContext": {"fsGroup": 2000, "supplementalGroups": [3000],
                "sysctls": [{"name": "kernel.shm_rmid_forced", "value": "1"}]},
        }),
    ));
    world.add(&pod(
        "shared",
        json!([
            container("c", "exec sleep 4321", json!({})),
            container("d", "seen=no; for i in $(seq 600); do grep -qs '43[2]1' /proc/[0-9]*/cmdline && seen=yes && break; sleep 0.1; done; echo seen $seen; echo first $(tr '\\0' ' ' < /proc/1/cmdline)", json!({"capabilities": {"add": ["CAP_NET_ADMIN"]}})),
        ]),
        json!({"shareProcessNamespace": true}),
    ));
    world.add(&pod(
        "root",
        json!([container("c", REPORT, json!({"runAsNonRoot": true}))]),
        json!({}),
    ));
    world.add(&pod(
        "users",
        json!([container("c", REPORT, json!({}))]),
        json!({"hostUsers": false, "hostNetwork": false}),
    ));
    let _agent = world.start();

    world.wait_phase("plain", "Succeeded");
    let plain = output(&world, "plain", "c");
    says(
        &plain,
        &[
            "user 0 0 groups 0",
            "Seccomp: 0",
            "NoNewPrivs: 0",
            "root writable",
        ],
    );

    world.wait_phase("confined", "Succeeded");
    let confined = output(&world, "confined", "c");
    says(
        &confined,
        &[
            "user 1000 1001 groups 1001 2000 3000",
            "Seccomp: 2",
            "NoNewPrivs: 1",
            "CapEff: 0000000000000000",
            "CapBnd: 0000000000000000",
            "root read-only",
            "dir 2000 2777",
            "file 1000 2000",
            "1",
        ],
    );

    let other = eventually("the other container has looked", || {
        let text = output(&world, "shared", "d");
        if text.contains("first") {
            Ok(text)
        } else {
            Err(text)
        }
    });
    assert!(
        other.contains("seen yes"),
        "the processes of the other: {other}"
    );
    // The sandbox's program in these tests, see hack/pack-image.sh.
    assert!(
        other.contains("first sh -c trap"),
        "the sandbox's process is the first: {other}"
    );

    eventually(
        "the pod that must not run as root waits and says why",
        || {
            let status = world.container_status("root", "c")?;
            let waiting = &status["state"]["waiting"];
            let text = waiting["message"].as_str().unwrap_or_default();
            let wanted = "container has runAsNonRoot and image will run as root";
            if waiting["reason"] == "CreateContainerConfigError" && text.contains(wanted) {
                Ok(())
            } else {
                Err(status.to_string())
            }
        },
    );
    eventually(
        "the pod with users of its own is told that it cannot have them",
        || {
            let log = world.journal("users");
            let told = log
                .iter()
                .any(|(_, why)| why.contains("does not support user namespaces"));
            if told {
                Ok(())
            } else {
                Err(format!("{log:?}"))
            }
        },
    );
}
