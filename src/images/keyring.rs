//! Matches credentials to images: docker configurations and their matching rules; upstream's
//! `credentialprovider.BasicDockerKeyring`. Pure.
//!
//! **Invariant:** passwords are in no `Debug` output and in no error.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use base64::{Engine as _, alphabet};
use k8s_cri::v1;
use k8s_openapi::api::core::v1::Secret;
use serde::Deserialize;
use sha2::{Digest, Sha256};

/// Registry of names that have none.
const DEFAULT_REGISTRY: &str = "docker.io";
/// Key of its credentials, in `docker login`'s words.
const DEFAULT_REGISTRY_KEY: &str = "index.docker.io";

/// User and password for a registry.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// User.
    pub username: String,
    /// Password.
    pub password: String,
    /// Their owner; `None` = they are the node's.
    pub source: Option<CredentialSource>,
}

/// Owner of credentials that are not the node's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CredentialSource {
    /// A pull secret holds them.
    Secret(Arc<SecretSource>),
    /// A program gave them for a token of this service account.
    ServiceAccount(Arc<ServiceAccountSource>),
}

/// A service account. Upstream: `ServiceAccountCoordinates`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceAccountSource {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
}

/// A pull secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretSource {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").finish_non_exhaustive()
    }
}

impl Credentials {
    /// The CRI message.
    pub(super) fn auth_config(&self) -> v1::AuthConfig {
        v1::AuthConfig {
            username: self.username.clone(),
            password: self.password.clone(),
            ..Default::default()
        }
    }
}

/// Tells lists of credentials apart without keeping them, wherever they are from.
pub(super) fn fingerprint(all: &[Credentials]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for one in all {
        for text in [&one.username, &one.password] {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text.as_bytes());
        }
    }
    hash.finalize().into()
}

/// Error in a pull secret. It names the field, never the value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyringError {
    /// It is of another type.
    #[error("its type is {type_:?}; use kubernetes.io/dockerconfigjson or kubernetes.io/dockercfg")]
    Type {
        /// As written.
        type_: String,
    },
    /// It lacks its key.
    #[error("it has no key {key}")]
    NoKey {
        /// The key.
        key: &'static str,
    },
    /// Its content is not what its type says.
    #[error("{key} is not a docker configuration: {what}")]
    Content {
        /// The key.
        key: &'static str,
        /// Description of the error, without the content.
        what: String,
    },
}

/// Logins by registry. Go reads `null` as nothing, and names of fields in any case.
type Logins = BTreeMap<String, Option<Entry>>;

#[derive(Deserialize)]
struct ConfigJson {
    #[serde(default, alias = "Auths", alias = "AUTHS")]
    auths: Option<Logins>,
}

#[derive(Default, Deserialize)]
struct Entry {
    #[serde(default, alias = "Username", alias = "USERNAME")]
    username: Option<String>,
    #[serde(default, alias = "Password", alias = "PASSWORD")]
    password: Option<String>,
    #[serde(default, alias = "Auth", alias = "AUTH")]
    auth: Option<String>,
}

/// Base64 as Go reads it: bits behind the last byte do not count. Line breaks are taken out before.
const LENIENT: GeneralPurposeConfig =
    GeneralPurposeConfig::new().with_decode_allow_trailing_bits(true);
const PADDED: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, LENIENT);
const UNPADDED: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    LENIENT
        .with_encode_padding(false)
        .with_decode_padding_mode(DecodePaddingMode::RequireNone),
);

/// Format of a docker configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// `config.json`: logins below `auths`.
    ConfigJson,
    /// `.dockercfg`: logins alone.
    Cfg,
}

impl Format {
    /// The key of it in a pull secret.
    fn key(self) -> &'static str {
        match self {
            Self::ConfigJson => ".dockerconfigjson",
            Self::Cfg => ".dockercfg",
        }
    }

    fn decode(self, bytes: &[u8]) -> Result<Decoded, KeyringError> {
        let key = self.key();
        let entries = match self {
            Self::ConfigJson => {
                serde_json::from_slice(bytes).map(|c: Option<ConfigJson>| c.and_then(|c| c.auths))
            }
            Self::Cfg => serde_json::from_slice::<Option<Logins>>(bytes),
        };
        // The position is told, the text is not: it is a secret.
        let entries = entries.map_err(|e| KeyringError::Content {
            key,
            what: format!("line {} column {}", e.line(), e.column()),
        })?;
        let entries = entries.unwrap_or_default();
        let mut decoded = Decoded::default();
        for (registry, entry) in entries {
            let login = entry.unwrap_or_default().decode();
            let login = login.map_err(|what| KeyringError::Content {
                key,
                what: format!("entry {registry}: {what}"),
            })?;
            match login {
                Some(credentials) => decoded.logins.push((registry, credentials)),
                None => decoded.left_out.push(registry),
            }
        }
        Ok(decoded)
    }
}

