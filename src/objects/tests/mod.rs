//! The cache against an API server of a few lines, on simulated time.

mod cache;
mod crypto;
mod fake;
mod keys;
mod pod_certificates;
mod service_accounts;
mod tokens;
mod trust;
mod volumes;

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::fake::Fake;
use super::keyring::{Key, Keyring};
use super::vault::Vault;
use super::{ObjectChange, Objects};
use crate::core::state::{ObjectRecord, State};
use crate::store::Store;
use crate::types::events::MemoryRecorder;
use crate::types::metrics::Metrics;
use crate::types::{BootId, Clock, Stamp};

pub(super) const BASE_MS: i64 = 1_700_000_000_000;

pub(super) fn stamp() -> Stamp {
    Stamp {
        boot: BootId(1),
        boottime_ms: 1000,
        wall_ms: BASE_MS,
    }
}

/// Simulated time, as the runtime has it.
pub(super) struct SimClock {
    started: Instant,
    boot: u64,
    offset_ms: i64,
}

impl Clock for SimClock {
    fn now(&self) -> Stamp {
        let ms = i64::try_from(self.started.elapsed().as_millis()).unwrap() + self.offset_ms;
        Stamp {
            boot: BootId(self.boot),
            boottime_ms: ms,
            wall_ms: BASE_MS + ms,
        }
    }
}

/// A node: its store outlives the agents on it.
pub(in crate::objects::tests) struct World {
    pub(super) store: Store,
    pub(in crate::objects::tests) fake: Fake,
    pub(super) vault: Arc<Vault>,
    pub(super) events: MemoryRecorder,
    pub(super) metrics: Metrics,
    clock: Arc<dyn Clock>,
}

pub(super) struct Life {
    pub(super) objects: Objects,
    stop: CancellationToken,
    running: tokio::task::JoinHandle<()>,
}

impl Life {
    /// The agent ends in order.
    pub(super) async fn end(self) {
        self.stop.cancel();
        self.running.await.unwrap();
    }
}

impl World {
    pub(super) fn new() -> Self {
        let clock: Arc<dyn Clock> = Arc::new(SimClock {
            started: Instant::now(),
            boot: 1,
            offset_ms: 0,
        });
        Self {
            store: Store::in_memory(Arc::clone(&clock)),
            fake: Fake::default(),
            vault: Arc::new(Vault::with_keys(Keyring::new(Key::generate(stamp())))),
            events: MemoryRecorder::default(),
            metrics: Metrics::default(),
            clock,
        }
    }

    /// An agent starts.
    pub(super) fn start(&self) -> Life {
        self.start_at(&self.clock)
    }

    /// An agent starts after a reboot, `passed` later by the wall clock.
    pub(super) fn start_after_reboot(&self, passed: Duration) -> Life {
        let clock: Arc<dyn Clock> = Arc::new(SimClock {
            started: Instant::now(),
            boot: 2,
            offset_ms: self.clock.now().wall_ms - BASE_MS
                + i64::try_from(passed.as_millis()).unwrap(),
        });
        self.start_at(&clock)
    }

    fn start_at(&self, clock: &Arc<dyn Clock>) -> Life {
        let objects = Objects::with_vault(
            self.store.clone(),
            Arc::clone(clock),
            Some(self.fake.client()),
            Arc::clone(&self.vault),
            self.metrics.clone(),
            Some(Arc::new(self.events.clone())),
        );
        let stop = CancellationToken::new();
        let running = tokio::spawn(objects.clone().run(stop.clone()));
        Life {
            objects,
            stop,
            running,
        }
    }

    pub(super) fn state(&self) -> Arc<State> {
        self.store.snapshot()
    }

    pub(super) fn record(&self, key: &str) -> Option<ObjectRecord> {
        self.state().record::<ObjectRecord>(key).cloned()
    }

    pub(super) fn keys(&self) -> Vec<String> {
        self.state()
            .objects
            .keys()
            .map(|key| key.to_string())
            .collect()
    }
}

/// Lets everything that can happen now happen; simulated time moves by this much.
pub(super) async fn settle() {
    tokio::time::sleep(Duration::from_millis(20)).await;
}

pub(super) fn pod(uid: &str, spec: Value) -> Pod {
    let mut spec = spec;
    if spec.get("containers").is_none() {
        spec["containers"] = json!([{"name": "main", "image": "x"}]);
    }
    let pod = json!({
        "metadata": {"namespace": "ns", "name": format!("pod-{uid}"), "uid": uid},
        "spec": spec,
    });
    serde_json::from_value(pod).unwrap()
}

pub(super) fn volumes(config_map: &str, secret: &str) -> Value {
    json!({"volumes": [
        {"name": "c", "configMap": {"name": config_map}},
        {"name": "s", "secret": {"secretName": secret}},
    ]})
}

pub(super) fn change(kind: &'static str, name: &str) -> ObjectChange {
    ObjectChange {
        kind,
        namespace: "ns".to_owned(),
        name: name.to_owned(),
    }
}
