//! Gets a certificate for a node that has no valid one: with the bootstrap kubeconfig, or else with the lifeline.
//! [`crate::core::credentials`] decides the next step.
//!
//! Both are tried in rounds: a round ends when one of them has given a certificate, or none is left. A file of theirs
//! that changes begins another round at once.

use std::error::Error as StdError;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::super::connector::{self, Bearer};
use super::super::csr;
use super::super::failure::pause;
use super::super::kubeconfig::{Loaded, Seen, date, fingerprint, load};
use super::super::transport::explain;
use super::super::{ApiError, ApiSettings, Reachability};
use super::{AGAIN, Credentials, LOOK, WAITING, run, write_kubeconfig};
use crate::core::credentials::{
    Client, Next, Situation, Source, Time, Tried, Trouble, Validity, next, not_yet,
};
use crate::types::time::Stamp;
use crate::types::{Event, EventType};

/// Time that a source has to answer before the other one is tried, and before the delay is reported.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two times that the same trouble is logged and emitted as an event.
const SAY_AGAIN: Duration = Duration::from_secs(3600);
/// Time that a clock that is wrong after a boot has to be set before that is logged.
const SET_CLOCK: Duration = Duration::from_secs(60);
/// Interval of checks of a lifeline that is not needed.
const CHECK: Duration = Duration::from_secs(86_400);
/// Time before its expiry at which a lifeline should be replaced, in seconds.
const LIFELINE_MARGIN: i64 = 30 * 86_400;

/// Source of credentials for requesting the node's certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Introducer {
    Bootstrap,
    Lifeline,
}

impl Introducer {
    /// Returns the key of the log back-off.
    const fn asking(self) -> &'static str {
        match self {
            Self::Bootstrap => "asking by the bootstrap kubeconfig",
            Self::Lifeline => "asking by the lifeline",
        }
    }
}

/// State of a source in this round.
#[derive(Debug, Default)]
struct Attempt {
    path: Option<PathBuf>,
    source: Source,
    /// Error of its last try.
    why: String,
}

impl Attempt {
    fn new(path: Option<PathBuf>) -> Self {
        let mut attempt = Self {
            path,
            ..Self::default()
        };
        attempt.begin();
        attempt
    }

    fn begin(&mut self) {
        self.source = match self.path {
            Some(_) => Source::Ready,
            None => Source::NotConfigured,
        };
    }

    fn tried(&self) -> Option<Tried> {
        let path = self.path.as_ref()?.display().to_string();
        Some(Tried {
            path,
            why: self.why.clone(),
        })
    }
}

/// State of both sources, and the last message about their failures.
#[derive(Debug, Default)]
pub(super) struct Introduction {
    bootstrap: Attempt,
    lifeline: Attempt,
    /// Fingerprints of their files; `None` before the first poll.
    seen: Option<Seen>,
    /// Source whose request is not answered yet.
    pending: Option<Introducer>,
    /// Last message, without its variable parts, and its time.
    said: Option<(String, Stamp)>,
    /// Time of the last check of the lifeline.
    checked: Option<Stamp>,
    /// Start of the wait for the certificate to become valid.
    early: Option<Stamp>,
}

impl Introduction {
    pub(super) fn new(settings: &ApiSettings) -> Self {
        let lifeline = settings.lifeline.as_ref();
        Self {
            bootstrap: Attempt::new(settings.bootstrap_kubeconfig.clone()),
            lifeline: Attempt::new(lifeline.map(|lifeline| lifeline.path().to_owned())),
            ..Self::default()
        }
    }

    fn begin_round(&mut self) {
        self.bootstrap.begin();
        self.lifeline.begin();
    }

    fn of(&mut self, who: Introducer) -> &mut Attempt {
        match who {
            Introducer::Bootstrap => &mut self.bootstrap,
            Introducer::Lifeline => &mut self.lifeline,
        }
    }

