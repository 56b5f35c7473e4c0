//! Layer 4: device plugins. Who is registered, what each lists, and which container has which devices. Upstream:
//! `devicemanager.ManagerImpl`.
//!
//! In: registrations ([`DeviceManager::register`]; `server::device_plugins` serves the socket they come in by), lists of
//! plugins, pods that are about to start. Out: amounts for the node's status, records ([`PodDevices`]), what a container
//! gets with its devices, and resources whose devices have changed ([`DeviceManager::changed`]). `core::devices` decides.
//!
//! **Invariant:** devices are on record, on the disk, before a plugin is asked to allocate them, and its answer is before a
//! container starts with them. After a crash it is asked for the same devices again.
//!
//! **Invariant:** a plugin that hangs or answers garbage holds up only what needs its devices. Each connection has a task of
//! its own, and a call holds no lock.

mod allocate;
mod checkpoint;
mod client;
mod hints;
pub mod proto;
mod returned;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1 as api;
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

pub use self::allocate::{Align, Readiness};
pub use self::checkpoint::{FILE as KUBELET_CHECKPOINT, KubeletCheckpoint};
use self::client::PluginClient;
pub use self::client::{connect, short_path};
use crate::core::devices::{
    self, Allocation, Amounts, Device, Devices, Granted, Instance, Inventory, PluginRecord,
    PodDevices, Unreadable,
};
use crate::core::state::Transaction;
use crate::kubeletconfig::DeviceReadiness;
use crate::store::Store;
use crate::types::metrics::{Metrics, ResourceNameLabel};
use crate::types::{Clock, PodExt, PodUid, Stamp, causes};

/// A plugin's lists are taken this often at most: each changes records, pods and the node in the API server.
const LIST_PAUSE: Duration = Duration::from_secs(1);
/// Time in which a plugin lists its devices that has registered in place of another one. Upstream waits until the stream of the
/// other one has ended.
const LIST_PATIENCE: Duration = Duration::from_secs(30);

/// Type of device plugins in `plugins_registry`.
pub const DEVICE_PLUGIN: &str = "DevicePlugin";

/// Dependencies of the manager.
pub struct DeviceManagerOptions {
    /// For the records.
    pub store: Store,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// For registrations and calls.
    pub metrics: Metrics,
    /// Reaction to a pod that has to start again while its devices are away.
    pub readiness: DeviceReadiness,
}

/// The devices of this node. Cheap to clone.
#[derive(Clone)]
pub struct DeviceManager {
    inner: Arc<Inner>,
}

struct Inner {
    options: DeviceManagerOptions,
    started: Stamp,
    shared: Mutex<Shared>,
    amounts: watch::Sender<Amounts>,
    /// Something was added to `Shared::changed`.
    changes: Notify,
    /// A plugin has said something, or is lost: what [`DeviceManager::run`] waits for may have changed.
    said: Notify,
    /// Held from choosing devices to having recorded them.
    turn: tokio::sync::Mutex<()>,
    /// Ends the tasks that read lists.
    stop: CancellationToken,
}

#[derive(Default)]
struct Shared {
    inventory: Inventory,
    clients: BTreeMap<String, Connected>,
    newest: Instance,
    /// Resources whose devices have changed, until somebody takes them.
    changed: BTreeSet<String>,
    /// Containers that may use the devices they have: they ran when this agent first saw them, or were checked by it.
    confirmed: HashSet<(PodUid, String)>,
    /// Pods that wait for devices, by UID.
    waiting: BTreeMap<PodUid, BTreeSet<String>>,
}

struct Connected {
    instance: Instance,
    client: PluginClient,
    /// Ends the task that reads its lists.
    stop: CancellationToken,
    socket: PathBuf,
}

