//! What is there when the agent starts, and what is left over later.
//!
//! Nothing that is on record is touched here: a mount that is missing (after a reboot) or was cut off is
//! taken up by the next sync of its pod, a device that no volume uses is unstaged once the volumes of all pods are known.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::future::join_all;
use tracing::{info, warn};

use super::error::{VolumeError, io_error};
use super::{CONFIG_MAP, EMPTY_DIR, HOST_PATH, OWN, VolumeManager, dirs_in};
use crate::core::state::{PodRecord, State, Transaction, VolumePhase, VolumeRecord, child_key};
use crate::core::volumes::keys::{self, Mark};
use crate::core::volumes::records;
use crate::types::PodUid;

/// How long the volumes of a pod that is gone are waited for before the next one's turn; what is begun goes on.
const ORPHAN_WAIT: Duration = Duration::from_secs(5);

/// What was found at start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reconciled {
    /// Volumes on record as mounted that are.
    pub mounted: usize,
    /// Volumes on record as mounted that are not, as after a reboot.
    pub missing: usize,
    /// Volumes whose mount or unmount was cut off.
    pub cut_off: usize,
    /// Volumes on disk that were not on record and are now.
    pub adopted: usize,
    /// Mounts in the directories of pods that are not on record.
    pub foreign: Vec<String>,
}

impl VolumeManager {
    /// Compares what is on record with the mount table and the disk. The agent's own volumes that are on disk but not
    /// on record, after the store was lost, are recorded as mounted, so that their pods' end removes them; records that
    /// are damaged are made whole where that can be. Changes no volume. What else is mounted without a record is for
    /// [`VolumeManager::take_over`].
    ///
    /// # Errors
    /// When a directory cannot be read or a record not committed.
    pub async fn reconcile(&self) -> Result<Reconciled, VolumeError> {
        let mut found = Reconciled::default();
        let seen = self.store.snapshot();
        let transaction = self.adopt(&seen, &mut found)?;
        let (transaction, mended) = self.mend(&seen, transaction)?;
        let (transaction, staged) = self.add_staged(&seen, transaction)?;
        if found.adopted + mended + staged > 0 {
            self.commit(&PodUid::new(""), "on disk", transaction)
                .await?;
        }
        self.compare(&self.store.snapshot(), &mut found).await?;
        if found.missing + found.cut_off + found.adopted + found.foreign.len() > 0 {
            info!(
                mounted = found.mounted,
                missing = found.missing,
                cut_off = found.cut_off,
                adopted = found.adopted,
                "volumes are not all as recorded; their pods' next syncs see to them"
            );
        }
        for point in &found.foreign {
            warn!(
                point,
                "something is mounted as a pod's volume that is not on record; it is taken over once it is known what it is"
            );
        }
        if !self.plugins.is_empty() {
            self.drive();
        }
        Ok(found)
    }

    async fn compare(&self, seen: &State, found: &mut Reconciled) -> Result<(), VolumeError> {
        let root = &self.root;
        let mounted = self.mounts.current().await;
        let points = mounted.and_then(|mounted| mounted.points_below(root));
        let none = PodUid::new("");
        let points = points.map_err(io_error("read the mounts below", &none, root))?;
        let now = self.clock.now();
        let mut foreign: BTreeSet<&Path> = (points.iter())
            .map(PathBuf::as_path)
            .filter(|point| is_volume(root, point))
            .collect();
        for (key, record) in seen.with_prefix::<VolumeRecord>("") {
            let path = Path::new(&record.path);
            foreign.retain(|point| !point.starts_with(path));
            if record.phase != VolumePhase::Mounted {
                found.cut_off += 1;
                continue;
            }
            let mounted = points.contains(path);
            let mark = records::description(seen, key).map(|found| found.mark);
            let there = match (record.plugin.as_str(), mark) {
                (HOST_PATH, _) => true,
                (EMPTY_DIR | CONFIG_MAP, _) => mounted || path.is_dir(),
                (_, Some(Mark::Plain)) => record.at.boot == now.boot,
                _ => mounted,
            };
            if there {
                found.mounted += 1;
            } else {
                found.missing += 1;
            }
        }
        found.foreign = (foreign.into_iter())
            .map(|point| point.display().to_string())
            .collect();
        Ok(())
    }

    fn adopt(&self, seen: &State, found: &mut Reconciled) -> Result<Transaction, VolumeError> {
        let mut transaction = Transaction::new();
        for uid in self.pods_on_disk()? {
            let volumes = self.pod_dir(&uid).join("volumes");
            let plugins = dirs_in(&volumes).map_err(io_error("list volumes in", &uid, &volumes))?;
            for plugin in OWN {
                let name = plugin.replace('/', "~");
                if !plugins.contains(&name) {
                    continue;
                }
                let dir = volumes.join(name);
                let names = dirs_in(&dir).map_err(io_error("list volumes in", &uid, &dir))?;
                for name in names {
                    let key = child_key(&uid, &name);
                    if seen.record::<VolumeRecord>(&key).is_some() {
                        continue;
                    }
                    let record = VolumeRecord {
                        plugin: plugin.to_owned(),
                        path: dir.join(&name).to_string_lossy().into_owned(),
                        phase: VolumePhase::Mounted,
                        at: self.clock.now(),
                    };
                    transaction = transaction.put(key, record);
                    found.adopted += 1;
                }
            }
        }
        Ok(transaction)
    }

    /// Unmounts the volumes and removes the directories of pods that are not `known`; upstream's
    /// `cleanupOrphanedPodDirs`. Only to be called once every source has spoken. Returns what stayed. Pods are seen to
    /// side by side: one whose volumes hang does not hold up the others, nor the caller for more than seconds.
    pub async fn cleanup_orphan_dirs(&self, known: &BTreeSet<PodUid>) -> Vec<VolumeError> {
        let mut orphans: BTreeSet<PodUid> = match self.pods_on_disk() {
            Ok(pods) => pods,
            Err(error) => return vec![error],
        };
        let seen = self.store.snapshot();
        orphans.extend(
            seen.with_prefix::<VolumeRecord>("")
                .filter_map(|(key, _)| keys::split(key))
                .map(|(uid, _)| PodUid::new(uid)),
        );
        // One that came after `known` was made is on record before anything is made for it.
        let is_back = |uid: &PodUid| {
            let seen = self.store.snapshot();
            seen.record::<PodRecord>(uid.as_str()).is_some()
        };
        let removed = join_all(orphans.difference(known).map(|uid| async move {
            if is_back(uid) {
                return Ok(());
            }
            self.unmount_within(uid, ORPHAN_WAIT).await?;
            if is_back(uid) {
                return Ok(());
            }
            self.remove_pod_dirs(uid).await?;
            info!(pod = %uid, "removed the directory of a pod that is gone");
            Ok(())
        }));
        removed.await.into_iter().filter_map(Result::err).collect()
    }
}

/// Returns whether a path is that of a pod's volume, or inside of one: `<root>/pods/<uid>/volumes/…`.
fn is_volume(root: &Path, point: &Path) -> bool {
    let Ok(below) = point.strip_prefix(root) else {
        return false;
    };
    let mut parts = below.iter();
    let pods = parts.next().is_some_and(|part| part == "pods");
    pods && (parts.nth(1)).is_some_and(|part| part == "volumes" || part == "volumeDevices")
}
