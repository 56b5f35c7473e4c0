//! A CRI v1 server (runtime and image service) that behaves like containerd and runs nothing.
//!
//! In come CRI calls over a unix socket ([`FakeCri::serve`]) or over memory ([`FakeCri::channel`], for
//! paused tokio time: a socket's readiness does not hold the clock back). Containers run "programs": see
//! [`Behaviour`]. Faults are injected per operation, by upstream's operation names (`run_podsandbox`, …).
//! Time is tokio's, so a paused clock rules the fake as well.

mod create;
mod images;
mod model;
mod program;
mod runtime;
mod transport;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_cri::v1;
use k8s_cri::v1::image_service_server::ImageServiceServer;
use prost::Message;
use tokio::sync::broadcast;
use tonic::transport::{Channel, Server};
use tonic::{Code, Status};

use model::Model;
pub use program::{Behaviour, ExecResult};
use transport::Transport;

/// One call the server received, in order of arrival.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Operation by upstream's name: `run_podsandbox`, `create_container`, ….
    pub operation: &'static str,
    /// What it was about: an id, `namespace/name` of a pod, the name of a container, an image.
    pub object: String,
}

/// What goes wrong with a call.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The call fails and has no effect.
    Error(Code, String),
    /// The call has no effect and is never answered.
    Hang,
    /// The call is answered this much later; its effect comes late too.
    Delay(Duration),
    /// The call has its effect, but the caller gets an error.
    LoseReply,
    /// The call has its effect, but is never answered.
    HangAfterEffect,
}

/// How a pull of an image goes.
#[derive(Clone, Debug)]
pub enum Pull {
    /// The image is there at once. The default for every image.
    Succeeds,
    /// The pull fails.
    Fails(Code, String),
    /// The pull never ends.
    Hangs,
    /// The image is there after a while.
    Takes(Duration),
}

/// What a restart of the runtime does to what it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restart {
    /// Containers run on, as they do under containerd's shims.
    Keep,
    /// Everything is gone, as after a reboot with a volatile state directory.
    Wipe,
}

type OnStart = Arc<dyn Fn(&v1::ContainerConfig) -> Behaviour + Send + Sync>;
type OnCall = Arc<dyn Fn(&Call) -> Option<Fault> + Send + Sync>;
type OnExec = Arc<dyn Fn(&v1::ContainerConfig, &[String]) -> ExecResult + Send + Sync>;

struct Shared {
    model: Mutex<Model>,
    control: Mutex<Control>,
    events: broadcast::Sender<v1::ContainerEventResponse>,
}

struct Control {
    calls: Vec<Call>,
    once: HashMap<&'static str, VecDeque<Fault>>,
    always: HashMap<&'static str, Fault>,
    pulls: HashMap<String, Pull>,
    on_call: OnCall,
    on_start: OnStart,
    on_exec: OnExec,
    stream_url: Option<String>,
    events: bool,
    checkpoints: bool,
    user_namespaces: bool,
    cgroup_driver: Option<v1::CgroupDriver>,
    /// Name and version that it gives.
    release: Option<(String, String)>,
    lose_events: usize,
    /// Bytes of the largest list.
    list_limit: usize,
    runtime_ready: bool,
    network_ready: bool,
}

/// A fake runtime. Cheap to clone; clones are the same runtime.
#[derive(Clone)]
pub struct FakeCri {
    shared: Arc<Shared>,
    transport: Transport,
}

impl Default for FakeCri {
    fn default() -> Self {
        Self::new()
    }
}

impl FakeCri {
    /// A runtime without images, that offers container events. Must be called inside a tokio runtime.
    pub fn new() -> Self {
        let shared = Arc::new(Shared {
            model: Mutex::new(Model::new()),
            control: Mutex::new(Control {
                calls: Vec::new(),
                once: HashMap::new(),
                always: HashMap::new(),
                pulls: HashMap::new(),
                on_call: Arc::new(|_| None),
                on_start: Arc::new(program::of_config),
                on_exec: Arc::new(|_, command| program::exec(command)),
                stream_url: None,
                events: true,
                checkpoints: false,
                user_namespaces: false,
                cgroup_driver: None,
                release: None,
                lose_events: 0,
                list_limit: 16 << 20,
                runtime_ready: true,
                network_ready: true,
            }),
            events: broadcast::channel(4096).0,
        });
        let (transport, connections) = Transport::new();
        let service = Service(shared.clone());
        let server = Server::builder()
            .add_service(create::Runtime::new(service.clone()))
            .add_service(ImageServiceServer::new(service))
            .serve_with_incoming(connections);
        tokio::spawn(async move {
            if let Err(error) = server.await {
                eprintln!("fake CRI server: {error}");
            }
        });
        Self { shared, transport }
    }

