//! Planner of the next steps for remote volumes: a function of the volumes that pods want, the records, the kernel's
//! mounts, the steps under way and the back-offs after failures.
//!
//! Storage is staged once per node (a device) and published once per pod (a volume). The order is claim,
//! stage, publish; and back: unpublish, unstage.
//!
//! **Invariants:**
//! - No step without its record: a volume is claimed before its device is staged, and what is to be undone
//!   is found by its record alone.
//! - A device that a record uses, or that is mounted for a pod, is not unstaged, and none while a pod may have
//!   volumes that nobody knows; one whose unstaging was begun is unstaged to its end before it
//!   is staged again.
//! - One target is published once, whichever volumes of the pod lead to it.
//! - Two steps of one plan, and of one and what is under way, have no volume, target or device in common.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::core::state::VolumePhase;
use crate::types::Stamp;

/// Pause before the next check of a device that is mounted for a pod without a record.
const RECHECK: Duration = Duration::from_secs(60);

/// A volume that a pod waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Path at which it has to appear.
    pub path: String,
    /// Key of its device, for what is staged.
    pub device: Option<String>,
    /// It is to be published even if it is there.
    pub again: bool,
}

/// A stored volume or device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// Phase.
    pub phase: VolumePhase,
    /// Target, or where a device is staged.
    pub path: String,
    /// Key of a volume's device.
    pub device: Option<String>,
    /// A step may have been begun.
    pub begun: bool,
    /// The phase began in this boot.
    pub this_boot: bool,
    /// It is a mount: without one at `path` it is not there.
    pub is_mount: bool,
}

impl Recorded {
    /// Returns whether it is mounted, and complete.
    pub fn is_there(&self, mounted: &BTreeSet<String>) -> bool {
        self.phase == VolumePhase::Mounted
            && self.this_boot
            && (!self.is_mount || mounted.contains(&self.path))
    }
}

/// Everything a plan is made of.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Volumes that pods wait for, by key of the volume record.
    pub wanted: BTreeMap<String, Wanted>,
    /// Volumes whose pods have ended.
    pub leaving: BTreeSet<String>,
    /// Stored volumes.
    pub volumes: BTreeMap<String, Recorded>,
    /// Stored devices.
    pub devices: BTreeMap<String, Recorded>,
    /// True if a pod may have a volume that is not recorded, or whose record cannot be read: any device may be its own.
    pub unreadable: bool,
    /// Devices that no stored volume uses, and that are mounted for a pod all the same.
    pub in_use: BTreeSet<String>,
    /// Paths of mounts.
    pub mounted: BTreeSet<String>,
    /// Volumes, devices and targets that an operation works on.
    pub busy: BTreeSet<String>,
    /// Volumes and devices that are left alone after a failure, and until when; for what is to be undone under
    /// their [`undo_key`], so that a mount that failed does not hold up its own end.
    pub held: BTreeMap<String, Stamp>,
    /// Now.
    pub now: Stamp,
}

/// Returns the back-off key of undoing a volume or device.
pub fn undo_key(key: &str) -> String {
    format!("{key} undo")
}

/// One thing to do. Steps of a plan are independent of each other.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// Record that a pod will use a volume.
    Claim {
        /// The volume.
        volume: String,
    },
    /// Stage a device, as a volume that waits for it describes it.
    Stage {
        /// The device.
        device: String,
        /// Volume that waits for it.
        volume: String,
    },
    /// Publish a volume.
    Publish {
        /// The volume.
        volume: String,
    },
    /// Record that a volume is there: another one of its pod leads to the same target.
    Share {
        /// The volume.
        volume: String,
    },
    /// Undo a publish.
    Unpublish {
        /// The volume.
        volume: String,
    },
    /// Forget a volume that was never published, or whose target another one keeps.
    Drop {
        /// The volume.
        volume: String,
    },
    /// Undo the staging of a device that is not used.
    Unstage {
        /// The device.
        device: String,
    },
}

/// Steps to begin now, and the time of the next check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// To be begun.
    pub steps: Vec<Step>,
    /// End of the first back-off that delays a step.
    pub due: Option<Stamp>,
}

/// Makes the plan.
pub fn plan(facts: &Facts) -> Plan {
    let mut planner = Planner {
        facts,
        busy: facts.busy.clone(),
        users: users(facts),
        plan: Plan::default(),
    };
    for (key, wanted) in &facts.wanted {
        if !facts.leaving.contains(key) {
            planner.bring(key, wanted);
        }
    }
    for key in &facts.leaving {
        if let Some(recorded) = facts.volumes.get(key) {
            planner.undo(key, recorded);
        }
    }
    for (key, device) in &facts.devices {
        planner.idle(key, device);
    }
    planner.plan
}

/// Stored volumes by the device they use, and by their target.
struct Users<'a> {
    devices: BTreeMap<&'a str, Vec<&'a Recorded>>,
    targets: BTreeMap<&'a str, Vec<(&'a str, &'a Recorded)>>,
    wanted: BTreeSet<&'a str>,
}

fn users(facts: &Facts) -> Users<'_> {
    let mut users = Users {
        devices: BTreeMap::new(),
        targets: BTreeMap::new(),
        wanted: BTreeSet::new(),
    };
    for (key, recorded) in &facts.volumes {
        if let Some(device) = &recorded.device {
            users.devices.entry(device).or_default().push(recorded);
        }
        let at = users.targets.entry(&recorded.path).or_default();
        at.push((key, recorded));
    }
    for (key, wanted) in &facts.wanted {
        if let (Some(device), false) = (&wanted.device, facts.leaving.contains(key)) {
            users.wanted.insert(device);
        }
    }
    users
}

