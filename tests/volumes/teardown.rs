//! The end of a pod's volumes beside what belongs to users, with the agent killed at each step of it.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::agent_process::{Agent, eventually, within};
use crate::features::{left, mounts_below};
use crate::kinds::{POD, Storage, places, rich, volume};
use crate::planted::Planted;
use crate::setup::Cluster;

/// Steps of the end of a volume and of a pod in their order, each with how often it comes for the pod of these tests,
/// or more.
const STEPS: &[(&str, usize)] = &[
    ("pod_workers::terminating::after_kill", 1),
    ("pod_workers::terminated::before_cleanup", 1),
    ("volumemanager::subpath::unmounted", 9),
    ("volumemanager::subpath::after_clean", 1),
    ("volumemanager::tear_down::begun", 10),
    ("volumemanager::tear_down::unmounted", 6),
    ("volumemanager::remove_tree::entered", 4),
    ("volumemanager::tear_down::removed", 10),
    ("volumemanager::unpublish::recorded", 7),
    ("volumemanager::disk::unmounted", 4),
    ("volumemanager::csi::unpublished", 3),
    ("volumemanager::unpublish::done", 7),
    ("volumemanager::unpublish::cleared", 7),
    ("volumemanager::unstage::recorded", 5),
    ("volumemanager::csi::unstaged", 2),
    ("volumemanager::block::detached", 1),
    ("volumemanager::unstage::done", 5),
    ("volumemanager::unstage::cleared", 5),
    ("pod_workers::terminated::unmounted", 1),
    ("volumemanager::remove_pod_dirs::begun", 1),
    (REMOVED, 1),
];
/// Then nothing is left: it shows to the agent and to the test at the same time.
const REMOVED: &str = "volumemanager::remove_pod_dirs::removed";
/// Those that come while parts of volumes keep the volumes.
const BEFORE_VOLUMES: usize = 3;
/// Writes of the store are steps as well: those of a start come first.
const WRITES: [&str; 3] = [
    "store::commit::before_write",
    "store::flush::before_publish",
    "store::commit::after_publish",
];
/// A pod is ended by agents that die this many times in each step.
const DEATHS: usize = 3;

