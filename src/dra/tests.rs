//! The manager with fake drivers on real sockets.

use std::time::Duration;

use futures::FutureExt;
use holdfast_testkit::dra_driver::{DraAnswer, DraDriver};
use serde_json::json;

use super::*;
use crate::apiserver::testkit::FakeApi;
use crate::core::claims::cdi_devices;
use crate::types::SystemClock;
use crate::volumemanager::csi::registry::{Drivers, DriversOptions, Plugin as Registering};

const GPU: &str = "gpu.example.com";
const NIC: &str = "nic.example.com";
const PATIENCE: Duration = Duration::from_secs(20);
const V1: &str = "v1.DRAPlugin";

/// A node whose agent may start again.
struct World {
    dir: tempfile::TempDir,
    store: Store,
    api: FakeApi,
    metrics: Metrics,
}

impl World {
    fn new() -> Self {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::new(BootId(1)));
        Self {
            dir: tempfile::tempdir().unwrap(),
            store: Store::in_memory(clock),
            api: FakeApi::new(),
            metrics: Metrics::default(),
        }
    }

    fn agent(&self, boot: u64) -> DraManager {
        DraManager::new(DraOptions {
            store: self.store.clone(),
            clock: Arc::new(SystemClock::new(BootId(boot))),
            metrics: self.metrics.clone(),
            api: Some(self.api.client.clone()),
            node_name: "n1".to_owned(),
            node: NodeObject::default(),
        })
    }

    fn driver(&self, file: &str) -> DraDriver {
        DraDriver::start(self.dir.path().join(file)).unwrap()
    }

    /// A claim of these drivers that is reserved for pods.
    fn claim(&self, name: &str, drivers: &[&str], pods: &[&str]) {
        let results = drivers.iter().map(
            |driver| json!({"request": "gpu", "driver": driver, "pool": "pool", "device": "d"}),
        );
        let reserved = pods
            .iter()
            .map(|uid| json!({"resource": "pods", "name": uid, "uid": uid}));
        let claim = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"name": name, "namespace": "ns", "uid": format!("uid-{name}")},
            "spec": {},
            "status": {
                "allocation": {"devices": {"results": results.collect::<Vec<_>>()}},
                "reservedFor": reserved.collect::<Vec<_>>(),
            },
        });
        let path = format!("/apis/resource.k8s.io/v1/namespaces/ns/resourceclaims/{name}");
        self.api.with(|model| model.objects.insert(path, claim));
    }

    /// The API server is one that has ResourceSlices.
    fn serve_slices(&self) {
        self.serve_slices_of("v1");
    }

    /// The API server is one that has ResourceSlices in this version alone.
    fn serve_slices_of(&self, version: &str) {
        let slices = json!({
            "name": "resourceslices", "singularName": "", "namespaced": false, "kind": "ResourceSlice", "verbs": ["deletecollection"],
        });
        let group_version = format!("resource.k8s.io/{version}");
        let list = json!({
            "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": [slices],
        });
        let path = format!("/apis/resource.k8s.io/{version}");
        self.api.with(|model| model.objects.insert(path, list));
    }

    fn recorded(&self) -> Vec<(String, ClaimRecord)> {
        let state = self.store.snapshot();
        let all = ClaimRecord::all(&state);
        all.map(|found| found.map(|(id, record)| (id.name, record)).unwrap())
            .collect()
    }
}

async fn register(agent: &DraManager, name: &str, driver: &DraDriver, version: &str) {
    let (socket, versions) = (driver.socket(), [version.to_owned()]);
    let registration = socket.with_extension("reg");
    let registered = agent.register(name, socket, &registration, &versions);
    registered.await.unwrap();
    eventually(|| {
        let plugin = agent.plugin(name).unwrap();
        plugin.client.socket() == socket && plugin.client.is_connected()
    })
    .await;
}

async fn eventually(is_so: impl Fn() -> bool) {
    let so = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, so)
        .await
        .expect("it happens");
}

fn pod(uid: &str, claims: &[&str]) -> Pod {
    let entries = claims
        .iter()
        .map(|name| json!({"name": name, "resourceClaimName": name}));
    let wishes = claims.iter().map(|name| json!({"name": name}));
    serde_json::from_value(json!({
        "metadata": {"name": uid, "namespace": "ns", "uid": uid},
        "spec": {
            "resourceClaims": entries.collect::<Vec<_>>(),
            "containers": [{"name": "main", "resources": {"claims": wishes.collect::<Vec<_>>()}}],
        },
    }))
    .unwrap()
}

