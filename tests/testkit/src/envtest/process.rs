//! Child processes that end with the test process, directories that tell whose they are, free ports.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError, mpsc};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::programs;

const PREFIX: &str = "holdfast-envtest-";
static SERIAL: AtomicU32 = AtomicU32::new(0);

/// A running program, killed when dropped.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    pid_file: PathBuf,
}

impl Process {
    /// Starts `program` of `assets`; what it says is appended to `<dir>/<name>.log`.
    pub(super) fn start(
        program: &Path,
        dir: &Path,
        name: &str,
        arguments: &[String],
    ) -> io::Result<Self> {
        let log = File::options()
            .create(true)
            .append(true)
            .open(dir.join(format!("{name}.log")))?;
        // Dies when the thread that starts it ends, which is why that is one of its own.
        let mut command = if Path::new("/usr/bin/setpriv").exists() {
            let mut command = Command::new("/usr/bin/setpriv");
            command.args(["--pdeathsig", "KILL", "--"]).arg(program);
            command
        } else {
            Command::new(program)
        };
        command
            .args(arguments)
            .current_dir(dir)
            .env_remove("KUBECONFIG")
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let child = spawn(command)?;
        let pid_file = dir.join(format!("{name}.pid"));
        let process = Self { child, pid_file };
        std::fs::write(&process.pid_file, process.child.id().to_string())?;
        Ok(process)
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn signal(&self, signal: Signal) -> io::Result<()> {
        let pid = i32::try_from(self.child.id()).map_err(io::Error::other)?;
        programs::signal(Pid::from_raw(pid), signal)
    }

    /// Whether it ended by itself.
    pub(super) fn ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for its end, after a signal that asks for it.
    pub(super) fn wait(&mut self) -> io::Result<()> {
        self.child.wait().map(drop)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Either may have happened already.
        drop(self.child.kill());
        drop(self.child.wait());
        drop(std::fs::remove_file(&self.pid_file));
    }
}

type Order = (Command, mpsc::Sender<io::Result<Child>>);

/// Starts processes from a thread that lives as long as this process.
fn spawn(command: Command) -> io::Result<Child> {
    static SPAWNER: OnceLock<Mutex<mpsc::Sender<Order>>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (orders, inbox) = mpsc::channel::<Order>();
        std::thread::spawn(move || {
            for (mut command, answer) in inbox {
                drop(answer.send(command.spawn()));
            }
        });
        Mutex::new(orders)
    });
    let (answer, child) = mpsc::channel();
    let orders = spawner.lock().unwrap_or_else(PoisonError::into_inner);
    orders.send((command, answer)).map_err(io::Error::other)?;
    drop(orders);
    child.recv().map_err(io::Error::other)?
}

/// A new directory that carries this process' pid. Those of processes that are gone are deleted first.
pub(super) fn directory() -> io::Result<PathBuf> {
    sweep();
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let dir = std::env::temp_dir().join(format!("{PREFIX}{}-{serial}", std::process::id()));
    if dir.exists() {
        std::fs::remove_dir_all(&dir)?;
    }
    std::fs::create_dir_all(&dir)?;
    Ok(dir)
}

/// Cleans up after test processes that could not.
fn sweep() {
    let Ok(entries) = std::fs::read_dir(std::env::temp_dir()) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let owner = name
            .to_str()
            .and_then(|name| name.strip_prefix(PREFIX))
            .and_then(|rest| rest.split('-').next())
            .and_then(|pid| pid.parse::<u32>().ok());
        if let Some(owner) = owner
            && !Path::new("/proc").join(owner.to_string()).exists()
        {
            bury(&entry.path());
        }
    }
}

/// Kills what still runs in a directory, then deletes it.
fn bury(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let file = entry.path();
        if file.extension().is_none_or(|extension| extension != "pid") {
            continue;
        }
        let pid = std::fs::read_to_string(&file).unwrap_or_default();
        let Ok(pid) = pid.trim().parse::<i32>() else {
            continue;
        };
        // The pid may be another's by now.
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        if String::from_utf8_lossy(&line).contains(&*dir.to_string_lossy())
            && let Err(error) = kill(Pid::from_raw(pid), Signal::SIGKILL)
        {
            eprintln!("kill {pid} of {}: {error}", dir.display());
        }
    }
    // Another test process may be about the same.
    drop(std::fs::remove_dir_all(dir));
}
