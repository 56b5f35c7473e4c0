//! Reads the configuration file and its drop-ins.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::decode::{Settings, overlay};
use super::problem::{ConfigError, Origin, Problem, Warning};
use super::types::KubeletConfiguration;
use super::validate::validate;
use super::yaml::{self, Node};
use crate::types::text::of_utf16;

/// A configuration read from files alone, without flags.
#[derive(Debug)]
pub struct Loaded {
    /// The merged configuration, valid.
    pub config: KubeletConfiguration,
    /// Fields that were set but have no effect.
    pub warnings: Vec<Warning>,
}

/// Reads `file` and the `*.conf` files of `directory` in the order of their names, merges them field by
/// field and checks the result.
///
/// # Errors
/// [`ConfigError::Read`] when one of them cannot be read, otherwise every problem at once.
pub fn load(file: Option<&Path>, directory: Option<&Path>) -> Result<Loaded, ConfigError> {
    check(read(file, directory)?)
}

/// Checks the values of what was read.
pub(super) fn check(mut settings: Settings) -> Result<Loaded, ConfigError> {
    validate(&mut settings);
    if settings.problems.is_empty() {
        Ok(Loaded {
            config: settings.config,
            warnings: settings.warnings,
        })
    } else {
        Err(ConfigError::Invalid(settings.problems))
    }
}

/// As [`load`], before the values are checked.
pub(super) fn read(file: Option<&Path>, directory: Option<&Path>) -> Result<Settings, ConfigError> {
    let mut settings = Settings::default();
    if let Some(file) = file {
        read_file(&mut settings, "configuration file", file)?;
    }
    if let Some(directory) = directory {
        for file in drop_ins(directory)? {
            read_file(&mut settings, "drop-in", &file)?;
        }
    }
    Ok(settings)
}

fn read_file(settings: &mut Settings, what: &'static str, path: &Path) -> Result<(), ConfigError> {
    let failed = |source| ConfigError::Read {
        what,
        path: path.to_owned(),
        source,
    };
    let bytes = read_limited(path).map_err(failed)?;
    take_content(settings, path, bytes);
    Ok(())
}

/// Overlays what the content of the file at `path` sets, unless it is too large.
pub(super) fn take_content(settings: &mut Settings, path: &Path, bytes: Vec<u8>) {
    if u64::try_from(bytes.len()).is_ok_and(|len| len <= yaml::MAX_BYTES) {
        overlay_bytes(settings, path, bytes);
    } else {
        let message = format!("the file is larger than {} bytes", yaml::MAX_BYTES);
        settings
            .problems
            .push(Problem::new(whole(path), "", message));
    }
}

/// Overlays what the content of the file at `path` sets.
pub(super) fn overlay_bytes(settings: &mut Settings, path: &Path, bytes: Vec<u8>) {
    let text = match (of_utf16(&bytes), String::from_utf8(bytes)) {
        (Some(text), _) | (None, Ok(text)) => text,
        (None, Err(error)) => {
            let at = error.utf8_error().valid_up_to();
            let message = format!("the file is not UTF-8 text (byte {at})");
            settings
                .problems
                .push(Problem::new(whole(path), "", message));
            return;
        }
    };
    match yaml::parse(&text) {
        Ok(root) => {
            warn_of_repeated(settings, path, &root);
            overlay(settings, path, &root);
        }
        Err(error) => {
            let origin = Origin::File {
                path: path.to_owned(),
                line: error.place.line,
                column: error.place.column,
            };
            settings
                .problems
                .push(Problem::new(origin, "", error.message));
        }
    }
}

/// Warns of keys that are given twice. Upstream decodes such a file leniently, with a warning.
fn warn_of_repeated(settings: &mut Settings, path: &Path, root: &Node) {
    for one in yaml::repeated(root) {
        let (line, earlier) = (one.place.line, one.earlier.line);
        settings.warnings.push(Warning {
            origin: Origin::File {
                path: path.to_owned(),
                line,
                column: one.place.column,
            },
            field: one.path,
            message: format!(
                "is given twice: this value counts, and the one of line {earlier} does not; keep one of them"
            ),
        });
    }
}

/// The file at `path`, no place in it.
fn whole(path: &Path) -> Origin {
    Origin::File {
        path: path.to_owned(),
        line: 0,
        column: 0,
    }
}

/// The bytes of a file, up to one more than a configuration may have.
fn read_limited(path: &Path) -> io::Result<Vec<u8>> {
    use std::io::Read;
    let mut bytes = Vec::new();
    fs::File::open(path)?
        .take(yaml::MAX_BYTES + 1)
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The `*.conf` files below `directory`, sorted by path. Like upstream, subdirectories are searched and
/// other names are passed over.
fn drop_ins(directory: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    let mut files = Vec::new();
    let mut pending = vec![directory.to_owned()];
    while let Some(directory) = pending.pop() {
        let failed = |source| ConfigError::Read {
            what: "drop-in directory",
            path: directory.clone(),
            source,
        };
        for entry in fs::read_dir(&directory).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            // A link to a directory is not followed, so that a loop of links ends.
            if entry.file_type().map_err(failed)?.is_dir() {
                pending.push(entry.path());
            } else if entry.path().extension().is_some_and(|ext| ext == "conf") {
                files.push(entry.path());
            }
        }
    }
    files.sort();
    Ok(files)
}
