//! The kubeconfig: reads and checks it; errors name the remedy.

use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use base64::Engine as _;
use hyper::http::{HeaderValue, Uri};
use kube::config::{AuthInfo, Cluster, Kubeconfig, KubeconfigError};
use secrecy::ExposeSecret as _;

use super::ApiError;
use super::plugin::{Given, Plugin};
use super::proxy::{self, Proxy};
use super::tls;
use crate::core::credentials::Validity;

mod document;

/// Resolved content of a kubeconfig. Its debug output has no secrets.
#[derive(Clone)]
pub(super) struct Loaded {
    /// Without what is beside it: proxy, plugin, and the token of a file.
    pub(super) config: kube::Config,
    pub(super) proxy: Option<Proxy>,
    pub(super) plugin: Option<Plugin>,
    /// The token of a file or of the plugin.
    pub(super) bearer: Option<HeaderValue>,
    /// The cluster as it is written, with absolute paths.
    pub(super) cluster: Cluster,
    /// The names in it, for messages.
    pub(super) names: String,
    /// The client certificate's life, when there is one.
    pub(super) life: Option<Life>,
    /// Files that change when the credentials change.
    pub(super) files: Vec<PathBuf>,
    /// Index of the file with the token.
    pub(super) token_file: Option<usize>,
    /// Fingerprints of the files from before they were read; empty if they changed with every read.
    pub(super) seen: Seen,
}

impl std::fmt::Debug for Loaded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loaded")
            .field("names", &self.names)
            .field("proxy", &self.proxy)
            .field("plugin", &self.plugin)
            .field("life", &self.life)
            .field("files", &self.files)
            .finish_non_exhaustive()
    }
}

impl Loaded {
    /// With what the plugin has given.
    pub(super) fn with(&self, given: Given) -> Self {
        let mut loaded = self.clone();
        loaded.bearer = given.bearer;
        if let Some(identity) = given.identity {
            let base64 = |pem: &str| base64::engine::general_purpose::STANDARD.encode(pem);
            let auth = &mut loaded.config.auth_info;
            auth.client_certificate_data = Some(base64(&identity.certificate));
            auth.client_key_data = Some(base64(&identity.key).into());
            auth.client_certificate = None;
            auth.client_key = None;
            loaded.life = Some(identity.life);
        }
        loaded
    }
}

/// The header of a token; `None` when it has characters that no header may have.
pub(super) fn bearer(token: &str) -> Option<HeaderValue> {
    let mut header = HeaderValue::from_str(&format!("Bearer {token}")).ok()?;
    // Not printed.
    header.set_sensitive(true);
    Some(header)
}

/// Validity of a certificate, in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Life {
    pub(super) from: i64,
    pub(super) until: i64,
}

impl Life {
    /// Returns the validity of the first certificate in `pem`.
    pub(super) fn of_pem(pem: &[u8]) -> Option<Self> {
        let first = x509_parser::pem::Pem::iter_from_buffer(pem)
            .filter_map(Result::ok)
            .find(|block| block.label == "CERTIFICATE")?;
        let certificate = first.parse_x509().ok()?;
        let validity = certificate.validity();
        Some(Self {
            from: validity.not_before.timestamp(),
            until: validity.not_after.timestamp(),
        })
    }

    pub(super) fn expired(self, now: i64) -> bool {
        now >= self.until
    }

    /// Describes why the certificate is not valid at `now`; `None` if it is.
    pub(super) fn complaint(self, now: i64) -> Option<String> {
        if self.expired(now) {
            Some(format!(
                "expired at {}; it is now {}: renew it, or give --bootstrap-kubeconfig",
                date(self.until),
                date(now)
            ))
        } else if now < self.from {
            Some(format!(
                "is not valid before {}; it is now {}: is this machine's clock wrong?",
                date(self.from),
                date(now)
            ))
        } else {
            None
        }
    }
}

impl From<Life> for Validity {
    fn from(life: Life) -> Self {
        Self {
            from: life.from,
            until: life.until,
        }
    }
}

