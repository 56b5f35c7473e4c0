//! Programs that tests run and that are not in the `PATH`: the scripts in `hack/`, and what they fetch.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

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
