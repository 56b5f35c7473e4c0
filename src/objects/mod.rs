//! Layer 3½: API objects that pods refer to, with a memory on disk.
//!
//! In: the pods of this node. Out: their configMaps, secrets, runtime classes, claims and what these lead to
//! ([`volumes`]), the services of the cluster, tokens of their service accounts, certificates of theirs, and a word when
//! one of them changes.
//!
//! One list-watch per configMap, secret and runtime class that a registered pod refers to (the Node authorizer allows
//! nothing wider), one for all services; an immutable object is read once. Everything is recorded (`context` says
//! how), so that pods start while the API server is away: a reader gets what the API server said in this life of the
//! agent, else, when it does not answer in time, the recorded copy. Secrets and tokens are recorded encrypted
//! ([`vault`]) with keys from a file ([`keyring`]).
//!
//! **Invariants:** what cannot be asked is not absent; what no registered pod refers to is neither in memory nor, after
//! [`Objects::sweep`], on disk; nothing here logs the content of an object.

mod cache;
mod claim_status;
mod context;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
pub mod keyring;
mod pace;
mod pod_certificates;
mod recorder;
mod refs;
mod service_accounts;
#[cfg(test)]
mod tests;
mod tokens;
mod trust;
pub mod vault;
pub mod volumes;

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::authentication::v1::TokenRequestSpec;
use k8s_openapi::api::core::v1::{
    ConfigMap, PersistentVolume, PersistentVolumeClaim, Pod, Secret, Service,
};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use self::cache::{
    Cell, ObjectCell, ServiceMap, Services, Watched, follow_object, follow_services, lock,
};
use self::context::Context;
use self::pod_certificates::{Entries, Entry, Kept};
use self::refs::{Kind, ObjectKey, references};
pub use self::service_accounts::ServiceAccountFacts;
use self::tokens::{TokenEntries, TokenEntry, Use};
use self::trust::TrustWatch;
use self::vault::Vault;
use self::volumes::{Polled, poll_object};
use crate::apiserver::ApiClient;
use crate::core::pod_certificates::{CertificateRef, record_key, record_prefix};
use crate::core::state::kinds;
use crate::core::trust::TrustBundles;
use crate::kuberuntime::sources::PodKeyPair;
use crate::store::Store;
use crate::types::metrics::Metrics;
use crate::types::{Clock, EventRecorder, PodExt as _, PodUid};

/// Reason why an object is not available now.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ObjectError {
    /// The API server does not answer and no copy is recorded.
    #[error("get {kind} {key}: the API server does not answer and no copy is on record: {why}")]
    Unreachable {
        /// Kind.
        kind: &'static str,
        /// `namespace/name`.
        key: String,
        /// Error of the request.
        why: String,
    },
    /// The API server refused.
    #[error("get {kind} {key}: {why}")]
    Refused {
        /// Kind.
        kind: &'static str,
        /// `namespace/name`.
        key: String,
        /// Answer of the server.
        why: String,
    },
    /// This agent has no API server.
    #[error("get {kind} {key}: this node has no API server (--kubeconfig)")]
    Standalone {
        /// Kind.
        kind: &'static str,
        /// `namespace/name`.
        key: String,
    },
}

/// An object that pods may depend on changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectChange {
    /// `ConfigMap`, `Secret`, `RuntimeClass`, `PersistentVolumeClaim`, `PersistentVolume`, `VolumeAttachment`,
    /// `CSIDriver`, `Service` (the services can be had now), `ClusterTrustBundle` (any of them), `Token` (one of
    /// the pod's tokens is to be replaced), or `PodCertificate` (the pod has a newer certificate, or gets none).
    pub kind: &'static str,
    /// Namespace; empty for cluster-wide kinds.
    pub namespace: String,
    /// Name; of a `Token` and a `PodCertificate` the UID of its pod; empty for `Service` and `ClusterTrustBundle`.
    pub name: String,
}