/// A moment for people.
pub(super) fn date(seconds: i64) -> String {
    match jiff::Timestamp::from_second(seconds) {
        Ok(at) => at.to_string(),
        Err(_) => format!("@{seconds}"),
    }
}

/// Reads `path`. Blocking. With `newer`, the certificate in that file is taken instead of the kubeconfig's when it
/// is good for longer.
///
/// # Errors
/// When it cannot be used, whatever the server says.
pub(super) fn load(path: &Path, newer: Option<&Path>) -> Result<Loaded, ApiError> {
    let mut loaded = read(path, newer)?;
    for _ in 0..3 {
        // Which files there are is known when they are read, what they looked like has to be of before: what is written
        // between the two is another state, to be read at the next look.
        let seen = fingerprint(&loaded.files);
        let files = std::mem::replace(&mut loaded, read(path, newer)?).files;
        if files == loaded.files {
            loaded.seen = seen;
            break;
        }
    }
    Ok(loaded)
}

fn read(path: &Path, newer: Option<&Path>) -> Result<Loaded, ApiError> {
    resolve(path, document::read(path)?, newer)
}

/// As [`load`], of the content `text` of the file at `path`.
pub(super) fn of_text(path: &Path, text: &str) -> Result<Loaded, ApiError> {
    resolve(path, document::parse(path, text)?, None)
}

/// Returns the server of the kubeconfig at `path`, as it is written there. Blocking.
pub(super) fn server_of(path: &Path) -> Option<String> {
    let file = document::read(path).ok()?;
    let current = file.current_context?;
    let context = file.contexts.iter().find(|one| one.name == current)?;
    let name = &context.context.as_ref()?.cluster;
    let cluster = file.clusters.into_iter().find(|one| &one.name == name)?;
    cluster.cluster?.server
}

/// Resolves the kubeconfig `file`, which was read from `path`. Reads the files that it names.
pub(super) fn resolve(
    path: &Path,
    file: Kubeconfig,
    newer: Option<&Path>,
) -> Result<Loaded, ApiError> {
    let context = match file.current_context.clone().filter(|name| !name.is_empty()) {
        Some(context) => context,
        None => {
            return Err(ApiError::NoContext {
                path: path.to_owned(),
                known: names(file.contexts.iter().map(|context| &context.name)),
            });
        }
    };
    let missing = |what: &'static str, name: &str, known: String| ApiError::Missing {
        path: path.to_owned(),
        what,
        name: name.to_owned(),
        known,
    };
    let Some(chosen) = file
        .contexts
        .iter()
        .find(|one| one.name == context)
        .and_then(|one| one.context.clone())
    else {
        let known = names(file.contexts.iter().map(|one| &one.name));
        return Err(missing("context", &context, known));
    };
    let Some(mut cluster) = file
        .clusters
        .iter()
        .find(|one| one.name == chosen.cluster)
        .and_then(|one| one.cluster.clone())
    else {
        let known = names(file.clusters.iter().map(|one| &one.name));
        return Err(missing("cluster", &chosen.cluster, known));
    };
    let user = chosen.user.clone().unwrap_or_default();
    let names = format!(
        "{} (context {context:?}, cluster {:?}, user {user:?})",
        path.display(),
        chosen.cluster
    );
    let unusable = |problem: String| ApiError::Unusable {
        names: names.clone(),
        problem,
    };
    // An odd byte is no reason to go past the proxy.
    let env = |name: &str| Some(std::env::var_os(name)?.to_string_lossy().into_owned());
    let mut files = vec![path.to_owned()];
    cluster
        .certificate_authority
        .take_if(|path| path.is_empty());
    files.extend(cluster.certificate_authority.as_ref().map(PathBuf::from));
    let found = file.auth_infos.into_iter().find(|one| one.name == user);
    let mut auth = match found {
        Some(found) => found.auth_info.unwrap_or_default(),
        None if user.is_empty() => AuthInfo::default(),
        None => return Err(unusable(format!("it has no user {user:?}"))),
    };
    join_lines(&mut cluster, &mut auth);
    let server = server(&cluster, &auth).map_err(unusable)?;
    let proxy = proxy::choose(cluster.proxy_url.as_deref(), &server, env).map_err(unusable)?;
    let user = User::of(&mut auth, newer, &cluster, &mut files).map_err(unusable)?;
    // Made by hand: the client's own reading of the environment takes exceptions for the proxy's name, not the server's.
    let mut config = kube::Config::new(server);
    config.default_namespace = chosen.namespace.unwrap_or_else(|| "default".to_owned());
    config.root_cert = authority(&cluster).map_err(unusable)?;
    config.accept_invalid_certs = cluster.insecure_skip_tls_verify == Some(true);
    config.tls_server_name = cluster
        .tls_server_name
        .clone()
        .filter(|name| !name.is_empty());
    config.auth_info = auth;
    // Retries are the callers': they know what may be done twice.
    config.default_retry = false;
    Ok(Loaded {
        config,
        proxy,
        plugin: user.plugin,
        bearer: user.bearer,
        cluster,
        names,
        life: user.life,
        files,
        token_file: user.token_file,
        seen: Seen::new(),
    })
}

