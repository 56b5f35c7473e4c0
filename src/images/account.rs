//! Credential providers that get a token of the pod's service account: `tokenAttributes`, and what a program is given for a
//! pod. Upstream's `serviceAccountProvider`.
//!
//! **Invariant:** a token is in no `Debug` output and in no error, and answers for one service account serve no other.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Pod;
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

use super::keyring::ServiceAccountSource;
use super::provider_config::TokenAttributes;
use crate::objects::{Objects, ServiceAccountFacts};
use crate::types::PodExt;

/// The only version of a program's interface that has a token.
const VERSION: &str = "credentialprovider.kubelet.k8s.io/v1";
const NO_API: &str = "this node has no API server (--kubeconfig)";
const MOST_NAME: usize = 63;
const MOST_PREFIX: usize = 253;

/// The API server's part: service accounts and their tokens. An error is the text for users.
pub trait ServiceAccounts: Send + Sync {
    /// Returns the service account that a pod runs as.
    fn facts<'a>(&'a self, pod: &'a Pod) -> BoxFuture<'a, Result<ServiceAccountFacts, String>>;

    /// Returns a token of the pod's service account for this audience, bound to the pod.
    fn token<'a>(
        &'a self,
        pod: &'a Pod,
        audience: &'a str,
    ) -> BoxFuture<'a, Result<Zeroizing<String>, String>>;
}

impl ServiceAccounts for Objects {
    fn facts<'a>(&'a self, pod: &'a Pod) -> BoxFuture<'a, Result<ServiceAccountFacts, String>> {
        async move {
            let found = self.service_account(pod).await;
            found.map_err(|error| error.to_string())
        }
        .boxed()
    }

    fn token<'a>(
        &'a self,
        pod: &'a Pod,
        audience: &'a str,
    ) -> BoxFuture<'a, Result<Zeroizing<String>, String>> {
        async move {
            let found = self.passing_token(pod, audience).await;
            let found = found.map_err(|error| error.to_string())?;
            match found.stale {
                true => Err("the token of the service account has expired".to_owned()),
                false => Ok(Zeroizing::new(found.token)),
            }
        }
        .boxed()
    }
}

/// Scope of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CacheType {
    /// For all pods of a service account.
    ServiceAccount,
    /// For this token.
    Token,
}

/// Checked `tokenAttributes`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TokenMode {
    audience: String,
    cache: CacheType,
    is_required: bool,
    required: Vec<String>,
    optional: Vec<String>,
}

/// Input of a program for a pod.
#[derive(Clone, Default)]
pub(super) struct Given {
    pub(super) token: Option<Arc<Zeroizing<String>>>,
    pub(super) annotations: BTreeMap<String, String>,
    pub(super) account: Option<Arc<ServiceAccountSource>>,
    /// Part of the keys of its answers; empty without a service account.
    pub(super) cache_key: String,
    /// The token may come back as password.
    pub(super) may_echo: bool,
}

impl fmt::Debug for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Given")
            .field("account", &self.account)
            .finish_non_exhaustive()
    }
}

impl TokenMode {
    /// Checks `tokenAttributes` of a program of `api_version`. Upstream: `validateCredentialProviderConfig`.
    ///
    /// # Errors
    /// The invalid field, with the reason.
    pub(super) fn new(attributes: TokenAttributes, api_version: &str) -> Result<Self, String> {
        let wrong = |what: &str| Err(format!("tokenAttributes{what}"));
        if api_version != VERSION {
            return wrong(&format!(" is only supported for apiVersion {VERSION}"));
        }
        if attributes.service_account_token_audience.is_empty() {
            return wrong(".serviceAccountTokenAudience is required");
        }
        let Some(is_required) = attributes.require_service_account else {
            return wrong(".requireServiceAccount is required");
        };
        let required = attributes.required_service_account_annotation_keys;
        let optional = attributes.optional_service_account_annotation_keys;
        if !is_required && !required.is_empty() {
            return wrong(
                ".requireServiceAccount cannot be false when requiredServiceAccountAnnotationKeys is set",
            );
        }
        let mut seen = BTreeSet::new();
        for key in required.iter().chain(&optional) {
            if !is_annotation_key(key) {
                return wrong(&format!(": {key:?} is no annotation key"));
            }
            if !seen.insert(key) {
                return wrong(&format!(": annotation key {key:?} is there twice"));
            }
        }
        let cache = match attributes.cache_type.as_str() {
            "ServiceAccount" => CacheType::ServiceAccount,
            "Token" => CacheType::Token,
            other => {
                return wrong(&format!(
                    ".cacheType {other:?} is not known; use ServiceAccount or Token"
                ));
            }
        };
        Ok(Self {
            audience: attributes.service_account_token_audience,
            cache,
            is_required,
            required,
            optional,
        })
    }

