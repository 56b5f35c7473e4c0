//! Credentials of the node for the API server: finds them at the start, watches their files, requests and renews them.

mod introduction;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use kube::config::Cluster;
use rand::Rng;
use secrecy::ExposeSecret as _;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::introduction::Introduction;
use super::csr;
use super::failure::pause;
use super::kubeconfig::{Life, Loaded, Seen, date, fingerprint, load};
use super::plugin::{Given, Identity};
use super::transport::{Transport, explain};
use super::turns::Turns;
use super::{ApiError, ApiSettings, Standing};
use crate::types::pace::Pace;
use crate::types::time::Clock;
use crate::types::{Event, EventRecorder, EventType, blocking, causes};

/// Poll interval of the files.
const LOOK: Duration = Duration::from_secs(10);

/// Keys of the log back-off.
const PLUGIN: &str = "exec plugin";
const KUBECONFIG: &str = "kubeconfig";

/// Consequence of a kubeconfig that cannot be used, and the remedy.
const WAITING: &str = "pods that are known run on. Put there what is missing, or correct it: it is used within 10 s, no \
                       restart is needed";

/// Between two attempts that the server has answered with a no.
const AGAIN: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(600));

/// Keeps the credentials of an [`super::ApiClient`] good. Run it as long as the client is used.
pub struct Credentials {
    settings: ApiSettings,
    kubeconfig: PathBuf,
    transport: Arc<Transport>,
    clock: Arc<dyn Clock>,
    loaded: Option<Loaded>,
    seen: Seen,
    /// Error of the kubeconfig as it is now.
    unusable: Option<String>,
    /// Fingerprints of the files whose credentials are in use; empty if none are.
    taken: Seen,
    /// Schedule of the exec plugin.
    turns: Turns,
    /// The client certificate of the plugin with which connections are made now.
    installed: Option<Option<Identity>>,
    /// The credentials of files that were refused and looked for again.
    looked_for: u64,
    /// Log back-off of a plugin that fails.
    pace: Pace,
    /// It was said that the server is not verified.
    insecure_told: bool,
    /// Time at which the certificate is renewed, in seconds since 1970.
    renewal: Option<i64>,
    failures: u32,
    /// Nothing is asked for before.
    not_before: Instant,
    introduction: Introduction,
    standing: Standing,
    recorder: Option<Arc<dyn EventRecorder>>,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials")
            .field("kubeconfig", &self.kubeconfig)
            .finish_non_exhaustive()
    }
}

