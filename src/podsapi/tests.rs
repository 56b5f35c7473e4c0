//! The API over its real socket; pods are read back with messages whose numbers are written by hand.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use prost::Message;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Request, client};
use tonic_prost::ProstCodec;

use super::proto::{EventType, WatchPodsEvent, WatchPodsRequest};
use super::*;
use crate::types::{BootId, Stamp};

#[derive(Clone, PartialEq, Message)]
struct WirePod {
    #[prost(message, optional, tag = "1")]
    metadata: Option<WireMeta>,
    #[prost(message, optional, tag = "2")]
    spec: Option<WireSpec>,
    #[prost(message, optional, tag = "3")]
    status: Option<WireStatus>,
}

#[derive(Clone, PartialEq, Message)]
struct WireMeta {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "3")]
    namespace: String,
    #[prost(string, tag = "5")]
    uid: String,
    #[prost(message, optional, tag = "8")]
    created: Option<WireTime>,
    #[prost(map = "string, string", tag = "11")]
    labels: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
struct WireTime {
    #[prost(int64, tag = "1")]
    seconds: i64,
    #[prost(int32, tag = "2")]
    nanos: i32,
}

#[derive(Clone, PartialEq, Message)]
struct WireSpec {
    #[prost(message, repeated, tag = "1")]
    volumes: Vec<WireVolume>,
    #[prost(message, repeated, tag = "2")]
    containers: Vec<WireContainer>,
    #[prost(bool, tag = "11")]
    host_network: bool,
}

#[derive(Clone, PartialEq, Message)]
struct WireVolume {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, optional, tag = "2")]
    source: Option<WireSource>,
}

#[derive(Clone, PartialEq, Message)]
struct WireSource {
    #[prost(message, optional, tag = "2")]
    empty_dir: Option<WireEmptyDir>,
}

#[derive(Clone, PartialEq, Message)]
struct WireEmptyDir {
    #[prost(message, optional, tag = "2")]
    size_limit: Option<WireQuantity>,
}

#[derive(Clone, PartialEq, Message)]
struct WireQuantity {
    #[prost(string, tag = "1")]
    text: String,
}

#[derive(Clone, PartialEq, Message)]
struct WireContainer {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, repeated, tag = "4")]
    args: Vec<String>,
    #[prost(message, optional, tag = "10")]
    liveness: Option<WireProbe>,
}

#[derive(Clone, PartialEq, Message)]
struct WireProbe {
    #[prost(message, optional, tag = "1")]
    handler: Option<WireHandler>,
    #[prost(int32, tag = "4")]
    period: i32,
}

#[derive(Clone, PartialEq, Message)]
struct WireHandler {
    #[prost(message, optional, tag = "2")]
    http_get: Option<WireHttpGet>,
}

#[derive(Clone, PartialEq, Message)]
struct WireHttpGet {
    #[prost(message, optional, tag = "2")]
    port: Option<WirePort>,
}

#[derive(Clone, PartialEq, Message)]
struct WirePort {
    #[prost(int64, tag = "1")]
    kind: i64,
    #[prost(int32, tag = "2")]
    number: i32,
    #[prost(string, tag = "3")]
    name: String,
}

#[derive(Clone, PartialEq, Message)]
struct WireStatus {
    #[prost(string, tag = "1")]
    phase: String,
}

fn pod(value: Value) -> Pod {
    serde_json::from_value(value).unwrap()
}

#[test]
fn pods_are_written_as_go_reads_them() {
    let probe = |port: Value| json!({"httpGet": {"port": port}, "periodSeconds": 7});
    let bytes = encode::pod(&pod(json!({
        "metadata": {
            "name": "web", "uid": "u1", "creationTimestamp": "1970-01-01T00:01:00Z",
            "labels": {"app": "shop"},
        },
        "spec": {
            "hostNetwork": true,
            "volumes": [
                {"name": "v", "emptyDir": {}}, {"name": "w", "emptyDir": {"sizeLimit": "1Mi"}},
            ],
            "containers": [
                {"name": "a", "args": ["x", ""], "livenessProbe": probe(json!(80))},
                {"name": "b", "livenessProbe": probe(json!("http"))},
            ],
        },
        "status": {"phase": "Running"},
    })))
    .unwrap();
    let read = WirePod::decode(bytes.as_slice()).unwrap();
    let metadata = read.metadata.unwrap();
    assert_eq!(
        (metadata.name.as_str(), metadata.uid.as_str()),
        ("web", "u1")
    );
    assert_eq!(metadata.created.unwrap().seconds, 60);
    assert_eq!(metadata.labels["app"], "shop");
    let spec = read.spec.unwrap();
    assert!(spec.host_network);
    let limits = spec.volumes.iter().map(|v| {
        let source = v.source.as_ref().unwrap();
        let limit = &source.empty_dir.as_ref().unwrap().size_limit;
        (v.name.as_str(), limit.as_ref().map(|q| q.text.as_str()))
    });
    assert_eq!(
        limits.collect::<Vec<_>>(),
        [("v", None), ("w", Some("1Mi"))]
    );
    assert_eq!(spec.containers[0].args, ["x", ""]);
    let ports = spec.containers.iter().map(|c| {
        let probe = c.liveness.clone().unwrap();
        assert_eq!(probe.period, 7);
        let port = probe.handler.unwrap().http_get.unwrap().port.unwrap();
        (port.kind, port.number, port.name)
    });
    let want = [(0, 80, String::new()), (1, 0, "http".to_owned())];
    assert_eq!(ports.collect::<Vec<_>>(), want);
    assert_eq!(read.status.unwrap().phase, "Running");
}

