use std::collections::BTreeSet;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::future::BoxFuture;
use k8s_cri::v1;

use super::super::archive::tests::{saved, saved_for};
use super::super::import::ImportError;
use super::super::{ImageConfig, ImageError, Present, PullInputs};
use super::*;
use crate::core::images::{FilesState, files_of};
use crate::kuberuntime::cri::CriError;
use crate::store::mounts::{Directory, testkit};
use crate::store::{Committed, RemoveContainer};
use crate::types::events::MemoryRecorder;
use crate::types::metrics::Metrics;
use crate::types::runtime::PodStatus;
use crate::types::{BootId, Clock, ContainerId, PodExt as _};

/// Far in the past of every file: none of them is young.
struct AtBoot;

impl Clock for AtBoot {
    fn now(&self) -> Stamp {
        Stamp {
            boot: BootId(1),
            boottime_ms: 1_000,
            wall_ms: 1_000,
        }
    }
}

#[derive(Clone, Default)]
struct Runtime(Arc<Shared>);

#[derive(Default)]
struct Shared {
    images: Mutex<BTreeSet<String>>,
    imports: Mutex<Vec<String>>,
    unpinned: Mutex<Vec<String>>,
    is_broken: AtomicBool,
    /// The runtime has not taken over what pulls of earlier boots have unpacked.
    is_unready: AtomicBool,
    /// The runtime has lost blobs of the images that it lists.
    has_lost_blobs: AtomicBool,
    /// Images that the runtime keeps, cannot read and does not show.
    unreadable: Mutex<BTreeSet<String>>,
    released: Mutex<Vec<Stamp>>,
    /// The archive whose import does not end.
    hangs: Mutex<Option<String>>,
    /// An import has begun.
    begun: tokio::sync::Notify,
}

impl ImageService for Runtime {
    async fn image_status(&self, image: &str) -> Result<Option<v1::Image>, CriError> {
        let has = self.0.images.lock().unwrap().contains(&qualified(image));
        Ok(has.then(|| v1::Image {
            id: format!("id-of-{}", qualified(image)),
            ..Default::default()
        }))
    }

    async fn image_layers(&self, _: &str) -> Result<Vec<String>, CriError> {
        Ok(Vec::new())
    }

    async fn pull_image(
        &self,
        _: v1::ImageSpec,
        _: Option<v1::AuthConfig>,
        _: Option<v1::PodSandboxConfig>,
    ) -> Result<String, CriError> {
        Err(CriError {
            operation: "pull_image",
            object: String::new(),
            kind: crate::kuberuntime::cri::CriErrorKind::Other,
            message: "there is no registry".to_owned(),
            source: None,
        })
    }

    async fn list_images(&self) -> Result<Vec<v1::Image>, CriError> {
        let images = self.0.images.lock().unwrap();
        let image = |name: &String| v1::Image {
            repo_tags: vec![name.clone()],
            ..Default::default()
        };
        Ok(images.iter().map(image).collect())
    }

    async fn before_pulls(&self, image: &str) -> Result<(), CriError> {
        if !self.0.is_unready.load(Ordering::SeqCst) {
            return Ok(());
        }
        Err(CriError {
            operation: "pull_image",
            object: image.to_owned(),
            kind: crate::kuberuntime::cri::CriErrorKind::Unavailable {
                socket: "/run/c.sock".to_owned(),
            },
            message: "connection refused".to_owned(),
            source: None,
        })
    }

    async fn remove_image(&self, image: &str) -> Result<(), CriError> {
        let name = image.strip_prefix("id-of-").unwrap_or(image);
        self.0.images.lock().unwrap().remove(&qualified(name));
        Ok(())
    }

    async fn images_in_use(&self) -> Result<HashSet<String>, CriError> {
        Ok(HashSet::new())
    }

    async fn sandbox_images(&self) -> Result<Vec<String>, CriError> {
        Ok(Vec::new())
    }

    async fn image_directories(&self) -> Result<Vec<PathBuf>, CriError> {
        Ok(vec![PathBuf::from("/proc")])
    }

    async fn containers_of(&self, _: &str) -> Result<Vec<(PodStatus, Vec<ContainerId>)>, CriError> {
        Ok(Vec::new())
    }

    async fn remove_container(&self, _: &Committed<RemoveContainer>) -> Result<(), CriError> {
        Ok(())
    }

    async fn sandboxes(
        &self,
    ) -> Result<Vec<(PodStatus, Vec<crate::images::SandboxImage>)>, CriError> {
        Ok(Vec::new())
    }

