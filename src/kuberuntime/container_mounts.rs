//! Converts the `volumeMounts` of a container to mounts of the runtime; upstream's `makeMounts`.
//!
//! Pure. Input: host paths of volumes and of subPath mounts. Output: CRI mounts in the order of the spec. The runtime
//! sorts them by depth, so a mount below another one is visible in any order.
//!
//! **Invariant:** a mount that requests more than is possible (a recursive read-only mode, propagation to the host) is
//! an error, never a mount that grants more than was requested.

use k8s_cri::v1;
use k8s_openapi::api::core::v1::{Container, Pod, Volume, VolumeMount};

use super::container_config::ContainerInputs;
use super::env;
use super::node_context::NodeContext;
use super::sandbox_config::ConfigError;
use super::{security, selinux, sources};
use crate::core::volume_mounts::recursive_read_only;
use crate::core::volumes::{Remote, Source};
use crate::types::PodExt;

/// Attributes of a kind of volume; upstream's `volume.Attributes`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// No container may write.
    pub read_only: bool,
    /// It may be given a label of the pod's, if it has none by its mount.
    pub relabel: bool,
}

impl Attributes {
    /// The attributes of a volume. `remote` is what a remote volume was resolved to.
    pub fn of(volume: &Volume, remote: Option<&Remote>) -> Self {
        if sources::is_content_volume(volume) {
            // Only the agent writes what it keeps up to date.
            return Self {
                read_only: true,
                relabel: true,
            };
        }
        let Some(remote) = remote else {
            // What a hostPath leads to keeps the label that the node gave it.
            return Self {
                read_only: false,
                relabel: volume.empty_dir.is_some(),
            };
        };
        let relabel = match &remote.source {
            Source::Csi(_) | Source::Iscsi(_) | Source::Local(_) => !remote.read_only,
            // Other nodes use it as well.
            Source::Nfs(_) | Source::HostPath { .. } => false,
        };
        Self {
            read_only: remote.read_only,
            relabel,
        }
    }
}

/// The path within a volume that a mount asks for: `subPath`, or `subPathExpr` with its variables replaced. `None` =
/// the whole volume. Upstream's `ExpandContainerVolumeMounts`.
///
/// # Errors
/// Upstream's text when a variable is not set in the container's environment, or empty; and when its value is not UTF-8.
pub fn sub_path(mount: &VolumeMount, env: &env::Environment) -> Result<Option<String>, String> {
    let Some(template) = mount.sub_path_expr.as_deref().filter(|e| !e.is_empty()) else {
        return Ok(mount.sub_path.clone().filter(|path| !path.is_empty()));
    };
    let known = env::lookup_in(&env.vars);
    let missing = std::cell::RefCell::new(std::collections::BTreeSet::new());
    let expanded = env::expand_text(template, &|name| {
        let value = known(name).filter(|value| !value.is_empty());
        if value.is_none() {
            missing.borrow_mut().insert(name.to_owned());
        }
        value
    });
    let missing: Vec<String> = missing.into_inner().into_iter().collect();
    let place = || {
        format!(
            "(in subPathExpr {template:?} of volumeMount {:?})",
            mount.name
        )
    };
    if missing.is_empty() {
        let expanded = expanded.map_err(|error| format!("{error} {}", place()))?;
        return Ok(Some(expanded).filter(|path| !path.is_empty()));
    }
    Err(format!(
        "missing value for {} {}; set it in env of the container",
        missing.join(", "),
        place()
    ))
}

/// Returns whether a runtime can mount read-only recursively with a handler; an empty name is its default handler.
pub fn handler_mounts_recursively(handlers: &[v1::RuntimeHandler], handler: &str) -> bool {
    handlers
        .iter()
        .filter(|h| h.name == handler)
        .any(|h| h.features.is_some_and(|f| f.recursive_read_only_mounts))
}

/// The mounts of a container's volumes, without those of images.
pub(super) fn of_volumes(
    inputs: &ContainerInputs<'_>,
    ctx: &NodeContext,
) -> Result<Vec<v1::Mount>, ConfigError> {
    let ContainerInputs { pod, container, .. } = *inputs;
    let mut mounts = Vec::new();
    for (index, mount) in container.volume_mounts.iter().flatten().enumerate() {
        let error = |reason: String| ConfigError::Mount {
            container: container.name.clone(),
            volume: mount.name.clone(),
            reason,
        };
        let volume = volume_of(pod, &mount.name);
        if volume.is_some_and(|v| v.image.is_some()) {
            // The runtime mounts it; who pulls it adds the mount.
            continue;
        }
        let (Some(volume), Some(root)) = (volume, inputs.volumes.get(&mount.name)) else {
            return Err(error(format!(
                "cannot find volume {:?} to mount into container {:?}; add it to spec.volumes",
                mount.name, container.name
            )));
        };
        check_path(&mount.mount_path).map_err(error)?;
        let part = inputs.sub_paths.get(&index);
        let asks = [&mount.sub_path, &mount.sub_path_expr];
        if part.is_none()
            && asks
                .iter()
                .any(|p| p.as_ref().is_some_and(|p| !p.is_empty()))
        {
            return Err(error("its subPath was not prepared".to_owned()));
        }
        let remote = inputs.remotes.get(&mount.name);
        let attributes = Attributes::of(volume, remote);
        let recursive_read_only = recursive_read_only(mount, inputs.recursive_read_only)
            .map_err(|why| error(format!("failed to resolve recursive read-only mode: {why}")))?;
        mounts.push(v1::Mount {
            container_path: absolute(&mount.mount_path),
            host_path: part.unwrap_or(root).to_string_lossy().into_owned(),
            readonly: mount.read_only.unwrap_or(false) || attributes.read_only,
            recursive_read_only,
            propagation: propagation(mount, container).map_err(error)?.into(),
            selinux_relabel: ctx.selinux
                && attributes.relabel
                && !inputs.without_labels.contains(&mount.name)
                && !is_labelled(pod, &mount.name, remote, ctx),
            ..Default::default()
        });
    }
    Ok(mounts)
}

