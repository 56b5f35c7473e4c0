//! The kinds of records in table `objects`: one declaration each, and typed access to their JSON.
//!
//! A key is `<kind>/<namespace>/<name>`. The declaration of a kind decides how durable a change of its records is, with
//! whom they are deleted, and what a record means that cannot be read. A record type names its kind with [`Kind`].
//!
//! **Invariant:** the durability of a change follows from the kind in its key, also of one that comes from elsewhere
//! than the typed functions. Callers neither choose it nor sync by hand.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;

use k8s_openapi::api::core::v1 as api;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Durability::{self, Durable, Relaxed};
use super::{ObjectRecord, Record as _, State, Table, Transaction, Versioned, VolumeRecord};
use crate::types::{PodUid, Stamp};

/// Origin of the content of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// An object that the API server has sent.
    Api,
    /// State of the agent's own, which nobody else can confirm.
    Own,
}

/// Part of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The one after the kind.
    Namespace,
    /// The one after the namespace.
    Name,
}

/// Owner of the records of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A pod, whose UID is this part of the key. The record is deleted when the pod is forgotten ([`forget_pod`]), and as
    /// left over when nothing knows the pod any more. A key with an empty namespace before the UID belongs to no pod.
    Pod(Part),
    /// The record in table `volumes` whose key follows the kind. The writer deletes both together; without that record
    /// and its pod this one is left over.
    Volume,
    /// An image or an archive of images. `images` deletes the record when it is gone.
    Image,
    /// The boot: the record says nothing in the next one. The writer deletes it.
    Boot,
    /// The node. The record stays as long as its subject.
    Node,
    /// Something else, with which the writer deletes the record.
    Other,
}

/// Meaning of a record that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damaged {
    /// The same as none: the next observation or decision writes it anew.
    Absent,
    /// Unknown: the reader gets an error and fails closed.
    Unknown,
}

/// Declaration of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Declared {
    /// Name; the first part of a key.
    pub name: &'static str,
    /// Name with the slash that follows.
    pub prefix: &'static str,
    /// Origin of the content.
    pub content: Content,
    /// Owner of the records.
    pub owner: Owner,
    /// Class of every change of a record.
    pub class: Durability,
    /// Meaning of a record that cannot be read.
    pub damaged: Damaged,
}

