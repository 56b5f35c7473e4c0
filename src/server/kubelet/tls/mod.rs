//! The serving certificate: where it comes from, and how a new one is used without a restart.
//!
//! In order: asked of the API server (`serverTLSBootstrap`), the files of `tlsCertFile` and `tlsPrivateKeyFile`, or
//! `kubelet.crt` and `kubelet.key` in the certificate directory, which are made when they are not there.
//!
//! **Invariant:** a certificate that does not fit its key is never taken over; the one before stays in use.

mod bootstrap;
mod files;
mod self_signed;
#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{DigitallySignedStruct, DistinguishedName, SignatureScheme};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use super::Shared;
use crate::kubeletconfig::{KubeletConfiguration, TlsVersion};
use crate::types::{blocking, causes, certificates};

/// Reason why there is no serving certificate.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("read {} of {setting}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Setting that names the file.
        setting: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A file cannot be used.
    #[error("use {} as serving certificate: {problem}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// Description of the error.
        problem: String,
    },
    /// A certificate cannot be written.
    #[error("write the serving certificate {}; give --tls-cert-file, or --cert-dir", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A certificate cannot be made.
    #[error("make a serving certificate")]
    Make(#[source] rcgen::Error),
    /// The settings cannot be used together.
    #[error("set up TLS with tlsMinVersion, tlsCipherSuites and tlsCurvePreferences")]
    Settings(#[source] rustls::Error),
    /// The agent is ending.
    #[error("the agent is ending")]
    Interrupted,
}

/// The certificate that is in use. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(super) struct Serving(Arc<ArcSwapOption<Certificate>>);

/// A certificate with its key, ready for use.
#[derive(Debug)]
pub(super) struct Certificate {
    key: Arc<CertifiedKey>,
    /// Seconds since 1970.
    from: i64,
    until: i64,
    names: Vec<String>,
    addresses: Vec<IpAddr>,
    /// The common name, if it is signed with its own key.
    self_signed: Option<String>,
}

impl Serving {
    fn set(&self, certificate: Certificate) {
        self.0.store(Some(Arc::new(certificate)));
    }

    fn current(&self) -> Option<Arc<Certificate>> {
        self.0.load_full()
    }
}

impl ResolvesServerCert for Serving {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0
            .load()
            .as_ref()
            .map(|current| Arc::clone(&current.key))
    }
}

impl Certificate {
    /// Reads the certificates in `chain` and the key in `key`, both PEM; they may be the same text.
    ///
    /// # Errors
    /// The reason why they cannot be used.
    fn parse(chain: &[u8], key: &[u8]) -> Result<Self, String> {
        let chain: Vec<_> = CertificateDer::pem_slice_iter(chain)
            .collect::<Result<_, _>>()
            .map_err(|error| format!("the certificate does not parse: {error}"))?;
        let Some(first) = chain.first() else {
            return Err("there is no certificate in it".to_owned());
        };
        let key = PrivateKeyDer::from_pem_slice(key)
            .map_err(|error| format!("the key does not parse: {error}"))?;
        let (_, parsed) = X509Certificate::from_der(first)
            .map_err(|error| format!("the certificate does not parse: {error}"))?;
        let (mut names, mut addresses) = (Vec::new(), Vec::new());
        if let Ok(Some(alternatives)) = parsed.subject_alternative_name() {
            for name in &alternatives.value.general_names {
                match name {
                    GeneralName::DNSName(name) => names.push((*name).to_owned()),
                    GeneralName::IPAddress(bytes) => addresses.extend(address(bytes)),
                    _ => {}
                }
            }
        }
        let (from, until) = (
            parsed.validity().not_before.timestamp(),
            parsed.validity().not_after.timestamp(),
        );
        let common_name = parsed.subject().iter_common_name().next();
        let common_name = common_name.and_then(|name| name.as_str().ok());
        let self_signed = (parsed.subject() == parsed.issuer())
            .then(|| common_name.unwrap_or_default().to_owned());
        let provider = rustls::crypto::ring::default_provider();
        let key = certificates::certified_key(chain, key, &provider)
            .map_err(|error| format!("certificate and key do not go together: {error}"))?;
        Ok(Self {
            key: Arc::new(key),
            from,
            until,
            names,
            addresses,
            self_signed,
        })
    }

    fn is_for(&self, names: &[String], addresses: &[IpAddr]) -> bool {
        names.iter().all(|name| self.names.contains(name))
            && addresses.iter().all(|ip| self.addresses.contains(ip))
    }
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    if let Ok(bytes) = <[u8; 4]>::try_from(bytes) {
        return Some(bytes.into());
    }
    <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from)
}

/// Source that keeps the certificate valid after the start.
pub(super) enum Keeper {
    Files(files::Files),
    SelfSigned,
    Bootstrap,
}

