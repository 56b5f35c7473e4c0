mod access;
mod collect;
mod fallback;
mod pulling;
mod repair;

use std::collections::{BTreeMap, HashSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use serde_json::json;
use tokio::sync::{Notify, Semaphore};

use k8s_openapi::api::core::v1::{ImageVolumeSource, Secret};

use super::*;
use crate::kuberuntime::cri::CriErrorKind;
use crate::types::events::MemoryRecorder;
use crate::types::{BootId, Stamp, blocking};

/// Milliseconds since the boot, and which boot.
struct TestClock(Mutex<i64>, AtomicU64);

impl TestClock {
    fn advance(&self, by: Duration) {
        *self.0.lock().unwrap() += i64::try_from(by.as_millis()).unwrap();
    }

    fn reboot(&self) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

impl Clock for TestClock {
    fn now(&self) -> Stamp {
        let ms = *self.0.lock().unwrap();
        Stamp {
            boot: BootId(self.1.load(Ordering::SeqCst)),
            boottime_ms: ms,
            wall_ms: ms,
        }
    }
}

#[derive(Default)]
struct Fake {
    present: Mutex<HashSet<String>>,
    fail: Mutex<Option<String>>,
    fail_inspect: Mutex<bool>,
    /// Names that the runtime cannot resolve.
    unresolvable: Mutex<HashSet<String>>,
    fail_list: Mutex<bool>,
    fail_removal: Mutex<bool>,
    pulls: AtomicU32,
    /// User of each pull.
    users: Mutex<Vec<Option<String>>>,
    /// The only user that may pull.
    only: Mutex<Option<String>>,
    most_at_once: AtomicU32,
    at_once: AtomicU32,
    gate: Mutex<Option<Arc<Semaphore>>>,
    begun: Notify,
    /// Images that were removed, in this order.
    removed: Mutex<Vec<String>>,
    /// Number of images that were removed each time when the parts of pulls were let go.
    released: Mutex<Vec<usize>>,
    /// Number of requests for the image directory.
    syncs: AtomicU32,
    /// The directory of images is not there.
    no_directory: Mutex<bool>,
    /// Names of images that containers were made of.
    in_use: Mutex<HashSet<String>>,
    /// Stands for the directory of images.
    directory: Mutex<Option<PathBuf>>,
    /// Pods with containers.
    holders: Mutex<Vec<PodStatus>>,
    /// Pods with the images of their sandboxes.
    sandboxes: Mutex<Vec<(PodStatus, Vec<super::SandboxImage>)>>,
    /// Sandboxes that were removed, in this order.
    removed_sandboxes: Mutex<Vec<ContainerId>>,
    /// Names that stand for the image of another name.
    aliases: Mutex<BTreeMap<String, String>>,
    /// Images whose registry is away.
    away: Mutex<HashSet<String>>,
    /// Images whose registry does not answer.
    hang: Mutex<HashSet<String>>,
    /// Layers of images, the lowest first.
    layers: Mutex<BTreeMap<String, Vec<String>>>,
    /// Images of sandboxes, or pinned images.
    sandbox_images: Mutex<Vec<String>>,
    /// Number of requests for the containers of an image.
    looks: AtomicU32,
}

impl Fake {
    fn id_of(&self, name: &str) -> String {
        let aliases = self.aliases.lock().unwrap();
        format!("id-of-{}", aliases.get(name).map_or(name, String::as_str))
    }

    fn names_of(&self, id: &str) -> Vec<String> {
        let present = self.present.lock().unwrap().clone();
        let mut names: Vec<String> = present.into_iter().collect();
        names.retain(|name| self.id_of(name) == id);
        names.sort_unstable();
        names
    }
}

#[derive(Clone, Default)]
struct FakeService(Arc<Fake>);

fn failure(message: &str) -> CriError {
    CriError {
        operation: "pull_image",
        object: "x".to_owned(),
        kind: CriErrorKind::Other,
        message: message.to_owned(),
        source: None,
    }
}

impl ImageService for FakeService {
    async fn image_status(&self, image: &str) -> Result<Option<v1::Image>, CriError> {
        if *self.0.fail_inspect.lock().unwrap() {
            return Err(failure("inspection broke"));
        }
        if self.0.unresolvable.lock().unwrap().contains(image) {
            return Err(failure("short-name did not resolve to an alias"));
        }
        let image = image.strip_prefix("ref-of-").unwrap_or(image);
        let id = if image.starts_with("id-of-") {
            image.to_owned()
        } else {
            self.0.id_of(image)
        };
        let repo_tags = self.0.names_of(&id);
        let is_there = repo_tags.iter().any(|name| name == image) || *image == id;
        Ok((is_there && !repo_tags.is_empty()).then(|| v1::Image {
            id,
            repo_tags,
            size: 7,
            ..Default::default()
        }))
    }

    async fn image_layers(&self, image: &str) -> Result<Vec<String>, CriError> {
        let layers = self.0.layers.lock().unwrap();
        let name = image.strip_prefix("id-of-").unwrap_or(image);
        Ok(layers.get(name).cloned().unwrap_or_default())
    }

    async fn pull_image(
        &self,
        image: v1::ImageSpec,
        auth: Option<v1::AuthConfig>,
        _: Option<v1::PodSandboxConfig>,
    ) -> Result<String, CriError> {
        let fake = &self.0;
        let user = auth.map(|a| a.username);
        fake.users.lock().unwrap().push(user.clone());
        fake.pulls.fetch_add(1, Ordering::SeqCst);
        if fake.hang.lock().unwrap().contains(&image.image) {
            return std::future::pending().await;
        }
        if fake.away.lock().unwrap().contains(&image.image) {
            return Err(failure("no route to host"));
        }
        let now = fake.at_once.fetch_add(1, Ordering::SeqCst) + 1;
        fake.most_at_once.fetch_max(now, Ordering::SeqCst);
        fake.begun.notify_one();
        let gate = fake.gate.lock().unwrap().clone();
        if let Some(gate) = gate {
            gate.acquire().await.unwrap().forget();
        }
        fake.at_once.fetch_sub(1, Ordering::SeqCst);
        if let Some(message) = fake.fail.lock().unwrap().clone() {
            return Err(failure(&message));
        }
        if fake
            .only
            .lock()
            .unwrap()
            .as_ref()
            .is_some_and(|u| Some(u) != user.as_ref())
        {
            return Err(failure("401 Unauthorized"));
        }
        fake.present.lock().unwrap().insert(image.image.clone());
        Ok(format!("ref-of-{}", image.image))
    }

    async fn list_images(&self) -> Result<Vec<v1::Image>, CriError> {
        if *self.0.fail_list.lock().unwrap() {
            return Err(failure("the list broke"));
        }
        let present = self.0.present.lock().unwrap();
        let image = |name: &String| v1::Image {
            id: format!("id-of-{name}"),
            repo_tags: vec![name.clone()],
            size: 7,
            ..Default::default()
        };
        Ok(present.iter().map(image).collect())
    }

    async fn remove_image(&self, image: &str) -> Result<(), CriError> {
        if *self.0.fail_removal.lock().unwrap() {
            return Err(failure("the removal broke"));
        }
        for name in self.0.names_of(image) {
            self.0.present.lock().unwrap().remove(&name);
        }
        self.0.present.lock().unwrap().remove(image);
        let name = image.strip_prefix("id-of-").unwrap_or(image);
        self.0.removed.lock().unwrap().push(name.to_owned());
        Ok(())
    }

    async fn release_pulls(&self) {
        let removed = self.0.removed.lock().unwrap().len();
        self.0.released.lock().unwrap().push(removed);
    }

    async fn images_in_use(&self) -> Result<HashSet<String>, CriError> {
        Ok(self.0.in_use.lock().unwrap().clone())
    }

    async fn sandbox_images(&self) -> Result<Vec<String>, CriError> {
        Ok(self.0.sandbox_images.lock().unwrap().clone())
    }

    async fn image_directories(&self) -> Result<Vec<PathBuf>, CriError> {
        self.0.syncs.fetch_add(1, Ordering::SeqCst);
        if let Some(directory) = &*self.0.directory.lock().unwrap() {
            return Ok(vec![directory.clone()]);
        }
        let gone = *self.0.no_directory.lock().unwrap();
        // A sync of it costs nothing.
        Ok(vec![PathBuf::from(if gone {
            "/proc/none"
        } else {
            "/proc"
        })])
    }

    async fn containers_of(
        &self,
        image_id: &str,
    ) -> Result<Vec<(PodStatus, Vec<ContainerId>)>, CriError> {
        self.0.looks.fetch_add(1, Ordering::SeqCst);
        let holders = self.0.holders.lock().unwrap();
        let all = holders.iter().map(|status| {
            let of_image = status.containers.iter().filter(|c| c.image_ref == image_id);
            (status.clone(), of_image.map(|c| c.id.clone()).collect())
        });
        Ok(all.collect())
    }

    async fn remove_container(&self, intent: &Committed<RemoveContainer>) -> Result<(), CriError> {
        let id = intent.get().id();
        for status in self.0.holders.lock().unwrap().iter_mut() {
            status.containers.retain(|c| c.id != *id);
        }
        for (status, _) in self.0.sandboxes.lock().unwrap().iter_mut() {
            status.containers.retain(|c| c.id != *id);
        }
        Ok(())
    }

    async fn sandboxes(&self) -> Result<Vec<(PodStatus, Vec<super::SandboxImage>)>, CriError> {
        Ok(self.0.sandboxes.lock().unwrap().clone())
    }

    async fn remove_sandbox(&self, intent: &Committed<RemoveEmptySandbox>) -> Result<(), CriError> {
        let id = intent.get().id();
        for (status, images) in self.0.sandboxes.lock().unwrap().iter_mut() {
            let inside = status.containers.iter().any(|c| c.sandbox_id == *id);
            assert!(!inside, "a sandbox with containers is removed");
            status.sandboxes.retain(|s| s.id != *id);
            images.retain(|s| s.id != *id);
        }
        self.0.removed_sandboxes.lock().unwrap().push(id.clone());
        Ok(())
    }
}

struct World {
    clock: Arc<TestClock>,
    store: Store,
    recorder: MemoryRecorder,
    service: FakeService,
    manager: Arc<ImageManager>,
    /// Image of the container's previous attempt.
    ran_with: Option<String>,
}

fn world(config: ImageConfig) -> World {
    let clock = Arc::new(TestClock(Mutex::new(1_000_000), AtomicU64::new(1)));
    World {
        store: Store::in_memory(clock.clone()),
        recorder: MemoryRecorder::default(),
        service: FakeService::default(),
        manager: Arc::new(ImageManager::new(config, clock.clone(), Metrics::default())),
        clock,
        ran_with: None,
    }
}

fn pod(uid: &str, image: &str, policy: &str) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "p", "namespace": "ns", "uid": uid},
        "spec": {"containers": [{"name": "c", "image": image, "imagePullPolicy": policy}]},
    }))
    .unwrap()
}

