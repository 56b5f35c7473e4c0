//! What attempts of a container leave on the node: message files, logs, links, mounts.

use std::fs;
use std::path::{Path, PathBuf};

use holdfast_testkit::containerd::Version;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::{Value, json};

use crate::agent_process::{NODE, eventually};
use crate::world::{FOREVER, Seen, World};

/// The pod of each test, with one container, `only`.
const POD: &str = "again";

/// The agent's directory, whose mounts are shared with containers that ask for it.
struct SharedRoot(PathBuf);

impl SharedRoot {
    fn new(dir: PathBuf) -> Self {
        fs::create_dir_all(&dir).unwrap();
        let none = None::<&str>;
        mount(Some(&dir), &dir, none, MsFlags::MS_BIND, none).expect("bind it");
        // With nobody else first: the node's own root may be shared as well.
        for kind in [MsFlags::MS_PRIVATE, MsFlags::MS_SHARED] {
            mount(none, &dir, none, kind, none).expect("share it");
        }
        Self(dir)
    }
}

impl Drop for SharedRoot {
    fn drop(&mut self) {
        if let Err(error) = umount2(&self.0, MntFlags::MNT_DETACH) {
            eprintln!("unmount {}: {error}", self.0.display());
        }
    }
}

/// A container that says something before it runs on, where `path` is its message file.
fn pod(world: &World, path: &str) -> Value {
    world.configure("crashLoopBackOff:\n  maxContainerRestartPeriod: 1s\n");
    let script = format!("printf 'words of %s' $attempt > {path}\n{FOREVER}");
    let mut pod = world.pod(POD, "Always", &[("only", &script)]);
    pod["spec"]["containers"][0]["terminationMessagePath"] = json!(path);
    pod
}

