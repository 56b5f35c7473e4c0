//! A node as a value: what the sources want, what the agent has in memory and on record, what the runtime runs.
//!
//! Time stands still. Each pod has one container; a status is on record as soon as it is made. Steps of a pod that no other
//! pod can tell apart are one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use holdfast::core::admission::{self, AdmissionContext, NodeInfo, Preemption};
use holdfast::core::node_status::Pressure;
use holdfast::core::pod_update::{Reading, SourcePods, SourceSet, SourcedPod, merge};
use holdfast::core::pod_worker::{self, KillRequest, KnownPod, UpdateOptions, Worker};
use holdfast::core::restore::{RestoreInput, plan_restore};
use holdfast::core::state::{
    AdmissionRecord, EpochReason, EpochRecord, MetaRecord, State, TerminationCause, Transaction,
    WorkerRecord,
};
use holdfast::kubeletconfig::OfflineStart;
use holdfast::types::runtime::{ContainerState, ContainerStatus, PodStatus};
use holdfast::types::{
    BootId, BootIdentity, ContainerId, PodExt, PodSource, PodSyncType, PodUid, Stamp,
};
use k8s_openapi::api::core::v1 as api;

use super::judge;

pub(super) const PODS: usize = 3;
pub(super) const CONTAINER: &str = "main";
pub(super) const EPOCH: u64 = 1;
pub(super) const NOW: Stamp = Stamp {
    boot: BootId(7),
    boottime_ms: 1_000_000,
    wall_ms: 1_700_000_000_000,
};
pub(super) const NOW_NS: i64 = NOW.wall_ms * 1_000_000;
pub(super) const BACKOFF_MAX: Duration = Duration::from_secs(300);

/// A pod, by its place in the arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Which {
    Web,
    Batch,
    System,
}

impl Which {
    pub(super) const ALL: [Self; PODS] = [Self::Web, Self::Batch, Self::System];

    /// Name and UID.
    pub(super) fn name(self) -> &'static str {
        ["web", "batch", "system"][self as usize]
    }

    pub(super) fn uid(self) -> PodUid {
        PodUid::new(self.name())
    }

    /// Key of the record of its container.
    pub(super) fn container(self) -> &'static str {
        ["web/main", "batch/main", "system/main"][self as usize]
    }
}

/// What a pod asks for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asks {
    pub(super) cpus: u32,
    pub(super) port: Option<i32>,
    pub(super) policy: &'static str,
    pub(super) is_critical: bool,
    pub(super) is_static: bool,
}

/// How often something may still happen that need not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Chances {
    pub(super) crashes: u8,
    pub(super) evictions: u8,
    /// Ends of containers of pods that are not restarted.
    pub(super) exits: u8,
    /// Changes of what a source wants of the first pod.
    pub(super) changes: u8,
    /// Graceful deletions, by the API server.
    pub(super) deletions: u8,
    /// Forced deletions, by the API server.
    pub(super) forced: u8,
    /// Manifests that are removed.
    pub(super) removals: u8,
    /// Manifests that are back.
    pub(super) comebacks: u8,
}

/// What the source says of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Wish {
    Absent,
    Wanted,
    Changed,
    Deleting,
    Gone,
}

/// What can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// The source wants the pod.
    Want(Which),
    /// The source changes a label of the pod.
    Change(Which),
    /// The API server sets a deletionTimestamp.
    Delete(Which),
    /// The pod is gone from its source.
    Remove(Which),
    Evict(Which),
    /// The pod's container ends well.
    Exit(Which),
    /// The agent dies, what it has not committed is lost, and it starts again. What happens meanwhile is as if it had
    /// happened just before, or just after.
    Crash,
    /// The sync loop gets to know what the source of a pod says.
    Hear(Which),
    /// The API server removes a pod that is deleted and has ended.
    Finalize(Which),
    /// The sync loop compares workers and sources.
    Housekeeping,
    /// A worker takes what is pending.
    Take(Which),
    /// It decides what it commits.
    Decide(Which),
    /// The store takes or refuses that.
    Commit(Which),
    /// The worker acts on it.
    Act(Which),
    /// The store takes or refuses the intent to start a container.
    CommitStart(Which),
    /// The runtime starts the container.
    Start(Which),
}

