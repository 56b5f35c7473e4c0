//! An API server for lists and watches of whole collections or single names, and for TokenRequest.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{Request, Response};
use holdfast_testkit::validation::{NoInvalidWrites, Write};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;

use crate::apiserver::{ApiClient, Connection};

type Line = Result<Bytes, Infallible>;

/// Outcome of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Up,
    /// The status code of every answer.
    Refusing(u16),
    /// No connection.
    Down,
    /// Connections that nobody answers on.
    Silent,
}

struct Watcher {
    collection: String,
    name: Option<String>,
    sender: mpsc::UnboundedSender<Line>,
}

struct Inner {
    mode: Mode,
    version: u64,
    /// Collection and name (`ns/name` when the collection spans namespaces) → object.
    objects: BTreeMap<(String, String), Value>,
    watchers: Vec<Watcher>,
    requests: Vec<String>,
    token_life: i64,
    tokens: u64,
    token_delay: Duration,
    token_requests: Vec<Value>,
    /// The version of `certificates.k8s.io` that has trust bundles.
    trust_version: Option<&'static str>,
}

#[derive(Clone)]
pub(super) struct Fake {
    inner: Arc<Mutex<Inner>>,
    connection: Connection,
    /// Fails the test at its end when there are any.
    invalid: NoInvalidWrites,
}

impl Default for Fake {
    fn default() -> Self {
        Self {
            inner: Arc::new(Mutex::new(Inner {
                mode: Mode::Up,
                version: 100,
                objects: BTreeMap::new(),
                watchers: Vec::new(),
                requests: Vec::new(),
                token_life: 3600,
                tokens: 0,
                token_delay: Duration::ZERO,
                token_requests: Vec::new(),
                trust_version: None,
            })),
            connection: Connection::default(),
            invalid: NoInvalidWrites::default(),
        }
    }
}

