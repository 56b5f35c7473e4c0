//! Repair of images whose files may not be on the disk.

use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::AtomicBool;

use super::*;
use crate::core::images::{FilesState, files_of};
use crate::images::heal::{ANSWER, ASK_AGAIN};
use crate::images::rounds::OWED;
use crate::types::runtime::{ContainerState, ContainerStatus, SandboxState, SandboxStatus};

const IMAGE: &str = "x:1";

fn state_of(world: &World) -> Option<FilesState> {
    let state = world.store.snapshot();
    files_of(&state, &qualified(IMAGE)).map(|(files, _)| files.state)
}

/// The power is cut while the image is there and its files are not known to be on the disk; the agent starts again.
async fn cut_in_a_pull() -> World {
    let world = world(ImageConfig::default());
    *world.service.0.no_directory.lock().unwrap() = true;
    world
        .ensure(&pod("u", IMAGE, "IfNotPresent"))
        .await
        .unwrap();
    assert!(matches!(state_of(&world), Some(FilesState::Pulling { .. })));
    *world.service.0.no_directory.lock().unwrap() = false;
    reboot(world)
}

/// The agent starts again after a reboot.
fn reboot(world: World) -> World {
    world.clock.reboot();
    restart(world)
}

fn restart(world: World) -> World {
    let manager = ImageManager::new(
        ImageConfig::default(),
        world.clock.clone(),
        Metrics::default(),
    );
    World {
        manager: Arc::new(manager),
        recorder: MemoryRecorder::default(),
        ..world
    }
}

fn removed(world: &World) -> usize {
    world.service.0.removed.lock().unwrap().len()
}

/// A pod with one container of the image.
fn holder(state: ContainerState) -> PodStatus {
    let mut status = PodStatus::empty(PodUid::new("h"));
    status.containers.push(ContainerStatus {
        id: ContainerId::new("c1"),
        name: "c".to_owned(),
        attempt: 0,
        sandbox_id: ContainerId::new("s1"),
        state,
        created_at_ns: 1,
        image: IMAGE.to_owned(),
        image_ref: format!("id-of-{IMAGE}"),
        hash: String::new(),
        started_at_ns: 2,
        finished_at_ns: 3,
        exit_code: 255,
        reason: "Unknown".to_owned(),
        message: String::new(),
        log_path: String::new(),
        user: None,
    });
    status
}

impl World {
    async fn repair(&self) {
        self.manager
            .repair(&self.service, &self.store, &self.recorder)
            .await
            .unwrap();
    }

    async fn fail(&self, error: &str) {
        let pod = pod("u", IMAGE, "IfNotPresent");
        self.manager
            .container_failed(
                &pod,
                ("c", IMAGE),
                error,
                &self.service,
                &self.store,
                &self.recorder,
            )
            .await
            .unwrap();
    }

    /// Events about suspects: reason, and whether they are about a pod.
    fn told(&self) -> Vec<(String, bool)> {
        let events = self.recorder.events().into_iter();
        events
            .filter(|e| e.reason.starts_with("Image"))
            .map(|e| (e.reason, e.pod.is_some()))
            .collect()
    }
}

fn told(all: &[(&str, bool)]) -> Vec<(String, bool)> {
    all.iter().map(|(r, p)| ((*r).to_owned(), *p)).collect()
}

#[tokio::test]
async fn an_image_is_whole_once_its_files_are_on_the_disk_and_a_reboot_leaves_it_alone() {
    let world = world(ImageConfig::default());
    world
        .ensure(&pod("u", IMAGE, "IfNotPresent"))
        .await
        .unwrap();
    assert_eq!(state_of(&world), Some(FilesState::Whole));
    assert_eq!(world.service.0.syncs.load(Ordering::SeqCst), 1);
    let world = reboot(world);
    world.repair().await;
    world
        .ensure(&pod("u", IMAGE, "IfNotPresent"))
        .await
        .unwrap();
    assert_eq!((world.pulls(), removed(&world)), (1, 0));
    assert_eq!(world.told(), []);
}

// Invariant IMG-3.
#[tokio::test]
async fn the_intent_is_on_record_while_the_image_is_pulled() {
    let world = world(ImageConfig::default());
    let gate = Arc::new(Semaphore::new(0));
    *world.service.0.gate.lock().unwrap() = Some(gate.clone());
    let asking = pod("u", IMAGE, "IfNotPresent");
    let mut pull = Box::pin(world.ensure(&asking));
    tokio::select! {
        _ = &mut pull => panic!("the gate is shut"),
        () = world.service.0.begun.notified() => {}
    }
    assert!(matches!(state_of(&world), Some(FilesState::Pulling { .. })));
    gate.add_permits(1);
    pull.await.unwrap();
    assert_eq!(state_of(&world), Some(FilesState::Whole));
}

#[tokio::test]
async fn an_image_that_was_there_before_the_agent_is_trusted_through_a_cut() {
    let world = world(ImageConfig::default());
    world
        .service
        .0
        .present
        .lock()
        .unwrap()
        .insert(IMAGE.to_owned());
    world
        .ensure(&pod("u", IMAGE, "IfNotPresent"))
        .await
        .unwrap();
    assert_eq!(state_of(&world), Some(FilesState::Trusted));
    let world = reboot(world);
    world.repair().await;
    world
        .ensure(&pod("u", IMAGE, "IfNotPresent"))
        .await
        .unwrap();
    assert_eq!((world.pulls(), removed(&world)), (0, 0));
}

#[tokio::test]
async fn a_pod_that_needs_an_image_cut_off_by_power_gets_it_pulled_anew() {
    let world = cut_in_a_pull().await;
    world
        .ensure(&pod("u", IMAGE, "IfNotPresent"))
        .await
        .unwrap();
    // Asked whether the registry answers, removed, pulled.
    assert_eq!((world.pulls(), removed(&world)), (3, 1));
    let released = world.service.0.released.lock().unwrap().clone();
    assert_eq!(released, [0], "parts of pulls may be the same layers");
    assert_eq!(state_of(&world), Some(FilesState::Whole));
    assert_eq!(
        world.told(),
        told(&[("ImageSuspect", true), ("ImageRepaired", true)])
    );
    world
        .ensure(&pod("v", IMAGE, "IfNotPresent"))
        .await
        .unwrap();
    assert_eq!((world.pulls(), removed(&world)), (3, 1), "once");
}

