//! Keeps the parts that an unfinished pull has brought.
//!
//! containerd holds what a pull brings by a lease, and deletes that lease when the call ends, in whatever way: with the
//! agent that made the call, too. The next pull then starts from nothing. A call that names a lease of its own, in the
//! header `containerd-lease`, keeps what it has brought until that lease is deleted. So each image gets a lease when its
//! pull starts; it is deleted when the pull has succeeded.
//!
//! What a pull brought in an earlier boot is not taken as it is. Downloaded content stays: containerd syncs it before it
//! counts as complete, and compares digests of the rest when it becomes complete. What was unpacked may have been lost
//! with the power, so that is unpacked again. No pull begins before the leases of earlier boots are replaced and what they held is
//! collected: a pull that finds a layer unpacked does not look at its files.
//!
//! A runtime without leases, like CRI-O, answers that it does not know the service. Then pulls name no lease.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prost::Message;
use sha2::{Digest as _, Sha256};
use tokio::sync::OnceCell;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::MetadataValue;
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

use super::client::CriClient;
use crate::core::images::evidence;
use crate::types::Clock;

/// Prefix of the IDs of these leases.
pub const PULL_LEASES: &str = "holdfast-pull-";
/// The header of a call that names the lease to use.
const LEASE: &str = "containerd-lease";
/// The header that names containerd's namespace, and the one that CRI uses.
const NAMESPACE: (&str, &str) = ("containerd-namespace", "k8s.io");
/// The label with the time from which containerd deletes the lease by itself.
const EXPIRES: &str = "containerd.io/gc.expire";
/// Age at which containerd deletes the parts of an abandoned pull.
const KEPT: Duration = Duration::from_secs(7 * 24 * 3600);
/// Age at which a lease gets another end before a pull, so that it does not end under one.
const RENEWED: Duration = Duration::from_secs(24 * 3600);
/// End of the ID of a lease that keeps the parts while another one is made with a later end.
const SPARE: &str = "-spare";
/// Lease without parts that exists until what leases of earlier boots held is collected, also in the next run of the agent.
const UNCOLLECTED: &str = "holdfast-pull-uncollected";
/// Lease without parts that is made for its deletion: the answer comes after a collection of garbage.
const COLLECTION: &str = "holdfast-pull-collection";
/// Deadline of a call about leases. A deletion may collect garbage before it answers.
const PATIENCE: Duration = Duration::from_secs(30);
/// Deadline of the collection that pulls wait for. It takes as long as the disk needs to delete what was unpacked.
const COLLECTED: Duration = Duration::from_secs(300);
/// Failures in a row, not of the network, after which a pull starts from nothing.
const FAILURES: u32 = 2;

/// Words of the runtime that name the network or the registry's state as the cause. They say nothing about the parts. Each has a
/// space, or capitals, as no name of an image has: errors repeat the name. An end of file alone may be one of a damaged part.
const NETWORK: &[&str] = &[
    "dial tcp",
    "i/o timeout",
    "handshake timeout",
    "timeout awaiting",
    "Timeout exceeded",
    "timed out",
    "deadline exceeded",
    "context canceled",
    "request canceled",
    "connection re",
    "no such host",
    "server misbehaving",
    "network is unreachable",
    "no route to host",
    "broken pipe",
    "failed to do request",
    "failed to authorize",
    "failed to copy",
    "httpReadSeeker",
    "error reading from server",
    "429 Too Many Requests",
    "500 Internal",
    "502 Bad Gateway",
    "503 Service",
    "504 Gateway",
];

/// Words of the runtime by which a part is not what it should be, or has no room.
const DAMAGE: &[&str] = &[
    "unexpected commit digest",
    "unexpected commit size",
    "wrong diff id",
    "failed size validation",
    "failed to extract layer",
    "no space left on device",
];

/// Consequence of a failed pull for its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Parts {
    /// They are as good as before.
    Keep,
    /// They may be the cause, if it happens again.
    Doubt,
    /// They are damaged, or fill the disk.
    Drop,
}

/// Judges the parts of a pull by the runtime's words.
fn judge(error: &str) -> Parts {
    let says = |words: &[&str]| words.iter().any(|word| error.contains(word));
    if says(DAMAGE) || evidence(error).is_some() {
        return Parts::Drop;
    }
    if says(NETWORK) {
        return Parts::Keep;
    }
    Parts::Doubt
}

/// The part of a lease's ID that names this boot or an image.
fn short(text: &str, bytes: usize) -> String {
    let hash = Sha256::digest(text.as_bytes());
    hash.iter()
        .take(bytes)
        .map(|b| format!("{b:02x}"))
        .collect()
}

