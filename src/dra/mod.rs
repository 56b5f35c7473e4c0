//! Layer 4½: dynamic resource allocation. Which drivers are registered, and which claims they have prepared for the pods of this
//! node. Upstream: `dra.Manager`.
//!
//! In: registrations ([`DraManager::register`]), pods that are about to start ([`DraManager::prepare`]) and that have ended
//! ([`DraManager::unprepare`]). Out: calls to drivers, records ([`ClaimRecord`]), CDI devices of containers, and the deletion of
//! ResourceSlices of drivers that are gone (`slices`). `core::claims` decides.
//!
//! **Invariant:** a claim and its drivers are on the disk before a driver is asked to prepare or unprepare it. What is
//! recorded is unprepared, and nothing else.
//!
//! **Invariant:** one thing at a time happens to a claim: what a call to its driver leads to is recorded before the
//! next one begins. A caller may stop waiting; the call and its record still complete.

mod client;
mod health;
mod prepare;
pub mod proto;
mod slices;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::{Container, Pod};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::client::DriverClient;
use self::health::Healths;
use self::slices::Wipes;
use crate::apiserver::ApiClient;
use crate::core::claims::{
    self, ClaimError, ClaimId, ClaimRecord, ContainerClaim, DriverRecord, driver_key,
};
use crate::core::state::Transaction;
use crate::node_object::NodeObject;
use crate::store::{CommitError, Store};
use crate::types::metrics::{DriverNameLabel, Metrics};
use crate::types::{BootId, Clock, PodExt, PodUid};

/// Type of DRA drivers in `plugins_registry`.
pub const DRA_PLUGIN: &str = "DRAPlugin";

/// Stands for all drivers in `dra_resource_claims_in_use`.
const ANY_DRIVER: &str = "<any>";

/// Dependencies of the manager.
pub struct DraOptions {
    /// For the records.
    pub store: Store,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// For calls.
    pub metrics: Metrics,
    /// The API server; `None` for static pods only, which have no claims.
    pub api: Option<ApiClient>,
    /// The node's name.
    pub node_name: String,
    /// This node.
    pub node: NodeObject,
}

/// Reason why claims of a pod are not prepared, or not unprepared.
#[derive(Debug, thiserror::Error)]
pub enum DraError {
    /// The pod may not use a claim, or not yet.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// The API server does not show a claim.
    #[error("fetch ResourceClaim {claim}: {why}")]
    Fetch {
        /// Its name.
        claim: String,
        /// The cause.
        why: String,
    },
    /// No instance of a driver is registered.
    #[error("DRA driver {0} is not registered")]
    Unregistered(String),
    /// A call to a driver failed.
    #[error("{call} of DRA driver {driver}: {why}")]
    Call {
        /// The method.
        call: &'static str,
        /// The driver.
        driver: String,
        /// The cause.
        why: String,
    },
    /// A driver answered for a claim that it failed.
    #[error("{call} of DRA driver {driver} failed for ResourceClaim {claim}: {why}")]
    Failed {
        /// The method.
        call: &'static str,
        /// The driver.
        driver: String,
        /// Name of the claim.
        claim: String,
        /// The driver's own words.
        why: String,
    },
    /// A record cannot be written.
    #[error("commit the record of a ResourceClaim: {0}")]
    Commit(#[from] CommitError),
    /// The pod was given up, or something newer is done about it.
    #[error("the pod does not wait for its claims any more")]
    Abandoned,
    /// The agent ends.
    #[error("the agent ends")]
    Ending,
}

/// The claims of this node. Cheap to clone.
#[derive(Clone)]
pub struct DraManager {
    inner: Arc<Inner>,
}

type Turns<K> = BTreeMap<K, Arc<tokio::sync::Mutex<()>>>;

struct Inner {
    options: DraOptions,
    shared: Mutex<Shared>,
    /// One for each claim that something happens to.
    turns: Mutex<Turns<ClaimId>>,
    /// One for each pod whose claims are prepared or unprepared. Taken before those of claims.
    pods: Mutex<Turns<PodUid>>,
    wipes: Mutex<Wipes>,
    /// Held while a driver registers, and while ResourceSlices are deleted.
    registering: tokio::sync::Mutex<()>,
    /// A driver has come or gone.
    moved: Notify,
    /// Something was added to `Shared::changed`.
    changes: Notify,
    /// Ends the tasks that keep connections.
    stop: CancellationToken,
}

#[derive(Default)]
struct Shared {
    /// Instances of each driver, the newest last.
    drivers: BTreeMap<String, Vec<Plugin>>,
    newest: u64,
    /// Health of devices, by instance.
    health: BTreeMap<u64, Healths>,
    /// Pods with devices whose health has changed, and those whose driver is back, until somebody takes them.
    changed: BTreeSet<PodUid>,
    /// Pods that wait for a driver.
    waiting: BTreeSet<PodUid>,
    /// Instance that prepared a claim, by UID of the claim and driver.
    confirmed: BTreeMap<(String, String), u64>,
}

/// One instance of a driver.
#[derive(Clone)]
struct Plugin {
    instance: u64,
    client: DriverClient,
    /// Socket that it registered by.
    registration: PathBuf,
    /// Ends the task that keeps its connection.
    stop: CancellationToken,
}

impl DraManager {
    /// Takes over the recorded claims.
    pub fn new(options: DraOptions) -> Self {
        let known = DriverRecord::names(&options.store.snapshot());
        let manager = Self {
            inner: Arc::new(Inner {
                options,
                shared: Mutex::default(),
                turns: Mutex::default(),
                pods: Mutex::default(),
                wipes: Mutex::new(Wipes::of(known)),
                registering: tokio::sync::Mutex::default(),
                moved: Notify::new(),
                changes: Notify::new(),
                stop: CancellationToken::new(),
            }),
        };
        manager.count();
        manager
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        let shared = self.inner.shared.lock();
        shared.unwrap_or_else(PoisonError::into_inner)
    }

