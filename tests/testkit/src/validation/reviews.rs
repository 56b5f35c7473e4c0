//! Objects that are answered and not stored. Upstream: `ValidateTokenRequest`, `ValidateSubjectAccessReview`, and what
//! the storage of TokenReviews asks.

use serde_json::Value;

use super::formats::{is_set, text};
use super::violation::Violations;

/// Shortest and longest life of a token that may be asked for, in seconds.
const LIFE: (i64, i64) = (600, 1 << 32);

/// A TokenRequest for the service account of the path. A life that is not said is an hour.
pub(super) fn token_request(
    namespace: &str,
    account: &str,
    object: &Value,
    found: &mut Violations,
) {
    for (name, of_path) in [("name", account), ("namespace", namespace)] {
        let given = &object["metadata"][name];
        if is_set(given) && text(given) != of_path {
            let why = format!("must match the service account {name} if specified");
            found.invalid(format!("metadata.{name}"), given, why);
        }
    }
    const FIELD: &str = "spec.expirationSeconds";
    let life = &object["spec"]["expirationSeconds"];
    match life.as_i64() {
        Some(seconds) if seconds < LIFE.0 => {
            let why = "may not specify a duration less than 10 minutes";
            found.invalid(FIELD, life, why);
        }
        Some(seconds) if seconds > LIFE.1 => {
            let why = "may not specify a duration larger than 2^32 seconds";
            found.invalid(FIELD, life, why);
        }
        _ => {}
    }
}

/// A TokenReview.
pub(super) fn token_review(object: &Value, found: &mut Violations) {
    if !is_set(&object["spec"]["token"]) {
        let why = "token is required for TokenReview in authentication";
        found.required("spec.token", why);
    }
    if is_set(&object["metadata"]["namespace"]) {
        found.forbidden("metadata.namespace", "namespace is not allowed");
    }
}

/// A SubjectAccessReview; with `own` of whoever asks, which names no user.
pub(super) fn access_review(own: bool, object: &Value, found: &mut Violations) {
    let spec = &object["spec"];
    let resource = &spec["resourceAttributes"];
    let other = &spec["nonResourceAttributes"];
    match (resource.is_null(), other.is_null()) {
        (false, false) => {
            let why = "cannot be specified in combination with resourceAttributes";
            found.invalid("spec.nonResourceAttributes", other, why);
        }
        (true, true) => {
            let why =
                "exactly one of nonResourceAttributes or resourceAttributes must be specified";
            found.invalid("spec.resourceAttributes", resource, why);
        }
        _ => {}
    }
    if !own && !is_set(&spec["user"]) && !is_set(&spec["groups"]) {
        let why = "at least one of user or group must be specified";
        found.invalid("spec.user", &spec["user"], why);
    }
    if is_set(&object["metadata"]) {
        found.invalid("metadata", &object["metadata"], "must be empty");
    }
}
