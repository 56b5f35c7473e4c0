//! The kubeconfig: read, checked, and told about in words that lead on.

use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use base64::Engine as _;
use kube::config::{AuthInfo, Cluster, Kubeconfig, KubeconfigError};

use super::ApiError;

/// What a kubeconfig says.
#[derive(Clone, Debug)]
pub(super) struct Loaded {
    pub(super) config: kube::Config,
    /// The cluster as it is written, with absolute paths.
    pub(super) cluster: Cluster,
    /// The names in it, for messages.
    pub(super) names: String,
    /// The client certificate's life, when there is one.
    pub(super) life: Option<Life>,
    /// What changes when the credentials change.
    pub(super) files: Vec<PathBuf>,
}

/// When a certificate is good, in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Life {
    pub(super) from: i64,
    pub(super) until: i64,
}

impl Life {
    /// That of the first certificate in `pem`.
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

    /// What is wrong with it at `now`, in words.
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
    if let Err(source) = std::fs::File::open(path) {
        return Err(ApiError::Read {
            path: path.to_owned(),
            source,
        });
    }
    let parse = |source: KubeconfigError| ApiError::Parse {
        path: path.to_owned(),
        source: Box::new(source),
    };
    let mut file = Kubeconfig::read_from(path).map_err(parse)?;
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
    let Some(cluster) = file
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
    if cluster.insecure_skip_tls_verify == Some(true)
        && (cluster.certificate_authority.is_some() || cluster.certificate_authority_data.is_some())
    {
        let problem =
            "insecure-skip-tls-verify and a certificate-authority exclude each other; remove one";
        return Err(unusable(problem.to_owned()));
    }
    let mut files = vec![path.to_owned()];
    files.extend(cluster.certificate_authority.as_ref().map(PathBuf::from));
    let mut life = None;
    if let Some(auth) = file
        .auth_infos
        .iter_mut()
        .find(|one| one.name == user)
        .and_then(|one| one.auth_info.as_mut())
    {
        life = identity(auth, newer, &mut files).map_err(unusable)?;
        token(auth, &mut files).map_err(unusable)?;
    } else if !user.is_empty() {
        return Err(unusable(format!("it has no user {user:?}")));
    }
    let config = config(file).map_err(|source| ApiError::Load {
        names: names.clone(),
        source: Box::new(source),
    })?;
    if config.accept_invalid_certs {
        tracing::warn!(
            kubeconfig = names,
            "the API server's certificate is not verified: insecure-skip-tls-verify"
        );
    }
    Ok(Loaded {
        config,
        cluster,
        names,
        life,
        files,
    })
}

fn config(file: Kubeconfig) -> Result<kube::Config, KubeconfigError> {
    let mut config = kube::Config::try_from(file)?;
    // Retries are the callers': they know what may be done twice.
    config.default_retry = false;
    Ok(config)
}

fn names<'a>(names: impl Iterator<Item = &'a String>) -> String {
    let names: Vec<_> = names.map(|name| format!("{name:?}")).collect();
    match names.as_slice() {
        [] => "it has none".to_owned(),
        names => format!("it has {}", names.join(", ")),
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
    let given = Life::of_pem(&given).ok_or("its client certificate is not a certificate in PEM")?;
    let Some(newer) = newer else {
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
        None => Ok(Some(given)),
    }
}

/// Reads the token file; it is read again when it changes.
fn token(auth: &mut AuthInfo, files: &mut Vec<PathBuf>) -> Result<(), String> {
    let Some(path) = auth.token_file.clone().filter(|_| auth.token.is_none()) else {
        return Ok(());
    };
    let text =
        std::fs::read_to_string(&path).map_err(|error| format!("tokenFile {path}: {error}"))?;
    let text = text.trim();
    if text.is_empty() {
        return Err(format!("tokenFile {path} is empty"));
    }
    auth.token = Some(text.to_owned().into());
    files.push(PathBuf::from(path));
    Ok(())
}

/// What distinguishes one state of some files from another: time, size and number of each.
pub(super) type Seen = Vec<Option<(u128, u64, u64)>>;

/// What `files` look like. Blocking.
pub(super) fn fingerprint(files: &[PathBuf]) -> Seen {
    use std::os::unix::fs::MetadataExt;
    let of = |path: &PathBuf| {
        let data = std::fs::metadata(path).ok()?;
        let at = data.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        Some((at.as_nanos(), data.len(), data.ino()))
    };
    files.iter().map(of).collect()
}
