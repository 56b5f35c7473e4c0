//! Setup of the prober.

use std::sync::Arc;

use super::base::Base;
use crate::kuberuntime::cri::CriClient;
use crate::prober::{Prober, ProberContext};
use crate::types::probe::{self, ProbeReceivers};

/// Builds the prober. Returns its results, too.
pub(super) fn build(base: &Base, cri: &CriClient) -> (Prober, ProbeReceivers) {
    let (results, received) = probe::channels();
    let prober = Prober::new(ProberContext {
        store: base.store.clone(),
        clock: Arc::clone(&base.clock),
        cri: cri.clone(),
        recorder: Arc::clone(&base.recorder) as _,
        metrics: base.metrics.clone(),
        results,
        addresses: base.addresses.clone(),
    });
    (prober, received)
}
