//! Removal of suspects: which of them have sources, what holds their layers, what is recorded before they go.
//!
//! Sources are asked first, beside each other and without a lock. Then everything is looked at again, and removed by name.
//!
//! **Invariant:** the need to pull or import an image again is on the disk before it is removed. An image stays if one
//! of its names has no source, since the runtime may remove all of them together. So does one of which a container runs
//! or is about to: a created container belongs to the worker of its pod.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::join_all;
use k8s_cri::v1;

use super::files::Work;
use super::pulls::Wanted;
use super::repair::Wish;
use super::{ImageManager, ImageService, PullInputs, Reporter, files, keyring, qualified, records};
use crate::core::images::{self, Evidence, FilesState, ImageFiles, Presence, Standing};
use crate::core::state::{ImageRecord, State, Transaction};
use crate::store::{CommitError, RemoveContainer, RemoveEmptySandbox, Store};
use crate::types::ContainerId;
use crate::types::runtime::{ContainerState, PodStatus};

/// A source that has not answered is asked again after this long, doubled each time up to the second.
pub(super) const ASK_AGAIN: (Duration, Duration) =
    (Duration::from_secs(10), Duration::from_secs(40));
/// The same for a suspect that is in use. A pod that needs it does not wait for that.
pub(super) const LOOK_AGAIN: (Duration, Duration) = (ASK_AGAIN.0, Duration::from_secs(300));
/// Timeout of the source of an image that no pod waits for.
pub(super) const ANSWER: Duration = Duration::from_secs(20);
/// The same where a pod waits: its tag may stand for an image that has to be loaded.
const ANSWER_FOR_POD: Duration = Duration::from_secs(60);
/// Time after its pause without a try, after which a back-off starts over.
const FORGOTTEN: Duration = Duration::from_secs(60);
/// Number of times the containers of an image are listed again because a record has changed meanwhile.
const LOOKS: u32 = 4;

/// Something that did not work, and is tried again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unanswered {
    at: tokio::time::Instant,
    /// It is tried again after this long.
    pause: Duration,
}

/// A suspect that is there.
struct Suspect {
    /// Its recorded name.
    image: String,
    found: v1::Image,
}

impl Suspect {
    /// Every name that goes with it, as the runtime lists it, by its qualified form. A digest comes back with a tag of its
    /// repository.
    fn names(&self) -> BTreeMap<String, String> {
        let mut names: BTreeMap<String, String> = BTreeMap::new();
        for tag in &self.found.repo_tags {
            names.insert(qualified(tag), tag.clone());
        }
        names
            .entry(qualified(&self.image))
            .or_insert_with(|| self.image.clone());
        let tagged: HashSet<String> = names.values().map(|n| keyring::repository(n)).collect();
        for digest in &self.found.repo_digests {
            if !tagged.contains(&keyring::repository(digest)) {
                names.insert(qualified(digest), digest.clone());
            }
        }
        names
    }
}

/// Outcome of the removal of a suspect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Removal {
    Done,
    /// It cannot be removed now, and is tried again.
    Stays,
    /// It is no suspect any more.
    Needless,
}

/// Outcome for the containers that hold an image.
enum Holders {
    Gone,
    Stay,
    /// A record changed after they were looked at.
    Changed,
}

impl ImageManager {
    /// Removes the suspects of which sources answer, all of them together: a layer that two of them share goes with the
    /// last of them. Those that are in use stay.
    pub(super) async fn heal<S: ImageService>(
        &self,
        wish: Option<Wish<'_>>,
        service: &S,
        store: &Store,
        report: &Reporter<'_>,
    ) -> Result<(), CommitError> {
        let suspects = self.suspects(wish, service, store).await;
        if suspects.is_empty() {
            return Ok(());
        }
        let mut names = BTreeMap::new();
        for suspect in &suspects {
            names.append(&mut suspect.names());
        }
        let mut asked = Vec::new();
        for (key, name) in &names {
            let wish = wish.filter(|wish| qualified(wish.image) == *key);
            asked.push(self.has_source(name, wish, service, store, report));
        }
        let mut answered = HashSet::new();
        for (key, answer) in names.keys().zip(join_all(asked).await) {
            if answer? {
                answered.insert(key.clone());
            }
        }
        let _turn = self.healing.lock().await;
        // Somebody has begun to bring them meanwhile.
        answered.retain(|key| !self.works.is_busy(key));
        for suspect in suspects {
            let key = qualified(&suspect.image);
            if !answered.contains(&key) {
                continue;
            }
            let removal = self.remove_suspect(&suspect.image, &answered, service, store);
            match removal.await? {
                Removal::Stays => {
                    self.note(&key, LOOK_AGAIN);
                }
                Removal::Done | Removal::Needless => {
                    self.unanswered().remove(&key);
                }
            }
        }
        self.owing.notify_one();
        Ok(())
    }

