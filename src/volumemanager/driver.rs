//! The driver of volumes whose storage is elsewhere: looks at what there is, has the planner decide, begins each step as a
//! task of its own, and answers those who wait.
//!
//! There is one at a time, and only while there is something to look at: [`VolumeManager::drive`] starts it, or has the
//! one that runs look once more. That happens whenever something changed: somebody waits for a volume or for its end, an
//! operation has ended, a back-off is over. Nobody polls. What many ask for at once is one round, and who waits is woken
//! once, with the answer.
//!
//! **Invariant:** nothing is read from the kernel or looked up on disk under the lock of the desk.
//!
//! **Invariant:** the mount table is read after the records, and no step is begun on a key that an operation had at any
//! time since: what was seen of the others is still so.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::runtime::Handle;
use tokio::time::Instant;
use tracing::warn;

use super::known::Damaged;
use super::operations::Failure;
use super::remotes::Desk;
use super::{HOST_PATH, VolumeManager, mounts};
use crate::core::state::{State, VolumePhase, VolumeRecord, child_key};
use crate::core::volumes::keys::{self, Mark};
use crate::core::volumes::planner::{self, Facts, Recorded, Wanted, undo_key};
use crate::core::volumes::records::{self, Description};
use crate::types::{PodUid, Stamp};

/// After a round that took longer, ends of operations are gathered for as long as it took: with very many volumes the
/// driver leaves half of a processor to others.
const SHORT: Duration = Duration::from_millis(1);
/// But no longer than this.
const PAUSE: Duration = Duration::from_millis(20);

/// What those hear who wait for a volume.
#[derive(Clone, Debug)]
pub(super) enum Answer {
    /// It is there.
    There,
    /// A step on it, or on what it is made of, failed, and is left alone for a while.
    Held {
        /// The volume, or its device.
        on: String,
        /// What failed.
        failure: Failure,
    },
}

/// What those hear who wait for the volumes of a pod to be gone: that they are, or that each one that is left is left alone
/// after a failure, and which.
pub(super) type Gone = Result<(), Vec<(String, Failure)>>;

/// The driver. When it ends early, with the runtime or by a panic, the next one who asks starts another.
struct Driving {
    manager: VolumeManager,
    ended: bool,
}

impl Drop for Driving {
    fn drop(&mut self) {
        if !self.ended {
            self.manager.desk().driving = false;
        }
    }
}

impl Driving {
    async fn run(mut self) {
        loop {
            // Others that are about to ask come first.
            tokio::task::yield_now().await;
            let begun = Instant::now();
            let asked = self.manager.desk().asked;
            self.manager.operations.look();
            self.manager.round().await;
            self.manager.operations.looked();
            let took = begun.elapsed();
            {
                let mut desk = self.manager.desk();
                if desk.asked == asked {
                    desk.driving = false;
                    self.ended = true;
                    return;
                }
            }
            if took > SHORT {
                tokio::time::sleep(took.min(PAUSE)).await;
            }
        }
    }
}

impl VolumeManager {
    /// Has begun whatever can be begun, and those answered who wait, by a look that begins after this. Never waits. To be
    /// called without the lock of the desk.
    pub(super) fn drive(&self) {
        // None: the agent ends.
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        {
            let mut desk = self.desk();
            desk.asked += 1;
            if std::mem::replace(&mut desk.driving, true) {
                return;
            }
        }
        let driving = Driving {
            manager: self.clone(),
            ended: false,
        };
        runtime.spawn(driving.run());
    }

    /// A key is free again that no step had; those who wait for it may go on.
    pub(super) fn freed(&self, key: &str) {
        if self.desk().waits_for(key) {
            self.drive();
        }
    }

