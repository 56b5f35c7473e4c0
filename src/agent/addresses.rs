//! Addresses of this node: the reported ones, and those that its name stands for.

use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use tokio::net::lookup_host;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::Tasks;
use super::base::Base;
use crate::kubeletconfig::AgentConfig;

/// Interval between lookups of the node's name.
const NAME_LOOK: Duration = Duration::from_secs(10);
/// Longest wait for an answer; without one the node continues.
const NAME_PATIENCE: Duration = Duration::from_secs(2);

/// Finds the addresses of this node: the reported ones first, then those of the machine and of the node's name.
pub(super) fn find(
    config: &AgentConfig,
    base: &Base,
    tasks: &mut Tasks,
    token: &CancellationToken,
) {
    if let Some(known) = base.node.get() {
        base.addresses.remember(reported_addresses(&known));
    }
    follow_provider(config, base, tasks, token);
    follow_name(config, base, tasks, token);
    if let Err(error) = base.addresses.find() {
        warn!(
            error,
            "the node has no address yet; pods report the last one"
        );
    }
}

/// Returns the addresses that the node's object last reported.
fn reported_addresses(node: &Node) -> Vec<IpAddr> {
    addresses_of(node, "InternalIP")
}

/// Has the addresses follow those that a cloud provider gives the node, where it does.
fn follow_provider(
    config: &AgentConfig,
    base: &Base,
    tasks: &mut Tasks,
    token: &CancellationToken,
) {
    if !config.external_cloud_provider {
        return;
    }
    let (addresses, token) = (base.addresses.clone(), token.clone());
    let mut node = base.node.subscribe();
    tasks.add("addresses of a cloud provider", async move {
        let follow = async {
            loop {
                if let Some(node) = node.borrow_and_update().clone() {
                    addresses.set_provided(&provided_addresses(&node));
                }
                if node.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        };
        token.run_until_cancelled(follow).await;
    });
}

/// Returns the addresses of a node's object, those of its own network first.
fn provided_addresses(node: &Node) -> Vec<IpAddr> {
    let external = addresses_of(node, "ExternalIP");
    let mut all = addresses_of(node, "InternalIP");
    all.extend(external);
    all
}

fn addresses_of(node: &Node, type_: &str) -> Vec<IpAddr> {
    let status = node.status.as_ref();
    let addresses = status.and_then(|status| status.addresses.as_ref());
    let of_type = addresses.into_iter().flatten().filter(|a| a.type_ == type_);
    of_type.filter_map(|a| a.address.parse().ok()).collect()
}

/// Looks up which addresses the node's name stands for, again and again. Upstream does so for each status of the node; here
/// nothing waits for it, since a name server may not answer.
fn follow_name(config: &AgentConfig, base: &Base, tasks: &mut Tasks, token: &CancellationToken) {
    if !base.addresses.go_by_name() {
        return;
    }
    let (name, addresses) = (config.node_name.clone(), base.addresses.clone());
    let token = token.clone();
    tasks.add("address of the node's name", async move {
        let look = async {
            loop {
                let mut lookup = std::pin::pin!(lookup_host((name.as_str(), 0)));
                let answer = match tokio::time::timeout(NAME_PATIENCE, &mut lookup).await {
                    Ok(answer) => answer,
                    Err(_) => {
                        addresses.do_without_name();
                        lookup.await
                    }
                };
                match answer {
                    Ok(found) => addresses.set_of_name(found.map(|at| at.ip()).collect()),
                    // A name server that is away changes nothing.
                    Err(error) => {
                        debug!(%error, name, "cannot resolve the node's name");
                        addresses.do_without_name();
                    }
                }
                tokio::time::sleep(NAME_LOOK).await;
            }
        };
        token.run_until_cancelled(look).await;
    });
}
