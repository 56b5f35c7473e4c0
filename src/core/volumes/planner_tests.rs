//! Tests of the planner alone, over a model of its executor: many thousand histories.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::types::BootId;

/// A step under way.
#[derive(Clone, Debug)]
struct Running {
    step: Step,
    on: BTreeSet<String>,
    /// The deed is done, its record is not.
    done: bool,
}

#[derive(Default)]
struct World {
    /// Volumes of pods: key to target and device.
    wanted: BTreeMap<String, Wanted>,
    leaving: BTreeSet<String>,
    volumes: BTreeMap<String, Recorded>,
    devices: BTreeMap<String, Recorded>,
    /// Devices that are really staged.
    staged: BTreeSet<String>,
    published: BTreeMap<String, Option<String>>,
    running: Vec<Running>,
    held: BTreeMap<String, Stamp>,
    now: i64,
    boot: u64,
    remounts: usize,
}

fn stamp(at: i64) -> Stamp {
    Stamp {
        boot: BootId(1),
        boottime_ms: at,
        wall_ms: at,
    }
}

fn record(path: &str, device: Option<&str>, phase: VolumePhase, begun: bool) -> Recorded {
    Recorded {
        phase,
        path: path.to_owned(),
        device: device.map(str::to_owned),
        begun,
        this_boot: true,
        is_mount: true,
    }
}

/// Volume `b` and `d` of a pod lead to one target; `a` and `b` are staged, `c` is not.
fn volume(pod: usize, name: usize) -> (String, Wanted) {
    let uid = format!("u{pod}");
    let (target, device) = match name {
        0 => ("a", Some(format!("device/{}", pod % 2))),
        1 | 3 => ("b", Some("device/shared".to_owned())),
        _ => ("c", None),
    };
    let wanted = Wanted {
        path: format!("/pods/{uid}/{target}"),
        device,
        again: false,
    };
    (format!("{uid}/{name}"), wanted)
}

impl World {
    fn facts(&self) -> Facts {
        let mounted = self.published.keys().cloned();
        let staged = self.staged.iter().map(|d| format!("/staged/{d}"));
        Facts {
            wanted: self.wanted.clone(),
            leaving: self.leaving.clone(),
            volumes: self.volumes.clone(),
            devices: self.devices.clone(),
            unreadable: false,
            in_use: BTreeSet::new(),
            mounted: mounted.chain(staged).collect(),
            busy: self.running.iter().flat_map(|r| r.on.clone()).collect(),
            held: self.held.clone(),
            now: stamp(self.now),
        }
    }

    fn drive(&mut self) {
        let facts = self.facts();
        let plan = plan(&facts);
        for step in plan.steps {
            let on = self.on(&step);
            for other in &self.running {
                assert!(
                    other.on.is_disjoint(&on),
                    "{step:?} beside {:?}",
                    other.step
                );
            }
            self.check(&step);
            self.begin(&step);
            self.running.push(Running {
                step,
                on,
                done: false,
            });
        }
    }

    /// Returns the objects that a step works on.
    fn on(&self, step: &Step) -> BTreeSet<String> {
        match step {
            Step::Claim { volume } | Step::Drop { volume } => BTreeSet::from([volume.clone()]),
            Step::Share { volume } => {
                BTreeSet::from([volume.clone(), self.wanted[volume].path.clone()])
            }
            Step::Publish { volume } | Step::Unpublish { volume } => {
                let recorded = &self.volumes[volume];
                let on = [volume.clone(), recorded.path.clone()];
                on.into_iter().chain(recorded.device.clone()).collect()
            }
            Step::Stage { device, .. } | Step::Unstage { device } => {
                BTreeSet::from([device.clone()])
            }
        }
    }