async fn prepare(agent: &DraManager, pod: &Pod) -> Result<(), String> {
    let prepared = tokio::time::timeout(PATIENCE, agent.prepare(pod, false)).await;
    let prepared = prepared.expect("the pod is not held up");
    prepared.map_err(|error| error.to_string())
}

fn cdi(agent: &DraManager, pod: &Pod) -> Vec<String> {
    let claims = agent.of_container(pod, &pod.containers()[0]);
    cdi_devices(&claims.unwrap())
}

// Invariant POD-15.
#[tokio::test]
async fn a_claim_is_prepared_once_and_unprepared_with_its_last_pod() {
    let world = World::new();
    world.claim("c", &[GPU], &["u1", "u2"]);
    let agent = world.agent(1);
    let driver = world.driver("gpu");
    register(&agent, GPU, &driver, V1).await;
    let (first, second) = (pod("u1", &["c"]), pod("u2", &["c"]));
    prepare(&agent, &first).await.unwrap();
    assert_eq!(driver.calls(), ["Prepare c"]);
    assert_eq!(cdi(&agent, &first), ["example.com/gpu=c-1"]);
    prepare(&agent, &second).await.unwrap();
    prepare(&agent, &first).await.unwrap();
    assert!(driver.calls().is_empty(), "it is prepared already");

    // An agent that starts again asks nobody about pods that run, not even for a container that starts again.
    world.api.set_down(true);
    let agent = world.agent(1);
    agent.prepare(&first, true).await.unwrap();
    assert_eq!(cdi(&agent, &first), ["example.com/gpu=c-1"]);
    let in_use = |driver: &str| {
        let label = DriverNameLabel {
            driver_name: driver.to_owned(),
        };
        let family = &world.metrics.dra_resource_claims_in_use;
        family.get_or_create_owned(&label).get()
    };
    assert_eq!((in_use(GPU), in_use("<any>")), (1, 1));

    register(&agent, GPU, &driver, V1).await;
    agent.unprepare(&first.uid()).await.unwrap();
    assert!(driver.calls().is_empty(), "the other pod uses it");
    assert_eq!(driver.prepared(), ["uid-c"]);
    agent.unprepare(&second.uid()).await.unwrap();
    agent.unprepare(&second.uid()).await.unwrap();
    assert_eq!(driver.calls(), ["Unprepare c"]);
    assert!(world.recorded().is_empty());
    assert_eq!((in_use(GPU), in_use("<any>")), (0, 0));
}

#[tokio::test]
async fn a_pod_waits_for_its_claim_and_for_its_driver() {
    let world = World::new();
    let agent = world.agent(1);
    let pod = pod("u1", &["c"]);
    let waits = prepare(&agent, &pod).await.unwrap_err();
    assert_eq!(waits, "ResourceClaim c does not exist");
    world.claim("c", &[GPU], &["u2"]);
    let waits = prepare(&agent, &pod).await.unwrap_err();
    assert_eq!(
        waits,
        "ResourceClaim c (uid-c) is not reserved for this pod"
    );
    world.claim("c", &[GPU], &["u1"]);
    world.api.set_down(true);
    let waits = prepare(&agent, &pod).await.unwrap_err();
    assert!(waits.starts_with("fetch ResourceClaim c: "), "{waits}");
    world.api.set_down(false);
    let waits = prepare(&agent, &pod).await.unwrap_err();
    assert_eq!(waits, "DRA driver gpu.example.com is not registered");
    // A pod whose driver never was here goes without it.
    assert!(world.recorded().is_empty());
    agent.unprepare(&pod.uid()).await.unwrap();
    assert!(agent.of_container(&pod, &pod.containers()[0]).is_err());
    prepare(&agent, &pod).await.unwrap_err();

    let driver = world.driver("gpu");
    register(&agent, GPU, &driver, V1).await;
    let changed = tokio::time::timeout(PATIENCE, agent.changed());
    assert!(changed.await.unwrap().contains(&pod.uid()), "it is synced");
    prepare(&agent, &pod).await.unwrap();
    assert_eq!(driver.calls(), ["Prepare c"]);
}

