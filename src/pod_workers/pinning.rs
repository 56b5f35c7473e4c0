//! Tells containers which CPUs and NUMA nodes they may use: when they are created, before one starts that has CPUs for itself,
//! where a running one has others, and each running one once after a start of the agent. Upstream: `PreCreateContainer` and
//! `reconcileState`.
//!
//! **Invariant:** before a container starts that has CPUs for itself, those that share CPUs were moved off them.
//!
//! **Invariant:** a running container uses no CPU that is not on its record. What it gets is recorded before the runtime is
//! told, and what it loses when the runtime has answered.

use std::time::Duration;

use futures::future::join_all;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{Job, PodWorkers, WorkerContext};
use crate::core::pinning::cpus::exclusive_cpus;
use crate::core::pinning::{Update, is_telling, updates};
use crate::core::state::{CpusetRecord, PodRecord, State, Transaction, child_key};
use crate::kuberuntime::cri::{ContainerConfig, v1};
use crate::kuberuntime::resources;
use crate::store::CommitError;
use crate::types::cpu_set::CpuSet;
use crate::types::{ContainerId, PodExt, causes};

/// Longest wait for the runtime to tell one container its CPUs, and for the turn to ask it.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Number of containers that are updated at a time.
const AT_A_TIME: usize = 16;

/// Confines a container that is about to be created, and takes the CFS quota off one that has CPUs for itself. Returns the CPUs
/// and NUMA nodes that it was told.
pub(super) fn confine(
    context: &WorkerContext,
    job: &Job,
    container: &str,
    config: &mut ContainerConfig,
) -> (CpuSet, CpuSet) {
    let told = context.resources.pinning.allowed(&job.uid, container);
    let is_exclusive = context
        .resources
        .pinning
        .has_cpus(&job.uid, Some(container));
    if !told.0.is_empty() || !told.1.is_empty() {
        let linux = config.message.linux.get_or_insert_default();
        let resources = linux.resources.get_or_insert_default();
        resources.cpuset_cpus = told.0.to_string();
        resources.cpuset_mems = told.1.to_string();
        if is_exclusive {
            resources::lift_quota(resources);
        }
    }
    told
}

/// Takes the CFS quota off the sandbox of a pod that has CPUs for itself.
pub(super) fn quota_of_sandbox(
    context: &WorkerContext,
    job: &Job,
    mut config: v1::PodSandboxConfig,
) -> v1::PodSandboxConfig {
    if context.resources.pinning.has_cpus(&job.uid, None)
        && let Some(linux) = &mut config.linux
        && let Some(resources) = &mut linux.resources
    {
        resources::lift_quota(resources);
    }
    config
}

/// Returns what is committed with the start of a container: the CPUs and NUMA nodes that it was created with. One that an earlier
/// agent created may use all CPUs until it is told.
pub(super) fn started(
    context: &WorkerContext,
    state: &State,
    job: &Job,
    container: &str,
    id: &ContainerId,
) -> Transaction {
    let pinning = &context.resources.pinning;
    let key = child_key(&job.uid, container);
    let transaction = Transaction::new();
    let known = state.record::<CpusetRecord>(&key);
    let record = |cpus: CpuSet, nodes: CpuSet| CpusetRecord {
        container_id: id.clone(),
        cpus,
        nodes,
    };
    match pinning.take_created(id) {
        Some((cpus, nodes)) if !cpus.is_empty() || !nodes.is_empty() => {
            if !cpus.is_empty() {
                pinning.set_confirmed(id, Some(cpus.clone()));
            }
            transaction.put(key, record(cpus, nodes))
        }
        None if known.is_some_and(|known| known.container_id == *id) => transaction,
        None if pinning.settings().cpus.is_some() => {
            let all = pinning.settings().machine.online();
            transaction.put(key, record(all, CpuSet::new()))
        }
        // Nothing is told.
        _ if known.is_some() => transaction.delete::<CpusetRecord>(key),
        _ => transaction,
    }
}