/// Where the step of a worker is.
#[derive(Clone, Debug)]
pub(super) enum Step {
    Idle,
    Taken(Arc<Worker>),
    Committing(Arc<Worker>, Arc<Transaction>),
    Committed(Arc<Worker>),
    Starting(ContainerId, Arc<Transaction>),
    Intended(ContainerId),
}

/// A worker with its task.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub(super) worker: Arc<Worker>,
    pub(super) step: Step,
    pub(super) is_cancelled: bool,
}

impl Task {
    fn of(worker: Worker) -> Self {
        Self {
            worker: Arc::new(worker),
            step: Step::Idle,
            is_cancelled: false,
        }
    }

    pub(super) fn worker(&mut self) -> &mut Worker {
        Arc::make_mut(&mut self.worker)
    }
}

/// What dies with the agent.
#[derive(Clone, Debug, Default)]
pub(super) struct Agent {
    /// The pods as the sources wanted them when the loop heard of them last.
    pub(super) known: [Option<Arc<api::Pod>>; PODS],
    pub(super) tasks: [Option<Task>; PODS],
}

#[derive(Clone, Debug)]
pub(super) struct World {
    pub(super) wishes: [Wish; PODS],
    pub(super) chances: Chances,
    pub(super) agent: Agent,
    pub(super) state: State,
    pub(super) runtime: [Arc<PodStatus>; PODS],
    version: u64,
}

/// What stays the same.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) asks: [Asks; PODS],
    pub(super) cpus: u32,
    pub(super) chances: Chances,
    /// Pods that run, or were refused, when it begins.
    pub(super) settled: &'static [Which],
    /// Whether the store may change between the moment at which a worker takes its job and its look at the records.
    pub(super) takes_late: bool,
    /// Each pod as wanted, as changed and as deleted.
    pods: [[Arc<api::Pod>; 3]; PODS],
    object: api::Node,
    meta: MetaRecord,
}

