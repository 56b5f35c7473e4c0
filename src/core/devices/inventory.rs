//! The node's resources, their plugins and devices.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::choice::Shortage;
use super::record::PluginRecord;
use super::{Devices, PluginOptions};
use crate::types::Stamp;

/// A lost plugin's devices count as capacity for so long; upstream's `endpointStopGracePeriod`.
const LOST_GRACE: Duration = Duration::from_secs(300);

/// One connection to a plugin. A newer one has a larger number.
pub type Instance = u64;

/// Number of the node's devices of a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// All of them.
    pub capacity: usize,
    /// The healthy ones of a plugin that is connected.
    pub allocatable: usize,
}

/// Amounts by resource.
pub type Amounts = BTreeMap<String, Amount>;

/// Health of a device, as statuses of pods have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// Its plugin says so.
    Healthy,
    /// Its plugin says so.
    Unhealthy,
    /// Its plugin is not connected, or does not list it.
    Unknown,
}

impl Health {
    /// Value of `allocatedResourcesStatus[].resources[].health`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Healthy => "Healthy",
            Self::Unhealthy => "Unhealthy",
            Self::Unknown => "Unknown",
        }
    }
}

/// Reason why a container cannot have devices now. Texts are upstream's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// No plugin has ever registered the resource.
    #[error("cannot allocate unregistered device {resource}")]
    Unregistered {
        /// The resource.
        resource: String,
    },
    /// The plugin is lost, has listed nothing yet, or none of its devices is healthy.
    #[error("no healthy devices present; cannot allocate unhealthy devices {resource}")]
    NoneHealthy {
        /// The resource.
        resource: String,
    },
    /// Devices that the container has are unhealthy or gone.
    #[error(
        "previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource} ({})",
        ids.join(", ")
    )]
    NotHealthy {
        /// The resource.
        resource: String,
        /// The devices.
        ids: Vec<String>,
    },
    /// Too few are free.
    #[error(
        "requested number of devices unavailable for {resource}. Requested: {}, Available: {}",
        shortage.requested,
        shortage.available
    )]
    Short {
        /// The resource.
        resource: String,
        /// Number of devices.
        shortage: Shortage,
    },
}

#[derive(Clone, Debug)]
struct Resource {
    plugin: Plugin,
    options: PluginOptions,
    /// List of the plugin that is connected.
    devices: Devices,
    /// The newest list, also of an earlier run.
    newest: Devices,
    returned: BTreeSet<String>,
    /// Number of returns of devices in this run.
    returns: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plugin {
    /// Known from the records of an earlier run. Lost since that run lost it, or since this one started.
    Recorded(Stamp),
    /// Connected; its list is still to come. Until then, or until that takes too long ([`Inventory::overdue`]), the list of the
    /// plugin that it replaced counts, if that one was connected.
    Connected { instance: Instance, has_list: bool },
    /// Connected, and has listed its devices.
    Listed(Instance),
    /// Its stream has ended.
    Lost(Stamp),
}

impl Resource {
    /// Returns whether its devices are those of a connected plugin.
    fn has_list(&self) -> bool {
        match self.plugin {
            Plugin::Listed(_) => true,
            Plugin::Connected { has_list, .. } => has_list,
            Plugin::Recorded(_) | Plugin::Lost(_) => false,
        }
    }
}

/// The resources of device plugins.
#[derive(Clone, Debug, Default)]
pub struct Inventory {
    resources: BTreeMap<String, Resource>,
}

impl Inventory {
    /// Adds a resource that a plugin had registered in an earlier run: the node has none of it until the plugin is back. The
    /// plugin is lost from `now` on, if the earlier run has not lost it.
    pub fn remember(&mut self, resource: &str, record: &PluginRecord, now: Stamp) {
        let known = Resource {
            plugin: Plugin::Recorded(record.lost.unwrap_or(now)),
            options: record.options,
            devices: Devices::new(),
            newest: record.devices.clone(),
            returned: record.returned.clone(),
            returns: 0,
        };
        self.resources.insert(resource.to_owned(), known);
    }