#[tokio::test]
async fn a_suspect_that_no_pod_needs_is_repaired_as_well() {
    let world = cut_in_a_pull().await;
    world.repair().await;
    assert_eq!((world.pulls(), removed(&world)), (3, 1));
    assert_eq!(state_of(&world), Some(FilesState::Whole));
    assert_eq!(
        world.told(),
        told(&[("ImageSuspect", false), ("ImageRepaired", false)])
    );
}

#[tokio::test]
async fn the_last_copy_stays_while_no_source_answers_and_is_used_as_it_is() {
    let world = cut_in_a_pull().await;
    *world.service.0.fail.lock().unwrap() = Some("dial tcp: no route to host".to_owned());
    let id = world
        .ensure(&pod("u", IMAGE, "IfNotPresent"))
        .await
        .unwrap();
    assert_eq!(id, format!("id-of-{IMAGE}"));
    world.repair().await;
    assert_eq!(removed(&world), 0);
    assert!(matches!(state_of(&world), Some(FilesState::Suspect { .. })));
    // The next start of the agent asks again.
    *world.service.0.fail.lock().unwrap() = None;
    let world = restart(world);
    world
        .ensure(&pod("u", IMAGE, "IfNotPresent"))
        .await
        .unwrap();
    assert_eq!(removed(&world), 1);
    assert_eq!(state_of(&world), Some(FilesState::Whole));
}

#[tokio::test]
async fn a_policy_of_never_asks_no_registry_and_gets_back_what_was_removed() {
    let world = cut_in_a_pull().await;
    let before = world.pulls();
    world.ensure(&pod("u", IMAGE, "Never")).await.unwrap();
    assert_eq!((world.pulls(), removed(&world)), (before, 0));
    // It was removed for another pod, and the agent died before it was there again.
    let key = crate::core::images::files_key(&qualified(IMAGE));
    let state = world.store.snapshot();
    let (mut files, at) = files_of(&state, &qualified(IMAGE)).unwrap();
    files.state = FilesState::Removed;
    let record = crate::core::state::FactRecord::of(&files, at);
    let transaction = Transaction::new().put(key, record);
    world.store.commit(transaction).await.unwrap();
    world.service.0.present.lock().unwrap().clear();
    world.ensure(&pod("u", IMAGE, "Never")).await.unwrap();
    assert_eq!(state_of(&world), Some(FilesState::Whole));
}

#[tokio::test]
async fn a_removal_that_was_cut_off_is_made_again() {
    let world = cut_in_a_pull().await;
    world
        .manager
        .repair(&world.service, &world.store, &world.recorder)
        .await
        .unwrap();
    // As if the agent had died after the record and before the removal.
    let key = crate::core::images::files_key(&qualified(IMAGE));
    let state = world.store.snapshot();
    let (mut files, at) = files_of(&state, &qualified(IMAGE)).unwrap();
    files.state = FilesState::Removed;
    let transaction = Transaction::new().put(key, crate::core::state::FactRecord::of(&files, at));
    world.store.commit(transaction).await.unwrap();
    let world = restart(world);
    world
        .ensure(&pod("u", IMAGE, "IfNotPresent"))
        .await
        .unwrap();
    assert_eq!(removed(&world), 2);
    assert_eq!(state_of(&world), Some(FilesState::Whole));
}

#[tokio::test]
async fn an_image_in_use_stays_and_one_that_ended_containers_hold_goes_with_them() {
    let world = cut_in_a_pull().await;
    *world.service.0.holders.lock().unwrap() = vec![holder(ContainerState::Running)];
    world
        .ensure(&pod("u", IMAGE, "IfNotPresent"))
        .await
        .unwrap();
    assert_eq!(removed(&world), 0);
    *world.service.0.holders.lock().unwrap() = vec![holder(ContainerState::Exited)];
    world
        .ensure(&pod("u", IMAGE, "IfNotPresent"))
        .await
        .unwrap();
    assert_eq!(removed(&world), 1);
    let holders = world.service.0.holders.lock().unwrap();
    assert!(holders[0].containers.is_empty(), "its layers are free");
    let state = world.store.snapshot();
    let record: &crate::core::state::ContainerRecord = state.record("h/c").unwrap();
    assert_eq!(record.last_exit.as_ref().unwrap().exit_code, 255);
}

#[tokio::test]
async fn an_agent_that_dies_after_a_pull_brings_the_files_to_the_disk_and_pulls_nothing() {
    let world = world(ImageConfig::default());
    *world.service.0.no_directory.lock().unwrap() = true;
    world
        .ensure(&pod("u", IMAGE, "IfNotPresent"))
        .await
        .unwrap();
    *world.service.0.no_directory.lock().unwrap() = false;
    let world = restart(world);
    world
        .ensure(&pod("u", IMAGE, "IfNotPresent"))
        .await
        .unwrap();
    assert_eq!((world.pulls(), removed(&world)), (1, 0));
    assert_eq!(state_of(&world), Some(FilesState::Whole));
    assert_eq!(world.told(), []);
}

#[tokio::test]
async fn a_cut_in_a_pull_of_what_is_there_already_leaves_it_whole() {
    let world = world(ImageConfig::default());
    world.ensure(&pod("u", IMAGE, "Always")).await.unwrap();
    let world = restart(world);
    *world.service.0.no_directory.lock().unwrap() = true;
    world.ensure(&pod("u", IMAGE, "Always")).await.unwrap();
    assert!(matches!(state_of(&world), Some(FilesState::Pulling { .. })));
    *world.service.0.no_directory.lock().unwrap() = false;
    let world = reboot(world);
    world.repair().await;
    assert_eq!((world.pulls(), removed(&world)), (2, 0));
    assert_eq!(state_of(&world), Some(FilesState::Whole));
}

