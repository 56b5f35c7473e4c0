//! Knowledge and last actions of the manager of evictions, stored for `holdfast dump pressure`.
//!
//! The input is the configured thresholds, observations, removals of garbage, chosen pods. The output is one record in
//! table `objects`. Pure. No decision uses it.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Candidate, Condition, Figure, Observations, PERIOD, Rules, Standing, Threshold};
use crate::core::state::kinds::{self, Declared, Key, Kind};
use crate::core::state::{State, Transaction};
use crate::types::{PodExt, PodUid, Stamp};

/// Key of the record in table `objects`.
pub const KEY: &str = "pressure//node";
/// Largest age of recorded observations while no threshold is met or near.
const REFRESH: Duration = Duration::from_secs(60);

/// The record.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Report {
    /// The thresholds.
    pub thresholds: Vec<ThresholdReport>,
    /// Observed values by signal; what could not be read is absent.
    pub observed: BTreeMap<String, FigureReport>,
    /// Time of the observation.
    pub observed_at: Option<Stamp>,
    /// The last removal of garbage for want of space.
    pub last_reclaim: Option<Reclaim>,
    /// The last pod that was chosen.
    pub last_victim: Option<Victim>,
}

/// A configured threshold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ThresholdReport {
    /// Key of its record in table `signals`.
    pub key: String,
    /// Its signal.
    pub signal: String,
    /// As configured.
    pub value: String,
    /// In seconds; `None` for a hard threshold.
    pub grace_seconds: Option<u64>,
    /// `evictionMinimumReclaim`, as configured.
    pub minimum_reclaim: Option<String>,
    /// The amount that has to be available, by the last known capacity.
    pub quantity: Option<u64>,
}

/// An observed value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FigureReport {
    /// Available.
    pub available: u64,
    /// In all.
    pub capacity: u64,
}

/// A removal of garbage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Reclaim {
    /// Key of the threshold that it was for.
    pub threshold: String,
    /// Start time.
    pub began: Stamp,
    /// End; `None` while it is under way, or if the agent exited in the middle.
    pub ended: Option<Stamp>,
    /// False if nothing was removed, since it was unknown which pods are wanted.
    pub removed: Option<bool>,
}

/// A pod that was chosen, with the figures that decided.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Victim {
    /// Its UID.
    pub uid: PodUid,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Key of the threshold.
    pub threshold: String,
    /// Time of the choice.
    pub at: Stamp,
    /// Its grace period.
    pub grace_seconds: i64,
    /// See [`Standing::candidates`].
    pub candidates: usize,
    /// See [`Standing::used`].
    pub used: u64,
    /// See [`Standing::request`].
    pub request: Option<u64>,
    /// See [`Standing::priority`].
    pub priority: i32,
    /// All of that in one line.
    pub why: String,
}

impl Victim {
    /// The record of a choice.
    pub fn new(
        threshold: &Threshold,
        figure: Figure,
        chosen: &Candidate<'_>,
        standing: &Standing,
        (at, grace_seconds): (Stamp, i64),
    ) -> Self {
        Self {
            uid: chosen.pod.uid(),
            namespace: chosen.pod.namespace().to_owned(),
            name: chosen.pod.name().to_owned(),
            threshold: threshold.key(),
            at,
            grace_seconds,
            candidates: standing.candidates,
            used: standing.used,
            request: standing.request,
            priority: standing.priority,
            why: super::why(threshold, figure, standing),
        }
    }
}

impl Kind for Report {
    const DECLARED: Declared = kinds::PRESSURE;
}

impl Report {
    /// Returns its key, which is [`KEY`].
    fn key() -> Key<Self> {
        Key::new("", "node")
    }

    /// Returns the one in `state`; an empty one if there is none, or none that can be read.
    pub fn of(state: &State) -> Self {
        state.object(&Self::key()).unwrap_or_default()
    }

    /// Notes an observation, and the thresholds that it is compared with.
    pub fn observe(&mut self, rules: &Rules, observed: &Observations, now: Stamp) {
        let figures = observed.figures.iter();
        self.observed = figures
            .map(|(signal, figure)| {
                let Figure {
                    available,
                    capacity,
                } = *figure;
                let figure = FigureReport {
                    available,
                    capacity,
                };
                (signal.name().to_owned(), figure)
            })
            .collect();
        self.observed_at = Some(now);
        let before = std::mem::take(&mut self.thresholds);
        let known = |key: &str| before.iter().find(|of| of.key == key)?.quantity;
        let thresholds = rules.thresholds.iter().map(|threshold| {
            let key = threshold.key();
            let figure = observed.figures.get(&threshold.signal);
            let quantity = figure.map(|figure| threshold.value.of(figure.capacity));
            ThresholdReport {
                signal: threshold.signal.name().to_owned(),
                value: threshold.value.to_string(),
                grace_seconds: threshold.grace.map(|grace| grace.as_secs()),
                minimum_reclaim: threshold.minimum_reclaim.map(|least| least.to_string()),
                quantity: quantity.or_else(|| known(&key)),
                key,
            }
        });
        self.thresholds = thresholds.collect();
    }

    /// Returns what has to be committed for the record in `state` to become this one. Observed values alone are written
    /// once a minute, once a [`PERIOD`] while that `is_urgent`.
    pub fn changes(&self, state: &State, is_urgent: bool, now: Stamp) -> Transaction {
        let stored = Self::of(state);
        let settled = |report: &Self| {
            let mut settled = report.clone();
            settled.observed.clear();
            settled.observed_at = None;
            settled
        };
        let pause = if is_urgent { PERIOD } else { REFRESH };
        let is_recent = stored
            .observed_at
            .is_some_and(|at| at.boot == now.boot && now.since(at) < pause);
        if is_recent && settled(&stored) == settled(self) {
            return Transaction::new();
        }
        Transaction::new().put_object(&Self::key(), self, now)
    }
}

/// Returns the names of the conditions.
pub fn condition_names() -> [&'static str; 3] {
    Condition::ALL.map(Condition::name)
}
