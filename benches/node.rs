//! What devices and the protection of the node cost: a pod with devices that is let in, thousands of devices that are listed, the
//! decisions of a round of evictions with a full node, and a look at thousands of images.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "benchmarks"
)]

mod support;

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use holdfast::core::image_gc::Policy;
use holdfast::core::pressure::{
    Candidate, ContainerUse, Disks, Figure, Observations, PodUse, Rules, Signal, Signals, Space,
    assess, changes, standing, victim,
};
use holdfast::devicemanager::{DeviceManager, DeviceManagerOptions, Readiness};
use holdfast::images::{Collection, ImageConfig, ImageManager};
use holdfast::kubeletconfig::{DeviceReadiness, KubeletConfiguration};
use holdfast::kuberuntime::cri::{CriClient, CriTimeouts};
use holdfast::store::backend::SledOptions;
use holdfast::store::open::{self, OpenOptions};
use holdfast::store::recover::Identity;
use holdfast::store::{Store, StoreOptions};
use holdfast::types::events::MemoryRecorder;
use holdfast::types::metrics::Metrics;
use holdfast::types::{BootId, BootIdentity, Clock, PodExt, Stamp};
use holdfast_testkit::device_plugin::DevicePlugin;
use holdfast_testkit::fake_cri::FakeCri;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use support::{figure, spread, wanted};
use tokio::time::Instant;

const GPU: &str = "example.com/gpu";
/// Devices of a pod.
const DEVICES: usize = 8;
/// Plugins, and devices of each.
const PLUGINS: usize = 4;
const LISTED: usize = 1000;
const PODS: usize = 110;
const IMAGES: usize = 2000;
const SAMPLES: usize = 30;
const ADMISSION_MS: f64 = 5.0;
const LIST_MS: f64 = 10.0;
/// Of a core, in percent.
const EVICTION_PERCENT: f64 = 0.2;
const IMAGES_MS: f64 = 20.0;
const ROUND: Duration = Duration::from_secs(10);

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

/// A store on the disk, as the agent has it.
fn store(directory: &Path) -> Store {
    let opened = open::open(&OpenOptions {
        dir: directory.to_owned(),
        identity: Identity {
            node_name: "bench".to_owned(),
            machine_id: String::new(),
            boot: BootIdentity::read(Some("bench"), None),
        },
        node_was_used: false,
        sled: SledOptions::default(),
        now: Fixed.now(),
    })
    .unwrap();
    Store::start(
        opened.backend,
        opened.loaded,
        StoreOptions::default(),
        Arc::new(Fixed),
        Metrics::default(),
    )
    .unwrap()
}

fn manager(store: Store) -> DeviceManager {
    DeviceManager::new(DeviceManagerOptions {
        store,
        clock: Arc::new(Fixed),
        metrics: Metrics::default(),
        readiness: DeviceReadiness::Fail,
    })
}

/// Registers a plugin with so many devices, and waits until they are listed.
async fn plugin(devices: &DeviceManager, at: &Path, resource: &str, count: usize) -> DevicePlugin {
    let ids: Vec<String> = (0..count).map(|n| format!("device-{n:04}")).collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let plugin = DevicePlugin::start(at, &ids).unwrap();
    let mut amounts = devices.amounts();
    let versions = ["v1beta1".to_owned()];
    devices.register(resource, at, &versions).await.unwrap();
    let known = amounts.wait_for(|known| known.get(resource).is_some_and(|a| a.capacity == count));
    drop(
        tokio::time::timeout(Duration::from_secs(30), known)
            .await
            .unwrap(),
    );
    plugin
}

/// A pod with devices, from the question whether it may start to the answer, with two records that are synced. The plugin answers
/// at once; its time and that of the connection count.
async fn admission(root: &Path) {
    let devices = manager(store(&root.join("store")));
    let total = DEVICES * SAMPLES;
    let _plugin = plugin(&devices, &root.join("gpu.sock"), GPU, total).await;
    let mut samples = Vec::new();
    for n in 0..SAMPLES {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "n", "uid": format!("u{n}")},
            "spec": {"containers": [
                {"name": "main", "resources": {"limits": {GPU: DEVICES.to_string()}}},
            ]},
        }))
        .unwrap();
        let begun = Instant::now();
        let ready = devices.ready(&pod, true, &["main"], &|_| Ok(None)).await;
        samples.push(begun.elapsed());
        assert_eq!(ready.unwrap(), Readiness::Ready);
    }
    let (least, middle, most) = spread(&mut samples);
    println!("admission of a pod with {DEVICES} devices: {least:.2} … {most:.2} ms");
    figure(
        "admission of a pod with devices",
        middle,
        ADMISSION_MS,
        "ms",
    );
}

/// All healthy devices of all plugins, as `GetAllocatableResources` answers them.
async fn lists(root: &Path) {
    let devices = manager(Store::in_memory(Arc::new(Fixed)));
    let mut plugins = Vec::new();
    for n in 0..PLUGINS {
        let (socket, resource) = (root.join(format!("{n}.sock")), format!("example.com/d{n}"));
        plugins.push(plugin(&devices, &socket, &resource, LISTED).await);
    }
    let mut samples = Vec::new();
    for _ in 0..SAMPLES {
        let begun = Instant::now();
        let healthy = devices.healthy();
        samples.push(begun.elapsed());
        let count: usize = healthy.values().map(BTreeMap::len).sum();
        assert_eq!(count, PLUGINS * LISTED);
    }
    let (_, middle, _) = spread(&mut samples);
    figure("listing the devices of four plugins", middle, LIST_MS, "ms");
}