#[tokio::test]
async fn a_driver_that_fails_is_asked_again_and_its_devices_count_once() {
    let world = World::new();
    world.claim("a", &[GPU], &["u1"]);
    world.claim("b", &[GPU], &["u1"]);
    let agent = world.agent(1);
    let driver = world.driver("gpu");
    register(&agent, GPU, &driver, "v1beta1.DRAPlugin").await;
    let pod = pod("u1", &["a", "b"]);
    for (answer, expected) in [
        (
            DraAnswer::Refuse,
            "NodePrepareResources of DRA driver gpu.example.com: rpc error: code = Internal desc = broken",
        ),
        (
            DraAnswer::Skip,
            "NodePrepareResources of DRA driver gpu.example.com failed for ResourceClaim a: \
             the driver gives no answer for it",
        ),
        (
            DraAnswer::Garbage,
            "NodePrepareResources of DRA driver gpu.example.com: it answers for an unknown claim UID unknown",
        ),
    ] {
        driver.answers(answer);
        assert_eq!(prepare(&agent, &pod).await.unwrap_err(), expected);
        assert_eq!(driver.calls(), ["Prepare a,b"]);
    }
    driver.answers(DraAnswer::RefuseClaim("uid-a".to_owned()));
    let refused = prepare(&agent, &pod).await.unwrap_err();
    assert!(refused.ends_with("for ResourceClaim a: no such device"));
    assert_eq!(driver.calls(), ["Prepare a,b"]);
    driver.answers(DraAnswer::Late(Duration::from_millis(50)));
    prepare(&agent, &pod).await.unwrap();
    assert_eq!(driver.calls(), ["Prepare a"], "the other one is prepared");
    assert_eq!(
        cdi(&agent, &pod),
        ["example.com/gpu=a-2", "example.com/gpu=b-2"]
    );

    // What one claim lacks keeps the pod, and nothing of the others.
    driver.answers(DraAnswer::RefuseClaim("uid-a".to_owned()));
    agent.unprepare(&pod.uid()).await.unwrap_err();
    assert_eq!(driver.prepared(), ["uid-a"]);
    assert_eq!(world.recorded().len(), 1);
    driver.answers(DraAnswer::Do);
    driver.calls();
    agent.unprepare(&pod.uid()).await.unwrap();
    assert_eq!(driver.calls(), ["Unprepare a"]);
    assert!(world.recorded().is_empty());
}

// Invariant POD-15.
#[tokio::test]
async fn a_driver_that_hangs_holds_up_nobody_else_and_its_claim_stays_on_record() {
    let world = World::new();
    world.claim("c", &[GPU], &["u1"]);
    world.claim("n", &[NIC], &["u2"]);
    let agent = world.agent(1);
    let (gpu, nic) = (world.driver("gpu"), world.driver("nic"));
    register(&agent, GPU, &gpu, V1).await;
    register(&agent, NIC, &nic, V1).await;
    let (first, second) = (pod("u1", &["c"]), pod("u2", &["n"]));
    gpu.answers(DraAnswer::DoAndHang);
    let asked = tokio::time::timeout(Duration::from_millis(300), agent.prepare(&first, false));
    assert!(asked.await.is_err(), "it hangs");
    prepare(&agent, &second).await.unwrap();
    assert_eq!(nic.calls(), ["Prepare n"]);
    // The call goes on, so nothing else happens to the claim meanwhile.
    let uid = first.uid();
    let ended = tokio::time::timeout(Duration::from_millis(300), agent.unprepare(&uid));
    assert!(ended.await.is_err());
    assert_eq!(gpu.calls(), ["Prepare c"]);

    // The agent is killed: what may be prepared is unprepared, although nobody answered.
    gpu.answers(DraAnswer::Do);
    let agent = world.agent(1);
    assert!(agent.of_container(&first, &first.containers()[0]).is_err());
    register(&agent, GPU, &gpu, V1).await;
    agent.unprepare(&first.uid()).await.unwrap();
    assert_eq!(gpu.calls(), ["Unprepare c"]);
    assert!(gpu.prepared().is_empty());
    assert_eq!(nic.prepared(), ["uid-n"], "nobody else is concerned");
}

