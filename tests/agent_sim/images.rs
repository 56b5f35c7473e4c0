//! Images and power cuts: a cut at every step of a pull, a death at every step of a repair.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use holdfast::core::images::{FilesState, files_of};
use holdfast::images::{ImageDisk, OpenedDisk, qualified};
use holdfast_testkit::exploration::{every_point, is_whole};
use holdfast_testkit::fake_cri::{Behaviour, FakeCri, Pull};

use crate::node::{Crash, When};
use crate::world::{IMAGE, World, spec};

/// Pulled by the agent; [`IMAGE`] was there before it.
const PULLED: &str = "holdfast.local/pulled:1";
const POD: &str = "pulled";

/// The file system of images in a simulation. Its sync brings to the fake runtime's disk what was pulled.
pub struct SimImageDisk {
    pub fake: FakeCri,
    /// The sync does nothing.
    pub is_idle: AtomicBool,
}

struct Opened {
    fake: FakeCri,
    is_idle: bool,
}

impl ImageDisk for SimImageDisk {
    fn open(&self, directory: &Path) -> io::Result<Box<dyn OpenedDisk>> {
        directory.metadata()?;
        Ok(Box::new(Opened {
            fake: self.fake.clone(),
            is_idle: self.is_idle.load(Ordering::SeqCst),
        }))
    }

    fn unwritten(&self) -> u64 {
        0
    }
}

impl OpenedDisk for Opened {
    fn sync(&self) -> io::Result<()> {
        if !self.is_idle {
            self.fake.sync_images();
        }
        Ok(())
    }
}

fn node() -> World {
    let w = World::new();
    w.behave(|_, _| Behaviour::RunForever);
    w.manifest("there", &spec("Always", ""));
    w.manifest(POD, &spec("Always", "").replace(IMAGE, PULLED));
    w
}

fn state_of(w: &World) -> Option<FilesState> {
    files_of(&w.state(), &qualified(PULLED)).map(|(files, _)| files.state)
}

/// The power is cut: layers that no sync has brought to the disk are lost, and the runtime lists their image as before.
/// Returns whether the agent takes lost ones for whole.
async fn cut_and_judge(w: &mut World) -> bool {
    w.cut_power(|_, _| false).await;
    w.fake.is_broken(PULLED) && state_of(w) == Some(FilesState::Whole)
}

async fn cut(w: &mut World) {
    assert!(
        !cut_and_judge(w).await,
        "a damaged image is on record as whole"
    );
}

/// Both pods run, within the time in which an image has to be repaired; what was there is untouched.
async fn assert_repaired(w: &World) {
    w.until("both pods run", 60, |w| {
        !w.running(POD).is_empty() && !w.running("there").is_empty()
    })
    .await;
    assert!(!w.fake.is_broken(PULLED), "{}", w.describe());
    w.until("the image is whole", 60, |w| {
        state_of(w) == Some(FilesState::Whole)
    })
    .await;
    let calls = w.fake.calls();
    let id_of_healthy = w.fake.containers().into_iter().find_map(|c| {
        let is_there = c.labels["io.kubernetes.pod.name"].starts_with("there");
        is_there.then_some(c.image_ref)
    });
    let touched = calls.iter().filter(|call| {
        call.operation == "remove_image"
            && (call.object == IMAGE || Some(&call.object) == id_of_healthy.as_ref())
    });
    assert_eq!(touched.count(), 0, "a healthy image was removed");
    assert_eq!(w.wrongs(), [""; 0]);
}

/// A run of its own runtime, so that what lives leave behind goes with it.
fn run<T>(lives: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap()
        .block_on(lives)
}

/// One life that ends at `crash`, or after a while. Returns whether it came to that.
async fn live(w: &mut World, crash: Crash) -> bool {
    !(w.start_until(crash).await && w.pass_alive(Duration::from_secs(40)).await)
}

fn cut_at(crash: Crash) -> bool {
    run(async {
        let mut w = node();
        let died = live(&mut w, crash).await;
        cut(&mut w).await;
        w.start().await;
        assert_repaired(&w).await;
        died
    })
}

