//! A model of the API server's pods and events, behind a `kube::Client`, for unit tests.
//!
//! Statuses of pods and events meet the rules of a current server. Mirror pods do not, since this model gives them none of a
//! server's defaults; those of the simulated agents do.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use holdfast_testkit::validation::{InvalidWrites, NoInvalidWrites, Write};
use hyper::{Method, Request, Response};
use k8s_openapi::api::core::v1::Pod;
use kube::client::Body;
use serde_json::{Map, Value, json};

use super::{ApiClient, Connection};

/// State and behavior of the model.
#[derive(Default)]
pub(crate) struct Model {
    /// Objects by path, as `/api/v1/namespaces/default/pods/web`.
    pub(crate) objects: BTreeMap<String, Value>,
    /// Requests as `PATCH /api/…`, in order.
    pub(crate) log: Vec<String>,
    /// Queries of the requests.
    pub(crate) queries: Vec<String>,
    /// Bodies of the requests.
    pub(crate) bodies: Vec<Value>,
    /// Fields of a status that this server does not know.
    pub(crate) drops: Vec<&'static str>,
    /// Every request is answered with this code.
    pub(crate) fails: Option<u16>,
    /// Requests whose body says this are answered with 500.
    pub(crate) fails_on: Option<&'static str>,
    /// No request is answered.
    pub(crate) down: bool,
    version: u64,
    invalid: InvalidWrites,
}

#[derive(Clone)]
pub(crate) struct FakeApi {
    pub(crate) model: Arc<Mutex<Model>>,
    pub(crate) client: ApiClient,
    /// Fails the test at its end when there are any.
    _invalid: NoInvalidWrites,
}

impl FakeApi {
    pub(crate) fn new() -> Self {
        let invalid = NoInvalidWrites::default();
        let model = Arc::new(Mutex::new(Model {
            invalid: invalid.writes(),
            ..Model::default()
        }));
        let connection = Connection::default();
        let service = tower::service_fn({
            let (model, connection) = (Arc::clone(&model), connection.clone());
            move |request: Request<Body>| {
                let (model, connection) = (Arc::clone(&model), connection.clone());
                async move { serve(&model, &connection, request).await }
            }
        });
        let client = ApiClient::new(kube::Client::new(service, "default"), connection);
        Self {
            model,
            client,
            _invalid: invalid,
        }
    }

    pub(crate) fn with<T>(&self, f: impl FnOnce(&mut Model) -> T) -> T {
        f(&mut self.model.lock().unwrap())
    }

    /// Puts a pod and returns it as a watch would show it.
    pub(crate) fn put(&self, pod: &Pod) -> Arc<Pod> {
        self.with(|model| {
            let path = path_of(pod);
            let stored = model.store(&path, serde_json::to_value(pod).unwrap());
            Arc::new(serde_json::from_value(stored).unwrap())
        })
    }

    pub(crate) fn pod(&self, name: &str) -> Option<Arc<Pod>> {
        self.with(|model| {
            let value = model
                .objects
                .get(&format!("/api/v1/namespaces/default/pods/{name}"))?;
            Some(Arc::new(serde_json::from_value(value.clone()).unwrap()))
        })
    }

    /// Returns the number of requests with a verb.
    pub(crate) fn count(&self, verb: &str) -> usize {
        self.with(|model| model.log.iter().filter(|l| l.starts_with(verb)).count())
    }

    pub(crate) fn set_down(&self, down: bool) {
        self.with(|model| model.down = down);
    }
}

fn path_of(pod: &Pod) -> String {
    let name = pod.metadata.name.as_deref().unwrap();
    let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
    format!("/api/v1/namespaces/{namespace}/pods/{name}")
}

impl Model {
    fn store(&mut self, path: &str, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        if let Some(status) = object.get_mut("status") {
            for field in &self.drops {
                drop_everywhere(status, field);
            }
        }
        self.objects.insert(path.to_owned(), object.clone());
        object
    }

    /// The refusal of a write that a current server does not take.
    fn refusal(
        &self,
        path: &str,
        is_status: bool,
        old: Option<&Value>,
        new: &Value,
    ) -> Option<(u16, Value)> {
        let mut steps = path.trim_start_matches("/api/v1/namespaces/").split('/');
        let namespace = steps.next().unwrap_or_default();
        let (resource, subresource) = match (steps.next()?, is_status) {
            ("events", false) => ("events", ""),
            ("pods", true) => ("pods", "status"),
            _ => return None,
        };
        let write = Write {
            group: "",
            resource,
            subresource,
            namespace,
            name: steps.next().unwrap_or_default(),
            old,
            new,
        };
        let found = self.invalid.check(path, &write);
        let first = found.first()?;
        Some(failure(422, &first.to_string()))
    }