#[tokio::test]
async fn a_driver_that_hangs_holds_up_no_claim_of_its_pod_that_another_driver_prepares() {
    let world = World::new();
    world.claim("c", &[GPU], &["u1"]);
    world.claim("n", &[NIC], &["u1", "u2"]);
    let agent = world.agent(1);
    let (gpu, nic) = (world.driver("gpu"), world.driver("nic"));
    register(&agent, GPU, &gpu, V1).await;
    register(&agent, NIC, &nic, V1).await;
    gpu.answers(DraAnswer::DoAndHang);
    let (first, second) = (pod("u1", &["c", "n"]), pod("u2", &["n"]));
    let (asking, asked_for) = (agent.clone(), first.clone());
    let asked = tokio::spawn(async move { asking.prepare(&asked_for, false).await });
    eventually(|| !gpu.calls().is_empty()).await;
    // The first pod waits for its other claim, so it has had the turn of this one.
    prepare(&agent, &second).await.unwrap();
    assert_eq!(nic.calls(), ["Prepare n"]);
    assert_eq!(nic.prepared(), ["uid-n"]);
    assert!(!asked.is_finished());
    asked.abort();
}

#[tokio::test]
async fn a_pod_that_waits_for_a_claim_holds_none_of_its_others() {
    let world = World::new();
    world.claim("a", &[NIC], &["u1", "u2"]);
    world.claim("z", &[GPU], &["u0", "u1"]);
    let agent = world.agent(1);
    let (gpu, nic) = (world.driver("gpu"), world.driver("nic"));
    register(&agent, GPU, &gpu, V1).await;
    register(&agent, NIC, &nic, V1).await;
    gpu.answers(DraAnswer::DoAndHang);
    let asking = |uid: &str, claims: &[&str]| {
        let (agent, pod) = (agent.clone(), pod(uid, claims));
        tokio::spawn(async move { agent.prepare(&pod, false).await })
    };
    let hangs = asking("u0", &["z"]);
    eventually(|| !gpu.calls().is_empty()).await;
    let mut waits = asking("u1", &["a", "z"]);
    let waited = tokio::time::timeout(Duration::from_millis(300), &mut waits).await;
    assert!(waited.is_err(), "the first pod has the turn of z");
    prepare(&agent, &pod("u2", &["a"])).await.unwrap();
    assert_eq!(nic.calls(), ["Prepare a"]);
    hangs.abort();
    waits.abort();
}

#[tokio::test]
async fn a_pod_that_ends_while_it_waits_for_another_leaves_nothing() {
    let world = World::new();
    world.claim("c", &[GPU], &["u1", "u2"]);
    let agent = world.agent(1);
    let driver = world.driver("gpu");
    register(&agent, GPU, &driver, V1).await;
    let (first, second) = (pod("u1", &["c"]), pod("u2", &["c"]));
    driver.answers(DraAnswer::Late(Duration::from_secs(1)));
    let (asking, asked_for) = (agent.clone(), first.clone());
    let asked = tokio::spawn(async move { prepare(&asking, &asked_for).await });
    eventually(|| !driver.calls().is_empty()).await;
    let waits = tokio::time::timeout(Duration::from_millis(100), agent.prepare(&second, false));
    assert!(waits.await.is_err(), "the other pod has the claim's turn");
    agent.unprepare(&second.uid()).await.unwrap();
    asked.await.unwrap().unwrap();
    // This comes after everybody who waited for the claim before.
    prepare(&agent, &first).await.unwrap();
    let (_, record) = world.recorded().remove(0);
    assert_eq!(record.pods.into_keys().collect::<Vec<_>>(), [first.uid()]);
}

// Invariant POD-16.
#[tokio::test]
async fn claims_are_prepared_again_after_a_reboot_without_the_api_server() {
    let world = World::new();
    world.claim("c", &[GPU], &["u1"]);
    let agent = world.agent(1);
    let driver = world.driver("gpu");
    register(&agent, GPU, &driver, V1).await;
    let pod = pod("u1", &["c"]);
    prepare(&agent, &pod).await.unwrap();

    world.api.set_down(true);
    let agent = world.agent(2);
    assert!(agent.of_container(&pod, &pod.containers()[0]).is_err());
    let waits = prepare(&agent, &pod).await.unwrap_err();
    assert_eq!(waits, "DRA driver gpu.example.com is not registered");
    register(&agent, GPU, &driver, V1).await;
    driver.calls();
    prepare(&agent, &pod).await.unwrap();
    assert_eq!(driver.calls(), ["Prepare c"]);
    assert_eq!(cdi(&agent, &pod), ["example.com/gpu=c-2"], "replaced");
}

