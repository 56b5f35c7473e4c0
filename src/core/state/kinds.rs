//! The kinds of records in the tables `objects` and `facts`: one declaration each, and typed access to their JSON.
//!
//! Table `objects` has what the API server has sent or issued, table `facts` the agent's own state. A key is `<kind>/<namespace>/<name>`. The declaration of a kind decides how durable a change of its records is, with
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
use super::{
    AnyRecord, Expectation, FactRecord, Memo, Mutation, ObjectRecord, Record as _, State, Table,
    Transaction, Versioned, VolumeRecord,
};
use crate::types::{PodUid, Stamp};

/// Origin of the content of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// An object that the API server has sent. It is in table `objects`.
    Api,
    /// Keys and certificates that the API server has issued for a pod. They are in table `objects`, encrypted.
    Issued,
    /// State of the agent's own, which nobody else can confirm. It is in table `facts`.
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
    /// Version of the layout of the JSON in table `facts`. A record of a newer one cannot be read.
    pub layout: u16,
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
                layout: 1,
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
    POD_CERTIFICATES = "podcertificates": Issued, Owner::Pod(Part::Name), Durable, Absent;
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
        Table::Objects | Table::Facts => of_key(key).map_or(Relaxed, |kind| kind.class),
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

    /// Returns the table that has the records.
    pub const fn table(&self) -> Table {
        match self.content {
            Content::Api | Content::Issued => Table::Objects,
            Content::Own => Table::Facts,
        }
    }

    /// Returns the keys of the records whose key begins with `start`.
    fn keys_from<'a>(&self, state: &'a State, start: &'a str) -> Vec<&'a Arc<str>> {
        match self.content {
            Content::Api | Content::Issued => {
                let all = state.with_prefix::<ObjectRecord>(start);
                all.map(|(key, _)| key).collect()
            }
            Content::Own => {
                let all = state.with_prefix::<FactRecord>(start);
                all.map(|(key, _)| key).collect()
            }
        }
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
        for key in kind.keys_from(state, &start) {
            if kind.pod_of(key) == Some(uid.as_str()) {
                transaction = transaction.delete_from(kind.table(), key);
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
        for key in kind.keys_from(state, kind.prefix) {
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
                transaction = transaction.delete_from(kind.table(), key);
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
#[error("read record {key} of table {}: {source}", table.name())]
pub struct Unparseable {
    /// Its table.
    pub table: Table,
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
    mark: &'a str,
    layout: u16,
    data: &'a [u8],
    at: Stamp,
    memo: &'a Memo,
    kind: PhantomData<fn() -> K>,
}

impl<'a, K: Kind> Stored<'a, K> {
    fn of_object(key: &'a str, found: &'a Versioned<ObjectRecord>) -> Self {
        Self {
            key,
            mark: &found.record.resource_version,
            layout: K::DECLARED.layout,
            data: &found.record.data,
            at: found.record.at,
            memo: &found.memo,
            kind: PhantomData,
        }
    }

    fn of_fact(key: &'a str, found: &'a Versioned<FactRecord>) -> Self {
        Self {
            key,
            mark: &found.record.mark,
            layout: found.record.layout,
            data: &found.record.data,
            at: found.record.at,
            memo: &found.memo,
            kind: PhantomData,
        }
    }

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
        self.at
    }

    /// Returns the text that its writer put beside the content; of an object, its resourceVersion.
    pub fn mark(&self) -> &'a str {
        self.mark
    }

    /// Returns whether it holds this content, without reading it.
    pub fn is(&self, content: &K) -> bool {
        serde_json::to_vec(content).is_ok_and(|data| self.data == data)
    }

    /// Reads its content.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn read(&self) -> Result<K, Unparseable> {
        let known = K::DECLARED.layout;
        let content = if self.layout > known {
            let newer = format!("it has layout {}, {known} is known", self.layout);
            Err(serde::de::Error::custom(newer))
        } else {
            serde_json::from_slice(self.data)
        };
        content.map_err(|source| Unparseable {
            table: K::DECLARED.table(),
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
        match self.memo.get(|| self.read().ok()) {
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
    table: Table,
    key: String,
    record: Option<AnyRecord>,
}

impl Change {
    /// Makes a change to this content of this time; `None` deletes the record.
    pub fn new<K: Kind>(key: &Key<K>, content: Option<(&K, Stamp)>) -> Self {
        Self {
            table: K::DECLARED.table(),
            key: key.0.clone(),
            record: content.map(|(content, at)| record_of("", content, at)),
        }
    }

    /// Returns the key of the record.
    pub fn key(&self) -> &str {
        &self.key
    }
}

/// Makes the record of a content that has a JSON form: structs, lists, and maps with texts as keys.
fn record_of<K: Kind>(mark: &str, content: &K, at: Stamp) -> AnyRecord {
    sealed_of::<K>(mark, serde_json::to_vec(content).unwrap_or_default(), at)
}

fn sealed_of<K: Kind>(mark: &str, data: Vec<u8>, at: Stamp) -> AnyRecord {
    match K::DECLARED.content {
        Content::Api | Content::Issued => AnyRecord::Objects(ObjectRecord {
            resource_version: mark.to_owned(),
            encrypted: false,
            data,
            at,
        }),
        Content::Own => AnyRecord::Facts(FactRecord {
            layout: K::DECLARED.layout,
            mark: mark.to_owned(),
            data,
            at,
        }),
    }
}

impl State {
    /// Returns a record of a kind, read or not.
    pub fn stored<K: Kind>(&self, key: &Key<K>) -> Option<Stored<'_, K>> {
        match K::DECLARED.content {
            Content::Api | Content::Issued => {
                let (key, found) = ObjectRecord::table(self).get_key_value::<str>(key)?;
                Some(Stored::of_object(key, found))
            }
            Content::Own => {
                let (key, found) = FactRecord::table(self).get_key_value::<str>(key)?;
                Some(Stored::of_fact(key, found))
            }
        }
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
        let from = Arc::<str>::from(start.as_str());
        let is_fact = K::DECLARED.content == Content::Own;
        let objects = (!is_fact).then(|| ObjectRecord::table(self).range(Arc::clone(&from)..));
        let facts = is_fact.then(|| FactRecord::table(self).range(from..));
        let objects = objects.into_iter().flatten();
        let facts = facts.into_iter().flatten();
        objects
            .map(|(key, found)| Stored::of_object(key, found))
            .chain(facts.map(|(key, found)| Stored::of_fact(key, found)))
            .take_while(move |stored| stored.key.starts_with(start.as_str()))
    }
}

impl Transaction {
    /// Adds a put of a record of a kind.
    #[must_use]
    pub fn put_object<K: Kind>(self, key: &Key<K>, content: &K, at: Stamp) -> Self {
        self.put_any(key, record_of("", content, at))
    }

    /// Adds a put of a record of a kind whose content may have no JSON form, like a path that is not UTF-8.
    ///
    /// # Errors
    /// When it has none.
    pub fn try_put_object<K: Kind>(
        self,
        key: &Key<K>,
        mark: impl AsRef<str>,
        content: &K,
        at: Stamp,
    ) -> Result<Self, serde_json::Error> {
        let data = serde_json::to_vec(content)?;
        Ok(self.put_any(key, sealed_of::<K>(mark.as_ref(), data, at)))
    }

    /// Adds a change, unless the record is so in `seen` already.
    #[must_use]
    pub fn change_object(self, seen: &State, change: Change) -> Self {
        let Change { table, key, record } = change;
        let is_so = match &record {
            None => seen.version_of(table, &key).is_none(),
            Some(AnyRecord::Objects(record)) => seen.record::<ObjectRecord>(&key) == Some(record),
            Some(AnyRecord::Facts(record)) => seen.record::<FactRecord>(&key) == Some(record),
            Some(_) => false,
        };
        if is_so {
            return self;
        }
        match record {
            Some(record) => self.put_any(&key, record),
            None => self.delete_from(table, &key),
        }
    }

    /// Adds a put of a record of a kind, with a text beside its content.
    #[must_use]
    pub fn put_marked<K: Kind>(
        self,
        key: &Key<K>,
        mark: impl AsRef<str>,
        content: &K,
        at: Stamp,
    ) -> Self {
        self.put_any(key, record_of(mark.as_ref(), content, at))
    }

    /// Adds a delete of a record of a kind.
    #[must_use]
    pub fn delete_object<K: Kind>(self, key: &Key<K>) -> Self {
        self.delete_from(K::DECLARED.table(), key)
    }

    /// Refuses the transaction unless the record is still what it is in `seen`.
    #[must_use]
    pub fn expect_object<K: Kind>(mut self, seen: &State, key: &Key<K>) -> Self {
        let table = K::DECLARED.table();
        self.expectations.push(Expectation {
            table,
            key: Arc::from(&**key),
            version: seen.version_of(table, key),
        });
        self
    }

    fn put_any(mut self, key: &str, record: AnyRecord) -> Self {
        let key = Arc::from(key);
        self.mutations.push(Mutation::Put { key, record });
        self
    }

    fn delete_from(mut self, table: Table, key: &str) -> Self {
        let key = Arc::from(key);
        self.mutations.push(Mutation::Delete { table, key });
        self
    }
}

#[cfg(test)]
mod tests;
