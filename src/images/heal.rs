//! Removal of suspects: which of them have a source, what holds their layers, what is on record before they go.
//!
//! **Invariant:** that an image has to be brought again is on the disk before it is removed. An image of which no source
//! answers stays, and so does one that a running container uses.

use std::collections::HashMap;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::join_all;
use k8s_cri::v1;

use super::pulls::Wanted;
use super::repair::Wish;
use super::{ImageManager, ImageService, PullInputs, Reporter, files, qualified, records};
use crate::core::images::{self, Evidence, FilesState, ImageFiles, Standing};
use crate::core::state::Transaction;
use crate::store::{CommitError, RemoveContainer, RemoveEmptySandbox, Store};
use crate::types::ContainerId;
use crate::types::runtime::{ContainerState, PodStatus};

/// A source that has not answered is asked again after this long, doubled each time up to the second.
pub(super) const ASK_AGAIN: (Duration, Duration) =
    (Duration::from_secs(10), Duration::from_secs(40));
/// How long a source of an image that no pod waits for may take to answer.
const ANSWER: Duration = Duration::from_secs(20);
/// A source that nobody has asked for so long begins anew.
const FORGOTTEN: Duration = Duration::from_secs(60);

/// A source that has not answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unanswered {
    at: tokio::time::Instant,
    /// It is asked again after this long.
    pause: Duration,
}

/// A suspect that is there.
struct Suspect {
    files: ImageFiles,
    found: v1::Image,
}

impl ImageManager {
    /// Removes the suspects of which a source answers, all of them together: a layer that two of them share goes with the
    /// last of them. Those that a running container uses stay.
    pub(super) async fn heal<S: ImageService>(
        &self,
        wish: Option<Wish<'_>>,
        service: &S,
        store: &Store,
        report: &Reporter<'_>,
    ) -> Result<(), CommitError> {
        let _turn = self.healing.lock().await;
        let seen = store.snapshot();
        let open: Vec<ImageFiles> = images::all_files(&seen)
            .map(|(files, _)| files)
            .filter(|files| {
                matches!(
                    files.state,
                    FilesState::Suspect { .. } | FilesState::Removed
                )
            })
            .filter(|files| !self.works.is_busy(&files.image))
            .collect();
        let mut suspects = Vec::new();
        for files in open {
            let image = files.image.as_str();
            match service.image_status(image).await {
                Ok(Some(found)) => {
                    let is_suspect = self.standing(&seen, image, Some(&found)) == Standing::Suspect;
                    // Nobody is asked about what cannot be removed.
                    if is_suspect && holders(image, &found.id, service).await.is_some() {
                        suspects.push(Suspect { files, found });
                    }
                }
                Ok(None) => {}
                Err(error) => tracing::warn!(image, %error, "cannot look at a suspect"),
            }
        }
        let mut asked = Vec::new();
        for suspect in &suspects {
            let image = suspect.files.image.as_str();
            let wish = wish.filter(|w| qualified(w.image) == qualified(image));
            asked.push(self.has_source(image, wish, service, store, report));
        }
        let answers = join_all(asked).await;
        for (suspect, answers) in suspects.iter().zip(answers) {
            if answers? && !self.remove_suspect(suspect, service, store).await? {
                // Not at once, each time a registry is asked.
                self.note_unanswered(&qualified(&suspect.files.image));
            }
        }
        Ok(())
    }

    /// Removes those of these images that are suspects, whatever their sources say, unless a running container uses them.
    /// The runtime has lost files of them, and what would bring them is at hand. Returns whether one is gone.
    pub(super) async fn remove_suspects<S: ImageService>(
        &self,
        images: &[String],
        service: &S,
        store: &Store,
    ) -> Result<bool, CommitError> {
        let _turn = self.healing.lock().await;
        let mut is_gone = false;
        for image in images {
            let seen = store.snapshot();
            let (Some((files, _)), Ok(Some(found))) =
                (files::of(&seen, image), service.image_status(image).await)
            else {
                continue;
            };
            if self.standing(&seen, image, Some(&found)) == Standing::Suspect {
                let suspect = Suspect { files, found };
                is_gone |= self.remove_suspect(&suspect, service, store).await?;
            }
        }
        Ok(is_gone)
    }

