//! What a restart of the agent keeps of pods of the API server, row by row.

use std::time::Duration;

use holdfast::store::recover::Integrity;
use holdfast_testkit::fake_api::Request;
use holdfast_testkit::fake_cri::{Behaviour, Fault, Pull};
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use serde_json::{Value, json};

use crate::cluster::{NODE, is_point, tells_status};
use crate::node::Disk;
use crate::restart::{assert_nothing_wrong, evict, exits};
use crate::world::{IMAGE, World, spec};

pub async fn cluster(behaviour: impl Fn(&str, u32) -> Behaviour + Send + Sync + 'static) -> World {
    let world = World::with_api();
    world.behave(behaviour);
    world
}

/// The pod runs, and the API server was told so.
fn is_up(w: &World, pod: &str) -> bool {
    w.running(pod).len() == 1 && w.shown_phase(pod) == "Running"
}

fn condition(pod: &Value, name: &str) -> Value {
    let conditions = pod["status"]["conditions"].as_array();
    let found = conditions.and_then(|all| all.iter().find(|c| c["type"] == name));
    found.cloned().unwrap_or(Value::Null)
}

fn container_status(pod: &Value) -> Value {
    pod["status"]["containerStatuses"][0].clone()
}

pub fn no_writes(w: &World, what: impl Fn(&Request) -> bool) {
    let mut requests = w.api().requests();
    requests.retain(what);
    let lines: Vec<_> = requests
        .iter()
        .map(|r| format!("{} {}", r.line(), r.body))
        .collect();
    assert_eq!(lines, Vec::<String>::new());
}

// ------------------------------------------------------------------------------------------------ R1

