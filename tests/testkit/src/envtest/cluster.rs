//! What the controllers of a whole cluster would do: objects of namespaces, signed certificates, tokens.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use jiff::SignedDuration;
use k8s_openapi::ByteString;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Secret, ServiceAccount};
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, Error};
use rcgen::ExtendedKeyUsagePurpose;
use serde_json::json;

use super::EnvTest;

const CLIENT_KUBELET: &str = "kubernetes.io/kube-apiserver-client-kubelet";
const SERVING: &str = "kubernetes.io/kubelet-serving";

/// Runs a future to its end on a runtime of its own, whether or not the caller is inside one.
pub(super) fn block_on<T: Send>(future: impl Future<Output = T> + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| runtime().block_on(future));
        thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("build a runtime")
}

impl EnvTest {
    pub(super) fn create_what_controllers_would(&self) {
        block_on(async {
            let client = self.admin_client();
            for namespace in ["default", "kube-system", "kube-public", "kube-node-lease"] {
                self.furnish(&client, namespace).await;
            }
            let binding = json!({
                "metadata": { "name": "envtest:kubelet-api-admin" },
                "roleRef": {
                    "apiGroup": "rbac.authorization.k8s.io",
                    "kind": "ClusterRole",
                    "name": "system:kubelet-api-admin",
                },
                "subjects": [{
                    "apiGroup": "rbac.authorization.k8s.io",
                    "kind": "User",
                    "name": super::KUBELET_CLIENT,
                }],
            });
            create::<ClusterRoleBinding>(&Api::all(client), binding).await;
        });
    }

    /// Makes a namespace with its service account `default` and its configMap `kube-root-ca.crt`, where missing.
    ///
    /// # Panics
    /// When the API server refuses.
    pub fn namespace(&self, name: &str) {
        block_on(async { self.furnish(&self.admin_client(), name).await });
    }

    async fn furnish(&self, client: &Client, namespace: &str) {
        let meta = json!({ "metadata": { "name": namespace } });
        create::<Namespace>(&Api::all(client.clone()), meta).await;
        let account = json!({ "metadata": { "name": "default" } });
        create::<ServiceAccount>(&Api::namespaced(client.clone(), namespace), account).await;
        let root = json!({
            "metadata": { "name": "kube-root-ca.crt" },
            "data": { "ca.crt": self.ca_pem() },
        });
        create::<ConfigMap>(&Api::namespaced(client.clone(), namespace), root).await;
    }

    /// A token of a service account, not bound to a pod, valid for an hour.
    ///
    /// # Panics
    /// When the API server refuses.
    pub fn token(&self, namespace: &str, service_account: &str) -> String {
        block_on(async {
            let accounts: Api<ServiceAccount> = Api::namespaced(self.admin_client(), namespace);
            let request = TokenRequest {
                spec: Some(TokenRequestSpec {
                    expiration_seconds: Some(3600),
                    ..TokenRequestSpec::default()
                }),
                ..TokenRequest::default()
            };
            let answer = accounts
                .create_token_request(service_account, &PostParams::default(), &request)
                .await
                .expect("request a token");
            let token = answer.status.and_then(|status| status.token);
            token.expect("a token")
        })
    }

    /// A kubeconfig with a bootstrap token (group `system:bootstrappers`), which may ask for a node's client
    /// certificate and nothing else. `server` is [`EnvTest::url`] or a proxy's. The same token at each call.
    ///
    /// # Panics
    /// When the API server refuses.
    pub fn bootstrap_kubeconfig(&self, server: &str) -> PathBuf {
        const ID: &str = "holdfa";
        const SECRET: &str = "0123456789abcdef";
        block_on(async {
            let client = self.admin_client();
            let token = json!({
                "metadata": { "name": format!("bootstrap-token-{ID}") },
                "type": "bootstrap.kubernetes.io/token",
                "stringData": {
                    "token-id": ID,
                    "token-secret": SECRET,
                    "usage-bootstrap-authentication": "true",
                },
            });
            create::<Secret>(&Api::namespaced(client.clone(), "kube-system"), token).await;
            let binding = json!({
                "metadata": { "name": "envtest:node-bootstrapper" },
                "roleRef": {
                    "apiGroup": "rbac.authorization.k8s.io",
                    "kind": "ClusterRole",
                    "name": "system:node-bootstrapper",
                },
                "subjects": [{
                    "apiGroup": "rbac.authorization.k8s.io",
                    "kind": "Group",
                    "name": "system:bootstrappers",
                }],
            });
            create::<ClusterRoleBinding>(&Api::all(client), binding).await;
        });
        let token = format!("{ID}.{SECRET}");
        // The API server learns of the secret by a watch.
        let kubeconfig = self.token_kubeconfig(server, &token);
        let direct = self.token_kubeconfig(&self.url(), &token);
        let asked = ["auth", "can-i", "create", "certificatesigningrequests"];
        self.wait_for("kube-apiserver", || {
            self.kubectl_as(&direct, &asked).status.success()
        })
        .unwrap_or_else(|said| panic!("{said}"));
        kubeconfig
    }

