//! Selection of tables and rows.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde_json::Value;

use super::{PodIndex, Row};
use crate::core::state::{State, Table};
use crate::types::PodUid;

/// A query that has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueryError {
    /// It names a pod that the store does not know.
    #[error(
        "{what} not found in the store; `holdfast dump` lists the pods it knows, `holdfast dump --help` the tables"
    )]
    NotFound {
        /// Object of the search.
        what: String,
    },
    /// It names a table that does not exist.
    #[error(
        "there is no table {name:?}; tables are overview, node, events, devices, claims, pressure, shutdown, {}",
        names()
    )]
    NoTable {
        /// The name.
        name: String,
    },
    /// It has a parameter that does not exist.
    #[error("there is no parameter {name:?}")]
    NoParameter {
        /// The name.
        name: String,
    },
}

fn names() -> String {
    let names: Vec<_> = shown_tables().map(Table::name).collect();
    names.join(", ")
}

/// Returns the tables that have a view of their own.
fn shown_tables() -> impl Iterator<Item = Table> {
    let all = Table::ALL.iter().copied();
    all.filter(|table| *table != Table::Facts)
}

/// A table of the store, or one that is derived from several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// One line per pod.
    Overview,
    /// The node object.
    Node,
    /// The events among the lines of the journal.
    Events,
    /// Devices of containers, and the device plugins.
    Devices,
    /// Resource claims of pods.
    Claims,
    /// Eviction thresholds, conditions, the last removal of garbage and the last evicted pod.
    Pressure,
    /// Shutdowns of the node.
    Shutdown,
    /// A table of the store.
    Table(Table),
}

impl View {
    /// Name, as on the command line and in the output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Overview => "overview",
            Self::Node => "node",
            Self::Events => "events",
            Self::Devices => "devices",
            Self::Claims => "claims",
            Self::Pressure => "pressure",
            Self::Shutdown => "shutdown",
            Self::Table(table) => table.name(),
        }
    }

    /// Returns whether its rows are about pods.
    pub fn is_about_pods(self) -> bool {
        !matches!(
            self,
            Self::Node
                | Self::Pressure
                | Self::Shutdown
                | Self::Table(
                    Table::Meta
                        | Table::Images
                        | Table::Objects
                        | Table::Facts
                        | Table::Signals
                        | Table::Sources
                )
        )
    }

    /// Every table of the store. What is in table `facts` is shown in `objects`.
    pub fn all() -> Vec<Self> {
        shown_tables().map(Self::Table).collect()
    }
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for View {
    type Err = QueryError;

    /// Takes the name of the table, also in the singular.
    fn from_str(name: &str) -> Result<Self, QueryError> {
        match name {
            "overview" => return Ok(Self::Overview),
            "node" | "nodes" => return Ok(Self::Node),
            "events" | "event" => return Ok(Self::Events),
            "devices" | "device" => return Ok(Self::Devices),
            "claims" | "claim" => return Ok(Self::Claims),
            "pressure" => return Ok(Self::Pressure),
            "shutdown" => return Ok(Self::Shutdown),
            _ => {}
        }
        shown_tables()
            .find(|t| {
                let plural = t.name();
                plural == name || singular(plural) == name
            })
            .map(Self::Table)
            .ok_or_else(|| QueryError::NoTable {
                name: name.to_owned(),
            })
    }
}

fn singular(plural: &str) -> &str {
    match plural {
        "statuses" => "status",
        other => other.strip_suffix('s').unwrap_or(other),
    }
}

/// Selection of pods. A pod must match every field that is set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    /// UID prefix, name, or `namespace/name`; must exist.
    pub pod: Option<String>,
    /// Namespace.
    pub namespace: Option<String>,
    /// Name of the pod; must exist.
    pub name: Option<String>,
    /// UID or prefix of one; must exist.
    pub uid: Option<String>,
    /// `status.phase`.
    pub phase: Option<String>,
}

impl Selector {
    /// Returns whether no field is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The pods it selects.
    ///
    /// # Errors
    /// [`QueryError::NotFound`] when it names a pod that the store does not know.
    pub(super) fn resolve(&self, state: &State, index: &PodIndex) -> Result<Wanted, QueryError> {
        let wanted = self.resolve_lenient(state, index);
        let named = self.pod.is_some() || self.name.is_some() || self.uid.is_some();
        if named && wanted.uids.as_ref().is_some_and(BTreeSet::is_empty) {
            return Err(QueryError::NotFound {
                what: self.to_string(),
            });
        }
        Ok(wanted)
    }

