//! Images from a registry: Debian's `docker-registry` on loopback, a real containerd, and a proxy between
//! them that is slow or breaks off.
//!
//! Images are written straight into the registry's storage, each with content of its own, so that no layer is
//! on the node before it is pulled. Needs root, containerd (`hack/deps.sh runtime`) and docker-registry
//! (`hack/deps.sh test`).
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    unreachable_pub,
    reason = "a test fails by panicking"
)]

#[path = "support/registry.rs"]
mod registry;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;
use tokio::time::Instant;

use holdfast::images::{
    ImageConfig, ImageError, ImageErrorReason, ImageManager, NodeLogins, PullInputs, PullSecrets,
};
use holdfast::kubeletconfig::PullFallback;
use holdfast::kuberuntime::cri::{CriClient, CriTimeouts, PULL_LEASES, v1};
use holdfast::store::backend::SledOptions;
use holdfast::store::open::{self, OpenOptions};
use holdfast::store::recover::Identity;
use holdfast::store::{Store, StoreOptions};
use holdfast::types::events::MemoryRecorder;
use holdfast::types::metrics::Metrics;
use holdfast::types::{BootId, BootIdentity, Clock, PodExt, Stamp, SystemClock};
use holdfast_testkit::containerd::{PrivateContainerd, Version};
use k8s_openapi::api::core::v1::{Pod, Secret};
use registry::{LAYER, Proxy, Registry, Weather, digest_of};
use serde_json::json;

/// The kernel's clock, set forward.
struct TestClock(SystemClock, AtomicI64);

impl Clock for TestClock {
    fn now(&self) -> Stamp {
        let ahead = u64::try_from(self.1.load(Ordering::SeqCst)).unwrap();
        self.0.now().plus(Duration::from_millis(ahead))
    }
}

struct World {
    cri: CriClient,
    store: Store,
    clock: Arc<TestClock>,
    recorder: MemoryRecorder,
    images: ImageManager,
    /// The image that the container ran with before.
    ran_with: Option<String>,
    containerd: PrivateContainerd,
}

fn world() -> World {
    let containerd = PrivateContainerd::start(Version::Installed)
        .expect("these tests need containerd; hack/deps.sh runtime installs it");
    let clock = Arc::new(TestClock(SystemClock::new(BootId(1)), AtomicI64::new(0)));
    World {
        cri: CriClient::new(
            &containerd.endpoint(),
            None,
            CriTimeouts::default(),
            Metrics::default(),
        )
        .unwrap(),
        store: Store::in_memory(clock.clone()),
        images: manager(&clock),
        clock,
        recorder: MemoryRecorder::default(),
        ran_with: None,
        containerd,
    }
}

fn manager(clock: &Arc<TestClock>) -> ImageManager {
    ImageManager::new(ImageConfig::default(), clock.clone(), Metrics::default())
}

fn pod(uid: &str, image: &str, policy: &str) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": uid, "namespace": "ns", "uid": uid},
        "spec": {"containers": [{"name": "c", "image": image, "imagePullPolicy": policy}]},
    }))
    .unwrap()
}

fn secret(port: u16, uid: &str, password: &str) -> PullSecrets {
    let config = json!({"auths": {
        format!("127.0.0.1:{port}"): {"username": "bob", "password": password},
    }});
    PullSecrets {
        found: vec![Arc::new(Secret {
            metadata: serde_json::from_value(json!({
                "name": "pull", "namespace": "ns", "uid": uid,
            }))
            .unwrap(),
            type_: Some("kubernetes.io/dockerconfigjson".to_owned()),
            data: Some(BTreeMap::from([(
                ".dockerconfigjson".to_owned(),
                k8s_openapi::ByteString(config.to_string().into_bytes()),
            )])),
            ..Default::default()
        })],
        missing: Vec::new(),
    }
}

