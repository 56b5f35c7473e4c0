//! What the API server is told.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use holdfast::apiserver::ApiClient;
use holdfast::kuberuntime::sources::Resolved;
use holdfast::volumemanager::csi::CsiPlugin;
use holdfast::volumemanager::remote::RemotePlugin as _;
use holdfast_testkit::csi::{CsiDriver, Fault as CsiFault};
use holdfast_testkit::fake_api::{FakeApi, Fault, Identity, Request};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::CSINode;
use serde_json::{Value, json};

use crate::world::{Agent, Dirs, NODE, clock, eventually, map};

const ANNOTATION: &str = "csi.volume.kubernetes.io/nodeid";

fn client(api: &FakeApi) -> ApiClient {
    let service = api.service_as(Identity::Node(NODE.to_owned()));
    ApiClient::over(service, (1000, 1000), clock())
}

fn make_node(api: &FakeApi) -> Arc<Node> {
    api.create_json(json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": { "name": NODE, "labels": { "a": "b" }, "annotations": { "c": "d" } },
    }));
    node(api)
}

fn node(api: &FakeApi) -> Arc<Node> {
    Arc::new(api.get::<Node>("", NODE).unwrap())
}

fn ids(api: &FakeApi) -> Option<Value> {
    let annotations = node(api).metadata.annotations.clone()?;
    annotations
        .get(ANNOTATION)
        .map(|text| serde_json::from_str(text).unwrap())
}

fn drivers(api: &FakeApi) -> Option<Value> {
    let found = api.get::<CSINode>("", NODE)?;
    Some(serde_json::to_value(found.spec.drivers).unwrap())
}

/// In whichever order: drivers that come at once are told in the one in which they were heard.
async fn until_drivers(api: &FakeApi, wanted: Value) {
    let by_name = |value: Value| -> BTreeMap<String, Value> {
        let entries = value.as_array().cloned().unwrap_or_default();
        let named = |entry: Value| (entry["name"].as_str().unwrap_or_default().to_owned(), entry);
        entries.into_iter().map(named).collect()
    };
    let what = format!("CSINode has {wanted}");
    let wanted = by_name(wanted);
    let count = wanted.len();
    eventually(&what, || {
        let found = drivers(api)?;
        let whole = found.as_array().is_some_and(|all| all.len() == count);
        (whole && by_name(found) == wanted).then_some(())
    })
    .await;
}

fn writes(api: &FakeApi) -> usize {
    let read = ["get", "list", "watch"];
    api.count(|r| ["csinodes", "nodes"].contains(&&*r.kind) && !read.contains(&&*r.verb))
}

fn of_drivers(api: &FakeApi) -> usize {
    api.count(|r| r.kind == "csinodes" || (r.kind == "nodes" && r.verb != "watch"))
}

#[tokio::test]
async fn csi_node_annotation_and_labels_follow_the_drivers() {
    let dirs = Dirs::new();
    let mut options = dirs.options("d");
    options.max_volumes = 7;
    options.topology = map(&[("topology.d/zone", "z1"), ("topology.d/rack", "r1")]);
    let mut driver = CsiDriver::start(options).unwrap();
    let api = FakeApi::new();
    let made = make_node(&api);
    let mut agent = Agent::start(&dirs, Some(client(&api)));
    agent.has("d").await;
    // The node is not known yet.
    assert_eq!(of_drivers(&api), 0);
    agent.node.set(Arc::clone(&made));
    let entry = json!({
        "name": "d", "nodeID": "csi-node", "topologyKeys": ["topology.d/rack", "topology.d/zone"],
        "allocatable": { "count": 7 },
    });
    until_drivers(&api, json!([entry])).await;
    let csi_node = api.get::<CSINode>("", NODE).unwrap();
    let owner = &csi_node.metadata.owner_references.unwrap()[0];
    assert_eq!(
        (owner.kind.as_str(), owner.api_version.as_str(), &owner.uid),
        ("Node", "v1", made.metadata.uid.as_ref().unwrap())
    );
    let now = node(&api);
    let labels = now.metadata.labels.clone().unwrap();
    assert_eq!(labels["topology.d/zone"], "z1");
    assert_eq!(labels["topology.d/rack"], "r1");
    assert_eq!(labels["a"], "b");
    assert_eq!(now.metadata.annotations.clone().unwrap()["c"], "d");
    assert_eq!(ids(&api).unwrap(), json!({ "d": "csi-node" }));

    let other = dirs.driver("e");
    let plain = json!({ "name": "e", "nodeID": "csi-node" });
    until_drivers(&api, json!([entry, plain])).await;
    driver.stop();
    until_drivers(&api, json!([plain])).await;
    eventually("the annotation follows", || {
        (ids(&api)? == json!({ "e": "csi-node" })).then_some(())
    })
    .await;
    drop(other);
    agent.end().await;
}