impl World {
    async fn ensure(&self, pod: &Pod) -> Result<String, ImageError> {
        self.ensure_with(pod, &PullSecrets::default()).await
    }

    async fn ensure_with(&self, pod: &Pod, secrets: &PullSecrets) -> Result<String, ImageError> {
        let container = &pod.containers()[0];
        self.manager
            .ensure(
                pod,
                container,
                PullInputs {
                    sandbox: None,
                    secrets,
                    ran_with: self.ran_with.as_deref(),
                },
                &self.service,
                &self.store,
                &self.recorder,
            )
            .await
            .map(|present| present.reference)
    }

    fn reasons(&self) -> Vec<String> {
        self.recorder
            .events()
            .into_iter()
            .map(|e| e.reason)
            .collect()
    }

    fn pulls(&self) -> u32 {
        self.service.0.pulls.load(Ordering::SeqCst)
    }

    fn record(&self, image: &str) -> ImageRecord {
        self.store
            .snapshot()
            .record::<ImageRecord>(image)
            .cloned()
            .unwrap()
    }
}

#[tokio::test]
async fn policies_decide_whether_to_pull() {
    for (policy, present, want, pulls, reasons) in [
        ("IfNotPresent", true, Ok("id-of-x:1"), 0, vec!["Pulled"]),
        (
            "IfNotPresent",
            false,
            Ok("ref-of-x:1"),
            1,
            vec!["Pulling", "Pulled"],
        ),
        ("Never", true, Ok("id-of-x:1"), 0, vec!["Pulled"]),
        (
            "Never",
            false,
            Err(ImageErrorReason::ErrImageNeverPull),
            0,
            vec!["ErrImageNeverPull"],
        ),
        (
            "Always",
            true,
            Ok("ref-of-x:1"),
            1,
            vec!["Pulling", "Pulled"],
        ),
        ("", true, Ok("id-of-x:1"), 0, vec!["Pulled"]),
    ] {
        let world = world(ImageConfig::default());
        if present {
            world
                .service
                .0
                .present
                .lock()
                .unwrap()
                .insert("x:1".to_owned());
        }
        let got = world.ensure(&pod("u", "x:1", policy)).await;
        assert_eq!(
            got.as_deref().map_err(|e| e.reason),
            want,
            "{policy} {present}"
        );
        assert_eq!(
            (world.pulls(), world.reasons()),
            (pulls, reasons.into_iter().map(str::to_owned).collect())
        );
    }
    let world = world(ImageConfig::default());
    world
        .service
        .0
        .present
        .lock()
        .unwrap()
        .insert("x:latest".to_owned());
    world.ensure(&pod("u", "x", "")).await.unwrap();
    assert_eq!(world.pulls(), 1, "latest is always pulled by default");
}