#[tokio::test(start_paused = true)]
async fn restart_keeps_a_pod_ready_in_the_api() {
    let mut w = cluster(|_, _| Behaviour::RunForever).await;
    w.start().await;
    w.create("web", &spec("Always", ""));
    w.until("it is Ready", 60, |w| {
        condition(&w.shown("web"), "Ready")["status"] == "True"
    })
    .await;
    w.pass(30).await;
    let before = w.shown("web");
    w.api().take_requests();
    w.restart().await;
    w.pass(200).await;
    assert_eq!(w.shown("web"), before);
    no_writes(&w, is_point);
    assert_eq!(w.starts("web").len(), 1);
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_ready_sandbox_is_told_once_while_the_image_is_still_pulled() {
    let image = "holdfast.local/large:1";
    let mut w = cluster(|_, _| Behaviour::RunForever).await;
    w.fake.pull(image, Pull::Hangs);
    w.start().await;
    w.joined().await;
    w.create("web", &spec("Always", "").replace(IMAGE, image));
    let is_told =
        |w: &World| condition(&w.shown("web"), "PodReadyToStartContainers")["status"] == "True";
    w.until("its image is pulled", 30, |w| {
        w.fake.count("pull_image") == 1
    })
    .await;
    w.until("its sandbox is told", 2, is_told).await;
    let shown = w.shown("web");
    assert_eq!(shown["status"]["phase"], "Pending");
    assert!(shown["status"]["podIP"].is_string());
    assert_eq!(condition(&shown, "ContainersReady")["status"], "False");
    let writes = w.api().count(tells_status);
    assert_eq!(writes, 2, "that it is here, and that its sandbox is ready");

    w.api().take_requests();
    w.restart().await;
    w.until("its image is pulled again", 30, |w| {
        w.fake.count("pull_image") == 2
    })
    .await;
    w.pass(30).await;
    assert!(is_told(&w));
    no_writes(&w, tells_status);
    assert_nothing_wrong(&w);
}

// ------------------------------------------------------------------------------------------------ R2

#[tokio::test(start_paused = true)]
async fn restart_keeps_100_pods_of_the_api_without_a_single_call_or_status_patch() {
    let mut w = cluster(|_, _| Behaviour::RunForever).await;
    w.start().await;
    w.joined().await;
    for n in 0..100 {
        w.create(&format!("p{n:03}"), &spec("Always", ""));
    }
    w.until("the API server shows 100 pods Running", 120, |w| {
        let pods = w.api().list_json("pods", "");
        pods.iter().all(|p| p["status"]["phase"] == "Running")
    })
    .await;
    w.pass(100).await;
    for orderly in [false, true] {
        w.fake.clear_calls();
        w.api().take_requests();
        if orderly {
            w.stop().await;
            w.start().await;
        } else {
            w.restart().await;
        }
        w.pass(200).await;
        assert_eq!(w.effects(), Vec::<String>::new(), "orderly: {orderly}");
        no_writes(&w, is_point);
        let lists = w.api().count(|r| r.verb == "list" && r.kind == "pods");
        assert_eq!(lists, 1, "the pods are listed once");
    }
    assert_nothing_wrong(&w);
}

// ----------------------------------------------------------------------------- what a server refuses

/// A server takes an end for final when the restart policy says so. That init containers run again in a new sandbox keeps
/// nothing else of the pod from it.
#[tokio::test(start_paused = true)]
async fn a_pod_whose_init_container_runs_again_is_shown_not_ready_meanwhile() {
    for policy in ["OnFailure", "Never"] {
        let mut w = World::with_api();
        w.behave_each(|_, container, attempt| match (container, attempt) {
            ("init", 0) => Behaviour::Exit {
                code: 0,
                after: Duration::from_secs(1),
            },
            ("init", _) => Behaviour::Exit {
                code: 0,
                after: Duration::from_secs(300),
            },
            _ => Behaviour::RunForever,
        });
        w.start().await;
        let mut spec: Value = serde_json::from_str(&spec(policy, "")).unwrap();
        spec["initContainers"] = json!([{"name": "init", "image": IMAGE, "command": ["sh"]}]);
        // Else a pod of policy Never gets no other sandbox.
        spec["containers"][0]["restartPolicy"] = "Always".into();
        w.create("web", &spec.to_string());
        let ready = |w: &World| condition(&w.shown("web"), "Ready")["status"].clone();
        w.until("it is Ready", 60, |w| ready(w) == "True").await;
        let sandbox = w.fake.sandboxes()[0].id.clone();
        assert!(w.fake.kill_sandbox(&sandbox));
        w.until("its init container runs again", 120, |w| {
            w.starts("web")
                .iter()
                .filter(|s| s.container == "init")
                .count()
                == 2
        })
        .await;
        w.until("it is shown not to be Ready", 30, |w| ready(w) == "False")
            .await;
        let init =
            |w: &World| w.shown("web")["status"]["initContainerStatuses"][0]["state"].clone();
        assert!(init(&w)["terminated"].is_object(), "{policy}: {}", init(&w));
        let first = init(&w)["terminated"]["containerID"].clone();
        w.until("it is Ready again", 400, |w| ready(w) == "True")
            .await;
        assert_ne!(init(&w)["terminated"]["containerID"], first);
        let requests = w.api().requests();
        let refused: Vec<_> = requests.iter().filter(|r| r.status == 422).collect();
        assert!(refused.is_empty(), "{policy}: {refused:?}");
        assert_nothing_wrong(&w);
    }
}

// ------------------------------------------------------------------------------------------------ R3

#[tokio::test(start_paused = true)]
async fn restart_keeps_an_admitted_pod_when_the_label_it_selects_is_removed() {
    let mut w = cluster(|_, _| Behaviour::RunForever).await;
    let absent = "holdfast.local/absent:1";
    w.fake.pull(
        absent,
        Pull::Fails(tonic::Code::NotFound, "no such image".to_owned()),
    );
    w.start().await;
    w.joined().await;
    w.label_node("disk", Some("ssd"));
    w.pass(2).await;
    let selecting = spec("Always", r#","nodeSelector":{"disk":"ssd"}"#);
    w.create("started", &selecting);
    w.create("waiting", &selecting.replace(IMAGE, absent));
    w.until("one runs, one waits for its image", 60, |w| {
        is_up(w, "started") && w.waiting("waiting").contains("Image")
    })
    .await;
    let before = w.running("started");
    w.crash().await;
    w.label_node("disk", None);
    w.fake.pull(absent, Pull::Succeeds);
    w.fake.clear_calls();
    w.start().await;
    w.until("the one that was never started goes", 60, |w| {
        w.shown_phase("waiting") == "Failed"
    })
    .await;
    w.pass(200).await;
    assert_eq!(w.shown("waiting")["status"]["reason"], "NodeAffinity");
    assert_eq!(w.starts("waiting").len(), 0);
    assert_eq!(w.running("started"), before);
    assert_eq!(w.shown_phase("started"), "Running");
    assert_eq!(w.starts("started").len(), 1);
    assert_nothing_wrong(&w);
}

// ------------------------------------------------------------------------------------------------ R4

#[tokio::test(start_paused = true)]
async fn restart_keeps_the_grace_of_a_pod_that_was_deleted_meanwhile() {
    let mut w = cluster(|_, _| Behaviour::IgnoreTerm).await;
    w.start().await;
    let uid = w.create("web", &spec("Always", ""));
    w.until("it runs", 60, |w| is_up(w, "web")).await;
    w.crash().await;
    assert!(w.delete("web", Some(40)));
    w.pass(20).await;
    w.start().await;
    let asked = tokio::time::Instant::now();
    w.until("its container is killed", 60, |w| {
        w.running("web").is_empty()
    })
    .await;
    let took = asked.elapsed().as_secs();
    assert!((38..=43).contains(&took), "killed after {took} s");
    w.until("it is gone from the API server", 20, |w| {
        w.shown("web").is_null()
    })
    .await;
    w.until("nothing is left of it", 120, |w| {
        w.left_of("web", &uid).is_empty()
    })
    .await;
    assert_nothing_wrong(&w);
}

// ------------------------------------------------------------------------------------------------ R6

#[tokio::test(start_paused = true)]
async fn restart_keeps_an_eviction_and_an_exit_code_for_the_api() {
    for api_first in [true, false] {
        let mut w = cluster(|_, _| Behaviour::RunForever).await;
        w.start().await;
        w.create("victim", &spec("Always", ""));
        w.create("job", &spec("Never", ""));
        w.until("both run", 60, |w| is_up(w, "victim") && is_up(w, "job"))
            .await;
        w.set_api(false);
        evict(&w, "victim");
        w.fake.exit(&w.running("job")[0], 3);
        w.until("both ends are on record", 30, |w| {
            w.phase("victim") == "Failed" && w.phase("job") == "Failed"
        })
        .await;
        w.crash().await;
        for container in w.of_pod("victim").iter().chain(&w.of_pod("job")) {
            w.fake.remove(&container.id);
        }
        if api_first {
            w.set_api(true);
        }
        w.start().await;
        w.pass(30).await;
        w.set_api(true);
        w.until("the API server knows", 60, |w| {
            w.shown_phase("victim") == "Failed" && w.shown_phase("job") == "Failed"
        })
        .await;
        w.pass(120).await;
        let (victim, job) = (w.shown("victim"), w.shown("job"));
        assert_eq!(victim["status"]["reason"], "Evicted", "{victim}");
        let terminated = container_status(&job)["state"]["terminated"].clone();
        assert_eq!(terminated["exitCode"], 3, "{job}");
        assert_eq!(w.starts("job").len(), 1);
        assert_eq!(w.starts("victim").len(), 1);
        assert_nothing_wrong(&w);
    }
}

// ----------------------------------------------------------------------------------------------- R13

const FULL: &str = r#"{
    "nodeSelector": {"disk": "ssd"},
    "volumes": [
        {"name": "config", "configMap": {"name": "settings"}},
        {"name": "secret", "secret": {"secretName": "password"}},
        {"name": "token", "projected": {"sources": [
            {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}}]}}
    ],
    "containers": [{
        "name": "main", "image": "holdfast.local/busybox:1", "command": ["sh"],
        "env": [{"name": "LEVEL", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "level"}}}],
        "volumeMounts": [
            {"name": "config", "mountPath": "/config"},
            {"name": "secret", "mountPath": "/secret"},
            {"name": "token", "mountPath": "/token"}]
    }]
}"#;

