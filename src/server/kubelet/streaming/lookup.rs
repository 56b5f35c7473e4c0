//! Finds the pod, container or sandbox that a request names.

use std::collections::HashMap;
use std::sync::Arc;

use k8s_cri::v1;
use k8s_openapi::api::core::v1::Pod;

use super::error::StreamError;
use crate::kuberuntime::cri::CriClient;
use crate::kuberuntime::labels;
use crate::pod_manager::PodManager;
use crate::types::containers::container_of;
use crate::types::{ContainerId, PodExt};

/// Pod and container of a request.
#[derive(Debug)]
pub(super) struct Target {
    /// The pod.
    pub(super) pod: Arc<Pod>,
    /// The container; empty for port-forward.
    pub(super) container: String,
}

/// Finds the pod by its name, and checks its UID, where the path has one; a static pod goes by its mirror's as well.
///
/// # Errors
/// When there is no such pod.
pub(super) fn find(
    pods: &PodManager,
    mut names: HashMap<String, String>,
) -> Result<Target, StreamError> {
    let mut take = |name: &str| names.remove(name).unwrap_or_default();
    let (namespace, name, uid) = (take("namespace"), take("pod"), take("uid"));
    let is_meant = |pod: &Arc<Pod>| {
        let mirror = || pods.mirror_of(pod).map(|mirror| mirror.uid());
        uid.is_empty() || pod.uid().as_str() == uid || mirror().is_some_and(|m| m.as_str() == uid)
    };
    let mut candidates = pods.all();
    candidates.retain(|pod| pod.name() == name && pod.namespace() == namespace);
    if candidates.is_empty() {
        return Err(StreamError::NoPod);
    }
    // A pod that is going may still be there under the name of its successor.
    let pod = candidates
        .into_iter()
        .filter(is_meant)
        .min_by_key(|pod| pod.is_deleting())
        .ok_or(StreamError::OtherPod)?;
    Ok(Target {
        pod,
        container: take("container"),
    })
}

impl Target {
    /// The container that runs now, by the runtime's word.
    ///
    /// # Errors
    /// When the pod has no such container, or it does not run.
    pub(super) async fn running_container(
        &self,
        cri: &CriClient,
    ) -> Result<ContainerId, StreamError> {
        let missing = || StreamError::NoContainer(self.container.clone());
        if container_of(&self.pod, &self.container).is_none() {
            return Err(missing());
        }
        let mut label_selector = self.label();
        label_selector.insert(labels::CONTAINER_NAME.to_owned(), self.container.clone());
        let filter = v1::ContainerFilter {
            state: Some(v1::ContainerStateValue {
                state: v1::ContainerState::ContainerRunning.into(),
            }),
            label_selector,
            ..Default::default()
        };
        let running = cri.list_containers(Some(filter)).await?;
        let newest = running.into_iter().max_by_key(|c| c.created_at);
        newest
            .map(|container| ContainerId::from(container.id))
            .ok_or_else(missing)
    }

    /// The sandbox that is ready now.
    ///
    /// # Errors
    /// When there is none.
    pub(super) async fn ready_sandbox(&self, cri: &CriClient) -> Result<ContainerId, StreamError> {
        let filter = v1::PodSandboxFilter {
            state: Some(v1::PodSandboxStateValue {
                state: v1::PodSandboxState::SandboxReady.into(),
            }),
            label_selector: self.label(),
            ..Default::default()
        };
        let ready = cri.list_pod_sandboxes(Some(filter)).await?;
        let newest = ready.into_iter().max_by_key(|sandbox| sandbox.created_at);
        newest
            .map(|sandbox| ContainerId::from(sandbox.id))
            .ok_or_else(|| StreamError::NoSandbox(self.pod.full_name().to_string()))
    }

    /// Returns whether the container has a terminal. Attaching cannot change that.
    pub(super) fn has_tty(&self) -> bool {
        container_of(&self.pod, &self.container).is_some_and(|c| c.container.tty == Some(true))
    }

    fn label(&self) -> HashMap<String, String> {
        HashMap::from([(labels::POD_UID.to_owned(), self.pod.uid().to_string())])
    }
}
