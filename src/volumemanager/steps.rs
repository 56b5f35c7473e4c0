//! One step of a volume whose storage is elsewhere: the record, the plugin, the record.
//!
//! **Invariant:** no plugin is called before the record of the step is on disk, and no record goes before the mount
//! table shows that nothing is left.

use std::collections::BTreeSet;
use std::io;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::time::Instant;
use tracing::{info, warn};

use super::operations::Taken;
use super::ownership::Access;
use super::plan::make_dir;
use super::remote::{GroupBy, RemoteError, RemotePlugin, Target};
use super::remotes::{Desk, Order};
use super::{VolumeManager, alone, chain, safety};
use crate::core::state::{Transaction, VolumePhase, VolumeRecord};
use crate::core::volumes::keys::{self, Mark};
use crate::core::volumes::planner::{Facts, Recorded, Step, undo_key};
use crate::core::volumes::{Remote, Source, VolumeMode, records};
use crate::types::{PodUid, blocking};

/// A step that takes longer than this is told of.
const SLOW: Duration = Duration::from_secs(120);

/// A step with all it takes.
enum Task {
    Claim(String, Order),
    /// Of a device, for a volume.
    Stage(String, Order, Option<Recorded>, String),
    Publish(String, Order, Recorded),
    Share(String, Order),
    Unpublish(String, Recorded, Arc<Remote>),
    Drop(String, Recorded, Arc<Remote>),
    Unstage(String, Recorded, Arc<Remote>),
}

impl Task {
    fn key(&self) -> &str {
        match self {
            Self::Claim(key, ..)
            | Self::Stage(key, ..)
            | Self::Publish(key, ..)
            | Self::Share(key, ..)
            | Self::Unpublish(key, ..)
            | Self::Drop(key, ..)
            | Self::Unstage(key, ..) => key,
        }
    }

    /// Returns the key under which a failure delays the step.
    fn held_by(&self) -> String {
        match self {
            Self::Unpublish(key, ..) | Self::Unstage(key, ..) => undo_key(key),
            other => other.key().to_owned(),
        }
    }

    /// Name for logs, and in metrics if it calls a plugin.
    fn name(&self) -> &'static str {
        match self {
            Self::Claim(..) => "claim",
            Self::Stage(..) => "mount_device",
            Self::Publish(_, order, _) => match order.resolved.remote.mode {
                VolumeMode::Filesystem => "volume_mount",
                VolumeMode::Block => "map_volume",
            },
            Self::Share(..) => "share",
            Self::Unpublish(_, _, remote) => match remote.mode {
                VolumeMode::Filesystem => "volume_unmount",
                VolumeMode::Block => "unmap_volume",
            },
            Self::Drop(..) => "drop",
            Self::Unstage(..) => "unmount_device",
        }
    }

    fn remote(&self) -> Option<&Remote> {
        match self {
            Self::Claim(_, order)
            | Self::Stage(_, order, ..)
            | Self::Publish(_, order, _)
            | Self::Share(_, order) => Some(&order.resolved.remote),
            Self::Unpublish(_, _, remote)
            | Self::Unstage(_, _, remote)
            | Self::Drop(_, _, remote) => Some(remote),
        }
    }

    fn calls_plugin(&self) -> bool {
        matches!(
            self,
            Self::Stage(..) | Self::Publish(..) | Self::Unpublish(..) | Self::Unstage(..)
        )
    }
}

