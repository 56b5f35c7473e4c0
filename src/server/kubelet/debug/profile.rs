//! `/debug/pprof`: a CPU profile in the format of `pprof`, and for what the agent has no equivalent of, why.
//!
//! One profile is taken at a time; it ends early when its client goes away or the agent ends. Nothing is sampled
//! while nobody asks.

use std::os::unix::ffi::OsStringExt;
use std::time::Duration;

use axum::Router;
use axum::extract::{RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::sync::Semaphore;

use super::super::Shared;
use super::pprof;

/// Samples per second of CPU time, as Go takes them.
const FREQUENCY: i32 = 100;
/// Default duration of a profile, as in Go.
const DEFAULT_SECONDS: u64 = 30;
const MAX_SECONDS: u64 = 600;

static TURN: Semaphore = Semaphore::const_new(1);

const HEAP: &str = "the allocator keeps no account of who allocated what; the memory of the process is in \
                    process_resident_memory_bytes of /metrics and in /proc/<pid>/smaps_rollup\n";
const TRACE: &str = "there is no execution trace; spans of pod syncs and runtime calls are exported with tracing.endpoint and \
                     tracing.samplingRatePerMillion of the configuration\n";
const CONTENTION: &str = "contention is not measured\n";

pub(super) fn routes() -> Router<Shared> {
    let missing =
        |why: &'static str| get(move || async move { (StatusCode::NOT_IMPLEMENTED, why) });
    Router::new()
        .route("/debug/pprof", get(index))
        .route("/debug/pprof/", get(index))
        .route("/debug/pprof/profile", get(profile))
        .route("/debug/pprof/cmdline", get(cmdline))
        .route("/debug/pprof/symbol", get(symbol).post(symbol))
        .route("/debug/pprof/goroutine", get(tasks))
        .route("/debug/pprof/heap", missing(HEAP))
        .route("/debug/pprof/allocs", missing(HEAP))
        .route("/debug/pprof/trace", missing(TRACE))
        .route("/debug/pprof/block", missing(CONTENTION))
        .route("/debug/pprof/mutex", missing(CONTENTION))
        .route("/debug/pprof/threadcreate", missing(CONTENTION))
}

async fn index() -> &'static str {
    "/debug/pprof/\n\n\
     profile    CPU profile for ?seconds= (30): go tool pprof reads it\n\
     cmdline    command line, NUL between arguments\n\n\
     The others are answered 501 with the reason.\n"
}

/// Samples are symbolised already: there is nothing to ask.
async fn symbol() -> &'static str {
    "num_symbols: 0\n"
}

/// The command line; values of headers and of URLs, which may hold passwords, are left out.
async fn cmdline() -> Vec<u8> {
    redacted(std::env::args_os().map(OsStringExt::into_vec)).join(&0)
}

fn redacted(arguments: impl Iterator<Item = Vec<u8>>) -> Vec<Vec<u8>> {
    const HIDDEN: [&[u8]; 2] = [b"--manifest-url-header", b"--manifest-url"];
    let mut value_follows = false;
    arguments
        .map(|argument| {
            if std::mem::take(&mut value_follows) {
                return b"<redacted>".to_vec();
            }
            let name = argument.split(|b| *b == b'=').next().unwrap_or_default();
            // Flags may be written with underscores.
            let dashed = |b: &u8| if *b == b'_' { b'-' } else { *b };
            if HIDDEN
                .iter()
                .any(|flag| name.iter().map(dashed).eq(flag.iter().copied()))
            {
                if argument.len() > name.len() {
                    return [name, b"=<redacted>".as_slice()].concat();
                }
                value_follows = true;
            }
            argument
        })
        .collect()
}

/// Reports the number of the async runtime's tasks, the only thing that it knows of them.
async fn tasks() -> (StatusCode, String) {
    let metrics = tokio::runtime::Handle::current().metrics();
    let text = format!(
        "tasks cannot be listed: the async runtime counts them only. Alive are {} tasks on {} threads, {} wait in the \
         global queue\n",
        metrics.num_alive_tasks(),
        metrics.num_workers(),
        metrics.global_queue_depth()
    );
    (StatusCode::NOT_IMPLEMENTED, text)
}

