//! Resource claims of pods (dynamic resource allocation): which claim a reference of a pod stands for, whether the pod may use
//! it, which drivers are asked, and what is remembered. Upstream: `dra.Manager`, its decisions.
//!
//! In: pods, claims as the API server shows them, records. Out: the next record of a claim, the drivers to call, CDI devices of
//! a container, or the reason why there are none. Pure; everything is sorted.
//!
//! **Invariant:** a driver is in the record of a claim before it is asked to prepare it, and until it has answered that
//! nothing of the claim is prepared any more. A claim with a pod in its record is not taken from that pod.

mod record;

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{
    Container, Node, Pod, PodExtendedResourceClaimStatus, PodResourceClaim, ResourceHealth,
    ResourceStatus,
};
use k8s_openapi::api::resource::v1::ResourceClaim;

pub use record::{
    ClaimDevice, ClaimId, ClaimRecord, DriverClaim, DriverRecord, claim_key, driver_key,
};

use super::admission::selects;
use crate::types::{BootId, PodExt, PodUid};

/// Reason why a pod cannot have its claims now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    /// The template's claim is not in the pod's status yet.
    #[error(
        "no ResourceClaim was created yet for the entry {0:?} of spec.resourceClaims; \
         status.resourceClaimStatuses does not name it"
    )]
    NotCreated(String),
    /// The entry names neither a claim nor a template.
    #[error("the entry {0:?} of spec.resourceClaims names neither a claim nor a template")]
    NoSource(String),
    /// No such claim.
    #[error("ResourceClaim {0} does not exist")]
    NotFound(String),
    /// The claim was made for another owner.
    #[error("ResourceClaim {0} was not created for this pod")]
    NotOwner(String),
    /// The claim is reserved for others.
    #[error("ResourceClaim {claim} ({uid}) is not reserved for this pod")]
    NotReserved {
        /// Name of the claim.
        claim: String,
        /// UID of the claim.
        uid: String,
    },
    /// Nothing is allocated for the claim.
    #[error("ResourceClaim {0} is not allocated")]
    NotAllocated(String),
    /// The devices are on another node.
    #[error("ResourceClaim {0} is allocated for other nodes than this one")]
    OtherNode(String),
    /// A previous claim of that name is still prepared.
    #[error(
        "a previous ResourceClaim {claim} with UID {uid} is not unprepared yet; this one waits for its pods to end"
    )]
    FormerClaim {
        /// Name of both claims.
        claim: String,
        /// UID of the previous one.
        uid: String,
    },
    /// The record cannot be read.
    #[error(
        "the record of ResourceClaim {0} cannot be read; the claim stays as it is until the record is restored"
    )]
    Unreadable(String),
    /// A container would start before its claim is prepared.
    #[error("ResourceClaim {0} is not prepared")]
    NotPrepared(String),
    /// The entry of the pod is on no record.
    #[error("the entry {0:?} of spec.resourceClaims has no prepared claim")]
    NoClaim(String),
}

/// A claim that a pod may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Namespace and name.
    pub id: ClaimId,
    /// UID of the claim.
    pub uid: String,
    /// Drivers of its devices.
    pub drivers: BTreeSet<String>,
    /// Entries of the pod's `spec.resourceClaims` that stand for it.
    pub references: BTreeSet<String>,
}

/// A claim by name, as a pod refers to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// Its name, in the pod's namespace.
    pub name: String,
    /// It was made for the pod from a template.
    pub is_generated: bool,
}

/// Entry of a pod that stands for the claim of its extended resources. No entry of `spec.resourceClaims` has that name.
const EXTENDED: &str = "";

/// Returns the entries of the pod's `spec.resourceClaims`, and one for the claim that the scheduler made for extended resources.
pub fn references(pod: &Pod) -> Vec<PodResourceClaim> {
    let mut entries = pod.spec_ref().resource_claims.clone().unwrap_or_default();
    entries.extend(extended(pod).map(|of| PodResourceClaim {
        name: EXTENDED.to_owned(),
        resource_claim_name: Some(of.resource_claim_name.clone()),
        ..PodResourceClaim::default()
    }));
    entries
}

/// Returns whether two versions of a pod differ in the claims that were made for it.
pub fn made_differ(a: &Pod, b: &Pod) -> bool {
    let made = |pod: &Pod| {
        let status = pod.status.as_ref()?;
        let of_templates = status.resource_claim_statuses.clone().unwrap_or_default();
        let of_extended = status.extended_resource_claim_status.clone();
        Some((of_templates, of_extended)).filter(|(t, e)| !t.is_empty() || e.is_some())
    };
    made(a) != made(b)
}

