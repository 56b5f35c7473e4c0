//! The record of a volume: what it is made of (its source), where it is, and how far it is.
//!
//! A volume has a [`VolumeRecord`] `<uid>/<volume>`, with path and phase, and if its storage is elsewhere a description
//! `volumes/<uid>/<volume>`, with its [`Remote`] and the state of the step that the phase is about ([`Mark`]); staged storage
//! (a device) has the same as `device/<id>` and `devices//<id>`. What else is known of it lies beside: the mount, as the mount
//! table showed it (`mounts/…`), the size of a device on this node (`sizes//<id>`), whether an emptyDir is a mount
//! (`media/<uid>/<volume>`).
//!
//! Every part is found by the key of the [`VolumeRecord`]. Their forms on disk are those of the first release.
//!
//! **Invariant:** record and description are put in one transaction ([`put`]), and all parts are deleted in one ([`forget`]).

use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::keys::{DEVICE, Mark, split};
use super::{Remote, Source};
use crate::core::state::kinds::{self, Declared, Key, Kind, Stored, Unparseable};
use crate::core::state::{State, Transaction, VolumePhase, VolumeRecord};
use crate::types::{PodUid, Stamp};

/// Source of a volume or device, as it was resolved. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Described {
    /// Data to mount and unmount it.
    pub remote: Arc<Remote>,
    /// Key of the record of its device: see [`Remote::device_key`].
    pub device: Option<Arc<str>>,
}

impl From<Remote> for Described {
    fn from(remote: Remote) -> Self {
        Self {
            device: remote.device_key().map(Arc::from),
            remote: Arc::new(remote),
        }
    }
}

impl Serialize for Described {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.remote.as_ref().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Described {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Remote::deserialize(deserializer).map(Self::from)
    }
}

/// Description of a pod's volume.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(transparent)]
struct OfVolume(Described);

impl Kind for OfVolume {
    const DECLARED: Declared = kinds::VOLUMES;
}

/// Description of a device.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(transparent)]
struct OfDevice(Described);

impl Kind for OfDevice {
    const DECLARED: Declared = kinds::DEVICES;
}

/// A description, with the state of the step that the record's phase is about.
#[derive(Debug)]
pub struct Description<'a> {
    /// Key of the record that it belongs to, in table `volumes`.
    pub key: Cow<'a, str>,
    /// State.
    pub mark: Mark,
    /// When the state was reached.
    pub at: Stamp,
    /// Source, which is read once.
    pub content: Result<Described, Unparseable>,
}

impl<'a> Description<'a> {
    fn of_volume(stored: &Stored<'a, OfVolume>) -> Self {
        Self {
            key: Cow::Borrowed(stored.rest()),
            mark: Mark::of(stored.mark()),
            at: stored.at(),
            content: stored.shared().map(|content| content.0.clone()),
        }
    }

    fn of_device(stored: &Stored<'a, OfDevice>) -> Self {
        let (_, id) = stored.place();
        Self {
            key: Cow::Owned(format!("{DEVICE}{id}")),
            mark: Mark::of(stored.mark()),
            at: stored.at(),
            content: stored.shared().map(|content| content.0.clone()),
        }
    }
}

/// Key of a description, of the kind that the record's key says.
enum Place {
    Volume(Key<OfVolume>),
    Device(Key<OfDevice>),
}

impl Place {
    fn of(key: &str) -> Self {
        match key.split_once('/') {
            Some((_, id)) if key.starts_with(DEVICE) => Self::Device(Key::new("", id)),
            Some((uid, volume)) => Self::Volume(Key::new(uid, volume)),
            None => Self::Volume(Key::new("", key)),
        }
    }
}

/// Returns the description of a volume or device.
pub fn description<'a>(state: &'a State, key: &str) -> Option<Description<'a>> {
    match Place::of(key) {
        Place::Volume(key) => (state.stored(&key).as_ref()).map(Description::of_volume),
        Place::Device(key) => (state.stored(&key).as_ref()).map(Description::of_device),
    }
}

/// Returns the source of a volume or device; `None` when it has none that can be read.
pub fn remote(state: &State, key: &str) -> Option<Arc<Remote>> {
    let content = description(state, key)?.content;
    content.ok().map(|content| content.remote)
}