#[tokio::test]
async fn nothing_is_written_again_by_a_driver_or_an_agent_that_restarts() {
    let dirs = Dirs::new();
    let mut driver = dirs.driver("d");
    let api = FakeApi::new();
    let made = make_node(&api);
    let agent = Agent::start(&dirs, Some(client(&api)));
    agent.node.set(Arc::clone(&made));
    until_drivers(&api, json!([{ "name": "d", "nodeID": "csi-node" }])).await;
    eventually("that is on record", || {
        let record = agent.store.snapshot();
        let record = record.record::<holdfast::core::state::FactRecord>("csiplugins//d")?;
        let record: Value = serde_json::from_slice(&record.data).unwrap();
        record["told"].is_string().then_some(())
    })
    .await;
    eventually("the driver is told", || {
        (crate::world::told(&driver).len() == 1).then_some(())
    })
    .await;
    let before = writes(&api);
    driver.restart().unwrap();
    eventually("it registers again", || {
        (crate::world::told(&driver).len() == 2).then_some(())
    })
    .await;
    let mut agent = agent.restarted(&dirs).await;
    agent.node.set(made);
    agent.run();
    eventually("and again", || {
        (crate::world::told(&driver).len() == 3).then_some(())
    })
    .await;
    agent.end().await;
    assert_eq!(writes(&api), before, "{:?}", api.requests());
}

#[tokio::test]
async fn what_somebody_deleted_is_there_again_after_the_next_start() {
    let dirs = Dirs::new();
    let _driver = dirs.driver("d");
    let api = FakeApi::new();
    let made = make_node(&api);
    let agent = Agent::start(&dirs, Some(client(&api)));
    agent.node.set(Arc::clone(&made));
    let entry = json!([{ "name": "d", "nodeID": "csi-node" }]);
    until_drivers(&api, entry.clone()).await;
    eventually("the annotation is there", || ids(&api)).await;
    assert!(api.remove::<CSINode>("", NODE));
    let mut agent = agent.restarted(&dirs).await;
    agent.node.set(made);
    agent.run();
    until_drivers(&api, entry).await;
    agent.end().await;
}

#[tokio::test]
async fn what_a_driver_says_anew_replaces_its_entry() {
    let dirs = Dirs::new();
    let mut driver = dirs.driver("d");
    let api = FakeApi::new();
    let made = make_node(&api);
    let mut agent = Agent::start(&dirs, Some(client(&api)));
    agent.node.set(made);
    until_drivers(&api, json!([{ "name": "d", "nodeID": "csi-node" }])).await;
    driver.options_mut().node_id = "other".to_owned();
    driver.options_mut().max_volumes = 3;
    driver.restart().unwrap();
    let entry = json!({ "name": "d", "nodeID": "other", "allocatable": { "count": 3 } });
    until_drivers(&api, json!([entry])).await;
    // An entry cannot be changed, only removed and made.
    let updates = api.count(|r| r.kind == "csinodes" && r.verb == "update");
    assert_eq!(updates, 2);
    assert_eq!(ids(&api).unwrap(), json!({ "d": "other" }));
    agent.end().await;
}

#[tokio::test]
async fn an_outage_delays_it_and_a_crash_loses_nothing() {
    let dirs = Dirs::new();
    let mut driver = dirs.driver("d");
    let api = FakeApi::new();
    let made = make_node(&api);
    api.set_down(Some("connection refused"));
    let agent = Agent::start(&dirs, Some(client(&api)));
    agent.node.set(Arc::clone(&made));
    // It can be used all the same.
    agent.has("d").await;
    let mut agent = agent.restarted(&dirs).await;
    agent.node.set(Arc::clone(&made));
    api.set_down(None);
    agent.run();
    until_drivers(&api, json!([{ "name": "d", "nodeID": "csi-node" }])).await;
    // The same for its end: the agent is restarted before the API server hears of it.
    api.set_down(Some("connection refused"));
    driver.stop();
    agent.lost("d").await;
    let mut agent = agent.restarted(&dirs).await;
    assert!(agent.drivers.client("d").is_none());
    agent.node.set(made);
    api.set_down(None);
    agent.run();
    until_drivers(&api, json!([])).await;
    eventually("the annotation goes", || ids(&api).is_none().then_some(())).await;
    eventually("the record goes", || {
        let state = agent.store.snapshot();
        let record = state.record::<holdfast::core::state::FactRecord>("csiplugins//d");
        record.is_none().then_some(())
    })
    .await;
    agent.end().await;
}

