//! Reports the expansion of volumes in the status of their claims.
//!
//! In: a claim and the result of its volume's expansion. Out: a patch with the differences, for exactly the version of
//! the claim that was read. A deleted claim needs no status.
//!
//! **Invariant:** only differences are written; conditions of others stay.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, PersistentVolumeClaimCondition, PersistentVolumeClaimStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use super::cache::{Trouble, Watched as _, lock};
use super::refs::{Kind, ObjectKey};
use super::{ObjectError, Objects};
use crate::core::volumes::growth::{CONDITIONS, IN_PROGRESS, INFEASIBLE, NODE_ERROR};

/// Deadline of a request.
const DEADLINE: Duration = Duration::from_secs(10);

impl Objects {
    /// The claim's volume has `bytes` now: writes that into its status and ends the conditions of a resize. Upstream:
    /// `MarkFSResizeFinished`. Takes at most 10 s. Cancel-safe.
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn claim_has_grown(
        &self,
        namespace: &str,
        name: &str,
        bytes: u64,
    ) -> Result<(), ObjectError> {
        self.tell_claim(namespace, name, |status| Some(grown(status, bytes)))
            .await
    }

    /// The claim's volume is being grown by this node. Upstream: `MarkNodeExpansionInProgress`. Takes at most 10 s.
    /// Cancel-safe.
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn claim_grows(&self, namespace: &str, name: &str) -> Result<(), ObjectError> {
        self.tell_claim(namespace, name, grows).await
    }

    /// The claim's volume could not be grown by this node; `never` when that will not change. Upstream:
    /// `MarkNodeExpansionFailedCondition`, `MarkNodeExpansionInfeasible`. Takes at most 10 s. Cancel-safe.
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn claim_does_not_grow(
        &self,
        namespace: &str,
        name: &str,
        never: bool,
        why: &str,
    ) -> Result<(), ObjectError> {
        let now = self.inner.ctx.clock.now().wall_ms;
        let now = Timestamp::from_millisecond(now).unwrap_or_default();
        self.tell_claim(namespace, name, |status| failed(status, never, why, now))
            .await
    }

    /// Patches the status of a claim with what `change` makes of it.
    async fn tell_claim(
        &self,
        namespace: &str,
        name: &str,
        change: impl FnOnce(PersistentVolumeClaimStatus) -> Option<Value>,
    ) -> Result<(), ObjectError> {
        let key = ObjectKey::new(Kind::Claim, namespace, name);
        let Some(api) = &self.inner.ctx.api else {
            return Err(ObjectError::Standalone {
                kind: key.kind.name(),
                key: key.object_name(),
            });
        };
        let claims = PersistentVolumeClaim::api(api, namespace);
        let write = async {
            let Some(claim) = claims.get_opt(name).await? else {
                return Ok(());
            };
            let Some(status) = change(claim.status.unwrap_or_default()) else {
                return Ok(());
            };
            let patch = json!({
                "metadata": {"resourceVersion": claim.metadata.resource_version},
                "status": status,
            });
            let params = PatchParams::default();
            claims
                .patch_status(name, &params, &Patch::Merge(patch))
                .await?;
            Ok(())
        };
        let trouble = match tokio::time::timeout(DEADLINE, write).await {
            Ok(Ok(())) => {
                if let Some(watch) = lock(&self.inner.tables).watches.get(&key) {
                    watch.cells.doubt();
                }
                return Ok(());
            }
            Ok(Err(error)) => Trouble::of(&error),
            Err(_) => Trouble::Unanswered(format!("no answer within {} s", DEADLINE.as_secs())),
        };
        let (kind, key) = (key.kind.name(), key.object_name());
        Err(match trouble {
            Trouble::Refused(why) => ObjectError::Refused { kind, key, why },
            Trouble::Unanswered(why) => ObjectError::Unreachable { kind, key, why },
        })
    }
}

fn grown(status: PersistentVolumeClaimStatus, bytes: u64) -> Value {
    let mut conditions = status.conditions.unwrap_or_default();
    conditions.retain(|c| !CONDITIONS.contains(&c.type_.as_str()));
    let mut patch = json!({
        "capacity": {"storage": bytes_text(bytes)},
        "conditions": conditions,
    });
    if status.allocated_resource_statuses.is_some() {
        patch["allocatedResourceStatuses"] = json!({"storage": null});
    }
    patch
}

fn grows(status: PersistentVolumeClaimStatus) -> Option<Value> {
    let turn = status.allocated_resource_statuses;
    let turn = turn.and_then(|mut all| all.remove("storage"))?;
    (turn != IN_PROGRESS).then(|| json!({"allocatedResourceStatuses": {"storage": IN_PROGRESS}}))
}

fn failed(
    status: PersistentVolumeClaimStatus,
    never: bool,
    why: &str,
    now: Timestamp,
) -> Option<Value> {
    let mut patch = json!({});
    let turn = status.allocated_resource_statuses;
    let turn = turn.and_then(|mut all| all.remove("storage"));
    if never && turn.is_some_and(|turn| turn != INFEASIBLE) {
        patch["allocatedResourceStatuses"] = json!({"storage": INFEASIBLE});
    }
    let mut conditions = status.conditions.unwrap_or_default();
    let found = conditions.iter().find(|c| c.type_ == NODE_ERROR);
    let is_known = |c: &PersistentVolumeClaimCondition| {
        c.status == "True" && c.message.as_deref() == Some(why)
    };
    if !found.is_some_and(is_known) {
        let since = found.filter(|c| c.status == "True");
        let since = since.and_then(|c| c.last_transition_time.clone());
        let condition = PersistentVolumeClaimCondition {
            type_: NODE_ERROR.to_owned(),
            status: "True".to_owned(),
            message: Some(why.to_owned()),
            last_transition_time: Some(since.unwrap_or(Time(now))),
            ..PersistentVolumeClaimCondition::default()
        };
        conditions.retain(|c| c.type_ != NODE_ERROR);
        conditions.push(condition);
        patch["conditions"] = json!(conditions);
    }
    patch
        .as_object()
        .is_some_and(|p| !p.is_empty())
        .then_some(patch)
}

/// As people write sizes: `10Gi`, or bytes when it is no whole number of anything.
fn bytes_text(bytes: u64) -> String {
    for (shift, unit) in [(40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")] {
        if bytes > 0 && bytes.trailing_zeros() >= shift {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}