    fn files(&self) -> Vec<PathBuf> {
        let paths = [&self.bootstrap.path, &self.lifeline.path];
        paths.into_iter().flatten().cloned().collect()
    }
}

/// Outcome of a request for a certificate.
enum Asked {
    /// The certificate is in use.
    Taken,
    /// Nobody needs it any more: others were put there, or the clock was set.
    Needless,
    /// Neither certificate nor refusal came within [`PATIENCE`].
    Silent,
}

impl Credentials {
    fn time(&self) -> Time {
        Time {
            own: self.now(),
            server: self.transport.server_now(),
        }
    }

    pub(super) fn situation(&self) -> Situation {
        let client = match &self.loaded {
            None => Client::Nobody,
            Some(loaded) => (loaded.life).map_or(Client::Uncertified, |life| {
                Client::Certified(Validity::from(life))
            }),
        };
        Situation {
            time: self.time(),
            client,
            renewal: self.renewal,
            bootstrap: self.introduction.bootstrap.source,
            lifeline: self.introduction.lifeline.source,
        }
    }

    /// Returns whether the node's own certificate is missing or not valid.
    fn needs_introduction(&self) -> bool {
        let asked = Situation {
            bootstrap: Source::Ready,
            ..self.situation()
        };
        next(&asked) == Next::Bootstrap
    }

    /// Returns whether no certificate is to be requested. If so, pauses and earlier messages no longer count.
    pub(super) fn asks_nobody(&self) -> bool {
        matches!(next(&self.situation()), Next::Use | Next::WaitForClock)
    }

    /// Begins another round when a file of the introducers has changed, and looks after the lifeline.
    pub(super) async fn look_at_introducers(&mut self) {
        let files = self.introduction.files();
        if files.is_empty() {
            return;
        }
        let Ok(seen) = run(move || Ok(fingerprint(&files))).await else {
            return;
        };
        let before = self.introduction.seen.replace(seen);
        if before.is_some() && before != self.introduction.seen {
            self.introduction.begin_round();
            self.introduction.checked = None;
            self.failures = 0;
            self.not_before = Instant::now();
        }
        self.check_lifeline().await;
    }

    /// Warns of a lifeline that would be of no use: whoever needs it is too late to hear of it.
    async fn check_lifeline(&mut self) {
        let Some(lifeline) = self.settings.lifeline.clone() else {
            return;
        };
        let stamp = self.clock.now();
        let checked = self.introduction.checked;
        if checked.is_some_and(|at| stamp.since(at) < CHECK) {
            return;
        }
        self.introduction.checked = Some(stamp);
        let path = lifeline.path().display().to_string();
        let (node, now) = (self.settings.node_name.clone(), self.time().judge());
        match run(move || lifeline.load(&node)).await {
            Ok(loaded) => {
                let until = loaded.life.map_or(0, |life| life.until);
                if until.saturating_sub(LIFELINE_MARGIN) <= now {
                    let (until, now) = (date(until), date(now));
                    tracing::warn!(
                        lifeline = path,
                        until,
                        now,
                        "the lifeline expires soon: replace it"
                    );
                }
            }
            Err(error) => tracing::warn!(
                lifeline = path,
                error = reason(&error, now),
                "cannot use the lifeline: after a long time off, the node needs manual recovery"
            ),
        }
    }

    /// Goes on as the pure decision says, until there is nothing to do at once.
    pub(super) async fn introduce_or_renew(&mut self) {
        loop {
            match next(&self.situation()) {
                Next::Use => {
                    self.failures = 0;
                    return self.settled();
                }
                Next::WaitForClock => return self.wait_for_clock(),
                Next::Renew => {
                    self.settled();
                    return self.renew_now().await;
                }
                Next::Bootstrap => {
                    if self.introduce(Introducer::Bootstrap).await {
                        return;
                    }
                }
                Next::Lifeline => {
                    if self.introduce(Introducer::Lifeline).await {
                        return;
                    }
                }
                Next::Again => return self.again(),
                Next::Stuck => return self.stuck(),
            }
        }
    }