#[tokio::test]
async fn conflicts_and_lost_answers_are_tried_again() {
    let dirs = Dirs::new();
    let driver = dirs.driver("d");
    let api = FakeApi::new();
    let made = make_node(&api);
    api.fail_next(|r| r.kind == "nodes" && r.verb == "patch", 409, 1);
    api.fail_next(
        |r| r.kind == "csinodes" && r.verb == "create",
        Fault::LoseReply,
        1,
    );
    let mut agent = Agent::start(&dirs, Some(client(&api)));
    agent.node.set(made);
    until_drivers(&api, json!([{ "name": "d", "nodeID": "csi-node" }])).await;
    let other = dirs.driver("e");
    api.fail_next(|r| r.kind == "csinodes" && r.verb == "update", 409, 2);
    let both =
        json!([{ "name": "d", "nodeID": "csi-node" }, { "name": "e", "nodeID": "csi-node" }]);
    until_drivers(&api, both).await;
    drop((driver, other));
    agent.end().await;
}

#[tokio::test]
async fn a_node_that_is_made_anew_is_told_everything_again() {
    let dirs = Dirs::new();
    let driver = dirs.driver("d");
    let api = FakeApi::new();
    let made = make_node(&api);
    let mut agent = Agent::start(&dirs, Some(client(&api)));
    agent.node.set(made);
    let entries = json!([{ "name": "d", "nodeID": "csi-node" }]);
    until_drivers(&api, entries.clone()).await;
    api.remove::<Node>("", NODE);
    // The garbage collector has not been there yet: the old CSINode is.
    let made = make_node(&api);
    let uid = made.metadata.uid.clone().unwrap();
    agent.node.set(made);
    eventually("the new node has it", || {
        let owned = api.get::<CSINode>("", NODE)?;
        let owner = owned.metadata.owner_references?.remove(0).uid;
        (owner == uid && ids(&api).is_some()).then_some(())
    })
    .await;
    assert_eq!(drivers(&api).unwrap(), entries);
    drop(driver);
    agent.end().await;
}

#[tokio::test]
async fn a_topology_that_contradicts_the_node_is_not_written() {
    let dirs = Dirs::new();
    let mut options = dirs.options("d");
    options.topology = map(&[("a", "not b")]);
    let mut driver = CsiDriver::start(options).unwrap();
    let good = dirs.driver("e");
    let api = FakeApi::new();
    let made = make_node(&api);
    let mut agent = Agent::start(&dirs, Some(client(&api)));
    agent.node.set(made);
    agent.has("d").await;
    until_drivers(&api, json!([{ "name": "e", "nodeID": "csi-node" }])).await;
    assert_eq!(node(&api).metadata.labels.clone().unwrap()["a"], "b");
    assert_eq!(ids(&api).unwrap(), json!({ "e": "csi-node" }));
    driver.options_mut().topology = map(&[("a", "b")]);
    driver.restart().unwrap();
    let d = json!({ "name": "d", "nodeID": "csi-node", "topologyKeys": ["a"] });
    until_drivers(&api, json!([{ "name": "e", "nodeID": "csi-node" }, d])).await;
    drop(good);
    agent.end().await;
}

#[tokio::test]
async fn a_driver_that_is_refused_keeps_no_other_one_out() {
    for kind in ["nodes", "csinodes"] {
        let dirs = Dirs::new();
        let mut options = dirs.options("bad");
        options.node_id = "too long".to_owned();
        let mut bad = CsiDriver::start(options).unwrap();
        let drivers_of = [dirs.driver("a"), dirs.driver("z")];
        let api = FakeApi::new();
        let made = make_node(&api);
        let names_it = move |r: &Request| r.writes() && r.body.to_string().contains("too long");
        api.fail_always(move |r| r.kind == kind && names_it(r), 422);
        let mut agent = Agent::start(&dirs, Some(client(&api)));
        for name in ["a", "bad", "z"] {
            agent.has(name).await;
        }
        agent.node.set(made);
        let entry = |name: &str| json!({ "name": name, "nodeID": "csi-node" });
        until_drivers(&api, json!([entry("a"), entry("z")])).await;
        let ids = ids(&api).unwrap();
        assert_eq!(
            (&ids["a"], &ids["z"]),
            (&json!("csi-node"), &json!("csi-node"))
        );
        bad.options_mut().node_id = "csi-node".to_owned();
        bad.restart().unwrap();
        until_drivers(&api, json!([entry("a"), entry("z"), entry("bad")])).await;
        drop(drivers_of);
        agent.end().await;
    }
}

