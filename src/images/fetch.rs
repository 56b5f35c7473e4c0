//! One pull for one who waits: on record before it begins, its files on the disk before it counts, told as events.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use k8s_cri::v1;

use super::error::classify;
use super::files::Work;
use super::keyring::Credentials;
use super::pulls::{PullResult, Pulled, Wanted};
use super::records::UnderWay;
use super::sync::Opened;
use super::{ImageError, ImageErrorReason, ImageManager, ImageService, Present, Reporter};
use super::{files, records, unrecorded};
use crate::core::backoff;
use crate::core::images::{self, FilesState, Presence};
use crate::core::state::{BackoffRecord, ImageRecord};
use crate::kubeletconfig::format_duration;
use crate::kuberuntime::cri::CriError;
use crate::store::Store;
use crate::types::metrics::ImageSizeLabel;
use crate::types::{PodUid, Stamp};

/// Interval at which a slow pull is reported.
const STILL_PULLING: Duration = Duration::from_secs(60);
/// Interval at which a running pull is synced if the kernel has fallen behind, so that little is left to do at its end.
const SYNC_EARLY: Duration = Duration::from_secs(5);

/// Pull whose begin is recorded.
struct Attempt<'a> {
    image: &'a str,
    credentials: &'a [Credentials],
    /// Time of the request, before any wait for other pulls.
    asked: tokio::time::Instant,
    /// Answer of the runtime before the pull.
    present: Presence<'a>,
    store: &'a Store,
    report: &'a Reporter<'a>,
    under_way: UnderWay<'a>,
    work: Work,
}

impl ImageManager {
    /// Pulls an image for a pod or for the node. A pull for the node leaves no back-off.
    ///
    /// # Errors
    /// As [`ImageManager::ensure`].
    pub(super) async fn pull<S: ImageService>(
        &self,
        want: Wanted,
        service: &S,
        store: &Store,
        report: &Reporter<'_>,
    ) -> Result<Present, ImageError> {
        let (image, credentials) = (want.image.clone(), want.credentials.clone());
        let image = image.as_str();
        let asked = tokio::time::Instant::now();
        self.settle_earlier(service, store, report)
            .await
            .map_err(|error| unrecorded(image, error))?;
        let work = self.begin_work(image).await;
        let found = self.present(image, service, store).await;
        let present = found.as_presence();
        let now = self.clock.now();
        let under_way = self
            .records
            .begin(store, image, present, now, |seen, transaction| {
                files::begun(seen, transaction, image, present, now)
            })
            .await
            .map_err(|error| unrecorded(image, error))?;
        let attempt = Attempt {
            image,
            credentials: &credentials,
            asked,
            present,
            store,
            report,
            under_way,
            work,
        };
        report.normal("Pulling", format!("Pulling image \"{image}\""));
        let opened = self.open_disk(service).await;
        match self
            .pull_telling(want, opened.as_ref(), service, report)
            .await
        {
            Ok(pulled) => self.succeeded(&attempt, pulled, opened, service).await,
            Err(error) => Err(self.failed(&attempt, &error).await),
        }
    }

    /// Brings a pulled image to the disk, then records it. `opened` is from before the pull.
    async fn succeeded<S: ImageService>(
        &self,
        attempt: &Attempt<'_>,
        pulled: Pulled,
        opened: Option<Arc<Opened>>,
        service: &S,
    ) -> Result<Present, ImageError> {
        let (image, store, report) = (attempt.image, attempt.store, attempt.report);
        let label = ImageSizeLabel {
            image_size_in_bytes: size_step(pulled.size).to_owned(),
        };
        self.metrics
            .image_pull_duration
            .get_or_create(&label)
            .observe(pulled.took.as_secs_f64());
        let synced = self.bring_to_disk(image, opened, service).await;
        report.normal(
            "Pulled",
            format!(
                "Successfully pulled image \"{image}\" in {} ({} including waiting). Image size: {} bytes.",
                milliseconds(pulled.took),
                milliseconds(attempt.asked.elapsed()),
                pulled.size
            ),
        );
        // First: an agent that starts again would sync what is left, and take it for whole.
        if let Synced::Lost(why) = &synced {
            self.files_lost(image, &pulled.id, why, store, report)
                .await
                .map_err(|error| unrecorded(image, error))?;
        }
        let has_repaired = self
            .record_pull(attempt, &pulled, synced == Synced::Yes)
            .await?;
        if has_repaired {
            self.tell_repaired(image, "pulled", report);
        } else if attempt.present != Presence::Is(&pulled.id) {
            self.announce(image);
        }
        if let Some(tell) = &self.pulled {
            tell();
        }
        Ok(Present {
            reference: pulled.reference,
            user: None,
        })
    }

