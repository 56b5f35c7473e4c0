//! One connection to a plugin and the calls over it. Each call has a deadline but `ListAndWatch`, whose stream lasts as
//! long as the plugin.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use prost::Message;
use rustix::fs::{FileType, Mode, OFlags};
use tokio::net::UnixStream;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;
use tower::service_fn;

use super::proto::{
    AllocateRequest, AllocateResponse, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, DevicePluginOptions, Empty, ListAndWatchResponse,
    PreStartContainerRequest, PreferredAllocationRequest, PreferredAllocationResponse, method,
};
use crate::core::devices::{Granted, GrantedDevice, GrantedMount, Hint, PluginOptions};
use crate::types::causes;

/// Timeout of a connection; upstream's `dialTimeout`.
const DIAL: Duration = Duration::from_secs(10);
/// Timeout of `GetDevicePluginOptions` and `GetPreferredAllocation`.
const ASK: Duration = Duration::from_secs(10);
/// Timeout of `Allocate`.
const ALLOCATE: Duration = Duration::from_secs(60);
/// Timeout of `PreStartContainer`; upstream's `KubeletPreStartContainerRPCTimeoutInSecs`.
const PRE_START: Duration = Duration::from_secs(30);
/// The longest path that fits into a socket's address.
const MAX_SOCKET_PATH: usize = 107;

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum CallError {
    #[error("cannot connect to {}: {why}", path.display())]
    Dial { path: PathBuf, why: String },
    #[error("rpc error: code = {code:?} desc = {message}")]
    Status { code: Code, message: String },
    #[error("rpc error: code = DeadlineExceeded desc = no answer within {}", humantime::format_duration(*.0))]
    Late(Duration),
    #[error("{call} returned invalid response: {why}")]
    Answer { call: &'static str, why: String },
}

impl From<Status> for CallError {
    fn from(status: Status) -> Self {
        Self::Status {
            code: status.code(),
            message: status.message().to_owned(),
        }
    }
}

/// A connected plugin. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct PluginClient {
    channel: Channel,
}

impl PluginClient {
    /// Connects to the plugin's socket, whose path may be longer than an address of a socket.
    pub(super) async fn dial(path: &Path) -> Result<Self, CallError> {
        let failed = |why: String| CallError::Dial {
            path: path.to_owned(),
            why,
        };
        let to = path.to_owned();
        let endpoint = Endpoint::from_static("http://localhost");
        let connector = service_fn(move |_: Uri| {
            let to = to.clone();
            async move { connect(&to).await.map(TokioIo::new) }
        });
        let connecting = endpoint.connect_with_connector(connector);
        match tokio::time::timeout(DIAL, connecting).await {
            Ok(Ok(channel)) => Ok(Self { channel }),
            Ok(Err(error)) => Err(failed(causes(&error))),
            Err(_) => Err(failed(format!(
                "no answer within {}",
                humantime::format_duration(DIAL)
            ))),
        }
    }

    /// Asks for the plugin's options.
    pub(super) async fn options(&self) -> Result<PluginOptions, CallError> {
        let options: DevicePluginOptions = self.unary(method::OPTIONS, Empty {}, ASK).await?;
        Ok(PluginOptions {
            pre_start: options.pre_start_required,
            preferred: options.get_preferred_allocation_available,
        })
    }

    /// Opens the stream of lists. Plugins answer with their first list, so this may take long.
    pub(super) async fn list_and_watch(
        &self,
    ) -> Result<Streaming<ListAndWatchResponse>, CallError> {
        let mut client = Grpc::new(self.channel.clone());
        client.ready().await.map_err(unavailable)?;
        let path = PathAndQuery::from_static(method::LIST_AND_WATCH);
        let codec = ProstCodec::<Empty, ListAndWatchResponse>::default();
        let request = Request::new(Empty {});
        let answer = client.server_streaming(request, path, codec).await?;
        Ok(answer.into_inner())
    }

    /// Asks which devices the plugin prefers.
    pub(super) async fn preferred(&self, hint: &Hint) -> Result<BTreeSet<String>, CallError> {
        let request = ContainerPreferredAllocationRequest {
            available_device_ids: hint.available.iter().cloned().collect(),
            must_include_device_ids: hint.must_include.iter().cloned().collect(),
            allocation_size: i32::try_from(hint.size).unwrap_or(i32::MAX),
        };
        let request = PreferredAllocationRequest {
            container_requests: vec![request],
        };
        let answer: PreferredAllocationResponse =
            self.unary(method::PREFERRED, request, ASK).await?;
        let ids = answer.container_responses.into_iter().next();
        Ok(ids.map(|r| r.device_ids).into_iter().flatten().collect())
    }

