//! emptyDir volumes of huge pages: which page size, and a hugetlbfs of it; upstream's `setupHugepages`.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use nix::mount::{MsFlags, mount};

use super::mounts;
use crate::types::{PodExt, quantity};

/// `emptyDir.medium` of volumes of huge pages; a size may follow after `-`.
pub(super) const MEDIUM: &str = "HugePages";
const RESOURCE: &str = "hugepages-";
const NANOS: i128 = 1_000_000_000;
/// Directory with the kernel's page sizes.
const POOLS: &str = "/sys/kernel/mm/hugepages";

/// Reason why a volume in huge pages is not possible.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HugePagesError {
    /// The text after `HugePages-` is not a size.
    #[error("medium {medium}: {size:?} is not a page size; write HugePages-2Mi or HugePages-1Gi")]
    Size {
        /// As written.
        medium: String,
        /// That text.
        size: String,
    },
    /// The pod does not ask for such pages.
    #[error(
        "medium {medium}: hugePages storage requested, but there is no resource request for huge pages of that size; add resources.limits[hugepages-<size>] to a container"
    )]
    NotRequested {
        /// As written.
        medium: String,
    },
    /// The pod asks for several sizes, and the volume for none.
    #[error(
        "medium {medium} can't be used if containers request multiple huge page sizes; write HugePages-<size>"
    )]
    Several {
        /// As written.
        medium: String,
    },
    /// The node's kernel has none of that size.
    #[error("medium {medium}: {why}")]
    None {
        /// As written.
        medium: String,
        /// Missing resource of the node.
        why: String,
    },
}

/// The page size of a volume in bytes; upstream's `getPageSizeMountOption`.
///
/// # Errors
/// When the pod does not say which, or asks for no such pages.
pub(super) fn page_size(medium: &str, pod: &Pod) -> Result<u64, HugePagesError> {
    let wanted = match medium.strip_prefix(MEDIUM) {
        Some("") => None,
        rest => {
            let size = rest.and_then(|r| r.strip_prefix('-')).unwrap_or_default();
            let bytes = bytes(size).ok_or_else(|| HugePagesError::Size {
                medium: medium.to_owned(),
                size: size.to_owned(),
            })?;
            Some(bytes)
        }
    };
    let requested = requested(pod);
    let not_requested = || HugePagesError::NotRequested {
        medium: medium.to_owned(),
    };
    match wanted {
        Some(size) if requested.contains(&size) => Ok(size),
        Some(_) => Err(not_requested()),
        None if requested.len() > 1 => Err(HugePagesError::Several {
            medium: medium.to_owned(),
        }),
        None => requested.first().copied().ok_or_else(not_requested),
    }
}

fn bytes(size: &str) -> Option<u64> {
    let nanos = quantity::nanos(size).ok()?;
    let bytes = u64::try_from(nanos / NANOS).ok()?;
    (nanos % NANOS == 0 && bytes.is_power_of_two() && bytes >= 4096).then_some(bytes)
}

/// Page sizes that containers ask for. Requests of huge pages equal their limits.
fn requested(pod: &Pod) -> BTreeSet<u64> {
    let containers = pod.init_containers().iter().chain(pod.containers());
    let resources = containers
        .filter_map(|c| c.resources.as_ref())
        .chain(&pod.spec_ref().resources);
    resources
        .flat_map(|r| [&r.requests, &r.limits])
        .flatten()
        .flat_map(|list| list.keys())
        .filter_map(|name| bytes(name.strip_prefix(RESOURCE)?))
        .collect()
}

/// Mounts a hugetlbfs of `page` bytes, of at most `size` bytes. `Ok` when one is there. Blocking.
///
/// # Errors
/// When the node has no such pages, or something else is mounted there.
pub(super) fn mount_at(path: &Path, page: u64, size: Option<u64>) -> io::Result<()> {
    match mounts::at(path)? {
        // Mounted by a step that was cut off before it could be recorded.
        Some(found) if found.fstype == "hugetlbfs" => return Ok(()),
        Some(found) => {
            return Err(io::Error::new(
                io::ErrorKind::ResourceBusy,
                format!("a file system of type {} is mounted there", found.fstype),
            ));
        }
        None => {}
    }
    let mut options = format!("mode=0777,pagesize={page}");
    if let Some(size) = size {
        options.push_str(&format!(",size={size}"));
    }
    mount(
        Some("nodev"),
        path,
        Some("hugetlbfs"),
        MsFlags::empty(),
        Some(options.as_str()),
    )?;
    Ok(())
}

