//! Builders for the table tests of this layer.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;

use super::container_history::Records;
use super::pod_actions::container_hash;
use super::state::{BackoffRecord, ContainerRecord, ExitRecord, IntentRecord};
use crate::types::runtime::{
    ContainerState, ContainerStatus, PodStatus, SandboxState, SandboxStatus,
};
use crate::types::{BootId, PodExt, PodUid, Stamp};

/// Wall clock at second zero of the tests' clock.
pub(super) const EPOCH: i64 = 1_700_000_000;

pub(super) fn at(seconds: i64) -> Stamp {
    Stamp {
        boot: BootId(1),
        boottime_ms: seconds * 1000,
        wall_ms: (EPOCH + seconds) * 1000,
    }
}

/// A pod `web` with containers of image `img:1`.
pub(super) fn pod(policy: &str, names: &[&str]) -> Pod {
    let containers: Vec<_> = names
        .iter()
        .map(|name| serde_json::json!({"name": name, "image": "img:1"}))
        .collect();
    serde_json::from_value(serde_json::json!({
        "metadata": {"name": "web", "namespace": "ns", "uid": "u1"},
        "spec": {"restartPolicy": policy, "containers": containers},
    }))
    .unwrap()
}

/// A ready sandbox `s0` with these containers.
pub(super) fn runtime(containers: Vec<ContainerStatus>) -> PodStatus {
    let mut status = PodStatus::empty(PodUid::new("u1"));
    status.ips = vec!["10.0.0.1".into()];
    status.sandboxes = vec![sandbox(0, SandboxState::Ready)];
    status.containers = containers;
    status.sort();
    status
}

pub(super) fn sandbox(attempt: u32, state: SandboxState) -> SandboxStatus {
    SandboxStatus {
        id: format!("s{attempt}").into(),
        attempt,
        state,
        created_at_ns: i64::from(attempt),
        ips: vec!["10.0.0.1".into()],
        host_network: Some(false),
        runtime_handler: String::new(),
    }
}

/// Container `<name>-<attempt>` in `s0`, of image `img:1`. An exited one has run from 50 to 60 s.
pub(super) fn container(name: &str, attempt: u32, state: ContainerState) -> ContainerStatus {
    let pod = pod("Always", &[name]);
    ContainerStatus {
        id: format!("{name}-{attempt}").into(),
        name: name.into(),
        attempt,
        sandbox_id: "s0".into(),
        state,
        created_at_ns: i64::from(attempt) + 1,
        image: "img:1".into(),
        image_ref: "sha256:1".into(),
        hash: container_hash(&pod.containers()[0]),
        started_at_ns: (EPOCH + 50) * 1_000_000_000,
        finished_at_ns: if state == ContainerState::Exited {
            (EPOCH + 60) * 1_000_000_000
        } else {
            0
        },
        exit_code: 0,
        reason: String::new(),
        message: String::new(),
        log_path: String::new(),
        user: None,
    }
}

pub(super) fn running(name: &str, attempt: u32) -> ContainerStatus {
    container(name, attempt, ContainerState::Running)
}

pub(super) fn created(name: &str, attempt: u32) -> ContainerStatus {
    container(name, attempt, ContainerState::Created)
}

pub(super) fn unknown(name: &str, attempt: u32) -> ContainerStatus {
    container(name, attempt, ContainerState::Unknown)
}

pub(super) fn exited(name: &str, attempt: u32, exit_code: i32) -> ContainerStatus {
    ContainerStatus {
        exit_code,
        ..container(name, attempt, ContainerState::Exited)
    }
}

/// A record whose newest start was `<name>-<attempt>`, decided at 50 s.
pub(super) fn started(name: &str, attempt: u32) -> ContainerRecord {
    ContainerRecord {
        restart_count: attempt,
        intent: Some(IntentRecord {
            container_id: format!("{name}-{attempt}").into(),
            attempt,
            hash: running(name, 0).hash,
            at: at(50),
        }),
        ..ContainerRecord::new()
    }
}

/// As [`started`], and it ended at 60 s.
pub(super) fn ended(name: &str, attempt: u32, exit_code: i32) -> ContainerRecord {
    ContainerRecord {
        last_exit: Some(ExitRecord {
            container_id: format!("{name}-{attempt}").into(),
            attempt,
            image: "img:1".into(),
            image_ref: "sha256:1".into(),
            started_at_ns: (EPOCH + 50) * 1_000_000_000,
            finished_at_ns: (EPOCH + 60) * 1_000_000_000,
            finished: at(60),
            exit_code,
            reason: if exit_code == 0 { "Completed" } else { "Error" }.into(),
            message: "bye".into(),
            inferred: false,
        }),
        ..started(name, attempt)
    }
}

pub(super) fn with_backoff(mut record: ContainerRecord, seconds: u64) -> ContainerRecord {
    record.backoff = Some(BackoffRecord {
        duration_ms: seconds * 1000,
        since: at(50),
    });
    record
}

/// Records by name.
pub(super) type Owned = BTreeMap<&'static str, ContainerRecord>;

pub(super) fn borrowed(owned: &Owned) -> Records<'_> {
    owned.iter().map(|(name, record)| (*name, record)).collect()
}

/// The volume `v` of a pod: an NFS export.
pub(super) fn export() -> super::volumes::Remote {
    serde_json::from_value(
        serde_json::json!({"name": "v", "claim": null, "mode": "Filesystem", "read_only": false,
        "mount_options": [], "unique_name": null, "source": {"Nfs": {"path": "/", "server": "s"}}}),
    )
    .unwrap()
}

/// A pod with init container `i`, sidecar `s`, main containers `a` and `b`. `b` has policy Never of its own, and restarts all
/// of them when it exits with 88.
pub(super) fn pod_that_restarts(policy: &str) -> Pod {
    let rule = serde_json::json!({
        "action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [88]},
    });
    serde_json::from_value(serde_json::json!({
        "metadata": {"name": "web", "namespace": "ns", "uid": "u1"},
        "spec": {
            "restartPolicy": policy,
            "initContainers": [
                {"name": "i", "image": "img:1"},
                {"name": "s", "image": "img:1", "restartPolicy": "Always"},
            ],
            "containers": [
                {"name": "a", "image": "img:1"},
                {"name": "b", "image": "img:1", "restartPolicy": "Never", "restartPolicyRules": [rule]},
            ],
        },
    }))
    .unwrap()
}

/// The restart that container `b` of [`pod_that_restarts`] caused with its end as attempt `attempt`. `ended`: newest attempts
/// when nothing ran any more.
pub(super) fn restart_by_b(
    attempt: u32,
    ended: Option<&[(&str, u32)]>,
) -> super::restart_all::Restart {
    super::restart_all::Restart {
        trigger: "b".into(),
        container_id: format!("b-{attempt}"),
        exit_code: 88,
        ended: ended.map(|all| all.iter().map(|(n, a)| ((*n).to_owned(), *a)).collect()),
    }
}
