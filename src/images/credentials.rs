//! Credentials for pulls from programs on the node: exec credential provider plugins.
//!
//! Comes in: a `CredentialProviderConfig`, the directory of the programs, a repository. Goes out: credentials.
//! A program is started directly, without a shell, gets a `CredentialProviderRequest` on its standard input
//! and has one minute to answer with a `CredentialProviderResponse`. Of the agent's environment it gets [`INHERITED`]
//! alone. Upstream's `plugin` package, which hands the whole environment on.
//!
//! **Invariant:** answers are kept in memory only, as long as they say, and never logged.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;

use super::import::Group;
use super::keyring::{Credentials, Keyring, url_matches};
use crate::kubeletconfig::parse_duration;
use crate::types::{Clock, Stamp, blocking, causes};

/// How long a program may take.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Most bytes that a program may answer with.
const LONGEST_ANSWER: u64 = 1 << 20;
/// Most bytes of a program's error output that are logged; the rest is read and dropped.
const STDERR_SHOWN: u64 = 512;
/// What a program gets of the agent's environment: where programs are, and how the network is reached. Anything else,
/// such as systemd's sockets and credentials, is the agent's own. `env` of the configuration adds what is missing.
const INHERITED: [&str; 12] = [
    "PATH",
    "HOME",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "ALL_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "all_proxy",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
];
const CONFIG_KIND: &str = "CredentialProviderConfig";
const CONFIG_VERSIONS: [&str; 3] = [
    "kubelet.config.k8s.io/v1",
    "kubelet.config.k8s.io/v1beta1",
    "kubelet.config.k8s.io/v1alpha1",
];
const PLUGIN_VERSIONS: [&str; 3] = [
    "credentialprovider.kubelet.k8s.io/v1",
    "credentialprovider.kubelet.k8s.io/v1beta1",
    "credentialprovider.kubelet.k8s.io/v1alpha1",
];

/// `--image-credential-provider-config` and `--image-credential-provider-bin-dir`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CredentialSettings {
    /// The configuration file.
    pub config: PathBuf,
    /// Where the programs are.
    pub bin_dir: PathBuf,
}

/// Why credential providers cannot be used, or one gave no credentials.
#[derive(Debug, thiserror::Error)]
pub enum CredentialError {
    /// The configuration cannot be read.
    #[error("read credential provider configuration {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The configuration is wrong.
    #[error("credential provider configuration {}: {what}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to write instead.
        what: String,
    },
    /// A program failed.
    #[error("run credential provider {name} for {image}: {what}")]
    Plugin {
        /// Its name.
        name: String,
        /// The repository.
        image: String,
        /// What went wrong.
        what: String,
        /// The program's output, for the log alone: it may be secret.
        #[source]
        said: Option<Said>,
    },
}

