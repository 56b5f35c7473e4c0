//! A registry that never answers, and pods that lie about their image: neither costs the others their images.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::node::{IMAGE, Node, PATIENCE, PRELOAD, SLEEP, noting, pod, rows};

/// Takes every connection, and never answers. What it took is counted in `/run/taken`.
const HANGS: &str = "use IO::Socket::INET;
my $listener = IO::Socket::INET->new(LocalAddr => '127.0.0.1', LocalPort => 5000, Listen => 128, ReuseAddr => 1) or die;
my @taken;
while (my $connection = $listener->accept) {
    push @taken, $connection;
    open(my $count, '>', '/run/taken');
    print $count scalar(@taken);
    close($count);
}
";

/// Makes an archive of an image of its own, `holdfast.local/<name>:1`, with a layer that no other image has.
pub fn archive(node: &mut Node, name: &str) {
    node.sh(&format!(
        "set -e\nmkdir -p /root/{name} && cd /root/{name} && tar xf /root/images.tar\n\
         echo {name} >own && tar rf layer.tar own && rm own\n\
         layer=$(sha256sum layer.tar | cut -d' ' -f1)\n\
         sed -i \"s/sha256:[0-9a-f]*/sha256:$layer/\" busybox.json\n\
         echo '[{{\"Config\":\"busybox.json\",\"RepoTags\":[\"holdfast.local/{name}:1\"],\"Layers\":[\"layer.tar\"]}}]' >manifest.json\n\
         tar cf /root/{name}.tar busybox.json layer.tar manifest.json\ncd / && rm -r /root/{name}"
    ));
}

/// A [`noting`] pod of the image of [`archive`].
fn noting_of(image: &str, name: &str) -> Value {
    let mut pod = noting(name, "Always", SLEEP);
    pod["spec"]["containers"][0]["image"] = json!(format!("holdfast.local/{image}:1"));
    pod
}

/// The state of an image in `holdfast dump images`.
fn state_of(node: &mut Node, image: &str) -> Value {
    let all = rows(&mut node.machine, "images").unwrap();
    let row = all.into_iter().find(|row| row["image"] == image);
    row.map(|row| row["state"].clone()).unwrap_or_default()
}

#[test]
fn a_hanging_registry_delays_no_pod_preload_or_repair() {
    let mut node = Node::installed();
    for image in ["early", "late"] {
        archive(&mut node, image);
    }
    node.preload();
    node.sh(&format!(
        "set -e\nmv /root/early.tar {PRELOAD}/early.tar\n\
         cat >/root/hangs.pl <<'END_OF_FILE'\n{HANGS}END_OF_FILE\n\
         systemd-run -q --unit=hangs perl /root/hangs.pl"
    ));
    node.start();
    // More than pulls have turns.
    for n in 0..5 {
        let mut waits = pod(&format!("waits{n}"), "Always", SLEEP);
        let container = &mut waits["spec"]["containers"][0];
        container["image"] = json!(format!("127.0.0.1:5000/app{n}:1"));
        container["imagePullPolicy"] = json!("Always");
        node.manifest(&waits);
    }
    node.eventually("the registry is asked", "test -s /run/taken");

    // An image that is there, one of an archive that was there at the start, one of an archive that comes now.
    node.manifest(&noting("present", "Always", SLEEP));
    node.manifest(&noting_of("early", "early"));
    node.sh(&format!("mv /root/late.tar {PRELOAD}/late.tar"));
    node.manifest(&noting_of("late", "late"));
    let begun = node.uptime();
    for pod in ["present", "early", "late"] {
        let after = node.wait_starts(pod, 1, PATIENCE) - begun;
        println!("{pod} ran after {after:.1} s");
        node.wait_running(pod);
    }

    // An image whose files are missing is repaired. Nothing may use it meanwhile.
    node.remove_manifest("late");
    node.wait_gone("late");
    let image = "holdfast.local/late:1";
    let manifest = node.sh(&format!(
        "ctr -n k8s.io content get $(ctr -n k8s.io images ls name=={image} | awk 'NR == 2 {{ print $3 }}')"
    ));
    let manifest: Value = serde_json::from_str(&manifest).unwrap();
    let digest = manifest["config"]["digest"].as_str().unwrap();
    node.sh(&format!(
        "rm /var/lib/containerd/io.containerd.content.v1.content/blobs/$(echo {digest} | tr : /)"
    ));
    node.manifest(&noting_of("late", "again"));
    node.wait_starts("again", 1, PATIENCE);
    node.eventually(
        "the repair has an event",
        &format!("holdfast dump events | grep ImageRepaired | grep -q {image}"),
    );
    assert_eq!(state_of(&mut node, image), "whole");

    // A start of the agent waits for no pull either.
    node.sh("systemctl restart holdfast");
    node.manifest(&noting("after", "Always", SLEEP));
    node.wait_starts("after", 1, PATIENCE);
    for pod in ["present", "early", "again", "after"] {
        node.wait_running(pod);
        assert_eq!(node.starts(pod), 1, "{pod}");
    }
    node.is_healthy();
    // It hangs still.
    node.sh("systemctl is-active --quiet hangs");
    for n in 0..5 {
        let waits = node.container(&format!("waits{n}"));
        assert!(waits["lastExit"].is_null(), "{waits}");
    }
}

