//! Encryption of what must not be readable on disk: secrets, tokens, registry credentials.
//!
//! In: plain bytes and the place they are stored at. Out: bytes for a record, and the way back. A sealed value is
//!
//! ```text
//!  0  version = 1
//!  1  id of the key, 8 bytes
//!  9  nonce, 24 bytes from the kernel's random numbers
//! 33  ciphertext of XChaCha20-Poly1305 and its tag of 16 bytes
//! ```
//! Associated data are the 9 bytes of the head, the name of the table, a zero byte and the key of the record: a value
//! opens only where it was put.
//!
//! **Invariants:** without a usable key file nothing is sealed (so secrets are not recorded) and nothing opens, and the
//! agent runs; a key file that cannot be used is never written over; a key is used only after it is on disk.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chacha20poly1305::aead::{Aead as _, OsRng, Payload};
use chacha20poly1305::{AeadCore as _, KeyInit as _, XChaCha20Poly1305, XNonce};
use zeroize::Zeroizing;

use super::keyring::{CREDENTIAL, Key, KeyFile, KeyFileError, KeyId, Keyring};
use crate::types::Stamp;

const VERSION: u8 = 1;
const HEAD: usize = 9;
const NONCE: usize = 24;
const TAG: usize = 16;

/// Reason why a value cannot be encrypted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// There is no key.
    #[error("encrypt {table} {key}: there is no usable secrets key")]
    NoKey {
        /// Table.
        table: String,
        /// Key of the record.
        key: String,
    },
    /// The cipher refused: the value is too long.
    #[error("encrypt {table} {key}: the value is too long")]
    TooLong {
        /// Table.
        table: String,
        /// Key of the record.
        key: String,
    },
}

/// Reason why a value cannot be decrypted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// Not a sealed value of this version.
    #[error("decrypt {table} {key}: it is not a value this version has encrypted")]
    Malformed {
        /// Table.
        table: String,
        /// Key of the record.
        key: String,
    },
    /// The key is not in the key file.
    #[error("decrypt {table} {key}: key {id} is not in the secrets key file")]
    UnknownKey {
        /// Table.
        table: String,
        /// Key of the record.
        key: String,
        /// The key it needs.
        id: KeyId,
    },
    /// Changed since, or put at another place.
    #[error("decrypt {table} {key}: it was changed or belongs to another record")]
    Tampered {
        /// Table.
        table: String,
        /// Key of the record.
        key: String,
    },
}

/// The key a sealed value needs; `None` when it is not one.
pub fn key_of(sealed: &[u8]) -> Option<KeyId> {
    if sealed.len() < HEAD + NONCE + TAG || sealed[0] != VERSION {
        return None;
    }
    let mut id = [0; 8];
    id.copy_from_slice(&sealed[1..HEAD]);
    Some(KeyId(id))
}

#[derive(Default)]
struct Loaded {
    ring: Option<Arc<Keyring>>,
    /// Version of the file that was read last.
    seen: Option<(u64, i64, i64, u64)>,
    trouble: Option<String>,
}

/// Holds the keys; follows the key file.
pub struct Vault {
    file: Option<KeyFile>,
    loaded: Mutex<Loaded>,
}

impl fmt::Debug for Vault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vault")
            .field("file", &self.file)
            .finish_non_exhaustive()
    }
}

impl Vault {
    /// Reads the key file; makes it when it is absent. Errors are logged and reported by [`Vault::trouble`]: the
    /// agent runs without. Blocks for as long as the disk does.
    pub fn open(file: KeyFile, now: Stamp) -> Self {
        let vault = Self {
            file: Some(file),
            loaded: Mutex::default(),
        };
        vault.load(Some(now));
        vault
    }

    /// Without keys: nothing is recorded that would have to be encrypted.
    pub fn without_keys() -> Self {
        Self {
            file: None,
            loaded: Mutex::default(),
        }
    }

    /// With keys that are in no file.
    pub fn with_keys(ring: Keyring) -> Self {
        let vault = Self::without_keys();
        vault.loaded().ring = Some(Arc::new(ring));
        vault
    }

    /// Looks whether the key file changed, and takes up what it says now. True when there is another set of keys.
    /// A file that cannot be used, or is gone, leaves the keys as they are.
    pub fn reload(&self) -> bool {
        let Some(file) = &self.file else {
            return false;
        };
        let fingerprint = file.fingerprint();
        if fingerprint.is_none() || fingerprint == self.loaded().seen {
            return false;
        }
        self.load(None)
    }

