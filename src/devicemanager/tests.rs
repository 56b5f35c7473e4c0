//! The manager with fake plugins on real sockets.

use holdfast_testkit::device_plugin::{Answer, DevicePlugin};
use serde_json::json;

use super::*;
use crate::types::{BootId, SystemClock};

const GPU: &str = "example.com/gpu";
const NIC: &str = "example.com/nic";
const ANY_NODE: Align<'_> = &|_| Ok(None);
const PATIENCE: Duration = Duration::from_secs(20);

/// A node whose agent may start again.
struct World {
    dir: tempfile::TempDir,
    store: Store,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
}

impl World {
    fn new() -> Self {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::new(BootId(1)));
        Self {
            dir: tempfile::tempdir().unwrap(),
            store: Store::in_memory(Arc::clone(&clock)),
            clock,
            metrics: Metrics::default(),
        }
    }

    fn agent(&self, readiness: DeviceReadiness) -> DeviceManager {
        DeviceManager::new(DeviceManagerOptions {
            store: self.store.clone(),
            clock: Arc::clone(&self.clock),
            metrics: self.metrics.clone(),
            readiness,
        })
    }

    /// A plugin that has registered and listed its devices.
    async fn plugin(&self, agent: &DeviceManager, resource: &str, ids: &[&str]) -> DevicePlugin {
        let socket = self.dir.path().join(resource.replace('/', "-"));
        let plugin = DevicePlugin::start(socket, ids).unwrap();
        self.register(agent, resource, &plugin).await;
        plugin
    }

    async fn register(&self, agent: &DeviceManager, resource: &str, plugin: &DevicePlugin) {
        let versions = ["v1beta1".to_owned()];
        let socket = plugin.socket();
        agent.register(resource, socket, &versions).await.unwrap();
        shows(agent, resource, |amount| amount.allocatable > 0).await;
    }
}

async fn shows(
    agent: &DeviceManager,
    resource: &str,
    is_so: impl Fn(&devices::Amount) -> bool,
) -> devices::Amount {
    let mut amounts = agent.amounts();
    let found = amounts.wait_for(|amounts| amounts.get(resource).is_some_and(&is_so));
    let found = tokio::time::timeout(PATIENCE, found).await;
    found.expect("the amounts come").unwrap()[resource]
}

fn pod(uid: &str, resource: &str, count: u32) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": uid, "namespace": "ns", "uid": uid},
        "spec": {"containers": [{"name": "main", "resources": {"limits": {resource: count.to_string()}}}]},
    }))
    .unwrap()
}

async fn first_start(agent: &DeviceManager, pod: &Pod) -> Readiness {
    let ready = agent.ready(pod, true, &["main"], ANY_NODE);
    let ready = tokio::time::timeout(PATIENCE, ready).await;
    ready.expect("the pod is not held up").unwrap()
}

fn recorded(world: &World) -> PluginRecord {
    let state = world.store.snapshot();
    let mut all = PluginRecord::all(&state);
    all.next().unwrap().1
}

fn ids(agent: &DeviceManager, pod: &Pod, resource: &str) -> Vec<String> {
    let held = agent.held(pod).unwrap();
    held.ids("main", resource).cloned().collect()
}

#[tokio::test]
async fn a_pod_has_its_devices_over_a_restart_and_nothing_is_asked_again() {
    let world = World::new();
    let agent = world.agent(DeviceReadiness::Fail);
    let plugin = world.plugin(&agent, GPU, &["a", "b", "c"]).await;
    let pod = pod("u1", GPU, 2);
    assert_eq!(first_start(&agent, &pod).await, Readiness::Ready);
    assert_eq!(plugin.calls(), ["Allocate b,c"], "those it prefers");
    let granted = agent.granted(&pod, "main").unwrap();
    assert_eq!(granted.envs["IDS"], "b,c");
    assert_eq!(granted.devices[1].container_path, "/dev/c");
    assert_eq!(granted.cdi, ["v/c=0"]);
    agent.pre_start(&pod, "main").await.unwrap();
    assert_eq!(plugin.calls(), ["PreStart b,c"]);
    assert_eq!(first_start(&agent, &pod).await, Readiness::Ready);

    // The container runs while the agent starts again, and is restarted before the plugin is back.
    assert_eq!(recorded(&world).lost, None);
    let agent = world.agent(DeviceReadiness::Fail);
    let record = recorded(&world);
    assert!(
        record.lost.is_some() && record.socket.is_empty(),
        "{record:?}"
    );
    assert_eq!(record.devices.len(), 3, "they are kept");
    assert_eq!(
        shows(&agent, GPU, |_| true).await,
        devices::Amount::default()
    );
    agent.resume(|uid, container| uid.as_str() == "u1" && container == "main");
    let ready = agent.ready(&pod, false, &["main"], ANY_NODE).await.unwrap();
    assert_eq!(ready, Readiness::Ready);
    assert_eq!(agent.granted(&pod, "main"), Ok(granted));
    let error = agent.pre_start(&pod, "main").await.unwrap_err();
    assert!(error.contains("endpoint not found"), "{error}");
    world.register(&agent, GPU, &plugin).await;
    assert_eq!(recorded(&world).lost, None);
    agent.pre_start(&pod, "main").await.unwrap();
    assert_eq!(plugin.calls(), ["PreStart b,c"]);
}

