//! What a test can do to the fake server.

use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use holdfast_testkit::fake_api::{FakeApi, Fault, Identity};
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod, ServiceAccount};
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::runtime::watcher;
use serde_json::json;

use crate::world::{object, pod, refusal};

/// How long something may take that happens at once, in the paused time of these tests.
const SOON: Duration = Duration::from_secs(600);

fn server() -> (FakeApi, Api<Pod>) {
    let api = FakeApi::new();
    api.create::<Node>(&object(json!({ "metadata": { "name": "n1" } })));
    let pods = Api::namespaced(api.client(), "default");
    (api, pods)
}

fn put(api: &FakeApi, name: &str) -> Pod {
    api.create(&object(pod(name, "n1")))
}

fn version(api: &FakeApi) -> String {
    api.resource_version().to_string()
}

#[tokio::test(start_paused = true)]
async fn server_that_is_down_fails_every_request_and_breaks_watches() {
    let (api, pods) = server();
    let mut watch = pods
        .watch(&WatchParams::default(), &version(&api))
        .await
        .unwrap()
        .boxed();
    api.set_down(Some("no route to host"));
    assert!(!matches!(watch.try_next().await, Ok(Some(_))));
    let error = pods.get("p").await.unwrap_err();
    assert!(!matches!(error, kube::Error::Api(_)), "{error:?}");
    assert_eq!(api.refused(), 1);
    put(&api, "p");
    api.set_down(None);
    pods.get("p").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn faults_hit_the_requests_they_are_for_as_often_as_said() {
    let (api, pods) = server();
    put(&api, "p");
    api.fail_next(|r| r.line() == "get pods default/p", 503, 2);
    assert_eq!(refusal(pods.get("p").await), 503);
    pods.list(&ListParams::default()).await.unwrap();
    assert_eq!(refusal(pods.get("p").await), 503);
    pods.get("p").await.unwrap();

    api.fail_next(|r| r.verb == "delete", Fault::LoseReply, 1);
    let params = kube::api::DeleteParams::default().grace_period(0);
    pods.delete("p", &params).await.unwrap_err();
    assert!(
        api.get::<Pod>("default", "p").is_none(),
        "it had its effect"
    );

    api.fail_always(|_| true, Fault::Hang);
    let waited = tokio::time::timeout(Duration::from_secs(60), pods.get("p")).await;
    assert!(waited.is_err());
    api.clear_faults();
    let log: Vec<(String, u16)> = api
        .take_requests()
        .iter()
        .map(|r| (r.line(), r.status))
        .collect();
    assert_eq!(log[0], ("get pods default/p".to_owned(), 503));
    assert_eq!(log[1], ("list pods default/".to_owned(), 200));
    assert!(api.requests().is_empty());
}

#[tokio::test(start_paused = true)]
async fn compaction_answers_an_old_watch_with_410_and_spares_open_ones() {
    let (api, pods) = server();
    let old = version(&api);
    let mut open = pods
        .watch(&WatchParams::default(), &old)
        .await
        .unwrap()
        .boxed();
    put(&api, "p");
    api.compact();
    let mut late = pods
        .watch(&WatchParams::default(), &old)
        .await
        .unwrap()
        .boxed();
    match late.try_next().await.unwrap() {
        Some(WatchEvent::Error(status)) => {
            assert_eq!((status.code, &*status.reason), (410, "Expired"))
        }
        other => panic!("{other:?}"),
    }
    assert!(late.try_next().await.unwrap().is_none());
    assert!(matches!(
        open.try_next().await.unwrap(),
        Some(WatchEvent::Added(_))
    ));
}

#[tokio::test(start_paused = true)]
async fn bookmarks_come_on_a_tick() {
    let (api, pods) = server();
    api.set_bookmark_interval(Duration::from_secs(10));
    let began = tokio::time::Instant::now();
    let mut watch = pods
        .watch(&WatchParams::default(), &version(&api))
        .await
        .unwrap()
        .boxed();
    // Of another resource: the bookmark says that nothing was missed.
    api.create::<ConfigMap>(&object(json!({ "metadata": { "name": "c" } })));
    match watch.try_next().await.unwrap() {
        Some(WatchEvent::Bookmark(bookmark)) => {
            assert_eq!(bookmark.metadata.resource_version, version(&api));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(began.elapsed().as_secs(), 10);
}

#[tokio::test(start_paused = true)]
async fn half_open_watch_is_silent_and_a_closed_one_ends() {
    let (api, pods) = server();
    let params = WatchParams::default().timeout(290);
    let mut hung = pods.watch(&params, &version(&api)).await.unwrap().boxed();
    api.hang_watches();
    let mut closed = pods.watch(&params, &version(&api)).await.unwrap().boxed();
    put(&api, "p");
    api.close_watches();
    assert!(matches!(
        closed.try_next().await.unwrap(),
        Some(WatchEvent::Added(_))
    ));
    assert!(closed.try_next().await.unwrap().is_none());
    let hour = Duration::from_secs(3600);
    assert!(tokio::time::timeout(hour, hung.next()).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn restored_server_has_old_objects_and_old_versions() {
    let (api, pods) = server();
    put(&api, "kept");
    let backup = api.snapshot();
    let old = version(&api);
    put(&api, "lost");
    let newer = version(&api);
    api.restore(&backup);
    assert_eq!(version(&api), old);
    assert!(pods.get_opt("lost").await.unwrap().is_none());
    let again = put(&api, "lost");
    assert_eq!(
        again.metadata.resource_version.as_ref(),
        Some(&newer),
        "a version is given again"
    );
    let future = ListParams::default().at("99999");
    assert_eq!(refusal(pods.list(&future).await), 504);
}

#[tokio::test(start_paused = true)]
async fn stale_cache_is_seen_by_reads_of_version_0_only() {
    let (api, pods) = server();
    api.set_stale(Some(api.snapshot()));
    put(&api, "p");
    let stale = pods.list(&ListParams::default().at("0")).await.unwrap();
    assert!(stale.items.is_empty());
    let quorum = pods.list(&ListParams::default()).await.unwrap();
    assert_eq!(quorum.items.len(), 1);
    api.set_stale(None);
    assert_eq!(
        pods.list(&ListParams::default().at("0"))
            .await
            .unwrap()
            .items
            .len(),
        1
    );
}

#[tokio::test(start_paused = true)]
async fn kube_watcher_follows_through_closed_watches_and_compaction() {
    let (api, pods) = server();
    let mut names = watcher(pods, watcher::Config::default()).boxed();
    let mut seen = Vec::new();
    put(&api, "a");
    see(&mut names, &mut seen, "a").await;
    api.close_watches();
    put(&api, "b");
    see(&mut names, &mut seen, "b").await;
    put(&api, "c");
    api.close_watches();
    api.compact();
    see(&mut names, &mut seen, "c").await;
    api.set_down(Some("down"));
    put(&api, "d");
    api.set_down(None);
    see(&mut names, &mut seen, "d").await;
}

async fn see(
    events: &mut futures::stream::BoxStream<'_, Result<watcher::Event<Pod>, watcher::Error>>,
    seen: &mut Vec<String>,
    name: &str,
) {
    while !seen.iter().any(|seen| seen == name) {
        let event = tokio::time::timeout(SOON, events.next()).await;
        let event = event.expect("an event in time").unwrap();
        if let Ok(watcher::Event::Apply(pod) | watcher::Event::InitApply(pod)) = event {
            seen.push(pod.metadata.name.unwrap());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn token_expires_by_the_paused_clock_and_dies_with_its_pod() {
    let (api, _) = server();
    api.create::<ServiceAccount>(&object(json!({ "metadata": { "name": "app" } })));
    let mut given = pod("p", "n1");
    given["spec"]["serviceAccountName"] = "app".into();
    let bound: Pod = api.create(&object(given));
    let accounts: Api<ServiceAccount> = Api::namespaced(api.client_as_node("n1"), "default");
    let request = object(json!({ "metadata": {}, "spec": {
        "audiences": ["a"], "expirationSeconds": 600,
        "boundObjectRef": { "apiVersion": "v1", "kind": "Pod", "name": "p", "uid": bound.metadata.uid },
    }}));
    let mut tokens = Vec::new();
    for _ in 0..2 {
        let given = accounts
            .create_token_request("app", &PostParams::default(), &request)
            .await;
        tokens.push(given.unwrap().status.unwrap().token.unwrap());
        tokio::time::sleep(Duration::from_secs(400)).await;
    }
    assert_eq!(api.token_owner(&tokens[0]), None, "800 s old");
    let (user, audiences) = api.token_owner(&tokens[1]).unwrap();
    assert_eq!(
        (&*user, &*audiences[0]),
        ("system:serviceaccount:default:app", "a")
    );
    api.delete::<Pod>("default", "p", Some(0));
    assert_eq!(api.token_owner(&tokens[1]), None);
}

#[tokio::test(start_paused = true)]
async fn latency_is_of_tokio_time_and_until_waits_for_a_write() {
    let (api, pods) = server();
    api.set_latency(Duration::from_secs(5));
    let began = tokio::time::Instant::now();
    put(&api, "p");
    let patch = tokio::spawn(async move {
        let patch = Patch::Strategic(json!({ "status": { "phase": "Running" } }));
        pods.patch_status("p", &PatchParams::default(), &patch)
            .await
            .unwrap();
    });
    let told = api.until(|api| {
        let pod = api.get::<Pod>("default", "p").unwrap();
        pod.status.unwrap().phase.as_deref() == Some("Running")
    });
    tokio::time::timeout(SOON, told).await.expect("it is told");
    assert_eq!(began.elapsed().as_secs(), 5);
    patch.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn events_of_both_apis_are_one_list() {
    let (api, _) = server();
    let node = api.client_as_node("n1");
    let old: Api<k8s_openapi::api::core::v1::Event> = Api::namespaced(node.clone(), "default");
    let about = json!({ "kind": "Pod", "namespace": "default", "name": "p" });
    let event = object(json!({
        "metadata": { "name": "p.1" }, "involvedObject": about, "type": "Normal", "reason": "Started",
        "message": "Started container", "count": 2,
    }));
    old.create(&PostParams::default(), &event).await.unwrap();
    let new: Api<k8s_openapi::api::events::v1::Event> = Api::namespaced(node, "default");
    let event = object(json!({
        "metadata": { "name": "p.2" }, "regarding": about, "type": "Warning", "reason": "BackOff",
        "note": "Back-off", "eventTime": "2026-01-01T00:00:00.000000Z", "action": "x",
        "reportingController": "c", "reportingInstance": "i",
    }));
    let shown = new.create(&PostParams::default(), &event).await.unwrap();
    assert_eq!(shown.note.as_deref(), Some("Back-off"));
    let of = |t: &str, r: &str, m: &str, n| (t.to_owned(), r.to_owned(), m.to_owned(), n);
    assert_eq!(
        api.events_of("default", "p"),
        [
            of("Normal", "Started", "Started container", 2),
            of("Warning", "BackOff", "Back-off", 1)
        ]
    );
}

#[tokio::test]
async fn served_over_tcp_it_knows_nodes_by_their_tokens() {
    let (api, _) = server();
    put(&api, "p");
    let served = api.serve("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let client = |token: &str| {
        let mut config = kube::Config::new(served.url().parse().unwrap());
        config.auth_info.token = Some(token.to_owned().into());
        kube::Client::try_from(config).unwrap()
    };
    let code = |client: kube::Client| async move {
        let pods: Api<Pod> = Api::namespaced(client, "default");
        match pods.get("p").await {
            Ok(_) => 200,
            Err(kube::Error::Api(status)) => status.code,
            Err(error) => panic!("{error}"),
        }
    };
    api.add_credential("somebody", Identity::User("somebody".to_owned()));
    assert_eq!(code(client("admin")).await, 200);
    assert_eq!(code(client("node:n1")).await, 200);
    assert_eq!(code(client("node:n2")).await, 403);
    assert_eq!(code(client("somebody")).await, 403);
    assert_eq!(code(client("nobody")).await, 401);
    let pods: Api<Pod> = Api::namespaced(client("admin"), "default");
    let mut watch = pods
        .watch(&WatchParams::default(), "0")
        .await
        .unwrap()
        .boxed();
    assert!(matches!(
        watch.try_next().await.unwrap(),
        Some(WatchEvent::Added(_))
    ));
}
