//! From recorded claims to mounts, or to the text that users read.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod};
use serde_json::{Value, json};

use super::{Asker, find};
use crate::core::state::{FactRecord, ObjectRecord, Transaction, VolumePhase, VolumeRecord};
use crate::core::volumes::{Remote, Source, VolumeMode};
use crate::kuberuntime::node_context::NodeContext;
use crate::kuberuntime::sources::Resolved;
use crate::node_object::NodeObject;
use crate::objects::Objects;
use crate::objects::keyring::{Key, Keyring};
use crate::objects::vault::Vault;
use crate::objects::volumes::attachment_name;
use crate::store::Store;
use crate::types::metrics::Metrics;
use crate::types::{BootId, Clock, Stamp};

struct TestClock;

impl Clock for TestClock {
    fn now(&self) -> Stamp {
        Stamp {
            boot: BootId(1),
            boottime_ms: 1,
            wall_ms: 1,
        }
    }
}

struct World {
    store: Store,
    vault: Arc<Vault>,
    node: NodeObject,
    context: NodeContext,
}

fn world() -> World {
    let node: Node = serde_json::from_value(json!({
        "metadata": {"name": "node", "labels": {"zone": "a"}},
    }))
    .unwrap();
    let known = NodeObject::default();
    known.set(Arc::new(node));
    World {
        store: Store::in_memory(Arc::new(TestClock)),
        vault: Arc::new(Vault::with_keys(Keyring::new(Key::generate(
            TestClock.now(),
        )))),
        node: known,
        context: NodeContext::new("node", "/r"),
    }
}

impl World {
    async fn put(&self, key: &str, object: &Value) {
        let plain = object.to_string().into_bytes();
        let encrypted = key.starts_with("secrets/");
        let data = match encrypted {
            true => self.vault.seal("objects", key, &plain).unwrap(),
            false => plain,
        };
        let record = ObjectRecord {
            resource_version: "1".to_owned(),
            encrypted,
            data,
            at: TestClock.now(),
        };
        let transaction = Transaction::new().put(key, record);
        self.store.commit(transaction).await.unwrap();
    }

    /// The description of the volume that is mounted.
    async fn describe(&self, remote: &Remote) {
        let described = FactRecord::of(remote, TestClock.now());
        let transaction = Transaction::new().put("volumes/uid-web/v", described);
        self.store.commit(transaction).await.unwrap();
    }

    /// A claim, its volume, an attachment and a driver.
    async fn put_all(&self, claim: &Value, volume: &Value, attached: bool, driver: Option<Value>) {
        self.put("persistentvolumeclaims/ns/data", claim).await;
        self.put("persistentvolumes//pv", volume).await;
        let id = attachment_name("h", "d", "node");
        let attachment = json!({"metadata": {"name": id},
            "spec": {"attacher": "d", "nodeName": "node", "source": {}},
            "status": {"attached": attached, "attachmentMetadata": {"disk": "sdb"}}});
        self.put(&format!("volumeattachments//{id}"), &attachment)
            .await;
        if let Some(spec) = driver {
            let driver = json!({"metadata": {"name": "d"}, "spec": spec});
            self.put("csidrivers//d", &driver).await;
        }
    }

    async fn find(&self, pod: &Pod) -> BTreeMap<String, Result<Arc<Resolved>, String>> {
        // Without an API server what is on record is what there is.
        let objects = Objects::with_vault(
            self.store.clone(),
            Arc::new(TestClock),
            None,
            Arc::clone(&self.vault),
            Metrics::default(),
            None,
        );
        objects.register(pod);
        let asker = Asker {
            mounted: false,
            objects: &objects,
            store: &self.store,
            clock: &TestClock,
            node_object: &self.node,
            node_name: "node",
            node: &self.context,
        };
        find(&asker, pod).await
    }

    async fn one(&self, pod: &Pod) -> Result<Arc<Resolved>, String> {
        self.find(pod).await.remove("v").unwrap()
    }
}

fn pod_with(volume: Value) -> Pod {
    let mut volume = volume;
    volume["name"] = json!("v");
    serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "ns", "uid": "uid-web"},
        "spec": {"nodeName": "node", "securityContext": {"fsGroup": 9}, "volumes": [volume, {"name": "unused", "nfs": {"server": "s", "path": "/p"}}],
            "containers": [{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]},
    }))
    .unwrap()
}

fn claiming() -> Pod {
    pod_with(json!({"persistentVolumeClaim": {"claimName": "data"}}))
}

