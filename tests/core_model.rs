//! Drives the decisions of `core` against a naive model of a runtime, with a crash before every effect.
//!
//! The model keeps the truth (every run of every container) and judges each start; it shares no code with
//! what it judges.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "a test"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use holdfast::core::container_history::{Records, observe_exits, record_end, start_record};
use holdfast::core::pod_actions::{self, KillReason, PodActionInput, ProbeFailure};
use holdfast::core::pod_status::{self, Stage, StatusInput};
use holdfast::core::state::{ContainerRecord, IntentRecord, State, Transaction, child_key};
use holdfast::types::runtime::{
    ContainerState, ContainerStatus, PodStatus, SandboxState, SandboxStatus,
};
use holdfast::types::{BootId, ContainerId, PodUid, Stamp};
use k8s_openapi::api::core::v1 as api;
use proptest::prelude::*;

const UID: &str = "uid-1";

#[derive(Clone, Debug)]
enum Event {
    /// Containers of that index end with a code.
    Exit(usize, i32),
    /// A running container disappears, and with it its end.
    Vanish(usize),
    /// The runtime forgets ended containers of that index.
    Forget(usize),
    /// The runtime cannot tell whether a container runs.
    Unknown(usize),
    /// The sandbox stops.
    SandboxDies,
    /// Everything in the runtime is gone.
    Wipe,
    /// The image in the spec changes.
    NewImage(usize),
    /// The liveness probe fails.
    Unhealthy(usize),
    /// The wall clock jumps by hours.
    WallJump(i64),
    /// Time passes, in seconds.
    Pass(i64),
}

#[derive(Clone, Debug)]
struct Case {
    policy: &'static str,
    containers: usize,
    /// Events, and before which effect the sync after each crashes.
    steps: Vec<(Event, Option<u8>)>,
}

fn event() -> impl Strategy<Value = Event> {
    let i = 0..3_usize;
    prop_oneof![
        4 => (i.clone(), prop_oneof![Just(0), Just(1), Just(3)]).prop_map(|(i, c)| Event::Exit(i, c)),
        1 => i.clone().prop_map(Event::Vanish),
        2 => i.clone().prop_map(Event::Forget),
        1 => i.clone().prop_map(Event::Unknown),
        1 => Just(Event::SandboxDies),
        1 => Just(Event::Wipe),
        1 => i.clone().prop_map(Event::NewImage),
        1 => i.prop_map(Event::Unhealthy),
        1 => (-20..20_i64).prop_map(Event::WallJump),
        4 => prop_oneof![0..15_i64, 15..400_i64, 400..2000_i64].prop_map(Event::Pass),
    ]
}

fn case() -> impl Strategy<Value = Case> {
    (
        prop_oneof![Just("Always"), Just("OnFailure"), Just("Never")],
        1..4_usize,
        prop::collection::vec((event(), prop::option::weighted(0.6, 0..14_u8)), 0..16),
    )
        .prop_map(|(policy, containers, steps)| Case {
            policy,
            containers,
            steps,
        })
}

/// A run of a container, as it really was.
#[derive(Clone, Debug)]
struct Run {
    id: String,
    attempt: u32,
    running: bool,
    exit: Option<i32>,
    finished_ms: i64,
    /// The agent has committed this end.
    recorded: bool,
}

struct Crash;

struct World {
    policy: &'static str,
    images: Vec<u32>,
    containers: Vec<ContainerStatus>,
    sandboxes: Vec<SandboxStatus>,
    truth: BTreeMap<String, Vec<Run>>,
    started_ids: BTreeSet<String>,
    /// Containers whose start was committed, by name.
    intents: BTreeMap<String, BTreeSet<ContainerId>>,
    unhealthy: BTreeSet<String>,
    /// Stopped in this sync for a changed spec.
    replaced: BTreeSet<String>,
    store: State,
    version: u64,
    boottime_ms: i64,
    wall_offset_ms: i64,
    next_id: u32,
    budget: Option<u8>,
    terminal: bool,
    status: Option<api::PodStatus>,
    /// The runtime lost everything at least once.
    wiped: bool,
    /// Nothing but exits and time happened, so that the back-off can be checked.
    plain: bool,
    backoff: BTreeMap<String, (i64, i64)>,
}

fn name(i: usize) -> String {
    format!("c{i}")
}

