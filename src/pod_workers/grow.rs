//! Mounted volumes whose claims have been given more: their file systems are grown, and the claims say so. Upstream:
//! `NodeExpander` and `NodeExpandVolume` of the operation executor.
//!
//! **Invariant:** a volume that does not grow disturbs no pod; the next sync tries again, unless its driver says that it
//! never will.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tracing::{debug, warn};

use super::WorkerContext;
use crate::core::volumes::Source;
use crate::core::volumes::growth::{Growth, Turn};
use crate::kuberuntime::sources::{Resolved, Sources};
use crate::objects::ObjectError;
use crate::types::PodExt;
use crate::types::events::{Event, EventType};
use crate::volumemanager::remote::RemoteError;

/// Time that a pod's sync waits for the expansion of a volume. An expansion that has begun continues after that.
const PATIENCE: Duration = Duration::from_secs(10);

/// Returns whether a pod has volumes that may be expanded: those of claims, ephemeral ones included.
pub(super) fn may(pod: &Pod) -> bool {
    let mut volumes = pod.spec_ref().volumes.iter().flatten();
    volumes.any(|v| v.persistent_volume_claim.is_some() || v.ephemeral.is_some())
}

/// Grows the volumes of a pod, which are mounted.
pub(super) async fn volumes(context: &WorkerContext, pod: &Pod, sources: &Sources) {
    for (name, found) in &sources.remotes {
        let Ok(resolved) = found else {
            continue;
        };
        let remote = &resolved.remote;
        let (Some(sizes), Some(claim)) = (resolved.capacity, remote.claim.as_deref()) else {
            continue;
        };
        if !matches!(remote.source, Source::Csi(_) | Source::Local(_)) {
            continue;
        }
        let here = context.content.volumes.size_here(remote);
        if sizes.shared && here.is_none() {
            note(context, resolved, sizes.claim).await;
        }
        let Some(growth) = sizes.growth(here) else {
            continue;
        };
        let (namespace, claim) = claim.split_once('/').unwrap_or((pod.namespace(), claim));
        let one = One {
            context,
            pod,
            name,
            resolved,
            claim: (namespace, claim),
        };
        if let Err(error) = one.grow(growth).await {
            debug!(%error, volume = name, "cannot report the expansion of a volume to its claim yet");
        }
    }
}

async fn note(context: &WorkerContext, resolved: &Resolved, bytes: u64) {
    if let Err(error) = context
        .content
        .volumes
        .note_size(&resolved.remote, bytes)
        .await
    {
        warn!(%error, volume = resolved.remote.name, "cannot record the size of a volume");
    }
}

/// One volume that is to grow.
struct One<'a> {
    context: &'a WorkerContext,
    pod: &'a Pod,
    name: &'a str,
    resolved: &'a Arc<Resolved>,
    /// Namespace and name.
    claim: (&'a str, &'a str),
}

impl One<'_> {
    /// Grows it and tells the claim, if it is this node that tells it.
    async fn grow(&self, growth: Growth) -> Result<(), ObjectError> {
        let (objects, (namespace, claim)) = (&self.context.content.objects, self.claim);
        if growth.turn == Some(Turn::Pending) {
            objects.claim_grows(namespace, claim).await?;
        }
        let (uid, resolved) = (self.pod.uid(), Arc::clone(self.resolved));
        let volumes = &self.context.content.volumes;
        let growing = volumes.expand(&uid, self.name, resolved, growth.bytes);
        match tokio::time::timeout(PATIENCE, growing).await {
            Ok(Ok(Some(_))) => {}
            Ok(Ok(None)) => return Ok(()),
            Ok(Err(error)) => {
                self.tell(EventType::Warning, "VolumeResizeFailed", |name| {
                    format!("MountVolume.NodeExpandVolume failed for volume \"{name}\" : NodeExpandVolume failed: {error}")
                });
                let Some(never) = is_told(growth, &error) else {
                    return Ok(());
                };
                let why = error.to_string();
                let told = objects.claim_does_not_grow(namespace, claim, never, &why);
                return told.await;
            }
            Err(_) => {
                debug!(volume = self.name, "the expansion of a volume continues");
                return Ok(());
            }
        }
        if self.resolved.capacity.is_some_and(|sizes| sizes.shared) {
            note(self.context, self.resolved, growth.bytes).await;
        }
        if growth.told {
            let told = objects.claim_has_grown(namespace, claim, growth.bytes);
            told.await?;
        }
        let node = &self.context.node.node_name;
        self.tell(EventType::Normal, "FileSystemResizeSuccessful", |name| {
            format!("MountVolume.NodeExpandVolume succeeded for volume \"{name}\" {node}")
        });
        Ok(())
    }

    fn tell(&self, kind: EventType, reason: &'static str, text: impl FnOnce(&str) -> String) {
        let text = text(&self.resolved.remote.name);
        let event = Event::pod(kind, self.pod, reason, text);
        self.context.recorder.record(event);
    }
}

/// Returns whether the claim's status reports a failure, and whether as final (`Some(true)`). `None` unless the claim
/// names this node as the one that expands it, and the failure is certain.
fn is_told(growth: Growth, error: &RemoteError) -> Option<bool> {
    growth.turn?;
    match error {
        RemoteError::Infeasible(_) => Some(true),
        RemoteError::Failed(_) => Some(false),
        // The driver may still be at work, or was not asked.
        RemoteError::Uncertain(_) | RemoteError::Waiting(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_hears_of_what_is_certain_when_it_says_whose_turn_it_is() {
        let why = || "no".to_owned();
        let hears = |turn, error: RemoteError| {
            let growth = Growth {
                bytes: 1,
                told: true,
                turn,
            };
            is_told(growth, &error)
        };
        for turn in [Turn::Pending, Turn::InProgress] {
            let turn = Some(turn);
            assert_eq!(hears(turn, RemoteError::Infeasible(why())), Some(true));
            assert_eq!(hears(turn, RemoteError::Failed(why())), Some(false));
            assert_eq!(hears(turn, RemoteError::Uncertain(why())), None);
            assert_eq!(hears(turn, RemoteError::Waiting(why())), None);
        }
        assert_eq!(hears(None, RemoteError::Infeasible(why())), None);
        assert_eq!(hears(None, RemoteError::Failed(why())), None);
    }
}