    /// There is nothing to say any more.
    fn settled(&mut self) {
        self.introduction.said = None;
        self.introduction.early = None;
        self.introduction.begin_round();
        for who in [Introducer::Bootstrap, Introducer::Lifeline] {
            self.pace.over(who.asking());
        }
        self.standing.set_trouble(None);
    }

    fn wait_for_clock(&mut self) {
        let Some(life) = self.loaded.as_ref().and_then(|loaded| loaded.life) else {
            return;
        };
        let text = not_yet(life.into(), self.time());
        let now = self.clock.now();
        let since = *self.introduction.early.get_or_insert(now);
        match now.since(since) < SET_CLOCK {
            true => self.standing.set_trouble(Some(text)),
            false => self.say("clock".to_owned(), text),
        }
    }

    /// Tries all of them again: soon when the server is away, later when it leaves requests unanswered.
    fn again(&mut self) {
        let mut wait = LOOK;
        if self.transport.reachability() == Reachability::Up {
            self.failures += 1;
            wait = pause(self.failures, AGAIN.0, AGAIN.1).max(LOOK);
        }
        let tried = [&self.introduction.bootstrap, &self.introduction.lifeline];
        let tried = tried.into_iter().filter_map(|attempt| attempt.tried());
        let tried: Vec<_> = tried.map(|tried| tried.path).collect();
        let text = self.waiting(&tried.join(" and "));
        self.standing.set_trouble(Some(text));
        self.introduction.begin_round();
        self.not_before = Instant::now() + wait;
    }

    /// Says what to do, and tries all of them again later.
    fn stuck(&mut self) {
        if self.loaded.is_none()
            && self.introduction.bootstrap.path.is_none()
            && let Some(why) = &self.unusable
        {
            // That was logged when the file was read, which is done at each step.
            self.standing.set_trouble(Some(format!("{why}. {WAITING}")));
            return;
        }
        let now = self.now();
        let expired = self.loaded.as_ref().and_then(|loaded| loaded.life);
        let introduction = &self.introduction;
        let trouble = Trouble {
            node: self.settings.node_name.clone(),
            expired: expired.map(|life| life.until),
            time: self.time(),
            bootstrap: introduction.bootstrap.tried(),
            // Who never had a certificate has no use for it.
            lifeline: expired.and_then(|_| introduction.lifeline.tried()),
        };
        let key = format!(
            "{:?} {:?} {:?}",
            trouble.expired, trouble.bootstrap, trouble.lifeline
        );
        self.failures += 1;
        let wait = pause(self.failures, AGAIN.0, AGAIN.1).max(LOOK);
        tracing::debug!(
            now,
            again_in_seconds = wait.as_secs(),
            "no certificate in this round"
        );
        self.introduction.begin_round();
        self.not_before = Instant::now() + wait;
        self.say(key, trouble.instructions());
    }

    /// Shows the trouble. Logs it and emits it as an event when it is another than before (`key`), and every hour.
    fn say(&mut self, key: String, text: String) {
        self.standing.set_trouble(Some(text.clone()));
        let now = self.clock.now();
        let said = self.introduction.said.as_ref();
        if said.is_some_and(|(said, at)| *said == key && now.since(*at) < SAY_AGAIN) {
            return;
        }
        self.introduction.said = Some((key, now));
        tracing::error!(problem = text, "the node has no valid credentials");
        if let Some(recorder) = &self.recorder {
            let event = Event::node(EventType::Warning, "NodeWithoutCredentials", text);
            recorder.record(event);
        }
    }

