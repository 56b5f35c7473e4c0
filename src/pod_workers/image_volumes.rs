//! Volumes of kind `image`: their images are pulled like those of containers, and the runtime mounts them.
//!
//! Nothing of them is on the node's side of a container, so the volume manager leaves them out. A runtime that is
//! known not to mount images is recognized by its version before anything is pulled: it would silently mount an
//! empty path instead.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, Pod, Volume, VolumeMount};

use super::WorkerContext;
use crate::images::PullInputs;
use crate::kuberuntime::container_mounts;
use crate::kuberuntime::cri::{ImageMount, v1};
use crate::kuberuntime::env::Environment;
use crate::types::{PodExt, Stamp};

/// Reason why a container cannot have its image volumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ImageVolumeError {
    /// `state.waiting.reason`.
    pub(super) reason: String,
    /// `state.waiting.message`.
    pub(super) message: String,
    /// End of the back-off, if there is one.
    pub(super) retry_at: Option<Stamp>,
    /// True if an event already reported it.
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

/// Pulls what the image volumes of a container need and returns their mounts, each with the one that it was made from;
/// upstream's `getImageVolumes`. [`with_parts`] adds the parts of the images that are mounted.
/// Cancelled with the future.
///
/// # Errors
/// The first volume that cannot be had.
pub(super) async fn mounts(
    context: &WorkerContext,
    pod: &Pod,
    container: &Container,
    inputs: PullInputs<'_>,
) -> Result<Vec<(v1::Mount, VolumeMount)>, ImageVolumeError> {
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
    if let Some(needed) = too_old(&runtime, &version, first_with_images) {
        return Err(ImageVolumeError::config(format!(
            "volume {}: {runtime} {version} cannot mount images; it needs {runtime} {needed} or later",
            volumes[0].name
        )));
    }
    let in_part = volumes.iter().find(|v| {
        let mut mounts = mounts_of(container, &v.name);
        mounts.any(|m| is_given(&m.sub_path) || is_given(&m.sub_path_expr))
    });
    if let (Some(volume), Some(needed)) =
        (in_part, too_old(&runtime, &version, first_with_sub_paths))
    {
        return Err(ImageVolumeError::config(format!(
            "volume {}: {runtime} {version} would mount the whole image instead of its subPath; leave subPath out, or use \
             {runtime} {needed} or later",
            volume.name
        )));
    }
    let mut all = Vec::new();
    for volume in volumes {
        let Some(source) = &volume.image else {
            continue;
        };
        let image = context
            .content
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
        context
            .content
            .volume_images
            .set(&pod.uid(), &volume.name, &image);
        for mount in mounts_of(container, &volume.name) {
            let named = source.reference.as_deref().unwrap_or_default();
            all.push((mount_of(mount, &image, named), mount.clone()));
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

fn is_given(text: &Option<String>) -> bool {
    text.as_ref().is_some_and(|t| !t.is_empty())
}

/// Adds to the mounts of images the parts that are mounted. Upstream: `makeMounts`.
///
/// # Errors
/// When a variable of `subPathExpr` is not set, or the path leaves the image.
pub(super) fn with_parts(
    mounts: Vec<(v1::Mount, VolumeMount)>,
    env: &Environment,
) -> Result<Vec<ImageMount>, String> {
    let with_part = |(mount, of): (v1::Mount, VolumeMount)| {
        let sub_path = container_mounts::sub_path(&of, env)?.unwrap_or_default();
        let leaves = sub_path.starts_with('/') || sub_path.split('/').any(|part| part == "..");
        if leaves {
            return Err(format!(
                "volume {}: subPath {sub_path:?} has to be a path within the image, without \"..\"",
                of.name
            ));
        }
        Ok(ImageMount { mount, sub_path })
    };
    mounts.into_iter().map(with_part).collect()
}

/// An image is mounted read-only, whatever the mount says about writing.
fn mount_of(mount: &VolumeMount, image: &str, named: &str) -> v1::Mount {
    let path = mount.mount_path.as_str();
    v1::Mount {
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
    }
}

type Release = ((u32, u32), &'static str);

/// The first release of a runtime that mounts images.
fn first_with_images(runtime: &str) -> Option<Release> {
    match runtime {
        "containerd" => Some(((2, 1), "2.1")),
        "cri-o" => Some(((1, 31), "1.31")),
        _ => None,
    }
}

/// The first release of a runtime that mounts a part of an image. Older ones pass over the path.
fn first_with_sub_paths(runtime: &str) -> Option<Release> {
    match runtime {
        "containerd" => Some(((2, 2), "2.2")),
        "cri-o" => Some(((1, 33), "1.33")),
        _ => None,
    }
}

/// Returns the first release of a runtime that can do something, where this version is older. One that is not known is tried.
fn too_old(
    runtime: &str,
    version: &str,
    first: fn(&str) -> Option<Release>,
) -> Option<&'static str> {
    let (first, text) = first(runtime)?;
    (release_of(version)? < first).then_some(text)
}

/// Returns the first two numbers of a version; `None` when it does not begin with two.
pub(super) fn release_of(version: &str) -> Option<(u32, u32)> {
    let mut parts = version
        .trim_start_matches('v')
        .split(|c: char| !c.is_ascii_digit())
        .map(str::parse::<u32>);
    match (parts.next(), parts.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => Some((major, minor)),
        _ => None,
    }
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
            let found = too_old(runtime, version, first_with_images);
            assert_eq!(found, needed, "{runtime} {version}");
        }
        for (runtime, version, needed) in [
            ("containerd", "v2.1.4", Some("2.2")),
            ("containerd", "2.2.0", None),
            ("cri-o", "1.32.1", Some("1.33")),
            ("cri-o", "1.33.0", None),
            ("other", "0.1", None),
        ] {
            let found = too_old(runtime, version, first_with_sub_paths);
            assert_eq!(found, needed, "{runtime} {version}");
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
        let first = &mounts[0];
        assert_eq!(first.container_path, "/data");
        assert!(first.readonly && first.host_path.is_empty());
        let image = first.image.as_ref().unwrap();
        assert_eq!(image.image, "sha256:1");
        assert_eq!(image.user_specified_image, "data:1");
    }

    #[test]
    fn a_part_of_an_image_is_a_path_within_it() {
        let env = Environment {
            vars: vec![("DIR".to_owned(), b"conf".to_vec())],
        };
        let part = |of: serde_json::Value| {
            let of: VolumeMount = serde_json::from_value(of).unwrap();
            let parts = with_parts(vec![(v1::Mount::default(), of)], &env)?;
            Ok::<_, String>(parts[0].sub_path.clone())
        };
        let whole = json!({"name": "v", "mountPath": "/m"});
        assert_eq!(part(whole).unwrap(), "");
        let fixed = json!({"name": "v", "mountPath": "/m", "subPath": "etc/x"});
        assert_eq!(part(fixed).unwrap(), "etc/x");
        let expanded = json!({"name": "v", "mountPath": "/m", "subPathExpr": "etc/$(DIR)"});
        assert_eq!(part(expanded).unwrap(), "etc/conf");
        for (bad, why) in [
            (
                json!({"name": "v", "mountPath": "/m", "subPath": "/etc"}),
                "within",
            ),
            (
                json!({"name": "v", "mountPath": "/m", "subPath": "a/../b"}),
                "within",
            ),
            (
                json!({"name": "v", "mountPath": "/m", "subPathExpr": "$(GONE)"}),
                "GONE",
            ),
        ] {
            let error = part(bad).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
