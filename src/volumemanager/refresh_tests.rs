//! Content that changes, and content that does not.

use std::os::unix::fs::MetadataExt;

use super::content_tests::{Cleanup, TOKEN, api_access, config_map, is_root, read, sources, token};
use super::*;
use crate::core::trust::{TrustBundle, TrustBundles};

const GROUP: u32 = 54_321;

/// Every file, directory and link below a path with what writing, renaming and changing of modes leave on it.
fn fingerprint(path: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut left = vec![path.to_owned()];
    while let Some(path) = left.pop() {
        let seen = fs::symlink_metadata(&path).unwrap();
        found.push(format!(
            "{} {} {}.{} {}.{} {:o} {}",
            path.display(),
            seen.ino(),
            seen.mtime(),
            seen.mtime_nsec(),
            seen.ctime(),
            seen.ctime_nsec(),
            seen.mode(),
            seen.gid(),
        ));
        if seen.is_dir() {
            left.extend(fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
        }
    }
    found.sort();
    found
}

fn of_group(volumes: serde_json::Value) -> Pod {
    let mut pod = pod("u1", volumes);
    let spec = pod.spec.as_mut().unwrap();
    spec.security_context =
        Some(serde_json::from_value(json!({"fsGroup": GROUP, "runAsUser": 1234})).unwrap());
    pod
}

fn all_kinds() -> serde_json::Value {
    json!([
        api_access(),
        {"name": "m", "configMap": {"name": "m", "defaultMode": 0o400}},
        {"name": "s", "secret": {"secretName": "s"}},
        {"name": "d", "downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
        {"name": "e", "emptyDir": {}},
    ])
}

// Invariant VOL-9.
#[tokio::test]
async fn a_restart_writes_renames_and_touches_nothing() {
    if !is_root() {
        return;
    }
    let world = world();
    let _cleanup = Cleanup(&world);
    let root = world.dir.path().join("root");
    for pod in [pod("u1", all_kinds()), of_group(all_kinds())] {
        world.mount_with(&pod, &sources()).await.unwrap();
        let before = fingerprint(&root);
        assert!(before.len() > 30, "{before:#?}");
        let versions = || -> Vec<_> {
            let seen = world.store.snapshot();
            seen.volumes
                .iter()
                .map(|(key, v)| (key.to_string(), v.version))
                .collect()
        };
        let recorded = versions();
        for step in 0..2 {
            let metrics = Metrics::default();
            let manager = world.restarted().measured(metrics.clone());
            manager.reconcile().await.unwrap();
            if step == 0 {
                manager
                    .refresh(&pod, &sources(), &world.recorder)
                    .await
                    .unwrap();
            }
            manager
                .mount(&pod, &sources(), &world.recorder)
                .await
                .unwrap();
            manager
                .refresh(&pod, &sources(), &world.recorder)
                .await
                .unwrap();
            assert_eq!(fingerprint(&root), before, "step {step}");
            assert_eq!(metrics.volume_content_writes.get(), 0);
            assert_eq!(versions(), recorded, "and commits nothing");
        }
        world.manager.unmount(&pod.uid()).await.unwrap();
    }
}

#[tokio::test]
async fn each_change_is_one_write() {
    let world = world();
    let metrics = Metrics::default();
    let manager = world.restarted().measured(metrics.clone());
    let pod = pod(
        "u1",
        json!([{"name": "v", "configMap": {"name": "m", "optional": true}}]),
    );
    let mut sources = sources();
    sources.config_maps.insert("m".to_owned(), Ok(None));
    let mounted = manager.mount(&pod, &sources, &world.recorder).await;
    let path = mounted.unwrap()["v"].clone();
    let writes = || metrics.volume_content_writes.get();
    let first = writes();
    assert!(read(&path).is_empty());
    // It appears, has a key more, a key less, and is gone again.
    let steps: [&[(&str, &str)]; 3] = [&[("a", "1")], &[("a", "1"), ("b", "2")], &[("b", "2")]];
    for (n, data) in steps.into_iter().enumerate() {
        sources
            .config_maps
            .insert("m".to_owned(), Ok(Some(config_map(data))));
        for _ in 0..3 {
            manager
                .refresh(&pod, &sources, &world.recorder)
                .await
                .unwrap();
        }
        let names: Vec<String> = read(&path).into_iter().map(|(name, _)| name).collect();
        let mut want: Vec<&str> = data.iter().map(|(name, _)| *name).collect();
        want.push("bin");
        assert_eq!(names, want);
        assert_eq!(writes() - first, n as u64 + 1);
    }
    sources.config_maps.insert("m".to_owned(), Ok(None));
    manager
        .refresh(&pod, &sources, &world.recorder)
        .await
        .unwrap();
    assert!(read(&path).is_empty());
}

#[tokio::test]
async fn labels_and_annotations_are_written_as_they_change() {
    if !is_root() {
        return;
    }
    let world = world();
    let _cleanup = Cleanup(&world);
    let mut pod = pod(
        "u1",
        json!([{"name": "d", "downwardAPI": {"items": [
            {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}},
            {"path": "note", "fieldRef": {"fieldPath": "metadata.annotations['note']"}}]}}]),
    );
    let path = world.mount_with(&pod, &sources()).await.unwrap()["d"].clone();
    assert_eq!(fs::read_to_string(path.join("labels")).unwrap(), "");
    pod.metadata.labels = Some(BTreeMap::from([("tier".to_owned(), "web".to_owned())]));
    pod.metadata.annotations = Some(BTreeMap::from([("note".to_owned(), "hi".to_owned())]));
    let sources = sources();
    let refreshed = world.manager.refresh(&pod, &sources, &world.recorder);
    refreshed.await.unwrap();
    assert_eq!(
        fs::read_to_string(path.join("labels")).unwrap(),
        "tier=\"web\""
    );
    assert_eq!(fs::read_to_string(path.join("note")).unwrap(), "hi");
}

#[tokio::test]
async fn what_a_pod_with_a_group_reads_belongs_to_the_group() {
    if !is_root() {
        return;
    }
    let world = world();
    let _cleanup = Cleanup(&world);
    let pod = of_group(all_kinds());
    let paths = world.mount_with(&pod, &sources()).await.unwrap();
    for (volume, file, want) in [
        ("access", "token", 0o640),
        ("access", "ca.crt", 0o644),
        ("m", "ca.crt", 0o440),
        ("s", "key", 0o644),
        ("d", "labels", 0o644),
    ] {
        let found = fs::metadata(paths[volume].join(file)).unwrap();
        let owner = if file == "token" { 1234 } else { 0 };
        assert_eq!(
            (found.gid(), found.uid()),
            (GROUP, owner),
            "{volume}/{file}"
        );
        assert_eq!(
            found.mode() & 0o7777,
            want,
            "{volume}/{file}: {:o}",
            found.mode()
        );
    }
    let empty = fs::metadata(&paths["e"]).unwrap();
    assert_eq!((empty.gid(), empty.mode() & 0o7777), (GROUP, 0o2777));
    // What is written later as well.
    let mut sources = sources();
    sources.tokens.insert(TOKEN(), token("t2", false));
    let refreshed = world.manager.refresh(&pod, &sources, &world.recorder);
    refreshed.await.unwrap();
    let found = fs::metadata(paths["access"].join("token")).unwrap();
    assert_eq!(
        (found.gid(), found.uid(), found.mode() & 0o7777),
        (GROUP, 1234, 0o640)
    );
    assert_eq!(
        fs::read_to_string(paths["access"].join("token")).unwrap(),
        "t2"
    );
}

#[tokio::test]
async fn trust_anchors_are_projected_and_follow_their_bundles() {
    if !is_root() {
        return;
    }
    let world = world();
    let _cleanup = Cleanup(&world);
    let pod = pod(
        "u1",
        json!([{"name": "v", "projected": {"sources": [
            {"clusterTrustBundle": {"signerName": "s/x", "labelSelector": {}, "path": "ca.pem"}},
            {"clusterTrustBundle": {"name": "none", "optional": true, "path": "none.pem"}}]}}]),
    );
    let certificate =
        |text: &str| format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n");
    let bundles = |of: &[(&str, &str)]| {
        let one = |(name, text): &(&str, &str)| {
            let bundle = TrustBundle {
                signer: "s/x".to_owned(),
                pem: format!("comment\n{}", certificate(text)),
                ..TrustBundle::default()
            };
            ((*name).to_owned(), bundle)
        };
        Some(Ok(Arc::new(of.iter().map(one).collect::<TrustBundles>())))
    };
    let mut sources = sources();
    sources.trust_bundles = bundles(&[("a", "b25l")]);
    let path = world.mount_with(&pod, &sources).await.unwrap()["v"].clone();
    let content = |name: &str| fs::read_to_string(path.join(name)).unwrap();
    assert_eq!(content("ca.pem"), certificate("b25l"));
    assert_eq!(content("none.pem"), "");
    sources.trust_bundles = bundles(&[("a", "b25l"), ("b", "dHdv"), ("c", "b25l")]);
    let refreshed = world.manager.refresh(&pod, &sources, &world.recorder);
    refreshed.await.unwrap();
    assert_eq!(
        content("ca.pem"),
        format!("{}{}", certificate("b25l"), certificate("dHdv"))
    );
    // What cannot be asked for is told, and leaves what was there.
    sources.trust_bundles = Some(Err("the API server does not serve them".to_owned()));
    let refreshed = world.manager.refresh(&pod, &sources, &world.recorder);
    refreshed.await.unwrap_err();
    let event = world.recorder.events().pop().unwrap();
    assert!(
        event.message.contains("does not serve them"),
        "{}",
        event.message
    );
    assert!(content("ca.pem").contains("dHdv"));
}

#[tokio::test]
async fn a_container_that_starts_again_has_the_former_content_when_there_is_no_newer() {
    let world = world();
    let pod = pod("u1", json!([{"name": "v", "configMap": {"name": "m"}}]));
    let mut sources = sources();
    let path = world.mount_with(&pod, &sources).await.unwrap()["v"].clone();
    sources.config_maps.insert("m".to_owned(), Ok(None));
    for manager in [world.manager.clone(), world.restarted()] {
        let mounted = manager.mount(&pod, &sources, &world.recorder).await;
        assert_eq!(mounted.unwrap()["v"], path);
        assert_eq!(fs::read_to_string(path.join("ca.crt")).unwrap(), "CA");
        let event = world.recorder.events().pop().unwrap();
        assert!(
            event.message.contains("configmap \"m\" not found"),
            "{}",
            event.message
        );
    }
    // What never was whole is not used.
    fs::remove_file(path.join("..data")).unwrap();
    let mounted = world
        .restarted()
        .mount(&pod, &sources, &world.recorder)
        .await;
    mounted.unwrap_err();
}

/// The kernel's table; whether it has changed, the test says.
struct Told(Arc<std::sync::Mutex<Option<bool>>>);

impl mounts::Kernel for Told {
    fn read(&self) -> io::Result<mounts::Table> {
        mounts::Table::read()
    }

    fn changed(&self) -> Option<bool> {
        let mut changed = self.0.lock().unwrap();
        let told = *changed;
        *changed = told.map(|_| false);
        told
    }
}

#[tokio::test]
async fn a_sync_of_a_settled_pod_reads_the_mount_table_once_or_not_at_all() {
    if !is_root() {
        return;
    }
    let mut world = world();
    let told = Arc::new(std::sync::Mutex::new(None));
    let root = world.manager.root.clone();
    world.manager.mounts = mounts::Source::with(&root, Told(Arc::clone(&told)));
    let world = world;
    let _cleanup = Cleanup(&world);
    let pod = pod("u1", all_kinds());
    world.mount_with(&pod, &sources()).await.unwrap();
    let cost = async || {
        let before = world.manager.mounts.reads();
        world.mount_with(&pod, &sources()).await.unwrap();
        let sources = sources();
        let refreshing = world.manager.refresh(&pod, &sources, &world.recorder);
        refreshing.await.unwrap();
        world.manager.mounts.reads() - before
    };
    // A kernel that cannot tell; one that has just told of a change; and one that tells of none since.
    assert_eq!((cost().await, cost().await), (1, 1));
    *told.lock().unwrap() = Some(true);
    assert_eq!((cost().await, cost().await), (1, 0));
    // What is gone is found, and all that is there is left alone.
    let path = world.manager.plugin_dir(&pod.uid(), SECRET).join("s");
    nix::mount::umount2(&path, nix::mount::MntFlags::MNT_DETACH).unwrap();
    *told.lock().unwrap() = Some(true);
    assert!(cost().await > 0);
    assert_eq!(mounts::at(&path).unwrap().unwrap().fstype, "tmpfs");
}
