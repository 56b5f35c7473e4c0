//! A file that occupies disk space so that there is some to give back: when the disk is full, stops and
//! deletions must still be recorded.
//!
//! The blocks are really allocated; [`release`] frees them, [`create`] takes them again once there is
//! room. Both may be called at any time and are idempotent.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};

use super::SpaceReserve;

/// Size of the ballast unless configured otherwise, in bytes.
pub const DEFAULT_BYTES: u64 = 8 * 1024 * 1024;

/// The ballast of a store, as its writer uses it.
#[derive(Clone, Debug)]
pub struct Ballast {
    dir: PathBuf,
    bytes: u64,
}

impl Ballast {
    /// The ballast of the state directory `dir`, `bytes` long once it is there. Allocates nothing.
    pub fn new(dir: impl Into<PathBuf>, bytes: u64) -> Self {
        Self {
            dir: dir.into(),
            bytes,
        }
    }
}

impl SpaceReserve for Ballast {
    fn release(&mut self) -> io::Result<()> {
        let bytes = release(&self.dir)?;
        // Called at every failed try while the disk stays full.
        if bytes > 0 {
            tracing::warn!(bytes, "released the reserved disk space: the disk is full");
        }
        Ok(())
    }

    /// Takes the space back only when as much stays free.
    fn restore(&mut self) -> io::Result<()> {
        let stat = nix::sys::statvfs::statvfs(&self.dir)?;
        let free = stat.blocks_available().saturating_mul(stat.fragment_size());
        if free < self.bytes.saturating_mul(2) && !path(&self.dir).exists() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        create(&self.dir, self.bytes).map(|_| ())
    }
}

/// The ballast file of a state directory.
pub fn path(dir: &Path) -> PathBuf {
    dir.join("ballast")
}

/// Makes sure that the ballast of `dir` occupies `bytes` on disk. Returns whether it had to be allocated.
///
/// # Errors
/// `StorageFull` when there is no room (what was allocated so far is given back), or whatever the file
/// system says.
pub fn create(dir: &Path, bytes: u64) -> io::Result<bool> {
    let path = path(dir);
    if let Ok(found) = std::fs::symlink_metadata(&path)
        && found.is_file()
        && found.len() == bytes
        && found.blocks().saturating_mul(512) >= bytes
    {
        return Ok(false);
    }
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&path)?;
    let result = allocate(&file, bytes).and_then(|()| file.sync_all());
    if let Err(error) = result {
        drop(file);
        release(dir)?;
        return Err(error);
    }
    Ok(true)
}

/// Gives the ballast's space back. Returns how many bytes it occupied.
///
/// # Errors
/// Whatever the file system says; a missing ballast is no error.
pub fn release(dir: &Path) -> io::Result<u64> {
    let path = path(dir);
    let found = match std::fs::symlink_metadata(&path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(error),
    };
    std::fs::remove_file(&path)?;
    Ok(found.blocks().saturating_mul(512))
}

/// Blocks that are really there. Where the file system cannot preallocate, incompressible bytes are written.
fn allocate(mut file: &File, bytes: u64) -> io::Result<()> {
    let len = i64::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    if len == 0 {
        return Ok(());
    }
    match fallocate(file.as_fd(), FallocateFlags::empty(), 0, len) {
        Ok(()) => return Ok(()),
        Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => {}
        Err(error) => return Err(error.into()),
    }
    let mut block = vec![0_u8; 64 * 1024];
    let mut left = bytes;
    while left > 0 {
        for byte in &mut block {
            *byte = rand::random();
        }
        let take = usize::try_from(left).map_or(block.len(), |left| left.min(block.len()));
        file.write_all(&block[..take])?;
        left -= take as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ballast_occupies_its_blocks_and_gives_them_back() {
        let dir = tempfile::tempdir().unwrap();
        assert!(create(dir.path(), 1 << 20).unwrap());
        assert!(!create(dir.path(), 1 << 20).unwrap(), "is there already");
        let found = std::fs::metadata(path(dir.path())).unwrap();
        assert!(found.blocks() * 512 >= 1 << 20, "really allocated");
        assert_eq!(found.mode() & 0o777, 0o600);
        assert!(release(dir.path()).unwrap() >= 1 << 20);
        assert_eq!(release(dir.path()).unwrap(), 0);
    }

    #[test]
    fn a_sparse_file_is_not_taken_for_ballast() {
        let dir = tempfile::tempdir().unwrap();
        File::create(path(dir.path()))
            .unwrap()
            .set_len(1 << 20)
            .unwrap();
        assert!(create(dir.path(), 1 << 20).unwrap());
        let found = std::fs::metadata(path(dir.path())).unwrap();
        assert!(found.blocks() * 512 >= 1 << 20);
    }
}
