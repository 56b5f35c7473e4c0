//! The store of a node that is no more: moved aside whole, so that another one begins.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::layout::{Layout, sync_dir};
use crate::types::Stamp;

/// Moves the database below the state directory `dir`, every one that stands in for it or is being built, and the
/// backups to quarantine, where they are as one entry. Returns it; `None` when there is nothing to move. The
/// high-water mark stays: the next store begins an epoch above the previous one's. Keys stay too.
///
/// Blocks; the caller holds the state directory's lock and opens the store afterwards. What a crash left is moved by
/// the next call, to an entry of its own.
///
/// # Errors
/// When something cannot be moved; what was moved before stays aside.
pub fn set_aside(dir: &Path, now: Stamp) -> io::Result<Option<PathBuf>> {
    let layout = Layout::new(dir);
    let mut found = Vec::new();
    for entry in entries(dir)? {
        let name = entry.file_name().unwrap_or_default().to_string_lossy();
        let is_database = name == "db" || name.starts_with("db.");
        if is_database || (entry == layout.backups() && !entries(&entry)?.is_empty()) {
            found.push(entry);
        }
    }
    // Made complete beside the quarantine first, so that it counts as one entry.
    let former = dir.join("former.tmp");
    if found.is_empty() && !former.exists() {
        return Ok(None);
    }
    fs::create_dir_all(&former)?;
    for from in found {
        let name = from.file_name().unwrap_or_default();
        let target = former.join(name);
        if !target.exists() {
            fs::rename(&from, target)?;
        } else {
            // An earlier call was cut off, and the store was used again since.
            layout.set_aside(&from, &format!("former-{}", name.to_string_lossy()), now)?;
        }
    }
    sync_dir(&former)?;
    sync_dir(dir)?;
    layout.set_aside(&former, "former-node", now).map(Some)
}

fn entries(dir: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::read_dir(dir) {
        Ok(entries) => entries.map(|entry| Ok(entry?.path())).collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::BootId;

    const NOW: Stamp = Stamp {
        boot: BootId(1),
        boottime_ms: 1_000,
        wall_ms: 1_700_000_000_000,
    };

    /// A state directory with these files.
    fn state(files: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for file in files {
            let path = dir.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, file).unwrap();
        }
        dir
    }

    #[test]
    fn what_a_node_remembered_goes_and_what_is_the_machines_stays() {
        let gone = [
            "db/db",
            "db.next/db",
            "db.schema-1/db",
            "backups/b.holdfast",
        ];
        let kept = [
            "mark",
            "schema",
            "keys/secrets.key",
            "LOCK",
            "quarantine/x/db",
        ];
        let dir = state(&[&gone[..], &kept[..]].concat());
        let former = set_aside(dir.path(), NOW).unwrap().unwrap();
        assert_eq!(former.parent(), Some(&*dir.path().join("quarantine")));
        for file in gone {
            assert!(former.join(file).exists(), "{file}");
            assert!(!dir.path().join(file).exists(), "{file}");
        }
        for file in kept {
            assert!(dir.path().join(file).exists(), "{file}");
        }
        assert_eq!(set_aside(dir.path(), NOW).unwrap(), None, "nothing is left");
    }

    #[test]
    fn what_a_crash_left_in_between_is_set_aside_too() {
        let dir = state(&["former.tmp/db/db"]);
        let former = set_aside(dir.path(), NOW).unwrap().unwrap();
        assert!(former.join("db/db").exists());
        // The store was used again before the call was made anew.
        let dir = state(&["former.tmp/db/db", "db/db"]);
        let former = set_aside(dir.path(), NOW).unwrap().unwrap();
        assert!(former.join("db/db").exists());
        assert!(!dir.path().join("db").exists());
        let aside = fs::read_dir(dir.path().join("quarantine")).unwrap();
        assert_eq!(aside.count(), 2, "both are kept");
    }
}
