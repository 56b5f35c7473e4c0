//! Ports that are served as soon as they can be bound: their holder may still be ending, their address may come later.
//!
//! **Invariant:** an agent whose port a kubelet may have touches no pod: each of the two would stop the pods of the other.

use std::fs;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::Ipv6V6Only;
use tokio::net::{TcpListener, TcpSocket};
use tokio_util::sync::CancellationToken;

use super::ServerError;
use crate::types::{Clock, Pace, blocking, causes};

/// Interval between attempts to bind a port. Upstream: `wait.Until` of the health server, 5 s as well.
const RETRY: Duration = Duration::from_secs(5);

/// Connections that may wait to be accepted, as in the standard library.
const BACKLOG: u32 = 1024;

/// Processes.
const PROC: &str = "/proc";

/// Purpose of a port.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Service {
    /// Healthz and metrics.
    Health,
    /// The kubelet's API, on the port that this flag gives.
    Api(&'static str),
}

/// A port, bound or still to be bound.
#[derive(Debug)]
pub(crate) struct Door {
    address: SocketAddr,
    service: Service,
    retry: Duration,
    listener: Option<TcpListener>,
    pace: Pace,
}

impl Door {
    /// Binds the port if that is possible now. Otherwise logs why not; [`Self::listener`] tries again.
    ///
    /// # Errors
    /// [`ServerError::Kubelet`] when the port is taken and a kubelet runs.
    pub(crate) async fn open(
        address: SocketAddr,
        service: Service,
        clock: &dyn Clock,
    ) -> Result<Self, ServerError> {
        let mut door = Self {
            address,
            service,
            retry: RETRY,
            listener: None,
            pace: Pace::default(),
        };
        if door.try_again(clock).await == Some(ErrorKind::AddrInUse) {
            let found = blocking::run(|| kubelet_in(Path::new(PROC))).await;
            // Only a runtime that is shutting down cancels blocking work.
            if let Some(pid) = found.ok().flatten() {
                return Err(ServerError::Kubelet { address, pid });
            }
        }
        Ok(door)
    }

    /// A port that is bound already.
    pub(crate) fn of(listener: TcpListener, address: SocketAddr, service: Service) -> Self {
        Self {
            address,
            service,
            retry: RETRY,
            listener: Some(listener),
            pace: Pace::default(),
        }
    }

    /// Tries that often from now on.
    #[cfg(test)]
    fn every(mut self, retry: Duration) -> Self {
        self.retry = retry;
        self
    }

    /// Returns the bound address; `None` as long as the port is not bound.
    pub(crate) fn local_addr(&self) -> Option<SocketAddr> {
        self.listener.as_ref()?.local_addr().ok()
    }

    /// Waits until the port is bound. `None` when `stop` is cancelled before. Logs again from time to time why it is not.
    pub(crate) async fn listener(
        mut self,
        clock: &dyn Clock,
        stop: &CancellationToken,
    ) -> Option<TcpListener> {
        while self.listener.is_none() {
            tokio::select! {
                () = tokio::time::sleep(self.retry) => {}
                () = stop.cancelled() => return None,
            }
            self.try_again(clock).await;
            if self.listener.is_some() {
                tracing::info!(address = %self.address, "the port could be bound, serving it");
            }
        }
        self.listener
    }

    /// Returns the kind of the error, if there was one.
    async fn try_again(&mut self, clock: &dyn Clock) -> Option<ErrorKind> {
        match bind(self.address, self.service).await {
            Ok(listener) => {
                self.listener = Some(listener);
                None
            }
            Err(error) => {
                let kind = match &error {
                    ServerError::Bind { source, .. } | ServerError::BindApi { source, .. } => {
                        Some(source.kind())
                    }
                    _ => None,
                };
                let error = causes(&error);
                if self.pace.is_due("port", &error, clock.now()) {
                    tracing::warn!(error, "cannot listen yet, trying again every 5 s");
                }
                kind
            }
        }
    }
}

/// The process of a kubelet that may have ports of this network namespace. Blocking.
fn kubelet_in(proc: &Path) -> Option<u32> {
    let network = |process: &Path| fs::read_link(process.join("ns/net")).ok();
    let own = network(&proc.join("self"));
    let processes = fs::read_dir(proc).ok()?.filter_map(|entry| {
        let name = entry.ok()?.file_name();
        name.to_str()?.parse::<u32>().ok()
    });
    let mut kubelets = processes.filter(|pid| {
        let process = proc.join(pid.to_string());
        let is_kubelet = fs::read(process.join("comm")).is_ok_and(|name| name == b"kubelet\n");
        // That of a process with more rights cannot be read.
        is_kubelet && network(&process).is_none_or(|network| Some(network) == own)
    });
    kubelets.next()
}