/// Returns the descriptions of the volumes of pods, by key.
pub fn volumes(state: &State) -> impl Iterator<Item = Description<'_>> {
    let all = state.all_stored::<OfVolume>();
    all.map(|stored| Description::of_volume(&stored))
}

/// Returns the descriptions of the volumes of one pod, by key.
pub fn volumes_of<'a>(
    state: &'a State,
    uid: &PodUid,
) -> impl Iterator<Item = Description<'a>> + use<'a> {
    let all = state.stored_below::<OfVolume>(uid.as_str());
    all.map(|stored| Description::of_volume(&stored))
}

/// Returns the descriptions of devices, by key.
pub fn devices(state: &State) -> impl Iterator<Item = Description<'_>> {
    let all = state.all_stored::<OfDevice>();
    all.map(|stored| Description::of_device(&stored))
}

/// Puts a description. A record without it is damaged: see [`put`].
///
/// # Errors
/// When it cannot be written as JSON.
pub fn describe(
    transaction: Transaction,
    key: &str,
    remote: &Remote,
    mark: Mark,
    at: Stamp,
) -> Result<Transaction, serde_json::Error> {
    let content = Described::from(remote.clone());
    match Place::of(key) {
        Place::Volume(key) => transaction.try_put_object(&key, mark.text(), &OfVolume(content), at),
        Place::Device(key) => transaction.try_put_object(&key, mark.text(), &OfDevice(content), at),
    }
}

/// Puts the record of a volume or device, with its description.
///
/// # Errors
/// When it cannot be written as JSON.
pub fn put(
    transaction: Transaction,
    key: &str,
    remote: &Remote,
    (path, phase, mark): (&Path, VolumePhase, Mark),
    at: Stamp,
) -> Result<Transaction, serde_json::Error> {
    let record = VolumeRecord {
        plugin: remote.plugin().to_owned(),
        path: path.to_string_lossy().into_owned(),
        phase,
        at,
    };
    describe(transaction.put(key, record), key, remote, mark, at)
}

/// Deletes the record of a volume or device, with all that is known of it.
pub fn forget(transaction: Transaction, seen: &State, key: &str) -> Transaction {
    let transaction = transaction.delete::<VolumeRecord>(key);
    let transaction = match Place::of(key) {
        Place::Volume(key) => delete(transaction, seen, &key),
        Place::Device(key) => delete(transaction, seen, &key),
    };
    let transaction = delete(transaction, seen, &mount_key(key));
    match split(key) {
        Some(_) => delete(transaction, seen, &medium_key(key)),
        None => delete(transaction, seen, &size_key(key)),
    }
}

fn delete<K: Kind>(transaction: Transaction, seen: &State, key: &Key<K>) -> Transaction {
    match seen.stored(key) {
        Some(_) => transaction.delete_object(key),
        None => transaction,
    }
}

/// A mount, by what tells it from others: so teardown tells what was mounted for a volume from what somebody else has mounted
/// at its path since. A volume that was mounted before this was noted has none, and neither has one of a CSI driver, which may
/// mount it anew whenever it likes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OwnMount {
    /// Its number.
    pub id: String,
    /// `major:minor` of the file system.
    pub device: String,
    /// The directory of it that is mounted.
    pub root: String,
    /// File system type.
    pub fstype: String,
    /// A device, `server:path`, or whatever the file system goes by.
    pub source: String,
}

impl Kind for OwnMount {
    const DECLARED: Declared = kinds::MOUNTS;
}

fn mount_key(key: &str) -> Key<OwnMount> {
    let (of, name) = key.split_once('/').unwrap_or((key, ""));
    Key::new(of, name)
}

/// Notes with the record of a volume or device what is mounted for it; `None`: nobody knows.
pub fn note_mount(
    transaction: Transaction,
    seen: &State,
    key: &str,
    mount: Option<&OwnMount>,
    at: Stamp,
) -> Transaction {
    let key = mount_key(key);
    match mount {
        Some(mount) => transaction.put_object(&key, mount, at),
        None => delete(transaction, seen, &key),
    }
}

/// Returns whether what is mounted for a volume is noted.
pub fn notes_mount(remote: &Remote) -> bool {
    !matches!(remote.source, Source::Csi(_))
}

