//! Fuzz target of the answers of CSI drivers.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a fuzz target fails by panicking"
)]

use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::Node;
use prost::Message;

use super::client::{NodeCapabilities, VolumeStats, checked_info, expanded};
use super::node_info::{merged, node_change};
use super::proto::{
    GetPluginInfoResponse, NodeExpandVolumeResponse, NodeGetCapabilitiesResponse,
    NodeGetInfoResponse, NodeGetVolumeStatsResponse, PluginInfo, ProbeResponse,
};
use super::registry::{Driver, checked};

/// Reads an answer of a driver. The first byte says to which call.
///
/// Asserts that no number below zero is accepted, that an answer reads back, and that telling the API server of a
/// driver twice changes nothing the second time.
pub(crate) fn csi_answers(data: &[u8]) {
    let Some((call, answer)) = data.split_first() else {
        return;
    };
    match call % 6 {
        0 => {
            let Some(answer) = decoded::<NodeGetVolumeStatsResponse>(answer) else {
                return;
            };
            let negative = answer
                .usage
                .iter()
                .any(|u| u.available < 0 || u.total < 0 || u.used < 0);
            assert!(VolumeStats::of(answer).is_err() || !negative);
        }
        1 => {
            if let Some(answer) = decoded::<NodeExpandVolumeResponse>(answer) {
                assert_eq!(expanded(&answer).is_err(), answer.capacity_bytes < 0);
            }
        }
        2 => {
            if let Some(answer) = decoded::<NodeGetCapabilitiesResponse>(answer) {
                NodeCapabilities::of(&answer);
            }
        }
        3 => {
            if let Some(answer) = decoded::<NodeGetInfoResponse>(answer)
                && let Ok(info) = checked_info(answer)
            {
                tell(info);
            }
        }
        4 => {
            let socket = Path::new("/var/lib/kubelet/plugins_registry/driver.sock");
            if let Some(info) = decoded::<PluginInfo>(answer)
                && let Ok((_, endpoint)) = checked(socket, &info)
            {
                assert!(endpoint.is_absolute() && !info.name.contains(['/', '\0']));
            }
        }
        _ => {
            decoded::<GetPluginInfoResponse>(answer);
            decoded::<ProbeResponse>(answer);
        }
    }
}

fn decoded<T: Message + Default + PartialEq + std::fmt::Debug>(bytes: &[u8]) -> Option<T> {
    let answer = T::decode(bytes).ok()?;
    let again = T::decode(answer.encode_to_vec().as_slice()).unwrap();
    assert_eq!(answer, again);
    Some(answer)
}

fn tell(info: NodeGetInfoResponse) {
    let driver = Driver {
        name: "driver.example.com".to_owned(),
        endpoint: PathBuf::from("/csi.sock"),
        registration: PathBuf::from("/reg.sock"),
        version: super::registry::Version::highest(&["1.0.0".to_owned()]).unwrap(),
        node_id: info.node_id,
        max_volumes: info.max_volumes_per_node,
        topology: info.accessible_topology.unwrap_or_default().segments,
        told: None,
        gone: false,
    };
    let mut node = Node::default();
    let (change, accepted, refused) = node_change(&node, vec![driver]);
    assert!(accepted.len() == 1 && refused.is_empty());
    let metadata = &change.unwrap()["metadata"];
    node.metadata.labels = metadata
        .get("labels")
        .map(|all| serde_json::from_value(all.clone()).unwrap());
    node.metadata.annotations = metadata
        .get("annotations")
        .map(|all| serde_json::from_value(all.clone()).unwrap());
    let (again, accepted, refused) = node_change(&node, accepted);
    assert!(again.is_none() && refused.is_empty());
    let (_, list) = merged(&[], &accepted).unwrap();
    assert!(merged(&list, &accepted).is_none());
}
