//! Keys of the records of volumes, and of the progress of their storage. [`records`](super::records) has the records.

use sha2::{Digest, Sha256};

use super::Remote;

/// Begin of the keys of devices among the volume records; never the UID of a pod.
pub const DEVICE: &str = "device/";

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
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Claimed => "claimed",
            Self::Begun => "begun",
            Self::Mount => "mount",
            Self::Plain => "plain",
        }
    }

    /// The mark that a description has; what is not understood counts as begun.
    pub(super) fn of(text: &str) -> Self {
        let all = [Self::Claimed, Self::Mount, Self::Plain];
        let found = all.into_iter().find(|mark| mark.text() == text);
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
}

/// Bytes as lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::testkit::export;

    #[test]
    fn the_key_of_a_pods_volume_names_both_and_that_of_a_device_neither() {
        assert_eq!(split("u1/data"), Some(("u1", "data")));
        assert_eq!(split("device/5a"), None);
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
}
