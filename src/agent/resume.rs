//! From the store to workers: what the runtime shows is listed, the plan is made, workers, queue and probes go on.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::base::Base;
use super::{AgentError, cgroup_driver, takeover, tasks};
use crate::config::{RunningStatic, Seed};
use crate::core::admission;
use crate::core::restore::{Outcome, RestoreInput, RestorePlan, plan_restore};
use crate::core::state::State;
use crate::kubeletconfig::AgentConfig;
use crate::kuberuntime::cri::CriClient;
use crate::objects::Objects;
use crate::pod_manager::PodManager;
use crate::pod_workers::{PodWorkers, ReasonCache, WorkQueue};
use crate::types::metrics::OutcomeLabel;
use crate::types::runtime::PodStatus;
use crate::types::{Event, EventRecorder, EventType, PodUid, Stamp};

/// First and longest pause between two attempts to list the runtime.
const RELIST: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// Longest time for which pods wait until the pulls of an earlier boot are taken over. The next pull does the rest.
const TAKE_OVER: Duration = Duration::from_secs(10);

/// Committed plan of this start, and what it was made from.
pub(super) struct Restored {
    /// Name of the runtime, prefix of container IDs in statuses.
    pub(super) runtime_name: String,
    /// Plan, committed or held by a degraded store.
    pub(super) plan: RestorePlan,
    /// Static pods that run without a record.
    pub(super) statics: Vec<RunningStatic>,
    /// Time before the runtime was listed.
    pub(super) as_of: Instant,
}

/// Waits for the runtime, plans from its list, and commits the plan.
///
/// # Errors
/// When `token` is cancelled before the runtime has answered, or the store refuses the plan.
pub(super) async fn restore(
    config: &AgentConfig,
    base: &Base,
    cri: &CriClient,
    token: &CancellationToken,
) -> Result<Restored, AgentError> {
    let Some(runtime_name) = tasks::wait_for_runtime(cri, &base.runtime_state, token).await else {
        return Err(AgentError::Ended {
            part: "waiting for the container runtime".to_owned(),
        });
    };
    let (taken_over, (), checked) = tokio::join!(
        tokio::time::timeout(TAKE_OVER, cri.take_over_pulls()),
        tasks::update_runtime_up(cri, &base.runtime_state, &*base.clock),
        cgroup_driver::check(cri, base, config.kubelet.cgroup_driver),
    );
    checked?;
    if taken_over.is_err() {
        warn!("taking over the pulls of an earlier boot takes long; pods go on, pulls wait for it");
    }
    let (plan, statics, as_of) = plan(config, base, cri).await;
    // A degraded store holds this: a full disk must not keep pods from being looked after.
    base.store.commit_or_hold(plan.transaction.clone()).await?;
    Ok(Restored {
        runtime_name,
        plan,
        statics,
        as_of,
    })
}

/// Lists the runtime and plans. Cancel-safe.
async fn plan(
    config: &AgentConfig,
    base: &Base,
    cri: &CriClient,
) -> (RestorePlan, Vec<RunningStatic>, Instant) {
    let (runtime, listed_at, as_of) = list(base, cri).await;
    base.runtime_state.set_pleg_relist(base.clock.now());
    let state = base.store.snapshot();
    let plan = plan_restore(&RestoreInput {
        state: &state,
        runtime: &runtime,
        listed_at,
        meta: &base.meta,
        boot: &base.boot,
        backoff_max: config.kubelet.max_container_restart_period,
        offline_start: config.offline_start,
        cluster_doubted: base.cluster_doubted,
        now: base.clock.now(),
    });
    let statics = takeover::running_statics(cri, &runtime, &plan.unrecorded).await;
    (plan, statics, as_of)
}