macro_rules! kinds {
    ($( $(#[$meta:meta])* $constant:ident = $name:literal : $content:ident, $owner:expr, $class:ident, $damaged:ident ; )+) => {
        $(
            $(#[$meta])*
            pub const $constant: Declared = Declared {
                name: $name,
                prefix: concat!($name, "/"),
                content: Content::$content,
                owner: $owner,
                class: $class,
                damaged: Damaged::$damaged,
            };
        )+

        /// All of them. What belongs to pods is looked through in this order.
        pub const ALL: &[Declared] = &[ $( $constant, )+ ];
    };
}

kinds! {
    /// Configuration that pods refer to, by namespace and name.
    CONFIG_MAPS = "configmaps": Api, Owner::Other, Relaxed, Absent;
    /// Secrets that pods refer to, encrypted, by namespace and name.
    SECRETS = "secrets": Api, Owner::Other, Relaxed, Absent;
    /// Services, by namespace and name.
    SERVICES = "services": Api, Owner::Other, Relaxed, Absent;
    /// Runtime classes, by name.
    RUNTIME_CLASSES = "runtimeclasses": Api, Owner::Other, Relaxed, Absent;
    /// Claims of volumes, by namespace and name.
    VOLUME_CLAIMS = "persistentvolumeclaims": Api, Owner::Other, Relaxed, Absent;
    /// Persistent volumes, by name.
    PERSISTENT_VOLUMES = "persistentvolumes": Api, Owner::Other, Relaxed, Absent;
    /// Attachments of volumes, by name.
    VOLUME_ATTACHMENTS = "volumeattachments": Api, Owner::Other, Relaxed, Absent;
    /// CSI drivers as the cluster knows them, by name.
    CSI_DRIVERS = "csidrivers": Api, Owner::Other, Relaxed, Absent;
    /// Trust bundles, by name.
    TRUST_BUNDLES = "clustertrustbundles": Api, Owner::Other, Relaxed, Absent;
    /// The node's own object, by name.
    NODES = "nodes": Api, Owner::Node, Relaxed, Absent;
    /// Tokens of service accounts, encrypted: `<namespace>/<pod UID>/<hash>`.
    TOKENS = "tokens": Api, Owner::Pod(Part::Name), Relaxed, Absent;
    /// Service accounts whose tokens credential providers get, by namespace and name.
    SERVICE_ACCOUNTS = "serviceaccounts": Api, Owner::Other, Relaxed, Absent;

    /// Keys and certificates of a pod, encrypted: `<namespace>/<pod UID>/<volume>/<index>`.
    POD_CERTIFICATES = "podcertificates": Own, Owner::Pod(Part::Name), Durable, Absent;
    /// Devices of a pod's containers: `<namespace>/<pod UID>`.
    DEVICE_ALLOCATIONS = "deviceallocations": Own, Owner::Pod(Part::Name), Durable, Unknown;
    /// Resources last sent to the runtime: `<namespace>/<pod UID>`. The record `/turn` is of no pod.
    RESIZES = "resizes": Own, Owner::Pod(Part::Name), Relaxed, Absent;
    /// Reason why a resize waits: `<namespace>/<pod UID>`.
    PENDING_RESIZES = "resizepending": Own, Owner::Pod(Part::Name), Relaxed, Absent;
    /// Users of a pod in a user namespace: `<namespace>/<pod UID>`.
    USER_NAMESPACES = "userns": Own, Owner::Pod(Part::Name), Durable, Unknown;
    /// Error of a pod's last pull of an image: `<pod UID>/<hash>`.
    PULL_ERRORS = "imagepullerrors": Own, Owner::Pod(Part::Namespace), Relaxed, Absent;
    /// Back-offs that ended early: `<pod UID>/<container, image or volume/name>`.
    BACKOFF_ENDS = "backoffends": Own, Owner::Pod(Part::Namespace), Relaxed, Absent;
    /// The newest restart of all containers of a pod: `<pod UID>/all`.
    RESTARTS = "restarts": Own, Owner::Pod(Part::Namespace), Durable, Absent;
    /// subPath mounts: `<pod UID>/<volume>/<container>/<n>`.
    SUB_PATHS = "subpaths": Own, Owner::Pod(Part::Namespace), Durable, Absent;

    /// Remote volumes of pods: `<pod UID>/<volume>`.
    VOLUMES = "volumes": Own, Owner::Volume, Relaxed, Unknown;
    /// State of emptyDirs, a mount or a directory: `<pod UID>/<volume>`.
    MEDIA = "media": Own, Owner::Volume, Relaxed, Absent;
    /// Staged volumes, by hash.
    DEVICES = "devices": Own, Owner::Other, Relaxed, Unknown;
    /// Sizes of staged volumes on this node, by hash.
    SIZES = "sizes": Own, Owner::Other, Relaxed, Absent;
    /// Mounts of volumes as the mount table shows them: `<pod UID>/<volume>`, `device/<hash>`.
    MOUNTS = "mounts": Own, Owner::Boot, Relaxed, Absent;
    /// iSCSI sessions and loop devices that the agent attached, by hash.
    ATTACHED = "attached": Own, Owner::Boot, Durable, Absent;
    /// Registered CSI drivers, by name.
    CSI_PLUGINS = "csiplugins": Own, Owner::Node, Relaxed, Absent;

    /// Resources of registered device plugins: `<domain>/<name>`.
    DEVICE_PLUGINS = "deviceplugins": Own, Owner::Node, Relaxed, Absent;
    /// Resource claims that are prepared, by namespace and name.
    CLAIMS = "claims": Own, Owner::Other, Durable, Unknown;
    /// Registered DRA drivers, by name.
    DRA_DRIVERS = "dradrivers": Own, Owner::Node, Relaxed, Absent;

    /// Pulls that have begun, by hash of the image's name.
    PULL_INTENTS = "imagepullintents": Own, Owner::Image, Durable, Absent;
    /// State of the files of images, by hash of the qualified name.
    IMAGE_FILES = "imagefiles": Own, Owner::Image, Durable, Absent;
    /// Archives of the preload directory, by hash of the file name.
    IMAGE_ARCHIVES = "imagearchives": Own, Owner::Image, Durable, Absent;
    /// Credentials that images were pulled with, by hash of the image's ID.
    PULLED_IMAGES = "imagepulls": Own, Owner::Image, Durable, Absent;
    /// The last judgment of garbage collection over images: `/node`.
    IMAGE_COLLECTION = "imagecollection": Own, Owner::Node, Relaxed, Absent;

    /// The last node shutdown: `/node`.
    SHUTDOWN = "shutdown": Own, Owner::Node, Durable, Absent;
    /// Groups and lock of node shutdowns: `/node`.
    SHUTDOWN_MANAGER = "shutdownmanager": Own, Owner::Node, Relaxed, Absent;
    /// Observations and last actions of evictions: `/node`.
    PRESSURE = "pressure": Own, Owner::Node, Relaxed, Absent;
    /// The cgroup driver that the container runtime has reported: `/runtime`.
    CGROUP_DRIVER = "cgroupdriver": Own, Owner::Node, Relaxed, Absent;
    /// The last reported status of the node, by name.
    NODE_STATUS = "nodestatus": Own, Owner::Node, Relaxed, Absent;
    /// Files whose pod is not used, by source.
    SOURCE_CONFLICTS = "sourceconflicts": Own, Owner::Node, Relaxed, Absent;
    /// Manifests that went away a moment ago, by source.
    LEFT_MANIFESTS = "leftmanifests": Own, Owner::Node, Relaxed, Absent;
    /// The newest list of pods of the API server: `/pods`.
    API_SOURCE = "apisource": Own, Owner::Node, Relaxed, Absent;
    /// Position in the kernel log: `/position`.
    KERNEL_LOG = "kmsg": Own, Owner::Node, Relaxed, Absent;
    /// Events that wait for the API server or count repetitions: `<namespace>/<hash>`.
    EVENTS = "events": Own, Owner::Other, Relaxed, Absent;
    /// Rate limits of events of pods and of the node: `<namespace>/<hash>`.
    EVENT_SOURCES = "eventsources": Own, Owner::Other, Relaxed, Absent;
}

/// Returns the kind of a key; `None` for one that is not declared.
pub fn of_key(key: &str) -> Option<&'static Declared> {
    let (name, _) = key.split_once('/')?;
    ALL.iter().find(|kind| kind.name == name)
}

/// Returns the least class of a change of a record, whatever the record is.
pub(super) fn class_of(table: Table, key: &str) -> Durability {
    match table {
        Table::Objects => of_key(key).map_or(Relaxed, |kind| kind.class),
        _ => Relaxed,
    }
}

impl Declared {
    /// Makes the key of a record, for readers of raw records.
    pub fn key(&self, namespace: &str, name: &str) -> String {
        format!("{}{namespace}/{name}", self.prefix)
    }

    /// Returns the UID of the pod that owns the record under a key of this kind.
    pub fn pod_of<'k>(&self, key: &'k str) -> Option<&'k str> {
        let Owner::Pod(part) = self.owner else {
            return None;
        };
        let mut parts = key.strip_prefix(self.prefix)?.split('/');
        let namespace = parts.next().filter(|part| !part.is_empty())?;
        match part {
            Part::Namespace => Some(namespace),
            Part::Name => parts.next(),
        }
    }

    /// Returns the key in table `volumes` of the record that owns the one under a key of this kind.
    pub fn volume_of<'k>(&self, key: &'k str) -> Option<&'k str> {
        let owned = key.strip_prefix(self.prefix);
        owned.filter(|_| self.owner == Owner::Volume)
    }

    /// Returns whether the API server has sent the content.
    pub fn is_of_api(&self) -> bool {
        self.content == Content::Api
    }
}

