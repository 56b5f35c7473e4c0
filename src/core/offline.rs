//! Which pods of the API server start after a reboot before it has answered.
//!
//! In: a pod as recorded, the node's policy, what is recorded of its claims. Out: start, or wait and why. Pure.
//! A pod waits when running it twice could do harm: its replacement may already run elsewhere while this node
//! was away. An agent's restart without a reboot asks nobody: its pods were running.

use k8s_openapi::api::core::v1::Pod;

use crate::core::volumes::claim_of;
use crate::kubeletconfig::OfflineStart;
use crate::types::PodExt;

/// Overrides the node's policy for one pod: `"true"` or `"false"`.
pub const ANNOTATION: &str = "holdfast.io/offline-start";

/// Whether a pod may start before the API server has answered. `access_modes` tells what is recorded of a claim
/// of the pod's namespace; `None` when nothing is.
///
/// # Errors
/// Why the pod waits, for a human.
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
    use serde_json::{Value, json};

    use super::*;

    fn pod(metadata: Value, volumes: Value) -> Pod {
        let mut metadata = metadata;
        metadata["name"] = json!("web-0");
        serde_json::from_value(json!({
            "metadata": metadata,
            "spec": {"containers": [], "volumes": volumes},
        }))
        .unwrap()
    }

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
}