/// Returns whether it is noted what was mounted for a volume or device.
pub fn has_mount(seen: &State, key: &str) -> bool {
    seen.stored(&mount_key(key)).is_some()
}

/// Returns whether a mount is the one that was noted for a volume or device. What cannot be read, or was not noted, says
/// nothing against it.
pub fn is_own(seen: &State, key: &str, mount: &OwnMount, now: Stamp) -> bool {
    let key = mount_key(key);
    let Some(noted) = seen.stored(&key) else {
        return true;
    };
    match noted.content() {
        Some(known) => is_same(known, noted.at(), mount, now),
        None => true,
    }
}

fn is_same(noted: OwnMount, at: Stamp, found: &OwnMount, now: Stamp) -> bool {
    // Numbers of mounts are given again, and the directory that is bound may be renamed.
    let same_number =
        at.boot == now.boot && (&noted.id, &noted.device) == (&found.id, &found.device);
    let id = found.id.clone();
    same_number || OwnMount { id, ..noted } == *found
}

/// Size of a device on this node, in bytes. Each node that has shared storage mounted grows its own file system, while the
/// claim tells of one of them. Upstream keeps it in the actual state of the world, in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
struct Size(u64);

impl Kind for Size {
    const DECLARED: Declared = kinds::SIZES;
}

fn size_key(device: &str) -> Key<Size> {
    Key::new("", device.strip_prefix(DEVICE).unwrap_or(device))
}

/// Returns the size that a device has on this node; `None` when that is not known.
pub fn size(seen: &State, device: &str) -> Option<u64> {
    seen.object(&size_key(device)).map(|Size(bytes)| bytes)
}

/// Notes the size that a device has on this node; nothing of what is not staged.
pub fn note_size(seen: &State, device: &str, bytes: u64, at: Stamp) -> Option<Transaction> {
    seen.record::<VolumeRecord>(device)?;
    let transaction = Transaction::new().expect::<VolumeRecord>(seen, device);
    Some(transaction.put_object(&size_key(device), &Size(bytes), at))
}

/// Content of the record of an emptyDir; its version says what it is.
#[derive(Serialize, Deserialize)]
struct Medium {}

impl Kind for Medium {
    const DECLARED: Declared = kinds::MEDIA;
}

const MOUNT: &str = "mount";
const PLAIN: &str = "plain";

fn medium_key(key: &str) -> Key<Medium> {
    let (uid, volume) = key.split_once('/').unwrap_or((key, ""));
    Key::new(uid, volume)
}

/// Notes with the record of an emptyDir whether the agent mounts something at its path.
pub fn note_medium(transaction: Transaction, key: &str, mounts: bool, at: Stamp) -> Transaction {
    let version = if mounts { MOUNT } else { PLAIN };
    transaction.put_marked(&medium_key(key), version, &Medium {}, at)
}