    /// Answers on a unix socket from now on; a socket left behind there is replaced.
    ///
    /// # Errors
    /// When the socket cannot be bound.
    pub fn serve(&self, socket: impl AsRef<Path>) -> io::Result<()> {
        self.transport.listen(socket.as_ref())
    }

    /// A channel to this runtime that needs no socket.
    pub fn channel(&self) -> Channel {
        self.transport.channel()
    }

    /// The runtime goes away: connections break, the socket is removed, new connections are refused.
    pub fn stop(&self) {
        self.transport.stop();
    }

    /// The runtime comes back after [`Self::stop`].
    ///
    /// # Errors
    /// When the socket cannot be bound again.
    pub fn start(&self) -> io::Result<()> {
        self.transport.start()
    }

    /// The runtime restarts: connections break, calls under way are lost.
    ///
    /// # Errors
    /// When the socket cannot be bound again.
    pub fn restart(&self, restart: Restart) -> io::Result<()> {
        self.stop();
        if restart == Restart::Wipe {
            self.model().wipe();
        }
        self.start()
    }

    /// The machine loses its power and comes back. Sandboxes are not ready, what ran has ended with 255. The state of
    /// the containers that `forgets` names, by pod and container, had not got to the disk: they are as they were
    /// before their start, as containerd shows them then.
    ///
    /// # Errors
    /// When the socket cannot be bound again.
    pub fn lose_power(&self, forgets: impl Fn(&str, &str) -> bool) -> io::Result<()> {
        self.stop();
        self.model().lose_power(&forgets);
        self.start()
    }

    /// Every call so far.
    pub fn calls(&self) -> Vec<Call> {
        self.control().calls.clone()
    }

    /// How often an operation was called so far.
    pub fn count(&self, operation: &str) -> usize {
        let control = self.control();
        let calls = control.calls.iter();
        calls.filter(|c| c.operation == operation).count()
    }

    /// Forgets the calls so far.
    pub fn clear_calls(&self) {
        self.control().calls.clear();
    }

    /// The next call of `operation` that meets no earlier such fault goes wrong.
    pub fn fail_once(&self, operation: &'static str, fault: Fault) {
        let mut control = self.control();
        control.once.entry(operation).or_default().push_back(fault);
    }

    /// Every call of `operation` goes wrong from now on.
    pub fn fail_always(&self, operation: &'static str, fault: Fault) {
        self.control().always.insert(operation, fault);
    }

    /// Nothing goes wrong any more; what hangs goes on hanging.
    pub fn clear_faults(&self) {
        let mut control = self.control();
        control.once.clear();
        control.always.clear();
    }

    /// Asked about every call before anything comes of it: a fault it returns goes before all others.
    pub fn on_call(&self, fault: impl Fn(&Call) -> Option<Fault> + Send + Sync + 'static) {
        self.control().on_call = Arc::new(fault);
    }

    /// What containers do that are started from now on. The default understands `true`, `false`,
    /// `sleep N` and simple `sh -c` scripts (see [`Behaviour::of_config`]).
    pub fn on_start(
        &self,
        behaviour: impl Fn(&v1::ContainerConfig) -> Behaviour + Send + Sync + 'static,
    ) {
        self.control().on_start = Arc::new(behaviour);
    }

    /// What commands executed in containers do.
    pub fn on_exec(
        &self,
        result: impl Fn(&v1::ContainerConfig, &[String]) -> ExecResult + Send + Sync + 'static,
    ) {
        self.control().on_exec = Arc::new(result);
    }

    /// Ends a running container by itself. Returns whether it ran.
    pub fn exit(&self, container_id: &str, code: i32) -> bool {
        let event = self.model().exit(container_id, code, None);
        self.shared.announce(event)
    }

