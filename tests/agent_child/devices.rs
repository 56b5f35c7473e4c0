//! Devices of a device plugin, across restarts of the agent.

use std::path::PathBuf;

use holdfast_testkit::device_plugin::DevicePlugin;

use super::*;

const GPU: &str = "example.com/gpu";

fn directory(node: &Node) -> PathBuf {
    node.site.root_dir().join("device-plugins")
}

/// A plugin beside the agent that runs, as real ones come back when they see the agent's socket made anew.
fn plugin(node: &Node, ids: &[&str]) -> DevicePlugin {
    let directory = directory(node);
    node.runtime.block_on(async {
        let plugin = DevicePlugin::start(directory.join("gpu.sock"), ids).unwrap();
        let kubelet = directory.join("kubelet.sock");
        plugin.register(&kubelet, GPU).await.unwrap();
        plugin
    })
}

fn manifest(node: &Node) {
    let wants = format!(r#""image":"{IMAGE}","resources":{{"limits":{{"{GPU}":"1"}}}}"#);
    let text =
        Node::manifest_text("web", "Always").replace(&format!(r#""image":"{IMAGE}""#), &wants);
    node.site.write_manifest("web.json", &text);
}

/// The devices that a container was made with, by its environment.
fn devices_of(node: &Node, id: &str) -> String {
    let config = node.fake.config(id).unwrap();
    assert_eq!(config.devices.len(), 1);
    assert_eq!(config.cdi_devices[0].name, "v/c=0");
    let environment = node.fake.environment(id).unwrap();
    let ids = environment.into_iter().find(|(name, _)| name == "IDS");
    String::from_utf8(ids.unwrap().1).unwrap()
}

/// Waits until the plugin's list is there: a static pod does not wait for it.
fn wait_listed(node: &Node, ids: &[&str]) {
    eventually("the plugin's devices are known", || {
        let dump = node.site.try_dump(&["devices"])?;
        let rows = dump["tables"]["devices"]
            .as_array()
            .ok_or("no table")?
            .clone();
        let row = rows
            .iter()
            .find(|row| row["key"] == GPU)
            .ok_or("no plugin")?;
        (row["ids"] == serde_json::json!(ids))
            .then_some(())
            .ok_or_else(|| row.to_string())
    });
}

/// A node with a pod that has device `b`.
fn node_with_devices(flags: &[&str]) -> (Node, Agent, DevicePlugin, String) {
    let node = Node::new(|_| Behaviour::RunForever);
    let agent = node.site.start_with(flags);
    let plugin = plugin(&node, &["a", "b"]);
    wait_listed(&node, &["a", "b"]);
    manifest(&node);
    let id = node.wait_running(1).remove(0);
    node.site.wait_phase("web", "Running");
    assert_eq!(plugin.calls(), ["Allocate b", "PreStart b"]);
    assert_eq!(devices_of(&node, &id), "b");
    (node, agent, plugin, id)
}

/// The machine's containers are gone when the agent starts again.
fn lose_containers(node: &Node, id: &str) {
    node.fake.exit(id, 137);
    for sandbox in node.fake.sandboxes() {
        node.fake.kill_sandbox(&sandbox.id);
    }
}

// Invariant POD-14.
#[test]
fn restart_keeps_devices_and_asks_nothing_again() {
    let (node, agent, first, id) = node_with_devices(&[]);
    eventually("the status has the device", || {
        let status = node.site.container_status("web", "main")?;
        let health = &status["allocatedResourcesStatus"][0]["resources"][0];
        let is_shown = health["resourceID"] == "b" && health["health"] == "Healthy";
        is_shown.then_some(()).ok_or_else(|| status.to_string())
    });
    node.site.recorded();
    agent.kill9();
    first.stop();
    let agent = node.site.start();
    node.assert_quiet(&agent);
    assert_eq!(node.running(), std::slice::from_ref(&id));
    // The container ends by itself after the plugin is back, and starts with the device it had.
    let second = plugin(&node, &["a", "b"]);
    wait_listed(&node, &["a", "b"]);
    assert!(second.calls().is_empty());
    node.fake.exit(&id, 1);
    let id = node.wait_running(1).remove(0);
    assert_eq!(devices_of(&node, &id), "b");
    assert_eq!(second.calls(), ["PreStart b"]);
}

#[test]
fn a_pod_that_starts_again_without_its_plugin_fails() {
    let (node, agent, plugin, id) = node_with_devices(&[]);
    node.site.recorded();
    agent.kill9();
    plugin.stop();
    lose_containers(&node, &id);
    let _agent = node.site.start();
    let status = node.site.wait_phase("web", "Failed");
    assert_eq!(status["reason"], "UnexpectedAdmissionError");
    let message = status["message"].as_str().unwrap();
    assert!(message.contains("no healthy devices present"), "{message}");
    assert_eq!(node.running(), Vec::<String>::new());
}

#[test]
fn a_pod_that_waits_for_its_plugin_starts_with_the_same_devices() {
    let wait = ["--device-readiness=Wait"];
    let (node, agent, first, id) = node_with_devices(&wait);
    node.site.recorded();
    agent.kill9();
    first.stop();
    lose_containers(&node, &id);
    let _agent = node.site.start_with(&wait);
    eventually("the pod waits", || {
        let dump = node.site.try_dump(&["events"])?;
        let rows = dump["tables"]["events"].as_array().ok_or("no table")?;
        let waits = rows.iter().any(|row| row["reason"] == "WaitingForDevices");
        waits.then_some(()).ok_or_else(|| "no event".to_owned())
    });
    assert_eq!(node.running(), Vec::<String>::new());
    let second = plugin(&node, &["a", "b"]);
    let id = node.wait_running(1).remove(0);
    assert_eq!(devices_of(&node, &id), "b");
    assert_eq!(second.calls(), ["PreStart b"]);
}

// Invariant POD-12.
#[test]
fn an_allocation_that_is_cut_off_is_asked_again_for_the_same_device() {
    let node = Node::new(|_| Behaviour::RunForever);
    let agent = node.site.start();
    let first = plugin(&node, &["a", "b"]);
    wait_listed(&node, &["a", "b"]);
    first.answers(holdfast_testkit::device_plugin::Answer::Hang);
    manifest(&node);
    eventually("the plugin is asked", || {
        let calls = first.calls();
        (calls == ["Allocate b"])
            .then_some(())
            .ok_or_else(|| format!("{calls:?}"))
    });
    agent.kill9();
    first.stop();
    let _agent = node.site.start();
    // One more device, which the plugin would like better.
    let second = plugin(&node, &["a", "b", "c"]);
    let id = node.wait_running(1).remove(0);
    assert_eq!(devices_of(&node, &id), "b");
    assert_eq!(second.calls(), ["Allocate b", "PreStart b"]);
}

// Invariant POD-14.
#[test]
fn a_device_that_returns_under_another_path_restarts_its_container_once() {
    let (node, agent, plugin, first) = node_with_devices(&[]);
    let host_path = |id: &str| node.fake.config(id).unwrap().devices[0].host_path.clone();
    assert_eq!(host_path(&first), "/dev/null");
    let unplug = |node_of_device: &str| {
        plugin.list(&["a"]);
        wait_listed(&node, &["a"]);
        plugin.moves_to(node_of_device);
        plugin.list(&["a", "b"]);
    };
    unplug("/dev/zero");
    eventually("the container is another one", || {
        let running = node.running();
        let is_other = running.len() == 1 && running[0] != first;
        is_other.then_some(()).ok_or_else(|| format!("{running:?}"))
    });
    let second = node.wait_running(1).remove(0);
    assert_eq!(host_path(&second), "/dev/zero");
    assert_eq!(devices_of(&node, &second), "b");
    assert_eq!(plugin.calls(), ["Allocate b", "PreStart b"]);

    // The same device node: nothing happens, nor after a restart of the agent.
    unplug("/dev/zero");
    eventually("the plugin is asked", || {
        let calls = plugin.calls();
        (calls == ["Allocate b"])
            .then_some(())
            .ok_or_else(|| format!("{calls:?}"))
    });
    node.site.recorded();
    agent.kill9();
    let agent = node.site.start();
    node.assert_quiet(&agent);
    assert_eq!(node.running(), [second]);
    let status = node.site.container_status("web", "main").unwrap();
    assert_eq!(status["restartCount"], 1);
}
