//! Objects: watched, recorded, had during outages, forgotten.

use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::fake::Mode;
use super::{World, change, pod, settle, stamp, volumes};
use crate::core::state::{ObjectRecord, Transaction};
use crate::objects::keyring::{Key, KeyFile, Keyring};
use crate::objects::vault::{Vault, key_of};
use crate::objects::{ObjectChange, ObjectError, Objects};
use crate::types::PodUid;

const CONFIG_MAPS: &str = "/api/v1/namespaces/ns/configmaps";
const SECRETS: &str = "/api/v1/namespaces/ns/secrets";
const CLASSES: &str = "/apis/node.k8s.io/v1/runtimeclasses";
const SERVICES: &str = "/api/v1/services";

fn config_map(name: &str, value: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": "ns", "annotations": {"a": "copy"},
           "managedFields": [{"manager": "kubectl"}]}, "data": {"k": value}})
}

fn secret(name: &str, value: &str) -> Value {
    use base64::Engine as _;
    let value = base64::engine::general_purpose::STANDARD.encode(value);
    json!({"metadata": {"name": name, "namespace": "ns"}, "data": {"k": value}, "type": "Opaque"})
}

fn service(namespace: &str, name: &str, ip: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": namespace, "labels": {"l": "v"}},
           "spec": {"clusterIP": ip, "selector": {"app": "x"}, "ports": [{"port": 80, "name": "http"}]},
           "status": {"loadBalancer": {}}})
}

fn data(object: &ConfigMap) -> &str {
    &object.data.as_ref().unwrap()["k"]
}

fn secret_data(object: &Secret) -> &[u8] {
    &object.data.as_ref().unwrap()["k"].0
}

async fn value_of(objects: &Objects, name: &str) -> String {
    let object = objects.config_map("ns", name).await.unwrap().unwrap();
    data(&object).to_owned()
}

