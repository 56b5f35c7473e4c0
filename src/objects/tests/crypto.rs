//! A sealed value opens only in its place and with its key.

use proptest::prelude::*;

use super::stamp;
use crate::objects::keyring::{Key, Keyring};
use crate::objects::vault::{OpenError, Vault, key_of};

fn vault() -> Vault {
    Vault::with_keys(Keyring::new(Key::generate(stamp())))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_sealed_opens_only_in_its_place(
        plain in proptest::collection::vec(any::<u8>(), 0..600),
        table in "[a-z]{1,8}", key in "[a-z/]{1,20}", other in "[a-z/]{1,20}",
    ) {
        let vault = vault();
        let sealed = vault.seal(&table, &key, &plain).unwrap();
        prop_assert_eq!(&**vault.unseal(&table, &key, &sealed).unwrap(), &plain[..]);
        prop_assert_eq!(key_of(&sealed), vault.active());
        if other != key {
            prop_assert!(matches!(vault.unseal(&table, &other, &sealed), Err(OpenError::Tampered { .. })), "another key");
        }
        let place = format!("{table}x");
        prop_assert!(matches!(vault.unseal(&place, &key, &sealed), Err(OpenError::Tampered { .. })), "another table");
        // The border between table and key is part of the place.
        let moved = format!("{table}{key}");
        prop_assert!(vault.unseal("", &moved, &sealed).is_err());
    }

    #[test]
    fn a_changed_bit_or_a_missing_byte_is_noticed(
        plain in proptest::collection::vec(any::<u8>(), 0..200),
        at in any::<prop::sample::Index>(), bit in 0..8_u8, cut in any::<prop::sample::Index>(),
    ) {
        let vault = vault();
        let sealed = vault.seal("t", "k", &plain).unwrap();
        let mut changed = sealed.clone();
        changed[at.index(sealed.len())] ^= 1 << bit;
        prop_assert!(vault.unseal("t", "k", &changed).is_err());
        prop_assert!(vault.unseal("t", "k", &sealed[..cut.index(sealed.len())]).is_err());
        let longer = [&sealed[..], &[0]].concat();
        prop_assert!(vault.unseal("t", "k", &longer).is_err());
    }

    #[test]
    fn no_bytes_make_opening_panic(bytes in proptest::collection::vec(any::<u8>(), 0..120)) {
        prop_assert!(vault().unseal("t", "k", &bytes).is_err());
    }
}

#[test]
fn another_key_is_named_and_opens_nothing() {
    let (one, two) = (vault(), vault());
    let sealed = one.seal("t", "k", b"x").unwrap();
    let error = two.unseal("t", "k", &sealed).unwrap_err();
    let OpenError::UnknownKey { id, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(Some(*id), one.active());
    // A key that only claims the id.
    let mut claimed = sealed;
    claimed[1..9].copy_from_slice(&two.active().unwrap().0);
    let error = two.unseal("t", "k", &claimed).unwrap_err();
    assert!(matches!(error, OpenError::Tampered { .. }), "{error}");
}

#[test]
fn an_older_or_newer_layout_is_refused() {
    let vault = vault();
    let sealed = vault.seal("t", "k", b"x").unwrap();
    for version in [0, 2, 255] {
        let mut other = sealed.clone();
        other[0] = version;
        let error = vault.unseal("t", "k", &other).unwrap_err();
        assert!(matches!(error, OpenError::Malformed { .. }), "{error}");
    }
}

#[test]
fn nonces_differ_and_nothing_shows_the_plain_text() {
    let vault = vault();
    let plain = b"correct horse battery staple";
    let one = vault.seal("t", "k", plain).unwrap();
    let two = vault.seal("t", "k", plain).unwrap();
    assert_ne!(one[9..33], two[9..33]);
    assert_ne!(one, two);
    assert!(!one.windows(8).any(|w| plain.windows(8).any(|p| p == w)));
}

#[test]
fn without_keys_nothing_is_sealed() {
    let vault = Vault::without_keys();
    assert!(vault.seal("t", "k", b"x").is_err());
    assert_eq!(vault.active(), None);
}
