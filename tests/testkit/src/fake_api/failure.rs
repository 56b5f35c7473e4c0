//! What the server says when it refuses, as a `Status`.

use serde_json::{Value, json};

use super::resource::Resource;
use crate::validation::Violation;

/// A refusal.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) code: u16,
    pub(super) reason: &'static str,
    pub(super) message: String,
    pub(super) details: Value,
    /// The object breaks rules of [`crate::validation`].
    is_violation: bool,
}

impl Failure {
    pub(super) fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            code,
            reason,
            message: message.into(),
            details: Value::Null,
            is_violation: false,
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

    /// The object breaks rules: `NewInvalid`. `kind` is qualified with its group.
    pub(super) fn violates(kind: &str, group: &str, name: &str, violations: &[Violation]) -> Self {
        let texts: Vec<String> = violations.iter().map(ToString::to_string).collect();
        let why = match &texts[..] {
            [one] => one.clone(),
            several => format!("[{}]", several.join(", ")),
        };
        let qualified = match group {
            "" => kind.to_owned(),
            group => format!("{kind}.{group}"),
        };
        let message = format!("{qualified} \"{name}\" is invalid: {why}");
        let causes: Vec<Value> = violations.iter().map(Violation::cause).collect();
        let mut failure = Self::new(422, "Invalid", message);
        failure.details = json!({ "name": name, "kind": kind, "causes": causes });
        if !group.is_empty() {
            failure.details["group"] = group.into();
        }
        failure.is_violation = true;
        failure
    }

    /// The body has fields that its type does not have, as with `fieldValidation=Strict`.
    pub(super) fn unknown_fields(violations: &[Violation]) -> Self {
        let fields: Vec<String> = (violations.iter())
            .map(|violation| format!("unknown field \"{}\"", violation.field))
            .collect();
        let mut failure =
            Self::bad_request(format!("strict decoding error: {}", fields.join(", ")));
        failure.is_violation = true;
        failure
    }

    /// What is wrong with the object, where that is the reason: a line for each rule.
    pub(super) fn violations(&self) -> Vec<String> {
        if !self.is_violation {
            return Vec::new();
        }
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        match self.details["causes"].as_array() {
            Some(causes) => (causes.iter())
                .map(|cause| format!("{}: {}", text(&cause["field"]), text(&cause["message"])))
                .collect(),
            None => vec![self.message.clone()],
        }
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
