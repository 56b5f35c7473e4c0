//! Who the node is to the API server: found at start, watched on disk, asked for and renewed.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kube::config::Cluster;
use rand::Rng;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::csr;
use super::failure::pause;
use super::kubeconfig::{Life, Loaded, Seen, date, fingerprint, load};
use super::transport::{Transport, explain};
use super::{ApiError, ApiSettings, connector};
use crate::types::blocking;
use crate::types::time::Clock;

/// How often the files are looked at.
const LOOK: Duration = Duration::from_secs(10);

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
    /// The exec plugin is to be run.
    plugin_due: bool,
    /// When the certificate is to be renewed, in seconds since 1970.
    renewal: Option<i64>,
    failures: u32,
    /// Nothing is asked for before.
    not_before: Instant,
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
    /// When neither the kubeconfig nor the bootstrap kubeconfig can be used.
    pub(super) async fn new(
        settings: ApiSettings,
        kubeconfig: PathBuf,
        transport: Arc<Transport>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, ApiError> {
        let mut credentials = Self {
            settings,
            kubeconfig,
            transport,
            clock,
            loaded: None,
            seen: Vec::new(),
            plugin_due: false,
            renewal: None,
            failures: 0,
            not_before: Instant::now(),
        };
        match credentials.read().await {
            Ok(loaded) => credentials.take(loaded).await?,
            Err(ApiError::Read { source, .. })
                if source.kind() == std::io::ErrorKind::NotFound
                    && credentials.settings.bootstrap_kubeconfig.is_some() => {}
            Err(error) => return Err(error),
        }
        if credentials.loaded.is_none() {
            // It has to be of use; the server need not answer yet. When there is a kubeconfig, however expired,
            // the bootstrap file may be gone: the agent starts without the server then.
            credentials.read_bootstrap().await?;
        }
        Ok(credentials)
    }

    /// Bootstraps, renews and exchanges until `token` is cancelled. What fails is told and tried again.
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
        let watch = self.loaded.as_ref().is_some_and(has_plugin) && !self.plugin_due;
        let refused = tokio::select! {
            // Cancel-safe both.
            () = tokio::time::sleep(LOOK) => false,
            // What the plugin gave may have run out.
            () = self.transport.refused(), if watch => true,
        };
        self.plugin_due |= refused;
    }

    /// Does what is due.
    async fn step(&mut self) {
        if let Err(error) = self.reread().await {
            tracing::warn!(
                error = explain(&error, &self.kubeconfig.display().to_string(), self.now()),
                "cannot use the kubeconfig that has changed, going on with what there was"
            );
        }
        if Instant::now() < self.not_before {
            return;
        }
        let result = if self.bootstraps() {
            self.bootstrap().await
        } else if self.renewal.is_some_and(|at| self.now() >= at) {
            let renewed = self.renew().await;
            if renewed.is_err() {
                self.transport.renewal_failed();
            }
            renewed
        } else if self.plugin_due {
            self.use_plugin().await
        } else {
            return;
        };
        // A plugin that is asked again at once says the same again.
        let mut wait = LOOK;
        match result {
            Ok(()) => self.failures = 0,
            Err(error) => {
                self.failures += 1;
                wait = pause(self.failures, AGAIN.0, AGAIN.1).max(LOOK);
                tracing::error!(
                    error = explain(&error, &self.kubeconfig.display().to_string(), self.now()),
                    again_in_seconds = wait.as_secs(),
                    "the node has no good credentials"
                );
            }
        }
        self.not_before = Instant::now() + wait;
    }

    /// Whether the node has to be introduced first.
    fn bootstraps(&self) -> bool {
        self.settings.bootstrap_kubeconfig.is_some()
            && match &self.loaded {
                None => true,
                Some(loaded) => loaded.life.is_some_and(|life| life.expired(self.now())),
            }
    }

    async fn read(&self) -> Result<Loaded, ApiError> {
        let path = self.kubeconfig.clone();
        let newer = self
            .settings
            .rotate_certificates
            .then(|| csr::Purpose::Client.current(&self.settings.cert_dir));
        run(move || load(&path, newer.as_deref())).await
    }

    async fn read_bootstrap(&self) -> Result<Loaded, ApiError> {
        match self.settings.bootstrap_kubeconfig.clone() {
            Some(path) => run(move || load(&path, None)).await,
            None => Err(ApiError::Interrupted),
        }
    }

    /// What the credentials' files look like now.
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
        match self.read().await {
            Ok(loaded) => self.take(loaded).await,
            // It comes with the bootstrap.
            Err(ApiError::Read { .. }) if self.loaded.is_none() => Ok(()),
            Err(error) => Err(error),
        }
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

    /// Runs the exec plugin and uses what it gives.
    async fn use_plugin(&mut self) -> Result<(), ApiError> {
        if let Some(loaded) = self.loaded.clone() {
            self.install(loaded).await?;
        }
        self.plugin_due = false;
        Ok(())
    }

    /// Uses `loaded`, unless a plugin must be run for that, which may take long.
    async fn take(&mut self, loaded: Loaded) -> Result<(), ApiError> {
        let now = self.now();
        if let Some(complaint) = loaded.life.and_then(|life| life.complaint(now)) {
            tracing::error!(
                kubeconfig = loaded.names,
                problem = complaint,
                "the node's client certificate is not good"
            );
        }
        let files = loaded.files.clone();
        self.seen = run(move || Ok(fingerprint(&files))).await?;
        self.renewal = loaded
            .life
            .filter(|_| self.settings.rotate_certificates)
            .map(renewal);
        self.loaded = Some(loaded.clone());
        self.plugin_due = has_plugin(&loaded);
        if self.plugin_due {
            return Ok(());
        }
        self.install(loaded).await
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
        .await
    }

    /// Asks for the first certificate as the bootstrap user and writes the kubeconfig.
    async fn bootstrap(&mut self) -> Result<(), ApiError> {
        let bootstrap = self.read_bootstrap().await?;
        tracing::info!(
            bootstrap = bootstrap.names,
            node = self.settings.node_name,
            "asking for a client certificate"
        );
        let open = CancellationToken::new();
        let _open = open.clone().drop_guard();
        let (config, names) = (bootstrap.config.clone(), bootstrap.names.clone());
        let client = run(move || {
            connector::build(&config, &open).map_err(|source| ApiError::Client {
                names,
                source: Box::new(source),
            })
        })
        .await?;
        let Some(path) = self.obtain(&client).await? else {
            return Ok(());
        };
        let (kubeconfig, cluster) = (self.kubeconfig.clone(), bootstrap.cluster);
        let identity = csr::Purpose::Client.current(&self.settings.cert_dir);
        run(move || write_kubeconfig(&kubeconfig, &cluster, &identity)).await?;
        tracing::info!(certificate = %path.display(), kubeconfig = %self.kubeconfig.display(), "the node has its client certificate");
        let loaded = self.read().await?;
        self.take(loaded).await
    }

    /// Replaces the certificate by its own rights.
    async fn renew(&mut self) -> Result<(), ApiError> {
        tracing::info!(
            node = self.settings.node_name,
            "renewing the client certificate"
        );
        let client = self.transport.client();
        let Some(path) = self.obtain(&client).await? else {
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

    /// `None` when other credentials have come meanwhile.
    async fn obtain(&self, client: &kube::Client) -> Result<Option<PathBuf>, ApiError> {
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
        }
    }
}

fn has_plugin(loaded: &Loaded) -> bool {
    loaded.config.auth_info.exec.is_some()
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
