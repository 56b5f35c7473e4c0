//! One YAML (or JSON) document as a tree in which every key and value knows its line and column.
//!
//! More than one document and inputs that blow up through aliases are errors of the parser. Of a key that is given
//! twice, the last value counts, as upstream's lenient decoding has it. Scalars are typed by the YAML core schema, as `sigs.k8s.io/yaml` does.

use std::collections::HashMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

/// Larger files are refused before they are parsed.
pub(super) const MAX_BYTES: u64 = 1 << 20;

/// Line and column, counted from 1; 0 when unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) line: u64,
    pub(super) column: u64,
}

impl From<serde_saphyr::Location> for Place {
    fn from(location: serde_saphyr::Location) -> Self {
        Self {
            line: location.line(),
            column: location.column(),
        }
    }
}

/// A value and where it stands.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) place: Place,
    pub(super) value: Value,
}

/// A key, where it stands, and its value.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) place: Place,
    /// Earlier place of the key in the same map, with another value that does not count.
    pub(super) earlier: Option<Place>,
    pub(super) node: Node,
}

/// A YAML value by the core schema.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Null,
    Bool(bool),
    Int(i128),
    Float(f64),
    String(String),
    List(Vec<Node>),
    Map(Vec<Entry>),
}

impl Value {
    /// The kind of value in words, with its article.
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Null => "null".to_owned(),
            Self::Bool(value) => format!("the boolean {value}"),
            Self::Int(value) => format!("the number {value}"),
            Self::Float(value) => format!("the number {value}"),
            Self::String(value) if value.chars().count() > 40 => "a string".to_owned(),
            Self::String(value) => format!("the string {value:?}"),
            Self::List(_) => "a list".to_owned(),
            Self::Map(_) => "a map".to_owned(),
        }
    }
}

/// A syntax error, with its place and a message of one line.
#[derive(Debug)]
pub(super) struct SyntaxError {
    pub(super) place: Place,
    pub(super) message: String,
}

/// Parses the single document in `text`. An empty text is `Value::Null`.
pub(super) fn parse(text: &str) -> Result<Node, SyntaxError> {
    let options = serde_saphyr::options! {
        legacy_octal_numbers: true,
        with_snippet: false,
        duplicate_keys: serde_saphyr::DuplicateKeyPolicy::LastWins,
        budget: serde_saphyr::budget! {
            max_events: 100_000,
            max_nodes: 50_000,
            max_aliases: 1_000,
            // The second one is an error of its own.
            max_documents: 2,
            max_depth: 32,
        },
    };
    if text.trim().is_empty() {
        return Ok(Node {
            place: Place { line: 1, column: 1 },
            value: Value::Null,
        });
    }
    serde_saphyr::from_str_with_options::<Spanned<Value>>(text, options)
        .map(Node::from)
        .map_err(|error| SyntaxError {
            place: error.location().map(Place::from).unwrap_or_default(),
            message: one_line(&error),
        })
}

/// A key that is given twice.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Repeated {
    /// Its dotted path.
    pub(super) path: String,
    /// Place of the value that counts.
    pub(super) place: Place,
    /// Place of the key before that.
    pub(super) earlier: Place,
}

/// Returns the keys that are given twice in one map.
pub(super) fn repeated(root: &Node) -> Vec<Repeated> {
    let mut found = Vec::new();
    find_repeated("", root, &mut found);
    found
}

/// The parser bounds how deep this goes.
fn find_repeated(path: &str, node: &Node, found: &mut Vec<Repeated>) {
    match &node.value {
        Value::Map(entries) => {
            for entry in entries {
                let path = match path {
                    "" => entry.key.clone(),
                    path => format!("{path}.{}", entry.key),
                };
                found.extend(entry.earlier.map(|earlier| Repeated {
                    path: path.clone(),
                    place: entry.place,
                    earlier,
                }));
                find_repeated(&path, &entry.node, found);
            }
        }
        Value::List(items) => {
            for (index, item) in items.iter().enumerate() {
                find_repeated(&format!("{path}[{index}]"), item, found);
            }
        }
        _ => {}
    }
}

const TOO_MUCH: &str =
    "too many values, aliases or levels for a configuration; write it without aliases";

/// The parser's message without its own idea of the place, which we print in front.
fn one_line(error: &serde_saphyr::Error) -> String {
    use serde_saphyr::Error as E;
    match error.without_snippet() {
        E::MultipleDocuments { .. } => {
            "more than one YAML document; put each KubeletConfiguration into a file of its own"
                .to_owned()
        }
        E::Budget { .. }
        | E::AliasReplayLimitExceeded { .. }
        | E::AliasExpansionLimitExceeded { .. }
        | E::AliasReplayStackDepthExceeded { .. } => TOO_MUCH.to_owned(),
        other => {
            let text = other.to_string();
            let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
            match text.split_once(" at line ") {
                // How the parser words a budget spent inside of an alias.
                _ if text.contains("budget breached") => TOO_MUCH.to_owned(),
                Some((message, _)) => message.to_owned(),
                None => text,
            }
        }
    }
}

impl From<Spanned<Value>> for Node {
    fn from(spanned: Spanned<Value>) -> Self {
        Self {
            place: spanned.referenced.into(),
            value: spanned.value,
        }
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        Value::deserialize(deserializer)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Int(value.into()))
    }

    fn visit_i128<E>(self, value: i128) -> Result<Value, E> {
        Ok(Value::Int(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Int(value.into()))
    }

    fn visit_u128<E>(self, value: u128) -> Result<Value, E> {
        Ok(Value::Int(i128::try_from(value).unwrap_or(i128::MAX)))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        // `1.0` and `1e3` are whole numbers, as in the JSON that upstream makes of them.
        let whole = value.to_string().parse();
        Ok(whole.map_or(Value::Float(value), Value::Int))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element::<Spanned<Value>>()? {
            items.push(item.into());
        }
        Ok(Value::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut entries: Vec<Entry> = Vec::new();
        let mut known: HashMap<String, usize> = HashMap::new();
        while let Some((key, node)) = map.next_entry::<Spanned<String>, Spanned<Value>>()? {
            let mut entry = Entry {
                key: key.value,
                place: key.referenced.into(),
                earlier: None,
                node: node.into(),
            };
            match known.get(&entry.key).and_then(|at| entries.get_mut(*at)) {
                Some(before) => {
                    entry.earlier = Some(before.place);
                    *before = entry;
                }
                None => {
                    known.insert(entry.key.clone(), entries.len());
                    entries.push(entry);
                }
            }
        }
        Ok(Value::Map(entries))
    }
}
