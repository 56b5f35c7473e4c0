//! Requests that are answered and not stored: tokens, reviews, version, discovery.

use jiff::Timestamp;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenReview};
use k8s_openapi::api::authorization::v1::{SelfSubjectAccessReview, SubjectAccessReview};
use serde_json::{Value, json};

use super::auth::Identity;
use super::failure::Failure;
use super::request::Request;
use super::resource::{self, RESOURCES, typed};
use super::state::{IssuedToken, State};
use super::verbs::{Answer, seconds};
use crate::validation::{self, Write};

/// TokenRequest.
pub(super) fn token(
    state: &mut State,
    request: &Request,
    mut asked: Value,
    now: Timestamp,
) -> Answer {
    let accounts = &RESOURCES[request.resource];
    let key = (
        request.resource,
        request.namespace.clone(),
        request.name.clone(),
    );
    if state.get(&key).is_none() {
        return Err(Failure::not_found(accounts, &request.name));
    }
    valid(request, "TokenRequest", &asked)?;
    let seconds_asked = asked["spec"]["expirationSeconds"].as_i64().unwrap_or(3600);
    let mut bound = None;
    let reference = &asked["spec"]["boundObjectRef"];
    if let Some(name) = reference["name"].as_str() {
        let kind = reference["kind"].as_str().unwrap_or_default();
        let Some(index) = resource::of_kind("v1", kind) else {
            return Err(Failure::bad_request(format!(
                "cannot bind token for serviceaccount \"{}\" to a {kind}",
                request.name
            )));
        };
        let key = (index, request.namespace.clone(), name.to_owned());
        let Some(object) = state.get(&key) else {
            return Err(Failure::not_found(&RESOURCES[index], name));
        };
        let account = object["spec"]["serviceAccountName"].as_str();
        if kind == "Pod" && account.unwrap_or_default() != request.name {
            return Err(Failure::bad_request(format!(
                "cannot bind token for serviceaccount \"{}\" to pod running with different serviceaccount name.",
                request.name
            )));
        }
        let uid = object["metadata"]["uid"].as_str().unwrap_or_default();
        let given = reference["uid"].as_str().unwrap_or_default();
        if !given.is_empty() && given != uid {
            let why = format!(
                "the UID in the bound object reference ({given}) does not match the UID in record. The object might have been deleted and then recreated"
            );
            return Err(Failure::conflict(&RESOURCES[index], name, &why));
        }
        bound = Some((key, uid.to_owned()));
    }
    let expires = now + jiff::SignedDuration::from_secs(seconds_asked);
    let token = format!(
        "token-{}-{}-{}",
        request.namespace,
        request.name,
        state.next_id()
    );
    let audiences: Vec<String> = asked["spec"]["audiences"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|audience| audience.as_str().map(str::to_owned))
        .collect();
    state.tokens.insert(
        token.clone(),
        IssuedToken {
            namespace: request.namespace.clone(),
            service_account: request.name.clone(),
            audiences,
            expires,
            bound,
        },
    );
    asked["kind"] = "TokenRequest".into();
    asked["apiVersion"] = "authentication.k8s.io/v1".into();
    if asked["metadata"].is_null() {
        asked["metadata"] = json!({});
    }
    asked["spec"]["expirationSeconds"] = seconds_asked.into();
    if asked["spec"]["audiences"].is_null() {
        asked["spec"]["audiences"] = json!(["https://kubernetes.default.svc"]);
    }
    asked["status"] = json!({ "token": token, "expirationTimestamp": seconds(expires) });
    Ok((201, asked))
}

/// Refuses what a server does not take.
fn valid(request: &Request, kind: &str, asked: &Value) -> Result<(), Failure> {
    let (group, known) = match kind {
        "TokenRequest" => (
            "authentication.k8s.io",
            typed::<TokenRequest>(asked.clone()),
        ),
        "TokenReview" => ("authentication.k8s.io", typed::<TokenReview>(asked.clone())),
        "SubjectAccessReview" => {
            let known = typed::<SubjectAccessReview>(asked.clone());
            ("authorization.k8s.io", known)
        }
        _ => {
            let known = typed::<SelfSubjectAccessReview>(asked.clone());
            ("authorization.k8s.io", known)
        }
    };
    let known = known.map_err(|error| {
        Failure::bad_request(format!(
            "{kind} in version \"v1\" cannot be handled as a {kind}: {error}"
        ))
    })?;
    let unknown = validation::unknown_fields(asked, &known);
    if !unknown.is_empty() {
        return Err(Failure::unknown_fields(&unknown));
    }
    let found = validation::violations(&Write {
        group,
        resource: &request.kind,
        subresource: &request.subresource,
        namespace: &request.namespace,
        name: &request.name,
        old: None,
        new: asked,
    });
    match found.is_empty() {
        true => Ok(()),
        false => Err(Failure::violates(kind, group, "", &found)),
    }
}

