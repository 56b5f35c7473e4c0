//! The API over its real socket: a tonic client, and a client that speaks as those in Go do.

use std::sync::Mutex;

use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Request, client};
use tonic_prost::ProstCodec;

use super::*;
use crate::core::claims::{ClaimId, ClaimRecord, DriverClaim, claim_key};
use crate::core::devices::{Allocation, PodDevices, allocations_key};
use crate::core::state::Transaction;
use crate::devicemanager::DeviceManagerOptions;
use crate::dra::DraOptions;
use crate::kubeletconfig::DeviceReadiness;
use crate::node_object::NodeObject;
use crate::store::Store;
use crate::types::{BootId, Stamp};

struct FixedClock(Mutex<Stamp>);

impl FixedClock {
    fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(Stamp {
            boot: BootId(1),
            boottime_ms: 0,
            wall_ms: 0,
        })))
    }

    fn advance(&self, by: Duration) {
        let mut now = self.0.lock().unwrap();
        *now = now.plus(by);
    }
}

impl Clock for FixedClock {
    fn now(&self) -> Stamp {
        *self.0.lock().unwrap()
    }
}

fn pod(namespace: &str, name: &str) -> Arc<Pod> {
    let pod = json!({
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "initContainers": [{"name": "once"}, {"name": "side", "restartPolicy": "Always"}],
            "containers": [{"name": "main"}],
            "ephemeralContainers": [{"name": "debug"}],
        },
    });
    Arc::new(serde_json::from_value(pod).unwrap())
}

