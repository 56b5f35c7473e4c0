//! Deletes ResourceSlices of drivers that are gone, so that the scheduler places no pods on devices that nobody can prepare.
//! Upstream: `DRAPluginManager.wipeResourceSlices`.
//!
//! A driver is gone when no instance of it was connected for [`GRACE`]; after a start of the agent, drivers on record have as
//! long to come back. Upstream deletes the slices of all drivers at its start, and they are written anew.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

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
/// Deadline of a deletion.
const DELETE: Duration = Duration::from_secs(30);

/// Drivers that are away.
#[derive(Default)]
pub(super) struct Wipes {
    /// When their slices are deleted, and the pause after that fails.
    due: BTreeMap<String, (Instant, Duration)>,
}

impl Wipes {
    /// Drivers that have not registered with this agent yet.
    pub(super) fn of(drivers: BTreeSet<String>) -> Self {
        let mut wipes = Self::default();
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
    fn wipes(&self) -> MutexGuard<'_, Wipes> {
        let wipes = self.inner.wipes.lock();
        wipes.unwrap_or_else(PoisonError::into_inner)
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
                        why, "ResourceSlices of a driver that is gone stay for now"
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
        let options = &self.inner.options;
        if let Some(api) = &options.api {
            let slices = Api::<ResourceSlice>::all(api.kube());
            let node = &options.node_name;
            let of_driver =
                ListParams::default().fields(&format!("spec.nodeName={node},spec.driver={driver}"));
            let params = DeleteParams::default();
            let delete = slices.delete_collection(&params, &of_driver);
            match tokio::time::timeout(DELETE, delete).await {
                Ok(Ok(_)) => {
                    info!(
                        driver,
                        "a DRA driver is gone, its ResourceSlices are deleted"
                    );
                }
                // A server without ResourceSlices has none.
                Ok(Err(kube::Error::Api(status))) if status.code == 404 => {}
                Ok(Err(error)) => return Err(causes(&error)),
                Err(_) => return Err(format!("no answer within {} s", DELETE.as_secs())),
            }
        }
        if self.shared().drivers.contains_key(driver) {
            // It may come back by the socket that it registered.
            return Ok(());
        }
        let deleted = self.store().commit(delete_of(driver)).await;
        if let Err(error) = deleted {
            warn!(driver, %error, "the record of a DRA driver that is gone stays");
        }
        Ok(())
    }
}
