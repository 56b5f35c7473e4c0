//! The generator over a fake runtime, on simulated time.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use holdfast_testkit::fake_cri::{FakeCri, Fault};
use tokio_util::sync::DropGuard;

use super::*;
use crate::kuberuntime::cri::{CriTimeouts, v1};
use crate::kuberuntime::labels;
use crate::types::{BootId, Stamp};

struct TokioClock(Instant);

impl Clock for TokioClock {
    fn now(&self) -> Stamp {
        let ms = i64::try_from(self.0.elapsed().as_millis()).unwrap();
        Stamp {
            boot: BootId(1),
            boottime_ms: ms,
            wall_ms: ms,
        }
    }
}

struct World {
    fake: FakeCri,
    pleg: PlegHandle,
    events: mpsc::Receiver<PodLifecycleEvent>,
    _stop: DropGuard,
}

fn uid(n: usize) -> PodUid {
    PodUid::from(format!("u{n:03}"))
}

/// A generator that runs, over a runtime with a sandbox for each of `pods` pods. A call takes a millisecond, unless
/// `fault` says otherwise, by operation and number of the pod for inspections of sandboxes.
async fn world(
    pods: usize,
    fault: impl Fn(&str, Option<usize>) -> Option<Fault> + Send + Sync + 'static,
) -> World {
    let fake = FakeCri::new();
    let cri = CriClient::over(
        fake.channel(),
        "unix:///fake",
        CriTimeouts::default(),
        Metrics::default(),
    );
    let mut numbers = HashMap::new();
    for n in 0..pods {
        let label = |name: &str, value: String| (name.to_owned(), value);
        let config = v1::PodSandboxConfig {
            metadata: Some(v1::PodSandboxMetadata {
                name: format!("p{n}"),
                namespace: "default".to_owned(),
                uid: uid(n).to_string(),
                attempt: 0,
            }),
            labels: HashMap::from([
                label(labels::POD_UID, uid(n).to_string()),
                label(labels::POD_NAME, format!("p{n}")),
                label(labels::POD_NAMESPACE, "default".to_owned()),
            ]),
            ..Default::default()
        };
        let id = cri.run_pod_sandbox(config, "").await.unwrap();
        numbers.insert(id.to_string(), n);
    }
    fake.on_call(move |call| {
        let delay = Fault::Delay(Duration::from_millis(1));
        let number = numbers.get(&call.object).copied();
        Some(fault(call.operation, number).unwrap_or(delay))
    });
    let clock: Arc<dyn Clock> = Arc::new(TokioClock(Instant::now()));
    let options = PlegOptions {
        cri,
        store: Store::in_memory(Arc::clone(&clock)),
        runtime_state: RuntimeState::default(),
        metrics: Metrics::default(),
        evented: true,
    };
    let (generator, pleg, events) = Pleg::new(options, clock, [], Instant::now());
    let stop = CancellationToken::new();
    tokio::spawn(generator.run(stop.clone()));
    World {
        fake,
        pleg,
        events,
        _stop: stop.drop_guard(),
    }
}