    /// Records a pull that succeeded, and returns whether it has repaired the image. `is_synced` says that its files are on the disk.
    async fn record_pull(
        &self,
        attempt: &Attempt<'_>,
        pulled: &Pulled,
        is_synced: bool,
    ) -> Result<bool, ImageError> {
        let (image, uid) = (attempt.image, attempt.report.uid());
        let used = pulled.used.and_then(|index| attempt.credentials.get(index));
        let has_repaired = AtomicBool::new(false);
        self.change(attempt.store, image, |seen, record, transaction| {
            record.pulled_ref = Some(pulled.reference.clone());
            let now = self.clock.now();
            let mut t = records::record_pulled(seen, transaction, image, &pulled.id, used, now);
            if let Some(uid) = &uid {
                record.backoffs.remove(uid);
                t = records::record_error(seen, t, uid, image, None, now);
            }
            if is_synced {
                let repaired;
                (t, repaired) = files::finished(seen, t, image, &pulled.id, now);
                has_repaired.store(repaired, Ordering::Relaxed);
            }
            attempt.under_way.end(seen, t)
        })
        .await?;
        Ok(has_repaired.load(Ordering::Relaxed))
    }

    /// Records a failed pull with the back-off of its pod, and returns the error for who waits.
    async fn failed(&self, attempt: &Attempt<'_>, error: &CriError) -> ImageError {
        let (image, uid) = (attempt.image, attempt.report.uid());
        let (reason, message) = classify(image, error);
        attempt.report.warning(
            "Failed",
            format!("Failed to pull image \"{image}\": {}", error.message),
        );
        let now = self.clock.now();
        let told = format!("{}: {message}", reason.as_str());
        let next = |record: &ImageRecord, uid: &PodUid| -> BackoffRecord {
            let last = record.backoffs.get(uid).copied();
            backoff::image::failed(last, now, backoff::image::MAX)
        };
        // The runtime may go on with a pull that nobody hears of any more.
        let brought_nothing = !error.outcome_unknown() && !attempt.work.is_shared();
        let committed = self
            .change(attempt.store, image, |seen, record, transaction| {
                let mut t = transaction;
                if let Some(uid) = &uid {
                    let backoff = next(record, uid);
                    record.backoffs.insert(uid.clone(), backoff);
                    t = records::record_error(seen, t, uid, image, Some(&told), now);
                }
                if brought_nothing {
                    t = files::failed(seen, t, image, now);
                }
                attempt.under_way.end(seen, t)
            })
            .await;
        backing_off(reason, message, committed, uid.as_ref(), now)
    }

    /// Returns the image that the runtime has under a name. A name that is recorded as removed counts as present while
    /// its image exists under any name, unless that image was pulled or imported again in this boot.
    pub(super) async fn present<S: ImageService>(
        &self,
        image: &str,
        service: &S,
        store: &Store,
    ) -> Found {
        self.recall_lost(store);
        let seen = store.snapshot();
        let named = Found::of(service.image_status(image).await);
        if !matches!(named, Found::Absent) {
            return named;
        }
        self.forget_lost(image);
        let boot = self.clock.now().boot;
        match files::of(&seen, image) {
            Some((files, _))
                if files.state == FilesState::Removed
                    && !images::is_brought(&seen, &files.id, boot) =>
            {
                Found::of(service.image_status(&files.id).await)
            }
            _ => named,
        }
    }

    /// Opens the directories of images before a pull or import; see [`Syncs::open`](super::sync::Syncs::open). Where that fails, its end tries again.
    pub(super) async fn open_disk<S: ImageService>(&self, service: &S) -> Option<Arc<Opened>> {
        let opened = self.syncs.open(service).await;
        opened
            .inspect_err(
                |error| tracing::debug!(%error, "cannot open the disk of images before a pull"),
            )
            .ok()
    }

    /// Brings the files of an image to the disk, and tells whether that worked. `opened` is from before they were written.
    pub(super) async fn bring_to_disk<S: ImageService>(
        &self,
        image: &str,
        opened: Option<Arc<Opened>>,
        service: &S,
    ) -> Synced {
        let opened = match opened {
            Some(opened) => Ok(opened),
            None => self.syncs.open(service).await,
        };
        let synced = match opened {
            Ok(opened) => self.syncs.sync(&opened).await,
            Err(error) => Err(error),
        };
        let Err(error) = synced else {
            // What was lost before is not there because of a pull that brought nothing.
            return if self.is_lost(image) {
                Synced::No
            } else {
                Synced::Yes
            };
        };
        if self.syncs.fails_anew() {
            tracing::warn!(image, %error, "cannot sync the files of images, so a power loss may damage them");
        } else {
            tracing::debug!(image, %error, "cannot sync the files of an image");
        }
        if error.is_loss() {
            Synced::Lost(error.to_string())
        } else {
            Synced::No
        }
    }

