//! Sockets that answer programs of the node about its pods: pod resources and the Pods API.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::Tasks;
use super::base::Base;
use super::directories::Served;
use crate::kubeletconfig::AgentConfig;
use crate::pod_workers::PodWorkers;
use crate::podresources::{self, PodResources};
use crate::podsapi::{self, PodsApi, ShownPod};
use crate::types::PodExt;

/// Serves the socket that answers monitoring agents which pods have which devices. Pods do not need it.
pub(super) fn pod_resources(
    config: &AgentConfig,
    base: &Base,
    workers: &PodWorkers,
    tasks: &mut Tasks,
    token: &CancellationToken,
) {
    let workers = workers.clone();
    let pinning = workers.context().resources.pinning.clone();
    let pods = PodResources::new(
        Arc::new(move || workers.counted_by_admission()),
        Arc::clone(&base.clock),
        base.metrics.clone(),
    )
    .with_devices(base.devices.clone())
    .with_claims(base.dra.clone())
    .telling_assignments(pinning);
    let (root_dir, stop) = (config.root_dir.clone(), token.clone());
    let served = Served {
        name: "pod resources",
        without: "cannot serve the pod-resources API",
        bind: move || podresources::bind(&root_dir),
        serve: move |socket| podresources::serve(socket, pods, stop),
    };
    served.start(Arc::clone(&base.clock), tasks, token);
}

/// Starts the Pods API. Pods do not need it.
pub(super) fn pods_api(
    config: &AgentConfig,
    base: &Base,
    tasks: &mut Tasks,
    token: &CancellationToken,
) {
    let (pods, store) = (base.pods.clone(), base.store.clone());
    let wanted = move || -> Vec<ShownPod> {
        let state = store.snapshot();
        let shown = pods.all().into_iter().map(|pod| ShownPod {
            status: state.statuses.get(pod.uid().as_str()).cloned(),
            pod,
        });
        shown.collect()
    };
    let api = PodsApi::new(Arc::new(wanted), Arc::clone(&base.clock), token.clone());
    let root_dir = config.root_dir.clone();
    let served = Served {
        name: "pods API",
        without: "cannot serve the Pods API",
        bind: move || podsapi::bind(&root_dir),
        serve: move |socket| podsapi::serve(socket, api),
    };
    served.start(Arc::clone(&base.clock), tasks, token);
}
