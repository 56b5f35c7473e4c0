//! State of a probe over its runs: thresholds, holds, records, the time of the next run. Upstream: `prober.worker`.
//!
//! The input is the spec of a probe, raw results in their order, the record of an earlier agent. The output is the
//! valid result, whether it has to be recorded and reported, and waits.
//!
//! **Invariant:** a state is about one container id. Nothing that was seen of another one counts.

use std::time::Duration;

use k8s_openapi::api::core::v1::{ContainerStatus as ApiContainerStatus, Probe};

use super::state::ProbeRecord;
use crate::types::{ContainerId, ProbeFailure, ProbeKind, Stamp};

const DEFAULT_PERIOD: u64 = 10;
const DEFAULT_TIMEOUT: u64 = 1;
const DEFAULT_SUCCESSES: u32 = 1;
const DEFAULT_FAILURES: u32 = 3;
/// A count that was not continued for this many periods starts over.
const PERIODS_A_COUNT_LASTS: u32 = 2;

/// A valid result, or a raw one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeResult {
    /// It works.
    Success,
    /// It does not.
    Failure,
    /// Not known yet.
    Unknown,
}

impl ProbeResult {
    /// `Success`, `Failure` or `Unknown`, as in records.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Success => "Success",
            Self::Failure => "Failure",
            Self::Unknown => "Unknown",
        }
    }

    fn parse(text: &str) -> Option<Self> {
        [Self::Success, Self::Failure, Self::Unknown]
            .into_iter()
            .find(|result| result.as_str() == text)
    }

    fn of(success: bool) -> Self {
        if success {
            Self::Success
        } else {
            Self::Failure
        }
    }
}

/// Timing and thresholds of a probe, with the API server's defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeSpec {
    /// From the start of the container to its first probe.
    pub initial_delay: Duration,
    /// Of one probe.
    pub timeout: Duration,
    /// From probe to probe.
    pub period: Duration,
    /// Successes in a row that make a success.
    pub success_threshold: u32,
    /// Failures in a row that make a failure.
    pub failure_threshold: u32,
}

impl ProbeSpec {
    /// Of a probe of the API. What is unset, zero or negative is the default.
    pub fn of(probe: &Probe) -> Self {
        let seconds = |value: Option<i32>, default: u64| {
            let given = value.and_then(|v| u64::try_from(v).ok()).filter(|v| *v > 0);
            Duration::from_secs(given.unwrap_or(default))
        };
        let count = |value: Option<i32>, default: u32| {
            let given = value.and_then(|v| u32::try_from(v).ok()).filter(|v| *v > 0);
            given.unwrap_or(default)
        };
        Self {
            initial_delay: seconds(probe.initial_delay_seconds, 0),
            timeout: seconds(probe.timeout_seconds, DEFAULT_TIMEOUT),
            period: seconds(probe.period_seconds, DEFAULT_PERIOD),
            success_threshold: count(probe.success_threshold, DEFAULT_SUCCESSES),
            failure_threshold: count(probe.failure_threshold, DEFAULT_FAILURES),
        }
    }

    fn threshold(&self, result: ProbeResult) -> u32 {
        match result {
            ProbeResult::Success => self.success_threshold,
            ProbeResult::Failure | ProbeResult::Unknown => self.failure_threshold,
        }
    }

    /// Time until the first probe of a container that started at `started`.
    pub fn first_wait(&self, started: Stamp, now: Stamp) -> Duration {
        started.plus(self.initial_delay).until(now)
    }

    /// Time until the next probe of a series of which one ran at `at`: the series keeps its phase, and what
    /// was missed is not made up for.
    pub fn wait_in_phase(&self, at: Stamp, now: Stamp) -> Duration {
        self.rest_of_period(now.since(at))
    }

    /// Returns the rest of the period that is under way `since` after the beginning of one.
    pub fn rest_of_period(&self, since: Duration) -> Duration {
        let period = self.period.as_nanos().max(1);
        let rest = period - since.as_nanos() % period;
        Duration::from_nanos(u64::try_from(rest).unwrap_or(u64::MAX))
    }

    /// A wait below one period which only depends on `key`: what begins at once is spread by it.
    pub fn spread(&self, key: &str) -> Duration {
        // FNV-1a: the same in every life of the agent.
        let hash = key.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let millis = u64::try_from(self.period.as_millis()).unwrap_or(u64::MAX);
        Duration::from_millis((hash >> 16) % millis.max(1))
    }
}

/// Changes by one more raw result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// True if the valid result is another one.
    pub result: bool,
    /// True if more than the time of [`ProbeState::record`] has changed.
    pub record: bool,
}

