//! Facts about a registered driver, and the requirements for a plugin to become one.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::core::state::kinds::{self, Declared, Kind};

/// `PluginInfo.type` of CSI drivers.
pub(super) const CSI_PLUGIN: &str = "CSIPlugin";
const NAME_MAX: usize = 63;

/// A driver that registered; JSON of the record `csiplugins//<name>`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Driver {
    /// Its name: a valid path component.
    pub name: String,
    /// The socket of its services.
    pub endpoint: PathBuf,
    /// The socket it registered by. It is registered as long as that is there.
    pub registration: PathBuf,
    /// The highest supported version of CSI that it has.
    pub version: Version,
    /// ID of this node, as the driver has it.
    pub node_id: String,
    /// Number of its volumes that can be attached; 0 is no limit.
    pub max_volumes: i64,
    /// Topology of the node, as the driver has it.
    pub topology: BTreeMap<String, String>,
    /// The UID of the node whose objects in the API server have all this.
    pub(super) told: Option<String>,
    /// It went, and the API server still has it.
    pub(super) gone: bool,
}

impl Kind for Driver {
    const DECLARED: Declared = kinds::CSI_PLUGINS;
}

impl Driver {
    /// Returns whether both give the same report to the API server.
    pub(super) fn same_for_api(&self, other: &Self) -> bool {
        (&self.node_id, self.max_volumes, &self.topology)
            == (&other.node_id, other.max_volumes, &other.topology)
    }
}

/// A version of CSI.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Version(u64, u64, u64);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

impl Version {
    /// `1.2.3`, also with a `v` before it, without the last one or two numbers, or with a suffix, which does not
    /// count.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let text = text.strip_prefix(['v', 'V']).unwrap_or(text);
        let numbers = text.split(['-', '+']).next().unwrap_or_default();
        let mut parts = numbers.split('.');
        let mut next = |required: bool| match parts.next() {
            Some(part) if part.bytes().all(|b| b.is_ascii_digit()) => part.parse().ok(),
            None if !required => Some(0),
            _ => None,
        };
        let version = Self(next(true)?, next(false)?, next(false)?);
        parts.next().is_none().then_some(version)
    }

    fn is_supported(self) -> bool {
        self.0 == 1
    }

    /// The highest one that this agent speaks: 1.x.
    ///
    /// # Errors
    /// When there is none, in words for the plugin.
    pub(super) fn highest(versions: &[String]) -> Result<Self, String> {
        let known = versions.iter().filter_map(|text| Self::parse(text));
        known.filter(|v| v.is_supported()).max().ok_or_else(|| {
            if versions.is_empty() {
                "the plugin supports no version at all; it must name one from 1.0.0 on, below 2.0.0"
                    .to_owned()
            } else {
                format!("none of the versions {versions:?} is supported; 1.x is")
            }
        })
    }
}

/// Checks the name of a driver: it is part of paths and of objects.
///
/// # Errors
/// Why not, in words for the plugin.
pub(super) fn check_name(name: &str) -> Result<(), String> {
    let alphanumeric = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let valid = match name.len().cmp(&NAME_MAX) {
        Ordering::Greater => false,
        _ => {
            alphanumeric(name.chars().next())
                && alphanumeric(name.chars().next_back())
                && name
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '.')
        }
    };
    if valid {
        return Ok(());
    }
    let shown: String = name.chars().take(2 * NAME_MAX).collect();
    Err(format!(
        "{shown:?} is no name of a driver: at most {NAME_MAX} letters, digits, '-' and '.', a letter or digit first \
         and last"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_their_numbers() {
        let highest = |versions: &[&str]| {
            let versions: Vec<String> = versions.iter().map(ToString::to_string).collect();
            Version::highest(&versions).map(|v| v.to_string())
        };
        assert_eq!(highest(&["1.0.0"]).unwrap(), "1.0.0");
        assert_eq!(
            highest(&["v1.9.0", "1.10", "0.3.0", "2.0.0"]).unwrap(),
            "1.10.0"
        );
        assert_eq!(highest(&["v1.2.0-rc1"]).unwrap(), "1.2.0");
        for none in [
            &["0.9.0"][..],
            &["2.0.0"],
            &["one"],
            &["1.x"],
            &["1.0.0.0"],
            &[""],
        ] {
            assert!(
                highest(none).unwrap_err().contains("is supported"),
                "{none:?}"
            );
        }
        assert!(highest(&[]).unwrap_err().contains("no version at all"));
    }

    #[test]
    fn names_are_path_components_and_object_names() {
        for good in ["d", "ebs.csi.aws.com", "A-1.b"] {
            check_name(good).unwrap();
        }
        let long = "x".repeat(64);
        for bad in [
            "", ".", "..", "a/b", "../x", "-a", "a.", "a_b", "ä", "a b", &long,
        ] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
    }
}