/// Checks that the node has pages of `page` bytes. Blocking.
///
/// # Errors
/// The missing resource.
pub(super) fn check_node(medium: &str, page: u64) -> Result<(), HugePagesError> {
    let none = |why: String| HugePagesError::None {
        medium: medium.to_owned(),
        why,
    };
    let dir = Path::new(POOLS).join(format!("hugepages-{}kB", page / 1024));
    let pages = |name: &str| -> Option<u64> {
        let told = fs::read_to_string(dir.join(name)).ok()?;
        told.trim().parse().ok()
    };
    let Some(pool) = pages("nr_hugepages") else {
        return Err(none(format!(
            "the kernel of this node has no huge pages of {} KiB",
            page / 1024
        )));
    };
    if pool == 0 && pages("nr_overcommit_hugepages").unwrap_or(0) == 0 {
        return Err(none(format!(
            "this node has no huge pages of {} KiB set aside; write how many into {}",
            page / 1024,
            dir.join("nr_hugepages").display()
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(resources: &[Value]) -> Pod {
        let containers: Vec<_> = resources
            .iter()
            .map(|r| json!({"name": "c", "resources": {"limits": r}}))
            .collect();
        serde_json::from_value(json!({"spec": {"containers": containers}})).unwrap()
    }

    #[test]
    fn the_page_size_is_one_that_the_pod_asks_for() {
        let (two, both) = (
            json!({"hugepages-2Mi": "4Mi", "cpu": "1"}),
            json!({"hugepages-2Mi": "4Mi", "hugepages-1Gi": "1Gi"}),
        );
        let size = |medium: &str, resources: &[Value]| page_size(medium, &pod(resources));
        let medium = |m: &str| m.to_owned();
        assert_eq!(size("HugePages", std::slice::from_ref(&two)), Ok(2 << 20));
        assert_eq!(
            size("HugePages-2Mi", std::slice::from_ref(&two)),
            Ok(2 << 20)
        );
        assert_eq!(
            size("HugePages-1Gi", std::slice::from_ref(&both)),
            Ok(1 << 30)
        );
        assert_eq!(
            size("HugePages", std::slice::from_ref(&both)),
            Err(HugePagesError::Several {
                medium: medium("HugePages")
            })
        );
        for (wanted, resources) in [("HugePages-1Gi", &[two][..]), ("HugePages", &[])] {
            assert_eq!(
                size(wanted, resources),
                Err(HugePagesError::NotRequested {
                    medium: medium(wanted)
                })
            );
        }
        for wrong in [
            "HugePages-",
            "HugePages-big",
            "HugePages-3Mi",
            "HugePages2Mi",
        ] {
            assert!(
                matches!(
                    size(wrong, std::slice::from_ref(&both)),
                    Err(HugePagesError::Size { .. })
                ),
                "{wrong}"
            );
        }
    }

    #[test]
    fn a_node_without_such_pages_says_so() {
        let error = check_node("HugePages-8Ki", 8192).unwrap_err().to_string();
        assert_eq!(
            error,
            "medium HugePages-8Ki: the kernel of this node has no huge pages of 8 KiB"
        );
    }

    #[test]
    fn a_hugetlbfs_is_mounted_once_for_everybody() {
        use crate::volumemanager::stand_in::{Swept, can_mount};
        use std::os::unix::fs::PermissionsExt;
        let page = 2 << 20;
        let pool = Path::new(POOLS).join("hugepages-2048kB");
        if !can_mount() || !pool.is_dir() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let _swept = Swept(dir.path().to_owned());
        let at = dir.path().join("pages");
        fs::create_dir(&at).unwrap();
        for _ in 0..2 {
            mount_at(&at, page, Some(4 << 20)).unwrap();
        }
        let table = mounts::below(dir.path()).unwrap();
        let kinds: Vec<_> = table.iter().map(|m| m.fstype.as_str()).collect();
        assert_eq!(kinds, ["hugetlbfs"]);
        let mode = fs::metadata(&at).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o777);
        let stat = nix::sys::statvfs::statvfs(&at).unwrap();
        assert_eq!(
            (stat.block_size(), stat.blocks()),
            (page, 2),
            "no more than it asks for"
        );
        let none: Option<&str> = None;
        let other = dir.path().join("other");
        fs::create_dir(&other).unwrap();
        mount(Some("x"), &other, Some("tmpfs"), MsFlags::empty(), none).unwrap();
        let error = mount_at(&other, page, None).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
    }
}
