//! Computes the files of configMap, secret, downwardAPI and projected volumes. Pure.
//!
//! **Invariant:** every path is relative, stays below the volume, and its first part does not begin with
//! `..`, which is where the writer keeps its own.

use std::collections::BTreeMap;
use std::fmt;

use k8s_openapi::api::core::v1::{
    ConfigMap, DownwardAPIVolumeFile, KeyToPath, Pod, PodCertificateProjection,
    ProjectedVolumeSource, Secret, Volume,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use sha2::{Digest, Sha256};

use crate::core::pod_certificates::CertificateRef;
use crate::core::trust::{self, TrustError};
use crate::kuberuntime::sources::{PodKeyPair, SourceError, Sources, TokenRef};
use crate::kuberuntime::{downward, security};
use crate::types::PodExt;

const DEFAULT_MODE: u32 = 0o644;
/// Mode of a token that has an owner of its own.
const TOKEN_MODE: u32 = 0o600;
/// Permissions of the group of a volume that is read only.
const GROUP_READ: u32 = 0o440;
const MAX_PATH: usize = 4096;
const MAX_NAME: usize = 255;
/// Most that the values of a configMap or secret may take together; upstream's `MaxSecretSize`.
const MAX_OBJECT: usize = 1 << 20;
const MAX_MODE: i32 = 0o777;

/// Reason why a volume's content cannot be made.
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
        /// Description of the error.
        what: String,
    },
    /// A path that leads elsewhere.
    #[error("invalid path {path:?}: {reason}")]
    Path {
        /// As written.
        path: String,
        /// Description of the error.
        reason: &'static str,
    },
    /// Trust anchors cannot be had.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// The ClusterTrustBundles cannot be asked for.
    #[error("failed to get ClusterTrustBundles: {why}")]
    TrustUnavailable {
        /// Why.
        why: String,
    },
    /// An object is larger than the API allows.
    #[error("{kind} {name} holds {bytes} bytes, and at most {MAX_OBJECT} are allowed; split it")]
    TooLarge {
        /// `configmap` or `secret`.
        kind: &'static str,
        /// `namespace/name`.
        name: String,
        /// Its size.
        bytes: usize,
    },
    /// A mode that no file can have.
    #[error("invalid mode {mode} ({mode:#o}) of {of}: must be between 0 and 0777 (octal)")]
    Mode {
        /// The file, or `defaultMode`.
        of: String,
        /// As written.
        mode: i32,
    },
    /// Two sources that cannot both be there.
    #[error("invalid path {path:?}: {parent:?} is a file as well; give one of them another path")]
    Collision {
        /// The file.
        path: String,
        /// File that would have to be a directory.
        parent: String,
    },
    /// The pod's certificate cannot be had.
    #[error("failed to get the pod certificate: {why}")]
    Certificate {
        /// Why.
        why: String,
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

/// Content of a volume.
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

    /// A file below another file cannot be.
    fn check_collisions(&self) -> Result<(), PayloadError> {
        for path in self.files.keys() {
            for (at, _) in path.match_indices('/') {
                if self.files.contains_key(&path[..at]) {
                    return Err(PayloadError::Collision {
                        path: path.clone(),
                        parent: path[..at].to_owned(),
                    });
                }
            }
        }
        Ok(())
    }

    /// A token or trust anchors: for owner and group alone where the pod names them.
    fn put_private(
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

/// `of` is what has the mode: a file, or `defaultMode`.
fn mode(own: Option<i32>, default: u32, of: &str) -> Result<u32, PayloadError> {
    let Some(mode) = own else { return Ok(default) };
    let valid = u32::try_from(mode).ok().filter(|_| mode <= MAX_MODE);
    valid.ok_or_else(|| PayloadError::Mode {
        of: of.to_owned(),
        mode,
    })
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
        let default = mode(source.default_mode, DEFAULT_MODE, "defaultMode")?;
        let items = source.items.as_deref();
        add_config_map(&mut payload, found, items, default, optional)?;
    } else if let Some(source) = &volume.secret {
        let optional = source.optional.unwrap_or(false);
        let name = source.secret_name.as_deref().unwrap_or_default();
        let found = sources.secret(namespace, name, optional)?;
        let default = mode(source.default_mode, DEFAULT_MODE, "defaultMode")?;
        let items = source.items.as_deref();
        add_secret(&mut payload, found, items, default, optional)?;
    } else if let Some(source) = &volume.downward_api {
        let default = mode(source.default_mode, DEFAULT_MODE, "defaultMode")?;
        add_downward(&mut payload, pod, source.items.as_deref(), default, sources)?;
    } else if let Some(source) = &volume.projected {
        add_projected(&mut payload, pod, &volume.name, source, sources)?;
    }
    payload.check_collisions()?;
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
    volume: &str,
    projected: &ProjectedVolumeSource,
    sources: &Sources,
) -> Result<(), PayloadError> {
    let namespace = pod.namespace();
    let default = mode(projected.default_mode, DEFAULT_MODE, "defaultMode")?;
    for (index, source) in projected.sources.iter().flatten().enumerate() {
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
            payload.put_private(&token.path, data, default, pod)?;
        }
        if let Some(bundle) = &source.cluster_trust_bundle {
            let unavailable = |why: &str| PayloadError::TrustUnavailable {
                why: why.to_owned(),
            };
            let all = sources.trust_bundles.as_ref();
            let all = all
                .ok_or_else(|| unavailable("they were not asked for"))?
                .as_ref()
                .map_err(|why| unavailable(why))?;
            let data = trust::anchors(bundle, all)?.into_bytes();
            payload.put_private(&bundle.path, data, default, pod)?;
        }
        if let Some(certificate) = &source.pod_certificate {
            let of = CertificateRef {
                volume: volume.to_owned(),
                index,
            };
            let found = sources.certificates.get(&of);
            let found = found.ok_or_else(|| PayloadError::Certificate {
                why: "it was not asked for".to_owned(),
            })?;
            let found = found.as_ref();
            let found = found.map_err(|why| PayloadError::Certificate { why: why.clone() })?;
            add_certificate(payload, pod, certificate, found, default)?;
        }
    }
    Ok(())
}

