//! One volume: what it is to become, setting it up and tearing it down.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{EmptyDirVolumeSource, Pod};
use nix::errno::Errno;
use nix::mount::MsFlags;

use super::error::{VolumeError, io_error};
use super::huge_pages::{self, HugePagesError};
use super::{CONFIG_MAP, EMPTY_DIR, HOST_PATH, host_path, mounts, safety};
use crate::core::state::State;
use crate::core::volumes::records;
use crate::kuberuntime::resources::{self, QuantityError};
use crate::types::PodUid;

/// What a volume is to become.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    Disk {
        path: PathBuf,
    },
    Memory {
        path: PathBuf,
        size: Option<u64>,
    },
    /// A hugetlbfs of pages of so many bytes.
    Huge {
        path: PathBuf,
        medium: String,
        page: u64,
        size: Option<u64>,
    },
    Host {
        path: String,
        type_: String,
    },
    /// Files that the agent writes, on a tmpfs or on disk.
    Content {
        plugin: &'static str,
        path: PathBuf,
        medium: Medium,
    },
}

/// Where files lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Medium {
    Disk,
    /// A tmpfs of at most so many bytes.
    Memory(Option<u64>),
}

impl Plan {
    pub(super) fn plugin(&self) -> &'static str {
        match self {
            Self::Disk { .. } | Self::Memory { .. } | Self::Huge { .. } => EMPTY_DIR,
            Self::Host { .. } => HOST_PATH,
            Self::Content { plugin, .. } => plugin,
        }
    }

    pub(super) fn path(&self) -> PathBuf {
        match self {
            Self::Disk { path }
            | Self::Memory { path, .. }
            | Self::Huge { path, .. }
            | Self::Content { path, .. } => path.clone(),
            Self::Host { path, .. } => PathBuf::from(path),
        }
    }

    /// Returns whether its setup mounts something at its path.
    pub(super) fn mounts(&self) -> bool {
        match self {
            Self::Memory { .. } | Self::Huge { .. } => true,
            Self::Content { medium, .. } => *medium != Medium::Disk,
            Self::Disk { .. } | Self::Host { .. } => false,
        }
    }

    /// Returns whether it is set up, according to the mount table first. A hostPath is checked once per boot, when it
    /// is mounted.
    pub(super) fn is_set_up(&self, mounted: &mounts::View) -> bool {
        match self {
            Self::Disk { path }
            | Self::Content {
                path,
                medium: Medium::Disk,
                ..
            } => {
                mounted.mount_at(path).is_some()
                    || fs::symlink_metadata(path).is_ok_and(|m| m.is_dir())
            }
            Self::Memory { path, .. } | Self::Content { path, .. } => {
                mounted.mount_at(path).is_some_and(|m| m.fstype == "tmpfs")
            }
            Self::Huge { path, .. } => mounted
                .mount_at(path)
                .is_some_and(|m| m.fstype == "hugetlbfs"),
            Self::Host { .. } => true,
        }
    }
}

/// Size of a tmpfs: the least of what the node has for pods, what the pod may use with its overhead, as its cgroup has
/// it, and what the volume says; upstream's `calculateEmptyDirMemorySize`.
pub(super) fn memory_size(
    pod: &Pod,
    empty: &EmptyDirVolumeSource,
    node: Option<u64>,
) -> Result<Option<u64>, QuantityError> {
    let positive = |v: i64| u64::try_from(v).ok().filter(|v| *v > 0);
    let of_pod = resources::pod_resources_with_overhead(pod)?
        .memory_limit
        .and_then(positive);
    let own = empty
        .size_limit
        .as_ref()
        .map(resources::value)
        .transpose()?
        .and_then(positive);
    Ok([node, of_pod, own].into_iter().flatten().min())
}

/// An emptyDir of huge pages.
pub(super) fn huge_plan(
    pod: &Pod,
    empty: &EmptyDirVolumeSource,
    path: PathBuf,
) -> Result<Plan, HugePagesError> {
    let medium = empty.medium.clone().unwrap_or_default();
    let page = huge_pages::page_size(&medium, pod)?;
    let limit = empty.size_limit.as_ref();
    let size = limit.and_then(|l| u64::try_from(resources::value(l).ok()?).ok());
    Ok(Plan::Huge {
        path,
        medium,
        page,
        size: size.filter(|s| *s > 0),
    })
}

