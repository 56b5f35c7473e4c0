//! How long a start takes to compare the volumes on record with the mount table and the disk, how long each pod
//! takes to find that its volumes are there, and whether many pods that wait for storage at once take longer than their
//! number says.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "benchmarks"
)]

mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, join_all};
use holdfast::core::volumes::{NFS, Remote, Source, Terms, VolumeMode};
use holdfast::kuberuntime::sources::{Resolved, Sources};
use holdfast::store::Store;
use holdfast::types::events::MemoryRecorder;
use holdfast::types::{BootId, Clock, Stamp};
use holdfast::volumemanager::VolumeManager;
use holdfast::volumemanager::remote::{GroupBy, RemoteError, RemotePlugin, Target};
use k8s_openapi::api::core::v1::{NFSVolumeSource, Pod};
use nix::mount::MntFlags;
use serde_json::json;
use support::{figure, spread, wanted};
use tokio::time::Instant;

const PODS: usize = 50;
const VOLUMES: usize = 4;
const SAMPLES: usize = 30;
const LIMIT_MS: f64 = 20.0;
/// Few pods and many that wait at once, and how much more time the many may take, as a multiple of their number.
const FEW: usize = 10;
const MANY: usize = 100;
const LIMIT_RATIO: f64 = 1.5;

struct Fixed;

impl Clock for Fixed {
    fn now(&self) -> Stamp {
        Stamp {
            boot: BootId(1),
            boottime_ms: 1,
            wall_ms: 1,
        }
    }
}

fn pod(n: usize) -> Pod {
    let names = ["disk", "more", "memory", "host"];
    let mounts: Vec<_> = (names.iter())
        .map(|name| json!({"name": name, "mountPath": format!("/{name}")}))
        .collect();
    // Only root mounts a tmpfs.
    let medium = if nix::unistd::geteuid().is_root() {
        "Memory"
    } else {
        ""
    };
    serde_json::from_value(json!({
        "metadata": {"name": format!("p{n}"), "namespace": "ns", "uid": format!("uid-{n}")},
        "spec": {
            "volumes": [
                {"name": "disk", "emptyDir": {}},
                {"name": "more", "emptyDir": {}},
                {"name": "memory", "emptyDir": {"medium": medium, "sizeLimit": "64Ki"}},
                {"name": "host", "hostPath": {"path": "/"}},
            ],
            "containers": [{"name": "c", "volumeMounts": mounts}],
        },
    }))
    .unwrap()
}

/// Unmounts what is left, also after a panic.
struct Place(tempfile::TempDir);

impl Place {
    fn mounts(&self) -> Vec<PathBuf> {
        let dir = self.0.path().canonicalize().unwrap();
        let table =
            String::from_utf8_lossy(&std::fs::read("/proc/self/mountinfo").unwrap()).into_owned();
        let points = table.lines().filter_map(|l| l.split(' ').nth(4));
        let points = points.map(PathBuf::from);
        points.filter(|point| point.starts_with(&dir)).collect()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for point in self.mounts() {
            nix::mount::umount2(&point, MntFlags::MNT_DETACH).ok();
        }
    }
}

fn manager(root: &Path, store: &Store) -> VolumeManager {
    VolumeManager::new(root, None, store.clone(), Arc::new(Fixed))
}

fn main() {
    if !wanted("volumes") {
        return;
    }
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(measure());
    runtime.block_on(measure_waiting());
}

/// Storage that is there at once, and in no mount table.
struct Instantly;

impl RemotePlugin for Instantly {
    fn stage(&self, _: Arc<Resolved>, _: PathBuf) -> BoxFuture<'static, Result<(), RemoteError>> {
        Box::pin(async { Ok(()) })
    }

    fn publish(
        &self,
        _: Arc<Resolved>,
        _: Target,
    ) -> BoxFuture<'static, Result<GroupBy, RemoteError>> {
        Box::pin(async { Ok(GroupBy::Nobody) })
    }

    fn unpublish(&self, _: Arc<Remote>, _: PathBuf) -> BoxFuture<'static, Result<(), RemoteError>> {
        Box::pin(async { Ok(()) })
    }

    fn unstage(&self, _: Arc<Remote>, _: PathBuf) -> BoxFuture<'static, Result<(), RemoteError>> {
        Box::pin(async { Ok(()) })
    }
}