#[tokio::test]
async fn a_failed_pull_backs_off_across_a_restart_and_forgets_after_success() {
    let world = world(ImageConfig::default());
    let pod = pod("u", "x:1", "IfNotPresent");
    *world.service.0.fail.lock().unwrap() = Some("no such image".to_owned());
    let error = world.ensure(&pod).await.unwrap_err();
    assert_eq!(
        (error.reason, error.message.as_str()),
        (ImageErrorReason::ErrImagePull, "no such image")
    );
    let retry_at = error.retry_at.unwrap();
    assert_eq!(retry_at.until(world.clock.now()), Duration::from_secs(10));
    assert_eq!(
        world.record("x:1").backoffs[&pod.uid()].duration_ms,
        10_000,
        "on record before the error"
    );

    // A new agent on the same store.
    let restarted = World {
        manager: Arc::new(ImageManager::new(
            ImageConfig::default(),
            world.clock.clone(),
            Metrics::default(),
        )),
        recorder: MemoryRecorder::default(),
        ..world
    };
    let error = restarted.ensure(&pod).await.unwrap_err();
    assert_eq!(error.reason, ImageErrorReason::ImagePullBackOff);
    assert_eq!(error.retry_at, Some(retry_at));
    assert_eq!(
        (restarted.pulls(), restarted.reasons()),
        (1, vec!["BackOff".to_owned()])
    );

    restarted.clock.advance(Duration::from_secs(10));
    let error = restarted.ensure(&pod).await.unwrap_err();
    assert_eq!(error.reason, ImageErrorReason::ErrImagePull);
    assert_eq!(
        error.retry_at.unwrap().until(restarted.clock.now()),
        Duration::from_secs(20)
    );

    *restarted.service.0.fail.lock().unwrap() = None;
    restarted.clock.advance(Duration::from_secs(20));
    restarted.ensure(&pod).await.unwrap();
    let record = restarted.record("x:1");
    assert_eq!(
        (record.backoffs, record.pulled_ref.as_deref()),
        (BTreeMap::new(), Some("ref-of-x:1"))
    );
}