fn extended(pod: &Pod) -> Option<&PodExtendedResourceClaimStatus> {
    let status = pod.status.as_ref()?;
    status.extended_resource_claim_status.as_ref()
}

/// Returns the entries that a container names, each with a request or `None` for all of the claim.
fn wishes<'a>(pod: &'a Pod, container: &'a Container) -> Vec<(&'a str, Option<&'a str>)> {
    let Some(resources) = &container.resources else {
        return Vec::new();
    };
    let named = resources.claims.iter().flatten();
    let named = named.map(|wish| (wish.name.as_str(), wish.request.as_deref()));
    let asks_for = |resource: &String| {
        let amount = resources.requests.as_ref().and_then(|r| r.get(resource));
        amount.is_some_and(|amount| amount.0 != "0")
    };
    let mappings = extended(pod)
        .into_iter()
        .flat_map(|of| &of.request_mappings);
    let mappings =
        mappings.filter(|m| m.container_name == container.name && asks_for(&m.resource_name));
    let mapped = mappings.map(|m| (EXTENDED, Some(m.request_name.as_str())));
    named.chain(mapped).collect()
}

/// Returns the claim that an entry stands for; `None` when its template needs none. Upstream: `resourceclaim.Name`.
///
/// # Errors
/// When the claim is not known yet.
pub fn named(pod: &Pod, entry: &PodResourceClaim) -> Result<Option<Named>, ClaimError> {
    if let Some(name) = &entry.resource_claim_name {
        return Ok(Some(Named {
            name: name.clone(),
            is_generated: false,
        }));
    }
    if entry.resource_claim_template_name.is_none() {
        return Err(ClaimError::NoSource(entry.name.clone()));
    }
    let statuses = pod.status.as_ref();
    let statuses = statuses.and_then(|s| s.resource_claim_statuses.as_ref());
    let mut statuses = statuses.into_iter().flatten();
    let status = statuses.find(|status| status.name == entry.name);
    let status = status.ok_or_else(|| ClaimError::NotCreated(entry.name.clone()))?;
    Ok(status.resource_claim_name.clone().map(|name| Named {
        name,
        is_generated: true,
    }))
}

/// Checks that a pod may use a claim on this node, and returns what is needed of it. The labels of a node that is not known
/// yet match everything, since the scheduler has compared them.
///
/// # Errors
/// When it may not, or not yet.
pub fn usable(
    pod: &Pod,
    entry: &PodResourceClaim,
    named: &Named,
    claim: &ResourceClaim,
    node: Option<&Node>,
) -> Result<Bound, ClaimError> {
    let name = &named.name;
    let (pod_uid, uid) = (pod.uid(), claim.metadata.uid.clone().unwrap_or_default());
    if named.is_generated {
        let owners = claim.metadata.owner_references.iter().flatten();
        let mut controllers = owners.filter(|owner| owner.controller == Some(true));
        if !controllers.any(|owner| owner.uid == pod_uid.as_str()) {
            return Err(ClaimError::NotOwner(name.clone()));
        }
    }
    let status = claim.status.as_ref();
    let mut consumers = status
        .and_then(|s| s.reserved_for.as_ref())
        .into_iter()
        .flatten();
    let is_reserved = consumers.any(|consumer| {
        consumer.resource == "pods"
            && consumer.api_group.as_deref().unwrap_or_default().is_empty()
            && consumer.uid == pod_uid.as_str()
    });
    if !is_reserved {
        return Err(ClaimError::NotReserved {
            claim: name.clone(),
            uid,
        });
    }
    let allocation = status.and_then(|s| s.allocation.as_ref());
    let allocation = allocation.ok_or_else(|| ClaimError::NotAllocated(name.clone()))?;
    if let (Some(selector), Some(node)) = (&allocation.node_selector, node) {
        let none = BTreeMap::new();
        let labels = node.metadata.labels.as_ref().unwrap_or(&none);
        let node_name = node.metadata.name.as_deref().unwrap_or_default();
        if !selects(selector, labels, node_name) {
            return Err(ClaimError::OtherNode(name.clone()));
        }
    }
    let devices = allocation.devices.as_ref();
    let results = devices.and_then(|d| d.results.as_ref());
    let drivers = results.into_iter().flatten().map(|r| r.driver.clone());
    Ok(Bound {
        id: ClaimId::new(pod.namespace(), name),
        uid,
        drivers: drivers.collect(),
        references: [entry.name.clone()].into(),
    })
}

