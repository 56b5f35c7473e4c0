//! Every pod that the runtime knows: in one answer, or pod by pod where that is too large.
//!
//! A list holds the labels and annotations of all that it lists, and pods bring their own: 64 pods with 256 KiB of
//! annotations fill the 16 MiB that runtimes send in one message. The runtime then refuses the list. A list of a single
//! pod is far from that, so pods are asked for by their UIDs, and those have to come from elsewhere
//! ([`CriClient::knowing_pods`]).
//!
//! **Invariant:** nobody counts as gone who was not asked for. Whoever compares lists names what earlier lists showed.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::stream::{self, StreamExt, TryStreamExt};
use k8s_cri::v1;
use tracing::{info, warn};

use super::client::CriClient;
use super::convert::{listed_container, listed_sandbox, pod_of};
use super::error::{CriError, CriErrorKind};
use crate::kuberuntime::labels;
use crate::types::runtime::PodStatus;
use crate::types::{PodUid, blocking};

/// Lists of single pods under way at once.
const AT_ONCE: usize = 4;

type KnownPods = Arc<dyn Fn() -> BTreeSet<PodUid> + Send + Sync>;

/// State for listing pods one by one where a single answer cannot hold all.
#[derive(Clone, Default)]
pub(super) struct Parts {
    known: Vec<KnownPods>,
    in_use: Arc<AtomicBool>,
}

impl CriClient {
    /// Adds to who names the pods that are asked for one by one when the runtime cannot list all in one answer. `known`
    /// may block. Without any such a list is an error.
    #[must_use]
    pub fn knowing_pods(
        mut self,
        known: impl Fn() -> BTreeSet<PodUid> + Send + Sync + 'static,
    ) -> Self {
        self.parts.known.push(Arc::new(known));
        self
    }

    /// Returns whether the last list of all pods was assembled from lists of single pods, at a few calls each.
    pub fn lists_in_parts(&self) -> bool {
        self.parts.in_use.load(Ordering::Relaxed)
    }

    /// Every pod the runtime knows, from lists alone: no IPs, no exit codes. Upstream's `GetPods(all=true)`.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`]. `TooLarge` only when nobody was given to [`Self::knowing_pods`], or for a single pod.
    pub async fn list_pods(&self) -> Result<BTreeMap<PodUid, PodStatus>, CriError> {
        let sandboxes = unless_too_large(self.list_pod_sandboxes(None).await)?;
        let containers = unless_too_large(self.list_containers(None).await)?;
        let (sandboxes, containers) = match (sandboxes, containers) {
            (Ok(sandboxes), Ok(containers)) => {
                if self.parts.in_use.swap(false, Ordering::Relaxed) {
                    info!("the runtime lists all pods in one answer again");
                }
                (sandboxes, containers)
            }
            (sandboxes, containers) => self.list_in_parts(sandboxes, containers).await?,
        };
        let mut pods: BTreeMap<PodUid, PodStatus> = BTreeMap::new();
        for sandbox in &sandboxes {
            if let Some(pod) = pod_of(&mut pods, &sandbox.labels) {
                pod.sandboxes.push(listed_sandbox(sandbox));
            }
        }
        for container in &containers {
            if let Some(pod) = pod_of(&mut pods, &container.labels) {
                pod.containers.push(listed_container(container));
            }
        }
        for pod in pods.values_mut() {
            pod.sort();
        }
        Ok(pods)
    }

    /// Both lists, pod by pod where they are too large.
    async fn list_in_parts(
        &self,
        sandboxes: Result<Vec<v1::PodSandbox>, CriError>,
        containers: Result<Vec<v1::Container>, CriError>,
    ) -> Result<(Vec<v1::PodSandbox>, Vec<v1::Container>), CriError> {
        let error = sandboxes.as_ref().err().or(containers.as_ref().err());
        let reason = error.map(ToString::to_string).unwrap_or_default();
        if self.parts.known.is_empty() {
            return Ok((sandboxes?, containers?));
        }
        if !self.parts.in_use.swap(true, Ordering::Relaxed) {
            warn!(
                reason,
                "labels and annotations of pods are too large for one answer of the runtime, listing pods one by one"
            );
        }
        let known = self.parts.known.clone();
        let union = move || known.iter().flat_map(|known| known()).collect();
        let uids: Result<BTreeSet<PodUid>, _> = blocking::run(union).await;
        let mut uids = uids.map_err(|error| {
            let message = format!("{reason}; the pods to ask for are not known: {error}");
            CriError::new("list_podsandbox", "", CriErrorKind::TooLarge, message)
        })?;
        // The one list that is whole may show pods that nobody else knows.
        let labels = sandboxes.iter().flatten().map(|s| &s.labels);
        let labels = labels.chain(containers.iter().flatten().map(|c| &c.labels));
        let named = labels.filter_map(|labels| labels.get(labels::POD_UID));
        uids.extend(named.filter(|uid| !uid.is_empty()).map(PodUid::new));
        let sandboxes = match sandboxes {
            Ok(sandboxes) => sandboxes,
            Err(_) => {
                of_each(&uids, |uid| {
                    self.list_pod_sandboxes(Some(sandboxes_of(uid)))
                })
                .await?
            }
        };
        let containers = match containers {
            Ok(containers) => containers,
            Err(_) => of_each(&uids, |uid| self.list_containers(Some(containers_of(uid)))).await?,
        };
        Ok((sandboxes, containers))
    }
}

/// Selects the sandboxes of a pod.
pub(super) fn sandboxes_of(uid: &PodUid) -> v1::PodSandboxFilter {
    v1::PodSandboxFilter {
        label_selector: selector(uid),
        ..Default::default()
    }
}

/// Selects the containers of a pod.
pub(super) fn containers_of(uid: &PodUid) -> v1::ContainerFilter {
    v1::ContainerFilter {
        label_selector: selector(uid),
        ..Default::default()
    }
}

fn selector(uid: &PodUid) -> HashMap<String, String> {
    HashMap::from([(labels::POD_UID.to_owned(), uid.to_string())])
}

async fn of_each<'u, T, F>(
    uids: &'u BTreeSet<PodUid>,
    list: impl Fn(&'u PodUid) -> F,
) -> Result<Vec<T>, CriError>
where
    F: Future<Output = Result<Vec<T>, CriError>>,
{
    let lists: Vec<F> = uids.iter().map(list).collect();
    let lists: Vec<Vec<T>> = stream::iter(lists).buffered(AT_ONCE).try_collect().await?;
    Ok(lists.into_iter().flatten().collect())
}

fn unless_too_large<T>(answer: Result<T, CriError>) -> Result<Result<T, CriError>, CriError> {
    match answer {
        Err(error) if error.is_too_large() => Ok(Err(error)),
        Err(error) => Err(error),
        Ok(list) => Ok(Ok(list)),
    }
}