    /// The suspects that can be removed now. The one that a pod needs is looked at each time, others after their pause.
    async fn suspects<S: ImageService>(
        &self,
        wish: Option<Wish<'_>>,
        service: &S,
        store: &Store,
    ) -> Vec<Suspect> {
        let seen = store.snapshot();
        let open = images::all_files(&seen)
            .map(|(files, _)| files)
            .filter(|files| {
                matches!(
                    files.state,
                    FilesState::Suspect { .. } | FilesState::Removed
                )
            });
        let mut suspects = Vec::new();
        for files in open {
            let image = files.image;
            let key = qualified(&image);
            let is_wished = wish.is_some_and(|wish| qualified(wish.image) == key);
            if self.works.is_busy(&image) || !(is_wished || self.may_ask(&key)) {
                continue;
            }
            match service.image_status(&image).await {
                Ok(Some(found)) => {
                    if self.standing(&seen, &image, Some(&found)) != Standing::Suspect {
                        continue;
                    }
                    // Nobody is asked about what cannot be removed.
                    if holders(&image, &found.id, service).await.is_some() {
                        suspects.push(Suspect { image, found });
                    } else {
                        self.note(&key, LOOK_AGAIN);
                    }
                }
                Ok(None) => {}
                Err(error) => tracing::warn!(image, %error, "cannot check a suspect image"),
            }
        }
        suspects
    }

    /// Removes those of these images that are suspects and not in use. The runtime has lost files of them, and what would bring
    /// them is at hand. Returns whether one is gone.
    pub(super) async fn remove_suspects<S: ImageService>(
        &self,
        images: &[String],
        service: &S,
        store: &Store,
        report: &Reporter<'_>,
    ) -> Result<bool, CommitError> {
        let at_hand: HashSet<String> = images.iter().map(|image| qualified(image)).collect();
        let mut answered = at_hand.clone();
        for image in images {
            let Ok(Some(found)) = service.image_status(image).await else {
                continue;
            };
            if self.standing(&store.snapshot(), image, Some(&found)) != Standing::Suspect {
                continue;
            }
            let image = image.clone();
            for (key, name) in (Suspect { image, found }).names() {
                if !answered.contains(&key)
                    && self.has_source(&name, None, service, store, report).await?
                {
                    answered.insert(key);
                }
            }
        }
        let _turn = self.healing.lock().await;
        answered.retain(|key| at_hand.contains(key) || !self.works.is_busy(key));
        let mut is_gone = false;
        for image in images {
            let removal = self.remove_suspect(image, &answered, service, store);
            is_gone |= removal.await? == Removal::Done;
        }
        Ok(is_gone)
    }

    /// Returns whether an archive holds the image, or its registry answers in time.
    async fn has_source<S: ImageService>(
        &self,
        image: &str,
        wish: Option<Wish<'_>>,
        service: &S,
        store: &Store,
        report: &Reporter<'_>,
    ) -> Result<bool, CommitError> {
        if self.can_import(image, &store.snapshot()).await {
            return Ok(true);
        }
        if wish.is_none() && !is_of_registry(&store.snapshot(), image) {
            return Ok(false);
        }
        let key = match (wish, report.uid()) {
            // A pod has credentials that the node has not.
            (Some(_), Some(uid)) => format!("{uid}/{}", qualified(image)),
            _ => qualified(image),
        };
        if wish.is_some_and(|wish| !wish.may_pull) || !self.may_ask(&key) {
            return Ok(false);
        }
        let Ok(_slot) = self.asking.acquire().await else {
            return Ok(false);
        };
        // Others may have asked meanwhile, and got no answer.
        if !self.may_ask(&key) {
            return Ok(false);
        }
        let want = match wish {
            Some(wish) => Wanted {
                image: wish.image.to_owned(),
                credentials: wish.credentials.to_vec(),
                sandbox: wish.sandbox.cloned(),
            },
            None => Wanted {
                image: image.to_owned(),
                credentials: self
                    .credentials(image, PullInputs::default().secrets, report)
                    .await,
                sandbox: None,
            },
        };
        let within = if wish.is_some() {
            ANSWER_FOR_POD
        } else {
            ANSWER
        };
        let answered = self.ask_registry(want, within, service, store).await?;
        if answered {
            // An image that has a source may be in use: that pause is kept.
            if wish.is_some() {
                self.unanswered().remove(&key);
            }
        } else if self.note(&key, ASK_AGAIN) {
            tracing::warn!(
                image,
                "no source of a suspect image answers, using it as it is"
            );
        }
        Ok(answered)
    }

