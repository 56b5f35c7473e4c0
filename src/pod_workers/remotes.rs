//! Remote volumes: from the volume of a pod through its claim and persistent volume to what is
//! to be mounted, or to the reason why that is not known yet. Upstream: `desiredStateOfWorldPopulator`.
//!
//! In: a pod, and the objects as they can be had. Out: a [`Resolved`] or a text for users, per volume. Nothing is
//! mounted here, and nothing waits longer than the objects do: the caller is notified when one of them changes.
//!
//! **Invariant:** a volume that is mounted stays resolved, whatever becomes of its claim: a pod that runs is not
//! disturbed.

mod csi;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::future::join_all;
use k8s_openapi::api::core::v1::{
    ISCSIPersistentVolumeSource, ISCSIVolumeSource, PersistentVolume, PersistentVolumeClaim, Pod,
    Secret, SecretReference, Volume,
};
use tracing::debug;

use super::WorkerContext;
use crate::core::admission;
use crate::core::state::{VolumePhase, VolumeRecord, child_key};
use crate::core::volumes::growth::{self, Sizes};
use crate::core::volumes::{Remote, Source, Terms, VolumeMode, claim_of, records};
use crate::kuberuntime::node_context::NodeContext;
use crate::kuberuntime::sources::{
    PodToken, Resolved, TokenRef, mounted_volumes, volumes_as_devices, volumes_as_files,
};
use crate::node_object::NodeObject;
use crate::objects::Objects;
use crate::store::Store;
use crate::types::{Clock, PodExt, PodUid};

/// Inputs for resolving volumes.
pub(super) struct Asker<'a> {
    pub(super) objects: &'a Objects,
    pub(super) store: &'a Store,
    pub(super) clock: &'a dyn Clock,
    pub(super) node_object: &'a NodeObject,
    pub(super) node_name: &'a str,
    pub(super) node: &'a NodeContext,
    /// It is about volumes that are mounted: what only mounting takes may be missing.
    pub(super) mounted: bool,
}

impl<'a> Asker<'a> {
    pub(super) fn of(context: &'a WorkerContext) -> Self {
        Self {
            objects: &context.content.objects,
            store: &context.store,
            clock: &*context.clock,
            node_object: &context.content.node_object,
            node_name: &context.node.node_name,
            node: &context.node,
            mounted: false,
        }
    }
}

