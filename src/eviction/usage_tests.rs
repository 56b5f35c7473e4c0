use std::fs::{self, File};

use nix::sys::stat::mkdirat;

use super::*;

fn bytes(path: &Path) -> u64 {
    let measured = measure(path, &Stop::default());
    assert!(measured.missed.is_none(), "{:?}", measured.missed);
    measured.usage.bytes
}

fn write(dir: &OwnedFd, name: &CStr, bytes: usize) {
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_CLOEXEC;
    let file = openat(dir, name, flags, Mode::S_IRWXU).unwrap();
    assert_eq!(nix::unistd::write(&file, &vec![7; bytes]).unwrap(), bytes);
}

#[test]
fn usage_is_what_the_disk_gives_not_what_files_claim() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let empty = bytes(dir.path());
    fs::create_dir(at("sub")).unwrap();
    fs::write(at("sub/full"), vec![1_u8; 1 << 20]).unwrap();
    let one = bytes(dir.path());
    assert!((1 << 20..2 << 20).contains(&(one - empty)), "{empty} {one}");
    // A second name, a hole and a link to elsewhere take nothing worth speaking of.
    fs::hard_link(at("sub/full"), at("again")).unwrap();
    std::os::unix::fs::symlink("/", at("root")).unwrap();
    File::create(at("sparse"))
        .unwrap()
        .set_len(1 << 30)
        .unwrap();
    let same = bytes(dir.path());
    assert!(same < one + (1 << 16), "{one} {same}");
    assert_eq!(bytes(&at("nowhere")), 0);
    assert!(
        (1 << 20..2 << 20).contains(&bytes(&at("sub/full"))),
        "a file"
    );
    assert!(bytes(&at("root")) < 1 << 16, "a link is not followed");
}

#[test]
fn files_of_an_overlay_over_several_file_systems_count() {
    use nix::mount::{MntFlags, MsFlags, mount, umount2};
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for name in ["lower/sub", "other", "merged"] {
        fs::create_dir_all(at(name)).unwrap();
    }
    let none: Option<&str> = None;
    if mount(
        Some("x"),
        &at("other"),
        Some("tmpfs"),
        MsFlags::empty(),
        none,
    )
    .is_err()
    {
        return; // Only root may mount.
    }
    for name in ["other/upper", "other/work"] {
        fs::create_dir(at(name)).unwrap();
    }
    let options = format!(
        "lowerdir={},upperdir={},workdir={},xino=off",
        at("lower").display(),
        at("other/upper").display(),
        at("other/work").display()
    );
    let mounted = mount(
        Some("x"),
        &at("merged"),
        Some("overlay"),
        MsFlags::empty(),
        Some(&*options),
    );
    if mounted.is_ok() {
        fs::write(at("merged/sub/file"), vec![1_u8; 1 << 20]).unwrap();
        let counted = bytes(&at("merged/sub"));
        assert!((1 << 20..2 << 20).contains(&counted), "{counted}");
        // What is mounted there is somebody else's.
        fs::write(at("big"), vec![1_u8; 4 << 20]).unwrap();
        fs::write(at("merged/sub/place"), "").unwrap();
        mount(
            Some(&at("big")),
            &at("merged/sub/place"),
            none,
            MsFlags::MS_BIND,
            none,
        )
        .unwrap();
        let counted = bytes(&at("merged/sub"));
        umount2(&at("merged/sub/place"), MntFlags::MNT_DETACH).unwrap();
        assert!((1 << 20..2 << 20).contains(&counted), "{counted}");
        umount2(&at("merged"), MntFlags::MNT_DETACH).unwrap();
    }
    umount2(&at("other"), MntFlags::MNT_DETACH).unwrap();
}

#[test]
fn a_tree_deeper_than_any_path_is_measured() {
    let dir = tempfile::tempdir().unwrap();
    let mut at = open(dir.path(), readable(), Mode::empty()).unwrap();
    // Beside each directory there is another one with two more, so that the walk comes back to every level.
    let name = CString::new("d".repeat(60)).unwrap();
    for _ in 0..200 {
        for name in [c"beside", name.as_c_str()] {
            mkdirat(&at, name, Mode::S_IRWXU).unwrap();
        }
        let beside = openat(&at, c"beside", readable(), Mode::empty()).unwrap();
        for name in [c"a", c"b"] {
            mkdirat(&beside, name, Mode::S_IRWXU).unwrap();
        }
        write(&beside, c"file", 20_000);
        at = openat(&at, name.as_c_str(), readable(), Mode::empty()).unwrap();
    }
    write(&at, c"bottom", 20_000);
    let measured = measure(dir.path(), &Stop::default());
    assert!(measured.missed.is_none(), "{:?}", measured.missed);
    // The root, four directories and a file on each level, the file at the bottom.
    assert_eq!(measured.usage.inodes, 1 + 200 * 5 + 1);
    let used = measured.usage.bytes;
    assert!((201 * 20_000..12 << 20).contains(&used), "{used}");
}

#[test]
fn what_is_mounted_below_counts_nothing() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    use nix::mount::{MntFlags, MsFlags, mount, umount2};
    let dir = tempfile::tempdir().unwrap();
    let (tree, outside) = (dir.path().join("tree"), dir.path().join("outside"));
    let point = tree.join("point");
    fs::create_dir_all(&point).unwrap();
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("big"), vec![7; 1 << 20]).unwrap();
    let none: Option<&str> = None;
    // The same file system: device numbers do not tell.
    mount(Some(&outside), &point, none, MsFlags::MS_BIND, none).unwrap();
    let measured = measure(&tree, &Stop::default());
    umount2(&point, MntFlags::MNT_DETACH).unwrap();
    assert!(measured.missed.is_none(), "{:?}", measured.missed);
    assert_eq!(measured.usage.inodes, 1);
}

#[test]
fn memory_is_bounded_and_what_was_counted_counts() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("big"), vec![7; 1 << 20]).unwrap();
    for n in 0..100 {
        fs::create_dir(dir.path().join(n.to_string())).unwrap();
    }
    let stop = Stop::default();
    let measured = measure_within(dir.path(), &stop, 1000);
    assert!(matches!(measured.missed, Some(Missed::TooMuch)));
    assert!(measured.usage.bytes >= 1 << 20);
    assert!((3..100).contains(&measured.usage.inodes));
    let links = tempfile::tempdir().unwrap();
    for n in 0..100 {
        let file = links.path().join(n.to_string());
        fs::write(&file, "").unwrap();
        fs::hard_link(&file, links.path().join(format!("{n}-again"))).unwrap();
    }
    let measured = measure_within(links.path(), &stop, 1000);
    assert!(matches!(measured.missed, Some(Missed::TooMuch)));
    assert!((3..100).contains(&measured.usage.inodes));
}

#[test]
fn a_walk_ends_when_it_is_told_to() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    let stop = Stop::default();
    stop.set();
    let measured = measure(dir.path(), &stop);
    assert!(matches!(measured.missed, Some(Missed::Stopped)));
}

#[test]
fn the_way_back_leads_to_the_directory_it_came_from_or_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("a/b")).unwrap();
    fs::create_dir(dir.path().join("c")).unwrap();
    let opened = |path: &str| open(&dir.path().join(path), readable(), Mode::empty()).unwrap();
    let (from, below) = (id(&fstat(opened("a")).unwrap()), opened("a/b"));
    assert!(up(&below, from).is_ok());
    fs::rename(dir.path().join("a/b"), dir.path().join("c/b")).unwrap();
    assert!(matches!(up(&below, from), Err(Missed::Moved)));
}
