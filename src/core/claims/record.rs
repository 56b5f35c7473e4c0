//! Stored records of claims and their drivers: JSON in table `objects`. Everything that knows how they are stored is here.
//!
//! `claims/<namespace>/<name>`: a claim that pods of this node use. On the disk before a driver is asked to prepare or unprepare
//! it, and written again with each answer.
//! `dradrivers//<name>`: a driver that has registered, until its ResourceSlices are deleted.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::ClaimError;
use crate::core::state::State;
use crate::core::state::kinds::{self, Declared, Key, Kind, Stored};
use crate::types::{BootId, PodUid};

/// Namespace and name of a claim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimId {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl ClaimId {
    /// Of a claim.
    pub fn new(namespace: &str, name: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        }
    }
}

/// Key of a claim's [`ClaimRecord`].
pub fn claim_key(id: &ClaimId) -> Key<ClaimRecord> {
    Key::new(&id.namespace, &id.name)
}

/// Key of a driver's [`DriverRecord`].
pub fn driver_key(driver: &str) -> Key<DriverRecord> {
    Key::new("", driver)
}

/// A claim that pods of this node use. Upstream: `ClaimInfoState`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClaimRecord {
    /// Its UID.
    pub uid: String,
    /// Pods that use it, with the entries of `spec.resourceClaims` that stand for it.
    pub pods: BTreeMap<PodUid, BTreeSet<String>>,
    /// Drivers that may have prepared it.
    pub drivers: BTreeMap<String, DriverClaim>,
}

impl Kind for ClaimRecord {
    const DECLARED: Declared = kinds::CLAIMS;
}

/// The part of one driver in a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DriverClaim {
    /// Boot in which the driver answered that it is prepared; `None` while the request runs, also across a crash.
    pub prepared: Option<BootId>,
    /// Its newest answer.
    pub devices: Vec<ClaimDevice>,
}

/// A device that a driver has prepared for a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClaimDevice {
    /// Pool.
    pub pool: String,
    /// Name in the pool.
    pub device: String,
    /// Requests of the claim that it was allocated for; empty stands for all.
    pub requests: Vec<String>,
    /// Qualified names of its CDI devices.
    pub cdi: Vec<String>,
    /// Its share, when several claims have a part of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<String>,
}

impl ClaimDevice {
    /// Returns whether the device is for a request of a container; `None` stands for all of the claim. An alternative of a
    /// request is named `<request>/<alternative>`.
    pub fn is_for(&self, request: Option<&str>) -> bool {
        let Some(request) = request.filter(|request| !request.is_empty()) else {
            return true;
        };
        let is_it = |name: &String| name.split('/').next() == Some(request) || name == request;
        self.requests.is_empty() || self.requests.iter().any(is_it)
    }
}

/// A driver that has registered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DriverRecord {
    /// Socket of its newest instance.
    pub socket: String,
}

impl Kind for DriverRecord {
    const DECLARED: Declared = kinds::DRA_DRIVERS;
}

impl ClaimRecord {
    /// Of one claim; `None` when no pod of this node uses it.
    ///
    /// # Errors
    /// When it has a record that cannot be read.
    pub fn of(state: &State, id: &ClaimId) -> Result<Option<Self>, ClaimError> {
        let key = claim_key(id);
        let record = state.stored(&key);
        record.map(|record| read(&record)).transpose()
    }

    /// All of them.
    ///
    /// # Errors
    /// In place of each record that cannot be read.
    pub fn all(state: &State) -> impl Iterator<Item = Result<(ClaimId, Self), ClaimError>> {
        state.all_stored::<Self>().map(|record| {
            let (namespace, name) = record.place();
            read(&record).map(|found| (ClaimId::new(namespace, name), found))
        })
    }

    /// Those that a pod is on.
    pub fn of_pod(state: &State, pod: &PodUid) -> BTreeMap<ClaimId, Self> {
        let all = Self::all(state).flatten();
        all.filter(|(_, record)| record.pods.contains_key(pod))
            .collect()
    }

    /// Returns whether an entry of a pod stands for the claim.
    pub fn stands_for(&self, pod: &PodUid, entry: &str) -> bool {
        let references = self.pods.get(pod);
        references.is_some_and(|references| references.contains(entry))
    }

    /// Returns whether every driver has prepared it in this boot.
    pub fn is_prepared(&self, boot: BootId) -> bool {
        let mut drivers = self.drivers.values();
        drivers.all(|of| of.prepared == Some(boot))
    }

    /// Its devices with their drivers.
    pub fn devices(&self) -> impl Iterator<Item = (&str, &ClaimDevice)> {
        let drivers = self.drivers.iter();
        drivers.flat_map(|(name, of)| of.devices.iter().map(move |device| (name.as_str(), device)))
    }
}

impl DriverRecord {
    /// Returns the names of all stored drivers.
    pub fn names(state: &State) -> BTreeSet<String> {
        let records = state.all_stored::<Self>();
        records.map(|record| record.place().1.to_owned()).collect()
    }
}

fn read(record: &Stored<'_, ClaimRecord>) -> Result<ClaimRecord, ClaimError> {
    let (_, name) = record.place();
    record
        .read()
        .map_err(|_| ClaimError::Unreadable(name.to_owned()))
}
