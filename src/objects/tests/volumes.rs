//! Claims and what they lead to: asked for one by one, recorded, had during outages, forgotten.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;

use super::fake::Mode;
use super::{World, change, pod, settle};
use crate::objects::volumes::attachment_name;
use crate::objects::{ObjectChange, ObjectError};
use crate::types::PodUid;

const CLAIMS: &str = "/api/v1/namespaces/ns/persistentvolumeclaims";
const VOLUMES: &str = "/api/v1/persistentvolumes";
const ATTACHMENTS: &str = "/apis/storage.k8s.io/v1/volumeattachments";
const DRIVERS: &str = "/apis/storage.k8s.io/v1/csidrivers";
const SECRETS: &str = "/api/v1/namespaces/vault/secrets";

fn claim(name: &str, volume: &str, phase: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": "ns", "uid": format!("uid-{name}"),
            "annotations": {"a": "b"}, "labels": {"l": "v"}},
        "spec": {"volumeName": volume, "accessModes": ["ReadWriteOnce"]},
        "status": {"phase": phase, "capacity": {"storage": "1Gi"},
            "conditions": [{"type": "FileSystemResizePending", "status": "True"},
                {"type": "ModifyingVolume", "status": "True"}],
            "allocatedResourceStatuses": {"storage": "NodeResizePending"}}})
}

fn volume(name: &str, claim: &str) -> Value {
    json!({"metadata": {"name": name, "uid": format!("uid-{name}")},
        "spec": {"claimRef": {"name": claim, "namespace": "ns", "uid": format!("uid-{claim}")},
            "csi": {"driver": "d", "volumeHandle": "h",
                "nodeStageSecretRef": {"name": "stage", "namespace": "vault"}}}})
}

fn attachment(attached: bool) -> Value {
    json!({"metadata": {"name": attachment_name("h", "d", "node")},
        "spec": {"attacher": "d", "nodeName": "node", "source": {"persistentVolumeName": "pv"}},
        "status": {"attached": attached, "attachmentMetadata": {"disk": "sdb"}}})
}

fn claiming(uid: &str) -> k8s_openapi::api::core::v1::Pod {
    pod(
        uid,
        json!({"nodeName": "node", "volumes": [
            {"name": "v", "persistentVolumeClaim": {"claimName": "data"}},
        ]}),
    )
}

fn world() -> World {
    let world = World::new();
    world.fake.put(CLAIMS, claim("data", "pv", "Bound"));
    world.fake.put(VOLUMES, volume("pv", "data"));
    world.fake.put(ATTACHMENTS, attachment(true));
    world
        .fake
        .put(DRIVERS, json!({"metadata": {"name": "d"}, "spec": {}}));
    world.fake.put(
        SECRETS,
        json!({"metadata": {"name": "stage", "namespace": "vault"}, "data": {"k": "dg=="}}),
    );
    world
}

/// Everything that mounting the pod's volume takes.
async fn follow_all(life: &super::Life, of: &PodUid) {
    let objects = &life.objects;
    assert!(objects.claim("ns", "data").await.unwrap().is_some());
    let volume = objects.persistent_volume(of, "pv").await.unwrap();
    assert!(volume.is_some());
    assert!(objects.csi_driver(of, "d").await.unwrap().is_some());
    let name = attachment_name("h", "d", "node");
    let attachment = objects.volume_attachment(of, &name).await.unwrap().unwrap();
    assert!(attachment.status.as_ref().unwrap().attached);
    let secret = objects.volume_secret(of, "vault", "stage").await.unwrap();
    assert!(secret.is_some());
}

fn recorded(world: &World) -> Vec<String> {
    let services = |key: &String| !key.starts_with("services/");
    world.keys().into_iter().filter(services).collect()
}

fn all_keys() -> Vec<String> {
    let mut keys = [
        "csidrivers//d".to_owned(),
        "persistentvolumeclaims/ns/data".to_owned(),
        "persistentvolumes//pv".to_owned(),
        "secrets/vault/stage".to_owned(),
        format!("volumeattachments//{}", attachment_name("h", "d", "node")),
    ];
    keys.sort();
    keys.to_vec()
}

#[test]
fn attachments_are_named_as_their_controller_does() {
    // printf 'hdnode' | sha256sum
    assert_eq!(
        attachment_name("h", "d", "node"),
        "csi-c42cf57099d6443b605c16f111056170d3d4e01cedcbcbac71a93245953703cf"
    );
}