/// A service account token for a pod.
#[derive(Clone)]
pub struct Token {
    /// The token; never logged.
    pub token: String,
    /// Expiry, in milliseconds since the Unix epoch.
    pub expires_ms: i64,
    /// It has expired and could not be replaced: the API server does not answer.
    pub stale: bool,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token")
            .field("expires_ms", &self.expires_ms)
            .field("stale", &self.stale)
            .finish_non_exhaustive()
    }
}

/// A watch that runs for as long as this lives; `None` without an API server.
type Task = Option<AbortOnDropHandle<()>>;

/// One watched object.
struct Watch {
    cells: Cells,
    task: Task,
}

impl Watch {
    fn cells(&self) -> Cells {
        self.cells.clone()
    }
}

#[derive(Clone)]
enum Cells {
    ConfigMap(Arc<ObjectCell<ConfigMap>>),
    Secret(Arc<ObjectCell<Secret>>),
    RuntimeClass(Arc<ObjectCell<RuntimeClass>>),
    Claim(Arc<ObjectCell<PersistentVolumeClaim>>),
    PersistentVolume(Arc<ObjectCell<PersistentVolume>>),
    VolumeAttachment(Arc<ObjectCell<VolumeAttachment>>),
    CsiDriver(Arc<ObjectCell<CSIDriver>>),
}

impl Cells {
    /// Takes over what the cell of an object that may be immutable knows.
    fn take_over(&self, before: &Self) {
        match (self, before) {
            (Self::ConfigMap(now), Self::ConfigMap(before)) => now.take_over(before),
            (Self::Secret(now), Self::Secret(before)) => now.take_over(before),
            // The others are followed as long as anybody refers to them.
            _ => {}
        }
    }
}

struct ServiceWatch {
    cell: Arc<Cell<Services>>,
    task: Task,
}

struct PodEntry {
    namespace: String,
    /// Objects that its spec names.
    refs: BTreeSet<ObjectKey>,
    /// Further objects, that its volumes lead to.
    found: BTreeSet<ObjectKey>,
    /// It mounts trust anchors.
    trust: bool,
    /// Key of the record of its service account.
    account: String,
    /// Hash of the parts of the pod that users write; only for a pod with claims.
    version: Option<u64>,
}

#[derive(Default)]
struct Tables {
    pods: HashMap<PodUid, PodEntry>,
    users: HashMap<ObjectKey, BTreeSet<PodUid>>,
    watches: HashMap<ObjectKey, Watch>,
    services: Option<ServiceWatch>,
    /// Watch of trust anchors, while a pod mounts any.
    trust: Option<TrustWatch>,
    tokens: TokenEntries,
    certificates: Entries,
    /// Service accounts by the key of their record, as the API server has shown them.
    accounts: HashMap<String, ServiceAccountFacts>,
}

impl Tables {
    fn uses_account(&self, key: &str) -> bool {
        self.pods.values().any(|pod| pod.account == key)
    }
}

struct Inner {
    ctx: Arc<Context>,
    tables: Mutex<Tables>,
}

/// Shared handle. The watches end when the last one is dropped, or with [`Objects::run`].
#[derive(Clone)]
pub struct Objects {
    inner: Arc<Inner>,
}

impl fmt::Debug for Objects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Objects")
    }
}

impl Objects {
    /// A cache over `store`; without `api` only recorded objects are available. It has no keys, so it records no
    /// secrets.
    pub fn new(store: Store, clock: Arc<dyn Clock>, api: Option<ApiClient>) -> Self {
        let vault = Arc::new(Vault::without_keys());
        Self::with_vault(store, clock, api, vault, Metrics::default(), None)
    }

    /// As [`Objects::new`], with keys. `events` hears of records that cannot be decrypted.
    pub fn with_vault(
        store: Store,
        clock: Arc<dyn Clock>,
        api: Option<ApiClient>,
        vault: Arc<Vault>,
        metrics: Metrics,
        events: Option<Arc<dyn EventRecorder>>,
    ) -> Self {
        Self {
            inner: Arc::new(Inner {
                ctx: Arc::new(Context::new(store, clock, api, vault, metrics, events)),
                tables: Mutex::default(),
            }),
        }
    }

