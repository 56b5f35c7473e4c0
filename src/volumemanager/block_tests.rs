use super::*;
use crate::volumemanager::command::Tools;

#[test]
fn a_link_leads_to_a_device_or_is_not_made() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("volumeDevices/x/disk");
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let error = link(&file, &at).unwrap_err().to_string();
    assert!(error.contains("is not a block device"), "{error}");
    assert!(
        link(Path::new("/dev/null"), &at).is_err(),
        "a character device"
    );
    lead_to(Path::new("/dev/null"), &at).unwrap();
    lead_to(&file, &at).unwrap();
    assert_eq!(
        fs::read_link(&at).unwrap(),
        file,
        "it is brought up to date"
    );
    unlink(&at).unwrap();
    unlink(&at).unwrap();
    assert!(file.exists() && !at.is_symlink());
    fs::write(&at, "a user's").unwrap();
    assert!(lead_to(&file, &at).is_err() && unlink(&at).is_err());
    assert_eq!(fs::read_to_string(&at).unwrap(), "a user's");
}

/// Whether loop devices can be had here.
pub(in crate::volumemanager) fn loops() -> bool {
    nix::unistd::geteuid().is_root()
        && fs::OpenOptions::new()
            .write(true)
            .open("/dev/loop-control")
            .is_ok()
        && Tools::default().find("losetup").is_some()
}

#[tokio::test]
async fn a_file_has_one_loop_device_until_it_is_left() {
    if !loops() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("disk image");
    fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
    let other = dir.path().join("link");
    symlink(&file, &other).unwrap();
    let tools = Tools::default();
    let device = attach_loop(&tools, &file).await.unwrap();
    assert_eq!(attach_loop(&tools, &file).await.unwrap(), device);
    assert_eq!(attach_loop(&tools, &other).await.unwrap(), device);
    let at = dir.path().join("at");
    link(&device, &at).unwrap();
    assert_eq!(
        fs::metadata(&at).unwrap().rdev(),
        fs::metadata(&device).unwrap().rdev()
    );
    // Even when the file is gone.
    fs::remove_file(&file).unwrap();
    detach_loop(&tools, &file).await.unwrap();
    assert_eq!(loop_of(&file).await.unwrap(), None);
    detach_loop(&tools, &file).await.unwrap();
}
