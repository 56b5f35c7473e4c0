//! A kubelet's root directory, drivers below it, and an agent's registry.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use holdfast::apiserver::ApiClient;
use holdfast::node_object::NodeObject;
use holdfast::store::Store;
use holdfast::types::metrics::Metrics;
use holdfast::types::{BootId, SystemClock};
use holdfast::volumemanager::csi::client::CsiClient;
use holdfast::volumemanager::csi::proto::{
    AccessMode, AccessType, Empty, Mode, MountVolume, NodePublishVolumeRequest,
    NodeStageVolumeRequest, VolumeCapability,
};
use holdfast::volumemanager::csi::registry::{Drivers, DriversOptions};
use holdfast_testkit::csi::{CsiDriver, CsiOptions};
use tokio_util::sync::CancellationToken;

pub const NODE: &str = "node-1";
const PATIENCE: Duration = Duration::from_secs(60);

/// Directories of a node. Its drivers are to be dropped before it.
pub struct Dirs {
    dir: tempfile::TempDir,
}

impl Dirs {
    pub fn new() -> Self {
        // Short: sockets have to fit in.
        let dir = tempfile::Builder::new().prefix("hfcsi").tempdir().unwrap();
        std::fs::create_dir(dir.path().join("r")).unwrap();
        Self { dir }
    }

    pub fn root(&self) -> PathBuf {
        self.dir.path().join("r")
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn options(&self, name: &str) -> CsiOptions {
        CsiOptions::new(name, self.root(), self.dir.path().join(name))
    }

    pub fn driver(&self, name: &str) -> CsiDriver {
        CsiDriver::start(self.options(name)).unwrap()
    }

    /// Where a volume is staged; made, as a caller has to.
    pub fn staging(&self, volume: &str) -> String {
        let path = self
            .root()
            .join(format!("plugins/kubernetes.io/csi/d/{volume}/globalmount"));
        std::fs::create_dir_all(&path).unwrap();
        path.display().to_string()
    }

    /// Where it is published; its parent is made, as a caller has to.
    pub fn target(&self, pod: &str, volume: &str) -> String {
        let path = self.root().join(format!(
            "pods/{pod}/volumes/kubernetes.io~csi/{volume}/mount"
        ));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        path.display().to_string()
    }

    pub fn stage(&self, volume: &str) -> NodeStageVolumeRequest {
        NodeStageVolumeRequest {
            volume_id: volume.to_owned(),
            staging_target_path: self.staging(volume),
            volume_capability: Some(files()),
            ..NodeStageVolumeRequest::default()
        }
    }

    pub fn publish(&self, pod: &str, volume: &str) -> NodePublishVolumeRequest {
        NodePublishVolumeRequest {
            volume_id: volume.to_owned(),
            staging_target_path: self.staging(volume),
            target_path: self.target(pod, volume),
            volume_capability: Some(files()),
            ..NodePublishVolumeRequest::default()
        }
    }
}

pub fn files() -> VolumeCapability {
    VolumeCapability {
        access_type: Some(AccessType::Mount(MountVolume::default())),
        access_mode: Some(AccessMode {
            mode: Mode::SingleNodeWriter as i32,
        }),
    }
}

pub fn device() -> VolumeCapability {
    VolumeCapability {
        access_type: Some(AccessType::Block(Empty {})),
        ..files()
    }
}

pub fn client_of(driver: &CsiDriver) -> CsiClient {
    CsiClient::new(
        driver.name(),
        &driver.options().endpoint,
        Metrics::default(),
    )
}

pub fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    let pairs = pairs.iter();
    pairs
        .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
        .collect()
}

pub fn clock() -> Arc<SystemClock> {
    Arc::new(SystemClock::new(BootId(1)))
}

/// The registry of an agent, and what survives its end.
pub struct Agent {
    pub drivers: Drivers,
    pub store: Store,
    pub node: NodeObject,
    root: PathBuf,
    api: Option<ApiClient>,
    stop: CancellationToken,
    task: Option<tokio::task::JoinHandle<()>>,
}

impl Agent {
    pub fn start(dirs: &Dirs, api: Option<ApiClient>) -> Self {
        let mut agent = Self::idle(dirs, api, Store::in_memory(clock()));
        agent.run();
        agent
    }

    /// One that has not begun to look for drivers.
    pub fn idle(dirs: &Dirs, api: Option<ApiClient>, store: Store) -> Self {
        let node = NodeObject::default();
        let root = dirs.root();
        let drivers = Drivers::new(DriversOptions {
            root_dir: root.clone(),
            node_name: NODE.to_owned(),
            store: store.clone(),
            clock: clock(),
            api: api.clone(),
            node: node.clone(),
            metrics: Metrics::default(),
        });
        Self {
            drivers,
            store,
            node,
            root,
            api,
            stop: CancellationToken::new(),
            task: None,
        }
    }

    pub fn run(&mut self) {
        let run = self.drivers.clone().run(self.stop.clone());
        self.task = Some(tokio::spawn(run));
    }

    pub async fn end(&mut self) {
        self.stop.cancel();
        if let Some(task) = self.task.take() {
            task.await.unwrap();
        }
    }

    /// The next agent over the same store; not running yet.
    pub async fn restarted(mut self, dirs: &Dirs) -> Self {
        self.end().await;
        let mut next = Self::idle(dirs, self.api.clone(), self.store.clone());
        assert_eq!(next.root, self.root);
        next.stop = CancellationToken::new();
        next
    }

    pub async fn has(&self, name: &str) -> CsiClient {
        eventually(&format!("driver {name} registers"), || {
            self.drivers.client(name)
        })
        .await
    }

    pub async fn lost(&self, name: &str) {
        eventually(&format!("driver {name} is deregistered"), || {
            self.drivers.client(name).is_none().then_some(())
        })
        .await;
    }
}

/// Waits until there is an answer.
pub async fn eventually<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let end = tokio::time::Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(tokio::time::Instant::now() < end, "in vain: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// How often the driver was told of its registration so: (taken, error).
pub fn told(driver: &CsiDriver) -> Vec<(bool, String)> {
    let calls = driver.calls_of("NotifyRegistrationStatus");
    calls
        .into_iter()
        .map(|call| (!call.readonly, call.message))
        .collect()
}
