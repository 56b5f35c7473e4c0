//! Makes a cgroup as it is wanted: the unit of systemd, the directories, the files.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::sync::{MutexGuard, PoisonError};

use tokio::time::Instant;

use super::settings::Whole;
use super::systemd::{self, SystemdError};
use super::{CgroupError, CgroupManager, CgroupName, Told, Wanted, fs};
use crate::types::metrics::OperationLabel;

impl CgroupManager {
    /// Changes what is wanted of a cgroup and makes it so. After an error it is wanted as before.
    pub(super) fn make(
        &self,
        name: &CgroupName,
        change: impl FnOnce(&mut Whole),
    ) -> Result<(), CgroupError> {
        let begun = Instant::now();
        let operation = match self.is_anywhere(name) {
            true => "update",
            false => "create",
        };
        let cgroup = self.id(name);
        let (before, whole, is_told) = {
            let mut remembered = self.remembered();
            let wanted = remembered.entry(name.clone()).or_default();
            let before = wanted.whole.clone();
            change(&mut wanted.whole);
            wanted.in_progress += 1;
            let told = wanted.told.as_ref();
            let is_told = told.is_some_and(|told| {
                told.whole == wanted.whole && told.cgroup == cgroup && cgroup.is_some()
            });
            (before, wanted.whole.clone(), is_told)
        };
        let made = self.tell_systemd(name, &whole, is_told);
        let made = made.and_then(|()| self.write(name, &whole));
        let cgroup = self.id(name);
        if let Some(wanted) = self.remembered().get_mut(name) {
            // One that was removed and is remembered anew meanwhile has not counted this call.
            wanted.in_progress = wanted.in_progress.saturating_sub(1);
            if wanted.whole == whole {
                wanted.told = made.is_ok().then_some(Told { whole, cgroup });
                if made.is_err() {
                    wanted.whole = before;
                }
            }
        }
        self.observe(operation, begun);
        made
    }

    /// Returns the number by which the kernel tells a cgroup from others that have had its name; `None` when there is none.
    pub(super) fn id(&self, name: &CgroupName) -> Option<u64> {
        let dir = self.dir(self.managed().next()?, name);
        std::fs::metadata(dir).ok().map(|found| found.ino())
    }

    /// Returns whether the cgroup exists in any hierarchy.
    pub(super) fn is_anywhere(&self, name: &CgroupName) -> bool {
        let mut hierarchies = self.hierarchies.iter();
        hierarchies.any(|hierarchy| self.dir(hierarchy, name).is_dir())
    }

    /// Notes how long a change took, also one that failed. Upstream: `CgroupManagerDuration`.
    pub(super) fn observe(&self, operation: &str, begun: Instant) {
        let Some(metrics) = &self.metrics else { return };
        let label = OperationLabel {
            operation_type: operation.to_owned(),
        };
        metrics
            .cgroup_manager_duration
            .get_or_create(&label)
            .observe(begun.elapsed().as_secs_f64());
    }

    pub(super) fn tell_systemd(
        &self,
        name: &CgroupName,
        whole: &Whole,
        is_told: bool,
    ) -> Result<(), CgroupError> {
        match &self.systemd {
            Some(systemd) if !is_told => systemd
                .set(name, &systemd::properties(self.version, whole))
                .map_err(self.of_systemd(name)),
            _ => Ok(()),
        }
    }

    fn write(&self, name: &CgroupName, whole: &Whole) -> Result<(), CgroupError> {
        let settings = whole.settings(self.version);
        for hierarchy in self.managed() {
            let dir = self.dir(hierarchy, name);
            fs::make(&hierarchy.path, &dir, self.version)?;
            for setting in settings.iter().filter(|s| hierarchy.has(s.controller)) {
                let file = dir.join(&setting.file);
                if !setting.optional || file.exists() {
                    fs::set(&file, &setting.value)?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn of_systemd(
        &self,
        name: &CgroupName,
    ) -> impl FnOnce(SystemdError) -> CgroupError + use<> {
        let path = self.path(name);
        move |source| CgroupError::Systemd {
            path,
            source: Box::new(source),
        }
    }

    pub(super) fn remembered(&self) -> MutexGuard<'_, BTreeMap<CgroupName, Wanted>> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
