use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use holdfast_testkit::validation::{InvalidWrites, NoInvalidWrites, Write};
use hyper::{Request, Response};
use k8s_openapi::api::core::v1::Node;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::core::node_status::{Machine, RuntimeFacts};
use crate::types::events::MemoryRecorder;
use crate::types::{BootId, Stamp};

/// A clock that the runtime's paused time moves.
struct TokioClock(tokio::time::Instant);

const EPOCH_MS: i64 = 1_700_000_000_000;

impl Clock for TokioClock {
    fn now(&self) -> Stamp {
        let ms = i64::try_from(self.0.elapsed().as_millis()).unwrap();
        Stamp {
            boot: BootId(1),
            boottime_ms: ms,
            wall_ms: EPOCH_MS + ms,
        }
    }
}

/// State of the API server, and its requests.
#[derive(Default)]
struct Server {
    node: Option<Value>,
    lease: Option<Value>,
    version: u64,
    log: Vec<String>,
    patches: Vec<Value>,
    down: bool,
    /// Fixed value of the label `kubernetes.io/os`.
    forced: Option<&'static str>,
    /// Watches see the node this often, and end.
    watch: Option<tokio::sync::watch::Sender<u64>>,
}

#[derive(Clone, Default)]
struct Fake(Arc<Mutex<Server>>, NoInvalidWrites);

fn refusal(code: u16, reason: &str) -> (u16, Value) {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": reason,
    });
    (code, status)
}

impl Fake {
    fn with<T>(&self, f: impl FnOnce(&mut Server) -> T) -> T {
        f(&mut self.0.lock().unwrap())
    }

    fn asked(&self, what: &str) -> usize {
        self.with(|s| s.log.iter().filter(|line| line.starts_with(what)).count())
    }

    fn patches(&self) -> usize {
        self.with(|s| s.patches.len())
    }

    fn ready(&self) -> Option<String> {
        self.with(|s| {
            let conditions = s.node.as_ref()?["status"]["conditions"].as_array()?.clone();
            let ready = conditions.into_iter().find(|c| c["type"] == "Ready")?;
            Some(ready["status"].as_str()?.to_owned())
        })
    }

    /// Somebody else changes the node; watches see it.
    fn edit(&self, f: impl FnOnce(&mut Value)) {
        self.with(|s| {
            s.version += 1;
            let version = s.version;
            let node = s.node.as_mut().unwrap();
            f(node);
            node["metadata"]["resourceVersion"] = json!(version.to_string());
            s.tell();
        });
    }

    fn delete(&self) {
        self.with(|s| {
            s.version += 1;
            s.node = None;
            s.tell();
        });
    }
}

impl Server {
    fn tell(&mut self) {
        let version = self.version;
        let watch = self.watch.get_or_insert_with(|| watch::Sender::new(0));
        watch.send_replace(version);
    }

