//! The settings of the kubelet's API: its address, its certificate, its authentication and authorization.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use super::decode::Settings;
use super::problem::Warning;

/// The oldest version of TLS that is spoken. What is older than 1.2 is not spoken at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsVersion {
    /// `VersionTLS10`: as 1.2, with a warning.
    Tls10,
    /// `VersionTLS11`: as 1.2, with a warning.
    Tls11,
    /// `VersionTLS12`.
    #[default]
    Tls12,
    /// `VersionTLS13`.
    Tls13,
}

impl fmt::Display for TlsVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tls10 => "VersionTLS10",
            Self::Tls11 => "VersionTLS11",
            Self::Tls12 => "VersionTLS12",
            Self::Tls13 => "VersionTLS13",
        })
    }
}

impl FromStr for TlsVersion {
    type Err = String;

    /// An empty text is the default.
    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Ok(Self::default());
        }
        [Self::Tls10, Self::Tls11, Self::Tls12, Self::Tls13]
            .into_iter()
            .find(|version| version.to_string() == text)
            .ok_or_else(|| {
                format!("{text:?} is neither \"VersionTLS12\" nor \"VersionTLS13\", nor one of the older versions")
            })
    }
}

/// Go's names of the cipher suites of TLS 1.2 that can be chosen.
pub const CIPHER_SUITES: [&str; 6] = [
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
];

/// Those of TLS 1.3, which are always on.
const CIPHER_SUITES_13: [&str; 3] = [
    "TLS_AES_128_GCM_SHA256",
    "TLS_AES_256_GCM_SHA384",
    "TLS_CHACHA20_POLY1305_SHA256",
];

/// Those that Go has too, and that have no forward secrecy or are of an old mode.
const WEAK_CIPHER_SUITES: [&str; 16] = [
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_RC4_128_SHA",
    "TLS_ECDHE_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_RC4_128_SHA",
    "TLS_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA256",
    "TLS_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_RSA_WITH_AES_256_CBC_SHA",
    "TLS_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_RSA_WITH_RC4_128_SHA",
];

/// The groups that keys can be exchanged in, by their numbers in TLS, which Go calls curves.
pub const CURVES: [i32; 3] = [23, 24, 29];

/// Those that Go has too: P-521, and the ones that quantum computers do not break.
const OTHER_CURVES: [i32; 4] = [25, 4587, 4588, 4589];

/// The `authentication` section. With none of the three nobody is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authentication {
    /// `x509.clientCAFile`: certificates of clients are signed by one of these.
    pub client_ca_file: Option<PathBuf>,
    /// `webhook.enabled`: the API server is asked about tokens.
    pub webhook: bool,
    /// `webhook.cacheTTL`: how long its answer counts.
    pub webhook_cache_ttl: Duration,
    /// `anonymous.enabled`: requests that show nothing are `system:anonymous`.
    pub anonymous: bool,
}

impl Default for Authentication {
    fn default() -> Self {
        Self {
            client_ca_file: None,
            webhook: true,
            webhook_cache_ttl: Duration::from_secs(120),
            anonymous: false,
        }
    }
}

/// Mode of authorization: the authority that decides what a user may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AuthorizationMode {
    /// Everything is allowed to whoever is known.
    AlwaysAllow,
    /// The API server.
    #[default]
    Webhook,
}

impl fmt::Display for AuthorizationMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AlwaysAllow => "AlwaysAllow",
            Self::Webhook => "Webhook",
        })
    }
}

impl FromStr for AuthorizationMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "AlwaysAllow" => Ok(Self::AlwaysAllow),
            "Webhook" => Ok(Self::Webhook),
            other => Err(format!(
                "{other:?} is neither \"AlwaysAllow\" nor \"Webhook\""
            )),
        }
    }
}

/// The `authorization` section.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authorization {
    /// `mode`.
    pub mode: AuthorizationMode,
    /// `webhook.cacheAuthorizedTTL`: how long a yes counts.
    pub cache_authorized_ttl: Duration,
    /// `webhook.cacheUnauthorizedTTL`: how long a no counts.
    pub cache_unauthorized_ttl: Duration,
}

impl Default for Authorization {
    fn default() -> Self {
        Self {
            mode: AuthorizationMode::default(),
            cache_authorized_ttl: Duration::from_secs(300),
            cache_unauthorized_ttl: Duration::from_secs(30),
        }
    }
}

