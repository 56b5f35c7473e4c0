//! Watches: streams of what changed, one JSON document a line.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::Stream;
use serde_json::{Value, json};
use tokio::sync::watch::Receiver;
use tokio::time::Instant;

use super::failure::Failure;
use super::request::Request;
use super::resource::{self, RESOURCES, Resource};
use super::select::Selector;
use super::state::{Change, State};
use super::verbs::shown;
use super::{Inner, Shared};

/// Of servers, when the client does not say; they choose at random from here to twice as long.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(1800);

/// A watch in progress.
pub(super) struct Watch {
    shared: Arc<Shared>,
    changed: Receiver<u64>,
    resource: &'static Resource,
    stored: usize,
    namespace: String,
    selector: Selector,
    /// Everything up to this version was delivered.
    cursor: u64,
    queue: VecDeque<Value>,
    bookmarks: Option<Instant>,
    deadline: Instant,
    /// Of the server's watches, in order of their beginnings.
    number: u64,
    ended: bool,
}

impl Watch {
    /// A watch for `request`, whose rights were looked at already.
    pub(super) fn begin(
        shared: &Arc<Shared>,
        inner: &mut Inner,
        request: &Request,
        selector: Selector,
    ) -> Result<Self, Failure> {
        let resource = &RESOURCES[request.resource];
        let asked = request.param("resourceVersion").unwrap_or_default();
        let asked: u64 = match asked {
            "" => 0,
            text => text.parse().map_err(|_| {
                Failure::new(
                    500,
                    "",
                    format!("resourceVersion: Invalid value: \"{text}\""),
                )
            })?,
        };
        let timeout = request
            .param("timeoutSeconds")
            .and_then(|seconds| seconds.parse().ok())
            .filter(|seconds| *seconds > 0)
            .map_or(DEFAULT_TIMEOUT, Duration::from_secs);
        inner.watches += 1;
        let now = Instant::now();
        let bookmarks = request.param("allowWatchBookmarks") == Some("true");
        let mut watch = Self {
            shared: Arc::clone(shared),
            changed: shared.changed.subscribe(),
            resource,
            stored: resource::stored_as(request.resource),
            namespace: request.namespace.clone(),
            selector,
            cursor: asked,
            queue: VecDeque::new(),
            bookmarks: bookmarks.then(|| now + inner.bookmark_every),
            deadline: now + timeout,
            number: inner.watches,
            ended: false,
        };
        if asked == 0 {
            let zero = request.param("resourceVersion") == Some("0");
            watch.everything(&inner.state, zero);
            if request.param("sendInitialEvents") == Some("true") {
                let mut bookmark = watch.bookmark();
                bookmark["object"]["metadata"]["annotations"] =
                    json!({ "k8s.io/initial-events-end": "true" });
                watch.queue.push_back(bookmark);
            }
        } else if asked < inner.state.compacted {
            let message = format!(
                "too old resource version: {asked} ({})",
                inner.state.compacted
            );
            let status = Failure::expired(message).status();
            watch
                .queue
                .push_back(json!({ "type": "ERROR", "object": status }));
            watch.ended = true;
        }
        Ok(watch)
    }

    /// What is there is told as if it were new.
    fn everything(&mut self, state: &State, zero: bool) {
        let (objects, rv) = match &state.stale {
            Some(stale) if zero => (&stale.objects, stale.rv),
            _ => (&state.objects, state.rv),
        };
        for object in State::of(objects, self.stored, &self.namespace) {
            let object = shown(self.resource, &object);
            if self.selector.matches(&object) {
                self.queue
                    .push_back(json!({ "type": "ADDED", "object": object }));
            }
        }
        self.cursor = rv;
    }

    fn collect(&mut self, state: &State) {
        let from = state
            .history
            .partition_point(|change| change.rv <= self.cursor);
        for change in &state.history[from..] {
            if let Some(event) = self.event(change) {
                self.queue.push_back(event);
            }
            self.cursor = change.rv;
        }
    }

    fn event(&self, change: &Change) -> Option<Value> {
        let elsewhere = !self.namespace.is_empty() && change.namespace != self.namespace;
        if change.resource != self.stored || elsewhere {
            return None;
        }
        let new = shown(self.resource, &change.new);
        let old = change.old.as_ref().map(|old| shown(self.resource, old));
        let was = old.as_ref().is_some_and(|old| self.selector.matches(old));
        let is = !change.deleted && self.selector.matches(&new);
        let (kind, object) = match (was, is) {
            (false, true) => ("ADDED", new),
            (true, true) => ("MODIFIED", new),
            // As it was when it still was what is watched.
            (true, false) => {
                let mut last = old?;
                last["metadata"]["resourceVersion"] = new["metadata"]["resourceVersion"].clone();
                ("DELETED", last)
            }
            (false, false) => return None,
        };
        Some(json!({ "type": kind, "object": object }))
    }

    fn bookmark(&self) -> Value {
        let mut object = json!({
            "kind": self.resource.kind,
            "apiVersion": self.resource.api_version(),
            "metadata": { "resourceVersion": self.cursor.to_string(), "creationTimestamp": null },
        });
        if self.resource.is("pods") {
            object["spec"] = json!({ "containers": null });
            object["status"] = json!({});
        }
        json!({ "type": "BOOKMARK", "object": object })
    }

    fn line(&mut self) -> Option<Bytes> {
        let mut text = Vec::new();
        while let Some(event) = self.queue.pop_front() {
            text.extend_from_slice(event.to_string().as_bytes());
            text.push(b'\n');
        }
        (!text.is_empty()).then(|| text.into())
    }

    async fn next(&mut self) -> Option<io::Result<Bytes>> {
        loop {
            self.changed.borrow_and_update();
            let shared = Arc::clone(&self.shared);
            let (hung, ticks) = {
                let inner = shared.inner();
                let hung = self.number <= inner.hung_watches;
                if !hung && inner.down.is_some() {
                    self.ended = true;
                    return Some(Err(io::Error::from(io::ErrorKind::ConnectionReset)));
                }
                if !hung && !self.ended {
                    self.collect(&inner.state);
                }
                (hung, inner.bookmark_every)
            };
            if hung {
                std::future::pending::<()>().await;
            }
            if let Some(line) = self.line() {
                return Some(Ok(line));
            }
            if self.ended || self.number <= shared.inner().closed_watches {
                return None;
            }
            let far = Instant::now() + Duration::from_secs(86_400);
            tokio::select! {
                biased;
                _ = self.changed.changed() => {}
                () = tokio::time::sleep_until(self.deadline) => {
                    self.ended = true;
                    if self.bookmarks.is_some() {
                        self.catch_up();
                    }
                }
                () = tokio::time::sleep_until(self.bookmarks.unwrap_or(far)) => {
                    if self.bookmarks.is_some() {
                        self.bookmarks = Some(Instant::now() + ticks);
                        self.catch_up();
                    }
                }
            }
        }
    }

    /// Delivers what is there, and a bookmark.
    fn catch_up(&mut self) {
        let shared = Arc::clone(&self.shared);
        let inner = shared.inner();
        self.collect(&inner.state);
        self.cursor = self.cursor.max(inner.state.rv);
        self.queue.push_back(self.bookmark());
    }

    /// The body of the answer. Ends with the watch; an error breaks the connection.
    pub(super) fn into_stream(self) -> impl Stream<Item = io::Result<Bytes>> + Send {
        futures::stream::unfold(self, |mut watch| async move {
            let item = watch.next().await?;
            Some((item, watch))
        })
    }
}
