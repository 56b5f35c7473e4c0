//! Replaces the store with a backup, and shows beforehand what that would change.
//!
//! **Invariant:** the backup has been verified, converted and written to a complete database before the store is
//! touched; the previous store is moved to quarantine.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::backend::BackendError;
use super::backup::Backup;
use super::codec::{self, CodecError};
use super::layout::Layout;
use super::mark::Mark;
use super::migrate::{self, MigrateError, MigrationSet, SCHEMA};
use super::recover::{self, Identity, Integrity};
use crate::core::state::{State, Table};
use crate::types::Stamp;

/// Reason for which a backup was not restored. The store is unchanged.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// It was taken on another node.
    #[error(
        "restore backup of node {backup:?} on node {node:?}: pods of another node would be adopted; pass --allow-other-node if that is meant"
    )]
    OtherNode {
        /// Node of the backup, with its machine id.
        backup: String,
        /// This node, with its machine id.
        node: String,
    },
    /// Its schema cannot be converted.
    #[error("convert the backup to schema {SCHEMA}")]
    Migrate(#[source] Box<MigrateError>),
    /// Records in it are damaged although its checksum matches.
    #[error(
        "the backup holds {count} unusable records, the first is {first}: it was taken of a damaged store; use another backup"
    )]
    BadRecords {
        /// Number of unusable records.
        count: usize,
        /// The first, with the reason.
        first: String,
    },
    /// A record could not be encoded.
    #[error("encode the records of the backup")]
    Codec(#[source] CodecError),
    /// The new database could not be written.
    #[error("write the restored database in {}", dir.display())]
    Backend {
        /// State directory.
        dir: PathBuf,
        /// The cause.
        #[source]
        source: BackendError,
    },
    /// The file system refused.
    #[error("restore to {}", dir.display())]
    Io {
        /// State directory.
        dir: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// Changes that a restore makes in one table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableDiff {
    /// The table.
    pub table: Table,
    /// Keys that only the backup has.
    pub added: Vec<Arc<str>>,
    /// Keys with other content.
    pub changed: Vec<Arc<str>>,
    /// Keys that only the store has.
    pub removed: Vec<Arc<str>>,
}

/// Changes that a restore makes; tables without a change are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Diff {
    /// By table.
    pub tables: Vec<TableDiff>,
}

/// Options of [`apply`].
#[derive(Clone, Debug)]
pub struct RestoreOptions {
    /// This node.
    pub identity: Identity,
    /// Take another node's backup.
    pub allow_other_node: bool,
    /// Now.
    pub now: Stamp,
}

/// Result of [`apply`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoreReport {
    /// Records restored.
    pub records: usize,
    /// The new epoch.
    pub epoch: u64,
    /// Path of the previous store.
    pub previous: Option<PathBuf>,
}

/// Returns the changes of restoring `backup` over `current`; for `--dry-run`.
///
/// # Errors
/// When the backup cannot be converted to the schema of this binary or holds damaged records.
pub fn plan(current: Option<&State>, backup: &Backup) -> Result<Diff, RestoreError> {
    let new = state_of(backup)?;
    let empty = State::default();
    let old = current.unwrap_or(&empty);
    let keys: BTreeSet<(Table, Arc<str>)> = old
        .iter_all()
        .chain(new.iter_all())
        .map(|(table, key, _)| (table, key))
        .collect();
    let mut diff = Diff::default();
    for (table, key) in keys {
        let before = old.get_any(table, &key);
        let after = new.get_any(table, &key);
        if before == after {
            continue;
        }
        if diff.tables.last().is_none_or(|t| t.table != table) {
            diff.tables.push(TableDiff {
                table,
                added: Vec::new(),
                changed: Vec::new(),
                removed: Vec::new(),
            });
        }
        if let Some(entry) = diff.tables.last_mut() {
            match (before, after) {
                (None, _) => entry.added.push(key),
                (_, None) => entry.removed.push(key),
                _ => entry.changed.push(key),
            }
        }
    }
    Ok(diff)
}