    fn answer(
        &mut self,
        method: &str,
        path: &str,
        body: Value,
        invalid: &InvalidWrites,
    ) -> (u16, Value) {
        let is_lease = path.contains("/leases");
        let refused = |old: Option<&Value>, new: &Value| {
            let write = Write {
                group: if is_lease { "coordination.k8s.io" } else { "" },
                resource: if is_lease { "leases" } else { "nodes" },
                subresource: if path.ends_with("/status") {
                    "status"
                } else {
                    ""
                },
                namespace: if is_lease { "kube-node-lease" } else { "" },
                name: "n1",
                old,
                new,
            };
            !invalid.check(path, &write).is_empty()
        };
        let slot = if is_lease {
            &mut self.lease
        } else {
            &mut self.node
        };
        match method {
            "GET" => match slot {
                Some(object) => (200, object.clone()),
                None => refusal(404, "NotFound"),
            },
            "POST" if slot.is_some() => refusal(409, "AlreadyExists"),
            "POST" => {
                self.version += 1;
                let mut object = body;
                object["metadata"]["uid"] = json!(format!("uid-{}", self.version));
                object["metadata"]["resourceVersion"] = json!(self.version.to_string());
                if refused(None, &object) {
                    return refusal(422, "Invalid");
                }
                *slot = Some(object.clone());
                if !is_lease {
                    self.tell();
                }
                (201, object)
            }
            "PUT" => {
                let Some(known) = slot else {
                    return refusal(404, "NotFound");
                };
                if known["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"] {
                    return refusal(409, "Conflict");
                }
                if refused(Some(&*known), &body) {
                    return refusal(422, "Invalid");
                }
                self.version += 1;
                let mut object = body;
                object["metadata"]["resourceVersion"] = json!(self.version.to_string());
                *slot = Some(object.clone());
                (200, object)
            }
            _ => {
                let Some(known) = slot else {
                    return refusal(404, "NotFound");
                };
                self.patches.push(body.clone());
                self.version += 1;
                let mut patched = known.clone();
                merge(&mut patched, &body);
                if refused(Some(&*known), &patched) {
                    return refusal(422, "Invalid");
                }
                *known = patched;
                // What an old server does not know.
                known["status"]["nodeInfo"]
                    .as_object_mut()
                    .unwrap()
                    .remove("swap");
                if let Some(forced) = self.forced {
                    known["metadata"]["labels"]["kubernetes.io/os"] = json!(forced);
                }
                known["metadata"]["resourceVersion"] = json!(self.version.to_string());
                let answer = known.clone();
                self.tell();
                (200, answer)
            }
        }
    }
}

/// As much of a strategic merge as a node needs.
fn merge(into: &mut Value, patch: &Value) {
    for (key, value) in patch.as_object().unwrap() {
        if key.starts_with('$') {
            continue;
        }
        let slot = &mut into[key.as_str()];
        match value {
            Value::Null => drop(into.as_object_mut().unwrap().remove(key)),
            Value::Object(_) if slot.is_object() => merge(slot, value),
            Value::Array(items) if key == "conditions" && slot.is_array() => {
                let known = slot.as_array_mut().unwrap();
                for item in items {
                    match known.iter_mut().find(|c| c["type"] == item["type"]) {
                        Some(found) => *found = item.clone(),
                        None => known.push(item.clone()),
                    }
                }
            }
            Value::Array(items) => {
                let kept = items.iter().filter(|item| item.get("$patch").is_none());
                *slot = kept.cloned().collect();
            }
            other => *slot = other.clone(),
        }
    }
}

fn respond(code: u16, body: Vec<u8>) -> Response<Body> {
    Response::builder()
        .status(code)
        .body(Body::from(body))
        .unwrap()
}

impl tower::Service<Request<Body>> for Fake {
    type Response = Response<Body>;
    type Error = std::io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let fake = self.clone();
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            let bytes = body.collect_bytes().await.map_err(std::io::Error::other)?;
            let method = parts.method.as_str().to_owned();
            let query = parts.uri.query().unwrap_or_default().to_owned();
            let path = parts.uri.path().to_owned();
            if fake.with(|s| s.down) {
                return Err(std::io::Error::other("connection refused"));
            }
            let kind = if query.contains("watch=true") {
                "WATCH"
            } else if query.contains("fieldSelector") {
                "LIST"
            } else {
                &method
            };
            fake.with(|s| s.log.push(format!("{kind} {path}")));
            match kind {
                "WATCH" => {
                    let seen = fake.with(|s| {
                        let version = s.version;
                        (s.watch.get_or_insert_with(|| watch::Sender::new(version))).subscribe()
                    });
                    let from = query
                        .split('&')
                        .find_map(|p| p.strip_prefix("resourceVersion="));
                    let from: u64 = from.and_then(|v| v.parse().ok()).unwrap_or(0);
                    Ok(watch_once(fake, seen, from).await)
                }
                "LIST" => {
                    let list = fake.with(|s| {
                        json!({
                            "kind": "NodeList", "apiVersion": "v1",
                            "metadata": {"resourceVersion": s.version.to_string()},
                            "items": s.node.iter().collect::<Vec<_>>(),
                        })
                    });
                    Ok(respond(200, serde_json::to_vec(&list).unwrap()))
                }
                _ => {
                    let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
                    let (code, answer) = fake.with(|s| s.answer(&method, &path, body, &fake.1));
                    Ok(respond(code, serde_json::to_vec(&answer).unwrap()))
                }
            }
        })
    }
}