/// Whether a token is good now, and whose it is.
pub(super) fn owner_of(
    state: &State,
    token: &str,
    now: Timestamp,
) -> Option<(String, Vec<String>)> {
    let issued = state.tokens.get(token)?;
    if issued.expires <= now {
        return None;
    }
    if let Some((key, uid)) = &issued.bound
        && state
            .get(key)
            .is_none_or(|object| object["metadata"]["uid"] != **uid)
    {
        return None;
    }
    let user = format!(
        "system:serviceaccount:{}:{}",
        issued.namespace, issued.service_account
    );
    Some((user, issued.audiences.clone()))
}

/// Everything that is no resource.
pub(super) fn other(state: &State, request: &Request, now: Timestamp) -> Answer {
    match (request.verb.as_str(), request.kind.as_str()) {
        ("create", "tokenreviews") => {
            may_review(request)?;
            valid(request, "TokenReview", &request.body)?;
            let mut review = request.body.clone();
            let token = review["spec"]["token"].as_str().unwrap_or_default();
            review["status"] = match owner_of(state, token, now) {
                Some((user, audiences)) => json!({
                    "authenticated": true, "audiences": audiences,
                    "user": { "username": user, "groups": ["system:serviceaccounts", "system:authenticated"] },
                }),
                None => {
                    json!({ "authenticated": false, "user": {}, "error": "invalid bearer token" })
                }
            };
            Ok((201, review))
        }
        ("create", "subjectaccessreviews" | "selfsubjectaccessreviews") => {
            may_review(request)?;
            let kind = match request.kind.starts_with("self") {
                true => "SelfSubjectAccessReview",
                false => "SubjectAccessReview",
            };
            valid(request, kind, &request.body)?;
            let mut review = request.body.clone();
            let groups = review["spec"]["groups"].as_array().cloned();
            let allowed = review["spec"]["user"] == "kubernetes-admin"
                || groups.is_some_and(|groups| groups.contains(&"system:masters".into()));
            review["status"] = json!({ "allowed": allowed });
            Ok((201, review))
        }
        ("get", path) => fixed(path)
            .map(|answer| (200, answer))
            .ok_or_else(Failure::unknown_path),
        _ => Err(Failure::unknown_path()),
    }
}

fn may_review(request: &Request) -> Result<(), Failure> {
    match request.identity {
        Identity::Admin | Identity::Node(_) => Ok(()),
        _ => Err(Failure::new(
            403,
            "Forbidden",
            format!(
                "{} is forbidden: User \"{}\" cannot create resource \"{0}\"",
                request.kind,
                request.identity.username()
            ),
        )),
    }
}

fn fixed(path: &str) -> Option<Value> {
    let groups = || {
        let mut groups: Vec<(&str, &str)> = RESOURCES
            .iter()
            .filter(|resource| !resource.group.is_empty())
            .map(|resource| (resource.group, resource.version))
            .collect();
        groups.dedup();
        groups
    };
    Some(match path {
        "/version" => json!({
            "major": "1", "minor": "36", "gitVersion": "v1.36.0", "gitCommit": "", "gitTreeState": "clean",
            "buildDate": "1970-01-01T00:00:00Z", "goVersion": "go1.24", "compiler": "gc", "platform": "linux/amd64",
        }),
        "/readyz" | "/livez" | "/healthz" => json!("ok"),
        "/api" => {
            json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})
        }
        "/apis" => {
            let groups: Vec<Value> = groups()
                .iter()
                .map(|(group, version)| {
                    let version =
                        json!({"groupVersion": format!("{group}/{version}"), "version": version});
                    json!({"name": group, "versions": [version], "preferredVersion": version})
                })
                .collect();
            json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        }
        path => {
            let version = path
                .strip_prefix("/apis/")
                .or_else(|| path.strip_prefix("/api/"))?;
            let found: Vec<Value> = RESOURCES
                .iter()
                .filter(|resource| resource.api_version() == version)
                .map(|resource| {
                    json!({
                        "name": resource.plural, "singularName": "", "namespaced": resource.namespaced,
                        "kind": resource.kind,
                        "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
                    })
                })
                .collect();
            if found.is_empty() {
                return None;
            }
            json!({
                "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": found,
            })
        }
    })
}
