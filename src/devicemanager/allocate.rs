//! Devices for a pod that is about to start: whether it has them, or gets them. Upstream: `ManagerImpl.Allocate`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;
use tracing::{debug, info};

use super::DeviceManager;
use super::client::{CallError, PluginClient};
use crate::core::devices::{
    self, Allocation, Granted, PodDevices, Request, Unreadable, Unusable, Wanted, allocations_key,
    choose, hint_of, reusable, taken, wanted,
};
use crate::core::pinning::Refusal;
use crate::core::state::{State, Transaction};
use crate::kubeletconfig::DeviceReadiness;
use crate::store::CommitError;
use crate::types::metrics::ResourceNameLabel;
use crate::types::{PodExt, PodUid};

/// Plugins have so long after the agent's start to register, before a pod that was cut off in the middle of its
/// allocation fails for want of one.
const REGISTRATION: Duration = Duration::from_secs(60);

/// Decision whether containers of a pod may start with their devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// They may.
    Ready,
    /// They may when their devices are back; the pod is named by [`DeviceManager::changed`] then.
    Waiting(String),
    /// They may not, and the pod fails.
    Refused(String),
    /// The devices that are left do not fit the topology manager's policy, and the pod fails.
    Unaligned(Refusal),
}

/// The NUMA nodes that a container may have devices of; `None` stands for any.
pub type Align<'a> = &'a (dyn Fn(&str) -> Result<Option<BTreeSet<i64>>, Refusal> + Sync);

/// Reason why a container has no devices.
#[derive(Debug, thiserror::Error)]
enum AllocateError {
    #[error(transparent)]
    Unusable(#[from] Unusable),
    /// Devices of an earlier run of the agent, whose plugin is to be asked again.
    #[error("{0}")]
    AskedBefore(Unusable),
    /// Devices of another pod, which may be any.
    #[error(transparent)]
    Unreadable(#[from] Unreadable),
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("{}", .0.message)]
    Unaligned(Refusal),
    #[error("commit devices of the pod: {0}")]
    Commit(#[from] CommitError),
}

/// A resource of a container of a pod.
#[derive(Clone, Copy)]
struct Place<'a> {
    pod: &'a Pod,
    align: Align<'a>,
    wanted: &'a [Wanted],
    container: &'a str,
    resource: &'a str,
    count: usize,
}

/// Devices to choose from.
struct Pool {
    devices: devices::Devices,
    taken: BTreeSet<String>,
    reusable: BTreeSet<String>,
    affinity: Option<BTreeSet<i64>>,
}

impl DeviceManager {
    /// Makes sure that the containers named `starting` have their devices, on the NUMA nodes that `align` returns. A pod of which nothing was started yet (`fresh`)
    /// gets those it lacks. Any other one has what is on record; after a start of the agent, its plugins must be there and
    /// its devices healthy before a container that does not run starts with them. What its records lack, since they were lost
    /// or the resource had no plugin then, it waits for.
    ///
    /// # Errors
    /// When devices cannot be recorded. Cancel-safe: what was begun is done again by the next call.
    pub async fn ready(
        &self,
        pod: &Pod,
        fresh: bool,
        starting: &[&str],
        align: Align<'_>,
    ) -> Result<Readiness, CommitError> {
        if !devices::may_want(pod) {
            return Ok(Readiness::Ready);
        }
        let wanted = wanted(pod, |resource| self.knows(resource));
        let held = match self.held(pod) {
            Ok(held) => held,
            Err(error) => return Ok(refused(&error)),
        };
        let lacking = |of: &&Wanted| {
            let mut resources = of.counts.keys();
            (fresh || starting.contains(&of.container.as_str()))
                && resources.any(|resource| !held.is_granted(&of.container, resource))
        };
        let lacking: Vec<&Wanted> = wanted.iter().filter(lacking).collect();
        let is_late = !fresh && !lacking.is_empty();
        let mut verdict = Ok(());
        if lacking.is_empty() || is_late {
            verdict = self
                .check(pod, &held, starting)
                .map_err(AllocateError::from);
        }
        if verdict.is_ok() && !lacking.is_empty() {
            verdict = match self.allocate(pod, &wanted, &lacking, align).await {
                Err(AllocateError::Commit(error)) => return Err(error),
                allocated => allocated,
            };
        }
        let uid = pod.uid();
        let readiness = match verdict {
            Ok(()) => {
                let checked = starting
                    .iter()
                    .map(|name| (uid.clone(), (*name).to_owned()));
                let mut shared = self.shared();
                shared.confirmed.extend(checked);
                shared.waiting.remove(&uid);
                return Ok(Readiness::Ready);
            }
            Err(error) if is_late => Readiness::Waiting(error.to_string()),
            Err(error) => self.outcome(&error),
        };
        let mut shared = self.shared();
        if let Readiness::Waiting(_) = readiness {
            let wanted = wanted.iter().flat_map(|w| w.counts.keys());
            let held = held.containers.values().flat_map(BTreeMap::keys);
            let resources = wanted.chain(held).cloned().collect();
            shared.waiting.insert(uid, resources);
        } else {
            shared.waiting.remove(&uid);
        }
        Ok(readiness)
    }

