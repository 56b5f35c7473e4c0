//! One call over a unix socket: connecting, the deadline, and what became of it.

use std::error::Error as _;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::{Buf, Bytes};
use hyper_util::rt::TokioIo;
use prost::Message;
use tokio::net::UnixStream;
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Request, Status};
use tower::service_fn;

use crate::types::causes;

/// Bytes that are kept of a foreign message.
const MESSAGE_MAX: usize = 1024;

/// Somebody who listens on a socket. Each call has a connection of its own, as upstream's: one that was kept
/// might be to a driver that has ended since, and a call over it in doubt for nothing. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Socket {
    path: PathBuf,
}

/// Outcome of a call that did not succeed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// Nobody listens: the call was not sent.
    Unreachable(String),
    /// The connection broke during the call.
    Broken(String),
    /// No answer in time.
    Late(Duration),
    /// An answer that is none.
    Garbage(String),
    /// The other side refused, or could not do it.
    Status(Code, String),
}

impl Socket {
    pub(super) fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
        }
    }

    async fn connect(&self) -> Result<Channel, tonic::transport::Error> {
        let to = self.path.clone();
        // The URI names nobody; gRPC over a unix socket wants an authority all the same.
        Endpoint::from_static("http://localhost")
            .connect_with_connector(service_fn(move |_: Uri| {
                let to = to.clone();
                async move { UnixStream::connect(to).await.map(TokioIo::new) }
            }))
            .await
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Calls `method`, and gives up after `deadline`; the other side is told of it. When dropped, the call is
    /// cancelled and may have taken effect.
    pub(super) async fn call<Req, Res>(
        &self,
        method: &'static str,
        message: &Req,
        deadline: Duration,
    ) -> Result<Res, Failure>
    where
        Req: Message,
        Res: Message + Default,
    {
        let body = Bytes::from(message.encode_to_vec());
        let mut request = Request::new(body);
        request.set_timeout(deadline);
        let call = async {
            let channel = self.connect().await.map_err(|error| {
                let io = io_error(&error).map_or_else(|| chain(&error), ToString::to_string);
                Failure::Unreachable(self.unreachable(&io))
            })?;
            let mut client = Grpc::new(channel);
            let ready = client.ready().await;
            ready.map_err(|error| Failure::Broken(chain(&error)))?;
            let path = PathAndQuery::from_static(method);
            let answer = client.unary(request, path, Raw).await;
            answer.map_err(|status| Self::failure(&status, deadline))
        };
        let answer = match tokio::time::timeout(deadline, call).await {
            Ok(answer) => answer?,
            Err(_) => return Err(Failure::Late(deadline)),
        };
        Res::decode(answer.into_inner()).map_err(|error| Failure::Garbage(error.to_string()))
    }

    fn unreachable(&self, why: &str) -> String {
        format!("nobody answers on {}: {why}", self.path.display())
    }

    fn failure(status: &Status, deadline: Duration) -> Failure {
        let message = cut(status.message());
        // The client keeps the deadline as well, and says so in these words.
        if status.code() == Code::Cancelled && message == "Timeout expired" {
            return Failure::Late(deadline);
        }
        // A status made on this side carries its cause, or has words of its own; one that was sent does not.
        match status.source().map(chain) {
            None if is_no_answer(status.code(), &message) => Failure::Garbage(message),
            None => Failure::Status(status.code(), message),
            Some(why) if is_protocol_error(&why) => Failure::Garbage(why),
            Some(why) => Failure::Broken(why),
        }
    }
}

fn io_error<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a io::Error> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            return Some(io);
        }
        cause = error.source();
    }
    None
}

/// Returns whether this side found the answer missing or incomplete. If so, the other side may have executed the call.
fn is_no_answer(code: Code, message: &str) -> bool {
    let begins = |with: &str| message.starts_with(with);
    match code {
        Code::Internal => {
            begins("protocol error: ")
                || begins("Missing response message")
                || begins("Unexpected EOF decoding stream")
        }
        Code::Unknown => begins("protocol error: "),
        Code::OutOfRange => begins("Error, decoded message length too large"),
        _ => false,
    }
}

/// Returns whether the peer did not speak HTTP/2, or violated it.
fn is_protocol_error(why: &str) -> bool {
    ["frame", "protocol error", "PROTOCOL_ERROR", "invalid"]
        .iter()
        .any(|word| why.contains(word))
}

/// An error with its causes.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    cut(&causes(error))
}

/// At most as much of a text as is kept, in one line.
fn cut(text: &str) -> String {
    let line = |c: char| if c.is_control() { ' ' } else { c };
    let mut kept: String = text.chars().take(MESSAGE_MAX).map(line).collect();
    if text.chars().nth(MESSAGE_MAX).is_some() {
        kept.push('…');
    }
    kept
}

/// Messages as they are on the wire, so that one that cannot be read is told apart from one that was not sent.
#[derive(Clone, Copy, Debug, Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Raw;
    type Decoder = Raw;

    fn encoder(&mut self) -> Raw {
        Raw
    }

    fn decoder(&mut self) -> Raw {
        Raw
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        bytes::BufMut::put(into, item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_an_answer_is_no_refusal() {
        let of = |status: Status| Socket::failure(&status, Duration::from_secs(1));
        for status in [
            Status::internal("Missing response message."),
            Status::internal("Unexpected EOF decoding stream."),
            Status::internal("protocol error: received message with invalid compression flag: 7"),
            Status::unknown("protocol error: missing grpc-status trailer"),
            Status::out_of_range("Error, decoded message length too large: found 9 bytes"),
        ] {
            let failure = of(status);
            assert!(matches!(failure, Failure::Garbage(_)), "{failure:?}");
        }
        for status in [
            Status::internal("the disk is on fire"),
            Status::out_of_range("too large"),
            Status::unknown(""),
        ] {
            let (code, message) = (status.code(), status.message().to_owned());
            assert_eq!(of(status), Failure::Status(code, message));
        }
    }
}
