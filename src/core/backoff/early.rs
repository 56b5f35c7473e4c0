//! Ends back-offs before their time when their likely cause is gone: the network or the API server is back, a device
//! appeared, a CSI driver registered, an image or the configuration changed, the clock was set.
//!
//! In: the back-off on record, the causes that were seen, what ended early before, the time. Out: the cause to act on, and
//! what has to be committed. [`Watch`] derives causes from what was observed of the node.
//!
//! **Invariants:** a cause ends the back-off of one container, image or volume at most once, across restarts of the
//! agent, since its ID is recorded with the back-off. A cause that can come and go by itself ends no second back-off of
//! a container before as much time has passed as the back-off is long, so one that flaps restarts nothing in a loop. Of
//! changes of the configuration, a few do within that time. The length of the back-off stays: the next one is the next
//! longer one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{image, length};
use crate::core::state::kinds::{self, Declared, Key, Kind};
use crate::core::state::{
    BackoffRecord, ContainerRecord, ImageRecord, State, Transaction, child_key,
};
use crate::types::{ContainerId, PodUid, Stamp};

/// A step of the wall clock that is smaller changes nothing for containers.
pub const CLOCK_STEP: Duration = Duration::from_secs(10);
/// Ends that are kept of one container or image.
const KEPT: usize = 16;
/// Changes of the configuration that end back-offs of a container within the length of one: a pod may write what it refers to.
const CHANGES: usize = 3;

/// Kind of event that may remove the cause of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Subject {
    /// The node has a route to other networks again.
    Network,
    /// The API server answers again.
    ApiServer,
    /// A device file of the pod appeared.
    Device,
    /// A CSI driver registered.
    Driver,
    /// The wall clock was set.
    WallClock,
    /// An image of the pod was pulled or repaired.
    Image,
    /// A configMap or secret of the pod, or the pod itself, changed.
    Configuration,
}

impl Subject {
    /// Returns how many such causes may end back-offs of a container within the length of one. What can happen again and
    /// again without anybody's intent ends one.
    fn most(self) -> usize {
        match self {
            Self::Network
            | Self::ApiServer
            | Self::Device
            | Self::Driver
            | Self::WallClock
            | Self::Image => 1,
            Self::Configuration => CHANGES,
        }
    }
}

/// An event that may have removed the cause of a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// Kind of the event; limits how many back-offs such events end.
    pub subject: Subject,
    /// Identifies the event: what changed, with its version or the time.
    pub id: String,
    /// Description of the event, as a clause.
    pub text: String,
    /// Time of the observation.
    pub at: Stamp,
}

impl Cause {
    /// A cause that its time identifies.
    pub fn at(subject: Subject, what: &str, text: String, now: Stamp) -> Self {
        Self {
            subject,
            id: format!("{what} at {}", now.wall_ms),
            text,
            at: now,
        }
    }

    /// Returns what has changed, without the time.
    fn what(&self) -> &str {
        (self.id.rsplit_once(" at ")).map_or(self.id.as_str(), |(what, _)| what)
    }

    /// Returns whether an older cause counts no more beside this one: the newest of a kind is kept, and of each CSI driver.
    pub fn replaces(&self, old: &Self) -> bool {
        self.subject == old.subject
            && (self.subject != Subject::Driver || self.what() == old.what())
    }

    /// Returns whether this may help a volume, which is one of a CSI `driver` or of none. The registration of another driver does
    /// not, and must not use up the end that its own driver's is to have.
    pub fn helps_volume_of(&self, driver: Option<&str>) -> bool {
        self.subject != Subject::Driver || driver == Some(self.what())
    }
}

/// A back-off that ended early.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct End {
    /// The container whose end the back-off counted from; `None` for an image or a volume.
    pub container_id: Option<String>,
    /// Kind of cause.
    pub subject: Subject,
    /// ID of the cause.
    pub cause: String,
    /// Description of the event.
    pub text: String,
    /// Time of its end.
    pub at: Stamp,
}

/// The newest back-offs of one container or image that ended early, oldest first. Stored as JSON beside the back-off.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Ends(Vec<End>);

impl Kind for Ends {
    const DECLARED: Declared = kinds::BACKOFF_ENDS;
}

impl Ends {
    /// Reads the ends of one container or image of a pod. An unreadable record counts as none: the back-off then runs its
    /// time.
    pub fn of(state: &State, pod: &PodUid, name: &str) -> Self {
        state.object(&key(pod, name)).unwrap_or_default()
    }

