//! Fuzz target of the pods that an API server sends.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a fuzz target fails by panicking"
)]

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::core::{ObjectList, WatchEvent};

use super::wire::{Received, number};
use crate::core::node_status::{NodeSettings, change, correct_labels, reconcile};
use crate::kuberuntime::fuzzing::convert_pod;
use crate::types::PodExt as _;

/// Reads an answer of an API server in JSON. The first byte says what it is: a list of pods, an event of a watch, a pod,
/// or a node.
///
/// Asserts that a pod has the identity that was read for it, that it is the same after it was recorded, and that a node
/// that was corrected is not corrected again.
pub(crate) fn api_answers(data: &[u8]) {
    let Some((kind, answer)) = data.split_first() else {
        return;
    };
    match kind % 4 {
        0 => {
            if let Ok(list) = serde_json::from_slice::<ObjectList<Received>>(answer) {
                list.items.into_iter().for_each(take);
            }
        }
        1 => match serde_json::from_slice::<WatchEvent<Received>>(answer) {
            Ok(WatchEvent::Added(pod) | WatchEvent::Modified(pod) | WatchEvent::Deleted(pod)) => {
                take(pod);
            }
            Ok(WatchEvent::Bookmark(_) | WatchEvent::Error(_)) | Err(_) => {}
        },
        2 => {
            if let Ok(received) = serde_json::from_slice::<Received>(answer) {
                take(received);
            }
        }
        _ => {
            if let Ok(node) = serde_json::from_slice::<Node>(answer) {
                check_node(&node);
            }
        }
    }
}

fn take(received: Received) {
    number(&received.version);
    let pod = match received.pod {
        Ok(pod) => pod,
        Err(error) => {
            assert!(!error.is_empty());
            return;
        }
    };
    assert_eq!(pod.uid(), received.uid);
    assert!(received.name.ends_with(pod.name()));
    let recorded = serde_json::to_vec(&pod).unwrap();
    assert_eq!(serde_json::from_slice::<Pod>(&recorded).unwrap(), *pod);
    convert_pod(&pod);
}

fn check_node(node: &Node) {
    let settings = NodeSettings::new("node");
    let mut wanted = reconcile(&settings, node);
    assert_eq!(reconcile(&settings, &wanted), wanted);
    correct_labels(&settings, &mut wanted);
    assert!(correct_labels(&settings, &mut wanted).is_empty());
    change(node, &wanted);
    assert!(change(&wanted, &wanted).substance.is_null());
}