/// The address of the server. Without a scheme it is that of TLS when there is anything to do TLS with; upstream's
/// `DefaultServerURL`.
///
/// # Errors
/// When it is no address.
fn server(cluster: &Cluster, auth: &AuthInfo) -> Result<Uri, String> {
    let written = cluster.server.as_deref().unwrap_or_default();
    let given = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    let is_tls = cluster.insecure_skip_tls_verify == Some(true)
        || given(&cluster.certificate_authority)
        || given(&cluster.certificate_authority_data)
        || given(&auth.client_certificate)
        || given(&auth.client_certificate_data);
    let whole = match (written.contains("://") || written.is_empty(), is_tls) {
        (true, _) => written.to_owned(),
        (false, true) => format!("https://{written}"),
        (false, false) => format!("http://{written}"),
    };
    let server: Uri = whole
        .parse()
        .map_err(|error| format!("server {written:?} is no URL: {error}"))?;
    match server.scheme_str() {
        Some("https" | "http") => Ok(server),
        _ => Err(format!(
            "server {written:?} is no URL; write https://host:port"
        )),
    }
}

/// Removes the line breaks of base64, as Go does when it reads bytes: `base64` wraps its lines, and YAML keeps them in a
/// block (`|`).
fn join_lines(cluster: &mut Cluster, auth: &mut AuthInfo) {
    const BREAKS: [char; 2] = ['\r', '\n'];
    let texts = [
        &mut cluster.certificate_authority_data,
        &mut auth.client_certificate_data,
    ];
    for text in texts.into_iter().flatten() {
        text.retain(|c| !BREAKS.contains(&c));
    }
    if let Some(key) = &mut auth.client_key_data
        && key.expose_secret().contains(BREAKS)
    {
        *key = key.expose_secret().replace(BREAKS, "").into();
    }
}

/// Parts of the node's identity that the HTTP client does not handle itself.
struct User {
    life: Option<Life>,
    plugin: Option<Plugin>,
    bearer: Option<HeaderValue>,
    token_file: Option<usize>,
}

impl User {
    /// Takes out of `auth` what it is itself, and adds to `files` those that matter.
    fn of(
        auth: &mut AuthInfo,
        newer: Option<&Path>,
        cluster: &Cluster,
        files: &mut Vec<PathBuf>,
    ) -> Result<Self, String> {
        if auth.auth_provider.is_some() {
            return Err(
                "auth-provider is not supported; use an exec plugin in its place".to_owned(),
            );
        }
        forget_empty(auth);
        let life = identity(auth, newer, files)?;
        let bearer = token(auth)?;
        let token_file = auth.token_file.take().map(|path| {
            files.push(PathBuf::from(path));
            files.len() - 1
        });
        let exec = auth.exec.take();
        // As upstream, one who has a token needs no plugin.
        let needed = bearer.is_none() && auth.token.is_none() && auth.username.is_none();
        let plugin = exec
            .filter(|_| needed)
            .map(|exec| Plugin::new(exec, cluster))
            .transpose()?;
        Ok(Self {
            life,
            plugin,
            bearer,
            token_file,
        })
    }
}