/// The decisions of a round with a full node that is short of memory: what is met, the order of all pods, and what is recorded.
fn evictions() {
    let rules = Rules::of(&KubeletConfiguration::default());
    let mebibyte = 1 << 20;
    let pods: Vec<(Pod, PodUse)> = (0..PODS)
        .map(|n| {
            let mut pod = support::manifest(&format!("p{n}"));
            pod["metadata"]["uid"] = format!("u{n}").into();
            let pod = serde_json::from_value(pod).unwrap();
            let of = ContainerUse {
                memory: Some(mebibyte),
                rootfs: Some(Space::default()),
                logs: Some(Space::default()),
            };
            let names = ["web", "worker", "proxy"].map(str::to_owned);
            let used = PodUse {
                memory: Some(u64::try_from(n).unwrap() * mebibyte),
                processes: Some(10),
                containers: names.map(|name| (name, of)).into(),
                volumes: Space::default(),
            };
            (pod, used)
        })
        .collect();
    let low = Figure {
        available: 50 * mebibyte,
        capacity: 8192 * mebibyte,
    };
    let observed = Observations {
        figures: Signal::ALL.map(|signal| (signal, low)).into(),
        disks: Disks::One,
    };
    let state = Store::in_memory(Arc::new(Fixed)).snapshot();
    let mut samples = Vec::new();
    for _ in 0..SAMPLES {
        let begun = Instant::now();
        let assessment = assess(&rules, &Signals::new(), &observed, Fixed.now());
        let candidates = || pods.iter().map(|(pod, usage)| Candidate { pod, usage });
        let chosen = victim(Signal::Memory, Disks::One, candidates()).unwrap();
        let why = standing(Signal::Memory, Disks::One, &chosen, candidates());
        let recorded = changes(&rules, &state, &assessment.signals, Fixed.now());
        samples.push(begun.elapsed());
        assert!(why.is_some() && !recorded.is_empty() && !chosen.pod.name().is_empty());
    }
    let (_, middle, _) = spread(&mut samples);
    let of_core = middle / 1000.0 / ROUND.as_secs_f64() * 100.0;
    println!("a round of decisions with {PODS} pods: {middle:.2} ms");
    figure(
        "decisions about evictions",
        of_core,
        EVICTION_PERCENT,
        "% of a core",
    );
}

/// A look at all images of a node, all of which are needed, with the runtime's list.
async fn images(root: &Path) {
    let fake = FakeCri::new();
    let names: HashSet<String> = (0..IMAGES)
        .map(|n| format!("registry.example/team/app-{n}:1"))
        .collect();
    for name in &names {
        fake.add_image(name);
    }
    let socket = root.join("cri.sock");
    fake.serve(&socket).unwrap();
    let endpoint = format!("unix://{}", socket.display());
    let timeouts = CriTimeouts::default();
    let cri = CriClient::new(&endpoint, None, timeouts, Metrics::default()).unwrap();
    let images = ImageManager::new(ImageConfig::default(), Arc::new(Fixed), Metrics::default());
    let collection = Collection {
        policy: Policy {
            minimum_age: Duration::from_secs(120),
            maximum_age: Duration::from_secs(3600),
            high: 85,
            low: 80,
        },
        wanted: Arc::new(move || names.clone()),
        knows_pods: Arc::new(|| true),
        recorder: Arc::new(MemoryRecorder::default()),
        store: Store::in_memory(Arc::new(Fixed)),
    };
    let (mut samples, mut lists) = (Vec::new(), Vec::new());
    for n in 0..=SAMPLES {
        let begun = Instant::now();
        let removed = images.remove_all_unused(&collection, &cri).await.unwrap();
        let took = begun.elapsed();
        assert_eq!(removed, 0);
        let begun = Instant::now();
        assert_eq!(cri.list_images(None).await.unwrap().len(), IMAGES);
        // The first one makes the records.
        if n > 0 {
            samples.push(took);
            lists.push(begun.elapsed());
        }
    }
    let ((_, middle, _), (_, list, _)) = (spread(&mut samples), spread(&mut lists));
    println!(
        "a look at {IMAGES} images: {middle:.2} ms, {list:.2} ms of which are the runtime's list"
    );
    figure("judging images", (middle - list).max(0.0), IMAGES_MS, "ms");
    fake.stop();
}

fn main() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| {
        let path = root.path().join(name);
        std::fs::create_dir(&path).unwrap();
        path
    };
    if wanted("node/admission") {
        runtime.block_on(admission(&at("admission")));
    }
    if wanted("node/devices") {
        runtime.block_on(lists(&at("devices")));
    }
    if wanted("node/evictions") {
        evictions();
    }
    if wanted("node/images") {
        runtime.block_on(images(&at("images")));
    }
}
