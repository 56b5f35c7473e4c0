//! Mounting the volumes of a pod, all at once, and waiting for them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use k8s_openapi::api::core::v1::{EmptyDirVolumeSource, Pod, Volume};
use tokio::sync::OnceCell;
use tokio::time::Instant;
use tracing::info;

use super::error::{VolumeError, io_error};
use super::known::undescribed;
use super::ownership::Access;
use super::plan::{self, Medium, Plan, memory_size, set_up};
use super::steps::label;
use super::{
    CONFIG_MAP, EMPTY_DIR, HOST_PATH, POD_WAIT, VolumeManager, check_name, content_plugin,
    host_path, huge_pages, mounts, plugin_of, run_blocking,
};
use crate::core::state::{Transaction, VolumePhase, VolumeRecord, child_key};
use crate::core::volumes::keys::Mark;
use crate::core::volumes::{Remote, Source, VolumeMode, records};
use crate::kuberuntime::sources::{Resolved, Sources, is_content_volume, mounted_volumes};
use crate::types::events::{Event, EventRecorder, EventType};
use crate::types::metrics::VolumeOperationLabel;
use crate::types::{PodExt, PodUid};

/// Users are told what a pod waits for once it has done so for this long.
const PATIENCE: Duration = Duration::from_secs(10);
/// Reason of the event about what a pod waits for.
const WAITING: &str = "WaitingForVolumes";

/// Since when a pod waits for its volumes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    since: Instant,
    told: bool,
}

/// What is mounted, looked at when it is first asked for.
pub(super) struct Mounts<'a>(&'a mounts::Source, OnceCell<mounts::View>);

impl Mounts<'_> {
    pub(super) async fn get(&self) -> std::io::Result<&mounts::View> {
        self.1.get_or_try_init(|| self.0.current()).await
    }
}

impl VolumeManager {
    /// Makes sure that every volume a container mounts is there and holds what it should, and gives their
    /// paths on the host (of a block volume: what leads to the device); upstream's `WaitForAttachAndMount`. The
    /// volumes of a pod are mounted side by side. A failure is told by an event as well; after 2 min 3 s users are
    /// told which ones are missing.
    /// When dropped, steps that have begun go on to their ends and are taken up by the next call.
    ///
    /// # Errors
    /// The first volume that cannot be mounted; the others were tried.
    pub async fn mount(
        &self,
        pod: &Pod,
        sources: &Sources,
        recorder: &dyn EventRecorder,
    ) -> Result<BTreeMap<String, PathBuf>, VolumeError> {
        let uid = pod.uid();
        self.make_pod_dirs(&uid).await?;
        let used = mounted_volumes(pod);
        let (table, shared) = (Mounts(&self.mounts, OnceCell::new()), OnceLock::new());
        let mut jobs = FuturesUnordered::new();
        // Images are mounted by the runtime.
        let volumes = pod.spec_ref().volumes.iter().flatten();
        let volumes = volumes.filter(|v| v.image.is_none() && used.contains(v.name.as_str()));
        for volume in volumes {
            let at = At {
                pod,
                shared: &shared,
                table: &table,
            };
            self.note_request(&uid, &volume.name);
            jobs.push(async move {
                let done = self.mount_any(at, volume, sources, recorder).await;
                (volume, done)
            });
        }
        let mut missing: BTreeMap<&str, Option<VolumeError>> = BTreeMap::new();
        let mut paths = BTreeMap::new();
        let all = jobs.len();
        let begun = Instant::now();
        let mut told_at = begun + PATIENCE;
        while paths.len() + missing.len() < all {
            let next = tokio::time::timeout_at(told_at.min(begun + POD_WAIT), jobs.next());
            match next.await {
                Ok(Some((volume, Ok(path)))) => {
                    self.observe_arrival(&uid, volume, sources);
                    paths.insert(volume.name.clone(), path);
                }
                Ok(Some((volume, Err(error)))) => {
                    error.tell(pod, &volume.name, recorder);
                    missing.insert(&volume.name, Some(error));
                }
                Ok(None) => break,
                Err(_) if begun.elapsed() >= POD_WAIT => break,
                Err(_) => {
                    self.tell_waiting(pod, &used, &paths, sources, recorder);
                    told_at = begun + POD_WAIT;
                }
            }
        }
        if paths.len() == all {
            self.waits(&uid, false);
            return Ok(paths);
        }
        let first = missing.into_values().flatten().next();
        let names = pod.spec_ref().volumes.iter().flatten();
        let names = names.filter(|v| v.image.is_none() && used.contains(v.name.as_str()));
        let unmounted: Vec<String> = names
            .map(|v| v.name.clone())
            .filter(|name| !paths.contains_key(name))
            .collect();
        let timed_out = VolumeError::timed_out(&uid, &unmounted);
        if self.waits(&uid, true) {
            recorder.record(timed_out.pod_event(pod));
        }
        Err(first.unwrap_or(timed_out))
    }

