//! A device plugin: serves `v1beta1.DevicePlugin` on a unix socket, registers, and does what it is told. [`DevicePlugin`] is
//! one in the test's own process, [`PluginProcess`] one that can be killed; each test file that uses that has
//! `holdfast_testkit::device_plugin_process!();` somewhere.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use prost::Message;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::{UnixListenerStream, WatchStream};
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::{Grpc, NamedService};
use tonic::transport::{Endpoint, Server, Uri};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;
use tower::service_fn;

use crate::fixture_process::{self, FixtureProcess};

#[path = "../../../src/devicemanager/proto.rs"]
#[allow(dead_code, unreachable_pub, reason = "shared with the agent")]
mod proto;

use proto::{
    AllocateRequest, AllocateResponse, CdiDevice, ContainerAllocateResponse,
    ContainerPreferredAllocationResponse, DevicePluginOptions, DeviceSpec, Empty,
    ListAndWatchResponse, PreStartContainerRequest, PreferredAllocationRequest,
    PreferredAllocationResponse, RegisterRequest,
};

/// What a plugin does with a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// What is asked for.
    Grant,
    /// An error.
    Refuse,
    /// None.
    Hang,
    /// One that makes no sense.
    Garbage,
    /// What is asked for, after a second.
    Late,
    /// None: the process is killed.
    Die,
    /// What is asked for, and then the process is killed.
    GrantAndDie,
}

/// A device plugin. It wants `PreStartContainer`, and prefers the devices that come last. Devices are healthy unless their ID
/// is given with a `-` before it; `a@1` is device `a` near NUMA node 1. Cheap to clone.
#[derive(Clone)]
pub struct DevicePlugin(Arc<PluginParts>);

struct PluginParts {
    /// `None` when it has ended.
    lists: Mutex<Option<watch::Sender<Vec<proto::Device>>>>,
    options: DevicePluginOptions,
    /// It opens its list and sends none.
    is_silent: AtomicBool,
    answer: Mutex<Answer>,
    /// Answers to calls of these names instead.
    answers_to: Mutex<BTreeMap<String, Answer>>,
    /// File that each call is added to.
    log: Mutex<Option<PathBuf>>,
    /// Device node that it gives.
    node: Mutex<String>,
    /// CDI device that it gives.
    cdi: Mutex<Option<String>>,
    calls: Mutex<Vec<String>>,
    socket: PathBuf,
    end: CancellationToken,
}

fn listed(ids: &[&str]) -> Vec<proto::Device> {
    let device = |id: &&str| {
        let (name, node) = id.split_once('@').unwrap_or((id, ""));
        let node = node.parse().ok().map(|id| proto::NumaNode { id });
        proto::Device {
            id: name.trim_start_matches('-').to_owned(),
            health: if id.starts_with('-') {
                "Unhealthy"
            } else {
                "Healthy"
            }
            .to_owned(),
            topology: node.map(|node| proto::TopologyInfo { nodes: vec![node] }),
        }
    };
    ids.iter().map(device).collect()
}

