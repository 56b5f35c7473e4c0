//! Taking a node over from another agent, or from a previous run without records: which static
//! pods run that are not recorded.

use std::collections::{BTreeMap, BTreeSet};

use tracing::warn;

use crate::config::RunningStatic;
use crate::kuberuntime::cri::CriClient;
use crate::types::pod::{CONFIG_SOURCE, MANIFEST_HASH};
use crate::types::runtime::{ContainerState, PodStatus};
use crate::types::{PodSource, PodUid};

/// The unrecorded pods of the runtime that are static ones, by the annotations of their sandboxes. Only what
/// looks like one is inspected: the UID of a static pod is a hash, not a UUID. One that cannot be inspected
/// is left out, and started anew should its manifest be there.
pub(super) async fn running_statics(
    cri: &CriClient,
    runtime: &BTreeMap<PodUid, PodStatus>,
    unrecorded: &BTreeSet<PodUid>,
) -> Vec<RunningStatic> {
    let mut found = Vec::new();
    for status in unrecorded.iter().filter_map(|uid| runtime.get(uid)) {
        let Some(sandbox) = status.ready_sandbox() else {
            continue;
        };
        if status.uid.as_str().contains('-') {
            continue;
        }
        let annotations = match cri.pod_sandbox_status(&sandbox.id).await {
            Ok(answer) => answer.annotations,
            Err(error) => {
                warn!(%error, pod = %status.uid, "cannot check whether this is a static pod");
                continue;
            }
        };
        let source = match annotations.get(CONFIG_SOURCE).map(String::as_str) {
            Some("file") => PodSource::File,
            Some("http") => PodSource::Http,
            _ => continue,
        };
        let running = status
            .containers
            .iter()
            .filter(|c| c.state == ContainerState::Running);
        found.push(RunningStatic {
            uid: status.uid.clone(),
            source,
            name: status.name.clone(),
            namespace: status.namespace.clone(),
            manifest: annotations.get(MANIFEST_HASH).cloned(),
            containers: running.map(|c| (c.name.clone(), c.hash.clone())).collect(),
        });
    }
    found
}
