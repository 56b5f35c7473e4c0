use nix::mount::{MntFlags, MsFlags};

use super::*;
use crate::volumemanager::stand_in::{StandIns, Swept, can_mount, remote, resolved, target};

fn volume(server: &str, path: &str) -> Remote {
    remote(Source::Nfs(NFSVolumeSource {
        server: server.to_owned(),
        path: path.to_owned(),
        read_only: None,
    }))
}

async fn publish(tools: &StandIns, volume: Remote) -> Result<GroupBy, RemoteError> {
    let plugin = NfsPlugin::new(tools.tools()).patient(Duration::from_secs(30));
    let at = target(tools.path("nfs volume"), None);
    plugin.publish(resolved(volume), at).await
}

#[tokio::test]
async fn exports_are_mounted_by_these_very_commands() {
    let plain = volume("10.0.0.1", "/export/a b");
    let mut all = volume("fd00::1", "/");
    all.read_only = true;
    all.mount_options = vec!["vers=4.2".to_owned(), "hard".to_owned()];
    let mut brackets = volume("[fe80::1%eth0]", "/x");
    brackets.mount_options = vec!["nolock".to_owned()];
    for (volume, command) in [
        (plain, "mount -t nfs -- 10.0.0.1:/export/a b"),
        (all, "mount -t nfs -o hard,ro,vers=4.2 -- [fd00::1]:/"),
        (brackets, "mount -t nfs -o nolock -- [fe80::1%eth0]:/x"),
    ] {
        let tools = StandIns::new(&["mount", "mount.nfs"]);
        let group = publish(&tools, volume).await.unwrap();
        assert_eq!(group, GroupBy::Nobody, "the server says who may");
        let at = tools.path("nfs volume");
        assert!(at.is_dir());
        assert_eq!(tools.calls(), [format!("{command} {}", at.display())]);
    }
}

#[tokio::test]
async fn servers_and_paths_that_can_be_none_are_refused() {
    let mut option = volume("server", "/x");
    option.mount_options = vec!["--bind".to_owned()];
    for (volume, why) in [
        (volume("", "/x"), "nfs.server"),
        (volume("-o", "/x"), "nfs.server"),
        (volume("a b", "/x"), "nfs.server"),
        (volume("a/b", "/x"), "nfs.server"),
        (volume("[a", "/x"), "nfs.server"),
        (volume("[a]", "/x"), "nfs.server"),
        (volume("server", "x"), "nfs.path"),
        (volume("server", ""), "nfs.path"),
        (volume("server", "/a\nb"), "nfs.path"),
        (option, "mount option"),
    ] {
        let tools = StandIns::new(&["mount", "mount.nfs"]);
        let error = publish(&tools, volume).await.unwrap_err();
        assert!(matches!(error, RemoteError::Failed(_)), "{error}");
        assert!(error.to_string().contains(why), "{error}");
        assert_eq!(tools.calls(), [""; 0]);
    }
}

#[tokio::test]
async fn a_node_without_nfs_tools_says_which_package_it_lacks() {
    let tools = StandIns::new(&["mount"]);
    let error = publish(&tools, volume("server", "/x")).await.unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with("mount server:/x: mount.nfs is not installed")
            && text.contains("nfs-common"),
        "{text}"
    );
}

#[tokio::test]
async fn a_server_that_refuses_is_told_in_its_words() {
    let tools = StandIns::new(&["mount.nfs"]);
    tools.script(
        "mount",
        "echo 'mount.nfs: access denied by server while mounting server:/x' >&2; exit 32",
    );
    let error = publish(&tools, volume("server", "/x")).await.unwrap_err();
    assert!(matches!(error, RemoteError::Failed(_)));
    assert!(
        error.to_string().contains("access denied by server"),
        "{error}"
    );
}

#[tokio::test]
async fn a_server_that_never_answers_is_given_up() {
    let tools = StandIns::new(&["mount.nfs"]);
    tools.script("mount", "exec sleep 1000");
    let plugin = NfsPlugin::new(tools.tools()).patient(Duration::from_millis(300));
    let at = target(tools.path("at"), None);
    let error = plugin.publish(resolved(volume("dead", "/x")), at).await;
    let error = error.unwrap_err();
    assert!(
        matches!(error, RemoteError::Uncertain(_))
            && error.to_string().starts_with("mount dead:/x: "),
        "{error}"
    );
}