/// A volume in the making.
struct Draft {
    remote: Remote,
    /// Secrets it refers to, by what they are for.
    secrets: Vec<(&'static str, SecretReference)>,
    tokens: BTreeSet<TokenRef>,
    capacity: Option<Sizes>,
}

impl Draft {
    fn of(remote: Remote) -> Self {
        Self {
            remote,
            secrets: Vec::new(),
            tokens: BTreeSet::new(),
            capacity: None,
        }
    }
}

/// Resolves the remote volumes that a container uses. Waits as [`Objects`] does.
pub(super) async fn find(
    asker: &Asker<'_>,
    pod: &Pod,
) -> BTreeMap<String, Result<Arc<Resolved>, String>> {
    let used = mounted_volumes(pod);
    let volumes = pod.spec_ref().volumes.iter().flatten();
    let wanted = volumes.filter(|v| used.contains(v.name.as_str()) && is_remote(v));
    let wanted: Vec<&Volume> = wanted.collect();
    let uid = pod.uid();
    if (wanted.iter()).any(|volume| mounted(asker, &uid, &volume.name).is_none()) {
        asker.objects.refresh(&uid);
    }
    let found = join_all(wanted.into_iter().map(|volume| async {
        let found = one(asker, pod, volume).await;
        (volume.name.clone(), found.map(Arc::new))
    }));
    let found: BTreeMap<_, _> = found.await.into_iter().collect();
    let is_whole = |found: &Arc<Resolved>| found.missing.is_none();
    if !found.values().all(|one| one.as_ref().is_ok_and(is_whole)) {
        asker.objects.doubt(&uid);
    }
    found
}

/// Resolves the remote volumes that a pod's containers use, for a pod that already has them mounted. Requests neither
/// secrets nor an attachment. Waits as [`Objects`] does.
pub(super) async fn identify(
    asker: &Asker<'_>,
    pod: &Pod,
) -> BTreeMap<String, Result<Remote, String>> {
    let used = mounted_volumes(pod);
    let volumes = pod.spec_ref().volumes.iter().flatten();
    let wanted = volumes.filter(|v| used.contains(v.name.as_str()) && is_remote(v));
    let found = join_all(wanted.map(|volume| async {
        let mut found = draft(asker, pod, volume, None).await.map(|d| d.remote);
        if let Ok(remote) = &mut found
            && let Err(why) = csi::label(pod, &volume.name, asker.node, remote)
        {
            debug!(pod = %pod.uid(), volume = volume.name, why, "a mounted volume has no label");
        }
        (volume.name.clone(), found)
    }));
    let found: BTreeMap<_, _> = found.await.into_iter().collect();
    if found.values().any(Result::is_err) {
        asker.objects.doubt(&pod.uid());
    }
    found
}

fn is_remote(volume: &Volume) -> bool {
    volume.persistent_volume_claim.is_some()
        || volume.ephemeral.is_some()
        || volume.csi.is_some()
        || volume.nfs.is_some()
        || volume.iscsi.is_some()
}

async fn one(asker: &Asker<'_>, pod: &Pod, volume: &Volume) -> Result<Resolved, String> {
    let mounted = mounted(asker, &pod.uid(), &volume.name);
    let found = match draft(asker, pod, volume, mounted.as_ref()).await {
        Ok(mut draft) => match csi::label(pod, &volume.name, asker.node, &mut draft.remote) {
            Ok(()) => finish(asker, pod, draft).await,
            Err(why) => Err(why),
        },
        Err(why) => Err(why),
    };
    match (found, mounted) {
        (Err(why), Some(remote)) => {
            debug!(pod = %pod.uid(), volume = volume.name, why, "cannot resolve a mounted volume, keeping it as it was mounted");
            let missing = takes_more(&remote).then_some(why);
            Ok(Resolved {
                remote,
                secrets: BTreeMap::new(),
                tokens: BTreeMap::new(),
                capacity: None,
                missing,
            })
        }
        // Another claim of that name, or another volume of that name: neither is what the pod has.
        (Ok(found), Some(remote)) if !is_same_storage(&found.remote, &remote) => {
            debug!(pod = %pod.uid(), volume = volume.name, leads_to = found.remote.name, "keeping the mounted storage of a volume");
            Ok(Resolved {
                remote,
                capacity: None,
                ..found
            })
        }
        (found, _) => found,
    }
}

/// Returns whether both are mounted at the same place from the same storage.
fn is_same_storage(one: &Remote, other: &Remote) -> bool {
    (one.plugin(), &one.name, one.mode, one.device())
        == (other.plugin(), &other.name, other.mode, other.device())
}

/// The volume as it was mounted since the machine was started; `None` when it was not.
fn mounted(asker: &Asker<'_>, uid: &PodUid, name: &str) -> Option<Remote> {
    let key = child_key(uid, name);
    let state = asker.store.snapshot();
    let record = state.record::<VolumeRecord>(&key)?;
    let now = asker.clock.now().boot;
    if record.phase != VolumePhase::Mounted || record.at.boot != now {
        return None;
    }
    records::remote(&state, &key).map(Arc::unwrap_or_clone)
}

/// Returns whether mounting a volume takes secrets or tokens, which are not on record.
fn takes_more(remote: &Remote) -> bool {
    match &remote.source {
        Source::Csi(csi) => {
            let source = &csi.source;
            csi.requires_republish
                || csi.tokens_in_secrets
                || source.node_publish_secret_ref.is_some()
                || source.node_stage_secret_ref.is_some()
        }
        Source::Iscsi(iscsi) => iscsi.secret_ref.is_some(),
        Source::Nfs(_) | Source::Local(_) | Source::HostPath { .. } => false,
    }
}

async fn draft(
    asker: &Asker<'_>,
    pod: &Pod,
    volume: &Volume,
    mounted: Option<&Remote>,
) -> Result<Draft, String> {
    let inline = |read_only: Option<bool>, source: Source| Remote {
        name: volume.name.clone(),
        claim: None,
        mode: VolumeMode::Filesystem,
        read_only: read_only.unwrap_or(false),
        mount_options: Vec::new(),
        unique_name: None,
        terms: Terms::default(),
        source,
    };
    if let Some(nfs) = &volume.nfs {
        let remote = inline(nfs.read_only, Source::Nfs(nfs.clone()));
        return Ok(Draft::of(remote));
    }
    if let Some(iscsi) = &volume.iscsi {
        let source = iscsi_source(iscsi, pod.namespace());
        let secret = source.secret_ref.clone();
        let mut draft = Draft::of(inline(iscsi.read_only, Source::Iscsi(Box::new(source))));
        // Nobody attaches for a static pod, and it waits for no API server.
        draft.remote.unique_name = iscsi_name(&draft.remote.source).filter(|_| !pod.is_static());
        draft.secrets.extend(secret.map(|s| ("secretRef", s)));
        return Ok(draft);
    }
    if let Some(source) = &volume.csi {
        return csi::inline(asker, pod, &volume.name, source).await;
    }
    let Some(claim) = claim_of(pod, volume) else {
        return Err("its kind is not one that this node mounts".to_owned());
    };
    if pod.is_static() {
        return Err(format!(
            "a static pod cannot use claim {}/{claim}: static pods depend on nothing that the API server knows; use \
             hostPath, nfs or iscsi instead",
            pod.namespace()
        ));
    }
    of_claim(asker, pod, volume, &claim, mounted).await
}

async fn of_claim(
    asker: &Asker<'_>,
    pod: &Pod,
    volume: &Volume,
    name: &str,
    mounted: Option<&Remote>,
) -> Result<Draft, String> {
    let (objects, namespace, uid) = (asker.objects, pod.namespace(), pod.uid());
    let process = |why: String| format!("error processing PVC {namespace}/{name}: {why}");
    let claim = match objects.claim(namespace, name).await {
        Ok(Some(claim)) => claim,
        Ok(None) => {
            return Err(process(format!(
                "failed to fetch PVC from API server: persistentvolumeclaims \"{name}\" not found"
            )));
        }
        Err(error) => {
            return Err(process(format!(
                "failed to fetch PVC from API server: {error}"
            )));
        }
    };
    let is_mounted = asker.mounted || mounted.is_some();
    let volume_name = bound_volume(&claim, is_mounted).map_err(process)?;
    if volume.ephemeral.is_some() && !is_owner(pod, &claim) {
        return Err(format!(
            "PVC {namespace}/{name} was not created for pod {namespace}/{} (pod is not owner)",
            pod.name()
        ));
    }
    let persistent = match objects.persistent_volume(&uid, volume_name).await {
        Ok(Some(volume)) => volume,
        Ok(None) => {
            return Err(process(format!(
                "failed to fetch PV {volume_name} from API server: persistentvolumes \"{volume_name}\" not found"
            )));
        }
        Err(error) => {
            return Err(process(format!(
                "failed to fetch PV {volume_name} from API server: {error}"
            )));
        }
    };
    check_bound(&persistent, volume_name, &claim).map_err(process)?;
    let mode = check_mode(&persistent, pod, &volume.name)?;
    if !asker.mounted {
        check_node(asker, &persistent)?;
    }
    let of_pod = volume.persistent_volume_claim.as_ref();
    let read_only = of_pod.and_then(|c| c.read_only).unwrap_or(false);
    let claimed = Claimed {
        claim: format!("{namespace}/{name}"),
        name: volume_name,
        mode,
        read_only,
    };
    let mut draft = of_persistent_volume(asker, pod, &claimed, &persistent).await?;
    let sizes = Sizes::of(&persistent, &claim);
    let behind = sizes.is_none_or(|sizes| sizes.volume <= sizes.claim);
    if behind && growth::is_expected(&claim) {
        // Its capacity comes first: what is known of it is from before.
        objects.doubt_volume(volume_name);
    }
    draft.capacity = sizes.filter(|_| !draft.remote.read_only);
    if !(draft.capacity).is_some_and(|sizes| sizes.shared || sizes.volume > sizes.claim) {
        draft
            .secrets
            .retain(|(what, _)| *what != csi::EXPAND_SECRET);
    }
    Ok(draft)
}

/// The name of the volume that a claim is bound to. A pod that has it mounted keeps it while the claim is on its
/// way out.
fn bound_volume(claim: &PersistentVolumeClaim, mounted: bool) -> Result<&str, String> {
    if claim.metadata.deletion_timestamp.is_some() && !mounted {
        return Err("PVC is being deleted".to_owned());
    }
    let phase = claim.status.as_ref().and_then(|s| s.phase.as_deref());
    if phase != Some("Bound") {
        return Err("PVC is not bound".to_owned());
    }
    let name = claim.spec.as_ref().and_then(|s| s.volume_name.as_deref());
    name.filter(|name| !name.is_empty())
        .ok_or_else(|| "PVC has empty pvc.Spec.VolumeName".to_owned())
}

fn is_owner(pod: &Pod, claim: &PersistentVolumeClaim) -> bool {
    let owners = claim.metadata.owner_references.iter().flatten();
    let mut controllers = owners.filter(|owner| owner.controller == Some(true));
    controllers.any(|owner| owner.uid == pod.uid().as_str())
}

/// Checks that a volume is bound to this very claim.
fn check_bound(
    volume: &PersistentVolume,
    name: &str,
    claim: &PersistentVolumeClaim,
) -> Result<(), String> {
    let bound = volume.spec.as_ref().and_then(|s| s.claim_ref.as_ref());
    let Some(bound) = bound else {
        return Err(format!(
            "found PV object {name} but it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim"
        ));
    };
    let (of_volume, of_claim) = (
        bound.uid.as_deref().unwrap_or_default(),
        claim.metadata.uid.as_deref().unwrap_or_default(),
    );
    if of_volume == of_claim {
        return Ok(());
    }
    Err(format!(
        "found PV object {name} but its pv.Spec.ClaimRef.UID {of_volume} does not point to claim.UID {of_claim}"
    ))
}

/// Containers get what the volume is.
fn check_mode(volume: &PersistentVolume, pod: &Pod, name: &str) -> Result<VolumeMode, String> {
    let told = volume.spec.as_ref().and_then(|s| s.volume_mode.as_deref());
    let mode = match told.unwrap_or("Filesystem") {
        "" | "Filesystem" => VolumeMode::Filesystem,
        "Block" => VolumeMode::Block,
        other => {
            return Err(format!(
                "volume {name} has volumeMode {other}, which is none"
            ));
        }
    };
    if mode == VolumeMode::Block && volumes_as_files(pod).contains(name) {
        return Err(format!(
            "volume {name} has volumeMode Block, but is specified in volumeMounts"
        ));
    }
    if mode == VolumeMode::Filesystem && volumes_as_devices(pod).contains(name) {
        return Err(format!(
            "volume {name} has volumeMode Filesystem, but is specified in volumeDevices"
        ));
    }
    Ok(mode)
}

/// Checks that the volume's node affinity allows this node. Upstream: `CheckNodeAffinity`.
fn check_node(asker: &Asker<'_>, volume: &PersistentVolume) -> Result<(), String> {
    let affinity = volume.spec.as_ref().and_then(|s| s.node_affinity.as_ref());
    let Some(required) = affinity.and_then(|a| a.required.as_ref()) else {
        return Ok(());
    };
    // Without the node's labels nobody can say; the scheduler has looked.
    let Some(node) = asker.node_object.get() else {
        return Ok(());
    };
    let labels = node.metadata.labels.clone().unwrap_or_default();
    if admission::selects(required, &labels, asker.node_name) {
        return Ok(());
    }
    Err(format!(
        "no matching NodeSelectorTerms: the nodeAffinity of the persistent volume excludes node {}",
        asker.node_name
    ))
}

/// Properties of a volume that its claim, and the pod's use of that claim, define.
struct Claimed<'a> {
    claim: String,
    name: &'a str,
    mode: VolumeMode,
    read_only: bool,
}

