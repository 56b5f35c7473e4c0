//! Fuzz target of the file with the keys for secrets, and of what was encrypted with them.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a fuzz target fails by panicking"
)]

use super::keyring::Keyring;
use super::vault::{Vault, key_of};

/// The first line of every key file here, so that there is a key.
const KEY: &str = "- AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8= 2026-01-02T03:04:05Z\n";

/// Reads a key file, and opens the same bytes as an encrypted value.
///
/// Asserts that keys have different numbers, that a value that was sealed opens at its place alone, and that nothing
/// else opens.
pub(crate) fn keyring(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data) {
        match Keyring::parse(text) {
            Ok(ring) => {
                let mut ids: Vec<_> = ring.iter().map(|key| key.id()).collect();
                assert_eq!(ids[0], ring.active().id());
                assert!(ids.iter().all(|id| ring.get(*id).is_some()));
                ids.sort();
                ids.dedup();
                assert_eq!(ids.len(), ring.iter().count());
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
    let vault = Vault::with_keys(Keyring::parse(KEY).unwrap());
    // Nobody guesses a tag of sixteen bytes.
    assert!(vault.unseal("objects", "secret/a/b", data).is_err());
    let mut sealed = vault.seal("objects", "secret/a/b", data).unwrap();
    assert!(key_of(&sealed).is_some());
    assert_eq!(
        vault
            .unseal("objects", "secret/a/b", &sealed)
            .unwrap()
            .as_slice(),
        data
    );
    assert!(vault.unseal("objects", "secret/a/c", &sealed).is_err());
    let place = data.len() % sealed.len();
    sealed[place] ^= 1;
    assert!(vault.unseal("objects", "secret/a/b", &sealed).is_err());
}
