//! Fields that an API server accepts with a warning; the part of upstream's `warningsForPodSpecAndMeta` about amounts that are
//! hardly meant.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::types::containers::containers_of;
use crate::types::quantity::nanos;
use crate::types::{ContainerKind, PodExt};

const UNIT: i128 = 1_000_000_000;
/// Resources that are counted in bytes.
const BYTES: [&str; 2] = ["memory", "ephemeral-storage"];

/// Returns the fields of a pod that an API server would warn about, and why: amounts of bytes that are no whole number, such
/// as `128m`, which is 128 thousandths of a byte.
pub fn warnings(pod: &Pod) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for spec in containers_of(pod) {
        let list = match spec.kind {
            ContainerKind::Init | ContainerKind::Sidecar => "initContainers",
            ContainerKind::Main => "containers",
            ContainerKind::Ephemeral => "ephemeralContainers",
        };
        let path = format!("spec.{list}[{}].resources", spec.index);
        resources(spec.container.resources.as_ref(), &path, &mut found);
    }
    let spec = pod.spec_ref();
    resources(spec.resources.as_ref(), "spec.resources", &mut found);
    amounts(spec.overhead.as_ref(), "spec.overhead", &mut found);
    for (index, volume) in spec.volumes.iter().flatten().enumerate() {
        let limit = volume
            .empty_dir
            .as_ref()
            .and_then(|dir| dir.size_limit.as_ref());
        if let Some(limit) = limit.filter(|limit| is_fractional(limit)) {
            let field = format!("spec.volumes[{index}].emptyDir.sizeLimit");
            found.push((field, message(limit)));
        }
    }
    found
}

fn resources(set: Option<&ResourceRequirements>, path: &str, found: &mut Vec<(String, String)>) {
    let Some(set) = set else {
        return;
    };
    // A request that is not given is the limit.
    let mut requests = set.requests.clone().unwrap_or_default();
    let limits = set.limits.as_ref();
    requests.retain(|name, amount| limits.and_then(|all| all.get(name)) != Some(&*amount));
    amounts(Some(&requests), &format!("{path}.requests"), found);
    amounts(limits, &format!("{path}.limits"), found);
}

fn amounts(
    set: Option<&BTreeMap<String, Quantity>>,
    path: &str,
    found: &mut Vec<(String, String)>,
) {
    for (name, amount) in set.into_iter().flatten() {
        if BYTES.contains(&name.as_str()) && is_fractional(amount) {
            found.push((format!("{path}[{name}]"), message(amount)));
        }
    }
}

fn is_fractional(amount: &Quantity) -> bool {
    nanos(&amount.0).is_ok_and(|nanos| nanos % UNIT != 0)
}

/// Upstream's words, then the remedy.
fn message(amount: &Quantity) -> String {
    format!(
        "fractional byte value {:?} is invalid, must be an integer; m is a thousandth, write M or Mi for millions",
        amount.0
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn bytes_that_are_no_whole_number_are_warned_about() {
        let pod: Pod = serde_json::from_value(json!({
            "spec": {
                "initContainers": [{"name": "i", "resources": {"limits": {"ephemeral-storage": "1500m"}}}],
                "containers": [{"name": "c", "resources": {
                    "requests": {"cpu": "100m", "memory": "128m"},
                    "limits": {"cpu": "100m", "memory": "128Mi"},
                }}],
                "volumes": [
                    {"name": "a", "emptyDir": {"sizeLimit": "1000m"}},
                    {"name": "b", "emptyDir": {"sizeLimit": "64m"}},
                ],
            },
        }))
        .unwrap();
        let found = warnings(&pod);
        let fields: Vec<&str> = found.iter().map(|(field, _)| field.as_str()).collect();
        assert_eq!(
            fields,
            [
                "spec.initContainers[0].resources.limits[ephemeral-storage]",
                "spec.containers[0].resources.requests[memory]",
                "spec.volumes[1].emptyDir.sizeLimit",
            ]
        );
        assert!(
            found[1]
                .1
                .starts_with("fractional byte value \"128m\" is invalid")
        );
    }
}
