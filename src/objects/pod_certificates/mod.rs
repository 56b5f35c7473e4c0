//! Certificates of pods: requested for each `podCertificate` source of a registered pod, kept encrypted on disk, replaced
//! in time. `core::pod_certificates` decides.
//!
//! In: registered pods. Out: key and chain, and an [`ObjectChange`] of kind `PodCertificate` when there are newer ones. One
//! task per source makes the requests, upstream's `IssuingManager`. Beyond upstream, key, chain and the open request
//! survive a restart and a reboot (kind `podcertificates`), so nobody is asked again while the certificate is valid.
//!
//! **Invariant:** the key and the name of a request are on disk before the request is made. Without a usable secrets key
//! nothing is recorded, and a restart requests anew.

mod api;
mod key;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::api::core::v1::{Pod, PodCertificateProjection};
use kube::core::DynamicObject;
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;

use self::api::{Created, Subject, VERSIONS};
use self::key::KeyType;
use super::cache::lock;
use super::context::Context;
use super::{ObjectChange, ObjectError, Task, tokens};
use crate::apiserver::{ApiClient, Reachability};
use crate::core::pod_certificates::{
    self, Answer, CertificateRecord, CertificateRef, Issued, JITTER_MS, Pending, RECORDS, Step,
};
use crate::core::state::Transaction;
use crate::kuberuntime::sources::{PodKeyPair, mounted_volumes};
use crate::types::events::{Event, EventType};
use crate::types::{PodExt as _, Stamp, blocking, causes};

/// Kind of the changes.
pub(super) const KIND: &str = "PodCertificate";
/// Time for which a reader waits for the first certificate, from the begin of its request: most signers answer at once.
const PATIENCE: Duration = Duration::from_secs(3);
/// Longest time without a look at the clock, which may be set, or run on while the machine sleeps.
const LOOK_AGAIN: Duration = Duration::from_secs(60);
/// Longest duration of the requests of one attempt. Making a key is no part of it: that takes as long as the processor needs.
const DEADLINE: Duration = Duration::from_secs(60);
/// Keys that are made at once: RSA keys take a processor for seconds, and a node may start a hundred pods that want one.
static KEYS: Semaphore = Semaphore::const_new(2);

/// Returns the `podCertificate` sources of the volumes that a container of the pod mounts.
pub(super) fn sources_of(pod: &Pod) -> BTreeMap<CertificateRef, &PodCertificateProjection> {
    let mut found = BTreeMap::new();
    let volumes = pod.spec_ref().volumes.iter().flatten();
    let mut sources = volumes
        .filter_map(|volume| volume.projected.as_ref()?.sources.as_ref())
        .flatten();
    let has_any = sources.any(|source| source.pod_certificate.is_some());
    // Of most pods nothing else is read.
    if !has_any {
        return found;
    }
    let used = mounted_volumes(pod);
    for volume in pod.spec_ref().volumes.iter().flatten() {
        if !used.contains(volume.name.as_str()) {
            continue;
        }
        let sources = volume.projected.iter().flat_map(|p| &p.sources).flatten();
        for (index, source) in sources.enumerate() {
            if let Some(projection) = &source.pod_certificate {
                let volume = volume.name.clone();
                found.insert(CertificateRef { volume, index }, projection);
            }
        }
    }
    found
}

/// Returns whether a key of table `objects` is of a certificate.
pub(super) fn is_record(key: &str) -> bool {
    key.starts_with(RECORDS)
}

struct State {
    record: CertificateRecord,
    /// Version in which the open request exists, as index in [`VERSIONS`]; `None` while it is not known to exist.
    version: Option<usize>,
    /// Error of the newest attempt.
    trouble: Option<String>,
}

/// One source.
pub(super) struct Entry {
    record_key: String,
    of: CertificateRef,
    pod: Pod,
    subject: Subject,
    begun: Instant,
    state: Mutex<State>,
    /// Counts changes of the record.
    changed: watch::Sender<u64>,
}

/// A source with its task.
pub(super) struct Kept {
    pub(super) entry: Arc<Entry>,
    pub(super) task: Task,
}

/// Sources by the key of their record.
pub(super) type Entries = BTreeMap<String, Kept>;