impl DevicePlugin {
    /// Serves on a socket, which is made. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// When the socket cannot be made.
    pub fn start(socket: impl Into<PathBuf>, ids: &[&str]) -> io::Result<Self> {
        let socket = socket.into();
        let options = DevicePluginOptions {
            pre_start_required: true,
            get_preferred_allocation_available: true,
        };
        let listener = UnixListener::bind(&socket)?;
        let plugin = Self(Arc::new(PluginParts {
            lists: Mutex::new(Some(watch::Sender::new(listed(ids)))),
            options,
            is_silent: AtomicBool::new(false),
            answer: Mutex::new(Answer::Grant),
            answers_to: Mutex::default(),
            log: Mutex::default(),
            node: Mutex::new("/dev/null".to_owned()),
            cdi: Mutex::new(Some("v/c=0".to_owned())),
            calls: Mutex::default(),
            socket,
            end: CancellationToken::new(),
        }));
        let server = Server::builder().add_service(plugin.clone());
        let end = plugin.0.end.clone().cancelled_owned();
        let incoming = UnixListenerStream::new(listener);
        tokio::spawn(async move {
            let served = server.serve_with_incoming_shutdown(incoming, end).await;
            served.expect("serve the device plugin");
        });
        Ok(plugin)
    }

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        &self.0.socket
    }

    /// Registers with the agent that listens on `kubelet`, in whose directory the plugin's socket is.
    ///
    /// # Errors
    /// When it is refused, or nobody listens.
    pub async fn register(&self, kubelet: &Path, resource: &str) -> Result<(), Status> {
        let to = kubelet.to_owned();
        let connector = service_fn(move |_: Uri| {
            let to = to.clone();
            async move { UnixStream::connect(to).await.map(TokioIo::new) }
        });
        let endpoint = Endpoint::from_static("http://localhost");
        let channel = endpoint.connect_with_connector(connector).await;
        let channel = channel.map_err(|error| Status::unavailable(error.to_string()))?;
        let mut client = tonic::client::Grpc::new(channel);
        let ready = client.ready().await;
        ready.map_err(|error| Status::unavailable(error.to_string()))?;
        let name = self.0.socket.file_name().unwrap_or_default();
        let request = RegisterRequest {
            version: proto::VERSION.to_owned(),
            endpoint: name.to_string_lossy().into_owned(),
            resource_name: resource.to_owned(),
            options: None,
        };
        let path = PathAndQuery::from_static("/v1beta1.Registration/Register");
        let codec = ProstCodec::<RegisterRequest, Empty>::default();
        let answer = client.unary(Request::new(request), path, codec).await;
        answer.map(drop)
    }

    /// Lists other devices.
    pub fn list(&self, ids: &[&str]) {
        let lists = self.0.lists.lock().unwrap();
        lists.as_ref().unwrap().send_replace(listed(ids));
    }

    /// Sends no list to who connects from now on.
    pub fn lists_nothing(&self) {
        self.0.is_silent.store(true, Ordering::SeqCst);
    }

    /// Answers like this from now on.
    pub fn answers(&self, answer: Answer) {
        *self.0.answer.lock().unwrap() = answer;
    }

    /// Answers calls of this name (`Allocate`, `PreStart`) like this from now on.
    pub fn answers_to(&self, call: &str, answer: Answer) {
        let mut answers = self.0.answers_to.lock().unwrap();
        answers.insert(call.to_owned(), answer);
    }

    fn answer_to(&self, call: &str) -> Answer {
        let of_call = self.0.answers_to.lock().unwrap().get(call).copied();
        of_call.unwrap_or(*self.0.answer.lock().unwrap())
    }

    /// Adds each call to this file from now on.
    pub fn logs_to(&self, file: &Path) {
        *self.0.log.lock().unwrap() = Some(file.to_owned());
    }

    /// Gives this device node of the host from now on.
    pub fn moves_to(&self, node: &str) {
        node.clone_into(&mut self.0.node.lock().unwrap());
    }

    /// Gives no CDI device from now on: a real runtime has to know it.
    pub fn gives_no_cdi(&self) {
        *self.0.cdi.lock().unwrap() = None;
    }

    /// Calls of `Allocate` and `PreStart` since this was last asked, each with its devices.
    pub fn calls(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.calls.lock().unwrap())
    }

    /// Ends: its streams end, and its socket is gone.
    pub fn stop(&self) {
        *self.0.lists.lock().unwrap() = None;
        self.0.end.cancel();
        // The agent may have removed it.
        drop(std::fs::remove_file(&self.0.socket));
    }

    async fn act(&self, call: &str, ids: &[String]) -> Result<(), Status> {
        let line = format!("{call} {}", ids.join(","));
        let log = self.0.log.lock().unwrap().clone();
        if let Some(log) = log {
            let mut file = fs::File::options().create(true).append(true).open(log)?;
            writeln!(file, "{line}")?;
        }
        self.0.calls.lock().unwrap().push(line);
        match self.answer_to(call) {
            Answer::Hang => std::future::pending().await,
            Answer::Refuse => Err(Status::internal("broken")),
            Answer::Grant | Answer::Garbage => Ok(()),
            Answer::Late => {
                tokio::time::sleep(Duration::from_secs(1)).await;
                Ok(())
            }
            Answer::Die => {
                fixture_process::die();
                std::future::pending().await
            }
            Answer::GrantAndDie => {
                std::thread::spawn(|| {
                    std::thread::sleep(Duration::from_millis(20));
                    fixture_process::die();
                });
                Ok(())
            }
        }
    }

    async fn allocate(self, request: AllocateRequest) -> Result<AllocateResponse, Status> {
        let ids = request.container_requests[0].devices_ids.clone();
        self.act("Allocate", &ids).await?;
        if self.answer_to("Allocate") == Answer::Garbage {
            return Ok(AllocateResponse::default());
        }
        let node = self.0.node.lock().unwrap().clone();
        let cdi = self.0.cdi.lock().unwrap().clone();
        let device = |id: &String| DeviceSpec {
            container_path: format!("/dev/{id}"),
            host_path: node.clone(),
            permissions: "rw".to_owned(),
        };
        let of_container = ContainerAllocateResponse {
            envs: [("IDS".to_owned(), ids.join(","))].into(),
            devices: ids.iter().map(device).collect(),
            cdi_devices: cdi.map(|name| CdiDevice { name }).into_iter().collect(),
            ..Default::default()
        };
        Ok(AllocateResponse {
            container_responses: vec![of_container],
        })
    }

    /// It likes the last devices best.
    async fn preferred(
        self,
        request: PreferredAllocationRequest,
    ) -> Result<PreferredAllocationResponse, Status> {
        let of = &request.container_requests[0];
        let size = usize::try_from(of.allocation_size).unwrap();
        let ids = of.available_device_ids.iter().rev().take(size);
        Ok(PreferredAllocationResponse {
            container_responses: vec![ContainerPreferredAllocationResponse {
                device_ids: ids.cloned().collect(),
            }],
        })
    }
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