async fn of_persistent_volume(
    asker: &Asker<'_>,
    pod: &Pod,
    claimed: &Claimed<'_>,
    volume: &PersistentVolume,
) -> Result<Draft, String> {
    let name = claimed.name;
    if name == "." || name == ".." || name.contains(['/', '\0']) {
        return Err(format!("{name:?} cannot name a directory"));
    }
    let mut spec = volume.spec.clone().unwrap_or_default();
    if spec.csi.is_none() {
        spec.mount_options = annotated_options(volume).or(spec.mount_options);
    }
    let remote = |read_only: Option<bool>, source: Source| Remote {
        name: name.to_owned(),
        claim: Some(claimed.claim.clone()),
        mode: claimed.mode,
        read_only: claimed.read_only || read_only.unwrap_or(false),
        mount_options: spec.mount_options.clone().unwrap_or_default(),
        unique_name: None,
        terms: Terms::of(volume),
        source,
    };
    if let Some(source) = &spec.csi {
        let draft = remote(source.read_only, Source::Csi(Box::default()));
        let modes = spec.access_modes.clone().unwrap_or_default();
        return csi::persistent(asker, pod, draft, source, modes).await;
    }
    if let Some(nfs) = spec.nfs {
        return Ok(Draft::of(remote(nfs.read_only, Source::Nfs(nfs))));
    }
    if let Some(mut iscsi) = spec.iscsi {
        if let Some(secret) = &mut iscsi.secret_ref {
            let namespace = secret.namespace.take().filter(|n| !n.is_empty());
            secret.namespace = namespace.or_else(|| Some(pod.namespace().to_owned()));
        }
        let secret = iscsi.secret_ref.clone();
        let mut draft = Draft::of(remote(iscsi.read_only, Source::Iscsi(Box::new(iscsi))));
        draft.remote.unique_name = iscsi_name(&draft.remote.source);
        draft.secrets.extend(secret.map(|s| ("secretRef", s)));
        return Ok(draft);
    }
    if let Some(local) = spec.local {
        return Ok(Draft::of(remote(None, Source::Local(local))));
    }
    if let Some(host) = spec.host_path {
        let source = Source::HostPath {
            path: host.path,
            type_: host.type_.unwrap_or_default(),
        };
        return Ok(Draft::of(remote(None, source)));
    }
    Err(format!(
        "persistent volume {name} is of a kind that this node does not mount; use csi, nfs, iscsi, local or hostPath"
    ))
}

