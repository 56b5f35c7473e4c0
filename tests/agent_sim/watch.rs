//! What must never happen, looked for at each start of a container.

use holdfast::core::state::{ContainerRecord, Table};
use holdfast::kuberuntime::cri::v1;
use holdfast::store::backend::Backend;
use holdfast::store::codec;
use holdfast_testkit::fake_cri::FakeCri;
use tokio::time::Instant;

use crate::node::*;

/// A start of a container that took effect.
#[derive(Clone, Debug)]
pub struct Start {
    pub uid: String,
    pub pod: String,
    pub container: String,
    pub attempt: u32,
    pub at: Instant,
}

/// What must never happen, found where it happens.
#[derive(Default)]
pub struct Watch {
    pub starts: Vec<Start>,
    pub wrongs: Vec<String>,
    pub counts: std::collections::BTreeMap<(String, String), u32>,
}

impl Watch {
    pub fn note_start(&mut self, start: Start) {
        let key = (start.uid.clone(), start.container.clone());
        if let Some(last) = self.counts.get(&key)
            && start.attempt <= *last
        {
            self.wrongs.push(format!(
                "{start:?} has a restart count that is not above {last}"
            ));
        }
        self.counts.insert(key, start.attempt);
        self.starts.push(start);
    }

    /// The pod was removed: should it come back, its counts begin anew.
    pub fn forget(&mut self, uid: &str) {
        self.counts.retain(|(pod, _), _| pod != uid);
    }

    /// Before a container is started: its intent is on the disk, nothing else of its name runs.
    pub fn check_start(&mut self, fake: &FakeCri, disk: &Disk, id: &str) {
        let Some(config) = fake.config(id) else {
            return;
        };
        let created = fake
            .containers()
            .iter()
            .any(|c| c.id == id && c.state() == v1::ContainerState::ContainerCreated);
        if !created {
            self.wrongs
                .push(format!("{:?} is started again", start_of(&config)));
            return;
        }
        let start = start_of(&config);
        let key = format!("{}/{}", start.uid, start.container);
        let raw = codec::record_key(Table::Containers, &key);
        let pairs = disk.synced.iter();
        let only = pairs.filter(|pair| matches!(pair, Ok((found, _)) if *found == raw));
        let state = codec::load(only, 1).state;
        let intended = state
            .record::<ContainerRecord>(&key)
            .and_then(|r| r.intent.as_ref())
            .is_some_and(|i| i.container_id.as_str() == id);
        if !intended {
            self.wrongs
                .push(format!("{start:?} is started without an intent on disk"));
        }
        for other in fake.containers() {
            // Of static pods the old one ends before the new one starts; a pod of the API server waits for none.
            let same_pod = if start.pod.ends_with("-sim") {
                label(&other.labels, "io.kubernetes.pod.name") == start.pod
            } else {
                label(&other.labels, "io.kubernetes.pod.uid") == start.uid
            };
            let same_name = other
                .metadata
                .as_ref()
                .is_some_and(|m| m.name == start.container);
            if same_pod
                && same_name
                && other.id != id
                && other.state() == v1::ContainerState::ContainerRunning
            {
                self.wrongs
                    .push(format!("{start:?} while {} runs", other.id));
            }
        }
    }
}

pub fn start_of(config: &v1::ContainerConfig) -> Start {
    let meta = config.metadata.clone().unwrap_or_default();
    Start {
        uid: label(&config.labels, "io.kubernetes.pod.uid"),
        pod: label(&config.labels, "io.kubernetes.pod.name"),
        container: meta.name,
        attempt: meta.attempt,
        at: Instant::now(),
    }
}

pub fn label(labels: &std::collections::HashMap<String, String>, name: &str) -> String {
    labels.get(name).cloned().unwrap_or_default()
}
