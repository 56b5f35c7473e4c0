//! Volumes of pods that run without a record: the store is lost, or one record of it. What is mounted stays in use.

use std::path::PathBuf;
use std::sync::Arc;

use holdfast::core::state::{FactRecord, Record, Table, Transaction, VolumePhase, VolumeRecord};
use holdfast::core::volumes::keys::{self, Mark};
use holdfast::core::volumes::{Csi, Remote, Source, VolumeMode, records};
use holdfast::store::backend::{Backend, Op};
use holdfast::store::codec;
use holdfast::store::recover::Integrity;
use holdfast::types::{Clock, PodUid};
use holdfast_testkit::fake_cri::Behaviour;
use k8s_openapi::api::core::v1::{CSIPersistentVolumeSource, PersistentVolume};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::json;

use crate::api_restart::cluster;
use crate::cluster::NODE;
use crate::node::Disk;
use crate::restart::assert_nothing_wrong;
use crate::world::{IMAGE, World};

const NAME: &str = "kubernetes.io/csi/d.example^h1";
const DATA: &str = r#"{"driverName":"d.example","volumeHandle":"h1","specVolID":"pv-1","volumeLifecycleMode":"Persistent"}"#;

fn spec() -> String {
    format!(
        r#"{{"restartPolicy":"Always",
            "volumes":[{{"name":"data","persistentVolumeClaim":{{"claimName":"claim"}}}}],
            "containers":[{{"name":"main","image":"{IMAGE}","command":["sh"],
                "volumeMounts":[{{"name":"data","mountPath":"/data"}}]}}]}}"#
    )
}

fn remote() -> Remote {
    Remote {
        name: "pv-1".to_owned(),
        claim: Some("default/claim".to_owned()),
        mode: VolumeMode::Filesystem,
        read_only: false,
        mount_options: Vec::new(),
        terms: holdfast::core::volumes::Terms::default(),
        unique_name: Some(NAME.to_owned()),
        source: Source::Csi(Box::new(Csi {
            source: CSIPersistentVolumeSource {
                driver: "d.example".to_owned(),
                volume_handle: "h1".to_owned(),
                ..Default::default()
            },
            ..Csi::default()
        })),
    }
}

fn device() -> String {
    remote().device_key().unwrap()
}

fn staged(w: &World) -> PathBuf {
    let hash = holdfast::core::volumes::sha256_hex(&["h1"]);
    let dir = w
        .dir
        .path()
        .join("root/plugins/kubernetes.io/csi/d.example");
    dir.join(hash).join("globalmount")
}

fn published(w: &World, uid: &str) -> PathBuf {
    let pod = w.dir.path().join("root/pods").join(uid);
    pod.join("volumes/kubernetes.io~csi/pv-1/mount")
}

/// As a driver does; there is none here.
fn mount_by_hand(w: &World, uid: &str) {
    let (staged, published) = (staged(w), published(w, uid));
    for at in [&staged, &published] {
        std::fs::create_dir_all(at).unwrap();
        std::fs::write(at.parent().unwrap().join("vol_data.json"), DATA).unwrap();
    }
    let none: Option<&str> = None;
    mount(Some("disk"), &staged, Some("tmpfs"), MsFlags::empty(), none).unwrap();
    mount(Some(&staged), &published, none, MsFlags::MS_BIND, none).unwrap();
}

fn unmount_by_hand(w: &World, uid: &str) {
    for at in [published(w, uid), staged(w)] {
        umount2(&at, MntFlags::empty()).unwrap();
        std::fs::remove_dir(&at).unwrap();
        std::fs::remove_file(at.parent().unwrap().join("vol_data.json")).unwrap();
        std::fs::remove_dir(at.parent().unwrap()).unwrap();
    }
}

fn phase(w: &World, key: &str) -> Option<VolumePhase> {
    w.state().record::<VolumeRecord>(key).map(|r| r.phase)
}

fn described(w: &World, key: &str) -> Option<Remote> {
    let state = w.state();
    records::remote(&state, key).map(Arc::unwrap_or_clone)
}

/// Key of the description that belongs to a record.
fn description_of(key: &str) -> String {
    match key.strip_prefix(keys::DEVICE) {
        Some(id) => format!("devices//{id}"),
        None => format!("volumes/{key}"),
    }
}

