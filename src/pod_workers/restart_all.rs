//! Restarting all containers of a pod in place: records the steps of [`crate::core::restart_all`].
//!
//! **Invariant:** no container is stopped for such a restart, and none starts because of it, before the step that wants it
//! is on the disk.

use super::execute::StepError;
use super::{Job, WorkerContext};
use crate::core::container_history::Records;
use crate::core::restart_all::{self, Seen};
use crate::types::Stamp;
use crate::types::runtime::PodStatus;

/// Records the next step of a restart, if there is one to be made. Exits are recorded already.
///
/// # Errors
/// When the step cannot be recorded; nothing is done then.
pub(super) async fn advance(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
    listed_at: Stamp,
    now: Stamp,
) -> Result<(), StepError> {
    let state = context.store.snapshot();
    let records = Records::of(&state, &job.uid);
    let seen = Seen {
        pod: &job.pod,
        status,
        records: &records,
        listed_at,
        now,
    };
    let Some(step) = restart_all::advance(&state, &seen) else {
        return Ok(());
    };
    context.store.commit(step).await?;
    fail::fail_point!("pod_workers::restart_all::after_commit");
    Ok(())
}
