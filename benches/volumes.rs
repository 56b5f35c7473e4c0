//! How long a start takes to compare the volumes on record with the mount table and the disk, and how long each pod
//! takes to find that its volumes are there.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "benchmarks"
)]

mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use holdfast::kuberuntime::sources::Sources;
use holdfast::store::Store;
use holdfast::types::events::MemoryRecorder;
use holdfast::types::{BootId, Clock, Stamp};
use holdfast::volumemanager::VolumeManager;
use k8s_openapi::api::core::v1::Pod;
use nix::mount::MntFlags;
use serde_json::json;
use support::{figure, spread, wanted};
use tokio::time::Instant;

const PODS: usize = 50;
const VOLUMES: usize = 4;
const SAMPLES: usize = 30;
const LIMIT_MS: f64 = 20.0;

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
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
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