fn claim() -> Value {
    json!({"metadata": {"name": "data", "namespace": "ns", "uid": "uid-claim"},
        "spec": {"volumeName": "pv"},
        "status": {"phase": "Bound", "capacity": {"storage": "1Gi"}}})
}

fn volume(source: (&str, Value)) -> Value {
    let mut volume = json!({"metadata": {"name": "pv"}, "spec": {
        "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"},
        "mountOptions": ["noatime"],
        "claimRef": {"namespace": "ns", "name": "data", "uid": "uid-claim"}}});
    volume["spec"][source.0] = source.1;
    volume
}

fn csi() -> (&'static str, Value) {
    (
        "csi",
        json!({"driver": "d", "volumeHandle": "h", "fsType": "ext4"}),
    )
}

#[tokio::test]
async fn a_claim_becomes_a_volume_of_its_driver() {
    let world = world();
    let driver = json!({"podInfoOnMount": true, "fsGroupPolicy": "File", "requiresRepublish": false,
        "seLinuxMount": true, "serviceAccountTokenInSecrets": true});
    let mut source = csi();
    source.1["nodeStageSecretRef"] = json!({"name": "stage", "namespace": "vault"});
    source.1["nodeExpandSecretRef"] = json!({"name": "none", "namespace": "vault"});
    world
        .put_all(&claim(), &volume(source), true, Some(driver))
        .await;
    world
        .put(
            "secrets/vault/stage",
            &json!({"metadata": {"name": "stage"}, "data": {"k": "dg=="}}),
        )
        .await;
    let found = world.find(&claiming()).await;
    assert_eq!(
        found.keys().collect::<Vec<_>>(),
        ["v"],
        "nobody uses the other"
    );
    let found = found["v"].clone().unwrap();
    let remote = &found.remote;
    assert_eq!(remote.name, "pv");
    assert_eq!(remote.claim.as_deref(), Some("ns/data"));
    assert_eq!(remote.mode, VolumeMode::Filesystem);
    assert!(!remote.read_only);
    assert_eq!(remote.mount_options, ["noatime"]);
    assert_eq!(remote.unique_name.as_deref(), Some("kubernetes.io/csi/d^h"));
    let Source::Csi(csi) = &remote.source else {
        panic!("{remote:?}");
    };
    assert_eq!(csi.source.volume_handle, "h");
    assert_eq!(csi.publish_context["disk"], "sdb");
    assert_eq!(csi.access_modes, ["ReadWriteOnce"]);
    assert_eq!(csi.fs_group_policy, "File");
    assert_eq!(csi.fs_group, Some(9));
    assert!(csi.pod_info && csi.tokens_in_secrets);
    assert!(!csi.selinux_mount, "there is no SELinux here");
    assert!(!csi.ephemeral && !csi.requires_republish);
    assert_eq!(found.secrets.len(), 1, "the one for growing is not needed");
    assert_eq!(found.capacity.unwrap().growth(None), None);
}

#[tokio::test]
async fn a_volume_of_one_pod_alone_is_mounted_with_its_label() {
    let mut world = world();
    world.context.selinux = true;
    world.context.selinux_file_context = Some("system_u:object_r:container_file_t:s0".to_owned());
    let mut pod = claiming();
    let context = json!({"seLinuxOptions": {"level": "s0:c1,c2"}});
    pod.spec.as_mut().unwrap().security_context = serde_json::from_value(context).unwrap();
    let driver = Some(json!({"seLinuxMount": true}));
    let labelled = "context=\"system_u:object_r:container_file_t:s0:c1,c2\"";
    for (mode, wanted) in [
        ("ReadWriteOnce", vec!["noatime"]),
        ("ReadWriteOncePod", vec!["noatime", labelled]),
    ] {
        let mut volume = volume(csi());
        volume["spec"]["accessModes"] = json!([mode]);
        world.put_all(&claim(), &volume, true, driver.clone()).await;
        let found = world.find(&pod).await["v"].clone().unwrap();
        assert_eq!(found.remote.mount_options, wanted, "{mode}");
        let Source::Csi(csi) = &found.remote.source else {
            panic!("{found:?}");
        };
        assert_eq!(csi.selinux_mount, wanted.len() == 2, "{mode}");
    }
}

