//! SIGKILL at the boundaries of a pod's life: with init containers, a sidecar, probes and hooks, it comes to the
//! same end as one that nobody disturbed, and every container has run as often.
//!
//! Each pod waits at one boundary for as long as a file is there, so that one SIGKILL finds a pod at each of them.
//! Containers write down when they begin and end, which counts their runs from the outside.

use std::fs;
use std::time::{Duration, Instant};

use holdfast_testkit::containerd::{BUSYBOX, Version};
use serde_json::{Value, json};

use crate::agent_process::{Agent, eventually, within};
use crate::world::World;

/// What a whole life leaves in its mark file, in order.
pub const LIFE: [&str; 11] = [
    "one-begin",
    "one-end",
    "side-begin",
    "two-begin",
    "two-end",
    "three-begin",
    "three-end",
    "main-begin",
    "main-end",
    "side-term",
    "side-end",
];
/// What a pod leaves that is deleted while it runs.
const DELETED: [&str; 12] = [
    "one-begin",
    "one-end",
    "side-begin",
    "two-begin",
    "two-end",
    "three-begin",
    "three-end",
    "main-begin",
    "main-term",
    "main-end",
    "side-term",
    "side-end",
];

/// A place in a life to wait at.
#[derive(Clone, Copy, Debug)]
struct Boundary {
    name: &'static str,
    /// What waits there: the script named so, while its file is there.
    hold: &'static str,
    /// The last mark before it.
    mark: &'static str,
    /// Whether the pod is deleted, instead of coming to its end by itself.
    deleted: bool,
}

const fn at(name: &'static str, hold: &'static str, mark: &'static str) -> Boundary {
    Boundary {
        name,
        hold,
        mark,
        deleted: false,
    }
}

const fn deleted_at(name: &'static str, hold: &'static str, mark: &'static str) -> Boundary {
    Boundary {
        name,
        hold,
        mark,
        deleted: true,
    }
}

const BOUNDARIES: [Boundary; 14] = [
    at("first-init-runs", "one", "one-begin"),
    at("sidecar-starts", "side-up", "side-begin"),
    at("second-init-runs", "two", "two-begin"),
    at("third-init-runs", "three", "three-begin"),
    at("post-start-runs", "post-start", "main-begin"),
    at("not-ready", "ready", "main-begin"),
    at("ready", "main", "main-begin"),
    at("pre-stop-of-sidecar", "side-pre-stop", "main-end"),
    at("sidecar-ends", "side-term", "side-term"),
    at("finished", "nothing", "side-end"),
    deleted_at("deleted-pre-stop", "main-pre-stop", "main-begin"),
    deleted_at("deleted-main-ends", "main-term", "main-term"),
    deleted_at("deleted-sidecar-hook", "side-pre-stop", "main-end"),
    deleted_at("deleted-sidecar-ends", "side-term", "side-term"),
];

/// Shell: writes a mark.
fn mark(pod: &str, what: &str) -> String {
    format!("echo {what} >> /starts/{pod}")
}

/// Shell: waits while somebody holds it here.
fn hold(pod: &str, what: &str) -> String {
    format!("while [ -e /starts/{pod}.hold-{what} ]; do sleep 0.2; done")
}

/// Shell: a hook that writes down its begin and end in a file of hooks.
fn hook(pod: &str, what: &str) -> Value {
    let begin = mark(&format!("{pod}.hooks"), &format!("{what}-begin"));
    let end = mark(&format!("{pod}.hooks"), &format!("{what}-end"));
    let script = format!("{begin}; {}; {end}", hold(pod, what));
    json!({"exec": {"command": ["sh", "-c", script]}})
}

