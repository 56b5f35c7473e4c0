//! Log directories of pods: the pod's directory below `/var/log/pods`, and the directories of its containers in it.
//!
//! The runtime writes the logs; this module only makes and removes directories. Their files, and the links to them,
//! belong to [`attempt_files`].
//!
//! Functions that access the disk block; async callers go through [`beside`].
//!
//! **Invariant:** a pod may have the logs of the node mounted and put a link in place of a directory. The roots may be
//! links. No link below them is followed: directories are made, opened, changed and emptied through a handle of their
//! parent directory.

use std::fs;
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use k8s_openapi::api::core::v1::Pod;
use nix::errno::Errno;
use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::{Mode, fchmod, mkdirat};

use super::attempt_files;
use super::node_context::{NodeContext, is_path_component};
use crate::types::containers::containers_of;
use crate::types::runtime::{ContainerStatus, PodStatus};
use crate::types::{PodExt, PodUid, blocking};

/// A log directory or link could not be made or removed.
#[derive(Debug, thiserror::Error)]
#[error("{verb} {}: {source}", path.display())]
pub struct LogError {
    verb: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

pub(super) fn error<E: Into<io::Error>>(
    verb: &'static str,
    path: &Path,
) -> impl FnOnce(E) -> LogError {
    let path = path.to_owned();
    move |source| LogError {
        verb,
        path,
        source: source.into(),
    }
}

/// Does something with logs on a thread where it may block. It goes on when the future is dropped.
///
/// # Errors
/// Those of `work`, or that the agent ends.
pub async fn beside<T: Send + 'static>(
    ctx: &NodeContext,
    work: impl FnOnce(&NodeContext) -> Result<T, LogError> + Send + 'static,
) -> Result<T, LogError> {
    let of = ctx.clone();
    match blocking::run(move || work(&of)).await {
        Ok(done) => done,
        Err(e) => Err(error("finish work in", &ctx.pod_log_root)(
            io::Error::other(e),
        )),
    }
}

/// Returns the standard path of a container's log: `<root>/<namespace>_<name>_<uid>/<container>/<attempt>.log`.
pub fn file_by_rule(
    root: &Path,
    (namespace, name, uid): (&str, &str, &PodUid),
    container: &str,
    attempt: u32,
) -> PathBuf {
    root.join(format!("{namespace}_{name}_{uid}"))
        .join(attempt_files::log_path(container, attempt))
}

/// Returns the path of a container's log: the one that the runtime reports, else the standard path.
pub fn file_of(root: &Path, pod: &PodStatus, container: &ContainerStatus) -> PathBuf {
    if container.log_path.is_empty() {
        let names = (pod.namespace.as_str(), pod.name.as_str(), &pod.uid);
        file_by_rule(root, names, &container.name, container.attempt)
    } else {
        PathBuf::from(&container.log_path)
    }
}

/// Returns a log that has at most `most` bytes, and `None` for a longer one. Nothing below the root is followed. Blocking.
///
/// # Errors
/// When it cannot be read, or is no file below the root.
pub fn short_log(root: &Path, log: &Path, most: usize) -> Result<Option<Vec<u8>>, LogError> {
    let failed = error("read log", log);
    let read = || -> io::Result<Option<Vec<u8>>> {
        let below = log.strip_prefix(root).map_err(io::Error::other)?;
        let dir = open_below(root, below.parent())?;
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        let name = below.file_name().unwrap_or_default();
        let file = fs::File::from(openat(&dir, name, flags, Mode::empty())?);
        if !file.metadata()?.is_file() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut log = Vec::new();
        let limit = u64::try_from(most).unwrap_or(u64::MAX);
        file.take(limit.saturating_add(1)).read_to_end(&mut log)?;
        Ok((log.len() <= most).then_some(log))
    };
    read().map_err(failed)
}

/// Makes the pod's log directory, and one per container, which the runtime does not make itself.
///
/// # Errors
/// When one cannot be made, or a link or file is in its place.
pub fn create_pod_log_dir(ctx: &NodeContext, pod: &Pod) -> Result<PathBuf, LogError> {
    let root = &ctx.pod_log_root;
    let dir = ctx.pod_log_dir(pod.namespace(), pod.name(), &pod.uid());
    if !is_dir_of_pod(ctx, &dir) {
        let no_name = io::Error::from(io::ErrorKind::InvalidInput);
        return Err(error("create log directory", &dir)(no_name));
    }
    fs::create_dir_all(root).map_err(error("create log directory", root))?;
    let opened = open(root, directory(), Mode::empty());
    let opened = opened.map_err(error("open log directory", root))?;
    let of_pod = make_dir(&opened, &dir)?;
    for spec in containers_of(pod) {
        let name = &spec.container.name;
        if is_path_component(name) {
            make_dir(&of_pod, &dir.join(name))?;
        }
    }
    Ok(dir)
}

