//! The sandbox that the containers of a step start in.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;
use tracing::info;

use super::execute::{StepError, note};
use super::isolation::For;
use super::{Job, WorkerContext, isolation, pinning, resolve};
use crate::core::pod_actions::{self, PodActions};
use crate::core::pod_status;
use crate::kuberuntime::cri::{convert, v1};
use crate::kuberuntime::dns::{DnsConfigurer, ResolvConf};
use crate::kuberuntime::{labels, sandbox_config};
use crate::status::CommitMode;
use crate::types::metrics::RuntimeHandlerLabel;
use crate::types::runtime::{PodStatus, SandboxState};
use crate::types::{ContainerId, Event, EventType, PodExt, blocking};

/// A sandbox to start containers in.
pub(super) struct Sandbox {
    pub(super) id: ContainerId,
    pub(super) ips: Vec<String>,
    pub(super) config: v1::PodSandboxConfig,
    /// Milliseconds spent pulling images for the containers that start in it.
    pub(super) pull_ms: AtomicU64,
}

/// Reports that the pod has what its containers start in, before their images are pulled: that may take long.
pub(super) async fn report_sandbox(
    context: &WorkerContext,
    job: &Job,
    ips: &[String],
) -> Result<(), StepError> {
    let told = context.reports.status.get(&job.uid);
    let (host_ips, now) = (context.node.addresses.reported(), context.clock.now());
    let ready = told.and_then(|told| {
        pod_status::sandbox_became_ready(&job.pod, &told.status, ips, &host_ips, now)
    });
    if let Some(status) = ready {
        let mode = CommitMode::Normal;
        context.reports.status.set(&job.pod, status, mode).await?;
    }
    Ok(())
}

/// Returns the reason for a new sandbox, for the journal.
fn why_sandbox(job: &Job, status: &PodStatus) -> String {
    let Some(newest) = status.sandboxes.first() else {
        return "the pod has none".to_owned();
    };
    let ready = status.sandboxes.iter();
    let ready = ready.filter(|s| s.state == SandboxState::Ready).count();
    if ready > 1 {
        format!("the pod has {ready} that are ready")
    } else if newest.state != SandboxState::Ready {
        format!("{} is not ready any more", newest.id)
    } else if newest
        .host_network
        .is_some_and(|h| h != job.pod.host_network())
    {
        format!("{} is on another network than the pod asks for", newest.id)
    } else if pod_actions::sandbox_to_create(&job.pod, status).is_some() {
        format!("{} has no address", newest.id)
    } else {
        format!("{} cannot be used", newest.id)
    }
}

/// The pod's DNS settings, by the node's resolver configuration as it is now; `is_new`: of a sandbox that is to be made.
async fn dns_of(
    context: &WorkerContext,
    pod: &Pod,
    is_new: bool,
) -> Result<(v1::DnsConfig, Vec<Event>), String> {
    let dns = &context.node.dns;
    let host = if DnsConfigurer::needs_host(pod) {
        let of = dns.clone();
        let read = blocking::run(move || of.read_host()).await;
        read.map_err(|error| error.to_string())?
            .map_err(|error| error.to_string())?
    } else {
        ResolvConf::default()
    };
    let made = match is_new {
        true => dns.sandbox_dns(pod, &host, context.clock.now()),
        false => dns.pod_dns(pod, &host),
    };
    made.map_err(|error| error.to_string())
}

/// Counts a sandbox that could not be made, and emits the event.
fn sandbox_failed(context: &WorkerContext, pod: &Pod, why: &dyn std::fmt::Display) {
    context.metrics.started_pods_errors.inc();
    context.recorder.record(Event::pod(
        EventType::Warning,
        pod,
        "FailedCreatePodSandBox",
        format!("Failed to create pod sandbox: {why}"),
    ));
}