    /// Notes since when a pod asks for a volume, unless it was mounted in this boot.
    fn note_request(&self, uid: &PodUid, volume: &str) {
        let boot = self.clock.now().boot;
        let seen = self.store.snapshot();
        let known = seen.record::<VolumeRecord>(&child_key(uid, volume));
        if known.is_some_and(|k| k.phase == VolumePhase::Mounted && k.at.boot == boot) {
            return;
        }
        let mut requested = self.requested();
        let of = requested.entry(uid.clone()).or_default();
        of.entry(volume.to_owned()).or_insert_with(Instant::now);
    }

    /// Measures how long a pod waited for a volume that it has now. Upstream: `RecordOperationLatencyMetric`.
    fn observe_arrival(&self, uid: &PodUid, volume: &Volume, sources: &Sources) {
        let since = {
            let mut requested = self.requested();
            let Some(of) = requested.get_mut(uid) else {
                return;
            };
            let since = of.remove(&volume.name);
            if of.is_empty() {
                requested.remove(uid);
            }
            since
        };
        let plugin = match sources.remotes.get(&volume.name) {
            Some(resolved) => resolved.as_ref().ok().map(|r| label(&r.remote)),
            None => plugin_of(volume).map(str::to_owned),
        };
        let (Some(since), Some(plugin_name)) = (since, plugin) else {
            return;
        };
        let label = VolumeOperationLabel {
            operation_name: "overall_volume_mount".to_owned(),
            plugin_name,
        };
        self.metrics
            .volume_operation_total
            .get_or_create(&label)
            .observe(since.elapsed().as_secs_f64());
    }

    /// Notes whether a pod still waits, and says whether users are to be told that it has done so for too long.
    fn waits(&self, uid: &PodUid, still: bool) -> bool {
        let mut waiting = self.waiting();
        if !still {
            waiting.remove(uid);
            return false;
        }
        let now = Instant::now();
        let new = Waiting {
            since: now,
            told: false,
        };
        let of = waiting.entry(uid.clone()).or_insert(new);
        if now.duration_since(of.since) < POD_WAIT {
            return false;
        }
        of.since = now;
        true
    }

    fn tell_waiting(
        &self,
        pod: &Pod,
        used: &std::collections::BTreeSet<&str>,
        there: &BTreeMap<String, PathBuf>,
        sources: &Sources,
        recorder: &dyn EventRecorder,
    ) {
        let uid = pod.uid();
        {
            let mut waiting = self.waiting();
            let new = Waiting {
                since: Instant::now()
                    .checked_sub(PATIENCE)
                    .unwrap_or_else(Instant::now),
                told: false,
            };
            let of = waiting.entry(uid.clone()).or_insert(new);
            if std::mem::replace(&mut of.told, true) {
                return;
            }
        }
        let left = used.iter().filter(|name| !there.contains_key(**name));
        // Its own step, or one of what is staged for it and for others.
        let running = |name: &str| {
            let own = self.operations.running(&child_key(&uid, name));
            own.or_else(|| {
                let resolved = sources.remotes.get(name)?.as_ref().ok()?;
                self.operations.running(&resolved.remote.device_key()?)
            })
        };
        let what: Vec<String> = left
            .map(|name| match running(name) {
                Some((step, since)) => format!("{name} ({step} for {}s)", since.as_secs()),
                None => (*name).to_owned(),
            })
            .collect();
        let what = what.join(", ");
        info!(pod = %uid, volumes = what, "a pod waits for its volumes");
        let text = format!("Waiting for volumes: {what}");
        recorder.record(Event::pod(EventType::Normal, pod, WAITING, text));
    }

