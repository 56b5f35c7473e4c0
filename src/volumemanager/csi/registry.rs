//! The drivers of this node; upstream's plugin watcher and plugin manager, for CSI drivers.
//!
//! Comes in: sockets below `<root>/plugins_registry` (in sub-directories as well; names that begin with a dot do not
//! count). Out: [`Drivers::client`], a record `csiplugins//<name>` for each, and through `super::node_info`
//! the objects in the API server. Each socket is asked who it is, the driver what it calls this node, and the plugin is
//! told whether it was taken; what fails is tried again with growing pauses. Plugins of other types are told that they
//! are not supported, once for each time their socket is made.
//!
//! A driver is registered until its registration socket goes. After a restart those on record can be called at once;
//! they register again beside that.
//!
//! **Invariant:** of two sockets with the same name the one with the higher version of CSI is taken, or the first one;
//! a socket on which nobody answers any more gives way to any other.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::net::UnixStream;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::allocatable::Allocatable;
use super::client::CsiClient;
use super::driver::{CSI_PLUGIN, check_name};
pub use super::driver::{Driver, Version};
use super::node_info::NodeInfo;
use super::proto::{Empty, PluginInfo, RegistrationStatus, method};
use super::rpc::{Failure, Socket};
use super::watch::Watch;
use crate::apiserver::ApiClient;
use crate::core::state::Transaction;
use crate::core::state::kinds::Key;
use crate::node_object::NodeObject;
use crate::store::Store;
use crate::types::Clock;
use crate::types::metrics::Metrics;

/// Upstream gives a second once it is connected.
const GET_INFO: Duration = Duration::from_secs(5);
/// Upstream: `notifyTimeoutDuration`.
const NOTIFY: Duration = Duration::from_secs(5);
/// Timeout of a connection to a socket that is in the way of another.
const ALIVE: Duration = Duration::from_secs(1);

/// Dependencies of the registry.
pub struct DriversOptions {
    /// The kubelet's root directory.
    pub root_dir: PathBuf,
    /// The node's name.
    pub node_name: String,
    /// For the records.
    pub store: Store,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// The API server; `None` for static pods only: then nobody is told of drivers.
    pub api: Option<ApiClient>,
    /// This node.
    pub node: NodeObject,
    /// For calls to drivers.
    pub metrics: Metrics,
}

/// A plugin of another type, that somebody else registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plugin {
    /// Its name, as it says.
    pub name: String,
    /// Path of its socket.
    pub endpoint: PathBuf,
    /// The socket that it registers by.
    pub registration: PathBuf,
    /// The versions that it speaks.
    pub versions: Vec<String>,
}

/// Registers plugins of another type. The error is in words for the plugin.
pub type Registrar = Arc<dyn Fn(Plugin) -> BoxFuture<'static, Result<(), String>> + Send + Sync>;

/// Gets the registration sockets that are there, whenever they are looked at.
pub type Watcher = Arc<dyn Fn(&BTreeSet<PathBuf>) + Send + Sync>;

/// The drivers that can be called now. Cheap to clone.
#[derive(Clone)]
pub struct Drivers {
    inner: Arc<Inner>,
}

struct Inner {
    known: Mutex<BTreeMap<String, Entry>>,
    changed: watch::Sender<u64>,
    /// Held from looking at a driver to having recorded what becomes of it.
    turn: tokio::sync::Mutex<()>,
    /// Drivers that had no slot left for a volume, until somebody asks them how many they have.
    exhausted: Mutex<BTreeSet<String>>,
    exhaustion: Notify,
    /// Registrar of plugins of other types.
    others: Mutex<BTreeMap<String, Registrar>>,
    /// Watchers of registration sockets.
    watchers: Mutex<Vec<Watcher>>,
    /// `None` when the drivers were given.
    parts: Option<DriversOptions>,
}

#[derive(Clone)]
struct Entry {
    driver: Driver,
    /// `None` for one that is gone.
    client: Option<CsiClient>,
}

/// Reason why a plugin was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// To be tried again.
    Retry(String),
    /// Not before its socket is another one.
    Final(String),
}

