//! A DRA driver: serves `DRAPlugin` on a unix socket, registers by another, remembers what it has prepared, and does what it is
//! told. [`DraDriver`] is one in the test's own process, [`DriverProcess`] one that can be killed; each test file that uses that
//! has `holdfast_testkit::dra_driver_process!();` somewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use prost::Message;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::{UnixListenerStream, WatchStream};
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::{Grpc, NamedService};
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;
use tower::service_fn;

use crate::fixture_process::{self, FixtureProcess};

#[path = "../../../src/dra/proto.rs"]
#[allow(dead_code, unreachable_pub, reason = "shared with the agent")]
mod proto;

use proto::{
    Claim, Device, DeviceHealth, DeviceIdentifier, NodePrepareResourceResponse,
    NodePrepareResourcesRequest, NodePrepareResourcesResponse, NodeUnprepareResourceResponse,
    NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse, NodeWatchResourcesRequest,
    NodeWatchResourcesResponse,
};

/// What a driver does with a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DraAnswer {
    /// What is asked for.
    Do,
    /// The same, after a while.
    Late(Duration),
    /// An error of the whole call.
    Refuse,
    /// An error for the claim with this UID; the others are done.
    RefuseClaim(String),
    /// None, ever.
    Hang,
    /// It is done, and there is no answer.
    DoAndHang,
    /// One about a claim that nobody asked for.
    Garbage,
    /// One that leaves out every claim.
    Skip,
    /// None: the process is killed.
    Die,
    /// It is done, and then the process is killed.
    DoAndDie,
}

/// A DRA driver. A claim gets the device `<name of the claim>-<number of the preparation>` of the pool `pool`, for the request
/// `gpu`, with one CDI device. Cheap to clone.
#[derive(Clone)]
pub struct DraDriver(Arc<DriverParts>);

struct DriverParts {
    answer: Mutex<DraAnswer>,
    /// Answers to calls of these names instead.
    answers_to: Mutex<BTreeMap<String, DraAnswer>>,
    /// Directory with a file for each prepared claim.
    memory: Mutex<Option<PathBuf>>,
    calls: Mutex<Vec<String>>,
    /// Prepared claims by UID.
    prepared: Mutex<BTreeSet<String>>,
    /// How often each claim was prepared.
    counts: Mutex<BTreeMap<String, u32>>,
    /// Health of its devices; `None` when its streams have ended.
    health: Mutex<Option<watch::Sender<Vec<DeviceHealth>>>>,
    socket: PathBuf,
    end: CancellationToken,
}

impl DraDriver {
    /// Serves on a socket, which is made. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// When the socket cannot be made.
    pub fn start(socket: impl Into<PathBuf>) -> io::Result<Self> {
        let socket = socket.into();
        let listener = UnixListener::bind(&socket)?;
        let driver = Self(Arc::new(DriverParts {
            answer: Mutex::new(DraAnswer::Do),
            answers_to: Mutex::default(),
            memory: Mutex::default(),
            calls: Mutex::default(),
            prepared: Mutex::default(),
            counts: Mutex::default(),
            health: Mutex::new(Some(watch::Sender::new(Vec::new()))),
            socket,
            end: CancellationToken::new(),
        }));
        let routes = Routes::new(DraService::<1>(driver.clone()))
            .add_service(DraService::<0>(driver.clone()))
            .add_service(HealthService(driver.clone()));
        driver.serve(listener, routes);
        Ok(driver)
    }

    fn serve(&self, listener: UnixListener, routes: Routes) {
        let server = Server::builder().add_routes(routes);
        let end = self.0.end.clone().cancelled_owned();
        let incoming = UnixListenerStream::new(listener);
        tokio::spawn(async move {
            let served = server.serve_with_incoming_shutdown(incoming, end).await;
            served.expect("serve the DRA driver");
        });
    }

