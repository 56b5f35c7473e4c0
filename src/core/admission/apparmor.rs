//! Check that the AppArmor profiles that a pod asks for can be enforced; upstream's `apparmor.Validator`.

use k8s_openapi::api::core::v1::{AppArmorProfile, Pod};

use super::Refusal;
use crate::types::PodExt;
use crate::types::containers::containers_of;

/// Prefix of the annotations that named profiles before there was a field.
const ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/";
const UNCONFINED: &str = "unconfined";

/// Refuses a pod that asks for a profile where the host has no AppArmor: it would wait for ever.
pub(super) fn unenforceable(pod: &Pod, enabled: bool) -> Option<Refusal> {
    (!enabled && asks(pod)).then(|| {
        (
            "AppArmor".to_owned(),
            "Cannot enforce AppArmor: AppArmor is not enabled on the host".to_owned(),
        )
    })
}

/// Upstream's `isRequired`.
fn asks(pod: &Pod) -> bool {
    let confines =
        |profile: Option<&AppArmorProfile>| profile.is_some_and(|p| p.type_ != "Unconfined");
    let annotated = pod
        .annotations()
        .iter()
        .any(|(key, value)| key.starts_with(ANNOTATION) && value != UNCONFINED);
    let context = pod.spec_ref().security_context.as_ref();
    annotated
        || confines(context.and_then(|c| c.app_armor_profile.as_ref()))
        || containers_of(pod).any(|c| {
            let context = c.container.security_context.as_ref();
            confines(context.and_then(|c| c.app_armor_profile.as_ref()))
        })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_profile_needs_a_host_with_apparmor() {
        let own = |kind: &str| json!({"appArmorProfile": {"type": kind}});
        for (what, metadata, spec, asks) in [
            (
                "nothing",
                json!({}),
                json!({"containers": [{"name": "c"}]}),
                false,
            ),
            (
                "the pod",
                json!({}),
                json!({"securityContext": own("RuntimeDefault"), "containers": []}),
                true,
            ),
            (
                "a pod without confinement",
                json!({}),
                json!({"securityContext": own("Unconfined"), "containers": []}),
                false,
            ),
            (
                "an init container",
                json!({}),
                json!({"initContainers": [{"name": "i", "securityContext": own("Localhost")}], "containers": []}),
                true,
            ),
            (
                "an annotation",
                json!({"annotations": {format!("{ANNOTATION}c"): "runtime/default"}}),
                json!({"containers": [{"name": "c"}]}),
                true,
            ),
            (
                "an annotation for none",
                json!({"annotations": {format!("{ANNOTATION}c"): UNCONFINED}}),
                json!({"containers": [{"name": "c"}]}),
                false,
            ),
        ] {
            let pod: Pod =
                serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap();
            assert_eq!(unenforceable(&pod, true), None, "{what}");
            let refusal = unenforceable(&pod, false);
            assert_eq!(refusal.is_some(), asks, "{what}");
        }
    }
}
