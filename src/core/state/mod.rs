//! The state of the agent as a value: one persistent (structurally shared) map per table, the mutations
//! that change it, and `apply`.
//!
//! A [`State`] is cheap to clone; readers hold a snapshot while the writer builds the next one.
//! **Invariant:** a state changes through [`State::apply`] and [`State::load`] only, and only the store
//! calls them.

pub mod kinds;
mod records;
mod transaction;

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

use imbl::OrdMap;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use records::*;
pub use transaction::*;

/// Number that orders every change of a record; unique within the life of a process and never reused.
pub type Version = u64;

/// Time for which a mutation may stay in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Durability {
    /// Ordered with everything else, written within 100 ms.
    Relaxed,
    /// Acknowledged only after the data has reached the disk.
    Durable,
}

/// A record with the version at which it was last changed.
#[derive(Clone, Debug, PartialEq)]
pub struct Versioned<R> {
    /// See [`Version`].
    pub version: Version,
    /// The record.
    pub record: R,
    /// Its content as readers see it.
    memo: Memo,
}

/// Content of a record that was read from its bytes: made when it is first asked for, shared by all readers, and gone with
/// the version of the record that it was read from. No part of the record's value.
#[derive(Clone, Default)]
struct Memo(OnceLock<Option<Arc<dyn Any + Send + Sync>>>);

impl fmt::Debug for Memo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Memo")
    }
}

impl PartialEq for Memo {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Memo {
    /// Returns the content, which `read` makes the first time; `None` when it cannot, or when others read it as another type.
    fn get<T: Send + Sync + 'static>(&self, read: impl FnOnce() -> Option<T>) -> Option<Arc<T>> {
        let erase = |content: T| Arc::new(content) as Arc<dyn Any + Send + Sync>;
        let found = self.0.get_or_init(|| read().map(erase)).clone()?;
        found.downcast().ok()
    }
}

impl<R> Versioned<R> {
    fn new(version: Version, record: R) -> Self {
        Self {
            version,
            record,
            memo: Memo::default(),
        }
    }
}

/// A type that has a table of its own.
pub trait Record:
    Clone + std::fmt::Debug + PartialEq + Serialize + DeserializeOwned + Send + Sync + 'static
{
    /// Its table.
    const TABLE: Table;
    /// Version of its layout on disk. Any change of the struct means a new one, and a migration.
    const RECORD_VERSION: u16;
    /// Class of the change from `previous` to `next` (`None` = absent).
    fn durability(previous: Option<&Self>, next: Option<&Self>) -> Durability;
    /// Wraps the record.
    fn into_any(self) -> AnyRecord;
    /// The table of this type in a state.
    fn table(state: &State) -> &TableMap<Self>;
}

/// One table: records by key, in key order.
pub type TableMap<R> = OrdMap<Arc<str>, Arc<Versioned<R>>>;

