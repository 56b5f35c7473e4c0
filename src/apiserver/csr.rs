//! Asking for a certificate: key, request, approval, and where the answer is kept.
//!
//! On disk, in the certificate directory, all with mode 0600; `kubelet-client` for the client's certificate,
//! `kubelet-server` for the serving one:
//! - `kubelet-client.key.tmp`: the key of a request that is not answered yet. The name of the request follows from
//!   it, so that an agent that is restarted waits for the request it made before.
//! - `kubelet-client-<time>.pem`: certificate and key, in this order.
//! - `kubelet-client-current.pem`: link to the newest.
//!
//! **Invariant:** each file appears whole or not at all, and is on disk before something refers to it.

use std::fs;
use std::io::{self, Write};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestSpec,
};
use kube::api::{Api, ObjectMeta, PostParams};
use rcgen::{
    CertificateParams, DistinguishedName, DnType, KeyPair, PKCS_ECDSA_P256_SHA256, SanType,
};
use sha2::{Digest, Sha256};

use super::failure::{pause, retry_after};

/// Shortest and longest poll interval of a request that is not approved.
const POLL: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(30));

/// Purpose of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The node shows the API server who it is.
    Client,
    /// The node's API is served with it, under these names and addresses.
    Serving {
        /// DNS names.
        names: Vec<String>,
        /// IP addresses.
        addresses: Vec<IpAddr>,
    },
}

impl Purpose {
    const fn signer(&self) -> &'static str {
        match self {
            Self::Client => "kubernetes.io/kube-apiserver-client-kubelet",
            Self::Serving { .. } => "kubernetes.io/kubelet-serving",
        }
    }

    const fn prefix(&self) -> &'static str {
        match self {
            Self::Client => "kubelet-client",
            Self::Serving { .. } => "kubelet-server",
        }
    }

    /// Signers before Kubernetes 1.27 sign serving certificates with these three only, whatever the key.
    const fn usages(&self) -> &'static [&'static str] {
        match self {
            Self::Client => &["digital signature", "client auth"],
            Self::Serving { .. } => &["digital signature", "key encipherment", "server auth"],
        }
    }

    /// The link to the newest certificate.
    pub fn current(&self, directory: &Path) -> PathBuf {
        directory.join(format!("{}-current.pem", self.prefix()))
    }

    fn pending_key(&self, directory: &Path) -> PathBuf {
        directory.join(format!("{}.key.tmp", self.prefix()))
    }

    fn alternative_names(&self) -> Result<Vec<SanType>, rcgen::Error> {
        let Self::Serving { names, addresses } = self else {
            return Ok(Vec::new());
        };
        let names = names
            .iter()
            .map(|name| Ok(SanType::DnsName(name.as_str().try_into()?)));
        let addresses = addresses
            .iter()
            .map(|address| Ok(SanType::IpAddress(*address)));
        names.chain(addresses).collect()
    }
}

/// Reason why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub enum CsrError {
    /// A file cannot be written.
    #[error("write {}", path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// No key or request can be made.
    #[error("make a key and a request for it")]
    Make(#[source] rcgen::Error),
    /// The server does not take the request.
    #[error(
        "create certificate signing request {name}: its user needs the right to create and get these"
    )]
    Create {
        /// Of the request.
        name: String,
        /// Why.
        #[source]
        source: kube::Error,
    },
    /// The request cannot be read.
    #[error("read certificate signing request {name}")]
    Get {
        /// Of the request.
        name: String,
        /// Why.
        #[source]
        source: kube::Error,
    },
    /// It was denied.
    #[error("certificate signing request {name} was denied: {reason}; a new one is made later")]
    Denied {
        /// Of the request.
        name: String,
        /// As whoever denied it says.
        reason: String,
    },
    /// The signer does not sign it.
    #[error(
        "certificate signing request {name} could not be signed: {reason}; a new one is made later"
    )]
    Failed {
        /// Of the request.
        name: String,
        /// As the signer says.
        reason: String,
    },
    /// The answer is no certificate for the key.
    #[error(
        "certificate signing request {name} was answered with something else than a certificate of the node's key"
    )]
    Wrong {
        /// Of the request.
        name: String,
    },
}

/// Gets a certificate for `node` and keeps it in `directory`. Waits for the approval as long as it takes; what
/// the server does not answer is tried again. `now` is in seconds since 1970 and names the file.
///
/// Cancel-safe: the next call takes up the same request.
///
/// # Errors
/// When the request is denied, fails or is answered wrongly (its key is forgotten then), when the client may not
/// make it, and when the directory cannot be written.
pub async fn obtain(
    client: &kube::Client,
    purpose: &Purpose,
    node: &str,
    directory: &Path,
    now: impl Fn() -> i64,
) -> Result<PathBuf, CsrError> {
    let pending = purpose.pending_key(directory);
    let key = pending_key(&pending)?;
    let request = request(purpose, node, &key).map_err(CsrError::Make)?;
    let name = request_name(purpose, node, &key);
    let api: Api<CertificateSigningRequest> = Api::all(client.clone());
    let answer = wait(&api, purpose, &name, &request).await;
    let chain = match answer {
        Ok(chain) if certifies(&chain, &key) => chain,
        other => {
            // Whatever comes next needs another name, and so another key.
            if !matches!(other, Err(CsrError::Create { .. } | CsrError::Get { .. })) {
                forget(&pending)?;
            }
            return Err(other.err().unwrap_or(CsrError::Wrong { name }));
        }
    };
    let path = keep(purpose, directory, &chain, &key.serialize_pem(), now())?;
    forget(&pending)?;
    Ok(path)
}

