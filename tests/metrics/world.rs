//! A provider over fixed cgroups and a fake runtime.

use std::path::Path;
use std::sync::Arc;

use holdfast::cm::CgroupConfig;
use holdfast::core::state::{PlegRecord, Transaction};
use holdfast::kuberuntime::cri::{CriClient, CriTimeouts, v1};
use holdfast::pod_manager::PodManager;
use holdfast::stats::{Hierarchies, Proc, StatsOptions, StatsProvider};
use holdfast::store::{StartIntent, Store};
use holdfast::types::metrics::Metrics;
use holdfast::types::{BootId, Clock, PodUid, Stamp};
use holdfast_testkit::fake_cri::FakeCri;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

const IMAGE: &str = "holdfast.local/busybox:1";

pub struct TokioClock(pub tokio::time::Instant);

impl Clock for TokioClock {
    fn now(&self) -> Stamp {
        let ms = i64::try_from(self.0.elapsed().as_millis()).unwrap();
        Stamp {
            boot: BootId(1),
            boottime_ms: ms,
            wall_ms: 1_800_000_000_000 + ms,
        }
    }
}

pub struct World {
    pub dir: tempfile::TempDir,
    pub fake: FakeCri,
    pub cri: CriClient,
    pub store: Store,
    pub pods: PodManager,
    pub clock: Arc<dyn Clock>,
    pub metrics: Metrics,
}

impl World {
    pub fn new() -> Self {
        let fake = FakeCri::new();
        fake.add_image(IMAGE);
        let metrics = Metrics::default();
        let timeouts = CriTimeouts::default();
        let clock: Arc<dyn Clock> = Arc::new(TokioClock(tokio::time::Instant::now()));
        Self {
            dir: tempfile::tempdir().unwrap(),
            cri: CriClient::over(fake.channel(), "unix:///fake", timeouts, metrics.clone()),
            fake,
            store: Store::in_memory(Arc::clone(&clock)),
            pods: PodManager::default(),
            clock,
            metrics,
        }
    }

    /// Runs a pod of one container as the agent does, and sees it.
    pub async fn run_pod(&self, number: usize) -> (String, String) {
        let (uid, name) = (format!("uid-{number}"), format!("pod-{number}"));
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": "ns", "uid": uid},
            "spec": {
                "containers": [{"name": "main", "image": IMAGE}],
                "volumes": [{"name": "scratch", "emptyDir": {}}],
            },
        }))
        .unwrap();
        self.pods.update(Arc::new(pod));
        let labels = [
            ("io.kubernetes.pod.name", name.as_str()),
            ("io.kubernetes.pod.namespace", "ns"),
            ("io.kubernetes.pod.uid", &uid),
        ];
        let mut labels: std::collections::HashMap<String, String> = labels
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect();
        let sandbox_config = v1::PodSandboxConfig {
            metadata: Some(v1::PodSandboxMetadata {
                name: name.clone(),
                namespace: "ns".to_owned(),
                uid: uid.clone(),
                attempt: 0,
            }),
            labels: labels.clone(),
            ..Default::default()
        };
        let run = self.cri.run_pod_sandbox(sandbox_config.clone(), "");
        let sandbox = run.await.unwrap();
        labels.insert("io.kubernetes.container.name".to_owned(), "main".to_owned());
        let config = v1::ContainerConfig {
            metadata: Some(v1::ContainerMetadata {
                name: "main".to_owned(),
                attempt: 0,
            }),
            image: Some(v1::ImageSpec {
                image: IMAGE.to_owned(),
                ..Default::default()
            }),
            labels,
            ..Default::default()
        };
        let create = self.cri.create_container(&sandbox, config, sandbox_config);
        let container_id = create.await.unwrap();
        let intent = StartIntent {
            pod: PodUid::new(&uid),
            container: "main".to_owned(),
            container_id: container_id.clone(),
            attempt: 0,
            hash: "h".to_owned(),
            why: "test".to_owned(),
            at: self.clock.now(),
        };
        let commit = self.store.commit_intent(intent, Transaction::new());
        let receipt = commit.await.unwrap();
        self.cri.start_container(&receipt).await.unwrap();
        let of = PodUid::new(&uid);
        let status = self.cri.pod_status(&of, &name, "ns").await.unwrap();
        let record = PlegRecord { status };
        self.store
            .commit(Transaction::new().put(&uid, record))
            .await
            .unwrap();
        (sandbox.to_string(), container_id.to_string())
    }

    pub fn stats(&self, hierarchies: Hierarchies) -> StatsProvider {
        let dir = self.dir.path();
        let root_dir = dir.join("kubelet");
        std::fs::create_dir_all(&root_dir).unwrap();
        let options = StatsOptions {
            node_name: "n1".to_owned(),
            root_dir,
            pod_logs_dir: dir.join("logs"),
            runtime_socket: dir.join("none.sock"),
            cgroups: CgroupConfig::default(),
            proc: proc(&dir.join("proc")),
            hierarchies: Some(hierarchies),
        };
        StatsProvider::new(
            options,
            self.store.clone(),
            self.pods.clone(),
            self.cri.clone(),
            Arc::clone(&self.clock),
        )
    }

    /// Cgroups of version 2 for the node's pods and one of them, with every file that may be there.
    pub fn cgroups(&self, number: usize, sandbox: &str, container: &str) -> Hierarchies {
        let root = self.dir.path().join("cgroup");
        let pod = format!("kubepods/besteffort/poduid-{number}");
        for cgroup in ["kubepods", &pod, &format!("{pod}/{container}")] {
            write_cgroup(&root.join(cgroup));
        }
        let sandbox = root.join(&pod).join(sandbox);
        std::fs::create_dir_all(&sandbox).unwrap();
        std::fs::write(sandbox.join("cgroup.procs"), "777\n").unwrap();
        Hierarchies {
            v2: true,
            mounts: vec![(root, Default::default())],
        }
    }
}

