//! Credentials for pulls from programs on the node: exec credential provider plugins.
//!
//! Comes in: a `CredentialProviderConfig`, the directory of the programs, a repository. Goes out: credentials.
//! A program is started directly, without a shell, gets a `CredentialProviderRequest` on its standard input
//! and has one minute to answer with a `CredentialProviderResponse`. Of the agent's environment it gets [`INHERITED`]
//! alone. Upstream's `plugin` package, which hands the whole environment on.
//!
//! A program with `tokenAttributes` gets a token of the pod's service account as well (`account`).
//!
//! **Invariant:** answers are kept in memory only, as long as they say, and never logged.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;
use tokio::sync::Semaphore;
use zeroize::Zeroizing;

use super::account::{Given, ServiceAccounts, TokenMode};
use super::import::Group;
use super::keyring::{Credentials, Keyring, ServiceAccountSource, url_matches};
use super::provider_config::{self, EnvVar, Parsed, ProviderConfig, Refused, bad};
use crate::kubeletconfig::parse_duration;
use crate::types::metrics::{Metrics, PluginNameLabel};
use crate::types::pace::Pace;
use crate::types::{Clock, Stamp, blocking, causes, text};

/// Longest run of a program.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Most runs of one program at once, each for another service account.
const AT_ONCE: usize = 4;
/// Most bytes that a program may answer with.
const LONGEST_ANSWER: u64 = 1 << 20;
/// Most bytes of a program's error output that are logged; the rest is read and dropped.
const STDERR_SHOWN: u64 = 512;
/// Variables of the agent's environment that a program gets: those that locate programs and configure proxies. All
/// others, such as systemd's sockets and credentials, stay with the agent. `env` of the configuration adds more.
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
    /// Directory of the programs.
    pub bin_dir: PathBuf,
}