impl World {
    async fn ensure(
        &self,
        uid: &str,
        image: &str,
        policy: &str,
        secrets: &PullSecrets,
    ) -> Result<String, ImageError> {
        let pod = pod(uid, image, policy);
        let inputs = PullInputs {
            sandbox: None,
            secrets,
            ran_with: self.ran_with.as_deref(),
        };
        self.images
            .ensure(
                &pod,
                &pod.containers()[0],
                inputs,
                &self.cri,
                &self.store,
                &self.recorder,
            )
            .await
            .map(|present| present.reference)
    }

    async fn open(&self, uid: &str, image: &str, policy: &str) -> Result<String, ImageError> {
        self.ensure(uid, image, policy, &PullSecrets::default())
            .await
    }

    fn events(&self, uid: &str) -> Vec<(String, String)> {
        let events = self.recorder.events().into_iter();
        events
            .filter(|e| format!("{e:?}").contains(&format!("{uid:?}")))
            .map(|e| (e.reason, e.message))
            .collect()
    }

    fn advance(&self, by: Duration) {
        let ms = i64::try_from(by.as_millis()).unwrap();
        self.clock.1.fetch_add(ms, Ordering::SeqCst);
    }

    async fn is_there(&self, image: &str) -> bool {
        self.cri.image_status(image).await.unwrap().is_some()
    }
}

fn reason(result: &Result<String, ImageError>) -> Option<ImageErrorReason> {
    result.as_ref().err().map(|e| e.reason)
}

#[tokio::test]
async fn an_open_registry_by_tag_and_digest_slow_cut_off_and_corrupt() {
    let (world, registry) = (world(), Registry::start(false));
    let proxy = Proxy::start(registry.port);
    let host = format!("127.0.0.1:{}", proxy.port);

    // Policies.
    let pushed = registry.push("team/app", "1");
    let image = format!("{host}/team/app:1");
    let never = world.open("never", &image, "Never").await;
    assert_eq!(reason(&never), Some(ImageErrorReason::ErrImageNeverPull));
    let id = world.open("first", &image, "IfNotPresent").await.unwrap();
    assert_eq!(id, pushed.id);
    let told = world.events("first");
    assert_eq!(told[0].1, format!("Pulling image \"{image}\""));
    let pulled = &told[1].1;
    assert!(
        pulled.starts_with(&format!("Successfully pulled image \"{image}\" in "))
            && pulled.contains(" including waiting). Image size: ")
            && !pulled.contains("size: 0 bytes"),
        "{pulled}"
    );
    assert_eq!(world.open("never", &image, "Never").await.unwrap(), id);
    let newer = registry.push("team/app", "1");
    let stays = world.open("second", &image, "IfNotPresent").await.unwrap();
    assert_eq!(stays, id, "what is present is not asked for again");
    let fresh = world.open("second", &image, "Always").await.unwrap();
    assert_eq!(fresh, newer.id, "Always asks the registry");

    // Digests.
    let by_digest = format!("{host}/team/app@{}", pushed.manifest);
    let got = world.open("digest", &by_digest, "IfNotPresent").await;
    assert_eq!(got.unwrap(), pushed.id);
    let wrong = format!("{host}/team/app@{}", digest_of(b"another"));
    let got = world.open("digest", &wrong, "IfNotPresent").await;
    assert_eq!(reason(&got), Some(ImageErrorReason::ErrImagePull));
    for name in [
        &*format!("{host}/UPPER/case"),
        "two words",
        &id["sha256:".len()..],
    ] {
        let got = world.open("name", name, "IfNotPresent").await;
        assert_eq!(
            reason(&got),
            Some(ImageErrorReason::InvalidImageName),
            "{name}"
        );
    }

    // Slow.
    registry.push("team/slow", "1");
    let slow = format!("{host}/team/slow:1");
    proxy.set(Weather::Slow(LAYER / 2));
    let begun = Instant::now();
    world.open("slow", &slow, "IfNotPresent").await.unwrap();
    assert!(begun.elapsed() >= Duration::from_secs(1), "it was not slow");

    // Cut off half-way, then retried after the back-off.
    registry.push("team/cut", "1");
    let cut = format!("{host}/team/cut:1");
    proxy.set(Weather::Cut(LAYER / 2));
    let broken = world.open("cut", &cut, "IfNotPresent").await;
    assert_eq!(
        reason(&broken),
        Some(ImageErrorReason::ErrImagePull),
        "{broken:?}"
    );
    assert!(!world.is_there(&cut).await);
    proxy.set(Weather::Fine);
    let again = world.open("cut", &cut, "IfNotPresent").await;
    let message = again.as_ref().unwrap_err().message.clone();
    assert_eq!(reason(&again), Some(ImageErrorReason::ImagePullBackOff));
    assert!(
        message.starts_with(&format!("Back-off pulling image \"{cut}\": ErrImagePull: ")),
        "{message}"
    );
    world.advance(Duration::from_secs(10));
    world.open("cut", &cut, "IfNotPresent").await.unwrap();

    // Corrupt.
    let pushed = registry.push("team/corrupt", "1");
    let corrupt = format!("{host}/team/corrupt:1");
    let path = registry.blob_path(&pushed.layer);
    let mut bad = fs::read(&path).unwrap();
    bad[LAYER / 2] ^= 1;
    fs::write(&path, &bad).unwrap();
    let broken = world.open("corrupt", &corrupt, "IfNotPresent").await;
    assert_eq!(reason(&broken), Some(ImageErrorReason::ErrImagePull));
    let never = world.open("other", &corrupt, "Never").await;
    assert_eq!(
        reason(&never),
        Some(ImageErrorReason::ErrImageNeverPull),
        "nothing is left that a pod could use"
    );
    // Mended by a new push: containerd 1.6 refuses the same layer again, mended or not.
    let good = registry.push("team/corrupt", "1");
    world.advance(Duration::from_secs(10));
    let mended = world.open("corrupt", &corrupt, "IfNotPresent").await;
    assert_eq!(mended.unwrap(), good.id);

    // No image at all.
    registry.tag("team/garbage", "1", b"this is no manifest");
    let garbage = format!("{host}/team/garbage:1");
    let got = world.open("garbage", &garbage, "IfNotPresent").await;
    assert_eq!(reason(&got), Some(ImageErrorReason::ErrImagePull));
    assert!(!got.unwrap_err().message.is_empty());
}

