//! A start of the agent on nodes that are as hostile as they may be, in combinations of everything that may be wrong.

use serde_json::json;

use super::hostile_node::{self, Combination};
use super::*;

/// How many combinations are tried: as many as this says, or a few.
const COUNT: &str = "HOLDFAST_TEST_HOSTILE";
/// Combinations of the gate, spread over all.
const FEW: usize = 4;
/// The first of them: from here on they have most levels, and in two of them the new pod runs.
const FIRST: usize = 8;

/// Content of a resolver configuration.
const RESOLVER: &str = "nameserver 192.0.2.1\n";

fn chosen() -> Vec<Combination> {
    match std::env::var(COUNT) {
        Ok(count) => hostile_node::combinations(count.parse().expect("a number")),
        Err(_) => {
            let all = hostile_node::pairwise();
            let step = all.len() / FEW;
            let spread = all.into_iter().skip(FIRST).step_by(step);
            spread.take(FEW).collect()
        }
    }
}

/// A pod on the node's network whose texts are odd.
fn manifest(text: &str) -> String {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "later", "annotations": {"odd": text}},
        "spec": {
            "hostNetwork": true,
            "containers": [{"name": "main", "image": IMAGE, "env": [
                {"name": "ODD", "value": text},
                {"name": "FROM", "valueFrom": {"fieldRef": {
                    "fieldPath": "metadata.annotations['odd']"}}},
            ]}],
        },
    })
    .to_string()
}

/// Whether a file of that kind keeps those waiting that need it. `missing` says whether one that is not there does.
fn blocks(kind: &str, missing: bool) -> bool {
    match kind {
        "directory" | "huge" => true,
        "missing" | "dangling" => missing,
        _ => false,
    }
}

/// The agent starts with pods on a good node, then again on a hostile one: the pods stay, and a new one runs or says what it
/// lacks.
fn run(combination: &Combination) {
    let of = |factor| combination.of(factor);
    hostile_node::apart(of("umask"));
    let node = Node::new(|_| Behaviour::RunForever);
    let site = &node.site;
    let resolver = site.dir().join("resolv.conf");
    fs::write(&resolver, RESOLVER).unwrap();
    // With cgroups, for which the table of mounts is read.
    site.configure(&format!("resolvConf: {}\n", resolver.display()));
    node.manifest("web", "Always");
    let agent = site.start();
    let before = node.wait_running(1);
    site.wait_phase("web", "Running");
    agent.kill9();

    let _mount = hostile_node::mount_at(of("mount"), &site.dir().join("mounts"));
    let _hosts = hostile_node::hosts(of("hosts"), &site.dir().join("etc"));
    hostile_node::place(of("resolver"), &resolver, RESOLVER);
    hostile_node::place(of("login"), &site.root_dir().join("config.json"), "{}");
    hostile_node::place(
        of("beside"),
        &site.manifests().join("beside.json"),
        "{\"apiVersion\": \"v1\"}",
    );
    let dirs = ["pods", "plugins", "plugins_registry"].map(|dir| site.root_dir().join(dir));
    let logs = [site.pod_logs(), site.container_logs()];
    hostile_node::strays(of("stray"), &[dirs.as_slice(), &logs].concat());

    let mut agent = site.spawn_odd(&hostile_node::environment(of("environment")));
    agent.wait_ready();
    assert_eq!(node.running(), before, "its pods stay");
    let new = site.dir().join("new.json");
    fs::write(&new, manifest(&hostile_node::text(of("text")))).unwrap();
    let name = hostile_node::name(of("manifest"), ".json");
    fs::rename(&new, site.manifests().join(name)).unwrap();
    if blocks(of("resolver"), true) {
        odd_node::wait_event(&node, "later", &["FailedCreatePodSandBox", "resolv.conf"]);
    } else if blocks(of("hosts"), false) {
        odd_node::wait_event(&node, "later", &["Failed", "/etc/hosts"]);
    } else {
        node.wait_running(2);
    }
    assert!(before.iter().all(|id| node.running().contains(id)));
    assert_eq!(agent.exited(), None, "{}", agent.log());
    agent.kill9();
}

#[test]
fn the_agent_starts_and_keeps_its_pods_on_a_hostile_node() {
    let rows = chosen();
    for (number, row) in rows.iter().enumerate() {
        println!("{number}: {row}");
        // Mounts and umask are the thread's.
        let done = std::thread::scope(|scope| scope.spawn(|| run(row)).join());
        if let Err(panic) = done {
            eprintln!("on a node with {row}");
            std::panic::resume_unwind(panic);
        }
    }
    println!("{} combinations", rows.len());
}

#[test]
fn any_two_things_that_may_be_wrong_meet() {
    let rows = hostile_node::pairwise();
    assert_eq!(hostile_node::met(&rows), hostile_node::every_pair());
    assert!((49..100).contains(&rows.len()), "{} rows", rows.len());
    assert_eq!(rows, hostile_node::pairwise(), "always the same");
    let many = hostile_node::combinations(200);
    assert_eq!(many.len(), 200);
    let distinct: BTreeSet<_> = many.iter().collect();
    assert_eq!(distinct.len(), 200);
}
