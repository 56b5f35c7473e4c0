//! Volumes of kind `image`: their images are pulled like those of containers, and the runtime mounts them.
//!
//! Nothing of them is on the node's side of a container, so the volume manager leaves them out. A runtime that is
//! known not to mount images is told apart by its version before anything is pulled: it would silently mount an
//! empty path instead.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, Pod, Volume, VolumeMount};

use super::WorkerContext;
use crate::images::PullInputs;
use crate::kuberuntime::cri::v1;
use crate::types::{PodExt, Stamp};

/// Why a container cannot have its image volumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ImageVolumeError {
    /// `state.waiting.reason`.
    pub(super) reason: String,
    /// `state.waiting.message`.
    pub(super) message: String,
    /// When a back-off ends, if one is in force.
    pub(super) retry_at: Option<Stamp>,
    /// Whether it was told as an event already.
    pub(super) told: bool,
}

impl ImageVolumeError {
    fn config(message: String) -> Self {
        Self {
            reason: "CreateContainerConfigError".to_owned(),
            message,
            retry_at: None,
            told: false,
        }
    }
}

/// Pulls what the image volumes of a container need and returns their mounts; upstream's `getImageVolumes`.
/// Cancelled with the future.
///
/// # Errors
/// The first volume that cannot be had.
pub(super) async fn mounts(
    context: &WorkerContext,
    pod: &Pod,
    container: &Container,
    inputs: PullInputs<'_>,
) -> Result<Vec<v1::Mount>, ImageVolumeError> {
    let volumes = used(pod, container);
    if volumes.is_empty() {
        return Ok(Vec::new());
    }
    let version = context
        .cri
        .version()
        .await
        .map_err(|error| ImageVolumeError::config(error.to_string()))?;
    let (runtime, version) = (version.runtime_name, version.runtime_version);
    if let Some(needed) = too_old(&runtime, &version) {
        return Err(ImageVolumeError::config(format!(
            "volume {}: {runtime} {version} cannot mount images; it needs {runtime} {needed} or later",
            volumes[0].name
        )));
    }
    let mut all = Vec::new();
    for volume in volumes {
        let Some(source) = &volume.image else {
            continue;
        };
        let image = context
            .images
            .ensure_volume(
                pod,
                source,
                inputs,
                &context.cri,
                &context.store,
                &*context.recorder,
            )
            .await
            .map_err(|error| ImageVolumeError {
                reason: error.reason.as_str().to_owned(),
                message: format!("volume {}: {}", volume.name, error.message),
                retry_at: error.retry_at,
                told: true,
            })?;
        context.volume_images.set(&pod.uid(), &volume.name, &image);
        for mount in mounts_of(container, &volume.name) {
            let named = source.reference.as_deref().unwrap_or_default();
            all.push(mount_of(mount, &image, named).map_err(ImageVolumeError::config)?);
        }
    }
    Ok(all)
}

/// The image volumes that a container mounts.
fn used<'a>(pod: &'a Pod, container: &Container) -> Vec<&'a Volume> {
    let mounted: BTreeSet<&str> = container
        .volume_mounts
        .iter()
        .flatten()
        .map(|m| m.name.as_str())
        .collect();
    let volumes = pod.spec_ref().volumes.iter().flatten();
    volumes
        .filter(|v| v.image.is_some() && mounted.contains(v.name.as_str()))
        .collect()
}

fn mounts_of<'a>(
    container: &'a Container,
    volume: &'a str,
) -> impl Iterator<Item = &'a VolumeMount> {
    let mounts = container.volume_mounts.iter().flatten();
    mounts.filter(move |m| m.name == volume)
}

/// An image is mounted whole and read-only, whatever the mount says about writing.
fn mount_of(mount: &VolumeMount, image: &str, named: &str) -> Result<v1::Mount, String> {
    let has = |text: &Option<String>| text.as_ref().is_some_and(|t| !t.is_empty());
    if has(&mount.sub_path) || has(&mount.sub_path_expr) {
        return Err(format!(
            "volume {}: the runtime interface of this version cannot mount a part of an image (no image_sub_path); leave subPath out and mount the whole volume",
            mount.name
        ));
    }
    let path = mount.mount_path.as_str();
    Ok(v1::Mount {
        container_path: if path.starts_with('/') {
            path.to_owned()
        } else {
            format!("/{path}")
        },
        readonly: true,
        image: Some(v1::ImageSpec {
            image: image.to_owned(),
            user_specified_image: named.to_owned(),
            ..Default::default()
        }),
        ..Default::default()
    })
}

/// The first version of a runtime that mounts images, where this one is older. One that is not known is tried.
fn too_old(runtime: &str, version: &str) -> Option<&'static str> {
    let (first, text) = match runtime {
        "containerd" => ((2, 1), "2.1"),
        "cri-o" => ((1, 31), "1.31"),
        _ => return None,
    };
    let mut parts = version
        .trim_start_matches('v')
        .split(|c: char| !c.is_ascii_digit())
        .map(str::parse::<u32>);
    let (Some(Ok(major)), Some(Ok(minor))) = (parts.next(), parts.next()) else {
        return None;
    };
    ((major, minor) < first).then_some(text)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn runtimes_that_cannot_mount_images_are_known_by_their_version() {
        for (runtime, version, needed) in [
            ("containerd", "1.6.20~ds1", Some("2.1")),
            ("containerd", "v1.7.24", Some("2.1")),
            ("containerd", "v2.0.5", Some("2.1")),
            ("containerd", "v2.1.0-rc.1", None),
            ("containerd", "2.10.0", None),
            ("containerd", "unknown", None),
            ("cri-o", "1.30.2", Some("1.31")),
            ("cri-o", "1.31.0", None),
            ("other", "0.1", None),
        ] {
            assert_eq!(too_old(runtime, version), needed, "{runtime} {version}");
        }
    }

    #[test]
    fn an_image_is_mounted_read_only_and_whole_by_those_who_ask() {
        let pod: Pod = serde_json::from_value(json!({"spec": {
            "containers": [{"name": "c", "volumeMounts": [
                {"name": "data", "mountPath": "data"},
                {"name": "data", "mountPath": "/again", "subPath": "x"},
                {"name": "disk", "mountPath": "/disk"},
            ]}],
            "volumes": [
                {"name": "data", "image": {"reference": "data:1"}},
                {"name": "other", "image": {"reference": "other:1"}},
                {"name": "disk", "emptyDir": {}},
            ],
        }}))
        .unwrap();
        let container = &pod.containers()[0];
        let names: Vec<_> = used(&pod, container).iter().map(|v| &v.name).collect();
        assert_eq!(names, ["data"]);
        let mounts: Vec<_> = mounts_of(container, "data")
            .map(|m| mount_of(m, "sha256:1", "data:1"))
            .collect();
        let first = mounts[0].as_ref().unwrap();
        assert_eq!(first.container_path, "/data");
        assert!(first.readonly && first.host_path.is_empty());
        let image = first.image.as_ref().unwrap();
        assert_eq!(image.image, "sha256:1");
        assert_eq!(image.user_specified_image, "data:1");
        assert!(mounts[1].as_ref().unwrap_err().contains("subPath"));
    }
}