    /// From now on what `pod` refers to is kept up to date; again with a newer version of the pod. Never waits.
    /// With an API server it has to be called within the async runtime.
    pub fn register(&self, pod: &Pod) {
        let refs = references(pod);
        let uid = pod.uid();
        let inner = &self.inner;
        let mut tables = lock(&inner.tables);
        if tables.services.is_none() {
            tables.services = Some(inner.watch_services());
        }
        let before = tables.pods.remove(&uid);
        let before = before.map(|e| (e.refs, e.found, e.version));
        let (before, found, said) = before.unwrap_or_default();
        let claims = refs.iter().any(|key| key.kind == Kind::Claim);
        let version = claims.then(|| pace::version_of(pod));
        let entry = PodEntry {
            namespace: pod.namespace().to_owned(),
            refs: refs.clone(),
            found: found.difference(&refs).cloned().collect(),
            trust: trust::is_used_by(pod),
            account: service_accounts::record_key(pod),
            version,
        };
        if entry.trust && tables.trust.is_none() {
            tables.trust = Some(inner.watch_trust(true));
        }
        inner.request_certificates(&mut tables, pod);
        let kept: BTreeSet<ObjectKey> = refs.union(&entry.found).cloned().collect();
        tables.pods.insert(uid.clone(), entry);
        for key in refs.difference(&before) {
            let users = tables.users.entry(key.clone()).or_default();
            users.insert(uid.clone());
            // An immutable object that was read may have been deleted and made again since.
            let is_followed = |watch: &Watch| !watch.task.as_ref().is_some_and(|t| t.is_finished());
            if !tables.watches.get(key).is_some_and(is_followed) {
                let watch = inner.watch(key, true);
                if let Some(before) = tables.watches.insert(key.clone(), watch) {
                    tables.watches[key].cells.take_over(&before.cells);
                }
            }
        }
        inner.release(&mut tables, &uid, before.difference(&kept));
        inner.release_trust(&mut tables);
        let node = pod.spec_ref().node_name.as_deref().unwrap_or_default();
        inner.find_recorded(&mut tables, &uid, node);
        if said.is_some() && said != version {
            // Whoever changes a pod may wait for its volumes.
            tables.refresh(&uid);
        }
    }

    /// The pod is gone; what no other pod refers to is forgotten. Never waits.
    pub fn unregister(&self, uid: &PodUid) {
        let inner = &self.inner;
        let mut tables = lock(&inner.tables);
        let Some(entry) = tables.pods.remove(uid) else {
            return;
        };
        inner.release(&mut tables, uid, entry.refs.iter().chain(&entry.found));
        inner.release_trust(&mut tables);
        let prefix = tokens::record_prefix(&entry.namespace, uid);
        tables.tokens.retain(|key, _| !key.starts_with(&prefix));
        let certificates = record_prefix(&entry.namespace, uid);
        tables
            .certificates
            .retain(|key, _| !key.starts_with(&certificates));
        if !tables.uses_account(&entry.account) {
            tables.accounts.remove(&entry.account);
            inner.ctx.mark(entry.account);
        }
        drop(tables);
        for prefix in [prefix, certificates] {
            inner.ctx.mark_all(inner.ctx.recorded_keys(&prefix));
        }
    }