/// Outcome of an attempt.
enum Progress {
    /// The record has changed.
    Settled,
    /// The signer has not answered.
    Waiting,
    /// The request is given up, for this reason: the next one has another key and name.
    Useless(String),
}

impl Entry {
    pub(super) fn new(
        ctx: &Context,
        pod: &Pod,
        of: CertificateRef,
        projection: &PodCertificateProjection,
    ) -> Self {
        let record_key = pod_certificates::record_key(pod.namespace(), &pod.uid(), &of);
        let record = ctx.recorded::<CertificateRecord>(&record_key, true);
        let node = pod.spec_ref().node_name.clone();
        // Events need its name alone.
        let mut named = pod.clone();
        named.spec = None;
        named.status = None;
        Self {
            subject: Subject {
                namespace: pod.namespace().to_owned(),
                pod: pod.name().to_owned(),
                uid: pod.uid().to_string(),
                service_account: tokens::service_account(pod).to_owned(),
                node: node.unwrap_or_default(),
                projection: projection.clone(),
            },
            record_key,
            of,
            pod: named,
            begun: Instant::now(),
            state: Mutex::new(State {
                record: record.unwrap_or_default(),
                version: None,
                trouble: None,
            }),
            changed: watch::Sender::new(0),
        }
    }

    fn record(&self) -> CertificateRecord {
        lock(&self.state).record.clone()
    }

    /// Returns the certificate. Waits for a first one a moment. Cancel-safe.
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub(super) async fn certificate(&self, ctx: &Context) -> Result<PodKeyPair, ObjectError> {
        let until = self.begun + PATIENCE;
        let mut changed = self.changed.subscribe();
        loop {
            let error = match self.at(ctx.clock.now()) {
                Ok(found) => return Ok(found),
                Err(error) => error,
            };
            let is_final = lock(&self.state).record.end.is_some();
            if is_final || ctx.api.is_none() || Instant::now() >= until {
                return Err(self.refusal(ctx, error));
            }
            tokio::select! {
                // Cancel-safe.
                _ = changed.changed() => {}
                () = tokio::time::sleep_until(until) => {}
            }
        }
    }

    fn at(&self, now: Stamp) -> Result<PodKeyPair, String> {
        let state = lock(&self.state);
        if let Some(issued) = state.record.usable(now) {
            return Ok(PodKeyPair {
                key: issued.key.clone(),
                chain: issued.chain.clone(),
            });
        }
        let mut why = match (&state.record.end, &state.record.issued) {
            (Some(end), _) => return Err(end.to_string()),
            (None, Some(_)) => "the certificate has expired and is not replaced yet",
            (None, None) => "credential bundle is not issued yet",
        }
        .to_owned();
        if let Some(pending) = &state.record.pending {
            why = format!("{why}: waiting for PodCertificateRequest {}", pending.name);
        }
        if let Some(trouble) = &state.trouble {
            why = format!("{why}: {trouble}");
        }
        Err(why)
    }

    fn refusal(&self, ctx: &Context, why: String) -> ObjectError {
        let kind = "pod certificate";
        let CertificateRef { volume, index } = &self.of;
        let key = format!("{index} of volume {volume}");
        match ctx.api {
            None => ObjectError::Standalone { kind, key },
            Some(_) => ObjectError::Refused { kind, key, why },
        }
    }

    /// Records what is known now; it is on the disk when this returns.
    async fn put(&self, ctx: &Context, record: CertificateRecord) -> Result<(), String> {
        if let Some(object) = ctx.record_of(&self.record_key, "", &record, true) {
            let transaction = Transaction::new().put(&self.record_key, object);
            let done = ctx.store.commit(transaction).await;
            done.map_err(|error| format!("record the certificate: {}", causes(&error)))?;
        }
        lock(&self.state).record = record;
        self.changed.send_modify(|count| *count += 1);
        Ok(())
    }

    fn announce(&self, ctx: &Context) {
        ctx.tell(ObjectChange {
            kind: KIND,
            namespace: self.subject.namespace.clone(),
            name: self.subject.uid.clone(),
        });
    }

    fn emit(&self, ctx: &Context, reason: &str, text: &str) {
        if let Some(events) = &ctx.events {
            events.record(Event::pod(EventType::Warning, &self.pod, reason, text));
        }
    }

