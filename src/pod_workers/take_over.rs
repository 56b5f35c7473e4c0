//! Taking over the volumes of pods that run without a record of them: after the store was lost, with an old one, and of
//! the kubelet that was here before. Upstream: the volume manager's `reconstruct`.
//!
//! In: what is mounted for pods and is not recorded, the pods as their sources have them, the claims they lead to. Out:
//! records, and word to the volume manager of how much is known. With a store that is whole there is nothing to do, and
//! nobody is asked.
//!
//! **Invariant:** a pod whose volumes are not identified yet is not a pod without volumes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::remotes::{self, Asker};
use super::{PodWorkers, WorkerContext};
use crate::config::SourcesReady;
use crate::core::volumes::Source;
use crate::core::volumes::known::Known;
use crate::types::{PodExt, PodUid, causes};
use crate::volumemanager::{Trace, VolumeError};

/// Pauses between two looks.
const SOONEST: Duration = Duration::from_secs(1);
const LATEST: Duration = Duration::from_secs(30);
/// Longest wait for the objects that one pod refers to, per pass.
const PATIENCE: Duration = Duration::from_secs(15);

/// Goes on until every volume that is mounted for a pod is recorded, then idles until `token` is cancelled.
pub async fn take_over(workers: PodWorkers, ready: SourcesReady, token: CancellationToken) {
    let work = async {
        let mut pause = SOONEST;
        let mut said = Said::default();
        loop {
            match look(&workers, &ready, &mut said).await {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => {
                    warn!(
                        error = causes(&error),
                        "cannot find out which volumes pods have; detaching nothing"
                    )
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LATEST);
        }
    };
    tokio::select! {
        () = token.cancelled() => return,
        () = work => {}
    }
    token.cancelled().await;
}

/// Messages that were already logged.
#[derive(Default)]
struct Said(BTreeSet<String>);

impl Said {
    fn is_new(&mut self, what: String) -> bool {
        self.0.insert(what)
    }
}

/// Owner of a leftover mount.
enum Owner {
    /// A pod with a spec.
    Pod(Box<Pod>),
    /// It runs, or may be wanted by a source that has not spoken.
    Unknown,
    /// Nobody's any more.
    Gone,
}

/// Takes over the volumes that can be identified now. Returns whether nothing is left.
async fn look(
    workers: &PodWorkers,
    ready: &SourcesReady,
    said: &mut Said,
) -> Result<bool, VolumeError> {
    let context = workers.context();
    let volumes = &context.content.volumes;
    let traces = volumes.traces().await?;
    if traces.is_empty() {
        volumes.know(Known::All { strays: false });
        return Ok(true);
    }
    let told = join_all(traces.keys().map(|uid| async {
        let done = match owner(workers, ready, uid) {
            Owner::Pod(pod) => of_pod(context, &pod).await?,
            Owner::Unknown => false,
            Owner::Gone => true,
        };
        if done {
            volumes.take_over_by_layout(uid).await?;
        }
        Ok::<_, VolumeError>((uid.clone(), done))
    }));
    let mut known = BTreeMap::new();
    let mut failed = None;
    for one in told.await {
        match one {
            Ok((uid, done)) => drop(known.insert(uid, done)),
            Err(error) => failed = Some(error),
        }
    }
    if let Some(error) = failed {
        return Err(error);
    }
    let left = volumes.traces().await?;
    let is_stray = |uid: &PodUid| match owner(workers, ready, uid) {
        Owner::Gone => true,
        Owner::Unknown => false,
        // Its spec does not name it.
        Owner::Pod(_) => known.get(uid).copied().unwrap_or(false),
    };
    let (strays, unknown): (Vec<_>, Vec<_>) = left.iter().partition(|(uid, _)| is_stray(uid));
    for (uid, traces) in &strays {
        tell_stray(said, uid, traces);
    }
    for (uid, _) in &unknown {
        if said.is_new(uid.to_string()) {
            info!(pod = %uid, "the owner of a leftover mount is unknown yet, retrying");
        }
    }
    if unknown.is_empty() {
        let strays = !strays.is_empty();
        volumes.know(Known::All { strays });
        return Ok(!strays);
    }
    let unknown = unknown.into_iter().map(|(uid, _)| uid.clone());
    volumes.know(Known::Living(unknown.collect()));
    Ok(false)
}

fn tell_stray(said: &mut Said, uid: &PodUid, traces: &[Trace]) {
    for trace in traces {
        let at = trace.path.display().to_string();
        if said.is_new(at.clone()) {
            warn!(
                pod = %uid,
                at,
                "a leftover mount belongs to no known pod, keeping it until somebody unmounts it"
            );
        }
    }
}

fn owner(workers: &PodWorkers, ready: &SourcesReady, uid: &PodUid) -> Owner {
    if let Some(pod) = workers.pod_of(uid) {
        return Owner::Pod(Box::new((*pod).clone()));
    }
    let known = workers.context().pleg.cache().known(uid);
    let may_run =
        known.is_none_or(|status| status.any_running() || status.ready_sandbox().is_some());
    if may_run || workers.knows(uid) || !ready.complete() {
        return Owner::Unknown;
    }
    Owner::Gone
}

/// Takes over what a pod's spec leads to. Returns whether all of that is known.
async fn of_pod(context: &WorkerContext, pod: &Pod) -> Result<bool, VolumeError> {
    let uid = pod.uid();
    if !pod.is_static() {
        context.content.objects.register(pod);
    }
    let asker = Asker {
        mounted: true,
        ..Asker::of(context)
    };
    let found = remotes::identify(&asker, pod);
    let Ok(found) = tokio::time::timeout(PATIENCE, found).await else {
        return Ok(false);
    };
    let mut all = true;
    for (volume, remote) in found {
        match remote {
            // There is nothing of it on disk.
            Ok(remote) if matches!(remote.source, Source::HostPath { .. }) => {}
            Ok(remote) => {
                context
                    .content
                    .volumes
                    .take_over(&uid, &volume, &remote)
                    .await?;
            }
            Err(why) => {
                tracing::debug!(pod = %uid, volume, why, "cannot identify a volume yet");
                all = false;
            }
        }
    }
    Ok(all)
}
