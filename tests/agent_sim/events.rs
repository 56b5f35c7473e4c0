//! How many events are told is what the configuration says.

use holdfast_testkit::fake_cri::Behaviour;

use crate::world::{World, spec};

const PODS: usize = 20;

/// Events in the journal after [`PODS`] pods have come up, and the seconds that took.
async fn told(qps: u32, burst: u32) -> (usize, usize) {
    let mut w = World::new();
    w.behave(|_, _| Behaviour::RunForever);
    w.config.kubelet.event_record_qps = qps;
    w.config.kubelet.event_burst = burst;
    for n in 0..PODS {
        w.manifest(&format!("p{n:02}"), &spec("Always", ""));
    }
    w.start().await;
    w.until("the pods run", 60, |w| w.running("p").len() == PODS)
        .await;
    let state = w.state();
    let whats = state.journal.values().map(|v| v.record.what.clone());
    let events = whats.filter(|what| what.starts_with("event ")).count();
    let seconds = w.began.elapsed().as_secs();
    w.stop().await;
    (events, usize::try_from(seconds).unwrap())
}

#[tokio::test(start_paused = true)]
async fn events_are_limited_to_the_configured_rate_and_burst() {
    let (all, _) = told(0, 5).await;
    assert!(
        all >= 2 * PODS,
        "{all}: nothing is left out without a limit"
    );
    let (few, seconds) = told(1, 5).await;
    assert!(
        (5..=6 + seconds).contains(&few) && few < all,
        "{few} of {all} events in {seconds} s"
    );
}