    /// Asks the registry by pulling what is there already. CRI has no other way, and such a pull loads nothing that the
    /// runtime believes it has. It does not wait for the pulls of others: a registry that hangs has none of their slots.
    async fn ask_registry<S: ImageService>(
        &self,
        want: Wanted,
        within: Duration,
        service: &S,
        store: &Store,
    ) -> Result<bool, CommitError> {
        let image = want.image.clone();
        let credentials = want.credentials.clone();
        let now = self.clock.now();
        let present = match service.image_status(&image).await {
            Ok(found) => found.map(|found| found.id),
            // Whose image it is must be on record before a pull may change it.
            Err(error) => {
                tracing::warn!(image, %error, "asking a registry later, since the runtime does not report its images");
                return Ok(false);
            }
        };
        let present = present.as_deref().map_or(Presence::Absent, Presence::Is);
        let under_way = self
            .records
            .begin(store, &image, present, now, |_, transaction| transaction)
            .await?;
        // Dropping it cancels the pull. Its intent stays: the runtime may have brought something. What was there stays what
        // it was.
        let Ok(pulled) = tokio::time::timeout(within, self.asks.pull(service, want)).await else {
            return Ok(false);
        };
        files::commit(store, |seen| {
            let mut transaction = Transaction::new();
            if let Ok(pulled) = &pulled {
                let used = pulled.used.and_then(|index| credentials.get(index));
                transaction =
                    records::record_pulled(seen, transaction, &image, &pulled.id, used, now);
            }
            under_way.end(seen, transaction)
        })
        .await?;
        Ok(match pulled {
            Ok(_) => true,
            // It has answered: what is missing are the files of the layers below.
            Err(error) => images::evidence(&error.message) == Some(Evidence::Storage),
        })
    }

    /// Removes an image that is still a suspect, if each of its names is one of `answered`, with the containers that have ended
    /// and hold its layers. The caller has the turn.
    async fn remove_suspect<S: ImageService>(
        &self,
        image: &str,
        answered: &HashSet<String>,
        service: &S,
        store: &Store,
    ) -> Result<Removal, CommitError> {
        // While sources were asked, it may have been replaced, or have got another name.
        let seen = store.snapshot();
        let found = match service.image_status(image).await {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(Removal::Needless),
            Err(error) => {
                tracing::warn!(image, %error, "cannot check a suspect image");
                return Ok(Removal::Stays);
            }
        };
        if self.standing(&seen, image, Some(&found)) != Standing::Suspect {
            return Ok(Removal::Needless);
        }
        let id = found.id.clone();
        let suspect = Suspect {
            image: image.to_owned(),
            found,
        };
        let names = suspect.names();
        if let Some(name) = names.keys().find(|key| !answered.contains(*key)) {
            tracing::warn!(
                image,
                name,
                "cannot remove a suspect image: no source of one of its names answers; remove that name by hand"
            );
            return Ok(Removal::Stays);
        }
        let Some(mut held) = holders(image, &id, service).await else {
            return Ok(Removal::Stays);
        };
        self.record_removed(&names, &id, store).await?;
        fail::fail_point!("images::repair::before_remove");
        if held.is_empty() && !self.remove_sandboxes_of(&names, service, store).await? {
            return Ok(Removal::Stays);
        }
        let mut looks = 0;
        loop {
            match self.remove_holders(&held, service, store).await? {
                Holders::Gone => break,
                Holders::Changed if looks < LOOKS => looks += 1,
                Holders::Stay | Holders::Changed => return Ok(Removal::Stays),
            }
            match holders(image, &id, service).await {
                Some(now) => held = now,
                None => return Ok(Removal::Stays),
            }
        }
        let is_gone = remove_names(&suspect, &names, service).await;
        fail::fail_point!("images::repair::after_remove");
        if !is_gone {
            return Ok(Removal::Stays);
        }
        tracing::info!(
            image,
            id,
            "removed a suspect image, pulling or importing it again"
        );
        let mut unanswered = self.unanswered();
        for key in names.keys() {
            unanswered.remove(key);
        }
        Ok(Removal::Done)
    }

