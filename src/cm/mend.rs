//! Corrects cgroups that somebody else has changed.

use k8s_openapi::api::core::v1::Pod;

use super::fs::Hierarchy;
use super::settings::{Comparison, Setting, Whole, compare};
use super::{CgroupDriver, CgroupError, CgroupManager, CgroupName};

/// A cgroup that somebody else had changed, and that is as it should be again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mended {
    /// The cgroup, below the mount point.
    pub path: String,
    /// One of the files that were different.
    pub file: String,
    /// Previous content; `None` if the file did not exist.
    pub found: Option<String>,
    /// Content that the file has again.
    pub wanted: String,
}

/// Result of [`CgroupManager::mend`].
#[derive(Debug, Default)]
pub struct Mending {
    /// Cgroups that are as they should be again.
    pub mended: Vec<Mended>,
    /// Cgroups of all pods that another program has removed, by their paths. They are made again.
    pub removed: Vec<String>,
    /// Errors of the others.
    pub failed: Vec<CgroupError>,
}

impl CgroupManager {
    /// Compares every cgroup with what is wanted of it, and puts back what somebody else has changed: a user, or systemd
    /// for units that it was not told everything of. The cgroup of all pods and those of the classes are made again when
    /// they are gone, as after `systemctl stop`; the cgroup of a pod is left to its worker. One that cannot be written, or that
    /// systemd refuses, leaves the others to be corrected.
    pub fn mend(&self) -> Mending {
        let all: Vec<(CgroupName, Whole)> = self
            .remembered()
            .iter()
            .map(|(name, wanted)| (name.clone(), wanted.whole.clone()))
            .collect();
        let mut done = Mending::default();
        for (name, whole) in all {
            if self.is_common(&name) && !self.is_anywhere(&name) {
                done.removed.push(self.path(&name));
                if let Err(error) = self.make(&name, |_| ()) {
                    done.failed.push(error);
                }
                continue;
            }
            if self.difference(&name, &whole).is_none() {
                continue;
            }
            {
                let mut remembered = self.remembered();
                let Some(wanted) = remembered.get_mut(&name) else {
                    continue;
                };
                if wanted.in_progress > 0 || wanted.whole != whole {
                    continue;
                }
                wanted.told = None;
            }
            // Once more: a call that has ended meanwhile may have made the difference.
            let Some((worst, difference)) = self.difference(&name, &whole) else {
                continue;
            };
            match self.make(&name, |_| ()) {
                Ok(()) if worst == Comparison::Other => done.mended.push(difference),
                Ok(()) => {}
                Err(error) => done.failed.push(error),
            }
        }
        done
    }

    /// The first difference that counts most.
    fn difference(&self, name: &CgroupName, whole: &Whole) -> Option<(Comparison, Mended)> {
        let settings = whole.settings(self.version);
        let mut rounded = None;
        for hierarchy in self.managed() {
            if !self.dir(hierarchy, name).is_dir() {
                return None;
            }
            for setting in settings.iter().filter(|s| hierarchy.has(s.controller)) {
                let (found, comparison) = self.comparison(hierarchy, name, setting);
                let difference = || Mended {
                    path: self.path(name),
                    file: setting.file.clone(),
                    found: found.clone(),
                    wanted: setting.value.clone(),
                };
                match comparison {
                    Comparison::Same => {}
                    Comparison::Rounded => rounded = Some((comparison, difference())),
                    Comparison::Other => return Some((comparison, difference())),
                }
            }
        }
        rounded
    }

    pub(super) fn comparison(
        &self,
        hierarchy: &Hierarchy,
        name: &CgroupName,
        setting: &Setting,
    ) -> (Option<String>, Comparison) {
        let file = self.dir(hierarchy, name).join(&setting.file);
        let found = std::fs::read_to_string(file)
            .ok()
            .map(|text| text.trim().to_owned());
        let comparison = match &found {
            None if setting.optional => Comparison::Same,
            None => Comparison::Other,
            Some(found) => match compare(&setting.file, found, &setting.value, procfs::page_size())
            {
                // Only systemd rounds.
                Comparison::Rounded if self.systemd.is_none() => Comparison::Other,
                other => other,
            },
        };
        (found, comparison)
    }

    /// Puts a pod's limits back after its sandbox was made. With the systemd driver the first scope in a
    /// slice makes systemd write what it knows of the slice, in which quotas are rounded and huge pages are missing.
    /// Nothing to do for cgroupfs.
    ///
    /// # Errors
    /// As [`Self::ensure`].
    pub fn reassert(&self, pod: &Pod) -> Result<(), CgroupError> {
        match self.config.driver {
            CgroupDriver::Cgroupfs => Ok(()),
            CgroupDriver::Systemd => self.ensure(pod),
        }
    }
}
