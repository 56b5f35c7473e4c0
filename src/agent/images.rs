//! Setup of images: the manager of the settings, and the removal of unused images.

use std::sync::Arc;

use tokio::sync::mpsc;

use super::base::Base;
use super::{api, early_ends};
use crate::config::SourcesReady;
use crate::core::image_gc;
use crate::core::state::SourceRecord;
use crate::images::{
    Collection, ImageConfig, ImageManager, NodeLogins, RuntimeTool, VerificationPolicy,
    images_named, is_over,
};
use crate::kubeletconfig::{AgentConfig, KubeletConfiguration};
use crate::nodestatus::NodeStatusHandle;
use crate::objects::Objects;
use crate::store::layout::Layout;
use crate::store::mounts::{Directory, Mount};
use crate::types::PodSource;

/// Builds the manager of images. Returns the names of images that change, too.
pub(super) fn build(
    config: &AgentConfig,
    base: &Base,
    objects: &Objects,
    runtime_name: &str,
    node_status: Option<NodeStatusHandle>,
) -> (Arc<ImageManager>, mpsc::Receiver<String>) {
    let (changed, changes) = early_ends::image_changes();
    let images = manager(config, base, objects, runtime_name, node_status).announcing(changed);
    (Arc::new(images), changes)
}

fn manager(
    config: &AgentConfig,
    base: &Base,
    objects: &Objects,
    runtime_name: &str,
    node_status: Option<NodeStatusHandle>,
) -> ImageManager {
    let settings = ImageConfig {
        serialize_pulls: config.kubelet.serialize_image_pulls,
        max_parallel: config
            .kubelet
            .max_parallel_image_pulls
            .and_then(|n| usize::try_from(n).ok()),
    };
    let verification = VerificationPolicy {
        policy: config.kubelet.image_pull_credentials_verification_policy,
        allowlist: config
            .kubelet
            .preloaded_images_verification_allowlist
            .clone(),
    };
    let mut images = ImageManager::new(settings, Arc::clone(&base.clock), base.metrics.clone())
        .verifying(verification)
        .falling_back(config.image_pull_policy_fallback)
        .with_node_logins(NodeLogins::new(
            &config.root_dir,
            &std::env::current_dir().unwrap_or_default(),
            std::env::home_dir().as_deref(),
        ))
        .preloading(
            Layout::new(&config.state_dir).images(),
            Arc::new(RuntimeTool::new(runtime_name, config.image_endpoint.path())),
        )
        .preloading_when_mounted(Mount::new(
            Directory::Preload,
            &Layout::new(&config.state_dir).images(),
            &config.state_dir,
        ));
    if let Some(node) = node_status {
        // The node tells which images it has.
        images = images.telling(Arc::new(move || node.images_changed()));
    }
    if let Some(disk) = &base.image_disk {
        images = images.syncing(Arc::clone(disk));
    }
    match api::credential_providers(config, &base.clock, objects, &base.metrics) {
        Some(providers) => images.with_credential_providers(providers),
        None => images,
    }
}

/// Returns the rules by which unused images are removed.
pub(super) fn collection(config: &AgentConfig, base: &Base, ready: SourcesReady) -> Collection {
    let (pods, store) = (base.pods.clone(), base.store.clone());
    let records = base.store.clone();
    Collection {
        policy: gc_policy(&config.kubelet),
        wanted: Arc::new(move || {
            let (pods, seen) = (pods.all(), records.snapshot());
            let pods = pods.iter().filter(|pod| !is_over(pod, &seen));
            images_named(pods.map(|pod| &**pod))
        }),
        // What the API server wanted is on record, unless the store was lost.
        knows_pods: Arc::new(move || {
            let api = PodSource::Api.as_str();
            let is_on_record = store.snapshot().record::<SourceRecord>(api).is_some();
            ready.all_ready() || (ready.static_ready() && is_on_record)
        }),
        recorder: Arc::clone(&base.recorder) as _,
        store: base.store.clone(),
    }
}

fn gc_policy(kubelet: &KubeletConfiguration) -> image_gc::Policy {
    image_gc::Policy {
        minimum_age: kubelet.image_minimum_gc_age,
        maximum_age: kubelet.image_maximum_gc_age,
        high: kubelet.image_gc_high_threshold_percent,
        low: kubelet.image_gc_low_threshold_percent,
    }
}
