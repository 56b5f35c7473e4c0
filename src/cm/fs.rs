//! cgroupfs: what is mounted, making, setting and removing directories.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::CgroupError;
use crate::types::{causes, mountinfo};

/// Version of the machine's cgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CgroupVersion {
    /// One hierarchy per controller.
    V1 {
        /// The unified hierarchy is mounted beside them, without controllers.
        hybrid: bool,
    },
    /// The unified hierarchy alone.
    V2,
}

/// One mounted hierarchy.
#[derive(Clone, Debug)]
pub(super) struct Hierarchy {
    /// Mount point.
    pub(super) path: PathBuf,
    /// Its controllers; empty for named and for a hybrid machine's unified hierarchy.
    pub(super) controllers: BTreeSet<String>,
}

impl Hierarchy {
    pub(super) fn has(&self, controller: &str) -> bool {
        self.controllers.contains(controller)
    }
}

const REMOVE_TRIES: u32 = 50;
const REMOVE_PAUSE: Duration = Duration::from_millis(20);

/// Finds the hierarchies mounted at or below `mount`.
pub(super) fn discover(mount: &Path) -> Result<(CgroupVersion, Vec<Hierarchy>), CgroupError> {
    let table = fs::read(mountinfo::TABLE).map_err(CgroupError::io("read mounts of", mount))?;
    hierarchies(&table, mount)
}

/// The mounts of a table at or below `mount` that are seen: another mount at the same point hides those before it.
fn mounts<'a>(table: &'a [u8], mount: &Path) -> Vec<(PathBuf, mountinfo::Line<'a>)> {
    let mut found: Vec<(PathBuf, mountinfo::Line<'a>)> = Vec::new();
    for line in mountinfo::lines(table) {
        let point = mountinfo::path(line.point);
        if point.starts_with(mount) {
            found.retain(|(hidden, _)| *hidden != point);
            found.push((point, line));
        }
    }
    found
}

/// Order of the mounts of one hierarchy: at `mount` itself, at `unified` below it as on a hybrid machine, then the nearest one.
/// A program may have mounted it a second time, as for a container or a chroot.
fn rank(point: &Path, mount: &Path) -> (bool, bool, usize) {
    let is_hybrid = point == mount.join("unified");
    (point != mount, !is_hybrid, point.components().count())
}

/// The hierarchies of a mount table at or below `mount`.
fn hierarchies(table: &[u8], mount: &Path) -> Result<(CgroupVersion, Vec<Hierarchy>), CgroupError> {
    let mut seen = mounts(table, mount);
    // Of equals the first stays first.
    seen.sort_by_key(|(point, _)| rank(point, mount));
    let mut unified = None;
    let mut legacy: Vec<Hierarchy> = Vec::new();
    let mut devices: Vec<&[u8]> = Vec::new();
    for (point, line) in seen {
        match line.fstype {
            b"cgroup2" => unified = unified.or(Some(point)),
            // Mounts of one hierarchy have one number.
            b"cgroup" if !devices.contains(&line.device) => {
                devices.push(line.device);
                legacy.push(Hierarchy {
                    path: point,
                    controllers: mountinfo::text(line.super_options)
                        .split(',')
                        .filter(|o| !matches!(*o, "rw" | "ro" | "xattr") && !o.contains('='))
                        .map(str::to_owned)
                        .collect(),
                });
            }
            _ => {}
        }
    }
    // A v1 hierarchy that a program has mounted below the unified one, as for net_cls, makes no v1 machine of it.
    let is_unified = unified.as_deref() == Some(mount);
    match (unified, is_unified || legacy.is_empty()) {
        (Some(point), true) => {
            let file = point.join("cgroup.controllers");
            let controllers =
                fs::read_to_string(&file).map_err(CgroupError::io("read controllers of", &file))?;
            let hierarchy = Hierarchy {
                path: point,
                controllers: controllers.split_whitespace().map(str::to_owned).collect(),
            };
            Ok((CgroupVersion::V2, vec![hierarchy]))
        }
        (unified, _) if !legacy.is_empty() => {
            let hybrid = unified.is_some();
            legacy.extend(unified.map(|path| Hierarchy {
                path,
                controllers: BTreeSet::new(),
            }));
            Ok((CgroupVersion::V1 { hybrid }, legacy))
        }
        _ => Err(CgroupError::NotMounted {
            mount: mount.to_owned(),
            reason:
                "no cgroup file system is mounted there; mount one, or set cgroupsPerQOS: false"
                    .to_owned(),
        }),
    }
}

/// Makes `dir` and its parents below `top`; on v2 enables the controllers on the way.
pub(super) fn make(top: &Path, dir: &Path, version: CgroupVersion) -> Result<(), CgroupError> {
    let below = dir.strip_prefix(top).unwrap_or(Path::new(""));
    let mut at = top.to_owned();
    for part in below.components() {
        if version == CgroupVersion::V2 {
            enable_controllers(&at)?;
        }
        at.push(part);
        match fs::create_dir(&at) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            other => other.map_err(CgroupError::io("create", &at))?,
        }
    }
    Ok(())
}