    /// Emits the event about the age of the certificate, once.
    async fn give_notice(&self, ctx: &Context) -> Result<(), String> {
        let mut record = self.record();
        let now = ctx.clock.now();
        let Some(issued) = &mut record.issued else {
            return Ok(());
        };
        let Some(notice) = issued.notice(now) else {
            return Ok(());
        };
        issued.told = Some(notice);
        self.put(ctx, record).await?;
        let (reason, text) = notice.event();
        self.emit(ctx, reason, text);
        Ok(())
    }

    /// Begins a request if there is none, and looks for its answer.
    async fn attempt(&self, ctx: &Context, api: &ApiClient) -> Result<Progress, String> {
        let key_type: KeyType = self.subject.projection.key_type.parse().map_err(text)?;
        let pending = match self.record().pending {
            Some(pending) => pending,
            None => self.begin(ctx, key_type).await?,
        };
        let advance = self.advance(ctx, api, key_type, pending);
        let silence = |_| Err(format!("no answer within {} s", DEADLINE.as_secs()));
        let advanced = tokio::time::timeout(DEADLINE, advance).await;
        advanced.unwrap_or_else(silence)
    }

    /// Makes the request unless it is known to exist, and looks for its answer.
    async fn advance(
        &self,
        ctx: &Context,
        api: &ApiClient,
        key_type: KeyType,
        pending: Pending,
    ) -> Result<Progress, String> {
        let known = lock(&self.state).version;
        let version = match known {
            Some(version) => version,
            None => self.create(api, key_type, &pending).await?,
        };
        let found = api::find(api, &self.subject, version, &pending.name);
        let Some(found) = found.await.map_err(text)? else {
            // Somebody deleted it: it is made again, with the same key.
            lock(&self.state).version = None;
            return Err(format!("PodCertificateRequest {} is gone", pending.name));
        };
        if found.data["spec"]["podUID"] != self.subject.uid.as_str() {
            self.abandon(ctx).await?;
            return Ok(Progress::Useless(format!(
                "PodCertificateRequest {} is another pod's",
                pending.name
            )));
        }
        self.accept(ctx, pending, &found).await
    }

    /// Makes a key, and records it with the name of the request that will be made.
    async fn begin(&self, ctx: &Context, key_type: KeyType) -> Result<Pending, String> {
        let turn = KEYS.acquire().await;
        let made = blocking::run(move || key::make(key_type)).await;
        drop(turn);
        let made = made.map_err(|error| error.to_string())?.map_err(text)?;
        let suffix: String = rand::random::<[u8; 8]>()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let pending = Pending {
            name: format!("req-{suffix}"),
            key: made.key,
            request: STANDARD.encode(made.request),
        };
        let record = CertificateRecord {
            pending: Some(pending.clone()),
            ..self.record()
        };
        self.put(ctx, record).await?;
        Ok(pending)
    }

    async fn create(
        &self,
        api: &ApiClient,
        key_type: KeyType,
        pending: &Pending,
    ) -> Result<usize, String> {
        let created = api::create(api, &self.subject, key_type, pending).await;
        let version = match created.map_err(text)? {
            Created::Now(version) => {
                tracing::info!(
                    pod = self.subject.uid,
                    request = pending.name,
                    signer = self.subject.projection.signer_name,
                    version = VERSIONS[version],
                    "made a PodCertificateRequest"
                );
                version
            }
            // By the previous run of the agent, or by an attempt whose answer was lost.
            Created::Before(version) => version,
        };
        lock(&self.state).version = Some(version);
        Ok(version)
    }

    /// Forgets the open request: the next one has another key and name.
    async fn abandon(&self, ctx: &Context) -> Result<(), String> {
        let record = CertificateRecord {
            pending: None,
            ..self.record()
        };
        self.put(ctx, record).await?;
        lock(&self.state).version = None;
        Ok(())
    }