    /// Creates a socket that registers the driver as one of `plugins_registry`.
    ///
    /// # Errors
    /// When the socket cannot be made.
    pub fn register_by(&self, socket: &Path, name: &str, versions: &[&str]) -> io::Result<()> {
        let listener = UnixListener::bind(socket)?;
        let info = PluginInfo {
            r#type: "DRAPlugin".to_owned(),
            name: name.to_owned(),
            endpoint: self.0.socket.display().to_string(),
            supported_versions: versions.iter().map(ToString::to_string).collect(),
        };
        self.serve(listener, Routes::new(Registration(info)));
        Ok(())
    }

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        &self.0.socket
    }

    /// Answers like this from now on.
    pub fn answers(&self, answer: DraAnswer) {
        *self.0.answer.lock().unwrap() = answer;
    }

    /// Answers calls of this name (`Prepare`, `Unprepare`) like this from now on.
    pub fn answers_to(&self, call: &str, answer: DraAnswer) {
        let mut answers = self.0.answers_to.lock().unwrap();
        answers.insert(call.to_owned(), answer);
    }

    /// Remembers what is prepared in this directory, as it was left there.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn remembers_in(&self, directory: &Path) -> io::Result<()> {
        let mut prepared = self.0.prepared.lock().unwrap();
        for file in fs::read_dir(directory)? {
            prepared.insert(file?.file_name().to_string_lossy().into_owned());
        }
        *self.0.memory.lock().unwrap() = Some(directory.to_owned());
        Ok(())
    }

    fn remember(&self, claim: &Claim, is_prepared: bool) {
        let mut prepared = self.0.prepared.lock().unwrap();
        let memory = self.0.memory.lock().unwrap();
        let file = memory.as_ref().map(|directory| directory.join(&claim.uid));
        if is_prepared {
            prepared.insert(claim.uid.clone());
            if let Some(file) = file {
                fs::write(file, &claim.name).expect("remember a claim");
            }
        } else {
            prepared.remove(&claim.uid);
            if let Some(file) = file {
                fs::remove_file(file).ok();
            }
        }
    }

    /// Tells the health of devices of the pool `pool` from now on: 1 is healthy, 2 is not.
    pub fn tells_health(&self, devices: &[(&str, i32, &str)]) {
        let device = |(name, health, message): &(&str, i32, &str)| DeviceHealth {
            device: Some(DeviceIdentifier {
                pool_name: "pool".to_owned(),
                device_name: (*name).to_owned(),
            }),
            health: *health,
            message: (*message).to_owned(),
            ..DeviceHealth::default()
        };
        let list = devices.iter().map(device).collect();
        let health = self.0.health.lock().unwrap();
        health.as_ref().unwrap().send_replace(list);
    }

    /// Ends its streams of health.
    pub fn ends_health(&self) {
        *self.0.health.lock().unwrap() = None;
    }

    /// Calls since this was last asked, each with the names of its claims.
    pub fn calls(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.calls.lock().unwrap())
    }

    /// UIDs of the claims that are prepared.
    pub fn prepared(&self) -> Vec<String> {
        let prepared = self.0.prepared.lock().unwrap();
        prepared.iter().cloned().collect()
    }

    /// Ends: connections without calls end, and its socket stays.
    pub fn stop(&self) {
        self.0.end.cancel();
    }

    /// What to answer about a claim, after it was done or not.
    async fn act(
        &self,
        call: &str,
        claims: &[Claim],
        done: impl Fn(&Claim),
    ) -> Result<Acted, Status> {
        let names: Vec<&str> = claims.iter().map(|c| c.name.as_str()).collect();
        let line = format!("{call} {}", names.join(","));
        self.0.calls.lock().unwrap().push(line);
        let of_call = self.0.answers_to.lock().unwrap().get(call).cloned();
        let answer = of_call.unwrap_or_else(|| self.0.answer.lock().unwrap().clone());
        let mut acted = Acted::default();
        match &answer {
            DraAnswer::Hang => std::future::pending().await,
            DraAnswer::Refuse => return Err(Status::internal("broken")),
            DraAnswer::Skip => return Ok(acted),
            DraAnswer::Die => {
                fixture_process::die();
                std::future::pending().await
            }
            DraAnswer::Late(after) => tokio::time::sleep(*after).await,
            _ => {}
        }
        for claim in claims {
            let is_refused = answer == DraAnswer::RefuseClaim(claim.uid.clone());
            let error = if is_refused { "no such device" } else { "" };
            if !is_refused {
                done(claim);
            }
            acted.claims.push((claim.clone(), error.to_owned()));
        }
        if answer == DraAnswer::DoAndDie {
            fixture_process::die();
        }
        if answer == DraAnswer::DoAndHang {
            std::future::pending::<()>().await;
        }
        if answer == DraAnswer::Garbage {
            let unknown = Claim {
                uid: "unknown".to_owned(),
                ..Claim::default()
            };
            acted.claims.push((unknown, String::new()));
        }
        Ok(acted)
    }

    async fn prepare(
        self,
        request: NodePrepareResourcesRequest,
    ) -> Result<NodePrepareResourcesResponse, Status> {
        let done = |claim: &Claim| {
            self.remember(claim, true);
            let mut counts = self.0.counts.lock().unwrap();
            *counts.entry(claim.uid.clone()).or_default() += 1;
        };
        let acted = self.act("Prepare", &request.claims, done).await?;
        let of_claim = |(claim, error): (Claim, String)| {
            let count = self.0.counts.lock().unwrap().get(&claim.uid).copied();
            let name = format!("{}-{}", claim.name, count.unwrap_or(0));
            let device = Device {
                request_names: vec!["gpu".to_owned()],
                pool_name: "pool".to_owned(),
                device_name: name.clone(),
                cdi_device_ids: vec![format!("example.com/gpu={name}")],
                share_id: None,
            };
            let answer = NodePrepareResourceResponse {
                devices: vec![device],
                error,
            };
            (claim.uid, answer)
        };
        Ok(NodePrepareResourcesResponse {
            claims: acted.claims.into_iter().map(of_claim).collect(),
        })
    }

    async fn unprepare(
        self,
        request: NodeUnprepareResourcesRequest,
    ) -> Result<NodeUnprepareResourcesResponse, Status> {
        let done = |claim: &Claim| {
            self.remember(claim, false);
        };
        let acted = self.act("Unprepare", &request.claims, done).await?;
        let of_claim =
            |(claim, error): (Claim, String)| (claim.uid, NodeUnprepareResourceResponse { error });
        Ok(NodeUnprepareResourcesResponse {
            claims: acted.claims.into_iter().map(of_claim).collect(),
        })
    }
}