    /// Asks for a certificate. Returns whether that is all for now; else another introducer may be tried.
    async fn introduce(&mut self, who: Introducer) -> bool {
        match self.ask(who).await {
            Ok(Asked::Taken | Asked::Needless) => {
                self.failures = 0;
                self.introduction.begin_round();
                self.not_before = Instant::now() + LOOK;
                true
            }
            Ok(Asked::Silent) => {
                let attempt = self.introduction.of(who);
                attempt.source = Source::Silent;
                attempt.why = format!("no certificate and no refusal within {PATIENCE:?}");
                false
            }
            Err(error) => {
                let why = reason(&error, self.now());
                tracing::debug!(?who, why, "the request gave no certificate");
                let attempt = self.introduction.of(who);
                attempt.source = Source::Failed;
                attempt.why = why;
                false
            }
        }
    }

    async fn read_introducer(&self, who: Introducer) -> Result<Loaded, ApiError> {
        match (who, &self.settings.lifeline) {
            (Introducer::Lifeline, Some(lifeline)) => {
                let (lifeline, node) = (lifeline.clone(), self.settings.node_name.clone());
                let now = self.time().judge();
                run(move || {
                    let loaded = lifeline.load(&node)?;
                    match loaded.life {
                        Some(life) if life.expired(now) => Err(ApiError::Unusable {
                            problem: format!("it expired at {}", date(life.until)),
                            names: loaded.names,
                        }),
                        _ => Ok(loaded),
                    }
                })
                .await
            }
            _ => self.read_bootstrap().await,
        }
    }

    pub(super) async fn read_bootstrap(&self) -> Result<Loaded, ApiError> {
        match self.settings.bootstrap_kubeconfig.clone() {
            Some(path) => run(move || load(&path, None)).await,
            None => Err(ApiError::Interrupted),
        }
    }

    /// Asks for a certificate as `who`, and takes it into use.
    async fn ask(&mut self, who: Introducer) -> Result<Asked, ApiError> {
        let loaded = self.read_introducer(who).await?;
        let stamp = self.clock.now();
        if self.pace.is_due(who.asking(), &loaded.names, stamp) {
            tracing::info!(
                credentials = loaded.names,
                node = self.settings.node_name,
                "requesting a client certificate"
            );
        }
        self.warn_of_insecure(&loaded);
        let mut until = None;
        let loaded = match &loaded.plugin {
            None => loaded,
            Some(plugin) => {
                let given = plugin.run().await.map_err(|source| ApiError::Plugin {
                    names: loaded.names.clone(),
                    source: Box::new(source),
                })?;
                until = given.until;
                loaded.with(given)
            }
        };
        // A request counts for whoever made it: it is not taken up by somebody else.
        if self
            .introduction
            .pending
            .is_some_and(|before| before != who)
        {
            self.abandon().await?;
        }
        self.introduction.pending = Some(who);
        let open = CancellationToken::new();
        let _open = open.clone().drop_guard();
        let client = build(&loaded, open).await?;
        // With a plugin's credentials no longer than these last: they are asked for again then.
        let lasts = until.map_or(Duration::MAX, |until| {
            let seconds = u64::try_from(until.saturating_sub(self.now()));
            Duration::from_secs(seconds.unwrap_or(0)).max(LOOK)
        });
        let patience = lasts.min(PATIENCE);
        let others = self.other_is_ready(who);
        let path = {
            let obtaining = self.obtain(&client, true);
            tokio::pin!(obtaining);
            match tokio::time::timeout(patience, &mut obtaining).await {
                Ok(obtained) => obtained?,
                Err(_) if others => return Ok(Asked::Silent),
                Err(_) => {
                    self.standing.set_trouble(Some(self.waiting(&loaded.names)));
                    let rest = lasts.saturating_sub(patience);
                    let obtained = tokio::time::timeout(rest, obtaining).await;
                    obtained.unwrap_or(Ok(None))?
                }
            }
        };
        let Some(path) = path else {
            return Ok(Asked::Needless);
        };
        self.introduction.pending = None;
        self.keep(who, loaded).await?;
        tracing::info!(certificate = %path.display(), kubeconfig = %self.kubeconfig.display(), "the node has its client certificate");
        let loaded = self.read().await?;
        self.take(loaded).await?;
        self.settled();
        Ok(Asked::Taken)
    }