/// Joins the entries that stand for the same claim.
pub fn joined(bound: impl IntoIterator<Item = Bound>) -> BTreeMap<ClaimId, Bound> {
    let mut all: BTreeMap<ClaimId, Bound> = BTreeMap::new();
    for one in bound {
        match all.get_mut(&one.id) {
            Some(known) => known.references.extend(one.references),
            None => {
                all.insert(one.id.clone(), one);
            }
        }
    }
    all
}

/// Returns the record of a claim with a pod in it, to be committed before a driver is asked.
///
/// # Errors
/// When a previous claim of that name is still recorded.
pub fn reserved(
    known: Option<&ClaimRecord>,
    bound: &Bound,
    pod: &PodUid,
) -> Result<ClaimRecord, ClaimError> {
    let mut record = known.cloned().unwrap_or_else(|| ClaimRecord {
        uid: bound.uid.clone(),
        ..ClaimRecord::default()
    });
    if record.uid != bound.uid {
        return Err(ClaimError::FormerClaim {
            claim: bound.id.name.clone(),
            uid: record.uid,
        });
    }
    let references = record.pods.entry(pod.clone()).or_default();
    references.extend(bound.references.iter().cloned());
    for driver in &bound.drivers {
        record.drivers.entry(driver.clone()).or_default();
    }
    Ok(record)
}

/// Returns the drivers that are to be asked to prepare a claim: those whose answer is not of this boot, and those that
/// `is_current` does not confirm, since a new instance of a driver may have lost what the previous one had written.
pub fn due(
    record: &ClaimRecord,
    boot: BootId,
    is_current: impl Fn(&str) -> bool,
) -> BTreeSet<String> {
    let drivers = record.drivers.iter();
    let due = drivers.filter(|(name, of)| of.prepared != Some(boot) || !is_current(name));
    due.map(|(name, _)| name.clone()).collect()
}

/// Returns the record of a claim that a driver has prepared. Its devices replace those of a previous answer.
#[must_use]
pub fn prepared(
    mut record: ClaimRecord,
    driver: &str,
    boot: BootId,
    devices: Vec<ClaimDevice>,
) -> ClaimRecord {
    if let Some(of) = record.drivers.get_mut(driver) {
        of.prepared = Some(boot);
        of.devices = devices;
    }
    record
}

/// Consequence of the end of a pod for a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Release {
    /// The pod is not in the record.
    Nothing,
    /// Other pods use the claim: this is its new record.
    Shared(ClaimRecord),
    /// No other pod is. With this record on the disk, no pod starts with the prepared devices, and its drivers are
    /// asked to unprepare the claim.
    Last(ClaimRecord),
}

/// Returns what is to be done with a claim when a pod has ended.
pub fn released(record: &ClaimRecord, pod: &PodUid) -> Release {
    if !record.pods.contains_key(pod) {
        return Release::Nothing;
    }
    let mut record = record.clone();
    if record.pods.len() > 1 {
        record.pods.remove(pod);
        return Release::Shared(record);
    }
    for of in record.drivers.values_mut() {
        of.prepared = None;
    }
    Release::Last(record)
}

/// Returns the record of a claim that a driver has unprepared; `None` when that was the last one, and nothing is left to do.
#[must_use]
pub fn unprepared(mut record: ClaimRecord, driver: &str) -> Option<ClaimRecord> {
    record.drivers.remove(driver);
    (!record.drivers.is_empty()).then_some(record)
}

/// Returns whether the claims of a pod are prepared in this boot, as its records (`held`) show it.
pub fn is_ready(pod: &Pod, held: &BTreeMap<ClaimId, ClaimRecord>, boot: BootId) -> bool {
    let uid = pod.uid();
    references(pod).iter().all(|entry| {
        let mut of_entry = held
            .values()
            .filter(|record| record.stands_for(&uid, &entry.name));
        match of_entry.next() {
            Some(record) => record.is_prepared(boot),
            None => matches!(named(pod, entry), Ok(None)),
        }
    })
}