impl Drivers {
    /// Takes over the drivers on record. Nothing else is done before [`Self::run`].
    pub fn new(options: DriversOptions) -> Self {
        let mut known = BTreeMap::new();
        let state = options.store.snapshot();
        for record in state.all_stored::<Driver>() {
            let driver = match record.read() {
                Ok(driver) => driver,
                Err(error) => {
                    let (key, error) = (record.key(), error.source);
                    tracing::warn!(%key, %error, "a driver's record cannot be read, it has to register again");
                    continue;
                }
            };
            let client = (!driver.gone)
                .then(|| CsiClient::new(&driver.name, &driver.endpoint, options.metrics.clone()));
            known.insert(driver.name.clone(), Entry { driver, client });
        }
        Self {
            inner: Arc::new(Inner {
                known: Mutex::new(known),
                changed: watch::Sender::new(0),
                turn: tokio::sync::Mutex::default(),
                exhausted: Mutex::default(),
                exhaustion: Notify::new(),
                others: Mutex::default(),
                watchers: Mutex::default(),
                parts: Some(options),
            }),
        }
    }

    /// Drivers that are given, without sockets to register by: for tests of what uses drivers.
    pub fn with_clients(clients: impl IntoIterator<Item = CsiClient>) -> Self {
        let entry = |client: CsiClient| {
            let name = client.driver().to_owned();
            let driver = Driver {
                name: name.clone(),
                endpoint: client.socket().to_owned(),
                ..Driver::default()
            };
            let client = Some(client);
            (name, Entry { driver, client })
        };
        Self {
            inner: Arc::new(Inner {
                known: Mutex::new(clients.into_iter().map(entry).collect()),
                changed: watch::Sender::new(0),
                turn: tokio::sync::Mutex::default(),
                exhausted: Mutex::default(),
                exhaustion: Notify::new(),
                others: Mutex::default(),
                watchers: Mutex::default(),
                parts: None,
            }),
        }
    }

    /// The client of a driver; `None` while it is not registered. A driver that was registered before a restart is there
    /// from the start.
    pub fn client(&self, name: &str) -> Option<CsiClient> {
        self.known().get(name)?.client.clone()
    }

    /// Those that are registered, by name.
    pub fn registered(&self) -> Vec<Driver> {
        let known = self.known();
        let here = known.values().filter(|entry| !entry.driver.gone);
        here.map(|entry| entry.driver.clone()).collect()
    }

