//! Authenticates and authorizes the clients of the kubelet's API.
//!
//! In: a request with its peer ([`super::listener::Peer`]). Out: the request with its [`User`] as an extension, or a
//! refusal: 401 if the client is not authenticated, 403 if the user is not authorized, 500 if the API server gave no
//! answer. Client certificates come first, then bearer tokens, then `system:anonymous` where that is allowed, as
//! upstream.
//!
//! Answers of the API server are cached (`cacheTTL`, `cacheAuthorizedTTL`, `cacheUnauthorizedTTL`), so that a short
//! outage has no effect. The cache is in memory only: a permission that survives a restart would outlive rights that
//! were revoked meanwhile.
//!
//! **Invariant:** no handler is reached without a decision on this very request.

mod attributes;
mod cache;
mod reviews;
#[cfg(test)]
mod tests;
mod x509;

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::http::header::{AUTHORIZATION, SEC_WEBSOCKET_PROTOCOL};
use axum::http::{HeaderMap, HeaderValue, Request, StatusCode};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use zeroize::Zeroizing;

use self::cache::{Cache, Keys};
use self::reviews::{Once, Reviewer, TokenFailure};
pub use self::x509::ClientCaError;
use self::x509::ClientCas;
use super::Shared;
use super::listener::Peer;
use crate::kubeletconfig::AuthorizationMode;
use crate::types::{Clock, Stamp};

/// Prefix of the WebSocket protocol that carries a token where a client cannot set headers: in a browser.
const TOKEN_PROTOCOL: &str = "base64url.bearer.authorization.k8s.io.";
/// Answers that are kept.
const TOKENS_KEPT: usize = 2048;
const DECISIONS_KEPT: usize = 8192;
/// Bad tokens one address may show at once, and how long it takes until it may show one more.
const BAD_TOKENS: u32 = 20;
const BAD_TOKEN_EVERY: Duration = Duration::from_secs(1);
/// Time for which a token that was valid is not delayed by invalid tokens from the same address.
const GOOD_KEPT: Duration = Duration::from_secs(24 * 3600);
/// Addresses that are watched for bad tokens.
const ADDRESSES_KEPT: usize = 1024;
/// Requests of one address that wait for a decision.
const WAITING: usize = 512;

/// Authenticated sender of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) groups: Vec<String>,
    pub(crate) extra: BTreeMap<String, Vec<String>>,
}

impl User {
    fn anonymous() -> Self {
        Self {
            name: "system:anonymous".to_owned(),
            uid: String::new(),
            groups: vec!["system:unauthenticated".to_owned()],
            extra: BTreeMap::new(),
        }
    }

    /// Upstream's `AuthenticatedGroupAdder`.
    fn authenticated(mut self) -> Self {
        const GROUPS: [&str; 2] = ["system:authenticated", "system:unauthenticated"];
        if self.name == "system:anonymous" {
            return self;
        }
        if !self
            .groups
            .iter()
            .any(|group| GROUPS.contains(&group.as_str()))
        {
            self.groups.push(GROUPS[0].to_owned());
        }
        self
    }
}

/// Reason why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// Nobody is known. With what an operator should know.
    Unauthorized(String),
    /// Too many bad tokens from there, or too many requests that wait for a decision.
    TooMany,
    /// The user may not.
    Forbidden(String),
    /// Nobody could say.
    Unanswered(String),
}

impl Refusal {
    /// For metrics.
    pub(super) const fn reason(&self) -> &'static str {
        match self {
            Self::Unauthorized(_) => "unauthorized",
            Self::TooMany => "too_many",
            Self::Forbidden(_) => "forbidden",
            Self::Unanswered(_) => "unanswered",
        }
    }

    /// For the log.
    pub(super) fn text(&self) -> &str {
        match self {
            Self::TooMany => "too many bad tokens, or undecided requests, from this address",
            Self::Unauthorized(text) | Self::Forbidden(text) | Self::Unanswered(text) => text,
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        match self {
            Self::Unauthorized(_) => (StatusCode::UNAUTHORIZED, "Unauthorized").into_response(),
            Self::TooMany => (
                StatusCode::TOO_MANY_REQUESTS,
                [("retry-after", "1")],
                "Too many requests",
            )
                .into_response(),
            Self::Forbidden(text) => (StatusCode::FORBIDDEN, text).into_response(),
            Self::Unanswered(text) => (StatusCode::INTERNAL_SERVER_ERROR, text).into_response(),
        }
    }
}

