//! Pressure of the node: which pod is evicted, and what a restart makes of it.

use std::collections::BTreeMap;
use std::sync::Mutex;

use futures::future::BoxFuture;
use holdfast::core::pressure::{Figure, Observations, PodUse, Signal};
use holdfast::eviction::{Figures, UsageQuery};
use holdfast::types::PodUid;
use holdfast_testkit::fake_cri::Behaviour;

use crate::cluster::NODE;
use crate::restart::assert_nothing_wrong;
use crate::world::{World, spec};

const MI: u64 = 1 << 20;

type Observe = Box<dyn Fn() -> Observations + Send>;

/// What agents of a simulation see of their machine: nothing, until a test says otherwise.
#[derive(Default)]
pub struct SimFigures {
    observe: Mutex<Option<Observe>>,
    usage: Mutex<BTreeMap<PodUid, PodUse>>,
}

impl Figures for SimFigures {
    fn observe(&self) -> BoxFuture<'_, Observations> {
        let observe = self.observe.lock().unwrap();
        let observed = observe.as_ref().map(|observe| observe());
        Box::pin(async { observed.unwrap_or_default() })
    }

    fn usage(&self, _: UsageQuery) -> BoxFuture<'_, Option<BTreeMap<PodUid, PodUse>>> {
        let usage = self.usage.lock().unwrap().clone();
        Box::pin(async { Some(usage) })
    }

    fn alarm(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::pending())
    }
}

/// Status and reason of the node's condition; empty before it has one.
fn memory_pressure(w: &World) -> String {
    let node = w.api().get_json("nodes", "", NODE).unwrap();
    let conditions = node["status"]["conditions"].as_array();
    let mut conditions = conditions.into_iter().flatten();
    let condition = conditions.find(|c| c["type"] == "MemoryPressure");
    condition.map_or_else(String::new, |condition| {
        let of = |field: &str| condition[field].as_str().unwrap().to_owned();
        format!("{} {}", of("status"), of("reason"))
    })
}

const SHORT: &str = "True KubeletHasInsufficientMemory";
const ENOUGH: &str = "False KubeletHasSufficientMemory";

/// R25: the pod with the largest usage ends, static and critical ones with a larger one stay. Later agents evict nobody
/// else, and the condition holds for the transition period.
#[tokio::test(start_paused = true)]
async fn restarts_under_pressure_evict_nobody_twice_and_keep_the_condition() {
    let mut w = World::with_api();
    w.behave(|_, _| Behaviour::RunForever);
    w.manifest("fixed", &spec("Always", ""));
    w.start().await;
    w.joined().await;
    w.create("small", &spec("Always", ""));
    w.create("large", &spec("Always", ""));
    w.create("critical", &spec("Always", r#","priority":2000000000"#));
    let others = ["fixed", "small", "critical"];
    w.until("all run", 60, |w| {
        let is_up = |pod| w.running(pod).len() == 1;
        is_up("large") && others.into_iter().all(is_up)
    })
    .await;
    w.until("the node has enough", 30, |w| memory_pressure(w) == ENOUGH)
        .await;
    for (pod, memory) in [
        ("fixed", 900),
        ("critical", 800),
        ("large", 500),
        ("small", 100),
    ] {
        let used = PodUse {
            memory: Some(memory * MI),
            ..PodUse::default()
        };
        w.figures.usage.lock().unwrap().insert(w.uid(pod), used);
    }
    let fake = w.fake.clone();
    *w.figures.observe.lock().unwrap() = Some(Box::new(move || {
        let is_there = !fake.running("large", "main").is_empty();
        let figure = Figure {
            available: if is_there { 50 * MI } else { 500 * MI },
            capacity: 1024 * MI,
        };
        Observations {
            figures: [(Signal::Memory, figure)].into(),
            disks: Default::default(),
        }
    }));
    w.until("the largest pod is evicted", 60, |w| {
        w.shown_phase("large") == "Failed"
    })
    .await;
    let large = w.shown("large")["status"].clone();
    assert_eq!(large["reason"], "Evicted", "{large}");
    assert_eq!(
        large["message"],
        "The node was low on resource: memory. Threshold quantity: 100Mi, available: 50Mi. "
    );
    w.until("the node shows it", 30, |w| memory_pressure(w) == SHORT)
        .await;
    for life in 0..4 {
        w.crash().await;
        w.start().await;
        let late = format!("late-{life}");
        w.create(&late, &spec("Always", ""));
        w.until("a pod without requests is refused", 30, |w| {
            w.shown_phase(&late) == "Failed"
        })
        .await;
        let status = w.shown(&late)["status"].clone();
        assert_eq!(
            (status["reason"].as_str(), status["message"].as_str()),
            (
                Some("Evicted"),
                Some("Pod was rejected: The node had condition: [MemoryPressure]. ")
            )
        );
        w.pass(20).await;
        assert_eq!(memory_pressure(&w), SHORT);
    }
    for pod in others {
        assert_eq!((w.running(pod).len(), w.starts(pod).len()), (1, 1), "{pod}");
    }
    assert_eq!(w.starts("large").len(), 1);
    w.until("the pressure is over", 360, |w| {
        memory_pressure(w) == ENOUGH
    })
    .await;
    assert_nothing_wrong(&w);
}