#[tokio::test]
async fn another_pod_does_not_wait_for_this_pods_back_off_and_a_gone_one_leaves_none() {
    let world = world(ImageConfig::default());
    *world.service.0.fail.lock().unwrap() = Some("down".to_owned());
    let (one, two) = (pod("u1", "x:1", "Always"), pod("u2", "x:1", "Always"));
    world.ensure(&one).await.unwrap_err();
    let error = world.ensure(&two).await.unwrap_err();
    assert_eq!(error.reason, ImageErrorReason::ErrImagePull);
    assert_eq!(world.record("x:1").backoffs.len(), 2);
    world
        .manager
        .forget_pod(&world.store, &one.uid())
        .await
        .unwrap();
    assert_eq!(
        world.record("x:1").backoffs.keys().collect::<Vec<_>>(),
        [&two.uid()]
    );
}

#[tokio::test]
async fn errors_keep_their_kind() {
    let world = world(ImageConfig::default());
    for (message, reason) in [
        (
            "rpc: RegistryUnavailable: dial tcp",
            ImageErrorReason::RegistryUnavailable,
        ),
        (
            "SignatureValidationFailed: no key",
            ImageErrorReason::SignatureValidationFailed,
        ),
        ("other", ImageErrorReason::ErrImagePull),
    ] {
        *world.service.0.fail.lock().unwrap() = Some(message.to_owned());
        let error = world
            .ensure(&pod(message, "x:1", "Always"))
            .await
            .unwrap_err();
        assert_eq!(error.reason, reason);
    }
    let error = world
        .ensure(&pod("u", "Not A Name", "Always"))
        .await
        .unwrap_err();
    assert_eq!(error.reason, ImageErrorReason::InvalidImageName);
    *world.service.0.fail_inspect.lock().unwrap() = true;
    let error = world.ensure(&pod("u", "x:1", "Never")).await.unwrap_err();
    assert_eq!(error.reason, ImageErrorReason::ImageInspectError);
}

