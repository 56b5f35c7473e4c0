//! A containerd of one's own, a place for an agent, and an outsider who looks at the runtime and tampers
//! with it behind the agent's back.

use std::collections::BTreeMap;
use std::ops::Deref;

use holdfast::kuberuntime::cri::v1;
use holdfast_testkit::containerd::{BUSYBOX, PrivateContainerd, Version};
use serde_json::{Value, json};
use tonic::transport::{Channel, Endpoint};
use v1::runtime_service_client::RuntimeServiceClient;

use crate::agent_process::{NODE, Site, eventually};

/// Fields are dropped in this order: containers end before their directories and cgroups go.
pub struct World {
    rt: tokio::runtime::Runtime,
    pub runtime: PrivateContainerd,
    pub site: Site,
}

impl Deref for World {
    type Target = Site;

    fn deref(&self) -> &Site {
        &self.site
    }
}

/// A container as the runtime lists it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Seen {
    /// Without the node's name.
    pub pod: String,
    pub container: String,
    pub attempt: u32,
    pub id: String,
    pub sandbox: String,
    pub running: bool,
}

impl World {
    pub fn new(version: Version) -> Self {
        assert!(
            nix::unistd::Uid::effective().is_root(),
            "these tests run containers: run them as root"
        );
        let runtime = PrivateContainerd::start(version)
            .expect("these tests need containerd; hack/deps.sh runtime installs it");
        Self {
            rt: tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime for the outsider"),
            site: Site::new(&runtime.endpoint()),
            runtime,
        }
    }

    fn call<T>(
        &self,
        what: &str,
        call: impl AsyncFnOnce(&mut RuntimeServiceClient<Channel>) -> Result<T, tonic::Status>,
    ) -> T {
        let socket = self.runtime.endpoint();
        self.rt.block_on(async {
            let channel = Endpoint::from_shared(socket)
                .expect("a socket")
                .connect()
                .await
                .unwrap_or_else(|e| panic!("{what}: connect to containerd: {e:?}"));
            let mut client = RuntimeServiceClient::new(channel);
            call(&mut client)
                .await
                .unwrap_or_else(|e| panic!("{what}: {e}"))
        })
    }

    /// All containers of the runtime, running or not.
    pub fn containers(&self) -> Vec<Seen> {
        let answer = self.call("list containers", async |c| {
            c.list_containers(v1::ListContainersRequest::default())
                .await
        });
        let mut seen: Vec<Seen> = answer
            .into_inner()
            .containers
            .into_iter()
            .map(|c| Seen {
                pod: short(&c.labels["io.kubernetes.pod.name"]),
                container: c.labels["io.kubernetes.container.name"].clone(),
                attempt: c.metadata.map_or(u32::MAX, |m| m.attempt),
                running: c.state == v1::ContainerState::ContainerRunning as i32,
                sandbox: c.pod_sandbox_id,
                id: c.id,
            })
            .collect();
        seen.sort();
        seen
    }

    pub fn running(&self) -> Vec<Seen> {
        self.containers()
            .into_iter()
            .filter(|c| c.running)
            .collect()
    }

    /// Sandboxes: pod, ID, ready.
    pub fn sandboxes(&self) -> Vec<(String, String, bool)> {
        let answer = self.call("list sandboxes", async |c| {
            c.list_pod_sandbox(v1::ListPodSandboxRequest::default())
                .await
        });
        let mut seen: Vec<_> = answer
            .into_inner()
            .items
            .into_iter()
            .map(|s| {
                let ready = s.state == v1::PodSandboxState::SandboxReady as i32;
                (short(&s.labels["io.kubernetes.pod.name"]), s.id, ready)
            })
            .collect();
        seen.sort();
        seen
    }

    pub fn sandbox(&self, id: &str) -> v1::PodSandboxStatus {
        let request = v1::PodSandboxStatusRequest {
            pod_sandbox_id: id.to_owned(),
            verbose: false,
        };
        let answer = self.call("inspect a sandbox", async |c| {
            c.pod_sandbox_status(request).await
        });
        answer.into_inner().status.expect("a status")
    }

    pub fn inspect(&self, id: &str) -> v1::ContainerStatus {
        let request = v1::ContainerStatusRequest {
            container_id: id.to_owned(),
            verbose: false,
        };
        let answer = self.call("inspect a container", async |c| {
            c.container_status(request).await
        });
        answer.into_inner().status.expect("a status")
    }

    /// Runs something in a container.
    pub fn exec(&self, id: &str, command: &[&str]) -> (i32, String) {
        let request = v1::ExecSyncRequest {
            container_id: id.to_owned(),
            cmd: command.iter().map(|&c| c.to_owned()).collect(),
            timeout: 30,
        };
        let answer = self
            .call("exec", async |c| c.exec_sync(request).await)
            .into_inner();
        let text = [answer.stdout, answer.stderr].concat();
        (
            answer.exit_code,
            String::from_utf8_lossy(&text).into_owned(),
        )
    }

    /// Kills a container's process behind everybody's back.
    pub fn kill(&self, id: &str) {
        self.runtime
            .ctr(&["tasks", "kill", "-s", "KILL", id])
            .expect("kill a container");
    }

