//! The driver itself: it does what drivers do, and notices what its caller must not do.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use holdfast::volumemanager::csi::proto::{AccessType, MountVolume};
use holdfast_testkit::csi::{CsiDriver, mounts_at};
use tonic::Code;

use crate::world::{Dirs, client_of, device, files, map};

#[tokio::test]
async fn what_the_contract_forbids_is_noticed() {
    let dirs = Dirs::new();
    let mut options = dirs.options("d");
    options.needs_secrets = true;
    let driver = CsiDriver::start(options).unwrap();
    let client = client_of(&driver);
    let secrets = map(&[("k", "v")]);
    let mut seen = 0;
    let mut noticed = |what: &str| {
        let violations = driver.violations();
        assert_eq!(violations.len(), seen + 1, "{what}: {violations:?}");
        assert!(violations[seen].contains(what), "{what}: {violations:?}");
        seen += 1;
    };

    client.node_stage_volume(dirs.stage("v")).await.unwrap_err();
    noticed("secrets are missing");
    let mut publish = dirs.publish("p", "v");
    publish.secrets = secrets.clone();
    client
        .node_publish_volume(publish.clone())
        .await
        .unwrap_err();
    noticed("published before it was staged");
    let mut stage = dirs.stage("v");
    stage.secrets = secrets.clone();
    client.node_stage_volume(stage.clone()).await.unwrap();
    let mut elsewhere = stage.clone();
    elsewhere.staging_target_path = dirs.staging("other");
    client.node_stage_volume(elsewhere).await.unwrap_err();
    noticed("staged already at");
    let mut other = stage.clone();
    other.volume_context = map(&[("a", "b")]);
    let error = client.node_stage_volume(other).await.unwrap_err();
    assert_eq!(error.code, Code::AlreadyExists);
    noticed("staged with");
    client.node_publish_volume(publish.clone()).await.unwrap();
    let mut again = publish.clone();
    again.readonly = true;
    let error = client.node_publish_volume(again).await.unwrap_err();
    assert_eq!(error.code, Code::AlreadyExists);
    noticed("published with");
    // New tokens are no other arguments.
    let mut again = publish.clone();
    again.volume_context = map(&[("csi.storage.k8s.io/serviceAccount.tokens", "{}")]);
    client.node_publish_volume(again).await.unwrap();
    let error = client
        .node_unstage_volume("v", &stage.staging_target_path)
        .await
        .unwrap_err();
    assert_eq!(error.code, Code::FailedPrecondition);
    noticed("still published at");
    let mut orphan = publish.clone();
    orphan.target_path = format!("{}/no/parent", dirs.root().display());
    client.node_publish_volume(orphan).await.unwrap_err();
    noticed("parent is not there");
    let mut outside = publish.clone();
    outside.target_path = "/tmp/outside".to_owned();
    client.node_publish_volume(outside).await.unwrap_err();
    noticed("is not below the kubelet's");
    let mut up = publish.clone();
    up.target_path = format!("{}/../up", dirs.root().display());
    client.node_publish_volume(up).await.unwrap_err();
    noticed("is not below the kubelet's");
    let mut from = publish.clone();
    from.target_path = dirs.target("q", "v");
    from.staging_target_path = dirs.staging("other");
    client.node_publish_volume(from).await.unwrap_err();
    noticed("but staged at");
    let mut group = stage.clone();
    group.volume_capability = Some(files());
    if let Some(capability) = &mut group.volume_capability {
        capability.access_type = Some(AccessType::Mount(MountVolume {
            volume_mount_group: "7".to_owned(),
            ..MountVolume::default()
        }));
    }
    client.node_stage_volume(group).await.unwrap_err();
    noticed("VOLUME_MOUNT_GROUP");
}

