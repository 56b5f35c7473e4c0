//! gRPC over unix sockets, by hand: one message in, one out, and full control over bad answers.

use std::convert::Infallible;
use std::fs;
use std::io;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{BufMut, Bytes, BytesMut};
use futures::stream;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use tokio::net::UnixListener;

use super::faults::{self, Fault};
use super::node::Node;
use super::{Call, CsiOptions};

/// gRPC's codes, as far as they are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Code {
    InvalidArgument = 3,
    NotFound = 5,
    AlreadyExists = 6,
    FailedPrecondition = 9,
    Aborted = 10,
    OutOfRange = 11,
    Unimplemented = 12,
    Internal = 13,
}

/// A call that is refused.
#[derive(Clone, Debug)]
pub(super) struct Refused {
    pub(super) code: i32,
    pub(super) message: String,
    /// The caller broke the contract.
    pub(super) violation: bool,
}

impl Refused {
    pub(super) fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code: code as i32,
            message: message.into(),
            violation: false,
        }
    }
}

impl From<io::Error> for Refused {
    fn from(error: io::Error) -> Self {
        Self::new(Code::Internal, error.to_string())
    }
}

/// What a call is about that has not ended.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Busy {
    pub(super) volume: String,
    pub(super) target: String,
    /// The caller's process.
    pub(super) caller: Option<i32>,
}

/// What all connections share.
pub(super) struct Program {
    pub(super) options: CsiOptions,
    /// Volumes and targets that calls are about right now, and whose calls these are.
    pub(super) busy: Mutex<Vec<Busy>>,
    /// Held while the state is read, changed and written.
    pub(super) turn: Mutex<()>,
    log: Mutex<()>,
}

impl Program {
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn append(&self, name: &str, line: &str) {
        let _turn = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let file = fs::File::options()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(self.options.state.join(name));
        let written = file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
        if let Err(error) = written {
            eprintln!("cannot write {name}: {error}");
        }
    }

    fn note(&self, call: &Call) {
        match serde_json::to_string(call) {
            Ok(line) => self.append("calls.log", &line),
            Err(error) => eprintln!("cannot write a call down: {error}"),
        }
    }

    pub(super) fn violated(&self, call: &Call, what: &str) {
        let line = format!("{} {}: {what}", call.rpc, call.volume);
        self.append("violations.log", &line.replace('\n', " "));
    }
}

/// Serves until standard input ends.
pub(super) fn serve(options: CsiOptions) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        fs::create_dir_all(&options.state)?;
        let services = listen(&options.endpoint)?;
        let same = options.endpoint == options.registration;
        let registration = if same {
            None
        } else {
            Some(listen(&options.registration)?)
        };
        let program = Arc::new(Program {
            options,
            busy: Mutex::default(),
            turn: Mutex::default(),
            log: Mutex::default(),
        });
        for listener in [Some(services), registration].into_iter().flatten() {
            tokio::spawn(accept(listener, Arc::clone(&program)));
        }
        println!("\ncsi driver is ready");
        // Nothing is ever written there: it ends with whoever started this.
        let wait = || std::io::Read::read(&mut io::stdin(), &mut [0]).map(drop);
        tokio::task::spawn_blocking(wait)
            .await
            .map_err(io::Error::other)?
    })?;
    // The reader of standard input is a thread that blocks.
    runtime.shutdown_background();
    Ok(())
}

fn listen(path: &Path) -> io::Result<UnixListener> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    // Never absent while it is replaced: that would be a deregistration.
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".{name}"));
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&temporary)?;
    fs::rename(&temporary, path)?;
    Ok(listener)
}

async fn accept(listener: UnixListener, program: Arc<Program>) {
    while let Ok((stream, _)) = listener.accept().await {
        let program = Arc::clone(&program);
        let caller = stream.peer_cred().ok().and_then(|peer| peer.pid());
        tokio::spawn(async move {
            let service = service_fn(move |request| answer(Arc::clone(&program), caller, request));
            hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(stream), service)
                .await
                .ok();
        });
    }
}

type Body = StreamBody<stream::Iter<std::vec::IntoIter<Result<Frame<Bytes>, Infallible>>>>;

