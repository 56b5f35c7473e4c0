//! The handlers over the routes of a node.

use std::sync::Mutex;
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use holdfast_testkit::fake_cri::Fault;
use serde_json::json;

use super::super::testkit::{Served, TestNode};
use super::*;
use crate::kubeletconfig::load::load;

async fn request(node: &Served, method: &str, path: &str, body: &str) -> (u16, String) {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .body(Body::from(body.to_owned()))
        .unwrap();
    let answer = node.send(request).await;
    (answer.status, answer.text())
}

#[tokio::test]
async fn the_configuration_shown_is_the_one_in_force_and_can_be_loaded() {
    let node = TestNode::new();
    let mut wanted = node.node.config.kubelet.clone();
    wanted.container_runtime_endpoint = node.node.config.runtime_endpoint.to_string();
    let shown = node.serve().get("/configz").await.json();
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("config.json");
    std::fs::write(&file, shown["kubeletconfig"].to_string()).unwrap();
    assert_eq!(load(Some(&file), None).unwrap().config, wanted);
    assert_eq!(shown["kubeletconfig"]["maxPods"], 110);
}

#[tokio::test]
async fn statusz_tells_people_and_programs_since_when_the_agent_runs() {
    let mut node = TestNode::new();
    node.node.debug.started = Some(node.node.clock.now());
    let node = node.serve();
    node.clock.advance(Duration::from_secs(3725));
    let text = node.get("/statusz").await.text();
    assert!(text.starts_with("\nkubelet statusz\nWarning: "), "{text}");
    assert!(text.contains("\nStarted: 2026-01-02T03:04:05Z\n"), "{text}");
    assert!(text.contains("\nUp: 1 hr 02 min 05 sec\n"), "{text}");
    let media = "application/json;v=v1alpha1;g=config.k8s.io;as=Statusz";
    let asked = Request::get("/statusz").header("accept", media);
    let answer = node.send(asked.body(Body::empty()).unwrap()).await;
    assert_eq!(answer.headers["content-type"], media);
    let object = answer.json();
    assert_eq!(object["kind"], "Statusz");
    assert_eq!(object["apiVersion"], "config.k8s.io/v1alpha1");
    assert_eq!(object["uptimeSeconds"], 3725);
    let asked = Request::get("/statusz").header("accept", "application/json");
    assert_eq!(
        node.send(asked.body(Body::empty()).unwrap()).await.status,
        406
    );
}

#[tokio::test]
async fn flagz_lists_flags_with_the_values_in_force() {
    let node = TestNode::new().serve();
    let text = node.get("/flagz").await.text();
    for line in [
        "hostname-override=node-1",
        "max-pods=110",
        "v=0",
        "pod-max-pids=-1",
        "offline-start=Safe",
        "streaming-requires-create=false",
        "sync-frequency=1m0s",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} is not in {text}");
    }
    let media = "application/json;v=v1beta1;g=config.k8s.io;as=Flagz";
    let asked = Request::get("/flagz").header("accept", media);
    let object = node.send(asked.body(Body::empty()).unwrap()).await.json();
    assert_eq!(object["apiVersion"], "config.k8s.io/v1beta1");
    assert_eq!(object["flags"]["max-pods"], "110");
}

#[tokio::test]
async fn the_verbosity_is_put_and_a_bad_one_is_told() {
    let mut node = TestNode::new();
    let set = Arc::new(Mutex::new(Vec::new()));
    let into = Arc::clone(&set);
    node.node.debug.set_verbosity = Some(Arc::new(move |v| {
        if v > 10 {
            return Err("too much".to_owned());
        }
        into.lock().unwrap().push(v);
        Ok(())
    }));
    let node = node.serve();
    let put = |body: &'static str| request(&node, "PUT", "/debug/flags/v", body);
    assert_eq!(
        put("4\n").await,
        (
            200,
            "successfully set klog.logging.verbosity to 4\n".to_owned()
        )
    );
    for (body, says) in [("loud", "not a number"), ("11", "too much"), ("", "not a")] {
        let (status, text) = put(body).await;
        assert!(
            status == 400 && text.contains(says),
            "{body}: {status} {text}"
        );
    }
    let long: &'static str = "1".repeat(1000).leak();
    assert_eq!(put(long).await.0, 400);
    assert_eq!(request(&node, "GET", "/debug/flags/v", "").await.0, 406);
    assert_eq!(*set.lock().unwrap(), [4]);
}

async fn with_pod() -> TestNode {
    let node = TestNode::new();
    node.want(json!({
        "metadata": {"name": "web", "namespace": "ns", "uid": "u1"},
        "spec": {"containers": [{"name": "main"}, {"name": "ended"}]},
    }));
    let ids = node.run("ns", "web", "u1", &["main", "ended"]).await;
    assert!(node.cri.exit(&ids[1], 0));
    node
}

