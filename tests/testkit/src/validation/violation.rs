//! What is wrong with an object, in the words of a `Status`.

use std::fmt::{Display, Formatter, Result};

use serde_json::{Value, json};

/// The kind of a violation. Upstream: `field.ErrorType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A value that the field may not have.
    Invalid,
    /// A field that has to be there.
    Required,
    /// A field that may not be there, or not change.
    Forbidden,
    /// A value that is there already.
    Duplicate,
    /// A value that is not one of a few.
    NotSupported,
    /// A value that is too long.
    TooLong,
    /// A field that the type does not have.
    Unknown,
}

impl Kind {
    /// The `reason` of the cause in a `Status`. An unknown field has none there: a server says it in the message.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Invalid => "FieldValueInvalid",
            Self::Required => "FieldValueRequired",
            Self::Forbidden => "FieldValueForbidden",
            Self::Duplicate => "FieldValueDuplicate",
            Self::NotSupported => "FieldValueNotSupported",
            Self::TooLong => "FieldValueTooLong",
            Self::Unknown => "",
        }
    }
}

/// One rule that an object breaks. Shown as `field.path: message`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Path of the field, as the API server writes it: `status.hostIPs[0].ip`.
    pub field: String,
    /// What kind it is.
    pub kind: Kind,
    /// What is wrong, as the API server writes it, without the field.
    pub message: String,
}

impl Violation {
    /// The cause in `details.causes` of a `Status`.
    pub fn cause(&self) -> Value {
        json!({ "reason": self.kind.reason(), "message": self.message, "field": self.field })
    }
}

impl Display for Violation {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        write!(f, "{}: {}", self.field, self.message)
    }
}

/// Collects violations.
#[derive(Debug, Default)]
pub(super) struct Violations(Vec<Violation>);

impl Violations {
    pub(super) fn into_vec(self) -> Vec<Violation> {
        self.0
    }

    fn add(&mut self, field: impl Into<String>, kind: Kind, message: String) {
        let field = field.into();
        self.0.push(Violation {
            field,
            kind,
            message,
        });
    }

    pub(super) fn invalid(&mut self, field: impl Into<String>, value: &Value, why: impl Display) {
        let message = format!("Invalid value: {value}: {why}");
        self.add(field, Kind::Invalid, message);
    }

    pub(super) fn required(&mut self, field: impl Into<String>, why: &str) {
        let message = match why {
            "" => "Required value".to_owned(),
            why => format!("Required value: {why}"),
        };
        self.add(field, Kind::Required, message);
    }

    pub(super) fn forbidden(&mut self, field: impl Into<String>, why: &str) {
        self.add(field, Kind::Forbidden, format!("Forbidden: {why}"));
    }

    pub(super) fn duplicate(&mut self, field: impl Into<String>, value: &Value) {
        self.add(field, Kind::Duplicate, format!("Duplicate value: {value}"));
    }

    pub(super) fn not_supported(
        &mut self,
        field: impl Into<String>,
        value: &Value,
        supported: &[&str],
    ) {
        let supported: Vec<String> = supported.iter().map(|s| format!("\"{s}\"")).collect();
        let supported = supported.join(", ");
        let message = format!("Unsupported value: {value}: supported values: {supported}");
        self.add(field, Kind::NotSupported, message);
    }

    pub(super) fn too_long(&mut self, field: impl Into<String>, most: usize) {
        let message = format!("Too long: may not be more than {most} bytes");
        self.add(field, Kind::TooLong, message);
    }

    pub(super) fn unknown(&mut self, field: &str) {
        self.add(field, Kind::Unknown, "unknown field".to_owned());
    }

    /// `ValidateImmutableField`.
    pub(super) fn immutable(&mut self, field: &str, old: &Value, new: &Value) {
        if old != new {
            self.invalid(field, new, "field is immutable");
        }
    }

    /// Adds what a format has to say of a value.
    pub(super) fn format(&mut self, field: &str, value: &Value, says: Option<String>) {
        if let Some(why) = says {
            self.invalid(field, value, why);
        }
    }
}
