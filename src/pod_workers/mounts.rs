//! Collects the inputs of a container's mounts that its spec does not contain: subPath mounts, resolved volumes, and
//! the abilities of its runtime handler. Also reports the mounts in the container's status.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use futures::FutureExt;
use k8s_openapi::api::core::v1::{Container, Pod};

use super::{WorkerContext, resolve};
use crate::core::volume_mounts::asks_recursive_read_only;
use crate::core::volumes::{Remote, Source, keys, records};
use crate::kuberuntime::container_mounts;
use crate::kuberuntime::env::Environment;
use crate::types::{PodExt, PodUid, causes};
use crate::volumemanager::subpath::SubPath;

/// Result of [`prepare`].
#[derive(Default)]
pub(super) struct Prepared {
    pub(super) remotes: BTreeMap<String, Remote>,
    pub(super) sub_paths: BTreeMap<usize, PathBuf>,
    /// See `ContainerInputs::without_labels`.
    pub(super) without_labels: BTreeSet<String>,
    pub(super) recursive_read_only: bool,
}

/// Prepares the subPath mounts of a container, and looks up the other inputs of its mounts.
///
/// # Errors
/// The message for a mount that is not available; the container then waits with `CreateContainerConfigError`.
pub(super) async fn prepare(
    context: &WorkerContext,
    pod: &Pod,
    container: &Container,
    env: &Environment,
    volumes: &BTreeMap<String, PathBuf>,
) -> Result<Prepared, String> {
    let uid = pod.uid();
    let mut prepared = Prepared {
        remotes: remotes(context, &uid)?,
        ..Prepared::default()
    };
    if asks_recursive_read_only(container) {
        let handler = resolve::runtime_handler(context, pod).await?;
        let can = context.runtime_state.mounts_recursively(&handler);
        prepared.recursive_read_only = can.unwrap_or(false);
    }
    if context.node.selinux {
        // Of the others it is known.
        let of_drivers = volumes.iter().filter(|(name, _)| {
            let remote = prepared.remotes.get(*name);
            remote.is_some_and(|r| matches!(r.source, Source::Csi(_)))
        });
        let of_drivers = of_drivers
            .map(|(n, path)| (n.clone(), path.clone()))
            .collect();
        let found = context.content.volumes.without_labels(of_drivers).await;
        prepared.without_labels = found.map_err(|error| {
            format!("look whether the files of its volumes have SELinux labels: {error}")
        })?;
    }
    look_at_host_paths(context, pod, container, &prepared.remotes).await?;
    for (index, mount) in container.volume_mounts.iter().flatten().enumerate() {
        // Parts of images are the runtime's business, and a volume that is missing is told of later.
        let Some(root) = volumes.get(&mount.name) else {
            continue;
        };
        let Some(path) = container_mounts::sub_path(mount, env)? else {
            continue;
        };
        let part = SubPath {
            volume: mount.name.clone(),
            root: root.clone(),
            container: container.name.clone(),
            index,
            path,
        };
        let at = context.content.volumes.sub_path(&uid, part).await;
        let at = at.map_err(|error| match std::error::Error::source(&error) {
            Some(cause) => format!("{error}: {cause}"),
            None => error.to_string(),
        })?;
        prepared.sub_paths.insert(index, at);
    }
    Ok(prepared)
}

/// Looks at the hostPaths that a container mounts, whose types say what has to be there.
async fn look_at_host_paths(
    context: &WorkerContext,
    pod: &Pod,
    container: &Container,
    remotes: &BTreeMap<String, Remote>,
) -> Result<(), String> {
    let uid = pod.uid();
    for mount in container.volume_mounts.iter().flatten() {
        let mut volumes = pod.spec_ref().volumes.iter().flatten();
        let own = volumes.find(|volume| volume.name == mount.name);
        let own = own.and_then(|volume| volume.host_path.as_ref());
        let (path, type_) = match (own, remotes.get(&mount.name).map(|remote| &remote.source)) {
            (Some(own), _) => (own.path.as_str(), own.type_.as_deref().unwrap_or_default()),
            (None, Some(Source::HostPath { path, type_ })) => (path.as_str(), type_.as_str()),
            _ => continue,
        };
        context
            .content
            .volumes
            .look_at_host_path(&uid, &mount.name, path, type_)
            .await
            .map_err(|error| causes(&error))?;
    }
    Ok(())
}

/// Returns the remote volumes of a pod as they were resolved when they were mounted, by volume name.
pub(super) fn remotes(
    context: &WorkerContext,
    uid: &PodUid,
) -> Result<BTreeMap<String, Remote>, String> {
    let seen = context.store.snapshot();
    let mut all = BTreeMap::new();
    for found in records::volumes_of(&seen, uid) {
        let content = found.content.map_err(|error| error.to_string())?;
        if let Some((_, name)) = keys::split(&found.key) {
            all.insert(name.to_owned(), (*content.remote).clone());
        }
    }
    Ok(all)
}

/// Returns whether a pod's mounts can be read-only recursively; `None` while that is unknown.
pub(super) fn mounts_recursively(context: &WorkerContext, pod: &Pod) -> Option<bool> {
    // A class that has to be asked for is known a moment later.
    let handler = resolve::runtime_handler(context, pod)
        .now_or_never()?
        .ok()?;
    context.runtime_state.mounts_recursively(&handler)
}

/// The images that volumes of kind `image` stand for, as they were resolved; reported in statuses. Shared handle, kept
/// in memory: a restarted agent goes on with what the recorded status says.
#[derive(Clone, Debug, Default)]
pub struct VolumeImages(Arc<Mutex<HashMap<PodUid, BTreeMap<String, String>>>>);

impl VolumeImages {
    fn with<T>(&self, f: impl FnOnce(&mut HashMap<PodUid, BTreeMap<String, String>>) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn set(&self, uid: &PodUid, volume: &str, image: &str) {
        self.with(|all| {
            let of_pod = all.entry(uid.clone()).or_default();
            of_pod.insert(volume.to_owned(), image.to_owned());
        });
    }

    /// By volume.
    pub(super) fn of(&self, uid: &PodUid) -> BTreeMap<String, String> {
        self.with(|all| all.get(uid).cloned().unwrap_or_default())
    }

    pub(super) fn remove(&self, uid: &PodUid) {
        self.with(|all| all.remove(uid));
    }
}
