//! Raw devices of a container: `volumeDevices` as the runtime takes them (upstream's `makeBlockVolumes`), and what device
//! plugins give it. Pure.

use std::collections::BTreeMap;
use std::path::PathBuf;

use k8s_cri::v1;
use k8s_openapi::api::core::v1::{Container, Pod};

use super::cri::ContainerConfig;
use super::env::Environment;
use super::sandbox_config::ConfigError;
use crate::core::devices::Granted;
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

/// Puts the variables of device plugins before those of a container, which win.
pub fn with_env_of(mut env: Environment, granted: &Granted) -> Environment {
    let is_own = |name: &String| env.vars.iter().any(|(own, _)| own == name);
    let added: Vec<_> = (granted.envs.iter())
        .filter(|(name, _)| !is_own(name))
        .map(|(name, value)| (name.clone(), value.clone().into_bytes()))
        .collect();
    env.vars.splice(0..0, added);
    env
}

/// Adds mounts, device nodes, annotations and CDI devices of device plugins to a container. Mounts and devices of the pod come
/// after them; annotations of the agent win.
pub fn with_devices_of(mut config: ContainerConfig, granted: Granted) -> ContainerConfig {
    let message = &mut config.message;
    let mounts = granted.mounts.into_iter().map(|mount| v1::Mount {
        container_path: mount.container_path,
        host_path: mount.host_path,
        readonly: mount.read_only,
        ..Default::default()
    });
    message.mounts.splice(0..0, mounts);
    let devices = granted.devices.into_iter().map(|device| v1::Device {
        container_path: device.container_path,
        host_path: device.host_path,
        permissions: device.permissions,
    });
    message.devices.splice(0..0, devices);
    for (name, value) in granted.annotations {
        message.annotations.entry(name).or_insert(value);
    }
    let cdi = granted.cdi.into_iter().map(|name| v1::CdiDevice { name });
    message.cdi_devices.extend(cdi);
    config
}

/// Returns whether the pod's volume source makes a claim's volume read-only.
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

    #[test]
    fn variables_and_annotations_of_plugins_give_way() {
        let granted = Granted {
            envs: [("A", "plugin"), ("B", "plugin")]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into(),
            annotations: [("own", "plugin"), ("more", "plugin")]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into(),
            cdi: vec!["v/c=0".to_owned()],
            ..Granted::default()
        };
        let env = Environment {
            vars: vec![("A".to_owned(), b"pod".to_vec())],
        };
        let env = with_env_of(env, &granted);
        let shown: Vec<_> = env.vars.iter().map(|(n, v)| (n.as_str(), &v[..])).collect();
        assert_eq!(shown, [("B", &b"plugin"[..]), ("A", &b"pod"[..])]);
        let mut message = v1::ContainerConfig::default();
        message
            .annotations
            .insert("own".to_owned(), "agent".to_owned());
        let config = ContainerConfig {
            message,
            ..ContainerConfig::default()
        };
        let message = with_devices_of(config, granted).message;
        assert_eq!(message.annotations["own"], "agent");
        assert_eq!(message.annotations["more"], "plugin");
        assert_eq!(message.cdi_devices[0].name, "v/c=0");
    }
}
