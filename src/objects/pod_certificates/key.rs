//! Keys of pods and the requests for them: PKCS#8 and PKCS#10. No I/O; making an RSA key takes a second.
//!
//! By aws-lc-rs: ring, which the rest of the agent uses, makes neither RSA keys nor keys on P-521.

use std::str::FromStr;

use aws_lc_rs::encoding::{AsDer, Pkcs8V1Der, PublicKeyX509Der};
use aws_lc_rs::error::Unspecified;
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::KeySize;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_ASN1_SIGNING, ECDSA_P384_SHA384_ASN1_SIGNING, ECDSA_P521_SHA256_ASN1_SIGNING,
    ECDSA_P521_SHA512_ASN1_SIGNING, EcdsaKeyPair, EcdsaSigningAlgorithm, Ed25519KeyPair,
    KeyPair as _, RSA_PKCS1_SHA256, RSA_PSS_SHA256, RsaEncoding, RsaKeyPair,
};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::pem::Pem;
use x509_parser::prelude::FromDer as _;
use zeroize::Zeroizing;

use crate::core::pod_certificates::PrivateKey;

/// Characters of a line of PEM.
const LINE: usize = 64;
/// Tags of DER.
const BIT_STRING: u8 = 0x03;
const SEQUENCE: u8 = 0x30;
/// Version, empty subject and empty attributes of a request, in DER.
const VERSION: &[u8] = &[0x02, 0x01, 0x00];
const NO_SUBJECT: &[u8] = &[SEQUENCE, 0x00];
const NO_ATTRIBUTES: &[u8] = &[0xa0, 0x00];
/// Algorithms of signatures, in DER: sha256WithRSAEncryption, ecdsa-with-SHA256, -SHA384 and -SHA512, Ed25519.
const RSA_SHA256: &[u8] = &[
    0x30, 0x0d, 0x06, 0x09, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x0b, 0x05, 0x00,
];
const ECDSA_SHA256: &[u8] = &[
    0x30, 0x0a, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x02,
];
const ECDSA_SHA384: &[u8] = &[
    0x30, 0x0a, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x03,
];
const ECDSA_SHA512: &[u8] = &[
    0x30, 0x0a, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x04,
];
const ED25519: &[u8] = &[0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70];

/// `keyType` of a projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyType {
    Rsa3072,
    Rsa4096,
    EcdsaP256,
    EcdsaP384,
    EcdsaP521,
    Ed25519,
}

/// A key or proof that cannot be made.
#[derive(Debug, thiserror::Error)]
pub(super) enum KeyError {
    #[error(
        "unknown key type {key_type:?}; use RSA3072, RSA4096, ECDSAP256, ECDSAP384, ECDSAP521 or ED25519"
    )]
    Unknown { key_type: String },
    #[error("make a key and a request for it")]
    Make,
    #[error(
        "an API server of Kubernetes 1.35 cannot be given a proof for this key type; use ECDSAP256, ECDSAP521, ED25519 or RSA"
    )]
    NoProof,
    #[error("sign with the pod's key")]
    Sign,
}

impl FromStr for KeyType {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        Ok(match text {
            "RSA3072" => Self::Rsa3072,
            "RSA4096" => Self::Rsa4096,
            "ECDSAP256" => Self::EcdsaP256,
            "ECDSAP384" => Self::EcdsaP384,
            "ECDSAP521" => Self::EcdsaP521,
            "ED25519" => Self::Ed25519,
            other => {
                return Err(KeyError::Unknown {
                    key_type: other.to_owned(),
                });
            }
        })
    }
}

impl KeyType {
    /// Returns the algorithm that signs requests, in DER.
    fn algorithm(self) -> &'static [u8] {
        match self {
            Self::Rsa3072 | Self::Rsa4096 => RSA_SHA256,
            Self::EcdsaP256 => ECDSA_SHA256,
            Self::EcdsaP384 => ECDSA_SHA384,
            Self::EcdsaP521 => ECDSA_SHA512,
            Self::Ed25519 => ED25519,
        }
    }
}

/// A key of any type.
enum Pair {
    Rsa(RsaKeyPair),
    Ecdsa(EcdsaKeyPair),
    Ed25519(Ed25519KeyPair),
}