impl NamedService for DevicePlugin {
    const NAME: &'static str = "v1beta1.DevicePlugin";
}

impl Service<http::Request<Body>> for DevicePlugin {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let plugin = self.clone();
        let method = request.uri().path().rsplit('/').next().unwrap().to_owned();
        Box::pin(async move {
            Ok(match method.as_str() {
                "GetDevicePluginOptions" => {
                    let options = plugin.0.options;
                    unary(request, move |_: Empty| async move { Ok(options) }).await
                }
                "ListAndWatch" => {
                    let lists = plugin.0.lists.lock().unwrap().as_ref().unwrap().subscribe();
                    let is_silent = plugin.0.is_silent.load(Ordering::SeqCst);
                    let stream = WatchStream::new(lists)
                        .filter(move |_| !is_silent)
                        .map(|devices| Ok::<_, Status>(ListAndWatchResponse { devices }));
                    let stream = Mutex::new(Some(stream));
                    let method = service_fn(move |_: Request<Empty>| {
                        let stream = stream.lock().unwrap().take().unwrap();
                        async move { Ok::<_, Status>(Response::new(stream)) }
                    });
                    Grpc::new(ProstCodec::<ListAndWatchResponse, Empty>::default())
                        .server_streaming(method, request)
                        .await
                }
                "GetPreferredAllocation" => {
                    unary(request, move |r| plugin.clone().preferred(r)).await
                }
                "Allocate" => unary(request, move |r| plugin.clone().allocate(r)).await,
                "PreStartContainer" => {
                    let call = move |r: PreStartContainerRequest| {
                        let plugin = plugin.clone();
                        async move {
                            plugin.act("PreStart", &r.devices_ids).await?;
                            Ok(Empty {})
                        }
                    };
                    unary(request, call).await
                }
                _ => Status::unimplemented("no such method").into_http(),
            })
        })
    }
}

const PROCESS: &str = "HOLDFAST_DEVICE_PLUGIN";
const TEST: &str = "device_plugin_process";

/// Makes the test binary able to be a [`PluginProcess`]. To be used in the root module of a test file.
#[macro_export]
macro_rules! device_plugin_process {
    () => {
        /// The process of a device plugin, when it is asked to be one; see `holdfast_testkit::device_plugin`.
        #[test]
        fn device_plugin_process() {
            $crate::device_plugin::process();
        }
    };
}