    /// Approves and signs a CertificateSigningRequest of the signers `kubernetes.io/kube-apiserver-client-kubelet`
    /// and `kubernetes.io/kubelet-serving`. The certificate expires after `expires_in`, whatever was asked for.
    ///
    /// # Panics
    /// When there is no such request, or it holds nonsense, or the API server refuses.
    pub fn sign_csr(&self, name: &str, expires_in: SignedDuration) {
        block_on(async {
            let requests: Api<CertificateSigningRequest> = Api::all(self.admin_client());
            let request = requests.get(name).await.expect("get the request");
            self.sign(&requests, &request, expires_in).await;
        });
    }

    /// Signs every kubelet's request from now on, on a thread of its own, until the value is dropped.
    pub fn csr_signer(self: &Arc<Self>, expires_in: SignedDuration) -> CsrSigner {
        let stop = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let (env, stop) = (Arc::clone(self), Arc::clone(&stop));
            move || {
                runtime().block_on(async {
                    let requests: Api<CertificateSigningRequest> = Api::all(env.admin_client());
                    while !stop.load(Ordering::Relaxed) {
                        // Outages are part of the tests.
                        if let Ok(list) = requests.list(&ListParams::default()).await {
                            for request in list.items.iter().filter(|r| pending(r)) {
                                env.sign(&requests, request, expires_in).await;
                            }
                        }
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                });
            }
        });
        CsrSigner {
            stop,
            thread: Some(thread),
        }
    }

    async fn sign(
        &self,
        requests: &Api<CertificateSigningRequest>,
        request: &CertificateSigningRequest,
        expires_in: SignedDuration,
    ) {
        let name = request.metadata.name.as_deref().expect("a name");
        let pem = String::from_utf8(request.spec.request.0.clone()).expect("PEM");
        let usage = if request.spec.signer_name == SERVING {
            ExtendedKeyUsagePurpose::ServerAuth
        } else {
            ExtendedKeyUsagePurpose::ClientAuth
        };
        let certificate = self.authority().sign_request(&pem, usage, expires_in);
        let approved = json!({ "status": { "conditions": [{
            "type": "Approved",
            "status": "True",
            "reason": "EnvTest",
            "message": "approved by the test",
        }] } });
        let params = PatchParams::default();
        requests
            .patch_approval(name, &params, &Patch::Merge(approved))
            .await
            .expect("approve the request");
        let signed = json!({ "status": { "certificate": ByteString(certificate.into_bytes()) } });
        requests
            .patch_status(name, &params, &Patch::Merge(signed))
            .await
            .expect("issue the certificate");
    }
}

/// Signs requests until it is dropped; see [`EnvTest::csr_signer`].
#[derive(Debug)]
pub struct CsrSigner {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for CsrSigner {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            eprintln!("signing certificates failed, see above");
        }
    }
}

/// Of a kubelet, and neither approved nor denied nor issued.
fn pending(request: &CertificateSigningRequest) -> bool {
    let status = request.status.as_ref();
    [CLIENT_KUBELET, SERVING].contains(&request.spec.signer_name.as_str())
        && status.is_none_or(|status| {
            status.certificate.is_none() && status.conditions.as_ref().is_none_or(Vec::is_empty)
        })
}

/// Creates an object unless it exists, again while the API server still builds what that needs.
async fn create<K>(api: &Api<K>, object: serde_json::Value)
where
    K: kube::Resource<DynamicType = ()>
        + Clone
        + serde::Serialize
        + serde::de::DeserializeOwned
        + std::fmt::Debug,
{
    let typed: K = serde_json::from_value(object).expect("an object");
    let begin = tokio::time::Instant::now();
    loop {
        match api.create(&PostParams::default(), &typed).await {
            Ok(_) => return,
            Err(Error::Api(status)) if status.code == 409 => return,
            Err(Error::Api(status))
                if begin.elapsed() < Duration::from_secs(20)
                    && matches!(status.code, 403 | 404 | 429 | 500 | 503) =>
            {
                tokio::time::sleep(Duration::from_millis(25)).await;
            }
            Err(error) => panic!("create {typed:?}: {error}"),
        }
    }
}
