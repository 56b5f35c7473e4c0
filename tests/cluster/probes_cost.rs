//! What probes cost: pods with an exec, http, tcp and grpc probe each, every 10 s.
//!
//! Static pods, since the API servers that tests find may not know grpc probes; on the network of the host, where this
//! process answers for the health of all of them. The bound counts for a release build (`make figures`).

use std::collections::{BTreeMap, HashSet};
use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use serde_json::{Value, json};
use tonic::codegen::http as wire;
use tonic::server::{NamedService, UnaryService};
use tonic_prost::ProstCodec;

use crate::agent_process::{Agent, eventually, free_port};
use crate::figures::{cpu, memory};
use crate::setup::{Cluster, FOREVER, condition, container, container_status};

/// `grpc.health.v1.HealthCheckRequest`.
#[derive(Clone, PartialEq, prost::Message)]
struct CheckRequest {
    #[prost(string, tag = "1")]
    service: String,
}

/// `grpc.health.v1.HealthCheckResponse`.
#[derive(Clone, PartialEq, prost::Message)]
struct CheckResponse {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// A health service of which everything is fine, and that counts who asks.
#[derive(Clone, Default)]
pub struct Health(Arc<AtomicU64>);

impl Health {
    /// Answers on a port of the host for as long as the cluster is there. Returns the port.
    pub fn serve(&self, cluster: &Cluster) -> u16 {
        // On all addresses: the node's is not known here.
        let port = free_port();
        let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
        let served = tonic::transport::Server::builder()
            .add_service(self.clone())
            .serve(address);
        cluster.spawn(async move { served.await.expect("serve health") });
        port
    }

