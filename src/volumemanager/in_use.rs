//! Reports volumes as in use before they are touched.
//!
//! Before it detaches a volume, a controller reads the node's `status.volumesInUse`. So the plugins of attachable
//! volumes are wrapped: the first step of a volume waits until the node object in the API server shows its name. The
//! manager has recorded the volume by then, so it is part of the report. Upstream: `MarkVolumesAsReportedInUse` and the
//! check in `VerifyControllerAttachedVolume`.
//!
//! After a restart without API server, the last known node object counts, since only this agent removes names from it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Node;

use super::remote::{GroupBy, RemoteError, RemotePlugin, Target, Usage};
use crate::core::volumes::Remote;
use crate::kuberuntime::sources::Resolved;
use crate::node_object::NodeObject;

/// Time after which a waiting step is given up, to be retried later.
const PATIENCE: Duration = Duration::from_secs(15);

/// A plugin that stages nothing before the node shows it as in use.
pub struct Reported {
    plugin: Arc<dyn RemotePlugin>,
    node: NodeObject,
}

impl std::fmt::Debug for Reported {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Reported")
    }
}

impl Reported {
    /// Wraps a plugin; `node` is the node as the API server shows it.
    pub fn new(plugin: Arc<dyn RemotePlugin>, node: NodeObject) -> Self {
        Self { plugin, node }
    }
}

fn shows(node: Option<&Arc<Node>>, name: &str) -> bool {
    let status = node.and_then(|node| node.status.as_ref());
    let mut names = status.and_then(|s| s.volumes_in_use.as_ref()).into_iter();
    names.any(|names| names.iter().any(|known| known == name))
}

async fn reported(node: NodeObject, name: Option<String>) -> Result<(), RemoteError> {
    let Some(name) = name else {
        return Ok(());
    };
    let mut changes = node.subscribe();
    let seen = async {
        // The sender lives as long as `node`.
        let seen = changes.wait_for(|node| shows(node.as_ref(), &name)).await;
        drop(seen);
    };
    match tokio::time::timeout(PATIENCE, seen).await {
        Ok(()) => Ok(()),
        Err(_) => Err(RemoteError::Waiting(format!(
            "volume {name} has not been added to the list of VolumesInUse in the node's volume status"
        ))),
    }
}

/// Nothing is mounted without the secrets and tokens that it takes.
fn complete(volume: &Resolved) -> Result<(), RemoteError> {
    let missing = volume.missing.clone();
    missing.map_or(Ok(()), |why| Err(RemoteError::Waiting(why)))
}

impl RemotePlugin for Reported {
    fn stage(
        &self,
        volume: Arc<Resolved>,
        at: PathBuf,
    ) -> BoxFuture<'static, Result<(), RemoteError>> {
        let (plugin, node) = (Arc::clone(&self.plugin), self.node.clone());
        Box::pin(async move {
            complete(&volume)?;
            reported(node, volume.remote.unique_name.clone()).await?;
            plugin.stage(volume, at).await
        })
    }

    fn publish(
        &self,
        volume: Arc<Resolved>,
        target: Target,
    ) -> BoxFuture<'static, Result<GroupBy, RemoteError>> {
        match complete(&volume) {
            Ok(()) => self.plugin.publish(volume, target),
            Err(error) => Box::pin(async { Err(error) }),
        }
    }

    fn unpublish(
        &self,
        volume: Arc<Remote>,
        path: PathBuf,
    ) -> BoxFuture<'static, Result<(), RemoteError>> {
        self.plugin.unpublish(volume, path)
    }

    fn unstage(
        &self,
        volume: Arc<Remote>,
        at: PathBuf,
    ) -> BoxFuture<'static, Result<(), RemoteError>> {
        self.plugin.unstage(volume, at)
    }

    fn wants_republish(&self, volume: &Remote) -> bool {
        self.plugin.wants_republish(volume)
    }

    fn expand(
        &self,
        volume: Arc<Resolved>,
        staged: Option<PathBuf>,
        path: PathBuf,
        bytes: u64,
    ) -> BoxFuture<'static, Result<Option<u64>, RemoteError>> {
        self.plugin.expand(volume, staged, path, bytes)
    }

    fn usage(
        &self,
        volume: Arc<Remote>,
        path: PathBuf,
    ) -> BoxFuture<'static, Result<Option<Usage>, RemoteError>> {
        self.plugin.usage(volume, path)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;

    fn node(in_use: &[&str]) -> Arc<Node> {
        let node = json!({"metadata": {"name": "n"}, "status": {"volumesInUse": in_use}});
        Arc::new(serde_json::from_value(node).unwrap())
    }

    #[test]
    fn a_volume_is_mounted_with_the_secrets_that_it_takes_alone() {
        let volume = json!({"name": "pv", "claim": null, "mode": "Filesystem", "read_only": false,
            "mount_options": [], "unique_name": null, "terms": {"gid": null, "alone": false},
            "source": {"Nfs": {"path": "/", "server": "s"}}});
        let mut resolved = Resolved {
            remote: serde_json::from_value(volume).unwrap(),
            secrets: BTreeMap::new(),
            tokens: BTreeMap::new(),
            capacity: None,
            missing: None,
        };
        assert_eq!(complete(&resolved), Ok(()));
        let why = "secret ns/s not found".to_owned();
        resolved.missing = Some(why.clone());
        assert_eq!(complete(&resolved), Err(RemoteError::Waiting(why)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_volume_is_touched_once_the_node_shows_it() {
        let known = NodeObject::default();
        assert_eq!(
            reported(known.clone(), None).await,
            Ok(()),
            "nobody attaches it"
        );
        let name = Some("kubernetes.io/csi/d^h".to_owned());
        known.set(node(&["another"]));
        let failed = reported(known.clone(), name.clone()).await;
        assert!(matches!(failed, Err(RemoteError::Waiting(_))), "{failed:?}");
        let waiting = tokio::spawn(reported(known.clone(), name.clone()));
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        known.set(node(&["another", "kubernetes.io/csi/d^h"]));
        assert_eq!(waiting.await.unwrap(), Ok(()));
        assert_eq!(reported(known, name).await, Ok(()));
    }
}
