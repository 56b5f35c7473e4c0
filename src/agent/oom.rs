//! Handling of out-of-memory kills: the agent reports them, and protects itself from being killed.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::Tasks;
use super::base::Base;
use super::started::Started;
use crate::cm::CgroupManager;
use crate::oom_watcher::{self, Cgroups, OomWatcher, OomWatcherParts};
use crate::types::PodUid;

const OWN_SCORE: &str = "/proc/self/oom_score_adj";

impl Cgroups for CgroupManager {
    fn pod_at(&self, path: &str) -> Option<PodUid> {
        CgroupManager::pod_at(self, path)
    }

    fn memory_limit_at(&self, path: &str) -> Option<u64> {
        CgroupManager::memory_limit_at(self, path)
    }
}

/// Follows the kernel's log.
pub(super) fn watch(base: &Base, started: &Started, tasks: &mut Tasks, token: &CancellationToken) {
    let watcher = OomWatcher::new(OomWatcherParts {
        store: base.store.clone(),
        clock: Arc::clone(&base.clock),
        recorder: Arc::clone(&base.recorder) as _,
        metrics: base.metrics.clone(),
        pods: started.pods.clone(),
        cgroups: Arc::clone(&started.workers.context().resources.cgroups) as _,
        kernel_boot_id: base.boot.kernel_boot_id.clone(),
    });
    let device = oom_watcher::DEVICE.into();
    tasks.add("OOM watcher", watcher.run(device, token.clone()));
}

/// Applies `oomScoreAdj`. An agent without the right to do so keeps the score that it was started with.
pub(super) fn set_own_score(wanted: i32) {
    if let Err(error) = set_score(Path::new(OWN_SCORE), wanted) {
        warn!(%error, wanted, "oomScoreAdj has no effect; give the agent CAP_SYS_RESOURCE, or set OOMScoreAdjust in its unit");
    }
}

/// Writes a score unless it is there already, which takes no rights.
fn set_score(file: &Path, wanted: i32) -> io::Result<()> {
    let now = fs::read_to_string(file)?;
    if now.trim() == wanted.to_string() {
        return Ok(());
    }
    fs::write(file, wanted.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_score_is_written_when_it_is_another_one() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("score");
        assert!(set_score(&file, 0).is_err(), "no such file");
        for (before, wanted, after) in [("0\n", -999, "-999"), ("-999\n", -999, "-999\n")] {
            fs::write(&file, before).unwrap();
            set_score(&file, wanted).unwrap();
            assert_eq!(fs::read_to_string(&file).unwrap(), after);
        }
    }
}
