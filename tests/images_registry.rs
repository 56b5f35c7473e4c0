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
    reason = "a test fails by panicking"
)]

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::Instant;

use holdfast::images::{
    ImageConfig, ImageError, ImageErrorReason, ImageManager, NodeLogins, PullInputs, PullSecrets,
};
use holdfast::kubeletconfig::PullFallback;
use holdfast::kuberuntime::cri::{CriClient, CriTimeouts, v1};
use holdfast::store::backend::SledOptions;
use holdfast::store::open::{self, OpenOptions};
use holdfast::store::recover::Identity;
use holdfast::store::{Store, StoreOptions};
use holdfast::types::events::MemoryRecorder;
use holdfast::types::metrics::Metrics;
use holdfast::types::{BootId, BootIdentity, Clock, PodExt, Stamp, SystemClock};
use holdfast_testkit::containerd::{PrivateContainerd, Version};
use holdfast_testkit::ports::free_port;
use k8s_openapi::api::core::v1::{Pod, Secret};
use serde_json::json;
use sha2::{Digest, Sha256};

/// `bob` with password `hunter2`, as `htpasswd -B` writes it.
const HTPASSWD: &str = "bob:$2y$05$WWgRVED/LLTOZtkWUUWvSuGUdwSAfsFFCIlEoVX0IB8kK6if2wpFe\n";
const LAYER: usize = 1 << 20;

/// A `docker-registry`, killed when dropped.
struct Registry {
    child: Child,
    port: u16,
    dir: tempfile::TempDir,
}

impl Registry {
    fn start(with_password: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let port = free_port();
        let mut config = json!({
            "version": 0.1,
            "log": {"level": "error"},
            "storage": {"filesystem": {"rootdirectory": dir.path().join("data")}},
            "http": {"addr": format!("127.0.0.1:{port}")},
        });
        if with_password {
            let path = dir.path().join("htpasswd");
            fs::write(&path, HTPASSWD).unwrap();
            config["auth"] = json!({"htpasswd": {"realm": "test", "path": path}});
        }
        // JSON is YAML.
        let path = dir.path().join("config.yml");
        fs::write(&path, config.to_string()).unwrap();
        let log = fs::File::create(dir.path().join("log")).unwrap();
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(&path)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .expect("THERE IS NO docker-registry TO TEST AGAINST; hack/deps.sh test installs it");
        let registry = Self { child, port, dir };
        let begun = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(
                begun.elapsed() < Duration::from_secs(30),
                "docker-registry does not listen: {}",
                fs::read_to_string(registry.dir.path().join("log")).unwrap_or_default()
            );
            std::thread::yield_now();
        }
        registry
    }

    fn v2(&self) -> PathBuf {
        self.dir.path().join("data/docker/registry/v2")
    }

    fn blob_path(&self, digest: &str) -> PathBuf {
        let hex = digest.strip_prefix("sha256:").unwrap();
        let dir = self.v2().join("blobs/sha256").join(&hex[..2]).join(hex);
        dir.join("data")
    }

    fn blob(&self, repository: &str, content: &[u8]) -> String {
        let digest = digest_of(content);
        write(&self.blob_path(&digest), content);
        let hex = digest.strip_prefix("sha256:").unwrap();
        let layers = self.v2().join("repositories").join(repository);
        let link = layers.join("_layers/sha256").join(hex).join("link");
        write(&link, digest.as_bytes());
        digest
    }

    fn tag(&self, repository: &str, tag: &str, manifest: &[u8]) -> String {
        let digest = self.blob(repository, manifest);
        let hex = digest.strip_prefix("sha256:").unwrap();
        let manifests = self.v2().join("repositories").join(repository);
        let manifests = manifests.join("_manifests");
        for link in [
            format!("revisions/sha256/{hex}/link"),
            format!("tags/{tag}/current/link"),
            format!("tags/{tag}/index/sha256/{hex}/link"),
        ] {
            write(&manifests.join(link), digest.as_bytes());
        }
        digest
    }

    /// An image with content of its own.
    fn push(&self, repository: &str, tag: &str) -> Pushed {
        self.push_of(repository, tag, LAYER)
    }

    /// An image with a layer of about that many bytes.
    fn push_of(&self, repository: &str, tag: &str, size: usize) -> Pushed {
        let layer = layer(size);
        let layer_digest = self.blob(repository, &layer);
        let arch = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        let config = json!({
            "architecture": arch, "os": "linux", "config": {"Cmd": ["/content"]},
            "rootfs": {"type": "layers", "diff_ids": [layer_digest]},
        })
        .to_string();
        let config_digest = self.blob(repository, config.as_bytes());
        let kind = "application/vnd.oci.image.";
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": format!("{kind}manifest.v1+json"),
            "config": {
                "mediaType": format!("{kind}config.v1+json"),
                "digest": config_digest, "size": config.len(),
            },
            "layers": [{
                "mediaType": format!("{kind}layer.v1.tar"),
                "digest": layer_digest, "size": layer.len(),
            }],
        })
        .to_string();
        Pushed {
            manifest: self.tag(repository, tag, manifest.as_bytes()),
            layer: layer_digest,
            id: config_digest,
        }
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

