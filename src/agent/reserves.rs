//! Keeps the node's cgroups as the settings share it: the system's and Kubernetes' own processes, the agent itself;
//! [`node::follow_size`](super::node::follow_size) keeps that of all pods together. Upstream: `enforceNodeAllocatableCgroups`, `ensureSystemCgroups` and `ensureProcessInContainerWithOOMScore`.
//!
//! Whatever cannot be done is reported and tried again each minute. Nothing of it ends the agent.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::Tasks;
use super::base::Base;
use super::started::Started;
use crate::cm::reserves::{Reserve, reserved_limits};
use crate::cm::{CgroupError, CgroupManager};
use crate::kubeletconfig::{AgentConfig, KubeletConfiguration};
use crate::pod_workers::PodWorkers;
use crate::types::{Clock, Event, EventRecorder, EventType, Pace, causes};

const PERIOD: Duration = Duration::from_secs(60);
/// Billionths of a unit.
const UNIT: i128 = 1_000_000_000;

/// One thing that is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kept {
    /// A cgroup that is held to what is reserved.
    Reserve(Reserve),
    /// The agent, in this cgroup.
    Agent(String),
    /// Processes without a cgroup, in this one.
    System(String),
}

impl Kept {
    /// Returns its name and the texts of its events.
    fn texts(&self) -> (String, Option<(String, String)>) {
        let events = |done: String, failed: String| Some((done, failed));
        match self {
            Self::Reserve(reserve) => {
                let whose = match reserve.field {
                    "kubeReservedCgroup" => ("kube reserved", "Kube Reserved"),
                    _ => ("system reserved", "System Reserved"),
                };
                let cgroup = &reserve.cgroup;
                (
                    reserve.field.to_owned(),
                    events(
                        format!("Updated limits on {} cgroup {cgroup}", whose.0),
                        format!("Failed to enforce {} Cgroup Limits on {cgroup:?}", whose.1),
                    ),
                )
            }
            Self::Agent(_) => ("kubeletCgroups".to_owned(), None),
            Self::System(_) => ("systemCgroups".to_owned(), None),
        }
    }

    /// Brings it to what it is to be. Blocking.
    fn apply(&self, cgroups: &CgroupManager) -> Result<(), CgroupError> {
        match self {
            Self::Reserve(reserve) => cgroups.enforce(reserve),
            Self::Agent(cgroup) => {
                let own = i32::try_from(std::process::id()).unwrap_or(0);
                cgroups
                    .move_into("kubeletCgroups", cgroup, &[own])
                    .map(drop)
            }
            Self::System(cgroup) => {
                let pids = cgroups.root_processes()?;
                cgroups.move_into("systemCgroups", cgroup, &pids).map(drop)
            }
        }
    }
}

/// Returns everything that the configuration demands.
fn wanted(kubelet: &KubeletConfiguration) -> Vec<Kept> {
    let reserves = &kubelet.reserves;
    let mut all = Vec::new();
    for (name, field, cgroup, reserved) in [
        (
            "system-reserved",
            "systemReservedCgroup",
            &reserves.system_cgroup,
            &kubelet.system_reserved,
        ),
        (
            "kube-reserved",
            "kubeReservedCgroup",
            &reserves.kube_cgroup,
            &kubelet.kube_reserved,
        ),
    ] {
        let has = |name: &str| kubelet.enforce_node_allocatable.iter().any(|n| n == name);
        let is_compressible = !has(name);
        let is_enforced = !is_compressible || has(&format!("{name}-compressible"));
        let Some(cgroup) = cgroup.as_ref().filter(|_| is_enforced) else {
            continue;
        };
        let (limits, pids) = amounts(reserved, is_compressible);
        all.push(Kept::Reserve(Reserve {
            field,
            cgroup: cgroup.clone(),
            limits,
            pids,
        }));
    }
    all.extend(reserves.system_cgroups.clone().map(Kept::System));
    // Last: the agent may be one of the system's processes.
    all.extend(reserves.kubelet_cgroups.clone().map(Kept::Agent));
    all
}

fn amounts(
    reserved: &BTreeMap<String, i128>,
    is_compressible: bool,
) -> (crate::cm::Limits, Option<u64>) {
    let of = |name: &str, unit: i128| {
        let amount = reserved.get(name).copied().filter(|amount| *amount > 0)?;
        u64::try_from(amount / unit).ok()
    };
    reserved_limits(
        of("cpu", UNIT / 1000),
        of("memory", UNIT),
        of("pid", UNIT),
        is_compressible,
    )
}

