//! Claims, persistent volumes, attachments and CSI drivers.
//!
//! In: names, from pods and from one another. Out: the objects. The Node authorizer permits a node to get the claims of
//! its pods, the volumes of those and the attachments to itself one by one, and neither list nor watch them: they are
//! asked for again, soon while something is expected of them, seldom later on (`pace`), and at once when somebody
//! doubts what is known. CSI drivers are watched.
//!
//! **Invariant:** what a registered pod's volumes lead to is followed and on record like what its spec names, also
//! before anybody has resolved them in this run of the agent.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Secret};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use tokio::time::Instant;

use super::cache::{ObjectCell, Pause, Trouble, Watched, strip, take_answer};
use super::context::Context;
use super::pace::{Counted, Expected, FRESH, Pauses};
use super::refs::{self, Kind, ObjectKey};
use super::{Cells, Inner, ObjectError, Objects, PodEntry, Tables};
use crate::apiserver::ApiClient;
use crate::core::volumes::{Terms, growth};
use crate::objects::cache::lock;
use crate::types::PodUid;

/// Least pause between two questions, however much is doubted.
const APART: Duration = Duration::from_millis(500);
/// Deadline of a request.
const DEADLINE: Duration = Duration::from_secs(10);
/// A kind that is asked for object by object, because it may not be watched.
pub(super) trait Polled: Watched {
    /// Returns the change that is expected now.
    fn expected(&self) -> Expected;
}

impl Watched for PersistentVolumeClaim {
    const KIND: Kind = Kind::Claim;

    fn api(api: &ApiClient, namespace: &str) -> kube::Api<Self> {
        kube::Api::namespaced(api.kube(), namespace)
    }

    fn reduce(&mut self) {
        let metadata = &mut self.metadata;
        let deleted = metadata.deletion_timestamp.take();
        let owners = metadata.owner_references.take();
        strip(metadata);
        metadata.deletion_timestamp = deleted;
        metadata.owner_references = owners;
    }

    fn same(&self, other: &Self) -> bool {
        let deleted = |claim: &Self| claim.metadata.deletion_timestamp.is_some();
        self.metadata.uid == other.metadata.uid
            && deleted(self) == deleted(other)
            && self.spec == other.spec
            && self.status == other.status
    }
}

impl Polled for PersistentVolumeClaim {
    fn expected(&self) -> Expected {
        // One that is on its way out stays so until its last pod is gone. Who waits for another one doubts it.
        let phase = self.status.as_ref().and_then(|s| s.phase.as_deref());
        match phase == Some("Bound") {
            false => Expected::Soon,
            true if growth::is_expected(self) => Expected::Growth,
            true => Expected::Nothing,
        }
    }
}

impl Watched for PersistentVolume {
    const KIND: Kind = Kind::PersistentVolume;

    fn api(api: &ApiClient, _namespace: &str) -> kube::Api<Self> {
        kube::Api::all(api.kube())
    }

    fn reduce(&mut self) {
        let annotations = self.metadata.annotations.take();
        let mut kept = annotations.unwrap_or_default();
        kept.retain(|key, _| [Terms::GID, Terms::MOUNT_OPTIONS].contains(&&**key));
        strip(&mut self.metadata);
        self.metadata.annotations = (!kept.is_empty()).then_some(kept);
    }

    fn same(&self, other: &Self) -> bool {
        self.metadata.uid == other.metadata.uid
            && self.metadata.annotations == other.metadata.annotations
            && self.spec == other.spec
    }
}

impl Polled for PersistentVolume {
    fn expected(&self) -> Expected {
        let claim = self.spec.as_ref().and_then(|s| s.claim_ref.as_ref());
        match claim.is_some_and(|claim| claim.uid.is_some()) {
            false => Expected::Soon,
            true => Expected::Nothing,
        }
    }
}

impl Watched for VolumeAttachment {
    const KIND: Kind = Kind::VolumeAttachment;

    fn api(api: &ApiClient, _namespace: &str) -> kube::Api<Self> {
        kube::Api::all(api.kube())
    }

    fn reduce(&mut self) {
        let deleted = self.metadata.deletion_timestamp.take();
        strip(&mut self.metadata);
        self.metadata.deletion_timestamp = deleted;
    }

    fn same(&self, other: &Self) -> bool {
        self.metadata.uid == other.metadata.uid
            && self.spec == other.spec
            && self.status == other.status
    }
}

impl Polled for VolumeAttachment {
    fn expected(&self) -> Expected {
        let attached = self.status.as_ref().is_some_and(|status| status.attached);
        match attached && self.metadata.deletion_timestamp.is_none() {
            false => Expected::Soon,
            true => Expected::Nothing,
        }
    }
}

impl Watched for CSIDriver {
    const KIND: Kind = Kind::CsiDriver;

    fn api(api: &ApiClient, _namespace: &str) -> kube::Api<Self> {
        kube::Api::all(api.kube())
    }

