//! One sync of the agent under test, with a crash before any effect; what it reports, and where it comes to rest.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::case::{Kind, Spec, UID};
use crate::judge;
use crate::world::*;
use holdfast::core::container_history::{
    Records, forget_init, observe_exits, record_end, record_start,
};
use holdfast::core::pod_actions::{self, KillReason, PodActionInput, ProbeFailure, ProbeView};
use holdfast::core::pod_status::{self, Stage, StatusInput};
use holdfast::core::state::{ContainerRecord, IntentRecord, Transaction, child_key};
use holdfast::types::runtime::{
    ContainerState, ContainerStatus, PodStatus, SandboxState, SandboxStatus,
};
use holdfast::types::{ContainerId, PodUid, Stamp};
use k8s_openapi::api::core::v1 as api;

impl World {
    /// One sync, as an executor does it. `Err` = the agent died on the way.
    pub(crate) fn sync(&mut self) -> Result<pod_actions::PodActions, Crash> {
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
        if self.told {
            self.check_status(&pod, &status, &records, listed_at);
        }
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
        let unhealthy = self.unhealthy.iter();
        let liveness = unhealthy.map(|name| (name.clone(), ProbeFailure::Liveness));
        let stillborn = self.stillborn.iter();
        let startup = stillborn.map(|name| (name.clone(), ProbeFailure::Startup));
        let probe_failures: BTreeMap<_, _> = liveness.chain(startup).collect();
        let view = |name: &String| ProbeView {
            ready: None,
            started: self.has_started(name).then_some(true),
        };
        let probes = self.truth.keys().map(|name| (name.clone(), view(name)));
        let probes = probes.collect();
        let actions = pod_actions::compute(&PodActionInput {
            pod: &pod,
            status: &status,
            records: &records,
            probe_failures: &probe_failures,
            probes: &probes,
            listed_at,
            now: self.now(),
            backoff_max: Duration::from_secs(300),
        });
        self.execute(&status, &actions)?;
        Ok(actions)
    }

    pub(crate) fn execute(
        &mut self,
        status: &PodStatus,
        actions: &pod_actions::PodActions,
    ) -> Result<(), Crash> {
        let uid = PodUid::new(UID);
        if actions.kill_pod.is_some() {
            for container in &status.containers {
                self.effect()?;
                self.end(container.id.as_str(), 143);
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
            self.stillborn.remove(&kill.name);
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
        let forget = forget_init(&self.store, &uid, &actions.forget_init);
        self.commit(forget)?;
        for name in &actions.forget_init {
            for container in status.containers.iter().filter(|c| c.name == *name) {
                if !self.containers.iter().any(|c| c.id == container.id) {
                    continue;
                }
                let end = record_end(&self.store, &uid, status, &container.id, self.now());
                self.commit(end)?;
                self.effect()?;
                self.remove(&container.id);
            }
        }
        for hook in &actions.post_start {
            self.run_hook(&hook.name, &hook.id)?;
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
            let intent = IntentRecord {
                container_id: id.clone(),
                attempt: start.attempt,
                hash: start.hash.clone(),
                at: self.now(),
            };
            let backoff = start.backoff;
            let record = record_start(&self.store, &uid, &start.name, intent, backoff);
            self.commit(record.expect("the pod is to run"))?;
            self.intents
                .entry(start.name.clone())
                .or_default()
                .insert(id.clone());
            self.effect()?;
            self.start(&id);
            if self.spec_of(&start.name).hook {
                self.run_hook(&start.name, &id)?;
            }
        }
        Ok(())
    }

    fn run_hook(&mut self, name: &str, id: &ContainerId) -> Result<(), Crash> {
        let runs = self.truth[name].iter();
        let mut running = runs.filter(|r| r.running).map(|r| r.id.as_str());
        assert!(
            running.any(|r| r == id.as_str()),
            "hook of {id}, which ended"
        );
        assert!(
            !self.hooked.contains(id.as_str()),
            "hook of {id} done again"
        );
        self.effect()?;
        let key = child_key(&PodUid::new(UID), name);
        let mut record = self.store.record::<ContainerRecord>(&key).cloned().unwrap();
        record.hooks_done.push(pod_actions::post_start_key(id));
        let done = Transaction::new()
            .expect::<ContainerRecord>(&self.store, &key)
            .put(&key, record);
        self.commit(done)?;
        self.hooked.insert(id.to_string());
        Ok(())
    }

    /// Init containers that run complete.
    pub(crate) fn complete_init(&mut self) {
        let containers = self.containers.iter();
        let running = containers.filter(|c| c.state == ContainerState::Running);
        let init = running.filter(|c| self.spec_of(&c.name).kind == Kind::Init);
        for id in init.map(|c| c.id.to_string()).collect::<Vec<_>>() {
            self.end(&id, 0);
        }
    }

    pub(crate) fn check_status(
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
            resize: &Default::default(),
            recursive_read_only: Some(false),
            volume_images: &BTreeMap::new(),
            host_ips: &["192.0.2.1".to_owned()],
            runtime_name: "containerd",
            stage: Stage::Syncing,
            evicted: None,
            deadline_exceeded: false,
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
                // Sidecars and ephemeral containers are stopped when the pod is finished.
                let counts = matches!(self.spec_of(name).kind, Kind::Init | Kind::Main);
                let ended = runs.iter().all(|r| !r.running);
                assert!(ended || !counts, "finished pod, {name} runs");
            }
            if new.phase.as_deref() == Some("Succeeded") {
                let failed = |r: &Run| r.recorded && r.exit != Some(0);
                let mains = self.truth.iter();
                let mains = mains.filter(|(name, _)| self.spec_of(name).kind == Kind::Main);
                let ends = mains.filter_map(|(_, runs)| runs.last());
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
    pub(crate) fn settle(&mut self) {
        self.budget = None;
        let simple = self.specs.iter().all(Spec::is_simple);
        // Each step outlasts every back-off, so that three without anything to do are rest.
        let mut at_rest = 0;
        for _ in 0..32 {
            self.boottime_ms += 301_000;
            self.complete_init();
            match self.sync() {
                Ok(actions) if actions.is_empty() => at_rest += 1,
                Ok(_) => at_rest = 0,
                Err(Crash) => panic!("crash without a crash point"),
            }
            if at_rest == 3 {
                break;
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
        if !self.terminal {
            judge::rest(self);
        }
        for (name, runs) in self.truth.iter().filter(|_| simple) {
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
        let current = |c: &ContainerStatus| {
            c.image == self.image_of(&c.name) || self.spec_of(&c.name).kind == Kind::Ephemeral
        };
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
        if simple && self.told && self.policy == "Never" && !any_running {
            assert!(
                self.terminal,
                "nothing runs, nothing will, and the pod is not finished: {:?}",
                self.status
            );
        }
    }
}
