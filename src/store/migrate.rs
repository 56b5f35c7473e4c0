//! Converts a store from one schema to another, forward or backward, with the steps of `migrations/`.
//!
//! The input is a state directory that no process has open. The result is the same directory at the wanted schema, the
//! previous database in quarantine, and a backup of it. The new database is built beside the old one and replaces it by
//! renames: a crash at any point leaves one of the two, complete.
//!
//! **Invariant:** the `schema` field stays the first field of the meta record in every schema, so that any binary can
//! read the schema of any store.

#[path = "../../migrations/mod.rs"]
pub mod migrations;

use std::io;
use std::path::{Path, PathBuf};

pub use migrations::{MigrationSet, Record, Records, SCHEMA, Step, StepError};

use super::backend::{Backend, BackendError, Op, RawPair, SledBackend, SledOptions};
use super::backup::{self, BackupError, BackupMeta};
use super::codec::{self, CodecError, Loaded, RawLoaded};
use super::layout::{Layout, remove_tree, sync_dir};
use crate::core::state::{META_KEY, Table, Version};
use crate::types::{Stamp, causes};

/// Operations per batch when a database is built.
const BATCH: usize = 256;

/// Failure of a migration.
#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    /// The wanted schema does not exist for this binary.
    #[error("migrate store {} to schema {to}: this binary knows schemas 1 to {newest}; use the binary that introduced schema {to}", dir.display())]
    UnknownTarget {
        /// State directory.
        dir: PathBuf,
        /// Wanted.
        to: u32,
        /// Newest known.
        newest: u32,
    },
    /// The store's schema is newer than this binary.
    #[error("migrate store {}: it has schema {found}, this binary knows schemas 1 to {newest}; use the binary that wrote it", dir.display())]
    NewerStore {
        /// State directory.
        dir: PathBuf,
        /// Of the store.
        found: u32,
        /// Newest known.
        newest: u32,
    },
    /// There is no store, or it has no readable meta record.
    #[error("migrate store {}: no schema is recorded there; start the agent or run `holdfast store repair` first", dir.display())]
    NoSchema {
        /// State directory.
        dir: PathBuf,
    },
    /// The store cannot be read as a whole.
    #[error("migrate store {}: {reason}; run `holdfast store repair` first", dir.display())]
    Damaged {
        /// State directory.
        dir: PathBuf,
        /// Description of the problem.
        reason: String,
    },
    /// A step failed; the store is as it was.
    #[error("migrate store {}: step to schema {to}", dir.display())]
    Step {
        /// State directory.
        dir: PathBuf,
        /// Schema that the step leads to.
        to: u32,
        /// The cause.
        #[source]
        source: StepError,
    },
    /// A step did not keep its promise; the store is as it was.
    #[error("migrate store {}: the steps to schema {to} left records of schema {left}", dir.display())]
    Incomplete {
        /// State directory.
        dir: PathBuf,
        /// Wanted.
        to: u32,
        /// Schema in the meta record.
        left: u32,
    },
    /// The backup that must come first failed; the store is as it was.
    #[error("back up store {} before its migration", dir.display())]
    Backup {
        /// State directory.
        dir: PathBuf,
        /// The cause.
        #[source]
        source: BackupError,
    },
    /// The database could not be read or written.
    #[error("migrate store {}", dir.display())]
    Backend {
        /// State directory.
        dir: PathBuf,
        /// The cause.
        #[source]
        source: BackendError,
    },
    /// The file system refused.
    #[error("migrate store {}", dir.display())]
    Io {
        /// State directory.
        dir: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

impl MigrateError {
    /// Returns the failure of the disk that a migration failed with; `None` when the records are the reason.
    pub(super) fn of_disk(&self) -> Option<BackendError> {
        let again = |kind: io::ErrorKind| BackendError::io("migrate the store", kind.into());
        match self {
            Self::Io { source, .. } => Some(again(source.kind())),
            Self::Backup {
                source: BackupError::Io { source, .. },
                ..
            } => Some(again(source.kind())),
            Self::Backend { source, .. } if source.is_out_of_space() => {
                Some(again(io::ErrorKind::StorageFull))
            }
            Self::Backend {
                source: BackendError::Io { source, .. },
                ..
            } => Some(again(source.kind())),
            _ => None,
        }
    }
}

/// Result of a migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigrateReport {
    /// Schema before.
    pub from: u32,
    /// Schema after.
    pub to: u32,
    /// Records of the store.
    pub records: usize,
    /// The backup taken before, `None` when there was nothing to do.
    pub backup: Option<PathBuf>,
    /// Path of the previous database, `None` when there was nothing to do.
    pub previous: Option<PathBuf>,
}

