//! Tokens: cached, replaced in time, kept through outages, forgotten with their pod.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use k8s_openapi::api::authentication::v1::TokenRequestSpec;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use super::fake::Mode;
use super::{World, change, pod, settle};
use crate::objects::ObjectError;
use crate::types::{Clock, PodUid, Stamp};

fn spec(audience: &str) -> TokenRequestSpec {
    TokenRequestSpec {
        audiences: Some(vec![audience.to_owned()]),
        expiration_seconds: Some(3600),
        ..TokenRequestSpec::default()
    }
}

fn robot(uid: &str) -> Pod {
    pod(uid, json!({"serviceAccountName": "robot"}))
}

async fn pass(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn a_token_is_bound_to_its_pod_and_replaced_after_80_percent_of_its_life() {
    let world = World::new();
    let life = world.start();
    let objects = &life.objects;
    let mut changes = objects.changes();
    let robot = robot("a");
    objects.register(&robot);
    let token = objects.token(&robot, &spec("x")).await.unwrap();
    assert_eq!((token.token.as_str(), token.stale), ("token-1", false));
    assert_eq!(token.expires_ms, super::BASE_MS + 3_600_000);
    assert_eq!(
        world.fake.token_requests()[0],
        json!({"audiences": ["x"], "expirationSeconds": 3600, "boundObjectRef":
               {"apiVersion": "v1", "kind": "Pod", "name": "pod-a", "uid": "a"}})
    );
    let posted = world
        .fake
        .requests()
        .into_iter()
        .find(|line| line.starts_with("POST"));
    let path = "POST /api/v1/namespaces/ns/serviceaccounts/robot/token";
    assert_eq!(posted.as_deref(), Some(path));
    let left = objects.next_refresh(&PodUid::new("a")).unwrap();
    assert!((2870..=2880).contains(&left.as_secs()), "{left:?}");

    pass(2860).await;
    assert_eq!(
        objects.token(&robot, &spec("x")).await.unwrap().token,
        "token-1"
    );
    assert!(changes.try_recv().is_err());
    pass(25).await;
    assert_eq!(
        objects.next_refresh(&PodUid::new("a")),
        Some(Duration::ZERO)
    );
    let told = changes.try_recv().unwrap();
    assert_eq!(told, change("Token", "a"));
    assert_eq!(objects.pods_referring(&told), [PodUid::new("a")]);
    assert_eq!(
        objects.token(&robot, &spec("x")).await.unwrap().token,
        "token-2"
    );
    pass(120).await;
    assert!(changes.try_recv().is_err(), "told once");
}

#[tokio::test(start_paused = true)]
async fn a_long_token_is_replaced_after_a_day() {
    let world = World::new();
    world.fake.token_life(365 * 24 * 3600);
    let life = world.start();
    life.objects.register(&robot("a"));
    life.objects.token(&robot("a"), &spec("x")).await.unwrap();
    let left = life
        .objects
        .next_refresh(&PodUid::new("a"))
        .unwrap()
        .as_secs();
    assert!((24 * 3600 - 10..=24 * 3600).contains(&left), "{left}");
}

#[tokio::test(start_paused = true)]
async fn requests_at_the_same_time_are_one() {
    let world = World::new();
    world.fake.token_delay(Duration::from_secs(2));
    let life = world.start();
    life.objects.register(&robot("a"));
    let asking = (0..20).map(|_| {
        let objects = life.objects.clone();
        tokio::spawn(async move { objects.token(&robot("a"), &spec("x")).await.unwrap().token })
    });
    for asked in asking.collect::<Vec<_>>() {
        assert_eq!(asked.await.unwrap(), "token-1");
    }
    assert_eq!(world.fake.tokens_made(), 1);
    // Another audience, another pod, another token.
    life.objects.token(&robot("a"), &spec("y")).await.unwrap();
    life.objects.token(&robot("b"), &spec("x")).await.unwrap();
    assert_eq!(world.fake.tokens_made(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_token_that_cannot_be_replaced_is_used_to_its_end_and_then_stale() {
    for mode in [Mode::Down, Mode::Silent, Mode::Refusing(500)] {
        let world = World::new();
        let life = world.start();
        let objects = &life.objects;
        let robot = robot("a");
        objects.register(&robot);
        objects.token(&robot, &spec("x")).await.unwrap();
        world.fake.set(mode);
        if mode == Mode::Down {
            world.fake.connection().failed("gone");
        }
        pass(3000).await;
        let old = objects.token(&robot, &spec("x")).await.unwrap();
        assert_eq!(
            (old.token.as_str(), old.stale),
            ("token-1", false),
            "{mode:?}"
        );
        pass(700).await;
        let stale = objects.token(&robot, &spec("x")).await.unwrap();
        assert_eq!(
            (stale.token.as_str(), stale.stale),
            ("token-1", true),
            "{mode:?}"
        );

        let mut changes = objects.changes();
        world.fake.set(Mode::Up);
        world.fake.connection().answered();
        let told = tokio::time::timeout(Duration::from_secs(400), changes.recv()).await;
        assert_eq!(told.unwrap().unwrap(), change("Token", "a"), "{mode:?}");
        // A server that answered all the time is not asked again before the pause is over.
        pass(300).await;
        let new = objects.token(&robot, &spec("x")).await.unwrap();
        assert_eq!(
            (new.token.as_str(), new.stale),
            ("token-2", false),
            "{mode:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_in_trouble_is_not_asked_with_every_call() {
    let world = World::new();
    let life = world.start();
    life.objects.register(&robot("a"));
    life.objects.token(&robot("a"), &spec("x")).await.unwrap();
    world.fake.set(Mode::Refusing(500));
    pass(2900).await;
    let _ = world.fake.requests();
    for _ in 0..600 {
        life.objects.token(&robot("a"), &spec("x")).await.unwrap();
        pass(1).await;
    }
    let requests = world.fake.requests();
    let asked = requests
        .iter()
        .filter(|line| line.starts_with("POST"))
        .count();
    assert!((4..=9).contains(&asked), "{asked}");
}

#[tokio::test(start_paused = true)]
async fn a_refusal_is_not_answered_with_an_expired_token() {
    let world = World::new();
    let life = world.start();
    life.objects.register(&robot("a"));
    life.objects.token(&robot("a"), &spec("x")).await.unwrap();
    world.fake.set(Mode::Refusing(404));
    pass(3000).await;
    assert!(
        !life
            .objects
            .token(&robot("a"), &spec("x"))
            .await
            .unwrap()
            .stale
    );
    pass(700).await;
    let error = life
        .objects
        .token(&robot("a"), &spec("x"))
        .await
        .unwrap_err();
    assert!(matches!(error, ObjectError::Refused { .. }), "{error}");
    let error = life
        .objects
        .token(&robot("b"), &spec("x"))
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("ns/robot of pod pod-b: 404"),
        "{error}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_reboot_without_the_api_server_finds_the_token_on_record() {
    for (passed, stale) in [(600, false), (7200, true)] {
        let mut world = World::new();
        let life = world.start();
        life.objects.register(&robot("a"));
        life.objects.token(&robot("a"), &spec("x")).await.unwrap();
        settle().await;
        life.end().await;
        let keys = world.keys();
        assert!(
            keys.len() == 1 && keys[0].starts_with("tokens/ns/a/"),
            "{keys:?}"
        );
        let record = world.record(&keys[0]).unwrap();
        assert!(record.encrypted);
        assert!(!String::from_utf8_lossy(&record.data).contains("token-1"));

        world.fake.reconnect();
        world.fake.set(Mode::Silent);
        let life = world.start_after_reboot(Duration::from_secs(passed));
        life.objects.register(&robot("a"));
        life.objects.sweep();
        settle().await;
        let token = life.objects.token(&robot("a"), &spec("x")).await.unwrap();
        assert_eq!(
            (token.token.as_str(), token.stale),
            ("token-1", stale),
            "after {passed} s"
        );
        assert_eq!(world.keys(), keys);
    }
}

#[tokio::test(start_paused = true)]
async fn a_restart_goes_on_with_the_recorded_token() {
    let world = World::new();
    let life = world.start();
    life.objects.register(&robot("a"));
    life.objects.token(&robot("a"), &spec("x")).await.unwrap();
    settle().await;
    life.end().await;
    let life = world.start();
    life.objects.register(&robot("a"));
    assert_eq!(
        life.objects
            .token(&robot("a"), &spec("x"))
            .await
            .unwrap()
            .token,
        "token-1"
    );
    assert_eq!(world.fake.tokens_made(), 1);
}

#[tokio::test(start_paused = true)]
async fn tokens_go_with_their_pod() {
    let world = World::new();
    let life = world.start();
    for uid in ["a", "b"] {
        life.objects.register(&robot(uid));
        life.objects.token(&robot(uid), &spec("x")).await.unwrap();
    }
    settle().await;
    assert_eq!(world.keys().len(), 2);
    life.objects.unregister(&PodUid::new("a"));
    // A request that was under way, or a late one, does not bring it back.
    life.objects.token(&robot("a"), &spec("x")).await.unwrap();
    settle().await;
    let keys = world.keys();
    assert!(
        keys.len() == 1 && keys[0].starts_with("tokens/ns/b/"),
        "{keys:?}"
    );
    assert_eq!(life.objects.next_refresh(&PodUid::new("a")), None);
    life.end().await;

    // Those of a pod that went while the agent did not run.
    let life = world.start();
    life.objects.sweep();
    settle().await;
    assert_eq!(world.keys(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_token_shows_in_no_debug_output() {
    let world = World::new();
    let life = world.start();
    life.objects.register(&robot("a"));
    let token = life.objects.token(&robot("a"), &spec("x")).await.unwrap();
    assert!(!format!("{token:?} {:?}", life.objects).contains("token-1"));
}

/// The clock of a machine that is set back while it runs.
struct SetBack {
    clock: Arc<dyn Clock>,
    back_ms: AtomicI64,
}

impl Clock for SetBack {
    fn now(&self) -> Stamp {
        let mut now = self.clock.now();
        now.wall_ms -= self.back_ms.load(Ordering::Relaxed);
        now
    }
}

/// A server on the same machine takes tokens of before for tokens of the future, and refuses them.
#[tokio::test(start_paused = true)]
async fn tokens_are_replaced_once_when_the_clock_is_set_back() {
    let world = World::new();
    let clock = Arc::new(SetBack {
        clock: Arc::clone(&world.clock),
        back_ms: AtomicI64::new(0),
    });
    let life = world.start_at(&(Arc::clone(&clock) as Arc<dyn Clock>));
    let objects = &life.objects;
    let robot = robot("a");
    objects.register(&robot);
    let newest = async || objects.token(&robot, &spec("x")).await.unwrap().token;
    assert_eq!(newest().await, "token-1");
    let mut changes = objects.changes();
    // Servers tolerate this much.
    clock.back_ms.store(55_000, Ordering::Relaxed);
    pass(10).await;
    assert_eq!(newest().await, "token-1");
    clock.back_ms.store(7_200_000, Ordering::Relaxed);
    pass(70).await;
    assert_eq!(changes.try_recv().unwrap(), change("Token", "a"));
    assert_eq!(newest().await, "token-2");
    pass(600).await;
    assert_eq!(newest().await, "token-2");
    assert!(changes.try_recv().is_err(), "told once");
}