#[tokio::test]
async fn a_failure_that_points_to_the_files_makes_a_suspect_once_per_boot() {
    let world = world(ImageConfig::default());
    world
        .ensure(&pod("u", IMAGE, "IfNotPresent"))
        .await
        .unwrap();
    world.fail("failed to reserve container name").await;
    world.fail("exec /bin/x: exec format error").await;
    assert_eq!(
        state_of(&world),
        Some(FilesState::Whole),
        "no reason to doubt it"
    );
    for boot in 1..=2 {
        world.fail(MISSING).await;
        world.fail(MISSING).await;
        assert!(matches!(state_of(&world), Some(FilesState::Suspect { .. })));
        world
            .ensure(&pod("u", IMAGE, "IfNotPresent"))
            .await
            .unwrap();
        assert_eq!(removed(&world), boot);
        // It does not help: the fault is elsewhere.
        world.fail(MISSING).await;
        world
            .ensure(&pod("u", IMAGE, "IfNotPresent"))
            .await
            .unwrap();
        assert_eq!(removed(&world), boot);
        world.clock.reboot();
    }
    assert_eq!(
        world.told(),
        told(&[("ImageSuspect", true), ("ImageRepaired", true)].repeat(2))
    );
}

#[tokio::test]
async fn a_registry_whose_answer_fails_on_missing_layers_has_answered() {
    let world = cut_in_a_pull().await;
    *world.service.0.fail.lock().unwrap() =
        Some("failed to pull and unpack image: failed to stat parent: stat /s/7/fs: no such file or directory".to_owned());
    // It cannot be pulled yet, but it was removed, so that the next pull unpacks it.
    world
        .ensure(&pod("u", IMAGE, "IfNotPresent"))
        .await
        .unwrap_err();
    assert_eq!(removed(&world), 1);
    *world.service.0.fail.lock().unwrap() = None;
    world.clock.advance(Duration::from_secs(10));
    world
        .ensure(&pod("u", IMAGE, "IfNotPresent"))
        .await
        .unwrap();
    assert_eq!(state_of(&world), Some(FilesState::Whole));
}

#[tokio::test]
async fn a_suspect_that_somebody_else_removed_is_pulled_as_any_other_image() {
    let world = cut_in_a_pull().await;
    *world.service.0.fail.lock().unwrap() = Some("registry is away".to_owned());
    world.repair().await;
    *world.service.0.fail.lock().unwrap() = None;
    world.service.0.present.lock().unwrap().clear();
    world.repair().await;
    assert_eq!(state_of(&world), None, "nobody has to bring it again");
    world
        .ensure(&pod("u", IMAGE, "IfNotPresent"))
        .await
        .unwrap();
    assert_eq!(removed(&world), 0);
    assert_eq!(state_of(&world), Some(FilesState::Whole));
}

/// A disk whose sync opens the pipe that it was opened for.
struct SlowDisk;

impl ImageDisk for SlowDisk {
    fn open(&self, directory: &std::path::Path) -> std::io::Result<Box<dyn OpenedDisk>> {
        Ok(Box::new(Slow(directory.to_owned())))
    }

    fn unwritten(&self) -> u64 {
        0
    }
}

struct Slow(PathBuf);

impl OpenedDisk for Slow {
    fn sync(&self) -> std::io::Result<()> {
        std::fs::File::open(&self.0).map(drop)
    }
}

#[tokio::test]
async fn many_who_wait_for_the_disk_share_one_sync() {
    let service = FakeService::default();
    let syncs = Syncs::new(Arc::new(SlowDisk));
    // Opening a pipe for reading takes until somebody opens it for writing.
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("images");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    *service.0.directory.lock().unwrap() = Some(pipe.clone());
    let disk = syncs.open(&service).await.unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let opened = Arc::clone(&is_over);
    let all = futures::future::try_join_all((0..20).map(|_| syncs.sync(&disk)));
    // After each of them has asked.
    let opens = async {
        std::thread::spawn(move || {
            while !opened.load(Ordering::SeqCst) {
                let mut how = std::fs::OpenOptions::new();
                // Fails while nobody reads.
                drop(
                    how.write(true)
                        .custom_flags(nix::fcntl::OFlag::O_NONBLOCK.bits())
                        .open(&pipe),
                );
                std::thread::yield_now();
            }
        })
    };
    let (all, opens) = futures::join!(all, opens);
    all.unwrap();
    // The first began at once. All others asked while it ran, and share the next.
    assert_eq!(syncs.syncs(), 2);
    syncs.sync(&disk).await.unwrap();
    assert_eq!(syncs.syncs(), 3, "who comes later has written more");
    is_over.store(true, Ordering::SeqCst);
    opens.join().unwrap();
}

/// A pod with one container of another image, in a sandbox of this one.
fn pod_in_sandbox(state: SandboxState) -> (PodStatus, Vec<SandboxImage>) {
    let mut status = holder(ContainerState::Exited);
    status.containers[0].image_ref = "another".to_owned();
    let id = ContainerId::new("s1");
    status.sandboxes.push(SandboxStatus {
        id: id.clone(),
        attempt: 0,
        state,
        created_at_ns: 1,
        ips: Vec::new(),
        host_network: None,
        runtime_handler: String::new(),
    });
    let of = SandboxImage {
        id,
        is_ready: state == SandboxState::Ready,
        image: Some(qualified(IMAGE)),
    };
    (status, vec![of])
}

fn removed_sandboxes(world: &World) -> usize {
    world.service.0.removed_sandboxes.lock().unwrap().len()
}