/// Returns the end of all records that belong to a pod.
pub fn forget_pod(state: &State, namespace: &str, uid: &PodUid) -> Transaction {
    let mut transaction = Transaction::new();
    for kind in ALL {
        let start = match kind.owner {
            Owner::Pod(Part::Namespace) => format!("{}{uid}/", kind.prefix),
            Owner::Pod(Part::Name) => format!("{}{namespace}/{uid}", kind.prefix),
            _ => continue,
        };
        for (key, _) in state.with_prefix::<ObjectRecord>(&start) {
            if kind.pod_of(key) == Some(uid.as_str()) {
                transaction = transaction.delete::<ObjectRecord>(key);
            }
        }
    }
    transaction
}

/// Returns the end of the records whose owner is gone: a pod, or a volume that is not recorded, of which `is_orphan`
/// says of its UID that nothing knows it.
pub fn left_over(state: &State, is_orphan: impl Fn(&str) -> bool) -> Transaction {
    let mut transaction = Transaction::new();
    for kind in ALL {
        if !matches!(kind.owner, Owner::Pod(_) | Owner::Volume) {
            continue;
        }
        for (key, _) in state.with_prefix::<ObjectRecord>(kind.prefix) {
            let is_left = match (kind.pod_of(key), kind.volume_of(key)) {
                (Some(uid), _) => is_orphan(uid),
                // How a volume was mounted is needed for as long as it is on record.
                (None, Some(volume)) => {
                    let uid = volume.split('/').next().unwrap_or(volume);
                    is_orphan(uid) && state.record::<VolumeRecord>(volume).is_none()
                }
                (None, None) => false,
            };
            if is_left {
                transaction = transaction.delete::<ObjectRecord>(key);
            }
        }
    }
    transaction
}