/// The lease of an earlier boot's pull and the one that takes its place; `None` for leases of this boot and of others.
fn successor(id: &str, boot: &str) -> Option<String> {
    let (of, image) = id.strip_prefix(PULL_LEASES)?.split_once('-')?;
    let image = image.strip_suffix(SPARE).unwrap_or(image);
    (of != boot).then(|| format!("{PULL_LEASES}{boot}-{image}"))
}

/// Returns whether a lease that ends at `expires` gets a later end before a pull. One without an end needs none.
fn is_old(expires: Option<&str>, now_ms: i64) -> bool {
    let at = expires.and_then(|at| at.parse::<jiff::Timestamp>().ok());
    let enough = i64::try_from((KEPT - RENEWED).as_millis()).unwrap_or(i64::MAX);
    at.is_some_and(|at| at.as_millisecond().saturating_sub(now_ms) < enough)
}

/// Returns whether a lease is that of a pull, and not one of those that say how far a take-over is.
fn is_of_pull(id: &str) -> bool {
    let rest = id.strip_prefix(PULL_LEASES);
    rest.is_some_and(|rest| rest.contains('-'))
}

/// Returns whether a resource may be used in another boot than the one that made it.
fn outlives_the_boot(resource: &Resource) -> bool {
    matches!(resource.r#type.as_str(), "content" | "ingests")
}

#[derive(Default)]
struct Known {
    /// Leases that a call uses now, and how many calls.
    used: HashMap<String, u32>,
    /// Leases that are being deleted, and how many deletions.
    ending: HashMap<String, u32>,
    /// Failures in a row by lease.
    failures: HashMap<String, u32>,
}

impl Known {
    /// Returns whether the parts of a pull that ended with this error are deleted.
    fn drops(&mut self, id: &str, error: Option<&str>) -> bool {
        match error.map(judge) {
            None | Some(Parts::Drop) => true,
            Some(Parts::Keep) => {
                // What the network did not let through says nothing, but the failures are not in a row.
                self.failures.remove(id);
                false
            }
            Some(Parts::Doubt) => {
                let failures = self.failures.entry(id.to_owned()).or_default();
                *failures += 1;
                *failures >= FAILURES
            }
        }
    }
}

fn known_of(known: &Mutex<Known>) -> MutexGuard<'_, Known> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Leases of pulls; shared by the clones of a client.
#[derive(Clone, Default)]
pub(super) struct PullLeases {
    /// This boot, as IDs have it; `None` = pulls name no lease.
    boot: Option<Arc<str>>,
    clock: Option<Arc<dyn Clock>>,
    /// True if the runtime has leases. Set after those of earlier boots were replaced.
    ready: Arc<OnceCell<bool>>,
    /// The last attempt to replace those of earlier boots, if it failed.
    failed: Arc<tokio::sync::Mutex<Option<(tokio::time::Instant, Status)>>>,
    known: Arc<Mutex<Known>>,
}

impl fmt::Debug for PullLeases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PullLeases")
            .field("boot", &self.boot)
            .finish_non_exhaustive()
    }
}

/// A lease that a pull uses.
pub(super) struct Held {
    id: String,
    known: Arc<Mutex<Known>>,
}

impl Held {
    /// Puts the lease's name into the headers of a call.
    pub(super) fn name_in<T>(&self, request: &mut Request<T>) {
        if let Ok(value) = MetadataValue::try_from(self.id.as_str()) {
            request.metadata_mut().insert(LEASE, value);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut known = known_of(&self.known);
        if let Some(count) = known.used.get_mut(&self.id) {
            *count -= 1;
            if *count == 0 {
                known.used.remove(&self.id);
            }
        }
    }
}

impl CriClient {
    /// Has pulls continue where earlier ones of the same image stopped, on runtimes that can do this (containerd).
    /// `boot_id` is the kernel's; without one nothing is kept.
    #[must_use]
    pub fn resuming_pulls(mut self, boot_id: &str, clock: Arc<dyn Clock>) -> Self {
        self.leases.boot = (!boot_id.is_empty()).then(|| short(boot_id, 4).into());
        self.leases.clock = Some(clock);
        self
    }

    /// Takes over what pulls of earlier boots have downloaded, and lets the runtime remove what they have unpacked. Runs
    /// once; call it before the first pull or import. If it fails, the next pull tries again. May be dropped at any time.
    pub async fn take_over_pulls(&self) {
        if let Err(error) = self.has_leases().await {
            tracing::warn!(%error, "pulls of an earlier boot are not taken over yet; pulls and imports wait for it");
        }
    }