    /// Changes with each driver that comes, goes, or says something else of itself.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.inner.changed.subscribe()
    }

    /// Watches for drivers and tells the API server of them, until `token` is cancelled. Dropping it loses nothing
    /// that is not done again.
    pub async fn run(self, token: CancellationToken) {
        let Some(parts) = &self.inner.parts else {
            return token.cancelled().await;
        };
        let dir = parts.root_dir.join("plugins_registry");
        let tell = async {
            match &parts.api {
                Some(api) => {
                    let info = NodeInfo::new(
                        api.clone(),
                        parts.node_name.clone(),
                        parts.node.clone(),
                        self.clone(),
                    );
                    let allocatable = Allocatable::new(api.clone(), self.clone());
                    tokio::join!(info.run(), allocatable.run());
                }
                None => std::future::pending().await,
            }
        };
        let all = async { tokio::join!(Watch::new(self.clone(), dir).run(), tell) };
        tokio::select! {
            () = token.cancelled() => {}
            _ = all => {}
        }
    }

    /// Everything on record, gone ones too.
    pub(super) fn all(&self) -> Vec<Driver> {
        self.known().values().map(|e| e.driver.clone()).collect()
    }

    /// The API server has `driver` in the objects of the node with this UID, or has it no more when it is gone.
    pub(super) async fn told(&self, driver: &Driver, node: &str) {
        let _turn = self.inner.turn.lock().await;
        let Some(mut now) = self.get(&driver.name) else {
            return;
        };
        if now.gone != driver.gone || !now.same_for_api(driver) {
            return;
        }
        if now.gone {
            if let Err(error) = self.forget(&now.name).await {
                tracing::warn!(driver = now.name, error, "a driver's record stays for now");
            }
            return;
        }
        if now.told.as_deref() == Some(node) {
            return;
        }
        now.told = Some(node.to_owned());
        if let Err(error) = self.save(now.clone()).await {
            tracing::warn!(
                driver = now.name,
                error,
                "a driver's record is not up to date"
            );
        }
    }

    /// The whole dance with the plugin behind a registration socket. Gives the driver's name. Cancel-safe: what was
    /// begun is done again by the next call.
    pub(super) async fn register(&self, path: &Path) -> Result<String, Refusal> {
        let socket = Socket::new(path);
        let info: PluginInfo = socket
            .call(method::GET_INFO, &Empty {}, GET_INFO)
            .await
            .map_err(|failure| Refusal::Retry(format!("GetInfo: {}", text(&failure))))?;
        if let Some(registrar) = self.registrar(&info.r#type) {
            let plugin = Plugin {
                name: info.name.clone(),
                endpoint: endpoint_of(path, &info),
                registration: path.to_owned(),
                versions: info.supported_versions.clone(),
            };
            let taken = registrar(plugin).await;
            return answer(&socket, path, info.name, taken).await;
        }
        if info.r#type != CSI_PLUGIN {
            let why = format!(
                "plugins of type {:?} are not supported, only {CSI_PLUGIN}",
                info.r#type
            );
            notify(&socket, Some(&why)).await.map_err(Refusal::Retry)?;
            return Err(Refusal::Final(why));
        }
        let taken = self.take(path, &info).await;
        answer(&socket, path, info.name, taken).await
    }

    /// Has `registrar` register plugins of a type, as their sockets say it.
    pub fn hand_on(&self, plugin_type: &str, registrar: Registrar) {
        let others = self.inner.others.lock();
        let mut others = others.unwrap_or_else(PoisonError::into_inner);
        others.insert(plugin_type.to_owned(), registrar);
    }

    /// Shows `watcher` the registration sockets that are there, at every look.
    pub fn show_sockets(&self, watcher: Watcher) {
        let watchers = self.inner.watchers.lock();
        let mut watchers = watchers.unwrap_or_else(PoisonError::into_inner);
        watchers.push(watcher);
    }

    fn registrar(&self, plugin_type: &str) -> Option<Registrar> {
        let others = self.inner.others.lock();
        let others = others.unwrap_or_else(PoisonError::into_inner);
        others.get(plugin_type).cloned()
    }

    async fn take(&self, path: &Path, info: &PluginInfo) -> Result<(), String> {
        let (version, endpoint) = checked(path, info)?;
        self.give_way(path, &info.name, version).await?;
        let client = match self.client(&info.name) {
            Some(client) if client.socket() == endpoint => client,
            _ => CsiClient::new(&info.name, &endpoint, self.metrics()),
        };
        let node = client.node_get_info().await.map_err(|e| e.to_string())?;
        let driver = Driver {
            name: info.name.clone(),
            endpoint,
            registration: path.to_owned(),
            version,
            node_id: node.node_id,
            max_volumes: node.max_volumes_per_node,
            topology: node.accessible_topology.unwrap_or_default().segments,
            told: None,
            gone: false,
        };
        self.install(driver, client).await
    }

    /// Checks that a driver of this name that registered through another socket, if there is one, gives way.
    async fn give_way(&self, path: &Path, name: &str, version: Version) -> Result<(), String> {
        let Some(other) = self.get(name) else {
            return Ok(());
        };
        if other.gone || other.registration == path || other.version < version {
            return Ok(());
        }
        let connected = tokio::time::timeout(ALIVE, UnixStream::connect(&other.registration)).await;
        if !matches!(connected, Ok(Ok(_))) {
            return Ok(());
        }
        Err(format!(
            "a driver {name} is registered already through {}, with version {} of CSI, which is not lower than {version}",
            other.registration.display(),
            other.version
        ))
    }

    async fn install(&self, mut driver: Driver, client: CsiClient) -> Result<(), String> {
        let _turn = self.inner.turn.lock().await;
        // Another one may have come while this one was asked.
        self.give_way(&driver.registration, &driver.name, driver.version)
            .await?;
        let name = driver.name.clone();
        let before = self.get(&name);
        if let Some(before) = before
            .as_ref()
            .filter(|b| b.same_for_api(&driver) && !b.gone)
        {
            driver.told.clone_from(&before.told);
        }
        if before.as_ref() != Some(&driver) {
            self.save(driver.clone()).await?;
        }
        let is_new = before.is_none_or(|before| before.gone);
        tracing::info!(
            driver = name,
            endpoint = %driver.endpoint.display(),
            version = %driver.version,
            again = !is_new,
            "a CSI driver is registered"
        );
        let entry = Entry {
            driver,
            client: Some(client),
        };
        self.known().insert(name, entry);
        self.inner.changed.send_modify(|n| *n = n.wrapping_add(1));
        Ok(())
    }

    /// Deregisters the drivers whose registration socket is not among those that are there. Gives their names.
    pub(super) async fn keep_only(&self, sockets: &BTreeSet<PathBuf>) -> Vec<String> {
        let watchers = {
            let watchers = self.inner.watchers.lock();
            watchers.unwrap_or_else(PoisonError::into_inner).clone()
        };
        for watcher in watchers {
            watcher(sockets);
        }
        let _turn = self.inner.turn.lock().await;
        let lost = self.registered();
        let lost = lost.iter().filter(|d| !sockets.contains(&d.registration));
        let mut names = Vec::new();
        for driver in lost {
            let name = driver.name.clone();
            let has_api = self.inner.parts.as_ref().is_some_and(|p| p.api.is_some());
            let mut gone = driver.clone();
            gone.gone = true;
            // Calls end with the socket: it is gone whether or not that can be recorded now.
            self.known().insert(
                name.clone(),
                Entry {
                    driver: gone.clone(),
                    client: None,
                },
            );
            let recorded = if has_api {
                self.save(gone).await
            } else {
                self.forget(&name).await
            };
            if let Err(error) = recorded {
                tracing::warn!(driver = name, error, "that a driver went is not on record");
            }
            tracing::info!(driver = name, "a CSI driver is gone");
            names.push(name);
        }
        if !names.is_empty() {
            self.inner.changed.send_modify(|n| *n = n.wrapping_add(1));
        }
        names
    }

    /// A driver had no slot left for a volume: what it said of their number does not hold any more. Never waits.
    pub(super) fn exhausted(&self, name: &str) {
        let exhausted = self.inner.exhausted.lock();
        let mut exhausted = exhausted.unwrap_or_else(PoisonError::into_inner);
        exhausted.insert(name.to_owned());
        self.inner.exhaustion.notify_one();
    }

    /// Returns when there may be drivers to take. For one caller. Cancel-safe.
    pub(super) async fn exhaustion(&self) {
        self.inner.exhaustion.notified().await;
    }

    /// Those that said so since the last call.
    pub(super) fn take_exhausted(&self) -> BTreeSet<String> {
        let exhausted = self.inner.exhausted.lock();
        std::mem::take(&mut *exhausted.unwrap_or_else(PoisonError::into_inner))
    }

    /// Asks a driver how many volumes the node takes; what differs is on record, and told, when this returns.
    ///
    /// # Errors
    /// It does not say, or that cannot be recorded.
    pub(super) async fn ask_again(&self, name: &str) -> Result<(), String> {
        let client = self.client(name).ok_or("it is not registered")?;
        let node = client.node_get_info().await.map_err(|e| e.to_string())?;
        let _turn = self.inner.turn.lock().await;
        // Another one of that name may have registered meanwhile.
        let Some(mut driver) = self.get(name).filter(|d| d.endpoint == client.socket()) else {
            return Ok(());
        };
        if driver.gone || driver.max_volumes == node.max_volumes_per_node {
            return Ok(());
        }
        driver.max_volumes = node.max_volumes_per_node;
        driver.told = None;
        tracing::info!(
            driver = name,
            volumes = driver.max_volumes,
            "a CSI driver takes another number of volumes"
        );
        self.save(driver).await?;
        self.inner.changed.send_modify(|n| *n = n.wrapping_add(1));
        Ok(())
    }

    fn get(&self, name: &str) -> Option<Driver> {
        self.known().get(name).map(|entry| entry.driver.clone())
    }

    fn metrics(&self) -> Metrics {
        let parts = self.inner.parts.as_ref();
        parts.map(|p| p.metrics.clone()).unwrap_or_default()
    }

    /// Records a driver, and shows it as recorded; its client stays.
    async fn save(&self, driver: Driver) -> Result<(), String> {
        if let Some(parts) = &self.inner.parts {
            let (key, now) = (Key::new("", &driver.name), parts.clock.now());
            let put = Transaction::new().try_put_object(&key, "", &driver, now);
            let commit = parts.store.commit(put.map_err(|e| e.to_string())?);
            commit
                .await
                .map_err(|e| format!("record driver {}: {e}", driver.name))?;
        }
        if let Some(entry) = self.known().get_mut(&driver.name) {
            entry.driver = driver;
        }
        Ok(())
    }

    async fn forget(&self, name: &str) -> Result<(), String> {
        if let Some(parts) = &self.inner.parts {
            let key = Key::<Driver>::new("", name);
            let transaction = Transaction::new().delete_object(&key);
            let commit = parts.store.commit(transaction).await;
            commit.map_err(|e| format!("forget driver {name}: {e}"))?;
        }
        let mut known = self.known();
        if known.get(name).is_some_and(|entry| entry.driver.gone) {
            known.remove(name);
        }
        Ok(())
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        // Entries are replaced whole.
        let known = self.inner.known.lock();
        known.unwrap_or_else(PoisonError::into_inner)
    }
}