struct Planner<'a> {
    facts: &'a Facts,
    /// With what this plan begins.
    busy: BTreeSet<String>,
    users: Users<'a>,
    plan: Plan,
}

impl Planner<'_> {
    fn bring(&mut self, key: &str, wanted: &Wanted) {
        if self.busy.contains(key) {
            return;
        }
        let step = |volume: &str| volume.to_owned();
        let Some(recorded) = self.facts.volumes.get(key) else {
            let claim = Step::Claim { volume: step(key) };
            return self.begin(claim, &[key]);
        };
        if recorded.phase == VolumePhase::Unmounting
            || recorded.path != wanted.path
            || recorded.device != wanted.device
        {
            return self.undo(key, recorded);
        }
        if recorded.is_there(&self.facts.mounted) && !wanted.again {
            return;
        }
        if let Some(device) = &wanted.device
            && !self.is_staged(key, device)
        {
            return;
        }
        let twins = self.users.targets.get(&*wanted.path);
        for (other, twin) in twins.into_iter().flatten() {
            if *other == key {
                continue;
            }
            let leaves =
                self.facts.leaving.contains(*other) || twin.phase == VolumePhase::Unmounting;
            if leaves && twin.begun {
                return;
            }
            if !leaves && twin.is_there(&self.facts.mounted) && !wanted.again {
                let share = Step::Share { volume: step(key) };
                return self.begin(share, &[key, &wanted.path]);
            }
            // The first of them does it.
            if *other < key && self.facts.wanted.contains_key(*other) {
                return;
            }
        }
        if self.holds(key) {
            return;
        }
        let publish = Step::Publish { volume: step(key) };
        self.begin_with(publish, key, &wanted.path, wanted.device.as_deref());
    }

    /// Returns whether a device can be published from; begins the steps for it.
    fn is_staged(&mut self, volume: &str, device: &str) -> bool {
        if self.busy.contains(device) {
            return false;
        }
        let found = self.facts.devices.get(device);
        if found.is_some_and(|d| d.is_there(&self.facts.mounted)) {
            return true;
        }
        let used = (self.users.devices.get(device).into_iter().flatten()).any(|v| v.begun);
        let used = used || self.facts.unreadable || self.facts.in_use.contains(device);
        let (step, held_by) = match found {
            Some(d) if d.phase == VolumePhase::Unmounting && !used => {
                let held_by = undo_key(device);
                let device = device.to_owned();
                (Step::Unstage { device }, held_by)
            }
            _ => {
                let (device, volume) = (device.to_owned(), volume.to_owned());
                let held_by = device.clone();
                (Step::Stage { device, volume }, held_by)
            }
        };
        if !self.holds(&held_by) {
            self.begin(step, &[device]);
        }
        false
    }

    fn undo(&mut self, key: &str, recorded: &Recorded) {
        if self.busy.contains(key) {
            return;
        }
        let volume = key.to_owned();
        let twins = self.users.targets.get(&*recorded.path);
        let kept = (twins.into_iter().flatten())
            .filter(|(other, twin)| *other != key && twin.begun)
            .any(|(other, twin)| {
                let goes =
                    twin.phase == VolumePhase::Unmounting || self.facts.leaving.contains(*other);
                *other < key || !goes
            });
        if !recorded.begun || kept {
            return self.begin(Step::Drop { volume }, &[key]);
        }
        if self.holds(&undo_key(key)) {
            return;
        }
        let device = recorded.device.as_deref();
        self.begin_with(Step::Unpublish { volume }, key, &recorded.path, device);
    }

    fn idle(&mut self, key: &str, device: &Recorded) {
        let wanted = device.phase != VolumePhase::Unmounting && self.users.wanted.contains(key);
        let used = self.facts.unreadable || self.users.devices.contains_key(key);
        if self.busy.contains(key) || wanted || used {
            return;
        }
        if self.facts.in_use.contains(key) {
            // Nobody tells when it is unmounted.
            return self.look_again(self.facts.now.plus(RECHECK));
        }
        if self.holds(&undo_key(key)) {
            return;
        }
        let device = key.to_owned();
        self.begin(Step::Unstage { device }, &[key]);
    }

    fn holds(&mut self, key: &str) -> bool {
        let until = self.facts.held.get(key).copied();
        let Some(until) = until.filter(|until| !until.reached(self.facts.now)) else {
            return false;
        };
        self.look_again(until);
        true
    }

    fn look_again(&mut self, at: Stamp) {
        let sooner = self
            .plan
            .due
            .is_none_or(|due| at.until(self.facts.now) < due.until(self.facts.now));
        if sooner {
            self.plan.due = Some(at);
        }
    }

    fn begin_with(&mut self, step: Step, key: &str, path: &str, device: Option<&str>) {
        match device {
            Some(device) => self.begin(step, &[key, path, device]),
            None => self.begin(step, &[key, path]),
        }
    }

    fn begin(&mut self, step: Step, on: &[&str]) {
        if on.iter().any(|key| self.busy.contains(*key)) {
            return;
        }
        self.busy.extend(on.iter().map(|key| (*key).to_owned()));
        self.plan.steps.push(step);
    }
}

#[cfg(test)]
#[path = "planner_tests.rs"]
mod tests;
