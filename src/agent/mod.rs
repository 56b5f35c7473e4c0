//! Layer 7: the composition root. Opens the store, restores, wires, supervises, drains.
//!
//! [`run`] reads as the list of what happens between the start of the process and its end. Everything it
//! makes is handed down; nothing below knows it.

mod addresses;
mod api;
mod base;
mod cgroup_driver;
mod cluster;
mod devices;
mod directories;
mod dra;
#[cfg(feature = "failpoints")]
mod drill;
mod early_ends;
mod embedded;
mod eviction;
mod images;
mod iptables;
mod kernel;
mod known_pods;
pub mod lock;
mod logs;
mod mounts;
mod node;
mod node_parts;
mod oom;
mod open_files;
mod opening;
mod pinning;
mod pleg;
mod pod_cidr;
mod pod_parts;
mod pod_sockets;
mod probes;
mod reserves;
mod resume;
mod root_dir;
mod run_once;
mod shutdown;
mod sources;
mod start;
mod started;
mod swap;
mod sync_loop;
pub mod systemd;
mod takeover;
mod tasks;
mod volumes;
mod workers;

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use self::base::Base;
pub use self::base::Parts;
pub use self::embedded::Embedded;
use self::lock::{LockError, RuntimeLock, StateLock};
use self::started::Started;
use self::systemd::Systemd;
use crate::admin::{self, AdminError};
use crate::cli::logging::LogHandle;
use crate::cm::CgroupError;
use crate::config::SourceError;
use crate::kubeletconfig::{AgentConfig, CgroupDriver};
use crate::kuberuntime::cri::CriError;
use crate::nodeshutdown::logind::is_machine_going_down;
use crate::server::kubelet::{Limits, NodeApi, Server};
use crate::server::{self, ServerError};
use crate::store::open::OpenError;
use crate::store::{CommitError, StoreError};
use crate::types::causes;
use crate::types::metrics::Metrics;
use crate::volumemanager::command::Tools;

/// Workers get this long to finish what they are doing when the agent ends.
const DRAIN: Duration = Duration::from_secs(5);
/// A state directory or a container runtime in use is waited for this long.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);

/// Reason why the agent could not run.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The state directory or the container runtime is in use, or the directory is unusable.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The store cannot be opened now.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The store's writer cannot be started.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A commit at start was refused.
    #[error("commit the restored state")]
    Commit(#[from] CommitError),
    /// The runtime's endpoint cannot be used.
    #[error(transparent)]
    Cri(#[from] CriError),
    /// The API server cannot be used as configured.
    #[error(transparent)]
    Api(#[from] crate::apiserver::ApiError),
    /// Cgroups cannot be used.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// A setting cannot be used on this machine.
    #[error("{field}: {why}")]
    Setting {
        /// Name of the field.
        field: &'static str,
        /// Why, and the way out.
        why: String,
    },
    /// A source cannot be used.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The kubelet's API cannot be served with these settings.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The admin socket cannot be made.
    #[error(transparent)]
    Admin(#[from] AdminError),
    /// A directory cannot be made.
    #[error("make directory {}", path.display())]
    Directory {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Signals cannot be received.
    #[error("install a signal handler")]
    Signal(#[source] std::io::Error),
    /// A part of the agent ended that must not.
    #[error(
        "{part} ended unexpectedly; the agent ends too, so that it is started again from its checkpoints"
    )]
    Ended {
        /// Name of the part.
        part: String,
    },
    /// The runtime has another cgroup driver than the one that the agent began with.
    #[error(
        "the container runtime has another cgroup driver than {used}, with which the agent began; the agent ends, so that it is started again with the runtime's"
    )]
    CgroupDriver {
        /// The one it began with.
        used: CgroupDriver,
    },
    /// The store is that of another cluster.
    #[error(
        "the node is, or may be, of another cluster than the store; the agent ends, so that it is started again and judges that first"
    )]
    OtherCluster,
    /// `--runonce`: not every pod came to run.
    #[error("{0}")]
    RunOnce(String),
}

