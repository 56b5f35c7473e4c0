//! Failed steps as users see them: an event that names the cause and what to do. The history has each event, too.
//!
//! In: a failed step. Out: the event about it, at once when it is new and ever more seldom while it lasts. Most errors have an
//! event of their own, emitted where they occur; [`StepError::Told`] marks those whose kind does not say so.

use super::execute::StepError;
use super::worker::StepFailure;
use super::{Job, WorkerContext};
use crate::kuberuntime::gc::GcError;
use crate::types::{Event, EventType, PodUid, causes};

/// Reason of the event about a step without an event of its own. Upstream: `events.FailedSync`.
const REASON: &str = "FailedSync";

/// Returns the remedy for an error that nothing else reports.
fn remedy(error: &StepError) -> Option<&'static str> {
    match error {
        // The store tells of itself, and what is outdated is decided again at once.
        StepError::Stale
        | StepError::StartUndone(_)
        | StepError::Commit(_)
        | StepError::Status(_)
        | StepError::Gc(GcError::Commit { .. })
        // These are told of where they occur.
        | StepError::Start(_)
        | StepError::Inspect(_)
        | StepError::Kill(_)
        | StepError::Volume(_)
        | StepError::Log(_)
        | StepError::NetworkNotReady(_)
        | StepError::NotListed(_)
        | StepError::Devices(_)
        | StepError::Told(_) => None,
        StepError::Cri(_) | StepError::Gc(_) => {
            Some("it is tried again; if it lasts, check the container runtime and its log")
        }
        StepError::StillRunning(_) => {
            Some("it is stopped again; if it lasts, check the container runtime and its log")
        }
        StepError::Cgroup(_) => {
            Some("it is tried again; if it lasts, check what else changes the cgroups of pods")
        }
        StepError::Claims(_) => {
            Some("it is tried again; start the driver of its claims, or look into the driver's log")
        }
        StepError::Sandbox(_) => {
            Some("it is tried again; correct the pod, or the node's configuration")
        }
    }
}

/// Emits an event about a failed step, unless it has one already or was reported a moment ago.
pub(super) fn tell(context: &WorkerContext, job: &Job, failure: &StepFailure) {
    let Some(remedy) = remedy(&failure.error).filter(|_| !failure.is_told) else {
        return;
    };
    // Nobody could look at a pod that only the runtime knows.
    if job.record.runtime_only {
        return;
    }
    let cause = causes(&*failure.error);
    let pace = context.content.volumes.pace();
    if !pace.is_due(&steps_of(&job.uid), &cause, context.clock.now()) {
        return;
    }
    let text = format!("error syncing pod: {cause}; {remedy}");
    let event = Event::pod(EventType::Warning, &job.pod, REASON, text);
    context.recorder.record(event);
}

/// Nothing fails any more: the next failure is news.
pub(super) fn over(context: &WorkerContext, uid: &PodUid) {
    context.content.volumes.pace().over(&steps_of(uid));
}

fn steps_of(uid: &PodUid) -> String {
    format!("steps of {uid}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cm::CgroupError;

    #[test]
    fn what_is_told_where_it_occurs_is_not_told_again() {
        let cgroup = || CgroupError::NotMounted {
            mount: "/sys/fs/cgroup".into(),
            reason: "it is empty".to_owned(),
        };
        let cases = [
            (StepError::Cgroup(cgroup()), true),
            (StepError::Cgroup(cgroup()).told(), false),
            (StepError::Sandbox("no users are left".to_owned()), true),
            (
                StepError::Sandbox("no users are left".to_owned()).told(),
                false,
            ),
            (StepError::StillRunning("c".to_owned()), true),
            (StepError::Start("CrashLoopBackOff".to_owned()), false),
            (StepError::NetworkNotReady("no plugin".to_owned()), false),
            (StepError::Stale, false),
        ];
        for (error, expected) in cases {
            let text = causes(&error);
            let failure = StepFailure::from(error);
            let is_told = remedy(&failure.error).is_some() && !failure.is_told;
            assert_eq!(is_told, expected, "{text}");
            assert_eq!(causes(&*failure.error), text);
        }
    }
}
