//! Parts of requests to a driver that describe a volume and its pod.

use k8s_openapi::api::core::v1::{Pod, SecretReference};
use serde_json::{Map, Value, json};

use super::Pairs;
use crate::core::volumes::{Csi, Remote, VolumeMode};
use crate::kuberuntime::sources::Resolved;
use crate::types::PodExt;
use crate::volumemanager::csi::client::NodeCapabilities;
use crate::volumemanager::csi::proto::{
    AccessMode, AccessType, Empty, Mode, MountVolume, VolumeCapability,
};
use crate::volumemanager::remote::RemoteError;

const TOKENS: &str = "csi.storage.k8s.io/serviceAccount.tokens";

/// Returns the use of the volume. `group` is set only for drivers that give the volume to the group themselves.
pub(super) fn capability(
    volume: &Remote,
    csi: &Csi,
    can: NodeCapabilities,
    group: Option<i64>,
) -> VolumeCapability {
    let access_type = match volume.mode {
        VolumeMode::Block => AccessType::Block(Empty {}),
        VolumeMode::Filesystem => AccessType::Mount(MountVolume {
            fs_type: csi.source.fs_type.clone().unwrap_or_default(),
            mount_flags: volume.mount_options.clone(),
            volume_mount_group: group.map(|group| group.to_string()).unwrap_or_default(),
        }),
    };
    let mode = access_mode(&csi.access_modes, can.single_node_multi_writer);
    VolumeCapability {
        access_type: Some(access_type),
        access_mode: Some(AccessMode { mode: mode as i32 }),
    }
}

/// Upstream goes by the first access mode alone, and so do drivers that are used to it.
fn access_mode(modes: &[String], single_node_multi_writer: bool) -> Mode {
    let first = modes.first().map_or("ReadWriteOnce", String::as_str);
    match (first, single_node_multi_writer) {
        ("ReadOnlyMany", _) => Mode::MultiNodeReaderOnly,
        ("ReadWriteMany", _) => Mode::MultiNodeMultiWriter,
        ("ReadWriteOncePod", true) => Mode::SingleNodeSingleWriter,
        ("ReadWriteOnce", true) => Mode::SingleNodeMultiWriter,
        ("ReadWriteOnce" | "ReadWriteOncePod", false) => Mode::SingleNodeWriter,
        _ => Mode::Unknown,
    }
}

/// Returns whether the agent gives the volume to the pod's group. Upstream: `supportsFSGroup`.
pub(super) fn wants_group(volume: &Remote, csi: &Csi, group: Option<i64>) -> bool {
    if group.is_none() || volume.read_only || volume.mode == VolumeMode::Block {
        return false;
    }
    match csi.fs_group_policy.as_str() {
        "None" => false,
        "File" => true,
        _ => {
            let typed = csi.source.fs_type.as_deref().is_some_and(|t| !t.is_empty());
            let mut modes = csi.access_modes.iter();
            let once = modes.any(|mode| mode == "ReadWriteOnce" || mode == "ReadWriteOncePod");
            typed && (csi.ephemeral || once)
        }
    }
}

/// Returns the information about the pod that a driver gets with `podInfoOnMount`.
pub(super) fn pod_info(pod: &Pod, ephemeral: bool) -> Pairs {
    let account = pod.spec_ref().service_account_name.clone();
    [
        ("csi.storage.k8s.io/pod.name", pod.name().to_owned()),
        (
            "csi.storage.k8s.io/pod.namespace",
            pod.namespace().to_owned(),
        ),
        ("csi.storage.k8s.io/pod.uid", pod.uid().to_string()),
        (
            "csi.storage.k8s.io/serviceAccount.name",
            account.unwrap_or_default(),
        ),
        ("csi.storage.k8s.io/ephemeral", ephemeral.to_string()),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value))
    .collect()
}

/// The pod's tokens for the driver, by audience; `None` when it asks for none.
pub(super) fn tokens(volume: &Resolved) -> Option<(String, String)> {
    if volume.tokens.is_empty() {
        return None;
    }
    let mut by_audience = Map::new();
    for (wanted, token) in &volume.tokens {
        let expires = jiff::Timestamp::from_second(token.expires_ms / 1000).unwrap_or_default();
        let token = json!({
            "token": token.token,
            "expirationTimestamp": expires.to_string(),
        });
        by_audience.insert(wanted.audience.clone(), token);
    }
    Some((TOKENS.to_owned(), Value::Object(by_audience).to_string()))
}

