//! State shared by the status manager, the syncer and the mirror pods: the pods to handle, and the newest pods of the
//! API server.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::types::{PodExt, PodUid};

/// Time within which an answer about a pod may come after the source has shown it as gone: several requests, each of
/// which ends in 30 seconds.
const LATE: Duration = Duration::from_secs(300);

/// View of a pod or mirror pod in the API source.
#[derive(Clone, Debug)]
pub enum Observed {
    /// The API server has it, as given.
    Current(Arc<Pod>),
    /// The API server has it no longer.
    Gone(Arc<Pod>),
}

/// Pod to handle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wake {
    /// The status of this pod, by the UID of the record.
    Status(PodUid),
    /// This pod of the API server; a mirror pod's UID is its own.
    Api(PodUid),
    /// The API server has this pod no longer.
    Gone(PodUid),
}

#[derive(Default)]
pub(super) struct Shared {
    data: Mutex<Data>,
    /// For the syncer: there are [`Wake`]s.
    status: Notify,
    /// For the mirror pods: a static pod or mirror pod changed.
    mirrors: Notify,
    /// For the workers: there are pods in [`Data::outdated`].
    outdated: Notify,
}

#[derive(Default)]
struct Data {
    /// True if a task takes the wakes. Without an API server there is none, and nothing is gathered.
    attached: bool,
    wakes: Vec<Wake>,
    queued: HashSet<PodUid>,
    /// Pods of the API server by their own UID: as observed in this run of the agent, or as a write answered.
    api: HashMap<PodUid, Known>,
    /// Pods that went in the last minutes: answers to requests that were under way are no news of them.
    gone: HashMap<PodUid, Instant>,
    /// Mirror pods that went since [`Shared::take_gone_mirrors`].
    gone_mirrors: Vec<PodUid>,
    /// Pods whose status was computed in this run of the agent.
    computed: HashSet<PodUid>,
    /// Pods of which the API server shows another status than a previous run of the agent recorded.
    outdated: BTreeSet<PodUid>,
}

