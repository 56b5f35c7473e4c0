//! What the agent costs: a hundred pods at once, at rest, and across a restart.
//!
//! Numbers of calls are limits of the test; times and sizes are printed beside theirs, since they depend on the build
//! and on what else the machine does. `make figures` runs this with the release binary and other numbers of pods.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, WatchEvent, WatchParams};
use serde_json::{Value, json};

use crate::agent_process::{Agent, eventually};
use crate::bare;
use crate::setup::{Cluster, FOREVER, condition, script};

/// CPU time of a process in seconds.
pub fn cpu(agent: &Agent) -> f64 {
    let stat = procfs::process::Process::new(i32::try_from(agent.pid()).unwrap())
        .and_then(|p| p.stat())
        .unwrap();
    let ticks = u32::try_from(stat.utime + stat.stime).unwrap();
    f64::from(ticks) / f64::from(u32::try_from(procfs::ticks_per_second()).unwrap())
}

/// Resident memory in MiB.
pub fn memory(agent: &Agent) -> u64 {
    let status = procfs::process::Process::new(i32::try_from(agent.pid()).unwrap())
        .and_then(|p| p.status())
        .unwrap();
    status.vmrss.unwrap() / 1024
}

/// Calls of the runtime so far, by operation.
fn operations(agent: &Agent) -> BTreeMap<String, u64> {
    let (_, text) = agent.get("/metrics").unwrap();
    let mut counts = BTreeMap::new();
    for line in text.lines() {
        let Some(rest) = line.strip_prefix("kubelet_runtime_operations_total{operation_type=\"")
        else {
            continue;
        };
        let (name, count) = rest.split_once("\"} ").unwrap();
        counts.insert(name.to_owned(), count.parse().unwrap());
    }
    counts
}

fn between(before: &BTreeMap<String, u64>, after: &BTreeMap<String, u64>, names: &[&str]) -> u64 {
    let of = |counts: &BTreeMap<String, u64>| -> u64 {
        names.iter().filter_map(|name| counts.get(*name)).sum()
    };
    of(after) - of(before)
}

/// What was counted since, in all and by name.
fn since<K: Ord>(
    before: &BTreeMap<K, u64>,
    after: BTreeMap<K, u64>,
    name: impl Fn(&K) -> String,
) -> String {
    let grown: Vec<(String, u64)> = after
        .iter()
        .map(|(key, count)| (name(key), count - before.get(key).unwrap_or(&0)))
        .filter(|(_, count)| *count > 0)
        .collect();
    let all: u64 = grown.iter().map(|(_, count)| count).sum();
    let each: Vec<String> = grown
        .iter()
        .map(|(name, count)| format!("{name} {count}"))
        .collect();
    format!("{all} ({})", each.join(", "))
}

const INSPECT: &[&str] = &["container_status", "podsandbox_status"];
const LIST: &[&str] = &["list_containers", "list_podsandbox"];

/// A server that ends when it is told to.
const SERVER: &str = "trap 'kill $!; exit 0' TERM; httpd -f -p 8080 & wait";

/// A container that serves, and is asked for it every 2 s and every 10 s.
fn probed() -> Value {
    let mut spec = script("Always", SERVER);
    let probe = |period: u32| json!({"tcpSocket": {"port": 8080}, "periodSeconds": period});
    spec["containers"][0]["readinessProbe"] = probe(2);
    spec["containers"][0]["livenessProbe"] = probe(10);
    spec
}

/// Creates pods and notes when each became Ready.
fn start_pods(cluster: &Cluster, count: usize, mut spec: Value) -> Vec<Duration> {
    let pods: Api<Pod> = cluster.api();
    spec["terminationGracePeriodSeconds"] = json!(1);
    spec["nodeName"] = json!(cluster.node);
    cluster.run(async {
        let params = WatchParams::default().timeout(290);
        let mut events = pods.watch(&params, "0").await.unwrap().boxed();
        let start = Instant::now();
        let all: Vec<Pod> = (0..count)
            .map(|n| {
                let pod = json!({"metadata": {"name": format!("p-{n}")}, "spec": spec});
                serde_json::from_value(pod).unwrap()
            })
            .collect();
        let parameters = kube::api::PostParams::default();
        let creating =
            futures::future::try_join_all(all.iter().map(|pod| pods.create(&parameters, pod)));
        let watching = async {
            let mut ready = BTreeMap::new();
            while ready.len() < count {
                let event = events.next().await.expect("the watch goes on").unwrap();
                if let WatchEvent::Modified(pod) = event {
                    let name = pod.metadata.name.clone().unwrap();
                    let pod = serde_json::to_value(pod).unwrap();
                    if condition(&pod, "Ready")["status"] == "True" {
                        ready.entry(name).or_insert_with(|| start.elapsed());
                    }
                }
            }
            let mut times: Vec<Duration> = ready.into_values().collect();
            times.sort();
            times
        };
        let (created, times) = futures::join!(creating, watching);
        created.unwrap();
        times
    })
}

