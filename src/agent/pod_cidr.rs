//! Passes the addresses of this node's pods to the container runtime, which may make its network configuration of them
//! (`conf_template` of containerd). Upstream: `updatePodCIDR`.
//!
//! They come from the node's object, and without an API server from `podCIDR`. The object on record counts while the server is
//! away.

use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::kuberuntime::cri::CriClient;
use crate::node_object::NodeObject;

/// Time until a refused call is repeated; doubled each time, up to [`LONGEST`].
const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(300);

/// Source of the addresses.
#[derive(Clone, Debug)]
pub(super) enum PodCidrs {
    /// `podCIDR`.
    Configured(String),
    /// The node in the API server.
    OfNode(NodeObject),
}

/// Tells the runtime at the start, and again when they change.
pub(super) async fn follow(source: PodCidrs, cri: CriClient, token: CancellationToken) {
    let following = async {
        match source {
            PodCidrs::Configured(cidrs) => tell(&cri, &cidrs).await,
            PodCidrs::OfNode(node) => follow_node(node.subscribe(), &cri).await,
        }
        // All is told. The agent ends with any of its tasks.
        std::future::pending::<()>().await;
    };
    token.run_until_cancelled(following).await;
}

/// Ends when nobody can change the node any more.
async fn follow_node(mut node: watch::Receiver<Option<std::sync::Arc<Node>>>, cri: &CriClient) {
    let mut told = None;
    loop {
        let wanted = node.borrow_and_update().as_deref().and_then(of_node);
        if let Some(cidrs) = wanted.filter(|cidrs| told.as_ref() != Some(cidrs)) {
            // The node changes all the time; only other addresses end the attempts.
            let others = node.wait_for(|node| {
                let now = node.as_deref().and_then(of_node);
                now.is_some_and(|now| now != cidrs)
            });
            tokio::select! {
                () = tell(cri, &cidrs) => {}
                changed = others => match changed {
                    Ok(_) => continue,
                    Err(_) => return,
                },
            }
            told = Some(cidrs);
        }
        if node.changed().await.is_err() {
            return;
        }
    }
}

/// Tells the runtime until it takes it. A runtime that does not know the call has no use for it.
async fn tell(cri: &CriClient, cidrs: &str) {
    let mut pause = FIRST;
    loop {
        match cri.update_runtime_config(cidrs).await {
            Ok(()) => return info!(cidrs, "the container runtime has the addresses of pods"),
            Err(error) if error.is_unimplemented() => return,
            Err(error) => warn!(
                cidrs,
                %error,
                again = %humantime::format_duration(pause),
                "the container runtime does not take the addresses of pods"
            ),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST);
    }
}

/// Returns what the node's object says, one for each family; `None` where nobody has assigned any.
fn of_node(node: &Node) -> Option<String> {
    let spec = node.spec.as_ref()?;
    let all = spec.pod_cidrs.as_ref().filter(|all| !all.is_empty());
    let cidrs = all.map_or_else(|| spec.pod_cidr.clone(), |all| Some(all.join(",")));
    cidrs.filter(|cidrs| !cidrs.is_empty())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::NodeSpec;

    use super::*;

    #[test]
    fn a_node_has_addresses_once_somebody_has_assigned_them() {
        let text = |cidr: Option<&str>, cidrs: Option<&[&str]>| {
            let cidrs = cidrs.map(|all| all.iter().map(ToString::to_string).collect());
            of_node(&Node {
                spec: Some(NodeSpec {
                    pod_cidr: cidr.map(str::to_owned),
                    pod_cidrs: cidrs,
                    ..NodeSpec::default()
                }),
                ..Node::default()
            })
        };
        assert_eq!(of_node(&Node::default()), None);
        assert_eq!(text(None, None), None);
        assert_eq!(text(Some(""), Some(&[])), None);
        let one = Some("10.1.0.0/24".to_owned());
        assert_eq!(text(Some("10.1.0.0/24"), None), one);
        assert_eq!(text(Some("10.1.0.0/24"), Some(&["10.1.0.0/24"])), one);
        let both = Some("10.1.0.0/24,fd00::/64".to_owned());
        assert_eq!(
            text(Some("10.1.0.0/24"), Some(&["10.1.0.0/24", "fd00::/64"])),
            both
        );
    }
}
