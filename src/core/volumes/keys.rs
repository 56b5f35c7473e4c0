//! Keys of the records of remote volumes, and of the progress of their storage.
//!
//! A volume has a [`VolumeRecord`](crate::core::state::VolumeRecord) `<uid>/<volume>` and, in the same transaction, an
//! [`ObjectRecord`] `volumes/<uid>/<volume>` that holds its [`Remote`]; staged storage (a device) has the same
//! as `device/<id>` and `devices//<id>`. The `resource_version` of the object holds the state of the step that its
//! phase is about ([`Mark`]).

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::Remote;
use crate::core::state::ObjectRecord;
use crate::core::state::kinds::{self, Declared, Key, Kind};
use crate::types::{PodUid, Stamp};

/// Begin of the keys of volumes' objects.
pub const VOLUMES: &str = kinds::VOLUMES.prefix;
/// Begin of the keys of devices' objects.
pub const DEVICES: &str = "devices//";
/// Begin of the keys of devices among the volume records; never the UID of a pod.
pub const DEVICE: &str = "device/";

/// Key of the object of a pod's volume.
pub fn volume_object(uid: &PodUid, volume: &str) -> String {
    format!("{VOLUMES}{uid}/{volume}")
}

/// Key of the object that belongs to a volume record, of a pod's volume or of a device.
pub fn object_of(record: &str) -> String {
    match record.strip_prefix(DEVICE) {
        Some(id) => format!("{DEVICES}{id}"),
        None => format!("{VOLUMES}{record}"),
    }
}

/// Size of a device on this node, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Size(pub u64);

impl Kind for Size {
    const DECLARED: Declared = kinds::SIZES;
}

/// Key of the size that a device has on this node; `None` for the volume of a pod.
pub fn size_of(record: &str) -> Option<Key<Size>> {
    let id = record.strip_prefix(DEVICE)?;
    Some(Key::new("", id))
}

/// Key of the volume record that an object belongs to; `None` for an object of another kind.
pub fn record_of(object: &str) -> Option<String> {
    match object.strip_prefix(DEVICES) {
        Some(id) => Some(format!("{DEVICE}{id}")),
        None => object.strip_prefix(VOLUMES).map(str::to_owned),
    }
}

/// The pod and the volume that a volume record is about; `None` for a device.
pub fn split(record: &str) -> Option<(&str, &str)> {
    match record.split_once('/') {
        Some(_) if record.starts_with(DEVICE) => None,
        found => found,
    }
}

/// State of the step that a record's phase is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// It is wanted; no step was ever begun.
    Claimed,
    /// A step was begun; its effect is unknown.
    Begun,
    /// It is done, and there is a mount that proves it.
    Mount,
    /// It is done, and left nothing in the mount table.
    Plain,
}

impl Mark {
    fn text(self) -> &'static str {
        match self {
            Self::Claimed => "claimed",
            Self::Begun => "begun",
            Self::Mount => "mount",
            Self::Plain => "plain",
        }
    }

    /// The mark of an object; what is not understood counts as begun.
    pub fn of(object: &ObjectRecord) -> Self {
        let all = [Self::Claimed, Self::Mount, Self::Plain];
        let found = all
            .into_iter()
            .find(|m| m.text() == object.resource_version);
        found.unwrap_or(Self::Begun)
    }
}

impl Remote {
    /// Key of the volume record of its staged storage; `None` when each pod's mount stands for itself.
    pub fn device_key(&self) -> Option<String> {
        let device = self.device()?;
        let mut hash = Sha256::new();
        hash.update(self.plugin());
        hash.update("\n");
        hash.update(device);
        Some(format!("{DEVICE}{}", hex(&hash.finalize())))
    }

    /// The object that describes it.
    ///
    /// # Errors
    /// When it cannot be written as JSON.
    pub fn object(&self, mark: Mark, at: Stamp) -> Result<ObjectRecord, serde_json::Error> {
        Ok(ObjectRecord {
            resource_version: mark.text().to_owned(),
            encrypted: false,
            data: serde_json::to_vec(self)?,
            at,
        })
    }

    /// The volume that an object describes.
    ///
    /// # Errors
    /// When it is not one.
    pub fn of(object: &ObjectRecord) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(&object.data)
    }
}

/// Bytes as lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::testkit::{at, export};

    /// Keys are on disk: what one release has written the next one finds.
    #[test]
    fn keys_stay_as_they_are() {
        assert_eq!(volume_object(&"u1".into(), "data"), "volumes/u1/data");
        for (record, object, size, parts) in [
            ("u1/data", "volumes/u1/data", None, Some(("u1", "data"))),
            ("device/5a", "devices//5a", Some("sizes//5a"), None),
        ] {
            assert_eq!(object_of(record), object);
            assert_eq!(record_of(object).as_deref(), Some(record));
            assert_eq!(size_of(record).as_deref(), size);
            assert_eq!(split(record), parts);
        }
        assert_eq!(record_of("media/u1"), None);
        assert_eq!(split("nothing"), None);
    }

    #[test]
    fn the_key_of_a_device_is_made_of_its_plugin_and_its_name() {
        let source = serde_json::json!({"driver": "d.example", "volumeHandle": "h1"});
        let csi = crate::core::volumes::Csi {
            source: serde_json::from_value(source).unwrap(),
            ..Default::default()
        };
        let mut volume = export();
        assert_eq!(volume.device_key(), None);
        volume.source = crate::core::volumes::Source::Csi(Box::new(csi));
        // SHA-256 of "kubernetes.io/csi\nd.example/h1".
        assert_eq!(
            volume.device_key().as_deref(),
            Some("device/04439520df76bc7182fa08b0cb52ed834bea8ff1817e176a243e2c327cdc28c6")
        );
    }

    #[test]
    fn marks_are_read_as_they_were_written() {
        let volume = export();
        for (mark, text) in [
            (Mark::Claimed, "claimed"),
            (Mark::Begun, "begun"),
            (Mark::Mount, "mount"),
            (Mark::Plain, "plain"),
        ] {
            let object = volume.object(mark, at(0)).unwrap();
            assert_eq!((&*object.resource_version, Mark::of(&object)), (text, mark));
        }
        let mut object = volume.object(Mark::Mount, at(0)).unwrap();
        object.resource_version = "of a later release".to_owned();
        assert_eq!(Mark::of(&object), Mark::Begun);
    }
}
