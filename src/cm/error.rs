//! Errors of cgroups.

use std::io;
use std::path::{Path, PathBuf};

use super::systemd::SystemdError;
use crate::kuberuntime::resources::QuantityError;
use crate::types::PodUid;

/// A cgroup could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// There is no cgroup file system.
    #[error("find cgroups below {}: {reason}", mount.display())]
    NotMounted {
        /// Mount point that was searched.
        mount: PathBuf,
        /// Description of the error, with its remedy.
        reason: String,
    },
    /// Controllers that are needed are not there.
    #[error("use cgroups below {}: controllers {} are missing; enable them on the kernel command line, or set cgroupsPerQOS: false", mount.display(), missing.join(", "))]
    MissingControllers {
        /// The mount.
        mount: PathBuf,
        /// Their names.
        missing: Vec<String>,
    },
    /// The kernel does not enable a controller that it has.
    #[error(
        "enable controller {name} of cgroups; processes with real-time scheduling keep the kernel from enabling cpu (rtkit-daemon starts some), \
         and processes in the cgroup itself from enabling any: end or move them"
    )]
    Controller {
        /// Its name.
        name: String,
        /// Why.
        #[source]
        source: Box<CgroupError>,
    },
    /// The number of processes is to be limited, and the kernel cannot do it.
    #[error("limit the processes of pods below {}: the pids controller is missing; enable it in the kernel, or leave podPidsLimit out", mount.display())]
    NoPidsController {
        /// The mount.
        mount: PathBuf,
    },
    /// A cgroup that a setting names does not exist.
    #[error(
        "{field}: there is no cgroup {path}; make it, or leave the field out. Nothing is limited or moved there until it exists"
    )]
    Missing {
        /// The field of the configuration that names the cgroup.
        field: &'static str,
        /// The cgroup, below the mount point.
        path: String,
    },
    /// A setting names a cgroup that has to do with pods.
    #[error("{field}: {path} is the cgroup of all pods, or has to do with it; name another one")]
    OfPods {
        /// The field of the configuration that names the cgroup.
        field: &'static str,
        /// The cgroup, below the mount point.
        path: String,
    },
    /// A cgroup uses more memory than it is to have.
    #[error(
        "limit the memory of cgroup {path} to {limit} bytes: it uses more that cannot be given back at once, and processes would be killed; leave more to it"
    )]
    AboveLimit {
        /// The cgroup, below the mount point.
        path: String,
        /// Bytes that it uses, without files that can be read again.
        used: u64,
        /// Bytes that it is to have.
        limit: u64,
    },
    /// cgroup v1 is not wanted.
    #[error(
        "this machine runs cgroup v1 and failCgroupV1 is set; boot with systemd.unified_cgroup_hierarchy=1, or set failCgroupV1: false"
    )]
    V1Refused,
    /// cgroupfs is mounted read-only.
    #[error("{verb} cgroup {}: cgroupfs is read-only; run the agent with write access to it, or set cgroupsPerQOS: false", path.display())]
    ReadOnly {
        /// Verb of the failed operation.
        verb: &'static str,
        /// The cgroup or file.
        path: PathBuf,
    },
    /// Anything else the kernel refuses.
    #[error("{verb} cgroup {}", path.display())]
    Io {
        /// Verb of the failed operation.
        verb: &'static str,
        /// The cgroup or file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Processes would not go.
    #[error("remove cgroup {}: processes {pids:?} do not end", path.display())]
    Busy {
        /// The cgroup.
        path: PathBuf,
        /// Processes that are left in it.
        pids: Vec<i32>,
    },
    /// systemd keeps the cgroups and did not do its part.
    #[error("have systemd keep cgroup {path}")]
    Systemd {
        /// The cgroup, below the mount point.
        path: String,
        /// Why.
        #[source]
        source: Box<SystemdError>,
    },
    /// A pod's resources cannot be read.
    #[error("size the cgroup of pod {pod}")]
    Quantity {
        /// UID.
        pod: PodUid,
        /// Why.
        #[source]
        source: QuantityError,
    },
    /// A UID that cannot name a directory.
    #[error("name a cgroup for pod {pod:?}: the UID is empty or holds a slash")]
    Uid {
        /// As given.
        pod: PodUid,
    },
}

impl CgroupError {
    pub(super) fn io(verb: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| match source.kind() {
            io::ErrorKind::ReadOnlyFilesystem => Self::ReadOnly { verb, path },
            _ => Self::Io { verb, path, source },
        }
    }
}