/// Returns whether the agent has mounted something at the path of an emptyDir; `None` when it is on record since before this
/// was noted, or was reconstructed from the disk.
pub fn is_mount(seen: &State, key: &str) -> Option<bool> {
    let key = medium_key(key);
    match seen.stored(&key)?.mark() {
        MOUNT => Some(true),
        PLAIN => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::state::kinds::ALL;
    use crate::core::state::{FactRecord, Mutation};
    use crate::core::testkit::{at, export};
    use crate::core::volumes::LOCAL;
    use crate::types::BootId;
    use k8s_openapi::api::core::v1::LocalVolumeSource;

    fn disk() -> Remote {
        Remote {
            source: Source::Local(LocalVolumeSource {
                path: "/mnt/disk".to_owned(),
                fs_type: None,
            }),
            ..export()
        }
    }

    fn apply(state: &mut State, transaction: &Transaction) {
        for mutation in &transaction.mutations {
            state.apply(mutation, 1);
        }
    }

    fn ours() -> OwnMount {
        OwnMount {
            id: "40".to_owned(),
            device: "8:1".to_owned(),
            root: "/data".to_owned(),
            fstype: "ext4".to_owned(),
            source: "/dev/sda1".to_owned(),
        }
    }

    /// The parts of a volume and a device, as the first release has them in table `objects`.
    #[test]
    fn all_parts_are_found_under_the_keys_and_in_the_form_of_the_first_release() {
        let device = disk().device_key().unwrap();
        let id = device.strip_prefix(DEVICE).unwrap();
        let json = r#"{"name":"v","claim":"ns/data","mode":"Filesystem","read_only":false,"mount_options":[],"unique_name":null,"source":{"Local":{"path":"/mnt/disk"}}}"#;
        let mount =
            r#"{"id":"40","device":"8:1","root":"/data","fstype":"ext4","source":"/dev/sda1"}"#;
        let mut state = State::default();
        for (key, version, data) in [
            ("volumes/u1/data".to_owned(), "mount", json),
            (format!("devices//{id}"), "begun", json),
            ("mounts/u1/data".to_owned(), "", mount),
            (format!("mounts/{device}"), "", mount),
            (format!("sizes//{id}"), "", "7"),
            ("media/u1/scratch".to_owned(), "mount", "{}"),
        ] {
            let object = FactRecord {
                mark: version.to_owned(),
                layout: 1,
                data: data.as_bytes().to_vec(),
                at: at(3),
            };
            apply(&mut state, &Transaction::new().put(key, object));
        }
        let record = VolumeRecord {
            plugin: LOCAL.to_owned(),
            path: "/p".to_owned(),
            phase: VolumePhase::Mounted,
            at: at(3),
        };
        for key in ["u1/data", &device, "u1/scratch"] {
            apply(&mut state, &Transaction::new().put(key, record.clone()));
        }

        let found: Vec<_> = volumes(&state).chain(devices(&state)).collect();
        let shown = |d: &Description<'_>| (d.key.to_string(), d.mark, d.at);
        assert_eq!(
            found.iter().map(shown).collect::<Vec<_>>(),
            [
                ("u1/data".to_owned(), Mark::Mount, at(3)),
                (device.clone(), Mark::Begun, at(3)),
            ]
        );
        for (key, one) in ["u1/data", &device].into_iter().zip(&found) {
            assert_eq!(shown(&description(&state, key).unwrap()), shown(one));
            let content = one.content.as_ref().unwrap();
            assert_eq!(content.remote.plugin(), LOCAL);
            assert_eq!(content.device.as_deref(), Some(&*device));
            let again = remote(&state, key).unwrap();
            assert!(Arc::ptr_eq(&content.remote, &again), "read once");
            assert!(is_own(&state, key, &ours(), at(4)));
            let other = OwnMount {
                id: "41".to_owned(),
                root: "/theirs".to_owned(),
                ..ours()
            };
            assert!(has_mount(&state, key) && !is_own(&state, key, &other, at(4)));
        }
        let of = |uid: &str| volumes_of(&state, &uid.into()).count();
        assert_eq!((of("u1"), of("u")), (1, 0));
        assert_eq!(size(&state, &device), Some(7));
        assert_eq!(is_mount(&state, "u1/scratch"), Some(true));
        assert_eq!(is_mount(&state, "u1/data"), None);

        // And all of them are deleted with their records.
        for key in ["u1/data", &device, "u1/scratch"] {
            let gone = forget(Transaction::new(), &state, key);
            apply(&mut state, &gone);
        }
        assert_eq!((state.volumes.len(), state.facts.len()), (0, 0));
    }

    /// The first release reads what is put.
    #[test]
    fn what_is_put_has_the_form_of_the_first_release() {
        let mut state = State::default();
        let device = disk().device_key().unwrap();
        for (mark, text) in [
            (Mark::Claimed, "claimed"),
            (Mark::Begun, "begun"),
            (Mark::Mount, "mount"),
            (Mark::Plain, "plain"),
        ] {
            for (key, object) in [
                ("u1/data", "volumes/u1/data".to_owned()),
                (device.as_str(), device.replace(DEVICE, "devices//")),
            ] {
                let step = (Path::new("/p"), VolumePhase::Mounting, mark);
                let put = put(Transaction::new(), key, &disk(), step, at(5)).unwrap();
                apply(&mut state, &put);
                let record = state.record::<VolumeRecord>(key).unwrap();
                assert_eq!((&*record.plugin, &*record.path), (LOCAL, "/p"));
                assert_eq!((record.phase, record.at), (VolumePhase::Mounting, at(5)));
                let object = state.record::<FactRecord>(&object).unwrap();
                assert_eq!(object.data, serde_json::to_vec(&disk()).unwrap());
                assert_eq!((&*object.mark, object.at), (text, at(5)));
                assert_eq!(description(&state, key).unwrap().mark, mark);
            }
        }
    }

    #[test]
    fn a_description_that_cannot_be_read_has_no_source_and_says_why() {
        let mut state = State::default();
        let broken = FactRecord {
            mark: "of a later release".to_owned(),
            layout: 1,
            data: b"{}".to_vec(),
            at: at(1),
        };
        apply(
            &mut state,
            &Transaction::new().put("volumes/u1/data", broken),
        );
        assert!(remote(&state, "u1/data").is_none());
        let found = description(&state, "u1/data").unwrap();
        assert_eq!(found.mark, Mark::Begun);
        let error = found.content.unwrap_err().to_string();
        let start = "read record volumes/u1/data of table facts: missing field";
        assert!(error.starts_with(start), "{error}");
        let gone = forget(Transaction::new(), &state, "u1/data");
        apply(&mut state, &gone);
        assert_eq!(state.facts.len(), 0);
    }

    #[test]
    fn a_size_is_noted_of_what_is_staged_and_not_once_that_is_gone() {
        let mut state = State::default();
        let device = disk().device_key().unwrap();
        assert!(note_size(&state, &device, 5, at(1)).is_none());
        let step = (Path::new("/p"), VolumePhase::Mounted, Mark::Mount);
        let staged = put(Transaction::new(), &device, &disk(), step, at(1)).unwrap();
        apply(&mut state, &staged);
        let note = note_size(&state, &device, 5, at(2)).unwrap();
        let gone = forget(Transaction::new(), &state, &device);
        let mut later = state.clone();
        apply(&mut state, &note);
        assert_eq!(size(&state, &device), Some(5));
        apply(&mut later, &gone);
        assert!(note.stale_on(&later).is_some());
    }

    #[test]
    fn every_kind_that_a_volume_owns_is_deleted_with_it() {
        let owned = |state: &State| {
            let owned = ALL.iter().filter(|kind| kind.owner == kinds::Owner::Volume);
            let keys = owned.map(|kind| format!("{}u1/data", kind.prefix));
            keys.filter(|key| state.record::<FactRecord>(key).is_some())
                .count()
        };
        let mut state = State::default();
        for kind in ALL {
            let key = format!("{}u1/data", kind.prefix);
            let object = FactRecord::of("x", at(1));
            apply(&mut state, &Transaction::new().put(key, object));
        }
        assert_eq!(owned(&state), 2);
        let gone = forget(Transaction::new(), &state, "u1/data");
        let deletes = |m: &Mutation| matches!(m, Mutation::Delete { .. });
        assert!(gone.mutations.iter().all(deletes));
        apply(&mut state, &gone);
        assert_eq!(owned(&state), 0);
    }

    #[test]
    fn a_mount_is_known_by_its_number_or_by_all_else() {
        let at = |boot| Stamp {
            boot: BootId(boot),
            boottime_ms: 1,
            wall_ms: 1,
        };
        let is_it = |mount: &OwnMount, now| is_same(ours(), at(1), mount, now);
        let with = |change: &dyn Fn(&mut OwnMount)| {
            let mut mount = ours();
            change(&mut mount);
            mount
        };
        assert!(is_it(&ours(), at(1)));
        let renamed = with(&|m| m.root = "/renamed".to_owned());
        assert!(is_it(&renamed, at(1)));
        assert!(!is_it(&renamed, at(2)), "numbers of another boot");
        assert!(is_it(&with(&|m| m.id = "41".to_owned()), at(1)));
        for other in [
            with(&|m| (m.id, m.root) = ("41".to_owned(), "/theirs".to_owned())),
            with(&|m| (m.id, m.source) = ("41".to_owned(), "/dev/sdb1".to_owned())),
            with(&|m| m.device = "8:2".to_owned()),
        ] {
            assert!(!is_it(&other, at(1)), "{other:?}");
        }
    }
}
