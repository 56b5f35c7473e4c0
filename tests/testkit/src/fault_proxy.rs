//! A proxy between an agent and an API server that fails as it is told and counts the requests.
//!
//! It ends TLS with a certificate of its own and connects on with a certificate of its own: whoever comes through
//! it is who the proxy is upstream (bearer tokens are handed through). Watches are handed on as they come,
//! unbuffered. Upgraded connections (exec, attach, port-forward) do not go through.
//!
//! Faults come in two kinds. Those of the connection hold until [`FaultProxy::heal`]: [`FaultProxy::cut`],
//! [`FaultProxy::delay`], [`FaultProxy::stall_watches`], [`FaultProxy::stall_all`]. Those of requests are rules
//! and hold for a number of requests: the first rule that matches is used, once per request.
//!
//! It runs on threads of its own, so a test may block meanwhile.

mod forward;
mod request;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::sync::watch;

pub use request::ApiRequest;

use crate::envtest::Identity;

/// Between what a proxy stands.
#[derive(Clone, Debug)]
pub struct ProxyConfig {
    /// `https://…` or `http://…`, without a path.
    pub upstream: String,
    /// Who signed the upstream's certificate. None: upstream is plain HTTP.
    pub ca_pem: Option<String>,
    /// Who the proxy is upstream. None: whoever the request's bearer token names.
    pub client: Option<Identity>,
    /// The certificate it serves with. None: it serves plain HTTP.
    pub serve: Option<Identity>,
}

/// What happens to a request.
#[derive(Clone, Debug)]
pub enum Fault {
    /// It is not forwarded but answered with this HTTP code and a `Status` object.
    Status {
        /// 400 and above.
        code: u16,
        /// The reason in the `Status`; empty: the usual one of the code.
        reason: &'static str,
        /// `Retry-After` in seconds.
        retry_after: Option<u32>,
    },
    /// A watch is answered with 200 and one event `ERROR` that says 410 `Expired`, as an API server does whose
    /// history does not reach back that far.
    WatchExpired,
    /// It is forwarded this much later.
    Delay(Duration),
    /// It is not forwarded; the connection breaks without an answer.
    Refuse,
    /// It is forwarded and done, but the connection breaks before the answer's first byte.
    LoseAnswer,
    /// The answer breaks off after so many bytes of its body.
    Truncate(usize),
}

impl Fault {
    /// A status without `Retry-After`.
    pub fn status(code: u16) -> Self {
        Self::Status {
            code,
            reason: "",
            retry_after: None,
        }
    }
}

type Matcher = Box<dyn Fn(&ApiRequest) -> bool + Send + Sync>;

struct Rule {
    matcher: Matcher,
    fault: Fault,
    /// Requests it still holds for.
    left: usize,
}

/// A running proxy; stops when dropped.
#[derive(Debug)]
pub struct FaultProxy {
    shared: Arc<Shared>,
    address: SocketAddr,
    tls: bool,
    runtime: Option<Runtime>,
}

/// What connections and the test share.
struct Shared {
    state: Mutex<State>,
    /// Counts requests, for waiting.
    seen: watch::Sender<u64>,
    /// Whether connections are cut.
    cut: watch::Sender<bool>,
    stall: watch::Sender<Stall>,
    listening: AtomicBool,
    connections: AtomicUsize,
}

