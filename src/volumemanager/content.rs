//! Volumes whose files the agent writes and keeps up to date: configMap, secret, downwardAPI, projected.
//!
//! Secrets, tokens and what else must not reach a disk lie on a tmpfs, configMaps on disk. What was written
//! last is remembered as a digest, so that a sync that finds nothing new does no I/O; after a restart the
//! files themselves are compared once.

use std::io;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{Pod, Volume};
use tokio::time::Instant;

use super::error::{VolumeError, io_error};
use super::mount::At;
use super::ownership::{self, Access};
use super::payload::{self, Payload};
use super::plan::{Plan, set_up};
use super::{VolumeManager, atomic_writer, run_blocking};
use crate::core::state::{VolumePhase, VolumeRecord, child_key};
use crate::kuberuntime::security;
use crate::kuberuntime::sources::{Sources, is_content_volume, mounted_volumes};
use crate::types::events::{Event, EventRecorder, EventType};
use crate::types::{PodExt, PodUid};

/// Reason of the event about a token that has expired.
pub const TOKEN_EXPIRED: &str = "ServiceAccountTokenExpired";

/// Content that was written last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Written {
    digest: [u8; 32],
    /// The event about an expired token was given.
    told_stale: bool,
}

impl VolumeManager {
    /// Returns whether a pod has volumes whose content may have to change while it runs.
    pub fn wants_refresh(pod: &Pod) -> bool {
        let used = mounted_volumes(pod);
        let mut volumes = pod.spec_ref().volumes.iter().flatten();
        volumes.any(|v| is_content_volume(v) && used.contains(v.name.as_str()))
    }

    /// Writes what has changed in the volumes of a running pod, and touches nothing else. Without a change
    /// there is no I/O. A failure is told by an event as well.
    /// When dropped, a write that has begun goes on to its end.
    ///
    /// # Errors
    /// The first volume that could not be brought up to date; it keeps its former content, and the others
    /// were tried.
    pub async fn refresh(
        &self,
        pod: &Pod,
        sources: &Sources,
        recorder: &dyn EventRecorder,
    ) -> Result<(), VolumeError> {
        let uid = pod.uid();
        let used = mounted_volumes(pod);
        let mut result = Ok(());
        for volume in pod.spec_ref().volumes.iter().flatten() {
            if !is_content_volume(volume) || !used.contains(volume.name.as_str()) {
                continue;
            }
            let on_record = self
                .store
                .snapshot()
                .record::<VolumeRecord>(&child_key(&uid, &volume.name))
                .is_some_and(|r| r.phase == VolumePhase::Mounted);
            if !on_record {
                continue;
            }
            let one = self.refresh_one(pod, volume, sources, recorder).await;
            if let Err(error) = &one {
                error.tell(pod, &volume.name, recorder);
            }
            result = result.and(one);
        }
        result.and(self.republish(pod, sources, recorder).await)
    }

    async fn refresh_one(
        &self,
        pod: &Pod,
        volume: &Volume,
        sources: &Sources,
        recorder: &dyn EventRecorder,
    ) -> Result<(), VolumeError> {
        let payload = collect(pod, volume, sources)?;
        self.tell_stale(pod, volume, payload.stale_token, recorder);
        if self.known_digest(&pod.uid(), &volume.name) == Some(payload.digest()) {
            return Ok(());
        }
        let (manager, pod, volume) = (self.clone(), pod.clone(), volume.clone());
        let (uid, name) = (pod.uid(), volume.name.clone());
        self.operate(&uid, &name, "volume_mount", async move {
            manager.mount_content(&pod, &volume, payload).await
        })
        .await
        .map(drop)
    }