#[tokio::test]
async fn a_registry_with_passwords_and_who_may_use_what_came_from_it() {
    let (mut world, registry) = (world(), Registry::start(true));
    registry.push("team/app", "1");
    let image = format!("127.0.0.1:{}/team/app:1", registry.port);
    let (right, wrong) = (
        secret(registry.port, "s1", "hunter2"),
        secret(registry.port, "s2", "wrong"),
    );
    let may = "IfNotPresent";
    for (uid, secrets) in [("none", &PullSecrets::default()), ("wrong", &wrong)] {
        let got = world.ensure(uid, &image, may, secrets).await;
        assert_eq!(reason(&got), Some(ImageErrorReason::ErrImagePull), "{uid}");
        assert!(!world.is_there(&image).await);
    }
    let id = world.ensure("right", &image, may, &right).await.unwrap();

    for restarted in [false, true] {
        if restarted {
            world.images = manager(&world.clock);
        }
        let name = |uid: &str| format!("{uid}-{restarted}");
        let got = world.ensure(&name("right"), &image, may, &right).await;
        assert_eq!(got.unwrap(), id);
        assert_eq!(
            world.events(&name("right")),
            [(
                "Pulled".to_owned(),
                format!(
                    "Container image \"{image}\" already present on machine and can be accessed by the pod"
                )
            )]
        );
        let got = world.open(&name("none"), &image, may).await;
        assert_eq!(reason(&got), Some(ImageErrorReason::ErrImagePull));
        let got = world.ensure(&name("wrong"), &image, may, &wrong).await;
        assert_eq!(reason(&got), Some(ImageErrorReason::ErrImagePull));
        let got = world.open(&name("never"), &image, "Never").await;
        assert_eq!(reason(&got), Some(ImageErrorReason::ErrImageNeverPull));
        let got = world.ensure(&name("never"), &image, "Never", &right).await;
        assert_eq!(got.unwrap(), id);
    }
}