/// A watch that shows the next version of the node and ends: its answer begins when there is one.
async fn watch_once(fake: Fake, mut seen: watch::Receiver<u64>, from: u64) -> Response<Body> {
    drop(seen.wait_for(|version| *version > from).await);
    let event = fake.with(|s| match &s.node {
        Some(node) => json!({"type": "MODIFIED", "object": node}),
        None => json!({
            "type": "DELETED",
            "object": {"kind": "Node", "apiVersion": "v1", "metadata": {
                "name": "n1", "resourceVersion": s.version.to_string(),
            }},
        }),
    });
    let mut line = serde_json::to_vec(&event).unwrap();
    line.push(b'\n');
    respond(200, line)
}

/// One agent after the other, over one store and one API server.
struct World {
    fake: Fake,
    store: Store,
    clock: Arc<dyn Clock>,
    recorder: MemoryRecorder,
    node_object: NodeObject,
    runtime_state: RuntimeState,
    facts: watch::Sender<Option<Facts>>,
    pressure: watch::Sender<Pressure>,
    settings: NodeSettings,
    connection: Connection,
    life: Option<(CancellationToken, tokio::task::JoinHandle<()>)>,
}

impl World {
    fn new() -> Self {
        let clock: Arc<dyn Clock> = Arc::new(TokioClock(tokio::time::Instant::now()));
        let facts = Facts {
            machine: Machine {
                cpus: 2,
                memory: Some(4 << 30),
                swap: Some(0),
                hugepages: BTreeMap::new(),
                ephemeral_storage: Some(10 << 30),
                machine_id: "m1".into(),
                system_uuid: "s1".into(),
                boot_id: "b1".into(),
                ..Machine::default()
            },
            runtime: Some(RuntimeFacts::default()),
            images: Some(Arc::default()),
            addresses: vec!["10.0.0.1".parse().unwrap()],
            volumes_in_use: None,
            devices: Default::default(),
        };
        Self {
            fake: Fake::default(),
            store: Store::in_memory(Arc::clone(&clock)),
            clock,
            recorder: MemoryRecorder::default(),
            node_object: NodeObject::default(),
            runtime_state: RuntimeState::default(),
            facts: watch::Sender::new(Some(facts)),
            pressure: watch::Sender::new(Pressure::default()),
            settings: NodeSettings::new("n1"),
            connection: Connection::default(),
            life: None,
        }
    }

    fn up(&self) {
        self.runtime_state.set_pleg_relist(self.clock.now());
        self.runtime_state
            .set_pleg_period(Duration::from_secs(100_000));
        self.runtime_state.set_runtime_ok(self.clock.now());
    }

    /// A new process: it knows what is in the store.
    fn start(&mut self) {
        self.node_object = NodeObject::default();
        self.runtime_state = RuntimeState::default();
        let client = kube::Client::new(self.fake.clone(), "default");
        self.connection = Connection::default();
        let connection = self.connection.clone();
        let parts = Parts {
            settings: self.settings.clone(),
            api: ApiClient::new(client, connection.clone()),
            store: self.store.clone(),
            clock: Arc::clone(&self.clock),
            runtime_state: self.runtime_state.clone(),
            node_object: self.node_object.clone(),
            recorder: Arc::new(self.recorder.clone()),
            pressure: self.pressure.subscribe(),
        };
        let (status, lease, known) = parts.tasks(self.facts.subscribe());
        let token = CancellationToken::new();
        let stop = token.clone();
        let task = tokio::spawn(async move {
            let all = async {
                tokio::join!(status.run(), lease.run(), known.watch(&connection));
            };
            tokio::select! {
                () = stop.cancelled() => {}
                () = all => {}
            }
        });
        self.life = Some((token, task));
    }

