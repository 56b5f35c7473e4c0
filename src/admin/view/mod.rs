//! Computes the output of `holdfast dump` from a [`State`].
//!
//! The live agent and the command line on a stopped store call the same functions, so both print the same
//! for the same state. In: a state, the quarantined records, a [`Query`]. Out: a [`Dump`] whose rows are
//! JSON objects with the fields of `docs/dump.md`.
//!
//! **Invariant:** nothing here depends on the time of the call, on where the state came from, or on
//! versions that exist only within one process.
//! **Invariant:** secret material never leaves: encrypted objects are not decrypted, and objects of a
//! secret kind are left out even when they are stored in the clear.

mod derived;
mod overview;
mod pods;
mod protection;
mod query;
mod rows;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use pods::PodIndex;
pub use query::{Query, QueryError, Selector, View};

use crate::core::state::{State, Table};
use crate::types::PodUid;

/// `apiVersion` of everything this module writes.
pub const API_VERSION: &str = "holdfast.io/v1";

/// A row: a JSON object, fields in documented order.
pub type Row = Map<String, Value>;

/// An unreadable record in quarantine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Quarantined {
    /// Name of the table, or `unknown`.
    pub table: String,
    /// Its key, as far as it is known.
    pub key: String,
    /// Reason why it cannot be read.
    pub reason: String,
    /// Size of the record in bytes.
    pub bytes: u64,
}

impl From<&crate::store::codec::Quarantined> for Quarantined {
    fn from(bad: &crate::store::codec::Quarantined) -> Self {
        Self {
            table: bad.table.map_or("unknown", Table::name).to_owned(),
            key: bad.key.clone(),
            reason: bad.reason.to_string(),
            bytes: u64::try_from(bad.raw.len()).unwrap_or(u64::MAX),
        }
    }
}

impl From<&crate::store::SetAside> for Quarantined {
    fn from(bad: &crate::store::SetAside) -> Self {
        Self {
            table: bad.table.map_or("unknown", Table::name).to_owned(),
            key: bad.key.clone(),
            reason: bad.reason.clone(),
            bytes: bad.bytes,
        }
    }
}

/// The answer to a [`Query`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Dump {
    /// [`API_VERSION`].
    pub api_version: String,
    /// `Dump`.
    pub kind: String,
    /// Node the store belongs to; empty when the store has no meta record.
    pub node: String,
    /// Rows by table, in the order that was asked for.
    pub tables: Map<String, Value>,
    /// Records that cannot be read; the whole store's, whatever was selected.
    pub quarantined: Vec<Quarantined>,
}

impl Dump {
    /// The rows of one table.
    pub fn rows(&self, view: View) -> impl Iterator<Item = &Row> {
        self.tables
            .get(view.name())
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(Value::as_object)
    }
}

/// The journal of a pod, with a mark wherever another run of the agent begins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct History {
    /// [`API_VERSION`].
    pub api_version: String,
    /// `History`.
    pub kind: String,
    /// Node the store belongs to.
    pub node: String,
    /// UIDs of the pods the history is about.
    pub pods: Vec<PodUid>,
    /// Oldest first.
    pub items: Vec<HistoryItem>,
    /// Resulting containers: the rows of these pods in the table of containers.
    #[serde(default)]
    pub containers: Vec<Row>,
}

/// One line of a [`History`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase")]
pub enum HistoryItem {
    /// A row of the journal.
    Entry {
        /// The row.
        entry: Row,
    },
    /// The agent was started again between the entries around this one.
    #[serde(rename_all = "camelCase")]
    Restart {
        /// Generation of the entry before.
        from_generation: u64,
        /// Generation of the entry after.
        to_generation: u64,
        /// First journal entry of the new generation, of whatever pod.
        at: Value,
        /// True if the machine was booted since the previous line.
        rebooted: bool,
    },
}

/// Answers a query.
///
/// # Errors
/// [`QueryError::NotFound`] when the query names a pod that the store does not know.
pub fn dump(
    state: &State,
    quarantined: Vec<Quarantined>,
    query: &Query,
) -> Result<Dump, QueryError> {
    let index = PodIndex::of(state);
    let wanted = query.selector.resolve(state, &index)?;
    let mut tables = Map::new();
    for view in &query.views {
        let rows = match view {
            View::Table(table) => rows::all(state, &index, *table),
            derived => read_off(state, &index, *derived),
        };
        let rows = rows
            .into_iter()
            .filter(|row| wanted.takes(*view, row))
            .map(Value::Object)
            .collect();
        tables.insert(view.name().to_owned(), Value::Array(rows));
    }
    Ok(Dump {
        api_version: API_VERSION.to_owned(),
        kind: "Dump".to_owned(),
        node: node_name(state),
        tables,
        quarantined,
    })
}

