//! What the caller must not do.

use std::collections::BTreeMap;
use std::path::Path;

use super::proto::{AccessType, VolumeCapability};
use super::server::{Code, Refused};
use super::{Call, CsiOptions};

/// Attributes that differ from one publishing to the next by design.
const TOKENS: &str = "csi.storage.k8s.io/serviceAccount.tokens";

/// Part of a call's record that its capability tells.
pub(super) fn note_capability(call: &mut Call, capability: Option<&VolumeCapability>) {
    let Some(capability) = capability else {
        return;
    };
    call.access_mode = capability.access_mode.map_or(0, |m| m.mode);
    match &capability.access_type {
        Some(AccessType::Block(_)) => "block".clone_into(&mut call.fs_type),
        Some(AccessType::Mount(mount)) => {
            call.fs_type.clone_from(&mount.fs_type);
            call.mount_flags.clone_from(&mount.mount_flags);
            call.mount_group.clone_from(&mount.volume_mount_group);
        }
        None => {}
    }
}

/// What must be the same when a call is made again.
pub(super) fn arguments(call: &Call) -> String {
    let same = |map: &BTreeMap<String, String>| {
        let mut map = map.clone();
        map.remove(TOKENS);
        format!("{map:?}")
    };
    format!(
        "fs={} flags={:?} group={} mode={} ro={} staging={} publish={} volume={}",
        call.fs_type,
        call.mount_flags,
        call.mount_group,
        call.access_mode,
        call.readonly,
        call.staging,
        same(&call.publish_context),
        same(&call.volume_context)
    )
}

/// What every call with a volume must have.
pub(super) fn check(options: &CsiOptions, call: &Call) -> Result<(), Refused> {
    if call.volume.is_empty() {
        return Err(violation(Code::InvalidArgument, "no volume id"));
    }
    if call.volume.starts_with("missing") && !call.rpc.starts_with("NodeUn") {
        return Err(Refused::new(
            Code::NotFound,
            format!("volume {} does not exist", call.volume),
        ));
    }
    for path in [&call.staging, &call.target] {
        if !path.is_empty() {
            check_path(options, Path::new(path))?;
        }
    }
    let needs_capability = ["NodeStageVolume", "NodePublishVolume"].contains(&call.rpc.as_str());
    if needs_capability && call.access_mode == 0 {
        return Err(violation(Code::InvalidArgument, "no access mode"));
    }
    if needs_capability && options.needs_secrets && call.secrets.is_empty() {
        return Err(violation(Code::InvalidArgument, "secrets are missing"));
    }
    if !options.capabilities.mount_group && !call.mount_group.is_empty() {
        let text = "a mount group without VOLUME_MOUNT_GROUP";
        return Err(violation(Code::InvalidArgument, text));
    }
    if !options.capabilities.single_node_multi_writer && call.access_mode > 5 {
        let text = "an access mode that needs SINGLE_NODE_MULTI_WRITER";
        return Err(violation(Code::InvalidArgument, text));
    }
    Ok(())
}

fn check_path(options: &CsiOptions, path: &Path) -> Result<(), Refused> {
    let dotted = path
        .components()
        .any(|c| matches!(c, std::path::Component::ParentDir));
    if !path.is_absolute() || dotted || !path.starts_with(&options.root) {
        let text = format!("the path {} is not below the kubelet's", path.display());
        return Err(violation(Code::InvalidArgument, text));
    }
    Ok(())
}

/// A refusal that is the caller's fault.
pub(super) fn violation(code: Code, text: impl Into<String>) -> Refused {
    let mut refused = Refused::new(code, text);
    refused.violation = true;
    refused
}