/// A login in the node's `config.json` counts for pods without pull secrets, from the pull after it was written.
#[tokio::test]
async fn the_nodes_own_login_is_read_for_each_pull() {
    let (mut world, registry) = (world(), Registry::start(true));
    registry.push("team/app", "1");
    let image = format!("127.0.0.1:{}/team/app:1", registry.port);
    let dir = tempfile::tempdir().unwrap();
    let logins = NodeLogins::new(dir.path(), dir.path(), None);
    world.images = manager(&world.clock).with_node_logins(logins);
    let login = |password: &str| {
        let host = format!("127.0.0.1:{}", registry.port);
        let config = json!({"auths": {host: {"username": "bob", "password": password}}});
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    };
    let no_login = world.open("none", &image, "IfNotPresent").await;
    assert_eq!(reason(&no_login), Some(ImageErrorReason::ErrImagePull));
    login("wrong");
    let wrong = world.open("wrong", &image, "IfNotPresent").await;
    assert_eq!(reason(&wrong), Some(ImageErrorReason::ErrImagePull));
    login("hunter2");
    world.open("right", &image, "IfNotPresent").await.unwrap();
    assert!(world.is_there(&image).await);
    let everyone = world.open("other", &image, "IfNotPresent").await;
    everyone.expect("what came by the node's login is for every pod");
}

/// A container that has run, and whose registry is away since. Registry, proxy and image come with it.
async fn ran_before(fallback: PullFallback) -> (World, Registry, Proxy, String) {
    let (mut world, registry) = (world(), Registry::start(false));
    world.images = manager(&world.clock).falling_back(fallback);
    let proxy = Proxy::start(registry.port);
    registry.push("team/app", "1");
    let image = format!("127.0.0.1:{}/team/app:1", proxy.port);
    let id = world.open("u", &image, "Always").await.unwrap();
    world.ran_with = Some(id);
    proxy.set(Weather::Away);
    let first = world.open("u", &image, "Always").await;
    assert_eq!(reason(&first), Some(ImageErrorReason::ErrImagePull));
    tokio::time::sleep(Duration::from_secs(10)).await;
    (world, registry, proxy, image)
}

fn fell_back(world: &World) -> usize {
    let events = world.events("u").into_iter();
    events.filter(|(r, _)| r == "ImagePullFallback").count()
}

#[tokio::test]
async fn r42_by_default_a_container_of_policy_always_waits_for_its_registry() {
    let (world, _registry, proxy, image) = ran_before(PullFallback::Never).await;
    let second = world.open("u", &image, "Always").await;
    assert!(second.is_err(), "{second:?}");
    assert_eq!(fell_back(&world), 0);
    proxy.set(Weather::Fine);
    world.advance(Duration::from_secs(60));
    let pulled = world.open("u", &image, "Always").await;
    assert_eq!(pulled.ok(), world.ran_with);
}

#[tokio::test]
async fn r42_offline_it_starts_from_the_image_it_ran_with_and_pulls_when_the_registry_answers() {
    let (mut world, registry, proxy, image) = ran_before(PullFallback::Offline).await;
    let started = world.open("u", &image, "Always").await;
    assert_eq!(started.ok(), world.ran_with);
    assert_eq!(fell_back(&world), 1, "{:?}", world.events("u"));

    let newer = registry.push("team/app", "1");
    proxy.set(Weather::Fine);
    let pulled = world.open("u", &image, "Always").await;
    assert_eq!(pulled.unwrap(), newer.id);

    // What takes long and loads is no outage.
    world.ran_with = Some(newer.id);
    let newest = registry.push("team/app", "1");
    proxy.set(Weather::Slow(LAYER / 15));
    let pulled = world.open("u", &image, "Always").await;
    assert_eq!(pulled.unwrap(), newest.id);
    assert_eq!(fell_back(&world), 1);

    world.ran_with = Some(newest.id);
    proxy.set(Weather::Mute);
    let begun = Instant::now();
    let started = world.open("u", &image, "Always").await;
    assert_eq!(started.ok(), world.ran_with);
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "{:?}",
        begun.elapsed()
    );
    assert_eq!(fell_back(&world), 2);
}