/// The beginning of a program's error output.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Said(String);

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ConfigFile {
    api_version: String,
    kind: String,
    providers: Vec<ProviderConfig>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ProviderConfig {
    name: String,
    match_images: Vec<String>,
    default_cache_duration: String,
    api_version: String,
    #[serde(default)]
    args: Option<Vec<String>>,
    #[serde(default)]
    env: Option<Vec<EnvVar>>,
    #[serde(default)]
    token_attributes: Option<serde_json::Value>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct EnvVar {
    name: String,
    value: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Request<'a> {
    kind: &'static str,
    api_version: &'a str,
    image: &'a str,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Response {
    #[serde(default)]
    kind: String,
    #[serde(default)]
    api_version: String,
    cache_key_type: CacheKeyType,
    #[serde(default)]
    cache_duration: Option<String>,
    #[serde(default)]
    auth: Option<BTreeMap<String, AuthEntry>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum CacheKeyType {
    Image,
    Registry,
    Global,
}

#[derive(Deserialize)]
struct AuthEntry {
    #[serde(default)]
    username: String,
    #[serde(default)]
    password: String,
}

/// What a program's answer says.
pub(super) struct Answer {
    pub(super) keyring: Keyring,
    cache_key_type: CacheKeyType,
    /// How long it is good for, if it says so.
    keep: Option<Duration>,
}

impl Answer {
    /// Reads a `CredentialProviderResponse` of `api_version`.
    ///
    /// # Errors
    /// What is wrong with it, without its content.
    pub(super) fn parse(output: &[u8], api_version: &str) -> Result<Self, String> {
        let response: Response = serde_json::from_slice(output).map_err(|e| {
            format!(
                "its answer is not a CredentialProviderResponse (line {} column {})",
                e.line(),
                e.column()
            )
        })?;
        if response.kind != "CredentialProviderResponse" || response.api_version != api_version {
            return Err(format!(
                "it answers with {} {}, not CredentialProviderResponse of {api_version}",
                response.api_version, response.kind
            ));
        }
        let keep = response.cache_duration.as_deref().map(parse_duration);
        let keep = keep
            .transpose()
            .map_err(|e| format!("cacheDuration: {e}"))?;
        let mut keyring = Keyring::default();
        for (registry, AuthEntry { username, password }) in response.auth.into_iter().flatten() {
            let credentials = Credentials {
                username,
                password,
                source: None,
            };
            keyring.add(&registry, credentials);
        }
        Ok(Self {
            keyring,
            cache_key_type: response.cache_key_type,
            keep,
        })
    }
}

struct Cached {
    until_ms: i64,
    boot: crate::types::BootId,
    keyring: Arc<Keyring>,
}

struct Provider {
    name: String,
    program: PathBuf,
    match_images: Vec<String>,
    default_cache: Duration,
    api_version: String,
    args: Vec<String>,
    env: Vec<EnvVar>,
    /// By `image:…`, `registry:…` or `global`.
    cache: Mutex<HashMap<String, Cached>>,
    /// One run at a time: a second pull of the same registry finds the first one's answer.
    running: tokio::sync::Mutex<()>,
}

/// The configured programs.
pub struct CredentialProviders {
    settings: CredentialSettings,
    /// Empty until the configuration could be read.
    providers: OnceLock<Vec<Provider>>,
    clock: Arc<dyn Clock>,
    timeout: Duration,
}

impl std::fmt::Debug for CredentialProviders {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let providers = self.providers.get().into_iter().flatten();
        let names: Vec<&str> = providers.map(|p| p.name.as_str()).collect();
        f.debug_struct("CredentialProviders")
            .field("providers", &names)
            .finish_non_exhaustive()
    }
}

impl CredentialProviders {
    /// Reads the configuration. A file or a program that does not exist yet is logged, and looked for again at each pull
    /// that needs it.
    ///
    /// # Errors
    /// When the configuration is wrong.
    pub fn load(
        settings: &CredentialSettings,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, CredentialError> {
        let programs = Self {
            settings: settings.clone(),
            providers: OnceLock::new(),
            clock,
            timeout: TIMEOUT,
        };
        match read_config(settings) {
            Ok(providers) => {
                for missing in providers.iter().filter_map(Provider::missing) {
                    tracing::warn!("{missing}; pulls that need it try without credentials");
                }
                programs.providers.get_or_init(|| providers);
            }
            Err(error @ CredentialError::Read { .. }) => tracing::warn!(
                error = causes(&error),
                "no credential providers yet, pulls try without; the file is read again at each pull"
            ),
            Err(error) => return Err(error),
        }
        Ok(programs)
    }

    /// Says what is wrong with the configuration `text` of the file at `path`. Whether the programs are there is left out
    /// without `bin_dir`.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn check(path: &Path, text: &str, bin_dir: Option<&Path>) -> Result<(), CredentialError> {
        let providers = Self::read(path, text, bin_dir)?;
        let missing = providers.iter().filter(|_| bin_dir.is_some());
        match missing.filter_map(Provider::missing).next() {
            Some(what) => Err(bad(path, what)),
            None => Ok(()),
        }
    }

    fn read(
        path: &Path,
        text: &str,
        bin_dir: Option<&Path>,
    ) -> Result<Vec<Provider>, CredentialError> {
        let bad = |what| bad(path, what);
        // Without the lines around it: variables of the programs may be passwords.
        let file: ConfigFile = serde_saphyr::from_str(text)
            .map_err(|error| bad(error.without_snippet().to_string()))?;
        if file.kind != CONFIG_KIND || !CONFIG_VERSIONS.contains(&file.api_version.as_str()) {
            return Err(bad(format!(
                "it is a {} {}; write kind {CONFIG_KIND} with apiVersion {}",
                file.api_version, file.kind, CONFIG_VERSIONS[0]
            )));
        }
        if file.providers.is_empty() {
            return Err(bad(
                "at least 1 item in plugins is required: providers is empty".to_owned(),
            ));
        }
        let mut providers: Vec<Provider> = Vec::new();
        for one in file.providers {
            let provider = Provider::new(one, bin_dir).map_err(bad)?;
            if providers.iter().any(|p| p.name == provider.name) {
                return Err(bad(format!("provider {} is there twice", provider.name)));
            }
            providers.push(provider);
        }
        Ok(providers)
    }

    /// The programs. Reads the configuration if it could not be read before.
    ///
    /// # Errors
    /// Why there are none.
    async fn programs(&self) -> Result<&[Provider], CredentialError> {
        if let Some(providers) = self.providers.get() {
            return Ok(providers);
        }
        let settings = self.settings.clone();
        let Ok(read) = blocking::run(move || read_config(&settings)).await else {
            // Only a runtime that is shutting down cancels blocking work.
            return Ok(&[]);
        };
        let providers = read?;
        Ok(self.providers.get_or_init(|| providers))
    }

    /// Credentials of every program that is for this repository, and why others have given none: for the pod, so without
    /// what the program printed. Dropping the future kills a program that runs.
    pub(super) async fn lookup(&self, repository: &str) -> (Vec<Credentials>, Vec<String>) {
        let (mut found, mut failures) = (Vec::new(), Vec::new());
        let providers = match self.programs().await {
            Ok(providers) => providers,
            Err(error) => {
                failures.push(causes(&error));
                return (found, failures);
            }
        };
        for provider in providers {
            let matches = |p: &String| url_matches(p, repository);
            if !provider.match_images.iter().any(matches) {
                continue;
            }
            match provider
                .provide(repository, &*self.clock, self.timeout)
                .await
            {
                Ok(keyring) => found.extend(keyring.lookup(repository)),
                Err(error) => {
                    tracing::warn!(
                        error = causes(&error),
                        "no credentials from a provider, pulling without"
                    );
                    failures.push(error.to_string());
                }
            }
        }
        (found, failures)
    }
}

fn bad(path: &Path, what: String) -> CredentialError {
    CredentialError::Config {
        path: path.to_owned(),
        what,
    }
}

/// Reads the configuration. Blocking.
fn read_config(settings: &CredentialSettings) -> Result<Vec<Provider>, CredentialError> {
    let path = &settings.config;
    let text = std::fs::read_to_string(path).map_err(|source| CredentialError::Read {
        path: path.clone(),
        source,
    })?;
    CredentialProviders::read(path, &text, Some(&settings.bin_dir))
}

impl Provider {
    /// The provider of `config`, whose program is in `bin_dir`; without that, nothing can be run.
    fn new(config: ProviderConfig, bin_dir: Option<&Path>) -> Result<Self, String> {
        let name = config.name;
        let in_provider = |what: String| format!("provider {name:?}: {what}");
        if name.is_empty() || name.contains(['/', '\\', ' ']) || name == "." || name == ".." {
            return Err(in_provider(
                "its name is the name of a program, without path and spaces".to_owned(),
            ));
        }
        if !PLUGIN_VERSIONS.contains(&config.api_version.as_str()) {
            return Err(in_provider(format!(
                "apiVersion {:?} is not known; use {}",
                config.api_version, PLUGIN_VERSIONS[0]
            )));
        }
        if config.match_images.is_empty() {
            return Err(in_provider(
                "matchImages is empty; name at least one registry".to_owned(),
            ));
        }
        if config.token_attributes.is_some() {
            return Err(in_provider(
                "tokenAttributes is not supported; remove it".to_owned(),
            ));
        }
        let default_cache = parse_duration(&config.default_cache_duration)
            .map_err(|error| in_provider(format!("defaultCacheDuration: {error}")))?;
        let program = bin_dir.map_or_else(|| PathBuf::from(&name), |dir| dir.join(&name));
        Ok(Self {
            program,
            match_images: config.match_images,
            default_cache,
            api_version: config.api_version,
            args: config.args.unwrap_or_default(),
            env: config.env.unwrap_or_default(),
            cache: Mutex::default(),
            running: tokio::sync::Mutex::default(),
            name,
        })
    }

    /// Says that the program does not exist, and what to do.
    fn missing(&self) -> Option<String> {
        let program = self.program.display();
        (!self.program.is_file()).then(|| {
            format!(
                "provider {:?}: {program} is not a file; install the program there",
                self.name
            )
        })
    }

    async fn provide(
        &self,
        repository: &str,
        clock: &dyn Clock,
        timeout: Duration,
    ) -> Result<Arc<Keyring>, CredentialError> {
        if let Some(keyring) = self.cached(repository, clock.now()) {
            return Ok(keyring);
        }
        let _turn = self.running.lock().await;
        if let Some(keyring) = self.cached(repository, clock.now()) {
            return Ok(keyring);
        }
        let failed = |(what, said)| CredentialError::Plugin {
            name: self.name.clone(),
            image: repository.to_owned(),
            what,
            said,
        };
        let error = |what: String| failed((what, None));
        let output = match tokio::time::timeout(timeout, self.run(repository)).await {
            Ok(result) => result.map_err(failed)?,
            Err(_) => return Err(error(format!("no answer within {} s", timeout.as_secs()))),
        };
        let answer = Answer::parse(&output, &self.api_version).map_err(error)?;
        let keyring = Arc::new(answer.keyring);
        self.keep(
            cache_key(answer.cache_key_type, repository),
            &keyring,
            answer.keep.unwrap_or(self.default_cache),
            clock.now(),
        );
        Ok(keyring)
    }

    /// Runs the program and returns its standard output. Dropping the future kills it with all that it has started.
    ///
    /// # Errors
    /// What went wrong, and what the program said of it.
    async fn run(&self, repository: &str) -> Result<Vec<u8>, (String, Option<Said>)> {
        let unsaid = |what: String| (what, None);
        let request = Request {
            kind: "CredentialProviderRequest",
            api_version: &self.api_version,
            image: repository,
        };
        let request = serde_json::to_vec(&request).map_err(|e| unsaid(e.to_string()))?;
        let mut child = Command::new(&self.program)
            .args(&self.args)
            .env_clear()
            .envs(inherited(std::env::vars_os()))
            .envs(self.env.iter().map(|v| (&v.name, &v.value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| unsaid(format!("start {}: {e}", self.program.display())))?;
        let mut group = Group::of(&child);
        let (stdin, stdout, stderr) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let feed = async {
            if let Some(mut stdin) = stdin {
                // A program that does not read its request answers all the same.
                if let Err(error) = stdin.write_all(&request).await {
                    tracing::debug!(provider = self.name, %error, "a credential provider does not read its request");
                }
            }
            Ok::<_, String>(())
        };
        let ((), answer, said) =
            tokio::try_join!(feed, read_answer(stdout), read_beginning(stderr)).map_err(unsaid)?;
        let status = child.wait().await.map_err(|e| unsaid(e.to_string()))?;
        group.disarm();
        if !status.success() {
            let said = String::from_utf8_lossy(&said).trim().to_owned();
            let what = format!("it ended with {status}");
            return Err((what, (!said.is_empty()).then_some(Said(said))));
        }
        Ok(answer)
    }

    fn cached(&self, repository: &str, now: Stamp) -> Option<Arc<Keyring>> {
        let cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        [
            CacheKeyType::Image,
            CacheKeyType::Registry,
            CacheKeyType::Global,
        ]
        .into_iter()
        .filter_map(|kind| cache.get(&cache_key(kind, repository)))
        .find(|c| c.is_valid(now))
        .map(|c| Arc::clone(&c.keyring))
    }

    fn keep(&self, key: String, keyring: &Arc<Keyring>, for_: Duration, now: Stamp) {
        if for_.is_zero() {
            return;
        }
        let ms = i64::try_from(for_.as_millis()).unwrap_or(i64::MAX);
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.retain(|_, c| c.is_valid(now));
        cache.insert(
            key,
            Cached {
                until_ms: now.boottime_ms.saturating_add(ms),
                boot: now.boot,
                keyring: Arc::clone(keyring),
            },
        );
    }
}

impl Cached {
    fn is_valid(&self, now: Stamp) -> bool {
        self.boot == now.boot && now.boottime_ms < self.until_ms
    }
}

/// Leaves what programs get of the agent's environment.
fn inherited(
    own: impl Iterator<Item = (OsString, OsString)>,
) -> impl Iterator<Item = (OsString, OsString)> {
    own.filter(|(name, _)| INHERITED.iter().any(|kept| name == kept))
}

/// Reads a program's answer to its end.
///
/// # Errors
/// When it is longer than [`LONGEST_ANSWER`], without reading on.
async fn read_answer(stdout: Option<impl AsyncRead + Unpin>) -> Result<Vec<u8>, String> {
    let mut answer = Vec::new();
    if let Some(stdout) = stdout {
        let mut limited = stdout.take(LONGEST_ANSWER + 1);
        let read = limited.read_to_end(&mut answer).await;
        read.map_err(|e| format!("its answer cannot be read: {e}"))?;
    }
    match answer.len() as u64 > LONGEST_ANSWER {
        true => Err(format!("it answers with more than {LONGEST_ANSWER} bytes")),
        false => Ok(answer),
    }
}

/// Reads a program's error output to its end and returns the first of it.
async fn read_beginning(stderr: Option<impl AsyncRead + Unpin>) -> Result<Vec<u8>, String> {
    let mut beginning = Vec::new();
    if let Some(stderr) = stderr {
        let failed = |e| format!("its error output cannot be read: {e}");
        let mut limited = stderr.take(STDERR_SHOWN);
        let read = limited.read_to_end(&mut beginning).await;
        read.map_err(failed)?;
        // A program that goes on must not wait for a full pipe.
        let rest = tokio::io::copy(&mut limited.into_inner(), &mut tokio::io::sink()).await;
        rest.map_err(failed)?;
    }
    Ok(beginning)
}

fn cache_key(kind: CacheKeyType, repository: &str) -> String {
    match kind {
        CacheKeyType::Image => format!("image:{repository}"),
        CacheKeyType::Registry => {
            let registry = repository.split('/').next().unwrap_or_default();
            format!("registry:{registry}")
        }
        CacheKeyType::Global => "global".to_owned(),
    }
}

#[cfg(test)]
#[path = "credentials_tests.rs"]
mod tests;