impl Node {
    pub(super) fn new(cpus: u32, asks: [Asks; PODS], chances: Chances) -> Self {
        let pods = Which::ALL.map(|which| {
            let pod = pod(which, &asks[which as usize]);
            let mut changed = pod.clone();
            changed.metadata.labels = Some([("changed".to_owned(), "yes".to_owned())].into());
            let mut deleted = pod.clone();
            deleted.metadata.deletion_timestamp =
                Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
                    k8s_openapi::jiff::Timestamp::UNIX_EPOCH,
                ));
            deleted.metadata.deletion_grace_period_seconds = Some(30);
            [pod, changed, deleted].map(Arc::new)
        });
        let mut object = api::Node::default();
        let quantity = k8s_openapi::apimachinery::pkg::api::resource::Quantity(cpus.to_string());
        object.status = Some(api::NodeStatus {
            allocatable: Some([("cpu".to_owned(), quantity)].into()),
            ..api::NodeStatus::default()
        });
        let meta = MetaRecord {
            schema: 1,
            node_name: "node".to_owned(),
            machine_id: "m".to_owned(),
            boot: boot(),
            generation: 1,
            clean_shutdown: false,
            heartbeat: NOW,
            epoch: EpochRecord {
                number: EPOCH,
                since: NOW,
                reason: EpochReason::Fresh,
            },
        };
        Self {
            asks,
            cpus,
            chances,
            settled: &[],
            takes_late: false,
            pods,
            object,
            meta,
        }
    }

    pub(super) fn empty(&self) -> World {
        World {
            wishes: [Wish::Absent; PODS],
            chances: self.chances,
            agent: Agent::default(),
            state: State::default(),
            runtime: Which::ALL.map(|which| Arc::new(PodStatus::empty(which.uid()))),
            version: 0,
        }
    }

    /// The pod as its source has it.
    pub(super) fn wished(&self, which: Which, wish: Wish) -> Option<&Arc<api::Pod>> {
        let faces = &self.pods[which as usize];
        match wish {
            Wish::Absent | Wish::Gone => None,
            Wish::Wanted => Some(&faces[0]),
            Wish::Changed => Some(&faces[1]),
            Wish::Deleting => Some(&faces[2]),
        }
    }

    /// Which of the pod's objects this is.
    pub(super) fn face(&self, which: Which, pod: &Arc<api::Pod>) -> usize {
        let mut faces = self.pods[which as usize].iter();
        let found = faces.position(|face| Arc::ptr_eq(face, pod));
        found.expect("no other object of the pod")
    }

    /// Whether the loop knows what the source says.
    pub(super) fn has_heard(&self, world: &World, which: Which) -> bool {
        let wished = self.wished(which, world.wishes[which as usize]);
        match (&world.agent.known[which as usize], wished) {
            (None, None) => true,
            (Some(known), Some(wished)) => Arc::ptr_eq(known, wished),
            _ => false,
        }
    }

    pub(super) fn apply(&self, world: &mut World, action: Action) -> Result<(), String> {
        match action {
            Action::Want(which) => {
                let wish = &mut world.wishes[which as usize];
                world.chances.comebacks -= u8::from(*wish == Wish::Gone);
                self.wish(world, which, Wish::Wanted)
            }
            Action::Change(which) => {
                world.chances.changes -= 1;
                self.wish(world, which, Wish::Changed)
            }
            Action::Delete(which) => {
                world.chances.deletions -= 1;
                self.wish(world, which, Wish::Deleting)
            }
            Action::Remove(which) => {
                let chances = &mut world.chances;
                if self.asks[which as usize].is_static {
                    chances.removals -= 1;
                } else {
                    chances.forced -= 1;
                }
                self.wish(world, which, Wish::Gone)
            }
            Action::Finalize(which) => self.wish(world, which, Wish::Gone),
            Action::Hear(which) => self.hear(world, which),
            Action::Evict(which) => {
                world.chances.evictions -= 1;
                let pod = Arc::clone(&world.task(which).worker.pod);
                let mut options = UpdateOptions::new(pod, PodSyncType::Kill);
                options.kill = Some(KillRequest {
                    cause: TerminationCause::Evicted {
                        reason: "Evicted".to_owned(),
                        message: "too large".to_owned(),
                    },
                    grace_override: Some(1),
                });
                world.update(which, options);
                Ok(())
            }
            Action::Exit(which) => {
                world.chances.exits -= 1;
                world.end_containers(which, 0);
                if let Some(task) = &mut world.agent.tasks[which as usize] {
                    task.worker().wake();
                }
                Ok(())
            }
            Action::Crash => {
                world.chances.crashes -= 1;
                self.restart(world)
            }
            Action::Housekeeping => self.housekeeping(world),
            Action::Take(which) => self.take(world, which),
            Action::Decide(which) => self.decide_step(world, which),
            Action::Commit(which) => self.commit_step(world, which),
            Action::Act(which) => self.act(world, which),
            Action::CommitStart(which) => self.commit_start(world, which),
            Action::Start(which) => self.start(world, which),
        }
    }

    pub(super) fn commit(
        &self,
        world: &mut World,
        transaction: &Transaction,
    ) -> Result<(), String> {
        let before = world.state.clone();
        world.version += 1;
        for mutation in &transaction.mutations {
            world.state.apply(mutation, world.version);
        }
        judge::commit(self, world, &before)
    }

    fn wish(&self, world: &mut World, which: Which, wish: Wish) -> Result<(), String> {
        let was_heard = self.has_heard(world, which);
        world.wishes[which as usize] = wish;
        if was_heard {
            self.hear(world, which)?;
        }
        Ok(())
    }

    /// As the mux and the handlers of the loop do it.
    fn hear(&self, world: &mut World, which: Which) -> Result<(), String> {
        let wished = self.wished(which, world.wishes[which as usize]);
        let sourced = |pod: &Arc<api::Pod>| SourcedPod {
            origin: String::new(),
            pod: Arc::clone(pod),
        };
        let known = &mut world.agent.known[which as usize];
        let set = SourceSet {
            source: if self.asks[which as usize].is_static {
                PodSource::File
            } else {
                PodSource::Api
            },
            location: String::new(),
            reading: Reading::Complete,
            broken: BTreeMap::new(),
            pods: wished.map(sourced).into_iter().collect(),
            set_back: false,
        };
        let merged = merge(
            &SourcePods::seeded(known.as_ref().map(sourced)),
            &set,
            &|_| false,
            NOW,
        );
        let uid = which.uid();
        *known = merged
            .pods
            .get(uid.as_str())
            .map(|sourced| Arc::clone(&sourced.pod));
        for pod in merged.removes {
            world.update(which, UpdateOptions::new(pod, PodSyncType::Kill));
        }
        for pod in merged.adds {
            self.add(world, which, pod)?;
        }
        for pod in merged.updates.into_iter().chain(merged.deletes) {
            world.update(which, UpdateOptions::new(pod, PodSyncType::Update));
        }
        Ok(())
    }

    fn add(&self, world: &mut World, which: Which, pod: Arc<api::Pod>) -> Result<(), String> {
        let recorded = world.state.record::<AdmissionRecord>(which.name());
        let (admission, preemption) = match recorded.cloned() {
            Some(record) => (record, None),
            None => self.admit(world, which, &pod)?,
        };
        let mut options = UpdateOptions::new(pod, PodSyncType::Create);
        options.admission = Some(admission);
        options.preemption = preemption;
        world.update(which, options);
        Ok(())
    }

    fn admit(
        &self,
        world: &World,
        which: Which,
        pod: &api::Pod,
    ) -> Result<(AdmissionRecord, Option<Preemption>), String> {
        let record = |decision| AdmissionRecord {
            decision,
            allocated: admission::allocated(pod),
            at: NOW,
        };
        if let Some(decision) = admission::admit_without_room(pod, false) {
            return Ok((record(decision), None));
        }
        let agent = &world.agent;
        let others = Which::ALL.into_iter().filter(|other| *other != which);
        let counted = others.filter_map(|other| {
            let worker = &agent.tasks[other as usize].as_ref()?.worker;
            agent.known[other as usize].as_ref()?;
            worker
                .is_counted_by_admission(&world.state, || false)
                .then(|| Arc::clone(&worker.pod))
        });
        let context = AdmissionContext {
            node_name: "node",
            max_pods: 110,
            refusals: &[],
            node: &self.object,
            unsafe_sysctls: &[],
            apparmor: true,
            strict_groups: None,
            pressure: Pressure::default(),
            unplaced: None,
        };
        let verdict = admission::admit(pod, &NodeInfo::of(counted), &context);
        judge::verdict(self, world, which, &verdict)?;
        let (decision, preemption) = verdict.into_parts();
        Ok((record(decision), preemption))
    }

    fn restart(&self, world: &mut World) -> Result<(), String> {
        let runtime = Which::ALL.into_iter().filter_map(|which| {
            let status = &world.runtime[which as usize];
            (!status.sandboxes.is_empty()).then(|| (which.uid(), (**status).clone()))
        });
        let plan = plan_restore(&RestoreInput {
            state: &world.state,
            runtime: &runtime.collect(),
            listed_at: NOW,
            meta: &self.meta,
            boot: &boot(),
            backoff_max: BACKOFF_MAX,
            offline_start: OfflineStart::All,
            cluster_doubted: false,
            now: NOW,
        });
        let mut agent = Agent::default();
        for restored in &plan.pods {
            let which = Which::ALL
                .into_iter()
                .find(|w| w.name() == restored.pod.name());
            let which = which.expect("one of them") as usize;
            agent.tasks[which] = Some(Task::of(restored.worker()));
            if restored.desired {
                agent.known[which] = Some(Arc::clone(&restored.pod));
            }
        }
        world.agent = agent;
        self.commit(world, &plan.transaction)
    }

    fn housekeeping(&self, world: &mut World) -> Result<(), String> {
        for which in Which::ALL {
            let is_wanted = world.agent.known[which as usize].is_some();
            let Some(task) = &mut world.agent.tasks[which as usize] else {
                continue;
            };
            match pod_worker::sync_known(&task.worker.record, is_wanted) {
                KnownPod::Keep => {}
                KnownPod::Stop => {
                    let pod = Arc::clone(&task.worker.pod);
                    world.update(which, UpdateOptions::new(pod, PodSyncType::Kill));
                }
                KnownPod::Drop | KnownPod::Forget => {
                    task.worker().begin_forgetting();
                }
            }
        }
        for which in Which::ALL {
            let agent = &world.agent;
            if let (Some(pod), None) = (&agent.known[which as usize], &agent.tasks[which as usize])
            {
                let pod = Arc::clone(pod);
                self.add(world, which, pod)?;
            }
        }
        Ok(())
    }
}

