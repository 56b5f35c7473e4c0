//! From CRI v1 messages to `types::runtime`, and the question about one pod that the PLEG asks.
//!
//! Sandboxes and containers without the label `io.kubernetes.pod.uid` are foreign, and are left out.

use std::collections::{BTreeMap, HashMap};

use k8s_cri::v1;

use super::client::CriClient;
use super::error::CriError;
use super::list::{containers_of, sandboxes_of};
use super::termination;
use crate::kuberuntime::labels;
use crate::types::runtime::{
    ContainerState, ContainerStatus, LinuxUser, PodStatus, SandboxState, SandboxStatus,
};
use crate::types::{ContainerId, PodUid};

impl CriClient {
    /// One pod with every sandbox and container inspected; termination messages are read in, of each container that of
    /// its newest attempt. An empty `name` is filled in from the sandbox's labels. What is
    /// removed between list and inspection is left out. Upstream's `GetPodStatus`.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn pod_status(
        &self,
        uid: &PodUid,
        name: &str,
        namespace: &str,
    ) -> Result<PodStatus, CriError> {
        let sandboxes = self.list_pod_sandboxes(Some(sandboxes_of(uid))).await?;
        let containers = self.list_containers(Some(containers_of(uid))).await?;
        let mut listed = PodStatus {
            name: name.to_owned(),
            namespace: namespace.to_owned(),
            sandboxes: sandboxes.iter().map(listed_sandbox).collect(),
            containers: containers.iter().map(listed_container).collect(),
            ..PodStatus::empty(uid.clone())
        };
        if let (true, Some(sandbox)) = (name.is_empty(), sandboxes.first()) {
            listed.name = annotation(&sandbox.labels, labels::POD_NAME);
            listed.namespace = annotation(&sandbox.labels, labels::POD_NAMESPACE);
        }
        self.pod_status_of(&listed).await
    }

    /// As [`Self::pod_status`], of the sandboxes and containers that a list has just shown: what came to be since is
    /// left out.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn pod_status_of(&self, listed: &PodStatus) -> Result<PodStatus, CriError> {
        let mut pod = PodStatus {
            name: listed.name.clone(),
            namespace: listed.namespace.clone(),
            ..PodStatus::empty(listed.uid.clone())
        };
        for sandbox in &listed.sandboxes {
            match self.pod_sandbox_status(&sandbox.id).await {
                Ok(status) => pod.sandboxes.push(inspected_sandbox(&status)),
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(error),
            }
        }
        let mut containers = Vec::new();
        for container in &listed.containers {
            match self.container_status(&container.id).await {
                Ok(status) => {
                    let sandbox = container.sandbox_id.clone();
                    containers.push((inspected_container(&status, sandbox), status));
                }
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(error),
            }
        }
        termination::enrich_all(&mut containers).await;
        pod.containers = containers.into_iter().map(|(c, _)| c).collect();
        pod.sort();
        pod.ips = pod
            .sandboxes
            .first()
            .filter(|s| s.state == SandboxState::Ready)
            .map(|s| s.ips.clone())
            .unwrap_or_default();
        Ok(pod)
    }
}

/// A sandbox as a list shows it.
pub fn listed_sandbox(sandbox: &v1::PodSandbox) -> SandboxStatus {
    SandboxStatus {
        id: ContainerId::new(&sandbox.id),
        attempt: sandbox.metadata.as_ref().map_or(0, |m| m.attempt),
        state: sandbox_state(sandbox.state()),
        created_at_ns: sandbox.created_at,
        ips: Vec::new(),
        host_network: None,
        runtime_handler: sandbox.runtime_handler.clone(),
    }
}

/// A sandbox as an inspection shows it.
pub fn inspected_sandbox(status: &v1::PodSandboxStatus) -> SandboxStatus {
    let network_mode = status
        .linux
        .as_ref()
        .and_then(|l| l.namespaces.as_ref())
        .and_then(|n| n.options.as_ref())
        .map(|o| o.network());
    let host_network = network_mode.map(|mode| mode == v1::NamespaceMode::Node);
    let ips = match &status.network {
        Some(network) if host_network != Some(true) => std::iter::once(&network.ip)
            .chain(network.additional_ips.iter().map(|more| &more.ip))
            .filter(|ip| !ip.is_empty())
            .cloned()
            .collect(),
        _ => Vec::new(),
    };
    SandboxStatus {
        id: ContainerId::new(&status.id),
        attempt: status.metadata.as_ref().map_or(0, |m| m.attempt),
        state: sandbox_state(status.state()),
        created_at_ns: status.created_at,
        ips,
        host_network,
        runtime_handler: status.runtime_handler.clone(),
    }
}

/// A container as a list shows it.
pub fn listed_container(container: &v1::Container) -> ContainerStatus {
    ContainerStatus {
        id: ContainerId::new(&container.id),
        name: container_name(&container.labels, container.metadata.as_ref()),
        attempt: attempt(&container.annotations, container.metadata.as_ref()),
        sandbox_id: ContainerId::new(&container.pod_sandbox_id),
        state: container_state(container.state()),
        created_at_ns: container.created_at,
        image: image_name(container.image.as_ref()),
        image_ref: container.image_ref.clone(),
        hash: annotation(&container.annotations, labels::CONTAINER_HASH),
        started_at_ns: 0,
        finished_at_ns: 0,
        exit_code: 0,
        reason: String::new(),
        message: String::new(),
        log_path: String::new(),
        user: None,
    }
}