/// Binds a port.
///
/// # Errors
/// [`ServerError::Bind`] and [`ServerError::BindApi`], which name the port and the flag.
async fn bind(addr: SocketAddr, service: Service) -> Result<TcpListener, ServerError> {
    listen(addr).await.map_err(|source| match service {
        Service::Health => ServerError::Bind { addr, source },
        Service::Api(flag) => ServerError::BindApi { addr, flag, source },
    })
}

/// Listens on an address. `0.0.0.0` stands for all addresses of both families, as in Go; on a machine without IPv6 for
/// those of IPv4.
async fn listen(addr: SocketAddr) -> io::Result<TcpListener> {
    if addr.ip() == IpAddr::V4(Ipv4Addr::UNSPECIFIED) {
        match listen_on_both_families(addr.port()) {
            Err(error) if lacks_v6(&error) => {}
            done => return done,
        }
    }
    TcpListener::bind(addr).await
}

fn listen_on_both_families(port: u16) -> io::Result<TcpListener> {
    let socket = TcpSocket::new_v6()?;
    setsockopt(&socket, Ipv6V6Only, &false)?;
    // As `TcpListener::bind` does.
    socket.set_reuseaddr(true)?;
    socket.bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)))?;
    socket.listen(BACKLOG)
}

fn lacks_v6(error: &io::Error) -> bool {
    let known = [Errno::EAFNOSUPPORT, Errno::EADDRNOTAVAIL];
    known
        .iter()
        .any(|one| error.raw_os_error() == Some(*one as i32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpStream;

    use crate::types::{BootId, SystemClock};

    #[tokio::test]
    async fn a_port_that_is_taken_is_named_with_its_flag() {
        let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = taken.local_addr().unwrap();
        for (service, flag) in [
            (Service::Health, "--healthz-port"),
            (Service::Api("--port"), "--port"),
            (Service::Api("--read-only-port"), "--read-only-port"),
        ] {
            let error = bind(address, service).await.unwrap_err().to_string();
            let port = format!("port {} is in use", address.port());
            assert!(error.contains(&port) && error.contains(flag), "{error}");
        }
        let elsewhere = "192.0.2.77:10250".parse().unwrap();
        let error = bind(elsewhere, Service::Api("--port")).await.unwrap_err();
        assert!(error.to_string().contains("--address"), "{error}");
    }

    #[tokio::test]
    async fn all_addresses_are_those_of_both_families() {
        let any = "0.0.0.0:0".parse().unwrap();
        let listener = bind(any, Service::Api("--port")).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(TcpStream::connect(("127.0.0.1", port)).await.unwrap());
        let without_v6 = std::net::TcpListener::bind("[::1]:0").is_err();
        let reached = TcpStream::connect(("::1", port)).await;
        assert!(reached.is_ok() || without_v6, "{reached:?}");
        // A port of one family is in use for both.
        let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = taken.local_addr().unwrap().port();
        let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
        let error = bind(any, Service::Api("--port")).await.unwrap_err();
        assert!(error.to_string().contains("is in use"), "{error}");
    }

    #[tokio::test]
    async fn a_port_is_bound_once_its_holder_has_ended() {
        let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = taken.local_addr().unwrap();
        let clock = SystemClock::new(BootId(1));
        let stop = CancellationToken::new();
        let door = Door::open(address, Service::Health, &clock).await.unwrap();
        let door = door.every(Duration::from_millis(10));
        assert_eq!(door.local_addr(), None);
        let freed = async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            drop(taken);
        };
        let (listener, ()) = tokio::join!(door.listener(&clock, &stop), freed);
        assert_eq!(listener.unwrap().local_addr().unwrap(), address);

        let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = taken.local_addr().unwrap();
        let door = Door::open(address, Service::Health, &clock).await.unwrap();
        stop.cancel();
        assert!(door.listener(&clock, &stop).await.is_none());
    }

    #[test]
    fn a_kubelet_of_this_network_is_found() {
        let proc = tempfile::tempdir().unwrap();
        let process = |pid: &str, name: &str, network: Option<&str>| {
            let dir = proc.path().join(pid);
            fs::create_dir_all(dir.join("ns")).unwrap();
            fs::write(dir.join("comm"), format!("{name}\n")).unwrap();
            if let Some(network) = network {
                std::os::unix::fs::symlink(network, dir.join("ns/net")).unwrap();
            }
        };
        process("self", "holdfast", Some("net:[1]"));
        process("10", "kubelet-proxy", Some("net:[1]"));
        process("11", "kubelet", Some("net:[2]"));
        assert_eq!(kubelet_in(proc.path()), None);
        process("12", "kubelet", Some("net:[1]"));
        assert_eq!(kubelet_in(proc.path()), Some(12));
        fs::remove_dir_all(proc.path().join("12")).unwrap();
        process("13", "kubelet", None);
        assert_eq!(kubelet_in(proc.path()), Some(13));
    }
}
