//! Services' logs from the journal, or from a file of the service's name. Upstream: `journalServer`.
//!
//! `journalctl` is started directly, without a shell; each value is part of an argument that begins with its option, and
//! service names were checked before. It is killed after 30 s, when the client leaves, or when the agent stops.

use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use axum::body::{Body, BodyDataStream};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::StreamExt;
use tokio::io::AsyncReadExt;
use tokio::process::{Child, ChildStdout, Command};
use tokio::sync::{Semaphore, SemaphorePermit, mpsc};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;

use super::query::{NodeLogQuery, Options};
use super::{HostLogs, error, files};

/// Deadline of a query.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Queries at once; more are refused.
const AT_ONCE: usize = 4;
const CHUNK: usize = 32 * 1024;
/// Bytes that are read of the list of units.
const MAX_UNITS: usize = 4 << 20;

static TURNS: Semaphore = Semaphore::const_new(AT_ONCE);

/// Answers a query for services.
pub(super) fn serve(host: &HostLogs, query: NodeLogQuery) -> Response {
    let Ok(turn) = TURNS.try_acquire() else {
        let text = "too many log queries at once, try again later";
        return error(StatusCode::TOO_MANY_REQUESTS, text);
    };
    let answer = Answer {
        host: host.clone(),
        query,
        until: Instant::now() + TIMEOUT,
        step: Step::Begin,
        _turn: turn,
    };
    let (send, receive) = mpsc::channel::<Piece>(1);
    tokio::spawn(async move {
        let (stop, until) = (answer.host.stop.clone(), answer.until);
        let gone = send.clone();
        let work = async move {
            let mut next = answer.next().await;
            while let Some((piece, answer)) = next {
                if send.send(piece).await.is_err() {
                    return;
                }
                next = answer.next().await;
            }
        };
        // Who reads slowly, or not at all, holds the child no longer than others.
        tokio::select! {
            () = work => {}
            () = gone.closed() => {}
            () = stop.cancelled() => {}
            () = tokio::time::sleep_until(until) => {}
        }
    });
    let body = Body::from_stream(ReceiverStream::new(receive));
    let kind = "text/plain;charset=UTF-8";
    ([(header::CONTENT_TYPE, kind)], body).into_response()
}

struct Answer {
    host: HostLogs,
    query: NodeLogQuery,
    until: Instant,
    step: Step,
    _turn: SemaphorePermit<'static>,
}

enum Step {
    Begin,
    /// The journal is read; these services have files.
    Journal(Box<Child>, ChildStdout, Vec<String>),
    Files(Vec<String>),
    /// A file is sent; others follow.
    File(BodyDataStream, Vec<String>),
}

type Piece = io::Result<Bytes>;

impl Answer {
    /// The next piece; `None` at the end.
    async fn next(mut self) -> Option<(Piece, Self)> {
        loop {
            self.step = match self.step {
                Step::Begin => {
                    let units = units(&self.host.journalctl).await;
                    let native = |service: &String| units.contains(&format!("{service}.service"));
                    let services = self.query.services.iter().cloned();
                    let (native, files): (Vec<_>, Vec<_>) = services.partition(native);
                    if native.is_empty() {
                        Step::Files(files)
                    } else {
                        match journal(&self.host.journalctl, &self.query.options, &native) {
                            Ok((child, output)) => Step::Journal(Box::new(child), output, files),
                            Err(error) => {
                                self.step = Step::Files(files);
                                let text = format!("\nfailed to get journal logs: {error}\n");
                                return Some((Ok(Bytes::from(text)), self));
                            }
                        }
                    }
                }
                Step::Journal(mut child, mut output, files) => {
                    let mut chunk = vec![0; CHUNK];
                    let read = output.read(&mut chunk).await.unwrap_or_default();
                    if read > 0 {
                        chunk.truncate(read);
                        self.step = Step::Journal(child, output, files);
                        return Some((Ok(Bytes::from(chunk)), self));
                    }
                    child.wait().await.ok();
                    Step::Files(files)
                }
                Step::Files(mut files) => {
                    // A file has no times and boots to choose by.
                    if files.is_empty() || self.query.options != Options::default() {
                        return None;
                    }
                    let service = files.remove(0);
                    match file(&self.host, &service).await {
                        Some(body) => Step::File(body.into_data_stream(), files),
                        None => {
                            self.step = Step::Files(files);
                            let text = format!("\nerror: log not found for {service}\n");
                            return Some((Ok(Bytes::from(text)), self));
                        }
                    }
                }
                Step::File(mut body, files) => match body.next().await {
                    Some(piece) => {
                        self.step = Step::File(body, files);
                        return Some((piece.map_err(io::Error::other), self));
                    }
                    None => Step::Files(files),
                },
            };
        }
    }
}