async fn at_once(config: ImageConfig, images: &[&str]) -> (u32, u32) {
    let world = world(config);
    let gate = Arc::new(Semaphore::new(0));
    *world.service.0.gate.lock().unwrap() = Some(gate.clone());
    let pods: Vec<Pod> = images
        .iter()
        .enumerate()
        .map(|(i, image)| pod(&format!("u{i}"), image, "Always"))
        .collect();
    let all = futures::future::join_all(pods.iter().map(|pod| world.ensure(pod)));
    let opened = async {
        world.service.0.begun.notified().await;
        gate.add_permits(images.len());
    };
    let (results, ()) = tokio::join!(all, opened);
    assert!(results.iter().all(Result::is_ok));
    (
        world.pulls(),
        world.service.0.most_at_once.load(Ordering::SeqCst),
    )
}

#[tokio::test]
async fn pulls_of_one_image_are_one_pull_and_the_limit_holds() {
    let parallel = |max_parallel| ImageConfig {
        serialize_pulls: false,
        max_parallel,
    };
    assert_eq!(
        at_once(parallel(None), &["a:1", "a:1", "a:1"]).await,
        (1, 1)
    );
    assert_eq!(
        at_once(parallel(None), &["a:1", "b:1", "c:1"]).await,
        (3, 3)
    );
    assert_eq!(
        at_once(parallel(Some(2)), &["a:1", "b:1", "c:1"]).await,
        (3, 2)
    );
    assert_eq!(
        at_once(ImageConfig::default(), &["a:1", "b:1", "c:1"]).await,
        (3, 1)
    );
}

#[tokio::test]
async fn a_pull_goes_on_when_the_one_who_began_it_goes_away() {
    let world = world(ImageConfig::default());
    let gate = Arc::new(Semaphore::new(0));
    *world.service.0.gate.lock().unwrap() = Some(gate.clone());
    let (one, two) = (pod("u1", "x:1", "Always"), pod("u2", "x:1", "Always"));
    let mut first = Box::pin(world.ensure(&one));
    let mut second = Box::pin(world.ensure(&two));
    assert!(futures::poll!(&mut first).is_pending());
    assert!(futures::poll!(&mut second).is_pending());
    drop(first);
    gate.add_permits(1);
    second.await.unwrap();
    assert_eq!(world.pulls(), 1);
    gate.add_permits(1);
    world.ensure(&two).await.unwrap();
    assert_eq!(
        world.pulls(),
        2,
        "a finished pull serves nobody who comes later"
    );
}

fn pull_secret(name: &str, entries: serde_json::Value) -> Arc<Secret> {
    let config = json!({"auths": entries}).to_string();
    Arc::new(Secret {
        metadata: serde_json::from_value(json!({"name": name})).unwrap(),
        type_: Some("kubernetes.io/dockerconfigjson".to_owned()),
        data: Some(BTreeMap::from([(
            ".dockerconfigjson".to_owned(),
            k8s_openapi::ByteString(config.into_bytes()),
        )])),
        ..Default::default()
    })
}

