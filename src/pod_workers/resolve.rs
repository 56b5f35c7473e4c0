//! Resolves the objects that a pod refers to, just before they are needed: volumes before they are mounted,
//! environments and pull secrets before a container is created, the runtime class before a sandbox.
//!
//! An object that is not available is passed on with the reason. Only what needs the object waits, and reports that
//! reason.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use futures::FutureExt;
use futures::future::join_all;
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Container, Pod, Service};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use tracing::debug;

use super::WorkerContext;
use super::remotes::{self, Asker};
use crate::images::PullSecrets;
use crate::kuberuntime::sources::{PodToken, References, Sources, TokenRef};
use crate::objects::ObjectError;
use crate::types::PodExt;

/// Returns the objects that a pod's volumes refer to, and its resolved remote volumes.
pub(super) async fn volumes(context: &WorkerContext, pod: &Pod) -> Sources {
    let mut sources = find(context, pod, References::of_volumes(pod)).await;
    sources.remotes = remotes::find(&Asker::of(context), pod).await;
    sources
}

/// Collects the sources of a container's environment. `volumes` holds the host path of each mounted volume.
pub(super) async fn environment(
    context: &WorkerContext,
    pod: &Pod,
    container: &Container,
    volumes: &BTreeMap<String, PathBuf>,
) -> Sources {
    let mut sources = find(context, pod, References::of_environment(container)).await;
    sources.services = services(context, pod).await;
    sources.files = (context.content.volumes)
        .env_files(&pod.uid(), container, volumes)
        .await;
    sources
}

/// A pod's pull secrets; those that cannot be had are named.
pub(super) async fn pull_secrets(context: &WorkerContext, pod: &Pod) -> PullSecrets {
    let mut all = PullSecrets::default();
    for reference in pod.spec_ref().image_pull_secrets.iter().flatten() {
        let name = &reference.name;
        match context.content.objects.secret(pod.namespace(), name).await {
            Ok(Some(secret)) => all.found.push(secret),
            Ok(None) => all.missing.push(name.clone()),
            Err(error) => {
                debug!(%error, "cannot get a pull secret");
                all.missing.push(name.clone());
            }
        }
    }
    all
}

/// The runtime handler of a pod, empty for the runtime's default. Upstream: `LookupRuntimeHandler`.
///
/// # Errors
/// Text that names the class.
pub(super) async fn runtime_handler(context: &WorkerContext, pod: &Pod) -> Result<String, String> {
    let class = pod.spec_ref().runtime_class_name.as_deref();
    let Some(name) = class.filter(|name| !name.is_empty()) else {
        return Ok(String::new());
    };
    match context.content.objects.runtime_class(name).await {
        Ok(Some(class)) => Ok(class.handler.clone()),
        Ok(None) => Err(format!(
            "RuntimeClass \"{name}\" not found; create it, or correct spec.runtimeClassName"
        )),
        Err(error) => Err(error.to_string()),
    }
}

async fn find(context: &WorkerContext, pod: &Pod, wanted: References) -> Sources {
    let (objects, namespace) = (&context.content.objects, pod.namespace());
    let config_maps = join_all(wanted.config_maps.into_iter().map(|name| async {
        let found = objects.config_map(namespace, &name).await;
        (name, found.map_err(|e| e.to_string()))
    }));
    let secrets = join_all(wanted.secrets.into_iter().map(|name| async {
        let found = objects.secret(namespace, &name).await;
        (name, found.map_err(|e| e.to_string()))
    }));
    let tokens = join_all(wanted.tokens.into_iter().map(|wanted| async {
        let found = objects.token(pod, &token_request(pod, &wanted)).await;
        let found = found.map(|t| PodToken {
            token: t.token,
            stale: t.stale,
            expires_ms: t.expires_ms,
        });
        (wanted, found.map_err(|e| e.to_string()))
    }));
    let trust_bundles = async {
        match wanted.trust_bundles {
            true => Some(objects.trust_bundles().await.map_err(|e| e.to_string())),
            false => None,
        }
    };
    let certificates = join_all(wanted.certificates.into_iter().map(|of| async {
        let found = objects.pod_certificate(pod, &of).await;
        (of, found.map_err(|e| e.to_string()))
    }));
    let (config_maps, secrets, tokens, trust_bundles, certificates) =
        tokio::join!(config_maps, secrets, tokens, trust_bundles, certificates);
    Sources {
        config_maps: config_maps.into_iter().collect(),
        secrets: secrets.into_iter().collect(),
        tokens: tokens.into_iter().collect(),
        trust_bundles,
        certificates: certificates.into_iter().collect(),
        remotes: BTreeMap::new(),
        files: BTreeMap::new(),
        services: None,
        allocatable: allocatable(context),
    }
}

pub(super) fn token_request(pod: &Pod, wanted: &TokenRef) -> TokenRequestSpec {
    let audience = Some(wanted.audience.clone()).filter(|a| !a.is_empty());
    TokenRequestSpec {
        audiences: audience.map(|a| vec![a]),
        bound_object_ref: Some(BoundObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: Some(pod.name().to_owned()),
            uid: Some(pod.uid().to_string()),
        }),
        expiration_seconds: Some(wanted.expiration_seconds),
    }
}

/// A static pod takes what is known and waits for nothing; without an API server there are no services.
async fn services(context: &WorkerContext, pod: &Pod) -> Option<Vec<Arc<Service>>> {
    let found = if pod.is_static() {
        context.content.objects.services().now_or_never()?
    } else {
        context.content.objects.services().await
    };
    match found {
        Ok(services) => Some(services),
        Err(ObjectError::Standalone { .. }) => Some(Vec::new()),
        Err(error) => {
            debug!(%error, "the services are unknown yet");
            None
        }
    }
}

/// Returns the node's allocatable resources, or the machine's capacity until the node object has some.
fn allocatable(context: &WorkerContext) -> BTreeMap<String, Quantity> {
    let node = context.content.node_object.get();
    let told = node
        .as_ref()
        .and_then(|n| n.status.as_ref())
        .and_then(|s| s.allocatable.clone());
    if let Some(told) = told.filter(|a| !a.is_empty()) {
        return told;
    }
    let mut machine = BTreeMap::new();
    if let Ok(cores) = std::thread::available_parallelism() {
        machine.insert("cpu".to_owned(), Quantity(cores.to_string()));
    }
    if let Some(bytes) = context.node.machine.get().memory() {
        machine.insert("memory".to_owned(), Quantity(bytes.to_string()));
    }
    machine
}