    /// Returns whether the back-off that counts from the end of this container ended early.
    pub fn is_of(&self, container: &ContainerId) -> bool {
        let id = container.as_str();
        (self.0.iter()).any(|end| end.container_id.as_deref() == Some(id))
    }

    fn with(mut self, container: Option<&ContainerId>, cause: &Cause, now: Stamp) -> Self {
        self.0.push(End {
            container_id: container.map(|id| id.as_str().to_owned()),
            subject: cause.subject,
            cause: cause.id.clone(),
            text: cause.text.clone(),
            at: now,
        });
        let excess = self.0.len().saturating_sub(KEPT);
        self.0.drain(..excess);
        self
    }
}

/// Reads what ended early of every container of a pod, by name.
pub fn all_of<'a>(state: &'a State, pod: &PodUid) -> BTreeMap<&'a str, Ends> {
    let records = state.stored_below::<Ends>(pod.as_str());
    records
        .map(|record| (record.place().1, record.content().unwrap_or_default()))
        .collect()
}

/// Decides whether a back-off ends early at `now`, and returns the newest cause to do so.
///
/// A cause counts if it came after the start or pull that failed, and was not used before.
pub fn decide<'c>(
    back_off: &BackoffRecord,
    causes: &'c [Cause],
    ends: &Ends,
    now: Stamp,
) -> Option<&'c Cause> {
    let wait = length(back_off);
    let is_new = |cause: &Cause| {
        let is_later = cause.at.boot == back_off.since.boot
            && cause.at.boottime_ms >= back_off.since.boottime_ms;
        is_later && ends.0.iter().all(|end| end.cause != cause.id)
    };
    let is_rare = |cause: &Cause| {
        let same = ends.0.iter().filter(|end| end.subject == cause.subject);
        let recent = same.filter(|end| end.at.boot == now.boot && now.since(end.at) < wait);
        recent.count() < cause.subject.most()
    };
    let mut usable = causes.iter().filter(|c| is_new(c) && is_rare(c));
    usable.next_back()
}

/// A back-off that ends now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The container; `None` for the pull of an image.
    pub container: Option<String>,
    /// The image whose pull may be tried again.
    pub image: Option<String>,
    /// Description of the event.
    pub text: String,
}

/// Decides about every back-off of a pod: those of the crashed containers `waiting`, and those of image pulls. The transaction
/// is empty when none ends.
pub fn end(
    seen: &State,
    pod: &PodUid,
    waiting: &[&str],
    causes: &[Cause],
    now: Stamp,
) -> (Transaction, Vec<Ended>) {
    let (mut transaction, mut ended) = (Transaction::new(), Vec::new());
    for name in waiting {
        let own = child_key(pod, name);
        let Some(record) = seen.record::<ContainerRecord>(&own) else {
            continue;
        };
        let (Some(back_off), Some(exit)) = (&record.backoff, &record.last_exit) else {
            continue;
        };
        let ends = Ends::of(seen, pod, name);
        let Some(cause) = decide(back_off, causes, &ends, now) else {
            continue;
        };
        let ends = ends.with(Some(&exit.container_id), cause, now);
        // With the container's record, for that one is durable.
        transaction = put_ends(seen, transaction, pod, name, &ends, now)
            .expect::<ContainerRecord>(seen, &own)
            .put(&own, record.clone())
            .journal(Some(pod), "back-off ended", line(name, cause));
        ended.push(Ended {
            container: Some((*name).to_owned()),
            image: None,
            text: cause.text.clone(),
        });
    }
    for (name, record) in seen.with_prefix::<ImageRecord>("") {
        let Some(back_off) = record.backoffs.get(pod) else {
            continue;
        };
        if image::waiting(Some(*back_off), now).is_none() {
            continue;
        }
        let ends = Ends::of(seen, pod, name);
        let Some(cause) = decide(back_off, causes, &ends, now) else {
            continue;
        };
        let mut next = record.clone();
        next.backoffs.insert(pod.clone(), over(back_off, now));
        transaction = put_ends(
            seen,
            transaction,
            pod,
            name,
            &ends.with(None, cause, now),
            now,
        )
        .expect::<ImageRecord>(seen, name)
        .put(name, next)
        .journal(Some(pod), "back-off ended", line(name, cause));
        ended.push(Ended {
            container: None,
            image: Some(name.to_string()),
            text: cause.text.clone(),
        });
    }
    (transaction, ended)
}

