//! Service accounts: requested each time, recorded for outages, forgotten with the last of their pods. Tokens for pulls.

use std::sync::Arc;
use std::time::Duration;

use holdfast_testkit::fake_api::{FakeApi, Identity};
use k8s_openapi::api::authentication::v1::TokenRequestSpec;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::{Life, World, pod, settle};
use crate::apiserver::ApiClient;
use crate::objects::{ObjectError, Objects};
use crate::types::PodUid;

const KEY: &str = "serviceaccounts/ns/robot";

fn robot(uid: &str) -> Pod {
    pod(
        uid,
        json!({"nodeName": "node", "serviceAccountName": "robot"}),
    )
}

fn cluster() -> FakeApi {
    let api = FakeApi::new();
    api.create_json(json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "ns"}}));
    api.create_json(json!({
        "apiVersion": "v1", "kind": "ServiceAccount",
        "metadata": {"name": "robot", "namespace": "ns", "annotations": {"tenant": "blue"}},
    }));
    for uid in ["a", "b"] {
        let mut object = serde_json::to_value(robot(uid)).unwrap();
        object["apiVersion"] = "v1".into();
        object["kind"] = "Pod".into();
        api.create_json(object);
    }
    api
}

fn start(world: &World, api: &FakeApi) -> Life {
    let service = api.service_as(Identity::Node("node".to_owned()));
    let client = ApiClient::over(service, (1000, 1000), Arc::clone(&world.clock));
    let objects = Objects::with_vault(
        world.store.clone(),
        Arc::clone(&world.clock),
        Some(client),
        Arc::clone(&world.vault),
        world.metrics.clone(),
        None,
    );
    let stop = CancellationToken::new();
    let running = tokio::spawn(objects.clone().run(stop.clone()));
    Life {
        objects,
        stop,
        running,
    }
}

#[tokio::test(start_paused = true)]
async fn the_stored_account_counts_while_the_api_server_is_away() {
    let (world, api) = (World::new(), cluster());
    let life = start(&world, &api);
    life.objects.register(&robot("a"));
    let live = life.objects.service_account(&robot("a")).await.unwrap();
    assert_eq!(live.annotations["tenant"], "blue");
    assert!(!live.uid.is_empty());
    settle().await;
    assert!(world.record(KEY).is_some());
    life.end().await;

    api.set_down(Some("cut off"));
    let life = start(&world, &api);
    life.objects.register(&robot("a"));
    life.objects.sweep();
    settle().await;
    assert_eq!(
        life.objects.service_account(&robot("a")).await.unwrap(),
        live
    );
    life.end().await;

    // An account that was deleted is not taken from the record.
    api.set_down(None);
    api.remove::<k8s_openapi::api::core::v1::ServiceAccount>("ns", "robot");
    let life = start(&world, &api);
    life.objects.register(&robot("a"));
    let error = life.objects.service_account(&robot("a")).await.unwrap_err();
    assert!(matches!(error, ObjectError::Refused { .. }), "{error}");
}

#[tokio::test(start_paused = true)]
async fn an_account_is_forgotten_with_the_last_of_its_pods() {
    let (world, api) = (World::new(), cluster());
    let life = start(&world, &api);
    for uid in ["a", "b"] {
        life.objects.register(&robot(uid));
        life.objects.service_account(&robot(uid)).await.unwrap();
    }
    settle().await;
    life.objects.unregister(&PodUid::new("a"));
    settle().await;
    assert!(world.record(KEY).is_some());
    life.objects.unregister(&PodUid::new("b"));
    settle().await;
    assert!(world.record(KEY).is_none());
}

#[tokio::test(start_paused = true)]
async fn nobody_is_notified_of_a_token_that_nobody_keeps() {
    let (world, api) = (World::new(), cluster());
    let life = start(&world, &api);
    life.objects.register(&robot("a"));
    let mut changes = life.objects.changes();
    let token = life.objects.passing_token(&robot("a"), "registry").await;
    let token = token.unwrap().token;
    let (_, audiences) = api.token_owner(&token).unwrap();
    assert_eq!(audiences, ["registry"]);
    assert_eq!(life.objects.next_refresh(&PodUid::new("a")), None);
    tokio::time::sleep(Duration::from_secs(4 * 3600)).await;
    while let Ok(change) = changes.try_recv() {
        assert_ne!(change.kind, "Token");
    }
    let later = life.objects.passing_token(&robot("a"), "registry").await;
    assert_ne!(later.unwrap().token, token);
}

#[tokio::test(start_paused = true)]
async fn a_token_that_a_volume_shows_is_replaced_although_a_pull_has_the_same() {
    let (world, api) = (World::new(), cluster());
    let life = start(&world, &api);
    let pod = robot("a");
    life.objects.register(&pod);
    life.objects.passing_token(&pod, "registry").await.unwrap();
    // As a CSI driver requests it that names no duration.
    let spec = TokenRequestSpec {
        audiences: Some(vec!["registry".to_owned()]),
        ..TokenRequestSpec::default()
    };
    life.objects.token(&pod, &spec).await.unwrap();
    assert!(life.objects.next_refresh(&PodUid::new("a")).is_some());
}
