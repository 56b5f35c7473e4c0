//! Claims of one pod: prepared before it starts, unprepared when it has ended. Upstream: `PrepareResources`,
//! `UnprepareResources`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use k8s_openapi::api::core::v1::{Pod, PodResourceClaim};
use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::sync::OwnedMutexGuard;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::client::{Answers, CallError};
use super::proto::{Claim, method};
use super::{DraError, DraManager, Turns};
use crate::core::claims::{
    self, Bound, ClaimDevice, ClaimError, ClaimId, ClaimRecord, Release, claim_key,
};
use crate::core::state::Transaction;
use crate::store::CommitError;
use crate::types::metrics::DraOperationLabel;
use crate::types::{PodExt, PodUid, causes};

/// Deadline for the answer of the API server about one claim.
const FETCH: Duration = Duration::from_secs(10);

/// Holds everything else off a claim.
type Turn = OwnedMutexGuard<()>;

/// The answer of a driver that was to prepare claims.
struct Prepared {
    /// Instance that answered.
    instance: u64,
    answers: Answers<Vec<ClaimDevice>>,
}

impl DraManager {
    /// Makes sure that the claims of a pod are prepared in this boot. Before a new sandbox a driver that is another instance than
    /// the one that answered, or that this agent has not asked yet, is asked again. A claim that has the pod on record is not
    /// looked up in the API server again. A pod in a sandbox that it has (`in_sandbox`) keeps what is prepared, and nobody is
    /// asked.
    ///
    /// # Errors
    /// The reason why the pod cannot start yet. Claims prepared so far stay recorded, and are unprepared with the pod.
    pub async fn prepare(&self, pod: &Pod, in_sandbox: bool) -> Result<(), DraError> {
        if claims::references(pod).is_empty() {
            return Ok(());
        }
        let held = ClaimRecord::of_pod(&self.store().snapshot(), &pod.uid());
        if in_sandbox && claims::is_ready(pod, &held, self.boot()) {
            return Ok(());
        }
        let begun = Instant::now();
        let done = self.prepare_all(pod, &held).await;
        self.observe("PrepareResources", begun, done.is_err());
        let mut shared = self.shared();
        if matches!(done, Err(DraError::Unregistered(_))) {
            shared.waiting.insert(pod.uid());
        } else {
            shared.waiting.remove(&pod.uid());
        }
        done
    }

    /// Ends the use of its claims by a pod whose containers have stopped. Claims that no other pod uses are unprepared.
    ///
    /// # Errors
    /// The claims that are still recorded, to be retried.
    pub async fn unprepare(&self, pod: &PodUid) -> Result<(), DraError> {
        self.shared().waiting.remove(pod);
        let _of_pod = self.turn_of(pod).await;
        let held = ClaimRecord::of_pod(&self.store().snapshot(), pod);
        if held.is_empty() {
            return Ok(());
        }
        let begun = Instant::now();
        let mut done = Ok(());
        for id in held.into_keys() {
            let (manager, pod) = (self.clone(), pod.clone());
            let released = detached(async move { manager.release(&id, &pod).await }).await;
            done = done.and(released);
        }
        self.observe("UnprepareResources", begun, done.is_err());
        done
    }

    fn observe(&self, operation: &str, begun: Instant, is_error: bool) {
        let label = DraOperationLabel {
            operation_name: operation.to_owned(),
            is_error: is_error.to_string(),
        };
        let duration = &self.inner.options.metrics.dra_operations;
        let duration = duration.get_or_create_owned(&label);
        duration.observe(begun.elapsed().as_secs_f64());
    }

    async fn prepare_all(
        &self,
        pod: &Pod,
        held: &BTreeMap<ClaimId, ClaimRecord>,
    ) -> Result<(), DraError> {
        let mut bound = Vec::new();
        for entry in claims::references(pod) {
            bound.extend(self.bound(pod, &entry, held).await?);
        }
        let bound = claims::joined(bound);
        // Nothing is recorded of a claim whose driver was never here: its pod can go without it.
        for driver in bound.values().flat_map(|b| &b.drivers) {
            self.plugin(driver)?;
        }
        // On record or not yet: the end of the pod comes after this.
        let of_pod = self.turn_of(&pod.uid()).await;
        let left = CancellationToken::new();
        let _leaving = left.clone().drop_guard();
        let (manager, pod) = (self.clone(), pod.uid());
        detached(async move {
            let _of_pod = of_pod;
            manager.prepare_bound(&pod, bound, &left).await
        })
        .await
    }

