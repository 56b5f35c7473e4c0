//! Keeps the node in the API server as it should be.
//!
//! Every 10 s the status is computed; it is written when it changed, else every five minutes. Until the API server
//! shows the node as Ready it is written as soon as the runtime is ready. Computing goes on in an outage: what
//! changes then has its time and its event, and is recorded.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams};
use rand::Rng;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::checkpoint::{Checkpoint, Report};
use super::error::{NodeError, request};
use super::known::{Known, Origin};
use super::{Backoff, Parts, came_up, jitter};
use crate::apiserver::ApiClient;
use crate::core::node_status::{
    self, Change, Computed, Due, Facts, NodeSettings, Pressure, Readiness, initial_node,
};
use crate::core::shutdown;
use crate::runtime_state::{RUNTIME_UP_THRESHOLD, RuntimeState};
use crate::types::{Clock, EventRecorder, Stamp};

/// Poll interval of the runtime until the node is Ready. Upstream: `fastNodeStatusUpdate`.
const FAST: Duration = Duration::from_millis(100);
/// First pause after a failure.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Fraction of the period by which a poll may be late.
const JITTER: f64 = 0.04;

pub(super) struct StatusTask {
    pub(super) settings: NodeSettings,
    pub(super) api: ApiClient,
    pub(super) clock: Arc<dyn Clock>,
    runtime_state: RuntimeState,
    pub(super) recorder: Arc<dyn EventRecorder>,
    pressure: watch::Receiver<Pressure>,
    pub(super) known: Known,
    checkpoint: Checkpoint,
    pub(super) facts: watch::Receiver<Option<Facts>>,
    pub(super) report: Report,
    /// Time of the newest report.
    pub(super) reported: Option<Stamp>,
    /// Longest time between two reports.
    interval: Duration,
    started: Stamp,
    /// The node was seen in the API server, or made there, by this agent.
    pub(super) registered: bool,
    /// The default labels and annotations of an existing node were checked.
    pub(super) reconciled: bool,
    /// The node that was taken over was another machine's: its devices are not on this one.
    pub(super) was_other_machine: bool,
    /// The API server has shown the node as Ready.
    ready: bool,
    backoff: Backoff,
    failing: bool,
    /// The newest refusal that was logged.
    said: String,
    pub(super) conflict_told: Option<Stamp>,
}

impl StatusTask {
    pub(super) fn new(
        parts: Parts,
        known: Known,
        checkpoint: Checkpoint,
        facts: watch::Receiver<Option<Facts>>,
    ) -> Self {
        let started = parts.clock.now();
        let (report, at) = checkpoint.report().unwrap_or((Report::default(), started));
        // A report of an earlier boot is too old, whatever the wall clock says.
        let counts = report.reported && at.boot == started.boot;
        Self {
            api: parts.api,
            clock: parts.clock,
            runtime_state: parts.runtime_state,
            recorder: parts.recorder,
            pressure: parts.pressure,
            known,
            checkpoint,
            facts,
            reported: counts.then_some(at),
            report,
            interval: parts.settings.report_frequency,
            settings: parts.settings,
            started,
            registered: false,
            reconciled: false,
            was_other_machine: false,
            ready: false,
            backoff: Backoff::new(FIRST_PAUSE),
            failing: false,
            said: String::new(),
            conflict_told: None,
        }
    }