/// As upstream, what is empty is not given: templates leave such fields.
fn forget_empty(auth: &mut AuthInfo) {
    let texts = [
        &mut auth.username,
        &mut auth.token_file,
        &mut auth.client_certificate,
        &mut auth.client_certificate_data,
        &mut auth.client_key,
        &mut auth.impersonate,
        &mut auth.impersonate_uid,
    ];
    for text in texts {
        text.take_if(|text| text.is_empty());
    }
    let secrets = [
        &mut auth.password,
        &mut auth.token,
        &mut auth.client_key_data,
    ];
    for secret in secrets {
        secret.take_if(|secret| secret.expose_secret().is_empty());
    }
}

/// `error` without the lines of the file around it, in which secrets are.
fn without_content(error: KubeconfigError) -> KubeconfigError {
    match error {
        KubeconfigError::Parse(error) => {
            let what = error.without_snippet().to_string();
            KubeconfigError::Parse(Box::new(serde::de::Error::custom(what)))
        }
        error => error,
    }
}

/// The certificates that the server's is verified with; `None` for those of the system.
fn authority(cluster: &Cluster) -> Result<Option<Vec<Vec<u8>>>, String> {
    let set = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let data = set(&cluster.certificate_authority_data);
    let file = set(&cluster.certificate_authority);
    let insecure = cluster.insecure_skip_tls_verify == Some(true);
    if insecure && (data.is_some() || file.is_some()) {
        let problem =
            "insecure-skip-tls-verify and a certificate-authority exclude each other; remove one";
        return Err(problem.to_owned());
    }
    let (pem, from) = match (data, file) {
        (Some(data), _) => {
            let from = "certificate-authority-data".to_owned();
            let decoded = base64::engine::general_purpose::STANDARD.decode(data.trim());
            let pem = decoded.map_err(|error| format!("{from} is not base64: {error}"))?;
            (pem, from)
        }
        (None, Some(path)) => {
            let from = format!("certificate-authority {path}");
            let pem = std::fs::read(&path).map_err(|error| format!("{from}: {error}"))?;
            (pem, from)
        }
        (None, None) => return Ok(None),
    };
    let mut certificates: Vec<_> = x509_parser::pem::Pem::iter_from_buffer(&pem)
        .filter_map(Result::ok)
        .filter(|block| block.label == "CERTIFICATE")
        .map(|block| block.contents)
        .collect();
    if certificates.is_empty() {
        return Err(format!("{from} has no certificate in PEM"));
    }
    certificates.retain(|der| tls::can_be_trusted(der));
    if certificates.is_empty() {
        return Err(format!("{from} has no certificate that can be read"));
    }
    Ok(Some(certificates))
}

fn names<'a>(names: impl Iterator<Item = &'a String>) -> String {
    let names: Vec<_> = names.map(|name| format!("{name:?}")).collect();
    match names.as_slice() {
        [] => "it has none".to_owned(),
        names => format!("it has {}", names.join(", ")),
    }
}

/// Returns the client certificate of `auth`, in PEM; `None` when it has none, or it cannot be read. Blocking.
pub(super) fn certificate(auth: &AuthInfo) -> Option<Vec<u8>> {
    match (&auth.client_certificate_data, &auth.client_certificate) {
        (Some(data), _) => base64::engine::general_purpose::STANDARD
            .decode(data.trim())
            .ok(),
        (None, Some(path)) => std::fs::read(path).ok(),
        (None, None) => None,
    }
}

/// Returns the key of the client certificate of `auth`, in PEM; `None` when it has none, or it cannot be read. Blocking.
pub(super) fn key(auth: &AuthInfo) -> Option<Vec<u8>> {
    match (&auth.client_key_data, &auth.client_key) {
        (Some(data), _) => base64::engine::general_purpose::STANDARD
            .decode(data.expose_secret().trim())
            .ok(),
        (None, Some(path)) => std::fs::read(path).ok(),
        (None, None) => None,
    }
}