/// One life of an agent that is to be killed at a step. Returns whether it was, or came to where it waits for users.
fn live(cluster: &Cluster, storage: &Storage, point: &str, waits: impl Fn(&Agent) -> bool) -> bool {
    let (tools, dir) = storage.environment();
    let environment = [("HOLDFAST_DIE_AT", point), (tools, dir.as_str())];
    let mut agent = cluster.spawn_agent_with(&[], &environment);
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

/// Lives of agents that are killed at these steps, each time they come to one, beside what users have.
fn die_at(
    cluster: &Cluster,
    storage: &Storage,
    planted: &Planted,
    steps: &[(&'static str, usize)],
    waits: impl Fn(&Agent) -> bool,
) -> BTreeSet<&'static str> {
    let mut killed = BTreeSet::new();
    for (step, times) in steps {
        for nth in 1..=*times {
            let point = format!("{step}:{nth}");
            let died = live(cluster, storage, &point, &waits);
            planted.assert_untouched(&point);
            if !died {
                break;
            }
            killed.insert(*step);
        }
    }
    killed
}

/// Users' trees at, over and below every mount that the pod has, and beside them.
fn plant_everywhere(cluster: &Cluster, planted: &mut Planted, storage: &mut Storage, uid: &str) {
    let at = |plugin: &str, name: &str| volume(cluster, uid, plugin, name);
    let disk = at("empty-dir", "disk");
    planted.link("linked", &disk.join("link"));
    planted.bind("in-disk", &disk.join("bound"));
    planted.bind_file("one-file", &disk.join("file"));
    planted.tmpfs(&disk.join("tmpfs"));
    planted.bind("in-memory", &at("empty-dir", "memory").join("bound"));
    let plugin = disk.parent().expect("a plugin's directory");
    if plugin.join("huge").exists() {
        planted.bind("in-huge", &plugin.join("huge/bound"));
    }
    planted.bind("in-map", &at("configmap", "map").join("bound"));
    planted.bind("in-secret", &at("secret", "secret").join("bound"));
    planted.bind("in-labels", &at("downward-api", "labels").join("bound"));
    planted.bind("in-all", &at("projected", "all").join("bound"));
    let of_claim = |name: &str| format!("{}-{name}", cluster.namespace);
    let local = at("local-volume", &of_claim("local"));
    planted.set_apart(&local);
    planted.bind("in-local", &local.join("bound"));
    let file_system = at("local-volume", &of_claim("disk-claim"));
    planted.set_apart(&file_system);
    fs::create_dir(file_system.join("bound")).unwrap();
    for (name, place) in places(cluster, uid) {
        planted.set_apart(&place);
        fs::create_dir(place.join("part-of-users")).unwrap();
        if name == "disk-claim" {
            storage.disk.note(&file_system);
        }
    }
    planted.bind("in-disk-claim", &file_system.join("bound"));
    let nfs = at("nfs", "nfs");
    planted.bind("in-nfs", &nfs.join("bound"));
    let csi = at("csi", &of_claim("csi")).join("mount");
    planted.bind("in-csi", &csi.join("bound"));
    let inline = at("csi", "inline").join("mount");
    planted.bind("in-inline", &inline.join("bound"));
    planted.bind("over", &at("empty-dir", "over"));
    planted.tmpfs(&at("empty-dir", "over-too"));
    for (name, place) in places(cluster, uid) {
        planted.bind(&format!("in-part-{name}"), &place.join("part-of-users"));
    }
    let pod_dir = cluster.root_dir().join("pods").join(uid);
    planted.bind("in-pod-dir", &pod_dir.join("mine"));
    planted.bind("in-devices", &pod_dir.join("volumeDevices/mine"));
    planted.bind(
        "beside-volumes",
        &pod_dir.join("volumes/kubernetes.io~empty-dir/mine"),
    );
    planted.seal();
}

/// What is told of each volume that users' mounts keep.
fn kept(cluster: &Cluster, planted: &Planted, uid: &str) -> BTreeSet<String> {
    let pod_dir = cluster.root_dir().join("pods").join(uid);
    let of_claims = format!("{}-", cluster.namespace);
    let told = |at: &PathBuf| {
        let path = at.strip_prefix(&pod_dir).ok()?;
        let parts: Vec<_> = path.iter().take(3).map(|p| p.to_string_lossy()).collect();
        let [volumes, plugin, name] = parts.as_slice() else {
            return None;
        };
        if volumes != "volumes" || name == "mine" {
            return None;
        }
        Some(match plugin.strip_prefix("kubernetes.io~")? {
            "csi" | "local-volume" | "nfs" => {
                let name = name.strip_prefix(&of_claims).unwrap_or(name);
                format!("volume=\"{uid}/{name}\" step=\"volume_unmount\"")
            }
            _ => format!("{volumes}/{plugin}/{name}"),
        })
    };
    planted.mounts().iter().filter_map(told).collect()
}

// Invariant VOL-2.
#[test]
fn teardown_killed_at_each_step_keeps_what_users_mounted_and_linked() {
    let cluster = Cluster::new();
    let mut planted = Planted::new(&cluster.dir().join("users"));
    let users = planted.dir().to_owned();
    let mut storage = Storage::new(&cluster, &mut planted);
    let (tools, dir) = storage.environment();
    let environment = [(tools, dir.as_str())];
    planted.tmpfs(&users.join("host/mounted"));
    let agent = cluster.join_with(&environment);
    let uid = rich(&cluster, &storage, &users);
    plant_everywhere(&cluster, &mut planted, &mut storage, &uid);
    planted.assert_untouched("at first");
    agent.kill9();
    cluster.delete_pod(POD, 1);

    // Users' mounts in parts of volumes keep all of the volumes.
    let parts = "volume-subpaths";
    let waits = |agent: &Agent| {
        let log = agent.log();
        let told = |line: &str| line.contains(parts) && line.contains("is mounted; unmount it");
        log.lines().any(told)
    };
    let (first, others) = STEPS.split_at(BEFORE_VOLUMES);
    let killed = die_at(&cluster, &storage, &planted, first, waits);
    assert_eq!(killed.len(), BEFORE_VOLUMES, "{killed:?}");
    let pod_dir = cluster.root_dir().join("pods").join(&uid);
    planted.unmount_below(&pod_dir.join(parts));

    let volumes = kept(&cluster, &planted, &uid);
    assert!(volumes.len() >= 13, "{volumes:?}");
    let waits = |agent: &Agent| {
        let log = agent.log();
        volumes.iter().all(|told| log.contains(told.as_str()))
    };
    // What nobody keeps goes as soon as an agent lives long enough: the parts come first.
    let others = [&first[BEFORE_VOLUMES - 1..], others].concat();
    let killed = die_at(&cluster, &storage, &planted, &others, waits);
    for step in [
        "volumemanager::subpath::unmounted",
        "volumemanager::tear_down::begun",
        "volumemanager::unpublish::recorded",
    ] {
        assert!(killed.contains(step), "{step}: {killed:?}");
    }
    for write in WRITES {
        for nth in 3..=10 {
            let point = format!("{write}:{nth}");
            live(&cluster, &storage, &point, waits);
            planted.assert_untouched(&point);
        }
    }

    // With nobody killing it: the pod is kept, and it is told by what.
    let mut agent = cluster.spawn_agent_with(&[], &environment);
    agent.wait_ready();
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
    storage.disk.assert_untouched("after the pod's end");
    assert_eq!(storage.driver.violations(), Vec::<String>::new());
    agent.kill9();
}

// Invariant VOL-1.
#[test]
fn teardown_killed_at_each_step_leaves_nothing_of_its_own_and_all_of_users() {
    let cluster = Cluster::new();
    let mut planted = Planted::new(&cluster.dir().join("users"));
    let users = planted.dir().to_owned();
    let mut storage = Storage::new(&cluster, &mut planted);
    let (tools, dir) = storage.environment();
    let environment = [(tools, dir.as_str())];
    planted.tmpfs(&users.join("host/mounted"));
    let mut steps: Vec<&str> = STEPS.iter().map(|(step, _)| *step).collect();
    let mut agent = cluster.join_with(&environment);
    // Each pod is ended by agents that die at one step after the other, the first, second, … time they come to it.
    // Volumes go side by side: where a step does not come any more, the next pod begins with it.
    for pod in 1.. {
        let uid = rich(&cluster, &storage, &users);
        let at = |plugin: &str, name: &str| volume(&cluster, &uid, plugin, name);
        let (disk, inline) = (at("empty-dir", "disk"), at("csi", "inline"));
        planted.link(&format!("linked-{pod}"), &disk.join("link"));
        planted.link(&format!("of-driver-{pod}"), &inline.join("mount/link"));
        let of_disk = format!("{}-disk-claim", cluster.namespace);
        storage.disk.note(&at("local-volume", &of_disk));
        planted.seal();
        agent.kill9();
        cluster.delete_pod(POD, 1);
        let first = steps[0];
        steps.retain(|step| {
            let mut killed = false;
            for nth in 1..=DEATHS {
                if left(&cluster).is_ok() {
                    break;
                }
                let point = format!("{step}:{nth}");
                let gone = |_: &Agent| *step != REMOVED && left(&cluster).is_ok();
                let died = live(&cluster, &storage, &point, gone);
                planted.assert_untouched(&point);
                killed |= died;
                if !died {
                    break;
                }
            }
            !killed
        });
        assert!(!steps.contains(&first), "{first} does not come");
        agent = cluster.spawn_agent_with(&[], &environment);
        agent.wait_ready();
        eventually("nothing of the agent's is left", || left(&cluster));
        planted.assert_untouched("after the pod's end");
        storage.disk.assert_untouched("after the pod's end");
        if steps.is_empty() {
            println!("{pod} pods came to an end by all steps");
            break;
        }
    }
    assert_eq!(storage.driver.violations(), Vec::<String>::new());
    assert!(storage.driver.truth().unwrap().is_clean());
    let pods: Vec<String> = mounts_below(&cluster.root_dir());
    assert_eq!(pods, Vec::<String>::new());
    let loops = fs::read_dir("/sys/block").unwrap().flatten();
    let files = loops.filter_map(|b| fs::read_to_string(b.path().join("loop/backing_file")).ok());
    let block = users.join("block");
    let own: Vec<String> = files.filter(|f| Path::new(f.trim()) == block).collect();
    assert_eq!(own, Vec::<String>::new(), "loop devices of the agent");
    agent.kill9();
}
