//! One stream from request to end: what the client speaks, the runtime's URL, the answer, the carrying.

use std::time::Duration;

use axum::Extension;
use axum::extract::{FromRequestParts, Request};
use axum::http::header::{self, HeaderMap};
use axum::response::Response;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::dial::{self, Dialled, STREAM_PROTOCOL};
use super::error::StreamError;
use super::lookup::Target;
use super::relay::{End, LINGER, relay};
use super::runtime_io::RuntimeIo;
use super::slots::Slots;
use super::translate::{Plan, Stream, translate};
use super::tunnel::tunnel;
use super::websocket::{self, Agreed, Channels};
use super::{Streaming, parameters};
use crate::kuberuntime::cri::Streams;
use crate::kuberuntime::open_streams::{OpenStream, Until};
use crate::types::PodExt;

/// Time that a client has to complete its upgrade after the answer.
const UPGRADE_PATIENCE: Duration = Duration::from_secs(10);

/// Request to the runtime.
#[derive(Clone, Debug)]
pub(super) enum Call {
    /// Run a command.
    Exec(Streams, Vec<String>),
    /// Join the first process.
    Attach(Streams),
    /// Reach ports; empty when the client names them stream by stream.
    PortForward(Vec<u16>),
}

/// Conditions on which the agent ends a stream.
#[derive(Debug)]
pub(super) struct Limits {
    /// The agent ends.
    pub(super) stop: CancellationToken,
    /// Nothing is carried; zero = for ever.
    pub(super) idle_timeout: Duration,
    /// The container or sandbox is stopped.
    pub(super) open: OpenStream,
}

impl Limits {
    /// Waits until the stream has to end; returns why. Cancel-safe.
    pub(super) async fn reached(&self) -> End {
        let stopped = async {
            if self.open.closing().await == Until::Delivered {
                drop(tokio::time::timeout(LINGER, self.open.cut()).await);
            }
        };
        tokio::select! {
            () = self.stop.cancelled() => End::Stopped,
            () = stopped => End::TargetStopped,
        }
    }
}

/// Conversion between the client's protocol and the runtime's.
enum Carrier {
    /// As they are.
    Relay,
    /// WebSocket to SPDY.
    Translate(Plan),
    /// SPDY in WebSocket.
    Tunnel,
}

/// Opens a stream: checks what the client speaks, asks the runtime, answers, and carries on in a task.
///
/// # Errors
/// With what the client is answered instead.
pub(super) async fn open(
    node: Streaming,
    call: Call,
    target: Target,
    request: Request,
) -> Result<Response, StreamError> {
    let (mut parts, _body) = request.into_parts();
    if node.stop.is_cancelled() {
        return Err(StreamError::Stopping);
    }
    let Some(upgrade) = parts.extensions.remove::<OnUpgrade>() else {
        return Err(StreamError::UpgradeRequired);
    };
    if !websocket::is_upgrade(&parts.headers) {
        return Err(StreamError::UpgradeRequired);
    }
    let slots = Extension::<Slots>::from_request_parts(&mut parts, &())
        .await
        .map_err(|_| StreamError::Busy)?;
    let slot = slots.take(&target.pod.uid())?;
    let tasks = parts.extensions.get::<TaskTracker>().cloned();

    // A client that cannot be answered must not cost the runtime anything.
    let (mut call, mut accepted, mut dial_as) = (call, None, None);
    if websocket::wants(&parts.headers, "websocket") {
        let (name, agreed) = match call {
            Call::PortForward(_) => websocket::forward(&parts.headers)?,
            _ => websocket::channels(&parts.headers)?,
        };
        if let (Call::PortForward(ports), Agreed::Channels(_)) = (&call, agreed)
            && ports.is_empty()
        {
            return Err(StreamError::BadRequest(parameters::NO_PORT.to_owned()));
        }
        accepted = Some(websocket::accept(
            &parts.method,
            &parts.headers,
            name.as_deref(),
        )?);
        dial_as = Some(agreed);
    }
    if let Call::Attach(streams) = &mut call {
        streams.tty = target.has_tty();
        streams.stderr = streams.stderr && !streams.tty;
    }
    let (url, open) = ask(&node, &call, &target).await?;
    let (method, headers, carrier) = match dial_as {
        None => (
            parts.method.clone(),
            end_to_end(&parts.headers),
            Carrier::Relay,
        ),
        Some(Agreed::Tunnel) => (
            axum::http::Method::POST,
            dial::spdy_headers(websocket::PORT_FORWARD),
            Carrier::Tunnel,
        ),
        Some(Agreed::Channels(channels)) => (
            axum::http::Method::POST,
            dial::spdy_headers(channels.streams),
            Carrier::Translate(plan(&call, channels)),
        ),
    };
    let runtime = match dial::dial(&url, method, headers).await? {
        Dialled::Upgraded(runtime) => runtime,
        Dialled::Refused(refusal) => return Ok(refusal),
    };
    let response = accepted.unwrap_or_else(|| {
        let mut response = websocket::switching();
        *response.headers_mut() = runtime.headers;
        response
    });
    let limits = Limits {
        stop: node.stop.clone(),
        idle_timeout: node.idle_timeout,
        open,
    };
    let stream = async move {
        let _slot = slot;
        let end = carry(upgrade, runtime.io, carrier, &limits).await;
        tracing::debug!(?end, pod = %target.pod.full_name(), container = target.container, "a stream ended");
    };
    match tasks {
        Some(tasks) => drop(tasks.spawn(stream)),
        None => drop(tokio::spawn(stream)),
    }
    Ok(response)
}