/// The journal's units, as one text; empty when there is no journal.
async fn units(journalctl: &Path) -> String {
    let child = command(journalctl)
        .args(["--field", "_SYSTEMD_UNIT"])
        .spawn();
    let Ok(mut child) = child else {
        return String::new();
    };
    let Some(output) = child.stdout.take() else {
        return String::new();
    };
    let mut units = Vec::new();
    let read = output.take(MAX_UNITS as u64).read_to_end(&mut units).await;
    match read {
        Ok(_) => String::from_utf8_lossy(&units).into_owned(),
        Err(_) => String::new(),
    }
}

fn journal(
    journalctl: &Path,
    options: &Options,
    services: &[String],
) -> io::Result<(Child, ChildStdout)> {
    let mut child = command(journalctl)
        .args(arguments(options, services))
        .spawn()?;
    let output = child.stdout.take();
    let output = output.ok_or_else(|| io::Error::other("it has no output"))?;
    Ok((child, output))
}

fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    command
}

/// Upstream: `getLoggingCmd`.
fn arguments(options: &Options, services: &[String]) -> Vec<String> {
    const TIME: &str = "%Y-%m-%d %H:%M:%S";
    let mut arguments: Vec<String> = ["--utc", "--no-pager", "--output=short-precise"]
        .map(str::to_owned)
        .into();
    if let Some(since) = options.since {
        // In UTC: journalctl would take it for local time.
        arguments.push(format!("--since={} UTC", since.strftime(TIME)));
    }
    if let Some(until) = options.until {
        arguments.push(format!("--until={} UTC", until.strftime(TIME)));
    }
    if let Some(lines) = options.tail {
        arguments.push("--pager-end".to_owned());
        arguments.push(format!("--lines={lines}"));
    }
    arguments.extend(services.iter().map(|service| format!("--unit={service}")));
    if !options.pattern.is_empty() {
        arguments.push(format!("--grep={}", options.pattern));
        arguments.push("--case-sensitive=false".to_owned());
    }
    if let Some(boot) = options.boot {
        arguments.push(format!("--boot={boot}"));
    }
    arguments
}

/// The log file of a service that is not in the journal; upstream's `heuristicsCopyFileLogs`.
async fn file(host: &HostLogs, service: &str) -> Option<Body> {
    for name in [
        service.to_owned(),
        format!("{service}.log"),
        format!("{service}/{service}.log"),
    ] {
        let response = files::serve_named(&host.root, &name, &HeaderMap::new(), &host.stop).await;
        let is_page = response
            .headers()
            .get(header::CONTENT_TYPE)
            .is_some_and(|kind| kind.as_bytes().starts_with(b"text/html"));
        if response.status() == StatusCode::OK && !is_page {
            return Some(response.into_body());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_within_an_option() {
        let options = Options {
            since: Some("2026-01-02T03:04:05Z".parse().unwrap()),
            until: Some("2026-01-02T05:04:05+01:00".parse().unwrap()),
            tail: Some(5),
            boot: Some(-1),
            pattern: "--rm; x".to_owned(),
        };
        let services = ["-a".to_owned(), "kubelet".to_owned()];
        assert_eq!(
            arguments(&options, &services),
            [
                "--utc",
                "--no-pager",
                "--output=short-precise",
                "--since=2026-01-02 03:04:05 UTC",
                "--until=2026-01-02 04:04:05 UTC",
                "--pager-end",
                "--lines=5",
                "--unit=-a",
                "--unit=kubelet",
                "--grep=--rm; x",
                "--case-sensitive=false",
                "--boot=-1",
            ]
        );
    }
}
