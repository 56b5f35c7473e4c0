//! The sled backend.
//!
//! sled's own `flush` ends with `sync_file_range`, which does not reach the platter: `sync` therefore
//! also calls `sync_data` on the database file, on a descriptor that is kept open. Names of new files
//! are made durable when the database is opened. Values are kept below the size at which sled would move
//! a leaf to a blob file (which it never syncs) by the codec.
//!
//! sled may panic on damaged files; every call into it turns a panic into an error.

use std::fs::File;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Backend, BackendError, Op, RawIter};

/// Number of checks of whether a closing database has released its lock, and the pause between them.
const CLOSE_ATTEMPTS: u32 = 2000;
const CLOSE_PAUSE: Duration = Duration::from_millis(1);

/// Settings for opening a database.
#[derive(Clone, Debug)]
pub struct SledOptions {
    /// Page cache, in bytes.
    pub cache_capacity: u64,
    /// Refuse to open an existing database.
    pub create_new: bool,
    /// Time limit of one attempt to open a database and to read its records, for [`crate::store::open`].
    pub open_limit: Duration,
}

impl Default for SledOptions {
    fn default() -> Self {
        Self {
            cache_capacity: 8 * 1024 * 1024,
            create_new: false,
            open_limit: Duration::from_secs(120),
        }
    }
}

/// An open database directory.
#[derive(Debug)]
pub struct SledBackend {
    directory: PathBuf,
    options: SledOptions,
    /// `None` after a `reopen` that failed.
    open: Option<Open>,
}

#[derive(Debug)]
struct Open {
    db: sled::Db,
    /// `<directory>/db`, for `sync_data`.
    file: File,
}

impl SledBackend {
    /// Opens or creates the database in `directory`. A snapshot that sled had not finished when its
    /// process died is removed first: sled would refuse to open next to a torn one.
    ///
    /// # Errors
    /// `Locked` when another process has it open, `Corrupt` or `Engine` when sled cannot read its files.
    pub fn open(directory: impl Into<PathBuf>, options: SledOptions) -> Result<Self, BackendError> {
        Self::open_while(directory, options, |_| ()).map(|(backend, ())| backend)
    }

    /// As [`SledBackend::open`], with something that reads the database while the names of its files are
    /// made durable: that takes the disk as long as reading takes the processor.
    ///
    /// # Errors
    /// As [`SledBackend::open`].
    pub fn open_while<T>(
        directory: impl Into<PathBuf>,
        options: SledOptions,
        meanwhile: impl FnOnce(&Self) -> T,
    ) -> Result<(Self, T), BackendError> {
        let directory = directory.into();
        let open = open_unsynced(&directory, &options)?;
        let file = open.file.try_clone().map_err(open_failed)?;
        let backend = Self {
            directory,
            options,
            open: Some(open),
        };
        let (done, synced) = std::thread::scope(|scope| {
            let syncing = scope.spawn(|| sync_all(&file, &backend.directory));
            (meanwhile(&backend), syncing.join())
        });
        synced
            .unwrap_or_else(|_| Err(io::Error::other("the thread that syncs it panicked")))
            .map_err(open_failed)?;
        Ok((backend, done))
    }

    /// Returns the directory of the database.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Closes the database and returns when its lock is free: sled's own threads may hold the file for
    /// a moment after the last handle is gone.
    fn close(&mut self) -> Option<File> {
        let Open { db, file } = self.open.take()?;
        // Dropping the last handle flushes, and may meet once more the error that led here.
        let closed = guarded("close the database", || {
            drop(db);
            Ok(())
        });
        if let Err(error) = closed {
            tracing::warn!(%error, "closing the database failed");
        }
        for _ in 0..CLOSE_ATTEMPTS {
            if file.try_lock().is_ok() {
                break;
            }
            std::thread::sleep(CLOSE_PAUSE);
        }
        Some(file)
    }

    fn current(&self, action: &'static str) -> Result<&Open, BackendError> {
        self.open.as_ref().ok_or_else(|| BackendError::Engine {
            action,
            reason: "the database is not open".to_owned(),
        })
    }
}

const OPEN: &str = "open the database";

fn open_failed(source: io::Error) -> BackendError {
    BackendError::io(OPEN, source)
}

fn open(directory: &Path, options: &SledOptions) -> Result<Open, BackendError> {
    let open = open_unsynced(directory, options)?;
    sync_all(&open.file, directory).map_err(open_failed)?;
    Ok(open)
}

fn sync_all(file: &File, directory: &Path) -> io::Result<()> {
    file.sync_all()?;
    sync_names(directory)
}

