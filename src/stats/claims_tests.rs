use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::core::volumes::Remote;
use crate::types::{BootId, Stamp};

struct TestClock;

impl Clock for TestClock {
    fn now(&self) -> Stamp {
        Stamp {
            boot: BootId(1),
            boottime_ms: 1,
            wall_ms: 7,
        }
    }
}

type Answer = Result<Option<Usage>, RemoteError>;

/// Answers of drivers by volume; `None` for one that never answers.
struct Fake {
    volumes: Mutex<Vec<RemoteVolume>>,
    answers: Mutex<HashMap<String, Option<Answer>>>,
    asked: AtomicUsize,
}

impl RemoteVolumes for Fake {
    fn mounted(&self) -> Vec<RemoteVolume> {
        self.volumes.lock().unwrap().clone()
    }

    fn usage(&self, volume: &RemoteVolume) -> BoxFuture<'static, Answer> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let answer = self.answers.lock().unwrap().get(&volume.volume).cloned();
        Box::pin(async move {
            match answer {
                Some(Some(answer)) => answer,
                Some(None) => std::future::pending().await,
                None => Ok(None),
            }
        })
    }
}

fn mounted(pod: &str, volume: &str, claim: Option<&str>, path: &Path) -> RemoteVolume {
    RemoteVolume {
        pod: PodUid::new(pod),
        volume: volume.to_owned(),
        plugin: "kubernetes.io/local-volume",
        claim: claim.map(str::to_owned),
        path: path.to_owned(),
        staged: None,
        phase: VolumePhase::Mounted,
        remote: Arc::new(Remote {
            name: format!("pv-{volume}"),
            claim: claim.map(str::to_owned),
            mode: VolumeMode::Filesystem,
            read_only: false,
            mount_options: Vec::new(),
            unique_name: None,
            terms: crate::core::volumes::Terms::default(),
            source: Source::HostPath {
                path: String::new(),
                type_: String::new(),
            },
        }),
    }
}

fn figures(
    volumes: Vec<RemoteVolume>,
    answers: &[(&str, Option<Answer>)],
) -> (Arc<Fake>, RemoteFigures) {
    let answers = answers
        .iter()
        .map(|(name, a)| ((*name).to_owned(), a.clone()));
    let fake = Arc::new(Fake {
        volumes: Mutex::new(volumes),
        answers: Mutex::new(answers.collect()),
        asked: AtomicUsize::new(0),
    });
    let figures = RemoteFigures::new(Arc::clone(&fake) as _, Arc::new(TestClock));
    (fake, figures)
}

fn usage(used: u64) -> Usage {
    Usage {
        capacity: Some(1000),
        used: Some(used),
        available: Some(1000 - used),
        ..Usage::default()
    }
}

#[tokio::test(start_paused = true)]
async fn a_driver_that_hangs_holds_up_nobody_and_is_not_asked_again() {
    let dir = tempfile::tempdir().unwrap();
    let volumes = vec![
        mounted("u1", "good", Some("ns/data"), dir.path()),
        mounted("u1", "hung", Some("ns/dead"), dir.path()),
    ];
    let told = [("good", Some(Ok(Some(usage(10))))), ("hung", None)];
    let (fake, figures) = figures(volumes, &told);
    let begun = Instant::now();
    let found = figures.get().await;
    assert!((PATIENCE..PATIENCE * 2).contains(&begun.elapsed()));
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].volume.fs.used, Some(10));
    assert_eq!(
        found[0].volume.claim,
        Some(("ns".to_owned(), "data".to_owned()))
    );
    // Who asks next waits for nothing, and asks nobody.
    let again = Instant::now();
    assert_eq!(figures.get().await, found);
    assert_eq!(
        (again.elapsed(), fake.asked.load(Ordering::SeqCst)),
        (Duration::ZERO, 2)
    );
    // A minute later the one is asked again, and so is the other, whose call was given up.
    tokio::time::sleep(MAX_AGE).await;
    fake.answers
        .lock()
        .unwrap()
        .insert("good".to_owned(), Some(Ok(Some(usage(20)))));
    assert_eq!(figures.get().await[0].volume.fs.used, Some(20));
    assert_eq!(fake.asked.load(Ordering::SeqCst), 4);
    // What a driver refuses to tell leaves the last figures.
    tokio::time::sleep(MAX_AGE).await;
    fake.answers.lock().unwrap().insert(
        "good".to_owned(),
        Some(Err(RemoteError::Failed("no".to_owned()))),
    );
    assert_eq!(figures.get().await[0].volume.fs.used, Some(20));
    // What is unmounted is forgotten.
    fake.volumes.lock().unwrap().clear();
    assert!(figures.get().await.is_empty());
}

#[tokio::test]
async fn without_a_driver_the_file_system_tells() {
    let dir = tempfile::tempdir().unwrap();
    let device = dir.path().join("device");
    std::fs::write(&device, vec![0; 4096]).unwrap();
    let mut block = mounted("u1", "raw", Some("ns/raw"), &device);
    Arc::get_mut(&mut block.remote).unwrap().mode = VolumeMode::Block;
    let volumes = vec![mounted("u1", "files", Some("ns/files"), dir.path()), block];
    let (_, figures) = figures(volumes, &[]);
    let found = figures.get().await;
    let stat = nix::sys::statvfs::statvfs(dir.path()).unwrap();
    let files = &found[0].volume.fs;
    assert_eq!(files.capacity, Some(stat.blocks() * stat.fragment_size()));
    assert_eq!(files.inodes, Some(stat.files()));
    assert_eq!((files.at_ms, found[0].volume.abnormal), (7, None));
    let raw = &found[1].volume.fs;
    assert_eq!((raw.capacity, raw.used), (Some(4096), None));
}

#[tokio::test]
async fn a_claim_of_two_pods_is_shown_once_and_what_has_none_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let volumes = vec![
        mounted("u1", "a", Some("ns/shared"), dir.path()),
        mounted("u2", "b", Some("ns/shared"), dir.path()),
        mounted("u1", "inline", None, dir.path()),
    ];
    let sick = Usage {
        abnormal: true,
        ..usage(10)
    };
    let told: Vec<_> = ["a", "b", "inline"]
        .into_iter()
        .map(|name| (name, Some(Ok(Some(sick)))))
        .collect();
    let (_, figures) = figures(volumes, &told);
    let found = figures.get().await;
    assert_eq!(found.len(), 3);
    let mut text = Exposition::default();
    encode(&mut text, &found);
    let text = text.finish();
    let labels = "{namespace=\"ns\",persistentvolumeclaim=\"shared\"}";
    for line in [
        format!("kubelet_volume_stats_capacity_bytes{labels} 1000"),
        format!("kubelet_volume_stats_used_bytes{labels} 10"),
        format!("kubelet_volume_stats_available_bytes{labels} 990"),
        format!("kubelet_volume_stats_health_status_abnormal{labels} 1"),
    ] {
        assert_eq!(text.matches(&line).count(), 1, "{line} in {text}");
    }
    assert!(!text.contains("stats_inodes"), "nobody tells: {text}");
}