    /// Mounts a volume and makes it hold what it should. One that is mounted keeps its former content when that
    /// cannot be: containers of the pod have it and may start again with it, and users are told.
    pub(super) async fn mount_files(
        &self,
        at: At<'_>,
        volume: &Volume,
        sources: &Sources,
        recorder: &dyn EventRecorder,
    ) -> Result<PathBuf, VolumeError> {
        let pod = at.pod;
        let newest = async {
            let payload = collect(pod, volume, sources)?;
            let stale = payload.stale_token;
            if let Some(path) = self.settled(at, volume, &payload).await? {
                self.tell_stale(pod, volume, stale, recorder);
                return Ok(path);
            }
            let (manager, shared, of) = (self.clone(), at.shared(), volume.clone());
            let path = self
                .operate(&pod.uid(), &volume.name, "volume_mount", async move {
                    manager.mount_content(&shared, &of, payload).await
                })
                .await?;
            self.tell_stale(pod, volume, stale, recorder);
            Ok(path)
        };
        match newest.await {
            Err(error @ VolumeError::Commit { .. }) => Err(error),
            Err(error) => match self.former(pod, volume).await {
                Some(path) => {
                    error.tell(pod, &volume.name, recorder);
                    Ok(path)
                }
                None => Err(error),
            },
            mounted => mounted,
        }
    }

    /// The path of a volume that holds a payload already, and on which nothing is done. All volumes of a pod are looked for
    /// in one mount table.
    async fn settled(
        &self,
        at: At<'_>,
        volume: &Volume,
        payload: &Payload,
    ) -> Result<Option<PathBuf>, VolumeError> {
        let (uid, name) = (at.pod.uid(), &volume.name);
        let key = child_key(&uid, name);
        if self.known_digest(&uid, name) != Some(payload.digest()) || self.operations.is_busy(&key)
        {
            return Ok(None);
        }
        let plan = self.plan(at.pod, volume)?;
        let path = plan.path();
        let seen = self.store.snapshot();
        let known = seen.record::<VolumeRecord>(&key);
        let on_record = known.is_some_and(|known| {
            known.phase == VolumePhase::Mounted
                && known.plugin == plan.plugin()
                && Path::new(&known.path) == path
        });
        if !on_record {
            return Ok(None);
        }
        let mounted = at.table.get().await;
        let mounted = mounted.map_err(io_error("look at volume", &uid, &path))?;
        Ok(plan.is_set_up(mounted).then_some(path))
    }

    /// The path of a volume that holds what it was given since the machine was started.
    async fn former(&self, pod: &Pod, volume: &Volume) -> Option<PathBuf> {
        let key = child_key(&pod.uid(), &volume.name);
        let plan = self.plan(pod, volume).ok()?;
        let path = plan.path();
        let known = self
            .store
            .snapshot()
            .record::<VolumeRecord>(&key)
            .cloned()?;
        let is_ours = known.phase == VolumePhase::Mounted
            && known.plugin == plan.plugin()
            && Path::new(&known.path) == path;
        let written_now = self
            .known_digest(&pod.uid(), &volume.name)
            .is_some_and(|d| d != [0; 32]);
        if !is_ours || (!written_now && known.at.boot != self.clock.now().boot) {
            return None;
        }
        let (at, mounts) = (path.clone(), self.mounts.clone());
        let whole = run_blocking(move || {
            let set_up = mounts.read().map(|mounted| plan.is_set_up(&mounted));
            Ok(set_up.unwrap_or(false) && atomic_writer::is_written(&at))
        });
        whole.await.unwrap_or(false).then_some(path)
    }