    pub(super) async fn run(mut self) {
        if self.facts.wait_for(Option::is_some).await.is_err() {
            return std::future::pending().await;
        }
        let mut due = Instant::now();
        let (mut pressure_told, mut facts_told) = (true, true);
        let mut shutting_down = self.runtime_state.shutting_down();
        let mut set_back = self.api.connection().set_back();
        loop {
            if Instant::now() >= due || self.is_fast() && !self.failing {
                due = Instant::now() + self.turn().await;
            } else {
                // Something changed: it is told and recorded at once, and written when it is due.
                self.look();
            }
            let fast = self.waits_for_ready();
            let connection = self.api.connection().clone();
            tokio::select! {
                // All are cancel-safe.
                () = tokio::time::sleep_until(due) => {}
                () = tokio::time::sleep(FAST), if fast => {}
                () = self.known.changed() => {}
                () = came_up(&connection), if self.failing => {
                    self.backoff.reset();
                    due = Instant::now();
                }
                changed = self.pressure.changed(), if pressure_told => match changed {
                    Ok(()) => due = Instant::now(),
                    Err(_) => pressure_told = false,
                },
                // The senders are kept by `self`.
                _ = shutting_down.changed() => due = Instant::now(),
                // What is known is newer than what the server has: the node is read again, as at the start.
                _ = set_back.changed() => {
                    self.registered = false;
                    due = Instant::now();
                }
                changed = self.facts.changed(), if facts_told => match changed {
                    // A volume waits until the API server knows that it is in use, and nobody is to be sent here for devices
                    // that are gone.
                    Ok(()) if !self.failing && (self.volumes_differ() || self.devices_differ()) => {
                        due = Instant::now();
                    }
                    Ok(()) => {}
                    Err(_) => facts_told = false,
                },
            }
            if self.registered && self.known.take_gone() {
                self.registered = false;
                due = Instant::now();
            }
        }
    }

    /// Returns whether the API server's list of volumes in use differs from the actual one.
    fn volumes_differ(&self) -> bool {
        let facts = self.facts.borrow();
        let Some(in_use) = facts.as_ref().and_then(|f| f.volumes_in_use.as_ref()) else {
            return false;
        };
        let node = self.known.get();
        let status = node.as_ref().and_then(|node| node.status.as_ref());
        let shown = status.and_then(|s| s.volumes_in_use.as_deref());
        shown.unwrap_or_default() != in_use.shown(shown)
    }

    /// Returns whether the API server shows other amounts of devices than exist.
    fn devices_differ(&self) -> bool {
        let facts = self.facts.borrow();
        let node = self.known.get();
        let devices = facts.as_ref().map(|facts| &facts.devices);
        devices
            .zip(node)
            .is_some_and(|(devices, node)| node_status::devices_differ(&node, devices))
    }

    /// The node is not Ready in the API server yet.
    fn waits_for_ready(&self) -> bool {
        self.registered && !self.ready && !self.failing
    }

    /// … and could be.
    fn is_fast(&self) -> bool {
        self.waits_for_ready() && self.readiness().errors.is_empty()
    }

    /// Writes what is due, and says when to look again.
    async fn turn(&mut self) -> Duration {
        match self.converge().await {
            Ok(()) => {
                self.failing = false;
                self.backoff.reset();
                self.said.clear();
                jitter(self.settings.update_frequency, JITTER)
            }
            Err(error) => {
                self.failing = true;
                self.tell(&error);
                // What happened meanwhile is not to be missed.
                self.look();
                let most = self.settings.update_frequency;
                self.backoff.pause().min(most)
            }
        }
    }

    async fn converge(&mut self) -> Result<(), NodeError> {
        if !self.registered {
            self.register().await?;
        }
        self.known.save();
        let result = self.update().await;
        match &result {
            Err(error) if error.is_not_found() || error.is_conflict() => self.registered = false,
            _ => {}
        }
        result
    }

    fn tell(&mut self, error: &NodeError) {
        let text = error.text();
        if error.is_refusal() && text != self.said {
            warn!(
                node = self.settings.name,
                error = text,
                "cannot update node status, retrying"
            );
            self.said = text;
        } else {
            debug!(
                node = self.settings.name,
                error = text,
                "cannot update node status"
            );
        }
    }

    pub(super) fn readiness(&self) -> Readiness {
        let now = self.clock.now();
        let mut errors = self.runtime_state.errors(now);
        if let Some(network) = self.runtime_state.network_error() {
            errors.push(format!("container runtime network not ready: {network}"));
        }
        let shutting_down = self.runtime_state.is_shutting_down();
        if shutting_down {
            errors.push(shutdown::NOT_READY.to_owned());
        }
        Readiness {
            errors,
            // A shutdown is known for sure, however young the agent is.
            starting: !shutting_down && now.since(self.started) <= RUNTIME_UP_THRESHOLD,
        }
    }