/// Brings CPUs in order before a container starts whose start is recorded: others leave the ones that it has for
/// itself, and it gets those that were assigned since it was created.
pub(super) async fn before_start(
    context: &WorkerContext,
    job: &Job,
    container: &str,
    id: &ContainerId,
) {
    let pinning = &context.resources.pinning;
    if pinning.settings().cpus.is_none() {
        return;
    }
    let (state, assigned) = pinning.current();
    let own = assigned.cpus.get(&job.uid);
    let own = own.and_then(|record| record.containers.get(container));
    let is_in_the_way = |update: &Update| own.is_some_and(|own| update.may_use.overlaps(own));
    let mut due = updates(&state, pinning.settings(), &assigned, &pinning.confirmed());
    due.retain(|update| update.id == *id || is_in_the_way(update));
    tell_all(context, &due).await;
}

/// Tells containers their CPUs: those that lose some first, then the others.
async fn tell_all(context: &WorkerContext, all: &[Update]) {
    let (grow, shrink): (Vec<&Update>, Vec<&Update>) =
        all.iter().partition(|update| update.only_grows());
    for some in shrink.chunks(AT_A_TIME).chain(grow.chunks(AT_A_TIME)) {
        join_all(some.iter().map(|update| tell(context, update))).await;
    }
}

/// Tells one container its CPUs. What fails, or is not answered in time, is tried again in the next period.
async fn tell(context: &WorkerContext, due: &Update) {
    let Update {
        pod, container, id, ..
    } = due;
    match tokio::time::timeout(ANSWER_WITHIN, tell_in_turn(context, due)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            let error = causes(&error);
            debug!(%pod, container, error, "cannot set the container's CPUs, retrying");
        }
        Err(_) => {
            let after = ANSWER_WITHIN.as_secs();
            warn!(%pod, container, %id, after, "cannot change the CPUs of a container yet: the runtime does not answer");
        }
    }
}

/// Tells one container its CPUs when no other call does. May be cancelled at any time: the record has all that it may use.
async fn tell_in_turn(context: &WorkerContext, due: &Update) -> Result<(), CommitError> {
    let pinning = &context.resources.pinning;
    let turn = pinning.turn(&due.id);
    let _turn = turn.lock().await;
    let Some(update) = claim(context, &due.id).await? else {
        return Ok(());
    };
    let Update {
        pod,
        container,
        id,
        cpus,
        ..
    } = &update;
    // An answer may be lost: until there is one, nobody knows which CPUs it has.
    pinning.set_confirmed(id, None);
    let message = message(context, &update);
    match (context.cri).update_container_resources(id, message).await {
        Ok(()) => {}
        Err(error) if error.is_not_found() => {
            forget(context, &update).await;
            return Ok(());
        }
        Err(error) => {
            warn!(%pod, container, %id, %cpus, %error, "cannot change the CPUs of a container yet");
            return Ok(());
        }
    }
    if update.cpus == update.may_use {
        debug!(%pod, container, %cpus, "container has its CPUs");
    } else {
        info!(%pod, container, %cpus, exclusive = update.is_exclusive, "changed the container's CPUs");
    }
    pinning.set_confirmed(id, Some(cpus.clone()));
    record(context, &update).await
}

/// Decides what a container is told, in its turn, and records all CPUs that it may use until the runtime has answered.
/// Decides once more when that is recorded: whoever gets CPUs for itself later finds the record and has the container
/// leave them.
async fn claim(context: &WorkerContext, id: &ContainerId) -> Result<Option<Update>, CommitError> {
    let pinning = &context.resources.pinning;
    loop {
        let (state, assigned) = pinning.current();
        let due = updates(&state, pinning.settings(), &assigned, &pinning.confirmed());
        let Some(update) = due.into_iter().find(|update| update.id == *id) else {
            return Ok(None);
        };
        let key = child_key(&update.pod, &update.container);
        let known = state.record::<CpusetRecord>(&key);
        let known = known.filter(|known| known.container_id == *id);
        if known.is_some_and(|known| known.cpus == update.may_use) {
            return Ok(Some(update));
        }
        let record = CpusetRecord {
            container_id: id.clone(),
            cpus: update.may_use,
            nodes: known.map(|known| known.nodes.clone()).unwrap_or_default(),
        };
        let transaction = Transaction::new().expect::<CpusetRecord>(&state, &key);
        context.store.commit(transaction.put(&key, record)).await?;
    }
}