    /// Returns whether pulls have leases, once those of earlier boots are replaced.
    pub(super) async fn has_leases(&self) -> Result<bool, Status> {
        let Some(boot) = self.leases.boot.clone() else {
            return Ok(false);
        };
        let since = tokio::time::Instant::now();
        let replace = || async {
            // One attempt serves all that have waited for it, also if it fails.
            let mut failed = self.leases.failed.lock().await;
            if let Some((_, status)) = failed.as_ref().filter(|(at, _)| *at > since) {
                return Err(status.clone());
            }
            let replaced = self.replace_leases(&boot).await;
            if let Err(status) = &replaced {
                *failed = Some((tokio::time::Instant::now(), status.clone()));
            }
            replaced
        };
        self.leases.ready.get_or_try_init(replace).await.copied()
    }

    /// Replaces the leases of earlier boots, and collects what they held. Returns whether the runtime has leases at all.
    async fn replace_leases(&self, boot: &str) -> Result<bool, Status> {
        let leases = match self.list_leases().await {
            Ok(leases) => leases,
            Err(status) if status.code() == Code::Unimplemented => return Ok(false),
            Err(status) => return Err(status),
        };
        // An agent has died, or lost the answer, before the garbage was collected.
        let is_uncollected = leases.iter().any(|lease| lease.id == UNCOLLECTED);
        let of_earlier = leases.into_iter().filter_map(|lease| {
            let new = successor(&lease.id, boot)?;
            Some((lease.id, new))
        });
        let of_earlier: Vec<(String, String)> = of_earlier.collect();
        if of_earlier.is_empty() && !is_uncollected {
            return Ok(true);
        }
        self.create_lease(UNCOLLECTED).await?;
        for (old, new) in &of_earlier {
            if let Err(error) = self.copy_lease(old, new, outlives_the_boot).await {
                tracing::warn!(lease = old, %error, "cannot take over the lease of an interrupted pull, it starts from the beginning");
            }
        }
        for (old, _) in &of_earlier {
            self.delete_lease(old, false).await?;
        }
        // Until garbage was collected a pull might use what an earlier boot had unpacked.
        self.create_lease(COLLECTION).await?;
        self.delete_lease_within(COLLECTION, true, COLLECTED)
            .await?;
        self.delete_lease(UNCOLLECTED, false).await?;
        Ok(true)
    }

    /// Gives the parts of a lease that `takes` to another one, which is made if need be.
    async fn copy_lease(
        &self,
        old: &str,
        new: &str,
        takes: impl Fn(&Resource) -> bool,
    ) -> Result<(), Status> {
        let request = ListResourcesRequest { id: old.to_owned() };
        let found: ListResourcesResponse = self.lease_call("ListResources", request).await?;
        self.create_lease(new).await?;
        for resource in found.resources.into_iter().filter(takes) {
            let request = AddResourceRequest {
                id: new.to_owned(),
                resource: Some(resource),
            };
            let _: Empty = self.lease_call("AddResource", request).await?;
        }
        Ok(())
    }

    /// The lease for a pull of an image; `None` when the pull has to do without.
    ///
    /// # Errors
    /// When the leases of earlier boots are not replaced: a pull would take what they have unpacked for whole.
    pub(super) async fn lease_of(&self, image: &str) -> Result<Option<Held>, Status> {
        if !self.has_leases().await? {
            return Ok(None);
        }
        let Some(boot) = self.leases.boot.as_deref() else {
            return Ok(None);
        };
        let id = format!("{PULL_LEASES}{boot}-{}", short(image, 16));
        let held = {
            let mut known = known_of(&self.leases.known);
            if known.ending.contains_key(&id) {
                return Ok(None);
            }
            *known.used.entry(id.clone()).or_default() += 1;
            Held {
                id,
                known: Arc::clone(&self.leases.known),
            }
        };
        match self.create_lease(&held.id).await {
            Ok(true) => {}
            Ok(false) => {
                if let Err(error) = self.renew_lease(&held.id).await {
                    tracing::debug!(image, %error, "the lease of a pull may end under it");
                    // It may have been deleted and not made again.
                    if let Err(error) = self.create_lease(&held.id).await {
                        tracing::debug!(image, %error, "a pull starts without a lease");
                        return Ok(None);
                    }
                }
            }
            Err(error) => {
                tracing::debug!(image, %error, "a pull starts without a lease");
                return Ok(None);
            }
        }
        Ok(Some(held))
    }

