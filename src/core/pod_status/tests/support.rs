//! One pod with containers of all kinds, and short words for what a status says of it.

use super::super::*;
use crate::core::restart_all::Restart;
pub(super) use crate::core::testkit::*;
pub(super) use crate::types::ProbeView;
pub(super) use crate::types::runtime::{ContainerStatus, SandboxState};

pub(super) struct Setup {
    pub(super) pod: Pod,
    pub(super) status: PodStatus,
    pub(super) owned: Owned,
    pub(super) restart: Option<Restart>,
    pub(super) previous: Option<api::PodStatus>,
    pub(super) reasons: BTreeMap<String, (String, String)>,
    pub(super) probes: BTreeMap<String, ProbeView>,
    pub(super) resize: ResizeView,
    pub(super) recursive_read_only: Option<bool>,
    pub(super) volume_images: BTreeMap<String, String>,
    pub(super) host_ips: Vec<String>,
    pub(super) stage: Stage,
    pub(super) evicted: Option<(&'static str, &'static str)>,
    pub(super) deadline_exceeded: bool,
    pub(super) now: i64,
}

impl Setup {
    pub(super) fn of(pod: Pod, status: PodStatus) -> Self {
        Self {
            pod,
            status,
            owned: Owned::new(),
            restart: None,
            previous: None,
            reasons: BTreeMap::new(),
            probes: BTreeMap::new(),
            resize: ResizeView::default(),
            recursive_read_only: Some(false),
            volume_images: BTreeMap::new(),
            host_ips: vec!["192.0.2.1".into()],
            stage: Stage::Syncing,
            evicted: None,
            deadline_exceeded: false,
            now: 70,
        }
    }

    /// Init container `i`, sidecar `s`, main container `m`.
    pub(super) fn all_kinds(policy: &str, containers: Vec<ContainerStatus>) -> Self {
        Self::of(all_kinds(policy), runtime(containers))
    }

    pub(super) fn with(mut self, owned: Owned) -> Self {
        self.owned = owned;
        self
    }

    pub(super) fn generate(&self) -> api::PodStatus {
        generate(&StatusInput {
            pod: &self.pod,
            status: &self.status,
            records: &borrowed(&self.owned).with_restart(self.restart.clone()),
            previous: self.previous.as_ref(),
            reasons: &self.reasons,
            probes: &self.probes,
            resize: &self.resize,
            recursive_read_only: self.recursive_read_only,
            volume_images: &self.volume_images,
            host_ips: &self.host_ips,
            runtime_name: "containerd",
            stage: self.stage,
            evicted: self.evicted,
            deadline_exceeded: self.deadline_exceeded,
            listed_at: at(self.now),
            now: at(self.now),
            backoff_max: Duration::from_secs(300),
        })
    }
}

pub(super) fn pod_of(spec: serde_json::Value) -> Pod {
    serde_json::from_value(serde_json::json!({
        "metadata": {"name": "web", "namespace": "ns", "uid": "u1"},
        "spec": spec,
    }))
    .unwrap()
}

pub(super) fn all_kinds(policy: &str) -> Pod {
    pod_of(serde_json::json!({
        "restartPolicy": policy,
        "initContainers": [
            {"name": "i", "image": "img:1"},
            {"name": "s", "image": "img:1", "restartPolicy": "Always"},
        ],
        "containers": [{"name": "m", "image": "img:1"}],
    }))
}

/// The runtime without a ready sandbox.
pub(super) fn no_sandbox(containers: Vec<ContainerStatus>) -> PodStatus {
    let mut status = runtime(containers);
    status.sandboxes[0].state = SandboxState::NotReady;
    status
}

pub(super) fn wiped() -> PodStatus {
    PodStatus::empty("u1".into())
}

/// A record whose start intent was dropped: its end belongs to a previous sandbox.
pub(super) fn forgotten(name: &str, exit_code: i32) -> crate::core::state::ContainerRecord {
    let mut record = ended(name, 0, exit_code);
    record.intent = None;
    record
}

/// A state in a word: `running`, `137`, `CrashLoopBackOff`.
pub(super) fn word(state: Option<&api::ContainerState>) -> String {
    let Some(state) = state else {
        return "-".into();
    };
    if state.running.is_some() {
        return "running".into();
    }
    if let Some(end) = &state.terminated {
        return end.exit_code.to_string();
    }
    let waiting = state.waiting.clone().unwrap_or_default();
    waiting.reason.unwrap_or_default()
}

/// `name=state/last state/restart count`, a `+` for ready and a `*` for started.
pub(super) fn words(status: &api::PodStatus) -> String {
    let mut out = status.phase.clone().unwrap();
    for c in all_statuses(status) {
        let (now, last) = (word(c.state.as_ref()), word(c.last_state.as_ref()));
        let started = if c.started == Some(true) { "*" } else { "" };
        let ready = if c.ready { "+" } else { "" };
        let count = c.restart_count;
        out.push_str(&format!(" {}={now}/{last}/{count}{started}{ready}", c.name));
    }
    out.replace(POD_INITIALIZING, "init")
        .replace(CONTAINER_CREATING, "creating")
}

pub(super) fn condition<'a>(status: &'a api::PodStatus, type_: &str) -> &'a api::PodCondition {
    let mut all = status.conditions.iter().flatten();
    all.find(|c| c.type_ == type_).unwrap()
}

/// `True`, or `False Reason: message`.
pub(super) fn verdict(status: &api::PodStatus, type_: &str) -> String {
    let c = condition(status, type_);
    let mut out = c.status.clone();
    if let Some(reason) = &c.reason {
        out.push_str(&format!(" {reason}"));
    }
    if let Some(message) = &c.message {
        out.push_str(&format!(": {message}"));
    }
    out
}
