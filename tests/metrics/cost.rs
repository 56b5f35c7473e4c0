//! What a scrape costs with a hundred pods.

use std::time::Instant;

use holdfast::stats::exposition::Format;
use holdfast::stats::summary::Summary;
use holdfast::stats::{Depth, Hierarchies, MAX_AGE, cadvisor, resource};

use crate::world::World;

const PODS: usize = 100;

#[tokio::test]
async fn a_scrape_of_a_hundred_pods_makes_a_handful_of_calls() {
    let world = World::new();
    let mut running = Vec::new();
    for number in 0..PODS {
        running.push(world.run_pod(number).await);
    }
    for with_cgroups in [true, false] {
        let mut tree = Hierarchies::default();
        if with_cgroups {
            for (number, (sandbox, container)) in running.iter().enumerate() {
                tree = world.cgroups(number, sandbox, container);
            }
        }
        let stats = world.stats(tree);
        for (name, depth) in [
            ("resource", Depth::CpuAndMemory),
            ("cadvisor", Depth::Full),
            ("summary", Depth::Full),
        ] {
            world.fake.clear_calls();
            let begun = Instant::now();
            let snapshot = stats.snapshot(depth).await;
            let collected = begun.elapsed();
            let text = match name {
                "resource" => Format::Text.of(resource::encode(&snapshot)),
                "cadvisor" => {
                    let machine = cadvisor::MachineFacts::read();
                    Format::Text.of(cadvisor::encode(&snapshot, &machine))
                }
                _ => serde_json::to_string(&Summary::of(&snapshot)).unwrap(),
            };
            let calls = world.fake.calls().len();
            println!(
                "{name}, {PODS} pods, cgroups: {with_cgroups}: collected in {collected:?}, written in {:?}, {} KiB, {calls} CRI calls",
                begun.elapsed() - collected,
                text.len() / 1024,
            );
            assert_eq!(snapshot.pods.len(), PODS);
            assert!(text.contains("pod-99"), "{text}");
            // However many pods there are.
            let most = match (name, with_cgroups) {
                ("resource", true) => 0,
                ("resource", false) => 1,
                _ => 4,
            };
            assert!(calls <= most, "{name}: {:?}", world.fake.calls());
            if name == "resource" {
                let series = text
                    .lines()
                    .filter(|l| l.starts_with("container_cpu_usage_seconds_total{"));
                assert_eq!(series.count(), PODS);
                tokio::time::sleep(MAX_AGE).await;
            }
        }
    }
}
