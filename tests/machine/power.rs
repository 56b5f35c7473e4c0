//! The power goes: at every write of the disk, in every way in which a disk may lose what was not flushed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use ext4_view::Ext4;
use holdfast::store::backend::SledOptions;
use holdfast::store::open::{OpenOptions, Outcome, open};
use holdfast::store::recover::Identity;
use holdfast::types::{BootId, BootIdentity, Stamp};
use holdfast_testkit::exploration::is_whole;
use holdfast_testkit::machine::write_log::{Loss, Platter, Reads, Replay, WriteLog};
use holdfast_testkit::machine::{Base, Machine, Spec};
use sha2::{Digest as _, Sha256};

use super::node::{CrashDir, Node, PATIENCE, pod, rows};

const STATE: &str = "/var/lib/holdfast";
const DATA: &str = "/data";
/// Disks that a machine boots from, and in a short run.
const BOOTED: (usize, usize) = (40, 3);

/// What a disk says: the lines that containers wrote, and what the store knows of their starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Disk {
    /// Lines by pod: as many starts.
    lines: BTreeMap<String, usize>,
    /// By pod, how often its container was started, by the newest start on record.
    started: BTreeMap<String, usize>,
    /// How the store opened; `None` when there was none.
    outcome: Option<Outcome>,
}

/// A pod that notes each of its starts in a file that is on the disk before the container goes on.
fn noting(name: &str, policy: &str, end: &str) -> serde_json::Value {
    let script = format!("echo started >>/data/{name} && fsync /data/{name}\n{end}");
    let mut pod = pod(name, policy, &script);
    pod["spec"]["volumes"] = serde_json::json!([
        {"name": "data", "hostPath": {"path": DATA, "type": "DirectoryOrCreate"}},
        {"name": "scratch", "emptyDir": {}},
    ]);
    pod["spec"]["containers"][0]["volumeMounts"] = serde_json::json!([
        {"name": "data", "mountPath": "/data"},
        {"name": "scratch", "mountPath": "/scratch"},
    ]);
    pod
}

/// Runs pods of every restart policy, and ends in the middle of it. Leaves the disk as it was at the beginning, and the log.
fn record(dir: &Path) {
    let log = dir.join("log");
    fs::File::create(&log).unwrap();
    let mut node = Node::with(|spec| {
        spec.disk.flatten(&dir.join("disk")).unwrap();
        spec.record = Some(log);
    });
    node.start();
    node.manifest(&noting("always", "Always", "sleep 2; exit 0"));
    node.manifest(&noting("onfailure", "OnFailure", "sleep 1; exit 1"));
    for round in 0..6 {
        let end = if round % 2 == 0 {
            "exit 0"
        } else {
            "sleep 4; exit 3"
        };
        node.manifest(&noting(&format!("never{round}"), "Never", end));
        let file = format!("never{round}");
        node.eventually("it has started", &format!("test -s {DATA}/{file}"));
    }
    node.eventually(
        "the others have started again",
        &format!("test $(wc -l <{DATA}/always) -ge 3"),
    );
    // In the middle of it.
    node.machine.stop().unwrap();
}

fn read_tree(fs: &Ext4, from: &str, to: &Path, hash: &mut Sha256) -> Result<(), String> {
    fs::create_dir_all(to).unwrap();
    for entry in fs.read_dir(from).map_err(|e| format!("{from}: {e}"))? {
        let entry = entry.map_err(|e| format!("{from}: {e}"))?;
        let name = entry.file_name().as_str().unwrap().to_owned();
        if name == "." || name == ".." {
            continue;
        }
        let path = format!("{from}/{name}");
        let kind = entry.file_type().map_err(|e| format!("{path}: {e}"))?;
        if kind.is_dir() {
            read_tree(fs, &path, &to.join(&name), hash)?;
        } else if kind.is_regular_file() {
            let bytes = fs.read(path.as_str()).map_err(|e| format!("{path}: {e}"))?;
            hash.update(path.as_bytes());
            hash.update(&bytes);
            fs::write(to.join(&name), bytes).unwrap();
        }
    }
    Ok(())
}

/// Opens stores, each content once.
#[derive(Default)]
struct Stores(BTreeMap<Vec<u8>, (BTreeMap<String, usize>, Outcome)>);

