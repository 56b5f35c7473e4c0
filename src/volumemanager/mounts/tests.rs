use super::*;

#[test]
fn mountinfo_is_read_with_its_escapes() {
    let table = b"36 35 98:0 /a /mnt\\0402/a\\134b rw,noatime master:1 shared:2 - nfs4 [fd00::1]:/x\\040y rw,vers=4.2\n\
        garbage\n37 35 0:9 / /ro ro - tmpfs tmpfs rw\n38 35 0:9 / /sb rw - tmpfs tmpfs ro\n";
    let all = parse(table);
    assert_eq!(
        all[0],
        Mount {
            id: "36".to_owned(),
            parent: "35".to_owned(),
            device: "98:0".to_owned(),
            root: "/a".into(),
            point: "/mnt 2/a\\b".into(),
            fstype: "nfs4".to_owned(),
            source: "[fd00::1]:/x y".to_owned(),
            read_only: false,
            shared: Some("2".to_owned()),
            master: Some("1".to_owned()),
            has_labels: false,
        }
    );
    // One with labels, and one whose files all have that of the mount.
    let table = b"36 35 8:1 / /a rw - ext4 /dev/sda rw,seclabel\n37 35 8:2 / /b rw - ext4 /dev/sdb rw,context=\"u:r:t:s0\"\n";
    let labels: Vec<_> = parse(table).iter().map(|m| m.has_labels).collect();
    assert_eq!(labels, [true, false]);
    let read_only: Vec<_> = all.iter().map(|m| m.read_only).collect();
    assert_eq!(read_only, [false, true, true]);
}

/// A table with `/` (1), its agent's directory bound on itself (2), and these.
fn table(more: &str) -> Table {
    let base = "1 0 8:1 / / rw shared:1 - ext4 /dev/sda rw\n2 1 8:1 /k /k rw shared:1 - ext4 /dev/sda rw\n";
    Table::of(parse(format!("{base}{more}").as_bytes()))
}

fn ids(mounts: &[&Mount]) -> Vec<String> {
    mounts.iter().map(|m| m.id.clone()).collect()
}

#[test]
fn a_mount_over_another_is_told_from_a_copy_in_what_is_covered() {
    // The copy in `/` first, and last.
    for copies in [
        "5 1 0:9 / /k/v rw shared:7 - tmpfs x rw\n6 2 0:9 / /k/v rw shared:7 - tmpfs x rw\n",
        "6 2 0:9 / /k/v rw shared:7 - tmpfs x rw\n5 1 0:9 / /k/v rw shared:7 - tmpfs x rw\n",
    ] {
        let copies = table(copies);
        assert_eq!(ids(&copies.stack(Path::new("/k/v"))), ["6"]);
        copies.alone(Path::new("/k/v")).unwrap();
        let holding = copies.holding("/k/v".into()).count();
        assert_eq!(holding, 2, "both hold the directory");
    }
    let stacked = table(
        "7 6 0:10 / /k/v rw - tmpfs y rw\n6 2 0:9 / /k/v rw - nfs4 s:/x rw\n5 1 0:9 / /k/v rw - nfs4 s:/x rw\n",
    );
    assert_eq!(ids(&stacked.stack(Path::new("/k/v"))), ["6", "7"]);
    let error = stacked.alone(Path::new("/k/v")).unwrap_err();
    assert!(error.to_string().contains("y (tmpfs) is mounted over it"));
}

#[test]
fn what_another_file_system_covers_is_not_there() {
    let covered = Table::of(parse(
        b"1 0 8:1 / / rw - ext4 /dev/sda rw\n5 1 0:9 / /k/v rw - tmpfs x rw\n2 1 8:2 / /k rw - ext4 /dev/sdb rw\n",
    ));
    assert_eq!(ids(&covered.stack(Path::new("/k/v"))), [""; 0]);
    assert_eq!(covered.holding("/k/v".into()).count(), 0);
}

