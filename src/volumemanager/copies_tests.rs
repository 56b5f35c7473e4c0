//! Mounts that the kernel lists more than once, as what they are in is shared, and mounts of others.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use nix::mount::{MsFlags, mount};

use super::*;
use crate::core::volumes::Source;
use crate::volumemanager::stand_in::{Swept, can_mount, remote, resolved};
use k8s_openapi::api::core::v1::LocalVolumeSource;

fn bind(from: &Path, at: &Path) {
    let none: Option<&str> = None;
    mount(Some(from), at, none, MsFlags::MS_BIND, none).unwrap();
}

/// Has all that is mounted at or below `dir` shared between `dir` and what is bound of it.
fn share(dir: &Path) {
    bind(dir, dir);
    let none: Option<&str> = None;
    mount(none, dir, none, MsFlags::MS_SHARED, none).unwrap();
}

fn listed(point: &Path) -> usize {
    let all = mounts::Table::read().unwrap().into_all();
    all.iter().filter(|m| m.point == point).count()
}

#[tokio::test]
async fn a_volume_that_is_listed_twice_is_one_volume_and_goes() {
    if !can_mount() {
        return;
    }
    let world = world();
    let dir = world.dir.path().canonicalize().unwrap();
    let _swept = Swept(dir.clone());
    share(&dir);
    // As of an agent in a container: its directory is bound on itself.
    let root = dir.join("root");
    fs::create_dir(&root).unwrap();
    bind(&root, &root);
    let pod = pod(
        "u1",
        json!([
            {"name": "m", "emptyDir": {"medium": "Memory"}},
            {"name": "d", "downwardAPI": {"items": [
                {"path": "name", "fieldRef": {"fieldPath": "metadata.name"}},
            ]}},
        ]),
    );
    let paths = world.mount(&pod).await.unwrap();
    for path in paths.values() {
        let path = path.canonicalize().unwrap();
        assert_eq!(listed(&path), 2, "{}", path.display());
    }
    // Found as they are.
    assert_eq!(world.mount(&pod).await.unwrap(), paths);
    assert_eq!(world.restarted().reconcile().await.unwrap().mounted, 2);
    world.manager.unmount(&pod.uid()).await.unwrap();
    world.manager.remove_pod_dirs(&pod.uid()).await.unwrap();
    assert!(!world.manager.pod_dir(&pod.uid()).exists());
}

#[tokio::test]
async fn a_mount_that_came_by_propagation_keeps_no_pod_and_stays_where_it_came_from() {
    if !can_mount() {
        return;
    }
    let world = world();
    let dir = world.dir.path().canonicalize().unwrap();
    let _swept = Swept(dir.clone());
    share(&dir);
    let (users, at) = (dir.join("users"), dir.join("at"));
    fs::create_dir_all(users.join("usb")).unwrap();
    fs::create_dir(&at).unwrap();
    bind(&users, &at);
    let none: Option<&str> = None;
    let usb = users.join("usb");
    mount(Some("usb"), &usb, Some("tmpfs"), MsFlags::empty(), none).unwrap();
    fs::write(usb.join("data"), "kept").unwrap();
    assert!(at.join("usb/data").exists(), "it was propagated");
    let tools = crate::volumemanager::command::Tools::default();
    disk::unmount(&tools, &at, "volume pv").await.unwrap();
    assert!(!at.exists());
    assert_eq!(fs::read_to_string(usb.join("data")).unwrap(), "kept");

    // Once more, with a mount that is nowhere else.
    fs::create_dir(&at).unwrap();
    bind(&users, &at);
    mount(none, &at, none, MsFlags::MS_PRIVATE, none).unwrap();
    let own = at.join("own");
    fs::create_dir(&own).unwrap();
    mount(Some("own"), &own, Some("tmpfs"), MsFlags::empty(), none).unwrap();
    fs::write(own.join("data"), "kept").unwrap();
    let error = disk::unmount(&tools, &at, "volume pv").await.unwrap_err();
    assert!(
        error
            .to_string()
            .contains("at/own is mounted; unmount it first"),
        "{error}"
    );
    assert_eq!(fs::read_to_string(own.join("data")).unwrap(), "kept");
    assert_eq!(fs::read_to_string(usb.join("data")).unwrap(), "kept");
}

