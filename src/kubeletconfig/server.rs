//! The settings of the kubelet's API: where it listens, its certificate, who is let in.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use super::decode::{Reader, Settings, parse_ip};
use super::duration::{format_duration, parse_duration};
use super::flags::parse_bool;
use super::problem::{Origin, Warning};
use super::types::KubeletConfiguration;
use super::yaml::{Entry, Node, Value};

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

    fn from_str(text: &str) -> Result<Self, String> {
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

/// Who decides what a user may do.
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

/// Flags of the kubelet's API.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ServerFlags {
    /// Serve the kubelet's API [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub enable_server: Option<bool>,

    /// Address of the kubelet's API; 0.0.0.0 or :: for all [default: 0.0.0.0]
    #[arg(long, value_name = "IP", value_parser = parse_ip)]
    pub address: Option<IpAddr>,

    /// Port of pods, statistics and metrics for everybody, without TLS; 0 for none [default: 0]
    #[arg(long, value_name = "PORT")]
    pub read_only_port: Option<u16>,

    /// Serving certificate, with those up to the CA; without one, one is made [default: kubelet.crt in --cert-dir]
    #[arg(long, value_name = "FILE")]
    pub tls_cert_file: Option<PathBuf>,

    /// Key of --tls-cert-file
    #[arg(long, value_name = "FILE")]
    pub tls_private_key_file: Option<PathBuf>,

    /// Oldest version of TLS: VersionTLS12 or VersionTLS13 [default: VersionTLS12]
    #[arg(long, value_name = "VERSION", value_parser = str::parse::<TlsVersion>)]
    pub tls_min_version: Option<TlsVersion>,

    /// Cipher suites of TLS 1.2, by Go's names, separated by commas; may be repeated [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', action = clap::ArgAction::Append)]
    pub tls_cipher_suites: Vec<String>,

    /// Groups that keys may be exchanged in, by their numbers in TLS: 23 (P-256), 24 (P-384), 29 (X25519), separated by commas; may be repeated [default: all]
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', action = clap::ArgAction::Append)]
    pub tls_curve_preferences: Vec<i32>,

    /// Ask the API server for the serving certificate and renew it [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub rotate_server_certificates: Option<bool>,

    /// Certificates of the CAs that sign those of the API's clients
    #[arg(long, value_name = "FILE")]
    pub client_ca_file: Option<PathBuf>,

    /// Let requests that show nothing through as system:anonymous, for authorization to decide [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub anonymous_auth: Option<bool>,

    /// Ask the API server about bearer tokens [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub authentication_token_webhook: Option<bool>,

    /// How long its answer about a token counts [default: 2m]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub authentication_token_webhook_cache_ttl: Option<Duration>,

    /// Who decides what a user of the API may do: AlwaysAllow or Webhook [default: Webhook]
    #[arg(long, value_name = "MODE", value_parser = str::parse::<AuthorizationMode>)]
    pub authorization_mode: Option<AuthorizationMode>,

    /// How long a yes of the API server counts [default: 5m]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub authorization_webhook_cache_authorized_ttl: Option<Duration>,

    /// How long a no of the API server counts [default: 30s]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub authorization_webhook_cache_unauthorized_ttl: Option<Duration>,

    /// How long a stream (exec, attach, port-forward) may be silent; 0 for no limit [default: 4h]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub streaming_connection_idle_timeout: Option<Duration>,

    /// Serve logs, exec, attach, port-forward, run and the like [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub enable_debugging_handlers: Option<bool>,

    /// Demand the verb create of nodes/proxy for exec, attach and port-forward, also of WebSocket clients, whose requests are GET [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub streaming_requires_create: Option<bool>,
}

/// The fields of the two sections, by their dotted names.
const NESTED: [&str; 7] = [
    "authentication.x509.clientCAFile",
    "authentication.webhook.enabled",
    "authentication.webhook.cacheTTL",
    "authentication.anonymous.enabled",
    "authorization.mode",
    "authorization.webhook.cacheAuthorizedTTL",
    "authorization.webhook.cacheUnauthorizedTTL",
];

