//! The periods of a graceful shutdown: how they are read and which rules they must obey.

use std::time::Duration;

use serde_json::json;

use super::codec::Plain;
use super::decode::{Reader, Settings};
use super::types::PriorityPeriod;
use super::yaml::{Node, Value};

const BY_PRIORITY: &str = "shutdownGracePeriodByPodPriority";

/// The groups of `shutdownGracePeriodByPodPriority`.
pub(super) const PRIORITY_PERIODS: Plain<Vec<PriorityPeriod>> = Plain::new(
    |r, _| match &r.node.value {
        Value::List(items) => Some(groups(r, items)),
        _ => None,
    },
    |value| {
        let group = |group: &PriorityPeriod| json!({"priority": group.priority, "shutdownGracePeriodSeconds": group.seconds});
        value.iter().map(group).collect()
    },
);

fn groups(r: &mut Reader<'_>, items: &[Node]) -> Vec<PriorityPeriod> {
    let mut groups = Vec::new();
    for item in items {
        let Value::Map(entries) = &item.value else {
            continue;
        };
        // What is missing is zero, as in Go; what has the wrong type is reported already.
        let number = |name: &str| {
            let entry = entries.iter().find(|entry| entry.key == name);
            match entry.map(|entry| &entry.node.value) {
                Some(Value::Int(number)) => i64::try_from(*number).unwrap_or_default(),
                _ => 0,
            }
        };
        let group = PriorityPeriod {
            priority: i32::try_from(number("priority")).unwrap_or_default(),
            seconds: number("shutdownGracePeriodSeconds"),
        };
        if group.seconds < 0 {
            let message = format!(
                "shutdownGracePeriodSeconds is {}, allowed are 0 and more",
                group.seconds
            );
            r.fail_at(item.place, message);
        } else {
            groups.push(group);
        }
    }
    groups
}

/// Upstream: `ValidateKubeletConfiguration`.
pub(super) fn validate(settings: &mut Settings) {
    let config = &settings.config;
    let total = config.shutdown_grace_period;
    let critical = config.shutdown_grace_period_critical_pods;
    let has_groups = !config.shutdown_grace_period_by_pod_priority.is_empty();
    for (name, period) in [
        ("shutdownGracePeriod", total),
        ("shutdownGracePeriodCriticalPods", critical),
    ] {
        if !period.is_zero() && period < Duration::from_secs(1) {
            settings.reject(name, "is shorter than a second; make it 0s or at least 1s");
        }
    }
    if critical > total {
        settings.reject(
            "shutdownGracePeriodCriticalPods",
            "is longer than shutdownGracePeriod, of which it is a part",
        );
    }
    if has_groups && !(total.is_zero() && critical.is_zero()) {
        settings.reject(
            BY_PRIORITY,
            "is set beside shutdownGracePeriod; leave one of them out",
        );
    }
}
