//! The API objects a pod refers to, as they were found; what the environment and the volumes are made of.
//!
//! Plain data: filled by whoever can ask the API server or its cache, read by the pure builders of
//! environments and volume contents. An object that could not be asked for is an error of its own, so that
//! only what needs it waits.
//!
//! **Invariant:** values of secrets and tokens are in no `Debug` output and in no error.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{
    ConfigMap, Container, Pod, Secret, Service, ServiceAccountTokenProjection, Volume,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::core::pod_certificates::{CertificateRef, PrivateKey};
use crate::core::trust::TrustBundles;
use crate::core::volumes::Remote;
use crate::core::volumes::growth::Sizes;
use crate::types::PodExt;
use crate::types::containers::containers_of;

/// Default of `serviceAccountToken.expirationSeconds`.
const TOKEN_SECONDS: i64 = 3600;

/// An object as it was found: there, not there, or the reason why nobody can say.
pub type Found<T> = Result<Option<Arc<T>>, String>;

/// The content of an env file; `None` when the file does not exist. An error is the text for users.
pub type EnvFile = Result<Option<Vec<u8>>, String>;

/// A token a pod's volume asks for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TokenRef {
    /// Whom it is for; empty = the API server.
    pub audience: String,
    /// Lifetime in seconds.
    pub expiration_seconds: i64,
}

impl TokenRef {
    /// Returns the token request of a projection.
    pub fn of(projection: &ServiceAccountTokenProjection) -> Self {
        Self {
            audience: projection.audience.clone().unwrap_or_default(),
            expiration_seconds: projection.expiration_seconds.unwrap_or(TOKEN_SECONDS),
        }
    }
}

/// A service account token.
#[derive(Clone, PartialEq, Eq)]
pub struct PodToken {
    /// The token.
    pub token: String,
    /// It has expired, and no newer one can be had.
    pub stale: bool,
    /// Expiry, in milliseconds since the Unix epoch.
    pub expires_ms: i64,
}

impl std::fmt::Debug for PodToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PodToken")
            .field("stale", &self.stale)
            .finish_non_exhaustive()
    }
}

/// A key and its certificates.
#[derive(Clone, PartialEq, Eq)]
pub struct PodKeyPair {
    /// The private key in PEM.
    pub key: PrivateKey,
    /// Certificates in PEM, the pod's own first.
    pub chain: String,
}

impl std::fmt::Debug for PodKeyPair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PodKeyPair").finish_non_exhaustive()
    }
}

/// Names of what a pod, or a part of it, refers to in its namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct References {
    /// ConfigMaps.
    pub config_maps: BTreeSet<String>,
    /// Secrets.
    pub secrets: BTreeSet<String>,
    /// Tokens of the pod's service account.
    pub tokens: BTreeSet<TokenRef>,
    /// ClusterTrustBundles.
    pub trust_bundles: bool,
    /// Certificates of the pod.
    pub certificates: BTreeSet<CertificateRef>,
}

impl References {
    /// Returns the objects that a pod's mounted volumes refer to.
    pub fn of_volumes(pod: &Pod) -> Self {
        let mut all = Self::default();
        let used = mounted_volumes(pod);
        for volume in pod.spec_ref().volumes.iter().flatten() {
            if used.contains(volume.name.as_str()) {
                all.add_volume(volume);
            }
        }
        all
    }

    /// Returns the objects that a container's environment refers to.
    pub fn of_environment(container: &Container) -> Self {
        let mut all = Self::default();
        for from in container.env_from.iter().flatten() {
            all.config_maps
                .extend(from.config_map_ref.iter().map(|r| r.name.clone()));
            all.secrets
                .extend(from.secret_ref.iter().map(|r| r.name.clone()));
        }
        for source in container
            .env
            .iter()
            .flatten()
            .filter_map(|v| v.value_from.as_ref())
        {
            all.config_maps
                .extend(source.config_map_key_ref.iter().map(|r| r.name.clone()));
            all.secrets
                .extend(source.secret_key_ref.iter().map(|r| r.name.clone()));
        }
        all
    }

    /// Returns whether a pod's volumes, environments or pulls refer to this configMap or secret, or to any
    /// ClusterTrustBundle.
    pub fn pod_uses(pod: &Pod, kind: &str, name: &str) -> bool {
        let mut all = Self::of_volumes(pod);
        for spec in containers_of(pod) {
            let more = Self::of_environment(&spec.container);
            all.config_maps.extend(more.config_maps);
            all.secrets.extend(more.secrets);
        }
        match kind {
            "ConfigMap" => all.config_maps.contains(name),
            "ClusterTrustBundle" => all.trust_bundles,
            "Secret" => {
                let pulls = pod.spec_ref().image_pull_secrets.iter().flatten();
                all.secrets.contains(name) || pulls.map(|s| &s.name).any(|n| n == name)
            }
            _ => false,
        }
    }