/// Devices of a claim that a container has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerClaim {
    /// Namespace and name of the claim.
    pub id: ClaimId,
    /// Devices with the driver of each.
    pub devices: Vec<(String, ClaimDevice)>,
}

/// Returns what a container has of the claims of its pod, whose records are `held`: the devices of the requests that it names,
/// all of a claim when it names none. Upstream: `GetResources`.
///
/// # Errors
/// When a claim that it names is not prepared in this boot.
pub fn of_container(
    pod: &Pod,
    container: &Container,
    held: &BTreeMap<ClaimId, ClaimRecord>,
    boot: BootId,
) -> Result<Vec<ContainerClaim>, ClaimError> {
    let uid = pod.uid();
    let mut all: BTreeMap<&ClaimId, ContainerClaim> = BTreeMap::new();
    let entries = references(pod);
    for (name, request) in wishes(pod, container) {
        let Some(entry) = entries.iter().find(|entry| entry.name == name) else {
            return Err(ClaimError::NoClaim(name.to_owned()));
        };
        let mut found = held
            .iter()
            .filter(|(_, record)| record.stands_for(&uid, &entry.name));
        let Some((id, record)) = found.next() else {
            if matches!(named(pod, entry), Ok(None)) {
                continue;
            }
            return Err(ClaimError::NoClaim(name.to_owned()));
        };
        if !record.is_prepared(boot) {
            return Err(ClaimError::NotPrepared(id.name.clone()));
        }
        let of = all.entry(id).or_insert_with(|| ContainerClaim {
            id: id.clone(),
            devices: Vec::new(),
        });
        for (driver, device) in record.devices() {
            let is_new = !of
                .devices
                .iter()
                .any(|(d, known)| d == driver && known == device);
            if is_new && device.is_for(request) {
                of.devices.push((driver.to_owned(), device.clone()));
            }
        }
    }
    Ok(all.into_values().collect())
}

/// Returns the CDI devices of a container's claims, each once.
pub fn cdi_devices(claims: &[ContainerClaim]) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    let devices = claims.iter().flat_map(|claim| &claim.devices);
    for id in devices.flat_map(|(_, device)| &device.cdi) {
        if !all.contains(id) {
            all.push(id.clone());
        }
    }
    all
}

/// Health of a device of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceHealth {
    /// `None` when it is unknown.
    pub is_healthy: Option<bool>,
    /// More about it; may be empty.
    pub message: String,
}

/// Returns what `allocatedResourcesStatus` of a container says of its claims, whose devices are as `health` says by driver and
/// device. Upstream: `UpdateAllocatedResourcesStatus`.
pub fn health_status(
    pod: &Pod,
    container: &Container,
    held: &BTreeMap<ClaimId, ClaimRecord>,
    health: impl Fn(&str, &ClaimDevice) -> DeviceHealth,
) -> Vec<ResourceStatus> {
    let uid = pod.uid();
    let resources = container.resources.as_ref();
    let wishes = resources.and_then(|r| r.claims.as_ref());
    let mut all: BTreeMap<String, Vec<ResourceHealth>> = BTreeMap::new();
    for wish in wishes.into_iter().flatten() {
        let request = wish
            .request
            .as_deref()
            .filter(|request| !request.is_empty());
        let name = match request {
            Some(request) => format!("claim:{}/{request}", wish.name),
            None => format!("claim:{}", wish.name),
        };
        let mut records = held.values();
        let Some(record) = records.find(|record| record.stands_for(&uid, &wish.name)) else {
            continue;
        };
        let rows = all.entry(name).or_default();
        for (driver, device) in record.devices().filter(|(_, d)| d.is_for(request)) {
            let own = || format!("{driver}/{}/{}", device.pool, device.device);
            let resource_id = device.cdi.first().cloned().unwrap_or_else(own);
            if rows.iter().any(|row| row.resource_id == resource_id) {
                continue;
            }
            let found = health(driver, device);
            let text = match found.is_healthy {
                Some(true) => "Healthy",
                Some(false) => "Unhealthy",
                None => "Unknown",
            };
            rows.push(ResourceHealth {
                health: Some(text.to_owned()),
                message: Some(found.message).filter(|message| !message.is_empty()),
                resource_id,
            });
        }
    }
    let shown = all.into_iter().filter(|(_, rows)| !rows.is_empty());
    let status = shown.map(|(name, rows)| ResourceStatus {
        name,
        resources: Some(rows),
    });
    status.collect()
}

#[cfg(test)]
mod tests;
