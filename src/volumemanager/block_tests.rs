use super::*;
use crate::volumemanager::attached::tests::nothing;
use crate::volumemanager::command::Tools;

#[test]
fn files_of_loop_devices_are_known_by_their_bytes() {
    for (told, path) in [
        (b"/a file\n".as_slice(), b"/a file".as_slice()),
        (b"/caf\xe9 (deleted)\n", b"/caf\xe9"),
    ] {
        assert_eq!(backing_file(told), Path::new(OsStr::from_bytes(path)));
    }
}

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

/// Returns whether this environment has loop devices.
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
    let (tools, attached) = (Tools::default(), nothing());
    let attach = |file: &Path| {
        let (tools, attached, file) = (tools.clone(), attached.clone(), file.to_owned());
        async move { attach_loop(&tools, &attached, &file).await.unwrap() }
    };
    let device = attach(&file).await;
    assert_eq!(attach(&file).await, device);
    assert_eq!(attach(&other).await, device);
    let at = dir.path().join("at");
    link(&device, &at).unwrap();
    assert_eq!(
        fs::metadata(&at).unwrap().rdev(),
        fs::metadata(&device).unwrap().rdev()
    );
    // Even when the file is gone.
    fs::remove_file(&file).unwrap();
    for _ in 0..2 {
        let done = detach_loop(&tools, &attached, &file, &at).await;
        done.unwrap();
        // Who happens to look at all devices of the machine holds it for that moment.
        while loop_of(&tools, &file).await.unwrap().is_some() {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    }
}

/// Detaches what a test has attached by hand.
struct Detach(PathBuf);

impl Drop for Detach {
    fn drop(&mut self) {
        let mut losetup = std::process::Command::new("losetup");
        drop(losetup.arg("-d").arg(&self.0).status());
    }
}

#[tokio::test]
async fn a_loop_device_of_somebody_else_is_used_and_never_detached() {
    if !loops() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (file, at) = (dir.path().join("theirs"), dir.path().join("at"));
    fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
    let (tools, attached) = (Tools::default(), nothing());
    let theirs = attach_loop(&tools, &nothing(), &file).await.unwrap();
    let _detach = Detach(theirs.clone());
    let used = attach_loop(&tools, &attached, &file).await.unwrap();
    assert_eq!(used, theirs);
    link(&theirs, &at).unwrap();
    detach_loop(&tools, &attached, &file, &at).await.unwrap();
    assert_eq!(loop_of(&tools, &file).await.unwrap(), Some(theirs));
}

#[tokio::test]
async fn a_file_that_took_the_name_of_another_has_a_device_of_its_own() {
    if !loops() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (file, at) = (dir.path().join("disk"), dir.path().join("at"));
    let make = |path: &Path| fs::File::create(path).unwrap().set_len(1 << 20).unwrap();
    make(&file);
    let (tools, attached) = (Tools::default(), nothing());
    let former = attach_loop(&tools, &attached, &file).await.unwrap();
    let _detach = Detach(former.clone());
    link(&former, &at).unwrap();
    let next = dir.path().join("next");
    make(&next);
    fs::rename(&next, &file).unwrap();
    // Neither taken for the device of the new file, nor is another one detached in its place.
    let device = attach_loop(&tools, &nothing(), &file).await.unwrap();
    let _detach_too = Detach(device.clone());
    assert_ne!(device, former);
    detach_loop(&tools, &attached, &file, &at).await.unwrap();
    assert_eq!(loop_of(&tools, &file).await.unwrap(), Some(device));
}