#[tokio::test]
async fn a_pod_that_starts_again_without_its_plugin_fails_or_waits_for_the_same_devices() {
    let world = World::new();
    let agent = world.agent(DeviceReadiness::Fail);
    let plugin = world.plugin(&agent, GPU, &["a", "b"]).await;
    let pod = pod("u1", GPU, 1);
    assert_eq!(first_start(&agent, &pod).await, Readiness::Ready);
    let had = ids(&agent, &pod, GPU);
    plugin.calls();

    let agent = world.agent(DeviceReadiness::Fail);
    let Readiness::Refused(why) = agent.ready(&pod, false, &["main"], ANY_NODE).await.unwrap()
    else {
        panic!("the pod goes on");
    };
    let expected = format!(
        "Allocate failed due to no healthy devices present; cannot allocate unhealthy devices {GPU}, which is unexpected"
    );
    assert_eq!(why, expected);

    let agent = world.agent(DeviceReadiness::Wait);
    let waits = |ready| matches!(ready, Readiness::Waiting(_));
    assert!(waits(
        agent.ready(&pod, false, &["main"], ANY_NODE).await.unwrap()
    ));
    plugin.list(&["a"]);
    world.register(&agent, GPU, &plugin).await;
    assert!(
        waits(agent.ready(&pod, false, &["main"], ANY_NODE).await.unwrap()),
        "another device"
    );
    plugin.list(&["a", "b"]);
    shows(&agent, GPU, |amount| amount.capacity == 2).await;
    let changed = tokio::time::timeout(PATIENCE, agent.changed())
        .await
        .unwrap();
    assert!(changed.contains(&pod.uid()));
    let ready = agent.ready(&pod, false, &["main"], ANY_NODE).await.unwrap();
    assert_eq!(ready, Readiness::Ready);
    assert_eq!(ids(&agent, &pod, GPU), had);
    assert!(plugin.calls().is_empty());
}

#[tokio::test]
async fn an_allocation_that_was_cut_off_is_asked_again_for_the_same_devices() {
    let world = World::new();
    let agent = world.agent(DeviceReadiness::Fail);
    let plugin = world.plugin(&agent, GPU, &["a", "b"]).await;
    let other = world.plugin(&agent, NIC, &["n"]).await;
    plugin.answers(Answer::Hang);
    let (first, second) = (pod("u1", GPU, 1), pod("u2", GPU, 1));
    let asked = tokio::time::timeout(
        Duration::from_millis(500),
        agent.ready(&first, true, &["main"], ANY_NODE),
    );
    assert!(asked.await.is_err(), "it hangs");
    assert_eq!(plugin.calls(), ["Allocate b"]);
    // Nobody else is held up, and nobody else gets the device.
    assert_eq!(
        first_start(&agent, &pod("u3", NIC, 1)).await,
        Readiness::Ready
    );
    assert_eq!(other.calls(), ["Allocate n"]);
    plugin.answers(Answer::Grant);
    assert_eq!(first_start(&agent, &second).await, Readiness::Ready);
    assert_eq!(plugin.calls(), ["Allocate a"]);

    // The plugin of a pod that was cut off is waited for.
    let agent = world.agent(DeviceReadiness::Fail);
    let waits = first_start(&agent, &first).await;
    assert!(matches!(waits, Readiness::Waiting(_)), "{waits:?}");
    world.register(&agent, GPU, &plugin).await;
    assert_eq!(first_start(&agent, &first).await, Readiness::Ready);
    assert_eq!(plugin.calls(), ["Allocate b"]);
}