/// Decides about the back-off of the mount of a pod's volume. Returns the cause with what has to be committed; `None` when it
/// goes on.
pub fn end_mount<'c>(
    seen: &State,
    pod: &PodUid,
    volume: &str,
    back_off: &BackoffRecord,
    causes: &'c [Cause],
    now: Stamp,
) -> Option<(&'c Cause, Transaction)> {
    // No container or image has such a name.
    let name = format!("volume/{volume}");
    let ends = Ends::of(seen, pod, &name);
    let cause = decide(back_off, causes, &ends, now)?;
    let ends = ends.with(None, cause, now);
    let transaction = put_ends(seen, Transaction::new(), pod, &name, &ends, now).journal(
        Some(pod),
        "back-off ended",
        line(&name, cause),
    );
    Some((cause, transaction))
}

/// The back-off of a pull as if it had begun so early that it is over. The next failure makes it longer, as any other.
fn over(back_off: &BackoffRecord, now: Stamp) -> BackoffRecord {
    BackoffRecord {
        since: now.minus(length(back_off)),
        ..*back_off
    }
}

fn put_ends(
    seen: &State,
    transaction: Transaction,
    pod: &PodUid,
    name: &str,
    ends: &Ends,
    now: Stamp,
) -> Transaction {
    let key = key(pod, name);
    transaction
        .expect_object(seen, &key)
        .put_object(&key, ends, now)
}

fn line(name: &str, cause: &Cause) -> String {
    format!("{name}: {} ({})", cause.text, cause.id)
}

/// Key of the [`Ends`] of a container or image of a pod.
pub fn key(pod: &PodUid, name: &str) -> Key<Ends> {
    Key::new(pod.as_str(), name)
}

/// Observations of the node at one moment.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// The node has a route to other networks, or the addresses that were configured.
    pub has_network: bool,
    /// The API server answers; `None` before the first request, or without a server.
    pub has_api_server: Option<bool>,
    /// The inode behind each device file that pods in back-off wait for; `None` for one that is missing.
    pub devices: BTreeMap<PathBuf, Option<u64>>,
    /// Names of the CSI drivers that are registered.
    pub drivers: BTreeSet<String>,
}

/// The last observation, to detect a change by.
#[derive(Clone, Debug, Default)]
pub struct Watch {
    last: Option<(Facts, Stamp)>,
}

/// Causes that a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Those that concern every pod.
    pub node: Vec<Cause>,
    /// Those that concern the pods that use this device file.
    pub devices: Vec<(PathBuf, Cause)>,
}

impl Watch {
    /// Compares with the last check. The first one finds nothing.
    pub fn look(&mut self, facts: Facts, now: Stamp) -> Found {
        let mut found = Found::default();
        if let Some((last, at)) = &self.last {
            if facts.has_network && !last.has_network {
                let text = "the node has a network again".to_owned();
                let cause = Cause::at(Subject::Network, "network", text, now);
                found.node.push(cause);
            }
            if facts.has_api_server == Some(true) && last.has_api_server == Some(false) {
                let text = "the API server answers again".to_owned();
                let cause = Cause::at(Subject::ApiServer, "API server", text, now);
                found.node.push(cause);
            }
            let drivers = facts.drivers.difference(&last.drivers);
            found.node.extend(drivers.map(|driver| {
                let text = format!("CSI driver {driver} registered");
                Cause::at(Subject::Driver, driver, text, now)
            }));
            found.node.extend(clock_step(*at, now));
            for (path, inode) in &facts.devices {
                let Some(before) = last.devices.get(path) else {
                    continue;
                };
                if inode.is_some() && inode != before {
                    let text = format!("device {} appeared", path.display());
                    let what = path.display().to_string();
                    let cause = Cause::at(Subject::Device, &what, text, now);
                    found.devices.push((path.clone(), cause));
                }
            }
        }
        self.last = Some((facts, now));
        found
    }
}

