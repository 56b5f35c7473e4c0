//! Examines a store without changing it, and repairs it on demand.
//!
//! The input is a state directory that no agent has open (for a live store, the agent is asked); the output is its
//! records and problems. sled creates and changes files when it opens a database, so everything here but [`repair`]
//! works on a copy of the files.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use super::backend::{Backend as _, SledBackend, SledOptions};
use super::backup;
use super::ballast;
use super::codec::{self, Loaded, Quarantined};
use super::engine;
use super::layout::{Layout, copy_db, occupied, size_of};
use super::mark::{self, Mark};
use super::open::{self, OpenError, OpenOptions, OpenReport, Outcome};
use super::{migrate, salvage};
use crate::types::causes;

/// Failure to examine a store.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// There is none.
    #[error("no store in {}: there is no directory `db`; is this the right --state-dir?", dir.display())]
    Absent {
        /// State directory.
        dir: PathBuf,
    },
    /// Its files cannot be read.
    #[error("read the store in {}", dir.display())]
    Io {
        /// State directory.
        dir: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// A store as a copy of its files has it.
#[derive(Debug)]
pub struct ReadCopy {
    /// Its records; what is damaged, or of another schema, is in `loaded.quarantined`.
    pub loaded: Loaded,
    /// Its schema, if known.
    pub schema: Option<u32>,
    /// The engine could not open the copy: these are the records that could be salvaged from its log.
    pub salvaged: bool,
    /// Findings, for a human.
    pub notes: Vec<String>,
    /// A newer binary wrote it: its schema by its own record, or by what is written beside it, or one of its records.
    pub newer: bool,
}

/// Result of [`verify`].
#[derive(Debug)]
pub struct VerifyReport {
    /// Schema, if known.
    pub schema: Option<u32>,
    /// Usable records by table.
    pub records: BTreeMap<&'static str, usize>,
    /// Records that cannot be used.
    pub quarantined: Vec<Quarantined>,
    /// Records that earlier runs moved to quarantine.
    pub kept: Vec<Quarantined>,
    /// Problems of the files, for a human.
    pub problems: Vec<String>,
    /// Backups, newest first, with what is wrong with them.
    pub backups: Vec<(PathBuf, Option<String>)>,
}

impl VerifyReport {
    /// Returns whether the store is undamaged. Quarantined records of earlier runs and bad backups do not count.
    pub fn is_ok(&self) -> bool {
        self.problems.is_empty() && self.quarantined.is_empty()
    }
}

/// Sizes and counts, for `holdfast store stats`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stats {
    /// Schema, if known.
    pub schema: Option<u32>,
    /// Records by table.
    pub records: BTreeMap<&'static str, usize>,
    /// Bytes of the encoded records.
    pub live_bytes: u64,
    /// Bytes of the database's files, by their lengths.
    pub db_bytes: u64,
    /// Bytes that the whole state directory occupies on the disk.
    pub disk_bytes: u64,
    /// Number of automatic backups.
    pub backups: usize,
    /// Bytes of the directory of backups.
    pub backup_bytes: u64,
    /// Bytes in quarantine.
    pub quarantine_bytes: u64,
    /// Bytes of the ballast file, 0 when it was released.
    pub ballast_bytes: u64,
    /// Number of raw values that could not be used or were moved to quarantine.
    pub quarantined: usize,
}

/// Result of [`repair`].
#[derive(Debug)]
pub struct RepairReport {
    /// Findings and repairs of opening it.
    pub open: OpenReport,
    /// Records by table afterwards.
    pub records: BTreeMap<&'static str, usize>,
}

/// Reads a copy of the database files; never changes the store. Works on a damaged store.
///
/// # Errors
/// When there is no store or its files cannot be copied.
pub fn read_copy(dir: &Path) -> Result<ReadCopy, VerifyError> {
    let layout = Layout::new(dir);
    let io = |source| VerifyError::Io {
        dir: dir.to_owned(),
        source,
    };
    let db = find_db(&layout)?;
    // Before the copy is made: a mark that is read later may be of a later batch.
    let mark = Mark::read(&layout.mark());
    let temporary = tempfile::tempdir().map_err(io)?;
    let copy = temporary.path().join("db");
    copy_db(&db, &copy).map_err(io)?;
    let mut notes = Vec::new();
    let log = salvage::read_log(&copy).map_err(io)?;
    let damage = log.damage().count();
    for gap in log.damage() {
        notes.push(format!(
            "the log is damaged at offset {}: {} bytes cannot be read",
            gap.offset, gap.len
        ));
    }
    if log.bad_blobs > 0 {
        notes.push(format!(
            "{} blob files are missing or damaged",
            log.bad_blobs
        ));
    }
    let opened = if damage == 0 {
        open_copy(&copy, &mut notes)
    } else {
        None
    };
    let salvaged = opened.is_none();
    let pairs = opened.unwrap_or_else(|| log.pairs.into_iter().collect());
    let raw = codec::load_raw(pairs.iter().cloned().map(Ok));
    let schema = migrate::schema_of(&migrate::to_records(&raw)).or_else(|| layout.schema());
    let loaded = codec::load(pairs.into_iter().map(Ok), 1);
    let epoch = loaded.state.meta().map_or(0, |meta| meta.epoch.number);
    if mark::missing(epoch, mark::last_line(&loaded), mark).is_some() {
        notes.push(
            "commits that had been acknowledged are missing: the database was cut off or is an older copy"
                .to_owned(),
        );
    }
    let newer = schema.max(layout.schema()) > Some(migrate::SCHEMA) || loaded.newer().is_some();
    Ok(ReadCopy {
        newer,
        loaded,
        schema,
        salvaged,
        notes,
    })
}