impl Stores {
    fn examine(&mut self, platter: &Platter) -> Result<(Disk, Reads), String> {
        let (fs, reads) = platter.ext4_watched().map_err(|e| e.to_string())?;
        let mut disk = Disk::default();
        if fs.exists(DATA).map_err(|e| e.to_string())? {
            for entry in fs.read_dir(DATA).map_err(|e| e.to_string())? {
                let entry = entry.map_err(|e| e.to_string())?;
                let name = entry.file_name().as_str().unwrap().to_owned();
                if name.starts_with('.') {
                    continue;
                }
                let text = fs.read(format!("{DATA}/{name}").as_str());
                let text = text.map_err(|e| e.to_string())?;
                // A line that is cut off is none.
                let lines = String::from_utf8_lossy(&text)
                    .lines()
                    .filter(|line| *line == "started")
                    .count();
                disk.lines.insert(name, lines);
            }
        }
        if fs.exists(STATE).map_err(|e| e.to_string())? {
            // In memory, so that it costs no disk.
            let dir = tempfile::tempdir_in("/dev/shm").unwrap();
            let mut hash = Sha256::new();
            read_tree(&fs, STATE, dir.path(), &mut hash)?;
            let (started, outcome) = self
                .0
                .entry(hash.finalize().to_vec())
                .or_insert_with(|| open_store(dir.path()))
                .clone();
            disk.started = started;
            disk.outcome = Some(outcome);
        }
        Ok((disk, reads))
    }
}

fn open_store(dir: &Path) -> (BTreeMap<String, usize>, Outcome) {
    let opened = open(&OpenOptions {
        dir: dir.to_owned(),
        identity: Identity {
            node_name: "vmnode".to_owned(),
            machine_id: "c0ffee00c0ffee00c0ffee00c0ffee00".to_owned(),
            boot: BootIdentity {
                kernel_boot_id: "after".to_owned(),
                pid1_start: 1,
                runtime_state: "1:2".to_owned(),
            },
        },
        node_was_used: false,
        sled: SledOptions::default(),
        now: Stamp {
            boot: BootId(7),
            boottime_ms: 1_000,
            wall_ms: 1_900_000_000_000,
        },
    })
    .unwrap();
    let state = &opened.loaded.state;
    let mut started = BTreeMap::new();
    for (key, container) in &state.containers {
        let uid = key.split('/').next().unwrap();
        let Some(pod) = state.pods.get(uid) else {
            continue;
        };
        let name = pod.record.pod.metadata.name.clone().unwrap();
        let name = name.trim_end_matches("-vmnode").to_owned();
        let starts = container
            .record
            .intent
            .as_ref()
            .map_or(0, |intent| intent.attempt as usize + 1);
        started.insert(name, starts);
    }
    (started, opened.report.outcome)
}

/// What must hold on a disk after a cut.
fn check(disk: &Disk) -> Result<(), String> {
    match &disk.outcome {
        None | Some(Outcome::Opened | Outcome::Created | Outcome::SnapshotsRemoved) => {}
        Some(other) => return Err(format!("the store opened as {other:?}")),
    }
    for (pod, lines) in &disk.lines {
        let started = disk.started.get(pod).copied().unwrap_or_default();
        if started < *lines {
            return Err(format!(
                "{pod} has run {lines} times, and the store knows of {started} starts"
            ));
        }
    }
    Ok(())
}

// Invariant POD-3.
#[test]
fn no_cut_of_the_power_loses_a_decision_or_runs_a_pod_of_policy_never_twice() {
    let dir = CrashDir::new("power-cut");
    record(dir.path());
    let disk = dir.path().join("disk");
    let mut replay = Replay::new(&disk, WriteLog::open(&dir.path().join("log")).unwrap()).unwrap();
    let (entries, flushes) = (replay.log().len(), replay.log().flushes());
    assert!(entries >= 300, "only {entries} writes");

    // Every cut, in all three ways. A write that touches nothing of what was read changes nothing of what was found.
    let mut stores = Stores::default();
    let mut failures = Vec::new();
    let mut examined = 0;
    let mut kept: [Option<(Disk, BTreeSet<u64>)>; 2] = [None, None];
    let mut unflushed_since = BTreeSet::new();
    let mut interesting: Vec<(usize, Loss)> = Vec::new();
    let is_flush: BTreeSet<usize> = flushes.iter().copied().collect();
    for cut in 0..=entries {
        replay.advance(cut).unwrap();
        let written: BTreeSet<u64> = cut
            .checked_sub(1)
            .map(|index| replay.blocks_of(index).collect())
            .unwrap_or_default();
        unflushed_since.extend(&written);
        let has_flushed = cut
            .checked_sub(1)
            .is_some_and(|index| is_flush.contains(&index));
        let changed = [
            written,
            if has_flushed {
                std::mem::take(&mut unflushed_since)
            } else {
                BTreeSet::new()
            },
        ];
        let before = kept[0].as_ref().map(|(disk, _)| disk.lines.clone());
        for (which, loss) in [Loss::Nothing, Loss::Unflushed].into_iter().enumerate() {
            if kept[which]
                .as_ref()
                .is_some_and(|(_, reads)| reads.is_disjoint(&changed[which]))
            {
                continue;
            }
            examined += 1;
            match stores.examine(&replay.platter(loss).unwrap()) {
                Ok((found, reads)) => {
                    if let Err(why) = check(&found) {
                        failures.push(format!("cut {cut}, {loss:?}: {why}"));
                    }
                    kept[which] = Some((found, reads.take()));
                }
                Err(why) => failures.push(format!("cut {cut}, {loss:?}: {why}")),
            }
        }
        if let Some((_, reads)) = &kept[1]
            && !reads.is_disjoint(&replay.open_blocks())
        {
            let loss = Loss::Some(cut as u64);
            examined += 1;
            match stores.examine(&replay.platter(loss).unwrap()) {
                Ok((found, _)) => {
                    if let Err(why) = check(&found) {
                        failures.push(format!("cut {cut}, {loss:?}: {why}"));
                    }
                }
                Err(why) => failures.push(format!("cut {cut}, {loss:?}: {why}")),
            }
        }
        // A container has just run: the runtime may not know yet.
        let now = kept[0].as_ref().map(|(disk, _)| disk.lines.clone());
        if now != before && now.is_some_and(|lines| !lines.is_empty()) {
            interesting.push((cut, Loss::Nothing));
            interesting.push((cut + 1, Loss::Some(cut as u64)));
            interesting.push((cut + 4, Loss::Unflushed));
        }
    }
    println!(
        "{entries} entries, {} flushes, {examined} disks examined, {} different stores",
        flushes.len(),
        stores.0.len()
    );
    assert!(
        failures.is_empty(),
        "{} of {examined}:\n{}",
        failures.len(),
        failures[..failures.len().min(20)].join("\n")
    );
    boot_some(dir.path(), &disk, entries, &interesting);
}

