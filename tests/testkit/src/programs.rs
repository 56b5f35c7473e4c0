//! Programs that tests run and that are not in the `PATH`: the scripts in `hack/`, and what they fetch.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The directory of the programs of a package of another Debian release, which `hack/debian.sh` keeps in the cache.
///
/// # Errors
/// With the script's words: it cannot be fetched, or does not run here.
pub fn of_debian(release: &str, package: &str) -> io::Result<PathBuf> {
    let output = run(Command::new(hack("debian.sh")).args([release, package]))?;
    let path = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    Ok(PathBuf::from(path))
}

/// The newest kubectl there is for tests: 1.36 or later.
///
/// # Errors
/// As [`of_debian`].
pub fn newest_kubectl() -> io::Result<PathBuf> {
    Ok(of_debian("forky", "kubectl")?.join("kubectl"))
}

/// A script of the project.
pub(crate) fn hack(script: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../hack")
        .join(script)
}

/// Runs it to its end; one that fails is an error with its words.
pub(crate) fn run(command: &mut Command) -> io::Result<Output> {
    let output = command.stdin(Stdio::null()).output();
    let name = command.get_program().to_string_lossy().into_owned();
    let output =
        output.map_err(|error| io::Error::new(error.kind(), format!("run {name}: {error}")))?;
    if output.status.success() {
        return Ok(output);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!(
        "{name} failed ({}): {}",
        output.status,
        said.trim()
    )))
}

/// Sends a process a signal. After SIGSTOP it waits until every thread stands still: the kernel tells them one by one, and
/// on a busy machine one may answer a request meanwhile.
///
/// # Errors
/// When there is no such process.
pub(crate) fn signal(pid: Pid, signal: Signal) -> io::Result<()> {
    kill(pid, signal)?;
    while signal == Signal::SIGSTOP && !is_stopped(pid)? {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn is_stopped(pid: Pid) -> io::Result<bool> {
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread that has ended since does nothing either.
        let Ok(stat) = std::fs::read_to_string(task?.path().join("stat")) else {
            continue;
        };
        // The name is in parentheses and may hold some itself; the state follows.
        let state = stat
            .rsplit_once(") ")
            .and_then(|(_, rest)| rest.chars().next());
        if !matches!(state, Some('T' | 't' | 'Z' | 'X')) {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_is_stopped_stands_still() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap());
        assert!(!is_stopped(pid).unwrap());
        signal(pid, Signal::SIGSTOP).unwrap();
        assert!(is_stopped(pid).unwrap());
        signal(pid, Signal::SIGKILL).unwrap();
        child.wait().unwrap();
        signal(pid, Signal::SIGSTOP).unwrap_err();
    }
}
