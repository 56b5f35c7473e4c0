//! What a test does to the server: objects behind the clients' backs, faults, and looking at what came.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::auth::Identity;
use super::failure::Failure;
use super::request::Request;
use super::resource::{self, RESOURCES};
use super::state::{Snapshot, State};
use super::verbs::Write;
use super::{FakeApi, Fault, Planned};

/// A type of API objects.
pub trait Object: kube::Resource<DynamicType = ()> + Serialize + DeserializeOwned {}

impl<K: kube::Resource<DynamicType = ()> + Serialize + DeserializeOwned> Object for K {}

/// Objects. These need no rights, are in no log, and panic where a client would get an error.
impl FakeApi {
    /// Creates an object as the administrator would, with its defaults; a status it has is kept.
    ///
    /// # Panics
    /// The server refuses it.
    #[track_caller]
    pub fn create<K: Object>(&self, object: &K) -> K {
        typed(self.create_json(json_of(object)))
    }

    /// [`FakeApi::create`] of JSON, which names its `apiVersion` and `kind`.
    ///
    /// # Panics
    /// The server refuses it.
    #[track_caller]
    pub fn create_json(&self, object: Value) -> Value {
        self.write(&object.clone(), |write| write.create(object))
    }

    /// Replaces an object, its status too, whatever its version.
    ///
    /// # Panics
    /// It is not there, or the server refuses it.
    #[track_caller]
    pub fn update<K: Object>(&self, object: &K) -> K {
        typed(self.update_json(json_of(object)))
    }

    /// [`FakeApi::update`] of JSON, which names its `apiVersion` and `kind`.
    ///
    /// # Panics
    /// It is not there, or the server refuses it.
    #[track_caller]
    pub fn update_json(&self, object: Value) -> Value {
        self.write(&object.clone(), |write| {
            let old = write.state.get(&write.key);
            let missing = || Failure::not_found(write.resource, &write.key.2);
            write.update(&old.ok_or_else(missing)?, object)
        })
    }

    /// Reads an object, changes it and writes it back. `namespace` is empty for what is cluster-wide.
    ///
    /// # Panics
    /// It is not there, or the server refuses the change.
    #[track_caller]
    pub fn modify<K: Object>(&self, namespace: &str, name: &str, change: impl FnOnce(&mut K)) -> K {
        let Some(mut object) = self.get::<K>(namespace, name) else {
            panic!("there is no {} {namespace}/{name}", K::kind(&()));
        };
        change(&mut object);
        self.update(&object)
    }

    /// An object.
    pub fn get<K: Object>(&self, namespace: &str, name: &str) -> Option<K> {
        self.get_json(&K::plural(&()), namespace, name).map(typed)
    }

    /// An object by the plural name of its resource.
    ///
    /// # Panics
    /// There is no such resource.
    #[track_caller]
    pub fn get_json(&self, plural: &str, namespace: &str, name: &str) -> Option<Value> {
        let key = (by_plural(plural), namespace.to_owned(), name.to_owned());
        let object = self.shared.inner().state.get(&key)?;
        Some(Value::clone(&object))
    }

    /// All objects of a type in one namespace, or in all when it is empty.
    pub fn list<K: Object>(&self, namespace: &str) -> Vec<K> {
        let found = self.list_json(&K::plural(&()), namespace);
        found.into_iter().map(typed).collect()
    }

    /// All objects of a resource in one namespace, or in all when it is empty.
    ///
    /// # Panics
    /// There is no such resource.
    #[track_caller]
    pub fn list_json(&self, plural: &str, namespace: &str) -> Vec<Value> {
        let inner = self.shared.inner();
        let found = State::of(&inner.state.objects, by_plural(plural), namespace);
        found.iter().map(|object| Value::clone(object)).collect()
    }

    /// Deletes as `kubectl delete` does: a pod that has a node goes gracefully. `grace` in seconds. Returns
    /// whether it was there.
    pub fn delete<K: Object>(&self, namespace: &str, name: &str, grace: Option<i64>) -> bool {
        if self.get::<K>(namespace, name).is_none() {
            return false;
        }
        let about = json!({
            "apiVersion": K::api_version(&()), "kind": K::kind(&()),
            "metadata": { "namespace": namespace, "name": name },
        });
        let options = grace.map_or(json!({}), |grace| json!({ "gracePeriodSeconds": grace }));
        self.write(&about, |write| write.delete(&options).map(|(_, body)| body));
        true
    }

    /// Removes an object at once, whatever its finalizers and its grace period. Returns whether it was there.
    pub fn remove<K: Object>(&self, namespace: &str, name: &str) -> bool {
        let index = by_plural(&K::plural(&()));
        let key = (index, namespace.to_owned(), name.to_owned());
        let mut inner = self.shared.inner();
        let was = inner.state.get(&key).is_some();
        inner.state.remove(&key);
        drop(inner);
        self.shared.tell();
        was
    }

