//! Questions to the API server: who has this token, and may they do that.
//!
//! **Invariant:** whatever clients send, only so many questions are asked at once, and the same question only once
//! at a time; the rest waits for a while and is refused then. The answers of the node's other requests do not wait
//! behind them for long.

use std::collections::HashMap;
use std::future::Future;
use std::hash::Hash;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared, WeakShared};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::Api;
use kube::api::PostParams;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout_at};

use super::User;
use crate::apiserver::{ApiClient, Failure, pause};

/// Questions asked at once.
const AT_ONCE: usize = 4;
/// Deadline of an answer, with retries.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two tries.
const AGAIN: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// Asks.
pub(super) struct Reviewer {
    api: ApiClient,
    turns: Semaphore,
}

impl Reviewer {
    pub(super) fn new(api: ApiClient) -> Self {
        Self {
            api,
            turns: Semaphore::new(AT_ONCE),
        }
    }

    /// Returns the user of a token; `None` if it belongs to nobody.
    ///
    /// # Errors
    /// When the server gives no answer, or says what is wrong with the token.
    pub(super) async fn token(&self, token: &str) -> Result<Option<User>, TokenFailure> {
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: token.to_owned(),
                ..TokenReviewSpec::default()
            },
            ..TokenReview::default()
        };
        let answer = self.ask(&review).await.map_err(TokenFailure::Unanswered)?;
        let status = answer.status.unwrap_or_default();
        if let Some(error) = status.error.filter(|error| !error.is_empty()) {
            return Err(TokenFailure::Invalid(error));
        }
        if status.authenticated != Some(true) {
            return Ok(None);
        }
        let user = status.user.unwrap_or_default();
        Ok(Some(User {
            name: user.username.unwrap_or_default(),
            uid: user.uid.unwrap_or_default(),
            groups: user.groups.unwrap_or_default(),
            extra: user.extra.unwrap_or_default(),
        }))
    }

    /// Returns whether `user` may use `verb` on the subresource of the node.
    ///
    /// # Errors
    /// When the server gives no answer.
    pub(super) async fn allowed(
        &self,
        user: &User,
        verb: &str,
        subresource: &str,
        node: &str,
    ) -> Result<bool, String> {
        let filled = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: filled(&user.name),
                uid: filled(&user.uid),
                groups: (!user.groups.is_empty()).then(|| user.groups.clone()),
                extra: (!user.extra.is_empty()).then(|| user.extra.clone()),
                resource_attributes: Some(ResourceAttributes {
                    verb: Some(verb.to_owned()),
                    version: Some("v1".to_owned()),
                    resource: Some("nodes".to_owned()),
                    subresource: Some(subresource.to_owned()),
                    name: Some(node.to_owned()),
                    ..ResourceAttributes::default()
                }),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        };
        let answer = self.ask(&review).await?;
        let status = answer.status.unwrap_or_default();
        if status.allowed && status.denied == Some(true) {
            return Err("the API server both allows and denies it".to_owned());
        }
        Ok(status.allowed)
    }

    async fn ask<K>(&self, review: &K) -> Result<K, String>
    where
        K: kube::Resource<DynamicType = (), Scope = k8s_openapi::ClusterResourceScope>
            + serde::Serialize
            + serde::de::DeserializeOwned
            + Clone
            + std::fmt::Debug,
    {
        let api: Api<K> = Api::all(self.api.kube());
        let deadline = Instant::now() + PATIENCE;
        let asked = async {
            let Ok(_turn) = self.turns.acquire().await else {
                return Err("the agent is ending".to_owned());
            };
            let mut failures = 0;
            loop {
                match api.create(&PostParams::default(), review).await {
                    Ok(answer) => return Ok(answer),
                    Err(error) if Failure::of(&error) == Failure::Transient && failures < 4 => {
                        failures += 1;
                        sleep(pause(failures, AGAIN.0, AGAIN.1)).await;
                    }
                    Err(error) => return Err(format!("ask the API server: {error}")),
                }
            }
        };
        match timeout_at(deadline, asked).await {
            Ok(answer) => answer,
            Err(_) => Err(format!(
                "the API server did not answer within {} s",
                PATIENCE.as_secs()
            )),
        }
    }
}

/// Reason why a token has no user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TokenFailure {
    /// The server says so.
    Invalid(String),
    /// It could not be asked.
    Unanswered(String),
    /// Its sender showed too many bad ones.
    TooMany,
}

/// Lets only one of equal questions be asked at a time; the others wait for its answer.
pub(super) struct Once<K, V>(Mutex<HashMap<K, WeakShared<BoxFuture<'static, V>>>>);

impl<K: Hash + Eq + Copy, V: Clone + Send + Sync + 'static> Once<K, V> {
    pub(super) fn new() -> Self {
        Self(Mutex::new(HashMap::new()))
    }

    /// The answer to `question`, or to the equal one that is asked already. Cancel-safe: it goes on as long as
    /// somebody waits for it.
    pub(super) async fn ask(
        &self,
        key: K,
        question: impl Future<Output = V> + Send + 'static,
    ) -> V {
        let shared = self.join(key, question.boxed());
        let answer = shared.await;
        let mut asked = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let over = |weak: &WeakShared<_>| weak.upgrade().is_none_or(|one| one.peek().is_some());
        if asked.get(&key).is_some_and(over) {
            asked.remove(&key);
        }
        answer
    }

    fn join(&self, key: K, question: BoxFuture<'static, V>) -> Shared<BoxFuture<'static, V>> {
        let mut asked = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(shared) = asked.get(&key).and_then(WeakShared::upgrade) {
            return shared;
        }
        // Those that nobody waits for any more.
        asked.retain(|_, weak| weak.upgrade().is_some());
        let shared = question.shared();
        if let Some(weak) = shared.downgrade() {
            asked.insert(key, weak);
        }
        shared
    }
}
