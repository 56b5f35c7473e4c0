use std::os::unix::fs::MetadataExt;

use super::*;
use crate::volumemanager::attached::tests::nothing;
use crate::volumemanager::block::tests::loops;
use crate::volumemanager::stand_in::{StandIns, Swept, can_mount, remote, resolved, target};

fn volume(path: &Path, fs_type: Option<&str>, mode: VolumeMode) -> Remote {
    let mut remote = remote(Source::Local(LocalVolumeSource {
        path: path.to_string_lossy().into_owned(),
        fs_type: fs_type.map(str::to_owned),
    }));
    remote.mode = mode;
    remote
}

fn plugin() -> LocalPlugin {
    LocalPlugin::new(Tools::default(), nothing())
}

#[tokio::test]
async fn paths_that_are_nothing_or_climb_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("at");
    let fs_mode = VolumeMode::Filesystem;
    let stage = |volume: Remote| plugin().stage(resolved(volume), at.clone());
    let absent = dir.path().join("absent");
    assert_eq!(
        stage(volume(&absent, None, fs_mode))
            .await
            .unwrap_err()
            .to_string(),
        format!("path \"{}\" does not exist", absent.display())
    );
    for wrong in ["/mnt/../etc", "relative", ""] {
        let error = stage(volume(Path::new(wrong), None, fs_mode))
            .await
            .unwrap_err();
        assert!(error.to_string().starts_with("invalid path: "), "{error}");
    }
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    let error = stage(volume(&file, None, fs_mode)).await.unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("only directory and block device are supported"),
        "{error}"
    );
    let error = stage(volume(dir.path(), None, VolumeMode::Block))
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("neither a block device"),
        "{error}"
    );
    assert!(!at.exists());
}

#[tokio::test]
async fn a_directory_is_bound_to_each_pod_and_outlives_them() {
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let _swept = Swept(dir.path().to_owned());
    let users = dir.path().join("users");
    fs::create_dir(&users).unwrap();
    fs::write(users.join("kept"), "x").unwrap();
    let staged = dir.path().join("staged");
    let mut of = volume(&users, None, VolumeMode::Filesystem);
    plugin()
        .stage(resolved(of.clone()), staged.clone())
        .await
        .unwrap();
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    let publish = |of: &Remote, at: &Path| {
        plugin().publish(resolved(of.clone()), target(at, Some(staged.clone())))
    };
    assert_eq!(publish(&of, &one).await, Ok(GroupBy::Agent));
    // Again, as after a crash: not a second mount on top.
    assert_eq!(publish(&of, &one).await, Ok(GroupBy::Agent));
    fs::write(one.join("new"), "y").unwrap();
    of.read_only = true;
    assert_eq!(publish(&of, &two).await, Ok(GroupBy::Nobody));
    assert!(two.join("new").exists());
    assert_eq!(
        fs::write(two.join("no"), "").unwrap_err().kind(),
        io::ErrorKind::ReadOnlyFilesystem
    );
    let mounts = disk::table().unwrap();
    let below = mounts.iter().filter(|m| m.point.starts_with(dir.path()));
    assert_eq!(below.count(), 2);
    for at in [&one, &two] {
        plugin()
            .unpublish(Arc::new(of.clone()), at.clone())
            .await
            .unwrap();
        assert!(!at.exists());
    }
    plugin().unstage(Arc::new(of), staged).await.unwrap();
    assert!(users.join("kept").exists() && users.join("new").exists());
}

#[tokio::test]
async fn a_directory_is_bound_with_the_options_of_its_volume() {
    use nix::sys::statvfs::{FsFlags, statvfs};
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let _swept = Swept(dir.path().to_owned());
    let (users, at) = (dir.path().join("users"), dir.path().join("at"));
    fs::create_dir(&users).unwrap();
    let mut of = volume(&users, None, VolumeMode::Filesystem);
    of.mount_options = vec!["noexec".to_owned(), "nosuid".to_owned()];
    of.read_only = true;
    for _ in 0..2 {
        plugin()
            .publish(resolved(of.clone()), target(&at, None))
            .await
            .unwrap();
        let flags = statvfs(&at).unwrap().flags();
        let wanted = FsFlags::ST_NOEXEC | FsFlags::ST_NOSUID | FsFlags::ST_RDONLY;
        assert!(flags.contains(wanted), "{flags:?}");
    }
    let flags = statvfs(&users).unwrap().flags();
    assert!(!flags.contains(FsFlags::ST_RDONLY), "{flags:?}");
    plugin().unpublish(Arc::new(of), at.clone()).await.unwrap();
    assert!(!at.exists() && users.exists());
}