/// Migrates the store in `dir` to schema `to` with the steps of this binary. Takes a backup first. Blocks;
/// the caller holds the state directory's lock.
///
/// # Errors
/// See [`MigrateError`]; the store is then unchanged.
pub fn migrate(dir: &Path, to: u32, now: Stamp) -> Result<MigrateReport, MigrateError> {
    migrate_with(MigrationSet::default(), dir, to, now)
}

/// [`migrate`] with other steps; for tests of steps that no release has.
///
/// # Errors
/// As [`migrate`].
pub fn migrate_with(
    set: MigrationSet,
    dir: &Path,
    to: u32,
    now: Stamp,
) -> Result<MigrateReport, MigrateError> {
    let layout = Layout::new(dir);
    let fail = Fail(dir);
    if to == 0 || to > set.newest() {
        return Err(MigrateError::UnknownTarget {
            dir: dir.to_owned(),
            to,
            newest: set.newest(),
        });
    }
    if !layout.db().exists() && !layout.next().exists() {
        return Err(fail.no_schema());
    }
    layout.create().map_err(|e| fail.io(e))?;
    layout.settle().map_err(|e| fail.io(e))?;
    let (pairs, raw) = read(&layout.db()).map_err(|e| fail.backend(e))?;
    if let Some(error) = &raw.interrupted {
        return Err(fail.damaged(error.full_text()));
    }
    let records = to_records(&raw);
    let from = schema_of(&records).ok_or_else(|| fail.no_schema())?;
    let count = records.len();
    if from == to {
        layout.write_schema(to).map_err(|e| fail.io(e))?;
        return Ok(MigrateReport {
            from,
            to,
            records: count,
            backup: None,
            previous: None,
        });
    }
    let backup = back_up(&layout, &pairs, from, now).map_err(|source| MigrateError::Backup {
        dir: dir.to_owned(),
        source,
    })?;
    let records = convert(set, records, from, to, dir)?;
    let mut new = to_pairs(&records).map_err(|e| fail.damaged(causes(&e)))?;
    // What is damaged stays as it is, for a look at it.
    let damaged = raw.quarantined.iter().chain(&raw.kept);
    new.extend(damaged.map(codec::Quarantined::to_pair));
    build(&layout, new.into_iter()).map_err(|e| fail.backend(e))?;
    let previous = layout
        .swap_in(&format!("db-schema-{from}"), now)
        .and_then(|previous| layout.write_schema(to).map(|()| previous))
        .map_err(|e| fail.io(e))?;
    tracing::info!(from, to, records = count, "migrated the store");
    Ok(MigrateReport {
        from,
        to,
        records: count,
        backup: Some(backup),
        previous,
    })
}

/// Loads pairs of a database, at the schema of this binary. `schema` is that of the database where its records do not say
/// it. What cannot be converted is loaded as it is: its records are set aside as those of another version.
pub(super) fn load_current(pairs: Vec<RawPair>, schema: Option<u32>, version: Version) -> Loaded {
    let raw = codec::load_raw(pairs.iter().cloned().map(Ok));
    let records = to_records(&raw);
    let from = schema_of(&records).or(schema);
    let Some(from) = from.filter(|from| (1..SCHEMA).contains(from)) else {
        return codec::load(pairs.into_iter().map(Ok), version);
    };
    let converted = convert(
        MigrationSet::default(),
        records,
        from,
        SCHEMA,
        Path::new(""),
    )
    .and_then(|records| {
        to_pairs(&records).map_err(|error| Fail(Path::new("")).damaged(causes(&error)))
    });
    match converted {
        Ok(mut converted) => {
            let damaged = raw.quarantined.iter().chain(&raw.kept);
            converted.extend(damaged.map(codec::Quarantined::to_pair));
            codec::load(converted.into_iter().map(Ok), version)
        }
        Err(error) => {
            tracing::warn!(
                error = causes(&error),
                from,
                "cannot convert the records of an older store"
            );
            codec::load(pairs.into_iter().map(Ok), version)
        }
    }
}

/// Converts records between schemas, without touching a disk. `dir` is for error texts.
///
/// # Errors
/// When a step is missing or fails.
pub fn convert(
    set: MigrationSet,
    mut records: Records,
    from: u32,
    to: u32,
    dir: &Path,
) -> Result<Records, MigrateError> {
    if from > set.newest() {
        return Err(MigrateError::NewerStore {
            dir: dir.to_owned(),
            found: from,
            newest: set.newest(),
        });
    }
    let unknown = |to| MigrateError::UnknownTarget {
        dir: dir.to_owned(),
        to,
        newest: set.newest(),
    };
    let failed = |to| {
        move |source| MigrateError::Step {
            dir: dir.to_owned(),
            to,
            source,
        }
    };
    for schema in from + 1..=to {
        let step = set.step(schema).ok_or_else(|| unknown(schema))?;
        records = (step.forward)(records).map_err(failed(schema))?;
    }
    for schema in (to + 1..=from).rev() {
        let step = set.step(schema).ok_or_else(|| unknown(schema))?;
        records = (step.backward)(records).map_err(failed(schema - 1))?;
    }
    match schema_of(&records) {
        Some(left) if left == to => Ok(records),
        left => Err(MigrateError::Incomplete {
            dir: dir.to_owned(),
            to,
            left: left.unwrap_or(0),
        }),
    }
}