    /// Gives an old lease a later end. containerd changes no lease, so its parts go to another one while it is made anew. The
    /// caller uses it; one that another call uses as well stays as it is.
    async fn renew_lease(&self, id: &str) -> Result<(), Status> {
        let Some(now) = self.leases.clock.as_ref().map(|clock| clock.now()) else {
            return Ok(());
        };
        let leases = self.list_leases().await?;
        let lease = leases.iter().find(|lease| lease.id == id);
        let expires = lease.and_then(|lease| lease.labels.get(EXPIRES));
        if !is_old(expires.map(String::as_str), now.wall_ms) {
            return Ok(());
        }
        let name = id.to_owned();
        {
            let mut known = known_of(&self.leases.known);
            if known.used.get(id) != Some(&1) {
                return Ok(());
            }
            *known.ending.entry(name.clone()).or_default() += 1;
        }
        // Until it is there again no other pull uses it.
        let _ending = Ending {
            ids: &[&name],
            known: &self.leases.known,
            keeps_failures: true,
        };
        let spare = format!("{id}{SPARE}");
        self.copy_lease(id, &spare, |_| true).await?;
        self.delete_lease(id, false).await?;
        self.copy_lease(&spare, id, |_| true).await?;
        self.delete_lease(&spare, false).await
    }

    /// Deletes the lease of a pull that has succeeded, or whose parts may be damaged. `error` is the pull's.
    pub(super) async fn end_lease(&self, held: Held, error: Option<&str>) {
        let ends = known_of(&self.leases.known).drops(&held.id, error);
        if !ends {
            return;
        }
        let id = held.id.clone();
        drop(held);
        self.delete_idle(&[id], error.is_some()).await;
    }

    /// Deletes the leases of pulls that are not under way: the parts make room, and damaged ones are not used again.
    pub async fn release_pulls(&self) {
        // Images are removed to make room: that must not wait for long.
        match tokio::time::timeout(PATIENCE, self.has_leases()).await {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) => return,
            Ok(Err(_)) | Err(_) => {
                return tracing::debug!(
                    "the parts of pulls stay until those of an earlier boot are taken over"
                );
            }
        }
        match self.list_leases().await {
            Ok(leases) => {
                let ids = leases.into_iter().map(|lease| lease.id);
                let ids: Vec<String> = ids.filter(|id| is_of_pull(id)).collect();
                self.delete_idle(&ids, true).await;
            }
            Err(error) => tracing::debug!(%error, "cannot list leases of pulls"),
        }
    }

    /// Deletes those leases that no call uses.
    async fn delete_idle(&self, ids: &[String], sync: bool) {
        let idle: Vec<&String> = {
            let mut known = known_of(&self.leases.known);
            let user = |id: &str| id.strip_suffix(SPARE).unwrap_or(id).to_owned();
            let idle = ids.iter().filter(|id| !known.used.contains_key(&user(id)));
            let idle: Vec<&String> = idle.collect();
            for id in &idle {
                *known.ending.entry((*id).clone()).or_default() += 1;
            }
            idle
        };
        let ending = Ending {
            ids: &idle,
            known: &self.leases.known,
            keeps_failures: false,
        };
        for (at, id) in idle.iter().enumerate() {
            // One collection of garbage serves all.
            let is_last = at + 1 == idle.len();
            if let Err(error) = self.delete_lease(id, sync && is_last).await {
                tracing::debug!(lease = id, %error, "cannot delete the lease of a pull, its data stays until the lease expires");
            }
        }
        drop(ending);
    }

    async fn list_leases(&self) -> Result<Vec<Lease>, Status> {
        let answer: ListResponse = self.lease_call("List", ListRequest {}).await?;
        let mut leases = answer.leases;
        leases.retain(|lease| lease.id.starts_with(PULL_LEASES));
        Ok(leases)
    }

    /// Creates a lease. Returns false if it exists.
    async fn create_lease(&self, id: &str) -> Result<bool, Status> {
        let now = self.leases.clock.as_ref().map(|clock| clock.now());
        let until = now.and_then(|now| {
            let kept = i64::try_from(KEPT.as_millis()).ok()?;
            jiff::Timestamp::from_millisecond(now.wall_ms.checked_add(kept)?).ok()
        });
        let labels = until.map(|until| (EXPIRES.to_owned(), until.to_string()));
        let request = CreateRequest {
            id: id.to_owned(),
            labels: labels.into_iter().collect(),
        };
        match self.lease_call::<_, Empty>("Create", request).await {
            Err(status) if status.code() == Code::AlreadyExists => Ok(false),
            answer => answer.map(|_| true),
        }
    }

