use std::sync::Mutex;

use serde_json::{Value, json};

use super::*;

fn attributes(more: Value) -> TokenAttributes {
    let mut all = json!({
        "serviceAccountTokenAudience": "registry", "cacheType": "Token", "requireServiceAccount": true,
    });
    for (field, value) in more.as_object().unwrap() {
        all[field] = value.clone();
    }
    serde_json::from_value(all).unwrap()
}

fn mode(more: Value) -> TokenMode {
    TokenMode::new(attributes(more), VERSION).unwrap()
}

fn pod(account: Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"namespace": "ns", "name": "p", "uid": "u"},
        "spec": {"containers": [], "serviceAccountName": account},
    }))
    .unwrap()
}

/// One service account, and a token that changes with each request.
#[derive(Default)]
struct Fake {
    annotations: BTreeMap<String, String>,
    uid: Mutex<String>,
    tokens: Mutex<Vec<String>>,
}

impl ServiceAccounts for Fake {
    fn facts<'a>(&'a self, _: &'a Pod) -> BoxFuture<'a, Result<ServiceAccountFacts, String>> {
        let facts = ServiceAccountFacts {
            uid: self.uid.lock().unwrap().clone(),
            annotations: self.annotations.clone(),
        };
        async move { Ok(facts) }.boxed()
    }

    fn token<'a>(
        &'a self,
        _: &'a Pod,
        audience: &'a str,
    ) -> BoxFuture<'a, Result<Zeroizing<String>, String>> {
        let mut tokens = self.tokens.lock().unwrap();
        let token = format!("token-{}-for-{audience}", tokens.len());
        tokens.push(token.clone());
        async move { Ok(Zeroizing::new(token)) }.boxed()
    }
}

fn fake(annotations: &[(&str, &str)]) -> Fake {
    let annotations = annotations.iter();
    Fake {
        annotations: annotations
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect(),
        ..Fake::default()
    }
}

#[test]
fn attributes_are_checked_as_upstream_does() {
    for (more, says) in [
        (
            json!({"serviceAccountTokenAudience": ""}),
            ".serviceAccountTokenAudience is required",
        ),
        (
            json!({"requireServiceAccount": null}),
            ".requireServiceAccount is required",
        ),
        (json!({"cacheType": ""}), ".cacheType"),
        (json!({"cacheType": "Pod"}), "use ServiceAccount or Token"),
        (
            json!({"requireServiceAccount": false, "requiredServiceAccountAnnotationKeys": ["a"]}),
            "cannot be false",
        ),
        (
            json!({"requiredServiceAccountAnnotationKeys": ["-a"]}),
            "\"-a\" is no annotation key",
        ),
        (
            json!({"optionalServiceAccountAnnotationKeys": ["x_y/a"]}),
            "\"x_y/a\" is no annotation key",
        ),
        (
            json!({"optionalServiceAccountAnnotationKeys": ["a", "a"]}),
            "\"a\" is there twice",
        ),
        (
            json!({"requiredServiceAccountAnnotationKeys": ["a"],
                   "optionalServiceAccountAnnotationKeys": ["a"]}),
            "\"a\" is there twice",
        ),
    ] {
        let error = TokenMode::new(attributes(more.clone()), VERSION).unwrap_err();
        assert!(error.contains(says), "{more}: {error}");
    }
    let beta = "credentialprovider.kubelet.k8s.io/v1beta1";
    let error = TokenMode::new(attributes(json!({})), beta).unwrap_err();
    assert!(
        error.contains("is only supported for apiVersion"),
        "{error}"
    );
    mode(json!({"cacheType": "ServiceAccount",
                "requiredServiceAccountAnnotationKeys": ["domain.io/Identity-id"],
                "optionalServiceAccountAnnotationKeys": ["tenant"]}));
}

#[tokio::test]
async fn a_program_is_given_the_annotations_that_it_names_and_accounts_without_them_have_not_opted_in()
 {
    let mode = mode(json!({"requiredServiceAccountAnnotationKeys": ["need"],
                           "optionalServiceAccountAnnotationKeys": ["may", "absent"]}));
    let pod = pod(json!("robot"));
    let without = fake(&[("may", "1")]);
    assert!(
        mode.give(Some(&pod), Some(&without))
            .await
            .unwrap()
            .is_none()
    );
    assert!(
        without.tokens.lock().unwrap().is_empty(),
        "no token is made"
    );

    let with = fake(&[("need", "1"), ("may", "2"), ("other", "3")]);
    let given = mode.give(Some(&pod), Some(&with)).await.unwrap().unwrap();
    let annotations: Vec<_> = given.annotations.iter().collect();
    assert_eq!(
        annotations,
        [
            (&"may".to_owned(), &"2".to_owned()),
            (&"need".to_owned(), &"1".to_owned())
        ]
    );
    let token = given.token.clone().unwrap();
    assert_eq!(token.as_str(), "token-0-for-registry");
    assert!(!format!("{given:?}").contains("token-0"));
}

#[tokio::test]
async fn a_pod_without_an_account_gets_no_token_and_is_served_only_where_that_is_allowed() {
    let fake = fake(&[]);
    for pod in [None, Some(pod(Value::Null)), Some(pod(json!("")))] {
        let required = mode(json!({}));
        let given = required.give(pod.as_ref(), Some(&fake)).await.unwrap();
        assert!(given.is_none(), "{pod:?}");
        let optional = mode(json!({"requireServiceAccount": false}));
        let given = optional.give(pod.as_ref(), Some(&fake)).await.unwrap();
        let given = given.unwrap();
        assert!(given.token.is_none() && given.account.is_none());
        assert_eq!(given.cache_key, "");
    }
    assert!(fake.tokens.lock().unwrap().is_empty());
    let error = mode(json!({}))
        .give(Some(&pod(json!("robot"))), None)
        .await
        .unwrap_err();
    assert!(error.contains("--kubeconfig"), "{error}");
}

#[tokio::test]
async fn answers_are_kept_by_account_or_by_token() {
    let pod = pod(json!("robot"));
    for (cache, same) in [("ServiceAccount", true), ("Token", false)] {
        let mode = mode(json!({ "cacheType": cache }));
        let fake = fake(&[]);
        let mut keys = Vec::new();
        for uid in ["1", "1", "2"] {
            *fake.uid.lock().unwrap() = uid.to_owned();
            let given = mode.give(Some(&pod), Some(&fake)).await.unwrap().unwrap();
            assert_eq!(given.may_echo, !same, "{cache}");
            keys.push(given.cache_key);
        }
        assert_eq!(keys[0] == keys[1], same, "{cache}: every token is another");
        assert_ne!(keys[1], keys[2], "{cache}: an account that was made anew");
    }
}