#[tokio::test]
async fn pods_fail_when_devices_are_short_or_their_plugin_refuses() {
    let world = World::new();
    let agent = world.agent(DeviceReadiness::Wait);
    let plugin = world.plugin(&agent, GPU, &["a", "-b"]).await;
    for (uid, count, answer, expected) in [
        ("u1", 2, Answer::Grant, "Requested: 2, Available: 1"),
        (
            "u2",
            1,
            Answer::Refuse,
            "rpc error: code = Internal desc = broken",
        ),
        (
            "u3",
            1,
            Answer::Garbage,
            "Allocate returned invalid response",
        ),
    ] {
        plugin.answers(answer);
        let ready = first_start(&agent, &pod(uid, GPU, count)).await;
        let Readiness::Refused(why) = ready else {
            panic!("{uid}: {ready:?}");
        };
        assert!(why.starts_with("Allocate failed due to "), "{why}");
        assert!(
            why.contains(expected) && why.ends_with(", which is unexpected"),
            "{why}"
        );
        // Its records go with the pod.
        let key = devices::allocations_key(&pod(uid, GPU, count));
        let gone = Transaction::new().delete::<crate::core::state::FactRecord>(key);
        world.store.commit(gone).await.unwrap();
    }
    // Resources that no plugin has registered are not the manager's.
    let ready = first_start(&agent, &pod("u4", "example.com/unknown", 1)).await;
    assert_eq!(ready, Readiness::Ready);
}

// Invariant POD-13.
#[tokio::test]
async fn what_a_record_that_cannot_be_read_may_hold_is_given_to_nobody() {
    let world = World::new();
    let agent = world.agent(DeviceReadiness::Fail);
    let plugin = world.plugin(&agent, GPU, &["a", "b"]).await;
    let (first, second) = (pod("u1", GPU, 1), pod("u2", GPU, 1));
    assert_eq!(first_start(&agent, &first).await, Readiness::Ready);
    plugin.calls();

    let mut broken =
        crate::core::state::FactRecord::of(&devices::PodDevices::default(), world.clock.now());
    broken.data = b"{\"containers\":1}".to_vec();
    let key = devices::allocations_key(&first);
    let plugins = devices::plugin_key(GPU);
    let put = Transaction::new()
        .put(key.clone(), broken.clone())
        .put(plugins, broken);
    world.store.commit(put).await.unwrap();
    let agent = world.agent(DeviceReadiness::Fail);
    assert!(agent.knows(GPU), "nobody starts without its devices");
    world.register(&agent, GPU, &plugin).await;
    let waits = first_start(&agent, &second).await;
    assert!(matches!(waits, Readiness::Waiting(_)), "{waits:?}");
    let fails = agent
        .ready(&first, false, &["main"], ANY_NODE)
        .await
        .unwrap();
    assert!(matches!(fails, Readiness::Refused(_)), "{fails:?}");
    assert!(agent.pre_start(&first, "main").await.is_err());
    assert!(plugin.calls().is_empty());

    let gone = Transaction::new().delete::<crate::core::state::FactRecord>(key);
    world.store.commit(gone).await.unwrap();
    assert_eq!(first_start(&agent, &second).await, Readiness::Ready);
    // A pod that ran before its record was lost gets devices before its containers start again.
    assert_eq!(ids(&agent, &first, GPU), Vec::<String>::new());
    let ready = agent
        .ready(&first, false, &["main"], ANY_NODE)
        .await
        .unwrap();
    assert_eq!(ready, Readiness::Ready);
    assert_eq!(ids(&agent, &first, GPU).len(), 1);
    let third = agent
        .ready(&pod("u3", GPU, 1), false, &["main"], ANY_NODE)
        .await;
    let third = third.unwrap();
    assert!(matches!(third, Readiness::Waiting(_)), "{third:?}");
}

