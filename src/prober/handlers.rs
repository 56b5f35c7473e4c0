//! Making one probe. Upstream: `prober.runProbeWithRetries` and `pkg/probe`.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::OnceLock;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, ExecAction, TCPSocketAction};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, SockaddrStorage, sockopt};
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::table::Job;
use super::{grpc, http};
use crate::kuberuntime::cri::{CriClient, CriError, CriErrorKind};
use crate::kuberuntime::env;
use crate::kuberuntime::pod_http::{Client, dial_error, host_port};

/// Upstream: `maxProbeRetries`.
const TRIES: usize = 3;
/// Kept of what a command or a server says, in bytes.
pub(super) const OUTPUT_LIMIT: usize = 10 * 1024;
/// Time after the end of a command's time within which the runtime has to say so. containerd waits for every process that has the
/// command's output, however long they run.
const RUNTIME_SILENCE: Duration = Duration::from_secs(30);
/// Time in which a runtime answers that works, and only has a command that does not end.
const ALIVE: Duration = Duration::from_secs(2);

/// Result of a probe that ran. A probe that cannot run is an error and has no result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Raw {
    /// Success.
    Success,
    /// A success with a warning for the user.
    Warning(String),
    /// Failure, with what was seen.
    Failure(String),
}

impl Raw {
    pub(super) fn success(&self) -> bool {
        !matches!(self, Self::Failure(_))
    }
}

/// Clients and settings that probes run with.
pub(super) struct Handlers {
    cri: CriClient,
    http: OnceLock<Result<Client, String>>,
}

impl Handlers {
    pub(super) fn new(cri: CriClient) -> Self {
        Self {
            cri,
            http: OnceLock::new(),
        }
    }

    /// Makes a probe; one that cannot be made is tried again at once. Cancel-safe: dropping it leaves at most
    /// a command that runs to its end.
    pub(super) async fn probe(&self, job: &Job) -> Result<Raw, String> {
        let begun = Instant::now();
        let mut answer = self.once(job).await;
        for _ in 1..TRIES {
            // A runtime that does not answer is not asked for more.
            if answer.is_ok() || begun.elapsed() >= RUNTIME_SILENCE {
                break;
            }
            answer = self.once(job).await;
        }
        answer
    }

    /// Runs the probe once. Boxes the large futures, so that this one stays small.
    async fn once(&self, job: &Job) -> Result<Raw, String> {
        let probe = &job.target.probe;
        let container = &job.target.container;
        let timeout = job.target.spec.timeout;
        if let Some(exec) = &probe.exec {
            return Box::pin(self.exec(job, exec, timeout)).await;
        }
        if let Some(get) = &probe.http_get {
            let host = host(get.host.as_deref(), &job.ip)?;
            let port = port(&get.port, container)?;
            let client = || Client::new().map_err(|error| error.to_string());
            let client = self.http.get_or_init(client).as_ref()?;
            return Box::pin(http::get(client, get, &host, port, timeout)).await;
        }
        if let Some(socket) = &probe.tcp_socket {
            return tcp(socket, container, &job.ip, timeout).await;
        }
        if let Some(action) = &probe.grpc {
            let host = host(None, &job.ip)?;
            let port = number(i64::from(action.port))?;
            let service = action.service.as_deref().unwrap_or_default();
            return Ok(Box::pin(grpc::check(&host_port(&host, port), service, timeout)).await);
        }
        Err(format!(
            "the probe of container {} has no handler that is known",
            container.name
        ))
    }

    async fn exec(&self, job: &Job, exec: &ExecAction, timeout: Duration) -> Result<Raw, String> {
        let vars: Vec<(String, Vec<u8>)> = job
            .target
            .container
            .env
            .iter()
            .flatten()
            .map(|var| {
                let value = var.value.clone().unwrap_or_default();
                (var.name.clone(), value.into_bytes())
            })
            .collect();
        let lookup = env::lookup_in(&vars);
        let command: Vec<String> = exec
            .command
            .iter()
            .flatten()
            .map(|word| env::expand_text(word, &lookup).map_err(|error| error.to_string()))
            .collect::<Result<_, _>>()?;
        let words = command.join(" ");
        let timed_out = || {
            Raw::Failure(format!(
                "command timed out: {words:?} timed out after {}",
                humantime::format_duration(timeout)
            ))
        };
        let start = Instant::now();
        let id = &job.container_id;
        let call = (self.cri).exec_sync_within(id, command, timeout, RUNTIME_SILENCE);
        match call.await {
            Ok(answer) if answer.exit_code == 0 => Ok(Raw::Success),
            Ok(answer) => {
                let mut output = answer.stdout;
                output.extend_from_slice(&answer.stderr);
                Ok(Raw::Failure(text(&output)))
            }
            Err(error) if error.kind == CriErrorKind::DeadlineExceeded => {
                // The runtime says so, or it does not answer.
                match start.elapsed() < timeout + RUNTIME_SILENCE {
                    true => Ok(timed_out()),
                    false => self.unended(job, timed_out()).await,
                }
            }
            Err(error) => Err(error.to_string()),
        }
    }

