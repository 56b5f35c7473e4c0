//! What containerd 2 has and its predecessors have not: images as volumes, recursive read-only mounts, groups by the
//! spec alone, events that may be relied on.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use holdfast_testkit::containerd::{BUSYBOX, Version};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::agent_process::{Agent, eventually};
use crate::restarts::EFFECTS;
use crate::world::{FOREVER, Seen, World};

/// A directory of the node with a file system of its own somewhere below.
struct Tree(PathBuf);

impl Tree {
    fn new(dir: PathBuf) -> Self {
        let below = dir.join("below");
        fs::create_dir_all(&below).expect("make a tree");
        let none = None::<&str>;
        mount(Some("tmpfs"), &below, Some("tmpfs"), MsFlags::empty(), none).expect("mount a tmpfs");
        Self(dir)
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        if let Err(error) = umount2(&self.0.join("below"), MntFlags::MNT_DETACH) {
            eprintln!("unmount what is below {}: {error}", self.0.display());
        }
    }
}

/// Mounts an image twice, with a volume each.
fn with_images(world: &World) -> Value {
    let mut pod = world.pod("pictures", "Always", &[("only", FOREVER)]);
    let volumes = pod["spec"]["volumes"].as_array_mut().unwrap();
    volumes.push(json!({"name": "there", "image": {"reference": BUSYBOX, "pullPolicy": "Never"}}));
    volumes.push(json!({"name": "again", "image": {"reference": BUSYBOX}}));
    let mounts = &mut pod["spec"]["containers"][0]["volumeMounts"];
    let mounts = mounts.as_array_mut().unwrap();
    mounts.push(json!({"name": "there", "mountPath": "/there"}));
    mounts.push(json!({"name": "again", "mountPath": "/deep/er/again", "readOnly": true}));
    pod
}

/// Images that are not there, and a part of one.
fn without_images(world: &World) -> Value {
    let mut pod = world.pod("blank", "Always", &[("absent", FOREVER), ("part", FOREVER)]);
    let volumes = pod["spec"]["volumes"].as_array_mut().unwrap();
    let absent = "holdfast.local/absent:1";
    volumes.push(json!({"name": "absent", "image": {"reference": absent, "pullPolicy": "Never"}}));
    volumes.push(json!({"name": "there", "image": {"reference": BUSYBOX}}));
    let containers = pod["spec"]["containers"].as_array_mut().unwrap();
    let more = [
        json!({"name": "absent", "mountPath": "/absent"}),
        json!({"name": "there", "mountPath": "/there", "subPath": "bin"}),
    ];
    for (container, mount) in containers.iter_mut().zip(more) {
        let mounts = container["volumeMounts"].as_array_mut().unwrap();
        mounts.push(mount);
    }
    pod
}

/// Read-only as deep as it goes, and with the groups of its spec alone.
fn strict(world: &World, tree: &Path) -> Value {
    let mut pod = world.pod("strict", "Always", &[("only", FOREVER)]);
    let spec = &mut pod["spec"];
    spec["securityContext"] = json!({
        "supplementalGroups": [4567],
        "supplementalGroupsPolicy": "Strict",
    });
    let volumes = spec["volumes"].as_array_mut().unwrap();
    volumes.push(json!({"name": "tree", "hostPath": {"path": tree}}));
    let mounts = spec["containers"][0]["volumeMounts"].as_array_mut();
    mounts.unwrap().push(json!({
        "name": "tree", "mountPath": "/tree", "readOnly": true, "recursiveReadOnly": "Enabled",
    }));
    pod
}

/// What the container sees of its images.
#[track_caller]
fn assert_images(world: &World, id: &str) {
    for at in ["/there", "/deep/er/again"] {
        let (code, text) = world.exec(id, &["ls", &format!("{at}/bin/busybox")]);
        assert_eq!(code, 0, "{at}: {text}");
        let (code, text) = world.exec(id, &["touch", &format!("{at}/x")]);
        assert_ne!(code, 0, "{at} is writable");
        assert!(text.contains("Read-only file system"), "{at}: {text}");
    }
}

fn mount_status(world: &World, pod: &str, volume: &str) -> Result<Value, String> {
    let status = world.container_status(pod, "only")?;
    let mounts = status["volumeMounts"].as_array();
    let found = mounts.into_iter().flatten().find(|m| m["name"] == volume);
    found.cloned().ok_or_else(|| status.to_string())
}

/// The agent is told by the runtime and need not ask.
#[track_caller]
fn subscribed(agent: &Agent) {
    eventually("the agent has looked around", || match agent.relists() {
        relists if relists >= 1.0 => Ok(()),
        relists => Err(format!("{relists} relists")),
    });
    let broken = agent.metric("kubelet_evented_pleg_connection_error_count");
    assert_eq!(broken, 0.0, "the event stream broke:\n{}", agent.log());
}

#[track_caller]
fn assert_no_effects(agent: &Agent) {
    for operation in EFFECTS {
        let calls = agent.operations(operation);
        assert_eq!(calls, 0.0, "{operation} after a restart");
    }
}

#[track_caller]
fn next_attempt(world: &World, pod: &str, before: &Seen) -> Seen {
    eventually(&format!("{pod} runs again"), || {
        let next = world.try_one(pod, "only")?;
        match next.id == before.id {
            true => Err("it is the same".to_owned()),
            false => Ok(next),
        }
    })
}

