//! The verbs on resources, as kube-apiserver's generic registry has them.

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::auth;
use super::defaults::{self, normalize};
use super::failure::Failure;
use super::patch;
use super::request::Request;
use super::resource::{self, EVENTS_GROUP, RESOURCES, Resource};
use super::reviews;
use super::select::Selector;
use super::state::{Key, Page, State};
use crate::validation;

/// HTTP status and body.
pub(super) type Answer = Result<(u16, Value), Failure>;

/// One write in the making.
pub(super) struct Write<'a> {
    pub(super) state: &'a mut State,
    pub(super) request: &'a Request,
    pub(super) resource: &'static Resource,
    pub(super) key: Key,
    pub(super) now: Timestamp,
    /// Straight from the test: no admission, no validation of changes, and whatever part of the object.
    pub(super) direct: bool,
}

pub(super) fn selector(request: &Request) -> Result<Selector, Failure> {
    Selector::parse(
        &RESOURCES[request.resource],
        request.param("labelSelector"),
        request.param("fieldSelector"),
    )
}

/// Answers everything but a watch.
pub(super) fn answer(state: &mut State, request: &Request, now: Timestamp) -> Answer {
    let resource = &RESOURCES[request.resource];
    let stored = resource::stored_as(request.resource);
    let selector = selector(request)?;
    auth::authorize(state, request, resource, &selector)?;
    let key = (stored, request.namespace.clone(), request.name.clone());
    if request.verb == "list" {
        return list(state, request, resource, &selector);
    }
    if request.verb == "get" {
        let object = match (request.param("resourceVersion"), &state.stale) {
            (Some("0"), Some(stale)) => stale.objects.get(&key).cloned(),
            _ => state.get(&key),
        };
        let object = object.ok_or_else(|| Failure::not_found(resource, &request.name))?;
        return Ok((200, shown(resource, &object)));
    }
    let mut write = Write {
        state,
        request,
        resource,
        key,
        now,
        direct: false,
    };
    match (request.verb.as_str(), request.subresource.as_str()) {
        ("create", "") => write
            .create(request.body.clone())
            .map(|object| (201, object)),
        ("create", "token") if resource.plural == "serviceaccounts" => {
            let asked = request.body.clone();
            auth::restrict_token(write.state, request, &asked)?;
            reviews::token(write.state, request, asked, now)
        }
        ("create", "eviction") if resource.plural == "pods" => {
            let old = write.existing()?;
            auth::restrict(write.state, request, resource, Some(&old), None)?;
            write.delete(&request.body["deleteOptions"])?;
            let status =
                json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"});
            Ok((201, status))
        }
        ("create", "binding") if resource.plural == "pods" => {
            let mut pod = Value::clone(&*write.existing()?);
            pod["spec"]["nodeName"] = request.body["target"]["name"].clone();
            write.state.put(&write.key, pod);
            let status =
                json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"});
            Ok((201, status))
        }
        ("update", _) => {
            let old = write.existing()?;
            write.update(&old, request.body.clone()).map(|o| (200, o))
        }
        ("patch", _) => {
            let old = write.existing()?;
            let base = shown(resource, &old);
            let new = patch::apply(&request.content_type, &base, &request.body)?;
            write.update(&old, new).map(|object| (200, object))
        }
        ("delete", "") if !request.name.is_empty() => {
            let old = write.existing()?;
            auth::restrict(write.state, request, resource, Some(&old), None)?;
            let mut options = request.body.clone();
            if let Some(grace) = request.param("gracePeriodSeconds") {
                options["gracePeriodSeconds"] = grace.parse::<i64>().unwrap_or(0).into();
            }
            write.delete(&options)
        }
        _ => Err(Failure::unknown_path()),
    }
}

/// The object in the API it was asked for in.
pub(super) fn shown(resource: &Resource, object: &Value) -> Value {
    if resource.group == EVENTS_GROUP {
        defaults::convert_event(object, false)
    } else {
        object.clone()
    }
}