    /// Ends a running container as the kernel's OOM killer does. Returns whether it ran.
    pub fn oom_kill(&self, container_id: &str) -> bool {
        let event = self.model().exit(container_id, 137, Some("OOMKilled"));
        self.shared.announce(event)
    }

    /// A sandbox dies by itself, and its containers with it. Returns whether it was ready.
    pub fn kill_sandbox(&self, sandbox_id: &str) -> bool {
        let events = self.model().stop_sandbox(sandbox_id, 137);
        let ready = !events.is_empty();
        for event in events {
            self.shared.announce(Some(event));
        }
        ready
    }

    /// Somebody removes a container behind the agent's back. Returns whether it was there.
    pub fn remove(&self, container_id: &str) -> bool {
        let event = self.model().remove_container(container_id);
        self.shared.announce(event)
    }

    /// Makes an image known.
    pub fn add_image(&self, image: &str) {
        self.model().add_image(image);
    }

    /// Layers of an image that is there are gone, as after a loss of power: it is listed, and no container can be made of
    /// it until it is removed and pulled again. A container of it, whatever its state, keeps it broken meanwhile.
    pub fn break_image(&self, image: &str) {
        self.model().break_image(image);
    }

    /// The program of an image that is there is empty from now on. As with runc, its containers start, end at once, and have
    /// one line in their logs. Goes as [`Self::break_image`] does.
    pub fn empty_program(&self, image: &str) {
        self.model().empty_program(image);
    }

    /// Whether an image is there and [broken](Self::break_image).
    pub fn is_broken(&self, image: &str) -> bool {
        self.model().is_broken(image)
    }

    /// Whether an image is there, by name or id.
    pub fn has_image(&self, image: &str) -> bool {
        self.model().image(image).is_some()
    }

    /// The file system of images is synced: a [loss of power](Self::lose_power) damages none of them. Until then it damages
    /// what was pulled since the last sync.
    pub fn sync_images(&self) {
        self.model().sync_images();
    }

    /// Somebody removes an image behind the agent's back.
    pub fn remove_image(&self, image: &str) {
        self.model().remove_image(image);
    }

    /// The directory that `image_fs_info` names from now on; otherwise `/proc`, whose sync costs nothing.
    pub fn keep_images_in(&self, directory: impl AsRef<Path>) {
        let directory = directory.as_ref().display().to_string();
        self.model().keep_images_in(directory);
    }

    /// How pulls of `image` go.
    pub fn pull(&self, image: &str, pull: Pull) {
        self.control().pulls.insert(image.to_owned(), pull);
    }

    /// The largest list of sandboxes or containers in bytes; 16 MiB unless set, as in containerd. Larger ones are refused.
    pub fn limit_lists(&self, bytes: usize) {
        self.control().list_limit = bytes;
    }

    /// Whether the runtime offers container events.
    pub fn offer_events(&self, offer: bool) {
        self.control().events = offer;
    }

    /// Whether the runtime checkpoints containers: it writes a file where it is told to.
    pub fn offer_checkpoints(&self, offer: bool) {
        self.control().checkpoints = offer;
    }

    /// The cgroup driver that the runtime reports; none unless set, as containerd before 2.0.
    pub fn set_cgroup_driver(&self, driver: Option<v1::CgroupDriver>) {
        self.control().cgroup_driver = driver;
    }

    /// Whether the runtime's default handler runs pods in user namespaces.
    pub fn offer_user_namespaces(&self, offer: bool) {
        self.control().user_namespaces = offer;
    }

    /// The runtime says that it is this one.
    pub fn set_release(&self, name: &str, version: &str) {
        self.control().release = Some((name.to_owned(), version.to_owned()));
    }

    /// The next `count` events are lost.
    pub fn lose_events(&self, count: usize) {
        self.control().lose_events += count;
    }

    /// Sends an event of the test's own making: a duplicate, a stale one.
    pub fn emit(&self, event: v1::ContainerEventResponse) {
        // Nobody listening is as good as a lost event.
        drop(self.shared.events.send(event));
    }

    /// How many subscribers of container events there are.
    pub fn event_subscribers(&self) -> usize {
        self.shared.events.receiver_count()
    }

    /// What `status` says.
    pub fn set_ready(&self, runtime: bool, network: bool) {
        let mut control = self.control();
        control.runtime_ready = runtime;
        control.network_ready = network;
    }

