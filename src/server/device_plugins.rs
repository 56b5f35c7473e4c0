//! Registration of device plugins: gRPC on `<root-dir>/device-plugins/kubelet.sock`. Upstream: `plugin/v1beta1.server`.
//!
//! In: requests of plugins. Out: [`DeviceManager::register`]. Plugins register when they see the socket created, so sockets
//! of an earlier run are removed before it is.

use std::convert::Infallible;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::path::{Component, Path, PathBuf};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;
use tracing::warn;

use crate::devicemanager::proto::{Empty, RegisterRequest};
use crate::devicemanager::{DeviceManager, short_path};
use crate::podresources;
use crate::types::file_label::label_for_containers;

/// A registration takes as long as connecting to the plugin and asking for its options.
const TIMEOUT: Duration = Duration::from_secs(25);

/// The socket cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("{action} {}: {source}", path.display())]
pub struct SocketError {
    action: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Directory of the sockets of plugins.
pub fn directory(root_dir: &Path) -> PathBuf {
    root_dir.join("device-plugins")
}

/// Makes the directory, for root alone, removes the sockets in it, and makes the agent's. Blocking, shortly. Must be called
/// inside a tokio runtime.
///
/// # Errors
/// When directory or socket cannot be made, or an old socket cannot be removed.
pub fn bind(root_dir: &Path) -> Result<UnixListener, SocketError> {
    let dir = directory(root_dir);
    let failed = |action: &'static str, path: &Path| {
        let path = path.to_owned();
        move |source| SocketError {
            action,
            path,
            source,
        }
    };
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&dir)
        .map_err(failed("create directory", &dir))?;
    label_for_containers(&dir);
    for entry in fs::read_dir(&dir).map_err(failed("read directory", &dir))? {
        let entry = entry.map_err(failed("read directory", &dir))?;
        if entry.file_type().is_ok_and(|kind| kind.is_socket()) {
            let path = entry.path();
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(failed("remove the old socket", &path)(error));
                }
                _ => {}
            }
        }
    }
    let path = dir.join("kubelet.sock");
    let (short, _open) = short_path(&path).map_err(failed("listen on", &path))?;
    UnixListener::bind(short).map_err(failed("listen on", &path))
}

/// Serves until `stop` is cancelled.
pub async fn serve(
    listener: UnixListener,
    root_dir: PathBuf,
    devices: DeviceManager,
    stop: CancellationToken,
) {
    let registration = Registration {
        devices,
        dir: directory(&root_dir),
    };
    let router = podresources::server(TIMEOUT).add_service(registration);
    podresources::serve_router(&listener, router, &stop).await;
}

#[derive(Clone)]
struct Registration {
    devices: DeviceManager,
    dir: PathBuf,
}

impl Registration {
    async fn register(self, request: RegisterRequest) -> Result<Response<Empty>, Status> {
        let RegisterRequest {
            version,
            endpoint,
            resource_name,
            ..
        } = request;
        let registered = match socket_in(&self.dir, &endpoint) {
            Some(socket) => {
                let versions = [version];
                self.devices
                    .register(&resource_name, &socket, &versions)
                    .await
            }
            None => Err(format!(
                "endpoint {endpoint:?} is no file name in {}",
                self.dir.display()
            )),
        };
        match registered {
            Ok(()) => Ok(Response::new(Empty {})),
            Err(why) => {
                warn!(
                    resource = resource_name,
                    endpoint, why, "a device plugin is not registered"
                );
                Err(Status::unknown(why))
            }
        }
    }
}

/// The socket that a plugin names, which lies in the directory.
fn socket_in(dir: &Path, endpoint: &str) -> Option<PathBuf> {
    let relative = Path::new(endpoint.trim_start_matches('/'));
    let is_below = relative
        .components()
        .all(|c| matches!(c, Component::Normal(_)));
    (is_below && relative.file_name().is_some()).then(|| dir.join(relative))
}

impl NamedService for Registration {
    const NAME: &'static str = "v1beta1.Registration";
}

impl Service<http::Request<Body>> for Registration {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let method = Register(self.clone());
        Box::pin(async move {
            Ok(if request.uri().path().ends_with("/Register") {
                let codec = ProstCodec::<Empty, RegisterRequest>::default();
                Grpc::new(codec).unary(method, request).await
            } else {
                Status::unimplemented("no such method").into_http()
            })
        })
    }
}

struct Register(Registration);

impl UnaryService<RegisterRequest> for Register {
    type Response = Empty;
    type Future = BoxFuture<Response<Empty>, Status>;

    fn call(&mut self, request: Request<RegisterRequest>) -> Self::Future {
        Box::pin(self.0.clone().register(request.into_inner()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugins_name_sockets_in_the_directory_alone() {
        let dir = Path::new("/d");
        for (endpoint, socket) in [
            ("gpu.sock", Some("/d/gpu.sock")),
            ("/gpu.sock", Some("/d/gpu.sock")),
            ("a/b.sock", Some("/d/a/b.sock")),
            ("../x.sock", None),
            ("a/../../x.sock", None),
            ("", None),
        ] {
            assert_eq!(
                socket_in(dir, endpoint),
                socket.map(PathBuf::from),
                "{endpoint}"
            );
        }
    }

    #[tokio::test]
    async fn sockets_of_an_earlier_run_are_removed_and_other_files_stay() {
        let root = tempfile::tempdir().unwrap();
        // Longer than the address of a socket.
        let root = root.path().join("r".repeat(120));
        let dir = directory(&root);
        drop(bind(&root).unwrap());
        let old = dir.join("old.sock");
        let (short, _open) = short_path(&old).unwrap();
        drop(UnixListener::bind(short).unwrap());
        fs::write(dir.join("kubelet_internal_checkpoint"), "{}").unwrap();
        let _listener = bind(&root).unwrap();
        let mut left: Vec<_> = fs::read_dir(&dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        left.sort();
        assert_eq!(left, ["kubelet.sock", "kubelet_internal_checkpoint"]);
    }
}