#[tokio::test]
async fn another_directory_in_the_target_is_not_taken_for_it() {
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let _swept = Swept(dir.path().to_owned());
    let at = dir.path().join("at");
    let of = |name: &str| {
        let path = dir.path().join(name);
        fs::create_dir_all(&path).unwrap();
        volume(&path, None, VolumeMode::Filesystem)
    };
    let publish = |of| plugin().publish(resolved(of), target(&at, None));
    publish(of("a")).await.unwrap();
    let error = publish(of("b")).await.unwrap_err();
    assert!(
        error.to_string().contains("is mounted there already"),
        "{error}"
    );
    plugin()
        .unpublish(Arc::new(of("a")), at.clone())
        .await
        .unwrap();
}

/// A disk of so many MiB: a loop device of the test's own, with all that takes it away.
struct Disk {
    dir: tempfile::TempDir,
    device: PathBuf,
    _swept: Swept,
}

impl Disk {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("image");
        fs::File::create(&file).unwrap().set_len(32 << 20).unwrap();
        Self {
            device: block::attach_loop(&Tools::default(), &nothing(), &file)
                .await
                .unwrap(),
            _swept: Swept(dir.path().to_owned()),
            dir,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        drop(Swept(self.dir.path().to_owned()));
        drop(
            std::process::Command::new("losetup")
                .arg("-d")
                .arg(&self.device)
                .status(),
        );
    }
}

fn tools_for_disks() -> bool {
    loops()
        && ["mkfs.ext4", "fsck", "blkid"]
            .iter()
            .all(|t| Tools::default().find(t).is_some())
}

#[tokio::test]
async fn an_empty_disk_is_formatted_once_and_shared_by_pods() {
    if !tools_for_disks() {
        return;
    }
    let disk = Disk::new().await;
    let (staged, one, two) = (disk.path("staged"), disk.path("one"), disk.path("two"));
    let mut of = volume(&disk.device, None, VolumeMode::Filesystem);
    of.mount_options = vec!["noatime".to_owned()];
    let plugin = plugin();
    let stage = || plugin.stage(resolved(of.clone()), staged.clone());
    let early = plugin.publish(resolved(of.clone()), target(&one, Some(staged.clone())));
    assert!(
        early
            .await
            .unwrap_err()
            .to_string()
            .contains("has to be first")
    );
    stage().await.unwrap();
    stage().await.unwrap();
    let found = mounted_at(&staged).unwrap().unwrap();
    assert_eq!(
        (found.fstype.as_str(), found.source),
        ("ext4", disk.device.display().to_string())
    );
    for at in [&one, &two] {
        let done = plugin.publish(resolved(of.clone()), target(at, Some(staged.clone())));
        assert_eq!(done.await, Ok(GroupBy::Agent));
    }
    fs::write(one.join("data"), "kept").unwrap();
    assert_eq!(fs::read_to_string(two.join("data")).unwrap(), "kept");
    let of = Arc::new(of.clone());
    for at in [one, two] {
        plugin.unpublish(Arc::clone(&of), at.clone()).await.unwrap();
        assert!(!at.exists());
    }
    plugin
        .unstage(Arc::clone(&of), staged.clone())
        .await
        .unwrap();
    plugin
        .unstage(Arc::clone(&of), staged.clone())
        .await
        .unwrap();
    assert!(!staged.exists());
    // The next pod finds what the former one wrote.
    plugin
        .stage(resolved((*of).clone()), staged.clone())
        .await
        .unwrap();
    assert_eq!(fs::read_to_string(staged.join("data")).unwrap(), "kept");
    plugin.unstage(of, staged).await.unwrap();
}

#[tokio::test]
async fn a_disk_that_holds_anything_is_never_formatted() {
    if !tools_for_disks() {
        return;
    }
    let disk = Disk::new().await;
    let staged = disk.path("staged");
    // The first sector of a disk with an MBR partition, and the header of a LUKS one.
    let mut mbr = vec![0_u8; 4096];
    mbr[446..462].copy_from_slice(&[0, 0, 2, 0, 0x83, 0, 0, 0, 1, 0, 0, 0, 0, 0x40, 0, 0]);
    mbr[510..512].copy_from_slice(&[0x55, 0xaa]);
    let mut luks = vec![0_u8; 4096];
    luks[..8].copy_from_slice(b"LUKS\xba\xbe\0\x01");
    for (header, what) in [(mbr, "partitions"), (luks, "crypto_LUKS")] {
        fs::write(&disk.device, &header).unwrap();
        let of = volume(&disk.device, Some("ext4"), VolumeMode::Filesystem);
        let error = plugin()
            .stage(resolved(of), staged.clone())
            .await
            .unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
        let now = fs::read(disk.path("image")).unwrap();
        assert_eq!(now[..4096], header, "{what}: untouched");
        assert!(mounted_at(&staged).unwrap().is_none());
    }
}

