//! A certificate that is asked of the API server (`serverTLSBootstrap`), as upstream's
//! `NewKubeletServerCertificateManager`: for the addresses of the node, renewed before it ends and when they change.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use rand::Rng;
use tokio::sync::watch;

use super::{Certificate, Serving, wall_seconds};
use crate::apiserver::csr::{self, CsrError, Purpose};
use crate::apiserver::{ApiClient, pause};
use crate::server::kubelet::Shared;
use crate::types::blocking;

/// Between two attempts that failed.
const AGAIN: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(600));

/// Takes the certificate of the last run over, if it is good for anything.
pub(super) async fn restore(node: &Shared, serving: &Serving) {
    if let Some(certificate) = newest(node).await
        && certificate.until > wall_seconds(node)
    {
        serving.set(certificate);
    }
}

async fn newest(node: &Shared) -> Option<Certificate> {
    let path = serving_for(Vec::new(), Vec::new()).current(&node.config.cert_dir);
    blocking::run(move || match std::fs::read(&path) {
        Ok(pem) => Certificate::parse(&pem, &pem)
            .inspect_err(|problem| {
                tracing::warn!(path = %path.display(), problem, "cannot use the serving certificate, requesting another one");
            })
            .ok(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "cannot read the serving certificate, requesting another one");
            None
        }
    })
    .await
    .ok()
    .flatten()
}

fn serving_for(names: Vec<String>, addresses: Vec<IpAddr>) -> Purpose {
    Purpose::Serving { names, addresses }
}

/// The names and addresses of the node, sorted: upstream's `addressesToHostnamesAndIPs`.
pub(super) fn names_of(node: &Node) -> (Vec<String>, Vec<IpAddr>) {
    let (mut names, mut addresses) = (Vec::new(), Vec::new());
    let status = node.status.as_ref();
    for address in status
        .and_then(|s| s.addresses.as_ref())
        .into_iter()
        .flatten()
    {
        match (address.type_.as_str(), address.address.parse::<IpAddr>()) {
            (_, _) if address.address.is_empty() => {}
            ("Hostname" | "InternalIP" | "ExternalIP", Ok(ip)) => addresses.push(ip),
            ("Hostname" | "InternalDNS" | "ExternalDNS", _) => names.push(address.address.clone()),
            _ => {}
        }
    }
    names.sort_unstable();
    names.dedup();
    addresses.sort_unstable();
    addresses.dedup();
    (names, addresses)
}

/// Asks and renews for ever; whether it is time is looked at every `look`.
pub(super) async fn run(node: &Shared, serving: &Serving, look: Duration) {
    let Some(api) = &node.api else {
        return;
    };
    let mut objects = node.node.subscribe();
    let mut failures = 0;
    let mut renewal = serving.current().map(|current| renewal(&current));
    loop {
        let object = objects.borrow_and_update().clone();
        let (names, addresses) = object.as_deref().map(names_of).unwrap_or_default();
        // Signers refuse requests without an address. With a cloud provider it comes after the name.
        let named = !addresses.is_empty();
        let fits = serving
            .current()
            .is_some_and(|current| current.is_for(&names, &addresses));
        let due = renewal.is_none_or(|at| wall_seconds(node) >= at);
        if named && (due || !fits) {
            let purpose = serving_for(names.clone(), addresses.clone());
            let replaced = api.standing().replaced();
            let asked = tokio::select! {
                // Cancel-safe: the same request is taken up again, unless the names differ.
                asked = obtain(node, api, &purpose) => asked,
                () = other_names(&mut objects, &purpose) => continue,
            };
            match asked {
                Ok(path) => {
                    let Some(fresh) = newest(node).await else {
                        failures += 1;
                        node.metrics.server_certificate_errors.inc();
                        tokio::time::sleep(pause(failures, AGAIN.0, AGAIN.1)).await;
                        continue;
                    };
                    failures = 0;
                    renewal = Some(self::renewal(&fresh));
                    let complete = fresh.is_for(&names, &addresses);
                    replace(node, serving, fresh, &path);
                    if !complete {
                        tracing::warn!(
                            again_in_seconds = AGAIN.1.as_secs(),
                            "the signer left names or addresses of the node out of its serving certificate"
                        );
                        tokio::time::sleep(AGAIN.1).await;
                    }
                }
                Err(error) => {
                    failures += 1;
                    node.metrics.server_certificate_errors.inc();
                    let wait = pause(failures, AGAIN.0, AGAIN.1);
                    tracing::error!(
                        error = %with_source(&error),
                        again_in_seconds = wait.as_secs(),
                        "cannot get a serving certificate"
                    );
                    // Who had no rights has them with other credentials: a year later the client certificate comes first.
                    tokio::select! {
                        // Cancel-safe both.
                        () = tokio::time::sleep(wait) => {}
                        () = replaced => failures = 0,
                    }
                    continue;
                }
            }
        }
        tokio::select! {
            // Cancel-safe both.
            () = tokio::time::sleep(look) => {}
            changed = objects.changed() => {
                if changed.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        }
    }
}

/// Requests a certificate, and waits for it. Returns its file.
async fn obtain(node: &Shared, api: &ApiClient, purpose: &Purpose) -> Result<PathBuf, CsrError> {
    let clock = Arc::clone(&node.clock);
    let now = move || clock.now().wall_ms.div_euclid(1000);
    let config = &node.config;
    csr::obtain(
        &api.kube(),
        purpose,
        &config.node_name,
        &config.cert_dir,
        now,
    )
    .await
}

/// Returns when the node has other names or addresses than a request asks for.
async fn other_names(objects: &mut watch::Receiver<Option<Arc<Node>>>, purpose: &Purpose) {
    loop {
        if objects.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        let now = objects.borrow_and_update().as_deref().map(names_of);
        let now = now.map(|(names, addresses)| serving_for(names, addresses));
        if now.as_ref() != Some(purpose) {
            return;
        }
    }
}

/// Puts a new certificate in the place of the old one.
fn replace(node: &Shared, serving: &Serving, fresh: Certificate, path: &Path) {
    if let Some(old) = serving.current() {
        let used = wall_seconds(node).saturating_sub(old.from).max(0);
        #[expect(clippy::cast_precision_loss, reason = "seconds of a few years")]
        node.metrics
            .server_certificate_rotation
            .observe(used as f64);
    }
    tracing::info!(certificate = %path.display(), until = fresh.until, "the node has its serving certificate");
    serving.set(fresh);
}

fn with_source(error: &CsrError) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// A random moment between 70 and 90 % of its life, as upstream.
fn renewal(certificate: &Certificate) -> i64 {
    let length = certificate.until.saturating_sub(certificate.from).max(0);
    certificate.from + length / 1000 * rand::rng().random_range(700..=900)
}
