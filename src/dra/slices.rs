//! Deletes ResourceSlices of drivers that are gone, so that the scheduler places no pods on devices that nobody can prepare.
//! Upstream: `DRAPluginManager.wipeResourceSlices`.
//!
//! A driver is gone when no instance of it was connected for [`GRACE`]; once registrations are taken after a start of the agent, all
//! drivers have as long to register, those on record and those that this agent has never seen ([`OTHERS`]). Upstream deletes the
//! slices of all drivers at its start, and they are written anew.
//!
//! **Invariant:** a deletion and a registration take turns. Right before a request deletes anything, its driver is away; a driver
//! that registers meanwhile is registered after the request has ended, and has [`GRACE`] to connect.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use kube::api::{Api, DeleteParams, ListParams};
use kube::core::{ApiResource, DynamicObject};
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
/// Deadline of a deletion. A driver that registers meanwhile waits as long.
const DELETE: Duration = Duration::from_secs(10);
/// Group of ResourceSlices, and its versions, the newest first. A server has one of them at least, or no ResourceSlices.
const GROUP: &str = "resource.k8s.io";
const VERSIONS: [&str; 3] = ["v1", "v1beta2", "v1beta1"];
const PLURAL: &str = "resourceslices";

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

    /// A driver registers: if it was away, it has time to connect.
    pub(super) fn registers(&mut self, driver: &str) {
        if let Some(due) = self.due.get_mut(driver) {
            *due = (Instant::now() + GRACE, PAUSES.0);
        }
    }

    pub(super) fn away(&mut self, driver: &str) {
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
                () = self.inner.moved.notified() => continue,
                () = due => {}
            }
            // Drivers that come or go do not cut a request off: it might be served after the next registration.
            tokio::select! {
                () = stop.cancelled() => return,
                // Deleting twice is the same as once.
                () = self.wipe_due() => {}
            }
        }
    }

    pub(super) async fn wipe_due(&self) {
        let now = Instant::now();
        let due: Vec<String> = (self.wipes().due.iter())
            .filter(|(_, (at, _))| *at <= now)
            .map(|(driver, _)| driver.clone())
            .collect();
        for driver in due {
            let version = match driver.as_str() {
                OTHERS => self.served_version().await,
                _ => Ok(None),
            };
            // Until the answer nobody registers.
            let _turn = self.inner.registering.lock().await;
            let is_due = |(at, _): &(Instant, Duration)| *at <= now;
            if !self.wipes().due.get(&driver).is_some_and(is_due) {
                // It came back while another one's were deleted.
                continue;
            }
            let wiped = match version {
                Ok(version) => self.wipe(&driver, version).await,
                Err(why) => Err(why),
            };
            match wiped {
                Ok(()) => {
                    let mut wipes = self.wipes();
                    // It may have come and gone again meanwhile, which has its own time.
                    if wipes.due.get(&driver).is_some_and(is_due) {
                        wipes.due.remove(&driver);
                    }
                }
                Err(why) => {
                    debug!(
                        driver,
                        why, "cannot delete the ResourceSlices of a removed driver yet"
                    );
                    if let Some((at, pause)) = self.wipes().due.get_mut(&driver)
                        && *at <= now
                    {
                        *at = Instant::now() + *pause;
                        *pause = (*pause * 2).min(PAUSES.1);
                    }
                }
            }
        }
    }

    /// Deletes the ResourceSlices of a driver, and forgets it. `served` is the version for those of all others.
    async fn wipe(&self, driver: &str, served: Option<&str>) -> Result<(), String> {
        if driver == OTHERS {
            return match served {
                Some(version) => self.wipe_others(version).await,
                None => Ok(()),
            };
        }
        let mut is_deleted = false;
        for version in VERSIONS {
            let selector = format!("spec.driver={driver}");
            is_deleted = self.delete_slices(version, &selector).await?;
            if is_deleted {
                break;
            }
        }
        if is_deleted {
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
    async fn wipe_others(&self, version: &str) -> Result<(), String> {
        let mut known: BTreeSet<String> = self.shared().drivers.keys().cloned().collect();
        known.extend(self.wipes().due.keys().cloned());
        known.remove(OTHERS);
        let others: Vec<String> = known.iter().map(|d| format!("spec.driver!={d}")).collect();
        if self.delete_slices(version, &others.join(",")).await? {
            debug!("deleted the ResourceSlices of DRA drivers that have not registered");
        }
        Ok(())
    }

    /// Returns the newest version of ResourceSlices that the API server has; `None` if it has none. Asked of discovery: older
    /// servers refuse a deletion of what they do not know.
    async fn served_version(&self) -> Result<Option<&'static str>, String> {
        let Some(api) = &self.inner.options.api else {
            return Ok(None);
        };
        let client = api.kube();
        for version in VERSIONS {
            let of_group = format!("{GROUP}/{version}");
            let found = client.list_api_group_resources(&of_group);
            let found = match tokio::time::timeout(DELETE, found).await {
                Ok(Ok(found)) => found,
                Ok(Err(kube::Error::Api(status))) if status.code == 404 => continue,
                Ok(Err(error)) => return Err(causes(&error)),
                Err(_) => return Err(format!("no answer within {} s", DELETE.as_secs())),
            };
            if found.resources.iter().any(|r| r.name == PLURAL) {
                return Ok(Some(version));
            }
        }
        Ok(None)
    }

    /// Deletes the ResourceSlices of this node that a field selector selects, all with an empty one. Returns whether the server
    /// has ResourceSlices in this version.
    async fn delete_slices(&self, version: &str, selector: &str) -> Result<bool, String> {
        let options = &self.inner.options;
        let Some(api) = &options.api else {
            return Ok(false);
        };
        let mut fields = format!("spec.nodeName={}", options.node_name);
        if !selector.is_empty() {
            fields = format!("{fields},{selector}");
        }
        let of_version = ApiResource {
            group: GROUP.to_owned(),
            version: version.to_owned(),
            api_version: format!("{GROUP}/{version}"),
            kind: "ResourceSlice".to_owned(),
            plural: PLURAL.to_owned(),
        };
        let slices = Api::<DynamicObject>::all_with(api.kube(), &of_version);
        let (params, selected) = (
            DeleteParams::default(),
            ListParams::default().fields(&fields),
        );
        let delete = slices.delete_collection(&params, &selected);
        match tokio::time::timeout(DELETE, delete).await {
            Ok(Ok(_)) => Ok(true),
            // A server without them has none.
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => Ok(false),
            Ok(Err(error)) => Err(causes(&error)),
            Err(_) => Err(format!("no answer within {} s", DELETE.as_secs())),
        }
    }
}
