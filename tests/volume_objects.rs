//! A real API server lets a node have what the volumes of its pods take: claims, persistent volumes, attachments, CSI
//! drivers and secrets, and the sizes of claims that have grown. And nothing of other nodes.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "tests may panic"
)]

use std::sync::Arc;
use std::time::Duration;

use holdfast::apiserver::{ApiClient, Connection};
use holdfast::objects::volumes::attachment_name;
use holdfast::objects::{ObjectError, Objects};
use holdfast::store::Store;
use holdfast::types::{BootId, PodExt, SystemClock};
use holdfast_testkit::envtest::EnvTest;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use tokio::time::Instant;

const SOON: Duration = Duration::from_secs(60);

/// Repeats until it is so; the authoriser learns of objects a little later than the API shows them.
async fn eventually<T>(what: &str, look: impl AsyncFn() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(begun.elapsed() < SOON, "{what} within {SOON:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn objects_of(env: &EnvTest, node: &str) -> Objects {
    let api = ApiClient::new(env.node_client(node), Connection::default());
    let clock = Arc::new(SystemClock::new(BootId(1)));
    let store = Store::in_memory(clock.clone());
    Objects::new(store, clock, Some(api))
}

fn manifests() -> String {
    let attachment = attachment_name("handle", "d.example", "mine");
    format!(
        r#"
apiVersion: v1
kind: Namespace
metadata: {{name: vault}}
---
apiVersion: v1
kind: Secret
metadata: {{name: stage, namespace: vault}}
stringData: {{key: value}}
---
apiVersion: v1
kind: PersistentVolume
metadata: {{name: pv}}
spec:
  accessModes: [ReadWriteOnce]
  capacity: {{storage: 2Gi}}
  claimRef: {{namespace: default, name: data}}
  csi:
    driver: d.example
    volumeHandle: handle
    nodeStageSecretRef: {{namespace: vault, name: stage}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: data}}
spec:
  accessModes: [ReadWriteOnce]
  resources: {{requests: {{storage: 1Gi}}}}
  volumeName: pv
  storageClassName: ""
---
apiVersion: storage.k8s.io/v1
kind: CSIDriver
metadata: {{name: d.example}}
spec: {{podInfoOnMount: true}}
---
apiVersion: storage.k8s.io/v1
kind: VolumeAttachment
metadata: {{name: {attachment}}}
spec: {{attacher: d.example, nodeName: mine, source: {{persistentVolumeName: pv}}}}
"#
    )
}

/// What the controllers of a whole cluster would do.
async fn bind(env: &EnvTest) {
    let client = env.admin_client();
    let claims: Api<PersistentVolumeClaim> = Api::default_namespaced(client.clone());
    let claim = claims.get("data").await.unwrap();
    let params = PatchParams::default();
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    let bound = json!({"spec": {"claimRef": {"uid": claim.metadata.uid}}});
    volumes
        .patch("pv", &params, &Patch::Merge(bound))
        .await
        .unwrap();
    let bound = json!({"status": {"phase": "Bound", "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "conditions": [{"type": "FileSystemResizePending", "status": "True"}]}});
    claims
        .patch_status("data", &params, &Patch::Merge(bound))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_node_has_what_the_volumes_of_its_pods_take_and_nothing_of_others() {
    let env = EnvTest::start();
    env.apply(&manifests());
    bind(&env).await;
    let pods: Api<Pod> = Api::default_namespaced(env.admin_client());
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"nodeName": "mine",
            "containers": [{"name": "c", "image": "i", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]},
    }))
    .unwrap();
    let pod = pods.create(&Default::default(), &pod).await.unwrap();
    let uid = pod.uid();

    let mine = objects_of(&env, "mine");
    mine.register(&pod);
    let claim = eventually("the claim", async || {
        mine.claim("default", "data").await.ok().flatten()
    });
    assert_eq!(
        claim.await.spec.as_ref().unwrap().volume_name.as_deref(),
        Some("pv")
    );
    eventually("the volume", async || {
        mine.persistent_volume(&uid, "pv").await.ok().flatten()
    })
    .await;
    eventually("the driver", async || {
        mine.csi_driver(&uid, "d.example").await.ok().flatten()
    })
    .await;
    eventually("its secret", async || {
        mine.volume_secret(&uid, "vault", "stage")
            .await
            .ok()
            .flatten()
    })
    .await;
    let name = attachment_name("handle", "d.example", "mine");
    let attachment = eventually("the attachment", async || {
        mine.volume_attachment(&uid, &name).await.ok().flatten()
    });
    assert!(!attachment.await.status.clone().unwrap_or_default().attached);

    let attachments: Api<VolumeAttachment> = Api::all(env.admin_client());
    let attached = json!({"status": {"attached": true, "attachmentMetadata": {"disk": "sdb"}}});
    attachments
        .patch_status(&name, &PatchParams::default(), &Patch::Merge(attached))
        .await
        .unwrap();
    eventually("attached", async || {
        let seen = mine.volume_attachment(&uid, &name).await.ok().flatten()?;
        seen.status.clone()?.attached.then_some(())
    })
    .await;

    mine.claim_has_grown("default", "data", 2 << 30)
        .await
        .unwrap();
    let claims: Api<PersistentVolumeClaim> = Api::default_namespaced(env.admin_client());
    let status = claims.get("data").await.unwrap().status.unwrap();
    assert_eq!(status.capacity.unwrap()["storage"].0, "2Gi");
    assert!(
        status.conditions.is_none_or(|c| c.is_empty()),
        "the resize has ended"
    );

    let other = objects_of(&env, "other");
    other.register(&pod);
    for refused in [
        other.claim("default", "data").await.map(drop),
        other.persistent_volume(&uid, "pv").await.map(drop),
        other.volume_secret(&uid, "vault", "stage").await.map(drop),
        other.claim_has_grown("default", "data", 1).await,
    ] {
        assert!(
            matches!(refused, Err(ObjectError::Refused { .. })),
            "{refused:?}"
        );
    }
}