struct Served {
    root: tempfile::TempDir,
    clock: Arc<FixedClock>,
    metrics: Metrics,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Served {
    fn new(active: Vec<Arc<Pod>>) -> Self {
        let root = tempfile::tempdir().unwrap();
        Self::in_root(root, active)
    }

    fn in_root(root: tempfile::TempDir, active: Vec<Arc<Pod>>) -> Self {
        let clock = FixedClock::new();
        let metrics = Metrics::default();
        let active: ActivePods = Arc::new(move || active.clone());
        let pods = PodResources::new(active, Arc::clone(&clock) as _, metrics.clone());
        let stop = CancellationToken::new();
        let listener = bind(root.path()).unwrap();
        let task = tokio::spawn(serve(listener, pods, stop.clone()));
        Self {
            root,
            clock,
            metrics,
            stop,
            task,
        }
    }

    async fn connect(&self) -> Channel {
        let path = socket_path(self.root.path());
        Endpoint::from_static("http://localhost")
            .connect_with_connector(tower::service_fn(move |_: Uri| {
                let path = path.clone();
                async move { UnixStream::connect(path).await.map(TokioIo::new) }
            }))
            .await
            .unwrap()
    }

    async fn call<Req, Res>(&self, method: &'static str, request: Req) -> Result<Res, Status>
    where
        Req: prost::Message + Send + Sync + 'static,
        Res: prost::Message + Default + Send + Sync + 'static,
    {
        call(self.connect().await, method, request).await
    }
}

async fn call<Req, Res>(channel: Channel, method: &'static str, request: Req) -> Result<Res, Status>
where
    Req: prost::Message + Send + Sync + 'static,
    Res: prost::Message + Default + Send + Sync + 'static,
{
    let mut client = client::Grpc::new(channel);
    client.ready().await.unwrap();
    let path = tonic::codegen::http::uri::PathAndQuery::from_static(method);
    let codec = ProstCodec::<Req, Res>::default();
    let answer = client.unary(Request::new(request), path, codec).await?;
    Ok(answer.into_inner())
}

const LIST: &str = "/v1.PodResourcesLister/List";

#[tokio::test]
async fn requests_are_counted_by_version_and_method_as_upstream_counts_them() {
    let served = Served::new(vec![pod("a", "one")]);
    for method in [LIST, LIST, "/v1alpha1.PodResourcesLister/List"] {
        let _: proto::ListPodResourcesResponse = served
            .call(method, proto::ListPodResourcesRequest {})
            .await
            .unwrap();
    }
    for (name, found) in [("one", true), ("two", false)] {
        let request = proto::GetPodResourcesRequest {
            pod_name: name.to_owned(),
            pod_namespace: "a".to_owned(),
        };
        let answer: Result<proto::GetPodResourcesResponse, _> =
            served.call("/v1.PodResourcesLister/Get", request).await;
        assert_eq!(answer.is_ok(), found, "{name}");
    }
    let _: proto::AllocatableResourcesResponse = served
        .call(
            "/v1.PodResourcesLister/GetAllocatableResources",
            proto::AllocatableResourcesRequest {},
        )
        .await
        .unwrap();
    let text = served.metrics.encode().unwrap();
    let mut seen: Vec<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("kubelet_pod_resources_endpoint_"))
        .collect();
    seen.sort_unstable();
    assert_eq!(
        seen,
        [
            "errors_get{server_api_version=\"v1\"} 1",
            "requests_get_allocatable{server_api_version=\"v1\"} 1",
            "requests_get{server_api_version=\"v1\"} 2",
            "requests_list{server_api_version=\"v1\"} 2",
            "requests_total{server_api_version=\"v1\"} 5",
            "requests_total{server_api_version=\"v1alpha1\"} 1",
        ]
    );
}

#[tokio::test]
async fn active_pods_are_listed_with_sidecars_and_main_containers() {
    let served = Served::new(vec![pod("b", "two"), pod("a", "one")]);
    let answer: proto::ListPodResourcesResponse = served
        .call(LIST, proto::ListPodResourcesRequest {})
        .await
        .unwrap();
    let seen: Vec<_> = (answer.pod_resources.iter())
        .map(|p| {
            let containers: Vec<_> = p.containers.iter().map(|c| c.name.as_str()).collect();
            (p.namespace.as_str(), p.name.as_str(), containers)
        })
        .collect();
    let containers = vec!["side", "main"];
    assert_eq!(
        seen,
        [("a", "one", containers.clone()), ("b", "two", containers)]
    );
    let alpha: proto::ListPodResourcesResponse = served
        .call(
            "/v1alpha1.PodResourcesLister/List",
            proto::ListPodResourcesRequest {},
        )
        .await
        .unwrap();
    assert_eq!(alpha, answer);
}

#[tokio::test]
async fn devices_are_listed_once_for_each_numa_node() {
    let (clock, active) = (FixedClock::new(), vec![pod("a", "one")]);
    let store = Store::in_memory(Arc::clone(&clock) as _);
    let allocation = Allocation {
        ids: [("g0", vec![]), ("g1", vec![0, 1])]
            .map(|(id, nodes)| (id.to_owned(), nodes))
            .into(),
        granted: None,
        outdated: None,
    };
    let held = PodDevices::default().with("main", "example.com/gpu", allocation);
    let put = Transaction::new().put(
        allocations_key(&active[0]),
        crate::core::state::FactRecord::of(&held, clock.now()),
    );
    store.commit(put).await.unwrap();
    let devices = DeviceManager::new(DeviceManagerOptions {
        store,
        clock: Arc::clone(&clock) as _,
        metrics: Metrics::default(),
        readiness: DeviceReadiness::Fail,
    });
    let active: ActivePods = Arc::new(move || active.clone());
    let pods = PodResources::new(active, clock, Metrics::default()).with_devices(devices);
    let answer = pods.list(proto::ListPodResourcesRequest {}).unwrap();
    let containers = &answer.pod_resources[0].containers;
    assert!(containers[0].devices.is_empty(), "the sidecar has none");
    let shown: Vec<_> = (containers[1].devices.iter())
        .map(|d| {
            let nodes = d.topology.iter().flat_map(|t| &t.nodes);
            let nodes: Vec<i64> = nodes.map(|node| node.id).collect();
            (d.device_ids[0].as_str(), nodes)
        })
        .collect();
    assert_eq!(shown, [("g0", vec![]), ("g1", vec![0]), ("g1", vec![1])]);
}

#[tokio::test]
async fn claims_are_listed_with_the_devices_of_each_container() {
    let clock = FixedClock::new();
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "one", "namespace": "a", "uid": "u1"},
        "spec": {
            "resourceClaims": [{"name": "gpu", "resourceClaimName": "c"}],
            "containers": [
                {"name": "main", "resources": {"claims": [{"name": "gpu", "request": "fast"}]}},
                {"name": "other"},
            ],
        },
    }))
    .unwrap();
    let device = |name: &str, request: &str| ClaimDevice {
        pool: "pool".to_owned(),
        device: name.to_owned(),
        requests: vec![request.to_owned()],
        cdi: vec![format!("v/c={name}")],
        share: None,
    };
    let of_driver = DriverClaim {
        prepared: Some(clock.now().boot),
        devices: vec![device("d0", "fast"), device("d1", "slow")],
    };
    let record = ClaimRecord {
        uid: "c1".to_owned(),
        pods: [(pod.uid(), ["gpu".to_owned()].into())].into(),
        drivers: [("gpu.example.com".to_owned(), of_driver)].into(),
    };
    let store = Store::in_memory(Arc::clone(&clock) as _);
    let key = claim_key(&ClaimId::new("a", "c"));
    let put = Transaction::new().put(
        key,
        crate::core::state::FactRecord::of(&record, clock.now()),
    );
    store.commit(put).await.unwrap();
    let claims = DraManager::new(DraOptions {
        store,
        clock: Arc::clone(&clock) as _,
        metrics: Metrics::default(),
        api: None,
        node_name: "n1".to_owned(),
        node: NodeObject::default(),
    });
    let active = vec![Arc::new(pod)];
    let active: ActivePods = Arc::new(move || active.clone());
    let pods = PodResources::new(active, clock, Metrics::default()).with_claims(claims);
    let answer = pods.list(proto::ListPodResourcesRequest {}).unwrap();
    let containers = &answer.pod_resources[0].containers;
    let resource = proto::ClaimResource {
        cdi_devices: vec![proto::CdiDevice {
            name: "v/c=d0".to_owned(),
        }],
        driver_name: "gpu.example.com".to_owned(),
        pool_name: "pool".to_owned(),
        device_name: "d0".to_owned(),
    };
    let claim = proto::DynamicResource {
        claim_name: "c".to_owned(),
        claim_namespace: "a".to_owned(),
        claim_resources: vec![resource],
    };
    assert_eq!(containers[0].dynamic_resources, [claim]);
    assert!(containers[1].dynamic_resources.is_empty());
}

