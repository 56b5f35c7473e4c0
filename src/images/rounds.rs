//! Loops that check images that no pod waits for, and that pull or import removed images again.
//!
//! Archives, suspects and pending repairs have a loop of their own each. An import, a registry request or a pull that
//! hangs delays none of the others.

use std::collections::HashSet;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::heal::ASK_AGAIN;
use super::pulls::Wanted;
use super::repair::is_open;
use super::{ImageManager, ImageService, PullInputs, Reporter, qualified};
use crate::core::images::{self, FilesState, ImageFiles, Standing};
use crate::kubeletconfig::format_duration;
use crate::store::{CommitError, Store};
use crate::types::Stamp;
use crate::types::events::EventRecorder;

/// Interval between checks of suspects while any exist. The first check comes this long after the start, so that pods
/// that wait for an image hear of it.
const SUSPECTS: Duration = Duration::from_secs(5);
/// Interval between checks of the records and the preload directory otherwise.
const PERIOD: Duration = Duration::from_secs(60);
/// Deadline of one pull that no pod waits for. It begins again after a pause.
pub(super) const OWED: Duration = Duration::from_secs(30 * 60);
/// Number of such pulls from one registry at once: a registry that hangs delays no image of another one.
const OWED_AT_ONCE: usize = 2;
/// Time that the first sandboxes wait for images that a previous boot left open.
const FIRST_ROUND: Duration = Duration::from_secs(60);

impl ImageManager {
    /// Imports archives of the preload directory, finds suspects of an earlier boot and pulls or imports removed images
    /// again, until cancelled. Dropping it leaves records that the next run goes on with.
    pub async fn run<S: ImageService>(
        self: Arc<Self>,
        service: S,
        store: Store,
        recorder: Arc<dyn EventRecorder>,
        token: CancellationToken,
    ) {
        let (service, store, recorder) = (&service, &store, &*recorder);
        let first = tokio::sync::watch::Sender::new(false);
        let work = async {
            tokio::join!(
                self.keep_archives(service, store, recorder),
                self.keep_suspects(service, store, recorder, &first),
                self.keep_owed(service, store, recorder, &first),
            );
        };
        tokio::select! {
            () = token.cancelled() => {}
            () = work => {}
        }
    }

