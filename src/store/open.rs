//! Opens the store, whatever state it is in.
//!
//! The input is a state directory; the output is an open backend, the records in it, and a report of the repairs.
//! [`open`] reads as the list of steps; a crash may repeat every one of them.
//!
//! **Invariant:** nothing that was read or written is thrown away: unusable parts are moved to quarantine.
//! **Invariant:** only damage moves a database aside. A full disk, missing permissions or a held lock do not.
//! **Invariant:** sled opens a database only after its log has been checked: sled cuts the log at the first message it
//! cannot read and erases the rest.

mod rebuild;

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use self::rebuild::rebuild;
use super::backend::{Backend, BackendError, Op, SledBackend};
use super::backup;
use super::closed::ClosedBackend;
use super::codec::{self, Loaded, Quarantined};
use super::engine::{self, Found, Mended, VERSION, is_damage};
use super::layout::Layout;
use super::mark::{self, Mark, Marked, Missing};
use super::migrate::{self, SCHEMA};
pub use super::outcome::{OpenError, OpenOptions, OpenReport, Opened, Outcome};
use super::recover::{self, Integrity};
use super::restore;
use super::salvage::{self, Salvage};
use super::writer::last_journal_sequence;
use crate::core::state::{EpochReason, State, Table};
use crate::types::Stamp;

/// Opens or creates the store. Never refuses because of damage. Blocks; the caller holds the state
/// directory's lock.
///
/// # Errors
/// See [`OpenError`].
pub fn open(options: &OpenOptions) -> Result<Opened, OpenError> {
    let layout = Layout::new(&options.dir);
    let was_used = layout.is_used() || options.node_was_used;
    // Before the database is touched: the mark must not be newer than what is read after it.
    let mark = Mark::read(&layout.mark());
    let mut report = Report::default();
    let tidied = layout.create().and_then(|()| layout.settle());

    if let Some(found) = layout.schema().filter(|found| *found > SCHEMA)
        && layout.db().exists()
    {
        return open_stand_in(options, &layout, Some(found), report);
    }
    let unreadable = |source| unreadable(options, source);
    let log = salvage::check_log(&layout.db()).map_err(unreadable)?;
    let is_unreadable = log.is_unreadable;
    // What sled would cut off has to be read before it does.
    let log = if log.is_whole() {
        None
    } else {
        Some(salvage::read_log(&layout.db()).map_err(unreadable)?)
    };
    let all_of = |log: Option<Salvage>| match log {
        Some(log) => Ok(log),
        None => salvage::read_log(&layout.db()).map_err(unreadable),
    };
    if let Err(error) = tidied {
        report.note(format!("prepare {}: {error}", options.dir.display()));
        return unwritable(
            options,
            all_of(log)?,
            mark,
            &BackendError::io("prepare the state directory", error),
            report,
        );
    }
    let damage = log.as_ref().map_or(0, Salvage::damages);
    let opened = if mark.is_some() && is_unreadable {
        // A mark is written after a sync only: this is no database that was never finished.
        report.note("nothing can be read of the database's log".to_owned());
        Err(None)
    } else if damage > 0 {
        report.note(format!(
            "the database's log is damaged in {damage} places that had been synced"
        ));
        Err(None)
    } else {
        open_sled(options, &layout, &layout.db(), &mut report)?.map_err(Some)
    };
    let (backend, loaded) = match opened {
        Ok(found) => found,
        Err(Some(error)) if !is_damage(&error) => {
            return unwritable(options, all_of(log)?, mark, &error, report);
        }
        Err(_) => return rebuild(options, &layout, all_of(log)?, mark, report),
    };
    if is_newer(&loaded) {
        drop(backend);
        return open_stand_in(options, &layout, found_schema(&loaded), report);
    }
    if let Some(from) = found_schema(&loaded).filter(|found| *found < SCHEMA) {
        drop(backend);
        return migrate_and_open(options, &layout, from, mark, report);
    }
    if log.is_some() && missing_end(&loaded, mark, &mut report).is_some() {
        // What was read before sled cut it off may hold more.
        drop(backend);
        return rebuild(options, &layout, all_of(log)?, mark, report);
    }
    let (newest, errors) = backup::newest_meta(&layout.backups());
    report.messages.extend(errors);
    let is_empty = loaded.state.meta().is_none() && loaded.quarantined.is_empty();
    if is_empty && newest.is_none() && !has_pods(&loaded.state) {
        let integrity = if was_used {
            Integrity::Lost
        } else {
            Integrity::New
        };
        report.outcome = Some(Outcome::Created);
        let seen_epoch = mark.map_or(0, |mark| mark.epoch);
        let database = Database::new(backend, loaded, integrity, seen_epoch);
        return finish(options, &layout, database, report);
    }
    if let Some(backup) = &newest
        && recover::is_behind(&loaded.state, backup)
    {
        report.note(
            "the database is older than its newest backup: an end of it is missing".to_owned(),
        );
        drop(backend);
        return rebuild(options, &layout, all_of(log)?, mark, report);
    }
    let missing = missing_end(&loaded, mark, &mut report);
    let seen = Seen {
        epoch: highest_epoch(newest.map(|backup| backup.epoch), mark),
        missing,
    };
    mend(options, &layout, backend, loaded, seen, report)
}