/// Checks that there is a store to read at all.
///
/// # Errors
/// [`VerifyError::Absent`] when there is none.
pub fn present(dir: &Path) -> Result<(), VerifyError> {
    find_db(&Layout::new(dir)).map(drop)
}

/// The database, or the complete one that a crash kept from its place.
fn find_db(layout: &Layout) -> Result<PathBuf, VerifyError> {
    [layout.db(), layout.next()]
        .into_iter()
        .find(|db| db.is_dir())
        .ok_or_else(|| VerifyError::Absent {
            dir: layout.dir().to_owned(),
        })
}

/// Every pair of a copied database, trying without its snapshots when sled cannot use them.
fn open_copy(copy: &Path, notes: &mut Vec<String>) -> Option<Vec<super::backend::RawPair>> {
    for attempt in 0..2 {
        let pairs = SledBackend::open(copy, SledOptions::default())
            .and_then(|backend| backend.iter().collect::<Result<Vec<_>, _>>());
        match pairs {
            Ok(pairs) => return Some(pairs),
            Err(error) => notes.push(error.full_text()),
        }
        if attempt == 0
            && let Err(error) = engine::remove_snapshots(copy)
        {
            notes.push(format!("remove snapshots from the copy: {error}"));
        }
    }
    None
}

/// Checks a store and its backups without changing anything.
///
/// # Errors
/// When there is no store or its files cannot be copied.
pub fn verify(dir: &Path) -> Result<VerifyReport, VerifyError> {
    let layout = Layout::new(dir);
    let copy = read_copy(dir)?;
    let io = |source| VerifyError::Io {
        dir: dir.to_owned(),
        source,
    };
    let mut backups = Vec::new();
    for path in backup::list(&layout.backups()).map_err(io)? {
        let wrong = backup::read(&path).err().map(|error| causes(&error));
        backups.push((path, wrong));
    }
    Ok(VerifyReport {
        schema: copy.schema,
        records: copy.loaded.state.counts(),
        quarantined: copy.loaded.quarantined,
        kept: copy.loaded.kept,
        problems: copy.notes,
        backups,
    })
}

/// Opens the store with every repair of [`open::open`], and closes it again; one that a newer binary wrote
/// (`present.newer`) is left as it is. The caller holds the state directory's lock.
///
/// # Errors
/// When another process has the store open.
pub fn repair(options: &OpenOptions, present: &ReadCopy) -> Result<RepairReport, OpenError> {
    if present.newer {
        return Ok(RepairReport {
            open: OpenReport {
                outcome: Outcome::NewerSchema {
                    found: present.schema.filter(|found| *found > migrate::SCHEMA),
                },
                quarantined: Vec::new(),
                new_epoch: None,
                migrated_from: None,
                messages: Vec::new(),
            },
            records: present.loaded.state.counts(),
        });
    }
    let opened = open::open(options)?;
    let mut backend = opened.backend;
    let mut loaded = opened.loaded;
    let mut report = opened.report;
    if let Err(error) = set_aside_bad_records(&mut *backend, &mut loaded) {
        report
            .messages
            .push(format!("set damaged records aside: {}", error.full_text()));
    }
    Ok(RepairReport {
        records: loaded.state.counts(),
        open: report,
    })
}

fn set_aside_bad_records(
    backend: &mut dyn super::backend::Backend,
    loaded: &mut Loaded,
) -> Result<(), super::backend::BackendError> {
    let batch: Vec<_> = loaded
        .quarantined
        .iter()
        .filter(|q| !q.reason.is_newer())
        .flat_map(open::set_aside_ops)
        .collect();
    if !batch.is_empty() {
        backend.apply(&batch)?;
        backend.sync()?;
    }
    Ok(())
}

/// Sizes and counts of a store, without changing it.
///
/// # Errors
/// When there is no store or its files cannot be copied.
pub fn stats(dir: &Path) -> Result<Stats, VerifyError> {
    let layout = Layout::new(dir);
    let copy = read_copy(dir)?;
    let live_bytes = codec::encode_state(&copy.loaded.state)
        .filter_map(Result::ok)
        .map(|(key, value)| (key.len() + value.len()) as u64)
        .sum();
    let size = |path: &Path| size_of(path).unwrap_or(0);
    Ok(Stats {
        schema: copy.schema,
        records: copy.loaded.state.counts(),
        live_bytes,
        db_bytes: size(&layout.db()),
        disk_bytes: occupied(dir).unwrap_or(0),
        backups: backup::list(&layout.backups()).map_or(0, |found| found.len()),
        backup_bytes: size(&layout.backups()),
        quarantine_bytes: size(&layout.quarantine()),
        ballast_bytes: size(&ballast::path(dir)),
        quarantined: copy.loaded.quarantined.len() + copy.loaded.kept.len(),
    })
}
