//! Drivers come and go.

use std::fs;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::BoxFuture;
use holdfast::core::state::{FactRecord, Transaction};
use holdfast::store::backend::{Faults, FaultyBackend, MemoryBackend};
use holdfast::store::codec::Loaded;
use holdfast::store::{Store, StoreOptions};
use holdfast::types::Clock as _;
use holdfast::types::metrics::Metrics;
use holdfast::volumemanager::csi::client::CsiClient;
use holdfast::volumemanager::csi::registry::{Drivers, Plugin};
use holdfast_testkit::csi::{CsiDriver, Fault};

use crate::world::{Agent, Dirs, clock, eventually, told};

fn recorded(agent: &Agent) -> Vec<String> {
    let state = agent.store.snapshot();
    let all = state.with_prefix::<FactRecord>("csiplugins//");
    all.map(|(key, _)| key.to_string()).collect()
}

#[tokio::test]
async fn a_driver_that_is_there_and_one_that_comes_later_register() {
    let dirs = Dirs::new();
    let first = dirs.driver("first");
    let mut agent = Agent::start(&dirs, None);
    let client = agent.has("first").await;
    assert_eq!(client.socket(), first.options().endpoint);
    client.node_get_info().await.unwrap();
    let mut options = dirs.options("second");
    // Sub-directories count as well, also those that are made later.
    options.registration = dirs.root().join("plugins_registry/sub/dir/second.sock");
    let second = CsiDriver::start(options).unwrap();
    agent.has("second").await;
    for driver in [&first, &second] {
        eventually("it is told", || (!told(driver).is_empty()).then_some(())).await;
        assert_eq!(told(driver), [(true, String::new())]);
    }
    assert_eq!(
        recorded(&agent),
        ["csiplugins//first", "csiplugins//second"]
    );
    let known = agent.drivers.registered();
    assert_eq!(known[0].version.to_string(), "1.0.0");
    assert_eq!(known[0].node_id, "csi-node");
    agent.end().await;
}

#[test]
fn the_directory_is_made_and_watched_beside_the_async_threads() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(1)
        .build()
        .unwrap();
    runtime.block_on(async {
        let dirs = Dirs::new();
        let registry = dirs.root().join("plugins_registry");
        // The only thread that may block is busy.
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let busy = tokio::task::spawn_blocking(move || wait.recv());
        let mut agent = Agent::start(&dirs, None);
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(!registry.exists());
        end.send(()).unwrap();
        busy.await.unwrap().unwrap();
        eventually("it is made", || registry.is_dir().then_some(())).await;
        agent.end().await;
    });
}

/// While one driver is being recorded, the directory is looked through again.
#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_comes_while_another_is_being_recorded_keeps_neither_from_registering() {
    let dirs = Dirs::new();
    let faults = Faults::new();
    let backend = FaultyBackend::new(MemoryBackend::new(), faults.clone());
    let (options, metrics) = (StoreOptions::default(), Metrics::default());
    let store = Store::start(
        Box::new(backend),
        Loaded::default(),
        options,
        clock(),
        metrics,
    );
    let store = store.unwrap();
    let mut agent = Agent::idle(&dirs, None, store);
    agent.run();

    // The disk takes its time over something else.
    faults.set_hang(true);
    let record = FactRecord {
        mark: String::new(),
        layout: 1,
        data: Vec::new(),
        at: clock().now(),
    };
    let other = Transaction::new().put("other//1", record);
    let other = tokio::spawn({
        let store = agent.store.clone();
        async move {
            store.commit(other).await.unwrap();
            store.sync().await.unwrap();
        }
    });
    let hanging = faults.clone();
    tokio::task::spawn_blocking(move || hanging.wait_until_hanging())
        .await
        .unwrap();
    let first = dirs.driver("first");
    eventually("it was asked who it is", || {
        (!first.calls_of("NodeGetInfo").is_empty()).then_some(())
    })
    .await;
    let _second = dirs.driver("second");
    // Long enough for a look at the directory to begin, which nobody is told of.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(recorded(&agent), [""; 0]);

    faults.set_hang(false);
    other.await.unwrap();
    agent.has("first").await;
    agent.has("second").await;
    agent.end().await;
}

#[tokio::test]
async fn hidden_files_and_what_is_no_socket_do_not_count() {
    let dirs = Dirs::new();
    let registry = dirs.root().join("plugins_registry");
    fs::create_dir_all(registry.join(".below")).unwrap();
    fs::write(registry.join("file.sock"), "").unwrap();
    std::os::unix::fs::symlink("/nowhere", registry.join("link.sock")).unwrap();
    let mut drivers = Vec::new();
    for (name, place) in [("a", ".a.sock"), ("b", ".below/b.sock"), ("c", "c.sock")] {
        let mut options = dirs.options(name);
        options.registration = registry.join(place);
        drivers.push(CsiDriver::start(options).unwrap());
    }
    let mut agent = Agent::start(&dirs, None);
    agent.has("c").await;
    agent.end().await;
    assert!(drivers[0].calls().is_empty() && drivers[1].calls().is_empty());
}

