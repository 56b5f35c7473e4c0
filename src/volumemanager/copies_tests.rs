//! Mounts that the kernel lists more than once, as what they are in is shared.

use nix::mount::{MsFlags, mount};

use super::*;
use crate::volumemanager::stand_in::{Swept, can_mount};

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