/// Facts about a database that are stored outside it.
struct Seen {
    /// The highest epoch number.
    epoch: u64,
    /// Acknowledged commits that it lacks.
    missing: Option<Missing>,
}

fn highest_epoch(backup: Option<u64>, mark: Option<Mark>) -> u64 {
    backup.max(mark.map(|mark| mark.epoch)).unwrap_or(0)
}

fn missing_end(loaded: &Loaded, mark: Option<Mark>, report: &mut Report) -> Option<Missing> {
    let epoch = loaded.state.meta().map_or(0, |meta| meta.epoch.number);
    let missing = mark::missing(epoch, mark::last_line(loaded), mark)?;
    report.note(match missing.lines {
        Some(lines) => {
            format!("an end of the database is missing: {lines} lines of the journal and what was written with them")
        }
        None => "the database is an older one than the one last written to".to_owned(),
    });
    Some(missing)
}

/// The operations that move a damaged value within the database.
pub(super) fn set_aside_ops(bad: &Quarantined) -> [Op; 2] {
    let (key, value) = bad.to_pair();
    let raw_key = bad.raw_key.clone();
    [Op::Put { key, value }, Op::Delete { key: raw_key }]
}

#[derive(Default)]
struct Report {
    outcome: Option<Outcome>,
    quarantined: Vec<PathBuf>,
    migrated_from: Option<u32>,
    messages: Vec<String>,
}

impl Report {
    fn note(&mut self, message: String) {
        tracing::warn!(message = %message, "opening the store");
        self.messages.push(message);
    }

    fn finish(self, new_epoch: Option<EpochReason>) -> OpenReport {
        OpenReport {
            outcome: self.outcome.unwrap_or(Outcome::Opened),
            quarantined: self.quarantined,
            new_epoch,
            migrated_from: self.migrated_from,
            messages: self.messages,
        }
    }
}

/// Opens a database and notes what had to be moved for it. The outer error is the caller's.
fn open_sled(
    options: &OpenOptions,
    layout: &Layout,
    db: &Path,
    report: &mut Report,
) -> Result<Result<Found, BackendError>, OpenError> {
    let mut mended = Mended::default();
    let result = engine::open_database(&options.sled, layout, db, options.now, &mut mended);
    let without = !mended.moved.is_empty();
    report.quarantined.extend(mended.moved);
    for message in mended.messages {
        report.note(message);
    }
    match result {
        Err(BackendError::Locked { reason, .. }) => Err(OpenError::Locked {
            dir: options.dir.clone(),
            reason,
        }),
        Ok(found) if without => {
            report
                .note("the database opened without its snapshots or its configuration".to_owned());
            report.outcome = Some(Outcome::SnapshotsRemoved);
            Ok(Ok(found))
        }
        other => Ok(other),
    }
}

/// Returns whether the store was written by a newer binary.
fn is_newer(loaded: &Loaded) -> bool {
    loaded.newer().is_some() || loaded.state.meta().is_some_and(|m| m.schema > SCHEMA)
}