/// A `/proc` that is the same on every machine.
fn proc(root: &Path) -> Proc {
    const NETWORK: &str = "Inter-|\n face |\n    lo: 9 9 0 0 0 0 0 0 9 9 0 0 0 0 0 0\n  eth0: 10 1 0 0 0 0 0 0 20 2 0 0 0 0 0 0\n";
    for (file, text) in [
        (
            "meminfo",
            "MemTotal: 4000000 kB\nMemFree: 1000000 kB\nCached: 800000 kB\nInactive(file): 500000 kB\n\
             AnonPages: 700000 kB\nMapped: 100000 kB\nSwapTotal: 200000 kB\nSwapFree: 150000 kB\n",
        ),
        (
            "stat",
            "cpu  1000 200 300 99999 50 10 20 5 7 0\nbtime 1690000000\n",
        ),
        ("vmstat", "pgfault 5000\npgmajfault 60\noom_kill 2\n"),
        ("loadavg", "0.10 0.20 0.30 2/345 6789\n"),
        ("sys/kernel/pid_max", "32768\n"),
        ("diskstats", " 254 0 vda 1 0 1 1 1 1 1 1 0 1 1\n"),
        ("1/fd/0", ""),
        ("1/net/dev", NETWORK),
        ("777/net/dev", NETWORK),
    ] {
        let path = root.join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    Proc(root.to_path_buf())
}

fn write_cgroup(dir: &Path) {
    const PRESSURE: &str = "some avg10=0.00 avg60=0.00 avg300=0.00 total=10\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=5\n";
    std::fs::create_dir_all(dir).unwrap();
    for (file, text) in [
        (
            "cpu.stat",
            "usage_usec 1000\nuser_usec 600\nsystem_usec 400\nnr_periods 10\nnr_throttled 4\nthrottled_usec 2500\n",
        ),
        ("cpu.max", "50000 100000\n"),
        ("cpu.weight", "39\n"),
        ("memory.current", "1000000\n"),
        ("memory.max", "20000000\n"),
        ("memory.peak", "15000000\n"),
        ("memory.swap.current", "4096\n"),
        ("memory.swap.max", "8192\n"),
        ("memory.events", "max 7\noom_kill 1\n"),
        (
            "memory.stat",
            "anon 6000\nfile 3000\nkernel 50\nfile_mapped 10\ninactive_file 20\npgfault 900\npgmajfault 9\n",
        ),
        ("cpu.pressure", PRESSURE),
        ("memory.pressure", PRESSURE),
        ("io.pressure", PRESSURE),
        ("pids.current", "3\n"),
        ("pids.max", "100\n"),
        (
            "io.stat",
            "254:0 rbytes=4096 wbytes=8192 rios=1 wios=2 dbytes=0 dios=0\n",
        ),
        ("cgroup.procs", "1\n"),
    ] {
        std::fs::write(dir.join(file), text).unwrap();
    }
}