    /// Connects a plugin. It replaces the one before. The list of one that was still connected counts until the new one
    /// lists its devices.
    pub fn connect(&mut self, resource: &str, instance: Instance, options: PluginOptions) {
        let known = self.resources.get(resource);
        let plugin = Plugin::Connected {
            instance,
            has_list: known.is_some_and(Resource::has_list),
        };
        let known = self.resources.entry(resource.to_owned());
        let known = known.or_insert_with(|| Resource {
            plugin,
            options,
            devices: Devices::new(),
            newest: Devices::new(),
            returned: BTreeSet::new(),
            returns: 0,
        });
        known.plugin = plugin;
        known.options = options;
    }

    /// A plugin that has connected does not list its devices: those of the plugin that it replaced cannot be allocated any more.
    /// Returns whether anything changed.
    pub fn overdue(&mut self, resource: &str, instance: Instance) -> bool {
        let Some(known) = self.resources.get_mut(resource) else {
            return false;
        };
        let waits = Plugin::Connected {
            instance,
            has_list: true,
        };
        if known.plugin != waits {
            return false;
        }
        known.plugin = Plugin::Connected {
            instance,
            has_list: false,
        };
        true
    }

    /// A plugin has listed its devices. Returns whether anything changed; a previous instance changes nothing.
    pub fn list(&mut self, resource: &str, instance: Instance, devices: Devices) -> bool {
        let Some(known) = self.resources.get_mut(resource) else {
            return false;
        };
        match known.plugin {
            Plugin::Connected { instance: now, .. } if now == instance => {}
            Plugin::Listed(now) if now == instance && known.devices != devices => {}
            _ => return false,
        }
        known.plugin = Plugin::Listed(instance);
        known.newest.clone_from(&devices);
        known.devices = devices;
        true
    }

    /// Returns those of `held` that the newest list of the resource does not show as healthy and `devices` does.
    pub fn returning(
        &self,
        resource: &str,
        devices: &Devices,
        held: &BTreeSet<String>,
    ) -> BTreeSet<String> {
        let newest = self.resources.get(resource).map(|known| &known.newest);
        let Some(newest) = newest.filter(|newest| !newest.is_empty()) else {
            return BTreeSet::new();
        };
        let is_healthy = |list: &Devices, id: &str| list.get(id).is_some_and(|d| d.healthy);
        let back = |id: &&String| is_healthy(devices, id) && !is_healthy(newest, id);
        held.iter().filter(back).cloned().collect()
    }

    /// Adds devices about which the plugin is to be asked, see [`PluginRecord::returned`].
    pub fn add_returned(&mut self, resource: &str, ids: BTreeSet<String>) {
        if ids.is_empty() {
            return;
        }
        if let Some(known) = self.resources.get_mut(resource) {
            known.returned.extend(ids);
            known.returns += 1;
        }
    }

    /// Returns how often devices of the resource have returned.
    pub fn returns(&self, resource: &str) -> u64 {
        let known = self.resources.get(resource);
        known.map_or(0, |known| known.returns)
    }

    /// Removes devices that the plugin was asked about when devices had returned `returns` times. If some have returned
    /// since, the answer may be older than that, and all of them stay.
    pub fn settle_returned(&mut self, resource: &str, ids: &BTreeSet<String>, returns: u64) {
        let known = self.resources.get_mut(resource);
        if let Some(known) = known.filter(|known| known.returns == returns) {
            known.returned.retain(|id| !ids.contains(id));
        }
    }

    /// Returns the resources with devices that have returned.
    pub fn returned(&self) -> impl Iterator<Item = (&String, &BTreeSet<String>)> {
        let resources = self.resources.iter();
        let with = resources.filter(|(_, known)| !known.returned.is_empty());
        with.map(|(name, known)| (name, &known.returned))
    }

    /// The stream of a plugin has ended. Returns whether it was the current instance.
    pub fn disconnect(&mut self, resource: &str, instance: Instance, now: Stamp) -> bool {
        let Some(known) = self.resources.get_mut(resource) else {
            return false;
        };
        let (Plugin::Connected {
            instance: current, ..
        }
        | Plugin::Listed(current)) = known.plugin
        else {
            return false;
        };
        if current != instance {
            return false;
        }
        known.plugin = Plugin::Lost(now);
        true
    }