    /// Forgets recorded objects that no registered pod refers to: those of pods that went while the agent did not
    /// run. To be called when every source has spoken and every pod of this node is registered. Never waits.
    pub fn sweep(&self) {
        let inner = &self.inner;
        let mut gone = Vec::new();
        let kinds = Kind::ALL.map(|kind| format!("{}/", kind.plural()));
        let objects = kinds
            .map(|prefix| inner.ctx.recorded_keys(&prefix))
            .concat();
        let of_pods = [kinds::TOKENS.prefix, kinds::POD_CERTIFICATES.prefix]
            .map(|prefix| inner.ctx.recorded_keys(prefix))
            .concat();
        let accounts = inner.ctx.recorded_keys(service_accounts::RECORDS);
        let tables = lock(&inner.tables);
        gone.extend(accounts.into_iter().filter(|key| !tables.uses_account(key)));
        gone.extend(objects.into_iter().filter(|key| {
            ObjectKey::from_record_key(key).is_none_or(|key| !tables.watches.contains_key(&key))
        }));
        gone.extend(of_pods.into_iter().filter(|key| {
            let uid = key.split('/').nth(2).unwrap_or_default();
            !tables.pods.contains_key(&PodUid::new(uid))
        }));
        if tables.trust.is_none() {
            gone.extend(inner.ctx.recorded_keys(trust::RECORDS));
        }
        drop(tables);
        inner.ctx.mark_all(gone);
    }

    /// Changes of registered objects. A receiver that lags has to look at everything.
    pub fn changes(&self) -> broadcast::Receiver<ObjectChange> {
        self.inner.ctx.changes()
    }

    /// The registered pods that a change is about.
    pub fn pods_referring(&self, change: &ObjectChange) -> Vec<PodUid> {
        let tables = lock(&self.inner.tables);
        let kind = match change.kind {
            "Service" => return tables.pods.keys().cloned().collect(),
            trust::KIND => {
                let using = tables.pods.iter().filter(|(_, entry)| entry.trust);
                return using.map(|(uid, _)| uid.clone()).collect();
            }
            "Token" | pod_certificates::KIND => {
                let uid = PodUid::new(&change.name);
                return match tables.pods.contains_key(&uid) {
                    true => vec![uid],
                    false => Vec::new(),
                };
            }
            kind => match Kind::of_name(kind) {
                Some(kind) => kind,
                None => return Vec::new(),
            },
        };
        let key = ObjectKey::new(kind, &change.namespace, &change.name);
        let users = tables.users.get(&key);
        users
            .map(|users| users.iter().cloned().collect())
            .unwrap_or_default()
    }

    /// Returns the resourceVersion of the configMap or secret that changed; `None` when it does not exist or is of another
    /// kind. Never waits.
    pub fn version_of(&self, change: &ObjectChange) -> Option<String> {
        let kind = Kind::of_name(change.kind)?;
        let key = ObjectKey::new(kind, &change.namespace, &change.name);
        let cells = lock(&self.inner.tables).watches.get(&key)?.cells();
        match &cells {
            Cells::ConfigMap(cell) => cache::version(cell),
            Cells::Secret(cell) => cache::version(cell),
            _ => None,
        }
    }

