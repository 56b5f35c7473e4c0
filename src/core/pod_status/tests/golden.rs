//! The whole status of one pod with containers of all kinds, as JSON, at each step of its life.

use super::super::*;
use super::support::*;

#[test]
fn the_life_of_a_pod() {
    let pod = pod_of(serde_json::json!({
        "restartPolicy": "OnFailure",
        "initContainers": [
            {"name": "setup", "image": "img:1"},
            {"name": "proxy", "image": "img:1", "restartPolicy": "Always",
             "startupProbe": {"exec": {"command": ["true"]}}},
        ],
        "containers": [{
            "name": "web", "image": "img:1",
            "resources": {"requests": {"cpu": "100m"}},
            "readinessProbe": {"exec": {"command": ["true"]}},
            "volumeMounts": [{"name": "conf", "mountPath": "/etc/web", "readOnly": true}],
        }],
        "ephemeralContainers": [{"name": "debug", "image": "img:1"}],
    }));
    let mut setup = Setup::of(pod, wiped());
    setup.pod.metadata.generation = Some(3);
    let mut life = String::new();
    let mut step = |setup: &mut Setup, now: i64, what: &str| {
        setup.now = now;
        let status = setup.generate();
        let merged = merge_for_update(&setup.pod, setup.previous.as_ref(), status).unwrap();
        let told = match &merged {
            Some(status) => serde_json::to_string_pretty(status).unwrap(),
            None => "the same".to_owned(),
        };
        life.push_str(&format!("# {now} s: {what}\n{told}\n\n"));
        setup.previous = merged.or(setup.previous.take());
    };
    step(&mut setup, 70, "accepted");
    setup.status = runtime(vec![running("setup", 0)]);
    step(&mut setup, 71, "setup runs");
    setup.status = runtime(vec![exited("setup", 0, 0), running("proxy", 0)]);
    step(&mut setup, 72, "the proxy runs and has not started");
    let started = ProbeView {
        ready: None,
        started: Some(true),
    };
    setup.probes.insert("proxy".into(), started);
    let all = |extra: Vec<ContainerStatus>| {
        let mut all = vec![exited("setup", 0, 0), running("proxy", 0)];
        all.extend(extra);
        runtime(all)
    };
    setup.status = all(vec![running("web", 0)]);
    step(&mut setup, 73, "web runs and is not ready");
    let ready = ProbeView {
        ready: Some(true),
        started: None,
    };
    setup.probes.insert("web".into(), ready);
    step(&mut setup, 74, "web is ready");
    step(&mut setup, 75, "nothing changes");
    setup.status = all(vec![running("web", 0), running("debug", 0)]);
    step(&mut setup, 76, "somebody looks into it");
    setup.status = all(vec![exited("web", 0, 3), exited("debug", 0, 0)]);
    setup.owned = [("web", with_backoff(ended("web", 0, 3), 300))].into();
    step(&mut setup, 77, "web failed");
    setup.owned = [("web", started_as(1)), ("debug", ended("debug", 0, 0))].into();
    setup.status = all(vec![running("web", 1), exited("web", 0, 3)]);
    step(&mut setup, 400, "web runs again");
    setup.status = runtime(vec![
        exited("setup", 0, 0),
        exited("proxy", 0, 143),
        exited("web", 1, 0),
        exited("web", 0, 3),
    ]);
    setup.stage = Stage::Terminated;
    step(&mut setup, 500, "all is done");
    insta::assert_snapshot!(life);
}

fn started_as(attempt: u32) -> crate::core::state::ContainerRecord {
    started("web", attempt)
}
