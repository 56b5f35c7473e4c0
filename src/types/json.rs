//! Kubernetes objects inside bincode records.
//!
//! The generated types need a self-describing format to decode, so a binary record carries them as JSON
//! bytes. In a human-readable format (`dump -o json`) the object itself is written.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;

use serde::de::{DeserializeOwned, Visitor};
use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A shared object that is stored as JSON bytes.
#[derive(Debug, PartialEq)]
pub struct Json<T>(pub Arc<T>);

impl<T> Json<T> {
    /// Wraps an object.
    pub fn new(value: T) -> Self {
        Self(Arc::new(value))
    }
}

impl<T> Clone for Json<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Deref for Json<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> From<Arc<T>> for Json<T> {
    fn from(value: Arc<T>) -> Self {
        Self(value)
    }
}

impl<T: Serialize> Serialize for Json<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            return self.0.serialize(serializer);
        }
        let bytes = serde_json::to_vec(&*self.0).map_err(S::Error::custom)?;
        serializer.serialize_bytes(&bytes)
    }
}

impl<'de, T: DeserializeOwned> Deserialize<'de> for Json<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            return T::deserialize(deserializer).map(Self::new);
        }
        deserializer
            .deserialize_bytes(JsonBytes(PhantomData))
            .map(Self::new)
    }
}

/// Decodes where the bytes lie: half of what a store holds are such bytes.
struct JsonBytes<T>(PhantomData<T>);

impl<T: DeserializeOwned> Visitor<'_> for JsonBytes<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the bytes of a JSON object")
    }

    fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<T, E> {
        serde_json::from_slice(bytes).map_err(E::custom)
    }
}