#[tokio::test]
async fn a_dead_server_is_unmounted_by_force_unless_somebody_uses_it() {
    if !can_mount() {
        return;
    }
    let tools = StandIns::new(&[]);
    let at = tools.path("at");
    let _swept = Swept(tools.path(""));
    std::fs::create_dir(&at).unwrap();
    let mount = || {
        let none: Option<&str> = None;
        nix::mount::mount(Some("x"), &at, Some("tmpfs"), MsFlags::empty(), none).unwrap();
        std::fs::write(at.join("users"), "data").unwrap();
    };
    mount();
    // Somebody uses it, so that it cannot be unmounted by force either.
    let used = std::fs::File::open(at.join("users")).unwrap();
    tools.script("umount", "exec sleep 1000");
    let volume = Arc::new(volume("10.9.9.9", "/data"));
    let plugin =
        |tools: &StandIns| NfsPlugin::new(tools.tools()).patient(Duration::from_millis(300));
    let error = plugin(&tools)
        .unpublish(Arc::clone(&volume), at.clone())
        .await;
    let error = error.unwrap_err();
    assert!(
        matches!(error, RemoteError::Uncertain(_))
            && error
                .to_string()
                .contains("NFS server 10.9.9.9 (path /data) does not answer"),
        "{error}"
    );
    assert_eq!(tools.calls(), [format!("umount -c -i -- {}", at.display())]);
    tools.script("umount", "echo 'umount: target is busy.' >&2; exit 32");
    let error = plugin(&tools)
        .unpublish(Arc::clone(&volume), at.clone())
        .await;
    assert!(error.unwrap_err().to_string().contains("target is busy"));
    assert!(
        at.join("users").exists(),
        "nothing is removed through a mount"
    );
    drop(used);
    tools.script("umount", "exec sleep 1000");
    plugin(&tools)
        .unpublish(Arc::clone(&volume), at.clone())
        .await
        .unwrap();
    assert!(!at.exists(), "unmounted by force");
    std::fs::create_dir(&at).unwrap();
    mount();
    std::fs::remove_file(tools.path("umount")).unwrap();
    tools.real("umount");
    let patient = NfsPlugin::new(tools.tools());
    patient
        .unpublish(Arc::clone(&volume), at.clone())
        .await
        .unwrap();
    assert!(!at.exists());
    patient.unpublish(volume, at).await.unwrap();
}

#[tokio::test]
async fn a_directory_that_holds_something_is_never_removed() {
    let tools = StandIns::new(&["umount"]);
    let at = tools.path("at");
    std::fs::create_dir(&at).unwrap();
    std::fs::write(at.join("users"), "data").unwrap();
    let plugin = NfsPlugin::new(tools.tools());
    let error = plugin
        .unpublish(Arc::new(volume("s", "/")), at.clone())
        .await;
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("remove mount point")
    );
    assert!(at.join("users").exists());
    assert_eq!(tools.calls(), [""; 0], "nothing is mounted there");
}

#[test]
fn a_mount_of_the_same_export_is_recognised() {
    let entry = |fstype: &str, source: &str| Mount {
        point: "/m".into(),
        fstype: fstype.to_owned(),
        source: source.to_owned(),
        ..Mount::default()
    };
    assert!(is_same(&entry("nfs4", "s:/a"), "s:/a/"));
    assert!(is_same(&entry("nfs", "s:/"), "s:/"));
    assert!(!is_same(&entry("nfs4", "s:/b"), "s:/a"));
    assert!(!is_same(&entry("tmpfs", "s:/a"), "s:/a"));
}

#[tokio::test]
async fn another_mount_in_its_place_is_not_taken_for_it() {
    if !can_mount() {
        return;
    }
    let tools = StandIns::new(&["mount", "mount.nfs"]);
    let at = tools.path("nfs volume");
    let _swept = Swept(tools.path(""));
    std::fs::create_dir(&at).unwrap();
    let none: Option<&str> = None;
    nix::mount::mount(Some("x"), &at, Some("tmpfs"), MsFlags::empty(), none).unwrap();
    let error = publish(&tools, volume("s", "/x")).await.unwrap_err();
    assert!(
        error.to_string().contains("is mounted there already"),
        "{error}"
    );
    nix::mount::umount2(&at, MntFlags::empty()).unwrap();
}
