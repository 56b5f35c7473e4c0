//! A kube-apiserver that keeps its objects in memory and speaks the Kubernetes API: JSON over HTTP.
//!
//! In come requests, in this process ([`FakeApi::client`], for paused tokio time: there is no socket) or over
//! TCP ([`FakeApi::serve`]). Out go the answers a real server gives: its defaults, conflicts, graceful
//! deletions, watch events, merge patches, and its refusals of what a node may not do. Time is tokio's, so a
//! paused clock rules the server as well. Tests change objects behind the client's back, and make requests
//! fail, hang or lose their answers.
//!
//! Not here: server-side apply, protobuf, tables, managedFields, validation beyond what an agent could
//! get wrong ([`crate::validation`]), controllers (nobody sets a lost node's conditions, deletes orphans or collects namespaces).

mod auth;
mod control;
mod defaults;
mod failure;
mod patch;
mod request;
mod resource;
mod reviews;
mod select;
mod server;
mod state;
mod verbs;
mod watch;

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use serde_json::json;
use tokio::time::Instant;

pub use auth::Identity;
pub use control::Object;
pub use request::Request;
pub use server::{ApiBody, ApiService, Served};
pub use state::Snapshot;

use crate::validation::{InvalidWrites, NoInvalidWrites};
use failure::Failure;
use state::State;

/// What goes wrong with a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It is refused with this HTTP status and has no effect.
    Status(u16),
    /// The connection breaks before it has an effect.
    Error(String),
    /// It has no effect and is never answered.
    Hang,
    /// It is heard this much later.
    Delay(Duration),
    /// It has its effect, but the connection breaks before the answer.
    LoseReply,
    /// It has its effect, but is never answered.
    HangAfterEffect,
}

impl From<u16> for Fault {
    fn from(code: u16) -> Self {
        Self::Status(code)
    }
}

type Matcher = Arc<dyn Fn(&Request) -> bool + Send + Sync>;
type OnRequest = Arc<dyn Fn(&Request) -> Option<Fault> + Send + Sync>;
type WallClock = Arc<dyn Fn() -> Timestamp + Send + Sync>;

struct Planned {
    matches: Matcher,
    fault: Fault,
    /// `None`: for good.
    left: Option<usize>,
}

struct Inner {
    state: State,
    log: Vec<Request>,
    requests: u64,
    refused: u64,
    down: Option<String>,
    latency: Duration,
    faults: Vec<Planned>,
    on_request: OnRequest,
    bookmark_every: Duration,
    clock: WallClock,
    credentials: HashMap<String, Identity>,
    /// Watches begun so far, and the newest of them that was closed or made to hang.
    watches: u64,
    closed_watches: u64,
    hung_watches: u64,
    invalid: InvalidWrites,
}

impl Inner {
    fn log(&mut self, request: &Request) -> u64 {
        self.requests += 1;
        let mut request = request.clone();
        request.number = self.requests;
        self.log.push(request);
        self.requests
    }

    fn logged(&mut self, number: u64, status: u16) {
        // The newest are at the end, and the log may have been taken.
        if let Some(request) = self.log.iter_mut().rev().find(|r| r.number == number) {
            request.status = status;
        }
    }

    fn fault_for(&mut self, request: &Request) -> Option<Fault> {
        let at = self
            .faults
            .iter()
            .position(|planned| (planned.matches)(request))?;
        let fault = self.faults[at].fault.clone();
        if let Some(left) = &mut self.faults[at].left {
            *left -= 1;
            if *left == 0 {
                self.faults.remove(at);
            }
        }
        Some(fault)
    }

    fn identify(&self, parts: &http::request::Parts) -> Result<Identity, Failure> {
        let Some(header) = parts.headers.get(http::header::AUTHORIZATION) else {
            return Ok(Identity::Admin);
        };
        let token = header
            .to_str()
            .ok()
            .and_then(|header| header.strip_prefix("Bearer "))
            .unwrap_or_default();
        if let Some(identity) = self.credentials.get(token) {
            return Ok(identity.clone());
        }
        match token.split_once(':') {
            Some(("node", name)) => Ok(Identity::Node(name.to_owned())),
            _ => Err(Failure::new(401, "Unauthorized", "Unauthorized")),
        }
    }
}