impl DeviceManager {
    /// Takes over the resources on record. Their plugins count as lost until they register with this run, also on record.
    pub fn new(options: DeviceManagerOptions) -> Self {
        let now = options.clock.now();
        let mut shared = Shared::default();
        let mut lost = Transaction::new();
        for (resource, record) in PluginRecord::all(&options.store.snapshot()) {
            shared.inventory.remember(resource, &record, now);
            let without = shared.inventory.record(resource, String::new());
            if let Some(without) = without.filter(|_| record.lost.is_none()) {
                lost = lost.put_object(&devices::plugin_key(resource), &without, now);
            }
        }
        if !lost.is_empty() {
            // Nothing decides by it, and the plugin's registration tells it again; a degraded store reports itself.
            drop(options.store.submit(lost));
        }
        let amounts = watch::Sender::new(shared.inventory.amounts(now));
        Self {
            inner: Arc::new(Inner {
                options,
                started: now,
                shared: Mutex::new(shared),
                amounts,
                changes: Notify::new(),
                said: Notify::new(),
                turn: tokio::sync::Mutex::default(),
                stop: CancellationToken::new(),
            }),
        }
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        let shared = self.inner.shared.lock();
        shared.unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Stamp {
        self.inner.options.clock.now()
    }

    fn store(&self) -> &Store {
        &self.inner.options.store
    }

    /// Returns the number of the node's devices by resource.
    pub fn amounts(&self) -> watch::Receiver<Amounts> {
        self.inner.amounts.subscribe()
    }

    /// Returns whether a device plugin has ever registered the resource.
    pub fn knows(&self, resource: &str) -> bool {
        self.shared().inventory.knows(resource)
    }

    /// Registers a plugin: connects to its socket and asks for its options. Reads its lists from then on, in a task of its
    /// own. It replaces an earlier plugin of the resource. Upstream: `PluginConnected`.
    ///
    /// # Errors
    /// Why it is refused, in words for the plugin.
    pub async fn register(
        &self,
        resource: &str,
        socket: &Path,
        versions: &[String],
    ) -> Result<(), String> {
        if !versions.iter().any(|version| version == proto::VERSION) {
            return Err(format!(
                "requested API version {:?} is not supported by kubelet. Supported version is {:?}",
                versions.join(","),
                proto::VERSION
            ));
        }
        if !devices::is_extended(resource) {
            return Err(format!("the ResourceName {resource:?} is invalid"));
        }
        let connecting = async {
            let client = PluginClient::dial(socket).await?;
            let options = client.options().await?;
            Ok::<_, client::CallError>((client, options))
        };
        let (client, options) = connecting.await.map_err(|error| error.to_string())?;
        let stop = self.inner.stop.child_token();
        let instance = {
            let mut shared = self.shared();
            shared.newest += 1;
            let instance = shared.newest;
            shared.inventory.connect(resource, instance, options);
            let connected = Connected {
                instance,
                client: client.clone(),
                stop: stop.clone(),
                socket: socket.to_owned(),
            };
            if let Some(former) = shared.clients.insert(resource.to_owned(), connected) {
                former.stop.cancel();
            }
            instance
        };
        info!(resource, socket = %socket.display(), "a device plugin is registered");
        let label = ResourceNameLabel {
            resource_name: resource.to_owned(),
        };
        let metrics = &self.inner.options.metrics;
        metrics
            .device_plugin_registrations
            .get_or_create(&label)
            .inc();
        self.published(resource);
        let (manager, resource) = (self.clone(), resource.to_owned());
        let due = Instant::now() + LIST_PATIENCE;
        tokio::spawn(async move {
            let listing = manager.follow(&resource, instance, &client);
            let listing = async {
                tokio::select! {
                    () = listing => {}
                    never = manager.overdue(&resource, instance, due) => match never {},
                }
            };
            if stop.run_until_cancelled(listing).await.is_some() {
                manager.lost(&resource, instance);
            }
        });
        Ok(())
    }

    /// Reads the lists of a plugin until its stream ends. Upstream: `client.Run`.
    async fn follow(&self, resource: &str, instance: Instance, client: &PluginClient) {
        let mut stream = match client.list_and_watch().await {
            Ok(stream) => stream,
            Err(error) => {
                warn!(resource, %error, "a device plugin lists no devices");
                return;
            }
        };
        let (mut newest, mut due) = (None, Instant::now());
        loop {
            // Both are cancel-safe. Each list is complete: only the newest one counts.
            let message = tokio::select! {
                message = stream.message() => message,
                () = tokio::time::sleep_until(due), if newest.is_some() => {
                    if let Some(list) = newest.take() {
                        self.listed(resource, instance, list);
                    }
                    due = Instant::now() + LIST_PAUSE;
                    continue;
                }
            };
            match message {
                Ok(Some(list)) => newest = Some(list),
                Ok(None) => return debug!(resource, "a device plugin ended its list"),
                Err(status) => {
                    return warn!(resource, error = %causes(&status), "the list of a device plugin broke off");
                }
            }
        }
    }

    /// Waits until a plugin must have listed its devices, and ends the use of the list before it if it has not. Never returns.
    async fn overdue(&self, resource: &str, instance: Instance, due: Instant) -> Infallible {
        tokio::time::sleep_until(due).await;
        let is_overdue = self.shared().inventory.overdue(resource, instance);
        if is_overdue {
            warn!(
                resource,
                seconds = LIST_PATIENCE.as_secs(),
                "a device plugin that has registered lists no devices; those of the one before it are not allocated any more"
            );
            self.published(resource);
        }
        std::future::pending().await
    }

    fn listed(&self, resource: &str, instance: Instance, list: proto::ListAndWatchResponse) {
        let device = |device: proto::Device| {
            let nodes = device.topology.into_iter().flat_map(|t| t.nodes);
            let known = Device {
                healthy: device.health == proto::HEALTHY,
                numa: nodes.map(|node| node.id).collect(),
            };
            (device.id, known)
        };
        let devices: Devices = list.devices.into_iter().map(device).collect();
        let count = devices.len();
        // Of pods whose devices are not known, none is known to be back.
        let held = devices::taken(&self.store().snapshot(), resource).unwrap_or_default();
        let is_new = {
            let mut shared = self.shared();
            let returning = shared.inventory.returning(resource, &devices, &held);
            let is_new = shared.inventory.list(resource, instance, devices);
            if is_new {
                shared.inventory.add_returned(resource, returning);
            }
            is_new
        };
        if is_new {
            info!(
                resource,
                devices = count,
                "a device plugin has listed its devices"
            );
            self.published(resource);
        }
    }

    /// The stream of a plugin has ended: unless it was replaced, nothing of its resource can be allocated.
    fn lost(&self, resource: &str, instance: Instance) {
        let now = self.now();
        let was_current = {
            let mut shared = self.shared();
            let is_its = (shared.clients.get(resource)).is_some_and(|c| c.instance == instance);
            if is_its {
                shared.clients.remove(resource);
            }
            shared.inventory.disconnect(resource, instance, now)
        };
        if was_current {
            warn!(resource, "a device plugin is lost");
            self.published(resource);
        }
    }

    /// Shows amounts, records the plugin, and names the resource to who waits for changes.
    fn published(&self, resource: &str) {
        let now = self.now();
        let record = {
            let mut shared = self.shared();
            shared.changed.insert(resource.to_owned());
            let socket = shared.clients.get(resource);
            let socket = socket.map_or_else(String::new, |c| c.socket.display().to_string());
            shared.inventory.record(resource, socket)
        };
        self.show_amounts();
        self.inner.changes.notify_one();
        self.inner.said.notify_one();
        let Some(record) = record else {
            return;
        };
        let put = Transaction::new().put_object(&devices::plugin_key(resource), &record, now);
        // The next list or registration tells it again; a degraded store reports itself.
        drop(self.store().submit(put));
    }

    fn show_amounts(&self) {
        let amounts = self.shared().inventory.amounts(self.now());
        self.inner.amounts.send_if_modified(|shown| {
            let differs = *shown != amounts;
            *shown = amounts;
            differs
        });
    }

    /// Keeps the amounts up to date, until `stop` is cancelled: a lost plugin's devices count for a while. Ends the tasks
    /// that [`Self::register`] has started with it.
    pub async fn run(self, stop: CancellationToken) {
        let _tasks = self.inner.stop.clone().drop_guard();
        loop {
            let left = self.shared().inventory.next_change(self.now());
            let expiry = async {
                match left {
                    // The clock may be behind the timer.
                    Some(left) => tokio::time::sleep(left + Duration::from_millis(10)).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = expiry => self.show_amounts(),
                () = self.inner.said.notified() => {}
            }
        }
    }

    /// Waits for changes and returns the pods that they concern: those with devices of a resource that has changed, and
    /// those that wait for one. For one caller. Cancel-safe.
    pub async fn changed(&self) -> BTreeSet<PodUid> {
        loop {
            self.inner.changes.notified().await;
            let mut shared = self.shared();
            let resources = std::mem::take(&mut shared.changed);
            if resources.is_empty() {
                continue;
            }
            let waiting = shared.waiting.iter();
            let waiting = waiting.filter(|(_, for_any)| !for_any.is_disjoint(&resources));
            let mut pods: BTreeSet<PodUid> = waiting.map(|(uid, _)| uid.clone()).collect();
            drop(shared);
            let state = self.store().snapshot();
            let holders = PodDevices::all(&state).flatten();
            let holders = holders.filter(|(_, held)| held.has_any(&resources));
            pods.extend(holders.map(|(uid, _)| uid));
            return pods;
        }
    }

    /// Returns what a container gets with its devices. Upstream: `GetDeviceRunContainerOptions`.
    ///
    /// # Errors
    /// When the pod's record cannot be read.
    pub fn granted(&self, pod: &Pod, container: &str) -> Result<Granted, Unreadable> {
        let held = self.held(pod)?;
        let of_container = held.containers.get(container);
        Ok(of_container.map(devices::merge).unwrap_or_default())
    }

    /// Calls `PreStartContainer` of each plugin that wants it and whose devices the container has.
    ///
    /// # Errors
    /// When one refuses or cannot be called: the container does not start.
    pub async fn pre_start(&self, pod: &Pod, container: &str) -> Result<(), String> {
        let held = self.held(pod).map_err(|error| error.to_string())?;
        for (resource, allocation) in held.containers.get(container).into_iter().flatten() {
            let client = {
                let shared = self.shared();
                if !shared.inventory.options(resource).pre_start {
                    continue;
                }
                shared.clients.get(resource).map(|c| c.client.clone())
            };
            let client = client.ok_or_else(|| {
                format!("endpoint not found in cache for a registered resource: {resource}")
            })?;
            let ids = allocation.ids.keys().cloned().collect();
            let called = client.pre_start(ids).await;
            called.map_err(|error| {
                format!("device plugin PreStartContainer rpc failed with err: {error}")
            })?;
        }
        Ok(())
    }

    /// Adds to a pod's status which devices its main containers have, and how they are.
    pub fn report(&self, pod: &Pod, status: &mut api::PodStatus) {
        if !devices::may_want(pod) {
            return;
        }
        let state = self.store().snapshot();
        let Ok(Some(held)) = PodDevices::of(&state, pod) else {
            return;
        };
        let shared = self.shared();
        for container in status.container_statuses.iter_mut().flatten() {
            let Some(resources) = held.containers.get(&container.name) else {
                continue;
            };
            let of_resource = |(resource, allocation): (&String, &Allocation)| {
                let health = |id: &String| api::ResourceHealth {
                    resource_id: id.clone(),
                    health: Some(shared.inventory.health(resource, id).as_str().to_owned()),
                    ..api::ResourceHealth::default()
                };
                api::ResourceStatus {
                    name: resource.clone(),
                    resources: Some(allocation.ids.keys().map(health).collect()),
                }
            };
            let all: Vec<_> = resources.iter().map(of_resource).collect();
            container.allocated_resources_status = Some(all).filter(|all| !all.is_empty());
        }
    }

    /// Returns the devices of each container of a pod, by container and resource.
    ///
    /// # Errors
    /// When the pod's record cannot be read.
    pub fn held(&self, pod: &Pod) -> Result<PodDevices, Unreadable> {
        Ok(PodDevices::of(&self.store().snapshot(), pod)?.unwrap_or_default())
    }

    /// Returns the healthy devices of connected plugins, by resource.
    pub fn healthy(&self) -> BTreeMap<String, Devices> {
        let shared = self.shared();
        let healthy = |(resource, devices): (&String, &Devices)| {
            let mut devices = devices.clone();
            devices.retain(|_, device| device.healthy);
            (resource.clone(), devices)
        };
        shared.inventory.all_listed().map(healthy).collect()
    }

    /// Forgets a pod that is gone. Its records go with it.
    pub fn forget(&self, uid: &PodUid) {
        let mut shared = self.shared();
        shared.confirmed.retain(|(of, _)| of != uid);
        shared.waiting.remove(uid);
    }

    /// The containers that `is_running` says run when the agent starts use the devices they have, also when they end before
    /// their pod is synced.
    pub fn resume(&self, is_running: impl Fn(&PodUid, &str) -> bool) {
        let state = self.store().snapshot();
        let mut shared = self.shared();
        for (uid, held) in PodDevices::all(&state).flatten() {
            let containers = held.containers.into_keys();
            let running = containers.filter(|name| is_running(&uid, name));
            let running: Vec<_> = running.map(|name| (uid.clone(), name)).collect();
            shared.confirmed.extend(running);
        }
    }

    /// The containers that run use the devices they have, whatever their plugins do.
    pub fn confirm<'a>(&self, pod: &Pod, running: impl Iterator<Item = &'a str>) {
        if !devices::may_want(pod) {
            return;
        }
        let uid = pod.uid();
        let running = running.map(|name| (uid.clone(), name.to_owned()));
        self.shared().confirmed.extend(running);
    }
}

#[cfg(test)]
mod tests;