/// Those that `section` sets. A `null` above a field is one of the field.
pub(super) fn nested(section: &Entry) -> Vec<(&'static str, &Node)> {
    let set = |path: &'static str| {
        let mut names = path.split('.');
        let mut node = (names.next() == Some(section.key.as_str())).then_some(&section.node)?;
        for name in names {
            node = match &node.value {
                Value::Null => node,
                Value::Map(entries) => &entries.iter().find(|entry| entry.key == name)?.node,
                // Its type was told about.
                _ => return None,
            };
        }
        Some((path, node))
    };
    NESTED.into_iter().filter_map(set).collect()
}

/// Takes one field over from a file. False when the field is none of these.
pub(super) fn take(
    r: &mut Reader<'_>,
    c: &mut KubeletConfiguration,
    d: &KubeletConfiguration,
    path: &str,
) -> bool {
    let flag = |r: &Reader<'_>, default| r.bool().unwrap_or(default);
    match path {
        "enableServer" => c.enable_server = flag(r, d.enable_server),
        "address" => c.address = r.parsed(parse_ip).unwrap_or(d.address),
        "readOnlyPort" => {
            c.read_only_port = r
                .int("a port from 1 to 65535, or 0 for none")
                .unwrap_or(d.read_only_port);
        }
        "tlsCertFile" => c.tls_cert_file = r.path(),
        "tlsPrivateKeyFile" => c.tls_private_key_file = r.path(),
        "tlsMinVersion" => {
            c.tls_min_version = r.parsed(str::parse).unwrap_or(d.tls_min_version);
        }
        "tlsCipherSuites" => {
            let names = r.strings().unwrap_or_default().into_iter();
            c.tls_cipher_suites = names.map(|(_, name)| name.to_owned()).collect();
        }
        "tlsCurvePreferences" => c.tls_curve_preferences = r.ints().unwrap_or_default(),
        "serverTLSBootstrap" => c.server_tls_bootstrap = flag(r, d.server_tls_bootstrap),
        "authentication.x509.clientCAFile" => c.authentication.client_ca_file = r.path(),
        "authentication.webhook.enabled" => {
            c.authentication.webhook = flag(r, d.authentication.webhook);
        }
        "authentication.webhook.cacheTTL" => {
            c.authentication.webhook_cache_ttl =
                r.period().unwrap_or(d.authentication.webhook_cache_ttl);
        }
        "authentication.anonymous.enabled" => {
            c.authentication.anonymous = flag(r, d.authentication.anonymous);
        }
        "authorization.mode" => {
            c.authorization.mode = r.parsed(str::parse).unwrap_or(d.authorization.mode);
        }
        "authorization.webhook.cacheAuthorizedTTL" => {
            c.authorization.cache_authorized_ttl =
                r.period().unwrap_or(d.authorization.cache_authorized_ttl);
        }
        "authorization.webhook.cacheUnauthorizedTTL" => {
            c.authorization.cache_unauthorized_ttl =
                r.period().unwrap_or(d.authorization.cache_unauthorized_ttl);
        }
        "streamingConnectionIdleTimeout" => {
            c.streaming_connection_idle_timeout =
                r.period().unwrap_or(d.streaming_connection_idle_timeout);
        }
        "enableDebuggingHandlers" => {
            c.enable_debugging_handlers = flag(r, d.enable_debugging_handlers);
        }
        "enableProfilingHandler" => {
            c.enable_profiling_handler = flag(r, d.enable_profiling_handler);
        }
        "enableDebugFlagsHandler" => {
            c.enable_debug_flags_handler = flag(r, d.enable_debug_flags_handler);
        }
        "enableSystemLogHandler" => {
            c.enable_system_log_handler = flag(r, d.enable_system_log_handler);
        }
        "enableSystemLogQuery" => {
            c.enable_system_log_query = flag(r, d.enable_system_log_query);
        }
        _ => return false,
    }
    true
}