/// Checks the merged settings.
pub(super) fn validate(settings: &mut Settings) {
    let k = settings.config.clone();
    if k.read_only_port != 0 && k.read_only_port == k.port {
        let message = format!("is {0}, and so is port; choose another", k.read_only_port);
        settings.reject("readOnlyPort", message);
    }
    match (&k.tls_cert_file, &k.tls_private_key_file) {
        (Some(_), None) => settings.reject("tlsCertFile", "needs tlsPrivateKeyFile too"),
        (None, Some(_)) => settings.reject("tlsPrivateKeyFile", "needs tlsCertFile too"),
        (Some(_), Some(_)) if k.server_tls_bootstrap => warn(
            settings,
            "tlsCertFile",
            "has no effect while serverTLSBootstrap is true: the API server is asked for the certificate".to_owned(),
        ),
        _ => {}
    }
    if matches!(k.tls_min_version, TlsVersion::Tls10 | TlsVersion::Tls11) {
        let message = format!(
            "is {}, but TLS below 1.2 is not spoken: as VersionTLS12",
            k.tls_min_version
        );
        warn(settings, "tlsMinVersion", message);
    }
    cipher_suites(settings);
    curves(settings);
    if k.enable_system_log_query && !k.enable_system_log_handler {
        settings.reject(
            "enableSystemLogQuery",
            "is true, but enableSystemLogHandler is false; set that to true",
        );
    }
}

/// Leaves those that can be used.
fn cipher_suites(settings: &mut Settings) {
    let field = "tlsCipherSuites";
    let given = std::mem::take(&mut settings.config.tls_cipher_suites);
    let mut usable = Vec::new();
    let mut unknown = false;
    for name in &given {
        // Go had these two names first.
        let name = match name.as_str() {
            "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305" => CIPHER_SUITES[5],
            "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305" => CIPHER_SUITES[2],
            name => name,
        };
        if CIPHER_SUITES.contains(&name) {
            usable.push(name.to_owned());
        } else if WEAK_CIPHER_SUITES.contains(&name) {
            warn(
                settings,
                field,
                format!("{name:?} is weak, is not supported and has no effect"),
            );
        } else if !CIPHER_SUITES_13.contains(&name) {
            unknown = true;
            let message = format!(
                "{name:?} is not a cipher suite; possible are {}",
                CIPHER_SUITES.join(", ")
            );
            settings.reject(field, message);
        }
    }
    let only_13 = settings.config.tls_min_version == TlsVersion::Tls13
        || given
            .iter()
            .any(|name| CIPHER_SUITES_13.contains(&name.as_str()));
    if usable.is_empty() && !given.is_empty() && !unknown && !only_13 {
        settings.reject(
            field,
            "has none that can be used; add one of TLS 1.2, or set tlsMinVersion to VersionTLS13",
        );
    }
    if only_13 && usable.is_empty() && !given.is_empty() {
        // Nothing of TLS 1.2 was named, so that it cannot be spoken.
        settings.config.tls_min_version = TlsVersion::Tls13;
    }
    settings.config.tls_cipher_suites = usable;
}

/// Leaves those that can be used. As upstream, the list says which, not which first.
fn curves(settings: &mut Settings) {
    let field = "tlsCurvePreferences";
    let given = std::mem::take(&mut settings.config.tls_curve_preferences);
    let mut usable = Vec::new();
    let mut unknown = false;
    for curve in &given {
        if CURVES.contains(curve) {
            usable.push(*curve);
        } else if OTHER_CURVES.contains(curve) {
            warn(
                settings,
                field,
                format!("{curve} is not supported and has no effect"),
            );
        } else {
            unknown = true;
            let message = format!(
                "{curve} is not the number of a group for key exchange; possible are 23 (P-256), 24 (P-384) and 29 (X25519)"
            );
            settings.reject(field, message);
        }
    }
    if usable.is_empty() && !given.is_empty() && !unknown {
        settings.reject(
            field,
            "has none that can be used; add 23 (P-256), 24 (P-384) or 29 (X25519)",
        );
    }
    settings.config.tls_curve_preferences = usable;
}

fn warn(settings: &mut Settings, field: &'static str, message: String) {
    settings.warnings.push(Warning {
        origin: settings.origin(field),
        field: field.to_owned(),
        message,
    });
}
