//! Proxies: `CONNECT`, the same within TLS, SOCKS 5.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use holdfast_testkit::envtest::Authority;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::server::{base64, server_tls};

/// How somebody gets through.
#[derive(Clone)]
pub(crate) enum Kind {
    Connect,
    /// With a certificate of this authority.
    Tls(Arc<Authority>),
    Socks5,
}

/// A proxy for `user` with the password `p@ss`, who may leave both out. Whatever it is asked for, it connects to one
/// server.
pub(crate) struct Proxy {
    kind: Kind,
    address: SocketAddr,
    server: SocketAddr,
    state: Arc<State>,
    running: Option<(CancellationToken, JoinHandle<()>)>,
}

#[derive(Default)]
struct State {
    /// What each tunnel was asked for.
    targets: Mutex<Vec<String>>,
    /// The users that came.
    users: Mutex<Vec<String>>,
    /// The status it answers with, where it lets nobody through.
    refusal: Mutex<Option<&'static str>>,
}

impl Proxy {
    pub(crate) async fn start(kind: Kind, server: SocketAddr) -> Self {
        let mut proxy = Self {
            kind,
            address: ([127, 0, 0, 1], 0).into(),
            server,
            state: Arc::default(),
            running: None,
        };
        proxy.begin().await;
        proxy
    }

    /// Listens, where it has listened before.
    pub(crate) async fn begin(&mut self) {
        let listener = TcpListener::bind(self.address).await.unwrap();
        self.address = listener.local_addr().unwrap();
        let (kind, server, state) = (self.kind.clone(), self.server, self.state.clone());
        let end = CancellationToken::new();
        let ended = end.clone();
        let serving = async move {
            loop {
                let (near, _) = listener.accept().await.unwrap();
                let through = serve(kind.clone(), near, server, state.clone());
                tokio::spawn(ended.clone().run_until_cancelled_owned(through));
            }
        };
        let running = tokio::spawn({
            let end = end.clone();
            async move {
                let _ended: Option<()> = end.run_until_cancelled(serving).await;
            }
        });
        self.running = Some((end, running));
    }

    /// Breaks off every connection and listens no more.
    pub(crate) async fn stop(&mut self) {
        let (end, running) = self.running.take().expect("it runs");
        end.cancel();
        running.await.unwrap();
    }

    /// Answers everybody so from now on.
    pub(crate) fn refuse(&self, status: &'static str) {
        *self.state.refusal.lock().unwrap() = Some(status);
    }

    pub(crate) fn url(&self, user: &str) -> String {
        let scheme = match self.kind {
            Kind::Connect => "http",
            Kind::Tls(_) => "https",
            Kind::Socks5 => "socks5",
        };
        format!("{scheme}://{user}{}", self.address)
    }

    /// What tunnels were made to.
    pub(crate) fn targets(&self) -> Vec<String> {
        self.state.targets.lock().unwrap().clone()
    }

    /// The users that have come, refused or not.
    pub(crate) fn users(&self) -> Vec<String> {
        self.state.users.lock().unwrap().clone()
    }
}

async fn serve(kind: Kind, mut near: TcpStream, server: SocketAddr, state: Arc<State>) {
    match kind {
        Kind::Connect => {
            if let Some(target) = connect_target(&mut near, &state).await {
                pass(near, server, &state, target).await;
            }
        }
        Kind::Tls(authority) => {
            let tls = server_tls(&authority.server("proxy"), &authority);
            // Whoever does not trust it breaks off.
            let Ok(mut near) = TlsAcceptor::from(Arc::new(tls)).accept(near).await else {
                return;
            };
            if let Some(target) = connect_target(&mut near, &state).await {
                pass(near, server, &state, target).await;
            }
        }
        Kind::Socks5 => {
            if let Some(target) = socks_target(&mut near, &state).await {
                pass(near, server, &state, target).await;
            }
        }
    }
}

async fn pass(
    mut near: impl AsyncRead + AsyncWrite + Unpin,
    server: SocketAddr,
    state: &State,
    target: String,
) {
    let mut far = TcpStream::connect(server).await.unwrap();
    state.targets.lock().unwrap().push(target);
    // An error is a connection that one side has dropped.
    drop(tokio::io::copy_bidirectional(&mut near, &mut far).await);
}

async fn connect_target(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    state: &State,
) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).unwrap();
    let header = "proxy-authorization: basic ";
    let given = head
        .lines()
        .find(|line| line.to_lowercase().starts_with(header));
    let given = given
        .map(|line| line[header.len()..].to_owned())
        .unwrap_or_default();
    state.users.lock().unwrap().push(given.clone());
    let refusal = *state.refusal.lock().unwrap();
    let status = match refusal {
        Some(status) => status,
        None if !given.is_empty() && given != base64("user:p@ss") => {
            "407 Proxy Authentication Required"
        }
        None => "200 OK",
    };
    let answer = format!("HTTP/1.1 {status}\r\n\r\n");
    stream.write_all(answer.as_bytes()).await.unwrap();
    stream.flush().await.unwrap();
    let target = head.strip_prefix("CONNECT ").expect("CONNECT");
    let target = target.split(' ').next().unwrap().to_owned();
    status.starts_with("200").then_some(target)
}

async fn socks_target(stream: &mut TcpStream, state: &State) -> Option<String> {
    async fn some(stream: &mut TcpStream) -> Option<Vec<u8>> {
        let length = stream.read_u8().await.ok()?;
        let mut bytes = vec![0; usize::from(length)];
        stream.read_exact(&mut bytes).await.ok()?;
        Some(bytes)
    }
    assert_eq!(stream.read_u8().await.ok()?, 5);
    let refused = state.refusal.lock().unwrap().is_some();
    if some(stream).await?.contains(&2) {
        stream.write_all(&[5, 2]).await.ok()?;
        assert_eq!(stream.read_u8().await.ok()?, 1);
        let (user, password) = (some(stream).await?, some(stream).await?);
        let good = !refused && user == b"user" && password == b"p@ss";
        state
            .users
            .lock()
            .unwrap()
            .push(String::from_utf8(user).unwrap());
        stream.write_all(&[1, u8::from(!good)]).await.ok()?;
        if !good {
            return None;
        }
    } else {
        stream.write_all(&[5, 0]).await.ok()?;
    }
    let mut request = [0; 4];
    stream.read_exact(&mut request).await.ok()?;
    assert_eq!(request[..3], [5, 1, 0]);
    let host = match request[3] {
        1 => {
            let mut ip = [0; 4];
            stream.read_exact(&mut ip).await.ok()?;
            std::net::Ipv4Addr::from(ip).to_string()
        }
        3 => String::from_utf8(some(stream).await?).unwrap(),
        other => panic!("address type {other}"),
    };
    let port = stream.read_u16().await.ok()?;
    let refusal = u8::from(refused);
    stream
        .write_all(&[5, refusal, 0, 1, 0, 0, 0, 0, 0, 0])
        .await
        .ok()?;
    (!refused).then(|| format!("{host}:{port}"))
}
