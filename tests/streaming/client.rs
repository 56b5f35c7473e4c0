//! Clients: SPDY by the agent's own codec, WebSocket by a crate, and plain requests.

use std::collections::HashMap;

use futures::{SinkExt, StreamExt};
use holdfast::server::kubelet::streaming::spdy::{Frame, Reader, StreamId, Writer};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::client::ClientRequestBuilder;
use tokio_tungstenite::tungstenite::protocol::CloseFrame;
use tokio_tungstenite::tungstenite::{Error, Message};

/// The head of an answer and what came with it.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

/// Sends a request; reads its answer.
async fn send(stream: &mut TcpStream, head: &str, body: &str) -> Answer {
    let length = match body {
        "" => String::new(),
        body => format!(
            "Content-Length: {}\r\nContent-Type: application/x-www-form-urlencoded\r\n",
            body.len()
        ),
    };
    let request = format!("{head}\r\nHost: node\r\n{length}\r\n{body}");
    stream.write_all(request.as_bytes()).await.unwrap();
    // A byte at a time: what follows an upgrade is not ours.
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\r\n\r\n") {
        bytes.push(stream.read_u8().await.unwrap());
    }
    let head = String::from_utf8(bytes).unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let length = head
        .lines()
        .filter_map(|line| line.split_once(": "))
        .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        .map_or(0, |(_, length)| length.parse().unwrap());
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.unwrap();
    Answer {
        status,
        head,
        body: String::from_utf8_lossy(&body).into_owned(),
    }
}

/// A request without an upgrade.
pub(crate) async fn request(addr: &str, method: &str, path: &str, form: &str) -> Answer {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    let head = format!("{method} {path} HTTP/1.1\r\nConnection: close");
    send(&mut stream, &head, form).await
}

/// A SPDY connection through the agent.
pub(crate) struct Spdy {
    pub(crate) reader: Reader<OwnedReadHalf>,
    pub(crate) writer: Writer<OwnedWriteHalf>,
    next: StreamId,
}

impl Spdy {
    pub(crate) async fn connect(addr: &str, path: &str, version: &str) -> Result<Self, Answer> {
        let mut stream = TcpStream::connect(addr).await.unwrap();
        let head = format!(
            "POST {path} HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
             X-Stream-Protocol-Version: {version}\r\nAuthorization: Bearer secret"
        );
        let answer = send(&mut stream, &head, "").await;
        if answer.status != 101 {
            return Err(answer);
        }
        let head = answer.head.to_lowercase();
        assert!(head.contains("upgrade: spdy/3.1"), "{head}");
        assert!(
            head.contains(&format!("x-stream-protocol-version: {version}")),
            "{head}"
        );
        let (read, write) = stream.into_split();
        Ok(Self {
            reader: Reader::new(read),
            writer: Writer::new(write).unwrap(),
            next: 1,
        })
    }

    pub(crate) async fn open(&mut self, headers: &[(&str, &str)]) -> StreamId {
        let stream = self.next;
        self.next += 2;
        self.writer.open(stream, headers).await.unwrap();
        stream
    }

    /// As kubectl opens the streams of exec and attach.
    pub(crate) async fn open_all(&mut self, kinds: &[&str]) -> Vec<StreamId> {
        let mut streams = Vec::new();
        for kind in kinds {
            streams.push(self.open(&[("streamtype", kind)]).await);
        }
        streams
    }

    /// What every stream carries until the runtime ends them all.
    pub(crate) async fn rest(&mut self, streams: &[StreamId]) -> HashMap<StreamId, Vec<u8>> {
        let mut carried: HashMap<StreamId, Vec<u8>> =
            streams.iter().map(|stream| (*stream, Vec::new())).collect();
        let mut running = streams.to_vec();
        while !running.is_empty() {
            let Some(frame) = self.reader.next().await.unwrap() else {
                break;
            };
            let ended = match frame {
                Frame::Data {
                    stream,
                    payload,
                    fin,
                } => {
                    carried.entry(stream).or_default().extend(payload);
                    fin.then_some(stream)
                }
                Frame::Reset { stream, .. } => Some(stream),
                _ => None,
            };
            running.retain(|stream| Some(*stream) != ended);
        }
        carried
    }
}

/// A WebSocket connection to the agent.
pub(crate) struct Ws {
    pub(crate) socket: WebSocketStream<TcpStream>,
    pub(crate) protocol: Option<String>,
}

/// How a command ended, as a WebSocket client saw it.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) error: Vec<u8>,
    pub(crate) close: Option<CloseFrame>,
}

impl Seen {
    pub(crate) fn status(&self) -> Value {
        serde_json::from_slice(&self.error)
            .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&self.error)))
    }
}

impl Ws {
    pub(crate) async fn connect(addr: &str, path: &str, protocols: &[&str]) -> Result<Self, Error> {
        let stream = TcpStream::connect(addr).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let uri = format!("ws://{addr}{path}").parse().unwrap();
        let mut request = ClientRequestBuilder::new(uri);
        for protocol in protocols {
            request = request.with_sub_protocol(*protocol);
        }
        let (socket, answer) = tokio_tungstenite::client_async(request, stream).await?;
        let protocol = answer.headers().get("sec-websocket-protocol");
        Ok(Self {
            protocol: protocol.map(|value| value.to_str().unwrap().to_owned()),
            socket,
        })
    }

    pub(crate) async fn send(&mut self, channel: u8, data: &[u8]) {
        let message = [&[channel], data].concat();
        self.socket
            .send(Message::Binary(message.into()))
            .await
            .unwrap();
    }

    /// The next data: channel and bytes; `None` when the server closes.
    pub(crate) async fn next(&mut self) -> Option<(u8, Vec<u8>)> {
        loop {
            match self.socket.next().await?.ok()? {
                Message::Binary(bytes) => return Some((bytes[0], bytes[1..].to_vec())),
                Message::Text(text) => {
                    use base64::Engine as _;
                    let (channel, data) = text.as_str().split_at(1);
                    let data = base64::engine::general_purpose::STANDARD
                        .decode(data)
                        .unwrap();
                    return Some((channel.as_bytes()[0] - b'0', data));
                }
                Message::Close(_) => return None,
                _ => {}
            }
        }
    }

    /// Everything to the end.
    pub(crate) async fn rest(mut self) -> Seen {
        let mut seen = Seen::default();
        loop {
            match self.socket.next().await {
                Some(Ok(Message::Binary(bytes))) => match bytes[0] {
                    1 => seen.stdout.extend(&bytes[1..]),
                    2 => seen.stderr.extend(&bytes[1..]),
                    3 => seen.error.extend(&bytes[1..]),
                    channel => panic!("data on channel {channel}"),
                },
                Some(Ok(Message::Close(frame))) => seen.close = frame,
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return seen,
            }
        }
    }
}