    /// Returns the result of a command that has not ended in its time: none, unless the runtime answers.
    async fn unended(&self, job: &Job, failure: Raw) -> Result<Raw, String> {
        let alive = self.cri.container_status(&job.container_id);
        let is_away = |error: &CriError| {
            error.is_unavailable() || error.kind == CriErrorKind::DeadlineExceeded
        };
        match tokio::time::timeout(ALIVE, alive).await {
            Ok(answer) if !answer.as_ref().is_err_and(is_away) => Ok(failure),
            _ => Err(
                "the runtime does not answer, so that it is not known why the command has not ended"
                    .to_owned(),
            ),
        }
    }
}

async fn tcp(
    socket: &TCPSocketAction,
    container: &Container,
    ip: &str,
    timeout: Duration,
) -> Result<Raw, String> {
    let host = host(socket.host.as_deref(), ip)?;
    let port = port(&socket.port, container)?;
    let connected = tokio::time::timeout(timeout, dial(&host, port)).await;
    if let Ok(Ok(())) = connected {
        return Ok(Raw::Success);
    }
    let address = host_port(&host, port);
    Ok(Raw::Failure(match connected {
        Ok(Err(error)) => dial_error(&address, &error),
        _ => format!("dial tcp {address}: i/o timeout"),
    }))
}

/// Connects, and hangs up.
async fn dial(host: &str, port: u16) -> io::Result<()> {
    let Ok(ip) = host.parse::<IpAddr>() else {
        return TcpStream::connect((host, port)).await.map(drop);
    };
    match connect(SocketAddr::new(ip, port))? {
        Connect::Done => Ok(()),
        Connect::Pending(stream) => {
            let stream = TcpStream::from_std(stream)?;
            stream.writable().await?;
            stream.take_error()?.map_or(Ok(()), Err)
        }
    }
}

/// Progress of a connection, checked without waiting for it.
enum Connect {
    Done,
    Pending(std::net::TcpStream),
}

/// Begins to connect. A pod of this node has mostly answered before the system call returns, and then no task has to be
/// woken for it.
fn connect(address: SocketAddr) -> io::Result<Connect> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::Inet,
        SocketAddr::V6(_) => AddressFamily::Inet6,
    };
    let socket = socket::socket(family, SockType::Stream, flags, None)?;
    match socket::connect(socket.as_raw_fd(), &SockaddrStorage::from(address)) {
        Ok(()) => return Ok(Connect::Done),
        Err(Errno::EINPROGRESS) => {}
        Err(errno) => return Err(errno.into()),
    }
    let mut asked = [PollFd::new(socket.as_fd(), PollFlags::POLLOUT)];
    match poll(&mut asked, PollTimeout::ZERO) {
        Ok(0) | Err(Errno::EINTR) => return Ok(Connect::Pending(socket.into())),
        Ok(_) => {}
        Err(errno) => return Err(errno.into()),
    }
    match socket::getsockopt(&socket, sockopt::SocketError)? {
        0 => Ok(Connect::Done),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Whom to probe: the host of the spec, or else the pod.
fn host(given: Option<&str>, ip: &str) -> Result<String, String> {
    let host = given.filter(|h| !h.is_empty()).unwrap_or(ip);
    if host.is_empty() {
        return Err("the pod has no IP address yet".to_owned());
    }
    // An IPv6 address may be given as in a URL.
    let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
    Ok(bare.unwrap_or(host).to_owned())
}

/// A port by its number, or by its name among the container's. Upstream: `probe.ResolveContainerPort`.
fn port(port: &IntOrString, container: &Container) -> Result<u16, String> {
    match port {
        IntOrString::Int(port) => number(i64::from(*port)),
        IntOrString::String(name) => {
            let mut ports = container.ports.iter().flatten();
            let named = ports.find(|p| p.name.as_deref() == Some(name.as_str()));
            if let Some(named) = named {
                return number(i64::from(named.container_port));
            }
            let port = name.parse().map_err(|_| {
                format!(
                    "container {} has no port named {name:?}; add it to its ports or probe a number",
                    container.name
                )
            })?;
            number(port)
        }
    }
}

fn number(port: i64) -> Result<u16, String> {
    u16::try_from(port)
        .ok()
        .filter(|port| *port > 0)
        .ok_or_else(|| format!("{port} is no port number, only 1 to 65535 are"))
}

/// Output as text, cut to [`OUTPUT_LIMIT`].
pub(super) fn text(output: &[u8]) -> String {
    let cut = output.get(..OUTPUT_LIMIT).unwrap_or(output);
    String::from_utf8_lossy(cut).into_owned()
}