    fn check(&self, step: &Step) {
        match step {
            Step::Claim { volume } => assert!(!self.volumes.contains_key(volume)),
            Step::Stage { device, volume } => {
                let recorded = &self.volumes[volume];
                assert_eq!(
                    recorded.device.as_ref(),
                    Some(device),
                    "stage before a claim"
                );
            }
            Step::Publish { volume } => {
                let recorded = &self.volumes[volume];
                assert!(!self.leaving.contains(volume), "publish for who leaves");
                if let Some(device) = &recorded.device {
                    assert!(
                        self.staged.contains(device),
                        "publish of what is not staged"
                    );
                    assert_eq!(self.devices[device].phase, VolumePhase::Mounted);
                }
                let there = recorded.phase == VolumePhase::Mounted
                    && self.published.contains_key(&recorded.path);
                assert!(!there, "{volume} is mounted twice");
            }
            Step::Share { volume } => {
                assert!(self.published.contains_key(&self.wanted[volume].path));
            }
            Step::Unpublish { volume } => {
                let recorded = &self.volumes[volume];
                let used = self.volumes.iter().any(|(other, r)| {
                    other != volume
                        && r.path == recorded.path
                        && r.phase == VolumePhase::Mounted
                        && !self.leaving.contains(other)
                });
                assert!(
                    !used,
                    "unmount of what {volume} shares with a pod that runs"
                );
                assert!(
                    self.leaving.contains(volume) || recorded.phase == VolumePhase::Unmounting,
                    "unmount of {volume}, which is used"
                );
            }
            Step::Drop { volume } => {
                let recorded = &self.volumes[volume];
                let kept = self
                    .volumes
                    .iter()
                    .any(|(other, r)| other != volume && r.path == recorded.path && r.begun);
                assert!(
                    !self.published.contains_key(&recorded.path) || kept,
                    "{volume} is forgotten while it is mounted"
                );
            }
            Step::Unstage { device } => {
                let used = |d: &Option<String>| d.as_ref() == Some(device);
                assert!(
                    !self.published.values().any(used),
                    "unstage of {device}, which is used"
                );
                assert!(
                    !self.volumes.values().any(|v| v.begun && used(&v.device)),
                    "unstage of {device}, which is used by the records"
                );
            }
        }
    }

    /// The record before the deed.
    fn begin(&mut self, step: &Step) {
        let phase = |records: &mut BTreeMap<String, Recorded>, key: &String, phase| {
            if let Some(r) = records.get_mut(key) {
                (r.phase, r.begun, r.this_boot) = (phase, true, true);
            }
        };
        match step {
            Step::Stage { device, .. } => {
                let at = format!("/staged/{device}");
                let new = record(&at, None, VolumePhase::Mounting, true);
                self.devices.insert(device.clone(), new);
            }
            Step::Publish { volume } => phase(&mut self.volumes, volume, VolumePhase::Mounting),
            Step::Unpublish { volume } => phase(&mut self.volumes, volume, VolumePhase::Unmounting),
            Step::Unstage { device } => phase(&mut self.devices, device, VolumePhase::Unmounting),
            Step::Claim { .. } | Step::Share { .. } | Step::Drop { .. } => {}
        }
    }

    fn deed(&mut self, step: &Step) {
        match step {
            Step::Stage { device, .. } => {
                self.staged.insert(device.clone());
            }
            Step::Publish { volume } => {
                let recorded = &self.volumes[volume];
                if let Some(device) = &recorded.device {
                    assert!(self.staged.contains(device), "its device went away");
                }
                let (path, device) = (recorded.path.clone(), recorded.device.clone());
                if self.published.insert(path, device).is_some() {
                    self.remounts += 1;
                }
            }
            Step::Unpublish { volume } => {
                self.published.remove(&self.volumes[volume].path);
            }
            Step::Unstage { device } => {
                self.staged.remove(device);
            }
            Step::Claim { .. } | Step::Share { .. } | Step::Drop { .. } => {}
        }
    }