    fn load(&self, create: Option<Stamp>) -> bool {
        let Some(file) = &self.file else {
            return false;
        };
        let fingerprint = file.fingerprint();
        let read = match (file.read(), create) {
            (Err(KeyFileError::Absent { .. }), Some(now)) => {
                let made = file.create(now);
                if let Ok(ring) = &made {
                    tracing::info!(path = %file.path().display(), key = %ring.active().id(), "made a key for secrets on disk");
                }
                made
            }
            (read, _) => read,
        };
        let mut loaded = self.loaded();
        loaded.seen = match create {
            // It may just have been made.
            Some(_) => file.fingerprint(),
            None => fingerprint,
        };
        match read {
            Ok(ring) => {
                let ids = |ring: &Keyring| ring.iter().map(Key::id).collect::<Vec<_>>();
                let changed = loaded.ring.as_deref().map(ids) != Some(ids(&ring));
                if changed && create.is_none() {
                    tracing::info!(path = %file.path().display(), active = %ring.active().id(), "loaded the keys for secrets on disk");
                }
                loaded.ring = Some(Arc::new(ring));
                loaded.trouble = None;
                changed
            }
            Err(error) => {
                let text = full_text(&error);
                if loaded.trouble.as_ref() != Some(&text) {
                    let going_on = match loaded.ring {
                        Some(_) => "the keys read before stay in use",
                        None => "secrets are not recorded, and recorded ones count as absent",
                    };
                    tracing::error!(error = text, going_on, "cannot use the secrets key file");
                }
                loaded.trouble = Some(text);
                false
            }
        }
    }

    /// Returns the error of the key file, if there is one.
    pub fn trouble(&self) -> Option<String> {
        self.loaded().trouble.clone()
    }

    /// Names the place that lacks the missing keys, and the way to add them.
    pub fn place(&self) -> String {
        let Some(file) = &self.file else {
            return "are nowhere".to_owned();
        };
        let path = file.path().display();
        if file.is_credential() {
            return format!(
                "are not in the credential {path}: add them to the file that LoadCredential= of the unit names, and \
                 restart the agent"
            );
        }
        format!(
            "are not in {path}: add them there, or name the file that has them by LoadCredential={CREDENTIAL}:FILE in \
             the unit, or by --secrets-key-file"
        )
    }

    /// The key that encrypts now.
    pub fn active(&self) -> Option<KeyId> {
        self.ring().map(|ring| ring.active().id())
    }

    fn ring(&self) -> Option<Arc<Keyring>> {
        self.loaded().ring.clone()
    }

    fn loaded(&self) -> MutexGuard<'_, Loaded> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Encrypts `plain` for the record `key` of `table`.
    ///
    /// # Errors
    /// See [`SealError`].
    pub fn seal(&self, table: &str, key: &str, plain: &[u8]) -> Result<Vec<u8>, SealError> {
        let Some(ring) = self.ring() else {
            return Err(SealError::NoKey {
                table: table.to_owned(),
                key: key.to_owned(),
            });
        };
        let active = ring.active();
        let nonce = XChaCha20Poly1305::generate_nonce(&mut OsRng);
        let mut sealed = Vec::with_capacity(HEAD + NONCE + plain.len() + TAG);
        sealed.push(VERSION);
        sealed.extend_from_slice(&active.id().0);
        let associated = associated(&sealed, table, key);
        let cipher = XChaCha20Poly1305::new(active.secret().into());
        let payload = Payload {
            msg: plain,
            aad: &associated,
        };
        let ciphertext = cipher
            .encrypt(&nonce, payload)
            .map_err(|_| SealError::TooLong {
                table: table.to_owned(),
                key: key.to_owned(),
            })?;
        sealed.extend_from_slice(&nonce);
        sealed.extend_from_slice(&ciphertext);
        Ok(sealed)
    }

    /// Decrypts what [`Vault::seal`] made for the record `key` of `table`. The result is wiped when it is dropped.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn unseal(
        &self,
        table: &str,
        key: &str,
        sealed: &[u8],
    ) -> Result<Zeroizing<Vec<u8>>, OpenError> {
        let place = || (table.to_owned(), key.to_owned());
        let Some(id) = key_of(sealed) else {
            let (table, key) = place();
            return Err(OpenError::Malformed { table, key });
        };
        let ring = self.ring();
        let Some(secret) = ring.as_deref().and_then(|ring| ring.get(id)) else {
            let (table, key) = place();
            return Err(OpenError::UnknownKey { table, key, id });
        };
        let cipher = XChaCha20Poly1305::new(secret.secret().into());
        let payload = Payload {
            msg: &sealed[HEAD + NONCE..],
            aad: &associated(&sealed[..HEAD], table, key),
        };
        let nonce = XNonce::from_slice(&sealed[HEAD..HEAD + NONCE]);
        match cipher.decrypt(nonce, payload) {
            Ok(plain) => Ok(Zeroizing::new(plain)),
            Err(_) => {
                let (table, key) = place();
                Err(OpenError::Tampered { table, key })
            }
        }
    }
}

fn associated(head: &[u8], table: &str, key: &str) -> Vec<u8> {
    [head, table.as_bytes(), &[0], key.as_bytes()].concat()
}

fn full_text(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
