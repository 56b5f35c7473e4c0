//! Finds the container that a request names, and its log.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::http::StatusCode;
use k8s_openapi::api::core::v1 as api;

use super::{Logs, Refusal};
use crate::core::state::{ContainerRecord, PlegRecord, PodRecord, State, StatusRecord, child_key};
use crate::kuberuntime::logs::{file_by_rule, file_of};
use crate::types::containers::container_of;
use crate::types::runtime::ContainerState;
use crate::types::{ContainerId, FullName, PodExt, PodUid};

/// A container's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) uid: PodUid,
    pub(super) id: ContainerId,
    pub(super) path: PathBuf,
}

/// Finds the log.
pub(super) fn find(
    logs: &Logs,
    namespace: &str,
    name: &str,
    container: &str,
    previous: bool,
) -> Result<Target, Refusal> {
    let state = logs.store.snapshot();
    let pod = pod_of(logs, &state, namespace, name).ok_or_else(|| {
        let text = format!("pod {name:?} does not exist");
        Refusal::new(StatusCode::NOT_FOUND, text)
    })?;
    if container_of(&pod, container).is_none() {
        let text = format!("container {container:?} not found in pod {name:?}");
        return Err(Refusal::new(StatusCode::NOT_FOUND, text));
    }
    let uid = pod.uid();
    let record = state.record::<StatusRecord>(uid.as_str());
    let status = match record {
        Some(record) => Some(&*record.status),
        None => pod.status.as_ref(),
    };
    let status = status.and_then(|status| status_of(status, container));
    let bad = |text| Refusal::new(StatusCode::BAD_REQUEST, text);
    let status = status.ok_or_else(|| {
        bad(format!(
            "container {container:?} in pod {name:?} is not available"
        ))
    })?;
    let full_id = choose(status, name, container, previous).map_err(bad)?;
    let id = ContainerId::from(full_id.rsplit("://").next().unwrap_or(full_id));
    let root = &logs.pod_logs_dir;
    let path = locate(&state, root, &pod, container, &id, status);
    let path =
        path.ok_or_else(|| bad(format!("unable to retrieve container logs for {full_id}")))?;
    Ok(Target { uid, id, path })
}

/// The pod of that name; also one that its source has forgotten but that is not cleaned up yet.
fn pod_of(logs: &Logs, state: &State, namespace: &str, name: &str) -> Option<Arc<api::Pod>> {
    let wanted = logs.pods.by_full_name(&FullName::of(name, namespace));
    wanted.or_else(|| {
        let records = state.with_prefix::<PodRecord>("");
        let named = records
            .filter(|(_, record)| record.pod.name() == name && record.pod.namespace() == namespace);
        let newest = named.max_by_key(|(_, record)| record.first_seen.wall_ms);
        newest.map(|(_, record)| Arc::clone(&record.pod.0))
    })
}

fn status_of<'a>(status: &'a api::PodStatus, name: &str) -> Option<&'a api::ContainerStatus> {
    [
        &status.container_statuses,
        &status.init_container_statuses,
        &status.ephemeral_container_statuses,
    ]
    .into_iter()
    .flatten()
    .flatten()
    .find(|status| status.name == name)
}

/// The id of the container that is meant, or why there is none; upstream's `validateContainerLogStatus`.
fn choose<'a>(
    status: &'a api::ContainerStatus,
    pod: &str,
    container: &str,
    previous: bool,
) -> Result<&'a str, String> {
    let filled = |id: &'a Option<String>| id.as_deref().filter(|id| !id.is_empty());
    let ended = |state: &'a Option<api::ContainerState>| {
        state.as_ref().and_then(|state| state.terminated.as_ref())
    };
    let last = ended(&status.last_state);
    let last_id = last.and_then(|last| filled(&last.container_id));
    if previous {
        return last_id.ok_or_else(|| {
            format!("previous terminated container {container:?} in pod {pod:?} not found")
        });
    }
    let state = status.state.as_ref();
    let terminated = ended(&status.state);
    let waiting = state.and_then(|state| state.waiting.as_ref());
    let waits = || format!("container {container:?} in pod {pod:?} is waiting to start");
    if state.is_some_and(|state| state.running.is_some()) {
        return filled(&status.container_id).ok_or_else(|| waits() + " - no logs yet");
    }
    if terminated.is_some() || last.is_some() {
        // Of one that could not be started the state has no id: then the one before it is meant.
        let id = terminated.and_then(|ended| filled(&ended.container_id));
        return id
            .or(last_id)
            .ok_or_else(|| format!("container {container:?} in pod {pod:?} is terminated"));
    }
    let Some(waiting) = waiting else {
        return Err(waits() + " - no logs yet");
    };
    Err(match waiting.reason.as_deref().unwrap_or_default() {
        "ErrImagePull" => waits() + ": image can't be pulled",
        "ImagePullBackOff" => waits() + ": trying and failing to pull image",
        reason => format!("{}: {reason}", waits()),
    })
}

/// Returns the path of a container's log: from the runtime's last status, from the container's record, or from the API
/// status.
fn locate(
    state: &State,
    root: &Path,
    pod: &api::Pod,
    container: &str,
    id: &ContainerId,
    status: &api::ContainerStatus,
) -> Option<PathBuf> {
    let uid = pod.uid();
    if let Some(record) = state.record::<PlegRecord>(uid.as_str())
        && let Some(seen) = record.status.containers.iter().find(|c| c.id == *id)
    {
        return Some(file_of(root, &record.status, seen));
    }
    let record = state.record::<ContainerRecord>(&child_key(&uid, container));
    let exit = record.and_then(|record| record.last_exit.as_ref());
    let intent = record.and_then(|record| record.intent.as_ref());
    let exit = exit.filter(|exit| exit.container_id == *id);
    let intent = intent.filter(|intent| intent.container_id == *id);
    let recorded = exit
        .map(|exit| exit.attempt)
        .or_else(|| intent.map(|intent| intent.attempt));
    let attempt = recorded.or_else(|| {
        let restarts = u32::try_from(status.restart_count).ok()?;
        let is = |full_id: Option<&String>| full_id.is_some_and(|full| full.ends_with(id.as_str()));
        if is(status.container_id.as_ref()) {
            return Some(restarts);
        }
        let last = status.last_state.as_ref()?.terminated.as_ref()?;
        is(last.container_id.as_ref())
            .then(|| restarts.checked_sub(1))
            .flatten()
    })?;
    let names = (pod.namespace(), pod.name(), &uid);
    Some(file_by_rule(root, names, container, attempt))
}

/// Returns whether a container can write no more.
pub(super) fn has_ended(state: &State, uid: &PodUid, id: &ContainerId) -> bool {
    let record = state.record::<PlegRecord>(uid.as_str());
    let containers = record.map(|record| &record.status.containers);
    let seen = containers.and_then(|containers| containers.iter().find(|c| c.id == *id));
    // One that is not there was removed.
    seen.is_none_or(|seen| matches!(seen.state, ContainerState::Exited | ContainerState::Unknown))
}
