//! Fuzz target of the runtime's answers.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a fuzz target fails by panicking"
)]

use std::collections::BTreeMap;

use k8s_cri::v1;
use prost::Message;

use super::convert::{
    inspected_container, inspected_sandbox, listed_container, listed_sandbox, pod_of,
    start_was_cut_off,
};
use crate::kuberuntime::labels;
use crate::kuberuntime::security::ImageUser;
use crate::types::runtime::{ContainerState, PodStatus};
use crate::types::{ContainerId, PodUid};

/// Reads an answer of the runtime. The first byte says to which call.
///
/// Asserts that nothing without a pod's UID is taken for a pod's, that the newest sandbox comes first, and that a
/// container whose start was cut off counts as created.
pub(crate) fn cri_answers(data: &[u8]) {
    let Some((call, answer)) = data.split_first() else {
        return;
    };
    match call % 6 {
        0 => {
            let Ok(list) = v1::ListPodSandboxResponse::decode(answer) else {
                return;
            };
            let mut pods: BTreeMap<PodUid, PodStatus> = BTreeMap::new();
            for sandbox in &list.items {
                let pod = pod_of(&mut pods, &sandbox.labels);
                let uid = sandbox.labels.get(labels::POD_UID);
                assert_eq!(pod.is_some(), uid.is_some_and(|uid| !uid.is_empty()));
                if let Some(pod) = pod {
                    pod.sandboxes.push(listed_sandbox(sandbox));
                }
            }
            for pod in pods.values_mut() {
                pod.sort();
                assert!(pod.sandboxes.is_sorted_by(
                    |a, b| (a.attempt, a.created_at_ns) >= (b.attempt, b.created_at_ns)
                ));
            }
        }
        1 => {
            if let Ok(list) = v1::ListContainersResponse::decode(answer) {
                for container in &list.containers {
                    let listed = listed_container(container);
                    assert_eq!(listed.id.as_str(), container.id);
                }
            }
        }
        2 => {
            if let Ok(answer) = v1::PodSandboxStatusResponse::decode(answer)
                && let Some(status) = answer.status
            {
                let sandbox = inspected_sandbox(&status);
                assert!(sandbox.ips.iter().all(|ip| !ip.is_empty()));
                assert!(sandbox.host_network != Some(true) || sandbox.ips.is_empty());
            }
        }
        3 => {
            if let Ok(answer) = v1::ContainerStatusResponse::decode(answer)
                && let Some(status) = answer.status
            {
                let container = inspected_container(&status, ContainerId::new("sandbox"));
                if start_was_cut_off(&status) {
                    assert_eq!(container.state, ContainerState::Created);
                    assert!(container.hash.is_empty());
                }
            }
        }
        4 => {
            if let Ok(list) = v1::ListImagesResponse::decode(answer) {
                for image in &list.images {
                    ImageUser::of(image);
                }
            }
        }
        _ => {
            if let Ok(answer) = v1::ListContainerStatsResponse::decode(answer) {
                let again =
                    v1::ListContainerStatsResponse::decode(answer.encode_to_vec().as_slice());
                assert_eq!(again.unwrap(), answer);
            }
        }
    }
}
