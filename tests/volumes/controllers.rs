//! What the controllers of a whole cluster do for volumes: pods get the claims that live as long as they do, claims
//! are bound to the volumes they name, and volumes of drivers attached.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::task::JoinHandle;

use crate::setup::Cluster;

/// Runs until it is dropped.
pub struct Controllers(JoinHandle<()>);

impl Drop for Controllers {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Controllers {
    /// For the namespace and the node of a test.
    pub fn start(cluster: &Cluster) -> Self {
        let (client, namespace) = (cluster.client(), cluster.namespace.clone());
        let node = cluster.node.clone();
        Self(cluster.spawn(async move {
            loop {
                for work in [
                    claim(&client, &namespace).await,
                    bind(&client, &namespace).await,
                    attach(&client, &namespace, &node).await,
                ] {
                    if let Err(error) = work {
                        eprintln!("controllers: {error}");
                    }
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }))
    }
}

/// Makes the claims of volumes that live as long as their pods, and never touches one that is there.
async fn claim(client: &Client, namespace: &str) -> kube::Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), namespace);
    for pod in pods.list(&ListParams::default()).await? {
        let volumes = pod
            .spec
            .iter()
            .flat_map(|spec| spec.volumes.iter().flatten());
        for volume in volumes {
            let template = volume.ephemeral.as_ref();
            let Some(template) = template.and_then(|e| e.volume_claim_template.as_ref()) else {
                continue;
            };
            let name = format!("{}-{}", pod.name_any(), volume.name);
            if claims.get_opt(&name).await?.is_some() {
                continue;
            }
            let owner = json!({
                "apiVersion": "v1", "kind": "Pod", "name": pod.name_any(), "uid": pod.uid(),
                "controller": true, "blockOwnerDeletion": true,
            });
            let claim = json!({
                "metadata": {"name": name, "ownerReferences": [owner]}, "spec": template.spec,
            });
            let claim = serde_json::from_value(claim).expect("a claim");
            claims.create(&PostParams::default(), &claim).await?;
        }
    }
    Ok(())
}

async fn bind(client: &Client, namespace: &str) -> kube::Result<()> {
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), namespace);
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    let parameters = PatchParams::default();
    for claim in claims.list(&ListParams::default()).await? {
        let phase = claim.status.as_ref().and_then(|s| s.phase.as_deref());
        let wanted = claim.spec.as_ref().and_then(|s| s.volume_name.clone());
        let (Some(wanted), false) = (wanted, phase == Some("Bound")) else {
            continue;
        };
        let Some(volume) = volumes.get_opt(&wanted).await? else {
            continue;
        };
        let spec = volume.spec.unwrap_or_default();
        let reference = json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": namespace,
            "name": claim.name_any(), "uid": claim.uid(),
        });
        let patch = json!({"spec": {"claimRef": reference}});
        volumes
            .patch(&wanted, &parameters, &Patch::Merge(patch))
            .await?;
        let bound = json!({"status": {"phase": "Bound"}});
        volumes
            .patch_status(&wanted, &parameters, &Patch::Merge(bound))
            .await?;
        let done = json!({"metadata": {"annotations": {"pv.kubernetes.io/bind-completed": "yes"}}});
        claims
            .patch(&claim.name_any(), &parameters, &Patch::Merge(done))
            .await?;
        let bound = json!({"status": {
            "phase": "Bound", "accessModes": spec.access_modes, "capacity": spec.capacity,
        }});
        claims
            .patch_status(&claim.name_any(), &parameters, &Patch::Merge(bound))
            .await?;
    }
    Ok(())
}

/// As the attacher names it.
pub fn attachment_name(handle: &str, driver: &str, node: &str) -> String {
    let hash = Sha256::digest(format!("{handle}{driver}{node}"));
    let hex: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("csi-{hex}")
}

async fn attach(client: &Client, namespace: &str, node: &str) -> kube::Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), namespace);
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    let drivers: Api<CSIDriver> = Api::all(client.clone());
    let attachments: Api<VolumeAttachment> = Api::all(client.clone());
    let mut names = BTreeSet::new();
    for pod in pods.list(&ListParams::default()).await? {
        let of = pod.name_any();
        let volumes = pod.spec.and_then(|spec| spec.volumes).unwrap_or_default();
        names.extend(volumes.into_iter().filter_map(|v| {
            let own = v.ephemeral.map(|_| format!("{of}-{}", v.name));
            own.or(v.persistent_volume_claim.map(|source| source.claim_name))
        }));
    }
    for name in names {
        let Some(claim) = claims.get_opt(&name).await? else {
            continue;
        };
        let Some(volume) = claim.spec.and_then(|spec| spec.volume_name) else {
            continue;
        };
        let Some(persistent) = volumes.get_opt(&volume).await? else {
            continue;
        };
        let Some(csi) = persistent.spec.and_then(|spec| spec.csi) else {
            continue;
        };
        let driver = drivers.get_opt(&csi.driver).await?;
        if driver.is_some_and(|driver| driver.spec.attach_required == Some(false)) {
            continue;
        }
        let name = attachment_name(&csi.volume_handle, &csi.driver, node);
        let there = attachments.get_opt(&name).await?;
        let is_attached = |a: &VolumeAttachment| a.status.as_ref().is_some_and(|s| s.attached);
        if there.as_ref().is_some_and(is_attached) {
            continue;
        }
        let attachment = json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "VolumeAttachment",
            "metadata": {"name": name},
            "spec": {"attacher": csi.driver, "nodeName": node,
                "source": {"persistentVolumeName": volume}},
        });
        let attachment = serde_json::from_value(attachment).expect("an attachment");
        if there.is_none() {
            attachments
                .create(&PostParams::default(), &attachment)
                .await?;
        }
        let attached = json!({"status": {"attached": true,
            "attachmentMetadata": {"devicePath": "/dev/fixture"}}});
        attachments
            .patch_status(&name, &PatchParams::default(), &Patch::Merge(attached))
            .await?;
    }
    Ok(())
}
