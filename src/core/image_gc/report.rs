//! Images of the node as garbage collection last judged them, stored for `holdfast dump images`.
//!
//! The input is the settings, the images with the reason for keeping each, the order in which the others are removed.
//! The output is one record in table `objects`. Pure. No decision uses it.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::{Policy, Unused, to_free_space};
use crate::core::state::kinds::{self, Declared, Key, Kind};
use crate::core::state::{State, Transaction};
use crate::types::Stamp;

/// Key of the record in table `objects`.
pub const KEY: &str = "imagecollection//node";

/// The record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Report {
    /// `imageMinimumGCAge`, in seconds.
    pub minimum_age_seconds: u64,
    /// `imageMaximumGCAge`, in seconds; 0 for never.
    pub maximum_age_seconds: u64,
    /// The images that the runtime has.
    pub images: Vec<Judged>,
}

/// An image and what collection makes of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Judged {
    /// Its ID.
    pub id: String,
    /// Its names, with registry, and tag or digest.
    pub names: Vec<String>,
    /// In bytes.
    pub size: u64,
    /// The runtime has it pinned.
    pub pinned: bool,
    /// The reason to keep it; `None` if nothing needs it.
    pub kept: Option<String>,
    /// Its place among those that nothing needs, least recently used first; 1 goes first.
    pub order: Option<usize>,
}

impl Kind for Report {
    const DECLARED: Declared = kinds::IMAGE_COLLECTION;
}

impl Report {
    /// Returns its key, which is [`KEY`].
    fn key() -> Key<Self> {
        Key::new("", "node")
    }

    /// Returns the one in `state`; an empty one if there is none, or none that can be read.
    pub fn of(state: &State) -> Self {
        state.object(&Self::key()).unwrap_or_default()
    }

    /// Makes the report of a round. `unused` are the images that nothing needs; `images` have no order yet.
    pub fn new(policy: &Policy, mut images: Vec<Judged>, unused: &[Unused], now: Stamp) -> Self {
        // An image that is too young has its place, too.
        let any_age = Policy {
            minimum_age: std::time::Duration::ZERO,
            ..*policy
        };
        let order = to_free_space(unused, &any_age, now);
        let places: HashMap<&str, usize> = (1..)
            .zip(order)
            .map(|(place, image)| (image.id.as_str(), place))
            .collect();
        for image in &mut images {
            image.order = places.get(image.id.as_str()).copied();
        }
        images.sort_by(|a, b| a.id.cmp(&b.id));
        Self {
            minimum_age_seconds: policy.minimum_age.as_secs(),
            maximum_age_seconds: policy.maximum_age.as_secs(),
            images,
        }
    }

    /// Returns what has to be committed for the record in `state` to become this one.
    pub fn changes(&self, state: &State, now: Stamp) -> Transaction {
        if Self::of(state) == *self {
            return Transaction::new();
        }
        Transaction::new().put_object(&Self::key(), self, now)
    }
}
