//! Claims are prepared exactly as recorded, wherever the agent and the driver are killed: the agent at each step of preparing and
//! of unpreparing, the driver before it does what it is called for, after that and before its answer, or with the agent.
//!
//! **Property:** records, driver and runtime agree; nothing stays prepared that no pod uses.

use std::path::PathBuf;

use holdfast_testkit::dra_driver::{DraAnswer, DriverProcess};
use holdfast_testkit::exploration::stride;
use k8s_openapi::api::core::v1::{Pod, PodResourceClaimStatus};
use serde_json::json;

use super::rows::Cluster;
use super::*;

const DRIVER: &str = "gpu.example.com";
const CYCLES: usize = 100;
/// Tests that share the cycles.
const PARTS: usize = 4;
/// Time in which an agent comes to a step, if it comes there at all.
const STEP: Duration = Duration::from_secs(8);

/// Steps of the agent, where it dies; and whether the pod ends there.
const STEPS: [(&str, bool); 4] = [
    ("dra::prepare::recorded", false),
    ("dra::prepare::answered", false),
    ("dra::unprepare::recorded", true),
    ("dra::unprepare::answered", true),
];

/// How the driver ends.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    /// It does not.
    Lives,
    /// With the agent.
    WithAgent,
    /// At a call.
    At(&'static str, DraAnswer),
}

const ENDS: [End; 6] = [
    End::Lives,
    End::WithAgent,
    End::At("Prepare", DraAnswer::Die),
    End::At("Prepare", DraAnswer::DoAndDie),
    End::At("Unprepare", DraAnswer::Die),
    End::At("Unprepare", DraAnswer::DoAndDie),
];

struct World {
    cluster: Cluster,
    memory: PathBuf,
    driver: Option<DriverProcess>,
}

impl World {
    fn new() -> Self {
        let cluster = Cluster::new();
        let memory = cluster.node.site.dir().join("driver-memory");
        Self {
            cluster,
            memory,
            driver: None,
        }
    }

    /// Starts a driver if none runs.
    fn driver(&mut self) -> &mut DriverProcess {
        if let Some(driver) = &mut self.driver
            && !driver.runs().unwrap()
        {
            self.driver = None;
        }
        self.driver.get_or_insert_with(|| {
            let root_dir = self.cluster.node.site.root_dir();
            DriverProcess::start(&root_dir, DRIVER, &self.memory).unwrap()
        })
    }

    fn create(&self, pod: &str, claim: &str) {
        self.cluster.create(
            pod,
            json!({
                "terminationGracePeriodSeconds": 1,
                "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "t"}],
                "containers": [
                    {"name": "main", "image": IMAGE, "resources": {"claims": [{"name": "gpu"}]}},
                ],
            }),
        );
        let api = &self.cluster.api;
        let uid = api.get_json("pods", "default", pod).unwrap()["metadata"]["uid"].clone();
        api.create_json(json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"name": claim, "namespace": "default", "ownerReferences": [
                {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid, "controller": true},
            ]},
            "spec": {},
            "status": {
                "allocation": {"devices": {"results": [
                    {"request": "gpu", "driver": DRIVER, "pool": "pool", "device": "d"},
                ]}},
                "reservedFor": [{"resource": "pods", "name": pod, "uid": uid}],
            },
        }));
        api.modify::<Pod>("default", pod, |pod| {
            let made = PodResourceClaimStatus {
                name: "gpu".to_owned(),
                resource_claim_name: Some(claim.to_owned()),
            };
            let status = pod.status.get_or_insert_default();
            status.resource_claim_statuses = Some(vec![made]);
        });
    }

    /// Names of the claims that the driver has prepared.
    fn prepared(&self) -> Vec<String> {
        let files = fs::read_dir(&self.memory).unwrap();
        let names = files.map(|file| fs::read_to_string(file.unwrap().path()).unwrap_or_default());
        names.collect()
    }

    /// Waits until the container runs with the devices that are recorded, and the driver has prepared this claim alone.
    fn wait_running(&mut self, claim: &str) {
        eventually("records, driver and runtime agree on the claim", || {
            // It may have died meanwhile.
            self.driver();
            let node = &self.cluster.node;
            let running = node.running();
            let [id] = &running[..] else {
                return Err(format!("{running:?} run"));
            };
            let dump = node.site.try_dump(&["claims"])?;
            let rows = dump["tables"]["claims"].as_array().ok_or("no table")?;
            let config = node.fake.config(id).unwrap();
            let given: Vec<String> = config.cdi_devices.into_iter().map(|d| d.name).collect();
            let of_row = |row: &Value| {
                let device = row["devices"][0].as_str()?.strip_prefix("pool/")?;
                Some(vec![format!("example.com/gpu={device}")])
            };
            let agrees = rows.len() == 1
                && rows[0]["state"] == "Prepared"
                && rows[0]["claim"] == claim
                && of_row(&rows[0]) == Some(given.clone())
                && self.prepared() == [claim];
            agrees.then_some(()).ok_or_else(|| {
                format!(
                    "on record {rows:?}, in the runtime {given:?}, prepared {:?}",
                    self.prepared()
                )
            })
        });
    }

    fn wait_gone(&mut self, pod: &str) {
        eventually("nothing is left of the pod", || {
            self.driver();
            let shown = self.cluster.api.get_json("pods", "default", pod);
            let dump = self.cluster.node.site.try_dump(&["claims"])?;
            let rows = &dump["tables"]["claims"];
            let is_gone = shown.is_none() && *rows == json!([]) && self.prepared().is_empty();
            is_gone.then_some(()).ok_or_else(|| {
                format!(
                    "on record {rows}, prepared {:?}, {shown:?}",
                    self.prepared()
                )
            })
        });
        assert_eq!(self.cluster.node.running(), [""; 0]);
    }
}