/// The life of the user's certificate, which is replaced by the newer one.
fn identity(
    auth: &mut AuthInfo,
    newer: Option<&Path>,
    files: &mut Vec<PathBuf>,
) -> Result<Option<Life>, String> {
    let of_file = |path: &Path| {
        std::fs::read(path)
            .map_err(|error| format!("client-certificate {}: {error}", path.display()))
    };
    let given = match (&auth.client_certificate_data, &auth.client_certificate) {
        (Some(data), _) => Some(
            base64::engine::general_purpose::STANDARD
                .decode(data.trim())
                .map_err(|error| format!("client-certificate-data is not base64: {error}"))?,
        ),
        (None, Some(path)) => {
            files.push(PathBuf::from(path));
            files.extend(auth.client_key.as_ref().map(PathBuf::from));
            Some(of_file(Path::new(path))?)
        }
        (None, None) => None,
    };
    let Some(given) = given else {
        return Ok(None);
    };
    let given = Life::of_pem(&given).ok_or_else(|| {
        let file = auth.client_certificate.as_deref();
        let file = file.filter(|_| auth.client_certificate_data.is_none());
        let from = file.map_or("client-certificate-data".to_owned(), |path| {
            format!("client-certificate {path}")
        });
        format!("{from} is not a certificate in PEM")
    })?;
    let Some(newer) = newer else {
        check_key(auth)?;
        return Ok(Some(given));
    };
    files.push(newer.to_owned());
    let rotated = std::fs::read(newer).ok().and_then(|pem| Life::of_pem(&pem));
    match rotated.filter(|rotated| rotated.until > given.until) {
        Some(rotated) => {
            let path = newer.display().to_string();
            auth.client_certificate_data = None;
            auth.client_key_data = None;
            auth.client_certificate = Some(path.clone());
            auth.client_key = Some(path);
            Ok(Some(rotated))
        }
        None => {
            check_key(auth)?;
            Ok(Some(given))
        }
    }
}

/// Says which file should have the client certificate's key, and does not: the client names none.
fn check_key(auth: &AuthInfo) -> Result<(), String> {
    let (None, Some(path)) = (&auth.client_key_data, &auth.client_key) else {
        return Ok(());
    };
    let pem = std::fs::read(path).map_err(|error| format!("client-key {path}: {error}"))?;
    let is_key = |block: &x509_parser::pem::Pem| block.label.ends_with("PRIVATE KEY");
    let mut blocks = x509_parser::pem::Pem::iter_from_buffer(&pem).filter_map(Result::ok);
    match blocks.any(|block| is_key(&block)) {
        true => Ok(()),
        false => Err(format!("client-key {path} has no private key in PEM")),
    }
}

/// The header with the token of a file, which is read again when that changes. As upstream, it wins over a token in
/// the kubeconfig, which is for the time when it cannot be read.
fn token(auth: &mut AuthInfo) -> Result<Option<HeaderValue>, String> {
    let Some(path) = auth.token_file.as_deref().filter(|path| !path.is_empty()) else {
        auth.token_file = None;
        return Ok(None);
    };
    let read = || {
        let text =
            std::fs::read_to_string(path).map_err(|error| format!("tokenFile {path}: {error}"))?;
        match text.trim() {
            "" => Err(format!("tokenFile {path} is empty")),
            text => bearer(text)
                .ok_or_else(|| format!("tokenFile {path} has characters that no token has")),
        }
    };
    match read() {
        Ok(header) => {
            auth.token = None;
            Ok(Some(header))
        }
        Err(_) if auth.token.is_some() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Fingerprints of some files: modification time, size and inode of each.
pub(super) type Seen = Vec<Option<(u128, u64, u64)>>;

/// Returns the fingerprints of `files`. Blocking.
pub(super) fn fingerprint(files: &[PathBuf]) -> Seen {
    use std::os::unix::fs::MetadataExt;
    let of = |path: &PathBuf| {
        let data = std::fs::metadata(path).ok()?;
        let at = data.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        Some((at.as_nanos(), data.len(), data.ino()))
    };
    files.iter().map(of).collect()
}