impl Pair {
    fn generate(key_type: KeyType) -> Result<Self, Unspecified> {
        let rsa = |size| RsaKeyPair::generate(size).map(Self::Rsa);
        let ecdsa = |algorithm: &'static EcdsaSigningAlgorithm| {
            EcdsaKeyPair::generate(algorithm).map(Self::Ecdsa)
        };
        match key_type {
            KeyType::Rsa3072 => rsa(KeySize::Rsa3072),
            KeyType::Rsa4096 => rsa(KeySize::Rsa4096),
            KeyType::EcdsaP256 => ecdsa(&ECDSA_P256_SHA256_ASN1_SIGNING),
            KeyType::EcdsaP384 => ecdsa(&ECDSA_P384_SHA384_ASN1_SIGNING),
            KeyType::EcdsaP521 => ecdsa(&ECDSA_P521_SHA512_ASN1_SIGNING),
            KeyType::Ed25519 => Ed25519KeyPair::generate().map(Self::Ed25519),
        }
    }

    /// Reads a key that signs the proofs of Kubernetes 1.35: with SHA-256, whatever the curve.
    fn parse_for_proof(key_type: KeyType, der: &[u8]) -> Result<Self, KeyError> {
        let ecdsa = |algorithm: &'static EcdsaSigningAlgorithm| {
            EcdsaKeyPair::from_pkcs8(algorithm, der).map(Self::Ecdsa)
        };
        let pair = match key_type {
            KeyType::Rsa3072 | KeyType::Rsa4096 => RsaKeyPair::from_pkcs8(der).map(Self::Rsa),
            KeyType::EcdsaP256 => ecdsa(&ECDSA_P256_SHA256_ASN1_SIGNING),
            KeyType::EcdsaP521 => ecdsa(&ECDSA_P521_SHA256_ASN1_SIGNING),
            // The library signs with SHA-384 only.
            KeyType::EcdsaP384 => return Err(KeyError::NoProof),
            KeyType::Ed25519 => Ed25519KeyPair::from_pkcs8(der).map(Self::Ed25519),
        };
        pair.map_err(|_| KeyError::Sign)
    }

    /// Returns the key in PKCS#8, in version 1, which every TLS library reads.
    fn private(&self) -> Result<Zeroizing<Vec<u8>>, Unspecified> {
        let bytes = match self {
            Self::Rsa(pair) => AsDer::<Pkcs8V1Der<'static>>::as_der(pair)?
                .as_ref()
                .to_vec(),
            Self::Ecdsa(pair) => pair.to_pkcs8v1()?.as_ref().to_vec(),
            Self::Ed25519(pair) => pair.to_pkcs8v1()?.as_ref().to_vec(),
        };
        Ok(Zeroizing::new(bytes))
    }

    /// Returns the public key as SubjectPublicKeyInfo.
    fn public(&self) -> Result<Vec<u8>, Unspecified> {
        let der: PublicKeyX509Der<'static> = match self {
            Self::Rsa(pair) => pair.public_key().as_der()?,
            Self::Ecdsa(pair) => pair.public_key().as_der()?,
            Self::Ed25519(pair) => pair.public_key().as_der()?,
        };
        Ok(der.as_ref().to_vec())
    }

    /// Signs; an RSA key with this padding.
    fn sign(
        &self,
        padding: &'static dyn RsaEncoding,
        message: &[u8],
    ) -> Result<Vec<u8>, Unspecified> {
        let random = SystemRandom::new();
        Ok(match self {
            Self::Rsa(pair) => {
                let mut signature = vec![0; pair.public_modulus_len()];
                pair.sign(padding, &random, message, &mut signature)?;
                signature
            }
            Self::Ecdsa(pair) => pair.sign(&random, message)?.as_ref().to_vec(),
            Self::Ed25519(pair) => pair.sign(message).as_ref().to_vec(),
        })
    }

    /// Returns an empty PKCS#10 request that the key has signed, in DER.
    fn request(&self, key_type: KeyType) -> Result<Vec<u8>, Unspecified> {
        let public = self.public()?;
        let info = tagged(SEQUENCE, &[VERSION, NO_SUBJECT, &public, NO_ATTRIBUTES]);
        let signature = self.sign(&RSA_PKCS1_SHA256, &info)?;
        let signature = tagged(BIT_STRING, &[&[0], &signature]);
        Ok(tagged(SEQUENCE, &[&info, key_type.algorithm(), &signature]))
    }
}

