//! The messages of `k8s.io/kubelet/pkg/apis/pods/v1alpha1`: field numbers and types are the protocol. A pod is bytes that
//! Go's `v1.Pod#Unmarshal` reads.

use prost::Message;

/// `EventType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum EventType {
    /// Not used.
    Unspecified = 0,
    /// A pod that exists when the watch begins, or a new one.
    Added = 1,
    /// A pod whose spec or status changed.
    Modified = 2,
    /// A pod that no longer exists. It has name, namespace and UID only.
    Deleted = 3,
    /// All pods that existed when the watch began were sent. It has no pod.
    InitialSyncComplete = 4,
}

/// `WatchPodsRequest`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct WatchPodsRequest {}

/// `WatchPodsEvent`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct WatchPodsEvent {
    /// The change.
    #[prost(enumeration = "EventType", tag = "1")]
    pub r#type: i32,
    /// The pod.
    #[prost(bytes = "vec", tag = "2")]
    pub pod: Vec<u8>,
}

/// `ListPodsRequest`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct ListPodsRequest {}

/// `ListPodsResponse`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ListPodsResponse {
    /// The pods, by UID.
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub pods: Vec<Vec<u8>>,
}

/// `GetPodRequest`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct GetPodRequest {
    /// `metadata.uid`.
    #[prost(string, tag = "1")]
    pub pod_uid: String,
}

/// `GetPodResponse`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct GetPodResponse {
    /// The pod.
    #[prost(bytes = "vec", tag = "1")]
    pub pod: Vec<u8>,
}