#[tokio::test]
async fn its_memory_outlives_it() {
    let dirs = Dirs::new();
    let mut driver = dirs.driver("d");
    let client = client_of(&driver);
    client.node_stage_volume(dirs.stage("v")).await.unwrap();
    let publish = dirs.publish("p", "v");
    client.node_publish_volume(publish.clone()).await.unwrap();
    let before = driver.truth().unwrap();
    assert_eq!(before.mounted.len(), 2);
    driver.restart().unwrap();
    assert_eq!(driver.truth().unwrap(), before);
    client.node_publish_volume(publish.clone()).await.unwrap();
    assert_eq!(mounts_at(publish.target_path.as_ref()).unwrap(), 1);
}

#[tokio::test]
async fn devices_tmpfs_and_inline_volumes() {
    let dirs = Dirs::new();
    let driver = dirs.driver("d");
    let client = client_of(&driver);
    let mut stage = dirs.stage("b");
    stage.volume_capability = Some(device());
    let mut publish = dirs.publish("p", "b");
    publish.volume_capability = Some(device());
    client.node_stage_volume(stage.clone()).await.unwrap();
    client.node_publish_volume(publish.clone()).await.unwrap();
    let target = Path::new(&publish.target_path);
    let kind = fs::metadata(target).unwrap().file_type();
    assert!(kind.is_block_device() || kind.is_file(), "{kind:?}");
    client
        .node_unpublish_volume("b", &publish.target_path)
        .await
        .unwrap();
    client
        .node_unstage_volume("b", &stage.staging_target_path)
        .await
        .unwrap();
    assert!(!target.exists());

    let mut inline = dirs.publish("p", "inline");
    inline.staging_target_path.clear();
    inline.volume_context = map(&[("csi.storage.k8s.io/ephemeral", "true")]);
    client.node_publish_volume(inline.clone()).await.unwrap();
    fs::write(Path::new(&inline.target_path).join("x"), "x").unwrap();
    client
        .node_unpublish_volume("inline", &inline.target_path)
        .await
        .unwrap();
    assert!(!driver.volume_dir("inline").exists());
    assert!(driver.truth().unwrap().is_clean());
    assert_eq!(driver.violations(), Vec::<String>::new());

    let mut options = dirs.options("t");
    options.tmpfs = true;
    options.size = 8 << 20;
    options.capabilities.mount_group = true;
    let driver = CsiDriver::start(options).unwrap();
    let client = client_of(&driver);
    client.node_stage_volume(dirs.stage("m")).await.unwrap();
    let mut publish = dirs.publish("p", "m");
    publish.readonly = true;
    client.node_publish_volume(publish.clone()).await.unwrap();
    let target = Path::new(&publish.target_path);
    let size = nix::sys::statvfs::statvfs(target).unwrap();
    assert_eq!(size.blocks() * size.fragment_size(), 8 << 20);
    let error = fs::write(target.join("x"), "x").unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
}

#[tokio::test]
async fn the_group_is_given_by_a_driver_that_can() {
    let dirs = Dirs::new();
    let mut options = dirs.options("d");
    options.capabilities.mount_group = true;
    let driver = CsiDriver::start(options).unwrap();
    let client = client_of(&driver);
    let mut stage = dirs.stage("v");
    if let Some(capability) = &mut stage.volume_capability {
        capability.access_type = Some(AccessType::Mount(MountVolume {
            volume_mount_group: "4711".to_owned(),
            ..MountVolume::default()
        }));
    }
    client.node_stage_volume(stage).await.unwrap();
    assert_eq!(fs::metadata(driver.volume_dir("v")).unwrap().gid(), 4711);
}

#[tokio::test]
async fn a_volume_that_is_missing_is_not_found_but_can_be_let_go() {
    let dirs = Dirs::new();
    let driver = dirs.driver("d");
    let client = client_of(&driver);
    let error = client.node_stage_volume(dirs.stage("missing-1")).await;
    assert_eq!(error.unwrap_err().code, Code::NotFound);
    let staging = dirs.staging("missing-1");
    client
        .node_unstage_volume("missing-1", &staging)
        .await
        .unwrap();
    assert_eq!(driver.violations(), Vec::<String>::new());
}