fn enable_controllers(dir: &Path) -> Result<(), CgroupError> {
    let read = |file: &str| {
        let path = dir.join(file);
        fs::read_to_string(&path).map_err(CgroupError::io("read", &path))
    };
    let available = read("cgroup.controllers")?;
    let enabled = read("cgroup.subtree_control")?;
    let enabled: BTreeSet<&str> = enabled.split_whitespace().collect();
    let wanted: Vec<String> = available
        .split_whitespace()
        .filter(|c| ["cpu", "cpuset", "memory", "pids", "io", "hugetlb"].contains(c))
        .filter(|c| !enabled.contains(c))
        .map(|c| format!("+{c}"))
        .collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let file = dir.join("cgroup.subtree_control");
    each_if_not_all(&wanted, |controllers| write(&file, controllers))
}

/// Controllers without which pods cannot be limited.
const NEEDED: [&str; 2] = ["+cpu", "+memory"];

/// Enables all controllers at once. If the kernel refuses, which it does for the sake of a single one, enables each by itself,
/// and goes on without those that pods can do without. As `CreateCgroupPath` of libcontainer.
fn each_if_not_all(
    wanted: &[String],
    enable: impl Fn(&str) -> Result<(), CgroupError>,
) -> Result<(), CgroupError> {
    if enable(&wanted.join(" ")).is_ok() {
        return Ok(());
    }
    for one in wanted {
        match enable(one) {
            Ok(()) => {}
            Err(error) if NEEDED.contains(&one.as_str()) => {
                return Err(CgroupError::Controller {
                    name: one.trim_start_matches('+').to_owned(),
                    source: Box::new(error),
                });
            }
            Err(error) => tracing::debug!(
                controller = one.as_str(),
                error = causes(&error),
                "the kernel does not enable a controller of cgroups"
            ),
        }
    }
    Ok(())
}

/// Writes `value` unless it is there already.
pub(super) fn set(file: &Path, value: &str) -> Result<(), CgroupError> {
    if fs::read_to_string(file).is_ok_and(|now| now.trim() == value) {
        return Ok(());
    }
    write(file, value)
}

fn write(file: &Path, value: &str) -> Result<(), CgroupError> {
    // Never created: a file that is not there means a controller that is not there.
    fs::OpenOptions::new()
        .write(true)
        .truncate(true)
        .open(file)
        .and_then(|mut f| f.write_all(value.as_bytes()))
        .map_err(CgroupError::io("set", file))
}

/// Names of the child cgroups; none when `dir` is not there.
pub(super) fn children(dir: &Path) -> Result<Vec<OsString>, CgroupError> {
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(CgroupError::io("list", dir))?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(CgroupError::io("list", dir))?;
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            names.push(entry.file_name());
        }
    }
    Ok(names)
}