    /// Takes the answer of a signer, if there is one.
    async fn accept(
        &self,
        ctx: &Context,
        pending: Pending,
        found: &DynamicObject,
    ) -> Result<Progress, String> {
        let name = format!("{}/{}", self.subject.namespace, pending.name);
        let answer = pod_certificates::read_answer(&found.data["status"]);
        let answer = answer
            .map_err(|field| format!("PodCertificateRequest {name} was issued without {field}"))?;
        let mut record = self.record();
        let certificate = match answer {
            Answer::Pending => return Ok(Progress::Waiting),
            Answer::Issued(certificate) => certificate,
            Answer::Ended(end) => {
                let (reason, message) = end.event(&name);
                (record.pending, record.end) = (None, Some(end));
                self.put(ctx, record).await?;
                tracing::warn!(pod = self.subject.uid, message, "a pod gets no certificate");
                self.emit(ctx, reason, &message);
                self.announce(ctx);
                return Ok(Progress::Settled);
            }
        };
        let request = STANDARD.decode(&pending.request).unwrap_or_default();
        let now = ctx.clock.now();
        let is_of_key = key::certifies(&certificate.chain, &request);
        let jitter_ms = rand::random_range(0..JITTER_MS);
        let issued = Issued::new(pending.key, certificate, now, jitter_ms);
        if !is_of_key || issued.is_expired(now) {
            self.abandon(ctx).await?;
            let what = match is_of_key {
                false => "is not for the pod's key",
                true => "has expired",
            };
            return Ok(Progress::Useless(format!(
                "the certificate of PodCertificateRequest {name} {what}"
            )));
        }
        tracing::info!(
            pod = self.subject.uid,
            request = name,
            "a certificate for a pod was issued"
        );
        (record.pending, record.issued) = (None, Some(issued));
        self.put(ctx, record).await?;
        {
            let mut state = lock(&self.state);
            (state.version, state.trouble) = (None, None);
        }
        self.announce(ctx);
        Ok(Progress::Settled)
    }

    fn note(&self, trouble: String) {
        let mut state = lock(&self.state);
        if state.trouble.as_ref() != Some(&trouble) {
            tracing::warn!(
                pod = self.subject.uid,
                volume = self.of.volume,
                error = trouble,
                "cannot get a certificate for a pod, retrying"
            );
        }
        state.trouble = Some(trouble);
    }
}

fn text(error: impl std::error::Error + 'static) -> String {
    causes(&error)
}

/// Keeps the certificate of one source good until it is dropped, or until a signer refuses.
pub(super) async fn follow(ctx: Arc<Context>, entry: Arc<Entry>) {
    let Some(api) = ctx.api.clone() else {
        return;
    };
    let (mut failures, mut looks) = (0_u32, 0_u32);
    // Requests in a row that were of no use. A signer that answers does not make up for them.
    let mut useless = 0_u32;
    loop {
        if let Err(trouble) = entry.give_notice(&ctx).await {
            entry.note(trouble);
        }
        let step = entry.record().next_step(ctx.clock.now());
        let pause = match step {
            Step::End => return,
            Step::Rest(left) => {
                (failures, looks, useless) = (0, 0, 0);
                tokio::time::sleep(left.min(LOOK_AGAIN)).await;
                continue;
            }
            Step::Request => match entry.attempt(&ctx, &api).await {
                Ok(Progress::Settled) => continue,
                Ok(Progress::Waiting) => {
                    lock(&entry.state).trouble = None;
                    failures = 0;
                    looks = looks.saturating_add(1);
                    pod_certificates::poll_pause(looks)
                }
                Ok(Progress::Useless(why)) => {
                    entry.note(why);
                    (failures, looks) = (0, 0);
                    useless = useless.saturating_add(1);
                    pod_certificates::retry_pause(useless)
                }
                Err(trouble) => {
                    entry.note(trouble);
                    failures = failures.saturating_add(1);
                    pod_certificates::retry_pause(failures)
                }
            },
        };
        wait(&api, pause.mul_f64(rand::random_range(0.8..1.2))).await;
    }
}

/// Waits for the pause, or until an API server that is away answers again.
async fn wait(api: &ApiClient, pause: Duration) {
    let is_down = matches!(api.connection().now(), Reachability::Down(_));
    tokio::select! {
        () = tokio::time::sleep(pause) => {}
        () = async {
            api.connection().up().await;
            // Not all of them in the same moment.
            tokio::time::sleep(Duration::from_millis(rand::random_range(0..500))).await;
        }, if is_down => {}
    }
}