    /// Records that all names of an image have to be pulled or imported again.
    pub(super) async fn record_removed(
        &self,
        names: &BTreeMap<String, String>,
        id: &str,
        store: &Store,
    ) -> Result<(), CommitError> {
        let now = self.clock.now();
        files::commit(store, |seen| {
            // Names that the runtime does not have say nothing of what is brought.
            let stale = images::all_files(seen)
                .map(|(files, _)| files)
                .filter(|files| files.state == FilesState::Whole && files.id == id)
                .filter(|files| !names.contains_key(&qualified(&files.image)));
            let mut transaction = Transaction::new();
            for files in stale {
                transaction = files::forget(seen, transaction, &files.image);
            }
            for name in names.values() {
                let old = files::of(seen, name).map(|(files, _)| files);
                let next = ImageFiles {
                    image: name.clone(),
                    id: id.to_owned(),
                    state: FilesState::Removed,
                    suspected: old.as_ref().and_then(|old| old.suspected),
                    lost: None,
                };
                if old.as_ref() != Some(&next) {
                    transaction = files::put(seen, transaction, &next, now);
                }
            }
            transaction
        })
        .await
        .map(drop)
    }

    async fn remove_holders<S: ImageService>(
        &self,
        holders: &[(PodStatus, Vec<ContainerId>)],
        service: &S,
        store: &Store,
    ) -> Result<Holders, CommitError> {
        for (status, ids) in holders {
            for container in ids {
                match self
                    .remove_container(status, container, service, store)
                    .await?
                {
                    Holders::Gone => {}
                    other => return Ok(other),
                }
            }
        }
        Ok(Holders::Gone)
    }

    /// Removes the sandboxes that have ended and were made of an image with one of these names: they hold its layers. Their
    /// containers have ended with them, and go first. Returns whether none is left, also none that runs.
    async fn remove_sandboxes_of<S: ImageService>(
        &self,
        names: &BTreeMap<String, String>,
        service: &S,
        store: &Store,
    ) -> Result<bool, CommitError> {
        let pods = match service.sandboxes().await {
            Ok(pods) => pods,
            Err(error) => {
                tracing::warn!(%error, "cannot remove a suspect image: its sandboxes are unknown");
                return Ok(false);
            }
        };
        let mut is_clear = true;
        for (mut status, sandboxes) in pods {
            for sandbox in sandboxes {
                let image = sandbox.image.as_deref().map(qualified);
                if !image.is_some_and(|image| names.contains_key(&image)) {
                    continue;
                }
                if sandbox.is_ready {
                    is_clear = false;
                    continue;
                }
                let inside: Vec<ContainerId> = status
                    .containers
                    .iter()
                    .filter(|c| c.sandbox_id == sandbox.id)
                    .map(|c| c.id.clone())
                    .collect();
                for container in inside {
                    let removed = self.remove_container(&status, &container, service, store);
                    if matches!(removed.await?, Holders::Gone) {
                        status.containers.retain(|c| c.id != container);
                    }
                }
                let Some(intent) = RemoveEmptySandbox::new(&status, &sandbox.id) else {
                    is_clear = false;
                    continue;
                };
                let receipt = store.commit_intent(intent, Transaction::new()).await?;
                match service.remove_sandbox(&receipt).await {
                    Ok(()) => {
                        tracing::info!(sandbox = %sandbox.id, pod = %status.uid, "removed a sandbox of a suspect image");
                    }
                    Err(error) => {
                        tracing::warn!(sandbox = %sandbox.id, pod = %status.uid, %error, "cannot remove a sandbox of a suspect image yet");
                        is_clear = false;
                    }
                }
            }
        }
        Ok(is_clear)
    }

    /// Removes a container that has ended, after its end is recorded. Its log stays. One that has not ended stays too,
    /// and a decision that another one overtook is not made again by what was seen before it.
    async fn remove_container<S: ImageService>(
        &self,
        status: &PodStatus,
        id: &ContainerId,
        service: &S,
        store: &Store,
    ) -> Result<Holders, CommitError> {
        let Some(shown) = status.containers.iter().find(|c| c.id == *id) else {
            return Ok(Holders::Gone);
        };
        let intent = RemoveContainer::new(status, id, self.clock.now());
        let Some(intent) = intent.filter(|_| has_ended(shown.state)) else {
            return Ok(Holders::Stay);
        };
        let receipt = match store.commit_intent(intent, Transaction::new()).await {
            Err(CommitError::Stale { .. }) => return Ok(Holders::Changed),
            other => other?,
        };
        if let Err(error) = service.remove_container(&receipt).await {
            tracing::warn!(container = %id, pod = %status.uid, %error, "cannot remove a container of a suspect image yet");
            return Ok(Holders::Stay);
        }
        Ok(Holders::Gone)
    }

