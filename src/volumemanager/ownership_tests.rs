use std::os::unix::fs::{MetadataExt, symlink};

use super::*;

const GROUP: u32 = 54_321;

fn dir_with(path: &Path, mode: u32) {
    fs::create_dir_all(path).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn file_with(path: &Path, mode: u32) {
    fs::write(path, "x").unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn look(path: &Path) -> (u32, u32) {
    let found = fs::symlink_metadata(path).unwrap();
    (found.gid(), found.mode() & PERMISSIONS)
}

/// A volume in a directory with something outside that must never change.
fn volume() -> (tempfile::TempDir, PathBuf, PathBuf) {
    let base = tempfile::tempdir().unwrap();
    let (volume, outside) = (base.path().join("volume"), base.path().join("outside"));
    dir_with(&volume, 0o755);
    dir_with(&outside, 0o700);
    file_with(&outside.join("secret"), 0o600);
    (base, volume, outside)
}

fn untouched(outside: &Path) {
    assert_ne!(look(outside).0, GROUP);
    assert_eq!(look(outside).1, 0o700);
    assert_ne!(look(&outside.join("secret")).0, GROUP);
    assert_eq!(look(&outside.join("secret")).1, 0o600);
}

#[test]
fn everything_gets_the_group_and_what_a_group_needs() {
    for (access, file, dir, exact) in [
        (Access::ReadWrite, 0o664, 0o2775, 0o660),
        (Access::ReadOnly, 0o644, 0o2755, 0o640),
    ] {
        let (_base, volume, _) = volume();
        dir_with(&volume.join("deep/er"), 0o755);
        file_with(&volume.join("deep/er/file"), 0o644);
        file_with(&volume.join("private"), 0o600);
        nix::unistd::mkfifo(&volume.join("pipe"), Mode::from_bits_truncate(0o600)).unwrap();
        give(&volume, GROUP, access, ChangePolicy::Always).unwrap();
        for (path, mode) in [
            ("", dir),
            ("deep", dir),
            ("deep/er", dir),
            ("deep/er/file", file),
            ("private", exact),
            ("pipe", exact),
        ] {
            assert_eq!(
                look(&volume.join(path)),
                (GROUP, mode),
                "{access:?} {path:?}"
            );
        }
        // What is made later belongs to the group as well.
        file_with(&volume.join("deep/later"), 0o600);
        assert_eq!(look(&volume.join("deep/later")).0, GROUP);
        // Again: nothing changes.
        give(&volume, GROUP, access, ChangePolicy::Always).unwrap();
        assert_eq!(look(&volume.join("deep")), (GROUP, dir));
    }
}

#[test]
fn links_are_given_themselves_and_never_followed() {
    let (_base, volume, outside) = volume();
    symlink(&outside, volume.join("dir")).unwrap();
    symlink(outside.join("secret"), volume.join("file")).unwrap();
    symlink("nowhere", volume.join("dangling")).unwrap();
    give(&volume, GROUP, Access::ReadWrite, ChangePolicy::Always).unwrap();
    for name in ["dir", "file", "dangling"] {
        assert_eq!(look(&volume.join(name)).0, GROUP, "{name}");
    }
    untouched(&outside);
    // Nor when the volume itself is one.
    let link = volume.with_file_name("link");
    symlink(&outside, &link).unwrap();
    give(&link, GROUP, Access::ReadWrite, ChangePolicy::Always).unwrap_err();
    give_one(&link, GROUP, Access::ReadWrite).unwrap_err();
    untouched(&outside);
}

#[test]
fn what_is_mounted_below_is_not_touched() {
    use nix::mount::{MntFlags, MsFlags, mount, umount2};
    let (_base, volume, outside) = volume();
    let (bind, tmpfs) = (volume.join("bind"), volume.join("tmpfs"));
    dir_with(&bind, 0o755);
    dir_with(&tmpfs, 0o755);
    let none: Option<&str> = None;
    mount(Some(&outside), &bind, none, MsFlags::MS_BIND, none).unwrap();
    mount(
        Some("tmpfs"),
        &tmpfs,
        Some("tmpfs"),
        MsFlags::empty(),
        Some("mode=0755"),
    )
    .unwrap();
    let result = give(&volume, GROUP, Access::ReadWrite, ChangePolicy::Always);
    let in_tmpfs = look(&tmpfs);
    umount2(&tmpfs, MntFlags::MNT_DETACH).unwrap();
    umount2(&bind, MntFlags::MNT_DETACH).unwrap();
    result.unwrap();
    untouched(&outside);
    assert_eq!(in_tmpfs, (0, 0o755));
    assert_eq!(look(&volume).0, GROUP);
}

#[test]
fn on_root_mismatch_goes_by_the_root_alone() {
    let (_base, volume, _) = volume();
    let file = volume.join("file");
    file_with(&file, 0o600);
    let policy = ChangePolicy::OnRootMismatch;
    give(&volume, GROUP, Access::ReadWrite, policy).unwrap();
    assert_eq!(look(&file), (GROUP, 0o660), "the root did not match");
    file_with(&file, 0o600);
    give(&volume, GROUP, Access::ReadWrite, policy).unwrap();
    assert_eq!(look(&file).1, 0o600, "it does now");
    for mode in [0o775, 0o2755] {
        fs::set_permissions(&volume, fs::Permissions::from_mode(mode)).unwrap();
        file_with(&file, 0o600);
        give(&volume, GROUP, Access::ReadWrite, policy).unwrap();
        assert_eq!(look(&file).1, 0o660, "root {mode:o}");
    }
    give(&volume, GROUP + 1, Access::ReadWrite, policy).unwrap();
    assert_eq!(look(&file).0, GROUP + 1, "another group");
    file_with(&file, 0o600);
    give(&volume, GROUP + 1, Access::ReadWrite, ChangePolicy::Always).unwrap();
    assert_eq!(look(&file).1, 0o660);
}

#[test]
fn the_policy_is_the_pods() {
    for (written, want) in [
        (None, ChangePolicy::Always),
        (Some("Always"), ChangePolicy::Always),
        (Some("OnRootMismatch"), ChangePolicy::OnRootMismatch),
    ] {
        let pod: Pod = serde_json::from_value(serde_json::json!({"spec": {
            "containers": [], "securityContext": {"fsGroupChangePolicy": written},
        }}))
        .unwrap();
        assert_eq!(ChangePolicy::of(&pod), want, "{written:?}");
    }
}

#[test]
fn what_is_as_it_should_be_is_not_written() {
    let (_base, volume, _) = volume();
    dir_with(&volume.join("dir"), 0o755);
    for n in 0..100 {
        file_with(&volume.join(format!("dir/{n}")), 0o644);
    }
    symlink("nowhere", volume.join("link")).unwrap();
    let give = || {
        let counts = Counts::default();
        give_counting(
            &volume,
            GROUP,
            Access::ReadWrite,
            ChangePolicy::Always,
            &counts,
        )
        .unwrap();
        (counts.seen.into_inner(), counts.changed.into_inner())
    };
    let changed_at = || {
        let found = fs::symlink_metadata(volume.join("dir/7")).unwrap();
        (found.ctime(), found.ctime_nsec())
    };
    assert_eq!(give(), (103, 103));
    let before = changed_at();
    assert_eq!(give(), (103, 0));
    assert_eq!(changed_at(), before);
    file_with(&volume.join("dir/7"), 0o600);
    assert_eq!(give(), (103, 1));
}

#[test]
fn a_tree_that_is_deeper_than_any_stack_is_done_or_refused_and_nothing_breaks() {
    use nix::sys::stat::mkdirat;
    for (depth, name, fits) in [(1500, "d", true), (30_000, "d", false)] {
        let (_base, volume, _) = volume();
        let mut dir = open_root(&volume).unwrap();
        for _ in 0..depth {
            mkdirat(&dir, name, Mode::from_bits_truncate(0o755)).unwrap();
            let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
            dir = openat(&dir, name, flags, Mode::empty()).unwrap();
        }
        let result = give(&volume, GROUP, Access::ReadWrite, ChangePolicy::Always);
        assert_eq!(result.is_ok(), fits, "{depth}: {result:?}");
        assert_eq!(fstat(&dir).unwrap().st_gid == GROUP, fits);
        // The root is done last, so that another try is made.
        assert_eq!(look(&volume).0 == GROUP, fits);
        drop(dir);
        let removed = std::process::Command::new("rm")
            .arg("-rf")
            .arg(&volume)
            .status();
        assert!(removed.unwrap().success());
    }
}

#[test]
fn what_the_file_system_refuses_to_change_stays_as_it_is() {
    use nix::mount::{MntFlags, MsFlags, mount, umount2};
    let (_base, volume, _) = volume();
    let none: Option<&str> = None;
    let options = Some("mode=0755");
    mount(
        Some("tmpfs"),
        &volume,
        Some("tmpfs"),
        MsFlags::empty(),
        options,
    )
    .unwrap();
    dir_with(&volume.join("deep"), 0o755);
    file_with(&volume.join("deep/file"), 0o644);
    let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    mount(none, &volume, none, read_only, none).unwrap();
    let counts = Counts::default();
    let given = give_counting(
        &volume,
        GROUP,
        Access::ReadWrite,
        ChangePolicy::Always,
        &counts,
    );
    let one = give_one(&volume, GROUP, Access::ReadOnly);
    let kept = look(&volume.join("deep/file"));
    umount2(&volume, MntFlags::MNT_DETACH).unwrap();
    given.unwrap();
    one.unwrap();
    assert_eq!(kept.1, 0o644);
    assert_eq!(counts.changed.load(Ordering::Relaxed), 0);
    let (refused, why) = counts.refusals().unwrap();
    assert_eq!(
        (refused, why.kind()),
        (3, io::ErrorKind::ReadOnlyFilesystem)
    );
}