/// Lists the runtime until it answers: without what it runs, nothing can be decided. Returns the times from before the list, too.
async fn list(base: &Base, cri: &CriClient) -> (BTreeMap<PodUid, PodStatus>, Stamp, Instant) {
    let mut pause = RELIST.0;
    let mut logged = String::new();
    loop {
        let (listed_at, as_of) = (base.clock.now(), Instant::now());
        match cri.list_pods().await {
            Ok(runtime) => {
                if !logged.is_empty() {
                    base.runtime_state.set_runtime_ok(base.clock.now());
                }
                return (runtime, listed_at, as_of);
            }
            Err(error) => {
                let message = error.to_string();
                base.runtime_state.set_runtime_error(message.clone());
                if message != logged {
                    warn!(
                        error = message,
                        "cannot list the runtime's containers, retrying"
                    );
                    logged = message;
                }
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RELIST.1);
    }
}

/// Returns the last reported reasons of containers that do not run, so that they stay in statuses until they are
/// resolved.
pub(super) fn reported_reasons(state: &State) -> ReasonCache {
    let reasons = ReasonCache::default();
    for (uid, versioned) in &state.statuses {
        let waiting = ReasonCache::told(&versioned.record.status);
        reasons.set(&PodUid::new(uid), waiting);
    }
    reasons
}

/// Brings the workers back and returns what the sources' mux starts from.
pub(super) fn resume(
    plan: &RestorePlan,
    workers: &PodWorkers,
    pods: &PodManager,
    queue: &WorkQueue,
    objects: &Objects,
) -> Vec<Seed> {
    let mut seeds = Vec::new();
    // What has to be started anew goes in the order in which it would be admitted.
    let mut pods_in_order: Vec<_> = plan.pods.iter().collect();
    pods_in_order.sort_by_key(|restored| {
        let created = restored.pod.metadata.creation_timestamp.as_ref();
        let created = created.map(|t| t.0.as_millisecond());
        (Reverse(admission::priority(&restored.pod)), created)
    });
    for restored in pods_in_order {
        let uid = crate::types::PodExt::uid(&*restored.pod);
        if let (Some(due), Outcome::Resumed) = (restored.due, restored.outcome) {
            queue.seed(&uid, due);
        }
        if restored.desired {
            pods.update(Arc::clone(&restored.pod));
            if restored.outcome != Outcome::Finished {
                objects.register(&restored.pod);
            }
            seeds.push(Seed {
                source: restored.source,
                origin: restored.origin.clone(),
                pod: Arc::clone(&restored.pod),
            });
        }
        workers.resume(restored.worker());
        if matches!(restored.outcome, Outcome::Resumed | Outcome::Repaired) {
            // Probes go on at once; a sync may be a minute away.
            let context = workers.context();
            let told = context.reports.status.get(&uid);
            let told = told.as_ref().map(|r| &*r.status);
            if let Some(status) = context.pleg.cache().known(&uid) {
                context.reports.prober.observe(&restored.pod, &status, told);
            }
        }
    }
    seeds
}

pub(super) fn tell_what_was_restored(base: &Base, plan: &RestorePlan) {
    let counts: BTreeMap<Outcome, usize> = plan.counts();
    for outcome in [
        Outcome::Resumed,
        Outcome::Repaired,
        Outcome::Ending,
        Outcome::Finished,
    ] {
        let label = OutcomeLabel {
            outcome: outcome.as_str().to_owned(),
        };
        let count = counts.get(&outcome).copied().unwrap_or(0);
        base.metrics
            .restore_pods
            .get_or_create(&label)
            .set(i64::try_from(count).unwrap_or(i64::MAX));
    }
    let adopted = OutcomeLabel {
        outcome: "adopted".to_owned(),
    };
    base.metrics
        .restore_pods
        .get_or_create(&adopted)
        .set(i64::try_from(plan.unrecorded.len()).unwrap_or(i64::MAX));
    for restored in &plan.pods {
        // What runs goes on meanwhile.
        let waits = restored.outcome != Outcome::Resumed;
        if let Some(why) = restored.held.as_ref().filter(|_| waits) {
            let text = format!("not started before the API server has answered: {why}");
            base.recorder.record(Event::pod(
                EventType::Warning,
                &restored.pod,
                "WaitingForAPIServer",
                text,
            ));
        }
    }
    let took = since_process_start(base.clock.now()).unwrap_or_default();
    base.metrics.restore_duration.set(took.as_secs_f64());
    base.restored.store(true, Ordering::Relaxed);
    let count = |outcome| counts.get(&outcome).copied().unwrap_or(0);
    info!(
        rebooted = plan.rebooted,
        epoch = plan.epoch.number,
        resumed = count(Outcome::Resumed),
        repaired = count(Outcome::Repaired),
        ending = count(Outcome::Ending),
        finished = count(Outcome::Finished),
        unrecorded = plan.unrecorded.len(),
        milliseconds = u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
        "pods resumed"
    );
}

/// Time since the kernel started this process, to 10 ms.
fn since_process_start(now: Stamp) -> Option<Duration> {
    let stat = procfs::process::Process::myself().ok()?.stat().ok()?;
    let started_ms = stat
        .starttime
        .saturating_mul(1000)
        .checked_div(procfs::ticks_per_second())?;
    let now_ms = u64::try_from(now.boottime_ms).ok()?;
    Some(Duration::from_millis(now_ms.saturating_sub(started_ms)))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1 as api;

    use super::*;
    use crate::core::state::{StatusRecord, Transaction};
    use crate::types::{BootId, Json};

    #[test]
    fn what_containers_of_every_kind_wait_for_stays_told() {
        let waits = |name: &str| {
            serde_json::json!([{
                "name": name, "image": "i", "imageID": "", "ready": false, "restartCount": 0,
                "state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling"}},
            }])
        };
        let status: api::PodStatus = serde_json::from_value(serde_json::json!({
            "initContainerStatuses": waits("i"),
            "containerStatuses": waits("m"),
            "ephemeralContainerStatuses": waits("e"),
        }))
        .unwrap();
        let record = StatusRecord {
            name: "web".to_owned(),
            namespace: "ns".to_owned(),
            status: Json::new(status),
            version: 1,
            acknowledged: 1,
            at: Stamp {
                boot: BootId(1),
                boottime_ms: 1,
                wall_ms: 1,
            },
            finished: false,
        };
        let mut state = State::default();
        for mutation in &Transaction::new().put("u1", record).mutations {
            state.apply(mutation, 1);
        }
        let reasons = reported_reasons(&state).get(&PodUid::new("u1"));
        assert_eq!(reasons.into_keys().collect::<Vec<_>>(), ["e", "i", "m"]);
    }
}