fn uid(world: &World) -> String {
    let row = world.row("pods", POD).expect("a pod");
    row["uid"].as_str().expect("a UID").to_owned()
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries
        .map(|e| e.file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn messages(world: &World) -> PathBuf {
    let pod = world.root_dir().join("pods").join(uid(world));
    pod.join("containers/only")
}

fn logs(world: &World) -> Vec<String> {
    let pod = format!("default_{POD}-{NODE}_{}", uid(world));
    names(&world.pod_logs().join(pod).join("only"))
}

/// Mounts on the node of message files, in whatever place.
fn mounts(world: &World) -> usize {
    let of = format!("/pods/{}/containers/only/", uid(world));
    let table = fs::read("/proc/self/mountinfo").expect("the mount table");
    let table = String::from_utf8_lossy(&table);
    let roots = table.lines().filter_map(|line| line.split(' ').nth(3));
    roots.filter(|root| root.contains(&of)).count()
}

/// Names of the links, by the containers.
fn links_of(containers: &[Seen]) -> Vec<String> {
    let name = |c: &Seen| format!("{POD}-{NODE}_default_only-{}.log", c.id);
    let mut names: Vec<_> = containers.iter().map(name).collect();
    names.sort();
    names
}

/// Waits until the container has said its words, ends it, and waits until the next attempt runs.
fn restart(world: &World) -> Seen {
    let seen = world.wait_running(POD, "only");
    let words = format!("words of {}", seen.attempt);
    let file = messages(world).join("message");
    eventually("it has said something", || {
        match fs::read_to_string(&file) {
            Ok(said) if said == words => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
    world.kill(&seen.id);
    let next = eventually("it runs again", || {
        let next = world.wait_running(POD, "only");
        if next.id == seen.id {
            return Err("not yet".to_owned());
        }
        Ok(next)
    });
    eventually("its status has the words of the attempt before", || {
        let status = world.container_status(POD, "only")?;
        let ended = &status["lastState"]["terminated"];
        let is_it = ended["containerID"].to_string().contains(&seen.id);
        if is_it && ended["message"] == words.as_str() {
            Ok(())
        } else {
            Err(status.to_string())
        }
    });
    next
}

/// Waits until only the newest two attempts have left something.
#[track_caller]
fn only_two_are_left(world: &World, newest: u32, shown: usize) {
    eventually("only two attempts have files", || {
        let containers = world.containers();
        let attempts = [newest - 1, newest];
        let logs_wanted = attempts.map(|n| format!("{n}.log"));
        let mut found = logs(world);
        found.sort_by_key(|name| name.len());
        let seen = (
            containers.iter().map(|c| c.attempt).collect::<Vec<_>>(),
            found,
            names(&world.container_logs()),
            names(&messages(world)),
            mounts(world),
        );
        let wanted = (
            attempts.to_vec(),
            logs_wanted.to_vec(),
            links_of(&containers),
            vec!["message".to_owned()],
            shown,
        );
        if seen == wanted {
            Ok(())
        } else {
            Err(format!("{seen:?} instead of {wanted:?}"))
        }
    });
}

#[test]
fn a_container_that_restarts_leaves_no_files_behind() {
    let world = World::new(Version::Installed);
    let _shared = SharedRoot::new(world.root_dir());
    let mut pod = pod(&world, "/scratch/said");
    let volumes = pod["spec"]["volumes"].as_array_mut().unwrap();
    volumes.push(json!({"name": "scratch", "emptyDir": {}}));
    let only = &mut pod["spec"]["containers"][0];
    only["securityContext"] = json!({"privileged": true});
    only["volumeMounts"].as_array_mut().unwrap().push(json!({
        "name": "scratch", "mountPath": "/scratch", "mountPropagation": "Bidirectional",
    }));
    world.add(&pod);
    let agent = world.start();
    for newest in 1..=12 {
        assert_eq!(restart(&world).attempt, newest);
        if newest == 3 || newest == 12 {
            only_two_are_left(&world, newest, 1);
        }
    }
    let directory = world.root_dir().join("pods").join(uid(&world));
    world.delete(POD);
    eventually("nothing is left of the pod", || {
        let links = names(&world.container_logs());
        if directory.exists() || !links.is_empty() || !names(&world.pod_logs()).is_empty() {
            return Err(format!("{} {links:?}", directory.display()));
        }
        Ok(())
    });
    agent.kill9();
}

#[test]
fn lost_links_come_back_and_files_of_removed_containers_go() {
    let world = World::new(Version::Installed);
    world.add(&pod(&world, "/dev/termination-log"));
    let agent = world.start();
    restart(&world);
    only_two_are_left(&world, 1, 0);
    agent.kill9();

    // Links are lost, and there is a message file as an earlier version named it.
    for link in names(&world.container_logs()) {
        fs::remove_file(world.container_logs().join(link)).unwrap();
    }
    fs::write(messages(&world).join("00000000"), "").unwrap();
    fs::write(messages(&world).join("0000002a"), "").unwrap();
    let agent = world.start();
    let dead = |running: bool| -> Vec<Seen> {
        let all = world.containers().into_iter();
        all.filter(|c| c.running == running).collect()
    };
    let has_links = |wanted: &[Seen], what: &str| {
        eventually(what, || match names(&world.container_logs()) {
            found if found == links_of(wanted) => Ok(()),
            found => Err(format!("{found:?}")),
        });
    };
    has_links(&world.containers(), "the links are back");
    eventually(
        "only the message files of containers are left",
        || match names(&messages(&world)) {
            found if found == ["00000000", "message"] => Ok(()),
            found => Err(format!("{found:?}")),
        },
    );

    // A container is removed behind the agent's back. Its log is that of the recorded end, and is served until the next one.
    world.remove(&dead(false)[0].id);
    has_links(&dead(true), "the link of the removed container is gone");
    eventually("its message file is gone", || {
        match names(&messages(&world)) {
            found if found == ["message"] => Ok(()),
            found => Err(format!("{found:?}")),
        }
    });
    assert_eq!(logs(&world), ["0.log", "1.log"]);
    restart(&world);
    only_two_are_left(&world, 2, 0);
    let links = names(&world.container_logs());
    fs::remove_file(world.container_logs().join(&links[0])).unwrap();
    has_links(
        &world.containers(),
        "a lost link is back while the agent runs",
    );
    agent.kill9();
}

/// How often the container of [`restarts_leave_no_mounts_behind`] restarts: `HOLDFAST_TEST_RESTARTS`, or a few times.
fn restarts() -> u32 {
    let given = std::env::var("HOLDFAST_TEST_RESTARTS").ok();
    given.map_or(8, |n| n.parse().expect("a number of restarts"))
}

/// Mount points below a directory, and every file and directory in it.
fn tree(dir: &Path) -> (usize, usize) {
    fn entries(dir: &Path) -> usize {
        let read = fs::read_dir(dir).into_iter().flatten().flatten();
        let of = |path: PathBuf| 1 + if path.is_symlink() { 0 } else { entries(&path) };
        read.map(|entry| of(entry.path())).sum()
    }
    let table = fs::read("/proc/self/mountinfo").expect("the mount table");
    let table = String::from_utf8_lossy(&table);
    let points = table.lines().filter_map(|line| line.split(' ').nth(4));
    let points = points.filter(|point| Path::new(point).starts_with(dir));
    (points.count(), entries(dir))
}

/// A container that mounts every kind of local volume with every propagation, one of them at `/etc`, where the agent and the
/// runtime mount files of their own.
#[test]
fn restarts_leave_no_mounts_behind() {
    const FEW: u32 = 3;
    let world = World::new(Version::Installed);
    let _shared = SharedRoot::new(world.root_dir());
    let mut pod = pod(&world, "/etc/said");
    let name = json!([{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]);
    let host = world.root_dir().join("host");
    let volumes = pod["spec"]["volumes"].as_array_mut().unwrap();
    volumes.extend([
        json!({"name": "etc", "emptyDir": {}}),
        json!({"name": "disk", "emptyDir": {}}),
        json!({"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}),
        json!({"name": "labels", "downwardAPI": {"items": name}}),
        json!({"name": "host", "hostPath": {"path": host, "type": "DirectoryOrCreate"}}),
    ]);
    let only = &mut pod["spec"]["containers"][0];
    only["securityContext"] = json!({"privileged": true});
    let mounts = only["volumeMounts"].as_array_mut().unwrap();
    mounts.push(json!({"name": "etc", "mountPath": "/etc", "mountPropagation": "Bidirectional"}));
    for volume in ["disk", "memory", "labels", "host"] {
        for propagation in ["None", "HostToContainer", "Bidirectional"] {
            mounts.push(json!({
                "name": volume, "mountPath": format!("/{volume}-{propagation}"),
                "mountPropagation": propagation,
            }));
        }
    }
    world.add(&pod);
    let agent = world.start();
    let many = restarts().max(FEW + 1);
    let pods = world.root_dir().join("pods");
    let mut few = None;
    for newest in 1..=many {
        assert_eq!(restart(&world).attempt, newest);
        if newest == FEW || newest == many {
            only_two_are_left(&world, newest, 1);
            let left = (tree(&pods), tree(&host), world.sandboxes().len());
            println!("after {newest} restarts, mounts and files of pods and of the host: {left:?}");
            assert_eq!(*few.get_or_insert(left), left, "after {newest} restarts");
        }
    }
    world.delete(POD);
    eventually("nothing is left of the pod", || match tree(&pods) {
        (0, 0) => Ok(()),
        found => Err(format!("{found:?}")),
    });
    agent.kill9();
}
