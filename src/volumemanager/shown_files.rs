//! Mounts of the agent's own files that containers have left on the node.
//!
//! The runtime mounts a container's termination message file at `terminationMessagePath`. If that is in a volume that the
//! container has with propagation `Bidirectional`, the node has the mount as well, and keeps it when the container has ended. The
//! next attempt would get it with the volume and mount the file over it, in each copy. So it is unmounted before the
//! next start, and before the pod's volumes are. The same holds for `/etc/hosts`, which all containers of a pod share, and for the
//! `resolv.conf` and `hostname` that the runtime mounts beside it, in a volume at `/etc`.
//!
//! **Invariant:** only mounts of files in the pod's own directory are unmounted, and those of a sandbox's files in the pod's volumes. A place is opened without following links, since
//! the pod may change what leads to it, and what is found there must be one of the mounts that the table shows.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{OFlag, open, openat};
use nix::mount::{MntFlags, umount2};
use nix::sys::stat::Mode;

use super::error::{VolumeError, io_error};
use super::mounts::{Mount, Table};
use super::{VolumeManager, run_blocking};
use crate::core::state::PodRecord;
use crate::core::volume_mounts::shows_mounts_to_node;
use crate::types::PodUid;
use crate::types::containers::containers_of;

/// Directory of a pod's files that are mounted into containers, one for each container.
const FILES: &str = "containers";
/// Hosts file of a pod, mounted at `/etc/hosts` of each container.
const HOSTS: &str = "etc-hosts";
/// Directory of a pod's volumes.
const VOLUMES: &str = "volumes";
/// Files that runtimes mount into containers from a sandbox's directory.
const SANDBOX_FILES: [&str; 2] = ["resolv.conf", "hostname"];
/// Directories in which containerd and CRI-O keep those of sandboxes.
const SANDBOXES: [&str; 2] = ["sandboxes", "overlay-containers"];
const VERB: &str = "unmount what containers have shown of the files in";

impl VolumeManager {
    /// Unmounts what earlier attempts of a container have left on the node of the files that the agent mounted into
    /// them. None of them may run. Mounts of others that cover them stay, and keep them. It goes on when the future is dropped.
    ///
    /// # Errors
    /// When the mount table cannot be read, or one cannot be unmounted; the rest was tried.
    pub async fn unmount_shown_files(
        &self,
        uid: &PodUid,
        container: &str,
    ) -> Result<(), VolumeError> {
        let dir = self.pod_dir(uid).join(FILES).join(container);
        self.unmount_shown(uid, vec![dir], None).await
    }

    /// As [`VolumeManager::unmount_shown_files`], of the files that all containers of a pod share: its hosts file, and those of its
    /// sandbox. No container may run that shows its mounts to the node.
    ///
    /// # Errors
    /// As [`VolumeManager::unmount_shown_files`].
    pub async fn unmount_shown_shared(&self, uid: &PodUid) -> Result<(), VolumeError> {
        let dir = self.pod_dir(uid);
        self.unmount_shown(uid, vec![dir.join(HOSTS)], Some(dir.join(VOLUMES)))
            .await
    }

    /// As [`VolumeManager::unmount_shown_files`], of all containers of a pod, with so much patience.
    pub(super) async fn unmount_all_shown(
        &self,
        uid: &PodUid,
        patience: Duration,
    ) -> Result<(), VolumeError> {
        let dir = self.pod_dir(uid);
        let files = vec![dir.join(FILES), dir.join(HOSTS)];
        let unmounted = self.unmount_shown(uid, files, Some(dir.join(VOLUMES)));
        let done = tokio::time::timeout(patience, unmounted).await;
        done.unwrap_or_else(|_| {
            Err(VolumeError::Slow {
                pod: uid.clone(),
                volumes: "files that containers had in them".to_owned(),
                seconds: patience.as_secs(),
            })
        })
    }