#[tokio::test]
async fn what_does_not_fit_is_told_as_users_know_it() {
    let change = |mut value: Value, at: &str, to: Value| {
        *value.pointer_mut(at).unwrap_or(&mut Value::Null) = to.clone();
        if value.pointer(at).is_none() {
            let (parent, field) = at.rsplit_once('/').unwrap();
            value.pointer_mut(parent).unwrap()[field] = to;
        }
        value
    };
    let v = || volume(csi());
    let needs_zone = |zone: &str| {
        json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [
            {"key": "zone", "operator": "In", "values": [zone]}]}]}})
    };
    let process = "error processing PVC ns/data: ";
    for (claim, volume, attached, driver, wanted) in [
        (change(claim(), "/status/phase", json!("Pending")), v(), true, None, format!("{process}PVC is not bound")),
        (change(claim(), "/spec/volumeName", json!("")), v(), true, None, format!("{process}PVC has empty pvc.Spec.VolumeName")),
        (change(claim(), "/metadata/deletionTimestamp", json!("2026-01-01T00:00:00Z")), v(), true, None, format!("{process}PVC is being deleted")),
        (change(claim(), "/spec/volumeName", json!("gone")), v(), true, None, format!("{process}failed to fetch PV gone from API server: get PersistentVolume gone: this node has no API server (--kubeconfig)")),
        (claim(), change(v(), "/spec/claimRef", Value::Null), true, None, format!("{process}found PV object pv but it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim")),
        (claim(), change(v(), "/spec/claimRef/uid", json!("other")), true, None, format!("{process}found PV object pv but its pv.Spec.ClaimRef.UID other does not point to claim.UID uid-claim")),
        (claim(), change(v(), "/spec/volumeMode", json!("Block")), true, None, "volume v has volumeMode Block, but is specified in volumeMounts".to_owned()),
        (claim(), change(v(), "/spec/nodeAffinity", needs_zone("b")), true, None, "no matching NodeSelectorTerms: the nodeAffinity of the persistent volume excludes node node".to_owned()),
        (claim(), v(), false, Some(json!({})), format!("volume h is not attached to this node yet: waiting for driver d to attach it (VolumeAttachment {})", attachment_name("h", "d", "node"))),
        (claim(), v(), true, Some(json!({"volumeLifecycleModes": ["Ephemeral"]})), "volume mode \"Persistent\" not supported by driver d (only supports [\"Ephemeral\"])".to_owned()),
        (claim(), change(volume(("rbd", json!({"image": "i", "monitors": []}))), "/spec/csi", Value::Null), true, None, "persistent volume pv is of a kind that this node does not mount; use csi, nfs, iscsi, local or hostPath".to_owned()),
    ] {
        let world = world();
        let driver = driver.or_else(|| Some(json!({})));
        world.put_all(&claim, &volume, attached, driver).await;
        let found = world.one(&claiming()).await;
        assert_eq!(found.map(|f| f.remote.clone()), Err(wanted));
    }
    let world = world();
    world
        .put_all(
            &claim(),
            &change(v(), "/spec/nodeAffinity", needs_zone("a")),
            true,
            Some(json!({})),
        )
        .await;
    assert!(world.one(&claiming()).await.is_ok(), "the node's own zone");
}

#[tokio::test]
async fn a_driver_that_attaches_nothing_is_not_waited_for() {
    let world = world();
    let driver = json!({"attachRequired": false});
    world
        .put_all(&claim(), &volume(csi()), false, Some(driver))
        .await;
    let found = world.one(&claiming()).await.unwrap();
    assert_eq!(found.remote.unique_name, None);
    assert_eq!(found.remote.device().as_deref(), Some("d/h"));
}

#[tokio::test]
async fn devices_need_a_volume_of_mode_block() {
    let world = world();
    let mut pod = claiming();
    let container = &mut pod.spec.as_mut().unwrap().containers[0];
    container.volume_mounts = None;
    container.volume_devices =
        serde_json::from_value(json!([{"name": "v", "devicePath": "/dev/x"}])).unwrap();
    world
        .put_all(&claim(), &volume(csi()), true, Some(json!({})))
        .await;
    let found = world.one(&pod).await.map(|f| f.remote.clone());
    let text = "volume v has volumeMode Filesystem, but is specified in volumeDevices";
    assert_eq!(found, Err(text.to_owned()));
    let mut block = volume(csi());
    block["spec"]["volumeMode"] = json!("Block");
    world.put("persistentvolumes//pv", &block).await;
    assert_eq!(
        world.one(&pod).await.unwrap().remote.mode,
        VolumeMode::Block
    );
}

