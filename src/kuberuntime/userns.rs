//! User namespaces of pods (`hostUsers: false`): which users and groups of the node stand for those of the
//! pod; upstream's `usernsManager`.
//!
//! Every pod has users of its own, from the node's [`Pool`], as many as `userNamespaces.idsPerPod` says when it is first
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

/// Returns the range that a sandbox has, as the runtime shows it; `None` if it has none of its own or the runtime does not show it.
pub fn of_sandbox(status: &v1::PodSandboxStatus) -> Option<Range> {
    let namespaces = status.linux.as_ref()?.namespaces.as_ref()?;
    let users = namespaces.options.as_ref()?.userns_options.as_ref()?;
    let [mapping] = users.uids[..] else {
        return None;
    };
    (users.mode() == v1::NamespaceMode::Pod && mapping.length > 0).then_some(Range {
        host_id: mapping.host_id,
        length: mapping.length,
    })
}

/// Key of a pod's range in table `objects`.
pub fn key(namespace: &str, uid: &PodUid) -> Key<Range> {
    Key::new(namespace, uid.as_str())
}

/// User whose subordinate IDs are those of pods.
const KUBELET: &str = "kubelet";

/// The users and groups of the node that pods may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    /// The first; a multiple of [`LENGTH`].
    pub first: u32,
    /// Their number; a multiple of [`LENGTH`].
    pub count: u32,
}

impl Default for Pool {
    /// All but the node's own and the last block, which holds the ID that stands for "none".
    fn default() -> Self {
        Self {
            first: LENGTH,
            count: (u32::MAX / LENGTH - 1) * LENGTH,
        }
    }
}

impl Pool {
    /// Returns the subordinate IDs of the user `kubelet`, from the content of `/etc/subuid` and `/etc/subgid`; all IDs where it has
    /// none. Upstream: `getKubeletMappings`, which asks `getsubids`.
    ///
    /// # Errors
    /// When they cannot be those of so many pods, in words for the operator.
    pub fn of_kubelet(
        users: &[u8],
        groups: &[u8],
        ids_per_pod: u32,
        max_pods: u32,
    ) -> Result<Self, String> {
        let (users, groups) = (subordinate(users), subordinate(groups));
        if users.is_empty() && groups.is_empty() {
            return Ok(Self::default());
        }
        if users != groups {
            return Err(format!(
                "the user {KUBELET} has other subordinate users ({users:?}) than groups ({groups:?}); give it the same in \
                 /etc/subuid and /etc/subgid"
            ));
        }
        let [(first, count)] = users[..] else {
            return Err(format!(
                "the user {KUBELET} has {} ranges of subordinate IDs; give it one",
                users.len()
            ));
        };
        let unit = u64::from(LENGTH);
        let needed = u64::from(ids_per_pod) * u64::from(max_pods);
        let end = u64::from(u32::MAX / LENGTH) * unit;
        if first < unit || !first.is_multiple_of(unit) || !count.is_multiple_of(unit) {
            return Err(format!(
                "the subordinate IDs of the user {KUBELET} are {count} from {first}; both have to be multiples of {LENGTH}"
            ));
        }
        if count < needed || first.saturating_add(count) > end {
            return Err(format!(
                "the subordinate IDs of the user {KUBELET} are {count} from {first}; {max_pods} pods with {ids_per_pod} each need \
                 {needed} below {end}"
            ));
        }
        match (u32::try_from(first), u32::try_from(count)) {
            (Ok(first), Ok(count)) => Ok(Self { first, count }),
            _ => Err(format!("{count} IDs from {first} are too many")),
        }
    }
}

/// Returns first and number of each range of [`KUBELET`] in a file like `/etc/subuid`. Other lines are passed over, as
/// `getsubids` does.
fn subordinate(file: &[u8]) -> Vec<(u64, u64)> {
    let range = |line: &[u8]| {
        let mut fields = std::str::from_utf8(line).ok()?.trim().split(':');
        (fields.next()? == KUBELET).then_some(())?;
        let (first, count) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        fields.next().is_none().then_some((first, count))
    };
    let mut ranges: Vec<(u64, u64)> = file
        .split(|byte| *byte == b'\n')
        .filter_map(range)
        .collect();
    ranges.sort_unstable();
    ranges
}

/// The lowest range of `length` users of the pool that no other pod has; `None` when there is none. Ranges on record may have
/// other lengths, lie elsewhere, and need not begin at a multiple of [`LENGTH`].
pub fn allocate(taken: impl IntoIterator<Item = Range>, length: u32, pool: Pool) -> Option<Range> {
    let taken: BTreeSet<u32> = taken
        .into_iter()
        .flat_map(|range| {
            let last = range.host_id.saturating_add(range.length.saturating_sub(1));
            range.host_id / LENGTH..=last / LENGTH
        })
        .collect();
    let blocks = length.div_ceil(LENGTH).max(1);
    let mut first = pool.first / LENGTH;
    let end = first.saturating_add(pool.count / LENGTH);
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
            let got = allocate(taken.iter().copied().map(range), LENGTH, Pool::default());
            assert_eq!(got, want.map(range), "{taken:?}");
        }
        let odd = Range {
            host_id: 70_000,
            length: LENGTH,
        };
        assert_eq!(
            allocate([odd], LENGTH, Pool::default()),
            Some(range(196_608)),
            "it overlaps two"
        );
        let all = (1..u32::MAX / LENGTH).map(|block| range(block * LENGTH));
        assert_eq!(allocate(all, LENGTH, Pool::default()), None);
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
            assert_eq!(allocate(taken, length, Pool::default()), want, "{what}");
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

    #[test]
    fn pods_have_the_subordinate_ids_of_the_user_kubelet_if_it_has_any() {
        let of = |users: &str, groups: &str| {
            Pool::of_kubelet(users.as_bytes(), groups.as_bytes(), LENGTH, 110)
        };
        let others = "# comment\nroot:1:65536\nkubelets:65536:65536\nkubelet:x:1\n\n";
        assert_eq!(of("", ""), Ok(Pool::default()));
        assert_eq!(of(others, others), Ok(Pool::default()));
        let line = format!("{others}kubelet:131072:{}\n", 110 * LENGTH);
        let pool = Pool {
            first: 2 * LENGTH,
            count: 110 * LENGTH,
        };
        assert_eq!(of(&line, &line), Ok(pool));
        let pods = |count| (0..count).map(|n| range((2 + n) * LENGTH));
        assert_eq!(allocate(pods(109), LENGTH, pool), Some(range(111 * LENGTH)));
        assert_eq!(allocate(pods(110), LENGTH, pool), None);
        for (users, groups, why) in [
            (line.as_str(), "", "than groups"),
            (
                "kubelet:65536:65536\nkubelet:262144:65536",
                "kubelet:262144:65536\nkubelet:65536:65536",
                "has 2 ranges",
            ),
            ("kubelet:0:7208960", "kubelet:0:7208960", "multiples"),
            (
                "kubelet:65537:7208960",
                "kubelet:65537:7208960",
                "multiples",
            ),
            ("kubelet:65536:65537", "kubelet:65536:65537", "multiples"),
            ("kubelet:65536:65536", "kubelet:65536:65536", "need 7208960"),
            (
                "kubelet:65536:18446744073709486080",
                "kubelet:65536:18446744073709486080",
                "below 4294901760",
            ),
        ] {
            let error = of(users, groups).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