#[tokio::test]
async fn the_newest_connected_instance_of_a_driver_is_called() {
    let world = World::new();
    world.claim("c", &[GPU], &["u1"]);
    let agent = world.agent(1);
    let (old, new) = (world.driver("old"), world.driver("new"));
    register(&agent, GPU, &old, V1).await;
    let pod = pod("u1", &["c"]);
    prepare(&agent, &pod).await.unwrap();
    assert_eq!(old.calls(), ["Prepare c"]);
    register(&agent, GPU, &new, V1).await;
    prepare(&agent, &pod).await.unwrap();
    assert_eq!(new.calls(), ["Prepare c"], "it may not know what is there");
    new.stop();
    let socket = old.socket().to_owned();
    eventually(|| agent.plugin(GPU).unwrap().client.socket() == socket).await;
    agent.unprepare(&pod.uid()).await.unwrap();
    assert_eq!(old.calls(), ["Unprepare c"]);
}

#[tokio::test]
async fn a_call_to_an_instance_that_is_gone_keeps_no_connection() {
    let world = World::new();
    let agent = world.agent(1);
    let driver = world.driver("gpu");
    register(&agent, GPU, &driver, V1).await;
    let plugin = agent.plugin(GPU).unwrap();
    agent.keep_only(&BTreeSet::new());
    plugin.client.prepare(Vec::new()).await.unwrap();
    assert!(!plugin.client.is_connected());
}

#[tokio::test]
async fn claims_of_pods_that_are_gone_are_unprepared() {
    let world = World::new();
    world.claim("a", &[GPU], &["u1"]);
    world.claim("b", &[GPU], &["u2"]);
    let agent = world.agent(1);
    let driver = world.driver("gpu");
    register(&agent, GPU, &driver, V1).await;
    prepare(&agent, &pod("u1", &["a"])).await.unwrap();
    prepare(&agent, &pod("u2", &["b"])).await.unwrap();
    driver.answers(DraAnswer::Refuse);
    agent.reconcile(|uid| uid.as_str() == "u1").await;
    assert_eq!(world.recorded().len(), 2);
    driver.answers(DraAnswer::Do);
    agent.reconcile(|uid| uid.as_str() == "u1").await;
    assert_eq!(driver.prepared(), ["uid-b"]);
    assert_eq!(world.recorded()[0].0, "b");
}

#[tokio::test]
async fn bad_registrations_are_refused() {
    let world = World::new();
    let agent = world.agent(1);
    let socket = world.dir.path().join("nobody");
    for (name, endpoint, version, expected) in [
        (
            GPU,
            &*socket,
            "v1alpha4.DRAPlugin",
            "is supported by the kubelet",
        ),
        ("Gpu_Driver", &*socket, V1, "is invalid"),
        ("", &*socket, V1, "is invalid"),
        (GPU, Path::new("sock"), V1, "is no absolute path"),
    ] {
        let versions = [version.to_owned()];
        let refused = agent.register(name, endpoint, &socket, &versions).await;
        let why = refused.unwrap_err();
        assert!(why.contains(expected), "{why}");
    }
    let versions = [V1.to_owned()];
    let registered = agent.register(GPU, &socket, Path::new("/a"), &versions);
    registered.await.unwrap();
    let again = agent.register(GPU, &socket, Path::new("/b"), &versions);
    let why = again.await.unwrap_err();
    assert!(why.contains("already registered"), "{why}");
}

