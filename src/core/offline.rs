//! Choice of the API server's pods that start after a reboot before it has answered.
//!
//! The input is a recorded pod, the node's policy, and the records of its claims. The output is to start, or to wait
//! and why. Pure. A pod waits when running it twice could do harm: its replacement may already run elsewhere while this
//! node was away. A restart of the agent without a reboot requires no answer: its pods were running.
//!
//! **Invariant:** the record that the API server has answered in this boot is stored after the end of every pod that
//! its first answer removed. So a crash in between starts no such pod.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Pod;

use super::state::{State, WorkerPhase, WorkerRecord};
use crate::core::volumes::claim_of;
use crate::kubeletconfig::OfflineStart;
use crate::types::{PodExt, PodSource, PodUid};

/// Overrides the node's policy for one pod: `"true"` or `"false"`.
pub const ANNOTATION: &str = "holdfast.io/offline-start";

/// Checks that a pod may start before the API server has answered. `access_modes` returns the recorded modes of a claim
/// of the pod's namespace; `None` when there is no record.
///
/// # Errors
/// The reason why the pod waits, for a human.
pub fn may_start(
    pod: &Pod,
    policy: OfflineStart,
    access_modes: &dyn Fn(&str) -> Option<Vec<String>>,
) -> Result<(), String> {
    match pod.annotation(ANNOTATION) {
        Some("true") => return Ok(()),
        Some("false") => return Err(format!("its annotation {ANNOTATION} is \"false\"")),
        // Anything else was no clear wish: the policy decides.
        _ => {}
    }
    match policy {
        OfflineStart::All => Ok(()),
        OfflineStart::None => Err("offlineStart of this node is None".to_owned()),
        OfflineStart::Safe => safe(pod, access_modes),
    }
}

/// Returns whether the records agree with the API server, which wants its pods `wanted` and no others: the others are
/// being stopped, or are over.
pub fn has_taken_effect(state: &State, wanted: &BTreeSet<PodUid>) -> bool {
    let mut of_api = state
        .pods
        .iter()
        .filter(|(_, pod)| pod.record.source == PodSource::Api);
    of_api.all(|(uid, _)| {
        let worker = state.record::<WorkerRecord>(uid);
        wanted.contains(&**uid) || worker.is_some_and(|worker| worker.phase != WorkerPhase::Sync)
    })
}