    /// Whether an archive holds the image, or its registry answers.
    async fn has_source<S: ImageService>(
        &self,
        image: &str,
        wish: Option<Wish<'_>>,
        service: &S,
        store: &Store,
        report: &Reporter<'_>,
    ) -> Result<bool, CommitError> {
        if self.has_archive(image, &store.snapshot()) {
            return Ok(true);
        }
        let key = match (wish, report.uid()) {
            // A pod has credentials that the node has not.
            (Some(_), Some(uid)) => format!("{uid}/{}", qualified(image)),
            _ => qualified(image),
        };
        if wish.is_some_and(|wish| !wish.may_pull) || !self.may_ask(&key) {
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
        let asked = self.ask_registry(want, service, store);
        let answered = if wish.is_some() {
            asked.await?
        } else {
            // Dropping it cancels the pull.
            match tokio::time::timeout(ANSWER, asked).await {
                Ok(answered) => answered?,
                Err(_) => false,
            }
        };
        if answered {
            self.unanswered().remove(&key);
        } else if self.note_unanswered(&key) {
            tracing::warn!(
                image,
                "no source of a suspect image answers, it is used as it is"
            );
        }
        Ok(answered)
    }

    /// Asks the registry by pulling what is there already. CRI has no other way, and such a pull loads nothing that the
    /// runtime believes it has.
    async fn ask_registry<S: ImageService>(
        &self,
        want: Wanted,
        service: &S,
        store: &Store,
    ) -> Result<bool, CommitError> {
        let image = want.image.clone();
        let credentials = want.credentials.clone();
        let now = self.clock.now();
        let under_way = self
            .records
            .begin(store, &image, now, |_, transaction| transaction)
            .await?;
        let pulled = self.pulls.pull(service, want).await;
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

    /// Removes a suspect with the containers that have ended and hold its layers. What cannot be removed now is tried
    /// again. Returns whether it is gone.
    async fn remove_suspect<S: ImageService>(
        &self,
        suspect: &Suspect,
        service: &S,
        store: &Store,
    ) -> Result<bool, CommitError> {
        let (image, id) = (suspect.files.image.as_str(), suspect.found.id.as_str());
        let Some(holders) = holders(image, id, service).await else {
            return Ok(false);
        };
        let now = self.clock.now();
        // All names of it go.
        let names = suspect.found.repo_tags.iter().map(String::as_str);
        let names: HashMap<String, &str> = names
            .chain([image])
            .map(|name| (qualified(name), name))
            .collect();
        files::commit(store, |seen| {
            names
                .values()
                .fold(Transaction::new(), |transaction, name| {
                    let old = files::of(seen, name).map(|(files, _)| files);
                    let next = ImageFiles {
                        image: (*name).to_owned(),
                        id: id.to_owned(),
                        state: FilesState::Removed,
                        suspected: old.as_ref().and_then(|old| old.suspected),
                    };
                    if old.as_ref() == Some(&next) {
                        return transaction;
                    }
                    files::put(seen, transaction, &next, now)
                })
        })
        .await?;
        fail::fail_point!("images::repair::before_remove");
        for (status, ids) in &holders {
            for container in ids {
                if !self
                    .remove_container(status, container, service, store)
                    .await?
                {
                    return Ok(false);
                }
            }
        }
        if holders.is_empty() && !self.remove_sandboxes_of(&names, service, store).await? {
            return Ok(false);
        }
        let removed = service.remove_image(id).await;
        fail::fail_point!("images::repair::after_remove");
        match &removed {
            Ok(()) => tracing::info!(image, id, "suspect image removed, it is brought again"),
            Err(error) => tracing::warn!(image, %error, "a suspect image cannot be removed yet"),
        }
        Ok(removed.is_ok())
    }

    /// Removes the sandboxes that have ended and were made of an image with one of these names: they hold its layers. Their
    /// containers have ended with them, and go first. Returns whether none is left, also none that runs.
    async fn remove_sandboxes_of<S: ImageService>(
        &self,
        names: &HashMap<String, &str>,
        service: &S,
        store: &Store,
    ) -> Result<bool, CommitError> {
        let pods = match service.sandboxes().await {
            Ok(pods) => pods,
            Err(error) => {
                tracing::warn!(%error, "a suspect image stays, which sandboxes hold it is not known");
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
                    if self
                        .remove_container(&status, &container, service, store)
                        .await?
                    {
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
                        tracing::info!(sandbox = %sandbox.id, pod = %status.uid, "a sandbox of a suspect image is removed");
                    }
                    Err(error) => {
                        tracing::warn!(sandbox = %sandbox.id, pod = %status.uid, %error, "a sandbox that holds a suspect image cannot be removed yet");
                        is_clear = false;
                    }
                }
            }
        }
        Ok(is_clear)
    }

    /// Removes a container that has ended, after its end is on record. Its log stays. Returns whether it is gone.
    async fn remove_container<S: ImageService>(
        &self,
        status: &PodStatus,
        id: &ContainerId,
        service: &S,
        store: &Store,
    ) -> Result<bool, CommitError> {
        let Some(intent) = RemoveContainer::new(status, id, self.clock.now()) else {
            return Ok(!status.containers.iter().any(|c| c.id == *id));
        };
        let mut tried = false;
        let receipt = loop {
            let commit = store.commit_intent(intent.clone(), Transaction::new());
            match commit.await {
                Err(CommitError::Stale { .. }) if !tried => tried = true,
                other => break other?,
            }
        };
        let removed = service.remove_container(&receipt).await;
        if let Err(error) = &removed {
            tracing::warn!(container = %id, pod = %status.uid, %error, "a container that holds a suspect image cannot be removed yet");
        }
        Ok(removed.is_ok())
    }

    fn unanswered(&self) -> MutexGuard<'_, HashMap<String, Unanswered>> {
        // Entries are put and removed whole.
        self.unanswered
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn may_ask(&self, key: &str) -> bool {
        let asked = self.unanswered().get(key).copied();
        asked.is_none_or(|asked| asked.at.elapsed() >= asked.pause)
    }

    /// Returns whether it is the first time in a row.
    pub(super) fn note_unanswered(&self, key: &str) -> bool {
        let at = tokio::time::Instant::now();
        let mut unanswered = self.unanswered();
        // Of pods that are gone.
        unanswered.retain(|_, asked| asked.at.elapsed() < FORGOTTEN);
        let last = unanswered.get(key).map(|asked| asked.pause);
        let pause = last.map_or(ASK_AGAIN.0, |last| (last * 2).min(ASK_AGAIN.1));
        unanswered.insert(key.to_owned(), Unanswered { at, pause });
        last.is_none()
    }
}

/// The containers of an image, by pod; `None` while one of them runs, or they are not known.
async fn holders<S: ImageService>(
    image: &str,
    id: &str,
    service: &S,
) -> Option<Vec<(PodStatus, Vec<ContainerId>)>> {
    let holders = match service.containers_of(id).await {
        Ok(holders) => holders,
        Err(error) => {
            tracing::warn!(image, %error, "a suspect image stays, its containers are not known");
            return None;
        }
    };
    let is_running = |(status, ids): &(PodStatus, Vec<ContainerId>)| {
        let mut of_image = status.containers.iter().filter(|c| ids.contains(&c.id));
        of_image.any(|c| c.state == ContainerState::Running)
    };
    if holders.iter().any(is_running) {
        tracing::debug!(image, "a suspect image stays, a running container uses it");
        return None;
    }
    Some(holders)
}