    async fn remove_sandbox(
        &self,
        _: &Committed<crate::store::RemoveEmptySandbox>,
    ) -> Result<(), CriError> {
        Ok(())
    }
}

impl Importer for Runtime {
    fn import<'a>(
        &'a self,
        archive: &'a Path,
        images: &'a [String],
    ) -> BoxFuture<'a, Result<(), ImportError>> {
        Box::pin(async move {
            if self.0.is_broken.load(Ordering::SeqCst) {
                return Err(ImportError::Missing {
                    tools: "ctr",
                    path: "/bin".to_owned(),
                });
            }
            let has = |image: &String| self.0.images.lock().unwrap().contains(&qualified(image));
            if self.0.has_lost_blobs.load(Ordering::SeqCst) && images.iter().any(has) {
                return Err(ImportError::Failed {
                    command: "ctr images import".to_owned(),
                    why: "ctr: blob sha256:52 expected at /b/52: blob not found: not found"
                        .to_owned(),
                });
            }
            let unreadable = |image: &String| {
                let unreadable = self.0.unreadable.lock().unwrap();
                unreadable.contains(&qualified(image))
            };
            if images.iter().any(unreadable) {
                return Err(ImportError::Failed {
                    command: "ctr images import".to_owned(),
                    why: "ctr: unable to resolve platform: unexpected EOF".to_owned(),
                });
            }
            let name = archive.file_name().unwrap().to_str().unwrap();
            self.0.begun.notify_one();
            if self.0.hangs.lock().unwrap().as_deref() == Some(name) {
                return std::future::pending().await;
            }
            self.0.imports.lock().unwrap().push(name.to_owned());
            let names = images.iter().map(|image| qualified(image));
            self.0.images.lock().unwrap().extend(names);
            Ok(())
        })
    }

    fn unpin<'a>(&'a self, images: &'a [String]) -> BoxFuture<'a, Result<(), ImportError>> {
        self.0.unpinned.lock().unwrap().extend_from_slice(images);
        Box::pin(async { Ok(()) })
    }

    fn remove_unreadable<'a>(
        &'a self,
        images: &'a [String],
    ) -> BoxFuture<'a, Result<usize, ImportError>> {
        let mut unreadable = self.0.unreadable.lock().unwrap();
        let removed = images.iter().filter(|i| unreadable.remove(&qualified(i)));
        let removed = removed.count();
        Box::pin(async move { Ok(removed) })
    }

    fn release<'a>(&'a self, now: Stamp) -> BoxFuture<'a, Result<usize, ImportError>> {
        self.0.released.lock().unwrap().push(now);
        Box::pin(async { Ok(1) })
    }
}

struct World {
    dir: tempfile::TempDir,
    store: Store,
    recorder: MemoryRecorder,
    runtime: Runtime,
    manager: ImageManager,
}

fn world() -> World {
    let runtime = Runtime::default();
    let dir = tempfile::tempdir().unwrap();
    World {
        store: Store::in_memory(Arc::new(AtBoot)),
        recorder: MemoryRecorder::default(),
        manager: manager(dir.path(), &runtime),
        runtime,
        dir,
    }
}

fn manager(dir: &Path, runtime: &Runtime) -> ImageManager {
    ImageManager::new(ImageConfig::default(), Arc::new(AtBoot), Metrics::default())
        .preloading(dir.join("images"), Arc::new(runtime.clone()))
}

impl World {
    fn add(&self, name: &str, content: &[u8]) {
        let dir = self.dir.path().join("images");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("new"), content).unwrap();
        fs::rename(dir.join("new"), dir.join(name)).unwrap();
    }

    /// Returns whether another look is due soon.
    async fn look(&self, is_first: bool) -> bool {
        self.manager
            .look_at_archives(is_first, &self.runtime, &self.store, &self.recorder)
            .await
            .unwrap()
    }

    async fn ensure(&self, image: &str) -> Result<Present, ImageError> {
        let pod: k8s_openapi::api::core::v1::Pod = serde_json::from_value(serde_json::json!({
            "metadata": {"name": "p", "namespace": "ns", "uid": "u"},
            "spec": {"containers": [{"name": "c", "image": image, "imagePullPolicy": "Never"}]},
        }))
        .unwrap();
        self.manager
            .ensure(
                &pod,
                &pod.containers()[0],
                PullInputs::default(),
                &self.runtime,
                &self.store,
                &self.recorder,
            )
            .await
    }

    fn imports(&self) -> Vec<String> {
        std::mem::take(&mut *self.runtime.0.imports.lock().unwrap())
    }

    fn events(&self) -> Vec<String> {
        let events = self.recorder.events().into_iter();
        events
            .inspect(|e| assert!(e.pod.is_none(), "{e:?}"))
            .map(|e| format!("{}: {}", e.reason, e.message))
            .collect()
    }

    fn restarted(self) -> Self {
        Self {
            manager: manager(self.dir.path(), &self.runtime),
            recorder: MemoryRecorder::default(),
            ..self
        }
    }
}

