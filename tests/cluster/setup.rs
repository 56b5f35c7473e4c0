//! A cluster with one node: API server, proxy, runtime, and a place for the agent.

use std::fmt::Debug;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use holdfast_testkit::containerd::{BUSYBOX, Version};
use holdfast_testkit::envtest::{DAY, EnvTest, unique_name};
use holdfast_testkit::fault_proxy::FaultProxy;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use kube::api::{
    Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams,
};
use serde_json::{Value, json};

use crate::agent_process::{Agent, PATIENCE, eventually, within};
use crate::world::{Seen, World};

/// Fields are dropped in this order: the agents of a test are its own, then runtime, proxy and cluster go.
pub struct Cluster {
    pub world: World,
    pub proxy: FaultProxy,
    pub node: String,
    pub namespace: String,
    pub kubeconfig: PathBuf,
    client: kube::Client,
    rt: tokio::runtime::Runtime,
    pub env: Arc<EnvTest>,
}

impl Deref for Cluster {
    type Target = World;

    fn deref(&self) -> &World {
        &self.world
    }
}

impl Cluster {
    pub fn new() -> Self {
        Self::on(Version::Installed, EnvTest::shared())
    }

    /// With a runtime of the caller's choice.
    pub fn on_runtime(version: Version) -> Self {
        Self::on(version, EnvTest::shared())
    }

    /// With an API server of its own, for tests that stop it or turn it back.
    pub fn alone() -> Self {
        Self::on(Version::Installed, Arc::new(EnvTest::start()))
    }

    /// On the API server of the caller's choice.
    pub fn with(env: Arc<EnvTest>) -> Self {
        Self::on(Version::Installed, env)
    }

    fn on(version: Version, env: Arc<EnvTest>) -> Self {
        let unique = unique_name();
        let (node, namespace) = (format!("node-{unique}"), format!("test-{unique}"));
        let world = World::new(version);
        env.namespace(&namespace);
        let proxy = env.fault_proxy(&node);
        let kubeconfig = env.node_kubeconfig_with(&node, &proxy.url(), DAY);
        let rt = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime for the administrator");
        let client = rt.block_on(async { env.admin_client() });
        Self {
            world,
            proxy,
            node,
            namespace,
            kubeconfig,
            client,
            rt,
            env,
        }
    }

    /// Starts an agent and waits until it is ready; not until the node is.
    pub fn start(&self) -> Agent {
        self.start_with(&[])
    }

    pub fn start_with(&self, more: &[&str]) -> Agent {
        let mut agent = self.spawn_agent(more);
        agent.wait_ready();
        agent
    }

    pub fn spawn_agent(&self, more: &[&str]) -> Agent {
        self.spawn_agent_with(more, &[])
    }

    /// As [`Self::spawn_agent`] with more environment variables.
    pub fn spawn_agent_with(&self, more: &[&str], environment: &[(&str, &str)]) -> Agent {
        let kubeconfig = self.kubeconfig.to_string_lossy();
        let mut flags = vec![
            "--kubeconfig",
            &kubeconfig,
            "--hostname-override",
            &self.node,
        ];
        flags.extend(more);
        let evict = self.evict_file();
        let evict = evict.to_string_lossy();
        let mut all = vec![("HOLDFAST_EVICT", &*evict)];
        all.extend(environment);
        self.world.site.spawn_with(&flags, &all)
    }

    fn evict_file(&self) -> PathBuf {
        self.dir().join("evict")
    }

    /// Makes the running agent decide to evict a pod. Needs the feature `failpoints`.
    pub fn evict(&self, pod: &str) {
        let hidden = self.dir().join("evict.new");
        std::fs::write(&hidden, pod).expect("write what is to be evicted");
        std::fs::rename(&hidden, self.evict_file()).expect("say what is to be evicted");
    }

    /// Ends what [`Self::evict`] began: a later agent decides nothing of the kind.
    pub fn evict_no_more(&self) {
        std::fs::remove_file(self.evict_file()).expect("end the evictions");
    }

    /// Starts an agent and waits until its node is Ready in the API.
    pub fn join(&self) -> Agent {
        self.join_with(&[])
    }

    /// As [`Self::join`] with more environment variables.
    pub fn join_with(&self, environment: &[(&str, &str)]) -> Agent {
        let mut agent = self.spawn_agent_with(&[], environment);
        agent.wait_ready();
        self.wait_node_ready();
        eventually("the node's status is on record", || {
            let dump = self.try_dump(&["node"])?;
            let reported = &dump["tables"]["node"][0]["reported"];
            let ready = reported.to_string().contains("KubeletReady");
            if ready {
                Ok(())
            } else {
                Err(reported.to_string())
            }
        });
        self.site.recorded();
        agent
    }

