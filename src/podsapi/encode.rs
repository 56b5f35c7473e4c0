//! Pods as protobuf: the bytes that Go's `v1.Pod#Unmarshal` reads.
//!
//! The JSON form of a pod is walked with a table of field numbers (`pod.fields`), which are the protocol. A line of the table
//! is a message and its fields, each `name=number:kind`. Kinds: `s` string, `b` bool, `i` integer, `t` time, `q`
//! quantity, `o` integer or string, `f` raw JSON, or the name of a message. Suffixes: `*` list, `%` map with string keys, `!`
//! a message whose fields JSON has in the outer object.

use std::collections::HashMap;
use std::sync::OnceLock;

use k8s_openapi::api::core::v1::Pod;
use prost::encoding::{WireType, encode_key, encode_varint};
use serde_json::{Map, Value};

static TABLE: &str = include_str!("pod.fields");

/// A pod that cannot be written as protobuf.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write field {field} of {message} as protobuf: {why}")]
pub struct EncodeError {
    message: &'static str,
    field: String,
    why: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Shape {
    One,
    List,
    Map,
    Inline,
}

struct Field {
    message: &'static str,
    name: &'static str,
    number: u32,
    kind: &'static str,
    shape: Shape,
}

type Messages = HashMap<&'static str, Vec<Field>>;

fn messages() -> &'static Messages {
    static MESSAGES: OnceLock<Messages> = OnceLock::new();
    MESSAGES.get_or_init(|| {
        let line = |line: &'static str| {
            let mut words = line.split(' ');
            let name = words.next()?;
            let fields = words.filter_map(|word| Field::read(name, word));
            Some((name, fields.collect()))
        };
        TABLE.lines().filter_map(line).collect()
    })
}

impl Field {
    /// Reads `name=number:kind`.
    fn read(message: &'static str, word: &'static str) -> Option<Self> {
        let (name, rest) = word.split_once('=')?;
        let (number, kind) = rest.split_once(':')?;
        let (kind, shape) = match kind.as_bytes().last()? {
            b'*' => (&kind[..kind.len() - 1], Shape::List),
            b'%' => (&kind[..kind.len() - 1], Shape::Map),
            b'!' => (&kind[..kind.len() - 1], Shape::Inline),
            _ => (kind, Shape::One),
        };
        Some(Self {
            message,
            name,
            number: number.parse().ok()?,
            kind,
            shape,
        })
    }

    fn failed(&self, why: &str) -> EncodeError {
        EncodeError {
            message: self.message,
            field: self.name.to_owned(),
            why: why.to_owned(),
        }
    }
}

/// Writes a pod as protobuf.
///
/// # Errors
/// A field that the table lacks, or a value that does not fit its kind.
pub fn pod(pod: &Pod) -> Result<Vec<u8>, EncodeError> {
    let failed = |why: String| EncodeError {
        message: "Pod",
        field: "(all)".to_owned(),
        why,
    };
    let value = serde_json::to_value(pod).map_err(|error| failed(error.to_string()))?;
    let Value::Object(mut object) = value else {
        return Err(failed("it is not an object".to_owned()));
    };
    // They precede a message, and are no fields of it.
    object.remove("apiVersion");
    object.remove("kind");
    let mut out = Vec::new();
    message("Pod", &object, &mut out)?;
    Ok(out)
}

/// Writes a message without its length.
fn message(
    name: &'static str,
    object: &Map<String, Value>,
    out: &mut Vec<u8>,
) -> Result<(), EncodeError> {
    if let Some(field) = object.keys().find(|key| !has(name, key)) {
        return Err(EncodeError {
            message: name,
            field: field.clone(),
            why: "its number is not known".to_owned(),
        });
    }
    fields(name, object, out)
}

fn has(message: &str, key: &str) -> bool {
    let mut fields = messages().get(message).into_iter().flatten();
    fields.any(|field| match field.shape {
        Shape::Inline => has(field.kind, key),
        _ => field.name == key,
    })
}

fn fields(
    name: &'static str,
    object: &Map<String, Value>,
    out: &mut Vec<u8>,
) -> Result<(), EncodeError> {
    for field in messages().get(name).into_iter().flatten() {
        if field.shape == Shape::Inline {
            let mut inner = Vec::new();
            fields(field.kind, object, &mut inner)?;
            block(field.number, &inner, out);
            continue;
        }
        match (field.shape, object.get(field.name)) {
            (_, None | Some(Value::Null)) => {}
            (Shape::List, Some(Value::Array(items))) => {
                for item in items {
                    one(field, field.number, item, out)?;
                }
            }
            (Shape::Map, Some(Value::Object(entries))) => {
                for (key, item) in entries {
                    let mut entry = Vec::new();
                    block(1, key.as_bytes(), &mut entry);
                    one(field, 2, item, &mut entry)?;
                    block(field.number, &entry, out);
                }
            }
            (Shape::One, Some(value)) => one(field, field.number, value, out)?,
            _ => return Err(field.failed("it is neither a list nor a mapping")),
        }
    }
    Ok(())
}

/// Problem of a value that its field cannot have.
const OTHER_KIND: &str = "the value is of another kind";

/// Writes one value under a number.
fn one(field: &Field, number: u32, value: &Value, out: &mut Vec<u8>) -> Result<(), EncodeError> {
    let mut inner = Vec::new();
    match (field.kind, value) {
        ("b", Value::Bool(set)) => {
            integer(number, i64::from(*set), out);
            return Ok(());
        }
        ("i", Value::Number(count)) => {
            let count = count.as_i64().ok_or_else(|| field.failed(OTHER_KIND))?;
            integer(number, count, out);
            return Ok(());
        }
        ("s", Value::String(text)) => inner.extend_from_slice(text.as_bytes()),
        ("t", Value::String(text)) => {
            let at: Option<jiff::Timestamp> = text.parse().ok();
            let at = at.ok_or_else(|| field.failed(OTHER_KIND))?;
            integer(1, at.as_second(), &mut inner);
            integer(2, i64::from(at.subsec_nanosecond()), &mut inner);
        }
        ("q", Value::String(text)) => block(1, text.as_bytes(), &mut inner),
        ("o", _) => inner = int_or_string(value).ok_or_else(|| field.failed(OTHER_KIND))?,
        ("f", _) => {
            let raw = serde_json::to_vec(value).map_err(|_| field.failed(OTHER_KIND))?;
            block(1, &raw, &mut inner);
        }
        (kind, Value::Object(object)) => message(kind, object, &mut inner)?,
        _ => return Err(field.failed(OTHER_KIND)),
    }
    block(number, &inner, out);
    Ok(())
}

fn int_or_string(value: &Value) -> Option<Vec<u8>> {
    let mut inner = Vec::new();
    match value {
        Value::Number(count) => {
            integer(1, 0, &mut inner);
            integer(2, count.as_i64()?, &mut inner);
        }
        Value::String(text) => {
            integer(1, 1, &mut inner);
            block(3, text.as_bytes(), &mut inner);
        }
        _ => return None,
    }
    Some(inner)
}

fn integer(number: u32, value: i64, out: &mut Vec<u8>) {
    encode_key(number, WireType::Varint, out);
    encode_varint(value.cast_unsigned(), out);
}

fn block(number: u32, bytes: &[u8], out: &mut Vec<u8>) {
    encode_key(number, WireType::LengthDelimited, out);
    encode_varint(u64::try_from(bytes.len()).unwrap_or(u64::MAX), out);
    out.extend_from_slice(bytes);
}
