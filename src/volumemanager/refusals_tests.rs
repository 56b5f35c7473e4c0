//! Bad input: each is refused with an event that names pod, volume and reason.

use super::content_tests::{Cleanup, config_map, is_root, sources};
use super::*;
use crate::core::trust::TrustBundles;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};

fn big_map(bytes: usize) -> Arc<ConfigMap> {
    config_map(&[("big", &"x".repeat(bytes))])
}

fn secret_of(bytes: usize) -> Arc<Secret> {
    Arc::new(Secret {
        metadata: serde_json::from_value(json!({"namespace": "ns", "name": "s"})).unwrap(),
        data: Some(BTreeMap::from([(
            "key".to_owned(),
            ByteString(vec![7; bytes]),
        )])),
        ..Default::default()
    })
}

/// The one event there is, after a look at whom it is about.
fn told(world: &World, volume: &str) -> String {
    let event = world.recorder.events().pop().unwrap();
    assert_eq!(event.reason, "FailedMount");
    let about = format!("{event:?}");
    assert!(
        about.contains("\"p\"") && about.contains("\"ns\""),
        "{about}"
    );
    let prefix = format!("MountVolume.SetUp failed for volume \"{volume}\" : ");
    let rest = event.message.strip_prefix(&prefix);
    rest.unwrap_or_else(|| panic!("{}", event.message))
        .to_owned()
}

#[tokio::test]
async fn what_no_file_can_be_is_refused_by_name() {
    let map = |more: serde_json::Value| {
        let mut source = json!({"name": "m"});
        for (key, value) in more.as_object().unwrap() {
            source[key] = value.clone();
        }
        json!({"name": "v", "configMap": source})
    };
    let items = |items: serde_json::Value| map(json!({"items": items}));
    let file = |path: &str| json!({"key": "other", "path": path});
    for (volume, word) in [
        (
            map(json!({"defaultMode": 0o1000})),
            "invalid mode 512 (0o1000) of defaultMode: must be between 0 and 0777",
        ),
        (map(json!({"defaultMode": -1})), "invalid mode -1"),
        (
            items(json!([{"key": "other", "path": "a/b", "mode": 0o4755}])),
            "(0o4755) of a/b",
        ),
        (
            json!({"name": "v", "downwardAPI": {"items": [
                {"path": "f", "mode": 4095, "fieldRef": {"fieldPath": "metadata.name"}}]}}),
            "(0o7777) of f",
        ),
        (
            json!({"name": "v", "projected": {"defaultMode": 99999, "sources": []}}),
            "of defaultMode",
        ),
        (
            items(json!([file("a/b"), file("a")])),
            "invalid path \"a/b\": \"a\" is a file as well",
        ),
        (
            items(json!([file("x/../../etc/passwd")])),
            "must not contain \"..\"",
        ),
        (
            items(json!([file("..data/x")])),
            "must not start with \"..\"",
        ),
        (items(json!([file("/abs")])), "must be a relative path"),
        (
            items(json!([{"key": "absent", "path": "f"}])),
            "configmap ns/m references non-existent config key: absent",
        ),
        (
            map(json!({"name": "none"})),
            "configmap \"none\" not found (namespace ns)",
        ),
        (
            json!({"name": "v", "projected": {"sources": [{"podCertificate": {"signerName": "s", "keyType": "ED25519"}}]}}),
            "failed to get the pod certificate: it was not asked for",
        ),
        (
            json!({"name": "v", "projected": {"sources": [{"clusterTrustBundle": {"name": "x", "path": "t"}}]}}),
            "ClusterTrustBundle \"x\" not found",
        ),
    ] {
        let world = world();
        let pod = pod("u1", json!([volume]));
        let mut sources = sources();
        sources.trust_bundles = Some(Ok(Arc::new(TrustBundles::new())));
        world.mount_with(&pod, &sources).await.unwrap_err();
        let told = told(&world, "v");
        assert!(told.contains(word), "{volume}: {told}");
        assert_eq!(world.phase("u1/v"), None, "nothing was begun");
    }
}

