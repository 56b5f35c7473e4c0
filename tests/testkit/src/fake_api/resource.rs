//! The resources the fake serves, one row each.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// One resource.
pub(super) struct Resource {
    pub(super) group: &'static str,
    pub(super) version: &'static str,
    pub(super) plural: &'static str,
    pub(super) kind: &'static str,
    pub(super) namespaced: bool,
    /// Has a status subresource, which the main resource's writes do not touch.
    pub(super) status: bool,
    /// A PUT may come without a resourceVersion.
    pub(super) unconditional: bool,
    /// A DELETE is answered with the object instead of a Status.
    pub(super) returns_deleted: bool,
    /// Through its type and back: drops what the type does not know.
    pub(super) typed: fn(Value) -> Result<Value, String>,
    /// Field selectors besides metadata.name and metadata.namespace.
    pub(super) fields: &'static [&'static str],
}

impl Resource {
    /// `v1`, `coordination.k8s.io/v1`.
    pub(super) fn api_version(&self) -> String {
        if self.group.is_empty() {
            self.version.to_owned()
        } else {
            format!("{}/{}", self.group, self.version)
        }
    }

    /// `pods`, `leases.coordination.k8s.io`, as in messages.
    pub(super) fn qualified(&self) -> String {
        if self.group.is_empty() {
            self.plural.to_owned()
        } else {
            format!("{}.{}", self.plural, self.group)
        }
    }

    pub(super) fn is(&self, plural: &str) -> bool {
        self.plural == plural && self.group != EVENTS_GROUP
    }
}

pub(super) const EVENTS_GROUP: &str = "events.k8s.io";

pub(super) fn find(group: &str, version: &str, plural: &str) -> Option<usize> {
    RESOURCES
        .iter()
        .position(|r| r.group == group && r.version == version && r.plural == plural)
}

pub(super) fn of_kind(api_version: &str, kind: &str) -> Option<usize> {
    RESOURCES
        .iter()
        .position(|r| r.kind == kind && r.api_version() == api_version)
}

/// Both events APIs are one store, and so are all versions of a kind; this is the one it is in.
pub(super) fn stored_as(resource: usize) -> usize {
    let of = &RESOURCES[resource];
    if of.group == EVENTS_GROUP {
        find("", "v1", "events").unwrap_or(resource)
    } else {
        find(of.group, "v1", of.plural).unwrap_or(resource)
    }
}

/// Reads an object as its type, and writes it again.
pub(super) fn typed<K: Serialize + DeserializeOwned>(value: Value) -> Result<Value, String> {
    let object: K = serde_json::from_value(value).map_err(|error| error.to_string())?;
    serde_json::to_value(object).map_err(|error| error.to_string())
}

macro_rules! resources {
    ($($group:literal $version:literal $plural:literal $kind:literal $scope:ident [$($flag:ident)*] $ty:ty, [$($field:literal)*];)*) => {
        pub(super) static RESOURCES: &[Resource] = &[$({
            const FLAGS: &[&str] = &[$(stringify!($flag)),*];
            Resource {
                group: $group,
                version: $version,
                plural: $plural,
                kind: $kind,
                namespaced: has(&[stringify!($scope)], "namespaced"),
                status: has(FLAGS, "status"),
                unconditional: !has(FLAGS, "conditional"),
                returns_deleted: has(FLAGS, "returned"),
                typed: typed::<$ty>,
                fields: &[$($field),*],
            }
        }),*];
    };
}

const fn has(flags: &[&str], flag: &str) -> bool {
    let mut index = 0;
    while index < flags.len() {
        let (a, b) = (flags[index].as_bytes(), flag.as_bytes());
        let mut same = a.len() == b.len();
        let mut at = 0;
        while same && at < a.len() {
            same = a[at] == b[at];
            at += 1;
        }
        if same {
            return true;
        }
        index += 1;
    }
    false
}

use k8s_openapi::api;

resources! {
    "" "v1" "pods" "Pod" namespaced [status returned] api::core::v1::Pod,
        ["spec.nodeName" "spec.restartPolicy" "spec.schedulerName" "spec.serviceAccountName"
         "status.phase" "status.podIP" "status.nominatedNodeName"];
    "" "v1" "nodes" "Node" cluster [status] api::core::v1::Node, ["spec.unschedulable"];
    "" "v1" "configmaps" "ConfigMap" namespaced [] api::core::v1::ConfigMap, [];
    "" "v1" "secrets" "Secret" namespaced [] api::core::v1::Secret, ["type"];
    "" "v1" "services" "Service" namespaced [status] api::core::v1::Service, ["spec.clusterIP" "spec.type"];
    "" "v1" "serviceaccounts" "ServiceAccount" namespaced [returned] api::core::v1::ServiceAccount, [];
    "" "v1" "events" "Event" namespaced [] api::core::v1::Event,
        ["involvedObject.kind" "involvedObject.namespace" "involvedObject.name" "involvedObject.uid"
         "involvedObject.apiVersion" "involvedObject.resourceVersion" "involvedObject.fieldPath"
         "reason" "reportingComponent" "source" "type"];
    "" "v1" "namespaces" "Namespace" cluster [status returned] api::core::v1::Namespace, ["status.phase"];
    "" "v1" "endpoints" "Endpoints" namespaced [] api::core::v1::Endpoints, [];
    "" "v1" "persistentvolumes" "PersistentVolume" cluster [status returned] api::core::v1::PersistentVolume, [];
    "" "v1" "persistentvolumeclaims" "PersistentVolumeClaim" namespaced [status returned]
        api::core::v1::PersistentVolumeClaim, [];
    "coordination.k8s.io" "v1" "leases" "Lease" namespaced [conditional] api::coordination::v1::Lease, [];
    "node.k8s.io" "v1" "runtimeclasses" "RuntimeClass" cluster [conditional] api::node::v1::RuntimeClass, [];
    "scheduling.k8s.io" "v1" "priorityclasses" "PriorityClass" cluster [] api::scheduling::v1::PriorityClass, [];
    "certificates.k8s.io" "v1" "certificatesigningrequests" "CertificateSigningRequest" cluster [status]
        api::certificates::v1::CertificateSigningRequest, ["spec.signerName"];
    "certificates.k8s.io" "v1" "podcertificaterequests" "PodCertificateRequest" namespaced [status] Value,
        ["spec.nodeName" "spec.signerName"];
    "certificates.k8s.io" "v1beta1" "podcertificaterequests" "PodCertificateRequest" namespaced [status] Value,
        ["spec.nodeName" "spec.signerName"];
    "events.k8s.io" "v1" "events" "Event" namespaced [] api::events::v1::Event,
        ["regarding.kind" "regarding.namespace" "regarding.name" "regarding.uid" "reason" "type"];
    "storage.k8s.io" "v1" "csinodes" "CSINode" cluster [conditional] api::storage::v1::CSINode, [];
    "storage.k8s.io" "v1" "csidrivers" "CSIDriver" cluster [] api::storage::v1::CSIDriver, [];
    "storage.k8s.io" "v1" "volumeattachments" "VolumeAttachment" cluster [status]
        api::storage::v1::VolumeAttachment, [];
    "resource.k8s.io" "v1" "resourceclaims" "ResourceClaim" namespaced [] api::resource::v1::ResourceClaim, [];
}