    async fn stop(&mut self) {
        let (token, task) = self.life.take().unwrap();
        token.cancel();
        task.await.unwrap();
    }

    /// Runs for this long with a runtime that is well.
    async fn pass(&self, seconds: u64) {
        for _ in 0..seconds {
            self.up();
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    fn events(&self) -> Vec<String> {
        self.recorder
            .events()
            .into_iter()
            .map(|e| e.reason)
            .collect()
    }

    fn count(&self, reason: &str) -> usize {
        self.events().iter().filter(|r| *r == reason).count()
    }
}

#[tokio::test(start_paused = true)]
async fn a_new_node_is_registered_and_ready_as_soon_as_the_runtime_is() {
    let mut world = World::new();
    world.start();
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(world.fake.ready().as_deref(), Some("False"));
    world.up();
    tokio::time::sleep(Duration::from_millis(150)).await;
    assert_eq!(world.fake.ready().as_deref(), Some("True"));
    assert_eq!(world.fake.patches(), 1);
    assert_eq!(world.count("NodeReady"), 1);
    let node = world.node_object.get().unwrap();
    assert_eq!(node.metadata.uid.as_deref(), Some("uid-1"));
    let lease = world.fake.with(|s| s.lease.clone()).unwrap();
    assert_eq!(lease["metadata"]["ownerReferences"][0]["uid"], "uid-1");
    assert_eq!(lease["spec"]["holderIdentity"], "n1");
    assert_eq!(lease["spec"]["leaseDurationSeconds"], 40);
}

#[tokio::test(start_paused = true)]
async fn an_idle_minute_costs_at_most_eight_requests() {
    let mut world = World::new();
    world.start();
    world.pass(30).await;
    let before = world.fake.with(|s| s.log.len());
    world.pass(600).await;
    let log = world.fake.with(|s| s.log[before..].to_vec());
    let leases = log.iter().filter(|l| l.starts_with("PUT")).count();
    let patches = log.iter().filter(|l| l.starts_with("PATCH")).count();
    assert!((57..=60).contains(&leases), "{leases}");
    assert!((1..=3).contains(&patches), "{patches}");
    assert!(
        log.len() <= 80,
        "{} requests in ten minutes: {log:?}",
        log.len()
    );
    assert!(!log.iter().any(|l| l.starts_with("GET")), "{log:?}");
}

#[tokio::test(start_paused = true)]
async fn a_restart_writes_no_status_and_changes_no_condition() {
    let mut world = World::new();
    world.start();
    world.pass(30).await;
    let (patches, node) = (world.fake.patches(), world.fake.with(|s| s.node.clone()));
    let events = world.events().len();
    for _ in 0..3 {
        world.stop().await;
        world.start();
        assert!(
            world.node_object.get().is_some(),
            "the record is there at once"
        );
        // The runtime is not known for a while.
        tokio::time::sleep(Duration::from_secs(12)).await;
        world.pass(20).await;
    }
    assert_eq!(world.fake.patches(), patches);
    assert_eq!(world.fake.with(|s| s.node.clone()), node);
    assert_eq!(world.events().len(), events, "{:?}", world.events());
    assert_eq!(world.fake.asked("POST /api/v1/nodes"), 1);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_shuts_down_is_not_ready_at_once_and_ready_again_when_that_is_cancelled() {
    let mut world = World::new();
    world.start();
    world.pass(60).await;
    for (is, ready) in [(true, "False"), (false, "True")] {
        world.runtime_state.set_shutting_down(is);
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(world.fake.ready().as_deref(), Some(ready));
        if is {
            let node = world.node_object.get().unwrap();
            let conditions = node.status.as_ref().unwrap().conditions.clone().unwrap();
            let condition = conditions.iter().find(|c| c.type_ == "Ready").unwrap();
            assert_eq!(condition.reason.as_deref(), Some("KubeletNotReady"));
            assert_eq!(condition.message.as_deref(), Some("node is shutting down"));
        }
    }
    // A young agent knows it as well.
    world.stop().await;
    world.start();
    world.runtime_state.set_shutting_down(true);
    world.pass(1).await;
    assert_eq!(world.fake.ready().as_deref(), Some("False"));
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_stays_down_makes_the_node_not_ready_after_half_a_minute() {
    let mut world = World::new();
    world.start();
    world.pass(60).await;
    world.runtime_state.set_runtime_error("connection refused");
    tokio::time::sleep(Duration::from_secs(25)).await;
    assert_eq!(world.fake.ready().as_deref(), Some("True"));
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(world.fake.ready().as_deref(), Some("False"));
    assert_eq!(world.count("NodeNotReady"), 1);
    world.pass(12).await;
    assert_eq!(world.fake.ready().as_deref(), Some("True"));
}

#[tokio::test(start_paused = true)]
async fn what_happens_in_an_outage_is_told_once_and_arrives_afterwards() {
    let mut world = World::new();
    world.start();
    world.pass(30).await;
    world.fake.with(|s| s.down = true);
    let pressure = Pressure {
        disk: true,
        ..Pressure::default()
    };
    world.pressure.send_replace(pressure);
    let began = world.clock.now();
    world.pass(60).await;
    // The agent is restarted meanwhile.
    world.stop().await;
    world.start();
    world.pass(60).await;
    assert_eq!(world.count("NodeHasDiskPressure"), 1);
    world.fake.with(|s| s.down = false);
    world.pass(11).await;
    let node: Node = serde_json::from_value(world.fake.with(|s| s.node.clone()).unwrap()).unwrap();
    let conditions = node.status.unwrap().conditions.unwrap();
    let disk = conditions
        .iter()
        .find(|c| c.type_ == "DiskPressure")
        .unwrap();
    assert_eq!(disk.status, "True");
    let since = disk.last_transition_time.as_ref().unwrap().0.as_second();
    assert!((since - began.wall_ms / 1000).abs() <= 1, "{since}");
    assert_eq!(world.count("NodeHasDiskPressure"), 1);
}

#[tokio::test(start_paused = true)]
async fn an_existing_node_is_taken_over_with_what_its_owner_set() {
    let mut world = World::new();
    world.fake.with(|s| {
        s.version = 7;
        s.node = Some(json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {
                "name": "n1", "uid": "u", "resourceVersion": "7", "labels": {"mine": "1"},
            },
            "spec": {"unschedulable": true, "podCIDR": "10.1.0.0/24"},
            "status": {
                "capacity": {"example.com/gpu": "1"},
                "conditions": [{"type": "NetworkUnavailable", "status": "False"}],
                "volumesAttached": [{"name": "v", "devicePath": ""}],
                "nodeInfo": {
                    "machineID": "m1", "systemUUID": "s1", "bootID": "b1", "kernelVersion": "", "osImage": "",
                    "containerRuntimeVersion": "", "kubeletVersion": "v1.30.0", "kubeProxyVersion": "",
                    "operatingSystem": "linux", "architecture": "amd64",
                },
            },
        }));
    });
    world.settings.labels.insert("new".into(), "1".into());
    world.start();
    world.up();
    world.pass(2).await;
    let node = world.fake.with(|s| s.node.clone()).unwrap();
    assert_eq!(node["metadata"]["labels"]["mine"], "1");
    assert_eq!(node["metadata"]["labels"]["kubernetes.io/hostname"], "n1");
    assert_eq!(node["metadata"]["labels"]["new"], Value::Null);
    assert_eq!(node["spec"]["unschedulable"], true);
    assert_eq!(node["status"]["capacity"]["example.com/gpu"], "1");
    assert_eq!(node["status"]["volumesAttached"][0]["name"], "v");
    assert_eq!(node["status"]["conditions"].as_array().unwrap().len(), 5);
    assert_eq!(world.count("NodeNotSchedulable"), 1);
    assert_eq!(world.count("NodeNameConflict"), 0);
}

#[tokio::test(start_paused = true)]
async fn labels_of_the_agents_own_are_corrected_with_the_next_status_and_no_others() {
    let mut world = World::new();
    let given = |name: &str| (name.to_owned(), "given".to_owned());
    world.settings.labels = BTreeMap::from([
        given("topology.kubernetes.io/zone"),
        given("beta.kubernetes.io/os"),
        given("mine"),
    ]);
    world.start();
    world.pass(30).await;
    let patches = world.fake.patches();
    world.fake.edit(|node| {
        let labels = node["metadata"]["labels"].as_object_mut().unwrap();
        labels.insert("kubernetes.io/os".into(), json!("windows"));
        labels.insert("beta.kubernetes.io/os".into(), json!("windows"));
        labels.remove("kubernetes.io/hostname");
        labels.insert("topology.kubernetes.io/zone".into(), json!("other"));
        labels.insert("beta.kubernetes.io/arch".into(), json!("other"));
        labels.insert("mine".into(), json!("other"));
    });
    world.pass(11).await;
    let labels = world.fake.with(|s| s.node.clone()).unwrap()["metadata"]["labels"].clone();
    assert_eq!(labels["kubernetes.io/os"], "linux");
    assert_eq!(labels["beta.kubernetes.io/os"], "given");
    assert_eq!(labels["kubernetes.io/hostname"], "n1");
    for name in [
        "topology.kubernetes.io/zone",
        "beta.kubernetes.io/arch",
        "mine",
    ] {
        assert_eq!(labels[name], "other", "{name}");
    }
    assert_eq!(world.fake.patches(), patches + 1, "all at once");
    let patch = world.fake.with(|s| s.patches[patches].clone());
    assert_eq!(patch["metadata"]["labels"].as_object().unwrap().len(), 3);
    world.pass(60).await;
    assert_eq!(world.fake.patches(), patches + 1);

    // Somebody who changes it all the time is answered once a period.
    for _ in 0..60 {
        world
            .fake
            .edit(|node| node["metadata"]["labels"]["kubernetes.io/os"] = json!("windows"));
        world.pass(1).await;
    }
    let fought = world.fake.patches() - patches - 1;
    assert!((5..=6).contains(&fought), "{fought}");
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_keeps_its_own_value_of_a_label_is_not_asked_again_and_again() {
    let mut world = World::new();
    world.start();
    world.pass(30).await;
    let patches = world.fake.patches();
    // As a webhook does.
    world.fake.with(|s| s.forced = Some("windows"));
    world
        .fake
        .edit(|node| node["metadata"]["labels"]["kubernetes.io/os"] = json!("windows"));
    world.pass(120).await;
    assert_eq!(world.fake.patches(), patches + 1);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_was_deleted_is_registered_again() {
    let mut world = World::new();
    world.start();
    world.pass(20).await;
    world.fake.delete();
    world.pass(2).await;
    assert_eq!(world.fake.ready().as_deref(), Some("True"));
    assert_eq!(world.count("NodeDeleted"), 1);
    let uid = world.fake.with(|s| s.node.clone()).unwrap()["metadata"]["uid"].clone();
    let known = world.node_object.get().unwrap().metadata.uid.clone();
    assert_eq!(uid.as_str(), known.as_deref());
    // The lease gets its new owner.
    world.pass(15).await;
    let lease = world.fake.with(|s| s.lease.clone()).unwrap();
    assert_eq!(lease["metadata"]["ownerReferences"][0]["uid"], uid);
}

#[tokio::test(start_paused = true)]
async fn a_cordon_is_known_at_once() {
    let mut world = World::new();
    world.start();
    world.pass(20).await;
    let patches = world.fake.patches();
    world
        .fake
        .edit(|node| node["spec"]["unschedulable"] = json!(true));
    world.pass(1).await;
    assert_eq!(world.count("NodeNotSchedulable"), 1);
    let node = world.node_object.get().unwrap();
    assert_eq!(node.spec.as_ref().unwrap().unschedulable, Some(true));
    assert_eq!(world.fake.patches(), patches);
}

#[tokio::test(start_paused = true)]
async fn another_machine_with_the_same_name_is_told_at_most_once_a_minute() {
    let mut world = World::new();
    world.start();
    world.pass(30).await;
    for _ in 0..6 {
        world
            .fake
            .edit(|node| node["status"]["nodeInfo"]["machineID"] = json!("m2"));
        world.pass(15).await;
    }
    let told = world.count("NodeNameConflict");
    assert!((1..=2).contains(&told), "{told}");
    let event = world
        .recorder
        .events()
        .into_iter()
        .find(|e| e.reason == "NodeNameConflict");
    let message = event.unwrap().message;
    assert!(
        message.contains("m2") && message.contains("m1"),
        "{message}"
    );
    assert_eq!(world.fake.ready().as_deref(), Some("True"));
}

#[tokio::test(start_paused = true)]
async fn extended_resources_of_another_machine_are_zero_and_those_of_this_one_are_kept() {
    for (machine, expected) in [("m2", "0"), ("m1", "4")] {
        let mut world = World::new();
        world.fake.with(|s| {
            s.version = 7;
            s.node = Some(json!({
                "apiVersion": "v1", "kind": "Node",
                "metadata": {"name": "n1", "uid": "u", "resourceVersion": "7"},
                "status": {
                    "capacity": {"example.com/gpu": "4", "example.com/nic": "1", "pods": "7"},
                    "allocatable": {"example.com/gpu": "4", "example.com/nic": "1"},
                    "nodeInfo": {
                        "machineID": machine, "systemUUID": "s1", "bootID": "b0", "kernelVersion": "", "osImage": "",
                        "containerRuntimeVersion": "", "kubeletVersion": "v1.30.0", "kubeProxyVersion": "",
                        "operatingSystem": "linux", "architecture": "amd64",
                    },
                },
            }));
        });
        let nic = crate::core::devices::Amount {
            capacity: 2,
            allocatable: 2,
        };
        world.facts.send_modify(|facts| {
            let devices = &mut facts.as_mut().unwrap().devices;
            devices.insert("example.com/nic".to_owned(), nic);
        });
        world.start();
        world.up();
        world.pass(2).await;
        let status = world.fake.with(|s| s.node.clone()).unwrap()["status"].clone();
        for list in ["capacity", "allocatable"] {
            assert_eq!(
                status[list]["example.com/gpu"], expected,
                "{machine} {list}"
            );
            assert_eq!(status[list]["example.com/nic"], "2", "{machine} {list}");
        }
        assert_eq!(status["capacity"]["pods"], "110");
        // Somebody else advertises a resource; it stays over a restart.
        world
            .fake
            .edit(|node| node["status"]["capacity"]["example.com/gpu"] = json!("3"));
        world.pass(2).await;
        world.stop().await;
        world.start();
        world.pass(30).await;
        let status = world.fake.with(|s| s.node.clone()).unwrap()["status"].clone();
        assert_eq!(status["capacity"]["example.com/gpu"], "3", "{machine}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_lease_survives_conflict_and_deletion() {
    let mut world = World::new();
    world.start();
    world.pass(20).await;
    // Somebody annotates it: nothing to tell.
    world.fake.with(|s| {
        s.lease.as_mut().unwrap()["metadata"]["resourceVersion"] = json!("999");
    });
    world.pass(11).await;
    assert_eq!(world.fake.asked("GET /apis/coordination"), 2);
    assert_eq!(world.count("NodeNameConflict"), 0);
    // Somebody renews it: another machine.
    world.fake.with(|s| {
        let lease = s.lease.as_mut().unwrap();
        lease["metadata"]["resourceVersion"] = json!("1000");
        lease["spec"]["renewTime"] = json!("2030-01-01T00:00:00.000000Z");
    });
    world.pass(11).await;
    assert_eq!(world.count("NodeNameConflict"), 1);
    world.fake.with(|s| s.lease = None);
    world.pass(11).await;
    assert!(world.fake.with(|s| s.lease.is_some()));
}

/// As after etcd was restored from a backup.
#[tokio::test(start_paused = true)]
async fn a_lease_of_a_server_that_was_set_back_is_of_no_other_machine() {
    let mut world = World::new();
    world.start();
    world.pass(20).await;
    let backup = world.fake.with(|s| s.lease.clone());
    world.pass(300).await;
    world.fake.with(|s| s.lease = backup);
    world.pass(60).await;
    assert_eq!(world.count("NodeNameConflict"), 0);
    let lease = world.fake.with(|s| s.lease.clone()).unwrap();
    let renewed = lease["spec"]["renewTime"].as_str().unwrap();
    let renewed: jiff::Timestamp = renewed.parse().unwrap();
    let now = world.clock.now().wall_ms;
    assert!(now - renewed.as_millisecond() < 15_000, "{lease}");
}

#[tokio::test(start_paused = true)]
async fn the_node_of_a_server_that_was_set_back_is_taken_as_it_is() {
    let mut world = World::new();
    world.start();
    world.pass(20).await;
    let backup = world.fake.with(|s| (s.version, s.node.clone()));
    world
        .fake
        .edit(|node| node["metadata"]["labels"]["zone"] = json!("new"));
    world.pass(120).await;
    let label = |world: &World| {
        let node = world.node_object.get().unwrap();
        node.metadata.labels.as_ref().unwrap().get("zone").cloned()
    };
    assert_eq!(label(&world).as_deref(), Some("new"));
    world.fake.with(|s| {
        (s.version, s.node) = backup;
        // A watch says nothing until the version of before is reached again.
        s.watch = None;
    });
    // The source of pods has found out.
    world.connection.was_set_back();
    world.pass(30).await;
    assert_eq!(label(&world), None);
    // And it converges again.
    let patches = world.fake.patches();
    world.pass(60).await;
    assert_eq!(world.fake.patches(), patches);
}

#[tokio::test(start_paused = true)]
async fn the_lease_is_renewed_while_nothing_is_known_of_machine_and_runtime() {
    let mut world = World::new();
    world.start();
    world.pass(20).await;
    world.stop().await;
    world.facts.send_replace(None);
    let before = world.fake.asked("PUT /apis/coordination");
    world.start();
    tokio::time::sleep(Duration::from_secs(31)).await;
    assert!(world.fake.asked("PUT /apis/coordination") >= before + 3);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_may_not_register_itself_waits_to_be_made() {
    let mut world = World::new();
    world.settings.register = false;
    world.start();
    world.pass(20).await;
    assert_eq!(world.fake.asked("POST"), 0);
    assert!(world.node_object.get().is_none());
}

/// A controller that sees a lease go back takes the node for lost, until the time of before is reached again.
#[tokio::test(start_paused = true)]
async fn the_lease_goes_on_when_the_clock_is_set_back() {
    let mut world = World::new();
    world.start();
    world.pass(15).await;
    let renewed = |world: &World| {
        let lease = world.fake.with(|s| s.lease.clone()).unwrap();
        lease["spec"]["renewTime"].as_str().unwrap().to_owned()
    };
    let before = renewed(&world);
    // As if the clock had been set back by years meanwhile.
    world.fake.with(|s| {
        s.lease.as_mut().unwrap()["spec"]["renewTime"] = json!("2031-02-03T04:05:06.000007Z");
    });
    world.stop().await;
    world.start();
    let mut last = "2031-02-03T04:05:06.000007Z".to_owned();
    assert!(before < last);
    for _ in 0..3 {
        world.pass(11).await;
        let now = renewed(&world);
        assert!(now > last, "{now} after {last}");
        last = now;
    }
    assert!(last.starts_with("2031-02-03T04:05:06.0000"), "{last}");
    assert_eq!(world.count("NodeNameConflict"), 0);
}
