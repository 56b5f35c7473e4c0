use serde_json::json;

use super::Table;

#[test]
fn a_token_request() {
    let table = Table {
        path: "v1 serviceaccounts token",
        old: None,
        new: json!({"metadata": {}, "spec": {"audiences": ["a"], "expirationSeconds": 600}}),
    };
    table.holds(&[
        ("an hour", &[("/spec/expirationSeconds", json!(null))], &[]),
        (
            "a short life",
            &[("/spec/expirationSeconds", json!(599))],
            &["spec.expirationSeconds Invalid"],
        ),
        (
            "a long life",
            &[("/spec/expirationSeconds", json!(1_i64 << 32))],
            &[],
        ),
        (
            "a longer life",
            &[("/spec/expirationSeconds", json!((1_i64 << 32) + 1))],
            &["spec.expirationSeconds Invalid"],
        ),
        (
            "of the path",
            &[
                ("/metadata/name", json!("web")),
                ("/metadata/namespace", json!("default")),
            ],
            &[],
        ),
        (
            "another account",
            &[("/metadata/name", json!("other"))],
            &["metadata.name Invalid"],
        ),
        (
            "another namespace",
            &[("/metadata/namespace", json!("other"))],
            &["metadata.namespace Invalid"],
        ),
    ]);
}

#[test]
fn a_token_review() {
    let table = Table {
        path: "authentication.k8s.io tokenreviews",
        old: None,
        new: json!({"metadata": {}, "spec": {"token": "t", "audiences": ["a"]}}),
    };
    table.holds(&[
        (
            "no token",
            &[("/spec/token", json!(""))],
            &["spec.token Required"],
        ),
        (
            "a namespace",
            &[("/metadata/namespace", json!("x"))],
            &["metadata.namespace Forbidden"],
        ),
    ]);
}

#[test]
fn an_access_review() {
    let attributes =
        json!({"verb": "get", "resource": "nodes", "subresource": "proxy", "name": "n1"});
    let table = Table {
        path: "authorization.k8s.io subjectaccessreviews",
        old: None,
        new: json!({"metadata": {}, "spec": {"user": "me", "resourceAttributes": attributes}}),
    };
    let path = json!({"verb": "get", "path": "/metrics"});
    table.holds(&[
        (
            "a group alone",
            &[("/spec/user", json!(null)), ("/spec/groups", json!(["g"]))],
            &[],
        ),
        (
            "nobody",
            &[("/spec/user", json!(""))],
            &["spec.user Invalid"],
        ),
        (
            "nothing",
            &[("/spec/resourceAttributes", json!(null))],
            &["spec.resourceAttributes Invalid"],
        ),
        (
            "a path beside a resource",
            &[("/spec/nonResourceAttributes", path)],
            &["spec.nonResourceAttributes Invalid"],
        ),
        (
            "with a name",
            &[("/metadata/name", json!("x"))],
            &["metadata Invalid"],
        ),
    ]);
    let own = Table {
        path: "authorization.k8s.io selfsubjectaccessreviews",
        old: None,
        new: json!({"metadata": {}, "spec": {"resourceAttributes": attributes}}),
    };
    own.holds(&[(
        "nothing",
        &[("/spec/resourceAttributes", json!(null))],
        &["spec.resourceAttributes Invalid"],
    )]);
}