fn found_schema(loaded: &Loaded) -> Option<u32> {
    if let Some(meta) = loaded.state.meta() {
        return Some(meta.schema);
    }
    let raw = loaded
        .quarantined
        .iter()
        .map(|bad| Ok((bad.raw_key.clone(), bad.raw.clone())));
    migrate::schema_of(&migrate::to_records(&codec::load_raw(raw)))
}

fn has_pods(state: &State) -> bool {
    !state.pods.is_empty() || !state.workers.is_empty()
}

/// Migrates an older store and opens it again. One that cannot be migrated is left as it is. If the disk is the reason, as a
/// full one, the node works from memory with the converted records, and writes them once it can.
fn migrate_and_open(
    options: &OpenOptions,
    layout: &Layout,
    from: u32,
    mark: Option<Mark>,
    mut report: Report,
) -> Result<Opened, OpenError> {
    match migrate::migrate(&options.dir, SCHEMA, options.now) {
        Ok(done) => {
            let mut opened = open(options)?;
            opened.report.migrated_from = Some(from);
            opened.report.quarantined.extend(done.previous);
            Ok(opened)
        }
        Err(error) => {
            report.note(format!("migrate the store: {}", full_text(&error)));
            if let Some(disk) = error.of_disk() {
                let log = salvage::read_log(&layout.db())
                    .map_err(|source| unreadable(options, source))?;
                return unwritable(options, log, mark, &disk, report);
            }
            open_stand_in(options, layout, Some(from), report)
        }
    }
}

fn full_text(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        text.push_str(": ");
        text.push_str(&next.to_string());
        cause = next.source();
    }
    text
}

/// Leaves a newer store alone and uses a database beside it.
fn open_stand_in(
    options: &OpenOptions,
    layout: &Layout,
    found: Option<u32>,
    mut report: Report,
) -> Result<Opened, OpenError> {
    let stand_in = layout.stand_in(SCHEMA);
    report.note(format!(
        "the store has schema {}, this binary knows {SCHEMA}: it is left untouched and {} is used; to take its \
         records along, run `holdfast store migrate --to {SCHEMA}` with the newer binary",
        found.map_or_else(|| "of a newer binary".to_owned(), |n| n.to_string()),
        stand_in.display()
    ));
    // A stand-in of an earlier downgrade knows nothing of what the newer binary did since.
    if stand_in.exists() {
        let aside = layout
            .set_aside(&stand_in, "db-stand-in", options.now)
            .map_err(|source| unreadable(options, source))?;
        report.quarantined.push(aside);
    }
    report.outcome = Some(Outcome::NewerSchema { found });
    let mut ignored = Report::default();
    match open_sled(options, layout, &stand_in, &mut ignored)? {
        Ok((backend, loaded)) => {
            let database = Database::new(backend, loaded, Integrity::Lost, 0);
            finish_in(options, None, layout, database, report)
        }
        Err(error) => unwritable(options, Salvage::default(), None, &error, report),
    }
}