struct Pushed {
    manifest: String,
    layer: String,
    id: String,
}

fn write(path: &Path, content: &[u8]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

fn digest_of(content: &[u8]) -> String {
    let hash = Sha256::digest(content);
    let hex: String = hash.iter().map(|b| format!("{b:02x}")).collect();
    format!("sha256:{hex}")
}

/// A tar archive with one file of that many bytes that nobody had before.
fn layer(size: usize) -> Vec<u8> {
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let mut seed = format!("{}-{serial}", std::process::id()).into_bytes();
    let mut content = Vec::with_capacity(size);
    while content.len() < size {
        seed = Sha256::digest(&seed).to_vec();
        content.extend_from_slice(&seed);
    }
    let mut header = [0_u8; 512];
    let mut field = |at: usize, text: &str| {
        header[at..at + text.len()].copy_from_slice(text.as_bytes());
    };
    field(0, "content");
    field(100, "0000644");
    field(108, "0000000");
    field(116, "0000000");
    field(124, &format!("{:011o}", content.len()));
    field(136, "00000000000");
    field(148, "        ");
    field(156, "0");
    field(257, "ustar");
    field(263, "00");
    let sum: u32 = header.iter().map(|b| u32::from(*b)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let mut tar = header.to_vec();
    tar.extend_from_slice(&content);
    tar.resize(tar.len().next_multiple_of(512) + 1024, 0);
    tar
}

#[derive(Clone, Copy)]
enum Weather {
    Fine,
    /// So many bytes per second and connection.
    Slow(usize),
    /// So many bytes in all, then every connection breaks.
    Cut(usize),
    /// Connections break at once.
    Away,
    /// Connections stay open without an answer.
    Mute,
}

/// A TCP proxy before a registry.
struct Proxy {
    port: u16,
    weather: Arc<Mutex<Weather>>,
    sent: Arc<AtomicU64>,
}

impl Proxy {
    fn start(upstream: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Self {
            port: listener.local_addr().unwrap().port(),
            weather: Arc::new(Mutex::new(Weather::Fine)),
            sent: Arc::default(),
        };
        let (weather, sent) = (Arc::clone(&proxy.weather), Arc::clone(&proxy.sent));
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (weather, sent) = (Arc::clone(&weather), Arc::clone(&sent));
                std::thread::spawn(move || relay(client, upstream, &weather, &sent));
            }
        });
        proxy
    }

    fn set(&self, weather: Weather) {
        self.sent.store(0, Ordering::SeqCst);
        *self.weather.lock().unwrap() = weather;
    }
}

fn relay(mut client: TcpStream, upstream: u16, weather: &Mutex<Weather>, sent: &AtomicU64) {
    let now = *weather.lock().unwrap();
    match now {
        Weather::Away => return,
        Weather::Mute => {
            io::copy(&mut client, &mut io::sink()).ok();
            return;
        }
        Weather::Fine | Weather::Slow(_) | Weather::Cut(_) => {}
    }
    let Ok(server) = TcpStream::connect(("127.0.0.1", upstream)) else {
        return;
    };
    let (mut from_client, mut to_server) =
        (client.try_clone().unwrap(), server.try_clone().unwrap());
    std::thread::spawn(move || {
        io::copy(&mut from_client, &mut to_server).ok();
        to_server.shutdown(Shutdown::Write).ok();
    });
    let (mut server, mut client) = (server, client);
    let mut buffer = [0_u8; 8192];
    while let Ok(count @ 1..) = server.read(&mut buffer) {
        let so_far = sent.fetch_add(count as u64, Ordering::SeqCst);
        let weather = *weather.lock().unwrap();
        match weather {
            Weather::Fine => {}
            Weather::Slow(rate) => {
                std::thread::sleep(Duration::from_secs_f64(count as f64 / rate as f64));
            }
            Weather::Cut(limit) if so_far >= limit as u64 => break,
            Weather::Cut(_) => {}
            // Connections of better times do not outlive them.
            Weather::Away | Weather::Mute => break,
        }
        if client.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    client.shutdown(Shutdown::Both).ok();
    server.shutdown(Shutdown::Both).ok();
}

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
    _containerd: PrivateContainerd,
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
        _containerd: containerd,
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