/// Three init containers with a sidecar among them, hooks, probes. It comes to an end by itself unless `deleted`.
pub fn life(world: &World, pod: &str, deleted: bool) -> Value {
    let container = |name: &str, script: String| {
        json!({
            "name": name,
            "image": BUSYBOX,
            "command": ["sh", "-c", script],
            "volumeMounts": [{"name": "starts", "mountPath": "/starts"}],
        })
    };
    let init = |name: &str| {
        let (begin, end) = (
            mark(pod, &format!("{name}-begin")),
            mark(pod, &format!("{name}-end")),
        );
        container(name, format!("{begin}\n{}\n{end}", hold(pod, name)))
    };
    let term = |name: &str| {
        let begin = mark(pod, &format!("{name}-term"));
        let end = mark(pod, &format!("{name}-end"));
        format!(
            "asked() {{ {begin}; {}; {end}; exit 0; }}\ntrap asked TERM",
            hold(pod, &format!("{name}-term"))
        )
    };
    let forever = "while :; do sleep 100000 & wait $!; done";

    let mut side = container(
        "side",
        format!(
            "{}\n{}\n{}\ntouch /tmp/up\n{forever}",
            term("side"),
            mark(pod, "side-begin"),
            hold(pod, "side-up")
        ),
    );
    side["restartPolicy"] = json!("Always");
    side["startupProbe"] = json!({
        "exec": {"command": ["test", "-e", "/tmp/up"]}, "periodSeconds": 1, "failureThreshold": 300,
        "timeoutSeconds": 10,
    });
    side["lifecycle"] = json!({"preStop": hook(pod, "side-pre-stop")});

    let end = if deleted {
        forever.to_owned()
    } else {
        // It ends only after its hook and its readiness probe have had their turn.
        let ready = format!("while [ ! -e /starts/{pod}.ready ]; do sleep 0.2; done");
        let (hold, end) = (hold(pod, "main"), mark(pod, "main-end"));
        format!("{ready}\n{hold}\n{end}\nexit 0")
    };
    let mut main = container(
        "main",
        format!("{}\n{}\n{end}", term("main"), mark(pod, "main-begin")),
    );
    let mut post_start = hook(pod, "post-start");
    let script = post_start["exec"]["command"][2].as_str().expect("a script");
    let script = format!("{script}; touch /starts/{pod}.hooked");
    post_start["exec"]["command"][2] = json!(script);
    main["lifecycle"] = json!({"postStart": post_start, "preStop": hook(pod, "main-pre-stop")});
    let ready = format!(
        "test ! -e /starts/{pod}.hold-ready && test -e /starts/{pod}.hooked && touch /starts/{pod}.ready"
    );
    main["readinessProbe"] = json!({
        "exec": {"command": ["sh", "-c", ready]}, "periodSeconds": 2, "timeoutSeconds": 10,
    });
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod},
        "spec": {
            "restartPolicy": if deleted { "Always" } else { "Never" },
            "terminationGracePeriodSeconds": 120,
            "hostNetwork": true,
            "initContainers": [init("one"), side, init("two"), init("three")],
            "containers": [main],
            "volumes": [{"name": "starts", "hostPath": {"path": world.starts()}}],
        },
    })
}

/// What users see of a pod's end, without times and names that differ from pod to pod.
pub fn outcome(status: &Value) -> Value {
    let containers = |list: &str| -> Vec<Value> {
        let all = status[list].as_array().into_iter().flatten();
        all.map(|c| {
            let state = |which: &str| {
                let (kind, detail) = match c[which].as_object().and_then(|s| s.iter().next()) {
                    Some((kind, detail)) => (kind.as_str(), detail),
                    None => ("none", &Value::Null),
                };
                let part = |field: &str| detail[field].clone();
                json!([
                    kind,
                    part("exitCode"),
                    part("signal"),
                    part("reason"),
                    part("message")
                ])
            };
            json!({
                "name": c["name"],
                "ready": c["ready"],
                "started": c["started"],
                "restartCount": c["restartCount"],
                "state": state("state"),
                "lastState": state("lastState"),
            })
        })
        .collect()
    };
    let conditions = status["conditions"].as_array().into_iter().flatten();
    let conditions: Vec<Value> = conditions
        .map(|c| json!([c["type"], c["status"], c["reason"]]))
        .collect();
    json!({
        "phase": status["phase"],
        "reason": status["reason"],
        "message": status["message"],
        "conditions": conditions,
        "initContainers": containers("initContainerStatuses"),
        "containers": containers("containerStatuses"),
    })
}