    /// Looks, begins and answers, once; between `look` and `looked` of the operations.
    async fn round(&self) {
        let seen = self.store.snapshot();
        let has_devices = seen
            .with_prefix::<VolumeRecord>(keys::DEVICE)
            .next()
            .is_some();
        let waits = self.desk().waits_for_mounts() || has_devices;
        let mounted = match waits {
            true => Some(self.look().await),
            false => None,
        };
        let (begun, alarm) = {
            let mut desk = self.desk();
            desk.rounds += 1;
            let mounted = match mounted {
                Some(mounted) => mounted,
                // Who came meanwhile has asked for another round.
                None if desk.waits_for_mounts() => return,
                None => Some(mounts::View::default()),
            };
            let facts = self.facts(&desk, &seen, mounted.as_ref());
            let plan = planner::plan(&facts);
            let steps = plan.steps.into_iter();
            let begun: Vec<BoxFuture<'static, ()>> = steps
                .filter_map(|step| self.begin(&desk, step, &facts))
                .collect();
            self.answer(&mut desk, &facts);
            let due = plan.due.filter(|due| desk.set_alarm(*due, facts.now));
            (begun, due.map(|due| (due, due.until(facts.now))))
        };
        // A runtime that ends drops what it is given at once, and that takes the lock.
        for step in begun {
            tokio::spawn(step);
        }
        if let Some((due, wait)) = alarm {
            let manager = self.clone();
            tokio::spawn(async move {
                tokio::time::sleep(wait).await;
                manager.ring(due);
            });
        }
        self.tell_in_use();
    }

    fn ring(&self, due: Stamp) {
        self.desk().rang(due);
        self.drive();
    }

    async fn look(&self) -> Option<mounts::View> {
        let mounted = self.mounts.current().await;
        let told = mounted.inspect_err(|error| {
            warn!(%error, "the mount table cannot be read, volumes count as not mounted, and devices as in use");
        });
        told.ok()
    }

    fn facts(&self, desk: &Desk, seen: &State, view: Option<&mounts::View>) -> Facts {
        let now = self.clock.now();
        let volumes = records::volumes(seen).filter_map(|found| recorded(seen, found, now));
        let volumes: BTreeMap<String, Recorded> = volumes.collect();
        let devices = records::devices(seen).filter_map(|found| recorded(seen, found, now));
        let devices: BTreeMap<String, Recorded> = devices.collect();
        let wanted = desk.wanted();
        let leaving = (volumes.keys())
            .filter(|key| {
                keys::split(key)
                    .is_some_and(|(uid, _)| desk.leaving.contains_key(&PodUid::new(uid)))
            })
            .cloned()
            .collect();
        let mounted = view.map(|view| mounted(view, &wanted, &volumes, &devices));
        let in_use = self.shown_in_use(view, &volumes, &devices);
        let unreadable = !desk.known.is_settled() || Damaged::of(seen).volumes;
        Facts {
            wanted,
            leaving,
            volumes,
            devices,
            unreadable,
            in_use,
            mounted: mounted.unwrap_or_default(),
            busy: self.operations.touched(),
            held: self.operations.held(),
            now,
        }
    }

    /// Tells those who need not wait any more; their orders are done.
    fn answer(&self, desk: &mut Desk, facts: &Facts) {
        // With what was begun just now.
        let busy = self.operations.touched();
        let orders = facts.wanted.iter();
        let answers: Vec<(&String, Answer)> = orders
            .filter_map(|(key, wanted)| Some((key, self.outcome(key, wanted, facts, &busy)?)))
            .collect();
        for (key, answer) in answers {
            desk.answer(key, &answer);
        }
        let pods = desk.leaving.keys();
        let gone: Vec<(PodUid, Gone)> = pods
            .filter_map(|uid| Some((uid.clone(), self.gone(uid, facts, &busy)?)))
            .collect();
        for (uid, gone) in gone {
            for (_, waiter) in desk.leaving.remove(&uid).into_iter().flatten() {
                // Who does not wait any more need not know.
                drop(waiter.send(gone.clone()));
            }
        }
    }