    /// A configMap; `None` when the API server says that there is none. Waits for the first answer of the watch, at
    /// most 10 s from its begin (5 s when a copy is recorded), or 2 s (1 s) from the call. Cancel-safe.
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn config_map(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<Arc<ConfigMap>>, ObjectError> {
        let watch = self.cell(&ObjectKey::new(Kind::ConfigMap, namespace, name));
        match &watch.cells {
            Cells::ConfigMap(cell) => cell.read(&self.inner.ctx).await,
            _ => Ok(None),
        }
    }

    /// A secret; `None` when the API server says that there is none. Waits as [`Objects::config_map`] does.
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn secret(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<Arc<Secret>>, ObjectError> {
        let watch = self.cell(&ObjectKey::new(Kind::Secret, namespace, name));
        match &watch.cells {
            Cells::Secret(cell) => cell.read(&self.inner.ctx).await,
            _ => Ok(None),
        }
    }

    /// All services of the cluster that have a cluster IP, once the list was seen or is recorded: names, cluster IP
    /// and ports only. Waits as [`Objects::config_map`] does.
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn services(&self) -> Result<Vec<Arc<Service>>, ObjectError> {
        let cell = {
            let mut tables = lock(&self.inner.tables);
            let watch = tables
                .services
                .get_or_insert_with(|| self.inner.watch_services());
            Arc::clone(&watch.cell)
        };
        let services = cell.read(&self.inner.ctx).await?;
        Ok(services.values().cloned().collect())
    }

    /// The ClusterTrustBundles of the cluster. Waits as [`Objects::config_map`] does.
    ///
    /// # Errors
    /// See [`ObjectError`]; `Refused` as well when the API server has no such objects.
    pub async fn trust_bundles(&self) -> Result<Arc<TrustBundles>, ObjectError> {
        let known = lock(&self.inner.tables)
            .trust
            .as_ref()
            .map(|watch| Arc::clone(&watch.cell));
        match known {
            Some(cell) => cell.read(&self.inner.ctx).await,
            None => {
                let watch = self.inner.watch_trust(false);
                watch.cell.read(&self.inner.ctx).await
            }
        }
    }

    /// A runtime class; `None` when the API server says that there is none. Waits as [`Objects::config_map`] does.
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn runtime_class(
        &self,
        name: &str,
    ) -> Result<Option<Arc<RuntimeClass>>, ObjectError> {
        let watch = self.cell(&ObjectKey::new(Kind::RuntimeClass, "", name));
        match &watch.cells {
            Cells::RuntimeClass(cell) => cell.read(&self.inner.ctx).await,
            _ => Ok(None),
        }
    }

    /// A token of the pod's service account, bound to the pod; from the cache until 80 % of its life, or 24 hours,
    /// have passed. `boundObjectRef` of `spec` is set here. Takes at most 10 s, 3 s when there is a token to fall back
    /// on. Cancel-safe.
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn token(&self, pod: &Pod, spec: &TokenRequestSpec) -> Result<Token, ObjectError> {
        self.token_as(pod, spec, Use::Shown).await
    }

    /// Returns a token for `audience` that nobody keeps: for a program that gives credentials for a pull. Nobody is
    /// notified when it is to be replaced. Otherwise as [`Objects::token`].
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn passing_token(&self, pod: &Pod, audience: &str) -> Result<Token, ObjectError> {
        let spec = TokenRequestSpec {
            audiences: Some(vec![audience.to_owned()]),
            ..TokenRequestSpec::default()
        };
        self.token_as(pod, &spec, Use::Passing).await
    }

    /// Returns what is known of the pod's service account. Takes at most 5 s; the recorded copy counts while the API server
    /// does not answer. Cancel-safe.
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn service_account(&self, pod: &Pod) -> Result<ServiceAccountFacts, ObjectError> {
        let ctx = &self.inner.ctx;
        let (is_live, facts) = service_accounts::find(ctx, pod).await?;
        let mut tables = lock(&self.inner.tables);
        if is_live && tables.pods.contains_key(&pod.uid()) {
            let key = service_accounts::record_key(pod);
            tables.accounts.insert(key.clone(), facts.clone());
            ctx.mark(key);
        }
        Ok(facts)
    }

    async fn token_as(
        &self,
        pod: &Pod,
        spec: &TokenRequestSpec,
        use_: Use,
    ) -> Result<Token, ObjectError> {
        let ctx = &self.inner.ctx;
        let key = tokens::record_key(pod, spec, use_);
        let (entry, registered) = {
            let mut tables = lock(&self.inner.tables);
            match tables.tokens.get(&key) {
                Some(entry) => (Arc::clone(entry), true),
                None => {
                    let entry = Arc::new(TokenEntry::new(ctx, key.clone(), pod, spec, use_));
                    let registered = tables.pods.contains_key(&pod.uid());
                    if registered {
                        tables.tokens.insert(key, Arc::clone(&entry));
                    }
                    (entry, registered)
                }
            }
        };
        entry.token(ctx, registered).await
    }

    /// Returns the certificate of a `podCertificate` source of a registered pod. Waits a moment for the first answer of its
    /// signer. Cancel-safe.
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn pod_certificate(
        &self,
        pod: &Pod,
        of: &CertificateRef,
    ) -> Result<PodKeyPair, ObjectError> {
        let key = record_key(pod.namespace(), &pod.uid(), of);
        let kept = lock(&self.inner.tables)
            .certificates
            .get(&key)
            .map(|kept| Arc::clone(&kept.entry));
        match kept {
            Some(entry) => entry.certificate(&self.inner.ctx).await,
            None => Err(ObjectError::Refused {
                kind: "pod certificate",
                key: format!("{} of volume {}", of.index, of.volume),
                why: "nobody requests it; the pod has no such source, or has ended".to_owned(),
            }),
        }
    }

    /// Time until the first of the pod's tokens is to be replaced, zero when that is due; `None` when it has none.
    pub fn next_refresh(&self, uid: &PodUid) -> Option<Duration> {
        let now = self.inner.ctx.clock.now();
        let tables = lock(&self.inner.tables);
        let prefix = tokens::record_prefix(&tables.pods.get(uid)?.namespace, uid);
        let of_pod = tables.tokens.range(prefix.clone()..);
        of_pod
            .take_while(|(key, _)| key.starts_with(&prefix))
            .filter(|(_, entry)| !entry.is_passing())
            .filter_map(|(_, entry)| entry.until_refresh(now))
            .min()
    }

    /// Writes records, follows the key file and notifies of tokens that fall due, until `token` is cancelled; then
    /// writes what is left and ends the watches.
    pub async fn run(self, token: CancellationToken) {
        tokio::join!(
            recorder::run(&self.inner, &token),
            tokens::run(&self.inner, &token)
        );
        let mut tables = lock(&self.inner.tables);
        for watch in tables.watches.values_mut() {
            watch.task = None;
        }
        if let Some(services) = &mut tables.services {
            services.task = None;
        }
        if let Some(trust) = &mut tables.trust {
            trust.task = None;
        }
        for kept in tables.certificates.values_mut() {
            kept.task = None;
        }
    }

    /// The watch of an object; of one that nobody registered a passing one.
    fn cell(&self, key: &ObjectKey) -> Watch {
        let known = lock(&self.inner.tables).watches.get(key).map(Watch::cells);
        match known {
            Some(cells) => Watch { cells, task: None },
            None => self.inner.watch(key, false),
        }
    }
}

impl Inner {
    /// Begins to watch an object.
    fn watch(&self, key: &ObjectKey, remember: bool) -> Watch {
        match key.kind {
            Kind::ConfigMap => {
                let (cell, task) = self.watch_kind(key, remember);
                let cells = Cells::ConfigMap(cell);
                Watch { cells, task }
            }
            Kind::Secret => {
                let (cell, task) = self.watch_kind(key, remember);
                let cells = Cells::Secret(cell);
                Watch { cells, task }
            }
            Kind::RuntimeClass => {
                let (cell, task) = self.watch_kind(key, remember);
                let cells = Cells::RuntimeClass(cell);
                Watch { cells, task }
            }
            Kind::CsiDriver => {
                let (cell, task) = self.watch_kind(key, remember);
                let cells = Cells::CsiDriver(cell);
                Watch { cells, task }
            }
            Kind::Claim => {
                let (cell, task) = self.poll_kind(key, remember);
                let cells = Cells::Claim(cell);
                Watch { cells, task }
            }
            Kind::PersistentVolume => {
                let (cell, task) = self.poll_kind(key, remember);
                let cells = Cells::PersistentVolume(cell);
                Watch { cells, task }
            }
            Kind::VolumeAttachment => {
                let (cell, task) = self.poll_kind(key, remember);
                let cells = Cells::VolumeAttachment(cell);
                Watch { cells, task }
            }
        }
    }

    fn poll_kind<K: Polled>(&self, key: &ObjectKey, remember: bool) -> (Arc<ObjectCell<K>>, Task) {
        let cell = self.cell_of(key);
        let (ctx, of) = (Arc::clone(&self.ctx), key.clone());
        let task = self.spawn(poll_object::<K>(ctx, of, Arc::clone(&cell), remember));
        (cell, task)
    }

    fn watch_kind<K: Watched>(
        &self,
        key: &ObjectKey,
        remember: bool,
    ) -> (Arc<ObjectCell<K>>, Task) {
        let cell = self.cell_of(key);
        let (ctx, of) = (Arc::clone(&self.ctx), key.clone());
        let task = self.spawn(follow_object::<K>(ctx, of, Arc::clone(&cell), remember));
        (cell, task)
    }

    fn cell_of<K: Watched>(&self, key: &ObjectKey) -> Arc<ObjectCell<K>> {
        let recorded = self
            .ctx
            .recorded::<K>(&key.record_key(), K::KIND.is_secret());
        let recorded = recorded.map(|object| Some(Arc::new(object)));
        Arc::new(Cell::new(K::KIND.name(), key.object_name(), recorded))
    }

    fn watch_services(&self) -> ServiceWatch {
        let mut recorded = ServiceMap::new();
        for key in self.ctx.recorded_keys("services/") {
            let mut parts = key.splitn(3, '/').skip(1).map(str::to_owned);
            if let (Some(namespace), Some(name)) = (parts.next(), parts.next())
                && let Some(service) = self.ctx.recorded::<Service>(&key, false)
            {
                recorded.insert((namespace, name), Arc::new(service));
            }
        }
        // A cluster has one service at least.
        let recorded = Some(recorded).filter(|map| !map.is_empty()).map(Arc::new);
        let cell = Arc::new(Cell::new(
            "Service",
            "of all namespaces".to_owned(),
            recorded,
        ));
        let following = follow_services(Arc::clone(&self.ctx), Arc::clone(&cell));
        ServiceWatch {
            cell,
            task: self.spawn(following),
        }
    }

    fn watch_trust(&self, remember: bool) -> TrustWatch {
        let cell = trust::cell(&self.ctx);
        let following = trust::follow(Arc::clone(&self.ctx), Arc::clone(&cell), remember);
        TrustWatch {
            cell,
            task: self.spawn(following),
        }
    }

    /// Begins to request the certificates that a pod mounts, if it has not.
    fn request_certificates(&self, tables: &mut Tables, pod: &Pod) {
        for (of, projection) in pod_certificates::sources_of(pod) {
            let key = record_key(pod.namespace(), &pod.uid(), &of);
            tables.certificates.entry(key).or_insert_with(|| {
                let entry = Arc::new(Entry::new(&self.ctx, pod, of, projection));
                let following = pod_certificates::follow(Arc::clone(&self.ctx), Arc::clone(&entry));
                Kept {
                    entry,
                    task: self.spawn(following),
                }
            });
        }
    }

    /// Forgets trust anchors that no pod mounts any more.
    fn release_trust(&self, tables: &mut Tables) {
        if tables.trust.is_some() && !tables.pods.values().any(|pod| pod.trust) {
            tables.trust = None;
            self.ctx.mark_all(self.ctx.recorded_keys(trust::RECORDS));
        }
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> Task {
        self.ctx.api.as_ref()?;
        Some(AbortOnDropHandle::new(tokio::spawn(task)))
    }

    /// A pod no longer refers to `keys`.
    fn release<'a>(
        &self,
        tables: &mut Tables,
        uid: &PodUid,
        keys: impl Iterator<Item = &'a ObjectKey>,
    ) {
        for key in keys {
            let Some(users) = tables.users.get_mut(key) else {
                continue;
            };
            users.remove(uid);
            if users.is_empty() {
                tables.users.remove(key);
                tables.watches.remove(key);
                self.ctx.mark(key.record_key());
            }
        }
    }

    fn token_entries(&self) -> Vec<Arc<TokenEntry>> {
        lock(&self.tables).tokens.values().cloned().collect()
    }
}