    /// The pods it selects, possibly none.
    pub(super) fn resolve_lenient(&self, state: &State, index: &PodIndex) -> Wanted {
        if self.is_empty() {
            return Wanted::default();
        }
        let by_pod = self.pod.as_deref().map(|pod| index.find(pod));
        let uids = index
            .iter()
            .filter(|(uid, names)| {
                by_pod.as_ref().is_none_or(|found| found.contains(*uid))
                    && (self.namespace.as_deref()).is_none_or(|ns| names.namespace == ns)
                    && (self.name.as_deref()).is_none_or(|name| names.name == name)
                    && (self.uid.as_deref()).is_none_or(|prefix| uid.as_str().starts_with(prefix))
                    && (self.phase.as_deref())
                        .is_none_or(|phase| super::overview::phase(state, uid) == phase)
            })
            .map(|(uid, _)| uid.clone())
            .collect();
        Wanted {
            uids: Some(uids),
            namespace: match self {
                Self {
                    pod: None,
                    name: None,
                    uid: None,
                    phase: None,
                    namespace,
                } => namespace.clone(),
                _ => None,
            },
        }
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("pod")?;
        if let Some(pod) = &self.pod {
            write!(f, " {pod:?}")?;
        }
        for (label, value) in [
            ("namespace", &self.namespace),
            ("name", &self.name),
            ("UID", &self.uid),
            ("phase", &self.phase),
        ] {
            if let Some(value) = value {
                write!(f, " with {label} {value:?}")?;
            }
        }
        Ok(())
    }
}

/// A resolved [`Selector`].
#[derive(Clone, Debug, Default)]
pub(super) struct Wanted {
    /// `None` = every row, whether or not it is about a pod.
    uids: Option<BTreeSet<PodUid>>,
    /// Set when nothing but a namespace was asked for: then objects of that namespace match, too.
    namespace: Option<String>,
}

impl Wanted {
    pub(super) fn takes(&self, view: View, row: &Row) -> bool {
        let Some(uids) = &self.uids else {
            return true;
        };
        let text = |field: &str| row.get(field).and_then(Value::as_str);
        if view == View::Table(Table::Objects) {
            return self.namespace.is_some() && text("namespace") == self.namespace.as_deref();
        }
        view.is_about_pods() && text("uid").is_some_and(|uid| uids.contains(&PodUid::new(uid)))
    }
}

/// Tables and pods to show.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Query {
    /// Tables, in the order of the output.
    pub views: Vec<View>,
    /// Pods.
    pub selector: Selector,
}

impl Query {
    /// The query string of an admin request.
    pub fn to_query_string(&self) -> String {
        let mut out = form_urlencoded::Serializer::new(String::new());
        let tables: Vec<_> = self.views.iter().map(|v| v.name()).collect();
        out.append_pair("tables", &tables.join(","));
        for (key, value) in [
            ("pod", &self.selector.pod),
            ("namespace", &self.selector.namespace),
            ("name", &self.selector.name),
            ("uid", &self.selector.uid),
            ("phase", &self.selector.phase),
        ] {
            if let Some(value) = value {
                out.append_pair(key, value);
            }
        }
        out.finish()
    }

    /// Reads the query string of an admin request; without `tables` every table is meant.
    ///
    /// # Errors
    /// [`QueryError::NoTable`], [`QueryError::NoParameter`].
    pub fn from_query_string(text: &str) -> Result<Self, QueryError> {
        let mut query = Self {
            views: View::all(),
            selector: Selector::default(),
        };
        for (key, value) in form_urlencoded::parse(text.as_bytes()) {
            let value = value.into_owned();
            match &*key {
                "tables" => {
                    query.views = value
                        .split(',')
                        .filter(|name| !name.is_empty())
                        .map(View::from_str)
                        .collect::<Result<_, _>>()?;
                }
                "pod" => query.selector.pod = Some(value),
                "namespace" => query.selector.namespace = Some(value),
                "name" => query.selector.name = Some(value),
                "uid" => query.selector.uid = Some(value),
                "phase" => query.selector.phase = Some(value),
                other => {
                    return Err(QueryError::NoParameter {
                        name: other.to_owned(),
                    });
                }
            }
        }
        Ok(query)
    }
}