    fn store(&self) -> &Store {
        &self.inner.options.store
    }

    fn boot(&self) -> BootId {
        self.inner.options.clock.now().boot
    }

    /// Registers an instance of a driver that came by the socket `registration` and serves on `endpoint`. It is connected to in
    /// the background. Of several instances the newest connected one is called. Upstream: `DRAPluginManager.RegisterPlugin`.
    ///
    /// # Errors
    /// The reason for the refusal, in words for the driver.
    pub async fn register(
        &self,
        driver: &str,
        endpoint: &Path,
        registration: &Path,
        versions: &[String],
    ) -> Result<(), String> {
        let service = service_of(driver, endpoint, versions)?;
        // A deletion of its ResourceSlices under way ends first.
        let _turn = self.inner.registering.lock().await;
        let is_taken = (self.shared().drivers.get(driver).into_iter().flatten())
            .any(|p| p.client.socket() == endpoint && p.registration != registration);
        if is_taken {
            return Err(format!(
                "endpoint {} already registered for DRA driver plugin {driver}",
                endpoint.display()
            ));
        }
        let record = DriverRecord {
            socket: endpoint.display().to_string(),
        };
        let now = self.inner.options.clock.now();
        let put = Transaction::new().put_object(&driver_key(driver), &record, now);
        let commit = self.store().commit(put).await;
        commit.map_err(|error| format!("record the driver: {error}"))?;
        self.remove(|plugin| plugin.registration == registration);
        let metrics = self.inner.options.metrics.clone();
        let plugin = {
            let mut shared = self.shared();
            shared.newest += 1;
            let plugin = Plugin {
                instance: shared.newest,
                client: DriverClient::new(driver, endpoint, service, metrics),
                registration: registration.to_owned(),
                stop: self.inner.stop.child_token(),
            };
            let instances = shared.drivers.entry(driver.to_owned()).or_default();
            instances.push(plugin.clone());
            plugin
        };
        self.wipes().registers(driver);
        info!(driver, endpoint = %endpoint.display(), service, "a DRA driver is registered");
        self.moved(driver);
        let (manager, driver) = (self.clone(), driver.to_owned());
        let health = health::service_of(versions);
        tokio::spawn(async move {
            let connected = plugin.client.keep_connected(|| manager.moved(&driver));
            let followed = async {
                match health {
                    Some(path) => manager.follow_health(&driver, &plugin, path).await,
                    None => std::future::pending().await,
                }
            };
            let both = async { tokio::join!(connected, followed) };
            plugin.stop.run_until_cancelled(both).await;
            manager.forget_health(&driver, plugin.instance);
        });
        Ok(())
    }

    /// Forgets the instances whose registration sockets are not among those that are there.
    pub fn keep_only(&self, sockets: &BTreeSet<PathBuf>) {
        self.remove(|plugin| !sockets.contains(&plugin.registration));
    }