fn hold_file(world: &World, pod: &str, what: &str) -> std::path::PathBuf {
    world.starts().join(format!("{pod}.hold-{what}"))
}

/// Waits until a pod stands at its boundary.
fn wait_at(world: &World, pod: &str, boundary: Boundary) {
    eventually(
        &format!("{pod} leaves the mark {}", boundary.mark),
        || match world.lines(pod) {
            marks if marks.iter().any(|m| m == boundary.mark) => Ok(()),
            marks => Err(format!("{marks:?}")),
        },
    );
    let hook = match boundary.hold {
        hook @ ("post-start" | "main-pre-stop" | "side-pre-stop") => Some(hook),
        _ => None,
    };
    if let Some(hook) = hook {
        let file = format!("{pod}.hooks");
        eventually(&format!("{pod} runs {hook}"), || {
            let marks = world.lines(&file);
            let begun = marks.iter().any(|m| *m == format!("{hook}-begin"));
            begun.then_some(()).ok_or_else(|| format!("{marks:?}"))
        });
    }
    let ready = |wanted: bool| {
        eventually(&format!("{pod} ready: {wanted}"), || {
            let status = world.container_status(pod, "main")?;
            let is = status["ready"] == wanted && status["state"]["running"].is_object();
            is.then_some(()).ok_or_else(|| status.to_string())
        })
    };
    match boundary.hold {
        "ready" => ready(false),
        "main" => ready(true),
        "nothing" => drop(world.wait_phase(pod, "Succeeded")),
        _ => {}
    }
}

/// Waits for the end of a pod's life and compares it with the undisturbed one.
fn compare(world: &World, pod: &str, boundary: Boundary, reference: &Value) {
    let wanted: &[&str] = if boundary.deleted { &DELETED } else { &LIFE };
    eventually(&format!("{pod} comes to its end"), || {
        let marks = world.lines(pod);
        if marks.len() >= wanted.len() {
            Ok(())
        } else {
            Err(format!("{marks:?}\n{:?}", world.journal(pod)))
        }
    });
    if boundary.deleted {
        eventually(&format!("{pod} is gone"), || {
            let left: Vec<_> = world
                .running()
                .into_iter()
                .filter(|c| c.pod == pod)
                .collect();
            match world.row("pods", pod) {
                Err(_) if left.is_empty() => Ok(()),
                row => Err(format!("{row:?} {left:?}")),
            }
        });
    } else {
        eventually(&format!("{pod} ends as the undisturbed one"), || {
            let outcome = outcome(&world.status(pod)?);
            if outcome == *reference {
                Ok(())
            } else {
                Err(format!("{outcome:#}\ninstead of {reference:#}"))
            }
        });
    }
    let journal = world.journal(pod);
    assert_eq!(world.lines(pod), wanted, "{pod}: {journal:?}");
    let hooks = world.lines(&format!("{pod}.hooks"));
    let count = |mark: String| hooks.iter().filter(|h| **h == mark).count();
    for hook in ["post-start", "main-pre-stop", "side-pre-stop"] {
        let ends = usize::from(hook != "main-pre-stop" || boundary.deleted);
        assert_eq!(
            count(format!("{hook}-end")),
            ends,
            "{pod} completed {hook}: {hooks:?}"
        );
        // Only a hook that was cut off begins again.
        let cut_off = usize::from(boundary.hold == hook);
        let begins = count(format!("{hook}-begin"));
        assert!(
            (ends..=ends + cut_off).contains(&begins),
            "{pod} began {hook}: {hooks:?}"
        );
    }
}

