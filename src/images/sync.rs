//! Brings the files of images to the disk: `syncfs` of the file system that the runtime names in ImageFsInfo.
//!
//! CRI does not say which files a pull writes, so the whole file system is synced: once, after the pull. A kernel that writes
//! behind has little left to do then. Only while a pull has made it fall behind is it made to catch up earlier.
//!
//! The kernel reports an error of writing once to each descriptor that was open when it happened. So the directory is opened
//! before a pull, and stays open as long as a pull runs that needs it.
//!
//! **Invariant:** who asks gets a sync that began after the question. Those who ask while one runs share the next.
//!
//! **Invariant:** an error of writing fails every pull that was open when it happened. A later sync that ends well proves
//! nothing about their files: the kernel may have dropped what it could not write.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use tokio::sync::{Mutex, Semaphore};

use super::ImageService;
use crate::kuberuntime::cri::CriError;
use crate::types::blocking;

/// A sync may take as long as the disk does: it must not take the turns of what pods wait for.
static TURNS: Semaphore = Semaphore::const_new(1);
/// The same for opening directories, which must not wait for a sync.
static OPENS: Semaphore = Semaphore::const_new(1);
/// A pull that leaves the kernel with more bytes to write than this is synced while it runs: some seconds of a slow disk.
const MUCH: u64 = 256 << 20;

/// File systems that hold images. Every call blocks.
pub trait ImageDisk: Send + Sync + 'static {
    /// Opens a directory, to sync its file system.
    ///
    /// # Errors
    /// When it cannot be opened.
    fn open(&self, directory: &Path) -> io::Result<Box<dyn OpenedDisk>>;

    /// Bytes that the kernel still has to write, to any disk.
    fn unwritten(&self) -> u64;
}

/// An opened directory on a file system that holds images.
pub trait OpenedDisk: Send + Sync {
    /// Waits until everything is on the disk that was written before this call. Blocks.
    ///
    /// # Errors
    /// When something could not be written since the directory was opened, or since the last error.
    fn sync(&self) -> io::Result<()>;
}

/// The file systems of this machine.
#[derive(Debug)]
pub(super) struct KernelDisk;

impl ImageDisk for KernelDisk {
    fn open(&self, directory: &Path) -> io::Result<Box<dyn OpenedDisk>> {
        Ok(Box::new(File::open(directory)?))
    }

    fn unwritten(&self) -> u64 {
        let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        dirty_of(&text)
    }
}

impl OpenedDisk for File {
    fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::syncfs(self)?)
    }
}