#[derive(Default)]
struct Acted {
    /// Claims with what went wrong.
    claims: Vec<(Claim, String)>,
}

async fn unary<Req, Res, F>(
    request: http::Request<Body>,
    answer: impl Fn(Req) -> F + Send + 'static,
) -> http::Response<Body>
where
    Req: Message + Default + Send + 'static,
    Res: Message + Send + 'static,
    F: Future<Output = Result<Res, Status>> + Send + 'static,
{
    let method = service_fn(move |request: Request<Req>| {
        let answer = answer(request.into_inner());
        async move { answer.await.map(Response::new) }
    });
    Grpc::new(ProstCodec::<Res, Req>::default())
        .unary(method, request)
        .await
}

/// The service of version v1, or of v1beta1 for 0.
#[derive(Clone)]
struct DraService<const VERSION: usize>(DraDriver);

impl NamedService for DraService<1> {
    const NAME: &'static str = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin";
}

impl NamedService for DraService<0> {
    const NAME: &'static str = "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin";
}

impl<const VERSION: usize> Service<http::Request<Body>> for DraService<VERSION> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let driver = self.0.clone();
        let method = request.uri().path().rsplit('/').next().unwrap().to_owned();
        Box::pin(async move {
            Ok(match method.as_str() {
                proto::method::PREPARE => unary(request, move |r| driver.clone().prepare(r)).await,
                proto::method::UNPREPARE => {
                    unary(request, move |r| driver.clone().unprepare(r)).await
                }
                _ => Status::unimplemented("no such method").into_http(),
            })
        })
    }
}

/// The service that tells the health of devices, in version v1.
#[derive(Clone)]
struct HealthService(DraDriver);

impl NamedService for HealthService {
    const NAME: &'static str = "v1.DRAResourceHealth";
}

impl Service<http::Request<Body>> for HealthService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let lists = {
            let health = self.0.0.health.lock().unwrap();
            health.as_ref().map(watch::Sender::subscribe)
        };
        Box::pin(async move {
            let Some(lists) = lists else {
                return Ok(Status::unavailable("no health").into_http());
            };
            let stream = WatchStream::new(lists)
                .map(|devices| Ok::<_, Status>(NodeWatchResourcesResponse { devices }));
            let stream = Mutex::new(Some(stream));
            let method = service_fn(move |_: Request<NodeWatchResourcesRequest>| {
                let stream = stream.lock().unwrap().take().unwrap();
                async move { Ok::<_, Status>(Response::new(stream)) }
            });
            type Codec = ProstCodec<NodeWatchResourcesResponse, NodeWatchResourcesRequest>;
            Ok(Grpc::new(Codec::default())
                .server_streaming(method, request)
                .await)
        })
    }
}