macro_rules! tables {
    ($( $(#[$meta:meta])* $variant:ident = $tag:literal, $field:ident, $name:literal : $record:ty, v $version:literal ; )+) => {
        /// The tables of the store.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[repr(u8)]
        pub enum Table {
            $( $(#[$meta])* $variant = $tag, )+
        }

        impl Table {
            /// All of them, by tag.
            pub const ALL: &'static [Table] = &[ $( Table::$variant, )+ ];

            /// The byte that stands for the table on disk.
            pub fn tag(self) -> u8 {
                self as u8
            }

            /// The table of a tag.
            pub fn from_tag(tag: u8) -> Option<Self> {
                match tag {
                    $( $tag => Some(Table::$variant), )+
                    _ => None,
                }
            }

            /// Name as in the documentation and in `holdfast dump`.
            pub fn name(self) -> &'static str {
                match self {
                    $( Table::$variant => $name, )+
                }
            }

            /// Version of the record layout this binary writes.
            pub fn record_version(self) -> u16 {
                match self {
                    $( Table::$variant => $version, )+
                }
            }
        }

        /// A record of any table.
        #[derive(Clone, Debug, PartialEq, Serialize)]
        #[serde(untagged)]
        pub enum AnyRecord {
            $( $(#[$meta])* $variant($record), )+
        }

        impl AnyRecord {
            /// The table it belongs to.
            pub fn table(&self) -> Table {
                match self {
                    $( AnyRecord::$variant(_) => Table::$variant, )+
                }
            }

            /// Serialises the record alone with `with`; the store supplies its codec.
            ///
            /// # Errors
            /// Whatever `with` returns.
            pub fn encode_with<E: RecordEncoder>(&self, with: &E) -> Result<Vec<u8>, E::Error> {
                match self {
                    $( AnyRecord::$variant(record) => with.encode(record), )+
                }
            }

            /// Deserialises a record of `table` with `with`; the store supplies its codec.
            ///
            /// # Errors
            /// Whatever `with` returns.
            pub fn decode_with<D: RecordDecoder>(table: Table, bytes: &[u8], with: &D) -> Result<Self, D::Error> {
                match table {
                    $( Table::$variant => Ok(AnyRecord::$variant(with.decode::<$record>(bytes)?)), )+
                }
            }
        }

        $(
            impl Record for $record {
                const TABLE: Table = Table::$variant;
                const RECORD_VERSION: u16 = $version;

                fn durability(previous: Option<&Self>, next: Option<&Self>) -> Durability {
                    <$record>::class(previous, next)
                }

                fn into_any(self) -> AnyRecord {
                    AnyRecord::$variant(self)
                }

                fn table(state: &State) -> &TableMap<Self> {
                    &state.$field
                }
            }
        )+

        /// Everything the agent remembers.
        #[derive(Clone, Debug, Default, PartialEq)]
        pub struct State {
            $( $(#[$meta])* pub $field: TableMap<$record>, )+
        }

        impl State {
            /// Applies one mutation at `version` and says how durable it has to be.
            pub fn apply(&mut self, mutation: &Mutation, version: Version) -> Durability {
                match mutation {
                    $(
                        Mutation::Put { key, record: AnyRecord::$variant(record) } => {
                            let class = <$record>::class(self.$field.get(key).map(|v| &v.record), Some(record))
                                .max(kinds::class_of(Table::$variant, key));
                            self.$field.insert(Arc::clone(key), Arc::new(Versioned::new(version, record.clone())));
                            class
                        }
                    )+
                    Mutation::Delete { table, key } => match table {
                        $(
                            Table::$variant => match self.$field.remove(key) {
                                Some(old) => <$record>::class(Some(&old.record), None)
                                    .max(kinds::class_of(Table::$variant, key)),
                                None => Durability::Relaxed,
                            },
                        )+
                    },
                }
            }

            /// Puts a record that is being loaded: as [`State::apply`] of a `Put`, without a copy.
            pub fn load(&mut self, key: Arc<str>, record: AnyRecord, version: Version) {
                match record {
                    $(
                        AnyRecord::$variant(record) => {
                            self.$field.insert(key, Arc::new(Versioned::new(version, record)));
                        }
                    )+
                }
            }

            /// Version of one record, `None` when it is absent.
            pub fn version_of(&self, table: Table, key: &str) -> Option<Version> {
                match table {
                    $( Table::$variant => self.$field.get(key).map(|v| v.version), )+
                }
            }

            /// One record of any table.
            pub fn get_any(&self, table: Table, key: &str) -> Option<AnyRecord> {
                match table {
                    $( Table::$variant => self.$field.get(key).map(|v| AnyRecord::$variant(v.record.clone())), )+
                }
            }

            /// Number of records of a table.
            pub fn len_of(&self, table: Table) -> usize {
                match table {
                    $( Table::$variant => self.$field.len(), )+
                }
            }

            /// Every record, by table and key.
            pub fn iter_all(&self) -> impl Iterator<Item = (Table, Arc<str>, AnyRecord)> + '_ {
                let all = std::iter::empty();
                $(
                    let all = all.chain(
                        self.$field.iter().map(|(k, v)| (Table::$variant, Arc::clone(k), AnyRecord::$variant(v.record.clone())))
                    );
                )+
                all
            }
        }
    };
}

/// Turns records into bytes; implemented by the store's codec.
pub trait RecordEncoder {
    /// Its error.
    type Error;
    /// Encodes one record.
    ///
    /// # Errors
    /// When the record cannot be represented.
    fn encode<R: Serialize>(&self, record: &R) -> Result<Vec<u8>, Self::Error>;
}

/// Turns bytes into records; implemented by the store's codec.
pub trait RecordDecoder {
    /// Its error.
    type Error;
    /// Decodes one record, rejecting trailing bytes.
    ///
    /// # Errors
    /// When the bytes are not a record of that type.
    fn decode<R: DeserializeOwned>(&self, bytes: &[u8]) -> Result<R, Self::Error>;
}

tables! {
    /// Facts about the store itself; one record, key [`META_KEY`].
    Meta = 1, meta, "meta": MetaRecord, v 1;
    /// Desired pods, by UID.
    Pods = 2, pods, "pods": PodRecord, v 1;
    /// Mirror pods, by full name.
    Mirrors = 3, mirrors, "mirrors": MirrorRecord, v 1;
    /// Admission decisions, by UID.
    Admissions = 4, admissions, "admissions": AdmissionRecord, v 1;
    /// Worker phases, by UID.
    Workers = 5, workers, "workers": WorkerRecord, v 1;
    /// Due times, by UID.
    Queue = 6, queue, "queue": QueueRecord, v 1;
    /// Containers, by `<uid>/<name>`.
    Containers = 7, containers, "containers": ContainerRecord, v 1;
    /// Runtime's last view of each pod, by UID.
    Pleg = 8, pleg, "pleg": PlegRecord, v 2;
    /// API statuses, by UID.
    Statuses = 9, statuses, "statuses": StatusRecord, v 1;
    /// Probe results, by `<uid>/<container>/<kind>`.
    Probes = 10, probes, "probes": ProbeRecord, v 1;
    /// Volumes, by `<uid>/<volume>`.
    Volumes = 11, volumes, "volumes": VolumeRecord, v 1;
    /// Images, by reference.
    Images = 12, images, "images": ImageRecord, v 1;
    /// API objects needed offline, by `<kind>/<namespace>/<name>`: see [`kinds`].
    Objects = 13, objects, "objects": ObjectRecord, v 1;
    /// Eviction signals, by name.
    Signals = 14, signals, "signals": SignalRecord, v 1;
    /// Journal lines, by sequence number (16 hex digits).
    Journal = 15, journal, "journal": JournalRecord, v 1;
    /// Configuration sources, by source: what was read last and from where.
    Sources = 16, sources, "sources": SourceRecord, v 1;
    /// CPUs that containers have for themselves, by UID.
    Cpus = 17, cpus, "cpus": CpusRecord, v 1;
    /// Memory that containers have on NUMA nodes, by UID.
    Memory = 18, memory, "memory": MemoryRecord, v 1;
    /// The CPUs and NUMA nodes last applied to containers, by `<uid>/<name>`.
    Cpusets = 19, cpusets, "cpusets": CpusetRecord, v 1;
    /// State of parts of the agent, by `<kind>/<namespace>/<name>`: see [`kinds`].
    Facts = 20, facts, "facts": FactRecord, v 1;
}

/// The key of the one record in [`Table::Meta`].
pub const META_KEY: &str = "meta";

impl State {
    /// One record with its version.
    pub fn get<R: Record>(&self, key: &str) -> Option<&Versioned<R>> {
        R::table(self).get(key).map(|v| &**v)
    }

    /// One record.
    pub fn record<R: Record>(&self, key: &str) -> Option<&R> {
        self.get::<R>(key).map(|v| &v.record)
    }

    /// Facts about the store, if it has been initialised.
    pub fn meta(&self) -> Option<&MetaRecord> {
        self.record::<MetaRecord>(META_KEY)
    }

    /// Records whose key starts with `prefix`, in key order.
    pub fn with_prefix<'a, R: Record>(
        &'a self,
        prefix: &'a str,
    ) -> impl Iterator<Item = (&'a Arc<str>, &'a R)> + 'a {
        R::table(self)
            .range(Arc::<str>::from(prefix)..)
            .take_while(move |(k, _)| k.starts_with(prefix))
            .map(|(k, v)| (k, &v.record))
    }

    /// Records per table, for metrics and `holdfast store stats`.
    pub fn counts(&self) -> BTreeMap<&'static str, usize> {
        Table::ALL
            .iter()
            .map(|t| (t.name(), self.len_of(*t)))
            .collect()
    }
}

#[cfg(test)]
mod tests;
