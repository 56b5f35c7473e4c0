//! Paths under the state directory, and the few file operations that the store needs there.
//!
//! ```text
//! <state-dir>/            0700
//!   db/                   the database
//!   db.schema-<n>/        stands in for `db` while that has a newer schema than this binary
//!   db.tmp/ db.next/      a database being built; complete once it is called `db.next`
//!   schema                schema of `db`, as text
//!   mark                  the newest batch known to be on the disk, see [`super::mark`]
//!   backups/              automatic backups and those before a migration
//!   images/               archives of images that are imported, see `images::preload`; not the store's
//!   quarantine/           what was moved aside, newest [`QUARANTINE_KEPT`] kept
//!   root-dir              the root directory that the store is kept for, see `agent::root_dir`
//!   mounts/               the file systems that directories are on, see [`super::mounts`]
//!   cluster               the cluster that it is kept for, see `agent::cluster`
//!   machine               the machine that it is kept for, see `types::boot`
//!   node-name             the name of its node, see `types::boot`
//!   ballast               space to give back when the disk is full
//! ```
//!
//! **Invariant:** a database is replaced by two renames with a complete `db.next` at hand, so a crash in
//! between is finished by the next open, and nothing is ever overwritten in place.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::{Path, PathBuf};

use crate::types::Stamp;

/// Databases and files that stay in quarantine.
pub const QUARANTINE_KEPT: usize = 5;

/// Paths under a state directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    dir: PathBuf,
}

impl Layout {
    /// The layout of `dir`.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// The state directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The database.
    pub fn db(&self) -> PathBuf {
        self.dir.join("db")
    }

    /// The database that stands in for one of a newer schema.
    pub fn stand_in(&self, schema: u32) -> PathBuf {
        self.dir.join(format!("db.schema-{schema}"))
    }

    /// Backups.
    pub fn backups(&self) -> PathBuf {
        self.dir.join("backups")
    }

    /// Archives of images.
    pub fn images(&self) -> PathBuf {
        self.dir.join("images")
    }

    /// Returns the directory for quarantined files.
    pub fn quarantine(&self) -> PathBuf {
        self.dir.join("quarantine")
    }

    /// The high-water mark of the database.
    pub fn mark(&self) -> PathBuf {
        self.dir.join("mark")
    }

    pub(super) fn building(&self) -> PathBuf {
        self.dir.join("db.tmp")
    }

    pub(super) fn next(&self) -> PathBuf {
        self.dir.join("db.next")
    }

    fn schema_file(&self) -> PathBuf {
        self.dir.join("schema")
    }

    /// Returns whether an earlier run left anything here.
    pub(super) fn is_used(&self) -> bool {
        let names = ["db", "backups", "quarantine", "ballast", "schema", "mark"];
        names.iter().any(|name| self.dir.join(name).exists())
    }

    /// Makes the directories, readable by root only.
    pub(super) fn create(&self) -> io::Result<()> {
        for dir in [self.dir.clone(), self.backups(), self.quarantine()] {
            DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
            if fs::metadata(&dir)?.permissions().mode() & 0o777 != 0o700 {
                fs::set_permissions(&dir, Permissions::from_mode(0o700))?;
            }
        }
        sync_dir(&self.dir)
    }

    /// The schema of `db`, if it was written down.
    pub(super) fn schema(&self) -> Option<u32> {
        fs::read_to_string(self.schema_file())
            .ok()?
            .trim()
            .parse()
            .ok()
    }

    pub(super) fn write_schema(&self, schema: u32) -> io::Result<()> {
        if self.schema() == Some(schema) {
            return Ok(());
        }
        write_atomically(&self.schema_file(), format!("{schema}\n").as_bytes())
    }

    /// Finishes or forgets a replacement of the database that a crash interrupted.
    pub(super) fn settle(&self) -> io::Result<()> {
        remove_tree(&self.building())?;
        if !self.next().exists() {
            return Ok(());
        }
        if self.db().exists() {
            return remove_tree(&self.next());
        }
        fs::rename(self.next(), self.db())?;
        sync_dir(&self.dir)
    }