#[tokio::test]
async fn plugins_of_other_types_are_told_once_that_they_are_not_supported() {
    let dirs = Dirs::new();
    let mut others = Vec::new();
    for kind in ["DevicePlugin", "DRAPlugin"] {
        let mut options = dirs.options(&kind.to_lowercase());
        options.plugin_type = kind.to_owned();
        others.push(CsiDriver::start(options).unwrap());
    }
    let mut agent = Agent::start(&dirs, None);
    for other in &others {
        eventually("it is told", || (!told(other).is_empty()).then_some(())).await;
    }
    // A driver that comes and goes does not have them asked again.
    let mut driver = dirs.driver("d");
    agent.has("d").await;
    driver.stop();
    agent.lost("d").await;
    agent.end().await;
    for other in &others {
        let kind = &other.options().plugin_type;
        let text = format!("plugins of type {kind:?} are not supported, only CSIPlugin");
        assert_eq!(told(other), [(false, text)]);
        assert!(other.calls_of("NodeGetInfo").is_empty());
    }
}

#[tokio::test]
async fn plugins_of_a_type_that_somebody_else_takes_are_handed_on_until_they_are_taken() {
    let dirs = Dirs::new();
    let mut options = dirs.options("gpu");
    options.plugin_type = "DevicePlugin".to_owned();
    options.versions = vec!["v1beta1".to_owned()];
    let plugin = CsiDriver::start(options).unwrap();
    let mut agent = Agent::idle(&dirs, None, Store::in_memory(clock()));
    let handed = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&handed);
    let registrar = move |plugin: Plugin| -> BoxFuture<'static, Result<(), String>> {
        let mut seen = seen.lock().unwrap();
        seen.push(plugin);
        let is_first = seen.len() == 1;
        Box::pin(async move {
            if is_first {
                return Err("not yet".to_owned());
            }
            Ok(())
        })
    };
    agent.drivers.hand_on("DevicePlugin", Arc::new(registrar));
    agent.run();
    let both = || (told(&plugin).len() == 2).then_some(());
    eventually("it is told twice", both).await;
    agent.end().await;
    assert_eq!(
        told(&plugin),
        [(false, "not yet".to_owned()), (true, String::new())]
    );
    let handed = handed.lock().unwrap();
    let expected = Plugin {
        name: "gpu".to_owned(),
        endpoint: plugin.options().endpoint.clone(),
        registration: plugin.options().registration.clone(),
        versions: vec!["v1beta1".to_owned()],
    };
    assert_eq!(*handed, [expected.clone(), expected]);
}

#[tokio::test]
async fn bad_plugins_are_told_what_is_wrong_with_them() {
    let dirs = Dirs::new();
    let mut cases = Vec::new();
    let mut case = |name: &str,
                    change: &dyn Fn(&mut holdfast_testkit::csi::CsiOptions),
                    says: &'static str| {
        let mut options = dirs.options(name);
        change(&mut options);
        cases.push((CsiDriver::start(options).unwrap(), says));
    };
    case(
        "old",
        &|o| o.versions = vec!["0.3.0".to_owned(), "2.0.0".to_owned()],
        "is supported; 1.x is",
    );
    case("none", &|o| o.versions.clear(), "no version at all");
    case(
        "name",
        &|o| o.name = "../../etc".to_owned(),
        "is no name of a driver",
    );
    case("node", &|o| o.node_id.clear(), "it has no node id");
    let mut agent = Agent::start(&dirs, None);
    for (driver, says) in &cases {
        let (taken, text) = eventually("it is told", || told(driver).into_iter().next()).await;
        assert!(!taken && text.contains(says), "{text}");
    }
    assert!(agent.drivers.registered().is_empty());
    // They are asked again, and taken once they are good.
    let (driver, _) = &mut cases[3];
    driver.options_mut().node_id = "n".to_owned();
    driver.restart().unwrap();
    agent.has("node").await;
    agent.end().await;
}

#[tokio::test]
async fn a_driver_that_hangs_holds_nobody_up_and_is_tried_again() {
    let dirs = Dirs::new();
    let slow = dirs.driver("slow");
    slow.inject("NodeGetInfo", 1, &Fault::Hang).unwrap();
    let failing = dirs.driver("failing");
    let fault = Fault::Fail(14, "not yet".to_owned());
    failing.inject("NodeGetInfo", 2, &fault).unwrap();
    let mute = dirs.root().join("plugins_registry/mute.sock");
    let _mute = UnixListener::bind(mute).unwrap();
    let mut agent = Agent::start(&dirs, None);
    agent.has("failing").await;
    let tries = failing.calls_of("NodeGetInfo");
    assert_eq!(tries.len(), 3);
    eventually("it is told", || (told(&failing).len() == 3).then_some(())).await;
    assert!(told(&failing)[0].1.contains("not yet"));
    assert!(told(&failing)[2].0);
    assert!(agent.drivers.client("slow").is_none());
    agent.end().await;
}