    /// Approves a certificateSigningRequest and signs it: `certificate` is PEM.
    ///
    /// # Panics
    /// There is no such request.
    #[track_caller]
    pub fn sign(&self, name: &str, certificate: &[u8]) {
        use k8s_openapi::ByteString;
        use k8s_openapi::api::certificates::v1::{
            CertificateSigningRequest, CertificateSigningRequestCondition,
        };
        self.modify("", name, |request: &mut CertificateSigningRequest| {
            let status = request.status.get_or_insert_default();
            status.certificate = Some(ByteString(certificate.to_vec()));
            let condition = CertificateSigningRequestCondition {
                type_: "Approved".to_owned(),
                status: "True".to_owned(),
                reason: Some("Approved".to_owned()),
                ..Default::default()
            };
            status.conditions.get_or_insert_default().push(condition);
        });
    }

    /// Events about an object, oldest first: type, reason, message, count.
    pub fn events_of(&self, namespace: &str, name: &str) -> Vec<(String, String, String, i64)> {
        let mut events = self.list_json("events", "");
        events.retain(|event| {
            let about = &event["involvedObject"];
            about["name"] == name && about["namespace"].as_str().unwrap_or_default() == namespace
        });
        events.sort_by_key(version_of);
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        events
            .iter()
            .map(|event| {
                let count = event["count"].as_i64();
                let series = event["series"]["count"].as_i64();
                (
                    text(&event["type"]),
                    text(&event["reason"]),
                    text(&event["message"]),
                    count.or(series).unwrap_or(1),
                )
            })
            .collect()
    }

    /// Whose a token is that the server gave out, and for which audiences; `None` once it has expired or the
    /// pod it is bound to is gone.
    pub fn token_owner(&self, token: &str) -> Option<(String, Vec<String>)> {
        let now = self.shared.now();
        super::reviews::owner_of(&self.shared.inner().state, token, now)
    }

    #[track_caller]
    fn write(
        &self,
        about: &Value,
        write: impl FnOnce(&mut Write<'_>) -> Result<Value, Failure>,
    ) -> Value {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let (version, kind) = (text(&about["apiVersion"]), text(&about["kind"]));
        let Some(index) = resource::of_kind(&version, &kind) else {
            panic!("the fake API server has no kind {version} {kind}");
        };
        let now = self.shared.now();
        let namespace = match text(&about["metadata"]["namespace"]) {
            none if none.is_empty() && RESOURCES[index].namespaced => "default".to_owned(),
            namespace => namespace,
        };
        let name = text(&about["metadata"]["name"]);
        let request = Request {
            number: 0,
            identity: Identity::Admin,
            verb: String::new(),
            kind: RESOURCES[index].plural.to_owned(),
            subresource: String::new(),
            namespace: namespace.clone(),
            name: name.clone(),
            query: Vec::new(),
            content_type: String::new(),
            body: Value::Null,
            status: 0,
            resource: index,
        };
        let written = write(&mut Write {
            state: &mut self.shared.inner().state,
            request: &request,
            resource: &RESOURCES[index],
            key: (resource::stored_as(index), namespace, name),
            now,
            direct: true,
        });
        self.shared.tell();
        match written {
            Ok(object) => object,
            Err(failure) => panic!("{}", failure.message),
        }
    }
}

/// Faults.
impl FakeApi {
    /// With an error, every request fails to reach the server and every watch breaks; with `None` it is
    /// there again, as it was.
    pub fn set_down(&self, error: Option<&str>) {
        self.shared.inner().down = error.map(str::to_owned);
        self.shared.tell();
    }

    /// The next `times` requests that match go wrong.
    pub fn fail_next(
        &self,
        matches: impl Fn(&Request) -> bool + Send + Sync + 'static,
        fault: impl Into<Fault>,
        times: usize,
    ) {
        self.plan(matches, fault, Some(times.max(1)));
    }

    /// All requests that match go wrong, until [`FakeApi::clear_faults`].
    pub fn fail_always(
        &self,
        matches: impl Fn(&Request) -> bool + Send + Sync + 'static,
        fault: impl Into<Fault>,
    ) {
        self.plan(matches, fault, None);
    }

    fn plan(
        &self,
        matches: impl Fn(&Request) -> bool + Send + Sync + 'static,
        fault: impl Into<Fault>,
        left: Option<usize>,
    ) {
        self.shared.inner().faults.push(Planned {
            matches: Arc::new(matches),
            fault: fault.into(),
            left,
        });
    }

    /// No request goes wrong any more.
    pub fn clear_faults(&self) {
        self.shared.inner().faults.clear();
    }

    /// Called with every request before it has its effect; says what goes wrong with it. Replaces the one
    /// before. May call the server itself.
    pub fn on_request(&self, hook: impl Fn(&Request) -> Option<Fault> + Send + Sync + 'static) {
        self.shared.inner().on_request = Arc::new(hook);
    }