    fn outcome(
        &self,
        key: &str,
        wanted: &Wanted,
        facts: &Facts,
        busy: &BTreeSet<String>,
    ) -> Option<Answer> {
        let found = facts.volumes.get(key);
        let there = found.is_some_and(|v| v.path == wanted.path && v.is_there(&facts.mounted));
        if there && !wanted.again {
            return Some(Answer::There);
        }
        let on = [Some(key), wanted.device.as_deref()].into_iter().flatten();
        if (on.clone().chain([&*wanted.path])).any(|key| busy.contains(key)) {
            return None;
        }
        let (on, failure) = self.held(on, facts.now)?;
        let on = on.to_owned();
        Some(Answer::Held { on, failure })
    }

    fn gone(&self, uid: &PodUid, facts: &Facts, busy: &BTreeSet<String>) -> Option<Gone> {
        let prefix = child_key(uid, "");
        // A volume may be about to come on record.
        let works = busy.range(prefix.clone()..).next();
        if works.is_some_and(|key| key.starts_with(&prefix)) {
            return None;
        }
        let left = facts.volumes.range(prefix.clone()..);
        let left = left.take_while(|(key, _)| key.starts_with(&prefix));
        let mut held = Vec::new();
        for (key, recorded) in left {
            let on = [Some(&*recorded.path), recorded.device.as_deref()];
            if on.into_iter().flatten().any(|key| busy.contains(key)) {
                return None;
            }
            let (_, failure) = self.held(std::iter::once(&*undo_key(key)), facts.now)?;
            held.push((key[prefix.len()..].to_owned(), failure));
        }
        Some(if held.is_empty() { Ok(()) } else { Err(held) })
    }

    /// The first of the keys that is left alone after a failure.
    fn held<'k>(
        &self,
        keys: impl Iterator<Item = &'k str>,
        now: Stamp,
    ) -> Option<(&'k str, Failure)> {
        keys.filter_map(|key| Some((key, self.operations.failure(key)?)))
            .find(|(_, failure)| !failure.backoff.until.reached(now))
    }
}

/// Returns the paths of existing mounts that the wanted volumes rely on.
fn mounted(
    view: &mounts::View,
    wanted: &BTreeMap<String, Wanted>,
    volumes: &BTreeMap<String, Recorded>,
    devices: &BTreeMap<String, Recorded>,
) -> BTreeSet<String> {
    let mut asked: BTreeSet<&str> = BTreeSet::new();
    let relies = |r: &&Recorded| r.phase == VolumePhase::Mounted && r.is_mount && r.this_boot;
    for (key, wanted) in wanted {
        let device = wanted.device.as_ref().and_then(|d| devices.get(d));
        let found = volumes.get(key).into_iter().chain(device).filter(relies);
        asked.extend(found.map(|r| &*r.path));
        // Another volume of the pod may lead there.
        asked.insert(&wanted.path);
    }
    let is_mount = |path: &&str| view.mount_at(Path::new(path)).is_some();
    (asked.into_iter().filter(is_mount))
        .map(str::to_owned)
        .collect()
}

/// A volume or device as it is on record; `None` for what has no storage elsewhere.
fn recorded(seen: &State, found: Description<'_>, now: Stamp) -> Option<(String, Recorded)> {
    let record = seen.record::<VolumeRecord>(&found.key)?;
    if record.plugin == HOST_PATH {
        return None;
    }
    let device = found.content.ok()?.device;
    let is_device = found.key.starts_with(keys::DEVICE);
    let recorded = Recorded {
        phase: record.phase,
        path: record.path.clone(),
        device: device.filter(|_| !is_device).map(|key| key.to_string()),
        begun: found.mark != Mark::Claimed,
        this_boot: record.at.boot == now.boot,
        is_mount: found.mark != Mark::Plain,
    };
    Some((found.key.into_owned(), recorded))
}