    fn answer(&mut self, method: &Method, path: &str, body: Value) -> (u16, Value) {
        if let Some(code) = self.fails {
            return failure(code, "injected");
        }
        if self
            .fails_on
            .is_some_and(|text| body.to_string().contains(text))
        {
            return failure(500, "injected");
        }
        let (path, is_status) = match path.strip_suffix("/status") {
            Some(path) => (path, true),
            None => (path, false),
        };
        match *method {
            Method::POST => {
                let name = body["metadata"]["name"].as_str().unwrap().to_owned();
                let path = format!("{path}/{name}");
                if self.objects.contains_key(&path) {
                    return failure(409, "already exists");
                }
                let mut object = body;
                object["metadata"]["uid"] = json!(format!("made-{}", self.version));
                if let Some(refusal) = self.refusal(&path, is_status, None, &object) {
                    return refusal;
                }
                (201, self.store(&path, object))
            }
            Method::GET => match self.objects.get(path) {
                Some(object) => (200, object.clone()),
                None => failure(404, "not found"),
            },
            Method::PATCH => {
                let Some(old) = self.objects.get(path).cloned() else {
                    return failure(404, "not found");
                };
                let mut object = old.clone();
                let wanted = &body["metadata"]["uid"];
                if !wanted.is_null() && *wanted != object["metadata"]["uid"] {
                    return failure(409, "Precondition failed: UID");
                }
                if is_status {
                    if object["status"].is_null() {
                        object["status"] = json!({});
                    }
                    merge(&mut object["status"], &body["status"]);
                } else {
                    merge(&mut object, &body);
                }
                if let Some(refusal) = self.refusal(path, is_status, Some(&old), &object) {
                    return refusal;
                }
                (200, self.store(path, object))
            }
            Method::DELETE => {
                let Some(object) = self.objects.get(path) else {
                    return failure(404, "not found");
                };
                let wanted = &body["preconditions"]["uid"];
                if !wanted.is_null() && *wanted != object["metadata"]["uid"] {
                    return failure(409, "Precondition failed: UID");
                }
                if object["kind"] == "Status" {
                    // The answer to a deletion of whatever is selected.
                    return (200, object.clone());
                }
                (200, self.objects.remove(path).unwrap())
            }
            _ => failure(405, "method"),
        }
    }
}

/// A strategic merge as far as pods and events need it.
fn merge(object: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else { return };
    for (field, new) in patch {
        let target = object.as_object_mut().unwrap();
        let key = match field.as_str() {
            "conditions" => "type",
            "podIPs" | "hostIPs" => "ip",
            _ => {
                if new.is_null() {
                    target.remove(field);
                } else {
                    target.insert(field.clone(), new.clone());
                }
                continue;
            }
        };
        let mut list = target
            .get(field)
            .and_then(Value::as_array)
            .cloned()
            .unwrap_or_default();
        for element in new.as_array().unwrap() {
            let directive = element["$patch"].as_str();
            if directive == Some("replace") {
                list.clear();
                continue;
            }
            let at = list.iter().position(|old| old[key] == element[key]);
            match (at, directive) {
                (Some(at), Some("delete")) => {
                    list.remove(at);
                }
                (Some(at), _) => merge_fields(&mut list[at], element),
                (None, Some(_)) => {}
                (None, None) => list.push(element.clone()),
            }
        }
        target.insert(field.clone(), Value::Array(list));
    }
}

fn merge_fields(old: &mut Value, new: &Value) {
    let old: &mut Map<String, Value> = old.as_object_mut().unwrap();
    for (field, value) in new.as_object().unwrap() {
        if value.is_null() {
            old.remove(field);
        } else {
            old.insert(field.clone(), value.clone());
        }
    }
}

fn drop_everywhere(value: &mut Value, field: &str) {
    match value {
        Value::Object(fields) => {
            fields.remove(field);
            fields.values_mut().for_each(|v| drop_everywhere(v, field));
        }
        Value::Array(items) => items.iter_mut().for_each(|v| drop_everywhere(v, field)),
        _ => {}
    }
}

fn failure(code: u16, message: &str) -> (u16, Value) {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message, "reason": ""});
    (code, status)
}

async fn serve(
    model: &Mutex<Model>,
    connection: &Connection,
    request: Request<Body>,
) -> Result<Response<Body>, tower::BoxError> {
    let (head, body) = request.into_parts();
    let bytes = body.collect_bytes().await?;
    let body = serde_json::from_slice(&bytes).unwrap_or_default();
    let path = head.uri.path().to_owned();
    let (code, answer) = {
        let mut model = model.lock().unwrap();
        if model.down {
            drop(model);
            connection.failed("refused");
            return Err("connection refused".into());
        }
        model.log.push(format!("{} {path}", head.method));
        let query = head.uri.query().unwrap_or_default();
        model.queries.push(query.to_owned());
        model.bodies.push(Value::clone(&body));
        model.answer(&head.method, &path, body)
    };
    connection.answered();
    let bytes = serde_json::to_vec(&answer)?;
    Ok(Response::builder().status(code).body(Body::from(bytes))?)
}
