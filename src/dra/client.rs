//! Calls to one instance of a DRA driver over its socket. Each has a deadline, so that a driver that hangs holds up the pods
//! that need it and nobody else.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use prost::Message;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;
use tower::service_fn;

use super::proto::{
    Claim, NodePrepareResourcesRequest, NodePrepareResourcesResponse,
    NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse, NodeWatchResourcesRequest,
    NodeWatchResourcesResponse, method,
};
use crate::core::claims::ClaimDevice;
use crate::devicemanager;
use crate::types::causes;
use crate::types::metrics::{DraGrpcLabel, Metrics};

/// Timeout of a connection.
const DIAL: Duration = Duration::from_secs(10);
/// Timeout of a call; upstream's `defaultClientCallTimeout`.
const CALL: Duration = Duration::from_secs(45);
/// Pauses before a driver that went away is connected to again: the first and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(60));
/// Bytes of a connection that nobody has taken yet.
const BUFFER: usize = 32 * 1024;

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum CallError {
    #[error("cannot connect to {}: {why}", path.display())]
    Dial { path: PathBuf, why: String },
    #[error("rpc error: code = {} desc = {message}", code_name(*code))]
    Status { code: Code, message: String },
    #[error("rpc error: code = DeadlineExceeded desc = no answer within {}", humantime::format_duration(*.0))]
    Late(Duration),
}

impl CallError {
    fn code(&self) -> Code {
        match self {
            Self::Dial { .. } => Code::Unavailable,
            Self::Status { code, .. } => *code,
            Self::Late(_) => Code::DeadlineExceeded,
        }
    }
}

impl From<Status> for CallError {
    fn from(status: Status) -> Self {
        Self::Status {
            code: status.code(),
            message: status.message().to_owned(),
        }
    }
}

fn unavailable(error: tonic::transport::Error) -> CallError {
    CallError::Status {
        code: Code::Unavailable,
        message: causes(&error),
    }
}

/// Returns the name of a code as gRPC's Go library spells it.
fn code_name(code: Code) -> String {
    match code {
        Code::Ok => "OK".to_owned(),
        Code::Cancelled => "Canceled".to_owned(),
        other => format!("{other:?}"),
    }
}

/// Answers of a driver by UID of the claim; an error is the driver's own.
pub(super) type Answers<T> = BTreeMap<String, Result<T, String>>;

/// An instance of a driver. Cheap to clone.
#[derive(Clone)]
pub(super) struct DriverClient {
    inner: Arc<Inner>,
}

struct Inner {
    driver: String,
    socket: PathBuf,
    /// Begin of the methods.
    service: &'static str,
    metrics: Metrics,
    /// The connection that is open.
    open: Mutex<Option<Connection>>,
    connected: watch::Sender<bool>,
    /// Set for good by [`DriverClient::close`], under the lock of `open`.
    is_closed: AtomicBool,
    /// Number of the newest connection.
    newest: AtomicU64,
    /// Held while a connection is opened, so that there is one.
    dialling: tokio::sync::Mutex<()>,
}

struct Connection {
    number: u64,
    channel: Channel,
}

impl DriverClient {
    pub(super) fn new(
        driver: &str,
        socket: &Path,
        service: &'static str,
        metrics: Metrics,
    ) -> Self {
        Self {
            inner: Arc::new(Inner {
                driver: driver.to_owned(),
                socket: socket.to_owned(),
                service,
                metrics,
                open: Mutex::new(None),
                connected: watch::Sender::new(false),
                is_closed: AtomicBool::new(false),
                newest: AtomicU64::new(0),
                dialling: tokio::sync::Mutex::default(),
            }),
        }
    }

    pub(super) fn socket(&self) -> &Path {
        &self.inner.socket
    }

    /// Returns whether a connection is open.
    pub(super) fn is_connected(&self) -> bool {
        *self.inner.connected.borrow()
    }