struct FixedClock;

impl Clock for FixedClock {
    fn now(&self) -> Stamp {
        Stamp {
            boot: BootId(1),
            boottime_ms: 0,
            wall_ms: 0,
        }
    }
}

fn shown(uid: &str, label: &str) -> ShownPod {
    let pod = pod(json!({
        "metadata": {"name": "web", "namespace": "shop", "uid": uid, "labels": {"l": label}},
        "spec": {"containers": []},
    }));
    ShownPod {
        pod: Arc::new(pod),
        status: None,
    }
}

struct Served {
    root: tempfile::TempDir,
    pods: Arc<Mutex<Vec<ShownPod>>>,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Served {
    fn new(pods: Vec<ShownPod>) -> Self {
        let root = tempfile::tempdir().unwrap();
        let pods = Arc::new(Mutex::new(pods));
        let source = Arc::clone(&pods);
        let stop = CancellationToken::new();
        let wanted = Arc::new(move || source.lock().unwrap().clone());
        let api = PodsApi::new(wanted, Arc::new(FixedClock), stop.clone());
        let task = tokio::spawn(serve(bind(root.path()).unwrap(), api));
        Self {
            root,
            pods,
            stop,
            task,
        }
    }

    async fn client(&self) -> client::Grpc<Channel> {
        let path = self.root.path().join("pods-api/pods-api.sock");
        let channel = Endpoint::from_static("http://localhost")
            .connect_with_connector(tower::service_fn(move |_: Uri| {
                let path = path.clone();
                async move { UnixStream::connect(path).await.map(TokioIo::new) }
            }))
            .await
            .unwrap();
        let mut client = client::Grpc::new(channel);
        client.ready().await.unwrap();
        client
    }

    async fn call<Req, Res>(&self, method: &'static str, request: Req) -> Result<Res, Status>
    where
        Req: Message + Send + Sync + 'static,
        Res: Message + Default + Send + Sync + 'static,
    {
        let codec = ProstCodec::<Req, Res>::default();
        let path = PathAndQuery::from_static(method);
        let mut client = self.client().await;
        let answer = client.unary(Request::new(request), path, codec).await?;
        Ok(answer.into_inner())
    }
}

fn identity(bytes: &[u8]) -> (String, Option<String>) {
    let metadata = WirePod::decode(bytes).unwrap().metadata.unwrap();
    assert_eq!(
        (metadata.name.as_str(), metadata.namespace.as_str()),
        ("web", "shop")
    );
    (metadata.uid, metadata.labels.get("l").cloned())
}

#[tokio::test]
async fn pods_are_listed_and_got_by_uid() {
    let served = Served::new(vec![shown("u2", "b"), shown("u1", "a")]);
    let all: proto::ListPodsResponse = served
        .call("/v1alpha1.Pods/ListPods", proto::ListPodsRequest {})
        .await
        .unwrap();
    let uids: Vec<_> = all.pods.iter().map(|pod| identity(pod).0).collect();
    assert_eq!(uids, ["u1", "u2"]);
    let get = |uid: &str| proto::GetPodRequest {
        pod_uid: uid.to_owned(),
    };
    const GET: &str = "/v1alpha1.Pods/GetPod";
    let one: proto::GetPodResponse = served.call(GET, get("u2")).await.unwrap();
    assert_eq!(one.pod, all.pods[1]);
    let none: Result<proto::GetPodResponse, _> = served.call(GET, get("u3")).await;
    assert_eq!(none.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn a_watch_begins_with_all_pods_and_shows_each_change_until_the_agent_ends() {
    let served = Served::new(vec![shown("u1", "a"), shown("u2", "a")]);
    let codec = ProstCodec::<WatchPodsRequest, WatchPodsEvent>::default();
    let path = PathAndQuery::from_static("/v1alpha1.Pods/WatchPods");
    let mut client = served.client().await;
    let request = Request::new(WatchPodsRequest {});
    let answer = client.server_streaming(request, path, codec).await.unwrap();
    let mut events = answer.into_inner();
    let mut next = async || {
        let event = events.message().await.unwrap()?;
        let pod = (!event.pod.is_empty()).then(|| identity(&event.pod));
        Some((event.r#type(), pod))
    };
    let of = |uid: &str, label: Option<&str>| Some((uid.to_owned(), label.map(str::to_owned)));
    assert_eq!(next().await, Some((EventType::Added, of("u1", Some("a")))));
    assert_eq!(next().await, Some((EventType::Added, of("u2", Some("a")))));
    assert_eq!(next().await, Some((EventType::InitialSyncComplete, None)));
    {
        let mut pods = served.pods.lock().unwrap();
        pods[0] = shown("u3", "a");
        pods[1] = shown("u2", "b");
    }
    assert_eq!(next().await, Some((EventType::Deleted, of("u1", None))));
    assert_eq!(
        next().await,
        Some((EventType::Modified, of("u2", Some("b"))))
    );
    assert_eq!(next().await, Some((EventType::Added, of("u3", Some("a")))));
    served.stop.cancel();
    assert_eq!(next().await, None);
    let ended = tokio::time::timeout(Duration::from_secs(10), served.task).await;
    ended.unwrap().unwrap();
}