#[tokio::test]
async fn mount_options_of_an_annotation_count_first_but_not_for_csi() {
    let nfs = ("nfs", json!({"server": "s", "path": "/p"}));
    for (source, wanted) in [(nfs, &["nfsvers=3", "nolock"][..]), (csi(), &["noatime"])] {
        let world = world();
        let mut volume = volume(source);
        volume["metadata"]["annotations"] =
            json!({"volume.beta.kubernetes.io/mount-options": "nfsvers=3, nolock,"});
        let driver = Some(json!({"attachRequired": false}));
        world.put_all(&claim(), &volume, true, driver).await;
        let found = world.one(&claiming()).await.unwrap();
        assert_eq!(found.remote.mount_options, wanted);
    }
}

#[tokio::test]
async fn every_kind_of_persistent_volume_is_taken_as_it_is() {
    for (kind, source, wanted, read_only, name) in [
        (
            "nfs",
            json!({"server": "s", "path": "/p", "readOnly": true}),
            "Nfs",
            true,
            None,
        ),
        (
            "iscsi",
            json!({"targetPortal": "t:3260", "iqn": "iqn.x", "lun": 2}),
            "Iscsi",
            false,
            Some("kubernetes.io/iscsi/t:3260:iqn.x:2"),
        ),
        ("local", json!({"path": "/disk"}), "Local", false, None),
        (
            "hostPath",
            json!({"path": "/dir", "type": "Directory"}),
            "HostPath",
            false,
            None,
        ),
    ] {
        let world = world();
        world
            .put_all(&claim(), &volume((kind, source)), true, None)
            .await;
        let found = world.one(&claiming()).await.unwrap();
        let remote = &found.remote;
        assert!(
            format!("{:?}", remote.source).starts_with(wanted),
            "{remote:?}"
        );
        assert_eq!(remote.read_only, read_only, "{kind}");
        assert_eq!(remote.unique_name.as_deref(), name);
        assert_eq!(remote.mount_options, ["noatime"]);
        let by_pod =
            pod_with(json!({"persistentVolumeClaim": {"claimName": "data", "readOnly": true}}));
        assert!(
            world.one(&by_pod).await.unwrap().remote.read_only,
            "as the pod says"
        );
    }
}

#[tokio::test]
async fn a_generic_ephemeral_volume_is_its_own_pods() {
    let world = world();
    let pod = pod_with(json!({"ephemeral": {"volumeClaimTemplate": {"spec": {}}}}));
    let mut own = claim();
    own["metadata"]["name"] = json!("web-v");
    own["metadata"]["ownerReferences"] = json!([{"apiVersion": "v1", "kind": "Pod", "name": "web", "uid": "uid-other", "controller": true}]);
    world
        .put_all(&own, &volume(csi()), true, Some(json!({})))
        .await;
    world.put("persistentvolumeclaims/ns/web-v", &own).await;
    let found = world.one(&pod).await.map(|f| f.remote.clone());
    let text = "PVC ns/web-v was not created for pod ns/web (pod is not owner)";
    assert_eq!(found, Err(text.to_owned()));
    own["metadata"]["ownerReferences"][0]["uid"] = json!("uid-web");
    world.put("persistentvolumeclaims/ns/web-v", &own).await;
    let found = world.one(&pod).await.unwrap();
    assert_eq!(found.remote.claim.as_deref(), Some("ns/web-v"));
}

#[tokio::test]
async fn an_inline_volume_lives_as_long_as_its_pod() {
    let world = world();
    let pod =
        pod_with(json!({"csi": {"driver": "d", "volumeAttributes": {"a": "b"}, "readOnly": true}}));
    world
        .put(
            "csidrivers//d",
            &json!({"metadata": {"name": "d"}, "spec": {}}),
        )
        .await;
    let found = world.one(&pod).await.map(|f| f.remote.clone());
    let text =
        "volume mode \"Ephemeral\" not supported by driver d (only supports [\"Persistent\"])";
    assert_eq!(found, Err(text.to_owned()));
    let spec = json!({"volumeLifecycleModes": ["Persistent", "Ephemeral"], "podInfoOnMount": true});
    world
        .put(
            "csidrivers//d",
            &json!({"metadata": {"name": "d"}, "spec": spec}),
        )
        .await;
    let found = world.one(&pod).await.unwrap();
    let Source::Csi(csi) = &found.remote.source else {
        panic!("{found:?}");
    };
    assert!(csi.ephemeral && csi.pod_info && found.remote.read_only);
    // printf 'uid-webv' | sha256sum
    assert_eq!(
        csi.source.volume_handle,
        "csi-b7db0ab0c772507a084f8906cf24f50b0b386c1bb0d233e1e1517aa7f5357a74"
    );
    assert_eq!(found.remote.device(), None);
    assert_eq!(found.remote.unique_name, None);
}

