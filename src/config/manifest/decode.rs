//! From the document to the Kubernetes types, strictly: a field the types do not know is a problem with
//! the field's path and line, where the generated deserialisers would skip it. As in Go, `null` is the
//! empty string where a string has to be, and the quantity 0.

use std::cell::RefCell;
use std::fmt;

use serde::de::value::StrDeserializer;
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Error as _, Expected, IntoDeserializer,
    MapAccess, SeqAccess, Unexpected, Visitor,
};
use serde::forward_to_deserialize_any;

use super::tree::{Entry, Node, Position, Tree};
use super::{ManifestError, Problem};

/// Decodes `tree`, which stands at `root` in its document.
pub(super) fn decode<T: DeserializeOwned>(tree: &Tree, root: &str) -> Result<T, ManifestError> {
    let problems = RefCell::new(Vec::new());
    let path = Path::Root(root);
    let decoded = T::deserialize(Decoder {
        tree,
        path: &path,
        problems: &problems,
    });
    let mut problems = problems.into_inner();
    match decoded {
        Ok(value) if problems.is_empty() => Ok(value),
        Ok(_) => Err(ManifestError::Invalid(problems)),
        Err(error) => {
            problems.push(error.into_problem());
            Err(ManifestError::Invalid(problems))
        }
    }
}

enum Path<'p> {
    Root(&'p str),
    Key(&'p Path<'p>, &'p str),
    Index(&'p Path<'p>, usize),
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root(root) => f.write_str(root),
            Self::Key(Path::Root(""), key) => f.write_str(key),
            Self::Key(parent, key) if key.contains(['.', '/', '[']) => {
                write!(f, "{parent}[{key}]")
            }
            Self::Key(parent, key) => write!(f, "{parent}.{key}"),
            Self::Index(parent, index) => write!(f, "{parent}[{index}]"),
        }
    }
}

/// A decoding error; the innermost value that fails names the place.
#[derive(Debug)]
pub(super) struct DecodeError {
    message: String,
    place: Option<(String, Position)>,
}

impl DecodeError {
    fn at(mut self, decoder: Decoder<'_, '_>) -> Self {
        if self.place.is_none() {
            self.place = Some((decoder.path.to_string(), decoder.tree.at));
        }
        self
    }

    fn into_problem(self) -> Problem {
        let (field, at) = self.place.unwrap_or_default();
        let mut message = in_plain_words(self.message);
        if message.ends_with("expected a string") {
            message.push_str("; put the value in quotes");
        }
        Problem { field, at, message }
    }
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for DecodeError {}

impl serde::de::Error for DecodeError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self {
            message: message.to_string(),
            place: None,
        }
    }

    /// Without the value, which may be a password where a variable is meant.
    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let found = match found {
            Unexpected::Bool(_) => "a boolean",
            Unexpected::Unsigned(_) | Unexpected::Signed(_) | Unexpected::Float(_) => "a number",
            Unexpected::Str(_) | Unexpected::Char(_) => "a string",
            Unexpected::Unit => "null",
            Unexpected::Seq => "a list",
            Unexpected::Map => "a mapping",
            other => return Self::custom(format_args!("found {other}, expected {expected}")),
        };
        Self::custom(format_args!("found {found}, expected {expected}"))
    }
}

#[derive(Clone, Copy)]
struct Decoder<'t, 'p> {
    tree: &'t Tree,
    path: &'p Path<'p>,
    problems: &'p RefCell<Vec<Problem>>,
}

impl<'t> Decoder<'t, '_> {
    fn value<V: Visitor<'t>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match &self.tree.node {
            Node::Null => visitor.visit_unit(),
            Node::Bool(value) => visitor.visit_bool(*value),
            Node::Int(value) => visitor.visit_i64(*value),
            Node::UInt(value) => visitor.visit_u64(*value),
            Node::Float(value) => visitor.visit_f64(*value),
            Node::Str(value) => visitor.visit_borrowed_str(value),
            Node::Seq(items) => visitor.visit_seq(Items {
                items: items.iter().enumerate(),
                decoder: self,
            }),
            Node::Map(entries) => visitor.visit_map(Fields {
                entries: entries.iter(),
                current: None,
                decoder: self,
            }),
        }
    }
}

