//! Eviction messages for users, in upstream's words.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use k8s_openapi::api::core::v1::Pod;

use super::rank::{Candidate, ContainerUse, Standing};
use super::{Figure, Signal, Threshold};
use crate::core::resources::{NANOS, amount};
use crate::kubeletconfig::EvictionThreshold;
use crate::types::PodExt;

/// Returns the message of the event `EvictionThresholdMet`.
pub fn attempting(signal: Signal) -> String {
    format!("Attempting to reclaim {}", signal.resource())
}

/// Returns the message of a pod that is evicted: the threshold, and the containers over their requests. Upstream:
/// `evictionMessage`.
pub fn message(threshold: &Threshold, figure: Figure, candidate: &Candidate<'_>) -> String {
    let resource = threshold.signal.resource();
    let available = match threshold.signal.is_of_bytes() {
        true => binary(figure.available),
        false => decimal(figure.available),
    };
    let mut text = format!(
        "The node was low on resource: {resource}. Threshold quantity: {}, available: {available}. ",
        quantity(threshold.value, figure.capacity)
    );
    for Over {
        name,
        used,
        request,
    } in over(threshold.signal, candidate)
    {
        // Writing to a string cannot fail.
        write!(
            text,
            "Container {name} was using {used}, request is {request}, has larger consumption of {resource}. "
        )
        .unwrap_or_default();
    }
    text
}

/// Returns in one line why a pod was chosen, for its history: the threshold, its place, and the figures that gave it that.
pub fn why(threshold: &Threshold, figure: Figure, standing: &Standing) -> String {
    let signal = threshold.signal;
    let amount = |n: u64| match signal.is_of_bytes() {
        true => binary(n),
        false => decimal(n),
    };
    let Standing {
        candidates,
        used,
        request,
        priority,
    } = *standing;
    let requested = match request {
        Some(request) if used > request => {
            format!(", requests {}, is over its request", amount(request))
        }
        Some(request) => format!(", requests {}", amount(request)),
        None => String::new(),
    };
    format!(
        "{}, available: {}; first in rank of {candidates} pods that may be evicted: uses {}{requested}, priority {priority}",
        threshold.key(),
        amount(figure.available),
        amount(used),
    )
}

/// Returns the annotations of the event of a pod that is evicted: what is short, and the containers over their requests.
pub fn annotations(signal: Signal, candidate: &Candidate<'_>) -> BTreeMap<String, String> {
    let over = over(signal, candidate);
    let (names, used): (Vec<&str>, Vec<String>) =
        over.into_iter().map(|of| (of.name, of.used)).unzip();
    [
        ("starved_resource", signal.resource().to_owned()),
        ("offending_containers", names.join(",")),
        ("offending_containers_usage", used.join(",")),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value))
    .collect()
}

/// A container over its request, with quantities as they are shown.
struct Over<'a> {
    name: &'a str,
    used: String,
    request: String,
}

fn over<'a>(signal: Signal, candidate: &Candidate<'a>) -> Vec<Over<'a>> {
    let containers = candidate.usage.containers.iter();
    let found = containers.filter_map(|(name, of)| {
        let used = used(signal, of)?;
        let (request, written) = request(candidate.pod, name, signal.resource())?;
        let is_over = i128::from(used).saturating_mul(NANOS) > request;
        is_over.then(|| Over {
            name,
            used: binary(used),
            request: written,
        })
    });
    found.collect()
}

/// A threshold. A percentage is shown in `BinarySI` of whatever it is a part; an amount in the form that is shorter, which is
/// as it was written if it has a suffix.
fn quantity(value: EvictionThreshold, capacity: u64) -> String {
    let amount = value.of(capacity);
    let (binary, decimal) = (binary(amount), decimal(amount));
    match value {
        EvictionThreshold::Quantity(_) if decimal.len() < binary.len() => decimal,
        _ => binary,
    }
}

fn used(signal: Signal, of: &ContainerUse) -> Option<u64> {
    match signal {
        Signal::Memory | Signal::AllocatableMemory => of.memory,
        Signal::NodeFs | Signal::ImageFs => Some(of.rootfs?.bytes.saturating_add(of.logs?.bytes)),
        _ => None,
    }
}

/// A container's request, in billionths and as it was written.
fn request(pod: &Pod, name: &str, resource: &str) -> Option<(i128, String)> {
    let mut containers = pod.containers().iter().chain(pod.init_containers());
    let container = containers.find(|container| container.name == name)?;
    let requests = container
        .resources
        .as_ref()
        .and_then(|r| r.requests.as_ref());
    let quantity = requests.and_then(|requests| requests.get(resource));
    Some(quantity.map_or_else(
        || (0, "0".to_owned()),
        |quantity| (amount(quantity), quantity.0.clone()),
    ))
}

/// A quantity as Go writes one in `BinarySI`.
fn binary(amount: u64) -> String {
    scaled(amount, 1024, &["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"])
}

/// A quantity as Go writes one in `DecimalSI`.
fn decimal(amount: u64) -> String {
    scaled(amount, 1000, &["", "k", "M", "G", "T", "P", "E"])
}

fn scaled(mut amount: u64, step: u64, units: &[&str]) -> String {
    let mut unit = 0;
    while amount > 0 && amount.is_multiple_of(step) && unit + 1 < units.len() {
        amount /= step;
        unit += 1;
    }
    format!("{amount}{}", units[unit])
}