#[test]
fn images_are_volumes_and_stay_over_restarts_of_agent_and_runtime() {
    let world = World::new(Version::V2);
    let tree = Tree::new(world.starts().join("tree"));
    world.add(&with_images(&world));
    world.add(&without_images(&world));
    world.add(&strict(&world, &tree.0));
    let agent = world.start();
    let pictures = world.wait_running("pictures", "only");
    let strict = world.wait_running("strict", "only");
    assert_images(&world, &pictures.id);
    let image = eventually("the status names the image", || {
        let mount = mount_status(&world, "pictures", "there")?;
        let image = mount["volumeStatus"]["image"]["imageRef"].clone();
        image
            .is_string()
            .then_some(image)
            .ok_or_else(|| mount.to_string())
    });
    assert!(image.to_string().contains("sha256:"), "{image}");

    // What cannot be mounted is told, and is nobody's loss.
    for (container, reason, words) in [
        ("absent", "ErrImageNeverPull", "volume absent: "),
        ("part", "CreateContainerConfigError", "leave subPath out"),
    ] {
        eventually(&format!("{container} waits"), || {
            let status = world.container_status("blank", container)?;
            let waiting = &status["state"]["waiting"];
            let told = waiting["message"].as_str().unwrap_or_default();
            match waiting["reason"] == reason && told.contains(words) {
                true => Ok(()),
                false => Err(status.to_string()),
            }
        });
    }

    let (code, text) = world.exec(&strict.id, &["touch", "/tree/below/x"]);
    assert_ne!(code, 0, "what is mounted below is writable");
    assert!(text.contains("Read-only file system"), "{text}");
    eventually("the status says so", || {
        let mount = mount_status(&world, "strict", "tree")?;
        match mount["recursiveReadOnly"] == "Enabled" {
            true => Ok(()),
            false => Err(mount.to_string()),
        }
    });
    let (_, groups) = world.exec(&strict.id, &["id", "-G"]);
    assert_eq!(groups.trim(), "0 4567");

    // The agent is killed: nothing happens.
    world.site.recorded();
    let before = (world.running(), world.sandboxes());
    agent.kill9();
    let agent = world.start();
    subscribed(&agent);
    assert_no_effects(&agent);
    assert_eq!((world.running(), world.sandboxes()), before);
    assert_images(&world, &pictures.id);
    assert_eq!(
        mount_status(&world, "pictures", "there").unwrap()["volumeStatus"]["image"]["imageRef"],
        image
    );

    // The runtime is killed under the agent: the same.
    world.runtime.signal_daemon(Signal::SIGKILL).unwrap();
    world.runtime.start_daemon().unwrap();
    eventually("the agent has looked at the new one", || {
        let (status, text) = agent.get("/readyz").map_err(|error| error.to_string())?;
        let broken = agent.metric("kubelet_evented_pleg_connection_error_count");
        match status == 200 && broken > 0.0 && agent.relists() >= 2.0 {
            true => Ok(()),
            false => Err(format!("{status} {text}, the stream broke {broken} times")),
        }
    });
    assert_eq!((world.running(), world.sandboxes()), before);
    assert_images(&world, &pictures.id);

    // The container is killed: the next one has the images too.
    world.kill(&pictures.id);
    let next = next_attempt(&world, "pictures", &pictures);
    assert_eq!(next.attempt, 1);
    assert_images(&world, &next.id);

    // The pod goes, and nothing stays mounted of its images.
    let of_runtime = world.runtime.dir().display().to_string();
    let mounts = || {
        let text = String::from_utf8_lossy(&fs::read("/proc/self/mountinfo").unwrap()).into_owned();
        let of = text
            .lines()
            .filter(|line| line.contains(&of_runtime) && line.contains("image-volumes"));
        of.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_ne!(
        mounts(),
        Vec::<String>::new(),
        "where the runtime mounts images"
    );
    world.delete("pictures");
    eventually("the pod is gone", || match mounts() {
        left if left.is_empty() && world.try_one("pictures", "only").is_err() => Ok(()),
        left => Err(format!("{left:?}")),
    });
}

#[test]
fn a_death_is_told_by_the_runtime_after_a_sigkill_of_the_agent() {
    let world = World::new(Version::V2);
    let pods = ["one", "other"];
    for pod in pods {
        world.add(&world.pod(pod, "Always", &[("only", FOREVER)]));
    }
    let agent = world.start();
    for pod in pods {
        world.wait_running(pod, "only");
        world.wait_phase(pod, "Running");
    }
    agent.kill9();
    let agent = world.start();
    subscribed(&agent);
    let relists = agent.relists();
    // The second one certainly after the look that follows the subscription.
    for pod in pods {
        let seen = world.try_one(pod, "only").unwrap();
        world.kill(&seen.id);
        let killed = Instant::now();
        assert_eq!(next_attempt(&world, pod, &seen).attempt, 1);
        eprintln!("{pod} runs again after {:?}", killed.elapsed());
    }
    // By their events: the agent looks at everything every 300 s only.
    let now = agent.relists();
    // One look that failed makes one more.
    assert!(now <= relists + 4.0, "{now} relists after {relists}");
}