    /// How often it was asked.
    pub fn asked(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl UnaryService<CheckRequest> for Health {
    type Response = CheckResponse;
    type Future = BoxFuture<'static, Result<tonic::Response<CheckResponse>, tonic::Status>>;

    fn call(&mut self, _: tonic::Request<CheckRequest>) -> Self::Future {
        self.0.fetch_add(1, Ordering::Relaxed);
        Box::pin(async { Ok(tonic::Response::new(CheckResponse { status: 1 })) })
    }
}

impl NamedService for Health {
    const NAME: &'static str = "grpc.health.v1.Health";
}

impl tower::Service<wire::Request<tonic::body::Body>> for Health {
    type Response = wire::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: wire::Request<tonic::body::Body>) -> Self::Future {
        let health = self.clone();
        Box::pin(async move {
            let mut server = tonic::server::Grpc::new(ProstCodec::default());
            Ok(server.unary(health, request).await)
        })
    }
}

/// Pods with a server that is asked by http (readiness) and tcp (liveness), and one whose health is asked for by grpc
/// (readiness) and, when `exec` says so, by a command (liveness).
fn pod(port: u16, grpc: u16, exec: bool) -> Value {
    let probe = |mut handler: Value| {
        handler["periodSeconds"] = json!(10);
        handler["timeoutSeconds"] = json!(5);
        handler
    };
    let mut web = container(
        "web",
        &format!("mkdir -p /www; echo ok > /www/index.html; exec httpd -f -p {port} -h /www"),
    );
    web["startupProbe"] =
        json!({"tcpSocket": {"port": port}, "periodSeconds": 1, "failureThreshold": 60});
    web["readinessProbe"] = probe(json!({"httpGet": {"path": "/index.html", "port": port}}));
    web["livenessProbe"] = probe(json!({"tcpSocket": {"port": port}}));
    let mut other = container("other", FOREVER);
    other["startupProbe"] =
        json!({"grpc": {"port": grpc}, "periodSeconds": 1, "failureThreshold": 60});
    other["readinessProbe"] = probe(json!({"grpc": {"port": grpc}}));
    if exec {
        other["livenessProbe"] = probe(json!({"exec": {"command": ["true"]}}));
    }
    json!({
        "hostNetwork": true, "terminationGracePeriodSeconds": 1, "containers": [web, other],
    })
}

/// Probes so far, by result.
fn probes(agent: &Agent) -> BTreeMap<String, u64> {
    let (_, text) = agent.get("/metrics/probes").unwrap();
    let mut counts = BTreeMap::new();
    for line in text
        .lines()
        .filter(|l| l.starts_with("prober_probe_total{"))
    {
        let (labels, count) = line.rsplit_once(' ').unwrap();
        let result = labels.split("result=\"").nth(1).unwrap();
        let result = result.split('"').next().unwrap();
        *counts.entry(result.to_owned()).or_default() += count.parse::<u64>().unwrap();
    }
    counts
}

/// Versions and containers of the pods' statuses on record, when all of them are Ready.
fn ready(cluster: &Cluster, count: usize) -> Result<Vec<Value>, String> {
    let dump = cluster.try_dump(&["statuses"])?;
    let rows = dump["tables"]["statuses"].as_array().ok_or("no statuses")?;
    let ready = |row: &&Value| {
        let name = row["name"].as_str().unwrap_or_default();
        name.starts_with("probed-") && condition(row, "Ready")["status"] == "True"
    };
    let told = |row: &Value| {
        let status = &row["status"];
        json!({
            "name": row["name"], "version": row["version"],
            "status": {"containerStatuses": status["containerStatuses"]},
        })
    };
    let rows: Vec<Value> = rows.iter().filter(ready).map(told).collect();
    if rows.len() == count {
        Ok(rows)
    } else {
        Err(format!("{} of {count} are Ready", rows.len()))
    }
}

/// Measures `count` pods for a while; the agent's share of a core in percent.
fn measure(count: usize, exec: bool, time: Duration) -> f64 {
    let cluster = Cluster::new();
    cluster.site.configure("maxPods: 250\n");
    let health = Health::default();
    let grpc = health.serve(&cluster);
    let mut ports = HashSet::from([grpc]);
    while ports.len() <= count {
        ports.insert(free_port());
    }
    ports.remove(&grpc);
    let agent = cluster.join();
    for (n, port) in ports.into_iter().enumerate() {
        cluster.add_static(&format!("probed-{n}"), pod(port, grpc, exec));
    }
    eventually("all pods are Ready", || ready(&cluster, count).map(drop));
    // Starting is over, and every probe has its place in the period.
    std::thread::sleep(Duration::from_secs(12));
    let before = ready(&cluster, count).expect("they stay Ready");
    let (asked, ran, busy) = (health.asked(), probes(&agent), cpu(&agent));
    let start = Instant::now();
    std::thread::sleep(time);
    let share = (cpu(&agent) - busy) / start.elapsed().as_secs_f64() * 100.0;
    let (asked, after) = (health.asked() - asked, probes(&agent));
    let more = |result: &str| {
        let of = |counts: &BTreeMap<String, u64>| counts.get(result).copied().unwrap_or(0);
        of(&after) - of(&ran)
    };
    let kinds = if exec { 4 } else { 3 };
    println!(
        "{count} pods with {} probes each every 10 s: {share:.2} % of a core (limit 3 without exec), {} MiB; {} probes in {:.0} s",
        if exec {
            "http, tcp, grpc and exec"
        } else {
            "http, tcp and grpc"
        },
        memory(&agent),
        more("successful"),
        time.as_secs_f64(),
    );
    // One more or less each at the ends.
    let periods = time.as_secs() / 10;
    let expected = |kinds: u64| {
        let count = u64::try_from(count).unwrap();
        kinds * count * (periods - 1)..=kinds * count * (periods + 1)
    };
    assert!(
        expected(kinds).contains(&more("successful")),
        "{ran:?} {after:?}"
    );
    assert!(
        expected(1).contains(&asked),
        "{asked} asked for their health"
    );
    assert_eq!(
        (more("failed"), more("unknown")),
        (0, 0),
        "{ran:?} {after:?}"
    );
    let now = ready(&cluster, count).expect("they stay Ready");
    assert_eq!(now, before, "probes that only confirm change nothing");
    for row in &now {
        for name in ["web", "other"] {
            let container = container_status(row, name);
            assert_eq!(container["restartCount"], 0, "{container}");
        }
    }
    drop(agent);
    share
}

#[test]
fn figures_of_probes_of_every_kind() {
    if std::env::var_os("HOLDFAST_FIGURES").is_none() {
        measure(4, true, Duration::from_secs(20));
        return;
    }
    let share = measure(50, false, Duration::from_secs(60));
    measure(50, true, Duration::from_secs(60));
    assert!(share <= 3.0, "{share:.2} % of a core");
}