/// Sets damaged records aside and takes their last good version from the newest backup.
fn mend(
    options: &OpenOptions,
    layout: &Layout,
    mut backend: SledBackend,
    mut loaded: Loaded,
    seen: Seen,
    mut report: Report,
) -> Result<Opened, OpenError> {
    let bad = bad_records(&loaded);
    if bad.is_empty() {
        let mut integrity = Integrity::Intact;
        if let Some(Missing { lines }) = seen.missing {
            // No backup is newer than what is there: what a backup has and this has not was deleted.
            integrity = Integrity::Lost;
            report.outcome = Some(Outcome::EndMissing { lines });
        }
        let database = Database::new(backend, loaded, integrity, seen.epoch);
        return finish(options, layout, database, report);
    }
    let saved = backup::newest(&layout.backups())
        .0
        .and_then(|backup| restore::state_of(&backup).ok());
    let mut ops = Vec::new();
    for quarantined in loaded.quarantined.iter().filter(|q| !q.reason.is_newer()) {
        report.note(format!(
            "record {} is damaged, moved to quarantine: {}",
            quarantined.key, quarantined.reason
        ));
        ops.extend(set_aside_ops(quarantined));
    }
    let mut from_backup = 0;
    for (table, key) in bad.iter().filter_map(|(table, key)| Some(((*table)?, key))) {
        if let Some(record) = saved.as_ref().and_then(|state| state.get_any(table, key))
            && let Ok(encoded) = codec::encode(key, &record)
        {
            from_backup += 1;
            let pairs = encoded.into_pairs(table, key);
            ops.extend(pairs.map(|(key, value)| Op::Put { key, value }));
        }
    }
    let lost_decisions = bad
        .iter()
        .any(|(table, _)| table.is_none_or(recover::holds_decisions));
    report.outcome = Some(Outcome::RecordsLost {
        lost: bad.len(),
        from_backup,
    });
    if let Err(error) = backend.apply(&ops).and_then(|()| backend.sync()) {
        report.note(format!("set damaged records aside: {}", error.full_text()));
        return unwritable_after(options, Box::new(backend), loaded, &error, report);
    }
    loaded = codec::load(backend.iter(), VERSION);
    let integrity = if lost_decisions || seen.missing.is_some() {
        Integrity::Lost
    } else {
        Integrity::Intact
    };
    let database = Database::new(backend, loaded, integrity, seen.epoch);
    finish(options, layout, database, report)
}

/// The damaged records, each once.
fn bad_records(loaded: &Loaded) -> BTreeSet<(Option<Table>, String)> {
    loaded
        .quarantined
        .iter()
        .filter(|bad| !bad.reason.is_newer())
        .map(|bad| (bad.table, bad.key.clone()))
        .collect()
}

/// A database that was read, and how much of it is to be believed.
struct Database {
    backend: SledBackend,
    loaded: Loaded,
    integrity: Integrity,
    /// Highest epoch that is known of it.
    seen_epoch: u64,
}

impl Database {
    fn new(backend: SledBackend, loaded: Loaded, integrity: Integrity, seen_epoch: u64) -> Self {
        Self {
            backend,
            loaded,
            integrity,
            seen_epoch,
        }
    }
}

/// Writes the meta record of this node and returns the open store.
fn finish(
    options: &OpenOptions,
    layout: &Layout,
    database: Database,
    report: Report,
) -> Result<Opened, OpenError> {
    finish_in(options, Some(SCHEMA), layout, database, report)
}

fn finish_in(
    options: &OpenOptions,
    schema_file: Option<u32>,
    layout: &Layout,
    database: Database,
    mut report: Report,
) -> Result<Opened, OpenError> {
    let Database {
        backend,
        mut loaded,
        integrity,
        seen_epoch,
    } = database;
    let found = loaded.state.meta().cloned();
    let (meta, new_epoch) = recover::next_meta(
        found.as_ref(),
        integrity,
        &options.identity,
        seen_epoch,
        SCHEMA,
        options.now,
    );
    if let Some(schema) = schema_file {
        if let Err(error) = layout.write_schema(schema) {
            report.note(format!("write down the schema: {error}"));
        }
        set_stand_ins_aside(layout, options.now, &mut report);
    }
    prune(layout, &mut report);
    let changed = found.as_ref() != Some(&meta);
    recover::put_meta(&mut loaded.state, meta, VERSION);
    let backend: Box<dyn Backend> = Box::new(backend);
    let mut backend = match schema_file {
        Some(_) => marked(layout, backend, &loaded),
        None => backend,
    };
    if changed && let Err(error) = write_meta(&mut *backend, &loaded.state) {
        return unwritable_after(options, backend, loaded, &error, report);
    }
    if changed && schema_file.is_some() {
        mark_epoch(layout, &loaded);
    }
    Ok(Opened {
        backend,
        loaded,
        report: report.finish(new_epoch),
    })
}

/// Marks that an epoch has begun; what is loaded has just been synced. Databases of earlier epochs are
/// recognised from here on.
fn mark_epoch(layout: &Layout, loaded: &Loaded) {
    let epoch = loaded.state.meta().map_or(0, |meta| meta.epoch.number);
    let line = last_journal_sequence(&loaded.state);
    if let Err(error) = (Mark { epoch, line }).write(&layout.mark()) {
        tracing::warn!(%error, "cannot write the high-water mark of the store");
    }
}