/// Returns whether the storage was mounted with the pod's label.
fn is_labelled(pod: &Pod, volume: &str, remote: Option<&Remote>, ctx: &NodeContext) -> bool {
    let by_mount = match remote.map(|r| &r.source) {
        Some(Source::Csi(csi)) => csi.selinux_mount,
        _ => false,
    };
    by_mount && matches!(selinux::mount_label(pod, volume, ctx), Ok(Some(_)))
}

/// A pod's volume.
fn volume_of<'a>(pod: &'a Pod, name: &str) -> Option<&'a Volume> {
    let mut volumes = pod.spec_ref().volumes.iter().flatten();
    volumes.find(|v| v.name == name)
}

fn propagation(mount: &VolumeMount, container: &Container) -> Result<v1::MountPropagation, String> {
    match mount.mount_propagation.as_deref() {
        None | Some("" | "None") => Ok(v1::MountPropagation::PropagationPrivate),
        Some("HostToContainer") => Ok(v1::MountPropagation::PropagationHostToContainer),
        Some("Bidirectional") if security::is_privileged(container) => {
            Ok(v1::MountPropagation::PropagationBidirectional)
        }
        Some("Bidirectional") => {
            Err("mountPropagation Bidirectional needs a privileged container".to_owned())
        }
        Some(other) => Err(format!(
            "invalid mountPropagation {other:?}; use None, HostToContainer or Bidirectional"
        )),
    }
}

fn check_path(path: &str) -> Result<(), String> {
    if path.is_empty() || path.contains([':', '\0']) {
        return Err(format!(
            "mountPath {path:?} has to be a path without ':'; correct it"
        ));
    }
    Ok(())
}

/// A path in a container; a relative one begins at its root, whatever its working directory is.
pub(super) fn absolute(path: &str) -> String {
    if path.starts_with('/') {
        path.to_owned()
    } else {
        format!("/{path}")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn mount(value: Value) -> VolumeMount {
        let mut mount = json!({"name": "v", "mountPath": "/v"});
        for (key, value) in value.as_object().unwrap() {
            mount[key] = value.clone();
        }
        serde_json::from_value(mount).unwrap()
    }

    #[test]
    fn a_part_is_what_its_variables_make_of_it() {
        let var = |name: &str, value: &[u8]| (name.to_owned(), value.to_owned());
        let env = env::Environment {
            vars: vec![
                var("A", b"a"),
                var("B", b"b/c"),
                var("EMPTY", b""),
                var("RAW", b"caf\xe9"),
            ],
        };
        for (asked, want) in [
            (json!({}), Ok(None)),
            (json!({"subPath": "", "subPathExpr": ""}), Ok(None)),
            (json!({"subPath": "$(A)"}), Ok(Some("$(A)"))),
            (json!({"subPathExpr": "$(A)/$(B)"}), Ok(Some("a/b/c"))),
            (json!({"subPathExpr": "$$(A)-$(A)"}), Ok(Some("$(A)-a"))),
            (
                json!({"subPathExpr": "$(Z)/$(A)/$(EMPTY)/$(Z)"}),
                Err("missing value for EMPTY, Z"),
            ),
            (
                json!({"subPathExpr": "$(A)/$(RAW)"}),
                Err("the value of variable RAW is not UTF-8"),
            ),
        ] {
            match (sub_path(&mount(asked.clone()), &env), want) {
                (Ok(got), Ok(want)) => assert_eq!(got.as_deref(), want, "{asked}"),
                (Err(got), Err(want)) => assert!(got.starts_with(want), "{asked}: {got}"),
                (got, want) => panic!("{asked}: {got:?} instead of {want:?}"),
            }
        }
    }

    #[test]
    fn kinds_of_volumes_differ_in_who_may_write_and_who_may_label() {
        let remote = |read_only: bool, source: Value| -> Remote {
            serde_json::from_value(json!({
                "name": "pv", "claim": null, "mode": "Filesystem", "read_only": read_only,
                "mount_options": [], "unique_name": null, "source": source,
            }))
            .unwrap()
        };
        let of = |volume: Value, remote: Option<Remote>| {
            let mut named = json!({"name": "v"});
            for (key, value) in volume.as_object().unwrap() {
                named[key] = value.clone();
            }
            let volume: Volume = serde_json::from_value(named).unwrap();
            let found = Attributes::of(&volume, remote.as_ref());
            (found.read_only, found.relabel)
        };
        let claim = || json!({"persistentVolumeClaim": {"claimName": "c"}});
        let nfs = || json!({"Nfs": {"server": "s", "path": "/"}});
        let local = || json!({"Local": {"path": "/disk"}});
        assert_eq!(of(json!({"emptyDir": {}}), None), (false, true));
        assert_eq!(
            of(json!({"hostPath": {"path": "/x"}}), None),
            (false, false)
        );
        for kind in ["configMap", "secret", "downwardAPI", "projected"] {
            assert_eq!(of(json!({kind: {}}), None), (true, true), "{kind}");
        }
        for read_only in [false, true] {
            let found = of(claim(), Some(remote(read_only, nfs())));
            assert_eq!(found, (read_only, false), "nfs");
            let found = of(claim(), Some(remote(read_only, local())));
            assert_eq!(found, (read_only, !read_only), "local");
        }
    }
}