fn list(state: &mut State, request: &Request, resource: &Resource, selector: &Selector) -> Answer {
    let asked = match request.param("resourceVersion") {
        None | Some("") => None,
        Some(text) => Some(text.parse::<u64>().map_err(|_| {
            let why = format!("resourceVersion: Invalid value: \"{text}\"");
            Failure::new(500, "", why)
        })?),
    };
    let (mut rest, rv) = if let Some(token) = request.param("continue").filter(|t| !t.is_empty()) {
        let Some(page) = state.pages.remove(token) else {
            if token.starts_with("page-") {
                return Err(Failure::expired(
                    "The provided continue parameter is too old to display a consistent list result",
                ));
            }
            return Err(Failure::bad_request("invalid continue token"));
        };
        (page.rest, page.rv)
    } else {
        let (objects, rv) = match (&state.stale, asked) {
            (Some(stale), Some(0)) => (&stale.objects, stale.rv),
            _ => (&state.objects, state.rv),
        };
        if asked.is_some_and(|asked| asked > rv) {
            return Err(too_large(asked.unwrap_or(0), rv));
        }
        let stored = resource::stored_as(request.resource);
        let mut found: Vec<_> = State::of(objects, stored, &request.namespace);
        found.retain(|object| selector.matches(&shown(resource, object)));
        (found, rv)
    };
    let mut metadata = json!({ "resourceVersion": rv.to_string() });
    let limit = request.param("limit").and_then(|limit| limit.parse().ok());
    if let Some(limit) = limit.filter(|limit| *limit > 0 && *limit < rest.len()) {
        let later = rest.split_off(limit);
        let token = format!("page-{}", state.next_id());
        metadata["continue"] = token.clone().into();
        metadata["remainingItemCount"] = later.len().into();
        state.pages.insert(token, Page { rest: later, rv });
    }
    let items: Vec<Value> = rest
        .iter()
        .map(|object| {
            let mut item = shown(resource, object);
            if let Value::Object(fields) = &mut item {
                fields.shift_remove("kind");
                fields.shift_remove("apiVersion");
            }
            item
        })
        .collect();
    Ok((
        200,
        json!({
            "kind": format!("{}List", resource.kind),
            "apiVersion": resource.api_version(),
            "metadata": metadata,
            "items": items,
        }),
    ))
}

fn too_large(asked: u64, current: u64) -> Failure {
    let message = format!("Timeout: Too large resource version: {asked}, current: {current}");
    let mut failure = Failure::new(504, "Timeout", message);
    failure.details = json!({
        "causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}],
        "retryAfterSeconds": 1,
    });
    failure
}