/// Content of a docker configuration.
#[derive(Default)]
struct Decoded {
    /// Logins by registry.
    logins: Vec<(String, Credentials)>,
    /// Registries whose login is not UTF-8: the runtime takes text only.
    left_out: Vec<String>,
}

/// Credentials by registry and path.
#[derive(Clone, Debug, Default)]
pub struct Keyring {
    /// `host[:port][/path]`, globs in the host; the longer path comes first.
    entries: Vec<(String, Credentials)>,
}

impl Keyring {
    /// Returns what these pull secrets hold, and the names of those that cannot be used as they are, with the reason.
    pub(super) fn of(secrets: &[Arc<Secret>]) -> (Self, Vec<(String, String)>) {
        let (mut keyring, mut problems) = (Self::default(), Vec::new());
        for secret in secrets {
            let problem = match keyring.add_secret(secret) {
                Ok(left_out) if left_out.is_empty() => continue,
                Ok(left_out) => format!("the logins of {} are not UTF-8", left_out.join(", ")),
                Err(error) => error.to_string(),
            };
            let name = secret.metadata.name.clone().unwrap_or_default();
            problems.push((name, problem));
        }
        (keyring, problems)
    }

    /// Adds what a pull secret holds. Returns the registries whose login is left out because it is not UTF-8.
    ///
    /// # Errors
    /// See [`KeyringError`]; nothing was added then.
    pub fn add_secret(&mut self, secret: &Secret) -> Result<Vec<String>, KeyringError> {
        let format = match secret.type_.as_deref().unwrap_or_default() {
            "kubernetes.io/dockerconfigjson" => Format::ConfigJson,
            "kubernetes.io/dockercfg" => Format::Cfg,
            other => {
                return Err(KeyringError::Type {
                    type_: other.to_owned(),
                });
            }
        };
        let key = format.key();
        let data = secret.data.as_ref().and_then(|d| d.get(key));
        let data = data.ok_or(KeyringError::NoKey { key })?;
        // An empty one has no logins. A file that is empty is none: the next counts.
        let decoded = if data.0.is_empty() {
            Decoded::default()
        } else {
            format.decode(&data.0)?
        };
        let metadata = &secret.metadata;
        let source = Arc::new(SecretSource {
            namespace: metadata.namespace.clone().unwrap_or_default(),
            name: metadata.name.clone().unwrap_or_default(),
            uid: metadata.uid.clone().unwrap_or_default(),
        });
        for (registry, mut credentials) in decoded.logins {
            credentials.source = Some(CredentialSource::Secret(Arc::clone(&source)));
            self.add(&registry, credentials);
        }
        Ok(decoded.left_out)
    }

    /// Adds what a file of the node holds. Entries without user and password are left out: credential helpers have
    /// those, and they are none of the agent's. Returns the registries whose login is left out because it is not UTF-8.
    ///
    /// # Errors
    /// See [`KeyringError`]; nothing was added then.
    pub(super) fn add_file(
        &mut self,
        bytes: &[u8],
        format: Format,
    ) -> Result<Vec<String>, KeyringError> {
        let decoded = format.decode(bytes)?;
        for (registry, credentials) in decoded.logins {
            if !(credentials.username.is_empty() && credentials.password.is_empty()) {
                self.add(&registry, credentials);
            }
        }
        Ok(decoded.left_out)
    }

    /// Adds credentials of a registry, written like `registry.io`, `https://registry.io/v1/` or
    /// `*.registry.io:5000/path`.
    pub fn add(&mut self, registry: &str, credentials: Credentials) {
        self.entries.push((entry_key(registry), credentials));
        // Stable: of one key, the first added comes first.
        self.entries.sort_by(|a, b| b.0.cmp(&a.0));
    }

    /// Returns whether a text is one of the passwords.
    pub(super) fn has_password(&self, text: &str) -> bool {
        self.entries.iter().any(|(_, one)| one.password == text)
    }