    /// The claim of one entry of a pod: as on record, or else as the API server shows it.
    async fn bound(
        &self,
        pod: &Pod,
        entry: &PodResourceClaim,
        held: &BTreeMap<ClaimId, ClaimRecord>,
    ) -> Result<Option<Bound>, DraError> {
        let mut recorded = held.iter();
        let recorded = recorded.find(|(_, record)| record.stands_for(&pod.uid(), &entry.name));
        if let Some((id, record)) = recorded {
            return Ok(Some(Bound {
                id: id.clone(),
                uid: record.uid.clone(),
                drivers: record.drivers.keys().cloned().collect(),
                references: [entry.name.clone()].into(),
            }));
        }
        let Some(named) = claims::named(pod, entry)? else {
            return Ok(None);
        };
        let claim = self.fetch(pod.namespace(), &named.name).await?;
        let node = self.inner.options.node.get();
        let bound = claims::usable(pod, entry, &named, &claim, node.as_deref())?;
        Ok(Some(bound))
    }

    async fn fetch(&self, namespace: &str, name: &str) -> Result<ResourceClaim, DraError> {
        let failed = |why: String| DraError::Fetch {
            claim: name.to_owned(),
            why,
        };
        let Some(api) = &self.inner.options.api else {
            return Err(failed(
                "this node has no API server (--kubeconfig)".to_owned(),
            ));
        };
        let claims = kube::Api::<ResourceClaim>::namespaced(api.kube(), namespace);
        match tokio::time::timeout(FETCH, claims.get(name)).await {
            Ok(Ok(claim)) => Ok(claim),
            // Also by a server that knows no ResourceClaims.
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => {
                Err(ClaimError::NotFound(name.to_owned()).into())
            }
            Ok(Err(error)) => Err(failed(causes(&error))),
            Err(_) => Err(failed(format!("no answer within {} s", FETCH.as_secs()))),
        }
    }

    async fn prepare_bound(
        &self,
        pod: &PodUid,
        bound: BTreeMap<ClaimId, Bound>,
        left: &CancellationToken,
    ) -> Result<(), DraError> {
        let turns = left.run_until_cancelled(self.turns(bound.keys())).await;
        let turns = turns.ok_or(DraError::Abandoned)?;
        let mut held: BTreeMap<&ClaimId, Turn> = bound.keys().zip(turns).collect();
        let mut due: BTreeMap<String, BTreeMap<ClaimId, String>> = BTreeMap::new();
        for (id, of) in &bound {
            let record = self.reserve(id, of, pod).await?;
            let is_current = |driver: &str| self.is_confirmed(&record.uid, driver);
            for driver in claims::due(&record, self.boot(), is_current) {
                let of_driver = due.entry(driver).or_default();
                of_driver.insert(id.clone(), record.uid.clone());
            }
        }
        self.count();
        fail::fail_point!("dra::prepare::recorded");
        if left.is_cancelled() && !due.is_empty() {
            return Err(DraError::Abandoned);
        }
        // At the same time: a driver that hangs holds up its own claims, and no others of the pod.
        let mut calls = FuturesUnordered::new();
        for (driver, of_driver) in &due {
            calls.push(async move {
                let answers = self.ask_to_prepare(driver, of_driver, pod).await;
                (driver, of_driver, answers)
            });
        }
        let mut waits: BTreeSet<&String> = due.keys().collect();
        let mut failures = BTreeMap::new();
        loop {
            let has_call = |id: &ClaimId| waits.iter().any(|driver| due[*driver].contains_key(id));
            held.retain(|&id, _| has_call(id));
            let Some((driver, of_driver, answers)) = calls.next().await else {
                break;
            };
            // One after the other: two drivers may share a claim.
            let taken = match answers {
                Ok(answers) => self.take_prepared(driver, of_driver, answers, pod).await,
                Err(error) => Err(error),
            };
            if let Err(error) = taken {
                failures.insert(driver, error);
            }
            waits.remove(driver);
        }
        failures.into_values().next().map_or(Ok(()), Err)
    }

    /// Returns whether the instance of the driver that would be called now has prepared the claim for this agent.
    fn is_confirmed(&self, uid: &str, driver: &str) -> bool {
        let Ok(plugin) = self.plugin(driver) else {
            return false;
        };
        let key = (uid.to_owned(), driver.to_owned());
        self.shared().confirmed.get(&key) == Some(&plugin.instance)
    }