fn counting(name: &str, count: i64) -> Value {
    json!({ "name": name, "nodeID": "csi-node", "allocatable": { "count": count } })
}

#[tokio::test]
async fn a_driver_is_asked_again_how_many_volumes_the_node_takes() {
    let dirs = Dirs::new();
    let drivers_of: Vec<CsiDriver> = (["d", "e"].into_iter())
        .map(|name| {
            let mut options = dirs.options(name);
            options.max_volumes = 7;
            CsiDriver::start(options).unwrap()
        })
        .collect();
    let api = FakeApi::new();
    let made = make_node(&api);
    api.create_json(json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": { "name": "d" },
        "spec": { "nodeAllocatableUpdatePeriodSeconds": 1 },
    }));
    let mut agent = Agent::start(&dirs, Some(client(&api)));
    agent.node.set(made);
    let has = |count| counting("d", count);
    until_drivers(&api, json!([has(7), counting("e", 7)])).await;
    for driver in &drivers_of {
        driver.set_max_volumes(9).unwrap();
    }
    api.take_requests();
    until_drivers(&api, json!([has(9), counting("e", 7)])).await;
    let updates = api.count(|r| r.kind == "csinodes" && r.writes());
    assert_eq!(updates, 1, "the entry stays while it changes");

    // A server that does not let entries change.
    let old = |r: &Request| {
        let text = r.body["spec"]["drivers"].to_string();
        r.kind == "csinodes" && r.verb == "update" && text.contains("11") && text.contains("\"d\"")
    };
    api.fail_next(old, 422, 1);
    drivers_of[0].set_max_volumes(11).unwrap();
    until_drivers(&api, json!([has(11), counting("e", 7)])).await;
    drop(drivers_of);
    agent.end().await;
}

#[tokio::test]
async fn a_driver_without_slots_is_asked_before_its_period_is_over() {
    let dirs = Dirs::new();
    let mut options = dirs.options("d");
    options.max_volumes = 7;
    let driver = CsiDriver::start(options).unwrap();
    let api = FakeApi::new();
    let made = make_node(&api);
    api.create_json(json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": { "name": "d" },
        "spec": { "nodeAllocatableUpdatePeriodSeconds": 3600 },
    }));
    let mut agent = Agent::start(&dirs, Some(client(&api)));
    agent.node.set(made);
    until_drivers(&api, json!([counting("d", 7)])).await;
    driver.set_max_volumes(2).unwrap();
    let full = CsiFault::Fail(8, "no slot".to_owned());
    driver.inject("NodeStageVolume", 1, &full).unwrap();
    let plugin = CsiPlugin::new(agent.drivers.clone(), dirs.root(), NODE);
    let at = CsiPlugin::staging_path(&dirs.root(), "d", "v");
    std::fs::create_dir_all(at.parent().unwrap()).unwrap();
    let staged = plugin.stage(persistent("d", "v"), at).await;
    assert!(staged.unwrap_err().to_string().contains("no slot"));
    until_drivers(&api, json!([counting("d", 2)])).await;
    drop(driver);
    agent.end().await;
}

fn persistent(driver: &str, handle: &str) -> Arc<Resolved> {
    let remote = json!({
        "name": "pv", "claim": "ns/c", "mode": "Filesystem", "read_only": false, "mount_options": [],
        "unique_name": null,
        "source": { "Csi": {
            "source": { "driver": driver, "volumeHandle": handle }, "ephemeral": false, "publish_context": {},
            "access_modes": ["ReadWriteOnce"], "fs_group_policy": "None", "pod_info": false,
            "requires_republish": false, "selinux_mount": false,
        } },
    });
    Arc::new(Resolved {
        remote: serde_json::from_value(remote).unwrap(),
        secrets: BTreeMap::new(),
        tokens: BTreeMap::new(),
        capacity: None,
        missing: None,
    })
}

#[tokio::test]
async fn without_drivers_nobody_is_asked() {
    let dirs = Dirs::new();
    let api = FakeApi::new();
    let made = make_node(&api);
    let mut agent = Agent::start(&dirs, Some(client(&api)));
    agent.node.set(made);
    tokio::time::sleep(Duration::from_millis(300)).await;
    agent.end().await;
    assert_eq!(of_drivers(&api), 0);
}