#[tokio::test]
async fn health_and_the_loss_of_a_plugin_show_in_amounts_and_statuses() {
    let world = World::new();
    let agent = world.agent(DeviceReadiness::Fail);
    // Equal IDs of two resources are two devices.
    let plugin = world.plugin(&agent, GPU, &["a", "b"]).await;
    let other = world.plugin(&agent, NIC, &["a"]).await;
    let (of_gpu, of_nic) = (pod("u1", GPU, 2), pod("u2", NIC, 1));
    for pod in [&of_gpu, &of_nic] {
        assert_eq!(first_start(&agent, pod).await, Readiness::Ready);
    }
    let health = |pod: &Pod| {
        let mut status: api::PodStatus =
            serde_json::from_value(json!({"containerStatuses": [{"name": "main"}]})).unwrap();
        agent.report(pod, &mut status);
        let container = &status.container_statuses.unwrap()[0];
        let resources = container.allocated_resources_status.clone().unwrap();
        let devices = resources.into_iter().flat_map(|r| r.resources.unwrap());
        devices
            .map(|d| format!("{} {}", d.resource_id, d.health.unwrap()))
            .collect::<Vec<_>>()
    };
    assert_eq!(health(&of_gpu), ["a Healthy", "b Healthy"]);
    plugin.list(&["-a"]);
    let amount = shows(&agent, GPU, |amount| amount.capacity == 1).await;
    assert_eq!(amount.allocatable, 0);
    assert_eq!(health(&of_gpu), ["a Unhealthy", "b Unknown"]);
    assert_eq!(health(&of_nic), ["a Healthy"]);

    plugin.list(&["a", "b"]);
    shows(&agent, GPU, |amount| amount.allocatable == 2).await;
    plugin.stop();
    let amount = shows(&agent, GPU, |amount| amount.allocatable == 0).await;
    assert_eq!(amount.capacity, 2);
    assert_eq!(health(&of_gpu), ["a Unknown", "b Unknown"]);
    let healthy = agent.healthy();
    assert_eq!(healthy.keys().collect::<Vec<_>>(), [NIC]);
    drop(other);
}

#[tokio::test]
async fn devices_of_running_pods_are_taken_over_from_a_kubelet_once() {
    let answer = proto::ContainerAllocateResponse {
        envs: [("IDS".to_owned(), "a".to_owned())].into(),
        ..proto::ContainerAllocateResponse::default()
    };
    let answer = prost::Message::encode_to_vec(&answer);
    let answer = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, answer);
    let entry = |uid: &str, ids: serde_json::Value, answer: &str| json!({"PodUID": uid, "ContainerName": "main", "ResourceName": GPU, "DeviceIDs": ids, "AllocResp": answer});
    let file = json!({"Data": {
        "PodDeviceEntries": [
            entry("u1", json!({"0": ["a"], "1": ["a"]}), &answer),
            entry("u2", json!({"-1": ["b"]}), "no base64"),
            entry("ended", json!({"-1": ["c"]}), &answer),
            entry("u1", json!(null), &answer),
        ],
        "RegisteredDevices": {GPU: ["a", "b", "c"], NIC: null, "cpu": []},
    }, "Checksum": 1});
    let checkpoint = KubeletCheckpoint::parse(file.to_string().as_bytes()).unwrap();
    for bad in ["", "[1]", r#"{"Data": {"PodDeviceEntries": 3}}"#] {
        assert!(KubeletCheckpoint::parse(bad.as_bytes()).is_err(), "{bad}");
    }
    let empty = KubeletCheckpoint::parse(br#"{"Data": {"PodDeviceEntries": null}}"#).unwrap();
    assert_eq!(empty, KubeletCheckpoint::default());

    let world = World::new();
    let agent = world.agent(DeviceReadiness::Fail);
    let running = |uids: &[&str]| -> Vec<_> {
        let of = uids.iter().map(|uid| (PodUid::new(*uid), "ns".to_owned()));
        of.collect()
    };
    let pods = running(&["u1", "u2", "other"]);
    let taken = agent.take_over(&checkpoint, &pods).await;
    assert_eq!(taken.unwrap(), [PodUid::new("u1"), PodUid::new("u2")]);
    assert!(agent.knows(GPU) && agent.knows(NIC) && !agent.knows("cpu"));
    let one = agent.held(&pod("u1", GPU, 1)).unwrap();
    assert_eq!(one.allocation("main", GPU).unwrap().ids["a"], [0, 1]);
    assert_eq!(
        agent.granted(&pod("u1", GPU, 1), "main").unwrap().envs["IDS"],
        "a"
    );
    let two = agent.held(&pod("u2", GPU, 1)).unwrap();
    assert!(!two.is_granted("main", GPU), "the plugin is asked again");

    // Nobody else gets them; those of the pod that has ended are free.
    agent.resume(|_, _| true);
    let plugin = world.plugin(&agent, GPU, &["a", "b", "c"]).await;
    let third = pod("u3", GPU, 1);
    assert_eq!(first_start(&agent, &third).await, Readiness::Ready);
    assert_eq!(ids(&agent, &third, GPU), ["c"]);
    assert_eq!(plugin.calls(), ["Allocate c"]);
    let again = world.agent(DeviceReadiness::Fail);
    assert!(again.knows(NIC), "also after a restart");
    let pods = running(&["u1", "u2", "ended"]);
    let taken = again.take_over(&checkpoint, &pods).await;
    assert_eq!(
        taken.unwrap(),
        [],
        "what is on record counts, and its devices are not given twice"
    );
}