    /// Returns the same credentials as those of a service account.
    #[must_use]
    pub(super) fn of_account(mut self, account: &Arc<ServiceAccountSource>) -> Self {
        for (_, credentials) in &mut self.entries {
            let source = CredentialSource::ServiceAccount(Arc::clone(account));
            credentials.source = Some(source);
        }
        self
    }

    /// Credentials for a repository (without tag), the most specific first; upstream's `Lookup`.
    pub fn lookup(&self, repository: &str) -> Vec<Credentials> {
        let matching: Vec<_> = self
            .entries
            .iter()
            .filter(|(key, _)| url_matches(key, repository))
            .map(|(_, credentials)| credentials.clone())
            .collect();
        if !matching.is_empty() || !is_default_registry(repository) {
            return matching;
        }
        self.entries
            .iter()
            .filter(|(key, _)| key == DEFAULT_REGISTRY_KEY)
            .map(|(_, credentials)| credentials.clone())
            .collect()
    }
}

impl Entry {
    /// The login; `None` if it is not UTF-8.
    ///
    /// # Errors
    /// The reason why it is not a login, without its content.
    fn decode(self) -> Result<Option<Credentials>, &'static str> {
        if let Some(auth) = self.auth.filter(|a| !a.is_empty()) {
            let text = auth.replace(['\r', '\n'], "");
            let bytes = if text.ends_with('=') {
                PADDED.decode(text)
            } else {
                UNPADDED.decode(text)
            }
            .map_err(|_| "auth is not base64")?;
            if !bytes.contains(&b':') {
                return Err("auth is not <user>:<password> in base64");
            }
            let Ok(text) = String::from_utf8(bytes) else {
                return Ok(None);
            };
            let (username, password) = text
                .split_once(':')
                .ok_or("auth is not <user>:<password> in base64")?;
            return Ok(Some(Credentials {
                username: username.to_owned(),
                password: password.trim_matches('\0').to_owned(),
                source: None,
            }));
        }
        Ok(Some(Credentials {
            username: self.username.unwrap_or_default(),
            password: self.password.unwrap_or_default(),
            source: None,
        }))
    }
}

/// Host and path of a registry; a path that is `/v1/…` or `/v2/…` counts without the version.
fn entry_key(registry: &str) -> String {
    let rest = registry
        .strip_prefix("https://")
        .or_else(|| registry.strip_prefix("http://"))
        .unwrap_or(registry);
    let (host, path) = match rest.find('/') {
        Some(at) => rest.split_at(at),
        None => (rest, ""),
    };
    let path = match path {
        p if p.starts_with("/v1/") || p.starts_with("/v2/") => &p[3..],
        p => p,
    };
    if path == "/" {
        host.to_owned()
    } else {
        format!("{host}{path}")
    }
}

/// The repository of an image as upstream names it: with its registry, without tag and digest.
pub(super) fn repository(image: &str) -> String {
    let name = image.split_once('@').map_or(image, |(name, _)| name);
    let slash = name.rfind('/').map_or(0, |at| at + 1);
    let name = match name[slash..].find(':') {
        Some(at) => &name[..slash + at],
        None => name,
    };
    match name.split_once('/') {
        Some((first, rest)) if first == DEFAULT_REGISTRY_KEY => with_library(rest),
        Some((DEFAULT_REGISTRY, rest)) => with_library(rest),
        Some((first, _))
            if first.contains(['.', ':'])
                || first == "localhost"
                || first.bytes().any(|b| b.is_ascii_uppercase()) =>
        {
            name.to_owned()
        }
        _ => with_library(name),
    }
}

fn with_library(path: &str) -> String {
    if path.contains('/') {
        format!("{DEFAULT_REGISTRY}/{path}")
    } else {
        format!("{DEFAULT_REGISTRY}/library/{path}")
    }
}

fn is_default_registry(repository: &str) -> bool {
    repository
        .split_once('/')
        .is_some_and(|(host, _)| host == DEFAULT_REGISTRY)
}

/// Returns whether a pattern covers a repository: host parts match as globs, ports are equal, the path is a prefix;
/// upstream's `URLsMatch`.
pub(super) fn url_matches(pattern: &str, target: &str) -> bool {
    let (pattern_host, pattern_port, pattern_path) = split_url(pattern);
    let (host, port, path) = split_url(target);
    let parts = |host: &str| host.split('.').map(str::to_owned).collect::<Vec<_>>();
    let (globs, parts) = (parts(pattern_host), parts(host));
    pattern_port == port
        && path.starts_with(pattern_path)
        && globs.len() == parts.len()
        && globs
            .iter()
            .zip(&parts)
            .all(|(glob, part)| glob_matches(glob.as_bytes(), part.as_bytes()))
}