    fn same(&self, other: &Self) -> bool {
        self.spec == other.spec
    }
}

/// Asks for one object until it is dropped.
pub(super) async fn poll_object<K: Polled>(
    ctx: Arc<Context>,
    key: ObjectKey,
    cell: Arc<ObjectCell<K>>,
    remember: bool,
) {
    let Some(api) = ctx.api.clone() else {
        return;
    };
    let objects = K::api(&api, &key.namespace);
    let mut pause = Pause::default();
    let mut pauses = Pauses::default();
    let _counted = (K::KIND == Kind::Claim).then(|| Counted::new(&ctx));
    loop {
        // Who asked for it before now is answered by this.
        cell.stale.notified().now_or_never();
        let asked = Instant::now();
        let answer = tokio::time::timeout(DEADLINE, objects.get_opt(&key.name)).await;
        let expected = match answer {
            Ok(Ok(object)) => {
                let expected = object.as_ref().map_or(Expected::Soon, Polled::expected);
                take_answer(&ctx, &key, &cell, object, remember);
                expected
            }
            Ok(Err(error)) => {
                let trouble = Trouble::of(&error);
                // The authoriser learns of pods, claims and attachments later than it is asked.
                let early = matches!(trouble, Trouble::Refused(_));
                cell.trouble(trouble);
                if !early {
                    pause.wait(&api).await;
                    continue;
                }
                Expected::Soon
            }
            Err(_) => {
                let why = format!("no answer within {} s", DEADLINE.as_secs());
                cell.trouble(Trouble::Unanswered(why));
                pause.wait(&api).await;
                continue;
            }
        };
        pause.reset();
        let claims = Counted::all(&ctx.claims);
        let wait = pauses.after(expected, K::KIND, claims, rand::random());
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            // Cancel-safe: a doubt that is taken leads to a question.
            () = async {
                tokio::time::sleep(APART).await;
                cell.doubt.notified().await;
            } => pauses.hurry(),
            () = async {
                cell.stale.notified().await;
                tokio::time::sleep_until(asked + FRESH).await;
            } => pauses.hurry(),
        }
    }
}

impl Objects {
    /// A claim; `None` when the API server says that there is none. Waits as [`Objects::config_map`] does.
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn claim(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<Arc<PersistentVolumeClaim>>, ObjectError> {
        let watch = self.cell(&ObjectKey::new(Kind::Claim, namespace, name));
        match &watch.cells {
            Cells::Claim(cell) => cell.read(&self.inner.ctx).await,
            _ => Ok(None),
        }
    }

    /// A persistent volume that a claim of the pod `of` leads to; `None` when the API server says that there is
    /// none. It is followed for as long as the pod is registered. Waits as [`Objects::config_map`] does.
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn persistent_volume(
        &self,
        of: &PodUid,
        name: &str,
    ) -> Result<Option<Arc<PersistentVolume>>, ObjectError> {
        let watch = self.follow(of, ObjectKey::new(Kind::PersistentVolume, "", name));
        match &watch.cells {
            Cells::PersistentVolume(cell) => cell.read(&self.inner.ctx).await,
            _ => Ok(None),
        }
    }

    /// A VolumeAttachment for a volume of the pod `of`, as [`Objects::persistent_volume`].
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn volume_attachment(
        &self,
        of: &PodUid,
        name: &str,
    ) -> Result<Option<Arc<VolumeAttachment>>, ObjectError> {
        let watch = self.follow(of, ObjectKey::new(Kind::VolumeAttachment, "", name));
        match &watch.cells {
            Cells::VolumeAttachment(cell) => cell.read(&self.inner.ctx).await,
            _ => Ok(None),
        }
    }

    /// The CSIDriver of a volume of the pod `of`, as [`Objects::persistent_volume`].
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn csi_driver(
        &self,
        of: &PodUid,
        name: &str,
    ) -> Result<Option<Arc<CSIDriver>>, ObjectError> {
        let watch = self.follow(of, ObjectKey::new(Kind::CsiDriver, "", name));
        match &watch.cells {
            Cells::CsiDriver(cell) => cell.read(&self.inner.ctx).await,
            _ => Ok(None),
        }
    }

    /// A secret that a volume of the pod `of` refers to, in whatever namespace, as [`Objects::persistent_volume`].
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn volume_secret(
        &self,
        of: &PodUid,
        namespace: &str,
        name: &str,
    ) -> Result<Option<Arc<Secret>>, ObjectError> {
        let watch = self.follow(of, ObjectKey::new(Kind::Secret, namespace, name));
        match &watch.cells {
            Cells::Secret(cell) => cell.read(&self.inner.ctx).await,
            _ => Ok(None),
        }
    }

    /// Requests a new read of a pod's claims, volumes and attachments, because the known ones do not fit together. The
    /// pod is notified if something differs. Never waits.
    pub fn doubt(&self, of: &PodUid) {
        let tables = lock(&self.inner.tables);
        let Some(entry) = tables.pods.get(of) else {
            return;
        };
        for key in entry.refs.iter().chain(&entry.found) {
            if let Some(watch) = tables.watches.get(key) {
                watch.cells.doubt();
            }
        }
    }

    /// The claims, volumes and attachments of a pod should be up to date: they are asked for again, each ten seconds after
    /// it was last. The pod is notified if something differs. Never waits.
    pub fn refresh(&self, of: &PodUid) {
        lock(&self.inner.tables).refresh(of);
    }

    /// More is expected of a persistent volume than is known: it is asked for again. Never waits.
    pub fn doubt_volume(&self, name: &str) {
        let key = ObjectKey::new(Kind::PersistentVolume, "", name);
        if let Some(watch) = lock(&self.inner.tables).watches.get(&key) {
            watch.cells.doubt();
        }
    }

    /// The watch of an object that a pod's volumes lead to; of a pod that is not registered a passing one.
    fn follow(&self, of: &PodUid, key: ObjectKey) -> super::Watch {
        let inner = &self.inner;
        let mut tables = lock(&inner.tables);
        inner.found(&mut tables, of, &key);
        let known = tables.watches.get(&key).map(super::Watch::cells);
        drop(tables);
        match known {
            Some(cells) => super::Watch { cells, task: None },
            None => inner.watch(&key, false),
        }
    }
}

impl Tables {
    /// See [`Objects::refresh`].
    pub(super) fn refresh(&self, of: &PodUid) {
        let Some(entry) = self.pods.get(of) else {
            return;
        };
        for key in entry.refs.iter().chain(&entry.found) {
            if let Some(watch) = self.watches.get(key) {
                watch.cells.refresh();
            }
        }
    }
}

impl Cells {
    pub(super) fn doubt(&self) {
        match self {
            Self::Claim(cell) => cell.doubt.notify_one(),
            Self::PersistentVolume(cell) => cell.doubt.notify_one(),
            Self::VolumeAttachment(cell) => cell.doubt.notify_one(),
            // The others are watched.
            _ => {}
        }
    }

