//! A wall clock that is wrong by hours after a reboot, as on a board without a battery.

use std::sync::{Arc, Mutex};

use nix::time::{ClockId, clock_gettime};

use super::*;

const HOURS: i64 = 7 * 3600;
const ABSENT: &str = "holdfast.local/absent:1";
const GRACE: Duration = Duration::from_secs(50);
/// A heartbeat is on the disk 100 ms after it was made.
const WRITTEN: Duration = Duration::from_millis(500);
/// An agent on a busy machine does what is due this much later at the latest.
const LATE: Duration = Duration::from_secs(25);

#[test]
fn restart_keeps_what_is_left_when_the_wall_clock_is_hours_ahead_after_a_reboot() {
    what_is_left_is_kept(HOURS);
}

#[test]
fn restart_keeps_what_is_left_when_the_wall_clock_is_hours_behind_after_a_reboot() {
    what_is_left_is_kept(-HOURS);
}

/// A crash back-off, an image pull back-off and a grace period go on with what they had left at the last
/// heartbeat of the earlier boot. What ran still runs, as on a virtual machine that was resumed elsewhere: the
/// grace period has something to wait for, and the pod that just runs has something to lose.
fn what_is_left_is_kept(offset: i64) {
    let crashes = Arc::new(Mutex::new(Vec::new()));
    let node = Node::new(|_| Behaviour::RunForever);
    let starts = Arc::clone(&crashes);
    node.fake.on_start(
        move |config| match config.labels["io.kubernetes.pod.name"].as_str() {
            "crash-node1" => {
                starts.lock().unwrap().push(Instant::now());
                Behaviour::Exit {
                    code: 3,
                    after: Duration::ZERO,
                }
            }
            "slow-node1" => Behaviour::IgnoreTerm,
            _ => Behaviour::RunForever,
        },
    );
    node.fake.pull(
        ABSENT,
        Pull::Fails(Code::NotFound, "no such image".to_owned()),
    );
    let pulls = || node.fake.count("pull_image");
    let running = |pod: &str| node.fake.running(&format!("{pod}-node1"), "main");
    node.manifest("stays", "Always");
    node.manifest("crash", "Always");
    let absent = Node::manifest_text("pull", "Always").replace(IMAGE, ABSENT);
    node.site.write_manifest("pull.json", &absent);
    let slow = Node::manifest_text("slow", "Always").replace(
        r#""spec":{"#,
        r#""spec":{"terminationGracePeriodSeconds":50,"#,
    );
    node.site.write_manifest("slow.json", &slow);

    let agent = node.site.start();
    node.site.wait_phase("stays", "Running");
    node.site.wait_phase("slow", "Running");
    let stays = running("stays")[0].id.clone();
    node.site.remove_manifest("slow.json");
    // Each of them has begun before the last sign of life.
    eventually("back-offs, a stop and a heartbeat after them", || {
        let left = Left::of(&node.site)?;
        let long = Duration::from_secs(5)..Duration::from_secs(20);
        let told = long.contains(&left.crash) && long.contains(&left.pull) && left.grace < GRACE;
        (told && left.heartbeat_age > WRITTEN)
            .then_some(())
            .ok_or_else(|| format!("{left:?}"))
    });
    agent.kill9();
    let left = Left::of(&node.site).unwrap();
    assert!(left.crash < Duration::from_secs(20), "{left:?}");
    let (crashed, pulled) = (crashes.lock().unwrap().len(), pulls());
    assert_eq!(running("slow").len(), 1, "it is still being stopped");

    let back = Instant::now();
    let mut agent = node.site.spawn_with(
        &["--boot-id", "another boot"],
        &[("HOLDFAST_WALL_OFFSET", &offset.to_string())],
    );
    agent.wait_ready();
    let meta = node.site.dump(&["meta"])["tables"]["meta"][0].clone();
    assert_eq!(meta["boot"]["kernelBootId"], "another boot");
    let wall: jiff::Timestamp = meta["heartbeat"]["time"].as_str().unwrap().parse().unwrap();
    let wrong_by = wall.as_second() - jiff::Timestamp::now().as_second();
    assert!(
        (wrong_by - offset).abs() < 60,
        "the clock is {wrong_by} s off"
    );

    let (mut start, mut pull, mut stop) = (None, None, None);
    eventually("each of them goes on", || {
        start = start.or_else(|| crashes.lock().unwrap().get(crashed).copied());
        pull = pull.or_else(|| (pulls() > pulled).then(Instant::now));
        stop = stop.or_else(|| running("slow").is_empty().then(Instant::now));
        (start.is_some() && pull.is_some() && stop.is_some())
            .then_some(())
            .ok_or_else(|| format!("start {start:?}, pull {pull:?}, stop {stop:?}"))
    });
    for (what, at, left) in [
        ("crash back-off", start, left.crash),
        ("pull back-off", pull, left.pull),
        // The runtime is told whole seconds.
        ("grace period", stop, left.grace - Duration::from_secs(1)),
    ] {
        let took = at.unwrap() - back;
        assert!(
            (left..left + LATE).contains(&took),
            "{what}: {took:?} instead of {left:?}"
        );
    }
    let found: Vec<_> = running("stays").into_iter().map(|c| c.id).collect();
    assert_eq!(found, [stays], "{}", agent.log());
    let count = node.site.container_status("crash", "main").unwrap();
    assert!(count["restartCount"].as_u64() >= Some(2), "{count}");
}

/// What was left at the last heartbeat, by the records.
#[derive(Debug)]
struct Left {
    crash: Duration,
    pull: Duration,
    grace: Duration,
    heartbeat_age: Duration,
}

impl Left {
    fn of(site: &Site) -> Result<Self, String> {
        let dump = site.try_dump(&["meta", "containers", "images", "workers"])?;
        let tables = &dump["tables"];
        let heartbeat = &tables["meta"][0]["heartbeat"];
        let row = |table: &str, field: &str, value: &str| {
            let rows = tables[table].as_array().into_iter().flatten();
            rows.clone()
                .find(|row| row[field] == value)
                .cloned()
                .ok_or_else(|| format!("no {value} in {table}"))
        };
        let left = |until: &Value| {
            if until["boot"] != heartbeat["boot"] {
                return Err(format!("{until} is not of the boot of {heartbeat}"));
            }
            let ms = |stamp: &Value| stamp["bootTimeMs"].as_i64().ok_or("no boot time");
            let left = ms(until)? - ms(heartbeat)?;
            let left = u64::try_from(left).map_err(|_| format!("over since {left} ms"))?;
            Ok(Duration::from_millis(left))
        };
        let now = clock_gettime(ClockId::CLOCK_BOOTTIME).unwrap();
        let now = i64::try_from(Duration::from(now).as_millis()).unwrap();
        let age = now - heartbeat["bootTimeMs"].as_i64().ok_or("no heartbeat")?;
        let image = row("images", "image", ABSENT)?;
        Ok(Self {
            crash: left(&row("containers", "name", "crash-node1")?["backoff"]["until"])?,
            pull: left(&image["backoffs"][0]["backoff"]["until"])?,
            grace: left(&row("workers", "name", "slow-node1")?["deadline"])?,
            heartbeat_age: Duration::from_millis(u64::try_from(age).unwrap()),
        })
    }
}
