//! Unmounting the volumes of a pod, by their records alone.

use std::path::PathBuf;
use std::time::Duration;

use futures::future::join_all;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::error::VolumeError;
use super::plan::{Own, tear_down};
use super::takeover::Trace;
use super::{HOST_PATH, OWN, POD_WAIT, VolumeManager, run_blocking};
use crate::core::state::{PodRecord, Transaction, VolumePhase, VolumeRecord, child_key};
use crate::core::volumes::records;
use crate::types::PodUid;
use crate::types::events::{Event, EventType};

/// Upstream's reason of an unmount that failed.
const FAILED: &str = "FailedUnMount";

impl VolumeManager {
    /// Unmounts and removes every volume on record of a pod, and what is not on record but surely one of its volumes;
    /// upstream's `WaitForUnmount`. Its containers must have ended. Once it succeeds there is no record left. What was staged for it goes as well when no
    /// other pod uses it, without anybody waiting. Waits for 2 min 3 s at most.
    /// When dropped, steps that have begun go on to their ends and are taken up by the next call.
    ///
    /// # Errors
    /// A volume that cannot be unmounted, with the time to try again if it has one; the others were tried.
    pub async fn unmount(&self, uid: &PodUid) -> Result<(), VolumeError> {
        self.unmount_within(uid, POD_WAIT).await
    }

    /// As [`VolumeManager::unmount`], with less patience.
    pub(super) async fn unmount_within(
        &self,
        uid: &PodUid,
        patience: Duration,
    ) -> Result<(), VolumeError> {
        let unknown = self.take_over_what_is_left(uid).await;
        let prefix = child_key(uid, "");
        let records: Vec<(String, VolumeRecord)> = self
            .store
            .snapshot()
            .with_prefix::<VolumeRecord>(&prefix)
            .map(|(key, record)| (key[prefix.len()..].to_owned(), record.clone()))
            .collect();
        self.waiting().remove(uid);
        self.requested().remove(uid);
        if self.may_show_files(uid)
            && let Err(error) = self.unmount_all_shown(uid, patience).await
        {
            self.tell_stuck(uid, uid.as_str(), &[&error]);
            return Err(error);
        }
        // They hold the volumes they are parts of.
        if let Err(error) = self.clean_sub_paths_within(uid, patience).await {
            self.tell_stuck(uid, uid.as_str(), &[&error]);
            return Err(error);
        }
        if records.is_empty() {
            if unknown.is_empty() {
                self.pace.over(uid.as_str());
            }
            return self.none_unknown(uid, &unknown);
        }
        let (own, remote): (Vec<_>, Vec<_>) = records
            .into_iter()
            .partition(|(_, r)| r.plugin == HOST_PATH || OWN.contains(&r.plugin.as_str()));
        let names: Vec<String> = (own.iter().chain(&remote))
            .map(|(name, _)| name.clone())
            .collect();
        let own = own.into_iter().map(|(name, record)| {
            let (manager, of, volume) = (self.clone(), uid.clone(), name.clone());
            let work = async move { manager.tear_down_own(&of, &volume, &record).await };
            async move { self.operate(uid, &name, "volume_unmount", work).await }
        });
        let leave = async {
            if remote.is_empty() {
                return Ok(());
            }
            self.leave(uid).await?;
            self.none_lost(uid, &remote)
        };
        let all = async {
            let (own, remote) = tokio::join!(join_all(own), leave);
            let failed = own.into_iter().filter_map(Result::err);
            failed.chain(remote.err()).collect()
        };
        let failed: Vec<VolumeError> = match tokio::time::timeout(patience, all).await {
            Ok(failed) => failed,
            Err(_) => vec![self.slow(uid, &names, patience)],
        };
        if !failed.is_empty() || unknown.is_empty() {
            self.tell_stuck(uid, uid.as_str(), &failed.iter().collect::<Vec<_>>());
        }
        // What is tried again at a time of its own says when to come back for all of it.
        match failed.into_iter().min_by_key(|e| e.retry_at().is_none()) {
            Some(error) => Err(error),
            None => self.none_unknown(uid, &unknown),
        }
    }

