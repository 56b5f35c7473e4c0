//! A root directory whose systemd runs.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::root::{Root, attempt, clean, run, script};

/// How long anything may take that is not under test itself.
const PATIENCE: Duration = Duration::from_secs(60);

/// Asks until there is an answer.
#[track_caller]
pub fn eventually<T>(what: &str, mut ask: impl FnMut() -> Result<T, String>) -> T {
    let start = Instant::now();
    loop {
        match ask() {
            Ok(answer) => return answer,
            Err(refusal) if start.elapsed() > PATIENCE => {
                panic!("{what}: not within {PATIENCE:?}: {refusal}")
            }
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

/// A machine of namespaces. It is switched off when dropped.
pub struct Booted {
    pub root: Root,
    process: Child,
    cgroup: PathBuf,
    /// PID 1, as seen from outside.
    init: u32,
}

impl Booted {
    pub fn new() -> Self {
        let root = Root::new("systemd");
        let name = root.dir().file_name().unwrap().to_owned();
        let cgroup = cgroup_v2().join(name);
        fs::create_dir(&cgroup).unwrap();
        // Whatever ends this process ends the machine.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]);
        command.arg(script("tests/package/boot.sh").get_program());
        let process = command
            .arg(root.dir())
            .arg(&cgroup)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let mut booted = Self {
            root,
            process,
            cgroup,
            init: 0,
        };
        booted.init = eventually("systemd is PID 1", || {
            let parent = booted.process.id();
            let children =
                fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap();
            let init = children.split_whitespace().next().ok_or("no child")?;
            let name = fs::read_to_string(format!("/proc/{init}/comm")).unwrap_or_default();
            match name.trim() {
                "systemd" => Ok(init.parse().unwrap()),
                other => Err(format!("it is {other:?}")),
            }
        });
        eventually("the machine has booted", || {
            let (_, said) = attempt(&mut booted.inside(&["systemctl", "is-system-running"]));
            match said.trim() {
                "running" | "degraded" => Ok(()),
                other => Err(other.to_owned()),
            }
        });
        booted
    }

    /// A command inside.
    pub fn inside<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--target={}", self.init));
        command.args([
            "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root", "--wd", "--",
        ]);
        // A start waits for the agent to be ready, however long that takes.
        command.args(["timeout", "180"]).args(arguments);
        clean(&mut command);
        command
    }

    #[track_caller]
    pub fn run(&self, arguments: &[&str]) -> String {
        run(&mut self.inside(arguments))
    }

    #[track_caller]
    pub fn install(&self, package: &Path) -> String {
        let package = self.root.offer(package);
        self.run(&["dpkg", "--force-unsafe-io", "--install", &package])
    }

    /// A property of the agent's unit.
    #[track_caller]
    pub fn property(&self, name: &str) -> String {
        let said = self.run(&[
            "systemctl",
            "show",
            "--value",
            "--property",
            name,
            "holdfast",
        ]);
        said.trim().to_owned()
    }

    /// What the unit has logged.
    pub fn journal(&self) -> String {
        self.run(&[
            "journalctl",
            "--no-pager",
            "--output=cat",
            "--unit=holdfast",
        ])
    }

    /// Mounts that the machine sees, PID 1 that is.
    pub fn mounts(&self) -> String {
        String::from_utf8_lossy(&fs::read(format!("/proc/{}/mountinfo", self.init)).unwrap())
            .into_owned()
    }
}

impl Drop for Booted {
    fn drop(&mut self) {
        // With it go its namespaces and all that is in them.
        let killed = self.process.kill().and_then(|()| self.process.wait());
        if let Err(error) = killed {
            eprintln!("switch the machine off: {error}");
        }
        let start = Instant::now();
        while remove_cgroups(&self.cgroup).is_err() {
            if start.elapsed() > Duration::from_secs(10) {
                eprintln!("{} is left over", self.cgroup.display());
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

fn remove_cgroups(dir: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_cgroups(&entry.path())?;
        }
    }
    fs::remove_dir(dir)
}

/// Where this machine has cgroup v2, alone or beside v1.
fn cgroup_v2() -> PathBuf {
    ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        .iter()
        .map(PathBuf::from)
        .find(|dir| dir.join("cgroup.procs").exists() && dir.join("cgroup.controllers").exists())
        .expect("cgroup v2 is mounted in /sys/fs/cgroup or /sys/fs/cgroup/unified")
}
