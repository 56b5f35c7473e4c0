//! The pod cache: the newest status of each pod as the runtime showed it.
//!
//! Written by the PLEG alone; read by workers, which ask for an entry newer than their last sync. A miss is
//! an empty status once the runtime was listed. Upstream: `kubecontainer.Cache`.
//!
//! **Invariant:** a caller that draws a conclusion from the absence of a container uses [`PodCache::known`] and
//! [`PodCache::present`]: a pod that could not be inspected, or was not listed yet, may run.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, PoisonError, RwLock};

use tokio::sync::watch;
use tokio::time::Instant;

use crate::types::PodUid;
use crate::types::runtime::PodStatus;

/// The runtime could not be asked about a pod.
#[derive(Clone, Debug, thiserror::Error)]
#[error("inspect pod {uid}: {message}")]
pub struct InspectError {
    /// The pod.
    pub uid: PodUid,
    /// Error message of the runtime.
    pub message: String,
}

/// A status and the moment it is known to be true of.
#[derive(Clone, Debug)]
pub struct Observed {
    /// The status.
    pub status: Arc<PodStatus>,
    /// Moment before the request to the runtime.
    pub as_of: Instant,
}

#[derive(Clone, Debug)]
struct Entry {
    status: Result<Arc<PodStatus>, InspectError>,
    /// Moment before the request to the runtime: everything up to then is included.
    as_of: Instant,
}

#[derive(Debug, Default)]
struct Data {
    entries: HashMap<PodUid, Entry>,
    /// Every pod without a younger entry was unchanged as of this moment, but for those in `changed`.
    as_of: Option<Instant>,
    /// Pods that were not as inspected when that moment's list was made, and have not been inspected since.
    changed: HashMap<PodUid, Changed>,
}

#[derive(Clone, Copy, Debug)]
struct Changed {
    /// The moment of the newest list that shows another pod than the entry does.
    since: Instant,
    /// The moment as of which the entry was known to be true.
    as_of: Option<Instant>,
}

impl Data {
    /// The moment as of which a pod's entry, or that it has none, is known to be true by a list of all.
    fn covered(&self, uid: &PodUid) -> Option<Instant> {
        match self.changed.get(uid) {
            Some(changed) => changed.as_of,
            None => self.as_of,
        }
    }
}

/// Shared handle to the cache.
#[derive(Clone, Debug)]
pub struct PodCache {
    data: Arc<RwLock<Data>>,
    changed: watch::Sender<u64>,
}

impl Default for PodCache {
    fn default() -> Self {
        Self {
            data: Arc::default(),
            changed: watch::Sender::new(0),
        }
    }
}

impl PodCache {
    /// The newest status, however old; empty when the pod is unknown or could not be inspected.
    pub fn get(&self, uid: &PodUid) -> Arc<PodStatus> {
        let data = self.data.read().unwrap_or_else(PoisonError::into_inner);
        match data.entries.get(uid) {
            Some(Entry {
                status: Ok(status), ..
            }) => Arc::clone(status),
            _ => Arc::new(PodStatus::empty(uid.clone())),
        }
    }

    /// Returns the newest status, however old, empty for a pod that the runtime does not list; `None` when it is not
    /// known: the newest inspection failed or is still to come, or the runtime was not listed yet.
    pub fn known(&self, uid: &PodUid) -> Option<Arc<PodStatus>> {
        if self.has_changed(uid) {
            return None;
        }
        let observed = self.newer_than(uid, None)?.ok()?;
        Some(observed.status)
    }

    fn has_changed(&self, uid: &PodUid) -> bool {
        let data = self.data.read().unwrap_or_else(PoisonError::into_inner);
        data.changed.contains_key(uid)
    }

    /// Returns the pods of which the runtime may have something, those that were not or could not be inspected included; `None`
    /// before the runtime was listed for the first time.
    pub fn present(&self) -> Option<BTreeSet<PodUid>> {
        let data = self.data.read().unwrap_or_else(PoisonError::into_inner);
        data.as_of?;
        let listed = data.entries.keys().chain(data.changed.keys());
        Some(listed.cloned().collect())
    }

    /// Returns whether the runtime was listed.
    pub fn is_listed(&self) -> bool {
        let data = self.data.read().unwrap_or_else(PoisonError::into_inner);
        data.as_of.is_some()
    }

    /// Returns whether the runtime has containers or sandboxes of the pod.
    pub fn contains(&self, uid: &PodUid) -> bool {
        let data = self.data.read().unwrap_or_else(PoisonError::into_inner);
        data.entries.contains_key(uid)
    }