    async fn mount_any(
        &self,
        at: At<'_>,
        volume: &Volume,
        sources: &Sources,
        recorder: &dyn EventRecorder,
    ) -> Result<PathBuf, VolumeError> {
        let pod = at.pod;
        if is_content_volume(volume) {
            return self.mount_files(at, volume, sources, recorder).await;
        }
        match sources.remotes.get(&volume.name) {
            None => self.mount_own(at, volume, None).await,
            Some(Ok(resolved)) => match &resolved.remote.source {
                Source::HostPath { .. } => self.mount_own(at, volume, Some(resolved)).await,
                _ => {
                    let resolved = Arc::clone(resolved);
                    self.mount_remote(&at.shared(), &volume.name, resolved, false)
                        .await
                }
            },
            Some(Err(why)) => Err(VolumeError::Unresolved {
                pod: pod.uid(),
                volume: volume.name.clone(),
                why: why.clone(),
            }),
        }
    }

    /// Publishes remote volumes again that want so at each sync. What fails leaves the volume as it is.
    ///
    /// # Errors
    /// The first one that failed.
    pub(super) async fn republish(
        &self,
        pod: &Pod,
        sources: &Sources,
        recorder: &dyn EventRecorder,
    ) -> Result<(), VolumeError> {
        let wanted = self.to_republish(&pod.uid());
        if wanted.is_empty() {
            return Ok(());
        }
        let pod = Arc::new(pod.clone());
        let mut result = Ok(());
        for name in wanted {
            let Some(Ok(resolved)) = sources.remotes.get(&name) else {
                continue;
            };
            let one = match &resolved.missing {
                // No attempt, and so no back-off.
                Some(why) => Err(VolumeError::Unresolved {
                    pod: pod.uid(),
                    volume: name.clone(),
                    why: why.clone(),
                }),
                None => self.republish_one(&pod, &name, resolved).await,
            };
            if let Err(error) = &one {
                error.tell(&pod, &name, recorder);
            }
            result = result.and(one);
        }
        result
    }

    async fn republish_one(
        &self,
        pod: &Arc<Pod>,
        name: &String,
        resolved: &Arc<Resolved>,
    ) -> Result<(), VolumeError> {
        let mounting = self.mount_remote(pod, name, Arc::clone(resolved), true);
        match tokio::time::timeout(PATIENCE, mounting).await {
            Ok(one) => one.map(drop),
            Err(_) => Err(VolumeError::timed_out(
                &pod.uid(),
                std::slice::from_ref(name),
            )),
        }
    }

    /// Volumes of a running pod that are to be published again at each sync.
    fn to_republish(&self, uid: &PodUid) -> Vec<String> {
        let all = self.remote_volumes_of(uid).into_iter();
        all.filter(|v| v.phase == VolumePhase::Mounted)
            .filter(|v| {
                let plugin = self.plugins.get(v.remote.plugin());
                plugin.is_some_and(|p| p.wants_republish(&v.remote))
            })
            .map(|v| v.volume)
            .collect()
    }

    /// Returns whether a running pod has volumes that are published again at each sync.
    pub fn wants_republish(&self, uid: &PodUid) -> bool {
        !self.plugins.is_empty() && !self.to_republish(uid).is_empty()
    }