/// Host, port and path; `""` where there is none.
fn split_url(url: &str) -> (&str, &str, &str) {
    let (authority, path) = match url.find('/') {
        Some(at) => url.split_at(at),
        None => (url, ""),
    };
    // The colons of an IPv6 address are in brackets.
    match authority.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, port, path),
        _ => (authority, "", path),
    }
}

/// `*` stands for any text, `?` for one character. A pattern comes from a secret: it takes no longer than the
/// product of the lengths, whatever it is.
fn glob_matches(glob: &[u8], text: &[u8]) -> bool {
    let (mut at, mut here) = (0, 0);
    // Behind the last star, and where the text goes on that it does not stand for.
    let mut star = None;
    while here < text.len() {
        match glob.get(at) {
            Some(b'*') => {
                at += 1;
                star = Some((at, here));
            }
            Some(c) if *c == b'?' || *c == text[here] => {
                at += 1;
                here += 1;
            }
            _ => match &mut star {
                Some((behind, from)) => {
                    *from += 1;
                    (at, here) = (*behind, *from);
                }
                None => return false,
            },
        }
    }
    glob[at..].iter().all(|c| *c == b'*')
}

#[cfg(test)]
mod tests {
    use base64::engine::general_purpose::STANDARD;
    use serde_json::json;

    use super::*;

    fn user(name: &str) -> Credentials {
        Credentials {
            username: name.to_owned(),
            password: format!("{name}-password"),
            source: None,
        }
    }

    fn users(keyring: &Keyring, image: &str) -> Vec<String> {
        let found = keyring.lookup(&repository(image));
        found.into_iter().map(|c| c.username).collect()
    }