#[derive(Default)]
struct State {
    rules: Vec<Rule>,
    delay: Duration,
    counts: BTreeMap<(String, String), u64>,
    requests: Vec<ApiRequest>,
    bytes_sent: u64,
    /// Serial numbers of watches.
    watches_begun: u64,
    watches_open: BTreeMap<u64, String>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Stall {
    /// Watches up to this serial number.
    watches: u64,
    everything: bool,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.state();
        f.debug_struct("Shared")
            .field("counts", &state.counts)
            .field("rules", &state.rules.len())
            .finish_non_exhaustive()
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a request and finds what happens to it.
    fn begin(&self, request: &ApiRequest) -> (Option<Fault>, Duration) {
        let mut state = self.state();
        let key = (request.verb.clone(), request.resource.clone());
        *state.counts.entry(key).or_default() += 1;
        state.requests.push(request.clone());
        let rule = state
            .rules
            .iter_mut()
            .find(|rule| rule.left > 0 && (rule.matcher)(request));
        let fault = rule.map(|rule| {
            rule.left -= 1;
            rule.fault.clone()
        });
        state.rules.retain(|rule| rule.left > 0);
        let delay = state.delay;
        drop(state);
        self.seen.send_modify(|seen| *seen += 1);
        (fault, delay)
    }
}

impl FaultProxy {
    /// Starts one on a free port of 127.0.0.1.
    ///
    /// # Errors
    /// When the certificates are none or there is no port.
    pub fn start(config: ProxyConfig) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            seen: watch::Sender::new(0),
            cut: watch::Sender::new(false),
            stall: watch::Sender::new(Stall::default()),
            listening: AtomicBool::new(true),
            connections: AtomicUsize::new(0),
        });
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("fault-proxy")
            .enable_all()
            .build()?;
        let tls = config.serve.is_some();
        let guard = runtime.enter();
        let address = forward::serve(config, Arc::clone(&shared))?;
        drop(guard);
        Ok(Self {
            shared,
            address,
            tls,
            runtime: Some(runtime),
        })
    }

    /// Its URL, in a kubeconfig the server's.
    pub fn url(&self) -> String {
        let scheme = if self.tls { "https" } else { "http" };
        format!("{scheme}://{}", self.address)
    }

    /// Closes every connection and refuses new ones until [`FaultProxy::heal`]. Has happened on return.
    pub fn cut(&self) {
        self.shared.cut.send_replace(true);
        self.settle(|shared| {
            !shared.listening.load(Ordering::Acquire)
                && shared.connections.load(Ordering::Acquire) == 0
        });
    }

    /// Ends every fault of the connection: cut, delay, stalls. What was stalled goes on. Rules stay. Has
    /// happened on return.
    pub fn heal(&self) {
        self.shared.state().delay = Duration::ZERO;
        self.shared.stall.send_replace(Stall::default());
        self.shared.cut.send_replace(false);
        self.settle(|shared| shared.listening.load(Ordering::Acquire));
    }

    /// Waits for the proxy's own threads, which do not need the caller's.
    fn settle(&self, done: impl Fn(&Shared) -> bool) {
        while !done(&self.shared) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Forwards every request this much later.
    pub fn delay(&self, delay: Duration) {
        self.shared.state().delay = delay;
    }

    /// From now on nothing comes on the watches that are open now, and nothing ends them: half-open connections. New
    /// requests are not touched.
    pub fn stall_watches(&self) {
        let begun = self.shared.state().watches_begun;
        self.shared.stall.send_modify(|stall| stall.watches = begun);
    }

    /// From now on no answer comes, on connections old and new, and nothing ends them. Requests that come meanwhile are
    /// not forwarded before [`FaultProxy::heal`].
    pub fn stall_all(&self) {
        self.shared
            .stall
            .send_modify(|stall| stall.everything = true);
    }

    /// The next `times` requests that match suffer a fault.
    pub fn inject(
        &self,
        times: usize,
        fault: Fault,
        matcher: impl Fn(&ApiRequest) -> bool + Send + Sync + 'static,
    ) {
        self.shared.state().rules.push(Rule {
            matcher: Box::new(matcher),
            fault,
            left: times,
        });
    }

    /// [`FaultProxy::inject`] for a verb and a resource, as they are counted.
    pub fn inject_on(&self, times: usize, fault: Fault, verb: &str, resource: &str) {
        let (verb, resource) = (verb.to_owned(), resource.to_owned());
        self.inject(times, fault, move |request| request.is(&verb, &resource));
    }

    /// Forgets the rules.
    pub fn clear_rules(&self) {
        self.shared.state().rules.clear();
    }

    /// Requests that rules are still waiting for.
    pub fn rules_left(&self) -> usize {
        self.shared.state().rules.iter().map(|rule| rule.left).sum()
    }

    /// Requests since the start or the last [`FaultProxy::reset`], by verb and resource: `("PATCH", "pods/status")`,
    /// `("LIST", "pods")`, `("WATCH", "pods")`, `("GET", "pods")`. Those that suffered a fault count, too; those
    /// that found connections cut do not.
    pub fn counts(&self) -> BTreeMap<(String, String), u64> {
        self.shared.state().counts.clone()
    }

    /// One of [`FaultProxy::counts`].
    pub fn count(&self, verb: &str, resource: &str) -> u64 {
        let key = (verb.to_owned(), resource.to_owned());
        self.shared.state().counts.get(&key).copied().unwrap_or(0)
    }

    /// The requests that [`FaultProxy::counts`] counts, in their order.
    pub fn requests(&self) -> Vec<ApiRequest> {
        self.shared.state().requests.clone()
    }

    /// Bytes of bodies that were handed to clients since the start or the last [`FaultProxy::reset`].
    pub fn bytes_sent(&self) -> u64 {
        self.shared.state().bytes_sent
    }

    /// Watches of a resource that are open now.
    pub fn open_watches(&self, resource: &str) -> usize {
        let state = self.shared.state();
        state
            .watches_open
            .values()
            .filter(|r| *r == resource)
            .count()
    }

    /// Counts from zero again.
    pub fn reset(&self) {
        let mut state = self.shared.state();
        state.counts.clear();
        state.requests.clear();
        state.bytes_sent = 0;
    }

    /// Waits until so many requests of a kind have come since the start or the last [`FaultProxy::reset`]; false when
    /// they have not within `limit`. Cancel-safe.
    pub async fn wait_for(&self, verb: &str, resource: &str, count: u64, limit: Duration) -> bool {
        let mut seen = self.shared.seen.subscribe();
        let there = seen.wait_for(|_| self.count(verb, resource) >= count);
        matches!(tokio::time::timeout(limit, there).await, Ok(Ok(_)))
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        // Inside a runtime, waiting for the end of this one would panic.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