impl Credentials {
    /// Reads what there is.
    ///
    /// # Errors
    /// When neither the kubeconfig nor the bootstrap kubeconfig can be used, unless the settings say to wait for them.
    pub(super) async fn new(
        settings: ApiSettings,
        kubeconfig: PathBuf,
        transport: Arc<Transport>,
        standing: Standing,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, ApiError> {
        let mut credentials = Self {
            introduction: Introduction::new(&settings),
            settings,
            kubeconfig,
            transport,
            clock,
            loaded: None,
            seen: Vec::new(),
            unusable: None,
            taken: Vec::new(),
            turns: Turns::none(),
            installed: None,
            looked_for: 0,
            pace: Pace::default(),
            insecure_told: false,
            renewal: None,
            failures: 0,
            not_before: Instant::now(),
            standing,
            recorder: None,
        };
        match credentials.begin().await {
            // The first step reads it again, and says what is wrong.
            Err(_) if credentials.settings.waits_for_files => credentials.forget(),
            begun => begun?,
        }
        Ok(credentials)
    }

    /// Uses what there is at the start.
    async fn begin(&mut self) -> Result<(), ApiError> {
        match self.read().await {
            Ok(loaded) => self.take(loaded).await?,
            Err(error) if self.comes_with_bootstrap(&error) => {}
            Err(error) => return Err(error),
        }
        if self.loaded.is_none() {
            // It has to be of use; the server need not answer yet. When there is a kubeconfig, however expired,
            // the bootstrap file may be gone: the agent starts without the server then.
            self.read_bootstrap().await?;
        }
        Ok(())
    }

    /// Returns true for the error of a kubeconfig that is only not made yet.
    fn comes_with_bootstrap(&self, error: &ApiError) -> bool {
        let is_missing = matches!(error, ApiError::Read { source, .. } if source.kind() == std::io::ErrorKind::NotFound);
        is_missing && self.loaded.is_none() && self.settings.bootstrap_kubeconfig.is_some()
    }

    /// Goes back to before a kubeconfig that cannot be used was read. It is read again at the next step.
    fn forget(&mut self) {
        self.loaded = None;
        self.renewal = None;
        self.seen.clear();
    }

    /// Has events of the node recorded, too, when it needs manual recovery.
    #[must_use]
    pub fn recording(mut self, recorder: Arc<dyn EventRecorder>) -> Self {
        self.recorder = Some(recorder);
        self
    }

    /// Bootstraps, renews and exchanges until `token` is cancelled. Failures are logged and retried.
    pub async fn run(mut self, token: CancellationToken) {
        let work = async {
            loop {
                self.step().await;
                self.pause().await;
            }
        };
        let _ended: Option<()> = token.run_until_cancelled(work).await;
    }

    fn now(&self) -> i64 {
        self.clock.now().wall_ms.div_euclid(1000)
    }

    /// Until there may be something to do.
    async fn pause(&mut self) {
        let plugin = self.loaded.as_ref().is_some_and(has_plugin);
        let watch = match plugin {
            true => !self.turns.wanted(),
            false => self.looked_for != self.transport.serial(),
        };
        let rest = LOOK.min(self.turns.rest(Instant::now(), self.now()));
        tokio::select! {
            // Cancel-safe both.
            () = tokio::time::sleep(rest) => {}
            () = self.transport.refused(), if watch => match plugin {
                true => self.turns.refused(Instant::now()),
                // Others may be there already.
                false => self.looked_for = self.transport.serial(),
            },
        }
    }

    /// Does what is due.
    pub(super) async fn step(&mut self) {
        if let Err(error) = self.reread().await {
            self.cannot_use(&error);
        }
        if self.turns.due(Instant::now(), self.now()) {
            self.use_plugin().await;
        }
        self.look_at_introducers().await;
        if Instant::now() >= self.not_before || self.asks_nobody() {
            self.introduce_or_renew().await;
        }
    }

    /// Logs that the kubeconfig cannot be used as it is, with back-off.
    fn cannot_use(&mut self, error: &ApiError) {
        let why = causes(error);
        let is_due = self.pace.is_due(KUBECONFIG, &why, self.clock.now());
        if self.transport.has_credentials() {
            if is_due {
                tracing::warn!(
                    error = why,
                    "cannot use the changed kubeconfig, keeping the previous one"
                );
            }
        } else {
            // Another kubeconfig may name other files.
            self.forget();
            if is_due {
                tracing::warn!(
                    error = why,
                    again_in_seconds = LOOK.as_secs(),
                    "no API server yet: {WAITING}"
                );
                if let Some(recorder) = &self.recorder {
                    let text = format!("{why}. No API server yet: {WAITING}");
                    let event = Event::node(EventType::Warning, "NodeWithoutCredentials", text);
                    recorder.record(event);
                }
            }
        }
        self.unusable = Some(why);
    }

    /// Renews the certificate, and says so when that fails.
    async fn renew_now(&mut self) {
        let mut wait = LOOK;
        match self.renew().await {
            Ok(()) => self.failures = 0,
            Err(error) => {
                self.transport.renewal_failed();
                self.failures += 1;
                wait = pause(self.failures, AGAIN.0, AGAIN.1).max(LOOK);
                tracing::error!(
                    error = explain(&error, &self.kubeconfig.display().to_string(), self.now()),
                    again_in_seconds = wait.as_secs(),
                    "cannot renew the client certificate yet"
                );
            }
        }
        self.not_before = Instant::now() + wait;
    }

    async fn read(&self) -> Result<Loaded, ApiError> {
        let path = self.kubeconfig.clone();
        let newer = self
            .settings
            .rotate_certificates
            .then(|| csr::Purpose::Client.current(&self.settings.cert_dir));
        run(move || load(&path, newer.as_deref())).await
    }

    /// Returns the current fingerprints of the credentials' files.
    async fn look(&self) -> Result<Seen, ApiError> {
        let files = match &self.loaded {
            Some(loaded) => loaded.files.clone(),
            None => vec![self.kubeconfig.clone()],
        };
        run(move || Ok(fingerprint(&files))).await
    }

    /// Takes the credentials over when their files have changed.
    async fn reread(&mut self) -> Result<(), ApiError> {
        let seen = self.look().await?;
        if seen == self.seen {
            return Ok(());
        }
        self.seen = seen;
        let loaded = match self.read().await {
            Ok(loaded) => loaded,
            Err(error) if self.comes_with_bootstrap(&error) => return Ok(()),
            Err(error) => {
                // What it names may come later: it is read again at the next look.
                self.seen.clear();
                return Err(error);
            }
        };
        self.seen = loaded.seen.clone();
        if self.is_token_only(&loaded) {
            self.transport.exchange(loaded.bearer.clone());
            self.taken = self.seen.clone();
            self.loaded = Some(loaded);
        } else {
            self.take(loaded).await?;
        }
        self.unusable = None;
        self.pace.over(KUBECONFIG);
        Ok(())
    }

    /// Returns whether, since the credentials were loaded, only the file with the token has changed.
    fn is_token_only(&self, loaded: &Loaded) -> bool {
        let Some(old) = &self.loaded else {
            return false;
        };
        let others = |seen: &Seen| {
            let kept = seen.iter().enumerate();
            kept.filter(|(index, _)| Some(*index) != old.token_file)
                .map(|(_, file)| *file)
                .collect::<Vec<_>>()
        };
        old.token_file.is_some()
            && !self.taken.is_empty()
            && old.files == loaded.files
            // Without one, the token is that of the kubeconfig.
            && old.bearer.is_some()
            && loaded.bearer.is_some()
            && others(&self.taken) == others(&self.seen)
    }

    /// Returns when the credentials' files have changed.
    async fn changed(&self) {
        loop {
            tokio::time::sleep(LOOK).await;
            if self.look().await.is_ok_and(|seen| seen != self.seen) {
                return;
            }
        }
    }

    /// Runs the exec plugin and uses what it gives. Logs failures, with back-off.
    async fn use_plugin(&mut self) {
        let Some((loaded, plugin)) = self
            .loaded
            .as_ref()
            .and_then(|loaded| Some((loaded.clone(), loaded.plugin.clone()?)))
        else {
            self.turns = Turns::none();
            return;
        };
        let given = match plugin.run().await {
            Ok(given) => given,
            Err(error) => {
                let wait = self.turns.failed(Instant::now());
                if self.pace.is_due(PLUGIN, &error.what, self.clock.now()) {
                    tracing::error!(
                        error = explain(&error, &loaded.names, self.now()),
                        kubeconfig = loaded.names,
                        again_in_seconds = wait.as_secs(),
                        "the node has no new credentials: its exec plugin fails"
                    );
                }
                return;
            }
        };
        let until = given.until;
        if let Err(error) = self.use_given(&loaded, given).await {
            let wait = self.turns.failed(Instant::now());
            let what = explain(&error, &loaded.names, self.now());
            if self.pace.is_due(PLUGIN, &what, self.clock.now()) {
                tracing::error!(
                    error = what,
                    again_in_seconds = wait.as_secs(),
                    "cannot use the credentials from the exec plugin"
                );
            }
            return;
        }
        let now = self.now();
        self.turns.gave(Instant::now(), now, until);
        if let Some(until) = until.filter(|until| *until <= now) {
            let what = "what the exec plugin gives has expired; is this machine's clock wrong?";
            if self.pace.is_due(PLUGIN, what, self.clock.now()) {
                let (until, now) = (date(until), date(now));
                tracing::warn!(kubeconfig = loaded.names, until, now, "{what}");
            }
            return;
        }
        self.pace.over(PLUGIN);
    }

    /// Makes connections with another certificate; another token goes over those that there are.
    async fn use_given(&mut self, loaded: &Loaded, given: Given) -> Result<(), ApiError> {
        if self.installed.as_ref() == Some(&given.identity) {
            self.transport.exchange(given.bearer);
            return Ok(());
        }
        let identity = given.identity.clone();
        self.install(loaded.with(given)).await?;
        self.installed = Some(identity);
        Ok(())
    }

    /// Uses `loaded`, unless a plugin must be run for that, which may take long.
    async fn take(&mut self, loaded: Loaded) -> Result<(), ApiError> {
        let now = self.now();
        if let Some(complaint) = loaded.life.and_then(|life| life.complaint(now)) {
            tracing::error!(
                kubeconfig = loaded.names,
                problem = complaint,
                "the node's client certificate is not valid"
            );
        }
        self.seen = loaded.seen.clone();
        self.taken.clear();
        self.renewal = loaded
            .life
            .filter(|_| self.settings.rotate_certificates)
            .map(renewal);
        self.loaded = Some(loaded.clone());
        self.installed = None;
        self.warn_of_insecure(&loaded);
        if has_plugin(&loaded) {
            self.turns = Turns::first();
            return Ok(());
        }
        self.turns = Turns::none();
        self.install(loaded.clone()).await?;
        self.taken = self.seen.clone();
        if self.settings.rotate_certificates {
            self.keep_embedded(&loaded).await;
        }
        Ok(())
    }

    /// Keeps the certificate and key that the kubeconfig embeds where renewed ones are kept: kubeadm makes the
    /// kubeconfig of a control plane name that file once it is there, and a kubelet that comes back finds in it
    /// what was renewed since. A failure is logged: the kubeconfig's own pair is in use.
    async fn keep_embedded(&self, loaded: &Loaded) {
        let auth = &loaded.config.auth_info;
        let (Some(certificate), Some(key)) = (
            auth.client_certificate_data.clone(),
            auth.client_key_data.clone(),
        ) else {
            return;
        };
        let now = self.now();
        if loaded.life.is_none_or(|life| life.expired(now)) {
            return;
        }
        let directory = self.settings.cert_dir.clone();
        let kept = run(move || {
            let decode = |data: &str| {
                let decoded = base64::engine::general_purpose::STANDARD.decode(data.trim());
                decoded.ok()
            };
            let key = decode(key.expose_secret()).and_then(|key| String::from_utf8(key).ok());
            let (Some(certificate), Some(key)) = (decode(&certificate), key) else {
                // The client was made of them, so they can be read.
                return Ok(None);
            };
            csr::adopt(&csr::Purpose::Client, &directory, &certificate, &key, now)
                .map_err(|source| ApiError::Certificate(Box::new(source)))
        });
        match kept.await {
            Ok(Some(path)) => tracing::info!(
                certificate = %path.display(),
                kubeconfig = loaded.names,
                "stored the client certificate of the kubeconfig beside renewed ones"
            ),
            Ok(None) => {}
            Err(error) => tracing::warn!(
                error = explain(&error, &loaded.names, now),
                kubeconfig = loaded.names,
                "cannot store the client certificate of the kubeconfig beside renewed ones"
            ),
        }
    }

    /// Says once that anybody may be the API server.
    fn warn_of_insecure(&mut self, loaded: &Loaded) {
        let insecure = loaded.config.accept_invalid_certs;
        if insecure && !self.insecure_told {
            tracing::warn!(
                kubeconfig = loaded.names,
                "the API server's certificate is not verified (insecure-skip-tls-verify), so anybody on the network \
                 path can pose as the server; set certificate-authority"
            );
        }
        self.insecure_told = insecure;
    }

    async fn install(&self, loaded: Loaded) -> Result<(), ApiError> {
        let transport = self.transport.clone();
        run(move || {
            transport
                .install(&loaded)
                .map_err(|source| ApiError::Client {
                    names: loaded.names.clone(),
                    source: Box::new(source),
                })
        })
        .await?;
        self.standing.taken();
        Ok(())
    }

    /// Replaces the certificate by its own rights.
    async fn renew(&mut self) -> Result<(), ApiError> {
        tracing::info!(
            node = self.settings.node_name,
            "renewing the client certificate"
        );
        let client = self.transport.client();
        let Some(path) = self.obtain(&client, false).await? else {
            return Ok(());
        };
        let loaded = self.read().await?;
        let until = loaded.life.map_or(0, |life| life.until);
        self.take(loaded).await?;
        tracing::info!(
            certificate = %path.display(),
            until = date(until),
            "the client certificate is renewed"
        );
        Ok(())
    }

    /// Gets a certificate. `None` when other credentials have come meanwhile or, for one who is introduced, when the
    /// own ones do after all.
    async fn obtain(
        &self,
        client: &kube::Client,
        introduced: bool,
    ) -> Result<Option<PathBuf>, ApiError> {
        let clock = self.clock.clone();
        let obtained = csr::obtain(
            client,
            &csr::Purpose::Client,
            &self.settings.node_name,
            &self.settings.cert_dir,
            move || clock.now().wall_ms.div_euclid(1000),
        );
        tokio::select! {
            // Cancel-safe: the pending request is taken up again.
            obtained = obtained => {
                let failed = |source| ApiError::Certificate(Box::new(source));
                obtained.map(Some).map_err(failed)
            }
            // Cancel-safe: looks only.
            () = self.changed() => Ok(None),
            // Cancel-safe: looks only.
            () = self.needless(), if introduced => Ok(None),
        }
    }
}

fn has_plugin(loaded: &Loaded) -> bool {
    loaded.plugin.is_some()
}

/// A random moment between 70 and 90 % of `life`, as upstream.
fn renewal(life: Life) -> i64 {
    let length = life.until.saturating_sub(life.from).max(0);
    life.from + length / 1000 * rand::rng().random_range(700..=900) + length % 1000 * 8 / 10
}

async fn run<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    blocking::run(work)
        .await
        .unwrap_or(Err(ApiError::Interrupted))
}

/// Writes the kubeconfig of a node whose certificate and key are in `identity`.
fn write_kubeconfig(
    path: &std::path::Path,
    cluster: &Cluster,
    identity: &std::path::Path,
) -> Result<(), ApiError> {
    let text = serde_json::json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "default-cluster", "cluster": cluster }],
        "contexts": [{
            "name": "default-context",
            "context": { "cluster": "default-cluster", "namespace": "default", "user": "default-auth" },
        }],
        "current-context": "default-context",
        "users": [{
            "name": "default-auth",
            "user": { "client-certificate": identity, "client-key": identity },
        }],
    });
    let text = format!("{text:#}\n");
    csr::write_whole(path, text.as_bytes()).map_err(|source| ApiError::Write {
        path: path.to_owned(),
        source,
    })
}
