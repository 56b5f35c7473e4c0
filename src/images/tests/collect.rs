//! Garbage collection over a fake runtime.

use tokio_util::sync::CancellationToken;

use super::super::collect::Collection;
use super::*;
use crate::core::image_gc::Policy;
use crate::core::image_gc::report::{Judged, Report};
use crate::core::state::{TerminationCause, Transaction, WorkerPhase, WorkerRecord};

const POLICY: Policy = Policy {
    minimum_age: Duration::from_secs(120),
    maximum_age: Duration::from_secs(600),
    high: 100,
    low: 80,
};

impl World {
    fn collection(&self, policy: Policy, wanted: &'static [&'static str]) -> Collection {
        Collection {
            policy,
            wanted: Arc::new(move || wanted.iter().map(|name| (*name).to_owned()).collect()),
            knows_pods: Arc::new(|| true),
            recorder: Arc::new(self.recorder.clone()),
            store: self.store.clone(),
        }
    }

    fn have(&self, images: &[&str]) {
        let mut present = self.service.0.present.lock().unwrap();
        present.extend(images.iter().map(|name| (*name).to_owned()));
    }

    fn use_only(&self, images: &[&str]) {
        *self.service.0.in_use.lock().unwrap() = images.iter().map(|n| (*n).to_owned()).collect();
    }

    fn left(&self) -> Vec<String> {
        let mut left: Vec<String> = self
            .service
            .0
            .present
            .lock()
            .unwrap()
            .iter()
            .cloned()
            .collect();
        left.sort_unstable();
        left
    }
}

#[tokio::test]
async fn a_name_that_the_runtime_cannot_resolve_keeps_no_other_image() {
    let w = world(ImageConfig::default());
    w.have(&["r.io/wanted:1", "r.io/unused:1"]);
    let unresolvable = &w.service.0.unresolvable;
    unresolvable
        .lock()
        .unwrap()
        .insert("MyRegistry/App".to_owned());
    let collection = w.collection(POLICY, &["MyRegistry/App", "r.io/wanted:1"]);
    w.manager.collect(&collection, &w.service).await.unwrap();
    w.clock.advance(Duration::from_secs(601));
    w.manager.collect(&collection, &w.service).await.unwrap();
    assert_eq!(w.left(), ["r.io/wanted:1"]);
}

#[tokio::test]
async fn a_pod_that_is_over_needs_no_image() {
    let w = world(ImageConfig::default());
    let pod = |phase: &str, annotations: serde_json::Value| -> Pod {
        serde_json::from_value(json!({
            "metadata": {"uid": "u", "annotations": annotations}, "status": {"phase": phase},
            "spec": {"containers": []},
        }))
        .unwrap()
    };
    let file = json!({"kubernetes.io/config.source": "file"});
    for (phase, annotations, over) in [
        ("Pending", json!({}), false),
        ("Running", json!({}), false),
        ("Succeeded", json!({}), true),
        ("Failed", json!({}), true),
        ("Failed", file.clone(), false),
    ] {
        let seen = w.store.snapshot();
        assert_eq!(is_over(&pod(phase, annotations), &seen), over, "{phase}");
    }
    // The API server may not know it yet.
    let now = w.clock.now();
    let record = WorkerRecord {
        full_name: "p_ns".to_owned(),
        queued: now,
        started: Some(now),
        phase: WorkerPhase::Finished {
            since: now,
            cause: TerminationCause::Completed,
        },
        deleted: false,
        restart_requested: false,
        runtime_only: false,
    };
    let recorded = Transaction::new().put("u", record);
    w.store.commit(recorded).await.unwrap();
    let seen = w.store.snapshot();
    assert!(is_over(&pod("Running", json!({})), &seen));
    assert!(!is_over(&pod("Running", file), &seen));
}