/// A device plugin in a process of its own. It registers each time that the agent has made its socket anew, as real ones do.
#[derive(Debug)]
pub struct PluginProcess(FixtureProcess);

impl PluginProcess {
    /// Starts it for the socket `name` in the agent's directory `directory`. Its calls are in the file `calls`.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start(
        directory: &Path,
        name: &str,
        resource: &str,
        ids: &[&str],
        calls: &Path,
    ) -> io::Result<Self> {
        let arguments = serde_json::json!({
            "directory": directory, "name": name, "resource": resource, "ids": ids, "calls": calls,
        });
        let log = calls.with_extension("log");
        FixtureProcess::start(TEST, PROCESS, &arguments.to_string(), &log).map(Self)
    }

    /// Answers calls of this name like this from now on: `Allocate Die`.
    ///
    /// # Errors
    /// When it is gone.
    pub fn answers_to(&mut self, call: &str, answer: Answer) -> io::Result<()> {
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

/// The devices, the answers and the place of a plugin that registers again and again.
struct PlayedPlugin {
    directory: PathBuf,
    name: String,
    resource: String,
    ids: Vec<String>,
    calls: PathBuf,
    answers: Mutex<BTreeMap<String, Answer>>,
    plugin: Mutex<Option<DevicePlugin>>,
}

impl PlayedPlugin {
    /// Serves whenever the agent's socket is another one, or the plugin's was removed.
    async fn keep_registered(self: Arc<Self>) {
        let kubelet = self.directory.join("kubelet.sock");
        let socket = self.directory.join(&self.name);
        let mut registered = None;
        loop {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let agent = fs::metadata(&kubelet).ok();
            let agent = agent.map(|m| (m.ino(), m.ctime(), m.ctime_nsec()));
            if agent.is_none() || agent == registered && socket.exists() {
                continue;
            }
            let ids: Vec<&str> = self.ids.iter().map(String::as_str).collect();
            let former = self.plugin.lock().unwrap().take();
            if let Some(former) = former {
                former.stop();
            }
            fs::remove_file(&socket).ok();
            let Ok(plugin) = DevicePlugin::start(&socket, &ids) else {
                continue;
            };
            plugin.logs_to(&self.calls);
            for (call, answer) in &*self.answers.lock().unwrap() {
                plugin.answers_to(call, *answer);
            }
            *self.plugin.lock().unwrap() = Some(plugin.clone());
            registered = match plugin.register(&kubelet, &self.resource).await {
                Ok(()) => agent,
                Err(_) => None,
            };
        }
    }

    fn answers_to(&self, command: &str) {
        let (call, answer) = command.split_once(' ').expect("a call and an answer");
        let all = [
            Answer::Grant,
            Answer::Refuse,
            Answer::Hang,
            Answer::Garbage,
            Answer::Late,
            Answer::Die,
            Answer::GrantAndDie,
        ];
        let mut all = all.into_iter();
        let answer = all.find(|a| format!("{a:?}") == answer);
        let answer = answer.expect("a known answer");
        self.answers.lock().unwrap().insert(call.to_owned(), answer);
        if let Some(plugin) = &*self.plugin.lock().unwrap() {
            plugin.answers_to(call, answer);
        }
    }
}

/// What [`device_plugin_process!`] runs.
///
/// # Panics
/// When it was not told what to be.
pub fn process() {
    let Ok(arguments) = std::env::var(PROCESS) else {
        return;
    };
    let arguments: serde_json::Value = serde_json::from_str(&arguments).expect("JSON");
    let text = |name: &str| arguments[name].as_str().expect("a text").to_owned();
    let ids = arguments["ids"].as_array().expect("a list");
    let ids = ids.iter().map(|id| id.as_str().expect("a text").to_owned());
    let service = Arc::new(PlayedPlugin {
        directory: text("directory").into(),
        name: text("name"),
        resource: text("resource"),
        ids: ids.collect(),
        calls: text("calls").into(),
        answers: Mutex::default(),
        plugin: Mutex::default(),
    });
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.spawn(Arc::clone(&service).keep_registered());
    fixture_process::serve(|command| {
        service.answers_to(command);
        "done".to_owned()
    });
}