    pub fn wait_node_ready(&self) -> Value {
        eventually("the node is Ready", || {
            let node = self.get_node().ok_or("there is no node")?;
            match condition(&node, "Ready")["status"].as_str() {
                Some("True") => Ok(node),
                other => Err(format!(
                    "Ready is {other:?}: {}",
                    node["status"]["conditions"]
                )),
            }
        })
    }

    pub fn run<T>(&self, future: impl Future<Output = T>) -> T {
        self.rt.block_on(future)
    }

    /// Runs something beside the test, until it is aborted or the cluster dropped.
    pub fn spawn(
        &self,
        future: impl Future<Output = ()> + Send + 'static,
    ) -> tokio::task::JoinHandle<()> {
        self.rt.spawn(future)
    }

    pub fn client(&self) -> kube::Client {
        self.client.clone()
    }

    /// The administrator's access to a kind in the test's namespace.
    pub fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub fn create<K>(&self, object: Value) -> K
    where
        K: kube::Resource<Scope = NamespaceResourceScope>
            + Clone
            + Debug
            + serde::de::DeserializeOwned
            + serde::Serialize,
        K::DynamicType: Default,
    {
        let object: K = serde_json::from_value(object).expect("an object");
        self.run(self.api::<K>().create(&PostParams::default(), &object))
            .expect("create an object")
    }

    /// Creates a pod on the node from its spec. Returns its UID.
    pub fn create_pod(&self, name: &str, spec: Value) -> String {
        self.create_pod_with(name, json!({}), spec)
    }