/// State of one probe of one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeState {
    kind: ProbeKind,
    container_id: ContainerId,
    result: ProbeResult,
    last: ProbeResult,
    consecutive: u32,
    at: Option<Stamp>,
}

impl ProbeState {
    /// Of a container that was never probed. Upstream: the initial values of workers.
    pub fn fresh(kind: ProbeKind, container_id: ContainerId) -> Self {
        let result = match kind {
            ProbeKind::Readiness => ProbeResult::Failure,
            ProbeKind::Liveness => ProbeResult::Success,
            ProbeKind::Startup => ProbeResult::Unknown,
        };
        Self {
            kind,
            container_id,
            result,
            last: ProbeResult::Unknown,
            consecutive: 0,
            at: None,
        }
    }

    /// Returns the state of a running container of which no record is left: the result that users saw of that very
    /// container holds until a probe contradicts it.
    pub fn inferred(
        kind: ProbeKind,
        container_id: ContainerId,
        told: Option<&ApiContainerStatus>,
    ) -> Self {
        let mut state = Self::fresh(kind, container_id);
        let same = told.filter(|told| {
            let id = told.container_id.as_deref().unwrap_or_default();
            let id = id.split_once("://").map_or(id, |(_, id)| id);
            id == state.container_id.as_str()
        });
        let said = same.is_some_and(|told| match kind {
            ProbeKind::Readiness => told.ready,
            ProbeKind::Startup => told.started == Some(true),
            ProbeKind::Liveness => false,
        });
        if said {
            state.result = ProbeResult::Success;
        }
        state
    }

    /// Goes on from a record; `None` when it is about another container. The result holds however old it
    /// is, a count only when it could still be continued.
    pub fn resume(
        kind: ProbeKind,
        spec: &ProbeSpec,
        record: &ProbeRecord,
        container_id: &ContainerId,
        now: Stamp,
    ) -> Option<Self> {
        if record.container_id != *container_id {
            return None;
        }
        let result = ProbeResult::parse(&record.result)?;
        let last = ProbeResult::parse(&record.last)?;
        let stale = now.since(record.at) > spec.period.saturating_mul(PERIODS_A_COUNT_LASTS);
        Some(Self {
            kind,
            container_id: container_id.clone(),
            result,
            last,
            consecutive: if stale { 0 } else { record.consecutive },
            at: Some(record.at),
        })
    }

    /// The container this is about.
    pub fn container_id(&self) -> &ContainerId {
        &self.container_id
    }

    /// Returns the valid result.
    pub fn result(&self) -> ProbeResult {
        self.result
    }

    /// Returns the time of the newest probe that counts.
    pub fn at(&self) -> Option<Stamp> {
        self.at
    }

    /// Returns whether the result is final until the container is another one: it is to be restarted, or it has
    /// started.
    pub fn on_hold(&self) -> bool {
        match self.kind {
            ProbeKind::Liveness => self.result == ProbeResult::Failure,
            ProbeKind::Startup => self.result != ProbeResult::Unknown,
            ProbeKind::Readiness => false,
        }
    }

    /// The restart this asks for.
    pub fn failure(&self) -> Option<ProbeFailure> {
        match (self.kind, self.result) {
            (ProbeKind::Liveness, ProbeResult::Failure) => Some(ProbeFailure::Liveness),
            (ProbeKind::Startup, ProbeResult::Failure) => Some(ProbeFailure::Startup),
            _ => None,
        }
    }

    /// Counts a raw result. One that comes while the result is on hold changes nothing. A probe that could
    /// not be made has no result, and is not counted.
    pub fn apply(&mut self, spec: &ProbeSpec, success: bool, at: Stamp) -> Change {
        if self.on_hold() {
            return Change::default();
        }
        let raw = ProbeResult::of(success);
        let before = (self.last, self.consecutive, self.at.is_some());
        let threshold = spec.threshold(raw);
        self.consecutive = if self.last == raw {
            self.consecutive.saturating_add(1).min(threshold)
        } else {
            1
        };
        self.last = raw;
        self.at = Some(at);
        let reached = self.consecutive >= threshold && self.result != raw;
        if reached {
            self.result = raw;
        }
        Change {
            result: reached,
            record: reached || before != (self.last, self.consecutive, true),
        }
    }

    /// Returns the record to keep; `None` before the first probe.
    pub fn record(&self) -> Option<ProbeRecord> {
        Some(ProbeRecord {
            container_id: self.container_id.clone(),
            result: self.result.as_str().to_owned(),
            last: self.last.as_str().to_owned(),
            consecutive: self.consecutive,
            at: self.at?,
        })
    }
}

#[cfg(test)]
mod tests;
