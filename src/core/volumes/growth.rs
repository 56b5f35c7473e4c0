//! Expansion of volumes: the states of their claims and persistent volumes, and the work of this node. Upstream:
//! `NodeExpander`, `desiredStateOfWorldPopulator.checkVolumeFSResize`.
//!
//! The input is a claim, its persistent volume, and the size of the volume on this node. The output is whether to
//! expand it, and the status of the claim. The claim's `status.allocatedResourceStatuses` names the owner of the next
//! step, where the controller keeps it (external-resizer 1.12 and later); otherwise the sizes alone decide.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::types::quantity;

const STORAGE: &str = "storage";
/// Conditions of a claim whose volume grows.
const GROWING: [&str; 2] = ["Resizing", "FileSystemResizePending"];
/// Conditions of a claim that end when its volume has grown.
pub const CONDITIONS: [&str; 4] = [GROWING[0], GROWING[1], "ControllerResizeError", NODE_ERROR];
/// The condition of a claim whose volume could not be grown here.
pub const NODE_ERROR: &str = "NodeResizeError";
/// `status.allocatedResourceStatuses.storage` while the node grows the volume.
pub const IN_PROGRESS: &str = "NodeResizeInProgress";
/// The same once it is known that it never will.
pub const INFEASIBLE: &str = "NodeResizeInfeasible";
const PENDING: &str = "NodeResizePending";

/// Owner of the next step of an expansion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// The claim does not name the owner.
    Unsaid,
    /// This node's.
    Pending,
    /// This node's, which has begun.
    InProgress,
    /// Another component's: the controller's, or the user's, who asked for more than there is.
    Others,
}

/// Sizes of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// `spec.capacity` of the persistent volume, in bytes.
    pub volume: u64,
    /// `status.capacity` of the claim, in bytes.
    pub claim: u64,
    /// Owner of the next step.
    pub turn: Turn,
    /// Several nodes may have it mounted for writing: each grows it for itself.
    pub shared: bool,
}

/// Expansion to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    /// Size after it, in bytes.
    pub bytes: u64,
    /// True if the claim's status is patched at the end; otherwise another node has done so.
    pub told: bool,
    /// Owner of the step if the claim's status names one: then the beginning, or a failure, is patched into the status.
    pub turn: Option<Turn>,
}

