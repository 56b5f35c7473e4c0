//! Steps that every request passes before and after its handler: it is counted, authorized or refused, and logged.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::State;
use axum::http::{Method, Request, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::body::{Frame, SizeHint};
use tokio::time::Instant;

use super::auth::{Auth, Refusal, User};
use super::connections::{Busy, Slot};
use super::listener::Peer;
use crate::types::metrics::{HttpRequestLabel, Metrics, ReasonLabel};

/// Lines about refusals in each [`LOG_WINDOW`].
const LOG_LINES: usize = 10;
const LOG_WINDOW: Duration = Duration::from_secs(10);

/// The first part of each path that metrics distinguish; of `metrics` the first two.
const BUCKETS: [&str; 21] = [
    "attach",
    "checkpoint",
    "configz",
    "containerLogs",
    "debug",
    "exec",
    "flagz",
    "healthz",
    "livez",
    "logs",
    "metrics",
    "metrics/cadvisor",
    "metrics/probes",
    "metrics/resource",
    "pods",
    "portForward",
    "readyz",
    "run",
    "runningpods",
    "stats",
    "statusz",
];
const LONG_RUNNING: [&str; 4] = ["attach", "debug", "exec", "portForward"];

/// Dependencies of those steps.
#[derive(Clone)]
pub(super) struct Gate {
    pub(super) auth: Option<Arc<Auth>>,
    pub(super) metrics: Metrics,
    pub(super) log: Arc<LogLimit>,
    /// The label `server_type`: `readwrite` or `readonly`.
    pub(super) server_type: &'static str,
}

/// Counts a request and lets it through to `next`, if it may.
pub(super) async fn pass(
    State(gate): State<Gate>,
    mut request: Request<Body>,
    next: Next,
) -> Response {
    let label = label(&request, gate.server_type);
    let count = Count::new(gate.metrics.clone(), label);
    let slot = request.extensions().get::<Slot>().cloned();
    if let Some(slot) = &slot {
        slot.asked();
    }
    let busy = match &gate.auth {
        // Everybody is let in here: the connection counts as used, and gives way to others all the same.
        None => {
            drop(slot.as_ref().map(Slot::busy));
            None
        }
        Some(auth) => match auth.admit(&mut request).await {
            Ok(user) => {
                tracing::debug!(
                    user = user.name,
                    method = %request.method(),
                    path = request.uri().path(),
                    "request to the kubelet's API"
                );
                request.extensions_mut().insert::<Arc<User>>(user);
                slot.as_ref().map(Slot::busy)
            }
            Err(refusal) => {
                gate.tell(&refusal, &request);
                return refusal.into_response();
            }
        },
    };
    let response = next.run(request).await;
    if response.status() == StatusCode::SWITCHING_PROTOCOLS
        && let Some(slot) = &slot
    {
        slot.upgraded();
    }
    response.map(|body| {
        Body::new(Counted {
            body,
            _count: count,
            _busy: busy,
        })
    })
}

/// Lets through what everybody may see: the read-only port.
pub(super) async fn only_reading(request: Request<Body>, next: Next) -> Response {
    let path = request.uri().path();
    let shown = ["/pods", "/stats", "/metrics", "/healthz"]
        .iter()
        .any(|root| {
            path.strip_prefix(root)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        });
    match (shown, request.method()) {
        (true, &Method::GET | &Method::HEAD) => next.run(request).await,
        (true, _) => StatusCode::METHOD_NOT_ALLOWED.into_response(),
        (false, _) => (StatusCode::NOT_FOUND, "404 page not found\n").into_response(),
    }
}

impl Gate {
    fn tell(&self, refusal: &Refusal, request: &Request<Body>) {
        let reason = refusal.reason().to_owned();
        self.metrics
            .http_refused
            .get_or_create(&ReasonLabel { reason })
            .inc();
        let Some(left_out) = self.log.turn() else {
            return;
        };
        let peer = request.extensions().get::<Peer>();
        tracing::warn!(
            peer = peer.map(|peer| peer.address.to_string()),
            method = %request.method(),
            path = request.uri().path(),
            reason = refusal.text(),
            left_out,
            "refused a request to the kubelet's API"
        );
    }
}

fn label(request: &Request<Body>, server_type: &'static str) -> HttpRequestLabel {
    const METHODS: [&str; 9] = [
        "CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE",
    ];
    let method = request.method().as_str();
    let method = if METHODS.contains(&method) {
        method
    } else {
        "other"
    };
    let path = bucket(request.uri().path());
    HttpRequestLabel {
        method: method.to_owned(),
        path: path.to_owned(),
        server_type: server_type.to_owned(),
        long_running: LONG_RUNNING.contains(&path).to_string(),
    }
}

/// Upstream's `getMetricBucket`.
fn bucket(path: &str) -> &str {
    let path = path.strip_prefix('/').unwrap_or(path);
    let mut parts = path.splitn(3, '/');
    let (first, second) = (parts.next().unwrap_or_default(), parts.next());
    let root = match second {
        Some(second) if first == "metrics" => &path[..first.len() + 1 + second.len()],
        _ => first,
    };
    let known = BUCKETS.iter().find(|bucket| **bucket == root);
    known.map_or("other", |_| root)
}

/// One request, from its arrival to the end of its answer.
struct Count {
    metrics: Metrics,
    label: HttpRequestLabel,
    started: Instant,
}

impl Count {
    fn new(metrics: Metrics, label: HttpRequestLabel) -> Self {
        metrics.http_requests.get_or_create(&label).inc();
        metrics.http_inflight_requests.get_or_create(&label).inc();
        Self {
            metrics,
            label,
            started: Instant::now(),
        }
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        let inflight = &self.metrics.http_inflight_requests;
        inflight.get_or_create(&self.label).dec();
        self.metrics
            .http_requests_duration
            .get_or_create(&self.label)
            .observe(self.started.elapsed().as_secs_f64());
    }
}

/// An answer's body, with which the request ends.
struct Counted {
    body: Body,
    _count: Count,
    _busy: Option<Busy>,
}

impl HttpBody for Counted {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Limits the number of log lines per time window, and counts the rest.
#[derive(Default)]
pub(super) struct LogLimit(Mutex<(VecDeque<Instant>, u64)>);

impl LogLimit {
    /// Returns the number of lines left out before this one; `None` if this one must be left out too.
    pub(super) fn turn(&self) -> Option<u64> {
        let now = Instant::now();
        let mut guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (lines, left_out) = &mut *guard;
        while lines
            .front()
            .is_some_and(|line| now.duration_since(*line) >= LOG_WINDOW)
        {
            lines.pop_front();
        }
        if lines.len() >= LOG_LINES {
            *left_out += 1;
            return None;
        }
        lines.push_back(now);
        Some(std::mem::take(left_out))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn paths_fall_into_upstreams_buckets() {
        for (path, expected) in [
            ("/", "other"),
            ("/pods", "pods"),
            ("/pods/", "pods"),
            ("/metrics", "metrics"),
            ("/metrics/cadvisor", "metrics/cadvisor"),
            ("/metrics/slis", "other"),
            ("/metrics/else", "other"),
            ("/exec/ns/pod/c?x=1", "exec"),
            ("/containerLogs/a/b/c", "containerLogs"),
            ("/stats/summary", "stats"),
            ("/wp-admin", "other"),
            ("//pods", "other"),
            ("", "other"),
        ] {
            assert_eq!(bucket(path.split('?').next().unwrap()), expected, "{path}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn lines_are_limited_and_those_left_out_counted() {
        let log = LogLimit::default();
        for _ in 0..LOG_LINES {
            assert_eq!(log.turn(), Some(0));
        }
        assert_eq!((log.turn(), log.turn()), (None, None));
        tokio::time::advance(LOG_WINDOW).await;
        assert_eq!((log.turn(), log.turn()), (Some(2), Some(0)));
    }
}