#[tokio::test]
async fn one_pod_is_got_by_name_and_nothing_is_allocatable() {
    let served = Served::new(vec![pod("a", "one")]);
    let get = |name: &str| proto::GetPodResourcesRequest {
        pod_name: name.to_owned(),
        pod_namespace: "a".to_owned(),
    };
    let answer: proto::GetPodResourcesResponse = served
        .call("/v1.PodResourcesLister/Get", get("one"))
        .await
        .unwrap();
    assert_eq!(answer.pod_resources.unwrap().name, "one");
    let missing: Result<proto::GetPodResourcesResponse, _> =
        served.call("/v1.PodResourcesLister/Get", get("two")).await;
    let missing = missing.unwrap_err();
    assert_eq!(missing.code(), Code::NotFound);
    assert_eq!(missing.message(), "pod two in namespace a not found");
    let answer: proto::AllocatableResourcesResponse = served
        .call(
            "/v1.PodResourcesLister/GetAllocatableResources",
            proto::AllocatableResourcesRequest {},
        )
        .await
        .unwrap();
    assert_eq!(answer, proto::AllocatableResourcesResponse::default());
    for method in [
        "/v1.PodResourcesLister/Nothing",
        "/v1alpha1.PodResourcesLister/Get",
    ] {
        let answer: Result<proto::GetPodResourcesResponse, _> =
            served.call(method, get("one")).await;
        assert_eq!(answer.unwrap_err().code(), Code::Unimplemented, "{method}");
    }
}

#[tokio::test]
async fn more_than_the_rate_is_refused_until_time_has_passed() {
    let served = Served::new(Vec::new());
    let channel = served.connect().await;
    let list = || {
        call::<_, proto::ListPodResourcesResponse>(
            channel.clone(),
            LIST,
            proto::ListPodResourcesRequest {},
        )
    };
    for _ in 0..10 {
        list().await.unwrap();
    }
    let refused = list().await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert_eq!(refused.message(), "rejected by rate limit");
    served.clock.advance(Duration::from_millis(20));
    list().await.unwrap();
    list().await.unwrap();
    assert_eq!(
        list().await.unwrap_err().code(),
        Code::ResourceExhausted,
        "20 ms are worth two requests"
    );
}

#[tokio::test]
async fn a_new_agent_takes_the_place_of_the_old_socket() {
    let first = Served::new(Vec::new());
    let path = socket_path(first.root.path());
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    first.stop.cancel();
    first.task.await.unwrap();
    assert!(path.exists(), "as one that was killed would leave it");
    let second = Served::in_root(first.root, vec![pod("a", "one")]);
    let answer: proto::ListPodResourcesResponse = second
        .call(LIST, proto::ListPodResourcesRequest {})
        .await
        .unwrap();
    assert_eq!(answer.pod_resources.len(), 1);
}