/// Reason why credential providers cannot be used, or why one gave no credentials.
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
        /// Description of the error, with its remedy.
        what: String,
    },
    /// A program failed.
    #[error("run credential provider {name} for {image}: {what}")]
    Plugin {
        /// Its name.
        name: String,
        /// The repository.
        image: String,
        /// Description of the failure.
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

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Request<'a> {
    kind: &'static str,
    api_version: &'a str,
    image: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    service_account_token: Option<&'a str>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    service_account_annotations: &'a BTreeMap<String, String>,
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

/// Parsed answer of a program.
pub(super) struct Answer {
    pub(super) keyring: Keyring,
    cache_key_type: CacheKeyType,
    /// Time for which the answer may be cached, if the program names one.
    keep: Option<Duration>,
}

impl Answer {
    /// Reads a `CredentialProviderResponse` of `api_version`.
    ///
    /// # Errors
    /// The error in it, without its content.
    pub(super) fn parse(output: &[u8], api_version: &str) -> Result<Self, String> {
        let response: Response = serde_json::from_slice(output).or_else(|error| {
            // Upstream's decoder takes nulls, and YAML.
            let lenient = std::str::from_utf8(output).ok().and_then(text::lenient);
            lenient.ok_or_else(|| {
                format!(
                    "its answer is not a CredentialProviderResponse (line {} column {})",
                    error.line(),
                    error.column()
                )
            })
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

    /// Checks that the token that the program was given is no password, unless it may be.
    ///
    /// # Errors
    /// The setting to use instead.
    fn check_echo(&self, given: &Given) -> Result<(), String> {
        let token = given.token.as_ref().filter(|_| !given.may_echo);
        if token.is_some_and(|token| self.keyring.has_password(token)) {
            return Err(
                "it answers with the service account token as password; set tokenAttributes.cacheType to Token"
                    .to_owned(),
            );
        }
        Ok(())
    }
}

struct Cached {
    until_ms: i64,
    boot: crate::types::BootId,
    keyring: Arc<Keyring>,
}

struct Provider {
    /// As it is written: another one is another provider.
    config: ProviderConfig,
    name: String,
    program: PathBuf,
    match_images: Vec<String>,
    default_cache: Duration,
    api_version: String,
    args: Vec<String>,
    env: Vec<EnvVar>,
    /// It wants a token.
    token_mode: Option<TokenMode>,
    /// By `image:…`, `registry:…` or `global`, and behind that the service account.
    cache: Mutex<HashMap<String, Cached>>,
    /// One run at a time for a service account ([`Given::cache_key`]), and one without any: a second pull of the same registry
    /// finds the first one's answer. A run that hangs for one account holds up no other.
    running: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
    slots: Semaphore,
}

/// The configured programs.
pub struct CredentialProviders {
    settings: CredentialSettings,
    programs: Mutex<Programs>,
    accounts: Option<Arc<dyn ServiceAccounts>>,
    clock: Arc<dyn Clock>,
    timeout: Duration,
    metrics: Metrics,
    pace: Pace,
}

/// The part of the configuration that can be used.
#[derive(Clone, Default)]
struct Programs {
    providers: Arc<[Arc<Provider>]>,
    refused: Arc<[Refused]>,
    /// State of the file that was read; `None` when it is to be read again in any case.
    seen: Option<Seen>,
    /// Error of the file as it is. Providers are those of before.
    error: Option<String>,
}

/// Fingerprint of a file: time, size, number and file system.
type Seen = (i64, i64, u64, u64, u64);

impl std::fmt::Debug for CredentialProviders {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let providers = Arc::clone(&self.known().providers);
        let names: Vec<&str> = providers.iter().map(|p| p.name.as_str()).collect();
        f.debug_struct("CredentialProviders")
            .field("providers", &names)
            .finish_non_exhaustive()
    }
}

impl CredentialProviders {
    /// Reads the configuration. Entries that cannot be used are logged and disabled; so is a program or a file that is missing
    /// or broken. The file is read again when it has changed, and a missing one is looked for at each pull. Blocking.
    pub fn load(settings: &CredentialSettings, clock: Arc<dyn Clock>) -> Self {
        let programs = Self {
            settings: settings.clone(),
            programs: Mutex::default(),
            accounts: None,
            clock,
            timeout: TIMEOUT,
            metrics: Metrics::default(),
            pace: Pace::default(),
        };
        programs.take(read_config(settings));
        programs
    }

    /// Gets service accounts and their tokens from there; without, programs that need them are not run.
    #[must_use]
    pub fn with_accounts(mut self, accounts: Arc<dyn ServiceAccounts>) -> Self {
        self.accounts = Some(accounts);
        self
    }

    /// Counts runs of programs there.
    #[must_use]
    pub fn with_metrics(mut self, metrics: Metrics) -> Self {
        self.metrics = metrics;
        self
    }

    /// Says what is wrong with the configuration `text` of the file at `path`. Whether the programs are there is left out
    /// without `bin_dir`.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn check(path: &Path, text: &str, bin_dir: Option<&Path>) -> Result<(), CredentialError> {
        let providers = provider_config::parse(path, text, |one| Provider::new(one, bin_dir))?;
        let missing = providers.iter().filter(|_| bin_dir.is_some());
        match missing.filter_map(Provider::missing).next() {
            Some(what) => Err(bad(path, what)),
            None => Ok(()),
        }
    }

    fn known(&self) -> MutexGuard<'_, Programs> {
        self.programs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what was read of the file, and logs what of it cannot be used. What did not change keeps its answers.
    fn take(&self, (seen, read): (Option<Seen>, Result<Parsed<Provider>, CredentialError>)) {
        let path = self.settings.config.display().to_string();
        let mut known = self.known();
        let parsed = match read {
            Ok(parsed) => parsed,
            Err(error) => {
                let error = causes(&error);
                if self.pace.is_due(&path, &error, self.clock.now()) {
                    tracing::warn!(
                        error,
                        providers = known.providers.len(),
                        "cannot use the configuration of credential providers, pulls use the previous one; the file \
                         is read again when it changes"
                    );
                }
                known.seen = seen;
                known.error = Some(error);
                return;
            }
        };
        self.pace.over(&path);
        for field in &parsed.ignored {
            tracing::warn!(
                path,
                field,
                "ignoring an unknown field of the credential provider configuration"
            );
        }
        for refused in &parsed.refused {
            tracing::warn!(
                path,
                problem = refused.why,
                "a credential provider is disabled, pulls that need it try without credentials; the others work"
            );
        }
        for missing in parsed.providers.iter().filter_map(Provider::missing) {
            tracing::warn!("{missing}; pulls that need it try without credentials");
        }
        let before = Arc::clone(&known.providers);
        let kept = |one: Provider| {
            let same = before.iter().find(|other| other.config == one.config);
            same.map_or_else(|| Arc::new(one), Arc::clone)
        };
        *known = Programs {
            providers: parsed.providers.into_iter().map(kept).collect(),
            refused: parsed.refused.into(),
            seen,
            error: None,
        };
    }

    /// The programs. Reads the configuration again if it has changed.
    async fn programs(&self) -> Programs {
        let (settings, seen) = (self.settings.clone(), self.known().seen);
        let read = blocking::run(move || {
            let is_same = seen.is_some() && state_of(&settings.config) == seen;
            (!is_same).then(|| read_config(&settings))
        });
        // Only a runtime that is shutting down cancels blocking work.
        if let Ok(Some(read)) = read.await {
            self.take(read);
        }
        self.known().clone()
    }

    /// As [`Self::find`], for no pod.
    #[cfg(test)]
    pub(super) async fn lookup(&self, repository: &str) -> (Vec<Credentials>, Vec<String>) {
        self.find(repository, None).await
    }

    /// Returns the service accounts of `pod` for which programs of this repository are configured: the account whose token
    /// they would get. Runs no program.
    pub(super) async fn accounts_of(
        &self,
        repository: &str,
        pod: &Pod,
    ) -> Vec<Arc<ServiceAccountSource>> {
        let mut found = Vec::new();
        let programs = self.programs().await;
        for provider in programs.providers.iter() {
            let Some(mode) = provider.token_mode.as_ref() else {
                continue;
            };
            let is_for = |pattern: &String| url_matches(pattern, repository);
            if !provider.match_images.iter().any(is_for) {
                continue;
            }
            match mode.opted_in(Some(pod), self.accounts.as_deref()).await {
                Ok(Some((account, _))) => found.push(Arc::new(account)),
                Ok(None) => {}
                Err(error) => {
                    tracing::debug!(provider = provider.name, error, "no service account");
                }
            }
        }
        found
    }

    /// Credentials of every program that is for this repository, and why others have given none: for the pod, so without
    /// what the program printed. `pod` is the one that pulls. Dropping the future kills a program that runs.
    pub(super) async fn find(
        &self,
        repository: &str,
        pod: Option<&Pod>,
    ) -> (Vec<Credentials>, Vec<String>) {
        let mut found = Vec::new();
        let programs = self.programs().await;
        let mut failures: Vec<String> = programs.error.into_iter().collect();
        let is_for = |images: &[String]| images.iter().any(|p| url_matches(p, repository));
        let config = self.settings.config.display();
        let refused = programs
            .refused
            .iter()
            .filter(|one| is_for(&one.match_images));
        failures.extend(
            refused.map(|one| format!("credential provider configuration {config}: {}", one.why)),
        );
        for provider in programs.providers.iter() {
            if !is_for(&provider.match_images) {
                continue;
            }
            let given = match &provider.token_mode {
                None => Ok(Some(Given::default())),
                Some(mode) => mode.give(pod, self.accounts.as_deref()).await,
            };
            let answer = match given {
                Ok(None) => continue,
                Ok(Some(given)) => {
                    provider
                        .provide(
                            repository,
                            &given,
                            &*self.clock,
                            (self.timeout, &self.metrics),
                        )
                        .await
                }
                Err(what) => Err(provider.failed(repository, what, None)),
            };
            match answer {
                Ok(keyring) => found.extend(keyring.lookup(repository)),
                Err(error) => {
                    tracing::warn!(
                        error = causes(&error),
                        "a provider gave no credentials, pulling without"
                    );
                    failures.push(error.to_string());
                }
            }
        }
        (found, failures)
    }
}

/// Reads the configuration, and what its file looked like before. Blocking.
fn read_config(
    settings: &CredentialSettings,
) -> (Option<Seen>, Result<Parsed<Provider>, CredentialError>) {
    let path = &settings.config;
    let seen = state_of(path);
    let read = std::fs::read(path).and_then(text::of_file);
    let read = read.map_err(|source| CredentialError::Read {
        path: path.clone(),
        source,
    });
    match read {
        Ok(text) => {
            let new = |one| Provider::new(one, Some(&settings.bin_dir));
            (seen, provider_config::parse_each(path, &text, new))
        }
        Err(error) => (None, Err(error)),
    }
}

/// Returns the state of a file; `None` when it cannot be seen. Blocking.
fn state_of(path: &Path) -> Option<Seen> {
    let data = std::fs::metadata(path).ok()?;
    Some((
        data.mtime(),
        data.mtime_nsec(),
        data.size(),
        data.ino(),
        data.dev(),
    ))
}

impl Provider {
    /// The provider of `config`, whose program is in `bin_dir`; without that, nothing can be run.
    fn new(config: ProviderConfig, bin_dir: Option<&Path>) -> Result<Self, String> {
        let whole = config.clone();
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
        let token_mode = config
            .token_attributes
            .map(|attributes| TokenMode::new(attributes, &config.api_version))
            .transpose()
            .map_err(in_provider)?;
        let default_cache = parse_duration(&config.default_cache_duration)
            .map_err(|error| in_provider(format!("defaultCacheDuration: {error}")))?;
        let program = bin_dir.map_or_else(|| PathBuf::from(&name), |dir| dir.join(&name));
        Ok(Self {
            config: whole,
            program,
            match_images: config.match_images,
            default_cache,
            api_version: config.api_version,
            args: config.args.unwrap_or_default(),
            env: config.env.unwrap_or_default(),
            token_mode,
            cache: Mutex::default(),
            running: Mutex::default(),
            slots: Semaphore::new(AT_ONCE),
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

    fn failed(&self, repository: &str, what: String, said: Option<Said>) -> CredentialError {
        CredentialError::Plugin {
            name: self.name.clone(),
            image: repository.to_owned(),
            what,
            said,
        }
    }

    /// Returns the turn of the runs for one service account.
    fn turn(&self, account: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.retain(|_, turn| Arc::strong_count(turn) > 1);
        Arc::clone(running.entry(account.to_owned()).or_default())
    }

    async fn provide(
        &self,
        repository: &str,
        given: &Given,
        clock: &dyn Clock,
        (timeout, metrics): (Duration, &Metrics),
    ) -> Result<Arc<Keyring>, CredentialError> {
        let cached = || self.cached(repository, &given.cache_key, clock.now());
        if let Some(keyring) = cached() {
            return Ok(keyring);
        }
        let turn = self.turn(&given.cache_key);
        let _turn = turn.lock().await;
        if let Some(keyring) = cached() {
            return Ok(keyring);
        }
        // It is never closed.
        let _slot = self.slots.acquire().await;
        let error = |what: String| self.failed(repository, what, None);
        let run = self.run(repository, given);
        let begun = tokio::time::Instant::now();
        let output = tokio::time::timeout(timeout, run).await;
        let label = PluginNameLabel {
            plugin_name: self.name.clone(),
        };
        let took = begun.elapsed().as_secs_f64();
        let durations = &metrics.credential_provider_duration;
        durations.get_or_create(&label).observe(took);
        if !matches!(output, Ok(Ok(_))) {
            let errors = &metrics.credential_provider_errors;
            errors.get_or_create(&label).inc();
        }
        let output = match output {
            Ok(result) => result.map_err(|(what, said)| self.failed(repository, what, said))?,
            Err(_) => return Err(error(format!("no answer within {} s", timeout.as_secs()))),
        };
        let answer = Answer::parse(&output, &self.api_version).map_err(error)?;
        answer.check_echo(given).map_err(error)?;
        let keyring = Arc::new(match &given.account {
            Some(account) => answer.keyring.of_account(account),
            None => answer.keyring,
        });
        self.keep(
            cache_key(answer.cache_key_type, repository, &given.cache_key),
            &keyring,
            answer.keep.unwrap_or(self.default_cache),
            clock.now(),
        );
        Ok(keyring)
    }

    /// Runs the program and returns its standard output. Dropping the future kills it with all that it has started.
    ///
    /// # Errors
    /// The failure, and the program's error output.
    async fn run(
        &self,
        repository: &str,
        given: &Given,
    ) -> Result<Vec<u8>, (String, Option<Said>)> {
        let unsaid = |what: String| (what, None);
        let request = Request {
            kind: "CredentialProviderRequest",
            api_version: &self.api_version,
            image: repository,
            service_account_token: given.token.as_ref().map(|token| token.as_str()),
            service_account_annotations: &given.annotations,
        };
        let request = serde_json::to_vec(&request).map_err(|e| unsaid(e.to_string()))?;
        let request = Zeroizing::new(request);
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

    fn cached(&self, repository: &str, account: &str, now: Stamp) -> Option<Arc<Keyring>> {
        let cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        [
            CacheKeyType::Image,
            CacheKeyType::Registry,
            CacheKeyType::Global,
        ]
        .into_iter()
        .filter_map(|kind| cache.get(&cache_key(kind, repository, account)))
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

/// `account` is [`Given::cache_key`].
fn cache_key(kind: CacheKeyType, repository: &str, account: &str) -> String {
    let of = match kind {
        CacheKeyType::Image => format!("image:{repository}"),
        CacheKeyType::Registry => {
            let registry = repository.split('/').next().unwrap_or_default();
            format!("registry:{registry}")
        }
        CacheKeyType::Global => "global".to_owned(),
    };
    match account {
        "" => of,
        account => format!("{of} {account}"),
    }
}

#[cfg(test)]
#[path = "credentials_tests.rs"]
mod tests;