#[test]
fn the_directory_is_made_and_watched_beside_the_async_threads() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(1)
        .build()
        .unwrap();
    runtime.block_on(async {
        let w = world();
        let dir = w.dir.path().join("images");
        // The only thread that may block is busy.
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let busy = tokio::task::spawn_blocking(move || wait.recv());
        let mut look = std::pin::pin!(w.look(true));
        let begun = futures::FutureExt::now_or_never(&mut look);
        assert!(begun.is_none());
        assert!(!dir.exists());
        end.send(()).unwrap();
        busy.await.unwrap().unwrap();
        tokio::time::timeout(Duration::from_secs(30), look)
            .await
            .unwrap();
        assert!(dir.is_dir());
        assert!(w.manager.preload.as_ref().unwrap().watcher().is_some());
    });
}

#[tokio::test]
async fn archives_are_imported_once_and_again_when_they_change_or_an_image_is_missing() {
    let w = world();
    w.look(true).await;
    assert!(w.dir.path().join("images").is_dir(), "it is made");
    w.add("a.tar", &saved(&["a:1", "b:1"]));
    w.add(
        "b.tar.zst",
        &zstd::encode_all(&saved(&["c:1"])[..], 1).unwrap(),
    );
    w.add("README", b"no archive");
    w.add(".hidden.tar", b"no archive");
    w.look(false).await;
    assert_eq!(w.imports(), ["a.tar", "b.tar.zst"]);
    let state = w.store.snapshot();
    for image in ["a:1", "docker.io/library/b:1", "c:1"] {
        let (files, _) = files_of(&state, &qualified(image)).unwrap();
        assert_eq!(files.state, FilesState::Whole, "{image}");
        assert!(files::archive_of(&state, image).is_some(), "{image}");
    }
    w.look(false).await;
    let w = w.restarted();
    w.look(true).await;
    assert_eq!(w.imports(), [""; 0], "nothing has changed");

    w.add("a.tar", &saved(&["a:2"]));
    w.look(false).await;
    assert_eq!(w.imports(), ["a.tar"]);
    let unpinned = w.runtime.0.unpinned.lock().unwrap().clone();
    assert_eq!(unpinned, ["a:1", "b:1"], "it holds them no more");
    w.runtime.remove_image("id-of-c:1").await.unwrap();
    w.look(false).await;
    assert_eq!(w.imports(), ["b.tar.zst"]);
    assert_eq!(w.events(), [""; 0]);
}

#[tokio::test]
async fn an_archive_that_is_gone_pins_its_images_no_more() {
    let w = world();
    w.add("a.tar", &saved(&["a:1"]));
    w.add("b.tar", &saved(&["a:1", "b:1"]));
    w.look(true).await;
    fs::remove_file(w.dir.path().join("images/b.tar")).unwrap();
    w.look(false).await;
    assert_eq!(*w.runtime.0.unpinned.lock().unwrap(), ["b:1"]);
    let state = w.store.snapshot();
    assert_eq!(files::archive_of(&state, "a:1").as_deref(), Some("a.tar"));
    assert_eq!(files::archive_of(&state, "b:1"), None);
}

#[tokio::test]
async fn archives_of_a_directory_that_is_not_mounted_are_not_gone() {
    let mut w = world();
    let (images, disk) = (w.dir.path().join("images"), w.dir.path().join("disk"));
    let mount = Mount::new(Directory::Preload, &images, w.dir.path());
    w.manager = manager(w.dir.path(), &w.runtime).preloading_when_mounted(mount);
    let mount = Mount::new(Directory::Preload, &images, w.dir.path());
    w.add("a.tar", &saved(&["a:1"]));
    w.look(true).await;
    let record = testkit::unmounted(&mount).unwrap();
    fs::rename(&images, &disk).unwrap();
    for is_made in [false, true] {
        w.look(false).await;
        assert!(w.runtime.0.unpinned.lock().unwrap().is_empty());
        let archive = files::archive_of(&w.store.snapshot(), "a:1");
        assert_eq!(archive.as_deref(), Some("a.tar"), "{is_made}");
        assert_eq!(images.exists(), is_made, "the agent makes none");
        fs::create_dir_all(&images).unwrap();
    }
    // Mounted again, and then really empty.
    fs::write(w.dir.path().join("mounts/preload"), record).unwrap();
    w.look(false).await;
    assert_eq!(*w.runtime.0.unpinned.lock().unwrap(), ["a:1"]);
}

