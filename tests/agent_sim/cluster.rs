//! The node as part of a cluster: the API server in the same process, reached as a process reaches one.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use holdfast::apiserver::ApiClient;
use holdfast_testkit::fake_api::{ApiService, FakeApi, Fault, Identity, Request};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::client::Body;
use serde_json::{Value, json};

use crate::node::{Crash, Life, When};
use crate::world::World;

pub const NODE: &str = "sim";

/// The API server for one life: what is sent once it is over is not heard.
struct OfLife {
    service: ApiService,
    life: Arc<Life>,
}

type Answer = <ApiService as tower::Service<hyper::http::Request<Body>>>::Response;

impl tower::Service<hyper::http::Request<Body>> for OfLife {
    type Response = Answer;
    type Error = tower::BoxError;
    type Future = BoxFuture<'static, Result<Answer, tower::BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), tower::BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: hyper::http::Request<Body>) -> Self::Future {
        if self.life.is_over() {
            return Box::pin(std::future::pending());
        }
        Box::pin(self.service.call(request))
    }
}

/// Whether a request changes a pod.
pub fn is_point(request: &Request) -> bool {
    request.writes() && request.kind == "pods"
}

/// Whether a request tells the status of a pod.
pub fn tells_status(request: &Request) -> bool {
    request.writes() && request.kind == "pods" && request.subresource == "status"
}

impl World {
    /// A client for the life that begins.
    pub fn connect(&self, api: &FakeApi) -> ApiClient {
        let life = Arc::clone(&self.life);
        let schedule = self.schedule.clone();
        let usual = move |request: &Request| Some(schedule.as_ref()?.request(request));
        api.on_request(move |request| {
            if request.identity == Identity::Admin {
                return None;
            }
            if !is_point(request) {
                return usual(request);
            }
            if life.is_over() {
                return Some(Fault::Hang);
            }
            let n = life.requests.fetch_add(1, Ordering::Relaxed) + 1;
            match life.crash {
                Crash::Request(at, when) if at == n => {
                    life.end();
                    Some(match when {
                        When::Before => Fault::Hang,
                        When::After => Fault::HangAfterEffect,
                    })
                }
                _ => usual(request),
            }
        });
        let service = OfLife {
            service: api.service_as(Identity::Node(NODE.to_owned())),
            life: Arc::clone(&self.life),
        };
        let kubelet = &self.config.kubelet;
        let rate = (kubelet.kube_api_qps, kubelet.kube_api_burst);
        ApiClient::over(service, rate, Arc::new(self.clock.clone()))
    }

    pub fn api(&self) -> &FakeApi {
        self.api.as_ref().unwrap()
    }

    /// Creates a pod that was scheduled to this node. Returns its UID.
    pub fn create(&self, name: &str, spec: &str) -> String {
        self.create_with(name, json!({}), spec)
    }

    /// [`World::create`] with more metadata.
    pub fn create_with(&self, name: &str, mut metadata: Value, spec: &str) -> String {
        metadata["name"] = name.into();
        metadata["namespace"] = "default".into();
        let mut spec: Value = serde_json::from_str(spec).unwrap();
        spec["nodeName"] = NODE.into();
        spec["serviceAccountName"] = "default".into();
        let pod = self.api().create_json(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec,
        }));
        pod["metadata"]["uid"].as_str().unwrap().to_owned()
    }

    /// As `kubectl delete pod`.
    pub fn delete(&self, name: &str, grace: Option<i64>) -> bool {
        self.api().delete::<Pod>("default", name, grace)
    }

    /// The pod as the API server has it; null when it has none.
    pub fn shown(&self, name: &str) -> Value {
        let pod = self.api().get_json("pods", "default", name);
        pod.unwrap_or(Value::Null)
    }

    pub fn shown_phase(&self, name: &str) -> String {
        let pod = self.shown(name);
        pod["status"]["phase"].as_str().unwrap_or_default().into()
    }

    pub fn label_node(&self, key: &str, value: Option<&str>) {
        self.api().modify("", NODE, |node: &mut Node| {
            let labels = node.metadata.labels.get_or_insert_default();
            match value {
                Some(value) => labels.insert(key.to_owned(), value.to_owned()),
                None => labels.remove(key),
            };
        });
    }

    /// Waits until the node is registered.
    pub async fn joined(&self) {
        self.until("the node is registered", 60, |w| {
            w.api().get_json("nodes", "", NODE).is_some()
        })
        .await;
    }

    /// The API server does not answer any more, or answers again.
    pub fn set_api(&self, up: bool) {
        let error = (!up).then_some("connection refused");
        self.api().set_down(error);
    }

    pub fn describe_api(&self) -> String {
        use std::fmt::Write as _;
        let mut text = String::new();
        let Some(api) = &self.api else {
            return text;
        };
        for pod in api.list_json("pods", "") {
            let meta = &pod["metadata"];
            writeln!(
                text,
                "API: pod {} {} deleted {} {}",
                meta["name"], meta["uid"], meta["deletionTimestamp"], pod["status"]["phase"],
            )
            .unwrap();
        }
        let requests = api.requests();
        for request in requests.iter().rev().take(25) {
            writeln!(
                text,
                "API: request {} {}: {}",
                request.number,
                request.line(),
                request.status
            )
            .unwrap();
        }
        text
    }
}
