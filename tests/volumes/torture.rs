//! A CSI driver and an agent that are killed at every step of mounting and unmounting, a hundred volumes long.

use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use holdfast_testkit::csi::{CsiDriver, CsiOptions, Fault};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::CSIDriver as DriverObject;
use kube::api::{Api, PostParams};
use serde_json::{Value, json};

use crate::agent_process::{PATIENCE, eventually, within};
use crate::controllers::Controllers;
use crate::features::{left, mounts_below};
use crate::setup::{Cluster, FOREVER, script};

const ROUNDS: usize = 10;
const VOLUMES: usize = 10;

/// Where the agent dies while pods start, and while they end.
const UP: [&str; 4] = [
    "volumemanager::stage::recorded",
    "volumemanager::stage::done",
    "volumemanager::publish::recorded",
    "volumemanager::publish::done",
];
const DOWN: [&str; 4] = [
    "volumemanager::unpublish::recorded",
    "volumemanager::unpublish::done",
    "volumemanager::unstage::recorded",
    "volumemanager::unstage::done",
];
const KILLS: [Fault; 3] = [Fault::KillBefore, Fault::KillBetween, Fault::KillAfter];

/// A driver that is started again whenever it has died.
pub struct Supervised {
    driver: Arc<Mutex<CsiDriver>>,
    stop: Arc<AtomicBool>,
    deaths: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

impl Supervised {
    pub fn new(driver: CsiDriver) -> Self {
        let driver = Arc::new(Mutex::new(driver));
        let stop = Arc::new(AtomicBool::new(false));
        let deaths = Arc::new(AtomicUsize::new(0));
        let thread = std::thread::spawn({
            let (driver, stop) = (Arc::clone(&driver), Arc::clone(&stop));
            let deaths = Arc::clone(&deaths);
            move || {
                while !stop.load(Ordering::Relaxed) {
                    let mut driver = driver.lock().unwrap_or_else(PoisonError::into_inner);
                    if !driver.is_running() {
                        deaths.fetch_add(1, Ordering::Relaxed);
                        driver.restart().expect("start the driver again");
                    }
                    drop(driver);
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        });
        Self {
            driver,
            stop,
            deaths,
            thread: Some(thread),
        }
    }

    pub fn driver(&self) -> MutexGuard<'_, CsiDriver> {
        self.driver.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn deaths(&self) -> usize {
        self.deaths.load(Ordering::Relaxed)
    }
}

impl Drop for Supervised {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if self
            .thread
            .take()
            .map(JoinHandle::join)
            .is_some_and(|j| j.is_err())
        {
            eprintln!("the driver could not be started again, see above");
        }
    }
}

/// Starts a driver for the node, and tells the cluster of it.
pub fn driver(cluster: &Cluster, name: &str, spec: Value) -> CsiDriver {
    let object = json!({"metadata": {"name": name}, "spec": spec});
    let object: DriverObject = serde_json::from_value(object).expect("a driver");
    let drivers: Api<DriverObject> = Api::all(cluster.client());
    cluster
        .run(drivers.create(&PostParams::default(), &object))
        .expect("create a CSIDriver");
    let state = cluster.dir().join(format!("csi-{name}"));
    CsiDriver::start(CsiOptions::new(name, cluster.root_dir(), state)).expect("start a driver")
}

/// A claim and the volume that it is to be bound to, of a driver. Returns its handle.
pub fn csi_claim(cluster: &Cluster, name: &str, driver: &str) -> String {
    let handle = format!("{}-{name}", cluster.namespace);
    claim(
        cluster,
        name,
        json!({"csi": {"driver": driver, "volumeHandle": handle}}),
    );
    handle
}

/// A claim and the volume that it is to be bound to, which is where `source` says.
pub fn claim(cluster: &Cluster, name: &str, source: Value) {
    let volume = format!("{}-{name}", cluster.namespace);
    let mut object = json!({
        "metadata": {"name": volume},
        "spec": {
            "capacity": {"storage": "1Mi"}, "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
        },
    });
    for (field, value) in source.as_object().expect("fields of a volume") {
        object["spec"][field] = value.clone();
    }
    let object: PersistentVolume = serde_json::from_value(object).expect("a volume");
    let volumes: Api<PersistentVolume> = Api::all(cluster.client());
    cluster
        .run(volumes.create(&PostParams::default(), &object))
        .expect("create a volume");
    cluster.create::<PersistentVolumeClaim>(json!({
        "metadata": {"name": name},
        "spec": {
            "storageClassName": "", "volumeName": volume, "accessModes": ["ReadWriteOnce"],
            "volumeMode": source["volumeMode"],
            "resources": {"requests": {"storage": "1Mi"}},
        },
    }));
}

fn create_pod(cluster: &Cluster, name: &str, claim: &str) -> String {
    let mut spec = script("Always", FOREVER);
    spec["hostNetwork"] = json!(true);
    spec["terminationGracePeriodSeconds"] = json!(0);
    spec["automountServiceAccountToken"] = json!(false);
    spec["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    spec["volumes"] = json!([{"name": "v", "persistentVolumeClaim": {"claimName": claim}}]);
    cluster.create_pod(name, spec)
}

/// An agent that dies at the `nth` time it comes to a point.
#[track_caller]
fn die_at(cluster: &Cluster, point: &str, nth: usize) {
    let point = format!("{point}:{nth}");
    let mut agent = cluster.spawn_agent_with(&[], &[("HOLDFAST_DIE_AT", &point)]);
    let status = agent.wait_exit(PATIENCE);
    assert_eq!(status.signal(), Some(9), "{point}: {}", agent.log());
}

/// Paths of the CSI volumes and devices on record, and whether all of them are mounted.
fn on_record(cluster: &Cluster) -> Result<(BTreeSet<PathBuf>, bool), String> {
    let dump = cluster.try_dump(&["volumes"])?;
    let rows = dump["tables"]["volumes"].as_array().ok_or("no table")?;
    let csi = rows
        .iter()
        .filter(|row| row["plugin"] == "kubernetes.io/csi");
    let paths = csi.clone().filter_map(|row| row["path"].as_str());
    let mounted = csi.clone().all(|row| row["phase"] == "Mounted");
    Ok((paths.map(PathBuf::from).collect(), mounted))
}

/// What the driver remembers, what is mounted and what is on record are the same.
fn agree(cluster: &Cluster, driver: &CsiDriver, pods: usize) -> Result<(), String> {
    let truth = driver.truth().map_err(|e| e.to_string())?;
    let mut known: BTreeSet<PathBuf> = truth.published.keys().cloned().collect();
    if known.len() != pods || truth.staged.len() != pods {
        return Err(format!("{truth:?}"));
    }
    known.extend(truth.staged.values().map(|staged| staged.path.clone()));
    let mounted: Vec<PathBuf> = truth.mounted.clone();
    let distinct: BTreeSet<PathBuf> = mounted.iter().cloned().collect();
    if distinct.len() != mounted.len() {
        return Err(format!("mounted twice: {mounted:?}"));
    }
    let (records, settled) = on_record(cluster)?;
    if !settled || distinct != known || records != known {
        return Err(format!(
            "driver {known:?}\nmounted {distinct:?}\nrecords {records:?} ({settled})"
        ));
    }
    Ok(())
}

#[test]
fn a_hundred_csi_volumes_come_and_go_while_agent_and_driver_are_killed_at_every_step() {
    let cluster = Cluster::new();
    let _controllers = Controllers::start(&cluster);
    let name = format!("torture-{}.holdfast.io", cluster.namespace);
    let spec = json!({"attachRequired": true, "podInfoOnMount": true});
    let supervised = Supervised::new(driver(&cluster, &name, spec));
    for n in 0..VOLUMES {
        csi_claim(&cluster, &format!("claim-{n}"), &name);
    }
    let mut agent = cluster.join();
    let begin = Instant::now();
    for round in 0..ROUNDS {
        let nth = round % VOLUMES + 1;
        // The driver dies at one call of each kind, the agent at one of its own steps.
        let inject = |rpc: &str, which: usize| {
            let fault = &KILLS[which % KILLS.len()];
            supervised
                .driver()
                .inject(rpc, 1, fault)
                .expect("inject a fault");
        };
        agent.kill9();
        inject("NodeStageVolume", round);
        inject("NodePublishVolume", round + 1);
        let pods: Vec<String> = (0..VOLUMES).map(|n| format!("r{round}-{n}")).collect();
        for (n, pod) in pods.iter().enumerate() {
            create_pod(&cluster, pod, &format!("claim-{n}"));
        }
        die_at(&cluster, UP[round % UP.len()], nth);
        agent = cluster.start();
        within(Duration::from_secs(120), "all pods run", || {
            let all = cluster.pods();
            let runs = |pod: &&Value| pod["status"]["phase"] == "Running";
            match all.iter().filter(runs).count() {
                VOLUMES => Ok(()),
                some => Err(format!("{some} of {VOLUMES}\n{}", agent.log())),
            }
        });
        eventually("mounts, store and driver agree", || {
            agree(&cluster, &supervised.driver(), VOLUMES)
        });

        agent.kill9();
        inject("NodeUnpublishVolume", round);
        inject("NodeUnstageVolume", round + 1);
        for pod in &pods {
            cluster.delete_pod(pod, 0);
        }
        die_at(&cluster, DOWN[round % DOWN.len()], nth);
        agent = cluster.start();
        within(
            Duration::from_secs(120),
            "nothing is left of the round",
            || {
                left(&cluster)?;
                let truth = supervised.driver().truth().map_err(|e| e.to_string())?;
                if truth.is_clean() {
                    Ok(())
                } else {
                    Err(format!("{truth:?}"))
                }
            },
        );
        println!("round {round} after {:?}", begin.elapsed());
    }
    let deaths = supervised.deaths();
    let driver = supervised.driver();
    assert_eq!(driver.violations(), Vec::<String>::new());
    let done = |rpc: &str| {
        let calls = driver.calls_of(rpc);
        calls.iter().filter(|call| call.outcome == "OK").count()
    };
    for rpc in [
        "NodeStageVolume",
        "NodePublishVolume",
        "NodeUnpublishVolume",
        "NodeUnstageVolume",
    ] {
        println!(
            "{rpc}: {} calls, {} done",
            driver.calls_of(rpc).len(),
            done(rpc)
        );
        assert!(done(rpc) + deaths >= ROUNDS * VOLUMES, "{rpc}");
    }
    println!("the driver died {deaths} times, the agent {}", 4 * ROUNDS);
    assert!(deaths >= 2 * ROUNDS, "the driver died {deaths} times");
    assert_eq!(mounts_below(&cluster.root_dir()), Vec::<String>::new());
    drop(driver);
    agent.kill9();
}