/// A pod with a claim comes and goes; the agent dies at a step of that. Returns whether it came to the step.
fn cycle(world: &mut World, number: usize) -> bool {
    let (step, is_end) = STEPS[number % STEPS.len()];
    let turn = number / STEPS.len();
    // Also where only some cycles are tried, each end comes.
    let end = ENDS[(turn + turn / ENDS.len()) % ENDS.len()].clone();
    let (pod, claim) = (format!("web{number}"), format!("c{number}"));
    let driver = world.driver();
    if let End::At(call, answer) = &end {
        driver.answers_to(call, answer).unwrap();
    }
    let flags = ["--kubeconfig", &world.cluster.kubeconfig];
    let site = &world.cluster.node.site;
    let mut agent = site.spawn_with(&flags, &[("HOLDFAST_DIE_AT", step)]);
    agent.wait_ready();
    world.create(&pod, &claim);
    let delete = |world: &World| {
        let deleted = world.cluster.api.delete::<Pod>("default", &pod, Some(1));
        assert!(deleted, "{pod} is there");
    };
    if is_end {
        world.wait_running(&claim);
        world.cluster.node.site.recorded();
        delete(world);
    }
    let due = Instant::now() + STEP;
    while agent.exited().is_none() && Instant::now() < due {
        std::thread::sleep(Duration::from_millis(10));
        // Where it died at its call, the agent calls the next one.
        world.driver();
    }
    let came = agent.exited();
    match came {
        Some(status) => assert_eq!(status.signal(), Some(9), "{step} {end:?}: {}", agent.log()),
        None => agent.kill9(),
    }
    if end == End::WithAgent
        && let Some(mut driver) = world.driver.take()
    {
        driver.kill9();
    }
    world.driver();
    let agent = world.cluster.start();
    if !is_end {
        world.wait_running(&claim);
        delete(world);
    }
    world.wait_gone(&pod);
    agent.kill9();
    // A call that was never made leaves its fault to the next cycle.
    if let End::At(call, _) = end {
        let answered = world.driver().answers_to(call, &DraAnswer::Do);
        answered.unwrap();
    }
    came.is_some()
}

fn part(part: usize) {
    let mut world = World::new();
    let (mut came, mut count) = (0, 0);
    // Each part has every step: a driver that dies before it answers keeps the agent from some of them.
    let of_part = part * CYCLES / PARTS..(part + 1) * CYCLES / PARTS;
    for number in of_part.step_by(stride()) {
        came += usize::from(cycle(&mut world, number));
        count += 1;
    }
    println!("{count} cycles, {came} agents died at their step");
    assert!(stride() > 1 || came * 10 >= count * 8, "{came} of {count}");
}

#[test]
fn claims_are_as_recorded_wherever_agent_and_driver_are_killed_1() {
    part(0);
}

#[test]
fn claims_are_as_recorded_wherever_agent_and_driver_are_killed_2() {
    part(1);
}

#[test]
fn claims_are_as_recorded_wherever_agent_and_driver_are_killed_3() {
    part(2);
}

#[test]
fn claims_are_as_recorded_wherever_agent_and_driver_are_killed_4() {
    part(3);
}