fn create_objects(w: &World) {
    let api = w.api();
    api.create_json(json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": "settings", "namespace": "default"}, "data": {"level": "7"},
    }));
    api.create_json(json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": {"name": "password", "namespace": "default"}, "data": {"word": "b3Blbg=="},
    }));
    api.create_json(json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "shop", "namespace": "default"},
        "spec": {"clusterIP": "10.0.0.9", "ports": [{"port": 80}]},
    }));
}

fn file_of(w: &World, uid: &str, kind: &str, path: &str) -> String {
    let volumes = w.dir.path().join("root/pods").join(uid).join("volumes");
    let file = volumes.join(format!("kubernetes.io~{kind}")).join(path);
    std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

fn env_of(w: &World, pod: &str, name: &str) -> String {
    let config = w.fake.config(&w.running(pod)[0]).unwrap();
    let mut envs = config.envs.into_iter();
    let found = envs.find(|e| e.key == name);
    found.map(|e| e.value).unwrap_or_default()
}

#[tokio::test(start_paused = true)]
async fn restart_keeps_pods_of_the_api_running_after_a_reboot_without_it() {
    let mut w = cluster(|pod, _| match pod {
        "job" => exits(0, 1),
        "deleting" => Behaviour::IgnoreTerm,
        _ => Behaviour::RunForever,
    })
    .await;
    w.start().await;
    w.joined().await;
    w.label_node("disk", Some("ssd"));
    create_objects(&w);
    w.pass(2).await;
    let web = w.create("web", FULL);
    let stateful = json!({"ownerReferences": [{
        "apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db", "uid": "db", "controller": true,
    }]});
    w.create_with("stateful", stateful, &spec("Always", ""));
    w.create("job", &spec("Never", ""));
    w.create(
        "deleting",
        &spec("Always", r#","terminationGracePeriodSeconds":3600"#),
    );
    w.create("orphan", &spec("Always", ""));
    w.until("they run", 60, |w| {
        let up = ["web", "stateful", "deleting", "orphan"];
        up.iter().all(|p| is_up(w, p)) && w.shown_phase("job") == "Succeeded"
    })
    .await;
    let token = file_of(&w, &web, "projected", "token/token");
    w.delete("deleting", None);
    w.until("the deletion was heard", 30, |w| {
        format!("{:?}", w.worker("deleting").phase).contains("Terminating")
    })
    .await;

    w.set_api(false);
    // Longer than the token lives.
    w.pass(2 * 3600).await;
    w.reboot().await;
    for life in 0..2 {
        w.fake.clear_calls();
        if life > 0 {
            w.crash().await;
        }
        w.start().await;
        w.until("those that may run do", 60, |w| {
            w.running("web").len() == 1 && w.running("orphan").len() == 1
        })
        .await;
        w.pass(120).await;
        assert_eq!(w.running("stateful"), Vec::<String>::new(), "life {life}");
        assert_eq!(w.running("deleting"), Vec::<String>::new(), "life {life}");
        assert_eq!(w.starts("deleting").len(), 1, "life {life}");
        assert_eq!(w.starts("job").len(), 1, "life {life}");
        assert_eq!(w.starts("web").len(), 2, "life {life}");
    }
    assert_eq!(env_of(&w, "web", "LEVEL"), "7");
    assert_eq!(env_of(&w, "web", "SHOP_SERVICE_HOST"), "10.0.0.9");
    assert_eq!(file_of(&w, &web, "configmap", "config/level"), "7");
    assert_eq!(file_of(&w, &web, "secret", "secret/word"), "open");
    assert_eq!(file_of(&w, &web, "projected", "token/token"), token);

    // The API server wins as soon as it is there.
    w.api().remove::<Pod>("default", "orphan");
    w.api()
        .modify("default", "settings", |map: &mut ConfigMap| {
            let data = map.data.get_or_insert_default();
            data.insert("level".to_owned(), "8".to_owned());
        });
    w.set_api(true);
    w.until("the API server's word is done", 120, |w| {
        is_up(w, "stateful") && w.running("orphan").is_empty() && w.shown("deleting").is_null()
    })
    .await;
    w.until("the token is replaced", 180, |w| {
        file_of(w, &web, "projected", "token/token") != token
    })
    .await;
    w.until("the new settings arrive", 180, |w| {
        file_of(w, &web, "configmap", "config/level") == "8"
    })
    .await;
    w.pass(60).await;
    assert_eq!(w.starts("web").len(), 2);
    assert_eq!(w.starts("orphan").len(), 2);
    assert_eq!(w.starts("job").len(), 1);
    assert_eq!(w.shown_phase("job"), "Succeeded");
    assert_eq!(container_status(&w.shown("web"))["restartCount"], 1);
    assert_nothing_wrong(&w);
}

// ----------------------------------------------------------------------------------------------- R16

#[tokio::test(start_paused = true)]
async fn restart_keeps_pods_of_the_api_when_the_store_is_lost_and_it_does_not_answer() {
    for integrity in [Integrity::New, Integrity::Lost] {
        let mut w = cluster(|_, _| Behaviour::RunForever).await;
        w.start().await;
        w.joined().await;
        create_objects(&w);
        w.label_node("disk", Some("ssd"));
        w.pass(2).await;
        w.create("a", FULL);
        w.create("b", &spec("Never", ""));
        w.until("both run", 60, |w| is_up(w, "a") && is_up(w, "b"))
            .await;
        w.pass(30).await;
        let before = (w.running("a"), w.running("b"));
        let shown = (
            container_status(&w.shown("a")),
            container_status(&w.shown("b")),
        );
        w.crash().await;
        w.disk = Disk::default();
        w.integrity = integrity;
        w.set_api(false);
        w.fake.clear_calls();
        w.start().await;
        w.pass(600).await;
        assert_eq!(w.effects(), Vec::<String>::new(), "{integrity:?}");
        w.set_api(true);
        w.until("both are on record", 90, |w| {
            w.has_record("a") && w.has_record("b")
        })
        .await;
        w.pass(120).await;
        assert_eq!(w.effects(), Vec::<String>::new(), "{integrity:?}");
        assert_eq!((w.running("a"), w.running("b")), before);
        let after = (
            container_status(&w.shown("a")),
            container_status(&w.shown("b")),
        );
        assert_eq!(after, shown, "{integrity:?}");
        assert!(is_up(&w, "a") && is_up(&w, "b"));
    }
}

/// The file source alone decides about its own pods; what came from the API server waits for it.
#[tokio::test(start_paused = true)]
async fn restart_replaces_static_pods_of_a_lost_store_while_the_api_does_not_answer() {
    for integrity in [Integrity::New, Integrity::Lost] {
        let mut w = cluster(|_, _| Behaviour::RunForever).await;
        w.start().await;
        w.joined().await;
        for pod in ["kept", "edited", "gone"] {
            w.manifest(pod, &spec("Always", ""));
        }
        w.create("remote", &spec("Always", ""));
        let all = ["kept", "edited", "gone", "remote"];
        w.until("all run", 60, |w| {
            all.iter().all(|pod| w.running(pod).len() == 1)
        })
        .await;
        w.pass(30).await;
        let before = all.map(|pod| w.running(pod));
        w.crash().await;
        w.disk = Disk::default();
        w.integrity = integrity;
        w.set_api(false);
        w.manifest(
            "edited",
            &spec("Always", r#","terminationGracePeriodSeconds":5"#),
        );
        w.remove_manifest("gone");
        w.start().await;
        w.until("the files are followed", 60, |w| {
            let edited = w.running("edited");
            assert!(edited.len() <= 1, "side by side");
            edited.len() == 1 && edited != before[1] && w.running("gone").is_empty()
        })
        .await;
        w.pass(120).await;
        assert_eq!(w.running("kept"), before[0], "{integrity:?}");
        assert_eq!(w.running("remote"), before[3], "{integrity:?}");
    }
}

// ----------------------------------------------------------------------------------------------- R18

#[tokio::test(start_paused = true)]
async fn restart_keeps_out_pods_that_were_deleted_or_replaced_while_the_node_was_offline() {
    for restarted in [false, true] {
        let mut w = cluster(|_, _| Behaviour::RunForever).await;
        w.start().await;
        w.create("deleted", &spec("Always", ""));
        w.create("asked", &spec("Always", ""));
        let old = w.create("replaced", &spec("Always", ""));
        w.until("they run", 60, |w| {
            ["deleted", "asked", "replaced"].iter().all(|p| is_up(w, p))
        })
        .await;
        w.set_api(false);
        w.pass(30).await;
        w.delete("deleted", Some(0));
        w.delete("asked", Some(5));
        w.delete("replaced", Some(0));
        let new = w.create("replaced", &spec("Always", ""));
        w.pass(30).await;
        if restarted {
            w.restart().await;
            w.pass(30).await;
        }
        assert_eq!(w.running("deleted").len(), 1, "nobody said so yet");
        w.set_api(true);
        w.until("the API server's word is done", 90, |w| {
            w.running("deleted").is_empty()
                && w.shown("asked").is_null()
                && w.starts("replaced").iter().any(|s| s.uid == new)
        })
        .await;
        w.until("nothing is left", 120, |w| {
            w.left_of("replaced", &old).is_empty() && !w.has_record("deleted")
        })
        .await;
        w.set_api(false);
        w.restart().await;
        w.pass(120).await;
        w.reboot().await;
        w.start().await;
        w.pass(120).await;
        assert_eq!(w.starts("deleted").len(), 1, "resurrected");
        assert_eq!(w.starts("asked").len(), 1, "resurrected");
        let old_starts = w.starts("replaced").into_iter().filter(|s| s.uid == old);
        assert_eq!(old_starts.count(), 1, "resurrected");
        assert_eq!(w.running("replaced").len(), 1);
        assert_nothing_wrong(&w);
    }
}

// ----------------------------------------------------------------------------------------------- R19

// Invariant API-6.
#[tokio::test(start_paused = true)]
async fn restart_keeps_what_happened_in_an_outage() {
    let mut w = cluster(|pod, attempt| match (pod, attempt) {
        ("loop", 0..=3) => exits(7 + i32::try_from(attempt).unwrap(), 2),
        ("job", _) => exits(5, 40),
        _ => Behaviour::RunForever,
    })
    .await;
    w.start().await;
    w.create("loop", &spec("Always", ""));
    w.create("job", &spec("Never", ""));
    w.until("the first restart is told", 60, |w| {
        container_status(&w.shown("loop"))["restartCount"] == 1 && is_up(w, "job")
    })
    .await;
    w.set_api(false);
    w.until("it restarted three times more", 200, |w| {
        w.starts("loop").len() == 5 && w.restarts("loop") == 4 && w.phase("job") == "Failed"
    })
    .await;
    w.restart().await;
    w.pass(30).await;
    w.restart().await;
    w.set_api(true);
    let mut count = 0;
    for _ in 0..600 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let now = container_status(&w.shown("loop"))["restartCount"].as_i64();
        let now = now.unwrap_or_default();
        assert!(now >= count, "restartCount {now} after {count}");
        count = now;
    }
    let shown = container_status(&w.shown("loop"));
    assert_eq!(shown["restartCount"], 4, "{shown}");
    assert_eq!(shown["lastState"]["terminated"]["exitCode"], 10, "{shown}");
    let job = w.shown("job");
    let state = container_status(&job)["state"].clone();
    assert_eq!(state["terminated"]["exitCode"], 5, "{job}");
    assert_eq!(job["status"]["phase"], "Failed");
    assert_nothing_wrong(&w);
}

// ------------------------------------------------------------------------------------ whose the store is

/// The node's object is another one in the same cluster: what is decided is decided pod by pod, as ever.
#[tokio::test(start_paused = true)]
async fn restart_keeps_the_pods_of_a_node_that_was_deleted_and_registers_again() {
    let mut w = cluster(|_, _| Behaviour::RunForever).await;
    w.manifest("fixed", &spec("Always", ""));
    w.start().await;
    w.joined().await;
    w.create("known", &spec("Always", ""));
    w.create("collected", &spec("Always", ""));
    w.until("they run", 60, |w| {
        is_up(w, "known") && is_up(w, "collected") && w.running("fixed").len() == 1
    })
    .await;
    w.pass(30).await;
    let uid = |w: &World| {
        let node = w.api().get::<Node>("", NODE);
        node.and_then(|node| node.metadata.uid)
    };
    let before = uid(&w).unwrap();
    w.crash().await;
    w.api().remove::<Node>("", NODE);
    w.api().remove::<Pod>("default", "collected");
    w.start().await;
    w.until("the node is another one", 60, |w| {
        uid(w).is_some_and(|now| now != before)
    })
    .await;
    w.until("what the server does not know is gone", 120, |w| {
        w.running("collected").is_empty() && !w.has_record("collected")
    })
    .await;
    w.pass(120).await;
    assert_eq!(w.starts("fixed").len(), 1);
    assert_eq!(w.starts("known").len(), 1);
    assert_eq!(w.starts("collected").len(), 1);
    assert!(is_up(&w, "known"));
    assert_nothing_wrong(&w);
}

/// `kubeadm init` once more on the same machine, with the CA that was kept: another etcd, with older versions and another node
/// object. It is taken for the same cluster, and its pods are told apart one by one.
#[tokio::test(start_paused = true)]
async fn restart_keeps_nothing_of_a_former_cluster_with_the_same_ca_but_static_pods() {
    let mut w = cluster(|_, _| Behaviour::RunForever).await;
    w.manifest("fixed", &spec("Always", ""));
    w.start().await;
    w.joined().await;
    w.create("web", &spec("Always", ""));
    w.create("once", &spec("Never", ""));
    w.until("they run", 60, |w| {
        is_up(w, "web") && is_up(w, "once") && w.running("fixed").len() == 1
    })
    .await;
    w.pass(30).await;
    w.crash().await;
    let other = World::with_api().api.unwrap();
    // The fake counts UIDs: those of another cluster are others.
    for n in 0..50 {
        let name = format!("n{n}");
        other.create_json(json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": "default", "name": name},
        }));
    }
    w.api = Some(other);
    w.start().await;
    w.joined().await;
    // Of the same name, and another pod.
    w.create("web", &spec("Always", ""));
    w.until("the former pods are gone and the new one runs", 180, |w| {
        w.running("once").is_empty() && !w.has_record("once") && is_up(w, "web")
    })
    .await;
    w.pass(120).await;
    assert_eq!(w.starts("fixed").len(), 1);
    assert_eq!(w.starts("once").len(), 1);
    assert_eq!(w.starts("web").len(), 2);
    assert_nothing_wrong(&w);
}

