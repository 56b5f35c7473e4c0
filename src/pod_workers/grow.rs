//! Mounted volumes whose claims have been given more: their file systems are grown, and the claims say so. Upstream:
//! `NodeExpandVolume` of the operation executor.
//!
//! **Invariant:** a volume that does not grow disturbs no pod; the next sync tries again.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tracing::debug;

use super::WorkerContext;
use crate::core::volumes::Source;
use crate::kuberuntime::sources::Sources;
use crate::types::PodExt;
use crate::types::events::{Event, EventType};

/// How long a pod's sync waits for a volume to grow; what was begun goes on.
const PATIENCE: Duration = Duration::from_secs(10);

/// Whether a pod has volumes that may grow.
pub(super) fn may(pod: &Pod) -> bool {
    let mut volumes = pod.spec_ref().volumes.iter().flatten();
    volumes.any(|v| v.persistent_volume_claim.is_some() || v.ephemeral.is_some())
}

/// Grows the volumes of a pod, which are mounted.
pub(super) async fn volumes(context: &WorkerContext, pod: &Pod, sources: &Sources) {
    let uid = pod.uid();
    for (name, found) in &sources.remotes {
        let Ok(resolved) = found else {
            continue;
        };
        let remote = &resolved.remote;
        let (Some(bytes), Some(claim)) = (resolved.capacity, remote.claim.as_deref()) else {
            continue;
        };
        if !matches!(remote.source, Source::Csi(_) | Source::Local(_)) {
            continue;
        }
        let growing = context.volumes.expand(&uid, name, resolved.clone(), bytes);
        match tokio::time::timeout(PATIENCE, growing).await {
            Ok(Ok(Some(_))) => {}
            Ok(Ok(None)) => continue,
            Ok(Err(error)) => {
                let text = format!(
                    "MountVolume.NodeExpandVolume failed for volume \"{}\" : {error}",
                    remote.name
                );
                let event = Event::pod(EventType::Warning, pod, "VolumeResizeFailed", text);
                context.recorder.record(event);
                continue;
            }
            Err(_) => {
                debug!(volume = name, "a volume still grows");
                continue;
            }
        }
        let (namespace, claim) = claim.split_once('/').unwrap_or((pod.namespace(), claim));
        if let Err(error) = context
            .objects
            .claim_has_grown(namespace, claim, bytes)
            .await
        {
            debug!(%error, "the claim of a volume that has grown is told later");
            continue;
        }
        let text = format!(
            "MountVolume.NodeExpandVolume succeeded for volume \"{}\" {}",
            remote.name, context.node.node_name
        );
        let event = Event::pod(EventType::Normal, pod, "FileSystemResizeSuccessful", text);
        context.recorder.record(event);
    }
}