/// Finds the certificate, or makes one.
///
/// # Errors
/// When the agent is ending. A certificate that is still to be asked for, or cannot be read or made yet, is no error:
/// connections fail until there is one.
pub(super) async fn open(node: &Shared) -> Result<(Serving, Keeper), TlsError> {
    let serving = Serving::default();
    let k = &node.config.kubelet;
    let keeper = if k.server_tls_bootstrap && node.api.is_some() {
        bootstrap::restore(node, &serving).await;
        Keeper::Bootstrap
    } else {
        if k.server_tls_bootstrap {
            tracing::warn!(
                "serverTLSBootstrap has no effect without a kubeconfig: the serving certificate is made on the node"
            );
        }
        match (&k.tls_cert_file, &k.tls_private_key_file) {
            (Some(certificate), Some(key)) => {
                let files = files::Files::new(certificate.clone(), key.clone());
                Keeper::Files(files.look(&serving, &*node.clock).await?)
            }
            _ => {
                let made = self_signed::SelfSigned::new(node);
                let found = blocking::run(move || made.ensure(true)).await;
                match found.map_err(|_| TlsError::Interrupted)? {
                    Ok(certificate) => serving.set(certificate),
                    Err(error) => tracing::warn!(
                        error = causes(&error),
                        "no serving certificate yet, connections to the kubelet's API fail; trying again every 10 s"
                    ),
                }
                Keeper::SelfSigned
            }
        }
    };
    Ok((serving, keeper))
}

/// Keeps the certificate good until [`super::NodeApi::stop`] is cancelled; files and dates are looked at every `look`.
pub(super) async fn keep(node: Shared, serving: Serving, keeper: Keeper, look: Duration) {
    let metrics = async {
        loop {
            if let Some(current) = serving.current() {
                let left = current.until.saturating_sub(wall_seconds(&node));
                #[expect(clippy::cast_precision_loss, reason = "seconds of a few years")]
                node.metrics.server_certificate_ttl.set(left as f64);
            }
            tokio::time::sleep(look).await;
        }
    };
    let work = async {
        match keeper {
            Keeper::Files(files) => files::watch(files, &serving, look, &*node.clock).await,
            Keeper::SelfSigned => self_signed::watch(&node, &serving, look).await,
            Keeper::Bootstrap => bootstrap::run(&node, &serving, look).await,
        }
    };
    tokio::select! {
        () = work => {}
        () = metrics => {}
        () = node.stop.cancelled() => {}
    }
}

fn wall_seconds(node: &Shared) -> i64 {
    node.clock.now().wall_ms.div_euclid(1000)
}

/// Returns the TLS settings of connections: `tlsMinVersion`, `tlsCipherSuites`, `tlsCurvePreferences`, and whether
/// client certificates are requested.
///
/// # Errors
/// When no version, cipher suite or group is left.
pub(super) fn server_config(
    k: &KubeletConfiguration,
    serving: Serving,
) -> Result<Arc<rustls::ServerConfig>, TlsError> {
    let mut provider = rustls::crypto::ring::default_provider();
    if !k.tls_cipher_suites.is_empty() {
        provider.cipher_suites.retain(|suite| {
            let name = format!("{:?}", suite.suite());
            suite.tls13().is_some() || k.tls_cipher_suites.contains(&name)
        });
    }
    if !k.tls_curve_preferences.is_empty() {
        provider.kx_groups.retain(|group| {
            k.tls_curve_preferences
                .contains(&i32::from(u16::from(group.name())))
        });
    }
    let versions: &[&rustls::SupportedProtocolVersion] = match k.tls_min_version {
        TlsVersion::Tls13 => &[&rustls::version::TLS13],
        _ => &[&rustls::version::TLS13, &rustls::version::TLS12],
    };
    let provider = Arc::new(provider);
    let builder = rustls::ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(versions)
        .map_err(TlsError::Settings)?;
    let builder = match k.authentication.client_ca_file {
        Some(_) => builder.with_client_cert_verifier(Arc::new(AnyCertificate(provider))),
        None => builder.with_no_client_auth(),
    };
    let mut config = builder.with_cert_resolver(Arc::new(serving));
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// Asks for a client's certificate and lets the handshake succeed with any and with none, as upstream
/// (`RequestClientCert`): whether it is good is decided for each request, where a token may stand in. That the peer
/// has the key is proved in the handshake all the same.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ClientCertVerifier for AnyCertificate {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        certificates::verify_handshake(message, cert, dss, algorithms, false)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        certificates::verify_handshake(message, cert, dss, algorithms, true)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Reads a file that `setting` names. Blocking.
fn read_file(path: &Path, setting: &'static str) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|source| TlsError::Read {
        path: path.to_owned(),
        setting,
        source,
    })
}