    /// Puts the pod on the record of a claim.
    async fn reserve(
        &self,
        id: &ClaimId,
        bound: &Bound,
        pod: &PodUid,
    ) -> Result<ClaimRecord, DraError> {
        let seen = self.store().snapshot();
        let known = ClaimRecord::of(&seen, id)?;
        let record = claims::reserved(known.as_ref(), bound, pod)?;
        if known.as_ref() != Some(&record) {
            let why = format!("{}/{}", id.namespace, id.name);
            let line = Transaction::new().journal(Some(pod), "claim reserved", why);
            self.put(id, &record, line).await?;
        }
        Ok(record)
    }

    /// Has one driver prepare claims, whose turns the caller has.
    async fn ask_to_prepare(
        &self,
        driver: &str,
        of_driver: &BTreeMap<ClaimId, String>,
        pod: &PodUid,
    ) -> Result<Prepared, DraError> {
        let plugin = self.plugin(driver)?;
        let asked = of_driver.iter().map(|(id, uid)| message(id, uid)).collect();
        info!(%pod, driver, claims = of_driver.len(), "preparing claims");
        let answers = plugin.client.prepare(asked).await;
        Ok(Prepared {
            instance: plugin.instance,
            answers: whole(method::PREPARE, driver, of_driver, answers)?,
        })
    }

    /// Records the answer of a driver.
    async fn take_prepared(
        &self,
        driver: &str,
        of_driver: &BTreeMap<ClaimId, String>,
        Prepared {
            instance,
            mut answers,
        }: Prepared,
        pod: &PodUid,
    ) -> Result<(), DraError> {
        fail::fail_point!("dra::prepare::answered");
        let mut done = Ok(());
        for (id, uid) in of_driver {
            let devices = match answers.remove(uid) {
                Some(Ok(devices)) => devices,
                Some(Err(why)) => {
                    done = done.and(Err(failed(method::PREPARE, driver, id, why)));
                    continue;
                }
                None => {
                    let why = "the driver gives no answer for it".to_owned();
                    done = done.and(Err(failed(method::PREPARE, driver, id, why)));
                    continue;
                }
            };
            self.record_prepared(id, driver, devices, pod).await?;
            let key = (uid.clone(), driver.to_owned());
            self.shared().confirmed.insert(key, instance);
        }
        done
    }

    async fn record_prepared(
        &self,
        id: &ClaimId,
        driver: &str,
        devices: Vec<ClaimDevice>,
        pod: &PodUid,
    ) -> Result<(), DraError> {
        let Some(known) = ClaimRecord::of(&self.store().snapshot(), id)? else {
            return Ok(());
        };
        let names = devices.iter().map(|d| format!("{}/{}", d.pool, d.device));
        let names: Vec<String> = names.collect();
        let record = claims::prepared(known.clone(), driver, self.boot(), devices);
        if record == known {
            return Ok(());
        }
        let why = format!(
            "{}/{} by {driver}: {}",
            id.namespace,
            id.name,
            names.join(", ")
        );
        let line = Transaction::new().journal(Some(pod), "claim prepared", why);
        Ok(self.put(id, &record, line).await?)
    }

    /// Takes a pod off a claim; what nobody else uses is unprepared first.
    async fn release(&self, id: &ClaimId, pod: &PodUid) -> Result<(), DraError> {
        let _turns = self.turns([id]).await;
        let Some(known) = ClaimRecord::of(&self.store().snapshot(), id)? else {
            return Ok(());
        };
        let last = match claims::released(&known, pod) {
            Release::Nothing => return Ok(()),
            Release::Shared(record) => {
                return Ok(self.put(id, &record, Transaction::new()).await?);
            }
            Release::Last(record) => record,
        };
        if last != known {
            self.put(id, &last, Transaction::new()).await?;
        }
        fail::fail_point!("dra::unprepare::recorded");
        let drivers: BTreeSet<String> = last.drivers.keys().cloned().collect();
        let mut left = Some(last);
        let mut done = Ok(());
        for driver in drivers {
            let Some(record) = left.clone() else { break };
            if let Err(error) = self.unprepare_by(&driver, id, &record.uid, pod).await {
                done = done.and(Err(error));
                continue;
            }
            left = claims::unprepared(record, &driver);
            if let Some(record) = &left {
                self.put(id, record, Transaction::new()).await?;
            }
        }
        if left.as_ref().is_none_or(|record| record.drivers.is_empty()) {
            let why = format!("{}/{}", id.namespace, id.name);
            let delete = Transaction::new().delete_object(&claim_key(id)).journal(
                Some(pod),
                "claim unprepared",
                why,
            );
            self.store().commit(delete).await?;
            self.count();
        }
        done
    }

