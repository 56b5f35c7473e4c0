//! The document as written: values with the line and column they stand at.

use std::collections::HashSet;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{DuplicateKeyPolicy, MergeKeyPolicy, Spanned};

use super::{ManifestError, Problem};

/// A place in the document, 1-based; zero when it is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// Line, from 1.
    pub line: u64,
    /// Column, from 1.
    pub column: u64,
}

/// A value and where it stands.
#[derive(Debug)]
pub(super) struct Tree {
    pub(super) at: Position,
    pub(super) node: Node,
}

/// Kind and content of a value.
#[derive(Debug)]
pub(super) enum Node {
    Null,
    Bool(bool),
    Int(i64),
    UInt(u64),
    Float(f64),
    Str(String),
    Seq(Vec<Tree>),
    Map(Vec<Entry>),
}

/// One key of a mapping.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) at: Position,
    pub(super) value: Tree,
}

impl Tree {
    /// Parses the documents of `text`, at least one. JSON is read as the YAML that it is.
    pub(super) fn parse(text: &str) -> Result<Vec<Self>, ManifestError> {
        let documents = serde_saphyr::from_multiple_with_options::<Tree>(text, options())
            .map_err(|error| syntax(&error))?;
        match documents.is_empty() {
            true => Err(ManifestError::Empty),
            false => Ok(documents),
        }
    }

    /// The value of a key, if this is a mapping that has it.
    pub(super) fn get(&self, key: &str) -> Option<&Tree> {
        self.entry(key).map(|e| &e.value)
    }

    fn entry(&self, key: &str) -> Option<&Entry> {
        match &self.node {
            Node::Map(entries) => entries.iter().find(|e| e.key == key),
            _ => None,
        }
    }

    /// Returns the position of `path`, or of its nearest parent that exists.
    pub(super) fn locate(&self, path: &str) -> Position {
        let mut tree = self;
        let mut at = self.at;
        for step in steps(path) {
            let next = match (&tree.node, step.parse::<usize>()) {
                (Node::Seq(items), Ok(index)) => items.get(index).map(|t| (t.at, t)),
                _ => tree.entry(step).map(|e| (e.at, &e.value)),
            };
            let Some((position, child)) = next else { break };
            at = position;
            tree = child;
        }
        at
    }

    /// The text of a key; empty when there is none.
    pub(super) fn text(&self, key: &str) -> &str {
        match self.get(key).map(|tree| &tree.node) {
            Some(Node::Str(text)) => text,
            _ => "",
        }
    }

    /// Returns the kind of the value, for messages.
    pub(super) fn describe(&self) -> &'static str {
        match self.node {
            Node::Null => "null",
            Node::Bool(_) => "a boolean",
            Node::Int(_) | Node::UInt(_) | Node::Float(_) => "a number",
            Node::Str(_) => "a string",
            Node::Seq(_) => "a list",
            Node::Map(_) => "a mapping",
        }
    }
}

/// Splits `a.b[0].c[x.y/z]` into its steps.
fn steps(path: &str) -> impl Iterator<Item = &str> {
    let mut rest = path;
    std::iter::from_fn(move || {
        rest = rest.strip_prefix('.').unwrap_or(rest);
        if rest.is_empty() {
            return None;
        }
        if let Some(inner) = rest.strip_prefix('[') {
            let (step, tail) = inner.split_once(']').unwrap_or((inner, ""));
            rest = tail;
            return Some(step);
        }
        let end = rest.find(['.', '[']).unwrap_or(rest.len());
        let (step, tail) = rest.split_at(end);
        rest = tail;
        Some(step)
    })
}

fn options() -> serde_saphyr::Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_documents: 64,
            max_nodes: 100_000,
            max_aliases: 1_000,
            max_depth: 64,
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: 20_000,
        },
        duplicate_keys: DuplicateKeyPolicy::Error,
        merge_keys: MergeKeyPolicy::Merge,
        legacy_octal_numbers: true,
        with_snippet: false,
    }
}

fn syntax(error: &serde_saphyr::Error) -> ManifestError {
    let at = error.location().map(position).unwrap_or_default();
    let text = error.without_snippet().to_string();
    let line = text.lines().next().unwrap_or_default();
    // The place is told by ourselves, and options of the parser are no way out for a user.
    let message = line.split(" at line ").next().unwrap_or_default();
    let message = message.split(", set DuplicateKeyPolicy").next();
    let message = message.unwrap_or_default().to_owned();
    let lower = message.to_lowercase();
    let limits = ["budget", "limit exceeded", "recursive references"];
    if limits.iter().any(|limit| lower.contains(limit)) {
        return ManifestError::Bomb { at, message };
    }
    let (field, message) = match message.strip_prefix("duplicate mapping key: ") {
        Some(key) => (
            key.to_owned(),
            "duplicate key; keep one of the two".to_owned(),
        ),
        None => (String::new(), message),
    };
    ManifestError::Syntax(Problem { field, at, message })
}

fn position(location: serde_saphyr::Location) -> Position {
    Position {
        line: location.line(),
        column: location.column(),
    }
}

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = Spanned::<Node>::deserialize(deserializer)?;
        Ok(Self {
            at: position(spanned.referenced),
            node: spanned.value,
        })
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value that JSON can express")
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_none<E>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Node, D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Node, E> {
        Ok(Node::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Node, E> {
        Ok(Node::Int(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Node, E> {
        Ok(i64::try_from(value).map_or(Node::UInt(value), Node::Int))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Node, E> {
        // `1.0` and `1e3` are whole numbers, as in the JSON that upstream makes of them.
        let whole = value.to_string().parse();
        Ok(whole.map_or(Node::Float(value), Node::Int))
    }

    fn visit_str<E>(self, value: &str) -> Result<Node, E> {
        Ok(Node::Str(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Node, E> {
        Ok(Node::Str(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Node, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Node::Seq(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
        let mut entries: Vec<Entry> = Vec::new();
        let mut seen = HashSet::new();
        while let Some(key) = map.next_key::<Spanned<String>>()? {
            if !seen.insert(key.value.clone()) {
                return Err(A::Error::custom(format!("duplicate key {:?}", key.value)));
            }
            entries.push(Entry {
                at: position(key.referenced),
                key: key.value,
                value: map.next_value()?,
            });
        }
        Ok(Node::Map(entries))
    }
}
