//! A damaged database is replaced by what can be read of it, filled up from the newest backup.
//!
//! In comes what the log still held; out comes an open store of a new epoch. The damaged database goes to
//! quarantine once its successor is complete; until then nothing of it is touched.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::{
    Report, bad_records, found_schema, from_memory, highest_epoch, is_newer, mark_epoch, marked,
    open_sled, open_stand_in, prune,
};
use crate::core::state::{Table, kinds};
use crate::store::backend::{BackendError, RawPair};
use crate::store::backup::{self, Backup};
use crate::store::codec::{self, Loaded, Quarantined};
use crate::store::engine::VERSION;
use crate::store::layout::Layout;
use crate::store::mark::Mark;
use crate::store::migrate::{self, SCHEMA};
use crate::store::outcome::{OpenError, OpenOptions, Opened, Outcome};
use crate::store::recover::{self, Integrity};
use crate::store::restore;
use crate::store::salvage::Salvage;
use crate::types::{Stamp, causes};

/// Replaces a damaged database by one of what can be read of it, filled up from the newest backup.
pub(super) fn rebuild(
    options: &OpenOptions,
    layout: &Layout,
    log: Salvage,
    mark: Option<Mark>,
    mut report: Report,
) -> Result<Opened, OpenError> {
    let (newest, errors) = backup::newest(&layout.backups());
    report.messages.extend(errors);
    let pairs = log.pairs.clone().into_iter().collect();
    let mut loaded = migrate::load_current(pairs, layout.schema(), VERSION);
    if is_newer(&loaded) {
        return open_stand_in(options, layout, found_schema(&loaded), report);
    }
    let (kept, lost) = (loaded.state.iter_all().count(), bad_records(&loaded).len());
    let seen_epoch = highest_epoch(newest.as_ref().map(|b| b.meta.epoch), mark);
    let from_backup = fill(&mut loaded, newest.as_ref(), &log, &mut report);
    let (meta, new_epoch) = recover::next_meta(
        loaded.state.meta(),
        Integrity::Lost,
        &options.identity,
        seen_epoch,
        SCHEMA,
        options.now,
    );
    recover::put_meta(&mut loaded.state, meta, VERSION);
    report.note(format!(
        "rebuilt the database: {kept} records read, {lost} damaged, {from_backup} from a backup"
    ));
    report.outcome = Some(Outcome::Salvaged {
        kept,
        lost,
        from_backup,
    });
    match replace(layout, &loaded, options.now) {
        Ok(aside) => report.quarantined.extend(aside),
        Err(error) => return Ok(from_memory(options, loaded, &error, report, new_epoch)),
    }
    prune(layout, &mut report);
    match open_sled(options, layout, &layout.db(), &mut report)? {
        Ok((backend, loaded)) => {
            mark_epoch(layout, &loaded);
            Ok(Opened {
                backend: marked(layout, Box::new(backend), &loaded),
                loaded,
                report: report.finish(new_epoch),
            })
        }
        Err(error) => Ok(from_memory(options, loaded, &error, report, new_epoch)),
    }
}

/// Builds a database of what is loaded, damaged values included, and puts it in the place of `db`.
fn replace(layout: &Layout, loaded: &Loaded, now: Stamp) -> Result<Option<PathBuf>, BackendError> {
    let mut pairs: Vec<RawPair> = codec::encode_state(&loaded.state)
        .collect::<Result<_, _>>()
        .map_err(|error| BackendError::Engine {
            action: "encode the salvaged records",
            reason: causes(&error),
        })?;
    let bad = loaded.quarantined.iter().chain(&loaded.kept);
    pairs.extend(bad.map(Quarantined::to_pair));
    migrate::build(layout, pairs.into_iter())?;
    let io = |source| BackendError::io("replace the database", source);
    let aside = layout.swap_in("db", now).map_err(io)?;
    layout.write_schema(SCHEMA).map_err(io)?;
    Ok(aside)
}

/// Fills up a salvaged state from a backup.
fn fill(loaded: &mut Loaded, backup: Option<&Backup>, log: &Salvage, report: &mut Report) -> usize {
    let Some(backup) = backup else {
        return 0;
    };
    let state = match restore::state_of(backup) {
        Ok(state) => state,
        Err(error) => {
            report.note(format!("the newest backup cannot be used: {error}"));
            return 0;
        }
    };
    if recover::is_behind(&loaded.state, &backup.meta) {
        // The backup is newer as a whole: what it lacks had been deleted.
        let count = state.iter_all().count();
        let meta = loaded.state.meta().cloned();
        loaded.state = state;
        if loaded.state.meta().is_none()
            && let Some(meta) = meta
        {
            recover::put_meta(&mut loaded.state, meta, VERSION);
        }
        return count;
    }
    let deleted: BTreeSet<(Table, String)> = log
        .deleted
        .iter()
        .filter_map(|raw| {
            let (tag, key) = raw.split_first()?;
            let key = String::from_utf8(key.to_vec()).ok()?;
            // An older store had all kinds in one table.
            let table = match Table::from_tag(*tag)? {
                Table::Objects => kinds::of_key(&key).map_or(Table::Objects, |kind| kind.table()),
                table => table,
            };
            Some((table, key))
        })
        .collect();
    recover::fill(&mut loaded.state, &state, &deleted, VERSION)
}