    /// The record after the deed.
    fn finish(&mut self, step: &Step) {
        match step {
            Step::Claim { volume } => {
                // Who waited may have gone.
                if let Some(w) = self.wanted.get(volume) {
                    let new = record(&w.path, w.device.as_deref(), VolumePhase::Mounting, false);
                    self.volumes.insert(volume.clone(), new);
                }
            }
            Step::Share { volume } => {
                if let Some(w) = self.wanted.get(volume) {
                    let new = record(&w.path, w.device.as_deref(), VolumePhase::Mounted, true);
                    self.volumes.insert(volume.clone(), new);
                }
            }
            Step::Stage { device, .. } => {
                self.devices.get_mut(device).unwrap().phase = VolumePhase::Mounted;
            }
            Step::Publish { volume } => {
                self.volumes.get_mut(volume).unwrap().phase = VolumePhase::Mounted;
            }
            Step::Unpublish { volume } | Step::Drop { volume } => {
                self.volumes.remove(volume);
            }
            Step::Unstage { device } => {
                self.devices.remove(device);
            }
        }
    }

    fn apply(&mut self, action: &Action) {
        match action {
            Action::Add(pod) => {
                for name in 0..4 {
                    let (key, wanted) = volume(*pod, name);
                    if !self.leaving.contains(&key) && !self.gone_is_on_record(&key) {
                        self.wanted.insert(key, wanted);
                    }
                }
            }
            Action::Remove(pod) => {
                for name in 0..4 {
                    let (key, _) = volume(*pod, name);
                    self.wanted.remove(&key);
                    self.leaving.insert(key);
                }
            }
            Action::Drive => self.drive(),
            Action::Deed(nth) => {
                let nth = nth % self.running.len().max(1);
                if let Some(running) = self.running.get_mut(nth).filter(|r| !r.done) {
                    running.done = true;
                    let step = running.step.clone();
                    self.deed(&step);
                }
            }
            Action::End(nth, fails) => {
                if self.running.is_empty() {
                    return;
                }
                let running = self.running.remove(nth % self.running.len());
                let key = self.key(&running.step);
                if *fails {
                    self.held.insert(key, stamp(self.now + 500));
                    return;
                }
                self.held.remove(&key);
                if !running.done {
                    self.deed(&running.step);
                }
                self.finish(&running.step);
            }
            Action::Time(ms) => self.now += i64::from(*ms),
            Action::Crash | Action::Reboot => {
                self.running.clear();
                self.held.clear();
                if matches!(action, Action::Reboot) {
                    self.boot += 1;
                    self.staged.clear();
                    self.published.clear();
                    for r in self.volumes.values_mut().chain(self.devices.values_mut()) {
                        r.this_boot = false;
                    }
                }
            }
        }
    }

    fn gone_is_on_record(&self, key: &str) -> bool {
        self.volumes.contains_key(key) && !self.wanted.contains_key(key)
    }

    fn key(&self, step: &Step) -> String {
        match step {
            Step::Claim { volume }
            | Step::Publish { volume }
            | Step::Share { volume }
            | Step::Drop { volume } => volume.clone(),
            Step::Unpublish { volume } => undo_key(volume),
            Step::Stage { device, .. } => device.clone(),
            Step::Unstage { device } => undo_key(device),
        }
    }

    fn settle(&mut self) {
        for _ in 0..200 {
            self.now += 500;
            self.leaving.retain(|key| self.volumes.contains_key(key));
            self.drive();
            if self.running.is_empty() {
                break;
            }
            while !self.running.is_empty() {
                self.apply(&Action::End(0, false));
            }
        }
        assert!(
            plan(&self.facts()).steps.is_empty(),
            "it does not come to rest"
        );
        assert!(self.leaving.is_empty(), "{:?} stay", self.leaving);
        let targets: BTreeSet<&String> = self.wanted.values().map(|w| &w.path).collect();
        assert_eq!(self.published.keys().collect::<BTreeSet<_>>(), targets);
        let devices: BTreeSet<&String> = self
            .wanted
            .values()
            .filter_map(|w| w.device.as_ref())
            .collect();
        assert_eq!(self.staged.iter().collect::<BTreeSet<_>>(), devices);
        assert_eq!(self.devices.keys().collect::<BTreeSet<_>>(), devices);
        assert_eq!(
            self.volumes.keys().collect::<BTreeSet<_>>(),
            self.wanted.keys().collect::<BTreeSet<_>>()
        );
        assert!(
            self.volumes
                .values()
                .all(|v| v.phase == VolumePhase::Mounted)
        );
    }
}

