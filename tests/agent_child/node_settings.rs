//! Settings of the node that a user sees outside of pods.

use holdfast_testkit::fake_cri::Fault;
use k8s_openapi::api::core::v1::Node as NodeInApi;
use serde_json::json;

use super::agent_process::NODE;
use super::rows::Cluster;
use super::*;

/// The addresses that the runtime was told since the last time.
fn told(node: &Node) -> Vec<String> {
    let calls = node.fake.calls().into_iter();
    let told = calls.filter(|call| call.operation == "update_runtime_config");
    told.map(|call| call.object).collect()
}

fn wait_told(node: &Node, cidrs: &[&str]) {
    eventually("the runtime has the addresses of pods", || {
        let told = told(node);
        (told == cidrs)
            .then_some(())
            .ok_or_else(|| format!("{told:?}"))
    });
}

#[test]
fn the_runtime_is_told_the_addresses_of_pods_at_the_start_and_when_they_change() {
    let cluster = Cluster::new();
    let node = &cluster.node;
    let agent = cluster.start();
    eventually("the node is registered", || {
        let found = cluster.api.get_json("nodes", "", NODE);
        found.map(drop).ok_or_else(|| "no node".to_owned())
    });
    assert_eq!(told(node), [""; 0], "nobody has assigned any");
    let assign = |cidrs: &[&str]| {
        let cidrs: Vec<String> = cidrs.iter().map(ToString::to_string).collect();
        cluster.api.modify::<NodeInApi>("", NODE, |node| {
            let spec = node.spec.get_or_insert_default();
            spec.pod_cidr = cidrs.first().cloned();
            spec.pod_cidrs = Some(cidrs.clone());
        });
    };
    // A refusal is no end.
    let fault = Fault::Error(Code::Internal, "no template".to_owned());
    node.fake.fail_once("update_runtime_config", fault);
    assign(&["10.1.0.0/24", "fd00::/64"]);
    let both = "10.1.0.0/24,fd00::/64";
    wait_told(node, &[both, both]);
    node.site.recorded();
    agent.kill9();

    // While the API server is away, what is on record counts.
    node.fake.clear_calls();
    cluster.api.set_down(Some("connection refused"));
    let _agent = cluster.start();
    wait_told(node, &[both]);
}

#[test]
fn a_node_without_an_api_server_has_the_addresses_of_its_configuration() {
    let node = Node::new(|_| Behaviour::RunForever);
    node.site
        .configure("cgroupsPerQOS: false\npodCIDR: 10.2.0.0/24\n");
    let agent = node.site.start();
    wait_told(&node, &["10.2.0.0/24"]);
    // What is told is no end of the agent.
    std::thread::sleep(Duration::from_secs(3));
    let state = fs::read_to_string(format!("/proc/{}/stat", agent.pid())).unwrap();
    assert!(!state.contains(") Z "), "{state}");
}

#[test]
fn the_agent_has_as_many_files_open_as_configured() {
    let node = Node::new(|_| Behaviour::RunForever);
    node.site
        .configure("cgroupsPerQOS: false\nmaxOpenFiles: 777\n");
    let agent = node.site.start();
    let limits = fs::read_to_string(format!("/proc/{}/limits", agent.pid())).unwrap();
    let limit = limits.lines().find(|l| l.starts_with("Max open files"));
    let numbers: Vec<&str> = limit.unwrap().split_whitespace().skip(3).collect();
    assert_eq!(numbers, ["777", "777", "files"]);
}

#[test]
fn a_node_whose_local_storage_is_not_counted_is_ready_and_has_none() {
    let cluster = Cluster::new();
    let settings = "cgroupsPerQOS: false\nlocalStorageCapacityIsolation: false\n";
    cluster.node.site.configure(settings);
    let _agent = cluster.start();
    eventually("the node is ready without local storage", || {
        let node = cluster.api.get_json("nodes", "", NODE).ok_or("no node")?;
        let conditions = node["status"]["conditions"].as_array().ok_or("none")?;
        let mut ready = conditions.iter();
        let ready = ready.any(|c| c["type"] == "Ready" && c["status"] == "True");
        let amounts = ["capacity", "allocatable"].map(|of| &node["status"][of]);
        let has = amounts.map(|of| (of["cpu"].is_string(), of["ephemeral-storage"].clone()));
        let wanted = [(true, json!(null)), (true, json!(null))];
        (ready && has == wanted)
            .then_some(())
            .ok_or_else(|| node["status"].to_string())
    });
}

#[test]
fn a_runtime_that_reports_no_file_systems_is_named_with_what_is_not_done() {
    let cluster = Cluster::new();
    let node = &cluster.node;
    node.fake.keep_images_in("");
    let _agent = cluster.start();
    let event = eventually("it is told", || {
        let dump = node.site.try_dump(&["events"])?;
        let rows = dump["tables"]["events"].as_array().ok_or("no table")?;
        let mut rows = rows.iter();
        let row = rows.find(|row| row["reason"] == "InvalidDiskCapacity");
        row.cloned().ok_or_else(|| "no event".to_owned())
    });
    let text = event.to_string();
    for part in [
        "no file system of images",
        "imagefs.available",
        "no image is removed",
    ] {
        assert!(text.contains(part), "{text}");
    }
    // The rest works.
    cluster.create(
        "web",
        json!({"containers": [{"name": "main", "image": IMAGE}]}),
    );
    node.wait_running(1);
}