#[tokio::test(start_paused = true)]
async fn volumes_are_had_after_a_reboot_without_api_server_and_forgotten_with_their_pod() {
    let mut world = world();
    let of = PodUid::new("a");
    let life = world.start();
    life.objects.register(&claiming("a"));
    follow_all(&life, &of).await;
    settle().await;
    assert_eq!(recorded(&world), all_keys());
    let secret = world.record("secrets/vault/stage").unwrap();
    assert!(secret.encrypted);
    life.end().await;

    world.fake.set(Mode::Down);
    world.fake.reconnect();
    let life = world.start_after_reboot(Duration::from_secs(60));
    life.objects.register(&claiming("a"));
    // Nobody has asked for the volume yet.
    life.objects.sweep();
    settle().await;
    assert_eq!(recorded(&world), all_keys(), "still known");
    follow_all(&life, &of).await;

    life.objects.unregister(&of);
    settle().await;
    assert_eq!(recorded(&world), Vec::<String>::new(), "and forgotten");
    life.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_shared_volume_stays_until_its_last_pod_goes() {
    let world = world();
    let life = world.start();
    for uid in ["a", "b"] {
        life.objects.register(&claiming(uid));
        follow_all(&life, &PodUid::new(uid)).await;
    }
    settle().await;
    life.objects.unregister(&PodUid::new("a"));
    settle().await;
    assert_eq!(recorded(&world), all_keys());
    life.objects.unregister(&PodUid::new("b"));
    settle().await;
    assert_eq!(recorded(&world), Vec::<String>::new());
    life.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_attachment_is_seen_soon_and_its_pod_is_told() {
    let world = world();
    world.fake.put(ATTACHMENTS, attachment(false));
    let life = world.start();
    let of = PodUid::new("a");
    life.objects.register(&claiming("a"));
    let name = attachment_name("h", "d", "node");
    let seen = life.objects.volume_attachment(&of, &name).await.unwrap();
    assert!(!seen.unwrap().status.as_ref().unwrap().attached);
    let mut changes = life.objects.changes();
    // Long after the pauses have become long.
    tokio::time::sleep(Duration::from_secs(120)).await;
    let asked = world.fake.requests();
    let asked = asked.iter().filter(|r| r.contains("volumeattachments"));
    let asked = asked.count();
    assert!((8..30).contains(&asked), "asked {asked} times in 120 s");

    let begun = Instant::now();
    world.fake.put(ATTACHMENTS, attachment(true));
    let told = loop {
        let told = changes.recv().await.unwrap();
        if told.kind == "VolumeAttachment" {
            break told;
        }
    };
    assert!(begun.elapsed() <= Duration::from_secs(13));
    let wanted = ObjectChange {
        kind: "VolumeAttachment",
        namespace: String::new(),
        name,
    };
    assert_eq!(told, wanted);
    assert_eq!(
        life.objects.pods_referring(&told),
        std::slice::from_ref(&of)
    );

    tokio::time::sleep(Duration::from_secs(3000)).await;
    let asked = world.fake.requests();
    let asked = asked.iter().filter(|r| r.contains("volumeattachments"));
    assert_eq!(asked.count(), 1, "that which showed it, and no more");
    life.end().await;
}

/// A claim of which nothing is expected.
fn at_rest(name: &str, volume: &str) -> Value {
    let mut claim = claim(name, volume, "Bound");
    claim["status"] = json!({"phase": "Bound", "capacity": {"storage": "1Gi"}});
    claim
}

fn asked(world: &World, what: &str) -> usize {
    let requests = world.fake.requests();
    requests.iter().filter(|r| r.contains(what)).count()
}

#[tokio::test(start_paused = true)]
async fn ten_claims_at_rest_cost_two_requests_a_minute() {
    let world = world();
    let life = world.start();
    let of = PodUid::new("a");
    let names: Vec<String> = (0..10).map(|n| format!("c{n}")).collect();
    let volumes = names
        .iter()
        .map(|name| json!({"name": name, "persistentVolumeClaim": {"claimName": name}}));
    let volumes: Vec<Value> = volumes.collect();
    life.objects
        .register(&pod("a", json!({"nodeName": "node", "volumes": volumes})));
    for name in &names {
        let (handle, on) = (format!("h-{name}"), format!("pv-{name}"));
        world.fake.put(CLAIMS, at_rest(name, &on));
        let mut persistent = volume(&on, name);
        persistent["spec"]["csi"]["volumeHandle"] = json!(handle);
        world.fake.put(VOLUMES, persistent);
        let mut attached = attachment(true);
        attached["metadata"]["name"] = json!(attachment_name(&handle, "d", "node"));
        world.fake.put(ATTACHMENTS, attached);
    }
    for name in &names {
        let objects = &life.objects;
        objects.claim("ns", name).await.unwrap();
        let volume = objects.persistent_volume(&of, &format!("pv-{name}")).await;
        assert!(volume.unwrap().is_some());
        let id = attachment_name(&format!("h-{name}"), "d", "node");
        assert!(objects.volume_attachment(&of, &id).await.unwrap().is_some());
    }
    tokio::time::sleep(Duration::from_secs(60)).await;
    world.fake.requests();
    tokio::time::sleep(Duration::from_secs(10 * 3600)).await;
    let requests = world.fake.requests();
    let counts = |what: &str| requests.iter().filter(|r| r.contains(what)).count();
    let all = counts("persistentvolume") + counts("volumeattachments");
    let claims = counts("persistentvolumeclaims");
    assert!(all <= 2 * 600, "{all} requests in 10 h");
    assert!(
        claims >= 10 * 10 * 4,
        "each at least every 15 min, and not {claims} times in 10 h"
    );
    life.end().await;
}

#[tokio::test(start_paused = true)]
async fn who_changes_a_pod_sees_its_claims_as_they_are_now() {
    let world = world();
    world.fake.put(CLAIMS, at_rest("data", "pv"));
    let life = world.start();
    let mut known = claiming("a");
    life.objects.register(&known);
    life.objects.claim("ns", "data").await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(asked(&world, "persistentvolumeclaims") >= 1);
    // The same pod again, with another status.
    known.status = Some(Default::default());
    life.objects.register(&known);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(asked(&world, "persistentvolumeclaims"), 0);
    for label in ["one", "two"] {
        known.metadata.labels = Some([("l".to_owned(), label.to_owned())].into());
        life.objects.register(&known);
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
    assert_eq!(
        asked(&world, "persistentvolumeclaims"),
        1,
        "not twice in a moment"
    );
    tokio::time::sleep(Duration::from_secs(10)).await;
    for _ in 0..5 {
        life.objects.refresh(&PodUid::new("a"));
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(asked(&world, "persistentvolumeclaims"), 1);
    life.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_is_to_grow_is_seen_in_minutes_and_then_followed() {
    let world = world();
    world.fake.put(CLAIMS, at_rest("data", "pv"));
    let life = world.start();
    let of = PodUid::new("a");
    life.objects.register(&claiming("a"));
    life.objects.claim("ns", "data").await.unwrap();
    life.objects.persistent_volume(&of, "pv").await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    let mut changes = life.objects.changes();
    let begun = Instant::now();
    world.fake.put(CLAIMS, claim("data", "pv", "Bound"));
    assert_eq!(
        changes.recv().await.unwrap(),
        change("PersistentVolumeClaim", "data")
    );
    assert!(begun.elapsed() <= Duration::from_secs(235));
    world.fake.requests();
    life.objects.doubt_volume("pv");
    tokio::time::sleep(Duration::from_secs(600)).await;
    let requests = world.fake.requests();
    let counts = |what: &str| requests.iter().filter(|r| r.contains(what)).count();
    assert_eq!(counts("/persistentvolumes/"), 1, "{requests:?}");
    let claims = counts("persistentvolumeclaims");
    assert!((8..25).contains(&claims), "asked {claims} times in 600 s");
    life.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_claim_says_that_its_volume_does_not_grow() {
    let world = world();
    let life = world.start();
    life.objects.register(&claiming("a"));
    let objects = &life.objects;
    let status = async || {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let claim = objects.claim("ns", "data").await.unwrap().unwrap();
        let status = claim.status.clone().unwrap();
        let turn = status.allocated_resource_statuses.unwrap()["storage"].clone();
        let error = status.conditions.unwrap().into_iter();
        let error = error.filter(|c| c.type_ == "NodeResizeError");
        (turn, error.map(|c| c.message.unwrap()).collect::<Vec<_>>())
    };
    let patches = || asked(&world, "PATCH");
    objects.claim_grows("ns", "data").await.unwrap();
    assert_eq!(status().await, ("NodeResizeInProgress".to_owned(), vec![]));
    assert_eq!(patches(), 1);
    objects.claim_grows("ns", "data").await.unwrap();
    assert_eq!(patches(), 0, "it says so already");

    let fails = async |never| {
        let told = objects
            .claim_does_not_grow("ns", "data", never, "busy")
            .await;
        told.unwrap();
        status().await
    };
    let busy = vec!["busy".to_owned()];
    let wanted = ("NodeResizeInProgress".to_owned(), busy.clone());
    assert_eq!(fails(false).await, wanted);
    assert_eq!(patches(), 1);
    assert_eq!(fails(false).await, wanted);
    assert_eq!(patches(), 0, "it says so already");
    let wanted = ("NodeResizeInfeasible".to_owned(), busy);
    assert_eq!(fails(true).await, wanted);

    // One whose controller keeps nothing there gets nothing there.
    let mut plain = at_rest("data", "pv");
    plain["status"]["conditions"] = json!([{"type": "ModifyingVolume", "status": "True"}]);
    world.fake.put(CLAIMS, plain);
    objects.claim_grows("ns", "data").await.unwrap();
    objects
        .claim_does_not_grow("ns", "data", true, "no")
        .await
        .unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let claim = objects.claim("ns", "data").await.unwrap().unwrap();
    let status = claim.status.clone().unwrap();
    assert_eq!(status.allocated_resource_statuses, None);
    assert_eq!(status.conditions.unwrap().len(), 2, "those of others stay");
    life.end().await;
}

#[tokio::test(start_paused = true)]
async fn doubt_asks_again_at_once() {
    let world = world();
    let life = world.start();
    life.objects.register(&claiming("a"));
    let known = life.objects.claim("ns", "data").await.unwrap().unwrap();
    assert_eq!(known.metadata.uid.as_deref(), Some("uid-data"));
    assert_eq!(
        known.metadata.labels, None,
        "what nobody looks at is dropped"
    );
    let mut changes = life.objects.changes();
    let mut other = claim("data", "pv", "Bound");
    other["metadata"]["uid"] = json!("another");
    other["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    other["metadata"]["ownerReferences"] =
        json!([{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "a", "controller": true}]);
    world.fake.put(CLAIMS, other);
    let begun = Instant::now();
    for _ in 0..100 {
        life.objects.doubt(&PodUid::new("a"));
    }
    assert_eq!(
        changes.recv().await.unwrap(),
        change("PersistentVolumeClaim", "data")
    );
    assert!(begun.elapsed() <= Duration::from_secs(1));
    let now = life.objects.claim("ns", "data").await.unwrap().unwrap();
    assert!(now.metadata.deletion_timestamp.is_some());
    assert!(now.metadata.owner_references.is_some());
    life.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_asked_is_not_absent() {
    let world = world();
    world.fake.set(Mode::Refusing(403));
    let life = world.start();
    let of = PodUid::new("a");
    life.objects.register(&claiming("a"));
    let refused = life.objects.claim("ns", "data").await;
    assert!(
        matches!(refused, Err(ObjectError::Refused { .. })),
        "{refused:?}"
    );
    // The authoriser has learnt of the pod.
    let mut changes = life.objects.changes();
    world.fake.set(Mode::Up);
    let told = changes.recv().await.unwrap();
    assert_eq!(told, change("PersistentVolumeClaim", "data"));
    world.fake.set(Mode::Refusing(500));
    let unknown = life.objects.persistent_volume(&of, "pv").await;
    assert!(
        matches!(unknown, Err(ObjectError::Unreachable { .. })),
        "{unknown:?}"
    );
    world.fake.set(Mode::Up);
    let none = life.objects.persistent_volume(&of, "other").await;
    assert!(none.unwrap().is_none());
    life.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_has_grown_says_so() {
    let world = world();
    let life = world.start();
    life.objects.register(&claiming("a"));
    let objects = &life.objects;
    assert!(objects.claim("ns", "data").await.unwrap().is_some());
    objects
        .claim_has_grown("ns", "data", 3 << 30)
        .await
        .unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let claim = objects.claim("ns", "data").await.unwrap().unwrap();
    let status = claim.status.as_ref().unwrap();
    assert_eq!(status.capacity.as_ref().unwrap()["storage"].0, "3Gi");
    let conditions = status.conditions.as_ref().unwrap();
    let left: Vec<_> = conditions.iter().map(|c| c.type_.as_str()).collect();
    assert_eq!(left, ["ModifyingVolume"], "only those of a resize end");
    // A claim that is gone needs no status.
    objects.claim_has_grown("ns", "none", 1).await.unwrap();
    world.fake.set(Mode::Refusing(403));
    let refused = objects.claim_has_grown("ns", "data", 1).await;
    assert!(
        matches!(refused, Err(ObjectError::Refused { .. })),
        "{refused:?}"
    );
    life.end().await;
}
