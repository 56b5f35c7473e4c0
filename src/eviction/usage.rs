//! How much of a disk a directory takes.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Bytes of a block as `st_blocks` counts them.
const BLOCK: u64 = 512;

/// Bytes on disk of a directory with all below it, on its own file system alone. A file with several names
/// counts once; what vanishes meanwhile counts nothing, and so does a directory that is not there. Blocks
/// for as long as the walk takes.
///
/// # Errors
/// When something below cannot be read.
pub fn disk_usage(dir: &Path) -> io::Result<u64> {
    measure(dir).map(|usage| usage.bytes)
}

/// What a directory takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskUsage {
    /// Bytes on disk.
    pub bytes: u64,
    /// Files and directories, itself included.
    pub inodes: u64,
}

/// As [`disk_usage`], and the number of files.
///
/// # Errors
/// When something below cannot be read.
pub fn measure(dir: &Path) -> io::Result<DiskUsage> {
    let Some(top) = found(fs::symlink_metadata(dir))? else {
        return Ok(DiskUsage::default());
    };
    let mut seen = HashSet::new();
    let mut inodes = 1_u64;
    let mut used = top.blocks().saturating_mul(BLOCK);
    let mut left = vec![dir.to_owned()];
    while let Some(dir) = left.pop() {
        let Some(entries) = found(fs::read_dir(&dir))? else {
            continue;
        };
        for entry in entries {
            let Some(entry) = found(entry)? else { continue };
            let path = entry.path();
            let Some(meta) = found(fs::symlink_metadata(&path))? else {
                continue;
            };
            if meta.dev() != top.dev() {
                continue;
            }
            if meta.is_dir() {
                left.push(path);
            } else if meta.nlink() > 1 && !seen.insert(meta.ino()) {
                continue;
            }
            inodes = inodes.saturating_add(1);
            used = used.saturating_add(meta.blocks().saturating_mul(BLOCK));
        }
    }
    Ok(DiskUsage {
        bytes: used,
        inodes,
    })
}

fn found<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_what_the_disk_gives_not_what_files_claim() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let empty = disk_usage(dir.path()).unwrap();
        fs::create_dir(at("sub")).unwrap();
        fs::write(at("sub/full"), vec![1_u8; 1 << 20]).unwrap();
        let one = disk_usage(dir.path()).unwrap();
        assert!((1 << 20..2 << 20).contains(&(one - empty)), "{empty} {one}");
        // A second name, a hole and a link to elsewhere take nothing worth speaking of.
        fs::hard_link(at("sub/full"), at("again")).unwrap();
        std::os::unix::fs::symlink("/", at("root")).unwrap();
        fs::File::create(at("sparse"))
            .unwrap()
            .set_len(1 << 30)
            .unwrap();
        let same = disk_usage(dir.path()).unwrap();
        assert!(same < one + (1 << 16), "{one} {same}");
        assert_eq!(disk_usage(&at("nowhere")).unwrap(), 0);
    }
}