/// The version of CSI that is spoken with a plugin that registers by `path`, and where it listens.
pub(super) fn checked(path: &Path, info: &PluginInfo) -> Result<(Version, PathBuf), String> {
    check_name(&info.name)?;
    let version = Version::highest(&info.supported_versions)?;
    let endpoint = endpoint_of(path, info);
    if !endpoint.is_absolute() {
        return Err(format!(
            "the endpoint {:?} of driver {} is no absolute path",
            info.endpoint, info.name
        ));
    }
    Ok((version, endpoint))
}

/// Tells a plugin what became of its registration, and returns that for who tries again.
async fn answer(
    socket: &Socket,
    path: &Path,
    name: String,
    taken: Result<(), String>,
) -> Result<String, Refusal> {
    match taken {
        Ok(()) => {
            notify(socket, None).await.map_err(Refusal::Retry)?;
            Ok(name)
        }
        Err(why) => {
            if let Err(error) = notify(socket, Some(&why)).await {
                tracing::debug!(socket = %path.display(), error, "a plugin does not hear that it was refused");
            }
            Err(Refusal::Retry(why))
        }
    }
}

/// Returns the socket of a plugin: its registration socket if it names none.
fn endpoint_of(path: &Path, info: &PluginInfo) -> PathBuf {
    match info.endpoint.as_str() {
        "" => path.to_owned(),
        endpoint => PathBuf::from(endpoint.strip_prefix("unix://").unwrap_or(endpoint)),
    }
}

/// Tells a plugin what became of its registration.
async fn notify(socket: &Socket, refused: Option<&str>) -> Result<(), String> {
    let status = RegistrationStatus {
        plugin_registered: refused.is_none(),
        error: refused.unwrap_or_default().to_owned(),
    };
    let told: Result<Empty, Failure> = socket
        .call(method::NOTIFY_REGISTRATION_STATUS, &status, NOTIFY)
        .await;
    told.map(drop)
        .map_err(|failure| format!("NotifyRegistrationStatus: {}", text(&failure)))
}

fn text(failure: &Failure) -> String {
    match failure {
        Failure::Unreachable(why) => why.clone(),
        Failure::Broken(why) => format!("the connection broke: {why}"),
        Failure::Late(after) => {
            format!("no answer within {}", humantime::format_duration(*after))
        }
        Failure::Garbage(what) => format!("the answer cannot be used: {what}"),
        Failure::Status(code, message) => format!("{}: {message}", super::client::code_name(*code)),
    }
}
