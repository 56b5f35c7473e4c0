//! Tokens of service accounts, bound to pods.
//!
//! In: a pod and what it asks for. Out: a token from the cache, or from TokenRequest. Mirrors upstream's
//! `pkg/kubelet/token`: a token is replaced when 80 % of its life have passed, or 24 hours, 10 s earlier at most by
//! jitter; one that cannot be replaced is used until it expires. Beyond upstream, tokens are recorded, and while the API
//! server does not answer an expired one is handed out, marked as stale.
//!
//! A token's age is measured on this node's clocks from the moment it was received, so a clock that is wrong does not
//! make it old. When the clock is set back behind that moment, the token is replaced: on a machine that runs the API server as
//! well, it is not valid yet.
//!
//! **Invariants:** at most one request for a token is under way; a refusal is never answered with an expired token.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use zeroize::Zeroize as _;

use super::cache::{Trouble, lock};
use super::context::Context;
use super::{Inner, ObjectChange, ObjectError, Token};
use crate::apiserver::{ApiClient, Reachability};
use crate::types::{PodExt as _, PodUid, Stamp};

/// Longest time a token is used without being replaced.
const MAX_USE: Duration = Duration::from_secs(24 * 3600);
/// Most that jitter makes a replacement come earlier.
const JITTER_MS: i64 = 10_000;
/// An API server accepts a token that begins to be valid so long after now.
const LEEWAY_MS: i64 = 60_000;
/// Life of a token when the API server does not say; upstream's default.
const DEFAULT_LIFE_SECONDS: i64 = 3600;
/// Deadlines of a request, with and without a token to fall back on.
const DEADLINE_WITH: Duration = Duration::from_secs(3);
const DEADLINE_WITHOUT: Duration = Duration::from_secs(10);
/// First and longest pause after a failed request when there is a token to fall back on.
const RETRY_MIN: Duration = Duration::from_secs(10);
const RETRY_MAX: Duration = Duration::from_secs(300);
/// Time after which a change is reported again if no sync has followed.
const TELL_AGAIN: Duration = Duration::from_secs(60);

/// A token as it is kept and recorded. Wiped when it is dropped.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Held {
    token: String,
    expires_ms: i64,
    received: Stamp,
    /// From `received` to the end of its life.
    life_ms: i64,
    /// From `received` to the time it is to be replaced.
    refresh_ms: i64,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.token.zeroize();
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held")
            .field("expires_ms", &self.expires_ms)
            .finish_non_exhaustive()
    }
}

impl Held {
    fn new(token: String, expires_ms: i64, life_seconds: i64, received: Stamp) -> Self {
        let life_ms = life_seconds.max(0).saturating_mul(1000);
        let most = i64::try_from(MAX_USE.as_millis()).unwrap_or(i64::MAX);
        let refresh_ms = (life_ms / 5 * 4).min(most) - rand::random_range(0..=JITTER_MS);
        Self {
            token,
            expires_ms,
            received,
            life_ms,
            refresh_ms: refresh_ms.max(0),
        }
    }

    fn left(&self, of_ms: i64, now: Stamp) -> Duration {
        let of = Duration::from_millis(u64::try_from(of_ms).unwrap_or(0));
        of.saturating_sub(now.since(self.received))
    }

    fn until_refresh(&self, now: Stamp) -> Duration {
        if now.wall_ms.saturating_add(LEEWAY_MS) < self.received.wall_ms {
            return Duration::ZERO;
        }
        self.left(self.refresh_ms, now)
    }

    fn is_expired(&self, now: Stamp) -> bool {
        self.left(self.life_ms, now).is_zero()
    }

    fn hand_out(&self, stale: bool) -> Token {
        Token {
            token: self.token.clone(),
            expires_ms: self.expires_ms,
            stale,
        }
    }
}

/// Returns the key of the record of a token. One that a volume shows is another than one for passing use, of which nobody is
/// notified.
pub(super) fn record_key(pod: &Pod, spec: &TokenRequestSpec, use_: Use) -> String {
    let mut digest = Sha256::new();
    let mut part = |text: &str| {
        digest.update((text.len() as u64).to_le_bytes());
        digest.update(text);
    };
    part(service_account(pod));
    for audience in spec.audiences.iter().flatten() {
        part(audience);
    }
    if use_ == Use::Passing {
        // Nine bytes follow the last audience, and never as many where the token is shown.
        digest.update([1]);
    }
    digest.update(spec.expiration_seconds.unwrap_or_default().to_le_bytes());
    let digest: [u8; 32] = digest.finalize().into();
    let hash: String = digest[..8]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("{}{hash}", record_prefix(pod.namespace(), &pod.uid()))
}

