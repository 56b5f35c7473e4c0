//! Collects the objects that a pod refers to, as pure data: no I/O.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{
    EnvFromSource, EnvVar, PersistentVolume, PersistentVolumeClaim, Pod, SecretReference, Volume,
};

use crate::core::volumes::claim_of;
use crate::types::PodExt;

/// Kinds that are watched object by object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Kind {
    ConfigMap,
    Secret,
    RuntimeClass,
    Claim,
    PersistentVolume,
    VolumeAttachment,
    CsiDriver,
}

impl Kind {
    pub(super) const ALL: [Kind; 7] = [
        Kind::ConfigMap,
        Kind::Secret,
        Kind::RuntimeClass,
        Kind::Claim,
        Kind::PersistentVolume,
        Kind::VolumeAttachment,
        Kind::CsiDriver,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::ConfigMap => "ConfigMap",
            Kind::Secret => "Secret",
            Kind::RuntimeClass => "RuntimeClass",
            Kind::Claim => "PersistentVolumeClaim",
            Kind::PersistentVolume => "PersistentVolume",
            Kind::VolumeAttachment => "VolumeAttachment",
            Kind::CsiDriver => "CSIDriver",
        }
    }

    pub(super) fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    pub(super) fn plural(self) -> &'static str {
        match self {
            Kind::ConfigMap => "configmaps",
            Kind::Secret => "secrets",
            Kind::RuntimeClass => "runtimeclasses",
            Kind::Claim => "persistentvolumeclaims",
            Kind::PersistentVolume => "persistentvolumes",
            Kind::VolumeAttachment => "volumeattachments",
            Kind::CsiDriver => "csidrivers",
        }
    }

    /// Returns whether its records are encrypted.
    pub(super) fn is_secret(self) -> bool {
        self == Kind::Secret
    }
}

/// One object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ObjectKey {
    pub(super) kind: Kind,
    /// Empty for cluster-wide kinds.
    pub(super) namespace: String,
    pub(super) name: String,
}

impl ObjectKey {
    pub(super) fn new(kind: Kind, namespace: &str, name: &str) -> Self {
        Self {
            kind,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        }
    }

    /// Key of its record.
    pub(super) fn record_key(&self) -> String {
        format!("{}/{}/{}", self.kind.plural(), self.namespace, self.name)
    }

    pub(super) fn from_record_key(key: &str) -> Option<Self> {
        let mut parts = key.splitn(3, '/');
        let plural = parts.next()?;
        let kind = Kind::ALL.into_iter().find(|kind| kind.plural() == plural)?;
        Some(Self::new(kind, parts.next()?, parts.next()?))
    }

    /// `namespace/name`, or the name alone.
    pub(super) fn object_name(&self) -> String {
        match self.namespace.is_empty() {
            true => self.name.clone(),
            false => format!("{}/{}", self.namespace, self.name),
        }
    }
}

/// Everything a pod refers to. Mirrors upstream's `VisitPodSecretNames` and `VisitPodConfigmapNames` for what this
/// agent supports.
pub(super) fn references(pod: &Pod) -> BTreeSet<ObjectKey> {
    let namespace = pod.namespace();
    let spec = pod.spec_ref();
    let mut found = Found {
        namespace,
        keys: BTreeSet::new(),
    };
    let containers = spec.containers.iter();
    for container in containers.chain(spec.init_containers.iter().flatten()) {
        found.env(container.env.as_deref(), container.env_from.as_deref());
    }
    for container in spec.ephemeral_containers.iter().flatten() {
        found.env(container.env.as_deref(), container.env_from.as_deref());
    }
    for volume in spec.volumes.iter().flatten() {
        found.volume(volume);
        found.remote(pod, volume);
    }
    for secret in spec.image_pull_secrets.iter().flatten() {
        found.add(Kind::Secret, &secret.name);
    }
    if let Some(class) = spec.runtime_class_name.as_deref()
        && !class.is_empty()
    {
        found
            .keys
            .insert(ObjectKey::new(Kind::RuntimeClass, "", class));
    }
    found.keys
}

struct Found<'a> {
    namespace: &'a str,
    keys: BTreeSet<ObjectKey>,
}

