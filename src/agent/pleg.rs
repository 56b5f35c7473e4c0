//! Setup of the pod lifecycle event generator.

use std::sync::Arc;

use tokio::sync::mpsc;

use super::base::Base;
use super::resume::Restored;
use crate::core::pleg_diff::PodLifecycleEvent;
use crate::kuberuntime::cri::CriClient;
use crate::pleg::{Pleg, PlegHandle, PlegOptions};

/// Builds the generator, whose cache begins with the listed statuses that are known to be current.
pub(super) fn build(
    base: &Base,
    cri: &CriClient,
    restored: &Restored,
) -> (Pleg, PlegHandle, mpsc::Receiver<PodLifecycleEvent>) {
    Pleg::new(
        PlegOptions {
            cri: cri.clone(),
            store: base.store.clone(),
            runtime_state: base.runtime_state.clone(),
            metrics: base.metrics.clone(),
            evented: true,
        },
        Arc::clone(&base.clock),
        restored.plan.current.iter().cloned(),
        restored.as_of,
    )
}