    /// Returns the decision for the pod: a plugin's refusal is final; a missing plugin may be waited for.
    fn outcome(&self, error: &AllocateError) -> Readiness {
        let waits = self.inner.options.readiness == DeviceReadiness::Wait;
        let is_young = self.now().since(self.inner.started) < REGISTRATION;
        match error {
            AllocateError::Unusable(
                why @ (Unusable::Unregistered { .. }
                | Unusable::NoneHealthy { .. }
                | Unusable::NotHealthy { .. }),
            ) if waits => Readiness::Waiting(why.to_string()),
            AllocateError::AskedBefore(why) if waits || is_young => {
                Readiness::Waiting(why.to_string())
            }
            AllocateError::Unreadable(why) => Readiness::Waiting(why.to_string()),
            AllocateError::Unaligned(refusal) => Readiness::Unaligned(refusal.clone()),
            error => refused(error),
        }
    }

    /// Checks the devices of containers that are to start and did not run under this agent.
    fn check(&self, pod: &Pod, held: &PodDevices, starting: &[&str]) -> Result<(), Unusable> {
        let uid: PodUid = pod.uid();
        let shared = self.shared();
        let is_confirmed = |name: &str| shared.confirmed.contains(&(uid.clone(), name.to_owned()));
        for name in starting.iter().filter(|name| !is_confirmed(name)) {
            for (resource, allocation) in held.containers.get(*name).into_iter().flatten() {
                let ids = allocation.ids.keys();
                shared.inventory.check_held(resource, ids)?;
            }
        }
        Ok(())
    }

    async fn allocate(
        &self,
        pod: &Pod,
        wanted: &[Wanted],
        lacking: &[&Wanted],
        align: Align<'_>,
    ) -> Result<(), AllocateError> {
        for of in lacking {
            for (resource, count) in &of.counts {
                let place = Place {
                    pod,
                    align,
                    wanted,
                    container: &of.container,
                    resource,
                    count: *count,
                };
                if !self.held(pod)?.is_granted(place.container, place.resource) {
                    self.allocate_one(place).await?;
                }
            }
        }
        Ok(())
    }

    async fn allocate_one(&self, place: Place<'_>) -> Result<(), AllocateError> {
        let ids = self.reserve(place).await?;
        fail::fail_point!("devicemanager::allocate::recorded");
        let client = self.client(place.resource)?;
        let ids: Vec<String> = ids.keys().cloned().collect();
        info!(pod = %place.pod.uid(), container = place.container, resource = place.resource, ?ids, "allocating devices");
        let label = ResourceNameLabel {
            resource_name: place.resource.to_owned(),
        };
        let begun = Instant::now();
        let answer = client.allocate(ids).await;
        let metrics = &self.inner.options.metrics;
        metrics
            .device_plugin_alloc_duration
            .get_or_create(&label)
            .observe(begun.elapsed().as_secs_f64());
        let granted = answer?;
        fail::fail_point!("devicemanager::allocate::answered");
        self.record(place, |held| {
            let known = held.allocation(place.container, place.resource);
            let ids = known.map(|a| a.ids.clone()).unwrap_or_default();
            (ids, Some(granted.clone()))
        })
        .await?;
        fail::fail_point!("devicemanager::allocate::granted");
        Ok(())
    }

