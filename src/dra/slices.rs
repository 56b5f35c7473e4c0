//! Deletes ResourceSlices of drivers that are gone, so that the scheduler places no pods on devices that nobody can prepare.
//! Upstream: `DRAPluginManager.wipeResourceSlices`.
//!
//! A driver is gone when no instance of it was connected for [`GRACE`]; once registrations are taken after a start of the agent, all
//! drivers have as long to register, those on record and those that this agent has never seen ([`OTHERS`]). Upstream deletes the
//! slices of all drivers at its start, and they are written anew.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::Resource as _;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, DeleteParams, ListParams};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{DraManager, delete_of};
use crate::types::causes;

/// Longest absence of a driver; upstream's `defaultWipingDelay`.
const GRACE: Duration = Duration::from_secs(30);
/// Pauses before a deletion is tried again: the first and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(300));
/// Stands for all drivers of the node that have not registered since the agent has started. No driver has this name.
const OTHERS: &str = "";
/// Deadline of a deletion.
const DELETE: Duration = Duration::from_secs(30);

/// Drivers that are away.
#[derive(Default)]
pub(super) struct Wipes {
    /// Time at which their slices are deleted, and the pause after a failure.
    pub(super) due: BTreeMap<String, (Instant, Duration)>,
}

impl Wipes {
    /// Drivers that have not registered with this agent yet: those on record, and all others.
    pub(super) fn of(drivers: BTreeSet<String>) -> Self {
        let mut wipes = Self::default();
        wipes.away(OTHERS);
        for driver in drivers {
            wipes.away(&driver);
        }
        wipes
    }

    fn away(&mut self, driver: &str) {
        let first = (Instant::now() + GRACE, PAUSES.0);
        self.due.entry(driver.to_owned()).or_insert(first);
    }
}

impl DraManager {
    pub(super) fn wipes(&self) -> MutexGuard<'_, Wipes> {
        let wipes = self.inner.wipes.lock();
        wipes.unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the time that drivers have to register: none could before, while the runtime was waited for. Call it before
    /// [`Self::run`].
    pub fn begin_registration(&self) {
        let first = Instant::now() + GRACE;
        for (at, _) in self.wipes().due.values_mut() {
            *at = first;
        }
    }

    /// An instance of a driver has come, connected, or gone. Upstream: `sync`.
    pub(super) fn moved(&self, driver: &str) {
        {
            // Held from the look on: of two moves at a time, the later look counts.
            let mut wipes = self.wipes();
            let mut shared = self.shared();
            let mut instances = shared.drivers.get(driver).into_iter().flatten();
            if instances.any(|plugin| plugin.client.is_connected()) {
                wipes.due.remove(driver);
                let waiting = std::mem::take(&mut shared.waiting);
                shared.changed.extend(waiting);
                self.inner.changes.notify_one();
            } else {
                wipes.away(driver);
            }
        }
        self.inner.moved.notify_one();
    }

    /// Deletes the ResourceSlices of drivers that stay away, until `stop` is cancelled. Ends the tasks that
    /// [`Self::register`] has started with it.
    pub async fn run(self, stop: CancellationToken) {
        let _tasks = self.inner.stop.clone().drop_guard();
        loop {
            let next = self.wipes().due.values().map(|(at, _)| *at).min();
            let due = async {
                match next {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.inner.moved.notified() => {}
                // Deleting twice is the same as once.
                () = async { due.await; self.wipe_due().await } => {}
            }
        }
    }

    async fn wipe_due(&self) {
        let now = Instant::now();
        let due: Vec<String> = (self.wipes().due.iter())
            .filter(|(_, (at, _))| *at <= now)
            .map(|(driver, _)| driver.clone())
            .collect();
        for driver in due {
            if !self.wipes().due.contains_key(&driver) {
                // It came back while another one's were deleted.
                continue;
            }
            match self.wipe(&driver).await {
                Ok(()) => {
                    self.wipes().due.remove(&driver);
                }
                Err(why) => {
                    debug!(
                        driver,
                        why, "cannot delete the ResourceSlices of a removed driver yet"
                    );
                    if let Some((at, pause)) = self.wipes().due.get_mut(&driver) {
                        *at = Instant::now() + *pause;
                        *pause = (*pause * 2).min(PAUSES.1);
                    }
                }
            }
        }
    }

    /// Deletes the ResourceSlices of a driver, and forgets it.
    async fn wipe(&self, driver: &str) -> Result<(), String> {
        if driver == OTHERS {
            return self.wipe_others().await;
        }
        if self.delete_slices(&format!("spec.driver={driver}")).await? {
            info!(driver, "deleted the ResourceSlices of a removed DRA driver");
        }
        if self.shared().drivers.contains_key(driver) {
            // It may come back by the socket that it registered.
            return Ok(());
        }
        let deleted = self.store().commit(delete_of(driver)).await;
        if let Err(error) = deleted {
            warn!(driver, %error, "cannot delete the record of a removed DRA driver");
        }
        Ok(())
    }

    /// Deletes the ResourceSlices of all drivers but those that have registered since the agent has started, and those on record,
    /// which have their own time.
    async fn wipe_others(&self) -> Result<(), String> {
        if !self.serves_slices().await? {
            return Ok(());
        }
        let mut known: BTreeSet<String> = self.shared().drivers.keys().cloned().collect();
        known.extend(self.wipes().due.keys().cloned());
        known.remove(OTHERS);
        let others: Vec<String> = known.iter().map(|d| format!("spec.driver!={d}")).collect();
        if self.delete_slices(&others.join(",")).await? {
            debug!("deleted the ResourceSlices of DRA drivers that have not registered");
        }
        Ok(())
    }

    /// Returns whether the API server has ResourceSlices. Asked of discovery: older servers refuse a deletion of what they do not
    /// know.
    async fn serves_slices(&self) -> Result<bool, String> {
        let Some(api) = &self.inner.options.api else {
            return Ok(false);
        };
        let client = api.kube();
        let found = client.list_api_group_resources(ResourceSlice::API_VERSION);
        match tokio::time::timeout(DELETE, found).await {
            Ok(Ok(found)) => Ok(found
                .resources
                .iter()
                .any(|resource| resource.name == ResourceSlice::URL_PATH_SEGMENT)),
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => Ok(false),
            Ok(Err(error)) => Err(causes(&error)),
            Err(_) => Err(format!("no answer within {} s", DELETE.as_secs())),
        }
    }

    /// Deletes the ResourceSlices of this node that a field selector selects, all with an empty one. Returns whether the server
    /// has ResourceSlices.
    async fn delete_slices(&self, selector: &str) -> Result<bool, String> {
        let options = &self.inner.options;
        let Some(api) = &options.api else {
            return Ok(false);
        };
        let mut fields = format!("spec.nodeName={}", options.node_name);
        if !selector.is_empty() {
            fields = format!("{fields},{selector}");
        }
        let slices = Api::<ResourceSlice>::all(api.kube());
        let (params, selected) = (
            DeleteParams::default(),
            ListParams::default().fields(&fields),
        );
        let delete = slices.delete_collection(&params, &selected);
        match tokio::time::timeout(DELETE, delete).await {
            Ok(Ok(_)) => Ok(true),
            // A server without ResourceSlices has none.
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => Ok(false),
            Ok(Err(error)) => Err(causes(&error)),
            Err(_) => Err(format!("no answer within {} s", DELETE.as_secs())),
        }
    }
}