    /// Pulls, and logs every minute that it still does.
    async fn pull_telling<S: ImageService>(
        &self,
        want: Wanted,
        opened: Option<&Arc<Opened>>,
        service: &S,
        report: &Reporter<'_>,
    ) -> PullResult {
        let image = want.image.clone();
        let begun = tokio::time::Instant::now();
        let mut minutes = tokio::time::interval_at(begun + STILL_PULLING, STILL_PULLING);
        let mut syncs = tokio::time::interval_at(begun + SYNC_EARLY, SYNC_EARLY);
        syncs.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let pulls = match report.pod {
            Some(_) => &self.pulls,
            None => &self.owed_pulls,
        };
        let mut pull = std::pin::pin!(pulls.pull(service, want));
        loop {
            tokio::select! {
                biased;
                result = &mut pull => return result,
                _ = minutes.tick() => {
                    let took = format_duration(Duration::from_secs(begun.elapsed().as_secs()));
                    tracing::info!(image, pod = report.uid().map(tracing::field::display), took, "still pulling");
                    report.normal("Pulling", format!("Still pulling image \"{image}\" after {took}"));
                }
                _ = syncs.tick() => {
                    if let Some(opened) = opened.cloned() {
                        let syncs = Arc::clone(&self.syncs);
                        // Whether it worked is found at the end of the pull.
                        tokio::spawn(async move { syncs.catch_up(opened).await });
                    }
                }
            }
        }
    }
}

/// Outcome of a sync of the files of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Synced {
    Yes,
    /// Nobody knows: the file system cannot be synced.
    No,
    /// Some were not written, with the error.
    Lost(String),
}

/// Answer of the runtime about a name; see [`Presence`].
pub(super) enum Found {
    Unknown,
    Absent,
    Is(String),
}

impl Found {
    fn of(answer: Result<Option<v1::Image>, CriError>) -> Self {
        match answer {
            Err(_) => Self::Unknown,
            Ok(None) => Self::Absent,
            Ok(Some(found)) => Self::Is(found.id),
        }
    }

    pub(super) fn as_presence(&self) -> Presence<'_> {
        match self {
            Self::Unknown => Presence::Unknown,
            Self::Absent => Presence::Absent,
            Self::Is(id) => Presence::Is(id),
        }
    }
}

/// The error of a pull whose failure was, or could not be, recorded.
fn backing_off(
    reason: ImageErrorReason,
    message: String,
    committed: Result<ImageRecord, ImageError>,
    uid: Option<&PodUid>,
    now: Stamp,
) -> ImageError {
    let mut error = ImageError::new(reason, message);
    match committed {
        Ok(record) => {
            let backoff = uid.and_then(|uid| record.backoffs.get(uid)).copied();
            error.retry_at = backoff::image::waiting(backoff, now);
        }
        Err(failed) => {
            error
                .message
                .push_str("; the back-off could not be recorded");
            error.store = failed.store;
        }
    }
    error
}

/// Upstream's step of an image's size; `N/A` when the runtime does not say.
fn size_step(bytes: u64) -> &'static str {
    const MIB: u64 = 1 << 20;
    const STEPS: [(u64, &str); 12] = [
        (10, "0-10MB"),
        (100, "10MB-100MB"),
        (500, "100MB-500MB"),
        (1 << 10, "500MB-1GB"),
        (5 << 10, "1GB-5GB"),
        (10 << 10, "5GB-10GB"),
        (20 << 10, "10GB-20GB"),
        (30 << 10, "20GB-30GB"),
        (40 << 10, "30GB-40GB"),
        (60 << 10, "40GB-60GB"),
        (100 << 10, "60GB-100GB"),
        (u64::MAX / MIB, "GT100GB"),
    ];
    if bytes == 0 {
        return "N/A";
    }
    let step = STEPS.iter().find(|(most, _)| bytes / MIB < *most);
    step.map_or("GT100GB", |(_, name)| name)
}

/// Formats a duration as events have it, in whole milliseconds.
fn milliseconds(duration: Duration) -> String {
    let whole = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    format_duration(Duration::from_millis(whole))
}