/// Boots disks, and waits until everything on them has come to its end.
fn boot_some(dir: &Path, disk: &Path, entries: usize, interesting: &[(usize, Loss)]) {
    let booted = if is_whole() { BOOTED.0 } else { BOOTED.1 };
    assert!(interesting.len() >= booted, "{interesting:?}");
    let base = Base::provide().unwrap();
    let mut replay = Replay::new(disk, WriteLog::open(&dir.join("log")).unwrap()).unwrap();
    let mut chosen: Vec<(usize, Loss)> = (0..booted)
        .map(|n| interesting[n * interesting.len() / booted])
        .collect();
    chosen.sort_by_key(|(cut, _)| *cut);
    for (cut, loss) in chosen {
        let cut = cut.min(entries);
        replay.advance(cut).unwrap();
        let platter = replay.platter(loss).unwrap();
        let found = Stores::default().examine(&platter).unwrap().0;
        let image = dir.join("booted");
        let machine = Machine::boot(&base, &Spec::new(platter.write_to(disk, &image).unwrap()));
        let mut machine = machine.unwrap();
        let told = after_boot(&mut machine, &found);
        if let Err(why) = told {
            let log = machine.sh("journalctl -u holdfast -b --no-pager -o cat -n 80");
            panic!(
                "cut {cut}, {loss:?}, {found:?}: {why}\n{}",
                log.unwrap_or_default()
            );
        }
        machine.pull_the_plug().unwrap();
    }
}

fn after_boot(machine: &mut Machine, found: &Disk) -> Result<(), String> {
    let of = |error: std::io::Error| error.to_string();
    machine.wait_until_up().map_err(of)?;
    machine
        .wait_until(
            "the agent is ready",
            PATIENCE,
            "systemctl is-active --quiet holdfast",
        )
        .map_err(of)?;
    // A pod of policy Never ends; the others go on.
    let deadline = Instant::now() + PATIENCE;
    for pod in found.lines.keys().filter(|pod| pod.starts_with("never")) {
        let full = format!("{pod}-vmnode");
        loop {
            let all = rows(machine, "overview").map_err(of)?;
            let phase = all
                .iter()
                .find(|row| row["name"] == full.as_str())
                .and_then(|row| row["phase"].as_str())
                .unwrap_or("none");
            if matches!(phase, "Succeeded" | "Failed") {
                break;
            }
            if Instant::now() > deadline {
                return Err(format!("{pod} has not ended, it is {phase}"));
            }
            std::thread::sleep(Duration::from_millis(500));
        }
        // None where the cut came in the middle of the write: ext4 then shows zeros, which the look at the platter does not tell
        // from what was written.
        let lines = machine.sh(&format!("wc -l <{DATA}/{pod}")).map_err(of)?;
        if !matches!(lines.as_str(), "0" | "1") {
            return Err(format!("{pod}, of policy Never, has run {lines} times"));
        }
    }
    for row in rows(machine, "containers").map_err(of)? {
        let name = row["name"]
            .as_str()
            .unwrap_or_default()
            .trim_end_matches("-vmnode");
        let restarts = row["restartCount"].as_u64().unwrap_or_default() as usize;
        let before = found.started.get(name).copied().unwrap_or_default();
        if restarts + 1 < before {
            return Err(format!(
                "{name} had started {before} times, now its restart count is {restarts}"
            ));
        }
    }
    Ok(())
}