#[tokio::test]
async fn sandboxes_that_ended_go_with_the_suspect_that_they_were_made_of() {
    let world = cut_in_a_pull().await;
    let with_another_image = SandboxImage {
        id: ContainerId::new("s2"),
        is_ready: false,
        image: Some("docker.io/library/other:1".to_owned()),
    };
    let mut pod = pod_in_sandbox(SandboxState::NotReady);
    pod.1.push(with_another_image);
    *world.service.0.sandboxes.lock().unwrap() = vec![pod];
    world.repair().await;
    assert_eq!(removed_sandboxes(&world), 1);
    assert_eq!((world.pulls(), removed(&world)), (3, 1));
    assert_eq!(state_of(&world), Some(FilesState::Whole));
    let sandboxes = world.service.0.sandboxes.lock().unwrap();
    assert!(sandboxes[0].0.containers.is_empty());
    assert_eq!(sandboxes[0].1.len(), 1, "the other one stays");
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_runs_keeps_the_suspect_that_it_was_made_of() {
    let world = cut_in_a_pull().await;
    *world.service.0.sandboxes.lock().unwrap() = vec![pod_in_sandbox(SandboxState::Ready)];
    world.repair().await;
    assert_eq!((removed_sandboxes(&world), removed(&world)), (0, 0));
    // It ends, and the image is repaired the next time that its source is asked.
    tokio::time::sleep(ASK_AGAIN.0).await;
    *world.service.0.sandboxes.lock().unwrap() = vec![pod_in_sandbox(SandboxState::NotReady)];
    world.repair().await;
    assert_eq!((removed_sandboxes(&world), removed(&world)), (1, 1));
    assert_eq!(state_of(&world), Some(FilesState::Whole));
}

#[tokio::test(start_paused = true)]
async fn the_first_sandbox_waits_for_images_that_an_earlier_boot_left_open() {
    let whole = world(ImageConfig::default());
    whole
        .ensure(&pod("u", IMAGE, "IfNotPresent"))
        .await
        .unwrap();
    let whole = reboot(whole);
    let begun = tokio::time::Instant::now();
    whole.manager.first_round(&whole.store).await;
    assert_eq!(begun.elapsed(), Duration::ZERO, "nothing is open");
    let cut = cut_in_a_pull().await;
    let begun = tokio::time::Instant::now();
    cut.manager.first_round(&cut.store).await;
    assert_eq!(begun.elapsed(), Duration::from_secs(60), "not for ever");
    let begun = tokio::time::Instant::now();
    cut.manager.first_round(&cut.store).await;
    assert_eq!(begun.elapsed(), Duration::ZERO, "once for all sandboxes");
    let cut = cut_in_a_pull().await;
    let waiting = cut.manager.first_round(&cut.store);
    let looked = async {
        tokio::time::sleep(Duration::from_secs(3)).await;
        cut.manager.round.send_replace(true);
    };
    let begun = tokio::time::Instant::now();
    tokio::join!(waiting, looked);
    assert_eq!(begun.elapsed(), Duration::from_secs(3));
}

/// Starts the container of [`holder`] as far as its record goes.
async fn intend(world: &World) {
    let intent = crate::store::StartIntent {
        pod: PodUid::new("h"),
        container: "c".to_owned(),
        container_id: ContainerId::new("c1"),
        attempt: 0,
        hash: String::new(),
        why: "test".to_owned(),
        at: world.clock.now(),
    };
    let committed = world.store.commit_intent(intent, Transaction::new());
    committed.await.unwrap();
}

#[tokio::test]
async fn a_container_that_has_not_ended_keeps_its_image_and_its_record() {
    for state in [ContainerState::Created, ContainerState::Unknown] {
        let world = cut_in_a_pull().await;
        intend(&world).await;
        *world.service.0.holders.lock().unwrap() = vec![holder(state)];
        let asking = pod("u", IMAGE, "IfNotPresent");
        world.ensure(&asking).await.unwrap();
        world.repair().await;
        assert_eq!(removed(&world), 0, "{state:?}");
        // Nor with a sandbox that has ended.
        world.service.0.holders.lock().unwrap().clear();
        let mut in_sandbox = pod_in_sandbox(SandboxState::NotReady);
        in_sandbox.0.containers[0].state = state;
        *world.service.0.sandboxes.lock().unwrap() = vec![in_sandbox];
        world.ensure(&asking).await.unwrap();
        assert_eq!(removed(&world), 0, "{state:?}");
        let sandboxes = world.service.0.sandboxes.lock().unwrap();
        assert_eq!(sandboxes[0].0.containers.len(), 1, "{state:?}");
        let seen = world.store.snapshot();
        let record: &crate::core::state::ContainerRecord = seen.record("h/c").unwrap();
        assert!(record.intent.is_some(), "{state:?}: it may run");
    }
}

// Invariant IMG-2.
#[tokio::test]
async fn an_image_that_could_not_be_removed_is_not_taken_for_repaired() {
    let world = cut_in_a_pull().await;
    let asking = pod("u", IMAGE, "Always");
    *world.service.0.fail_removal.lock().unwrap() = true;
    world.ensure(&asking).await.unwrap();
    assert_eq!(state_of(&world), Some(FilesState::Removed));
    // Nor after the death of the agent, while a container uses it.
    let world = restart(world);
    *world.service.0.fail_removal.lock().unwrap() = false;
    *world.service.0.holders.lock().unwrap() = vec![holder(ContainerState::Running)];
    world.ensure(&asking).await.unwrap();
    assert_eq!(state_of(&world), Some(FilesState::Removed));
    assert_eq!(world.told(), []);
    world.service.0.holders.lock().unwrap().clear();
    world.ensure(&asking).await.unwrap();
    assert_eq!(state_of(&world), Some(FilesState::Whole));
    assert_eq!(world.told(), told(&[("ImageRepaired", true)]));
}

const OTHER: &str = "r.example/y:1";

/// The image has a second name.
fn tag(world: &World, name: &str) {
    let fake = &world.service.0;
    let (name, image) = (name.to_owned(), IMAGE.to_owned());
    fake.aliases.lock().unwrap().insert(name.clone(), image);
    fake.present.lock().unwrap().insert(name);
}

/// The image is a suspect, and was pulled by a second name after the cut.
async fn with_two_names() -> World {
    let world = cut_in_a_pull().await;
    tag(&world, OTHER);
    world.ensure(&pod("v", OTHER, "Always")).await.unwrap();
    world
}

#[tokio::test]
async fn a_suspect_is_not_whole_by_another_name() {
    let world = with_two_names().await;
    let seen = world.store.snapshot();
    for name in [IMAGE, OTHER] {
        let (files, _) = files_of(&seen, &qualified(name)).unwrap();
        assert!(
            matches!(files.state, FilesState::Suspect { .. }),
            "{files:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_name_without_a_source_keeps_the_image_and_with_one_it_is_brought_again() {
    let world = with_two_names().await;
    let fake = &world.service.0;
    fake.away.lock().unwrap().insert(OTHER.to_owned());
    let asking = pod("u", IMAGE, "IfNotPresent");
    world.ensure(&asking).await.unwrap();
    assert_eq!(removed(&world), 0);
    fake.away.lock().unwrap().clear();
    tokio::time::sleep(Duration::from_secs(60)).await;
    world.repair().await;
    let mut gone = fake.removed.lock().unwrap().clone();
    gone.sort_unstable();
    assert_eq!(gone, [OTHER, IMAGE], "by their names");
    let seen = world.store.snapshot();
    for name in [OTHER, IMAGE] {
        assert!(fake.present.lock().unwrap().contains(name), "{name}");
        let (files, _) = files_of(&seen, &qualified(name)).unwrap();
        assert_eq!(files.state, FilesState::Whole, "{name}");
    }
}

#[tokio::test]
async fn a_tag_that_no_registry_has_is_neither_asked_for_nor_removed() {
    let world = cut_in_a_pull().await;
    tag(&world, "mine/y:1");
    let asking = pod("u", IMAGE, "IfNotPresent");
    world.ensure(&asking).await.unwrap();
    // The first one, and the question to the registry of the image.
    assert_eq!((world.pulls(), removed(&world)), (2, 0));
    let present = world.service.0.present.lock().unwrap();
    assert!(present.contains("mine/y:1"));
}

#[tokio::test]
async fn a_name_that_is_gone_while_another_keeps_the_image_is_not_repaired_by_a_pull() {
    let world = with_two_names().await;
    *world.service.0.fail_removal.lock().unwrap() = true;
    world.repair().await;
    assert_eq!(state_of(&world), Some(FilesState::Removed));
    // The agent died after the first name.
    world.service.0.present.lock().unwrap().remove(IMAGE);
    let world = restart(world);
    let asking = pod("u", IMAGE, "IfNotPresent");
    world.ensure(&asking).await.unwrap();
    assert_eq!(state_of(&world), Some(FilesState::Removed));
    assert_eq!(world.told(), []);
}

#[tokio::test(start_paused = true)]
async fn a_registry_that_hangs_keeps_no_other_image_from_its_repair() {
    let world = cut_in_a_pull().await;
    // Its record comes before the other one.
    let other = "hung.example/f:1";
    let state = world.store.snapshot();
    let (mut files, at) = files_of(&state, &qualified(IMAGE)).unwrap();
    files.image = other.to_owned();
    let key = crate::core::images::files_key(&qualified(other));
    let transaction = Transaction::new().put(key, crate::core::state::FactRecord::of(&files, at));
    world.store.commit(transaction).await.unwrap();
    let fake = &world.service.0;
    fake.present.lock().unwrap().insert(other.to_owned());
    fake.hang.lock().unwrap().insert(other.to_owned());
    let begun = tokio::time::Instant::now();
    world.repair().await;
    assert!(begun.elapsed() < 2 * ANSWER, "{:?}", begun.elapsed());
    assert_eq!(*fake.removed.lock().unwrap(), [IMAGE]);
    assert_eq!(state_of(&world), Some(FilesState::Whole));
}

#[tokio::test]
async fn a_suspect_whose_name_stands_for_another_image_is_settled() {
    for state in [
        FilesState::Removed,
        FilesState::Suspect {
            why: "test".to_owned(),
        },
    ] {
        for (reboots, want) in [(false, FilesState::Whole), (true, FilesState::Trusted)] {
            let world = cut_in_a_pull().await;
            let seen = world.store.snapshot();
            let (mut files, _) = files_of(&seen, &qualified(IMAGE)).unwrap();
            files.id = "id-of-former".to_owned();
            files.state = state.clone();
            let key = crate::core::images::files_key(&qualified(IMAGE));
            let record = crate::core::state::FactRecord::of(&files, world.clock.now());
            let transaction = Transaction::new().put(key, record);
            world.store.commit(transaction).await.unwrap();
            let world = if reboots { reboot(world) } else { world };
            world.repair().await;
            assert_eq!(state_of(&world), Some(want), "{state:?} {reboots}");
            assert_eq!(removed(&world), 0);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_suspect_in_use_is_looked_at_less_and_less_often() {
    let world = cut_in_a_pull().await;
    *world.service.0.holders.lock().unwrap() = vec![holder(ContainerState::Running)];
    let run = Arc::clone(&world.manager).run(
        world.service.clone(),
        world.store.clone(),
        Arc::new(world.recorder.clone()),
        tokio_util::sync::CancellationToken::new(),
    );
    let hour = Duration::from_secs(3600);
    assert!(tokio::time::timeout(hour, run).await.is_err());
    let looks = world.service.0.looks.load(Ordering::SeqCst);
    assert!((10..25).contains(&looks), "{looks}");
    assert_eq!(removed(&world), 0);
}

/// The runtime misses files of an image.
const MISSING: &str =
    "failed to create container: failed to stat parent: stat /s/7/fs: no such file or directory";

#[tokio::test(start_paused = true)]
async fn a_registry_that_does_not_answer_takes_a_preloaded_image_from_no_pod() {
    let world = world(ImageConfig::default());
    let fake = &world.service.0;
    fake.present.lock().unwrap().insert(IMAGE.to_owned());
    world.ensure(&pod("u", IMAGE, "Never")).await.unwrap();
    world.fail(MISSING).await;
    fake.hang.lock().unwrap().insert(IMAGE.to_owned());
    world.repair().await;
    assert_eq!((world.pulls(), removed(&world)), (1, 0), "it was asked");
    let access = |world: &World| {
        let seen = world.store.snapshot();
        shown_access(&seen, IMAGE, &format!("id-of-{IMAGE}"))
    };
    world.ensure(&pod("v", IMAGE, "Never")).await.unwrap();
    assert_eq!(access(&world), "preloaded");
    // Nor does a pull that begins while the runtime does not say what it has.
    let (now, present) = (world.clock.now(), crate::core::images::Presence::Unknown);
    let records = &world.manager.records;
    let begun = records.begin(&world.store, IMAGE, present, now, |_, transaction| {
        transaction
    });
    drop(begun.await.unwrap());
    assert_eq!(access(&world), "preloaded");
    // Nor once the intent has been given up.
    let world = restart(world);
    world.clock.advance(Duration::from_secs(2 * 3600));
    world.ensure(&pod("w", IMAGE, "Never")).await.unwrap();
    assert_eq!(access(&world), "preloaded");
    // What such a question has brought all the same belongs to those who can pull it.
    let fake = &world.service.0;
    world.repair().await;
    let (name, other) = (IMAGE.to_owned(), "another".to_owned());
    fake.aliases.lock().unwrap().insert(name, other.clone());
    fake.present.lock().unwrap().insert(other);
    let error = world.ensure(&pod("x", IMAGE, "Never")).await.unwrap_err();
    assert_eq!(error.reason, ImageErrorReason::ErrImageNeverPull);
}

#[tokio::test]
async fn a_program_of_the_pod_in_no_known_format_is_no_evidence_against_its_image() {
    const ERROR: &str = "exec /bin/x: exec format error";
    let world = world(ImageConfig::default());
    let fake = &world.service.0;
    fake.present.lock().unwrap().insert(IMAGE.to_owned());
    world.ensure(&pod("u", IMAGE, "Never")).await.unwrap();
    let of_pod = [
        ("command", serde_json::json!(["/bin/x"])),
        // The program of an image without an entry point.
        ("args", serde_json::json!(["/bin/x"])),
        (
            "volumeMounts",
            serde_json::json!([{"name": "v", "mountPath": "/bin/x"}]),
        ),
    ];
    for (field, value) in of_pod {
        let mut asking = pod("u", IMAGE, "Never");
        let containers = serde_json::json!([{"name": "c", "image": IMAGE, field: value}]);
        asking.spec.as_mut().unwrap().containers = serde_json::from_value(containers).unwrap();
        let (service, store, recorder) = (&world.service, &world.store, &world.recorder);
        let (manager, of) = (&world.manager, ("c", IMAGE));
        let failed = manager.container_failed(&asking, of, ERROR, service, store, recorder);
        failed.await.unwrap();
        assert_eq!(world.told(), told(&[]), "{field}");
    }
    world.fail(ERROR).await;
    assert_eq!(world.told(), told(&[("ImageSuspect", true)]));
}

/// Records images as removed, to be pulled or imported again.
async fn owe(world: &World, images: &[&str]) {
    for image in images {
        let files = crate::core::images::ImageFiles {
            image: (*image).to_owned(),
            id: format!("id-of-{image}"),
            state: FilesState::Removed,
            suspected: None,
            lost: None,
        };
        let key = crate::core::images::files_key(&qualified(image));
        let record = crate::core::state::FactRecord::of(&files, world.clock.now());
        let transaction = Transaction::new().put(key, record);
        world.store.commit(transaction).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn pulls_that_no_pod_waits_for_have_a_deadline_and_take_no_slot_of_pods() {
    let world = world(ImageConfig::default());
    let hung = ["hung.example/a:1", "hung.example/b:1", "hung.example/c:1"];
    owe(&world, &hung).await;
    owe(&world, &["r.example/y:1"]).await;
    let fake = &world.service.0;
    let hang = hung.iter().map(|image| (*image).to_owned());
    fake.hang.lock().unwrap().extend(hang);
    let run = Arc::clone(&world.manager).run(
        world.service.clone(),
        world.store.clone(),
        Arc::new(world.recorder.clone()),
        tokio_util::sync::CancellationToken::new(),
    );
    let present = |image: &str| fake.present.lock().unwrap().contains(image);
    let checks = async {
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(present("r.example/y:1"), "another registry");
        assert_eq!(world.pulls(), 3, "two at once from one registry");
        let begun = tokio::time::Instant::now();
        let asking = pod("u", IMAGE, "IfNotPresent");
        world.ensure(&asking).await.unwrap();
        assert!(begun.elapsed() < OWED, "pulls are serialised");
        tokio::time::sleep(Duration::from_secs(31 * 60)).await;
        assert!(world.pulls() > 5, "the third has its turn");
        fake.hang.lock().unwrap().clear();
        tokio::time::sleep(Duration::from_secs(62 * 60)).await;
        for image in hung {
            assert!(present(image), "{image} began again");
        }
    };
    tokio::select! {
        () = run => panic!("it never ends"),
        () = checks => {}
    }
}

/// A disk that reports each error once to each descriptor, as the kernel does.
#[derive(Default)]
struct FailingDisk {
    errors: AtomicU32,
    syncs: AtomicU32,
    unwritten: AtomicU64,
}

struct Failing(Arc<FailingDisk>, AtomicU32);

struct FailingDisks(Arc<FailingDisk>);

impl ImageDisk for FailingDisks {
    fn open(&self, _: &std::path::Path) -> std::io::Result<Box<dyn OpenedDisk>> {
        let seen = self.0.errors.load(Ordering::SeqCst).into();
        Ok(Box::new(Failing(Arc::clone(&self.0), seen)))
    }

    fn unwritten(&self) -> u64 {
        self.0.unwritten.load(Ordering::SeqCst)
    }
}

impl OpenedDisk for Failing {
    fn sync(&self) -> std::io::Result<()> {
        self.0.syncs.fetch_add(1, Ordering::SeqCst);
        let errors = self.0.errors.load(Ordering::SeqCst);
        if self.1.swap(errors, Ordering::SeqCst) == errors {
            return Ok(());
        }
        Err(std::io::Error::other("no space left"))
    }
}

fn on_disk(world: World, disk: &Arc<FailingDisk>) -> World {
    let manager = ImageManager::new(EACH_ITS_SLOT, world.clock.clone(), Metrics::default());
    World {
        manager: Arc::new(manager.syncing(Arc::new(FailingDisks(Arc::clone(disk))))),
        ..world
    }
}

/// Pulls these images beside each other. `meanwhile` runs once all of them have begun.
async fn pull_all(world: &World, images: &[&str], meanwhile: impl Future<Output = ()>) {
    let gate = Arc::new(Semaphore::new(0));
    *world.service.0.gate.lock().unwrap() = Some(Arc::clone(&gate));
    let asking: Vec<Pod> = images
        .iter()
        .map(|image| pod(image, image, "IfNotPresent"))
        .collect();
    let pulls = futures::future::join_all(asking.iter().map(|pod| world.ensure(pod)));
    let all = u32::try_from(images.len()).unwrap();
    let opens = async {
        while world.service.0.at_once.load(Ordering::SeqCst) < all {
            tokio::task::yield_now().await;
        }
        meanwhile.await;
        gate.add_permits(images.len());
    };
    let (pulls, ()) = tokio::join!(pulls, opens);
    *world.service.0.gate.lock().unwrap() = None;
    for pulled in pulls {
        pulled.unwrap();
    }
}

// Invariant IMG-1.
#[tokio::test]
async fn files_that_were_not_written_make_suspects_of_all_images_that_were_being_pulled() {
    let disk = Arc::<FailingDisk>::default();
    let world = on_disk(world(ImageConfig::default()), &disk);
    pull_all(&world, &[IMAGE, OTHER], async {
        disk.errors.fetch_add(1, Ordering::SeqCst);
    })
    .await;
    let state = |image: &str| {
        let seen = world.store.snapshot();
        files_of(&seen, &qualified(image)).unwrap().0.state
    };
    for image in [IMAGE, OTHER] {
        let state = state(image);
        assert!(
            matches!(&state, FilesState::Suspect { why } if why.contains("not written")),
            "{image}: {state:?}"
        );
    }
    // Those that come later are not to blame, and the others are pulled again.
    world
        .ensure(&pod("v", "z:1", "IfNotPresent"))
        .await
        .unwrap();
    assert_eq!(state("z:1"), FilesState::Whole);
    world.repair().await;
    assert_eq!(state(IMAGE), FilesState::Whole);
    assert_eq!(state(OTHER), FilesState::Whole);
    // A disk that goes on like that gets the image once per boot. It is used as it is, and a reboot finds it.
    world.service.0.present.lock().unwrap().clear();
    pull_all(&world, &[IMAGE], async {
        disk.errors.fetch_add(1, Ordering::SeqCst);
    })
    .await;
    world.repair().await;
    world.repair().await;
    assert!(matches!(state(IMAGE), FilesState::Pulling { .. }));
    let pulls = world.pulls();
    world.repair().await;
    assert_eq!(world.pulls(), pulls);
}

#[tokio::test]
async fn files_that_were_not_written_a_second_time_are_not_taken_for_whole_by_the_next_agent() {
    let disk = Arc::<FailingDisk>::default();
    let world = on_disk(world(ImageConfig::default()), &disk);
    for _ in 0..2 {
        world.service.0.present.lock().unwrap().clear();
        pull_all(&world, &[IMAGE], async {
            disk.errors.fetch_add(1, Ordering::SeqCst);
        })
        .await;
        if matches!(state_of(&world), Some(FilesState::Suspect { .. })) {
            world.repair().await;
            assert_eq!(state_of(&world), Some(FilesState::Whole));
        }
    }
    assert!(matches!(state_of(&world), Some(FilesState::Pulling { .. })));
    // The disk is well again, which says nothing of what it has dropped.
    let world = on_disk(world, &disk);
    world.repair().await;
    assert!(matches!(state_of(&world), Some(FilesState::Pulling { .. })));
    // Unpacked anew, it is whole.
    world.service.0.present.lock().unwrap().clear();
    pull_all(&world, &[IMAGE], std::future::ready(())).await;
    assert_eq!(state_of(&world), Some(FilesState::Whole));
}

#[tokio::test(start_paused = true)]
async fn a_pull_is_synced_at_its_end_and_before_that_only_if_the_kernel_falls_behind() {
    for (unwritten, syncs) in [(1 << 20, 1..=1), (1 << 30, 3..=13)] {
        let disk = Arc::<FailingDisk>::default();
        disk.unwritten.store(unwritten, Ordering::SeqCst);
        let world = on_disk(world(ImageConfig::default()), &disk);
        let minute = tokio::time::sleep(Duration::from_secs(60));
        pull_all(&world, &[IMAGE], minute).await;
        let synced = disk.syncs.load(Ordering::SeqCst);
        assert!(syncs.contains(&synced), "{unwritten}: {synced}");
        assert_eq!(state_of(&world), Some(FilesState::Whole));
    }
}

#[tokio::test(start_paused = true)]
async fn the_image_of_sandboxes_is_repaired_while_they_wait() {
    const PAUSE: &str = "registry.k8s.io/pause:3.10";
    let failing = format!("failed to create containerd container: {MISSING}");
    for (what, error, is_away, wants) in [
        (
            "damaged",
            failing.as_str(),
            false,
            (Some(FilesState::Whole), 1),
        ),
        ("without a source", failing.as_str(), true, (None, 0)),
        (
            "another error",
            "plugin type=bridge failed: no addresses",
            false,
            (None, 0),
        ),
    ] {
        let world = world(ImageConfig::default());
        let fake = &world.service.0;
        fake.present.lock().unwrap().insert(PAUSE.to_owned());
        fake.sandbox_images.lock().unwrap().push(PAUSE.to_owned());
        *fake.sandboxes.lock().unwrap() = vec![pod_in_sandbox(SandboxState::NotReady)];
        if is_away {
            fake.away.lock().unwrap().insert(PAUSE.to_owned());
        }
        let run = Arc::clone(&world.manager).run(
            world.service.clone(),
            world.store.clone(),
            Arc::new(world.recorder.clone()),
            tokio_util::sync::CancellationToken::new(),
        );
        let checks = async {
            tokio::time::sleep(Duration::from_secs(30)).await;
            let asking = pod("u", IMAGE, "IfNotPresent");
            let (service, store) = (&world.service, &world.store);
            let failed = async || {
                let noted =
                    world
                        .manager
                        .sandbox_failed(&asking, error, service, store, &world.recorder);
                noted.await.unwrap();
                let begun = tokio::time::Instant::now();
                world.manager.sandbox_image_repaired().await;
                begun.elapsed()
            };
            let waited = failed().await;
            assert!(waited < Duration::from_secs(50), "{what}: {waited:?}");
            let seen = world.store.snapshot();
            let state = files_of(&seen, &qualified(PAUSE)).map(|(files, _)| files.state);
            if wants.0.is_some() {
                assert_eq!(state, wants.0, "{what}");
            }
            // If that does not help, the cause is elsewhere.
            failed().await;
            assert_eq!(removed(&world), wants.1, "{what}");
            assert!(fake.present.lock().unwrap().contains(PAUSE), "{what}");
        };
        tokio::select! {
            () = run => panic!("it never ends"),
            () = checks => {}
        }
        let suspects = world
            .told()
            .iter()
            .filter(|(reason, _)| reason == "ImageSuspect")
            .count();
        assert_eq!(suspects, usize::from(error == failing), "{what}");
    }
}

#[tokio::test]
async fn of_pinned_images_those_of_archives_are_not_taken_for_that_of_sandboxes() {
    let world = world(ImageConfig::default());
    let archive = crate::core::images::ArchiveRecord {
        name: "a.tar".to_owned(),
        stamp: crate::core::images::ArchiveStamp {
            inode: 1,
            size: 1,
            modified_ns: 1,
        },
        images: vec![IMAGE.to_owned(), "r.example/pause:1".to_owned()],
        error: String::new(),
    };
    let key = crate::core::images::archive_key("a.tar");
    let record = crate::core::state::FactRecord::of(&archive, world.clock.now());
    let transaction = Transaction::new().put(key, record);
    world.store.commit(transaction).await.unwrap();
    let all = [IMAGE, "r.example/pause:1", "r.example/sandbox:1"];
    let fake = &world.service.0;
    for image in all {
        fake.present.lock().unwrap().insert(image.to_owned());
        let pinned = qualified(image);
        fake.sandbox_images.lock().unwrap().push(pinned);
    }
    let asking = pod("u", IMAGE, "IfNotPresent");
    let (service, store) = (&world.service, &world.store);
    let failed = world
        .manager
        .sandbox_failed(&asking, MISSING, service, store, &world.recorder);
    failed.await.unwrap();
    let seen = world.store.snapshot();
    let is_suspect = |image: &&str| {
        let files = files_of(&seen, &qualified(image)).map(|(files, _)| files.state);
        matches!(files, Some(FilesState::Suspect { .. }))
    };
    let suspects: Vec<&str> = all.into_iter().filter(is_suspect).collect();
    assert_eq!(suspects, ["r.example/pause:1", "r.example/sandbox:1"]);
}

#[tokio::test]
async fn a_layer_that_other_images_have_goes_with_all_of_them_when_a_repair_has_not_helped() {
    let world = world(ImageConfig::default());
    let fake = &world.service.0;
    let asking = pod("u", IMAGE, "IfNotPresent");
    for (image, layers) in [
        (IMAGE, ["base", "x"]),
        (OTHER, ["base", "y"]),
        ("z:1", ["another", "x"]),
    ] {
        let layers = layers.map(str::to_owned).to_vec();
        fake.layers.lock().unwrap().insert(image.to_owned(), layers);
        world
            .ensure(&pod("u", image, "IfNotPresent"))
            .await
            .unwrap();
    }
    let removed = |world: &World| -> Vec<String> {
        let mut removed = std::mem::take(&mut *world.service.0.removed.lock().unwrap());
        removed.sort_unstable();
        removed
    };
    world.fail(MISSING).await;
    world.ensure(&asking).await.unwrap();
    assert_eq!(removed(&world), [IMAGE]);
    world.fail(MISSING).await;
    world.ensure(&asking).await.unwrap();
    assert_eq!(removed(&world), [OTHER, IMAGE], "together");
    world.repair().await;
    let seen = world.store.snapshot();
    for image in [IMAGE, OTHER, "z:1"] {
        let (files, _) = files_of(&seen, &qualified(image)).unwrap();
        assert_eq!(files.state, FilesState::Whole, "{image}");
    }
    // Once: the cause is elsewhere.
    world.fail(MISSING).await;
    world.ensure(&asking).await.unwrap();
    assert_eq!(removed(&world), [""; 0]);
    let told = world.told();
    let suspects: Vec<bool> = told
        .iter()
        .filter(|(reason, _)| reason == "ImageSuspect")
        .map(|(_, is_of_pod)| *is_of_pod)
        .collect();
    assert_eq!(
        suspects,
        [true, true, false],
        "a pod hears of its own image"
    );
}