    /// Returns whether a pod may have left mounts on the node: its spec requests that, or is unknown.
    pub(super) fn may_show_files(&self, uid: &PodUid) -> bool {
        let seen = self.store.snapshot();
        let record = seen.record::<PodRecord>(uid.as_str());
        record.is_none_or(|record| {
            containers_of(&record.pod).any(|spec| shows_mounts_to_node(&spec.container))
        })
    }

    /// Unmounts every mount of these files and directories, and of files of sandboxes in `volumes`.
    async fn unmount_shown(
        &self,
        uid: &PodUid,
        mut files: Vec<PathBuf>,
        volumes: Option<PathBuf>,
    ) -> Result<(), VolumeError> {
        let (of, source) = (uid.clone(), self.mounts.clone());
        let dir = self.pod_dir(uid);
        let count = run_blocking(move || {
            let mut unmounted = || {
                files.retain(|path| path.exists());
                if files.is_empty() && !volumes.as_ref().is_some_and(|dir| dir.exists()) {
                    return Ok(0);
                }
                let table = source.read()?;
                let mut shown = Vec::new();
                for path in &files {
                    shown.extend(table.rooted_in(path)?);
                }
                if let Some(volumes) = &volumes {
                    shown.extend(table.sandbox_files_in(volumes)?);
                }
                unmount(&shown)
            };
            unmounted().map_err(io_error(VERB, &of, &dir))
        })
        .await?;
        if count > 0 {
            tracing::info!(pod = %uid, count, "unmounted files that containers had left on the node");
        }
        Ok(())
    }
}

impl Table {
    /// Mounts of files of sandboxes below a directory of the agent's own.
    fn sandbox_files_in(&self, dir: &Path) -> io::Result<Vec<&Mount>> {
        let dir = match fs::canonicalize(dir) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        let all = self.all();
        Ok(all
            .filter(|m| m.point.starts_with(&dir) && is_of_sandbox(&m.root))
            .collect())
    }
}

/// Returns whether a path is a file that a runtime keeps for a sandbox: `…/sandboxes/<id>/hostname`, or
/// `…/overlay-containers/<id>/userdata/hostname`. The kernel adds `//deleted` to a deleted one.
fn is_of_sandbox(root: &Path) -> bool {
    let is_file = |name: &OsStr| SANDBOX_FILES.iter().any(|file| *file == name);
    let is_dir = |name: &OsStr| SANDBOXES.iter().any(|dir| *dir == name);
    let names: Vec<&OsStr> = root.iter().filter(|name| *name != "deleted").collect();
    let [.., before, directory, _, file] = names.as_slice() else {
        return false;
    };
    is_file(file) && (is_dir(before) || is_dir(directory))
}

/// Unmounts each of these mounts that no other mount covers; returns how many there were.
fn unmount(shown: &[&Mount]) -> io::Result<usize> {
    let ids: BTreeSet<&str> = shown.iter().map(|m| m.id.as_str()).collect();
    let points: BTreeSet<&Path> = shown.iter().map(|m| m.point.as_path()).collect();
    let (mut count, mut failed) = (0, None);
    for point in points {
        // Copies go with the one they are copies of: it is never tried more often than there are mounts.
        for _ in 0..ids.len() {
            match unmount_top(point, &ids) {
                Ok(true) => count += 1,
                Ok(false) => break,
                Err(error) => {
                    let text = format!("{}: {error}", point.display());
                    failed.get_or_insert(io::Error::new(error.kind(), text));
                    break;
                }
            }
        }
    }
    failed.map_or(Ok(count), Err)
}

/// Unmounts what is mounted on top at a path if it is one of these mounts. Says whether it was.
fn unmount_top(point: &Path, ids: &BTreeSet<&str>) -> io::Result<bool> {
    let top = match open_place(point) {
        Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => return Ok(false),
        other => other?,
    };
    if !ids.contains(mount_of(&top)?.as_str()) {
        return Ok(false);
    }
    // By the handle, not by its name: lazily, for the handle uses it.
    let handle = format!("/proc/self/fd/{}", top.as_raw_fd());
    umount2(handle.as_str(), MntFlags::MNT_DETACH)?;
    Ok(true)
}