#[tokio::test]
async fn an_image_goes_when_it_is_too_old_and_nothing_needs_it() {
    let w = world(ImageConfig::default());
    w.have(&["docker.io/library/used:1", "r.io/wanted:1", "r.io/unused:1"]);
    w.use_only(&["docker.io/library/used:1"]);
    let collection = w.collection(POLICY, &["r.io/wanted:1"]);
    let round = w.manager.collect(&collection, &w.service).await.unwrap();
    assert_eq!(
        round.next_due, None,
        "what was never seen is as if used now"
    );
    let round = w.manager.collect(&collection, &w.service).await.unwrap();
    assert_eq!(round.next_due, Some(Duration::from_secs(600)));

    // A restart makes no image younger.
    let again = world(ImageConfig::default()).manager;
    w.clock.advance(Duration::from_secs(400));
    let round = w.manager.collect(&collection, &w.service).await.unwrap();
    assert_eq!(round.next_due, Some(Duration::from_secs(200)));
    drop(again);
    w.clock.advance(Duration::from_secs(201));
    w.use_only(&[]);
    w.manager.collect(&collection, &w.service).await.unwrap();
    // The one that was used until now has its whole age before it.
    assert_eq!(w.left(), ["docker.io/library/used:1", "r.io/wanted:1"]);
    let metrics = w.manager.metrics.encode().unwrap();
    assert!(
        metrics.contains("kubelet_image_garbage_collected_total{reason=\"age\"} 1"),
        "{metrics}"
    );

    // Nothing on record is left of it.
    w.clock.advance(Duration::from_secs(7200));
    let none = w.collection(POLICY, &[]);
    w.manager.collect(&none, &w.service).await.unwrap();
    assert_eq!(w.left(), ["r.io/wanted:1"]);
    w.clock.advance(Duration::from_secs(7200));
    w.manager.collect(&none, &w.service).await.unwrap();
    assert_eq!(
        w.store.snapshot().len_of(crate::core::state::Table::Images),
        0
    );
    assert_eq!(w.left(), [""; 0]);
}

#[tokio::test]
async fn space_is_freed_and_a_failure_is_told_of() {
    let w = world(ImageConfig::default());
    w.have(&["r.io/a:1", "r.io/b:1"]);
    // A full disk has no room at all: everything that may go goes, and that is not enough.
    *w.service.0.directory.lock().unwrap() = Some(PathBuf::from("/"));
    let full = Policy {
        high: 1,
        low: 0,
        ..POLICY
    };
    let collection = w.collection(full, &["r.io/b:1"]);
    w.manager
        .collect(&collection, &w.service)
        .await
        .unwrap_err();
    assert_eq!(w.left(), ["r.io/a:1", "r.io/b:1"], "too young");
    w.clock.advance(Duration::from_secs(120));
    let error = w
        .manager
        .collect(&collection, &w.service)
        .await
        .unwrap_err();
    assert_eq!(w.left(), ["r.io/b:1"]);
    assert!(error.to_string().contains("only found 7 bytes"), "{error}");
    assert_eq!(w.reasons(), ["FreeDiskSpaceFailed", "FreeDiskSpaceFailed"]);
}

#[tokio::test]
async fn a_full_disk_takes_every_image_that_nothing_needs() {
    let w = world(ImageConfig::default());
    w.have(&["r.io/used:1", "r.io/wanted:1", "r.io/a:1", "r.io/b:1"]);
    w.use_only(&["r.io/used:1"]);
    let collection = w.collection(POLICY, &["r.io/wanted:1"]);
    let remove = || w.manager.remove_all_unused(&collection, &w.service);
    assert_eq!(remove().await.unwrap(), 0, "seen for the first time");
    w.clock.advance(Duration::from_secs(119));
    assert_eq!(remove().await.unwrap(), 0, "too young");
    w.clock.advance(Duration::from_secs(1));
    let too_early = Collection {
        knows_pods: Arc::new(|| false),
        ..w.collection(POLICY, &[])
    };
    let removed = w.manager.remove_all_unused(&too_early, &w.service).await;
    assert_eq!(removed.unwrap(), 0, "who knows what pods want");
    assert_eq!(remove().await.unwrap(), 2);
    assert_eq!(w.left(), ["r.io/used:1", "r.io/wanted:1"]);
}