#[derive(Clone, Debug)]
enum Action {
    Add(usize),
    Remove(usize),
    Drive,
    Deed(usize),
    /// End of a step, true if it fails; a deed that was done stays done.
    End(usize, bool),
    Time(u16),
    Crash,
    Reboot,
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let one = prop_oneof![
        3 => (0..3_usize).prop_map(Action::Add),
        2 => (0..3_usize).prop_map(Action::Remove),
        8 => Just(Action::Drive),
        4 => (0..8_usize).prop_map(Action::Deed),
        8 => (0..8_usize, prop::bool::weighted(0.2)).prop_map(|(n, f)| Action::End(n, f)),
        2 => (1..1000_u16).prop_map(Action::Time),
        1 => Just(Action::Crash),
        1 => Just(Action::Reboot),
    ];
    prop::collection::vec(one, 1..120)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, ..ProptestConfig::default() })]

    #[test]
    fn plans_converge_and_keep_what_is_used(actions in actions()) {
        let mut world = World::default();
        for action in &actions {
            world.apply(action);
        }
        // Pods that are not wanted and have something on record leave.
        let stray: Vec<String> = world.volumes.keys().filter(|k| !world.wanted.contains_key(*k)).cloned().collect();
        world.leaving.extend(stray);
        world.held.clear();
        world.settle();
    }
}

#[test]
fn what_is_held_back_says_when_it_goes_on() {
    let (key, wanted) = volume(0, 2);
    let mut world = World::default();
    world.volumes.insert(
        key.clone(),
        record(&wanted.path, None, VolumePhase::Mounting, false),
    );
    world.wanted.insert(key.clone(), wanted);
    world.held.insert(key.clone(), stamp(500));
    let waiting = plan(&world.facts());
    assert_eq!((waiting.steps, waiting.due), (vec![], Some(stamp(500))));
    world.now = 500;
    let going = plan(&world.facts());
    assert_eq!(going.steps, [Step::Publish { volume: key }]);
    assert_eq!(going.due, None);
}

#[test]
fn nothing_is_unstaged_while_a_description_cannot_be_read() {
    let mut world = World::default();
    let staged = record("/staged", None, VolumePhase::Mounted, true);
    world.devices.insert("device/d".to_owned(), staged);
    let mut facts = world.facts();
    let device = "device/d".to_owned();
    assert_eq!(plan(&facts).steps, [Step::Unstage { device }]);
    facts.unreadable = true;
    assert_eq!(plan(&facts).steps, []);
}

// Invariant VOL-6.
#[test]
fn a_device_that_is_mounted_for_a_pod_is_not_unstaged_and_looked_at_again() {
    let mut world = World::default();
    let staged = record("/staged", None, VolumePhase::Mounted, true);
    world.devices.insert("device/d".to_owned(), staged);
    let mut facts = world.facts();
    facts.in_use.insert("device/d".to_owned());
    let found = plan(&facts);
    assert_eq!(found.steps, []);
    assert_eq!(found.due, Some(facts.now.plus(RECHECK)));
}

