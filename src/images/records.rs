//! Decides who may use an image that is on the node: records of pulls and of the credentials they were made with, by
//! secret or by service account; upstream's `pullmanager`.
//!
//! Kept in the table of objects: `imagepullintents//<hash of the name>` while a pull is under way,
//! `imagepulls//<hash of the image's ID>` for what was pulled, `imagepullerrors/<pod UID>/<hash of the name>` for
//! why a pod's last pull failed.
//!
//! **Invariant:** an intent is on the disk before its pull begins, and goes away in the same transaction in
//! which the outcome is recorded. An image of which there is an intent or a record was not there before the agent, so
//! it is nobody's who has not shown credentials for it. An intent that its pull did not outlive (a crash, a pod that
//! was deleted) becomes a record without credentials as soon as the image is seen. An intent names the preloaded image
//! that it found under its name: such an image stays what it was, whatever becomes of the pull.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::ImageService;
use super::files;
use super::keyring::{self, CredentialSource, Credentials, SecretSource, ServiceAccountSource};
use crate::core::images::{self, Presence};
use crate::core::state::kinds::{self, Declared, Key, Kind};
use crate::core::state::{State, Transaction};
use crate::kubeletconfig::ImageVerification;
use crate::store::{CommitError, Store};
use crate::types::{PodUid, Stamp};

/// From so many secrets of one image on, a match is not added to them.
const MOST_SECRETS: usize = 100;
/// Most service accounts of one image; the oldest are dropped, and their pods pull again.
const MOST_ACCOUNTS: usize = 100;
/// Most of an error that is kept.
const MOST_ERROR: usize = 2048;
/// Hashing a password so often makes guessing it from a copy of the store slow.
const ROUNDS: u32 = 1024;
/// Time for which an intent without pull and without image is kept. The runtime may complete a pull that has no waiter.
const INTENT_KEPT: Duration = Duration::from_secs(3600);

/// Policy that selects the images on the node that need credentials.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VerificationPolicy {
    /// `imagePullCredentialsVerificationPolicy`.
    pub policy: ImageVerification,
    /// `preloadedImagesVerificationAllowlist`.
    pub allowlist: Vec<String>,
}

impl VerificationPolicy {
    /// Returns whether a pod must present credentials for an existing image.
    fn must_verify(&self, repository: &str, pulled_by_agent: bool) -> bool {
        match self.policy {
            ImageVerification::NeverVerify => false,
            ImageVerification::NeverVerifyPreloadedImages => pulled_by_agent,
            ImageVerification::NeverVerifyAllowlistedImages => {
                !self.allowlist.iter().any(|p| match p.strip_suffix('*') {
                    Some(prefix) => repository.starts_with(prefix),
                    None => repository == p,
                })
            }
            ImageVerification::AlwaysVerify => true,
        }
    }
}

/// Record of a pulled image, by the ID under which the runtime keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PulledImage {
    image_ref: String,
    /// Goes into each hash of this record.
    salt: String,
    /// By repository. Who is in none must pull.
    credential_mapping: BTreeMap<String, Access>,
}

/// Access rights to an image under one of its names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Access {
    /// It was pulled without a pod's credentials.
    node_pods_accessible: bool,
    secrets: Vec<SecretAccess>,
    /// Service accounts for whose tokens a program gave the credentials. An agent that does not know them lets their pods
    /// pull.
    service_accounts: Vec<AccountAccess>,
}