/// Replays the bytes of a grpc-go client that got the path of a socket: compressed headers with a table, and the path
/// as the authority. Twice, so that the second block refers to the table of the first.
#[tokio::test]
async fn a_client_that_names_the_socket_as_authority_is_answered() {
    let served = Served::new(vec![pod("a", "one")]);
    let mut stream = UnixStream::connect(socket_path(served.root.path()))
        .await
        .unwrap();
    let mut encoder = httlib_hpack::Encoder::with_dynamic_size(4096);
    let mut sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    sent.extend_from_slice(&[0, 0, 0, 4, 0, 0, 0, 0, 0]);
    for stream_id in [1, 3] {
        let block = block_of_a_request(&mut encoder);
        let mut head = |kind: u8, flags: u8, payload: &[u8]| {
            sent.extend_from_slice(&[0, 0, u8::try_from(payload.len()).unwrap(), kind, flags]);
            sent.extend_from_slice(&[0, 0, 0, stream_id]);
            sent.extend_from_slice(payload);
        };
        let (first, rest) = block.split_at(block.len() / 2);
        head(1, 0, first);
        head(9, 4, rest);
        head(0, 1, &[0; 5]);
    }
    stream.write_all(&sent).await.unwrap();
    // Frames until both streams have ended.
    let mut answers = Vec::new();
    let mut ended = 0;
    while ended < 2 {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await.expect("an answer");
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let mut payload = vec![0; usize::try_from(length).unwrap()];
        stream.read_exact(&mut payload).await.unwrap();
        let (kind, flags, id) = (head[3], head[4], head[8]);
        assert!(
            kind != 3 && kind != 7,
            "the server gave up: {kind} {payload:?}"
        );
        if kind == 0 && !payload.is_empty() {
            answers.push((id, payload));
        }
        ended += u32::from(matches!(kind, 0 | 1) && flags & 1 != 0);
    }
    answers.sort();
    let ids: Vec<_> = answers.iter().map(|(id, _)| *id).collect();
    assert_eq!(ids, [1, 3]);
    for (_, data) in answers {
        let answer: proto::ListPodResourcesResponse = prost::Message::decode(&data[5..]).unwrap();
        assert_eq!(answer.pod_resources[0].name, "one");
    }
}

/// The header block of a request as grpc-go sends it.
fn block_of_a_request(encoder: &mut httlib_hpack::Encoder<'_>) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", LIST),
        (":authority", "%2Frun%2Fpod-resources%2Fkubelet.sock"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ] {
        let flags = httlib_hpack::Encoder::WITH_INDEXING
            | httlib_hpack::Encoder::HUFFMAN_VALUE
            | httlib_hpack::Encoder::BEST_FORMAT;
        let field = (name.as_bytes().to_vec(), value.as_bytes().to_vec(), flags);
        encoder.encode(field, &mut block).unwrap();
    }
    block
}

/// A connection that sends one header block.
fn connection_with(block: &[u8]) -> Vec<u8> {
    let mut sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    sent.extend_from_slice(&[0, 0, 0, 4, 0, 0, 0, 0, 0]);
    let [_, _, high, low] = u32::try_from(block.len()).unwrap().to_be_bytes();
    sent.extend_from_slice(&[0, high, low, 1, 5, 0, 0, 0, 1]);
    sent.extend_from_slice(block);
    sent
}

/// Relays such a connection in this task: a panic fails the test.
async fn relayed(block: &[u8]) -> Result<Vec<u8>, String> {
    let (mut client, theirs) = tokio::io::duplex(1 << 20);
    let (ours, mut server) = tokio::io::duplex(1 << 20);
    client.write_all(&connection_with(block)).await.unwrap();
    client.shutdown().await.unwrap();
    let passed_on = async {
        let mut passed_on = Vec::new();
        server.read_to_end(&mut passed_on).await.unwrap();
        drop(server);
        passed_on
    };
    let relay = async { authority::relay(theirs, ours).await };
    let (result, passed_on) = tokio::join!(relay, passed_on);
    result
        .map(|()| passed_on)
        .map_err(|error| error.to_string())
}

