//! Probe results on their way to the sync loop, and as decisions and statuses use them.

use tokio::sync::mpsc;

use super::names::{ContainerId, PodUid};

/// Capacity of each channel of probe results.
pub const PROBE_CAPACITY: usize = 20;

/// Kind of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ProbeKind {
    /// Failure restarts the container.
    Liveness,
    /// Decides whether the container is ready.
    Readiness,
    /// Gates the other two.
    Startup,
}

impl ProbeKind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Liveness, Self::Readiness, Self::Startup];

    /// `Liveness`, `Readiness` or `Startup`, as in events, metrics and the keys of records.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Liveness => "Liveness",
            Self::Readiness => "Readiness",
            Self::Startup => "Startup",
        }
    }
}

/// A new result of a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeUpdate {
    /// The pod.
    pub pod: PodUid,
    /// The container.
    pub container: ContainerId,
    /// True if the probe succeeded.
    pub success: bool,
}

/// Sending ends for probe results.
#[derive(Clone, Debug)]
pub struct ProbeSenders {
    /// Liveness results.
    pub liveness: mpsc::Sender<ProbeUpdate>,
    /// Readiness results.
    pub readiness: mpsc::Sender<ProbeUpdate>,
    /// Startup results.
    pub startup: mpsc::Sender<ProbeUpdate>,
}

/// Receiving ends for probe results.
#[derive(Debug)]
pub struct ProbeReceivers {
    /// Liveness results.
    pub liveness: mpsc::Receiver<ProbeUpdate>,
    /// Readiness results.
    pub readiness: mpsc::Receiver<ProbeUpdate>,
    /// Startup results.
    pub startup: mpsc::Receiver<ProbeUpdate>,
}

/// A channel for each kind of probe.
pub fn channels() -> (ProbeSenders, ProbeReceivers) {
    let (liveness_tx, liveness) = mpsc::channel(PROBE_CAPACITY);
    let (readiness_tx, readiness) = mpsc::channel(PROBE_CAPACITY);
    let (startup_tx, startup) = mpsc::channel(PROBE_CAPACITY);
    let senders = ProbeSenders {
        liveness: liveness_tx,
        readiness: readiness_tx,
        startup: startup_tx,
    };
    let receivers = ProbeReceivers {
        liveness,
        readiness,
        startup,
    };
    (senders, receivers)
}

/// Probe results of a running container; `None` = no result yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProbeView {
    /// Readiness.
    pub ready: Option<bool>,
    /// Startup.
    pub started: Option<bool>,
}

/// A probe that says its container must be restarted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeFailure {
    /// The liveness probe failed.
    Liveness,
    /// The startup probe failed.
    Startup,
}