    /// Looks at the archives: periodically, and when the directory changes.
    async fn keep_archives<S: ImageService>(
        &self,
        service: &S,
        store: &Store,
        recorder: &dyn EventRecorder,
    ) {
        let Some(preload) = &self.preload else {
            return;
        };
        let mut hints = preload.hints();
        let mut is_first = true;
        loop {
            let looked = self.look_at_archives(is_first, service, store, recorder);
            let is_written = looked.await.unwrap_or_else(|error| {
                tracing::warn!(%error, "cannot check archives, retrying");
                true
            });
            is_first = false;
            let pause = if is_written { SUSPECTS } else { PERIOD };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = hinted(&mut hints) => {}
            }
        }
    }

    /// Finds suspects and removes them. `first` is set after the first look.
    async fn keep_suspects<S: ImageService>(
        &self,
        service: &S,
        store: &Store,
        recorder: &dyn EventRecorder,
        first: &tokio::sync::watch::Sender<bool>,
    ) {
        tokio::time::sleep(SUSPECTS).await;
        if let Some(preload) = &self.preload {
            // Archives are sources.
            preload.first_look().await;
        }
        let report = Reporter {
            pod: None,
            container: None,
            recorder,
        };
        loop {
            if let Err(error) = self.look_at_suspects(service, store, &report).await {
                tracing::warn!(%error, "cannot check images, retrying");
            }
            first.send_replace(true);
            if *self.sandboxes_wait.borrow() {
                // Whether or not anything was removed.
                self.owing.notify_one();
            }
            tokio::select! {
                () = tokio::time::sleep(self.next_look(store)) => {}
                () = self.doubting.notified() => {}
            }
        }
    }

    /// Pulls or imports removed images again, each by itself, after the `first` look at the suspects.
    async fn keep_owed<S: ImageService>(
        &self,
        service: &S,
        store: &Store,
        recorder: &dyn EventRecorder,
        first: &tokio::sync::watch::Sender<bool>,
    ) {
        let report = Reporter {
            pod: None,
            container: None,
            recorder,
        };
        let mut under_way = FuturesUnordered::new();
        let mut bringing = HashSet::new();
        if first.subscribe().wait_for(|looked| *looked).await.is_err() {
            return;
        }
        loop {
            for image in self.owed(service, store).await {
                if bringing.insert(image.clone()) {
                    under_way.push(self.bring_for_node(image, service, store, &report));
                }
            }
            let next = tokio::time::Instant::now() + self.next_look(store);
            loop {
                if under_way.is_empty() {
                    self.round.send_replace(true);
                    self.sandboxes_wait.send_if_modified(std::mem::take);
                }
                tokio::select! {
                    Some((image, brought)) = under_way.next(), if !under_way.is_empty() => {
                        bringing.remove(&image);
                        if let Err(error) = brought {
                            tracing::warn!(image, %error, "cannot pull or import an image again, retrying");
                        }
                    }
                    () = self.owing.notified() => break,
                    () = tokio::time::sleep_until(next) => break,
                }
            }
        }
    }

    /// Returns the time until images that no pod waits for are checked. One that was left open is checked soon, or
    /// after its pause.
    fn next_look(&self, store: &Store) -> Duration {
        let boot = self.clock.now().boot;
        // What was brought in this boot can be used, and is looked at with everything else.
        let is_urgent = |(files, at): &(ImageFiles, Stamp)| {
            is_open(&files.state)
                && !(matches!(files.state, FilesState::Pulling { .. }) && at.boot == boot)
        };
        let seen = store.snapshot();
        let pauses = images::all_files(&seen)
            .filter(is_urgent)
            .map(|(files, _)| self.pause_of(&qualified(&files.image)).max(SUSPECTS));
        pauses.fold(PERIOD, Duration::min)
    }

    /// Waits until archives and suspects were looked at once, but for no longer than a minute: at once where the records
    /// know of nothing that an earlier boot left open. The image of the sandboxes themselves may be one of those, and a sandbox
    /// that is made of it keeps its files from being replaced. Cancel-safe.
    pub async fn first_round(&self, store: &Store) {
        let boot = self.clock.now().boot;
        let is_left = |(files, at): (ImageFiles, Stamp)| is_open(&files.state) && at.boot != boot;
        if *self.round.borrow() || !images::all_files(&store.snapshot()).any(is_left) {
            return;
        }
        let mut round = self.round.subscribe();
        let looked = round.wait_for(|looked| *looked);
        if tokio::time::timeout(FIRST_ROUND, looked).await.is_err() {
            tracing::warn!("creating a sandbox before images from before the reboot were checked");
            // A minute for all of them: each that waits keeps others from being made.
            self.round.send_replace(true);
        }
    }

    /// Waits until the image of sandboxes was repaired, or cannot be, but for no longer than a minute. The runtime would pull
    /// what was removed, and nobody could tell whether it has unpacked anything. Cancel-safe.
    pub async fn sandbox_image_repaired(&self) {
        let mut waiting = self.sandboxes_wait.subscribe();
        let repaired = waiting.wait_for(|waiting| !*waiting);
        if tokio::time::timeout(FIRST_ROUND, repaired).await.is_err() {
            tracing::warn!("creating a sandbox before its image was repaired");
            // A minute for all of them.
            self.sandboxes_wait.send_replace(false);
        }
    }

    /// One round for images that no pod waits for.
    #[cfg(test)]
    pub(super) async fn repair<S: ImageService>(
        &self,
        service: &S,
        store: &Store,
        recorder: &dyn EventRecorder,
    ) -> Result<(), CommitError> {
        let report = Reporter {
            pod: None,
            container: None,
            recorder,
        };
        self.look_at_suspects(service, store, &report).await?;
        for image in self.owed(service, store).await {
            let (_, brought) = self.bring_for_node(image, service, store, &report).await;
            brought?;
        }
        Ok(())
    }

    /// The images that were removed and that nobody has brought since, as far as they are to be tried now.
    async fn owed<S: ImageService>(&self, service: &S, store: &Store) -> Vec<String> {
        let seen = store.snapshot();
        let open: Vec<String> = images::all_files(&seen)
            .filter(|(files, _)| is_open(&files.state))
            .map(|(files, _)| files.image)
            .filter(|image| !self.works.is_busy(image))
            .filter(|image| self.has_archive(image, &seen) || self.may_ask(&qualified(image)))
            .collect();
        let mut owed = Vec::new();
        for image in open {
            match self.look(&image, service, store).await {
                Ok((Standing::Owed, _)) => owed.push(image),
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(image, %error, "cannot check an image that was removed");
                }
            }
        }
        owed
    }

    /// Brings an image again that no pod waits for. Returns it with the outcome. A pull takes no slot of those that pods
    /// wait for. One that reaches its deadline leaves its records, so that it begins again.
    async fn bring_for_node<S: ImageService>(
        &self,
        image: String,
        service: &S,
        store: &Store,
        report: &Reporter<'_>,
    ) -> (String, Result<(), CommitError>) {
        if self.has_archive(&image, &store.snapshot()) {
            let brought = self.bring_from_archive(&image, service, store, report);
            let brought = brought.await.map(drop);
            return (image, brought);
        }
        let key = qualified(&image);
        let Ok(_slot) = self.owed_slots(&key).acquire_owned().await else {
            return (image, Ok(()));
        };
        let want = Wanted {
            credentials: self
                .credentials(&image, PullInputs::default().secrets, report)
                .await,
            image: image.clone(),
            sandbox: None,
        };
        let pull = self.pull(want, service, store, report);
        let (why, failed) = match tokio::time::timeout(OWED, pull).await {
            Ok(Ok(_)) => return (image, Ok(())),
            Ok(Err(error)) => (error.to_string(), error.store),
            Err(_) => (
                format!("its pull was not done after {}", format_duration(OWED)),
                None,
            ),
        };
        if self.note(&key, ASK_AGAIN) {
            tracing::warn!(
                image,
                error = why,
                "cannot pull or import a removed image again yet"
            );
        }
        (image, failed.map_or(Ok(()), Err))
    }

    /// Slots for pulls from the registry of a qualified name that no pod waits for.
    fn owed_slots(&self, qualified: &str) -> Arc<Semaphore> {
        let registry = qualified.split('/').next().unwrap_or_default();
        // Entries are put and removed whole.
        let mut slots = self
            .owed_slots
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        slots.retain(|_, of_registry| Arc::strong_count(of_registry) > 1);
        let of_registry = slots
            .entry(registry.to_owned())
            .or_insert_with(|| Arc::new(Semaphore::new(OWED_AT_ONCE)));
        Arc::clone(of_registry)
    }
}

/// Waits for a hint that the preload directory has changed.
async fn hinted(receiver: &mut tokio::sync::watch::Receiver<u64>) {
    if receiver.changed().await.is_err() {
        std::future::pending().await
    }
}