impl Access {
    fn is_nobodys(&self) -> bool {
        self.secrets.is_empty() && self.service_accounts.is_empty()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SecretAccess {
    namespace: String,
    name: String,
    uid: String,
    credential_hash: String,
}

/// Upstream: `ImagePullServiceAccount`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct AccountAccess {
    namespace: String,
    name: String,
    uid: String,
}

impl AccountAccess {
    fn of(source: &ServiceAccountSource) -> Self {
        Self {
            namespace: source.namespace.clone(),
            name: source.name.clone(),
            uid: source.uid.clone(),
        }
    }
}

impl SecretAccess {
    fn is_of(&self, source: &SecretSource) -> bool {
        (&self.namespace, &self.name, &self.uid) == (&source.namespace, &source.name, &source.uid)
    }
}

#[derive(Serialize, Deserialize)]
struct Intent {
    image: String,
    /// ID of the preloaded image that the runtime had under this name when the pull began.
    preloaded: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct PullFailure {
    image: String,
    message: String,
}

impl Kind for PulledImage {
    const DECLARED: Declared = kinds::PULLED_IMAGES;
}

impl Kind for Intent {
    const DECLARED: Declared = kinds::PULL_INTENTS;
}

impl Kind for PullFailure {
    const DECLARED: Declared = kinds::PULL_ERRORS;
}

/// Permission of a pod to use an existing image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Permission {
    /// It may, whoever it is.
    Granted,
    /// It may not before it has pulled.
    MustPull,
    /// Its credentials decide: [`PulledImage::grants`].
    ByCredentials(PulledImage),
}

/// Access to an existing image without a pull, according to the records of pulls.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Recorded {
    /// The agent has not pulled it: the policy alone decides.
    Preloaded,
    /// Every pod.
    EveryPod,
    /// Pods with the credentials it was pulled with.
    ByCredentials(PulledImage),
    /// None: it came under another name, or by a pull that was cut off.
    NoPod,
}

impl Recorded {
    fn of(state: &State, image: &str, id: &str) -> Self {
        let key = pulled_key(id);
        let is_recorded = state.stored(&key).is_some();
        // A pull under way says nothing of what was there before it.
        if !is_recorded && (!is_asked(state, image) || was_there(state, image, id)) {
            return Self::Preloaded;
        }
        // What cannot be read grants nothing.
        let Some(record) = read(state, &key) else {
            return Self::NoPod;
        };
        match record.credential_mapping.get(&keyring::repository(image)) {
            Some(access) if access.node_pods_accessible => Self::EveryPod,
            Some(access) if !access.is_nobodys() => Self::ByCredentials(record),
            _ => Self::NoPod,
        }
    }
}

/// Returns who may use an image that is there without a pull, for `holdfast dump`: `preloaded` (the policy alone decides),
/// `everyPod`, `byCredentials` or `noPod`.
pub fn shown_access(state: &State, image: &str, id: &str) -> &'static str {
    match Recorded::of(state, image, id) {
        Recorded::Preloaded => "preloaded",
        Recorded::EveryPod => "everyPod",
        Recorded::ByCredentials(_) => "byCredentials",
        Recorded::NoPod => "noPod",
    }
}

/// Returns the pods that do not get an image, each with why its last pull failed.
pub fn refusals(state: &State, image: &str) -> Vec<(PodUid, String)> {
    state
        .all_stored::<PullFailure>()
        .filter_map(|record| {
            let failure = record.content()?;
            let (uid, _) = record.place();
            (failure.image == image).then(|| (PodUid::new(uid), failure.message))
        })
        .collect()
}

/// Intents of this process.
#[derive(Debug, Default)]
pub(super) struct PullRecords {
    policy: VerificationPolicy,
    /// Pulls under way, by name.
    under_way: Mutex<HashMap<String, usize>>,
    /// One recovery at a time.
    recovering: tokio::sync::Mutex<()>,
}

/// A pull that is under way, until it is dropped.
pub(super) struct UnderWay<'a> {
    records: &'a PullRecords,
    image: &'a str,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let mut under_way = self.records.under_way();
        if let Some(count) = under_way.get_mut(self.image) {
            *count -= 1;
            if *count == 0 {
                under_way.remove(self.image);
            }
        }
    }
}

impl UnderWay<'_> {
    /// Adds the end of the intent to what records the outcome, unless another pull shares it.
    pub(super) fn end(&self, seen: &State, transaction: Transaction) -> Transaction {
        let key = intent_key(self.image);
        let shared = self
            .records
            .under_way()
            .get(self.image)
            .is_some_and(|n| *n > 1);
        // Who begins meanwhile writes the intent again: the transaction is stale then, and decided again.
        let transaction = transaction.expect_object(seen, &key);
        if shared {
            return transaction;
        }
        transaction.delete_object(&key)
    }
}

impl PullRecords {
    pub(super) fn new(policy: VerificationPolicy) -> Self {
        Self {
            policy,
            ..Self::default()
        }
    }

