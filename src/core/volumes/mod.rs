//! Volumes as plain data: what is to be mounted, as it was resolved, and what is to happen next.
//!
//! A [`Remote`] is everything that mounting and unmounting a volume takes, without secrets: it is recorded
//! before the first step, so that a volume is torn down by its record alone, whatever became of its claim,
//! its pod or its driver in the meantime.

pub mod backoff;
pub mod growth;
pub mod keys;
pub mod known;
pub mod planner;
pub mod records;

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{
    CSIPersistentVolumeSource, ISCSIPersistentVolumeSource, LocalVolumeSource, NFSVolumeSource,
    PersistentVolume, Pod, Volume,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::types::PodExt;

/// Name of the CSI plugin, in records, paths and metrics.
pub const CSI: &str = "kubernetes.io/csi";
/// Name of the NFS plugin.
pub const NFS: &str = "kubernetes.io/nfs";
/// Name of the iSCSI plugin.
pub const ISCSI: &str = "kubernetes.io/iscsi";
/// Name of the plugin for disks and directories of this node.
pub const LOCAL: &str = "kubernetes.io/local-volume";
/// Name of the plugin for persistent volumes that are paths of this node.
pub const HOST_PATH: &str = "kubernetes.io/host-path";

/// Form in which containers get the volume: files or a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum VolumeMode {
    /// A mounted file system.
    #[default]
    Filesystem,
    /// A raw device.
    Block,
}

/// A volume whose storage does not lie in its pod's directory, resolved through its claim if it has one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Remote {
    /// Its directory below `volumes/<plugin>`: the persistent volume's name, or for an inline one the name
    /// the pod gives it. A valid path component.
    pub name: String,
    /// `namespace/name` of the claim; `None` for an inline volume.
    pub claim: Option<String>,
    /// Files or a device.
    pub mode: VolumeMode,
    /// True if no container may write, by the volume, its claim or its source.
    pub read_only: bool,
    /// `spec.mountOptions` of the persistent volume.
    pub mount_options: Vec<String>,
    /// Name on the node object while in use (`status.volumesInUse`); `None` for volumes that need no attaching.
    pub unique_name: Option<String>,
    /// Further requirements of the persistent volume.
    #[serde(default)]
    pub terms: Terms,
    /// Place of the storage.
    pub source: Source,
}

/// Requirements of a persistent volume for its users.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Terms {
    /// The group that its files belong to: containers of the pod get it (annotation `pv.beta.kubernetes.io/gid`).
    pub gid: Option<i64>,
    /// One pod at a time: its only access mode is `ReadWriteOncePod`.
    pub alone: bool,
}

impl Terms {
    /// Annotation of a persistent volume that names the group of its files.
    pub const GID: &str = "pv.beta.kubernetes.io/gid";
    /// Annotation of a volume with mount options, separated by commas, which count instead of those of its spec. CSI
    /// volumes have none.
    pub const MOUNT_OPTIONS: &str = "volume.beta.kubernetes.io/mount-options";

    /// Of a persistent volume. A group that is none counts as none.
    pub fn of(volume: &PersistentVolume) -> Self {
        let annotations = volume.metadata.annotations.as_ref();
        let gid = annotations.and_then(|all| all.get(Self::GID));
        let gid = gid.and_then(|text| text.parse().ok());
        let modes = volume.spec.as_ref().and_then(|s| s.access_modes.as_deref());
        Self {
            gid: gid.filter(|gid| (0..=i64::from(i32::MAX)).contains(gid)),
            alone: matches!(modes, Some([only]) if only == "ReadWriteOncePod"),
        }
    }
}

/// Groups that the containers of a pod get for its volumes, beyond those the pod itself asks for. Upstream:
/// `GetExtraSupplementalGroupsForPod`.
pub fn extra_groups<'a>(pod: &Pod, volumes: impl Iterator<Item = &'a Remote>) -> Vec<i64> {
    let context = pod.spec_ref().security_context.as_ref();
    let own = context.and_then(|context| context.supplemental_groups.as_deref());
    let own = own.unwrap_or_default();
    let wanted: BTreeSet<i64> = volumes.filter_map(|volume| volume.terms.gid).collect();
    (wanted.into_iter())
        .filter(|gid| !own.contains(gid))
        .collect()
}

/// Place of the storage of a volume.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Source {
    /// A CSI driver's.
    Csi(Box<Csi>),
    /// An export.
    Nfs(NFSVolumeSource),
    /// A LUN.
    Iscsi(Box<ISCSIPersistentVolumeSource>),
    /// A disk or directory of this node.
    Local(LocalVolumeSource),
    /// A path of this node.
    HostPath {
        /// The path.
        path: String,
        /// `hostPath.type`.
        type_: String,
    },
}

/// A CSI driver's volume, with what its CSIDriver object and the attacher said.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Csi {
    /// As in the persistent volume; of an ephemeral inline volume: made from the pod's, with a handle of its own.
    pub source: CSIPersistentVolumeSource,
    /// An inline volume that lives as long as its pod.
    pub ephemeral: bool,
    /// `status.attachmentMetadata` of the VolumeAttachment.
    pub publish_context: std::collections::BTreeMap<String, String>,
    /// Access modes of the persistent volume, as `ReadWriteOnce`.
    pub access_modes: Vec<String>,
    /// `fsGroupPolicy` of the CSIDriver: `ReadWriteOnceWithFSType`, `File` or `None`.
    pub fs_group_policy: String,
    /// `podInfoOnMount` of the CSIDriver.
    pub pod_info: bool,
    /// `requiresRepublish` of the CSIDriver.
    pub requires_republish: bool,
    /// It is mounted with the pod's SELinux label: `seLinuxMount` of the CSIDriver, and a claim of one pod alone.
    pub selinux_mount: bool,
    /// `serviceAccountTokenInSecrets` of the CSIDriver.
    #[serde(default)]
    pub tokens_in_secrets: bool,
    /// `fsGroup` of the pod that is to get it; for drivers that see to it themselves.
    #[serde(default)]
    pub fs_group: Option<i64>,
}

