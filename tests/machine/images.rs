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

/// Age at which an image that nothing needs is removed, in seconds; so many more are too late on an emulated machine. It is 10 s on
/// others.
const MAXIMUM_AGE: f64 = 180.0;
const LATE: f64 = 80.0;
/// Writes the machine's uptime and the images into /run/seen, every two seconds.
const WATCH: &str = "cat >/run/watch.sh <<'END_OF_FILE'
while :; do
    echo $(cut -d' ' -f1 /proc/uptime) $(ctr -n k8s.io images ls -q)
    sleep 2
done >/run/seen
END_OF_FILE
setsid sh /run/watch.sh </dev/null >/dev/null 2>&1 &";

#[test]
fn r26_an_image_without_a_use_is_removed_at_its_age_whatever_restarts() {
    let mut node = Node::installed();
    node.sh("echo 'imageMaximumGCAge: 3m' >>/etc/holdfast/config.yaml");
    let import = "ctr -n k8s.io images import";
    for image in ["old", "young"] {
        super::registry::archive(&mut node, image);
    }
    node.sh(&format!("{import} /root/old.tar >/dev/null\n{WATCH}"));
    node.start();
    let first = node.uptime();
    node.manifest(&pod("stays", "Always", SLEEP));
    node.wait_running("stays");
    // The ages are longer than any run of the agent. The second image comes in the middle, and its due time is after all others.
    let mut second = None;
    for n in 0..20 {
        std::thread::sleep(Duration::from_secs(4));
        if second.is_none() && node.uptime() > first + MAXIMUM_AGE / 2.0 {
            node.sh(&format!("{import} /root/young.tar >/dev/null"));
            second = Some(node.uptime());
        }
        let how = if n % 2 == 0 { "KILL" } else { "TERM" };
        node.sh(&format!(
            "systemctl kill -s {how} --kill-whom=main holdfast; sleep 1; systemctl start holdfast"
        ));
    }
    let second = second.unwrap_or_else(|| {
        node.sh(&format!(
            "{import} /root/young.tar >/dev/null\nsystemctl restart holdfast"
        ));
        node.uptime()
    });
    for (image, since) in [("old", first), ("young", second)] {
        let name = format!("holdfast.local/{image}:1");
        let limit = Duration::from_secs_f64(MAXIMUM_AGE + LATE) + PATIENCE;
        let gone = format!(
            "! tail -n 1 /run/seen | grep -q {name} && tail -n 1 /run/seen | grep -q {IMAGE}"
        );
        node.machine
            .wait_until(&format!("{name} is gone"), limit, &gone)
            .unwrap();
        let seen = node.sh(&format!(
            "grep {name} /run/seen | tail -n 1 | cut -d' ' -f1"
        ));
        let age = seen.parse::<f64>().unwrap() - since;
        println!("{name} was there for {age:.0} s after it was first there");
        // Seen every two seconds, and some seconds later than the agent.
        assert!(
            age >= MAXIMUM_AGE - 20.0,
            "{name} was removed early: {age} s"
        );
        assert!(
            age <= MAXIMUM_AGE + LATE,
            "{name} was removed late: {age} s"
        );
    }
    node.wait_running("stays");
    assert_eq!(node.container("stays")["restartCount"], 0);
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
