//! A real containerd of one's own, run by `hack/containerd.sh`: own root, state, socket, bridge and subnet,
//! so that instances do not meet. Needs root and the packages of `hack/deps.sh`.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

use nix::sys::signal::Signal;
use nix::unistd::Pid;

use crate::programs::{self, hack, run};

/// An image with busybox, in every private containerd.
pub const BUSYBOX: &str = "holdfast.local/busybox:1";
/// The image of sandboxes, in every private containerd.
pub const PAUSE: &str = "holdfast.local/pause:1";

/// Which containerd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// The installed one: 1.6 on Debian 12. Another one where `HOLDFAST_CONTAINERD` says `1.7` or `2`, to run tests of
    /// everything on it.
    Installed,
    /// 1.7 of Debian 13, unpacked into a cache by `hack/debian.sh`: offers container events.
    V1_7,
    /// 2.1 or later of Debian 14, unpacked likewise: mounts images, and says what it can.
    V2,
}

impl Version {
    /// What it stands for here.
    ///
    /// # Errors
    /// When `HOLDFAST_CONTAINERD` says something else than it may.
    pub fn resolved(self) -> io::Result<Self> {
        if self != Self::Installed {
            return Ok(self);
        }
        match std::env::var("HOLDFAST_CONTAINERD").as_deref() {
            Err(_) | Ok("") => Ok(self),
            Ok("1.7") => Ok(Self::V1_7),
            Ok("2") => Ok(Self::V2),
            Ok(other) => Err(io::Error::other(format!(
                "HOLDFAST_CONTAINERD is {other:?}; it may be 1.7 or 2"
            ))),
        }
    }

    /// Where its programs are, when they are not those in the `PATH`.
    fn programs(self) -> io::Result<Option<PathBuf>> {
        match self.resolved()? {
            Self::Installed => Ok(None),
            Self::V1_7 => programs::of_debian("trixie", "containerd").map(Some),
            Self::V2 => programs::of_debian("forky", "containerd").map(Some),
        }
    }
}

/// A running containerd. Dropped, it takes its containers, mounts and bridge along.
#[derive(Debug)]
pub struct PrivateContainerd {
    dir: PathBuf,
    bin: Option<PathBuf>,
}

impl PrivateContainerd {
    /// Starts one in a new directory, with [`BUSYBOX`] and [`PAUSE`] in its image store. Blocks until it
    /// answers. What a killed test process left behind is cleaned up first.
    ///
    /// # Errors
    /// With the script's words: not root, a package missing, no answer.
    pub fn start(version: Version) -> io::Result<Self> {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        sweep();
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("{PREFIX}{}-{serial}", std::process::id()));
        Self::start_in(&dir, version)
    }

    /// Starts one in a directory of the caller's choice (a short path: it will hold a socket).
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_in(dir: &Path, version: Version) -> io::Result<Self> {
        let containerd = Self {
            dir: dir.to_owned(),
            bin: version.programs()?,
        };
        containerd.start_daemon()?;
        Ok(containerd)
    }

    /// `unix://…`, as `--container-runtime-endpoint` wants it.
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    /// The socket.
    pub fn socket(&self) -> PathBuf {
        self.dir.join("containerd.sock")
    }

    /// Its directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Its volatile directory: gone and made anew with a reboot.
    pub fn state_dir(&self) -> PathBuf {
        self.dir.join("state")
    }

    /// What the daemon logged.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub fn log(&self) -> io::Result<String> {
        std::fs::read_to_string(self.dir.join("containerd.log"))
    }

    /// The daemon's pid.
    ///
    /// # Errors
    /// When it does not run.
    pub fn pid(&self) -> io::Result<i32> {
        let text = std::fs::read_to_string(self.dir.join("containerd.pid"))?;
        text.trim().parse().map_err(io::Error::other)
    }

    /// Starts the daemon after [`Self::stop_daemon`], or when it was killed; blocks until it answers.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_daemon(&self) -> io::Result<()> {
        self.script("start").map(drop)
    }

    /// Stops the daemon in order; its containers run on.
    ///
    /// # Errors
    /// With the script's words.
    pub fn stop_daemon(&self) -> io::Result<()> {
        self.script("stop-daemon").map(drop)
    }

    /// Sends the daemon a signal: SIGKILL for a crash, SIGSTOP for a hang (it stands still on return),
    /// SIGCONT for its end.
    ///
    /// # Errors
    /// When it does not run.
    pub fn signal_daemon(&self, signal: Signal) -> io::Result<()> {
        programs::signal(Pid::from_raw(self.pid()?), signal)
    }

    /// Runs `ctr` in the CRI namespace, for what an outsider does to containers.
    ///
    /// # Errors
    /// With `ctr`'s words when it fails.
    pub fn ctr(&self, arguments: &[&str]) -> io::Result<String> {
        let program = match &self.bin {
            Some(bin) => bin.join("ctr"),
            None => PathBuf::from("ctr"),
        };
        let mut command = Command::new(program);
        command.arg("--address").arg(self.socket());
        command.args(["--namespace", "k8s.io"]).args(arguments);
        let output = run(&mut command)?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Stops containers and daemon, and cleans up; what `drop` does, with its errors.
    ///
    /// # Errors
    /// With the script's words.
    pub fn stop(&self) -> io::Result<()> {
        self.script("stop").map(drop)
    }

    fn script(&self, action: &str) -> io::Result<Output> {
        let mut command = Command::new(hack("containerd.sh"));
        command.arg(action).arg(&self.dir);
        if let Some(bin) = &self.bin {
            command.env("CONTAINERD_BIN", bin);
        }
        run(&mut command)
    }
}

impl Drop for PrivateContainerd {
    fn drop(&mut self) {
        if !self.dir.exists() {
            return;
        }
        // A stopped daemon would neither answer nor end.
        drop(self.signal_daemon(Signal::SIGCONT));
        if let Err(error) = self.stop() {
            eprintln!("{error}");
        }
    }
}

const PREFIX: &str = "holdfast-ctrd-";

/// Cleans up after test processes that could not.
fn sweep() {
    let Ok(entries) = std::fs::read_dir(std::env::temp_dir()) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let owner = name
            .to_str()
            .and_then(|n| n.strip_prefix(PREFIX))
            .and_then(|n| n.split('-').next())
            .and_then(|n| n.parse::<u32>().ok());
        if let Some(owner) = owner
            && !Path::new("/proc").join(owner.to_string()).exists()
        {
            let mut command = Command::new(hack("containerd.sh"));
            if let Err(error) = run(command.arg("stop").arg(entry.path())) {
                eprintln!("{error}");
            }
        }
    }
}
