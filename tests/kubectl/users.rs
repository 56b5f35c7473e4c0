//! Who may see what: the API server's own TokenReview and SubjectAccessReview decide.

use holdfast_testkit::envtest::{Authority, DAY};
use k8s_openapi::api::core::v1::ServiceAccount;
use serde_json::json;

use crate::agent_process::eventually;
use crate::direct::{Direct, User, command};
use crate::node::{Node, shared};
use crate::setup::{FOREVER, script};

/// Requests that tell who may what: path, verb, and the fine-grained subresource.
fn pages(node: &Node) -> Vec<(&'static str, String)> {
    let pod = format!("{}/watched/main", node.namespace);
    vec![
        ("GET", "/metrics".to_owned()),
        ("GET", "/metrics/resource".to_owned()),
        ("GET", "/stats/summary".to_owned()),
        ("GET", "/pods".to_owned()),
        ("GET", "/runningpods/".to_owned()),
        ("GET", "/configz".to_owned()),
        ("GET", "/logs/".to_owned()),
        ("GET", format!("/containerLogs/{pod}")),
        ("POST", format!("/run/{pod}?cmd=true")),
        (
            "GET",
            format!("/exec/{pod}?output=1&{}", command(&["true"])),
        ),
    ]
}

async fn statuses(direct: &Direct, node: &Node) -> Vec<u16> {
    let mut statuses = Vec::new();
    for (method, path) in pages(node) {
        statuses.push(direct.ask(method, &path).await.expect("an answer").0);
    }
    statuses
}

/// A service account with the right to some subresources of nodes.
fn account(node: &Node, name: &str, resources: &[&str]) -> User {
    node.create::<ServiceAccount>(json!({"metadata": {"name": name}}));
    if !resources.is_empty() {
        let full = format!("{}:{name}", node.namespace);
        let role = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": full},
            "rules": [{"apiGroups": [""], "resources": resources, "verbs": ["get", "create"]}],
        });
        let binding = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": full},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": full},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": node.namespace}],
        });
        let both = json!({"apiVersion": "v1", "kind": "List", "items": [role, binding]});
        node.env.apply(&both.to_string());
    }
    User::Token(node.env.token(&node.namespace, name))
}

#[test]
fn nobody_sees_anything_without_rights() {
    let node = shared();
    node.create_pod("watched", script("Always", FOREVER));
    node.wait_running("watched");
    let count = pages(&node).len();
    let authority = node.env.authority();
    let strangers = Authority::new("strangers");
    let strange = strangers.client("admin", "system:masters", DAY);
    let expired = authority.client("admin", "system:masters", -DAY);
    let nodes = node.env.node_identity("another", DAY);
    let none = account(&node, "none", &[]);

    node.run(async {
        for (who, user) in [
            ("nobody", User::Nobody),
            ("a wrong token", User::Token("nonsense".to_owned())),
        ] {
            let direct = Direct::of(&node, user);
            assert_eq!(statuses(&direct, &node).await, vec![401; count], "{who}");
        }
        // Refused at the handshake, or as nobody.
        for (who, identity) in [("a stranger", strange), ("one of yesterday", expired)] {
            let direct = Direct::of(&node, User::Certificate(identity));
            for (method, path) in pages(&node) {
                if let Ok((status, _)) = direct.ask(method, &path).await {
                    assert_eq!(status, 401, "{who} {path}");
                }
            }
        }
        for (who, user) in [
            ("an account", none),
            ("another node", User::Certificate(nodes)),
        ] {
            let direct = Direct::of(&node, user);
            assert_eq!(statuses(&direct, &node).await, vec![403; count], "{who}");
        }
        let admin = Direct::admin(&node);
        let seen = statuses(&admin, &node).await;
        // The last one is let in, and asked to speak another protocol.
        assert_eq!(seen[..count - 1], vec![200; count - 1]);
        assert_eq!(seen[count - 1], 500);
    });
    // The node serves on.
    assert_eq!(node.raw("healthz").trim(), "ok");
}

#[test]
fn rights_to_a_part_are_rights_to_that_part() {
    let node = shared();
    node.create_pod("watched-too", script("Always", FOREVER));
    let metrics = account(&node, "metrics", &["nodes/metrics"]);
    let stats = account(&node, "stats", &["nodes/stats"]);
    let proxy = account(&node, "proxy", &["nodes/proxy"]);
    let (metrics, stats, proxy) = (
        Direct::of(&node, metrics),
        Direct::of(&node, stats),
        Direct::of(&node, proxy),
    );
    let asks = |direct: &Direct, path: &str| node.run(direct.ask("GET", path)).expect("an answer");
    // Rights are known to the API server a moment after they are written, and to the node some seconds later.
    for (direct, path) in [
        (&metrics, "/metrics"),
        (&stats, "/stats/summary"),
        (&proxy, "/pods"),
    ] {
        eventually(&format!("{path} is seen"), || match asks(direct, path) {
            (200, _) => Ok(()),
            other => Err(format!("{other:?}")),
        });
    }
    let (status, said) = asks(&metrics, "/pods");
    assert_eq!(status, 403);
    let user = format!("user=system:serviceaccount:{}:metrics", node.namespace);
    for words in ["Forbidden", &user, "verb=get", "resource=nodes"] {
        assert!(said.contains(words), "{said}");
    }
    for path in [
        "/metrics/resource",
        "/metrics/cadvisor",
        "/metrics/probes",
        "/metrics/slis",
    ] {
        assert_eq!(asks(&metrics, path).0, 200, "{path}");
        assert_eq!(asks(&stats, path).0, 403, "{path}");
    }
    for path in ["/configz", "/runningpods/"] {
        assert_eq!(asks(&metrics, path).0, 403, "{path}");
        assert_eq!(asks(&proxy, path).0, 200, "{path}");
    }
    // What is taken away is gone some seconds later.
    let full = format!("{}:proxy", node.namespace);
    node.env
        .kubectl_ok(&["delete", "clusterrolebinding", &full]);
    eventually("the right is gone", || match asks(&proxy, "/pods") {
        (403, _) => Ok(()),
        (status, _) => Err(status.to_string()),
    });
}
