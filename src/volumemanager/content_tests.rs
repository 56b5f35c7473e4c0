use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};

use super::*;
use crate::kuberuntime::sources::{PodToken, TokenRef};
use crate::volumemanager::TOKEN_EXPIRED;

pub(super) fn config_map(data: &[(&str, &str)]) -> Arc<ConfigMap> {
    Arc::new(ConfigMap {
        metadata: serde_json::from_value(json!({"namespace": "ns", "name": "m"})).unwrap(),
        data: Some(
            data.iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                .collect(),
        ),
        binary_data: Some(BTreeMap::from([("bin".to_owned(), ByteString(vec![0xff]))])),
        ..Default::default()
    })
}

pub(super) fn token(text: &str, stale: bool) -> Result<PodToken, String> {
    Ok(PodToken {
        token: text.to_owned(),
        stale,
        expires_ms: 0,
    })
}

pub(super) const TOKEN: fn() -> TokenRef = || TokenRef {
    audience: String::new(),
    expiration_seconds: 3607,
};

pub(super) fn sources() -> Sources {
    let mut sources = Sources::default();
    let map = config_map(&[("ca.crt", "CA"), ("other", "x")]);
    sources.config_maps.insert("m".to_owned(), Ok(Some(map)));
    sources.config_maps.insert("none".to_owned(), Ok(None));
    let secret = Secret {
        metadata: serde_json::from_value(json!({"namespace": "ns", "name": "s"})).unwrap(),
        data: Some(BTreeMap::from([(
            "key".to_owned(),
            ByteString(b"hunter2".to_vec()),
        )])),
        ..Default::default()
    };
    sources
        .secrets
        .insert("s".to_owned(), Ok(Some(Arc::new(secret))));
    sources.secrets.insert("none".to_owned(), Ok(None));
    sources.tokens.insert(TOKEN(), token("t1", false));
    sources
}

pub(super) fn api_access() -> serde_json::Value {
    json!({"name": "access", "projected": {"defaultMode": 420, "sources": [
        {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
        {"configMap": {"name": "m", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
    ]}})
}

/// Files of a volume with their content, as a container reads them.
pub(super) fn read(path: &Path) -> Vec<(String, String)> {
    let mut files: Vec<_> = fs::read_dir(path)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.is_file())
        .map(|p| {
            let name = p.file_name().unwrap().to_string_lossy().into_owned();
            (
                name,
                String::from_utf8_lossy(&fs::read(&p).unwrap()).into_owned(),
            )
        })
        .collect();
    files.sort();
    files
}

fn pairs(of: &[(&str, &str)]) -> Vec<(String, String)> {
    of.iter()
        .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
        .collect()
}

/// Unmounts what a test leaves.
pub(super) struct Cleanup<'a>(pub(super) &'a World);

impl Drop for Cleanup<'_> {
    fn drop(&mut self) {
        for mount in mounts::below(self.0.dir.path()).unwrap_or_default() {
            nix::mount::umount2(&mount.point, MntFlags::MNT_DETACH).ok();
        }
    }
}

pub(super) fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

#[tokio::test]
async fn the_default_access_volume_is_on_a_tmpfs_and_goes_with_its_pod() {
    if !is_root() {
        return;
    }
    let world = world();
    let _cleanup = Cleanup(&world);
    let pod = pod("u1", json!([api_access()]));
    let path = world.mount_with(&pod, &sources()).await.unwrap()["access"].clone();
    assert!(path.ends_with("pods/u1/volumes/kubernetes.io~projected/access"));
    assert_eq!(mounts::at(&path).unwrap().unwrap().fstype, "tmpfs");
    assert_eq!(
        read(&path),
        pairs(&[("ca.crt", "CA"), ("namespace", "ns"), ("token", "t1")])
    );
    assert_eq!(mode(&path.join("token")), 0o644);
    assert_eq!(world.phase("u1/access"), Some(VolumePhase::Mounted));

    world.manager.unmount(&pod.uid()).await.unwrap();
    assert!(!path.exists());
    assert_eq!(world.phase("u1/access"), None);
    world.manager.remove_pod_dirs(&pod.uid()).await.unwrap();
}