/// A pod with volumes whose storage is elsewhere.
fn remote_pod(n: usize) -> (Pod, Sources) {
    let names: Vec<String> = (0..VOLUMES).map(|v| format!("v{v}")).collect();
    let volumes: Vec<_> = (names.iter())
        .map(|name| json!({"name": name, "nfs": {"server": "s", "path": "/"}}))
        .collect();
    let mounts: Vec<_> = (names.iter())
        .map(|name| json!({"name": name, "mountPath": format!("/{name}")}))
        .collect();
    let pod = json!({
        "metadata": {"name": format!("p{n}"), "namespace": "ns", "uid": format!("uid-{n}")},
        "spec": {"volumes": volumes, "containers": [{"name": "c", "volumeMounts": mounts}]},
    });
    let mut sources = Sources::default();
    for name in names {
        let source = NFSVolumeSource {
            server: "s".to_owned(),
            path: "/".to_owned(),
            read_only: None,
        };
        let resolved = Resolved {
            remote: Remote {
                name: name.clone(),
                claim: None,
                mode: VolumeMode::Filesystem,
                read_only: false,
                mount_options: Vec::new(),
                unique_name: None,
                terms: Terms::default(),
                source: Source::Nfs(source),
            },
            secrets: BTreeMap::new(),
            tokens: BTreeMap::new(),
            capacity: None,
            missing: None,
        };
        sources.remotes.insert(name, Ok(Arc::new(resolved)));
    }
    (serde_json::from_value(pod).unwrap(), sources)
}

async fn measure_waiting() {
    let mut middles = Vec::new();
    for count in [FEW, MANY] {
        let pods: Vec<_> = (0..count).map(remote_pod).collect();
        let mut samples = Vec::new();
        for _ in 0..SAMPLES {
            let dir = tempfile::tempdir().unwrap();
            let store = Store::in_memory(Arc::new(Fixed));
            let manager = manager(&dir.path().join("root"), &store);
            let manager = manager.with_plugin(NFS, Arc::new(Instantly));
            let recorder = MemoryRecorder::default();
            let begun = Instant::now();
            let mounting = pods.iter();
            let mounting = mounting.map(|(pod, sources)| manager.mount(pod, sources, &recorder));
            assert!(join_all(mounting).await.iter().all(Result::is_ok));
            samples.push(begun.elapsed());
        }
        let (_, middle, _) = spread(&mut samples);
        println!(
            "volumes: {count} pods wait for {VOLUMES} each at once: {middle:.2} ms, p50 of {SAMPLES}"
        );
        middles.push(middle);
    }
    let ratio = middles[1] / middles[0] / (MANY / FEW) as f64;
    figure(
        "time of ten times as many pods that wait at once, over ten times the time",
        ratio,
        LIMIT_RATIO,
        "",
    );
}

async fn measure() {
    let place = Place(tempfile::tempdir().unwrap());
    let root = place.0.path().join("root");
    let store = Store::in_memory(Arc::new(Fixed));
    let pods: Vec<Pod> = (0..PODS).map(pod).collect();
    let (sources, recorder) = (Sources::default(), MemoryRecorder::default());
    let first = manager(&root, &store);
    for pod in &pods {
        first.mount(pod, &sources, &recorder).await.unwrap();
    }
    println!(
        "volumes: {} of {PODS} pods, {} of them a tmpfs",
        PODS * VOLUMES,
        place.mounts().len()
    );
    let all = (PODS * VOLUMES) as f64;
    let (mut reconciled, mut found) = (Vec::new(), Vec::new());
    for _ in 0..SAMPLES {
        let manager = manager(&root, &store);
        let begun = Instant::now();
        let what = manager.reconcile().await.unwrap();
        reconciled.push(begun.elapsed());
        assert_eq!(
            (what.mounted, what.missing, what.adopted),
            (PODS * VOLUMES, 0, 0)
        );
        let begun = Instant::now();
        for pod in &pods {
            manager.mount(pod, &sources, &recorder).await.unwrap();
        }
        found.push(begun.elapsed());
    }
    let per_hundred = |samples: &mut [Duration]| {
        let (least, middle, most) = spread(samples);
        [least, middle, most].map(|ms| ms * 100.0 / all)
    };
    for (what, mut samples) in [
        ("to reconcile 100 volumes at start", reconciled),
        ("to find 100 volumes mounted, pod by pod", found),
    ] {
        let [least, middle, most] = per_hundred(&mut samples);
        figure(what, middle, LIMIT_MS, "ms");
        println!("  p50 of {SAMPLES}; least {least:.2} ms, most {most:.2} ms");
    }
    for pod in &pods {
        use holdfast::types::PodExt;
        first.unmount(&pod.uid()).await.unwrap();
    }
    assert_eq!(place.mounts(), Vec::<PathBuf>::new());
}
