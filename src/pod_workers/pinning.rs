//! Tells containers which CPUs and NUMA nodes they may use: when they are created, before one starts that has CPUs for itself,
//! and where a running one was told otherwise. Upstream: `PreCreateContainer` and `reconcileState`.
//!
//! **Invariant:** before a container starts that has CPUs for itself, those that share CPUs were told to leave them.

use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{Job, PodWorkers, WorkerContext};
use crate::core::pinning::{Update, updates};
use crate::core::state::{CpusetRecord, State, Transaction, child_key};
use crate::kuberuntime::cri::{ContainerConfig, v1};
use crate::types::cpu_set::CpuSet;
use crate::types::{ContainerId, PodUid};

/// Confines a container that is about to be created. Returns the CPUs and NUMA nodes that it was told.
pub(super) fn confine(
    context: &WorkerContext,
    job: &Job,
    container: &str,
    config: &mut ContainerConfig,
) -> (CpuSet, CpuSet) {
    let state = context.store.snapshot();
    let told = context.pinning.allowed(&state, &job.uid, container);
    if !told.0.is_empty() || !told.1.is_empty() {
        let linux = config.message.linux.get_or_insert_default();
        let resources = linux.resources.get_or_insert_default();
        resources.cpuset_cpus = told.0.to_string();
        resources.cpuset_mems = told.1.to_string();
    }
    told
}

/// To be committed with the start of a container: what it was created with.
pub(super) fn started(
    context: &WorkerContext,
    state: &State,
    job: &Job,
    container: &str,
    id: &ContainerId,
) -> Transaction {
    let key = child_key(&job.uid, container);
    let transaction = Transaction::new();
    match context.pinning.take_created(id) {
        Some((cpus, nodes)) if !cpus.is_empty() || !nodes.is_empty() => {
            let record = CpusetRecord {
                container_id: id.clone(),
                cpus,
                nodes,
            };
            transaction.put(key, record)
        }
        // It was made by an earlier agent, or nothing is told.
        _ if state.record::<CpusetRecord>(&key).is_some() => {
            transaction.delete::<CpusetRecord>(key)
        }
        _ => transaction,
    }
}

/// Brings CPUs in order before a container starts whose start is on record: others leave the ones that it has for itself, and
/// it gets those that were assigned since it was created.
pub(super) async fn before_start(
    context: &WorkerContext,
    job: &Job,
    container: &str,
    id: &ContainerId,
) {
    if context.pinning.settings().cpus.is_none() {
        return;
    }
    let _telling = context.pinning.telling().lock().await;
    let state = context.store.snapshot();
    let assigned = context.pinning.assigned(&state);
    let own = assigned.cpus.get(&job.uid);
    let own = own.and_then(|record| record.containers.get(container));
    let settings = context.pinning.settings();
    for update in updates(&state, settings, &assigned, own) {
        if own.is_some() || update.id == *id {
            tell(context, &update).await;
        }
    }
    // One that was made by an earlier agent may not be known at all.
    let told = state.record::<CpusetRecord>(&child_key(&job.uid, container));
    if told.is_none_or(|told| told.container_id != *id) {
        let (cpus, _) = context.pinning.allowed(&state, &job.uid, container);
        let update = Update {
            pod: job.uid.clone(),
            container: container.to_owned(),
            id: id.clone(),
            cpus,
            is_exclusive: own.is_some(),
        };
        tell(context, &update).await;
    }
}

/// Tells one container its CPUs and records that it was told. What fails is tried again in the next period.
async fn tell(context: &WorkerContext, update: &Update) {
    let resources = v1::LinuxContainerResources {
        cpuset_cpus: update.cpus.to_string(),
        ..Default::default()
    };
    let container = &*update.container;
    let told = (context.cri).update_container_resources(&update.id, resources);
    match told.await {
        Ok(()) => {}
        Err(error) if error.is_not_found() => {
            forget(context, update).await;
            return;
        }
        Err(error) => {
            warn!(pod = %update.pod, container, id = %update.id, cpus = %update.cpus, %error, "cannot change the CPUs of a container yet");
            return;
        }
    }
    info!(pod = %update.pod, container, cpus = %update.cpus, exclusive = update.is_exclusive, "container has other CPUs");
    if let Err(error) = record(context, update).await {
        debug!(pod = %update.pod, container, %error, "the container will be told its CPUs again");
    }
}

/// Forgets what a container was told that is gone.
async fn forget(context: &WorkerContext, update: &Update) {
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
        debug!(pod = %update.pod, container = update.container, %error, "what a container was told stays on record");
    }
}

async fn record(context: &WorkerContext, update: &Update) -> Result<(), crate::store::CommitError> {
    let state = context.store.snapshot();
    let key = child_key(&update.pod, &update.container);
    let transaction = Transaction::new().expect::<CpusetRecord>(&state, &key);
    let known = state.record::<CpusetRecord>(&key);
    let known = known.filter(|known| known.container_id == update.id);
    let transaction = if context.pinning.settings().is_idle() {
        transaction.delete::<CpusetRecord>(&key)
    } else {
        let record = CpusetRecord {
            container_id: update.id.clone(),
            cpus: update.cpus.clone(),
            nodes: known.map(|known| known.nodes.clone()).unwrap_or_default(),
        };
        transaction.put(&key, record)
    };
    context.store.commit(transaction).await.map(drop)
}

/// Frees what a pod had on record, for the commit that says that nothing of it runs any more.
pub(super) fn freed(context: &WorkerContext, state: &State, uid: &PodUid) -> Transaction {
    context.pinning.settled(uid);
    crate::core::pod_worker::freed(state, uid)
}

/// Compares what running containers were told with what they should have, at once and then every `period`, until `stop`.
pub async fn reconcile(workers: PodWorkers, period: Duration, stop: CancellationToken) {
    let context = workers.context();
    let pinning = &context.pinning;
    loop {
        let is_due =
            pinning.settings().cpus.is_some() || !context.store.snapshot().cpusets.is_empty();
        if is_due {
            let _telling = pinning.telling().lock().await;
            let state = context.store.snapshot();
            let assigned = pinning.assigned(&state);
            for update in updates(&state, pinning.settings(), &assigned, None) {
                tell(context, &update).await;
            }
        }
        if stop
            .run_until_cancelled(tokio::time::sleep(period))
            .await
            .is_none()
        {
            return;
        }
    }
}