#[tokio::test]
async fn a_key_that_is_named_as_the_writers_own_is_refused() {
    let world = world();
    let mut sources = sources();
    let map = config_map(&[("..data", "x")]);
    sources.config_maps.insert("m".to_owned(), Ok(Some(map)));
    let pod = pod("u1", json!([{"name": "v", "configMap": {"name": "m"}}]));
    world.mount_with(&pod, &sources).await.unwrap_err();
    assert!(told(&world, "v").contains("invalid path \"..data\": must not start with"));
}

#[tokio::test]
async fn an_object_over_the_limit_of_the_api_is_refused_and_the_former_content_stays() {
    let world = world();
    let mut sources = sources();
    let pod = pod(
        "u1",
        json!([{"name": "v", "configMap": {"name": "m"}}, {"name": "unused", "secret": {"secretName": "s"}}]),
    );
    // The one binary key takes a byte.
    let limit = (1 << 20) - 1;
    sources
        .config_maps
        .insert("m".to_owned(), Ok(Some(big_map(limit))));
    let path = world.mount_with(&pod, &sources).await.unwrap()["v"].clone();
    sources
        .config_maps
        .insert("m".to_owned(), Ok(Some(big_map(limit + 1))));
    let refreshed = world.manager.refresh(&pod, &sources, &world.recorder);
    refreshed.await.unwrap_err();
    let told = told(&world, "v");
    assert!(
        told.contains("configmap ns/m holds 1048577 bytes, and at most 1048576"),
        "{told}"
    );
    assert_eq!(fs::metadata(path.join("big")).unwrap().len(), limit as u64);
}

#[tokio::test]
async fn a_secret_that_its_tmpfs_has_no_room_for_leaves_the_former_one_whole() {
    if !is_root() {
        return;
    }
    let base = world();
    let small = VolumeManager::new(
        base.dir.path().join("root"),
        Some(256 << 10),
        base.store.clone(),
        Arc::new(TestClock),
    );
    let world = World {
        manager: small,
        ..base
    };
    let _cleanup = Cleanup(&world);
    let pod = pod("u1", json!([{"name": "v", "secret": {"secretName": "s"}}]));
    let mut sources = sources();
    let mut set = |bytes| {
        sources
            .secrets
            .insert("s".to_owned(), Ok(Some(secret_of(bytes))));
        sources.clone()
    };
    let path = world.mount_with(&pod, &set(100 << 10)).await.unwrap()["v"].clone();
    for bytes in [200 << 10, 500 << 10] {
        let sources = set(bytes);
        let refreshed = world.manager.refresh(&pod, &sources, &world.recorder);
        refreshed.await.unwrap_err();
        let told = told(&world, "v");
        for word in [
            "No space left on device",
            &format!("the content takes {bytes} bytes"),
            "has 262144 bytes in all",
        ] {
            assert!(told.contains(word), "{word}: {told}");
        }
        assert_eq!(fs::read(path.join("key")).unwrap(), vec![7; 100 << 10]);
        // Nothing half-written takes the space that is left.
        let names: Vec<_> = fs::read_dir(&path)
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        assert_eq!(names.len(), 3, "{names:?}");
    }
    let sources = set(120 << 10);
    let refreshed = world.manager.refresh(&pod, &sources, &world.recorder);
    refreshed.await.unwrap();
    assert_eq!(fs::read(path.join("key")).unwrap().len(), 120 << 10);
}

#[tokio::test]
async fn something_else_at_the_place_of_a_file_is_named() {
    let world = world();
    let pod = pod("u1", json!([{"name": "v", "configMap": {"name": "m"}}]));
    let path = world.mount_with(&pod, &sources()).await.unwrap()["v"].clone();
    fs::create_dir_all(path.join("added/by/somebody")).unwrap();
    let mut sources = sources();
    let map = config_map(&[("added", "x")]);
    sources.config_maps.insert("m".to_owned(), Ok(Some(map)));
    let refreshed = world.manager.refresh(&pod, &sources, &world.recorder);
    refreshed.await.unwrap_err();
    let told = told(&world, "v");
    assert!(
        told.contains("\"added\" is there, and is not a link of ours"),
        "{told}"
    );
}