fn seconds(query: Option<&str>) -> Result<Duration, String> {
    let given = form_urlencoded::parse(query.unwrap_or_default().as_bytes())
        .find(|(key, _)| key == "seconds")
        .map(|(_, value)| value.into_owned());
    let Some(given) = given else {
        return Ok(Duration::from_secs(DEFAULT_SECONDS));
    };
    match given.parse::<u64>() {
        Ok(seconds) if (1..=MAX_SECONDS).contains(&seconds) => Ok(Duration::from_secs(seconds)),
        _ => Err(format!(
            "seconds is {given:?}, expected a number from 1 to {MAX_SECONDS}\n"
        )),
    }
}

async fn profile(State(node): State<Shared>, RawQuery(query): RawQuery) -> Response {
    let failed = |text: String| (StatusCode::INTERNAL_SERVER_ERROR, text).into_response();
    let duration = match seconds(query.as_deref()) {
        Ok(duration) => duration,
        Err(text) => return (StatusCode::BAD_REQUEST, text).into_response(),
    };
    let Ok(turn) = TURN.try_acquire() else {
        return failed("Could not enable CPU profiling: cpu profiling already in use\n".to_owned());
    };
    let guard = match ::pprof::ProfilerGuardBuilder::default()
        .frequency(FREQUENCY)
        // Unwinding from within these may wait for a lock they hold.
        .blocklist(&["libc", "libgcc", "pthread", "vdso"])
        .build()
    {
        Ok(guard) => guard,
        Err(error) => return failed(format!("Could not enable CPU profiling: {error}\n")),
    };
    let started_ms = node.clock.now().wall_ms;
    tokio::select! {
        () = tokio::time::sleep(duration) => {}
        () = node.stop.cancelled() => {}
    }
    // Names are looked up in the debug information of the binary: slow, and on a thread of its own.
    let made = tokio::task::spawn_blocking(move || {
        let report = guard.report().build();
        drop(guard);
        report.map(|report| pprof::encode(&report, started_ms, duration, FREQUENCY))
    })
    .await;
    drop(turn);
    match made {
        Ok(Ok(bytes)) => (
            [
                (header::CONTENT_TYPE, "application/octet-stream"),
                (
                    header::CONTENT_DISPOSITION,
                    r#"attachment; filename="profile""#,
                ),
                (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            ],
            bytes,
        )
            .into_response(),
        Ok(Err(error)) => failed(format!("make the profile: {error}\n")),
        Err(error) => failed(format!("make the profile: {error}\n")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_keeps_headers_and_urls_to_itself() {
        let given = [
            "holdfast",
            "--manifest-url-header",
            "Authorization:x",
            "--manifest-url-header=A:b",
            "--manifest-url=https://user:pw@host/",
            "--manifest_url_header=A:b",
            "--manifest-url",
            "https://user:pw@host/",
            "--v=4",
        ];
        let shown = redacted(given.iter().map(|a| a.as_bytes().to_vec()));
        let shown: Vec<_> = shown
            .iter()
            .map(|a| String::from_utf8_lossy(a).into_owned())
            .collect();
        assert_eq!(
            shown,
            [
                "holdfast",
                "--manifest-url-header",
                "<redacted>",
                "--manifest-url-header=<redacted>",
                "--manifest-url=<redacted>",
                "--manifest_url_header=<redacted>",
                "--manifest-url",
                "<redacted>",
                "--v=4"
            ]
        );
    }

    #[test]
    fn a_profile_takes_30_seconds_unless_told_and_never_for_ever() {
        assert_eq!(seconds(None), Ok(Duration::from_secs(30)));
        assert_eq!(seconds(Some("seconds=5")), Ok(Duration::from_secs(5)));
        for bad in ["seconds=0", "seconds=601", "seconds=x", "seconds=-1"] {
            assert!(seconds(Some(bad)).is_err(), "{bad}");
        }
    }
}
