//! Status of pods as the container runtime reports it, without its wire format; upstream's `kubecontainer` types.

use serde::{Deserialize, Serialize};

use super::names::{ContainerId, PodUid};

/// State of a container as CRI knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ContainerState {
    /// Created, never started.
    Created,
    /// Running.
    Running,
    /// Finished.
    Exited,
    /// The runtime does not know.
    Unknown,
}

/// State of a sandbox as CRI knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SandboxState {
    /// Ready.
    Ready,
    /// Not ready.
    NotReady,
}

/// One sandbox of a pod. Network fields are filled by an inspection, not by a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxStatus {
    /// The runtime's id.
    pub id: ContainerId,
    /// CRI metadata attempt.
    pub attempt: u32,
    /// Ready or not.
    pub state: SandboxState,
    /// Creation, nanoseconds since the Unix epoch.
    pub created_at_ns: i64,
    /// Primary and additional IPs; empty on the host network or when unknown.
    pub ips: Vec<String>,
    /// True if the sandbox uses the node's network namespace; `None` before an inspection.
    pub host_network: Option<bool>,
    /// CRI runtime handler.
    pub runtime_handler: String,
}

/// One container of a pod. Fields after `hash` are filled by an inspection, not by a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerStatus {
    /// The runtime's id.
    pub id: ContainerId,
    /// Name in the pod spec (label `io.kubernetes.container.name`).
    pub name: String,
    /// CRI metadata attempt = restart count at creation (annotation `io.kubernetes.container.restartCount`).
    pub attempt: u32,
    /// Sandbox the container lives in.
    pub sandbox_id: ContainerId,
    /// State.
    pub state: ContainerState,
    /// Creation, nanoseconds since the Unix epoch.
    pub created_at_ns: i64,
    /// Image as the spec named it.
    pub image: String,
    /// Image reference (digest) the runtime resolved.
    pub image_ref: String,
    /// Value of the annotation `io.kubernetes.container.hash`.
    pub hash: String,
    /// Start, nanoseconds since the Unix epoch; 0 = never or unknown.
    pub started_at_ns: i64,
    /// End, nanoseconds since the Unix epoch; 0 = never or unknown.
    pub finished_at_ns: i64,
    /// Exit code, valid when `Exited`.
    pub exit_code: i32,
    /// CRI reason (`Completed`, `Error`, `OOMKilled`, …).
    pub reason: String,
    /// CRI message, or the termination message.
    pub message: String,
    /// Path of the log file on the host.
    pub log_path: String,
    /// User of the container's first process, from runtimes that report it.
    pub user: Option<LinuxUser>,
}

/// User that the first process of a container was started as.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinuxUser {
    /// User ID.
    pub uid: i64,
    /// Primary group ID.
    pub gid: i64,
    /// Supplementary group IDs, with the primary one if the runtime lists it.
    pub supplemental_groups: Vec<i64>,
}

impl ContainerStatus {
    /// Returns whether the container can neither run nor be removed. containerd was interrupted between making its task
    /// and requesting the task's process ID. It shows the container as ended, and refuses to delete it because of that
    /// task. The container has not run. It disappears when containerd restarts.
    pub fn is_stuck(&self) -> bool {
        self.state == ContainerState::Created
            && self.reason == "StartError"
            && self.message.contains("failed to get task pid")
    }
}

/// Status of one pod in the runtime. An empty one means that the runtime has nothing of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodStatus {
    /// The pod.
    pub uid: PodUid,
    /// Its name (label `io.kubernetes.pod.name`).
    pub name: String,
    /// Its namespace (label `io.kubernetes.pod.namespace`).
    pub namespace: String,
    /// IPs of the newest ready sandbox, or the last ones known.
    pub ips: Vec<String>,
    /// Sandboxes, newest (highest attempt, then creation) first.
    pub sandboxes: Vec<SandboxStatus>,
    /// Containers, newest (highest attempt, then creation) first: the clock may have been set back meanwhile.
    pub containers: Vec<ContainerStatus>,
}

impl PodStatus {
    /// A pod of which the runtime knows nothing.
    pub fn empty(uid: PodUid) -> Self {
        Self {
            uid,
            name: String::new(),
            namespace: String::new(),
            ips: Vec::new(),
            sandboxes: Vec::new(),
            containers: Vec::new(),
        }
    }

    /// The newest container of that name.
    pub fn container(&self, name: &str) -> Option<&ContainerStatus> {
        self.containers.iter().find(|c| c.name == name)
    }

    /// All containers of that name, newest first.
    pub fn containers_named<'a>(
        &'a self,
        name: &'a str,
    ) -> impl Iterator<Item = &'a ContainerStatus> {
        self.containers.iter().filter(move |c| c.name == name)
    }

    /// The newest sandbox that is ready.
    pub fn ready_sandbox(&self) -> Option<&SandboxStatus> {
        self.sandboxes
            .iter()
            .find(|s| s.state == SandboxState::Ready)
    }

    /// Returns whether any container runs.
    pub fn any_running(&self) -> bool {
        self.containers
            .iter()
            .any(|c| c.state == ContainerState::Running)
    }

    /// Brings sandboxes and containers into the documented order.
    pub fn sort(&mut self) {
        self.sandboxes
            .sort_by_key(|s| std::cmp::Reverse((s.attempt, s.created_at_ns)));
        self.containers
            .sort_by_key(|c| std::cmp::Reverse((c.attempt, c.created_at_ns)));
    }
}