    /// Returns whether the other source may still be tried in this round.
    fn other_is_ready(&self, who: Introducer) -> bool {
        let mut situation = self.situation();
        match who {
            Introducer::Bootstrap => situation.bootstrap = Source::Failed,
            Introducer::Lifeline => situation.lifeline = Source::Failed,
        }
        matches!(
            next(&situation),
            Next::Bootstrap | Next::Lifeline | Next::Again
        )
    }

    /// Says that there is neither a certificate nor a refusal, and why as far as that is known: a wrong clock shows in
    /// the error of the handshake.
    fn waiting(&self, names: &str) -> String {
        let why = match self.transport.reachability() {
            Reachability::Down(why) => format!(" It does not: {why}"),
            Reachability::Up | Reachability::Untried => String::new(),
        };
        format!(
            "requested a client certificate with {names}, without an answer yet: does somebody approve the request \
             (`kubectl get csr`, `kubectl certificate approve NAME`), and does the API server answer?{why}"
        )
    }

    /// Forgets the request that is not answered yet.
    async fn abandon(&self) -> Result<(), ApiError> {
        let directory = self.settings.cert_dir.clone();
        run(move || {
            csr::abandon(&csr::Purpose::Client, &directory)
                .map_err(|source| ApiError::Certificate(Box::new(source)))
        })
        .await
    }

    /// Makes the kubeconfig name the new certificate. The cluster of the bootstrap kubeconfig goes into it; with a
    /// lifeline it keeps its own.
    async fn keep(&self, who: Introducer, introducer: Loaded) -> Result<(), ApiError> {
        let cluster = match (who, &self.loaded) {
            (Introducer::Lifeline, Some(_)) if self.settings.rotate_certificates => return Ok(()),
            (Introducer::Lifeline, Some(own)) => own.cluster.clone(),
            _ => introducer.cluster,
        };
        let kubeconfig = self.kubeconfig.clone();
        let identity = csr::Purpose::Client.current(&self.settings.cert_dir);
        run(move || write_kubeconfig(&kubeconfig, &cluster, &identity)).await
    }

    /// Waits until the own certificate does after all: the clock was set, or the server's became known.
    pub(super) async fn needless(&self) {
        loop {
            tokio::time::sleep(LOOK).await;
            if !self.needs_introduction() {
                return;
            }
        }
    }
}

async fn build(loaded: &Loaded, open: CancellationToken) -> Result<kube::Client, ApiError> {
    let (loaded, names) = (loaded.clone(), loaded.names.clone());
    run(move || {
        let bearer = Bearer::default();
        bearer.store(loaded.bearer.clone().map(Arc::new));
        connector::build(&loaded, &bearer, &open).map_err(|source| ApiError::Client {
            names,
            source: Box::new(source),
        })
    })
    .await
}

/// Returns the reason why there is no certificate: the server's answer, if there is one. Without the path, which is
/// shown beside it, and without parts that differ each time.
fn reason(error: &ApiError, now: i64) -> String {
    match error {
        ApiError::Read { source, .. } => return source.to_string(),
        ApiError::Parse { source, .. } => return format!("it does not parse: {source}"),
        ApiError::Unusable { problem, .. } => return problem.clone(),
        _ => {}
    }
    let mut cause: Option<&(dyn StdError + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(kube::Error::Api(status)) = error.downcast_ref() {
            return format!("refused ({}): {}", status.code, status.message);
        }
        cause = error.source();
    }
    let text = explain(error, "", now);
    let words = text
        .split(' ')
        .filter(|word| !word.starts_with("node-csr-"));
    words.collect::<Vec<_>>().join(" ")
}