type TokenAnswer = Result<Option<Arc<User>>, TokenFailure>;

/// Decides.
pub(super) struct Auth {
    node_name: String,
    /// `--streaming-requires-create`.
    streams_create: bool,
    clock: Arc<dyn Clock>,
    cas: Option<Arc<ClientCas>>,
    anonymous: bool,
    keys: Keys,
    tokens: Option<Tokens>,
    decisions: Option<Decisions>,
    waiting: Waiting,
}

struct Tokens {
    reviewer: Arc<Reviewer>,
    ttl: Duration,
    cache: Arc<Cache<Option<Arc<User>>>>,
    once: Once<cache::Key, TokenAnswer>,
    bad: Arc<BadTokens>,
    /// Tokens that were good: many may share an address.
    good: Arc<Cache<()>>,
}

struct Decisions {
    /// `None`: there is nobody to ask, everything is refused.
    reviewer: Option<Arc<Reviewer>>,
    ttls: (Duration, Duration),
    cache: Arc<Cache<bool>>,
    once: Once<cache::Key, Result<bool, String>>,
}

impl Auth {
    /// As configured.
    pub(super) async fn open(node: &Shared) -> Self {
        let k = &node.config.kubelet;
        let cas = match k.authentication.client_ca_file.clone() {
            Some(path) => Some(Arc::new(ClientCas::open(path, &*node.clock).await)),
            None => None,
        };
        let reviewer = node.api.clone().map(|api| Arc::new(Reviewer::new(api)));
        let clock = Arc::clone(&node.clock);
        let tokens = reviewer.clone().filter(|_| k.authentication.webhook);
        let tokens = tokens.map(|reviewer| Tokens {
            reviewer,
            ttl: k.authentication.webhook_cache_ttl,
            cache: Arc::new(Cache::new(Arc::clone(&clock), TOKENS_KEPT)),
            once: Once::new(),
            bad: Arc::default(),
            good: Arc::new(Cache::new(Arc::clone(&clock), TOKENS_KEPT)),
        });
        let webhook = k.authorization.mode == AuthorizationMode::Webhook;
        let decisions = webhook.then(|| Decisions {
            reviewer,
            ttls: (
                k.authorization.cache_authorized_ttl,
                k.authorization.cache_unauthorized_ttl,
            ),
            cache: Arc::new(Cache::new(Arc::clone(&clock), DECISIONS_KEPT)),
            once: Once::new(),
        });
        Self {
            node_name: node.config.node_name.clone(),
            streams_create: node.config.streaming_requires_create,
            clock,
            cas,
            anonymous: k.authentication.anonymous,
            keys: Keys::new(),
            tokens,
            decisions,
            waiting: Waiting::default(),
        }
    }

    /// Keeps the CAs as their file says, for ever; it is looked at every `look`.
    pub(super) async fn watch(&self, look: Duration) {
        match &self.cas {
            Some(cas) => cas.watch(look, &*self.clock).await,
            None => std::future::pending().await,
        }
    }

    /// Returns the sender of `request`, if authorized. Removes the token from the request.
    pub(super) async fn admit(&self, request: &mut Request<Body>) -> Result<Arc<User>, Refusal> {
        let address = request
            .extensions()
            .get::<Peer>()
            .map(|peer| peer.address.ip());
        let _waiting = match address.map(|address| self.waiting.enter(address)) {
            Some(None) => return Err(Refusal::TooMany),
            waiting => waiting,
        };
        let user = self.authenticate(request).await?;
        let path = request.uri().path();
        let verb = attributes::verb(request.method(), path, self.streams_create);
        let subresources = attributes::subresources(path);
        self.authorize(&user, verb, subresources).await?;
        Ok(user)
    }

