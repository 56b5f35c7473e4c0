//! Names of cgroups: one list of components, spelled as cgroupfs or as systemd slices.

use serde::{Deserialize, Serialize};

use crate::types::PodUid;

/// Owner of the cgroup tree; must be the same for the agent and the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CgroupDriver {
    /// Directories, made by whoever needs them.
    Cgroupfs,
    /// Slices and scopes of systemd.
    Systemd,
}

/// A cgroup as a list of components below the top, independent of the driver.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CgroupName(Vec<String>);

impl CgroupName {
    /// Splits a path; `/` is the top.
    pub fn parse(path: &str) -> Self {
        Self(
            path.split('/')
                .filter(|part| !part.is_empty() && *part != "." && *part != "..")
                .map(str::to_owned)
                .collect(),
        )
    }

    /// The cgroup `component` below this one.
    #[must_use]
    pub fn child(&self, component: &str) -> Self {
        let mut parts = self.0.clone();
        parts.push(component.to_owned());
        Self(parts)
    }

    /// The cgroup above this one; `None` when that is the top.
    pub fn parent(&self) -> Option<Self> {
        match self.0.as_slice() {
            [above @ .., _] if !above.is_empty() => Some(Self(above.to_vec())),
            _ => None,
        }
    }

    /// `/kubepods/burstable/pod<UID>`.
    pub fn cgroupfs(&self) -> String {
        format!("/{}", self.0.join("/"))
    }

    /// `/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<UID with _>.slice`: a dash in a
    /// slice's name means a level, so dashes of components become underscores.
    pub fn systemd(&self) -> String {
        let mut path = String::new();
        let mut prefix = String::new();
        for part in &self.0 {
            if !prefix.is_empty() {
                prefix.push('-');
            }
            prefix.push_str(&part.replace('-', "_"));
            path.push('/');
            path.push_str(&prefix);
            path.push_str(".slice");
        }
        if path.is_empty() {
            path.push('/');
        }
        path
    }

    /// The last slice of [`Self::systemd`], which is all that systemd needs.
    pub fn slice(&self) -> String {
        let path = self.systemd();
        path.rsplit('/').next().unwrap_or_default().to_owned()
    }

    /// The pod whose cgroup is the child directory `entry` of this cgroup.
    pub fn pod_of_child(&self, entry: &str, driver: CgroupDriver) -> Option<PodUid> {
        let component = match driver {
            CgroupDriver::Cgroupfs => entry.to_owned(),
            CgroupDriver::Systemd => {
                let own = self.slice();
                let own = own.strip_suffix(".slice").unwrap_or_default();
                entry
                    .strip_prefix(own)?
                    .strip_prefix(if own.is_empty() { "" } else { "-" })?
                    .strip_suffix(".slice")?
                    .replace('_', "-")
            }
        };
        let uid = component.strip_prefix("pod")?;
        (!uid.is_empty()).then(|| PodUid::new(uid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_spelled_for_each_driver() {
        for (root, parts, cgroupfs, systemd, slice) in [
            (
                "/",
                vec!["kubepods"],
                "/kubepods",
                "/kubepods.slice",
                "kubepods.slice",
            ),
            (
                "/",
                vec!["kubepods", "burstable", "pod1234-ab-cd"],
                "/kubepods/burstable/pod1234-ab-cd",
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1234_ab_cd.slice",
                "kubepods-burstable-pod1234_ab_cd.slice",
            ),
            (
                "/my-root/x",
                vec!["kubepods"],
                "/my-root/x/kubepods",
                "/my_root.slice/my_root-x.slice/my_root-x-kubepods.slice",
                "my_root-x-kubepods.slice",
            ),
            ("/", vec![], "/", "/", ""),
        ] {
            let name = parts
                .iter()
                .fold(CgroupName::parse(root), |name, part| name.child(part));
            assert_eq!(name.cgroupfs(), cgroupfs);
            assert_eq!(name.systemd(), systemd);
            assert_eq!(name.slice(), slice);
        }
    }

    #[test]
    fn pods_are_found_again_by_the_names_of_their_cgroups() {
        use CgroupDriver::{Cgroupfs, Systemd};
        let parent = CgroupName::parse("/").child("kubepods").child("burstable");
        for (driver, entry, uid) in [
            (Cgroupfs, "pod12-ab", Some("12-ab")),
            (Cgroupfs, "pod", None),
            (Cgroupfs, "cpu.shares", None),
            (Systemd, "kubepods-burstable-pod12_ab.slice", Some("12-ab")),
            (Systemd, "kubepods-besteffort-pod12_ab.slice", None),
            (Systemd, "kubepods-burstable-pod12_ab.scope", None),
        ] {
            let found = parent.pod_of_child(entry, driver);
            assert_eq!(found, uid.map(PodUid::from), "{entry}");
        }
    }

    #[test]
    fn a_root_cannot_climb_out() {
        assert_eq!(CgroupName::parse("/../../x").cgroupfs(), "/x");
    }
}