/// A container as an inspection shows it. An inspection does not name the sandbox, a list does.
///
/// A container whose start was cut off before its process was made is shown as created, without a hash:
/// it has not run, and since nothing can start it any more, nothing may adopt it.
pub fn inspected_container(
    status: &v1::ContainerStatus,
    sandbox_id: ContainerId,
) -> ContainerStatus {
    if start_was_cut_off(status) {
        return ContainerStatus {
            state: ContainerState::Created,
            hash: String::new(),
            exit_code: 0,
            finished_at_ns: 0,
            ..as_inspected(status, sandbox_id)
        };
    }
    as_inspected(status, sandbox_id)
}

/// Returns whether the start of a container was cancelled before its process was made. containerd cancels a start when
/// its client disconnects, and then shows an exited container. Before the task exists no process of it can have run;
/// after that one may have.
pub fn start_was_cut_off(status: &v1::ContainerStatus) -> bool {
    status.state() == v1::ContainerState::ContainerExited
        && status.started_at == 0
        && status.reason == "StartError"
        && status.message.contains("failed to create containerd task")
        && status.message.contains("context canceled")
}

fn as_inspected(status: &v1::ContainerStatus, sandbox_id: ContainerId) -> ContainerStatus {
    ContainerStatus {
        id: ContainerId::new(&status.id),
        name: container_name(&status.labels, status.metadata.as_ref()),
        attempt: attempt(&status.annotations, status.metadata.as_ref()),
        sandbox_id,
        state: container_state(status.state()),
        created_at_ns: status.created_at,
        image: image_name(status.image.as_ref()),
        image_ref: status.image_ref.clone(),
        hash: annotation(&status.annotations, labels::CONTAINER_HASH),
        started_at_ns: status.started_at,
        finished_at_ns: status.finished_at,
        exit_code: status.exit_code,
        reason: status.reason.clone(),
        message: status.message.clone(),
        log_path: status.log_path.clone(),
        user: linux_user(status),
    }
}

fn linux_user(status: &v1::ContainerStatus) -> Option<LinuxUser> {
    let user = status.user.as_ref()?.linux.as_ref()?;
    Some(LinuxUser {
        uid: user.uid,
        gid: user.gid,
        supplemental_groups: user.supplemental_groups.clone(),
    })
}

/// The pod in `pods` that these labels name, added if need be; `None` for what is nobody's pod.
pub(super) fn pod_of<'a>(
    pods: &'a mut BTreeMap<PodUid, PodStatus>,
    labels: &HashMap<String, String>,
) -> Option<&'a mut PodStatus> {
    let uid = labels.get(labels::POD_UID).filter(|uid| !uid.is_empty())?;
    let uid = PodUid::new(uid);
    let pod = pods.entry(uid.clone()).or_insert_with(|| PodStatus {
        name: annotation(labels, labels::POD_NAME),
        namespace: annotation(labels, labels::POD_NAMESPACE),
        ..PodStatus::empty(uid)
    });
    Some(pod)
}

fn container_name(
    labels: &HashMap<String, String>,
    metadata: Option<&v1::ContainerMetadata>,
) -> String {
    match labels.get(labels::CONTAINER_NAME) {
        Some(name) => name.clone(),
        None => metadata.map_or_else(String::new, |m| m.name.clone()),
    }
}

fn attempt(annotations: &HashMap<String, String>, metadata: Option<&v1::ContainerMetadata>) -> u32 {
    annotations
        .get(labels::CONTAINER_RESTART_COUNT)
        .and_then(|count| count.parse().ok())
        .unwrap_or_else(|| metadata.map_or(0, |m| m.attempt))
}

/// The name the pod asked for, where the runtime remembers it.
fn image_name(image: Option<&v1::ImageSpec>) -> String {
    image.map_or_else(String::new, |spec| {
        if spec.user_specified_image.is_empty() {
            spec.image.clone()
        } else {
            spec.user_specified_image.clone()
        }
    })
}

fn annotation(map: &HashMap<String, String>, key: &str) -> String {
    map.get(key).cloned().unwrap_or_default()
}

fn sandbox_state(state: v1::PodSandboxState) -> SandboxState {
    match state {
        v1::PodSandboxState::SandboxReady => SandboxState::Ready,
        v1::PodSandboxState::SandboxNotready => SandboxState::NotReady,
    }
}

fn container_state(state: v1::ContainerState) -> ContainerState {
    match state {
        v1::ContainerState::ContainerCreated => ContainerState::Created,
        v1::ContainerState::ContainerRunning => ContainerState::Running,
        v1::ContainerState::ContainerExited => ContainerState::Exited,
        v1::ContainerState::ContainerUnknown => ContainerState::Unknown,
    }
}

#[cfg(test)]
#[path = "convert_tests.rs"]
mod tests;