impl World {
    pub(super) fn task(&mut self, which: Which) -> &mut Task {
        let task = self.agent.tasks[which as usize].as_mut();
        task.expect("has a worker")
    }

    pub(super) fn runtime(&mut self, which: Which) -> &mut PodStatus {
        Arc::make_mut(&mut self.runtime[which as usize])
    }

    /// The pod's container that runs.
    pub(super) fn running(&self, which: Which) -> Option<&ContainerStatus> {
        let mut containers = self.runtime[which as usize].containers.iter();
        containers.find(|c| c.state == ContainerState::Running)
    }

    pub(super) fn end_containers(&mut self, which: Which, code: i32) {
        for container in &mut self.runtime(which).containers {
            if container.state == ContainerState::Running {
                container.state = ContainerState::Exited;
                container.exit_code = code;
                container.finished_at_ns = NOW_NS;
            }
        }
    }

    pub(super) fn create(&mut self, which: Which, attempt: u32, hash: &str) -> ContainerId {
        let id = ContainerId::from(format!("{}-{attempt}", which.uid()));
        let status = self.runtime(which);
        status.containers.push(ContainerStatus {
            id: id.clone(),
            name: CONTAINER.to_owned(),
            attempt,
            sandbox_id: "sandbox".into(),
            state: ContainerState::Created,
            created_at_ns: NOW_NS,
            image: "image".to_owned(),
            image_ref: "sha".to_owned(),
            hash: hash.to_owned(),
            started_at_ns: 0,
            finished_at_ns: 0,
            exit_code: 0,
            reason: String::new(),
            message: String::new(),
            log_path: String::new(),
            user: None,
        });
        status.sort();
        id
    }