#[tokio::test]
async fn an_archive_that_cannot_be_imported_is_told_once_per_start_and_stops_nobody() {
    let w = world();
    w.add("bad.tar", &saved(&["a:1"])[..3_000]);
    w.add("old.tar.bz2", b"BZh91AY");
    w.add("good.tar", &saved(&["b:1"]));
    w.look(true).await;
    w.look(false).await;
    assert_eq!(w.imports(), ["good.tar"]);
    let events = w.events();
    assert_eq!(events.len(), 2, "{events:?}");
    assert!(
        events[0].starts_with("ImageImportFailed: Cannot import "),
        "{events:?}"
    );
    assert!(
        events[0].contains("images/bad.tar: it cannot be read to its end"),
        "{events:?}"
    );
    assert!(events[1].contains("bzip2"), "{events:?}");

    w.runtime.0.is_broken.store(true, Ordering::SeqCst);
    w.add("bad.tar", &saved(&["a:1"]));
    w.look(false).await;
    let told = w.events();
    assert!(told[2].contains("ctr not found in /bin"), "{told:?}");
    let state = w.store.snapshot();
    assert_eq!(
        files_of(&state, &qualified("a:1")),
        None,
        "nothing was brought"
    );
    // The tool is installed, and the agent started again.
    w.runtime.0.is_broken.store(false, Ordering::SeqCst);
    w.look(false).await;
    assert_eq!(w.imports(), [""; 0]);
    let w = w.restarted();
    w.look(true).await;
    assert_eq!(w.imports(), ["bad.tar"]);
}

#[tokio::test]
async fn an_archive_waits_for_a_runtime_that_is_not_ready_and_keeps_its_pins() {
    let w = world();
    w.add("a.tar", &saved(&["example.com/a:1"]));
    assert!(!w.look(true).await);
    assert_eq!(w.imports(), ["a.tar"]);
    w.runtime.0.images.lock().unwrap().clear();
    w.runtime.0.is_unready.store(true, Ordering::SeqCst);
    w.add("b.tar", &saved(&["example.com/b:1"]));
    assert!(w.look(false).await);
    assert!(w.events().is_empty());
    w.ensure("example.com/a:1").await.unwrap_err();
    assert!(w.imports().is_empty());
    let is_a = |image: &str| qualified(image) == "example.com/a:1";
    let holder = images::archive_of(&w.store.snapshot(), is_a);
    assert_eq!(holder.as_deref(), Some("a.tar"));
    w.runtime.0.is_unready.store(false, Ordering::SeqCst);
    assert!(!w.look(false).await);
    assert_eq!(w.imports(), ["a.tar", "b.tar"]);
}

#[tokio::test]
async fn an_archive_that_was_refused_waits_for_the_runtime_after_a_restart() {
    let w = world();
    w.add("a.tar", &saved(&["a:1"]));
    w.runtime.0.is_broken.store(true, Ordering::SeqCst);
    w.look(true).await;
    let w = w.restarted();
    w.runtime.0.is_broken.store(false, Ordering::SeqCst);
    w.runtime.0.is_unready.store(true, Ordering::SeqCst);
    assert!(w.look(true).await && w.look(false).await);
    w.runtime.0.is_unready.store(false, Ordering::SeqCst);
    assert!(!w.look(false).await);
    assert_eq!(w.imports(), ["a.tar"]);
    // One that is removed while it waits is no source any more.
    w.runtime.0.is_unready.store(true, Ordering::SeqCst);
    w.add("b.tar", &saved(&["b:1"]));
    assert!(w.look(false).await);
    fs::remove_file(w.dir.path().join("images/b.tar")).unwrap();
    w.look(false).await;
    assert!(w.manager.preload.as_ref().unwrap().holding("b:1").is_none());
}

