//! The node's lease: the sign of life that keeps its pods from being moved elsewhere.
//!
//! It is renewed by an update of the version that the last answer showed; only a conflict costs a read. In an
//! outage it is tried again with growing pauses, for ever. Upstream: `component-helpers/apimachinery/lease`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::PostParams;
use tracing::{debug, warn};

use super::error::{NodeError, request};
use super::{Backoff, jitter};
use crate::core::node_status::NodeSettings;
use crate::node_object::NodeObject;
use crate::types::{Clock, Event, EventRecorder, EventType, Stamp};

/// Interval of reports about a node name that another machine uses too.
pub(super) const CONFLICT_PERIOD: Duration = Duration::from_secs(60);

/// First pause after a failure.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// Conflicts in a row before the next try waits.
const TRIES: usize = 5;
/// Own renewals that are remembered: one that was not answered may have been taken all the same.
const REMEMBERED: usize = 8;
const JITTER: f64 = 0.04;
/// Precision of the time in a lease.
const LEAST_STEP: Duration = Duration::from_micros(1);

pub(super) struct LeaseTask {
    api: Api<Lease>,
    name: String,
    object: String,
    duration: Duration,
    node: NodeObject,
    recorder: Arc<dyn EventRecorder>,
    clock: Arc<dyn Clock>,
    latest: Option<Lease>,
    sent: VecDeque<MicroTime>,
    said: String,
    conflict_told: Option<Stamp>,
}

impl LeaseTask {
    pub(super) fn new(
        api: Api<Lease>,
        settings: &NodeSettings,
        node: NodeObject,
        recorder: Arc<dyn EventRecorder>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        Self {
            api,
            name: settings.name.clone(),
            object: format!("lease kube-node-lease/{}", settings.name),
            duration: settings.lease_duration,
            node,
            recorder,
            clock,
            latest: None,
            sent: VecDeque::new(),
            said: String::new(),
            conflict_told: None,
        }
    }

    /// Renews for ever.
    pub(super) async fn run(mut self) {
        let mut backoff = Backoff::new(FIRST_PAUSE);
        loop {
            let begun = tokio::time::Instant::now();
            match self.renew().await {
                Ok(()) => {
                    backoff.reset();
                    self.said.clear();
                    let period = jitter(self.duration / 4, JITTER);
                    tokio::time::sleep_until(begun + period).await;
                }
                Err(error) => {
                    self.tell(&error);
                    tokio::time::sleep(backoff.pause()).await;
                }
            }
        }
    }

    fn tell(&mut self, error: &NodeError) {
        let text = error.text();
        if error.is_refusal() && text != self.said {
            warn!(
                node = self.name,
                error = text,
                "cannot renew the node's lease, retrying"
            );
            self.said = text;
        } else {
            debug!(
                node = self.name,
                error = text,
                "cannot renew the node's lease"
            );
        }
    }