impl VolumeManager {
    /// Takes the keys of a step of a plan, and gives the step; its end drives on.
    pub(super) fn begin(
        &self,
        desk: &Desk,
        step: Step,
        facts: &Facts,
    ) -> Option<BoxFuture<'static, ()>> {
        let task = self.task(desk, step, facts)?;
        let key = task.key().to_owned();
        let mut on: BTreeSet<&str> = BTreeSet::from([key.as_str()]);
        let recorded = match &task {
            Task::Publish(_, _, recorded) | Task::Unpublish(_, recorded, _) => Some(recorded),
            _ => None,
        };
        if let Some(recorded) = recorded {
            on.insert(&recorded.path);
            on.extend(recorded.device.as_deref());
        }
        if let Task::Share(_, order) = &task {
            on.extend(order.path.to_str());
        }
        // What one pod may use alone is given to one at a time.
        let alone = (task.remote())
            .filter(|_| task.calls_plugin())
            .and_then(alone::key);
        on.extend(alone.as_deref());
        let on: Vec<&str> = on.into_iter().collect();
        // None: taken by what no plan knows of, whose end drives on.
        let taken = self.operations.take(&on, task.name())?;
        let manager = self.clone();
        let taken = taken.then(move || manager.drive());
        Some(self.clone().carry_out(task, taken))
    }

    fn task(&self, desk: &Desk, step: Step, facts: &Facts) -> Option<Task> {
        let seen = self.store.snapshot();
        let remote = |key: &str| records::remote(&seen, key);
        Some(match step {
            Step::Drop { volume } => {
                let (recorded, remote) = (facts.volumes.get(&volume)?.clone(), remote(&volume)?);
                Task::Drop(volume, recorded, remote)
            }
            Step::Unpublish { volume } => {
                let (recorded, remote) = (facts.volumes.get(&volume)?.clone(), remote(&volume)?);
                Task::Unpublish(volume, recorded, remote)
            }
            Step::Unstage { device } => {
                let (recorded, remote) = (facts.devices.get(&device)?.clone(), remote(&device)?);
                Task::Unstage(device, recorded, remote)
            }
            Step::Claim { volume } => {
                let order = desk.order(&volume)?;
                Task::Claim(volume, order)
            }
            Step::Share { volume } => {
                let order = desk.order(&volume)?;
                Task::Share(volume, order)
            }
            Step::Stage { device, volume } => {
                let recorded = facts.devices.get(&device).cloned();
                Task::Stage(device, desk.order(&volume)?, recorded, volume)
            }
            Step::Publish { volume } => {
                let recorded = facts.volumes.get(&volume)?.clone();
                let order = desk.order(&volume)?;
                Task::Publish(volume, order, recorded)
            }
        })
    }

    /// Does a step; its keys are free when it has ended.
    fn carry_out(self, task: Task, taken: Taken) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let (key, name, held_by) = (task.key().to_owned(), task.name(), task.held_by());
            let given_back = match &task {
                Task::Unpublish(_, _, remote) if remote.terms.alone => Some(Arc::clone(remote)),
                _ => None,
            };
            let measured = (task.calls_plugin())
                .then(|| task.remote().map(label))
                .flatten();
            let begun = Instant::now();
            let work = AssertUnwindSafe(self.perform(task)).catch_unwind();
            let mut work = std::pin::pin!(work);
            let done = match tokio::time::timeout(SLOW, &mut work).await {
                Ok(done) => done,
                Err(_) => {
                    warn!(
                        volume = key,
                        step = name,
                        "a step on a volume takes long; what needs it waits until it ends"
                    );
                    work.await
                }
            };
            let done = done.unwrap_or_else(|_| {
                let text = "the step panicked; report this as a bug";
                Err(RemoteError::Uncertain(text.to_owned()))
            });
            if let Some(plugin) = measured {
                self.observe(name, &plugin, begun, done.is_ok());
            }
            match done {
                Ok(()) => {
                    self.operations.succeeded(&key);
                    self.operations.succeeded(&undo_key(&key));
                    if let Some(remote) = given_back {
                        for next in alone::others(&self.store.snapshot(), &key, &remote) {
                            self.operations.succeeded(&next);
                        }
                    }
                }
                Err(error) => {
                    let text = error.to_string();
                    let backoff = self.operations.failed(&held_by, error, self.clock.now());
                    warn!(
                        volume = key,
                        step = name,
                        error = text,
                        retry_in = ?backoff.wait,
                        "a step on a volume failed"
                    );
                }
            }
            drop(taken);
        })
    }

    async fn perform(&self, task: Task) -> Result<(), RemoteError> {
        match task {
            Task::Claim(key, order) => {
                let (remote, path) = (&order.resolved.remote, &order.path);
                self.put(&key, remote, path, VolumePhase::Mounting, Mark::Claimed)
                    .await
            }
            Task::Share(key, order) => {
                let mark = self.mark_of(&order.path).await?;
                let remote = &order.resolved.remote;
                self.put(&key, remote, &order.path, VolumePhase::Mounted, mark)
                    .await
            }
            Task::Drop(key, recorded, remote) => {
                if !recorded.begun {
                    self.sweep(&key, &recorded, &remote).await;
                }
                self.forget(&key, "volume dropped").await
            }
            Task::Stage(key, order, recorded, volume) => {
                self.stage(&key, order, recorded, &volume).await
            }
            Task::Publish(key, order, recorded) => self.publish(&key, order, &recorded).await,
            Task::Unpublish(key, recorded, remote) => self.unpublish(&key, &recorded, remote).await,
            Task::Unstage(key, recorded, remote) => self.unstage(&key, &recorded, remote).await,
        }
    }

    async fn stage(
        &self,
        key: &str,
        order: Order,
        recorded: Option<Recorded>,
        volume: &str,
    ) -> Result<(), RemoteError> {
        let resolved = &order.resolved;
        let plugin = self.plugin(&resolved.remote)?;
        let Some(at) = self.staging(&resolved.remote) else {
            return Err(RemoteError::Failed("it is not staged".to_owned()));
        };
        let remote = &resolved.remote;
        self.put(key, remote, &at, VolumePhase::Mounting, Mark::Begun)
            .await?;
        fail::fail_point!("volumemanager::stage::recorded");
        make_parent(&at).await?;
        if self
            .store
            .snapshot()
            .record::<VolumeRecord>(volume)
            .is_none()
        {
            // Its pod has gone meanwhile. What is on record from before is undone as what nobody uses.
            return match recorded {
                Some(_) => Ok(()),
                None => self.forget(key, "nothing was staged").await,
            };
        }
        match plugin.stage(Arc::clone(resolved), at.clone()).await {
            Ok(()) => {}
            Err(error) => {
                if recorded.is_none() && !matches!(error, RemoteError::Uncertain(_)) {
                    self.forget(key, "nothing was staged").await?;
                }
                return Err(error);
            }
        }
        fail::fail_point!("volumemanager::stage::done");
        let mark = self.mark_of(&at).await?;
        self.put(key, remote, &at, VolumePhase::Mounted, mark)
            .await?;
        info!(device = key, at = %at.display(), "staged a device");
        Ok(())
    }

    /// Gives a volume to the pod's fsGroup.
    async fn give(&self, key: &str, order: &Order) -> Result<(), RemoteError> {
        let remote = &order.resolved.remote;
        if remote.mode == VolumeMode::Block || remote.read_only {
            return Ok(());
        }
        let name = key.split_once('/').map_or(key, |(_, name)| name);
        let access = Access::ReadWrite;
        self.give_to_group(&order.pod, name, remote.plugin(), &order.path, access)
            .await
            .map_err(|error| RemoteError::Uncertain(chain(&error)))
    }

    async fn publish(
        &self,
        key: &str,
        order: Order,
        recorded: &Recorded,
    ) -> Result<(), RemoteError> {
        let (resolved, path) = (&order.resolved, &order.path);
        let remote = &resolved.remote;
        let plugin = self.plugin(remote)?;
        alone::check(&self.store.snapshot(), key, remote)?;
        // What is mounted stays on record as such while it is published again.
        let is_there = recorded.phase == VolumePhase::Mounted && order.again && {
            let mark = self.mark_of(path).await?;
            recorded.this_boot && (!recorded.is_mount || mark == Mark::Mount)
        };
        if !is_there {
            self.put(key, remote, path, VolumePhase::Mounting, Mark::Begun)
                .await?;
        }
        fail::fail_point!("volumemanager::publish::recorded");
        // Upstream: `localVolumeMounter.SetUpAt` gives a directory of the node to a group for the first pod only.
        let is_shared = matches!(remote.source, Source::Local(_))
            && alone::is_in_use(&self.store.snapshot(), key, remote);
        make_parent(path).await?;
        let target = Target {
            pod: Arc::clone(&order.pod),
            staged: self.staging(remote),
            path: path.clone(),
        };
        let published = plugin.publish(Arc::clone(resolved), target).await;
        let group_by = match published {
            Ok(group_by) => group_by,
            Err(error) => {
                if !recorded.begun && !matches!(error, RemoteError::Uncertain(_)) {
                    self.put(key, remote, path, VolumePhase::Mounting, Mark::Claimed)
                        .await?;
                }
                return Err(error);
            }
        };
        fail::fail_point!("volumemanager::publish::done");
        // Also of what is published again: the driver may have made new files.
        if group_by == GroupBy::Agent && is_shared {
            self.warn_of_group(&order.pod, &remote.name, &order.path)
                .await;
        } else if group_by == GroupBy::Agent {
            self.give(key, &order).await?;
        }
        if !is_there {
            let mark = self.mark_of(path).await?;
            self.put(key, remote, path, VolumePhase::Mounted, mark)
                .await?;
            info!(volume = key, at = %path.display(), "published a volume");
        }
        self.published(key, &order);
        Ok(())
    }

    async fn unpublish(
        &self,
        key: &str,
        recorded: &Recorded,
        remote: Arc<Remote>,
    ) -> Result<(), RemoteError> {
        let path = PathBuf::from(&recorded.path);
        if recorded.phase != VolumePhase::Unmounting {
            self.put(key, &remote, &path, VolumePhase::Unmounting, Mark::Begun)
                .await?;
        }
        fail::fail_point!("volumemanager::unpublish::recorded");
        self.check_own(key, &path).await?;
        let plugin = self.plugin(&remote)?;
        plugin.unpublish(Arc::clone(&remote), path.clone()).await?;
        fail::fail_point!("volumemanager::unpublish::done");
        self.clear(path, is_nested(&remote)).await?;
        fail::fail_point!("volumemanager::unpublish::cleared");
        self.forget(key, "volume unmounted").await
    }

    async fn unstage(
        &self,
        key: &str,
        recorded: &Recorded,
        remote: Arc<Remote>,
    ) -> Result<(), RemoteError> {
        let at = PathBuf::from(&recorded.path);
        if recorded.phase != VolumePhase::Unmounting {
            self.put(key, &remote, &at, VolumePhase::Unmounting, Mark::Begun)
                .await?;
        }
        fail::fail_point!("volumemanager::unstage::recorded");
        self.check_own(key, &at).await?;
        let plugin = self.plugin(&remote)?;
        plugin.unstage(Arc::clone(&remote), at.clone()).await?;
        fail::fail_point!("volumemanager::unstage::done");
        self.clear(at, is_nested(&remote)).await?;
        fail::fail_point!("volumemanager::unstage::cleared");
        self.forget(key, "device unmounted").await
    }

    /// Removes the empty directories that a mount leaves behind, once nothing is mounted there any more.
    async fn clear(&self, path: PathBuf, nested: bool) -> Result<(), RemoteError> {
        let text = format!("remove {}", path.display());
        let mounts = self.mounts.clone();
        on_disk(text, move || {
            if let Some(mount) = mounts.read()?.below(&path)?.next() {
                return Err(io::Error::new(
                    io::ErrorKind::ResourceBusy,
                    format!("{} is still mounted", mount.point.display()),
                ));
            }
            match std::fs::symlink_metadata(&path) {
                Ok(found) if found.is_dir() => std::fs::remove_dir(&path)?,
                Ok(_) => {
                    let text = "something is in the place of the mount point";
                    return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
                }
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
            match path.parent().filter(|_| nested) {
                Some(parent) => safety::remove_empty(parent),
                None => Ok(()),
            }
        })
        .await
    }

    /// Removes the empty directory that a publish which failed may have left, unless it is another volume's.
    async fn sweep(&self, key: &str, recorded: &Recorded, remote: &Remote) {
        let seen = self.store.snapshot();
        let shared = seen
            .with_prefix::<VolumeRecord>("")
            .any(|(other, r)| **other != *key && r.path == recorded.path);
        if shared {
            return;
        }
        let path = PathBuf::from(&recorded.path);
        if let Err(error) = self.clear(path, is_nested(remote)).await {
            // It keeps the directory of its pod, which tells.
            warn!(volume = key, %error, "what a mount that failed left stays");
        }
    }

    async fn mark_of(&self, path: &Path) -> Result<Mark, RemoteError> {
        match self.mounts.current().await {
            Ok(mounted) if mounted.mount_at(path).is_some() => Ok(Mark::Mount),
            Ok(_) => Ok(Mark::Plain),
            Err(error) => Err(unread(&error)),
        }
    }

    /// Checks that the mount at the path of a volume or staged volume is the one that was made for it.
    async fn check_own(&self, key: &str, path: &Path) -> Result<(), RemoteError> {
        let seen = self.store.snapshot();
        if !records::has_mount(&seen, key) {
            return Ok(());
        }
        let table = self.mounts.current().await;
        let stack = table.as_ref().map_err(unread)?.all_at(path);
        // What is over it is for the plugin to find.
        match stack.map_err(|error| unread(&error))?.first() {
            Some(found) if !records::is_own(&seen, key, &found.noted(), self.clock.now()) => {
                Err(RemoteError::Failed(format!(
                    "{} ({}) is mounted at {} instead of it; whoever mounted that is to unmount it",
                    found.source,
                    found.fstype,
                    path.display()
                )))
            }
            _ => Ok(()),
        }
    }

    /// Notes what is mounted for a volume or device, once it is.
    async fn noting(
        &self,
        transaction: Transaction,
        key: &str,
        remote: &Remote,
        path: &Path,
        (phase, mark): (VolumePhase, Mark),
    ) -> Result<Transaction, RemoteError> {
        let (seen, now) = (self.store.snapshot(), self.clock.now());
        match phase {
            VolumePhase::Mounted if mark == Mark::Mount && records::notes_mount(remote) => {
                let table = self
                    .mounts
                    .current()
                    .await
                    .map_err(|error| unread(&error))?;
                let Some(mount) = table.at(path).map_err(|error| unread(&error))? else {
                    return Ok(transaction);
                };
                let mount = mount.noted();
                Ok(records::note_mount(
                    transaction,
                    &seen,
                    key,
                    Some(&mount),
                    now,
                ))
            }
            // Nobody knows yet what it will be.
            VolumePhase::Mounting => Ok(records::note_mount(transaction, &seen, key, None, now)),
            _ => Ok(transaction),
        }
    }

    fn plugin(&self, remote: &Remote) -> Result<Arc<dyn RemotePlugin>, RemoteError> {
        let name = remote.plugin();
        self.plugins.get(name).cloned().ok_or_else(|| {
            RemoteError::Waiting(format!("this agent has no plugin for {name} volumes"))
        })
    }

    /// Records a volume or a device with its description, as one.
    async fn put(
        &self,
        key: &str,
        remote: &Remote,
        path: &Path,
        phase: VolumePhase,
        mark: Mark,
    ) -> Result<(), RemoteError> {
        let step = (path, phase, mark);
        let transaction = records::put(Transaction::new(), key, remote, step, self.clock.now())
            .map_err(|e| RemoteError::Failed(format!("describe the volume: {e}")))?;
        let transaction = self
            .noting(transaction, key, remote, path, (phase, mark))
            .await?;
        self.commit_step(transaction).await
    }

    async fn forget(&self, key: &str, what: &str) -> Result<(), RemoteError> {
        let pod = keys::split(key).map(|(uid, _)| PodUid::new(uid));
        let gone = records::forget(Transaction::new(), &self.store.snapshot(), key);
        self.commit_step(gone.journal(pod.as_ref(), what, key))
            .await
    }

    async fn commit_step(&self, transaction: Transaction) -> Result<(), RemoteError> {
        match self.store.commit(transaction).await {
            Ok(_) => Ok(()),
            // The plugin is not called, or what it did is on record as begun.
            Err(error) => Err(RemoteError::Failed(format!("record the volume: {error}"))),
        }
    }
}

