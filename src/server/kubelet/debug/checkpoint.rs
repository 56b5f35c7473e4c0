//! `POST /checkpoint/<namespace>/<pod>/<container>`: the runtime writes the state of a running container, its memory
//! included, to a file. Upstream: `checkpoint` and `CheckpointContainer`.
//!
//! The file lies in `<root-dir>/checkpoints` and is readable by root alone, as whatever the container had in memory
//! is in it.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::Json;
use axum::extract::{Path as Segments, RawQuery, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use k8s_cri::v1;
use serde_json::json;

use super::super::{NodeApi, Shared};
use crate::kuberuntime::labels;
use crate::types::containers::container_of;
use crate::types::{ContainerId, PodExt, PodUid, blocking};

/// Reason why a checkpoint was not made.
#[derive(Debug, thiserror::Error)]
enum CheckpointError {
    #[error("container {0} not found")]
    NotRunning(String),
    #[error("make directory {}: {source}", path.display())]
    Directory {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Cri(#[from] crate::kuberuntime::cri::CriError),
    #[error("work on the disk ended early: {0}")]
    Ended(#[source] tokio::task::JoinError),
}

pub(super) async fn checkpoint(
    State(node): State<Shared>,
    Segments((namespace, pod_name, container)): Segments<(String, String, String)>,
    RawQuery(query): RawQuery,
) -> Response {
    if let Err(refusal) = super::super::pods::require_restored(&node) {
        return refusal;
    }
    let not_found = |text: String| (StatusCode::NOT_FOUND, text).into_response();
    let pods = node.pods.all();
    let pod = pods
        .iter()
        .find(|pod| pod.name() == pod_name && pod.namespace() == namespace);
    let Some(pod) = pod else {
        return not_found("pod does not exist".to_owned());
    };
    if container_of(pod, &container).is_none() {
        return not_found(format!("container {container} does not exist"));
    }
    let timeout = match timeout(query.as_deref()) {
        Ok(timeout) => timeout,
        // Upstream's status for it.
        Err(text) => return not_found(text.to_owned()),
    };
    match make(
        &node,
        &pod.uid(),
        pod.full_name().as_ref(),
        &container,
        timeout,
    )
    .await
    {
        Ok(location) => Json(json!({"items": [location]})).into_response(),
        Err(error) => {
            let text =
                format!("checkpointing of {namespace}/{pod_name}/{container} failed ({error})");
            (StatusCode::INTERNAL_SERVER_ERROR, text).into_response()
        }
    }
}

/// `timeout`, in seconds; the last one counts. 0 when it is not given: the runtime's own.
fn timeout(query: Option<&str>) -> Result<u64, &'static str> {
    let given = form_urlencoded::parse(query.unwrap_or_default().as_bytes())
        .filter(|(key, _)| key == "timeout")
        .last();
    given.map_or(Ok(0), |(_, value)| {
        value
            .parse::<u32>()
            .map(u64::from)
            .map_err(|_| "cannot parse value of timeout parameter")
    })
}

async fn make(
    node: &NodeApi,
    uid: &PodUid,
    full_name: &str,
    container: &str,
    timeout: u64,
) -> Result<String, CheckpointError> {
    let filter = v1::ContainerFilter {
        state: Some(v1::ContainerStateValue {
            state: v1::ContainerState::ContainerRunning.into(),
        }),
        label_selector: HashMap::from([
            (labels::POD_UID.to_owned(), uid.to_string()),
            (labels::CONTAINER_NAME.to_owned(), container.to_owned()),
        ]),
        ..Default::default()
    };
    let running = node.cri.list_containers(Some(filter)).await?;
    let newest = running.into_iter().max_by_key(|c| c.created_at);
    let Some(newest) = newest else {
        return Err(CheckpointError::NotRunning(container.to_owned()));
    };
    let directory = node.config.root_dir.join("checkpoints");
    let time = node.clock.now().rfc3339();
    let file = directory.join(format!("checkpoint-{full_name}-{container}-{time}.tar"));
    blocking::run(move || private_directory(&directory))
        .await
        .map_err(CheckpointError::Ended)??;
    let location = file.to_string_lossy().into_owned();
    let id = ContainerId::from(newest.id);
    (node.cri)
        .checkpoint_container(&id, &location, Duration::from_secs(timeout))
        .await?;
    tracing::info!(pod = %uid, container, location, "container checkpointed");
    Ok(location)
}

fn private_directory(path: &Path) -> Result<(), CheckpointError> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(|source| CheckpointError::Directory {
            path: path.to_owned(),
            source,
        })
}

#[cfg(test)]
mod tests {
    use super::timeout;

    #[test]
    fn the_last_timeout_counts_and_a_bad_one_is_told() {
        assert_eq!(timeout(None), Ok(0));
        assert_eq!(timeout(Some("timeout=5&timeout=7&x=1")), Ok(7));
        for bad in ["timeout=x", "timeout=-1", "timeout="] {
            assert!(timeout(Some(bad)).is_err(), "{bad}");
        }
    }
}
