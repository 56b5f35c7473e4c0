//! One test under a guard: a temporary directory of its own, its processor time, and nothing left behind.
//!
//! nextest starts `test-runner guard PROGRAM ARGUMENTS…` instead of a test. The guard adopts every process that
//! the test starts and does not wait for (a containerd, its shims), so that it can count and end them.

use std::ffi::OsString;
use std::fs;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::process::{Command, ExitCode, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use nix::errno::Errno;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::ground;
use crate::records::{self, TestName};

/// Names the directory of the run; set by [`crate::run`].
pub(crate) const RUN_DIR: &str = "HOLDFAST_TEST_RUN";
/// Names the directory in memory for tests of the group [`PURE`]; set by [`crate::run`].
pub(crate) const MEMORY_DIR: &str = "HOLDFAST_TEST_MEMORY";
/// The group of tests that use nothing but the processor. They give way a little to those that wait for real parts,
/// whose deadlines go by the clock.
pub(crate) const PURE: &str = "pure";
/// The group of tests that use no more than the processor and the machine's clock. They do not yield.
pub(crate) const CLOCK: &str = "clock";
/// The group of tests in which a machine loses power. What one run shows, the next one need not show.
pub(crate) const CRASH: &str = "crash";
/// Sets [`PARTING`] in seconds, for the tests of this program.
const PARTING_SECONDS: &str = "HOLDFAST_TEST_PARTING";
/// How long processes of a test that has ended may take to end as well. Shims of a runtime take seconds on a busy machine.
const PARTING: Duration = Duration::from_secs(60);
/// After this long, the processes that the guard still waits for are printed.
const SLOW_PARTING: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(10);

/// Runs a test to its end.
///
/// # Errors
/// When the test cannot be started, or its directory cannot be made.
pub(crate) fn guard(arguments: &[OsString]) -> Result<ExitCode> {
    let (program, arguments) = arguments.split_first().context("guard: no program")?;
    let Some(test) = Test::of_environment() else {
        // nextest asks a binary for the names of its tests.
        let error = Command::new(program).args(arguments).exec();
        return Err(error).with_context(|| format!("run {}", program.to_string_lossy()));
    };
    test.run(program, arguments)
}

struct Test {
    name: TestName,
    group: String,
    dir: PathBuf,
    records: PathBuf,
}

impl Test {
    fn of_environment() -> Option<Self> {
        let run = PathBuf::from(std::env::var_os(RUN_DIR)?);
        let group = std::env::var("NEXTEST_TEST_GROUP").unwrap_or_default();
        let in_memory = std::env::var_os(MEMORY_DIR).filter(|_| group == PURE);
        let place = in_memory.map_or_else(|| run.clone(), PathBuf::from);
        Some(Self {
            name: TestName {
                binary: std::env::var("NEXTEST_BINARY_ID").ok()?,
                test: std::env::var("NEXTEST_TEST_NAME").ok()?,
            },
            group,
            // Short: sockets are made below it.
            dir: place.join(std::process::id().to_string()),
            records: run.join(ground::RECORDS),
        })
    }

    fn run(&self, program: &OsString, arguments: &[OsString]) -> Result<ExitCode> {
        fs::create_dir_all(&self.dir)
            .with_context(|| format!("make the test's directory {}", self.dir.display()))?;
        records::note_begin(&self.records, &self.name, &self.group)
            .context("note the test's beginning")?;
        nix::sys::prctl::set_child_subreaper(true).context("adopt what the test starts")?;
        // At the deadline nextest asks guard and test to end, and kills them 10 seconds later.
        let asked = Arc::new(AtomicBool::new(false));
        for signal in [
            signal_hook::consts::SIGTERM,
            signal_hook::consts::SIGINT,
            signal_hook::consts::SIGHUP,
            signal_hook::consts::SIGQUIT,
        ] {
            signal_hook::flag::register(signal, Arc::clone(&asked)).context("catch signals")?;
        }

        let mut command = if self.group == PURE {
            let mut nice = Command::new("nice");
            nice.args(["-n", "3"]).arg(program);
            nice
        } else {
            Command::new(program)
        };
        let child = command
            .args(arguments)
            .env("TMPDIR", &self.dir)
            .spawn()
            .with_context(|| format!("start {}", program.to_string_lossy()))?;
        let pid = i32::try_from(child.id())?;
        let status = wait_for(Pid::from_raw(pid))?;

        let parting = if asked.load(Ordering::Relaxed) {
            Duration::ZERO
        } else {
            let seconds = std::env::var(PARTING_SECONDS).ok();
            let seconds = seconds.and_then(|seconds| seconds.parse().ok());
            seconds.map_or(PARTING, Duration::from_secs)
        };
        let mut left = end_adopted(parting);
        left.extend(ground::clear(&self.dir));
        left.extend(ground::clear_cgroups_of(|owner| owner == pid));
        for found in &left {
            eprintln!("left behind: {found}");
        }
        let processor = processor_time()?;
        records::note_end(&self.records, &self.name, processor, &left)
            .context("note the test's end")?;
        Ok(exit_code(status))
    }
}

/// Waits for the test, and for adopted processes meanwhile.
fn wait_for(test: Pid) -> Result<ExitStatus> {
    loop {
        match waitpid(None, None) {
            Ok(WaitStatus::Exited(pid, code)) if pid == test => {
                return Ok(ExitStatus::from_raw(code << 8));
            }
            Ok(WaitStatus::Signaled(pid, signal, _)) if pid == test => {
                return Ok(ExitStatus::from_raw(signal as i32));
            }
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error).context("wait for the test"),
        }
    }
}

