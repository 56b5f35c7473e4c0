//! What the server says when it refuses, as a `Status`.

use serde_json::{Value, json};

use super::resource::Resource;

/// A refusal.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) code: u16,
    pub(super) reason: &'static str,
    pub(super) message: String,
    pub(super) details: Value,
}

impl Failure {
    pub(super) fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            code,
            reason,
            message: message.into(),
            details: Value::Null,
        }
    }

    fn about(mut self, resource: &Resource, name: &str) -> Self {
        let mut details = json!({ "kind": resource.plural });
        if !name.is_empty() {
            details["name"] = name.into();
        }
        if !resource.group.is_empty() {
            details["group"] = resource.group.into();
        }
        self.details = details;
        self
    }

    pub(super) fn not_found(resource: &Resource, name: &str) -> Self {
        let message = format!("{} \"{name}\" not found", resource.qualified());
        Self::new(404, "NotFound", message).about(resource, name)
    }

    pub(super) fn already_exists(resource: &Resource, name: &str) -> Self {
        let message = format!("{} \"{name}\" already exists", resource.qualified());
        Self::new(409, "AlreadyExists", message).about(resource, name)
    }

    pub(super) fn conflict(resource: &Resource, name: &str, why: &str) -> Self {
        let message = format!(
            "Operation cannot be fulfilled on {} \"{name}\": {why}",
            resource.qualified()
        );
        Self::new(409, "Conflict", message).about(resource, name)
    }

    pub(super) fn modified(resource: &Resource, name: &str) -> Self {
        Self::conflict(
            resource,
            name,
            "the object has been modified; please apply your changes to the latest version and try again",
        )
    }

    pub(super) fn forbidden(resource: &Resource, name: &str, why: &str) -> Self {
        let object = match name {
            "" => resource.qualified(),
            name => format!("{} \"{name}\"", resource.qualified()),
        };
        let message = format!("{object} is forbidden: {why}");
        Self::new(403, "Forbidden", message).about(resource, name)
    }

    pub(super) fn invalid(resource: &Resource, name: &str, field: &str, why: &str) -> Self {
        let message = format!("{} \"{name}\" is invalid: {field}: {why}", resource.kind);
        let mut failure = Self::new(422, "Invalid", message).about(resource, name);
        failure.details["kind"] = resource.kind.into();
        failure.details["causes"] =
            json!([{ "reason": "FieldValueInvalid", "message": why, "field": field }]);
        failure
    }

    pub(super) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    pub(super) fn expired(message: impl Into<String>) -> Self {
        Self::new(410, "Expired", message)
    }

    pub(super) fn unknown_path() -> Self {
        let message = "the server could not find the requested resource";
        let mut failure = Self::new(404, "NotFound", message);
        failure.details = json!({});
        failure
    }

    /// For a status that a test asked for.
    pub(super) fn injected(code: u16) -> Self {
        let reason = match code {
            400 => "BadRequest",
            401 => "Unauthorized",
            403 => "Forbidden",
            404 => "NotFound",
            409 => "Conflict",
            410 => "Expired",
            422 => "Invalid",
            429 => "TooManyRequests",
            500 => "InternalError",
            503 => "ServiceUnavailable",
            504 => "Timeout",
            _ => "",
        };
        let mut failure = Self::new(code, reason, format!("injected {code}"));
        if code == 429 {
            failure.details = json!({ "retryAfterSeconds": 1 });
        }
        failure
    }

    pub(super) fn status(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message,
        });
        if !self.reason.is_empty() {
            status["reason"] = self.reason.into();
        }
        if !self.details.is_null() {
            status["details"] = self.details.clone();
        }
        status["code"] = self.code.into();
        status
    }
}