/// Removes a cgroup with all below it, killing what is inside.
pub(super) fn remove_tree(dir: &Path) -> Result<(), CgroupError> {
    let mut tries = 0;
    loop {
        match remove_once(dir) {
            Err(CgroupError::Io { source, .. })
                if source.raw_os_error() == Some(Errno::EBUSY as i32) =>
            {
                let pids = processes(dir)?;
                if tries >= REMOVE_TRIES {
                    return Err(CgroupError::Busy {
                        path: dir.to_owned(),
                        pids,
                    });
                }
                kill_all(dir, &pids);
                tries += 1;
                // The kernel takes a process out of its cgroup only when it has been reaped.
                std::thread::sleep(REMOVE_PAUSE);
            }
            other => return other,
        }
    }
}

fn remove_once(dir: &Path) -> Result<(), CgroupError> {
    for child in children(dir)? {
        remove_once(&dir.join(child))?;
    }
    match fs::remove_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(CgroupError::io("remove", dir)),
    }
}

/// The processes in a cgroup and below; none when `dir` is not there.
pub(super) fn processes(dir: &Path) -> Result<Vec<i32>, CgroupError> {
    let mut pids: Vec<i32> = match fs::read_to_string(dir.join("cgroup.procs")) {
        Ok(text) => text.lines().filter_map(|l| l.trim().parse().ok()).collect(),
        // Gone, or a threaded cgroup.
        Err(_) => Vec::new(),
    };
    for child in children(dir)? {
        pids.extend(processes(&dir.join(child))?);
    }
    Ok(pids)
}

