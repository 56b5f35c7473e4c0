//! The file system that a path is on, by what names it across boots.
//!
//! The number of a device is another one after a boot. The mount point, the type and the UUID that `udev` publishes stay.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{mountinfo, text};

/// Links from UUIDs to block devices.
const BY_UUID: &str = "/dev/disk/by-uuid";

/// A mounted file system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSystem {
    /// Mount point.
    pub point: String,
    /// Type, `ext4` for example.
    #[serde(rename = "type")]
    pub fstype: String,
    /// Device, `server:path`, or another name of it. It may change from boot to boot.
    pub source: String,
    /// UUID, where it can be read.
    pub uuid: Option<String>,
}

impl fmt::Display for FileSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.uuid {
            Some(uuid) => write!(f, "{} with UUID {uuid} at {}", self.fstype, self.point),
            None => write!(f, "{} {} at {}", self.fstype, self.source, self.point),
        }
    }
}

impl FileSystem {
    /// Returns the file system of `path`, or of its nearest parent that exists. A mount that `autofs` has prepared there is
    /// made. Blocking.
    ///
    /// # Errors
    /// When the path or the mount table cannot be read.
    pub fn of(path: &Path) -> io::Result<Self> {
        let file = open_nearest(path)?;
        let id = mount_id(&file)?;
        let table = fs::read(mountinfo::TABLE)?;
        let line = mountinfo::lines(&table)
            .find(|line| line.id == id.as_bytes())
            .ok_or_else(|| io::Error::other("its mount is not in the mount table"))?;
        let source = mountinfo::path(line.source);
        Ok(Self {
            point: text::of_name(mountinfo::path(line.point)),
            fstype: mountinfo::text(line.fstype),
            uuid: uuid(line.device, &source, Path::new(BY_UUID)),
            source: text::of_name(source),
        })
    }
}

/// Returns the number of the device that the file system of `path` is on. Each subvolume of a btrfs has a number of its own,
/// which is that of no device: for those the number is that of the block device they share. Blocking.
///
/// # Errors
/// When the path cannot be read.
pub fn device_of(path: &Path) -> io::Result<u64> {
    let own = fs::metadata(path)?.dev();
    let found = FileSystem::of(path).ok();
    Ok(found.map_or(own, |found| {
        shared_device(own, &found.fstype, Path::new(&found.source))
    }))
}

fn shared_device(own: u64, fstype: &str, source: &Path) -> u64 {
    let device = (fstype == "btrfs")
        .then(|| fs::metadata(source).ok())
        .flatten();
    let shared = device.map(|device| device.rdev()).filter(|n| *n != 0);
    shared.unwrap_or(own)
}

fn open_nearest(path: &Path) -> io::Result<File> {
    let path = std::path::absolute(path)?;
    let mut error = io::Error::from(io::ErrorKind::NotFound);
    for known in path.ancestors() {
        // Not waiting for who writes, should it be a pipe.
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(nix::fcntl::OFlag::O_NONBLOCK.bits())
            .open(known);
        match opened {
            Err(absent) if absent.kind() == io::ErrorKind::NotFound => error = absent,
            other => return other,
        }
    }
    Err(error)
}

/// The number of the mount that a file was opened on. Mounts that others hide have one of their own.
fn mount_id(file: &File) -> io::Result<String> {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd()))?;
    info.lines()
        .find_map(|line| line.strip_prefix("mnt_id:"))
        .map(|id| id.trim().to_owned())
        .ok_or_else(|| io::Error::other("the kernel does not report the mount of a file"))
}

/// The UUID of the file system on a device, `major:minor`, or else of the one whose path is `source`: the number of a btrfs
/// is that of no device.
fn uuid(device: &[u8], source: &Path, by_uuid: &Path) -> Option<String> {
    let number = String::from_utf8_lossy(device);
    let (major, minor) = number.split_once(':')?;
    let device = nix::sys::stat::makedev(major.parse().ok()?, minor.parse().ok()?);
    let named = fs::metadata(source).map_or(0, |metadata| metadata.rdev());
    let links: Vec<(PathBuf, u64)> = fs::read_dir(by_uuid)
        .ok()?
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let target = fs::metadata(&path).ok()?.rdev();
            Some((path, target))
        })
        .collect();
    [device, named]
        .into_iter()
        .filter(|number| *number != 0)
        .find_map(|number| links.iter().find(|(_, target)| *target == number))
        .and_then(|(link, _)| link.file_name().map(text::of_name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_on_the_mount_that_shows_it() {
        let proc = FileSystem::of(Path::new("/proc/self")).unwrap();
        assert_eq!((&*proc.point, &*proc.fstype), ("/proc", "proc"));
        assert_eq!(proc.uuid, None);
        // One that does not exist is on that of its parent.
        let absent = FileSystem::of(Path::new("/proc/nothing/below")).unwrap();
        assert_eq!(absent, proc);
    }

    #[test]
    fn the_device_of_a_path_is_that_of_its_file_system() {
        let proc = fs::metadata("/proc").unwrap().dev();
        assert_eq!(device_of(Path::new("/proc/self")).unwrap(), proc);
        assert!(device_of(Path::new("/proc/nothing")).is_err());
        let null = fs::metadata("/dev/null").unwrap().rdev();
        for (fstype, source, wanted) in [
            ("btrfs", "/dev/null", null),
            ("btrfs", "/dev/nothing", 7),
            ("btrfs", "/proc/self", 7),
            ("ext4", "/dev/null", 7),
        ] {
            let found = shared_device(7, fstype, Path::new(source));
            assert_eq!(found, wanted, "{fstype} {source}");
        }
    }

    #[test]
    fn a_uuid_is_found_by_the_number_or_the_path_of_its_device() {
        let dir = tempfile::tempdir().unwrap();
        let link = |name: &str, to: &str| {
            std::os::unix::fs::symlink(to, dir.path().join(name)).unwrap();
        };
        link("0a1b", "/dev/null");
        link("gone", "/dev/nothing");
        let null = Path::new("/dev/null");
        for (device, source, expected) in [
            (&b"1:3"[..], Path::new("none"), Some("0a1b")),
            (b"0:45", null, Some("0a1b")),
            (b"1:5", Path::new("none"), None),
            (b"0:45", Path::new("none"), None),
            (b"", null, None),
        ] {
            let found = uuid(device, source, dir.path());
            assert_eq!(found.as_deref(), expected, "{device:?} {source:?}");
        }
        assert_eq!(uuid(b"1:3", null, Path::new("/nothing")), None);
    }
}