/// What may be a pod of another cluster runs on, and does not start.
#[tokio::test(start_paused = true)]
async fn restart_keeps_pods_running_and_starts_none_while_the_cluster_is_in_doubt() {
    for rebooted in [false, true] {
        let mut w = cluster(|_, _| Behaviour::RunForever).await;
        w.manifest("fixed", &spec("Always", ""));
        w.start().await;
        w.joined().await;
        // It would start in any outage.
        let anyway = json!({"annotations": {"holdfast.io/offline-start": "true"}});
        w.create_with("web", anyway, &spec("Always", ""));
        w.until("they run", 60, |w| {
            is_up(w, "web") && w.running("fixed").len() == 1
        })
        .await;
        w.pass(30).await;
        w.set_api(false);
        w.pass(30).await;
        match rebooted {
            true => w.reboot().await,
            false => w.crash().await,
        }
        w.cluster_doubted = true;
        w.start().await;
        w.until("the static pod runs", 60, |w| w.running("fixed").len() == 1)
            .await;
        w.pass(120).await;
        assert_eq!(w.running("web").len(), usize::from(!rebooted));
        assert_eq!(w.starts("web").len(), 1, "{rebooted}");
        // It is the same cluster after all.
        w.set_api(true);
        w.until("the server has shown it", 120, |w| is_up(w, "web"))
            .await;
        w.pass(30).await;
        assert_eq!(w.starts("web").len(), 1 + usize::from(rebooted));
        assert_nothing_wrong(&w);
    }
}