/// A record type of a kind. Its JSON is on disk: serde names are part of the format.
pub trait Kind: Serialize + DeserializeOwned {
    /// The declaration of its kind.
    const DECLARED: Declared;
}

impl Kind for api::Node {
    const DECLARED: Declared = NODES;
}

impl Kind for api::PersistentVolumeClaim {
    const DECLARED: Declared = VOLUME_CLAIMS;
}

/// Key of a record of one kind.
pub struct Key<K>(String, PhantomData<fn() -> K>);

impl<K: Kind> Key<K> {
    /// Makes the key of a record; `namespace` may be empty.
    pub fn new(namespace: &str, name: &str) -> Self {
        Self(K::DECLARED.key(namespace, name), PhantomData)
    }
}

impl<K> Clone for Key<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone(), PhantomData)
    }
}

impl<K> fmt::Debug for Key<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl<K> fmt::Display for Key<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<K> Deref for Key<K> {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl<K> AsRef<str> for Key<K> {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl<K> PartialEq<&str> for Key<K> {
    fn eq(&self, other: &&str) -> bool {
        self.0 == *other
    }
}

/// A record that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("read record {key} of table objects: {source}")]
pub struct Unparseable {
    /// Its key.
    pub key: String,
    /// The reason.
    #[source]
    pub source: serde_json::Error,
}

/// A stored record of one kind.
#[derive(Debug)]
pub struct Stored<'a, K> {
    key: &'a str,
    found: &'a Versioned<ObjectRecord>,
    kind: PhantomData<fn() -> K>,
}

impl<'a, K: Kind> Stored<'a, K> {
    /// Returns its key.
    pub fn key(&self) -> Key<K> {
        Key(self.key.to_owned(), PhantomData)
    }

    /// Returns the part of its key after the kind.
    pub fn rest(&self) -> &'a str {
        let rest = self.key.strip_prefix(K::DECLARED.prefix);
        rest.unwrap_or_default()
    }

    /// Returns the parts of its key after the kind: namespace and name.
    pub fn place(&self) -> (&'a str, &'a str) {
        let rest = self.rest();
        rest.split_once('/').unwrap_or((rest, ""))
    }

    /// Returns when it was written.
    pub fn at(&self) -> Stamp {
        self.found.record.at
    }

    /// Returns the version that it was written with; empty unless its writer gives one.
    pub fn version(&self) -> &'a str {
        &self.found.record.resource_version
    }

    /// Returns whether it holds this content, without reading it.
    pub fn is(&self, content: &K) -> bool {
        self.found.record.data == ObjectRecord::own(content, self.found.record.at).data
    }

    /// Reads its content.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn read(&self) -> Result<K, Unparseable> {
        serde_json::from_slice(&self.found.record.data).map_err(|source| Unparseable {
            key: self.key.to_owned(),
            source,
        })
    }

    /// Returns its content, which is read once for all who ask for it.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn shared(&self) -> Result<Arc<K>, Unparseable>
    where
        K: Send + Sync + 'static,
    {
        match self.found.memo.get(|| self.read().ok()) {
            Some(content) => Ok(content),
            None => self.read().map(Arc::new),
        }
    }

    /// Reads its content, of a kind whose damaged records are the same as none.
    pub fn content(&self) -> Option<K> {
        const {
            assert!(
                matches!(K::DECLARED.damaged, Damaged::Absent),
                "a damaged record of this kind is not absent: use `read`"
            );
        };
        self.read().ok()
    }
}