struct Known {
    pod: Arc<Pod>,
    /// The source has shown an older version since: it lags, or the server went back to an older state.
    behind: Option<u8>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Data> {
        self.data.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on wakes are gathered for [`Shared::take`].
    pub(super) fn attach(&self) {
        self.lock().attached = true;
    }

    /// A worker computed the status of a pod.
    pub(super) fn computed(&self, uid: &PodUid, is_static: bool, changed: bool) {
        {
            let mut data = self.lock();
            if !data.attached {
                return;
            }
            let first = data.computed.insert(uid.clone());
            if !(first || changed) {
                return;
            }
            data.wake(Wake::Status(uid.clone()));
        }
        self.status.notify_one();
        if is_static {
            self.mirrors.notify_one();
        }
    }

    pub(super) fn observe(&self, observed: Observed) {
        let pod = match &observed {
            Observed::Current(pod) | Observed::Gone(pod) => pod,
        };
        if pod.is_static() && !pod.is_mirror() {
            // Not of the API server: the mirror pods may have to follow.
            self.mirrors.notify_one();
            return;
        }
        let (uid, is_mirror) = (pod.uid(), pod.is_mirror());
        {
            let mut data = self.lock();
            match observed {
                Observed::Current(pod) => {
                    // A server that was restored from a backup has it again.
                    data.gone.remove(&uid);
                    data.keep_newer(pod);
                    data.wake(Wake::Api(uid));
                }
                Observed::Gone(_) => {
                    data.api.remove(&uid);
                    data.computed.remove(&uid);
                    if data.attached {
                        data.gone.insert(uid.clone(), Instant::now());
                        if is_mirror {
                            data.gone_mirrors.push(uid.clone());
                        }
                        data.wakes.push(Wake::Gone(uid));
                    }
                }
            }
        }
        self.status.notify_one();
        if is_mirror {
            self.mirrors.notify_one();
        }
    }

    /// A write or read answered with this pod. An answer that comes after the source has shown the pod as gone is dropped.
    pub(super) fn answered(&self, pod: Arc<Pod>) {
        let mut data = self.lock();
        if !data.gone.contains_key(&pod.uid()) {
            data.keep_newer(pod);
        }
    }

    /// Returns whether the source has shown a pod as gone in the last minutes.
    pub(super) fn went(&self, uid: &PodUid) -> bool {
        self.lock().gone.contains_key(uid)
    }

    /// Forgets pods of which the source has shown an older version than a write answered, and has not caught up since
    /// the previous call; they have to be requested. A server that was restored from a backup shows older versions.
    /// Call it from time to time.
    pub(super) fn take_behind(&self) {
        let mut data = self.lock();
        data.gone.retain(|_, at| at.elapsed() < LATE);
        let mut stuck = Vec::new();
        for (uid, known) in &mut data.api {
            match &mut known.behind {
                Some(0) => known.behind = Some(1),
                Some(_) => stuck.push(uid.clone()),
                None => {}
            }
        }
        for uid in stuck {
            data.api.remove(&uid);
            data.wake(Wake::Status(uid));
        }
        if !data.wakes.is_empty() {
            self.status.notify_one();
        }
    }

    /// Forgets the pod of the API server, as the known version may be wrong: it has to be requested.
    pub(super) fn doubt(&self, uid: &PodUid) {
        self.lock().api.remove(uid);
    }

    /// The newest known pod of the API server.
    pub(super) fn api_pod(&self, uid: &PodUid) -> Option<Arc<Pod>> {
        let data = self.lock();
        data.api.get(uid).map(|known| Arc::clone(&known.pod))
    }

    /// The mirror pods the API server is known to have.
    pub(super) fn mirrors(&self) -> Vec<Arc<Pod>> {
        let data = self.lock();
        data.api
            .values()
            .filter(|known| known.pod.is_mirror())
            .map(|known| Arc::clone(&known.pod))
            .collect()
    }

    /// Mirror pods that went since the call before.
    pub(super) fn take_gone_mirrors(&self) -> Vec<PodUid> {
        std::mem::take(&mut self.lock().gone_mirrors)
    }

    pub(super) fn is_computed(&self, uid: &PodUid) -> bool {
        self.lock().computed.contains(uid)
    }

    /// Asks the pod's worker to compute the status anew.
    pub(super) fn add_outdated(&self, uid: &PodUid) {
        self.lock().outdated.insert(uid.clone());
        self.outdated.notify_one();
    }

    /// Waits for pods of [`Self::add_outdated`], and takes them. For one caller. Cancel-safe.
    pub(super) async fn take_outdated(&self) -> BTreeSet<PodUid> {
        loop {
            self.outdated.notified().await;
            let outdated = std::mem::take(&mut self.lock().outdated);
            if !outdated.is_empty() {
                return outdated;
            }
        }
    }

    /// Forgets a pod that is forgotten everywhere else.
    pub(super) fn forget(&self, uid: &PodUid) {
        self.lock().computed.remove(uid);
    }

    /// Counts the pods that are remembered, in all tables.
    #[cfg(test)]
    pub(super) fn remembered(&self) -> usize {
        let data = self.lock();
        data.api.len() + data.gone.len() + data.computed.len() + data.queued.len()
    }

    /// Returns and removes the pods to handle. Each pod occurs once, however often it changed.
    pub(super) fn take(&self) -> Vec<Wake> {
        let mut data = self.lock();
        data.queued.clear();
        std::mem::take(&mut data.wakes)
    }

    /// Waits until [`Shared::take`] has something. Cancel-safe.
    pub(super) async fn woken(&self) {
        self.status.notified().await;
    }

    /// Waits until a static pod or mirror pod changed. Cancel-safe.
    pub(super) async fn mirrors_woken(&self) {
        self.mirrors.notified().await;
    }

    pub(super) fn wake_mirrors(&self) {
        self.mirrors.notify_one();
    }
}

impl Data {
    fn wake(&mut self, wake: Wake) {
        let (Wake::Status(uid) | Wake::Api(uid) | Wake::Gone(uid)) = &wake;
        if self.attached && self.queued.insert(uid.clone()) {
            self.wakes.push(wake);
        }
    }

    /// An answer to a write may be newer than what a watch delivers next.
    fn keep_newer(&mut self, pod: Arc<Pod>) {
        match self.api.get_mut(&pod.uid()) {
            Some(known) if is_older(&pod, &known.pod) => {
                known.behind.get_or_insert(0);
            }
            _ => {
                self.api.insert(pod.uid(), Known { pod, behind: None });
            }
        }
    }
}

/// Returns whether `pod` is an older version than `than`; versions that are not numbers cannot be compared.
fn is_older(pod: &Pod, than: &Pod) -> bool {
    let version = |pod: &Pod| -> Option<u64> {
        let version = pod.metadata.resource_version.as_deref()?;
        version.parse().ok()
    };
    match (version(pod), version(than)) {
        (Some(new), Some(known)) => new < known,
        _ => false,
    }
}