pub(super) fn set_up(plan: &Plan, uid: &PodUid, name: &str) -> Result<(), VolumeError> {
    match plan {
        Plan::Disk { path }
        | Plan::Content {
            path,
            medium: Medium::Disk,
            ..
        } => make_dir(path, 0o777).map_err(io_error("create volume", uid, path)),
        Plan::Memory { path, size } => {
            make_dir(path, 0o777).map_err(io_error("create volume", uid, path))?;
            mount_tmpfs(path, *size, None).map_err(io_error("mount tmpfs on", uid, path))
        }
        Plan::Huge {
            path,
            medium,
            page,
            size,
        } => {
            huge_pages::check_node(medium, *page).map_err(|source| VolumeError::HugePages {
                pod: uid.clone(),
                volume: name.to_owned(),
                source,
            })?;
            make_dir(path, 0o777).map_err(io_error("create volume", uid, path))?;
            huge_pages::mount_at(path, *page, *size).map_err(io_error(
                "mount hugetlbfs on",
                uid,
                path,
            ))
        }
        Plan::Content {
            path,
            medium: Medium::Memory(size),
            ..
        } => {
            make_dir(path, 0o777).map_err(io_error("create volume", uid, path))?;
            // Secrets are not for the swap; kernels before 6.4 do not know the option.
            mount_tmpfs(path, *size, Some("noswap"))
                .or_else(|error| match error.raw_os_error() {
                    Some(code) if code == Errno::EINVAL as i32 => mount_tmpfs(path, *size, None),
                    _ => Err(error),
                })
                .map_err(io_error("mount tmpfs on", uid, path))
        }
        Plan::Host { path, type_ } => {
            host_path::prepare(path, type_).map_err(|source| VolumeError::HostPath {
                pod: uid.clone(),
                volume: name.to_owned(),
                source,
            })
        }
    }
}

/// Mounts a tmpfs. Its mode is the file system's own, with the sticky bit: upstream's `setupTmpfs` names none either.
fn mount_tmpfs(path: &Path, size: Option<u64>, more: Option<&str>) -> io::Result<()> {
    // Mostly the directory was just made.
    let there = match mounts::is_point(path) {
        Some(false) => None,
        _ => mounts::at(path)?,
    };
    match there {
        // Mounted by a step that was cut off before it could be recorded.
        Some(mount) if mount.fstype == "tmpfs" => return Ok(()),
        Some(mount) => {
            return Err(io::Error::new(
                io::ErrorKind::ResourceBusy,
                format!("a file system of type {} is mounted there", mount.fstype),
            ));
        }
        None => {}
    }
    let size = size.map(|size| format!("size={size}"));
    let options: Vec<&str> = size.as_deref().into_iter().chain(more).collect();
    nix::mount::mount(
        Some("tmpfs"),
        path,
        Some("tmpfs"),
        MsFlags::empty(),
        Some(options.join(",").as_str()),
    )?;
    Ok(())
}

/// File systems that hold nothing once they are unmounted: those the agent mounts itself.
const OF_MEMORY: [&str; 2] = ["tmpfs", "hugetlbfs"];

/// Part of the agent at the path of a volume of its own; teardown tells it from mounts of somebody else over it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Own {
    /// A directory.
    Plain,
    /// A file system of memory.
    Mount,
    /// One of both.
    Unknown,
}

impl Own {
    /// Returns that of a volume. Most plugins have only one; an emptyDir is on disk or in memory.
    pub(super) fn of(seen: &State, key: &str, plugin: &str) -> Self {
        match (plugin, records::is_mount(seen, key)) {
            (CONFIG_MAP, _) | (EMPTY_DIR, Some(false)) => Self::Plain,
            (EMPTY_DIR, None) => Self::Unknown,
            _ => Self::Mount,
        }
    }
}

/// Removes a volume below the pod's directory. What the agent mounted at its very path is unmounted first; anything
/// else that is mounted there or below keeps it.
pub(super) fn tear_down(path: &Path, uid: &PodUid, own: Own) -> Result<(), VolumeError> {
    fail::fail_point!("volumemanager::tear_down::begun");
    let table = mounts::Table::read().map_err(io_error("look at volume", uid, path))?;
    let mounted = table
        .all_at(path)
        .map_err(io_error("look at volume", uid, path))?;
    match mounted.as_slice() {
        [] => {}
        [mount] if own != Own::Plain && OF_MEMORY.contains(&mount.fstype.as_str()) => {
            table
                .check_alone(path)
                .map_err(|error| VolumeError::InUse {
                    pod: uid.clone(),
                    path: path.to_owned(),
                    what: error.to_string(),
                })?;
            mounts::unmount_own(path).map_err(io_error("unmount volume", uid, path))?;
            fail::fail_point!("volumemanager::tear_down::unmounted");
        }
        [.., mount] => {
            return Err(VolumeError::InUse {
                pod: uid.clone(),
                path: path.to_owned(),
                what: format!(
                    "a file system of type {} is mounted there that this agent did not mount; unmount it",
                    mount.fstype
                ),
            });
        }
    }
    safety::remove_tree(path).map_err(io_error("remove volume", uid, path))?;
    fail::fail_point!("volumemanager::tear_down::removed");
    Ok(())
}

pub(super) fn make_dir(path: &Path, mode: u32) -> io::Result<()> {
    fs::create_dir_all(path)?;
    if !fs::symlink_metadata(path)?.is_dir() {
        return Err(io::Error::new(
            io::ErrorKind::NotADirectory,
            "a link is in its place",
        ));
    }
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}