    /// The node as it should be, given as it is.
    pub(super) fn compute(&self, base: &Node) -> Computed {
        let facts = self.facts.borrow().clone().unwrap_or_default();
        node_status::compute(
            base,
            &self.settings,
            &facts,
            *self.pressure.borrow(),
            &self.readiness(),
            &self.report.memory,
            self.clock.now(),
        )
    }

    /// Computes, emits events, records; writes nothing to the API server.
    fn look(&mut self) -> Option<(Arc<Node>, Computed)> {
        let base = self.known.get()?;
        let computed = self.compute(&base);
        self.take(&computed);
        self.ready = self.ready || is_ready(&base);
        Some((base, computed))
    }

    pub(super) fn take(&mut self, computed: &Computed) {
        for event in &computed.events {
            self.recorder.record(event.clone());
        }
        self.report.memory = computed.memory.clone();
        self.save();
    }

    fn save(&self) {
        let at = self.reported.unwrap_or(self.started);
        self.checkpoint.save_report(&self.report, at);
    }

    async fn update(&mut self) -> Result<(), NodeError> {
        let Some((base, mut computed)) = self.look() else {
            return Ok(());
        };
        self.check_overwritten(&base);
        let mut corrected = Vec::new();
        if !self.reconciled {
            computed.node = node_status::reconcile(&self.settings, &computed.node);
            if self.was_other_machine {
                let facts = self.facts.borrow();
                let devices = facts.as_ref().map(|facts| &facts.devices);
                let nothing = Default::default();
                let devices = devices.unwrap_or(&nothing);
                computed.node = node_status::without_other_devices(computed.node, devices);
            }
        } else if self.settings.register {
            corrected = node_status::correct_labels(&self.settings, &mut computed.node);
        }
        let change = node_status::change(&base, &computed.node);
        let now = self.clock.now();
        let residue = &self.report.memory.residue;
        let due = node_status::needs_update(&change, residue, self.reported, now, self.interval);
        if due == Due::Not {
            self.reconciled = true;
            return Ok(());
        }
        debug!(?due, substance = %change.substance, "writing the node's status");
        let answer = self.patch(&change).await?;
        self.reconciled = true;
        self.was_other_machine = false;
        for label in corrected.iter().filter(|_| due == Due::Changed) {
            info!(
                node = self.settings.name,
                label = label.name,
                shown = label.shown,
                wanted = label.wanted,
                "corrected a label of the node that is the agent's own"
            );
        }
        self.interval = match due {
            // Nodes that change together do not report together for ever.
            Due::Changed => {
                let factor = rand::rng().random_range(0.5..1.5);
                self.settings.report_frequency.mul_f64(factor)
            }
            _ => self.settings.report_frequency,
        };
        self.confirmed(&answer, &computed.node, now);
        self.known.observe(answer, Origin::Change);
        Ok(())
    }

    async fn patch(&self, change: &Change) -> Result<Node, NodeError> {
        let name = &self.settings.name;
        let patch = Patch::Strategic(&change.body);
        let params = PatchParams::default();
        let call = self.known.api().patch_status(name, &params, &patch);
        request("patch status of", &format!("node {name}"), call).await
    }

    /// The API server has taken `sent` and shows `answer`.
    pub(super) fn confirmed(&mut self, answer: &Node, sent: &Node, at: Stamp) {
        let conditions = sent.status.as_ref().and_then(|s| s.conditions.clone());
        self.report.reported = true;
        self.report.conditions = conditions.unwrap_or_default();
        self.report.memory.pending.clear();
        self.report.memory.residue = node_status::change(answer, sent).substance;
        self.reported = Some(at);
        if !self.ready && is_ready(answer) {
            self.ready = true;
            info!(node = self.settings.name, "the node is Ready");
        }
        self.save();
    }

    /// A node that is made anew has no past.
    pub(super) fn forget(&mut self) {
        self.report.memory.pending.clear();
        self.report.memory.residue = serde_json::Value::Null;
        self.report.memory.unschedulable = false;
        self.ready = false;
    }

    /// The node as it is registered, with its first status.
    pub(super) fn first(&self) -> Computed {
        self.compute(&initial_node(&self.settings))
    }
}

fn is_ready(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|s| s.conditions.as_ref());
    let mut ready = conditions.into_iter().flatten();
    ready.any(|c| c.type_ == "Ready" && c.status == "True")
}
