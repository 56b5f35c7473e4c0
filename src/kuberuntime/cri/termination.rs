//! Termination messages into statuses: where the message of an exited container lies is told by its
//! annotations and mounts; reading it is `kuberuntime::termination`.
//!
//! **Invariant:** the attempts of a container share one file, which is emptied before each start: what is in it is of the newest
//! one that has been started. The message of an earlier one is recorded.

use std::collections::BTreeMap;
use std::path::PathBuf;

use k8s_cri::v1;

use crate::kuberuntime::labels;
use crate::kuberuntime::termination::{MessagePolicy, read_message};
use crate::types::blocking;
use crate::types::runtime::{ContainerState, ContainerStatus};

/// Appends the termination messages of exited containers to the runtime's messages: of those that share a file, to that of
/// the newest.
pub(super) async fn enrich_all(containers: &mut [(ContainerStatus, v1::ContainerStatus)]) {
    let superseded = superseded(containers);
    for ((converted, status), is_superseded) in containers.iter_mut().zip(superseded) {
        if !is_superseded {
            enrich(converted, status).await;
        }
    }
}

/// Returns for each container whether its message file belongs to a later container that has been started.
fn superseded(containers: &[(ContainerStatus, v1::ContainerStatus)]) -> Vec<bool> {
    let order = |c: &ContainerStatus| (c.attempt, c.created_at_ns);
    let mut newest: BTreeMap<&str, (u32, i64)> = BTreeMap::new();
    for (converted, status) in containers {
        if let (false, Some(path)) = (
            converted.state == ContainerState::Created,
            host_path(status),
        ) {
            let known = newest.entry(path).or_insert_with(|| order(converted));
            *known = order(converted).max(*known);
        }
    }
    let is_superseded = |(converted, status): &(ContainerStatus, v1::ContainerStatus)| {
        host_path(status)
            .and_then(|path| newest.get(path))
            .is_some_and(|newest| *newest > order(converted))
    };
    containers.iter().map(is_superseded).collect()
}

/// Appends the termination message of an exited container to the runtime's message.
async fn enrich(converted: &mut ContainerStatus, status: &v1::ContainerStatus) {
    if converted.state != ContainerState::Exited {
        return;
    }
    let message = message(status).await;
    if message.is_empty() {
        return;
    }
    if !converted.message.is_empty() {
        converted.message.push_str(": ");
    }
    converted.message.push_str(&message);
}

async fn message(status: &v1::ContainerStatus) -> String {
    let policy = MessagePolicy::parse(
        status
            .annotations
            .get(labels::CONTAINER_TERMINATION_MESSAGE_POLICY)
            .map(String::as_str),
    );
    let exit_code = status.exit_code;
    let file = host_path(status).map(PathBuf::from);
    let log = (!status.log_path.is_empty()).then(|| PathBuf::from(&status.log_path));
    let read =
        blocking::run(move || read_message(file.as_deref(), policy, exit_code, log.as_deref()));
    match read.await {
        Ok(message) => message,
        Err(error) => format!("Error on reading termination message: {error}"),
    }
}

/// Returns the host path of the file that the container sees as its `terminationMessagePath`.
fn host_path(status: &v1::ContainerStatus) -> Option<&str> {
    let inside = status
        .annotations
        .get(labels::CONTAINER_TERMINATION_MESSAGE_PATH)
        .filter(|path| !path.is_empty())?;
    status
        .mounts
        .iter()
        .find(|mount| mount.container_path == *inside)
        .map(|mount| mount.host_path.as_str())
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::path::Path;

    use super::*;

    fn exited(dir: &Path, policy: &str, exit_code: i32) -> v1::ContainerStatus {
        v1::ContainerStatus {
            exit_code,
            annotations: HashMap::from([
                (
                    labels::CONTAINER_TERMINATION_MESSAGE_PATH.to_owned(),
                    "/dev/termination-log".to_owned(),
                ),
                (
                    labels::CONTAINER_TERMINATION_MESSAGE_POLICY.to_owned(),
                    policy.to_owned(),
                ),
            ]),
            mounts: vec![v1::Mount {
                container_path: "/dev/termination-log".to_owned(),
                host_path: dir.join("message").display().to_string(),
                ..Default::default()
            }],
            log_path: dir.join("0.log").display().to_string(),
            ..Default::default()
        }
    }

    #[tokio::test]
    async fn of_attempts_that_share_a_file_only_the_newest_that_was_started_said_what_is_in_it() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("message"), "said so").unwrap();
        let attempts = |newest: v1::ContainerState| {
            let states = [v1::ContainerState::ContainerExited, newest];
            let mut all: Vec<_> = (0_u32..)
                .zip(states)
                .map(|(attempt, state)| {
                    let mut status = exited(dir.path(), "File", 1);
                    status.metadata = Some(v1::ContainerMetadata {
                        name: "c".to_owned(),
                        attempt,
                    });
                    status.set_state(state);
                    let converted = super::super::convert::inspected_container(&status, "s".into());
                    (converted, status)
                })
                .collect();
            async move {
                enrich_all(&mut all).await;
                all.into_iter().map(|(c, _)| c.message).collect::<Vec<_>>()
            }
        };
        use v1::ContainerState::{ContainerCreated, ContainerExited, ContainerRunning};
        assert_eq!(attempts(ContainerCreated).await, ["said so", ""]);
        assert_eq!(attempts(ContainerRunning).await, ["", ""]);
        assert_eq!(attempts(ContainerExited).await, ["", "said so"]);
    }

    #[tokio::test]
    async fn message_file_wins_over_the_log() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("message"), "said so").unwrap();
        std::fs::write(dir.path().join("0.log"), "t stdout F from log\n").unwrap();
        let status = exited(dir.path(), "FallbackToLogsOnError", 1);
        assert_eq!(message(&status).await, "said so");
    }

    #[tokio::test]
    async fn log_is_the_message_only_on_error_and_only_by_policy() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("message"), "").unwrap();
        std::fs::write(dir.path().join("0.log"), "t stdout P a\nt stderr F b\n").unwrap();
        let told = |policy, code| {
            let status = exited(dir.path(), policy, code);
            async move { message(&status).await }
        };
        assert_eq!(told("FallbackToLogsOnError", 1).await, "ab\n");
        assert_eq!(told("FallbackToLogsOnError", 0).await, "");
        assert_eq!(told("File", 1).await, "");
    }

    #[tokio::test]
    async fn long_message_keeps_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let text = format!("{}end", "x".repeat(10_000));
        std::fs::write(dir.path().join("message"), text).unwrap();
        let said = message(&exited(dir.path(), "File", 0)).await;
        assert_eq!(
            said.len() as u64,
            crate::kuberuntime::termination::MAX_MESSAGE
        );
        assert!(said.ends_with("end"));
    }

    #[tokio::test]
    async fn link_in_place_of_the_message_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let secret = dir.path().join("secret");
        std::fs::write(&secret, "secret").unwrap();
        std::os::unix::fs::symlink(&secret, dir.path().join("message")).unwrap();
        let said = message(&exited(dir.path(), "File", 0)).await;
        assert!(
            said.starts_with("Error on reading termination log"),
            "{said}"
        );
    }
}