    /// Returns whether a plugin has ever registered the resource.
    pub fn knows(&self, resource: &str) -> bool {
        self.resources.contains_key(resource)
    }

    /// Returns the record of a resource.
    pub fn record(&self, resource: &str, socket: String) -> Option<PluginRecord> {
        let known = self.resources.get(resource)?;
        Some(PluginRecord {
            socket,
            options: known.options,
            devices: known.newest.clone(),
            returned: known.returned.clone(),
            lost: match known.plugin {
                Plugin::Recorded(since) | Plugin::Lost(since) => Some(since),
                Plugin::Connected { .. } | Plugin::Listed(_) => None,
            },
        })
    }

    /// Options of the resource's plugin, also of one that is not connected.
    pub fn options(&self, resource: &str) -> PluginOptions {
        let known = self.resources.get(resource);
        known.map(|r| r.options).unwrap_or_default()
    }

    /// Returns the node's amounts of each resource. A plugin that is lost leaves nothing allocatable at once and no
    /// capacity after five minutes; the resource stays. Upstream: `GetCapacity`.
    pub fn amounts(&self, now: Stamp) -> Amounts {
        let amount = |known: &Resource| match known.plugin {
            Plugin::Recorded(_) => Amount::default(),
            _ if known.has_list() => Amount {
                capacity: known.devices.len(),
                allocatable: known.devices.values().filter(|d| d.healthy).count(),
            },
            Plugin::Lost(since) if now.since(since) >= LOST_GRACE => Amount::default(),
            _ => Amount {
                capacity: known.devices.len(),
                allocatable: 0,
            },
        };
        let resources = self.resources.iter();
        resources
            .map(|(name, known)| (name.clone(), amount(known)))
            .collect()
    }

    /// Returns the time until [`Self::amounts`] changes without a report of a plugin; `None` = never.
    pub fn next_change(&self, now: Stamp) -> Option<Duration> {
        let left = |known: &Resource| match known.plugin {
            Plugin::Lost(since) => LOST_GRACE
                .checked_sub(now.since(since))
                .filter(|left| !left.is_zero()),
            _ => None,
        };
        self.resources.values().filter_map(left).min()
    }

    /// The health of a device, by resource and ID: equal IDs of two resources are two devices.
    pub fn health(&self, resource: &str, id: &str) -> Health {
        match self.listed(resource).and_then(|devices| devices.get(id)) {
            Some(device) if device.healthy => Health::Healthy,
            Some(_) => Health::Unhealthy,
            None => Health::Unknown,
        }
    }

    /// The devices of connected plugins, by resource.
    pub fn all_listed(&self) -> impl Iterator<Item = (&String, &Devices)> {
        let resources = self.resources.iter();
        let listed = resources.filter(|(_, known)| known.has_list());
        listed.map(|(name, known)| (name, &known.devices))
    }

    fn listed(&self, resource: &str) -> Option<&Devices> {
        let known = self.resources.get(resource)?;
        known.has_list().then_some(&known.devices)
    }

    /// The devices of a resource, one of them healthy at least.
    ///
    /// # Errors
    /// When there is none that could be allocated.
    pub fn usable(&self, resource: &str) -> Result<&Devices, Unusable> {
        if !self.knows(resource) {
            return Err(Unusable::Unregistered {
                resource: resource.to_owned(),
            });
        }
        let listed = self.listed(resource);
        let healthy = listed.filter(|devices| devices.values().any(|d| d.healthy));
        healthy.ok_or_else(|| Unusable::NoneHealthy {
            resource: resource.to_owned(),
        })
    }

    /// Returns whether a container that has these devices may start with them.
    ///
    /// # Errors
    /// When one of them cannot be used now.
    pub fn check_held<'a>(
        &self,
        resource: &str,
        ids: impl Iterator<Item = &'a String>,
    ) -> Result<(), Unusable> {
        let devices = self.usable(resource)?;
        let is_healthy = |id: &str| devices.get(id).is_some_and(|d| d.healthy);
        let lost: BTreeSet<&String> = ids.filter(|id| !is_healthy(id)).collect();
        if lost.is_empty() {
            return Ok(());
        }
        Err(Unusable::NotHealthy {
            resource: resource.to_owned(),
            ids: lost.into_iter().cloned().collect(),
        })
    }
}