    fn add_volume(&mut self, volume: &Volume) {
        self.config_maps
            .extend(volume.config_map.iter().map(|s| s.name.clone()));
        self.secrets
            .extend(volume.secret.iter().filter_map(|s| s.secret_name.clone()));
        let sources = volume.projected.iter().flat_map(|p| p.sources.iter());
        for (index, source) in sources.flatten().enumerate() {
            if source.pod_certificate.is_some() {
                let volume = volume.name.clone();
                self.certificates.insert(CertificateRef { volume, index });
            }
            self.config_maps
                .extend(source.config_map.iter().map(|s| s.name.clone()));
            self.secrets
                .extend(source.secret.iter().map(|s| s.name.clone()));
            self.tokens
                .extend(source.service_account_token.iter().map(TokenRef::of));
            self.trust_bundles |= source.cluster_trust_bundle.is_some();
        }
    }
}

/// Names of the volumes that a container of any kind mounts or has as a device.
pub fn mounted_volumes(pod: &Pod) -> BTreeSet<&str> {
    let mut all = volumes_as_files(pod);
    all.extend(volumes_as_devices(pod));
    all
}

/// Names of the volumes that a container of any kind mounts, or takes environment variables from (`fileKeyRef`).
pub fn volumes_as_files(pod: &Pod) -> BTreeSet<&str> {
    let ordinary = pod.init_containers().iter().chain(pod.containers());
    let ephemeral = pod.ephemeral_containers().iter();
    let parts = ordinary
        .map(|c| (&c.volume_mounts, &c.env))
        .chain(ephemeral.map(|c| (&c.volume_mounts, &c.env)));
    let mut all = BTreeSet::new();
    for (mounts, env) in parts {
        all.extend(mounts.iter().flatten().map(|m| m.name.as_str()));
        let sources = env.iter().flatten().filter_map(|v| v.value_from.as_ref());
        all.extend(sources.filter_map(|s| Some(s.file_key_ref.as_ref()?.volume_name.as_str())));
    }
    all
}

/// Names of the volumes that a container of any kind has as a device.
pub fn volumes_as_devices(pod: &Pod) -> BTreeSet<&str> {
    let ordinary = pod.init_containers().iter().chain(pod.containers());
    let ephemeral = pod.ephemeral_containers().iter();
    ordinary
        .map(|c| &c.volume_devices)
        .chain(ephemeral.map(|c| &c.volume_devices))
        .flat_map(|devices| devices.iter().flatten())
        .map(|d| d.name.as_str())
        .collect()
}

/// Returns whether the agent writes the volume's content. If so, containers may only read it.
pub fn is_content_volume(volume: &Volume) -> bool {
    volume.config_map.is_some()
        || volume.secret.is_some()
        || volume.downward_api.is_some()
        || volume.projected.is_some()
}

/// A remote volume, with the secrets that mounting it takes. These are never recorded
/// with it.
#[derive(Clone)]
pub struct Resolved {
    /// The volume.
    pub remote: Remote,
    /// Secrets its source refers to, by namespace and name.
    pub secrets: BTreeMap<(String, String), Arc<Secret>>,
    /// Tokens its driver asks for (`tokenRequests` of the CSIDriver).
    pub tokens: BTreeMap<TokenRef, PodToken>,
    /// Known sizes of the volume; `None` if it cannot be expanded.
    pub capacity: Option<Sizes>,
    /// Reason why it cannot be mounted now: it is as it was mounted, without the secrets and tokens that mounting takes.
    pub missing: Option<String>,
}

impl std::fmt::Debug for Resolved {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Resolved")
            .field("remote", &self.remote)
            .field("secrets", &self.secrets.keys())
            .field("tokens", &self.tokens)
            .field("capacity", &self.capacity)
            .finish()
    }
}

/// Objects that a pod or container refers to, each found or with the error.
#[derive(Clone, Default)]
pub struct Sources {
    /// ConfigMaps of the pod's namespace by name.
    pub config_maps: BTreeMap<String, Found<ConfigMap>>,
    /// Secrets of the pod's namespace by name.
    pub secrets: BTreeMap<String, Found<Secret>>,
    /// Tokens of the pod's service account.
    pub tokens: BTreeMap<TokenRef, Result<PodToken, String>>,
    /// All ClusterTrustBundles of the cluster; `None` when they were not asked for.
    pub trust_bundles: Option<Result<Arc<TrustBundles>, String>>,
    /// Keys and certificates of the pod.
    pub certificates: BTreeMap<CertificateRef, Result<PodKeyPair, String>>,
    /// Remote volumes, by the name the pod gives them; an error is the text for users.
    pub remotes: BTreeMap<String, Result<Arc<Resolved>, String>>,
    /// Files that `fileKeyRef` takes variables from, by volume and path.
    pub files: BTreeMap<(String, String), EnvFile>,
    /// All services of the cluster; `None` = the list is not known yet.
    pub services: Option<Vec<Arc<Service>>>,
    /// `status.allocatable` of the node: stands in for limits a container does not have.
    pub allocatable: BTreeMap<String, Quantity>,
}

