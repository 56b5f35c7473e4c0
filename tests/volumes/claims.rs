//! Claims on what the node has, and storage from elsewhere.

use std::fs;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::json;

use crate::agent_process::eventually;
use crate::features::{Feature, Scene, host};
use crate::seen::{deleted, said};

pub const FEATURES: &[Feature] = &[
    ("host-path-claim", host_path_claim),
    ("local-claim", local_claim),
    ("claim-read-only", claim_read_only),
    ("claim-unbound", claim_unbound),
    ("block-claim", block_claim),
    ("nfs", nfs),
    ("csi", csi),
    ("csi-block", csi_block),
    ("csi-inline", csi_inline),
    ("csi-no-driver", csi_no_driver),
    ("csi-expand", csi_expand),
    ("volume-group", volume_group),
];

fn host_path_claim(cluster: &Scene) {
    cluster.wait_pod_phase("host-path-claim", "Succeeded");
    deleted(cluster, "host-path-claim");
    let word = fs::read_to_string(host(cluster).join("claimed/word"));
    assert_eq!(word.unwrap(), "from the pod\n");
}

fn local_claim(cluster: &Scene) {
    let parts = [
        "word=from the pod before=of the node",
        "Read-only file system",
    ];
    said(cluster, "local-claim", "main", &parts);
    deleted(cluster, "local-claim");
    let word = fs::read_to_string(host(cluster).join("local/word"));
    assert_eq!(word.unwrap(), "from the pod\n");
}

fn claim_read_only(cluster: &Scene) {
    let parts = ["of the node", "Read-only file system"];
    said(cluster, "claim-read-only", "main", &parts);
    assert!(!host(cluster).join("local/new").exists());
}

fn claim_unbound(cluster: &Scene) {
    for (pod, claim) in [
        ("claim-unbound", "claim-unbound"),
        ("claim-missing", "nowhere"),
    ] {
        let message = cluster.wait_event(pod, "FailedMount", claim);
        assert!(message.contains("\"v\""), "{message}");
        assert_eq!(cluster.pod(pod)["status"]["phase"], "Pending");
    }
    let volume = json!({
        "apiVersion": "v1", "kind": "PersistentVolume",
        "metadata": {"name": format!("{}-claim-unbound", cluster.namespace)},
        "spec": {
            "capacity": {"storage": "1Mi"}, "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": host(cluster).join("local")},
        },
    });
    let volume: PersistentVolume = serde_json::from_value(volume).unwrap();
    let volumes: Api<PersistentVolume> = Api::all(cluster.client());
    cluster
        .run(volumes.create(&PostParams::default(), &volume))
        .expect("create a volume");
    said(cluster, "claim-unbound", "main", &["of the node"]);
}

fn block_claim(cluster: &Scene) {
    let parts = ["block special file", "found=a disk of"];
    said(cluster, "block-claim", "main", &parts);
    cluster.wait_pod_phase("block-claim", "Succeeded");
    deleted(cluster, "block-claim");
    let disk = fs::read(host(cluster).join("disk")).unwrap();
    assert_eq!(&disk[512..521], b"by a pod ");
    let loops = std::process::Command::new("losetup")
        .arg("-a")
        .output()
        .unwrap();
    let loops = String::from_utf8_lossy(&loops.stdout).into_owned();
    let own = host(cluster).display().to_string();
    assert!(!loops.contains(&own), "{loops}");
}

fn nfs(cluster: &Scene) {
    let message = cluster.wait_event("nfs", "FailedMount", "127.0.0.1:/nobody/serves/this");
    assert!(message.contains("\"v\""), "{message}");
    assert_eq!(cluster.pod("nfs")["status"]["phase"], "Pending");
    deleted(cluster, "nfs");
}

fn csi(cluster: &Scene) {
    said(cluster, "csi", "main", &["2000"]);
    said(cluster, "csi-next", "main", &["written"]);
    cluster.wait_pod_phase("csi", "Succeeded");
}

fn csi_block(cluster: &Scene) {
    let parts = ["block special file", "read=word"];
    said(cluster, "csi-block", "main", &parts);
}

fn csi_inline(cluster: &Scene) {
    said(cluster, "csi-inline", "main", &["word"]);
}

fn csi_no_driver(cluster: &Scene) {
    for (pod, words) in [
        ("csi-no-driver", "nobody.holdfast.io"),
        ("csi-missing", "does not exist"),
    ] {
        let message = cluster.wait_event(pod, "FailedMount", words);
        let volume = format!("volume \"{}-{pod}\"", cluster.namespace);
        assert!(message.contains(&volume), "{message}");
        assert_eq!(cluster.pod(pod)["status"]["phase"], "Pending");
    }
}

fn csi_expand(cluster: &Scene) {
    said(cluster, "csi-expand", "main", &["word"]);
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(cluster.client(), &cluster.namespace);
    // What a resizer does once the storage has grown.
    let volume = format!("{}-csi-expand", cluster.namespace);
    let more = json!({"spec": {"capacity": {"storage": "2Mi"}}}).to_string();
    cluster.kubectl(&["patch", "pv", &volume, "-p", &more]);
    let waits = json!({"status": {"conditions": [
        {"type": "FileSystemResizePending", "status": "True"},
    ]}});
    let (parameters, waits) = (PatchParams::default(), Patch::Merge(waits));
    cluster
        .run(claims.patch_status("csi-expand", &parameters, &waits))
        .expect("tell the claim");
    // And its user hurries.
    cluster.kubectl(&["annotate", "pod", "csi-expand", "grown=please"]);
    cluster.wait_event("csi-expand", "FileSystemResizeSuccessful", "");
    eventually("the claim has what its volume has", || {
        let claim = cluster.run(claims.get("csi-expand"));
        let status = claim.map_err(|e| e.to_string())?.status.unwrap_or_default();
        let capacity = status.capacity.unwrap_or_default();
        let conditions = status.conditions.unwrap_or_default();
        match (capacity.get("storage"), conditions.as_slice()) {
            (Some(has), []) if has.0 == "2Mi" => Ok(()),
            _ => Err(format!("{capacity:?} {conditions:?}")),
        }
    });
}

fn volume_group(cluster: &Scene) {
    said(cluster, "volume-group", "main", &["groups=1000 2345"]);
}
