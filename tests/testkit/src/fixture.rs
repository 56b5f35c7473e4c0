//! What several tests need and is slow to make.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// A directory that was filled once: for all tests of the run, or for the caller where there is no run.
#[derive(Debug)]
pub struct Fixture {
    path: PathBuf,
    /// Deletes the directory where it is the caller's.
    _own: Option<TempDir>,
}

impl Fixture {
    /// The directory. Tests do not write to it.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Returns the directory `name` of the test run (`HOLDFAST_TEST_RUN`). The first test that asks has `make` fill it, and
/// others wait meanwhile. A test that is run by itself gets a directory of its own.
///
/// # Errors
/// When the directory cannot be made.
///
/// # Panics
/// When `make` does. The next test that asks tries again.
pub fn once(name: &str, make: impl FnOnce(&Path)) -> io::Result<Fixture> {
    let Some(run) = std::env::var_os("HOLDFAST_TEST_RUN").filter(|dir| !dir.is_empty()) else {
        let own = tempfile::tempdir()?;
        make(own.path());
        return Ok(Fixture {
            path: own.path().to_owned(),
            _own: Some(own),
        });
    };
    once_in(&Path::new(&run).join("shared"), name, make)
}

fn once_in(shared: &Path, name: &str, make: impl FnOnce(&Path)) -> io::Result<Fixture> {
    fs::create_dir_all(shared)?;
    let path = shared.join(name);
    let made = shared.join(format!("{name}.made"));
    // Held until the end of this function, and let go by a process that dies.
    let lock = File::create(shared.join(format!("{name}.lock")))?;
    lock.lock()?;
    if !made.exists() {
        if path.exists() {
            fs::remove_dir_all(&path)?;
        }
        fs::create_dir(&path)?;
        make(&path);
        File::create(&made)?;
    }
    Ok(Fixture { path, _own: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_one_makes_it_and_a_failure_is_made_good() {
        let dir = tempfile::tempdir().unwrap();
        let fails = std::panic::catch_unwind(|| {
            once_in(dir.path(), "f", |path| {
                fs::write(path.join("half"), "").unwrap();
                panic!("no space");
            })
        });
        fails.unwrap_err();
        let make = |path: &Path| fs::write(path.join("whole"), "").unwrap();
        let first = once_in(dir.path(), "f", make).unwrap();
        let second = once_in(dir.path(), "f", |_| panic!("made again")).unwrap();
        assert_eq!(first.path(), second.path());
        assert!(first.path().join("whole").exists());
        assert!(!first.path().join("half").exists());
    }
}
