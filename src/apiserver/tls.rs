//! TLS of the connections to the API server and its proxy, as lenient as Go's clients are: see [`certificates`].

use std::sync::Arc;

use kube::client::ConfigExt as _;
use kube::config::AuthInfo;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::sign::SingleCertAndKey;
use rustls::{ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use super::kubeconfig;
use crate::types::certificates::{self, Purpose};

/// Returns the settings for connections with the credentials of `config`.
///
/// # Errors
/// When the certificates or keys cannot be used.
pub(super) fn client_config(config: &kube::Config) -> Result<ClientConfig, kube::Error> {
    let mut tls = match config.rustls_client_config() {
        Ok(tls) => tls,
        Err(error) => match with_old_identity(config) {
            Some(tls) => tls,
            None => return Err(error),
        },
    };
    if let Some(trusted) = config
        .root_cert
        .as_ref()
        .filter(|_| !config.accept_invalid_certs)
        && let Some(verifier) = Verifier::new(trusted, tls.crypto_provider())
    {
        let verifier = Arc::new(verifier);
        tls.dangerous().set_certificate_verifier(verifier);
    }
    Ok(tls)
}

/// Returns whether a certificate can be one of those that servers are verified with. As Go's `AppendCertsFromPEM`, the
/// others of its bundle count without those that cannot.
pub(super) fn can_be_trusted(der: &[u8]) -> bool {
    let der = CertificateDer::from(der.to_vec());
    RootCertStore::empty().add(der).is_ok()
}

/// As [`client_config`], of a client certificate of version 1, which the client refuses when it joins it with its key.
fn with_old_identity(config: &kube::Config) -> Option<ClientConfig> {
    let chain = kubeconfig::certificate(&config.auth_info)?;
    let key = kubeconfig::key(&config.auth_info)?;
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&chain)
        .collect::<Result<_, _>>()
        .ok()?;
    let key = PrivateKeyDer::from_pem_slice(&key).ok()?;
    let mut bare = config.clone();
    bare.auth_info = AuthInfo::default();
    let mut tls = bare.rustls_client_config().ok()?;
    let identity = certificates::certified_key(chain, key, tls.crypto_provider()).ok()?;
    tls.client_auth_cert_resolver = Arc::new(SingleCertAndKey::from(identity));
    Some(tls)
}

/// Verifies servers with the CAs of a kubeconfig.
#[derive(Debug)]
struct Verifier {
    chains: Arc<WebPkiServerVerifier>,
    trusted: Vec<CertificateDer<'static>>,
    provider: Arc<CryptoProvider>,
}

impl Verifier {
    fn new(trusted: &[Vec<u8>], provider: &Arc<CryptoProvider>) -> Option<Self> {
        let trusted = trusted.iter().cloned().map(CertificateDer::from);
        let trusted: Vec<CertificateDer<'static>> = trusted.collect();
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(trusted.iter().cloned());
        let chains =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider));
        Some(Self {
            chains: chains.build().ok()?,
            trusted,
            provider: Arc::clone(provider),
        })
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verified = self.chains.verify_server_cert(
            end_entity,
            intermediates,
            server_name,
            ocsp_response,
            now,
        );
        let Err(refused) = verified else {
            return verified;
        };
        let algorithms = &self.provider.signature_verification_algorithms;
        let by_itself =
            certificates::verify(end_entity, &self.trusted, Purpose::Server, now, algorithms);
        if by_itself.is_err() {
            // That of the chain says more.
            return Err(refused);
        }
        let parsed = ParsedCertificate::try_from(end_entity)?;
        rustls::client::verify_server_name(&parsed, server_name)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chains.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chains.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chains.supported_verify_schemes()
    }
}

#[cfg(test)]
#[path = "tls_tests.rs"]
mod tests;
