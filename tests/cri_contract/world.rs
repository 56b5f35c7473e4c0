//! A runtime, a client, a store for receipts, and shorthand for what the contract does often.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use holdfast::core::state::Transaction;
use holdfast::kuberuntime::cri::{CriClient, CriTimeouts, v1};
use holdfast::kuberuntime::labels;
use holdfast::store::{
    Committed, RemoveContainer, RemoveEmptySandbox, StartIntent, StopDecision, StopPermit, Store,
};
use holdfast::types::metrics::Metrics;
use holdfast::types::{BootId, Clock, ContainerId, PodUid, SystemClock};
use holdfast_testkit::containerd::{BUSYBOX, PrivateContainerd, Version};
use holdfast_testkit::fake_cri::{FakeCri, Pull};
use tonic::Code;

/// Nobody answers there, at once.
pub(crate) const UNREACHABLE: &str = "127.0.0.1:1/holdfast/none:1";

pub(crate) struct World {
    pub(crate) cri: CriClient,
    pub(crate) store: Store,
    pub(crate) clock: SystemClock,
    pub(crate) dir: tempfile::TempDir,
    pub(crate) offers_events: bool,
    /// Which containerd, if it is one.
    pub(crate) version: Option<Version>,
    pub(crate) fake: Option<FakeCri>,
    pub(crate) containerd: Option<PrivateContainerd>,
    serial: AtomicU32,
}

