//! Open files of containers, counted in `/proc`; cAdvisor's `processStatsFromProcs`.
//!
//! Counting reads every open file of every process, so a count is kept for a minute, and one collection counts for a
//! short time only: the rest keeps its previous figures until the next.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::cgroup::Hierarchies;
use super::model::{Descriptors, PodUsage, SystemUsage, Usage};
use super::proc::Proc;
use crate::types::ContainerId;

/// Largest age of a count.
const MAX_AGE: Duration = Duration::from_secs(60);
/// Time budget of counting in one collection. A container is counted to its end.
const BUDGET: Duration = Duration::from_millis(200);

/// Last counts. A container that was not seen in a collection is forgotten.
#[derive(Debug, Default)]
pub(super) struct Counts(Mutex<HashMap<ContainerId, (Instant, Descriptors)>>);

impl Counts {
    /// Fills in the open files of containers, and of cgroups without processes of their own. Blocking, for up to
    /// [`BUDGET`] and what the last container takes.
    pub(super) fn fill(
        &self,
        pods: &mut [PodUsage],
        system: &mut [SystemUsage],
        hierarchies: &Hierarchies,
        proc: &Proc,
    ) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut old = std::mem::take(&mut *known);
        let begun = Instant::now();
        for pod in pods {
            none_without_processes(&mut pod.usage);
            for container in &mut pod.containers {
                let before = old.remove(&container.id);
                let is_due = before.is_none_or(|(at, _)| begun.duration_since(at) >= MAX_AGE);
                let counted = if is_due && !container.cgroup.is_empty() && begun.elapsed() < BUDGET
                {
                    let pids = hierarchies.processes(&container.cgroup);
                    Some((begun, count(proc, &pids)))
                } else {
                    before
                };
                if let Some(counted) = counted {
                    container.usage.descriptors = Some(counted.1);
                    known.insert(container.id.clone(), counted);
                }
            }
        }
        for part in system {
            none_without_processes(&mut part.usage);
        }
    }
}

fn none_without_processes(usage: &mut Usage) {
    if usage.processes == Some(0) {
        usage.descriptors = Some(Descriptors::none());
    }
}

/// Counts the open files of these processes. One that has ended has none.
fn count(proc: &Proc, pids: &[u32]) -> Descriptors {
    let mut all = Descriptors::none();
    for of in pids.iter().filter_map(|pid| proc.descriptors(*pid)) {
        all.open = all.open.saturating_add(of.open);
        let both = all.sockets.zip(of.sockets);
        all.sockets = both.map(|(all, of)| all.saturating_add(of));
    }
    all
}
