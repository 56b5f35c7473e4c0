//! Fuzz targets of credentials for the API server: kubeconfig, and the answers of exec plugins.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a fuzz target fails by panicking"
)]

use std::path::Path;
use std::sync::LazyLock;

use kube::config::{Cluster, ExecConfig, Kubeconfig};
use secrecy::ExposeSecret as _;

use super::kubeconfig;
use super::plugin::Plugin;

/// Reads a kubeconfig. One that names files is not read further.
///
/// Asserts that a kubeconfig that is accepted names a server, and that no error has a token in it.
pub(crate) fn kubeconfig(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let Ok(file) = Kubeconfig::from_yaml(text) else {
        return;
    };
    let names_files = file
        .auth_infos
        .iter()
        .flat_map(|one| &one.auth_info)
        .any(|user| {
            user.client_certificate.is_some()
                || user.client_key.is_some()
                || user.token_file.is_some()
        })
        || (file.clusters.iter().flat_map(|one| &one.cluster))
            .any(|cluster| cluster.certificate_authority.is_some());
    if names_files {
        return;
    }
    let secrets = secrets(&file, text);
    match kubeconfig::resolve(Path::new("/etc/kubernetes/kubelet.conf"), file, None) {
        Ok(loaded) => {
            let scheme = loaded.config.cluster_url.scheme_str();
            assert!(matches!(scheme, Some("http" | "https")));
        }
        Err(error) => {
            let error = error.to_string();
            for secret in secrets {
                assert!(!error.contains(&secret), "{error}");
            }
        }
    }
}

/// The secrets of a kubeconfig whose `text` has them nowhere else.
fn secrets(file: &Kubeconfig, text: &str) -> Vec<String> {
    let users = file.auth_infos.iter().flat_map(|one| &one.auth_info);
    users
        .flat_map(|user| [&user.token, &user.password, &user.client_key_data])
        .flatten()
        .map(|secret| secret.expose_secret().to_owned())
        .filter(|secret| secret.len() > 6 && text.matches(secret.as_str()).count() == 1)
        .collect()
}

static PLUGIN: LazyLock<Plugin> = LazyLock::new(|| {
    let exec: ExecConfig = serde_json::from_value(serde_json::json!({
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "plugin",
        "interactiveMode": "Never",
    }))
    .unwrap();
    Plugin::new(exec, &Cluster::default()).unwrap()
});

/// Reads the answer of an exec plugin.
///
/// Asserts that credentials that are accepted are some, and that neither they nor an error are printed with the secret of
/// the corpus.
pub(crate) fn exec_credential(data: &[u8]) {
    match PLUGIN.read(data) {
        Ok(given) => {
            assert!(given.bearer.is_some() || given.identity.is_some());
            let life = given.identity.as_ref().map(|identity| identity.life);
            assert!(life.is_none_or(|life| given.until.is_some_and(|until| until <= life.until)));
            assert!(!format!("{given:?}").contains("s3cr3t-t0k3n"));
        }
        Err(error) => assert!(!error.contains("s3cr3t-t0k3n"), "{error}"),
    }
}