/// Returns the sandbox that the containers of this step start in; makes it if `actions` say so.
pub(super) async fn sandbox(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
    actions: &PodActions,
) -> Result<Sandbox, StepError> {
    let pod = &job.pod;
    let attempt = actions.create_sandbox.unwrap_or_else(|| {
        actions
            .sandbox_id
            .as_ref()
            .and_then(|id| status.sandboxes.iter().find(|s| s.id == *id))
            .map_or(0, |s| s.attempt)
    });
    let failed = |why: &dyn std::fmt::Display| sandbox_failed(context, pod, why);
    let (dns, events) = match dns_of(context, pod, actions.create_sandbox.is_some()).await {
        Ok(dns) => dns,
        // A sandbox that runs has its settings already: its containers need none of the node.
        Err(_) if actions.create_sandbox.is_none() => Default::default(),
        Err(why) => {
            failed(&why);
            return Err(StepError::Sandbox(why).told());
        }
    };
    if actions.create_sandbox.is_some() {
        for event in events {
            context.recorder.record(event);
        }
    }
    let parent = context.resources.cgroups.pod_cgroup_parent(pod)?;
    let built = sandbox_config::build(pod, attempt, &parent, dns, &context.node);
    let built = built.map(|config| pinning::quota_of_sandbox(context, job, config));
    if let (None, Some(id)) = (actions.create_sandbox, &actions.sandbox_id) {
        let mut config = built.map_err(|e| StepError::Sandbox(e.to_string()))?;
        isolation::complete(context, pod, &mut config, For::Existing(id)).await?;
        return Ok(Sandbox {
            id: id.clone(),
            ips: ordered(context, status.ips.clone()),
            config,
            pull_ms: AtomicU64::new(0),
        });
    }
    let mut config = match built {
        Ok(config) => config,
        Err(error) => {
            failed(&error);
            return Err(StepError::Sandbox(error.to_string()).told());
        }
    };
    let handler = match resolve::runtime_handler(context, pod).await {
        Ok(handler) => handler,
        Err(error) => {
            let why = format!("failed to get sandbox runtime: {error}");
            failed(&why);
            return Err(StepError::Sandbox(why).told());
        }
    };
    if let Err(error) = isolation::complete(context, pod, &mut config, For::New(&handler)).await {
        if let StepError::Sandbox(why) = &error {
            failed(why);
            return Err(error.told());
        }
        return Err(error);
    }
    run_sandbox(context, job, status, config, handler, attempt).await
}

/// Has the runtime make the sandbox, and reads its addresses.
async fn run_sandbox(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
    mut config: v1::PodSandboxConfig,
    handler: String,
    attempt: u32,
) -> Result<Sandbox, StepError> {
    let pod = &job.pod;
    let label = RuntimeHandlerLabel {
        runtime_handler: handler.clone(),
    };
    let boot = context.clock.now().boot.0.to_string();
    config
        .annotations
        .insert(labels::SANDBOX_BOOT.to_owned(), boot);
    context.content.images.first_round(&context.store).await;
    context.content.images.sandbox_image_repaired().await;
    let begun = Instant::now();
    let made = context.cri.run_pod_sandbox(config.clone(), &handler).await;
    context
        .metrics
        .run_podsandbox_duration
        .get_or_create(&label)
        .observe(begun.elapsed().as_secs_f64());
    let id = match made {
        Ok(id) => id,
        Err(error) => {
            context
                .metrics
                .run_podsandbox_errors
                .get_or_create(&label)
                .inc();
            sandbox_failed(context, pod, &error);
            let (cri, store, recorder) = (&context.cri, &context.store, &*context.recorder);
            context
                .content
                .images
                .sandbox_failed(pod, &error.message, cri, store, recorder)
                .await?;
            return Err(StepError::from(error).told());
        }
    };
    fail::fail_point!("pod_workers::sandbox::after_run");
    context.metrics.started_pods.inc();
    let why = why_sandbox(job, status);
    info!(sandbox = %id, attempt, why, "sandbox created");
    let line = format!("{id} attempt {attempt}: {why}");
    note(context, &job.uid, "sandbox created", line);
    let for_cgroups = Arc::clone(pod);
    context
        .with_cgroups(move |cgroups| cgroups.reassert(&for_cgroups))
        .await?;
    let inspected = convert::inspected_sandbox(&context.cri.pod_sandbox_status(&id).await?);
    Ok(Sandbox {
        id,
        ips: ordered(context, inspected.ips),
        config,
        pull_ms: AtomicU64::new(0),
    })
}

/// Returns addresses of a pod in the order in which its status has them, for what its containers are told.
pub(super) fn ordered(context: &WorkerContext, ips: Vec<String>) -> Vec<String> {
    if ips.len() < 2 {
        return ips;
    }
    pod_status::in_node_order(ips, &context.node.addresses.reported())
}
