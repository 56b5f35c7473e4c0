//! Brings the files of images to the disk: `syncfs` of the file system that the runtime names in ImageFsInfo.
//!
//! **Invariant:** who asks gets a sync that began after the question. Those who ask while one runs share the next.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::sync::{Mutex, Semaphore};

use super::ImageService;
use crate::kuberuntime::cri::CriError;
use crate::types::blocking;

/// A sync may take as long as the disk does: it must not take the turns of what pods wait for.
static TURNS: Semaphore = Semaphore::const_new(1);

/// The files of images may not be on the disk.
#[derive(Debug, thiserror::Error)]
pub(super) enum SyncError {
    #[error("ask for the file system of images: {0}")]
    Runtime(#[source] CriError),
    #[error("the runtime names no file system of images")]
    Unknown,
    #[error("sync the file system of images at {}: {source}", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Syncs of the file system of images.
#[derive(Debug, Default)]
pub(super) struct Syncs {
    begun: AtomicU64,
    /// A failure was told since the last success.
    told: AtomicBool,
    state: Mutex<SyncState>,
}

#[derive(Debug, Default)]
struct SyncState {
    /// Number of the newest sync that ended well.
    done: u64,
    /// Where the runtime keeps images. Asked once: some runtimes measure what is there to answer.
    paths: Vec<PathBuf>,
}

impl Syncs {
    /// Waits until everything is on the disk that was written before this call. When dropped, a sync that has begun
    /// goes on.
    ///
    /// # Errors
    /// When the runtime does not name the file system, or it cannot be synced.
    pub(super) async fn sync<S: ImageService>(&self, service: &S) -> Result<(), SyncError> {
        let wanted = self.begun.load(Ordering::SeqCst) + 1;
        let mut state = self.state.lock().await;
        if state.done >= wanted {
            return Ok(());
        }
        if state.paths.is_empty() {
            state.paths = service
                .image_directories()
                .await
                .map_err(SyncError::Runtime)?;
        }
        if state.paths.is_empty() {
            return Err(SyncError::Unknown);
        }
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let paths = state.paths.clone();
        let synced = blocking::run_in(&TURNS, move || paths.into_iter().try_for_each(sync_at))
            .await
            .unwrap_or_else(|error| {
                Err(SyncError::Io {
                    path: PathBuf::new(),
                    source: io::Error::other(error),
                })
            });
        match synced {
            Ok(()) => {
                state.done = number;
                self.told.store(false, Ordering::Relaxed);
                Ok(())
            }
            Err(error) => {
                // The runtime may have moved.
                state.paths.clear();
                Err(error)
            }
        }
    }

    /// Whether a failure is the first since the last sync that ended well.
    pub(super) fn fails_anew(&self) -> bool {
        !self.told.swap(true, Ordering::Relaxed)
    }
}

#[cfg(test)]
impl Syncs {
    /// How many there were.
    pub(super) fn syncs(&self) -> u64 {
        self.begun.load(Ordering::SeqCst)
    }
}

fn sync_at(path: PathBuf) -> Result<(), SyncError> {
    let synced = File::open(&path).and_then(|dir| Ok(rustix::fs::syncfs(&dir)?));
    synced.map_err(|source| SyncError::Io { path, source })
}