/// Returns the CPUs, and for a container that may have CPUs for itself the quota: none while it has them.
fn message(context: &WorkerContext, update: &Update) -> v1::LinuxContainerResources {
    let mut told = v1::LinuxContainerResources {
        cpuset_cpus: update.cpus.to_string(),
        ..Default::default()
    };
    let state = context.store.snapshot();
    let Some(record) = state.record::<PodRecord>(update.pod.as_str()) else {
        return told;
    };
    let pod = &record.pod;
    let mut all = pod.init_containers().iter().chain(pod.containers());
    let container = all.find(|container| container.name == update.container);
    let Some(container) = container.filter(|container| exclusive_cpus(pod, container) > 0) else {
        return told;
    };
    match resources::container_linux_resources(pod, container, &context.node) {
        Ok(mut whole) => {
            if update.is_exclusive {
                resources::lift_quota(&mut whole);
            }
            told.cpu_period = whole.cpu_period;
            told.cpu_quota = whole.cpu_quota;
        }
        Err(error) => {
            warn!(pod = %update.pod, container = update.container, %error, "cannot change the CPU quota of a container");
        }
    }
    told
}

/// Deletes the record of a removed container.
async fn forget(context: &WorkerContext, update: &Update) {
    context.resources.pinning.set_confirmed(&update.id, None);
    let state = context.store.snapshot();
    let key = child_key(&update.pod, &update.container);
    let told = state.record::<CpusetRecord>(&key);
    if told.is_none_or(|told| told.container_id != update.id) {
        return;
    }
    let transaction = Transaction::new().expect::<CpusetRecord>(&state, &key);
    let forgotten = context
        .store
        .commit(transaction.delete::<CpusetRecord>(&key));
    if let Err(error) = forgotten.await {
        debug!(pod = %update.pod, container = update.container, %error, "cannot delete the record of a container's CPUs");
    }
}

/// Records what a container has since the runtime has answered.
async fn record(context: &WorkerContext, update: &Update) -> Result<(), CommitError> {
    let state = context.store.snapshot();
    let key = child_key(&update.pod, &update.container);
    let known = state.record::<CpusetRecord>(&key);
    let Some(known) = known.filter(|known| known.container_id == update.id) else {
        return Ok(());
    };
    let mut record = known.clone();
    record.cpus = match context.resources.pinning.settings().cpus {
        Some(_) => update.cpus.clone(),
        // It has all again, and nobody tells it any.
        None => CpuSet::new(),
    };
    if record == *known {
        return Ok(());
    }
    let transaction = Transaction::new().expect::<CpusetRecord>(&state, &key);
    let transaction = if record.cpus.is_empty() && record.nodes.is_empty() {
        transaction.delete::<CpusetRecord>(&key)
    } else {
        transaction.put(&key, record)
    };
    context.store.commit(transaction).await.map(drop)
}

/// Compares what running containers have with what they should have, at once and then every `period`, until `stop`. With the
/// policy `none` only while one has CPUs that an earlier policy told it.
pub async fn reconcile(workers: PodWorkers, period: Duration, stop: CancellationToken) {
    let context = workers.context();
    let pinning = &context.resources.pinning;
    loop {
        let (state, assigned) = pinning.current();
        if !is_telling(&state, pinning.settings()) {
            // Nobody tells any more.
            stop.cancelled().await;
            return;
        }
        pinning.forget_confirmed(&state);
        let due = updates(&state, pinning.settings(), &assigned, &pinning.confirmed());
        drop(state);
        let round = async {
            tell_all(context, &due).await;
            tokio::time::sleep(period).await;
        };
        if stop.run_until_cancelled(round).await.is_none() {
            return;
        }
    }
}
