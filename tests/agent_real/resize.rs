//! Pods of an API server are resized as a whole, and init containers while they run; the agent is killed at each step.
//!
//! The API server is the one in memory: real ones take a resize of a pod as a whole from 1.36 on.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::process::ExitStatusExt as _;
use std::time::{Duration, Instant};

use holdfast_testkit::containerd::{BUSYBOX, Version};
use holdfast_testkit::fake_api::{FakeApi, Served};
use k8s_openapi::api::core::v1::{Pod, ResourceRequirements};
use serde_json::{Value, json};

use crate::agent_process::{Agent, NODE, PATIENCE, cgroup_dirs, eventually};
use crate::world::{FOREVER, Seen, World};

/// Time in which an agent starts and finishes the resize that the death of another one cut off; pods are synced each minute.
const SOON: Duration = Duration::from_secs(20);

/// A node of a cluster.
struct Node {
    world: World,
    api: FakeApi,
    _served: Served,
    kubeconfig: String,
    _rt: tokio::runtime::Runtime,
}

impl Node {
    fn new() -> Self {
        let world = World::new(Version::Installed);
        let rt = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let guard = rt.enter();
        let api = FakeApi::new();
        drop(guard);
        api.create_json(json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"name": "kubernetes", "namespace": "default"},
            "spec": {"clusterIP": "10.0.0.1", "ports": [{"port": 443}]},
        }));
        api.create_json(json!({
            "apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": {"name": "default", "namespace": "default"},
        }));
        let any = (Ipv4Addr::LOCALHOST, 0).into();
        let served = rt.block_on(api.serve(any)).unwrap();
        let path = world.dir().join("kubeconfig");
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": served.url()}}],
            "users": [{"name": "c", "user": {"token": format!("node:{NODE}")}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
        });
        fs::write(&path, config.to_string()).unwrap();
        Self {
            world,
            api,
            _served: served,
            kubeconfig: path.to_string_lossy().into_owned(),
            _rt: rt,
        }
    }

    fn start(&self) -> Agent {
        self.world.start_with(&["--kubeconfig", &self.kubeconfig])
    }

    fn create(&self, name: &str, mut spec: Value) {
        spec["nodeName"] = NODE.into();
        spec["serviceAccountName"] = "default".into();
        spec["hostNetwork"] = true.into();
        spec["terminationGracePeriodSeconds"] = 2.into();
        self.api.create_json(json!({
            "apiVersion": "v1", "kind": "Pod", "spec": spec,
            "metadata": {"name": name, "namespace": "default"},
        }));
    }

    fn pod(&self, name: &str) -> Value {
        self.api.get_json("pods", "default", name).unwrap()
    }

    fn wait_container(&self, pod: &str, container: &str) -> Seen {
        eventually(&format!("{container} of {pod} runs"), || {
            self.world.try_one(pod, container)
        })
    }

    /// Memory limit and CPU quota of the pod's cgroup, or of a container's below it.
    fn in_force(&self, pod: &str, container: Option<&Seen>) -> [String; 2] {
        let uid = self.pod(pod)["metadata"]["uid"]
            .as_str()
            .unwrap()
            .to_owned();
        let mut path = format!("{}/kubepods/burstable/pod{uid}", self.world.cgroup());
        if let Some(container) = container {
            path = format!("{path}/{}", container.id);
        }
        let dirs = cgroup_dirs(&path);
        // Of cgroup v1, and of v2.
        let files = [
            ["memory.limit_in_bytes", "memory.max"],
            ["cpu.cfs_quota_us", "cpu.max"],
        ];
        files.map(|names| {
            let mut all = dirs.iter().flat_map(|dir| names.map(|name| dir.join(name)));
            let text = all.find_map(|file| fs::read_to_string(file).ok());
            let text = text.unwrap_or_else(|| format!("nothing in {dirs:?}"));
            text.split_whitespace()
                .next()
                .unwrap_or_default()
                .to_owned()
        })
    }

    fn wait_in_force(&self, pod: &str, container: Option<&Seen>, wanted: &[String; 2]) {
        eventually(&format!("{wanted:?} are in force in {pod}"), || {
            let found = self.in_force(pod, container);
            (found == *wanted)
                .then_some(())
                .ok_or_else(|| format!("{found:?}"))
        });
    }

    /// Waits until a pod is shown with this memory limit as a whole, and with no resize.
    fn wait_shown(&self, pod: &str, memory: &str) {
        eventually(&format!("{pod} is shown with {memory}"), || {
            let status = self.pod(pod)["status"].clone();
            let text = status["conditions"].to_string();
            let is_shown = status["resources"]["limits"]["memory"] == memory;
            (is_shown && !text.contains("PodResize"))
                .then_some(())
                .ok_or_else(|| status.to_string())
        });
    }
}

