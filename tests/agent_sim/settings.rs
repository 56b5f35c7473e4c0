//! Settings that only a running agent shows to have an effect.

use holdfast::kuberuntime::cri::v1;

use crate::cluster::NODE;
use crate::restart::{assert_nothing_wrong, exits};
use crate::world::{World, spec};

fn dead(w: &World) -> usize {
    let all = w.fake.containers();
    let is_dead = |c: &&v1::Container| c.state() == v1::ContainerState::ContainerExited;
    all.iter().filter(is_dead).count()
}

#[tokio::test(start_paused = true)]
async fn maximum_dead_containers_is_for_the_whole_node() {
    for (most, left) in [(None, 4), (Some(1), 1)] {
        let mut w = World::new();
        w.config.container_gc.max_total = most;
        w.behave(|_, _| exits(0, 1));
        for pod in ["a", "b", "c", "d"] {
            w.manifest(pod, &spec("Never", ""));
        }
        w.start().await;
        w.until("all have run", 60, |w| {
            ["a", "b", "c", "d"]
                .iter()
                .all(|pod| w.phase(pod) == "Succeeded")
        })
        .await;
        w.pass(180).await;
        assert_eq!(dead(&w), left, "{most:?}");
        assert_nothing_wrong(&w);
    }
}

#[tokio::test(start_paused = true)]
async fn the_node_has_room_for_as_many_pods_as_its_cores_may_have() {
    let mut w = World::with_api();
    w.config.kubelet.pods_per_core = 3;
    w.start().await;
    w.joined().await;
    w.pass(5).await;
    let node = w.api().get_json("nodes", "", NODE).unwrap();
    let count = |name: &str| -> u32 {
        let capacity = &node["status"]["capacity"][name];
        capacity.as_str().unwrap().parse().unwrap()
    };
    assert_eq!(count("pods"), 110.min(3 * count("cpu")));
    // As many as there is room for are admitted.
    let room = usize::try_from(count("pods")).unwrap();
    for n in 0..room + 2 {
        w.create(&format!("pod{n}"), &spec("Always", ""));
    }
    w.until("all were decided about", 60, |w| {
        (0..room + 2).all(|n| !w.shown_phase(&format!("pod{n}")).is_empty())
    })
    .await;
    w.pass(30).await;
    let refused =
        (0..room + 2).filter(|n| w.shown(&format!("pod{n}"))["status"]["reason"] == "OutOfpods");
    assert_eq!(refused.count(), 2);
}