/// Returns the prefix of the record keys of a pod's tokens.
pub(super) fn record_prefix(namespace: &str, uid: &PodUid) -> String {
    format!("tokens/{namespace}/{uid}/")
}

/// Returns the service account that a pod runs as.
pub(super) fn service_account(pod: &Pod) -> &str {
    match pod.spec_ref().service_account_name.as_deref() {
        None | Some("") => "default",
        Some(name) => name,
    }
}

#[derive(Default)]
struct State {
    held: Option<Held>,
    failures: u32,
    /// Not asked for again before, while `held` is there to be used.
    not_before: Option<Instant>,
}

/// Purpose of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// A volume shows it, so it is replaced in time.
    Shown,
    /// Somebody requests it each time.
    Passing,
}

pub(super) struct TokenEntry {
    record_key: String,
    use_: Use,
    namespace: String,
    pod_name: String,
    uid: PodUid,
    service_account: String,
    spec: TokenRequestSpec,
    state: Mutex<State>,
    /// Held while a request is under way.
    asking: tokio::sync::Mutex<()>,
}

impl TokenEntry {
    pub(super) fn new(
        ctx: &Context,
        key: String,
        pod: &Pod,
        spec: &TokenRequestSpec,
        use_: Use,
    ) -> Self {
        let state = State {
            held: ctx.recorded::<Held>(&key, true),
            ..State::default()
        };
        Self {
            record_key: key,
            use_,
            namespace: pod.namespace().to_owned(),
            pod_name: pod.name().to_owned(),
            uid: pod.uid(),
            service_account: service_account(pod).to_owned(),
            spec: spec.clone(),
            state: Mutex::new(state),
            asking: tokio::sync::Mutex::new(()),
        }
    }

    pub(super) fn held(&self) -> Option<Held> {
        lock(&self.state).held.clone()
    }

    pub(super) fn is_passing(&self) -> bool {
        self.use_ == Use::Passing
    }

    pub(super) fn until_refresh(&self, now: Stamp) -> Option<Duration> {
        let state = lock(&self.state);
        state.held.as_ref().map(|held| held.until_refresh(now))
    }

    fn fresh(&self, now: Stamp) -> Option<Token> {
        let state = lock(&self.state);
        let held = state.held.as_ref()?;
        (!held.until_refresh(now).is_zero()).then(|| held.hand_out(false))
    }

    /// See `Objects::token`. Cancel-safe.
    pub(super) async fn token(&self, ctx: &Context, remember: bool) -> Result<Token, ObjectError> {
        if let Some(token) = self.fresh(ctx.clock.now()) {
            return Ok(token);
        }
        let Some(api) = &ctx.api else {
            return self.fall_back(ctx, None);
        };
        let _asking = self.asking.lock().await;
        let now = ctx.clock.now();
        if let Some(token) = self.fresh(now) {
            return Ok(token);
        }
        let (has_one, waits) = {
            let state = lock(&self.state);
            let waits = state.not_before.is_some_and(|at| Instant::now() < at);
            (state.held.is_some(), waits)
        };
        if has_one {
            if let Reachability::Down(why) = api.connection().now() {
                return self.fall_back(ctx, Some(Trouble::Unanswered(why)));
            }
            if waits {
                let why = "the newest request failed, the next one is made later".to_owned();
                return self.fall_back(ctx, Some(Trouble::Unanswered(why)));
            }
        }
        let deadline = if has_one {
            DEADLINE_WITH
        } else {
            DEADLINE_WITHOUT
        };
        let trouble = match tokio::time::timeout(deadline, self.request(api)).await {
            Ok(Ok(answer)) => match self.accept(answer, ctx.clock.now()) {
                Some(token) => {
                    if remember {
                        ctx.mark(self.record_key.clone());
                    }
                    return Ok(token);
                }
                None => Trouble::Unanswered("the answer holds no token".to_owned()),
            },
            Ok(Err(error)) => Trouble::of(&error),
            Err(_) => Trouble::Unanswered(format!("no answer within {} s", deadline.as_secs())),
        };
        {
            let mut state = lock(&self.state);
            let pause = RETRY_MIN
                .saturating_mul(2_u32.saturating_pow(state.failures.min(8)))
                .min(RETRY_MAX);
            let pause = pause.mul_f64(rand::random_range(0.8..1.2));
            state.failures += 1;
            state.not_before = Some(Instant::now() + pause);
        }
        self.fall_back(ctx, Some(trouble))
    }