#[test]
fn a_device_whose_unstaging_was_begun_is_staged_again_when_somebody_may_use_it() {
    let mut world = World::default();
    let (key, mut wanted) = volume(0, 0);
    wanted.device = Some("device/d".to_owned());
    let device = wanted.device.clone();
    let claimed = record(
        &wanted.path,
        device.as_deref(),
        VolumePhase::Mounting,
        false,
    );
    world.volumes.insert(key.clone(), claimed);
    world.wanted.insert(key.clone(), wanted);
    let staged = record("/staged", None, VolumePhase::Unmounting, true);
    world.devices.insert("device/d".to_owned(), staged);
    let mut facts = world.facts();
    let device = "device/d".to_owned();
    let unstage = Step::Unstage {
        device: device.clone(),
    };
    assert_eq!(plan(&facts).steps, [unstage]);
    let stage = [Step::Stage {
        device: device.clone(),
        volume: key,
    }];
    facts.in_use.insert(device);
    assert_eq!(plan(&facts).steps, stage);
    facts.in_use.clear();
    facts.unreadable = true;
    assert_eq!(plan(&facts).steps, stage);
}

/// Two volumes of a pod that lead to one target, without a device, in this phase.
fn twins(phase: VolumePhase, begun: bool) -> World {
    let mut world = World::default();
    for name in [1, 3] {
        let (key, mut wanted) = volume(0, name);
        wanted.device = None;
        let recorded = record(&wanted.path, None, phase, begun);
        world.volumes.insert(key.clone(), recorded);
        world.wanted.insert(key, wanted);
    }
    world
}

// Invariant VOL-4.
#[test]
fn of_two_that_lead_to_one_target_the_first_does_the_work() {
    let [first, second] = ["u0/1", "u0/3"].map(str::to_owned);
    let world = twins(VolumePhase::Mounting, false);
    let publish = Step::Publish {
        volume: first.clone(),
    };
    assert_eq!(plan(&world.facts()).steps, [publish]);

    let mut world = twins(VolumePhase::Mounted, true);
    world.leaving = [first.clone(), second.clone()].into();
    world.wanted.clear();
    let last = [
        Step::Unpublish {
            volume: first.clone(),
        },
        Step::Drop { volume: second },
    ];
    let mut steps = plan(&world.facts()).steps;
    steps.sort_unstable_by_key(|step| matches!(step, Step::Drop { .. }));
    assert_eq!(steps, last);

    // While the other one stays, the target does.
    let mut world = twins(VolumePhase::Mounted, true);
    world.leaving = [first.clone()].into();
    world.wanted.remove(&first);
    let mut facts = world.facts();
    facts.mounted.insert("/pods/u0/b".to_owned());
    assert_eq!(plan(&facts).steps, [Step::Drop { volume: first }]);
}

#[test]
fn an_end_is_held_up_by_its_own_failures_alone() {
    let (key, wanted) = volume(0, 2);
    let mut world = World::default();
    let leaving = record(&wanted.path, None, VolumePhase::Unmounting, true);
    world.volumes.insert(key.clone(), leaving);
    world.leaving.insert(key.clone());
    let end = [Step::Unpublish {
        volume: key.clone(),
    }];
    for other in [key.clone(), "u1/2 undo".to_owned()] {
        world.held = [(other, stamp(500))].into();
        assert_eq!(plan(&world.facts()).steps, end);
    }
    world.held = [(format!("{key} undo"), stamp(500))].into();
    assert_eq!(plan(&world.facts()).steps, []);
}

#[test]
fn the_next_look_is_when_the_first_of_those_that_are_held_may_go_on() {
    for times in [[300, 500], [500, 300]] {
        let mut world = World::default();
        for (pod, at) in times.into_iter().enumerate() {
            let (key, wanted) = volume(pod, 2);
            let claimed = record(&wanted.path, None, VolumePhase::Mounting, false);
            world.volumes.insert(key.clone(), claimed);
            world.wanted.insert(key.clone(), wanted);
            world.held.insert(key, stamp(at));
        }
        assert_eq!(plan(&world.facts()).due, Some(stamp(300)));
    }
}