async fn answer(
    program: Arc<Program>,
    caller: Option<i32>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let path = request.uri().path().to_owned();
    let rpc = path.rsplit('/').next().unwrap_or_default().to_owned();
    let Ok(body) = request.into_body().collect().await else {
        return Ok(refusal(Code::Internal as i32, "the request broke off"));
    };
    let body = body.to_bytes();
    // One byte for compression, four for the length.
    let message = body.get(5..).unwrap_or_default();
    let fault = faults::take(&program.options.state, &rpc);
    let node = Node {
        program: &program,
        kill_between: fault == Some(Fault::KillBetween),
    };
    let mut call = node.read(&rpc, message);
    call.rpc.clone_from(&rpc);
    call.pid = std::process::id();
    let end = |mut call: Call, outcome: &str, message: &str| {
        outcome.clone_into(&mut call.outcome);
        if !message.is_empty() {
            message.clone_into(&mut call.message);
        }
        program.note(&call);
    };
    match &fault {
        Some(Fault::Fail(code, message)) => {
            end(call, &format!("fault: code {code}"), message);
            return Ok(refusal(*code, message));
        }
        Some(Fault::Hang) => {
            end(call, "fault: hang", "");
            return std::future::pending().await;
        }
        Some(Fault::Garbage) => {
            end(call, "fault: garbage", "");
            return Ok(message_of(Bytes::from_static(&[0xff; 7])));
        }
        Some(Fault::KillBefore) => {
            end(call, "fault: killed before", "");
            die();
        }
        _ => {}
    }
    let result = match program.enter(&call, caller) {
        Ok(_inside) => node.perform(&path, &call, message),
        Err(refused) => Err(refused),
    };
    if let Err(refused) = &result
        && refused.violation
    {
        program.violated(&call, &refused.message);
    }
    match (result, fault) {
        (Ok(_), Some(Fault::FailAfter(code, message))) => {
            end(call, &format!("fault: done, then code {code}"), &message);
            Ok(refusal(code, &message))
        }
        (Ok(_), Some(Fault::HangAfter)) => {
            end(call, "fault: done, then hang", "");
            std::future::pending().await
        }
        (Ok(_), Some(Fault::KillAfter)) => {
            end(call, "fault: done, then killed", "");
            die()
        }
        (Ok(answer), _) => {
            end(call, "OK", "");
            Ok(message_of(answer))
        }
        (Err(refused), _) => {
            end(call, &format!("code {}", refused.code), &refused.message);
            Ok(refusal(refused.code, &refused.message))
        }
    }
}

/// As a crash does: nothing is run down.
pub(super) fn die() -> ! {
    nix::sys::signal::kill(nix::unistd::getpid(), nix::sys::signal::Signal::SIGKILL).ok();
    std::process::abort()
}

pub(super) fn encoded(message: &impl Message) -> Bytes {
    Bytes::from(message.encode_to_vec())
}

fn message_of(message: Bytes) -> Response<Body> {
    let mut frame = BytesMut::with_capacity(5 + message.len());
    frame.put_u8(0);
    frame.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    frame.put(message);
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    respond(vec![
        Ok(Frame::data(frame.freeze())),
        Ok(Frame::trailers(trailers)),
    ])
}

fn refusal(code: i32, message: &str) -> Response<Body> {
    let mut response = respond(Vec::new());
    let text: String = message
        .bytes()
        .map(|b| match b {
            b' '..=b'~' if b != b'%' => char::from(b).to_string(),
            other => format!("%{other:02X}"),
        })
        .collect();
    let headers = response.headers_mut();
    headers.insert("grpc-status", HeaderValue::from(code));
    if let Ok(text) = HeaderValue::from_str(&text) {
        headers.insert("grpc-message", text);
    }
    response
}

fn respond(frames: Vec<Result<Frame<Bytes>, Infallible>>) -> Response<Body> {
    let mut response = Response::new(StreamBody::new(stream::iter(frames)));
    let kind = HeaderValue::from_static("application/grpc");
    response.headers_mut().insert("content-type", kind);
    response
}