#[tokio::test]
async fn header_blocks_that_break_off_or_are_odd_end_the_connection() {
    let block = block_of_a_request(&mut httlib_hpack::Encoder::default());
    let passed_on = relayed(&block).await.unwrap();
    let text = String::from_utf8_lossy(&passed_on).into_owned();
    assert!(
        text.contains("localhost") && !text.contains("%2F"),
        "{text}"
    );
    // Broken off after each byte: whole headers pass, halves do not.
    let mut damaged = 0;
    for end in 0..block.len() {
        if let Err(error) = relayed(&block[..end]).await {
            assert_eq!(error, "a header block is damaged", "{end}");
            damaged += 1;
        }
    }
    assert!(damaged > block.len() - 10, "{damaged} of {}", block.len());
    let odd: &[&[u8]] = &[
        // A literal without name, without value.
        &[0],
        &[0, 1, b'a'],
        &[0x40],
        // Integers that do not end, or are too long.
        &[0xff],
        &[0x0f],
        &[0x7f, 0x80],
        &[0x3f, 0xff, 0xff, 0xff, 0xff, 0xff, 0x0f],
        &[0x80],
        // A string that is longer than the block.
        &[0, 0x7f, 0xff, 0xff, 0xff, 0x7f],
        &[0, 0xff, 0xff],
        // An index that there is not, and a table that is too large.
        &[0xbe],
        &[0x3f, 0xff, 0xff, 0x7f],
        // Huffman: nothing but ones is no character.
        &[0, 0x84, 0xff, 0xff, 0xff, 0xff, 0],
    ];
    for block in odd {
        let result = relayed(block).await;
        assert_eq!(
            result.unwrap_err(),
            "a header block is damaged",
            "{block:x?}"
        );
    }
    // Each change of the table's size is work, and takes a byte.
    let error = relayed(&[0x20; 4096]).await.unwrap_err();
    assert_eq!(error, "a header block is too long");
    // The same numbers at each run.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state % u64::try_from(below).unwrap()).unwrap()
    };
    for _ in 0..20_000 {
        let mut changed = block.clone();
        for _ in 0..=random(4) {
            let at = random(changed.len());
            changed[at] = u8::try_from(random(256)).unwrap();
        }
        changed.truncate(1 + random(changed.len()));
        let said = relayed(&changed).await.err().unwrap_or_default();
        assert!(
            [
                "",
                "a header block is damaged",
                "a header block is too long"
            ]
            .contains(&said.as_str()),
            "{said}: {changed:x?}"
        );
    }
}

#[tokio::test]
async fn a_damaged_header_block_harms_nobody_else() {
    let served = Served::new(vec![pod("a", "one")]);
    let channel = served.connect().await;
    let block = block_of_a_request(&mut httlib_hpack::Encoder::default());
    for end in [block.len() - 1, block.len() / 2, 1] {
        let mut stream = UnixStream::connect(socket_path(served.root.path()))
            .await
            .unwrap();
        let sent = connection_with(&block[..end]);
        stream.write_all(&sent).await.unwrap();
        // So the server hangs up at once, and not only when it asks whether somebody is there. It may have done so already.
        stream.shutdown().await.ok();
        let mut answer = Vec::new();
        // A reset is an end, too.
        stream.read_to_end(&mut answer).await.ok();
        let request = proto::ListPodResourcesRequest {};
        let answer: proto::ListPodResourcesResponse =
            call(channel.clone(), LIST, request).await.unwrap();
        assert_eq!(answer.pod_resources.len(), 1);
    }
}

#[tokio::test]
async fn cpus_and_memory_of_their_own_are_told() {
    let clock = FixedClock::new();
    let (pinning, store) = crate::cm::pinning::testkit::pinning(Arc::clone(&clock) as _);
    let amounts = json!({"cpu": "2", "memory": "1Gi"});
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "p", "namespace": "ns", "uid": "u"},
        "spec": {"containers": [
            {"name": "main", "resources": {"limits": amounts, "requests": amounts}}]},
    }))
    .unwrap();
    let uid = pod.uid();
    let placed = pinning.place(&pod, |_| true).unwrap();
    pinning.reserve(&uid, placed);
    store.commit(pinning.unrecorded(&uid)).await.unwrap();
    let active: ActivePods = Arc::new(move || vec![Arc::new(pod.clone())]);
    let pods =
        PodResources::new(active, clock as _, Metrics::default()).telling_assignments(pinning);
    let listed = pods.list(proto::ListPodResourcesRequest {}).unwrap();
    let main = &listed.pod_resources[0].containers[0];
    assert_eq!(main.cpu_ids, [2, 3]);
    let block = &main.memory[0];
    assert_eq!(
        (block.memory_type.as_str(), block.size),
        ("memory", 1 << 30)
    );
    assert_eq!(block.topology.as_ref().unwrap().nodes[0].id, 0);
    let all = pods.allocatable(proto::AllocatableResourcesRequest {});
    let all = all.unwrap();
    assert_eq!(all.cpu_ids, [1, 2, 3]);
    let sizes: Vec<u64> = all.memory.iter().map(|block| block.size >> 30).collect();
    assert_eq!(sizes, [9, 10]);
}