#[test]
fn restart_keeps_the_life_of_a_pod_at_every_phase_boundary() {
    let world = World::new(Version::Installed);
    let began = Instant::now();
    // The one that nobody disturbs.
    world.add(&life(&world, "undisturbed", false));
    let agent = world.start();
    let reference = outcome(&world.wait_phase("undisturbed", "Succeeded"));
    let counts = reference["initContainers"].as_array().expect("statuses");
    assert_eq!(counts.len(), 4, "{reference:#}");
    let nothing = at("undisturbed", "nothing", "side-end");
    compare(&world, "undisturbed", nothing, &reference);

    // At each boundary one that goes on when the agent is back, and one that goes on while it is away.
    let mut pods = Vec::new();
    for boundary in BOUNDARIES {
        pods.push((boundary.name.to_owned(), boundary, false));
        // A hook ends with the agent that runs it, and what is finished goes nowhere.
        if !boundary.hold.ends_with("-start")
            && !boundary.hold.ends_with("-stop")
            && boundary.hold != "nothing"
        {
            pods.push((format!("{}-unseen", boundary.name), boundary, true));
        }
    }
    for (pod, boundary, _) in &pods {
        fs::write(hold_file(&world, pod, boundary.hold), "").expect("hold it");
        world.add(&life(&world, pod, boundary.deleted));
    }
    for (pod, _, _) in pods.iter().filter(|(_, b, _)| b.deleted) {
        wait_deletable(&world, pod);
        world.delete(pod);
    }
    for (pod, boundary, _) in &pods {
        wait_at(&world, pod, *boundary);
    }
    // One more that the agent hardly knows.
    world.add(&life(&world, "new", false));
    let held = began.elapsed();
    kill_and_go_on(&world, agent, &pods);
    let _agent = world.start();
    for (pod, boundary, _) in &pods {
        drop(fs::remove_file(hold_file(&world, pod, boundary.hold)));
    }
    pods.push(("new".to_owned(), at("new", "nothing", "side-end"), false));
    for (pod, boundary, _) in &pods {
        compare(&world, pod, *boundary, &reference);
    }
    compare(&world, "undisturbed", nothing, &reference);
    eventually("no sandbox is left ready", || {
        let mut ready = world.sandboxes();
        ready.retain(|(_, _, ready)| *ready);
        if ready.is_empty() {
            Ok(())
        } else {
            Err(format!("{ready:?}"))
        }
    });
    let lives = pods.len();
    println!(
        "{lives} lives, cut off after {held:?}, all over after {:?}",
        began.elapsed()
    );
}

/// Waits until a pod that is to be deleted runs in full: hooks done, ready.
fn wait_deletable(world: &World, pod: &str) {
    eventually(&format!("{pod} is ready"), || {
        let status = world.container_status(pod, "main")?;
        let ready = status["ready"] == true;
        ready.then_some(()).ok_or_else(|| status.to_string())
    });
}

/// SIGKILL, and some pods go on while nobody looks.
fn kill_and_go_on(world: &World, agent: Agent, pods: &[(String, Boundary, bool)]) {
    agent.kill9();
    let mut unseen = Vec::new();
    for (pod, boundary, _) in pods.iter().filter(|(_, _, unseen)| *unseen) {
        fs::remove_file(hold_file(world, pod, boundary.hold)).expect("let it go on");
        unseen.push((pod, boundary));
    }
    for (pod, boundary) in unseen {
        // What a container does without an agent: the next mark. Without one nothing else happens.
        let next = match boundary.hold {
            "one" | "two" | "three" | "main" => Some(format!("{}-end", boundary.hold)),
            "main-term" => Some("main-end".to_owned()),
            "side-term" => Some("side-end".to_owned()),
            _ => None,
        };
        let Some(next) = next else { continue };
        within(
            Duration::from_secs(30),
            &format!("{pod} leaves {next}"),
            || {
                let marks = world.lines(pod);
                let left = marks.contains(&next);
                left.then_some(()).ok_or_else(|| format!("{marks:?}"))
            },
        );
    }
}