/// The key of the request that is not answered yet, or a new one.
fn pending_key(path: &Path) -> Result<KeyPair, CsrError> {
    let failed = |source| CsrError::Write {
        path: path.to_owned(),
        source,
    };
    match fs::read(path) {
        Ok(pem) => match KeyPair::from_pem(&String::from_utf8_lossy(&pem)) {
            Ok(key) => return Ok(key),
            Err(error) => tracing::warn!(
                path = %path.display(),
                %error,
                "the key of the pending certificate signing request is damaged, making another one"
            ),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(CsrError::Make)?;
    write_whole(path, key.serialize_pem().as_bytes()).map_err(failed)?;
    Ok(key)
}

/// Forgets the request that is not answered yet, so that the next one has another key and name. Blocking.
///
/// # Errors
/// When its key cannot be removed.
pub(super) fn abandon(purpose: &Purpose, directory: &Path) -> Result<(), CsrError> {
    forget(&purpose.pending_key(directory))
}

fn forget(path: &Path) -> Result<(), CsrError> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(CsrError::Write {
            path: path.to_owned(),
            source,
        }),
        _ => Ok(()),
    }
}

fn request(purpose: &Purpose, node: &str, key: &KeyPair) -> Result<Vec<u8>, rcgen::Error> {
    let mut params = CertificateParams::default();
    params.subject_alt_names = purpose.alternative_names()?;
    let mut subject = DistinguishedName::new();
    subject.push(DnType::OrganizationName, "system:nodes");
    subject.push(DnType::CommonName, format!("system:node:{node}"));
    params.distinguished_name = subject;
    Ok(params.serialize_request(key)?.pem()?.into_bytes())
}

/// The same for the same key, node and purpose.
fn request_name(purpose: &Purpose, node: &str, key: &KeyPair) -> String {
    let mut hash = Sha256::new();
    hash.update(purpose.signer());
    hash.update([0]);
    hash.update(node);
    hash.update([0]);
    hash.update(key.public_key_raw());
    if let Purpose::Serving { names, addresses } = purpose {
        hash.update(format!("{names:?}{addresses:?}"));
    }
    let digest: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
    format!("node-csr-{digest}")
}

/// Makes the request unless it is there, and waits for its end.
async fn wait(
    api: &Api<CertificateSigningRequest>,
    purpose: &Purpose,
    name: &str,
    request: &[u8],
) -> Result<Vec<u8>, CsrError> {
    let object = CertificateSigningRequest {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            ..ObjectMeta::default()
        },
        spec: CertificateSigningRequestSpec {
            request: ByteString(request.to_vec()),
            signer_name: purpose.signer().to_owned(),
            usages: Some(
                purpose
                    .usages()
                    .iter()
                    .map(|&usage| usage.to_owned())
                    .collect(),
            ),
            ..CertificateSigningRequestSpec::default()
        },
        status: None,
    };
    let (mut failures, mut looks, mut there) = (0, 0, false);
    loop {
        let outcome = if there {
            api.get_opt(name).await
        } else {
            api.create(&PostParams::default(), &object).await.map(Some)
        };
        match outcome {
            Ok(Some(found)) => {
                failures = 0;
                if !there {
                    tracing::info!(
                        request = name,
                        signer = purpose.signer(),
                        "made a certificate signing request, waiting for its approval (kubectl certificate approve)"
                    );
                }
                there = true;
                if let Some(chain) = outcome_of(name, &found)? {
                    return Ok(chain);
                }
                looks += 1;
                tokio::time::sleep(pause(looks, POLL.0, POLL.1)).await;
            }
            // The server forgets requests after a while.
            Ok(None) => {
                there = false;
                failures += 1;
                tokio::time::sleep(pause(failures, POLL.0, POLL.1)).await;
            }
            Err(kube::Error::Api(status)) if status.code == 409 && !there => there = true,
            Err(error) if is_transient(&error) => {
                failures += 1;
                let asked = retry_after(&error).unwrap_or_default();
                tokio::time::sleep(pause(failures, POLL.0, POLL.1).max(asked)).await;
            }
            Err(source) if there => {
                return Err(CsrError::Get {
                    name: name.to_owned(),
                    source,
                });
            }
            Err(source) => {
                return Err(CsrError::Create {
                    name: name.to_owned(),
                    source,
                });
            }
        }
    }
}

