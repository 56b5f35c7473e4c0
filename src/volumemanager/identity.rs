//! Reconstructs volumes from their files on disk alone, in the layout that all kubelets share. Upstream:
//! `ConstructVolumeSpec` of the plugins.
//!
//! The mounts of a CSI driver have a file beside them that names driver and volume. An NFS mount names its export.
//! Unmounting needs no more. Disks have no such file: only the pods that use them can identify them.

use std::path::Path;

use k8s_openapi::api::core::v1::{CSIPersistentVolumeSource, NFSVolumeSource};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::is_component;
use super::mounts::Table;
use super::takeover::Trace;
use crate::core::volumes::keys;
use crate::core::volumes::{CSI, Csi, NFS, Remote, Source, Terms, VolumeMode};

const DATA: &str = "vol_data.json";
/// A file larger than this is none of those that kubelets write.
const MOST: u64 = 64 * 1024;

/// File that kubelets write beside a driver's mount.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Data {
    pub(super) driver_name: String,
    pub(super) volume_handle: String,
    #[serde(default, rename = "specVolID")]
    volume: String,
    #[serde(default)]
    volume_lifecycle_mode: String,
    #[serde(default)]
    attachment_id: Option<String>,
}

impl Data {
    fn is_ephemeral(&self) -> bool {
        self.volume_lifecycle_mode == "Ephemeral"
    }

    /// Returns the volume that the file describes, as far as the disk shows it.
    fn remote(&self, name: &str, mode: VolumeMode) -> Option<Remote> {
        if !is_component(&self.driver_name) || self.volume_handle.is_empty() {
            return None;
        }
        let unique = format!("{CSI}/{}^{}", self.driver_name, self.volume_handle);
        Some(Remote {
            name: name.to_owned(),
            claim: None,
            mode,
            read_only: false,
            mount_options: Vec::new(),
            terms: Terms::default(),
            // Whether it is attached is not told; a name too many holds up nothing once it is gone.
            unique_name: (!self.is_ephemeral()).then_some(unique),
            source: Source::Csi(Box::new(Csi {
                source: CSIPersistentVolumeSource {
                    driver: self.driver_name.clone(),
                    volume_handle: self.volume_handle.clone(),
                    ..CSIPersistentVolumeSource::default()
                },
                ephemeral: self.is_ephemeral(),
                fs_group_policy: "None".to_owned(),
                ..Csi::default()
            })),
        })
    }
}

/// The data beside a mount point, the agent's own directory; `None` when it is not there or is none.
fn beside(at: &Path) -> Option<Data> {
    let path = at.parent()?.join(DATA);
    let found = std::fs::symlink_metadata(&path).ok()?;
    if !found.is_file() || found.len() > MOST {
        return None;
    }
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

/// Returns whether a data file exists beside a mount point.
pub(super) fn has_data(at: &Path) -> bool {
    let path = at.parent().map(|dir| dir.join(DATA));
    path.is_some_and(|path| std::fs::symlink_metadata(path).is_ok())
}

/// The data of a volume of a pod that lies at `path`.
pub(super) fn data_of(root: &Path, path: &Path, name: &str, mode: VolumeMode) -> Option<Data> {
    match mode {
        VolumeMode::Filesystem => beside(path),
        VolumeMode::Block => {
            let devices = root.join("plugins/kubernetes.io/csi/volumeDevices");
            beside(&devices.join(name).join("data").join("dev"))
        }
    }
}

/// The volume that left a trace, if it is surely one of ours; without what only its pod knows.
pub(super) fn of(root: &Path, trace: &Trace, table: &Table) -> Option<Remote> {
    let plugin = trace.plugin.as_str();
    let remote = match plugin {
        CSI => {
            let data = data_of(root, &trace.path, &trace.name, trace.mode)?;
            (data.volume == trace.name).then_some(())?;
            data.remote(&trace.name, trace.mode)?
        }
        NFS if trace.mode == VolumeMode::Filesystem => {
            let mount = table.at(&trace.path).ok()??;
            mount.fstype.starts_with("nfs").then_some(())?;
            let (server, path) = mount.source.split_once(":/")?;
            let server = server.trim_start_matches('[').trim_end_matches(']');
            Remote {
                name: trace.name.clone(),
                claim: None,
                mode: VolumeMode::Filesystem,
                read_only: false,
                mount_options: Vec::new(),
                terms: Terms::default(),
                unique_name: None,
                source: Source::Nfs(NFSVolumeSource {
                    path: format!("/{path}"),
                    server: server.to_owned(),
                    read_only: None,
                }),
            }
        }
        _ => return None,
    };
    Some(remote)
}

/// The storage that a CSI driver has staged at `at`, if it is surely that.
pub(super) fn device_at(root: &Path, at: &Path) -> Option<Remote> {
    let data = beside(at)?;
    let staging = root
        .join("plugins")
        .join(CSI)
        .join(&data.driver_name)
        .join(keys::hex(&Sha256::digest(&data.volume_handle)))
        .join("globalmount");
    (staging == at).then_some(())?;
    data.remote("", VolumeMode::Filesystem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_upstream_writes_is_read() {
        let text = r#"{"attachmentID":"csi-1","driverName":"d.example","nodeName":"n","specVolID":"pv",
            "volumeHandle":"h","volumeLifecycleMode":"Persistent","seLinuxMountContext":""}"#;
        let data: Data = serde_json::from_str(text).unwrap();
        let remote = data.remote("pv", VolumeMode::Filesystem).unwrap();
        assert_eq!(remote.device().as_deref(), Some("d.example/h"));
        assert_eq!(
            remote.unique_name.as_deref(),
            Some("kubernetes.io/csi/d.example^h")
        );
        let inline = text.replace("Persistent", "Ephemeral");
        let data: Data = serde_json::from_str(&inline).unwrap();
        let remote = data.remote("v", VolumeMode::Filesystem).unwrap();
        assert_eq!((remote.device(), remote.unique_name), (None, None));
        let climbs = text.replace("d.example", "../x");
        let data: Data = serde_json::from_str(&climbs).unwrap();
        assert_eq!(data.remote("pv", VolumeMode::Filesystem), None);
    }

    #[test]
    fn what_lies_elsewhere_than_it_says_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let data = r#"{"driverName":"d.example","volumeHandle":"h"}"#;
        let hash = keys::hex(&Sha256::digest("h"));
        for (at, is_it) in [(hash.as_str(), true), ("other", false)] {
            let at = dir
                .path()
                .join("plugins/kubernetes.io/csi/d.example")
                .join(at);
            std::fs::create_dir_all(&at).unwrap();
            std::fs::write(at.join(DATA), data).unwrap();
            let found = device_at(dir.path(), &at.join("globalmount"));
            assert_eq!(found.is_some(), is_it);
        }
    }
}