    fn refresh(&self) {
        match self {
            Self::Claim(cell) => cell.stale.notify_one(),
            Self::PersistentVolume(cell) => cell.stale.notify_one(),
            Self::VolumeAttachment(cell) => cell.stale.notify_one(),
            // The others are watched.
            _ => {}
        }
    }
}

impl Inner {
    /// Notes that a registered pod's volumes lead to an object.
    fn found(&self, tables: &mut Tables, of: &PodUid, key: &ObjectKey) {
        let Some(entry) = tables.pods.get_mut(of) else {
            return;
        };
        if entry.refs.contains(key) || !entry.found.insert(key.clone()) {
            return;
        }
        let users = tables.users.entry(key.clone()).or_default();
        users.insert(of.clone());
        if !tables.watches.contains_key(key) {
            let watch = self.watch(key, true);
            tables.watches.insert(key.clone(), watch);
        }
    }

    /// Follows what the claims on record lead to, and the volumes on record from there: an agent that has just
    /// started must not forget them before their pod asks for them.
    pub(super) fn find_recorded(&self, tables: &mut Tables, of: &PodUid, node: &str) {
        let Some(entry) = tables.pods.get(of) else {
            return;
        };
        let claims: Vec<ObjectKey> = of_kind(entry, Kind::Claim);
        for key in claims {
            let Some(claim) = self.recorded_of::<PersistentVolumeClaim>(&key) else {
                continue;
            };
            for key in refs::of_claim(&claim) {
                self.found(tables, of, &key);
                let Some(volume) = self.recorded_of::<PersistentVolume>(&key) else {
                    continue;
                };
                for key in refs::of_persistent_volume(&volume) {
                    self.found(tables, of, &key);
                }
                let csi = volume.spec.and_then(|spec| spec.csi);
                let Some(csi) = csi else {
                    continue;
                };
                let name = attachment_name(&csi.volume_handle, &csi.driver, node);
                let key = ObjectKey::new(Kind::VolumeAttachment, "", &name);
                if self.recorded_of::<VolumeAttachment>(&key).is_some() {
                    self.found(tables, of, &key);
                }
            }
        }
    }

    fn recorded_of<K: Watched>(&self, key: &ObjectKey) -> Option<K> {
        self.ctx.recorded(&key.record_key(), false)
    }
}

fn of_kind(entry: &PodEntry, kind: Kind) -> Vec<ObjectKey> {
    let keys = entry.refs.iter().filter(|key| key.kind == kind);
    keys.cloned().collect()
}

/// Name of the VolumeAttachment of a CSI volume to a node. Upstream: `getAttachmentName`.
pub fn attachment_name(handle: &str, driver: &str, node: &str) -> String {
    format!(
        "csi-{}",
        crate::core::volumes::sha256_hex(&[handle, driver, node])
    )
}
