//! Resource claims of pods of an API server, across restarts of the agent.

use holdfast_testkit::dra_driver::DraDriver;
use k8s_openapi::api::core::v1::{Pod, PodResourceClaimStatus};
use serde_json::json;

use super::rows::Cluster;
use super::*;

const DRIVER: &str = "gpu.example.com";

/// A node with a driver, and a pod whose claim is allocated for it.
struct World {
    cluster: Cluster,
    driver: DraDriver,
}

impl World {
    fn new() -> Self {
        let cluster = Cluster::new();
        let root_dir = cluster.node.site.root_dir();
        let registry = root_dir.join("plugins_registry");
        fs::create_dir_all(&registry).unwrap();
        let guard = cluster.node.runtime.enter();
        let driver = DraDriver::start(root_dir.join("gpu.sock")).unwrap();
        let versions = ["v1.DRAPlugin", "v1beta1.DRAPlugin"];
        let socket = registry.join("gpu-reg.sock");
        driver.register_by(&socket, DRIVER, &versions).unwrap();
        drop(guard);
        let world = Self { cluster, driver };
        world.cluster.create(
            "web",
            json!({
                "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "t"}],
                "containers": [
                    {"name": "main", "image": IMAGE, "resources": {"claims": [{"name": "gpu"}]}},
                ],
            }),
        );
        world
    }

    fn allocate(&self) {
        let pod = self.cluster.api.get_json("pods", "default", "web").unwrap();
        let uid = pod["metadata"]["uid"].clone();
        self.cluster.api.create_json(json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"name": "c", "namespace": "default", "ownerReferences": [
                {"apiVersion": "v1", "kind": "Pod", "name": "web", "uid": uid, "controller": true},
            ]},
            "spec": {},
            "status": {
                "allocation": {"devices": {"results": [
                    {"request": "gpu", "driver": DRIVER, "pool": "pool", "device": "d"},
                ]}},
                "reservedFor": [{"resource": "pods", "name": "web", "uid": uid}],
            },
        }));
        let api = &self.cluster.api;
        api.modify::<Pod>("default", "web", |pod| {
            let made = PodResourceClaimStatus {
                name: "gpu".to_owned(),
                resource_claim_name: Some("c".to_owned()),
            };
            let status = pod.status.get_or_insert_default();
            status.resource_claim_statuses = Some(vec![made]);
        });
    }

    fn start_with_death_at(&self, point: &str) -> Agent {
        let flags: [&str; 2] = ["--kubeconfig", &self.cluster.kubeconfig];
        let site = &self.cluster.node.site;
        site.spawn_with(&flags, &[("HOLDFAST_DIE_AT", point)])
    }

    fn running(&self) -> String {
        self.cluster.node.wait_running(1).remove(0)
    }

    fn cdi(&self, id: &str) -> Vec<String> {
        let config = self.cluster.node.fake.config(id).unwrap();
        config.cdi_devices.into_iter().map(|d| d.name).collect()
    }

    fn delete(&self) {
        assert!(self.cluster.api.delete::<Pod>("default", "web", Some(1)));
    }

    fn wait_gone(&self) {
        let api = &self.cluster.api;
        eventually("the pod is gone", || {
            let pod = api.get_json("pods", "default", "web");
            pod.is_none().then_some(()).ok_or("it is there".to_owned())
        });
        assert!(self.driver.prepared().is_empty());
        let dump = self.cluster.node.site.dump(&["claims"]);
        assert_eq!(dump["tables"]["claims"], json!([]));
    }
}

fn wait_dead(mut agent: Agent, point: &str) {
    let status = agent.wait_exit(PATIENCE);
    assert_eq!(status.signal(), Some(9), "{point}: {}", agent.log());
}

#[test]
fn a_pod_waits_for_its_claim_and_keeps_it_over_a_restart_that_asks_nobody() {
    let world = World::new();
    let node = &world.cluster.node;
    let agent = world.cluster.start();
    eventually("the pod waits", || {
        let dump = node.site.try_dump(&["events"])?;
        let rows = dump["tables"]["events"].as_array().ok_or("no table")?;
        let mut waits = rows.iter();
        let waits = waits.any(|row| row["reason"] == "FailedPrepareDynamicResources");
        waits.then_some(()).ok_or_else(|| "no event".to_owned())
    });
    assert_eq!(node.running(), Vec::<String>::new());
    world.allocate();
    let id = world.running();
    assert_eq!(world.cdi(&id), ["example.com/gpu=c-1"]);
    assert_eq!(world.driver.calls(), ["Prepare c"]);
    let dump = node.site.dump(&["claims"]);
    let row = &dump["tables"]["claims"][0];
    assert_eq!(row["state"], "Prepared");
    assert_eq!(row["devices"], json!(["pool/c-1"]));
    node.site.recorded();
    agent.kill9();

    // A container that starts again without the API server has the same devices.
    world.cluster.api.set_down(Some("connection refused"));
    let agent = world.cluster.start();
    node.assert_quiet(&agent);
    assert_eq!(node.running(), std::slice::from_ref(&id));
    node.fake.exit(&id, 1);
    let again = world.running();
    assert_ne!(again, id);
    assert_eq!(world.cdi(&again), ["example.com/gpu=c-1"]);
    assert!(world.driver.calls().is_empty());
    world.cluster.api.set_down(None);
    world.delete();
    world.wait_gone();
    assert_eq!(world.driver.calls(), ["Unprepare c"]);
}

#[test]
fn claims_are_as_recorded_wherever_the_agent_is_killed() {
    for point in ["dra::prepare::recorded", "dra::prepare::answered"] {
        let world = World::new();
        world.allocate();
        wait_dead(world.start_with_death_at(point), point);
        let _agent = world.cluster.start();
        let id = world.running();
        assert_eq!(world.driver.prepared().len(), 1, "{point}");
        assert_eq!(world.cdi(&id).len(), 1, "{point}");
        world.delete();
        world.wait_gone();
    }
    for point in ["dra::unprepare::recorded", "dra::unprepare::answered"] {
        let world = World::new();
        world.allocate();
        let agent = world.cluster.start();
        world.running();
        world.cluster.node.site.recorded();
        agent.kill9();
        let agent = world.start_with_death_at(point);
        world.delete();
        wait_dead(agent, point);
        let _agent = world.cluster.start();
        world.wait_gone();
    }
}