/// The rows of a table that is read off others; none of a table of the store.
fn read_off(state: &State, index: &PodIndex, view: View) -> Vec<Row> {
    match view {
        View::Overview => overview::rows(state, index),
        View::Node => derived::node(state, index),
        View::Events => derived::events(state, index),
        View::Devices => derived::devices(state, index),
        View::Claims => derived::claims(state, index),
        View::Pressure => protection::pressure(state),
        View::Shutdown => protection::shutdown(state, index),
        View::Table(_) => Vec::new(),
    }
}

/// The journal of the pods that `pod` (UID prefix, name, or `namespace/name`) stands for.
///
/// # Errors
/// [`QueryError::NotFound`] when the store does not know such a pod.
pub fn history(state: &State, pod: &str) -> Result<History, QueryError> {
    let index = PodIndex::of(state);
    let uids: BTreeSet<PodUid> = index.find(pod);
    if uids.is_empty() {
        return Err(QueryError::NotFound {
            what: format!("pod {pod:?}"),
        });
    }
    let mut items = Vec::new();
    let mut previous: Option<&crate::core::state::JournalRecord> = None;
    for (key, versioned) in &state.journal {
        let record = &versioned.record;
        if !record.pod.as_ref().is_some_and(|uid| uids.contains(uid)) {
            continue;
        }
        if let Some(before) = previous
            && before.generation != record.generation
        {
            let first = state
                .journal
                .values()
                .map(|v| &v.record)
                .find(|r| r.generation == record.generation)
                .unwrap_or(record);
            items.push(HistoryItem::Restart {
                from_generation: before.generation,
                to_generation: record.generation,
                at: rows::time(first.at),
                rebooted: before.at.boot != record.at.boot,
            });
        }
        previous = Some(record);
        items.push(HistoryItem::Entry {
            entry: rows::journal(&index, key, record),
        });
    }
    let of_these = |row: &Row| {
        let uid = row.get("uid").and_then(Value::as_str);
        uid.is_some_and(|uid| uids.contains(&PodUid::new(uid)))
    };
    let mut containers = rows::all(state, &index, Table::Containers);
    containers.retain(of_these);
    Ok(History {
        api_version: API_VERSION.to_owned(),
        kind: "History".to_owned(),
        node: node_name(state),
        pods: uids.into_iter().collect(),
        items,
        containers,
    })
}

/// Kind of a row's change, as in a Kubernetes watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum ChangeType {
    /// New, or there when the watch began.
    Added,
    /// Changed.
    Modified,
    /// Gone; the row is the last one.
    Deleted,
    /// Everything that was there when the watch began has been sent; no row.
    Bookmark,
}

/// One line of a watch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// How.
    #[serde(rename = "type")]
    pub change: ChangeType,
    /// Name of the table, empty in a bookmark.
    pub table: String,
    /// The row, empty in a bookmark.
    pub row: Row,
}

impl Change {
    /// The mark between what was there and what changes.
    pub fn bookmark() -> Self {
        Self {
            change: ChangeType::Bookmark,
            table: String::new(),
            row: Row::new(),
        }
    }
}

/// Returns the changes from `before` to `after` in the views and for the pods of `query`. A selector that matches
/// nothing yet may match later. Journal lines that the ring has dropped are not changes.
pub fn changes(before: &State, after: &State, query: &Query) -> Vec<Change> {
    let (old_index, new_index) = (PodIndex::of(before), PodIndex::of(after));
    let old_wanted = query.selector.resolve_lenient(before, &old_index);
    let new_wanted = query.selector.resolve_lenient(after, &new_index);
    let mut out = Vec::new();
    for view in &query.views {
        let (old, new) = match view {
            View::Table(table) => rows::changed(before, &old_index, after, &new_index, *table),
            derived => (
                read_off(before, &old_index, *derived),
                read_off(after, &new_index, *derived),
            ),
        };
        let mut old: std::collections::BTreeMap<String, Row> = old
            .into_iter()
            .filter(|row| old_wanted.takes(*view, row))
            .map(|row| (key_of(&row), row))
            .collect();
        for row in new.into_iter().filter(|row| new_wanted.takes(*view, row)) {
            let change = match old.remove(&key_of(&row)) {
                None => ChangeType::Added,
                Some(same) if same == row => continue,
                Some(_) => ChangeType::Modified,
            };
            out.push(Change {
                change,
                table: view.name().to_owned(),
                row,
            });
        }
        let is_line = |row: &Row| match view {
            View::Table(Table::Journal) => true,
            View::Events => row.get("sequence").is_some_and(Value::is_number),
            _ => false,
        };
        let gone = old.into_values().filter(|row| !is_line(row));
        out.extend(gone.map(|row| Change {
            change: ChangeType::Deleted,
            table: view.name().to_owned(),
            row,
        }));
    }
    out
}

fn key_of(row: &Row) -> String {
    row.get("key")
        .and_then(Value::as_str)
        .unwrap_or_default()
        .to_owned()
}

fn node_name(state: &State) -> String {
    state
        .meta()
        .map(|m| m.node_name.clone())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests;
