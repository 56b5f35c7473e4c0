//! Completes what a pod's isolation needs from the runtime and the store: the user namespace of its sandbox, the groups
//! of its volumes, and the user of an image.
//!
//! **Invariant:** the users a pod has for its own are recorded before its sandbox is made, and no other pod
//! gets them until the pod is purged.

use std::collections::HashSet;

use k8s_openapi::api::core::v1::{Container, Pod};
use tokio::sync::Mutex;

use super::execute::StepError;
use super::{WorkerContext, mounts};
use crate::core::admission::NO_STRICT_GROUPS;
use crate::core::state::kinds::Unparseable;
use crate::core::state::{PodRecord, State, Transaction};
use crate::core::volumes::extra_groups;
use crate::images::Present;
use crate::kuberuntime::cri::{ContainerConfig, CriError, v1};
use crate::kuberuntime::security::{Effective, ImageUser};
use crate::kuberuntime::userns::{self, Range};
use crate::types::runtime::{ContainerState, SandboxState, SandboxStatus};
use crate::types::{ContainerId, PodExt, PodUid, causes};

/// One pod at a time looks for users that nobody has.
static ALLOCATING: Mutex<()> = Mutex::const_new(());

/// The sandbox that a message is for.
#[derive(Clone, Copy)]
pub(super) enum For<'a> {
    /// A new one, with this runtime handler.
    New(&'a str),
    /// One that is there.
    Existing(&'a ContainerId),
}

/// Completes the message that makes a pod's sandbox, or made it.
///
/// # Errors
/// `Sandbox` when the runtime cannot isolate the pod as it asks, or it is not known which volumes the pod has.
pub(super) async fn complete(
    context: &WorkerContext,
    pod: &Pod,
    config: &mut v1::PodSandboxConfig,
    sandbox: For<'_>,
) -> Result<(), StepError> {
    let volumes = mounts::remotes(context, &pod.uid()).map_err(StepError::Sandbox)?;
    if let Some(security) = security(config) {
        let groups = extra_groups(pod, volumes.values());
        security.supplemental_groups.extend(groups);
    }
    let spec = pod.spec_ref();
    let own_users = spec.host_users == Some(false);
    let strict = spec
        .security_context
        .as_ref()
        .is_some_and(|c| c.supplemental_groups_policy.as_deref() == Some("Strict"));
    if !own_users && !strict {
        return Ok(());
    }
    if let For::New(handler) = sandbox {
        let status = context.cri.status(false).await?;
        if own_users && !userns::is_supported(&status, handler) {
            return Err(StepError::Sandbox(format!(
                "runtime handler {handler:?} does not support user namespaces; leave hostUsers out, or use a runtime that does"
            )));
        }
        if strict
            && !status
                .features
                .is_some_and(|f| f.supplemental_groups_policy)
        {
            return Err(StepError::Sandbox(NO_STRICT_GROUPS.to_owned()));
        }
    }
    if own_users {
        let range = range(context, pod, sandbox).await?;
        let options = security(config).and_then(|s| s.namespace_options.as_mut());
        if let Some(options) = options {
            options.userns_options = Some(range.to_cri());
        }
    }
    Ok(())
}

fn security(config: &mut v1::PodSandboxConfig) -> Option<&mut v1::LinuxSandboxSecurityContext> {
    config.linux.as_mut()?.security_context.as_mut()
}

/// Returns the pod's users: the recorded ones, else new ones, which are recorded when this returns.
///
/// A sandbox of another agent, or of before the store was lost, has users without a record: these are its own.
async fn range(context: &WorkerContext, pod: &Pod, sandbox: For<'_>) -> Result<Range, StepError> {
    let key = userns::key(pod.namespace(), &pod.uid());
    let unreadable = |error: Unparseable| StepError::Sandbox(causes(&error));
    let _one_at_a_time = ALLOCATING.lock().await;
    let state = context.store.snapshot();
    if let Some(record) = state.stored(&key) {
        return record.read().map_err(unreadable);
    }
    if let For::Existing(id) = sandbox
        && let Some(range) = userns::of_sandbox(&context.cri.pod_sandbox_status(id).await?)
    {
        record(context, &state, pod, range, "users found").await?;
        return Ok(range);
    }
    let pool = context.node.user_ids.clone().map_err(StepError::Sandbox)?;
    let mut taken = unrecorded(context, &state).await?;
    for record in state.all_stored::<Range>() {
        taken.push(record.read().map_err(unreadable)?);
    }
    let range = userns::allocate(taken, context.node.user_ids_per_pod, pool).ok_or_else(|| {
        StepError::Sandbox(
            "no users are left for another pod with hostUsers: false; remove one".to_owned(),
        )
    })?;
    record(context, &state, pod, range, "users allocated").await?;
    Ok(range)
}

async fn record(
    context: &WorkerContext,
    state: &State,
    pod: &Pod,
    range: Range,
    what: &'static str,
) -> Result<(), StepError> {
    let key = userns::key(pod.namespace(), &pod.uid());
    let why = format!("{} users from {}", range.length, range.host_id);
    let transaction = Transaction::new()
        .expect_object(state, &key)
        .put_object(&key, &range, context.clock.now())
        .journal(Some(&pod.uid()), what, why);
    context.store.commit(transaction).await?;
    Ok(())
}

/// Returns the users of sandboxes without a record of them: of pods that are not on record, or say that they have users of their
/// own.
///
/// # Errors
/// When the runtime does not say what one of them has: nobody may get these.
async fn unrecorded(context: &WorkerContext, state: &State) -> Result<Vec<Range>, StepError> {
    let recorded = state.all_stored::<Range>().map(|record| record.place().1);
    let recorded: HashSet<&str> = recorded.collect();
    let may_have = |uid: &PodUid| {
        let known = state.record::<PodRecord>(uid.as_str());
        !recorded.contains(uid.as_str())
            && known.is_none_or(|known| known.pod.spec_ref().host_users == Some(false))
    };
    let cache = context.pleg.cache();
    let mut found = Vec::new();
    for uid in cache.present().unwrap_or_default() {
        if !may_have(&uid) {
            continue;
        }
        let Some(pod) = cache.known(&uid) else {
            return Err(StepError::Sandbox(format!(
                "pod {uid} runs and cannot be inspected, so that its users are not known; a pod with hostUsers: false waits for that"
            )));
        };
        let runs_in = |sandbox: &SandboxStatus| {
            let containers = pod.containers.iter();
            let mut left = containers.filter(|c| c.state != ContainerState::Exited);
            sandbox.state == SandboxState::Ready || left.any(|c| c.sandbox_id == sandbox.id)
        };
        for sandbox in pod.sandboxes.iter().filter(|s| runs_in(s)) {
            match context.cri.pod_sandbox_status(&sandbox.id).await {
                Ok(status) => found.extend(userns::of_sandbox(&status)),
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(found)
}

/// The user namespace of a sandbox.
pub(super) fn user_namespace(config: &v1::PodSandboxConfig) -> Option<&v1::UserNamespace> {
    let security = config.linux.as_ref()?.security_context.as_ref()?;
    security.namespace_options.as_ref()?.userns_options.as_ref()
}

/// Has the users of a pod see the files of all mounts as theirs. Upstream: `applyPlatformSpecificContainerConfig`.
pub(super) fn map_mounts(config: &mut ContainerConfig, users: &v1::UserNamespace) {
    let images = config.images.iter_mut().map(|image| &mut image.mount);
    for mount in config.message.mounts.iter_mut().chain(images) {
        mount.uid_mappings.clone_from(&users.uids);
        mount.gid_mappings.clone_from(&users.gids);
    }
}

/// The user an image is made for; `None` when the spec says who the container runs as. The runtime is asked unless it
/// told when the image was looked for.
///
/// # Errors
/// When the runtime does not answer, or does not have the image (any more).
pub(super) async fn image_user(
    context: &WorkerContext,
    pod: &Pod,
    container: &Container,
    image: Present,
) -> Result<Option<ImageUser>, String> {
    if let Some(uid) = Effective::of(pod, container).run_as_user {
        return Ok(Some(ImageUser {
            uid: Some(uid),
            username: String::new(),
        }));
    }
    if let Some(user) = image.user {
        return Ok(Some(user));
    }
    let image_ref = &image.reference;
    let found: Result<_, CriError> = context.cri.image_status(image_ref).await;
    match found {
        Ok(Some(image)) => Ok(Some(ImageUser::of(&image))),
        Ok(None) => Err(format!(
            "failed to get image user: image {image_ref} not found"
        )),
        Err(error) => Err(format!("failed to get image user: {error}")),
    }
}