    /// Everything there is, as list calls would show it: containers by creation.
    pub fn containers(&self) -> Vec<v1::Container> {
        self.model().list_containers(None)
    }

    /// Sandboxes by creation.
    pub fn sandboxes(&self) -> Vec<v1::PodSandbox> {
        self.model().list_sandboxes(None)
    }

    /// The URL that exec, attach and port-forward are answered with; without one they are not offered.
    pub fn stream_at(&self, url: &str) {
        self.shared.control().stream_url = Some(url.to_owned());
    }

    /// The running containers of that name in the pod of that name.
    pub fn running(&self, pod: &str, container: &str) -> Vec<v1::Container> {
        let model = self.model();
        let mut found = model.list_containers(None);
        found.retain(|c| {
            c.state() == v1::ContainerState::ContainerRunning
                && c.labels.get("io.kubernetes.pod.name").map(String::as_str) == Some(pod)
                && c.metadata.as_ref().is_some_and(|m| m.name == container)
        });
        found
    }

    /// The configuration a container was created with.
    pub fn config(&self, container_id: &str) -> Option<v1::ContainerConfig> {
        self.model().config(container_id)
    }

    /// The variables a container was created with, byte for byte; [`Self::config`] has them as text.
    pub fn environment(&self, container_id: &str) -> Option<Vec<(String, Vec<u8>)>> {
        self.model().environment(container_id)
    }

    /// The configuration a sandbox was created with.
    pub fn sandbox_config(&self, sandbox_id: &str) -> Option<v1::PodSandboxConfig> {
        self.model().sandbox_config(sandbox_id)
    }

    /// Takes an annotation off every sandbox, as if an agent had made them that does not know it.
    pub fn forget_annotation(&self, key: &str) {
        self.model().forget_annotation(key);
    }

    /// Where it serves.
    pub fn socket(&self) -> Option<PathBuf> {
        self.transport.socket()
    }

    fn model(&self) -> MutexGuard<'_, Model> {
        self.shared.model()
    }

    fn control(&self) -> MutexGuard<'_, Control> {
        self.shared.control()
    }
}

impl Shared {
    fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn control(&self) -> MutexGuard<'_, Control> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A list, unless it is too large to be sent.
    fn fits<T: Message>(&self, list: T) -> Result<T, Status> {
        let (size, limit) = (list.encoded_len(), self.control().list_limit);
        if size > limit {
            // grpc-go's words.
            return Err(Status::resource_exhausted(format!(
                "grpc: trying to send message larger than max ({size} vs. {limit})"
            )));
        }
        Ok(list)
    }

    /// Sends an event, unless events are to be lost. Returns whether there was one.
    fn announce(&self, event: Option<v1::ContainerEventResponse>) -> bool {
        let Some(event) = event else { return false };
        let mut control = self.control();
        if control.lose_events > 0 {
            control.lose_events -= 1;
        } else {
            drop(self.events.send(event));
        }
        true
    }
}

/// The gRPC services.
#[derive(Clone)]
struct Service(Arc<Shared>);

impl Service {
    /// Notes the call, lets its fault happen, and else lets `effect` happen.
    async fn call<T>(
        &self,
        operation: &'static str,
        object: impl Into<String>,
        effect: impl Future<Output = Result<T, Status>>,
    ) -> Result<tonic::Response<T>, Status> {
        let call = Call {
            operation,
            object: object.into(),
        };
        // Not under the lock: it may look at what the runtime holds.
        let on_call = self.0.control().on_call.clone();
        let fault = on_call(&call);
        let fault = {
            let mut control = self.0.control();
            control.calls.push(call);
            fault.or_else(|| {
                let once = control.once.get_mut(operation);
                once.and_then(VecDeque::pop_front)
                    .or_else(|| control.always.get(operation).cloned())
            })
        };
        match fault {
            None => {}
            Some(Fault::Error(code, message)) => return Err(Status::new(code, message)),
            Some(Fault::Hang) => return std::future::pending().await,
            Some(Fault::Delay(by)) => tokio::time::sleep(by).await,
            Some(Fault::LoseReply) => {
                effect.await?;
                return Err(Status::unavailable("the reply was lost"));
            }
            Some(Fault::HangAfterEffect) => {
                effect.await?;
                return std::future::pending().await;
            }
        }
        effect.await.map(tonic::Response::new)
    }
}