/// Inputs of [`run`] other than the configuration.
pub struct RunOptions {
    /// For SIGHUP.
    pub log: LogHandle,
    /// Replaces the kernel's boot id: how a reboot is rehearsed.
    pub boot_id: Option<String>,
    /// The socket of the kubelet's API that systemd handed over.
    pub listener: Option<TcpListener>,
}

/// Process around the agent.
struct Process {
    options: RunOptions,
    signals: Signals,
    systemd: Systemd,
}

/// Runs the agent until SIGTERM or SIGINT. Pods go on running afterwards.
///
/// # Errors
/// When the agent cannot start, or a part of it ended that must not.
pub async fn run(config: AgentConfig, options: RunOptions) -> Result<(), AgentError> {
    let systemd = Systemd::from_env();
    let token = CancellationToken::new();
    let mut signals = Signals::new()?;
    tokio::select! {
        () = mounts::wait(&config.root_dir, &config.state_dir, systemd) => {}
        () = signals.terminated() => {
            info!("stopped before the file systems of the agent's directories were mounted");
            return Ok(());
        }
    }
    let _locks = lock(&config).await?;
    oom::set_own_score(config.kubelet.oom_score_adj);
    open_files::limit(config.kubelet.max_open_files);

    let (boot, clock) = opening::boot(&config, &options);
    let metrics = Metrics::default();
    let connected = api::connect(&config, Arc::clone(&clock), metrics.clone()).await?;
    let (client, credentials) = connected.unzip();
    let base = opening::open(&config, client, clock, boot, metrics).await?;
    let mut tasks = Tasks::default();
    if let Some(credentials) = credentials {
        let credentials = credentials.recording(Arc::clone(&base.recorder) as _);
        tasks.add("credentials", credentials.run(token.clone()));
    }
    let mut process = Process {
        options,
        signals,
        systemd,
    };
    let result = serve(&config, &mut process, &base, &mut tasks, &token).await;

    systemd.stopping("stopping; pods keep running");
    token.cancel();
    tasks.end().await;
    if let Err(error) = close(&base).await {
        warn!(%error, "the store was not closed cleanly; the next start recovers it");
    }
    info!("agent stopped, pods keep running");
    result
}

/// Locks the state directory and the container runtime.
async fn lock(config: &AgentConfig) -> Result<(StateLock, RuntimeLock), LockError> {
    let state = patiently(|| StateLock::acquire(&config.state_dir)).await?;
    let socket = config.runtime_endpoint.path();
    let runtime = patiently(|| RuntimeLock::acquire(socket, Path::new(lock::RUN_DIR))).await?;
    Ok((state, runtime))
}