// ----------------------------------------------------------------------------------------- mirror pods

#[tokio::test(start_paused = true)]
async fn restart_keeps_a_mirror_pod() {
    let mut w = cluster(|_, _| Behaviour::RunForever).await;
    w.manifest("fixed", &spec("Always", ""));
    w.start().await;
    let mirror = format!("fixed-{NODE}");
    w.until("its mirror pod is Running", 60, |w| {
        w.shown_phase(&mirror) == "Running"
    })
    .await;
    w.pass(60).await;
    let before = w.shown(&mirror);
    w.api().take_requests();
    w.restart().await;
    w.pass(120).await;
    w.set_api(false);
    w.pass(60).await;
    w.restart().await;
    w.pass(60).await;
    w.set_api(true);
    w.pass(120).await;
    assert_eq!(w.shown(&mirror), before);
    no_writes(&w, is_point);
    assert_eq!(w.starts("fixed").len(), 1);
    // Removed while nobody looks.
    w.crash().await;
    w.remove_manifest("fixed");
    w.start().await;
    w.until("pod and mirror pod are gone", 60, |w| {
        w.shown(&mirror).is_null() && w.running("fixed").is_empty()
    })
    .await;
    let made = w.api().count(|r| r.verb == "create" && r.kind == "pods");
    assert_eq!(made, 0, "made again");
}