    /// Mounts a volume, if it is not, and makes it hold the payload.
    pub(super) async fn mount_content(
        &self,
        pod: &Pod,
        volume: &Volume,
        payload: Payload,
    ) -> Result<PathBuf, VolumeError> {
        let (uid, name) = (pod.uid(), volume.name.clone());
        let plan = self.plan(pod, volume)?;
        let (path, plugin) = (plan.path(), plan.plugin());
        let is_mounted = self.is_mounted(&uid, &name, &plan).await?;
        let digest = payload.digest();
        if is_mounted && self.known_digest(&uid, &name) == Some(digest) {
            return Ok(path);
        }
        if !is_mounted {
            self.forget_content(&uid, &name);
            self.record(&uid, &name, plugin, &path, VolumePhase::Mounting)
                .await?;
        }
        let now = self.clock.now().wall_ms;
        let group = security::fs_group(pod);
        let (of, in_volume, at) = (uid.clone(), name.clone(), path.clone());
        let begun = Instant::now();
        let done = run_blocking(move || {
            if !is_mounted {
                set_up(&plan, &of, &in_volume)?;
            }
            if let Some(group) = group {
                ownership::give_one(&at, group, Access::ReadOnly).map_err(io_error(
                    "give fsGroup volume",
                    &of,
                    &at,
                ))?;
            }
            atomic_writer::write(&at, &payload.files, group, now)
                .map_err(|error| explain_full(error, &at, &payload))
                .map_err(io_error("write volume", &of, &at))
        })
        .await;
        if !is_mounted {
            self.observe("volume_mount", plugin, begun, done.is_ok());
        }
        let written = done?;
        if written {
            self.metrics.volume_content_writes.inc();
        }
        if !is_mounted {
            self.record(&uid, &name, plugin, &path, VolumePhase::Mounted)
                .await?;
        }
        tracing::info!(pod = %uid, volume = %name, plugin, mounted = !is_mounted, written, "volume is up to date");
        let key = child_key(&uid, &name);
        let mut all = self.written();
        let told_stale = all.get(&key).is_some_and(|w| w.told_stale);
        all.insert(key, Written { digest, told_stale });
        Ok(path)
    }

    async fn is_mounted(&self, uid: &PodUid, name: &str, plan: &Plan) -> Result<bool, VolumeError> {
        let key = child_key(uid, name);
        let known = self.store.snapshot().record::<VolumeRecord>(&key).cloned();
        let Some(known) = known else { return Ok(false) };
        let path = plan.path();
        if known.plugin != plan.plugin() || Path::new(&known.path) != path {
            self.tear_down_own(uid, name, &known).await?;
            return Ok(false);
        }
        Ok(known.phase == VolumePhase::Mounted
            && self
                .mounts
                .current()
                .await
                .map(|mounted| plan.is_set_up(&mounted))
                .map_err(io_error("look at volume", uid, &path))?)
    }

    /// Tells once that a token has expired; again when a newer one has expired as well.
    pub(super) fn tell_stale(
        &self,
        pod: &Pod,
        volume: &Volume,
        stale: bool,
        recorder: &dyn EventRecorder,
    ) {
        let key = child_key(&pod.uid(), &volume.name);
        {
            let mut all = self.written();
            let entry = all.entry(key).or_insert(Written {
                digest: [0; 32],
                told_stale: false,
            });
            let tell = stale && !entry.told_stale;
            entry.told_stale = stale;
            if !tell {
                return;
            }
        }
        let text = format!(
            "The service account token in volume \"{}\" has expired and the API server does not answer; it is replaced as soon as a new one can be had",
            volume.name
        );
        recorder.record(Event::pod(EventType::Warning, pod, TOKEN_EXPIRED, text));
    }

    fn known_digest(&self, uid: &PodUid, name: &str) -> Option<[u8; 32]> {
        let all = self.written();
        all.get(&child_key(uid, name)).map(|w| w.digest)
    }

    pub(super) fn forget_content(&self, uid: &PodUid, name: &str) {
        if let Some(written) = self.written().get_mut(&child_key(uid, name)) {
            written.digest = [0; 32];
        }
    }
}

/// Says what there is no space for.
fn explain_full(error: io::Error, at: &Path, payload: &Payload) -> io::Error {
    if error.kind() != io::ErrorKind::StorageFull {
        return error;
    }
    let bytes: usize = payload.files.values().map(|file| file.data.len()).sum();
    let size = nix::sys::statvfs::statvfs(at)
        .map(|fs| fs.blocks().saturating_mul(fs.fragment_size()))
        .unwrap_or_default();
    io::Error::new(
        error.kind(),
        format!(
            "{error}: the content takes {bytes} bytes, and its former version stays until it is written; the file \
             system has {size} bytes in all; make it smaller, or raise the pod's memory limit if that is what it is \
             limited by"
        ),
    )
}

/// The content of a volume, or an error that names it.
pub(super) fn collect(
    pod: &Pod,
    volume: &Volume,
    sources: &Sources,
) -> Result<Payload, VolumeError> {
    payload::collect(pod, volume, sources).map_err(|source| VolumeError::Content {
        pod: pod.uid(),
        volume: volume.name.clone(),
        source: Box::new(source),
    })
}
