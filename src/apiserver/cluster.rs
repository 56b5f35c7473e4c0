//! Reads the cluster that the kubeconfig names, and the node as its API server has it, for [`crate::core::cluster`].

use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::Api;
use sha2::{Digest, Sha256};
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

use super::kubeconfig::load;
use super::{ApiClient, ApiSettings};
use crate::core::cluster::{Cluster, Shown};

/// Returns the cluster of the kubeconfig or, while that does not exist, of the bootstrap kubeconfig; `None` when neither
/// can be read. Blocking.
pub fn cluster_of(settings: &ApiSettings) -> Option<Cluster> {
    let own = settings.kubeconfig.as_deref()?;
    let path = match own.exists() {
        true => own,
        false => settings.bootstrap_kubeconfig.as_deref()?,
    };
    read(path)
}

fn read(path: &Path) -> Option<Cluster> {
    let loaded = load(path, None).ok()?;
    let authorities = loaded.config.root_cert.unwrap_or_default();
    let server = loaded.config.cluster_url.to_string();
    Some(Cluster {
        server: server.trim_end_matches('/').to_owned(),
        authorities: authorities.iter().map(|der| key_of(der)).collect(),
    })
}

/// The hash of the certificate's public key, which stays when only the certificate is renewed.
fn key_of(der: &[u8]) -> String {
    let key = X509Certificate::from_der(der).map(|(_, parsed)| parsed.public_key().raw.to_vec());
    let hash = Sha256::digest(key.as_deref().unwrap_or(der));
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Asks the API server for the node, for `limit` at most. Cancel-safe.
pub async fn shown_node(api: &ApiClient, name: &str, limit: Duration) -> Shown {
    let nodes: Api<Node> = Api::all(api.kube());
    match tokio::time::timeout(limit, nodes.get_opt(name)).await {
        Ok(Ok(Some(node))) => node.metadata.uid.map_or(Shown::Nothing, Shown::Node),
        Ok(Ok(None)) => Shown::Absent,
        Ok(Err(_)) | Err(_) => Shown::Nothing,
    }
}