#[tokio::test(start_paused = true)]
async fn a_static_pod_with_a_priority_of_its_own_has_a_mirror_pod() {
    let mut w = cluster(|_, _| Behaviour::RunForever).await;
    w.manifest("fixed", &spec("Always", r#","priority":1000"#));
    w.start().await;
    let mirror = format!("fixed-{NODE}");
    w.until("its mirror pod is Running", 60, |w| {
        w.shown_phase(&mirror) == "Running"
    })
    .await;
    assert_eq!(w.shown(&mirror)["spec"]["priority"], 0);
}

#[tokio::test(start_paused = true)]
async fn restart_keeps_a_mirror_pod_single_when_its_creation_was_not_answered() {
    let mut w = cluster(|_, _| Behaviour::RunForever).await;
    w.manifest("fixed", &spec("Always", ""));
    w.api().fail_next(
        |r| r.verb == "create" && r.kind == "pods",
        holdfast_testkit::fake_api::Fault::HangAfterEffect,
        1,
    );
    w.start().await;
    w.until("it is made", 60, |w| {
        !w.api().list_json("pods", "").is_empty()
    })
    .await;
    let uid = w.api().list_json("pods", "")[0]["metadata"]["uid"].clone();
    w.restart().await;
    let mirror = format!("fixed-{NODE}");
    w.until("it is Running", 60, |w| w.shown_phase(&mirror) == "Running")
        .await;
    w.pass(60).await;
    assert_eq!(w.shown(&mirror)["metadata"]["uid"], uid);
    let deleted = w.api().count(|r| r.verb == "delete" && r.kind == "pods");
    assert_eq!(deleted, 0, "deleted");
}

// -------------------------------------------------------------------------------------- short of it all

#[tokio::test(start_paused = true)]
async fn a_runtime_that_fails_and_an_api_that_is_away_at_once_lose_nothing() {
    let mut w = cluster(|_, _| Behaviour::RunForever).await;
    w.start().await;
    w.create("web", &spec("Always", ""));
    w.until("it runs", 60, |w| is_up(w, "web")).await;
    w.set_api(false);
    let down = Fault::Error(tonic::Code::Unavailable, "runtime is away".to_owned());
    for _ in 0..3 {
        w.fail_once("create_container", down.clone());
    }
    w.fake.exit(&w.running("web")[0], 9);
    w.pass(5).await;
    w.restart().await;
    w.until("it runs again", 200, |w| w.running("web").len() == 1)
        .await;
    w.set_api(true);
    w.until("the API server knows why", 60, |w| {
        let shown = container_status(&w.shown("web"));
        shown["lastState"]["terminated"]["exitCode"] == 9 && shown["ready"] == true
    })
    .await;
    assert!(w.api().count(tells_status) > 0);
    assert_nothing_wrong(&w);
}

// ---------------------------------------------------------------------------------------- back-offs

#[tokio::test(start_paused = true)]
async fn an_api_server_that_is_back_ends_a_crash_back_off_and_one_that_flaps_none() {
    let mut w = cluster(|_, _| exits(3, 1)).await;
    w.start().await;
    w.joined().await;
    w.create("crash", &spec("Always", ""));
    w.until("160 s of back-off", 600, |w| {
        w.waiting("crash") == "CrashLoopBackOff"
            && w.container("crash").backoff.unwrap().duration_ms == 160_000
    })
    .await;
    let before = w.starts("crash").len();
    w.set_api(false);
    w.pass(30).await;
    assert_eq!(w.starts("crash").len(), before, "{}", w.describe());
    w.set_api(true);
    w.until("it is tried", 60, |w| w.starts("crash").len() == before + 1)
        .await;
    assert_eq!(w.container("crash").backoff.unwrap().duration_ms, 300_000);
    for _ in 0..2 {
        w.set_api(false);
        w.pass(30).await;
        w.set_api(true);
        w.pass(60).await;
    }
    assert_eq!(w.starts("crash").len(), before + 1, "{}", w.describe());
    let events = w.api().events_of("default", "crash");
    let ended = events.iter().filter(|event| event.1 == "BackOffEnded");
    assert_eq!(ended.count(), 1, "{events:?}");
    assert_nothing_wrong(&w);
}
