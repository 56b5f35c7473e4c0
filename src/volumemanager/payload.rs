//! What the files of configMap, secret, downwardAPI and projected volumes hold. Pure.
//!
//! **Invariant:** every path is relative, stays below the volume, and its first part does not begin with
//! `..`, which is where the writer keeps its own.

use std::collections::BTreeMap;
use std::fmt;

use k8s_openapi::api::core::v1::{
    ConfigMap, DownwardAPIVolumeFile, KeyToPath, Pod, ProjectedVolumeSource, Secret, Volume,
};
use sha2::{Digest, Sha256};

use crate::kuberuntime::sources::{SourceError, Sources, TokenRef};
use crate::kuberuntime::{downward, security};
use crate::types::PodExt;

const DEFAULT_MODE: u32 = 0o644;
/// Mode of a token that has an owner of its own.
const TOKEN_MODE: u32 = 0o600;
/// What a group gets that owns a volume which is read only.
const GROUP_READ: u32 = 0o440;
const MAX_PATH: usize = 4096;
const MAX_NAME: usize = 255;

/// Why a volume's content cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PayloadError {
    /// An object cannot be had.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// An object has no such key.
    #[error(
        "{kind} {name} references non-existent {noun} key: {key}; add the key, or mark the volume optional"
    )]
    NoKey {
        /// `configmap` or `secret`.
        kind: &'static str,
        /// `config` or `secret`.
        noun: &'static str,
        /// `namespace/name`.
        name: String,
        /// The key.
        key: String,
    },
    /// A token cannot be had.
    #[error("failed to fetch token: {why}")]
    Token {
        /// Why.
        why: String,
    },
    /// A field or resource of the pod does not exist.
    #[error("file {path}: {what}")]
    Field {
        /// The file.
        path: String,
        /// What is wrong.
        what: String,
    },
    /// A path that leads elsewhere.
    #[error("invalid path {path:?}: {reason}")]
    Path {
        /// As written.
        path: String,
        /// What is wrong.
        reason: &'static str,
    },
    /// A source that is not supported.
    #[error("{what} is not supported; use configMap, secret, downwardAPI or serviceAccountToken")]
    Unsupported {
        /// The source.
        what: &'static str,
    },
}

/// A file to be.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct File {
    pub(super) data: Vec<u8>,
    pub(super) mode: u32,
    /// Its owner, root when `None`.
    pub(super) owner: Option<u32>,
}

impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes, {:o}", self.data.len(), self.mode)
    }
}

/// Files by path.
pub(super) type Files = BTreeMap<String, File>;

/// What a volume holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Payload {
    pub(super) files: Files,
    /// One of them is a token that has expired.
    pub(super) stale_token: bool,
}

impl Payload {
    /// Tells one content from another without keeping it.
    pub(super) fn digest(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        let mut part = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        for (path, file) in &self.files {
            part(path.as_bytes());
            part(&file.mode.to_le_bytes());
            if let Some(owner) = file.owner {
                part(&owner.to_le_bytes());
            }
            part(&file.data);
        }
        hash.finalize().into()
    }

    fn put(&mut self, path: &str, data: Vec<u8>, mode: u32) -> Result<(), PayloadError> {
        let owner = None;
        self.files.insert(clean(path)?, File { data, mode, owner });
        Ok(())
    }

    /// A token: for its owner and group alone where the pod names them.
    fn put_token(
        &mut self,
        path: &str,
        data: Vec<u8>,
        mode: u32,
        pod: &Pod,
    ) -> Result<(), PayloadError> {
        let owner = security::fs_user(pod);
        let private = owner.is_some() || security::fs_group(pod).is_some();
        let mode = if private { TOKEN_MODE } else { mode };
        self.files.insert(clean(path)?, File { data, mode, owner });
        Ok(())
    }
}

/// Upstream's `validatePath`, and without what makes no difference (`//`, `/./`).
fn clean(path: &str) -> Result<String, PayloadError> {
    let error = |reason| PayloadError::Path {
        path: path.to_owned(),
        reason,
    };
    if path.starts_with('/') {
        return Err(error("must be a relative path"));
    }
    if path.len() > MAX_PATH || path.split('/').any(|part| part.len() > MAX_NAME) {
        return Err(error("is too long"));
    }
    if path.contains('\0') {
        return Err(error("must not contain a zero byte"));
    }
    let parts: Vec<&str> = path
        .split('/')
        .filter(|part| !part.is_empty() && *part != ".")
        .collect();
    if parts.contains(&"..") {
        return Err(error("must not contain \"..\""));
    }
    match parts.first() {
        None => Err(error("must not be empty")),
        Some(first) if first.starts_with("..") => Err(error("must not start with \"..\"")),
        Some(_) => Ok(parts.join("/")),
    }
}

fn mode(own: Option<i32>, default: u32) -> u32 {
    own.and_then(|mode| u32::try_from(mode).ok())
        .map_or(default, |mode| mode & 0o777)
}

/// The content of a volume of a kind the agent writes.
///
/// # Errors
/// See [`PayloadError`].
pub(super) fn collect(
    pod: &Pod,
    volume: &Volume,
    sources: &Sources,
) -> Result<Payload, PayloadError> {
    let mut payload = Payload::default();
    let namespace = pod.namespace();
    if let Some(source) = &volume.config_map {
        let optional = source.optional.unwrap_or(false);
        let found = sources.config_map(namespace, &source.name, optional)?;
        let default = mode(source.default_mode, DEFAULT_MODE);
        let items = source.items.as_deref();
        add_config_map(&mut payload, found, items, default, optional)?;
    } else if let Some(source) = &volume.secret {
        let optional = source.optional.unwrap_or(false);
        let name = source.secret_name.as_deref().unwrap_or_default();
        let found = sources.secret(namespace, name, optional)?;
        let default = mode(source.default_mode, DEFAULT_MODE);
        let items = source.items.as_deref();
        add_secret(&mut payload, found, items, default, optional)?;
    } else if let Some(source) = &volume.downward_api {
        let default = mode(source.default_mode, DEFAULT_MODE);
        add_downward(&mut payload, pod, source.items.as_deref(), default, sources)?;
    } else if let Some(source) = &volume.projected {
        add_projected(&mut payload, pod, source, sources)?;
    }
    if security::fs_group(pod).is_some() {
        // The group may read what its pod mounts.
        for file in payload.files.values_mut() {
            file.mode |= GROUP_READ;
        }
    }
    Ok(payload)
}