/// What clients saw change of pods and node: Ready conditions with their times.
fn readiness(cluster: &Cluster) -> BTreeMap<String, Value> {
    let pods = cluster.pods().into_iter();
    let mut all: BTreeMap<String, Value> = pods
        .filter(|pod| pod["metadata"]["name"].as_str().unwrap().starts_with("p-"))
        .map(|pod| {
            (
                pod["metadata"]["name"].to_string(),
                condition(&pod, "Ready"),
            )
        })
        .collect();
    let node = cluster.get_node().unwrap();
    for kind in ["Ready", "MemoryPressure", "DiskPressure", "PIDPressure"] {
        let condition = condition(&node, kind);
        let told = json!([condition["status"], condition["lastTransitionTime"]]);
        all.insert(format!("node {kind}"), told);
    }
    all
}

fn measure(count: usize, probes: bool) {
    let cluster = Cluster::new();
    // A node without a resolver of the cluster has one more event to tell of each pod.
    cluster
        .site
        .configure("maxPods: 250\nclusterDNS: [10.96.0.10]\nclusterDomain: cluster.local\n");
    let (spec, kind, program) = if probes {
        (probed(), "pods with probes", SERVER)
    } else {
        (script("Always", FOREVER), "pods", FOREVER)
    };
    let asked = std::env::var_os("HOLDFAST_FIGURES").is_some();
    let bare = asked.then(|| {
        let mut one: Vec<_> = (0..5)
            .flat_map(|_| bare::start_pods(&cluster, 1, program))
            .collect();
        one.sort();
        println!(
            "the runtime alone, straight over CRI: one pod {:.2} s (median of {})",
            one[one.len() / 2].as_secs_f64(),
            one.len()
        );
        let times = bare::start_pods(&cluster, count, program);
        // ext4 looks longer for a free inode as long as others nearby were freed less than a minute ago, or less than
        // six minutes ago and not written to the disk yet.
        nix::unistd::sync();
        std::thread::sleep(Duration::from_secs(65));
        (
            times[count - 1].as_secs_f64(),
            times[count / 2].as_secs_f64(),
        )
    });
    let agent = cluster.join();
    let (calls, requests) = (operations(&agent), cluster.proxy.counts());
    let busy = cpu(&agent);
    let times = start_pods(&cluster, count, spec);
    let (all, half) = (
        times[count - 1].as_secs_f64(),
        times[count / 2].as_secs_f64(),
    );
    println!(
        "{count} {kind} created at once: all Ready after {all:.1} s (limit 12), p50 {half:.1} s (limit 7), agent {:.2} CPU-s (limit 1.5)",
        cpu(&agent) - busy,
    );
    if let Some((bare, bare_half)) = bare {
        println!(
            "the runtime alone, straight over CRI: all after {bare:.1} s, p50 {bare_half:.1} s; above are {:.2} and {:.2} times that (limits 1.4 and 1.6)",
            all / bare,
            half / bare_half,
        );
    }
    println!(
        "for it calls of the runtime: {}",
        since(&calls, operations(&agent), Clone::clone)
    );
    println!(
        "for it requests to the API server: {}",
        since(&requests, cluster.proxy.counts(), |(verb, resource)| {
            format!("{verb} {resource}")
        })
    );
    let told = || {
        let dump = cluster.try_dump(&["statuses"])?;
        let rows = dump["tables"]["statuses"].as_array().unwrap().clone();
        match rows.iter().find(|r| r["version"] != r["acknowledged"]) {
            None => Ok(()),
            Some(row) => Err(row.to_string()),
        }
    };
    eventually("everything is told", told);
    std::thread::sleep(Duration::from_secs(5));

    let (busy, calls) = (cpu(&agent), operations(&agent));
    std::thread::sleep(Duration::from_secs(20));
    let after = operations(&agent);
    let (inspected, listed) = (
        between(&calls, &after, INSPECT),
        between(&calls, &after, LIST),
    );
    println!(
        "steady: {} MiB (limit 40), {:.1} % of a core (limit 2.5); in 20 s ContainerStatus+PodSandboxStatus {inspected} (limit 10), List {listed} (limit 42)",
        memory(&agent),
        (cpu(&agent) - busy) / 20.0 * 100.0,
    );
    assert!(inspected <= 10 && listed <= 42, "{calls:?} {after:?}");
    cluster.proxy.reset();
    std::thread::sleep(Duration::from_secs(60));
    let counts = cluster.proxy.counts();
    let requests: u64 = counts.values().sum();
    println!("idle minute: {requests} requests to the API server (limit 8)");
    assert!(requests <= 8, "{counts:?}");
    assert_eq!(cluster.proxy.count("LIST", "pods"), 0);

    let before = (
        readiness(&cluster),
        crate::world::ids(&cluster.containers()),
    );
    agent.kill9();
    cluster.delete_pod("p-0", 1);
    cluster.create_pod("meanwhile", script("Always", FOREVER));
    cluster.proxy.reset();
    let start = Instant::now();
    let agent = cluster.spawn_agent(&[]);
    let mut ran = None;
    let mut gone = None;
    while ran.is_none() || gone.is_none() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "{ran:?} {gone:?}"
        );
        // Who asks without pause takes a core from those who are measured.
        std::thread::sleep(Duration::from_millis(10));
        if ran.is_none() && cluster.pod("meanwhile")["status"]["phase"] == "Running" {
            ran = Some(start.elapsed());
        }
        if gone.is_none() && cluster.try_pod("p-0").is_none() {
            gone = Some(start.elapsed());
        }
    }
    std::thread::sleep(Duration::from_secs(40).saturating_sub(start.elapsed()));
    let calls = operations(&agent);
    let inspected = between(&BTreeMap::new(), &calls, INSPECT);
    let requests = cluster.proxy.requests();
    let untouched = |verb: &str, resource: &str| {
        let of = requests.iter().filter(|r| r.is(verb, resource));
        of.filter(|r| {
            !r.path.contains("/meanwhile") && !r.path.contains("/p-0/") && !r.path.ends_with("/p-0")
        })
        .count()
    };
    let (gets, patches) = (untouched("GET", "pods"), untouched("PATCH", "pods/status"));
    println!(
        "restart: a pod created meanwhile ran after {:.2} s (limit 0.8), one deleted meanwhile was gone after {:.2} s (limit 2); \
         ContainerStatus+PodSandboxStatus {inspected} (limit 20), GET pods {gets}, PATCH pods/status {patches} of others (limit 0); \
         agent {:.2} CPU-s in 40 s (limit 0.8)",
        ran.unwrap().as_secs_f64(),
        gone.unwrap().as_secs_f64(),
        cpu(&agent),
    );
    let (mut ready, mut containers) = before;
    ready.remove("\"p-0\"");
    containers.remove(&("p-0".to_owned(), "main".to_owned()));
    assert_eq!(
        readiness(&cluster),
        ready,
        "readiness or node condition changed"
    );
    let mut now = crate::world::ids(&cluster.containers());
    now.remove(&("meanwhile".to_owned(), "main".to_owned()));
    now.remove(&("p-0".to_owned(), "main".to_owned()));
    assert_eq!(now, containers, "a container was restarted");
    assert_eq!((gets, patches), (0, 0), "{:?}", cluster.proxy.counts());
    assert!(inspected <= 20, "{calls:?}");
}

/// Numbers of pods, comma-separated, from the environment.
fn counts() -> Vec<usize> {
    let counts = std::env::var("HOLDFAST_FIGURES").unwrap_or_else(|_| "25".to_owned());
    let number = |count: &str| count.parse().expect("numbers of pods, comma-separated");
    counts.split(',').map(number).collect()
}

/// With probes, of which each pod has two; where figures are asked for, without them too.
#[test]
fn figures_of_pods_at_once_at_rest_and_across_a_restart() {
    for count in counts() {
        measure(count, true);
        if std::env::var_os("HOLDFAST_FIGURES").is_some() {
            measure(count, false);
        }
    }
}
