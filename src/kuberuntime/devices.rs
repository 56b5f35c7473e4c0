//! Raw devices of a container: `volumeDevices` as the runtime takes them; upstream's `makeBlockVolumes`. Pure.

use std::collections::BTreeMap;
use std::path::PathBuf;

use k8s_cri::v1;
use k8s_openapi::api::core::v1::{Container, Pod};

use super::sandbox_config::ConfigError;
use crate::types::PodExt;

/// Devices of a container. `volumes` are the host paths of the pod's volumes by name.
///
/// # Errors
/// A volume that is not there, a path in the container that is not absolute.
pub(super) fn devices(
    pod: &Pod,
    container: &Container,
    volumes: &BTreeMap<String, PathBuf>,
) -> Result<Vec<v1::Device>, ConfigError> {
    let device = |wanted: &k8s_openapi::api::core::v1::VolumeDevice| {
        let error = |reason: String| ConfigError::Mount {
            container: container.name.clone(),
            volume: wanted.name.clone(),
            reason,
        };
        if !wanted.device_path.starts_with('/') {
            return Err(error(format!(
                "error DevicePath `{}` must be an absolute path",
                wanted.device_path
            )));
        }
        let path = volumes.get(&wanted.name).ok_or_else(|| {
            error("cannot find it to pass into the container; add it to spec.volumes".to_owned())
        })?;
        Ok(v1::Device {
            container_path: wanted.device_path.clone(),
            host_path: path.to_string_lossy().into_owned(),
            permissions: if is_read_only(pod, &wanted.name) {
                "r".to_owned()
            } else {
                "mrw".to_owned()
            },
        })
    };
    let wanted = container.volume_devices.iter().flatten();
    wanted.map(device).collect()
}

/// Whether the pod may only read a volume, by its claim.
fn is_read_only(pod: &Pod, volume: &str) -> bool {
    let mut volumes = pod.spec_ref().volumes.iter().flatten();
    let found = volumes.find(|v| v.name == volume);
    let claim = found.and_then(|v| v.persistent_volume_claim.as_ref());
    claim.and_then(|c| c.read_only).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(device: &str) -> Pod {
        serde_json::from_value(json!({"spec": {
            "volumes": [
                {"name": "rw", "persistentVolumeClaim": {"claimName": "a"}},
                {"name": "ro", "persistentVolumeClaim": {"claimName": "b", "readOnly": true}},
            ],
            "containers": [{"name": "c", "volumeDevices": [
                {"name": "rw", "devicePath": "/dev/xvda"}, {"name": "ro", "devicePath": device},
            ]}],
        }}))
        .unwrap()
    }

    #[test]
    fn devices_are_handed_on_with_what_the_claim_allows() {
        let volumes = BTreeMap::from([
            ("rw".to_owned(), PathBuf::from("/pods/u/volumeDevices/x/a")),
            ("ro".to_owned(), PathBuf::from("/pods/u/volumeDevices/x/b")),
        ]);
        let of = |pod: &Pod, volumes| devices(pod, &pod.containers()[0], volumes);
        let found = of(&pod("/dev/xvdb"), &volumes).unwrap();
        let shown: Vec<_> = found
            .iter()
            .map(|d| {
                (
                    d.host_path.as_str(),
                    d.container_path.as_str(),
                    d.permissions.as_str(),
                )
            })
            .collect();
        assert_eq!(
            shown,
            [
                ("/pods/u/volumeDevices/x/a", "/dev/xvda", "mrw"),
                ("/pods/u/volumeDevices/x/b", "/dev/xvdb", "r"),
            ]
        );
        let relative = of(&pod("xvdb"), &volumes).unwrap_err().to_string();
        assert!(
            relative.contains("DevicePath `xvdb` must be an absolute path"),
            "{relative}"
        );
        let missing = of(&pod("/dev/xvdb"), &BTreeMap::new())
            .unwrap_err()
            .to_string();
        assert!(missing.contains("cannot find it"), "{missing}");
    }
}
