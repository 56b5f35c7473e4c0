//! Pulls that the end of the agent cuts off.

use std::time::{Duration, Instant};

use holdfast_testkit::containerd::Version;
use serde_json::json;

use crate::registry::{Proxy, Registry, Weather};
use crate::world::World;

const SIZE: usize = 32 << 20;

/// R38: the agent is killed every few seconds while it pulls over a slow link. The registry sends each byte about once.
#[test]
fn r38_a_pull_goes_on_where_the_killed_agent_left_it() {
    let world = World::new(Version::Installed);
    let registry = Registry::start(false);
    registry.push_layers("big", "1", &[SIZE / 2, SIZE / 2]);
    let proxy = Proxy::start(registry.port);
    let image = format!("127.0.0.1:{}/big:1", proxy.port);
    // Both layers at once, in 8 s.
    proxy.set(Weather::Slow(SIZE / 16));
    world.add(&json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "big"},
        "spec": {"restartPolicy": "Never", "hostNetwork": true, "containers": [
            {"name": "only", "image": image},
        ]},
    }));
    let is_there = || {
        let images = world.runtime.ctr(&["images", "ls", "-q"]).unwrap();
        images.lines().any(|name| name == image)
    };
    let mut kills = 0;
    while !is_there() {
        assert!(
            kills < 60,
            "the pull does not end; {} bytes were sent",
            proxy.sent()
        );
        let agent = world.start();
        let (started, sent) = (Instant::now(), proxy.sent());
        // A loaded machine starts its pulls late; each run of the agent brings a part.
        while proxy.sent() < sent + SIZE as u64 / 8 && !is_there() {
            assert!(
                started.elapsed() < Duration::from_secs(120),
                "{}",
                agent.log()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        agent.kill9();
        kills += 1;
    }
    let sent = proxy.sent();
    println!("{kills} kills, {SIZE} bytes, {sent} sent");
    assert!(kills >= 4, "the agent was killed {kills} times only");
    assert!(
        sent * 10 <= SIZE as u64 * 11,
        "{sent} bytes were sent of an image of {SIZE}"
    );
}