    async fn authenticate(&self, request: &mut Request<Body>) -> Result<Arc<User>, Refusal> {
        let mut problems = Vec::new();
        let peer = request.extensions().get::<Peer>().cloned();
        if let (Some(cas), Some(peer)) = (&self.cas, &peer) {
            match cas.user(&peer.certificates, self.clock.now()) {
                Ok(Some(user)) => {
                    // Whatever else it shows must not get further than this.
                    take_token(request.headers_mut());
                    return Ok(Arc::new(user.authenticated()));
                }
                Ok(None) => {}
                Err(problem) => problems.push(format!("client certificate: {problem}")),
            }
        }
        let token = take_token(request.headers_mut());
        if let (Some(tokens), Some(token)) = (&self.tokens, token) {
            let address = peer.map(|peer| peer.address.ip());
            match tokens
                .user(&self.keys, token, address, self.clock.now())
                .await
            {
                Ok(Some(user)) => return Ok(user),
                Ok(None) => problems.push("bearer token: not known".to_owned()),
                Err(TokenFailure::Invalid(problem) | TokenFailure::Unanswered(problem)) => {
                    problems.push(format!("bearer token: {problem}"));
                }
                Err(TokenFailure::TooMany) => return Err(Refusal::TooMany),
            }
        }
        if problems.is_empty() && self.anonymous {
            return Ok(Arc::new(User::anonymous()));
        }
        if problems.is_empty() {
            problems.push("no credentials that could be used".to_owned());
        }
        Err(Refusal::Unauthorized(problems.join("; ")))
    }

    async fn authorize(
        &self,
        user: &User,
        verb: &'static str,
        subresources: &'static [&'static str],
    ) -> Result<(), Refusal> {
        let Some(decisions) = &self.decisions else {
            return Ok(());
        };
        for &subresource in subresources {
            let asked = decisions.allowed(self, user, verb, subresource).await;
            match asked {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(problem) => {
                    return Err(Refusal::Unanswered(format!(
                        "Authorization error (user={}, verb={verb}, resource=nodes, subresource={subresource}): {problem}",
                        user.name
                    )));
                }
            }
        }
        Err(Refusal::Forbidden(format!(
            "Forbidden (user={}, verb={verb}, resource=nodes, subresource(s)=[{}])",
            user.name,
            subresources.join(" ")
        )))
    }
}

impl Tokens {
    async fn user(
        &self,
        keys: &Keys,
        token: Zeroizing<String>,
        address: Option<IpAddr>,
        now: Stamp,
    ) -> TokenAnswer {
        let key = keys.of([token.as_str()]);
        if let Some(known) = self.cache.get(&key) {
            return Ok(known);
        }
        let was_good = self.good.get(&key).is_some();
        if !was_good && address.is_some_and(|address| self.bad.exhausted(address, now)) {
            return Err(TokenFailure::TooMany);
        }
        let (reviewer, cache, ttl) = (
            Arc::clone(&self.reviewer),
            Arc::clone(&self.cache),
            self.ttl,
        );
        let (bad, good) = (Arc::clone(&self.bad), Arc::clone(&self.good));
        let question = async move {
            // Bad until it is known to be good: what is not answered yet counts too.
            if let Some(address) = address {
                bad.count(address, now);
            }
            let answer = reviewer.token(&token).await;
            if let (Some(address), Ok(Some(_)) | Err(TokenFailure::Unanswered(_))) =
                (address, &answer)
            {
                bad.forgive(address);
            }
            if matches!(answer, Ok(Some(_))) {
                good.put(key, (), GOOD_KEPT);
            }
            let answer = answer?.map(|user| Arc::new(user.authenticated()));
            cache.put(key, answer.clone(), ttl);
            Ok(answer)
        };
        self.once.ask(key, question).await
    }
}

impl Decisions {
    async fn allowed(
        &self,
        auth: &Auth,
        user: &User,
        verb: &'static str,
        subresource: &'static str,
    ) -> Result<bool, String> {
        let Some(reviewer) = &self.reviewer else {
            return Err("there is no API server to ask; give --kubeconfig".to_owned());
        };
        let who = (&user.name, &user.uid, &user.groups, &user.extra);
        let who = serde_json::to_string(&who).map_err(|error| error.to_string())?;
        let key = auth.keys.of([verb, subresource, &who]);
        if let Some(known) = self.cache.get(&key) {
            return Ok(known);
        }
        let (reviewer, cache, ttls) = (Arc::clone(reviewer), Arc::clone(&self.cache), self.ttls);
        let (user, node) = (user.clone(), auth.node_name.clone());
        self.once
            .ask(key, async move {
                let allowed = reviewer.allowed(&user, verb, subresource, &node).await?;
                cache.put(key, allowed, if allowed { ttls.0 } else { ttls.1 });
                Ok(allowed)
            })
            .await
    }
}

