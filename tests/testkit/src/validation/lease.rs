//! Leases. Upstream: `ValidateLease`, `ValidateLeaseUpdate`.

use serde_json::Value;

use super::formats::{dns_subdomain, is_set, qualified_name, text};
use super::metadata;
use super::violation::Violations;

/// A lease that is created.
pub(super) fn create(lease: &Value, found: &mut Violations) {
    metadata::create(lease, true, dns_subdomain, found);
    spec(&lease["spec"], found);
}

/// A lease that is renewed.
pub(super) fn update(old: &Value, new: &Value, found: &mut Violations) {
    metadata::update(old, new, found);
    spec(&new["spec"], found);
}

fn spec(spec: &Value, found: &mut Violations) {
    let duration = &spec["leaseDurationSeconds"];
    if duration.as_i64().is_some_and(|seconds| seconds <= 0) {
        found.invalid(
            "spec.leaseDurationSeconds",
            duration,
            "must be greater than 0",
        );
    }
    let transitions = &spec["leaseTransitions"];
    if transitions.as_i64().is_some_and(|count| count < 0) {
        let why = "must be greater than or equal to 0";
        found.invalid("spec.leaseTransitions", transitions, why);
    }
    let strategy = &spec["strategy"];
    if is_set(strategy) {
        const FIELD: &str = "spec.strategy.strategy";
        let name = text(strategy);
        if name.contains('/') {
            found.format(FIELD, strategy, qualified_name(name));
        } else if name != "OldestEmulationVersion" {
            found.not_supported(FIELD, strategy, &["OldestEmulationVersion"]);
        }
    } else if is_set(&spec["preferredHolder"]) {
        let why = "may only be specified if `strategy` is defined";
        found.forbidden("spec.preferredHolder", why);
    }
}
