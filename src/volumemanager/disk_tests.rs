use super::*;
use crate::volumemanager::stand_in::StandIns;

fn failure<T: std::fmt::Debug>(result: Result<T, RemoteError>) -> String {
    result.unwrap_err().to_string()
}

#[tokio::test]
async fn what_somebody_mounted_over_a_volume_is_not_unmounted() {
    use crate::volumemanager::stand_in::{Swept, can_mount};
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let _swept = Swept(dir.path().to_owned());
    let at = dir.path().join("at");
    fs::create_dir(&at).unwrap();
    let none: Option<&str> = None;
    for source in ["ours", "theirs"] {
        mount(Some(source), &at, Some("tmpfs"), MsFlags::empty(), none).unwrap();
    }
    let tools = Tools::default();
    for _ in 0..2 {
        let error = failure(unmount(&tools, &at, "volume pv").await);
        assert!(
            error.contains("theirs (tmpfs) is mounted over it"),
            "{error}"
        );
        let table = Table::read().unwrap();
        let left = table.all_at(&at).unwrap().len();
        assert_eq!(left, 2, "nothing is unmounted");
    }
    umount2(&at, MntFlags::empty()).unwrap();
    unmount(&tools, &at, "volume pv").await.unwrap();
    assert!(!at.exists());
}

#[test]
fn mount_options_are_joined_as_upstream_does() {
    let join = |own: &[&str], more: &[&str]| {
        let own: Vec<_> = own.iter().map(|o| (*o).to_owned()).collect();
        join_options(&own, more)
    };
    assert_eq!(
        join(&["vers=4.2", "hard", "noatime"], &["ro"]),
        Ok("hard,noatime,ro,vers=4.2".to_owned())
    );
    assert_eq!(join(&["ro", "ro"], &["ro"]), Ok("ro".to_owned()));
    assert_eq!(join(&[], &[]), Ok(String::new()));
    for wrong in ["-o", "", "a\nb", "a\0"] {
        assert!(
            failure(join(&["hard", wrong], &[])).contains("cannot be used"),
            "{wrong:?}"
        );
    }
}

#[test]
fn what_blkid_tells_is_understood() {
    for (told, content) in [
        (
            "DEVNAME=/dev/loop0\nUUID=1\nTYPE=ext4\nUSAGE=filesystem\n",
            Content::Type("ext4".to_owned()),
        ),
        (
            "TYPE=crypto_LUKS\nUSAGE=crypto\n",
            Content::Type("crypto_LUKS".to_owned()),
        ),
        (
            "PTUUID=1\nPTTYPE=gpt\n",
            Content::Other("unknown data, probably partitions (gpt)".to_owned()),
        ),
        (
            "TYPE=vfat\nPTTYPE=dos\n",
            Content::Other("unknown data, probably partitions (dos)".to_owned()),
        ),
        ("", Content::Other("unknown data".to_owned())),
    ] {
        assert_eq!(content_of(told), content, "{told}");
    }
}

#[test]
fn a_file_system_type_is_no_path_and_no_option() {
    for wrong in ["../sh", "-ext4", "ext4 -n", "EXT4"] {
        assert!(failure(Wanted::new(Some(wrong), &[], false)).contains("is no file system"));
    }
    let options = |read_only| {
        Wanted::new(Some("xfs"), &["noatime".to_owned()], read_only)
            .unwrap()
            .options
    };
    assert_eq!(options(false), "defaults,noatime");
    assert_eq!(options(true), "defaults,noatime,ro");
}

/// Runs the tools' stand-ins against a file in place of a device.
async fn with(tools: &StandIns, wanted: &Wanted) -> Result<(), RemoteError> {
    let device = tools.path("disk");
    fs::write(&device, vec![0_u8; 8192]).unwrap();
    format_and_mount(&tools.tools(), &device, &tools.path("at"), wanted).await
}