/// Makes the directory at `path` in the one that holds it, if need be, and sets its mode.
fn make_dir(parent: &OwnedFd, path: &Path) -> Result<OwnedFd, LogError> {
    let mode = Mode::from_bits_truncate(0o755);
    let name = path.file_name().unwrap_or_default();
    match mkdirat(parent, name, mode) {
        Ok(()) | Err(Errno::EEXIST) => {}
        Err(e) => return Err(error("create log directory", path)(e)),
    }
    let opened = openat(parent, name, directory() | OFlag::O_NOFOLLOW, Mode::empty());
    let opened = opened.map_err(error("open log directory", path))?;
    fchmod(&opened, mode).map_err(error("set mode of log directory", path))?;
    Ok(opened)
}

fn directory() -> OFlag {
    OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC
}

/// Returns whether a path can be the log directory of a pod.
fn is_dir_of_pod(ctx: &NodeContext, dir: &Path) -> bool {
    let component = dir.file_name().map(|n| n.to_string_lossy().into_owned());
    dir.parent() == Some(&ctx.pod_log_root) && component.is_some_and(|c| is_path_component(&c))
}

/// Opens a directory below a root. Only the root may be a link.
pub(super) fn open_below(root: &Path, below: Option<&Path>) -> nix::Result<OwnedFd> {
    let mut dir = open(root, directory(), Mode::empty())?;
    for component in below.unwrap_or(Path::new("")).components() {
        let Component::Normal(name) = component else {
            return Err(Errno::ENOENT);
        };
        dir = openat(&dir, name, directory() | OFlag::O_NOFOLLOW, Mode::empty())?;
    }
    Ok(dir)
}

pub(super) fn remove_file(path: &Path) -> Result<(), LogError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(error("remove", path)),
    }
}

/// Removes the log directory of a pod that is gone.
///
/// # Errors
/// When it cannot be removed.
pub fn remove_pod_logs(
    ctx: &NodeContext,
    namespace: &str,
    name: &str,
    uid: &PodUid,
) -> Result<(), LogError> {
    let dir = ctx.pod_log_dir(namespace, name, uid);
    if !is_dir_of_pod(ctx, &dir) {
        return Ok(());
    }
    remove_tree(&dir)
}

/// Removes log directories of pods that are not `known`; returns how many, and what stayed although it was to go. A directory
/// that is not named `<namespace>_<name>_<uid>` is left alone. One that cannot be removed does not keep the rest.
///
/// # Errors
/// When the root cannot be listed.
pub fn remove_orphan_pod_logs(
    ctx: &NodeContext,
    known: &dyn Fn(&PodUid) -> bool,
) -> Result<(usize, Vec<LogError>), LogError> {
    let root = &ctx.pod_log_root;
    let entries = match fs::read_dir(root) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok((0, Vec::new())),
        other => other.map_err(error("list log directory", root))?,
    };
    let (mut removed, mut stayed) = (0, Vec::new());
    for entry in entries {
        let entry = entry.map_err(error("list log directory", root))?;
        let name = entry.file_name();
        let Some(uid) = name.to_str().and_then(uid_of_log_dir) else {
            continue;
        };
        let is_dir = entry.file_type().is_ok_and(|t| t.is_dir());
        if is_dir && !known(&uid) {
            match remove_tree(&entry.path()) {
                Ok(()) => removed += 1,
                Err(error) => stayed.push(error),
            }
        }
    }
    Ok((removed, stayed))
}

fn uid_of_log_dir(name: &str) -> Option<PodUid> {
    let mut parts = name.split('_');
    let (Some(_), Some(_), Some(uid), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return None;
    };
    (!uid.is_empty()).then(|| PodUid::new(uid))
}