impl Fake {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap()
    }

    pub(super) fn client(&self) -> ApiClient {
        let fake = self.clone();
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            let fake = fake.clone();
            async move { fake.answer(request).await }
        });
        ApiClient::new(
            kube::Client::new(service, "default"),
            self.connection.clone(),
        )
    }

    /// A new connection object, as a restarted agent has it.
    pub(super) fn reconnect(&mut self) {
        self.connection = Connection::default();
    }

    pub(super) fn connection(&self) -> &Connection {
        &self.connection
    }

    /// From now on; leaving [`Mode::Up`] cuts every watch.
    pub(super) fn set(&self, mode: Mode) {
        let mut inner = self.lock();
        inner.mode = mode;
        if mode != Mode::Up {
            inner.watchers.clear();
        }
    }

    pub(super) fn trust_version(&self, version: Option<&'static str>) {
        self.lock().trust_version = version;
    }

    pub(super) fn token_life(&self, seconds: i64) {
        self.lock().token_life = seconds;
    }

    pub(super) fn token_delay(&self, delay: Duration) {
        self.lock().token_delay = delay;
    }

    pub(super) fn tokens_made(&self) -> u64 {
        self.lock().tokens
    }

    pub(super) fn token_requests(&self) -> Vec<Value> {
        self.lock().token_requests.clone()
    }

    /// Requests since the last call.
    pub(super) fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().requests)
    }

    /// Watches that somebody still reads.
    pub(super) fn watches(&self) -> Vec<String> {
        let mut inner = self.lock();
        inner.watchers.retain(|watcher| !watcher.sender.is_closed());
        let names = inner.watchers.iter();
        let mut names: Vec<_> = names
            .map(|w| format!("{} {}", w.collection, w.name.clone().unwrap_or_default()))
            .collect();
        names.sort();
        names
    }

    /// Creates or changes an object of `collection`, the path of which namespaced objects have in it.
    pub(super) fn put(&self, collection: &str, mut object: Value) {
        let mut inner = self.lock();
        inner.version += 1;
        object["metadata"]["resourceVersion"] = json!(inner.version.to_string());
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        let old = inner
            .objects
            .insert((collection.to_owned(), name.clone()), object.clone());
        let what = if old.is_some() { "MODIFIED" } else { "ADDED" };
        inner.tell(collection, &name, what, &object);
    }

    /// The state of a backup: an object as it was, and its version. No watch is told.
    pub(super) fn set_back(&self, collection: &str, mut object: Value, version: u64) {
        let mut inner = self.lock();
        inner.version = version;
        object["metadata"]["resourceVersion"] = json!(version.to_string());
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        inner.objects.insert((collection.to_owned(), name), object);
    }

    pub(super) fn delete(&self, collection: &str, name: &str) {
        let mut inner = self.lock();
        inner.version += 1;
        let version = inner.version.to_string();
        let key = (collection.to_owned(), name.to_owned());
        let mut object = inner.objects.remove(&key).unwrap();
        object["metadata"]["resourceVersion"] = json!(version);
        inner.tell(collection, name, "DELETED", &object);
    }

    async fn answer(
        &self,
        request: Request<kube::client::Body>,
    ) -> Result<Response<Body>, std::io::Error> {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path().to_owned();
        let query: BTreeMap<String, String> =
            form_urlencoded::parse(parts.uri.query().unwrap_or_default().as_bytes())
                .into_owned()
                .collect();
        let is_watch = query.get("watch").is_some_and(|watch| watch == "true");
        let one = one_of(&path);
        let verb = match (parts.method.as_str(), is_watch) {
            ("POST", _) => "POST",
            ("PATCH", _) => "PATCH",
            (_, true) => "WATCH",
            _ if one.is_some() => "GET",
            _ => "LIST",
        };
        let name = query
            .get("fieldSelector")
            .and_then(|s| s.strip_prefix("metadata.name="))
            .map(str::to_owned);
        let mode = {
            let mut inner = self.lock();
            let line = format!("{verb} {path} {}", name.clone().unwrap_or_default());
            inner.requests.push(line.trim().to_owned());
            inner.mode
        };
        match mode {
            Mode::Silent => std::future::pending::<()>().await,
            Mode::Down => {
                self.connection.failed("connection refused");
                return Err(std::io::Error::other("connection refused"));
            }
            _ => self.connection.answered(),
        }
        if let Mode::Refusing(code) = mode {
            return Ok(json_response(
                code,
                &json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
                        "message": "not now", "reason": "Because", "code": code}),
            ));
        }
        if verb == "POST" {
            let delay = self.lock().token_delay;
            tokio::time::sleep(delay).await;
            let body = body.collect_bytes().await.unwrap();
            let request = serde_json::from_slice(&body).unwrap();
            if self.refuses(&path, None, &request) {
                return Ok(json_response(422, &invalid()));
            }
            return Ok(self.token(request));
        }
        if verb == "PATCH" {
            let body = body.collect_bytes().await.unwrap();
            let path = path.trim_end_matches("/status");
            let patch: Value = serde_json::from_slice(&body).unwrap();
            let (collection, name) = one_of(path).unwrap();
            let known = self
                .lock()
                .objects
                .get(&(collection.clone(), name))
                .cloned();
            let old = known.unwrap();
            let mut object = old.clone();
            assert_eq!(
                patch["metadata"]["resourceVersion"],
                object["metadata"]["resourceVersion"]
            );
            for (field, value) in patch["status"].as_object().unwrap() {
                merge(&mut object["status"][field], value);
            }
            if self.refuses(path, Some(&old), &object) {
                return Ok(json_response(422, &invalid()));
            }
            self.put(&collection, object.clone());
            return Ok(json_response(200, &object));
        }
        let mut inner = self.lock();
        if let Some(rest) = path.strip_prefix("/apis/certificates.k8s.io/") {
            let version = rest.split('/').next().unwrap_or_default();
            if inner.trust_version != Some(version) {
                let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
                                    "message": "not found", "reason": "NotFound", "code": 404});
                return Ok(json_response(404, &status));
            }
            if rest == version {
                return Ok(json_response(
                    200,
                    &json!({
                        "kind": "APIResourceList", "apiVersion": "v1",
                        "groupVersion": format!("certificates.k8s.io/{version}"),
                        "resources": [{"name": "clustertrustbundles", "singularName": "", "namespaced": false,
                                       "kind": "ClusterTrustBundle", "verbs": ["list", "watch"]}],
                    }),
                ));
            }
        }
        if verb == "GET" {
            let found = one.and_then(|place| inner.objects.get(&place));
            return Ok(match found {
                Some(object) => json_response(200, object),
                None => json_response(
                    404,
                    &json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
                            "message": "there is none", "reason": "NotFound", "code": 404}),
                ),
            });
        }
        let chosen = |object_name: &str| name.as_deref().is_none_or(|name| name == object_name);
        let objects = inner.objects.iter();
        let objects: Vec<Value> = objects
            .filter(|((collection, name), _)| *collection == path && chosen(name))
            .map(|(_, object)| object.clone())
            .collect();
        if verb == "LIST" {
            return Ok(json_response(
                200,
                &json!({"kind": "List", "apiVersion": "v1", "items": objects,
                        "metadata": {"resourceVersion": inner.version.to_string()}}),
            ));
        }
        let since: u64 = query["resourceVersion"].parse().unwrap();
        let (sender, receiver) = mpsc::unbounded_channel();
        for object in objects {
            let version = object["metadata"]["resourceVersion"].as_str().unwrap();
            if version.parse::<u64>().unwrap() > since {
                drop(sender.send(line("MODIFIED", &object)));
            }
        }
        inner.watchers.push(Watcher {
            collection: path,
            name,
            sender,
        });
        Ok(Response::new(Body::from_stream(
            UnboundedReceiverStream::new(receiver),
        )))
    }

    /// Returns whether a current server refuses a write.
    fn refuses(&self, path: &str, old: Option<&Value>, new: &Value) -> bool {
        let mut steps = path.trim_start_matches("/api/v1/namespaces/").split('/');
        let mut next = || steps.next().unwrap_or_default();
        let (namespace, resource, name) = (next(), next(), next());
        let subresource = match old {
            Some(_) => "status",
            None => next(),
        };
        let write = Write {
            group: "",
            resource,
            subresource,
            namespace,
            name,
            old,
            new,
        };
        !self.invalid.check(path, &write).is_empty()
    }

    fn token(&self, mut request: Value) -> Response<Body> {
        let mut inner = self.lock();
        inner.tokens += 1;
        inner.token_requests.push(request["spec"].clone());
        let at = jiff::Timestamp::from_second(super::BASE_MS / 1000 + inner.token_life).unwrap();
        request["spec"]["expirationSeconds"] = json!(inner.token_life);
        request["status"] = json!({
            "token": format!("token-{}", inner.tokens),
            "expirationTimestamp": at.to_string(),
        });
        json_response(201, &request)
    }
}

