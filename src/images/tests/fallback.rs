//! Containers whose registry does not answer.

use super::access::{IMAGE, secret};
use super::*;
use crate::core::pull_fallback::PATIENCE;

const REFUSED: &str = "failed to do request: Head \"https://r.io/v2/team/app/manifests/1\": dial tcp 10.0.0.1:443: connect: connection refused";
const ID: &str = "id-of-r.io/team/app:1";

/// A node on which a container ran with [`IMAGE`], whose registry is away.
fn away(fallback: PullFallback) -> World {
    blocking::run_in_place_on_this_thread();
    let mut world = world(ImageConfig::default());
    let manager = ImageManager::new(
        ImageConfig::default(),
        world.clock.clone(),
        Metrics::default(),
    );
    world.manager = Arc::new(manager.falling_back(fallback));
    world.ran_with = Some(ID.to_owned());
    answer(&world, Some(REFUSED));
    let present = &world.service.0.present;
    present.lock().unwrap().insert(IMAGE.to_owned());
    world
}

fn answer(world: &World, error: Option<&str>) {
    *world.service.0.fail.lock().unwrap() = error.map(str::to_owned);
}

fn fallbacks(world: &World) -> usize {
    let reasons = world.reasons();
    reasons.iter().filter(|r| *r == "ImagePullFallback").count()
}

/// Returns the outcome of a start that follows one which failed while the registry still had its time.
async fn tried_twice(world: &World, asking: &Pod, secrets: &PullSecrets) -> Result<String, String> {
    let first = world.ensure_with(asking, secrets).await;
    first.expect_err("the registry has its time");
    tokio::time::advance(PATIENCE).await;
    let second = world.ensure_with(asking, secrets).await;
    second.map_err(|error| error.reason.as_str().to_owned())
}

#[tokio::test(start_paused = true)]
async fn a_container_starts_from_its_image_after_ten_silent_seconds_whatever_its_back_off() {
    let world = away(PullFallback::Offline);
    let asking = pod("u", IMAGE, "Always");
    for (millis, reason, pulls) in [
        (0, ImageErrorReason::ErrImagePull, 1),
        (9_999, ImageErrorReason::ImagePullBackOff, 1),
    ] {
        tokio::time::advance(Duration::from_millis(millis)).await;
        let error = world.ensure(&asking).await.unwrap_err();
        assert_eq!((error.reason, world.pulls()), (reason, pulls));
        let wait = error.retry_at.unwrap().until(world.clock.now());
        assert!(wait <= PATIENCE - Duration::from_millis(millis), "{wait:?}");
    }
    tokio::time::advance(Duration::from_millis(1)).await;
    // By the node's clock the back-off has not moved.
    assert_eq!(world.ensure(&asking).await.unwrap(), ID);
    assert_eq!((world.pulls(), fallbacks(&world)), (2, 1));
    let message = world.recorder.events().pop().unwrap().message;
    for part in [IMAGE, ID, REFUSED] {
        assert!(message.contains(part), "{message}");
    }
    assert!(world.record(IMAGE).backoffs.is_empty());
    answer(&world, None);
    let pulled = world.ensure(&asking).await.unwrap();
    assert_eq!(pulled, format!("ref-of-{IMAGE}"), "the registry is asked");
}

#[tokio::test(start_paused = true)]
async fn no_other_container_falls_back() {
    let none = PullSecrets::default();
    let waits = Err("ImagePullBackOff".to_owned());
    let asking = pod("u", IMAGE, "Always");

    let world = away(PullFallback::Never);
    assert_eq!(tried_twice(&world, &asking, &none).await, waits);

    let mut world = away(PullFallback::Offline);
    world.ran_with = None;
    assert_eq!(tried_twice(&world, &asking, &none).await, waits);

    let world = away(PullFallback::Offline);
    answer(&world, Some("r.io/team/app:1: not found"));
    assert_eq!(tried_twice(&world, &asking, &none).await, waits);

    let world = away(PullFallback::Offline);
    let (error, image) = ("failed to stat parent: no such file or directory", IMAGE);
    let (service, store, recorder) = (&world.service, &world.store, &world.recorder);
    let failed =
        world
            .manager
            .container_failed(&asking, ("c", image), error, service, store, recorder);
    failed.await.unwrap();
    let suspect = tried_twice(&world, &asking, &none).await;
    assert!(suspect.is_err(), "{suspect:?}");
    assert_eq!(fallbacks(&world), 0);
}

#[tokio::test(start_paused = true)]
async fn a_pod_falls_back_only_to_what_it_may_use() {
    let world = away(PullFallback::Offline);
    let (bob, none) = (secret("ns", "s", "s1", "bob"), PullSecrets::default());
    world.service.0.present.lock().unwrap().clear();
    answer(&world, None);
    let asking = |uid| pod(uid, IMAGE, "Always");
    world.ensure_with(&asking("a"), &bob).await.unwrap();
    answer(&world, Some(REFUSED));
    let fell_back = tried_twice(&world, &asking("a"), &bob).await;
    assert_eq!(fell_back, Ok(ID.to_owned()));
    world.ensure_with(&asking("b"), &none).await.unwrap_err();
    assert_eq!(fallbacks(&world), 1);
}

/// The content store of a containerd, with the directory of its snapshots in the fake runtime.
fn content_store(world: &World) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let content = root.path().join("io.containerd.content.v1.content");
    for part in ["ingest", "blobs/sha256"] {
        std::fs::create_dir_all(content.join(part)).unwrap();
    }
    let snapshots = root.path().join("snapshots");
    std::fs::create_dir(&snapshots).unwrap();
    *world.service.0.directory.lock().unwrap() = Some(snapshots);
    root
}

#[tokio::test(start_paused = true)]
async fn a_pull_that_hangs_is_given_up_after_ten_seconds_and_one_that_loads_is_not() {
    let world = away(PullFallback::Offline);
    let root = content_store(&world);
    let gate = Arc::new(Semaphore::new(0));
    *world.service.0.gate.lock().unwrap() = Some(gate);
    let asking = pod("u", IMAGE, "Always");
    for _ in 0..2 {
        let begun = tokio::time::Instant::now();
        assert_eq!(world.ensure(&asking).await.unwrap(), ID);
        let took = begun.elapsed();
        assert!(took >= PATIENCE && took < PATIENCE * 2, "{took:?}");
    }
    let preloaded = pod("other", IMAGE, "IfNotPresent");
    assert_eq!(world.ensure(&preloaded).await.unwrap(), ID, "for everybody");

    tokio::time::advance(Duration::from_secs(61)).await;
    let content = root.path().join("io.containerd.content.v1.content");
    let load = async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        let layer = content.join("ingest/1");
        std::fs::create_dir(&layer).unwrap();
        std::fs::write(layer.join("data"), "part").unwrap();
        tokio::time::sleep(Duration::from_secs(120)).await;
    };
    tokio::select! {
        got = world.ensure(&asking) => panic!("it still loads: {got:?}"),
        () = load => {}
    }
}

#[tokio::test(start_paused = true)]
async fn a_pull_under_way_is_waited_for_where_nobody_sees_what_arrives() {
    let world = away(PullFallback::Offline);
    *world.service.0.gate.lock().unwrap() = Some(Arc::new(Semaphore::new(0)));
    let asking = pod("u", IMAGE, "Always");
    let got = tokio::time::timeout(Duration::from_secs(120), world.ensure(&asking)).await;
    assert!(got.is_err(), "{got:?}");
}
