//! The naive runtime and the truth about every run of every container; each start is judged here.

use std::collections::{BTreeMap, BTreeSet};

use crate::case::{Case, Event, Kind, Spec, UID};
use crate::judge;
use holdfast::core::state::{ContainerRecord, State, Transaction, child_key};
use holdfast::types::runtime::{
    ContainerState, ContainerStatus, PodStatus, SandboxState, SandboxStatus,
};
use holdfast::types::{BootId, ContainerId, PodUid, Stamp};
use k8s_openapi::api::core::v1 as api;

/// A run of a container, as it really was.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) id: String,
    pub(crate) attempt: u32,
    /// Sandbox it ran in.
    pub(crate) sandbox: String,
    pub(crate) started_ms: i64,
    pub(crate) running: bool,
    pub(crate) exit: Option<i32>,
    pub(crate) finished_ms: i64,
    /// The agent has committed this end.
    pub(crate) recorded: bool,
}

pub(crate) struct Crash;

pub(crate) struct World {
    pub(crate) policy: &'static str,
    pub(crate) specs: Vec<Spec>,
    pub(crate) images: Vec<u32>,
    pub(crate) containers: Vec<ContainerStatus>,
    pub(crate) sandboxes: Vec<SandboxStatus>,
    pub(crate) truth: BTreeMap<String, Vec<Run>>,
    pub(crate) started_ids: BTreeSet<String>,
    /// Containers whose start was committed, by name.
    pub(crate) intents: BTreeMap<String, BTreeSet<ContainerId>>,
    pub(crate) unhealthy: BTreeSet<String>,
    pub(crate) stillborn: BTreeSet<String>,
    /// Containers whose hook is known to have completed.
    pub(crate) hooked: BTreeSet<String>,
    /// Stopped in this sync for a changed spec.
    pub(crate) replaced: BTreeSet<String>,
    pub(crate) store: State,
    pub(crate) version: u64,
    pub(crate) boottime_ms: i64,
    pub(crate) wall_offset_ms: i64,
    pub(crate) next_id: u32,
    pub(crate) budget: Option<u8>,
    /// Statuses are made, judged and followed: a finished pod is stopped.
    pub(crate) told: bool,
    pub(crate) terminal: bool,
    pub(crate) status: Option<api::PodStatus>,
    /// The runtime lost everything at least once.
    pub(crate) wiped: bool,
    /// Nothing but exits and time happened, so that the back-off can be checked.
    pub(crate) plain: bool,
    pub(crate) backoff: BTreeMap<String, (i64, i64)>,
}

pub(crate) fn name(i: usize) -> String {
    format!("c{i}")
}

impl World {
    pub(crate) fn new(case: &Case) -> Self {
        Self {
            policy: case.policy,
            specs: case.containers.clone(),
            images: vec![0; case.containers.len()],
            containers: Vec::new(),
            sandboxes: Vec::new(),
            truth: (0..case.containers.len())
                .map(|i| (name(i), Vec::new()))
                .collect(),
            started_ids: BTreeSet::new(),
            intents: BTreeMap::new(),
            unhealthy: BTreeSet::new(),
            stillborn: BTreeSet::new(),
            hooked: BTreeSet::new(),
            replaced: BTreeSet::new(),
            store: State::default(),
            version: 0,
            boottime_ms: 1_000_000,
            wall_offset_ms: 1_700_000_000_000,
            next_id: 0,
            budget: None,
            told: true,
            terminal: false,
            status: None,
            wiped: false,
            plain: case.containers.iter().all(Spec::is_simple)
                && case.steps.iter().all(|(event, crash)| {
                    crash.is_none() && matches!(event, Event::Exit(..) | Event::Pass(_))
                }),
            backoff: BTreeMap::new(),
        }
    }

    pub(crate) fn now(&self) -> Stamp {
        Stamp {
            boot: BootId(7),
            boottime_ms: self.boottime_ms,
            wall_ms: self.wall_offset_ms + self.boottime_ms,
        }
    }

    pub(crate) fn wall_ns(&self) -> i64 {
        self.now().wall_ms * 1_000_000
    }

    pub(crate) fn pod(&self) -> api::Pod {
        let mut pod = api::Pod::default();
        pod.metadata.name = Some("p".into());
        pod.metadata.namespace = Some("ns".into());
        pod.metadata.uid = Some(UID.into());
        pod.spec = Some(api::PodSpec {
            restart_policy: Some(self.policy.into()),
            containers: self.containers_of(|k| k == Kind::Main),
            init_containers: Some(self.containers_of(|k| matches!(k, Kind::Init | Kind::Sidecar))),
            ephemeral_containers: Some(
                self.containers_of(|k| k == Kind::Ephemeral)
                    .into_iter()
                    .map(|c| api::EphemeralContainer {
                        name: c.name,
                        image: c.image,
                        ..api::EphemeralContainer::default()
                    })
                    .collect(),
            ),
            ..api::PodSpec::default()
        });
        pod
    }