    /// An operation on one volume of the pod's own: the only one, and carried out to its end.
    pub(super) async fn operate<T: Send + 'static>(
        &self,
        uid: &PodUid,
        name: &str,
        what: &'static str,
        work: impl Future<Output = Result<T, VolumeError>> + Send + 'static,
    ) -> Result<T, VolumeError> {
        let key = child_key(uid, name);
        let (manager, freed) = (self.clone(), key.clone());
        let after = move || manager.freed(&freed);
        match self.operations.run_then(&key, what, work, after).await {
            Ok(done) => done,
            Err(error) => Err(VolumeError::Io {
                verb: "finish work on volumes",
                pod: uid.clone(),
                path: PathBuf::from(name),
                source: std::io::Error::other(error),
            }),
        }
    }

    async fn mount_own(
        &self,
        at: At<'_>,
        volume: &Volume,
        resolved: Option<&Arc<Resolved>>,
    ) -> Result<PathBuf, VolumeError> {
        let uid = at.pod.uid();
        let plan = match resolved.map(|r| &r.remote.source) {
            Some(Source::HostPath { path, type_ }) => {
                let raw = resolved.is_some_and(|r| r.remote.mode == VolumeMode::Block);
                let type_ = if raw { "BlockDevice" } else { type_ };
                host_plan(&uid, &volume.name, path, type_)?
            }
            _ => self.plan(at.pod, volume)?,
        };
        let path = plan.path();
        let key = child_key(&uid, &volume.name);
        let seen = self.store.snapshot();
        let known = seen.record::<VolumeRecord>(&key);
        let is_it = known.is_some_and(|k| k.plugin == plan.plugin() && Path::new(&k.path) == path);
        // What it leads to may lie in memory, or on a disk that is not mounted yet.
        let is_checked = !matches!(plan, Plan::Host { .. })
            || known.is_some_and(|k| k.at.boot == self.clock.now().boot);
        if is_it
            && is_checked
            && known.is_some_and(|k| k.phase == VolumePhase::Mounted)
            && at
                .table
                .get()
                .await
                .map(|mounted| plan.is_set_up(mounted))
                .map_err(io_error("look at volume", &uid, &path))?
        {
            return Ok(path);
        }
        let (manager, pod, name) = (self.clone(), at.shared(), volume.name.clone());
        let remote = resolved.map(|r| r.remote.clone());
        self.operate(&uid, &volume.name, "volume_mount", async move {
            manager.set_up_own(&pod, &name, plan, remote).await
        })
        .await
    }

    async fn set_up_own(
        &self,
        pod: &Pod,
        name: &str,
        plan: Plan,
        remote: Option<Remote>,
    ) -> Result<PathBuf, VolumeError> {
        let uid = pod.uid();
        let (plugin, path) = (plan.plugin(), plan.path());
        let key = child_key(&uid, name);
        let known = self.store.snapshot().record::<VolumeRecord>(&key).cloned();
        if let Some(known) = known
            && (known.plugin != plugin || Path::new(&known.path) != path)
        {
            self.tear_down_own(&uid, name, &known).await?;
        }
        let mounting = self.own_record(&uid, name, plugin, &path, VolumePhase::Mounting);
        let mounting = match remote {
            Some(remote) => {
                records::describe(mounting, &key, &remote, Mark::Plain, self.clock.now())
                    .map_err(|error| undescribed(&uid, name, &error))?
            }
            None => mounting,
        };
        let mounting = match plugin {
            EMPTY_DIR => records::note_medium(mounting, &key, plan.mounts(), self.clock.now()),
            _ => mounting,
        };
        self.commit(&uid, name, mounting).await?;
        let (of, in_pod) = (uid.clone(), name.to_owned());
        let begun = Instant::now();
        let done = run_blocking(move || set_up(&plan, &of, &in_pod)).await;
        self.observe("volume_mount", plugin, begun, done.is_ok());
        done?;
        // What a hostPath leads to belongs to the node.
        if plugin != HOST_PATH {
            self.give_to_group(pod, name, plugin, &path, Access::ReadWrite)
                .await?;
        }
        info!(pod = %uid, volume = %name, plugin, "mounted volume");
        self.record(&uid, name, plugin, &path, VolumePhase::Mounted)
            .await?;
        Ok(path)
    }

    pub(super) fn plan(&self, pod: &Pod, volume: &Volume) -> Result<Plan, VolumeError> {
        let uid = pod.uid();
        check_name(&uid, &volume.name)?;
        let unsupported = |what: String| VolumeError::Unsupported {
            pod: uid.clone(),
            volume: volume.name.clone(),
            what,
        };
        if let Some(host) = &volume.host_path {
            let type_ = host.type_.as_deref().unwrap_or_default();
            return host_plan(&uid, &volume.name, &host.path, type_);
        }
        let path = |plugin| self.plugin_dir(&uid, plugin).join(&volume.name);
        let quantity = |source| VolumeError::Quantity {
            pod: uid.clone(),
            volume: volume.name.clone(),
            source,
        };
        if let Some(plugin) = content_plugin(volume) {
            let medium = if plugin == CONFIG_MAP {
                Medium::Disk
            } else {
                let no_limit = EmptyDirVolumeSource::default();
                Medium::Memory(memory_size(pod, &no_limit, (self.memory)()).map_err(quantity)?)
            };
            return Ok(Plan::Content {
                plugin,
                path: path(plugin),
                medium,
            });
        }
        let Some(empty) = &volume.empty_dir else {
            return Err(unsupported("its kind".to_owned()));
        };
        let path = path(EMPTY_DIR);
        match empty.medium.as_deref().unwrap_or_default() {
            "" => Ok(Plan::Disk { path }),
            "Memory" => {
                let size = memory_size(pod, empty, (self.memory)()).map_err(quantity)?;
                Ok(Plan::Memory { path, size })
            }
            medium if medium.starts_with(huge_pages::MEDIUM) => plan::huge_plan(pod, empty, path)
                .map_err(|source| VolumeError::HugePages {
                    pod: uid.clone(),
                    volume: volume.name.clone(),
                    source,
                }),
            other => Err(unsupported(format!("emptyDir medium {other:?}"))),
        }
    }

    fn own_record(
        &self,
        uid: &PodUid,
        name: &str,
        plugin: &str,
        path: &Path,
        phase: VolumePhase,
    ) -> Transaction {
        let record = VolumeRecord {
            plugin: plugin.to_owned(),
            path: path.to_string_lossy().into_owned(),
            phase,
            at: self.clock.now(),
        };
        Transaction::new().put(child_key(uid, name), record)
    }

    pub(super) async fn record(
        &self,
        uid: &PodUid,
        name: &str,
        plugin: &str,
        path: &Path,
        phase: VolumePhase,
    ) -> Result<(), VolumeError> {
        let transaction = self.own_record(uid, name, plugin, path, phase);
        self.commit(uid, name, transaction).await
    }

    pub(super) async fn commit(
        &self,
        uid: &PodUid,
        name: &str,
        transaction: Transaction,
    ) -> Result<(), VolumeError> {
        match self.store.commit(transaction).await {
            Ok(_) => Ok(()),
            Err(source) => Err(VolumeError::Commit {
                pod: uid.clone(),
                volume: name.to_owned(),
                source,
            }),
        }
    }
}

/// What mounting one volume looks at.
#[derive(Clone, Copy)]
pub(super) struct At<'a> {
    pub(super) pod: &'a Pod,
    /// The pod for what outlives the caller, made when it is first needed.
    shared: &'a OnceLock<Arc<Pod>>,
    pub(super) table: &'a Mounts<'a>,
}

impl At<'_> {
    pub(super) fn shared(&self) -> Arc<Pod> {
        Arc::clone(self.shared.get_or_init(|| Arc::new(self.pod.clone())))
    }
}

fn host_plan(uid: &PodUid, name: &str, path: &str, type_: &str) -> Result<Plan, VolumeError> {
    host_path::validate(path).map_err(|source| VolumeError::HostPath {
        pod: uid.clone(),
        volume: name.to_owned(),
        source,
    })?;
    Ok(Plan::Host {
        path: path.to_owned(),
        type_: type_.to_owned(),
    })
}