fn in_use(w: &World) -> serde_json::Value {
    let node = w.api().get_json("nodes", "", NODE).unwrap();
    node["status"]["volumesInUse"].clone()
}

/// Time passes, and all the while the node shows the volume.
async fn shows_for(w: &World, seconds: u64) {
    for second in 0..seconds {
        assert_eq!(
            in_use(w),
            json!([NAME]),
            "after {second} s\n{}",
            w.describe()
        );
        w.pass(1).await;
    }
}

/// A pod that runs with a claim on a disk that is mounted; `None` where nothing can be mounted.
async fn running() -> Option<(World, String)> {
    if !nix::unistd::geteuid().is_root() {
        return None;
    }
    let mut w = cluster(|_, _| Behaviour::RunForever).await;
    w.start().await;
    w.joined().await;
    let claim = w.api().create_json(json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": "claim", "namespace": "default"},
        "spec": {"accessModes": ["ReadWriteOnce"], "volumeName": "pv-1",
            "resources": {"requests": {"storage": "1Gi"}}},
    }));
    w.api().create_json(json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "pv-1"},
        "spec": {"accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"},
            "claimRef": {"namespace": "default", "name": "claim", "uid": claim["metadata"]["uid"]},
            "csi": {"driver": "d.example", "volumeHandle": "h1"}},
    }));
    let mut bound = claim;
    bound["status"] = json!({"phase": "Bound", "capacity": {"storage": "1Gi"}});
    w.api().update_json(bound);
    let uid = w.create("web", &spec());
    w.until("the pod is known", 60, |w| w.has_record("web"))
        .await;
    mount_by_hand(&w, &uid);
    // What the agent would have recorded, had there been a driver.
    let now = w.clock.now();
    let mut transaction = Transaction::new();
    for (key, path) in [
        (device(), staged(&w)),
        (format!("{uid}/data"), published(&w, &uid)),
    ] {
        let mounted = (&*path, VolumePhase::Mounted, Mark::Mount);
        transaction = records::put(transaction, &key, &remote(), mounted, now).unwrap();
    }
    w.agent().store().commit(transaction).await.unwrap();
    w.until("the pod runs", 300, |w| w.shown_phase("web") == "Running")
        .await;
    w.until("the disk is in use", 60, |w| in_use(w) == json!([NAME]))
        .await;
    w.pass(30).await;
    w.fake.clear_calls();
    Some((w, uid))
}

/// The pod is deleted, what it had is undone by its records, and only then is the disk given up.
async fn goes(w: &World, uid: &str) {
    let volume = format!("{uid}/data");
    w.delete("web", Some(1));
    w.until("its end waits for its volume", 120, |w| {
        phase(w, &volume) == Some(VolumePhase::Unmounting)
    })
    .await;
    shows_for(w, 10).await;
    assert_eq!(phase(w, &device()), Some(VolumePhase::Mounted));
    // The driver has done it.
    unmount_by_hand(w, uid);
    w.until("the pod is gone", 600, |w| w.shown("web").is_null())
        .await;
    w.until("the disk is free", 600, |w| in_use(w).is_null())
        .await;
    w.until("nothing is left", 120, |w| w.left_of("web", uid).is_empty())
        .await;
    assert!(w.state().volumes.is_empty());
    assert_nothing_wrong(w);
}

#[tokio::test(start_paused = true)]
async fn restart_keeps_a_disk_in_use_when_the_store_is_lost() {
    let Some((mut w, uid)) = running().await else {
        return;
    };
    let before = w.running("web");
    w.crash().await;
    w.disk = Disk::default();
    w.integrity = Integrity::Lost;
    w.set_api(false);
    w.start().await;
    w.pass(60).await;
    let volume = format!("{uid}/data");
    assert_eq!(phase(&w, &volume), None, "nobody knows what it is yet");
    assert_eq!(phase(&w, &device()), Some(VolumePhase::Mounted));
    w.set_api(true);
    shows_for(&w, 120).await;
    assert_eq!(phase(&w, &volume), Some(VolumePhase::Mounted));
    let claim = described(&w, &volume).and_then(|r| r.claim);
    assert_eq!(claim.as_deref(), Some("default/claim"));
    assert_eq!(w.effects(), Vec::<String>::new());
    assert_eq!(w.running("web"), before);
    goes(&w, &uid).await;
}