impl Write<'_> {
    fn existing(&self) -> Result<Arc<Value>, Failure> {
        let missing = || Failure::not_found(self.resource, &self.key.2);
        self.state.get(&self.key).ok_or_else(missing)
    }

    pub(super) fn create(&mut self, body: Value) -> Result<Value, Failure> {
        let resource = self.resource;
        let mut object = self.typed(body)?;
        let metadata = &mut object["metadata"];
        if metadata["name"].as_str().unwrap_or_default().is_empty()
            && let Some(prefix) = metadata["generateName"].as_str().map(str::to_owned)
        {
            metadata["name"] = format!("{prefix}{}", self.state.suffix()).into();
        }
        let name = metadata["name"].as_str().unwrap_or_default().to_owned();
        if name.is_empty() {
            let why = "Required value: name or generateName is required";
            return Err(Failure::invalid(resource, "", "metadata.name", why));
        }
        if !metadata["resourceVersion"].is_null() && !self.direct {
            let why = "resourceVersion should not be set on objects to be created";
            return Err(Failure::new(500, "", why));
        }
        if resource.namespaced {
            match metadata["namespace"].as_str() {
                Some(own) if !self.key.1.is_empty() && own != self.key.1 => {
                    return Err(Failure::bad_request(
                        "the namespace of the provided object does not match the namespace sent on the request",
                    ));
                }
                Some(own) => own.clone_into(&mut self.key.1),
                None if self.key.1.is_empty() => "default".clone_into(&mut self.key.1),
                None => {}
            }
            metadata["namespace"] = self.key.1.clone().into();
            self.namespace_takes(&name)?;
        }
        self.key.2.clone_from(&name);
        let given_uid = metadata["uid"].is_string() && self.direct;
        if !given_uid {
            metadata["uid"] = self.state.uid().into();
        }
        metadata["creationTimestamp"] = seconds(self.now).into();
        for gone in [
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "selfLink",
        ] {
            metadata[gone] = Value::Null;
        }
        if resource.is("pods") && !self.direct {
            auth::restrict_priority(self.state, resource, &object)?;
        }
        let status = object["status"].clone();
        defaults::on_create(self.state, resource, &mut object);
        if self.direct && !status.is_null() {
            // A test may begin in the middle of a life.
            for (field, value) in status.as_object().into_iter().flatten() {
                object["status"][field] = value.clone();
            }
        }
        if resource.is("certificatesigningrequests") {
            object["spec"]["username"] = self.request.identity.username().into();
            object["spec"]["groups"] = json!(self.request.identity.groups());
        }
        let object = self.normalized(object)?;
        auth::restrict(self.state, self.request, resource, None, Some(&object))?;
        self.valid(None, &object)?;
        if self.state.get(&self.key).is_some() {
            return Err(Failure::already_exists(resource, &name));
        }
        let stored = self.state.put(&self.key, object);
        Ok(shown(resource, &stored))
    }

    fn namespace_takes(&self, name: &str) -> Result<(), Failure> {
        let Some(namespaces) = resource::find("", "v1", "namespaces") else {
            return Ok(());
        };
        let key = (namespaces, String::new(), self.key.1.clone());
        match self.state.get(&key) {
            None => Err(Failure::not_found(&RESOURCES[namespaces], &self.key.1)),
            Some(namespace) if namespace["status"]["phase"] == "Terminating" => {
                let why = format!(
                    "unable to create new content in namespace {} because it is being terminated",
                    self.key.1
                );
                Err(Failure::forbidden(self.resource, name, &why))
            }
            Some(_) => Ok(()),
        }
    }

    /// Refuses what a server does not take.
    fn valid(&self, old: Option<&Value>, object: &Value) -> Result<(), Failure> {
        let (resource, name) = (self.resource, &self.key.2);
        if self.direct {
            if resource.is("pods") && object["spec"]["containers"].as_array().is_none() {
                let field = "spec.containers";
                return Err(Failure::invalid(resource, name, field, "Required value"));
            }
            return Ok(());
        }
        let found = validation::violations(&validation::Write {
            group: resource.group,
            resource: resource.plural,
            subresource: &self.request.subresource,
            namespace: &self.key.1,
            name: &self.request.name,
            old,
            new: object,
        });
        if found.is_empty() {
            return Ok(());
        }
        Err(Failure::violates(
            resource.kind,
            resource.group,
            name,
            &found,
        ))
    }

    /// Writes `new` over `old`, through the subresource of the request.
    pub(super) fn update(&mut self, old: &Arc<Value>, new: Value) -> Result<Value, Failure> {
        let resource = self.resource;
        let name = self.key.2.clone();
        let mut new = self.typed(new)?;
        self.identity_of(old, &mut new)?;
        let status = self.request.subresource == "status";
        if !["", "status", "approval"].contains(&self.request.subresource.as_str())
            || (status && !resource.status)
        {
            return Err(Failure::unknown_path());
        }
        // Admission sees what was sent, before the strategy of the resource undoes some of it.
        auth::restrict(self.state, self.request, resource, Some(old), Some(&new))?;
        if status {
            let (metadata, state) = (new["metadata"].take(), new["status"].take());
            new = Value::clone(old);
            new["metadata"] = metadata;
            new["metadata"]["ownerReferences"] = old["metadata"]["ownerReferences"].clone();
            new["status"] = state;
            // Whoever leaves it out does not take it away.
            let class = &old["status"]["qosClass"];
            if resource.is("pods") && class.is_string() && new["status"]["qosClass"].is_null() {
                new["status"]["qosClass"] = class.clone();
            }
        } else if self.request.subresource == "approval" {
            let conditions = new["status"]["conditions"].take();
            new = Value::clone(old);
            new["status"]["conditions"] = conditions;
        } else if resource.status && !self.direct {
            new["status"] = old["status"].clone();
            if resource.is("pods") && !self.may_change(&old["spec"], &new["spec"]) {
                let why = "Forbidden: pod updates may not change fields other than `spec.containers[*].image`, `spec.initContainers[*].image`, `spec.activeDeadlineSeconds` or `spec.tolerations` (only additions to existing tolerations)";
                return Err(Failure::invalid(resource, &name, "spec", why));
            }
        }
        let new = self.normalized(new)?;
        if new == **old {
            return Ok(shown(resource, old));
        }
        self.valid(Some(old), &new)?;
        // The last finalizer of what is deleted already.
        let metadata = &new["metadata"];
        let dead = metadata["deletionTimestamp"].is_string()
            && metadata["deletionGracePeriodSeconds"].as_i64().unwrap_or(0) == 0
            && metadata["finalizers"].is_null();
        if dead {
            self.state.remove(&self.key);
            return Ok(shown(resource, &new));
        }
        let stored = self.state.put(&self.key, new);
        Ok(shown(resource, &stored))
    }

    /// Checks and keeps what makes an object itself.
    fn identity_of(&self, old: &Value, new: &mut Value) -> Result<(), Failure> {
        let (resource, name) = (self.resource, &self.key.2);
        let (old, new) = (&old["metadata"], &mut new["metadata"]);
        let own = new["name"].as_str().unwrap_or_default();
        if own != name {
            return Err(Failure::bad_request(format!(
                "the name of the object ({own}) does not match the name on the URL ({name})"
            )));
        }
        if new["namespace"].is_null() {
            new["namespace"] = old["namespace"].clone();
        }
        if new["namespace"] != old["namespace"] {
            return Err(Failure::bad_request(
                "the namespace of the provided object does not match the namespace sent on the request",
            ));
        }
        if new["uid"].is_string() && new["uid"] != old["uid"] {
            let (given, known) = (&new["uid"], &old["uid"]);
            // A PUT has it as a precondition, a PATCH as a field that may not change.
            return Err(if self.request.verb == "patch" {
                let why = format!("Invalid value: {given}: field is immutable");
                Failure::invalid(resource, name, "metadata.uid", &why)
            } else {
                let why = format!(
                    "Precondition failed: UID in precondition: {}, UID in object meta: {}",
                    given.as_str().unwrap_or_default(),
                    known.as_str().unwrap_or_default()
                );
                Failure::conflict(resource, name, &why)
            });
        }
        match new["resourceVersion"].as_str().unwrap_or_default() {
            "" if !resource.unconditional && !self.direct => {
                let why = "Invalid value: 0x0: must be specified for an update";
                return Err(Failure::invalid(
                    resource,
                    name,
                    "metadata.resourceVersion",
                    why,
                ));
            }
            "" => {}
            given if old["resourceVersion"] != *given && !self.direct => {
                return Err(Failure::modified(resource, name));
            }
            _ => {}
        }
        let kept = [
            "uid",
            "resourceVersion",
            "creationTimestamp",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "generation",
            "generateName",
        ];
        for field in kept {
            new[field] = old[field].clone();
        }
        Ok(())
    }

    /// `ValidatePodUpdate`.
    fn may_change(&self, old: &Value, new: &Value) -> bool {
        let fixed = |spec: &Value| {
            let mut spec = spec.clone();
            if let Value::Object(fields) = &mut spec {
                fields.shift_remove("activeDeadlineSeconds");
                fields.shift_remove("tolerations");
            }
            for list in ["containers", "initContainers"] {
                for container in spec[list].as_array_mut().into_iter().flatten() {
                    container["image"] = Value::Null;
                }
            }
            for list in ["containers", "initContainers"] {
                if spec[list].is_null() {
                    spec[list] = json!([]);
                }
            }
            spec
        };
        let kept = old["tolerations"]
            .as_array()
            .into_iter()
            .flatten()
            .all(|toleration| {
                let now = new["tolerations"].as_array();
                now.is_some_and(|now| now.contains(toleration))
            });
        kept && fixed(old) == fixed(new)
    }

    /// `rest.BeforeDelete` and what the store does after it.
    pub(super) fn delete(&mut self, options: &Value) -> Answer {
        let (resource, name) = (self.resource, self.key.2.clone());
        let old = self.existing()?;
        let metadata = &old["metadata"];
        let preconditions = &options["preconditions"];
        if preconditions["uid"].is_string() && preconditions["uid"] != metadata["uid"] {
            let why = format!(
                "the UID in the precondition ({}) does not match the UID in record ({}). The object might have been deleted and then recreated",
                preconditions["uid"].as_str().unwrap_or_default(),
                metadata["uid"].as_str().unwrap_or_default()
            );
            return Err(Failure::conflict(resource, &name, &why));
        }
        let version = &preconditions["resourceVersion"];
        if version.is_string() && *version != metadata["resourceVersion"] {
            let why = "the ResourceVersion in the precondition does not match the ResourceVersion in record. The object might have been modified";
            return Err(Failure::conflict(resource, &name, why));
        }
        let asked = options["gracePeriodSeconds"].as_i64();
        let mut new = Value::clone(&old);
        let graceful = resource.is("pods");
        let deleting = metadata["deletionTimestamp"]
            .as_str()
            .and_then(|at| at.parse::<Timestamp>().ok());
        if let Some(at) = deleting {
            let pending = metadata["deletionGracePeriodSeconds"].as_i64().unwrap_or(0);
            match asked.map(|asked| asked.max(0)) {
                // Only sooner than it is.
                Some(asked) if graceful && asked < pending => {
                    let at = at - jiff::SignedDuration::from_secs(pending - asked);
                    new["metadata"]["deletionTimestamp"] = seconds(at).into();
                    new["metadata"]["deletionGracePeriodSeconds"] = asked.into();
                }
                _ if pending == 0 && metadata["finalizers"].is_null() => {}
                _ => return Ok((200, shown(resource, &old))),
            }
        } else if graceful {
            let grace = self.grace(&old, asked);
            let at = self.now + jiff::SignedDuration::from_secs(grace);
            new["metadata"]["deletionTimestamp"] = seconds(at).into();
            new["metadata"]["deletionGracePeriodSeconds"] = grace.into();
        } else if !metadata["finalizers"].is_null() {
            new["metadata"]["deletionTimestamp"] = seconds(self.now).into();
            new["metadata"]["deletionGracePeriodSeconds"] = 0.into();
        }
        let marked = if new == *old {
            old
        } else {
            self.state.put(&self.key, new)
        };
        let metadata = &marked["metadata"];
        let waits = !metadata["finalizers"].is_null()
            || metadata["deletionGracePeriodSeconds"].as_i64().unwrap_or(0) > 0;
        if !waits {
            self.state.remove(&self.key);
        }
        if waits || resource.returns_deleted {
            return Ok((200, shown(resource, &marked)));
        }
        let status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success",
            "details": { "name": name, "kind": resource.plural, "uid": metadata["uid"] },
        });
        Ok((200, status))
    }

    /// `podStrategy.CheckGracefulDelete`.
    fn grace(&self, pod: &Value, asked: Option<i64>) -> i64 {
        let unscheduled = pod["spec"]["nodeName"]
            .as_str()
            .unwrap_or_default()
            .is_empty();
        let ended = pod["status"]["phase"] == "Succeeded" || pod["status"]["phase"] == "Failed";
        if unscheduled || ended {
            return 0;
        }
        let own = pod["spec"]["terminationGracePeriodSeconds"].as_i64();
        match asked.or(own).unwrap_or(0) {
            grace if grace < 0 => 1,
            grace => grace,
        }
    }

    fn typed(&self, mut object: Value) -> Result<Value, Failure> {
        if !object.is_object() {
            return Err(Failure::bad_request("the body of a write is an object"));
        }
        for (field, expected) in [
            ("kind", self.resource.kind.to_owned()),
            ("apiVersion", self.resource.api_version()),
        ] {
            if object[field].is_null() {
                object[field] = expected.clone().into();
            }
            if object[field] != expected {
                return Err(Failure::bad_request(format!(
                    "the {field} of the object, {}, is not that of the resource, {expected}",
                    object[field]
                )));
            }
        }
        let read = |object| (self.resource.typed)(object).map_err(|error| self.malformed(&error));
        let known = if self.direct {
            read(object)?
        } else {
            let known = read(object.clone())?;
            let unknown = validation::unknown_fields(&object, &known);
            if !unknown.is_empty() {
                return Err(Failure::unknown_fields(&unknown));
            }
            known
        };
        let object = defaults::tidy(self.resource, known);
        let mut object = if self.resource.group == EVENTS_GROUP {
            defaults::convert_event(&object, true)
        } else {
            object
        };
        if object["metadata"].is_null() {
            object["metadata"] = json!({});
        }
        Ok(object)
    }

    fn normalized(&self, object: Value) -> Result<Value, Failure> {
        normalize(&RESOURCES[self.key.0], object).map_err(|error| self.malformed(&error))
    }

    fn malformed(&self, error: &str) -> Failure {
        Failure::bad_request(format!(
            "{0} in version \"{1}\" cannot be handled as a {0}: {error}",
            self.resource.kind, self.resource.version
        ))
    }
}

/// As `metav1.Time` is written.
pub(super) fn seconds(at: Timestamp) -> String {
    at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