/// The content of a secret that the volume refers to.
pub(super) fn secrets(
    volume: &Resolved,
    reference: Option<&SecretReference>,
) -> Result<Pairs, RemoteError> {
    let Some(reference) = reference else {
        return Ok(Pairs::new());
    };
    let place = (
        reference.namespace.clone().unwrap_or_default(),
        reference.name.clone().unwrap_or_default(),
    );
    let named = || format!("{}/{}", place.0, place.1);
    let Some(secret) = volume.secrets.get(&place) else {
        return Err(RemoteError::Waiting(format!(
            "secret {} is not known yet",
            named()
        )));
    };
    let mut pairs = Pairs::new();
    for (key, value) in secret.data.iter().flatten() {
        let Ok(value) = String::from_utf8(value.0.clone()) else {
            return Err(RemoteError::Failed(format!(
                "key {key} of secret {} is not UTF-8: drivers are told text only",
                named()
            )));
        };
        pairs.insert(key.clone(), value);
    }
    Ok(pairs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_modes_are_what_the_driver_knows() {
        let mode = |modes: &[&str], multi| {
            let modes: Vec<String> = modes.iter().map(|m| (*m).to_owned()).collect();
            access_mode(&modes, multi)
        };
        for (modes, old, new) in [
            (&[][..], Mode::SingleNodeWriter, Mode::SingleNodeMultiWriter),
            (
                &["ReadWriteOnce", "ReadOnlyMany"],
                Mode::SingleNodeWriter,
                Mode::SingleNodeMultiWriter,
            ),
            (
                &["ReadWriteOncePod"],
                Mode::SingleNodeWriter,
                Mode::SingleNodeSingleWriter,
            ),
            (
                &["ReadOnlyMany"],
                Mode::MultiNodeReaderOnly,
                Mode::MultiNodeReaderOnly,
            ),
            (
                &["ReadWriteMany"],
                Mode::MultiNodeMultiWriter,
                Mode::MultiNodeMultiWriter,
            ),
        ] {
            assert_eq!(mode(modes, false), old, "{modes:?}");
            assert_eq!(mode(modes, true), new, "{modes:?}");
        }
    }

    #[test]
    fn the_group_is_given_as_the_policy_says() {
        let wants = |policy: &str, fs_type: &str, mode: &str, ephemeral: bool, read_only: bool| {
            let mut csi = Csi {
                fs_group_policy: policy.to_owned(),
                access_modes: vec![mode.to_owned()],
                ephemeral,
                ..Csi::default()
            };
            csi.source.fs_type = Some(fs_type.to_owned());
            let remote = Remote {
                name: "v".to_owned(),
                claim: None,
                mode: VolumeMode::Filesystem,
                read_only,
                mount_options: Vec::new(),
                unique_name: None,
                terms: crate::core::volumes::Terms::default(),
                source: crate::core::volumes::Source::Csi(Box::new(csi.clone())),
            };
            assert!(!wants_group(&remote, &csi, None), "nobody asks");
            wants_group(&remote, &csi, Some(7))
        };
        let with_type = "ReadWriteOnceWithFSType";
        for (policy, fs_type, mode, ephemeral, read_only, wanted) in [
            (with_type, "ext4", "ReadWriteOnce", false, false, true),
            (with_type, "ext4", "ReadWriteOncePod", false, false, true),
            (with_type, "", "ReadWriteOnce", false, false, false),
            (with_type, "ext4", "ReadWriteMany", false, false, false),
            (with_type, "ext4", "", true, false, true),
            (with_type, "ext4", "ReadWriteOnce", false, true, false),
            ("File", "", "ReadWriteMany", false, false, true),
            ("File", "", "ReadWriteMany", false, true, false),
            ("None", "ext4", "ReadWriteOnce", false, false, false),
        ] {
            assert_eq!(
                wants(policy, fs_type, mode, ephemeral, read_only),
                wanted,
                "{policy} {fs_type} {mode} ephemeral={ephemeral} read_only={read_only}"
            );
        }
    }
}