#[tokio::test]
async fn a_disk_can_be_had_raw_as_a_device_or_a_file() {
    if !tools_for_disks() {
        return;
    }
    let disk = Disk::new().await;
    let number = |p: &Path| fs::metadata(p).unwrap().rdev();
    let file = disk.path("second image");
    fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
    let plugin = plugin();
    for path in [disk.device.clone(), file.clone()] {
        let (staged, at) = (disk.path("staged"), disk.path("volumeDevices/pv"));
        let of = volume(&path, None, VolumeMode::Block);
        plugin
            .stage(resolved(of.clone()), staged.clone())
            .await
            .unwrap();
        // Twice, as after a restart.
        for _ in 0..2 {
            let done = plugin.publish(resolved(of.clone()), target(&at, Some(staged.clone())));
            assert_eq!(done.await, Ok(GroupBy::Nobody));
        }
        assert_eq!(number(&at), number(&staged));
        fs::OpenOptions::new().write(true).open(&at).unwrap();
        let of = Arc::new(of);
        plugin.unpublish(Arc::clone(&of), at.clone()).await.unwrap();
        plugin.unstage(of, staged.clone()).await.unwrap();
        assert!(!at.is_symlink() && !staged.is_symlink());
    }
    let told = fs::read_dir("/sys/block").unwrap().flatten();
    let mut files =
        told.filter_map(|e| fs::read_to_string(e.path().join("loop/backing_file")).ok());
    let left = files.any(|f| f.contains("second image"));
    assert!(!left, "its loop device is detached");
    assert!(file.exists());
}

#[tokio::test]
async fn a_disk_that_was_grown_gets_its_file_system_grown() {
    if !tools_for_disks() || Tools::default().find("resize2fs").is_none() {
        return;
    }
    let disk = Disk::new().await;
    let staged = disk.path("staged");
    let of = volume(&disk.device, Some("ext4"), VolumeMode::Filesystem);
    let plugin = plugin();
    plugin
        .stage(resolved(of.clone()), staged.clone())
        .await
        .unwrap();
    let size = |p: &Path| nix::sys::statvfs::statvfs(p).unwrap().blocks();
    let before = size(&staged);
    let image = fs::OpenOptions::new()
        .write(true)
        .open(disk.path("image"))
        .unwrap();
    image.set_len(96 << 20).unwrap();
    let grown = std::process::Command::new("losetup")
        .arg("-c")
        .arg(&disk.device)
        .status();
    assert!(grown.unwrap().success());
    let done = plugin.expand(
        resolved(of.clone()),
        Some(staged.clone()),
        disk.path("at"),
        96 << 20,
    );
    if !may_grow() {
        // The kernel grows a mounted ext4 only for who has CAP_SYS_RESOURCE.
        let error = done.await.unwrap_err().to_string();
        assert!(error.contains("Permission denied to resize"), "{error}");
        plugin.unstage(Arc::new(of), staged).await.unwrap();
        return;
    }
    assert_eq!(done.await, Ok(Some(96 << 20)));
    assert!(size(&staged) > 2 * before, "{before} {}", size(&staged));
    plugin.unstage(Arc::new(of), staged).await.unwrap();
}

/// Returns whether this process has CAP_SYS_RESOURCE.
fn may_grow() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let effective = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    let effective = u64::from_str_radix(effective.unwrap().trim(), 16).unwrap();
    effective & (1 << 24) != 0
}

#[tokio::test]
async fn a_dropped_stage_goes_on_and_the_next_waits_for_it() {
    if !loops() {
        return;
    }
    let disk = Disk::new().await;
    let tools = StandIns::new(&["mount"]);
    tools.script("blkid", "exit 2");
    let (begun, may) = (tools.path("begun"), tools.path("may"));
    tools.script(
        "mkfs.ext4",
        &format!(
            "echo > {}; while [ ! -e {} ]; do sleep 0.05; done",
            begun.display(),
            may.display()
        ),
    );
    let plugin = LocalPlugin::new(tools.tools(), nothing());
    let of = volume(&disk.device, None, VolumeMode::Filesystem);
    let stage = || plugin.stage(resolved(of.clone()), disk.path("staged"));
    let first = tokio::spawn(stage());
    while !begun.exists() {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    let mut next = stage();
    assert!(futures::poll!(&mut next).is_pending());
    tools.script("blkid", "echo TYPE=ext4");
    tools.script("fsck", "");
    fs::write(may, "").unwrap();
    next.await.unwrap();
    let formatted = tools
        .calls()
        .iter()
        .filter(|c| c.starts_with("mkfs"))
        .count();
    assert_eq!(formatted, 1);
}
