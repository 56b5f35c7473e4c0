//! Restarts of the runtime under running pods.

use std::collections::BTreeMap;
use std::fs;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use holdfast_testkit::containerd::Version;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::agent_process::eventually;
use crate::registry::{Proxy, Registry, Weather};
use crate::world::{FOREVER, World, ids};

const PODS: usize = 20;
const SIZE: usize = 16 << 20;

/// A pod with a network of its own, an init container, and probes of every kind.
fn probed(world: &World, name: &str, probe: usize) -> Value {
    let mut pod = world.pod(
        name,
        "Always",
        &[(
            "only",
            &format!("mkdir -p /www && httpd -p 8080 -h /www; touch /www/index.html\n{FOREVER}"),
        )],
    );
    let probe = match probe % 3 {
        0 => json!({"exec": {"command": ["true"]}}),
        1 => json!({"tcpSocket": {"port": 8080}}),
        _ => json!({"httpGet": {"port": 8080, "path": "/index.html"}}),
    };
    let mut with = probe;
    with["periodSeconds"] = json!(2);
    with["timeoutSeconds"] = json!(10);
    let container = &mut pod["spec"]["containers"][0];
    container["readinessProbe"] = with.clone();
    // One failure is enough to restart the container.
    with["failureThreshold"] = json!(1);
    with["initialDelaySeconds"] = json!(2);
    container["livenessProbe"] = with;
    let mut init = world.pod(name, "Always", &[("init", "exit 0")]);
    pod["spec"]["initContainers"] = json!([init["spec"]["containers"][0].take()]);
    pod["spec"]["hostNetwork"] = json!(false);
    pod
}

/// When the pod became ready for the last time; an error while it is not.
fn ready_since(world: &World, pod: &str) -> Result<String, String> {
    let status = world.status(pod)?;
    let ready = status["conditions"].as_array().into_iter().flatten();
    let mut ready = ready.filter(|c| c["type"] == "Ready" && c["status"] == "True");
    let since = ready
        .next_back()
        .and_then(|c| c["lastTransitionTime"].as_str());
    since.map(str::to_owned).ok_or_else(|| status.to_string())
}

/// Addresses that the network plugin has given out.
fn addresses(world: &World) -> Vec<Ipv4Addr> {
    let networks = fs::read_dir(world.runtime.dir().join("cni-data")).unwrap();
    let of = |network: fs::DirEntry| fs::read_dir(network.path()).unwrap();
    networks
        .flat_map(|network| of(network.unwrap()))
        .filter_map(|file| file.unwrap().file_name().to_str()?.parse().ok())
        .collect()
}

/// R37: containerd is restarted and killed under pods with probes, while pods start and an image is pulled. No container
/// restarts, no init container runs again, no pod becomes unready, and no address stays allocated.
#[test]
fn r37_restarts_of_the_runtime_disturb_no_pod() {
    let world = World::new(Version::Installed);
    let registry = Registry::start(false);
    registry.push_of("big", "1", SIZE);
    let proxy = Proxy::start(registry.port);
    proxy.set(Weather::Slow(SIZE / 16));
    let names: Vec<String> = (0..PODS).map(|n| format!("probed-{n}")).collect();
    for (number, name) in names.iter().enumerate() {
        world.add(&probed(&world, name, number));
    }
    let agent = world.start();
    let since: BTreeMap<&String, String> = names
        .iter()
        .map(|name| {
            let since = eventually(&format!("{name} is ready"), || ready_since(&world, name));
            (name, since)
        })
        .collect();
    let before = ids(&world.running());
    let image = format!("127.0.0.1:{}/big:1", proxy.port);
    world.add(&json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "big"},
        "spec": {"restartPolicy": "Never", "hostNetwork": true, "containers": [
            {"name": "only", "image": image},
        ]},
    }));
    for turn in 0..20_u64 {
        let name = format!("once-{turn}");
        let mut once = world.pod(&name, "Never", &[("only", "exit 0")]);
        once["spec"]["hostNetwork"] = json!(false);
        world.add(&once);
        // At every stage of that pod's start.
        std::thread::sleep(Duration::from_millis(60 * turn));
        let begun = Instant::now();
        if turn % 2 == 0 {
            world.runtime.signal_daemon(Signal::SIGKILL).unwrap();
        } else {
            world.runtime.stop_daemon().unwrap();
        }
        world.runtime.start_daemon().unwrap();
        println!(
            "turn {turn}: the runtime was away for {:?}",
            begun.elapsed()
        );
        // The runtime may have lost an exit code, and says so with 255.
        eventually(&format!("{name} has ended"), || {
            let status = world.status(&name)?;
            let code = &status["containerStatuses"][0]["state"]["terminated"]["exitCode"];
            let is_over = match status["phase"].as_str() {
                Some("Succeeded") => true,
                Some("Failed") => *code == 255 || *code == 128,
                _ => false,
            };
            is_over.then_some(()).ok_or_else(|| status.to_string())
        });
    }
    // Every probe runs once more.
    std::thread::sleep(Duration::from_secs(5));
    let mut after = ids(&world.running());
    after.retain(|(pod, _), _| names.contains(pod));
    assert_eq!(after, before, "{}", agent.log());
    for name in &names {
        assert_eq!(
            ready_since(&world, name).as_ref(),
            Ok(&since[name]),
            "{name} was not ready"
        );
        for container in ["init", "only"] {
            let starts = world.lines(&format!("{name}.{container}"));
            assert_eq!(starts.len(), 1, "{name} {container}: {starts:?}");
        }
    }
    eventually("the image is there", || {
        let images = world.runtime.ctr(&["images", "ls", "-q"]).unwrap();
        let found = images.lines().any(|name| name == image);
        found.then_some(()).ok_or(images)
    });
    let sent = proxy.sent();
    println!("{sent} bytes sent of an image of {SIZE}");
    assert!(
        sent * 10 <= SIZE as u64 * 13,
        "{sent} bytes were sent of an image of {SIZE}"
    );
    for turn in 0..20 {
        let name = format!("once-{turn}");
        let starts = world.lines(&format!("{name}.only"));
        let journal = world.journal(&name);
        assert!(
            starts.len() <= 1,
            "{name} ran twice: {starts:?}\n{journal:?}"
        );
        let phase = world.status(&name).unwrap()["phase"].clone();
        assert!(
            phase != "Succeeded" || starts.len() == 1,
            "{name} did not run: {journal:?}"
        );
        world.delete(&name);
    }
    world.delete("big");
    eventually("no address stays allocated", || {
        let given = addresses(&world);
        if given.len() == PODS {
            return Ok(());
        }
        Err(format!("{given:?}\n{:?}", world.sandboxes()))
    });
}