/// Returns the step of the wall clock between two checks of one boot, if there was one.
fn clock_step(before: Stamp, now: Stamp) -> Option<Cause> {
    if before.boot != now.boot {
        return None;
    }
    let offset = |at: Stamp| at.wall_ms.saturating_sub(at.boottime_ms);
    let step = offset(now).saturating_sub(offset(before));
    if Duration::from_millis(step.unsigned_abs()) < CLOCK_STEP {
        return None;
    }
    let text = format!("the clock was set by {:+} s", step / 1000);
    Some(Cause::at(Subject::WallClock, "clock", text, now))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::testkit::{at, ended, with_backoff};

    fn cause(subject: Subject, id: &str, seconds: i64) -> Cause {
        Cause {
            subject,
            id: id.to_owned(),
            text: "it is back".to_owned(),
            at: at(seconds),
        }
    }

    fn back_off(seconds: u64, since: i64) -> BackoffRecord {
        BackoffRecord {
            duration_ms: seconds * 1000,
            since: at(since),
        }
    }

    fn used(ends: &[(&str, Subject, i64)]) -> Ends {
        ends.iter().fold(Ends::default(), |ends, (id, subject, s)| {
            ends.with(Some(&"c".into()), &cause(*subject, id, *s), at(*s))
        })
    }

    #[test]
    fn a_cause_ends_a_back_off_once_and_one_that_flaps_not_before_its_time() {
        use Subject::{ApiServer, Configuration, Network};
        let causes = [
            cause(ApiServer, "up 1", 110),
            cause(Configuration, "v2", 120),
        ];
        let old = [cause(ApiServer, "up 0", 99)];
        let flap = [cause(ApiServer, "up 2", 150)];
        let edit = [cause(Configuration, "v3", 150)];
        for (what, causes, ends, want) in [
            ("nothing happened", &causes[..0], used(&[]), None),
            ("before the start that failed", &old[..], used(&[]), None),
            ("the newest", &causes[..], used(&[]), Some("v2")),
            (
                "the newest was used",
                &causes[..],
                used(&[("v2", Configuration, 121)]),
                Some("up 1"),
            ),
            (
                "all were used",
                &causes[..],
                used(&[("v2", Configuration, 121), ("up 1", ApiServer, 111)]),
                None,
            ),
            (
                "it flaps",
                &flap[..],
                used(&[("up 1", ApiServer, 111)]),
                None,
            ),
            (
                "it was back a back-off ago",
                &flap[..],
                used(&[("up 1", ApiServer, 71)]),
                Some("up 2"),
            ),
            (
                "another one flapped",
                &flap[..],
                used(&[("net", Network, 149)]),
                Some("up 2"),
            ),
            (
                "somebody edits quickly",
                &edit[..],
                used(&[("v2", Configuration, 149)]),
                Some("v3"),
            ),
            (
                "a pod edits what it refers to",
                &edit[..],
                used(&[
                    ("v0", Configuration, 110),
                    ("v1", Configuration, 130),
                    ("v2", Configuration, 149),
                ]),
                None,
            ),
        ] {
            let got = decide(&back_off(80, 100), causes, &ends, at(151));
            assert_eq!(got.map(|c| c.id.as_str()), want, "{what}");
        }
    }

    fn applied(state: &State, transaction: &Transaction) -> State {
        let mut next = state.clone();
        for mutation in &transaction.mutations {
            next.apply(mutation, 1);
        }
        next
    }

    #[test]
    fn an_early_end_is_on_record_with_its_cause_and_keeps_the_level() {
        let pod = PodUid::new("u1");
        let record = with_backoff(ended("a", 1, 1), 40);
        let pull = ImageRecord {
            pulled_ref: None,
            backoffs: BTreeMap::from([(pod.clone(), back_off(80, 55))]),
            first_seen: at(0),
            last_used: at(0),
        };
        let put = Transaction::new()
            .put("u1/a", record)
            .put("img:1", pull.clone());
        let seen = applied(&State::default(), &put);
        let causes = [cause(Subject::Network, "network at 70", 70)];
        let (transaction, told) = end(&seen, &pod, &["a", "none"], &causes, at(71));
        assert_eq!(told.len(), 2, "{told:?}");
        assert_eq!(told[0].container.as_deref(), Some("a"));
        assert_eq!(told[1].image.as_deref(), Some("img:1"));
        let line = &transaction.journal[0];
        assert_eq!(line.what, "back-off ended");
        assert_eq!(line.why, "a: it is back (network at 70)");
        let after = applied(&seen, &transaction);
        assert!(Ends::of(&after, &pod, "a").is_of(&"a-1".into()));
        let pulled = after.record::<ImageRecord>("img:1").unwrap();
        let pulled = pulled.backoffs[&pod];
        assert_eq!(image::waiting(Some(pulled), at(71)), None);
        let next = image::failed(Some(pulled), at(72), image::MAX);
        assert_eq!(next.duration_ms, 160_000, "the next level");
        // The same cause again, as after a restart of the agent.
        let again = end(&after, &pod, &["a"], &causes, at(72));
        assert!(again.0.is_empty() && again.1.is_empty(), "{again:?}");
        let left = applied(&after, &kinds::forget_pod(&after, "ns", &pod));
        assert_eq!(all_of(&left, &pod), BTreeMap::new());
    }

    #[test]
    fn few_ends_are_kept() {
        let mut ends = Ends::default();
        for n in 0..40_i64 {
            let one = cause(Subject::Image, &n.to_string(), n);
            ends = ends.with(None, &one, at(n));
        }
        assert_eq!((ends.0.len(), ends.0[0].cause.as_str()), (KEPT, "24"));
    }

    fn facts(network: bool, api: Option<bool>, device: Option<u64>) -> Facts {
        Facts {
            has_network: network,
            has_api_server: api,
            devices: BTreeMap::from([(PathBuf::from("/dev/tty7"), device)]),
            drivers: BTreeSet::new(),
        }
    }

    #[test]
    fn the_cause_that_ends_the_back_off_of_a_mount_is_on_record_and_used_once() {
        let (pod, seen) = (PodUid::new("u1"), State::default());
        let causes = [cause(Subject::Driver, "d.example at 110", 110)];
        let end = |seen: &State, now| {
            end_mount(seen, &pod, "data", &back_off(64, 100), &causes, at(now))
                .map(|(_, transaction)| transaction)
        };
        let transaction = end(&seen, 111).unwrap();
        let line = &transaction.journal[0];
        assert_eq!(line.why, "volume/data: it is back (d.example at 110)");
        let after = applied(&seen, &transaction);
        assert!(end(&after, 112).is_none());
        assert!(
            !all_of(&after, &pod).contains_key("data"),
            "a container may be called so"
        );
        // It failed after the driver was there.
        let late = end_mount(&seen, &pod, "data", &back_off(64, 111), &causes, at(112));
        assert!(late.is_none());
    }

    #[test]
    fn a_driver_that_registers_is_a_cause() {
        let mut watch = Watch::default();
        let mut look = |drivers: &[&str], now| {
            let drivers = drivers.iter().map(|name| (*name).to_owned()).collect();
            let facts = Facts {
                drivers,
                ..Facts::default()
            };
            let found = watch.look(facts, at(now)).node.into_iter();
            found.map(|cause| cause.text).collect::<Vec<_>>()
        };
        assert_eq!(look(&["a"], 0), [""; 0]);
        assert_eq!(look(&["a", "b"], 1), ["CSI driver b registered"]);
        assert_eq!(look(&["a"], 2), [""; 0]);
        assert_eq!(look(&["a", "b"], 3), ["CSI driver b registered"]);
        let both = ["CSI driver c registered", "CSI driver d registered"];
        assert_eq!(look(&["a", "b", "c", "d"], 4), both);
    }

    #[test]
    fn a_driver_that_registers_helps_volumes_of_its_own_alone() {
        let of = |name: &str, second| Cause::at(Subject::Driver, name, String::new(), at(second));
        let cause = of("d.example", 10);
        for (driver, helps) in [
            (Some("d.example"), true),
            (Some("d.example.org"), false),
            (Some("other.example"), false),
            (None, false),
        ] {
            assert_eq!(cause.helps_volume_of(driver), helps, "{driver:?}");
        }
        let network = Cause::at(Subject::Network, "network", String::new(), at(10));
        assert!(network.helps_volume_of(None) && network.helps_volume_of(Some("d.example")));
        assert!(of("d.example", 20).replaces(&cause));
        assert!(!of("other.example", 20).replaces(&cause) && !network.replaces(&cause));
    }

    #[test]
    fn what_is_back_is_a_cause_and_what_was_there_is_none() {
        let mut watch = Watch::default();
        let mut look = |facts, now| {
            let found = watch.look(facts, now);
            let node = found.node.iter().map(|c| c.text.clone());
            let devices = found.devices.iter().map(|(_, c)| c.text.clone());
            node.chain(devices).collect::<Vec<_>>()
        };
        let there = || facts(true, Some(true), Some(1));
        let none: [&str; 0] = [];
        assert_eq!(look(there(), at(0)), none);
        assert_eq!(look(there(), at(5)), none);
        assert_eq!(look(facts(false, Some(false), None), at(10)), none);
        let back = look(facts(true, Some(true), Some(2)), at(15));
        assert_eq!(
            back,
            [
                "the node has a network again",
                "the API server answers again",
                "device /dev/tty7 appeared"
            ]
        );
        assert_eq!(look(facts(true, Some(true), Some(3)), at(20)).len(), 1);
        assert_eq!(look(facts(true, None, Some(3)), at(25)), none);
        assert_eq!(look(facts(true, Some(true), Some(3)), at(30)), none);
        let mut step = at(35);
        step.wall_ms -= 3_600_000;
        let set = look(facts(true, Some(true), Some(3)), step);
        assert_eq!(set, ["the clock was set by -3600 s"]);
    }
}
