//! User namespaces of pods (`hostUsers: false`): which users and groups of the node stand for those of the
//! pod; upstream's `usernsManager`.
//!
//! Every pod has [`LENGTH`] users of its own, from [`LENGTH`] up, so that no user of a pod is one of the
//! node's or of another pod's. What a pod got is remembered in table `objects` under [`key`] before its
//! sandbox is made, and forgotten with the pod. Pure.

use std::collections::BTreeSet;

use k8s_cri::v1;
use serde::{Deserialize, Serialize};

use crate::core::state::kinds::{self, Declared, Key, Kind};
use crate::types::PodUid;

/// Users and groups of a pod; upstream's `userNsLength`.
pub const LENGTH: u32 = 65_536;

/// The users of the node that a pod has for its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Range {
    /// The node's user that is root in the pod.
    pub host_id: u32,
    /// How many follow.
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

/// The lowest range that no other pod has; `None` when all are taken.
pub fn allocate(taken: impl IntoIterator<Item = Range>) -> Option<Range> {
    let taken: BTreeSet<u32> = taken
        .into_iter()
        .flat_map(|range| {
            let last = range.host_id.saturating_add(range.length.saturating_sub(1));
            range.host_id / LENGTH..=last / LENGTH
        })
        .collect();
    // The last block holds the ID that stands for "none".
    let block = (1..u32::MAX / LENGTH).find(|block| !taken.contains(block))?;
    Some(Range {
        host_id: block * LENGTH,
        length: LENGTH,
    })
}

/// Whether a runtime can run pods in user namespaces with a handler; empty = its default.
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
            let got = allocate(taken.iter().copied().map(range));
            assert_eq!(got, want.map(range), "{taken:?}");
        }
        let odd = Range {
            host_id: 70_000,
            length: LENGTH,
        };
        assert_eq!(allocate([odd]), Some(range(196_608)), "it overlaps two");
        let all = (1..u32::MAX / LENGTH).map(|block| range(block * LENGTH));
        assert_eq!(allocate(all), None);
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