/// Returns a value of DER: tag, length, content.
fn tagged(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let content = parts.concat();
    let length = content.len().to_be_bytes();
    let zeros = length.iter().take_while(|byte| **byte == 0).count();
    let length = &length[zeros..];
    let mut der = vec![tag];
    match length {
        [] => der.push(0),
        [short] if *short < 0x80 => der.push(*short),
        long => {
            // At most eight bytes.
            der.push(0x80 | u8::try_from(long.len()).unwrap_or(8));
            der.extend_from_slice(long);
        }
    }
    der.extend_from_slice(&content);
    der
}

/// A new key.
pub(super) struct Made {
    pub(super) key: PrivateKey,
    /// An empty PKCS#10 request in DER.
    pub(super) request: Vec<u8>,
}

/// Makes a key, and the empty request that a `stubPKCS10Request` is. Upstream: `generateKeyAndProof`.
///
/// # Errors
/// See [`KeyError`].
pub(super) fn make(key_type: KeyType) -> Result<Made, KeyError> {
    let pair = Pair::generate(key_type).map_err(|_| KeyError::Make)?;
    let private = pair.private().map_err(|_| KeyError::Make)?;
    Ok(Made {
        key: PrivateKey::new(key_pem(&private)),
        request: pair.request(key_type).map_err(|_| KeyError::Make)?,
    })
}

fn key_pem(der: &[u8]) -> String {
    let text = Zeroizing::new(STANDARD.encode(der));
    // Room for all of it, so that no copy is left behind when it grows.
    let mut pem = String::with_capacity(text.len() + text.len() / LINE + 64);
    pem.push_str("-----BEGIN PRIVATE KEY-----");
    for (at, c) in text.chars().enumerate() {
        if at % LINE == 0 {
            pem.push('\n');
        }
        pem.push(c);
    }
    pem.push_str("\n-----END PRIVATE KEY-----\n");
    pem
}

/// Public key and signature, as Kubernetes 1.35 wants them.
pub(super) struct Proof {
    /// `pkixPublicKey`.
    pub(super) public_key: Vec<u8>,
    /// `proofOfPossession`.
    pub(super) signature: Vec<u8>,
}

/// Signs the UID of a pod with its key.
///
/// # Errors
/// See [`KeyError`].
pub(super) fn prove(key_type: KeyType, key: &PrivateKey, uid: &str) -> Result<Proof, KeyError> {
    let block = Pem::iter_from_buffer(key.pem().as_bytes()).next();
    let block = block.and_then(Result::ok).ok_or(KeyError::Sign)?;
    let der = Zeroizing::new(block.contents);
    let pair = Pair::parse_for_proof(key_type, &der)?;
    let signature = pair.sign(&RSA_PSS_SHA256, uid.as_bytes());
    Ok(Proof {
        public_key: pair.public().map_err(|_| KeyError::Sign)?,
        signature: signature.map_err(|_| KeyError::Sign)?,
    })
}