#[tokio::test(start_paused = true)]
async fn restart_keeps_a_disk_in_use_when_its_volume_is_gone_from_the_api_too() {
    let Some((mut w, uid)) = running().await else {
        return;
    };
    w.crash().await;
    w.disk = Disk::default();
    w.integrity = Integrity::Lost;
    w.api().remove::<PersistentVolume>("", "pv-1");
    w.start().await;
    shows_for(&w, 120).await;
    let volume = format!("{uid}/data");
    assert_eq!(phase(&w, &volume), None, "its spec does not tell");
    assert_eq!(w.effects(), Vec::<String>::new());
    // What the driver's own data tells is enough to undo it.
    w.delete("web", Some(1));
    let found = format!("{uid}/pv-1");
    w.until("its end waits for its volume", 120, |w| {
        phase(w, &found) == Some(VolumePhase::Unmounting)
    })
    .await;
    shows_for(&w, 10).await;
    unmount_by_hand(&w, &uid);
    w.until("the disk is free", 600, |w| in_use(w).is_null())
        .await;
    w.until("nothing is left", 120, |w| {
        w.left_of("web", &uid).is_empty()
    })
    .await;
}

/// A byte of a record on the disk is another one.
fn damage<R: Record>(w: &World, table: Table, key: &str) {
    w.disk.settle(false);
    assert!(w.disk.load().record::<R>(key).is_some(), "{key}");
    let raw = codec::record_key(table, key);
    let mut disk = w.disk.synced.clone();
    let found = disk.iter().map(Result::unwrap).find(|(k, _)| *k == raw);
    let (raw, mut value) = found.unwrap();
    let middle = value.len() / 2;
    value[middle] ^= 0x10;
    disk.apply(&[Op::Put { key: raw, value }]).unwrap();
    assert!(w.disk.load().record::<R>(key).is_none(), "{key}");
}

// Invariant VOL-7.
#[tokio::test(start_paused = true)]
async fn restart_keeps_a_disk_in_use_whichever_of_its_records_is_damaged() {
    for which in [
        "volume",
        "description",
        "device",
        "description of the device",
    ] {
        let Some((mut w, uid)) = running().await else {
            return;
        };
        let volume = format!("{uid}/data");
        w.crash().await;
        match which {
            "volume" => damage::<VolumeRecord>(&w, Table::Volumes, &volume),
            "description" => {
                damage::<FactRecord>(&w, Table::Facts, &description_of(&volume));
            }
            "device" => damage::<VolumeRecord>(&w, Table::Volumes, &device()),
            _ => damage::<FactRecord>(&w, Table::Facts, &description_of(&device())),
        }
        w.start().await;
        shows_for(&w, 90).await;
        for key in [&volume, &device()] {
            assert_eq!(phase(&w, key), Some(VolumePhase::Mounted), "{which}: {key}");
            assert!(described(&w, key).is_some(), "{which}: {key}");
        }
        assert_eq!(w.effects(), Vec::<String>::new(), "{which}");
        goes(&w, &uid).await;
    }
}

#[tokio::test(start_paused = true)]
async fn what_pods_that_are_gone_left_goes_after_the_sources_have_spoken() {
    let Some((mut w, uid)) = running().await else {
        return;
    };
    w.crash().await;
    w.disk = Disk::default();
    w.integrity = Integrity::Lost;
    w.reboot_runtime();
    w.api()
        .remove::<k8s_openapi::api::core::v1::Pod>("default", "web");
    w.set_api(false);
    w.start().await;
    let found = format!("{uid}/pv-1");
    w.pass(120).await;
    assert_eq!(phase(&w, &found), None, "it may be wanted");
    w.set_api(true);
    w.until("its volume is to go", 300, |w| {
        phase(w, &found) == Some(VolumePhase::Unmounting)
    })
    .await;
    shows_for(&w, 10).await;
    unmount_by_hand(&w, &uid);
    w.until("the disk is free", 600, |w| in_use(w).is_null())
        .await;
    let uid = PodUid::new(&uid);
    w.until("its directory is gone", 300, |w| {
        !w.dir.path().join("root/pods").join(uid.as_str()).exists()
    })
    .await;
}
