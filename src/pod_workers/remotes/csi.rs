//! Volumes of CSI drivers: what the CSIDriver object says, and whether the volume is attached.

use k8s_openapi::api::core::v1::{
    CSIPersistentVolumeSource, CSIVolumeSource, Pod, SecretReference,
};
use k8s_openapi::api::storage::v1::{CSIDriverSpec, VolumeAttachment};

use super::{Asker, Draft};
use crate::core::volumes::{CSI, Csi, Remote, Source, Terms, VolumeMode, sha256_hex};
use crate::kuberuntime::node_context::NodeContext;
use crate::kuberuntime::sources::TokenRef;
use crate::kuberuntime::{security, selinux};
use crate::objects::volumes::attachment_name;
use crate::types::PodExt;

/// Key of the secret reference for node expansion.
pub(super) const EXPAND_SECRET: &str = "NodeExpandSecretRef";
/// Life of a driver's token when its CSIDriver does not say, in seconds.
const TOKEN_SECONDS: i64 = 3600;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Lifecycle {
    Persistent,
    Ephemeral,
}

impl Lifecycle {
    fn name(self) -> &'static str {
        match self {
            Self::Persistent => "Persistent",
            Self::Ephemeral => "Ephemeral",
        }
    }
}

/// Returns the spec of the CSIDriver object of `driver`; `None` if there is no such object.
async fn driver_of(
    asker: &Asker<'_>,
    pod: &Pod,
    driver: &str,
    wanted: Lifecycle,
) -> Result<Option<CSIDriverSpec>, String> {
    let found = asker.objects.csi_driver(&pod.uid(), driver).await;
    let found = found.map_err(|error| error.to_string())?;
    let spec = found.map(|driver| driver.spec.clone());
    let wanted_name = wanted.name();
    let Some(spec) = spec else {
        return match wanted {
            Lifecycle::Persistent => Ok(None),
            Lifecycle::Ephemeral => Err(format!(
                "volume mode \"{wanted_name}\" not supported by driver {driver} (no CSIDriver object)"
            )),
        };
    };
    let modes = spec.volume_lifecycle_modes.clone();
    let modes = modes.filter(|modes| !modes.is_empty());
    let modes = modes.unwrap_or_else(|| vec![Lifecycle::Persistent.name().to_owned()]);
    if modes.iter().any(|mode| mode == wanted_name) {
        return Ok(Some(spec));
    }
    Err(format!(
        "volume mode \"{wanted_name}\" not supported by driver {driver} (only supports {modes:?})"
    ))
}

fn describe(csi: &mut Csi, spec: &CSIDriverSpec) {
    csi.pod_info = spec.pod_info_on_mount.unwrap_or(false);
    csi.requires_republish = spec.requires_republish.unwrap_or(false);
    csi.selinux_mount = spec.se_linux_mount.unwrap_or(false);
    csi.tokens_in_secrets = spec.service_account_token_in_secrets.unwrap_or(false);
    if let Some(policy) = &spec.fs_group_policy {
        csi.fs_group_policy.clone_from(policy);
    }
}

/// Has storage mounted with the pod's SELinux label, for drivers that can and claims that one pod alone may use
/// (`ReadWriteOncePod`), as upstream's SELinuxMountReadWriteOncePod. What is not mounted so is labelled file by file
/// by the runtime.
///
/// # Errors
/// Text for users: containers of the pod want different labels.
pub(super) fn label(
    pod: &Pod,
    volume: &str,
    ctx: &NodeContext,
    remote: &mut Remote,
) -> Result<(), String> {
    let files = remote.mode == VolumeMode::Filesystem;
    let Source::Csi(csi) = &mut remote.source else {
        return Ok(());
    };
    let alone = csi.access_modes.len() == 1 && csi.access_modes[0] == "ReadWriteOncePod";
    let label = if csi.selinux_mount && alone && files {
        selinux::mount_label(pod, volume, ctx).map_err(|error| error.to_string())?
    } else {
        None
    };
    csi.selinux_mount = label.is_some();
    remote
        .mount_options
        .extend(label.map(|label| format!("context=\"{label}\"")));
    Ok(())
}

fn finish(mut draft: Draft, csi: Csi, spec: Option<&CSIDriverSpec>) -> Draft {
    let requests = spec.and_then(|spec| spec.token_requests.as_deref());
    for request in requests.unwrap_or_default() {
        draft.tokens.insert(TokenRef {
            audience: request.audience.clone(),
            expiration_seconds: request.expiration_seconds.unwrap_or(TOKEN_SECONDS),
        });
    }
    draft.remote.source = Source::Csi(Box::new(csi));
    draft
}