fn kill_all(dir: &Path, pids: &[i32]) {
    let own = i32::try_from(std::process::id()).unwrap_or(0);
    // 0 stands for a process of another PID namespace.
    for pid in pids.iter().copied().filter(|pid| *pid > 1 && *pid != own) {
        match kill(Pid::from_raw(pid), Signal::SIGKILL) {
            Ok(()) => {
                tracing::warn!(pid, cgroup = %dir.display(), "killed a process left in a pod's cgroup")
            }
            Err(Errno::ESRCH) => {}
            Err(error) => {
                tracing::warn!(pid, %error, "cannot kill a process left in a pod's cgroup")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_controller_that_the_kernel_refuses_keeps_none_of_the_others_from_pods() {
        let wanted = ["+cpu", "+memory", "+hugetlb", "+io"].map(str::to_owned);
        for (refused, enabled, error) in [
            ("+none", vec!["+cpu +memory +hugetlb +io"], None),
            ("+hugetlb", vec!["+cpu", "+memory", "+io"], None),
            ("+cpu", vec![], Some("cpu")),
            ("+memory", vec!["+cpu"], Some("memory")),
        ] {
            let written = std::cell::RefCell::new(Vec::new());
            let result = each_if_not_all(&wanted, |controllers| {
                if controllers.split(' ').any(|one| one == refused) {
                    let invalid = io::Error::from_raw_os_error(Errno::EINVAL as i32);
                    return Err(CgroupError::io("set", Path::new("/c"))(invalid));
                }
                written.borrow_mut().push(controllers.to_owned());
                Ok(())
            });
            assert_eq!(written.into_inner(), enabled, "{refused}");
            match (result, error) {
                (Ok(()), None) => {}
                (Err(CgroupError::Controller { name, .. }), Some(wanted)) => {
                    assert_eq!(name, wanted);
                }
                (result, _) => panic!("{refused}: {result:?}"),
            }
        }
    }

    #[test]
    fn hierarchies_are_found_beside_mount_points_that_are_not_utf8() {
        let table = b"20 1 8:1 / /mnt/caf\xe9 rw - ext4 /dev/vda rw\n\
            33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n";
        let (version, found) = hierarchies(table, Path::new("/sys/fs/cgroup")).unwrap();
        assert_eq!(version, CgroupVersion::V1 { hybrid: false });
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].path, Path::new("/sys/fs/cgroup/cpu,cpuacct"));
        assert!(found[0].has("cpu") && found[0].has("cpuacct") && !found[0].has("rw"));
    }

    #[test]
    fn a_v1_hierarchy_below_the_unified_one_makes_no_v1_machine_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let mount = dir.path().to_str().unwrap();
        fs::write(dir.path().join("cgroup.controllers"), "cpu memory\n").unwrap();
        let table = format!(
            "30 1 0:26 / {mount} rw - cgroup2 cgroup2 rw\n31 30 0:27 / {mount}/net_cls rw - cgroup net_cls rw,net_cls\n"
        );
        let (version, found) = hierarchies(table.as_bytes(), dir.path()).unwrap();
        assert_eq!(version, CgroupVersion::V2);
        assert!(found.len() == 1 && found[0].has("memory"));
    }

    #[test]
    fn of_several_mounts_of_a_hierarchy_the_one_at_its_usual_place_counts() {
        let at = |dir: &Path, point: &str| dir.join(point).display().to_string();
        // Mounts in the table's order, and the one that is used.
        for (what, mounts, wanted) in [
            ("a second one below", vec!["", "machine/root"], ""),
            ("a second one before", vec!["machine/root", ""], ""),
            ("hybrid", vec!["a", "unified", "b/c"], "unified"),
            ("nothing usual", vec!["machine/root", "x", "y"], "x"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let mut table = String::new();
            for (number, point) in mounts.iter().enumerate() {
                fs::create_dir_all(dir.path().join(point)).unwrap();
                let controllers = dir.path().join(point).join("cgroup.controllers");
                fs::write(controllers, "cpu memory\n").unwrap();
                let point = at(dir.path(), point.trim_end_matches('/'));
                let point = point.trim_end_matches('/');
                table += &format!("{number} 1 0:26 / {point} rw - cgroup2 none rw\n");
            }
            let (version, found) = hierarchies(table.as_bytes(), dir.path()).unwrap();
            assert_eq!(version, CgroupVersion::V2, "{what}");
            assert_eq!(found[0].path, dir.path().join(wanted), "{what}");
            assert_eq!(found.len(), 1, "{what}");
        }
    }

    #[test]
    fn a_second_mount_of_a_v1_hierarchy_and_one_that_is_hidden_do_not_count() {
        let table = b"1 0 0:30 / /cg/machine/root/cpu rw - cgroup cgroup rw,cpu\n\
            2 0 0:30 / /cg/cpu rw - cgroup cgroup rw,cpu\n\
            3 0 0:31 / /cg/memory rw - cgroup cgroup rw,memory\n\
            4 0 0:26 / /cg rw - cgroup2 none rw\n\
            5 0 0:40 / /cg rw - tmpfs tmpfs rw\n";
        let (version, found) = hierarchies(table, Path::new("/cg")).unwrap();
        assert_eq!(version, CgroupVersion::V1 { hybrid: false });
        let paths: Vec<&Path> = found.iter().map(|h| h.path.as_path()).collect();
        assert_eq!(paths, [Path::new("/cg/cpu"), Path::new("/cg/memory")]);
    }

    #[test]
    fn cgroups_are_removed_whatever_their_containers_call_what_is_below() {
        use std::os::unix::ffi::OsStrExt as _;
        let dir = tempfile::tempdir().unwrap();
        let pod = dir.path().join("pod");
        let below = pod.join(std::ffi::OsStr::from_bytes(b"caf\xe9"));
        fs::create_dir_all(&below).unwrap();
        fs::write(below.join("cgroup.procs"), "7\n").unwrap();
        assert_eq!(processes(&pod).unwrap(), [7]);
        fs::remove_file(below.join("cgroup.procs")).unwrap();
        remove_tree(&pod).unwrap();
        assert!(!pod.exists());
    }

    #[test]
    fn setting_a_file_that_is_not_there_fails_and_makes_none() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("cpu.shares");
        assert!(set(&file, "2").is_err());
        assert!(!file.exists());
        fs::write(&file, "2\n").unwrap();
        set(&file, "2").unwrap();
        assert_eq!(
            fs::read_to_string(&file).unwrap(),
            "2\n",
            "an equal value is not written"
        );
    }

    #[test]
    fn a_place_without_cgroups_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = discover(dir.path()).unwrap_err();
        assert!(
            error.to_string().contains("no cgroup file system"),
            "{error}"
        );
    }

    #[test]
    fn a_read_only_cgroupfs_says_so() {
        let error =
            CgroupError::io("create", Path::new("/x"))(io::ErrorKind::ReadOnlyFilesystem.into());
        assert!(error.to_string().contains("read-only"), "{error}");
    }
}
