//! Keeps the number of volumes of a driver on this node up to date: a driver may use slots elsewhere, or gain some.
//! Upstream: `MutableCSINodeAllocatableCount`.
//!
//! In: the registered drivers, their CSIDriver objects, and drivers that answered `ResourceExhausted`. Out: calls of
//! NodeGetInfo, at the interval `nodeAllocatableUpdatePeriodSeconds` and after each such answer; `super::node_info`
//! reports changes. A driver whose CSIDriver names no period is never asked.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::storage::v1::CSIDriver;
use kube::Api;
use rand::Rng;
use tokio::time::Instant;

use super::registry::Drivers;
use crate::apiserver::ApiClient;

/// Interval at which a driver's CSIDriver is read for its period; a fifth more or less.
const LOOK: Duration = Duration::from_secs(600);
/// The same after a failure.
const LOOK_AGAIN: Duration = Duration::from_secs(60);
const REQUEST: Duration = Duration::from_secs(10);
/// A driver that is out of slots again and again is not asked more often than this.
const APART: Duration = Duration::from_secs(5);

/// Schedule of one driver.
#[derive(Clone, Copy, Debug)]
struct Plan {
    /// When its CSIDriver is asked for.
    look: Instant,
    /// `nodeAllocatableUpdatePeriodSeconds`.
    period: Option<Duration>,
    /// When it was asked last, or registered.
    asked: Instant,
    /// It said that it has no slot left.
    exhausted: bool,
}

impl Plan {
    fn new(now: Instant) -> Self {
        Self {
            look: now,
            period: None,
            asked: now,
            exhausted: false,
        }
    }

    /// When the driver is asked; `None` for never.
    fn due(&self) -> Option<Instant> {
        let period = self.period?;
        let wait = match self.exhausted {
            true => APART.min(period),
            false => period,
        };
        Some(self.asked + wait)
    }
}

/// See the module.
pub(super) struct Allocatable {
    api: ApiClient,
    drivers: Drivers,
    plans: BTreeMap<String, Plan>,
}

impl Allocatable {
    pub(super) fn new(api: ApiClient, drivers: Drivers) -> Self {
        Self {
            api,
            drivers,
            plans: BTreeMap::new(),
        }
    }

    /// For ever. Dropping it loses nothing that is not done again.
    pub(super) async fn run(mut self) {
        let mut changes = self.drivers.changes();
        loop {
            changes.mark_unchanged();
            self.follow();
            self.look().await;
            self.ask().await;
            let due = self.plans.values();
            let due = due.flat_map(|plan| [Some(plan.look), plan.due()]);
            let due = due.flatten().min();
            let sleep = async {
                match due {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                Ok(()) = changes.changed() => {}
                () = self.drivers.exhaustion() => {}
                () = sleep => {}
            }
        }
    }

    /// The drivers that there are, and what they said of themselves.
    fn follow(&mut self) {
        let now = Instant::now();
        let registered = self.drivers.registered();
        let names: Vec<&String> = registered.iter().map(|driver| &driver.name).collect();
        self.plans.retain(|name, _| names.contains(&name));
        for name in names {
            let plan = self.plans.entry(name.clone());
            plan.or_insert_with(|| Plan::new(now));
        }
        for name in self.drivers.take_exhausted() {
            if let Some(plan) = self.plans.get_mut(&name) {
                plan.exhausted = true;
            }
        }
    }

    /// Reads the periods that are due to be looked at.
    async fn look(&mut self) {
        let api: Api<CSIDriver> = Api::all(self.api.kube());
        for (name, plan) in &mut self.plans {
            if plan.look > Instant::now() {
                continue;
            }
            let found = tokio::time::timeout(REQUEST, api.get_opt(name)).await;
            let pause = match found {
                Ok(Ok(found)) => {
                    let period = found.and_then(|d| d.spec.node_allocatable_update_period_seconds);
                    let period = period.and_then(|seconds| u64::try_from(seconds).ok());
                    plan.period = period.filter(|s| *s > 0).map(Duration::from_secs);
                    LOOK
                }
                Ok(Err(error)) => {
                    tracing::debug!(driver = name, %error, "the CSIDriver cannot be had now");
                    LOOK_AGAIN
                }
                Err(_) => LOOK_AGAIN,
            };
            plan.look = Instant::now() + pause.mul_f64(rand::rng().random_range(0.8..1.2));
        }
    }

    /// Asks the drivers that are due.
    async fn ask(&mut self) {
        for (name, plan) in &mut self.plans {
            if plan.due().is_none_or(|due| due > Instant::now()) {
                continue;
            }
            if let Err(error) = self.drivers.ask_again(name).await {
                tracing::debug!(
                    driver = name,
                    error,
                    "a driver does not say how many volumes it takes"
                );
            }
            plan.asked = Instant::now();
            plan.exhausted = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_driver_is_asked_each_period_and_sooner_when_it_is_exhausted() {
        let now = Instant::now();
        let mut plan = Plan::new(now);
        let due = |plan: &Plan| plan.due().map(|at| at.duration_since(now).as_secs());
        plan.exhausted = true;
        assert_eq!(due(&plan), None, "its CSIDriver names no period");
        plan.period = Some(Duration::from_secs(60));
        assert_eq!(due(&plan), Some(5));
        plan.exhausted = false;
        assert_eq!(due(&plan), Some(60));
    }
}
