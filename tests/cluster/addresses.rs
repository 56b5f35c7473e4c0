//! A node whose address changes: with its cluster in a network namespace of its own.

use std::net::{IpAddr, Ipv4Addr};
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, unshare};
use serde_json::{Value, json};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use crate::agent_process::within;
use crate::setup::{Cluster, container};

const CHANGES: u8 = 100;
/// How long others may wait for the node's new address.
const FOLLOWS: Duration = Duration::from_secs(30);

fn ip(arguments: &str) {
    let ran = Command::new("ip").args(arguments.split(' ')).status();
    assert!(ran.expect("run ip").success(), "ip {arguments}");
}

fn address(n: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 99, n, 1)
}

/// As after a new lease: the old address goes, with its routes, and another comes.
fn change(n: u8) {
    ip("addr flush dev uplink0");
    ip(&format!("addr add {}/24 dev uplink0", address(n)));
    ip(&format!("route add default via 10.99.{n}.254 dev uplink0"));
}

fn internal(node: &Value) -> Vec<String> {
    let all = node["status"]["addresses"].as_array();
    let internal = all
        .into_iter()
        .flatten()
        .filter(|a| a["type"] == "InternalIP");
    internal
        .map(|a| a["address"].as_str().unwrap_or_default().to_owned())
        .collect()
}

/// The addresses of the certificate that the agent serves with.
fn certified(cluster: &Cluster, port: u16) -> Result<Vec<IpAddr>, String> {
    rustls::crypto::ring::default_provider()
        .install_default()
        .ok();
    let got = cluster.run(async {
        let client = reqwest::Client::builder()
            .danger_accept_invalid_certs(true)
            .tls_info(true)
            .build()?;
        client
            .get(format!("https://127.0.0.1:{port}/healthz"))
            .send()
            .await
    });
    let got = got.map_err(|error| format!("{error:?}"))?;
    let tls = got.extensions().get::<reqwest::tls::TlsInfo>();
    let certificate = tls
        .and_then(|tls| tls.peer_certificate())
        .ok_or("no certificate")?;
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|e| e.to_string())?;
    let names = parsed
        .subject_alternative_name()
        .map_err(|e| e.to_string())?;
    let names = names.ok_or("no names")?.value.general_names.iter();
    let address = |name: &GeneralName<'_>| match name {
        GeneralName::IPAddress([a, b, c, d]) => Some(Ipv4Addr::new(*a, *b, *c, *d).into()),
        _ => None,
    };
    Ok(names.filter_map(address).collect())
}

/// R41: probes of pods on the node's network, the node object, new pods and the serving certificate follow.
#[test]
fn r41_the_nodes_address_changes_a_hundred_times() {
    // For this thread, and all that it starts from here on.
    unshare(CloneFlags::CLONE_NEWNET).unwrap();
    ip("link set lo up");
    ip("link add uplink0 type veth peer name beyond0");
    ip("link set beyond0 up");
    ip("link set uplink0 up");
    change(0);
    let cluster = Cluster::alone();
    // No lease yet when the agent starts.
    ip("addr flush dev uplink0");
    cluster.site.serve_api(10_250);
    let _agent = cluster.start();
    let mut web = container(
        "web",
        "mkdir /www; echo ok > /www/index.html; exec httpd -f -p 8080 -h /www",
    );
    let probe =
        json!({"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1, "timeoutSeconds": 1});
    web["livenessProbe"] = probe.clone();
    web["readinessProbe"] = probe;
    let on_node = json!({"hostNetwork": true, "containers": [web]});
    cluster.add_static("web", on_node);
    let name = cluster.mirror("web");
    let is_ready = |pod: &Value| pod["status"]["containerStatuses"][0]["ready"] == true;
    let first = cluster.wait_pod(&name, "probed over the loopback", is_ready);

    for n in 1..=CHANGES {
        change(n);
        let changed = Instant::now();
        if n % 20 == 0 {
            let wanted = address(n);
            within(FOLLOWS, "the node object has the address", || {
                let found = internal(&cluster.get_node().unwrap_or_default());
                (found == [wanted.to_string()])
                    .then_some(())
                    .ok_or_else(|| format!("{found:?}"))
            });
            within(FOLLOWS, "the certificate has the address", || {
                let found = certified(&cluster, 10_250)?;
                found
                    .contains(&wanted.into())
                    .then_some(())
                    .ok_or_else(|| format!("{found:?}"))
            });
            println!("address {n} reached all after {:?}", changed.elapsed());
        } else {
            std::thread::sleep(Duration::from_millis(700));
        }
    }

    let last = address(CHANGES).to_string();
    cluster.create_pod(
        "new",
        json!({"containers": [container("c", "exec sleep 1000")]}),
    );
    let new = cluster.wait_running("new");
    assert_eq!(new["status"]["hostIP"], last.as_str());
    let now = cluster.pod(&name);
    let container = |pod: &Value| pod["status"]["containerStatuses"][0].clone();
    assert_eq!(
        container(&now)["containerID"],
        container(&first)["containerID"]
    );
    assert_eq!(container(&now)["restartCount"], 0);
    assert_eq!(container(&now)["ready"], true);
}