/// Waits until adopted processes have ended; kills those that have not in time, and tells which.
fn end_adopted(parting: Duration) -> Vec<String> {
    let first = parting.min(SLOW_PARTING);
    if wait_until_alone(first) {
        return Vec::new();
    }
    if parting > first {
        for found in living() {
            eprintln!("the test has ended, waiting for {found}");
        }
        if wait_until_alone(parting - first) {
            return Vec::new();
        }
    }
    let left = living();
    // What is killed leaves its children to us.
    for _ in 0..500 {
        for pid in ground::descendants() {
            ground::kill_hard(pid);
        }
        if wait_until_alone(POLL) {
            break;
        }
    }
    left
}

fn living() -> Vec<String> {
    let pids = ground::descendants().into_iter();
    pids.map(|pid| format!("process {pid}: {}", ground::command_line(pid)))
        .collect()
}

/// Whether all adopted processes end within a time.
fn wait_until_alone(patience: Duration) -> bool {
    let mut waited = Duration::ZERO;
    loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Err(Errno::ECHILD) => return true,
            Ok(WaitStatus::StillAlive) if waited >= patience => return false,
            Ok(WaitStatus::StillAlive) => {
                std::thread::sleep(POLL);
                waited += POLL;
            }
            Ok(_) | Err(_) => {}
        }
    }
}

/// Processor time of all processes that this one has waited for.
fn processor_time() -> Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).context("ask for processor times")?;
    let of = |time: nix::sys::time::TimeVal| {
        let seconds = u64::try_from(time.tv_sec()).unwrap_or_default();
        let micros = u64::try_from(time.tv_usec()).unwrap_or_default();
        Duration::from_secs(seconds) + Duration::from_micros(micros)
    };
    Ok(of(usage.user_time()) + of(usage.system_time()))
}

/// As a shell says it: a signal is 128 and its number.
fn exit_code(status: ExitStatus) -> ExitCode {
    let code = match (status.code(), status.signal()) {
        (Some(code), _) => code,
        (None, Some(signal)) => {
            eprintln!("the test was ended by signal {signal}");
            128 + signal
        }
        (None, None) => 2,
    };
    ExitCode::from(u8::try_from(code).unwrap_or(2))
}