#[test]
fn a_copy_of_a_mount_elsewhere_is_no_stranger_and_the_only_one_is() {
    // A disk's directory `/data` bound for a pod, and a mount in it.
    let inside = |tags: &str, more: &str| {
        table(&format!(
            "5 2 8:1 /data /k/v rw shared:1 - ext4 /dev/sda rw\n6 5 0:9 / /k/v/usb rw {tags} - tmpfs x rw\n{more}"
        ))
        .alone(Path::new("/k/v"))
    };
    let origin = "8 1 0:9 / /data/usb rw shared:9 - tmpfs x rw\n";
    inside("shared:9", origin).unwrap();
    inside("master:9", origin).unwrap();
    for (tags, more) in [
        ("", ""),
        // The same file system, but mounted by somebody on its own, or at another place.
        ("", origin),
        (
            "shared:9",
            "8 1 0:9 / /other/usb rw shared:9 - tmpfs x rw\n",
        ),
        (
            "shared:9",
            "8 1 0:9 /part /data/usb rw shared:9 - tmpfs x rw\n",
        ),
    ] {
        let error = inside(tags, more).unwrap_err().to_string();
        assert_eq!(
            error, "/k/v/usb is mounted; unmount it first",
            "{tags} {more}"
        );
    }
}

// Invariant VOL-8.
#[test]
fn what_may_hang_is_not_looked_at() {
    let dir = tempfile::tempdir().unwrap();
    let own = dir.path().canonicalize().unwrap();
    // Whoever follows it fails.
    let point = own.join("point");
    std::os::unix::fs::symlink(&point, &point).unwrap();
    let mount = |point: PathBuf| Mount {
        point,
        fstype: "nfs4".to_owned(),
        ..Mount::default()
    };
    let table = Table::of(vec![mount(point.clone()), mount(point.join("inside"))]);
    // The agent's own directories may be reached through links.
    let link = own.join("link");
    std::os::unix::fs::symlink(&own, &link).unwrap();
    for point in [point.clone(), link.join("point")] {
        assert_eq!(table.at(&point).unwrap().unwrap().fstype, "nfs4");
        assert_eq!(table.below(&point).unwrap().count(), 2);
    }
    let below = table.points_below(&link).unwrap();
    assert!(below.contains(&link.join("point/inside")), "{below:?}");
    assert!(table.at(&own.join("no/such")).unwrap().is_none());
}

/// A kernel by hand: what it has mounted, and whether it says so.
#[derive(Default)]
struct Fake {
    points: Mutex<Vec<PathBuf>>,
    changed: Mutex<Option<bool>>,
    /// Held while the table is read.
    reading: Mutex<()>,
}

impl Kernel for Arc<Fake> {
    fn read(&self) -> io::Result<Table> {
        let _reading = self.reading.lock().unwrap();
        let points = self.points.lock().unwrap();
        Ok(Table::of(points.iter().cloned().map(Mount::fake).collect()))
    }

    fn changed(&self) -> Option<bool> {
        let mut changed = self.changed.lock().unwrap();
        let told = *changed;
        // It is told once.
        *changed = told.map(|_| false);
        told
    }
}

fn fake(root: &Path) -> (Arc<Fake>, Source) {
    let fake = Arc::new(Fake::default());
    (Arc::clone(&fake), Source::with(root, fake))
}

#[test]
fn a_table_is_kept_as_long_as_the_kernel_says_that_it_is_the_newest() {
    let (kernel, source) = fake(Path::new("/"));
    let point = Path::new("/a");
    let look = || {
        (
            source.read().unwrap().mount_at(point).is_some(),
            source.reads(),
        )
    };
    let says = |changed| *kernel.changed.lock().unwrap() = changed;
    // It cannot tell.
    assert_eq!((look(), look()), ((false, 1), (false, 2)));
    // It says nothing has changed, but never told of anything: nobody knows that it would.
    says(Some(false));
    assert_eq!((look(), look()), ((false, 3), (false, 4)));
    kernel.points.lock().unwrap().push(point.into());
    assert_eq!(look(), (true, 5));
    says(Some(true));
    assert_eq!((look(), look(), look()), ((true, 6), (true, 6), (true, 6)));
    kernel.points.lock().unwrap().clear();
    says(Some(true));
    assert_eq!((look(), look()), ((false, 7), (false, 7)));
    // It cannot tell any more.
    says(None);
    assert_eq!((look(), look()), ((false, 8), (false, 9)));
}