    fn containers_of(&self, wanted: impl Fn(Kind) -> bool) -> Vec<api::Container> {
        let all = self.specs.iter().enumerate();
        all.filter(|(_, spec)| wanted(spec.kind))
            .map(|(i, spec)| api::Container {
                name: name(i),
                image: Some(format!("img:{}", self.images[i])),
                restart_policy: match spec.kind {
                    Kind::Sidecar => Some("Always".into()),
                    _ => spec.policy.map(str::to_owned),
                },
                restart_policy_rules: spec.rule.as_ref().map(|(operator, codes)| {
                    vec![api::ContainerRestartRule {
                        action: "Restart".into(),
                        exit_codes: Some(api::ContainerRestartRuleOnExitCodes {
                            operator: (*operator).into(),
                            values: Some(codes.clone()),
                        }),
                    }]
                }),
                startup_probe: spec.probe.then(api::Probe::default),
                lifecycle: spec.hook.then(|| api::Lifecycle {
                    post_start: Some(api::LifecycleHandler::default()),
                    ..api::Lifecycle::default()
                }),
                ..api::Container::default()
            })
            .collect()
    }

    pub(crate) fn spec_of(&self, of: &str) -> &Spec {
        let found = (0..self.specs.len()).find(|i| name(*i) == of);
        &self.specs[found.expect("in the spec")]
    }

    /// What the startup probe of a running container says.
    pub(crate) fn has_started(&self, name: &str) -> bool {
        let run = self.truth[name].last();
        !self.stillborn.contains(name)
            && run.is_some_and(|r| r.running && self.boottime_ms - r.started_ms > 5000)
    }

    pub(crate) fn image_of(&self, of: &str) -> String {
        let found = (0..self.images.len()).find(|i| name(*i) == of);
        format!("img:{}", self.images[found.expect("in the spec")])
    }

    pub(crate) fn list(&self) -> PodStatus {
        let mut status = PodStatus::empty(PodUid::new(UID));
        status.containers = self.containers.clone();
        status.sandboxes = self.sandboxes.clone();
        status.ips = vec!["10.0.0.1".into()];
        status.sort();
        status
    }

    /// Every effect passes here first; the crash comes before it.
    pub(crate) fn effect(&mut self) -> Result<(), Crash> {
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

    pub(crate) fn commit(&mut self, transaction: Transaction) -> Result<(), Crash> {
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

    pub(crate) fn counts(&self) -> BTreeMap<String, u32> {
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

    pub(crate) fn end(&mut self, id: &str, code: i32) {
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

    pub(crate) fn end_truth(&mut self, id: &str, code: i32) {
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

    pub(crate) fn remove(&mut self, id: &ContainerId) {
        self.end_truth(id.as_str(), 137);
        self.containers.retain(|c| c.id != *id);
    }

    pub(crate) fn happen(&mut self, event: &Event) {
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
            Event::Stillborn(i) => {
                let name = named(i);
                if self.spec_of(&name).probe && !self.has_started(&name) {
                    self.stillborn.insert(name);
                }
            }
            Event::WallJump(hours) => self.wall_offset_ms += hours * 3_600_000,
            Event::Pass(seconds) => self.boottime_ms += seconds * 1000,
        }
    }

    pub(crate) fn fresh_id(&mut self, kind: &str) -> ContainerId {
        self.next_id += 1;
        ContainerId::from(format!("{kind}{}", self.next_id))
    }

    pub(crate) fn create(
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
            user: None,
        });
        id
    }

    /// StartContainer: the judge of everything.
    pub(crate) fn start(&mut self, id: &ContainerId) {
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
            // What a wipe takes along may have run, for all the agent knows.
            assert!(
                self.wiped || container.attempt == last.attempt + 1,
                "{name}: attempt {} after {}, with nothing in between that may have run",
                container.attempt,
                last.attempt
            );
            let known = last.recorded || in_runtime(&last.id);
            let exit = if known { last.exit } else { None };
            let last = judge::Last {
                exit: exit.unwrap_or(137),
                same_sandbox: last.sandbox == container.sandbox_id.as_str(),
            };
            let replaced = self.replaced.contains(name);
            judge::restart(self.policy, self.spec_of(name), name, last, replaced);
            let last = self.truth[name].last().expect("it ran");
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
        judge::order(self, name, container.sandbox_id.as_str());
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
            sandbox: container.sandbox_id.to_string(),
            started_ms: now_ms,
            running: true,
            exit: None,
            finished_ms: 0,
            recorded: false,
        });
    }
}