#[tokio::test]
async fn growth_is_asked_for_once_the_volume_is_larger_than_its_claim_knows() {
    let world = world();
    let mut larger = volume(csi());
    larger["spec"]["capacity"]["storage"] = json!("3Gi");
    world
        .put_all(&claim(), &larger, true, Some(json!({})))
        .await;
    let growth = async || {
        let sizes = world.one(&claiming()).await.unwrap().capacity;
        sizes?.growth(None).map(|growth| growth.bytes)
    };
    assert_eq!(growth().await, Some(3 << 30));
    let mut known = claim();
    known["status"]["capacity"]["storage"] = json!("3221225472");
    world.put("persistentvolumeclaims/ns/data", &known).await;
    assert_eq!(growth().await, None);
}

// Invariant VOL-9.
#[tokio::test]
async fn a_mounted_volume_stays_while_its_claim_goes() {
    let world = world();
    world
        .put_all(&claim(), &volume(csi()), true, Some(json!({})))
        .await;
    let before = world.one(&claiming()).await.unwrap();
    let mut going = claim();
    going["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    world.put("persistentvolumeclaims/ns/data", &going).await;
    assert!(world.one(&claiming()).await.is_err());

    let mut mounted = VolumeRecord {
        plugin: "kubernetes.io/csi".to_owned(),
        path: "/x".to_owned(),
        phase: VolumePhase::Mounted,
        at: TestClock.now(),
    };
    let remote: Remote = before.remote.clone();
    world.describe(&remote).await;
    let transaction = Transaction::new().put("uid-web/v", mounted.clone());
    world.store.commit(transaction).await.unwrap();
    assert_eq!(world.one(&claiming()).await.unwrap().remote, remote);
    // Nobody can say any more what it was bound to.
    let mut lost = claim();
    lost["status"]["phase"] = json!("Lost");
    world.put("persistentvolumeclaims/ns/data", &lost).await;
    assert_eq!(world.one(&claiming()).await.unwrap().remote, remote);
    // Also one that is published again and again: not now, and its containers start.
    let mut again = remote.clone();
    let Source::Csi(source) = &mut again.source else {
        panic!("{again:?}");
    };
    source.requires_republish = true;
    world.describe(&again).await;
    let found = world.one(&claiming()).await.unwrap();
    assert_eq!(found.remote, again);
    assert!(found.missing.is_some());
    world.describe(&remote).await;
    // Another claim of that name leads to another volume.
    let mut other = volume(csi());
    other["metadata"]["name"] = json!("pv-2");
    other["spec"]["csi"]["volumeHandle"] = json!("h-2");
    let mut again = claim();
    again["spec"]["volumeName"] = json!("pv-2");
    let driver = json!({"metadata": {"name": "d"}, "spec": {"attachRequired": false}});
    world.put("persistentvolumes//pv-2", &other).await;
    world.put("csidrivers//d", &driver).await;
    world.put("persistentvolumeclaims/ns/data", &again).await;
    assert_eq!(world.one(&claiming()).await.unwrap().remote, remote);
    world.put("persistentvolumeclaims/ns/data", &lost).await;
    // What was mounted before the machine was started is not mounted.
    mounted.at.boot = BootId(0);
    let transaction = Transaction::new().put("uid-web/v", mounted);
    world.store.commit(transaction).await.unwrap();
    assert!(world.one(&claiming()).await.is_err());
}

#[tokio::test]
async fn a_static_pod_has_no_claim() {
    let world = world();
    world
        .put_all(&claim(), &volume(csi()), true, Some(json!({})))
        .await;
    let mut pod = claiming();
    pod.metadata.annotations = Some(BTreeMap::from([(
        "kubernetes.io/config.source".to_owned(),
        "file".to_owned(),
    )]));
    let found = world.one(&pod).await.map(|f| f.remote.clone());
    assert!(
        found
            .as_ref()
            .is_err_and(|why| why.starts_with("a static pod cannot use claim ns/data")),
        "{found:?}"
    );
}