/// Returns whether an error only means that the server is unreachable or busy. Every other answer about the request is
/// reported.
fn is_transient(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => matches!(status.code, 429 | 500 | 502 | 503 | 504),
        kube::Error::HyperError(_) | kube::Error::Service(_) | kube::Error::ReadEvents(_) => true,
        _ => false,
    }
}

/// The certificate, when there is one.
fn outcome_of(name: &str, found: &CertificateSigningRequest) -> Result<Option<Vec<u8>>, CsrError> {
    let Some(status) = &found.status else {
        return Ok(None);
    };
    let condition = |kind: &str| {
        let conditions = status.conditions.iter().flatten();
        let found = conditions.into_iter().find(|one| one.type_ == kind);
        found.map(|one| {
            let texts = [one.reason.as_deref(), one.message.as_deref()];
            let texts: Vec<_> = texts.into_iter().flatten().collect();
            texts.join(": ")
        })
    };
    let name = || name.to_owned();
    if let Some(reason) = condition("Denied") {
        return Err(CsrError::Denied {
            name: name(),
            reason,
        });
    }
    if let Some(reason) = condition("Failed") {
        return Err(CsrError::Failed {
            name: name(),
            reason,
        });
    }
    let chain = status.certificate.as_ref().map(|chain| chain.0.clone());
    Ok(chain.filter(|chain| !chain.is_empty()))
}

/// Returns whether the first certificate of `chain` is for `key`.
fn certifies(chain: &[u8], key: &KeyPair) -> bool {
    x509_parser::pem::Pem::iter_from_buffer(chain)
        .filter_map(Result::ok)
        .next()
        .and_then(|block| {
            let certificate = block.parse_x509().ok()?;
            Some(certificate.public_key().subject_public_key.data.as_ref() == key.public_key_raw())
        })
        .unwrap_or(false)
}

/// Keeps a pair that was given, in PEM, as if it had been obtained, so that whoever looks for the current pair finds
/// it. Returns its file; `None` when its certificate is the current one already. `now` is in seconds since 1970 and
/// names the file. Blocking.
///
/// As upstream's `getCurrentCertificateOrBootstrap` does with the pair of a kubeconfig.
///
/// # Errors
/// When it cannot be written.
pub(super) fn adopt(
    purpose: &Purpose,
    directory: &Path,
    chain: &[u8],
    key: &str,
    now: i64,
) -> Result<Option<PathBuf>, CsrError> {
    let current = fs::read(purpose.current(directory)).ok();
    let current = current.and_then(|pem| first_certificate(&pem));
    if current.is_some() && current == first_certificate(chain) {
        return Ok(None);
    }
    keep(purpose, directory, chain, key, now).map(Some)
}

/// Returns the first certificate in `pem`, in DER.
fn first_certificate(pem: &[u8]) -> Option<Vec<u8>> {
    x509_parser::pem::Pem::iter_from_buffer(pem)
        .filter_map(Result::ok)
        .find(|block| block.label == "CERTIFICATE")
        .map(|block| block.contents)
}

/// Writes certificate and key, and points the link at them.
fn keep(
    purpose: &Purpose,
    directory: &Path,
    chain: &[u8],
    key: &str,
    now: i64,
) -> Result<PathBuf, CsrError> {
    let at = jiff::Timestamp::from_second(now).unwrap_or_default();
    let prefix = purpose.prefix();
    let name = format!("{prefix}-{}.pem", at.strftime("%Y-%m-%d-%H-%M-%S"));
    let path = directory.join(&name);
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| CsrError::Write { path, source }
    };
    let mut pem = chain.to_vec();
    if !pem.ends_with(b"\n") {
        pem.push(b'\n');
    }
    pem.extend_from_slice(key.as_bytes());
    write_whole(&path, &pem).map_err(failed(&path))?;
    let (link, fresh) = (
        purpose.current(directory),
        directory.join(format!("{prefix}-current.tmp")),
    );
    let point = || {
        match fs::remove_file(&fresh) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        std::os::unix::fs::symlink(&name, &fresh)?;
        fs::rename(&fresh, &link)?;
        fs::File::open(directory)?.sync_all()
    };
    point().map_err(failed(&link))?;
    Ok(path)
}

/// Writes a file with mode 0600 that is there whole or not at all, even after a power loss. Makes its directory.
///
/// # Errors
/// When it cannot be written.
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    let directory = path.parent().unwrap_or(Path::new("/"));
    if !directory.is_dir() {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)?;
    }
    // Made with mode 0600.
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    fs::File::open(directory)?.sync_all()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests may panic")]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_key_is_replaced_whatever_bytes_are_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        fs::write(&path, b"-----BEGIN\xff").unwrap();
        let key = pending_key(&path).unwrap();
        let kept = pending_key(&path).unwrap();
        assert_eq!(kept.serialize_pem(), key.serialize_pem());
    }
}