struct Shared {
    inner: Mutex<Inner>,
    /// Counts everything a waiting watch or test might care for.
    changed: tokio::sync::watch::Sender<u64>,
}

impl Shared {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Timestamp {
        let clock = Arc::clone(&self.inner().clock);
        clock()
    }

    fn tell(&self) {
        self.changed.send_modify(|count| *count += 1);
    }
}

/// A fake API server. Cheap to clone; clones are the same server.
///
/// Every write of a client meets the rules of [`crate::validation`], and what breaks one is refused. Dropping this while
/// there are such writes fails the test; one that makes them on purpose takes them ([`FakeApi::take_invalid_writes`]).
#[derive(Clone)]
pub struct FakeApi {
    shared: Arc<Shared>,
    invalid: NoInvalidWrites,
}

impl std::fmt::Debug for FakeApi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let inner = self.shared.inner();
        f.debug_struct("FakeApi")
            .field("objects", &inner.state.objects.len())
            .field("resource_version", &inner.state.rv)
            .field("down", &inner.down)
            .finish_non_exhaustive()
    }
}

impl Default for FakeApi {
    fn default() -> Self {
        Self::new()
    }
}

impl FakeApi {
    /// A server with the namespaces every cluster has. Must be called inside a tokio runtime.
    pub fn new() -> Self {
        let invalid = NoInvalidWrites::default();
        let (began, wall) = (Instant::now(), Timestamp::now());
        let elapsed = move || {
            let elapsed = jiff::SignedDuration::try_from(began.elapsed());
            wall + elapsed.unwrap_or_default()
        };
        let shared = Arc::new(Shared {
            inner: Mutex::new(Inner {
                state: State::new(),
                log: Vec::new(),
                requests: 0,
                refused: 0,
                down: None,
                latency: Duration::ZERO,
                faults: Vec::new(),
                on_request: Arc::new(|_| None),
                bookmark_every: Duration::from_secs(60),
                clock: Arc::new(elapsed),
                credentials: HashMap::from([("admin".to_owned(), Identity::Admin)]),
                watches: 0,
                closed_watches: 0,
                hung_watches: 0,
                invalid: invalid.writes(),
            }),
            changed: tokio::sync::watch::Sender::new(0),
        });
        let api = Self { shared, invalid };
        for name in ["default", "kube-system", "kube-public", "kube-node-lease"] {
            api.create_json(json!({
                "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name },
            }));
        }
        api
    }

    /// A client that may do everything. In this process: works while tokio's time is paused.
    pub fn client(&self) -> kube::Client {
        self.client_as(Identity::Admin)
    }

    /// A client that may do what the node `name` may.
    pub fn client_as_node(&self, name: &str) -> kube::Client {
        self.client_as(Identity::Node(name.to_owned()))
    }

    /// A client with the rights of `identity`.
    pub fn client_as(&self, identity: Identity) -> kube::Client {
        kube::Client::new(self.service_as(identity), "default")
    }

    /// The server as a tower service, to put layers around.
    pub fn service_as(&self, identity: Identity) -> ApiService {
        ApiService {
            shared: Arc::clone(&self.shared),
            identity: Some(identity),
        }
    }

    /// Serves plain HTTP/1.1 on `addr` (port 0 for any) until the handle is dropped. Who asks is told by the
    /// bearer token: `admin`, `node:<name>`, what [`FakeApi::add_credential`] added; without one it is the
    /// administrator.
    ///
    /// # Errors
    /// The port cannot be had.
    pub async fn serve(&self, addr: SocketAddr) -> io::Result<Served> {
        let service = ApiService {
            shared: Arc::clone(&self.shared),
            identity: None,
        };
        server::listen(service, addr).await
    }
}