impl World {
    fn new(case: &Case) -> Self {
        Self {
            policy: case.policy,
            images: vec![0; case.containers],
            containers: Vec::new(),
            sandboxes: Vec::new(),
            truth: (0..case.containers)
                .map(|i| (name(i), Vec::new()))
                .collect(),
            started_ids: BTreeSet::new(),
            intents: BTreeMap::new(),
            unhealthy: BTreeSet::new(),
            replaced: BTreeSet::new(),
            store: State::default(),
            version: 0,
            boottime_ms: 1_000_000,
            wall_offset_ms: 1_700_000_000_000,
            next_id: 0,
            budget: None,
            terminal: false,
            status: None,
            wiped: false,
            plain: case.steps.iter().all(|(event, crash)| {
                crash.is_none() && matches!(event, Event::Exit(..) | Event::Pass(_))
            }),
            backoff: BTreeMap::new(),
        }
    }

    fn now(&self) -> Stamp {
        Stamp {
            boot: BootId(7),
            boottime_ms: self.boottime_ms,
            wall_ms: self.wall_offset_ms + self.boottime_ms,
        }
    }

    fn wall_ns(&self) -> i64 {
        self.now().wall_ms * 1_000_000
    }

    fn pod(&self) -> api::Pod {
        let container = |(i, image): (usize, &u32)| api::Container {
            name: name(i),
            image: Some(format!("img:{image}")),
            ..api::Container::default()
        };
        let mut pod = api::Pod::default();
        pod.metadata.name = Some("p".into());
        pod.metadata.namespace = Some("ns".into());
        pod.metadata.uid = Some(UID.into());
        pod.spec = Some(api::PodSpec {
            restart_policy: Some(self.policy.into()),
            containers: self.images.iter().enumerate().map(container).collect(),
            ..api::PodSpec::default()
        });
        pod
    }

    fn image_of(&self, of: &str) -> String {
        let found = (0..self.images.len()).find(|i| name(*i) == of);
        format!("img:{}", self.images[found.expect("in the spec")])
    }

    fn list(&self) -> PodStatus {
        let mut status = PodStatus::empty(PodUid::new(UID));
        status.containers = self.containers.clone();
        status.sandboxes = self.sandboxes.clone();
        status.ips = vec!["10.0.0.1".into()];
        status.sort();
        status
    }