fn container(name: &str) -> Value {
    json!({
        "name": name, "image": BUSYBOX, "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", FOREVER],
    })
}

/// Sizes of a pod: memory in MiB and hundredths of a CPU.
type Size = (u64, u64);

fn resources((memory, cpu): Size) -> Value {
    json!({
        "requests": {"cpu": "50m", "memory": "32Mi"},
        "limits": {"cpu": format!("{}m", cpu * 10), "memory": format!("{memory}Mi")},
    })
}

/// As the kernel shows a size.
fn limits((memory, cpu): Size) -> [String; 2] {
    [(memory << 20).to_string(), (cpu * 1000).to_string()]
}

fn of(value: Value) -> Option<ResourceRequirements> {
    serde_json::from_value(value).unwrap()
}

#[test]
fn a_resize_of_a_pod_as_a_whole_survives_a_kill_at_each_step() {
    const SMALL: Size = (64, 20);
    let node = Node::new();
    let agent = node.start();
    let mut own = container("own");
    own["resources"] = json!({"limits": {"cpu": "100m", "memory": "48Mi"}});
    node.create(
        "whole",
        json!({"resources": resources(SMALL), "containers": [container("main"), own]}),
    );
    let main = node.wait_container("whole", "main");
    let other = node.wait_container("whole", "own");
    node.wait_in_force("whole", None, &limits(SMALL));
    node.wait_in_force("whole", Some(&main), &limits(SMALL));
    node.wait_shown("whole", "64Mi");
    agent.kill9();
    let points = [
        ("before_cgroups", (128, 40)),
        ("after_sandbox", (96, 30)),
        ("after_grow", (160, 50)),
        ("after_update", (80, 25)),
        ("after_shrink", (192, 60)),
    ];
    for (point, size) in points {
        let die_at = format!("pod_workers::resize::{point}");
        let flags = ["--kubeconfig", &node.kubeconfig];
        let mut agent = (node.world).spawn_with(&flags, &[("HOLDFAST_DIE_AT", &die_at)]);
        node.api.modify("default", "whole", |pod: &mut Pod| {
            pod.spec.as_mut().unwrap().resources = of(resources(size));
        });
        let status = agent.wait_exit(PATIENCE);
        assert_eq!(status.signal(), Some(9), "{point}: {}", agent.log());
        let started = Instant::now();
        let agent = node.start();
        node.wait_in_force("whole", None, &limits(size));
        node.wait_in_force("whole", Some(&main), &limits(size));
        let took = started.elapsed();
        assert!(took < SOON, "{point}: {took:?}\n{}", agent.log());
        node.wait_shown("whole", &format!("{}Mi", size.0));
        node.wait_in_force("whole", Some(&other), &limits((48, 10)));
        let running = node.world.running();
        assert!(
            running.contains(&main) && running.contains(&other),
            "{point}: {running:?}"
        );
        assert_eq!(running.len(), 2, "{point}: {running:?}");
        agent.kill9();
    }
}

#[test]
fn an_init_container_is_resized_while_it_runs() {
    let node = Node::new();
    let agent = node.start();
    let mut init = container("init");
    init["resources"] = resources((64, 20));
    node.create(
        "starts",
        json!({"initContainers": [init], "containers": [container("main")]}),
    );
    let init = node.wait_container("starts", "init");
    node.wait_in_force("starts", Some(&init), &limits((64, 20)));
    agent.kill9();
    for size in [(128, 40), (96, 30)] {
        let die_at = [("HOLDFAST_DIE_AT", "pod_workers::resize::after_update")];
        let flags = ["--kubeconfig", &node.kubeconfig];
        let mut agent = node.world.spawn_with(&flags, &die_at);
        node.api.modify("default", "starts", |pod: &mut Pod| {
            let init = pod.spec.as_mut().unwrap().init_containers.as_mut().unwrap();
            init[0].resources = of(resources(size));
        });
        let status = agent.wait_exit(PATIENCE);
        assert_eq!(status.signal(), Some(9), "{}", agent.log());
        let started = Instant::now();
        let agent = node.start();
        node.wait_in_force("starts", Some(&init), &limits(size));
        let took = started.elapsed();
        assert!(took < SOON, "{took:?}\n{}", agent.log());
        eventually("the init container is shown with it", || {
            let status = node.pod("starts")["status"].clone();
            let limits = &status["initContainerStatuses"][0]["resources"]["limits"];
            (limits["memory"] == format!("{}Mi", size.0))
                .then_some(())
                .ok_or_else(|| status.to_string())
        });
        assert_eq!(node.world.running(), std::slice::from_ref(&init));
        agent.kill9();
    }
}
