//! NFS exports, mounted by the system's `mount` and `mount.nfs`; upstream's `pkg/volume/nfs`.
//!
//! Each pod has a mount of its own; the kernel shares what they have in common. A server that does not answer
//! holds up its own pod alone: the tools are given up after a while, and nothing looks at what is mounted.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::NFSVolumeSource;

use super::command::{Call, Tools};
use super::disk::{self, failed, join_options, make_mount_point, mounted_at, tool_failed};
use super::mounts::Mount;
use super::remote::{GroupBy, RemoteError, RemotePlugin, Target};
use crate::core::volumes::{Remote, Source};
use crate::kuberuntime::sources::Resolved;

/// Deadline of `mount` and `umount`. `mount.nfs` itself gives up a server after two minutes.
const PATIENCE: Duration = Duration::from_secs(90);

/// Mounts NFS exports.
#[derive(Clone, Debug)]
pub struct NfsPlugin {
    tools: Tools,
}

impl NfsPlugin {
    /// Mounts by these tools.
    pub fn new(tools: Tools) -> Self {
        Self {
            tools: tools.patient(PATIENCE),
        }
    }

    /// Gives the tools so long.
    #[must_use]
    pub fn patient(mut self, patience: Duration) -> Self {
        self.tools = self.tools.patient(patience);
        self
    }

    async fn mount(&self, volume: &Remote, path: &Path) -> Result<(), RemoteError> {
        let nfs = source_of(volume)?;
        let export = export(nfs)?;
        let read_only: &[&str] = if volume.read_only { &["ro"] } else { &[] };
        let options = join_options(&volume.mount_options, read_only)?;
        let (at, wanted) = (path.to_owned(), export.clone());
        let is_there =
            disk::run(
                move || match mounted_at(&at).map_err(failed("look for mount at", &at))? {
                    None => make_mount_point(&at).map(|()| false),
                    Some(found) if is_same(&found, &wanted) => Ok(true),
                    Some(found) => Err(RemoteError::Failed(format!(
                        "mount {wanted} at {}: {} ({}) is mounted there already; unmount it",
                        at.display(),
                        found.source,
                        found.fstype
                    ))),
                },
            )
            .await?;
        if is_there {
            return Ok(());
        }
        let what = format!("mount {export}");
        let tool_error = |error| tool_failed(&what, &error);
        self.tools.require("mount.nfs").map_err(tool_error)?;
        let mut call = Call::new("mount").flags(["-t", "nfs"]);
        if !options.is_empty() {
            call = call.flags(["-o"]).data("mountOptions", &options);
        }
        let call = call.flags(["--"]).data("server", &export).path(path);
        self.tools.succeed(call).await.map_err(tool_error)?;
        Ok(())
    }
}

fn is_same(found: &Mount, export: &str) -> bool {
    let trimmed = |s: &str| s.trim_end_matches('/').to_owned();
    found.fstype.starts_with("nfs") && trimmed(&found.source) == trimmed(export)
}

fn source_of(volume: &Remote) -> Result<&NFSVolumeSource, RemoteError> {
    match &volume.source {
        Source::Nfs(nfs) => Ok(nfs),
        _ => Err(RemoteError::Failed(format!(
            "volume {} is not of NFS",
            volume.name
        ))),
    }
}

/// `server:path` as `mount.nfs` wants it, an IPv6 address in brackets.
///
/// # Errors
/// A server that can be none, a path that is not absolute.
fn export(nfs: &NFSVolumeSource) -> Result<String, RemoteError> {
    let NFSVolumeSource { server, path, .. } = nfs;
    let bare = server
        .strip_prefix('[')
        .and_then(|s| s.strip_suffix(']'))
        .unwrap_or(server);
    let of_names = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    // With a zone, `fe80::1%eth0`.
    let of_v6 = |c: char| of_names(c) || ":%".contains(c);
    let is_v6 = bare.contains(':');
    let fits = if is_v6 {
        bare.chars().all(of_v6)
    } else {
        bare.chars().all(of_names) && bare == server
    };
    if bare.is_empty() || bare.starts_with('-') || !fits {
        return Err(RemoteError::Failed(format!(
            "NFS server {server:?} is neither a name nor an address; correct nfs.server"
        )));
    }
    if !path.starts_with('/') || path.contains(['\0', '\n', '\r']) {
        return Err(RemoteError::Failed(format!(
            "NFS path {path:?} is not absolute or holds what no path holds; correct nfs.path"
        )));
    }
    Ok(if is_v6 {
        format!("[{bare}]:{path}")
    } else {
        format!("{bare}:{path}")
    })
}

impl RemotePlugin for NfsPlugin {
    fn stage(
        &self,
        _volume: Arc<Resolved>,
        _at: PathBuf,
    ) -> BoxFuture<'static, Result<(), RemoteError>> {
        async { Ok(()) }.boxed()
    }

    fn publish(
        &self,
        volume: Arc<Resolved>,
        target: Target,
    ) -> BoxFuture<'static, Result<GroupBy, RemoteError>> {
        let this = self.clone();
        async move {
            this.mount(&volume.remote, &target.path).await?;
            // Who may use an export is for its server to say.
            Ok(GroupBy::Nobody)
        }
        .boxed()
    }

    fn unpublish(
        &self,
        volume: Arc<Remote>,
        path: PathBuf,
    ) -> BoxFuture<'static, Result<(), RemoteError>> {
        let this = self.clone();
        async move {
            let about = match source_of(&volume) {
                Ok(nfs) => format!("NFS server {} (path {})", nfs.server, nfs.path),
                Err(_) => "its NFS server".to_owned(),
            };
            match disk::unmount(&this.tools, &path, &about).await {
                Err(RemoteError::Uncertain(why)) if disk::unmount_by_force(&path).await => {
                    tracing::warn!(path = %path.display(), why, "the server does not answer, unmounted by force");
                    disk::unmounted(&path).await
                }
                done => done,
            }
        }
        .boxed()
    }

    fn unstage(
        &self,
        _volume: Arc<Remote>,
        _at: PathBuf,
    ) -> BoxFuture<'static, Result<(), RemoteError>> {
        async { Ok(()) }.boxed()
    }
}

#[cfg(test)]
#[path = "nfs_tests.rs"]
mod tests;