fn remove_tree(dir: &Path) -> Result<(), LogError> {
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(error("remove log directory", dir)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;
    use serde_json::json;

    struct Fixture {
        _dir: tempfile::TempDir,
        ctx: NodeContext,
        pod: Pod,
    }

    fn fixture() -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let mut ctx = NodeContext::new("n", dir.path());
        ctx.pod_log_root = dir.path().join("pods-logs");
        ctx.container_log_root = dir.path().join("containers-logs");
        let pod = serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "shop", "uid": "u1"},
            "spec": {
                "initContainers": [{"name": "i"}],
                "containers": [{"name": "c"}],
                "ephemeralContainers": [{"name": "e"}],
            },
        }))
        .unwrap();
        Fixture {
            _dir: dir,
            ctx,
            pod,
        }
    }

    #[test]
    fn directories_of_all_containers_are_made_and_go_with_their_pod() {
        let Fixture { ctx, pod, _dir } = fixture();
        let dir = create_pod_log_dir(&ctx, &pod).unwrap();
        assert_eq!(dir, ctx.pod_log_root.join("shop_web_u1"));
        for container in ["i", "c", "e"] {
            assert!(dir.join(container).is_dir(), "{container}");
        }
        assert_eq!(remove_orphan_pod_logs(&ctx, &|_| true).unwrap().0, 0);
        assert_eq!(remove_orphan_pod_logs(&ctx, &|_| false).unwrap().0, 1);
        assert!(!dir.exists());
    }

    #[test]
    fn the_logs_of_a_pod_are_not_removed_through_a_link() {
        let Fixture { ctx, pod, _dir } = fixture();
        let outside = outside(&ctx);
        let dir = create_pod_log_dir(&ctx, &pod).unwrap();
        fs::remove_dir(dir.join("c")).unwrap();
        symlink(&outside, dir.join("c")).unwrap();
        remove_pod_logs(&ctx, "shop", "web", &PodUid::new("u1")).unwrap();
        assert!(!dir.exists());
        untouched(&outside);
    }

    /// A directory that must stay as it is, with what is in it.
    fn outside(ctx: &NodeContext) -> PathBuf {
        let outside = ctx.root_dir.join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("1.log"), "precious").unwrap();
        fs::set_permissions(&outside, fs::Permissions::from_mode(0o700)).unwrap();
        outside
    }

    fn untouched(outside: &Path) {
        let mode = fs::metadata(outside).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        let names = fs::read_dir(outside).unwrap();
        let names: Vec<_> = names.map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["1.log"]);
    }

    #[test]
    fn a_link_in_place_of_a_log_directory_is_not_followed() {
        let Fixture { ctx, pod, _dir } = fixture();
        let outside = outside(&ctx);
        let logs = ctx.pod_log_root.join("shop_web_u1");
        fs::create_dir_all(&ctx.pod_log_root).unwrap();
        symlink(&outside, &logs).unwrap();
        assert!(create_pod_log_dir(&ctx, &pod).is_err(), "of the pod");
        untouched(&outside);
        fs::remove_file(&logs).unwrap();
        fs::create_dir(&logs).unwrap();
        symlink(&outside, logs.join("c")).unwrap();
        assert!(create_pod_log_dir(&ctx, &pod).is_err(), "of a container");
        untouched(&outside);
    }

    #[test]
    fn only_a_short_log_below_the_root_is_read() {
        let Fixture { ctx, pod, _dir } = fixture();
        let dir = create_pod_log_dir(&ctx, &pod).unwrap().join("c");
        let read = |name: &str| short_log(&ctx.pod_log_root, &dir.join(name), 4);
        fs::write(dir.join("0.log"), "1234").unwrap();
        fs::write(dir.join("1.log"), "12345").unwrap();
        symlink(outside(&ctx).join("1.log"), dir.join("2.log")).unwrap();
        assert_eq!(read("0.log").unwrap().as_deref(), Some(&b"1234"[..]));
        assert_eq!(read("1.log").unwrap(), None);
        for name in ["2.log", "3.log", ".", "../../../outside/1.log"] {
            assert!(read(name).is_err(), "{name}");
        }
    }

    #[test]
    fn the_root_of_the_logs_may_be_a_link() {
        let Fixture { ctx, pod, _dir } = fixture();
        let disk = ctx.root_dir.join("disk");
        fs::create_dir(&disk).unwrap();
        symlink(&disk, &ctx.pod_log_root).unwrap();
        let dir = create_pod_log_dir(&ctx, &pod).unwrap();
        assert!(disk.join("shop_web_u1/c").is_dir());
        let mode = fs::metadata(&dir).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o755);
    }

    #[test]
    fn orphan_logs_of_other_shapes_are_left() {
        let fixture = fixture();
        let ctx = &fixture.ctx;
        for name in ["a_b", "a_b_c_d", "plain"] {
            fs::create_dir_all(ctx.pod_log_root.join(name)).unwrap();
        }
        assert_eq!(remove_orphan_pod_logs(ctx, &|_| false).unwrap().0, 0);
    }
}
