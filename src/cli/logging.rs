//! Logs: text or JSON, to standard error or to a file that can be opened anew.
//!
//! klog's verbosity becomes tracing's levels: 0 to 3 info, 4 and 5 debug, from 6 trace; crates other than
//! ours stay four steps quieter. `RUST_LOG` wins over the verbosity, until that is changed while the agent runs.
//! Spans may go to a collector besides: see `traces`.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::Subscriber;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::writer::BoxMakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt, reload};

use super::traces;
pub use super::traces::TraceOptions;
use crate::kubeletconfig::LogFormat;
use crate::kuberuntime::cri::TRACE_TARGET;

/// Destination, format and verbosity of the logs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogOptions {
    /// Text or JSON.
    pub format: LogFormat,
    /// klog's verbosity.
    pub verbosity: u32,
    /// A file instead of standard error.
    pub file: Option<PathBuf>,
    /// Destination of spans; `None` for nowhere.
    pub traces: Option<TraceOptions>,
}

/// Failure to set up logging.
#[derive(Debug, thiserror::Error)]
pub enum LoggingError {
    /// The log file cannot be opened.
    #[error("open log file {}; check its directory or leave out --log-file", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Cause of the failure.
        #[source]
        source: io::Error,
    },
    /// `RUST_LOG` is not a filter.
    #[error("parse RUST_LOG={value:?}; write it like \"info,holdfast=debug\"")]
    Filter {
        /// The variable's value.
        value: String,
        /// Cause of the failure.
        #[source]
        source: tracing_subscriber::filter::ParseError,
    },
    /// Traces cannot be exported as configured.
    #[error("export traces: {0}; see tracing.endpoint")]
    Traces(String),
    /// The filter is gone.
    #[error("change the verbosity of the logs")]
    Reload(#[source] reload::Error),
    /// Something else set up logging before.
    #[error("set up logging")]
    AlreadySet(#[source] tracing::subscriber::SetGlobalDefaultError),
}

/// The running logs.
#[derive(Clone, Debug, Default)]
pub struct LogHandle {
    file: Option<ReopenableFile>,
    filter: Option<reload::Handle<EnvFilter, Registry>>,
    traces: Option<SdkTracerProvider>,
}

impl LogHandle {
    /// Opens the log file anew by its name, as wanted on SIGHUP after it was moved away. Does nothing when
    /// logs go to standard error.
    ///
    /// # Errors
    /// When it cannot be opened; logs go on into the old file then.
    pub fn reopen(&self) -> Result<(), LoggingError> {
        self.file.as_ref().map_or(Ok(()), ReopenableFile::reopen)
    }

    /// From now on as much is logged as klog's verbosity says, whatever `RUST_LOG` said at start.
    ///
    /// # Errors
    /// When the logs are not this handle's any more.
    pub fn set_verbosity(&self, verbosity: u32) -> Result<(), LoggingError> {
        let filter = filter(verbosity, None)?;
        match &self.filter {
            Some(handle) => handle.reload(filter).map_err(LoggingError::Reload),
            None => Ok(()),
        }
    }

    /// Sends the spans that are left. Blocking, for two seconds at most.
    pub fn end(&self) {
        if let Some(provider) = &self.traces {
            traces::end(provider);
        }
    }
}

/// Sends this process's tracing events where `options` say, for the rest of its life.
///
/// # Errors
/// When the file or `RUST_LOG` is unusable, or logging was set up before.
pub fn init(options: &LogOptions) -> Result<LogHandle, LoggingError> {
    let rust_log = std::env::var("RUST_LOG").ok();
    let (subscriber, handle) = subscriber(options, rust_log.as_deref())?;
    tracing::subscriber::set_global_default(subscriber).map_err(LoggingError::AlreadySet)?;
    Ok(handle)
}

/// Returns the layers that [`init`] installs, with `RUST_LOG` as an argument.
pub(super) fn subscriber(
    options: &LogOptions,
    rust_log: Option<&str>,
) -> Result<(Box<dyn Subscriber + Send + Sync>, LogHandle), LoggingError> {
    let file = match &options.file {
        Some(path) => Some(ReopenableFile::open(path)?),
        None => None,
    };
    let writer = match &file {
        Some(file) => BoxMakeWriter::new(file.clone()),
        None => BoxMakeWriter::new(io::stderr),
    };
    let (filter, handle) = reload::Layer::new(filter(options.verbosity, rust_log)?);
    let lines = fmt::layer().with_writer(writer).with_ansi(false);
    let lines: Box<dyn Layer<Registry> + Send + Sync> = match options.format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    // The filter belongs to the lines: spans are exported however little is logged.
    let logged = Registry::default().with(lines.with_filter(filter));
    let traces = options.traces.as_ref().map(traces::provider).transpose();
    let traces = traces.map_err(LoggingError::Traces)?;
    let subscriber: Box<dyn Subscriber + Send + Sync> = match &traces {
        Some(provider) => Box::new(logged.with(traces::layer(provider))),
        None => Box::new(logged),
    };
    let handle = LogHandle {
        file,
        filter: Some(handle),
        traces,
    };
    Ok((subscriber, handle))
}

fn filter(verbosity: u32, rust_log: Option<&str>) -> Result<EnvFilter, LoggingError> {
    let directives = match rust_log.filter(|value| !value.trim().is_empty()) {
        Some(value) => value.to_owned(),
        None => format!(
            "{},holdfast={}",
            others_level(verbosity),
            own_level(verbosity)
        ),
    };
    // The API client's own messages tell of each try of a refused request, which we tell once, and may quote an
    // object, a secret too.
    let all = format!("{directives},kube_client=error,kube_runtime=error,{TRACE_TARGET}=off");
    EnvFilter::try_new(all).map_err(|source| LoggingError::Filter {
        value: directives,
        source,
    })
}

fn own_level(verbosity: u32) -> &'static str {
    match verbosity {
        0..=3 => "info",
        4..=5 => "debug",
        _ => "trace",
    }
}