/// Returns the mount options of a volume's annotation, which was used before the spec had a field for them. Upstream:
/// `MountOptionFromSpec`.
fn annotated_options(volume: &PersistentVolume) -> Option<Vec<String>> {
    let annotations = volume.metadata.annotations.as_ref()?;
    let options = annotations.get(Terms::MOUNT_OPTIONS)?.split(',');
    let options = options.map(str::trim).filter(|option| !option.is_empty());
    Some(options.map(str::to_owned).collect())
}

fn iscsi_source(inline: &ISCSIVolumeSource, namespace: &str) -> ISCSIPersistentVolumeSource {
    let of = inline.clone();
    ISCSIPersistentVolumeSource {
        chap_auth_discovery: of.chap_auth_discovery,
        chap_auth_session: of.chap_auth_session,
        fs_type: of.fs_type,
        initiator_name: of.initiator_name,
        iqn: of.iqn,
        iscsi_interface: of.iscsi_interface,
        lun: of.lun,
        portals: of.portals,
        read_only: of.read_only,
        secret_ref: of.secret_ref.map(|secret| SecretReference {
            name: Some(secret.name),
            namespace: Some(namespace.to_owned()),
        }),
        target_portal: of.target_portal,
    }
}

fn iscsi_name(source: &Source) -> Option<String> {
    let Source::Iscsi(iscsi) = source else {
        return None;
    };
    Some(format!(
        "kubernetes.io/iscsi/{}:{}:{}",
        iscsi.target_portal, iscsi.iqn, iscsi.lun
    ))
}