/// Opens a database whose files need not survive a power loss yet.
fn open_unsynced(directory: &Path, options: &SledOptions) -> Result<Open, BackendError> {
    std::fs::create_dir_all(directory).map_err(open_failed)?;
    remove_unfinished_snapshots(directory).map_err(open_failed)?;
    let config = sled::Config::new()
        .path(directory)
        .mode(sled::Mode::LowSpace)
        .cache_capacity(options.cache_capacity)
        .create_new(options.create_new)
        .flush_every_ms(None)
        .use_compression(false);
    let db = guarded(OPEN, || config.open())?;
    let file = File::open(directory.join("db")).map_err(open_failed)?;
    Ok(Open { db, file })
}

fn remove_unfinished_snapshots(directory: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with("snap.") && name.ends_with(".generating") {
            tracing::warn!(file = %entry.path().display(), "removing an unfinished snapshot of the database");
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Makes the names of the files in `directory`, and its own, durable.
fn sync_names(directory: &Path) -> io::Result<()> {
    let conf = directory.join("conf");
    if conf.exists() {
        File::open(conf)?.sync_all()?;
    }
    let blobs = directory.join("blobs");
    if blobs.exists() {
        File::open(blobs)?.sync_all()?;
    }
    File::open(directory)?.sync_all()?;
    match directory.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => File::open(parent)?.sync_all(),
        _ => File::open(".")?.sync_all(),
    }
}

/// Runs a call into sled; a panic is an error like any other.
fn guarded<T>(
    action: &'static str,
    call: impl FnOnce() -> sled::Result<T>,
) -> Result<T, BackendError> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(|e| sort(action, e)),
        Err(panic) => {
            let reason = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("unknown panic");
            Err(BackendError::Engine {
                action,
                reason: format!("sled panicked: {reason}"),
            })
        }
    }
}

fn sort(action: &'static str, error: sled::Error) -> BackendError {
    match error {
        // sled has no kind of its own for a lock that is held; the text is all there is.
        sled::Error::Io(e) if e.to_string().contains("could not acquire lock") => {
            BackendError::Locked {
                action,
                reason: e.to_string(),
            }
        }
        sled::Error::Io(e) => BackendError::io(action, e),
        sled::Error::Corruption { .. } => BackendError::Corrupt {
            action,
            reason: error.to_string(),
        },
        other => BackendError::Engine {
            action,
            reason: other.to_string(),
        },
    }
}

impl Drop for SledBackend {
    fn drop(&mut self) {
        drop(self.close());
    }
}

impl Backend for SledBackend {
    fn apply(&mut self, batch: &[Op]) -> Result<(), BackendError> {
        const ACTION: &str = "write a batch to the database";
        let open = self.current(ACTION)?;
        let mut sled_batch = sled::Batch::default();
        for op in batch {
            match op {
                Op::Put { key, value } => sled_batch.insert(key.as_slice(), value.as_slice()),
                Op::Delete { key } => sled_batch.remove(key.as_slice()),
            }
        }
        guarded(ACTION, || open.db.apply_batch(sled_batch))
    }

    fn flush(&mut self) -> Result<(), BackendError> {
        const ACTION: &str = "flush the database";
        let open = self.current(ACTION)?;
        guarded(ACTION, || open.db.flush()).map(|_| ())
    }

    fn sync(&mut self) -> Result<(), BackendError> {
        self.flush()?;
        const ACTION: &str = "sync the database file";
        let open = self.current(ACTION)?;
        open.file
            .sync_data()
            .map_err(|e| BackendError::io(ACTION, e))
    }

    fn iter(&self) -> RawIter<'_> {
        const ACTION: &str = "read the database";
        let open = match self.current(ACTION) {
            Ok(open) => open,
            Err(e) => return Box::new(std::iter::once(Err(e))),
        };
        let mut pairs = open.db.iter();
        let mut failed = false;
        Box::new(std::iter::from_fn(move || {
            if failed {
                return None;
            }
            let next = guarded(ACTION, || pairs.next().transpose());
            failed = next.is_err();
            next.map(|pair| pair.map(|(k, v)| (k.to_vec(), v.to_vec())))
                .transpose()
        }))
    }

    fn size_on_disk(&self) -> Result<u64, BackendError> {
        const ACTION: &str = "measure the database";
        let open = self.current(ACTION)?;
        guarded(ACTION, || open.db.size_on_disk())
    }

    fn reopen(&mut self) -> Result<(), BackendError> {
        if let Some(file) = self.close() {
            // After a failed sync the kernel may hold pages it believes to be written: what is read next
            // must come from the device.
            if let Err(errno) = nix::fcntl::posix_fadvise(
                &file,
                0,
                0,
                nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED,
            ) {
                tracing::warn!(%errno, "could not drop cached pages of the database file");
            }
        }
        self.open = Some(open(&self.directory, &self.options)?);
        Ok(())
    }

    fn name(&self) -> &'static str {
        "sled"
    }
}
