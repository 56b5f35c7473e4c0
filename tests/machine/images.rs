//! The power goes right after images came: they are whole, or repaired from where they came.

use std::time::{Duration, Instant};

use holdfast_testkit::exploration::is_whole;
use holdfast_testkit::machine::write_log::{Loss, Replay, WriteLog};
use holdfast_testkit::machine::{Base, Machine, Spec};

use super::node::{CrashDir, IMAGE, Node, PATIENCE, PRELOAD, SLEEP, pod, rows};

/// Removes every image with its layers: the archive holds all that the machine needs.
const REMOVE_ALL: &str =
    "ctr -n k8s.io images ls -q | xargs -r ctr -n k8s.io images rm --sync >/dev/null";
/// How long a repair may take.
const REPAIRED: Duration = Duration::from_secs(60);
/// Cuts that are booted; a short run boots every third.
const BOOTED: usize = 6;

/// The row of the image in `holdfast dump images`.
fn image(machine: &mut Machine) -> Option<serde_json::Value> {
    let rows = rows(machine, "images").ok()?;
    rows.into_iter().find(|row| row["image"] == IMAGE)
}

/// Waits until the pod runs, of an image that is whole.
fn wait_repaired(machine: &mut Machine, name: &str) -> Result<Duration, String> {
    let begun = Instant::now();
    loop {
        let full = format!("{name}-vmnode");
        let all = rows(machine, "overview").unwrap_or_default();
        let row = all.iter().find(|row| row["name"] == full.as_str());
        let is_running = row.is_some_and(|row| row["status"] == "Running");
        let image = image(machine);
        if is_running && image.as_ref().is_some_and(|row| row["state"] == "whole") {
            return Ok(begun.elapsed());
        }
        if begun.elapsed() > PATIENCE {
            return Err(format!("{row:?}, {image:?}"));
        }
        std::thread::sleep(Duration::from_millis(300));
    }
}

#[test]
fn archives_are_imported_and_pinned_and_survive_a_reboot() {
    let mut node = Node::installed();
    node.sh(&format!(
        "{REMOVE_ALL}\n\
         mkdir -p -m 700 {PRELOAD} && cp /root/images.tar {PRELOAD}/images.tar"
    ));
    node.start();
    node.manifest(&pod("preloaded", "Always", SLEEP));
    node.wait_running("preloaded");
    node.eventually(
        "it is pinned",
        &format!("ctr -n k8s.io images ls name=={IMAGE} | grep -q io.cri-containerd.pinned=pinned"),
    );
    let row = image(&mut node.machine).unwrap();
    assert_eq!(row["state"], "whole", "{row}");
    assert_eq!(row["archive"], "images.tar", "{row}");
    let imported = "journalctl -u holdfast --no-pager -o cat | grep -c 'archive imported' || true";
    assert_eq!(node.sh(imported), "1");

    node.machine.send("sync; reboot -f").unwrap();
    node.machine.rebooted().unwrap();
    node.eventually("the agent is ready", "systemctl is-active --quiet holdfast");
    node.wait_running("preloaded");
    assert_eq!(node.sh(imported), "1", "an unchanged archive");
}

#[test]
fn an_archive_that_is_damaged_is_told_and_keeps_no_pod() {
    let mut node = Node::installed();
    node.sh(&format!(
        "mkdir -p -m 700 {PRELOAD} && head -c 100000 /root/images.tar >{PRELOAD}/cut.tar"
    ));
    node.start();
    node.manifest(&pod("other", "Always", SLEEP));
    node.wait_running("other");
    node.eventually(
        "it is told",
        "holdfast dump events | grep ImageImportFailed | grep -q cut.tar",
    );
}

#[test]
fn a_cut_right_after_an_import_leaves_no_pod_with_a_damaged_image() {
    let dir = CrashDir::new("images-cut");
    let log = dir.path().join("log");
    std::fs::File::create(&log).unwrap();
    let mut node = Node::with(|spec| {
        spec.disk.flatten(&dir.path().join("disk")).unwrap();
        spec.record = Some(log.clone());
    });
    // The archive is on the disk, the image is not.
    node.sh(&format!(
        "{REMOVE_ALL}\n\
         mkdir -p -m 700 {PRELOAD} && cp /root/images.tar {PRELOAD}/images.tar && sync"
    ));
    let since = WriteLog::open(&log).unwrap().len();
    node.start();
    node.manifest(&pod("cut", "Always", SLEEP));
    node.wait_running("cut");
    node.machine.stop().unwrap();
    drop(node);

    let base = Base::provide().unwrap();
    let disk = dir.path().join("disk");
    let mut replay = Replay::new(&disk, WriteLog::open(&log).unwrap()).unwrap();
    let entries = replay.log().len();
    assert!(entries > since, "nothing was written");
    for n in (0..BOOTED).step_by(if is_whole() { 1 } else { 3 }) {
        // From the import to the running pod, what was not flushed is lost in part or whole.
        let cut = since + (entries - since) * (n + 1) / BOOTED;
        let loss = if n % 2 == 0 {
            Loss::Unflushed
        } else {
            Loss::Some(n as u64)
        };
        replay.advance(cut).unwrap();
        let platter = replay.platter(loss).unwrap();
        let image = platter.write_to(&disk, &dir.path().join("booted")).unwrap();
        let mut machine = Machine::boot(&base, &Spec::new(image)).unwrap();
        machine.wait_until_up().unwrap();
        // Where the manifest did not get to the disk, it is written again.
        let text = pod("cut", "Always", SLEEP);
        machine
            .sh(&format!(
                "mkdir -p /etc/kubernetes/manifests\n\
                 cat >/etc/kubernetes/new <<'END_OF_FILE' && mv /etc/kubernetes/new /etc/kubernetes/manifests/cut.json\n{text}\nEND_OF_FILE\n\
                 systemctl start holdfast"
            ))
            .unwrap();
        match wait_repaired(&mut machine, "cut") {
            // By the clock of the host, on which the machine is slower than a real one.
            Ok(took) => assert!(took <= 2 * REPAIRED, "cut {cut}, {loss:?}: {took:?}"),
            Err(found) => {
                // Of images from the start on, of everything the end.
                let log = machine.sh(
                    "holdfast dump images; journalctl -u holdfast -b --no-pager -o cat | grep holdfast::images | head -n 40\n\
                     journalctl -u holdfast -b --no-pager -o cat -n 60",
                );
                panic!("cut {cut}, {loss:?}: {found}\n{}", log.unwrap_or_default());
            }
        }
        machine.pull_the_plug().unwrap();
    }
}