impl World {
    /// Waits until the runtime has shown a pod since `than`.
    async fn seen(&self, n: usize, than: Instant, within: Duration) -> bool {
        let uid = uid(n);
        let seen = self.pleg.cache().get_newer_than(&uid, Some(than));
        match tokio::time::timeout(within, seen).await {
            Ok(seen) => !seen.unwrap().status.sandboxes.is_empty(),
            Err(_) => false,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_inspection_that_hangs_holds_up_no_other_pod() {
    let w = world(6, |operation, n| {
        (operation == "podsandbox_status" && n == Some(2)).then_some(Fault::Hang)
    })
    .await;
    let second = Duration::from_secs(1);
    let began = Instant::now();
    for n in [0, 1, 3, 4, 5] {
        assert!(w.seen(n, began, second).await, "pod {n} at first");
    }
    tokio::time::sleep(second).await;
    // Neither does it hold up what is asked for later, nor later lists.
    let asked = Instant::now();
    w.pleg.request(&uid(0));
    assert!(w.seen(0, asked, second).await, "a single pod");
    assert!(!w.seen(2, began, second).await);
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_a_pod_whose_inspection_hangs_is_told_so() {
    let w = world(1, |operation, _| {
        (operation == "podsandbox_status").then_some(Fault::Hang)
    })
    .await;
    let began = Instant::now();
    let error = w.pleg.status_newer_than(&uid(0), Some(began)).await;
    let error = error.unwrap_err().to_string();
    assert!(error.contains("no new status for 30s"), "{error}");
    assert_eq!(began.elapsed().as_secs(), 30);
    // The call itself has a deadline, too; it is the runtime's answer then.
    tokio::time::sleep(Duration::from_secs(100)).await;
    let error = w.pleg.status_newer_than(&uid(0), Some(began)).await;
    let error = error.unwrap_err().to_string();
    assert!(error.contains("did not answer within"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn more_inspections_that_hang_than_there_are_turns_hold_up_no_other_pod() {
    let w = world(12, |operation, n| {
        let hangs = operation == "podsandbox_status" && n.is_some_and(|n| n < 10);
        hangs.then_some(Fault::Hang)
    })
    .await;
    let began = Instant::now();
    for n in [10, 11] {
        assert!(w.seen(n, began, Duration::from_secs(20)).await, "pod {n}");
    }
}

#[tokio::test(start_paused = true)]
async fn every_request_is_answered_however_many_there_are() {
    const PODS: usize = 300;
    let w = world(PODS, |_, _| None).await;
    let began = Instant::now();
    for n in 0..PODS {
        assert!(w.seen(n, began, Duration::from_secs(10)).await, "pod {n}");
    }
    // The next list of all is minutes away.
    tokio::time::sleep(Duration::from_secs(30)).await;
    w.fake.clear_calls();
    let asked = Instant::now();
    for _ in 0..3 {
        for n in 0..PODS {
            w.pleg.request(&uid(n));
        }
    }
    for n in 0..PODS {
        assert!(w.seen(n, asked, Duration::from_secs(5)).await, "pod {n}");
    }
    // A list for each pod would cost the runtime the square of their number.
    let lists = w.fake.count("list_podsandbox");
    assert!(lists <= 3, "{lists} lists");
}

#[tokio::test(start_paused = true)]
async fn a_list_that_fails_loses_no_request() {
    const PODS: usize = 20;
    let lists = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&lists);
    let w = world(PODS, move |operation, _| {
        let broken = Fault::Error(tonic::Code::Internal, "broken".to_owned());
        let fails = operation == "list_podsandbox" && counted.fetch_add(1, Ordering::Relaxed) == 99;
        fails.then_some(broken)
    })
    .await;
    let began = Instant::now();
    for n in 0..PODS {
        assert!(w.seen(n, began, Duration::from_secs(10)).await, "pod {n}");
    }
    tokio::time::sleep(Duration::from_secs(30)).await;
    lists.store(99, Ordering::Relaxed);
    let asked = Instant::now();
    for n in 0..PODS {
        w.pleg.request(&uid(n));
    }
    for n in 0..PODS {
        assert!(w.seen(n, asked, Duration::from_secs(5)).await, "pod {n}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_sync_loop_receives_the_events_of_every_pod_however_many_come_at_once() {
    const PODS: usize = EVENT_CAPACITY + 200;
    let mut w = world(PODS, |_, _| None).await;
    let began = Instant::now();
    for n in 0..PODS {
        assert!(w.seen(n, began, Duration::from_secs(60)).await, "pod {n}");
    }
    let mut pods = BTreeSet::new();
    let second = Duration::from_secs(1);
    while let Ok(Some(event)) = tokio::time::timeout(second, w.events.recv()).await {
        pods.insert(event.pod);
    }
    assert_eq!(pods.len(), PODS);
}