#[tokio::test]
async fn a_refresh_writes_what_has_changed_and_nothing_else() {
    let world = world();
    let pod = pod("u1", json!([{"name": "v", "configMap": {"name": "m"}}]));
    let mut sources = sources();
    let path = world.mount_with(&pod, &sources).await.unwrap()["v"].clone();
    assert!(path.ends_with("kubernetes.io~configmap/v"));
    let link = || fs::read_link(path.join("..data")).unwrap();
    let version = || {
        let snapshot = world.store.snapshot();
        snapshot.get::<VolumeRecord>("u1/v").unwrap().version
    };
    let (first, committed) = (link(), version());
    let refresh = async |manager: &VolumeManager, sources: &Sources| {
        manager.refresh(&pod, sources, &world.recorder).await
    };
    // What is remembered is not even looked at.
    fs::remove_file(path.join("other")).unwrap();
    refresh(&world.manager, &sources).await.unwrap();
    assert!(!path.join("other").exists());
    // After a restart the files are compared once, and mended.
    let restarted = world.restarted();
    refresh(&restarted, &sources).await.unwrap();
    assert_eq!((link(), version()), (first.clone(), committed));
    assert!(path.join("other").exists());

    let changed = config_map(&[("ca.crt", "CA2"), ("more", "y")]);
    sources
        .config_maps
        .insert("m".to_owned(), Ok(Some(changed)));
    refresh(&restarted, &sources).await.unwrap();
    assert_ne!(link(), first);
    assert_eq!(
        read(&path),
        pairs(&[("bin", "\u{fffd}"), ("ca.crt", "CA2"), ("more", "y")])
    );
    assert_eq!(version(), committed, "content is no matter of records");

    // A configMap that vanishes leaves the pod its content, and is told.
    sources.config_maps.insert("m".to_owned(), Ok(None));
    refresh(&restarted, &sources).await.unwrap_err();
    assert_eq!(fs::read_to_string(path.join("ca.crt")).unwrap(), "CA2");
    let event = world.recorder.events().pop().unwrap();
    assert_eq!(event.reason, "FailedMount");
    assert!(
        event
            .message
            .starts_with("MountVolume.SetUp failed for volume \"v\" : configmap \"m\" not found"),
        "{}",
        event.message
    );
}

#[tokio::test]
async fn a_tmpfs_that_is_gone_after_a_reboot_is_set_up_again() {
    if !is_root() {
        return;
    }
    let world = world();
    let _cleanup = Cleanup(&world);
    let pod = pod(
        "u1",
        json!([{"name": "v", "secret": {"secretName": "s", "defaultMode": 256}}]),
    );
    let path = world.mount_with(&pod, &sources()).await.unwrap()["v"].clone();
    assert!(path.ends_with("kubernetes.io~secret/v"));
    assert_eq!(mode(&path.join("key")), 0o400);
    for manager in [world.manager.clone(), world.restarted()] {
        nix::mount::umount(&path).unwrap();
        assert!(read(&path).is_empty());
        manager
            .mount(&pod, &sources(), &world.recorder)
            .await
            .unwrap();
        assert_eq!(read(&path), pairs(&[("key", "hunter2")]));
        assert_eq!(mounts::below(&path).unwrap().len(), 1);
    }
}

#[tokio::test]
async fn an_expired_token_is_mounted_told_once_and_replaced() {
    if !is_root() {
        return;
    }
    let world = world();
    let _cleanup = Cleanup(&world);
    let pod = pod("u1", json!([api_access()]));
    let mut sources = sources();
    sources.tokens.insert(TOKEN(), token("old", true));
    let path = world.mount_with(&pod, &sources).await.unwrap()["access"].clone();
    let content = || fs::read_to_string(path.join("token")).unwrap();
    assert_eq!(content(), "old");
    let told = || {
        let events = world.recorder.events();
        events.iter().filter(|e| e.reason == TOKEN_EXPIRED).count()
    };
    assert_eq!(told(), 1);
    world
        .manager
        .refresh(&pod, &sources, &world.recorder)
        .await
        .unwrap();
    world.mount_with(&pod, &sources).await.unwrap();
    assert_eq!(told(), 1);
    sources.tokens.insert(TOKEN(), token("new", false));
    world
        .manager
        .refresh(&pod, &sources, &world.recorder)
        .await
        .unwrap();
    assert_eq!((content().as_str(), told()), ("new", 1));
    sources.tokens.insert(TOKEN(), token("new", true));
    world
        .manager
        .refresh(&pod, &sources, &world.recorder)
        .await
        .unwrap();
    assert_eq!(told(), 2, "it has expired as well");
    for event in world.recorder.events() {
        assert!(
            !event.message.contains("old") && !event.message.contains("new\""),
            "{event:?}"
        );
    }
}

