//! PodCertificateRequests at the API server, in whichever version it has.
//!
//! `v1` is that of Kubernetes 1.37. `v1beta1` of 1.36 takes the same fields. `v1beta1` of 1.35 has no `stubPKCS10Request`,
//! and takes public key and proof instead.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::api::core::v1::{Node, PodCertificateProjection, ServiceAccount};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{ListParams, PostParams};
use kube::core::{ApiResource, DynamicObject};
use serde_json::{Value, json};

use super::key::{self, KeyError, KeyType};
use crate::apiserver::ApiClient;
use crate::core::pod_certificates::Pending;

const GROUP: &str = "certificates.k8s.io";
const KIND: &str = "PodCertificateRequest";
const PLURAL: &str = "podcertificaterequests";
/// Newest first.
pub(super) const VERSIONS: [&str; 2] = ["v1", "v1beta1"];
const V1BETA1: usize = 1;

/// Pod and source of a request.
pub(super) struct Subject {
    pub(super) namespace: String,
    pub(super) pod: String,
    pub(super) uid: String,
    pub(super) service_account: String,
    pub(super) node: String,
    pub(super) projection: PodCertificateProjection,
}

/// Outcome of a creation.
pub(super) enum Created {
    /// It exists, in the version of this index in [`VERSIONS`].
    Now(usize),
    /// One of this name exists already.
    Before(usize),
}

/// A failed attempt to make or find a request.
#[derive(Debug, thiserror::Error)]
pub(super) enum RequestError {
    #[error("get service account {name}: {source}")]
    ServiceAccount {
        name: String,
        #[source]
        source: kube::Error,
    },
    #[error("get node {name}: {source}")]
    Node {
        name: String,
        #[source]
        source: kube::Error,
    },
    #[error("create PodCertificateRequest {name}: {source}")]
    Create {
        name: String,
        #[source]
        source: kube::Error,
    },
    #[error(
        "the API server does not serve {PLURAL} ({GROUP}/v1 or v1beta1); enable the API, or remove the projection"
    )]
    NotServed,
    #[error("list PodCertificateRequest {name}: {source}")]
    List {
        name: String,
        #[source]
        source: kube::Error,
    },
    #[error(transparent)]
    Key(#[from] KeyError),
}

fn resource(version: &str) -> ApiResource {
    ApiResource {
        group: GROUP.to_owned(),
        version: version.to_owned(),
        api_version: format!("{GROUP}/{version}"),
        kind: KIND.to_owned(),
        plural: PLURAL.to_owned(),
    }
}

fn requests(api: &ApiClient, namespace: &str, version: usize) -> kube::Api<DynamicObject> {
    kube::Api::namespaced_with(api.kube(), namespace, &resource(VERSIONS[version]))
}

/// Makes a request in the newest version that the API server has. Upstream: `createPodCertificateRequest`.
///
/// # Errors
/// See [`RequestError`].
pub(super) async fn create(
    api: &ApiClient,
    of: &Subject,
    key_type: KeyType,
    pending: &Pending,
) -> Result<Created, RequestError> {
    let spec = spec(api, of).await?;
    let failed = |source| RequestError::Create {
        name: format!("{}/{}", of.namespace, pending.name),
        source,
    };
    for version in 0..VERSIONS.len() {
        let mut with_stub = spec.clone();
        with_stub["stubPKCS10Request"] = pending.request.as_str().into();
        let refusal = match post(api, of, version, &pending.name, with_stub).await {
            Err(kube::Error::Api(status)) if status.code == 404 => continue,
            Err(kube::Error::Api(status))
                if version == V1BETA1 && matches!(status.code, 400 | 422) =>
            {
                kube::Error::Api(status)
            }
            other => return other.map_err(failed),
        };
        // Kubernetes 1.35 drops the field that it does not know, and misses those that it knows.
        let proof = key::prove(key_type, &pending.key, &of.uid)?;
        let mut with_proof = spec.clone();
        with_proof["pkixPublicKey"] = STANDARD.encode(proof.public_key).into();
        with_proof["proofOfPossession"] = STANDARD.encode(proof.signature).into();
        return match post(api, of, version, &pending.name, with_proof).await {
            // It is a newer server, which has refused something else.
            Err(kube::Error::Api(status)) if matches!(status.code, 400 | 422) => {
                Err(failed(refusal))
            }
            other => other.map_err(failed),
        };
    }
    Err(RequestError::NotServed)
}

/// Returns the spec without the key.
async fn spec(api: &ApiClient, of: &Subject) -> Result<Value, RequestError> {
    let accounts = kube::Api::<ServiceAccount>::namespaced(api.kube(), &of.namespace);
    let nodes = kube::Api::<Node>::all(api.kube());
    let account = accounts.get(&of.service_account).await;
    let account = account.map_err(|source| RequestError::ServiceAccount {
        name: format!("{}/{}", of.namespace, of.service_account),
        source,
    })?;
    let node = nodes.get(&of.node).await;
    let node = node.map_err(|source| RequestError::Node {
        name: of.node.clone(),
        source,
    })?;
    let projection = &of.projection;
    let mut spec = json!({
        "signerName": projection.signer_name,
        "podName": of.pod,
        "podUID": of.uid,
        "serviceAccountName": of.service_account,
        "serviceAccountUID": account.metadata.uid.unwrap_or_default(),
        "nodeName": of.node,
        "nodeUID": node.metadata.uid.unwrap_or_default(),
    });
    if let Some(seconds) = projection.max_expiration_seconds {
        spec["maxExpirationSeconds"] = seconds.into();
    }
    if let Some(annotations) = &projection.user_annotations {
        spec["unverifiedUserAnnotations"] = json!(annotations);
    }
    Ok(spec)
}

async fn post(
    api: &ApiClient,
    of: &Subject,
    version: usize,
    name: &str,
    spec: Value,
) -> Result<Created, kube::Error> {
    let mut object = DynamicObject::new(name, &resource(VERSIONS[version]));
    object.metadata.namespace = Some(of.namespace.clone());
    object.metadata.owner_references = Some(vec![OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Pod".to_owned(),
        name: of.pod.clone(),
        uid: of.uid.clone(),
        ..OwnerReference::default()
    }]);
    object.data = json!({ "spec": spec });
    let requests = requests(api, &of.namespace, version);
    match requests.create(&PostParams::default(), &object).await {
        Ok(_) => Ok(Created::Now(version)),
        Err(kube::Error::Api(status)) if status.code == 409 && status.reason == "AlreadyExists" => {
            Ok(Created::Before(version))
        }
        Err(error) => Err(error),
    }
}

/// Returns a request as the API server has it; `None` when it has none of this name. Lists, as a node may list its own
/// requests, and gets none that the authorizer has not seen yet.
///
/// # Errors
/// See [`RequestError`].
pub(super) async fn find(
    api: &ApiClient,
    of: &Subject,
    version: usize,
    name: &str,
) -> Result<Option<DynamicObject>, RequestError> {
    let fields = format!("metadata.name={name},spec.nodeName={}", of.node);
    let params = ListParams::default().fields(&fields);
    match requests(api, &of.namespace, version).list(&params).await {
        Ok(found) => Ok(found.items.into_iter().next()),
        // The version is served no more.
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        Err(source) => Err(RequestError::List {
            name: format!("{}/{name}", of.namespace),
            source,
        }),
    }
}