    fn under_way(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.under_way
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that an image is going to be pulled, with what `more` adds; it is on the disk when this returns. `present`
    /// is what the runtime has under the name now.
    ///
    /// # Errors
    /// When it cannot be recorded: it must not be pulled then.
    pub(super) async fn begin<'a>(
        &'a self,
        store: &Store,
        image: &'a str,
        present: Presence<'_>,
        now: Stamp,
        more: impl Fn(&State, Transaction) -> Transaction,
    ) -> Result<UnderWay<'a>, CommitError> {
        *self.under_way().entry(image.to_owned()).or_default() += 1;
        let guard = UnderWay {
            records: self,
            image,
        };
        files::commit(store, |seen| {
            let key = intent_key(image);
            let preloaded = match present {
                Presence::Is(id) if Recorded::of(seen, image, id) == Recorded::Preloaded => {
                    Some(id.to_owned())
                }
                // What an earlier pull found stays what it was.
                Presence::Unknown => read(seen, &key).and_then(|earlier| earlier.preloaded),
                _ => None,
            };
            let intent = Intent {
                image: image.to_owned(),
                preloaded,
            };
            let transaction = Transaction::new().expect_object(seen, &key);
            more(seen, transaction.put_object(&key, &intent, now))
        })
        .await?;
        Ok(guard)
    }

    /// Returns whether a pod may use its image, which exists under `id`; upstream's `MustAttemptImagePull`.
    pub(super) fn permission(&self, state: &State, image: &str, id: &str) -> Permission {
        let recorded = Recorded::of(state, image, id);
        let by_agent = recorded != Recorded::Preloaded;
        let repository = keyring::repository(image);
        if !self.policy.must_verify(&repository, by_agent) {
            return Permission::Granted;
        }
        match recorded {
            Recorded::EveryPod => Permission::Granted,
            Recorded::ByCredentials(record) => Permission::ByCredentials(record),
            Recorded::Preloaded | Recorded::NoPod => Permission::MustPull,
        }
    }

    /// Turns intents of pulls that are over without an outcome into records without credentials, where their
    /// image is there. An image that the runtime does not report is left for the next time.
    ///
    /// # Errors
    /// When it cannot be recorded.
    pub(super) async fn recover<S: ImageService>(
        &self,
        service: &S,
        store: &Store,
        now: Stamp,
    ) -> Result<(), CommitError> {
        if self.left_over(&store.snapshot()).is_empty() {
            return Ok(());
        }
        let _turn = self.recovering.lock().await;
        let seen = store.snapshot();
        for (key, image, since) in self.left_over(&seen) {
            let found = match service.image_status(&image).await {
                Ok(found) => found,
                Err(error) => {
                    tracing::warn!(image, %error, "cannot find out how an interrupted pull ended");
                    continue;
                }
            };
            let mut transaction = Transaction::new().expect_object(&seen, &key);
            match found {
                Some(found) => {
                    let pulled = pulled_key(&found.id);
                    transaction = transaction.expect_object(&seen, &pulled);
                    let is_recorded = seen.stored(&pulled).is_some();
                    if !is_recorded && was_there(&seen, &image, &found.id) {
                        // It has brought nothing yet, and the runtime may go on with it.
                        if now.since(since) < INTENT_KEPT {
                            continue;
                        }
                    } else if !is_recorded {
                        tracing::info!(
                            image,
                            id = found.id,
                            "an interrupted pull delivered an image, its users must show credentials"
                        );
                        let record = PulledImage::new(&found.id);
                        transaction = transaction.put_object(&pulled, &record, now);
                    }
                }
                None if now.since(since) < INTENT_KEPT => continue,
                None => {}
            }
            match store.commit(transaction.delete_object(&key)).await {
                // It has begun again, or somebody else recorded the image.
                Ok(_) | Err(CommitError::Stale { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Intents without a pull: key, image, since when.
    fn left_over(&self, state: &State) -> Vec<(Key<Intent>, String, Stamp)> {
        let under_way = self.under_way();
        state
            .all_stored::<Intent>()
            .filter_map(|record| {
                let intent = record.content()?;
                (!under_way.contains_key(&intent.image))
                    .then(|| (record.key(), intent.image, record.at()))
            })
            .collect()
    }
}

impl PulledImage {
    fn new(id: &str) -> Self {
        Self {
            image_ref: id.to_owned(),
            salt: hex(&rand::random::<[u8; 16]>()),
            credential_mapping: BTreeMap::new(),
        }
    }

    fn hash(&self, credentials: &Credentials) -> String {
        let mut hash = keyring::fingerprint(std::slice::from_ref(credentials));
        for _ in 0..ROUNDS {
            let mut round = Sha256::new();
            round.update(self.salt.as_bytes());
            round.update(hash);
            hash = round.finalize().into();
        }
        hex(&hash)
    }

    /// Returns `Some` if one of these credentials belongs to a secret or service account that the image was pulled
    /// with, or equals those of such a secret. The inner value is the updated record, if the secret or its content is
    /// new.
    pub(super) fn grants(
        &self,
        image: &str,
        credentials: &[Credentials],
    ) -> Option<Option<PulledImage>> {
        let access = self.credential_mapping.get(&keyring::repository(image))?;
        for one in credentials {
            let source = match &one.source {
                Some(CredentialSource::Secret(source)) => source.as_ref(),
                Some(CredentialSource::ServiceAccount(account))
                    if self.grants_account(image, account) =>
                {
                    return Some(None);
                }
                // Whoever has the same content for another account must show it to the registry.
                Some(CredentialSource::ServiceAccount(_)) | None => continue,
            };
            let hash = self.hash(one);
            let known = access.secrets.iter().find(|s| s.is_of(source));
            if known.is_some_and(|s| s.credential_hash == hash) {
                return Some(None);
            }
            let same_content = access.secrets.iter().any(|s| s.credential_hash == hash);
            if same_content || known.is_some() {
                let room = access.secrets.len() < MOST_SECRETS;
                return Some(room.then(|| self.with(image, Some(one))));
            }
        }
        None
    }

    /// Returns whether a program gave the credentials of a pull for some service account.
    pub(super) fn has_accounts(&self, image: &str) -> bool {
        let access = self.credential_mapping.get(&keyring::repository(image));
        access.is_some_and(|access| !access.service_accounts.is_empty())
    }

    /// Returns whether it was pulled for this service account.
    pub(super) fn grants_account(&self, image: &str, account: &ServiceAccountSource) -> bool {
        let access = self.credential_mapping.get(&keyring::repository(image));
        let account = AccountAccess::of(account);
        access.is_some_and(|access| access.service_accounts.contains(&account))
    }

    /// With the credentials of a pull added; `None` = it was pulled without any.
    fn with(&self, image: &str, used: Option<&Credentials>) -> Self {
        let mut next = self.clone();
        let access = next
            .credential_mapping
            .entry(keyring::repository(image))
            .or_default();
        let source = used.and_then(|used| Some((used.source.as_ref()?, used)));
        match source {
            _ if access.node_pods_accessible => {}
            Some((CredentialSource::Secret(source), used)) => {
                access.secrets.retain(|s| !s.is_of(source));
                access.secrets.push(SecretAccess {
                    namespace: source.namespace.clone(),
                    name: source.name.clone(),
                    uid: source.uid.clone(),
                    credential_hash: self.hash(used),
                });
            }
            Some((CredentialSource::ServiceAccount(account), _)) => {
                let account = AccountAccess::of(account);
                let accounts = &mut access.service_accounts;
                // A new account of the same name takes the place of the deleted one.
                accounts.retain(|a| (&a.namespace, &a.name) != (&account.namespace, &account.name));
                let excess = (accounts.len() + 1).saturating_sub(MOST_ACCOUNTS);
                accounts.drain(..excess);
                accounts.push(account);
            }
            // The node's own credentials serve every pod of it.
            None => {
                *access = Access {
                    node_pods_accessible: true,
                    ..Access::default()
                }
            }
        }
        next
    }
}

/// Adds the record of a pull that succeeded to a transaction.
pub(super) fn record_pulled(
    seen: &State,
    transaction: Transaction,
    image: &str,
    id: &str,
    used: Option<&Credentials>,
    now: Stamp,
) -> Transaction {
    let key = pulled_key(id);
    let old = read(seen, &key);
    let next = match &old {
        Some(old) => old.with(image, used),
        None => PulledImage::new(id).with(image, used),
    };
    let transaction = transaction.expect_object(seen, &key);
    if old.as_ref() == Some(&next) {
        return transaction;
    }
    transaction.put_object(&key, &next, now)
}

/// Adds a changed record, see [`PulledImage::grants`].
pub(super) fn record_changed(
    seen: &State,
    transaction: Transaction,
    record: &PulledImage,
    now: Stamp,
) -> Transaction {
    let key = pulled_key(&record.image_ref);
    // What was changed or dropped meanwhile is not brought back.
    match read(seen, &key) {
        Some(old) if old.salt == record.salt => transaction
            .expect_object(seen, &key)
            .put_object(&key, record, now),
        _ => transaction,
    }
}

/// Adds why the last pull of a pod failed; `None` = it did not.
pub(super) fn record_error(
    seen: &State,
    transaction: Transaction,
    pod: &PodUid,
    image: &str,
    message: Option<&str>,
    now: Stamp,
) -> Transaction {
    let key = error_key(pod, image);
    match message {
        Some(message) => {
            let end = (0..=message.len().min(MOST_ERROR))
                .rev()
                .find(|at| message.is_char_boundary(*at))
                .unwrap_or(0);
            let failure = PullFailure {
                image: image.to_owned(),
                message: message[..end].to_owned(),
            };
            transaction.put_object(&key, &failure, now)
        }
        None if seen.stored(&key).is_some() => transaction.delete_object(&key),
        None => transaction,
    }
}

/// Returns the error of a pod's last pull of an image.
pub(super) fn last_error(state: &State, pod: &PodUid, image: &str) -> Option<String> {
    read(state, &error_key(pod, image)).map(|f| f.message)
}

/// Adds the end of what is kept of a pod.
pub(super) fn forget_pod(seen: &State, mut transaction: Transaction, pod: &PodUid) -> Transaction {
    for failure in seen.stored_below::<PullFailure>(pod.as_str()) {
        transaction = transaction.delete_object(&failure.key());
    }
    transaction
}

/// The end of the records of images that are gone: `ids` are those that were there at `listed_at`. Upstream's
/// `PruneUnknownRecords`.
pub(super) fn prune(seen: &State, ids: &[&str], listed_at: Stamp) -> Transaction {
    let mut transaction = Transaction::new();
    for record in seen.all_stored::<PulledImage>() {
        let image = record.content();
        let is_there = image.is_none_or(|image| ids.contains(&image.image_ref.as_str()));
        // Written after the list was asked for: it may be of an image that was not there yet.
        let at = record.at();
        let is_newer = at.boot == listed_at.boot && at.boottime_ms >= listed_at.boottime_ms;
        if !is_there && !is_newer {
            let key = record.key();
            transaction = transaction.expect_object(seen, &key).delete_object(&key);
        }
    }
    transaction
}

/// Returns whether a pull of the name is under way, or was cut off.
fn is_asked(state: &State, image: &str) -> bool {
    state.stored(&intent_key(image)).is_some()
}

/// Returns whether the runtime had the image under this ID before the pull.
fn was_there(state: &State, image: &str, id: &str) -> bool {
    let intent = read(state, &intent_key(image));
    let preloaded = intent.and_then(|intent| intent.preloaded);
    if preloaded.as_deref() == Some(id) {
        return true;
    }
    images::was_there(files::of(state, image).map(|(files, _)| files).as_ref(), id)
}

fn read<K: Kind>(state: &State, key: &Key<K>) -> Option<K> {
    let record = state.stored(key)?;
    let warn = |error: &kinds::Unparseable| {
        let error = &error.source;
        tracing::warn!(%key, %error, "cannot read the record of a pull");
    };
    record.read().inspect_err(warn).ok()
}

fn pulled_key(id: &str) -> Key<PulledImage> {
    Key::new("", &hex(&Sha256::digest(id)))
}

fn intent_key(image: &str) -> Key<Intent> {
    Key::new("", &hex(&Sha256::digest(image)))
}

fn error_key(pod: &PodUid, image: &str) -> Key<PullFailure> {
    Key::new(pod.as_str(), &hex(&Sha256::digest(image)))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