#[tokio::test]
async fn what_cannot_be_had_is_named_and_nothing_is_mounted() {
    let map = |more: serde_json::Value| {
        let mut source = json!({"name": "m"});
        for (key, value) in more.as_object().unwrap() {
            source[key] = value.clone();
        }
        json!({"name": "v", "configMap": source})
    };
    let items = |path: &str| map(json!({"items": [{"key": "other", "path": path}]}));
    let downward = |item: serde_json::Value| json!({"name": "v", "downwardAPI": {"items": [item]}});
    for (volume, word) in [
        (map(json!({"name": "none"})), "configmap \"none\" not found"),
        (
            map(json!({"items": [{"key": "k", "path": "p"}]})),
            "configmap ns/m references non-existent config key: k",
        ),
        (
            json!({"name": "v", "secret": {"secretName": "s", "items": [{"key": "k", "path": "p"}]}}),
            "secret ns/s references non-existent secret key: k",
        ),
        (
            json!({"name": "v", "secret": {"secretName": "none"}}),
            "secret \"none\" not found",
        ),
        (
            json!({"name": "v", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}),
            "failed to fetch token",
        ),
        (
            json!({"name": "v", "projected": {"sources": [{"clusterTrustBundle": {"path": "t"}}]}}),
            "ClusterTrustBundles: they were not asked for",
        ),
        (items("/etc/passwd"), "relative"),
        (items("a/../../b"), "\"..\""),
        (items("..data"), "start with"),
        (items("./"), "empty"),
        (items(&"x".repeat(300)), "too long"),
        (
            downward(json!({"path": "p", "fieldRef": {"fieldPath": "spec.x"}})),
            "unsupported fieldPath: spec.x",
        ),
        (
            downward(json!({"path": "p", "resourceFieldRef": {"resource": "limits.cpu"}})),
            "containerName is required",
        ),
    ] {
        let world = world();
        let pod = pod("u1", json!([volume]));
        let error = world.mount_with(&pod, &sources()).await.unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
        let event = world.recorder.events().pop().unwrap();
        assert!(event.message.contains(word), "{}", event.message);
        assert!(!format!("{error:?}").contains("hunter2"));
        assert_eq!(world.phase("u1/v"), None);
    }
}

#[tokio::test]
async fn optional_sources_and_modes_are_heeded() {
    let world = world();
    let pod = pod(
        "u1",
        json!([
            {"name": "none", "configMap": {"name": "none", "optional": true}},
            {"name": "some", "configMap": {"name": "m", "optional": true, "defaultMode": 288, "items": [
                {"key": "ca.crt", "path": "deep/er//ca.crt", "mode": 493},
                {"key": "other", "path": "plain"},
                {"key": "nothing", "path": "nothing"},
            ]}},
        ]),
    );
    let paths = world.mount_with(&pod, &sources()).await.unwrap();
    assert!(read(&paths["none"]).is_empty());
    let some = &paths["some"];
    assert_eq!(mode(&some.join("deep/er/ca.crt")), 0o755);
    assert_eq!(mode(&some.join("plain")), 0o440);
    assert_eq!(read(some), pairs(&[("plain", "x")]));
}

#[tokio::test]
async fn content_volumes_of_a_lost_store_are_adopted_and_removed() {
    if !is_root() {
        return;
    }
    let world = world();
    let _cleanup = Cleanup(&world);
    let pod = pod(
        "u1",
        json!([api_access(), {"name": "m", "configMap": {"name": "m"}}, {"name": "s", "secret": {"secretName": "s"}}]),
    );
    world.mount_with(&pod, &sources()).await.unwrap();
    let store = Store::in_memory(Arc::new(TestClock));
    let root = world.dir.path().join("root");
    let manager = VolumeManager::new(&root, None, store.clone(), Arc::new(TestClock));
    assert_eq!(manager.reconcile().await.unwrap().adopted, 3);
    let errors = manager.cleanup_orphan_dirs(&BTreeSet::new()).await;
    assert!(errors.is_empty(), "{errors:?}");
    assert!(!manager.pod_dirs_exist(&pod.uid()));
    assert!(mounts::below(&root).unwrap().is_empty());
}

#[tokio::test]
async fn a_900_kilobyte_config_map_is_written_whole() {
    let world = world();
    let big = "x".repeat(900 << 10);
    let mut sources = sources();
    let map = config_map(&[("big", &big)]);
    sources.config_maps.insert("m".to_owned(), Ok(Some(map)));
    let pod = pod("u1", json!([{"name": "v", "configMap": {"name": "m"}}]));
    let path = world.mount_with(&pod, &sources).await.unwrap()["v"].clone();
    assert_eq!(fs::read_to_string(path.join("big")).unwrap(), big);
}
