//! A second engine below the store: the contract of `Backend` must not be what sled happens to do.

use std::io;
use std::path::{Path, PathBuf};

use holdfast::store::backend::{Backend, BackendError, Op, RawIter, RawPair};
use redb::{Database, Durability, ReadableDatabase as _, ReadableTable as _, TableDefinition};

const TABLE: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("records");

/// One redb file. A batch is a transaction that redb does not write out by itself (`Durability::None`).
pub struct RedbBackend {
    path: PathBuf,
    /// `None` after a `reopen` that failed.
    database: Option<Database>,
}

impl RedbBackend {
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, BackendError> {
        let path = path.into();
        let database = Some(open(&path)?);
        Ok(Self { path, database })
    }

    fn transact(
        &mut self,
        action: &'static str,
        durability: Durability,
        batch: &[Op],
    ) -> Result<(), BackendError> {
        let database = self.database.as_ref().ok_or_else(|| not_open(action))?;
        let work = || {
            let mut transaction = database.begin_write()?;
            transaction.set_durability(durability)?;
            {
                let mut table = transaction.open_table(TABLE)?;
                for op in batch {
                    match op {
                        Op::Put { key, value } => table.insert(&key[..], &value[..])?,
                        Op::Delete { key } => table.remove(&key[..])?,
                    };
                }
            }
            transaction.commit()?;
            Ok(())
        };
        work().map_err(|error| sort(action, error))
    }
}

impl Backend for RedbBackend {
    fn apply(&mut self, batch: &[Op]) -> Result<(), BackendError> {
        self.transact("write a batch to redb", Durability::None, batch)
    }

    fn flush(&mut self) -> Result<(), BackendError> {
        // redb has nothing between memory and device.
        self.sync()
    }

    fn sync(&mut self) -> Result<(), BackendError> {
        self.transact("sync redb", Durability::Immediate, &[])
    }

    fn iter(&self) -> RawIter<'_> {
        const ACTION: &str = "read redb";
        let Some(database) = &self.database else {
            return Box::new(std::iter::once(Err(not_open(ACTION))));
        };
        let read = || -> Result<Vec<RawPair>, redb::Error> {
            let table = database.begin_read()?.open_table(TABLE)?;
            let mut pairs = Vec::new();
            for pair in table.iter()? {
                let (key, value) = pair?;
                pairs.push((key.value().to_vec(), value.value().to_vec()));
            }
            Ok(pairs)
        };
        match read() {
            Ok(pairs) => Box::new(pairs.into_iter().map(Ok)),
            Err(error) => Box::new(std::iter::once(Err(sort(ACTION, error)))),
        }
    }

    fn size_on_disk(&self) -> Result<u64, BackendError> {
        match self.path.metadata() {
            Ok(metadata) => Ok(metadata.len()),
            Err(error) => Err(BackendError::io("measure redb", error)),
        }
    }

    fn reopen(&mut self) -> Result<(), BackendError> {
        self.database = None;
        self.database = Some(open(&self.path)?);
        Ok(())
    }

    fn name(&self) -> &'static str {
        "redb"
    }
}

fn open(path: &Path) -> Result<Database, BackendError> {
    const ACTION: &str = "open redb";
    let database = Database::create(path).map_err(|error| sort(ACTION, error.into()))?;
    let make = || {
        let transaction = database.begin_write()?;
        transaction.open_table(TABLE)?;
        transaction.commit()?;
        Ok(())
    };
    make().map_err(|error| sort(ACTION, error))?;
    Ok(database)
}

fn not_open(action: &'static str) -> BackendError {
    BackendError::Engine {
        action,
        reason: "the database is not open".to_owned(),
    }
}

fn sort(action: &'static str, error: redb::Error) -> BackendError {
    match error {
        redb::Error::Io(source) => BackendError::io(action, source),
        redb::Error::DatabaseAlreadyOpen => BackendError::Locked {
            action,
            reason: error.to_string(),
        },
        redb::Error::Corrupted(reason) => BackendError::Corrupt { action, reason },
        other => BackendError::Engine {
            action,
            reason: io::Error::other(other).to_string(),
        },
    }
}