#[test]
fn a_table_answers_all_who_asked_before_it_was_read() {
    let (kernel, source) = fake(Path::new("/"));
    let reading = kernel.reading.lock().unwrap();
    let ask = || {
        let source = source.clone();
        let is_there = move || source.read().unwrap().mount_at(Path::new("/a")).is_some();
        std::thread::spawn(is_there)
    };
    let first = ask();
    while source.reads() < 1 {
        std::thread::yield_now();
    }
    // What was read before it came does not answer these.
    kernel.points.lock().unwrap().push("/a".into());
    let others: Vec<_> = (0..20).map(|_| ask()).collect();
    while source.0.asked.load(SeqCst) < 21 {
        std::thread::yield_now();
    }
    drop(reading);
    first.join().unwrap();
    for other in others {
        assert!(other.join().unwrap());
    }
    assert_eq!(source.reads(), 2);
}

#[test]
fn the_directories_of_the_agent_are_looked_up_once_and_may_be_links() {
    let dir = tempfile::tempdir().unwrap();
    let own = dir.path().canonicalize().unwrap();
    let (root, disk) = (own.join("root"), own.join("disk"));
    let (kernel, source) = fake(&root);
    assert!(
        source
            .read()
            .unwrap()
            .mount_at(&root.join("pods/p/v"))
            .is_none()
    );
    for dir in [&root, &disk, &root.join("plugins")] {
        fs::create_dir(dir).unwrap();
    }
    std::os::unix::fs::symlink(&disk, root.join("pods")).unwrap();
    let points = [disk.join("p/v"), root.join("plugins/d"), own.join("other")];
    kernel.points.lock().unwrap().extend(points);
    let seen = source.read().unwrap();
    for path in [
        root.join("pods/p/v"),
        root.join("plugins/d"),
        own.join("other"),
    ] {
        assert!(seen.mount_at(&path).is_some(), "{}", path.display());
    }
    assert!(seen.mount_at(&root.join("pods/p")).is_none());
    // No path is looked at any more.
    fs::remove_file(root.join("pods")).unwrap();
    assert!(
        source
            .read()
            .unwrap()
            .mount_at(&root.join("pods/p/v"))
            .is_some()
    );
}

#[test]
fn the_kernel_tells_of_mounts() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    use nix::mount::{MntFlags, MsFlags, mount, umount2};
    let dir = tempfile::tempdir().unwrap();
    let point = dir.path().canonicalize().unwrap();
    let source = Source::new(&point);
    let is_there = || source.read().unwrap().mount_at(&point).is_some();
    assert!(!is_there());
    for _ in 0..3 {
        let none: Option<&str> = None;
        mount(Some("tmpfs"), &point, Some("tmpfs"), MsFlags::empty(), none).unwrap();
        let mounted = is_there();
        umount2(&point, MntFlags::MNT_DETACH).unwrap();
        assert!(mounted && !is_there());
    }
    assert!(source.0.kept.lock().unwrap().tells);
}

#[test]
fn the_topmost_of_several_mounts_at_one_point_counts() {
    let table = table(
        "4 3 0:4 / /b rw - upper x rw\n3 1 0:3 / /b rw - lower x rw\n5 1 0:5 / /a rw - a x rw\n\
         6 4 0:6 / /b/c rw - c x rw\n7 3 0:7 / /b/d rw - covered x rw\n",
    );
    let view = View {
        table: Arc::new(table),
        bases: Bases::default(),
    };
    let top = |point: &str| view.mount_at(Path::new(point)).map(|m| m.fstype.as_str());
    assert_eq!(
        [top("/a"), top("/b"), top("/b/c"), top("/")],
        [Some("a"), Some("upper"), Some("c"), Some("ext4")]
    );
    assert_eq!([top("/b/d"), top("/aa"), top("/c")], [None; 3]);
}
