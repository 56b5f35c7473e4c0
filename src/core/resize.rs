//! Resources of running containers: what was allocated, what is in force, what is wanted.
//!
//! In: the desired pod, what was allocated at admission or by a resize since, what the runtime was told
//! last. Out: what a status says of it.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Resources of one container, for its status.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResourceView {
    /// Requests that the node has set aside; `status.containerStatuses[].allocatedResources`.
    pub allocated: Option<BTreeMap<String, Quantity>>,
    /// Requests and limits in force; `status.containerStatuses[].resources`.
    pub actual: Option<ResourceRequirements>,
}

/// Resizing of one pod, for its status.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResizeView {
    /// Resources of containers by name.
    pub containers: BTreeMap<String, ResourceView>,
    /// Reason and message of condition `PodResizePending`, when it holds.
    pub pending: Option<(String, String)>,
    /// Reason and message of condition `PodResizeInProgress`, when it holds.
    pub in_progress: Option<(String, String)>,
}