    /// Removes a dead container, as `crictl rm` does.
    pub fn remove(&self, id: &str) {
        let request = v1::RemoveContainerRequest {
            container_id: id.to_owned(),
        };
        self.call("remove a container", async |c| {
            c.remove_container(request).await
        });
    }

    /// Removes everything the runtime knows of a pod, as after a reboot into an empty runtime.
    pub fn wipe_pod(&self, pod: &str) {
        for (_, id, _) in self.sandboxes().into_iter().filter(|(p, _, _)| p == pod) {
            let stop = v1::StopPodSandboxRequest {
                pod_sandbox_id: id.clone(),
            };
            self.call("stop a sandbox", async |c| c.stop_pod_sandbox(stop).await);
            let remove = v1::RemovePodSandboxRequest { pod_sandbox_id: id };
            self.call("remove a sandbox", async |c| {
                c.remove_pod_sandbox(remove).await
            });
        }
    }

    pub fn wipe_runtime(&self) {
        let mut pods: Vec<String> = self.sandboxes().into_iter().map(|(p, _, _)| p).collect();
        pods.sort();
        pods.dedup();
        for pod in pods {
            self.wipe_pod(&pod);
        }
        assert_eq!(self.containers(), [], "the runtime is empty");
    }

    /// The running container of that name; fails when there are several.
    pub fn try_one(&self, pod: &str, container: &str) -> Result<Seen, String> {
        let mut all: Vec<Seen> = self
            .running()
            .into_iter()
            .filter(|c| c.pod == pod && c.container == container)
            .collect();
        match all.len() {
            1 => Ok(all.remove(0)),
            0 => Err(format!("no container {container} of {pod} runs")),
            _ => panic!("container {container} of {pod} runs more than once: {all:?}"),
        }
    }

    /// Waits until a container runs and has left its mark as often as it was started.
    #[track_caller]
    pub fn wait_running(&self, pod: &str, container: &str) -> Seen {
        eventually(&format!("{container} of {pod} runs"), || {
            let seen = self.try_one(pod, container)?;
            let marks = self.site.lines(&mark(pod, container));
            match marks.last() {
                Some(last) if *last == seen.attempt.to_string() => Ok(seen),
                _ => Err(format!("marks are {marks:?} for {seen:?}")),
            }
        })
    }

    /// Puts a pod into the manifest directory.
    pub fn add(&self, pod: &Value) {
        let name = pod["metadata"]["name"].as_str().expect("a name");
        self.site
            .write_manifest(&format!("{name}.json"), &pod.to_string());
    }

    pub fn delete(&self, name: &str) {
        self.site.remove_manifest(&format!("{name}.json"));
    }

    /// A pod whose containers are shell scripts; each writes its attempt into its mark file first.
    pub fn pod(&self, name: &str, policy: &str, containers: &[(&str, &str)]) -> Value {
        let containers: Vec<Value> = containers
            .iter()
            .map(|(container, script)| {
                json!({
                    "name": container,
                    "image": BUSYBOX,
                    "command": ["sh", "-c", format!("{}\n{script}", leave_mark(name, container))],
                    "volumeMounts": [
                        {"name": "starts", "mountPath": "/starts"},
                        {"name": "podlogs", "mountPath": "/podlogs", "readOnly": true},
                    ],
                })
            })
            .collect();
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "restartPolicy": policy,
                "terminationGracePeriodSeconds": 5,
                "hostNetwork": true,
                "containers": containers,
                "volumes": [
                    {"name": "starts", "hostPath": {"path": self.site.starts()}},
                    {"name": "podlogs", "hostPath": {"path": self.site.pod_logs()}},
                ],
            },
        })
    }
}

/// Shell commands that write the attempt into the mark file. It is in the name of the newest log, which the runtime makes
/// before it starts the container. A directory may be newer: that of a pod whose logs are being removed.
fn leave_mark(pod: &str, container: &str) -> String {
    format!(
        "attempt=$(ls \"$(dirname \"$(ls -t /podlogs/*_{pod}-{NODE}_*/{container}/*.log | head -n 1)\")\" |\
         sed -n 's|^\\([0-9]*\\)\\.log$|\\1|p' | sort -n | tail -n 1)\n\
         echo $attempt >> /starts/{}",
        mark(pod, container)
    )
}

/// A script that runs until it is asked to end.
pub const FOREVER: &str = "trap 'exit 0' TERM; sleep 100000 & wait";

/// The file a container leaves its mark in.
pub fn mark(pod: &str, container: &str) -> String {
    format!("{pod}.{container}")
}

/// A pod's name without the node's.
fn short(name: &str) -> String {
    name.strip_suffix(&format!("-{NODE}"))
        .unwrap_or(name)
        .to_owned()
}

/// IDs of containers by pod and name.
pub fn ids(containers: &[Seen]) -> BTreeMap<(String, String), String> {
    containers
        .iter()
        .map(|c| ((c.pod.clone(), c.container.clone()), c.id.clone()))
        .collect()
}