    /// How long every request takes.
    pub fn set_latency(&self, latency: Duration) {
        self.shared.inner().latency = latency;
    }

    /// Watches that are open now end, as when the server restarts. What happened before is still delivered.
    pub fn close_watches(&self) {
        {
            let mut inner = self.shared.inner();
            inner.closed_watches = inner.watches;
        }
        self.shared.tell();
    }

    /// Watches that are open now deliver nothing more and never end: the connection is half open.
    pub fn hang_watches(&self) {
        {
            let mut inner = self.shared.inner();
            inner.hung_watches = inner.watches;
        }
        self.shared.tell();
    }

    /// Forgets the history: a watch that begins before now, and a list that goes on, get 410. Watches that are
    /// open are not touched.
    pub fn compact(&self) {
        self.shared.inner().state.compact();
    }

    /// All objects as they are now.
    pub fn snapshot(&self) -> Snapshot {
        self.shared.inner().state.snapshot()
    }

    /// The server has its objects and its resource version from a backup, as after etcd was restored. Open
    /// watches end.
    pub fn restore(&self, snapshot: &Snapshot) {
        self.shared.inner().state.restore(snapshot);
        self.close_watches();
    }

    /// Reads with `resourceVersion=0` see this until it is `None`: a cache that lags.
    pub fn set_stale(&self, snapshot: Option<Snapshot>) {
        self.shared.inner().state.stale = snapshot;
    }

    /// How often watches get bookmarks, 60 s if never called; for watches that begin later.
    pub fn set_bookmark_interval(&self, every: Duration) {
        self.shared.inner().bookmark_every = every;
    }

    /// The server's wall clock, for timestamps and for the expiry of tokens.
    pub fn set_clock(&self, clock: impl Fn() -> Timestamp + Send + Sync + 'static) {
        self.shared.inner().clock = Arc::new(clock);
    }

    /// Who a bearer token is, over TCP.
    pub fn add_credential(&self, token: &str, identity: Identity) {
        let mut inner = self.shared.inner();
        inner.credentials.insert(token.to_owned(), identity);
    }
}

/// What came.
impl FakeApi {
    /// Every request since the last [`FakeApi::take_requests`].
    pub fn requests(&self) -> Vec<Request> {
        self.shared.inner().log.clone()
    }

    /// [`FakeApi::requests`], which are forgotten.
    pub fn take_requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.shared.inner().log)
    }

    /// How many of [`FakeApi::requests`] match.
    pub fn count(&self, matches: impl Fn(&Request) -> bool) -> usize {
        let inner = self.shared.inner();
        inner.log.iter().filter(|request| matches(request)).count()
    }

    /// Requests that [`FakeApi::set_down`] kept from the server, in its whole life.
    pub fn refused(&self) -> u64 {
        self.shared.inner().refused
    }

    /// Writes that were refused by the rules of [`crate::validation`], in the server's whole life. They fail the test when
    /// this server is dropped.
    pub fn invalid_writes(&self) -> Vec<String> {
        self.invalid.list()
    }

    /// [`FakeApi::invalid_writes`], which are forgotten: for tests that make them on purpose.
    pub fn take_invalid_writes(&self) -> Vec<String> {
        self.invalid.take()
    }

    /// Version of the newest write.
    pub fn resource_version(&self) -> u64 {
        self.shared.inner().state.rv
    }

    /// Changes with every write and every fault that is set. Mark it as seen, look, then wait.
    pub fn changes(&self) -> tokio::sync::watch::Receiver<u64> {
        self.shared.changed.subscribe()
    }

    /// Waits until `condition` holds; it is looked at after every write. Cancel-safe.
    pub async fn until(&self, mut condition: impl FnMut(&Self) -> bool) {
        let mut changes = self.changes();
        loop {
            changes.borrow_and_update();
            if condition(self) {
                return;
            }
            // The sender lives as long as `self`.
            drop(changes.changed().await);
        }
    }
}

fn version_of(object: &Value) -> u64 {
    let version = object["metadata"]["resourceVersion"].as_str();
    version.and_then(|v| v.parse().ok()).unwrap_or(0)
}

#[track_caller]
fn by_plural(plural: &str) -> usize {
    match RESOURCES.iter().position(|r| r.is(plural)) {
        Some(index) => index,
        None => panic!("the fake API server has no resource {plural}"),
    }
}

#[track_caller]
fn json_of<K: Object>(object: &K) -> Value {
    match serde_json::to_value(object) {
        Ok(mut value) => {
            value["apiVersion"] = K::api_version(&()).into();
            value["kind"] = K::kind(&()).into();
            value
        }
        Err(error) => panic!("{} as JSON: {error}", K::kind(&())),
    }
}

#[track_caller]
fn typed<K: Object>(value: Value) -> K {
    match serde_json::from_value(value) {
        Ok(object) => object,
        Err(error) => panic!("{}: {error}", K::kind(&())),
    }
}