/// Asks the runtime for a URL; registers the stream that begins there.
async fn ask(
    node: &Streaming,
    call: &Call,
    target: &Target,
) -> Result<(String, OpenStream), StreamError> {
    let id = match call {
        Call::Exec(..) | Call::Attach(_) => target.running_container(&node.cri).await?,
        Call::PortForward(_) => target.ready_sandbox(&node.cri).await?,
    };
    let open = node.cri.open_streams().open(&id);
    let url = match call {
        Call::Exec(streams, command) => node.cri.exec(&id, command.clone(), *streams).await?,
        Call::Attach(streams) => node.cri.attach(&id, *streams).await?,
        Call::PortForward(ports) => node.cri.port_forward(&id, ports).await?,
    };
    Ok((url, open))
}

/// Returns the headers that the runtime needs. The client's credentials are not among them.
fn end_to_end(from: &HeaderMap) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for name in [
        header::CONNECTION,
        header::UPGRADE,
        header::USER_AGENT,
        STREAM_PROTOCOL,
    ] {
        for value in from.get_all(&name) {
            headers.append(name.clone(), value.clone());
        }
    }
    headers
}

async fn carry(
    upgrade: OnUpgrade,
    runtime: RuntimeIo<TokioIo<Upgraded>>,
    carrier: Carrier,
    limits: &Limits,
) -> End {
    let client = match tokio::time::timeout(UPGRADE_PATIENCE, upgrade).await {
        Ok(Ok(client)) => TokioIo::new(client),
        Ok(Err(error)) => {
            tracing::debug!(%error, "a client left before its stream began");
            return End::ClientGone;
        }
        Err(_) => return End::ClientGone,
    };
    match carrier {
        Carrier::Relay => relay(client, runtime, limits).await,
        Carrier::Tunnel => tunnel(client, runtime, limits).await,
        Carrier::Translate(plan) => translate(client, runtime, &plan, limits).await,
    }
}

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;

/// Channels and streams of a call.
pub(super) fn plan(call: &Call, channels: Channels) -> Plan {
    let (streams, greeting, status) = match call {
        Call::Exec(wanted, _) | Call::Attach(wanted) => {
            let mut streams = vec![stream("error", ERROR, false)];
            let mut add = |wanted, kind, channel, input| {
                if wanted {
                    streams.push(stream(kind, channel, input));
                }
            };
            add(wanted.stdin, "stdin", STDIN, true);
            add(wanted.stdout, "stdout", STDOUT, false);
            add(wanted.stderr, "stderr", STDERR, false);
            add(wanted.tty && channels.resizes(), "resize", RESIZE, true);
            // Upstream tells the client that it is connected by an empty message on its first channel.
            let first = match wanted {
                Streams { stdout: true, .. } => STDOUT,
                Streams { stderr: true, .. } => STDERR,
                _ => ERROR,
            };
            let status = channels.has_status().then_some(ERROR);
            (streams, vec![(first, Vec::new())], status)
        }
        Call::PortForward(ports) => {
            let mut streams = Vec::new();
            let mut greeting = Vec::new();
            for ((id, port), channel) in ports.iter().enumerate().zip((0..=u8::MAX).step_by(2)) {
                for (kind, channel, input) in
                    [("error", channel + 1, false), ("data", channel, true)]
                {
                    let mut stream = stream(kind, channel, input);
                    stream.output = true;
                    stream.headers.push(("port", port.to_string()));
                    stream.headers.push(("requestid", id.to_string()));
                    streams.push(stream);
                }
                for channel in [channel, channel + 1] {
                    greeting.push((channel, port.to_le_bytes().to_vec()));
                }
            }
            (streams, greeting, None)
        }
    };
    Plan {
        streams,
        encoding: channels.encoding,
        half_close: channels.half_close,
        greeting,
        status,
    }
}

fn stream(kind: &'static str, channel: u8, input: bool) -> Stream {
    Stream {
        headers: vec![("streamtype", kind.to_owned())],
        channel,
        input,
        output: !input,
    }
}