#[tokio::test]
async fn nothing_is_too_old_before_the_pods_are_known() {
    let w = world(ImageConfig::default());
    w.have(&["r.io/a:1"]);
    let too_early = Collection {
        knows_pods: Arc::new(|| false),
        ..w.collection(POLICY, &[])
    };
    w.manager.collect(&too_early, &w.service).await.unwrap();
    w.clock.advance(Duration::from_secs(601));
    let round = w.manager.collect(&too_early, &w.service).await.unwrap();
    assert_eq!(w.left(), ["r.io/a:1"]);
    assert_eq!(round.next_due, Some(Duration::ZERO), "its time counts");
    let collection = w.collection(POLICY, &[]);
    w.manager.collect(&collection, &w.service).await.unwrap();
    assert_eq!(w.left(), [""; 0]);
}

#[tokio::test]
async fn an_image_that_cannot_be_removed_keeps_its_age() {
    let w = world(ImageConfig::default());
    w.have(&["r.io/a:1"]);
    let collection = w.collection(POLICY, &[]);
    w.manager.collect(&collection, &w.service).await.unwrap();
    let before = w.record("id-of-r.io/a:1");
    w.clock.advance(Duration::from_secs(601));
    *w.service.0.fail_removal.lock().unwrap() = true;
    w.manager.collect(&collection, &w.service).await.unwrap();
    assert_eq!(w.record("id-of-r.io/a:1"), before);
    *w.service.0.fail_removal.lock().unwrap() = false;
    w.manager.collect(&collection, &w.service).await.unwrap();
    assert_eq!(w.left(), [""; 0], "without waiting again");
}

#[tokio::test(start_paused = true)]
async fn the_second_failure_in_a_row_is_an_event() {
    blocking::run_in_place_on_this_thread();
    let w = world(ImageConfig::default());
    let fail = |fails| *w.service.0.fail_list.lock().unwrap() = fails;
    let token = CancellationToken::new();
    let manager = Arc::clone(&w.manager);
    let run = manager.run_collection(w.collection(POLICY, &[]), w.service.clone(), token.clone());
    let rounds = async {
        // A round every five minutes, the first at once; between them, what the next one meets.
        tokio::time::sleep(Duration::from_secs(150)).await;
        for (fails, events) in [(true, 0), (false, 0), (true, 0), (true, 1)] {
            fail(fails);
            tokio::time::sleep(Duration::from_secs(300)).await;
            assert_eq!(w.reasons().len(), events, "{:?}", w.reasons());
        }
        token.cancel();
    };
    tokio::join!(run, rounds);
    let events = w.recorder.events();
    assert_eq!(events[0].reason, "ImageGCFailed");
    assert!(
        events[0].message.contains("the list broke"),
        "{}",
        events[0].message
    );
}

#[tokio::test]
async fn it_is_on_record_why_an_image_is_kept_and_which_goes_next() {
    let w = world(ImageConfig::default());
    w.have(&["r.io/used:1", "r.io/wanted:1", "r.io/a:1", "r.io/b:1"]);
    w.use_only(&["r.io/used:1", "r.io/b:1"]);
    let collection = w.collection(POLICY, &["r.io/wanted:1"]);
    w.manager.collect(&collection, &w.service).await.unwrap();
    w.clock.advance(Duration::from_secs(100));
    w.use_only(&["r.io/used:1"]);
    w.manager.collect(&collection, &w.service).await.unwrap();
    w.clock.advance(Duration::from_secs(10));
    w.manager.collect(&collection, &w.service).await.unwrap();
    let report = Report::of(&w.store.snapshot());
    let of = |name: &str| {
        let named = |image: &&Judged| image.names.iter().any(|n| n == name);
        let image = report.images.iter().find(named).unwrap();
        (image.kept.as_deref(), image.order)
    };
    assert_eq!(
        of("r.io/used:1"),
        (Some("a container or a sandbox uses it"), None)
    );
    assert_eq!(of("r.io/wanted:1"), (Some("a pod names it"), None));
    assert_eq!(of("r.io/a:1"), (None, Some(1)));
    assert_eq!(of("r.io/b:1"), (None, Some(2)), "it was used longer");
}
