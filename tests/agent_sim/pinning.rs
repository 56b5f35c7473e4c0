//! CPUs that containers have for themselves: who gets which, and what restarts and another machine make of it.

use std::collections::BTreeMap;

use holdfast::core::pinning::machine::{Cpu, Machine, NumaNode};
use holdfast::core::state::{CpusRecord, CpusetRecord, child_key};
use holdfast::kubeletconfig::CpuManagerPolicy;
use holdfast_testkit::fake_cri::{Behaviour, Fault};
use serde_json::json;

use crate::restart::assert_nothing_wrong;
use crate::world::{IMAGE, World, spec};

/// One socket and node with these CPUs.
fn machine(cpus: &[u32]) -> Machine {
    let cpu = |number: u32| Cpu {
        socket: 0,
        node: 0,
        cache: 0,
        core: number,
    };
    Machine {
        cpus: cpus.iter().map(|number| (*number, cpu(*number))).collect(),
        nodes: BTreeMap::from([(0, NumaNode::default())]),
    }
}

fn guaranteed(cpu: &str) -> String {
    let amounts = json!({"cpu": cpu, "memory": "32Mi"});
    json!({
        "restartPolicy": "Always",
        "containers": [{"name": "main", "image": IMAGE, "command": ["sh"],
            "resources": {"requests": amounts, "limits": amounts}}],
    })
    .to_string()
}

/// A node of two CPUs, the first of which is reserved. The other one is all that the node has to give, where the tests run, too.
fn with_static_policy() -> World {
    let mut w = World::with_api();
    w.machine = Some(machine(&[0, 1]));
    w.config.kubelet.cpu_manager_policy = CpuManagerPolicy::Static;
    let reserved = [("cpu".to_owned(), 1_000_000_000)];
    w.config.kubelet.kube_reserved = reserved.into();
    w.behave(|_, _| Behaviour::RunForever);
    w
}

/// The CPUs and the quota that the running container was created with.
fn created(w: &World, pod: &str) -> (String, i64) {
    let running = w.fake.running(pod, "main");
    let config = w.fake.config(&running[0].id).unwrap();
    let resources = config.linux.unwrap().resources.unwrap();
    (resources.cpuset_cpus, resources.cpu_quota)
}

/// What running containers were told since: `<pod> <cpus>`.
fn told(w: &World, pods: &[&str]) -> Vec<String> {
    let calls = w.fake.calls().into_iter();
    let updates = calls.filter(|call| call.operation == "update_container");
    let told = updates.filter_map(|call| {
        let (id, cpus) = call.object.split_once(" cpus=")?;
        let is_of = |pod: &&&str| w.running(pod).iter().any(|running| running == id);
        let pod = pods.iter().find(is_of)?;
        Some(format!("{pod} {cpus}"))
    });
    told.collect()
}

fn recorded(w: &World, pod: &str) -> Option<String> {
    let state = w.state();
    let record = state.record::<CpusRecord>(w.uid(pod).as_str())?;
    Some(record.containers["main"].to_string())
}

/// The CPUs that the record of the container says it may use.
fn may_use(w: &World, pod: &str) -> Option<String> {
    let state = w.state();
    let record = state.record::<CpusetRecord>(&child_key(&w.uid(pod), "main"))?;
    Some(record.cpus.to_string())
}

async fn runs(w: &World, pod: &str) {
    w.until("it runs", 60, |w| w.running(pod).len() == 1).await;
}

// Invariant POD-10 and POD-11.
#[tokio::test(start_paused = true)]
async fn exclusive_cpus_are_left_by_others_kept_by_restarts_and_freed_with_the_pod() {
    let mut w = with_static_policy();
    w.start().await;
    w.joined().await;
    w.create("shared", &spec("Always", ""));
    runs(&w, "shared").await;
    assert_eq!(created(&w, "shared").0, "0-1");
    w.create("own", &guaranteed("1"));
    runs(&w, "own").await;
    assert_eq!(created(&w, "own"), ("1".to_owned(), -1));
    assert_eq!(told(&w, &["shared"]), ["shared 0"]);
    let calls = w.fake.calls();
    let last = |operation: &str| calls.iter().rposition(|call| call.operation == operation);
    assert!(
        last("update_container") < last("start_container"),
        "before it started"
    );
    w.create("more", &guaranteed("1"));
    w.until("it is refused", 30, |w| w.shown_phase("more") == "Failed")
        .await;
    let status = w.shown("more")["status"].clone();
    assert_eq!(status["reason"], "UnexpectedAdmissionError", "{status}");

    w.fake.clear_calls();
    for _ in 0..3 {
        w.crash().await;
        w.start().await;
        w.pass(30).await;
        assert_eq!(recorded(&w, "own").as_deref(), Some("1"));
    }
    let mut again = told(&w, &["shared", "own"]);
    again.sort();
    let each = |what: &'static str| [what; 3];
    let once_a_start = [each("own 1"), each("shared 0")].concat();
    assert_eq!(again, once_a_start, "the same, once a start");
    w.fake.clear_calls();

    w.delete("own", Some(1));
    w.until("its CPU is shared again", 120, |w| {
        told(w, &["shared"]) == ["shared 0-1"]
    })
    .await;
    assert_nothing_wrong(&w);
}

/// R29: the machine comes back with other CPUs.
#[tokio::test(start_paused = true)]
async fn the_agent_starts_and_containers_run_on_when_the_machine_has_other_cpus() {
    let mut w = with_static_policy();
    w.start().await;
    w.joined().await;
    w.create("own", &guaranteed("1"));
    runs(&w, "own").await;
    for (cpus, has, cpu) in [
        (vec![0, 2], Some("2"), "own 2"),
        (vec![0], None, "own 0"),
        (vec![0, 1, 2], Some("1"), "own 1"),
    ] {
        w.crash().await;
        w.machine = Some(machine(&cpus));
        w.fake.clear_calls();
        w.start().await;
        w.pass(30).await;
        assert_eq!(recorded(&w, "own").as_deref(), has, "{cpus:?}");
        assert_eq!(told(&w, &["own"]), [cpu], "{cpus:?}");
        assert_eq!((w.running("own").len(), w.starts("own").len()), (1, 1));
    }
    assert_nothing_wrong(&w);
}

// Invariant POD-11.
#[tokio::test(start_paused = true)]
async fn a_runtime_that_does_not_answer_holds_no_start_up_and_its_containers_stay_on_record() {
    for fault in [Fault::Hang, Fault::HangAfterEffect, Fault::LoseReply] {
        let mut w = with_static_policy();
        w.start().await;
        w.joined().await;
        w.create("shared", &spec("Always", ""));
        runs(&w, "shared").await;
        w.fail_always("update_container", fault);
        w.create("own", &guaranteed("1"));
        w.until("it runs", 30, |w| w.running("own").len() == 1)
            .await;
        let known = may_use(&w, "shared");
        assert_eq!(known.as_deref(), Some("0-1"), "nobody knows");
        w.crash().await;
        w.clear_faults();
        w.start().await;
        w.until("it has left the CPU", 60, |w| {
            may_use(w, "shared").as_deref() == Some("0")
        })
        .await;
    }
}