    async fn unprepare_by(
        &self,
        driver: &str,
        id: &ClaimId,
        uid: &str,
        pod: &PodUid,
    ) -> Result<(), DraError> {
        let plugin = self.plugin(driver)?;
        info!(%pod, driver, claim = id.name, namespace = id.namespace, "unpreparing a claim");
        let key = (uid.to_owned(), driver.to_owned());
        self.shared().confirmed.remove(&key);
        let of_driver = BTreeMap::from([(id.clone(), uid.to_owned())]);
        let answers = plugin.client.unprepare(vec![message(id, uid)]).await;
        let mut answers = whole(method::UNPREPARE, driver, &of_driver, answers)?;
        fail::fail_point!("dra::unprepare::answered");
        match answers.remove(uid) {
            Some(Ok(())) => Ok(()),
            Some(Err(why)) => Err(failed(method::UNPREPARE, driver, id, why)),
            None => {
                let why = "the driver gives no answer for it".to_owned();
                Err(failed(method::UNPREPARE, driver, id, why))
            }
        }
    }

    /// Writes the record of a claim, whose turn the caller has.
    async fn put(
        &self,
        id: &ClaimId,
        record: &ClaimRecord,
        line: Transaction,
    ) -> Result<(), CommitError> {
        let put = line.put_object(&claim_key(id), record, self.inner.options.clock.now());
        self.store().commit(put).await.map(drop)
    }

    /// Waits until the claims of a pod are neither prepared nor unprepared.
    async fn turn_of(&self, pod: &PodUid) -> Turn {
        let turn = turn(&self.inner.pods, pod);
        turn.lock_owned().await
    }

    /// Waits until nothing else happens to some claims; returns their turns in the order of their names. While one is waited for,
    /// none is held: a driver that hangs keeps nobody from the others, and two pods never wait for each other.
    async fn turns<'a>(&self, ids: impl IntoIterator<Item = &'a ClaimId>) -> Vec<Turn> {
        let ids: BTreeSet<&ClaimId> = ids.into_iter().collect();
        let ids = ids.into_iter();
        let locks: Vec<_> = ids.map(|id| turn(&self.inner.turns, id)).collect();
        let mut waited: Option<(usize, Turn)> = None;
        loop {
            let (mut held, mut busy) = (Vec::new(), None);
            for (number, lock) in locks.iter().enumerate() {
                let own = waited.take_if(|(of, _)| *of == number);
                let turn = match own {
                    Some((_, turn)) => Ok(turn),
                    None => Arc::clone(lock).try_lock_owned(),
                };
                match turn {
                    Ok(turn) => held.push(turn),
                    Err(_) => {
                        busy = Some((number, Arc::clone(lock)));
                        break;
                    }
                }
            }
            let Some((number, lock)) = busy else {
                return held;
            };
            drop((held, waited.take()));
            waited = Some((number, lock.lock_owned().await));
        }
    }
}

/// Returns the lock of `key`. Those that nobody has are forgotten.
fn turn<K: Ord + Clone>(all: &Mutex<Turns<K>>, key: &K) -> Arc<tokio::sync::Mutex<()>> {
    let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|other, turn| other == key || Arc::strong_count(turn) > 1);
    Arc::clone(all.entry(key.clone()).or_default())
}

fn message(id: &ClaimId, uid: &str) -> Claim {
    Claim {
        namespace: id.namespace.clone(),
        uid: uid.to_owned(),
        name: id.name.clone(),
    }
}

fn failed(call: &'static str, driver: &str, id: &ClaimId, why: String) -> DraError {
    DraError::Failed {
        call,
        driver: driver.to_owned(),
        claim: id.name.clone(),
        why,
    }
}

/// The answers of a driver, which are about claims that it was asked for.
fn whole<T>(
    call: &'static str,
    driver: &str,
    asked: &BTreeMap<ClaimId, String>,
    answers: Result<Answers<T>, CallError>,
) -> Result<Answers<T>, DraError> {
    let broken = |why: String| DraError::Call {
        call,
        driver: driver.to_owned(),
        why,
    };
    let answers = answers.map_err(|error| broken(error.to_string()))?;
    let is_asked = |uid: &String| asked.values().any(|of| of == uid);
    match answers.keys().find(|uid| !is_asked(uid)) {
        Some(uid) => Err(broken(format!("it answers for an unknown claim UID {uid}"))),
        None => Ok(answers),
    }
}

/// Completes `work` even if the caller stops waiting.
async fn detached<T: Send + 'static>(
    work: impl Future<Output = Result<T, DraError>> + Send + 'static,
) -> Result<T, DraError> {
    match tokio::spawn(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(DraError::Ending),
        },
    }
}