    /// All pods the runtime knows.
    pub fn all(&self) -> Vec<Arc<PodStatus>> {
        let data = self.data.read().unwrap_or_else(PoisonError::into_inner);
        data.entries
            .values()
            .filter_map(|e| e.status.as_ref().ok().cloned())
            .collect()
    }

    /// The pods of which anything is known, also those that could not be inspected.
    pub(super) fn uids(&self) -> BTreeSet<PodUid> {
        let data = self.data.read().unwrap_or_else(PoisonError::into_inner);
        data.entries.keys().cloned().collect()
    }

    /// A status that includes everything up to `than`. Cancel-safe: waiting changes nothing.
    /// Upstream: `GetNewerThan`.
    ///
    /// # Errors
    /// When the newest attempt to inspect the pod failed.
    pub async fn get_newer_than(
        &self,
        uid: &PodUid,
        than: Option<Instant>,
    ) -> Result<Observed, InspectError> {
        let mut changed = self.changed.subscribe();
        loop {
            changed.mark_unchanged();
            if let Some(answer) = self.newer_than(uid, than) {
                return answer;
            }
            if changed.changed().await.is_err() {
                return Err(InspectError {
                    uid: uid.clone(),
                    message: "the pod cache is closed".into(),
                });
            }
        }
    }

    /// Returns whether [`PodCache::get_newer_than`] would answer at once.
    pub fn is_newer_than(&self, uid: &PodUid, than: Option<Instant>) -> bool {
        self.newer_than(uid, than).is_some()
    }

    fn newer_than(
        &self,
        uid: &PodUid,
        than: Option<Instant>,
    ) -> Option<Result<Observed, InspectError>> {
        let data = self.data.read().unwrap_or_else(PoisonError::into_inner);
        let global = data.covered(uid).filter(|g| than.is_none_or(|t| *g >= t));
        match (data.entries.get(uid), global) {
            (Some(entry), global) if global.is_some() || than.is_none_or(|t| entry.as_of >= t) => {
                let as_of = global.map_or(entry.as_of, |g| g.max(entry.as_of));
                Some(
                    entry
                        .status
                        .clone()
                        .map(|status| Observed { status, as_of }),
                )
            }
            (None, Some(as_of)) => Some(Ok(Observed {
                status: Arc::new(PodStatus::empty(uid.clone())),
                as_of,
            })),
            _ => None,
        }
    }

    /// Stores what an inspection that began at `as_of` returned. An older answer never replaces a newer one.
    pub(super) fn set(
        &self,
        uid: &PodUid,
        status: Result<Arc<PodStatus>, InspectError>,
        as_of: Instant,
    ) {
        {
            let mut data = self.data.write().unwrap_or_else(PoisonError::into_inner);
            if data.entries.get(uid).is_some_and(|e| e.as_of > as_of) {
                return;
            }
            if data.changed.get(uid).is_some_and(|c| c.since <= as_of) {
                data.changed.remove(uid);
            }
            let gone =
                matches!(&status, Ok(s) if s.sandboxes.is_empty() && s.containers.is_empty());
            if gone && data.covered(uid).is_some_and(|g| g >= as_of) {
                data.entries.remove(uid);
            } else {
                data.entries.insert(uid.clone(), Entry { status, as_of });
            }
        }
        self.notify();
    }

    /// Says that a list of all which began at `as_of` is reflected, but for the pods that it showed `changed`: those are
    /// as before until they are inspected. Empty entries are dropped.
    pub(super) fn set_global(&self, as_of: Instant, changed: impl IntoIterator<Item = PodUid>) {
        {
            let mut data = self.data.write().unwrap_or_else(PoisonError::into_inner);
            if data.as_of.is_some_and(|newer| newer > as_of) {
                return;
            }
            let changed = changed.into_iter().map(|uid| {
                let since = Changed {
                    since: as_of,
                    as_of: data.covered(&uid),
                };
                (uid, since)
            });
            data.changed = changed.collect();
            data.as_of = Some(as_of);
            data.entries.retain(|_, e| match &e.status {
                Ok(s) => !(s.sandboxes.is_empty() && s.containers.is_empty()) || e.as_of > as_of,
                Err(_) => true,
            });
        }
        self.notify();
    }