#[tokio::test]
async fn bad_archives_are_told_once_each_and_disturb_nothing() {
    let w = world();
    w.add("cut.tar", &saved(&["a:1"])[..3_000]);
    w.add("mips.tar", &saved_for(&[("b:1", "mips64le")]));
    w.add("zeros.tar", b"");
    let images = w.dir.path().join("images");
    let zeros = fs::File::options()
        .write(true)
        .open(images.join("zeros.tar"))
        .unwrap();
    // Of which the disk has none.
    zeros.set_len(10 << 30).unwrap();
    let outside = w.dir.path().join("outside.tar");
    fs::write(&outside, saved(&["c:1"])).unwrap();
    std::os::unix::fs::symlink(&outside, images.join("link.tar")).unwrap();
    std::os::unix::fs::symlink("none", images.join("dangling.tar")).unwrap();
    fs::create_dir(images.join("directory.tar")).unwrap();
    w.add("good.tar", &saved(&["d:1"]));
    std::os::unix::fs::symlink("good.tar", images.join("same.tar")).unwrap();
    for _ in 0..3 {
        w.look(false).await;
    }
    assert_eq!(w.imports(), ["good.tar", "same.tar"]);
    let events = w.events();
    let wanted = [
        ("cut.tar", "cannot be read to its end"),
        ("dangling.tar", "a link that leads nowhere"),
        ("link.tar", "a link that leads out of the directory"),
        ("mips.tar", "b:1 in it is for mips64le"),
        ("zeros.tar", "it names no image"),
    ];
    assert_eq!(events.len(), wanted.len(), "{events:#?}");
    for (event, (name, why)) in events.iter().zip(wanted) {
        let told = format!(
            "ImageImportFailed: Cannot import {}",
            images.join(name).display()
        );
        assert!(event.starts_with(&told) && event.contains(why), "{event}");
    }
    let state = w.store.snapshot();
    for image in ["a:1", "b:1", "c:1"] {
        assert_eq!(files_of(&state, &qualified(image)), None, "{image}");
    }
    // Put right, each is imported.
    fs::remove_file(images.join("link.tar")).unwrap();
    w.add("link.tar", &saved(&["c:1"]));
    w.look(false).await;
    assert_eq!(w.imports(), ["link.tar"]);
}

#[tokio::test]
async fn a_pod_waits_for_the_import_of_its_image_and_needs_no_registry() {
    let w = world();
    w.add("a.tar", &saved(&["a:1"]));
    w.look(true).await;
    w.runtime.remove_image("a:1").await.unwrap();
    let present = w.ensure("a:1").await.unwrap();
    assert_eq!(present.reference, "id-of-docker.io/library/a:1");
    assert_eq!(w.imports(), ["a.tar", "a.tar"]);
}

/// The import of `a.tar` had begun in an earlier boot, and the runtime lists what came of it.
async fn cut_off() -> World {
    let w = world();
    w.add("a.tar", &saved(&["a:1"]));
    let begun = images::begun(None, "a:1", images::Presence::Unknown).unwrap();
    let earlier = Stamp {
        boot: BootId(0),
        ..AtBoot.now()
    };
    let key = images::files_key(&qualified("a:1"));
    let transaction = Transaction::new().put_object(&key, &begun, earlier);
    w.store.commit(transaction).await.unwrap();
    w.runtime.0.images.lock().unwrap().insert(qualified("a:1"));
    w
}

fn state_of(w: &World) -> FilesState {
    let found = files_of(&w.store.snapshot(), &qualified("a:1"));
    found.unwrap().0.state
}

#[tokio::test]
async fn an_import_that_fails_by_what_a_power_cut_left_is_made_again_without_it() {
    let w = cut_off().await;
    w.runtime.0.has_lost_blobs.store(true, Ordering::SeqCst);
    w.look(true).await;
    assert_eq!(w.imports(), ["a.tar"]);
    assert_eq!(state_of(&w), FilesState::Whole);
    assert_eq!(
        *w.runtime.0.released.lock().unwrap(),
        [AtBoot.now()],
        "what the import held was let go"
    );
    let reasons: Vec<String> = w.recorder.events().into_iter().map(|e| e.reason).collect();
    assert_eq!(reasons, ["ImageSuspect", "ImageRepaired"]);
}