/// Opens what is at an absolute path, and follows no link.
fn open_place(point: &Path) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let mut place = open("/", flags, Mode::empty())?;
    for component in point.components() {
        if let Component::Normal(name) = component {
            place = openat(&place, name, flags, Mode::empty())?;
        }
    }
    Ok(place)
}

/// Number of the mount that a handle leads to.
fn mount_of(handle: &OwnedFd) -> io::Result<String> {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", handle.as_raw_fd()))?;
    let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:"));
    id.map(|id| id.trim().to_owned())
        .ok_or_else(|| io::Error::other("the kernel does not say which mount it is on"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(id: &str, root: &Path, point: &str) -> Mount {
        Mount {
            id: id.to_owned(),
            parent: "1".to_owned(),
            device: "8:1".to_owned(),
            root: root.to_owned(),
            point: point.into(),
            ..Mount::default()
        }
    }

    #[test]
    fn mounts_of_files_of_a_container_are_found_wherever_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        let files = dir.join("containers/c");
        fs::create_dir_all(&files).unwrap();
        let mut elsewhere = mount("5", &files.join("message"), "/e");
        elsewhere.device = "8:2".to_owned();
        let table = Table::of(vec![
            Mount {
                parent: "0".to_owned(),
                ..mount("1", Path::new("/"), "/")
            },
            mount("2", &files.join("message"), "/volume/message"),
            mount("3", &files.join("00000001//deleted"), "/volume/message"),
            mount("4", &dir.join("containers/d/message"), "/other"),
            elsewhere,
            mount("6", &dir.join("containers"), "/whole"),
        ]);
        let found = table.rooted_in(&files).unwrap();
        let ids: Vec<&str> = found.iter().map(|m| m.id.as_str()).collect();
        assert_eq!(ids, ["2", "3"]);
        assert!(table.rooted_in(&dir.join("none")).unwrap().is_empty());
    }

    #[test]
    fn files_of_sandboxes_are_known_by_their_places() {
        for (root, is) in [
            (
                "/var/lib/containerd/io.containerd.grpc.v1.cri/sandboxes/ab12/resolv.conf",
                true,
            ),
            ("/x/sandboxes/ab12/hostname//deleted", true),
            (
                "/containers/storage/overlay-containers/ab12/userdata/hostname",
                true,
            ),
            ("/x/sandboxes/ab12/shm", false),
            ("/srv/sites/hostname", false),
            ("/etc/resolv.conf", false),
            ("/", false),
        ] {
            assert_eq!(is_of_sandbox(Path::new(root)), is, "{root}");
        }
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        let inside = dir.join("kubernetes.io~empty-dir/etc/hostname");
        let root = Path::new("/x/sandboxes/ab12/hostname");
        let table = Table::of(vec![
            mount("1", root, &inside.display().to_string()),
            mount("2", root, "/elsewhere/hostname"),
            mount(
                "3",
                Path::new("/own/hostname"),
                &inside.display().to_string(),
            ),
        ]);
        let found = table.sandbox_files_in(&dir).unwrap();
        let ids: Vec<&str> = found.iter().map(|m| m.id.as_str()).collect();
        assert_eq!(ids, ["1"]);
    }

    #[test]
    fn a_place_that_a_link_leads_to_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        fs::write(dir.join("file"), "").unwrap();
        std::os::unix::fs::symlink(&dir, dir.join("link")).unwrap();
        let here = mount_of(&open_place(&dir.join("file")).unwrap()).unwrap();
        assert_eq!(here, mount_of(&open_place(&dir).unwrap()).unwrap());
        assert!(open_place(&dir.join("link/file")).is_err());
        let none = BTreeSet::from(["none"]);
        for name in ["file", "link/file", "none"] {
            assert!(!unmount_top(&dir.join(name), &none).unwrap(), "{name}");
        }
    }
}
