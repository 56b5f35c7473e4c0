//! Check that a store still belongs to the cluster of the node.
//!
//! A store belongs to a node of a cluster. Its records of pods, back-offs and resource versions mean nothing in another
//! cluster, even where names are the same. The input is the recorded cluster, the kubeconfig's cluster, and the node
//! that the API server shows. The output is the consequence for the store. Pure.
//!
//! One fact alone proves nothing: CAs are replaced, API servers move, nodes are deleted and register again. Two facts
//! that agree do, unless another fact contradicts them: a CA that both have in common, or the very node object that is
//! recorded. So two clusters that share a CA count as one.

use std::collections::BTreeSet;

/// A cluster, as a kubeconfig names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// The URL of the API server.
    pub server: String,
    /// The public keys of its certificate authorities, as hashes. None where the server is not verified, or by the
    /// authorities that the system trusts: these say nothing about the cluster.
    pub authorities: BTreeSet<String>,
}

/// View of the node on an API server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Shown {
    /// It was not asked or has not answered, or does not know who asks.
    #[default]
    Nothing,
    /// There is no such node.
    Absent,
    /// The node has this UID.
    Node(String),
}

/// Record of the cluster that a store is kept for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// The cluster.
    pub cluster: Cluster,
    /// The UID of the node's object; `None` before it was shown.
    pub node: Option<String>,
    /// View of the node that made the last agent end.
    pub shown: Shown,
}

/// Consequence for the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It belongs to this cluster from now on: it knew of none.
    Claim,
    /// It belongs to this cluster.
    Same,
    /// The API server has to decide. Until then the store stays, and no pod of the API server is started.
    Doubted,
    /// It was kept for a node of another cluster. Another store begins.
    Other,
}

/// Judges by the record, if there is one, the kubeconfig, and the node on its API server.
pub fn judge(recorded: Option<&Recorded>, found: &Cluster, shown: &Shown) -> Verdict {
    let Some(recorded) = recorded else {
        return Verdict::Claim;
    };
    let (before, after) = (&recorded.cluster.authorities, &found.authorities);
    let are_known = !before.is_empty() && !after.is_empty();
    let other_authorities = are_known && before.is_disjoint(after);
    if are_known && !other_authorities {
        return Verdict::Same;
    }
    let other_server = recorded.cluster.server != found.server;
    if !other_authorities && !other_server {
        return Verdict::Same;
    }
    let shown = match shown {
        Shown::Nothing => &recorded.shown,
        shown => shown,
    };
    let other_node = match (&recorded.node, shown) {
        (Some(before), Shown::Node(now)) if before == now => return Verdict::Same,
        (Some(_), Shown::Node(_) | Shown::Absent) => true,
        (None, _) | (_, Shown::Nothing) => false,
    };
    let signs = [other_authorities, other_server, other_node];
    match signs.into_iter().filter(|sign| *sign).count() {
        0 | 1 if *shown == Shown::Nothing => Verdict::Doubted,
        // The server has answered, and there is nothing to compare its answer with.
        0 | 1 => Verdict::Same,
        _ => Verdict::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(server: &str, authorities: &[&str]) -> Cluster {
        Cluster {
            server: server.to_owned(),
            authorities: authorities.iter().map(|&a| a.to_owned()).collect(),
        }
    }

    #[test]
    fn a_store_goes_with_its_cluster_when_two_facts_say_so() {
        use Shown::{Absent, Nothing};
        use Verdict::{Doubted, Other, Same};
        let node = |uid: &str| Shown::Node(uid.to_owned());
        let recorded = Recorded {
            cluster: cluster("https://a", &["ca-1"]),
            node: Some("u1".to_owned()),
            shown: Nothing,
        };
        for (server, authorities, shown, expected) in [
            ("https://a", &["ca-1"][..], Nothing, Same),
            // The node was deleted, and perhaps registered again.
            ("https://a", &["ca-1"], node("u2"), Same),
            ("https://a", &["ca-1"], Absent, Same),
            // A rotation of the CA: both for a while, then the new one alone.
            ("https://a", &["ca-1", "ca-2"], Nothing, Same),
            ("https://b", &["ca-2", "ca-1"], node("u2"), Same),
            // The server has moved.
            ("https://b", &["ca-1"], Nothing, Same),
            ("https://b", &["ca-1"], node("u2"), Same),
            // `kubeadm init` again with the CA that was kept looks like that as well.
            ("https://b", &["ca-1"], Absent, Same),
            // Another CA at the same address: `kubeadm init` again, or a rotation that was missed.
            ("https://a", &["ca-2"], Nothing, Doubted),
            ("https://a", &["ca-2"], node("u1"), Same),
            ("https://a", &["ca-2"], node("u2"), Other),
            ("https://a", &["ca-2"], Absent, Other),
            // Another CA at another address.
            ("https://b", &["ca-2"], Nothing, Other),
            ("https://b", &["ca-2"], Absent, Other),
            ("https://b", &["ca-2"], node("u2"), Other),
            ("https://b", &["ca-2"], node("u1"), Same),
            // Nobody knows the CA.
            ("https://a", &[], Nothing, Same),
            ("https://a", &[], node("u2"), Same),
            ("https://b", &[], Nothing, Doubted),
            ("https://b", &[], node("u1"), Same),
            ("https://b", &[], node("u2"), Other),
            ("https://b", &[], Absent, Other),
        ] {
            let found = cluster(server, authorities);
            let verdict = judge(Some(&recorded), &found, &shown);
            assert_eq!(verdict, expected, "{server} {authorities:?} {shown:?}");
            assert_eq!(judge(None, &found, &shown), Verdict::Claim);
            // What the last agent was shown counts until the server says something else.
            let again = Recorded {
                shown: shown.clone(),
                ..recorded.clone()
            };
            assert_eq!(judge(Some(&again), &found, &Nothing), expected);
            if expected == Other && authorities == ["ca-2"] {
                assert_eq!(judge(Some(&again), &found, &node("u1")), Same);
            }
        }
    }

    #[test]
    fn a_node_that_was_never_shown_is_not_missed() {
        let recorded = Recorded {
            cluster: cluster("https://a", &["ca-1"]),
            node: None,
            shown: Shown::Nothing,
        };
        for (server, shown, expected) in [
            ("https://a", Shown::Nothing, Verdict::Doubted),
            ("https://a", Shown::Absent, Verdict::Same),
            ("https://a", Shown::Node("u2".to_owned()), Verdict::Same),
            ("https://b", Shown::Nothing, Verdict::Other),
            ("https://b", Shown::Absent, Verdict::Other),
        ] {
            let found = cluster(server, &["ca-2"]);
            assert_eq!(judge(Some(&recorded), &found, &shown), expected);
        }
    }
}