impl World {
    pub(crate) fn fake() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let fake = FakeCri::new();
        fake.add_image(BUSYBOX);
        let refused = "dial tcp 127.0.0.1:1: connect: connection refused".to_owned();
        fake.pull(UNREACHABLE, Pull::Fails(Code::Unknown, refused));
        let socket = dir.path().join("cri.sock");
        fake.serve(&socket).unwrap();
        let endpoint = format!("unix://{}", socket.display());
        let mut world = Self::on(&endpoint, dir);
        world.fake = Some(fake);
        world
    }

    pub(crate) fn containerd(version: Version) -> Self {
        let containerd = PrivateContainerd::start(version).unwrap_or_else(|error| {
            panic!("this test needs root and a containerd (hack/deps.sh installs it): {error}")
        });
        let mut world = Self::on(&containerd.endpoint(), tempfile::tempdir().unwrap());
        let version = version.resolved().unwrap();
        world.offers_events = version != Version::Installed;
        world.version = Some(version);
        world.containerd = Some(containerd);
        world
    }

    fn on(endpoint: &str, dir: tempfile::TempDir) -> Self {
        let clock = SystemClock::new(BootId(1));
        let timeouts = CriTimeouts::from_request(Duration::from_secs(60));
        Self {
            cri: CriClient::new(endpoint, None, timeouts, Metrics::default()).unwrap(),
            store: Store::in_memory(Arc::new(clock)),
            clock,
            dir,
            offers_events: true,
            version: None,
            fake: None,
            containerd: None,
            serial: AtomicU32::new(0),
        }
    }

    /// A pod nobody else has, with its log directory.
    pub(crate) fn pod(&self) -> TestPod {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let uid = PodUid::from(format!("uid-{serial}"));
        let logs = self.dir.path().join(format!("logs-{serial}"));
        std::fs::create_dir(&logs).unwrap();
        TestPod {
            uid,
            name: format!("pod-{serial}"),
            logs,
        }
    }

    /// A pod with a running sandbox.
    pub(crate) async fn sandbox(&self) -> (TestPod, v1::PodSandboxConfig, ContainerId) {
        let pod = self.pod();
        let config = pod.sandbox(0, v1::NamespaceMode::Pod);
        let id = self.cri.run_pod_sandbox(config.clone(), "").await.unwrap();
        (pod, config, id)
    }

    /// A started container that runs a shell script.
    pub(crate) async fn run(&self, script: &str) -> (TestPod, ContainerId, ContainerId) {
        let (pod, sandbox_config, sandbox) = self.sandbox().await;
        let config = pod.container("main", 0, &["sh", "-c", script]);
        let id = self
            .cri
            .create_container(&sandbox, config, sandbox_config)
            .await
            .unwrap();
        let intent = self.start_intent(&pod.uid, &id).await;
        self.cri.start_container(&intent).await.unwrap();
        (pod, sandbox, id)
    }

    pub(crate) async fn start_intent(
        &self,
        pod: &PodUid,
        id: &ContainerId,
    ) -> Committed<StartIntent> {
        start_intent(&self.store, &self.clock, pod, id).await
    }

    /// The receipt for the removal of a container that the runtime shows.
    pub(crate) async fn removal(&self, id: &ContainerId) -> Committed<RemoveContainer> {
        let pods = self.cri.list_pods().await.unwrap();
        let mut found = pods
            .values()
            .filter_map(|pod| RemoveContainer::new(pod, id, self.clock.now()));
        let intent = found.next().expect("a container that does not run");
        let commit = self.store.commit_intent(intent, Transaction::new());
        commit.await.unwrap()
    }

    /// The receipt for the removal of a sandbox that the runtime shows.
    pub(crate) async fn sandbox_removal(&self, id: &ContainerId) -> Committed<RemoveEmptySandbox> {
        let pods = self.cri.list_pods().await.unwrap();
        let mut found = pods
            .values()
            .filter_map(|pod| RemoveEmptySandbox::new(pod, id));
        let intent = found.next().expect("a sandbox without containers");
        let commit = self.store.commit_intent(intent, Transaction::new());
        commit.await.unwrap()
    }

    pub(crate) async fn permit(&self) -> StopPermit {
        let decision = StopDecision::unrecorded_leftovers();
        self.store.commit_stop(decision).await.unwrap()
    }

    /// Waits until the container has exited; its status then.
    pub(crate) async fn exited(&self, id: &ContainerId) -> v1::ContainerStatus {
        let give_up = tokio::time::Instant::now() + Duration::from_secs(20);
        loop {
            let status = self.cri.container_status(id).await.unwrap();
            if status.state() == v1::ContainerState::ContainerExited {
                return status;
            }
            assert!(
                tokio::time::Instant::now() < give_up,
                "container did not exit: {status:?}"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

pub(crate) async fn start_intent(
    store: &Store,
    clock: &impl Clock,
    pod: &PodUid,
    id: &ContainerId,
) -> Committed<StartIntent> {
    let intent = StartIntent {
        pod: pod.clone(),
        container: "main".to_owned(),
        container_id: id.clone(),
        attempt: 0,
        hash: "hash".to_owned(),
        why: "a test wants it".to_owned(),
        at: clock.now(),
    };
    store
        .commit_intent(intent, Transaction::new())
        .await
        .unwrap()
}

pub(crate) struct TestPod {
    pub(crate) uid: PodUid,
    pub(crate) name: String,
    pub(crate) logs: PathBuf,
}

impl TestPod {
    fn labels(&self) -> HashMap<String, String> {
        HashMap::from([
            (labels::POD_UID.to_owned(), self.uid.to_string()),
            (labels::POD_NAME.to_owned(), self.name.clone()),
            (labels::POD_NAMESPACE.to_owned(), "default".to_owned()),
        ])
    }

    pub(crate) fn sandbox(&self, attempt: u32, network: v1::NamespaceMode) -> v1::PodSandboxConfig {
        let namespaces = v1::NamespaceOption {
            network: network as i32,
            pid: v1::NamespaceMode::Container as i32,
            ..Default::default()
        };
        v1::PodSandboxConfig {
            metadata: Some(v1::PodSandboxMetadata {
                name: self.name.clone(),
                uid: self.uid.to_string(),
                namespace: "default".to_owned(),
                attempt,
            }),
            log_directory: self.logs.display().to_string(),
            labels: self.labels(),
            annotations: HashMap::from([("note".to_owned(), "kept".to_owned())]),
            linux: Some(v1::LinuxPodSandboxConfig {
                security_context: Some(v1::LinuxSandboxSecurityContext {
                    namespace_options: Some(namespaces),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    pub(crate) fn container(
        &self,
        name: &str,
        attempt: u32,
        command: &[&str],
    ) -> v1::ContainerConfig {
        let mut labels = self.labels();
        labels.insert(labels::CONTAINER_NAME.to_owned(), name.to_owned());
        let annotations = HashMap::from([
            (labels::CONTAINER_HASH.to_owned(), "hash".to_owned()),
            (
                labels::CONTAINER_RESTART_COUNT.to_owned(),
                attempt.to_string(),
            ),
            (
                labels::CONTAINER_TERMINATION_MESSAGE_POLICY.to_owned(),
                "FallbackToLogsOnError".to_owned(),
            ),
        ]);
        v1::ContainerConfig {
            metadata: Some(v1::ContainerMetadata {
                name: name.to_owned(),
                attempt,
            }),
            image: Some(v1::ImageSpec {
                image: BUSYBOX.to_owned(),
                ..Default::default()
            }),
            command: command.iter().map(|&c| c.to_owned()).collect(),
            labels,
            annotations,
            log_path: format!("{name}-{attempt}.log"),
            linux: Some(v1::LinuxContainerConfig::default()),
            ..Default::default()
        }
    }
}