#[tokio::test]
async fn of_two_drivers_with_one_name_the_higher_version_wins() {
    let dirs = Dirs::new();
    let start = |dir: &str, version: &str| {
        let mut options = dirs.options("d");
        options.state = dirs.path().join(dir);
        options.versions = vec![version.to_owned()];
        options.endpoint = dirs.root().join(format!("plugins/{dir}.sock"));
        options.registration = dirs.root().join(format!("plugins_registry/{dir}.sock"));
        CsiDriver::start(options).unwrap()
    };
    let middle = start("middle", "1.5.0");
    let mut agent = Agent::start(&dirs, None);
    assert_eq!(agent.has("d").await.socket(), middle.options().endpoint);
    let low = start("low", "1.4.9");
    let (taken, text) = eventually("it is told", || told(&low).into_iter().next()).await;
    assert!(!taken && text.contains("registered already"), "{text}");
    let same = start("same", "v1.5.0");
    let (taken, _) = eventually("it is told", || told(&same).into_iter().next()).await;
    assert!(!taken);
    assert_eq!(agent.has("d").await.socket(), middle.options().endpoint);
    let mut high = start("high", "1.10.0");
    let socket_is = |socket: &std::path::Path| {
        let drivers = agent.drivers.clone();
        let socket = socket.to_owned();
        move || {
            let is = drivers.client("d").is_some_and(|c| c.socket() == socket);
            is.then_some(())
        }
    };
    eventually("the highest wins", socket_is(&high.options().endpoint)).await;
    // When it goes, another one has its turn.
    high.stop();
    let others = [&middle, &low, &same];
    eventually("another one takes its place", || {
        let client = agent.drivers.client("d")?;
        others
            .iter()
            .any(|o| o.options().endpoint == client.socket())
            .then_some(())
    })
    .await;
    agent.end().await;
}

#[tokio::test]
async fn a_socket_that_nobody_listens_on_gives_way() {
    let dirs = Dirs::new();
    let mut old = dirs.driver("d");
    let mut agent = Agent::start(&dirs, None);
    agent.has("d").await;
    old.kill9();
    let mut options = dirs.options("d");
    options.state = dirs.path().join("new");
    options.endpoint = dirs.root().join("plugins/new.sock");
    options.registration = dirs.root().join("plugins_registry/new.sock");
    let new = CsiDriver::start(options).unwrap();
    eventually("the living one is taken", || {
        let client = agent.drivers.client("d")?;
        (client.socket() == new.options().endpoint).then_some(())
    })
    .await;
    agent.end().await;
}

#[tokio::test]
async fn a_driver_goes_with_its_socket_and_comes_back() {
    let dirs = Dirs::new();
    let mut driver = dirs.driver("d");
    let mut agent = Agent::start(&dirs, None);
    let mut changes = agent.drivers.changes();
    agent.has("d").await;
    eventually("it is told", || (told(&driver).len() == 1).then_some(())).await;
    changes.changed().await.unwrap();
    driver.stop();
    agent.lost("d").await;
    changes.changed().await.unwrap();
    eventually("its record goes", || {
        recorded(&agent).is_empty().then_some(())
    })
    .await;
    driver.restart().unwrap();
    let client = agent.has("d").await;
    client.node_get_info().await.unwrap();
    // Killed and started again, it registers again: the socket is another one.
    eventually("it is told again", || {
        (told(&driver).len() == 2).then_some(())
    })
    .await;
    driver.restart().unwrap();
    eventually("it is told a third time", || {
        (told(&driver).len() == 3).then_some(())
    })
    .await;
    assert!(told(&driver).iter().all(|(taken, _)| *taken));
    client.node_get_info().await.unwrap();
    agent.end().await;
}

#[tokio::test]
async fn after_a_restart_of_the_agent_drivers_are_there_at_once() {
    let dirs = Dirs::new();
    let mut gone = dirs.driver("gone");
    let driver = dirs.driver("stays");
    let agent = Agent::start(&dirs, None);
    agent.has("stays").await;
    agent.has("gone").await;
    eventually("it is told", || (told(&driver).len() == 1).then_some(())).await;
    let mut agent = agent.restarted(&dirs).await;
    // It does not look for drivers yet.
    let client = agent.drivers.client("stays").expect("on record");
    client.node_get_info().await.unwrap();
    assert!(agent.drivers.client("gone").is_some());
    gone.stop();
    agent.run();
    agent.lost("gone").await;
    eventually("it registers again", || {
        (told(&driver).len() == 2).then_some(())
    })
    .await;
    assert!(agent.drivers.client("stays").is_some());
    assert_eq!(recorded(&agent), ["csiplugins//stays"]);
    agent.end().await;
}

#[tokio::test]
async fn drivers_can_be_given() {
    let client = CsiClient::new("d", "/nowhere.sock", Metrics::default());
    let drivers = Drivers::with_clients([client]);
    assert_eq!(drivers.client("d").unwrap().driver(), "d");
    assert!(drivers.client("e").is_none());
    let stop = tokio_util::sync::CancellationToken::new();
    let run = tokio::spawn(drivers.run(stop.clone()));
    stop.cancel();
    tokio::time::timeout(Duration::from_secs(10), run)
        .await
        .unwrap()
        .unwrap();
}