fn on_disk(dir: &Path, clock: &Arc<TestClock>) -> Store {
    let opened = open::open(&OpenOptions {
        dir: dir.join("store"),
        identity: Identity {
            node_name: "figures".to_owned(),
            machine_id: String::new(),
            boot: BootIdentity::read(Some("figures"), None),
        },
        node_was_used: false,
        sled: SledOptions::default(),
        now: clock.now(),
    })
    .unwrap();
    let options = StoreOptions::default();
    let metrics = Metrics::default();
    Store::start(
        opened.backend,
        opened.loaded,
        options,
        clock.clone(),
        metrics,
    )
    .unwrap()
}

/// How long a pull takes, straight from the runtime and by the agent, which brings the image to the disk before a pod gets it. In
/// turn, the disk at rest before each. The store is on the disk. Prints; asserts that both pulled.
///
/// `HOLDFAST_FIGURES` makes it long enough to measure something.
#[tokio::test]
async fn figures_of_pulls_to_those_of_the_runtime_alone() {
    let long = std::env::var_os("HOLDFAST_FIGURES").is_some();
    let (rounds, sizes): (usize, &[usize]) = if long { (15, &[1, 16, 64]) } else { (1, &[1]) };
    let (mut world, registry) = (world(), Registry::start(false));
    let dir = tempfile::tempdir().unwrap();
    world.store = on_disk(dir.path(), &world.clock);
    let host = format!("127.0.0.1:{}", registry.port);
    for mebibytes in sizes {
        let (mut alone, mut by_agent) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            for agent in [round % 2 == 0, round % 2 != 0] {
                let tag = format!("{mebibytes}-{round}-{agent}");
                let id = registry.push_of("team/figures", &tag, mebibytes << 20).id;
                let image = format!("{host}/team/figures:{tag}");
                rustix::fs::sync();
                let begun = Instant::now();
                if agent {
                    let got = world.open(&tag, &image, "IfNotPresent").await;
                    by_agent.push(begun.elapsed());
                    assert_eq!(got.unwrap(), id);
                } else {
                    let spec = v1::ImageSpec {
                        image,
                        ..Default::default()
                    };
                    let got = world.cri.pull_image(spec, None, None).await;
                    alone.push(begun.elapsed());
                    assert_eq!(got.unwrap(), id);
                }
            }
        }
        let median = |times: &mut Vec<Duration>| {
            times.sort_unstable();
            times[times.len() / 2]
        };
        let (alone, by_agent) = (median(&mut alone), median(&mut by_agent));
        println!(
            "pull of {mebibytes} MiB, median of {rounds}: runtime alone {alone:.1?}, agent {by_agent:.1?}, {:.2} x",
            by_agent.as_secs_f64() / alone.as_secs_f64()
        );
    }
}

/// A client as an agent has it that was started in a boot.
fn client(world: &World, boot: &str) -> CriClient {
    let endpoint = world.containerd.endpoint();
    CriClient::new(&endpoint, None, CriTimeouts::default(), Metrics::default())
        .unwrap()
        .resuming_pulls(boot, world.clock.clone())
}

/// Pulls, and gives up after a time. Returns whether the image is there.
async fn pull_for(cri: &CriClient, image: &str, time: Duration) -> bool {
    let spec = v1::ImageSpec {
        image: image.to_owned(),
        ..Default::default()
    };
    match tokio::time::timeout(time, cri.pull_image(spec, None, None)).await {
        Ok(pulled) => {
            pulled.unwrap();
            true
        }
        Err(_) => false,
    }
}

fn leases(world: &World) -> Vec<String> {
    let listed = world.containerd.ctr(&["leases", "ls", "-q"]).unwrap();
    let ours = listed.lines().filter(|id| id.starts_with(PULL_LEASES));
    ours.map(str::to_owned).collect()
}

const BIG: usize = 24 << 20;

