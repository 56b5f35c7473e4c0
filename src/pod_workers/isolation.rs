//! Completes what a pod's isolation needs from the runtime and the store: the user namespace of its sandbox, the groups
//! of its volumes, and the user of an image.
//!
//! **Invariant:** the users a pod has for its own are recorded before its sandbox is made, and no other pod
//! gets them until the pod is purged.

use k8s_openapi::api::core::v1::{Container, Pod};
use tokio::sync::Mutex;

use super::execute::StepError;
use super::{WorkerContext, mounts};
use crate::core::state::Transaction;
use crate::core::state::kinds::Unparseable;
use crate::core::volumes::extra_groups;
use crate::images::Present;
use crate::kuberuntime::cri::{CriError, v1};
use crate::kuberuntime::security::{Effective, ImageUser};
use crate::kuberuntime::userns::{self, Range};
use crate::types::{PodExt, causes};

/// One pod at a time looks for users that nobody has.
static ALLOCATING: Mutex<()> = Mutex::const_new(());

/// Completes the message that makes a pod's sandbox. `handler` is its runtime handler, `None` when the
/// sandbox is there already.
///
/// # Errors
/// `Sandbox` when the runtime cannot isolate the pod as it asks, or it is not known which volumes the pod has.
pub(super) async fn complete(
    context: &WorkerContext,
    pod: &Pod,
    config: &mut v1::PodSandboxConfig,
    handler: Option<&str>,
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
    if let Some(handler) = handler {
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
            return Err(StepError::Sandbox(
                "SupplementalGroupsPolicy=Strict is not supported in this node".to_owned(),
            ));
        }
    }
    if own_users {
        let range = range(context, pod).await?;
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
async fn range(context: &WorkerContext, pod: &Pod) -> Result<Range, StepError> {
    let key = userns::key(pod.namespace(), &pod.uid());
    let unreadable = |error: Unparseable| StepError::Sandbox(causes(&error));
    let _one_at_a_time = ALLOCATING.lock().await;
    let state = context.store.snapshot();
    if let Some(record) = state.stored(&key) {
        return record.read().map_err(unreadable);
    }
    let pool = context.node.user_ids.clone().map_err(StepError::Sandbox)?;
    let mut taken = Vec::new();
    for record in state.all_stored::<Range>() {
        taken.push(record.read().map_err(unreadable)?);
    }
    let range = userns::allocate(taken, context.node.user_ids_per_pod, pool).ok_or_else(|| {
        StepError::Sandbox(
            "no users are left for another pod with hostUsers: false; remove one".to_owned(),
        )
    })?;
    let why = format!("{} users from {}", range.length, range.host_id);
    let transaction = Transaction::new()
        .expect_object(&state, &key)
        .put_object(&key, &range, context.clock.now())
        .journal(Some(&pod.uid()), "users allocated", why);
    context.store.commit(transaction).await?;
    Ok(range)
}

/// The user namespace of a sandbox.
pub(super) fn user_namespace(config: &v1::PodSandboxConfig) -> Option<&v1::UserNamespace> {
    let security = config.linux.as_ref()?.security_context.as_ref()?;
    security.namespace_options.as_ref()?.userns_options.as_ref()
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