fn unread(error: &io::Error) -> RemoteError {
    RemoteError::Uncertain(format!("read the mount table: {error}"))
}

/// Returns whether a volume has a directory of its own around its mount point.
fn is_nested(remote: &Remote) -> bool {
    matches!(remote.source, Source::Csi(_)) && remote.mode == VolumeMode::Filesystem
}

/// Name of a volume's plugin in metrics.
pub(super) fn label(remote: &Remote) -> String {
    match &remote.source {
        Source::Csi(csi) => format!("{}:{}", remote.plugin(), csi.source.driver),
        _ => remote.plugin().to_owned(),
    }
}

async fn make_parent(path: &Path) -> Result<(), RemoteError> {
    let Some(parent) = path.parent().map(Path::to_owned) else {
        return Ok(());
    };
    let text = format!("create directory {}", parent.display());
    on_disk(text, move || {
        if std::fs::symlink_metadata(&parent).is_ok_and(|m| m.is_dir()) {
            return Ok(());
        }
        make_dir(&parent, 0o750)
    })
    .await
}

async fn on_disk(
    what: String,
    work: impl FnOnce() -> io::Result<()> + Send + 'static,
) -> Result<(), RemoteError> {
    match blocking::run(work).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(RemoteError::Uncertain(format!("{what}: {error}"))),
        Err(error) => Err(RemoteError::Uncertain(format!("{what}: {error}"))),
    }
}