/// Schema of a set of records, by its meta record.
pub fn schema_of(records: &Records) -> Option<u32> {
    let meta = records.get(&(Table::Meta.tag(), META_KEY.to_owned()))?;
    meta.payload.first_chunk().copied().map(u32::from_le_bytes)
}

/// The records that raw pairs hold.
pub fn to_records(raw: &RawLoaded) -> Records {
    raw.records
        .iter()
        .map(|record| {
            (
                (record.table.tag(), record.key.to_string()),
                Record {
                    version: record.record_version,
                    payload: record.payload.clone(),
                },
            )
        })
        .collect()
}

/// The raw pairs of records. A table that the codec does not know is left out: a step that goes back
/// before a table was introduced removes its records itself.
///
/// # Errors
/// When a record is too big.
pub fn to_pairs(records: &Records) -> Result<Vec<RawPair>, CodecError> {
    let mut pairs = Vec::new();
    for ((tag, key), record) in records {
        if let Some(table) = Table::from_tag(*tag) {
            let sealed = codec::seal(table, key, record.version, record.payload.clone())?;
            pairs.extend(sealed.into_pairs(table, key));
        }
    }
    Ok(pairs)
}

fn read(db: &Path) -> Result<(Vec<RawPair>, RawLoaded), BackendError> {
    let backend = SledBackend::open(db, SledOptions::default())?;
    let pairs: Vec<RawPair> = backend.iter().collect::<Result<_, _>>()?;
    let raw = codec::load_raw(pairs.iter().cloned().map(Ok));
    Ok((pairs, raw))
}

fn back_up(
    layout: &Layout,
    pairs: &[RawPair],
    schema: u32,
    now: Stamp,
) -> Result<PathBuf, BackupError> {
    let loaded = codec::load(pairs.iter().cloned().map(Ok), 1);
    let meta = BackupMeta {
        schema,
        ..BackupMeta::of(&loaded.state, 1, now)
    };
    // Another name than an automatic backup's: it is not rotated away.
    let time = now.rfc3339().replace([':', '-'], "");
    let path = layout
        .backups()
        .join(format!("before-migration-from-{schema}-{time}.holdfast"));
    backup::write_pairs(pairs, &path, &meta)?;
    Ok(path)
}

/// Builds a complete database in `db.next`.
pub(super) fn build(
    layout: &Layout,
    pairs: impl Iterator<Item = RawPair>,
) -> Result<(), BackendError> {
    let io = |source| BackendError::io("build a database", source);
    let building = layout.building();
    remove_tree(&building).map_err(io)?;
    remove_tree(&layout.next()).map_err(io)?;
    let result = fill_new(&building, pairs);
    if result.is_err() {
        remove_tree(&building).map_err(io)?;
    }
    result?;
    std::fs::rename(&building, layout.next()).map_err(io)?;
    sync_dir(layout.dir()).map_err(io)
}

fn fill_new(path: &Path, pairs: impl Iterator<Item = RawPair>) -> Result<(), BackendError> {
    let mut backend = SledBackend::open(path, SledOptions::default())?;
    let mut batch = Vec::with_capacity(BATCH);
    for (key, value) in pairs {
        batch.push(Op::Put { key, value });
        if batch.len() == BATCH {
            backend.apply(&batch)?;
            batch.clear();
        }
    }
    backend.apply(&batch)?;
    backend.sync()
}

struct Fail<'a>(&'a Path);

impl Fail<'_> {
    fn no_schema(&self) -> MigrateError {
        MigrateError::NoSchema {
            dir: self.0.to_owned(),
        }
    }

    fn damaged(&self, reason: String) -> MigrateError {
        MigrateError::Damaged {
            dir: self.0.to_owned(),
            reason,
        }
    }

    fn backend(&self, source: BackendError) -> MigrateError {
        MigrateError::Backend {
            dir: self.0.to_owned(),
            source,
        }
    }

    fn io(&self, source: io::Error) -> MigrateError {
        MigrateError::Io {
            dir: self.0.to_owned(),
            source,
        }
    }
}
