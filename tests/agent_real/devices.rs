//! Devices of a device plugin in a container of a real runtime.

use holdfast_testkit::containerd::Version;
use holdfast_testkit::device_plugin::DevicePlugin;
use serde_json::json;

use crate::agent_process::eventually;
use crate::world::{FOREVER, World};

const GPU: &str = "example.com/gpu";

/// Registers a plugin whose devices are `/dev/zero` of the host, and waits until the agent knows them.
fn plugin(rt: &tokio::runtime::Runtime, world: &World) -> DevicePlugin {
    let directory = world.root_dir().join("device-plugins");
    let plugin = rt.block_on(async {
        let plugin = DevicePlugin::start(directory.join("gpu.sock"), &["a", "b"]).unwrap();
        plugin.moves_to("/dev/zero");
        plugin.gives_no_cdi();
        let kubelet = directory.join("kubelet.sock");
        plugin.register(&kubelet, GPU).await.unwrap();
        plugin
    });
    eventually("the plugin's devices are known", || {
        let dump = world.try_dump(&["devices"])?;
        let rows = dump["tables"]["devices"].as_array().ok_or("no table")?;
        let mut rows = rows.iter();
        let is_known = rows.any(|row| row["key"] == GPU && row["ids"] == json!(["a", "b"]));
        is_known.then_some(()).ok_or_else(|| dump.to_string())
    });
    plugin
}

/// What a container sees of its device: the variable of the plugin, and a byte of the device.
fn seen(world: &World) -> (String, String) {
    let container = world.wait_running("web", "main");
    let script = "echo $IDS; head -c 1 /dev/b | od -An -tx1; echo > /dev/b; ls /dev/a";
    let (_, text) = world.exec(&container.id, &["sh", "-c", script]);
    let mut lines = text.lines().map(|line| line.trim().to_owned());
    let ids = lines.next().unwrap_or_default();
    let byte = lines.next().unwrap_or_default();
    let rest: Vec<String> = lines.collect();
    assert!(
        rest.len() == 1 && rest[0].contains("No such file"),
        "it has no other device: {text}"
    );
    (ids, byte)
}

#[test]
fn a_container_has_the_device_of_its_plugin_also_after_restarts_of_both() {
    let world = World::new(Version::Installed);
    world.configure("syncFrequency: 5s\n");
    let rt = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let agent = world.start();
    let first = plugin(&rt, &world);
    let mut pod = world.pod("web", "Always", &[("main", FOREVER)]);
    pod["spec"]["containers"][0]["resources"] = json!({"limits": {GPU: "1"}});
    world.add(&pod);
    let expected = ("b".to_owned(), "00".to_owned());
    assert_eq!(seen(&world), expected);
    assert_eq!(first.calls(), ["Allocate b", "PreStart b"]);
    let before = world.wait_running("web", "main");
    world.recorded();
    agent.kill9();
    first.stop();

    let _agent = world.start();
    let second = plugin(&rt, &world);
    assert_eq!(world.wait_running("web", "main"), before);
    assert!(second.calls().is_empty(), "nothing is asked again");
    world.kill(&before.id);
    eventually("it is another container", || {
        let now = world.try_one("web", "main")?;
        (now.id != before.id)
            .then_some(())
            .ok_or_else(|| format!("{now:?}"))
    });
    assert_eq!(seen(&world), expected);
    assert_eq!(second.calls(), ["PreStart b"]);
}