/// Takes a lock. A holder that was killed a moment ago may still be going away.
async fn patiently<L>(acquire: impl Fn() -> Result<L, LockError>) -> Result<L, LockError> {
    let deadline = Instant::now() + LOCK_PATIENCE;
    loop {
        match acquire() {
            Err(LockError::Held { .. } | LockError::RuntimeHeld { .. })
                if Instant::now() < deadline =>
            {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            other => return other,
        }
    }
}

/// Everything between the open store and the end.
async fn serve(
    config: &AgentConfig,
    process: &mut Process,
    base: &Base,
    tasks: &mut Tasks,
    token: &CancellationToken,
) -> Result<(), AgentError> {
    let systemd = process.systemd;
    serve_early(config, base, systemd, tasks, token).await?;
    systemd.status("waiting for the container runtime");
    let cri = start::runtime_client(config, base)?;
    let settled = tokio::select! {
        settled = cgroup_driver::settled(config, base, &cri) => settled,
        () = process.signals.terminated() => {
            info!("stopped before the container runtime answered");
            return Ok(());
        }
    };
    let config = &settled;
    let log = process.options.log.clone();
    let set_verbosity = Arc::new(move |v| log.set_verbosity(v).map_err(|e| causes(&e)));
    let node = base.node_api(config, cri.clone(), set_verbosity, token.clone());
    serve_kubelet_api(process, node, tasks).await?;
    let started = tokio::select! {
        started = start::start(config, base, cri, tasks, token) => {
            let started = started?;
            watch_cluster(config, base, tasks, token);
            oom::watch(base, &started, tasks, token);
            node::follow_size(config, base, &started, tasks, token);
            reserves::watch(config, base, &started, tasks, token);
            started
        }
        () = process.signals.terminated() => {
            info!("stopped before the container runtime answered");
            return Ok(());
        }
    };
    systemd.ready("running");

    let result = until_end(config, process, base, &started, tasks).await;
    let goes_down = result.is_ok() && is_machine_going_down().await;
    token.cancel();
    started.workers.drain(DRAIN).await;
    if goes_down {
        started.workers.stop_containers(shutdown::LAST_STOP).await;
    }
    result
}

/// Starts everything that works before the runtime has answered: health, the admin socket, care of the store, the watchdog.
async fn serve_early(
    config: &AgentConfig,
    base: &Base,
    systemd: Systemd,
    tasks: &mut Tasks,
    token: &CancellationToken,
) -> Result<(), AgentError> {
    if let Some(address) = config.healthz_address() {
        let (health, metrics) = (base.health(), base.metrics.clone());
        let server = server::open(address, health, metrics, token.clone()).await?;
        tasks.add("health server", server);
    }
    share_node(config, base, tasks, token);
    let socket = admin::bind(&config.state_dir)?;
    let info = base.admin_info(config);
    tasks.add(
        "admin socket",
        admin::serve(socket, base.store.clone(), info, token.clone()),
    );
    tasks.add(
        "heartbeat",
        tasks::heartbeat(base.store.clone(), Arc::clone(&base.clock), token.clone()),
    );
    tasks.add(
        "backups",
        tasks::backups(
            base.store.clone(),
            opening::backup_dir(config),
            Arc::clone(&base.clock),
            base.metrics.clone(),
            Arc::clone(&base.recorder) as _,
            token.clone(),
        ),
    );
    tasks.add(
        "store health",
        tasks::store_health(
            base.store.clone(),
            Arc::clone(&base.recorder) as _,
            token.clone(),
        ),
    );
    tasks.add(
        "watchdog",
        tasks::watchdog(
            systemd,
            base.sync_loop_check(),
            Arc::clone(&base.clock),
            token.clone(),
        ),
    );
    Ok(())
}

/// Serves the kubelet's API, on the socket of systemd if it passed one.
async fn serve_kubelet_api(
    process: &mut Process,
    node: NodeApi,
    tasks: &mut Tasks,
) -> Result<(), AgentError> {
    let listener = process.options.listener.take();
    if let Some(server) = Server::open_on(listener, node, Limits::default()).await? {
        tasks.add("kubelet API", server.run());
    }
    Ok(())
}

/// Waits for the end of the process: a signal, a part that ended, or with `--runonce` that every pod came to run. SIGHUP reopens the
/// log and reads manifests again.
async fn until_end(
    config: &AgentConfig,
    process: &mut Process,
    base: &Base,
    started: &Started,
    tasks: &mut Tasks,
) -> Result<(), AgentError> {
    if config.run_once {
        return tokio::select! {
            result = run_once::wait(&base.store, &started.workers, &started.pods, &started.ready) => {
                result.map_err(AgentError::RunOnce)
            }
            () = process.signals.terminated() => Ok(()),
        };
    }
    loop {
        tokio::select! {
            received = process.signals.next() => {
                if received == Received::Terminate {
                    return Ok(());
                }
                process.systemd.reloading("reading manifests again");
                if let Err(error) = process.options.log.reopen() {
                    error!(error = causes(&error), "cannot reopen the log, keeping the old one");
                }
                info!("log reopened, reading manifests again");
                started.config.reload();
                process.systemd.ready("running");
            }
            part = tasks.ended() => return Err(match part.as_str() {
                cluster::TASK => AgentError::OtherCluster,
                _ => AgentError::Ended { part },
            }),
        }
    }
}

/// Brings the kernel and the packet filter to what a node of Kubernetes has.
fn share_node(config: &AgentConfig, base: &Base, tasks: &mut Tasks, token: &CancellationToken) {
    let reserves = &config.kubelet.reserves;
    // For tests: the machine that they run on is not theirs.
    let is_left = cfg!(feature = "failpoints")
        && std::env::var_os("HOLDFAST_KERNEL").is_some_and(|value| value == "leave");
    if !is_left {
        let (root, recorder) = (Path::new(kernel::ROOT), &*base.recorder);
        kernel::settle(root, reserves.protect_kernel_defaults, recorder);
    }
    swap::report(reserves.fail_swap_on, &*base.recorder);
    if reserves.make_iptables_util_chains && !is_left {
        tasks.add("iptables", iptables::keep(Tools::default(), token.clone()));
    }
}

/// Ends the agent when its store turns out to be that of another cluster.
fn watch_cluster(config: &AgentConfig, base: &Base, tasks: &mut Tasks, token: &CancellationToken) {
    let Some(api) = base.api.clone() else {
        return;
    };
    let watch = cluster::watch(
        config.into(),
        config.state_dir.clone(),
        base.cluster.clone(),
        api,
        base.node.clone(),
        token.clone(),
    );
    tasks.add(cluster::TASK, watch);
}

/// Marks the end as orderly and closes the store.
async fn close(base: &Base) -> Result<(), CommitError> {
    while let Some(end) = tasks::orderly_end(&base.store.snapshot(), base.clock.now()) {
        match base.store.commit(end).await {
            // A last sign of life was on its way.
            Err(CommitError::Stale { .. }) => {}
            answer => {
                answer?;
                break;
            }
        }
    }
    base.store.clone().close().await
}

/// Tasks that live as long as the agent, by name.
#[derive(Default)]
struct Tasks {
    set: JoinSet<String>,
    /// Those that receive the reports of the others, to their end.
    last: JoinSet<String>,
    ending: CancellationToken,
}

impl Tasks {
    fn add(&mut self, name: &str, task: impl Future<Output = ()> + Send + 'static) {
        self.set.spawn(named(name, task));
    }

    /// As [`Self::add`], of one that goes on until those have ended. It is to end when its token is cancelled.
    fn add_last<F>(&mut self, name: &str, task: impl FnOnce(CancellationToken) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.last.spawn(named(name, task(self.ending.clone())));
    }

    /// Waits until one of them ends, which none should. Cancel-safe.
    async fn ended(&mut self) -> String {
        tokio::select! {
            Some(ended) = self.set.join_next() => name_of(ended),
            Some(ended) = self.last.join_next() => name_of(ended),
            else => std::future::pending().await,
        }
    }

    /// Drops all of them where they are.
    fn abort(&mut self) {
        self.set.abort_all();
        self.last.abort_all();
    }

    /// Waits for all of them to end after cancellation; those that take too long are aborted.
    async fn end(mut self) {
        join(&mut self.set).await;
        self.ending.cancel();
        join(&mut self.last).await;
    }
}

fn named(
    name: &str,
    task: impl Future<Output = ()> + Send + 'static,
) -> impl Future<Output = String> + Send + 'static {
    let name = name.to_owned();
    async move {
        task.await;
        name
    }
}