impl std::fmt::Debug for Sources {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sources")
            .field("config_maps", &self.config_maps.keys())
            .field("secrets", &self.secrets.keys())
            .field("tokens", &self.tokens)
            .field("remotes", &self.remotes)
            .field("files", &self.files.keys())
            .field("services", &self.services.as_ref().map(Vec::len))
            .finish_non_exhaustive()
    }
}

/// Reason why the content of an object is not available. The text begins as upstream's does.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// The API server says that there is none.
    #[error(
        "{} \"{name}\" not found (namespace {namespace}); create it, or mark the reference optional",
        kind.to_lowercase()
    )]
    NotFound {
        /// `ConfigMap` or `Secret`.
        kind: &'static str,
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
    /// It has no such key.
    #[error(
        "couldn't find key {key} in {kind} {namespace}/{name}; add the key, or mark the reference optional"
    )]
    NoKey {
        /// `ConfigMap` or `Secret`.
        kind: &'static str,
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// The key.
        key: String,
    },
    /// It cannot be asked for now.
    #[error("{why}")]
    Unavailable {
        /// Why; names the object.
        why: String,
    },
}

impl Sources {
    /// A configMap; `None` = it does not exist and need not.
    ///
    /// # Errors
    /// See [`SourceError`].
    pub fn config_map(
        &self,
        namespace: &str,
        name: &str,
        optional: bool,
    ) -> Result<Option<&ConfigMap>, SourceError> {
        pick(&self.config_maps, "ConfigMap", namespace, name, optional)
    }

    /// A secret; `None` = it does not exist and need not.
    ///
    /// # Errors
    /// See [`SourceError`].
    pub fn secret(
        &self,
        namespace: &str,
        name: &str,
        optional: bool,
    ) -> Result<Option<&Secret>, SourceError> {
        pick(&self.secrets, "Secret", namespace, name, optional)
    }
}

fn pick<'a, T>(
    all: &'a BTreeMap<String, Found<T>>,
    kind: &'static str,
    namespace: &str,
    name: &str,
    optional: bool,
) -> Result<Option<&'a T>, SourceError> {
    match all.get(name) {
        Some(Ok(Some(object))) => Ok(Some(object)),
        Some(Ok(None)) if optional => Ok(None),
        Some(Ok(None)) => Err(SourceError::NotFound {
            kind,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        }),
        Some(Err(why)) => Err(SourceError::Unavailable { why: why.clone() }),
        None => Err(SourceError::Unavailable {
            why: format!("{kind} {namespace}/{name} was not asked for"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn raw_devices_count_as_well() {
        let pod: Pod = serde_json::from_value(json!({"spec": {"containers": [
            {"name": "c", "volumeDevices": [{"name": "disk", "devicePath": "/dev/x"}]},
        ]}}))
        .unwrap();
        assert_eq!(mounted_volumes(&pod), BTreeSet::from(["disk"]));
    }

    #[test]
    fn containers_of_all_kinds_count() {
        let using = |n: &str| {
            json!({
                "name": n,
                "volumeMounts": [{"name": n, "mountPath": "/x"}],
                "env": [{"name": "E", "valueFrom": {"secretKeyRef": {"name": format!("env-{n}"), "key": "k"}}}],
            })
        };
        let volume = |n: &str| json!({"name": n, "configMap": {"name": format!("files-{n}")}});
        let pod: Pod = serde_json::from_value(json!({"spec": {
            "initContainers": [using("init")],
            "containers": [using("main")],
            "ephemeralContainers": [using("debug")],
            "volumes": [volume("init"), volume("main"), volume("debug"), volume("nobody")],
        }}))
        .unwrap();
        assert_eq!(
            mounted_volumes(&pod),
            BTreeSet::from(["debug", "init", "main"])
        );
        for name in ["init", "main", "debug"] {
            assert!(References::pod_uses(&pod, "Secret", &format!("env-{name}")));
            assert!(References::pod_uses(
                &pod,
                "ConfigMap",
                &format!("files-{name}")
            ));
        }
        assert!(!References::pod_uses(&pod, "ConfigMap", "files-nobody"));
    }
}