#[tokio::test]
async fn credentials_are_tried_in_order_and_bad_secrets_are_told_of_when_none_fits() {
    let world = world(ImageConfig::default());
    *world.service.0.only.lock().unwrap() = Some("bob".to_owned());
    let secrets = PullSecrets {
        found: vec![
            pull_secret(
                "one",
                json!({
                    "r.io": {"username": "bob", "password": "b"},
                    "r.io/team": {"username": "ann", "password": "a"},
                    "other.io": {"username": "eve", "password": "e"},
                }),
            ),
            pull_secret("broken", json!("hunter2")),
        ],
        missing: vec!["gone".to_owned()],
    };
    let pod = pod("u", "r.io/team/app:1", "IfNotPresent");
    world.ensure_with(&pod, &secrets).await.unwrap();
    let users = world.service.0.users.lock().unwrap().clone();
    assert_eq!(users, [Some("ann".to_owned()), Some("bob".to_owned())]);
    let warnings = |world: &World| -> Vec<String> {
        let events = world.recorder.events().into_iter();
        events
            .filter(|e| e.reason == "FailedToRetrieveImagePullSecret")
            .map(|e| e.message)
            .collect()
    };
    assert_eq!(warnings(&world), [""; 0], "the others were enough");
    world.ensure_with(&pod, &secrets).await.unwrap();
    assert_eq!(world.pulls(), 2, "what is present is not pulled");
    assert_eq!(warnings(&world), [""; 0]);
    *world.service.0.fail.lock().unwrap() = Some("401 Unauthorized".to_owned());
    let other = self::pod("v", "r.io/team/other:1", "IfNotPresent");
    world.ensure_with(&other, &secrets).await.unwrap_err();
    let warnings = warnings(&world);
    assert!(warnings[0].contains("(gone)"), "{warnings:?}");
    assert!(
        warnings[1].contains("broken") && !warnings[1].contains("hunter2"),
        "{warnings:?}"
    );
    assert_eq!(warnings.len(), 2);
}

#[tokio::test]
async fn a_credential_provider_that_fails_is_named_in_an_event_of_the_pod() {
    let mut world = world(ImageConfig::default());
    let dir = tempfile::tempdir().unwrap();
    let settings = CredentialSettings {
        config: dir.path().join("config.yaml"),
        bin_dir: dir.path().to_owned(),
    };
    std::fs::write(
        &settings.config,
        "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders:\n\
         - {name: helper, apiVersion: credentialprovider.kubelet.k8s.io/v1, defaultCacheDuration: 1m, matchImages: [r.io]}\n",
    )
    .unwrap();
    let (clock, metrics) = (world.clock.clone(), Metrics::default());
    let providers = CredentialProviders::load(&settings, clock.clone());
    let manager = ImageManager::new(ImageConfig::default(), clock, metrics);
    world.manager = Arc::new(manager.with_credential_providers(Arc::new(providers)));
    world.ensure(&pod("u", "r.io/x:1", "Always")).await.unwrap();
    let events = world.recorder.events();
    let told = events.iter().find(|e| e.reason == "FailedToGetCredentials");
    let message = &told.unwrap().message;
    let cause = format!("start {}/helper: No such file", dir.path().display());
    assert!(
        message.starts_with("run credential provider helper for r.io/x: ")
            && message.contains(&cause),
        "{message}"
    );
}

#[tokio::test]
async fn pods_with_other_credentials_do_not_share_a_pull() {
    let world = world(ImageConfig {
        serialize_pulls: false,
        max_parallel: None,
    });
    *world.service.0.only.lock().unwrap() = Some("bob".to_owned());
    let bob = PullSecrets {
        found: vec![pull_secret(
            "s",
            json!({"r.io": {"username": "bob", "password": "b"}}),
        )],
        missing: Vec::new(),
    };
    let none = PullSecrets::default();
    let (one, two) = (
        pod("u1", "r.io/x:1", "Always"),
        pod("u2", "r.io/x:1", "Always"),
    );
    let (with, without) = tokio::join!(
        world.ensure_with(&one, &bob),
        world.ensure_with(&two, &none)
    );
    with.unwrap();
    assert!(without.unwrap_err().message.contains("401 Unauthorized"));
}