impl Remote {
    /// The plugin that mounts it.
    pub fn plugin(&self) -> &'static str {
        match &self.source {
            Source::Csi(_) => CSI,
            Source::Nfs(_) => NFS,
            Source::Iscsi(_) => ISCSI,
            Source::Local(_) => LOCAL,
            Source::HostPath { .. } => HOST_PATH,
        }
    }

    /// Returns the identity of storage that is prepared once for all pods of the node: `<driver>/<handle>` or the like;
    /// `None` when each pod's mount stands for itself.
    pub fn device(&self) -> Option<String> {
        match &self.source {
            Source::Csi(csi) if !csi.ephemeral => Some(format!(
                "{}/{}",
                csi.source.driver, csi.source.volume_handle
            )),
            Source::Iscsi(source) => Some(format!(
                "{}/{}/{}",
                source.target_portal, source.iqn, source.lun
            )),
            Source::Local(source) => Some(source.path.clone()),
            Source::Csi(_) | Source::Nfs(_) | Source::HostPath { .. } => None,
        }
    }
}

/// Name of the claim a volume stands for, a generic ephemeral volume's included.
pub fn claim_of(pod: &Pod, volume: &Volume) -> Option<String> {
    if let Some(claim) = &volume.persistent_volume_claim {
        return Some(claim.claim_name.clone());
    }
    let generic = volume.ephemeral.is_some();
    generic.then(|| format!("{}-{}", pod.name(), volume.name))
}

/// SHA-256 of the parts one after the other, in hexadecimal digits.
pub fn sha256_hex(parts: &[&str]) -> String {
    let mut digest = Sha256::new();
    for part in parts {
        digest.update(part);
    }
    let digest: [u8; 32] = digest.finalize().into();
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_a_persistent_volume_asks_for() {
        let terms = |gid: Option<&str>, modes: &[&str]| {
            let volume = json!({"metadata": {}, "spec": {"accessModes": modes}});
            let mut volume: PersistentVolume = serde_json::from_value(volume).unwrap();
            let annotation = gid.map(|gid| (Terms::GID.to_owned(), gid.to_owned()));
            volume.metadata.annotations = annotation.map(|a| [a].into());
            let terms = Terms::of(&volume);
            (terms.gid, terms.alone)
        };
        assert_eq!(
            terms(Some("5123"), &["ReadWriteOncePod"]),
            (Some(5123), true)
        );
        for bad in ["", "x", "-1", "4294967296", "1 "] {
            assert_eq!(terms(Some(bad), &["ReadWriteOnce"]), (None, false), "{bad}");
        }
        assert_eq!(
            terms(None, &["ReadWriteOncePod", "ReadOnlyMany"]),
            (None, false),
            "nobody knows which one the pod uses"
        );
        assert_eq!(Terms::of(&PersistentVolume::default()), Terms::default());
    }

    #[test]
    fn records_without_terms_are_read() {
        let volume = json!({"name": "v", "claim": null, "mode": "Filesystem", "read_only": false, "mount_options": [],
            "unique_name": null, "source": {"Nfs": {"path": "/", "server": "s"}}});
        let volume: Remote = serde_json::from_value(volume).unwrap();
        assert_eq!(volume.terms, Terms::default());
    }

    #[test]
    fn a_pod_gets_the_groups_of_its_volumes_once() {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p"},
            "spec": {"containers": [], "securityContext": {"supplementalGroups": [7, 8]}},
        }))
        .unwrap();
        let volume = |gid| Remote {
            name: "v".to_owned(),
            claim: None,
            mode: VolumeMode::Filesystem,
            read_only: false,
            mount_options: Vec::new(),
            unique_name: None,
            terms: Terms { gid, alone: false },
            source: Source::Nfs(NFSVolumeSource::default()),
        };
        let volumes = [Some(9), None, Some(7), Some(9), Some(1)].map(volume);
        assert_eq!(extra_groups(&pod, volumes.iter()), [1, 9]);
    }

    #[test]
    fn each_kind_of_storage_has_its_plugin_and_its_device() {
        let remote = |source| Remote {
            source,
            ..crate::core::testkit::export()
        };
        let csi = |ephemeral| {
            let source = json!({"driver": "d.example", "volumeHandle": "h1"});
            Source::Csi(Box::new(Csi {
                source: serde_json::from_value(source).unwrap(),
                ephemeral,
                ..Csi::default()
            }))
        };
        let other = |source| serde_json::from_value(source).unwrap();
        for (source, plugin, device) in [
            (csi(false), CSI, Some("d.example/h1")),
            (csi(true), CSI, None),
            (
                other(json!({"Nfs": {"path": "/", "server": "s"}})),
                NFS,
                None,
            ),
            (
                other(json!({"Iscsi": {"targetPortal": "p:1", "iqn": "iqn.x", "lun": 2}})),
                ISCSI,
                Some("p:1/iqn.x/2"),
            ),
            (
                other(json!({"Local": {"path": "/disk"}})),
                LOCAL,
                Some("/disk"),
            ),
            (
                other(json!({"HostPath": {"path": "/", "type_": ""}})),
                HOST_PATH,
                None,
            ),
        ] {
            let volume = remote(source);
            assert_eq!(volume.plugin(), plugin, "{volume:?}");
            assert_eq!(volume.device().as_deref(), device, "{volume:?}");
        }
    }
}
