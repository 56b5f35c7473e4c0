//! Order, back-off and progress of pulls.

use super::*;
use crate::core::state::FactRecord;

fn messages(world: &World, reason: &str) -> Vec<String> {
    let events = world.recorder.events().into_iter();
    events
        .filter(|e| e.reason == reason)
        .map(|e| e.message)
        .collect()
}

#[tokio::test]
async fn the_back_off_doubles_to_five_minutes_and_begins_anew_after_a_quiet_time() {
    let world = world(ImageConfig::default());
    *world.service.0.fail.lock().unwrap() = Some("down".to_owned());
    let asking = pod("u", "x:1", "Always");
    for seconds in [10, 20, 40, 80, 160, 300, 300] {
        let error = world.ensure(&asking).await.unwrap_err();
        assert_eq!(error.reason, ImageErrorReason::ErrImagePull);
        let wait = error.retry_at.unwrap().until(world.clock.now());
        assert_eq!(wait, Duration::from_secs(seconds));
        world.clock.advance(wait - Duration::from_millis(1));
        let error = world.ensure(&asking).await.unwrap_err();
        assert_eq!(error.reason, ImageErrorReason::ImagePullBackOff);
        world.clock.advance(Duration::from_millis(1));
    }
    world.clock.advance(Duration::from_secs(600));
    let error = world.ensure(&asking).await.unwrap_err();
    let wait = error.retry_at.unwrap().until(world.clock.now());
    assert_eq!(wait, Duration::from_secs(10), "after ten quiet minutes");
}

#[tokio::test]
async fn the_reason_of_a_back_off_is_told_and_outlives_a_restart() {
    let first = world(ImageConfig::default());
    *first.service.0.fail.lock().unwrap() = Some("no such image".to_owned());
    let asking = pod("u", "x:1", "IfNotPresent");
    first.ensure(&asking).await.unwrap_err();
    let restarted = World {
        manager: Arc::new(ImageManager::new(
            ImageConfig::default(),
            first.clock.clone(),
            Metrics::default(),
        )),
        recorder: MemoryRecorder::default(),
        ..first
    };
    let error = restarted.ensure(&asking).await.unwrap_err();
    assert_eq!(
        error.message,
        "Back-off pulling image \"x:1\": ErrImagePull: no such image"
    );
    assert_eq!(
        messages(&restarted, "BackOff"),
        ["Back-off pulling image \"x:1\""]
    );
    let kept = |world: &World| {
        let state = world.store.snapshot();
        state
            .with_prefix::<FactRecord>("imagepullerrors/u/")
            .count()
    };
    assert_eq!(kept(&restarted), 1);
    restarted
        .manager
        .forget_pod(&restarted.store, &asking.uid())
        .await
        .unwrap();
    assert_eq!(kept(&restarted), 0, "a pod that is gone leaves nothing");
    restarted.ensure(&asking).await.unwrap_err();
    *restarted.service.0.fail.lock().unwrap() = None;
    restarted.clock.advance(Duration::from_secs(10));
    restarted.ensure(&asking).await.unwrap();
    assert_eq!(kept(&restarted), 0, "nor does one that has its image");
}

#[tokio::test]
async fn serial_pulls_come_in_the_order_asked_for_and_who_goes_away_drops_out() {
    let world = world(ImageConfig::default());
    let gate = Arc::new(Semaphore::new(0));
    *world.service.0.gate.lock().unwrap() = Some(gate.clone());
    let pods: Vec<Pod> = ["a:1", "b:1", "c:1", "d:1"]
        .into_iter()
        .map(|image| pod(image, image, "Always"))
        .collect();
    let mut pulls: Vec<_> = pods
        .iter()
        .map(|pod| Some(Box::pin(world.ensure(pod))))
        .collect();
    for pull in pulls.iter_mut().flatten() {
        // The intent is recorded, then the pull waits for its turn.
        while world.service.0.present.lock().unwrap().len() < 4 {
            if futures::poll!(&mut *pull).is_ready() {
                panic!("the gate is shut");
            }
            tokio::task::yield_now().await;
            let intents = world.store.snapshot();
            let under_way = intents
                .with_prefix::<FactRecord>("imagepullintents//")
                .count();
            let pulling = messages(&world, "Pulling").len();
            if pulling == under_way && pulling > 0 && futures::poll!(&mut *pull).is_pending() {
                break;
            }
        }
    }
    drop(pulls[1].take());
    gate.add_permits(4);
    let results = futures::future::join_all(pulls.into_iter().flatten()).await;
    assert!(results.iter().all(Result::is_ok));
    let order: Vec<String> = messages(&world, "Pulled")
        .iter()
        .map(|m| m.split('"').nth(1).unwrap().to_owned())
        .collect();
    assert_eq!(order, ["a:1", "c:1", "d:1"]);
    assert_eq!(world.pulls(), 3, "the dropped one was never begun");
}

#[tokio::test(start_paused = true)]
async fn a_long_pull_tells_each_minute_that_it_goes_on() {
    let world = world(ImageConfig::default());
    let gate = Arc::new(Semaphore::new(0));
    *world.service.0.gate.lock().unwrap() = Some(gate.clone());
    let asking = pod("u", "x:1", "Always");
    let open = async {
        tokio::time::sleep(Duration::from_secs(150)).await;
        gate.add_permits(1);
    };
    let (result, ()) = tokio::join!(world.ensure(&asking), open);
    result.unwrap();
    assert_eq!(
        messages(&world, "Pulling"),
        [
            "Pulling image \"x:1\"",
            "Still pulling image \"x:1\" after 1m0s",
            "Still pulling image \"x:1\" after 2m0s",
        ]
    );
    assert_eq!(
        messages(&world, "Pulled"),
        [
            "Successfully pulled image \"x:1\" in 2m30s (2m30s including waiting). Image size: 7 bytes."
        ]
    );
}

#[tokio::test]
async fn a_volume_asks_for_its_image_as_a_container_does() {
    let world = world(ImageConfig::default());
    let asking = pod("u", "x:1", "Never");
    let volume = |reference: &str, policy: Option<&str>| ImageVolumeSource {
        reference: Some(reference.to_owned()),
        pull_policy: policy.map(str::to_owned),
    };
    let ensure = async |volume: &ImageVolumeSource| {
        world
            .manager
            .ensure_volume(
                &asking,
                volume,
                PullInputs::default(),
                &world.service,
                &world.store,
                &world.recorder,
            )
            .await
    };
    let got = ensure(&volume("data:1", None)).await.unwrap();
    assert_eq!(got, "ref-of-data:1");
    let again = ensure(&volume("data:1", Some("Never"))).await.unwrap();
    assert_eq!(again, "id-of-data:1");
    let error = ensure(&volume("other:1", Some("Never"))).await.unwrap_err();
    assert_eq!(error.reason, ImageErrorReason::ErrImageNeverPull);
    let error = ensure(&ImageVolumeSource::default()).await.unwrap_err();
    assert_eq!(error.reason, ImageErrorReason::InvalidImageName);
}
