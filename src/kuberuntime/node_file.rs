//! Files of the node that its administrator keeps: `/etc/hosts`, the resolver configuration.
//!
//! **Invariant:** whatever is in their place, reading one neither blocks nor takes more memory than the limit.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::OFlag;

/// Longest file that is read; upstream's `maxResolvConfLength`.
const LONGEST: u64 = 10 << 20;

/// Reads a file of the node. A pipe that nobody writes to is empty, as is `/dev/null`.
///
/// # Errors
/// When it cannot be read, or is longer than 10 MiB.
pub(super) fn read(path: &Path) -> io::Result<Vec<u8>> {
    read_with_change(path).map(|(bytes, _)| bytes)
}

/// Reads a file of the node as [`read`] does, with the time of its last change in milliseconds of the wall clock.
///
/// # Errors
/// As [`read`].
pub(super) fn read_with_change(path: &Path) -> io::Result<(Vec<u8>, i64)> {
    let file = File::options()
        .read(true)
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open(path)?;
    let metadata = file.metadata()?;
    let changed = metadata.ctime() * 1000 + metadata.ctime_nsec() / 1_000_000;
    let mut bytes = Vec::new();
    file.take(LONGEST + 1).read_to_end(&mut bytes)?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > LONGEST {
        let text = "it is longer than 10 MiB";
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
    }
    Ok((bytes, changed))
}

#[cfg(test)]
mod tests {
    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    #[test]
    fn what_is_no_text_file_neither_blocks_nor_fills_the_memory() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("plain"), b"caf\xe9").unwrap();
        assert_eq!(read(&at("plain")).unwrap(), b"caf\xe9");
        mkfifo(&at("pipe"), Mode::from_bits_truncate(0o600)).unwrap();
        assert_eq!(read(&at("pipe")).unwrap(), b"");
        assert_eq!(read(Path::new("/dev/null")).unwrap(), b"");
        let huge = File::create(at("huge")).unwrap();
        huge.set_len(LONGEST + 1).unwrap();
        let error = read(&at("huge")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        assert!(read(dir.path()).is_err());
        let missing = read(&at("missing")).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