/// The dirty bytes in the text of `/proc/meminfo`; 0 where it does not say.
fn dirty_of(meminfo: &str) -> u64 {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("Dirty:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

/// The files of images may not be on the disk.
#[derive(Debug, thiserror::Error)]
pub(super) enum SyncError {
    #[error("ask for the file system of images: {0}")]
    Runtime(#[source] CriError),
    #[error("the runtime names no file system of images")]
    Unknown,
    #[error("open the file system of images at {}: {source}", path.display())]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("write the file system of images at {}: {source}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("an earlier sync of the file system of images has reported an error")]
    Failed,
    #[error("the sync of the file system of images was cut off: {0}")]
    CutOff(#[source] tokio::task::JoinError),
}

impl SyncError {
    /// Returns whether files that a pull wrote are lost.
    pub(super) fn is_loss(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::Failed)
    }
}

/// The directories of images, opened before a pull.
pub(super) struct Opened {
    disks: Vec<(PathBuf, Box<dyn OpenedDisk>)>,
    /// An error of writing was reported.
    has_failed: AtomicBool,
}

/// Syncs of the file system of images.
pub(super) struct Syncs {
    disk: Arc<dyn ImageDisk>,
    begun: AtomicU64,
    /// A failure was logged since the last success.
    told: AtomicBool,
    /// Number of the newest sync that ended well.
    done: Mutex<u64>,
    directories: Mutex<Directories>,
}

#[derive(Default)]
struct Directories {
    /// Image directories of the runtime. Requested once, since some runtimes measure their disk usage to answer.
    paths: Vec<PathBuf>,
    /// Open as long as a pull needs them: nobody could unmount them.
    opened: Weak<Opened>,
}

impl Syncs {
    pub(super) fn new(disk: Arc<dyn ImageDisk>) -> Self {
        Self {
            disk,
            begun: AtomicU64::default(),
            told: AtomicBool::default(),
            done: Mutex::default(),
            directories: Mutex::default(),
        }
    }

    /// Opens the directories of images, or joins those who have them open. To be kept until [`Self::sync`].
    ///
    /// # Errors
    /// When the runtime does not name them, or one cannot be opened.
    pub(super) async fn open<S: ImageService>(
        &self,
        service: &S,
    ) -> Result<Arc<Opened>, SyncError> {
        let mut directories = self.directories.lock().await;
        let opened = directories.opened.upgrade();
        if let Some(opened) = opened.filter(|opened| !opened.has_failed()) {
            return Ok(opened);
        }
        if directories.paths.is_empty() {
            let paths = service.image_directories().await;
            directories.paths = paths.map_err(SyncError::Runtime)?;
        }
        if directories.paths.is_empty() {
            return Err(SyncError::Unknown);
        }
        let (disk, paths) = (Arc::clone(&self.disk), directories.paths.clone());
        let open = move || {
            let opened = paths.into_iter().map(|path| match disk.open(&path) {
                Ok(opened) => Ok((path, opened)),
                Err(source) => Err(SyncError::Open { path, source }),
            });
            opened.collect::<Result<Vec<_>, SyncError>>()
        };
        let disks = match blocking::run_in(&OPENS, open).await {
            Ok(Ok(disks)) => disks,
            Ok(Err(error)) => {
                // The runtime may have moved.
                directories.paths.clear();
                return Err(error);
            }
            Err(error) => return Err(SyncError::CutOff(error)),
        };
        let opened = Arc::new(Opened {
            disks,
            has_failed: AtomicBool::default(),
        });
        directories.opened = Arc::downgrade(&opened);
        Ok(opened)
    }

    /// Waits until everything is on the disk that was written before this call. When dropped, a sync that has begun
    /// goes on.
    ///
    /// # Errors
    /// When something could not be written since `opened`, also if another caller has got that error.
    pub(super) async fn sync(&self, opened: &Arc<Opened>) -> Result<(), SyncError> {
        let wanted = self.begun.load(Ordering::SeqCst) + 1;
        let mut done = self.done.lock().await;
        if opened.has_failed() {
            return Err(SyncError::Failed);
        }
        if *done >= wanted {
            return Ok(());
        }
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let of = Arc::clone(opened);
        match blocking::run_in(&TURNS, move || of.sync()).await {
            Ok(Ok(())) => {
                *done = number;
                self.told.store(false, Ordering::Relaxed);
                Ok(())
            }
            Ok(Err(error)) => Err(error),
            Err(error) => Err(SyncError::CutOff(error)),
        }
    }

    /// Syncs what a pull that runs has written so far, if the kernel has fallen behind. Does nothing while a sync runs: those that
    /// wait for a disk that hangs would become more and more.
    pub(super) async fn catch_up(&self, opened: Arc<Opened>) {
        if self.done.try_lock().is_err() {
            return;
        }
        let disk = Arc::clone(&self.disk);
        let unwritten = blocking::run(move || disk.unwritten()).await;
        if unwritten.is_ok_and(|bytes| bytes >= MUCH)
            && let Err(error) = self.sync(&opened).await
        {
            // The end of the pull finds it as well.
            tracing::debug!(%error, "cannot sync the files of a running pull");
        }
    }

    /// Returns whether a failure is the first since the last successful sync.
    pub(super) fn fails_anew(&self) -> bool {
        !self.told.swap(true, Ordering::Relaxed)
    }
}

#[cfg(test)]
impl Syncs {
    /// Returns the number of syncs that have begun.
    pub(super) fn syncs(&self) -> u64 {
        self.begun.load(Ordering::SeqCst)
    }
}

impl Opened {
    fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::SeqCst)
    }

    fn sync(&self) -> Result<(), SyncError> {
        let mut failure = Ok(());
        for (path, disk) in &self.disks {
            if let Err(source) = disk.sync() {
                // Before anybody else may begin, whether or not this one still waits.
                self.has_failed.store(true, Ordering::SeqCst);
                let path = path.clone();
                failure = Err(SyncError::Write { path, source });
            }
        }
        failure
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_says_how_much_it_has_to_write() {
        let text = "MemTotal:  16 kB\nDirty:             12288 kB\nWriteback: 3 kB\n";
        assert_eq!(dirty_of(text), 12 << 20);
        assert_eq!(dirty_of("Dirty: x kB\n"), 0);
        assert_eq!(dirty_of(""), 0);
    }
}