fn others_level(verbosity: u32) -> &'static str {
    match verbosity {
        0..=3 => "warn",
        4..=7 => "info",
        8..=9 => "debug",
        _ => "trace",
    }
}

/// A file in append mode whose handle can be swapped while others write.
#[derive(Clone, Debug)]
struct ReopenableFile {
    path: Arc<Path>,
    current: Arc<ArcSwap<File>>,
}

impl ReopenableFile {
    fn open(path: &Path) -> Result<Self, LoggingError> {
        Ok(Self {
            path: Arc::from(path),
            current: Arc::new(ArcSwap::from_pointee(open(path)?)),
        })
    }

    fn reopen(&self) -> Result<(), LoggingError> {
        self.current.store(Arc::new(open(&self.path)?));
        Ok(())
    }
}

fn open(path: &Path) -> Result<File, LoggingError> {
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)
        .map_err(|source| LoggingError::Open {
            path: path.to_owned(),
            source,
        })
}

impl<'a> MakeWriter<'a> for ReopenableFile {
    type Writer = LogWriter;

    fn make_writer(&'a self) -> LogWriter {
        LogWriter(self.current.load_full())
    }
}

/// One event's handle on the file; an event that began before a reopen ends in the old file.
struct LogWriter(Arc<File>);

impl Write for LogWriter {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        (&*self.0).write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        (&*self.0).flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use tracing::{debug, info, trace};

    fn logged(options: &LogOptions, rust_log: Option<&str>, log: impl FnOnce(&LogHandle)) {
        let (subscriber, handle) = subscriber(options, rust_log).unwrap();
        tracing::subscriber::with_default(subscriber, || log(&handle));
    }

    fn to_file(path: &Path) -> LogOptions {
        LogOptions {
            file: Some(path.to_owned()),
            ..LogOptions::default()
        }
    }