impl Found<'_> {
    fn add(&mut self, kind: Kind, name: &str) {
        // An empty name is allowed for imagePullSecrets, and means nothing.
        if !name.is_empty() {
            self.keys.insert(ObjectKey::new(kind, self.namespace, name));
        }
    }

    fn env(&mut self, env: Option<&[EnvVar]>, env_from: Option<&[EnvFromSource]>) {
        for source in env
            .unwrap_or_default()
            .iter()
            .filter_map(|var| var.value_from.as_ref())
        {
            if let Some(reference) = &source.config_map_key_ref {
                self.add(Kind::ConfigMap, &reference.name);
            }
            if let Some(reference) = &source.secret_key_ref {
                self.add(Kind::Secret, &reference.name);
            }
        }
        for source in env_from.unwrap_or_default() {
            if let Some(reference) = &source.config_map_ref {
                self.add(Kind::ConfigMap, &reference.name);
            }
            if let Some(reference) = &source.secret_ref {
                self.add(Kind::Secret, &reference.name);
            }
        }
    }

    fn remote(&mut self, pod: &Pod, volume: &Volume) {
        if let Some(claim) = claim_of(pod, volume) {
            self.add(Kind::Claim, &claim);
        }
        if let Some(csi) = &volume.csi {
            let driver = ObjectKey::new(Kind::CsiDriver, "", &csi.driver);
            self.keys.insert(driver);
            if let Some(secret) = &csi.node_publish_secret_ref {
                self.add(Kind::Secret, &secret.name);
            }
        }
        if let Some(secret) = volume.iscsi.as_ref().and_then(|i| i.secret_ref.as_ref()) {
            self.add(Kind::Secret, &secret.name);
        }
    }

    fn volume(&mut self, volume: &Volume) {
        if let Some(source) = &volume.config_map {
            self.add(Kind::ConfigMap, &source.name);
        }
        if let Some(name) = volume
            .secret
            .as_ref()
            .and_then(|s| s.secret_name.as_deref())
        {
            self.add(Kind::Secret, name);
        }
        let projected = volume.projected.as_ref().and_then(|p| p.sources.as_deref());
        for source in projected.unwrap_or_default() {
            if let Some(source) = &source.config_map {
                self.add(Kind::ConfigMap, &source.name);
            }
            if let Some(source) = &source.secret {
                self.add(Kind::Secret, &source.name);
            }
        }
    }
}

/// Returns the objects that a claim refers to.
pub(super) fn of_claim(claim: &PersistentVolumeClaim) -> BTreeSet<ObjectKey> {
    let volume = claim.spec.as_ref().and_then(|s| s.volume_name.as_deref());
    let volume = volume.filter(|name| !name.is_empty());
    let key = volume.map(|name| ObjectKey::new(Kind::PersistentVolume, "", name));
    key.into_iter().collect()
}

/// Returns the objects that a persistent volume refers to. Attachments are left out, since only its driver decides
/// whether there is one.
pub(super) fn of_persistent_volume(volume: &PersistentVolume) -> BTreeSet<ObjectKey> {
    let mut keys = BTreeSet::new();
    let Some(spec) = &volume.spec else {
        return keys;
    };
    let mut secret = |reference: Option<&SecretReference>| {
        if let Some(key) = reference.and_then(secret_key) {
            keys.insert(key);
        }
    };
    if let Some(csi) = &spec.csi {
        secret(csi.node_stage_secret_ref.as_ref());
        secret(csi.node_publish_secret_ref.as_ref());
        secret(csi.node_expand_secret_ref.as_ref());
    }
    if let Some(iscsi) = &spec.iscsi {
        secret(iscsi.secret_ref.as_ref());
    }
    if let Some(csi) = &spec.csi {
        keys.insert(ObjectKey::new(Kind::CsiDriver, "", &csi.driver));
    }
    keys
}

fn secret_key(reference: &SecretReference) -> Option<ObjectKey> {
    let namespace = reference.namespace.as_deref().unwrap_or_default();
    let name = reference.name.as_deref().unwrap_or_default();
    let given = !namespace.is_empty() && !name.is_empty();
    given.then(|| ObjectKey::new(Kind::Secret, namespace, name))
}