/// The records of a backup at the schema of this binary.
///
/// # Errors
/// When it cannot be converted or holds damaged records.
pub fn state_of(backup: &Backup) -> Result<State, RestoreError> {
    let mut pairs = backup.pairs.clone();
    if backup.meta.schema != SCHEMA {
        let raw = codec::load_raw(pairs.into_iter().map(Ok));
        let records = migrate::to_records(&raw);
        let records = migrate::convert(
            MigrationSet::default(),
            records,
            backup.meta.schema,
            SCHEMA,
            Path::new("(backup)"),
        )
        .map_err(|e| RestoreError::Migrate(Box::new(e)))?;
        pairs = migrate::to_pairs(&records).map_err(RestoreError::Codec)?;
    }
    let loaded = codec::load(pairs.into_iter().map(Ok), 1);
    match loaded.quarantined.first() {
        None => Ok(loaded.state),
        Some(bad) => Err(RestoreError::BadRecords {
            count: loaded.quarantined.len(),
            first: format!("{}: {}", bad.key, bad.reason),
        }),
    }
}

/// Replaces the store in `dir` by a backup and starts a new epoch: what runs is adopted, nothing else starts
/// until its source confirms it. Blocks; the caller holds the state directory's lock.
///
/// # Errors
/// See [`RestoreError`]; the store is then unchanged.
pub fn apply(
    dir: &Path,
    backup: &Backup,
    options: &RestoreOptions,
) -> Result<RestoreReport, RestoreError> {
    refuse_other_node(backup, options)?;
    let mut state = state_of(backup)?;
    let layout = Layout::new(dir);
    let io = |source| RestoreError::Io {
        dir: dir.to_owned(),
        source,
    };
    layout.create().map_err(io)?;
    layout.settle().map_err(io)?;
    let seen_epoch = highest_epoch(&layout).max(backup.meta.epoch);
    let (meta, _) = recover::next_meta(
        state.meta(),
        Integrity::Restored,
        &options.identity,
        seen_epoch,
        SCHEMA,
        options.now,
    );
    let epoch = meta.epoch.number;
    recover::put_meta(&mut state, meta, 1);
    let pairs: Vec<_> = codec::encode_state(&state)
        .collect::<Result<_, _>>()
        .map_err(RestoreError::Codec)?;
    migrate::build(&layout, pairs.into_iter()).map_err(|source| RestoreError::Backend {
        dir: dir.to_owned(),
        source,
    })?;
    let previous = layout
        .swap_in("db-before-restore", options.now)
        .and_then(|previous| layout.write_schema(SCHEMA).map(|()| previous))
        .map_err(io)?;
    tracing::info!(epoch, "restored the store from a backup");
    Ok(RestoreReport {
        records: state.iter_all().count(),
        epoch,
        previous,
    })
}

fn refuse_other_node(backup: &Backup, options: &RestoreOptions) -> Result<(), RestoreError> {
    let meta = &backup.meta;
    let identity = &options.identity;
    let machine_known = !meta.machine_id.is_empty() && !identity.machine_id.is_empty();
    let other = meta.node_name != identity.node_name
        || (machine_known && meta.machine_id != identity.machine_id);
    if other && !options.allow_other_node {
        return Err(RestoreError::OtherNode {
            backup: format!("{} ({})", meta.node_name, meta.machine_id),
            node: format!("{} ({})", identity.node_name, identity.machine_id),
        });
    }
    Ok(())
}

/// The highest epoch number the present store, its mark and its backups know, so that a restore does not reuse one.
fn highest_epoch(layout: &Layout) -> u64 {
    let in_backups = super::backup::newest(&layout.backups())
        .0
        .map_or(0, |backup| backup.meta.epoch);
    let in_store = super::verify::read_copy(layout.dir())
        .ok()
        .and_then(|copy| copy.loaded.state.meta().map(|m| m.epoch.number))
        .unwrap_or(0);
    let in_mark = Mark::read(&layout.mark()).map_or(0, |mark| mark.epoch);
    in_backups.max(in_store).max(in_mark)
}