    pub fn create_pod_with(&self, name: &str, metadata: Value, spec: Value) -> String {
        let mut object = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec,
        });
        object["metadata"]["name"] = json!(name);
        object["spec"]["nodeName"] = json!(self.node);
        let pod: Pod = self.create(object);
        pod.metadata.uid.expect("a UID")
    }

    pub fn try_pod(&self, name: &str) -> Option<Value> {
        let pod = self
            .run(self.api::<Pod>().get_opt(name))
            .expect("get a pod");
        pod.map(|pod| serde_json::to_value(pod).expect("JSON"))
    }

    #[track_caller]
    pub fn pod(&self, name: &str) -> Value {
        self.try_pod(name)
            .unwrap_or_else(|| panic!("there is no pod {name}"))
    }

    pub fn pods(&self) -> Vec<Value> {
        let pods = self
            .run(self.api::<Pod>().list(&ListParams::default()))
            .expect("list pods");
        pods.into_iter()
            .map(|pod| serde_json::to_value(pod).expect("JSON"))
            .collect()
    }

    #[track_caller]
    pub fn wait_pod(&self, name: &str, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        eventually(&format!("pod {name} {what}"), || {
            let pod = self.try_pod(name).ok_or("it is gone")?;
            if holds(&pod) {
                Ok(pod)
            } else {
                Err(pod["status"].to_string())
            }
        })
    }

    #[track_caller]
    pub fn wait_running(&self, name: &str) -> Value {
        self.wait_pod(name, "is Running and Ready", |pod| {
            pod["status"]["phase"] == "Running" && condition(pod, "Ready")["status"] == "True"
        })
    }

    #[track_caller]
    pub fn wait_pod_phase(&self, name: &str, phase: &str) -> Value {
        self.wait_pod(name, &format!("is {phase}"), |pod| {
            pod["status"]["phase"] == phase
        })
    }

    #[track_caller]
    pub fn wait_gone(&self, name: &str, patience: Duration) {
        within(patience, &format!("pod {name} is gone"), || {
            match self.try_pod(name) {
                None => Ok(()),
                Some(pod) => Err(format!("{} {}", pod["metadata"], pod["status"])),
            }
        });
    }

    pub fn delete_pod(&self, name: &str, grace: u32) {
        let parameters = DeleteParams::default().grace_period(grace);
        self.run(self.api::<Pod>().delete(name, &parameters))
            .expect("delete a pod");
    }

    pub fn get_node(&self) -> Option<Value> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let node = self.run(nodes.get_opt(&self.node)).expect("get the node");
        node.map(|node| serde_json::to_value(node).expect("JSON"))
    }

    pub fn patch_node(&self, patch: Value) {
        let nodes: Api<Node> = Api::all(self.client.clone());
        self.run(nodes.patch(&self.node, &PatchParams::default(), &Patch::Merge(patch)))
            .expect("patch the node");
    }

    /// Follows what the API server shows of the test's pods from now on, change by change, as a client does that
    /// watches them.
    pub fn follow(&self) -> Followed {
        let pods: Api<Pod> = self.api();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let told = Arc::clone(&seen);
        let begun = Arc::new(tokio::sync::Notify::new());
        let begins = Arc::clone(&begun);
        let task = self.rt.spawn(async move {
            let list = pods.list(&ListParams::default()).await.expect("list pods");
            let version = list.metadata.resource_version.unwrap_or_default();
            let note = |pod: &Pod| {
                let pod = serde_json::to_value(pod).expect("JSON");
                told.lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(pod);
            };
            list.items.iter().for_each(note);
            let parameters = WatchParams::default().timeout(290);
            let watch = pods.watch(&parameters, &version).await;
            let mut events = watch.expect("watch pods").boxed();
            begins.notify_one();
            while let Some(event) = events.next().await {
                match event.expect("the watch goes on") {
                    WatchEvent::Added(pod) | WatchEvent::Modified(pod) => note(&pod),
                    WatchEvent::Deleted(_) | WatchEvent::Bookmark(_) => {}
                    WatchEvent::Error(error) => panic!("watch pods: {error:?}"),
                }
            }
        });
        let begins = async { tokio::time::timeout(PATIENCE, begun.notified()).await };
        self.run(begins).expect("the watch begins in time");
        Followed { seen, task }
    }

    /// Name of a static pod in the API.
    pub fn mirror(&self, name: &str) -> String {
        format!("{name}-{}", self.node)
    }

    /// The only row of a table about a pod, by its name in the API.
    pub fn row(&self, table: &str, pod: &str) -> Result<Value, String> {
        let dump = self.try_dump(&[table])?;
        let rows = dump["tables"][table].as_array().ok_or("no such table")?;
        let mut rows = rows.iter().filter(|row| row["name"] == pod);
        match (rows.next(), rows.next()) {
            (Some(row), None) => Ok(row.clone()),
            (None, _) => Err(format!("{table} has no row of {pod}")),
            (Some(_), Some(_)) => Err(format!("{table} has several rows of {pod}")),
        }
    }

    /// Waits until the API server has acknowledged the newest status of pods, and all of it is on disk.
    #[track_caller]
    pub fn wait_told(&self, pods: &[&str]) {
        eventually("everything is told", || {
            for pod in pods {
                let row = self.row("statuses", pod)?;
                if row["version"] != row["acknowledged"] {
                    return Err(row.to_string());
                }
            }
            Ok(())
        });
        self.site.recorded();
    }

    /// Writes of statuses since the proxy counts, of pods by their names.
    pub fn status_writes(&self, pods: &[&str]) -> usize {
        let requests = self.proxy.requests();
        let writes = requests.iter().filter(|r| r.is("PATCH", "pods/status"));
        let of = |path: &str| {
            pods.iter()
                .any(|pod| path.ends_with(&format!("/{pod}/status")))
        };
        writes.filter(|r| of(&r.path)).count()
    }

    /// Reason and message of the events about a pod.
    pub fn events_of(&self, pod: &str) -> Vec<(String, String)> {
        let parameters = ListParams::default().fields(&format!("involvedObject.name={pod}"));
        let events = self
            .run(self.api::<Event>().list(&parameters))
            .expect("list events");
        let text = |text: Option<String>| text.unwrap_or_default();
        events
            .into_iter()
            .map(|event| (text(event.reason), text(event.message)))
            .collect()
    }

    #[track_caller]
    pub fn wait_event(&self, pod: &str, reason: &str, words: &str) -> String {
        eventually(
            &format!("pod {pod} has an event {reason} with {words:?}"),
            || {
                let events = self.events_of(pod);
                let found = events
                    .iter()
                    .find(|(r, message)| r == reason && message.contains(words));
                found
                    .map(|(_, message)| message.clone())
                    .ok_or_else(|| format!("{events:?}"))
            },
        )
    }

    /// What kubectl prints as administrator; panics when it fails.
    #[track_caller]
    pub fn kubectl(&self, arguments: &[&str]) -> String {
        let mut all = vec!["-n", &self.namespace];
        all.extend(arguments);
        self.env.kubectl_ok(&all)
    }

    /// Running containers of this test's pods.
    pub fn running_containers(&self) -> Vec<Seen> {
        self.world.running()
    }
}