#[test]
fn a_power_cut_at_any_call_leaves_no_pod_with_a_damaged_image() {
    let before = every_point(|n| cut_at(Crash::Call(n, When::Before)));
    let after = every_point(|n| cut_at(Crash::Call(n, When::After)));
    assert!(
        !is_whole() || (before >= 7 && after >= 7),
        "{before} {after}"
    );
}

// Invariant IMG-1.
#[test]
fn a_power_cut_at_any_write_leaves_no_pod_with_a_damaged_image() {
    let points = every_point(|n| cut_at(Crash::Write(n, When::Before)));
    assert!(!is_whole() || points > 10, "{points}");
}

/// The agent of the first life could not bring the files to the disk: the image is damaged after the cut.
async fn damaged() -> World {
    let mut w = node();
    w.fake.keep_images_in("/proc/none");
    w.start().await;
    w.until("both pods run", 60, |w| {
        !w.running(POD).is_empty() && !w.running("there").is_empty()
    })
    .await;
    cut(&mut w).await;
    assert!(w.fake.is_broken(PULLED));
    w.fake.keep_images_in("/proc");
    w
}

#[test]
fn an_agent_that_dies_at_any_step_of_a_repair_repairs_in_its_next_life() {
    let die = |crash| {
        run(async {
            let mut w = damaged().await;
            let died = live(&mut w, crash).await;
            w.crash().await;
            w.start().await;
            assert_repaired(&w).await;
            died
        })
    };
    let before = every_point(|n| die(Crash::Call(n, When::Before)));
    let after = every_point(|n| die(Crash::Call(n, When::After)));
    let writes = every_point(|n| die(Crash::Write(n, When::Before)));
    assert!(
        !is_whole() || (before >= 5 && after >= 5 && writes > 5),
        "{before} {after} {writes}"
    );
}

#[test]
fn a_second_cut_at_any_step_of_a_repair_is_repaired_as_well() {
    let die = |crash| {
        run(async {
            let mut w = damaged().await;
            let died = live(&mut w, crash).await;
            cut(&mut w).await;
            w.start().await;
            assert_repaired(&w).await;
            died
        })
    };
    let points = every_point(|n| die(Crash::Call(n, When::After)));
    assert!(!is_whole() || points >= 5, "{points}");
}

// Invariant IMG-2.
#[test]
fn a_suspect_stays_while_its_registry_is_away_and_is_repaired_when_it_is_back() {
    run(async {
        let mut w = damaged().await;
        let away = Pull::Fails(tonic::Code::Unavailable, "no route to host".to_owned());
        w.fake.pull(PULLED, away);
        w.start().await;
        w.pass(300).await;
        assert!(w.fake.has_image(PULLED), "the last copy");
        assert_eq!(w.fake.count("remove_image"), 0);
        assert!(w.running(POD).is_empty());
        w.fake.pull(PULLED, Pull::Succeeds);
        assert_repaired(&w).await;
    });
}

#[test]
fn an_image_that_a_container_fails_on_is_repaired_without_a_reboot() {
    run(async {
        let mut w = node();
        w.start().await;
        w.until("both pods run", 60, |w| {
            !w.running(POD).is_empty() && !w.running("there").is_empty()
        })
        .await;
        // The disk has lost a directory.
        w.fake.break_image(PULLED);
        let running = w.running(POD)[0].clone();
        w.fake.exit(&running, 1);
        assert_repaired(&w).await;
        assert_eq!(w.starts(POD).len(), 2);
    });
}

/// A pod that runs the image's own program.
fn plain(image: &str) -> String {
    format!(
        r#"{{"restartPolicy":"Always","containers":[{{"name":"main","image":"{image}","imagePullPolicy":"IfNotPresent"}}]}}"#
    )
}

#[test]
fn an_image_whose_program_is_empty_is_repaired_after_repeated_failures() {
    run(async {
        let mut w = World::new();
        w.behave(|_, _| Behaviour::RunForever);
        w.manifest("there", &plain(IMAGE));
        w.fake.empty_program(IMAGE);
        w.start().await;
        w.until("it runs", 120, |w| !w.running("there").is_empty())
            .await;
        assert_eq!(w.starts("there").len(), 3, "two failures");
        assert_eq!(w.fake.count("remove_image"), 1);
        assert_eq!(w.wrongs(), [""; 0]);
    });
}