/// The bundle is the key, then the chain: who needs both reads one file, and gets a pair that belongs together.
fn add_certificate(
    payload: &mut Payload,
    pod: &Pod,
    projection: &PodCertificateProjection,
    found: &PodKeyPair,
    mode: u32,
) -> Result<(), PayloadError> {
    let (key, chain) = (found.key.pem(), found.chain.as_str());
    for (path, parts) in [
        (&projection.credential_bundle_path, [key, chain]),
        (&projection.key_path, [key, ""]),
        (&projection.certificate_chain_path, [chain, ""]),
    ] {
        if let Some(path) = path.as_deref().filter(|path| !path.is_empty()) {
            payload.put_private(path, parts.concat().into_bytes(), mode, pod)?;
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
    check_size("configmap", &map.metadata, &data)?;
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
    check_size("secret", &secret.metadata, &data)?;
    add_keys(payload, &data, items, default, optional, |key| {
        PayloadError::NoKey {
            kind: "secret",
            noun: "secret",
            name: object_name(&secret.metadata),
            key,
        }
    })
}

fn check_size(
    kind: &'static str,
    metadata: &ObjectMeta,
    data: &BTreeMap<&String, &[u8]>,
) -> Result<(), PayloadError> {
    let bytes: usize = data.values().map(|value| value.len()).sum();
    if bytes <= MAX_OBJECT {
        return Ok(());
    }
    Err(PayloadError::TooLarge {
        kind,
        name: object_name(metadata),
        bytes,
    })
}

fn object_name(metadata: &ObjectMeta) -> String {
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
            Some(value) => {
                let mode = mode(item.mode, default, &item.path)?;
                payload.put(&item.path, value.to_vec(), mode)?;
            }
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
        let mode = mode(item.mode, default, &item.path)?;
        payload.put(&item.path, value.into_bytes(), mode)?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "payload_tests.rs"]
mod tests;
