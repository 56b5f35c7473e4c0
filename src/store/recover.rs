//! Decisions about a store that is damaged, moved or replaced. Pure, no I/O.
//!
//! The input is the records that were found, the newest backup and the errors; the output is the records to continue
//! with and the epoch they belong to.

use std::collections::BTreeSet;

use super::backup::{BackupMeta, last_journal};
use crate::core::state::{
    AnyRecord, EpochReason, EpochRecord, META_KEY, MetaRecord, Mutation, Record as _, State, Table,
    Version,
};
use crate::types::{BootIdentity, Stamp};

/// Identity of the node that opens the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Name of the node.
    pub node_name: String,
    /// `/etc/machine-id`, empty where there is none.
    pub machine_id: String,
    /// The running boot.
    pub boot: BootIdentity,
}

/// State of the records before they were loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Integrity {
    /// Nothing.
    Intact,
    /// There never was a store here.
    New,
    /// Decisions were lost, or may be older than what was acknowledged.
    Lost,
    /// They are those of a backup, at an operator's wish.
    Restored,
}

/// Returns the meta record to continue with, and the reason for a new epoch if it begins one. A machine or a node name
/// other than the store's begins one as well: its records were decided for another node. `seen_epoch` is the highest
/// number seen anywhere (backups included), so that numbers are not reused.
///
/// Boot, generation, heartbeat and clean-shutdown mark of the previous agent are kept: the agent compares
/// them with its own before it overwrites them.
pub fn next_meta(
    found: Option<&MetaRecord>,
    integrity: Integrity,
    identity: &Identity,
    seen_epoch: u64,
    schema: u32,
    now: Stamp,
) -> (MetaRecord, Option<EpochReason>) {
    let reason = match (integrity, found) {
        (Integrity::Lost, _) => Some(EpochReason::Rebuilt),
        (Integrity::Restored, _) => Some(EpochReason::Restored),
        (Integrity::New, _) => Some(EpochReason::Fresh),
        (Integrity::Intact, None) => Some(EpochReason::Rebuilt),
        (Integrity::Intact, Some(meta)) if is_foreign(meta, identity) => {
            Some(EpochReason::OtherMachine)
        }
        (Integrity::Intact, Some(_)) => None,
    };
    let mut meta = found.cloned().unwrap_or_else(|| MetaRecord {
        schema,
        node_name: String::new(),
        machine_id: String::new(),
        boot: identity.boot.clone(),
        generation: 0,
        clean_shutdown: false,
        heartbeat: now,
        epoch: EpochRecord {
            number: 0,
            since: now,
            reason: EpochReason::Fresh,
        },
    });
    meta.schema = schema;
    meta.node_name.clone_from(&identity.node_name);
    if !identity.machine_id.is_empty() {
        meta.machine_id.clone_from(&identity.machine_id);
    }
    if let Some(reason) = reason {
        meta.epoch = EpochRecord {
            number: meta.epoch.number.max(seen_epoch).saturating_add(1),
            since: now,
            reason,
        };
    }
    (meta, reason)
}

fn is_foreign(meta: &MetaRecord, identity: &Identity) -> bool {
    let machine_known = !meta.machine_id.is_empty() && !identity.machine_id.is_empty();
    (machine_known && meta.machine_id != identity.machine_id)
        || meta.node_name != identity.node_name
}

/// Returns whether a store has fallen behind a backup of its own epoch. This happens when the end of its log is cut off
/// in a way that leaves no other trace.
pub fn is_behind(state: &State, backup: &BackupMeta) -> bool {
    let epoch = state.meta().map_or(0, |m| m.epoch.number);
    (epoch, last_journal(state)) < (backup.epoch, backup.last_journal.clone())
}

/// Adds the records of `backup` that `state` lacks, except those in `deleted` and the meta record when there
/// is one. What is there is newer than the backup and stays. Returns how many were added.
pub fn fill(
    state: &mut State,
    backup: &State,
    deleted: &BTreeSet<(Table, String)>,
    version: Version,
) -> usize {
    let mut added = 0;
    for (table, key, record) in backup.iter_all() {
        if state.version_of(table, &key).is_none() && !deleted.contains(&(table, key.to_string())) {
            state.apply(&Mutation::Put { key, record }, version);
            added += 1;
        }
    }
    added
}

/// Returns whether a lost or outdated record of this table may contradict an effect that already happened. Such a loss
/// begins a new epoch; the next observation corrects the loss of any other record.
pub fn holds_decisions(table: Table) -> bool {
    match table {
        Table::Meta
        | Table::Pods
        | Table::Admissions
        | Table::Workers
        | Table::Containers
        | Table::Statuses
        | Table::Volumes => true,
        Table::Mirrors
        | Table::Queue
        | Table::Pleg
        | Table::Probes
        | Table::Images
        | Table::Objects
        | Table::Facts
        | Table::Signals
        | Table::Journal
        | Table::Cpus
        | Table::Memory
        | Table::Cpusets
        | Table::Sources => false,
    }
}

/// Puts the meta record into a state.
pub(super) fn put_meta(state: &mut State, meta: MetaRecord, version: Version) {
    let record: AnyRecord = meta.into_any();
    let key = META_KEY.into();
    state.apply(&Mutation::Put { key, record }, version);
}