    /// Puts the complete database in `db.next` in the place of `db`, which goes to quarantine.
    pub(super) fn swap_in(&self, label: &str, now: Stamp) -> io::Result<Option<PathBuf>> {
        let aside = if self.db().exists() {
            Some(self.set_aside(&self.db(), label, now)?)
        } else {
            None
        };
        fs::rename(self.next(), self.db())?;
        sync_dir(&self.dir)?;
        Ok(aside)
    }

    /// Moves a file or directory to quarantine, as `<label>-<time>`.
    pub(super) fn set_aside(&self, what: &Path, label: &str, now: Stamp) -> io::Result<PathBuf> {
        let quarantine = self.quarantine();
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&quarantine)?;
        let time = now.rfc3339().replace([':', '-'], "");
        let mut target = quarantine.join(format!("{label}-{time}"));
        let mut again = 1;
        while target.exists() {
            again += 1;
            target = quarantine.join(format!("{label}-{time}-{again}"));
        }
        fs::rename(what, &target)?;
        sync_dir(&quarantine)?;
        if let Some(parent) = what.parent() {
            sync_dir(parent)?;
        }
        Ok(target)
    }

    /// Removes all but the newest [`QUARANTINE_KEPT`] entries of the quarantine.
    pub(super) fn prune_quarantine(&self) -> io::Result<()> {
        let mut entries = Vec::new();
        for entry in fs::read_dir(self.quarantine())? {
            let entry = entry?;
            // The change time is set by the rename that brought it here.
            let changed = MetadataExt::ctime_nsec(&entry.metadata()?);
            let second = MetadataExt::ctime(&entry.metadata()?);
            entries.push((second, changed, entry.path()));
        }
        entries.sort();
        let surplus = entries.len().saturating_sub(QUARANTINE_KEPT);
        for (_, _, path) in entries.into_iter().take(surplus) {
            remove_tree(&path)?;
        }
        Ok(())
    }
}

/// Removes a file or a directory with everything in it; what is not there is no error.
pub(super) fn remove_tree(path: &Path) -> io::Result<()> {
    let result = match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Makes the names in a directory durable.
pub(super) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Writes a file so that after a crash it has either the old or the new content.
pub(super) fn write_atomically(path: &Path, content: &[u8]) -> io::Result<()> {
    let parent = path.parent().unwrap_or(Path::new("."));
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".tmp");
    let temporary = parent.join(name);
    let written = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&temporary)
        .and_then(|mut file| {
            file.write_all(content)?;
            file.sync_all()
        })
        .and_then(|()| fs::rename(&temporary, path));
    if let Err(error) = written {
        remove_tree(&temporary)?;
        return Err(error);
    }
    sync_dir(parent)
}

/// Copies the files of a database that nobody writes to.
pub(super) fn copy_db(from: &Path, to: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_db(&entry.path(), &target)?;
        } else if entry.file_type()?.is_file() {
            fs::copy(entry.path(), &target)?;
        }
    }
    Ok(())
}

/// Bytes of disk that a file, or a directory with everything in it, occupies: without the holes of its files, and
/// with what the directories themselves take.
pub(super) fn occupied(path: &Path) -> io::Result<u64> {
    let found = fs::symlink_metadata(path)?;
    // In units of 512 bytes, whatever the file system's blocks are.
    let mut sum = MetadataExt::blocks(&found) * 512;
    if found.is_dir() {
        for entry in fs::read_dir(path)? {
            sum += occupied(&entry?.path())?;
        }
    }
    Ok(sum)
}

/// Bytes a file or directory has by its files' lengths.
pub(super) fn size_of(path: &Path) -> io::Result<u64> {
    let found = fs::symlink_metadata(path)?;
    if !found.is_dir() {
        return Ok(found.len());
    }
    let mut sum = 0;
    for entry in fs::read_dir(path)? {
        sum += size_of(&entry?.path())?;
    }
    Ok(sum)
}