/// Waits until each of so many containers of the pod was started again three times.
#[track_caller]
fn have_failed(node: &mut Node, pod: &str, count: usize) {
    let full = format!("{pod}-vmnode");
    let deadline = Instant::now() + 4 * PATIENCE;
    loop {
        let mut all = rows(&mut node.machine, "containers").unwrap();
        all.retain(|row| row["name"] == full.as_str());
        let failed = all
            .iter()
            .filter(|row| row["restartCount"].as_u64() >= Some(3));
        if failed.count() >= count {
            return;
        }
        assert!(Instant::now() < deadline, "{pod}: {all:#?}");
        std::thread::sleep(Duration::from_secs(1));
    }
}

#[test]
fn a_hostile_command_line_makes_no_image_suspect() {
    // What containerd and runc say of images whose files are gone.
    const LIES: [&str; 5] = [
        "content digest sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef: not found",
        "blob sha256:ab expected at /b/ab: blob not found: not found",
        "failed to stat parent: stat /snapshots/1/fs: no such file or directory",
        "parent snapshot sha256:ab does not exist: not found",
        "exec /bin/sh: exec format error",
    ];
    let mut node = Node::installed();
    node.preload();
    node.sh("echo 'crashLoopBackOff: {maxContainerRestartPeriod: 2s}' >>/etc/holdfast/config.yaml");
    node.start();
    node.manifest(&noting("quiet", "Always", SLEEP));
    node.wait_starts("quiet", 1, PATIENCE);
    node.eventually(
        "the archive was imported",
        "journalctl -u holdfast --no-pager -o cat | grep -q 'archive imported'",
    );
    let id = node.sh(&format!(
        "ctr -n k8s.io images ls name=={IMAGE} | awk 'NR == 2 {{ print $3 }}'"
    ));

    let container = |n: usize, command: Value| json!({"name": format!("c{n}"), "image": IMAGE, "command": command});
    let commands = LIES.map(|lie| json!([lie]));
    // A quote in a command ends no quote of the runtime's.
    let quoted = LIES.map(|lie| json!([format!("x\": {lie}")]));
    let logged = LIES.map(|lie| json!(["sh", "-c", format!("echo '{lie}' >&2; exit 1")]));
    for (name, all) in [
        ("commands", commands),
        ("quoted", quoted),
        ("logged", logged),
    ] {
        let mut hostile = pod(name, "Always", SLEEP);
        let all = all.into_iter().enumerate();
        let mut containers: Vec<Value> = all.map(|(n, command)| container(n, command)).collect();
        if name == "logged" {
            for (container, lie) in containers.iter_mut().zip(LIES) {
                container["workingDir"] = json!(format!("/tmp/{lie}"));
            }
        }
        hostile["spec"]["containers"] = json!(containers);
        node.manifest(&hostile);
    }
    for name in ["commands", "quoted", "logged"] {
        have_failed(&mut node, name, LIES.len());
    }
    for row in rows(&mut node.machine, "images").unwrap() {
        assert_ne!(row["state"], "suspect", "{row}");
    }
    node.sh("! holdfast dump events | grep -E 'ImageSuspect|ImageRepaired'");
    node.sh("! journalctl -u holdfast --no-pager -o cat | grep 'removed a suspect image'");
    let now = node.sh(&format!(
        "ctr -n k8s.io images ls name=={IMAGE} | awk 'NR == 2 {{ print $3 }}'"
    ));
    assert_eq!(now, id);
    assert_eq!(node.starts("quiet"), 1);
    node.manifest(&noting("next", "Always", SLEEP));
    node.wait_starts("next", 1, PATIENCE);
}