#[test]
fn a_pod_that_logs_what_the_runtime_would_leaves_its_image_alone() {
    run(async {
        let mut w = World::new();
        w.behave_as_told();
        let said = r#"["-c","echo exec /bin/sh: exec format error; exit 255"]"#;
        let args = plain(IMAGE).replace(
            r#""imagePullPolicy""#,
            &format!(r#""command":["sh"],"args":{said},"imagePullPolicy""#),
        );
        w.manifest("there", &args);
        w.start().await;
        w.pass(300).await;
        assert!(w.starts("there").len() > 3);
        assert_eq!(
            (w.fake.count("pull_image"), w.fake.count("remove_image")),
            (0, 0)
        );
    });
}

#[test]
fn a_sync_that_does_nothing_is_noticed() {
    run(async {
        for (is_idle, want) in [(false, false), (true, true)] {
            let mut w = node();
            w.image_disk.is_idle.store(is_idle, Ordering::SeqCst);
            w.start().await;
            w.until("it is pulled", 60, |w| {
                state_of(w) == Some(FilesState::Whole)
            })
            .await;
            assert_eq!(cut_and_judge(&mut w).await, want, "{is_idle}");
        }
    });
}

#[test]
fn after_a_power_cut_a_runtime_without_its_data_gets_its_images_and_runs_no_pod_of_policy_never_twice()
 {
    run(async {
        let mut w = node();
        w.manifest("once", &spec("Never", ""));
        w.start().await;
        w.until("all pods run", 60, |w| {
            [POD, "there", "once"]
                .iter()
                .all(|pod| !w.running(pod).is_empty())
        })
        .await;
        w.pass(30).await;
        cut(&mut w).await;
        // Somebody has moved its directory aside.
        w.reboot_runtime();
        for image in [IMAGE, PULLED] {
            w.fake.remove_image(image);
        }
        w.start().await;
        w.until("both pods run", 120, |w| {
            !w.running(POD).is_empty() && !w.running("there").is_empty()
        })
        .await;
        w.pass(120).await;
        assert_eq!(w.starts("once").len(), 1);
        assert_eq!(w.starts(POD).len(), 2);
        assert_eq!(state_of(&w), Some(FilesState::Whole));
        assert_eq!(w.wrongs(), [""; 0]);
    });
}

#[test]
fn a_running_pod_with_an_image_volume_asks_for_its_image_once() {
    run(async {
        let mut w = World::new();
        w.behave(|_, _| Behaviour::RunForever);
        let mounts = r#""command":["sh"],"volumeMounts":[{"name":"data","mountPath":"/data"}]"#;
        let volumes = format!(
            r#","volumes":[{{"name":"data","image":{{"reference":"{PULLED}","pullPolicy":"IfNotPresent"}}}}]"#
        );
        let pod = spec("Always", &volumes).replace(r#""command":["sh"]"#, mounts);
        w.manifest(POD, &pod);
        w.start().await;
        w.until("it runs", 60, |w| !w.running(POD).is_empty()).await;
        let (pulls, asked) = (w.fake.count("pull_image"), w.fake.count("image_status"));
        assert_eq!(pulls, 1);
        w.pass(600).await;
        assert_eq!(w.fake.count("pull_image"), pulls);
        assert_eq!(
            w.fake.count("image_status"),
            asked,
            "no event without a question"
        );
    });
}

#[test]
fn a_reboot_after_a_whole_pull_asks_no_registry() {
    run(async {
        let mut w = node();
        w.start().await;
        w.until("it runs", 60, |w| !w.running(POD).is_empty()).await;
        let pulls = w.fake.count("pull_image");
        cut(&mut w).await;
        w.start().await;
        assert_repaired(&w).await;
        w.pass(120).await;
        assert_eq!(w.fake.count("pull_image"), pulls);
        assert_eq!(w.fake.count("remove_image"), 0);
    });
}
