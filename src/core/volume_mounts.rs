//! Meaning of the spec of a mount, as far as its status shows it as well.

use k8s_openapi::api::core::v1::{Container, VolumeMount};

/// Returns whether a mount has to be read-only with everything below it; upstream's `resolveRecursiveReadOnly`.
/// `supported` is true if the pod's runtime handler can do it.
///
/// # Errors
/// Upstream's text when it cannot be had as written.
pub fn recursive_read_only(mount: &VolumeMount, supported: bool) -> Result<bool, String> {
    let mode = match mount.recursive_read_only.as_deref() {
        None | Some("" | "Disabled") => return Ok(false),
        Some(mode) => mode,
    };
    let asked = format!("volume {:?} requested recursive read-only mode", mount.name);
    if mount.read_only != Some(true) {
        return Err(format!("{asked}, but it is not read-only"));
    }
    let propagation = mount.mount_propagation.as_deref().unwrap_or_default();
    if !matches!(propagation, "" | "None") {
        return Err(format!(
            "{asked}, but it is not compatible with propagation {propagation:?}"
        ));
    }
    match mode {
        "IfPossible" => Ok(supported),
        "Enabled" if supported => Ok(true),
        "Enabled" => Err(format!("{asked}, but it is not supported by the runtime")),
        other => Err(format!("unknown recursive read-only mode {other:?}")),
    }
}

/// Returns whether the runtime has to be able to mount read-only recursively, or whether its ability matters.
pub fn asks_recursive_read_only(container: &Container) -> bool {
    let mounts = container.volume_mounts.iter().flatten();
    let mut modes = mounts.filter_map(|m| m.recursive_read_only.as_deref());
    modes.any(|mode| !matches!(mode, "" | "Disabled"))
}

/// Returns whether mounts inside a container may show on the node.
pub fn shows_mounts_to_node(container: &Container) -> bool {
    let mut mounts = container.volume_mounts.iter().flatten();
    mounts.any(|m| m.mount_propagation.as_deref() == Some("Bidirectional"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn recursive_read_only_modes() {
        let resolve = |mode: &str, read_only: bool, propagation: &str, supported: bool| {
            let mount = serde_json::from_value(json!({
                "name": "v", "mountPath": "/v", "readOnly": read_only,
                "recursiveReadOnly": mode, "mountPropagation": propagation,
            }))
            .unwrap();
            recursive_read_only(&mount, supported)
        };
        for supported in [false, true] {
            assert_eq!(resolve("Disabled", true, "None", supported), Ok(false));
            assert_eq!(
                resolve("Disabled", false, "HostToContainer", supported),
                Ok(false)
            );
            assert_eq!(
                resolve("IfPossible", true, "None", supported),
                Ok(supported)
            );
            for mode in ["IfPossible", "Enabled"] {
                let error = resolve(mode, false, "None", supported).unwrap_err();
                assert_eq!(
                    error,
                    "volume \"v\" requested recursive read-only mode, but it is not read-only"
                );
                let error = resolve(mode, true, "HostToContainer", supported).unwrap_err();
                assert!(
                    error.ends_with("not compatible with propagation \"HostToContainer\""),
                    "{error}"
                );
            }
            assert!(resolve("Always", true, "", supported).is_err());
        }
        assert_eq!(resolve("Enabled", true, "", true), Ok(true));
        let error = resolve("Enabled", true, "None", false).unwrap_err();
        assert!(
            error.ends_with("but it is not supported by the runtime"),
            "{error}"
        );
    }

    #[test]
    fn only_who_asks_needs_to_know_what_the_runtime_can() {
        for (mode, asks) in [
            (json!(null), false),
            (json!("Disabled"), false),
            (json!("IfPossible"), true),
        ] {
            let container = serde_json::from_value(json!({"name": "c", "volumeMounts": [
                {"name": "v", "mountPath": "/v", "recursiveReadOnly": mode}]}))
            .unwrap();
            assert_eq!(asks_recursive_read_only(&container), asks, "{mode}");
        }
    }
}
