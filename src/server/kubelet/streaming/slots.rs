//! Limits the number of open streams and of runs, for the node and for each pod. More are refused.
//!
//! A stream holds some 300 KiB at most, a run all that its command prints (twice while it comes in, up to 32 MiB).
//! Together that is the memory that clients can take. No pod's clients can take the node's streams from others.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::error::StreamError;
use crate::types::PodUid;

const STREAMS: Limit = Limit {
    node: 512,
    pod: 128,
};
const RUNS: Limit = Limit { node: 8, pod: 4 };

#[derive(Clone, Copy, Debug)]
struct Limit {
    node: usize,
    pod: usize,
}

/// Bounds how many streams and runs there are. Cheap to clone.
#[derive(Clone, Default)]
pub(super) struct Slots {
    streams: Arc<Taken>,
    runs: Arc<Taken>,
}

type Taken = Mutex<HashMap<PodUid, usize>>;

/// A stream's or a run's place, until it is dropped.
pub(super) struct Slot {
    taken: Arc<Taken>,
    pod: PodUid,
}

impl Slots {
    /// A place for a stream to this pod.
    ///
    /// # Errors
    /// When there is none.
    pub(super) fn take(&self, pod: &PodUid) -> Result<Slot, StreamError> {
        take(&self.streams, pod, STREAMS)
    }

    /// A place for a run in this pod.
    ///
    /// # Errors
    /// When there is none.
    pub(super) fn take_run(&self, pod: &PodUid) -> Result<Slot, StreamError> {
        take(&self.runs, pod, RUNS)
    }
}

fn take(taken: &Arc<Taken>, pod: &PodUid, limit: Limit) -> Result<Slot, StreamError> {
    let mut pods = taken.lock().unwrap_or_else(PoisonError::into_inner);
    if pods.values().sum::<usize>() >= limit.node {
        return Err(StreamError::Busy);
    }
    let count = pods.entry(pod.clone()).or_default();
    if *count >= limit.pod {
        return Err(StreamError::PodBusy);
    }
    *count += 1;
    Ok(Slot {
        taken: Arc::clone(taken),
        pod: pod.clone(),
    })
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut pods = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = pods.get_mut(&self.pod) {
            *count -= 1;
            if *count == 0 {
                pods.remove(&self.pod);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_has_its_share_and_the_node_its_limit() {
        let slots = Slots::default();
        let pod = |n: usize| PodUid::from(format!("pod-{n}"));
        let mut open = Vec::new();
        for n in 0..STREAMS.node / STREAMS.pod {
            for _ in 0..STREAMS.pod {
                open.push(slots.take(&pod(n)).unwrap_or_else(|e| panic!("{n}: {e}")));
            }
            let refused = slots.take(&pod(n)).err();
            let is_last = open.len() == STREAMS.node;
            let expected = match is_last {
                true => matches!(refused, Some(StreamError::Busy)),
                false => matches!(refused, Some(StreamError::PodBusy)),
            };
            assert!(expected, "{n}: {refused:?}");
        }
        assert!(slots.take(&pod(9)).is_err());
        let run = slots.take_run(&pod(9));
        assert!(run.is_ok(), "runs have places of their own");
        open.pop();
        assert!(slots.take(&pod(9)).is_ok());
        drop((open, run));
        assert!(slots.streams.lock().unwrap().is_empty());
        assert!(slots.runs.lock().unwrap().is_empty());
    }
}