fn safe(pod: &Pod, access_modes: &dyn Fn(&str) -> Option<Vec<String>>) -> Result<(), String> {
    let owners = pod.metadata.owner_references.iter().flatten();
    if let Some(owner) = owners.into_iter().find(|owner| owner.kind == "StatefulSet") {
        return Err(format!(
            "it belongs to StatefulSet {}, which promises that it runs once",
            owner.name
        ));
    }
    let volumes = pod.spec.iter().flat_map(|s| s.volumes.iter().flatten());
    for volume in volumes {
        let Some(claim) = claim_of(pod, volume) else {
            continue;
        };
        match access_modes(&claim) {
            None => return Err(format!("nothing is recorded of its claim {claim}")),
            Some(modes) => {
                let once = modes.iter().find(|mode| mode.starts_with("ReadWriteOnce"));
                if let Some(mode) = once {
                    return Err(format!("its claim {claim} is {mode}"));
                }
                if modes.is_empty() {
                    return Err(format!("its claim {claim} has no access mode"));
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;
    use crate::core::state::{PodRecord, TerminationCause, Transaction};
    use crate::types::{BootId, Json, Stamp};

    fn pod(metadata: Value, volumes: Value) -> Pod {
        let mut metadata = metadata;
        metadata["name"] = json!("web-0");
        serde_json::from_value(json!({
            "metadata": metadata,
            "spec": {"containers": [], "volumes": volumes},
        }))
        .unwrap()
    }

    // Invariant API-11.
    #[test]
    fn what_could_run_twice_waits_unless_it_says_otherwise() {
        let owner = |kind: &str| {
            json!({"ownerReferences": [
                {"apiVersion": "apps/v1", "kind": kind, "name": "web", "uid": "1", "controller": true},
            ]})
        };
        let claim =
            |name: &str| json!([{"name": "v", "persistentVolumeClaim": {"claimName": name}}]);
        let said = |value: &str, kind: &str| {
            let mut metadata = owner(kind);
            metadata["annotations"] = json!({ANNOTATION: value});
            metadata
        };
        let modes = |name: &str| match name {
            "many" => Some(vec!["ReadWriteMany".to_owned()]),
            "one" => Some(vec!["ReadOnlyMany".to_owned(), "ReadWriteOnce".to_owned()]),
            "pod" => Some(vec!["ReadWriteOncePod".to_owned()]),
            "none" => Some(Vec::new()),
            _ => None,
        };
        use OfflineStart::{All, None as Never, Safe};
        for (metadata, volumes, policy, waits_for) in [
            (json!({}), json!([]), Safe, ""),
            (json!({}), json!([]), All, ""),
            (json!({}), json!([]), Never, "None"),
            (owner("ReplicaSet"), json!([]), Safe, ""),
            (owner("StatefulSet"), json!([]), Safe, "StatefulSet web"),
            (owner("StatefulSet"), json!([]), All, ""),
            (said("true", "StatefulSet"), json!([]), Safe, ""),
            (said("true", "Job"), json!([]), Never, ""),
            (said("false", "Job"), json!([]), All, "annotation"),
            (said("yes", "StatefulSet"), json!([]), Safe, "StatefulSet"),
            (json!({}), claim("many"), Safe, ""),
            (json!({}), claim("one"), Safe, "ReadWriteOnce"),
            (json!({}), claim("one"), All, ""),
            (json!({}), claim("pod"), Safe, "ReadWriteOncePod"),
            (json!({}), claim("none"), Safe, "no access mode"),
            (json!({}), claim("unknown"), Safe, "nothing is recorded"),
            (
                json!({}),
                json!([{"name": "tmp", "ephemeral": {}}, {"name": "e", "emptyDir": {}}]),
                Safe,
                "claim web-0-tmp",
            ),
        ] {
            let pod = pod(metadata.clone(), volumes.clone());
            let answer = may_start(&pod, policy, &modes);
            let what = format!("{metadata} {volumes} {policy:?}: {answer:?}");
            match answer {
                Ok(()) => assert!(waits_for.is_empty(), "{what}"),
                Err(why) => {
                    assert!(!waits_for.is_empty() && why.contains(waits_for), "{what}");
                }
            }
        }
    }

    #[test]
    fn the_word_of_the_api_server_has_taken_effect_once_all_else_is_stopped_or_over() {
        let at = Stamp {
            boot: BootId(1),
            boottime_ms: 1,
            wall_ms: 1,
        };
        let record = |uid: &str, source, phase: Option<WorkerPhase>| {
            let pod = PodRecord {
                source,
                origin: String::new(),
                pod: Json(Arc::new(pod(json!({}), json!([])))),
                first_seen: at,
                confirmed_epoch: 1,
            };
            let worker = phase.map(|phase| WorkerRecord {
                full_name: "web-0_ns".to_owned(),
                queued: at,
                started: None,
                phase,
                deleted: false,
                restart_requested: false,
                runtime_only: false,
            });
            let puts = Transaction::new().put(uid, pod);
            match worker {
                Some(worker) => puts.put(uid, worker),
                None => puts,
            }
        };
        let over = WorkerPhase::Finished {
            since: at,
            cause: TerminationCause::Deleted,
        };
        let mut state = State::default();
        let mut agrees = |transaction: Transaction, wanted: &[&str]| {
            for mutation in &transaction.mutations {
                state.apply(mutation, 1);
            }
            let wanted = wanted.iter().map(PodUid::new).collect();
            has_taken_effect(&state, &wanted)
        };
        let (api, sync) = (PodSource::Api, Some(WorkerPhase::Sync));
        assert!(agrees(Transaction::new(), &[]));
        assert!(agrees(record("static", PodSource::File, sync.clone()), &[]));
        assert!(agrees(record("stays", api, sync.clone()), &["stays"]));
        assert!(!agrees(record("goes", api, None), &["stays"]));
        assert!(!agrees(record("goes", api, sync), &["stays"]));
        assert!(agrees(record("goes", api, Some(over)), &["stays"]));
    }
}