    #[test]
    fn reopen_goes_on_in_a_new_file_after_the_old_one_was_moved() {
        let root = tempfile::tempdir().unwrap();
        let (path, moved) = (root.path().join("log"), root.path().join("log.1"));
        logged(&to_file(&path), None, |handle| {
            info!("first");
            std::fs::rename(&path, &moved).unwrap();
            info!("second");
            handle.reopen().unwrap();
            info!("third");
        });
        let old = std::fs::read_to_string(&moved).unwrap();
        let new = std::fs::read_to_string(&path).unwrap();
        assert!(old.contains("first") && old.contains("second"), "{old}");
        assert!(new.contains("third") && !new.contains("second"), "{new}");
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn failed_reopen_keeps_the_old_file() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("dir");
        let moved = root.path().join("moved");
        std::fs::create_dir(&dir).unwrap();
        logged(&to_file(&dir.join("log")), None, |handle| {
            std::fs::rename(&dir, &moved).unwrap();
            let error = handle.reopen().unwrap_err().to_string();
            assert!(error.contains("open log file"), "{error}");
            info!("still here");
        });
        let text = std::fs::read_to_string(moved.join("log")).unwrap();
        assert!(text.contains("still here"), "{text}");
    }

    #[test]
    fn verbosity_opens_debug_at_4_and_trace_at_6_and_rust_log_wins() {
        let root = tempfile::tempdir().unwrap();
        let lines = |verbosity, rust_log: Option<&str>| {
            let path = root
                .path()
                .join(format!("{verbosity}-{}", rust_log.is_some()));
            let options = LogOptions {
                verbosity,
                ..to_file(&path)
            };
            logged(&options, rust_log, |_| {
                info!(target: "holdfast::x", "i");
                debug!(target: "holdfast::x", "d");
                trace!(target: "holdfast::x", "t");
                info!(target: "h2::codec", "other");
            });
            std::fs::read_to_string(&path).unwrap().lines().count()
        };
        assert_eq!(lines(0, None), 1);
        assert_eq!(lines(2, None), 1);
        assert_eq!(lines(4, None), 3);
        assert_eq!(lines(6, None), 4);
        assert_eq!(lines(9, Some("warn")), 0);
        assert_eq!(lines(8, Some(" ")), 4);
    }

    #[test]
    fn the_verbosity_changes_while_the_agent_runs() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("log");
        logged(&to_file(&path), Some("holdfast=warn"), |handle| {
            let say = |text: &str| debug!(target: "holdfast::x", "{text}");
            say("first");
            handle.set_verbosity(4).unwrap();
            say("second");
            handle.set_verbosity(2).unwrap();
            say("third");
        });
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains("second"), "{text}");
        assert!(!text.contains("first") && !text.contains("third"), "{text}");
    }

    #[test]
    fn spans_for_the_export_alone_are_never_made_for_the_logs() {
        let root = tempfile::tempdir().unwrap();
        let options = LogOptions {
            verbosity: 10,
            ..to_file(&root.path().join("log"))
        };
        logged(&options, None, |_| {
            let span = tracing::info_span!(target: TRACE_TARGET, "x");
            assert!(
                span.is_disabled(),
                "costs nothing while no traces are exported"
            );
        });
    }

    #[test]
    fn json_lines_are_objects_with_the_message() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("log");
        let options = LogOptions {
            format: LogFormat::Json,
            ..to_file(&path)
        };
        logged(&options, None, |_| info!(pod = "a", "admitted pod"));
        let text = std::fs::read_to_string(&path).unwrap();
        let line: serde_json::Value = serde_json::from_str(text.trim()).unwrap();
        assert_eq!(line["message"], "admitted pod");
        assert_eq!(line["pod"], "a");
    }

    #[test]
    fn broken_rust_log_is_an_error_that_shows_it() {
        let error = filter(0, Some("holdfast=loud")).unwrap_err().to_string();
        assert!(error.contains("RUST_LOG=\"holdfast=loud\""), "{error}");
    }
}