#[tokio::test]
async fn the_newest_plugin_of_a_resource_wins() {
    let world = World::new();
    let agent = world.agent(DeviceReadiness::Fail);
    let former = world.plugin(&agent, GPU, &["a"]).await;
    let newest = DevicePlugin::start(world.dir.path().join("newest"), &["x", "y"]).unwrap();
    world.register(&agent, GPU, &newest).await;
    shows(&agent, GPU, |amount| amount.capacity == 2).await;
    former.stop();
    assert_eq!(
        first_start(&agent, &pod("u1", GPU, 2)).await,
        Readiness::Ready
    );
    assert_eq!(newest.calls(), ["Allocate x,y"]);
    let label = ResourceNameLabel {
        resource_name: GPU.to_owned(),
    };
    let registered = world
        .metrics
        .device_plugin_registrations
        .get_or_create(&label);
    assert_eq!(registered.get(), 2);
}

#[tokio::test]
async fn devices_of_a_plugin_that_registers_again_and_never_lists_are_not_allocated_for_ever() {
    let world = World::new();
    let agent = world.agent(DeviceReadiness::Fail);
    let _former = world.plugin(&agent, GPU, &["a"]).await;
    let silent = DevicePlugin::start(world.dir.path().join("silent"), &["a"]).unwrap();
    silent.lists_nothing();
    // The list of the one before counts at first.
    world.register(&agent, GPU, &silent).await;
    tokio::time::pause();
    tokio::time::advance(LIST_PATIENCE + Duration::from_secs(1)).await;
    let amount = shows(&agent, GPU, |amount| amount.allocatable == 0).await;
    assert_eq!(amount.capacity, 1);
    let Readiness::Refused(why) = first_start(&agent, &pod("u1", GPU, 1)).await else {
        panic!("nobody vouches for the device");
    };
    assert!(why.contains("no healthy devices present"), "{why}");
    assert_eq!(silent.calls(), [""; 0]);
}

#[tokio::test]
async fn bad_registrations_are_refused() {
    let world = World::new();
    let agent = world.agent(DeviceReadiness::Fail);
    let nobody = world.dir.path().join("nobody");
    let directory = world.dir.path().join("directory");
    std::fs::create_dir(&directory).unwrap();
    let file = world.dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let long = world.dir.path().join("x".repeat(120));
    for (resource, version, expected) in [
        (
            GPU,
            "v1alpha",
            "requested API version \"v1alpha\" is not supported",
        ),
        ("cpu", "v1beta1", "the ResourceName \"cpu\" is invalid"),
        ("gpu", "v1beta1", "the ResourceName \"gpu\" is invalid"),
        ("", "v1beta1", "the ResourceName \"\" is invalid"),
        (GPU, "v1beta1", "cannot connect to"),
    ] {
        let versions = [version.to_owned()];
        let refused = agent.register(resource, &nobody, &versions).await;
        let why = refused.unwrap_err();
        assert!(why.starts_with(expected), "{why}");
    }
    for (socket, expected) in [
        (&nobody, "No such file or directory"),
        (&directory, "it is a directory, not a socket"),
        (&file, "it is not a socket"),
        (
            &long,
            "the socket's file name has 120 bytes; give it a shorter one",
        ),
    ] {
        let versions = ["v1beta1".to_owned()];
        let why = agent.register(GPU, socket, &versions).await.unwrap_err();
        let named = format!("cannot connect to {}: ", socket.display());
        assert!(why.starts_with(&named) && why.contains(expected), "{why}");
    }
    assert!(!agent.knows(GPU));

    // A long path with a short name is no obstacle.
    let deep = world.dir.path().join("y".repeat(110));
    std::fs::create_dir(&deep).unwrap();
    let short = world.dir.path().join("short.sock");
    let plugin = DevicePlugin::start(&short, &["a"]).unwrap();
    std::fs::rename(&short, deep.join("gpu.sock")).unwrap();
    let versions = ["v1beta1".to_owned()];
    let registered = agent.register(GPU, &deep.join("gpu.sock"), &versions).await;
    registered.unwrap();
    plugin.stop();
}
