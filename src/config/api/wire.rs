//! Messages of the API server, as far as its source needs them: pods, versions, errors.

use std::error::Error as _;

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::core::state::kinds::{self, Declared, Key, Kind};
use crate::core::supported;
use crate::types::PodUid;

/// A pod as it was received; each is decoded by itself.
#[derive(Clone, Debug)]
pub(super) struct Received {
    pub(super) uid: PodUid,
    /// With its namespace.
    pub(super) name: String,
    pub(super) version: String,
    /// Fields of `spec` that this version does not know. The decoded pod lacks them.
    pub(super) unknown: Vec<String>,
    pub(super) pod: Result<Box<Pod>, String>,
}

impl<'de> Deserialize<'de> for Received {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut value = Value::deserialize(deserializer)?;
        let field = |key: &str| {
            let text = value.pointer(&format!("/metadata/{key}"));
            text.and_then(Value::as_str).unwrap_or_default().to_owned()
        };
        let (uid, name) = (field("uid"), field("name"));
        let (namespace, version) = (field("namespace"), field("resourceVersion"));
        if let Some(Value::Object(metadata)) = value.get_mut("metadata") {
            // As large as the rest of the pod, and of no use here.
            metadata.remove("managedFields");
        }
        let unknown = supported::unknown(&value);
        let pod = if uid.is_empty() || name.is_empty() {
            Err("it has no metadata.uid or no metadata.name".to_owned())
        } else {
            // The error names the field.
            serde_path_to_error::deserialize(value).map_err(|e| e.to_string())
        };
        Ok(Self {
            uid: PodUid::new(uid),
            name: format!("{namespace}/{name}"),
            version,
            unknown,
            pod,
        })
    }
}

/// A version that can be compared: those of a server on etcd are numbers, others are opaque.
pub(super) fn number(version: &str) -> Option<u128> {
    version.parse().ok()
}

/// Server whose newest version a record holds.
#[derive(Serialize, Deserialize)]
pub(super) struct OfServer {
    server: String,
}

impl Kind for OfServer {
    const DECLARED: Declared = kinds::API_SOURCE;
}

impl OfServer {
    /// Names a server.
    pub(super) fn new(server: &str) -> Self {
        Self {
            server: server.to_owned(),
        }
    }

    /// Returns the key of the record.
    pub(super) fn key() -> Key<Self> {
        Key::new("", "pods")
    }
}

/// An error with what caused it.
pub(super) fn describe(error: &kube::Error) -> String {
    if let kube::Error::Api(status) = error {
        return format!(
            "the API server answers {} {}: {}",
            status.code, status.reason, status.message
        );
    }
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}