    async fn renew(&mut self) -> Result<(), NodeError> {
        for _ in 0..TRIES {
            let base = match self.latest.take() {
                Some(latest) => latest,
                None => match self.read().await? {
                    Some(lease) => lease,
                    None => return self.create().await,
                },
            };
            match self.update(&base).await {
                Ok(lease) => {
                    self.latest = Some(lease);
                    return Ok(());
                }
                Err(error) if error.is_not_found() => return self.create().await,
                Err(error) if error.is_conflict() => {
                    let lease = self.read().await?;
                    // One that is older comes from a server that was set back to a backup.
                    let is_older = |lease: &Lease| is_older(lease, &base);
                    if !lease.as_ref().is_some_and(is_older) {
                        self.check_conflict(lease.as_ref());
                    }
                    self.latest = lease;
                }
                Err(error) => {
                    // Whether it was taken is not known; a conflict tells.
                    self.latest = Some(base);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    async fn read(&self) -> Result<Option<Lease>, NodeError> {
        request("get", &self.object, self.api.get_opt(&self.name)).await
    }

    async fn update(&mut self, base: &Lease) -> Result<Lease, NodeError> {
        let mut lease = base.clone();
        lease.metadata.managed_fields = None;
        if let Some(owner) = self.owner() {
            lease.metadata.owner_references = Some(vec![owner]);
        }
        self.fill(&mut lease);
        let params = PostParams::default();
        let call = self.api.replace(&self.name, &params, &lease);
        request("update", &self.object, call).await
    }

    /// A lease without its owner would outlive the node: it waits for the node.
    async fn create(&mut self) -> Result<(), NodeError> {
        let owner = loop {
            if let Some(owner) = self.owner() {
                break owner;
            }
            let mut node = self.node.subscribe();
            if self.owner().is_none() && node.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        let mut lease = Lease {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                namespace: Some("kube-node-lease".to_owned()),
                owner_references: Some(vec![owner]),
                ..ObjectMeta::default()
            },
            spec: None,
        };
        self.fill(&mut lease);
        let params = PostParams::default();
        let call = self.api.create(&params, &lease);
        match request("create", &self.object, call).await {
            Ok(lease) => self.latest = Some(lease),
            // Made meanwhile: it is read with the next try.
            Err(error) if error.is_conflict() => self.latest = None,
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn fill(&mut self, lease: &mut Lease) {
        let wall_us = self.clock.now().wall_ms.saturating_mul(1000);
        let now = Timestamp::from_microsecond(wall_us).unwrap_or_default();
        let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
        let now = MicroTime(later_than(spec.renew_time.as_ref(), now));
        spec.holder_identity = Some(self.name.clone());
        spec.lease_duration_seconds = i32::try_from(self.duration.as_secs()).ok();
        spec.renew_time = Some(now.clone());
        if self.sent.len() == REMEMBERED {
            self.sent.pop_front();
        }
        self.sent.push_back(now);
    }

    fn owner(&self) -> Option<OwnerReference> {
        let node = self.node.get()?;
        Some(OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Node".to_owned(),
            name: self.name.clone(),
            uid: node.metadata.uid.clone()?,
            ..OwnerReference::default()
        })
    }

    /// Tells when somebody else renewed it since this agent did.
    fn check_conflict(&mut self, lease: Option<&Lease>) {
        let spec = lease.and_then(|lease| lease.spec.as_ref());
        let Some(renewed) = spec.and_then(|spec| spec.renew_time.as_ref()) else {
            return;
        };
        let now = self.clock.now();
        let told = (self.conflict_told).is_some_and(|told| now.since(told) < CONFLICT_PERIOD);
        if self.sent.contains(renewed) || told {
            return;
        }
        self.conflict_told = Some(now);
        let name = &self.name;
        self.recorder.record(Event::node(
            EventType::Warning,
            "NodeNameConflict",
            format!(
                "The lease of node {name} was renewed at {} by somebody else: another machine uses this node's name. \
                 Give one of them another name (--hostname-override)",
                renewed.0
            ),
        ));
    }
}

/// Returns whether a lease is an older version than another; versions that are not numbers cannot be compared.
fn is_older(lease: &Lease, than: &Lease) -> bool {
    let version = |lease: &Lease| -> Option<u64> {
        let version = lease.metadata.resource_version.as_deref()?;
        version.parse().ok()
    };
    let versions = version(lease).zip(version(than));
    versions.is_some_and(|(one, other)| one < other)
}

/// Returns the time of a renewal: now, or a moment after the previous one where the clock was set back. A controller takes
/// a lease whose time does not grow for one that is not renewed, and the node for lost.
fn later_than(previous: Option<&MicroTime>, now: Timestamp) -> Timestamp {
    let next = previous.and_then(|at| at.0.checked_add(LEAST_STEP).ok());
    next.map_or(now, |next| next.max(now))
}

/// Returns whether the lease was renewed recently. One from the future was renewed by a clock that was wrong, and never goes back.
pub(super) fn is_alive(lease: &Lease, now: Stamp) -> bool {
    let Some(spec) = &lease.spec else {
        return false;
    };
    let renewed = spec.renew_time.as_ref().map(|t| t.0.as_millisecond());
    let lasts = i64::from(spec.lease_duration_seconds.unwrap_or(0)) * 1000;
    renewed.is_some_and(|at| {
        now.wall_ms < at.saturating_add(lasts) && at <= now.wall_ms.saturating_add(lasts)
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::coordination::v1::LeaseSpec;

    use super::*;
    use crate::types::BootId;

    #[test]
    fn a_lease_is_alive_for_its_duration_and_not_if_it_is_of_the_future() {
        let now = Stamp {
            boot: BootId(1),
            boottime_ms: 0,
            wall_ms: 1_800_000_000_000,
        };
        for (seconds, expected) in [
            (0, true),
            (-39, true),
            (-40, false),
            (40, true),
            (41, false),
        ] {
            let at = Timestamp::from_millisecond(now.wall_ms + seconds * 1000).unwrap();
            let lease = Lease {
                spec: Some(LeaseSpec {
                    renew_time: Some(MicroTime(at)),
                    lease_duration_seconds: Some(40),
                    ..LeaseSpec::default()
                }),
                ..Lease::default()
            };
            assert_eq!(is_alive(&lease, now), expected, "{seconds} s");
        }
        assert!(!is_alive(&Lease::default(), now));
    }
}