#[tokio::test]
async fn drivers_come_and_go_by_their_registration_sockets() {
    let world = World::new();
    let agent = world.agent(1);
    let root_dir = world.dir.path().to_owned();
    let registry = root_dir.join("plugins_registry");
    std::fs::create_dir_all(&registry).unwrap();
    let drivers = Drivers::new(DriversOptions {
        root_dir,
        node_name: "n1".to_owned(),
        store: world.store.clone(),
        clock: Arc::new(SystemClock::new(BootId(1))),
        api: None,
        node: NodeObject::default(),
        metrics: world.metrics.clone(),
    });
    let registering = agent.clone();
    drivers.hand_on(
        DRA_PLUGIN,
        Arc::new(move |plugin: Registering| {
            let agent = registering.clone();
            let register = async move {
                let (endpoint, registration) = (&plugin.endpoint, &plugin.registration);
                agent
                    .register(&plugin.name, endpoint, registration, &plugin.versions)
                    .await
            };
            register.boxed()
        }),
    );
    let watching = agent.clone();
    drivers.show_sockets(Arc::new(move |sockets| watching.keep_only(sockets)));
    let stop = CancellationToken::new();
    let watch = tokio::spawn(drivers.run(stop.clone()));
    let driver = world.driver("gpu");
    let socket = registry.join("gpu.example.com-reg.sock");
    let versions = ["v1.DRAPlugin", "v1beta1.DRAPlugin"];
    driver.register_by(&socket, GPU, &versions).unwrap();
    eventually(|| agent.plugin(GPU).is_ok_and(|p| p.client.is_connected())).await;
    std::fs::remove_file(&socket).unwrap();
    eventually(|| agent.plugin(GPU).is_err()).await;
    stop.cancel();
    watch.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn slices_of_a_driver_that_stays_away_are_deleted_once() {
    let world = World::new();
    let record = crate::core::state::FactRecord::of(
        &DriverRecord::default(),
        world.agent(1).inner.options.clock.now(),
    );
    let put = Transaction::new().put(driver_key(GPU), record);
    world.store.commit(put).await.unwrap();
    world.api.with(|model| model.fails = Some(500));
    let agent = world.agent(1);
    let stop = CancellationToken::new();
    let runs = tokio::spawn(agent.run(stop.clone()));
    tokio::time::sleep(Duration::from_secs(29)).await;
    assert_eq!(world.api.count("DELETE"), 0, "it may come back");
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(world.api.count("DELETE") > 0);
    assert!(DriverRecord::names(&world.store.snapshot()).contains(GPU));
    world.serve_slices();
    world.api.with(|model| {
        model.fails = None;
        let path = "/apis/resource.k8s.io/v1/resourceslices".to_owned();
        let list = json!({"kind": "Status", "apiVersion": "v1", "status": "Success"});
        model.objects.insert(path, list);
        model.log.clear();
    });
    tokio::time::sleep(Duration::from_secs(600)).await;
    let (log, queries) = world.api.with(|m| (m.log.clone(), m.queries.clone()));
    let deletion = "DELETE /apis/resource.k8s.io/v1/resourceslices";
    let deletions: Vec<_> = log.iter().filter(|l| l.starts_with("DELETE")).collect();
    assert_eq!(deletions, [deletion; 2], "of the driver, and of all others");
    for wanted in [
        "spec.nodeName%3Dn1%2Cspec.driver%3Dgpu.example.com",
        "spec.nodeName%3Dn1%2Cspec.driver%21%3Dgpu.example.com",
    ] {
        assert!(queries.iter().any(|q| q.contains(wanted)), "{queries:?}");
    }
    assert!(DriverRecord::names(&world.store.snapshot()).is_empty());
    stop.cancel();
    runs.await.unwrap();
}

#[tokio::test]
async fn slices_of_drivers_that_never_registered_are_deleted_and_those_of_others_stay() {
    let world = World::new();
    let agent = world.agent(1);
    let driver = world.driver("gpu");
    register(&agent, GPU, &driver, V1).await;
    world.serve_slices();
    world.api.with(|model| {
        let path = "/apis/resource.k8s.io/v1/resourceslices".to_owned();
        let list = json!({"kind": "Status", "apiVersion": "v1", "status": "Success"});
        model.objects.insert(path, list);
    });
    // The time to register is over.
    if let Some((at, _)) = agent.wipes().due.get_mut("") {
        *at = tokio::time::Instant::now();
    }
    let stop = CancellationToken::new();
    let runs = tokio::spawn(agent.run(stop.clone()));
    eventually(|| world.api.count("DELETE") > 0).await;
    let queries = world.api.with(|model| model.queries.clone());
    let wanted = "spec.nodeName%3Dn1%2Cspec.driver%21%3Dgpu.example.com";
    assert!(queries.last().unwrap().contains(wanted), "{queries:?}");
    stop.cancel();
    runs.await.unwrap();
    assert_eq!(world.api.count("DELETE"), 1);
}

#[tokio::test(start_paused = true)]
async fn drivers_have_their_time_to_register_after_the_runtime_was_waited_for() {
    let world = World::new();
    world.serve_slices();
    world.api.with(|model| {
        let path = "/apis/resource.k8s.io/v1/resourceslices".to_owned();
        let list = json!({"kind": "Status", "apiVersion": "v1", "status": "Success"});
        model.objects.insert(path, list);
    });
    let agent = world.agent(1);
    tokio::time::sleep(Duration::from_secs(120)).await;
    agent.begin_registration();
    let stop = CancellationToken::new();
    let runs = tokio::spawn(agent.run(stop.clone()));
    tokio::time::sleep(Duration::from_secs(29)).await;
    assert_eq!(world.api.count("DELETE"), 0, "they may register");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(world.api.count("DELETE"), 1);
    stop.cancel();
    runs.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_server_without_slices_is_not_asked_to_delete_any() {
    let world = World::new();
    let stop = CancellationToken::new();
    let runs = tokio::spawn(world.agent(1).run(stop.clone()));
    tokio::time::sleep(Duration::from_secs(900)).await;
    let log = world.api.with(|model| model.log.clone());
    let versions = ["v1", "v1beta2", "v1beta1"];
    let asked = versions.map(|version| format!("GET /apis/resource.k8s.io/{version}"));
    assert_eq!(log, asked);
    stop.cancel();
    runs.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn slices_of_servers_with_an_older_version_are_deleted_too() {
    for version in ["v1beta2", "v1beta1"] {
        let world = World::new();
        let agent = world.agent(1);
        let now = agent.inner.options.clock.now();
        let put = Transaction::new().put_object(&driver_key(GPU), &DriverRecord::default(), now);
        world.store.commit(put).await.unwrap();
        world.serve_slices_of(version);
        let path = format!("/apis/resource.k8s.io/{version}/resourceslices");
        let deletion = format!("DELETE {path}");
        world.api.with(|model| {
            let list = json!({"kind": "Status", "apiVersion": "v1", "status": "Success"});
            model.objects.insert(path, list);
        });
        let stop = CancellationToken::new();
        let runs = tokio::spawn(world.agent(1).run(stop.clone()));
        tokio::time::sleep(Duration::from_secs(600)).await;
        let log = world.api.with(|model| model.log.clone());
        let deletions = log.iter().filter(|line| **line == deletion);
        assert_eq!(
            deletions.count(),
            2,
            "of the driver, and of all others: {log:?}"
        );
        assert!(DriverRecord::names(&world.store.snapshot()).is_empty());
        stop.cancel();
        runs.await.unwrap();
    }
}

#[tokio::test]
async fn a_driver_registers_before_or_after_a_deletion_and_not_during_one() {
    let world = World::new();
    let agent = world.agent(1);
    agent.wipes().away(GPU);
    let driver = world.driver("gpu");
    // A deletion is under way.
    let turn = agent.inner.registering.lock().await;
    let registers = {
        let (agent, socket) = (agent.clone(), driver.socket().to_owned());
        tokio::spawn(async move {
            let (registration, versions) = (socket.with_extension("reg"), [V1.to_owned()]);
            agent.register(GPU, &socket, &registration, &versions).await
        })
    };
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(agent.plugin(GPU).is_err(), "it waits for the answer");
    // The time of the driver is over, and it is registered when the next deletion has its turn.
    if let Some((at, _)) = agent.wipes().due.get_mut(GPU) {
        *at = tokio::time::Instant::now();
    }
    let wipes = {
        let agent = agent.clone();
        tokio::spawn(async move { agent.wipe_due().await })
    };
    drop(turn);
    registers.await.unwrap().unwrap();
    wipes.await.unwrap();
    assert_eq!(world.api.count("DELETE"), 0);
    eventually(|| agent.plugin(GPU).unwrap().client.is_connected()).await;
    assert!(!agent.wipes().due.contains_key(GPU));
}

#[tokio::test]
async fn a_driver_that_registers_after_a_failed_deletion_has_its_time_to_connect() {
    let world = World::new();
    world.api.with(|model| model.fails = Some(500));
    let agent = world.agent(1);
    agent.wipes().away(GPU);
    let past = tokio::time::Instant::now();
    if let Some((at, _)) = agent.wipes().due.get_mut(GPU) {
        *at = past;
    }
    agent.wipe_due().await;
    assert_eq!(world.api.count("DELETE"), 1);
    if let Some((at, _)) = agent.wipes().due.get_mut(GPU) {
        *at = past;
    }
    // Nobody serves there yet.
    let (socket, versions) = (world.dir.path().join("late"), [V1.to_owned()]);
    let registered = agent.register(GPU, &socket, Path::new("/late-reg"), &versions);
    registered.await.unwrap();
    agent.wipe_due().await;
    assert_eq!(
        world.api.count("DELETE"),
        1,
        "it has half a minute to connect"
    );
}

#[tokio::test]
async fn devices_that_a_driver_makes_up_do_not_fill_the_memory() {
    let world = World::new();
    let agent = world.agent(1);
    for round in 0..4 {
        let devices = (0..10_000).map(|number| proto::DeviceHealth {
            device: Some(proto::DeviceIdentifier {
                pool_name: "pool".to_owned(),
                device_name: format!("{round}-{number}"),
            }),
            health: 1,
            health_check_timeout_seconds: i64::MAX,
            ..proto::DeviceHealth::default()
        });
        let list = proto::NodeWatchResourcesResponse {
            devices: devices.collect(),
        };
        agent.listed(GPU, 1, &list);
    }
    assert_eq!(agent.shared().health[&1].len(), 10_000);
}

#[tokio::test]
async fn the_health_of_devices_is_in_the_statuses_of_their_pods() {
    let world = World::new();
    world.claim("c", &[GPU], &["u1"]);
    world.claim("n", &[NIC], &["u2"]);
    let agent = world.agent(1);
    let (gpu, nic) = (world.driver("gpu"), world.driver("nic"));
    let versions = [V1.to_owned(), "v1.DRAResourceHealth".to_owned()];
    for (name, driver) in [(GPU, &gpu), (NIC, &nic)] {
        let registration = driver.socket().with_extension("reg");
        let registered = agent.register(name, driver.socket(), &registration, &versions);
        registered.await.unwrap();
    }
    let (of_gpu, of_nic) = (pod("u1", &["c"]), pod("u2", &["n"]));
    prepare(&agent, &of_gpu).await.unwrap();
    prepare(&agent, &of_nic).await.unwrap();
    let shown = |pod: &Pod| {
        let mut status: k8s_openapi::api::core::v1::PodStatus =
            serde_json::from_value(json!({"containerStatuses": [{"name": "main"}]})).unwrap();
        agent.report(pod, &mut status);
        let container = &status.container_statuses.unwrap()[0];
        serde_json::to_value(&container.allocated_resources_status).unwrap()
    };
    let expected = |name: &str, health: &str| {
        let id = format!("example.com/gpu={name}-1");
        let row = json!({"resourceID": id, "health": health});
        json!([{"name": format!("claim:{name}"), "resources": [row]}])
    };
    assert_eq!(shown(&of_gpu), expected("c", "Unknown"));
    nic.tells_health(&[("n-1", 1, "")]);
    gpu.tells_health(&[("c-1", 2, "too hot"), ("other", 1, "")]);
    let mut unhealthy = expected("c", "Unhealthy");
    unhealthy[0]["resources"][0]["message"] = json!("too hot");
    eventually(|| shown(&of_gpu) == unhealthy).await;
    eventually(|| shown(&of_nic) == expected("n", "Healthy")).await;
    let changed = tokio::time::timeout(PATIENCE, agent.changed());
    assert!(changed.await.unwrap().contains(&of_gpu.uid()));
    gpu.ends_health();
    eventually(|| shown(&of_gpu) == expected("c", "Unknown")).await;
    assert_eq!(shown(&of_nic), expected("n", "Healthy"));

    // Pods of a driver that is gone are synced, too.
    while agent.changed().now_or_never().is_some() {}
    agent.keep_only(&[gpu.socket().with_extension("reg")].into());
    let synced = async { while !agent.changed().await.contains(&of_nic.uid()) {} };
    let synced = tokio::time::timeout(PATIENCE, synced).await;
    synced.expect("the pod is synced");
    assert_eq!(shown(&of_nic), expected("n", "Unknown"));
}
