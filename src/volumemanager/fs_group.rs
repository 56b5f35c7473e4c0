//! Gives mounted volumes to the fsGroup of their pod, and tells users when that takes long.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;

use super::error::{VolumeError, io_error};
use super::ownership::{self, Access, ChangePolicy, Counts};
use super::{VolumeManager, run_blocking};
use crate::kuberuntime::security;
use crate::types::events::{Event, EventType};
use crate::types::{PodExt, blocking};

/// Reason of the event about a volume that takes long.
pub const CHANGE_IN_PROGRESS: &str = "VolumePermissionChangeInProgress";
/// Reason of the event about files that the file system will not have given to the group.
pub const CHANGE_REFUSED: &str = "VolumePermissionChangeRefused";
/// Reason of the event about a group that a volume which another pod uses does not belong to.
const ALREADY_MOUNTED: &str = "AlreadyMountedVolume";
/// When it is told first, and how often from then on; as upstream.
const FIRST: Duration = Duration::from_secs(30);
const AGAIN: Duration = Duration::from_secs(60);

impl VolumeManager {
    /// Emits an event if a volume that another pod uses belongs to another group than this pod's fsGroup.
    pub(super) async fn warn_of_group(&self, pod: &Pod, volume: &str, path: &Path) {
        let Some(group) = security::fs_group(pod) else {
            return;
        };
        let path = path.to_owned();
        let owner = blocking::run(move || std::fs::metadata(&path).map(|meta| meta.gid())).await;
        let (Ok(Ok(owner)), Some(recorder)) = (owner, &self.recorder) else {
            return;
        };
        if owner != group {
            let text = format!(
                "The requested fsGroup is {group}, but the volume {volume} has GID {owner}. The volume may not be shareable."
            );
            recorder.record(Event::pod(EventType::Warning, pod, ALREADY_MOUNTED, text));
        }
    }

    /// Gives a volume to the pod's fsGroup, if it has one, as `fsGroupChangePolicy` says; upstream's
    /// `VolumeOwnership.ChangePermissions`. When dropped, what has begun goes on to its end. Files that the file system will
    /// not have changed stay as they are, and an event says so.
    ///
    /// # Errors
    /// When the file system fails; part of it may be done, and OnRootMismatch does the rest the next time.
    pub(super) async fn give_to_group(
        &self,
        pod: &Pod,
        volume: &str,
        plugin: &str,
        path: &Path,
        access: Access,
    ) -> Result<(), VolumeError> {
        let Some(group) = security::fs_group(pod) else {
            return Ok(());
        };
        let policy = ChangePolicy::of(pod);
        let counts = Arc::new(Counts::default());
        let (of, at, counting) = (pod.uid(), path.to_owned(), Arc::clone(&counts));
        let begun = Instant::now();
        let work = run_blocking(move || {
            ownership::give_counting(&at, group, access, policy, &counting).map_err(io_error(
                "give fsGroup volume",
                &of,
                &at,
            ))
        });
        let done = telling(work, || {
            let seen = counts.seen.load(Ordering::Relaxed);
            let text = format!(
                "Setting volume ownership for {} (volume \"{volume}\") is taking longer than expected, processed {seen} files, consider using fsGroupChangePolicy OnRootMismatch",
                path.display()
            );
            if let Some(recorder) = &self.recorder {
                recorder.record(Event::pod(EventType::Warning, pod, CHANGE_IN_PROGRESS, text));
            }
        })
        .await;
        self.observe("volume_apply_access_control", plugin, begun, done.is_ok());
        if let (Some((refused, why)), Some(recorder)) = (counts.refusals(), &self.recorder) {
            let text = format!(
                "fsGroup {group} of volume \"{volume}\": {refused} files and directories keep their group or mode, since the file system refuses to change them ({why}); give them to the group on the server, or let the server map root to root"
            );
            recorder.record(Event::pod(EventType::Warning, pod, CHANGE_REFUSED, text));
        }
        let changed = counts.changed.load(Ordering::Relaxed);
        if changed > 0 {
            tracing::info!(pod = %pod.uid(), volume, plugin, group, changed, "volume belongs to the pod's fsGroup");
        }
        done
    }
}

/// Runs work, and tells from time to time that it is not done.
async fn telling<T>(work: impl Future<Output = T>, tell: impl Fn()) -> T {
    let mut work = std::pin::pin!(work);
    let mut pause = FIRST;
    loop {
        match tokio::time::timeout(pause, &mut work).await {
            Ok(done) => return done,
            Err(_) => tell(),
        }
        pause = AGAIN;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_takes_long_is_told_after_30_seconds_and_each_minute() {
        for (seconds, want) in [(29, 0), (31, 1), (89, 1), (91, 2), (151, 3)] {
            let told = Cell::new(0);
            let work = tokio::time::sleep(Duration::from_secs(seconds));
            telling(work, || told.set(told.get() + 1)).await;
            assert_eq!(told.get(), want, "{seconds} s");
        }
    }
}
