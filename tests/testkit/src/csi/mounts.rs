//! Mounting, and the mount table.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// Every mount point, in the order of the kernel.
pub(super) fn table() -> io::Result<Vec<PathBuf>> {
    let text = fs::read("/proc/self/mountinfo")?;
    let lines = text.split(|b| *b == b'\n');
    let points = lines.filter_map(|line| line.split(|b| *b == b' ').nth(4));
    Ok(points.map(unescape).collect())
}

/// `\040` and the like.
fn unescape(text: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut at = 0;
    while at < text.len() {
        let octal = text.get(at + 1..at + 4).filter(|_| text[at] == b'\\');
        let code = octal
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.push(code.unwrap_or(text[at]));
        at += if code.is_some() { 4 } else { 1 };
    }
    PathBuf::from(OsStr::from_bytes(&bytes))
}

pub(super) fn is_mounted(path: &Path) -> io::Result<bool> {
    Ok(table()?.iter().any(|point| point == path))
}

fn flag(name: &str) -> Option<MsFlags> {
    Some(match name {
        "ro" => MsFlags::MS_RDONLY,
        "noatime" => MsFlags::MS_NOATIME,
        "nosuid" => MsFlags::MS_NOSUID,
        "nodev" => MsFlags::MS_NODEV,
        "noexec" => MsFlags::MS_NOEXEC,
        _ => return None,
    })
}

/// The flags that are known; the others are the driver's own.
pub(super) fn flags_of(names: &[String]) -> MsFlags {
    names.iter().filter_map(|name| flag(name)).collect()
}

pub(super) fn bind(from: &Path, to: &Path, flags: MsFlags) -> io::Result<()> {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
    if !flags.is_empty() {
        let flags = flags | MsFlags::MS_BIND | MsFlags::MS_REMOUNT;
        mount(None::<&str>, to, None::<&str>, flags, None::<&str>)?;
    }
    Ok(())
}

pub(super) fn tmpfs(at: &Path, bytes: u64, flags: MsFlags) -> io::Result<()> {
    let options = format!("size={bytes}");
    let options = Some(options.as_str());
    mount(Some("csi-driver"), at, Some("tmpfs"), flags, options)?;
    Ok(())
}

pub(super) fn resize_tmpfs(at: &Path, bytes: u64) -> io::Result<()> {
    let options = format!("size={bytes}");
    let options = Some(options.as_str());
    let flags = MsFlags::MS_REMOUNT;
    mount(None::<&str>, at, None::<&str>, flags, options)?;
    Ok(())
}

/// Unmounts whatever is mounted at `path`, however often.
pub(super) fn unmount(path: &Path) -> io::Result<()> {
    while is_mounted(path)? {
        umount2(path, MntFlags::empty())?;
    }
    Ok(())
}

pub(super) fn unmount_lazily(path: &Path) {
    while is_mounted(path).unwrap_or(false) && umount2(path, MntFlags::MNT_DETACH).is_ok() {}
}

/// The loop device of a file, made if there is none; `None` when the machine has no loop devices.
pub(super) fn loop_device(file: &Path) -> Option<PathBuf> {
    if let Some(device) = loops_of(file).into_iter().next() {
        return Some(device);
    }
    let output = Command::new("losetup")
        .args(["-f", "--show"])
        .arg(file)
        .output()
        .ok()?;
    let device = String::from_utf8(output.stdout).ok()?;
    (output.status.success() && !device.trim().is_empty()).then(|| PathBuf::from(device.trim()))
}

pub(super) fn loops_of(file: &Path) -> Vec<PathBuf> {
    let output = Command::new("losetup").arg("-j").arg(file).output();
    let text = output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned());
    text.unwrap_or_default()
        .lines()
        .filter_map(|line| line.split(':').next())
        .map(PathBuf::from)
        .collect()
}

pub(super) fn detach_loops(file: &Path) {
    for device in loops_of(file) {
        Command::new("losetup").arg("-d").arg(device).status().ok();
    }
}

pub(super) fn grow_loops(file: &Path) {
    for device in loops_of(file) {
        Command::new("losetup").arg("-c").arg(device).status().ok();
    }
}
