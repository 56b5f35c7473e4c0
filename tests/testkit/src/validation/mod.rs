//! What kube-apiserver 1.36 refuses of what a node agent writes.
//!
//! In: an object as the server would store it, with its defaults, and what it was before. Out: every rule that it breaks,
//! with the field, as in the causes of a `Status`. One file for each kind of object; the rules are those of a server
//! with its default feature gates, for the objects and fields that a node agent writes. An older server has fewer of
//! them: what passes here passes there.
//!
//! [`crate::fake_api::FakeApi`] asks this of every write, and a test fails that does not expect the refusal
//! ([`NoInvalidWrites`]). The rules have a table of cases, `tests`.
//!
//! Not here: who may write what (the fake API server has the Node authoriser and the NodeRestriction plugin).

mod certificate_request;
mod claim;
mod container;
mod csi_node;
mod event;
mod fields;
mod formats;
mod invalid_writes;
mod lease;
mod metadata;
mod node;
mod pod;
mod pod_certificate_request;
mod pod_status;
mod reviews;
mod violation;

use serde_json::Value;

pub use invalid_writes::{InvalidWrites, NoInvalidWrites};
use violation::Violations;
pub use violation::{Kind, Violation};

/// One write of an object.
#[derive(Clone, Copy, Debug)]
pub struct Write<'a> {
    /// API group of the request: empty for `v1`.
    pub group: &'a str,
    /// Plural name of the resource.
    pub resource: &'a str,
    /// `status`, `token`; empty for none.
    pub subresource: &'a str,
    /// Namespace in the path of the request; empty for none.
    pub namespace: &'a str,
    /// Name in the path of the request; empty at a creation.
    pub name: &'a str,
    /// What is written over; `None` at a creation. Events have the fields of `v1`, whatever API they are written
    /// through.
    pub old: Option<&'a Value>,
    /// What would be stored.
    pub new: &'a Value,
}

/// Returns the rules that a write breaks: none for what a server takes, and for objects that no node agent writes.
pub fn violations(write: &Write<'_>) -> Vec<Violation> {
    let mut violations = Violations::default();
    let (found, new) = (&mut violations, write.new);
    match (write.group, write.resource, write.subresource, write.old) {
        ("", "nodes", "", None) => node::create(new, found),
        ("", "nodes", "", Some(old)) => node::update(old, new, found),
        ("", "nodes", "status", Some(old)) => node::status(old, new, found),
        ("", "pods", "", None) => pod::create(new, found),
        ("", "pods", "status", Some(old)) => pod_status::update(old, new, found),
        ("", "persistentvolumeclaims", "status", Some(old)) => claim::status(old, new, found),
        ("" | "events.k8s.io", "events", "", old) => {
            let api = match write.group {
                "" => event::Api::Core,
                _ => event::Api::Events,
            };
            match old {
                None => event::create(new, api, found),
                Some(old) => event::update(old, new, api, found),
            }
        }
        ("coordination.k8s.io", "leases", "", None) => lease::create(new, found),
        ("coordination.k8s.io", "leases", "", Some(old)) => lease::update(old, new, found),
        ("storage.k8s.io", "csinodes", "", None) => csi_node::create(new, found),
        ("storage.k8s.io", "csinodes", "", Some(old)) => csi_node::update(old, new, found),
        ("certificates.k8s.io", "certificatesigningrequests", "", None) => {
            certificate_request::create(new, found);
        }
        ("certificates.k8s.io", "podcertificaterequests", "", None) => {
            pod_certificate_request::create(new, found);
        }
        ("" | "authentication.k8s.io", "serviceaccounts", "token", _) => {
            reviews::token_request(write.namespace, write.name, new, found);
        }
        ("authentication.k8s.io", "tokenreviews", "", _) => reviews::token_review(new, found),
        ("authorization.k8s.io", "subjectaccessreviews", "", _) => {
            reviews::access_review(false, new, found);
        }
        ("authorization.k8s.io", "selfsubjectaccessreviews", "", _) => {
            reviews::access_review(true, new, found);
        }
        _ => {}
    }
    violations.into_vec()
}

/// Returns the fields of `sent` that its type does not have. `known` is `sent` read as its type and written again.
pub fn unknown_fields(sent: &Value, known: &Value) -> Vec<Violation> {
    let mut violations = Violations::default();
    fields::unknown(sent, known, &mut violations);
    violations.into_vec()
}

#[cfg(test)]
mod tests;