/// Returns whether the first certificate of a chain is for the key of a request.
pub(super) fn certifies(chain: &str, request: &[u8]) -> bool {
    let first = Pem::iter_from_buffer(chain.as_bytes()).next();
    let Some(Ok(block)) = first else {
        return false;
    };
    let Ok(certificate) = block.parse_x509() else {
        return false;
    };
    let Ok((_, request)) = X509CertificationRequest::from_der(request) else {
        return false;
    };
    certificate.public_key().raw == request.certification_request_info.subject_pki.raw
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::signature::{
        ECDSA_P256_SHA256_ASN1, ECDSA_P384_SHA384_ASN1, ECDSA_P521_SHA256_ASN1,
        ECDSA_P521_SHA512_ASN1, RSA_PKCS1_2048_8192_SHA256, RSA_PSS_2048_8192_SHA256,
        UnparsedPublicKey, VerificationAlgorithm,
    };

    use super::*;

    type Verification = &'static dyn VerificationAlgorithm;

    fn private_der(key: &PrivateKey) -> Vec<u8> {
        let blocks: Vec<_> = Pem::iter_from_buffer(key.pem().as_bytes())
            .map(Result::unwrap)
            .collect();
        assert_eq!(blocks.len(), 1);
        assert_eq!(blocks[0].label, "PRIVATE KEY");
        blocks[0].contents.clone()
    }

    #[test]
    fn a_key_of_each_type_comes_with_an_empty_request_that_it_has_signed() {
        let rsa: Verification = &RSA_PKCS1_2048_8192_SHA256;
        for (name, key_type, verification) in [
            ("RSA3072", KeyType::Rsa3072, rsa),
            ("RSA4096", KeyType::Rsa4096, rsa),
            ("ECDSAP256", KeyType::EcdsaP256, &ECDSA_P256_SHA256_ASN1),
            ("ECDSAP384", KeyType::EcdsaP384, &ECDSA_P384_SHA384_ASN1),
            ("ECDSAP521", KeyType::EcdsaP521, &ECDSA_P521_SHA512_ASN1),
            ("ED25519", KeyType::Ed25519, &aws_lc_rs::signature::ED25519),
        ] {
            assert_eq!(name.parse::<KeyType>().unwrap(), key_type);
            let made = make(key_type).unwrap();
            let (rest, request) = X509CertificationRequest::from_der(&made.request).unwrap();
            assert!(rest.is_empty(), "{name}");
            let info = &request.certification_request_info;
            assert_eq!(info.subject.to_string(), "", "{name}");
            assert_eq!(info.attributes().len(), 0, "{name}");
            // The server checks the signature.
            let key = info.subject_pki.subject_public_key.data.as_ref();
            UnparsedPublicKey::new(verification, key)
                .verify(info.raw, request.signature_value.data.as_ref())
                .unwrap();
            // Version 1 of PKCS#8: a sequence that begins with zero.
            let der = private_der(&made.key);
            let length = if der[1] < 0x80 {
                2
            } else {
                2 + usize::from(der[1] & 0x7f)
            };
            assert_eq!(der[length..length + 3], [0x02, 0x01, 0x00], "{name}");
        }
        let error = "RSA2048".parse::<KeyType>().unwrap_err();
        assert!(error.to_string().contains("ECDSAP521"), "{error}");
    }

    #[test]
    fn a_proof_is_signed_by_the_pods_key() {
        let p256: Verification = &ECDSA_P256_SHA256_ASN1;
        for (key_type, verification) in [
            (KeyType::EcdsaP256, p256),
            (KeyType::EcdsaP521, &ECDSA_P521_SHA256_ASN1),
            (KeyType::Ed25519, &aws_lc_rs::signature::ED25519),
            (KeyType::Rsa3072, &RSA_PSS_2048_8192_SHA256),
        ] {
            let made = make(key_type).unwrap();
            let proof = prove(key_type, &made.key, "uid").unwrap();
            let (_, request) = X509CertificationRequest::from_der(&made.request).unwrap();
            let info = &request.certification_request_info;
            assert_eq!(proof.public_key, info.subject_pki.raw);
            let key = info.subject_pki.subject_public_key.data.as_ref();
            UnparsedPublicKey::new(verification, key)
                .verify(b"uid", &proof.signature)
                .unwrap();
        }
        let made = make(KeyType::EcdsaP384).unwrap();
        let refused = prove(KeyType::EcdsaP384, &made.key, "uid");
        assert!(matches!(refused, Err(KeyError::NoProof)));
    }

    #[test]
    fn a_certificate_is_for_the_key_of_its_request_alone() {
        let pair = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::default();
        let request = params.serialize_request(&pair).unwrap();
        let chain = params.self_signed(&pair).unwrap().pem();
        assert!(certifies(&chain, request.der()));
        let other = make(KeyType::EcdsaP256).unwrap();
        assert!(!certifies(&chain, &other.request));
        assert!(!certifies("", request.der()));
    }

    #[test]
    fn lengths_are_as_short_as_der_wants_them() {
        for (bytes, head) in [
            (0, &[0x30, 0][..]),
            (127, &[0x30, 127]),
            (128, &[0x30, 0x81, 128]),
            (256, &[0x30, 0x82, 1, 0]),
        ] {
            let der = tagged(SEQUENCE, &[&vec![7; bytes]]);
            assert_eq!(&der[..head.len()], head, "{bytes}");
            assert_eq!(der.len(), head.len() + bytes);
        }
    }
}