#[tokio::test]
async fn what_somebody_mounted_in_the_place_of_a_volume_is_not_unmounted() {
    if !can_mount() {
        return;
    }
    let world = world();
    let dir = world.dir.path().canonicalize().unwrap();
    let _swept = Swept(dir.clone());
    let users = dir.join("users");
    fs::create_dir(&users).unwrap();
    let tools = crate::volumemanager::command::Tools::default();
    let manager = world.manager.clone().with_system_tools(tools);
    let pod = pod(
        "u1",
        json!([{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]),
    );
    let local = LocalVolumeSource {
        path: users.to_string_lossy().into_owned(),
        fs_type: None,
    };
    let mut sources = Sources::default();
    let found = resolved(remote(Source::Local(local)));
    sources.remotes.insert("v".to_owned(), Ok(found));
    let mounting = manager.mount(&pod, &sources, &world.recorder);
    let at = mounting.await.unwrap()["v"].clone();
    assert!(mounts::at(&at).unwrap().is_some());
    let none: Option<&str> = None;
    nix::mount::umount(&at).unwrap();
    mount(Some("theirs"), &at, Some("tmpfs"), MsFlags::empty(), none).unwrap();
    fs::write(at.join("data"), "kept").unwrap();
    let error = manager.unmount(&pod.uid()).await.unwrap_err();
    let text = chain(&error);
    assert!(
        text.contains("theirs (tmpfs) is mounted at") && text.contains("instead of it"),
        "{text}"
    );
    assert_eq!(fs::read_to_string(at.join("data")).unwrap(), "kept");
    nix::mount::umount(&at).unwrap();
    // Which knows of no back-off.
    let tools = crate::volumemanager::command::Tools::default();
    let next = world.restarted().with_system_tools(tools);
    next.unmount(&pod.uid()).await.unwrap();
    next.remove_pod_dirs(&pod.uid()).await.unwrap();
    let left = world.store.snapshot();
    let mut left = left.with_prefix::<crate::core::state::FactRecord>("mounts/u1");
    assert_eq!(left.next().map(|(key, _)| key.to_string()), None);
}

#[tokio::test]
async fn what_keeps_a_pod_is_told_once_for_each_reason() {
    if !can_mount() {
        return;
    }
    let world = world();
    let _swept = Swept(world.dir.path().canonicalize().unwrap());
    let recorder = Arc::new(MemoryRecorder::default());
    let manager = world.manager.clone().telling(Arc::clone(&recorder) as _);
    let pod = pod(
        "u1",
        json!([{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {}}]),
    );
    let record = PodRecord {
        source: PodSource::Api,
        origin: String::new(),
        pod: Arc::new(pod.clone()).into(),
        first_seen: TestClock.now(),
        confirmed_epoch: 1,
    };
    let known = Transaction::new().put("u1", record);
    world.store.commit(known).await.unwrap();
    let paths = world.mount(&pod).await.unwrap();
    let over = |name: &str| {
        let none: Option<&str> = None;
        mount(
            Some("x"),
            &paths[name],
            Some("tmpfs"),
            MsFlags::empty(),
            none,
        )
        .unwrap();
    };
    over("a");
    over("b");
    let told = |reasons: usize| {
        let events = recorder.events();
        assert!(events.iter().all(|e| e.reason == "FailedUnMount"));
        assert_eq!(events.len(), reasons, "{events:?}");
    };
    for _ in 0..3 {
        manager.unmount(&pod.uid()).await.unwrap_err();
        told(2);
    }
    nix::mount::umount(&paths["a"]).unwrap();
    manager.unmount(&pod.uid()).await.unwrap_err();
    told(2);
    nix::mount::umount(&paths["b"]).unwrap();
    manager.unmount(&pod.uid()).await.unwrap();
    // Of the directory, too.
    let stray = manager.pod_dir(&pod.uid()).join("volumes/theirs");
    let stray = stray.join(OsStr::from_bytes(b"volum\xe9"));
    fs::create_dir_all(&stray).unwrap();
    fs::write(stray.join("data"), "kept").unwrap();
    for _ in 0..3 {
        manager.remove_pod_dirs(&pod.uid()).await.unwrap_err();
        told(3);
    }
    assert!(stray.join("data").exists());
}