    /// Records the devices of a container, unless some are recorded. They are on the disk when this returns.
    async fn reserve(&self, place: Place<'_>) -> Result<BTreeMap<String, Vec<i64>>, AllocateError> {
        let held = self.held(place.pod)?;
        if let Some(asked) = held.allocation(place.container, place.resource) {
            let usable = (self.shared().inventory).check_held(place.resource, asked.ids.keys());
            usable.map_err(AllocateError::AskedBefore)?;
            // Devices that were taken over may still be held in memory. An empty commit is refused until they are on the disk.
            self.store().commit(Transaction::new()).await?;
            return Ok(asked.ids.clone());
        }
        let preferred = self.preferred(place).await?;
        let _turn = self.inner.turn.lock().await;
        let state = self.store().snapshot();
        let pool = self.pool(&state, place)?;
        let chosen = choose(&pool.request(place), &preferred);
        let chosen = chosen.map_err(|shortage| Unusable::Short {
            resource: place.resource.to_owned(),
            shortage,
        })?;
        let numa = |id: String| {
            let device = pool.devices.get(&id);
            let nodes = device.map(|d| d.numa.clone()).unwrap_or_default();
            (id, nodes)
        };
        let ids: BTreeMap<String, Vec<i64>> = chosen.into_iter().map(numa).collect();
        self.record(place, |_| (ids.clone(), None)).await?;
        Ok(ids)
    }

    /// Asks the plugin which of the free devices it prefers, if it offers that. No answer is no preference.
    async fn preferred(&self, place: Place<'_>) -> Result<BTreeSet<String>, AllocateError> {
        let state = self.store().snapshot();
        let pool = self.pool(&state, place)?;
        let offers = (self.shared().inventory.options(place.resource)).preferred;
        let Some(hint) = hint_of(&pool.request(place)).filter(|_| offers) else {
            return Ok(BTreeSet::new());
        };
        let client = self.client(place.resource)?;
        match client.preferred(&hint).await {
            Ok(preferred) => Ok(preferred),
            Err(error) => {
                debug!(resource = place.resource, %error, "a device plugin has no preference");
                Ok(BTreeSet::new())
            }
        }
    }

    fn pool(&self, state: &State, place: Place<'_>) -> Result<Pool, AllocateError> {
        let devices = self.shared().inventory.usable(place.resource)?.clone();
        let held = PodDevices::of(state, place.pod)?.unwrap_or_default();
        let affinity = (place.align)(place.container).map_err(AllocateError::Unaligned)?;
        Ok(Pool {
            affinity,
            devices,
            taken: taken(state, place.resource)?,
            reusable: reusable(place.wanted, &held, place.container, place.resource),
        })
    }

    /// Returns the connection to a resource's plugin.
    pub(super) fn connected(&self, resource: &str) -> Option<PluginClient> {
        let shared = self.shared();
        shared.clients.get(resource).map(|c| c.client.clone())
    }

    fn client(&self, resource: &str) -> Result<PluginClient, Unusable> {
        let connected = self.connected(resource);
        connected.ok_or_else(|| Unusable::NoneHealthy {
            resource: resource.to_owned(),
        })
    }

    /// Replaces what the pod's record has of a container's resource by what `decide` makes of it, durably.
    async fn record(
        &self,
        place: Place<'_>,
        decide: impl Fn(&PodDevices) -> (BTreeMap<String, Vec<i64>>, Option<Granted>),
    ) -> Result<(), AllocateError> {
        let key = allocations_key(place.pod);
        loop {
            let seen = self.store().snapshot();
            let held = PodDevices::of(&seen, place.pod)?.unwrap_or_default();
            let (ids, granted) = decide(&held);
            let allocation = Allocation {
                ids,
                granted,
                outdated: None,
            };
            let held = held.with(place.container, place.resource, allocation);
            let put =
                Transaction::new()
                    .expect_object(&seen, &key)
                    .put_object(&key, &held, self.now());
            match self.store().commit(put).await {
                Ok(_) => return Ok(()),
                Err(CommitError::Stale { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

fn refused(why: &impl std::fmt::Display) -> Readiness {
    Readiness::Refused(format!("Allocate failed due to {why}, which is unexpected"))
}

impl Pool {
    fn request(&self, place: Place<'_>) -> Request<'_> {
        Request {
            devices: &self.devices,
            taken: &self.taken,
            reusable: &self.reusable,
            count: place.count,
            affinity: self.affinity.as_ref(),
        }
    }
}