/// Fetches what a volume refers to.
async fn finish(asker: &Asker<'_>, pod: &Pod, draft: Draft) -> Result<Resolved, String> {
    let mut secrets: BTreeMap<(String, String), Arc<Secret>> = BTreeMap::new();
    for (what, reference) in draft.secrets {
        let namespace = reference.namespace.unwrap_or_default();
        let name = reference.name.unwrap_or_default();
        let fetching = |why: String| format!("fetching {what} {namespace}/{name} failed: {why}");
        let found = asker
            .objects
            .volume_secret(&pod.uid(), &namespace, &name)
            .await;
        match found {
            Ok(Some(secret)) => {
                secrets.insert((namespace, name), secret);
            }
            Ok(None) => return Err(fetching(format!("secrets \"{name}\" not found"))),
            Err(error) => return Err(fetching(error.to_string())),
        }
    }
    let mut tokens = BTreeMap::new();
    for wanted in draft.tokens {
        let request = super::resolve::token_request(pod, &wanted);
        let token = asker.objects.token(pod, &request).await;
        let token = token
            .map_err(|error| format!("failed to get service account token attributes: {error}"))?;
        let token = PodToken {
            token: token.token,
            stale: token.stale,
            expires_ms: token.expires_ms,
        };
        tokens.insert(wanted, token);
    }
    Ok(Resolved {
        remote: draft.remote,
        secrets,
        tokens,
        capacity: draft.capacity,
        missing: None,
    })
}

#[cfg(test)]
mod tests;