    fn notify(&self) {
        self.changed.send_modify(|n| *n = n.wrapping_add(1));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::types::runtime::{SandboxState, SandboxStatus};

    fn status(uid: &PodUid) -> Arc<PodStatus> {
        let mut status = PodStatus::empty(uid.clone());
        status.sandboxes.push(SandboxStatus {
            id: "s".into(),
            attempt: 0,
            state: SandboxState::Ready,
            created_at_ns: 1,
            ips: vec![],
            host_network: None,
            runtime_handler: String::new(),
        });
        Arc::new(status)
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_waits_for_an_entry_as_of_its_last_sync() {
        let cache = PodCache::default();
        let uid = PodUid::new("u");
        let t0 = Instant::now();
        cache.set(&uid, Ok(status(&uid)), t0);
        let t1 = t0 + Duration::from_secs(1);
        let reader = tokio::spawn({
            let (cache, uid) = (cache.clone(), uid.clone());
            async move { cache.get_newer_than(&uid, Some(t1)).await }
        });
        tokio::task::yield_now().await;
        assert!(!reader.is_finished());
        cache.set_global(t1, []);
        let got = reader.await.expect("task").expect("status");
        assert_eq!(got.status.sandboxes.len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_miss_is_empty_once_a_relist_has_covered_it() {
        let cache = PodCache::default();
        let uid = PodUid::new("u");
        assert!(cache.newer_than(&uid, None).is_none());
        cache.set_global(Instant::now(), []);
        let got = cache.get_newer_than(&uid, None).await.expect("status");
        assert!(got.status.containers.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_does_not_cover_what_it_showed_changed_before_that_is_inspected() {
        let cache = PodCache::default();
        let (old, new) = (PodUid::new("old"), PodUid::new("new"));
        let at = |s| Instant::now() + Duration::from_secs(s);
        let (t0, t1, t2, t3) = (at(0), at(1), at(2), at(3));
        cache.set(&old, Ok(status(&old)), t0);
        cache.set_global(t1, []);
        cache.set_global(t2, [old.clone(), new.clone()]);
        for uid in [&old, &new] {
            assert!(cache.is_newer_than(uid, Some(t1)));
            assert!(!cache.is_newer_than(uid, Some(t2)));
            // An inspection that began before the list does not tell what the list saw.
            cache.set(uid, Ok(status(uid)), t1 + Duration::from_millis(1));
            assert!(!cache.is_newer_than(uid, Some(t2)));
        }
        cache.set_global(t3, [old.clone()]);
        assert!(cache.is_newer_than(&new, Some(t3)));
        assert!(cache.is_newer_than(&old, Some(t1)) && !cache.is_newer_than(&old, Some(t2)));
        cache.set(&old, Ok(status(&old)), t3);
        assert!(cache.is_newer_than(&old, Some(t3)));
    }

    #[tokio::test(start_paused = true)]
    async fn an_older_answer_never_replaces_a_newer_one() {
        let cache = PodCache::default();
        let uid = PodUid::new("u");
        let t0 = Instant::now();
        let t1 = t0 + Duration::from_secs(1);
        cache.set(&uid, Ok(status(&uid)), t1);
        cache.set(&uid, Ok(Arc::new(PodStatus::empty(uid.clone()))), t0);
        assert_eq!(cache.get(&uid).sandboxes.len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_inspection_is_an_error_for_readers() {
        let cache = PodCache::default();
        let uid = PodUid::new("u");
        let error = InspectError {
            uid: uid.clone(),
            message: "hung".into(),
        };
        cache.set(&uid, Err(error), Instant::now());
        assert!(cache.get_newer_than(&uid, None).await.is_err());
    }

    // Invariant BOOT-4.
    #[tokio::test(start_paused = true)]
    async fn what_was_not_looked_at_or_not_inspected_may_run() {
        let cache = PodCache::default();
        let [seen, failed, other] = ["seen", "failed", "other"].map(PodUid::new);
        let now = Instant::now();
        cache.set(&seen, Ok(status(&seen)), now);
        assert_eq!(cache.known(&seen), Some(status(&seen)));
        assert_eq!(cache.known(&other), None, "nothing was listed yet");
        assert_eq!(cache.present(), None);
        let error = InspectError {
            uid: failed.clone(),
            message: "hung".into(),
        };
        cache.set(&failed, Err(error), now);
        let listed = PodUid::new("listed");
        cache.set_global(now, []);
        assert_eq!(cache.known(&failed), None);
        let empty = Arc::new(PodStatus::empty(other.clone()));
        assert_eq!(cache.known(&other), Some(empty));
        assert_eq!(
            cache.present(),
            Some(BTreeSet::from([failed.clone(), seen.clone()]))
        );
        // A later list shows something of a pod, and another one as it was not inspected.
        tokio::time::advance(Duration::from_secs(1)).await;
        cache.set_global(Instant::now(), [listed.clone(), seen.clone()]);
        assert_eq!(cache.known(&listed), None);
        assert_eq!(cache.known(&seen), None);
        assert_eq!(
            cache.present(),
            Some(BTreeSet::from([failed, listed, seen]))
        );
    }
}