    /// Begins to work on an image. What is being removed is gone then, and nobody begins to remove it.
    pub(super) async fn begin_work(&self, image: &str) -> Work {
        let _turn = self.healing.lock().await;
        self.works.begin(image)
    }

    fn unanswered(&self) -> MutexGuard<'_, HashMap<String, Unanswered>> {
        // Entries are put and removed whole.
        self.unanswered
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn may_ask(&self, key: &str) -> bool {
        self.pause_of(key).is_zero()
    }

    /// Returns the time until the next try after a failure.
    pub(super) fn pause_of(&self, key: &str) -> Duration {
        let asked = self.unanswered().get(key).copied();
        asked.map_or(Duration::ZERO, |asked| {
            asked.pause.saturating_sub(asked.at.elapsed())
        })
    }

    /// Notes that a source has not answered, or that an image is in use. It is tried again after the first duration, doubled
    /// each time up to the second. Returns whether it is the first time in a row.
    pub(super) fn note(&self, key: &str, (first, most): (Duration, Duration)) -> bool {
        let at = tokio::time::Instant::now();
        let mut unanswered = self.unanswered();
        // Of pods that are gone.
        unanswered.retain(|_, asked| asked.at.elapsed() < asked.pause + FORGOTTEN);
        let last = unanswered.get(key).map(|asked| asked.pause);
        let pause = last.map_or(first, |last| (last * 2).min(most));
        unanswered.insert(key.to_owned(), Unanswered { at, pause });
        last.is_none()
    }
}

/// Returns whether a registry may be asked for a name: the name is a suspect itself, was pulled before, or names the
/// content. A pull of any other name, such as a tag that exists only on this node, may fetch a foreign image.
fn is_of_registry(seen: &State, image: &str) -> bool {
    let key = qualified(image);
    let is_suspect = files::of(seen, image).is_some_and(|(files, _)| {
        matches!(
            files.state,
            FilesState::Suspect { .. } | FilesState::Removed
        )
    });
    let mut records = seen.with_prefix::<ImageRecord>("");
    is_suspect
        || key.contains('@')
        || records.any(|(name, record)| record.pulled_ref.is_some() && qualified(name) == key)
}

/// Returns whether a container has ended for good. The worker of its pod decides about all others.
fn has_ended(state: ContainerState) -> bool {
    state == ContainerState::Exited
}

/// The containers of an image, by pod; `None` while one of them has not ended, or they are not known.
async fn holders<S: ImageService>(
    image: &str,
    id: &str,
    service: &S,
) -> Option<Vec<(PodStatus, Vec<ContainerId>)>> {
    let holders = match service.containers_of(id).await {
        Ok(holders) => holders,
        Err(error) => {
            tracing::warn!(image, %error, "cannot remove a suspect image: its containers are unknown");
            return None;
        }
    };
    let is_in_use = |(status, ids): &(PodStatus, Vec<ContainerId>)| {
        let mut of_image = status.containers.iter().filter(|c| ids.contains(&c.id));
        of_image.any(|c| !has_ended(c.state))
    };
    if holders.iter().any(is_in_use) {
        tracing::debug!(image, "not removing a suspect image: a container uses it");
        return None;
    }
    Some(holders)
}

/// Removes an image by its names and no others. Returns whether it is gone.
async fn remove_names<S: ImageService>(
    suspect: &Suspect,
    names: &BTreeMap<String, String>,
    service: &S,
) -> bool {
    let image = suspect.image.as_str();
    // Parts of a pull that is not under way may be the same layers. The next pull would take them as they are.
    service.release_pulls().await;
    // Those that come back with a tag.
    let digests = suspect.found.repo_digests.iter();
    let digests = digests.filter(|digest| !names.contains_key(&qualified(digest)));
    for name in names.values().chain(digests) {
        if let Err(error) = service.remove_image(name).await {
            tracing::warn!(image, name, %error, "cannot remove a suspect image yet");
            return false;
        }
    }
    match service.image_status(&suspect.found.id).await {
        Ok(None) => true,
        Ok(Some(left)) => {
            let names = [left.repo_tags, left.repo_digests].concat();
            tracing::warn!(image, ?names, "a suspect image has other names by now");
            false
        }
        Err(error) => {
            tracing::warn!(image, %error, "cannot check whether a suspect image is removed");
            false
        }
    }
}
