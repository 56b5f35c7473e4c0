//! Fuzz targets of images: their names, docker configurations, and the answers of credential providers.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a fuzz target fails by panicking"
)]

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;

use super::credentials::Answer;
use super::keyring::{Credentials, Keyring, repository, url_matches};
use super::normalize;
use super::reference::tag_of;

/// Reads an image name.
///
/// Asserts that a name that was completed is complete, and that its repository has a registry and neither tag nor
/// digest.
pub(crate) fn image_name(data: &[u8]) {
    let Ok(name) = std::str::from_utf8(data) else {
        return;
    };
    let Ok(full) = normalize(name) else {
        return;
    };
    assert!(full.starts_with(name));
    assert_eq!(normalize(&full).unwrap(), full);
    assert!(tag_of(&full).is_some() || full.contains('@'));
    let repository = repository(&full);
    assert!(repository.contains('/') && !repository.contains('@'));
    let (_, path) = repository.split_once('/').unwrap();
    assert!(!path.is_empty() && !path.contains(':'));
}

/// Reads a docker configuration and looks a repository up in it. The first line is the repository, the rest the
/// configuration. A repository that begins with `?` is a pattern, and the rest a repository.
///
/// Asserts that a lookup returns credentials of the configuration alone, and that no error has a password in it.
pub(crate) fn docker_config(data: &[u8]) {
    let Some(end) = memchr::memchr(b'\n', data) else {
        return;
    };
    let Ok(wanted) = std::str::from_utf8(&data[..end]) else {
        return;
    };
    let config = &data[end + 1..];
    if let Some(pattern) = wanted.strip_prefix('?') {
        if let Ok(repository) = std::str::from_utf8(config) {
            url_matches(pattern, repository);
        }
        return;
    }
    for (type_, key) in [
        ("kubernetes.io/dockerconfigjson", ".dockerconfigjson"),
        ("kubernetes.io/dockercfg", ".dockercfg"),
    ] {
        let secret = Secret {
            type_: Some(type_.to_owned()),
            data: Some([(key.to_owned(), ByteString(config.to_vec()))].into()),
            ..Secret::default()
        };
        let mut keyring = Keyring::default();
        match keyring.add_secret(&secret) {
            Ok(_) => check(&keyring, wanted),
            Err(error) => {
                assert!(keyring.lookup(wanted).is_empty());
                let error = error.to_string();
                // A registry is named, whatever it is called.
                assert!(
                    error.contains("entry ") || !error.contains("hunter2"),
                    "{error}"
                );
            }
        }
    }
}

fn check(keyring: &Keyring, repository: &str) {
    for found in keyring.lookup(repository) {
        let Credentials { source, .. } = &found;
        assert!(source.is_some());
        assert!(!format!("{found:?}").contains("hunter2"));
        assert_eq!(found.auth_config().username, found.username);
    }
}

/// Reads the answer of a credential provider, and looks up the repository in its first line.
///
/// Asserts that credentials are printed without the password of the corpus.
pub(crate) fn credential_response(data: &[u8]) {
    let Some(end) = memchr::memchr(b'\n', data) else {
        return;
    };
    let Ok(wanted) = std::str::from_utf8(&data[..end]) else {
        return;
    };
    match Answer::parse(&data[end + 1..], "credentialprovider.kubelet.k8s.io/v1") {
        Ok(answer) => {
            for found in answer.keyring.lookup(wanted) {
                assert!(!format!("{found:?}").contains("hunter2"));
            }
        }
        Err(error) => assert!(!error.is_empty()),
    }
}
