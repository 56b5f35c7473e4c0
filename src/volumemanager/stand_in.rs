//! Stand-ins for the system's tools, for tests: shell scripts that write down what they were called with.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use super::command::Tools;

/// A directory of stand-ins.
pub(super) struct StandIns {
    dir: tempfile::TempDir,
}

impl StandIns {
    /// Stand-ins that succeed, of these names.
    pub(super) fn new(names: &[&str]) -> Self {
        let this = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        for name in names {
            this.script(name, "");
        }
        this
    }

    /// A stand-in that writes itself down and does `body`, in which `$0` and `$@` are as they were called.
    pub(super) fn script(&self, name: &str, body: &str) {
        let log = self.dir.path().join("log");
        let path = self.dir.path().join(name);
        // In one write, as several may run at once.
        let text = format!(
            "#!/bin/sh\nprintf '%s\\n' \"{name} $*\" >> {}\n{body}\n",
            log.display()
        );
        // Not written in place: another thread may just have forked with it open.
        let new = self.dir.path().join(format!(".{name}"));
        fs::write(&new, text).unwrap();
        fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(new, path).unwrap();
    }

    /// A real tool of this machine.
    pub(super) fn real(&self, name: &str) {
        let found = Tools::default().require(name).unwrap();
        let at = self.dir.path().join(name);
        std::os::unix::fs::symlink(found, at).unwrap();
    }

    /// The tools.
    pub(super) fn tools(&self) -> Tools {
        Tools::in_dirs([self.dir.path().to_owned()]).patient(Duration::from_secs(30))
    }

    /// A path beside them.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the command lines of the calls, in order.
    pub(super) fn calls(&self) -> Vec<String> {
        let log = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        log.lines().map(str::to_owned).collect()
    }

    /// Forgets what was called.
    pub(super) fn forget(&self) {
        fs::write(self.dir.path().join("log"), "").unwrap();
    }
}

/// Returns whether this environment permits mounts.
pub(super) fn can_mount() -> bool {
    nix::unistd::geteuid().is_root()
}

/// Unmounts what a failed test has left below a directory.
pub(super) struct Swept(pub(super) PathBuf);

impl Drop for Swept {
    fn drop(&mut self) {
        let left = super::disk::table().unwrap_or_default();
        for entry in left.iter().rev().filter(|e| e.point.starts_with(&self.0)) {
            nix::mount::umount2(&entry.point, nix::mount::MntFlags::MNT_DETACH).ok();
        }
    }
}

/// A volume without secrets.
pub(super) fn resolved(
    remote: crate::core::volumes::Remote,
) -> std::sync::Arc<crate::kuberuntime::sources::Resolved> {
    std::sync::Arc::new(crate::kuberuntime::sources::Resolved {
        remote,
        secrets: Default::default(),
        tokens: Default::default(),
        capacity: None,
        missing: None,
    })
}

/// A volume `pv` of a source.
pub(super) fn remote(source: crate::core::volumes::Source) -> crate::core::volumes::Remote {
    crate::core::volumes::Remote {
        name: "pv".to_owned(),
        claim: None,
        mode: Default::default(),
        read_only: false,
        mount_options: Vec::new(),
        unique_name: None,
        terms: crate::core::volumes::Terms::default(),
        source,
    }
}

/// A target of a pod.
pub(super) fn target(path: impl Into<PathBuf>, staged: Option<PathBuf>) -> super::remote::Target {
    super::remote::Target {
        pod: Default::default(),
        staged,
        path: path.into(),
    }
}