/// R38: what was loaded is not loaded again, however often a pull is cut off.
#[tokio::test]
async fn r38_a_pull_that_is_cut_off_again_and_again_ends_and_loads_nothing_twice() {
    let world = world();
    let registry = Registry::start(false);
    registry.push_layers("big", "1", &[BIG / 2, BIG / 2]);
    let proxy = Proxy::start(registry.port);
    let image = format!("127.0.0.1:{}/big:1", proxy.port);
    proxy.set(Weather::Slow(BIG / 8));
    let mut cuts = 0;
    // Without what came before, a turn brings a part only.
    while !pull_for(&client(&world, "boot"), &image, Duration::from_millis(1500)).await {
        cuts += 1;
        assert!(
            cuts < 40,
            "the pull does not end; {} bytes were sent",
            proxy.sent()
        );
    }
    assert!(cuts >= 2, "nothing was cut off");
    let sent = proxy.sent();
    println!("{cuts} cuts, {BIG} bytes, {sent} sent");
    assert!(
        sent * 10 <= BIG as u64 * 11,
        "{sent} bytes were sent of an image of {BIG}"
    );
    assert_eq!(leases(&world), [""; 0], "a lease outlived its pull");
    let found = client(&world, "boot").image_status(&image).await.unwrap();
    assert!(found.is_some());
}

/// R38: after a power cut, what was downloaded is taken, and what was unpacked is not.
#[tokio::test]
async fn r38_in_the_next_boot_what_was_downloaded_is_taken_and_what_was_unpacked_is_not() {
    let world = world();
    let registry = Registry::start(false);
    registry.push_layers("big", "1", &[BIG / 8, BIG]);
    let proxy = Proxy::start(registry.port);
    let image = format!("127.0.0.1:{}/big:1", proxy.port);
    proxy.set(Weather::Slow(BIG / 6));
    let snapshots = || {
        let listed = world.containerd.ctr(&["snapshots", "ls"]).unwrap();
        listed
            .lines()
            .filter(|line| line.contains("Committed"))
            .count()
    };
    let before = snapshots();
    let mut first = client(&world, "boot 1");
    let begun = Instant::now();
    while snapshots() == before {
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "no layer is unpacked"
        );
        assert!(!pull_for(&first, &image, Duration::from_millis(2500)).await);
        first = client(&world, "boot 1");
    }
    let old = leases(&world);
    assert_eq!(old.len(), 1);
    let next = client(&world, "boot 2");
    next.take_over_pulls().await;
    assert_eq!(
        snapshots(),
        before,
        "what an earlier boot unpacked is still there"
    );
    let new = leases(&world);
    assert!(new.len() == 1 && new != old, "{old:?} became {new:?}");
    assert!(pull_for(&next, &image, Duration::from_secs(60)).await);
    let (sent, size) = (proxy.sent(), BIG as u64 * 9 / 8);
    println!("{size} bytes, {sent} sent");
    assert!(
        sent * 10 <= size * 13,
        "{sent} bytes were sent of an image of {size}"
    );
    assert_eq!(leases(&world), [""; 0]);
}

/// Parts of a pull make room like an image that nothing needs.
#[tokio::test]
async fn parts_of_a_pull_that_is_not_under_way_go_when_room_is_needed() {
    let world = world();
    let registry = Registry::start(false);
    registry.push_of("big", "1", BIG);
    let proxy = Proxy::start(registry.port);
    let image = format!("127.0.0.1:{}/big:1", proxy.port);
    proxy.set(Weather::Slow(BIG / 8));
    let cri = client(&world, "boot");
    assert!(!pull_for(&cri, &image, Duration::from_secs(2)).await);
    let loading = || world.containerd.ctr(&["content", "active"]).unwrap();
    assert_eq!(leases(&world).len(), 1);
    assert!(loading().lines().count() > 1, "{}", loading());
    cri.release_pulls().await;
    assert_eq!(leases(&world), [""; 0]);
    assert_eq!(loading().lines().count(), 1, "{}", loading());
}

/// A clock that is behind.
struct Behind(Arc<dyn Clock>, i64);

impl Clock for Behind {
    fn now(&self) -> Stamp {
        let now = self.0.now();
        Stamp {
            wall_ms: now.wall_ms - self.1,
            ..now
        }
    }
}

