//! User namespaces of pods (`hostUsers: false`): which users and groups of the node stand for those of the
//! pod; upstream's `usernsManager`.
//!
//! Every pod has users of its own, from [`LENGTH`] up, as many as `userNamespaces.idsPerPod` says when it is first
//! started, so that no user of a pod is one of the node's or of another pod's. What a pod got is remembered in table
//! `objects` under [`key`] before its sandbox is made, and forgotten with the pod. A range keeps its length when the setting
//! changes. Pure.

use std::collections::BTreeSet;

use k8s_cri::v1;
use serde::{Deserialize, Serialize};

use crate::core::state::kinds::{self, Declared, Key, Kind};
use crate::types::PodUid;

/// Users and groups of a pod by default, and the unit of their number; upstream's `userNsUnitLength`.
pub const LENGTH: u32 = 65_536;

/// The users of the node that a pod has for its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Range {
    /// The node's user that is root in the pod.
    pub host_id: u32,
    /// Number of IDs in the range.
    pub length: u32,
}

impl Kind for Range {
    const DECLARED: Declared = kinds::USER_NAMESPACES;
}

impl Range {
    /// As the runtime takes it.
    pub fn to_cri(self) -> v1::UserNamespace {
        let mapping = v1::IdMapping {
            host_id: self.host_id,
            container_id: 0,
            length: self.length,
        };
        v1::UserNamespace {
            mode: v1::NamespaceMode::Pod.into(),
            uids: vec![mapping],
            gids: vec![mapping],
        }
    }
}

/// Key of a pod's range in table `objects`.
pub fn key(namespace: &str, uid: &PodUid) -> Key<Range> {
    Key::new(namespace, uid.as_str())
}

/// The lowest range of `length` users that no other pod has; `None` when there is none. Ranges on record may have other
/// lengths, and need not begin at a multiple of [`LENGTH`].
pub fn allocate(taken: impl IntoIterator<Item = Range>, length: u32) -> Option<Range> {
    let taken: BTreeSet<u32> = taken
        .into_iter()
        .flat_map(|range| {
            let last = range.host_id.saturating_add(range.length.saturating_sub(1));
            range.host_id / LENGTH..=last / LENGTH
        })
        .collect();
    let blocks = length.div_ceil(LENGTH).max(1);
    // The last block holds the ID that stands for "none".
    let end = u32::MAX / LENGTH;
    let mut first = 1;
    while end.checked_sub(blocks).is_some_and(|last| first <= last) {
        // Behind the last block in the way, if there is one.
        match taken.range(first..first + blocks).next_back() {
            Some(block) => first = block + 1,
            None => {
                return Some(Range {
                    host_id: first * LENGTH,
                    length,
                });
            }
        }
    }
    None
}

/// Returns whether a runtime can run pods in user namespaces with a handler; an empty name is its default handler.
pub fn is_supported(status: &v1::StatusResponse, handler: &str) -> bool {
    status
        .runtime_handlers
        .iter()
        .filter(|h| h.name == handler)
        .any(|h| h.features.is_some_and(|f| f.user_namespaces))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(host_id: u32) -> Range {
        Range {
            host_id,
            length: LENGTH,
        }
    }

    #[test]
    fn every_pod_gets_the_lowest_users_nobody_has() {
        for (taken, want) in [
            (vec![], Some(65_536)),
            (vec![65_536], Some(131_072)),
            (vec![131_072], Some(65_536)),
            (vec![65_536, 196_608], Some(131_072)),
            (vec![0], Some(65_536)),
        ] {
            let got = allocate(taken.iter().copied().map(range), LENGTH);
            assert_eq!(got, want.map(range), "{taken:?}");
        }
        let odd = Range {
            host_id: 70_000,
            length: LENGTH,
        };
        assert_eq!(
            allocate([odd], LENGTH),
            Some(range(196_608)),
            "it overlaps two"
        );
        let all = (1..u32::MAX / LENGTH).map(|block| range(block * LENGTH));
        assert_eq!(allocate(all, LENGTH), None);
    }

    #[test]
    fn ranges_of_another_length_stay_and_are_left_out() {
        let of = |host_id: u32, length: u32| Range { host_id, length };
        let double = 2 * LENGTH;
        for (what, taken, length, want) in [
            ("nothing is taken", vec![], double, Some(of(LENGTH, double))),
            (
                "one of the default is in the way",
                vec![range(65_536)],
                double,
                Some(of(131_072, double)),
            ),
            (
                "the gap is too small",
                vec![range(131_072)],
                double,
                Some(of(196_608, double)),
            ),
            (
                "the gap is just large enough",
                vec![range(196_608)],
                double,
                Some(of(65_536, double)),
            ),
            (
                "the other way round",
                vec![of(65_536, double)],
                LENGTH,
                Some(range(196_608)),
            ),
            (
                "everything for one pod",
                vec![],
                65_534 * LENGTH,
                Some(of(65_536, 65_534 * LENGTH)),
            ),
            (
                "all but one block",
                vec![range(65_536)],
                65_534 * LENGTH,
                None,
            ),
        ] {
            assert_eq!(allocate(taken, length), want, "{what}");
        }
    }

    #[test]
    fn what_is_remembered_is_read_again() {
        let json = serde_json::to_string(&range(65_536)).unwrap();
        assert_eq!(json, r#"{"hostId":65536,"length":65536}"#);
        assert_eq!(serde_json::from_str::<Range>(&json).unwrap(), range(65_536));
        assert!(serde_json::from_str::<Range>("{}").is_err());
        assert_eq!(key("ns", &PodUid::new("u1")), "userns/ns/u1");
    }

    #[test]
    fn the_runtime_is_told_users_and_groups() {
        let told = range(131_072).to_cri();
        assert_eq!(told.mode(), v1::NamespaceMode::Pod);
        assert_eq!(told.uids, told.gids);
        assert_eq!(
            told.uids,
            [v1::IdMapping {
                host_id: 131_072,
                container_id: 0,
                length: 65_536
            }]
        );
    }

    #[test]
    fn a_runtime_says_which_handlers_can() {
        let handler = |name: &str, user_namespaces| v1::RuntimeHandler {
            name: name.to_owned(),
            features: Some(v1::RuntimeHandlerFeatures {
                recursive_read_only_mounts: false,
                user_namespaces,
            }),
        };
        let status = v1::StatusResponse {
            runtime_handlers: vec![
                handler("", true),
                handler("kata", false),
                v1::RuntimeHandler {
                    name: "old".to_owned(),
                    features: None,
                },
            ],
            ..Default::default()
        };
        for (handler, want) in [("", true), ("kata", false), ("old", false), ("none", false)] {
            assert_eq!(is_supported(&status, handler), want, "{handler}");
        }
        assert!(!is_supported(&v1::StatusResponse::default(), ""));
    }
}