    fn remove(&self, is_gone: impl Fn(&Plugin) -> bool) {
        let mut gone = Vec::new();
        self.shared().drivers.retain(|driver, instances| {
            instances.retain(|plugin| {
                let stays = !is_gone(plugin);
                if !stays {
                    gone.push((driver.clone(), plugin.clone()));
                }
                stays
            });
            !instances.is_empty()
        });
        for (driver, plugin) in gone {
            plugin.stop.cancel();
            plugin.client.close();
            info!(driver, socket = %plugin.client.socket().display(), "a DRA driver is gone");
            self.moved(&driver);
        }
    }

    /// The newest instance that is connected, or else the newest.
    fn plugin(&self, driver: &str) -> Result<Plugin, DraError> {
        let shared = self.shared();
        let instances = shared.drivers.get(driver).map_or(&[][..], Vec::as_slice);
        let connected = instances.iter().rev().find(|p| p.client.is_connected());
        let plugin = connected.or(instances.last());
        plugin
            .cloned()
            .ok_or_else(|| DraError::Unregistered(driver.to_owned()))
    }

    /// Returns what a container has of its pod's claims.
    ///
    /// # Errors
    /// When one of them is not prepared.
    pub fn of_container(
        &self,
        pod: &Pod,
        container: &Container,
    ) -> Result<Vec<ContainerClaim>, ClaimError> {
        if claims::references(pod).is_empty() {
            return Ok(Vec::new());
        }
        let held = ClaimRecord::of_pod(&self.store().snapshot(), &pod.uid());
        claims::of_container(pod, container, &held, self.boot())
    }

    /// Unprepares what is recorded of pods that are gone for good, as `is_gone` says. What fails is tried again by the
    /// next call. Upstream: `reconcileLoop`.
    pub async fn reconcile(&self, is_gone: impl Fn(&PodUid) -> bool) {
        let mut gone = BTreeSet::new();
        for (_, record) in ClaimRecord::all(&self.store().snapshot()).flatten() {
            let pods = record.pods.into_keys();
            gone.extend(pods.filter(|pod| is_gone(pod)));
        }
        for pod in gone {
            if let Err(error) = self.unprepare(&pod).await {
                warn!(%pod, %error, "cannot unprepare the claims of a deleted pod yet");
            }
        }
    }

    /// Shows the number of recorded claims by driver.
    fn count(&self) {
        let mut counts: BTreeMap<String, i64> = BTreeMap::new();
        let mut all = 0;
        for (_, record) in ClaimRecord::all(&self.store().snapshot()).flatten() {
            all += 1;
            for driver in record.drivers.into_keys() {
                *counts.entry(driver).or_default() += 1;
            }
        }
        counts.insert(ANY_DRIVER.to_owned(), all);
        let family = &self.inner.options.metrics.dra_resource_claims_in_use;
        // A driver without claims shows none, as upstream.
        family.clear();
        for (driver_name, count) in counts {
            let label = DriverNameLabel { driver_name };
            family.get_or_create_owned(&label).set(count);
        }
    }
}

/// Returns the begin of the methods of the newest service that a driver and the agent speak. Upstream:
/// `validateSupportedServices`.
fn service_of(driver: &str, endpoint: &Path, versions: &[String]) -> Result<&'static str, String> {
    let is_named = |part: &str| {
        !part.is_empty()
            && part
                .chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
    };
    if driver.len() > 63 || !driver.split('.').all(is_named) {
        return Err(format!(
            "the name {driver:?} of a DRA driver is invalid; give it one like gpu.example.com"
        ));
    }
    if !endpoint.is_absolute() {
        return Err(format!(
            "the endpoint {} of DRA driver {driver} is no absolute path",
            endpoint.display()
        ));
    }
    let spoken = |version: &String| {
        let mut services = proto::SERVICES.iter();
        services.find(|(name, _)| name == version)
    };
    let found = versions.iter().find_map(spoken);
    found.map(|(_, service)| *service).ok_or_else(|| {
        format!(
            "invalid supported gRPC versions of DRA driver plugin {driver} at endpoint {}: none of {versions:?} is supported \
             by the kubelet ({:?})",
            endpoint.display(),
            proto::SERVICES.map(|(name, _)| name)
        )
    })
}

/// Deletes the record of a driver.
fn delete_of(driver: &str) -> Transaction {
    Transaction::new().delete_object(&driver_key(driver))
}
