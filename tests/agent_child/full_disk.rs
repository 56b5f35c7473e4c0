//! A disk that is full, with something on it that takes every byte that becomes free.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::statvfs::statvfs;

use super::*;

/// A file system of its own for the state directory.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(at: PathBuf, size: &str) -> Self {
        fs::create_dir_all(&at).unwrap();
        let options = format!("size={size},mode=0700");
        mount(
            Some("holdfast-test"),
            &at,
            Some("tmpfs"),
            MsFlags::empty(),
            Some(options.as_str()),
        )
        .unwrap();
        Self(at)
    }

    fn free(&self) -> u64 {
        let stat = statvfs(&self.0).unwrap();
        stat.blocks_available() * stat.fragment_size()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        if let Err(error) = umount2(&self.0, MntFlags::MNT_DETACH) {
            eprintln!("cannot unmount {}: {error}", self.0.display());
        }
    }
}

/// Takes all the space there is, and all that becomes free, until it is dropped.
struct Hog {
    path: PathBuf,
    enough: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Hog {
    fn on(dir: &Path) -> Self {
        let path = dir.join("hog");
        let mut file = fs::File::create(&path).unwrap();
        let enough = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&enough);
        let thread = std::thread::spawn(move || {
            let block = vec![0x5A; 4096];
            while !stop.load(Ordering::Relaxed) {
                if file.write(&block).is_err() {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        Self {
            path,
            enough,
            thread: Some(thread),
        }
    }
}

impl Drop for Hog {
    fn drop(&mut self) {
        self.enough.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
        fs::remove_file(&self.path).unwrap();
    }
}

#[test]
fn restart_keeps_what_a_full_disk_held_back_and_the_agent_recovers_without_one() {
    let node = Node::new(|_| Behaviour::RunForever);
    let disk = SmallDisk::mount(node.site.state_dir(), "40m");
    let ballast = disk.0.join("ballast");
    let running = |pod: &str| -> Vec<String> {
        let found = node.fake.running(&format!("{pod}-node1"), "main");
        found.into_iter().map(|c| c.id).collect()
    };
    node.manifest("stays", "Always");
    node.manifest("goes", "Always");
    let mut agent = node.site.start();
    node.site.wait_phase("stays", "Running");
    node.site.wait_phase("goes", "Running");
    let stays = running("stays");
    let epoch = epoch_of(&node.site);
    // The space of a file that is open does not become free with its name: no race for it between agent and hog.
    let held = fs::File::open(&ballast).unwrap();

    let hog = Hog::on(&disk.0);
    eventually("the disk is full", || {
        (disk.free() == 0)
            .then_some(())
            .ok_or_else(|| format!("{} bytes are free", disk.free()))
    });
    // Its record needs room that is not there.
    let big = "x".repeat(240 * 1024);
    let text = Node::manifest_text("new", "Always").replace(
        r#""metadata":{"#,
        &format!(r#""metadata":{{"annotations":{{"big":"{big}"}},"#),
    );
    node.site.write_manifest("new.json", &text);
    let full = || {
        let (status, answer) = agent.get("/readyz").unwrap();
        let told = answer.contains("[-]store failed") && answer.contains("no space left");
        (status == 500 && told).then_some(()).ok_or(answer)
    };
    eventually("it says that the disk is full", full);
    eventually("the ballast is used up", || {
        (!ballast.exists() && disk.free() == 0)
            .then_some(())
            .ok_or_else(|| format!("{} bytes are free", disk.free()))
    });
    eventually("there is an event about it", || {
        let log = agent.log();
        log.contains("reason=StoreFull").then_some(()).ok_or(log)
    });

    // Stops go ahead of their records; starts and removals do not.
    node.fake.clear_calls();
    node.site.remove_manifest("goes.json");
    eventually("the removed pod is stopped", || {
        let left = running("goes");
        left.is_empty().then_some(()).ok_or(left.join(" "))
    });
    wait_relists(&agent, 5.0);
    full().unwrap();
    assert_eq!(running("new"), Vec::<String>::new());
    assert_eq!(running("stays"), stays);
    let made = ["run_", "create_", "start_", "remove_"];
    let mut calls = node.effects();
    calls.retain(|c| made.iter().any(|p| c.operation.starts_with(p)));
    assert_eq!(calls, [], "{}", agent.log());
    assert!(agent.metric("holdfast_store_held_transactions") > 0.0);

    drop((hog, held));
    agent.wait_ready();
    eventually("the new pod runs", || {
        let ids = running("new");
        (ids.len() == 1).then_some(()).ok_or(ids.join(" "))
    });
    let new = running("new");
    node.site.wait_phase("new", "Running");
    eventually("nothing is left of the removed pod", || {
        let left = node.fake.sandboxes().len();
        let known = names(&node.site, "pods")?;
        (left == 2 && known == ["new-node1", "stays-node1"])
            .then_some(())
            .ok_or_else(|| format!("{left} sandboxes, {known:?}"))
    });
    eventually("space is set aside again", || {
        (ballast.exists()).then_some(()).ok_or("no ballast".into())
    });
    agent.kill9();

    node.fake.clear_calls();
    let agent = node.site.start();
    node.site.wait_phase("new", "Running");
    node.assert_quiet(&agent);
    assert_eq!(node.starts(), Vec::<String>::new());
    assert_eq!((running("stays"), running("new")), (stays, new));
    assert_eq!(
        names(&node.site, "pods").unwrap(),
        ["new-node1", "stays-node1"]
    );
    assert_eq!(epoch_of(&node.site), epoch, "nothing was lost");
    let journal = node.site.journal("goes");
    let told: Vec<&str> = journal.iter().map(|(what, _)| what.as_str()).collect();
    for held in ["worker terminating", "container ended", "worker terminated"] {
        assert!(told.contains(&held), "no {held} among {told:?}");
    }
    let events = store_events(&node.site, 0);
    assert!(
        events.iter().any(|(event, _)| event == "StoreRecovered"),
        "{events:?}"
    );
    agent.kill9();
}

/// Names of the pods in a table.
fn names(site: &Site, table: &str) -> Result<Vec<String>, String> {
    let dump = site.try_dump(&[table])?;
    let rows = dump["tables"][table].as_array().ok_or("no table")?;
    let names = rows.iter().filter_map(|row| row["name"].as_str());
    let mut names: Vec<String> = names.map(str::to_owned).collect();
    names.sort();
    Ok(names)
}
