//! Fields that nothing acts on: whether a value says anything.

use super::duration::parse_duration;
use super::fields::{Field, Kind};
use super::yaml::Value;
use crate::types::quantity::nanos;

/// Whether `value` leaves `field` what it would be anyway: upstream's default, or a zero that stands for it.
/// kubeadm writes many of these.
pub(super) fn is_unset(field: &Field, value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::List(items) => items.is_empty(),
        Value::Map(entries) => entries.is_empty(),
        value => field.unset.iter().any(|text| says(field.kind, text, value)),
    }
}

/// Whether the scalar `value` is what `text` says.
fn says(kind: Kind, text: &str, value: &Value) -> bool {
    let duration = || parse_duration(text).ok();
    match (kind, value) {
        (Kind::Duration | Kind::DurationOrNanos, Value::String(given)) => {
            parse_duration(given).is_ok_and(|given| Some(given) == duration())
        }
        (Kind::DurationOrNanos, Value::Int(given)) => {
            duration().is_some_and(|wanted| i128::try_from(wanted.as_nanos()) == Ok(*given))
        }
        (Kind::Quantity, value) => {
            nanos(&plain(value)).is_ok_and(|given| nanos(text).is_ok_and(|wanted| given == wanted))
        }
        (_, value) => plain(value) == text,
    }
}

/// The text of a scalar; empty for other values.
fn plain(value: &Value) -> String {
    match value {
        Value::Bool(value) => value.to_string(),
        Value::Int(value) => value.to_string(),
        Value::Float(value) => value.to_string(),
        Value::String(value) => value.clone(),
        Value::Null | Value::List(_) | Value::Map(_) => String::new(),
    }
}