fn invalid() -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "invalid", "reason": "Invalid",
           "code": 422})
}

/// Collection and name, of kinds that are asked for one by one.
fn one_of(path: &str) -> Option<(String, String)> {
    let (collection, name) = path.rsplit_once('/')?;
    let polled = [
        "persistentvolumeclaims",
        "persistentvolumes",
        "volumeattachments",
    ];
    let kind = collection.rsplit('/').next()?;
    polled
        .contains(&kind)
        .then(|| (collection.to_owned(), name.to_owned()))
}

/// A JSON merge patch.
fn merge(into: &mut Value, patch: &Value) {
    match (into, patch) {
        (Value::Object(known), Value::Object(patch)) => {
            for (field, value) in patch {
                match value {
                    Value::Null => drop(known.remove(field)),
                    value => merge(known.entry(field.as_str()).or_insert(Value::Null), value),
                }
            }
        }
        (into, patch) => *into = patch.clone(),
    }
}

impl Inner {
    fn tell(&self, collection: &str, name: &str, what: &str, object: &Value) {
        for watcher in &self.watchers {
            let chosen = watcher.name.as_deref().is_none_or(|n| n == name);
            if watcher.collection == collection && chosen {
                drop(watcher.sender.send(line(what, object)));
            }
        }
    }
}

fn line(what: &str, object: &Value) -> Line {
    let event = json!({"type": what, "object": object});
    Ok(Bytes::from(format!("{event}\n")))
}

fn json_response(code: u16, value: &Value) -> Response<Body> {
    Response::builder()
        .status(code)
        .header("content-type", "application/json")
        .body(Body::from(value.to_string()))
        .unwrap()
}