// Invariant VOL-11.
#[tokio::test]
async fn only_a_disk_with_nothing_on_it_is_formatted() {
    let ext4 = Wanted::new(None, &["noatime".to_owned()], false).unwrap();
    let read_only = Wanted::new(Some("ext4"), &[], true).unwrap();
    let tools = StandIns::new(&["mount", "mkfs.ext4", "mkfs.xfs", "fsck"]);
    let (disk, at) = (tools.path("disk"), tools.path("at"));
    let (disk, at) = (disk.display(), at.display());
    let blkid = format!("blkid -p -o export -- {disk}");

    tools.script("blkid", "exit 2");
    with(&tools, &ext4).await.unwrap();
    assert_eq!(
        tools.calls(),
        [
            blkid.clone(),
            format!("mkfs.ext4 -F -m0 {disk}"),
            format!("mount -t ext4 -o defaults,noatime -- {disk} {at}"),
        ]
    );

    tools.forget();
    let xfs = Wanted::new(Some("xfs"), &[], false).unwrap();
    with(&tools, &xfs).await.unwrap();
    assert_eq!(tools.calls()[1], format!("mkfs.xfs {disk}"));

    tools.forget();
    let error = failure(with(&tools, &read_only).await);
    assert!(error.contains("cannot mount unformatted disk"), "{error}");
    assert_eq!(tools.calls(), std::slice::from_ref(&blkid));

    // In doubt, or with something on it that is no file system.
    for body in ["exit 8", "exit 1", "echo PTTYPE=gpt", "echo UUID=1"] {
        tools.forget();
        tools.script("blkid", body);
        assert!(with(&tools, &ext4).await.is_err(), "{body}");
        assert_eq!(tools.calls(), std::slice::from_ref(&blkid), "{body}");
    }

    tools.forget();
    tools.script("blkid", "echo TYPE=ext3");
    with(&tools, &Wanted::new(None, &[], false).unwrap())
        .await
        .unwrap();
    assert_eq!(
        tools.calls()[1..],
        [
            format!("fsck -a {disk}"),
            format!("mount -t ext3 -o defaults -- {disk} {at}"),
        ]
    );

    tools.forget();
    with(&tools, &read_only).await.unwrap();
    assert_eq!(
        tools.calls()[1..],
        [format!("mount -t ext4 -o defaults,ro -- {disk} {at}")],
        "what is only read is not mended"
    );
}

#[tokio::test]
async fn what_cannot_be_read_is_not_taken_for_empty() {
    let tools = StandIns::new(&["mount", "mkfs.ext4", "fsck"]);
    tools.script("blkid", "exit 2");
    let wanted = Wanted::new(None, &[], false).unwrap();
    let absent = tools.path("absent");
    let done = format_and_mount(&tools.tools(), &absent, &tools.path("at"), &wanted).await;
    assert!(failure(done).contains("open device"));
    let short = tools.path("short");
    fs::write(&short, "x").unwrap();
    let done = format_and_mount(&tools.tools(), &short, &tools.path("at"), &wanted).await;
    assert!(failure(done).contains("read device"));
    assert_eq!(tools.calls(), [""; 0]);
}

#[tokio::test]
async fn a_broken_file_system_is_told_and_not_mounted() {
    let tools = StandIns::new(&["mount"]);
    tools.script("blkid", "echo TYPE=ext4");
    tools.script("fsck", "echo 'UNEXPECTED INCONSISTENCY'; exit 4");
    let wanted = Wanted::new(Some("ext4"), &[], false).unwrap();
    let error = failure(with(&tools, &wanted).await);
    assert!(
        error.contains("'fsck' found errors on device") && error.contains("UNEXPECTED"),
        "{error}"
    );
    tools.script("fsck", "exit 1");
    with(&tools, &wanted).await.unwrap();
    assert!(
        tools.calls().last().unwrap().starts_with("mount "),
        "what was mended is mounted"
    );
    tools.script("mount", "echo 'wrong fs type' >&2; exit 32");
    let failed = with(&tools, &wanted).await;
    assert!(matches!(failed, Err(RemoteError::Failed(_))), "{failed:?}");
    let other = Wanted::new(Some("xfs"), &[], false).unwrap();
    let error = failure(with(&tools, &other).await);
    assert!(
        error.contains("as \"xfs\", it already contains ext4") && error.contains("wrong fs type"),
        "{error}"
    );
    tools.script("mount", "kill -9 $$");
    let killed = with(&tools, &wanted).await;
    assert!(
        matches!(killed, Err(RemoteError::Uncertain(_))),
        "it may have mounted before: {killed:?}"
    );
}
