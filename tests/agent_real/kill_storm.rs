//! SIGKILL at random moments, again and again, while pods start, crash and are stopped.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use holdfast_testkit::containerd::Version;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::agent_process::{NODE, within};
use crate::world::{FOREVER, World, mark};

const KILLS: usize = 50;
/// Names of pods that come and go.
const VISITORS: usize = 4;

#[test]
fn sigkill_storm_leaves_exactly_the_wanted_containers() {
    let seed = std::env::var("HOLDFAST_STORM_SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or_else(|| rand::rng().random());
    println!("HOLDFAST_STORM_SEED={seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let world = World::new(Version::Installed);
    let started = Instant::now();

    for n in 0..2 {
        world.add(&world.pod(
            &format!("steady-{n}"),
            "Always",
            &[("a", FOREVER), ("b", FOREVER)],
        ));
    }
    world.add(&world.pod("crash", "Always", &[("only", "sleep 0.5; exit 3")]));
    world.add(&world.pod(
        "retry",
        "OnFailure",
        &[("only", "sleep 0.3; test $((0x$attempt)) -ge 2")],
    ));
    world.add(&world.pod(
        "once",
        "Never",
        &[("good", "sleep 1; exit 0"), ("bad", "exit 4")],
    ));

    let mut counts: BTreeMap<String, u64> = BTreeMap::new();
    let mut visitors: BTreeSet<usize> = BTreeSet::new();
    let mut visits = 0;
    for kill in 0..KILLS {
        let agent = world.spawn(&[]);
        // Something changes at about every other kill, before or while the agent starts.
        std::thread::sleep(Duration::from_millis(rng.random_range(0..200)));
        if rng.random_bool(0.6) {
            let n = rng.random_range(0..VISITORS);
            if visitors.remove(&n) {
                world.delete(&format!("visitor-{n}"));
            } else {
                visitors.insert(n);
                visits += 1;
                // Each visit is another pod: the label makes another UID.
                let mut pod = world.pod(&format!("visitor-{n}"), "Always", &[("only", FOREVER)]);
                pod["metadata"]["labels"] = serde_json::json!({"visit": format!("{visits}")});
                pod["spec"]["terminationGracePeriodSeconds"] = serde_json::json!(2);
                world.add(&pod);
            }
        }
        std::thread::sleep(Duration::from_millis(rng.random_range(20..1800)));
        agent.kill9();
        look_for_duplicates(&world);
        // A quarter of the time the dead store is looked at, and counts never go back.
        if kill % 4 == 3 {
            look_at_counts(&world, &mut counts);
        }
    }
    let stormed = started.elapsed();

    let mut agent = world.start();
    let mut wanted: BTreeSet<(String, String)> = BTreeSet::new();
    for n in 0..2 {
        for container in ["a", "b"] {
            wanted.insert((format!("steady-{n}"), container.to_owned()));
        }
    }
    for n in &visitors {
        wanted.insert((format!("visitor-{n}"), "only".to_owned()));
    }
    world.wait_phase("once", "Failed");
    let calm = |what: &str| {
        within(Duration::from_secs(60), what, || {
            let mut running: Vec<_> = world
                .running()
                .into_iter()
                .map(|c| (c.pod, c.container))
                .filter(|(pod, _)| pod != "crash" && pod != "retry")
                .collect();
            running.sort();
            let expected: Vec<_> = wanted.iter().cloned().collect();
            if running == expected {
                Ok(())
            } else {
                Err(format!("{running:?} instead of {expected:?}"))
            }
        });
    };
    calm("exactly the wanted containers run");
    // One ready sandbox for each pod that runs or crashes, no other.
    within(Duration::from_secs(60), "no orphan sandboxes", || {
        let mut ready: Vec<String> = world
            .sandboxes()
            .into_iter()
            .filter(|(_, _, ready)| *ready)
            .map(|(pod, _, _)| pod)
            .collect();
        ready.sort();
        let mut expected: Vec<String> = wanted.iter().map(|(pod, _)| pod.clone()).collect();
        expected.push("crash".to_owned());
        if world.status("retry")?["phase"] == "Running" {
            expected.push("retry".to_owned());
        }
        expected.sort();
        expected.dedup();
        if ready == expected {
            Ok(())
        } else {
            Err(format!("{ready:?} instead of {expected:?}"))
        }
    });
    within(
        Duration::from_secs(60),
        "pods that left are forgotten",
        || {
            let dump = world.try_dump(&["pods"])?;
            let known: BTreeSet<&str> = dump["tables"]["pods"]
                .as_array()
                .ok_or("no table")?
                .iter()
                .filter_map(|row| row["name"].as_str())
                .collect();
            let gone = (0..VISITORS).filter(|n| !visitors.contains(n));
            let left: Vec<_> = gone
                .map(|n| format!("visitor-{n}-{NODE}"))
                .filter(|n| known.contains(&**n))
                .collect();
            if left.is_empty() {
                Ok(())
            } else {
                Err(format!("{left:?}"))
            }
        },
    );
    calm("exactly the wanted containers run on");

    // Pods that run on were started once; pods that run once ran once.
    for (pod, container) in [
        ("steady-0", "a"),
        ("steady-0", "b"),
        ("steady-1", "a"),
        ("steady-1", "b"),
    ] {
        let (starts, _) = starts(&world, pod, container);
        assert_eq!(starts.len(), 1, "starts of {pod}.{container}: {starts:?}");
    }
    for container in ["good", "bad"] {
        let (starts, cut_off) = starts(&world, "once", container);
        assert_eq!(
            starts.len() + cut_off.len(),
            1,
            "starts of once.{container}: {starts:?}, cut off {cut_off:?}"
        );
    }
    // Each start has a number of its own, and none was lost.
    for pod in ["crash", "retry"] {
        let marks = within(Duration::from_secs(60), "it has run", || {
            let marks: Vec<u64> = world
                .lines(&mark(pod, "only"))
                .iter()
                .map(|line| line.parse().unwrap())
                .collect();
            if marks.is_empty() {
                Err("no mark".to_owned())
            } else {
                Ok(marks)
            }
        });
        assert!(
            marks.windows(2).all(|w| w[0] < w[1]),
            "attempts of {pod}: {marks:?}"
        );
        let count = world.container_status(pod, "only").unwrap()["restartCount"].clone();
        assert!(
            count.as_u64() >= marks.last().copied(),
            "{pod} has started {marks:?} and counts {count}"
        );
        println!("{pod}: attempts {marks:?}, restartCount {count}");
        for (what, why) in world.journal(pod) {
            println!("  {what}: {why}");
        }
    }
    let (retried, _) = starts(&world, "retry", "only");
    let successes = retried.iter().filter(|&&attempt| attempt >= 2).count();
    assert!(
        successes <= 1,
        "a container that succeeded ran again: {retried:?}"
    );
    look_at_counts(&world, &mut counts);

    assert!(agent.terminate().0.success());
    println!(
        "{KILLS} kills and {visits} visits in {stormed:?}, calm after {:?}",
        started.elapsed()
    );
    assert!(
        started.elapsed() < Duration::from_secs(240),
        "the storm took too long"
    );
}

/// Attempts that left a mark, and attempts that the runtime gave up while it was starting them, because the
/// agent that had asked was killed. Those may have left a mark before they were killed: they do not count.
fn starts(world: &World, pod: &str, container: &str) -> (Vec<u32>, Vec<u32>) {
    let cut_off: Vec<u32> = world
        .containers()
        .into_iter()
        .filter(|c| c.pod == pod && c.container == container && !c.running)
        .filter(|c| world.inspect(&c.id).reason == "StartError")
        .map(|c| c.attempt)
        .collect();
    let marks = world.lines(&mark(pod, container));
    let starts = marks
        .iter()
        .map(|line| line.parse().unwrap())
        .filter(|attempt| !cut_off.contains(attempt))
        .collect();
    (starts, cut_off)
}

/// Nothing runs twice, at no moment.
fn look_for_duplicates(world: &World) {
    let mut seen = BTreeSet::new();
    for c in world.running() {
        assert!(
            seen.insert((c.pod.clone(), c.container.clone())),
            "{} of {} runs twice",
            c.container,
            c.pod
        );
    }
}

/// Restart counts, by container record: they never go back while the pod is the same.
fn look_at_counts(world: &World, counts: &mut BTreeMap<String, u64>) {
    let dump = world.dump(&["containers"]);
    assert_eq!(dump["quarantined"], serde_json::json!([]), "{dump}");
    for row in dump["tables"]["containers"].as_array().expect("rows") {
        let key = row["key"].as_str().expect("a key").to_owned();
        let count = row["restartCount"].as_u64().expect("a count");
        let last = counts.insert(key.clone(), count).unwrap_or(0);
        assert!(
            count >= last,
            "restart count of {key} went from {last} to {count}"
        );
    }
}