impl Sizes {
    /// `None` when one of them is not known.
    pub fn of(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> Option<Self> {
        let spec = volume.spec.as_ref()?;
        let status = claim.status.as_ref()?;
        let modes = spec.access_modes.iter().flatten();
        let turn = status.allocated_resource_statuses.as_ref();
        let turn = turn.and_then(|all| all.get(STORAGE)).map(String::as_str);
        Some(Self {
            volume: bytes(spec.capacity.as_ref()?.get(STORAGE)?)?,
            claim: bytes(status.capacity.as_ref()?.get(STORAGE)?)?,
            turn: match turn {
                None | Some("") => Turn::Unsaid,
                Some(PENDING) => Turn::Pending,
                Some(IN_PROGRESS) => Turn::InProgress,
                Some(_) => Turn::Others,
            },
            shared: modes.into_iter().any(|mode| mode == "ReadWriteMany"),
        })
    }

    /// Returns the expansion to do here, where the volume has `here` bytes as far as is known.
    pub fn growth(self, here: Option<u64>) -> Option<Growth> {
        let bytes = self.volume;
        if self.claim >= bytes && self.turn == Turn::Unsaid {
            let behind = self.shared && here.is_some_and(|here| here < bytes);
            return behind.then_some(Growth {
                bytes,
                told: false,
                turn: None,
            });
        }
        let ours = self.turn != Turn::Others && self.claim < bytes;
        ours.then_some(Growth {
            bytes,
            told: true,
            turn: Some(self.turn).filter(|turn| *turn != Turn::Unsaid),
        })
    }
}

/// Returns whether a claim's volume is about to have more than the claim's status shows.
pub fn is_expected(claim: &PersistentVolumeClaim) -> bool {
    let Some(status) = claim.status.as_ref() else {
        return false;
    };
    let turn = status.allocated_resource_statuses.as_ref();
    if let Some(turn) = turn.and_then(|all| all.get(STORAGE)) {
        // Nothing more comes until somebody asks for less.
        return !turn.ends_with("Infeasible");
    }
    let mut conditions = status.conditions.iter().flatten();
    if conditions.any(|c| GROWING.contains(&c.type_.as_str()) && c.status == "True") {
        return true;
    }
    let wanted = claim.spec.as_ref().and_then(|s| s.resources.as_ref());
    let wanted = wanted.and_then(|r| r.requests.as_ref()?.get(STORAGE));
    let has = status.capacity.as_ref().and_then(|c| c.get(STORAGE));
    let (wanted, has) = (wanted.and_then(bytes), has.and_then(bytes));
    wanted.zip(has).is_some_and(|(wanted, has)| wanted > has)
}

/// Whole bytes, rounded up.
fn bytes(of: &Quantity) -> Option<u64> {
    const NANO: i128 = 1_000_000_000;
    let nanos = quantity::nanos(&of.0).ok()?;
    let whole = nanos.div_euclid(NANO) + i128::from(nanos.rem_euclid(NANO) != 0);
    u64::try_from(whole).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn volume(storage: &str, mode: &str) -> PersistentVolume {
        let volume = json!({"metadata": {}, "spec": {"capacity": {"storage": storage}, "accessModes": [mode]}});
        serde_json::from_value(volume).unwrap()
    }

    fn claim(status: Value) -> PersistentVolumeClaim {
        let spec = json!({"resources": {"requests": {"storage": "2Gi"}}});
        serde_json::from_value(json!({"metadata": {}, "spec": spec, "status": status})).unwrap()
    }

    fn has(storage: &str, turn: Option<&str>) -> PersistentVolumeClaim {
        let turns = turn.map(|turn| json!({"storage": turn}));
        claim(json!({"capacity": {"storage": storage}, "allocatedResourceStatuses": turns}))
    }

    #[test]
    fn a_volume_grows_when_it_is_this_nodes_turn() {
        const GI: u64 = 1 << 30;
        let grow = |claim: &PersistentVolumeClaim| {
            let sizes = Sizes::of(&volume("2Gi", "ReadWriteOnce"), claim)?;
            sizes.growth(Some(GI)).map(|g| (g.bytes, g.told, g.turn))
        };
        assert_eq!(grow(&has("1Gi", None)), Some((2 * GI, true, None)));
        for (turn, says) in [
            ("NodeResizePending", Turn::Pending),
            ("NodeResizeInProgress", Turn::InProgress),
        ] {
            let wanted = (2 * GI, true, Some(says));
            assert_eq!(grow(&has("1Gi", Some(turn))), Some(wanted));
        }
        for others in [
            "ControllerResizeInProgress",
            "ControllerResizeInfeasible",
            "NodeResizeInfeasible",
        ] {
            assert_eq!(grow(&has("1Gi", Some(others))), None, "{others}");
        }
        assert_eq!(grow(&has("2Gi", None)), None, "one node has it, this one");
        assert_eq!(grow(&claim(json!({}))), None);
    }

    #[test]
    fn a_shared_volume_grows_here_too_when_another_node_was_first() {
        let grow = |mode: &str, here: Option<u64>| {
            let sizes = Sizes::of(&volume("2Gi", mode), &has("2Gi", None)).unwrap();
            sizes.growth(here).map(|growth| growth.told)
        };
        assert_eq!(grow("ReadWriteMany", Some(1 << 30)), Some(false));
        assert_eq!(grow("ReadWriteMany", Some(2 << 30)), None);
        assert_eq!(grow("ReadWriteMany", None), None, "mounted with all it has");
        assert_eq!(grow("ReadWriteOnce", Some(1 << 30)), None);
    }

    #[test]
    fn growth_is_expected_from_the_request_to_the_end() {
        for (status, expected) in [
            (json!({"capacity": {"storage": "1Gi"}}), true),
            (json!({"capacity": {"storage": "2048Mi"}}), false),
            (
                json!({"capacity": {"storage": "2Gi"}, "conditions": [{"type": "Resizing", "status": "True"}]}),
                true,
            ),
            (
                json!({"capacity": {"storage": "2Gi"}, "conditions": [{"type": "Resizing", "status": "False"}]}),
                false,
            ),
            (
                json!({"capacity": {"storage": "2Gi"}, "conditions": [{"type": "Other", "status": "True"}]}),
                false,
            ),
            (
                json!({"allocatedResourceStatuses": {"storage": "NodeResizePending"}}),
                true,
            ),
            (
                json!({"capacity": {"storage": "1Gi"}, "allocatedResourceStatuses": {"storage": "NodeResizeInfeasible"}}),
                false,
            ),
            (json!({}), false),
        ] {
            assert_eq!(is_expected(&claim(status.clone())), expected, "{status}");
        }
    }

    #[test]
    fn sizes_are_whole_bytes_rounded_up() {
        for (text, want) in [
            ("0", Some(0)),
            ("7", Some(7)),
            ("1500m", Some(2)),
            ("1n", Some(1)),
            ("2Ki", Some(2048)),
            ("-1", None),
            ("x", None),
        ] {
            assert_eq!(bytes(&Quantity(text.to_owned())), want, "{text}");
        }
    }
}