/// Takes the bearer token out of the headers: of `Authorization`, or of a WebSocket's protocols.
fn take_token(headers: &mut HeaderMap) -> Option<Zeroizing<String>> {
    let given = headers.remove(AUTHORIZATION);
    let bearer = given.as_ref().and_then(|value| {
        let (scheme, token) = value.to_str().ok()?.trim().split_once(' ')?;
        // As upstream: what follows a second space is not part of it.
        let token = token.split(' ').next()?;
        (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty())
            .then(|| Zeroizing::new(token.to_owned()))
    });
    let protocol = take_protocol(headers);
    bearer.or(protocol)
}

fn take_protocol(headers: &mut HeaderMap) -> Option<Zeroizing<String>> {
    let offered: Vec<String> = headers
        .get_all(SEC_WEBSOCKET_PROTOCOL)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|one| one.trim().to_owned())
        .collect();
    let (tokens, others): (Vec<_>, Vec<_>) = offered
        .into_iter()
        .partition(|one| one.starts_with(TOKEN_PROTOCOL));
    let token = match tokens.as_slice() {
        // Without another protocol the answer could only repeat the token.
        [token] if !others.is_empty() => token.strip_prefix(TOKEN_PROTOCOL)?,
        [] => return None,
        _ => {
            headers.remove(SEC_WEBSOCKET_PROTOCOL);
            return None;
        }
    };
    match HeaderValue::from_str(&others.join(", ")) {
        Ok(rest) => headers.insert(SEC_WEBSOCKET_PROTOCOL, rest),
        Err(_) => headers.remove(SEC_WEBSOCKET_PROTOCOL),
    };
    let decoded = Zeroizing::new(URL_SAFE_NO_PAD.decode(token.trim_end_matches('=')).ok()?);
    let token = std::str::from_utf8(&decoded).ok()?;
    (!token.is_empty()).then(|| Zeroizing::new(token.to_owned()))
}

/// Number of invalid tokens per address. Limits the requests to the API server that one client can cause.
#[derive(Default)]
struct BadTokens(Mutex<HashMap<IpAddr, (u32, Stamp)>>);

impl BadTokens {
    fn left(count: u32, since: Stamp, now: Stamp) -> u32 {
        let forgiven = now.since(since).as_secs() / BAD_TOKEN_EVERY.as_secs();
        count.saturating_sub(u32::try_from(forgiven).unwrap_or(u32::MAX))
    }

    fn exhausted(&self, address: IpAddr, now: Stamp) -> bool {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.get(&address)
            .is_some_and(|(count, since)| Self::left(*count, *since, now) >= BAD_TOKENS)
    }

    fn count(&self, address: IpAddr, now: Stamp) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.len() >= ADDRESSES_KEPT && !seen.contains_key(&address) {
            seen.retain(|_, (count, since)| Self::left(*count, *since, now) > 0);
            if seen.len() >= ADDRESSES_KEPT {
                seen.clear();
            }
        }
        let (count, since) = seen.entry(address).or_insert((0, now));
        *count = Self::left(*count, *since, now) + 1;
        *since = now;
    }

    fn forgive(&self, address: IpAddr) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((count, _)) = seen.get_mut(&address) {
            *count = count.saturating_sub(1);
        }
    }
}

/// Number of requests per address that wait for a decision. Their heads are in memory for that long.
#[derive(Clone, Default)]
struct Waiting(Arc<Mutex<HashMap<IpAddr, usize>>>);

/// One of them.
struct WaitingOne(Waiting, IpAddr);

impl Waiting {
    fn enter(&self, address: IpAddr) -> Option<WaitingOne> {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = waiting.entry(address).or_default();
        if *count >= WAITING {
            return None;
        }
        *count += 1;
        Some(WaitingOne(self.clone(), address))
    }
}

impl Drop for WaitingOne {
    fn drop(&mut self) {
        let mut waiting = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = waiting.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                waiting.remove(&self.1);
            }
        }
    }
}
