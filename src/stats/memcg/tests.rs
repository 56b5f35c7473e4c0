//! Notifications over files like those of the kernel, and by the kernel where it has cgroup v1.

use std::process::{Command, Stdio};

use futures::FutureExt as _;

use super::*;
use crate::kubeletconfig::EvictionThreshold;
use crate::stats::cgroup::Hierarchies;
use crate::stats::descriptors::Counts;
use crate::stats::{Proc, StatsOptions};

const MIB: u64 = 1 << 20;

fn threshold(signal: Signal) -> Threshold {
    Threshold {
        signal,
        value: EvictionThreshold::Quantity(100 * MIB),
        grace: None,
        minimum_reclaim: None,
    }
}

fn sources(root: &Path, v2: bool) -> Arc<Sources> {
    let mount = (root.to_owned(), ["memory".to_owned()].into());
    let hierarchies = Hierarchies {
        v2,
        mounts: vec![mount],
    };
    let options = StatsOptions {
        node_name: "n1".to_owned(),
        root_dir: root.to_owned(),
        pod_logs_dir: root.to_owned(),
        runtime_socket: root.join("none.sock"),
        cgroups: crate::cm::CgroupConfig::default(),
        proc: Proc::default(),
        hierarchies: Some(hierarchies.clone()),
    };
    Arc::new(Sources {
        hierarchies,
        manager: None,
        options,
        descriptors: Counts::default(),
    })
}

/// Figures of a machine of 1000 MiB with so many MiB available.
fn figures(available: u64) -> BTreeMap<Signal, Figure> {
    let figure = Figure {
        available: available * MIB,
        capacity: 1000 * MIB,
    };
    [(Signal::Memory, figure)].into()
}

fn set_usage(root: &Path, mib: u64) {
    fs::write(root.join(USAGE), format!("{}\n", mib * MIB)).unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_kernel_is_given_the_usage_at_which_a_threshold_is_met() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    set_usage(root, 700);
    fs::write(root.join(CONTROL), "").unwrap();
    let all = [threshold(Signal::NodeFs), threshold(Signal::Memory)];
    let notifier = MemoryNotifier::new(&all);
    let sources = sources(root, false);
    // 600 MiB are in the working set, so 100 MiB are files that nobody uses.
    notifier.arm(Arc::clone(&sources), &figures(400)).await;
    assert_eq!(notifier.levels(), [1000 * MIB], "1000 - 100 + 100");
    let given = fs::read_to_string(root.join(CONTROL)).unwrap();
    let words: Vec<&str> = given.split(' ').collect();
    assert_eq!(words.len(), 3, "{given}");
    assert_eq!(words[2], (1000 * MIB).to_string());
    assert!(
        notifier.crossed().now_or_never().is_none(),
        "nothing happened"
    );

    // 50 MiB of files less: another level, but not at once.
    set_usage(root, 650);
    notifier.arm(Arc::clone(&sources), &figures(400)).await;
    assert_eq!(notifier.levels(), [1000 * MIB]);
    tokio::time::advance(REARM).await;
    notifier.arm(Arc::clone(&sources), &figures(400)).await;
    assert_eq!(notifier.levels(), [950 * MIB]);
    assert_eq!(notifier.failures(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_level_that_is_given_to_the_kernel_stays_until_it_changes() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    set_usage(root, 700);
    fs::write(root.join(CONTROL), "").unwrap();
    let notifier = MemoryNotifier::new(&[threshold(Signal::Memory)]);
    let sources = sources(root, false);
    notifier.arm(Arc::clone(&sources), &figures(400)).await;
    fs::write(root.join(CONTROL), "").unwrap();
    tokio::time::advance(REARM).await;
    notifier.arm(Arc::clone(&sources), &figures(400)).await;
    assert_eq!(fs::read_to_string(root.join(CONTROL)).unwrap(), "");
    assert_eq!(notifier.levels(), [1000 * MIB]);
}

#[tokio::test(start_paused = true)]
async fn a_threshold_that_the_kernel_does_not_take_is_named_and_given_again() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let notifier = MemoryNotifier::new(&[threshold(Signal::Memory)]);
    let sources = sources(root, false);
    notifier.arm(Arc::clone(&sources), &figures(400)).await;
    let missing = root.join(USAGE).display().to_string();
    assert!(notifier.failures()[0].starts_with(&format!("read {missing}: ")));
    assert!(notifier.crossed().now_or_never().is_none());

    set_usage(root, 700);
    tokio::time::advance(REARM).await;
    notifier.arm(Arc::clone(&sources), &figures(400)).await;
    let missing = root.join(CONTROL).display().to_string();
    assert!(notifier.failures()[0].starts_with(&format!("write to {missing}: ")));

    fs::write(root.join(CONTROL), "").unwrap();
    tokio::time::advance(REARM).await;
    notifier.arm(Arc::clone(&sources), &figures(400)).await;
    assert_eq!(notifier.failures(), [""; 0]);
    assert_eq!(notifier.levels(), [1000 * MIB]);
}

#[tokio::test]
async fn of_all_pods_without_cgroups_the_failure_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let notifier = MemoryNotifier::new(&[threshold(Signal::AllocatableMemory)]);
    let mut of_pods = figures(400);
    of_pods.insert(Signal::AllocatableMemory, of_pods[&Signal::Memory]);
    notifier.arm(sources(dir.path(), false), &of_pods).await;
    let failures = notifier.failures();
    assert!(
        failures[0].contains("allocatableMemory.available<100Mi"),
        "{failures:?}"
    );
}

#[tokio::test]
async fn cgroup_v2_is_given_no_thresholds() {
    let dir = tempfile::tempdir().unwrap();
    let notifier = MemoryNotifier::new(&[threshold(Signal::Memory)]);
    notifier.arm(sources(dir.path(), true), &figures(400)).await;
    assert_eq!(notifier.failures(), [""; 0]);
    assert!(notifier.levels().is_empty());
}

/// A memory cgroup of version 1, removed at the end.
struct Cgroup(PathBuf);

impl Cgroup {
    /// `None`, with a word why, where there is none.
    fn new() -> Option<Self> {
        let name = format!("holdfast-memcg-{}", std::process::id());
        let dir = Path::new("/sys/fs/cgroup/memory").join(name);
        if let Err(error) = fs::create_dir(&dir) {
            eprintln!("not tested: cannot make {}: {error}", dir.display());
            return None;
        }
        Some(Self(dir))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Processes that have ended may be in it for a moment.
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[tokio::test]
async fn the_kernel_notifies_of_usage_that_crosses_a_level() {
    let Some(cgroup) = Cgroup::new() else {
        return;
    };
    let event = register(&cgroup.0, 32 * MIB).unwrap();
    let event = Arc::new(registered(event).unwrap());
    assert!(signalled(Arc::clone(&event)).now_or_never().is_none());
    let script = format!(
        "echo $$ > {}/cgroup.procs && head -c 64M /dev/zero | tail -c 64M",
        cgroup.0.display()
    );
    let mut process = Command::new("sh")
        .args(["-c", &script])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let crossed = tokio::time::timeout(Duration::from_secs(60), signalled(event)).await;
    let ended = process.wait().unwrap();
    crossed.expect("the kernel notifies");
    assert!(ended.success());
}