impl<'de> Deserializer<'de> for Decoder<'de, '_> {
    type Error = DecodeError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        self.value(visitor).map_err(|e| e.at(self))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match self.tree.node {
            Node::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        if name == "Quantity" && matches!(self.tree.node, Node::Null) {
            let zero: StrDeserializer<'_, DecodeError> = "0".into_deserializer();
            return visitor.visit_newtype_struct(zero);
        }
        visitor.visit_newtype_struct(self).map_err(|e| e.at(self))
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match self.tree.node {
            Node::Null => visitor.visit_borrowed_str(""),
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        self.deserialize_str(visitor)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        if let Node::Map(entries) = &self.tree.node {
            for entry in entries {
                if !fields.contains(&entry.key.as_str()) {
                    self.problems.borrow_mut().push(Problem {
                        field: Path::Key(self.path, &entry.key).to_string(),
                        at: entry.at,
                        message: unknown_field(&entry.key, fields),
                    });
                }
            }
        } else {
            let found = Unexpected::Other(self.tree.describe());
            return Err(DecodeError::invalid_type(found, &"a mapping").at(self));
        }
        self.deserialize_any(visitor)
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char bytes byte_buf unit
        unit_struct seq tuple tuple_struct map enum identifier
    }
}

struct Items<'t, 'p> {
    items: std::iter::Enumerate<std::slice::Iter<'t, Tree>>,
    decoder: Decoder<'t, 'p>,
}

impl<'t> SeqAccess<'t> for Items<'t, '_> {
    type Error = DecodeError;

    fn next_element_seed<S: DeserializeSeed<'t>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, DecodeError> {
        let Some((index, tree)) = self.items.next() else {
            return Ok(None);
        };
        let path = Path::Index(self.decoder.path, index);
        let decoder = Decoder {
            tree,
            path: &path,
            problems: self.decoder.problems,
        };
        seed.deserialize(decoder)
            .map(Some)
            .map_err(|e| e.at(decoder))
    }
}

struct Fields<'t, 'p> {
    entries: std::slice::Iter<'t, Entry>,
    current: Option<&'t Entry>,
    decoder: Decoder<'t, 'p>,
}

impl<'t> MapAccess<'t> for Fields<'t, '_> {
    type Error = DecodeError;

    fn next_key_seed<S: DeserializeSeed<'t>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, DecodeError> {
        self.current = self.entries.next();
        let Some(entry) = self.current else {
            return Ok(None);
        };
        let key: StrDeserializer<'_, DecodeError> = entry.key.as_str().into_deserializer();
        seed.deserialize(key).map(Some)
    }

    fn next_value_seed<S: DeserializeSeed<'t>>(
        &mut self,
        seed: S,
    ) -> Result<S::Value, DecodeError> {
        let Some(entry) = self.current else {
            return Err(DecodeError::custom("a value was asked for before its key"));
        };
        let path = Path::Key(self.decoder.path, &entry.key);
        let decoder = Decoder {
            tree: &entry.value,
            path: &path,
            problems: self.decoder.problems,
        };
        seed.deserialize(decoder).map_err(|e| e.at(decoder))
    }
}

/// Replaces what serde calls an expected type by what may be written in a manifest.
fn in_plain_words(message: String) -> String {
    let Some((found, kind)) = message.rsplit_once(", expected ") else {
        return message;
    };
    let whole = |min: i64, max: u64| format!("a whole number from {min} to {max}");
    let expected = match kind {
        "i32" => whole(i32::MIN.into(), i32::MAX.unsigned_abs().into()),
        "i64" => whole(i64::MIN, i64::MAX.unsigned_abs()),
        "u16" => whole(0, u16::MAX.into()),
        "u32" => whole(0, u32::MAX.into()),
        "u64" => whole(0, u64::MAX),
        "f64" => "a number".to_owned(),
        "a boolean" => "true or false".to_owned(),
        "a sequence" => "a list".to_owned(),
        "a map" => "a mapping".to_owned(),
        _ => return message,
    };
    format!("{found}, expected {expected}")
}

fn unknown_field(key: &str, fields: &[&str]) -> String {
    if key == "protocol" && fields.contains(&"httpHeaders") {
        return "unknown field: it is alpha in Kubernetes 1.37, and not supported; leave it out, HTTPS probes choose \
                HTTP/2 by themselves"
            .to_owned();
    }
    let near = fields
        .iter()
        // A key may be as long as the document.
        .filter(|f| f.len().abs_diff(key.len()) <= 2)
        .map(|f| (distance(&key.to_lowercase(), &f.to_lowercase()), f))
        .filter(|(d, _)| *d <= 2)
        .min();
    match near {
        Some((_, field)) => format!("unknown field; did you mean {field:?}?"),
        None => format!("unknown field; known here: {}", fields.join(", ")),
    }
}

/// Levenshtein distance over bytes.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(row[j + 1] + 1);
        }
    }
    row[b.len()]
}
