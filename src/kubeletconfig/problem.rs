//! Errors and warnings of a configuration, with the place of the value.

use std::fmt;
use std::path::PathBuf;

/// Origin of a value.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// A place in a configuration file; line and column count from 1, 0 when unknown.
    File {
        /// The file as it was named.
        path: PathBuf,
        /// Line of the value or key.
        line: u64,
        /// Column of the value or key.
        column: u64,
    },
    /// A flag, with its dashes.
    Flag(String),
    /// A built-in default.
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, line: 0, .. } => write!(f, "{}", path.display()),
            Self::File { path, line, column } => {
                write!(f, "{}:{line}:{column}", path.display())
            }
            Self::Flag(flag) => f.write_str(flag),
            Self::Default => f.write_str("default"),
        }
    }
}

/// One thing that must be corrected before the agent can start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Origin of the value.
    pub origin: Origin,
    /// The field (dotted path) or flag; empty when the document as a whole is meant.
    pub field: String,
    /// Description of the error and its remedy.
    pub message: String,
}

impl Problem {
    pub(super) fn new(
        origin: Origin,
        field: impl Into<String>,
        message: impl Into<String>,
    ) -> Self {
        Self {
            origin,
            field: field.into(),
            message: message.into(),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        display(f, &self.origin, &self.field, &self.message)
    }
}

/// Something that was accepted but does not do what its author may expect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// Origin of the value.
    pub origin: Origin,
    /// The field (dotted path) or flag.
    pub field: String,
    /// Actual effect.
    pub message: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        display(f, &self.origin, &self.field, &self.message)
    }
}

fn display(f: &mut fmt::Formatter<'_>, origin: &Origin, field: &str, message: &str) -> fmt::Result {
    let origin = origin.to_string();
    if field.is_empty() || origin == field {
        write!(f, "{origin}: {message}")
    } else {
        write!(f, "{origin}: {field}: {message}")
    }
}

/// Reason why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file or directory that was asked for cannot be read.
    #[error("read {what} {}", path.display())]
    Read {
        /// Kind of file, such as `configuration file`.
        what: &'static str,
        /// Its path.
        path: PathBuf,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// The host has no usable name.
    #[error("read the host name; give --hostname-override")]
    Hostname(#[source] std::io::Error),
    /// The working directory, onto which relative paths are put, is gone.
    #[error("read the working directory; give absolute paths or start elsewhere")]
    WorkingDirectory(#[source] std::io::Error),
    /// Everything that is wrong with the values, in the order it was found; never empty.
    #[error("invalid configuration:{}", list(.0))]
    Invalid(Vec<Problem>),
}

impl ConfigError {
    /// The problems of [`ConfigError::Invalid`]; empty for the other errors.
    pub fn problems(&self) -> &[Problem] {
        match self {
            Self::Invalid(problems) => problems,
            _ => &[],
        }
    }
}

fn list(problems: &[Problem]) -> String {
    problems.iter().map(|p| format!("\n  {p}")).collect()
}