/// Content that a record is to have, for changes that are collected.
#[derive(Clone, Debug)]
pub struct Change {
    key: String,
    record: Option<ObjectRecord>,
}

impl Change {
    /// Makes a change to this content of this time; `None` deletes the record.
    pub fn new<K: Kind>(key: &Key<K>, content: Option<(&K, Stamp)>) -> Self {
        Self {
            key: key.0.clone(),
            record: content.map(|(content, at)| ObjectRecord::own(content, at)),
        }
    }

    /// Returns the key of the record.
    pub fn key(&self) -> &str {
        &self.key
    }
}

impl State {
    /// Returns a record of a kind, read or not.
    pub fn stored<K: Kind>(&self, key: &Key<K>) -> Option<Stored<'_, K>> {
        let (key, found) = ObjectRecord::table(self).get_key_value::<str>(key)?;
        Some(Stored {
            key,
            found,
            kind: PhantomData,
        })
    }

    /// Returns the content of a record, of a kind whose damaged records are the same as none.
    pub fn object<K: Kind>(&self, key: &Key<K>) -> Option<K> {
        self.stored(key)?.content()
    }

    /// Returns all records of a kind, by key.
    pub fn all_stored<K: Kind>(&self) -> impl Iterator<Item = Stored<'_, K>> {
        self.stored_from(K::DECLARED.prefix.to_owned())
    }

    /// Returns the records of a kind with this namespace, by key.
    pub fn stored_below<'a, K: Kind>(
        &'a self,
        namespace: &str,
    ) -> impl Iterator<Item = Stored<'a, K>> + use<'a, K> {
        self.stored_from(format!("{}{namespace}/", K::DECLARED.prefix))
    }

    fn stored_from<K: Kind>(&self, start: String) -> impl Iterator<Item = Stored<'_, K>> {
        let records = ObjectRecord::table(self).range(Arc::<str>::from(start.as_str())..);
        records
            .take_while(move |(key, _)| key.starts_with(start.as_str()))
            .map(|(key, versioned)| Stored {
                key,
                found: versioned,
                kind: PhantomData,
            })
    }
}

impl Transaction {
    /// Adds a put of a record of a kind.
    #[must_use]
    pub fn put_object<K: Kind>(self, key: &Key<K>, content: &K, at: Stamp) -> Self {
        self.put(key, ObjectRecord::own(content, at))
    }

    /// Adds a put of a record of a kind whose content may have no JSON form, like a path that is not UTF-8.
    ///
    /// # Errors
    /// When it has none.
    pub fn try_put_object<K: Kind>(
        self,
        key: &Key<K>,
        version: impl Into<String>,
        content: &K,
        at: Stamp,
    ) -> Result<Self, serde_json::Error> {
        let record = ObjectRecord {
            resource_version: version.into(),
            encrypted: false,
            data: serde_json::to_vec(content)?,
            at,
        };
        Ok(self.put(key, record))
    }

    /// Adds a change, unless the record is so in `seen` already.
    #[must_use]
    pub fn change_object(self, seen: &State, change: Change) -> Self {
        let Change { key, record } = change;
        if seen.record::<ObjectRecord>(&key) == record.as_ref() {
            return self;
        }
        match record {
            Some(record) => self.put(key, record),
            None => self.delete::<ObjectRecord>(key),
        }
    }

    /// Adds a put of a record of a kind, with a version beside its content.
    #[must_use]
    pub fn put_version<K: Kind>(
        self,
        key: &Key<K>,
        version: impl Into<String>,
        content: &K,
        at: Stamp,
    ) -> Self {
        let record = ObjectRecord {
            resource_version: version.into(),
            ..ObjectRecord::own(content, at)
        };
        self.put(key, record)
    }

    /// Adds a delete of a record of a kind.
    #[must_use]
    pub fn delete_object<K: Kind>(self, key: &Key<K>) -> Self {
        self.delete::<ObjectRecord>(key)
    }

    /// Refuses the transaction unless the record is still what it is in `seen`.
    #[must_use]
    pub fn expect_object<K: Kind>(self, seen: &State, key: &Key<K>) -> Self {
        self.expect::<ObjectRecord>(seen, key)
    }
}

#[cfg(test)]
mod tests;