#[tokio::test]
async fn parts_of_a_pull_stay_when_another_image_is_removed_and_their_lease_is_renewed() {
    const DAY: i64 = 24 * 3600 * 1000;
    let world = world();
    let registry = Registry::start(false);
    registry.push_of("big", "1", BIG);
    registry.push_of("other", "1", 4096);
    let proxy = Proxy::start(registry.port);
    let (image, other) = (
        format!("127.0.0.1:{}/big:1", proxy.port),
        format!("127.0.0.1:{}/other:1", registry.port),
    );
    proxy.set(Weather::Slow(BIG / 8));
    let endpoint = world.containerd.endpoint();
    let clock = Arc::new(Behind(world.clock.clone(), 6 * DAY));
    let early = CriClient::new(&endpoint, None, CriTimeouts::default(), Metrics::default())
        .unwrap()
        .resuming_pulls("boot", clock);
    assert!(!pull_for(&early, &image, Duration::from_secs(2)).await);
    let loading = || world.containerd.ctr(&["content", "active"]).unwrap();
    assert!(loading().lines().count() > 1, "{}", loading());

    let cri = client(&world, "boot");
    assert!(pull_for(&cri, &other, Duration::from_secs(60)).await);
    cri.remove_image(&other).await.unwrap();
    let held = leases(&world);
    assert_eq!(held.len(), 1);
    assert!(loading().lines().count() > 1, "{}", loading());

    // It ends in a day, by the clock that is right.
    let ends = || {
        let listed = world.containerd.ctr(&["leases", "ls"]).unwrap();
        let line = listed.lines().find(|line| line.contains(PULL_LEASES));
        let line = line.unwrap().to_owned();
        let at = line.split("containerd.io/gc.expire=").nth(1).unwrap();
        let at = at.split([',', ' ']).next().unwrap();
        at.parse::<jiff::Timestamp>().unwrap().as_millisecond()
    };
    let left = || ends() - world.clock.now().wall_ms;
    assert!(left() < 2 * DAY, "{}", left());
    let sent = proxy.sent();
    assert!(!pull_for(&cri, &image, Duration::from_millis(500)).await);
    assert_eq!(leases(&world), held);
    assert!(left() > 6 * DAY, "{}", left());
    proxy.set(Weather::Fine);
    assert!(pull_for(&cri, &image, Duration::from_secs(60)).await);
    let all = proxy.sent();
    assert!(all <= BIG as u64 * 11 / 10, "{sent} before, {all} in all");
    assert_eq!(leases(&world), [""; 0]);
}

/// Damaged parts are not used for ever.
#[tokio::test]
async fn a_damaged_part_costs_one_pull() {
    let world = world();
    let registry = Registry::start(false);
    registry.push_of("big", "1", BIG);
    let proxy = Proxy::start(registry.port);
    let image = format!("127.0.0.1:{}/big:1", proxy.port);
    proxy.set(Weather::Slow(BIG / 8));
    let cri = client(&world, "boot");
    assert!(!pull_for(&cri, &image, Duration::from_secs(2)).await);
    let ingests = world
        .containerd
        .dir()
        .join("root/io.containerd.content.v1.content/ingest");
    let mut damaged = 0;
    for ingest in fs::read_dir(&ingests).unwrap() {
        let data = ingest.unwrap().path().join("data");
        let mut bytes = fs::read(&data).unwrap();
        if let Some(byte) = bytes.get_mut(4096) {
            *byte ^= 1;
            damaged += 1;
            fs::write(&data, bytes).unwrap();
        }
    }
    assert_eq!(damaged, 1);
    proxy.set(Weather::Fine);
    let spec = || v1::ImageSpec {
        image: image.clone(),
        ..Default::default()
    };
    let failed = cri.pull_image(spec(), None, None).await.unwrap_err();
    assert!(failed.to_string().contains("digest"), "{failed}");
    assert_eq!(leases(&world), [""; 0]);
    cri.pull_image(spec(), None, None).await.unwrap();
}