    /// Returns what the program is given for `pod`; `None` when it is not for this pod.
    ///
    /// # Errors
    /// The reason why the service account or its token is not available.
    pub(super) async fn give(
        &self,
        pod: Option<&Pod>,
        accounts: Option<&dyn ServiceAccounts>,
    ) -> Result<Option<Given>, String> {
        let has_account = |pod: &&Pod| account_name(pod).is_some();
        let Some(pod) = pod.filter(has_account) else {
            // Of a static pod, or for the node.
            return Ok((!self.is_required).then(Given::default));
        };
        let Some((account, annotations)) = self.opted_in(Some(pod), accounts).await? else {
            return Ok(None);
        };
        let accounts = accounts.ok_or(NO_API)?;
        let token = accounts.token(pod, &self.audience).await?;
        let cache_key = self.cache_key(&account, &annotations, &token);
        Ok(Some(Given {
            token: Some(Arc::new(token)),
            annotations,
            account: Some(Arc::new(account)),
            cache_key,
            may_echo: self.cache == CacheType::Token,
        }))
    }

    /// Returns the service account of `pod` and the annotations that the program gets; `None` without an account, or when
    /// the account lacks a required annotation.
    ///
    /// # Errors
    /// The reason why the service account is not available.
    pub(super) async fn opted_in(
        &self,
        pod: Option<&Pod>,
        accounts: Option<&dyn ServiceAccounts>,
    ) -> Result<Option<(ServiceAccountSource, BTreeMap<String, String>)>, String> {
        let Some((pod, name)) = pod.and_then(|pod| Some((pod, account_name(pod)?))) else {
            return Ok(None);
        };
        let facts = accounts.ok_or(NO_API)?.facts(pod).await?;
        let Some(annotations) = self.chosen(&facts.annotations) else {
            return Ok(None);
        };
        let account = ServiceAccountSource {
            namespace: pod.namespace().to_owned(),
            name: name.to_owned(),
            uid: facts.uid,
        };
        Ok(Some((account, annotations)))
    }

    /// The annotations that the program gets; `None` when a required one is missing: so accounts opt in.
    fn chosen(&self, all: &BTreeMap<String, String>) -> Option<BTreeMap<String, String>> {
        let mut chosen = BTreeMap::new();
        for key in &self.required {
            chosen.insert(key.clone(), all.get(key)?.clone());
        }
        for key in &self.optional {
            if let Some(value) = all.get(key) {
                chosen.insert(key.clone(), value.clone());
            }
        }
        Some(chosen)
    }

    fn cache_key(
        &self,
        account: &ServiceAccountSource,
        annotations: &BTreeMap<String, String>,
        token: &str,
    ) -> String {
        let mut hash = Sha256::new();
        let mut part = |text: &str| {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        };
        for text in [&account.namespace, &account.name, &account.uid] {
            part(text);
        }
        if self.cache == CacheType::Token {
            part(token);
        }
        for (key, value) in annotations {
            part(key);
            part(value);
        }
        let hash: [u8; 32] = hash.finalize().into();
        hash.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

fn account_name(pod: &Pod) -> Option<&str> {
    let name = pod.spec_ref().service_account_name.as_deref();
    name.filter(|name| !name.is_empty())
}

/// Upstream's `IsQualifiedName`, in any case: an optional DNS name, and a name of at most 63 characters.
fn is_annotation_key(key: &str) -> bool {
    let (prefix, name) = match key.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, key),
    };
    let is_word = |text: &str, inner: &[u8], most: usize| {
        let bytes = text.as_bytes();
        let is_end = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
        bytes.len() <= most
            && is_end(bytes.first())
            && is_end(bytes.last())
            && bytes
                .iter()
                .all(|byte| byte.is_ascii_alphanumeric() || inner.contains(byte))
    };
    is_word(name, b"-_.", MOST_NAME)
        && prefix.is_none_or(|prefix| {
            prefix.len() <= MOST_PREFIX
                && prefix
                    .split('.')
                    .all(|part| is_word(part, b"-", MOST_PREFIX))
        })
}

#[cfg(test)]
#[path = "account_tests.rs"]
mod tests;