    /// Every effect passes here first; the crash comes before it.
    fn effect(&mut self) -> Result<(), Crash> {
        self.boottime_ms += 1;
        match &mut self.budget {
            Some(0) => Err(Crash),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn commit(&mut self, transaction: Transaction) -> Result<(), Crash> {
        if transaction.is_empty() {
            return Ok(());
        }
        self.effect()?;
        assert!(
            transaction.stale_on(&self.store).is_none(),
            "stale decision"
        );
        let counts = self.counts();
        self.version += 1;
        for mutation in &transaction.mutations {
            self.store.apply(mutation, self.version);
        }
        for (name, count) in self.counts() {
            assert!(
                counts.get(&name).is_none_or(|before| *before <= count),
                "restart count of {name} went back to {count}"
            );
        }
        for (name, runs) in &mut self.truth {
            let record = self
                .store
                .record::<ContainerRecord>(&child_key(&UID.into(), name));
            let exit = record.and_then(|r| r.last_exit.as_ref());
            for run in runs {
                run.recorded |=
                    exit.is_some_and(|e| !e.inferred && e.container_id.as_str() == run.id);
            }
        }
        Ok(())
    }

    fn counts(&self) -> BTreeMap<String, u32> {
        self.truth
            .keys()
            .filter_map(|name| {
                let record = self
                    .store
                    .record::<ContainerRecord>(&child_key(&UID.into(), name))?;
                Some((name.clone(), record.restart_count))
            })
            .collect()
    }

    fn end(&mut self, id: &str, code: i32) {
        let wall_ns = self.wall_ns();
        let Some(container) = self.containers.iter_mut().find(|c| c.id.as_str() == id) else {
            return;
        };
        if !matches!(
            container.state,
            ContainerState::Running | ContainerState::Unknown
        ) {
            return;
        }
        container.state = ContainerState::Exited;
        container.exit_code = code;
        container.finished_at_ns = wall_ns;
        self.end_truth(id, code);
    }

    fn end_truth(&mut self, id: &str, code: i32) {
        for run in self
            .truth
            .values_mut()
            .flatten()
            .filter(|r| r.id == id && r.running)
        {
            run.running = false;
            run.exit = Some(code);
            run.finished_ms = self.boottime_ms;
        }
    }

    fn remove(&mut self, id: &ContainerId) {
        self.end_truth(id.as_str(), 137);
        self.containers.retain(|c| c.id != *id);
    }

    fn happen(&mut self, event: &Event) {
        let named = |i: &usize| name(*i % self.images.len());
        let of = |world: &Self, i: &usize, states: &[ContainerState]| -> Vec<ContainerId> {
            let name = name(*i % world.images.len());
            let all = world.containers.iter();
            all.filter(|c| c.name == name && states.contains(&c.state))
                .map(|c| c.id.clone())
                .collect()
        };
        match event {
            Event::Exit(i, code) => {
                for id in of(self, i, &[ContainerState::Running]) {
                    self.end(id.as_str(), *code);
                }
            }
            Event::Vanish(i) => {
                for id in of(self, i, &[ContainerState::Running, ContainerState::Unknown]) {
                    self.remove(&id);
                }
            }
            Event::Forget(i) => {
                for id in of(self, i, &[ContainerState::Exited]) {
                    self.remove(&id);
                }
            }
            Event::Unknown(i) => {
                for id in of(self, i, &[ContainerState::Running]) {
                    let found = self.containers.iter_mut().find(|c| c.id == id);
                    found.unwrap().state = ContainerState::Unknown;
                }
            }
            Event::SandboxDies => {
                for sandbox in &mut self.sandboxes {
                    sandbox.state = SandboxState::NotReady;
                }
            }
            Event::Wipe => {
                for id in self
                    .containers
                    .iter()
                    .map(|c| c.id.clone())
                    .collect::<Vec<_>>()
                {
                    self.remove(&id);
                }
                self.sandboxes.clear();
                self.wiped = true;
            }
            Event::NewImage(i) => {
                let i = *i % self.images.len();
                self.images[i] += 1;
            }
            Event::Unhealthy(i) => {
                let name = named(i);
                self.unhealthy.insert(name);
            }
            Event::WallJump(hours) => self.wall_offset_ms += hours * 3_600_000,
            Event::Pass(seconds) => self.boottime_ms += seconds * 1000,
        }
    }

    /// One sync, as an executor does it. `Err` = the agent died on the way.
    fn sync(&mut self) -> Result<pod_actions::PodActions, Crash> {
        self.replaced.clear();
        let uid = PodUid::new(UID);
        let listed_at = self.now();
        self.boottime_ms += 1;
        let status = self.list();
        let now = self.now();
        let exits = observe_exits(&self.store, &uid, &status, listed_at, now);
        self.commit(exits)?;

        let pod = self.pod();
        let store = self.store.clone();
        let records = Records::of(&store, &uid);
        self.check_status(&pod, &status, &records, listed_at);
        if self.terminal {
            for container in &status.containers {
                self.effect()?;
                self.end(container.id.as_str(), 137);
            }
            for sandbox in &mut self.sandboxes {
                sandbox.state = SandboxState::NotReady;
            }
            return Ok(pod_actions::PodActions::default());
        }
        let probe_failures: BTreeMap<_, _> = self
            .unhealthy
            .iter()
            .map(|name| (name.clone(), ProbeFailure::Liveness))
            .collect();
        let actions = pod_actions::compute(&PodActionInput {
            pod: &pod,
            status: &status,
            records: &records,
            probe_failures: &probe_failures,
            listed_at,
            now: self.now(),
            backoff_max: Duration::from_secs(300),
        });
        self.execute(&status, &actions)?;
        Ok(actions)
    }

    fn execute(
        &mut self,
        status: &PodStatus,
        actions: &pod_actions::PodActions,
    ) -> Result<(), Crash> {
        let uid = PodUid::new(UID);
        if actions.kill_pod.is_some() {
            for container in &status.containers {
                self.effect()?;
                self.end(container.id.as_str(), 137);
            }
            self.effect()?;
            for sandbox in &mut self.sandboxes {
                sandbox.state = SandboxState::NotReady;
            }
        }
        for kill in &actions.kill {
            self.effect()?;
            self.end(kill.id.as_str(), 143);
            self.unhealthy.remove(&kill.name);
            if kill.reason == KillReason::SpecChanged {
                self.replaced.insert(kill.name.clone());
            }
        }
        for id in &actions.remove_created {
            let end = record_end(&self.store, &uid, status, id, self.now());
            self.commit(end)?;
            self.effect()?;
            self.remove(id);
        }
        let sandbox = match actions.create_sandbox {
            None => actions.sandbox_id.clone(),
            Some(attempt) => {
                self.effect()?;
                assert!(
                    self.sandboxes.iter().all(|s| s.attempt != attempt),
                    "sandbox name is taken"
                );
                assert!(
                    self.sandboxes
                        .iter()
                        .all(|s| s.state == SandboxState::NotReady),
                    "a second sandbox beside a ready one"
                );
                let id = self.fresh_id("s");
                self.sandboxes.push(SandboxStatus {
                    id: id.clone(),
                    attempt,
                    state: SandboxState::Ready,
                    created_at_ns: self.boottime_ms,
                    ips: vec!["10.0.0.1".into()],
                    host_network: Some(false),
                    runtime_handler: String::new(),
                });
                Some(id)
            }
        };
        for start in &actions.start {
            let sandbox = sandbox.clone().expect("a start needs a sandbox");
            let id = match &start.adopt {
                Some(id) => id.clone(),
                None => {
                    self.effect()?;
                    self.create(&start.name, start.attempt, &start.hash, sandbox)
                }
            };
            let key = child_key(&uid, &start.name);
            let intent = IntentRecord {
                container_id: id.clone(),
                attempt: start.attempt,
                hash: start.hash.clone(),
                at: self.now(),
            };
            let record = start_record(self.store.record(&key), intent, start.backoff);
            self.commit(
                Transaction::new()
                    .expect::<ContainerRecord>(&self.store, &key)
                    .put(&key, record),
            )?;
            self.intents
                .entry(start.name.clone())
                .or_default()
                .insert(id.clone());
            self.effect()?;
            self.start(&id);
        }
        Ok(())
    }

    fn fresh_id(&mut self, kind: &str) -> ContainerId {
        self.next_id += 1;
        ContainerId::from(format!("{kind}{}", self.next_id))
    }

    fn create(
        &mut self,
        name: &str,
        attempt: u32,
        hash: &str,
        sandbox_id: ContainerId,
    ) -> ContainerId {
        let taken = |c: &&ContainerStatus| c.name == name && c.attempt == attempt;
        assert!(
            self.containers.iter().find(taken).is_none(),
            "name {name} attempt {attempt} is taken in the runtime"
        );
        let id = self.fresh_id("k");
        self.containers.push(ContainerStatus {
            id: id.clone(),
            name: name.to_owned(),
            attempt,
            sandbox_id,
            state: ContainerState::Created,
            created_at_ns: self.boottime_ms,
            image: self.image_of(name),
            image_ref: "sha".into(),
            hash: hash.to_owned(),
            started_at_ns: 0,
            finished_at_ns: 0,
            exit_code: 0,
            reason: String::new(),
            message: String::new(),
            log_path: String::new(),
        });
        id
    }

    /// StartContainer: the judge of everything.
    fn start(&mut self, id: &ContainerId) {
        let (wall_ns, now_ms) = (self.wall_ns(), self.boottime_ms);
        assert!(!self.terminal, "started {id} of a finished pod");
        assert!(
            self.started_ids.insert(id.to_string()),
            "{id} started twice"
        );
        let container = self
            .containers
            .iter_mut()
            .find(|c| c.id == *id)
            .expect("exists");
        assert_eq!(container.state, ContainerState::Created);
        container.state = ContainerState::Running;
        container.started_at_ns = wall_ns;
        let container = container.clone();
        let name = &container.name;
        assert_eq!(
            container.image,
            self.image_of(name),
            "{name} started with an old image"
        );
        let sandbox = self.sandboxes.iter().find(|s| s.id == container.sandbox_id);
        assert!(
            sandbox.is_some_and(|s| s.state == SandboxState::Ready),
            "{name} started in a sandbox that is not ready"
        );
        let in_runtime = |id: &str| self.containers.iter().any(|c| c.id.as_str() == id);
        let runs = &self.truth[name];
        assert!(runs.iter().all(|r| !r.running), "{name} runs twice");
        if let Some(last) = runs.last() {
            assert!(
                container.attempt > last.attempt,
                "{name}: attempt {} after {}",
                container.attempt,
                last.attempt
            );
            let known_success = last.exit == Some(0) && (last.recorded || in_runtime(&last.id));
            let replaced = self.replaced.contains(name);
            match self.policy {
                "Never" => assert!(replaced, "{name} ran again in spite of policy Never"),
                "OnFailure" => assert!(
                    !known_success || replaced,
                    "{name} ran again after a success"
                ),
                _ => {}
            }
            if self.plain {
                let finished = last.finished_ms;
                // Milliseconds pass while the model's syncs work.
                let entry = self.backoff.get(name).copied();
                let next = match entry.filter(|(_, at)| finished - at <= 600_000) {
                    None => 10_000,
                    Some((length, _)) => {
                        assert!(
                            now_ms - finished >= length,
                            "{name} started {length} ms back-off too early"
                        );
                        (length * 2).min(300_000)
                    }
                };
                self.backoff.insert(name.clone(), (next, now_ms));
            }
        }
        // A count may not run ahead of the starts that were decided.
        let decided = self.intents.get(name).map_or(0, BTreeSet::len);
        assert!(
            (container.attempt as usize) < decided,
            "{name}: attempt {} after {decided} decided starts",
            container.attempt
        );
        self.truth.get_mut(name).unwrap().push(Run {
            id: id.to_string(),
            attempt: container.attempt,
            running: true,
            exit: None,
            finished_ms: 0,
            recorded: false,
        });
    }

    fn check_status(
        &mut self,
        pod: &api::Pod,
        status: &PodStatus,
        records: &Records<'_>,
        listed_at: Stamp,
    ) {
        let input = StatusInput {
            pod,
            status,
            records,
            previous: self.status.as_ref(),
            reasons: &BTreeMap::new(),
            probes: &BTreeMap::new(),
            host_ips: &["192.0.2.1".to_owned()],
            runtime_name: "containerd",
            stage: Stage::Syncing,
            evicted: None,
            listed_at,
            now: self.now(),
            backoff_max: Duration::from_secs(300),
        };
        let new = pod_status::generate(&input);
        for container in new.container_statuses.iter().flatten() {
            let before = self
                .status
                .iter()
                .flat_map(|s| s.container_statuses.iter().flatten());
            for old in before.filter(|s| s.name == container.name) {
                assert!(
                    container.restart_count >= old.restart_count,
                    "API restart count went back"
                );
            }
            let running = container
                .state
                .as_ref()
                .is_some_and(|s| s.running.is_some());
            let really = self.truth[&container.name].iter().any(|r| r.running);
            assert!(
                !running || really,
                "{} is reported running and is not",
                container.name
            );
            if let Some(end) = container.state.as_ref().and_then(|s| s.terminated.as_ref()) {
                let of = |r: &&Run| end.container_id == Some(format!("containerd://{}", r.id));
                let run = self.truth[&container.name].iter().find(of);
                if let Some(run) = run.filter(|r| r.recorded) {
                    assert_eq!(
                        Some(end.exit_code),
                        run.exit,
                        "exit code of {}",
                        container.name
                    );
                }
            }
        }
        if pod_status::is_terminal(&new) {
            for (name, runs) in &self.truth {
                assert!(runs.iter().all(|r| !r.running), "finished pod, {name} runs");
            }
            if new.phase.as_deref() == Some("Succeeded") {
                let failed = |r: &Run| r.recorded && r.exit != Some(0);
                let ends = self.truth.values().filter_map(|runs| runs.last());
                assert!(!ends.into_iter().any(failed), "Succeeded after a failure");
            }
            self.terminal = true;
        } else {
            assert!(!self.terminal, "left a terminal phase");
        }
        match pod_status::merge_for_update(pod, self.status.as_ref(), new) {
            Ok(None) => {}
            Ok(Some(merged)) => self.status = Some(merged),
            // A changed spec runs again whatever the policy; the API is told of the new run only.
            Err(refused) => assert!(
                self.images.iter().any(|i| *i > 0),
                "status refused without a changed spec: {refused}"
            ),
        }
    }

    /// Nothing happens any more: the pod must come to rest, and rest must be what its policy asks for.
    fn settle(&mut self) {
        self.budget = None;
        for _ in 0..8 {
            self.boottime_ms += 301_000;
            if self.sync().is_err() {
                panic!("crash without a crash point");
            }
        }
        let Ok(actions) = self.sync() else {
            panic!("crash without a crash point");
        };
        assert!(actions.is_empty(), "does not come to rest: {actions:?}");
        assert!(
            self.terminal
                || self
                    .containers
                    .iter()
                    .all(|c| c.state != ContainerState::Created),
            "a created container is left"
        );
        for (name, runs) in &self.truth {
            let running = runs.iter().filter(|r| r.running).count();
            match self.policy {
                "Always" => assert_eq!(running, 1, "{name} should run"),
                "OnFailure" => {
                    let succeeded = runs.last().is_some_and(|r| r.exit == Some(0));
                    assert!(
                        running == 1 || succeeded || self.terminal,
                        "{name} should run: {runs:?}"
                    );
                }
                _ => assert!(running <= 1),
            }
        }
        let current = |c: &ContainerStatus| c.image == self.image_of(&c.name);
        assert!(
            self.containers
                .iter()
                .all(|c| c.state != ContainerState::Running || current(c)),
            "runs an old image"
        );
        let ever_ran = self.truth.values().any(|runs| !runs.is_empty());
        assert!(
            ever_ran || self.wiped,
            "nothing was lost, and yet nothing ever ran"
        );
        let any_running = self.truth.values().flatten().any(|r| r.running);
        let ready = self
            .sandboxes
            .iter()
            .any(|s| s.state == SandboxState::Ready);
        assert_eq!(
            any_running, ready,
            "a sandbox is there exactly while something runs"
        );
        if self.policy == "Never" && !any_running {
            assert!(
                self.terminal,
                "nothing runs, nothing will, and the pod is not finished: {:?}",
                self.status
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, rng_seed: proptest::test_runner::RngSeed::Fixed(36), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn decisions_survive_crashes_and_never_break_the_restart_policy(case in case()) {
        let mut world = World::new(&case);
        for (event, crash) in &case.steps {
            world.budget = *crash;
            let crashed = world.sync().is_err();
            prop_assert!(!crashed || crash.is_some());
            world.budget = None;
            world.happen(event);
        }
        world.settle();
    }
}

#[test]
fn every_single_crash_point_of_a_restart_is_survived() {
    for policy in ["Always", "OnFailure", "Never"] {
        for code in [0, 1] {
            for first in 0..10 {
                for second in 0..10 {
                    let case = Case {
                        policy,
                        containers: 2,
                        steps: vec![
                            (Event::Pass(1), Some(first)),
                            (Event::Exit(0, code), None),
                            (Event::Forget(0), Some(second)),
                            (Event::Pass(20), Some(second)),
                        ],
                    };
                    drive(&case);
                }
            }
        }
    }
}

fn drive(case: &Case) {
    let mut world = World::new(case);
    for (event, crash) in &case.steps {
        world.budget = *crash;
        assert!(world.sync().is_ok() || crash.is_some());
        world.budget = None;
        world.happen(event);
    }
    world.settle();
}

#[test]
fn a_start_that_was_decided_and_not_made_is_made_whatever_is_crashed_into() {
    for event in [Event::SandboxDies, Event::NewImage(0), Event::Pass(1)] {
        for first in 0..8 {
            for second in 0..12 {
                drive(&Case {
                    policy: "Never",
                    containers: 1,
                    steps: vec![(event.clone(), Some(first)), (Event::Pass(1), Some(second))],
                });
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, rng_seed: proptest::test_runner::RngSeed::Fixed(37), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn crash_back_off_is_what_a_naive_count_makes_it(
        runs in prop::collection::vec((prop_oneof![0..30_i64, 500..700_i64], 0..400_i64, 0..2_i32), 1..12)
    ) {
        // Runs for a while, ends, and is looked at again early (twice) and late.
        let mut steps = vec![(Event::Pass(1), None)];
        for (ran, wait, code) in runs {
            steps.push((Event::Pass(ran), None));
            steps.push((Event::Exit(0, code), None));
            steps.push((Event::Pass(wait / 2), None));
            steps.push((Event::Pass(wait - wait / 2), None));
        }
        let case = Case { policy: "Always", containers: 1, steps };
        prop_assert!(World::new(&case).plain);
        drive(&case);
    }
}
