//! Static pods that follow one another under one name: a manifest that changes, or is removed and put back.

use std::time::Duration;

use holdfast::core::state::WorkerPhase;
use holdfast_testkit::fake_cri::Behaviour;
use tokio::time::Instant;

use crate::restart::{assert_nothing_wrong, node};
use crate::world::{World, spec};

/// How long containers take to end.
const TERM: Duration = Duration::from_secs(20);
/// The longest pause between the end of one pod and the start of the next.
const PAUSE: Duration = Duration::from_secs(1);

async fn up(w: &World) -> String {
    w.until("the pod runs", 30, |w| w.phase("web") == "Running")
        .await;
    w.pass(5).await;
    w.running("web").remove(0)
}

async fn terminating(w: &World) {
    w.until("it is being stopped", 10, |w| {
        matches!(w.worker("web").phase, WorkerPhase::Terminating { .. })
    })
    .await;
}

/// The former container ends, and then the next one starts without a pause.
async fn follows(w: &World, former: &str) {
    w.until("the former one has ended", 60, |w| {
        !w.running("web").iter().any(|id| id == former)
    })
    .await;
    let ended = Instant::now();
    w.until("the next one runs", 60, |w| w.running("web").len() == 1)
        .await;
    let took = ended.elapsed();
    assert!(took < PAUSE, "started {took:?} later\n{}", w.describe());
    assert_eq!(w.starts("web").len(), 2);
    assert_nothing_wrong(w);
}

#[tokio::test(start_paused = true)]
async fn a_changed_manifest_starts_its_pod_as_soon_as_the_former_one_has_ended() {
    let mut w = node(|_, _| Behaviour::SlowTerm(TERM)).await;
    w.manifest("web", &spec("Always", ""));
    w.start().await;
    let (former, uid) = (up(&w).await, w.uid("web"));
    w.manifest(
        "web",
        &spec("Always", r#","terminationGracePeriodSeconds":31"#),
    );
    follows(&w, &former).await;
    assert_ne!(w.uid("web"), uid);
}

#[tokio::test(start_paused = true)]
async fn a_manifest_that_is_put_back_starts_its_pod_as_soon_as_its_former_life_has_ended() {
    let mut w = node(|_, _| Behaviour::SlowTerm(TERM)).await;
    w.manifest("web", &spec("Always", ""));
    w.start().await;
    let (former, uid) = (up(&w).await, w.uid("web"));
    w.remove_manifest("web");
    terminating(&w).await;
    w.begins_anew(&uid);
    w.manifest("web", &spec("Always", ""));
    follows(&w, &former).await;
    assert_eq!(w.uid("web"), uid);
    w.pass(300).await;
    assert_eq!(w.starts("web").len(), 2, "and never again");
    assert_eq!(w.phase("web"), "Running");
}

/// The agent dies while the former life is being stopped, before or after the manifest is back.
#[tokio::test(start_paused = true)]
async fn restart_keeps_a_manifest_that_was_put_back_to_be_started_again() {
    for back_first in [true, false] {
        let mut w = node(|_, _| Behaviour::SlowTerm(TERM)).await;
        w.manifest("web", &spec("Always", ""));
        w.start().await;
        let (former, uid) = (up(&w).await, w.uid("web"));
        w.remove_manifest("web");
        terminating(&w).await;
        w.begins_anew(&uid);
        if !back_first {
            w.crash().await;
        }
        w.manifest("web", &spec("Always", ""));
        if back_first {
            w.pass(3).await;
            w.crash().await;
        }
        w.start().await;
        follows(&w, &former).await;
        assert_eq!(w.uid("web"), uid);
    }
}

#[tokio::test(start_paused = true)]
async fn the_mirror_pod_of_a_changed_manifest_comes_after_the_end_of_the_former_pod() {
    let mut w = World::with_api();
    w.behave(|_, _| Behaviour::SlowTerm(TERM));
    w.manifest("web", &spec("Always", ""));
    w.start().await;
    w.joined().await;
    let mirror = |w: &World| w.shown("web-sim")["metadata"]["uid"].clone();
    w.until("its mirror pod is Running", 60, |w| {
        w.shown_phase("web-sim") == "Running"
    })
    .await;
    let (former, shown) = (up(&w).await, mirror(&w));
    w.manifest(
        "web",
        &spec("Always", r#","terminationGracePeriodSeconds":31"#),
    );
    terminating(&w).await;
    w.pass(TERM.as_secs() - 5).await;
    assert_eq!(mirror(&w), shown, "the former pod is still there");
    w.until("it has another mirror pod", 30, |w| {
        let mirror = mirror(w);
        mirror.is_string() && mirror != shown
    })
    .await;
    assert!(!w.running("web").contains(&former));
    w.until("that is Running", 30, |w| {
        w.shown_phase("web-sim") == "Running"
    })
    .await;
    assert_nothing_wrong(&w);
}