#[tokio::test]
async fn what_a_power_cut_left_of_an_import_is_removed_and_imported_anew() {
    let w = cut_off().await;
    w.look(true).await;
    assert!(
        matches!(state_of(&w), FilesState::Suspect { .. }),
        "the runtime believes it"
    );
    assert_eq!(w.imports(), ["a.tar"], "the archive can be imported");
    let repaired = w.manager.repair(&w.runtime, &w.store, &w.recorder).await;
    repaired.unwrap();
    assert_eq!(w.imports(), ["a.tar"], "only what is not there is imported");
    assert_eq!(state_of(&w), FilesState::Whole);
    let reasons: Vec<String> = w.recorder.events().into_iter().map(|e| e.reason).collect();
    assert_eq!(reasons, ["ImageSuspect", "ImageRepaired"]);
}

#[tokio::test]
async fn an_image_that_the_runtime_cannot_read_is_removed_and_imported_again() {
    let w = world();
    w.add("a.tar", &saved(&["a:1", "b:1"]));
    w.look(true).await;
    assert_eq!(w.imports(), ["a.tar"]);
    // A power loss has cut off a file, and the runtime was started again.
    let name = qualified("a:1");
    w.runtime.0.images.lock().unwrap().remove(&name);
    w.runtime.0.unreadable.lock().unwrap().insert(name);
    let w = w.restarted();
    w.look(true).await;
    assert_eq!(w.imports(), ["a.tar"]);
    assert_eq!(state_of(&w), FilesState::Whole);
    let events = w.events();
    assert_eq!(events.len(), 2, "{events:?}");
    for (event, reason) in events.iter().zip(["ImageSuspect: ", "ImageRepaired: "]) {
        assert!(
            event.starts_with(reason) && event.contains("a:1"),
            "{event}"
        );
    }
}

#[tokio::test]
async fn an_image_that_the_runtime_cannot_read_stays_while_its_archive_is_damaged() {
    let w = world();
    w.add("a.tar", &saved(&["a:1"]));
    w.look(true).await;
    assert_eq!(w.imports(), ["a.tar"]);
    let name = qualified("a:1");
    w.runtime.0.images.lock().unwrap().remove(&name);
    w.runtime.0.unreadable.lock().unwrap().insert(name);
    // Same name, size and time: the disk has lost its content.
    let path = w.dir.path().join("images/a.tar");
    let before = fs::metadata(&path).unwrap();
    let lost = vec![0xff; usize::try_from(before.len()).unwrap()];
    fs::write(&path, lost).unwrap();
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.set_modified(before.modified().unwrap()).unwrap();
    let w = w.restarted();
    w.look(true).await;
    assert_eq!(w.imports(), Vec::<String>::new());
    assert_eq!(w.runtime.0.unreadable.lock().unwrap().len(), 1);
    let events = w.events();
    assert!(
        matches!(&events[..], [only] if only.starts_with("ImageImportFailed: ")),
        "{events:?}"
    );
}

#[tokio::test]
async fn a_pod_waits_for_no_archive_but_that_of_its_image() {
    let w = world();
    w.add("a.tar", &saved(&["a:1"]));
    w.add("b.tar", &saved(&["b:1"]));
    *w.runtime.0.hangs.lock().unwrap() = Some("a.tar".to_owned());
    let imported = async {
        w.runtime.0.begun.notified().await;
        w.ensure("b:1").await.unwrap()
    };
    let present = tokio::select! {
        _ = w.look(true) => panic!("the import of a.tar does not end"),
        present = tokio::time::timeout(Duration::from_secs(60), imported) => present.unwrap(),
    };
    assert_eq!(present.reference, "id-of-docker.io/library/b:1");
    assert_eq!(w.imports(), ["b.tar"]);
}

#[tokio::test]
async fn an_archive_that_is_gone_or_damaged_is_no_source() {
    for is_gone in [true, false] {
        let w = cut_off().await;
        w.look(true).await;
        let path = w.dir.path().join("images/a.tar");
        let content = fs::read(&path).unwrap();
        if is_gone {
            fs::remove_file(&path).unwrap();
        } else {
            // A power cut has left it as long and as old as it was.
            let changed = fs::metadata(&path).unwrap().modified().unwrap();
            let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
            let zeros = vec![0; content.len()];
            std::os::unix::fs::FileExt::write_all_at(&file, &zeros, 0).unwrap();
            file.set_modified(changed).unwrap();
        }
        let repair = || w.manager.repair(&w.runtime, &w.store, &w.recorder);
        repair().await.unwrap();
        assert!(
            matches!(state_of(&w), FilesState::Suspect { .. }),
            "{is_gone}"
        );
        assert!(
            w.runtime
                .0
                .images
                .lock()
                .unwrap()
                .contains(&qualified("a:1"))
        );
    }
}