/// `pluginregistration.PluginInfo`.
#[derive(Clone, PartialEq, Eq, Message)]
struct PluginInfo {
    #[prost(string, tag = "1")]
    r#type: String,
    #[prost(string, tag = "2")]
    name: String,
    #[prost(string, tag = "3")]
    endpoint: String,
    #[prost(string, repeated, tag = "4")]
    supported_versions: Vec<String>,
}

/// Stands for messages that are not looked at.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
struct Empty {}

/// Answers who the driver is.
#[derive(Clone)]
struct Registration(PluginInfo);

impl NamedService for Registration {
    const NAME: &'static str = "pluginregistration.Registration";
}

impl Service<http::Request<Body>> for Registration {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let info = self.0.clone();
        let is_info = request.uri().path().ends_with("/GetInfo");
        Box::pin(async move {
            Ok(if is_info {
                let answer = move |_: Empty| {
                    let info = info.clone();
                    async move { Ok(info) }
                };
                unary(request, answer).await
            } else {
                unary(request, |_: Empty| async { Ok(Empty {}) }).await
            })
        })
    }
}

const PROCESS: &str = "HOLDFAST_DRA_DRIVER";
const TEST: &str = "dra_driver_process";

/// Makes the test binary able to be a [`DriverProcess`]. To be used in the root module of a test file.
#[macro_export]
macro_rules! dra_driver_process {
    () => {
        /// The process of a DRA driver, when it is asked to be one; see `holdfast_testkit::dra_driver`.
        #[test]
        fn dra_driver_process() {
            $crate::dra_driver::process();
        }
    };
}

/// A DRA driver in a process of its own, which remembers what it has prepared.
#[derive(Debug)]
pub struct DriverProcess(FixtureProcess);

impl DriverProcess {
    /// Starts it below the agent's root directory. What is prepared is in the directory `memory`, beside which its log is.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start(root_dir: &Path, name: &str, memory: &Path) -> io::Result<Self> {
        fs::create_dir_all(memory)?;
        fs::create_dir_all(root_dir.join("plugins_registry"))?;
        let arguments = serde_json::json!({"root": root_dir, "name": name, "memory": memory});
        let log = memory.with_extension("log");
        FixtureProcess::start(TEST, PROCESS, &arguments.to_string(), &log).map(Self)
    }

    /// Answers calls of this name like this from now on: `Die` or `DoAndDie`.
    ///
    /// # Errors
    /// When it is gone.
    pub fn answers_to(&mut self, call: &str, answer: &DraAnswer) -> io::Result<()> {
        self.0.ask(&format!("{call} {answer:?}")).map(drop)
    }

    /// Whether it runs.
    ///
    /// # Errors
    /// When the process cannot be looked at.
    pub fn runs(&mut self) -> io::Result<bool> {
        self.0.runs()
    }

    /// Kills it.
    pub fn kill9(&mut self) {
        self.0.kill9();
    }
}

/// What [`dra_driver_process!`] runs.
///
/// # Panics
/// When it was not told what to be.
pub fn process() {
    let Ok(arguments) = std::env::var(PROCESS) else {
        return;
    };
    let arguments: serde_json::Value = serde_json::from_str(&arguments).expect("JSON");
    let text = |name: &str| arguments[name].as_str().expect("a text").to_owned();
    let root = PathBuf::from(text("root"));
    let socket = root.join("driver.sock");
    let registration = root.join("plugins_registry").join("driver-reg.sock");
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime");
    let guard = runtime.enter();
    for left in [&socket, &registration] {
        fs::remove_file(left).ok();
    }
    let driver = DraDriver::start(&socket).expect("serve");
    driver
        .remembers_in(Path::new(&text("memory")))
        .expect("remember");
    let versions = ["v1.DRAPlugin", "v1beta1.DRAPlugin"];
    driver
        .register_by(&registration, &text("name"), &versions)
        .expect("register");
    drop(guard);
    fixture_process::serve(|command| {
        let (call, answer) = command.split_once(' ').expect("a call and an answer");
        let mut all = [DraAnswer::Do, DraAnswer::Die, DraAnswer::DoAndDie].into_iter();
        let answer = all.find(|a| format!("{a:?}") == answer);
        driver.answers_to(call, answer.expect("a known answer"));
        "done".to_owned()
    });
}