fn add_projected(
    payload: &mut Payload,
    pod: &Pod,
    projected: &ProjectedVolumeSource,
    sources: &Sources,
) -> Result<(), PayloadError> {
    let namespace = pod.namespace();
    let default = mode(projected.default_mode, DEFAULT_MODE);
    for source in projected.sources.iter().flatten() {
        if source.cluster_trust_bundle.is_some() {
            return Err(PayloadError::Unsupported {
                what: "projected source clusterTrustBundle",
            });
        }
        if source.pod_certificate.is_some() {
            return Err(PayloadError::Unsupported {
                what: "projected source podCertificate",
            });
        }
        if let Some(map) = &source.config_map {
            let optional = map.optional.unwrap_or(false);
            let found = sources.config_map(namespace, &map.name, optional)?;
            add_config_map(payload, found, map.items.as_deref(), default, optional)?;
        }
        if let Some(secret) = &source.secret {
            let optional = secret.optional.unwrap_or(false);
            let found = sources.secret(namespace, &secret.name, optional)?;
            add_secret(payload, found, secret.items.as_deref(), default, optional)?;
        }
        if let Some(downward) = &source.downward_api {
            add_downward(payload, pod, downward.items.as_deref(), default, sources)?;
        }
        if let Some(token) = &source.service_account_token {
            let found = sources
                .tokens
                .get(&TokenRef::of(token))
                .ok_or_else(|| PayloadError::Token {
                    why: "it was not asked for".to_owned(),
                })?
                .as_ref()
                .map_err(|why| PayloadError::Token { why: why.clone() })?;
            payload.stale_token |= found.stale;
            let data = found.token.clone().into_bytes();
            payload.put_token(&token.path, data, default, pod)?;
        }
    }
    Ok(())
}

fn add_config_map(
    payload: &mut Payload,
    found: Option<&ConfigMap>,
    items: Option<&[KeyToPath]>,
    default: u32,
    optional: bool,
) -> Result<(), PayloadError> {
    let Some(map) = found else { return Ok(()) };
    let text = map.data.iter().flatten().map(|(k, v)| (k, v.as_bytes()));
    let binary = map.binary_data.iter().flatten();
    let data: BTreeMap<&String, &[u8]> = text
        .chain(binary.map(|(k, v)| (k, v.0.as_slice())))
        .collect();
    add_keys(payload, &data, items, default, optional, |key| {
        PayloadError::NoKey {
            kind: "configmap",
            noun: "config",
            name: object_name(&map.metadata),
            key,
        }
    })
}

fn add_secret(
    payload: &mut Payload,
    found: Option<&Secret>,
    items: Option<&[KeyToPath]>,
    default: u32,
    optional: bool,
) -> Result<(), PayloadError> {
    let Some(secret) = found else { return Ok(()) };
    let all = secret.data.iter().flatten();
    let data: BTreeMap<&String, &[u8]> = all.map(|(k, v)| (k, v.0.as_slice())).collect();
    add_keys(payload, &data, items, default, optional, |key| {
        PayloadError::NoKey {
            kind: "secret",
            noun: "secret",
            name: object_name(&secret.metadata),
            key,
        }
    })
}

fn object_name(metadata: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta) -> String {
    format!(
        "{}/{}",
        metadata.namespace.as_deref().unwrap_or_default(),
        metadata.name.as_deref().unwrap_or_default()
    )
}

fn add_keys(
    payload: &mut Payload,
    data: &BTreeMap<&String, &[u8]>,
    items: Option<&[KeyToPath]>,
    default: u32,
    optional: bool,
    missing: impl Fn(String) -> PayloadError,
) -> Result<(), PayloadError> {
    let items = items.unwrap_or_default();
    if items.is_empty() {
        for (key, value) in data {
            payload.put(key, value.to_vec(), default)?;
        }
        return Ok(());
    }
    for item in items {
        match data.get(&item.key) {
            Some(value) => payload.put(&item.path, value.to_vec(), mode(item.mode, default))?,
            None if optional => {}
            None => return Err(missing(item.key.clone())),
        }
    }
    Ok(())
}

fn add_downward(
    payload: &mut Payload,
    pod: &Pod,
    items: Option<&[DownwardAPIVolumeFile]>,
    default: u32,
    sources: &Sources,
) -> Result<(), PayloadError> {
    for item in items.unwrap_or_default() {
        let error = |what: String| PayloadError::Field {
            path: item.path.clone(),
            what,
        };
        let value = if let Some(field) = &item.field_ref {
            downward::metadata_field(pod, &field.field_path)
                .ok_or_else(|| error(format!("unsupported fieldPath: {}", field.field_path)))?
        } else if let Some(resource) = &item.resource_field_ref {
            downward::resource_field(pod, None, resource, &sources.allocatable).map_err(error)?
        } else {
            return Err(error("give fieldRef or resourceFieldRef".to_owned()));
        };
        payload.put(&item.path, value.into_bytes(), mode(item.mode, default))?;
    }
    Ok(())
}