fn new_csi(pod: &Pod, source: CSIPersistentVolumeSource) -> Csi {
    Csi {
        source,
        fs_group_policy: "ReadWriteOnceWithFSType".to_owned(),
        fs_group: security::fs_group(pod).map(i64::from),
        ..Csi::default()
    }
}

/// A volume that a pod describes itself, and that lives as long as the pod.
pub(super) async fn inline(
    asker: &Asker<'_>,
    pod: &Pod,
    name: &str,
    source: &CSIVolumeSource,
) -> Result<Draft, String> {
    let spec = driver_of(asker, pod, &source.driver, Lifecycle::Ephemeral).await?;
    let secret = source.node_publish_secret_ref.as_ref();
    let secret = secret.map(|secret| SecretReference {
        name: Some(secret.name.clone()),
        namespace: Some(pod.namespace().to_owned()),
    });
    let mut csi = new_csi(
        pod,
        CSIPersistentVolumeSource {
            driver: source.driver.clone(),
            fs_type: source.fs_type.clone(),
            node_publish_secret_ref: secret.clone(),
            read_only: source.read_only,
            volume_attributes: source.volume_attributes.clone(),
            volume_handle: format!("csi-{}", sha256_hex(&[pod.uid().as_str(), name])),
            ..CSIPersistentVolumeSource::default()
        },
    );
    csi.ephemeral = true;
    if let Some(spec) = &spec {
        describe(&mut csi, spec);
    }
    let mut draft = Draft::of(Remote {
        name: name.to_owned(),
        claim: None,
        mode: VolumeMode::Filesystem,
        read_only: source.read_only.unwrap_or(false),
        mount_options: Vec::new(),
        unique_name: None,
        terms: Terms::default(),
        source: Source::Csi(Box::default()),
    });
    draft
        .secrets
        .extend(secret.map(|secret| ("NodePublishSecretRef", secret)));
    Ok(finish(draft, csi, spec.as_ref()))
}

/// A persistent volume; `remote` is all of it but its source.
pub(super) async fn persistent(
    asker: &Asker<'_>,
    pod: &Pod,
    mut remote: Remote,
    source: &CSIPersistentVolumeSource,
    access_modes: Vec<String>,
) -> Result<Draft, String> {
    let (driver, handle) = (&source.driver, &source.volume_handle);
    let spec = driver_of(asker, pod, driver, Lifecycle::Persistent).await?;
    let name = format!("{CSI}/{driver}^{handle}");
    let mut csi = new_csi(pod, source.clone());
    csi.access_modes = access_modes;
    if let Some(spec) = &spec {
        describe(&mut csi, spec);
    }
    let attaches = spec.as_ref().and_then(|spec| spec.attach_required);
    let attaches = attaches.unwrap_or(true);
    if attaches && asker.mounted {
        // It may be on its way out already; what is mounted stays.
        remote.unique_name = Some(name);
    } else if attaches {
        let id = attachment_name(handle, driver, asker.node_name);
        let attachment = asker.objects.volume_attachment(&pod.uid(), &id).await;
        let error = |why: String| {
            format!("volume {handle} has GET error for volume attachment {id}: {why}")
        };
        let attachment = attachment.map_err(|e| error(e.to_string()))?;
        let Some(attachment) = attachment else {
            return Err(error(format!(
                "volumeattachments.storage.k8s.io \"{id}\" not found; the attach/detach controller has not made it yet"
            )));
        };
        csi.publish_context = attached(&attachment, handle, driver, &id)?;
        remote.unique_name = Some(name);
    }
    let mut draft = Draft::of(remote);
    let secrets = [
        ("NodeStageSecretRef", &source.node_stage_secret_ref),
        ("NodePublishSecretRef", &source.node_publish_secret_ref),
        (EXPAND_SECRET, &source.node_expand_secret_ref),
    ];
    for (what, secret) in secrets {
        draft
            .secrets
            .extend(secret.clone().map(|secret| (what, secret)));
    }
    Ok(finish(draft, csi, spec.as_ref()))
}

/// Returns the attacher's metadata of an attached volume. Upstream: `verifyAttachmentStatus`.
fn attached(
    attachment: &VolumeAttachment,
    handle: &str,
    driver: &str,
    id: &str,
) -> Result<std::collections::BTreeMap<String, String>, String> {
    if attachment.metadata.deletion_timestamp.is_some() {
        return Err("volume attachment is being deleted".to_owned());
    }
    let status = attachment.status.clone().unwrap_or_default();
    if status.attached {
        return Ok(status.attachment_metadata.unwrap_or_default());
    }
    if let Some(error) = status.attach_error {
        let why = error.message.unwrap_or_default();
        return Err(format!("AttachVolume.Attach failed: {why}"));
    }
    Err(format!(
        "volume {handle} is not attached to this node yet: waiting for driver {driver} to attach it (VolumeAttachment {id})"
    ))
}