    /// As `PodWorkers::update` does it.
    pub(super) fn update(&mut self, which: Which, options: UpdateOptions) {
        let shown = Arc::clone(&self.runtime[which as usize]);
        let left = self.state.record::<WorkerRecord>(which.name());
        let left = left.cloned();
        match &mut self.agent.tasks[which as usize] {
            Some(task) => {
                task.is_cancelled |= task.worker().update(options, Some(&shown), NOW);
            }
            none => {
                let worker = Worker::first(options, left.as_ref(), Some(&shown), NOW);
                *none = Some(Task::of(worker));
            }
        }
    }
}

fn boot() -> BootIdentity {
    BootIdentity {
        kernel_boot_id: "boot".to_owned(),
        pid1_start: 1,
        runtime_state: String::new(),
    }
}

fn pod(which: Which, asks: &Asks) -> api::Pod {
    let quantity = k8s_openapi::apimachinery::pkg::api::resource::Quantity(asks.cpus.to_string());
    let mut pod = api::Pod::default();
    pod.metadata.name = Some(which.name().to_owned());
    pod.metadata.namespace = Some("default".to_owned());
    pod.metadata.uid = Some(which.name().to_owned());
    if asks.is_static {
        pod.metadata.annotations =
            Some([("kubernetes.io/config.source".to_owned(), "file".to_owned())].into());
    }
    pod.spec = Some(api::PodSpec {
        restart_policy: Some(asks.policy.to_owned()),
        priority: asks.is_critical.then_some(2_000_001_000),
        node_name: Some("node".to_owned()),
        containers: vec![api::Container {
            name: CONTAINER.to_owned(),
            image: Some("image".to_owned()),
            resources: Some(api::ResourceRequirements {
                requests: Some([("cpu".to_owned(), quantity)].into()),
                ..api::ResourceRequirements::default()
            }),
            ports: asks.port.map(|port| {
                vec![api::ContainerPort {
                    container_port: port,
                    host_port: Some(port),
                    ..api::ContainerPort::default()
                }]
            }),
            ..api::Container::default()
        }],
        ..api::PodSpec::default()
    });
    pod
}