fn name_of(ended: Result<String, tokio::task::JoinError>) -> String {
    ended.unwrap_or_else(|error| error.to_string())
}

async fn join(tasks: &mut JoinSet<String>) {
    let all = async { while tasks.join_next().await.is_some() {} };
    if tokio::time::timeout(DRAIN, all).await.is_err() {
        warn!("some tasks did not end in time");
        tasks.abort_all();
    }
}

/// The signals the agent listens to.
struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    hang_up: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> Result<Self, AgentError> {
        Ok(Self {
            terminate: signal(SignalKind::terminate()).map_err(AgentError::Signal)?,
            interrupt: signal(SignalKind::interrupt()).map_err(AgentError::Signal)?,
            hang_up: signal(SignalKind::hangup()).map_err(AgentError::Signal)?,
        })
    }

    /// The next signal. Cancel-safe.
    async fn next(&mut self) -> Received {
        tokio::select! {
            _ = self.terminate.recv() => Received::Terminate,
            _ = self.interrupt.recv() => Received::Terminate,
            _ = self.hang_up.recv() => Received::HangUp,
        }
    }

    /// Waits for the order to end; SIGHUP has no meaning yet.
    async fn terminated(&mut self) {
        while self.next().await != Received::Terminate {}
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Received {
    Terminate,
    HangUp,
}