/// The backend with a mark that goes on where the database stands.
fn marked(layout: &Layout, backend: Box<dyn Backend>, loaded: &Loaded) -> Box<dyn Backend> {
    let epoch = loaded.state.meta().map_or(0, |meta| meta.epoch.number);
    let marked = Marked::new(backend, layout.mark(), epoch);
    Box::new(marked)
}

fn write_meta(backend: &mut dyn Backend, state: &State) -> Result<(), BackendError> {
    let ops: Vec<Op> = codec::encode_state(state)
        .take_while(|pair| {
            pair.as_ref()
                .is_ok_and(|(key, _)| key.first() == Some(&Table::Meta.tag()))
        })
        .filter_map(Result::ok)
        .map(|(key, value)| Op::Put { key, value })
        .collect();
    backend.apply(&ops)?;
    backend.sync()
}

/// Stand-ins were used while `db` had a newer schema; it is in use again.
fn set_stand_ins_aside(layout: &Layout, now: Stamp, report: &mut Report) {
    for schema in 1..=SCHEMA {
        let stand_in = layout.stand_in(schema);
        if !stand_in.exists() {
            continue;
        }
        match layout.set_aside(&stand_in, "db-stand-in", now) {
            Ok(aside) => report.quarantined.push(aside),
            Err(error) => report.note(format!("move {} aside: {error}", stand_in.display())),
        }
    }
}

fn prune(layout: &Layout, report: &mut Report) {
    if let Err(error) = layout.prune_quarantine() {
        report.note(format!("delete old entries of the quarantine: {error}"));
    }
}

fn unreadable(options: &OpenOptions, source: io::Error) -> OpenError {
    OpenError::Unreadable {
        dir: options.dir.clone(),
        source,
    }
}

/// The store as its log has it, for as long as the engine cannot be opened.
fn unwritable(
    options: &OpenOptions,
    log: Salvage,
    mark: Option<Mark>,
    error: &BackendError,
    mut report: Report,
) -> Result<Opened, OpenError> {
    let schema = Layout::new(&options.dir).schema();
    let mut loaded = migrate::load_current(log.pairs.into_iter().collect(), schema, VERSION);
    if is_newer(&loaded) {
        loaded = Loaded::default();
    }
    let missing = missing_end(&loaded, mark, &mut report);
    let integrity = if loaded.state.meta().is_some() && missing.is_none() {
        Integrity::Intact
    } else {
        Integrity::Lost
    };
    let (meta, new_epoch) = recover::next_meta(
        loaded.state.meta(),
        integrity,
        &options.identity,
        highest_epoch(None, mark),
        SCHEMA,
        options.now,
    );
    recover::put_meta(&mut loaded.state, meta, VERSION);
    Ok(from_memory(options, loaded, error, report, new_epoch))
}

/// The same when the engine opened but could not write what opening requires.
fn unwritable_after(
    options: &OpenOptions,
    backend: Box<dyn Backend>,
    loaded: Loaded,
    error: &BackendError,
    report: Report,
) -> Result<Opened, OpenError> {
    drop(backend);
    let new_epoch = loaded.state.meta().map(|m| m.epoch.reason);
    Ok(from_memory(options, loaded, error, report, new_epoch))
}

fn from_memory(
    options: &OpenOptions,
    loaded: Loaded,
    error: &BackendError,
    mut report: Report,
    new_epoch: Option<EpochReason>,
) -> Opened {
    report.note(format!(
        "the database cannot be written, the node works from memory: {}",
        error.full_text()
    ));
    report.outcome = Some(Outcome::Unwritable {
        reason: error.full_text(),
        out_of_space: error.is_out_of_space(),
    });
    let layout = Layout::new(&options.dir);
    let closed = ClosedBackend::new(layout.clone(), options.sled.clone(), options.now, error);
    let stands_in = closed.stands_in();
    let closed: Box<dyn Backend> = Box::new(closed);
    Opened {
        backend: if stands_in {
            closed
        } else {
            marked(&layout, closed, &loaded)
        },
        loaded,
        report: report.finish(new_epoch),
    }
}