/// See [`Cluster::follow`].
pub struct Followed {
    seen: Arc<Mutex<Vec<Value>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Followed {
    /// What was shown of a pod, oldest first, beginning with what was shown at the beginning.
    #[track_caller]
    pub fn of(&self, pod: &str) -> Vec<Value> {
        assert!(!self.task.is_finished(), "pods are not watched any more");
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let of = seen.iter().filter(|p| p["metadata"]["name"] == pod);
        of.cloned().collect()
    }

    /// Fails when a pod was ever shown otherwise than at the beginning, in a condition (its time included) or in
    /// the identity, count or readiness of a container.
    #[track_caller]
    pub fn assert_steady(&self, pod: &str) {
        let steady = |pod: &Value| {
            let containers = ["initContainerStatuses", "containerStatuses"]
                .into_iter()
                .flat_map(|kind| pod["status"][kind].as_array().into_iter().flatten())
                .map(|c| {
                    json!([
                        c["name"],
                        c["containerID"],
                        c["restartCount"],
                        c["ready"],
                        c["started"],
                        c["state"],
                        c["lastState"]
                    ])
                })
                .collect::<Vec<_>>();
            let conditions = ["Initialized", "Ready", "ContainersReady", "PodScheduled"]
                .map(|kind| condition(pod, kind))
                .map(|c| json!([c["status"], c["reason"], c["lastTransitionTime"]]));
            json!({"phase": pod["status"]["phase"], "containers": containers, "conditions": conditions})
        };
        let seen = self.of(pod);
        let first = steady(seen.first().expect("the pod was there"));
        for other in &seen[1..] {
            assert_eq!(steady(other), first, "{pod} was shown otherwise meanwhile");
        }
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A condition of a pod or node by its type; `null` when it has none.
pub fn condition(object: &Value, kind: &str) -> Value {
    let conditions = object["status"]["conditions"].as_array();
    let mut conditions = conditions.into_iter().flatten();
    let found = conditions.find(|c| c["type"] == kind);
    found.cloned().unwrap_or(Value::Null)
}

/// A pod of one container that runs a shell script.
pub fn script(policy: &str, script: &str) -> Value {
    json!({
        "restartPolicy": policy,
        "terminationGracePeriodSeconds": 2,
        "containers": [container("main", script)],
    })
}

pub fn container(name: &str, script: &str) -> Value {
    json!({
        "name": name,
        "image": BUSYBOX,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", script],
    })
}

/// Runs until it is told to end.
pub const FOREVER: &str = "trap 'exit 0' TERM; while :; do sleep 1; done";

/// A container of a pod's status, of whatever kind; `null` when there is none.
pub fn container_status(pod: &Value, name: &str) -> Value {
    let found = ["containerStatuses", "initContainerStatuses"]
        .into_iter()
        .flat_map(|kind| pod["status"][kind].as_array().into_iter().flatten())
        .find(|c| c["name"] == name);
    found.cloned().unwrap_or(Value::Null)
}

/// Seconds since 1970 of a time in a status.
#[track_caller]
pub fn seconds(time: &Value) -> i64 {
    let text = time.as_str().unwrap_or_else(|| panic!("{time} is no time"));
    let time: jiff::Timestamp = text.parse().expect("a time");
    time.as_second()
}

impl Cluster {
    /// Lets all containers of a pod leave marks in the directory that the test looks at, as `/starts`.
    pub fn marked(&self, mut spec: Value) -> Value {
        for kind in ["initContainers", "containers"] {
            for container in spec[kind].as_array_mut().into_iter().flatten() {
                container["volumeMounts"] = json!([{"name": "starts", "mountPath": "/starts"}]);
            }
        }
        spec["volumes"] = json!([{"name": "starts", "hostPath": {"path": self.starts()}}]);
        spec
    }

    /// Adds a static pod in the test's namespace. Returns its name in the API.
    pub fn add_static(&self, name: &str, spec: Value) -> String {
        self.world.add(&json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": self.namespace}, "spec": spec,
        }));
        self.mirror(name)
    }

    /// Takes away what a reboot takes away: everything that is mounted below the agent's directory.
    pub fn unmount_all(&self) {
        let root = self.root_dir();
        let mounts = String::from_utf8_lossy(
            &std::fs::read("/proc/self/mountinfo").expect("read the mount table"),
        )
        .into_owned();
        let mut below: Vec<&str> = mounts
            .lines()
            .filter_map(|line| line.split(' ').nth(4))
            .filter(|path| std::path::Path::new(path).starts_with(&root))
            .collect();
        below.sort_unstable();
        for path in below.into_iter().rev() {
            nix::mount::umount2(path, nix::mount::MntFlags::MNT_DETACH).expect("unmount");
        }
    }
}