#[tokio::test(start_paused = true)]
async fn pods_share_one_watch_and_the_last_one_ends_it() {
    let world = World::new();
    world.fake.put(CONFIG_MAPS, config_map("c", "1"));
    world.fake.put(SECRETS, secret("s", "1"));
    let life = world.start();
    let objects = &life.objects;
    for uid in ["a", "b"] {
        objects.register(&pod(uid, volumes("c", "s")));
    }
    assert_eq!(value_of(objects, "c").await, "1");
    settle().await;
    let mut requests = world.fake.requests();
    requests.sort();
    let both = |path: &str, name: &str| {
        [
            format!("LIST {path} {name}").trim().to_owned(),
            format!("WATCH {path} {name}").trim().to_owned(),
        ]
    };
    let mut wanted = [
        both(CONFIG_MAPS, "c"),
        both(SECRETS, "s"),
        both(SERVICES, ""),
    ]
    .concat();
    wanted.sort();
    assert_eq!(requests, wanted);
    assert!(world.record("configmaps/ns/c").is_some());

    objects.unregister(&PodUid::new("a"));
    world.fake.put(CONFIG_MAPS, config_map("c", "2"));
    settle().await;
    assert_eq!(value_of(objects, "c").await, "2", "still kept up to date");
    objects.unregister(&PodUid::new("b"));
    settle().await;
    assert_eq!(world.fake.watches(), [format!("{SERVICES} ")]);
    assert_eq!(world.keys(), Vec::<String>::new(), "and forgotten");
    life.end().await;
    assert_eq!(world.fake.watches(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_newer_pod_that_refers_to_less_lets_go() {
    let world = World::new();
    world.fake.put(CONFIG_MAPS, config_map("c", "1"));
    let life = world.start();
    life.objects.register(&pod("a", volumes("c", "s")));
    settle().await;
    life.objects.register(&pod("a", volumes("d", "s")));
    settle().await;
    let watches = world.fake.watches();
    assert_eq!(
        watches,
        [
            format!("{CONFIG_MAPS} d"),
            format!("{SECRETS} s"),
            format!("{SERVICES} ")
        ]
    );
    assert_eq!(world.record("configmaps/ns/c"), None);
}

#[tokio::test(start_paused = true)]
async fn everything_a_pod_refers_to_is_found() {
    let world = World::new();
    let life = world.start();
    let env = |what: &str| {
        json!([{"name": "A", "valueFrom": {"configMapKeyRef": {"name": format!("{what}-c"), "key": "k"}}},
               {"name": "B", "valueFrom": {"secretKeyRef": {"name": format!("{what}-s"), "key": "k"}}}])
    };
    life.objects.register(&pod("a", json!({
        "containers": [{"name": "m", "image": "x", "env": env("main"),
            "envFrom": [{"configMapRef": {"name": "from-c"}}, {"secretRef": {"name": "from-s"}}]}],
        "initContainers": [{"name": "i", "image": "x", "env": env("init")}],
        "ephemeralContainers": [{"name": "e", "image": "x", "env": env("debug")}],
        "imagePullSecrets": [{"name": "pull"}, {"name": ""}],
        "runtimeClassName": "kata",
        "volumes": [
            {"name": "c", "configMap": {"name": "vol-c"}}, {"name": "s", "secret": {"secretName": "vol-s"}},
            {"name": "p", "projected": {"sources": [{"configMap": {"name": "proj-c"}},
                {"secret": {"name": "proj-s"}}, {"serviceAccountToken": {"path": "t"}}]}},
        ],
    })));
    settle().await;
    let names = |collection: &str, names: &[&str]| -> Vec<String> {
        names
            .iter()
            .map(|name| format!("{collection} {name}"))
            .collect()
    };
    let wanted = [
        names(
            CONFIG_MAPS,
            &["debug-c", "from-c", "init-c", "main-c", "proj-c", "vol-c"],
        ),
        names(
            SECRETS,
            &[
                "debug-s", "from-s", "init-s", "main-s", "proj-s", "pull", "vol-s",
            ],
        ),
        names(SERVICES, &[""]),
        names(CLASSES, &["kata"]),
    ];
    assert_eq!(world.fake.watches(), wanted.concat());
}

#[tokio::test(start_paused = true)]
async fn what_does_not_exist_is_none_until_it_is_created() {
    let world = World::new();
    let life = world.start();
    let mut changes = life.objects.changes();
    life.objects.register(&pod("a", volumes("c", "s")));
    assert!(life.objects.config_map("ns", "c").await.unwrap().is_none());
    settle().await;
    assert!(changes.try_recv().is_err(), "nothing to tell yet");
    world.fake.put(CONFIG_MAPS, config_map("c", "1"));
    let told = changes.recv().await.unwrap();
    assert_eq!(told, change("ConfigMap", "c"));
    assert_eq!(life.objects.pods_referring(&told), [PodUid::new("a")]);
    assert_eq!(life.objects.pods_referring(&change("Secret", "c")), []);
    assert_eq!(value_of(&life.objects, "c").await, "1");
    world.fake.delete(CONFIG_MAPS, "c");
    assert_eq!(changes.recv().await.unwrap(), change("ConfigMap", "c"));
    assert!(life.objects.config_map("ns", "c").await.unwrap().is_none());
    settle().await;
    assert_eq!(world.record("configmaps/ns/c"), None);
}

#[tokio::test(start_paused = true)]
async fn only_what_a_pod_sees_is_a_change_and_only_that_is_kept() {
    let world = World::new();
    world.fake.put(CONFIG_MAPS, config_map("c", "1"));
    let life = world.start();
    let mut changes = life.objects.changes();
    life.objects.register(&pod("a", volumes("c", "s")));
    let object = life.objects.config_map("ns", "c").await.unwrap().unwrap();
    assert!(object.metadata.annotations.is_none() && object.metadata.managed_fields.is_none());
    let mut touched = config_map("c", "1");
    touched["metadata"]["labels"] = json!({"a": "b"});
    world.fake.put(CONFIG_MAPS, touched);
    settle().await;
    assert!(changes.try_recv().is_err());
    world.fake.put(CONFIG_MAPS, config_map("c", "2"));
    assert_eq!(changes.recv().await.unwrap(), change("ConfigMap", "c"));
}

#[tokio::test(start_paused = true)]
async fn an_immutable_object_is_read_once() {
    let world = World::new();
    let mut object = config_map("c", "1");
    object["immutable"] = json!(true);
    world.fake.put(CONFIG_MAPS, object);
    let life = world.start();
    life.objects.register(&pod(
        "a",
        json!({"volumes": [{"name": "c", "configMap": {"name": "c"}}]}),
    ));
    assert_eq!(value_of(&life.objects, "c").await, "1");
    tokio::time::sleep(Duration::from_secs(3600)).await;
    let requests = world.fake.requests();
    let of_it = requests.iter().filter(|line| line.contains("configmaps"));
    assert_eq!(
        of_it.collect::<Vec<_>>(),
        [&format!("LIST {CONFIG_MAPS} c")]
    );
    assert!(world.record("configmaps/ns/c").is_some());
}

#[tokio::test(start_paused = true)]
async fn an_immutable_object_is_read_again_for_a_new_pod() {
    let world = World::new();
    let object = |text: &str| {
        let mut object = config_map("c", text);
        object["immutable"] = json!(true);
        object
    };
    let volumes = json!({"volumes": [{"name": "c", "configMap": {"name": "c"}}]});
    world.fake.put(CONFIG_MAPS, object("1"));
    let life = world.start();
    life.objects.register(&pod("a", volumes.clone()));
    assert_eq!(value_of(&life.objects, "c").await, "1");
    world.fake.put(CONFIG_MAPS, object("2"));
    // A pod that is known needs no other look.
    life.objects.register(&pod("a", volumes.clone()));
    assert_eq!(value_of(&life.objects, "c").await, "1");
    life.objects.register(&pod("b", volumes.clone()));
    assert_eq!(value_of(&life.objects, "c").await, "2");
    tokio::time::sleep(Duration::from_secs(3600)).await;
    let requests = world.fake.requests();
    let of_it = requests.iter().filter(|line| line.contains("configmaps"));
    assert_eq!(of_it.count(), 2, "{requests:?}");
    // Without the API server it is as it was.
    world.fake.set(Mode::Down);
    life.objects.register(&pod("d", volumes));
    assert_eq!(value_of(&life.objects, "c").await, "2");
}

#[tokio::test(start_paused = true)]
async fn an_authoriser_that_does_not_know_the_pod_yet_is_asked_again() {
    let world = World::new();
    world.fake.put(SECRETS, secret("s", "1"));
    world.fake.set(Mode::Refusing(403));
    let life = world.start();
    let asked = Instant::now();
    life.objects.register(&pod("a", volumes("c", "s")));
    let reading = tokio::spawn({
        let objects = life.objects.clone();
        async move { objects.secret("ns", "s").await }
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    world.fake.set(Mode::Up);
    let found = reading.await.unwrap().unwrap().unwrap();
    assert_eq!(secret_data(&found), b"1");
    assert!(
        asked.elapsed() < Duration::from_secs(2),
        "{:?}",
        asked.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn a_refusal_is_told_and_then_asked_about_less_and_less() {
    let world = World::new();
    world.fake.set(Mode::Refusing(403));
    let life = world.start();
    life.objects
        .register(&pod("a", json!({"imagePullSecrets": [{"name": "s"}]})));
    let error = life.objects.secret("ns", "s").await.unwrap_err();
    assert!(matches!(error, ObjectError::Refused { .. }), "{error}");
    assert!(error.to_string().contains("Secret ns/s: 403"), "{error}");
    tokio::time::sleep(Duration::from_secs(600)).await;
    let _ = world.fake.requests();
    tokio::time::sleep(Duration::from_secs(600)).await;
    let count = world.fake.requests().len();
    // Secret and services, every 30 s.
    assert!((30..=60).contains(&count), "{count}");
}

#[tokio::test(start_paused = true)]
async fn what_could_not_be_had_is_told_when_it_can() {
    let world = World::new();
    world.fake.put(CONFIG_MAPS, config_map("c", "1"));
    world
        .fake
        .put(SERVICES, service("default", "kubernetes", "10.0.0.1"));
    world.fake.set(Mode::Down);
    let life = world.start();
    let mut changes = life.objects.changes();
    life.objects.register(&pod("a", volumes("c", "s")));
    settle().await;
    let error = life.objects.config_map("ns", "c").await.unwrap_err();
    assert!(matches!(error, ObjectError::Unreachable { .. }), "{error}");
    let error = life.objects.services().await.unwrap_err();
    assert!(matches!(error, ObjectError::Unreachable { .. }), "{error}");
    tokio::time::sleep(Duration::from_secs(3600)).await;
    world.fake.set(Mode::Up);
    let mut told = vec![
        changes.recv().await.unwrap().kind,
        changes.recv().await.unwrap().kind,
    ];
    told.sort();
    assert_eq!(told, ["ConfigMap", "Service"]);
    assert_eq!(value_of(&life.objects, "c").await, "1");
    assert_eq!(life.objects.services().await.unwrap().len(), 1);
    let services = ObjectChange {
        kind: "Service",
        namespace: String::new(),
        name: String::new(),
    };
    assert_eq!(life.objects.pods_referring(&services), [PodUid::new("a")]);
}

#[tokio::test(start_paused = true)]
async fn a_lost_connection_takes_nothing_away_and_catches_up_at_once_when_it_is_back() {
    let world = World::new();
    world.fake.put(CONFIG_MAPS, config_map("c", "1"));
    let life = world.start();
    life.objects.register(&pod("a", volumes("c", "s")));
    assert_eq!(value_of(&life.objects, "c").await, "1");
    settle().await;
    for mode in [
        Mode::Down,
        Mode::Refusing(500),
        Mode::Refusing(429),
        Mode::Refusing(410),
    ] {
        world.fake.set(mode);
        tokio::time::sleep(Duration::from_secs(1000)).await;
        assert_eq!(value_of(&life.objects, "c").await, "1", "{mode:?}");
        assert!(world.record("configmaps/ns/c").is_some(), "{mode:?}");
        world.fake.set(Mode::Up);
        tokio::time::sleep(Duration::from_secs(60)).await;
    }
    world.fake.set(Mode::Down);
    tokio::time::sleep(Duration::from_secs(1000)).await;
    world.fake.put(CONFIG_MAPS, config_map("c", "2"));
    world.fake.set(Mode::Up);
    // Whoever notices first that it answers.
    world.fake.connection().answered();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(value_of(&life.objects, "c").await, "2");
}

#[tokio::test(start_paused = true)]
async fn objects_of_a_server_that_was_set_back_are_read_anew() {
    let world = World::new();
    world.fake.put(CONFIG_MAPS, config_map("c", "1"));
    world.fake.put(CONFIG_MAPS, config_map("c", "2"));
    let life = world.start();
    life.objects.register(&pod("a", volumes("c", "s")));
    assert_eq!(value_of(&life.objects, "c").await, "2");
    settle().await;
    world.fake.set_back(CONFIG_MAPS, config_map("c", "1"), 50);
    settle().await;
    assert_eq!(
        value_of(&life.objects, "c").await,
        "2",
        "the watch is silent"
    );
    // The source of pods has found out.
    world.fake.connection().was_set_back();
    settle().await;
    assert_eq!(value_of(&life.objects, "c").await, "1");
    world.fake.put(CONFIG_MAPS, config_map("c", "3"));
    settle().await;
    assert_eq!(value_of(&life.objects, "c").await, "3");
}

/// A first life that records a configMap, a secret, a runtime class and the services.
async fn recorded_world() -> World {
    let world = World::new();
    world.fake.put(CONFIG_MAPS, config_map("c", "1"));
    world.fake.put(SECRETS, secret("s", "hunter2-hunter2"));
    world.fake.put(
        CLASSES,
        json!({"metadata": {"name": "kata"}, "handler": "kata-qemu"}),
    );
    world
        .fake
        .put(SERVICES, service("default", "kubernetes", "10.0.0.1"));
    world.fake.put(SERVICES, service("ns", "web", "10.0.0.2"));
    world.fake.put(SERVICES, service("ns", "headless", "None"));
    let life = world.start();
    life.objects.register(&needing_all());
    settle().await;
    life.end().await;
    world
}

fn needing_all() -> k8s_openapi::api::core::v1::Pod {
    let mut spec = volumes("c", "s");
    spec["runtimeClassName"] = json!("kata");
    pod("a", spec)
}

#[tokio::test(start_paused = true)]
async fn a_start_without_the_api_server_is_served_from_the_record() {
    for mode in [Mode::Down, Mode::Silent] {
        let mut world = recorded_world().await;
        world.fake.reconnect();
        world.fake.set(mode);
        let life = world.start();
        let begun = Instant::now();
        life.objects.register(&needing_all());
        assert_eq!(value_of(&life.objects, "c").await, "1");
        let found = life.objects.secret("ns", "s").await.unwrap().unwrap();
        assert_eq!(secret_data(&found), b"hunter2-hunter2");
        let class = life.objects.runtime_class("kata").await.unwrap().unwrap();
        assert_eq!(class.handler, "kata-qemu");
        let services = life.objects.services().await.unwrap();
        let names: Vec<_> = services
            .iter()
            .map(|s| s.metadata.name.clone().unwrap())
            .collect();
        assert_eq!(names, ["kubernetes", "web"]);
        assert!(
            begun.elapsed() <= Duration::from_secs(9),
            "{mode:?}: {:?}",
            begun.elapsed()
        );
        assert_eq!(world.keys().len(), 5, "nothing was forgotten");
    }
}

#[tokio::test(start_paused = true)]
async fn a_standalone_agent_has_the_record_only() {
    let world = recorded_world().await;
    let clock: std::sync::Arc<dyn crate::types::Clock> = std::sync::Arc::clone(&world.clock);
    let objects = Objects::new(world.store.clone(), clock, None);
    objects.register(&needing_all());
    assert_eq!(value_of(&objects, "c").await, "1");
    let error = objects.secret("ns", "s").await.unwrap_err();
    assert!(
        matches!(error, ObjectError::Standalone { .. }),
        "no keys: {error}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_start_with_the_api_server_sees_what_is_there_now() {
    let world = recorded_world().await;
    world.fake.put(CONFIG_MAPS, config_map("c", "2"));
    world.fake.delete(SECRETS, "s");
    world.fake.delete(SERVICES, "web");
    let life = world.start();
    let mut changes = life.objects.changes();
    life.objects.register(&needing_all());
    let begun = Instant::now();
    assert_eq!(value_of(&life.objects, "c").await, "2");
    assert!(life.objects.secret("ns", "s").await.unwrap().is_none());
    assert!(begun.elapsed() < Duration::from_secs(1));
    let mut told = vec![changes.recv().await.unwrap(), changes.recv().await.unwrap()];
    told.sort_by_key(|change| change.kind);
    assert_eq!(told, [change("ConfigMap", "c"), change("Secret", "s")]);
    settle().await;
    assert_eq!(
        world.keys(),
        [
            "configmaps/ns/c",
            "runtimeclasses//kata",
            "services/default/kubernetes"
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn an_unchanged_object_is_neither_told_nor_written_again() {
    let world = recorded_world().await;
    let versions = || -> Vec<u64> {
        world
            .state()
            .objects
            .values()
            .map(|record| record.version)
            .collect()
    };
    let before = versions();
    let life = world.start();
    let mut changes = life.objects.changes();
    life.objects.register(&needing_all());
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!(changes.try_recv().is_err());
    assert_eq!(versions(), before);
}

#[tokio::test(start_paused = true)]
async fn what_nobody_refers_to_after_a_restart_is_swept() {
    let world = recorded_world().await;
    let other = ObjectRecord {
        resource_version: "1".into(),
        encrypted: false,
        data: b"{}".to_vec(),
        at: stamp(),
    };
    world
        .store
        .commit(Transaction::new().put("nodestatus//me", other))
        .await
        .unwrap();
    let life = world.start();
    life.objects.register(&pod(
        "b",
        json!({"volumes": [{"name": "c", "configMap": {"name": "c"}}]}),
    ));
    settle().await;
    assert_eq!(world.keys().len(), 6);
    life.objects.sweep();
    settle().await;
    assert_eq!(
        world.keys(),
        [
            "configmaps/ns/c",
            "nodestatus//me",
            "services/default/kubernetes",
            "services/ns/web"
        ]
    );
}

// Invariant API-10.
#[tokio::test(start_paused = true)]
async fn a_secret_is_on_record_encrypted_or_not_at_all() {
    use base64::Engine as _;
    let world = recorded_world().await;
    let record = world.record("secrets/ns/s").unwrap();
    assert!(record.encrypted);
    let encoded = base64::engine::general_purpose::STANDARD.encode("hunter2-hunter2");
    for (key, versioned) in &world.state().objects {
        let text = String::from_utf8_lossy(&versioned.record.data).into_owned();
        assert!(
            !text.contains("hunter2") && !text.contains(&encoded),
            "{key}"
        );
    }
    let bare = World {
        vault: Vault::without_keys().into(),
        ..World::new()
    };
    bare.fake.put(SECRETS, secret("s", "1"));
    bare.fake.put(CONFIG_MAPS, config_map("c", "1"));
    let life = bare.start();
    life.objects.register(&pod("a", volumes("c", "s")));
    assert!(life.objects.secret("ns", "s").await.unwrap().is_some());
    settle().await;
    assert_eq!(bare.keys(), ["configmaps/ns/c"]);
}

#[tokio::test(start_paused = true)]
async fn a_secret_that_was_put_on_record_in_the_clear_is_not_believed() {
    let mut world = recorded_world().await;
    let planted = ObjectRecord {
        resource_version: "1".into(),
        encrypted: false,
        data: secret("s", "planted").to_string().into_bytes(),
        at: stamp(),
    };
    world
        .store
        .commit(Transaction::new().put("secrets/ns/s", planted))
        .await
        .unwrap();
    world.fake.reconnect();
    world.fake.set(Mode::Down);
    let life = world.start();
    life.objects.register(&needing_all());
    settle().await;
    assert!(life.objects.secret("ns", "s").await.is_err());
}

#[tokio::test(start_paused = true)]
async fn with_a_lost_key_only_the_secret_is_missing_and_it_is_fetched_again() {
    let mut world = recorded_world().await;
    world.vault = Vault::with_keys(Keyring::new(Key::generate(stamp()))).into();
    world.fake.reconnect();
    world.fake.set(Mode::Down);
    let life = world.start();
    life.objects.register(&needing_all());
    settle().await;
    assert_eq!(value_of(&life.objects, "c").await, "1");
    let error = life.objects.secret("ns", "s").await.unwrap_err();
    assert!(matches!(error, ObjectError::Unreachable { .. }), "{error}");
    assert_eq!(world.metrics.secrets_unreadable.get(), 1);
    let events = world.events.events();
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].reason, "SecretsKeyMissing");
    assert!(
        world.record("secrets/ns/s").is_some(),
        "the key may come back"
    );

    world.fake.set(Mode::Up);
    tokio::time::sleep(Duration::from_secs(60)).await;
    let found = life.objects.secret("ns", "s").await.unwrap().unwrap();
    assert_eq!(secret_data(&found), b"hunter2-hunter2");
    let record = world.record("secrets/ns/s").unwrap();
    assert_eq!(key_of(&record.data), world.vault.active());
    assert_eq!(world.metrics.secrets_unreadable.get(), 0);
    assert_eq!(world.events.events().len(), 1, "told once");
}

#[tokio::test(start_paused = true)]
async fn a_rotated_key_is_taken_up_and_everything_is_encrypted_again() {
    let dir = tempfile::tempdir().unwrap();
    let file = KeyFile::at(dir.path().join("k"));
    let world = World {
        vault: Vault::open(file.clone(), stamp()).into(),
        ..World::new()
    };
    world.fake.put(SECRETS, secret("s", "1"));
    world.fake.put(CONFIG_MAPS, config_map("c", "1"));
    let life = world.start();
    life.objects.register(&pod("a", volumes("c", "s")));
    settle().await;
    // A record of another module.
    let data = world.vault.seal("objects", "other//x", b"theirs").unwrap();
    let theirs = ObjectRecord {
        resource_version: String::new(),
        encrypted: true,
        data,
        at: stamp(),
    };
    world
        .store
        .commit(Transaction::new().put("other//x", theirs))
        .await
        .unwrap();
    let plain = world.record("configmaps/ns/c").unwrap();
    let active = file.rotate(stamp()).unwrap().active().id();
    tokio::time::sleep(Duration::from_secs(11)).await;
    for key in ["secrets/ns/s", "other//x"] {
        let record = world.record(key).unwrap();
        assert_eq!(key_of(&record.data), Some(active), "{key}");
        assert!(
            world.vault.unseal("objects", key, &record.data).is_ok(),
            "{key}"
        );
    }
    assert_eq!(world.record("configmaps/ns/c").unwrap(), plain);
}

#[tokio::test(start_paused = true)]
async fn services_change_with_the_cluster_and_headless_ones_do_not_count() {
    let world = recorded_world().await;
    let life = world.start();
    life.objects.register(&needing_all());
    assert_eq!(life.objects.services().await.unwrap().len(), 2);
    world.fake.put(SERVICES, service("ns", "web", "None"));
    world.fake.put(SERVICES, service("ns", "db", "10.0.0.3"));
    settle().await;
    let services = life.objects.services().await.unwrap();
    let names: Vec<_> = services
        .iter()
        .map(|s| s.metadata.name.clone().unwrap())
        .collect();
    assert_eq!(names, ["kubernetes", "db"]);
    assert!(services[1].spec.as_ref().unwrap().selector.is_none());
    assert_eq!(
        services[1].spec.as_ref().unwrap().ports.as_ref().unwrap()[0].port,
        80
    );
    assert!(world.record("services/ns/web").is_none() && world.record("services/ns/db").is_some());
}

#[tokio::test(start_paused = true)]
async fn an_object_that_nobody_registered_can_be_had_and_leaves_nothing() {
    let world = World::new();
    world.fake.put(SECRETS, secret("s", "1"));
    let life = world.start();
    assert!(life.objects.secret("ns", "s").await.unwrap().is_some());
    settle().await;
    assert_eq!(world.keys(), Vec::<String>::new());
    assert_eq!(world.fake.watches(), Vec::<String>::new());
}
