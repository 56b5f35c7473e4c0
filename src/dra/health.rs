//! Health of the devices of drivers that report it, for the statuses of pods. Upstream: `healthInfoCache`,
//! `HandleWatchResourcesStream`.
//!
//! Each list of a driver is complete. A device that was not listed for a while is unknown, and so are all of a driver whose
//! stream has ended.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use tokio::time::Instant;
use tracing::debug;

use super::client::DriverClient;
use super::proto::{self, HEALTH_SERVICES, NodeWatchResourcesResponse, health};
use super::{DraManager, Plugin};
use crate::core::claims::{self, ClaimDevice, ClaimRecord, DeviceHealth};
use crate::types::{PodExt, PodUid};

/// Pause before a stream that has ended is opened again.
const PAUSE: Duration = Duration::from_secs(5);
/// Time after which a device that is not listed is unknown, unless the driver gives one of its own. Upstream's
/// `DefaultHealthTimeout`.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Devices of an instance that are known. With more, those that the newest list lacks are unknown at once, whatever time the
/// driver gives them. A list is bounded by the longest message of gRPC.
const MAX_DEVICES: usize = 16 * 1024;
/// Longest message; upstream's `ResourceHealthMessageMaxLength`.
const MAX_MESSAGE: usize = 1024;

/// Newest health of the devices of one instance, by pool and device.
pub(super) type Healths = BTreeMap<(String, String), Seen>;

/// Health of a device as it was last listed.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    health: DeviceHealth,
    at: Instant,
    timeout: Duration,
}

/// Returns the path of the newest health service that a driver and the agent speak.
pub(super) fn service_of(versions: &[String]) -> Option<&'static str> {
    let mut services = HEALTH_SERVICES.iter();
    let found = services.find(|(name, _)| versions.iter().any(|version| version == name));
    found.map(|(_, path)| *path)
}

impl Seen {
    fn of(device: &proto::DeviceHealth, at: Instant) -> Self {
        let is_healthy = match device.health {
            health::HEALTHY => Some(true),
            health::UNHEALTHY => Some(false),
            _ => None,
        };
        let seconds = u64::try_from(device.health_check_timeout_seconds).unwrap_or(0);
        Self {
            health: DeviceHealth {
                is_healthy,
                message: shortened(&device.message),
            },
            at,
            timeout: match seconds {
                0 => TIMEOUT,
                seconds => Duration::from_secs(seconds),
            },
        }
    }
}

/// Cuts a message that no API server takes.
fn shortened(message: &str) -> String {
    if message.len() <= MAX_MESSAGE {
        return message.to_owned();
    }
    let ends = (0..=MAX_MESSAGE - 3).rev();
    let mut cut = ends.filter_map(|end| message.get(..end));
    format!("{}...", cut.next().unwrap_or_default())
}

impl DraManager {
    /// Follows the health of the devices of one instance, for ever.
    pub(super) async fn follow_health(&self, driver: &str, plugin: &Plugin, path: &'static str) {
        loop {
            if let Err(error) = self.follow_stream(driver, plugin, path).await {
                debug!(
                    driver,
                    error, "a DRA driver does not report the health of its devices"
                );
            }
            self.forget_health(driver, plugin.instance);
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Forgets what an instance has said, so that its devices are unknown.
    pub(super) fn forget_health(&self, driver: &str, instance: u64) {
        let known = self.shared().health.remove(&instance);
        let devices = known.into_iter().flat_map(BTreeMap::into_keys).collect();
        self.health_changed(driver, &devices);
    }

    async fn follow_stream(
        &self,
        driver: &str,
        plugin: &Plugin,
        path: &'static str,
    ) -> Result<(), String> {
        let client: &DriverClient = &plugin.client;
        let stream = client.watch_health(path).await;
        let mut stream = stream.map_err(|error| error.to_string())?;
        while let Some(list) = stream.message().await.map_err(|s| s.message().to_owned())? {
            self.listed(driver, plugin.instance, &list);
        }
        Ok(())
    }

    pub(super) fn listed(&self, driver: &str, instance: u64, list: &NodeWatchResourcesResponse) {
        let now = Instant::now();
        let mut changed = BTreeSet::new();
        {
            let mut shared = self.shared();
            let known = shared.health.entry(instance).or_default();
            for device in &list.devices {
                let Some(id) = &device.device else { continue };
                let key = (id.pool_name.clone(), id.device_name.clone());
                let seen = Seen::of(device, now);
                let health = seen.health.clone();
                let former = known.insert(key.clone(), seen);
                if former.is_none_or(|former| former.health != health) {
                    changed.insert(key);
                }
            }
            let has_room = known.len() <= MAX_DEVICES;
            known.retain(|key, seen| {
                let is_in_time = now.duration_since(seen.at) <= seen.timeout;
                let is_fresh = seen.at == now || (has_room && is_in_time);
                if !is_fresh {
                    changed.insert(key.clone());
                }
                is_fresh
            });
        }
        self.health_changed(driver, &changed);
    }

    /// Names the pods with these devices of a driver to [`Self::changed`].
    fn health_changed(&self, driver: &str, devices: &BTreeSet<(String, String)>) {
        if devices.is_empty() {
            return;
        }
        let is_one = |(of, device): (&str, &ClaimDevice)| {
            of == driver && devices.contains(&(device.pool.clone(), device.device.clone()))
        };
        let mut pods = BTreeSet::new();
        for (_, record) in ClaimRecord::all(&self.store().snapshot()).flatten() {
            if record.devices().any(is_one) {
                pods.extend(record.pods.into_keys());
            }
        }
        self.shared().changed.extend(pods);
        self.inner.changes.notify_one();
    }

    /// Waits for changes of health and drivers that are back, and returns the pods that they concern. For one caller.
    /// Cancel-safe.
    pub async fn changed(&self) -> BTreeSet<PodUid> {
        loop {
            self.inner.changes.notified().await;
            let pods = std::mem::take(&mut self.shared().changed);
            if !pods.is_empty() {
                return pods;
            }
        }
    }

    /// Adds the devices of claims that main containers have, and their health, to a pod's status.
    pub fn report(&self, pod: &Pod, status: &mut PodStatus) {
        if pod.spec_ref().resource_claims.is_none() {
            return;
        }
        let held = ClaimRecord::of_pod(&self.store().snapshot(), &pod.uid());
        if held.is_empty() {
            return;
        }
        for shown in status.container_statuses.iter_mut().flatten() {
            let mut containers = pod.containers().iter();
            let Some(container) = containers.find(|c| c.name == shown.name) else {
                continue;
            };
            let health = |driver: &str, device: &ClaimDevice| self.health(driver, device);
            let rows = claims::health_status(pod, container, &held, health);
            if !rows.is_empty() {
                let all = shown.allocated_resources_status.get_or_insert_default();
                all.extend(rows);
            }
        }
    }

    /// The health of a device as the newest instance of its driver that lists it says.
    fn health(&self, driver: &str, device: &ClaimDevice) -> DeviceHealth {
        let now = Instant::now();
        let key = (device.pool.clone(), device.device.clone());
        let shared = self.shared();
        let instances = shared.drivers.get(driver).into_iter().flatten().rev();
        let mut seen =
            instances.filter_map(|plugin| shared.health.get(&plugin.instance)?.get(&key));
        let seen = seen.find(|seen| now.duration_since(seen.at) <= seen.timeout);
        seen.map(|seen| seen.health.clone()).unwrap_or_default()
    }
}