/// Keeps them from now on.
pub(super) fn watch(
    config: &AgentConfig,
    base: &Base,
    started: &Started,
    tasks: &mut Tasks,
    token: &CancellationToken,
) {
    let keeper = Keeper {
        workers: started.workers.clone(),
        kept: wanted(&config.kubelet),
        clock: Arc::clone(&base.clock),
        recorder: Arc::clone(&base.recorder) as _,
        reports: Reports::default(),
    };
    tasks.add("reserves", keeper.run(token.clone()));
}

struct Keeper {
    workers: PodWorkers,
    kept: Vec<Kept>,
    clock: Arc<dyn Clock>,
    recorder: Arc<dyn EventRecorder>,
    reports: Reports,
}

impl Keeper {
    async fn run(mut self, token: CancellationToken) {
        let pace = Pace::default();
        loop {
            for kept in self.kept.clone() {
                let (name, events) = kept.texts();
                let work = move |cgroups: &CgroupManager| kept.apply(cgroups);
                let done = self.workers.context().with_cgroups(work).await;
                let error = done.err().map(|error| causes(&error));
                let reasons: Vec<&str> = error.iter().map(String::as_str).collect();
                if pace.due(&name, &reasons, self.clock.now()) == [true] {
                    warn!(
                        of = name,
                        error, "cgroups of the node are not as configured"
                    );
                }
                if let Some(event) = self.reports.event(&name, events, error) {
                    self.recorder.record(event);
                }
            }
            tokio::select! {
                () = token.cancelled() => return,
                () = tokio::time::sleep(PERIOD) => {}
            }
        }
    }
}

/// Those that are known to be correct. Pods are from the start on: the node's status reports them.
#[derive(Debug)]
pub(super) struct Reports(BTreeMap<String, bool>);

impl Default for Reports {
    fn default() -> Self {
        Self(BTreeMap::from([("pods".to_owned(), true)]))
    }
}

impl Reports {
    /// The event about one attempt: each failure has one, and the first success after none or a failure.
    pub(super) fn event(
        &mut self,
        name: &str,
        events: Option<(String, String)>,
        error: Option<String>,
    ) -> Option<Event> {
        let (done, failed) = events?;
        let was_good = self.0.insert(name.to_owned(), error.is_none());
        match error {
            Some(error) => Some(Event::node(
                EventType::Warning,
                "FailedNodeAllocatableEnforcement",
                format!("{failed}: {error}"),
            )),
            None if was_good != Some(true) => Some(Event::node(
                EventType::Normal,
                "NodeAllocatableEnforced",
                done,
            )),
            None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserves_are_what_the_configuration_enforces() {
        let mut kubelet = KubeletConfiguration::default();
        kubelet.system_reserved = BTreeMap::from([
            ("cpu".to_owned(), UNIT / 2),
            ("memory".to_owned(), 4096 * UNIT),
            ("pid".to_owned(), 100 * UNIT),
        ]);
        kubelet.kube_reserved = kubelet.system_reserved.clone();
        kubelet.reserves.system_cgroup = Some("/system.slice".to_owned());
        kubelet.reserves.kube_cgroup = Some("/kube".to_owned());
        assert!(wanted(&kubelet).is_empty(), "nothing is enforced");
        kubelet.enforce_node_allocatable =
            ["pods", "system-reserved", "kube-reserved-compressible"]
                .map(str::to_owned)
                .to_vec();
        kubelet.reserves.kubelet_cgroups = Some("/agent".to_owned());
        let all = wanted(&kubelet);
        let reserves: Vec<_> = all
            .iter()
            .filter_map(|kept| match kept {
                Kept::Reserve(r) => Some((r.field, r.limits.shares, r.limits.memory, r.pids)),
                _ => None,
            })
            .collect();
        assert_eq!(
            reserves,
            [
                ("systemReservedCgroup", Some(512), Some(4096), Some(100)),
                ("kubeReservedCgroup", Some(512), None, None),
            ]
        );
        assert_eq!(all.last(), Some(&Kept::Agent("/agent".to_owned())));
    }

    #[test]
    fn each_failure_and_each_recovery_is_an_event() {
        let mut reports = Reports::default();
        let mut reason = |name: &str, error: Option<&str>| {
            let texts = Some(("done".to_owned(), "failed".to_owned()));
            let event = reports.event(name, texts, error.map(str::to_owned));
            event.map(|event| (event.reason, event.message))
        };
        let done = Some(("NodeAllocatableEnforced".to_owned(), "done".to_owned()));
        let failed = Some((
            "FailedNodeAllocatableEnforcement".to_owned(),
            "failed: why".to_owned(),
        ));
        assert_eq!(reason("pods", None), None, "the start has told");
        assert_eq!(reason("pods", Some("why")), failed);
        assert_eq!(reason("pods", Some("why")), failed);
        assert_eq!(reason("pods", None), done);
        assert_eq!(reason("systemReservedCgroup", None), done);
        assert_eq!(reason("systemReservedCgroup", None), None);
    }
}