    async fn request(&self, api: &ApiClient) -> Result<TokenRequest, kube::Error> {
        let spec = TokenRequestSpec {
            bound_object_ref: Some(BoundObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Pod".to_owned()),
                name: Some(self.pod_name.clone()),
                uid: Some(self.uid.to_string()),
            }),
            ..self.spec.clone()
        };
        let request = TokenRequest {
            spec: Some(spec),
            ..TokenRequest::default()
        };
        kube::Api::<ServiceAccount>::namespaced(api.kube(), &self.namespace)
            .create_token_request(&self.service_account, &Default::default(), &request)
            .await
    }

    fn accept(&self, answer: TokenRequest, now: Stamp) -> Option<Token> {
        let life = answer.spec.and_then(|spec| spec.expiration_seconds);
        let status = answer.status?;
        let token = status.token.filter(|token| !token.is_empty())?;
        let life = life
            .or(self.spec.expiration_seconds)
            .unwrap_or(DEFAULT_LIFE_SECONDS);
        let expires_ms = match status.expiration_timestamp {
            Some(at) => at.0.as_millisecond(),
            None => now.wall_ms.saturating_add(life.saturating_mul(1000)),
        };
        let held = Held::new(token, expires_ms, life, now);
        let token = held.hand_out(false);
        *lock(&self.state) = State {
            held: Some(held),
            ..State::default()
        };
        Some(token)
    }

    /// Returns the token or error to use when no new token is available.
    fn fall_back(&self, ctx: &Context, trouble: Option<Trouble>) -> Result<Token, ObjectError> {
        let now = ctx.clock.now();
        let state = lock(&self.state);
        let kind = "Token";
        let key = format!(
            "{}/{} of pod {}",
            self.namespace, self.service_account, self.pod_name
        );
        match (&state.held, trouble) {
            (Some(held), _) if !held.is_expired(now) => Ok(held.hand_out(false)),
            (_, Some(Trouble::Refused(why))) => Err(ObjectError::Refused { kind, key, why }),
            (Some(held), _) => Ok(held.hand_out(true)),
            (None, Some(Trouble::Unanswered(why))) => {
                Err(ObjectError::Unreachable { kind, key, why })
            }
            (None, None) => Err(ObjectError::Standalone { kind, key }),
        }
    }

    /// Returns the time until the pod should be notified that the token is due, as the back-off allows it.
    fn until_told(&self, now: Stamp) -> Option<Duration> {
        if self.is_passing() {
            return None;
        }
        let state = lock(&self.state);
        let due = state.held.as_ref()?.until_refresh(now);
        let allowed = state.not_before.map_or(Duration::ZERO, |at| {
            at.saturating_duration_since(Instant::now())
        });
        Some(due.max(allowed))
    }

    fn forget_failures(&self) {
        let mut state = lock(&self.state);
        state.failures = 0;
        state.not_before = None;
    }
}

/// Tells of tokens that fall due, until `stop` is cancelled: a change of kind `Token` with the pod's UID as name.
pub(super) async fn run(inner: &Inner, stop: &CancellationToken) {
    let ctx = &inner.ctx;
    let Some(api) = &ctx.api else {
        return;
    };
    let mut told: std::collections::HashMap<String, Instant> = std::collections::HashMap::new();
    loop {
        if matches!(api.connection().now(), Reachability::Down(_)) {
            tokio::select! {
                () = stop.cancelled() => return,
                () = api.connection().up() => {}
            }
            told.clear();
            for entry in inner.token_entries() {
                entry.forget_failures();
            }
        }
        let now = ctx.clock.now();
        let mut next = TELL_AGAIN;
        let entries = inner.token_entries();
        told.retain(|key, _| entries.iter().any(|entry| entry.record_key == *key));
        for entry in entries {
            let Some(left) = entry.until_told(now) else {
                continue;
            };
            let again = told.get(&entry.record_key).map_or(Duration::ZERO, |at| {
                at.saturating_duration_since(Instant::now())
            });
            let left = left.max(again);
            if !left.is_zero() {
                next = next.min(left);
                continue;
            }
            told.insert(entry.record_key.clone(), Instant::now() + TELL_AGAIN);
            ctx.tell(ObjectChange {
                kind: "Token",
                namespace: entry.namespace.clone(),
                name: entry.uid.to_string(),
            });
        }
        tokio::select! {
            () = stop.cancelled() => return,
            // Cancel-safe: everything is looked at again.
            () = tokio::time::sleep(next.max(Duration::from_millis(100))) => {}
            () = api.connection().changed() => {}
        }
    }
}

/// The entries of a pod's tokens, kept by [`super::Objects`].
pub(super) type TokenEntries = std::collections::BTreeMap<String, Arc<TokenEntry>>;