#[tokio::test]
async fn a_checkpoint_is_written_by_the_runtime_and_its_file_named() {
    use std::os::unix::fs::PermissionsExt;
    let node = with_pod().await;
    node.cri.offer_checkpoints(true);
    let root = node.node.config.root_dir.clone();
    let node = node.serve();
    let (status, text) = request(&node, "POST", "/checkpoint/ns/web/main", "").await;
    assert_eq!(status, 200, "{text}");
    let answer: serde_json::Value = serde_json::from_str(&text).unwrap();
    let wanted = root.join("checkpoints/checkpoint-web_ns-main-2026-01-02T03:04:05Z.tar");
    assert_eq!(answer, json!({"items": [wanted]}));
    assert!(wanted.exists(), "the runtime wrote it");
    let mode = std::fs::metadata(root.join("checkpoints")).unwrap();
    assert_eq!(mode.permissions().mode() & 0o777, 0o700);
}

#[tokio::test]
async fn checkpoints_that_cannot_be_made_have_upstreams_status() {
    let node = with_pod().await;
    node.cri.fail_once(
        "list_containers",
        Fault::Error(tonic::Code::Internal, "broken".to_owned()),
    );
    let node = node.serve();
    for (path, status, says) in [
        (
            "/checkpoint/ns/web/main",
            500,
            "checkpointing of ns/web/main failed",
        ),
        ("/checkpoint/ns/nobody/main", 404, "pod does not exist"),
        ("/checkpoint/other/web/main", 404, "pod does not exist"),
        (
            "/checkpoint/ns/web/none",
            404,
            "container none does not exist",
        ),
        (
            "/checkpoint/ns/web/main?timeout=x",
            404,
            "cannot parse value of timeout",
        ),
        ("/checkpoint/ns/web/ended", 500, "container ended not found"),
        // As containerd before 2.0 answers.
        ("/checkpoint/ns/web/main", 500, "checkpoint_container"),
    ] {
        let (got, text) = request(&node, "POST", path, "").await;
        assert_eq!(got, status, "{path}: {text}");
        assert!(text.contains(says), "{path}: {text}");
    }
    assert_eq!(
        request(&node, "GET", "/checkpoint/ns/web/main", "").await.0,
        405
    );
}

#[tokio::test]
async fn what_there_is_no_profile_of_says_why() {
    let node = TestNode::new().serve();
    for path in [
        "heap",
        "allocs",
        "goroutine",
        "block",
        "mutex",
        "threadcreate",
        "trace",
    ] {
        let answer = node.get(&format!("/debug/pprof/{path}")).await;
        assert_eq!(answer.status, 501, "{path}");
        assert!(answer.text().len() > 20, "{path}");
    }
    assert_eq!(node.get("/debug/pprof/").await.status, 200);
    assert_eq!(node.get("/debug/pprof/profile?seconds=0").await.status, 400);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cpu_profile_shows_who_was_busy_and_is_taken_one_at_a_time() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let node = Arc::new(TestNode::new().serve());
    let busy = Arc::new(AtomicBool::new(true));
    let until = Arc::clone(&busy);
    let worker = std::thread::spawn(move || {
        let mut sum = 0_u64;
        while until.load(Ordering::Relaxed) {
            sum = std::hint::black_box(sum.wrapping_mul(31).wrapping_add(7));
        }
        sum
    });
    let both = tokio::join!(
        node.get("/debug/pprof/profile?seconds=2"),
        node.get("/debug/pprof/profile?seconds=2")
    );
    busy.store(false, Ordering::Relaxed);
    worker.join().unwrap();
    let statuses = [both.0.status, both.1.status];
    assert!(
        statuses.contains(&200) && statuses.contains(&500),
        "{statuses:?}"
    );
    let (good, refused) = if both.0.status == 200 {
        (both.0, both.1)
    } else {
        (both.1, both.0)
    };
    assert!(refused.text().contains("already in use"));
    let profile = pprof::read(&good.body);
    assert!(profile.sample.len() > 1, "a busy thread was seen");
    let units: Vec<_> = (profile.sample_type.iter())
        .map(|t| profile.string_table[usize::try_from(t.kind).unwrap()].clone())
        .collect();
    assert_eq!(units, ["samples", "cpu"]);
    assert!(profile.sample.iter().any(|s| !s.location_id.is_empty()));
    let names = &profile.string_table;
    assert!(
        !names.iter().any(|name| name.contains("pprof::backtrace")),
        "the sampling itself is not in it"
    );
}