    /// Allocates devices for one container.
    pub(super) async fn allocate(&self, ids: Vec<String>) -> Result<Granted, CallError> {
        let request = AllocateRequest {
            container_requests: vec![ContainerAllocateRequest { devices_ids: ids }],
        };
        let answer: AllocateResponse = self.unary(method::ALLOCATE, request, ALLOCATE).await?;
        let count = answer.container_responses.len();
        match <[ContainerAllocateResponse; 1]>::try_from(answer.container_responses) {
            Ok([of_container]) => Ok(granted(of_container)),
            Err(_) => Err(CallError::Answer {
                call: "Allocate",
                why: format!("{count} containers instead of one"),
            }),
        }
    }

    /// Tells the plugin that a container starts with these devices.
    pub(super) async fn pre_start(&self, ids: Vec<String>) -> Result<(), CallError> {
        let request = PreStartContainerRequest { devices_ids: ids };
        let answer: Result<Empty, CallError> =
            self.unary(method::PRE_START, request, PRE_START).await;
        answer.map(drop)
    }

    async fn unary<Req, Res>(
        &self,
        method: &'static str,
        message: Req,
        deadline: Duration,
    ) -> Result<Res, CallError>
    where
        Req: Message + 'static,
        Res: Message + Default + 'static,
    {
        let mut request = Request::new(message);
        request.set_timeout(deadline);
        let call = async {
            let mut client = Grpc::new(self.channel.clone());
            client.ready().await.map_err(unavailable)?;
            let path = PathAndQuery::from_static(method);
            let codec = ProstCodec::<Req, Res>::default();
            let answer = client.unary(request, path, codec).await?;
            Ok(answer.into_inner())
        };
        let answer = tokio::time::timeout(deadline, call).await;
        answer.unwrap_or(Err(CallError::Late(deadline)))
    }
}

fn unavailable(error: tonic::transport::Error) -> CallError {
    CallError::Status {
        code: Code::Unavailable,
        message: causes(&error),
    }
}

/// Returns a plugin's answer as it is recorded.
pub(super) fn granted(of: ContainerAllocateResponse) -> Granted {
    let mounts = of.mounts.into_iter().map(|mount| GrantedMount {
        container_path: mount.container_path,
        host_path: mount.host_path,
        read_only: mount.read_only,
    });
    let devices = of.devices.into_iter().map(|device| GrantedDevice {
        container_path: device.container_path,
        host_path: device.host_path,
        permissions: device.permissions,
    });
    Granted {
        envs: of.envs,
        mounts: mounts.collect(),
        devices: devices.collect(),
        annotations: of.annotations,
        cdi: of.cdi_devices.into_iter().map(|d| d.name).collect(),
    }
}

/// Connects to a plugin's socket, whose path may be longer than an address of a socket.
///
/// # Errors
/// As [`short_path`], or when nobody listens. Says so if the path is no socket.
pub async fn connect(path: &Path) -> io::Result<UnixStream> {
    let (short, _open) = short_path(path)?;
    let error = match UnixStream::connect(&short).await {
        Ok(stream) => return Ok(stream),
        Err(error) => error,
    };
    let found = rustix::fs::stat(&short).map(|stat| FileType::from_raw_mode(stat.st_mode));
    Err(match found {
        Ok(FileType::Directory) => io::Error::new(error.kind(), "it is a directory, not a socket"),
        Ok(kind) if kind != FileType::Socket => io::Error::new(error.kind(), "it is not a socket"),
        _ => error,
    })
}

/// Returns a path to a socket that fits into a socket's address: one that is too long leads through the open directory,
/// which is to be kept until the path was used.
///
/// # Errors
/// When the directory cannot be opened, or the file name alone is too long.
pub fn short_path(path: &Path) -> io::Result<(PathBuf, Option<OwnedFd>)> {
    if path.as_os_str().len() <= MAX_SOCKET_PATH {
        return Ok((path.to_owned(), None));
    }
    let parts = path.parent().zip(path.file_name());
    let (dir, name) = parts.ok_or(io::ErrorKind::InvalidInput)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open = rustix::fs::open(dir, flags, Mode::empty())?;
    let short = PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd())).join(name);
    if short.as_os_str().len() > MAX_SOCKET_PATH {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "the socket's file name has {} bytes; give it a shorter one",
                name.len()
            ),
        ));
    }
    Ok((short, Some(open)))
}