    /// Deletes a lease. One that is gone counts as deleted.
    async fn delete_lease(&self, id: &str, sync: bool) -> Result<(), Status> {
        self.delete_lease_within(id, sync, PATIENCE).await
    }

    async fn delete_lease_within(
        &self,
        id: &str,
        sync: bool,
        deadline: Duration,
    ) -> Result<(), Status> {
        let request = DeleteRequest {
            id: id.to_owned(),
            sync,
        };
        let deleted = self.lease_call_within::<_, Empty>("Delete", request, deadline);
        match deleted.await {
            Err(status) if status.code() == Code::NotFound => Ok(()),
            answer => answer.map(drop),
        }
    }

    /// Calls containerd's service of leases, on the socket of the image service. Not in the metrics of the CRI.
    async fn lease_call<Q, A>(&self, method: &'static str, request: Q) -> Result<A, Status>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        self.lease_call_within(method, request, PATIENCE).await
    }

    async fn lease_call_within<Q, A>(
        &self,
        method: &'static str,
        request: Q,
        deadline: Duration,
    ) -> Result<A, Status>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let path = format!("/containerd.services.leases.v1.Leases/{method}");
        let path = PathAndQuery::try_from(path).map_err(|e| Status::internal(e.to_string()))?;
        let mut request = Request::new(request);
        let (header, namespace) = NAMESPACE;
        let namespace = MetadataValue::from_static(namespace);
        request.metadata_mut().insert(header, namespace);
        let mut service = self.raw_images.clone();
        let call = async {
            let unready = |error| Status::unavailable(format!("service was not ready: {error}"));
            service.ready().await.map_err(unready)?;
            let codec = ProstCodec::default();
            service.unary(request, path, codec).await
        };
        match tokio::time::timeout(deadline, Box::pin(call)).await {
            Ok(answer) => answer.map(tonic::Response::into_inner),
            Err(_) => Err(Status::deadline_exceeded(format!(
                "{method} of a lease had no answer within {} s",
                deadline.as_secs()
            ))),
        }
    }
}

/// Leases that are being deleted, until this is dropped.
struct Ending<'a> {
    ids: &'a [&'a String],
    known: &'a Mutex<Known>,
    /// The lease is made anew with its parts.
    keeps_failures: bool,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        let mut known = known_of(self.known);
        for id in self.ids {
            if let Some(count) = known.ending.get_mut(*id) {
                *count -= 1;
                if *count == 0 {
                    known.ending.remove(*id);
                }
            }
            if !self.keeps_failures {
                known.failures.remove(*id);
            }
        }
    }
}

/// `google.protobuf.Empty`, or an answer of which nothing is read.
#[derive(Clone, PartialEq, Message)]
struct Empty {}

/// `containerd.services.leases.v1.CreateRequest`.
#[derive(Clone, PartialEq, Message)]
struct CreateRequest {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(map = "string, string", tag = "3")]
    labels: HashMap<String, String>,
}

/// `containerd.services.leases.v1.DeleteRequest`.
#[derive(Clone, PartialEq, Message)]
struct DeleteRequest {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(bool, tag = "2")]
    sync: bool,
}

/// `containerd.services.leases.v1.ListRequest`, without filters.
#[derive(Clone, PartialEq, Message)]
struct ListRequest {}

/// `containerd.services.leases.v1.ListResponse`.
#[derive(Clone, PartialEq, Message)]
struct ListResponse {
    #[prost(message, repeated, tag = "1")]
    leases: Vec<Lease>,
}

/// `containerd.services.leases.v1.Lease`.
#[derive(Clone, PartialEq, Message)]
struct Lease {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(map = "string, string", tag = "3")]
    labels: HashMap<String, String>,
}

/// `containerd.services.leases.v1.Resource`.
#[derive(Clone, PartialEq, Message)]
struct Resource {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(string, tag = "2")]
    r#type: String,
}

/// `containerd.services.leases.v1.AddResourceRequest`.
#[derive(Clone, PartialEq, Message)]
struct AddResourceRequest {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(message, optional, tag = "2")]
    resource: Option<Resource>,
}

/// `containerd.services.leases.v1.ListResourcesRequest`.
#[derive(Clone, PartialEq, Message)]
struct ListResourcesRequest {
    #[prost(string, tag = "1")]
    id: String,
}

/// `containerd.services.leases.v1.ListResourcesResponse`.
#[derive(Clone, PartialEq, Message)]
struct ListResourcesResponse {
    #[prost(message, repeated, tag = "1")]
    resources: Vec<Resource>,
}

#[cfg(test)]
mod tests;