    #[test]
    fn configurations_are_read_as_go_reads_them() {
        for (content, want) in [
            ("null", 0),
            (r#"{"auths":null}"#, 0),
            (r#"{"auths":{"r.io":null}}"#, 1),
            (r#"{"Auths":{"r.io":{"Auth":"dTpw"}}}"#, 1),
            (r#"{"auths":{"r.io":{"auth":"dT\npw\r\n"}}}"#, 1),
            (r#"{"auths":{"r.io":{"auth":"dTpwcR==\n"}}}"#, 1),
        ] {
            let mut keyring = Keyring::default();
            let decoded = Format::ConfigJson.decode(content.as_bytes());
            for (registry, credentials) in decoded.unwrap().logins {
                keyring.add(&registry, credentials);
            }
            assert_eq!(keyring.lookup("r.io/a").len(), want, "{content}");
        }
    }

    #[test]
    fn repositories_are_named_in_full() {
        for (image, want) in [
            ("busybox", "docker.io/library/busybox"),
            ("busybox:1.36", "docker.io/library/busybox"),
            ("me/app@sha256:00", "docker.io/me/app"),
            ("index.docker.io/me/app", "docker.io/me/app"),
            ("docker.io/app:1", "docker.io/library/app"),
            ("localhost:5000/a/b:v1", "localhost:5000/a/b"),
            ("[::1]:5000/x:1@sha256:00", "[::1]:5000/x"),
            ("gcr.io/p/x", "gcr.io/p/x"),
        ] {
            assert_eq!(repository(image), want, "{image}");
        }
    }

    #[test]
    fn patterns_match_hosts_by_part_ports_and_path_prefixes() {
        for (pattern, image, want) in [
            ("gcr.io", "gcr.io/p/x", true),
            ("gcr.io/p", "gcr.io/p/x", true),
            ("gcr.io/q", "gcr.io/p/x", false),
            ("*.gcr.io", "eu.gcr.io/x", true),
            ("*.gcr.io", "gcr.io/x", false),
            ("*.io", "a.gcr.io/x", false),
            ("*.kubernetes.*", "k8s.kubernetes.io/x", true),
            ("reg?stry.io", "registry.io/x", true),
            ("registry.io:5000", "registry.io/x", false),
            ("registry.io", "registry.io:5000/x", false),
            ("registry.io:5000/a", "registry.io:5000/a/b", true),
            ("[::1]:5000", "[::1]:5000/x", true),
            ("a*b*c.io", "aXbYbc.io/x", true),
            ("a*b*c.io", "aXbYb.io/x", false),
            ("**.io", "a.io/x", true),
            ("a?.io", "a.io/x", false),
            // The time for this must not double with each star.
            (
                "*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*b.io",
                "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa.io/x",
                false,
            ),
        ] {
            assert_eq!(url_matches(pattern, image), want, "{pattern} {image}");
        }
    }

    #[test]
    fn the_longest_entry_comes_first_and_docker_hub_is_the_default() {
        let mut keyring = Keyring::default();
        for registry in [
            "registry.io",
            "https://registry.io/v1/team/",
            "registry.io/team/app",
            "*.other.io",
            "https://index.docker.io/v1/",
        ] {
            keyring.add(registry, user(registry));
        }
        assert_eq!(
            users(&keyring, "registry.io/team/app:1"),
            [
                "registry.io/team/app",
                "https://registry.io/v1/team/",
                "registry.io"
            ]
        );
        assert_eq!(users(&keyring, "registry.io/x"), ["registry.io"]);
        assert_eq!(users(&keyring, "busybox"), ["https://index.docker.io/v1/"]);
        assert_eq!(users(&keyring, "me/app:1"), ["https://index.docker.io/v1/"]);
        assert!(users(&keyring, "nobody.io/x").is_empty());
    }

    fn secret(type_: &str, key: &str, content: &str) -> Secret {
        serde_json::from_value(json!({"type": type_, "data": {key: STANDARD.encode(content)}}))
            .unwrap()
    }

    #[test]
    fn pull_secrets_of_both_types_are_read() {
        let auth = STANDARD.encode("bob:pass:word");
        let entries = json!({
            "a.io": {"auth": auth},
            "b.io": {"username": "ann", "password": "x", "email": "e@x"},
        });
        let json = secret(
            "kubernetes.io/dockerconfigjson",
            ".dockerconfigjson",
            &json!({"auths": entries, "credsStore": "x"}).to_string(),
        );
        let cfg = secret(
            "kubernetes.io/dockercfg",
            ".dockercfg",
            &entries.to_string(),
        );
        for secret in [json, cfg] {
            let mut keyring = Keyring::default();
            keyring.add_secret(&secret).unwrap();
            let bob = keyring.lookup("a.io/x");
            assert_eq!(
                (bob[0].username.as_str(), bob[0].password.as_str()),
                ("bob", "pass:word")
            );
            assert_eq!(users(&keyring, "b.io/x"), ["ann"]);
            assert!(!format!("{keyring:?}").contains("pass:word"));
        }
    }

    #[test]
    fn a_login_that_is_not_utf_8_leaves_the_others_alone() {
        let auths = json!({
            "a.io": {"auth": STANDARD.encode(b"bob:\xff")},
            "b.io": {"auth": STANDARD.encode("ann:x")},
        });
        let file = json!({"auths": auths}).to_string();
        let mut keyring = Keyring::default();
        let left_out = keyring.add_file(file.as_bytes(), Format::ConfigJson);
        assert_eq!(left_out.unwrap(), ["a.io"]);
        let secret = secret("kubernetes.io/dockercfg", ".dockercfg", &auths.to_string());
        assert_eq!(keyring.add_secret(&secret).unwrap(), ["a.io"]);
        assert_eq!(users(&keyring, "b.io/x"), ["ann", "ann"]);
        assert!(users(&keyring, "a.io/x").is_empty());
    }

    #[test]
    fn what_is_wrong_with_a_secret_is_told_without_its_content() {
        let json = "kubernetes.io/dockerconfigjson";
        for (secret, word) in [
            (secret("Opaque", ".dockerconfigjson", "{}"), "Opaque"),
            (secret(json, "other", "hunter2"), "no key .dockerconfigjson"),
            (
                secret(json, ".dockerconfigjson", "{\"auths\": \"hunter2\"}"),
                "line 1",
            ),
            (
                secret(
                    json,
                    ".dockerconfigjson",
                    "{\"auths\": {\"a.io\": {\"auth\": \"hunter2!\"}}}",
                ),
                "entry a.io: auth is not base64",
            ),
        ] {
            let mut keyring = Keyring::default();
            let text = keyring.add_secret(&secret).unwrap_err().to_string();
            assert!(text.contains(word) && !text.contains("hunter2"), "{text}");
        }
    }
}