    /// Fails if an unidentified leftover exists: it cannot be undone, and must not count as undone.
    fn none_unknown(&self, uid: &PodUid, unknown: &[Trace]) -> Result<(), VolumeError> {
        let Some(trace) = unknown.first() else {
            return Ok(());
        };
        let error = VolumeError::InUse {
            pod: uid.clone(),
            path: trace.path.clone(),
            what: format!(
                "volume {}/{} is there but not on record; unmount it",
                trace.plugin, trace.name
            ),
        };
        self.tell_stuck(uid, uid.as_str(), &[&error]);
        Err(error)
    }

    /// Fails if a volume is recorded without a description: it cannot be undone.
    fn none_lost(
        &self,
        uid: &PodUid,
        remote: &[(String, VolumeRecord)],
    ) -> Result<(), VolumeError> {
        let seen = self.store.snapshot();
        let lost = (remote.iter())
            .find(|(name, _)| seen.record::<VolumeRecord>(&child_key(uid, name)).is_some());
        match lost {
            None => Ok(()),
            Some((name, record)) => Err(VolumeError::Lost {
                pod: uid.clone(),
                volume: name.clone(),
                plugin: record.plugin.clone(),
                path: record.path.clone(),
            }),
        }
    }

    fn slow(&self, uid: &PodUid, names: &[String], patience: Duration) -> VolumeError {
        let seen = self.store.snapshot();
        let what: Vec<String> = names
            .iter()
            .filter_map(|name| {
                let key = child_key(uid, name);
                seen.record::<VolumeRecord>(&key)?;
                Some(match self.operations.running(&key) {
                    Some((step, since)) => format!("{name} ({step} for {}s)", since.as_secs()),
                    None => name.clone(),
                })
            })
            .collect();
        VolumeError::Slow {
            pod: uid.clone(),
            volumes: what.join(", "),
            seconds: patience.as_secs(),
        }
    }

    /// Tells why something of a pod stays, each reason at its pace: `what` is what cannot go.
    pub(super) fn tell_stuck(&self, uid: &PodUid, what: &str, errors: &[&VolumeError]) {
        let texts: Vec<String> = errors.iter().map(|error| super::chain(error)).collect();
        let reasons: Vec<&str> = texts.iter().map(String::as_str).collect();
        let due = self.pace.due(what, &reasons, self.clock.now());
        let seen = self.store.snapshot();
        let pod = seen.record::<PodRecord>(uid.as_str());
        for (text, is_due) in texts.iter().zip(due) {
            match (&self.recorder, pod) {
                _ if !is_due => debug!(pod = %uid, error = text, "volumes of a pod still stay"),
                (Some(recorder), Some(pod)) => {
                    let event = Event::pod(EventType::Warning, &pod.pod, FAILED, text.clone());
                    recorder.record(event);
                }
                // Of a pod that nobody knows any more there is only the log.
                _ => warn!(pod = %uid, error = text, "volumes of a pod stay"),
            }
        }
    }

    pub(super) async fn tear_down_own(
        &self,
        uid: &PodUid,
        name: &str,
        record: &VolumeRecord,
    ) -> Result<(), VolumeError> {
        let path = PathBuf::from(&record.path);
        if record.phase != VolumePhase::Unmounting {
            self.record(uid, name, &record.plugin, &path, VolumePhase::Unmounting)
                .await?;
        }
        match record.plugin.as_str() {
            HOST_PATH => {}
            plugin
                if OWN.contains(&plugin) && path.starts_with(self.pod_dir(uid).join("volumes")) =>
            {
                let own = Own::of(&self.store.snapshot(), &child_key(uid, name), plugin);
                let uid = uid.clone();
                let begun = Instant::now();
                let done = run_blocking(move || tear_down(&path, &uid, own)).await;
                self.observe("volume_unmount", plugin, begun, done.is_ok());
                done?;
            }
            other => {
                return Err(VolumeError::Unsupported {
                    pod: uid.clone(),
                    volume: name.to_owned(),
                    what: format!("removing {} at {} (on record)", other, record.path),
                });
            }
        }
        let key = child_key(uid, name);
        self.written().remove(&key);
        let why = format!("{name} ({})", record.plugin);
        let gone = records::forget(Transaction::new(), &self.store.snapshot(), &key);
        let gone = gone.journal(Some(uid), "volume unmounted", why);
        self.commit(uid, name, gone).await
    }
}