    /// Keeps a connection open, which shows whether the driver is there, for ever. `changed` is called when it is opened or
    /// ends.
    pub(super) async fn keep_connected(&self, changed: impl Fn()) {
        let mut connected = self.inner.connected.subscribe();
        let mut pause = PAUSES.0;
        loop {
            if self.channel().await.is_ok() && self.is_connected() {
                pause = PAUSES.0;
                changed();
                // The sender lives as long as this client.
                drop(connected.wait_for(|is_open| !is_open).await);
                changed();
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// Ends the connection once no call uses it. A call that begins later has one of its own.
    pub(super) fn close(&self) {
        let mut open = self.open();
        self.inner.is_closed.store(true, Ordering::Relaxed);
        *open = None;
        self.inner.connected.send_replace(false);
    }

    /// Opens the stream of the health of the driver's devices, by the path of its method.
    pub(super) async fn watch_health(
        &self,
        path: &'static str,
    ) -> Result<Streaming<NodeWatchResourcesResponse>, CallError> {
        let mut client = Grpc::new(self.channel().await?);
        client.ready().await.map_err(unavailable)?;
        let path = PathAndQuery::from_static(path);
        let codec = ProstCodec::<NodeWatchResourcesRequest, NodeWatchResourcesResponse>::default();
        let request = Request::new(NodeWatchResourcesRequest {});
        let answer = client.server_streaming(request, path, codec).await?;
        Ok(answer.into_inner())
    }

    /// Has the driver prepare claims.
    pub(super) async fn prepare(
        &self,
        claims: Vec<Claim>,
    ) -> Result<Answers<Vec<ClaimDevice>>, CallError> {
        let request = NodePrepareResourcesRequest { claims };
        let answer: NodePrepareResourcesResponse = self.call(method::PREPARE, request).await?;
        let of_claim = |of: super::proto::NodePrepareResourceResponse| {
            if !of.error.is_empty() {
                return Err(of.error);
            }
            let device = |device: super::proto::Device| ClaimDevice {
                pool: device.pool_name,
                device: device.device_name,
                requests: device.request_names,
                cdi: device.cdi_device_ids,
                share: device.share_id,
            };
            Ok(of.devices.into_iter().map(device).collect())
        };
        let answers = answer.claims.into_iter();
        Ok(answers.map(|(uid, of)| (uid, of_claim(of))).collect())
    }

    /// Has the driver unprepare claims.
    pub(super) async fn unprepare(&self, claims: Vec<Claim>) -> Result<Answers<()>, CallError> {
        let request = NodeUnprepareResourcesRequest { claims };
        let answer: NodeUnprepareResourcesResponse = self.call(method::UNPREPARE, request).await?;
        let answers = answer.claims.into_iter();
        let of_claim = |of: super::proto::NodeUnprepareResourceResponse| match of.error {
            error if error.is_empty() => Ok(()),
            error => Err(error),
        };
        Ok(answers.map(|(uid, of)| (uid, of_claim(of))).collect())
    }

    async fn call<Req, Res>(&self, method: &'static str, message: Req) -> Result<Res, CallError>
    where
        Req: Message + 'static,
        Res: Message + Default + 'static,
    {
        let begun = tokio::time::Instant::now();
        let answer = tokio::time::timeout(CALL, self.unary(method, message)).await;
        let answer = answer.unwrap_or(Err(CallError::Late(CALL)));
        let code = answer.as_ref().err().map_or(Code::Ok, CallError::code);
        let label = DraGrpcLabel {
            driver_name: self.inner.driver.clone(),
            method_name: format!("{}{method}", self.inner.service),
            grpc_status_code: code_name(code),
        };
        let duration = &self.inner.metrics.dra_grpc_operations;
        let duration = duration.get_or_create_owned(&label);
        duration.observe(begun.elapsed().as_secs_f64());
        answer
    }

    async fn unary<Req, Res>(&self, method: &'static str, message: Req) -> Result<Res, CallError>
    where
        Req: Message + 'static,
        Res: Message + Default + 'static,
    {
        let mut request = Request::new(message);
        request.set_timeout(CALL);
        let mut client = Grpc::new(self.channel().await?);
        client.ready().await.map_err(unavailable)?;
        let path = PathAndQuery::try_from(format!("{}{method}", self.inner.service));
        let path = path.map_err(|error| CallError::Status {
            code: Code::Internal,
            message: error.to_string(),
        })?;
        let codec = ProstCodec::<Req, Res>::default();
        let answer = client.unary(request, path, codec).await?;
        Ok(answer.into_inner())
    }

    fn open(&self) -> MutexGuard<'_, Option<Connection>> {
        let open = self.inner.open.lock();
        open.unwrap_or_else(PoisonError::into_inner)
    }

    fn opened(&self) -> Option<Channel> {
        self.open().as_ref().map(|open| open.channel.clone())
    }

    /// The open connection, or a new one.
    async fn channel(&self) -> Result<Channel, CallError> {
        if let Some(channel) = self.opened() {
            return Ok(channel);
        }
        let _turn = self.inner.dialling.lock().await;
        if let Some(channel) = self.opened() {
            return Ok(channel);
        }
        let failed = |why: String| CallError::Dial {
            path: self.inner.socket.clone(),
            why,
        };
        let number = self.inner.newest.fetch_add(1, Ordering::Relaxed) + 1;
        let is_over = CancellationToken::new();
        let dialled = tokio::time::timeout(DIAL, self.dial(number, is_over.clone())).await;
        let late = || format!("no answer within {}", humantime::format_duration(DIAL));
        let channel = dialled.map_err(|_| failed(late()))?;
        let channel = channel.map_err(|error| failed(causes(&error)))?;
        let mut open = self.open();
        if !is_over.is_cancelled() && !self.inner.is_closed.load(Ordering::Relaxed) {
            *open = Some(Connection {
                number,
                channel: channel.clone(),
            });
            self.inner.connected.send_replace(true);
        }
        Ok(channel)
    }

    async fn dial(
        &self,
        number: u64,
        is_over: CancellationToken,
    ) -> Result<Channel, tonic::transport::Error> {
        let client = self.clone();
        let connector = service_fn(move |_: Uri| {
            let (client, is_over) = (client.clone(), is_over.clone());
            async move { client.connect(number, is_over).await.map(TokioIo::new) }
        });
        let endpoint = Endpoint::from_static("http://localhost");
        endpoint.connect_with_connector(connector).await
    }

    /// Opens a connection of bytes whose end is noticed whether or not a call is under way. A channel whose connection is over
    /// gets no other: the next call has a channel of its own.
    async fn connect(
        &self,
        number: u64,
        is_over: CancellationToken,
    ) -> io::Result<tokio::io::DuplexStream> {
        if is_over.is_cancelled() {
            return Err(io::ErrorKind::NotConnected.into());
        }
        let mut socket = devicemanager::connect(&self.inner.socket).await?;
        let (ours, mut relayed) = tokio::io::duplex(BUFFER);
        let client = self.clone();
        tokio::spawn(async move {
            // However it ends, it is over.
            drop(tokio::io::copy_bidirectional(&mut socket, &mut relayed).await);
            is_over.cancel();
            let mut open = client.open();
            if open.as_ref().is_some_and(|open| open.number == number) {
                *open = None;
                client.inner.connected.send_replace(false);
            }
        });
        Ok(ours)
    }
}
