//! Events: the agent's reports to users about their pods. Lower layers report through [`EventRecorder`];
//! the recorder above them writes the journal, the log and (with an API server) the Event object.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use super::containers::{ContainerKind, container_of};
use super::names::PodUid;
use super::pod::PodExt;

/// Upstream's `v1.EventTypeNormal` and `v1.EventTypeWarning`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum EventType {
    /// As it should be.
    Normal,
    /// Somebody should look.
    Warning,
}

/// The pod an event is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PodRef {
    /// UID.
    pub uid: PodUid,
    /// Name.
    pub name: String,
    /// Namespace.
    pub namespace: String,
}

impl PodRef {
    /// The reference of a pod.
    pub fn of(pod: &Pod) -> Self {
        Self {
            uid: pod.uid(),
            name: pod.name().to_owned(),
            namespace: pod.namespace().to_owned(),
        }
    }
}

/// One event, component `kubelet`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Event {
    /// The pod, or `None` for the node.
    pub pod: Option<PodRef>,
    /// Container that the event is about, if it is about one: its name, or for one that is not a main container its
    /// path, like `spec.initContainers{name}`.
    pub container: Option<String>,
    /// Normal or Warning.
    pub kind: EventType,
    /// Upstream's reason, CamelCase.
    pub reason: String,
    /// For a human.
    pub message: String,
    /// Annotations of the Event object.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

impl Event {
    /// An event about a pod.
    pub fn pod(kind: EventType, pod: &Pod, reason: &str, message: impl Into<String>) -> Self {
        Self {
            pod: Some(PodRef::of(pod)),
            container: None,
            kind,
            reason: reason.to_owned(),
            message: message.into(),
            annotations: BTreeMap::new(),
        }
    }

    /// An event about the node.
    pub fn node(kind: EventType, reason: &str, message: impl Into<String>) -> Self {
        Self {
            pod: None,
            container: None,
            kind,
            reason: reason.to_owned(),
            message: message.into(),
            annotations: BTreeMap::new(),
        }
    }

    /// Gives the Event object annotations.
    #[must_use]
    pub fn annotated(mut self, annotations: BTreeMap<String, String>) -> Self {
        self.annotations = annotations;
        self
    }

    /// The path of what the event is about within its pod, like `spec.containers{name}`.
    pub fn field_path(&self) -> Option<String> {
        let container = self.container.as_ref()?;
        Some(if container.ends_with('}') {
            container.clone()
        } else {
            format!("spec.containers{{{container}}}")
        })
    }

    /// Narrows the event to one container of `pod`, of whatever kind.
    #[must_use]
    pub fn container_of(mut self, pod: &Pod, name: &str) -> Self {
        self.container = Some(match container_of(pod, name) {
            Some(spec) if spec.kind != ContainerKind::Main => spec.field_path(),
            _ => name.to_owned(),
        });
        self
    }

    /// Narrows the event to one main container.
    #[must_use]
    pub fn container(mut self, name: &str) -> Self {
        self.container = Some(name.to_owned());
        self
    }
}

/// Takes events. Never blocks and never fails: a recorder that cannot keep up drops and counts.
pub trait EventRecorder: Send + Sync + 'static {
    /// Records one event.
    fn record(&self, event: Event);
}

/// Keeps events in memory, for tests.
#[derive(Clone, Debug, Default)]
pub struct MemoryRecorder(Arc<Mutex<Vec<Event>>>);

impl MemoryRecorder {
    /// Returns the events recorded so far.
    pub fn events(&self) -> Vec<Event> {
        self.0.lock().map(|e| e.clone()).unwrap_or_default()
    }
}

impl EventRecorder for MemoryRecorder {
    fn record(&self, event: Event) {
        if let Ok(mut events) = self.0.lock() {
            events.push(event);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_names_the_list_its_container_stands_in() {
        let pod: Pod = serde_json::from_value(serde_json::json!({"spec": {
            "containers": [{"name": "m"}],
            "initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}],
            "ephemeralContainers": [{"name": "e"}],
        }}))
        .unwrap();
        let path = |name| {
            let event = Event::pod(EventType::Normal, &pod, "Started", "");
            event.container_of(&pod, name).field_path().unwrap()
        };
        assert_eq!(path("m"), "spec.containers{m}");
        assert_eq!(path("i"), "spec.initContainers{i}");
        assert_eq!(path("s"), "spec.initContainers{s}");
        assert_eq!(path("e"), "spec.ephemeralContainers{e}");
    }
}