/// Lays the flags that were given over the settings.
pub(super) fn apply_flags(settings: &mut Settings, flags: &ServerFlags) {
    macro_rules! over {
        ($flag:literal, $field:literal, $value:expr => $($target:ident).+) => {
            if let Some(value) = $value {
                settings.config.$($target).+ = value;
                settings
                    .origins
                    .insert($field, Origin::Flag($flag.to_owned()));
            }
        };
    }
    let f = flags.clone();
    let some_path = |path: PathBuf| (!path.as_os_str().is_empty()).then_some(path);
    let suites = (!f.tls_cipher_suites.is_empty()).then(|| {
        let names = f.tls_cipher_suites.iter();
        names.filter(|name| !name.is_empty()).cloned().collect()
    });
    let curves = (!f.tls_curve_preferences.is_empty()).then(|| f.tls_curve_preferences.clone());
    over!("--enable-server", "enableServer", f.enable_server => enable_server);
    over!("--address", "address", f.address => address);
    over!("--read-only-port", "readOnlyPort", f.read_only_port => read_only_port);
    over!("--tls-cert-file", "tlsCertFile", f.tls_cert_file.map(some_path) => tls_cert_file);
    over!("--tls-private-key-file", "tlsPrivateKeyFile", f.tls_private_key_file.map(some_path) => tls_private_key_file);
    over!("--tls-min-version", "tlsMinVersion", f.tls_min_version => tls_min_version);
    over!("--tls-cipher-suites", "tlsCipherSuites", suites => tls_cipher_suites);
    over!("--tls-curve-preferences", "tlsCurvePreferences", curves => tls_curve_preferences);
    over!("--rotate-server-certificates", "serverTLSBootstrap", f.rotate_server_certificates => server_tls_bootstrap);
    over!("--client-ca-file", "authentication.x509.clientCAFile", f.client_ca_file.map(some_path) => authentication.client_ca_file);
    over!("--anonymous-auth", "authentication.anonymous.enabled", f.anonymous_auth => authentication.anonymous);
    over!("--authentication-token-webhook", "authentication.webhook.enabled", f.authentication_token_webhook => authentication.webhook);
    over!("--authentication-token-webhook-cache-ttl", "authentication.webhook.cacheTTL", f.authentication_token_webhook_cache_ttl => authentication.webhook_cache_ttl);
    over!("--authorization-mode", "authorization.mode", f.authorization_mode => authorization.mode);
    over!("--authorization-webhook-cache-authorized-ttl", "authorization.webhook.cacheAuthorizedTTL", f.authorization_webhook_cache_authorized_ttl => authorization.cache_authorized_ttl);
    over!("--authorization-webhook-cache-unauthorized-ttl", "authorization.webhook.cacheUnauthorizedTTL", f.authorization_webhook_cache_unauthorized_ttl => authorization.cache_unauthorized_ttl);
    over!("--streaming-connection-idle-timeout", "streamingConnectionIdleTimeout", f.streaming_connection_idle_timeout => streaming_connection_idle_timeout);
    over!("--enable-debugging-handlers", "enableDebuggingHandlers", f.enable_debugging_handlers => enable_debugging_handlers);
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
    ttls(settings);
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

fn ttls(settings: &mut Settings) {
    let k = &settings.config;
    let day = Duration::from_secs(86_400);
    let given = [
        (
            "authentication.webhook.cacheTTL",
            k.authentication.webhook_cache_ttl,
        ),
        (
            "authorization.webhook.cacheAuthorizedTTL",
            k.authorization.cache_authorized_ttl,
        ),
        (
            "authorization.webhook.cacheUnauthorizedTTL",
            k.authorization.cache_unauthorized_ttl,
        ),
    ];
    for (field, ttl) in given {
        if ttl > day {
            let message = format!(
                "is {}, allowed is at most {}",
                format_duration(ttl),
                format_duration(day)
            );
            settings.reject(field, message);
        }
    }
}

fn warn(settings: &mut Settings, field: &'static str, message: String) {
    settings.warnings.push(Warning {
        origin: settings.origin(field),
        field: field.to_owned(),
        message,
    });
}
